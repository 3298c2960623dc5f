"""Bytes of one number in a step, by precision, and bytes of the operands that low precision keeps.

`ScaledLinear` keeps its cast x and w for backward. If hardware multiplies their format, they are
stored in the bits of the format. The emulation stores them in bf16, and multiplies power-of-two and
E4M3 scales into the values.
"""

import functools
import math
from collections import ChainMap
from dataclasses import dataclass, replace

from lpkit.config import Config
from lpkit.errors import pick
from lpkit.predict.stacks import STACKS, stack_of
from lpkit.techniques.machines import Machine
from lpkit.techniques.memory import PARAM_DTYPE
from lpkit.techniques.recipes import MX_BLOCK, RECIPES, SCALES, Cast, Recipe, at_end, resolve

FP32, BF16 = 4, 2


def scale_bytes(cast: Cast) -> int:
    """Return the bytes of one block's scale as hardware stores it."""
    return 1 if cast.block == MX_BLOCK else SCALES[cast.scale].bytes


@dataclass(frozen=True, kw_only=True)
class Low:
    """The casts of the operands x and w that a recipe keeps for backward."""

    bits: int                   # bits of a value
    # block of x that shares a scale: (rows, columns), where a product sums over the columns; 0: the
    # block spans the axis
    x: tuple[int, int]
    w: tuple[int, int]          # the same for w
    scale_bytes: int            # bytes of a block's scale
    folds: bool                 # the emulation multiplies scales into the values
    history: int                # amaxes that are remembered for each of x, w and dy
    keep: tuple[str, ...]       # names or patterns of the Linears that stay in 16 bits
    square: bool                # blocks equal their transpose: one cast of x serves both matmuls
    mixes: bool                 # a transform mixes x and dy in float32 for the weight's gradient
    amax_bytes: float           # bytes of amaxes per number, in an emulated cast of x or dy
    levels: int                 # levels of the scales
    native: bool = False        # True: hardware multiplies the format; False: it is emulated

    @property
    def number_bytes(self) -> float:
        """The bytes in which a cast value is stored."""
        return self.bits / 8 if self.native else BF16

    def stay(self, layers: int) -> frozenset[int]:
        """Return the numbers of the blocks that stay in 16 bits, of a model with `layers` blocks.
        """
        return frozenset(number for name in self.keep
                         for number in at_end(name, range(layers)) or ())

    def scales(self, tokens: float, K: float, N: float) -> float:
        """Return the bytes of the scales of one Linear's kept operands, x with `tokens` rows of K
        numbers and w with N rows of K numbers."""
        if self.folds and not self.native:
            return 2 * FP32
        count = 0
        for (along, down), across in ((self.x, tokens), (self.w, N)):
            count += math.ceil(K / (along or K)) * math.ceil(across / (down or across))
        return count * (self.scale_bytes if self.native else FP32)

    def work_bytes(self, x: float, g: float, w: float, *, dx: float, dw: float,
                   final: float) -> float:
        """Return the most temporary bytes while a Linear's backward runs, which frees nothing
        before it ends.

        `x`, `g` and `w` are the element counts of its input, of its output's gradient and of its
        weight. `dx`, `dw` and `final` are bytes; `final` is dw in the dtype that the optimizer
        reads. At the end, the casts of g are alive (in two layouts, unless one layout serves both
        matmuls), and dx, dw and `final`. An emulated matmul may need more: float32 copies of its
        operands if scales vary along the axis that it sums over, or a float32 copy of its result if
        scales vary by row."""
        copies = 1 if self.square else 2
        casts = g * self.number_bytes * copies
        if self.native:
            return dx + casts + dw + final
        casts += g * self.amax_bytes * copies * (1 if self.folds else 2)    # values and scales
        mixed = g * (FP32 + self.levels * self.amax_bytes) if self.mixes else 0
        # `mixed` is alive while it is cast
        most = max(dx + casts + dw + final, dx + casts + mixed)
        if self.folds or self.x[0] == self.x[1]:
            return most
        if 0 in self.x:
            return max(most, g * BF16 + (FP32 + BF16) * x, dx + casts + (FP32 + BF16) * w)
        return max(most, g * BF16 + FP32 * (g + w + x), dx + casts + FP32 * (g + x + w))

    def forward_bytes(self, x: float, y: float, w: float) -> float:
        """Return the temporary bytes while the emulation of a Linear's forward runs, without the
        casts that it keeps for backward. `x`, `y` and `w` are the element counts of its input, its
        output and its weight.

        Its input and its output are alive. If one layout does not serve both matmuls, forward has
        casts of x and w that backward does not use, and either x mixed in float32 or a float32 copy
        of the output while its rows are scaled."""
        if self.native:
            return 0
        if self.square:
            return BF16 * (x + y)
        mixed = x * (FP32 + (2 + self.levels) * self.amax_bytes) if self.mixes else 0
        mixed += BF16 * y
        scaled = (FP32 + BF16) * y if self.w[0] != self.w[1] else 0     # scaled by row, in float32
        return BF16 * (2 * x + w * (self.w[0] != self.w[1])) + max(mixed, scaled)


UNCAST = Cast(format="bf16", scale="none")


