"""Precision recipes: rows of data. The same model and the same call, `precision.recipe=NAME`.

A row names the dtype of everything that is not a Linear's product (by autocast; weights stay
float32), and how the two operands of each of a Linear's three products are cast:

    y = x w^T       contracts K, the input features
    dx = g w        contracts N, the output features
    dw = g^T x      contracts M, the tokens

Each operand is cast with the contracted axis last, so block (1, 128) means 128 elements along the
sum. A row is a function of its settings: RECIPES holds each with its defaults, `resolve` makes it
of others.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from lpkit.errors import ConfigError, nearest, pick, positive
from lpkit.techniques.formats import format_of
from lpkit.techniques.row import Row, Settings

ALL = 0               # a block side of ALL spans the whole axis
HADAMARD = 16         # elements of the contracted axis that a Hadamard transform mixes
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Cast:
    """How one operand (rows, contracted axis) is cast: names of FORMATS, SCALES and of the
    transforms."""

    format: str
    block: tuple[int, int] = (ALL, ALL)   # elements that share a scale
    scale: str = "float32"
    rounding: str = "nearest-even"
    transform: str = "none"

    @property
    def tile(self) -> tuple[int, ...]:
        """What the rows and the contracted axis must be multiples of; 1 for a side of ALL."""
        return (self.block[0] or 1, self.block[1] or 1, HADAMARD if self.transform != "none" else 1)

    @property
    def transposes(self) -> bool:
        """Whether the cast of x.T is the cast of x, transposed, so that one serves two products."""
        return self.block[0] == self.block[1] and self.transform == "none"

    @property
    def bits(self) -> int:
        return format_of(self.format).bits


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How the scale of a block follows from its largest magnitude; `lpkit.precision.scaled` has the
    functions."""

    bytes: int = FLOAT32_BYTES  # of one, where hardware stores it
    folds: bool                 # scale times value has at most bf16's 8 significant bits
    # the kernel's name for it, where scale and values are found in one pass
    fused: str | None = None
    levels: int = 1             # 2: one more scale for the tensor, in float32
    # no scale at all: overflow is infinite, as in the format's own arithmetic
    identity: bool = False


SCALES = {
    "float32": Scale(folds=False),
    "power-of-two": Scale(folds=True, fused="rceil"),
    "power-of-two-floor": Scale(folds=True, fused="floor"),
    "e4m3": Scale(bytes=1, folds=True, levels=2),
    "none": Scale(bytes=0, folds=False, identity=True),
}
MX_BLOCK = (1, 32)      # the block whose power-of-two scales hardware stores as E8M0, in one byte


def scale_bytes(cast: Cast) -> int:
    """Of one block's scale, where hardware stores it."""
    return 1 if cast.block == MX_BLOCK else SCALES[cast.scale].bytes


# M tokens, K input features, N output features: the sides of each operand, the contracted one last.
SIDES = {"y": ("MK", "NK"), "dx": ("MN", "KN"), "dw": ("NM", "KM")}
PRODUCTS = {"y": ("x", "w"), "dx": ("g", "w"), "dw": ("g", "x")}     # the operands of each product
SIDE_WORDS = {"M": "tokens", "K": "input features", "N": "output features"}
Casts = tuple[Cast, Cast]


