"""How far off the seconds of a step are, on runs that others published (data/published).

For each run that `lpkit.predict.time` takes: its speed over the published one, and whether that is
inside the range that is printed. Beside it a flat MFU, which knows nothing but the machine's peak,
and is fitted to the same runs as the formula is (the median of a generation and its bits): a
formula that does not beat it is not worth its rows. Runs of sources that are held out are counted
apart, and those of them that were read after the fit (`fit.LATER`) once more; nothing is fitted to
them but the ranges. `lpkit bench published --out data/measured` records all of it, and `python -m
tests.bench.published > page` makes docs/plan.md of it and the record (into another file first).
"""

import csv
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lessons import published as ledger
from lessons.published import (
    Run,
    calibrated,
    published,
    runs,
    seconds,
    sources,
    step,
    table,
)
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.files import resource
from lpkit.predict import evidence
from lpkit.predict.compare import percent
from lpkit.predict.ledger import memory
from lpkit.predict.plan import plan
from lpkit.predict.prediction import predict
from lpkit.predict.time import StepTime
from lpkit.predict.units import quantity
from lpkit.tables import picked
from lpkit.techniques.layouts import Layout
from tests.bench import fit, peaks, practitioners
from tests.bench.harness import ROUNDS, Result, paired
from tests.pages import markdown_table

NAME, DEVICE = "published", "formulas"
RECORD = resource("data/measured") / f"{NAME}-{DEVICE}.json"
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
SECTION, NEXT = "## Published runs, beside the formula\n", "\n## Loss\n"
HELD, LATER, FITTED = SPLITS = ("held out", "read later", "may be fitted")
GROUPS = ("machine", "precision", "layout", "stack", "kernels", "source")
HEADS = ("", "by", "", "runs", "predicted over published", "median error", "quartiles", "worst",
         "error of a constant MFU", "inside the range")
# machines, precision, and the relative error that is asked for
CLAIMS = {"A100 and H100, 16 bits": (("a100", "h100"), "16 bits", 0.15),
          "8 bits": ("", "8 bits", 0.2), "B200 and GB200": (("b200", "gb200"), "", 0.25),
          "MI300X": ("mi300x", "", 0.25), "all": ("", "", None)}
# of the runs that were read later, what tells their errors apart
LATER_HEADS = ("added later", "runs", "predicted over published", "median error", "quartiles",
               "worst", "error of a constant MFU", "inside the range")
LATER_GROUPS: dict[str, Callable[[Run], bool]] = {
    "DGX Cloud, H100, 16 bits": lambda run: run.source.name == "dgxc" and run.precision != "fp8",
    "DGX Cloud, H100, 8 bits": lambda run: run.source.name == "dgxc" and run.precision == "fp8",
    "Hagemann et al., A100, RMSNorm in one kernel":
        lambda run: run.source.name.startswith("hagemann") and "RMS kernel" in run.note,
    "Hagemann et al., A100, RMSNorm by PyTorch":
        lambda run: run.source.name.startswith("hagemann") and "RMS kernel" not in run.note,
    "Ultra-Scale, H100, tensor in a node or none, no pipeline":
        lambda run: run.source.name == "ultrascale" and run.tensor <= 8 and run.pipeline == 1,
    "Ultra-Scale, H100, tensor in a node or none, pipeline":
        lambda run: run.source.name == "ultrascale" and run.tensor <= 8 and run.pipeline > 1,
    "Ultra-Scale, H100, tensor over nodes":
        lambda run: run.source.name == "ultrascale" and run.tensor > 8}
RECORDED = ("source", "at", "unit", "published", "formula", "error", "inside")
CALIBRATED, PRINTED, CHOSEN, PRACTISED = 0.08, 0.1, 0.08, 0.12
LEAST_LAYOUTS = 3       # of a model on so many devices, or there is nothing to choose
RANKED = (("narayanan-zero", "GPT 174.6B"), ("narayanan-zero", "GPT 529.6B"),
          ("llama-3", "Llama 3.1 405B"),
          ("torchtitan-a100", "Llama 3 8B"), ("torchtitan-405b", "Llama 3.1 405B"))


