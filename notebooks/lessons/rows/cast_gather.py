"""Weights that ranks send as their casts, one byte per element (ZeRO 2 and 3).

    lpkit train cpu-3m --import lessons.rows.cast_gather --processes 2 parallel.shard=2 \\
        parallel.gathered=fp8 precision.recipe=fp8-tensorwise
"""

from lpkit.techniques.layouts import GATHERED, Gathered

GATHERED["fp8"] = Gathered(
    cast=True, implementation="lessons.rows.cast_gather_torch:CastGathers",
    why="1 byte for weights that the recipe casts to E4M3 or E5M2, float32 for others; the "
        "numbers of one device",
    source="torchao's float8 all-gather, https://github.com/pytorch/ao; "
           "https://pytorch.org/blog/training-using-float8-fsdp2/")
