"""Whole training steps on a GPU: recipes beside bf16 at three sizes, forward, backward and optimizer, compiled."""

import time
from collections.abc import Callable

import torch

from lpkit.assembly import build_model
from lpkit.bench.fp8_linear import fp8_gpu
from lpkit.bench.harness import ROUNDS, Result, paired, provenance
from lpkit.config import Config
from lpkit.nn.transformer import cross_entropy
from lpkit.precision.backends import BACKENDS
from lpkit.precision.recipes import RECIPES
from lpkit.precision.transform import LowPrecision

SIZES = ((12, 768, 12, 16), (24, 1536, 16, 8), (26, 1664, 13, 8))   # layers, width, heads, sequences of 1024 tokens
COMPARED = ("fp8-tensorwise", "fp8-rowwise")
LOSS_TOLERANCE = 0.03   # relative, after as many steps as there are rounds, on the same batches


def run(rounds: int = ROUNDS) -> list[Result]:
    device = fp8_gpu()
    return [result for size in SIZES for result in _race(size, device, rounds)]


def _race(size: tuple[int, int, int, int], device: torch.device, rounds: int) -> list[Result]:
    layers, width, heads, batch = size
    config = Config().replace({"model.layers": layers, "model.width": width, "model.heads": heads, "model.vocab": 50_304,
                               "model.context": 1024, "batch": batch})
    names = ("bf16", *(name for name in COMPARED if not BACKENDS["scaled_mm"].why_not(name, RECIPES[name], device)))
    updates = {name: _update(config, name, device) for name in names}
    rng = torch.Generator(device).manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for step in range(-3, rounds):      # three to compile and to warm up
        tokens = torch.randint(50_304, (batch, 1025), device=device, generator=rng)
        for name in names if step % 2 else reversed(names):
            torch.cuda.synchronize()
            start = time.perf_counter()
            losses[name] = updates[name](tokens)
            if step >= 0:
                seconds[name].append(time.perf_counter() - start)
    for name in names:
        assert abs(losses[name] / losses["bf16"] - 1) < LOSS_TOLERANCE, f"{name}: loss {losses[name]:.3f}, bf16 {losses['bf16']:.3f}"
    facts = provenance(["torch", "triton"], torch.cuda.get_device_name(device)) | {"loss": losses}
    return [paired("fp8-step", ours=seconds[name], peer=seconds["bf16"], peer_name="bf16", facts=facts,
                   case=f"{name}, {layers} x {width}, {batch} x 1024 tokens") for name in names if name != "bf16"]


def _update(config: Config, name: str, device: torch.device) -> Callable[[torch.Tensor], float]:
    transforms = () if name == "bf16" else (LowPrecision(recipe=RECIPES[name], backend=BACKENDS["scaled_mm"]),)
    model = build_model(config, device, transforms=transforms)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def update(tokens: torch.Tensor) -> float:
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return update
