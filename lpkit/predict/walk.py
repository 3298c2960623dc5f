"""Follow the memory of one micro-batch through its backward pass, operation by operation.

    forward     embed -> block 0 -> block 1 -> block 2 -> block 3 -> norm -> head -> loss
    backward    embed <- block 0 <- block 1 <- block 2 <- block 3 <- norm <- head <- loss
    moment      EMBED    FIRST      (between, added)      LAST       `--- HEAD ---'  LOSS

Autograd frees the tensors that an operation saved as soon as the backward of this operation is
done. Meanwhile gradients of weights are allocated. So memory rises and falls with every operation,
and the peak can be at any of these moments. Blocks are alike, so from block to block memory grows
or falls by the same bytes, and the peak over the blocks is in the last or in the first block. The
walk goes through these two blocks and adds all blocks between them at once. If the last block
differs from the blocks before it (it stays in 16 bits, or it is not recomputed), the walk also goes
through the block before it.

Terms, all in bytes on one device:

    saved       tensors that an operation keeps from forward for its backward. They are in the row
                ACTIVATIONS, or in the row AGAIN while a recomputed block runs again.
    stream      the residual stream of the micro-batch; its gradient has the same size
    dx, dw, dy  gradients of a Linear's input, of its weight and of its output
    Hold        one moment of an operation's backward (`lpkit.techniques.operation`)
    Change      (mark, row, nbytes): for a moment `mark` more bytes are alive, as temporaries; then
                the row grows by `nbytes`
    fold        the backward of one operation as a list of Changes

Example: a Linear with 2 inputs and 8 outputs for 4 tokens, all in float32 (4 bytes per number). dy
has 4 tokens * 8 outputs * 4 = 128 bytes, dx 4 * 2 * 4 = 32 bytes, and dw 2 * 8 * 4 = 64 bytes. dy
is in TEMPORARIES when the Linear's backward begins.

    mark    row             nbytes
    96      TEMPORARIES     -96         dx (32) and dw (64) are allocated; then dy (128) is freed
                                        and dx stays: 32 - 128 = -96
    -       ACTIVATIONS     -32         the saved input is freed
    -       GRADIENTS       +64         dw becomes the gradient of the weight

Operations come in the order of PyTorch's autograd engine for `lpkit.nn.transformer`.
tests/predict/test_predict.py compares the walk with a measured step.
"""

import copy
import math
from collections.abc import Mapping

from lpkit.predict.device import Device, DeviceStep
from lpkit.predict.recipes import Low
from lpkit.techniques.operation import FP32, TOKEN_ID, Op

LOSS, HEAD = "backward begins", "head and last norm"
LAST, FIRST = "the last block", "the first block"
EMBED, UPDATE = "embeddings", "optimizer works"
ACTIVATIONS, COPIES = "activations", "weight copies"
GRADIENTS, TEMPORARIES = "gradients", "temporaries"
AGAIN, LOGITS, LOW = "recomputed block", "logits and loss", "low-precision weights"
MESSAGES, GRADIENTS_OF_LOGITS = "communication buffers", "logits' gradients"
# (mark: bytes alive for a moment, row that changes afterwards, bytes by which the row grows)
Change = tuple[float, str, float]
# the `mark` of a Change without such a moment: it can never be the peak
NO_MOMENT = -math.inf


class BlockActivations:
    """The bytes of one block of the model.

    saved           bytes that its operations save in forward, by operation
    again           the same bytes if the block is recomputed: saved when it runs again in backward
    low             the casts of its Linears; None: they stay in 16 bits
    copied_bytes    autocast's copies of its weights
    low_bytes       casts of its weights that are kept for backward
    """

    def __init__(self, walk: "Walk", saved: Mapping[str, float], again: Mapping[str, float],
                 low: Low | None):
        self.saved, self.again, self.low = saved, again, low
        self.copied_bytes = 0.0 if low else walk.copies(walk.linear_weights)
        self.low_bytes = 0.0
        if low:
            self.low_bytes = sum([walk.low_bytes(op, low) for op in walk.ops.linears])


