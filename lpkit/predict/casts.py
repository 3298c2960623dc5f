"""What low precision casts: passes over each operand, seconds of a Linear, bytes that are kept.

A recipe casts the two operands of each of a Linear's three products (y = x w^T, dx = g w,
dw = g^T x). So a Linear of M tokens, K inputs and N outputs costs three products in low precision
and up to six casts, which read and write whole tensors. Products grow with M N K, casts with M K, M
N and N K: width decides. Seconds, bytes, FLOP/s.

The passes of casts by tensor and by row are those of torchao's own roofline
(torchao/testing/training/roofline_utils.py, 0.18), and tests/commands/test_advise.py holds the two equal.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lpkit.config import Config, ModelConfig
from lpkit.predict.flops import Product
from lpkit.predict.params import of
from lpkit.predict.recipes import BF16, FP32, row_of, scale_bytes
from lpkit.predict.roofline import ASSUMED, Efficiency, nearest, product_seconds
from lpkit.predict.stacks import STACKS, stack_of
from lpkit.techniques.hardware import multiplied
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import ALL, PRODUCTS, SCALES, Cast, kept
from lpkit.techniques.recipes import Recipe as Row

ON_CHIP = 2**16                     # elements in one kernel that finds the largest: 128 KiB
COALESCED = 32                      # columns that a kernel reads together as it walks down one
# The products of each tensor: along the stored rows, then down the columns.
USES = {"x": ("y", "dw"), "w": ("y", "dx"), "g": ("dx", "dw")}
STORED = {"x": ("M", "K"), "w": ("N", "K"), "g": ("M", "N")}       # rows, columns
READ = {"x": BF16, "w": FP32, "g": BF16}    # bytes an element; weights are float32 masters
# Of the FP8 efficiency, with float32 scales finer than a tensor: tensor cores apply one-byte scales
# themselves. Between both published rowwise figures (docs/advise.md).
FINE_SHARE = {"fp8": 0.8}
# torch._int_mm writes int32; scaling reads it and writes 16 bits.
RESULT_BYTES = {"int8": 4 + 4 + 2}
# traffic of emulated casts that mix and draw over that of fused ones: gives nvfp4 the 2.3 of bf16's
# step that cpu-3m took
NOISY_CAST_TRAFFIC = 7


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A precision recipe as the formulas need it. `casts` are those of its row; an absent product
    stays in 16 bits."""

    name: str
    dtype: str                      # of the products, in the catalogue of machines
    casts: Mapping[str, tuple[Cast, Cast]] = field(default_factory=dict)
    history: int = 0                # amaxes remembered: a cast does not look at its tensor first
    kept: Mapping[str, int] = field(default_factory=dict)   # Linears that stay in 16 bits, by name
    result_bytes: float = BF16      # moved for each element of a product's result
    product_share: float = 1.0      # of the efficiency of its dtype: scales inside cost something
    cast_factor: float = 1.0        # traffic of its casts over that of fused ones
    wide_bits: int = 0              # of a value where casts are emulated; 0: as its format has them
    folded: bool = False            # scales are multiplied into the values

    def operand(self, tensor: str, product: str) -> Cast | None:
        pair = self.casts.get(product)
        return pair and pair[PRODUCTS[product].index(tensor)]

    def bits(self, cast: Cast) -> int:
        return self.wide_bits or cast.bits

    def one_read(self, cast: Cast) -> bool:
        """True if hardware multiplies blocks that a chip holds: one kernel casts them in both
        layouts, also where one of these is mixed."""
        return ALL not in cast.block and not self.wide_bits



TENSORWISE = Recipe(name="fp8-tensorwise", dtype="fp8",
                    casts=dict.fromkeys(PRODUCTS, (Cast(format="e4m3fn"),) * 2))


@functools.cache
def on_hardware(name: str, row: Row, m: ModelConfig) -> Recipe:
    """The casts of a row, `name`, on hardware that multiplies its dtype. Raises ConfigError for a
    layer that is to stay in 16 bits and matches no Linear of the model."""
    linears = [op.name for op in of(m).linears]
    names = {f"blocks.{i}.{linear}": linear for i in range(m.L) for linear in linears}
    names["head"] = "head"
    stay = kept(names, row.high_precision_layers)
    return casts_of(name, row, Counter(names[full] for full in stay))


