"""What each recipe costs in loss: `cpu-3m` for 300 steps, the same batches, as many seeds as there are rounds.

The ratio is a recipe's validation loss over bf16's of the same seed: at most 1.01 for 8 bits, 1.025 for NVFP4.
Three seeds of all recipes take over an hour of two cores. fp16 is left out: a CPU without the instructions
computes it so slowly that the rest would wait for it.
"""

import tempfile
from pathlib import Path

from lpkit.bench.harness import Result, paired, provenance
from lpkit.handle import train
from lpkit.precision.recipes import RECIPES
from lpkit.presets import preset

STEPS, SEEDS = 300, 3
PEER = "bf16"
TARGETS = {"fp4": 1.025}    # by what the products run in; every other recipe: TARGET
TARGET = 1.01


def run(rounds: int = SEEDS, steps: int = STEPS) -> list[Result]:
    names = [PEER, *(name for name, recipe in RECIPES.items() if recipe.products)]
    losses: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(min(rounds, SEEDS)):
            for name in names:
                config = preset("cpu-3m").replace({"precision.recipe": name, "seed": seed, "steps": steps,
                                                   "eval_every": 0, "eval_batches": 32, "checkpoint_every": 0})
                losses[name].append(train(config, out=Path(folder) / f"{name}-{seed}").summary["val_loss"])
    facts = provenance(["torch"]) | {"steps": steps, "losses": losses}
    return [paired("recipe-losses", ours=losses[name], peer=losses[PEER], peer_name=PEER, case=name, better="lower",
                   unit="nats per token", target=TARGETS.get(RECIPES[name].dtype, TARGET), facts=facts)
            for name in names if name != PEER]
