"""Optimizers as rows: settings, the state of each parameter, and the rule that updates it.

An optimizer is a rule `w, slots <- rule(w, gradient, slots, settings)` on float32 numbers. What a
slot (a moment) costs depends on its shape and on the format in which it is stored between updates,
and both are rows here: bytes of state and of traffic follow from them. `lpkit.optim.stepper` runs
any rule in any format.

Weight decay is decoupled, and no part of the gradient: w <- w (1 - lr weight_decay) (Loshchilov &
Hutter 2019, https://arxiv.org/abs/1711.05101). LAMB's is part of the step
that it scales, and Adam's of the gradient.

It applies to parameters of two dimensions or more, as in nanoGPT: it pulls gains and scales to 0. A
module's attribute `decays` (True or False) and `optimizer.groups` decide otherwise.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from lpkit import values
from lpkit.errors import ConfigError, nearest, pick, shown
from lpkit.techniques.row import Row, Settings, Technique, chosen
from lpkit.values import Count, InnerShare, Positive, PositiveOrZero, Rate, Share

FLOAT32, BF16 = 4, 2    # bytes of a number
NEWTON_SCHULZ = 5       # Muon's steps
LARGEST = 10_000        # side of a matrix that SOAP and Shampoo have a gram of
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
class ScheduleFreeSettings(AdamWSettings):
    beta1: InnerShare = 0.9     # of the average, in the weights that are trained
    beta2: Rate = 0.999


@dataclass(frozen=True, kw_only=True)
class LionSettings(OptimizerSettings):
    lr: Positive = 1e-4     # every coordinate moves by lr, so a third to a tenth of AdamW's
    beta1: Rate = 0.9       # of the direction
    beta2: Rate = 0.99      # of the momentum


@dataclass(frozen=True, kw_only=True)
class SoapSettings(AdamWSettings):
    every: Count = 10       # the bases turn at every n-th update


@dataclass(frozen=True, kw_only=True)
class GaloreSettings(AdamWSettings):
    rank: Count = 128       # of the projection, at most the shorter side
    every: Count = 200      # the projection is renewed at every n-th update
    scale: Positive = 0.25  # of the learning rate, for what is projected


@dataclass(frozen=True, kw_only=True)
class SophiaSettings(AdamWSettings):
    gamma: Positive = 0.05  # of the curvature: the larger, the fewer numbers are clipped
    every: Count = 10       # the curvature is estimated after every n-th update


@dataclass(frozen=True, kw_only=True)
class AdafactorSettings(OptimizerSettings):
    lr: Positive = 1e-2     # of the weights' root mean square, which is taken as `least` or more
    least: Positive = 1e-3
    decay: Share = 0.8      # a gradient's share in second moments is update^-decay


@dataclass(frozen=True, kw_only=True)
class MomentumSettings(OptimizerSettings):
    momentum: Rate = 0.9


@dataclass(frozen=True, kw_only=True)
class NorMuonSettings(MomentumSettings):
    beta2: Rate = 0.95


@dataclass(frozen=True, kw_only=True)
class ShampooSettings(MomentumSettings):
    eps: Positive = 1e-2    # beside the sums: what a root makes of directions not seen yet
    every: Count = 10       # the roots are taken at every n-th update


@dataclass(frozen=True, kw_only=True)
class LarsSettings(MomentumSettings):
    trust: Positive = 1e-3  # of a parameter's norm, how far it moves at lr 1


@dataclass(frozen=True, kw_only=True)
class MomentFormat(Technique):
    """A way to store a slot between updates; implemented as lpkit.optim.moments.Float32 is."""

    bytes: float                # per number
    encoding_bytes: float       # per number, temporary, while a slot is encoded; 0: it is not
    numbers: str                # "float32", "8-bit"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """State of a parameter, named as in checkpoints. Unsigned: never below 0.

    `shape(p, settings)` is the slot's shape, from that of the whole parameter. None: the
    parameter's own, and ZeRO cuts the slot as it cuts the parameter. A slot of another shape is
    whole on every rank, and one that a parameter does not need is (0,).
    """

    name: str
    signed: bool = True
    shape: Callable[[Shape, Any], Shape | None] = lambda p, settings: None


@dataclass(frozen=True, kw_only=True)
class Optimizer(Row):
    """`implementation` is the definition: `rule(w, g, slots, settings, update)`, float32, in place.

    A rule that reads more than one number at a time is `told`: its sixth argument is the
    `contracts.Parameter` that it updates, of which ZeRO gives it rows. Of a whole parameter of
    shape p it holds `whole_bytes(p, settings)` for a while and has `flops(p, settings)` of
    matrices, on every rank that has some of it; `gathers`: so often it asks for all rows.
    `matrices`: it updates those alone, each that is fused in p by itself. `groups` come before the
    settings'. `estimate` is `f(g, slots, settings, labels)`: every `settings.every` updates it has
    the gradients of labels that the model draws, by one more forward and backward.

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
    estimate: str = ""
    told: bool = False
    gathers: int = 0
    matrices: bool = False
    groups: tuple[str, ...] = ()
    whole_bytes: Callable[[Shape, Any], float] = lambda p, settings: 0.0
    flops: Callable[[Shape, Any], float] = lambda p, settings: 0.0

    @property
    def elementwise(self) -> bool:
        """True if bytes follow from the number of parameters alone."""
        return not self.told and all(slot.shape is Slot.shape for slot in self.slots)

    def slot_numbers(self, p: Shape, settings: Any, shards: int = 1) -> list[float]:
        """Numbers of each slot of a parameter of shape p, on a rank that has 1 / shards of it."""
        shapes = [slot.shape(p, settings) for slot in self.slots]
        return [math.prod(p) / shards if shape is None else math.prod(shape) for shape in shapes]

    @property
    def slots_per_number(self) -> float:
        """Counts those of a large matrix."""
        return sum(self.slot_numbers((4096, 4096), self.settings)) / 4096**2

    def state_bytes(self, moment_format: str = "float32") -> float:
        """Per parameter, between updates."""
        return self.slots_per_number * find_format(moment_format).bytes


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

