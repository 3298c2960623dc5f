"""Follow the memory of one micro-batch through its backward pass, operation by operation.

    forward     embed -> block 0 -> block 1 -> block 2 -> block 3 -> norm -> head -> loss
    backward    embed <- block 0 <- block 1 <- block 2 <- block 3 <- norm <- head <- loss
    moment      EMBED    FIRST      (between, added)      LAST       `--- HEAD ---'  LOSS

Autograd frees what an operation saved as soon as the backward of that operation is done. Meanwhile
gradients of weights appear. So memory rises and falls with every operation, and the peak can be in
any of these moments. Blocks are alike, so memory is linear in the number of the block, and its peak
over the blocks is in the last or in the first one. The walk goes through these two and adds all
blocks between them at once. If the last block differs from those before it (it stays in 16 bits, or
it is not recomputed), the walk also goes through the block before it.

Terms, all in bytes on one device:

    saved       tensors that an operation keeps from forward for its backward: ACTIVATIONS, or
                AGAIN in a block that is recomputed
    stream      the residual stream of the micro-batch, and also its gradient
    dx, dw, dy  gradients of a Linear's input, of its weight and of its output
    Hold        a moment of a backward, as `techniques.operation` describes it for each operation
    Change      (mark, row, nbytes): `mark` bytes are alive for a moment, then `row` grows by
                `nbytes`
    fold        the backward of one operation as a list of Changes

Example: a Linear with 2 inputs and 8 outputs, 4 tokens, all in float32. Its dy of 4 * 4 * 8 = 128
bytes is in TEMPORARIES when its backward begins.

    mark    row             nbytes
    96      TEMPORARIES     -96         dx (32) and dw (64) appear; dy is freed, dx stays
    -       ACTIVATIONS     -32         the saved input is freed
    -       GRADIENTS       +64         dw is the gradient of the weight

The order of operations is that of PyTorch's autograd engine for `lpkit.nn.transformer`.
tests/predict/test_predict.py compares the walk with a measured step.
"""

import copy
import math
from collections.abc import Mapping

from lpkit.predict.device import Device, Step
from lpkit.predict.recipes import Low
from lpkit.techniques.operation import FP32, TOKEN_ID, Op

LOSS, HEAD = "backward begins", "head and last norm"
LAST, FIRST = "the last block", "the first block"
EMBED, UPDATE = "embeddings", "optimizer works"
ACTIVATIONS, COPIES = "activations", "weight copies"
GRADIENTS, TEMPORARIES = "gradients", "temporaries"
AGAIN, LOGITS, LOW = "recomputed block", "logits and loss", "low-precision weights"
MESSAGES, GRADIENTS_OF_LOGITS = "communication buffers", "logits' gradients"
# (bytes alive for a moment, the row that changes after it, bytes by which the row grows)
Change = tuple[float, str, float]
NO_MOMENT = -math.inf


class Block:
    """A block of the model: what its operations save in forward (`saved`), what they save when the
    block is recomputed (`again`), and how its Linears are cast (`low`; None: 16 bits)."""

    def __init__(self, walk: "Walk", saved: Mapping[str, float], again: Mapping[str, float],
                 low: Low | None):
        self.saved, self.again, self.low = saved, again, low
        self.copied_bytes = 0.0 if low else walk.copies(walk.linear_weights)
        self.low_bytes = 0.0
        if low:
            self.low_bytes = sum([walk.low_bytes(op, low) for op in walk.ops.linears])