def low_of(recipe: Recipe) -> Low | None:
    """Return the casts of the operands that a recipe keeps for backward; None if the recipe casts
    no operands of Linears."""
    if not recipe.products:
        return None
    x = recipe.cast_of["dw", "x"] or UNCAST
    w = recipe.cast_of["dx", "w"] or UNCAST
    scale, numbers = SCALES[x.scale], math.prod(x.block)
    # A kernel that computes scales and values together stores no amaxes. If a block spans an axis,
    # its amaxes are too few to count.
    amax_bytes = FP32 / numbers if numbers and not scale.fused else 0.0
    return Low(bits=x.bits, x=x.block, w=w.block, scale_bytes=scale_bytes(x), levels=scale.levels,
               amax_bytes=amax_bytes,
               square=x.transposes, mixes=x.transform != "none",
               folds=scale.folds, history=recipe.history,
               keep=recipe.high_precision_layers)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one number, by use."""

    dtype: str                  # dtype of the matmuls
    weights: int
    gradients: int
    master: int                 # a float32 copy of the weights that the optimizer updates; 0: none
    compute_bytes: int          # operands and results of matmuls
    residual_bytes: int         # the residual stream
    what: str                   # the precision in words
    low: Low | None = None      # casts of Linears; None: they stay in `dtype`
    buffered: bool = False      # gradients have a buffer that exists before and after a step
    moments: str = ""           # row of MOMENT_FORMATS that is used if the config has float32


_BF16 = Precision(dtype="bf16", weights=4, gradients=4, master=0, compute_bytes=2, residual_bytes=4,
                  what="float32 weights, bf16 matmuls by autocast, as lpkit.train does")
_PURE = Precision(dtype="bf16", weights=2, gradients=2, master=0, compute_bytes=2, residual_bytes=2,
                  what="bf16 throughout; loses small updates unless rounding is stochastic")
_NAMED = {
    "fp32": replace(_BF16, dtype="fp32", compute_bytes=4, what="float32 throughout"),
    "bf16": _BF16,
    "fp16": replace(_BF16, dtype="fp16", what="float32 weights, float16 matmuls by autocast"),
    "bf16-master": replace(_PURE, master=4, what="bf16 weights and gradients, float32 master "
                           "weights: the ZeRO paper's setting"),
    "bf16-fp32-grads": replace(_PURE, gradients=4, master=4, buffered=True, what="bf16 weights, "
                               "float32 gradients and master weights: Megatron-LM, Llama 3"),
    "bf16-pure": replace(_PURE, moments="bfloat16"),
}


class _Precisions(ChainMap):
    """A mapping from names to Precisions: the named precisions, and a precision for each recipe,
    including recipes whose rows are added later."""

    def __getitem__(self, name: str) -> Precision:
        row = super().__getitem__(name)
        return row if isinstance(row, Precision) else precision_of_recipe(name, row)


PRECISIONS = _Precisions(RECIPES, _NAMED)


@functools.cache
def precision_of_recipe(name: str, recipe: Recipe) -> Precision:
    """Return the precision of a run under `recipe`, which is the row `name` or a changed copy of
    this row."""
    if name in _NAMED:
        return _NAMED[name]
    return replace(_BF16, dtype=recipe.dtype, compute_bytes=2 if recipe.compute else 4,
                   low=low_of(recipe), what=f"float32 weights, matmuls with {name}")


def precision_of(config: Config, on: Machine, name: str | None = None) -> str:
    """Return the name of a row of PRECISIONS: `name`, or the config's recipe if `name` is None.
    "auto" becomes "bf16" if the machine has bf16, else "fp32". Raises ConfigError for an unknown
    name."""
    name = config.precision.recipe.name if name is None else name
    if name == "auto":
        name = "bf16" if "bf16" in on.flops else "fp32"
    pick(PRECISIONS, name, "precision")
    return name


def row_of(config: Config, name: str) -> Recipe:
    """Return the row `name` of the recipes. If it is the config's recipe, the row has the config's
    settings."""
    recipe = config.precision.recipe
    return resolve(recipe if recipe.name == name else name)


def stored(config: Config, name: str) -> Precision:
    """Return the row `name` of PRECISIONS as a run of `config` uses it: with the dtypes in which
    the config and its stack store weights and gradients, and with the config's changes of the
    recipe."""
    if config.precision.recipe.name == name:
        p = precision_of_recipe(name, row_of(config, name))
    else:
        p = pick(PRECISIONS, name, "precision")
    row, stack = PARAM_DTYPE[config.memory.param_dtype.name], STACKS[stack_of(config)]
    if stack.codes and any(change.name == "quantised-base" for change in config.model.changes):
        return PRECISIONS[stack.codes]
    if row.residual_bytes is not None:
        # In other stacks, torch.optim.AdamW stores moments in the dtype of the weights.
        theirs = config.system.stack != "auto"
        return replace(p, weights=row.param_bytes, gradients=row.param_bytes,
                       residual_bytes=row.residual_bytes, moments="bfloat16" * theirs)
    if stack.storage and p.compute_bytes < FP32 == p.weights:
        held = PRECISIONS[stack.storage]
        return replace(held, dtype=p.dtype, low=p.low, what=f"{stack.storage}, matmuls with {name}",
                       gradients=stack.gradient_bytes or held.gradients)
    return p


def moments_of(config: Config, p: Precision) -> str:
    """Return the name of the row of MOMENT_FORMATS in which the optimizer stores moments."""
    name = config.memory.moment_format.name
    return p.moments if p.moments and name == "float32" else name
