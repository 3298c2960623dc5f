"""What low precision buys in a training step: faster products, slower by their casts, and the bytes of both.

A recipe casts the two operands of each of a Linear's three products (y = x w^T, dx = g w, dw = g^T x). So a Linear of M
tokens, K inputs and N outputs costs three products in few bits and up to six casts, which read and write whole tensors.
Products grow with M N K, casts with M K, M N and N K: width decides. Everything else in the step stays, so the gain of
the step is that of its Linears under Amdahl's law. Seconds, bytes, FLOP/s.

The passes of each cast are those of torchao's own roofline (torchao/testing/training/roofline_utils.py, 0.18), and
tests/test_advise.py holds the two equal. What a machine reaches of its datasheet is an
assumption with a source, an `Efficiency`; a file in data/measured takes its place (see `lpkit.studies.advice`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lpkit.config import Config
from lpkit.predict.flops import Product, products
from lpkit.predict.params import parameter_count
from lpkit.predict.roofline import ADAMW_BYTES, causal_share, pointwise_bytes
from lpkit.techniques.machines import Machine

FP32, BF16 = 4, 2                   # bytes
ON_CHIP = 2**16                     # elements that one kernel holds while it finds their largest: 128 KiB of bf16
COALESCED = 32                      # columns that a kernel reads together when it walks down a column
USES = {"x": ("y", "dw"), "w": ("y", "dx"), "g": ("dx", "dw")}     # first along the stored rows, then down the columns
CONTRACTED = {"y": "K", "dx": "N", "dw": "M"}
STORED = {"x": ("M", "K"), "w": ("N", "K"), "g": ("M", "N")}       # rows, columns
READ = {"x": BF16, "w": FP32, "g": BF16}    # bytes an element; weights are float32 masters


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What is reached of a datasheet."""

    products: Mapping[str, float]       # of peak_flops, by dtype of the catalogue
    attention: float                    # of the 16-bit peak, by a flash kernel
    bandwidth: float
    casts: float                        # of the bandwidth, by a cast: on a CPU it calculates more than it moves
    kernel_seconds: float               # the least that a kernel takes
    fused: float                        # of `pointwise_bytes`, left by a compiler
    source: str
    links: float = 0.8                  # of a link or a network, by a large collective


ASSUMED = Efficiency(
    products={"fp32": 0.78, "tf32": 0.78, "bf16": 0.78, "fp16": 0.78, "fp8": 0.68, "int8": 0.68, "fp4": 0.6},
    attention=0.5, bandwidth=0.92, casts=0.92, kernel_seconds=2e-6, fused=0.5,
    source="assumed: 16-bit products, bandwidth and kernels as torchao's roofline has them for H100 (0.78, 0.92, 2 us); "
           "8-bit products 0.68, which gives torchao's published 1.39x at (4096, 8192, 16384); 4-bit ones, attention, fusion "
           "and links are round guesses")
REACHED = Efficiency(
    products=dict.fromkeys(("fp32", "bf16", "fp16", "fp8", "int8", "fp4"), 1.0), attention=0.5, bandwidth=1.0,
    casts=0.25, kernel_seconds=5e-6, fused=1.0,
    source="ceilings that were measured here, so nothing is taken off; casts at a quarter of the bandwidth are assumed")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """How one operand (rows, contracted axis) is cast: `block` elements share a scale, 0 spans an axis."""

    bits: float
    block: tuple[int, int] = (0, 0)
    scale_bytes: float = 4
    transposes: bool = False        # the cast of x.T is the cast of x, transposed: one cast, two layouts


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the formulas need of a precision recipe. `casts` by product; a product that is absent stays in 16 bits."""

    name: str
    dtype: str                                          # of the products, in the catalogue of machines
    casts: Mapping[str, tuple[Operand, Operand]] = field(default_factory=dict)   # y: (x, w), dx: (g, w), dw: (g, x)
    history: int = 0                                    # amaxes remembered: a cast does not look at its tensor first
    kept: Mapping[str, int] = field(default_factory=dict)   # Linears that stay in 16 bits, by product name
    result_bytes: float = BF16                          # moved for each element of a product's result
    product_share: float = 1.0                          # of the efficiency of its dtype: scales inside cost something
    cast_factor: float = 1.0                            # traffic of its casts over that of fused ones

    def operand(self, tensor: str, product: str) -> Operand | None:
        pair = self.casts.get(product)
        return None if pair is None else pair[{"y": "xw", "dx": "gw", "dw": "gx"}[product].index(tensor)]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One kernel over one tensor."""

    tensor: str
    what: str
    read_bytes: float
    written_bytes: float

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.written_bytes


