"""Exercises of 00_start_here: what a loss means, and what a step costs."""

import math

from lpkit.course.exercises.judge import Exercise


def uniform_loss(vocab: int) -> float:
    """The cross-entropy, in nats, of guessing every one of `vocab` tokens with the same
    probability."""
    return math.log(vocab)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token as bits per byte, which compares models with different
    tokenizers."""
    return loss / math.log(2) / bytes_per_token


def step_seconds(parameters: float, tokens: float, peak_flops: float, mfu: float) -> float:
    """Seconds of a training step, from 6 FLOPs per parameter and token: 2 forward, 4 backward."""
    return 6 * parameters * tokens / (peak_flops * mfu)


EXERCISES = {
    "00.uniform_loss": Exercise(spec=uniform_loss, mistake=math.log2,
                                cases=((2,), (256,), (50_304,))),
    "00.bits_per_byte": Exercise(spec=bits_per_byte, mistake=lambda loss, size: loss / size,
                                 cases=((math.log(2), 1.0), (2.0, 1.0), (3.3, 4.2))),
    "00.step_seconds": Exercise(
        spec=step_seconds, mistake=lambda parameters, tokens, peak,
        mfu: 2 * parameters * tokens / (peak * mfu),
        cases=((1e6, 1e3, 1e12, 1.0), (124e6, 524_288, 989e12, 0.4),
               (70e9, 4e6, 64 * 989e12, 0.38))),
}
