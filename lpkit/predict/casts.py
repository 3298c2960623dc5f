"""The cost of casts in low precision: passes over the operands, and seconds of a Linear.

A Linear has three matmuls ("products"): y = x w^T in forward, dx = g w and dw = g^T x in backward,
where g is the gradient of y. A recipe casts both operands of each product. So a Linear of M tokens,
K inputs and N outputs costs three products in low precision and up to six casts, which read and
write whole tensors. The time of a product grows with M N K; the time of the casts grows with M K,
M N and N K. So low precision pays off only above some width. Units: seconds, bytes, FLOP/s.

tests/commands/test_advise.py checks the passes of casts with a scale per tensor and per row against
torchao's roofline (torchao/testing/training/roofline_utils.py, 0.18).
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

# Most elements that one kernel can hold on the chip while it finds their maximum: 128 KiB of bf16.
ON_CHIP = 2**16
# Adjacent columns that a kernel reads together when it goes down the columns of a stored tensor.
COALESCED = 32
# The two products that read each tensor. The first product contracts the tensor along its stored
# rows, the second one down its columns.
USES = {"x": ("y", "dw"), "w": ("y", "dx"), "g": ("dx", "dw")}
STORED = {"x": ("M", "K"), "w": ("N", "K"), "g": ("M", "N")}       # rows, columns
READ = {"x": BF16, "w": FP32, "g": BF16}    # bytes per element; weights are float32 masters
# The efficiency of FP8 products is multiplied by this share if there is more than one float32 scale
# per tensor. Scales of one byte cost nothing, because tensor cores apply them. The value is between
# the two published figures for scales per row (docs/advise.md).
FINE_SHARE = {"fp8": 0.8}
# Bytes moved per element of the result: torch._int_mm writes int32, and the kernel that applies the
# scales reads the int32 and writes 16 bits.
RESULT_BYTES = {"int8": 4 + 4 + 2}
# Bytes that emulated casts move if they apply a transform or round stochastically, divided by the
# bytes that fused casts move. With 7, a step in nvfp4 takes 2.3 times as long as in bf16, which was
# measured on the preset cpu-3m.
NOISY_CAST_TRAFFIC = 7


@dataclass(frozen=True, kw_only=True)
class CastRecipe:
    """A precision recipe as the formulas need it."""

    name: str
    dtype: str                      # dtype of the products, as in the catalogue of machines
    # casts of the two operands of each product in low precision ("y", "dx", "dw"); a product that
    # is absent stays in 16 bits
    casts: Mapping[str, tuple[Cast, Cast]] = field(default_factory=dict)
    # amaxes of earlier updates that each tensor remembers. With a history (above 0), a cast needs
    # no pass over the tensor to find its amax.
    history: int = 0
    # for each name of a Linear, how many of its calls stay in 16 bits
    kept: Mapping[str, int] = field(default_factory=dict)
    result_bytes: float = BF16      # bytes moved per element of a product's result
    # The efficiency of the dtype is multiplied by this share. It is below 1 if the kernel applies
    # scales inside the sum over K.
    product_share: float = 1.0
    cast_factor: float = 1.0        # bytes that its casts move, divided by those of fused casts
    wide_bits: int = 0              # bits of a value in emulated casts; 0: the bits of its format
    folded: bool = False            # the emulation multiplies scales into the values

    def operand(self, tensor: str, product: str) -> Cast | None:
        """Return the cast of `tensor` ("x", "w" or "g") in `product`; None if the product stays in
        16 bits."""
        pair = self.casts.get(product)
        return pair and pair[PRODUCTS[product].index(tensor)]

    def bits(self, cast: Cast) -> int:
        """Return the bits in which a value of this cast is stored."""
        return self.wide_bits or cast.bits

    def one_read(self, cast: Cast) -> bool:
        """Return whether one kernel reads a tensor once and writes both of its layouts. That is
        so if a block fits on the chip and hardware multiplies its format, even if a transform mixes
        one of the layouts."""
        return ALL not in cast.block and not self.wide_bits



TENSORWISE = CastRecipe(name="fp8-tensorwise", dtype="fp8",
                        casts=dict.fromkeys(PRODUCTS, (Cast(format="e4m3fn"),) * 2))


@functools.cache
def on_hardware(name: str, row: Row, m: ModelConfig) -> CastRecipe:
    """Return the CastRecipe of the row `name` on hardware that multiplies its dtype, for the model
    `m`. Raises ConfigError if the row keeps a layer in 16 bits that matches no Linear of the
    model."""
    linears = [op.name for op in of(m).linears]
    names = {f"blocks.{i}.{linear}": linear for i in range(m.L) for linear in linears}
    names["head"] = "head"
    stay = kept(names, row.high_precision_layers)
    return casts_of(name, row, Counter(names[full] for full in stay))


def casts_of(name: str, row: Row, stay: Mapping[str, int]) -> CastRecipe:
    """Return the CastRecipe of a row on hardware that multiplies its dtype. `stay` has, for each
    name of a Linear, how many of its calls the recipe keeps in 16 bits."""
    fine = any(cast.block != (ALL, ALL) and scale_bytes(cast) == FP32 for cast in row.all_casts)
    return CastRecipe(name=name, dtype=row.dtype, casts=row.products, kept=stay,
                      history=row.history,
                  product_share=FINE_SHARE.get(row.dtype, 1.0) if fine else 1.0,
                  result_bytes=RESULT_BYTES.get(row.dtype, BF16))


def as_run(config: Config, name: str, on: Machine) -> tuple[CastRecipe, str]:
    """Return the CastRecipe of the row `name` as a run of `config` on the machine `on` uses it, and
    the reason why the run emulates it ("": hardware multiplies its dtype)."""
    row = row_of(config, name)
    return where_run(on_hardware(name, row, config.model), row, on, backend_of(config, name, on))


def backend_of(config: Config, name: str, on: Machine) -> str:
    """Return `precision.backend`, or "stack" if the requested stack has its own kernels for the
    recipe `name`."""
    if config.system.stack != "auto" and STACKS[stack_of(config)].multiplies(name, on.name):
        return "stack"
    return config.precision.backend


def where_run(recipe: CastRecipe, row: Row, on: Machine, backend: str) -> tuple[CastRecipe, str]:
    """Return the `recipe` of a `row` as the machine `on` runs it, and the reason why it is emulated
    ("": it is not). Raises ConfigError if the machine lacks the dtype that the backend needs."""
    why = why_emulated(row, on, backend)
    if not why:
        on.peak_flops(row.dtype)    # raises if the machine has no such dtype
        return recipe, ""
    return in_emulation(recipe, row, "bf16" if "bf16" in on.flops else "fp32"), why


def why_emulated(recipe: Row, on: Machine, backend: str = "auto") -> str:
    """Return the reason why a run on this machine emulates `recipe`: it multiplies in 16 or 32 bits
    instead, with the same results and more work. Return "" if the device multiplies the recipe's
    formats itself, or if the recipe casts nothing. A backend that is requested by name is not
    checked here, because the run refuses a backend that cannot work."""
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


def in_emulation(recipe: CastRecipe, row: Row, base: str) -> CastRecipe:
    """Return the recipe as `backends.Emulated` runs it.

    The emulation stores values in 16 bits (`base`) and multiplies the scales into the values if
    that is exact. It uses float32 products if `base` is float32, or if float32 scales vary along
    the axis that a product sums over."""
    unfolded = [cast for cast in row.all_casts if not SCALES[cast.scale].folds]
    wide = base == "fp32" or any(cast.block[1] > 1 for cast in unfolded)
    return replace(recipe, dtype="fp32" if wide else base,
                   wide_bits=32 if wide else 16, folded=not unfolded, result_bytes=BF16,
                   product_share=1.0, cast_factor=NOISY_CAST_TRAFFIC if row.stochastic else 1.0)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One kernel that reads or writes a tensor for a cast."""

    tensor: str     # x, w or g
    what: str       # amax, scale, cast, or "cast, both layouts"
    bytes: float    # bytes that the kernel reads and writes


