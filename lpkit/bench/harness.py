"""Racing an implementation against its peer: same process, same inputs, taking turns.

A noisy machine slows both sides of a round alike, so what is reported is the median of the rounds'
own ratios with their quartiles, never a ratio of two medians. Times are seconds. A ratio above 1 is
in our favour when the target is "at least" (peer / ours: how many times faster); for an "at most"
target it is ours / peer, the share of the peer's cost.
"""

import gc
import itertools
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from lpkit.machine_facts import cores, cpu_name, versions
from lpkit.timing import interleaved_seconds

ROUNDS = 9                  # fewer say little about quartiles
SAMPLE_SECONDS = 0.005      # at least, so that a clock's grain and one interrupt do not count
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case against one peer: medians over rounds, in `unit`; `quartiles` are those of the
    paired ratio."""

    name: str
    case: str
    peer: str
    ratio: float
    quartiles: tuple[float, float]
    better: Literal["higher", "lower"]
    target: float | None            # at least, when higher is better; at most, when lower is
    ours_median: float
    peer_median: float
    unit: str
    rounds: int
    provenance: dict[str, Any] = field(repr=False)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio >= self.target if self.better == "higher" else self.ratio <= self.target

    @property
    def margin(self) -> float:
        """1: exactly on target; above: better than it."""
        on = 1.0 if self.target is None else self.target
        return self.ratio / on if self.better == "higher" else on / max(self.ratio, 1e-12)

    def verdict(self) -> str:
        if self.target is None:
            return "no target"
        bound = f"{'at least' if self.better == 'higher' else 'at most'} {self.target:g}"
        if self.met:
            return f"met ({bound})"
        return f"short by {abs(1 - self.margin):.1%} ({bound})"

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        facts = values.pop("provenance")
        return values | {"quartiles": list(self.quartiles), "met": self.met,
                         "verdict": self.verdict()} | facts


def race(name: str, *, ours: Callable[[], Any], peers: dict[str, Callable[[], Any]],
         check: Callable[[], None], target: float | dict[str, float] | None = None, case: str = "",
         rounds: int = ROUNDS, sync: Callable[[], None] = lambda: None,
         sample_seconds: float = SAMPLE_SECONDS,
         packages: Iterable[str] = (), device: str | None = None) -> list[Result]:
    """Time `ours` against each peer; one Result per peer, as "times faster".

    check:  raises when the contenders disagree; it runs first, so no figure is ever printed for a
    wrong answer.
    target: the least ratio claimed, for all peers or by name.
    sync:   waits for the device, inside the timed region; for example torch.cuda.synchronize.
    Every round times all contenders once, in an order shuffled anew; each sample repeats its call
    until it lasts `sample_seconds`.
    """
    check()
    with _no_garbage_collection():
        loops = [_calibrate(call, sync, sample_seconds) for call in (ours, *peers.values())]
        runners = [_repeated(call, n, sync) for call, n in zip((ours, *peers.values()), loops)]
        totals = interleaved_seconds(runners, rounds=rounds, warm_up=0, shuffle=True)
    samples = [[seconds / n for seconds in total] for total, n in zip(totals, loops)]
    targets = target if isinstance(target, dict) else dict.fromkeys(peers, target)
    facts = provenance(packages, device)
    return [paired(name, ours=samples[0], peer=theirs, peer_name=peer, case=case,
                   target=targets.get(peer), facts=facts)
            for peer, theirs in zip(peers, samples[1:], strict=True)]


def paired(name: str, *, ours: Sequence[float], peer: Sequence[float], peer_name: str,
           facts: dict[str, Any], case: str = "", target: float | None = None,
           better: Literal["higher", "lower"] = "higher", unit: str = "s") -> Result:
    """A Result from samples taken in pairs by other means: subprocesses, a browser, a profiler."""
    ratios = [b / a if better == "higher" else a / b for a, b in zip(ours, peer, strict=True)]
    low, middle, high = quartiles(ratios)
    return Result(name=name, case=case, peer=peer_name, ratio=middle, quartiles=(low, high),
                  better=better, target=target, ours_median=statistics.median(ours),
                  peer_median=statistics.median(peer), unit=unit, rounds=len(ratios),
                  provenance=facts)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third; of a single value, itself."""
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def rotating(items: Sequence[Item]) -> Callable[[], Item]:
    """The next item at each call, round and round.

    Inputs that are reused stay in a cache and flatter whoever reads memory: race over enough copies
    to exceed it.
    """
    return itertools.cycle(items).__next__


def provenance(packages: Iterable[str] = (), device: str | None = None) -> dict[str, Any]:
    """Where and with what a figure was measured. `device`: None for the CPU, or an accelerator's
    name."""
    cpu = cpu_name()
    facts = {"device": device or cpu, "cpu": cpu, "cores": cores(),
             "platform": f"{platform.system()} {platform.machine()}"}
    if "torch" in sys.modules:
        facts["threads"] = sys.modules["torch"].get_num_threads()
    found = {name: version or "not installed"
             for name, version in versions(("lpkit", *packages)).items()}
    return {**facts, "versions": {"python": platform.python_version(), **found},
            "commit": _commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """One object for one benchmark: the case that does worst against its target, and all of them
    under `cases`."""
    shared = results[0].provenance
    cases = [{key: value for key, value in result.to_dict().items() if key not in shared}
             for result in results]
    worst = min(range(len(results)), key=lambda i: results[i].margin)
    return {**cases[worst], "met": all(result.met is not False for result in results), **shared,
            "cases": cases}


def steps_in_turns(updates: Mapping[str, Callable[[int], Item]], steps: int, *, warm_up: int = 0,
                   sync: Callable[[], None] = lambda: None) -> tuple[dict[str, list[float]],
                                                                     dict[str, list[Item]]]:
    """Seconds and results of `update(step)` by name, when all of them take each step before any
    takes the next.

    Steps count from 0. The first `warm_up` are not timed, but their results are kept.
    """
    results: dict[str, list[Item]] = {name: [] for name in updates}

    def runner(name: str) -> Callable[[], None]:
        def one() -> None:
            results[name].append(updates[name](len(results[name])))
            sync()
        return one

    seconds = interleaved_seconds([runner(name) for name in updates], rounds=steps - warm_up,
                                  warm_up=warm_up, shuffle=True)
    return dict(zip(updates, seconds)), results


def runs_by_step(runs: Mapping[str, Any]) -> dict[str, Callable[[int], float]]:
    """For `steps_in_turns`: each `Training` takes its update, and returns the loss."""
    return {name: lambda step, run=run: run.update(step).loss.item() for name, run in runs.items()}


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _repeated(call: Callable[[], Any], loops: int, sync: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(loops):
            call()
        sync()
    return run


def _calibrate(call: Callable[[], Any], sync: Callable[[], None], sample_seconds: float) -> int:
    """How many calls last `sample_seconds`; warms up on the way."""
    loops = 1
    while (took := interleaved_seconds([_repeated(call, loops, sync)], rounds=1,
                                       warm_up=0)[0][0]) < sample_seconds:
        loops = max(2 * loops, min(10 * loops,
                                   round(1.1 * loops * sample_seconds / max(took, 1e-9))))
    return loops


def _commit() -> str | None:
    """The commit of this checkout, with a + when the tree has changes; None outside a
    repository."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[2])]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True,
                                text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"],
                               capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")
