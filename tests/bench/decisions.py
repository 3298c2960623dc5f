"""50 changes in a row, each kept or discarded, as an automated agent does: how many changes that do
nothing are kept, by the referee of `lpkit claim`, and by comparing means of one seed or three.

    lpkit bench decisions --out data/measured       a minute of one core

Losses are drawn from the recorded runs of `tests.bench.claims`, as they are; no run is in both arms
of a decision. What was kept is what the next change must beat. An arm's runs are carried on to the
next decision, as the command does it (a run is done once, and seeds begin at 0); or both arms run
anew for each.
"""

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lpkit.claims import referee
from tests.bench.claims import FALSE, MISSED, PILOT, PLANTED, POOL, asked
from tests.bench.harness import Result, paired

NAME, DECISIONS, SEQUENCES = "decisions", 50, 500
FIRST = 2               # sequences, of seeds 0 and 1, that are told besides
REAL = 10               # changes of a mixed sequence that gain PLANTED
LOOKS = 2               # as a claim has where its file does not say
SMALLER = 0.01          # the effect of a file that has sigma, too
CARRIED, ANEW = "runs carried on", "both run anew"
Losses = Callable[[int], list[float]]       # of so many seeds, the same ones first


class Arm:
    """Runs of one config, drawn from `losses` when they are asked for. `taken`: runs of the pool
    that are in this decision, of both arms."""

    def __init__(self, rng: random.Random, losses: list[float], taken: set[int]):
        self._rng, self._losses, self.taken = rng, losses, taken
        self._pilot: list[int] = []
        self._runs: list[int] = []

    def _drawn(self, runs: list[int], n: int) -> list[float]:
        while len(runs) < n:
            run = self._rng.randrange(len(self._losses))
            if run not in self.taken:
                self.taken.add(run)
                runs.append(run)
        return [self._losses[run] for run in runs[:n]]

    def pilot(self) -> list[float]:
        return self._drawn(self._pilot, PILOT)

    def seeds(self, n: int) -> list[float]:
        return self._drawn(self._runs, n)

    def begin(self) -> None:
        """Begins another decision: the other arm may have all runs but this one's."""
        self.taken = {*self._pilot, *self._runs}


Rule = Callable[[Arm, Losses], bool]


def by_referee(losses: list[float]) -> Rule:
    """As the command settles a claim: a pilot, the seeds that it asks for, looks."""
    most = (len(losses) - PILOT) // 2

    def keeps(first: Arm, other: Losses) -> bool:
        return _better(first, other, min(asked(first.pilot(), LOOKS), most))

    return keeps


def by_referee_with_sigma(losses: list[float]) -> Rule:
    """Its file says sigma, of all recorded runs, so that no pilot decides; and a smaller effect."""
    sd = math.sqrt(2) * statistics.stdev(map(math.log, losses))
    n = referee.needed(SMALLER, sd, referee.levels(LOOKS)[-1])
    return partial(_better, n=n)


def _better(first: Arm, other: Losses, n: int) -> bool:
    return referee.judge(lambda seeds: (first.seeds(seeds), other(seeds)), n,
                         LOOKS).word == "better"


def by_means(losses: list[float], n: int = 1) -> Rule:
    return lambda first, other: statistics.fmean(other(n)) < statistics.fmean(first.seeds(n))


REFEREE = "the referee"
RULES: dict[str, Callable[[list[float]], Rule]] = {
    REFEREE: by_referee, f"{REFEREE}, sigma given, effect {SMALLER:.0%}": by_referee_with_sigma,
    "the lower of two runs": by_means, "the lower mean of three": partial(by_means, n=3)}


@dataclass
class Sequence:
    """`gains`, `kept`: by decision. `runs`: that were made for all of them."""

    gains: list[float]
    kept: list[bool] = field(default_factory=list)
    runs: int = 0

    def count(self, real: bool, kept: bool = True) -> int:
        return sum(bool(gain) == real and was_kept == kept
                   for gain, was_kept in zip(self.gains, self.kept, strict=True))


def sequence(seed: int, losses: list[float], rule: Rule, real: int = 0, *, anew: bool = False
             ) -> Sequence:
    """DECISIONS decisions, of which `real`, at random places, are about a gain of PLANTED. It is a
    share of the loss: what was gained before is in both arms, and no rule can tell."""
    rng = random.Random(seed)
    gains = [PLANTED] * real + [0.0] * (DECISIONS - real)
    rng.shuffle(gains)
    done, best = Sequence(gains), Arm(rng, losses, set())
    for gain in gains:
        if anew:
            best = Arm(rng, losses, set())
        best.begin()
        had, other = len(best.taken), Arm(rng, losses, best.taken)
        kept = rule(best, partial(_lower, other, gain))
        done.runs += len(best.taken) - had
        done.kept.append(kept)
        best = other if kept else best
    return done