class Walk(Device):
    """The backward pass of one micro-batch on a device. The constructor walks through it.

    now     live bytes by row, at the current point of the walk
    total   their sum
    most    for each moment of the ledger, the live bytes by row when their sum was largest
    steps   for each kind of block, the list of Changes in its backward
    """

    def __init__(self, step: DeviceStep, embeds: bool, heads: bool, layers: int | None = None,
                       added: bool | None = None):
        super().__init__(step, embeds, heads, layers, added)
        rows = (ACTIVATIONS, COPIES, GRADIENTS, TEMPORARIES, AGAIN, LOGITS, LOW, MESSAGES)
        self.now, self.total = dict.fromkeys(rows, 0.0), 0.0
        self.most: dict[str, dict[str, float]] = {}
        self.steps: dict[tuple[int, bool], list[Change]] = {}
        self.row = ACTIVATIONS      # the row of saved tensors; AGAIN in a block that runs again
        kept, rerun = self.kept, self.rerun
        as_it_is = BlockActivations(self, kept.plain, rerun.plain, None)
        self.inner = (BlockActivations(self, kept.block, rerun.block, self.low) if self.low
                      else as_it_is)
        self.blocks = [self.inner] * self.layers
        for number in self.stay:
            self.blocks[number] = as_it_is
        self.unsaved = self.first_saves_less() if embeds and self.blocks else 0.0
        self.walk()

    def first_saves_less(self) -> float:
        """Replace the first block by a copy that saves less, if no parameter below it is trained,
        and return the bytes that the first block then does not save in forward.

        Without trained parameters below them, the operations before the first trained operation
        need no backward and save nothing."""
        ops, first = self.ops, self.blocks[0]
        at = next((i for i, op in enumerate(ops.block) if op.trained), 0)
        if ops.embed.trained or ops.positions.trained or not at:
            return 0.0
        below = list(ops.block[:at])
        if ops.block[at].shares:
            # The frozen Linear of the first adapter has the same input, and computes no gradient of
            # it either.
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
        if 0 in self.again:             # recomputation saves the block's input in any case
            less.again[below[0].name] = self.stream
            return 0.0
        return sum(first.saved.values()) - sum(less.saved.values())

    @property
    def at(self) -> dict[str, dict[str, float]]:
        """The most live bytes by row and moment. The float32 gradients of the logits are a row of
        their own."""
        at = {row: {moment: held[row] for moment, held in self.most.items() if held[row]}
              for row in self.now}
        if self.heads:
            at[GRADIENTS_OF_LOGITS] = {LOSS: at[TEMPORARIES].pop(LOSS, 0)}
        return at

    def begin(self, moment: str) -> None:
        """Enter the next moment of the ledger."""
        self.moment, self.highest = moment, -math.inf

    def add(self, row: str, nbytes: float) -> None:
        """Let a row grow by `nbytes`, or shrink if they are negative."""
        self.now[row] += nbytes
        self.total += nbytes

    def mark(self, more: float = 0) -> None:
        """Record a point of the walk at which `more` temporary bytes are alive in addition to
        `now`. The point is kept in `most` if its sum is the largest of the current moment."""
        total = self.total + more
        if total > self.highest:
            self.highest = total
            rows = self.most[self.moment] = self.now.copy()
            rows[TEMPORARIES] += more

    def follow(self, steps: list[Change]) -> None:
        """Call `mark` and `add` for each Change, inlined in one loop because the calls are slow."""
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
        """Walk from the end of forward to the end of backward, and fill `most`, `casts` and
        `copied`."""
        kept, low = self.kept, (self.blocks or [self.inner])[-1].low
        # token ids and targets are in the row "batch" of the ledger
        self.begin(LOSS)
        self.add(ACTIVATIONS, kept.waiting_bytes - self.unsaved)
        # copies, casts: bytes of the blocks that are not recomputed. cached: autocast's copies of
        # the weights of recomputed blocks, which autocast's cache holds until forward ends.
        copies = casts = 0.0
        cached = 0.0
        for number, block in enumerate(self.blocks):
            if number not in self.again:
                copies += block.copied_bytes
                casts += block.low_bytes
            elif not self.widened:
                cached += 0.0 if block.low else self.copies(self.ops.trained_weights / self.tensor)
        self.add(COPIES, copies)
        self.add(LOW, casts)
        # `casts`: bytes that each micro-batch in flight has. `copied`: autocast's copies, which all
        # micro-batches in flight share.
        self.casts = {LOW: casts, COPIES: copies * bool(self.widened)}
        self.copied = 0.0 if self.widened else (sum(block.copied_bytes for block in self.blocks)
                       + self.copies(self.table) * (self.heads and not self.head_low))
        # after: bytes that the last norm and the head save after the last block, so that they are
        # not yet alive in the last block's forward
        after = kept.operations["norm"] + kept.operations["head"]
        # The last Linear of forward, or packing an activation, may need more bytes than the loss.
        self.add(COPIES, cached)
        self.mark(max(self.packed, self.forward_most(self.blocks[-1].saved, low) - after
                      if low and self.blocks else 0.0))
        self.add(COPIES, -cached)
        if not self.heads:
            self.add(TEMPORARIES, self.stream)             # the gradient that the next stage sent
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
        # Number of blocks to walk through at each end: all blocks that differ from `inner`, and
        # then one block that is `inner`. With FSDP one more block, because in the last and in the
        # first block fewer bytes are in transfer.
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
        """Walk backward through one block. Equal blocks share one list of Changes."""
        self.travel(number)
        block, again = self.blocks[number], number in self.again
        key = id(block), again
        if key not in self.steps:
            self.steps[key] = self.block(block, again)
        self.follow(self.steps[key])

    def travel(self, number: int) -> None:
        """Set MESSAGES to the bytes in transfer while FSDP's backward is in this block.

        These are the prefetched weights of the block that backward enters next (`number` - 1), and
        the float32 gradients of the block that backward has just left (`number` + 1), while they
        are reduced. In ZeRO 2, weights are gathered once and stay whole until the backward of their
        block is done."""
        if not self.leave:
            return
        reduced = FP32 * (number < self.layers - 1)
        if self.whole and 0 < number == self.layers - 2:
            reduced -= self.travels
        self.add(MESSAGES, (self.travels * (number > 0) + reduced) * self.block_numbers
                 - self.now[MESSAGES])

    def between(self, numbers: range) -> None:
        """Apply the changes of the blocks that the walk skips: their saved tensors and copies are
        freed, and their gradients are allocated."""
        run = sum(number in self.again for number in numbers) if self.again else 0
        others, alike = len(numbers) - run, self.blocks[numbers.start]
        saved_bytes = sum(alike.saved.values())
        self.add(ACTIVATIONS, -run * self.kept.again_bytes - others * saved_bytes)
        self.add(COPIES, -others * alike.copied_bytes)
        self.add(LOW, -others * alike.low_bytes)
        self.add(GRADIENTS, len(numbers) * self.block_gradient_bytes)

    def copies(self, weights: float) -> float:
        """Return the bytes of the copies of `weights` parameters: autocast's 16-bit copies, or the
        float32 copies of a CPU that multiplies float16 values in float32."""
        if self.widened:
            return weights * self.widened
        return weights * self.s.compute_bytes if self.s.mixed else 0.0

    def whole_loss(self, cached: float) -> None:
        """Walk through the loss of all tokens at once, the head and the last norm. `cached`: bytes
        in autocast's cache. At the end, TEMPORARIES has the gradient of the residual stream below
        the last norm."""
        logits, compute, head = self.logits, self.s.compute_bytes, self.ops.head
        low, copies = self.head_low, self.copies(self.table)
        part = logits / self.logit_ranks
        loss = self.kept.operations["loss"] - TOKEN_ID * self.tokens + FP32 * (logits - part)
        wide = FP32
        # loss: bytes of the saved float32 log-probabilities. wide: bytes per number of their
        # gradient; 0: no separate gradient
        if self.step.compiles_loss:     # one graph, which writes the gradient over the logits
            wide, loss = 0, logits * compute
        elif self.whole_head:           # float32 logits, their softmax, and their gradient
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
        # From here on, TEMPORARIES has the logits' gradient in the compute dtype.
        self.begin(HEAD)
        # the logits' float32 gradient is alive until it is cast
        self.mark(logits * wide if compute < FP32 else 0)
        # each tensor rank continues with the gradient of its own part of the vocabulary
        self.add(TEMPORARIES, (part - logits) * compute)
        self.follow(self.fold(head, self.kept.operations["head"], low))
        # The head's gradient is a temporary: FSDP reduces it later; if the table is tied, it waits
        # for the embedding's gradient.
        if self.sharded:
            self.add(TEMPORARIES, self.table * (self.gradient_bytes if self.leave else compute))
        elif self.gathers:
            self.add(TEMPORARIES, self.waiting_table)
        self.follow(self.fold(self.ops.norm, self.kept.operations["norm"]))

    def chunked_loss(self, cached: float) -> None:
        """Walk through the loss in chunks of tokens (`lpkit.memory.loss`) and the last norm.

        Forward already computes the gradients of the head's input and of the head's weight, while
        the logits of a chunk are alive. At the end, TEMPORARIES has the gradient of the residual
        stream. `cached`: bytes in autocast's cache."""
        copies, table = self.copies(self.table), FP32 * self.table * self.ops.head.trained
        self.add(ACTIVATIONS, -self.kept.operations["head"])
        # the gradient of the head's input; `chunk_of_loss` counts the head's input itself
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
        """Record the peak of one chunk of `tokens` in the loss: its logits are allocated, are
        overwritten by their gradient, and are freed."""
        compute = self.s.compute_bytes
        # A matmul on a GPU adds to the float32 sum of the head's gradient. On a CPU, or with a head
        # in low precision (`apart`), the chunk's gradient is first a tensor in the compute dtype.
        apart = self.s.kind == "cpu" or self.head_low is not None
        narrow = compute if compute < FP32 and apart else 0
        logits, part = tokens * self.s.model.V, tokens * self.s.model.D
        if self.whole_head:
            logits /= self.tensor
        # cast: bytes of the chunk's input, cast to the dtype of the matmul
        # more: bytes of this input's gradient, or of the head's gradient before it is added to the
        # sum, whichever is larger
        cast = part * compute if self.s.mixed else 0.0
        more = max(part * compute, self.table * narrow)
        if self.widened:    # float32 copies of the logits' gradient and of both gradients from it
            cast, more = part * self.widened, (logits + part + self.table) * self.widened
        if self.whole_head:     # the softmax, and the logits in float32 if they have 16 bits
            more = max(more, logits * FP32 * (1 + (compute < FP32)))
        self.mark(self.head_stream + cast + logits * compute + more)

    def embeddings(self) -> None:
        """Walk through the backward of embedding and positions, which have dense gradients. If
        embedding and head share a table, a third tensor of the table's size is alive: the sum of
        both gradients."""
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
        # a tied table: the embedding's gradient and the sum; the head's gradient is in TEMPORARIES
        self.mark(2 * table if tied else table)
        if self.at_once and table:
            # `waiting`: the head's gradient, which is freed after it was added to the sum
            waiting = self.waiting_table if tied else 0.0
            self.mark(table + self.updating(self.ops.embed, self.table) - waiting)

    def block(self, block: BlockActivations, recompute: bool) -> list[Change]:
        """Return the Changes of one block's backward. TEMPORARIES has the gradient of the residual
        stream when the block's backward begins, and when it ends."""
        steps: list[Change] = []
        unused, low, saved, fetched = 0.0, block.low, block.saved, self.fetched
        self.row = AGAIN if recompute else ACTIVATIONS
        if recompute:
            saved, fetched = block.again, 0.0
            # Forward kept the block's input, and perhaps results of Linears (selective
            # recomputation). The rerun does not read the last of these results: its bytes are
            # `unused`.
            final = self.ops.linears[-1]
            if self.kept.again_bytes > self.stream and not low:
                unused = final.result_bytes / self.stream_cut
            at_work = self.whole_input(final)
            if low:     # the gradient of the last addition is cast for the matmul below it
                cast = sum(hold.grows for hold in self.ops.block[-1].backward) / self.stream_cut
                at_work = max(at_work, self.forward_most(saved, low) + cast)
            # The bytes that forward kept leave ACTIVATIONS, except for the block's input and the
            # unused result. The tensors that the rerun saves are in AGAIN, except for the block's
            # input, which is in ACTIVATIONS.
            steps = [(NO_MOMENT, ACTIVATIONS, self.stream + unused - self.kept.again_bytes),
                     (NO_MOMENT, AGAIN, sum(saved.values()) - self.stream),
                     (NO_MOMENT, COPIES, block.copied_bytes), (NO_MOMENT, LOW, block.low_bytes),
                     (at_work, TEMPORARIES, 0.0)]
        # backward fetches one offloaded or packed tensor at a time
        steps.append((NO_MOMENT, TEMPORARIES, fetched))
        for op in reversed(self.ops.block):
            steps += self.fold(op, saved.get(op.name, 0.0), low)
        steps.append((NO_MOMENT, TEMPORARIES, -fetched))
        # gradients of norms' gains and of biases
        if not self.gathers or self.leave:
            steps.append((NO_MOMENT, GRADIENTS, self.small_gradient_bytes))
        if self.leave:      # FSDP reduces the block's gradients after all of them are complete
            whole = self.block_numbers * self.gradient_bytes
            steps.append((0.0, GRADIENTS, self.block_gradient_bytes - whole))
        # The folds subtracted the block's input from AGAIN, but it was in ACTIVATIONS.
        if recompute:
            steps += ((NO_MOMENT, ACTIVATIONS, -self.stream - unused),
                      (NO_MOMENT, AGAIN, self.stream))
        return steps

    def fold(self, op: Op, saved_bytes: float, low: Low | None = None) -> list[Change]:
        """Return the Changes of one operation's backward, which frees its `saved_bytes`."""
        if op.matmul:
            return self.linear(op, saved_bytes, low)
        steps: list[Change] = []
        # a Hold has the bytes of the whole micro-batch, which `cut` ranks share
        cut = self.stream_cut if op.in_stream else self.cut
        for hold in op.backward:
            steps.append((hold.nbytes / cut, self.row, -hold.frees * saved_bytes))
            if hold.grows:
                steps.append((NO_MOMENT, TEMPORARIES, hold.grows / cut))
        return steps

    def numbers(self, op: Op) -> tuple[float, float, float]:
        """Return the element counts of a Linear's input, output and weight on this rank.

        Tensor parallelism cuts the side of a Linear that is the residual stream along the sequence:
        the input of a column-parallel Linear, or the output of a row-parallel Linear. It cuts the
        other side along the width."""
        K, N = op.matmul
        x, y = self.tokens * op.tokens_share, self.stream_tokens * op.tokens_share
        if op.cut == "column":
            x, y = y, x
        return x * K, y * N, op.weights / self.tensor

    def cast(self, op: Op) -> tuple[float, float, float]:
        """Return the element counts of `numbers`, but of the padded tensors if the Linear's
        operands are padded to tiles for their casts."""
        if op.name not in self.padded:
            return self.numbers(op)
        M, K, N = self.padded[op.name]
        column = op.cut == "column"
        return (M * K / (self.gathering if column else 1),
                M * N / (1 if column else self.gathering), K * N)

    def low_bytes(self, op: Op, low: Low) -> float:
        """Return the bytes of the weight's cast that is kept for backward. If FSDP gathers casts
        again in backward, no cast is kept, except for a head that shares the embedding's table."""
        if self.gathers_casts and (op is not self.ops.head or not self.s.model.tied):
            return 0.0
        return self.cast(op)[2] * low.number_bytes

    def forward(self, op: Op, low: Low) -> float:
        """Return the temporary bytes of a Linear's forward with cast operands, including padded
        copies of the operands."""
        x, y, weight = self.cast(op)
        copies = 0.0
        if op.name in self.padded:
            wide = self.s.residual_bytes if op.reads_residual else self.s.compute_bytes
            copies = x * wide + weight * self.s.residual_bytes
        column = op.cut == "column"
        x, y = x * (self.gathering if column else 1), y * (1 if column else self.gathering)
        return low.forward_bytes(x, y, weight) + copies

    def forward_most(self, saved: Mapping[str, float], low: Low) -> float:
        """Return the most temporary bytes of a block's forward, in addition to all bytes that the
        block has `saved` at its end.

        Usually the last Linear needs most. If tensor ranks gather the residual stream for each
        Linear, any Linear can need most. `later`: bytes that the operations after a Linear save,
        which are not yet alive in this Linear's forward."""
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
        """Return the bytes of a Linear's side that is the residual stream, while it is whole on
        each tensor rank: the gathered input, or the output before the ranks sum and split it
        (Korthikanti et al. 2022, section 4.2). Return 0 if the tensor ranks gather nothing."""
        if self.gathering == 1:
            return 0.0
        x, y, _ = self.numbers(op)
        return self.gathering * (x if op.cut == "column" else y) * self.s.compute_bytes

    def linear(self, op: Op, saved_bytes: float, low: Low | None) -> list[Change]:
        """Return the Changes of a Linear's backward, which computes dx and dw from dy.

        After both matmuls, dy, the saved input and the weight's copy are freed; dy stays if the
        residual stream still needs it. dx stays in TEMPORARIES."""
        s, (x, y, weight) = self.s, self.numbers(op)
        dx, dw, dy = x * s.compute_bytes, weight * s.compute_bytes * op.trained, y * s.compute_bytes
        # final: bytes of the weight's gradient in the dtype that the optimizer reads. wide: bytes
        # of dx in the dtype of the residual stream.
        final, wide = weight * self.gradient_bytes * op.trained, dx
        if s.mixed and op.reads_residual:
            wide = x * s.residual_bytes
        if op.shares == "output" or (op.writes_residual and not s.mixed):
            dy = 0.0
        # whole: bytes that tensor ranks gather. A column-parallel Linear gathers its input again,
        # and also holds the whole dx before the ranks split it; a row-parallel Linear gathers dy.
        whole = 0.0
        if self.gathering > 1:
            again = (op.cut == "column" and not self.step.stack.keeps_gathered
                     and not (op is self.ops.head and self.whole_head))
            whole = self.whole_input(op) * (1 + again)
        gathers = self.gathers and not self.leave
        after = final if gathers and not s.mixed else NO_MOMENT
        # work: temporary bytes of both matmuls. after: temporary bytes of the casts after them.
        if low is not None:     # one autograd.Function, which frees nothing before it returns
            work = self.low_linear(op, low, whole, wide, dy)
            copied, copies = LOW, self.low_bytes(op, low)
        else:
            # If `widened`: float32 copies of dy, of the weight, and of x or dx; dy itself is in
            # TEMPORARIES already.
            work = self.widened * (x + y + weight) - dy if self.widened else whole + dx + dw
            if op.stored_bytes:
                # a coded weight is decoded first, then multiplied by dy
                work = whole + max(op.made_bytes / self.tensor, weight * s.compute_bytes + dx)
            copied = COPIES
            copies = self.copies(weight * op.own) if s.mixed and not op.stored_bytes else 0.0
            if s.mixed:
                after = dw + max(final, wide if op.reads_residual else 0) + wide - dx
                # dw is cast to the dtype of `final`, and dx to the dtype of the residual stream
        # a head that shares the embedding's table is updated with the embedding
        if self.at_once and op.trained and not (op is self.ops.head and self.waiting_table):
            after = max(after, final + self.updating(op, weight))
        # First dx and dw are allocated and dy is freed; then the saved input and the weight's copy
        # are freed; then dx is cast to the dtype of the residual stream.
        steps = [(work, TEMPORARIES, dx - dy), (NO_MOMENT, self.row, -saved_bytes),
                 (NO_MOMENT, copied, -copies), (after, TEMPORARIES, wide - dx)]
        # TEMPORARIES already has the dx of another Linear with the same input, to which this dx is
        # added; so this dx is freed.
        if op.shares == "input":
            steps.append((NO_MOMENT, TEMPORARIES, -wide))
        if not gathers and not (self.leave and op is self.ops.head):
            steps.append((NO_MOMENT, GRADIENTS, final * op.own))
        return steps

    def low_linear(self, op: Op, low: Low, whole: float, wide: float, dy: float) -> float:
        """Return the temporary bytes in the backward of a Linear with cast operands.

        If operands are padded, dy has a padded copy before the matmuls; after them, dx and dw are
        copied to tensors without padding."""
        s, (x, y, weight) = self.s, self.cast(op)
        compute, real = s.compute_bytes, self.numbers(op)
        dx, dw = x * wide / real[0], weight * compute
        final = weight * self.s.residual_bytes if s.mixed else 0.0
        work = whole + low.work_bytes(x, y, weight, dx=dx, dw=dw, final=final)
        if op.name not in self.padded:
            return work
        cut = dx + max(final, dw) + real[2] * self.s.residual_bytes + wide - dy
        return max(y * compute, cut, work + y * compute - dy)
