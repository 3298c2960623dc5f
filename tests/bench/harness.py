"""Racing an implementation against its peer: same process, same inputs, taking turns.

A noisy machine slows both sides of a round alike, so what is reported is the median of the rounds'
own ratios with their quartiles, never a ratio of two medians. Times are seconds. A ratio above 1 is
in our favour when the target is "at least" (peer / ours: how many times faster); for an "at most"
target it is ours / peer, the share of the peer's cost.
"""

import functools
import itertools
import math
import platform
import shlex
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lpkit.machine_facts import cores, cpu_limits, cpu_name, versions
from lpkit.timing import interleaved_seconds
from tests.bench import code

ROUNDS = 9                  # fewer say little about quartiles
SAMPLE_SECONDS = 0.005      # at least, so that a clock's grain and one interrupt do not count
Better = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case against one peer: medians over rounds, in `unit`; `quartiles` are those of the
    paired ratio."""

    name: str
    case: str
    peer: str
    ratio: float
    quartiles: tuple[float, float]
    better: Better
    target: float | None            # at least, when higher is better; at most, when lower is
    ours_median: float
    peer_median: float
    unit: str
    rounds: int
    provenance: dict[str, Any] = field(repr=False)

    @property
    def margin(self) -> float:
        """1: exactly on target; above: better than it."""
        target = 1.0 if self.target is None else self.target
        if self.better == "higher":
            return self.ratio / target
        return target / max(self.ratio, 1e-12)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.better == "lower" else self.margin >= 1

    def verdict(self) -> str:
        if self.target is None:
            return "no target"
        bound = {"higher": "at least", "lower": "at most"}[self.better]
        missed = f"short by {abs(1 - self.margin):.1%}"
        return f"{'met' if self.met else missed} ({bound} {self.target:g})"

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        facts = values.pop("provenance")
        return {**values, "quartiles": list(self.quartiles), "met": self.met,
                "verdict": self.verdict(), **facts}


def race(name: str, *, ours: Callable[..., Any], peers: Mapping[str, Callable[..., Any]],
         check: Callable[[], None] = lambda: None,
         target: float | Mapping[str, float] | None = None,
         over: Sequence[Sequence] = ((),), rounds: int = ROUNDS,
         sync: Callable[[], None] = lambda: None, sample_seconds: float = SAMPLE_SECONDS,
         **described: Any) -> list[Result]:
    """Time `ours` against each peer; one Result per peer, as "times faster".

    check:  raises when the contenders disagree; it runs first, so no figure is ever printed for a
    wrong answer. Left out where each was checked before.
    target: the least ratio claimed, for all peers or by name.
    over:   the arguments of the next call, round and round. Inputs that are reused stay in a cache
    and flatter whoever reads memory: race over enough of them to exceed it.
    sync:   waits for the device, inside the timed region; for example torch.cuda.synchronize.
    Every round times all contenders once, in an order shuffled anew; each sample repeats its call
    until it lasts `sample_seconds`. The rest describes the results: see `paired`.
    """
    check()
    timers = [timeit.Timer(_in_turn(call, over)) for call in (ours, *peers.values())]
    loops = [_calibrate(timer, sync, sample_seconds) for timer in timers]
    runners = [partial(_repeat, timer, n, sync) for timer, n in zip(timers, loops)]
    totals = interleaved_seconds(runners, rounds=rounds, warm_up=0, shuffle=True)
    mine, *theirs = ([seconds / n for seconds in total] for total, n in zip(totals, loops))
    targets = target if isinstance(target, Mapping) else dict.fromkeys(peers, target)
    return [paired(name, ours=mine, peer=seconds, peer_name=peer, target=targets[peer], **described)
            for peer, seconds in zip(peers, theirs, strict=True)]


def paired(name: str, *, ours: Sequence[float], peer: Sequence[float], peer_name: str,
           case: str = "", target: float | None = None, better: Better = "higher", unit: str = "s",
           packages: Iterable[str] = ("torch",), device: str | None = None,
           facts: Mapping[str, Any] | None = None) -> Result:
    """A Result from samples taken in pairs. `packages` and `device` are those of `provenance`;
    `facts` are recorded beside it, or in its place."""
    ratios = [b / a if better == "higher" else a / b for a, b in zip(ours, peer, strict=True)]
    low = middle = high = ratios[0]
    if len(ratios) > 1:
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Result(name=name, case=case, peer=peer_name, ratio=middle, quartiles=(low, high),
                  better=better, target=target, ours_median=statistics.median(ours),
                  peer_median=statistics.median(peer), unit=unit, rounds=len(ratios),
                  provenance=provenance(packages, device) | dict(facts or {}))


def provenance(packages: Iterable[str] = ("torch",), device: str | None = None) -> dict[str, Any]:
    """Return where and with what a number was measured. `device`: None for the CPU, or an
    accelerator's name; then the record also names the code that it timed."""
    cpu = cpu_name()
    facts = {"device": device or cpu, "cpu": cpu, "cores": cores(),
             "platform": f"{platform.system()} {platform.machine()}"}
    if limits := cpu_limits():
        facts["limits"] = limits
    if "torch" in sys.modules:
        facts |= {"threads": sys.modules["torch"].get_num_threads()}
        if gpu := _gpu(device):
            facts |= {**gpu, "code": {**code.today()}}
    installed = {name: version or "not installed"
                 for name, version in versions(("lpkit", *packages)).items()}
    return {**facts, "versions": {"python": platform.python_version(), **installed},
            "commit": _commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join([*limits, "lpkit", *sys.argv[1:]])}


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """One object for one benchmark: the case that does worst against its target, and all of them
    under `cases`."""
    shared = results[0].provenance
    cases = [{key: value for key, value in result.to_dict().items()
              if key not in shared or shared[key] != value} for result in results]
    worst = min(range(len(results)), key=lambda i: results[i].margin)
    return {**shared, **cases[worst], "met": all(result.met is not False for result in results),
            "cases": cases}


