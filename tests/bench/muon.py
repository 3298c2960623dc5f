"""What Newton-Schulz takes beside forward and backward: Muon's FLOPs predict it, or do not.

    lpkit bench muon-overhead --rounds 15 --out data/measured      2 minutes, beside nothing else

Muon's optimizer step less AdamW's of the same model, in turns, over forward and backward; and beside it the FLOPs of Newton-Schulz
over those of forward and backward, as the kit predicts them. `ratio` is the measured share over the predicted one: within 15% was aimed at.
In float32 both multiply in one format; in bf16 forward and backward do, and Newton-Schulz does not (lpkit.optim.muon).
"""

from contextlib import contextmanager
from time import perf_counter

import torch

from lessons import l20_optimizers as lesson
from lpkit import hardware
from lpkit.config import Config
from lpkit.training.training import RandomTokens, Training
from tests.bench.harness import Result, paired

SIZES = {"cpu-3m's width": {"model.layers": 4, "model.width": 256, "model.context": 256, "global_batch": 2},
         "6 x 384": {"model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256, "global_batch": 4}}
ON_A_GPU = {"12 x 768": {"model.layers": 12, "model.width": 768, "model.heads": 12, "model.context": 1024, "model.vocab": 50_304,
                         "global_batch": 8, "system.compile": False}}
RECIPES = ("fp32", "bf16")
TARGET = 1.15       # at most


def run(rounds: int) -> list[Result]:
    gpu = torch.cuda.is_available()
    return [_case(size, changes, recipe, rounds, "cuda" if gpu else "cpu")
            for size, changes in (ON_A_GPU if gpu else SIZES).items() for recipe in RECIPES]


def _case(size: str, changes: dict, recipe: str, rounds: int, device: str) -> Result:
    base = Config().replace({**changes, "precision.recipe": recipe, "system.device": device, "steps": rounds + 2})
    data = RandomTokens(base, device) if device == "cuda" else None
    runs = {name: Training.build(base.replace({"optimizer": name}), data=data) for name in ("adamw", "muon")}
    shares, passes = [], []
    for step in range(rounds + 2):
        seconds = {name: _update(run, step) for name, run in runs.items()}
        whole = (sum(one["forward"] + one["backward"] for one in seconds.values())) / 2
        if step > 1:        # the first touch memory and choose algorithms
            shares.append((seconds["muon"]["optimizer"] - seconds["adamw"]["optimizer"]) / whole)
            passes.append(whole)
    predicted = lesson.overhead(base.replace({"optimizer": "muon"}))
    return paired("muon-overhead", ours=shares, peer=[predicted] * len(shares), peer_name="by FLOPs", better="lower", target=TARGET,
                  unit="of forward and backward", device=torch.cuda.get_device_name() if device == "cuda" else None, case=f"{size}, {base.tokens_per_step:,} tokens, {recipe}",
                  facts={"predicted": predicted, "bound": lesson.published(base), "passes": passes})


def _update(run: Training, step: int) -> dict[str, float]:
    seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    synchronize = hardware.synchronised(lambda: None, run.device)

    @contextmanager
    def phase(name: str):
        synchronize()
        since = perf_counter()
        yield
        synchronize()
        seconds[name] = seconds.get(name, 0.0) + perf_counter() - since

    run.update(step, phases=phase)
    return seconds
