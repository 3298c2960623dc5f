"""Published peaks of memory beside the ledger's. Theirs; none was measured by this project.

The runs are those of `published` whose page has a peak. What the stacks do otherwise than lpkit is
said here, each with its source; nothing is fitted. Bytes are allocated ones: pages that say "GB"
mean GiB (torchao's script reads torchtitan's GiB; BigScience's cards of 79.3 GiB hold "77GB").
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from lessons.published import Run, runs, taken
from lpkit.errors import ConfigError
from lpkit.predict.compare import Comparison, Row, percent
from lpkit.predict.ledger import LOSS, UPDATE, Memory, memory
from lpkit.predict.walk import HEAD, LAST
from lpkit.techniques.operation import MicroBatch

GIB = 2**30
TORCHTITAN = ("torchtitan", "torchtitan + torchao")
# Of February 2022: ZeRO 1 makes float32 gradients of its shard when it updates (DeepSpeed,
# runtime/zero/stage_1_and_2.py, `single_grad_partition`), and its allocator has no expandable
# segments. Its page reads nvidia-smi, which counts CUDA's kernels, too: 1,271 MiB (lines 86, 962).
MEGATRON = ("Megatron-DeepSpeed",)
KERNELS_BYTES = 1271 * 2**20
# of allocated bytes, what is reserved without expandable segments: the median of ten runs of
# Megatron-LM and Megatron-DeepSpeed, 1.08 to 1.27, whose logs have both peaks (docs/ledger.md)
RESERVED_SHARE = 1.20
# Float8Linear keeps its operands in 16 bits and casts them once more in backward: torchao,
# torchao/float8/float8_linear.py line 45, `ctx.save_for_backward(input_hp, weight_hp_t)`.
KEPT_IN_16_BITS = TORCHTITAN
# The loss is compiled with the model: its logits and their gradient stay in 16 bits. torchtitan,
# torchtitan/components/loss.py line 29 at e7c0cae, 2c8b594 and 6fc499f; commented out from
# e8977b0 (2024-12-18) to bbb1b61 (2025-04-02).
LOSS_COMPILED = {("torchtitan-h200", "h200"), ("torchao", "mi300x"), ("torchao", "b200")}


def held(run: Run) -> Memory:
    """Raises ConfigError where the ledger cannot take the run, with the reason."""
    if run.layout is None:
        raise ConfigError("not stated: the layout")
    how, config = run.how, run.config
    if run.stack in KEPT_IN_16_BITS:
        how["precision"] = "bf16"
    predicted = memory(config.replace({"system.stack": run.stack_row}), run.machine,
                       layout=run.layout, **how)
    s = MicroBatch(model=config.model, batch=run.micro_batch or 1, kind="gpu", compute_bytes=2)
    cut = run.layout.tensor * run.layout.context
    if run.recompute == "selective-op":
        predicted = _without_every_second(predicted, s, cut)
    if (run.source.name, run.machine) in LOSS_COMPILED:
        logits = s.tokens * s.model.V / cut * s.compute_bytes
        float32 = 2 * logits
        at = next(row.at for row in predicted.rows if row.name == "temporaries")
        predicted = _changed(predicted, {"logits and loss": {LOSS: logits},
                                         "logits' gradients": {LOSS: logits},
                                         "temporaries": {HEAD: at[HEAD] - float32}})
        predicted = replace(predicted, unused_bytes=0.0)
    if run.stack in MEGATRON:
        masters = next(row for row in predicted.rows if row.name == "master weights")
        predicted = replace(predicted, rows=(*predicted.rows, masters._replace(
            name="float32 gradients", at={UPDATE: masters.bytes})))
    return predicted


def _without_every_second(predicted: Memory, s: MicroBatch, cut: float) -> Memory:
    """torchtitan's "selective op" keeps the first, third, ... product of a block: of wq, wk, wv,
    wo, w1, w3, w2 those of wq, wv, w1 and w2 (torchtitan, parallelize_llama.py, `_custom_policy`).
    "selective" keeps all."""
    m = s.model
    left_out = s.tokens / cut * s.compute_bytes * (m.G * m.E + m.D + m.F)       # wk, wo, w3
    less = {LOSS: m.L * left_out, HEAD: m.L * left_out, LAST: (m.L - 1) * left_out}
    row = next(row for row in predicted.rows if row.name == "activations")
    return _changed(predicted, {"activations": {moment: row.at[moment] - nbytes
                                                for moment, nbytes in less.items()}})


def _changed(predicted: Memory, at: dict[str, dict[str, float]]) -> Memory:
    """With other bytes in some rows."""
    return replace(predicted, rows=tuple(row._replace(at={**row.at, **at.get(row.name, {})})
                                         for row in predicted.rows))


def kind(run: Run) -> str:
    """Of its layout: FSDP, TP, PP and their combinations."""
    layout, words = run.layout, []
    if layout.state_ranks > 1 and layout.zero == 3:
        words.append("FSDP")
    for word, ranks in (("TP", layout.tensor), ("PP", layout.pipeline), ("CP", layout.context)):
        words += [word] * (ranks > 1)
    return " + ".join(words) or "data parallel"


def memory_row(run: Run) -> Row:
    """A published peak beside the ledger's, bytes of the device that holds most. Raises ConfigError
    as `held`, and for a run without a published peak."""
    if run.memory is None:
        raise ConfigError("not stated: the peak of memory")
    predicted = held(run)
    reserved = predicted.reserved_bytes
    if run.stack in MEGATRON:
        reserved = max(reserved, RESERVED_SHARE * predicted.peak_bytes) + KERNELS_BYTES
    return Row(name=run.name, unit="bytes", measured=run.memory * GIB,
               formula=reserved,
               where=f"{run.source.title}, {run.at}, {kind(run)}, {run.machine}, {run.precision}")


def peaks(*names: str) -> Comparison:
    """Of the named sources or of all, those that the ledger takes."""
    return Comparison(tuple(row for _, row in taken(runs(*names), memory_row)))


def unsaid() -> Iterator[tuple[Run, Row]]:
    """Yields the runs of the Ultra-Scale Playbook. It does not say whether its bytes are allocated
    or reserved; beside them are those that are allocated."""
    for run in runs("ultrascale"):
        if match := re.search(r"GPU memory ([\d.]+) GB", run.note):
            yield run, Row(name=run.name, unit="bytes", measured=float(match[1]) * GIB,
                           formula=held(run).peak_bytes, where=run.at)


def by_layout(*names: str) -> dict[str, tuple[int, float, float]]:
    """Runs, median of their signed errors and of their sizes, by `kind`."""
    return _medians(taken(runs(*names), memory_row))


def _medians(pairs: Iterator[tuple[Run, Row]]) -> dict[str, tuple[int, float, float]]:
    errors: dict[str, list[float]] = {}
    for run, row in pairs:
        errors.setdefault(kind(run), []).append(row.error)
    return {name: (len(off), median(off), median(map(abs, off)))
            for name, off in sorted(errors.items())}


def table(stated: bool = True) -> list[list[str]]:
    """`by_layout` of all sources, or of `unsaid`, in words, its heads first."""
    return [["layout", "runs", "median error", "median size of it"],
            *([name, str(count), percent(signed), f"{size:.1%}"]
              for name, (count, signed, size) in
              (by_layout() if stated else _medians(unsaid())).items())]
