"""Floating-point operations of a step: matrix products only, a multiply and an add are 2.

Everything else (norms, softmax, activations, the optimizer) is under 1% of the operations of any
model worth training and is bound by memory, not by arithmetic. Equal to
`torch.utils.flop_counter.FlopCounterMode` on the model itself. Source: PaLM, appendix B
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
    """(M, K) with (K, N): `calls` in one pass over the model, each of them `group` at once."""

    name: str
    M: int
    N: int
    K: int
    calls: int
    group: int = 1   # heads times batch in attention
    pairs: bool = False   # over pairs of tokens: a causal mask leaves half of it
    cut: str = ""         # the side of the weight that tensor parallelism cuts: column, row
    trained: bool = True  # else it has no weight gradient
    density: float = 1.0  # of a weight, what is not zero; kernels multiply zeros too

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """(M, N, K) of a Linear's three products, by the name of what they give."""
        return {"y": (self.M, self.N, self.K), "dx": (self.M, self.K, self.N),
                "dw": (self.N, self.K, self.M)}

    @functools.cached_property
    def words(self) -> str:
        M = round(self.M) if isinstance(self.M, float) else self.M
        return f"({M:,}, {self.K:,}) x ({self.K:,}, {self.N:,})"

    @property
    def flops(self) -> int:
        """The FLOPs without those of zeros."""
        flops = 2 * self.M * self.N * self.K * self.group * self.calls
        whole = self.density == 1 and not isinstance(self.M, float)     # of layers on average
        return flops if whole else round(flops * self.density)

    def on_rank(self, tensor: int, context: int) -> "Product":
        """Cuts it for one of `tensor` ranks, each with part of weights and heads, and of `context`
        ranks, each with part of the tokens; all keys meet the queries of some."""
        if tensor == context == 1:
            return self
        M = self.M // context
        if self.pairs:
            return replace(self, M=M, group=self.group // tensor)
        if self.cut == "column":
            return replace(self, M=M, N=self.N // tensor)
        return replace(self, M=M, K=self.K // tensor)


def products(model: ModelConfig, *, batch: int) -> tuple[Product, ...]:
    """Lists all products of a forward pass over `batch` sequences of model.context tokens."""
    ops, found = of(model), []
    for op in (*ops.block, ops.head):
        calls = 1 if op is ops.head else model.L * model.running
        part = op.tokens_share != 1     # else numbers stay whole, and letters are letters
        if op.matmul:
            (K, N), M = op.matmul, batch * model.T
            found.append(Product(name=op.name, M=round(M * op.tokens_share, 6) if part else M,
                                 N=N, K=K, calls=calls, cut=op.cut, trained=op.trained,
                                 density=op.density))
        found += [Product(**vars(one) | {"group": batch * one.group}, calls=calls, pairs=True)
                  for one in op.pairs]
    return tuple(found)


def moved_bytes(ops: Operations) -> tuple[int, int]:
    """Returns what everything but the products moves in one forward pass, each operation on its
    own, as PyTorch runs it without compiling (norms, residual additions, activations, rotations,
    casts, the loss): of one block, and outside the blocks."""
    outside = (ops.embed, ops.positions, ops.norm, ops.head, ops.loss)
    return sum([op.moved_bytes for op in ops.block]), sum([op.moved_bytes for op in outside])


Attention = Literal["full", "causal"]


def forward_flops(model: ModelConfig, *, batch: int = 1, attention: Attention = "full") -> int:
    """Counts one forward pass. `full` counts the whole (T, T) square, as PaLM and PyTorch do;
    `causal` the pairs that the rule of the model's attention lets through, T(T+1)/2 where it is
    full, which is what a kernel has to do. Documents, whose pairs depend on data, count as one."""
    return batch * _sequence_flops(model, attention) + _weight_flops(model)


def _weight_flops(model: ModelConfig) -> int:
    """Counts products of parameters alone, which have no gradient, whatever the batch."""
    return model.L * sum(op.weight_flops for op in of(model).block) if model.changes else 0


@functools.lru_cache(maxsize=256)
def _sequence_flops(model: ModelConfig, attention: Attention) -> int:
    T, total, rule = model.T, 0, model.attention.rule(model.T)
    # without softmax, products over pairs are those that a backend does
    causal = attention == "causal" and rule is not None
    pairs = rule.pairs(T) if causal else 0
    for p in products(model, batch=1):
        total += p.flops * pairs // T**2 if causal and p.pairs else p.flops
    return total


def training_flops(model: ModelConfig, *, batch: int = 1, attention: Attention = "full") -> int:
    """Forward and backward: each product has two gradients of its own size, so 3 times the forward;
    of a frozen weight there is no gradient.

    These are the model's FLOPs, by which MFU is defined: what recomputation does again is not
    counted. The first product has an input gradient too, because the embedding below it is learned.
    """
    frozen = sum(p.flops for p in products(model, batch=1) if not p.trained) if model.changes else 0
    return batch * (3 * _sequence_flops(model, attention) - frozen) + _weight_flops(model)


def training_flops_per_token(model: ModelConfig, *, attention: Attention = "full") -> float:
    """6 per weight in a product, plus 12 L D T for attention in full. An average."""
    return training_flops(model, attention=attention) / model.T


def recomputed_flops(model: ModelConfig, *, batch: int = 1) -> int:
    """Counts the FLOPs of blocks that are done a second time, which MFU does not count and the clock
    does."""
    *inside, _head = products(model, batch=batch)
    return sum(p.flops for p in inside) + _weight_flops(model)
