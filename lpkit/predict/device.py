"""A training step on one device of a layout: its part of the model, and how its tensors are cut.

    step = DeviceStep(...)                            # the same on all devices
    Device(step, embeds=True, heads=False)      # the first stage of a pipeline

`lpkit.predict.walk` follows the memory of one micro-batch on a Device. `lpkit.predict.ledger` adds
the bytes that are alive outside this micro-batch.

Fields of a Device that both use:

    cut         number of ranks that share an activation of attention or MLP: tensor x context
    tensor      number of ranks that share a weight
    stream_cut  number of ranks that share the residual stream: `cut` with sequence parallelism,
                else the context ranks
    tables      parameters outside the blocks (embedding, positions, head) on this device
    inside      parameters inside the blocks on this device
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lpkit.config import Config, MemoryConfig
from lpkit.predict.activations import Kept, saved
from lpkit.predict.casts import backend_of, why_emulated
from lpkit.predict.messages import gathered_itemsizes
from lpkit.predict.params import optimizer_settings, parameters, recompute_of, shapes
from lpkit.predict.recipes import Precision, moments_of, precision_of, row_of, stored
from lpkit.predict.stacks import STACKS, stack_of
from lpkit.predict.updates import elementwise, update_bytes, whole_update_bytes
from lpkit.techniques import layouts, optimizers
from lpkit.techniques.adapters import attended
from lpkit.techniques.attention_backends import choose_attention
from lpkit.techniques.blocks import Operations, operations
from lpkit.techniques.layouts import GATHERED, Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.memory import PARAM_DTYPE, RECOMPUTE, rows_of
from lpkit.techniques.operation import FP32, TOKEN_ID, MicroBatch, Op, fused
from lpkit.techniques.recipes import resolve, untiled

# Temporary bytes per number while an activation is packed to codes, by the bytes of the compute
# dtype. They are the float32 value, its padded copy, its distance from the least value, and the
# rounding noise.
PACKED = {2: 16, 4: 12}
# padded (tokens, inputs, outputs) of the Linears that are padded to tiles, by name
Padded = Mapping[str, tuple[int, int, int]]


class DeviceStep:
    """The part of a memory prediction that is equal on all devices of a layout: dtypes, casts, the
    operations of a micro-batch. Raises ConfigError if the settings do not go together."""

    def __init__(self, config: Config, on: Machine, layout: Layout, *, precision: str | None,
                 optimizer: str | None, recompute: str | None, attention: str | None):
        self.stack = STACKS[stack_of(config)]
        if config.system.stack != "auto":
            layout = self.stack.layout(layout)
        self.config, self.on, self.layout, self.m = config, on, layout, config.model
        self.optimizer = optimizer or config.optimizer.name
        self.techniques = rows_of(config)
        # lpkit compiles head and loss to one graph (`lpkit.execution.compiled`), which keeps fewer
        # tensors; other stacks do so if `Stack.fused_loss`. With compile=auto, a run decides later
        # whether the machine can compile, so the prediction assumes that it does not.
        self.compiles_loss = (config.system.stack == "auto"
                              and config.system.compile not in (False, "auto")
                              and on.kind == "gpu" and layout.tensor == 1
                              and not any(row.eager for row in self.techniques.values()))
        self.compiles_loss |= config.system.stack != "auto" and self.stack.fused_loss
        self.repeated, self.recompute = recompute_of(config, recompute)
        name = precision_of(config, on, precision)
        p = stored(config, name)
        self.eight_bit_weights = name in self.stack.eight_bit_weights
        self.moments = moments_of(config, p)
        # True if lpkit.train can run this layout with these dtypes; else only another program can
        self.as_trained = (layout.devices == layout.batch_ranks and not p.master
                           and not p.buffered)
        # True if the pipeline is lpkit's, which has no ZeRO 2 and 3: weights would be gathered for
        # each micro-batch. Other stacks have them.
        self.own_pipeline = (layout.pipeline > 1 and layout.stage < 2
                             and config.system.stack == "auto")
        # sharded: a rank stores shards of the weights, gathers whole weights for use, and reduces
        # gradients to shards. whole (ZeRO 2 in lpkit): a block's weights are gathered once in
        # forward and stay whole until the backward of the block ends. In other stacks' ZeRO 2,
        # weights are whole throughout.
        self.whole = layout.stage == 2 and self.as_trained
        self.sharded = layout.stage == 3 or self.whole
        # If FSDP gathers weights in the compute dtype, the residual stream has that dtype too.
        mixed = self.sharded and GATHERED[layout.gathered].mixed
        if mixed and p.compute_bytes < p.residual_bytes:
            p = replace(p, residual_bytes=p.compute_bytes)
        # bytes per number of the float32 copies of fp16 operands on a CPU: few CPUs multiply
        # float16, so values are rounded to float16 and multiplied in float32. 0: no such copies.
        self.widened = FP32 if p.dtype == "fp16" and on.kind == "cpu" else 0
        operand_bytes, keep = self.widened or None, ()
        if p.low:
            emulated = why_emulated(row_of(config, name), on, backend_of(config, name, on))
            p = replace(p, low=replace(p.low, native=not emulated))
            operand_bytes, keep = self.widened or p.low.number_bytes, p.low.keep
        self.p, self.gathered_itemsizes = p, gathered_itemsizes(config, layout, name)
        self.s, self.pieces = on_device(
            config, on, layout, p, attention, operand_bytes=operand_bytes,
            even=config.system.stack == "auto",     # other stacks cut stages of any layers
            head_bytes=None if "head" in keep else operand_bytes,
            attends_again=self.repeated.attention_alone,
            norms_written_out=self.stack.norm_bytes > 0, saves_inputs=self.stack.saves_inputs)
        as_it_is = operations(self.s)
        self.ops, self.padded = _padded(config, p, self.s, as_it_is, layout)
        stay = p.low.stay(self.m.L) if p.low else ()
        if stay:
            as_it_is = operations(replace(self.s, operand_bytes=None))
        # bytes that forward keeps of one micro-batch, on a device with the whole model
        self.kept = saved(self.s, self.ops, self.recompute, plain=as_it_is, stay=stay)


class Device:
    """A device, or one of the pipeline stages of a device.

    The device has `layers` blocks (None: all blocks), the embeddings if `embeds`, and the head and
    the loss if `heads`. `added`: backward adds to gradients of earlier micro-batches, which are
    already allocated; None: so if there are several micro-batches."""

    def __init__(self, step: DeviceStep, embeds: bool, heads: bool, layers: int | None = None,
                       added: bool | None = None):
        s, ops, layout = step.s, step.ops, step.layout
        self.step, self.s, self.ops, self.padded = step, s, ops, step.padded
        self.m = m = s.model
        self.embeds, self.heads = embeds, heads
        self.layers = m.L if layers is None else layers
        self.added = step.pieces > 1 if added is None else added
        if step.stack.stages_by_work and layout.pipeline > 1:
            share = (m.L + ops.head.weights
                     / sum(op.weights for op in ops.linears)) / layout.pipeline
            before = math.floor(share if embeds else share * (layout.pipeline - 1)) + 1
            self.layers = before if embeds else max(1, m.L - before)
        # numbers of ranks that share an activation (`cut`), a weight (`tensor`), and the residual
        # stream (`stream_cut`)
        self.cut, self.tensor = layout.tensor * layout.context, layout.tensor
        self.stream_cut = self.cut if step.stack.sequence_parallel else layout.context
        # With sequence parallelism, the tensor ranks gather the residual stream before a matmul:
        # `gathering` is their number. 1: no rank gathers.
        self.gathering = self.tensor if self.stream_cut == self.cut else 1
        self.tokens, self.stream_tokens = s.tokens / self.cut, s.tokens / self.stream_cut
        # `logits`: number of logits on this device. Some stacks gather the logits of all tensor
        # ranks on each of these ranks.
        self.logit_ranks = self.tensor if step.stack.keeps_gathered else 1
        self.logits = self.tokens * m.V * self.logit_ranks
        # bytes of the residual stream of one micro-batch; its gradient has the same size
        self.stream = self.stream_tokens * m.D * s.residual_bytes * ops.stream_share
        # lpkit.parallel.tensor gathers the head's input and keeps it whole until the loss is done.
        # Other stacks gather it again in backward.
        self.whole_head = self.tensor > 1 and step.config.system.stack == "auto"
        self.head_tokens, self.head_stream = self.stream_tokens, self.stream
        if self.whole_head:
            narrow = s.mixed and not (step.p.low and "head" not in step.p.low.keep)
            self.head_tokens = self.tokens * self.tensor
            self.head_stream = self.head_tokens * m.D * (
                s.compute_bytes if narrow else s.residual_bytes)
        self.chunk = step.techniques["cross_entropy"].chunk_tokens(step.config.memory.cross_entropy)
        self._parameters()
        self._casts()
        self._gradients()
        self.again = range(0)       # numbers of the blocks that are recomputed in backward
        if step.repeated.repeats_blocks:
            self.again = range(0, self.layers, step.repeated.every(step.recompute))
        # Each forward pass casts each weight once. A cache of casts saves work only if there are
        # several micro-batches, or if recomputation runs forward again.
        self.caches_casts = step.config.precision.cache_weight_casts and (
            step.pieces > 1 or bool(self.again))
        self.caches_casts |= step.stack.caches_casts and not step.sharded
        self._activations()

    def _parameters(self) -> None:
        """Set the parameter counts of this device's blocks (`inside`), of its `tables`, and of the
        parts of one block."""
        m, ops, parts = self.s.model, self.ops, parameters(self.s.model)
        prompt = parts.get("prompt", 0)
        outside = parts["embedding"] + prompt + parts["positions"] + parts["head"]
        # parameters of norms, and other small parameters that each tensor rank has in full
        norms = self.layers * ops.small[1]
        self.inside = (sum(parts.values()) - outside) * self.layers / m.L
        self.inside = (self.inside - norms) / self.tensor + norms
        self.block_parameters = self.inside / max(1, self.layers)
        tables = self.embeds * (parts["embedding"] + prompt) + self.heads * parts["head"]
        if m.tied and self.heads and not self.embeds:
            tables += parts["embedding"]
        self.tables = tables / self.tensor + self.embeds * parts["positions"]
        # parameters of the head's matrix, which is as large as the embedding's
        self.table = ops.head.weights / self.tensor
        self.linear_weights = ops.linear_weights / self.tensor
        with_columns, others = ops.small
        self.small = with_columns / self.tensor + others
        # number of trained parameters of one block
        self.block_numbers = ops.trained_weights / self.tensor + self.small

    def _casts(self) -> None:
        """Set how Linears are cast: `low` for the blocks and `head_low` for the head; None means 16
        bits. `stay` has the numbers of this device's blocks that stay in 16 bits. The first stage
        counts its blocks from the bottom; with the head, the last blocks are this device's."""
        low, L, above = self.step.p.low, self.m.L, self.m.L - self.layers
        self.low, self.widened = low, self.step.widened
        stay = low.stay(L) if low else ()
        self.stay = {n for n in stay if self.embeds and n < self.layers}
        self.stay |= {n - above for n in stay if self.heads and n >= above}
        self.head_low = None if low and "head" in low.keep else low

    def _activations(self) -> None:
        """Set the bytes that forward keeps for backward (`kept`), and the bytes that a recomputed
        block saves when it runs again (`rerun`).

        If activations are offloaded or stored as codes, backward fetches one tensor at a time:
        `fetched` are its bytes. `packed` are the temporary bytes while forward packs one tensor to
        codes."""
        step, s, ops, kept = self.step, self.s, self.ops, self.step.kept
        self.fetched = self.packed = 0.0
        number_bytes = step.techniques["activation_offload"].number_bytes.get(step.on.kind)
        if number_bytes is not None:
            shares = {op.name: number_bytes / op.saved_itemsize for op in ops.block}
            less = s.stream_bytes * (1 - number_bytes / s.residual_bytes)
            kept = kept.scaled(lambda name, nbytes: nbytes * shares.get(name, 1.0),
                               kept.again_bytes and kept.again_bytes - less)
            self.fetched, self.packed = (nbytes / self.cut for nbytes in _one_tensor(
                s, ops, bool(number_bytes)))
        # In a recomputed block, only its input is offloaded. The hooks that offload do not see the
        # tensors that the rerun saves.
        self.rerun = self._cut(step.kept)
        self.kept = self.rerun if number_bytes is None else self._cut(kept)
        # `packed` is added to the bytes at the end of forward. If the last block is recomputed, an
        # earlier block is the last one that packs all of its tensors, before the end of forward.
        if self.layers - 1 in self.again:
            all_again = len(self.again) == self.layers
            self.packed -= self.packed if all_again else self.kept.again_bytes

    def _cut(self, kept: Kept) -> Kept:
        """Return the part of `kept` that is on this device."""
        step, s, ops = self.step, self.s, self.ops
        if self.cut > 1 or self.layers < self.m.L:
            # cuts: by operation, the number of ranks that share its saved bytes, if it is not `cut`
            cuts, again = {}, kept.again_bytes / self.cut
            if step.stack.keeps_gathered:   # gathered inputs of Linears are kept whole
                cuts = {op.name: step.layout.context for op in (*ops.linears, ops.head)
                        if op.cut == "column"}
            if self.stream_cut < self.cut:
                cuts = {op.name: self.stream_cut for op in (*ops.block, ops.norm, ops.head)
                        if op.in_stream or op.cut == "column"}
                wide = s.stream_bytes + step.repeated.keeps_results * sum(
                    op.result_bytes for op in ops.linears if op.cut == "row")
                again = kept.again_bytes and (
                    (kept.again_bytes - wide) / self.cut + wide / self.stream_cut)
            if self.whole_head:
                cuts |= {ops.head.name: step.layout.context}
            kept = kept.scaled(lambda name, nbytes: nbytes / cuts.get(name, self.cut), again,
                               self.layers / self.m.L)
            if self.whole_head:     # the loss saves the targets and the gradient of the logits
                loss = TOKEN_ID * self.tokens + s.compute_bytes * self.logits
                kept = replace(kept, operations=kept.operations | {"loss": loss})
        if not self.heads:
            kept = replace(kept, operations=kept.operations | {"norm": 0.0, "head": 0.0})
        return kept

    def _gradients(self) -> None:
        """Set when gradients and gathered weights are alive. `travels`, `made_bytes`,
        `gradient_bytes` and similar fields are bytes per number."""
        step, layout, p, config = self.step, self.step.layout, self.step.p, self.step.config
        row = GATHERED[layout.gathered]
        # the optimizer updates each parameter in backward, as soon as its gradient is complete
        self.at_once = not step.techniques["optimizer_step"].gradients_held
        self.sharded, self.whole = step.sharded, step.whole
        # staged: in a pipeline, gathered weights and whole gradients stay until the backward of the
        # last micro-batch ends
        self.staged = layout.pipeline > 1 and step.pieces > 1
        # leave: FSDP reduces a block's float32 gradients to shards while backward is in the next
        # block. At the same time it prefetches the weights of the block after that.
        self.leave = self.sharded and not self.staged
        # gathers: the row "gradients" does not grow in backward, because backward adds to buffers
        # that exist already, or because each gradient is used and freed at once
        self.gathers = self.added or self.at_once or p.buffered
        # FSDP gathers low-precision casts of weights in forward, and again in backward, and keeps
        # none of them in between. A head that shares the embedding's table is the exception.
        self.gathers_casts = self.sharded and row.cast
        # travels: gathered bytes per number of a block; made_bytes: bytes per number of a gradient
        # that backward computes; shard_bytes: bytes per number of the gradient that a rank keeps
        self.travels, self.travels_outside, _ = step.gathered_itemsizes
        self.made_bytes = p.compute_bytes if row.mixed else p.weights
        self.shard_bytes = p.weights if p.buffered else p.gradients
        if self.sharded:
            self.shard_bytes /= layout.state_ranks
        self.gradient_bytes = self.made_bytes if self.leave else self.shard_bytes
        self.small_gradient_bytes = self.small * self.gradient_bytes
        # bytes by which the row "gradients" grows in the backward of one block
        self.block_gradient_bytes = 0.0
        if not self.gathers:
            self.block_gradient_bytes = self.block_numbers * self.shard_bytes
        # If head and embedding share a table, the head's gradient waits for the embedding's
        # gradient: bytes of the head's gradient.
        self.waiting_table = 0.0
        if self.s.model.tied and self.embeds:
            self.waiting_table = self.gradient_bytes * self.table * self.ops.head.trained
        # updating_bytes: temporary bytes per parameter during its update. state_bytes: bytes per
        # parameter of optimizer state that is fetched for the update, if the state is offloaded.
        self.resting = step.on.kind in step.techniques["optimizer_state"].leaves
        optimizer, moments = optimizers.find(step.optimizer), step.moments
        self.weight_itemsize = PARAM_DTYPE[config.memory.param_dtype.name].param_bytes
        self.updating_bytes = update_bytes(optimizer, moments, self.weight_itemsize)
        self.state_bytes = optimizer.state_bytes(moments) if self.resting else 0.0
        self.update_bytes = self.updating_bytes + self.state_bytes if self.at_once else 0.0
        # If the bytes of an update depend on the parameter's shape: the most temporary bytes, by
        # operation.
        self.updates: dict[str, float] = {}
        settings = optimizer_settings(config, step.optimizer)
        if self.at_once and not elementwise(settings):
            for name, nbytes in whole_update_bytes(
                    shapes(self.m), settings, moments, self.weight_itemsize,
                    fused=partial(fused, self.m)).items():
                op = re.sub(r"^blocks\.\d+\.|\.\w+$", "", name)
                self.updates[op] = max(nbytes, self.updates.get(op, 0.0))

    def updating(self, op: Op, weights: float) -> float:
        """Return the temporary bytes while backward updates `weights` parameters of `op`."""
        if op.name in self.updates:
            return self.updates[op.name] + weights * self.state_bytes
        return weights * self.update_bytes


