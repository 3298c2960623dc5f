"""Seconds of one operation: arithmetic or memory, whichever is slower, at a share of the ceilings.

An `Efficiency` says which share. FLOOR reaches every ceiling and moves every operand once: nothing
runs faster unless its data stay in a cache. ASSUMED is what published kernels reach, REACHED is for
ceilings that were measured on the spot, and `flat_mfu` replaces all of it by one share of the peak.
A step is priced by one function, `lpkit.predict.time.step_time`; "floor", "estimate" and "assume
40% MFU" are its calls with these values. Bytes, FLOP/s, seconds.
Source: Williams, Waterman, Patterson 2009, Roofline, https://doi.org/10.1145/1498765.1498785.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from lpkit.errors import ConfigError
from lpkit.techniques.machines import DTYPES, Machine

BF16, FP32 = 2, 4


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of a datasheet that are reached."""

    products: Mapping[str, float]       # of peak_flops, by dtype of the catalogue
    attention: float                    # of the 16-bit peak, by a flash kernel
    bandwidth: float
    casts: float                        # of the bandwidth; a CPU's casts calculate more than move
    kernel_seconds: float               # the least that a kernel takes
    fused: float                        # of `flops.moved_bytes`, left by a compiler
    source: str
    start_seconds: float = 0.0          # of a product, before its pipelines are full and after
    links: float = 0.8                  # of a link inside a node, by a large collective
    network: float = 0.85               # of a network between nodes, by a large collective
    pooled: float = 1.0                 # of the other ranks' network in a node, what a group uses
    overlap: float = 1.0                # of a message that could hide behind work, what does
    bucket_bytes: float = 0.0           # of gradients that replicas send at once; 0: all of them
    split_overlap: float = 0.0          # the same of tensor-parallel and pipeline messages
    weight_copies: float = 1.0          # of float32 weights cast once a micro-batch, those that are
    op_seconds: float = 0.0             # the host's, to start one operation of a module
    host_shown: float = 0.0             # of the host's time, what shows though the device is slower
    norm_bytes: float = 0.0             # a number, forward, more than a norm in one kernel moves
    sequence_parallel: bool = True      # False: each tensor rank repeats norms and additions
    overlapped: bool = False            # a result is written while its sums are made
    shapes: Mapping[str, Sequence] = field(default_factory=dict)    # measured: M, N, K, share
    ratios: Mapping[str, Sequence] = field(default_factory=dict)    # recorded: M, N, K, of bf16's
    fades: bool = False                 # beyond NEAR `products` hold; else the nearest shape does
    factor: float = 1.0                 # of one measured step: its seconds times this
    flat: float | None = None           # model FLOPs over the peak: replaces all of the above


def nearest(table: Sequence, *sizes: int) -> tuple[float, float]:
    """Returns how near the nearest row of M, N, K and a value is to `sizes`, from 1 (equal) to 0
    (NEAR or farther), and its value; (0, 0) for no rows."""
    distance, value = min(((math.dist(map(math.log2, sizes), map(math.log2, one[:3])), one[3])
                           for one in table), key=itemgetter(0), default=(NEAR, 0.0))
    return max(0.0, 1 - distance / NEAR), value


# Distance in log2 of M, N and K (a factor of 8 in one of them) from which on a measured shape says
# nothing. 2, 3 and 4 predict the recorded steps of an H200 about as well (docs/plan.md).
NEAR = 3.0

# Of a product on a GPU, fitted to open rows of data/published/products.csv. Tiles and waves foretell
# its held-out rows no better (docs/advise.md): libraries choose tiles that fill the machine.
START_SECONDS = 5.8e-6
FOUR_BITS = 0.52        # of the peak: fitted to the open NVFP4 products of the same file
ASSUMED = Efficiency(
    products={"fp32": 0.78, "tf32": 0.78, "bf16": 0.78, "fp16": 0.78,
              "fp8": 0.68, "int8": 0.68, "fp4": FOUR_BITS},
    attention=0.5, bandwidth=0.92, casts=0.92, kernel_seconds=2e-6, start_seconds=START_SECONDS,
    fused=0.5,
    source="assumed: 16-bit products, bandwidth and kernels as torchao's roofline has them for "
           "H100 (0.78, 0.92, 2 us); 8-bit products 0.68, which gives torchao's published 1.39x at "
           "(4096, 8192, 16384); 4-bit ones and the start of a product are fitted to published "
           "products; attention, fusion and links are round guesses")
REACHED = Efficiency(
    products=dict.fromkeys(("fp32", "bf16", "fp16", "fp8", "int8", "fp4"), 1.0),
    attention=0.5, bandwidth=1.0, casts=0.25, kernel_seconds=5e-6, fused=1.0,
    source="ceilings that were measured on this machine, in full; assumed: casts at a quarter of "
           "the bandwidth")
FLOOR = Efficiency(
    products=dict.fromkeys(DTYPES, 1.0), attention=1.0, bandwidth=1.0, casts=1.0,
    kernel_seconds=0.0, fused=ASSUMED.fused, links=1.0, network=1.0, overlapped=True,
    source="a floor: every ceiling is reached, each operand moves once, kernels start at once")


LEAST_MFU = 1e-6    # below it is a slip of the keys


def flat_mfu(mfu: float) -> Efficiency:
    """Makes an efficiency of one share of the peak for the model's FLOPs. Raises ConfigError."""
    if not LEAST_MFU <= mfu <= 1:
        raise ConfigError(f"mfu is a fraction of the peak, above 0 and at most 1; got {mfu}")
    return Efficiency(
        products=dict.fromkeys(DTYPES, mfu), attention=mfu, bandwidth=1.0, casts=1.0,
        kernel_seconds=0.0, fused=0.0, links=1.0, network=1.0, flat=mfu,
        source=f"assumed: model FLOPs at {mfu:g} of the peak, everything else included "
               "(Chowdhery et al. 2022, PaLM, appendix B, https://arxiv.org/abs/2204.02311)")


def product_seconds(M: int, N: int, K: int, machine: Machine, efficiency: Efficiency, *, dtype: str,
                    bits: float, result_bytes: float = BF16) -> float:
    """(M, K) x (K, N) with operands of `bits`. The result moves after the sum is done, unless the
    efficiency overlaps the two. The nearer a measured shape is, the more its share counts: seconds
    by its share, which has all that the kernel moves, to that power."""
    bandwidth = machine.bytes_per_second * efficiency.bandwidth
    at_peak = 2 * M * N * K / machine.peak_flops(dtype)
    arithmetic = at_peak / efficiency.products[dtype]
    operands = (M * K + K * N) * bits / 8 / bandwidth
    result = M * N * result_bytes / bandwidth
    if efficiency.overlapped:
        return max(arithmetic, operands + result)
    seconds = max(max(arithmetic, operands) + result + efficiency.start_seconds,
                  efficiency.kernel_seconds)
    near, share = nearest(efficiency.shapes.get(dtype, ()), M, N, K)
    if not share:
        return seconds
    near = near if efficiency.fades else 1.0
    more = M * N * max(0.0, result_bytes - FP32) / bandwidth        # passes after the kernel
    return seconds**(1 - near) * (at_peak / share + more)**near