def recorded(result: Mapping[str, Any], how: str = "") -> list[str]:
    """Lines of Markdown over a record that `summary` made."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [f"## {result['device']}", "", f"Measured {result['date'][:10]} at commit "
            f"{result['commit']} with {versions}{how}: `{result['command']}`.", ""]


def steps_in_turns(runs: Mapping[str, Any], steps: int, *, warm_up: int = 1,
                   within_seconds: float = math.inf
                   ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and losses by name, when each `Training` takes a step before any takes the next; no
    more steps once `within_seconds` are over.

    The first `warm_up` steps compile and touch the memory: they are taken besides, and not timed.
    Their losses come first.
    """
    losses: dict[str, list[float]] = {name: [] for name in runs}

    def step(name: str) -> None:
        loss = runs[name].update(len(losses[name])).loss
        losses[name].append(loss.item())
        if loss.is_cuda:        # the optimizer came after the loss
            sys.modules["torch"].cuda.synchronize()

    seconds = interleaved_seconds([partial(step, name) for name in runs], rounds=steps,
                                  warm_up=warm_up, shuffle=True, within_seconds=within_seconds)
    return dict(zip(runs, seconds)), losses


def last_losses(losses: Mapping[str, Sequence[float]], peer: str, *, last: int, tolerance: float
                ) -> dict[str, float]:
    """Means over the `last` steps. AssertionError where one is farther from `peer`'s than
    `tolerance` of it."""
    means = {name: statistics.fmean(values[-last:]) for name, values in losses.items()}
    for name, loss in means.items():
        if abs(loss / means[peer] - 1) > tolerance:
            raise AssertionError(f"after {len(losses[name])} steps {name}: loss {loss:.4f}, {peer} "
                                 f"{means[peer]:.4f}: over {tolerance:.0%} apart")
    return means


def _in_turn(call: Callable[..., Any], over: Sequence[Sequence]) -> Callable[[], Any]:
    turn = itertools.cycle(over).__next__
    return lambda: call(*turn())


def _repeat(timer: timeit.Timer, loops: int, sync: Callable[[], None]) -> None:
    timer.timeit(loops)     # without garbage collection
    sync()


def _calibrate(timer: timeit.Timer, sync: Callable[[], None], sample_seconds: float) -> int:
    """How many calls last `sample_seconds`; warms up on the way."""
    loops = 1
    while True:
        run = partial(_repeat, timer, loops, sync)
        took = interleaved_seconds([run], rounds=1, warm_up=0)[0][0]
        if took >= sample_seconds:
            return loops
        enough = round(1.1 * loops * sample_seconds / max(took, 1e-9))
        loops = max(2 * loops, min(10 * loops, enough))


@functools.cache        # each result of a bench has it
def _gpu(device: str | None) -> dict[str, Any]:
    """What `hardware.provenance` says, once it was a GPU that was measured."""
    from lpkit import hardware  # imports torch, which a bench of imports must not

    # a figure that no device was asked for, such as a formula's, has a name in its place
    there = device and sys.modules["torch"].cuda.is_available()
    return hardware.provenance("cuda" if there else "cpu")


@functools.cache
def _commit() -> str | None:
    """The commit of this checkout, with a + when the tree has changes; None outside a
    repository."""
    command = ["git", "-C", str(Path(__file__).resolve().parents[2]), "describe", "--always",
               "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
