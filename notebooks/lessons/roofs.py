"""A matmul on a machine's roofline: its FLOPs, the fewest bytes that it moves, and their ratio."""

from dataclasses import replace

from lpkit.predict.flops import Product
from lpkit.techniques.machines import Machine


def ridge(machine: Machine, dtype: str) -> float:
    """Return the FLOPs per byte above which arithmetic, not memory bandwidth, is the limit."""
    return machine.peak_flops(dtype) / machine.bytes_per_second


def attainable_flops(machine: Machine, dtype: str, intensity: float) -> float:
    """Return the FLOP/s that the roofline allows at `intensity` FLOPs per byte."""
    return min(machine.peak_flops(dtype), machine.bytes_per_second * intensity)


def intensity_of(p: Product, itemsize: int) -> float:
    """Return the FLOPs per byte of a matmul if each operand is read once and the result is written
    once. `itemsize`: bytes of a number.

    For (M, K) times (K, N): 2 M N K / (itemsize (M K + K N + M N)).
    """
    numbers = p.M * p.K + p.K * p.N + p.M * p.N
    return p.flops / (numbers * itemsize * p.group * p.calls)


def gradients_of(p: Product) -> tuple[Product, Product]:
    """Return the two matmuls of backward. For y = a b, (M, K) times (K, N), they are da = dy b^T,
    (M, N) times (N, K), and db = a^T dy, (K, M) times (M, N): the same three sizes in another
    order."""
    of_left, of_right = ("left", "right") if p.pairs else ("input", "weight")
    return (replace(p, name=f"{p.name}: {of_left} gradient", M=p.M, N=p.K, K=p.N),
            replace(p, name=f"{p.name}: {of_right} gradient", M=p.K, N=p.N, K=p.M))
