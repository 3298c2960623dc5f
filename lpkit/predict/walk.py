"""The bytes of one micro-batch, operation after operation, from the end of its forward pass to the
last gradient.

Autograd frees what an operation kept as soon as its backward is done, while gradients appear: what
is live rises and falls with every operation. Each operation of `techniques.blocks` says what its
backward holds; here they are folded in reverse. Blocks are alike, so what is live is a straight
line from one to the next, and its peak lies in the last block or in the first: these two are
walked, those between are added at once. Where the last is not as those before it (it stays in 16
bits, or does not run again), the one before it is walked as well. tests/predict/test_predict.py holds the
walk against a measured step. Bytes; the order is that of PyTorch's autograd engine for
`lpkit.nn.transformer`.
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
# what is there for a moment too; then a row, and what it grows by
Change = tuple[float, str, float]
NO_MOMENT = -math.inf


class Block:
    """A block: what each of its operations saved, in forward or when it runs again, and how its
    Linears are cast."""

    def __init__(self, walk: "Walk", saved: Mapping[str, float], again: Mapping[str, float],
                 low: Low | None):
        self.saved, self.again, self.low = saved, again, low
        self.copied_bytes = 0.0 if low else walk.copies(walk.linear_weights)
        self.low_bytes = 0.0
        if low:
            self.low_bytes = sum([walk.low_bytes(op, low) for op in walk.ops.linears])


class Walk(Device):
    """A device as a micro-batch goes backward: what is live `now`, by row, and of each moment the
    rows when they were `most`."""

    def __init__(self, step: Step, embeds: bool, heads: bool, layers: int | None = None,
                 added: bool | None = None):
        super().__init__(step, embeds, heads, layers, added)
        rows = (ACTIVATIONS, COPIES, GRADIENTS, TEMPORARIES, AGAIN, LOGITS, LOW, MESSAGES)
        self.now, self.total = dict.fromkeys(rows, 0.0), 0.0
        self.most: dict[str, dict[str, float]] = {}
        self.steps: dict[tuple[int, bool], list[Change]] = {}
        self.row = ACTIVATIONS      # of what the operations at hand saved
        kept, rerun = self.kept, self.rerun
        as_it_is = Block(self, kept.plain, rerun.plain, None)
        self.inner = Block(self, kept.block, rerun.block, self.low) if self.low else as_it_is
        self.blocks = [self.inner] * self.layers
        for number in self.stay:
            self.blocks[number] = as_it_is
        self.unsaved = self.first_saves_less() if embeds and self.blocks else 0.0
        self.walk()

    def first_saves_less(self) -> float:
        """Nothing below the first trained operation has a gradient, so that the first block does
        not save what comes before it. Returns the bytes, and notes them in a block of its own."""
        ops, first = self.ops, self.blocks[0]
        at = next((i for i, op in enumerate(ops.block) if op.trained), 0)
        if ops.embed.trained or ops.positions.trained or not at:
            return 0.0
        below = list(ops.block[:at])
        if ops.block[at].shares:
            below.append(next(op for op in ops.block[at:] if op.shares == "output"))
        names = {op.name for op in below}
        self.blocks[0] = less = copy.copy(first)
        less.saved, less.again = ({name: n for name, n in each.items() if name not in names}
                                  for each in (first.saved, first.again))
        if first.low:
            less.low_bytes -= sum(self.low_bytes(op, first.low) for op in below if op.matmul)
        else:
            less.copied_bytes -= self.copies(sum(op.weights for op in below if not op.stored_bytes) / self.tensor)
        if 0 in self.again:             # whose input is there already
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
        """Something of `more` bytes is there for a moment too."""
        total = self.total + more
        if total > self.highest:
            self.highest = total
            rows = self.most[self.moment] = self.now.copy()
            rows[TEMPORARIES] += more

    def follow(self, steps: list[Change]) -> None:
        """`mark` and `add`, many times."""
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
        # token ids and targets have a row of their own
        self.begin(LOSS)
        self.add(ACTIVATIONS, kept.waiting_bytes - self.unsaved)
        copies = casts = 0.0
        cached = 0.0        # of blocks that run again: autocast keeps copies to the end of forward
        for number, block in enumerate(self.blocks):
            if number not in self.again:
                copies += block.copied_bytes
                casts += block.low_bytes
            elif not self.widened:
                cached += 0.0 if block.low else self.copies(self.ops.trained_weights / self.tensor)
        self.add(COPIES, copies)
        self.add(LOW, casts)
        # of each micro-batch; and the copies that autocast makes once for all
        self.casts = {LOW: casts, COPIES: copies * bool(self.widened)}
        self.copied = 0.0 if self.widened else (sum(block.copied_bytes for block in self.blocks)
                       + self.copies(self.table) * (self.heads and not self.head_low))
        after = kept.operations["norm"] + kept.operations["head"]       # what is kept last
        self.add(COPIES, cached)
        self.mark(max(self.packed, self.forward_most(self.blocks[-1].saved, low) - after
                      if low and self.blocks else 0.0))
        self.add(COPIES, -cached)
        if not self.heads:
            self.add(TEMPORARIES, self.stream)             # from the next stage
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
        """Goes through the blocks."""
        self.begin(LAST)
        # blocks that are walked: those that are not as the others are, and one of these
        firsts, lasts = (next((n for n, one in enumerate(ends) if one is self.inner), 0)
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
        """Goes back through one block; blocks that are alike have the same steps."""
        self.travel(number)
        block, again = self.blocks[number], number in self.again
        key = id(block), again
        if key not in self.steps:
            self.steps[key] = self.block(block, again)
        self.follow(self.steps[key])

    def travel(self, number: int) -> None:
        """Adds what is on its way while this block is at work: the next one's weights, gradients of
        the one before. What was gathered once is whole until a block's backward is done."""
        if not self.leave:
            return
        reduced = FP32 * (number < self.layers - 1)
        if self.whole and 0 < number == self.layers - 2:
            reduced -= self.travels
        self.add(MESSAGES, (self.travels * (number > 0) + reduced) * self.block_numbers
                 - self.now[MESSAGES])

    def between(self, numbers: range) -> None:
        """The blocks that are not walked."""
        run = sum(number in self.again for number in numbers) if self.again else 0
        others, alike = len(numbers) - run, self.blocks[numbers.start]
        saved_bytes = sum(alike.saved.values())
        self.add(ACTIVATIONS, -run * self.kept.again_bytes - others * saved_bytes)
        self.add(COPIES, -others * alike.copied_bytes)
        self.add(LOW, -others * alike.low_bytes)
        self.add(GRADIENTS, len(numbers) * self.block_gradient_bytes)

    def copies(self, weights: float) -> float:
        """Bytes of the copy of weights in the dtype of their product."""
        if self.widened:
            return weights * self.widened
        return weights * self.s.compute_bytes if self.s.mixed else 0.0

    def whole_loss(self, cached: float) -> None:
        """Leaves with the gradient of the head's input."""
        logits, compute, head = self.logits, self.s.compute_bytes, self.ops.head
        low, copies = self.head_low, self.copies(self.table)
        part = logits / self.logit_ranks
        loss = self.kept.operations["loss"] - TOKEN_ID * self.tokens + FP32 * (logits - part)
        wide = FP32
        if self.step.compiles_loss:     # one graph, which writes gradients where the logits were
            wide, loss = 0, logits * compute
        elif self.whole_head:           # logits, their gradient and, before it, the softmax
            wide, loss = 0, 3 * FP32 * logits
        if low:
            copies = 0.0
            self.add(LOW, self.low_bytes(head, low))
        self.add(COPIES, copies + cached)
        if wide:
            self.mark(logits * (compute + self.widened) + self.whole_input(head))
        self.add(COPIES, -cached)
        # torch.distributed.tensor.parallel.loss: the probabilities, too
        if wide and self.tensor > self.logit_ranks:
            loss += FP32 * logits
        self.add(LOGITS, loss)
        self.mark(2 * wide * logits)                # of the log-probabilities, and of the logits
        self.add(LOGITS, -loss)
        self.add(TEMPORARIES, logits * compute)
        self.begin(HEAD)
        self.mark(logits * wide if compute < FP32 else 0)
        self.add(TEMPORARIES, (part - logits) * compute)
        self.follow(self.fold(head, self.kept.operations["head"], low))
        if self.sharded:
            self.add(TEMPORARIES, self.table * (self.gradient_bytes if self.leave else compute))
        elif self.gathers:
            self.add(TEMPORARIES, self.waiting_table)
        self.follow(self.fold(self.ops.norm, self.kept.operations["norm"]))

    def chunked_loss(self, cached: float) -> None:
        """Gradients of the hidden states and of the head are made in the forward pass, while a
        chunk's logits are there. Leaves with the first."""
        copies, table = self.copies(self.table), FP32 * self.table * self.ops.head.trained
        self.add(ACTIVATIONS, -self.kept.operations["head"])
        self.add(LOGITS, self.head_stream)          # both gradients
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
        """Logits become their gradient in place."""
        compute = self.s.compute_bytes
        # a GPU adds a head's product to the float32 sum as it makes it
        apart = self.s.kind == "cpu" or self.head_low is not None
        narrow = compute if compute < FP32 and apart else 0
        logits, part = tokens * self.s.model.V, tokens * self.s.model.D
        if self.whole_head:
            logits /= self.tensor
        # the head's input in the product's dtype; its gradient, or the weight's before it is added
        cast = part * compute if self.s.mixed else 0.0
        more = max(part * compute, self.table * narrow)
        if self.widened:    # the logits' gradient once more, and both of its products, in float32
            cast, more = part * self.widened, (logits + part + self.table) * self.widened
        if self.whole_head:     # the softmax, beside the logits in float32 if they have 16 bits
            more = max(more, logits * FP32 * (1 + (compute < FP32)))
        self.mark(self.head_stream + cast + logits * compute + more)

    def embeddings(self) -> None:
        """Dense gradients; a tied one meets that of the head, and a third holds their sum."""
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
        self.mark(2 * table if tied else table)
        if self.at_once and table:
            waiting = self.waiting_table if tied else 0.0       # is in the sum
            self.mark(table + self.updating(self.ops.embed, self.table) - waiting)

    def block(self, block: Block, recompute: bool) -> list[Change]:
        """Enters with the gradient of the residual stream in TEMPORARIES, and leaves with it."""
        steps: list[Change] = []
        unused, low, saved, fetched = 0.0, block.low, block.saved, self.fetched
        self.row = AGAIN if recompute else ACTIVATIONS
        if recompute:
            saved, fetched = block.again, 0.0
            # Its input is there already, and so is what it kept: of that, the last result is never
            # fetched.
            final = self.ops.linears[-1]
            if self.kept.again_bytes > self.stream and not low:
                unused = final.result_bytes / self.stream_cut
            at_work = self.whole_input(final)
            if low:     # beside the gradient that the last addition has cast for it
                cast = sum(hold.grows for hold in self.ops.block[-1].backward) / self.stream_cut
                at_work = max(at_work, self.forward_most(saved, low) + cast)
            steps = [(NO_MOMENT, ACTIVATIONS, self.stream + unused - self.kept.again_bytes),
                     (NO_MOMENT, AGAIN, sum(saved.values()) - self.stream),
                     (NO_MOMENT, COPIES, block.copied_bytes), (NO_MOMENT, LOW, block.low_bytes),
                     (at_work, TEMPORARIES, 0.0)]
        steps.append((NO_MOMENT, TEMPORARIES, fetched))
        for op in reversed(self.ops.block):
            steps += self.fold(op, saved.get(op.name, 0.0), low)
        steps.append((NO_MOMENT, TEMPORARIES, -fetched))
        if not self.gathers or self.leave:
            steps.append((NO_MOMENT, GRADIENTS, self.small_gradient_bytes))
        if self.leave:      # all of them are there, then they leave
            whole = self.block_numbers * self.gradient_bytes
            steps.append((0.0, GRADIENTS, self.block_gradient_bytes - whole))
        if recompute:
            steps += ((NO_MOMENT, ACTIVATIONS, -self.stream - unused),
                      (NO_MOMENT, AGAIN, self.stream))
        return steps

    def fold(self, op: Op, saved_bytes: float, low: Low | None = None) -> list[Change]:
        """One operation's backward: it frees the `saved_bytes` of its own."""
        if op.matmul:
            return self.linear(op, saved_bytes, low)
        steps: list[Change] = []
        cut = self.stream_cut if op.in_stream else self.cut
        for hold in op.backward:
            steps.append((hold.nbytes / cut, self.row, -hold.frees * saved_bytes))
            if hold.grows:
                steps.append((NO_MOMENT, TEMPORARIES, hold.grows / cut))
        return steps

    def numbers(self, op: Op) -> tuple[float, float, float]:
        """Returns element counts of a Linear's input, output and weight. The stream's side is a
        part of the sequence, the other a part of the width."""
        K, N = op.matmul
        x, y = self.tokens * op.tokens_share, self.stream_tokens * op.tokens_share
        if op.cut == "column":
            x, y = y, x
        return x * K, y * N, op.weights / self.tensor

    def cast(self, op: Op) -> tuple[float, float, float]:
        """Returns `numbers` of what is cast: padded to tiles."""
        if op.name not in self.padded:
            return self.numbers(op)
        M, K, N = self.padded[op.name]
        column = op.cut == "column"
        return (M * K / (self.gathering if column else 1),
                M * N / (1 if column else self.gathering), K * N)

    def low_bytes(self, op: Op, low: Low) -> float:
        """Returns the bytes of the cast of its weight that is kept for backward."""
        if self.gathers_casts and (op is not self.ops.head or not self.s.model.tied):
            return 0.0
        return self.cast(op)[2] * low.number_bytes

    def forward(self, op: Op, low: Low) -> float:
        """Bytes at work while a Linear's forward runs, padded copies of its operands among them."""
        x, y, weight = self.cast(op)
        copies = 0.0
        if op.name in self.padded:
            wide = self.s.residual_bytes if op.reads_residual else self.s.compute_bytes
            copies = x * wide + weight * self.s.residual_bytes
        column = op.cut == "column"
        x, y = x * (self.gathering if column else 1), y * (1 if column else self.gathering)
        return low.forward_bytes(x, y, weight) + copies

    def forward_most(self, saved: Mapping[str, float], low: Low) -> float:
        """Bytes at work beyond what a block has `saved` in the end: while its last Linear's forward
        runs, or where tensor ranks gather, any Linear's, whose stream's side is whole then."""
        most, later = self.forward(self.ops.linears[-1], low), 0.0
        for op in reversed(self.ops.block if self.gathering > 1 else ()):
            if op.matmul:
                x, y, _ = self.cast(op)
                whole = x * self.s.residual_bytes if op.cut == "column" else y * self.s.compute_bytes
                most = max(most, self.forward(op, low) + self.gathering * whole - later)
            later += saved.get(op.name, 0.0)
        return most

    def whole_input(self, op: Op) -> float:
        """Bytes of what a Linear meets of the stream's side, gathered from all tensor ranks: its
        input, or its output before the ranks add up their parts (Korthikanti et al. 2022, section
        4.2). Nothing where it is whole."""
        if self.gathering == 1:
            return 0.0
        x, y, _ = self.numbers(op)
        return self.gathering * (x if op.cut == "column" else y) * self.s.compute_bytes

    def linear(self, op: Op, saved_bytes: float, low: Low | None) -> list[Change]:
        """A product's two gradients. That of its output is freed after it, with the saved input and
        the weight's copy, unless the residual stream needs it still; the input's gradient stays in
        TEMPORARIES."""
        s, (x, y, weight) = self.s, self.numbers(op)
        dx, dw, dy = x * s.compute_bytes, weight * s.compute_bytes * op.trained, y * s.compute_bytes
        final, wide = weight * self.gradient_bytes * op.trained, dx     # and shared ones add up
        if s.mixed and op.reads_residual:
            wide = x * s.residual_bytes
        if op.shares == "output" or (op.writes_residual and not s.mixed):
            dy = 0.0
        # gathered once more: the input, beside its own gradient as the ranks have it in parts; or
        # the gradient of the output
        whole = 0.0
        if self.gathering > 1:
            again = (op.cut == "column" and not self.step.stack.keeps_gathered
                     and not (op is self.ops.head and self.whole_head))
            whole = self.whole_input(op) * (1 + again)
        gathers = self.gathers and not self.leave
        after = final if gathers and not s.mixed else NO_MOMENT
        if low is not None:     # one autograd.Function: nothing is freed before its end
            work = self.low_linear(op, low, whole, wide, dy)
            copied, copies = LOW, self.low_bytes(op, low)
        else:
            # in float32 the gradient of the output is there once more
            work = self.widened * (x + y + weight) - dy if self.widened else whole + dx + dw
            if op.stored_bytes:
                work = whole + max(op.made_bytes / self.tensor, weight * s.compute_bytes + dx)
            copied = COPIES
            copies = self.copies(weight * op.own) if s.mixed and not op.stored_bytes else 0.0
            if s.mixed:
                after = dw + max(final, wide if op.reads_residual else 0) + wide - dx
        # a head that waits for its embedding is updated with it
        if self.at_once and op.trained and not (op is self.ops.head and self.waiting_table):
            after = max(after, final + self.updating(op, weight))
        steps = [(work, TEMPORARIES, dx - dy), (NO_MOMENT, self.row, -saved_bytes),
                 (NO_MOMENT, copied, -copies), (after, TEMPORARIES, wide - dx)]
        if op.shares == "input":
            steps.append((NO_MOMENT, TEMPORARIES, -wide))
        if not gathers and not (self.leave and op is self.ops.head):
            steps.append((NO_MOMENT, GRADIENTS, final * op.own))
        return steps

    def low_linear(self, op: Op, low: Low, whole: float, wide: float, dy: float) -> float:
        """The work of a Linear that is cast. Padded, its gradients are there once more, cut to
        size: that of its output before, the others after."""
        s, (x, y, weight) = self.s, self.cast(op)
        compute, real = s.compute_bytes, self.numbers(op)
        dx, dw = x * wide / real[0], weight * compute
        final = weight * self.s.residual_bytes if s.mixed else 0.0
        work = whole + low.work_bytes(x, y, weight, dx=dx, dw=dw, final=final)
        if op.name not in self.padded:
            return work
        cut = dx + max(final, dw) + real[2] * self.s.residual_bytes + wide - dy
        return max(y * compute, cut, work + y * compute - dy)