def to_search(config: Config | None = None) -> tuple[str, ...]:
    """Return the names of the rows of RECOMPUTE that a search tries, in the order of RECOMPUTE: the
    row that adds the least seconds, and keeps the most bytes, first.

    Rows that need a compiler are left out, and so are rows that recompute attention alone: fused
    attention saves so little that recomputing it saves almost no memory. If the config names a row
    other than "none", return only that row."""
    if config and config.memory.recompute != MemoryConfig().recompute:
        return (config.memory.recompute.name,)
    return tuple(name for name, row in RECOMPUTE.items()
                 if not (row.needs_compile or row.attention_alone))


def on_device(config: Config, on: Machine, layout: Layout, p: Precision,
              attention: str | None = None, even: bool = True,
              **sizes: Any) -> tuple[MicroBatch, int]:
    """Return the micro-batch of a run of `config` on the machine `on`, and the number of
    micro-batches in one update.

    `attention`: a backend; None: the config's. `even`: each pipeline stage must have the same
    number of blocks. `sizes` are other fields of MicroBatch. Raises ConfigError for an unknown
    attention backend, and as `layouts.check` does."""
    layouts.check(config, layout, even=even)
    chosen, _ = choose_attention(attention or config.system.attention, device=on.kind,
                                 low_precision=p.compute_bytes < FP32,
                                 model=attended(config.model),
                                 tiles=on.multiplies_tiles)
    sequences, pieces = layouts.micro_batch(config.global_batch, config.grad_accum_steps,
                                             layout.batch_ranks)
    return MicroBatch(model=config.model, batch=sequences, kind=on.kind, attention=chosen,
                      compute_bytes=p.compute_bytes, residual_bytes=p.residual_bytes,
                      **(STACKS[config.system.stack].of_adapters if config.system.stack != "auto"
                         else {}), **sizes), pieces


