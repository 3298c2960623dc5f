"""Optimizers as rows: settings, the state of each parameter, and the rule that updates it.

An optimizer is a rule `w, slots <- rule(w, gradient, slots, settings)` on float32 numbers. What a
slot (a moment) costs depends on the format in which it is stored between updates, and both are rows
here: bytes of state and of traffic follow from them. `lpkit.optim.stepper` runs any rule in any
format.

Weight decay is decoupled for every rule (Loshchilov & Hutter 2019,
https://arxiv.org/abs/1711.05101): w <- w (1 - lr weight_decay), and the gradient does not contain
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lpkit.errors import ConfigError, at_least_zero, nearest, pick, positive
from lpkit.techniques.row import Row, Settings, Technique

FLOAT32, BF16 = 4, 2  # bytes of a number
BLOCK = 256  # numbers that share one float32 scale in the 8-bit format


# ---- settings


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """What every optimizer has; a row's own settings extend it.

    `groups` changes the learning rate or the weight decay of the parameters whose names match a
    pattern: "embed.*:lr_scale=0.1", "head.weight:lr_scale=0.5:weight_decay=0". Later ones win.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0  # largest global gradient norm; 0: no clipping
    groups: tuple[str, ...] = ()

    def __post_init__(self):
        positive("optimizer.", lr=self.lr)
        at_least_zero("optimizer.", weight_decay=self.weight_decay, clip=self.clip)
        for group in self.groups:
            GroupSettings.parse(group)


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(OptimizerSettings):
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self):
        super().__post_init__()
        positive("optimizer.", eps=self.eps)
        _decay_rate(beta1=self.beta1, beta2=self.beta2)


@dataclass(frozen=True, kw_only=True)
class LionSettings(OptimizerSettings):
    lr: float = 1e-4  # every coordinate moves by lr, so a third to a tenth of AdamW's
    beta1: float = 0.9  # of the direction
    beta2: float = 0.99  # of the momentum

    def __post_init__(self):
        super().__post_init__()
        _decay_rate(beta1=self.beta1, beta2=self.beta2)


@dataclass(frozen=True, kw_only=True)
class MomentumSettings(OptimizerSettings):
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self):
        super().__post_init__()
        _decay_rate(momentum=self.momentum)


def _decay_rate(**values: float) -> None:
    """A moving average that forgets nothing (1) takes in no gradient."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"optimizer.{name} must be 0 or more and below 1, got {value}")


# ---- rows


@dataclass(frozen=True, kw_only=True)
class MomentFormat(Technique):
    """How a slot is stored between updates. The implementation is a MomentCodec."""

    bytes: float  # per number
    encoding_bytes: float  # per number, temporary, while a slot is encoded; 0: it is not
    numbers: str  # "float32", "8-bit"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One number of state for each parameter, named as in checkpoints. Unsigned: never below 0."""

    name: str
    signed: bool = True


@dataclass(frozen=True, kw_only=True)
class Optimizer(Row):
    """`implementation` is the definition: `rule(w, g, slots, settings, update)`, float32, in place.

    `kernel` is the same rule in one fused kernel, `fused` a function (groups, settings) -> torch
    optimizer that updates all parameters at once where everything is float32 on the device; "":
    there is none. `temporary_bytes` are those that the rule allocates per number.
    """

    settings: OptimizerSettings = OptimizerSettings()
    slots: tuple[Slot, ...]
    kernel: str = ""
    fused: str = ""
    temporary_bytes: int = 0

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
        rule = FLOAT32 + self.temporary_bytes  # the gradient in float32
        rounding = FLOAT32 + BF16
        return FLOAT32 + decoded + max(rule, encoding, rounding)


MOMENT_FORMATS = {
    "float32": MomentFormat(
        bytes=FLOAT32,
        encoding_bytes=0,
        implementation="lpkit.optim.moments:Float32",
        numbers="float32",
        why="as the rule computes it",
    ),
    "int8": MomentFormat(
        bytes=1 + FLOAT32 / BLOCK,
        encoding_bytes=14,  # blocks, ratios, indices, codes
        implementation="lpkit.optim.moments:BlockwiseInt8",
        numbers=f"8-bit (a float32 scale per {BLOCK})",
        why=f"8 bits a number and a float32 scale for each {BLOCK}",
        source="Dettmers et al. 2022, arXiv:2110.02861",
    ),
}

