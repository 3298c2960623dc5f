"""The messages that ranks send one another in an update: each collective, with its bytes.

                   share of the bytes that each of n ranks sends
    all-reduce     2 (n - 1) / n
    reduce-scatter   (n - 1) / n    of all that is scattered
    all-gather       (n - 1) / n    of all that is gathered
    all-to-all       (n - 1) / n    of what a rank has
    send             1              from one rank to another

These shares are the minimum, and a ring reaches them (Thakur et al. 2005,
https://doi.org/10.1177/1094342005051521). They are exact: tests/parallel/test_messages.py compares
all messages of an update, as notebooks/lessons/ranks/messages.py adds them up, with the counts of
`lpkit.measure.tracking.MessageCount`. `lpkit.predict.time` has their seconds.
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
    """One collective of `ranks`. `nbytes` is all that is reduced, scattered or gathered."""

    kind: str
    nbytes: int
    ranks: int


def gathered_bytes(config: Config, layout: Layout, name: str,
                   ranks: int = 1) -> tuple[list[int], int]:
    """Return the bytes of whole weights that `ranks` gather in ZeRO 2 and 3 under the precision
    `name`: one entry for each block, the last one for all outside the blocks. Also return the bytes
    of the amaxes on which ranks agree once an update before they send weights as casts."""
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
    """Return the bytes per number of `gathered_bytes`: in a block, outside blocks, on average."""
    row = GATHERED[layout.gathered]
    if not row.cast:        # saves the sums, since plans call this thousands of times
        p = stored(config, name)
        return (p.compute_bytes if row.mixed else p.weights,) * 3
    nbytes, _ = gathered_bytes(config, layout, name)
    first, block, last = parameter_shapes(config.model)
    inside = config.model.L * sum(map(math.prod, block))
    outside = sum(map(math.prod, (*first, *last)))
    return (sum(nbytes[:-1]) / inside, nbytes[-1] / outside, sum(nbytes) / (inside + outside))


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """Return the numbers of a parameter that is cut by rows and padded to equal shards."""
    return -(-shape[0] // ranks) * ranks * math.prod(shape[1:])


def reduced_itemsize(m: ModelConfig, layout: Layout, weights: int, gradients: int) -> float:
    """Return the bytes of a number with which an all-reduce sends what the reduction sends."""
    row, n = REDUCTIONS[layout.reduction], layout.replicas
    shapes = [bucket[0] if len(bucket) == 1 else (sum(map(math.prod, bucket)),)
              for bucket in (buckets(m, row.bucket_bytes // weights) if row.sent else ())]
    return (sum(row.sent(shape, n, gradients) for shape in shapes)
            / sum(map(math.prod, shapes)) / (2 - 2 / n)) if shapes else gradients


# The order of attention's modules in the model, which is not the order of their calls.
OF_ATTENTION = ("attention.qkv", "attention.qk", "attention.out", "attention",
                "attention.kind.beta", "attention.q_norm", "attention.k_norm", "attention.prefix",
                "attention.shape")


def part(op: Op, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of an operation's parameters on one of `ranks` tensor ranks. Embeddings are
    cut by the vocabulary. Attention's other parameters have a number a head."""
    if ranks == 1 or not (op.cut or op.name in ("embed", "attention")):
        return op.shapes
    if op.cut == "row":
        (N, K), *bias = op.shapes
        return ((N, K // ranks), *bias)
    return tuple((shape[0] // ranks, *shape[1:]) for shape in op.shapes)


@functools.lru_cache(maxsize=256)
def parameter_shapes(m: ModelConfig, trained: bool = False,
                     tensor: int = 1) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return parameter shapes in the model's order, on one of `tensor` ranks: (before the blocks,
    of one block, after the blocks). `trained`: only those of trained parameters."""
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
    """Return the shapes of gradients that are sent together, last gradients first. A bucket has at
    most `most` numbers unless a single gradient has more (`lpkit.parallel.replicas.buckets`).
    `last`: include parameters after the blocks, which another pipeline stage may have."""
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