def casts_of(name: str, row: Row, stay: Mapping[str, int]) -> Recipe:
    """The casts of a row on hardware that multiplies its dtype. `stay`: how many calls of each
    Linear the recipe leaves alone."""
    fine = any(cast.block != (ALL, ALL) and scale_bytes(cast) == FP32 for cast in row.all_casts)
    return Recipe(name=name, dtype=row.dtype, casts=row.products, kept=stay, history=row.history,
                  product_share=FINE_SHARE.get(row.dtype, 1.0) if fine else 1.0,
                  result_bytes=RESULT_BYTES.get(row.dtype, BF16))


def as_run(config: Config, name: str, on: Machine) -> tuple[Recipe, str]:
    """The casts of the row `name`, as `config` changes it and as its run on this machine does them;
    and why they are emulated there, empty where the machine multiplies them itself."""
    row = row_of(config, name)
    return where_run(on_hardware(name, row, config.model), row, on, backend_of(config, name, on))


def backend_of(config: Config, name: str, on: Machine) -> str:
    """Returns `precision.backend`; "stack" where the stack that is asked for has kernels of its own
    for the recipe `name`."""
    if config.system.stack != "auto" and STACKS[stack_of(config)].multiplies(name, on.name):
        return "stack"
    return config.precision.backend


def where_run(recipe: Recipe, row: Row, on: Machine, backend: str) -> tuple[Recipe, str]:
    """`recipe`, of `row`, as this machine runs it, and why it is emulated there; "": it is not."""
    why = why_emulated(row, on, backend)
    if not why:
        on.peak_flops(row.dtype)        # a backend asked for by name may want what is not there
        return recipe, ""
    return in_emulation(recipe, row, "bf16" if "bf16" in on.flops else "fp32"), why


def why_emulated(recipe: Row, on: Machine, backend: str = "auto") -> str:
    """Says why a run there takes wider products for those that `recipe` casts, with the same
    numbers and more work; empty: the device multiplies them itself, or nothing is cast. A backend
    that is asked for by name is believed: a run refuses it where it cannot."""
    if not recipe.products:
        return ""
    if recipe.one_sided:
        return f"one operand of {recipe.one_sided} stays in {recipe.compute or 'float32'}"
    if on.kind == "cpu":
        return "a CPU multiplies 8 bits no faster than 16"
    if backend == "emulated":
        return "requested"
    if backend != "auto":
        return ""
    if recipe.dtype not in on.flops:
        return f"{on.title} has no {recipe.dtype}"
    status, why, _ = multiplied(on, recipe)
    return "" if status == "native" else why


def in_emulation(recipe: Recipe, row: Row, base: str) -> Recipe:
    """Returns the recipe as `backends.Emulated` runs it: values in 16 bits, scales multiplied into
    them where that is exact, and float32 products where float32 scales vary inside the sum."""
    unfolded = [cast for cast in row.all_casts if not SCALES[cast.scale].folds]
    wide = base == "fp32" or any(cast.block[1] > 1 for cast in unfolded)
    return replace(recipe, dtype="fp32" if wide else base,
                   wide_bits=32 if wide else 16, folded=not unfolded, result_bytes=BF16,
                   product_share=1.0, cast_factor=NOISY_CAST_TRAFFIC if row.stochastic else 1.0)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One kernel over one tensor. `bytes` are read and written."""

    tensor: str
    what: str
    bytes: float


def cast_passes(recipe: Recipe, *, M: int, N: int, K: int) -> tuple[Pass, ...]:
    """Returns every kernel that casts x (M, K), w (N, K) and g (M, N), forward and backward.

    A scale that spans more than a chip holds, or an upper level of scales, needs a pass of its own
    to find the largest magnitude, and a small kernel that makes it a scale; a history saves the
    pass and not the kernel. Two layouts are written together where blocks are their own transpose
    or a chip holds them, as in `lpkit.kernels.fused_cast` and Transformer Engine; rows are read
    once per layout.
    """
    sizes = {"M": M, "N": N, "K": K}
    passes: list[Pass] = []
    for tensor, (along, down) in USES.items():
        rows, columns = (sizes[side] for side in STORED[tensor])
        first, second = recipe.operand(tensor, along), recipe.operand(tensor, down)
        both = None not in (first, second) and (
            (first == second and first.transposes) or recipe.one_read(first))
        if first is not None:
            passes += _casts(recipe, tensor, first, (rows, columns), 1, both)
        if second is not None and not both:
            passes += _casts(recipe, tensor, second, (columns, rows), COALESCED)
    return tuple(passes)


def _casts(recipe: Recipe, tensor: str, cast: Cast, size: tuple[int, int], coalesced: int,
           both: bool = False) -> Iterator[Pass]:
    read = math.prod(size) * READ[tensor]
    high, wide = (side or whole for side, whole in zip(cast.block, size))
    if max(high, coalesced) * wide > ON_CHIP or recipe.history or (
            SCALES[cast.scale].levels > 1 and not recipe.wide_bits):
        if not recipe.history:
            yield Pass(tensor=tensor, what="amax", bytes=read)
        yield Pass(tensor=tensor, what="scale", bytes=0)
    (rows, columns), written = size, math.prod(size) * recipe.bits(cast) / 8
    if not recipe.folded:
        written += -(-rows // high) * -(-columns // wide) * scale_bytes(cast)
    if both:
        yield Pass(tensor=tensor, what="cast, both layouts", bytes=read + 2 * written)
    else:
        yield Pass(tensor=tensor, what="cast", bytes=read + written)


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """The cost of all Linears of one shape in one update, both passes. Seconds are of one call."""

    name: str
    M: int
    N: int
    K: int
    calls: int
    base_seconds: float         # three products as they are, and the weight's cast to 16 bits
    product_seconds: float
    cast_seconds: float

    @property
    def seconds(self) -> float:
        return self.product_seconds + self.cast_seconds

    @property
    def speedup(self) -> float:
        return self.base_seconds / self.seconds


def plain_seconds(p: Product, machine: Machine, efficiency: Efficiency, *, dtype: str,
                  itemsize: int) -> dict[str, float]:
    """A Linear's three products when nothing is cast."""
    return {name: product_seconds(*shape, machine, efficiency, dtype=dtype, bits=8 * itemsize,
                                  result_bytes=itemsize)
            for name, shape in p.shapes.items()}


