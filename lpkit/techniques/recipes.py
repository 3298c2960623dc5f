"""Precision recipes as rows of data: `precision.recipe=NAME` changes how a model computes, without
a change of the model's code.

A recipe has a compute dtype, to which autocast casts (weights stay float32), and the casts of both
operands of the three matmuls ("products") of a Linear with M tokens, K input features and N output
features:

    y = x w^T       (M, K) (K, N)   sum over K
    dx = g w        (M, N) (N, K)   sum over N; g is the gradient of y
    dw = g^T x      (N, M) (M, K)   sum over M

An operand is cast with the axis of the sum as its last axis. So a block of (1, 128) is 128 elements
that are summed. A recipe is a function of its settings: RECIPES has the recipes with their default
settings, and `resolve` returns a recipe with other settings.
"""

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from typing import Annotated, Any, Literal, get_args

from lpkit.errors import ConfigError, nearest, pick
from lpkit.techniques.formats import format_of
from lpkit.techniques.row import Settings, TechniqueRow
from lpkit.values import Count, between

ALL = 0               # a block side that spans the whole axis
HADAMARD = 16         # elements of the contracted axis that a Hadamard transform mixes


@dataclass(frozen=True, kw_only=True)
class Cast:
    """The cast of one operand, a matrix (rows, axis of the sum)."""

    format: str                             # a row of FORMATS
    # elements that share a scale: (along the rows, along the axis of the sum)
    block: tuple[int, int] = (ALL, ALL)
    scale: str = "float32"                  # a row of SCALES
    rounding: str = "nearest-even"
    transform: str = "none"                 # "hadamard": applied along the axis of the sum

    @property
    def tile(self) -> tuple[int, ...]:
        """Divisors of the operand's shape: the rows must be a multiple of the first number, and the
        axis of the sum of the second and the third."""
        return (self.block[0] or 1, self.block[1] or 1, HADAMARD if self.transform != "none" else 1)

    @property
    def transposes(self) -> bool:
        """True if the cast of a transposed operand is the transposed cast of the operand. Then one
        cast serves two products, such as w in y and in dx."""
        return self.block[0] == self.block[1] and self.transform == "none"

    @property
    def bits(self) -> int:
        return format_of(self.format).bits

    @property
    def words(self) -> str:
        """All fields except the rounding, as a string. A custom operator of PyTorch takes strings,
        but not this object; `named` returns the cast again."""
        return f"{self.format} {self.scale} {self.block[0]} {self.block[1]} {self.transform}"


