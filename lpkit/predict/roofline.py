"""Seconds of one operation: the longer of its arithmetic and its memory traffic, each at a share of
the machine's ceiling.

An `Efficiency` has these shares. Four are defined here:

    FLOOR       all ceilings are reached and each operand moves once. Only an operation whose data
                stay in a cache is faster.
    ASSUMED     shares that published kernels reach
    REACHED     shares of ceilings that were measured on the machine itself
    flat_mfu    a function: one share of the peak, instead of all others

`lpkit.predict.time.step_time` predicts the seconds of a step with any of them: a floor, an
estimate, or "assume 40% MFU". Units: bytes, FLOP/s, seconds.
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
    """The shares of a datasheet's numbers that a step reaches."""

    products: Mapping[str, float]       # matmuls: share of peak_flops, by dtype of the catalogue
    attention: float                    # a flash kernel: share of the 16-bit peak
    bandwidth: float                    # share of the memory bandwidth
    # casts: share of the memory bandwidth. It is small on a CPU, where arithmetic limits casts.
    casts: float
    kernel_seconds: float               # the least seconds of a kernel
    # share of `flops.moved_bytes` that still moves after a compiler has fused operations
    fused: float
    source: str
    start_seconds: float = 0.0          # seconds of a matmul in which its pipelines fill and drain
    links: float = 0.8                  # a large collective: share of a link inside a node
    network: float = 0.85               # a large collective: share of a network between nodes
    # share of the network of the other ranks in a node that one rank's messages also use
    pooled: float = 1.0
    overlap: float = 1.0                # share of the messages' seconds that could overlap and do
    # bytes of gradients that replicas send at once; 0: all of them
    bucket_bytes: float = 0.0
    split_overlap: float = 0.0          # `overlap` of tensor-parallel and pipeline messages
    weight_copies: float = 1.0          # share of the float32 weights that each micro-batch casts
    op_seconds: float = 0.0             # the host's seconds to start one operation of a module
    # share of the host's time that a step waits for the host, although the device is slower
    host_shown: float = 0.0
    # bytes per number that a norm of several kernels moves in forward, more than a single kernel
    norm_bytes: float = 0.0
    sequence_parallel: bool = True      # False: each tensor rank repeats norms and additions
    overlapped: bool = False            # a result is written while its sums are computed
    # measured matmuls by dtype: rows of (M, N, K, share of the peak)
    shapes: Mapping[str, Sequence] = field(default_factory=dict)
    # recorded matmuls by recipe: rows of (M, N, K, speed relative to bf16)
    ratios: Mapping[str, Sequence] = field(default_factory=dict)
    # True: far from all measured `shapes`, `products` count; False: the nearest shape always counts
    fades: bool = False
    factor: float = 1.0                 # seconds of one measured step over its predicted seconds
    flat: float | None = None           # one MFU for the whole step, instead of all other shares


def nearest(table: Sequence, *sizes: int) -> tuple[float, float]:
    """Return (nearness, value) of the row of `table`, with rows (M, N, K, value), whose sizes are
    nearest to `sizes`. The nearness is from 1 (equal sizes) to 0 (at the distance NEAR or farther).
    Return (0, 0) if there are no rows.

    >>> nearest([(1024, 1024, 1024, 0.6)], 2048, 1024, 1024)    # one octave away: 1 - 1 / 3
    (0.6666666666666667, 0.6)
    """
    distance, value = min(((math.dist(map(math.log2, sizes), map(math.log2, row[:3])), row[3])
                           for row in table), key=itemgetter(0), default=(NEAR, 0.0))
    return max(0.0, 1 - distance / NEAR), value


# From this distance on, a measured shape no longer counts. The distance is in log2 of M, N and K: a
# factor of 8 in one of the three sizes is 3. The values 2, 3 and 4 predict the recorded steps of an
# H200 about equally well (docs/plan.md).
NEAR = 3.0

# Constant seconds of each matmul on a GPU, fitted to the rows of data/published/products.csv that
# are open for a fit. Counting tiles and waves predicts the held-out rows no better
# (docs/advise.md), because libraries choose tiles that fill the machine.
START_SECONDS = 5.8e-6
FOUR_BITS = 0.52        # share of the peak: fitted to the open NVFP4 rows of the same file
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
    """Return an efficiency with which the whole step reaches one MFU. Raises ConfigError for an MFU
    that is not from LEAST_MFU to 1."""
    if not LEAST_MFU <= mfu <= 1:
        raise ConfigError(f"mfu is a fraction of the peak, above 0 and at most 1; got {mfu}")
    return Efficiency(
        products=dict.fromkeys(DTYPES, mfu), attention=mfu, bandwidth=1.0, casts=1.0,
        kernel_seconds=0.0, fused=0.0, links=1.0, network=1.0, flat=mfu,
        source=f"assumed: model FLOPs at {mfu:g} of the peak, everything else included "
               "(Chowdhery et al. 2022, PaLM, appendix B, https://arxiv.org/abs/2204.02311)")


def product_seconds(M: int, N: int, K: int, machine: Machine, efficiency: Efficiency, *, dtype: str,
                    bits: float, result_bytes: float = BF16) -> float:
    """Return the seconds of the matmul (M, K) x (K, N). Operands have `bits` bits per number, the
    result has `result_bytes` per number.

    The result is written after the sums are done, unless `efficiency.overlapped`. If shapes were
    measured on this machine, the seconds are a weighted geometric mean of the formula's seconds and
    of the seconds by the measured share of the nearest shape; the nearer this shape is, the more it
    counts. Measured seconds include all bytes that the kernel moves."""
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
    # the seconds of passes over the result after the kernel, which the measurement did not include
    more = M * N * max(0.0, result_bytes - FP32) / bandwidth
    return seconds**(1 - near) * (at_peak / share + more)**near
