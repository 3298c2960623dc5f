"""Lesson 28, Search: its study, its figures and its exercises.

Settings for which there is no rule can be searched: at random or by TPE (a tree-structured Parzen
estimator), with a median rule that ends bad trials early (pruning). The model and the text are the
same as in lesson 21. `lpkit bench tpe-random --out data/measured` records the searches in
data/measured/tpe-random-*.json.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace as replace
from functools import partial
from math import inf as inf
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from lessons.figures.drawing import axis, figure, scatter
from lessons.figures.figure import Figure
from lessons.figures.style import COLOURS
from lessons.judging.judge import adding_to
from lessons.l21_noise_scale_and_schedules import BASE
from lpkit import records
from lpkit.claims import referee, runs
from lpkit.claims.sweep import Judge as Judge
from lpkit.claims.sweep import Sweep, settle
from lpkit.predict.evidence import MEASURED
from lpkit.processes import Children
from lpkit.training.background import Background
from lpkit.training.background import default_folder as default_folder

# ---- Search: a sweep that is plotted while it runs

TRIALS, STARTUP, EVERY = 16, 5, 5       # the median rule prunes only after STARTUP trials
SEARCHED = Sweep(
    base="cpu-3m", trials=TRIALS, target="val_loss", sampler="random", pruner="median",
    settings=BASE | {"imports": ["lessons.rows.schedules"], "optimizer": "adamw",
                     "global_batch": 8, "steps": 40, "eval_every": EVERY, "eval_batches": 4,
                     "checkpoint_every": 0},
    search={"optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
            "optimizer.beta1": {"low": 0.5, "high": 0.99},
            "schedule": {"choices": ["constant", "linear", "cosine"]}})


class Search(Background):
    """A sweep in a background thread. Its result is the text that `lpkit sweep` prints. Trials run
    in one thread of this process (`pool`)."""

    def __init__(self, sweep: Sweep, out: Path):
        super().__init__("search")
        self.sweep, self.out = sweep, out     # `out`: the journal is `out`-MARK.jsonl

    def _do(self) -> dict[str, Any]:
        children = Children()
        with ThreadPoolExecutor(1) as pool, \
                runs.Workers(self.out.parent, children, 1, partial(pool.submit, runs.make)) as them:
            return settle(self.sweep, self.out, lambda what, configs, judges: them.finished(
                configs, judges=judges))


class LiveSweep(Figure):
    """A figure of the trials in a sweep's journal (a .jsonl file). It is redrawn when a process has
    added a trial."""

    def __init__(self, sweep: Sweep, out: Path):
        super().__init__(parallel_figure([], sweep))
        self.sweep, self.out, self.drawn = sweep, out, 0

    def look(self) -> None:
        journals = sorted(self.out.parent.glob(f"{self.out.name}-*.jsonl"), key=os.path.getmtime)
        trials = records.read_lines(journals[-1])[0] if journals else []
        if len(trials) != self.drawn:
            self.drawn = len(trials)
            self.show(parallel_figure(trials, self.sweep))

    async def until(self, search: Background) -> Any:
        """Redraw until `search` is done, and return its result."""
        while not search.done:
            self.look()
            await asyncio.sleep(0.1)
        self.look()
        self.refresh_output()
        return search.result()


def last_loss(trial: Mapping[str, Any]) -> float | None:
    """Return the last loss of a trial, finished or pruned; None if the trial diverged."""
    return trial["val_loss"] if trial["pruned"] is None else trial["pruned"]["val_loss"]


def saved_steps(trials: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Return the share of all trials' updates that pruning saved."""
    ends = [steps if trial["pruned"] is None else trial["pruned"]["step"] for trial in trials]
    return 1 - fmean(ends) / steps


@dataclass(frozen=True)
class Gain:
    """The share by which TPE's best loss is below random search's best loss."""

    mean: float     # over pairs of searches
    low: float      # of the 95% interval of the mean
    high: float
    p: float        # two-sided p-value of a paired t-test


def gain(losses: Mapping[str, Sequence[Sequence[float]]], trials: int) -> Gain:
    """Compare the best of the first `trials` trials. `losses`: by sampler, search and trial."""
    each = [math.log(min(other[:trials]) / min(tpe[:trials]))
            for tpe, other in zip(losses["tpe"], losses["random"])]
    mean, error, df = fmean(each), statistics.stdev(each) / math.sqrt(len(each)), len(each) - 1
    reach = referee.t_quantile(0.975, df) * error
    return Gain(mean, mean - reach, mean + reach, 2 * referee.t_cdf(-abs(mean) / error, df))


# ---- Figures and tables