@dataclass(frozen=True, kw_only=True)
class Delayed:
    """Scale by the amaxes of earlier micro-batches, so that a cast needs one pass over its tensor
    instead of two."""

    history: int            # micro-batches whose amax is remembered
    rule: str               # max or most-recent
    margin: int             # the scale leaves 2^margin of room


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Multiply the loss by 2^n before backward, so that small gradients survive in float16
    (Micikevicius et al. 2018)."""

    initial: float
    growth_steps: int  # as many updates without an overflow double the scale; an overflow halves it


# Settings. What a row does not have, it cannot be told.

Format8 = Literal["e4m3fn", "e5m2"]


@dataclass(frozen=True, kw_only=True)
class LossScaledSettings(Settings):
    loss_scale: float = 2.0**16     # the first one
    growth_steps: int = 2000

    def __post_init__(self):
        positive("precision.recipe.", loss_scale=self.loss_scale, growth_steps=self.growth_steps)


@dataclass(frozen=True, kw_only=True)
class CastSettings(Settings):
    # Linears left in 16 bits: first, last, head, patterns of names
    high_precision_layers: tuple[str, ...] = ("head",)
    pad: bool = False  # with zeros, where a shape does not tile; else it is refused
    gradient_rounding: Literal["nearest-even", "stochastic"] = "nearest-even"
    transform: Literal["none", "hadamard"] = "none"     # of the operands of the weight gradient


@dataclass(frozen=True, kw_only=True)
class Fp8Settings(CastSettings):
    forward_format: Format8 = "e4m3fn"      # of activations and weights
    gradient_format: Format8 = "e4m3fn"
    scale: Literal["float32", "power-of-two", "power-of-two-floor"] = "float32"


@dataclass(frozen=True, kw_only=True)
class DelayedSettings(Fp8Settings):
    history: int = 1024  # micro-batches whose amax is remembered; Transformer Engine's default
    history_rule: Literal["max", "most-recent"] = "max"
    margin: int = 0                 # the scale leaves 2^margin of room

    def __post_init__(self):
        positive("precision.recipe.", history=self.history)


@dataclass(frozen=True, kw_only=True)
class MxSettings(Fp8Settings):
    scale: Literal["power-of-two", "power-of-two-floor"] = "power-of-two"      # E8M0 holds no other


@dataclass(frozen=True, kw_only=True)
class Recipe(Row):
    """`compute` is the 16-bit dtype under autocast; None: float32 throughout. A product that is
    None runs in `compute`."""

    compute: str | None     # bfloat16 or float16
    # what the products run in on hardware that has it, by the name that the catalogue of machines
    # uses
    dtype: str
    y: Casts | None = None
    dx: Casts | None = None
    dw: Casts | None = None
    delayed: Delayed | None = None
    loss_scaling: LossScaling | None = None
    # Linears that stay in `compute`: first, last, head, or patterns of names
    high_precision_layers: tuple[str, ...] = ()
    pad: bool = False
    settings: Settings = field(default_factory=Settings, compare=False)
    implementation: str = "lpkit.precision.linear:ScaledLinear"
    make: Callable[[Settings], "Recipe"] | None = field(default=None, compare=False, repr=False)

    @property
    def products(self) -> dict[str, Casts]:
        """The products that are cast."""
        found = {"y": self.y, "dx": self.dx, "dw": self.dw}
        return {name: casts for name, casts in found.items() if casts is not None}

    @property
    def tile(self) -> int:
        """Padding every side to a multiple of this makes every operand tile; all sides of blocks
        are powers of two."""
        return max((side for casts in self.products.values() for cast in casts
                    for side in cast.tile), default=1)

    @property
    def stochastic(self) -> bool:
        return any(cast.rounding == "stochastic" for casts in self.products.values()
                   for cast in casts)

    @property
    def history(self) -> int:
        """Amaxes that are remembered of each of a Linear's three tensors; 0: none."""
        return self.delayed.history if self.delayed else 0


def untiled(recipe: Recipe, sizes: Mapping[str, int], alignment: int = 0) -> str:
    """Why a Linear with these sizes (of M, K and N, those that are known) cannot run; empty when it
    can.

    alignment: bytes that a backend wants every row of its operands, and of the result, to be a
    multiple of.
    """
    for name, casts in recipe.products.items():
        for i, (cast, sides) in enumerate(zip(casts, SIDES[name])):
            (rows, along, mixed), elements = cast.tile, alignment * 8 // cast.bits
            for side, needed in ((sides[0], max(rows, i * elements)),
                                 (sides[1], max(along, mixed, elements))):
                if side in sizes and sizes[side] % needed:
                    below = sizes[side] // needed * needed
                    near = " or ".join(str(size) for size in (below, below + needed) if size)
                    return f"{sizes[side]} {SIDE_WORDS[side]} do not tile by {needed} (nearest: {near})"
    return ""


# Rows.

def _cast_recipe(settings: CastSettings, x: Cast, w: Cast, g: Cast, *, dtype: str,
                 delayed: Delayed | None = None) -> Recipe:
    """Casts of activations, weights and gradients; the settings that every recipe with casts has
    are applied here."""
    g = replace(g, rounding=settings.gradient_rounding)
    dw = [replace(cast, transform=settings.transform) for cast in (g, x)]
    return Recipe(compute="bfloat16", dtype=dtype, y=(x, w), dx=(g, w), dw=(dw[0], dw[1]),
                  delayed=delayed, pad=settings.pad,
                  high_precision_layers=settings.high_precision_layers)


def _fp8(block: tuple[int, int] = (ALL, ALL), *,
         weight: tuple[int, int] | None = None) -> Callable[[Fp8Settings], Recipe]:
    def make(settings: Fp8Settings) -> Recipe:
        delayed = None
        if isinstance(settings, DelayedSettings):
            delayed = Delayed(history=settings.history, rule=settings.history_rule,
                              margin=settings.margin)
        x = Cast(format=settings.forward_format, block=block, scale=settings.scale)
        return _cast_recipe(settings, x, replace(x, block=weight or block),
                            replace(x, format=settings.gradient_format), dtype="fp8",
                            delayed=delayed)

    return make


