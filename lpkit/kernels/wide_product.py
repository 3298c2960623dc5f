"""Matmuls of 16-bit matrices computed in float32 ("wide" products), for CPUs where this is faster.

A bf16 matmul multiplies exactly, adds in float32, and rounds each result once. A float32 matmul of
the same operands, rounded once at the end, gives the same numbers up to the order of additions.

    CPU                                     bf16 matmul, GFLOP/s per core
    Xeon with AVX512-BF16, without AMX      75      (float32: 130, or 115 with the casts)
    without AVX512-BF16                     28
    with AVX2                                8

With AMX, bf16 is faster than float32. So a run compares the float32 matmul with PyTorch's bf16
matmul and races the two, once per machine (`kernels.choose`).
"""

import functools
import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from lpkit.contracts import Choice
from lpkit.kernels.choose import REFERENCE, choose
from lpkit.kernels.kernel import Kernel
from lpkit.kernels.operator import operator
from lpkit.kernels.pytorch import product_pytorch

ROWS = 1024             # rows that are cast to float32 at a time; they stay in a core's cache
SIZE = 512              # side of the matrices in the race
# Smaller matmuls stay in bf16, because the casts and calls take longer than float32 saves.
SMALL_FLOPS, SMALL_SIDE = 5e7, 256
LOOP_FLOPS = 1e5        # the same limit for CPUs that multiply bf16 in a loop, at 0.5 GFLOP/s


@torch.autocast("cpu", enabled=False)
def multiply_now(a: Tensor, b: Tensor, bias: Tensor | None, alpha: Tensor | None) -> Tensor:
    """Return alpha * a @ b.T + bias, (M, N) in the dtype of a, computed in float32 and rounded
    once; a (M, K), b (N, K), bias (N,)."""
    wide = b.float().T
    start = wide.new_zeros(()) if bias is None else bias.float()
    scale = {"alpha": 1.0 if alpha is None else alpha.item(), "beta": float(bias is not None)}
    out = a.new_empty(len(a), len(b))
    # Only b is cast to float32 as a whole. Of a and of the result, only ROWS rows exist in float32
    # at a time, and they fit into the cache.
    for rows, result in zip(a.split(ROWS), out.split(ROWS)):
        result.copy_(torch.addmm(start, rows.float(), wide, **scale))
    return out


def _operator(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a PyTorch operator for alpha * a @ b.T + bias, (M, N) in the dtype of a; a (M, K),
    b (N, K)."""
    return operator(f"{name}(Tensor a, Tensor b, Tensor? bias, Tensor? alpha) -> Tensor",
                    product=True, fake=lambda a, b, *_: a.new_empty(len(a), len(b)),
                    flops=lambda a, b, *_, **__: 2 * a[0] * a[1] * b[0])(kernel)


multiply = _operator("wide_product", multiply_now)
addmm = _operator("addmm", product_pytorch)


class WideProduct(torch.autograd.Function):
    """x @ w.T + bias (M, N), for 16-bit x (M, K), w (N, K) and bias (N,). The matmuls of forward
    and backward are computed in float32. This is a custom Function, because the operator `multiply`
    has no derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        # The gradient of w needs x, and the gradient of x needs w. Save only what will be needed.
        needs_x, needs_w, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
        return multiply(x, w, bias, None)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad
        return (multiply(g, w.T, None, None) if needs_x else None,
                multiply(g.T, x.T, None, None) if needs_w else None,
                g.sum(0) if needs_bias else None)


@functools.cache
def in_a_loop() -> bool:
    """Return whether PyTorch multiplies bf16 matrices in a plain loop, number by number, because
    oneDNN does not support bf16 on this CPU (only AVX2)."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def large(M: int, K: int, N: int) -> bool:
    """Return whether a wide product of (M, K) and (K, N) saves more time than its casts take."""
    if in_a_loop():
        return 2 * M * K * N >= LOOP_FLOPS
    return 2 * M * K * N >= SMALL_FLOPS and min(M, N) >= SMALL_SIDE


def wins(a: Tensor, b: Tensor) -> bool:
    """Return whether a wide product may be faster for a @ b.T: on a CPU, outside of torch.compile,
    and large enough."""
    return (a.device.type == "cpu" and not torch.compiler.is_compiling()
            and large(*a.shape, len(b)))


def _examples(rng: torch.Generator, device: torch.device) -> Iterable[tuple]:
    for M, N, K in ((1, 1, 1), (5, 3, 7), (ROWS + 1, 33, 64)):
        a, b, bias = (torch.randn(shape, generator=rng).to(device, torch.bfloat16)
                      for shape in ((M, K), (N, K), (N,)))
        yield a, b, None, None
        yield a, b, bias, torch.tensor(0.37)


KERNEL = Kernel(definition=product_pytorch, versions={"float32": multiply_now}, examples=_examples)
# values of `system.products`, and the version of KERNEL that each value selects
NAMES = {"bf16": REFERENCE, "float32": "float32"}


def choose_for(sizes: tuple[int, int, int], asked: str, before: str | None = None) -> Choice:
    """Choose how a model multiplies bf16. `sizes`: M, K and N of its largest matmul, in any order.
    `before`: the choice with which a resumed run began."""
    if asked == "auto" and before in NAMES:
        return Choice(asked=asked, used=before, why="as when this run began")
    if asked == "auto" and not any(large(*each) for each in itertools.permutations(sizes)):
        return Choice(asked=asked, used="bf16", why="no matmul of this model is large enough to "
                      "win back the time of its casts")
    return choice(asked, torch.get_num_threads())


@functools.cache
def choice(asked: str, threads: int) -> Choice:
    """Choose how bf16 operands are multiplied here, "bf16" or "float32": the faster correct one.
    Raises ConfigError if the requested one is wrong."""
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=rng).bfloat16() for _ in range(2))
    chosen = choose("product", KERNEL, NAMES.get(asked, asked), [(a, b, None, None)],
                    setting="system.products", definition="bf16").choice
    (used,) = (name for name, version in NAMES.items() if version == chosen.used)
    return Choice(asked=asked, used=used, why=chosen.why.replace(f"of {REFERENCE}", "of bf16"))


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear(x, weight, bias) under autocast, as a wide product, for x (M, K). A
    TorchFunctionMode can override it, like F.linear (`lpkit.precision.deferred` does)."""
    if has_torch_function_unary(x):
        return handle_torch_function(wide_linear, (x,), x, weight, bias)
    dtype = torch.get_autocast_dtype("cpu")
    bias = None if bias is None else bias.to(dtype)
    return WideProduct.apply(x.to(dtype), weight.to(dtype), bias)


class WideLinear(nn.Linear):
    """nn.Linear under bf16 autocast, on a CPU where wide products are faster. The bf16 cast of the
    weight is saved for backward and then freed. Autocast would also keep it in its own cache until
    forward ends."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if not (torch.is_autocast_enabled("cpu") and wins(flat, self.weight)):
            return super().forward(x)
        y = wide_linear(flat, self.weight, self.bias)
        # F.linear ends like this, too. A normal view would make FSDP2 warn; the unsafe view is safe
        # here, because nothing else refers to the flat result.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))