def run(rounds: int = ROUNDS) -> list[Result]:
    """Formulas do not vary: `rounds` is not used."""
    taken, left_out = table()
    facts = {"table": [{key: row[key] for key in RECORDED} for row in taken],
             "not_taken": left_out, "breakdown": [HEADS, *breakdown(taken)],
             "later": [LATER_HEADS, *later(taken)], "peaks": peaks.table(),
             "choices": choices(), "ranks": ranks(), "fits": sorted(Counter(fits()).items())}
    practice, fitting = list(practised(facts)), ran()
    facts["ran"] = sorted((name, *counts) for name, counts in _counted(fitting).items())
    results = []
    for split in SPLITS:
        for claim, (machines, precision, target) in CLAIMS.items():
            off = [abs(row["error"]) for row in _of(split, taken)
                   if row["machine"].startswith(machines) and precision in row["precision"]]
            if not off:
                continue
            results.append(paired(
                NAME, ours=off, peer=[1.0] * len(off), peer_name="the published speed",
                case=f"{split}, {claim}, {len(off)} runs, median", better="lower", packages=(),
                unit="relative error", target=target if split == HELD else None, device=DEVICE,
                facts=facts))
    after, held = after_one_step(taken), _of(HELD, taken)
    outside, unseen = ([1.0 - row["inside"] for row in some] for some in (held, _of(LATER, taken)))
    ranged, missed = fit.ranged(), defaultdict(list)
    for run, outside_others in zip(ranged, fit.outside(ranged, evidence.fitted()["numbers"]),
                                   strict=True):
        missed[run.source.name].append(outside_others)
    foreign = [statistics.fmean(each) for each in missed.values()]
    near = [float(lost > CHOSEN) for held_out, lost, _ in facts["choices"] if held_out]
    cases: list[tuple[str, Sequence[float], float | None, str]] = []
    for with_stack, words in ((True, "with the run's stack"),
                              (False, "with the stack that is the default")):
        off, beyond = zip(*(as_printed(run, with_stack) for run in ranged))
        cases += [(f"held out, as printed {words}, {len(off)} runs, median", off,
                  PRINTED if with_stack else None, "median"),
                 (f"held out, as printed {words}, outside the printed range, {len(off)} runs, "
                  f"share",
                  [statistics.fmean(beyond)], 0.1 if with_stack else None, "share")]
    cases += practice
    cases.append((f"runs that ran, said not to fit, {len(fitting)} runs, share",
                  [statistics.fmean(not fits for _, fits in fitting)], 0.03, "share"))
    trials = sum(count for _, count in facts["fits"])
    wrong = sum(count for (fitted, predicted), count in facts["fits"]
                if fitted != predicted) / trials
    for case, off, target, centre in ((
            *cases,
            (f"held out, fits or not, {trials} trials, share said wrong", [wrong], 0.07, "share"),
            (f"held out, the layout said to be the fastest of those published is slower than the "
             f"best "
             f"by more than {CHOSEN:.0%}, {len(near)} sets, share", [statistics.fmean(near)], 0.2,
             "share"),
            ("held out, error with each doubling from 8 to 1,024 devices", [abs(trend(ranged))],
             0.05, "slope"),
            (f"held out, after one calibrating run, {len(after)} runs, median", after, CALIBRATED,
             "median"),
            (f"held out, outside the printed range, {len(outside)} runs, share",
             [statistics.fmean(outside)], 0.1, "share"),
            (f"read later, outside the printed range, {len(unseen)} runs, share",
             [statistics.fmean(unseen)], 0.1, "share"),
            (f"held out, outside the range of other sources, {len(ranged)} runs of {len(foreign)} "
             f"sources alike, share",
             [statistics.fmean(foreign)], 0.13, "share"))):
        results.append(paired(NAME, ours=off, peer=[1.0] * len(off), case=case, target=target,
                              peer_name=f"{centre} of the published speed", better="lower",
                              packages=(), unit="relative error", device=DEVICE, facts=facts))
    return results


