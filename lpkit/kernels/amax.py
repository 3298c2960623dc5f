"""The largest magnitude of a tensor, and how many of its elements are NaN or Inf.

Programs walk over the tensor in parallel. Each ends with one atomic maximum. It is a maximum of
integers (the bits of magnitudes), so the order does not matter. A program counts non-finite
elements in a second pass over its elements, and only if its maximum shows that there are any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpkit.kernels.cast import reference_amax
from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Kernel
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.rounding import PROGRAMS, magnitude
from lpkit.kernels.scales import check

BLOCK, WARPS = 8192, 8


def definition(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of x (M, N), () float32, which is not finite if any element is
    not finite; and the number of elements that are not finite, () int64."""
    check(x)
    values, nonfinite = reference_amax(x, 1, 1)
    return values.view(()), nonfinite


@jit
def _amax(x, history, stats, n, blocks, HISTORY: tl.constexpr, BLOCK: tl.constexpr):
    """Write the bits of the largest magnitude to stats[0] and the number of non-finite elements to
    stats[1]. x has n elements, in `blocks` blocks of BLOCK elements."""
    # Delayed scaling: a history that is not empty (above 0) determines the scale, so the maximum is
    # not needed, and no block is read.
    if HISTORY:
        blocks = tl.where(tl.load(history) > 0, 0, blocks)
    most = tl.zeros((BLOCK,), tl.int32)
    # The bits of non-negative floats, read as integers, have the order of the floats. The bits of
    # Inf and NaN are larger than all others, so an integer maximum also finds Inf and NaN.
    for i in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = tl.cast(i, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        most = tl.maximum(most, magnitude(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)))
    top = tl.max(most, 0)
    # one atomic for each program, not for each element
    tl.atomic_max(stats.to(tl.pointer_type(tl.int32)), top)
    if top >= 0x7F800000:       # Inf or NaN: count them in a second pass
        bad = tl.zeros((BLOCK,), tl.int32)
        for i in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(i, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            v = magnitude(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32))
            bad += tl.where(v >= 0x7F800000, 1, 0)
        tl.atomic_add(stats + 1, tl.sum(bad, 0).to(tl.int64))


def launch(x: Tensor, stats: Tensor, history: Tensor | None = None) -> None:
    """Launch the kernel on x. stats: a new `empty_stats(x)`, which is filled. history: () float32;
    if it is above 0, nothing is computed."""
    blocks = triton.cdiv(x.numel(), BLOCK)
    _amax[(min(blocks, PROGRAMS),)](x, history, stats, x.numel(), blocks,
                                    HISTORY=history is not None, BLOCK=BLOCK, num_warps=WARPS)


def empty_stats(x: Tensor) -> Tensor:
    """Return zeros (64,) int64 for the results of the kernels.

    Bytes 0 to 3 are the bits of the largest magnitude. Element 1 is the number of non-finite
    elements. Byte 256 begins the float32 scale, because cuBLASLt 13.0 requires such an aligned
    address.
    """
    return x.new_zeros(64, dtype=torch.int64)


def numbers(stats: Tensor) -> Tensor:
    """Return a view of the largest magnitude and the scale, (2,) float32: bytes 0 and 256."""
    return stats.view(torch.float32)[::64]


@operator("amax_found(Tensor x) -> Tensor", key=EVERY_DEVICE, fake=empty_stats)
def operation(x: Tensor) -> Tensor:
    check(x)
    stats = empty_stats(x)
    launch(x, stats)
    return stats


def in_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    stats = operation(x)
    return numbers(stats)[0], stats[1]


def _examples(rng: torch.Generator, device: torch.device):
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((5, 123), (64, 300), (1, 1), (130, 72)):
            yield ((torch.randn(shape, generator=rng) * 1e3).to(device, dtype),)
    x = torch.randn(16, 1000, generator=rng).to(device)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = x.clone()
        x[3, 500] = bad
        yield (x,)
    yield (torch.zeros(4, 8, device=device) - 0.0,)
    yield (torch.full((2, 2), 1e-45, device=device),)
    yield (torch.randn(3, 129, generator=rng).to(device)[1:].view(-1)[1:257].view(16, 16),)


KERNEL = Kernel(
    definition=definition, versions={"triton": in_triton}, examples=_examples, exact=True)
