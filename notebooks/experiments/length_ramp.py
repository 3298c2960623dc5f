"""A ramp of the batch and of the sequence length: the first updates have half of the sequences, and
optionally half of the tokens of each (Li et al. 2021, arXiv:2108.06084, ramp the length). In this
folder, run:

    PYTHONPATH=. lpkit train cpu-3m --import length_ramp sizes=ramp sizes.until=10 \
        global_batch=16 grad_accum_steps=2
"""

from dataclasses import dataclass

from lpkit.techniques.data import SIZES, Sizes
from lpkit.techniques.row import Settings


@dataclass(frozen=True, kw_only=True)
class Ramp(Settings):
    until: int = 2          # updates with half of the sequences
    short: bool = False     # and with half of the tokens of each sequence


def size_at(step: int, settings: Ramp, sequences: int, context: int) -> tuple[int, int]:
    """Return the number of sequences and the tokens of each sequence for update `step` (from 0)."""
    if step >= settings.until:
        return sequences, context
    return sequences // 2, context // 2 if settings.short else context


SIZES["ramp"] = Sizes(settings=Ramp(), at=size_at, why="half the batch at first")
