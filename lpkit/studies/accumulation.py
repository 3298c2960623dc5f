"""How many bits a sum keeps: FP8 products as Hopper's tensor cores add them, emulated.

The products of two FP8 numbers are exact. A tensor core takes STEP of them together with the sum so
far, shifts them all to the largest exponent among them, keeps the highest BITS bits of each, cuts
off what lies below, and adds (DeepSeek-V3, https://arxiv.org/abs/2412.19437, sections 3.3.2 and
3.5.2: 32 products, 14 bits, seen on an H800). The way out is theirs, too: after every so many
products the sum is added, in float32, to one outside the tensor core.

    accumulate(a, b, bits=14)                       # `use_fast_accum=True`
    accumulate(a, b, bits=14, promote_every=128)    # as block-wise scaling does anyway
    relative_error(got, a, b)

What is emulated is the description above and not the circuit, whose details nobody has published.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lpkit.errors import ConfigError

STEP, BITS = 32, 14             # products at a time; bits that are kept of each
DRAWN, QUANTILES = 2**15, 16    # of the formula


def accumulate(a: Tensor, b: Tensor, *, bits: int = BITS, promote_every: int | None = None,
               step: int = STEP) -> Tensor:
    """a @ b.T, (M, N) float64; a (M, K) and b (N, K) hold values of an 8-bit format.

    promote_every: products after which the sum moves to float32, a multiple of `step`. Raises
    ConfigError where it is not.
    """
    if bits < 2 or step < 1:
        raise ConfigError(f"a sum keeps 2 bits or more of 1 product or more; got bits={bits}, "
                          f"step={step}")
    if promote_every is not None and promote_every % step:
        raise ConfigError(f"promote_every={promote_every} is no multiple of the {step} products "
                          f"that are added at a time")
    a, b = a.double(), b.double()
    K = a.shape[1]
    outside = torch.zeros(len(a), len(b), dtype=torch.float32)
    inside = torch.zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, K, step):
        terms = a[:, None, start:start + step] * b[None, :, start:start + step]
        inside = _aligned_sum(torch.cat((inside[..., None], terms), -1), bits)
        if promote_every and (start + step) % promote_every == 0:
            outside += inside.float()
            inside = torch.zeros_like(inside)
    return outside.double() + inside


def _aligned_sum(terms: Tensor, bits: int) -> Tensor:
    """Over the last axis: of each term the bits that reach down to 2^-(bits - 1) of the largest
    one's power of two, the rest cut off towards 0."""
    exponent = torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent - bits
    shifted = torch.ldexp(terms, -exponent).trunc()
    return torch.ldexp(shifted.sum(-1), exponent[..., 0])


def gaussian(K: int, change: Callable[[Tensor], Tensor], rows: int = 16) -> tuple[list, list]:
    """Two operands (rows, K) of Gaussian numbers that went through `change`, over E4M3's range; and
    the same cast to E4M3, as float32. A K has the same numbers each time."""
    rng = torch.Generator().manual_seed(K)
    drawn = [change(torch.randn(rows, K, generator=rng)) for _ in range(2)]
    wide = [x / x.abs().max() * 448 for x in drawn]
    return wide, [x.to(torch.float8_e4m3fn).float() for x in wide]


def relative_error(got: Tensor, a: Tensor, b: Tensor) -> float:
    """Of the whole matrix, against float64: 0.01 is one percent of its norm."""
    exact = a.double() @ b.double().T
    return ((got.double() - exact).norm() / exact.norm()).item()


def expected_error(a: Tensor, b: Tensor, *, bits: int = BITS, step: int = STEP,
                   promote_every: int | None = None) -> float:
    """The same by a formula: as if the products of a row were drawn independently of each other.

    After k products the sum is normal, with k times their mean and variance. Its power of two, or
    that of a step's largest product where it is larger, gives the unit of the cut, and the products
    say what they lose to such a unit: one with 8 bits loses nothing to a unit below its last. What
    is cut off adds up where products have one sign, and like noise where they have both. The sum
    itself loses nothing while its exponent stays.
    """
    K = a.shape[1]
    drawn = torch.randint(K, (DRAWN,), generator=torch.Generator().manual_seed(0))
    products = a.double()[torch.arange(DRAWN) % len(a), drawn] \
        * b.double()[torch.arange(DRAWN) // len(a) % len(b), drawn]
    mean, deviation = products.mean(), products.std()
    largest = products.abs().view(-1, step).amax(1).median()
    quantiles = torch.special.ndtri((torch.arange(QUANTILES) + 0.5) / QUANTILES).double()
    lost: dict[int, Tensor] = {}    # of a product: mean and variance, by the exponent of the unit
    run = min(promote_every or K, K)
    bias = noise = 0.0
    for k in range(0, run, step):
        sums = (k * mean + k**0.5 * deviation * quantiles).abs().clamp(min=largest)
        for exponent in (torch.frexp(sums).exponent - bits).tolist():
            if exponent not in lost:
                cut = products - (products / 2.0**exponent).trunc() * 2.0**exponent
                lost[exponent] = torch.stack((cut.mean(), cut.var()))
            of_mean, of_variance = lost[exponent].tolist()
            bias += step * of_mean / QUANTILES
            noise += step * of_variance / QUANTILES
    runs = K / run
    of_result = K**0.5 * math.hypot(K**0.5 * mean, deviation)
    return math.hypot(bias * runs, (noise * runs) ** 0.5) / of_result
