"""The messages that ranks send one another in an update: each collective, with its bytes.

                     share that each of n ranks sends
    all-reduce       2 (n - 1) / n  of the bytes that are reduced
    reduce-scatter     (n - 1) / n  of the bytes that are reduced
    all-gather         (n - 1) / n  of the bytes of the gathered result
    all-to-all         (n - 1) / n  of the bytes of one rank
    send             1              of the bytes, from one rank to another

These shares are the minimum, and a ring reaches them (Thakur et al. 2005,
https://doi.org/10.1177/1094342005051521). The bytes are exact: tests/parallel/test_messages.py
compares the messages of an update, which notebooks/lessons/ranks/messages.py lists, with the counts
of `lpkit.measure.tracking.MessageCount`. `lpkit.predict.time` predicts the seconds of messages.
"""

import functools
import math
from typing import NamedTuple

from lpkit.config import Config, ModelConfig
from lpkit.predict.params import of
from lpkit.predict.recipes import row_of, stored
from lpkit.techniques.layouts import GATHERED, REDUCTIONS, Layout
from lpkit.techniques.operation import FP32, Op
from lpkit.techniques.recipes import ALL, kept

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
ALL_TO_ALL, SEND = "all-to-all", "send"


class Message(NamedTuple):
    """One collective over `ranks` ranks. `nbytes` are all bytes that it reduces, scatters or
    gathers, before they are divided among the ranks."""

    kind: str
    nbytes: int
    ranks: int


def gathered_bytes(config: Config, layout: Layout, name: str,
                   ranks: int = 1) -> tuple[list[int], int]:
    """Return the bytes of the whole weights that `ranks` ranks gather in ZeRO 2 and 3, under the
    precision `name`: a list with an entry for each block, and a last entry for all parameters
    outside the blocks.

    Ranks may gather casts in low precision instead of weights. Then they first agree on the amaxes
    of the weights, once in an update. The second result are the bytes of these amaxes, or 0."""
    m, p, row = config.model, stored(config, name), GATHERED[layout.gathered]
    first, block, last = parameter_shapes(m, tensor=layout.tensor)
    inside, outside = [(p.compute_bytes if row.mixed else p.weights)
                       * sum(padded(shape, ranks) for shape in group)
                       for group in (block, (*first, *last))]
    nbytes = [*[inside] * m.L, outside]
    recipe = row_of(config, name) if row.cast and p.low else None
    if recipe is None or not recipe.gathers:
        return nbytes, 0
    ops, cast, whole = of(m), recipe.y[1], 0
    linears = {f"blocks.{i}.{op.name}": (i, op) for i in range(m.L) for op in ops.linears}
    linears["head"] = m.L, ops.head
    stay = kept(linears, recipe.high_precision_layers) | ({"head"} if m.tied else set())
    for i, op in (linears[name] for name in linears.keys() - stay):
        shape = part(op, layout.tensor)[0]
        nbytes[i] -= (p.weights - 1) * padded(shape, ranks)
        if cast.block == (ALL, ALL):
            whole += 1
        else:
            nbytes[i] += math.prod(map(int.__floordiv__, shape, cast.block)) * FP32
    return nbytes, 2 * FP32 * whole


