"""The bytes of one micro-batch, operation after operation, from the end of its forward pass to the
last gradient.

Autograd frees what an operation kept as soon as its backward is done, while gradients appear: what
is live rises and falls with every operation. Each operation of `techniques.blocks` says what its
backward holds; here they are folded in reverse. Blocks are alike, so what is live is a straight
line from one to the next, and its peak lies in the last block or in the first: these two are
walked, those between are added at once. Where the last is not as those before it (it stays in 16
bits, or does not run again), the one before it is walked as well. tests/test_predict.py holds the
walk against a measured step. Bytes; the order is that of PyTorch's autograd engine for
`lpkit.nn.transformer`.
"""

import math
from collections.abc import Mapping

from lpkit.predict.activations import Kept
from lpkit.predict.recipes import Low
from lpkit.techniques.blocks import Operations
from lpkit.techniques.operation import FP32, TOKEN_ID, MicroBatch, Op

LOSS, HEAD = "backward begins", "head and last norm"
LAST, FIRST = "the last block", "the first block"
EMBED, UPDATE = "embeddings", "optimizer works"
ACTIVATIONS, COPIES = "activations", "weight copies"
GRADIENTS, TEMPORARIES = "gradients", "temporaries"
AGAIN, LOGITS, LOW = "recomputed block", "logits and loss", "low-precision weights"
MESSAGES = "communication buffers"
# what is there for a moment too; then a row, and what it grows by
Step = tuple[float, str, float]
NO_MOMENT = -math.inf


class Block:
    """What each operation of a block saved, and how its Linears are cast."""

    def __init__(self, walk: "Walk", saved: Mapping[str, float], low: Low | None):
        self.saved, self.low = saved, low
        self.copied_bytes = 0.0 if low else walk.copies(walk.linear_weights)
        self.low_bytes = 0.0
        if low:
            self.low_bytes = sum([walk.low_bytes(op, low) for op in walk.ops.linears])


