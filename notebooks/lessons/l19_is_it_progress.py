"""Lesson 19, Is it progress?: its study, its figures and its exercises.

Runs that differ only in their seed differ in their loss. 320 recorded runs represent all possible
runs (data/measured/claim-pool.json: one model of a million weights, validation loss in nats per
token, one run per seed). A change that does nothing is simulated by drawing both arms of a
comparison from these runs. Gains and sigmas are shares of the loss.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean, stdev
from typing import Any

from lessons.figures.drawing import NAMES, axis, box, columns, figure, note, rule, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import adding_to
from lessons.l06_fp8_training import LiveRuns as LiveRuns
from lpkit import preset as preset
from lpkit import records
from lpkit import start_each as start_each
from lpkit.claims import referee
from lpkit.errors import ConfigError, named
from lpkit.predict.evidence import MEASURED
from lpkit.tables import FAINT, html_table
from lpkit.training.runs import Run

# ---- The study

POOL = MEASURED / "claim-pool.json"
LION = MEASURED / "claim-lion.verdict"      # written by `lpkit claim docs/claims/lion.yaml`
DRAWN = 20_000      # changes that are drawn
TRIES = 50          # changes that are tried one after the other


def pool() -> tuple[dict[str, Any], list[float]]:
    """Return how the settings of the recorded runs differ from `cpu-3m`, and their losses."""
    recorded = json.loads(POOL.read_text())
    return recorded["base"], recorded["losses"]["adamw"]


def sigma_of(losses: Sequence[float]) -> float:
    """Return the standard deviation over runs of the loss, as a share of the loss."""
    return stdev(map(math.log, losses))


def of_nothing(sigma: float, seeds: int) -> NormalDist:
    """Return the distribution of the gains of changes that do nothing, by formula. `sigma`: of one
    run; `seeds`: runs per arm."""
    return NormalDist(0, sigma * math.sqrt(2 / seeds))


def gains_of_nothing(losses: Sequence[float], *, seeds: int, drawn: int = DRAWN) -> list[float]:
    """Return the gains of `drawn` changes that do nothing. Both arms of a change are drawn from
    `losses`, without replacement, with `seeds` runs each."""
    rng, gains = Random(0), []
    for _ in range(drawn):
        runs = rng.sample(losses, 2 * seeds)
        gains.append(1 - fmean(runs[seeds:]) / fmean(runs[:seeds]))
    return gains


def share_kept(gains: Sequence[float], bar: float) -> float:
    """Return the share of the changes whose gain is at least `bar`."""
    return fmean(gain >= bar for gain in gains)


def best_so_far(losses: Sequence[float], tries: int = TRIES, *, seed: int = 0) -> list[float]:
    """Return the gain over the first run after each of `tries` changes that do nothing, in a search
    that keeps every change whose loss is lower than the lowest loss so far."""
    drawn = Random(seed).sample(losses, tries + 1)
    return [1 - best / drawn[0] for best in itertools.accumulate(drawn, min)]


def changes_kept(gains: Sequence[float]) -> int:
    """Return the number of changes that a search keeps. `gains`: the result of `best_so_far`."""
    return sum(after > before for before, after in itertools.pairwise(gains))


def expected_best(n: int) -> float:
    """Return the expected largest of n normal numbers, in standard deviations (Blom 1958)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def sigma_between(df: int) -> tuple[float, float]:
    """Return the range that contains 95% of the estimates of sigma with `df` degrees of freedom,
    over the true sigma (Wilson and Hilferty 1931)."""
    low, high = (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df)) for z in (-1.96, 1.96))
    return max(low, 0.0) ** 1.5, high**1.5


def losses_of(runs: Mapping[str, Run]) -> list[float]:
    """Return the validation losses of the runs that are complete."""
    return [run.summary["val_loss"] for run in runs.values() if run.summary["status"] == "complete"]


def replayed(path: Path | str) -> dict[str, Any]:
    """Return the contents of a verdict file of `lpkit claim`. Raises DamagedError if the file was
    altered, and ConfigError if judging its losses again gives a different verdict."""
    contents = records.read(Path(path))
    for old in contents["verdicts"]:
        new = referee.look(*(old["losses"][old[arm]] for arm in ("against", "arm")), old["level"])
        if not (math.isclose(new.gain, old["gain"], rel_tol=1e-9) and new.word == old["verdict"]):
            raise ConfigError(f"{named(path)} has a gain of {old['gain']:+.2%} "
                              f"({old['verdict']}), and its losses give {new.gain:+.2%} "
                              f"({new.word}); settle it anew: {contents['command']}")
    return contents


# ---- Figures and tables

