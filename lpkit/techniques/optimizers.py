"""Optimizers as rows: settings, the state of each parameter, and the rule that updates it.

An optimizer is a rule `w, slots <- rule(w, gradient, slots, settings)` on float32 numbers. What a
slot (a moment) costs depends on its shape and on the format in which it is stored between updates,
and both are rows here: bytes of state and of traffic follow from them. `lpkit.optim.stepper` runs
any rule in any format.

Weight decay is decoupled for every rule, and no part of the gradient: w <- w (1 - lr weight_decay)
(Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from lpkit.errors import ConfigError, nearest, pick, shown
from lpkit.techniques.row import Row, Settings, Technique, chosen
from lpkit.values import Positive, PositiveOrZero, Rate, at_least_zero

FLOAT32, BF16 = 4, 2    # bytes of a number
BLOCK = 256             # numbers that share one float32 scale in the 8-bit format

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """The settings that every optimizer has; a row's own settings extend it.

    `groups` changes the learning rate or the weight decay of the parameters whose names match a
    pattern: "embed.*:lr_scale=0.1", "head.weight:lr_scale=0.5:weight_decay=0". Or it gives them
    another rule, with settings of its own: "embed.*:optimizer=adamw:lr_scale=0.1:beta2=0.99", whose
    learning rate is still a multiple of this one. Later ones win.
    """

    where = "optimizer."

    lr: Positive = 1e-3
    weight_decay: PositiveOrZero = 0.1
    clip: PositiveOrZero = 1.0      # largest global gradient norm; 0: no clipping
    groups: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        for group in self.groups:
            _parsed(group)


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(OptimizerSettings):
    beta1: Rate = 0.9
    beta2: Rate = 0.95
    eps: Positive = 1e-8


@dataclass(frozen=True, kw_only=True)
class LionSettings(OptimizerSettings):
    lr: Positive = 1e-4     # every coordinate moves by lr, so a third to a tenth of AdamW's
    beta1: Rate = 0.9       # of the direction
    beta2: Rate = 0.99      # of the momentum


@dataclass(frozen=True, kw_only=True)
class MomentumSettings(OptimizerSettings):
    momentum: Rate = 0.9


@dataclass(frozen=True, kw_only=True)
class MomentFormat(Technique):
    """A way to store a slot between updates; implemented as lpkit.optim.moments.Float32 is."""

    bytes: float                # per number
    encoding_bytes: float       # per number, temporary, while a slot is encoded; 0: it is not
    numbers: str                # "float32", "8-bit"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """State of a parameter, named as in checkpoints. Unsigned: never below 0.

    `shape(p)` is the slot's shape, from that of the whole parameter. None: the parameter's own, and
    ZeRO cuts the slot as it cuts the parameter. A slot of another shape is whole on every rank, and
    one that a parameter does not need is (0,).
    """

    name: str
    signed: bool = True
    shape: Callable[[Shape], Shape | None] = lambda p: None


@dataclass(frozen=True, kw_only=True)
class Optimizer(Row):
    """`implementation` is the definition: `rule(w, g, slots, settings, update)`, float32, in place.

    A rule that reads more than one number at a time is `told`: its sixth argument is the
    `contracts.Parameter` that it updates, of which ZeRO gives it rows. Of a whole parameter of
    shape p it holds `whole_bytes(p)` for a while and multiplies matrices with `flops(p)`, on every
    rank that has some of it; `gathers`: it asks for whole gradients.

    `evaluated` is `f(w, slots, settings) -> w`: the weights that evaluation, sampling and exports
    take, where a rule trains others; "": the trained ones.

    `kernel` is the same rule in one fused kernel, `fused` a function (groups, settings) -> torch
    optimizer that updates all parameters at once where everything is float32 on the device, and
    `one_pass` a function (name, system.kernels, parameters, by_first) that chooses whether a GPU
    updates weight and slots in one pass; "": there is none. `temporary_bytes` are those that the
    rule allocates per number.
    """

    settings: OptimizerSettings = OptimizerSettings()
    slots: tuple[Slot, ...]
    kernel: str = ""
    fused: str = ""
    one_pass: str = ""
    temporary_bytes: int = 0
    evaluated: str = ""
    told: bool = False
    gathers: bool = False
    whole_bytes: Callable[[Shape], float] = lambda p: 0.0
    flops: Callable[[Shape], float] = lambda p: 0.0

    @property
    def elementwise(self) -> bool:
        """True if bytes follow from the number of parameters alone."""
        return not self.told and all(slot.shape is Slot.shape for slot in self.slots)

    def state_numbers(self, p: Shape) -> tuple[int, int]:
        """Numbers of the slots that are cut with a parameter of shape p, and of those that are
        not."""
        shapes = [slot.shape(p) for slot in self.slots]
        cut = math.prod(p) * shapes.count(None)
        return cut, sum(math.prod(shape) for shape in shapes if shape is not None)

    def state_bytes(self, moment_format: str = "float32") -> float:
        """Per parameter, between updates."""
        return len(self.slots) * find_format(moment_format).bytes

    def moved_bytes(self, moment_format: str = "float32", weight_bytes: int = FLOAT32) -> float:
        """Per parameter: reads weight, gradient and slots, writes weight and slots."""
        return 3 * weight_bytes + 2 * self.state_bytes(moment_format)

    def update_bytes(self, moment_format: str = "float32", weight_bytes: int = FLOAT32) -> float:
        """Temporary, per number of the largest parameter, where it is updated by itself.

        The slots are decoded; then come, one after the other, the rule, the encoding and, for a
        weight of 16 bits, the noise and the result of its rounding.
        """
        stored = find_format(moment_format)
        decoded = FLOAT32 * len(self.slots) if stored.encoding_bytes else 0
        encoding = stored.encoding_bytes if self.slots else 0
        if weight_bytes == FLOAT32:
            return decoded + max(self.temporary_bytes, encoding)
        rule = FLOAT32 + self.temporary_bytes       # the gradient in float32
        rounding = FLOAT32 + BF16
        return FLOAT32 + decoded + max(rule, encoding, rounding)


MOMENT_FORMATS = {
    "float32": MomentFormat(
        why="as the rule computes it", bytes=FLOAT32, encoding_bytes=0, numbers="float32",
        implementation="lpkit.optim.moments:Float32"),
    "int8": MomentFormat(
        why=f"8 bits a number and a float32 scale for each {BLOCK}",
        source="Dettmers et al. 2022, arXiv:2110.02861",
        bytes=1 + FLOAT32 / BLOCK, encoding_bytes=13,       # blocks, ratios, indices, codes
        numbers=f"8-bit (a float32 scale per {BLOCK})",
        implementation="lpkit.optim.moments:BlockwiseInt8"),
}

OPTIMIZERS = {
    "adamw": Optimizer(
        why="the mean of gradients over the root of their mean square",
        source="Loshchilov & Hutter 2019, arXiv:1711.05101", settings=AdamWSettings(),
        slots=(Slot(name="exp_avg"), Slot(name="exp_avg_sq", signed=False)),
        implementation="lpkit.optim.rules:adamw", kernel="lpkit.optim.rules:adamw_kernel",
        fused="lpkit.optim.rules:adamw_fused", one_pass="lpkit.optim.one_pass:chosen"),
    "lion": Optimizer(
        why="the sign of an interpolated momentum",
        source="Chen et al. 2023, arXiv:2302.06675, algorithm 2", settings=LionSettings(),
        slots=(Slot(name="exp_avg"),), temporary_bytes=FLOAT32,
        implementation="lpkit.optim.rules:lion", one_pass="lpkit.optim.one_pass:chosen"),
    "momentum": Optimizer(
        why="SGD with a sum of past gradients that fades",
        source="Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html",
        settings=MomentumSettings(), slots=(Slot(name="momentum_buffer"),),
        implementation="lpkit.optim.rules:momentum"),
    "sgd": Optimizer(
        why="the gradient alone",
        source="Robbins & Monro 1951, https://doi.org/10.1214/aoms/1177729586", slots=(),
        implementation="lpkit.optim.rules:sgd"),
}


def find(name: str) -> Optimizer:
    return pick(OPTIMIZERS, name, "optimizer")


def find_format(name: str) -> MomentFormat:
    return pick(MOMENT_FORMATS, name, "memory.moment_format")


def describe_state(name: str, moment_format: str = "float32") -> str:
    """'two float32 moments'."""
    count, numbers = len(find(name).slots), find_format(moment_format).numbers
    words = {0: "nothing", 1: f"one {numbers} moment", 2: f"two {numbers} moments"}
    return words.get(count, f"{count} {numbers} moments")


# Groups of parameters by name.

WITHOUT_DECAY = ("*.bias", "*norm*.weight")     # of biases and gains of norms: it pulls them to 0


def _parsed(group: str) -> tuple[str, dict[str, float], OptimizerSettings | None]:
    """"head.*:lr_scale=0.1": the pattern, its values, and the rule of its own, if it names one.
    Raises ConfigError."""
    pattern, *parts = group.split(":")
    pairs = {key: value for key, _, value in (part.partition("=") for part in parts)}
    name, own, values = pairs.pop("optimizer", None), {}, {}
    if name is not None:
        row = pick(OPTIMIZERS, name, "optimizer of optimizer.groups")
        own = vars(row.settings).keys() - {"name", "lr", "clip", "groups", "weight_decay"}
    for key, value in pairs.items():
        if key not in ("lr_scale", "weight_decay", *own):
            raise ConfigError(f"optimizer.groups has {shown(group)}, but a group has no "
                              f"{shown(key)}; set lr_scale or weight_decay")
        if key in own:
            continue
        try:
            values[key] = float(value)
        except ValueError:
            raise ConfigError(f"optimizer.groups has {shown(group)}, but {key} must be a number, "
                              f"got {shown(value)}") from None
        at_least_zero(f"optimizer.groups {shown(group)}: {key}", values[key])
    if not pattern or not parts:
        raise ConfigError(f"optimizer.groups has {shown(group)}; write it as "
                          f"pattern:lr_scale=0.1, pattern:weight_decay=0 or "
                          f"pattern:optimizer=adamw")
    if name is None:
        return pattern, values, None
    own = {key: pairs[key] for key in pairs.keys() & own}
    return pattern, values, replace(chosen(OPTIMIZERS, name), **own)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that share a rule, a learning rate and a weight decay. `settings`: of the rule."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float
    settings: OptimizerSettings


def parameter_groups(names: Sequence[str], settings: OptimizerSettings) -> list[ParameterGroup]:
    """Decayed ones first, then those without decay, then those of `settings.groups`.

    The first two are always there, empty or not, so that the first one has the run's lr.
    Raises ConfigError for a pattern that matches no name.
    """
    special = [_parsed(group) for group in settings.groups]
    for pattern, *_ in special:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"optimizer.groups: no parameter is called {shown(pattern)}; "
                              f"{nearest(pattern, names)}")
    ruled = rules_of(names, settings)
    members = {(True, 1.0, settings.weight_decay, settings): [], (False, 1.0, 0.0, settings): []}
    for name in names:
        decayed = not any(fnmatchcase(name, pattern) for pattern in WITHOUT_DECAY)
        values = {"lr_scale": 1.0, "weight_decay": settings.weight_decay if decayed else 0.0}
        for pattern, changes, _ in special:
            if fnmatchcase(name, pattern):
                values |= changes
        key = (decayed, values["lr_scale"], values["weight_decay"], ruled[name])
        members.setdefault(key, []).append(name)
    groups = []
    for (_, lr_scale, weight_decay, rule), found in members.items():
        groups.append(ParameterGroup(names=tuple(found), lr=settings.lr * lr_scale,
                                     weight_decay=weight_decay, settings=rule))
    return groups


def rules_of(names: Iterable[str], settings: OptimizerSettings) -> dict[str, OptimizerSettings]:
    """The settings of the rule that updates each parameter, by its name."""
    found = dict.fromkeys(names, settings)
    for pattern, _, own in map(_parsed, settings.groups):
        if own:
            found |= {name: own for name in found if fnmatchcase(name, pattern)}
    return found


def rules(settings: OptimizerSettings) -> tuple[OptimizerSettings, ...]:
    """The settings of every rule, that of `settings` first."""
    return (settings, *(own for _, _, own in map(_parsed, settings.groups) if own))


def elementwise(settings: OptimizerSettings) -> bool:
    """True if one rule updates all parameters, number by number: then shapes do not matter."""
    return len(rules(settings)) == 1 and find(settings.name).elementwise


class Work(NamedTuple):
    """The bytes and FLOPs of an optimizer, on average for a parameter of the model. A rank has its
    part of `cut_bytes`, and all of `whole_bytes` and of `flops`; `gathered`: a share of the
    parameters."""

    cut_bytes: float
    whole_bytes: float = 0.0
    gathered: float = 0.0
    flops: float = 0.0


def work(shapes: Mapping[str, Shape], settings: OptimizerSettings,
         moment_format: str = "float32") -> Work:
    """Returns the work of a model whose parameters have these `shapes`, by name."""
    each, found = find_format(moment_format).bytes, []
    for name, rule in rules_of(shapes, settings).items():
        row, p = find(rule.name), shapes[name]
        cut, whole = row.state_numbers(p)
        found.append((each * cut, each * whole, row.gathers * math.prod(p), row.flops(p)))
    count = sum(map(math.prod, shapes.values()))
    return Work(*(sum(of) / count for of in zip(*found)))


def whole_update_bytes(shapes: Mapping[str, Shape], settings: OptimizerSettings,
                       moment_format: str = "float32", weight_bytes: int = FLOAT32,
                       shards: int = 1) -> float:
    """Temporary, while one parameter is updated by itself: the most of all."""
    most = 0.0
    for name, rule in rules_of(shapes, settings).items():
        row, p = find(rule.name), shapes[name]
        each = row.update_bytes(moment_format, weight_bytes)
        most = max(most, each * math.prod(p) / shards + row.whole_bytes(p))
    return most
