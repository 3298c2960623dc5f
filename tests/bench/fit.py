"""data/published/fit.json anew, on standard output: `python -m tests.bench.fit`. Minutes.

Fitted are the numbers of `lpkit.predict.evidence` that no table states: to runs of sources that are
not held out and of machines without a power limit, to practitioners' runs of PRACTISED, and to the
eager steps of the recorded ledger. The loss is the median-like mean of |log(formula
/ published)|, a source's rows on a machine counting as the root of their number, none for more than
CAP. The held-out runs give the ranges: of a kind, what nine of ten took over what was said, whether
sources count alike or runs; after a calibration, by the run before it on its page. The sources of
LATER were read after the fit: they test its numbers, and are in the ranges.
"""

import functools
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from lessons import published
from lessons.published import Run, runs, seconds, step
from lpkit.config import Config
from lpkit.files import resource
from lpkit.predict import evidence
from lpkit.predict.time import step_time
from tests.bench import ledger, practitioners

Numbers = dict[str, float]
PRACTISED = (("surogate", "rtx-5090"), ("gpu-test", "a100-80"))     # the other ones are held out
LEDGER = resource("data/measured") / "ledger-nvidia-h200.json"
LATER = ("dgxc", "hagemann", "hagemann-sp", "ultrascale")
CAP = 0.7               # of |log|: a run that is off by twice has other reasons
START, LEAST_STEP, ROUNDS = 0.1, 0.005, 12
AT_MOST_ONE = ("overlap", "split_overlap", "host_shown")
BEGIN = {"a100 keeps": 0.87, "h100 keeps": 0.77, "b200 keeps": 0.67, "mi300x keeps": 0.5,
         "mi325x keeps": 0.7, "sm_120_geforce keeps": 1.0, "eager attention": 0.6,
         "eager fused": 1.0, "eager overlap": 0.65, "eager op_seconds": 4.2e-5,
         "eager host_shown": 0.2, "compiled op_seconds": 5e-6, "hf attention": 0.17,
         "megatron fused": 0.45,
         "megatron overlap": 0.8, "megatron split_overlap": 1.0, "megatron low_bits": 1.2}
FEW = 1.2               # wider for each source fewer than LEAST_SOURCES
LEAST_SOURCES = 3       # or a range says more of a source than of its stack
# quantiles between which lie nine of ten of a source that is left out, sources counting alike: 88%
NINE_OF_TEN = (0.02, 0.98)
SLOWEST = 2.0           # times the fastest of a model on as many devices: nobody would choose it


def taken(held_out: bool) -> list[Run]:
    """Returns those that the formula takes."""
    some = (run for run in runs() if run.source.held_out == held_out)
    return [run for run, _ in published.taken(some, functools.partial(step, numbers=BEGIN))]


def ranged() -> list[Run]:
    """Returns all that are held out, for the ranges; of a model on as many devices none that is
    slower than SLOWEST times the fastest."""
    some, fastest = taken(True), defaultdict(lambda: math.inf)
    for run in some:
        fastest[same(run)] = min(fastest[same(run)], run.published_seconds)
    return [run for run in some if run.published_seconds <= SLOWEST * fastest[same(run)]]


def same(run: Run) -> tuple:
    """Returns what runs have in common that differ in how they were run alone."""
    return (run.source.url, run.model, run.context, run.devices, run.machine, run.precision,
            run.global_batch)


class Case(NamedTuple):
    """A step that may be fitted: its `group`, its seconds, and those of the formula."""

    group: tuple[str, str]
    true_seconds: float
    seconds: Callable[[Numbers], float]


def cases() -> Iterator[Case]:
    """Yields all that may be fitted."""
    for run in taken(False):
        if not run.limited:
            yield Case((run.source.name, run.machine), run.published_seconds,
                       lambda numbers, run=run: seconds(run, numbers=numbers))
    for row in practitioners.rows():
        if (row.source, row.machine) in PRACTISED and row.published:
            yield Case((row.source, row.machine), row.published_seconds,
                       lambda numbers, row=row: row.step(numbers).step_seconds)
    by_name = dict(ledger.configs(ledger.LARGER))
    for row in json.loads(LEDGER.read_text())["table"]:
        config = by_name[row["name"]].replace({"system.compile": False})
        yield Case(("ledger", "h200"), row["step_seconds"], functools.partial(_eager, config))


def _eager(config: Config, numbers: Numbers) -> float:
    return step_time(config, "h200", efficiency=evidence.reached("h100", "eager", numbers)
                     ).step_seconds


def loss_of(some: Sequence[Case]) -> Callable[[Numbers], float]:
    """Returns the loss as a function of the numbers."""
    weights = _weights(case.group for case in some)

    def loss(tried: Numbers) -> float:
        off = [min(CAP, abs(math.log(case.seconds(tried) / case.true_seconds))) for case in some]
        return sum(map(float.__mul__, weights, off)) / sum(weights)

    return loss


def fit(some: Sequence[Case], numbers: Numbers) -> Numbers:
    """Coordinate by coordinate, with steps that shrink where none helps."""
    loss = loss_of(some)
    best, steps = loss(numbers), dict.fromkeys(numbers, START)
    for _ in range(ROUNDS):
        for name in numbers:
            while steps[name] > LEAST_STEP:
                tries = []
                for factor in (1 + steps[name], 1 / (1 + steps[name])):
                    value = numbers[name] * factor
                    value = min(1.0, value) if name.endswith(AT_MOST_ONE) else value
                    tries.append((loss(numbers | {name: value}), value))
                if min(tries)[0] >= best:
                    steps[name] /= 2
                    break
                best, numbers = min(tries)[0], numbers | {name: min(tries)[1]}
    return {name: float(f"{value:.3g}") for name, value in numbers.items()}


