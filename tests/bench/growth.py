"""A small model grows by each row: nats after the same FLOPs, beside a large one from the
initialisation.

    lpkit bench growth --out data/measured      a quarter of an hour

The small model was trained before, and costs nothing here: it is there. Rates and schedules are
alike; one is tried for all. `rounds`: seeds, five at least, of the small model, the order of the
text and the draws.
"""

import tempfile
from pathlib import Path

import lpkit
from lpkit.config import Config
from lpkit.training.training import Training
from tests.bench.harness import Result, paired

SMALL = lpkit.preset("cpu-3m").replace({
    "imports": "lessons.rows.depth,lessons.rows.growth",
    "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 64, "global_batch": 8,
    "grad_accum_steps": 1, "eval_every": 0,
    "eval_batches": 32, "checkpoint_every": 0, "schedule.warmup_steps": 20, "optimizer.lr": 3e-3,
    "precision.recipe": "fp32", "system.device": "cpu",
    "system.threads": 1, "system.compile": False, "steps": 400})
DEEP, WIDE, UPDATES = {"model.layers": 4}, {"model.width": 128, "model.heads": 4}, 200
SCRATCH = "from the initialisation"
# The large model, the row of start.grow, and what is beside it
ARMS = {"deeper": (DEEP, {"stack": {}, "stack, masked": {"governors": "masked-growth"},
                          "interpolate": {}, "identity-depth": {}}),
        "wider": (WIDE, {"bert2bert": {}})}


def run(rounds: int, updates: int = UPDATES) -> list[Result]:
    nats, facts = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(max(5, rounds // 2)):
            small = lpkit.train(SMALL.replace({"seed": seed}), out=Path(folder) / f"small{seed}")
            for name, (sizes, rows) in ARMS.items():
                whole = small.config.replace({**sizes, "steps": updates})
                nats.setdefault((name, SCRATCH), []).append(after(whole))
                for row, beside in rows.items():
                    grown = whole.replace({"start.run": str(small.path),
                                           "start.grow": row.partition(",")[0], **beside})
                    nats.setdefault((name, row), []).append(after(grown))
                    facts[name, row] = {"updates": grown.steps,
                                        "small_nats": small.summary["val_loss"]}
    return [paired("growth", case=f"{name}: {row}, after the FLOPs of {updates} updates", ours=ours,
                   peer=nats[name, SCRATCH], peer_name=SCRATCH,
                   better="lower", unit="nats", facts=facts[name, row])
        for (name, row), ours in nats.items() if row != SCRATCH]


def after(config: Config) -> float:
    training = Training.build(config)
    for step in range(config.steps):
        training.update(step)
    return training.evaluate()