def practised(facts: dict[str, Any]) -> Iterator[tuple[str, list[float], float | None, str]]:
    """Yields the cases of practitioners' runs: fitted or held out, by kind and by source."""
    results = [practitioners.asked(run) for run in practitioners.rows() if run.published]
    others = fit.practised_by_others(evidence.fitted()["numbers"])
    facts["practitioners"] = [
        picked(result, "run.source run.machine run.model run.at kind error inside inside_one "
               "default_error") | {"inside_others": inside}
        for result, inside in zip(results, others, strict=True)]
    fitted = {True: "fitted", False: "held out"}
    groups: dict[str, list[practitioners.Asked]] = defaultdict(list)
    for result in results:
        of = fitted[(result.run.source, result.run.machine) in fit.PRACTISED]
        for name in ("all", result.kind, f"{result.run.source} on {result.run.machine}",
                     *["below 1 billion weights, any kind"] * result.small):
            groups[f"practitioners, {of}, {name}"].append(result)
    for name, some in groups.items():
        words = f"{name}, {len(some)} runs"
        target = PRACTISED if name.endswith("held out, all") else None
        yield f"{words}, median", [abs(result.error) for result in some], target, "median"
        for what, key in (("outside the printed range", "inside"),
                          ("without a stack, outside all printed ranges", "inside_one")):
            outside = statistics.fmean(not getattr(result, key) for result in some)
            yield f"{words}, {what}, share", [outside], target, "share"


def _counted(some: Sequence[tuple[str, bool]]) -> dict[str, tuple[int, int]]:
    """Returns by source how many fit, and how many runs there are."""
    return {name: (sum(fits for other, fits in some if other == name),
                   sum(other == name for other, _ in some)) for name, _ in some}


def ran() -> list[tuple[str, bool]]:
    """Returns the source of each published run that the formula takes, and whether its peak fits by
    the formula. All of them ran."""
    verdicts = []
    for run, _ in ledger.taken(runs(), step):
        held = memory(stated(run), run.source.on(run.machine), layout=run.layout, **run.how)
        verdicts.append((run.source.name, held.missing_bytes <= 0))
    return verdicts


def trend(some: Sequence[Run], most_devices: int = 1024) -> float:
    """Returns by how much the error of a model's runs grows with each doubling of its devices, from
    8 on: the slope of log(published / formula), models of a page alike."""
    by_model, points = defaultdict(list), []
    for run in some:
        if 8 <= run.devices <= most_devices:
            by_model[run.source.name, run.model, run.precision, run.machine].append(
                (math.log2(run.devices), math.log(run.published_seconds / seconds(run))))
    for group in by_model.values():
        middle = [statistics.fmean(each) for each in zip(*group)]
        points += [(doublings - middle[0], off - middle[1]) for doublings, off in group]
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)


def stated(run: Run) -> Config:
    """Returns the config that a reader of the page would write down."""
    return run.config.replace({"system.stack": run.stack_row, "precision.backend": "auto"})


def printed(run: Run, with_stack: bool = True) -> StepTime:
    """Returns the step as `lpkit predict` prints it, on a machine whose links are those of the
    page; with the stack that the page names, or the default."""
    config = stated(run) if with_stack else stated(run).replace({"system.stack": "auto"})
    return predict(config, run.source.on(run.machine), layout=run.layout, **run.how).step


def as_printed(run: Run, with_stack: bool) -> tuple[float, bool]:
    """Returns how far off what is printed is, and whether the run is outside the range beside
    it."""
    step_time = printed(run, with_stack)
    ratio = run.published_seconds / step_time.step_seconds
    return abs(ratio - 1), not step_time.spread.low <= ratio <= step_time.spread.high


