"""A small model grows by each row: nats after the same FLOPs, beside a large one from the initialisation.

    lpkit bench growth --out data/measured      a quarter of an hour

The small model was trained before, and costs nothing here: it is there. What fits a map (`lessons.ligo`) is paid for out of the same FLOPs. Rates and
schedules are alike; one is tried for all. `rounds`: seeds, five at least, of the small model, the order of the text and the draws.
"""

import tempfile
from pathlib import Path

from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

import lpkit
from lessons.ligo import fit
from lpkit.config import Config
from lpkit.predict.flops import training_flops
from lpkit.training.training import Training
from tests.bench.harness import Result, paired

SMALL = lpkit.preset("cpu-3m").replace({
    "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 64, "global_batch": 8, "grad_accum_steps": 1, "eval_every": 0,
    "eval_batches": 32, "checkpoint_every": 0, "schedule.warmup_steps": 20, "optimizer.lr": 3e-3, "precision.recipe": "fp32", "system.device": "cpu",
    "system.threads": 1, "system.compile": False, "steps": 400})
DEEP, WIDE, UPDATES, FIT = {"model.layers": 4}, {"model.width": 128, "model.heads": 4}, 200, 50
SCRATCH = "from the initialisation"
# The large model, the row of start.grow, and what is beside it
ARMS = {"deeper": (DEEP, {"stack": {}, "stack, masked": {"governors": "masked-growth"}, "interpolate": {}, "identity-depth": {}, "ligo": {}}),
        "wider": (WIDE, {"bert2bert": {}, "ligo": {}})}


def run(rounds: int, updates: int = UPDATES, fitted: int = FIT) -> list[Result]:
    nats, facts = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(max(5, rounds // 2)):
            small = lpkit.train(SMALL.replace({"seed": seed}), out=Path(folder) / f"small{seed}")
            for name, (sizes, rows) in ARMS.items():
                whole = small.config.replace({**sizes, "steps": updates})
                nats.setdefault((name, SCRATCH), []).append(after(whole))
                for row, beside in rows.items():
                    grow, spent = {"name": row.partition(",")[0]}, 0.0
                    if grow["name"] == "ligo":
                        grow["file"] = f"{folder}/maps.safetensors"
                        with FlopCounterMode(display=False) as counter:
                            maps = fit(small, whole, fitted)
                        save_file(maps, grow["file"])
                        spent = counter.get_total_flops() / training_flops(whole.model, batch=whole.global_batch)
                    grown = whole.replace({"start.run": str(small.path), "start.grow": grow, "steps": round(updates - spent), **beside})
                    nats.setdefault((name, row), []).append(after(grown))
                    facts[name, row] = {"updates": grown.steps, "small_nats": small.summary["val_loss"]}
    return [paired("growth", case=f"{name}: {row}, after the FLOPs of {updates} updates", ours=ours, peer=nats[name, SCRATCH], peer_name=SCRATCH,
                   better="lower", unit="nats", facts=facts[name, row]) for (name, row), ours in nats.items() if row != SCRATCH]


def after(config: Config) -> float:
    training = Training.build(config)
    for step in range(config.steps):
        training.update(step)
    return training.evaluate()
