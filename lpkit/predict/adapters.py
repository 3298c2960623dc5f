"""Operations of adapters: folds of the description of a model, which `lpkit.techniques.adapters`
names."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from lpkit.errors import ConfigError
from lpkit.predict.attention import qkv_numbers
from lpkit.techniques.adapters import (
    AdapterSettings,
    BottleneckSettings,
    DropoutSettings,
    LoraSettings,
    QuantisedBaseSettings,
    VirtualSettings,
    adapted,
    attended,
)
from lpkit.techniques.blocks import Operations, operations
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.operation import FP32, Hold, MicroBatch, Op, fused, linear
from lpkit.techniques.optimizers import BLOCK


def _beside(ops: Operations, settings: AdapterSettings, new: Callable[[Op], Iterable[Op]]
            ) -> Operations:
    """All frozen, and in place of each target what `new(op)` makes."""
    targets, block = adapted((op.name for op in ops.block if op.matmul), settings), []
    for op in ops.block:
        block += new(op) if op.matmul and op.name in targets else [op.frozen]
    return _frozen(ops, block)


def _frozen(ops: Operations, block: Iterable[Op]) -> Operations:
    return replace(ops, block=tuple(block), embed=ops.embed.frozen, head=ops.head.frozen,
                   positions=ops.positions.frozen, norm=ops.norm.frozen)


def lora(ops: Operations, s: MicroBatch, settings: LoraSettings) -> Operations:
    """y = W x + scale B A x. The input, which the frozen Linear need not save, is saved for A."""
    return _beside(ops, settings, _low_rank(s, settings))


def dora(ops: Operations, s: MicroBatch, settings: LoraSettings) -> Operations:
    """The same times a number for each row, which is made of W, A and B: reads W once more."""
    low_rank = _low_rank(s, settings)

    def new(op: Op) -> Iterator[Op]:
        (K, out), r = op.matmul, settings.rank
        wide, residual = s.tokens * out * s.compute_bytes, op.writes_residual
        yield from low_rank(replace(op, writes_residual=residual and s.mixed))
        parts = 1 if settings.shared else len(fused(s.model, f"{op.name}.weight")) or 1
        # backward: gradients of both factors; that of the residual stream is needed still
        hold = Hold(nbytes=2 * wide, frees=1.0, grows=wide * (residual and not s.mixed))
        yield Op(name=f"{op.name}.magnitude", part=op.part, params=out,
                 saved_bytes=wide + out * (FP32 + s.compute_bytes),     # z, the norm, and its share
                 saved_itemsize=s.compute_bytes, backward=(hold,),
                 moved_bytes=2 * wide + op.weights * s.residual_bytes,
                 weight_flops=2 * r * (out * K + parts * r * K + out * r))

    return _beside(ops, settings, new)


def _low_rank(s: MicroBatch, settings: LoraSettings) -> Callable[[Op], Iterator[Op]]:
    def new(op: Op) -> Iterator[Op]:
        K, out = op.matmul
        if (most := min(K, out)) < settings.rank:
            raise ConfigError(f"model.changes={settings.name} has rank {settings.rank}, more than "
                              f"{op.name} ({out} x {K}) has; use at most {most}")
        rows = () if settings.shared else fused(s.model, f"{op.name}.weight")
        rows, r = rows or (out,), settings.rank
        thin = linear(f"{op.name}.A", s, K, len(rows) * r, cut=op.cut, bias=False)
        yield replace(thin, saved_bytes=op.saved_bytes, writes_residual=False, shares="input")
        for i, share in enumerate(rows):
            one = linear(f"{op.name}.B.{i}", s, r, out * share // sum(rows), cut=op.cut, bias=False)
            yield replace(one, reads_residual=False, writes_residual=op.writes_residual)
        yield replace(op.frozen, shares="output")

    return new


def in_codes(ops: Operations, s: MicroBatch, settings: QuantisedBaseSettings) -> Operations:
    """A byte of codes becomes an index of int32, then float32, then the compute dtype."""
    bits = FORMATS[settings.format].bits if settings.format in FORMATS else 4
    names, index = {op.name for op in ops.block}, FP32 * bits / 8
    wide = FP32 + FP32 / settings.block + max(index, s.compute_bytes % FP32)

    def stored(op: Op) -> Op:
        blocks = -(-op.weights // settings.block)       # the last is filled up
        scales = blocks + FP32 * (-(-blocks // BLOCK) + 1) if settings.double else FP32 * blocks
        # several Bs have their results side by side in a view, whose gradient autograd copies
        again = s.tokens * op.matmul[1] * s.compute_bytes * (f"{op.name}.B.1" in names)
        return replace(op, stored_bytes=blocks * settings.block * bits // 8 + scales,
                       made_bytes=op.weights * wide + again,
                       moved_bytes=op.weights * (2 * index + 2 * FP32 + s.compute_bytes))

    block = tuple(stored(op) if op.matmul and not op.trained else op for op in ops.block)
    if block == ops.block:
        raise ConfigError(f"model.changes={settings.name} is of what adapters leave frozen, and none "
                          f"comes before it; name one: model.changes=lora,{settings.name}")
    return replace(ops, block=block)


def bottleneck(ops: Operations, s: MicroBatch, settings: BottleneckSettings) -> Operations:
    """y + up(gelu(down(y))) behind a Linear."""
    def new(op: Op) -> Iterator[Op]:
        out, w = op.matmul[1], settings.width
        wide = s.tokens * w * s.compute_bytes
        down = linear(f"{op.name}.down", s, out, w, cut="", bias=True)
        up = linear(f"{op.name}.up", s, w, out, cut="", bias=True)
        yield op.frozen
        yield down
        yield Op(name=f"{op.name}.gelu", part="", saved_bytes=wide, saved_itemsize=s.compute_bytes,
                 moved_bytes=2 * wide, backward=(Hold(nbytes=wide, frees=1.0),))
        yield up

    return _beside(ops, settings, new)


def vectors(ops: Operations, s: MicroBatch, settings: AdapterSettings) -> Operations:
    """Keys and values, and what enters the MLP's last product, times a learned vector."""
    def new(op: Op) -> Iterator[Op]:
        K, out = op.matmul
        queries = op.name == "attention.qkv"
        numbers, whole = (out - s.model.H * s.model.E, out) if queries else (K, K)
        scaled, saved = (s.tokens * n * s.compute_bytes for n in (numbers, whole))
        # gradients of both factors, and keys and values beside the queries' again
        hold = Hold(nbytes=2 * scaled + saved * queries, frees=1.0)
        scale = Op(name=f"{op.name}.scale", part=op.part, params=numbers, saved_bytes=saved,
                   saved_itemsize=s.compute_bytes, moved_bytes=2 * scaled, backward=(hold,))
        yield from (op.frozen, scale) if queries else (scale, op.frozen)

    return _beside(ops, settings, new)


