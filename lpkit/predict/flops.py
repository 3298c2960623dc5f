"""Floating-point operations of a step. Only matmuls count; a multiply and an add are 2 FLOPs.

Everything else (norms, softmax, activations, the optimizer) is less than 1% of the operations of
any model worth training, and memory-bound. The counts equal those of
`torch.utils.flop_counter.FlopCounterMode` on the model. Source: PaLM, appendix B
(https://arxiv.org/abs/2204.02311), which also defines MFU.
"""

import functools
from dataclasses import dataclass, replace
from typing import Literal

from lpkit.config import ModelConfig
from lpkit.predict.params import of
from lpkit.techniques.blocks import Operations


@dataclass(frozen=True, kw_only=True)
class Product:
    """(M, K) x (K, N), `calls` times in a pass over the model, each time `group` products."""

    name: str
    M: int
    N: int
    K: int
    calls: int
    group: int = 1   # heads times batch in attention
    pairs: bool = False   # over pairs of tokens, half of them under a causal mask
    cut: str = ""         # side of the weight that tensor parallelism cuts: column, row
    trained: bool = True  # False: no weight gradient
    density: float = 1.0  # share of the weight that is not zero; kernels multiply zeros too

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """(M, N, K) of a Linear's three products, by the name of their result."""
        return {"y": (self.M, self.N, self.K), "dx": (self.M, self.K, self.N),
                "dw": (self.N, self.K, self.M)}

    @functools.cached_property
    def words(self) -> str:
        M = round(self.M) if isinstance(self.M, float) else self.M
        return f"({M:,}, {self.K:,}) x ({self.K:,}, {self.N:,})"

    @property
    def flops(self) -> int:
        """FLOPs without those of pruned weights."""
        flops = 2 * self.M * self.N * self.K * self.group * self.calls
        # an average over layers is not whole
        whole = self.density == 1 and not isinstance(self.M, float)
        return flops if whole else round(flops * self.density)

    def on_rank(self, tensor: int, context: int) -> "Product":
        """Return the product on one of `tensor` ranks, which share weights and heads, and of
        `context` ranks, which share the tokens. Queries on a rank meet the keys of all tokens."""
        if tensor == context == 1:
            return self
        M = self.M // context
        if self.pairs:
            return replace(self, M=M, group=self.group // tensor)
        if self.cut == "column":
            return replace(self, M=M, N=self.N // tensor)
        return replace(self, M=M, K=self.K // tensor)


def products(model: ModelConfig, *, batch: int) -> tuple[Product, ...]:
    """Return all products of a forward pass over `batch` sequences of model.context tokens."""
    ops, products = of(model), []
    for op in (*ops.block, ops.head):
        calls = 1 if op is ops.head else model.L * model.running
        part = op.tokens_share != 1     # without shares M stays an integer, and is printed as one
        if op.matmul:
            (K, N), M = op.matmul, batch * model.T
            products.append(Product(name=op.name, M=round(M * op.tokens_share, 6) if part else M,
                                 N=N, K=K, calls=calls, cut=op.cut, trained=op.trained,
                                 density=op.density))
        products += [Product(**vars(pair) | {"group": batch * pair.group}, calls=calls, pairs=True)
                  for pair in op.pairs]
    return tuple(products)


def moved_bytes(ops: Operations) -> tuple[int, int]:
    """Return the bytes that one forward pass moves without its matmuls: (in one block, outside the
    blocks).

    Each operation (norms, residual additions, activations, rotations, casts, the loss) reads and
    writes memory on its own, as in PyTorch without a compiler."""
    outside = (ops.embed, ops.positions, ops.norm, ops.head, ops.loss)
    return sum([op.moved_bytes for op in ops.block]), sum([op.moved_bytes for op in outside])


Attention = Literal["full", "causal"]


def forward_flops(model: ModelConfig, *, batch: int = 1, attention: Attention = "full") -> int:
    """Return the FLOPs of one forward pass.

    `full` counts the whole (T, T) square, as PaLM and PyTorch do. `causal` counts the pairs that
    the attention's rule lets through, which a kernel must compute: T(T+1)/2 for plain causal
    attention. Documents count as one, because their pairs depend on the data."""
    return batch * _sequence_flops(model, attention) + _weight_flops(model)


def _weight_flops(model: ModelConfig) -> int:
    """Return the FLOPs of products of parameters only, which do not depend on the batch."""
    return model.L * sum(op.weight_flops for op in of(model).block) if model.changes else 0


@functools.lru_cache(maxsize=256)
def _sequence_flops(model: ModelConfig, attention: Attention) -> int:
    T, total, rule = model.T, 0, model.attention.rule(model.T)
    # Without softmax, the products over pairs are those that the backend computes.
    causal = attention == "causal" and rule is not None
    pairs = rule.pairs(T) if causal else 0
    for p in products(model, batch=1):
        total += p.flops * pairs // T**2 if causal and p.pairs else p.flops
    return total


def training_flops(model: ModelConfig, *, batch: int = 1, attention: Attention = "full") -> int:
    """Return the FLOPs of forward and backward: 3 times forward, since each product has two
    gradients of its size, minus the gradients of frozen weights.

    These are the model's FLOPs, which define MFU, so recomputation does not count. The first
    product has an input gradient too, because the embedding below it is trained.
    """
    frozen = sum(p.flops for p in products(model, batch=1) if not p.trained) if model.changes else 0
    return batch * (3 * _sequence_flops(model, attention) - frozen) + _weight_flops(model)


def training_flops_per_token(model: ModelConfig, *, attention: Attention = "full") -> float:
    """6 per weight in a matmul, plus 12 L D T for full attention. An average over the tokens."""
    return training_flops(model, attention=attention) / model.T


def recomputed_flops(model: ModelConfig, *, batch: int = 1) -> int:
    """Return the FLOPs of running all blocks a second time. MFU does not count them, but they take
    time."""
    *inside, _head = products(model, batch=batch)
    return sum(p.flops for p in inside) + _weight_flops(model)