class Walk:
    """What is live, by row, as a micro-batch goes backward on one device; and `most`: for each
    moment the rows of the most that was.

    cut, tensor     devices over which a tensor inside attention and MLP is cut, and each weight
    stream_cut      devices over which the residual stream is: `cut`, with sequence parallelism
    gradient_bytes  of a number of a weight's gradient
    gathers         gradients add to nothing here: they were there, or leave at once
    sharded         gradients leave to their shards, those outside the blocks at the end
    reduced_bytes   then of a number of a block's gradients, which leave when its backward is done
                    and are on their way while the next one is at work; 0: all leave at the end
    ahead_bytes     of a number of the next block's weights, on their way meanwhile
    whole_bytes     of a number of whole weights, which a block then has until its backward is done
    shard_bytes     of a number of a weight's gradient, once it has left
    embeds, heads   the device has the embeddings; the head and the loss
    low             how Linears are cast; `plain`: but for those of the first, the last, the head
    gathers_casts   weights come from other ranks as their casts, for forward and once more for
                    backward, and none is kept between them but of a table that the embedding shares
    again           numbers of the blocks that run once more before their backward
    chunk           tokens from which the loss is computed at a time; 0: all
    packed          at work while forward puts a tensor into low precision
    fetched         what comes back from elsewhere, or from low precision, at a time
    update_bytes    of a number of a weight, while backward updates it; 0: it does not
    widened         bytes of a Linear's operands that are rounded to 16 bits and multiplied in 32;
                    0: they are multiplied as they are
    padded          tokens, inputs and outputs of Linears that are padded to tiles, by name
    """

    def __init__(self, s: MicroBatch, ops: Operations, kept: Kept, *, cut: int, tensor: int,
                 layers: int, gradient_bytes: float, gathers: bool, sharded: bool, embeds: bool,
                 heads: bool, low: Low | None, plain: frozenset[str], again: range, chunk: int,
                 packed: float, fetched: float, stream_cut: int, update_bytes: float,
                 widened: float, padded: Mapping[str, tuple[int, int, int]],
                 shard_bytes: float, ahead_bytes: float, reduced_bytes: float,
                 whole_bytes: float, gathers_casts: bool):
        rows = (ACTIVATIONS, COPIES, GRADIENTS, TEMPORARIES, AGAIN, LOGITS, LOW, MESSAGES)
        self.now, self.total = dict.fromkeys(rows, 0.0), 0.0
        self.most: dict[str, dict[str, float]] = {}
        self.steps: dict[tuple[int, bool], list[Step]] = {}
        self.s, self.kept, self.ops = s, kept, ops
        self.cut, self.tensor, self.layers = cut, tensor, layers
        self.gradient_bytes, self.gathers, self.sharded = gradient_bytes, gathers, sharded
        self.ahead_bytes, self.whole_bytes = ahead_bytes, whole_bytes
        self.reduced_bytes, self.leave = reduced_bytes, reduced_bytes > 0
        self.gathers_casts = gathers_casts
        self.embeds, self.heads = embeds, heads
        self.again, self.chunk, self.fetched = again, chunk, fetched
        self.stream_cut, self.update_bytes, self.widened = stream_cut, update_bytes, widened
        self.padded = padded
        self.row = ACTIVATIONS      # of what the operations at hand saved
        self.tokens, self.stream_tokens = s.tokens / cut, s.tokens / stream_cut
        self.stream = self.stream_tokens * s.model.D * s.residual_bytes     # and its gradient
        # tensor ranks that gather what they hold a part of; 1: nothing is gathered
        self.gathered = tensor if stream_cut == cut else 1
        self.weight_bytes = s.residual_bytes    # of a weight, and of its gradient as it is made
        self.table = self.ops.head.weights / tensor     # numbers of the embedding, and of the head
        # the head's gradient waits for that of the same table in the embedding
        self.waiting_table = gradient_bytes * self.table if s.model.tied and embeds else 0.0
        self.waiting_table *= ops.head.trained
        self.linear_weights = ops.linear_weights / tensor
        with_columns, others = ops.small
        small = with_columns / tensor + others
        self.small_gradient_bytes = small * gradient_bytes
        self.block_numbers = ops.trained_weights / tensor + small       # that have gradients
        # how gradients grow by a block
        self.block_gradient_bytes = 0.0 if gathers else self.block_numbers * (
            shard_bytes if self.leave else gradient_bytes)
        as_it_is = Block(self, kept.plain, None)
        self.inner = Block(self, kept.block, low) if low else as_it_is
        self.first = as_it_is if "first" in plain else self.inner
        self.last = as_it_is if "last" in plain else self.inner
        self.head_low = None if "head" in plain else low
        self.walk(packed)

    def begin(self, moment: str) -> None:
        self.moment, self.highest = moment, -1.0

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

    def follow(self, steps: list[Step]) -> None:
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

    def walk(self, packed: float) -> None:
        kept, last_again, first_again = self.kept, self.layers - 1 in self.again, 0 in self.again
        # token ids and targets have a row of their own
        self.begin(LOSS)
        self.add(ACTIVATIONS, kept.waiting_bytes)
        others = max(0, self.layers - 2)
        for block, number in ((self.last, not last_again),
                              (self.first, self.layers > 1 and not first_again),
                              (self.inner, others - self.repeats_between(1))):
            if number:
                self.add(COPIES, number * block.copied_bytes)
                self.add(LOW, number * block.low_bytes)
        cached, low, final = self.cached, self.last.low, self.ops.linears[-1]
        after = kept.operations["norm"] + kept.operations["head"]       # what is kept last
        self.add(COPIES, cached)
        self.mark(max(packed, self.forward(final, low) - after if low else 0.0))
        self.add(COPIES, -cached)
        if not self.heads:
            self.add(TEMPORARIES, self.stream)             # from the next stage
            self.mark()
        elif self.chunk:
            self.chunked_loss()
        else:
            self.whole_loss()
        self.begin(LAST)
        self.through(self.layers - 1, self.last)
        done = 1
        inner_again = self.layers - 2 in self.again
        if self.layers > 2 and (inner_again != last_again or self.inner is not self.last
                                or self.leave):
            self.through(self.layers - 2, self.inner)
            done = 2
        if self.layers > done:
            second = self.leave and self.layers > 3
            self.between(self.layers - done - 1, done, second)
            self.begin(FIRST)
            if second:
                self.through(1, self.inner)
            self.through(0, self.first)
        if self.embeds:
            self.embeddings()

    def repeats_between(self, done: int) -> int:
        """Blocks that run again, without the first and the last `done`."""
        if not self.again:
            return 0
        return len(range(self.again.step, self.layers - done, self.again.step))

    def through(self, number: int, block: Block) -> None:
        """One block's backward; blocks that are alike have the same steps."""
        self.travel(number)
        key = id(block), number in self.again
        if key not in self.steps:
            self.steps[key] = self.block(block, number in self.again)
        self.follow(self.steps[key])

    def travel(self, number: int) -> None:
        """What is on its way while this block is at work."""
        reduced = self.reduced_bytes * (number < self.layers - 1)
        if 0 < number == self.layers - 2:
            reduced -= self.whole_bytes
        self.add(MESSAGES, (self.ahead_bytes * (number > 0) + reduced) * self.block_numbers
                 - self.now[MESSAGES])

    def between(self, count: int, done: int, second: bool) -> None:
        """The blocks from the first to the last, without these two; without the `second`, too."""
        run = self.repeats_between(done) - (second and 1 in self.again)
        count -= second
        self.add(ACTIVATIONS, -run * self.kept.again_bytes - (count - run) * self.kept.block_bytes)
        self.add(COPIES, -(count - run) * self.inner.copied_bytes)
        self.add(LOW, -(count - run) * self.inner.low_bytes)
        self.add(GRADIENTS, count * self.block_gradient_bytes)

    def copies(self, weights: float) -> float:
        """Bytes of the copy of weights in the dtype of their product."""
        if self.widened:
            return weights * self.widened
        return weights * self.s.compute_bytes if self.s.mixed else 0.0

    @property
    def cached(self) -> float:
        """Of blocks that run again: autocast keeps the copies to the end of forward."""
        if self.widened or not self.again:
            return 0.0
        ends = {self.layers - 1: self.last, 0: self.first} if self.layers > 1 else {0: self.last}
        ends = {number: block for number, block in ends.items() if number in self.again}
        return ((len(self.again) - len(ends)) * self.inner.copied_bytes
                + sum([block.copied_bytes for block in ends.values()]))

    def whole_loss(self) -> None:
        """Leaves with the gradient of the head's input."""
        logits, compute, head = self.tokens * self.s.model.V, self.s.compute_bytes, self.ops.head
        low, copies, cached = self.head_low, self.copies(self.table), self.cached
        loss = self.kept.operations["loss"] - TOKEN_ID * self.tokens
        if low:
            copies = 0.0
            self.add(LOW, self.low_bytes(head, low))
        self.add(COPIES, copies + cached)
        self.mark(logits * (compute + self.widened) + self.whole_input(head))
        self.add(COPIES, -cached)
        if self.tensor > 1:     # torch.distributed.tensor.parallel.loss: the probabilities, too
            loss += FP32 * logits
        self.add(LOGITS, loss)
        self.mark(2 * FP32 * logits)                # of the log-probabilities, and of the logits
        self.add(LOGITS, -loss)
        self.add(TEMPORARIES, logits * compute)
        self.begin(HEAD)
        self.mark(logits * FP32 if compute < FP32 else 0)
        self.follow(self.fold(head, self.kept.operations["head"], low))
        if self.sharded:
            self.add(TEMPORARIES, self.table * (self.gradient_bytes if self.leave else compute))
        elif self.gathers:
            self.add(TEMPORARIES, self.waiting_table)
        self.follow(self.fold(self.ops.norm, self.kept.operations["norm"]))

    def chunked_loss(self) -> None:
        """Gradients of the hidden states and of the head are made in the forward pass, while a
        chunk's logits are there. Leaves with the first."""
        copies, cached = self.copies(self.table), self.cached
        table = FP32 * self.table * self.ops.head.trained
        self.add(ACTIVATIONS, -self.kept.operations["head"])
        self.add(LOGITS, self.stream)               # both gradients
        self.add(GRADIENTS, table)
        self.add(COPIES, copies + cached)
        self.chunk_of_loss(min(self.chunk, self.tokens))
        self.add(COPIES, -copies - cached)
        self.add(LOGITS, -self.stream)
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
        # the head's input in the product's dtype; its gradient, or the weight's before it is added
        cast = part * compute if self.s.mixed else 0.0
        more = max(part * compute, self.table * narrow)
        if self.widened:    # the logits' gradient once more, and both of its products, in float32
            cast, more = part * self.widened, (logits + part + self.table) * self.widened
        self.mark(self.stream + cast + logits * compute + more)

    def embeddings(self) -> None:
        """Dense gradients; a tied one meets that of the head, and a third holds their sum."""
        table = self.table * self.gradient_bytes * self.ops.embed.trained
        positions = self.ops.positions.params * self.gradient_bytes * self.ops.positions.trained
        tied = self.s.model.tied and self.heads
        self.begin(EMBED)
        if not self.gathers and not self.leave:
            self.add(GRADIENTS, positions)
        self.mark(table + positions)
        self.add(TEMPORARIES, -self.stream)
        self.mark(2 * table if tied else table)
        if self.update_bytes and table:
            waiting = self.waiting_table if tied else 0.0       # is in the sum
            self.mark(table + self.table * self.update_bytes - waiting)

    def block(self, block: Block, recompute: bool) -> list[Step]:
        """Enters with the gradient of the residual stream in TEMPORARIES, and leaves with it."""
        steps: list[Step] = []
        unused, low = 0.0, block.low
        self.row = AGAIN if recompute else ACTIVATIONS
        if recompute:
            # Its input is there already, and so is what it kept: of that, the last result is never
            # fetched.
            final = self.ops.linears[-1]
            if self.kept.again_bytes > self.stream and not low:
                unused = final.result_bytes / self.stream_cut
            at_work = self.whole_input(final)
            if low:     # beside the gradient that the last addition has cast for it
                cast = sum(hold.grows for hold in self.ops.block[-1].backward) / self.stream_cut
                at_work = max(at_work, self.forward(final, low) + cast)
            steps = [(NO_MOMENT, ACTIVATIONS, self.stream + unused - self.kept.again_bytes),
                     (NO_MOMENT, AGAIN, sum(block.saved.values()) - self.stream),
                     (NO_MOMENT, COPIES, block.copied_bytes), (NO_MOMENT, LOW, block.low_bytes),
                     (at_work, TEMPORARIES, 0.0)]
        steps.append((NO_MOMENT, TEMPORARIES, self.fetched))
        for op in reversed(self.ops.block):
            steps += self.fold(op, block.saved.get(op.name, 0.0), low)
        steps.append((NO_MOMENT, TEMPORARIES, -self.fetched))
        if not self.gathers or self.leave:
            steps.append((NO_MOMENT, GRADIENTS, self.small_gradient_bytes))
        if self.leave:      # all of them are there, then they leave
            whole = self.block_numbers * self.gradient_bytes
            steps.append((0.0, GRADIENTS, self.block_gradient_bytes - whole))
        if recompute:
            steps += ((NO_MOMENT, ACTIVATIONS, -self.stream - unused),
                      (NO_MOMENT, AGAIN, self.stream))
        return steps

    def fold(self, op: Op, saved_bytes: float, low: Low | None = None) -> list[Step]:
        """One operation's backward: it frees the `saved_bytes` of its own."""
        if op.matmul:
            return self.linear(op, saved_bytes, low)
        steps: list[Step] = []
        cut = self.stream_cut if op.in_stream else self.cut
        for hold in op.backward:
            steps.append((hold.nbytes / cut, self.row, -hold.frees * saved_bytes))
            if hold.grows:
                steps.append((NO_MOMENT, TEMPORARIES, hold.grows / cut))
        return steps

    def numbers(self, op: Op) -> tuple[float, float, float]:
        """Of a Linear's input, of its output and of its weight. The stream's side is a part of the
        sequence, the other a part of the width."""
        K, N = op.matmul
        x, y = self.tokens * op.tokens_share, self.stream_tokens * op.tokens_share
        if op.cut == "column":
            x, y = y, x
        return x * K, y * N, op.weights / self.tensor

    def cast(self, op: Op) -> tuple[float, float, float]:
        """As `numbers`, of what is cast: padded to tiles."""
        if op.name not in self.padded:
            return self.numbers(op)
        M, K, N = self.padded[op.name]
        return M * K, M * N, K * N

    def low_bytes(self, op: Op, low: Low) -> float:
        """Of the cast of its weight that is kept for backward."""
        if self.gathers_casts and (op is not self.ops.head or not self.s.model.tied):
            return 0.0
        return self.cast(op)[2] * low.number_bytes

    def forward(self, op: Op, low: Low) -> float:
        """Bytes at work while a Linear's forward runs, padded copies of its operands among them."""
        x, y, weight = self.cast(op)
        copies = 0.0
        if op.name in self.padded:
            wide = self.s.residual_bytes if op.reads_residual else self.s.compute_bytes
            copies = x * wide + weight * self.weight_bytes
        return low.forward_bytes(x, y, weight) + copies

    def whole_input(self, op: Op) -> float:
        """Bytes of what a Linear meets of the stream's side, gathered from all tensor ranks: its
        input, or its output before the ranks add up their parts (Korthikanti et al. 2022, section
        4.2). Nothing where it is whole."""
        if self.gathered == 1:
            return 0.0
        x, y, _ = self.numbers(op)
        return self.gathered * (x if op.cut == "column" else y) * self.s.compute_bytes

    def linear(self, op: Op, saved_bytes: float, low: Low | None) -> list[Step]:
        """A product's two gradients. That of its output is freed after it, with the saved input and
        the weight's copy, unless the residual stream needs it still; the input's gradient stays in
        TEMPORARIES."""
        s, (x, y, weight) = self.s, self.numbers(op)
        dx, dw, dy = x * s.compute_bytes, weight * s.compute_bytes * op.trained, y * s.compute_bytes
        final, wide = weight * self.gradient_bytes * op.trained, dx
        if s.mixed and op.reads_residual:
            wide = x * s.residual_bytes
        if op.writes_residual and not s.mixed:
            dy = 0.0
        # gathered once more: the input, beside its own gradient as the ranks have it in parts; or
        # the gradient of the output
        whole = 0.0
        if self.gathered > 1:
            whole = self.whole_input(op) * (2 if op.cut == "column" else 1)
        gathers = self.gathers and not self.leave
        after = final if gathers and not s.mixed else NO_MOMENT
        if low is not None:     # one autograd.Function: nothing is freed before its end
            work = self.low_linear(op, low, whole, wide, dy)
            copied, copies = LOW, self.low_bytes(op, low)
        else:
            # in float32 the gradient of the output is there once more
            work = self.widened * (x + y + weight) - dy if self.widened else whole + dx + dw
            copied, copies = COPIES, self.copies(weight) if s.mixed else 0.0
            if s.mixed:
                after = dw + max(final, wide if op.reads_residual else 0) + wide - dx
        # a head that waits for its embedding is updated with it
        if self.update_bytes and op.trained and not (op is self.ops.head and self.waiting_table):
            after = max(after, final + weight * self.update_bytes)
        steps = [(work, TEMPORARIES, dx - dy), (NO_MOMENT, self.row, -saved_bytes),
                 (NO_MOMENT, copied, -copies), (after, TEMPORARIES, wide - dx)]
        if not gathers and not (self.leave and op is self.ops.head):
            steps.append((NO_MOMENT, GRADIENTS, final))
        return steps

    def low_linear(self, op: Op, low: Low, whole: float, wide: float, dy: float) -> float:
        """The work of a Linear that is cast. Padded, its gradients are there once more, cut to
        size: that of its output before, the others after."""
        s, (x, y, weight) = self.s, self.cast(op)
        compute, real = s.compute_bytes, self.numbers(op)
        dx, dw = x * wide / real[0], weight * compute
        final = weight * self.weight_bytes if s.mixed else 0.0
        work = whole + low.work_bytes(x, y, weight, dx=dx, dw=dw, final=final)
        if op.name not in self.padded:
            return work
        cut = dx + max(final, dw) + real[2] * self.weight_bytes + wide - dy
        return max(y * compute, cut, work + y * compute - dy)