def prompt(ops: Operations, s: MicroBatch, settings: VirtualSettings) -> Operations:
    """Blocks see more tokens; the last norm, the head and the loss see those of the text."""
    m, share = s.model, 1 + settings.length / s.model.T
    longer = operations(replace(s, model=attended(m)))
    more = s.stream_bytes * (share - 1)
    norm = ops.norm.frozen
    cut = Hold(nbytes=s.stream_bytes + more, grows=more)      # its gradient is padded with zeros
    # what it saves of the text is a view of all
    norm = replace(norm, backward=(*norm.backward, cut), saved_bytes=norm.saved_bytes + more)
    own = Op(name="prompt", part="prompt", params=settings.length * m.D,
             shape=(settings.length, m.D))
    block = (replace(op.frozen, tokens_share=share) for op in longer.block)
    return replace(_frozen(ops, block), prompt=own, positions=longer.positions.frozen, norm=norm)


def prefix(ops: Operations, s: MicroBatch, settings: VirtualSettings) -> Operations:
    """Attention is that of a longer text, whose q, k and v are made anew: no view keeps their
    product."""
    m, P = s.model, settings.length
    longer = replace(s, model=attended(m), made_anew=True)
    [here, there] = (next(op for op in one.block if op.name == "attention")
                     for one in (ops, operations(longer)))
    # backward: zeros for the results that were left out; at the end what is of the prefix has gone
    more = s.batch * P * m.H * m.E * s.compute_bytes
    work, turn = there.backward
    grows = sum(hold.grows for hold in here.backward) - more - work.grows
    cut = Hold(nbytes=s.tokens * m.H * m.E * s.compute_bytes + more, grows=more)
    there = replace(there, backward=(cut, work, replace(turn, nbytes=here.backward[1].nbytes,
                                                        grows=grows)),
                    saved_bytes=(here if s.attends_again else there).saved_bytes)
    own = Op(name="attention.prefix", part="attention", params=P * 2 * m.G * m.E,
             shape=(P, 2 * m.G * m.E),
             moved_bytes=2 * longer.tokens * qkv_numbers(m) * s.compute_bytes)
    block = []
    for op in ops.block:
        block += [own, there.frozen] if op is here else [op.frozen]
    return _frozen(ops, block)