def linear_cost(p: Product, recipe: Recipe, machine: Machine, efficiency: Efficiency = ASSUMED, *,
                base: str = "bf16", itemsize: int = BF16, calls: int | None = None) -> LinearCost:
    """A Linear's three products of the size of `p`, and their casts, beside the `base` dtype."""

    def kernel(nbytes: float) -> float:
        bandwidth = machine.bytes_per_second * efficiency.casts
        return max(nbytes / bandwidth, efficiency.kernel_seconds)

    plain = plain_seconds(p, machine, efficiency, dtype=base, itemsize=itemsize)
    mixed = dict(plain)
    for name, pair in recipe.casts.items():
        bits = max(recipe.bits(cast) for cast in pair if cast)
        seconds = product_seconds(*p.shapes[name], machine, efficiency, dtype=recipe.dtype,
                                  bits=bits, result_bytes=recipe.result_bytes)
        near, ratio = nearest(efficiency.ratios.get(recipe.name, ()), *p.shapes[name])
        seconds /= recipe.product_share
        if ratio and base == "bf16" and not recipe.wide_bits:       # recorded, and not emulated
            seconds = seconds**(1 - near) * (plain[name] / ratio)**near
        mixed[name] = seconds
    weight_cast = kernel(p.N * p.K * (FP32 + itemsize)) if itemsize < FP32 else 0.0
    passes = cast_passes(recipe, M=p.M, N=p.N, K=p.K)
    return LinearCost(
        name=p.name, M=p.M, N=p.N, K=p.K, calls=p.calls if calls is None else calls,
        base_seconds=sum(plain.values()) + weight_cast, product_seconds=sum(mixed.values()),
        cast_seconds=sum(kernel(each.bytes * recipe.cast_factor) for each in passes))


def linear_seconds(p: Product, machine: Machine, efficiency: Efficiency, *, recipe: Recipe | None,
                   base: str, itemsize: int) -> tuple[float, float]:
    """Returns the seconds of one call, forward and backward, on average over the layers that a
    recipe casts and those that it keeps. Its casts are spread as its products are."""
    plain = plain_seconds(p, machine, efficiency, dtype=base, itemsize=itemsize)
    forward, backward = plain["y"], plain["dx"] + plain["dw"] * p.trained
    kept_share = 1.0
    if recipe is not None and recipe.casts:
        kept_share = recipe.kept.get(p.name, 0) / p.calls
    if kept_share >= 1:
        return forward, backward
    cost = linear_cost(p, recipe, machine, efficiency, base=base, itemsize=itemsize).seconds
    return (kept_share * forward + (1 - kept_share) * cost / 3,
            kept_share * backward + (1 - kept_share) * cost * (1 + p.trained) / 3)
