"""FP8 on a GPU, compiled, beside bf16: one Linear with its casts, and whole training steps.

`linear` casts by the kit's kernels, as a run does, and races the same Linear with the casts'
definitions, which the compiler fuses, and torchao's tensorwise; `products` the three of a Linear
without their casts, by how sums are kept. `step` races recipes and the advisor's choice: what
`lpkit.measure.advice` says before anything is timed, by formula or with a recorded `fp8-linear`; an
earlier record of `fp8-step` would be its own answer, and is not shown to it. The choice must not be
slower than the fastest of all that were timed: at least LEAST of its speed.
"""

import copy
import gc
import itertools
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lpkit import hardware
from lpkit.config import Config
from lpkit.errors import ConfigError, pick
from lpkit.execution.kernels import watched
from lpkit.kernels import jit
from lpkit.kernels.choose import candidates, choose
from lpkit.measure.advice import Advice, advise, case_name
from lpkit.precision.backends import BACKENDS
from lpkit.predict.evidence import MEASURED, catalogued
from lpkit.techniques.kernels import KERNELS
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import RandomTokens, Training
from tests.bench import harness
from tests.bench.harness import ROUNDS, Result, last_losses, paired, race, steps_in_turns

# M tokens, K, N: times the speed of bf16, at least
SHAPES = {(65_536, 1664, 6656): 1.25, (16_384, 4096, 16_384): 1.5}
SMALLER = ((16_384, 768, 3072), (8192, 4096, 28_672))       # GPT-2 124M's, Llama 8B's
TORCHAO_TARGET = 1.08
RECIPE, BUFFERS = "fp8-tensorwise", 4
OURS, FUSED = "scaled_mm", "scaled_mm, casts by the compiler"
VERSION, FEW = "triton", 256        # rows of a tensor on which a cast is verified
# of the product of two E4M3 tensors of a normal distribution, some 28 dB each, against bf16
SQNR_FLOOR_DB = 22.0
PRODUCT_FLOOR_DB = 12.0     # of 4 bits too

# layers, width, heads, sequences of 1024 tokens
SIZES = ((26, 1664, 13, 8), (4, 4096, 32, 8), (24, 1536, 16, 8), (12, 768, 12, 16))
BASE, COMPARED = "bf16", ("fp8-tensorwise", "fp8-rowwise")
LEAST = 0.99            # of the fastest one's speed, by the advisor's choice
LOSS_TOLERANCE = 0.03   # relative, after as many steps as there are rounds, on the same tokens
WARM_UP = 3             # steps
# so that losses are those of the same weights, whatever chaos there would be
CAREFUL_LR = 1e-5


def linear(rounds: int = ROUNDS) -> list[Result]:
    device = fp8_gpu()
    return [result for shape in SHAPES for result in _linear(shape, device, rounds)]


def products(rounds: int = ROUNDS) -> list[Result]:
    device = fp8_gpu()
    return [result for shape in (*SHAPES, *SMALLER) for result in _products(shape, device, rounds)]


def _products(shape: tuple[int, int, int], device: torch.device, rounds: int) -> list[Result]:
    """Each kind of product once, under its first recipe, beside bf16's."""
    (M, K, N), results = shape, []
    kinds = {RECIPES[name].products["y"]: name for name in reversed(runs_here(device))}.values()
    for product, (m, k, n) in {"y": (M, K, N), "dx": (M, N, K), "dw": (N, M, K)}.items():
        a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
        for name, fast in itertools.product(kinds, (True, False)):
            results += race(
                "fp8-products", ours=_product(name, a, b, fast), rounds=rounds,
                peers={"bf16": partial(torch.mm, a, b.T)}, sample_seconds=0.05,
                case=f"{product} {m}x{k}x{n}, {name}, {'fast' if fast else 'full'} accumulation",
                sync=hardware.synchronised(lambda: None, device), device=_name(device))
    return results


