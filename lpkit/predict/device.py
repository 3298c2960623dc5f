"""A step as one device of a layout has it: its part of the model, and by what its tensors are cut.

    step = Step(...)                    # the same on all devices
    Device(step, embeds=True, heads=False)      # the first stage of a pipeline

`walk` follows a micro-batch over a Device, `ledger` adds what lives beside it.
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

# bytes a number while its code is found: in float32, padded, from the least, and the noise
PACKED = {2: 16, 4: 12}
Padded = Mapping[str, tuple[int, int, int]]     # tokens, inputs and outputs of Linears, by name


class Step:
    """The part that all devices of a layout share of what `lpkit.predict.memory` was asked. Raises
    ConfigError."""

    def __init__(self, config: Config, on: Machine, layout: Layout, *, precision: str | None,
                 optimizer: str | None, recompute: str | None, attention: str | None):
        self.stack = STACKS[stack_of(config)]
        if config.system.stack != "auto":
            layout = self.stack.layout(layout)
        self.config, self.on, self.layout, self.m = config, on, layout, config.model
        self.optimizer = optimizer or config.optimizer.name
        self.techniques = rows_of(config)
        # lpkit's own makes one graph of head and loss (`lpkit.execution.compiled`), others seldom do;
        # whether it can be compiled where nobody asked for it, the machine decides
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
        # whether lpkit.train has these axes and what rests in these dtypes; else others have
        self.as_trained = (layout.devices == layout.batch_ranks and not p.master
                           and not p.buffered)
        # lpkit's stages; others', where ZeRO 2 and 3 would gather weights for each micro-batch
        self.own_pipeline = (layout.pipeline > 1 and layout.stage < 2
                             and config.system.stack == "auto")
        # weights rest in shards, to which gradients leave, and whole ones are gathered: in ZeRO 2
        # once, from forward to a block's backward, where others keep whole weights
        self.whole = layout.stage == 2 and self.as_trained
        self.sharded = layout.stage == 3 or self.whole
        # FSDP gathers in the compute dtype, so that the residual stream has it too
        mixed = self.sharded and GATHERED[layout.gathered].mixed
        if mixed and p.compute_bytes < p.residual_bytes:
            p = replace(p, residual_bytes=p.compute_bytes)
        # bytes of a Linear's operands that are rounded to 16 bits and multiplied in 32, since few
        # CPUs multiply float16; 0: they are multiplied as they are
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
        # by a micro-batch, if a device had the whole model
        self.kept = saved(self.s, self.ops, self.recompute, plain=as_it_is, stay=stay)


class Device:
    """A device, or a stage of it, of `layers` (None: all), with the embeddings (`embeds`), with the
    head and the loss (`heads`), or both; `added`: gradients of earlier micro-batches are there."""

    def __init__(self, step: Step, embeds: bool, heads: bool, layers: int | None = None,
                 added: bool | None = None):
        s, ops, layout = step.s, step.ops, step.layout
        self.step, self.s, self.ops, self.padded = step, s, ops, step.padded
        self.m = m = s.model
        self.embeds, self.heads = embeds, heads
        self.layers = m.L if layers is None else layers
        self.added = step.pieces > 1 if added is None else added
        if step.stack.stages_by_work and layout.pipeline > 1:
            share = (m.L + ops.head.weights / sum(op.weights for op in ops.linears)) / layout.pipeline
            before = math.floor(share if embeds else share * (layout.pipeline - 1)) + 1
            self.layers = before if embeds else max(1, m.L - before)
        # devices over which a tensor in attention and MLP is cut, and each weight; and the stream
        self.cut, self.tensor = layout.tensor * layout.context, layout.tensor
        self.stream_cut = self.cut if step.stack.sequence_parallel else layout.context
        # tensor ranks that gather what they hold a part of; 1: nothing is gathered
        self.gathering = self.tensor if self.stream_cut == self.cut else 1
        self.tokens, self.stream_tokens = s.tokens / self.cut, s.tokens / self.stream_cut
        # tensor ranks of whose logits each has all, and how many these are
        self.logit_ranks = self.tensor if step.stack.keeps_gathered else 1
        self.logits = self.tokens * m.V * self.logit_ranks
        # and its gradient
        self.stream = self.stream_tokens * m.D * s.residual_bytes * ops.stream_share
        # lpkit.parallel.tensor: the head's input is gathered and stays whole, and the loss has it
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
        self.again = range(0)       # numbers of the blocks that run once more before their backward
        if step.repeated.repeats_blocks:
            self.again = range(0, self.layers, step.repeated.every(step.recompute))
        # one forward pass would cast each weight once anyway
        self.caches_casts = step.config.precision.cache_weight_casts and (
            step.pieces > 1 or bool(self.again))
        self.caches_casts |= step.stack.caches_casts and not step.sharded
        self._activations()

    def _parameters(self) -> None:
        """Numbers of its blocks, of its tables and of one block's parts."""
        m, ops, parts = self.s.model, self.ops, parameters(self.s.model)
        prompt = parts.get("prompt", 0)
        outside = parts["embedding"] + prompt + parts["positions"] + parts["head"]
        norms = self.layers * ops.small[1]      # and what else tensor ranks have whole
        self.inside = (sum(parts.values()) - outside) * self.layers / m.L
        self.inside = (self.inside - norms) / self.tensor + norms
        self.block_parameters = self.inside / max(1, self.layers)
        tables = self.embeds * (parts["embedding"] + prompt) + self.heads * parts["head"]
        if m.tied and self.heads and not self.embeds:
            tables += parts["embedding"]
        self.tables = tables / self.tensor + self.embeds * parts["positions"]
        self.table = ops.head.weights / self.tensor     # of the embedding, and of the head
        self.linear_weights = ops.linear_weights / self.tensor
        with_columns, others = ops.small
        self.small = with_columns / self.tensor + others
        self.block_numbers = ops.trained_weights / self.tensor + self.small     # with gradients

    def _casts(self) -> None:
        """Which Linears are cast, and how: `low`, but for those of the blocks `stay`, by number, and
        `head_low` for the head."""
        low, L, above = self.step.p.low, self.m.L, self.m.L - self.layers
        self.low, self.widened = low, self.step.widened
        stay = low.stay(L) if low else ()
        self.stay = {n for n in stay if self.embeds and n < self.layers}
        self.stay |= {n - above for n in stay if self.heads and n >= above}
        self.head_low = None if low and "head" in low.keep else low

    def _activations(self) -> None:
        """Decides what is kept: what comes back from elsewhere, or low precision, is `fetched` at a
        time, and `packed` is at work while forward puts it there."""
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
        # the input of a block that runs again goes alone: no hook sees what it saves then
        self.rerun = self._cut(step.kept)
        self.kept = self.rerun if number_bytes is None else self._cut(kept)
        if self.layers - 1 in self.again:       # another block is the last of which all goes
            all_again = len(self.again) == self.layers
            self.packed -= self.packed if all_again else self.kept.again_bytes

    def _cut(self, kept: Kept) -> Kept:
        """Returns the part of `kept` that this device has."""
        step, s, ops = self.step, self.s, self.ops
        if self.cut > 1 or self.layers < self.m.L:
            cuts, again = {}, kept.again_bytes / self.cut
            if step.stack.keeps_gathered:
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
            if self.whole_head:     # the gradient alone is kept
                loss = TOKEN_ID * self.tokens + s.compute_bytes * self.logits
                kept = replace(kept, operations=kept.operations | {"loss": loss})
        if not self.heads:
            kept = replace(kept, operations=kept.operations | {"norm": 0.0, "head": 0.0})
        return kept

    def _gradients(self) -> None:
        """Decides how gradients and gathered weights come and go; bytes are of a number."""
        step, layout, p, config = self.step, self.step.layout, self.step.p, self.step.config
        row = GATHERED[layout.gathered]
        # parameters are updated in backward
        self.at_once = not step.techniques["optimizer_step"].gradients_held
        self.sharded, self.whole = step.sharded, step.whole
        # inside a pipeline nothing is resharded, and added up whole, until the last micro-batch
        self.staged = layout.pipeline > 1 and step.pieces > 1
        # FSDP reduces a block's gradients, in float32, while the next block is at work, whose
        # weights are on their way meanwhile
        self.leave = self.sharded and not self.staged
        # gradients add to nothing here: they were there, or leave at once
        self.gathers = self.added or self.at_once or p.buffered
        # weights come from other ranks as their casts, for forward and once more for backward, and
        # none is kept between them but of a table that the embedding shares
        self.gathers_casts = self.sharded and row.cast
        self.travels, self.travels_outside, _ = step.gathered_itemsizes
        self.made_bytes = p.compute_bytes if row.mixed else p.weights
        self.shard_bytes = p.weights if p.buffered else p.gradients
        if self.sharded:
            self.shard_bytes /= layout.state_ranks
        self.gradient_bytes = self.made_bytes if self.leave else self.shard_bytes
        self.small_gradient_bytes = self.small * self.gradient_bytes
        self.block_gradient_bytes = 0.0         # how gradients grow by a block
        if not self.gathers:
            self.block_gradient_bytes = self.block_numbers * self.shard_bytes
        # the head's gradient waits for that of the same table in the embedding
        self.waiting_table = 0.0
        if self.s.model.tied and self.embeds:
            self.waiting_table = self.gradient_bytes * self.table * self.ops.head.trained
        # the optimizer: what a number's update needs for a while, and what it fetches of its state
        self.resting = step.on.kind in step.techniques["optimizer_state"].leaves
        optimizer, moments = optimizers.find(step.optimizer), step.moments
        self.weight_itemsize = PARAM_DTYPE[config.memory.param_dtype.name].param_bytes
        self.updating_bytes = update_bytes(optimizer, moments, self.weight_itemsize)
        self.state_bytes = optimizer.state_bytes(moments) if self.resting else 0.0
        self.update_bytes = self.updating_bytes + self.state_bytes if self.at_once else 0.0
        self.updates: dict[str, float] = {}     # where shapes matter, the most by operation
        settings = optimizer_settings(config, step.optimizer)
        if self.at_once and not elementwise(settings):
            for name, nbytes in whole_update_bytes(
                    shapes(self.m), settings, moments, self.weight_itemsize,
                    fused=partial(fused, self.m)).items():
                op = re.sub(r"^blocks\.\d+\.|\.\w+$", "", name)
                self.updates[op] = max(nbytes, self.updates.get(op, 0.0))

    def updating(self, op: Op, weights: float) -> float:
        """Bytes at work while backward updates these weights."""
        if op.name in self.updates:
            return self.updates[op.name] + weights * self.state_bytes
        return weights * self.update_bytes