@cache
def named(words: str) -> Cast:
    """Return the cast that `Cast.words` has written, with the default rounding."""
    format, scale, rows, columns, transform = words.split()
    return Cast(format=format, scale=scale, block=(int(rows), int(columns)), transform=transform)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How the scale of a block is computed from the amax of the block, by `lpkit.precision.scaled`.
    """

    bytes: int = 4              # bytes of one scale, as hardware stores it
    folds: bool                 # scale times value is exact in bf16 (at most 8 significant bits)
    fused: str | None = None    # its name in the kernel that computes scale and cast in one pass
    levels: int = 1             # 2: the tensor also has a float32 scale
    identity: bool = False      # there is no scale, so too large values become infinite


SCALES = {
    "float32": Scale(folds=False),
    "power-of-two": Scale(folds=True, fused="rceil"),
    "power-of-two-floor": Scale(folds=True, fused="floor"),
    "e4m3": Scale(bytes=1, folds=True, levels=2),
    "e4m3-normal": Scale(bytes=1, folds=True, levels=2),
    "none": Scale(bytes=0, folds=False, identity=True),
}
MX_BLOCK = (1, 32)      # hardware stores power-of-two scales of this block as E8M0, in one byte


# The axes of both operands of each product, the axis of the sum last. M: tokens, K: input features,
# N: output features.
SIDES = {"y": ("MK", "NK"), "dx": ("MN", "KN"), "dw": ("NM", "KM")}
PRODUCTS = {"y": ("x", "w"), "dx": ("g", "w"), "dw": ("g", "x")}     # the operands of each product
SIDE_WORDS = {"M": "tokens", "K": "input features", "N": "output features"}
Casts = tuple[Cast | None, Cast | None]


# Settings of recipes. A recipe has only the settings that it uses.

Format8 = Literal["e4m3fn", "e5m2"]


@dataclass(frozen=True, kw_only=True)
class LossScaledSettings(Settings):
    """Loss scaling: multiply the loss by a power of two before backward, so that small gradients do
    not become 0 in float16 (Micikevicius et al. 2018)."""

    loss_scale: Annotated[float, between(2.0**-24, 2.0**64)] = 2.0**16      # of the first update
    # after this many updates without an overflow, the scale doubles; an overflow halves it
    growth_steps: Count = 2000


@dataclass(frozen=True, kw_only=True)
class CastSettings(Settings):
    """Settings of every recipe that casts to 8 or 4 bits."""

    # Linears that stay in 16 bits: "head", the blocks "first", "last", "last:8" or "last:8/62" (a
    # share of the blocks), or patterns of names
    high_precision_layers: tuple[str, ...] = ("head",)
    # if a shape is not a multiple of the blocks: True pads with zeros, False raises an error
    pad: bool = False
    gradient_rounding: Literal["nearest-even", "stochastic"] = "nearest-even"
    # transform of both operands of dw
    transform: Literal["none", "hadamard"] = "none"


@dataclass(frozen=True, kw_only=True)
class Fp8Settings(CastSettings):
    forward_format: Format8 = "e4m3fn"      # format of activations and weights
    gradient_format: Format8 = "e4m3fn"
    scale: Literal["float32", "power-of-two", "power-of-two-floor"] = "float32"


@dataclass(frozen=True, kw_only=True)
class AccumulationSettings(Fp8Settings):
    """Settings of recipes whose scales are constant along the sum. Tensor cores may then accumulate
    a whole sum without float32 additions, in about 14 bits on Hopper (DeepSeek-V3, section 3.3.2),
    which is faster. torchao and Transformer Engine do this for y only. Emulation accumulates in
    float32."""

    # products that tensor cores may accumulate in this way
    fast_accumulation: tuple[Literal["y", "dx", "dw"], ...] = ("y",)


@dataclass(frozen=True, kw_only=True)
class DelayedSettings(AccumulationSettings):
    """Delayed scaling: a scale is computed from the amaxes of earlier micro-batches, so a cast
    reads its tensor once instead of twice."""

    # number of micro-batches whose amax is remembered; 1024 as in Transformer Engine
    history: Annotated[int, between(1, 2**16)] = 1024
    history_rule: Literal["max", "most-recent"] = "max"
    # amaxes may grow by a factor of 2^margin before values overflow
    margin: Annotated[int, between(0, 64)] = 0


@dataclass(frozen=True, kw_only=True)
class MxSettings(Fp8Settings):
    """Settings of MX recipes."""

    # the format of the scales, E8M0, can store only powers of two
    scale: Literal["power-of-two", "power-of-two-floor"] = "power-of-two"


@dataclass(frozen=True, kw_only=True)
class Recipe(TechniqueRow):
    """A precision recipe. If a product (y, dx, dw) is None, it runs in the compute dtype, and so
    does an operand whose cast is None."""

    compute: str | None     # the dtype of autocast, bfloat16 or float16; None: all is float32
    # dtype in `Machine.flops` of the products, on hardware that multiplies them
    dtype: str
    y: Casts | None = None
    dx: Casts | None = None
    dw: Casts | None = None
    delayed: DelayedSettings | None = None      # None: a scale is computed from its tensor's amax
    fast_accumulation: tuple[str, ...] = ()     # as in AccumulationSettings
    loss_scaling: LossScaledSettings | None = None
    high_precision_layers: tuple[str, ...] = ()     # Linears that stay in `compute`
    pad: bool = False
    settings: Settings = field(default_factory=Settings, compare=False)
    implementation: str = "lpkit.precision.linear:ScaledLinear"
    make: Callable[[Settings], "Recipe"] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def products(self) -> dict[str, Casts]:
        """{product: (cast, cast)} of the products that cast at least one operand."""
        pairs = {"y": self.y, "dx": self.dx, "dw": self.dw}
        return {name: casts for name, casts in pairs.items() if casts and any(casts)}

    @property
    def one_sided(self) -> str:
        """The names of products that cast only one operand, in words. No hardware multiplies them.
        """
        return " and ".join(name for name, casts in self.products.items() if None in casts)

    @cached_property
    def all_casts(self) -> list[Cast]:
        """The casts of all operands of `products`."""
        return [cast for pair in self.products.values() for cast in pair if cast is not None]

    @cached_property
    def cast_of(self) -> dict[tuple[str, str], Cast | None]:
        """{(product, role): cast}, with None for operands that are not cast."""
        return {(name, role): cast for name, roles in PRODUCTS.items()
                for role, cast in zip(roles, self.products.get(name, (None, None)))}

    @cached_property
    def tile(self) -> int:
        """A number of which M, N and K must be multiples, so that the blocks of every operand fit.
        """
        return max((max(cast.tile) for cast in self.all_casts), default=1)

    @cached_property
    def stochastic(self) -> bool:
        return any(cast.rounding == "stochastic" for cast in self.all_casts)

    @property
    def gathers(self) -> bool:
        """True if both products of a weight (y and dx) can use the same 8-bit cast of it, so that
        ranks can send the cast instead of the weight (`parallel.gathered`)."""
        both = {casts and casts[1] for casts in (self.y, self.dx)}
        cast = both.pop()
        return (not both and cast is not None and cast.transposes
                and cast.format in get_args(Format8) and cast.rounding == "nearest-even"
                and SCALES[cast.scale].levels == 1)

    @property
    def history(self) -> int:
        """The number of remembered amaxes for each role (x, w, g) of a Linear; 0: none."""
        return self.delayed.history if self.delayed else 0


def untiled(recipe: Recipe, sizes: Mapping[str, int], alignment: int = 0) -> str:
    """Return why a Linear of these sizes cannot run with the recipe; "": it can.

    sizes:     sizes by axis, "M", "K" or "N"; a missing size is not checked
    alignment: rows of operands and results must be multiples of this many bytes; 0: no such rule
    """
    for name, casts in recipe.products.items():
        for i, (cast, sides) in enumerate(zip(casts, SIDES[name])):
            if cast is None:
                continue
            (rows, along, mixed), elements = cast.tile, alignment * 8 // cast.bits
            needs = (max(rows, i * elements), max(along, mixed, elements))
            for side, needed in zip(sides, needs):
                size = sizes.get(side, 0)
                if size % needed:
                    below = size // needed * needed
                    near = f"{below} or {below + needed}" if below else f"{needed}"
                    return f"{size} {SIDE_WORDS[side]} do not tile by {needed} (nearest: {near})"
    return ""


# Rows.

def _cast_recipe(settings: CastSettings, x: Cast, w: Cast, g: Cast, *, dtype: str) -> Recipe:
    """Return a recipe from the casts of x, w and g. `dtype`: as in Recipe."""
    g = replace(g, rounding=settings.gradient_rounding)
    dw = (replace(g, transform=settings.transform), replace(x, transform=settings.transform))
    return Recipe(compute="bfloat16", dtype=dtype, y=(x, w), dx=(g, w), dw=dw, pad=settings.pad,
                  high_precision_layers=settings.high_precision_layers,
                  delayed=settings if isinstance(settings, DelayedSettings) else None)


def _fp8(settings: Fp8Settings, *, block: tuple[int, int] = (ALL, ALL),
         weight: tuple[int, int] | None = None) -> Recipe:
    x = Cast(format=settings.forward_format, block=block, scale=settings.scale)
    g = replace(x, format=settings.gradient_format)
    recipe = _cast_recipe(settings, x, replace(x, block=weight or block), g, dtype="fp8")
    fast = settings.fast_accumulation if isinstance(settings, AccumulationSettings) else ()
    return replace(recipe, fast_accumulation=fast)


def _nvfp4(settings: CastSettings, *, scale: str = "e4m3") -> Recipe:
    x = Cast(format="e2m1", block=(1, 16), scale=scale)
    square = replace(x, block=(16, 16))     # square blocks give w the same values in y and in dx
    return _cast_recipe(settings, x, square, x, dtype="fp4")


def _int8(settings: CastSettings) -> Recipe:
    x = Cast(format="int8", block=(1, ALL))
    return _cast_recipe(settings, x, x, x, dtype="int8")


RECIPES: dict[str, Recipe] = {}


def add(name: str, make: Callable[[Settings], Recipe], settings: Settings, source: str) -> None:
    """Add a row to RECIPES: `make(settings)` is the recipe, `settings` are its defaults."""
    settings = replace(settings, name=name)
    RECIPES[name] = replace(make(settings), source=source, settings=settings, make=make)


add("fp32", lambda settings: Recipe(compute=None, dtype="fp32"), Settings(), "IEEE 754 binary32")
add("bf16", lambda settings: Recipe(compute="bfloat16", dtype="bf16"), Settings(),
    "Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322")
add("fp16", lambda settings: Recipe(compute="float16", dtype="fp16", loss_scaling=settings),
    LossScaledSettings(),
    "Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740")
add("fp8-tensorwise", _fp8, AccumulationSettings(gradient_format="e5m2"),
    "Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; scaled by each tensor's own amax")
add("fp8-delayed", _fp8, DelayedSettings(gradient_format="e5m2"),
    "Transformer Engine's DelayedScaling, "
    "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html")
add("fp8-rowwise", partial(_fp8, block=(1, ALL)), AccumulationSettings(scale="power-of-two"),
    "torchao's rowwise recipe (E4M3 throughout, powers of two), https://github.com/pytorch/ao")
add("fp8-blockwise", partial(_fp8, block=(1, 128), weight=(128, 128)), Fp8Settings(),
    "DeepSeek-V3, section 3.3, https://arxiv.org/abs/2412.19437")
add("fp8-blockwise-pow2", partial(_fp8, block=(1, 128), weight=(128, 128)),
    Fp8Settings(scale="power-of-two"),
    "Transformer Engine's Float8BlockScaling, https://docs.nvidia.com/deeplearning/"
    "transformer-engine/user-guide/api/common.html")
add("mxfp8", partial(_fp8, block=MX_BLOCK), MxSettings(),
    "OCP Microscaling 1.0, https://arxiv.org/abs/2310.10537; scales rounded up as in "
    "Mishra et al. 2025, https://arxiv.org/abs/2506.08027")
add("nvfp4", partial(_nvfp4, scale="e4m3-normal"),
    CastSettings(high_precision_layers=("head", "last"), gradient_rounding="stochastic",
                 transform="hadamard"),
    "the scales of torchao's NVFP4Tensor, https://github.com/pytorch/ao; the rest NVIDIA 2025, "
    "https://arxiv.org/abs/2509.25149")
add("nvfp4-published", _nvfp4,
    CastSettings(high_precision_layers=("head", "first:2/62", "last:8/62"),
                 gradient_rounding="stochastic", transform="hadamard"),
    "NVIDIA 2025, section 4 and appendices A.1 and B, https://arxiv.org/abs/2509.25149")
add("int8", _int8, CastSettings(),
    "torchao's INT8 mixed-precision training, https://github.com/pytorch/ao; "
    "Wortsman et al. 2023, https://arxiv.org/abs/2304.13013")


# A backend (`precision.backend`) computes the products of a recipe. The implementation is a
# `lpkit.precision.backends.Backend`. `auto` uses the first of these that can run the recipe.
BACKENDS = {name: TechniqueRow(why=why, implementation=f"lpkit.precision.{where}")
            for name, where, why in (
    ("pytorch", "backends:PYTORCH", "recipes that cast nothing: nn.Linear under autocast"),
    ("scaled_mm", "scaled_mm:SCALED_MM", "torch._scaled_mm and F.scaled_mm: tensor cores of Ada, "
     "Hopper and Blackwell; torch._int_mm for int8"),
    ("emulated", "scaled:EMULATED", "any device: the numbers of the recipe without its speed"),
    ("transformer-engine", "libraries:TRANSFORMER_ENGINE",
     "NVIDIA's te.Linear under one te.autocast, when installed"),
    ("torchao", "libraries:TORCHAO", "its Float8Linear and INT8 Linear, when installed"))}

# The names that a Config may use: all of RECIPES, with rows that other packages add, and `auto`.
AUTO = TechniqueRow(why="bf16 where this machine does it fast, else fp32; the run records why")
ASKABLE = ChainMap(RECIPES, {"auto": AUTO})


def resolve(settings: Settings | str, **changes: object) -> Recipe:
    """Return the recipe with these `settings`. If `settings` is a name, return the recipe of this
    name with `changes` of its default settings. Raises ConfigError for an unknown name."""
    row = pick(RECIPES, getattr(settings, "name", settings), "precision.recipe")
    if isinstance(settings, str):
        settings = replace(row.settings, **changes)
    if settings == row.settings:
        return row
    return replace(row.make(settings), source=row.source, settings=settings, make=row.make)


# Linears that stay in high precision.

ENDS = re.compile(r"(?P<end>first|last)(:(?P<count>[1-9]\d*)(/(?P<of>[1-9]\d*))?)?")


def at_end(pattern: str, blocks: Sequence[Any]) -> Sequence[Any] | None:
    """Return the part of `blocks` that `pattern` names: "first" or "last" is one block, "last:4" is
    four blocks, "last:8/62" is this share of the blocks, rounded (it may be none). Return None for
    a pattern of another form.

    >>> at_end("last:2", range(6)), at_end("first:2/62", range(6)), at_end("head", range(6))
    (range(4, 6), range(0, 0), None)
    """
    if (match := ENDS.fullmatch(pattern)) is None:
        return None
    count = int(match["count"] or 1)
    if match["of"]:
        count = round(len(blocks) * count / int(match["of"]))
    return {"first": blocks[:count], "last": blocks[max(0, len(blocks) - count):]}[match["end"]]


def kept(names: Iterable[str], layers: Iterable[str]) -> set[str]:
    """Return those `names` of Linears that stay in high precision.

    names:  all Linears, in the order of the model
    layers: patterns as for `at_end`, or patterns of names such as "head" or "blocks.0.*"
    Raises ConfigError for a pattern that matches no Linear.
    """
    names = list(names)
    numbered = {name: match[0] for name in names
                if (match := re.match(r"(.*?\.)?\d+\.", name + "."))}
    blocks = list(dict.fromkeys(numbered.values()))
    kept_names = set()
    for pattern in layers:
        if (stay := at_end(pattern, blocks)) is None:
            hit = {name for name in names if fnmatchcase(name, pattern)}
        else:
            hit = {name for name in names if numbered.get(name) in stay}
        if not hit and "/" not in pattern:      # a share may be 0 blocks of a small model
            raise ConfigError(f"precision.recipe.high_precision_layers={pattern} matches no Linear "
                              f"of this model; {nearest(pattern, ['first', 'last', *names])}")
        kept_names |= hit
    return kept_names