OPTIMIZERS = {
    "adamw": Optimizer(
        settings=AdamWSettings(),
        slots=(Slot(name="exp_avg"), Slot(name="exp_avg_sq", signed=False)),
        implementation="lpkit.optim.rules:adamw",
        kernel="lpkit.optim.rules:adamw_kernel",
        fused="lpkit.optim.rules:adamw_fused",
        source="Loshchilov & Hutter 2019, arXiv:1711.05101",
        why="the mean of gradients over the root of their mean square",
    ),
    "lion": Optimizer(
        settings=LionSettings(),
        slots=(Slot(name="exp_avg"),),
        implementation="lpkit.optim.rules:lion",
        temporary_bytes=FLOAT32,
        source="Chen et al. 2023, arXiv:2302.06675, algorithm 2",
        why="the sign of an interpolated momentum",
    ),
    "momentum": Optimizer(
        settings=MomentumSettings(),
        slots=(Slot(name="momentum_buffer"),),
        implementation="lpkit.optim.rules:momentum",
        source="Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html",
        why="SGD with a sum of past gradients that fades",
    ),
    "sgd": Optimizer(
        settings=OptimizerSettings(),
        slots=(),
        implementation="lpkit.optim.rules:sgd",
        source="Robbins & Monro 1951, https://doi.org/10.1214/aoms/1177729586",
        why="the gradient alone",
    ),
}


def find(name: str) -> Optimizer:
    return pick(OPTIMIZERS, name, "optimizer")


def find_format(name: str) -> MomentFormat:
    return pick(MOMENT_FORMATS, name, "memory.moment_format")


def describe_state(name: str, moment_format: str = "float32") -> str:
    """'two float32 moments'."""
    count = len(find(name).slots)
    if count == 0:
        return "nothing"
    stored = find_format(moment_format)
    number = {1: "one", 2: "two", 3: "three"}.get(count, str(count))
    return f"{number} {stored.numbers} moment{'s' if count > 1 else ''}"


# ---- groups of parameters by name

# Biases and the gains of norms: decay would pull them to 0.
WITHOUT_DECAY = ("*.bias", "*norm*.weight")


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What is special about parameters whose names match `pattern`; None: nothing."""

    pattern: str
    lr_scale: float | None = None
    weight_decay: float | None = None

    @classmethod
    def parse(cls, text: str) -> "GroupSettings":
        """Of "pattern:lr_scale=0.1:weight_decay=0". Raises ConfigError."""
        pattern, *parts = text.split(":")
        values = {}
        for part in parts:
            key, _, value = part.partition("=")
            if key not in ("lr_scale", "weight_decay"):
                raise ConfigError(
                    f"optimizer.groups has {text!r}, but a group has no {key!r}; "
                    f"set lr_scale or weight_decay"
                )
            try:
                values[key] = float(value)
            except ValueError:
                raise ConfigError(
                    f"optimizer.groups has {text!r}, but {key} must be a number, got {value!r}"
                ) from None
        if not pattern or not values:
            raise ConfigError(
                f"optimizer.groups has {text!r}; write it as pattern:lr_scale=0.1 "
                f"or pattern:weight_decay=0"
            )
        at_least_zero(f"optimizer.groups {text!r}: ", **values)
        return cls(pattern=pattern, **values)


def is_decayed(name: str) -> bool:
    """Whether weight decay applies to the parameter `name` unless a group says otherwise."""
    return not any(fnmatchcase(name, pattern) for pattern in WITHOUT_DECAY)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that share a learning rate and a weight decay."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float


def parameter_groups(names: Sequence[str], settings: OptimizerSettings) -> list[ParameterGroup]:
    """Decayed ones first, then those without decay, then those of `settings.groups`.

    The first two are always there, empty or not, so that the first one has the run's lr.
    Raises ConfigError for a pattern that matches no name.
    """
    special = [GroupSettings.parse(text) for text in settings.groups]
    for group in special:
        if not any(fnmatchcase(name, group.pattern) for name in names):
            raise ConfigError(
                f"optimizer.groups: no parameter is called {group.pattern!r}; "
                f"{nearest(group.pattern, names)}"
            )
    members: dict[tuple, list[str]] = {}
    plain = {True: (True, 1.0, settings.weight_decay), False: (False, 1.0, 0.0)}
    for key in plain.values():
        members[key] = []
    for name in names:
        decayed, lr_scale, weight_decay = plain[is_decayed(name)]
        for group in special:
            if fnmatchcase(name, group.pattern):
                lr_scale = lr_scale if group.lr_scale is None else group.lr_scale
                weight_decay = weight_decay if group.weight_decay is None else group.weight_decay
        members.setdefault((decayed, lr_scale, weight_decay), []).append(name)
    groups = []
    for (_, lr_scale, weight_decay), found in members.items():
        groups.append(
            ParameterGroup(names=tuple(found), lr=settings.lr * lr_scale, weight_decay=weight_decay)
        )
    return groups
