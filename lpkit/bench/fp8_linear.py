"""One Linear on a GPU, forward and backward with casts: FP8 beside bf16 and beside torchao's
tensorwise, all compiled."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lpkit.bench.harness import ROUNDS, Result, race, rotating
from lpkit.errors import ConfigError
from lpkit.precision.backends import BACKENDS
from lpkit.techniques.recipes import RECIPES

# M tokens, K, N: times the speed of bf16, at least
SHAPES = {(65_536, 1664, 6656): 1.25, (16_384, 4096, 16_384): 1.5}
TORCHAO_TARGET = 1.08
RECIPE, BUFFERS = "fp8-tensorwise", 4
# of the product of two E4M3 tensors of a normal distribution, some 28 dB each, against bf16
SQNR_FLOOR_DB = 22.0


def run(rounds: int = ROUNDS) -> list[Result]:
    device = fp8_gpu()
    return [result for shape in SHAPES for result in _race(shape, device, rounds)]


def fp8_gpu() -> torch.device:
    """Raises ConfigError where no GPU multiplies FP8."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a GPU that multiplies FP8 (compute capability 8.9 "
                          "or newer), and PyTorch sees none; low-precision-cpu runs here")
    device = torch.device("cuda")
    if problem := BACKENDS["scaled_mm"].why_not(RECIPE, RECIPES[RECIPE], device):
        raise ConfigError(f"this benchmark needs FP8 products: {problem}")
    return device


def _race(shape: tuple[int, int, int], device: torch.device, rounds: int) -> list[Result]:
    M, K, N = shape
    torch.manual_seed(0)
    layers = {"bf16": nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)}
    for name in ("scaled_mm", "torchao"):
        if not BACKENDS[name].why_not(RECIPE, RECIPES[RECIPE], device):
            # a weight of its own: `wrap` shares it
            layers[name] = BACKENDS[name].wrap(copy.deepcopy(layers["bf16"]), RECIPES[RECIPE],
                                               name="bench", seed=0)
    compiled = {name: torch.compile(layer) for name, layer in layers.items()}
    inputs = [torch.randn(M, K, device=device, dtype=torch.bfloat16, requires_grad=True)
              for _ in range(BUFFERS)]
    d_out = torch.randn(M, N, device=device, dtype=torch.bfloat16)

    def both(name: str, x: Tensor) -> tuple[Tensor, ...]:
        y = compiled[name](x)
        return (y, *torch.autograd.grad(y, (x, layers[name].weight), d_out))

    def contender(name: str) -> Callable[[], object]:
        turn = rotating(inputs)
        return lambda: both(name, turn())

    def check():
        want = both("bf16", inputs[0])
        for name in layers.keys() - {"bf16"}:
            results = zip(("y", "dx", "dw"), both(name, inputs[0]), want, strict=True)
            for what, got, expected in results:
                noise = (got.float() - expected.float()).norm() / expected.float().norm()
                sqnr_db = -20 * noise.log10()
                assert sqnr_db > SQNR_FLOOR_DB, f"{name}: {what} has {sqnr_db:.1f} dB"

    return race("fp8-linear", ours=contender("scaled_mm"), check=check,
                peers={name: contender(name) for name in layers if name != "scaled_mm"},
                target={"bf16": SHAPES[shape], "torchao": TORCHAO_TARGET},
                case=f"{M}x{K} @ {K}x{N}", rounds=rounds, sync=torch.cuda.synchronize,
                sample_seconds=0.05, packages=("torch", "torchao", "triton"),
                device=torch.cuda.get_device_name(device))
