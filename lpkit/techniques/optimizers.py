"""Optimizers as rows: their settings, the state that they keep for each parameter, and the rule
that updates a parameter.

An optimizer is a rule `w, slots <- rule(w, gradient, slots, settings)` on float32 numbers. A slot
is a tensor of state, for example a moment. Its bytes depend on its shape (`Optimizer`) and on the
format in which it is stored between updates (`MomentFormat`). Both are rows, from which predictions
compute bytes of state and of memory traffic. `lpkit.optim.stepper` runs any rule with any format.

Weight decay is decoupled from the gradient, w <- w (1 - lr weight_decay) (Loshchilov & Hutter 2019,
https://arxiv.org/abs/1711.05101), unless a rule defines it differently. It applies to parameters
with two or more dimensions, as in nanoGPT, because it would pull gains and biases to 0. A module's
attribute `decays` (True or False) and `optimizer.groups` can change this.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from lpkit import values
from lpkit.errors import ConfigError, nearest, pick, shown
from lpkit.techniques.row import Settings, Technique, TechniqueRow, chosen, pick_row
from lpkit.values import Positive, PositiveOrZero, Rate

FLOAT32, BF16 = 4, 2    # bytes of a number
NEWTON_SCHULZ = 5       # steps of the Newton-Schulz iteration of Muon
BLOCK = 256             # numbers that share one float32 scale in the 8-bit format

Shape = tuple[int, ...]         # shape of a whole parameter


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """The settings that every optimizer has. A row's own settings extend this class.

    `groups` changes the learning rate or the weight decay of parameters whose names match a
    pattern: "embed.*:lr_scale=0.1", "head.weight:lr_scale=0.5:weight_decay=0". A group can also
    have another optimizer with its own settings:
    "embed.*:optimizer=adamw:lr_scale=0.1:beta2=0.99". Its learning rate is `lr_scale` times this
    `lr`. If a parameter matches several groups, the last one decides.
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
    lr: Positive = 1e-4     # each weight changes by lr: use 1/3 to 1/10 of AdamW's learning rate
    beta1: Rate = 0.9       # for the direction of an update
    beta2: Rate = 0.99      # for the stored momentum


@dataclass(frozen=True, kw_only=True)
class MomentumSettings(OptimizerSettings):
    momentum: Rate = 0.9


@dataclass(frozen=True, kw_only=True)
class MomentFormat(Technique):
    """A format in which slots are stored between updates (`memory.moment_format`). The
    implementation is a class with the methods of lpkit.optim.moments.Float32."""

    bytes: float                # bytes per number, with its share of the scales
    encoding_bytes: float       # temporary bytes per number while a slot is encoded
    numbers: str                # the format in words, for tables

    @property
    def encoded(self) -> bool:
        """True if slots are converted before they are stored."""
        return self.bytes != FLOAT32


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A tensor of state that an optimizer keeps for each parameter.

    name:   its name in checkpoints
    signed: False: its numbers are never below 0
    shape:  f(p, settings) -> shape of the slot for a whole parameter of shape p. None: the shape of
            the parameter; then ZeRO divides the slot over ranks as it divides the parameter. A slot
            of another shape is whole on every rank. (0,): this parameter does not need the slot
    """

    name: str
    signed: bool = True
    shape: Callable[[Shape, Any], Shape | None] = lambda p, settings: None


@dataclass(frozen=True, kw_only=True)
class Optimizer(TechniqueRow):
    """A row of OPTIMIZERS. `implementation` is the rule: f(w, g, slots, settings, update), which
    changes the float32 tensors w and slots in place. `update` counts from 1.

    takes_parameter
                the rule needs more than single numbers, for example the norm of a parameter. It
                gets the `contracts.Parameter` as its sixth argument, from which it asks norms and
                whole tensors. With ZeRO, w, g and slots are only some rows of the parameter
    whole_bytes, flops
                f(p, settings) -> temporary bytes, and matmul FLOPs, for a whole parameter of shape
                p, on every rank that has a part of the parameter
    gathers     number of times that the rule gathers all rows in an update
    matrices    the rule updates only matrices. Of a parameter that combines several matrices
                (qkv, gate_up), it updates each matrix by itself
    groups      groups of parameters, which are applied before `optimizer.groups`
    after       f(training, settings, batch, step), called after each update. It may change slots
                with `Stepper.instead`
    passes      f(settings) -> {name of a row in the prediction of seconds: n}; every n updates, the
                optimizer runs one more forward and backward
    evaluated   f(w, slots, settings) -> the weights for evaluation, sampling and exports. "": these
                are the trained weights
    kernel      the rule as one fused kernel; "": there is none
    fused       f(groups, settings) -> a torch optimizer that updates all parameters in one call, if
                all tensors are float32 and on the device; "": there is none
    one_pass    f(name, system.kernels, parameters, by_first) chooses whether a kernel on a GPU
                reads and writes weight and slots only once; "": there is no such kernel
    temporary_bytes
                bytes that the rule allocates per number of the parameter

    The strings are "package.module:name".
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
    takes_parameter: bool = False
    gathers: int = 0
    matrices: bool = False
    groups: tuple[str, ...] = ()
    whole_bytes: Callable[[Shape, Any], float] = lambda p, settings: 0.0
    flops: Callable[[Shape, Any], float] = lambda p, settings: 0.0

    @property
    def elementwise(self) -> bool:
        """True if the bytes of state depend only on the number of parameters, not on shapes."""
        return not self.takes_parameter and all(slot.shape is Slot.shape for slot in self.slots)

    def slot_numbers(self, p: Shape, settings: Any, shards: int = 1) -> list[float]:
        """Return, for each slot, how many numbers one of `shards` ranks stores for a parameter of
        shape p.

        >>> OPTIMIZERS["adamw"].slot_numbers((4, 8), AdamWSettings(), shards=2)
        [16.0, 16.0]
        """
        shapes = [slot.shape(p, settings) for slot in self.slots]
        return [math.prod(p) / shards if shape is None else math.prod(shape) for shape in shapes]

    @property
    def slots_per_number(self) -> float:
        """The numbers in all slots, per number of a large matrix: 2 for AdamW."""
        return sum(self.slot_numbers((4096, 4096), self.settings)) / 4096**2

    def state_bytes(self, moment_format: str = "float32") -> float:
        """Return the bytes of optimizer state per number of a parameter, between updates.

        >>> OPTIMIZERS["adamw"].state_bytes()
        8.0
        """
        return self.slots_per_number * find_format(moment_format).bytes