def by_cost(config: Config | None = None) -> tuple[str, ...]:
    """The rows of RECOMPUTE to try, the cheapest first: without a compiler, and beside a fused
    attention, which keeps next to nothing; the config's alone, if it names another than none."""
    if config and config.memory.recompute != MemoryConfig().recompute:
        return (config.memory.recompute.name,)
    return tuple(name for name, row in RECOMPUTE.items()
                 if not (row.needs_compile or row.attention_alone))


def on_device(config: Config, on: Machine, layout: Layout, p: Precision,
              attention: str | None = None, even: bool = True,
              **sizes: Any) -> tuple[MicroBatch, int]:
    """A micro-batch of a run on this machine, and how many there are. `sizes` are other fields of
    a MicroBatch. Raises ConfigError for an unknown attention and as `layouts.check` does."""
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
    """The Linears that are padded to tiles, each as a rank has it, and the operations with what is
    saved of that on all tensor ranks: a Linear's input, and its result where the next operation
    saves a view of it."""
    if p.low is None or not getattr(config.precision.recipe, "pad", False):
        return ops, {}
    recipe, padded, found, more = resolve(config.precision.recipe), {}, [], 0.0
    for op in (*ops.block, ops.head):
        ranks = [layout.tensor if op.cut == side else 1 for side in ("row", "column")]
        tokens = round(s.tokens * op.tokens_share / layout.context)
        size = (tokens, *(side // n for side, n in zip(op.matmul or (), ranks)))
        stays = op is ops.head and "head" in p.low.keep
        if op.matmul and not stays and untiled(recipe, dict(zip("MKN", size))):
            M, K, N = padded[op.name] = tuple(-(-side // recipe.tile) * recipe.tile
                                              for side in size)
            more = (M * N - tokens * size[2]) * ranks[1] * layout.context * s.compute_bytes
            op = replace(op, saved_bytes=M * K * ranks[0] * layout.context * s.operand_bytes)
        elif op.name == "mlp" or (op.name == "attention" and not any(op.score_passes)
                                  and not s.norms_save_qkv):
            op = replace(op, saved_bytes=op.saved_bytes + more)
        found.append(op)
    return replace(ops, block=tuple(found[:-1]), head=found[-1]), padded


def _one_tensor(s: MicroBatch, ops: Operations, quantized: bool) -> tuple[float, float]:
    """One comes back, from codes by way of float32; and what is at work while codes are made."""
    widest = max(op.matmul[0] for op in ops.linears)
    nbytes = max(widest * s.compute_bytes, s.model.D * s.residual_bytes) * s.tokens
    if not quantized:
        return nbytes, 0.0
    return (nbytes * (1 + FP32 / s.compute_bytes),
            nbytes * (2 + PACKED[s.compute_bytes] / s.compute_bytes))
