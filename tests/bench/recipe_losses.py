"""What each recipe costs in loss: `cpu-3m` for 300 steps, the same batches, as many seeds as there
are rounds.

The ratio is a recipe's validation loss over bf16's of the same seed: at most 1.01 for 8 bits, 1.025
for NVFP4. Nothing is timed: runs share the cores, one thread each. Three seeds of all recipes take
over an hour of two cores; interrupted, the same command goes on where it was (runs/recipe-losses).
fp16 is left out: a CPU without the instructions computes it so slowly that the rest would wait for
it.
"""

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from lpkit.machine_facts import cores
from lpkit.presets import preset
from lpkit.techniques.recipes import RECIPES
from lpkit.training.background import train
from tests.bench.harness import Result, paired

STEPS, SEEDS = 300, 3
FOLDER = Path("runs/recipe-losses")
PEER = "bf16"
TARGETS = {"fp4": 1.025}    # by what the products run in; every other recipe: TARGET
TARGET = 1.01


def run(rounds: int = SEEDS, steps: int = STEPS) -> list[Result]:
    names = [PEER, *(name for name, recipe in RECIPES.items() if recipe.products)]
    seeds = range(min(rounds, SEEDS))
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        futures = {(name, seed): pool.submit(_loss, name, seed, steps) for seed in seeds
                   for name in names}
        losses = {name: [futures[name, seed].result() for seed in seeds] for name in names}
    shutil.rmtree(FOLDER)
    return [paired("recipe-losses", ours=losses[name], peer=losses[PEER], peer_name=PEER, case=name,
                   better="lower", target=TARGETS.get(RECIPES[name].dtype, TARGET),
                   unit="nats per token", facts={"steps": steps, "losses": losses})
            for name in names if name != PEER]


def _loss(name: str, seed: int, steps: int) -> float:
    config = preset("cpu-3m").replace({"precision.recipe": name, "seed": seed, "steps": steps,
                                       "system.device": "cpu", "system.threads": 1,
                                       "eval_every": 0, "eval_batches": 32,
                                       "checkpoint_every": 50})
    path = FOLDER / f"{name}-{seed}-{steps}"
    return train(config, out=path, resume=path.exists()).summary["val_loss"]
