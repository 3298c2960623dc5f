"""What the ranks of a run send one another in an update: each collective, message by message, as
tests/test_messages.py holds it to what `lpkit.measure.messages` counts."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from lessons.tasks import Task
from lpkit.config import Config
from lpkit.predict.casts import on_hardware
from lpkit.predict.messages import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Message,
    buckets,
    gathered_bytes,
    padded,
    parameter_shapes,
)
from lpkit.predict.params import of
from lpkit.predict.recipes import precision_of, row_of, stored
from lpkit.techniques import layouts, machines
from lpkit.techniques.data import POLICIES
from lpkit.techniques.layouts import GATHERED, REDUCTIONS, Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.memory import rows_of
from lpkit.techniques.operation import FP32

ROUNDS = {ALL_REDUCE: 2, REDUCE_SCATTER: 1, ALL_GATHER: 1}      # of (n - 1) / n of the bytes


def each_sends(message: Message) -> float:
    """Bytes that each rank sends. Where ROUNDS lacks a kind, one tells, others pass it on."""
    return ROUNDS.get(message.kind, 1) * (message.ranks - 1) * message.nbytes / message.ranks


def sent_bytes(messages: Mapping[Message, int]) -> dict[str, float]:
    """Returns the bytes that each rank sends, by kind, of so many of each message."""
    sent: Counter[str] = Counter()
    for message, count in messages.items():
        sent[message.kind] += count * each_sends(message)
    return dict(sent)


def messages(config: Config, machine: "str | Machine" = "h200", layout: Layout | None = None, *,
             precision: str | None = None) -> Counter[Message]:
    """Returns the messages of one update that one rank takes part in, and how many of each.

    layout     None: the config's `parallel`
    machine    what "auto" precision is decided by; `precision` as in `lpkit.predict.memory`
    Raises ConfigError for what cannot be trained.
    """
    layout = layout or config.parallel
    config = replace(config, parallel=layout)
    layouts.refuse_untrainable(config)
    sent: Counter[Message] = Counter()
    if layout.devices == 1:
        return sent
    world, shard, data, tensor = layout.devices, layout.shard, layout.data, layout.tensor
    name = precision_of(config, machines.find(machine), precision)
    p, m, pieces = stored(config, name), config.model, config.micro_batches
    sent[Message(ALL_REDUCE, FP32, world)] += 1                 # the loss
    weighted = POLICIES[config.data.policy.name].gives_ids or isinstance(config.data.policy, Task)
    sent[Message(ALL_REDUCE, FP32, world)] += weighted          # the targets that count
    if layout.stage:
        sent[Message(ALL_REDUCE, FP32, shard)] += 1             # the gradients' norm
    recipe = row_of(config, name)
    sent[Message(ALL_REDUCE, FP32, world)] += recipe.loss_scaling is not None   # all are finite
    if recipe.products and recipe.delayed:
        cast = m.L * len(of(m).linears) + 1 - sum(on_hardware(name, recipe, m).kept.values())
        sent[Message(ALL_REDUCE, 3 * FP32 * cast, world)] += pieces     # amaxes of x, w and dy

    if tensor > 1:
        sent += of_tensor_ranks(config, name)
    if layout.replicas == 1:
        return +sent
    if layout.stage < 2:
        for bucket in buckets(m, REDUCTIONS[layout.reduction].bucket_bytes // p.weights, tensor):
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
    # in ZeRO 3 a block's weights are gathered once more for backward; those outside of blocks stay
    for group, parts, gathers in (((*first, *last), gathered[m.L:], 1),
                                  (block, gathered[:m.L], layout.stage - 1)):
        rows, times = sum(map(padded, group, [shard] * len(group))), len(parts) * pieces
        for nbytes in parts:
            sent[Message(ALL_GATHER, nbytes, shard)] += pieces * gathers
        times *= rows > 0       # nothing of it may be trained
        sent[Message(REDUCE_SCATTER, FP32 * rows, shard)] += times
        if data > 1:
            sent[Message(ALL_REDUCE, FP32 * rows // shard, data)] += times
    return +sent


def of_tensor_ranks(config: Config, name: str) -> Counter[Message]:
    """Returns what the ranks of a tensor group send in an update. Each gather is a scatter in
    backward, and each scatter a gather (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198):
    two of both in a layer, a scatter of embeddings and a gather for the head. What is gathered for
    a plain Linear travels as that takes it; a recipe casts the residual stream's own numbers."""
    p, m, n, ops = stored(config, name), config.model, config.parallel.tensor, of(config.model)
    row, sent, layout = row_of(config, name), Counter(), config.parallel
    stream = p.residual_bytes
    if layout.stage >= 2 and GATHERED[layout.gathered].mixed:
        stream = p.compute_bytes
    pieces, numbers = config.micro_batches, config.micro_batch * m.T * m.D

    def both(gathers: bool, itemsize: int, times: int, again: int = 1) -> None:
        there, back = (ALL_GATHER, REDUCE_SCATTER)[::1 if gathers else -1]
        sent[Message(there, numbers * itemsize, n)] += again * times * pieces
        sent[Message(back, numbers * itemsize, n)] += times * pieces

    plain = on_hardware(name, row, m).kept if row.products else {op.name: m.L for op in ops.block}
    cut, repeats = [op for op in ops.block if op.cut], rows_of(config)["recompute"].repeats
    for op in cut:      # what is computed again ends before the last scatter
        again = 1 + bool(repeats and op is not cut[-1])
        if op.cut == "row":
            both(False, p.compute_bytes, m.L, again)
            continue
        both(True, p.compute_bytes, plain.get(op.name, 0), again)
        both(True, stream, m.L - plain.get(op.name, 0), again)
    both(False, stream, 1)                  # embeddings
    both(True, p.compute_bytes, 1)          # the head
    # of each token the largest logit; then the target's, and the sum of exponentials
    tokens = config.micro_batch * m.T
    loss = rows_of(config)["cross_entropy"]
    size = loss.chunk_tokens(config.memory.cross_entropy) or tokens
    for at in range(0, tokens, size):
        some = min(size, tokens - at)
        sent[Message(ALL_REDUCE, FP32 * some, n)] += pieces
        sent[Message(ALL_REDUCE, 2 * FP32 * some, n)] += pieces
    # gradients of what all have: norms
    shard = layout.shard if layout.stage else 1
    whole = [shape for op in (*ops.block * m.L, ops.norm) for shape in op.shapes
             if op.trained and not op.cut and op.name != "attention"]
    alike = sum(-(-shape[0] // shard) * math.prod(shape[1:]) for shape in whole)
    sent[Message(ALL_REDUCE, FP32 * alike, n)] += 1
    sent[Message(ALL_REDUCE, FP32, n)] += 1         # the gradients' norm
    return sent