def parallel_figure(trials: Sequence[Mapping[str, Any]], sweep: Sweep) -> dict:
    """Return the plotly spec of a sweep, in parallel coordinates. Each trial is a line through its
    settings, its last update and its last loss, coloured by this loss; a diverged trial has no
    line. An axis has only the last part of a setting's name, because five whole names do not fit on
    a phone. The axes of settings cover the range of the search."""
    there = [trial for trial in trials if last_loss(trial) is not None]
    steps, losses = sweep.config({}).steps, [last_loss(trial) for trial in there]
    dimensions = []
    for key in sweep.search:
        domain = sweep.domain(key)[1]
        values, ticks = [trial["settings"][key] for trial in there], {}
        if choices := domain.get("choices"):
            values, ends = [choices.index(value) for value in values], (0, len(choices) - 1)
            ticks = {"tickvals": list(range(len(choices))), "ticktext": list(map(str, choices))}
        elif domain["log"]:
            values, ends = list(map(math.log10, values)), tuple(map(math.log10, (
                domain["low"], domain["high"])))
            powers = range(math.ceil(ends[0]), math.floor(ends[1]) + 1)
            ticks = {"tickvals": list(powers), "ticktext": [f"{10.0**power:g}" for power in powers]}
        else:
            ends = domain["low"], domain["high"]
        label = key.rpartition(".")[2] + ", log" * bool(domain.get("log"))
        dimensions.append({"label": label, "values": values, "range": list(ends), **ticks})
    ended = [steps if trial["pruned"] is None else trial["pruned"]["step"] for trial in there]
    dimensions += [{"label": "updates", "values": ended, "range": [0, steps]},
                   {"label": "loss, nats", "values": losses}]
    line = {"color": losses, "colorscale": "Cividis", "showscale": False}
    pruned = sum(trial["pruned"] is not None for trial in trials)
    return figure([{"type": "parcoords", "dimensions": dimensions, "line": line}],
                  f"{len(trials)} of {sweep.trials} trials, {pruned} pruned", height=420,
                  margin={"l": 70, "r": 50, "t": 90, "b": 30})


def searches() -> dict[str, list[list[float]]]:
    """Return the losses that `lpkit bench tpe-random` recorded, by sampler, search and trial."""
    return json.loads(next(MEASURED.glob("tpe-random-*.json")).read_text())["losses"]


def best_so_far(losses: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(losses, min))


def search_figure(by_sampler: Mapping[str, Sequence[Sequence[float]]]) -> dict:
    """Return the plotly spec of the best loss after each trial, by sampler: a pale line per search,
    and the mean over searches."""
    data = []
    for (sampler, losses), colour in zip(by_sampler.items(), COLOURS):
        curves = [best_so_far(search) for search in losses]
        trials = list(range(1, len(curves[0]) + 1))
        data += [scatter(trials, curve, sampler, colour, opacity=0.2, line={"width": 1},
                         hover=None, showlegend=False) for curve in curves]
        data.append(scatter(trials, [fmean(column) for column in zip(*curves)],
                            f"{sampler}, mean of {len(curves)} searches", colour, line={"width": 3},
                            hover="%{x} trials: %{y:.3f} nats"))
    return figure(data, "Lowest loss so far in a search", height=400, xaxis=axis("trials"),
                  yaxis=axis("validation loss after 40 updates, nats", range=[2.65, 3.2]))


def wins(losses: Mapping[str, Sequence[Sequence[float]]], trials: int) -> int:
    """Return the number of pairs of searches in which TPE's best of `trials` trials is lower."""
    return sum(min(a[:trials]) < min(b[:trials]) for a, b in zip(losses["tpe"], losses["random"]))


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


def _chances(r: Random) -> tuple[float, float]:
    return r.uniform(0.01, 0.5), r.uniform(0.5, 0.999)


@exercise("28.trials", (0.5, 0.5), (0.5, 0.9), (0.05, 0.95), (0.1, 0.95), minutes=4, draw=_chances,
          mistakes={"all n trials miss with the probability (1 - q)^n":
                        lambda q, p: math.ceil(p / q),
                    "the probability must be at least p: round up": lambda q, p: math.floor(
                        math.log(1 - p) / math.log(1 - q)),
                    "all trials may miss with the probability 1 - p, not p": lambda q, p: math.ceil(
                        math.log(p) / math.log(1 - q))})
def trials_needed(q: float, p: float) -> int:
    return math.ceil(math.log(1 - p) / math.log(1 - q))


@exercise("28.coin", (1, 0), (1, 1), (11, 5), (0, 6), minutes=5, stars=2,
          draw=lambda r: (r.randint(0, 15), r.randint(1, 15)),
          mistakes={"count both tails: either side may win": lambda ahead, behind: sum(
                        math.comb(ahead + behind, k)
                        for k in range(max(ahead, behind), ahead + behind + 1))
                        / 2 ** (ahead + behind),
                    "add all counts that are at least as uneven": lambda ahead, behind: min(
                        1.0, 2 * math.comb(ahead + behind, ahead) / 2 ** (ahead + behind)),
                    "at most 1": lambda ahead, behind: 2 * sum(
                        math.comb(ahead + behind, k)
                        for k in range(max(ahead, behind), ahead + behind + 1))
                        / 2 ** (ahead + behind)})
def coin(ahead: int, behind: int) -> float:
    n, more = ahead + behind, max(ahead, behind)
    one_side = sum(math.comb(n, k) for k in range(more, n + 1)) / 2**n
    return min(1.0, 2 * one_side)