def cast_passes(recipe: Recipe, *, M: int, N: int, K: int) -> tuple[Pass, ...]:
    """Every kernel that turns x (M, K), w (N, K) and g (M, N) into operands, forward and backward.

    A scale that spans more than a chip holds needs a pass of its own to find the largest magnitude, and a small kernel
    that turns it into a scale; a history saves the pass and not the kernel. Blocks that are their own transpose are found
    once, and their two layouts are written together. Others are found once per layout.
    """
    sizes, made = {"M": M, "N": N, "K": K}, []
    for tensor, (along, down) in USES.items():
        rows, columns = (sizes[side] for side in STORED[tensor])
        count, read = rows * columns, rows * columns * READ[tensor]
        one, two = recipe.operand(tensor, along), recipe.operand(tensor, down)

        def amax(operand: Operand, rows: int, columns: int, coalesced: int, tensor: str = tensor,
                 read: int = read) -> list[Pass]:
            high, wide = (size or whole for size, whole in zip(operand.block, (rows, columns)))
            if max(high, coalesced) * wide <= ON_CHIP and not recipe.history:
                return []
            looks = 0 if recipe.history else read
            return [Pass(tensor=tensor, what="amax", read_bytes=looks, written_bytes=0)] * bool(looks) + [
                Pass(tensor=tensor, what="scale", read_bytes=0, written_bytes=0)]

        def cast(operand: Operand, rows: int, columns: int, layouts: int, tensor: str = tensor, read: int = read,
                 count: int = count) -> Pass:
            return Pass(tensor=tensor, what="cast" if layouts == 1 else "cast, both layouts", read_bytes=read,
                        written_bytes=layouts * (count * operand.bits / 8 + scale_bytes(operand, rows, columns)))

        if one is not None and one == two and one.transposes:
            made += [*amax(one, rows, columns, 1), cast(one, rows, columns, 2)]
            continue
        if one is not None:
            made += [*amax(one, rows, columns, 1), cast(one, rows, columns, 1)]
        if two is not None:
            made += [*amax(two, columns, rows, COALESCED), cast(two, columns, rows, 1)]
    return tuple(made)


