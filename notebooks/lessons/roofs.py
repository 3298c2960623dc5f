"""A product on a machine's roofline: FLOPs, the fewest bytes, and their ratio."""

from dataclasses import replace

from lpkit.predict.flops import Product
from lpkit.techniques.machines import Machine


def ridge(machine: Machine, dtype: str) -> float:
    """Return the FLOPs per byte above which arithmetic is the limit, not memory."""
    return machine.peak_flops(dtype) / machine.bytes_per_second


def attainable_flops(machine: Machine, dtype: str, intensity: float) -> float:
    """Return the attainable FLOP/s at `intensity` FLOPs per byte."""
    return min(machine.peak_flops(dtype), machine.bytes_per_second * intensity)


def intensity_of(p: Product, itemsize: int) -> float:
    """Return FLOPs per byte, if each operand is read once and the result is written once."""
    numbers = p.M * p.K + p.K * p.N + p.M * p.N
    return p.flops / (numbers * itemsize * p.group * p.calls)


def gradients_of(p: Product) -> tuple[Product, Product]:
    """Return the products of both gradients: the same three sizes, with another one summed over."""
    of_left, of_right = ("left", "right") if p.pairs else ("input", "weight")
    return (replace(p, name=f"{p.name}: {of_left} gradient", M=p.M, N=p.K, K=p.N),
            replace(p, name=f"{p.name}: {of_right} gradient", M=p.K, N=p.N, K=p.M))
