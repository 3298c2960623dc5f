"""Exercises of 05_mixed_precision: the update that a weight does not feel, the scale that saves a
gradient, the bytes of it."""

import math

from lpkit.course.exercises.judge import Exercise


def is_lost(weight: float, update: float) -> bool:
    """Whether a positive bf16 weight stays where it is: its neighbours are 2^(floor(log2 w) - 7)
    away."""
    return update < 2.0 ** (math.floor(math.log2(weight)) - 8)


def scale_for(gradient: float) -> float:
    """The least power of two that lifts a gradient to float16's smallest normal number, 2^-14;
    never below 1."""
    return max(1.0, 2.0 ** math.ceil(-14 - math.log2(gradient)))


def state_bytes(parameters: int, low_precision_weights: bool) -> int:
    """Weights and AdamW's two float32 moments, and a 16-bit copy of the weights beside float32
    masters if asked."""
    return parameters * (4 + 8 + (2 if low_precision_weights else 0))


EXERCISES = {
    "05.is_lost": Exercise(
        spec=is_lost, mistake=lambda weight,
        update: update < 2.0 ** (math.floor(math.log2(weight)) - 7),
        cases=((1.0, 1e-3), (1.0, 5e-3), (0.02, 1e-5), (0.02, 1e-4))),
    "05.scale_for": Exercise(
        spec=scale_for, mistake=lambda gradient: 2.0 ** math.ceil(-24 - math.log2(gradient)),
        cases=((2.0**-14,), (1e-6,), (1e-9,), (0.5,))),
    "05.state_bytes": Exercise(
        spec=state_bytes, mistake=lambda parameters, low: parameters * ((2 if low else 4) + 8),
        cases=((1, False), (124_000_000, True))),
}
