"""Predict the messages that rank 0 of a run sends in an update, collective by collective.
tests/parallel/test_messages.py compares the prediction with the messages of real runs
(`lpkit.measure.tracking.MessageCount`)."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from lessons.tasks import Task
from lpkit.config import Config, ModelConfig
from lpkit.predict.casts import on_hardware, why_emulated
from lpkit.predict.messages import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND,
    Message,
    buckets,
    gathered_bytes,
    padded,
    parameter_shapes,
)
from lpkit.predict.params import of
from lpkit.predict.recipes import precision_of, row_of, stored
from lpkit.techniques import layouts, machines
from lpkit.techniques.attention import KINDS
from lpkit.techniques.data import POLICIES
from lpkit.techniques.layouts import CONTEXT, GATHERED, REDUCTIONS, Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.memory import rows_of
from lpkit.techniques.operation import FP32
from lpkit.techniques.pipelines import PIPELINES
from lpkit.techniques.stages import stage_layers

# a collective over n ranks sends, from each rank, this many times (n - 1) / n of its bytes; a SEND
# counts as n = 2 ranks, so 2 rounds send all of its bytes
ROUNDS = {ALL_REDUCE: 2, REDUCE_SCATTER: 1, ALL_GATHER: 1, ALL_TO_ALL: 1, SEND: 2}


def each_sends(message: Message) -> float:
    """Return the bytes that each rank sends for one message. A kind that is not in ROUNDS is a
    broadcast, which takes one round."""
    return ROUNDS.get(message.kind, 1) * (message.ranks - 1) * message.nbytes / message.ranks


def sent_bytes(messages: Mapping[Message, int]) -> dict[str, float]:
    """Return the bytes that each rank sends, by kind of message. `messages`: how often each message
    is sent."""
    sent: Counter[str] = Counter()
    for message, count in messages.items():
        sent[message.kind] += count * each_sends(message)
    return dict(sent)


def messages(config: Config, machine: "str | Machine" = "h200", layout: Layout | None = None, *,
             precision: str | None = None) -> Counter[Message]:
    """Return how often rank 0 sends each message in one update.

    layout     None: the config's `parallel`
    machine    decides the precision if it is "auto", and the bytes of a cast
    precision  as in `lpkit.predict.memory`
    Raises ConfigError for a config that cannot be trained.
    """
    layout = layout or config.parallel
    config = replace(config, parallel=layout)
    layouts.refuse_untrainable(config)
    sent: Counter[Message] = Counter()
    if layout.devices == 1:
        return sent
    world, shard, data, tensor = layout.devices, layout.state_ranks, layout.data, layout.tensor
    on = machines.find(machine)
    name = precision_of(config, on, precision)
    p, pieces = stored(config, name), config.micro_batches
    m, last = of_first_rank(config)
    sent[Message(ALL_REDUCE, FP32, world)] += 1                 # the loss
    weighted = POLICIES[config.data.policy.name].gives_ids or isinstance(config.data.policy, Task)
    sent[Message(ALL_REDUCE, FP32, world)] += weighted          # the number of weighted targets
    # the norm of the gradients
    for ranks in (shard if layout.stage else 1, tensor, layout.pipeline):
        sent[Message(ALL_REDUCE, FP32, ranks)] += ranks > 1
    recipe = row_of(config, name)
    sent[Message(ALL_REDUCE, FP32, world)] += recipe.loss_scaling is not None   # whether all finite
    if recipe.products and recipe.delayed:
        cast = m.L * len(of(m).linears) + 1 - sum(on_hardware(name, recipe, m).kept.values())
        # amaxes of x, w and dy: over all ranks in each micro-batch; in a pipeline, over the ranks
        # of a stage once per update
        ranks, times = (world, pieces) if layout.pipeline == 1 else (world // layout.pipeline, 1)
        sent[Message(ALL_REDUCE, 3 * FP32 * cast, ranks)] += times * (ranks > 1)

    if tensor > 1:
        sent += of_tensor_ranks(config, name, on)
    for axis, of_ranks in (("context", of_context_ranks), ("pipeline", of_stages)):
        if getattr(layout, axis) > 1:
            sent += of_ranks(config, name)
    if layout.replicas == 1:
        return +sent
    row = REDUCTIONS[layout.reduction]
    if row.sent:
        shapes = [bucket[0] if len(bucket) == 1 else (sum(map(math.prod, bucket)),)
                  for bucket in buckets(m, row.bucket_bytes // p.weights)]
        nbytes = round(sum(row.sent(shape, layout.replicas, p.gradients) for shape in shapes))
        sent[Message(SEND, nbytes, 2)] += 1
        return +sent
    if layout.stage < 2:
        for bucket in buckets(m, row.bucket_bytes // p.weights, tensor, last):
            if not layout.stage:
                numbers = sum(map(math.prod, bucket))
                sent[Message(ALL_REDUCE, p.gradients * numbers, layout.replicas)] += 1
                continue
            rows = sum(map(padded, bucket, [shard] * len(bucket)))
            sent[Message(REDUCE_SCATTER, p.gradients * rows, shard)] += 1
            sent[Message(ALL_GATHER, p.weights * rows, shard)] += 1
            if data > 1:
                sent[Message(ALL_REDUCE, p.gradients * rows // shard, data)] += 1
        return +sent
    layouts.refuse_ungatherable(config, recipe)
    gathered, amaxes = gathered_bytes(config, layout, name, shard)
    sent[Message(ALL_REDUCE, amaxes, shard)] += amaxes > 0
    first, block, last = parameter_shapes(m, trained=True, tensor=tensor)
    # in ZeRO 3, a block's weights are gathered again for backward; weights outside blocks are kept
    for group, parts, gathers in (((*first, *last), gathered[m.L:], 1),
                                  (block, gathered[:m.L], layout.stage - 1)):
        rows, times = sum(map(padded, group, [shard] * len(group))), len(parts) * pieces
        for nbytes in parts:
            sent[Message(ALL_GATHER, nbytes, shard)] += pieces * gathers
        times *= rows > 0       # a group may have no trained parameters
        sent[Message(REDUCE_SCATTER, FP32 * rows, shard)] += times
        if data > 1:
            sent[Message(ALL_REDUCE, FP32 * rows // shard, data)] += times
    return +sent


def of_tensor_ranks(config: Config, name: str, on: Machine) -> Counter[Message]:
    """Return the messages of a tensor group in an update. The backward of a gather is a scatter,
    and vice versa (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). Forward has two
    gathers and two scatters per layer, a scatter for the embeddings and a gather for the head. The
    input of a plain Linear is gathered in that Linear's dtype; the input of a recipe's Linear is
    gathered in the residual stream's dtype."""
    (m, last), n, ops = of_first_rank(config), config.parallel.tensor, of(config.model)
    p = stored(config, name)
    row, sent, layout = row_of(config, name), Counter(), config.parallel
    stream = p.residual_bytes
    if layout.stage >= 2 and GATHERED[layout.gathered].mixed:
        stream = p.compute_bytes
    pieces, tokens = config.micro_batches, config.micro_batch * m.T // layout.context

    def both(gathers: bool, itemsize: int, times: int, again: int = 1) -> None:
        """Add `times` gathers (or scatters) per micro-batch, `again` times each because of
        recomputation, and the opposite message in backward."""
        there, back = (ALL_GATHER, REDUCE_SCATTER)[::1 if gathers else -1]
        sent[Message(there, tokens * m.D * itemsize, n)] += again * times * pieces
        sent[Message(back, tokens * m.D * itemsize, n)] += times * pieces

    plain = on_hardware(name, row, m).kept if row.products else {op.name: m.L for op in ops.block}
    cut, repeats = [op for op in ops.block if op.cut], rows_of(config)["recompute"].repeats
    for op in cut:      # recomputation ends before the last scatter, so that scatter runs once
        again = 1 + bool(repeats and op is not cut[-1])
        if op.cut == "row":
            both(False, p.compute_bytes, m.L, again)
            continue
        few = plain.get(op.name, 0)
        both(True, p.compute_bytes, few, again)
        both(True, stream, m.L - few, again)
        # backward gathers the input once more for the weight's gradient: in its own dtype, or as
        # its cast; fp16 on a CPU saves the gathered input in float32 instead
        if not (on.kind == "cpu" and p.dtype == "fp16"):
            sent[Message(ALL_GATHER, tokens * m.D * p.compute_bytes, n)] += few * pieces
        if p.low:
            low = replace(p.low, native=not why_emulated(row, on, config.precision.backend))
            nbytes = round(tokens * m.D * low.number_bytes)
            sent[Message(ALL_GATHER, nbytes, n)] += (m.L - few) * pieces
    both(False, stream, 1)                  # embeddings
    both(True, p.compute_bytes, last)       # the head
    # all-reduces of the loss, per token: the largest logit; then the target's logit and the sum of
    # exponentials
    loss = rows_of(config)["cross_entropy"]
    size = loss.chunk_tokens(config.memory.cross_entropy) or tokens
    for at in range(0, tokens if last else 0, size):
        some = min(size, tokens - at)
        sent[Message(ALL_REDUCE, FP32 * some, n)] += pieces
        sent[Message(ALL_REDUCE, 2 * FP32 * some, n)] += pieces
    # one all-reduce for the gradients of parameters that all ranks have, such as those of norms
    shard = layout.state_ranks if layout.stage else 1
    whole = [shape for op in (*ops.block * m.L, *[ops.norm] * last) for shape in op.shapes
             if op.trained and not op.cut and op.name != "attention"]
    alike = sum(-(-shape[0] // shard) * math.prod(shape[1:]) for shape in whole)
    sent[Message(ALL_REDUCE, FP32 * alike, n)] += 1
    return sent


def of_context_ranks(config: Config, name: str) -> Counter[Message]:
    """Return the messages of attention in a context group of c ranks. In a ring, each rank sends k
    and v to the next rank c - 1 times, and in backward again together with their gradients
    (`lpkit.parallel.context`). An all-to-all sends q, k and v to every other rank, and the output
    back."""
    m, layout = of_first_rank(config)[0], config.parallel
    itemsize = stored(config, name).compute_bytes
    c, pieces, sent = layout.context, config.micro_batches, Counter()
    again = 1 + ("attention" in rows_of(config)["recompute"].repeats)
    a_head = config.micro_batch * m.T // c * m.E * itemsize
    queries, keys = m.H // layout.tensor * a_head, m.G // layout.tensor * a_head
    if KINDS[m.attention.name].reads_ids:       # document ids, 8 bytes each
        sent[Message(ALL_TO_ALL, 8 * config.micro_batch * m.T, c)] += pieces
    if not CONTEXT[layout.attention].partial:
        for nbytes in (queries + 2 * keys, queries):
            sent[Message(ALL_TO_ALL, nbytes, c)] += (1 + again) * m.L * pieces
        return sent
    sent[Message(SEND, 2 * keys, 2)] += (2 + again) * (c - 1) * m.L * pieces
    return sent


def of_stages(config: Config, name: str) -> Counter[Message]:
    """Return the messages of a pipeline's first rank. Each of its stages sends the residual stream
    to the next stage, and the stream's gradient to the previous stage, unless that stage is on the
    same rank. If embeddings and head are tied and on different ranks, their gradient is sent,
    too."""
    m, layout, p = config.model, config.parallel, stored(config, name)
    own = PIPELINES[layout.schedule].stages(0, layout.pipeline, layout.interleave)
    sent, last = Counter(), layout.pipeline * layout.interleave - 1
    ends = sum((stage < last and stage + 1 not in own) + (stage > 0 and stage - 1 not in own)
               for stage in own)
    stream = config.micro_batch * m.T // layout.context // layout.tensor * m.D * p.weights
    sent[Message(SEND, stream, 2)] += config.micro_batches * ends
    if m.tied and last not in own:
        rows = m.V // layout.tensor
        if layout.stage:
            rows = -(-rows // layout.state_ranks)
        sent[Message(SEND, rows * m.D * p.gradients, 2)] += 1
    return sent


def of_first_rank(config: Config) -> tuple[ModelConfig, bool]:
    """Return the config of the model with only the layers of rank 0, and whether rank 0 has the
    head."""
    m, layout = config.model, config.parallel
    own = PIPELINES[layout.schedule].stages(0, layout.pipeline, layout.interleave)
    layers = stage_layers(m, layout)
    return (replace(m, layers=sum(len(layers[stage]) for stage in own)), len(layers) - 1 in own)
