"""The bytes of one micro-batch, operation after operation, from the end of its forward pass to the
last gradient.

Autograd frees what an operation kept as soon as its backward is done, while gradients appear: what
is live rises and falls with every operation. Each operation of `techniques.blocks` says what its
backward holds; here they are folded in reverse. Blocks are alike, so what is live is a straight
line from one to the next, and its peak lies in the last block or in the first: these two are
walked, those between are added at once. tests/test_predict.py holds the walk against a measured
step. Bytes; the order is that of PyTorch's autograd engine for `lpkit.nn.transformer`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lpkit.predict.activations import Kept
from lpkit.predict.recipes import Low
from lpkit.techniques.blocks import FP32, TOKEN_ID, MicroBatch, Op, Operations

LOSS, HEAD = "backward begins", "head and last norm"
LAST, FIRST = "the last block", "the first block"
EMBED, UPDATE = "embeddings", "optimizer works"
ACTIVATIONS, COPIES = "activations", "weight copies"
GRADIENTS, TEMPORARIES = "gradients", "temporaries"
AGAIN, LOGITS, LOW = "recomputed block", "logits and loss", "low-precision weights"


class Account:
    """What is live, by row; and for each moment the most that was."""

    def __init__(self):
        rows = (ACTIVATIONS, COPIES, GRADIENTS, TEMPORARIES, AGAIN, LOGITS, LOW)
        self.now = dict.fromkeys(rows, 0.0)
        self.most: dict[str, tuple[float, dict[str, float]]] = {}
        self.total = 0.0

    def add(self, row: str, nbytes: float) -> None:
        self.now[row] += nbytes
        self.total += nbytes

    def mark(self, moment: str, more: float = 0) -> None:
        """Something of `more` bytes is there for a moment too."""
        total = self.total + more
        if moment not in self.most or total > self.most[moment][0]:
            rows = dict(self.now)
            rows[TEMPORARIES] += more
            self.most[moment] = total, rows


@dataclass(frozen=True, kw_only=True)
class Share:
    """What of the micro-batch and of the model one device has, and how it treats it."""

    micro_batch: MicroBatch
    ops: Operations         # of the whole of it
    cut: int                # devices over which each activation is cut,
    tensor: int             # and each weight
    layers: int
    gradient_bytes: float   # of a number of a weight's gradient
    gathers: bool           # gradients add to nothing here: they were there, or leave at once
    sharded: bool           # gradients leave to their shards, those outside the blocks at the end
    embeds: bool            # the device has the embeddings,
    heads: bool             # the head and the loss
    low: Low | None         # how the Linears of the blocks are cast,
    last_is_kept: bool      # but for those of the last
    native: bool            # by hardware: in as many bits as the format has
    packed: float = 0.0     # at work while forward puts a tensor into low precision
    fetched: float = 0.0    # what comes back from elsewhere, or from low precision, at a time

    @cached_property
    def tokens(self) -> float:
        return self.micro_batch.tokens / self.cut

    @cached_property
    def stream(self) -> float:
        """Bytes of the residual stream, and of its gradient."""
        return self.tokens * self.micro_batch.model.D * self.micro_batch.residual_bytes

    @property
    def table(self) -> float:
        """Numbers of the embedding, and of the head."""
        return self.ops.head.weights / self.tensor

    @property
    def waiting_table(self) -> float:
        """Bytes of the head's gradient where it waits for that of the same table in the
        embedding."""
        tied = self.micro_batch.model.tied and self.embeds
        return self.gradient_bytes * self.table if tied else 0.0

    def copies(self, weights: float) -> float:
        """Bytes of the copy that autocast keeps of weights."""
        mixed = self.micro_batch.mixed
        return weights * self.micro_batch.compute_bytes if mixed else 0.0


def walk(z: Share, kept: Kept, *, again: range, chunk: int = 0) -> Account:
    """The account of a micro-batch. Blocks with a number in `again` run once more before their
    backward; the loss is computed from `chunk` tokens at a time, 0: all."""
    live = Account()
    plain = _Backward(live, z, None, kept.last)
    inner = _Backward(live, z, z.low, kept.block) if z.low else plain
    last = plain if z.last_is_kept else inner
    last_again = z.layers - 1 in again
    # token ids and targets have a row of their own
    live.add(ACTIVATIONS, kept.total_bytes - kept.loss_bytes - kept.operations["embed"])
    others = z.layers - 1 - len(again) + last_again
    for block, number in ((last, 0 if last_again else 1), (inner, others)):
        live.add(COPIES, number * block.copied_bytes)
        live.add(LOW, number * block.low_bytes)
    live.mark(LOSS, z.packed)
    cached = len(again) * inner.copied_bytes    # autocast keeps them to the end of forward
    if not z.heads:
        live.add(TEMPORARIES, z.stream)             # from the next stage
        live.mark(LOSS)
    elif chunk:
        _chunked_loss(live, z, chunk, cached, kept.operations["head"])
        plain.fold(HEAD, z.ops.norm, kept.operations["norm"])
    else:
        _loss(live, z, cached, kept.loss_bytes)
        plain.fold(HEAD, z.ops.head, kept.operations["head"])
        if z.sharded:
            live.add(TEMPORARIES, z.table * z.micro_batch.compute_bytes)
        elif z.gathers:
            live.add(TEMPORARIES, z.waiting_table)
        plain.fold(HEAD, z.ops.norm, kept.operations["norm"])
    last.block(LAST, kept, recompute=last_again)
    done = 1
    if z.layers > 2 and (z.layers - 2 in again) != last_again:
        inner.block(LAST, kept, recompute=z.layers - 2 in again)
        done = 2
    if z.layers > done:
        between = z.layers - done - 1
        run = len(range(again.step, z.layers - done, again.step)) if again else 0
        live.add(ACTIVATIONS, -run * kept.again_bytes - (between - run) * kept.block_bytes)
        live.add(COPIES, -(between - run) * inner.copied_bytes)
        live.add(LOW, -(between - run) * inner.low_bytes)
        live.add(GRADIENTS, 0 if z.gathers else between * inner.gradient_bytes)
        inner.block(FIRST, kept, recompute=0 in again)
    if z.embeds:
        _embeddings(live, z)
    return live


def _loss(live: Account, z: Share, cached: float, loss_bytes: float) -> None:
    """Leaves with the gradient of the logits."""
    s = z.micro_batch
    logits = z.tokens * s.model.V
    copies = z.copies(z.table)
    live.mark(LOSS, cached + copies + logits * s.compute_bytes)
    live.add(COPIES, copies)
    live.add(LOGITS, loss_bytes - TOKEN_ID * z.tokens)
    live.mark(LOSS, 2 * FP32 * logits)              # of the log-probabilities, and of the logits
    live.add(LOGITS, TOKEN_ID * z.tokens - loss_bytes)
    live.add(TEMPORARIES, logits * s.compute_bytes)
    live.mark(HEAD, logits * FP32 if s.mixed else 0)


def _chunked_loss(live: Account, z: Share, chunk: int, cached: float, head_bytes: float) -> None:
    """Gradients of the hidden states and of the head are made in the forward pass, while a chunk's
    logits are there. Leaves with the first."""
    s, table = z.micro_batch, z.table
    chunks = -(-z.tokens // chunk)
    logits = min(chunk, z.tokens) * s.model.V
    narrow = s.compute_bytes if s.mixed else 0
    live.add(ACTIVATIONS, -head_bytes)
    live.add(LOGITS, z.stream)                      # both gradients
    live.add(GRADIENTS, FP32 * table)
    live.mark(LOSS, z.stream + cached + z.copies(table) + max(
        logits * (2 * FP32 + narrow) - (FP32 * table if chunks == 1 else 0),
        logits * (FP32 + s.compute_bytes + narrow)
        + table * (narrow + (FP32 if chunks > 1 else 0))))
    live.add(LOGITS, -z.stream)
    live.add(GRADIENTS, -FP32 * table)
    live.add(TEMPORARIES, z.stream)
    if z.gathers:
        live.add(TEMPORARIES, z.waiting_table)
    else:
        live.add(GRADIENTS, z.gradient_bytes * table)


def _embeddings(live: Account, z: Share) -> None:
    """Dense gradients; a tied one meets that of the head, and a third holds their sum."""
    table, positions = z.table * z.gradient_bytes, z.ops.positions.params * z.gradient_bytes
    tied = z.micro_batch.model.tied and z.heads
    if not z.gathers:
        live.add(GRADIENTS, positions)
    live.mark(EMBED, table + positions)
    live.add(TEMPORARIES, -z.stream)
    live.mark(EMBED, 2 * table if tied else table)
    if not z.gathers:
        live.add(GRADIENTS, 0 if tied else table)
    live.now[ACTIVATIONS] = live.now[COPIES] = live.now[TEMPORARIES] = 0.0


class _Backward:
    """The backward of one operation after the other, into a shared account."""

    def __init__(self, live: Account, z: Share, low: Low | None, saved: Mapping[str, float]):
        self.live, self.z, self.low, self.saved, self.row = live, z, low, saved, ACTIVATIONS
        linears = z.ops.linears
        weights = sum(op.weights for op in linears) / z.tensor
        self.copied_bytes = 0.0 if low else z.copies(weights)
        self.low_bytes = weights * low.held_bytes(z.native) if low else 0.0
        small = 0.0
        for op in z.ops.block:
            small += (op.params - op.weights) / (z.tensor if op.cut == "column" else 1)
        self.small_gradient_bytes = small * z.gradient_bytes        # of gains and biases
        self.gradient_bytes = weights * z.gradient_bytes + self.small_gradient_bytes

    def block(self, moment: str, kept: Kept, *, recompute: bool) -> None:
        """Enters with the gradient of the residual stream in TEMPORARIES, and leaves with it."""
        z, live, unused = self.z, self.live, 0.0
        self.row = AGAIN if recompute else ACTIVATIONS
        if recompute:
            # Its input is there already, and so is what it kept: of that, the last result is never
            # fetched.
            final = z.ops.linears[-1]
            if kept.again_bytes > z.stream and not self.low:
                unused = final.result_bytes / z.cut
            live.add(ACTIVATIONS, z.stream + unused - kept.again_bytes)
            live.add(AGAIN, sum(self.saved.values()) - z.stream)
            live.add(COPIES, self.copied_bytes)
            live.add(LOW, self.low_bytes)
            emulated = self.low and not z.native
            live.mark(moment, self.low.forward_bytes(*self.numbers(final)) if emulated else 0)
        live.add(TEMPORARIES, z.fetched)
        for op in reversed(z.ops.block):
            self.fold(moment, op, self.saved.get(op.name, 0.0))
        live.add(TEMPORARIES, -z.fetched)
        if not z.gathers:
            live.add(GRADIENTS, self.small_gradient_bytes)
        if recompute:
            live.add(ACTIVATIONS, -z.stream - unused)
            live.add(AGAIN, z.stream)

    def fold(self, moment: str, op: Op, saved_bytes: float) -> None:
        """One operation's backward: it frees the `saved_bytes` of its own."""
        live, cut = self.live, self.z.cut
        if op.matmul:
            self.linear(moment, op, saved_bytes)
        for hold in op.backward:
            live.mark(moment, hold.nbytes / cut)
            live.add(self.row, -hold.frees * saved_bytes)
            live.add(TEMPORARIES, hold.grows / cut)

    def numbers(self, op: Op) -> tuple[float, float, float]:
        """Of a Linear's input, of its output and of its weight."""
        K, N = op.matmul
        return self.z.tokens * K, self.z.tokens * N, op.weights / self.z.tensor

    def linear(self, moment: str, op: Op, saved_bytes: float) -> None:
        """A product's two gradients. That of its output is freed after it, with the saved input and
        the weight's copy, unless the residual stream needs it still; the input's gradient stays in
        TEMPORARIES."""
        z, live, low, s = self.z, self.live, self.low, self.z.micro_batch
        x, y, weight = self.numbers(op)
        dx, dw, dy = x * s.compute_bytes, weight * s.compute_bytes, y * s.compute_bytes
        final = weight * z.gradient_bytes
        wide = x * s.residual_bytes if op.reads_residual and s.mixed else dx
        if op.writes_residual and not s.mixed:
            dy = 0.0
        if low is None:
            live.mark(moment, dx + dw)
        else:       # one autograd.Function: nothing is freed before its end
            live.mark(moment, low.work_bytes(x, y, weight, z.native, dx=wide, dw=dw,
                                             final=final if s.mixed else 0))
        live.add(TEMPORARIES, dx - dy)
        live.add(self.row, -saved_bytes)
        if low is None:
            live.add(COPIES, -z.copies(weight))
        else:
            live.add(LOW, -weight * low.held_bytes(z.native))
        if s.mixed:
            if low is None:
                live.mark(moment, dw + max(final, wide if op.reads_residual else 0) + wide - dx)
            live.add(TEMPORARIES, wide - dx)
        if not z.gathers:
            live.add(GRADIENTS, final)
        elif not s.mixed:
            live.mark(moment, final)