def _lower(arm: Arm, gain: float, n: int) -> list[float]:
    return [loss * (1 - gain) for loss in arm.seeds(n)]


def run(rounds: int = 9) -> list[Result]:
    """Shares of decisions that go wrong. Nothing is timed, so there are no rounds."""
    losses = json.loads(POOL.read_text())["losses"]["adamw"]
    rows = [("kept by", "how", f"of {DECISIONS} that do nothing", "95 of 100 sequences",
             "of the first 10", "runs a decision", f"mixed: of {REAL} gains",
             f"of {DECISIONS - REAL} that do nothing")]
    facts: dict[str, Any] = {"sequences": SEQUENCES, "decisions": DECISIONS, "runs": len(losses),
                             "looks": LOOKS, "breakdown": rows, "found": {}}
    results = []
    for name, rule_for in RULES.items():
        for how in (CARRIED, ANEW):
            nothing, mixed = ([sequence(seed, losses, rule_for(losses), real, anew=how == ANEW)
                               for seed in range(SEQUENCES)] for real in (0, REAL))
            facts["found"][f"{name}, {how}"] = summary = summary_of(nothing, mixed)
            rows.append((name, how, _mean(summary["kept"]), "{} to {}".format(*summary["middle"]),
                         f"{summary['of_first_10']:.2f}", f"{summary['runs_a_decision']:.1f}",
                         _mean(summary["gains_kept"]), _mean(summary["nothing_kept_beside_gains"])))
            results += _results(f"{name}, {how}", nothing, mixed, facts)
    return results


def summary_of(nothing: list[Sequence], mixed: list[Sequence]) -> dict[str, Any]:
    """Says what a sequence keeps: means with their 95% interval. `middle`: where 95 of 100
    sequences lie.
    `pairs_above`: the share of FIRST sequences that together keep more than the share FALSE."""
    counts = [sequence.count(real=False) for sequence in nothing]
    pairs = [sum(counts[i:i + FIRST]) for i in range(0, len(counts), FIRST)]
    cut = int(0.025 * len(counts))
    return {"kept": interval(counts), "middle": [sorted(counts)[i] for i in (cut, -1 - cut)],
            "of_first_10": statistics.fmean(sum(sequence.kept[:10]) for sequence in nothing),
            "pairs_above": statistics.fmean(pair > FALSE * FIRST * DECISIONS for pair in pairs),
            "runs_a_decision": statistics.fmean(sequence.runs for sequence in nothing) / DECISIONS,
            "gains_kept": interval([sequence.count(real=True) for sequence in mixed]),
            "nothing_kept_beside_gains": interval(
                [sequence.count(real=False) for sequence in mixed])}


def interval(counts: Iterable[int]) -> tuple[float, float, float]:
    """Returns the mean, and its 95% interval: sequences are independent, their decisions are
    not."""
    counts = list(counts)
    mean, half = statistics.fmean(counts), 1.96 * statistics.stdev(counts) / math.sqrt(len(counts))
    return mean, mean - half, mean + half


def _mean(estimate: tuple[float, float, float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*estimate)


def _results(what: str, nothing: list[Sequence], mixed: list[Sequence], facts: dict[str, Any]
             ) -> list[Result]:
    def result(case: str, sequences: list[Sequence], target: float, *,
               real: bool = False) -> Result:
        wrong, right = (sum(sequence.count(real, kept) for sequence in sequences)
                        for kept in (not real, real))
        return paired(NAME, ours=[wrong / (wrong + right)], peer=[1.0], peer_name="such changes",
                      case=f"{what}: {case}", better="lower", unit="of the changes", facts=facts,
                      target=target if what.startswith(REFEREE) else None)

    return [result(f"{FIRST} sequences, what does nothing is kept", nothing[:FIRST], FALSE),
            result(f"{len(nothing)} sequences, what does nothing is kept", nothing, FALSE),
            result("mixed, what does nothing is kept", mixed, FALSE),
            result(f"mixed, a gain of {PLANTED:.1%} is missed", mixed, MISSED, real=True)]