class Walk(Device):
    """The backward pass of one micro-batch on a device. `now` has the live bytes by row. `most` has
    the same rows for each moment, at the instant when their sum was largest."""

    def __init__(self, step: Step, embeds: bool, heads: bool, layers: int | None = None,
                 added: bool | None = None):
        super().__init__(step, embeds, heads, layers, added)
        rows = (ACTIVATIONS, COPIES, GRADIENTS, TEMPORARIES, AGAIN, LOGITS, LOW, MESSAGES)
        self.now, self.total = dict.fromkeys(rows, 0.0), 0.0
        self.most: dict[str, dict[str, float]] = {}
        self.steps: dict[tuple[int, bool], list[Change]] = {}
        self.row = ACTIVATIONS      # the row that holds saved tensors: ACTIVATIONS, or AGAIN
        kept, rerun = self.kept, self.rerun
        as_it_is = Block(self, kept.plain, rerun.plain, None)
        self.inner = Block(self, kept.block, rerun.block, self.low) if self.low else as_it_is
        self.blocks = [self.inner] * self.layers
        for number in self.stay:
            self.blocks[number] = as_it_is
        self.unsaved = self.first_saves_less() if embeds and self.blocks else 0.0
        self.walk()

    def first_saves_less(self) -> float:
        """Give the first block a copy that saves less, if nothing below it is trained.

        Without trained parameters below, operations before the first trained one need no backward
        and save nothing. Returns the bytes that the first block does not save in forward."""
        ops, first = self.ops, self.blocks[0]
        at = next((i for i, op in enumerate(ops.block) if op.trained), 0)
        if ops.embed.trained or ops.positions.trained or not at:
            return 0.0
        below = list(ops.block[:at])
        if ops.block[at].shares:
            # the frozen Linear beside the first adapter makes no gradient of its input either
            below.append(next(op for op in ops.block[at:] if op.shares == "output"))
        names = {op.name for op in below}
        self.blocks[0] = less = copy.copy(first)
        less.saved, less.again = ({name: n for name, n in each.items() if name not in names}
                                  for each in (first.saved, first.again))
        if first.low:
            less.low_bytes -= sum(self.low_bytes(op, first.low) for op in below if op.matmul)
        else:
            less.copied_bytes -= self.copies(
                sum(op.weights for op in below if not op.stored_bytes) / self.tensor)
        if 0 in self.again:             # its input, the stream, is saved in any case
            less.again[below[0].name] = self.stream
            return 0.0
        return sum(first.saved.values()) - sum(less.saved.values())

    @property
    def at(self) -> dict[str, dict[str, float]]:
        """Bytes by row and moment."""
        at = {row: {moment: held[row] for moment, held in self.most.items() if held[row]}
              for row in self.now}
        if self.heads:
            at[GRADIENTS_OF_LOGITS] = {LOSS: at[TEMPORARIES].pop(LOSS, 0)}
        return at

    def begin(self, moment: str) -> None:
        self.moment, self.highest = moment, -math.inf

    def add(self, row: str, nbytes: float) -> None:
        self.now[row] += nbytes
        self.total += nbytes

    def mark(self, more: float = 0) -> None:
        """Record a moment in which `more` bytes are alive in addition to `now`."""
        total = self.total + more
        if total > self.highest:
            self.highest = total
            rows = self.most[self.moment] = self.now.copy()
            rows[TEMPORARIES] += more

    def follow(self, steps: list[Change]) -> None:
        """Apply `mark` and `add` for each change. One loop is faster than many calls."""
        now, total, highest = self.now, self.total, self.highest
        for mark, row, nbytes in steps:
            if total + mark > highest:
                highest = total + mark
                rows = self.most[self.moment] = now.copy()
                rows[TEMPORARIES] += mark
            now[row] += nbytes
            total += nbytes
        self.total, self.highest = total, highest

    def walk(self) -> None:
        kept, low = self.kept, (self.blocks or [self.inner])[-1].low
        # token ids and targets are in the row "batch" of the ledger
        self.begin(LOSS)
        self.add(ACTIVATIONS, kept.waiting_bytes - self.unsaved)
        copies = casts = 0.0
        cached = 0.0        # bytes of autocast's copies for recomputed blocks
        for number, block in enumerate(self.blocks):
            if number not in self.again:
                copies += block.copied_bytes
                casts += block.low_bytes
            elif not self.widened:
                cached += 0.0 if block.low else self.copies(self.ops.trained_weights / self.tensor)
        self.add(COPIES, copies)
        self.add(LOW, casts)
        # casts: every micro-batch makes them. copied: autocast's copies, made once for all of them
        self.casts = {LOW: casts, COPIES: copies * bool(self.widened)}
        self.copied = 0.0 if self.widened else (sum(block.copied_bytes for block in self.blocks)
                       + self.copies(self.table) * (self.heads and not self.head_low))
        # the norm and the head save their inputs after the last block, so these are not alive in it
        after = kept.operations["norm"] + kept.operations["head"]
        # when forward ends: its last Linear, or packing an activation, may need more than the loss
        self.add(COPIES, cached)
        self.mark(max(self.packed, self.forward_most(self.blocks[-1].saved, low) - after
                      if low and self.blocks else 0.0))
        self.add(COPIES, -cached)
        if not self.heads:
            self.add(TEMPORARIES, self.stream)             # gradient that the next stage sent
            self.mark()
        elif self.chunk:
            self.chunked_loss(cached)
        else:
            self.whole_loss(cached)
        if self.blocks:
            self.back()
        if self.embeds:
            self.embeddings()

    def back(self) -> None:
        """Walk backward through the blocks, from the last to the first."""
        self.begin(LAST)
        # Blocks to walk at each end: those that differ from `inner`, then one that is `inner`. With
        # FSDP one more, because the first and the last block have less in transfer.
        firsts, lasts = (next((n for n, block in enumerate(ends) if block is self.inner), 0)
                         for ends in (self.blocks, self.blocks[::-1]))
        unlike = lasts or (self.layers - 1 in self.again) != (self.layers - 2 in self.again)
        lasts = max(lasts, 1) + (self.layers > 2 and bool(self.leave or unlike))
        firsts = min(max(firsts, 1) + (self.layers > 3 and self.leave), self.layers - lasts)
        for number in range(self.layers - 1, self.layers - 1 - lasts, -1):
            self.through(number)
        if self.layers > lasts:
            self.between(range(firsts, self.layers - lasts))
            self.begin(FIRST)
            for number in reversed(range(firsts)):
                self.through(number)

    def through(self, number: int) -> None:
        """Walk backward through one block. Equal blocks share one list of changes."""
        self.travel(number)
        block, again = self.blocks[number], number in self.again
        key = id(block), again
        if key not in self.steps:
            self.steps[key] = self.block(block, again)
        self.follow(self.steps[key])

    def travel(self, number: int) -> None:
        """Set MESSAGES to the bytes in transfer while FSDP's backward is in this block.

        They are the prefetched weights of the block that comes next, and the float32 gradients of
        the block that backward has just left, which are being reduced. In ZeRO 2, weights are
        gathered once and stay whole until the backward of their block is done."""
        if not self.leave:
            return
        reduced = FP32 * (number < self.layers - 1)
        if self.whole and 0 < number == self.layers - 2:
            reduced -= self.travels
        self.add(MESSAGES, (self.travels * (number > 0) + reduced) * self.block_numbers
                 - self.now[MESSAGES])

    def between(self, numbers: range) -> None:
        """Add the blocks that the walk skips: their saved tensors are freed, gradients appear."""
        run = sum(number in self.again for number in numbers) if self.again else 0
        others, alike = len(numbers) - run, self.blocks[numbers.start]
        saved_bytes = sum(alike.saved.values())
        self.add(ACTIVATIONS, -run * self.kept.again_bytes - others * saved_bytes)
        self.add(COPIES, -others * alike.copied_bytes)
        self.add(LOW, -others * alike.low_bytes)
        self.add(GRADIENTS, len(numbers) * self.block_gradient_bytes)

    def copies(self, weights: float) -> float:
        """Return the bytes of the copies that autocast or float32 products make of `weights`."""
        if self.widened:
            return weights * self.widened
        return weights * self.s.compute_bytes if self.s.mixed else 0.0

    def whole_loss(self, cached: float) -> None:
        """Model the loss of all tokens at once. At the end, TEMPORARIES has the gradient of the
        residual stream below the last norm."""
        logits, compute, head = self.logits, self.s.compute_bytes, self.ops.head
        low, copies = self.head_low, self.copies(self.table)
        part = logits / self.logit_ranks
        loss = self.kept.operations["loss"] - TOKEN_ID * self.tokens + FP32 * (logits - part)
        wide = FP32
        # loss: the saved float32 log-probabilities. wide: bytes of a number in their gradient
        if self.step.compiles_loss:     # one graph, which writes gradients over the logits
            wide, loss = 0, logits * compute
        elif self.whole_head:           # float32 logits, the softmax, and the logits' gradient
            wide, loss = 0, 3 * FP32 * logits
        if low:
            copies = 0.0
            self.add(LOW, self.low_bytes(head, low))
        self.add(COPIES, copies + cached)
        if wide:
            # logits in the compute dtype, and the gathered input of the head
            self.mark(logits * (compute + self.widened) + self.whole_input(head))
        self.add(COPIES, -cached)
        # torch.distributed.tensor.parallel.loss also saves the probabilities
        if wide and self.tensor > self.logit_ranks:
            loss += FP32 * logits
        self.add(LOGITS, loss)
        # float32 gradients of the log-probabilities and of the logits
        self.mark(2 * wide * logits)
        self.add(LOGITS, -loss)
        self.add(TEMPORARIES, logits * compute)
        # from here on TEMPORARIES has the logits' gradient in the compute dtype
        self.begin(HEAD)
        # the logits' float32 gradient, until its cast is made
        self.mark(logits * wide if compute < FP32 else 0)
        # each tensor rank continues with its own part of the vocabulary
        self.add(TEMPORARIES, (part - logits) * compute)
        self.follow(self.fold(head, self.kept.operations["head"], low))
        # the head's gradient: FSDP has not reduced it yet; of a tied table, it waits for the
        # embedding's gradient
        if self.sharded:
            self.add(TEMPORARIES, self.table * (self.gradient_bytes if self.leave else compute))
        elif self.gathers:
            self.add(TEMPORARIES, self.waiting_table)
        self.follow(self.fold(self.ops.norm, self.kept.operations["norm"]))

    def chunked_loss(self, cached: float) -> None:
        """Model the loss in chunks of tokens (`lpkit.memory.loss`).

        Forward already computes the gradients of the hidden states and of the head, while the
        logits of a chunk are alive. At the end, TEMPORARIES has the gradient of the stream."""
        copies, table = self.copies(self.table), FP32 * self.table * self.ops.head.trained
        self.add(ACTIVATIONS, -self.kept.operations["head"])
        # the gradient of the hidden states; `chunk_of_loss` counts the hidden states themselves
        self.add(LOGITS, self.head_stream)
        # the float32 sum of the head's gradient, allocated before the first chunk
        self.add(GRADIENTS, table)
        self.add(COPIES, copies + cached)
        self.chunk_of_loss(min(self.chunk, self.head_tokens))
        self.add(COPIES, -copies - cached)
        self.add(LOGITS, -self.head_stream)
        self.add(GRADIENTS, -table)
        self.add(TEMPORARIES, self.stream)
        if self.leave:
            self.add(TEMPORARIES, self.gradient_bytes * self.table)
        elif self.gathers:
            self.add(TEMPORARIES, self.waiting_table)
        else:
            self.add(GRADIENTS, self.gradient_bytes * self.table * self.ops.head.trained)
        self.begin(HEAD)
        self.follow(self.fold(self.ops.norm, self.kept.operations["norm"]))

    def chunk_of_loss(self, tokens: float) -> None:
        """Model the loss of one chunk of `tokens`: its logits are allocated, become their gradient
        in place, and are freed."""
        compute = self.s.compute_bytes
        # A GPU's matmul adds to the float32 sum of the head's gradient. A CPU, or a head in low
        # precision, first makes a gradient in the compute dtype.
        apart = self.s.kind == "cpu" or self.head_low is not None
        narrow = compute if compute < FP32 and apart else 0
        logits, part = tokens * self.s.model.V, tokens * self.s.model.D
        if self.whole_head:
            logits /= self.tensor
        # cast: the head's input in the dtype of the product
        # more: the gradient of that input, or the head's gradient before it is added to the sum
        cast = part * compute if self.s.mixed else 0.0
        more = max(part * compute, self.table * narrow)
        if self.widened:    # float32 copies: the logits' gradient, and both results of its products
            cast, more = part * self.widened, (logits + part + self.table) * self.widened
        if self.whole_head:     # the softmax, and the logits in float32 if they have 16 bits
            more = max(more, logits * FP32 * (1 + (compute < FP32)))
        self.mark(self.head_stream + cast + logits * compute + more)

    def embeddings(self) -> None:
        """Model the dense gradients of embedding and positions. If embedding and head share a
        table, a third tensor of its size holds the sum of both gradients."""
        table = self.table * self.gradient_bytes * self.ops.embed.trained
        positions = self.gradient_bytes * sum(
            op.params * op.trained for op in (self.ops.positions, self.ops.prompt))
        tied = self.s.model.tied and self.heads
        self.begin(EMBED)
        self.add(MESSAGES, -self.now[MESSAGES])
        if not self.gathers and not self.leave:
            self.add(GRADIENTS, positions)
        self.mark(table + positions)
        self.add(TEMPORARIES, -self.stream)
        # if a table is tied: the embedding's gradient and the sum; the head's is counted already
        self.mark(2 * table if tied else table)
        if self.at_once and table:
            # the head's gradient was added to the sum, and is freed
            waiting = self.waiting_table if tied else 0.0
            self.mark(table + self.updating(self.ops.embed, self.table) - waiting)

    def block(self, block: Block, recompute: bool) -> list[Change]:
        """Return the changes of one block's backward. TEMPORARIES has the stream's gradient before
        the block, and after it."""
        steps: list[Change] = []
        unused, low, saved, fetched = 0.0, block.low, block.saved, self.fetched
        self.row = AGAIN if recompute else ACTIVATIONS
        if recompute:
            saved, fetched = block.again, 0.0
            # The block's input is saved, and so are the results that recomputation keeps. The last
            # of these results is never read back, so that its bytes are `unused`.
            final = self.ops.linears[-1]
            if self.kept.again_bytes > self.stream and not low:
                unused = final.result_bytes / self.stream_cut
            at_work = self.whole_input(final)
            if low:     # the last addition's gradient is cast for the product below it
                cast = sum(hold.grows for hold in self.ops.block[-1].backward) / self.stream_cut
                at_work = max(at_work, self.forward_most(saved, low) + cast)
            # What the block kept leaves ACTIVATIONS, except its input and what is unused. All that
            # it saves when it runs again is in AGAIN, except the input, which ACTIVATIONS has.
            steps = [(NO_MOMENT, ACTIVATIONS, self.stream + unused - self.kept.again_bytes),
                     (NO_MOMENT, AGAIN, sum(saved.values()) - self.stream),
                     (NO_MOMENT, COPIES, block.copied_bytes), (NO_MOMENT, LOW, block.low_bytes),
                     (at_work, TEMPORARIES, 0.0)]
        # one offloaded or packed tensor at a time is back on the device
        steps.append((NO_MOMENT, TEMPORARIES, fetched))
        for op in reversed(self.ops.block):
            steps += self.fold(op, saved.get(op.name, 0.0), low)
        steps.append((NO_MOMENT, TEMPORARIES, -fetched))
        # gradients of gains and biases
        if not self.gathers or self.leave:
            steps.append((NO_MOMENT, GRADIENTS, self.small_gradient_bytes))
        if self.leave:      # all gradients of the block are whole, then FSDP reduces them to shards
            whole = self.block_numbers * self.gradient_bytes
            steps.append((0.0, GRADIENTS, self.block_gradient_bytes - whole))
        # the folds have freed the input from AGAIN, but it was in ACTIVATIONS
        if recompute:
            steps += ((NO_MOMENT, ACTIVATIONS, -self.stream - unused),
                      (NO_MOMENT, AGAIN, self.stream))
        return steps

    def fold(self, op: Op, saved_bytes: float, low: Low | None = None) -> list[Change]:
        """Return the changes of one operation's backward, which frees its `saved_bytes`."""
        if op.matmul:
            return self.linear(op, saved_bytes, low)
        steps: list[Change] = []
        # a Hold has the bytes of the whole micro-batch; `cut` ranks share them
        cut = self.stream_cut if op.in_stream else self.cut
        for hold in op.backward:
            steps.append((hold.nbytes / cut, self.row, -hold.frees * saved_bytes))
            if hold.grows:
                steps.append((NO_MOMENT, TEMPORARIES, hold.grows / cut))
        return steps

    def numbers(self, op: Op) -> tuple[float, float, float]:
        """Return the element counts of a Linear's input, output and weight on this rank.

        Tensor parallelism cuts the stream's side of a Linear along the sequence (input of a
        column-parallel one, output of a row-parallel one), and its other side along the width."""
        K, N = op.matmul
        x, y = self.tokens * op.tokens_share, self.stream_tokens * op.tokens_share
        if op.cut == "column":
            x, y = y, x
        return x * K, y * N, op.weights / self.tensor

    def cast(self, op: Op) -> tuple[float, float, float]:
        """Return `numbers` of the operands that are cast, which may be padded to tiles."""
        if op.name not in self.padded:
            return self.numbers(op)
        M, K, N = self.padded[op.name]
        column = op.cut == "column"
        return (M * K / (self.gathering if column else 1),
                M * N / (1 if column else self.gathering), K * N)

    def low_bytes(self, op: Op, low: Low) -> float:
        """Return the bytes of the weight's cast that is kept for backward. No cast is kept where
        FSDP gathers it again, except for a head that shares the embedding's table."""
        if self.gathers_casts and (op is not self.ops.head or not self.s.model.tied):
            return 0.0
        return self.cast(op)[2] * low.number_bytes

    def forward(self, op: Op, low: Low) -> float:
        """Return the bytes at work in a Linear's forward, padded copies of operands included."""
        x, y, weight = self.cast(op)
        copies = 0.0
        if op.name in self.padded:
            wide = self.s.residual_bytes if op.reads_residual else self.s.compute_bytes
            copies = x * wide + weight * self.s.residual_bytes
        column = op.cut == "column"
        x, y = x * (self.gathering if column else 1), y * (1 if column else self.gathering)
        return low.forward_bytes(x, y, weight) + copies

    def forward_most(self, saved: Mapping[str, float], low: Low) -> float:
        """Return the most bytes that forward needs beyond what a block has `saved` at its end.

        Usually the last Linear needs most. If tensor ranks gather the stream's side of each Linear,
        any Linear can: `later` has the bytes that operations after it have not saved yet."""
        most, later = self.forward(self.ops.linears[-1], low), 0.0
        for op in reversed(self.ops.block if self.gathering > 1 else ()):
            if op.matmul:
                x, y, _ = self.cast(op)
                whole = (x * self.s.residual_bytes if op.cut == "column"
                         else y * self.s.compute_bytes)
                most = max(most, self.forward(op, low) + self.gathering * whole - later)
            later += saved.get(op.name, 0.0)
        return most

    def whole_input(self, op: Op) -> float:
        """Return the bytes of the stream's side of a Linear when it is whole on each tensor rank:
        the gathered input, or the output before the ranks add up and split it (Korthikanti et al.
        2022, section 4.2). Returns 0 if no tensor rank gathers."""
        if self.gathering == 1:
            return 0.0
        x, y, _ = self.numbers(op)
        return self.gathering * (x if op.cut == "column" else y) * self.s.compute_bytes

    def linear(self, op: Op, saved_bytes: float, low: Low | None) -> list[Change]:
        """Return the changes of a Linear's backward, which makes dx and dw from dy.

        dy, the saved input and the weight's copy are freed after both products. dy stays if the
        residual stream still needs it. dx stays in TEMPORARIES."""
        s, (x, y, weight) = self.s, self.numbers(op)
        dx, dw, dy = x * s.compute_bytes, weight * s.compute_bytes * op.trained, y * s.compute_bytes
        # final: the weight's gradient as the optimizer reads it. wide: dx in the dtype of the
        # stream.
        final, wide = weight * self.gradient_bytes * op.trained, dx
        if s.mixed and op.reads_residual:
            wide = x * s.residual_bytes
        if op.shares == "output" or (op.writes_residual and not s.mixed):
            dy = 0.0
        # A column-parallel Linear gathers its input again, and then holds its gradient before the
        # ranks split it; a row-parallel one gathers dy.
        whole = 0.0
        if self.gathering > 1:
            again = (op.cut == "column" and not self.step.stack.keeps_gathered
                     and not (op is self.ops.head and self.whole_head))
            whole = self.whole_input(op) * (1 + again)
        gathers = self.gathers and not self.leave
        after = final if gathers and not s.mixed else NO_MOMENT
        if low is not None:     # one autograd.Function, which frees nothing before it returns
            work = self.low_linear(op, low, whole, wide, dy)
            copied, copies = LOW, self.low_bytes(op, low)
        else:
            # float32 copies of x or dx, dy and the weight; dy itself is in TEMPORARIES already
            work = self.widened * (x + y + weight) - dy if self.widened else whole + dx + dw
            if op.stored_bytes:
                # a coded weight is decoded first, then multiplied by dy
                work = whole + max(op.made_bytes / self.tensor, weight * s.compute_bytes + dx)
            copied = COPIES
            copies = self.copies(weight * op.own) if s.mixed and not op.stored_bytes else 0.0
            if s.mixed:
                after = dw + max(final, wide if op.reads_residual else 0) + wide - dx
                # dw is cast to `final`; dx is cast to the dtype of the stream
        # a head that shares the embedding's table is updated with the embedding
        if self.at_once and op.trained and not (op is self.ops.head and self.waiting_table):
            after = max(after, final + self.updating(op, weight))
        # dx and dw appear and dy is freed; then the saved input and the weight's copy are freed;
        # then dx is cast to the stream's dtype
        steps = [(work, TEMPORARIES, dx - dy), (NO_MOMENT, self.row, -saved_bytes),
                 (NO_MOMENT, copied, -copies), (after, TEMPORARIES, wide - dx)]
        # the dx of another Linear with the same input is in TEMPORARIES: this one is added to it
        if op.shares == "input":
            steps.append((NO_MOMENT, TEMPORARIES, -wide))
        if not gathers and not (self.leave and op is self.ops.head):
            steps.append((NO_MOMENT, GRADIENTS, final * op.own))
        return steps

    def low_linear(self, op: Op, low: Low, whole: float, wide: float, dy: float) -> float:
        """Return the bytes at work in the backward of a Linear with cast operands.

        If operands are padded, dy has a padded copy before the products, and dx and dw have copies
        cut to their real size after them."""
        s, (x, y, weight) = self.s, self.cast(op)
        compute, real = s.compute_bytes, self.numbers(op)
        dx, dw = x * wide / real[0], weight * compute
        final = weight * self.s.residual_bytes if s.mixed else 0.0
        work = whole + low.work_bytes(x, y, weight, dx=dx, dw=dw, final=final)
        if op.name not in self.padded:
            return work
        cut = dx + max(final, dw) + real[2] * self.s.residual_bytes + wide - dy
        return max(y * compute, cut, work + y * compute - dy)
