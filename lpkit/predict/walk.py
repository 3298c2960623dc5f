"""The bytes of one micro-batch, operation after operation, from the end of its forward pass to the last gradient.

Autograd frees what an operation kept as soon as its backward is done, while gradients appear: what is live rises and falls
with every operation. Blocks are alike, so what is live is a straight line from one to the next, and its peak lies in
the last block or in the first: these two are walked, those between are added at once. tests/test_predict.py holds the
walk against a measured step. Bytes; the order is that of PyTorch's autograd engine for `lpkit.nn.transformer`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lpkit.config import ModelConfig
from lpkit.predict.activations import FP32, TOKEN_ID, Kept
from lpkit.predict.params import UPS
from lpkit.predict.recipes import Low

LOSS, HEAD, LAST, FIRST = "backward begins", "head and last norm", "the last block", "the first block"
EMBED, UPDATE = "embeddings", "optimizer works"
ACTIVATIONS, COPIES, GRADIENTS, TEMPORARIES = "activations", "weight copies", "gradients", "temporaries"
AGAIN, LOGITS, LOW = "recomputed block", "logits and loss", "low-precision weights"


class Account:
    """What is live, by row; and for each moment the most that was."""

    def __init__(self):
        self.now = dict.fromkeys((ACTIVATIONS, COPIES, GRADIENTS, TEMPORARIES, AGAIN, LOGITS, LOW), 0.0)
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
class Sizes:
    """Of one device: its share of the tokens, and of each matrix."""

    model: ModelConfig
    batch: float            # sequences of a micro-batch
    tokens: float           # of a micro-batch
    shards: int             # over which each matrix is cut
    layers: int
    compute: int            # bytes of a number in the products,
    stream: int             # in the residual stream,
    gradient: int           # of a gradient
    fused_norm: bool
    copied: bool            # autocast keeps a copy of each weight in the dtype of its product
    gathers: bool           # gradients add to nothing here: they were there before, or leave at once
    sharded: bool           # gradients leave to their shards, those outside the blocks at the end
    embeds: bool            # the device has the embeddings,
    heads: bool             # the head and the loss
    low: Low | None         # how the Linears of the blocks are cast,
    last_is_kept: bool      # but for those of the last
    native: bool            # by hardware: in as many bits as the format has
    attention: str
    packed: float = 0.0     # at work while forward puts a tensor into few bits
    fetched: float = 0.0    # what comes back for backward from elsewhere, or from few bits, at a time

    @property
    def mixed(self) -> bool:
        return self.compute < self.stream


def walk(z: Sizes, kept: Kept, *, again: range, chunk: int = 0) -> Account:
    """The account of a micro-batch. Blocks with a number in `again` run once more before their backward; the loss is
    computed from `chunk` tokens at a time, 0: all."""
    m, live = z.model, Account()
    logits = z.tokens * m.V / z.shards
    plain = _Block(live, z, kept, None)
    inner = _Block(live, z, kept, z.low) if z.low else plain
    last, head = plain if z.last_is_kept else inner, plain
    # token ids and targets have a row of their own
    live.add(ACTIVATIONS, kept.total_bytes - kept.loss_bytes - kept.operations["embed"])
    loss_bytes = kept.loss_bytes - TOKEN_ID * z.tokens
    for block, number in ((last, (z.layers - 1 not in again) * 1), (inner, z.layers - 1 - len(again) + (z.layers - 1 in again))):
        live.add(COPIES, number * block.copied_bytes)
        live.add(LOW, number * block.low_bytes)
    live.mark(LOSS, z.packed)
    cached = len(again) * inner.copied_bytes        # autocast keeps them to the end of the forward pass
    if z.heads and chunk:
        _chunked(live, z, head, kept, chunk, cached)
    elif z.heads:
        live.mark(LOSS, cached + head.copies(m.V * m.D / z.shards) + logits * z.compute)
        live.add(COPIES, head.copies(m.V * m.D / z.shards))
        live.add(LOGITS, loss_bytes)
        live.mark(LOSS, 2 * FP32 * logits)          # of the log-probabilities, and of the logits
        live.add(LOGITS, -loss_bytes)
        live.add(TEMPORARIES, logits * z.compute)
        live.mark(HEAD, logits * FP32 if z.mixed else 0)
        head.linear(HEAD, m.D, m.V / z.shards, frees=kept.operations["head"], grad=logits * z.compute, from_stream=True)
        if z.sharded:
            live.add(TEMPORARIES, m.V * m.D / z.shards * z.compute)
        elif z.gathers and m.tied and z.embeds:
            live.add(TEMPORARIES, m.V * m.D / z.shards * z.gradient)        # waits for the embedding's
        head.norm(HEAD, kept.operations["norm"], residual=False)
    else:
        live.add(TEMPORARIES, inner.stream)         # from the next stage
        live.mark(LOSS)
    last.backward(LAST, z.layers - 1 in again)
    done = 1
    if z.layers > 2 and (z.layers - 2 in again) != (z.layers - 1 in again):
        inner.backward(LAST, z.layers - 2 in again)
        done = 2
    if z.layers > done:
        between = range(1, z.layers - done)
        run = len(range(again.step, z.layers - done, again.step)) if again else 0
        live.add(ACTIVATIONS, -run * kept.again_bytes - (len(between) - run) * kept.block_bytes)
        live.add(COPIES, -(len(between) - run) * inner.copied_bytes)
        live.add(LOW, -(len(between) - run) * inner.low_bytes)
        live.add(GRADIENTS, 0 if z.gathers else len(between) * inner.gradient_bytes)
        inner.backward(FIRST, 0 in again)
    if z.embeds:
        _embeddings(live, z)
    return live


def _chunked(live: Account, z: Sizes, head: "_Block", kept: Kept, chunk: int, cached: float) -> None:
    """Gradients of the hidden states and of the head are made in the forward pass, while a piece's logits are there."""
    m = z.model
    table, pieces = m.V * m.D / z.shards, -(-z.tokens // chunk)
    logits = min(chunk, z.tokens) * m.V / z.shards
    hidden = z.tokens * m.D * z.stream
    live.add(ACTIVATIONS, -kept.operations["head"])
    live.add(LOGITS, hidden)                        # both gradients
    live.add(GRADIENTS, FP32 * table)
    narrow = z.compute if z.mixed else 0
    live.mark(LOSS, hidden + cached + head.copies(table) + max(
        logits * (2 * FP32 + narrow) - (FP32 * table if pieces == 1 else 0),
        logits * (FP32 + z.compute + narrow) + table * (narrow + (FP32 if pieces > 1 else 0))))
    live.add(LOGITS, -hidden)
    live.add(GRADIENTS, -FP32 * table)
    live.add(TEMPORARIES, hidden)
    if not z.gathers:
        live.add(GRADIENTS, z.gradient * table)
    elif m.tied and z.embeds:
        live.add(TEMPORARIES, z.gradient * table)
    head.norm(HEAD, kept.operations["norm"], residual=False)


def _embeddings(live: Account, z: Sizes) -> None:
    """Dense gradients; a tied one meets that of the head, and a third holds their sum."""
    m = z.model
    table = m.V * m.D / z.shards * z.gradient
    stream = z.tokens * m.D * z.stream
    positions = {"learned": m.T * m.D * z.gradient, "rope": 0}[m.position]
    if not z.gathers:
        live.add(GRADIENTS, positions)
    live.mark(EMBED, table + positions)
    live.add(TEMPORARIES, -stream)
    live.mark(EMBED, (2 if m.tied and z.heads else 1) * table)
    if not z.gathers:
        live.add(GRADIENTS, 0 if m.tied and z.heads else table)
    live.now[ACTIVATIONS] = live.now[COPIES] = live.now[TEMPORARIES] = 0.0


class _Block:
    """The backward of one block, into a shared account."""

    def __init__(self, live: Account, z: Sizes, kept: Kept, low: Low | None):
        m = z.model
        self.live, self.z, self.low, self.mixed = live, z, low, z.mixed
        self.again_bytes, self.block = kept.again_bytes, kept.block if low is z.low else kept.last
        self.stream = z.tokens * m.D * z.stream                 # the gradient of the residual stream
        self.narrow = z.tokens * m.D * z.compute                # one that a product takes or gives
        self.qkv = (m.H + 2 * m.G) * m.E / z.shards
        self.up = UPS[m.mlp] * m.F / z.shards
        self.weights = (m.D * self.qkv, m.D * m.D / z.shards, m.D * self.up, m.F * m.D / z.shards)
        self.copied_bytes = 0 if low else sum(map(self.copies, self.weights))
        self.low_bytes = sum(map(self.low_copy, self.weights)) if low else 0.0
        biases = (self.qkv + m.D + self.up + m.D) * m.bias
        self.gains = ({"layernorm": 1 + m.bias, "rmsnorm": 1}[m.norm] * 2 * m.D + biases) * z.gradient
        self.gradient_bytes = sum(self.weights) * z.gradient + self.gains
        self.row = ACTIVATIONS

    def copies(self, weight: float) -> float:
        return weight * self.z.compute if self.z.copied else 0.0

    def low_copy(self, weight: float) -> float:
        return weight * self.low.held_bytes(self.z.native)

    def backward(self, moment: str, recompute: bool) -> None:
        """Enters with the gradient of the residual stream in TEMPORARIES, and leaves with it."""
        z, m, live, block = self.z, self.z.model, self.live, self.block
        self.row = AGAIN if recompute else ACTIVATIONS
        if recompute:       # its input is there already, and so is what it kept: of that, the last result is never fetched
            unused = self.narrow if self.again_bytes > self.stream and not self.low else 0
            live.add(ACTIVATIONS, self.stream + unused - self.again_bytes)
            live.add(AGAIN, sum(block.values()) - self.stream)
            live.add(COPIES, self.copied_bytes)
            live.add(LOW, self.low_bytes)
            live.mark(moment, self.low.forward_bytes(z.tokens, m.F / z.shards, m.D) if self.low and not z.native else 0)
        live.add(TEMPORARIES, z.fetched)
        f = z.tokens * m.F / z.shards * z.compute
        self.narrowed()
        self.linear(moment, m.F / z.shards, m.D, frees=block["mlp.down"], grad=self.narrow if self.mixed else 0)
        {"gelu": self.gelu, "swiglu": self.swiglu}[m.mlp](moment, f, block["mlp"])
        up = "mlp.up" if "mlp.up" in block else "mlp.gate_up"
        self.linear(moment, m.D, self.up, frees=block[up], grad=z.tokens * self.up * z.compute, from_stream=True)
        self.norm(moment, block["norm2"])
        self.narrowed()
        self.linear(moment, m.D / z.shards, m.D, frees=block.get("attention.out", 0), grad=self.narrow if self.mixed else 0)
        ATTENTION[z.attention](self, moment)
        grad = z.tokens * self.qkv * z.compute
        live.mark(moment, grad)                     # their parts and the whole
        self.linear(moment, m.D, self.qkv, frees=block["attention.qkv"], grad=grad, from_stream=True)
        self.norm(moment, block["norm1"])
        live.add(TEMPORARIES, -z.fetched)
        if not z.gathers:
            live.add(GRADIENTS, self.gains)
        if recompute:
            live.add(ACTIVATIONS, -self.stream - unused)
            live.add(AGAIN, self.stream)

    def narrowed(self) -> None:
        if self.mixed:
            self.live.add(TEMPORARIES, self.narrow)

    def linear(self, moment: str, K: float, N: float, *, frees: float, grad: float, from_stream: bool = False) -> None:
        """A product's two gradients. `grad` is freed after it, with the input and the weight's copy; the input's gradient
        stays in TEMPORARIES."""
        z, live, weight, cast = self.z, self.live, K * N, self.low
        dx, dw = z.tokens * K * z.compute, weight * z.compute
        wide = z.tokens * K * z.stream if from_stream and self.mixed else dx
        final = weight * z.gradient
        if cast is None:
            live.mark(moment, dx + dw)
        else:       # one autograd.Function: nothing is freed before its end
            live.mark(moment, cast.work_bytes(z.tokens, K, N, z.native, dx=wide, dw=dw, final=final if self.mixed else 0))
        live.add(TEMPORARIES, dx - grad)
        live.add(self.row, -frees)
        if cast is None:
            live.add(COPIES, -self.copies(weight))
        else:
            live.add(LOW, -self.low_copy(weight))
        if self.mixed:
            if cast is None:
                live.mark(moment, dw + max(final, wide if from_stream else 0) + (wide - dx if from_stream else 0))
            live.add(TEMPORARIES, wide - dx)
        if not z.gathers:
            live.add(GRADIENTS, final)
        elif not self.mixed:
            live.mark(moment, final)

    def gelu(self, moment: str, f: float, frees: float) -> None:
        self.live.mark(moment, f)
        self.live.add(self.row, -frees)

    def swiglu(self, moment: str, f: float, frees: float) -> None:
        live = self.live
        live.mark(moment, 2 * f)                    # of silu(gate) and of up
        live.add(self.row, -frees / 3)
        live.add(TEMPORARIES, f)
        live.mark(moment, f)
        live.add(self.row, -frees * 2 / 3)
        live.mark(moment, 2 * f)                    # side by side again

    def norm(self, moment: str, frees: float, *, residual: bool = True) -> None:
        """Takes its output's gradient from TEMPORARIES, leaves its input's, summed with the residual stream's."""
        z, live, S = self.z, self.live, self.stream
        unfused = z.model.norm == "rmsnorm" and not z.fused_norm
        if unfused:                                 # in float32, one operation at a time
            wide = z.tokens * z.model.D * FP32
            live.mark(moment, 2 * wide)
            live.add(self.row, -wide)
            live.mark(moment, (3 if residual else 4) * wide)
            frees -= wide
        else:
            live.mark(moment, S)
        live.add(self.row, -frees)
        if residual:
            live.mark(moment, S)
            live.add(TEMPORARIES, -S)
        live.mark(moment, 0)

    # Attention. Each takes the gradient of its output and leaves those of q, k and v: an entry for each backend.

    def _attended(self, moment: str, work: float, out: float) -> None:
        live, m, z = self.live, self.z.model, self.z
        live.mark(moment, work)
        live.add(self.row, -self.block["attention"])
        live.add(TEMPORARIES, out - self.narrow)
        if m.position == "rope":                    # in float32, and halves turned round
            q = z.tokens * m.H * m.E / z.shards
            live.mark(moment, q * (2 * z.stream + z.compute))
        live.add(TEMPORARIES, z.tokens * self.qkv * z.compute - out)

    def sdpa(self, moment: str) -> None:
        grads = self.z.tokens * self.qkv * self.z.compute
        self._attended(moment, grads, grads)

    def blocked(self, moment: str) -> None:
        """Groups repeated to all heads; the last 128 queries meet every key."""
        z, m = self.z, self.z.model
        queries = min(128, m.T)
        scores = z.batch * m.H * queries * m.T * z.compute
        grads = 3 * self.narrow
        self._attended(moment, grads + 2 * scores + self.narrow * queries / m.T, grads)

    def plain(self, moment: str) -> None:
        z, m = self.z, self.z.model
        scores = z.batch * m.H * m.T * m.T * z.compute
        grads = 3 * self.narrow
        self._attended(moment, self.narrow + 2 * scores, grads)


ATTENTION: dict[str, Callable[[_Block, str], None]] = {
    "sdpa": _Block.sdpa, "blocked": _Block.blocked, "plain": _Block.plain}
