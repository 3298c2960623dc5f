"""The cost of an optimizer's update: bytes of state, FLOPs and temporary bytes, from the
optimizer's rows and the shapes of parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lpkit.errors import ConfigError
from lpkit.techniques.optimizers import (
    BF16,
    FLOAT32,
    Optimizer,
    OptimizerSettings,
    Shape,
    find,
    find_format,
    rules,
    rules_of,
)


def describe_state(name: str, moment_format: str = "float32") -> str:
    """Return the optimizer's state in words, such as 'two float32 moments'."""
    row, numbers = find(name), find_format(moment_format).numbers
    words = {0: "nothing", 1: f"one {numbers} moment", 2: f"two {numbers} moments"}
    if row.slots and row.slots_per_number < 1:
        return f"{numbers} moments: fewer than the numbers of a matrix, one per number of a vector"
    moments = words.get(len(row.slots), f"{len(row.slots)} {numbers} moments")
    return f"{moments}, plus moments of the rules in optimizer.groups" if row.groups else moments


def elementwise(settings: OptimizerSettings) -> bool:
    """True if one rule updates every number on its own, so that shapes do not matter."""
    return len(rules(settings)) == 1 and find(settings.name).elementwise


def update_bytes(row: Optimizer, moment_format: str = "float32", weight_bytes: int = FLOAT32,
                 whole: float = 0.0, slots: Sequence[float] = ()) -> float:
    """Return temporary bytes per number of the largest parameter, while it is updated by itself.

    `whole`: bytes per number that the rule needs of whole parameters. `slots`: numbers in each slot
    per number of the parameter; (): those of a large matrix.

    The slots are decoded. Then, one after another, come the rule, the encoding and, for a 16-bit
    weight, rounding with its noise and its result.
    """
    stored = find_format(moment_format)
    slots = slots or [n / 4096**2 for n in row.slot_numbers((4096, 4096), row.settings)]
    decoded = FLOAT32 * sum(slots) if stored.encoded else 0
    encoding = stored.encoding_bytes * max(slots, default=0)
    working = row.temporary_bytes + whole
    if weight_bytes == FLOAT32:
        return decoded + max(working, encoding)
    rule = FLOAT32 + working        # the gradient in float32
    rounding = FLOAT32 + BF16
    return FLOAT32 + decoded + max(rule, encoding, rounding)


# a function of a parameter's name, as `techniques.operation.fused`
Fused = Callable[[str], tuple[int, ...]]


def matrices(p: Shape, fused: tuple[int, ...] | bool = ()) -> list[Shape]:
    """Return the shapes of the matrices in a parameter. `fused`: the rows of each of them."""
    return [(p[0] // sum(fused) * rows, *p[1:]) for rows in fused or ()] or [p]


class Work(NamedTuple):
    """Bytes and FLOPs of an optimizer, on average per parameter of the model.

    A rank has its shard of `cut_bytes`, but all of `whole_bytes` and of `flops`. `gathered`: the
    share of parameters whose gradients are gathered whole; None if one elementwise rule updates
    all parameters."""

    cut_bytes: float
    whole_bytes: float = 0.0
    gathered: float | None = None
    flops: float = 0.0

    def moved_bytes(self, weights: int, gradients: int, master: int = 0) -> float:
        """Return the bytes per parameter that an update reads and writes: the gradient once, the
        slots twice, the weights (or their master copies) twice, and the result of a master copy."""
        held = 2 * master + weights if master else 2 * weights
        return held + gradients + 2 * (self.cut_bytes + self.whole_bytes)


def work(shapes: Mapping[str, Shape], settings: OptimizerSettings,
         moment_format: str = "float32", fused: Fused = lambda name: ()) -> Work:
    """Return the work for parameters with these `shapes`, by name. Raises ConfigError for a
    parameter that its rule cannot update."""
    rules = rules_of(shapes, settings)
    for name, rule in rules.items():
        if find(rule.name).matrices and len(shapes[name]) != 2:
            raise ConfigError(f"optimizer={rule.name} updates matrices, and {name} has the shape "
                              f"{shapes[name]}; give it another rule, after the other ones of "
                              f"optimizer.groups: {name}:optimizer=adamw:lr_scale=0.05")
    return work_of([(shapes[name], rule, fused(name)) for name, rule in rules.items()],
                   moment_format)


def work_of(parameters: Sequence[tuple[Shape, OptimizerSettings, tuple[int, ...]]],
            moment_format: str = "float32") -> Work:
    """Return the work for parameters, each given by its shape, its rule and its `fused` rows."""
    each, costs = find_format(moment_format).bytes, []
    for p, rule, rows in parameters:
        row = find(rule.name)
        whole = sum(row.slot_numbers(p, rule, math.inf))
        cut = sum(row.slot_numbers(p, rule)) - whole
        flops = sum(row.flops(matrix, rule) for matrix in matrices(p, row.matrices and rows))
        costs.append((each * cut, each * whole, row.gathers * math.prod(p), flops))
    count = sum(math.prod(p) for p, *_ in parameters)
    return Work(*(sum(of) / count for of in zip(*costs)))


def whole_update_bytes(shapes: Mapping[str, Shape], settings: OptimizerSettings,
                       moment_format: str = "float32", weight_bytes: int = FLOAT32,
                       shards: int = 1, fused: Fused = lambda name: ()) -> dict[str, float]:
    """Return the temporary bytes of each parameter while it is updated by itself. A rank with only
    some rows of a matrix may have to gather all of them."""
    temporary_bytes = {}
    for name, rule in rules_of(shapes, settings).items():
        row, p = find(rule.name), shapes[name]
        parts, mine = matrices(p, row.matrices and fused(name)), math.prod(p) / shards
        whole = max(row.whole_bytes(part, rule) for part in parts)
        if row.gathers and shards > 1:
            whole += FLOAT32 * (math.prod(p) + mine)
        slots = [n / mine for n in row.slot_numbers(p, rule, shards)]
        temporary_bytes[name] = mine * update_bytes(row, moment_format, weight_bytes,
                                                    whole / mine, slots)
    return temporary_bytes
