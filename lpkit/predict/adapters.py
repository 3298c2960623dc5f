"""Rewrite a model's operations for adapters: each function takes operations and returns new ones.

`lpkit.techniques.adapters` has the rows that name these functions. Example: `lora` of rank r on a
Linear `mlp.up` (K inputs, N outputs), for tokens M:

    before   mlp.up     W (N, K)    saves x (M, K)
    after    mlp.up.A   A (r, K)    saves x (M, K); trained
             mlp.up.B.0 B (N, r)    saves A x (M, r); trained
             mlp.up     W (N, K)    saves nothing; frozen, so it needs no gradient of W

With M = 4, K = 2, r = 1 in float32, x has 4 * 2 * 4 = 32 bytes and A x has 4 * 1 * 4 = 16 bytes.

A and W read the same x, so their gradients of x are added (`shares="input"` on A). B and W add to
the same y, so both need dy (`shares="output"` on W). A fused Linear (q, k and v; gate and up) has
an A and a B for each part, with all As in one Linear; if `shared`, it has a single pair.
`in_codes` stores frozen weights as codes and scales, which each product decodes first.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from lpkit.errors import ConfigError
from lpkit.techniques.adapters import (
    AdapterSettings,
    LoraSettings,
    QuantisedBaseSettings,
    adapted,
)
from lpkit.techniques.blocks import Operations
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.operation import FP32, MicroBatch, Op, fused, linear
from lpkit.techniques.optimizers import BLOCK


def beside(ops: Operations, settings: AdapterSettings, new: Callable[[Op], Iterable[Op]]
           ) -> Operations:
    """Freeze all operations and replace each targeted Linear by the operations of `new(op)`."""
    targets, block = adapted((op.name for op in ops.block if op.matmul), settings), []
    for op in ops.block:
        block += new(op) if op.matmul and op.name in targets else [op.frozen]
    return frozen(ops, block)


def frozen(ops: Operations, block: Iterable[Op]) -> Operations:
    return replace(ops, block=tuple(block), embed=ops.embed.frozen, head=ops.head.frozen,
                   positions=ops.positions.frozen, norm=ops.norm.frozen)


def lora(ops: Operations, s: MicroBatch, settings: LoraSettings) -> Operations:
    """Model y = W x + scale B A x. A saves the input x; the frozen Linear does not need it."""
    return beside(ops, settings, low_rank(s, settings))


def low_rank(s: MicroBatch, settings: LoraSettings) -> Callable[[Op], Iterator[Op]]:
    def new(op: Op) -> Iterator[Op]:
        K, out = op.matmul
        if (most := min(K, out)) < settings.rank:
            raise ConfigError(f"model.changes={settings.name} has rank {settings.rank}, more than "
                              f"{op.name} ({out} x {K}) has; use at most {most}")
        # rows: output sizes of the parts of a fused Linear; each part has its own A unless shared
        rows = () if settings.shared else fused(s.model, f"{op.name}.weight")
        rows, r = rows or (out,), settings.rank
        thin = linear(f"{op.name}.A", s, K, len(rows) * r, cut=op.cut, bias=False)
        # bytes that an adapter moves besides its matmuls, per number of its input and its result
        of_input, of_result = s.adapter_bytes
        yield replace(thin, saved_bytes=op.saved_bytes, writes_residual=False, shares="input",
                      moved_bytes=s.tokens * K * len(rows) * of_input)
        for i, share in enumerate(rows):
            up = linear(f"{op.name}.B.{i}", s, r, out * share // sum(rows), cut=op.cut, bias=False)
            yield replace(up, reads_residual=False, writes_residual=op.writes_residual,
                          moved_bytes=s.tokens * up.matmul[1] * of_result)
        yield replace(op.frozen, shares="output")

    return new


def in_codes(ops: Operations, s: MicroBatch, settings: QuantisedBaseSettings) -> Operations:
    """Model frozen weights that are stored as codes. To decode, each code becomes an int32 index,
    then a float32 value, then a number of the compute dtype."""
    bits = FORMATS[settings.format].bits if settings.format in FORMATS else 4
    names, index = {op.name for op in ops.block}, FP32 * bits / 8
    # bytes a weight while it is decoded: float32 value, its block's scale, and index or result
    wide = FP32 + FP32 / settings.block + max(index, s.compute_bytes % FP32)

    def stored(op: Op) -> Op:
        blocks = -(-op.weights // settings.block)       # the last block is filled up
        scales = blocks + FP32 * (-(-blocks // BLOCK) + 1) if settings.double else FP32 * blocks
        # several Bs write side by side into one view, whose gradient autograd copies
        again = s.tokens * op.matmul[1] * s.compute_bytes * (f"{op.name}.B.1" in names)
        decoded, moved = wide, 2 * index + 2 * FP32 + s.compute_bytes
        if s.code_bytes:        # a single kernel decodes, without an index
            decoded, moved = s.compute_bytes, s.code_bytes
        return replace(op, stored_bytes=blocks * settings.block * bits // 8 + scales,
                       made_bytes=op.weights * decoded + again, moved_bytes=op.weights * moved)

    block = tuple(stored(op) if op.matmul and not op.trained else op for op in ops.block)
    if block == ops.block:
        raise ConfigError(f"model.changes={settings.name} is of what adapters leave frozen, and "
                          f"none comes before it; name one: model.changes=lora,{settings.name}")
    return replace(ops, block=block)