MOMENTS = (Slot(name="exp_avg"), Slot(name="exp_avg_sq", signed=False))


def _muon_bytes(p: Shape, settings: OptimizerSettings) -> float:
    return FLOAT32 * (2 * math.prod(p) + min(p)**2)


def _muon_flops(p: Shape, settings: OptimizerSettings) -> float:
    """A step multiplies for the gram, its square, and that polynomial with the matrix."""
    return NEWTON_SCHULZ * (4 * min(p)**2 * max(p) + 2 * min(p)**3)


def sides(p: Shape) -> list[int]:
    """Returns the sides of a matrix that SOAP has a basis of, 0 for those that it has none of."""
    return [n * (n <= LARGEST and len(p) == 2) for n in (*p, 0)]


def _sums(p: Shape, i: int) -> Shape:
    """Shampoo's sums of side i: a gram, or a diagonal of a vector's side and of one too long."""
    return (sides(p)[i],) * 2 if sides(p)[i] else p[i:i + 1] or (0,)


def _low(p: Shape, settings: GaloreSettings) -> Shape | None:
    """GaLore's projected gradient; None: a vector, which has no projection."""
    return (min(settings.rank, *p), max(p)) if len(p) == 2 else None


BY_ADAMW = tuple(f"{pattern}:optimizer=adamw" for pattern in (
    "embed*", "positions*", "head*", "*norm*", "*.bias", "*.sinks"))