def scale_bytes(operand: Operand, rows: int, columns: int) -> float:
    high, wide = (size or whole for size, whole in zip(operand.block, (rows, columns)))
    return -(-rows // high) * -(-columns // wide) * operand.scale_bytes


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """All Linears of one shape in one update, forward and backward. Seconds are of one call."""

    name: str
    M: int
    N: int
    K: int
    calls: int
    base_seconds: float         # three 16-bit products, and the weight's cast to 16 bits
    product_seconds: float
    cast_seconds: float

    @property
    def seconds(self) -> float:
        return self.product_seconds + self.cast_seconds

    @property
    def speedup(self) -> float:
        return self.base_seconds / self.seconds


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One update on one device under one recipe, beside the same in 16 bits."""

    recipe: str
    linears: tuple[LinearCost, ...]         # those that the recipe casts
    rest_seconds: Mapping[str, float]       # what it leaves alone
    bytes: Mapping[str, float]              # more (or, below zero, fewer) than in 16 bits, at the end of the forward

    @property
    def base_step_seconds(self) -> float:
        return sum(self.rest_seconds.values()) + sum(one.calls * one.base_seconds for one in self.linears)

    @property
    def step_seconds(self) -> float:
        return sum(self.rest_seconds.values()) + sum(one.calls * one.seconds for one in self.linears)

    @property
    def share(self) -> float:
        """Of the 16-bit step, what the recipe touches: Amdahl's p."""
        return sum(one.calls * one.base_seconds for one in self.linears) / self.base_step_seconds

    @property
    def linear_speedup(self) -> float:
        """Amdahl's s."""
        if not self.linears:
            return 1.0
        return (sum(one.calls * one.base_seconds for one in self.linears)
                / sum(one.calls * one.seconds for one in self.linears))

    @property
    def speedup(self) -> float:
        return amdahl(self.share, self.linear_speedup)

    @property
    def more_bytes(self) -> float:
        return sum(self.bytes.values())


def amdahl(share: float, speedup: float) -> float:
    """Of the whole, when `share` of its time gets `speedup` times faster. Amdahl 1967, https://doi.org/10.1145/1465482.1465560."""
    return 1 / (1 - share + share / speedup)


def product_seconds(M: int, N: int, K: int, machine: Machine, efficiency: Efficiency, *, dtype: str,
                    bits: float, result_bytes: float = BF16) -> float:
    """(M, K) x (K, N) with operands of `bits`; the result moves after the sum is done."""
    bandwidth = machine.bytes_per_second * efficiency.bandwidth
    arithmetic = 2 * M * N * K / (machine.peak_flops(dtype) * efficiency.products[dtype])
    operands = (M * K + K * N) * bits / 8 / bandwidth
    return max(max(arithmetic, operands) + M * N * result_bytes / bandwidth, efficiency.kernel_seconds)


def linear_cost(p: Product, recipe: Recipe, machine: Machine, efficiency: Efficiency = ASSUMED, *, base: str = "bf16",
                calls: int | None = None) -> LinearCost:
    """A Linear's three products of the size of `p`, and their casts, beside the `base` dtype."""
    M, N, K = p.M, p.N, p.K
    shapes = {"y": (M, N, K), "dx": (M, K, N), "dw": (N, K, M)}
    def kernel(nbytes: float) -> float:
        return max(nbytes / (machine.bytes_per_second * efficiency.casts), efficiency.kernel_seconds)

    low = {name: max(operand.bits for operand in pair) for name, pair in recipe.casts.items()}
    sixteen = {name: product_seconds(*shape, machine, efficiency, dtype=base, bits=16) for name, shape in shapes.items()}
    mixed = [product_seconds(*shapes[name], machine, efficiency, dtype=recipe.dtype, bits=low[name],
                             result_bytes=recipe.result_bytes)
             / recipe.product_share if name in low else seconds for name, seconds in sixteen.items()]
    return LinearCost(
        name=p.name, M=M, N=N, K=K, calls=p.calls if calls is None else calls,
        base_seconds=sum(sixteen.values()) + kernel(N * K * (FP32 + BF16)), product_seconds=sum(mixed),
        cast_seconds=sum(kernel(one.bytes * recipe.cast_factor) for one in cast_passes(recipe, M=M, N=N, K=K)))


def step_cost(config: Config, recipe: Recipe, machine: Machine, efficiency: Efficiency = ASSUMED, *,
              base: str = "bf16") -> StepCost:
    """One update of `config` on one `machine`. Raises ConfigError when the machine lacks the recipe's dtype."""
    m, pieces = config.model, config.accumulate
    forward = products(m, batch=config.batch // pieces)
    linears = [p for p in forward if not p.pairs]
    touched = {p: p.calls - recipe.kept.get(p.name, 0) for p in linears} if recipe.casts else {}
    costs = tuple(linear_cost(p, recipe, machine, efficiency, base=base, calls=calls * pieces)
                  for p, calls in touched.items() if calls)
    whole = Recipe(name=base, dtype=base)
    stay = [linear_cost(p, whole, machine, efficiency, base=base, calls=(p.calls - touched.get(p, 0)) * pieces)
            for p in linears]
    # a flash kernel does the scores once more in backward: 2 products forward, 5 backward
    flops = sum(p.flops * causal_share(p, m) for p in forward if p.pairs) * 3.5 * pieces
    bandwidth = machine.bytes_per_second * efficiency.bandwidth
    moved = pointwise_bytes(m, batch=config.batch, compute=BF16, stream=FP32) * efficiency.fused
    return StepCost(
        recipe=recipe.name, linears=costs,
        rest_seconds={
            "Linears that stay": sum(one.calls * one.base_seconds for one in stay),
            "attention": flops / (machine.peak_flops(base) * efficiency.attention),
            "norms, activations, loss": 2.5 * moved / bandwidth,
            "optimizer": ADAMW_BYTES * parameter_count(m) / bandwidth},
        bytes=memory_change(recipe, touched))


def memory_change(recipe: Recipe, linears: Mapping[Product, int]) -> dict[str, float]:
    """Bytes at the end of a micro-batch's forward, against 16 bits: what `ScaledLinear` keeps for its backward is cast.

    Master weights, gradients and optimizer states stay what they were, which is why so little changes.
    """
    rows = {"activations kept": 0.0, "weight copies": 0.0, "scales": 0.0, "amax histories": 0.0}
    for p, calls in linears.items():
        x, w = recipe.operand("x", "dw"), recipe.operand("w", "dx")
        if x is not None:
            rows["activations kept"] += calls * p.M * p.K * (x.bits / 8 - BF16)
            rows["scales"] += calls * scale_bytes(x, p.K, p.M)
        if w is not None:
            rows["weight copies"] += calls * p.N * p.K * (w.bits / 8 - BF16)
            rows["scales"] += calls * scale_bytes(w, p.K, p.N)
        rows["amax histories"] += calls * 3 * (1 + recipe.history) * FP32 if recipe.history else 0
    return rows


def emulated(recipe: Recipe, *, dtype: str, bits: float, folded: bool = False) -> Recipe:
    """The same casts, kept as values of a wider dtype and multiplied in it. `folded`: the scales are in the values."""
    casts = {name: tuple(replace(operand, bits=bits, scale_bytes=0 if folded else operand.scale_bytes) for operand in pair)
             for name, pair in recipe.casts.items()}
    return replace(recipe, dtype=dtype, casts=casts, result_bytes=BF16, product_share=1.0, cast_factor=1.0)
