"""Bytes that autograd keeps between the forward and the backward pass, by operation.

Counted in storages, each once, under the operation that keeps it first: a tensor that a norm and the product after it
both need is one tensor. Names are those of the modules in `lpkit.nn.transformer`; `lpkit.measure.saved_bytes` uses the
same ones, and tests/test_predict.py holds the two equal, to the byte, on the CPU. The method is that of
Korthikanti et al. 2022, section 4 (https://arxiv.org/abs/2205.05198); the terms are this model's own.
"""

from dataclasses import dataclass, replace
from typing import Literal

from lpkit.config import ModelConfig
from lpkit.errors import ConfigError, nearest
from lpkit.predict.params import UPS, product_weights

Kind = Literal["cpu", "gpu"]
RECOMPUTE = {     # by what it costs
    "none": "keep everything",
    "selective": "keep results of products and of fused attention too (Korthikanti et al. 2022, arXiv:2205.05198)",
    "block": "keep each block's input, run the block again in backward (Chen et al. 2016, arXiv:1604.06174)",
}
OUTSIDE = ("embed", "norm", "head", "loss")     # operations that are not a block's
FP32, TOKEN_ID = 4, 8   # bytes; token ids are int64


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one micro-batch holds when its forward pass ends."""

    operations: dict[str, int]    # bytes over all blocks; of those that run again, what they keep until then: "again"
    block: dict[str, int]         # bytes of one block, everything kept: what recomputing it holds for a moment
    last: dict[str, int]          # of the last block, whose products may be in other bits than those of the others
    weight_copy_bytes: int        # the weights once more in the compute dtype, made and kept by autocast
    again_bytes: int              # what a block keeps that runs again

    def share(self, cut: int, depth: float) -> "Kept":
        """Of a device that has 1/cut of each tensor and `depth` of the blocks."""
        return Kept(operations={name: n / cut * (1 if name in OUTSIDE else depth) for name, n in self.operations.items()},
                    block={name: n / cut for name, n in self.block.items()},
                    last={name: n / cut for name, n in self.last.items()},
                    weight_copy_bytes=self.weight_copy_bytes / cut * depth, again_bytes=self.again_bytes / cut)

    def away(self, number_bytes: float, *, compute: int, stream: int) -> "Kept":
        """With `number_bytes` for each number that blocks keep: in few bits, or 0, elsewhere. Statistics stay."""
        def shrunk(block: dict[str, int]) -> dict[str, float]:
            return {name: nbytes * number_bytes / (stream if name.startswith("norm") else compute)
                    for name, nbytes in block.items()}

        again = self.again_bytes * number_bytes / stream if "again" in self.operations else self.again_bytes
        blocks = {} if "again" in self.operations else shrunk(
            {name: n for name, n in self.operations.items() if name not in OUTSIDE})
        if "again" in self.operations:
            blocks["again"] = self.operations["again"] * number_bytes / stream
        return replace(self, operations=self.operations | blocks, again_bytes=again,
                       block=self.block if again != self.again_bytes else shrunk(self.block),
                       last=self.last if again != self.again_bytes else shrunk(self.last))

    @property
    def block_bytes(self) -> int:
        return sum(self.block.values())

    @property
    def loss_bytes(self) -> int:
        """Log-probabilities and targets."""
        return self.operations["loss"]

    @property
    def total_bytes(self) -> int:
        """Without the weight copies."""
        return sum(self.operations.values())


def kept(model: ModelConfig, *, batch: int, compute: int = 4, stream: int = 4, attention: str = "sdpa",
         recompute: str = "none", every: int = 1, kind: Kind = "cpu", operand: float | None = None,
         last_operand: float | None = None) -> Kept:
    """For `batch` sequences of model.context tokens.

    `compute` is the bytes of a number in the products, `stream` in the residual stream: 4 and 4 in float32, 2 and 4
    under 16-bit autocast, 2 and 2 for a model that is 16-bit throughout. `kind` matters where PyTorch's kernels keep
    different things on a GPU: its RMSNorm is fused, and autocast takes a plain softmax in float32. `operand` is the bytes
    of a number that a block's products keep of their inputs, where they cast them; None: they keep what they are given.
    """
    if recompute not in RECOMPUTE:
        raise ConfigError(f"there is no recompute mode {recompute!r}; {nearest(recompute, RECOMPUTE)}")
    N, D, L, V = batch * model.T, model.D, model.L, model.V
    block = _block(model, batch, compute, stream, attention, kind, operand)
    last = block if last_operand == operand else _block(model, batch, compute, stream, attention, kind, last_operand)
    again = len(range(0, L, every)) if recompute != "none" else 0      # blocks that run again
    stored = N * D * stream
    if recompute == "selective":
        stored += N * (_qkv(model) + 2 * D + UPS[model.mlp] * model.F) * compute
        stored += N * (D * compute + model.H * FP32) if attention == "sdpa" else 0
    whole = 0 if recompute != "none" and (L - 1) % every == 0 else 1      # whether the last one is kept
    blocks = {name: (L - again - whole) * block.get(name, 0) + whole * last.get(name, 0)
              for name in {**block, **last}} if again < L else {}
    if again:
        blocks["again"] = again * stored
    if model.position == "rope":             # cos and sin, made once for all blocks
        blocks["attention" if again < L else "again"] += 2 * model.T * model.E * stream
    inside = product_weights(model) - V * D
    return Kept(
        operations={
            "embed": N * TOKEN_ID,
            **blocks,
            "norm": _norm(model, N, stream, kind),
            "head": N * D * compute,
            "loss": N * V * FP32 + N * TOKEN_ID + FP32,   # log-probabilities, targets, how many targets count
        },
        block=block, last=last,
        weight_copy_bytes=(V * D + inside * (L - again) // L) * compute if compute < stream else 0,
        again_bytes=stored,
    )


def _block(model: ModelConfig, B: int, compute: int, stream: int, attention: str, kind: Kind,
           operand: float | None) -> dict[str, int]:
    N, D, F = B * model.T, model.D, model.F
    norm = _norm(model, N, stream, kind)
    found = {"norm1": norm, "attention.qkv": N * D * compute,     # what the norm gave, or its 16-bit copy
             **_attention(model, B, compute, attention, kind), "norm2": norm, **_mlp(model, N, compute)}
    if operand is not None:     # copies, also of what is kept anyway
        up = "mlp.up" if model.mlp == "gelu" else "mlp.gate_up"
        found |= {"attention.qkv": N * D * operand, "attention.out": N * D * operand, up: N * D * operand,
                  "mlp.down": N * F * operand}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _norm(model: ModelConfig, N: int, stream: int, kind: Kind) -> int:
    """LayerNorm keeps its input, the mean and 1/std. RMSNorm, which works in float32, keeps its input, 1/rms and, where
    it is not one fused kernel, the normalised input."""
    if model.norm == "layernorm":
        return N * model.D * stream + 2 * N * stream
    return N * model.D * stream + N * FP32 if kind == "gpu" else 2 * N * model.D * FP32 + N * FP32


def _mlp(model: ModelConfig, N: int, compute: int) -> dict[str, int]:
    D, F = model.D, model.F
    if model.mlp == "gelu":       # the input, before the gelu, after it
        return {"mlp.up": N * D * compute, "mlp": N * F * compute, "mlp.down": N * F * compute}
    # gate and up side by side, silu(gate), and its product with up
    return {"mlp.gate_up": N * D * compute, "mlp": 3 * N * F * compute, "mlp.down": N * F * compute}


def _attention(model: ModelConfig, B: int, compute: int, backend: str, kind: Kind) -> dict[str, int]:
    if backend not in ATTENTION:
        raise ConfigError(f"there is no formula for model.attention={backend!r}; {nearest(backend, ATTENTION)}")
    return ATTENTION[backend](model, B, compute, kind)


# q, k and v come out of one product. v is a view of it, and so are q and k unless positions turn them; but the queries
# of several groups do not lie side by side and are copied. One view keeps the whole product alive.

def _sdpa(model: ModelConfig, B: int, compute: int, kind: Kind) -> dict[str, int]:
    """A flash kernel: q, k, v, the output, and one float32 log-sum per query instead of T scores."""
    E, G, H = model.E, model.G, model.H
    turned = model.position == "rope"
    numbers = _qkv(model) + (H * E if turned or 1 < G < H else 0) + (G * E if turned else 0) + H * E
    return {"attention": B * model.T * (numbers * compute + H * FP32)}


def _plain(model: ModelConfig, B: int, compute: int, kind: Kind) -> dict[str, int]:
    """q, k and v copied for a batched product, every group repeated; the (T, T) mask; the probabilities; and the heads'
    output, copied for the product after it."""
    T, D, H = model.T, model.D, model.H
    q = _qkv(model) if _is_view(model, B) and model.position == "learned" and not 1 < model.G < H else D
    probability = compute + FP32 if kind == "gpu" and compute < FP32 else compute
    return {"attention": B * T * (q + 2 * D) * compute + T * T + B * H * T * T * probability,
            "attention.out": B * T * D * compute}


def _blocked(model: ModelConfig, B: int, compute: int, kind: Kind) -> dict[str, int]:
    """As plain, without the future: blocks of 128 queries meet only the keys up to their own last."""
    T, D, G, H, block = model.T, model.D, model.G, model.H, 128
    numbers = 3 * D
    if _is_view(model, B) and G == H:       # v is a view; q and k too, unless turned
        numbers = _qkv(model) + (2 * D if model.position == "rope" else 0)
    elif _is_view(model, B) and G == 1 and model.position == "learned":   # q is a view, k and v are repeated
        numbers = _qkv(model) + 2 * D
    ends = [min(start + block, T) for start in range(0, T, block)]
    pairs = sum((end - start) * end for start, end in zip(range(0, T, block), ends))
    return {"attention": (B * T * numbers + B * H * pairs) * compute, "attention.out": B * T * D * compute}


def _qkv(model: ModelConfig) -> int:
    return (model.H + 2 * model.G) * model.E


def _is_view(model: ModelConfig, B: int) -> bool:
    """(B, H, T, E) lies in memory as (B, T, H, E): batch and heads merge without a copy only if one of them is 1."""
    return B == 1 or model.H == 1


ATTENTION = {"sdpa": _sdpa, "plain": _plain, "blocked": _blocked}