OPTIMIZERS = {
    "adafactor": Optimizer(
        why="Adam's step, by sums over rows and columns of a matrix's squares",
        source="Shazeer & Stern 2018, arXiv:1804.04235", settings=AdafactorSettings(), told=True,
        slots=tuple(Slot(name=name, signed=False, shape=shape) for name, shape in (
            ("rows", lambda p, s: p[:1] if len(p) == 2 else (0,)),
            ("columns", lambda p, s: p[1:] if len(p) == 2 else (0,)),
            ("exp_avg_sq", lambda p, s: (0,) if len(p) == 2 else None))),
        temporary_bytes=2 * FLOAT32, implementation="lpkit.optim.rules:adafactor"),
    "adam": Optimizer(
        why="AdamW, with the weight decay in the gradient",
        source="Kingma & Ba 2015, arXiv:1412.6980", slots=MOMENTS,
        settings=AdamWSettings(weight_decay=0.0, beta2=0.999),
        implementation="lpkit.optim.rules:adam", kernel="lpkit.optim.rules:adam_kernel",
        fused="lpkit.optim.rules:adam_fused"),
    "adamw": Optimizer(
        why="the mean of gradients over the root of their mean square",
        source="Loshchilov & Hutter 2019, arXiv:1711.05101", settings=AdamWSettings(),
        slots=MOMENTS,
        implementation="lpkit.optim.rules:adamw", kernel="lpkit.optim.rules:adamw_kernel",
        fused="lpkit.optim.rules:adamw_fused", one_pass="lpkit.optim.one_pass:chosen"),
    "galore": Optimizer(
        why="AdamW in the r directions in which a matrix's gradient is largest; others by AdamW",
        source="Zhao et al. 2024, arXiv:2403.03507, algorithm 2",
        settings=GaloreSettings(lr=1e-2, weight_decay=0.0, beta2=0.999),
        slots=(*(replace(slot, shape=_low) for slot in MOMENTS), Slot(
            name="projection", shape=lambda p, s: (min(p), min(s.rank, *p)) if p[1:] else (0,))),
        groups=BY_ADAMW[:3], told=True, gathers=1,
        # singular vectors; the projection, Adam's step and its root; that step and the whole one
        whole_bytes=lambda p, s: FLOAT32 * max(
            math.prod(p) + min(p)**2 * len(p[1:]), math.prod(p) + math.prod(_low(p, s) or (0,)),
            3 * math.prod(_low(p, s) or (0,))),
        # to the projection and back; singular vectors take 6 m n^2 + 20 n^3 (Golub & Van Loan)
        flops=lambda p, s: len(p[1:]) * (4 * math.prod(p) * min(s.rank, *p) + (
            6 * max(p) * min(p)**2 + 20 * min(p)**3) / s.every),
        implementation="lpkit.optim.soap:galore"),
    "lamb": Optimizer(
        why="AdamW's step, made as long as lr times the norm of its parameter",
        source="You et al. 2019, arXiv:1904.00962, algorithm 2",
        settings=AdamWSettings(lr=1e-2, beta2=0.999, eps=1e-6), slots=MOMENTS,
        told=True, temporary_bytes=2 * FLOAT32, implementation="lpkit.optim.rules:lamb"),
    "lars": Optimizer(
        why="SGD with momentum, whose step is a share of the norm of its parameter",
        source="You et al. 2017, arXiv:1708.03888, algorithm 1",
        settings=LarsSettings(lr=1.0, weight_decay=5e-4),
        slots=(Slot(name="momentum_buffer"),), told=True, temporary_bytes=FLOAT32,
        implementation="lpkit.optim.rules:lars"),
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
        # the lr of a step whose singular values are near 1
        settings=MomentumSettings(lr=0.02, weight_decay=0.01, momentum=0.95),
        slots=(Slot(name="momentum_buffer"),),
        groups=tuple(f"{group}:lr_scale=0.05" for group in BY_ADAMW),
        told=True, gathers=1, matrices=True, temporary_bytes=FLOAT32,
        whole_bytes=_muon_bytes, flops=_muon_flops, implementation="lpkit.optim.muon:muon"),
    "normuon": Optimizer(
        why="Muon's step, with rows of one length; embeddings, head and vectors by AdamW",
        source="Li et al. 2025, arXiv:2510.05491, algorithm 1",
        # the lr of a step whose numbers have a root mean square of 0.2
        settings=NorMuonSettings(lr=1e-3, weight_decay=0.01, momentum=0.95),
        slots=(Slot(name="momentum_buffer"),
               Slot(name="rows", signed=False, shape=lambda p, s: p[:1])),
        groups=BY_ADAMW, told=True, gathers=1, matrices=True, temporary_bytes=FLOAT32,
        whole_bytes=_muon_bytes, flops=_muon_flops, implementation="lpkit.optim.muon:normuon"),
    "schedule-free": Optimizer(
        why="AdamW, and the average of its weights in place of a falling learning rate",
        source="Defazio et al. 2024, arXiv:2405.15682", settings=ScheduleFreeSettings(),
        slots=(Slot(name="z"), Slot(name="exp_avg_sq", signed=False),
               Slot(name="weight_sum", signed=False, shape=lambda p, s: (1,))),
        temporary_bytes=2 * FLOAT32, evaluated="lpkit.optim.rules:average",
        implementation="lpkit.optim.rules:schedule_free"),
    "sgd": Optimizer(
        why="the gradient alone",
        source="Robbins & Monro 1951, https://doi.org/10.1214/aoms/1177729586", slots=(),
        implementation="lpkit.optim.rules:sgd"),
    "shampoo": Optimizer(
        why="the gradient times the inverse fourth roots of its grams' sums, from both sides",
        source="Gupta et al. 2018, arXiv:1802.09568, algorithm 1",
        settings=ShampooSettings(lr=0.03, weight_decay=0.01),
        slots=(Slot(name="momentum_buffer"),
               *(Slot(name=name, shape=lambda p, s, i=i: _sums(p, i)) for name, i in (
                   ("left", 0), ("right", 1), ("left_root", 0), ("right_root", 1)))),
        told=True, gathers=1,
        whole_bytes=lambda p, s: FLOAT32 * max(2 * math.prod(p), 3 * max(sides(p))**2),
        # both grams, both products; the eigenvectors of a gram take 9 n^3, and its root 2 n^3
        flops=lambda p, s: (4 * math.prod(p) * sum(sides(p))
                            + 11 * sum(n**3 for n in sides(p)) / s.every),
        implementation="lpkit.optim.soap:shampoo"),
    "soap": Optimizer(
        why="Adam's step, in the basis in which Shampoo's preconditioner is diagonal",
        source="Vyas et al. 2024, arXiv:2409.11321, algorithm 3",
        settings=SoapSettings(lr=3e-3, weight_decay=0.01, beta1=0.95),
        slots=(*MOMENTS, *(Slot(name=n, shape=lambda p, s, i=i: (sides(p)[i],) * 2) for n, i in (
            ("left", 0), ("right", 1), ("left_basis", 0), ("right_basis", 1)))),
        told=True, gathers=2, temporary_bytes=FLOAT32,
        whole_bytes=lambda p, s: 2 * FLOAT32 * max(math.prod(p) * any(sides(p)), max(sides(p))**2),
        # to the basis, back, and the gram; a turn moves momentum, and a gram's QR has 8/3 n^3
        flops=lambda p, s: (2 * math.prod(p) * sum(sides(p)) * (3 + 2 / s.every)
                            + (4 + 8 / 3) * sum(n**3 for n in sides(p)) / s.every),
        implementation="lpkit.optim.soap:soap"),
    "sophia": Optimizer(
        why="a momentum over the curvature that labels of the model's own show, clipped at lr",
        source="Liu et al. 2023, arXiv:2305.14342, algorithm 3 (Sophia-G)",
        slots=(Slot(name="exp_avg"), Slot(name="hessian", signed=False)), temporary_bytes=FLOAT32,
        settings=SophiaSettings(beta1=0.96, beta2=0.99, eps=1e-12),
        estimate="lpkit.optim.rules:sophia_estimate",
        implementation="lpkit.optim.rules:sophia"),
}