def verdict_figure(result: Mapping[str, Any]) -> dict:
    """Return the plotly spec of the result of a claim, in percent of the loss. It shows the gain of
    each comparison with its interval, and the gains of the pairs of runs that it averages; the same
    at equal seconds and at equal FLOPs, if they were measured; and the range of effects that are
    too small to detect. A gain is the gain of the arm that is named first."""
    rows, pairs = {}, []
    for verdict in result["verdicts"]:
        arms = verdict["arm"], verdict["against"]
        rows[" against ".join(arms)] = verdict
        losses = zip(*(verdict["losses"][arm] for arm in arms), strict=True)
        pairs += [(" against ".join(arms), 100 * (1 - a / b)) for a, b in losses]
        for kind in ("seconds", "FLOPs"):
            equal = verdict[f"equal_{kind.lower()}"] or {}
            if "gain" in equal:
                better = arms[verdict["gain"] < 0]
                rows[f"{better}, equal {kind}<br>({equal['steps']} steps)"] = equal
    gains, ends = ([100 * row["gain"] for row in rows.values()],
                   [[100 * end for end in row["interval"]] for row in rows.values()])
    across = {"type": "data", "symmetric": False, "thickness": 2, "width": 6,
              "array": [high - gain for gain, (_, high) in zip(gains, ends)],
              "arrayminus": [gain - low for gain, (low, _) in zip(gains, ends)]}
    effect = 100 * result["effect"]
    unseen = [box(-100 * row["could_see"], 100 * row["could_see"], i - 0.4, i + 0.4,
                  fill=COLOURS[4], opacity=0.25, layer="below")
              for i, row in enumerate(rows.values())]
    return figure(
        [scatter([gain for _, gain in pairs], [name for name, _ in pairs], "a pair of one seed",
                 FAINT, mode="markers", marker={"symbol": "line-ns-open", "size": 10},
                 hover="%{x:+.2f}%"),
         scatter(gains, list(rows), "gain with its 95% interval", COLOURS[0], mode="markers",
                 marker={"size": 10}, error_x=across, hover="%{x:+.2f}%"),
          # legend entries for the shapes below
         scatter([None], [None], "smallest effect of interest", COLOURS[1], line={"dash": "dash"}),
         scatter([None], [None], "too small to detect", COLOURS[4], mode="markers", opacity=0.5,
                 marker={"symbol": "square", "size": 14})],
        "; ".join(f"{verdict['arm']} against {verdict['against']}: {verdict['verdict']}"
                  for verdict in result["verdicts"]),
        height=200 + 70 * len(rows), xaxis=axis("gain: the loss is lower by, %"),
        yaxis=NAMES | {"autorange": False, "range": [len(rows) - 0.5, -0.5],
                       "categoryorder": "array", "categoryarray": list(rows)},
        shapes=[*unseen, rule(x=0, dash="solid"),
                *(rule(x=x, colour=COLOURS[1], width=2, dash="dash") for x in (-effect, effect))])


def difference_view(losses: Sequence[float]):
    """Return a view for an Explorer: a histogram of the gains of changes that do nothing, with the
    share of the gains that are at least `bar` percent."""
    sigma, edges = sigma_of(losses), [step / 400 for step in range(-16, 17)]

    def show(seeds: int, bar: float) -> dict:
        gains, normal = gains_of_nothing(losses, seeds=seeds, drawn=2000), of_nothing(sigma, seeds)
        bins = list(itertools.pairwise(edges))
        middles = [50 * (a + b) for a, b in bins]
        shares = [sum(a <= gain < b for gain in gains) / len(gains) for a, b in bins]
        by_formula = [normal.cdf(b) - normal.cdf(a) for a, b in bins]
        return figure(
            [columns(middles, shares, "2,000 changes that do nothing", COLOURS[0],
                     hover="%{x:.2f}%: %{y:.1%}"),
             scatter(middles, by_formula, "formula", COLOURS[1])],
            f"{seeds} seed{'s' * (seeds > 1)} per arm: {share_kept(gains, bar / 100):.0%} look "
            f"better by at least {bar:g}%, {normal.cdf(-bar / 100):.0%} by formula", height=380,
            xaxis=axis("gain of the new arm: its mean loss is lower by, %", range=[-4, 4]),
            yaxis=axis("share of the changes", tickformat=".0%", rangemode="tozero"),
            shapes=[rule(x=bar), box(bar, 4, 0, 1, fill=COLOURS[1], yref="paper", opacity=0.12)],
            bargap=0.05)

    return show


