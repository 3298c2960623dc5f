"""Whole training steps on a GPU, forward, backward and optimizer, compiled: recipes and the
advisor's choice beside bf16.

The choice is what `lpkit.precision.advise` says before anything is timed, by formula or with a
recorded `fp8-linear`; an earlier record of this bench would be its own answer, and is not shown to
it. It must not be slower than the fastest of all that were timed: at least LEAST of its speed.
"""

import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lpkit import hardware
from lpkit.bench.fp8_linear import fp8_gpu
from lpkit.bench.harness import ROUNDS, Result, paired, provenance, steps_in_turns
from lpkit.config import Config
from lpkit.nn.transformer import cross_entropy
from lpkit.precision.backends import BACKENDS
from lpkit.precision.compute import autocast
from lpkit.precision.linear import advance
from lpkit.precision.transform import LowPrecision
from lpkit.studies.advice import MEASURED, Advice, advise, case_name, catalogued
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES
from lpkit.training.build import initialised, transformed

# layers, width, heads, sequences of 1024 tokens
SIZES = ((12, 768, 12, 16), (24, 1536, 16, 8), (26, 1664, 13, 8))
BASE, COMPARED = "bf16", ("fp8-tensorwise", "fp8-rowwise")
LEAST = 0.99            # of the fastest one's speed, by the advisor's choice
LOSS_TOLERANCE = 0.03   # relative, after as many steps as there are rounds, on the same batches
WARM_UP = 3             # steps


def run(rounds: int = ROUNDS) -> list[Result]:
    device = fp8_gpu()
    configs = [Config().replace({"model.layers": layers, "model.width": width, "model.heads": heads,
                                 "model.vocab": 50_304, "model.context": 1024,
                                 "global_batch": batch}) for layers, width, heads, batch in SIZES]
    name = torch.cuda.get_device_name(device)
    return compare(configs, device, catalogued(name) or hardware.machine(str(device)), rounds,
                   transform=_compile, facts=provenance(["torch", "triton"], name))


def compare(configs: Sequence[Config], device: torch.device, on: Machine, rounds: int, *,
            facts: dict[str, Any], transform: Callable[[torch.nn.Module],
                                                       None] = lambda model: None) -> list[Result]:
    """Each config is raced alone. `facts` gets the losses and the advice of each, by its size."""
    facts |= {"losses": {}, "advice": {}}
    return [result for config in configs
            for result in _race(config, device, on, rounds, transform, facts)]


def _compile(model: torch.nn.Module) -> None:
    model.compile()


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
          transform: Callable[[torch.nn.Module], None], facts: dict[str, Any]) -> list[Result]:
    advice, m = advised(config, on, device), config.model
    names = list(dict.fromkeys((BASE, *(name for name in COMPARED if runs_here(name, device)),
                                advice.choice)))
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rng = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(m.vocab, (WARM_UP + rounds, config.global_batch, m.context + 1),
                           device=device, generator=rng)
    updates = {name: _update(config, name, tokens, transform) for name in names}
    seconds, curves = steps_in_turns(updates, WARM_UP + rounds, warm_up=WARM_UP, sync=sync)
    losses = {name: curve[-1] for name, curve in curves.items()}
    for name in names:
        assert abs(losses[name] / losses[BASE]
                   - 1) < LOSS_TOLERANCE, f"{name}: loss {losses[name]:.3f}, {BASE} {losses[BASE]:.3f}"
    _, _, size = case_name("", config).partition(", ")
    facts["losses"][size], facts["advice"][size] = losses, {"choice": advice.choice,
                                                            "sentence": advice.sentence}
    fastest = min(names, key=lambda name: statistics.median(seconds[name]))
    return [*(paired("fp8-step", ours=seconds[name], peer=seconds[BASE], peer_name=BASE,
                     facts=facts, case=case_name(name, config)) for name in names if name != BASE),
            paired("fp8-step", ours=seconds[advice.choice], peer=seconds[fastest], target=LEAST,
                   facts=facts, peer_name=f"the fastest of these, {fastest}",
                   case=f"advised: {case_name(advice.choice, config)}")]


def _update(config: Config, name: str, tokens: torch.Tensor,
            transform: Callable[[torch.nn.Module], None]) -> Callable[[int], float]:
    """A function that takes one step on `tokens[step]`, and returns its loss."""
    recipe, device = RECIPES[name], tokens.device
    low = (LowPrecision(recipe=recipe, backend=BACKENDS["scaled_mm"]),) if recipe.products else ()
    model = transformed(initialised(config, device), low)
    transform(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def update(step: int) -> float:
        with autocast(recipe, device):
            loss = cross_entropy(model(tokens[step, :, :-1]), tokens[step, :, 1:])
        loss.backward()
        advance(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return update
