"""Seconds of one operation: the longer of arithmetic and memory, at a share of the ceilings.

An `Efficiency` has these shares:

    FLOOR       every ceiling is reached and every operand moves once; nothing is faster unless its
                data stay in a cache
    ASSUMED     what published kernels reach
    REACHED     for ceilings that were measured on the spot
    flat_mfu    one share of the peak replaces all others

`lpkit.predict.time.step_time` is the only function that prices a step; "floor", "estimate" and
"assume 40% MFU" are its calls with these values. Units: bytes, FLOP/s, seconds.
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
    """The shares of a datasheet's figures that are reached."""

    products: Mapping[str, float]       # share of peak_flops, by dtype of the catalogue
    attention: float                    # share of the 16-bit peak, by a flash kernel
    bandwidth: float
    # share of the bandwidth; a CPU's casts are bound by arithmetic
    casts: float
    kernel_seconds: float               # the least seconds of a kernel
    fused: float                        # share of `flops.moved_bytes` that a compiler leaves
    source: str
    start_seconds: float = 0.0          # seconds of a matmul in which its pipelines fill and drain
    links: float = 0.8                  # share of a link inside a node, by a large collective
    network: float = 0.85               # share of a network between nodes, by a large collective
    # share of the other ranks' network in a node that a group uses
    pooled: float = 1.0
    overlap: float = 1.0                # share of what could overlap with work that does
    # bytes of gradients that replicas send at once; 0: all of them
    bucket_bytes: float = 0.0
    split_overlap: float = 0.0          # `overlap` of tensor-parallel and pipeline messages
    weight_copies: float = 1.0          # share of float32 weights that are cast once a micro-batch
    op_seconds: float = 0.0             # the host's seconds to start one operation of a module
    # share of the host's time that shows although the device is slower
    host_shown: float = 0.0
    # extra bytes a number of a norm in forward, over a single kernel
    norm_bytes: float = 0.0
    sequence_parallel: bool = True      # False: each tensor rank repeats norms and additions
    overlapped: bool = False            # a result is written while its sums are computed
    shapes: Mapping[str, Sequence] = field(default_factory=dict)    # measured: M, N, K, share
    # recorded: M, N, K, speed over bf16
    ratios: Mapping[str, Sequence] = field(default_factory=dict)
    fades: bool = False                 # beyond NEAR `products` hold; else the nearest shape does
    factor: float = 1.0                 # seconds of one measured step over the predicted seconds
    flat: float | None = None           # model FLOPs over the peak: replaces all of the above


def nearest(table: Sequence, *sizes: int) -> tuple[float, float]:
    """Return the nearness of the nearest row of (M, N, K, value), from 1 (equal sizes) to 0 (NEAR
    or farther), and its value; (0, 0) if there are no rows."""
    distance, value = min(((math.dist(map(math.log2, sizes), map(math.log2, row[:3])), row[3])
                           for row in table), key=itemgetter(0), default=(NEAR, 0.0))
    return max(0.0, 1 - distance / NEAR), value


# Distance in log2 of M, N and K (3: a factor of 8 in one of them) from which a measured shape no
# longer counts. 2, 3 and 4 predict an H200's recorded steps about equally well (docs/plan.md).
NEAR = 3.0

# Seconds of a matmul on a GPU, fitted to open rows of data/published/products.csv. Tiles and waves
# predict its held-out rows no better (docs/advise.md), since libraries choose tiles that fill the
# machine.
START_SECONDS = 5.8e-6
FOUR_BITS = 0.52        # share of the peak: fitted to the open NVFP4 products of the same file
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


LEAST_MFU = 1e-6    # a smaller MFU is a typing error


def flat_mfu(mfu: float) -> Efficiency:
    """Return an efficiency of one share of the peak for the model's FLOPs. Raises ConfigError."""
    if not LEAST_MFU <= mfu <= 1:
        raise ConfigError(f"mfu is a fraction of the peak, above 0 and at most 1; got {mfu}")
    return Efficiency(
        products=dict.fromkeys(DTYPES, mfu), attention=mfu, bandwidth=1.0, casts=1.0,
        kernel_seconds=0.0, fused=0.0, links=1.0, network=1.0, flat=mfu,
        source=f"assumed: model FLOPs at {mfu:g} of the peak, everything else included "
               "(Chowdhery et al. 2022, PaLM, appendix B, https://arxiv.org/abs/2204.02311)")


def product_seconds(M: int, N: int, K: int, machine: Machine, efficiency: Efficiency, *, dtype: str,
                    bits: float, result_bytes: float = BF16) -> float:
    """Return the seconds of (M, K) x (K, N) with operands of `bits`.

    The result moves after the sum is done, unless the efficiency overlaps both. The nearer a
    measured shape is, the more its share counts: the result is a geometric mean of the formula and
    of the seconds by the measured share, which include all that the kernel moves."""
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
