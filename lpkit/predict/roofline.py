"""The least time that a machine's ceilings allow: arithmetic or memory, whichever is slower, operation by operation.

A floor, not an estimate: every operand moves once, at the memory's bandwidth, and products run at the best rate. Only
what stays in a cache can beat it. Bytes, FLOPs, seconds.
Source: Williams, Waterman, Patterson 2009, Roofline, https://doi.org/10.1145/1498765.1498785.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lpkit.config import Config, ModelConfig
from lpkit.predict.flops import Product, products
from lpkit.predict.ledger import PRECISIONS
from lpkit.predict.params import parameter_count, product_weights
from lpkit.techniques.blocks import FP32
from lpkit.techniques.machines import Machine

ADAMW_BYTES = 7 * FP32   # a parameter: reads weight, gradient and two moments, writes weight and moments


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The phases of one update, in seconds; and how much of them is products."""

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    product_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds


def attainable_flops(machine: Machine, dtype: str, intensity: float) -> float:
    """FLOP/s at `intensity` FLOPs per byte: the roof."""
    return min(machine.peak_flops(dtype), machine.bytes_per_second * intensity)


def product_seconds(p: Product, machine: Machine, *, dtype: str, itemsize: int) -> float:
    return p.flops / attainable_flops(machine, dtype, p.intensity(itemsize))


def causal_share(p: Product, model: ModelConfig) -> float:
    """Share of the FLOPs of `p` that a causal mask leaves to do."""
    return (model.T + 1) / (2 * model.T) if p.pairs else 1.0


def pointwise_bytes(model: ModelConfig, *, batch: int, compute: int, stream: int) -> int:
    """What everything but the products moves in one forward pass, each operation on its own, as PyTorch runs it
    without compiling: norms, residual additions, activations, rotations, casts, the loss."""
    N, D, F, L, V = batch * model.T, model.D, model.F, model.L, model.V
    cast = stream + compute if compute < stream else 0
    norm = 2 * D * stream + D * cast                          # read, write; once more to cast
    residual = D * (2 * stream + compute)
    activation = F * compute * {"gelu": 2, "swiglu": 5}[model.mlp]
    turn = {"learned": 0, "rope": 2 * (model.H + model.G) * model.E * compute}[model.position]
    outside = D * stream * (2 + 3) + norm + V * (2 * FP32 + (compute + FP32 if compute < FP32 else 0))
    return N * (L * (2 * norm + 2 * residual + activation + turn) + outside)


def step_floor(config: Config, machine: Machine, *, precision: str) -> Floor:
    """One update of `config` on one `machine`. Attention counts only the pairs that the mask leaves."""
    p, m = PRECISIONS[precision], config.model
    forward, backward = products(m, batch=config.batch), []
    for product in forward:
        backward += product.backward()

    def seconds(parts: Iterable[Product]) -> float:
        return sum(product_seconds(part, machine, dtype=p.dtype, itemsize=p.compute) * causal_share(part, m)
                   for part in parts)

    bandwidth = machine.bytes_per_second
    moved = pointwise_bytes(m, batch=config.batch, compute=p.compute, stream=p.stream)
    # autocast writes each weight once more per micro-batch, and turns each weight's gradient back to float32
    casts = product_weights(m) * (p.compute + p.weights) * config.accumulate if p.compute < p.weights else 0
    return Floor(
        forward_seconds=seconds(forward) + (moved + casts) / bandwidth,
        # an operation's backward reads the gradient and what was kept, and writes a gradient: 3 where forward moved 2
        backward_seconds=seconds(backward) + (1.5 * moved + casts) / bandwidth,
        optimizer_seconds=ADAMW_BYTES * parameter_count(m) / bandwidth,
        product_seconds=seconds(forward) + seconds(backward))