def gathered_itemsizes(config: Config, layout: Layout, name: str) -> tuple[float, float, float]:
    """Return the gathered bytes per parameter: in a block, outside the blocks, and on average."""
    row = GATHERED[layout.gathered]
    if not row.cast:        # all are equal; a plan calls this thousands of times, so skip the sums
        p = stored(config, name)
        return (p.compute_bytes if row.mixed else p.weights,) * 3
    nbytes, _ = gathered_bytes(config, layout, name)
    first, block, last = parameter_shapes(config.model)
    inside = config.model.L * sum(map(math.prod, block))
    outside = sum(map(math.prod, (*first, *last)))
    return (sum(nbytes[:-1]) / inside, nbytes[-1] / outside, sum(nbytes) / (inside + outside))


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """Return the element count of a parameter after padding: it is cut by rows into equal shards
    for `ranks` ranks, so its rows are padded to a multiple of `ranks`.

    >>> padded((10, 4), ranks=4)        # 12 rows of 4
    48
    """
    return -(-shape[0] // ranks) * ranks * math.prod(shape[1:])


def reduced_itemsize(m: ModelConfig, layout: Layout, weights: int, gradients: int) -> float:
    """Return the bytes per number with which a plain all-reduce would send as many bytes as the
    layout's reduction sends: `gradients` bytes, unless the reduction compresses gradients.

    `weights` and `gradients` are the bytes per number of a weight and of its gradient."""
    row, n = REDUCTIONS[layout.reduction], layout.replicas
    shapes = [bucket[0] if len(bucket) == 1 else (sum(map(math.prod, bucket)),)
              for bucket in (buckets(m, row.bucket_bytes // weights) if row.sent else ())]
    return (sum(row.sent(shape, n, gradients) for shape in shapes)
            / sum(map(math.prod, shapes)) / (2 - 2 / n)) if shapes else gradients


# The order in which attention's modules are registered in the model. They are called in another
# order.
OF_ATTENTION = ("attention.qkv", "attention.qk", "attention.out", "attention",
                "attention.kind.beta", "attention.q_norm", "attention.k_norm", "attention.prefix",
                "attention.shape")


def part(op: Op, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of an operation's parameters on one of `ranks` tensor ranks. Embeddings are
    cut along the vocabulary. The parameters of the operation "attention" (sinks) have one number
    per head and are cut along the heads."""
    if ranks == 1 or not (op.cut or op.name in ("embed", "attention")):
        return op.shapes
    if op.cut == "row":
        (N, K), *bias = op.shapes
        return ((N, K // ranks), *bias)
    return tuple((shape[0] // ranks, *shape[1:]) for shape in op.shapes)


@functools.lru_cache(maxsize=256)
def parameter_shapes(m: ModelConfig, trained: bool = False,
                     tensor: int = 1) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the shapes of the model's parameters in the order of `model.parameters()`, on one of
    `tensor` ranks: (before the blocks, of one block, after the blocks). `trained`: only the shapes
    of trained parameters."""
    ops = of(m)

    def shapes(op: Op) -> tuple[tuple[int, ...], ...]:
        return part(op, tensor) if op.trained or not trained else ()

    named = {op.name: shapes(op) for op in ops.block if op.shapes}
    attention = [name for module in OF_ATTENTION for name in named
                 if name == module or (module != "attention" and name.startswith(f"{module}."))]
    order = [name for name in named if name not in attention]
    start = next((i for i, name in enumerate(named) if name in attention), 0)
    order[start:start] = attention
    return ((*shapes(ops.embed), *shapes(ops.prompt), *shapes(ops.positions)),
            tuple(shape for name in order for shape in named[name]),
            (*shapes(ops.norm), *shapes(ops.head)))


@functools.lru_cache(maxsize=256)
def buckets(m: ModelConfig, most: int, tensor: int = 1,
            last: bool = True) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the buckets of gradients that are sent together, each as the shapes of its gradients.
    Backward computes the last parameters' gradients first, so these are in the first bucket.

    A bucket has at most `most` numbers, unless a single gradient has more
    (`lpkit.parallel.replicas.buckets`). `last`: include the parameters after the blocks; False for
    a pipeline stage without the head."""
    first, block, after = parameter_shapes(m, trained=True, tensor=tensor)
    buckets, held = [[]], 0
    for shape in (*first, *m.L * block, *(after if last else ()))[::-1]:
        numbers = math.prod(shape)
        if buckets[-1] and held + numbers > most:
            buckets.append([])
            held = 0
        buckets[-1].append(shape)
        held += numbers
    return tuple(map(tuple, buckets))