def _product(name: str, a: Tensor, b: Tensor, fast: bool) -> Callable[[], Tensor]:
    """AssertionError where it is not the product."""
    by = BACKENDS["scaled_mm"]
    cast_a, cast_b = (by.cast(t, replace(cast, rounding="nearest-even"), t.dtype, amax=None,
                              noise=None)
                      for t, cast in zip((a, b), RECIPES[name].products["y"]))
    run = partial(by.product, cast_a, cast_b, torch.bfloat16, fast=fast)
    _near(name, run(), a @ b.T, PRODUCT_FLOOR_DB)
    return run


def _near(name: str, got: Tensor, want: Tensor, floor_db: float) -> None:
    noise = (got.float() - want.float()).norm() / want.float().norm()
    sqnr_db = -20 * noise.log10()
    assert sqnr_db > floor_db, f"{name} has {sqnr_db:.1f} dB"


def _name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def fp8_gpu() -> torch.device:
    """Raises ConfigError where no GPU multiplies FP8."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a GPU that multiplies FP8 (compute capability 8.9 "
                          "or newer), and PyTorch sees none; low-precision-cpu runs here")
    device = torch.device("cuda")
    if problem := BACKENDS["scaled_mm"].why_not(RECIPE, RECIPES[RECIPE], device):
        raise ConfigError(f"this benchmark needs FP8 products: {problem}")
    return device


def _linear(shape: tuple[int, int, int], device: torch.device, rounds: int) -> list[Result]:
    M, K, N = shape
    torch.manual_seed(0)
    torch.compiler.reset()      # else sizes that differ from the last shape's become dynamic
    layers = {"bf16": nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)}
    for name in (OURS, FUSED, "torchao"):
        backend = BACKENDS[name.partition(",")[0]]
        if not backend.why_not(RECIPE, RECIPES[RECIPE], device):
            # a weight of its own: `wrap` shares it
            layers[name] = backend.wrap(copy.deepcopy(layers["bf16"]), RECIPES[RECIPE],
                                        name="bench", seed=0)
    inputs = [(torch.randn(M, K, device=device, dtype=torch.bfloat16, requires_grad=True),)
              for _ in range(BUFFERS)]
    d_out = torch.randn(M, N, device=device, dtype=torch.bfloat16)
    cast_by_kernels(layers[OURS], inputs[0][0][:FEW], d_out[:FEW])
    compiled = {name: jit.compiled(layer) for name, layer in layers.items()}

    def both(name: str, x: Tensor) -> tuple[Tensor, ...]:
        y = compiled[name](x)
        return (y, *torch.autograd.grad(y, (x, layers[name].weight), d_out))

    def check():
        want = both("bf16", *inputs[0])
        for name in layers.keys() - {"bf16"}:
            results = zip(("y", "dx", "dw"), both(name, *inputs[0]), want, strict=True)
            for what, got, expected in results:
                _near(f"{name}: {what}", got, expected, SQNR_FLOOR_DB)

    contenders = {name: partial(both, name) for name in layers}
    return race("fp8-linear", ours=contenders.pop(OURS), peers=contenders, over=inputs,
                check=check, target={"bf16": SHAPES.get(shape), "torchao": TORCHAO_TARGET,
                                     FUSED: None},
                case=f"{M}x{K} @ {K}x{N}", rounds=rounds, device=_name(device),
                sync=hardware.synchronised(lambda: None, device), sample_seconds=0.05,
                packages=("torch", "torchao", "triton"))


def cast_by_kernels(layer: nn.Module, x: Tensor, d_out: Tensor) -> None:
    """The kit's own stand in `layer`, as `lpkit.execution.kernels` puts them there. Raises
    ConfigError for one that differs from its definition on what the layer casts of these rows."""
    seen: dict[str, dict[tuple, tuple]] = {}
    with watched(layer, seen):
        torch.autograd.grad(layer(x), (x, layer.weight), d_out)
    for attribute, name in layer.arithmetic.kernels.items():
        if name in seen:
            kernel = KERNELS[name].load()
            used = choose(name, kernel, VERSION, list(seen[name].values())).choice.used
            setattr(layer.arithmetic, attribute, candidates(kernel)[used])


def step(rounds: int = ROUNDS, *, only: int | None = None, pieces: str | None = None
         ) -> list[Result]:
    """Measure whole updates in FP8 and bf16, and whether the advice was right.

    only:   the number of sizes, the largest first
    pieces: widths, separated by commas; None: all. Raises ConfigError for another width.
    """
    device = fp8_gpu()
    widths = {str(size[1]): size for size in SIZES}
    sizes = SIZES[:only] if pieces is None else [
        pick(widths, width.strip(), "width of fp8-step") for width in pieces.split(",")]
    name = torch.cuda.get_device_name(device)
    configs = [Config().replace({"model.layers": layers, "model.width": width, "model.heads": heads,
                                 "model.vocab": 50_304, "model.context": 1024,
                                 "global_batch": batch}) for layers, width, heads, batch
        in sizes]
    return compare(configs, device, catalogued(name) or hardware.machine(str(device)), rounds,
                   facts=harness.provenance(["torch", "triton"], name))


def compare(configs: Sequence[Config], device: torch.device, on: Machine, rounds: int, *,
            facts: dict[str, Any]) -> list[Result]:
    """Each config is raced alone. `facts` gets the losses and the advice of each, by its size, and
    by recipe the versions of its kernels and where its time goes on a GPU."""
    facts |= {"losses": {}, "advice": {}, "chosen": {}, "milliseconds": {}}
    results, native = [], runs_here(device)
    for config in configs:
        gc.collect()        # a graph holds the memory that it was captured in
        config = config.replace({"system.device": str(device), "optimizer.lr": CAREFUL_LR})
        advice, data, runs = advised(config, on, device), RandomTokens(config, device), {}
        for name in dict.fromkeys((BASE, *COMPARED, advice.choice)):
            if name in (BASE, *native):
                backend = "scaled_mm" if name in native else "auto"
                changes = {"precision.recipe": name, "precision.backend": backend}
                runs[name] = Training.build(config.replace(changes), data=data)
        seconds, losses = steps_in_turns(runs, rounds, warm_up=WARM_UP)
        _, _, size = case_name("", config).partition(", ")
        facts["losses"][size] = last_losses(losses, BASE, last=1, tolerance=LOSS_TOLERANCE)
        facts["advice"][size] = {"choice": advice.choice, "sentence": advice.sentence}
        facts["chosen"][size] = {name: run.decisions.record for name, run in runs.items()}
        facts["milliseconds"][size] = {name: _profiled(run) for name, run in runs.items()
                                       if device.type == "cuda"}
        results += [paired("fp8-step", ours=seconds[name], peer=seconds[BASE], peer_name=BASE,
                           case=case_name(name, config), facts=facts)
                    for name in runs if name != BASE]
        fastest = min(runs, key=lambda name: statistics.median(seconds[name]))
        results.append(paired(
            "fp8-step", ours=seconds[advice.choice], peer=seconds[fastest], target=LEAST,
            peer_name=f"the fastest of these, {fastest}", facts=facts,
            case=f"advised: {case_name(advice.choice, config)}"))
    return results


def _profiled(run: Training, rows: int = 16) -> dict[str, float]:
    """Milliseconds of an update by kernel of the GPU, the longest ones, and of all of them."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run.update(0)
        torch.cuda.synchronize()
    spent = {event.key[:100]: event.self_device_time_total / 1e3
             for event in profiler.key_averages()}
    longest = sorted(spent, key=spent.__getitem__, reverse=True)[:rows]
    return {"all": sum(spent.values())} | {name: spent[name] for name in longest}


def runs_here(device: torch.device) -> list[str]:
    """The recipes that PyTorch's own products run."""
    return [name for name, row in RECIPES.items()
            if not BACKENDS["scaled_mm"].why_not(name, row, device)]


def advised(config: Config, on: Machine, device: torch.device) -> Advice:
    """Among what runs here, and as if this bench had no record."""
    with tempfile.TemporaryDirectory(prefix="lpkit-fp8-step-") as folder:
        for path in MEASURED.glob("fp8-linear-*.json"):
            shutil.copy(path, folder)
        return advise(config, on, recipes=runs_here(device), measured=Path(folder))
