"""The cost of an optimizer's update: bytes of state, FLOPs and temporary bytes. They follow from
the rows of `lpkit.techniques.optimizers` and the shapes of the parameters."""

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
    """Return whether one rule updates all parameters number by number, so that the cost does not
    depend on the parameters' shapes."""
    return len(rules(settings)) == 1 and find(settings.name).elementwise


def update_bytes(row: Optimizer, moment_format: str = "float32", weight_bytes: int = FLOAT32,
                 whole: float = 0.0, slots: Sequence[float] = ()) -> float:
    """Return the temporary bytes per number of a parameter while it is updated, if parameters are
    updated one after another.

    whole   bytes per number that the rule needs in addition, because it works on whole parameters
    slots   a slot is a tensor of optimizer state (a moment); for each slot, its element count
            divided by the parameter's; (): the ratios for a large matrix

    First all slots are decoded to float32. Then three steps follow one after another: the rule, the
    encoding of the slots, and for a 16-bit weight the rounding, which needs noise and a result. The
    largest of the three counts.
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


# A function of a parameter's name that returns the rows of each matrix that is fused into the
# parameter; () if it is a single matrix (`techniques.operation.fused`).
Fused = Callable[[str], tuple[int, ...]]


def matrices(p: Shape, fused: tuple[int, ...] | bool = ()) -> list[Shape]:
    """Return the shapes of the matrices that are fused into a parameter of shape `p`. `fused`: the
    shares of its rows, one for each matrix; (): the parameter is a single matrix.

    >>> matrices((96, 32), fused=(4, 1, 1))     # q, k and v with 4 query heads and 1 key/value head
    [(64, 32), (16, 32), (16, 32)]
    """
    return [(p[0] // sum(fused) * rows, *p[1:]) for rows in fused or ()] or [p]


class Work(NamedTuple):
    """Bytes and FLOPs of an optimizer's update, on average per parameter of the model."""

    cut_bytes: float                # optimizer state that ZeRO shards
    whole_bytes: float = 0.0        # optimizer state that each rank has in full
    # share of the parameters whose gradients ranks gather; None: one elementwise rule updates all
    gathered: float | None = None
    flops: float = 0.0              # each rank computes all of them

    def moved_bytes(self, weights: int, gradients: int, master: int = 0) -> float:
        """Return the bytes per parameter that an update moves: it reads the gradient, reads and
        writes the optimizer state, and reads and writes the weight. If there are master weights, it
        reads and writes these and writes the weight. The arguments are bytes per parameter."""
        held = 2 * master + weights if master else 2 * weights
        return held + gradients + 2 * (self.cut_bytes + self.whole_bytes)


def work(shapes: Mapping[str, Shape], settings: OptimizerSettings,
         moment_format: str = "float32", fused: Fused = lambda name: ()) -> Work:
    """Return the Work of an update of parameters with these `shapes`, by name. Raises ConfigError
    for a parameter that its rule cannot update."""
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
    """Return the Work of an update of `parameters`, each given as (shape, rule, fused rows)."""
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
    """Return, by parameter, the temporary bytes of its update on one of `shards` ranks, if
    parameters are updated one after another. If a rule needs whole matrices, a rank with a shard
    gathers the other rows, too."""
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
