"""Make docs/attention.md: errors that `lpkit.measure.attention` measures on a CPU, and the
documented limits of each library on a GPU."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

import lessons.rows.linear_attention
import lessons.rows.masked  # noqa: F401  adds rows
from lessons.l12_flash_attention import cell
from lpkit.config import ModelConfig
from lpkit.measure.attention import LENGTHS, MODEL
from lpkit.measure.probes import Probe
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import ATTENTION, Attending, why_not
from tests.bench.drawn import ORDER
from tests.pages import markdown_table

DTYPES = ("float32", "bfloat16", "float16")
# smaller than in the rows, so that windows and blocks leave out some keys
SMALLER = {"size": 24, "block": 16}
# sees every other block; the queries of block 1 see nothing
TABLE = tuple("".join("01"[a != 1 and (a + b) % 2 == 0] for b in range(9)) for a in range(9))


def models() -> dict[str, ModelConfig]:
    """Returns a model for every kind of attention, and for the options that any kind can have, by
    name."""
    model_by_kind = {}
    for name in dict.fromkeys((*ORDER, *KINDS)):
        row = KINDS[name]
        smaller = {key: value for key, value in SMALLER.items() if hasattr(row.settings, key)}
        model_by_kind[name] = replace(MODEL, attention=replace(row.settings, name=name, **smaller))
    full, window, blocks = (model_by_kind[name].attention
                            for name in ("full", "window", "block-sparse"))
    return model_by_kind | {
        "table": replace(MODEL, attention=replace(blocks, table=TABLE)),
        "global": replace(MODEL, attention=replace(window, global_tokens=3)),
        "capped": replace(MODEL, attention=replace(full, soft_cap=20.0)),
        "sinks": replace(MODEL, attention=replace(full, sinks=True)),
        "grouped": replace(MODEL, kv_heads=2), "one group": replace(MODEL, kv_heads=1)}


Found = Mapping[tuple[str, str], Mapping[str, Probe]]       # by backend and kind, by dtype


def run(device: torch.device | str = "cpu", *, kinds: Iterable[str] | None = None,
        backends: Iterable[str] | None = None, dtypes: Iterable[str] = DTYPES) -> Found:
    """Returns the probes of these kinds, backends and dtypes; None means all."""
    device, named = torch.device(device), models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # torch's long explanations; the probe keeps the reason
        return {(name, kind): {dtype: cell(kind, name, dtype, device, named[kind])
                               for dtype in dtypes}
                for kind in (kinds or named) for name in (backends or ATTENTION)}


def error(probe: Probe) -> str:
    """Returns the relative error, or a dash if the backend does not support the kind."""
    return probe.detail.rpartition(" ")[2] or "-"


def _word(cells: Mapping[str, Probe]) -> str:
    if all(probe.why for probe in cells.values()):
        return "-"
    return " ".join(map(error, cells.values()))


INTRODUCTION = """\
# Attention

`model.attention` names a kind: the keys that a query sees, and how scores become weights. It
changes the numbers of a run. `system.attention` names a backend, the implementation. Every
backend computes the same function as `plain`, the definition. `auto` compares the supported
backends with the definition on your machine and takes the fastest.

The table shows every kind with every backend on a CPU, forward and backward, with 1 token and with
{length} tokens and heads of width {width}. A cell has the largest relative error of the output and
the gradients against the definition in float64, for {dtypes}. A dash means that the backend does
not support the kind; the reasons are below. `lpkit doctor` makes this table on your machine.
"""
ON_A_GPU = """
## On a GPU

Limits of each backend for {dtype} on Hopper, from the documentation of its library. A run tests a
backend before it uses it.
"""


def page() -> str:
    """Returns the page: every kind with every backend, run on this CPU, and the documented limits
    on a GPU."""
    kinds, probes = list(models()), run("cpu")
    table = [(name, *(_word(probes[name, kind]) for kind in kinds)) for name in ATTENTION]
    why: dict[tuple[str, str], list[str]] = {}
    for (name, kind), cells in probes.items():
        for probe in cells.values():
            if probe.why and kind not in why.setdefault((name, probe.why), []):
                why[name, probe.why].append(kind)
    return "\n".join([
        INTRODUCTION.format(length=max(LENGTHS), width=MODEL.E, dtypes=", ".join(DTYPES)),
        markdown_table(("backend", *kinds), table), "\n## Why not\n",
        markdown_table(("backends", "kinds", "reason; alternative"),
                       _named(why, len(kinds))),
        ON_A_GPU.format(dtype="bfloat16"),
        markdown_table(("backends", "kinds", "reason; alternative"), _named(by_rule(), len(kinds))),
        ""])


def by_rule() -> dict[tuple[str, str], list[str]]:
    """Returns the kinds that a backend does not support, by backend and reason, on a Hopper GPU
    with all libraries installed."""
    why: dict[tuple[str, str], list[str]] = {}
    for kind, model in models().items():
        for name in ATTENTION:
            asked = Attending(model=model, dtype="bfloat16", device="gpu", capability=(9, 0))
            if reason := why_not(name, asked):
                why.setdefault((name, reason), []).append(kind)
    return why


def _named(why: Mapping[tuple[str, str], list[str]], count: int) -> list[tuple[str, str, str]]:
    """Returns table rows: backends with the same reason for the same kinds share a row."""
    backends: dict[tuple[str, str], list[str]] = {}
    for (name, reason), kinds in sorted(why.items(), key=lambda row: [*ATTENTION].index(row[0][0])):
        words = "all" if len(kinds) == count else ", ".join(kinds)
        backends.setdefault((words, reason), []).append(name)
    return [(", ".join(names), words, reason) for (words, reason), names in backends.items()]