def _nvfp4(settings: CastSettings) -> Recipe:
    x = Cast(format="e2m1", block=(1, 16), scale="e4m3")
    square = replace(x, block=(16, 16))     # the same values in y and in dx
    return _cast_recipe(settings, x, square, x, dtype="fp4")


def _int8(settings: CastSettings) -> Recipe:
    x = Cast(format="int8", block=(1, ALL))
    return _cast_recipe(settings, x, x, x, dtype="int8")


def _fp16(settings: LossScaledSettings) -> Recipe:
    return Recipe(compute="float16", dtype="fp16", loss_scaling=LossScaling(
        initial=settings.loss_scale, growth_steps=settings.growth_steps))


RECIPES: dict[str, Recipe] = {}


def add(name: str, make: Callable[[Settings], Recipe], settings: Settings, source: str) -> None:
    """Put a row into RECIPES: `make(settings)` is the recipe, `settings` its defaults."""
    settings = replace(settings, name=name)
    RECIPES[name] = replace(make(settings), source=source, settings=settings, make=make)


add("fp32", lambda settings: Recipe(compute=None, dtype="fp32"), Settings(), "IEEE 754 binary32")
add("bf16", lambda settings: Recipe(compute="bfloat16", dtype="bf16"), Settings(),
    "Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322")
add("fp16", _fp16, LossScaledSettings(),
    "Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740")
add("fp8-tensorwise", _fp8(), Fp8Settings(gradient_format="e5m2"),
    "Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; scaled by each tensor's own amax")
add("fp8-delayed", _fp8(), DelayedSettings(gradient_format="e5m2"),
    "Transformer Engine's DelayedScaling, "
    "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html")
add("fp8-rowwise", _fp8((1, ALL)), Fp8Settings(scale="power-of-two"),
    "torchao's rowwise recipe (E4M3 throughout, powers of two), https://github.com/pytorch/ao")
add("fp8-blockwise", _fp8((1, 128), weight=(128, 128)), Fp8Settings(),
    "DeepSeek-V3, section 3.3, https://arxiv.org/abs/2412.19437")
add("mxfp8", _fp8(MX_BLOCK), MxSettings(),
    "OCP Microscaling 1.0, https://arxiv.org/abs/2310.10537; scales rounded up as in "
    "Mishra et al. 2025, https://arxiv.org/abs/2506.08027")
add("nvfp4", _nvfp4, CastSettings(high_precision_layers=("head", "last"),
                                  gradient_rounding="stochastic", transform="hadamard"),
    "NVIDIA 2025, https://arxiv.org/abs/2509.25149")
add("int8", _int8, CastSettings(),
    "torchao's INT8 mixed-precision training, https://github.com/pytorch/ao; "
    "Wortsman et al. 2023, https://arxiv.org/abs/2304.13013")


@dataclass(frozen=True, kw_only=True)
class Auto(Row):
    """`auto`: bf16 where this machine does it fast, else fp32; the run records why."""


class _Askable(Mapping):
    """RECIPES and `auto`, as a Config may name them; rows that are added later are there too."""

    def __getitem__(self, name: str) -> "Recipe | Auto":
        return Auto() if name == "auto" else RECIPES[name]

    def __iter__(self):
        return iter(("auto", *RECIPES))

    def __len__(self) -> int:
        return 1 + len(RECIPES)


ASKABLE: Mapping[str, "Recipe | Auto"] = _Askable()


def resolve(settings: Settings | str, **changes: object) -> Recipe:
    """The recipe of these settings; of a name, with its defaults and `changes`. Raises ConfigError
    for an unknown name."""
    row = pick(RECIPES, getattr(settings, "name", settings), "precision.recipe")
    if isinstance(settings, str):
        settings = replace(row.settings, **changes)
    if settings == row.settings:
        return row
    return replace(row.make(settings), source=row.source, settings=settings, make=row.make)


# Which Linears stay in high precision.

def kept(names: Iterable[str], layers: Iterable[str]) -> set[str]:
    """Those of `names`, Linears in the order of the model, that `layers` says stay.

    `first` and `last` are the first and last of the numbered blocks, the rest are patterns: `head`,
    `blocks.0.*`. Raises ConfigError for a pattern that matches nothing.
    """
    names = list(names)
    numbered = {name: match[0] for name in names if (match := re.match(r".*?\.\d+\.", name + "."))}
    blocks = list(dict.fromkeys(numbered.values()))
    words = {"first": blocks[:1], "last": blocks[-1:]}
    found = set()
    for pattern in layers:
        if pattern in words:
            hit = {name for name in names if numbered.get(name) in words[pattern]}
        else:
            hit = {name for name in names if fnmatchcase(name, pattern)}
        if not hit:
            raise ConfigError(f"precision.recipe.high_precision_layers={pattern} matches no Linear "
                              f"of this model; {nearest(pattern, [*words, *names])}")
        found |= hit
    return found
