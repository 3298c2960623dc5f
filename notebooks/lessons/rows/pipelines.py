"""Schedules of a pipeline beyond the kit's own (gpipe, 1f1b, interleaved).

    lpkit train cpu-3m --import lessons.rows.pipelines --processes 2 parallel.pipeline=2 \\
        parallel.schedule=zero-bubble grad_accum_steps=4

Some schedules split backward into I (gradients of inputs) and W (gradients of weights); they defer
the W of Linears by `lpkit.precision.deferred`.
"""

from lpkit.techniques.pipelines import (
    MANY,
    PIPELINES,
    ROUNDS,
    TORCH,
    PipelineSchedule,
    whole_rounds,
)

ZERO_BUBBLE = "Qi et al. 2024, https://arxiv.org/abs/2401.10241"


def one_way(p: int, f: float, i: float, w: float) -> float:
    """Return the bubble of p ranks if dw fills as much idle time as possible: at least the time in
    which the first micro-batch reaches the last rank, or a gradient comes back. f, i and w: seconds
    of F, I and W. If they are equal, the bubble is (p - 1)(f + i - w) (Qi et al. 2024, table 1)."""
    return (p - 1) * max(f, i, f + i - w)


PIPELINES |= {
    "looped-bfs": PipelineSchedule(
        why="gpipe with chunks: a rank needs the weights of one chunk at a time",
        source="Lamy-Poirier 2022, https://arxiv.org/abs/2211.05953",
        implementation=f"{TORCH}LoopedBFS", chunks=(2, MANY), breadth_first=True,
        warm_up=lambda rank, p, v, m: m * v),
    "zero-bubble": PipelineSchedule(
        why="1f1b whose weight gradients fill the bubble (ZB-H1; interleaved if it has chunks)",
        source=ZERO_BUBBLE, implementation=f"{TORCH}InterleavedZeroBubble", splits=True,
        chunks=(1, MANY), fits=whole_rounds, needs=ROUNDS,
        bubble=one_way, hops=lambda p, v, m: 4 * (p - 1) + p * (v - 1)),
    "zbv": PipelineSchedule(
        why="two chunks in a V: a rank has early and late layers; the bubble is the first descent",
        source=ZERO_BUBBLE, implementation=f"{TORCH}ZBVZeroBubble", places="v", splits=True,
        chunks=(2, 2), bubble=one_way, even=True,
        hops=lambda p, v, m: 5 * p - 7),
    "dualpipev": PipelineSchedule(
        why="the V, with a forward of one chunk paired with a backward of the other",
        source="DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, halved: "
               "https://github.com/deepseek-ai/DualPipe",
        implementation=f"{TORCH}DualPipeV", places="v", splits=True, chunks=(2, 2),
        fits=lambda p, m: m >= 2 * p, needs="one a stage or more",
        bubble=one_way, even=True, hops=lambda p, v, m: 4 * (p - 1)),
}
