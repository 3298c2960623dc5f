"""Bytes of one number in a step, by precision, and of the operands that low precision keeps.

`ScaledLinear` keeps its cast x and w for backward. Hardware stores them in the bits of their
format. The emulation stores them in bf16, with power-of-two and E4M3 scales multiplied in.
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
    """The casts of a recipe's kept operands. `x` and `w` are the sizes of the blocks that share a
    scale, contracted axis last; 0 spans the axis."""

    bits: int
    x: tuple[int, int]
    w: tuple[int, int]
    scale_bytes: int
    folds: bool                 # the emulation multiplies scales into the values
    history: int                # amaxes remembered for each of three tensors
    keep: tuple[str, ...]       # Linears that stay in 16 bits
    square: bool                # a single layout of x serves both of its products
    mixes: bool                 # x and the gradient are mixed in float32 for the weight's gradient
    amax_bytes: float           # bytes of amaxes per number, in an emulated cast of x or g
    levels: int                 # levels of its scales
    native: bool = False        # hardware multiplies it; else the emulation does

    @property
    def number_bytes(self) -> float:
        return self.bits / 8 if self.native else BF16

    def stay(self, layers: int) -> frozenset[int]:
        """The numbers of the blocks that stay in 16 bits."""
        return frozenset(number for name in self.keep
                         for number in at_end(name, range(layers)) or ())

    def scales(self, tokens: float, K: float, N: float) -> float:
        """Return the bytes of the scales of one Linear's kept x (K, tokens) and w (K, N)."""
        if self.folds and not self.native:
            return 2 * FP32
        count = 0
        for (along, down), across in ((self.x, tokens), (self.w, N)):
            count += math.ceil(K / (along or K)) * math.ceil(across / (down or across))
        return count * (self.scale_bytes if self.native else FP32)

    def work_bytes(self, x: float, g: float, w: float, *, dx: float, dw: float,
                   final: float) -> float:
        """Return the most bytes at once while a Linear's backward runs, which frees nothing before
        its end.

        `x`, `g` and `w` are numbers of its input, of its output's gradient and of its weight. Alive
        are g's cast (both layouts if one does not serve), `dx`, `dw`, and `final`, dw in the dtype
        of the optimizer. An emulated product may need more: its operands in float32 if scales stay
        inside the sum, or its result if scales vary by row."""
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
        """Return the bytes at work while the emulation of a Linear's forward runs, without what it
        keeps.

        They are its input and its result. If one layout does not serve both products, there are
        also x and w as forward casts them, and either x mixed in float32, or the result while its
        rows are scaled."""
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
    """Return the casts of a recipe; None if it casts no operands of Linears."""
    if not recipe.products:
        return None
    x = recipe.cast_of["dw", "x"] or UNCAST
    w = recipe.cast_of["dx", "w"] or UNCAST
    scale, numbers = SCALES[x.scale], math.prod(x.block)
    # A kernel that finds scales and values together keeps no amaxes. Amaxes of whole rows are few.
    amax_bytes = FP32 / numbers if numbers and not scale.fused else 0.0
    return Low(bits=x.bits, x=x.block, w=w.block, scale_bytes=scale_bytes(x), levels=scale.levels,
               amax_bytes=amax_bytes,
               square=x.transposes, mixes=x.transform != "none",
               folds=scale.folds, history=recipe.history,
               keep=recipe.high_precision_layers)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one number, by use. `dtype` is the dtype of the matmuls."""

    dtype: str
    weights: int
    gradients: int
    master: int          # a float32 copy that the optimizer updates
    compute_bytes: int
    residual_bytes: int
    what: str
    low: Low | None = None      # how Linears are cast
    buffered: bool = False      # gradients have a buffer that exists before and after a step
    moments: str = ""           # a row of MOMENT_FORMATS that replaces the config's float32


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
    """The named precisions, and one for each recipe that casts, also for rows added later."""

    def __getitem__(self, name: str) -> Precision:
        row = super().__getitem__(name)
        return row if isinstance(row, Precision) else precision_of_recipe(name, row)


PRECISIONS = _Precisions(RECIPES, _NAMED)


@functools.cache
def precision_of_recipe(name: str, recipe: Recipe) -> Precision:
    """Return the precision of a run under `recipe`, the row `name` or a change of it."""
    if name in _NAMED:
        return _NAMED[name]
    return replace(_BF16, dtype=recipe.dtype, compute_bytes=2 if recipe.compute else 4,
                   low=low_of(recipe), what=f"float32 weights, matmuls with {name}")


def precision_of(config: Config, on: Machine, asked: str | None = None) -> str:
    """Return a row of PRECISIONS by name. "auto" is bf16 if the machine has it. Raises
    ConfigError."""
    name = config.precision.recipe.name if asked is None else asked
    if name == "auto":
        name = "bf16" if "bf16" in on.flops else "fp32"
    pick(PRECISIONS, name, "precision")
    return name


def row_of(config: Config, name: str) -> Recipe:
    """Return the row `name`, with the settings of `config` if it is the config's recipe."""
    asked = config.precision.recipe
    return resolve(asked if asked.name == name else name)


def stored(config: Config, name: str) -> Precision:
    """Return a row of PRECISIONS as `config` stores parameters and changes the recipe."""
    if config.precision.recipe.name == name:
        p = precision_of_recipe(name, row_of(config, name))
    else:
        p = pick(PRECISIONS, name, "precision")
    row, stack = PARAM_DTYPE[config.memory.param_dtype.name], STACKS[stack_of(config)]
    if stack.codes and any(change.name == "quantised-base" for change in config.model.changes):
        return PRECISIONS[stack.codes]
    if row.residual_bytes is not None:
        # torch.optim.AdamW stores moments in the weights' dtype
        theirs = config.system.stack != "auto"
        return replace(p, weights=row.param_bytes, gradients=row.param_bytes,
                       residual_bytes=row.residual_bytes, moments="bfloat16" * theirs)
    if stack.storage and p.compute_bytes < FP32 == p.weights:
        held = PRECISIONS[stack.storage]
        return replace(held, dtype=p.dtype, low=p.low, what=f"{stack.storage}, matmuls with {name}",
                       gradients=stack.gradient_bytes or held.gradients)
    return p


def moments_of(config: Config, p: Precision) -> str:
    """Return the row of MOMENT_FORMATS in which moments are stored."""
    asked = config.memory.moment_format.name
    return p.moments if p.moments and asked == "float32" else asked
