"""Every performance figure that the project claims, measured beside its peer in one process.

A benchmark is a function `(rounds) -> list[Result]`, one Result for each case and peer, and one row
below:

    def total(rounds: int = ROUNDS) -> list[Result]:
        data = torch.rand(1 << 20)

        def check():                                    # in the same run, before any timing
            torch.testing.assert_close(ours(data), peer(data))

        return race("sum", ours=lambda: ours(data), peers={"torch.sum": lambda: peer(data)},
                    check=check, case="1Mi float32", target=1.2, rounds=rounds)

Nothing but the command line imports this room.
"""

BENCHES = {     # module of this folder, and function
    "attention-cpu": "kernels:attention",
    "fp8-linear": "fp8:linear",
    "fp8-step": "fp8:step",
    "import": "imports:run",
    "ledger": "ledger:run",
    "loader": "loader:run",
    "low-precision-cpu": "steps:low_precision_cpu",
    "mx-qdq": "kernels:mx_qdq",
    "qdq": "kernels:qdq",
    "recipe-losses": "recipe_losses:run",
    "redraw": "redraw:run",
    "telemetry": "steps:telemetry",
    "train-cpu": "steps:train_cpu",
}
