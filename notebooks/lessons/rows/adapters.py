"""Adapters of notebook 24 beyond LoRA, and dropout: rows of `model.changes`, with their formulas.

    import lessons.rows.adapters        or --import lessons.rows.adapters behind a command

LoRA is in `lpkit.techniques.adapters`. `lessons.rows.adapters_torch` has the modules of these rows
and reads and writes peft's files of a prompt and a prefix.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lpkit.errors import ConfigError
from lpkit.predict.adapters import beside, frozen, low_rank
from lpkit.predict.attention import qkv_numbers
from lpkit.techniques.adapters import (
    AdapterRow,
    AdapterSettings,
    LoraSettings,
    LowRank,
    QuantisedBaseSettings,
    attended,
)
from lpkit.techniques.attention import Rule
from lpkit.techniques.blocks import MODEL_CHANGES, Operations, operations
from lpkit.techniques.operation import FP32, POSITIONS, Hold, Kind, MicroBatch, Op, fused, linear
from lpkit.techniques.row import Settings
from lpkit.values import Count, Rate

TORCH = "lessons.rows.adapters_torch:"

# ---- Settings


@dataclass(frozen=True, kw_only=True)
class StableLoraSettings(LoraSettings):
    @property
    def scale(self) -> float:
        return self.alpha / math.sqrt(self.rank)


@dataclass(frozen=True, kw_only=True)
class DoraSettings(LoraSettings):
    reads_base = True
    vectors: ClassVar[Mapping[str, str]] = {"magnitude": "lora_magnitude_vector"}


@dataclass(frozen=True, kw_only=True)
class PissaSettings(LoraSettings):
    keeps_base, reads_base = False, True

    @property
    def scale(self) -> float:
        return 1.0      # A and B are a part of the weight


@dataclass(frozen=True, kw_only=True)
class BottleneckSettings(AdapterSettings):
    targets: tuple[str, ...] = ("attention.out", "mlp.down")
    width: Count = 64


@dataclass(frozen=True, kw_only=True)
class VirtualSettings(Settings):
    """`length` learned positions before each text. The text still has model.context tokens."""

    in_stream: ClassVar[bool] = False       # prompt tokens run through the blocks, too
    length: Count = 20

    @property
    def places(self) -> int:
        return self.length

    def problem(self, m: Any) -> str:
        if len(m.changes) > 1:
            return (f"model.changes={self.name} cannot be combined with other changes; leave the "
                    f"others out")
        if not POSITIONS[m.position].turns:
            return (f"model.changes={self.name} adds positions to {m.T} tokens, and "
                    f"model.position={m.position} has no more positions; set model.position=rope")
        if m.attention.rule(m.T) != Rule():
            return (f"model.changes={self.name} must be visible to every token, and "
                    f"model.attention={m.attention.name} may hide it; set model.attention=full")
        return ""


@dataclass(frozen=True, kw_only=True)
class PromptSettings(VirtualSettings):
    in_stream = True


@dataclass(frozen=True, kw_only=True)
class DropoutSettings(Settings):
    """Shares of elements that an update sets to 0; the remaining elements are divided by 1 - share.
    Evaluation and sampling drop nothing."""

    embedding: Rate = 0.0   # share of embeddings and positions (GPT-2's embd_pdrop)
    residual: Rate = 0.0    # share of attention's and MLP's outputs (resid_pdrop)
    attention: Rate = 0.0   # share of attention's probabilities (attn_pdrop)
    adapters: Rate = 0.0    # share of the input of LoRA's A (peft's lora_dropout)

    def problem(self, m: Any) -> str:
        before = [type(type_before) for type_before in m.changes[:-1]]
        others = [type_before for type_before in before if type_before is not QuantisedBaseSettings]
        lora = [type_before for type_before in others if issubclass(type_before, LoraSettings)]
        return next((f"model.changes={self.name} {why}" for holds, why in (
            (not any((self.embedding, self.residual, self.attention, self.adapters)),
             "drops nothing; set embedding, residual, attention or adapters"),
            (m.changes[-1] != self or lora != others,
             "comes last, behind LoRA and quantised-base alone; leave the others out"),
            (self.adapters and (not lora or DoraSettings in lora),
             f"has adapters={self.adapters} and no LoRA; name lora, rslora or pissa before it"),
            (self.attention and m.attention.rule(m.T) is None,
             f"needs probabilities, and model.attention={m.attention.name} has none; set "
             f"attention=0"),
            ) if holds), "")

    @property
    def drops(self) -> bool:
        return self.attention > 0


def _draws(config: Any, recipe: Any) -> str:
    system, offload = config.system, config.memory.activation_offload.name
    if config.parallel.devices > 1 or config.governors or offload != "device":
        return ("draws and keeps the masks of one whole device so far; leave out parallel, "
                "governors and memory.activation_offload")
    # a GPU uses both by default
    by_default = "auto" if system.device == "cpu" else False
    if not {system.compile, system.cuda_graphs} <= {False, by_default}:
        return ("draws masks outside of compiled code and CUDA graphs; set system.compile=false "
                "and system.cuda_graphs=false")
    return ""


# ---- Formulas


def dora(ops: Operations, s: MicroBatch, settings: LoraSettings) -> Operations:
    """Return the operations with DoRA: low-rank products, whose rows are scaled by factors computed
    from W, A and B, so W is read once more."""
    product = low_rank(s, settings)

    def new(op: Op) -> Iterator[Op]:
        (K, out), r = op.matmul, settings.rank
        wide, residual = s.tokens * out * s.compute_bytes, op.writes_residual
        yield from product(replace(op, writes_residual=residual and s.mixed))
        parts = 1 if settings.shared else len(fused(s.model, f"{op.name}.weight")) or 1
        # backward: gradients of both factors; the residual stream's gradient is still alive
        hold = Hold(nbytes=2 * wide, frees=1.0, grows=wide * (residual and not s.mixed))
        yield Op(name=f"{op.name}.magnitude", part=op.part, params=out,
                 saved_bytes=wide + out * (FP32 + s.compute_bytes),     # z, the norm, scale factors
                 saved_itemsize=s.compute_bytes, backward=(hold,),
                 moved_bytes=2 * wide + op.weights * s.residual_bytes,
                 weight_flops=2 * r * (out * K + parts * r * K + out * r))

    return beside(ops, settings, new)


def bottleneck(ops: Operations, s: MicroBatch, settings: BottleneckSettings) -> Operations:
    """Return the operations with y + up(gelu(down(y))) after each target Linear."""
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

    return beside(ops, settings, new)


def vectors(ops: Operations, s: MicroBatch, settings: AdapterSettings) -> Operations:
    """Return the operations with IA3: keys, values and the input of the MLP's last matmul are each
    multiplied by a learned vector."""
    def new(op: Op) -> Iterator[Op]:
        K, out = op.matmul
        queries = op.name == "attention.qkv"
        numbers, whole = (out - s.model.H * s.model.E, out) if queries else (K, K)
        scaled, saved = (s.tokens * n * s.compute_bytes for n in (numbers, whole))
        # bytes that backward holds: the gradients of both factors and, for attention.qkv, a copy of
        # queries, scaled keys and scaled values
        hold = Hold(nbytes=2 * scaled + saved * queries, frees=1.0)
        scale = Op(name=f"{op.name}.scale", part=op.part, params=numbers, saved_bytes=saved,
                   saved_itemsize=s.compute_bytes, moved_bytes=2 * scaled, backward=(hold,))
        yield from (op.frozen, scale) if queries else (scale, op.frozen)

    return beside(ops, settings, new)


def prompt(ops: Operations, s: MicroBatch, settings: VirtualSettings) -> Operations:
    """Return the operations with a prompt. Blocks see the prompt and the text; the last norm, the
    head and the loss see only the text."""
    m, share = s.model, 1 + settings.length / s.model.T
    longer = operations(replace(s, model=attended(m)))
    more = s.stream_bytes * (share - 1)
    norm = ops.norm.frozen
    cut = Hold(nbytes=s.stream_bytes + more, grows=more)      # its gradient is padded with zeros
    # the norm saves a view, which keeps the stream of prompt and text alive
    norm = replace(norm, backward=(*norm.backward, cut), saved_bytes=norm.saved_bytes + more)
    own = Op(name="prompt", part="prompt", params=settings.length * m.D,
             shape=(settings.length, m.D))
    block = (replace(op.frozen, tokens_share=share) for op in longer.block)
    return replace(frozen(ops, block), prompt=own, positions=longer.positions.frozen, norm=norm)


def prefix(ops: Operations, s: MicroBatch, settings: VirtualSettings) -> Operations:
    """Return the operations with a prefix. Attention sees a longer text, whose q, k and v are new
    tensors and not views, so the output of the fused matmul can be freed."""
    m, P = s.model, settings.length
    longer = replace(s, model=attended(m), made_anew=True)
    [here, there] = (next(op for op in each.block if op.name == "attention")
                     for each in (ops, operations(longer)))
    # backward: zero gradients for the dropped results; at the end, the prefix's tensors are freed
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
    return frozen(ops, block)


def dropped(ops: Operations, s: MicroBatch, settings: DropoutSettings) -> Operations:
    """Return the operations with dropout. For backward, a CPU saves a factor per element, and a GPU
    saves one byte per element."""
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
            # in backward, the dropped scores are freed before the others' gradient is allocated
            pairs, (work, *rest) = s.batch * m.H * m.T**2, op.backward
            more = pairs * (2 * compute if on_cpu else 1)
            at_once = work.nbytes + more * s.attends_again - pairs * compute * on_cpu
            op = replace(op, saved_bytes=op.saved_bytes + more * (not s.attends_again),
                         backward=(replace(work, nbytes=at_once), *rest),
                         score_passes=tuple(n + 3 for n in op.score_passes))
        if settings.residual and op.writes_residual:
            op = replace(op, writes_residual=s.mixed)
        block.append(op)
        if settings.residual and op.name in ("attention.out", "mlp.down"):
            block.append(drop(f"{op.part}.dropout", s.tokens * m.D, compute, grows=not s.mixed))
    due = ["attention.out", "mlp.down"] * (settings.residual > 0) + ["attention"]
    if missing := [name for name in due if name not in {op.name for op in block}]:
        raise ConfigError(f"model.changes={settings.name} drops what comes of {' and '.join(due)}, "
                          f"and model.block={m.block} has no {missing[0]}; use another block")
    if settings.embedding and ops.embed.trained:    # saved until the end of backward
        mask = ops.positions.saved_bytes + drop("", s.tokens * m.D, s.residual_bytes).saved_bytes
        ops = replace(ops, positions=replace(ops.positions, name="attention", saved_bytes=mask))
    return replace(ops, block=tuple(block))


# ---- Rows

MODEL_CHANGES |= {
    "bottleneck": AdapterRow(
        operations=bottleneck, why="two small layers behind each part of a block, the rest frozen",
        source="Houlsby et al. 2019, arXiv:1902.00751", settings=BottleneckSettings(),
        implementation=TORCH + "add_bottlenecks"),
    "dora": LowRank(
        operations=dora, why="LoRA in the direction of each row, whose length is learned apart",
        source="Liu et al. 2024, arXiv:2402.09353", settings=DoraSettings(),
        implementation=TORCH + "add_dora", theirs={"peft_type": "LORA", "use_dora": True}),
    "ia3": AdapterRow(
        operations=vectors, why="keys, values and the MLP's inner numbers times learned vectors, "
        "the rest frozen", source="Liu et al. 2022, arXiv:2205.05638",
        implementation=TORCH + "add_scales",
        settings=AdapterSettings(targets=("attention.qkv", "mlp.down"))),
    "pissa": LowRank(
        why="LoRA that begins as the largest singular directions of the matrix",
        source="Meng et al. 2024, arXiv:2404.02948", settings=PissaSettings(),
        implementation=TORCH + "add_pissa"),
    "prefix": AdapterRow(
        operations=prefix, why="learned keys and values before those of each layer, the model "
        "frozen",
        source="Li and Liang 2021, arXiv:2101.00190, without the MLP that makes them in training",
        settings=VirtualSettings(), implementation=TORCH + "add_prefix",
        theirs={"peft_type": "PREFIX_TUNING"}, saves=TORCH + "save_places",
        brings=TORCH + "bring_places"),
    "prompt": AdapterRow(
        operations=prompt, why="learned vectors before the embeddings of the text, the model "
        "frozen",
        source="Lester et al. 2021, arXiv:2104.08691", settings=PromptSettings(),
        implementation=TORCH + "add_prompt", theirs={"peft_type": "PROMPT_TUNING"},
        saves=TORCH + "save_places", brings=TORCH + "bring_places"),
    "rslora": LowRank(
        why="LoRA whose product counts alpha over the root of its rank",
        source="Kalajdzievski 2023, arXiv:2312.03732", settings=StableLoraSettings()),
}
MODEL_CHANGES["dropout"] = Kind(
    operations=dropped, why="an update sets a share of numbers to 0", problem=_draws,
    source="Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html",
    settings=DropoutSettings(), implementation=TORCH + "add_dropout")