def _weights(groups: Iterable[tuple[str, str]]) -> list[float]:
    groups = list(groups)
    counts = Counter(groups)
    return [counts[group] ** -0.5 for group in groups]


def ratios(some: Iterable[Run], numbers: Numbers
           ) -> Iterator[tuple[tuple[str, ...], tuple[str, str], float]]:
    """Of each run its source, machine and precision; its kind and its stack; published seconds over
    the formula's."""
    for run in some:
        predicted = step(run, numbers=numbers)
        yield ((run.source.name, run.machine, predicted.precision),
               (predicted.kind, predicted.stack),
               run.published_seconds / seconds(run, numbers=numbers))


def practised(numbers: Numbers, every: bool = False
              ) -> Iterator[tuple[tuple[str, ...], tuple[str, str], float]]:
    """As `ratios`, of practitioners' runs: those that are held out, and of kinds without any those
    that are fitted; or `every` one."""
    pairs = []
    for row in practitioners.rows():
        if row.published:
            predicted = row.step(numbers)
            pairs.append(((row.source, row.machine) in PRACTISED,
                          ((row.source, row.machine, predicted.precision),
                           (predicted.kind, predicted.stack),
                           row.published_seconds / predicted.step_seconds)))
    held = {ratio[1][0] for fitted, ratio in pairs if not fitted}
    yield from (ratio for fitted, ratio in pairs if every or not fitted or ratio[1][0] not in held)


def practised_by_others(numbers: Numbers) -> list[bool]:
    """Returns of each practitioners' run whether it is inside the range that all but the runs of
    its own source on its own machine give."""
    held, each = [*ratios(ranged(), numbers)], list(practised(numbers, every=True))
    ranges: dict[tuple[str, ...], dict] = {}
    for same, *_ in each:
        if same[:2] not in ranges:
            ranges[same[:2]] = _ranges(
                [*held, *(ratio for ratio in each if ratio[0][:2] != same[:2])])
    inside = []
    for same, kind, off in each:
        _, known = evidence.range_of(ranges[same[:2]], *kind)
        inside.append(known["low"] <= off <= known["high"])
    return inside


def kinds(some: Iterable[Run], numbers: Numbers) -> dict[str, dict[str, dict[str, float]]]:
    """The ranges by "kinds" and "calibrated"."""
    all_ratios = [*ratios(some, numbers), *practised(numbers)]
    after = after_one((same, off) for same, _, off in all_ratios)
    return {"kinds": _ranges(all_ratios),
            "calibrated": _ranges((same, kind, off) for (same, kind, _), off
                                  in zip(all_ratios, after) if off is not None)}


def after_one(each: Iterable[tuple[Hashable, float]]) -> Iterator[float | None]:
    """Each over the one before it that is of the same: what is left after a calibration by that."""
    before: dict[Hashable, float] = {}
    for same, off in each:
        yield off / before[same] if same in before else None
        before[same] = off


def _ranges(each: Iterable[tuple[tuple[str, ...], tuple[str, str], float]]
            ) -> dict[str, dict[str, float]]:
    """By kind, of `ratios`; and of a stack, where LEAST_SOURCES have published it."""
    kinds: dict = defaultdict(lambda: defaultdict(list))
    for (source, *_), (kind, stack), off in each:
        kinds[kind][source].append(off)
        kinds[f"{kind}, {stack}"][source].append(off)
    return {kind: _range(by_source) for kind, by_source in sorted(kinds.items())
            if kind in evidence.KINDS or len(by_source) >= LEAST_SOURCES}


def outside(some: Sequence[Run], numbers: Numbers) -> list[float]:
    """1 for each run that is outside the range which the other sources of its kind give, else 0."""
    misses, each = [], [*ratios(some, numbers)]
    for name, own in itertools.groupby(each, lambda ratio: ratio[0][0]):
        others = _ranges(ratio for ratio in each if ratio[0][0] != name)
        for _, kind, off in own:
            _, known = evidence.range_of(others, *kind)
            misses.append(float(not known["low"] <= off <= known["high"]))
    return misses


def _range(by_source: dict[str, list[float]]) -> dict[str, float]:
    """The wider one: where sources count alike, and where runs do."""
    each = sorted((off, len(offs)) for offs in by_source.values() for off in offs)
    ways = [[(off, 1.0) for off, _ in each], [(off, 1 / count) for off, count in each]]
    # the predicted time is in its own range; few sources know little of the next one
    wider = FEW ** max(0, LEAST_SOURCES - len(by_source))
    low = min(1.0, *(_quantile(way, NINE_OF_TEN[0]) for way in ways)) / wider
    high = max(1.0, *(_quantile(way, NINE_OF_TEN[1]) for way in ways)) * wider
    return {"low": float(f"{low:.3g}"), "high": float(f"{high:.3g}"), "runs": len(each),
            "sources": len(by_source)}


def _quantile(each: Sequence[tuple[float, float]], share: float) -> float:
    left = share * sum(weight for _, weight in each)
    for value, weight in each:
        left -= weight
        if left <= 1e-9:
            return value
    return each[-1][0]


def record() -> dict:
    all_open, held_out = taken(False), ranged()
    some = list(cases())
    numbers, most = fit(some, BEGIN), defaultdict(int)
    for run in (*all_open, *held_out):
        shape = evidence.shape_of(run.layout)
        most[shape] = max(most[shape], run.devices)
    return {"command": "python -m tests.bench.fit", "runs": len(some), "numbers": numbers,
            **kinds(held_out, numbers), "most_devices": dict(sorted(most.items()))}


if __name__ == "__main__":
    text = json.dumps(record(), indent=1)
    print(re.sub(r"\[[\d\s,]+\]", lambda match: json.dumps(json.loads(match[0])), text))
