"""Write the measured numbers of docs/gpu.md from the records of an H200 in data/measured.

The page is written by hand except for the part between two comments, which `results` writes:

    python -m tests.pages gpu
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lpkit.predict.evidence import MEASURED
from lpkit.techniques.recipes import RECIPES
from tests.bench import code
from tests.pages import markdown_table
from tests.pages.kernels import FLOORS

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- python -m tests.pages gpu: from records -->\n", "<!-- end of records -->\n"


def page() -> str:
    """Returns the page with the results of the current records."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, records_text, after = rest.partition(END)
    assert records_text, f"{PAGE.name} has lost its comments {BEGIN.strip()} and {END.strip()}"
    return f"{before}{BEGIN}\n{chr(10).join(results(records()))}\n{END}{after}"


def records(folder: Path = MEASURED) -> dict[str, dict[str, Any]]:
    """Returns the records of an H200 by the name of the benchmark."""
    return {path.stem.replace("-nvidia-h200", ""): json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(folder.glob("*-nvidia-h200*.json"))}


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Returns "lowest to highest", or one number if both are printed alike."""
    low, *_, high = sorted(values) * 2
    ends = [f"{low:{form}}", f"{high:{form}}"]
    return " to ".join(dict.fromkeys(ends))


def results(record_by_bench: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield ("All numbers of this section are from committed records: "
           "`data/measured/NAME-nvidia-h200.json`.\n")
    yield markdown_table(("record", "date", "commit", "code since", "command"), (
        (f"`{name}`", record["date"][:10], _commit(record["commit"]), _since(record),
         f"`{record['command']}`") for name, record in record_by_bench.items()))
    for title, make, names in PARTS:
        yield f"\n### {title}\n\nFrom {' and '.join(f'`{name}`' for name in names)}.\n"
        yield from make(*(record_by_bench[name] for name in names))
    yield ("\n### Not recorded\n\nThis page has no numbers for updates with and without CUDA "
           "graphs, the ceilings of `lpkit doctor`, the kinds of kernels in an update, the "
           "notebooks at their GPU tier, Muon's seconds, and several GPUs, because no record of "
           "them is committed.")


def _since(record: dict[str, Any]) -> str:
    """Return whether a module of kernels, optimizers or precision changed since a record."""
    modules = code.changed(record)
    return "unknown" if modules is None else "changed" if modules else "same"


def _commit(commit: str) -> str:
    return f"{commit} (with uncommitted changes)" if commit.endswith("+") else commit


def smoke(record: dict[str, Any]) -> Iterator[str]:
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, row in record["recipes"].items():
        bits = min((cast.bits for cast in RECIPES[name].all_casts), default=16)
        kinds["16 and 32" if bits == 16 else f"{bits:g}"].append(row["distance"])
    worst = ", ".join(f"{max(each):.2%} in {bits} bits ({len(each)} recipes)"
                      for bits, each in kinds.items())
    yield (f"All {len(record['recipes'])} recipes train {record['steps']} eager updates of a "
           f"tiny model. Their last losses differ from bf16's by at most {worst}. "
           f"{len(record['problems']) or 'No'} recipe had a problem.")


def linear(record: dict[str, Any]) -> Iterator[str]:
    yield ("Forward and backward of a Linear in FP8 with the kit's casts: speed-up over each "
           "column.\n")
    peers = list(dict.fromkeys(case["peer"] for case in record["cases"]))
    ratios = _by(record["cases"], "case", "peer")
    yield markdown_table(("M x K @ K x N", *peers), (
        (case, *(f"{row[peer][0]:.2f}" for peer in peers)) for case, row in ratios.items()))


def _by(cases: Iterable[dict[str, Any]], row: str, column: str) -> dict[str, dict[str, list]]:
    ratios: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        ratios[case[row]][case[column]].append(case["ratio"])
    return ratios


def steps(record: dict[str, Any]) -> Iterator[str]:
    yield ("Compiled updates with CUDA graphs. `kernels` is the time of all kernels by PyTorch's "
           "profiler.\n")
    rows = []
    for case in record["cases"]:
        recipe, _, size = case["case"].partition(", ")
        if case["peer"] == "bf16":
            busy = record["milliseconds"][size]
            if not rows or rows[-1][0] != size:
                rows.append((size, "bf16", _ms(case["peer_median"]),
                             f"{busy['bf16']['all']:.1f} ms", "1"))
            rows.append((size, recipe, _ms(case["ours_median"]), f"{busy[recipe]['all']:.1f} ms",
                         f"{case['ratio']:.2f}"))
    yield markdown_table(("model, tokens", "recipe", "update", "kernels", "speed-up over bf16"),
                         rows)
    for size, advice in record["advice"].items():
        speed = re.search(r"a step ([\d.]+) times", advice["sentence"])[1]
        yield (f"\nBefore the runs `lpkit advise` recommended {advice['choice']} for {size}, with "
               f"a predicted speed of {speed} times bf16's.")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def nanogpt(record: dict[str, Any]) -> Iterator[str]:
    graphs = record["chosen"]["cuda_graphs"]
    yield (f"{record['case']}: the kit's update takes {_ms(record['ours_median'])} "
           f"(CUDA graphs {graphs}).\n")
    yield markdown_table(("compared with", "its update", "speed-up of the kit", "target"), (
        (case["peer"], _ms(case["peer_median"]), f"{case['ratio']:.2f}", f"{case['target']:g}, "
         f"{'met' if case['met'] else 'missed'}") for case in record["cases"]))


def products(record: dict[str, Any], measured: dict[str, Any]) -> Iterator[str]:
    yield ("The table lists the speed-up of the matmuls alone over bf16: the lowest and the "
           "highest of all shapes, with one round each.\n")
    ratios: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for case in record["cases"]:
        _, recipe, how = case["case"].split(", ")
        ratios[recipe][how.split()[0]].append(case["ratio"])
    yield markdown_table(("recipe", "shapes", "fast accumulation", "full accumulation"), (
        (recipe, len(row["full"]), spread(row["fast"]), spread(row["full"]))
        for recipe, row in ratios.items()))
    row = measured["row"]
    wide, peak = row["measured"]["products"]["bf16"], row["flops"]
    lines = []
    for dtype in ("fp8", "int8"):
        each = [low[3] * peak[dtype] / (base[3] * peak["bf16"]) for low, base
                in zip(row["measured"]["products"][dtype], wide, strict=True)]
        lines.append(f"{dtype} {spread(each)} times as fast as bf16, and faster at "
                    f"{sum(ratio > 1 for ratio in each)} of {len(each)} shapes")
    yield (f"\nThe records disagree. `measure` has the matmuls of GPT-2 124M without the scales of "
           f"their results: {'; '.join(lines)}.")


def ledger(record: dict[str, Any]) -> Iterator[str]:
    yield ("Eager updates. `bytes` is the allocator's peak, and `formula` the closed form's error. "
           "`predicted` is the prediction on the day of the record, without the host's time.\n")
    yield markdown_table(("config", "bytes", "formula", "update", "predicted"), (
        (row["name"], f"{row['measured_bytes'] / 1e9:.2f} GB",
         f"{(row['formula_bytes'] - row['measured_bytes']) / 1e6:+.0f} MB "
         f"({row['formula_bytes'] / row['measured_bytes'] - 1:+.1%})",
         _ms(row["step_seconds"]), _ms(row["predicted_seconds"])) for row in record["table"]))


def ceilings(record: dict[str, Any]) -> Iterator[str]:
    row = record["row"]
    rates = ", ".join(f"{dtype} {row['flops'][dtype] / 1e12:,.0f} TFLOP/s"
                      for dtype in row["measured"]["products"])
    graphs = row["measured"]["config"]["system"].get("cuda_graphs")
    yield (f"A sweep over the memory reaches {row['bytes_per_second'] / 1e12:.2f} TB/s. The "
           f"fastest matmuls of the config reach: {rates}. One update takes "
           f"{_ms(row['measured']['seconds'])}, {'with' if graphs else 'without'} a CUDA graph.")


def first(record: dict[str, Any]) -> Iterator[str]:
    took = spread((row["took_seconds"] for row in record["recipes"].values()), ".0f")
    yield (f"Four updates of `{record['config']}` take {took} s in a first run, because attention "
           f"and kernels are first tested and timed, and then compiled.\n")
    yield markdown_table(("recipe", "first run", "a later update", "peak"), (
        (name, f"{row['took_seconds']:.0f} s", _ms(row["step_seconds"]),
         f"{row['peak_bytes'] / 1e9:.2f} GB") for name, row in record["recipes"].items()))


def kernels(*records: dict[str, Any]) -> Iterator[str]:
    yield ("The table lists the speed-up of each Triton kernel over the implementation that the "
           "column names: the lowest and the highest of all sizes. A copy moves as many bytes as "
           "the kernel. [Kernels](kernels.md) has each size.\n")
    table: dict[tuple[str, str], dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for case in (case for record in records for case in record["cases"] if case["unit"] == "s"):
        name, *_, way = case["case"].split(", ")
        peer = "floor" if case["peer"] in FLOORS else case["peer"]
        table[name, way][peer].append(case["ratio"])
    peers = ("floor", "compile", "liger", "sdpa, flash", "sdpa, cudnn")
    rows = [[name, way, *(spread(row[peer]) if row[peer] else "" for peer in peers)]
            for (name, way), row in table.items()]
    yield markdown_table(("kernel", "pass", "a copy, or its matmuls", "the compiler", "Liger",
                          "FlashAttention 2", "cuDNN"), rows)


PARTS: Sequence[tuple[str, Any, tuple[str, ...]]] = (
    ("Every recipe learns", smoke, ("smoke",)),
    ("A Linear in FP8", linear, ("fp8-linear",)),
    ("Whole updates in FP8", steps, ("fp8-step",)),
    ("GPT-2 124M beside nanoGPT", nanogpt, ("train-nanogpt",)),
    ("Matmuls in 8 bits", products, ("fp8-products", "measure")),
    ("Bytes and seconds of an eager update", ledger, ("ledger",)),
    ("What the machine reaches", ceilings, ("measure",)),
    ("The first run", first, ("recipes",)),
    ("Kernels", kernels, ("kernels", "kernels-one-round")),
)