MOMENT_FORMATS = {
    "float32": MomentFormat(
        why="float32, as the rule computes slots", bytes=FLOAT32, encoding_bytes=0,
        numbers="float32",
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
    """Return the temporary bytes of Muon: two matrices of shape p, and a Gram matrix."""
    return FLOAT32 * (2 * math.prod(p) + min(p)**2)


def _muon_flops(p: Shape, settings: OptimizerSettings) -> float:
    """Return the FLOPs of Muon for a matrix X of shape p, whose smaller side is n. Each step has
    three matmuls: the Gram matrix A = X X^T (n, n), A A, and the polynomial of A times X."""
    return NEWTON_SCHULZ * (4 * min(p)**2 * max(p) + 2 * min(p)**3)


BY_ADAMW = tuple(f"{pattern}:optimizer=adamw" for pattern in (
    "embed*", "positions*", "head*", "*norm*", "*.bias", "*.sinks"))

OPTIMIZERS = {
    "adamw": Optimizer(
        why="the mean of past gradients, divided by the root of their mean square",
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
        why="SGD with a decaying sum of past gradients",
        source="Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html",
        settings=MomentumSettings(), slots=(Slot(name="momentum_buffer"),),
        implementation="lpkit.optim.rules:momentum"),
    "muon": Optimizer(
        why="orthogonalised momentum of matrices; AdamW at lr / 20 for embeddings, head, vectors",
        source="Jordan et al. 2024, https://kellerjordan.github.io/posts/muon",
        # this lr is for updates whose singular values are near 1
        settings=MomentumSettings(lr=0.02, weight_decay=0.01, momentum=0.95),
        slots=(Slot(name="momentum_buffer"),),
        groups=tuple(f"{group}:lr_scale=0.05" for group in BY_ADAMW),
        takes_parameter=True, gathers=1, matrices=True, temporary_bytes=FLOAT32,
        whole_bytes=_muon_bytes, flops=_muon_flops, implementation="lpkit.optim.muon:muon"),
    "sgd": Optimizer(
        why="the gradient, without state",
        source="Robbins & Monro 1951, https://doi.org/10.1214/aoms/1177729586", slots=(),
        implementation="lpkit.optim.rules:sgd"),
}


def find(name: str) -> Optimizer:
    """Return the row of optimizer `name`. Raises ConfigError for an unknown name."""
    return pick_row(OPTIMIZERS, name, "optimizer")


def find_format(name: str) -> MomentFormat:
    """Return the row of `memory.moment_format` `name`. Raises ConfigError for an unknown name."""
    return pick(MOMENT_FORMATS, name, "memory.moment_format")


# Groups of parameters, by name.

def _parsed(group: str) -> tuple[str, dict[str, float], OptimizerSettings | None]:
    """Parse a group such as "head.*:lr_scale=0.1". Return its pattern, its changes of lr_scale and
    weight_decay, and the settings of its own optimizer (None: it names none). Raises ConfigError if
    the group cannot be parsed."""
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
    """Return all parsed groups: first those of the optimizer's row, then those of `settings`."""
    return [_parsed(group) for group in (*find(settings.name).groups, *settings.groups)]


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters, by name, with the same rule (`settings`), learning rate and weight decay."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float
    settings: OptimizerSettings


def parameter_groups(parameters: Iterable[Any],
                     settings: OptimizerSettings) -> list[ParameterGroup]:
    """Divide parameters into groups: first the parameters with weight decay, then those without,
    then those that `settings.groups` changes.

    parameters: `contracts.Parameter`s with the shapes of whole parameters
    The first two groups always exist, even if they are empty, so that the lr of the first group is
    the lr of the run. Raises ConfigError for a pattern that matches no name.
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
    """Return {name of a parameter: settings of the rule that updates it}."""
    settings_by_name = dict.fromkeys(names, settings)
    for pattern, _, own in _groups(settings):
        if own:
            settings_by_name |= {name: own for name in settings_by_name
                                 if fnmatchcase(name, pattern)}
    return settings_by_name


def rules(settings: OptimizerSettings) -> tuple[OptimizerSettings, ...]:
    """Return the settings of all rules that an optimizer uses: `settings`, then those of groups."""
    return (settings, *(own for _, _, own in _groups(settings) if own))


def acting(settings: OptimizerSettings) -> list[OptimizerSettings]:
    """Return the settings of those rules whose row has a function to call after each update
    (`Optimizer.after`)."""
    return [rule for rule in rules(settings) if find(rule.name).after]
