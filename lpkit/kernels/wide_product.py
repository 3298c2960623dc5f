"""Products of 16-bit matrices by float32's, for CPUs that have it faster.

A bf16 product is defined as exact products, sums in float32 and one rounding, which is what a
float32 product of the same operands gives before it is rounded. On a Xeon without AMX, oneDNN's
bf16 product runs at 75 GFLOP/s a core and float32's at 130, its casts included at 115; without
AVX512-BF16 bf16 runs at 28, with AVX2 at 8. With AMX it is the other way round, so it is tried.
"""

import functools

import torch
from torch import Tensor, nn

from lpkit.contracts import Choice
from lpkit.kernels.operator import operator
from lpkit.timing import interleaved_seconds

ROWS = 1024             # widened at a time: they stay in a core's cache
SIZE, ROUNDS = 512, 50  # of the race
FASTER = 1.15           # times, or the processor's own product stays
# of a product; below either, casts and calls take what is won
SMALL_FLOPS, SMALL_SIDE = 5e7, 256


@torch.autocast("cpu", enabled=False)
def multiply_now(a: Tensor, b: Tensor, bias: Tensor | None, alpha: Tensor | None) -> Tensor:
    wide = b.float().T
    start = wide.new_zeros(()) if bias is None else bias.float()
    scale = {"alpha": 1.0 if alpha is None else alpha.item(), "beta": float(bias is not None)}
    out = a.new_empty(len(a), len(b))
    for rows, result in zip(a.split(ROWS), out.split(ROWS)):
        result.copy_(torch.addmm(start, rows.float(), wide, **scale))
    return out


def _flops(a: tuple[int, int], b: tuple[int, int], *_, **__) -> int:
    return 2 * a[0] * a[1] * b[0]


multiply = operator("wide_product(Tensor a, Tensor b, Tensor? bias, Tensor? alpha) -> Tensor",
                    product=True, fake=lambda a, b, *_: a.new_empty(len(a), len(b)),
                    flops=_flops)(multiply_now)
multiply.__doc__ = """alpha * a @ b.T + bias in the dtype of a, 16 bits; a (M, K), b (N, K)."""


class WideProduct(torch.autograd.Function):
    """x @ w.T + bias for 16-bit x (M, K), w (N, K) and bias (N,), all three products so."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return multiply(x, w, bias, None)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad
        return (multiply(g, w.T, None, None) if needs_x else None,
                multiply(g.T, x.T, None, None) if needs_w else None,
                g.sum(0) if needs_bias else None)


def wins(a: Tensor, b: Tensor) -> bool:
    """Whether a @ b.T, on this machine and of this size, is faster so."""
    large = _flops(a.shape, b.shape) >= SMALL_FLOPS and min(len(a), len(b)) >= SMALL_SIDE
    return (large and a.device.type == "cpu" and not torch.compiler.is_compiling()
            and choice(torch.get_num_threads()).used == "float32")


@functools.cache
def choice(threads: int) -> Choice:
    """Which products multiply bf16 operands here, "bf16" or "float32", by a race of both; the best
    of many short rounds counts."""
    a, b = torch.ones(2, SIZE, SIZE, dtype=torch.bfloat16)
    own, wide = interleaved_seconds((lambda: a @ b.T, lambda: multiply_now(a, b, None, None)),
                                    rounds=ROUNDS, within_seconds=0.25)
    ratio = min(own) / min(wide)
    return Choice(asked="auto", used="float32" if ratio > FASTER else "bf16",
                  why=f"{SIZE} x {SIZE} bf16 operands, widened, multiplied, the result rounded: "
                      f"{ratio:.2f}x the speed of this CPU's bf16 product with {threads} threads; "
                      f"taken above {FASTER}x, by products of {SMALL_FLOPS / 1e6:.0f} MFLOP "
                      f"and more, {SMALL_SIDE} rows and columns and more")


class WideLinear(nn.Linear):
    """nn.Linear under bf16 autocast on a CPU, by whichever products are faster. A wide one's copy of
    the weight lives until its backward, where autocast's own stays to the end of forward too."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if not (torch.is_autocast_enabled("cpu") and wins(flat, self.weight)):
            return super().forward(x)
        dtype = torch.get_autocast_dtype("cpu")
        bias = None if self.bias is None else self.bias.to(dtype)
        y = WideProduct.apply(flat.to(dtype), self.weight.to(dtype), bias)
        return y.unflatten(0, x.shape[:-1])
