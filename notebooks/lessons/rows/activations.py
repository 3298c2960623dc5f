"""Activations stored in few bits, and a limit on the activations that a compiled model saves.

    lpkit train cpu-3m --import lessons.rows.activations memory.activation_offload=int8
    lpkit train cpu-3m --import lessons.rows.activations memory.recompute=budget system.compile=true
"""

from dataclasses import dataclass
from operator import attrgetter

from lpkit.techniques.memory import (
    ACTIVATION_OFFLOAD,
    RECOMPUTE,
    WHOLE_BLOCK,
    Offload,
    RecomputeRow,
)
from lpkit.techniques.row import Settings
from lpkit.values import Share

GROUP = 256     # elements of a quantized activation that share a minimum and a maximum


def quantized(bits: int) -> Offload:
    """Return the row that stores activations in `bits` bits."""
    return Offload(why=f"{bits} bits a number and 8 bytes for each {GROUP}, rounded stochastically",
                   source="Chen et al. 2021, arXiv:2104.14129",
                   number_bytes=dict.fromkeys(("cpu", "gpu"), bits / 8 + 8 / GROUP),
                   implementation=f"lessons.rows.activations_torch:int{bits}")


ACTIVATION_OFFLOAD |= {"int8": quantized(8), "int4": quantized(4), "int2": quantized(2)}


@dataclass(frozen=True, kw_only=True)
class Budget(Settings):
    budget: Share = 0.5     # share of the activations that torch.compile may keep


RECOMPUTE["budget"] = RecomputeRow(
    why="torch.compile chooses what to compute again",
    source="https://pytorch.org/blog/activation-checkpointing-techniques/", settings=Budget(),
    repeats=WHOLE_BLOCK, kept_share=attrgetter("budget"), needs_compile="whose graph it divides",
    implementation="lessons.rows.activations_torch:within_budget")
