"""Floating-point operations (FLOPs) of a step. Only matmuls count; a multiply and an add are 2
FLOPs.

All other work (norms, softmax, activations, the optimizer) is less than 1% of the FLOPs of any
model worth training, and memory-bound. The counts equal the counts of
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
    """A matmul (M, K) x (K, N). A forward pass calls it `calls` times, and each call multiplies a
    batch of `group` such matrices.

    Example: a Linear from 64 to 256 for 1,024 tokens in 4 layers has M=1024, K=64, N=256, calls=4
    and 2 * 1024 * 256 * 64 * 4 = 134,217,728 FLOPs."""

    name: str
    M: int
    N: int
    K: int
    calls: int
    group: int = 1   # in attention: sequences times heads; else 1
    pairs: bool = False   # a product over the T x T pairs of tokens; a causal mask hides half
    cut: str = ""         # side of the weight that tensor parallelism cuts: column, row
    trained: bool = True  # False: the weight is frozen and has no gradient
    density: float = 1.0  # share of the weights that are not zero; kernels multiply zeros too

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """(M, N, K) of a Linear's three matmuls, by the name of the result: y, dx or dw."""
        return {"y": (self.M, self.N, self.K), "dx": (self.M, self.K, self.N),
                "dw": (self.N, self.K, self.M)}

    @functools.cached_property
    def words(self) -> str:
        M = round(self.M) if isinstance(self.M, float) else self.M
        return f"({M:,}, {self.K:,}) x ({self.K:,}, {self.N:,})"

    @property
    def flops(self) -> int:
        """FLOPs of all calls, without the multiplications by pruned weights."""
        flops = 2 * self.M * self.N * self.K * self.group * self.calls
        # If layers see only a share of the tokens, M is an average and no integer.
        whole = self.density == 1 and not isinstance(self.M, float)
        return flops if whole else round(flops * self.density)

    def on_rank(self, tensor: int, context: int) -> "Product":
        """Return the part of the product on one rank, if `tensor` ranks share the weights and heads
        and `context` ranks share the tokens. Each rank multiplies its queries by the keys of all
        tokens, so only M is divided by `context`."""
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
        part = op.tokens_share != 1     # M stays an integer if the layers see all tokens
        if op.matmul:
            (K, N), M = op.matmul, batch * model.T
            products.append(Product(name=op.name, M=round(M * op.tokens_share, 6) if part else M,
                                 N=N, K=K, calls=calls, cut=op.cut, trained=op.trained,
                                 density=op.density))
        products += [Product(**vars(pair) | {"group": batch * pair.group}, calls=calls, pairs=True)
                  for pair in op.pairs]
    return tuple(products)


def moved_bytes(ops: Operations) -> tuple[int, int]:
    """Return the bytes that operations other than matmuls move in one forward pass: (in one block,
    outside the blocks).

    Each of these operations (norms, residual additions, activations, rotary positions, casts, the
    loss) is a kernel of its own that reads and writes memory, as in PyTorch without a compiler."""
    outside = (ops.embed, ops.positions, ops.norm, ops.head, ops.loss)
    return sum([op.moved_bytes for op in ops.block]), sum([op.moved_bytes for op in outside])


Attention = Literal["full", "causal"]


def forward_flops(model: ModelConfig, *, batch: int = 1, attention: Attention = "full") -> int:
    """Return the FLOPs of one forward pass over `batch` sequences.

    `attention` is "full" or "causal". "full" counts all T^2 pairs of tokens, as PaLM and PyTorch
    do. "causal" counts only the pairs that the attention's rule allows, which every kernel must
    compute: T(T+1)/2 pairs for plain causal attention. Several documents in a sequence count as
    one document, because their pairs depend on the data."""
    return batch * _sequence_flops(model, attention) + _weight_flops(model)


def _weight_flops(model: ModelConfig) -> int:
    """Return the FLOPs of matmuls that multiply parameters with parameters, for example a low-rank
    update that is added to its weight. They do not depend on the batch."""
    return model.L * sum(op.weight_flops for op in of(model).block) if model.changes else 0


@functools.lru_cache(maxsize=256)
def _sequence_flops(model: ModelConfig, attention: Attention) -> int:
    """Return the FLOPs of a forward pass over one sequence. A kind of attention without softmax has
    no rule; all of its products count as they are."""
    T, total, rule = model.T, 0, model.attention.rule(model.T)
    causal = attention == "causal" and rule is not None
    pairs = rule.pairs(T) if causal else 0
    for p in products(model, batch=1):
        total += p.flops * pairs // T**2 if causal and p.pairs else p.flops
    return total


def training_flops(model: ModelConfig, *, batch: int = 1, attention: Attention = "full") -> int:
    """Return the FLOPs of forward and backward: 3 times the FLOPs of forward, because each matmul
    has two gradient matmuls of the same size, minus the gradients of frozen weights.

    These are the model's FLOPs, which define MFU, so recomputation does not count. The first matmul
    of the model has an input gradient too, because the embedding below it is trained.
    """
    frozen = sum(p.flops for p in products(model, batch=1) if not p.trained) if model.changes else 0
    return batch * (3 * _sequence_flops(model, attention) - frozen) + _weight_flops(model)


def training_flops_per_token(model: ModelConfig, *, attention: Attention = "full") -> float:
    """Return the FLOPs of forward and backward per token, on average over a sequence: 6 for each
    weight in a matmul, plus 12 L D T for full attention."""
    return training_flops(model, attention=attention) / model.T


def recomputed_flops(model: ModelConfig, *, batch: int = 1) -> int:
    """Return the FLOPs of running the forward pass of all blocks a second time. These FLOPs take
    time, but MFU does not count them."""
    *inside, _head = products(model, batch=batch)
    return sum(p.flops for p in inside) + _weight_flops(model)
