"""Exercises of 04_scaling_recipes: who shares a scale, what an integer pays for an outlier, where a
delayed scale comes from."""

import math

from lpkit.course.exercises.judge import Exercise


def shared_by(rows: int, columns: int, block_rows: int, block_columns: int) -> int:
    """Elements that share a scale with any one of them; a block side of 0 spans the axis."""
    return (block_rows or rows) * (block_columns or columns)


def int8_db(crest: float) -> float:
    """Signal over noise of INT8 whose largest magnitude, `crest` times the root mean square,
    becomes 127."""
    return 10 * math.log10(12 * (127 / crest) ** 2)


def delayed_scale(history: list[float], margin: int, largest: float) -> float:
    """What a value is divided by: the largest of the remembered magnitudes, with 2^margin of room,
    over the format's largest."""
    return max(history) * 2**margin / largest


EXERCISES = {
    "04.shared_by": Exercise(
        spec=shared_by, mistake=lambda rows, columns, high, wide: high * wide,
        cases=((256, 512, 1, 32), (256, 512, 0, 0), (256, 512, 1, 0), (256, 512, 128, 128))),
    "04.int8_db": Exercise(
        spec=int8_db, mistake=lambda crest: 20 * math.log10(127 / crest),
        cases=((127.0,), (4.5,), (1000.0,))), "04.delayed_scale": Exercise(
        spec=delayed_scale, mistake=lambda history, margin,
        largest: history[0] * 2**margin / largest,
        cases=(([4.48], 0, 448.0), ([1.0, 8.0, 2.0], 0, 448.0), ([1.0, 8.0, 2.0], 1, 57344.0))),
}