def fits() -> list[tuple[bool, bool]]:
    """Returns of each trial of data/published/fits.csv whether it fitted, and whether `lpkit plan`
    would have offered it."""
    by_name, verdicts = {source.name: source for source in sources()}, []
    with (ledger.FOLDER / "fits.csv").open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            fitted = cells.pop("fits") == "yes"
            given = {name: cell for name, cell in cells.items() if cell}
            run = Run(**given | {"source": by_name[given["source"]]}, published="1", unit="seconds")
            with suppress(ConfigError):     # a layout that plan does not have
                held = memory(stated(run), run.source.on(run.machine), layout=run.layout, **run.how)
                verdicts.append((fitted, held.missing_bytes <= 0))
    return verdicts


def choices() -> list[tuple[bool, float, str]]:
    """Of each model on as many devices in LEAST_LAYOUTS published ways or more: whether its source
    is held out, how much slower the one that the formula has first is than the fastest, and which
    it is."""
    sets: dict[tuple, list[tuple[float, float, str]]] = defaultdict(list)
    for run, predicted in ledger.taken(runs(), seconds):
        same = *fit.same(run), run.attention, run.kernels, run.stack
        sets[run.source.held_out, same].append((predicted, run.published_seconds,
            f"{run.layout} {run.micro_batch} {run.recompute}"))
    return [(held_out, min(some)[1] / min(way[1] for way in some) - 1,
             f"{same[1]} on {same[3]} x {same[4]}, {len(some)} runs")
            for (held_out, same), some in sets.items()
            if len({way[2] for way in some}) >= LEAST_LAYOUTS]


def ranks() -> list[list[Any]]:
    """Of RANKED, on each number of devices: the place that `lpkit plan` gives to how the fastest
    published run is split, of how many splits."""
    rows = []
    for source, model in RANKED:
        groups: dict[tuple, list[Run]] = defaultdict(list)
        for run, _ in ledger.taken(runs(source), step):
            if run.model == model:
                groups[run.devices, run.context, run.precision].append(run)
        for (devices, context, precision), some in groups.items():
            best = min(some, key=lambda run: run.published_seconds)
            options = plan(stated(best).replace({"grad_accum_steps": 1}), 1e12, best.machine,
                           devices=devices,
                           precisions=[best.how["precision"]]).options
            places = [i for i, option in enumerate(options, 1)
                      if _axes(option.layout) == _axes(best.layout)]
            rows.append([model, f"{devices:,} x {best.machine}, {context:,} tokens, {precision}",
                         str(best.layout),
                         places[0] if places else "none", len(options)])
    return rows


def _axes(layout: Layout) -> tuple[int, ...]:
    return layout.tensor, layout.pipeline, layout.context


def after_one_step(taken: list[dict[str, Any]]) -> list[float]:
    """Errors of held-out runs, when each is calibrated by the one before it on its page, on the
    same machine and in the same precision: the most alike that is published."""
    after = fit.after_one(((row["source"], row["machine"], row["precision"]), row["error"] + 1)
                          for row in _of(HELD, taken))
    return [abs(ratio - 1) for ratio in after if ratio is not None]


