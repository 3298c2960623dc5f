"""Ways for the ranks of a context group to compute attention, beyond the kit's own ring.

    lpkit train cpu-3m --import lessons.rows.context --processes 2 parallel.context=2 \\
        parallel.zero=1 parallel.attention=all-to-all
"""

from lpkit.techniques.layouts import CONTEXT, ContextAttention

CONTEXT["all-to-all"] = ContextAttention(
    why="each rank attends over whole sequences with its share of the heads",
    implementation="lessons.rows.context_torch:AllToAll",
    source="DeepSpeed-Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509")
