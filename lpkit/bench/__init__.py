"""Every performance figure that the project claims, measured beside its peer in one process.

A benchmark is one file with `run(rounds) -> list[Result]`, one Result for each case and peer, and
one row below:

    from lpkit.bench.harness import ROUNDS, Result, race

    def run(rounds: int = ROUNDS) -> list[Result]:
        data = torch.rand(1 << 20)

        def check():                                    # in the same run, before any timing
            torch.testing.assert_close(ours(data), peer(data))

        return race("sum", ours=lambda: ours(data), peers={"torch.sum": lambda: peer(data)},
        check=check,
                    case="1Mi float32", target=1.2, packages=("torch",))

Nothing but the command line imports this room.
"""

BENCHES = {
    "attention-cpu": "lpkit.bench.attention_cpu",
    "fp8-linear": "lpkit.bench.fp8_linear",
    "fp8-step": "lpkit.bench.fp8_step",
    "import": "lpkit.bench.imports",
    "ledger": "lpkit.bench.ledger",
    "loader": "lpkit.bench.loader",
    "low-precision-cpu": "lpkit.bench.low_precision_cpu",
    "mx-qdq": "lpkit.bench.mx_qdq",
    "qdq": "lpkit.bench.qdq",
    "recipe-losses": "lpkit.bench.recipe_losses",
    "redraw": "lpkit.bench.redraw",
    "telemetry": "lpkit.bench.telemetry",
    "train-cpu": "lpkit.bench.train_cpu",
}
