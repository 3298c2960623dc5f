"""What Newton-Schulz takes beside forward and backward: Muon's FLOPs predict it, or do not.

    lpkit bench muon-overhead --rounds 15 --out data/measured      2 minutes, beside nothing else

Muon's optimizer step less AdamW's of the same model, in turns, over forward and backward; and
beside it the FLOPs of Newton-Schulz over those of forward and backward, as the kit predicts them.
`ratio` is the measured share over the predicted one: within 15% was aimed at.
In float32 both multiply in one format; in bf16 forward and backward do, and Newton-Schulz does not
(lpkit.optim.muon).
"""

import torch

from lessons import l26_muon as lesson
from lessons.timing import by_phase
from lpkit.config import Config
from lpkit.measure.updates import Bench
from tests.bench.harness import Result, paired

SIZES = {"cpu-3m's width": {"model.layers": 4, "model.width": 256, "model.context": 256,
                            "global_batch": 2},
         "6 x 384": {"model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256,
                     "global_batch": 4}}
ON_A_GPU = {"12 x 768": {"model.layers": 12, "model.width": 768, "model.heads": 12,
                         "model.context": 1024, "model.vocab": 50_304,
                         "global_batch": 8}}
RECIPES = ("fp32", "bf16")
TARGET = 1.15       # at most


def run(rounds: int) -> list[Result]:
    gpu = torch.cuda.is_available()
    return [_case(size, changes, recipe, rounds, "cuda" if gpu else "cpu")
            for size, changes in (ON_A_GPU if gpu else SIZES).items() for recipe in RECIPES]


def _case(size: str, changes: dict, recipe: str, rounds: int, device: str) -> Result:
    base = Config().replace({**changes, "precision.recipe": recipe, "system.device": device,
                             "steps": rounds + 2})
    runs = {name: Bench(base.replace({"optimizer": name}), device) for name in ("adamw", "muon")}
    shares, passes = [], []
    for step in range(rounds + 2):
        seconds = {name: by_phase(run) for name, run in runs.items()}
        whole = sum(forward + backward for forward, backward, _ in seconds.values()) / 2
        if step > 1:        # the first touch memory and choose algorithms
            shares.append((seconds["muon"][2] - seconds["adamw"][2]) / whole)
            passes.append(whole)
    predicted = lesson.overhead(base.replace({"optimizer": "muon"}))
    return paired("muon-overhead", ours=shares, peer=[predicted] * len(shares),
                  peer_name="by FLOPs", better="lower", target=TARGET,
                  unit="of forward and backward", device=torch.cuda.get_device_name()
                  if device == "cuda" else None,
                  case=f"{size}, {base.tokens_per_step:,} tokens, {recipe}",
                  facts={"predicted": predicted, "bound": lesson.published(base), "passes": passes})