def dropped(ops: Operations, s: MicroBatch, settings: DropoutSettings) -> Operations:
    """A CPU keeps the factor of each number, a GPU a byte. The first block keeps fewer of LoRA."""
    m, compute, on_cpu, block = s.model, s.compute_bytes, s.kind == "cpu", []

    def drop(name: str, numbers: float, itemsize: int, grows: bool = False) -> Op:
        wide = numbers * itemsize
        return Op(name=name, part="", saved_bytes=wide if on_cpu else numbers, moved_bytes=3 * wide,
                  saved_itemsize=itemsize,
                  backward=(Hold(nbytes=wide, frees=1.0, grows=wide * grows),))

    for op in ops.block:
        if settings.adapters and op.name.endswith(".A"):
            numbers = s.tokens * op.matmul[0]
            block.append(drop(f"{op.name[:-1]}drop", numbers,
                              s.residual_bytes if op.reads_residual else compute))
            op = replace(op, saved_bytes=numbers * (s.operand_bytes or compute))
        if settings.attention and op.name == "attention":
            # in backward the dropped ones are freed before the gradient of the others is there
            pairs, (work, *rest) = s.batch * m.H * m.T**2, op.backward
            more = pairs * (2 * compute if on_cpu else 1)
            at_once = work.nbytes + more * s.attends_again - pairs * compute * on_cpu
            op = replace(op, saved_bytes=op.saved_bytes + more * (not s.attends_again),
                         backward=(replace(work, nbytes=at_once), *rest), score_passes=tuple(n + 3 for n in op.score_passes))
        if settings.residual and op.writes_residual:
            op = replace(op, writes_residual=s.mixed)
        block.append(op)
        if settings.residual and op.name in ("attention.out", "mlp.down"):
            block.append(drop(f"{op.part}.dropout", s.tokens * m.D, compute, grows=not s.mixed))
    due = ["attention.out", "mlp.down"] * (settings.residual > 0) + ["attention"]
    if missing := [name for name in due if name not in {op.name for op in block}]:
        raise ConfigError(f"model.changes={settings.name} drops what comes of {' and '.join(due)}, "
                          f"and model.block={m.block} has no {missing[0]}; use another block")
    if settings.embedding and ops.embed.trained:    # until the end of backward
        mask = ops.positions.saved_bytes + drop("", s.tokens * m.D, s.residual_bytes).saved_bytes
        ops = replace(ops, positions=replace(ops.positions, name="attention", saved_bytes=mask))
    return replace(ops, block=tuple(block))
