"""Optimizers as rows: settings, the state of each parameter, and the rule that updates it.

An optimizer is a rule `w, slots <- rule(w, gradient, slots, settings)` on float32 numbers. The cost
of a slot (a moment) depends on its shape and on the format in which it is stored between updates.
Both are rows here, so bytes of state and of traffic follow from them. `lpkit.optim.stepper` runs
any rule in any format.

Weight decay is decoupled from the gradient: w <- w (1 - lr weight_decay) (Loshchilov & Hutter 2019,
https://arxiv.org/abs/1711.05101), unless a rule defines it differently. It applies to parameters of
two dimensions or more, as in nanoGPT, since it would pull gains and scales to 0. A module's
attribute `decays` (True or False) and `optimizer.groups` change this.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from lpkit import values
from lpkit.errors import ConfigError, nearest, pick, shown
from lpkit.techniques.row import Row, Settings, Technique, chosen, pick_row
from lpkit.values import Positive, PositiveOrZero, Rate

FLOAT32, BF16 = 4, 2    # bytes of a number
NEWTON_SCHULZ = 5       # steps of Muon's iteration
BLOCK = 256             # numbers that share one float32 scale in the 8-bit format

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """The settings of every optimizer; a row's own settings extend them.

    `groups` changes the learning rate or the weight decay of parameters whose names match a
    pattern: "embed.*:lr_scale=0.1", "head.weight:lr_scale=0.5:weight_decay=0". A group can also
    have another rule with its own settings: "embed.*:optimizer=adamw:lr_scale=0.1:beta2=0.99". Its
    learning rate is still a multiple of this one. Later groups win.
    """

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
    lr: Positive = 1e-4     # every coordinate moves by lr, so use a third to a tenth of AdamW's
    beta1: Rate = 0.9       # for the direction of an update
    beta2: Rate = 0.99      # for the stored momentum


@dataclass(frozen=True, kw_only=True)
class MomentumSettings(OptimizerSettings):
    momentum: Rate = 0.9


@dataclass(frozen=True, kw_only=True)
class MomentFormat(Technique):
    """A format for slots between updates, implemented like lpkit.optim.moments.Float32."""

    bytes: float                # per number
    encoding_bytes: float       # temporary bytes per number while a slot is encoded
    numbers: str                # "float32", "8-bit"

    @property
    def encoded(self) -> bool:
        return self.bytes != FLOAT32


@dataclass(frozen=True, kw_only=True)
class Slot:
    """State of a parameter, with the name that checkpoints use. Unsigned: never below 0.

    `shape(p, settings)` returns the slot's shape for a whole parameter of shape p. None: the shape
    of the parameter, and ZeRO shards the slot like the parameter. Slots of other shapes are whole
    on every rank. A slot that a parameter does not need is (0,).
    """

    name: str
    signed: bool = True
    shape: Callable[[Shape, Any], Shape | None] = lambda p, settings: None


@dataclass(frozen=True, kw_only=True)
class Optimizer(Row):
    """`implementation` is the definition: `rule(w, g, slots, settings, update)`, float32, in place.

    told        the rule reads more than one number at a time. It gets the `contracts.Parameter`
                that it updates as its sixth argument; ZeRO gives it some rows
    whole_bytes, flops
                f(p, settings): temporary bytes and matmul FLOPs for a whole parameter of shape p,
                on every rank that has a part of it
    gathers     how often the rule gathers all rows
    matrices    the rule updates only matrices, and each matrix of a fused parameter by itself
    groups      come before the groups of the settings
    after       f(training, settings, batch, step), called after each update; it may change slots by
                `Stepper.instead`
    passes      f(settings): by the name of a row of seconds, after how many updates the optimizer
                runs one more forward and backward
    evaluated   f(w, slots, settings) -> w: the weights for evaluation, sampling and exports; "":
                the trained weights
    kernel      the rule in one fused kernel; "": none
    fused       f(groups, settings) -> a torch optimizer that updates all parameters at once if
                everything is float32 on the device; "": none
    one_pass    f(name, system.kernels, parameters, by_first) chooses whether a GPU updates weight
                and slots in one pass; "": never
    temporary_bytes
                bytes that the rule allocates per number
    """

    settings: OptimizerSettings = OptimizerSettings()
    slots: tuple[Slot, ...]
    kernel: str = ""
    fused: str = ""
    one_pass: str = ""
    temporary_bytes: int = 0
    evaluated: str = ""
    after: str = ""
    passes: Callable[[Any], Mapping[str, int]] = lambda settings: {}
    told: bool = False
    gathers: int = 0
    matrices: bool = False
    groups: tuple[str, ...] = ()
    whole_bytes: Callable[[Shape, Any], float] = lambda p, settings: 0.0
    flops: Callable[[Shape, Any], float] = lambda p, settings: 0.0

    @property
    def elementwise(self) -> bool:
        """True if bytes depend only on the number of parameters."""
        return not self.told and all(slot.shape is Slot.shape for slot in self.slots)

    def slot_numbers(self, p: Shape, settings: Any, shards: int = 1) -> list[float]:
        """Return the numbers in each slot of a parameter of shape p, on one of `shards` ranks."""
        shapes = [slot.shape(p, settings) for slot in self.slots]
        return [math.prod(p) / shards if shape is None else math.prod(shape) for shape in shapes]

    @property
    def slots_per_number(self) -> float:
        """The numbers in all slots per number of a large matrix."""
        return sum(self.slot_numbers((4096, 4096), self.settings)) / 4096**2

    def state_bytes(self, moment_format: str = "float32") -> float:
        """Return the bytes of state per parameter between updates."""
        return self.slots_per_number * find_format(moment_format).bytes


MOMENT_FORMATS = {
    "float32": MomentFormat(
        why="as the rule computes it", bytes=FLOAT32, encoding_bytes=0, numbers="float32",
        implementation="lpkit.optim.moments:Float32"),
    "bfloat16": MomentFormat(
        why="as torch.optim.AdamW keeps them for bf16 weights; rounded to nearest, so that a slow "
        "mean of squares may stop", bytes=BF16, encoding_bytes=0, numbers="bf16",
        implementation="lpkit.optim.moments:BFloat16"),
    "int8": MomentFormat(
        why=f"8 bits a number and a float32 scale for each {BLOCK}",
        source="Dettmers et al. 2022, arXiv:2110.02861",
        bytes=1 + FLOAT32 / BLOCK, encoding_bytes=13,       # blocks, ratios, indices, codes
        numbers=f"8-bit (a float32 scale per {BLOCK})",
        implementation="lpkit.optim.moments:BlockwiseInt8"),
}

MOMENTS = (Slot(name="exp_avg"), Slot(name="exp_avg_sq", signed=False))


def _muon_bytes(p: Shape, settings: OptimizerSettings) -> float:
    return FLOAT32 * (2 * math.prod(p) + min(p)**2)


def _muon_flops(p: Shape, settings: OptimizerSettings) -> float:
    """Return FLOPs. Each step multiplies for the Gram matrix, its square, and their polynomial with
    the matrix."""
    return NEWTON_SCHULZ * (4 * min(p)**2 * max(p) + 2 * min(p)**3)


BY_ADAMW = tuple(f"{pattern}:optimizer=adamw" for pattern in (
    "embed*", "positions*", "head*", "*norm*", "*.bias", "*.sinks"))

OPTIMIZERS = {
    "adamw": Optimizer(
        why="the mean of gradients over the root of their mean square",
        source="Loshchilov & Hutter 2019, arXiv:1711.05101", settings=AdamWSettings(),
        slots=MOMENTS,
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
    "muon": Optimizer(
        why="a matrix's momentum, orthogonalised; embeddings, head and vectors by AdamW at lr / 20",
        source="Jordan et al. 2024, https://kellerjordan.github.io/posts/muon",
        # this lr is for steps whose singular values are near 1
        settings=MomentumSettings(lr=0.02, weight_decay=0.01, momentum=0.95),
        slots=(Slot(name="momentum_buffer"),),
        groups=tuple(f"{group}:lr_scale=0.05" for group in BY_ADAMW),
        told=True, gathers=1, matrices=True, temporary_bytes=FLOAT32,
        whole_bytes=_muon_bytes, flops=_muon_flops, implementation="lpkit.optim.muon:muon"),
    "sgd": Optimizer(
        why="the gradient alone",
        source="Robbins & Monro 1951, https://doi.org/10.1214/aoms/1177729586", slots=(),
        implementation="lpkit.optim.rules:sgd"),
}


def find(name: str) -> Optimizer:
    return pick_row(OPTIMIZERS, name, "optimizer")


def find_format(name: str) -> MomentFormat:
    return pick(MOMENT_FORMATS, name, "memory.moment_format")


# Groups of parameters, by name.

def _parsed(group: str) -> tuple[str, dict[str, float], OptimizerSettings | None]:
    """Return the pattern of a group such as "head.*:lr_scale=0.1", its changes, and its own rule if
    it names one. Raises ConfigError."""
    pattern, *parts = group.split(":")
    pairs = {key: value for key, _, value in (part.partition("=") for part in parts)}
    name, own, changes = pairs.pop("optimizer", None), {}, {}
    if name is not None:
        row = pick_row(OPTIMIZERS, name, "optimizer of optimizer.groups")
        own = vars(row.settings).keys() - {"name", "lr", "clip", "groups", "weight_decay"}
    for key, value in pairs.items():
        if key not in ("lr_scale", "weight_decay", *own):
            raise ConfigError(f"optimizer.groups has {shown(group)}, but a group has no "
                              f"{shown(key)}; set lr_scale or weight_decay")
        if key not in own:
            changes[key] = values.convert(value, float,
                                          f"optimizer.groups has {shown(group)}, but {key}")
            values.at_least_zero(f"optimizer.groups {shown(group)}: {key}", changes[key])
    if not pattern or not parts:
        raise ConfigError(f"optimizer.groups has {shown(group)}; write it as "
                          f"pattern:lr_scale=0.1, pattern:weight_decay=0 or "
                          f"pattern:optimizer=adamw")
    if name is None:
        return pattern, changes, None
    own = {key: pairs[key] for key in pairs.keys() & own}
    rule = chosen(OPTIMIZERS, name)
    return pattern, changes, replace(rule, **values.read(type(rule), own, "optimizer."))


def _groups(settings: OptimizerSettings) -> list[tuple[str, dict, OptimizerSettings | None]]:
    return [_parsed(group) for group in (*find(settings.name).groups, *settings.groups)]


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same rule (`settings`), learning rate and weight decay."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float
    settings: OptimizerSettings


def parameter_groups(parameters: Iterable[Any], settings: OptimizerSettings) -> list[ParameterGroup]:
    """Return the groups: parameters with decay, then those without, then those of
    `settings.groups`. `parameters` are `contracts.Parameter`s with the shapes of whole parameters.

    The first two groups always exist, even if empty, so that the first one has the run's lr.
    Raises ConfigError for a pattern that matches no name.
    """
    decays = {p.name: len(p.shape) > 1 if p.decays is None else p.decays for p in parameters}
    special, names = _groups(settings), list(decays)
    for pattern, *_ in special[len(find(settings.name).groups):]:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"optimizer.groups: no parameter is called {shown(pattern)}; "
                              f"{nearest(pattern, names)}")
    ruled = rules_of(names, settings)
    members = {(True, 1.0, settings.weight_decay, settings): [], (False, 1.0, 0.0, settings): []}
    for name in names:
        decayed = decays[name]
        values = {"lr_scale": 1.0, "weight_decay": settings.weight_decay if decayed else 0.0}
        for pattern, changes, _ in special:
            if fnmatchcase(name, pattern):
                values |= changes
        key = (decayed, values["lr_scale"], values["weight_decay"], ruled[name])
        members.setdefault(key, []).append(name)
    return [ParameterGroup(names=tuple(names), lr=settings.lr * lr_scale,
                           weight_decay=weight_decay, settings=rule)
            for (_, lr_scale, weight_decay, rule), names in members.items()]


def rules_of(names: Iterable[str], settings: OptimizerSettings) -> dict[str, OptimizerSettings]:
    """Return the settings of the rule that updates each parameter, by its name."""
    settings_by_name = dict.fromkeys(names, settings)
    for pattern, _, own in _groups(settings):
        if own:
            settings_by_name |= {name: own for name in settings_by_name
                                 if fnmatchcase(name, pattern)}
    return settings_by_name


def rules(settings: OptimizerSettings) -> tuple[OptimizerSettings, ...]:
    """Return the settings of every rule, first those of `settings`."""
    return (settings, *(own for _, _, own in _groups(settings) if own))


def acting(settings: OptimizerSettings) -> list[OptimizerSettings]:
    """Return the settings of the rules whose rows act after each update."""
    return [rule for rule in rules(settings) if find(rule.name).after]
