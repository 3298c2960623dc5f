"""Every performance figure that the project claims, measured beside its peer in one process.

A benchmark is a function `(rounds) -> list[Result]`, one Result for each case and peer, and one row
below. Most of them call `race`, and `check` holds the contenders to each other before any timing:

    race("sum", ours=total, peers={"torch.sum": torch.sum}, over=[(data,)], check=check, target=1.2,
         case="1Mi float32", rounds=rounds)

Nothing but the command line imports this room.
"""

BENCHES = {     # module of this folder, and function
    "attention-cpu": "kernels:attention",
    "course": "course:run",
    "decode": "decode:run",
    "evidence": "evidence:run",
    "fp8-linear": "fp8:linear",
    "fp8-products": "fp8:products",
    "fp8-step": "fp8:step",
    "import": "imports:run",
    "kernels": "fused:fused",
    "launch": "launch:run",
    "ledger": "ledger:run",
    "linear-cross-entropy": "losses:run",
    "loader": "loader:run",
    "low-precision-cpu": "steps:low_precision_cpu",
    "mx-qdq": "kernels:mx_qdq",
    "planner": "planner:run",
    "published": "published:run",
    "qdq": "kernels:qdq",
    "recipe-losses": "recipe_losses:run",
    "reliability": "reliability:run",
    "telemetry": "steps:telemetry",
    "train-nanogpt": "nanogpt:run",
}