def find(name: str) -> Optimizer:
    return pick(OPTIMIZERS, name, "optimizer")


def find_format(name: str) -> MomentFormat:
    return pick(MOMENT_FORMATS, name, "memory.moment_format")


# Groups of parameters by name.

def _parsed(group: str) -> tuple[str, dict[str, float], OptimizerSettings | None]:
    """"head.*:lr_scale=0.1": the pattern, its changes, and the rule of its own, if it names one.
    Raises ConfigError."""
    pattern, *parts = group.split(":")
    pairs = {key: value for key, _, value in (part.partition("=") for part in parts)}
    name, own, changes = pairs.pop("optimizer", None), {}, {}
    if name is not None:
        row = pick(OPTIMIZERS, name, "optimizer of optimizer.groups")
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
    """Parameters that share a rule, a learning rate and a weight decay. `settings`: of the rule."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float
    settings: OptimizerSettings


def parameter_groups(parameters: Iterable[Any], settings: OptimizerSettings) -> list[ParameterGroup]:
    """Returns the decayed parameters first, then those without decay, then those of
    `settings.groups`. `parameters`: `contracts.Parameter`s, of whole parameters.

    The first two are always there, empty or not, so that the first one has the run's lr.
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
    return [ParameterGroup(names=tuple(found), lr=settings.lr * lr_scale,
                           weight_decay=weight_decay, settings=rule)
            for (_, lr_scale, weight_decay, rule), found in members.items()]


def rules_of(names: Iterable[str], settings: OptimizerSettings) -> dict[str, OptimizerSettings]:
    """The settings of the rule that updates each parameter, by its name."""
    found = dict.fromkeys(names, settings)
    for pattern, _, own in _groups(settings):
        if own:
            found |= {name: own for name in found if fnmatchcase(name, pattern)}
    return found


def rules(settings: OptimizerSettings) -> tuple[OptimizerSettings, ...]:
    """The settings of every rule, that of `settings` first."""
    return (settings, *(own for _, _, own in _groups(settings) if own))


def estimating(settings: OptimizerSettings) -> list[OptimizerSettings]:
    """The settings of the rules that estimate after the first update and every n-th from there."""
    return [one for one in rules(settings) if find(one.name).estimate]