def _padded(config: Config, p: Precision, s: MicroBatch,
            ops: Operations, layout: Layout) -> tuple[Operations, Padded]:
    """Return the operations with Linears padded to tiles, and the padded (tokens, inputs, outputs)
    on one rank, by the name of the Linear. Nothing is padded unless the recipe has `pad`.

    The saved bytes of an operation are summed over all tensor ranks. Padding adds to them for a
    padded Linear, which saves its padded input, and for an operation after it that saves a view of
    its padded result."""
    if p.low is None or not getattr(config.precision.recipe, "pad", False):
        return ops, {}
    recipe, padded, in_order, more = resolve(config.precision.recipe), {}, [], 0.0
    for op in (*ops.block, ops.head):
        ranks = [layout.tensor if op.cut == side else 1 for side in ("row", "column")]
        tokens = round(s.tokens * op.tokens_share / layout.context)
        size = (tokens, *(side // n for side, n in zip(op.matmul or (), ranks)))
        stays = op is ops.head and "head" in p.low.keep
        if op.matmul and not stays and untiled(recipe, dict(zip("MKN", size))):
            M, K, N = padded[op.name] = tuple(-(-side // recipe.tile) * recipe.tile
                                              for side in size)
            more = (M * N - tokens * size[2]) * ranks[1] * layout.context * s.compute_bytes
            # `more`: extra bytes of the result, if the next operation saves a view of it
            op = replace(op, saved_bytes=M * K * ranks[0] * layout.context * s.operand_bytes)
        elif op.name == "mlp" or (op.name == "attention" and not any(op.score_passes)
                                  and not s.norms_save_qkv):
            op = replace(op, saved_bytes=op.saved_bytes + more)
        in_order.append(op)
    return replace(ops, block=tuple(in_order[:-1]), head=in_order[-1]), padded


def _one_tensor(s: MicroBatch, ops: Operations, quantized: bool) -> tuple[float, float]:
    """Return the bytes of the widest offloaded activation when backward fetches it, and the
    temporary bytes while forward packs it to codes.

    `quantized`: activations are stored as codes. A fetched tensor then is decoded to float32 first,
    so both the float32 tensor and the result are alive. Without codes, packing needs no bytes."""
    widest = max(op.matmul[0] for op in ops.linears)
    nbytes = max(widest * s.compute_bytes, s.model.D * s.residual_bytes) * s.tokens
    if not quantized:
        return nbytes, 0.0
    return (nbytes * (1 + FP32 / s.compute_bytes),
            nbytes * (2 + PACKED[s.compute_bytes] / s.compute_bytes))
