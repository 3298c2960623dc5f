"""Rewrite a model's operations for adapters. Each function takes an Operations and returns a new
Operations.

The rows of `lpkit.techniques.adapters` name these functions. Example: `lora` of rank r on a Linear
`mlp.up` (K inputs, N outputs), for M tokens:

    before   mlp.up     W (N, K)    saves x (M, K)
    after    mlp.up.A   A (r, K)    saves x (M, K); trained
             mlp.up.B.0 B (N, r)    saves A x (M, r); trained
             mlp.up     W (N, K)    saves nothing; frozen, so it needs no gradient of W

With M = 4, K = 2, r = 1 in float32, x has 4 * 2 * 4 = 32 bytes and A x has 4 * 1 * 4 = 16 bytes.

A and W read the same x, so their gradients of x are added (`shares="input"` on A). The results of B
and W are added to one y, so both need dy (`shares="output"` on W). A fused Linear (q, k and v; gate
and up) has an A and a B for each of its parts, and all As are one matmul. With the setting
`shared`, the fused Linear has a single A and a single B. `in_codes` stores frozen weights as codes
and scales, and each matmul decodes them first.
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
    """Return `ops` with all operations frozen, and with `new(op)` in the place of each Linear that
    the adapter's `settings` target."""
    targets, block = adapted((op.name for op in ops.block if op.matmul), settings), []
    for op in ops.block:
        block += new(op) if op.matmul and op.name in targets else [op.frozen]
    return frozen(ops, block)


def frozen(ops: Operations, block: Iterable[Op]) -> Operations:
    """Return `ops` with the operations `block` in each block, and all others frozen."""
    return replace(ops, block=tuple(block), embed=ops.embed.frozen, head=ops.head.frozen,
                   positions=ops.positions.frozen, norm=ops.norm.frozen)


def lora(ops: Operations, s: MicroBatch, settings: LoraSettings) -> Operations:
    """Return the operations for y = W x + scale B A x. A saves the input x for its own gradient.
    The frozen W has no gradient, so W does not save x."""
    return beside(ops, settings, low_rank(s, settings))


def low_rank(s: MicroBatch, settings: LoraSettings) -> Callable[[Op], Iterator[Op]]:
    """Return a function that yields the operations A, B (one for each part) and the frozen Linear
    in the place of a Linear. The function raises ConfigError if the rank is too large."""
    def new(op: Op) -> Iterator[Op]:
        K, out = op.matmul
        if (most := min(K, out)) < settings.rank:
            raise ConfigError(f"model.changes={settings.name} has rank {settings.rank}, more than "
                              f"{op.name} ({out} x {K}) has; use at most {most}")
        # rows: output sizes of the parts of a fused Linear. Each part has an A and a B of its own
        # unless `shared` is set.
        rows = () if settings.shared else fused(s.model, f"{op.name}.weight")
        rows, r = rows or (out,), settings.rank
        thin = linear(f"{op.name}.A", s, K, len(rows) * r, cut=op.cut, bias=False)
        # bytes that an adapter moves in addition to its matmuls: per number of its input x, and per
        # number of its result
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
    """Return the operations with frozen weights that are stored as codes (4 bits, for example)
    and scales. Raises ConfigError if no weight is frozen.

    Each matmul first decodes its weight: each code becomes an int32 index, then a float32 value,
    then a number of the compute dtype. `made_bytes` counts these temporaries, `moved_bytes` what
    the decoding reads and writes."""
    bits = FORMATS[settings.format].bits if settings.format in FORMATS else 4
    names, index = {op.name for op in ops.block}, FP32 * bits / 8
    # bytes per weight while it is decoded: its float32 value, its share of the block's float32
    # scale, and either its index or its result, whichever is larger
    wide = FP32 + FP32 / settings.block + max(index, s.compute_bytes % FP32)

    def stored(op: Op) -> Op:
        blocks = -(-op.weights // settings.block)       # rounded up: the last block is padded
        # bytes of all scales: float32, or with `double` one byte each, plus a float32 scale for
        # each BLOCK of them and the float32 mean
        scales = blocks + FP32 * (-(-blocks // BLOCK) + 1) if settings.double else FP32 * blocks
        # the Bs of a fused Linear write to views of one tensor; autograd copies its gradient
        again = s.tokens * op.matmul[1] * s.compute_bytes * (f"{op.name}.B.1" in names)
        decoded, moved = wide, 2 * index + 2 * FP32 + s.compute_bytes
        if s.code_bytes:        # this stack decodes in a single kernel, without an index
            decoded, moved = s.compute_bytes, s.code_bytes
        return replace(op, stored_bytes=blocks * settings.block * bits // 8 + scales,
                       made_bytes=op.weights * decoded + again, moved_bytes=op.weights * moved)

    block = tuple(stored(op) if op.matmul and not op.trained else op for op in ops.block)
    if block == ops.block:
        raise ConfigError(f"model.changes={settings.name} is of what adapters leave frozen, and "
                          f"none comes before it; name one: model.changes=lora,{settings.name}")
    return replace(ops, block=block)