def progress_of_nothing(losses: Sequence[float], searches: int = 20) -> dict:
    """Return the plotly spec of searches over TRIES changes that do nothing: the gain over the
    first run as changes are tried."""
    sigma, many = sigma_of(losses), range(TRIES + 1)
    curves = [best_so_far(losses, seed=seed) for seed in range(searches)]
    data = [scatter(many, [100 * gain for gain in curve], "a search over changes that do nothing",
                    FAINT, line={"shape": "hv", "width": 1}, showlegend=not i,
                    hover="%{x} tried: %{y:.1f}%")
            for i, curve in enumerate(curves)]
    data += [scatter(many, [100 * fmean(column) for column in zip(*curves)], "mean of the searches",
                     COLOURS[0], line={"width": 3}),
             scatter(list(many)[1:], [100 * sigma * expected_best(n + 1) for n in many[1:]],
                     "formula", COLOURS[1], line={"dash": "dash", "width": 3})]
    return figure(data, "Apparent progress by changes that do nothing", height=400,
                  xaxis=axis("changes tried"),
                  yaxis=axis("lowest loss so far, % below the first run's"),
                  annotations=[note(f"sigma of one run: {sigma:.2%}", 1, 0.02, "right bottom",
                                    xref="paper", yref="paper", font={"color": FAINT})])


def found_by_t(sigma: float, n: int) -> float:
    """Return the smallest gain that a paired t-test over n pairs, at a level of 5%, detects in 80%
    of cases. The test estimates sigma from the pairs."""
    return referee.visible(n, math.sqrt(2) * sigma, referee.levels(1)[0])


def found_if_known(sigma: float, n: int) -> float:
    """Return the smallest gain that n seeds per arm detect in 80% of cases, at a level of 5%, if
    sigma is known. The exercise `seeds` solves this formula for n."""
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    return z * of_nothing(sigma, n).stdev


def sights(sigma: float) -> str:
    """Return an HTML table of the smallest gain that each number of seeds can detect."""
    rows = [(n, f"{found_by_t(sigma, n):.2%}", f"{found_if_known(sigma, n):.2%}",
             f"{of_nothing(sigma, n).cdf(-0.005):.0%}") for n in (3, 5, 10, 19, 40)]
    return html_table(("seeds per arm", "gain that a t-test detects in 80% of cases",
                       "the same, if sigma is known",
                       "changes that do nothing but look 0.5% better"), rows)


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


@exercise("19.false_share", (0.0, 0.01, 1), (0.005, 0.01, 1), (0.01, 0.01, 3), minutes=5,
          draw=lambda r: (r.uniform(0, 0.01), r.uniform(0.008, 0.02), r.randint(1, 8)),
          mistakes={"the means of both arms vary": lambda bar, sigma, n: NormalDist(
                        0, sigma / math.sqrt(n)).cdf(-bar),
                    "count one side only: a worse result is not kept":
                        lambda bar, sigma, n: 2 * NormalDist(
                        0, sigma * math.sqrt(2 / n)).cdf(-bar)})
def false_share(bar: float, sigma: float, n: int) -> float:
    return NormalDist(0, sigma * math.sqrt(2 / n)).cdf(-bar)


@exercise("19.seeds", (0.01, 0.01), (0.005, 0.0048), minutes=6, stars=2,
          draw=lambda r: (r.uniform(0.002, 0.02), r.uniform(0.003, 0.02)),
          mistakes={"both arms vary":
                        lambda effect, sigma: math.ceil((2.8015852 * sigma / effect) ** 2),
                    "such a test would miss half of these gains": lambda effect, sigma: math.ceil(
                        2 * (1.959964 * sigma / effect) ** 2)})
def seeds(effect: float, sigma: float) -> int:
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    return math.ceil(2 * (z * sigma / effect) ** 2)


def _flips(gains: Sequence[int]) -> list[int]:
    """Return the sum of the gains for each choice of their signs."""
    return [sum(sign * gain for sign, gain in zip(signs, gains, strict=True))
            for signs in itertools.product((-1, 1), repeat=len(gains))]


@exercise("19.sign_flip", ([1],), ([3, 1, -2],), ([5, 4, 4, 6, 5],), minutes=8, stars=2, drawn=60,
          draw=lambda r: ([r.randint(-4, 6) for _ in range(r.randint(1, 7))],),
          mistakes={"test both sides: a loss would also be a difference": lambda gains: fmean(
                        flipped >= sum(gains) for flipped in _flips(gains)),
                    "count the observed signs as one of the choices": lambda gains: fmean(
                        abs(flipped) > abs(sum(gains)) for flipped in _flips(gains))})
def sign_flip(gains: Sequence[int]) -> float:
    seen, as_far, ways = abs(sum(gains)), 0, 2 ** len(gains)
    for signs in itertools.product((-1, 1), repeat=len(gains)):
        as_far += abs(sum(sign * gain for sign, gain in zip(signs, gains, strict=True))) >= seen
    return as_far / ways