def breakdown(taken: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each split and group, as HEADS."""
    return [[split, by, group, *_line(some)] for split in SPLITS
            for by, group, some in _groups(_of(split, taken))]


def later(taken: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each of LATER_GROUPS, as LATER_HEADS."""
    by_place = {(run.source.name, run.at): run for run in runs(*fit.LATER)}
    some = [(row, by_place[row["source"], row["at"]]) for row in _of(LATER, taken)]
    return [[group, *_line([row for row, run in some if has(run)])]
            for group, has in LATER_GROUPS.items()]


def _of(split: str, taken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in taken if split == _split(row)]


def _split(row: dict[str, Any]) -> str:
    if row["source"] in fit.LATER:
        return LATER
    return HELD if row["held_out"] else FITTED


def _groups(taken: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    yield "", "all", taken
    for by in GROUPS:
        for group in sorted({row[by] for row in taken}):
            yield by, group, [row for row in taken if row[by] == group]


def _line(some: list[dict[str, Any]]) -> list[str]:
    errors = [row["error"] for row in some]
    off = [abs(error) for error in errors]
    # quantiles want two
    low, middle, high = statistics.quantiles([*off, *off[:1]] if len(off) == 1 else off, n=4,
                                             method="inclusive")
    others = [abs(row["flat_error"]) for row in some]
    return [str(len(some)), f"{1 + statistics.median(errors):.2f}", f"{middle:.0%}",
            f"{low:.0%} to {high:.0%}", f"{max(errors, key=abs):+.0%}",
            f"{statistics.median(others):.0%}",
            f"{statistics.fmean(row['inside'] for row in some):.0%}"]


# The page.

TEXT = """
`data/published` has {runs} runs from {sources} pages, each with its line or table; this project
measured none of them. The formula accepts {taken} of them. The share of the kernels' speed that a
step reaches was fitted to {fitted} runs (`python -m tests.bench.fit`). On {held} runs of held-out
sources, the formula is off by {held_error} at the median and predicts {held_ratio} times the
published speed. A constant MFU per GPU generation and number of bits, fitted to the same runs, is
off by {held_flat} on them. Another {later} runs were added after the fit: see below.
`lpkit bench published` repeats the comparison.

**The range** of every time, cost and energy comes from the held-out runs of a kind and the runs
added later. It omits layouts that take more than twice as long as the fastest layout of the same
model on as many devices: {ranged} runs remain. If a source is left out of the range, {foreign} of
its runs are inside (mean over the sources). If no source is left out, {inside} of the {held} runs
are inside. The errors are largest for the small models of `rocm-te` and the slower layouts of
nanotron.

**Runs added later.** {later} runs of {later_sources} sources, also of the slowest layouts, were
added after the fit, so they test it. The formula is off by {later_error} at the median and
predicts {later_ratio} times the published speed; {later_inside} of the runs are inside the range.
For stacks like those of the fit (NVIDIA's NeMo in 16 bits on 8 to 2,048 H100) the error is no
larger than in the fit. The rows name a fact of these runs that the fit did not contain:

{later_table}

A norm written as PyTorch operations reads and writes 128 bytes per number in forward and backward;
one kernel moves 10. Without sequence parallelism each tensor rank repeats the norm. The formula
counts both facts for each stack. The Ultra-Scale Playbook published every layout that ran, also
the slowest: {hopeless} of its {ultrascale} runs reach less than a tenth of the peak, and two runs
of one layout differ by 4.7 times. Do not rely on a prediction of tensor ranks that span nodes
(`lpkit plan` suggests none), or of nanotron's pipelines: for 16 MiB over the 16 ranks of two
nodes, nanotron took 0.8 ms including waiting; the curve of such nodes has 0.15 and the formula
0.17.

{table}

**With settings only.** The table above uses every fact of a page, also facts without a setting,
such as the recomputation of every second matmul. With settings only (the run's `system.stack` and
a machine with the page's links), `lpkit predict` is off by {printed} at the median, and
{printed_inside} of the held-out runs are inside the printed range. With the default stack, which
is a different program, it is off by {default}, and {default_inside} are inside.

**Practitioners** train small models and adapters on one or a few GPUs, mostly without a \
compiler. `data/published/practitioners.csv`
has {practised} of their runs, by Unsloth, Surogate, vectorlm and a trainer on transformers: \
{fitted_practised} \
may be fitted, {held_practised} are held out. With the nearest stack, the held-out runs are off by
{practised_off} at the median, and {practised_inside} are inside the range. Without a stack,
{practised_one} are inside one of the three printed ranges. The ranges also come from these runs;
with ranges from the other sources and machines alone, {practised_foreign} of the runs are inside.
By source and machine:

{practised_table}

**Runs that fit.** All {ran} published runs ran, and by the formula {ran_fits} of them fit. Most of
the others are from pages that do not state the recomputation (MaxText, Pax), or from
Megatron-Bridge, whose recipes offload the activations of 20 to 40 blocks, which the formula does
not know.

**Which layout.** {sets} sets of held-out runs have the same model and number of devices in three
layouts or more. In {near} of them, the formula's first layout is within {chosen:.0%} of the
fastest. The table shows the places in `lpkit plan` of the fastest layouts of some pages, most of
which may be fitted ("none": the plan finds the layout not feasible, or does not search it). With
each doubling of the devices, from 8 to 1,024, the published seconds of a model grow by {trend}
compared with the formula's.

{ranks}

**Fits or not.** `lpkit plan` has a layout for {trials} trials of Hagemann et al.: {ended} \
ended and {oom} ran out of memory. With `system.stack=scaling`
(or `scaling-kernel`, `scaling-sequence`), it offers {right} of the trials that ended and {offered}
of the trials that did not fit: {verdicts} of its verdicts are right.

In the tables, "predicted over published" is the median of predicted over published speed. Errors
are errors of speed, without a sign except for the largest. **Do not rely on the formula** for:

- small models on few devices by Transformer Engine (`rocm-te`, the only held-out source of MI300X);
- GB300, for which the formula uses the matmuls of GB200;
- 8 bits under torchao, whose runs at limited power are in the table and not in the fit;
- 10,000 H100: MLPerf's GPT-3 175B is a quarter faster than predicted, because it reduces \
gradients in 16 bits and the formula counts 32;
- kernels of an eighth of a sequence: MLPerf's 8B over 512 GB200 takes 1.5 times as long as \
predicted, because the formula does not count the overhead of such short kernels;
- MI300X and Blackwell in 16 bits, which have few runs.

The formula does not accept {rejected} runs: their layers or sequences do not split evenly over the
ranks, the page omits a setting, or lpkit does not have it. `not_taken` of
`data/measured/{record}` lists them with their reasons.

The formula uses the facts that the pages state. If a page does not state a fact,
`notebooks/lessons/published.py` has an assumption, for example that a micro-batch is one sequence
and that nothing is recomputed. `sources.csv` has the stated facts of clusters: BigScience's nodes
join their GPUs by 4 NVLinks and have 4 Omni-Path links, a third and a quarter of the catalogue's,
and its tensor ranks repeated norms, as Narayanan's did (`megatron-2021`). These facts were added
after the fit; without them the error in 16 bits is 18% instead of {sixteen}. Power limits,
asynchronous tensor parallelism and H100s of a lower bandwidth are not modelled. Notebook 09 draws
these runs, most of which may be fitted:

| run | published | formula | off | where |
|---|---|---|---|---|
{rows}

**One measured step calibrates predictions.** If the previous run on the same page calibrates a
held-out run, the formula is off by {calibrated} at the median (`lpkit.predict.time.calibrate`, or
`--factor` on the command line). A run of another model or layout does not help: calibrated by
Llama 3's first row, the errors of the other two change from {before} to {after}.

**Bytes.** Some of these pages state a peak of memory. The table compares it with the predicted
reserved bytes (`tests.bench.peaks`; [ledger.md](ledger.md) has each run):

{peaks}
"""


def published_table() -> str:
    """The rows of docs/plan.md."""
    return "".join(f"| {row.name} | {quantity(row.measured, row.unit)} | "
                   f"{quantity(row.formula, row.unit)} | {percent(row.error)} | "
                   f"{row.where.partition(', https')[0]} |\n" for row in published())


def page() -> str:
    """docs/plan.md, its section on published runs made anew from what `lpkit bench published --out
    data/measured` wrote."""
    before, _, after = PAGE.read_text().partition(SECTION)
    _, _, after = after.partition(NEXT)
    return before + SECTION + _section(json.loads(RECORD.read_text())) + NEXT + after


def _section(record: dict[str, Any]) -> str:
    taken, left_out, (_, *lines) = (record[key] for key in ("table", "not_taken", "breakdown"))
    held, unseen = (next(line for line in lines if line[:3] == [split, "", "all"])
                    for split in (HELD, LATER))
    book = runs("ultrascale")
    sixteen, calibrated_error, foreign = (
        next(case["ratio"] for case in record["cases"] if words in case["case"])
        for words in ("held out, A100 and H100", "after one calibrating run", "other sources"))
    printed_off, printed_out, default_off, default_out = (
        case["ratio"] for case in record["cases"] if "as printed" in case["case"])
    verdicts = {tuple(pair): count for pair, count in record["fits"]}
    ended = verdicts[True, True] + verdicts.get((True, False), 0)
    plain = {row.name: row.error for row in published()}
    others = list(calibrated())
    return (TEXT.format(
        runs=f"{len(taken) + len(left_out):,}", taken=f"{len(taken):,}",
        sources=len({source.url for source in sources()}),
        fitted=evidence.fitted()["runs"], held=held[3], held_ratio=held[4],
        held_error=held[5], held_flat=held[8], inside=held[9], foreign=f"{1 - foreign:.0%}",
        printed=f"{printed_off:.0%}", printed_inside=f"{1 - printed_out:.0%}",
        default=f"{default_off:.0%}", **_practised(record),
        default_inside=f"{1 - default_out:.0%}",
        sets=sum(choice[0] for choice in record["choices"]),
        chosen=CHOSEN,
        near=sum(choice[0] and choice[1] <= CHOSEN for choice in record["choices"]),
        trials=sum(verdicts.values()), ended=ended, oom=sum(verdicts.values()) - ended,
        right=verdicts[True, True],
        offered=verdicts[False, True],
        verdicts=f"{(verdicts[True, True] + verdicts[False, False]) / sum(verdicts.values()):.0%}",
        trend="{:.0%}".format(next(case["ratio"] for case in record["cases"]
                                   if "doubling" in case["case"])),
        ranks=markdown_table(("model", "on", "fastest published", "place", "of"), record["ranks"]),
        ranged=f"{len(fit.ranged()):,}", later=f"{int(unseen[3]):,}", later_ratio=unseen[4],
        later_error=unseen[5],
        later_inside=unseen[9], later_sources=len(fit.LATER),
        later_table=markdown_table(LATER_HEADS, record["later"][1:]),
        ultrascale=len(book), hopeless=sum(_mfu(run) < 10 for run in book),
        sixteen=f"{sixteen:.0%}", peaks=markdown_table(*_headed(record["peaks"])),
        calibrated=f"{calibrated_error:.0%}", table=markdown_table(HEADS, lines),
        rejected=len(left_out), record=RECORD.name,
        rows=published_table().rstrip("\n"),
        after=" and ".join(percent(row.error) for row in others),
        before=" and ".join(percent(plain[row.name]) for row in others)))


def _practised(record: dict[str, Any]) -> dict[str, str]:
    """The words of TEXT on practitioners' runs, and on runs that ran."""
    each = record["practitioners"]
    heads = ("source", "machine", "runs", "", "median error", "inside")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in each:
        groups[row["source"], row["machine"]].append(row)
    held = [row for key, some in groups.items() if key not in fit.PRACTISED for row in some]

    def median(some: list[dict[str, Any]]) -> str:
        return f"{statistics.median(abs(row['error']) for row in some):.0%}"

    def share(some: list[dict[str, Any]], key: str) -> str:
        return f"{statistics.fmean(row[key] for row in some):.0%}"

    table = [(*key, len(some), "fitted" if key in fit.PRACTISED else "held out", median(some),
              share(some, "inside")) for key, some in groups.items()]
    ran = [sum(counts) for counts in zip(*(row[1:] for row in record["ran"]))]
    return {"practised": str(len(each)), "fitted_practised": str(len(each) - len(held)),
            "held_practised": str(len(held)), "practised_off": median(held),
            "practised_inside": share(held, "inside"), "practised_one": share(held, "inside_one"),
            "practised_foreign": share(held, "inside_others"),
            "practised_table": markdown_table(heads, table), "ran": f"{ran[1]:,}",
            "ran_fits": f"{ran[0] / ran[1]:.0%}"}


def _headed(table: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return table[0], table[1:]


def _mfu(run: Run) -> float:
    """In percent, as the Ultra-Scale Playbook prints it."""
    return float(run.note.removeprefix("MFU ").partition("%")[0])


if __name__ == "__main__":
    print(page(), end="")
