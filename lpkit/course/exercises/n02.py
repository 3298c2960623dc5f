"""Notebook 02, where the time goes. FLOPs, bytes, FLOP/s, bytes/s."""

from lpkit.course.exercises.judge import Exercise


def intensity(M: int, N: int, K: int, itemsize: int) -> float:
    """FLOPs per byte of a product (M, K) x (K, N): both operands read once, the result written
    once."""
    return 2 * M * N * K / ((M * K + K * N + M * N) * itemsize)


def smallest_square(peak_flops: float, bytes_per_second: float, itemsize: int) -> float:
    """The n at which a product of two (n, n) matrices meets the ridge: 2 n^3 / (3 n^2 itemsize)
    FLOPs per byte."""
    return 1.5 * itemsize * peak_flops / bytes_per_second


def attention_share(width: int, context: int) -> float:
    """Share of a GPT-2 block's FLOPs that the two (T, T) products take: 4 T D of 2 * 12 D^2 + 4 T D
    a token."""
    return context / (6 * width + context)


EXERCISES = {
    "02.intensity": Exercise(
        spec=intensity, mistake=lambda M, N, K,
        itemsize: 2 * M * N * K / ((M * K + K * N) * itemsize),
        cases=((1, 1, 1, 4), (4096, 768, 256, 2))),
    "02.smallest_square": Exercise(
        spec=smallest_square,
        mistake=lambda peak_flops, bytes_per_second,
        itemsize: 0.5 * itemsize * peak_flops / bytes_per_second,
        cases=((200e9, 40e9, 4), (989.4e12, 4.8e12, 2))),
    "02.attention_share": Exercise(
        spec=attention_share, mistake=lambda width, context: context / (6 * width),
        cases=((256, 256), (4096, 8192))),
}
