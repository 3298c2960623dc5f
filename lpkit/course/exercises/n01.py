"""Notebook 01, memory math. Bytes."""

from lpkit.course.exercises.judge import Exercise


def state_bytes(parameters: int, devices: int, stage: int) -> float:
    """ZeRO's setting: 2 bytes of weight and 2 of gradient a parameter, and 12 for the optimizer,
    float32 master weights included. Stage 1 shards the optimizer's over the devices, 2 the
    gradients too, 3 the weights too."""
    shared = [devices if stage >= needed else 1 for needed in (1, 2, 3)]
    return parameters * (12 / shared[0] + 2 / shared[1] + 2 / shared[2])


def loss_bytes(sequences: int, context: int, vocab: int) -> int:
    """When backward begins: log-probabilities, their gradients and the logits' gradients, float32
    each."""
    return 3 * 4 * sequences * context * vocab


def score_bytes(sequences: int, heads: int, context: int, itemsize: int) -> int:
    """What plain attention keeps per block and a flash kernel does not, without the mask: a
    probability per head and pair of tokens, against one float32 log-sum per head and token."""
    return sequences * heads * context * (context * itemsize - 4)


EXERCISES = {
    "01.state_bytes": Exercise(
        spec=state_bytes, mistake=lambda parameters, devices,
        stage: 16 * parameters / (devices if stage else 1),
        cases=((1_000, 1, 0), (1_000, 4, 3), (7_500_000_000, 64, 1), (7_500_000_000, 64, 2))),
    "01.loss_bytes": Exercise(
        spec=loss_bytes, mistake=lambda sequences, context, vocab: 4 * sequences * context * vocab,
        cases=((1, 1, 256), (16, 1024, 50_304))),
    "01.score_bytes": Exercise(
        spec=score_bytes,
        mistake=lambda sequences, heads, context,
        itemsize: sequences * context * (context * itemsize - 4),
        cases=((1, 1, 8, 4), (2, 12, 1024, 2))),
}
