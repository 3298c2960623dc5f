"""Whole training steps on a GPU, compiled: recipes and the advisor's choice beside bf16.

The choice is what `lpkit.studies.advice` says before anything is timed, by formula or with a
recorded `fp8-linear`; an earlier record of this bench would be its own answer, and is not shown to
it. It must not be slower than the fastest of all that were timed: at least LEAST of its speed.
"""

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lpkit import hardware
from lpkit.bench.fp8_linear import fp8_gpu
from lpkit.bench.harness import ROUNDS, Result, last_losses, paired, provenance, steps_in_turns
from lpkit.config import Config
from lpkit.precision.backends import BACKENDS
from lpkit.studies.advice import MEASURED, Advice, advise, case_name, catalogued
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import RandomTokens, Training

# layers, width, heads, sequences of 1024 tokens
SIZES = ((12, 768, 12, 16), (24, 1536, 16, 8), (26, 1664, 13, 8))
BASE, COMPARED = "bf16", ("fp8-tensorwise", "fp8-rowwise")
LEAST = 0.99            # of the fastest one's speed, by the advisor's choice
LOSS_TOLERANCE = 0.03   # relative, after as many steps as there are rounds, on the same tokens
WARM_UP = 3             # steps


def run(rounds: int = ROUNDS) -> list[Result]:
    device = fp8_gpu()
    name = torch.cuda.get_device_name(device)
    configs = [Config().replace({"model.layers": layers, "model.width": width, "model.heads": heads,
                                 "model.vocab": 50_304, "model.context": 1024,
                                 "global_batch": batch}) for layers, width, heads, batch in SIZES]
    return compare(configs, device, catalogued(name) or hardware.machine(str(device)), rounds,
                   facts=provenance(["torch", "triton"], name))


def compare(configs: Sequence[Config], device: torch.device, on: Machine, rounds: int, *,
            facts: dict[str, Any]) -> list[Result]:
    """Each config is raced alone. `facts` gets the losses and the advice of each, by its size."""
    facts |= {"losses": {}, "advice": {}}
    return [result for config in configs for result in _race(config, device, on, rounds, facts)]


def runs_here(name: str, device: torch.device) -> bool:
    return (bool(RECIPES[name].products)
            and not BACKENDS["scaled_mm"].why_not(name, RECIPES[name], device))


def advised(config: Config, on: Machine, device: torch.device) -> Advice:
    """Among what PyTorch's own products run on this device."""
    with tempfile.TemporaryDirectory(prefix="lpkit-fp8-step-") as folder:
        for path in MEASURED.glob("fp8-linear-*.json"):
            shutil.copy(path, folder)
        return advise(config, on, recipes=[name for name in RECIPES if runs_here(name, device)],
                      measured=Path(folder))


def _race(config: Config, device: torch.device, on: Machine, rounds: int,
          facts: dict[str, Any]) -> list[Result]:
    advice, data, runs = advised(config, on, device), RandomTokens(config, device), {}
    config = config.replace({"system.device": str(device)})
    compared = [name for name in COMPARED if runs_here(name, device)]
    for name in dict.fromkeys((BASE, *compared, advice.choice)):
        backend = "scaled_mm" if RECIPES[name].products else "auto"
        runs[name] = Training.build(config.replace({"precision.recipe": name,
                                                    "precision.backend": backend}), data=data)
    seconds, losses = steps_in_turns(runs, rounds, warm_up=WARM_UP)
    _, _, size = case_name("", config).partition(", ")
    facts["losses"][size] = last_losses(losses, BASE, last=1, tolerance=LOSS_TOLERANCE)
    facts["advice"][size] = {"choice": advice.choice, "sentence": advice.sentence}
    fastest = min(runs, key=lambda name: statistics.median(seconds[name]))
    others = [paired("fp8-step", ours=seconds[name], peer=seconds[BASE], peer_name=BASE,
                     facts=facts, case=case_name(name, config)) for name in runs if name != BASE]
    return [*others, paired("fp8-step", ours=seconds[advice.choice], peer=seconds[fastest],
                            peer_name=f"the fastest of these, {fastest}", target=LEAST, facts=facts,
                            case=f"advised: {case_name(advice.choice, config)}")]