def cast_passes(recipe: CastRecipe, *, M: int, N: int, K: int) -> tuple[Pass, ...]:
    """Return every kernel that casts x (M, K), w (N, K) and g (M, N), in forward and backward.

    If one scale covers more elements than a kernel can hold on the chip, or if scales have a second
    level, a pass over the tensor finds the largest magnitude, and a small kernel computes the
    scale. An amax history saves the pass, but not the small kernel. Each tensor is needed in two
    layouts, as it is and transposed. One kernel writes both layouts if the blocks of both are the
    same or fit on the chip, as in `lpkit.kernels.fused_cast` and Transformer Engine. With scales
    per row, each layout needs a kernel of its own, which reads the tensor again.
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


def _casts(recipe: CastRecipe, tensor: str, cast: Cast, size: tuple[int, int], coalesced: int,
               both: bool = False) -> Iterator[Pass]:
    """Yield the kernels that cast a tensor to one layout of `size` (rows, columns), or to both
    layouts. `coalesced`: rows of the layout that a kernel has to read together."""
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
    """The cost of all Linears of one name, forward and backward. Seconds are per call."""

    name: str
    M: int                      # tokens
    N: int                      # outputs
    K: int                      # inputs
    calls: int                  # calls in one update
    base_seconds: float         # three products in the base dtype, and autocast's weight copy
    product_seconds: float      # three products, in low precision where the recipe casts them
    cast_seconds: float         # all kernels of `cast_passes`

    @property
    def seconds(self) -> float:
        return self.product_seconds + self.cast_seconds

    @property
    def speedup(self) -> float:
        return self.base_seconds / self.seconds


def plain_seconds(p: Product, machine: Machine, efficiency: Efficiency, *, dtype: str,
                  itemsize: int) -> dict[str, float]:
    """Return the seconds of a Linear's three products in `dtype`, by name: y, dx and dw. Operands
    and results have `itemsize` bytes per number."""
    return {name: product_seconds(*shape, machine, efficiency, dtype=dtype, bits=8 * itemsize,
                                  result_bytes=itemsize)
            for name, shape in p.shapes.items()}


def linear_cost(p: Product, recipe: CastRecipe, machine: Machine,
                efficiency: Efficiency = ASSUMED, *,
                base: str = "bf16", itemsize: int = BF16, calls: int | None = None) -> LinearCost:
    """Return the cost of a Linear of the size of `p`, with the casts of `recipe` and in the `base`
    dtype, whose numbers have `itemsize` bytes. `calls`: None: `p.calls`."""

    def kernel(nbytes: float) -> float:
        """Return the seconds of a memory-bound kernel that moves `nbytes`."""
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
        # A recorded speed over bf16 counts more, the nearer its shape is. An emulated recipe has no
        # recorded speed.
        if ratio and base == "bf16" and not recipe.wide_bits:
            seconds = seconds**(1 - near) * (plain[name] / ratio)**near
        mixed[name] = seconds
    weight_cast = kernel(p.N * p.K * (FP32 + itemsize)) if itemsize < FP32 else 0.0
    passes = cast_passes(recipe, M=p.M, N=p.N, K=p.K)
    return LinearCost(
        name=p.name, M=p.M, N=p.N, K=p.K, calls=p.calls if calls is None else calls,
        base_seconds=sum(plain.values()) + weight_cast, product_seconds=sum(mixed.values()),
        cast_seconds=sum(kernel(each.bytes * recipe.cast_factor) for each in passes))


def linear_seconds(p: Product, machine: Machine, efficiency: Efficiency, *,
                   recipe: CastRecipe | None,
                   base: str, itemsize: int) -> tuple[float, float]:
    """Return the seconds of one call of a Linear in forward and in backward, on average over the
    layers that the recipe casts and the layers that it keeps in 16 bits. A third of the seconds of
    all casts is counted with each of the three products."""
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
