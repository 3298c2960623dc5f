"""Decide a claim: measure the cost of a step, measure sigma in a pilot, tune all arms, compare
them, and compare them again at equal seconds and equal FLOPs."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from lpkit.claims import protocol, referee
from lpkit.claims.protocol import Claim
from lpkit.config import Config, flat
from lpkit.errors import ConfigError, RunFailedError

# The compared runs have the seeds 0, 1, ... The runs that decide how many seeds, or which settings,
# are compared have other seeds: a run that was used to plan the comparison would bias it.
TUNING_SEED, PILOT_SEED, AGAIN_SEED, METERED_SEED = 1_000_000, 2_000_000, 3_000_000, 4_000_000
METERED_RUNS = 3        # runs per config that measure the cost of a step; their median counts
# If the better arm costs more than the other arm by this factor (in seconds or FLOPs), it must also
# win at equal cost.
SAME = 1.02
Records = list[dict[str, Any]]


class Settling:
    """The runs and intermediate results of one claim; `settle` returns its verdicts.

    finished: function (purpose, configs) that makes runs and returns their records, in order. A
              record has the fields `runs.FIELDS`, `name` and `seconds`
    say:      prints a line that the user should read before the verdict
    """

    def __init__(self, claim: Claim, finished: Callable[[str, list[Config]], Records],
                 say: Callable[[str], None]):
        self.claim, self._finished, self.say = claim, finished, say
        self.ledger: dict[str, dict[str, Any]] = {}         # name -> record of every run
        # config that measures the cost of a step -> the cost in seconds or joules
        self.costs: dict[Config, float] = {}
        # name of an arm -> (tuned config, first seed of its runs)
        self.arms: dict[str, tuple[Config, int]] = {}
        self.doubts: list[str] = []         # reasons to trust the verdict less

    def run(self, what: str, configs: list[Config]) -> Records:
        """Make runs and return their records. `what`: their purpose, for the progress lines."""
        records = self._finished(what, configs)
        self.ledger.update((record["name"], record) for record in records)
        devices = {record["device"]: 0 for record in self.ledger.values() if record.get("device")}
        if len(devices) > 1 and "seconds" in self.claim.budget:
            raise ConfigError(f"budget.seconds needs machines of one kind, and runs were made on "
                              f"{' and '.join(devices)}; request one kind in job, or give steps")
        return records

    def settle(self, null: bool) -> dict[str, Any]:
        """Returns the verdicts and all that led to them, as the object that `lpkit claim --json`
        prints. `null`: compare the first arm with itself, with other seeds. Raises ConfigError if
        the allowed seeds cannot detect the effect, and RunFailedError for an arm that diverges."""
        claim, (first, *others) = self.claim, self.claim.arms
        arms = [first] if null else list(claim.arms)
        self._meter(arms)
        sigma, n = self._plan(first)
        tuned, tuning = self._tune(arms)
        if null:
            others = [f"{first} again"]
            self.arms[others[0]] = self.arms[first][0], AGAIN_SEED
        verdicts = [self._compare(first, other, n, tuning["runs"]) for other in others]
        everything = list(self.ledger.values())
        energy = [record["energy_wh"] for record in everything]
        return {"sentence": " ".join(verdict["sentence"] for verdict in verdicts),
                "verdicts": verdicts, "target": claim.target, "effect": claim.effect,
                "budget": dict(claim.budget),
                "sigma": sigma, "seeds_asked": n, "tuned": tuned, "tuning": tuning,
                "doubts": self.doubts, "claim": {key: value for key, value in asdict(claim).items()
                                                 if key not in protocol.Made.__annotations__},
                "runs": len(everything), "seconds": _seconds(everything),
                "restarts": sum(record.get("restarts", 0) for record in everything),
                "energy_wh": None if None in energy else math.fsum(energy)}

    def _config(self, arm: str, point: Mapping[str, Any]) -> Config:
        """Returns the Config of an arm at a point of the tuning grid, with as many steps as the
        budget pays for."""
        return self.claim.config(arm, point, self.costs.get(self.claim.metering(arm, point)))

    def _meter(self, arms: list[str]) -> None:
        """Fills `self.costs`: measures the cost of a step by short runs, if the budget is in
        seconds or joules. Their records are stored like those of other runs, so a claim that is
        continued computes the same numbers of steps."""
        [kind] = self.claim.budget
        if kind not in protocol.METERED:
            return
        metered = list(dict.fromkeys(self.claim.metering(arm, point) for arm in arms
                                 for point in ({}, *self.claim.points)))
        runs = [config.replace({"seed": METERED_SEED + k, "eval_batches": 1})
                for k in range(METERED_RUNS) for config in metered]
        costs: list[float] = []
        # an energy counter counts all runs of the moment, so runs are metered one after another
        for group in [runs] if kind == "seconds" else [[config] for config in runs]:
            for record in self.run("what a step costs", group):
                if record[f"step_{kind}"] is None:
                    why = record["error"] or "no energy counter: NVML of a GPU or RAPL of a CPU"
                    raise ConfigError(f"budget.{kind}={self.claim.budget[kind]} needs the {kind} "
                                      f"of a step, which a run here does not tell ({why}); give "
                                      f"budget: {{seconds: 30}} or {{steps: 300}}")
                costs.append(record[f"step_{kind}"])
        self.costs = {config: statistics.median(costs[i::len(metered)])
                      for i, config in enumerate(metered)}

    def _plan(self, first: str) -> tuple[float, int]:
        """Returns sigma (the standard deviation of one arm's target over seeds, as a share of the
        target) and the number of seeds per arm that detect the effect. The pilot uses the first arm
        without tuning, so that too few seeds raise ConfigError before most runs are paid for."""
        claim, sigma, df, source = self.claim, self.claim.sigma, None, "from the file"
        if sigma is None:
            runs = self.run("pilot", [self._config(first, {}).replace({"seed": PILOT_SEED + k})
                                      for k in range(claim.pilot)])
            sigma = statistics.stdev(map(math.log, _losses(runs, first)))
            df, source = claim.pilot - 1, f"from {claim.pilot} runs of {first}"
        self.say(f"sigma is {sigma:.2%} of {claim.target}, {source}; {referee.POWER:.0%} of the "
                 "time " + ", ".join(f"{n} seeds per arm detect {claim.sees(n, sigma, df):.2%}"
                             for n in sorted({3, 5, 10, 20, claim.seeds})))
        n = claim.seeds_to_see(sigma, df)
        self.say(f"{claim.effect:.2%} needs {n} seeds per arm; the file allows {claim.seeds}")
        return sigma, n

    def _tune(self, arms: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the best point of each arm's grid, and the cost of tuning. Stores the tuned
        configs in `self.arms`. The seeds of tuning are different from those of the comparison."""
        grids = {arm: [({key: flat(config)[key] for key in self.claim.tuning}, config)
                       for config in (self._config(arm, point) for point in self.claim.points)]
                 for arm in arms}
        seeds = range(TUNING_SEED, TUNING_SEED + self.claim.tuning_seeds)
        runs = self.run("tuning", [config.replace({"seed": seed}) for grid in grids.values()
                                   for _, config in grid for seed in seeds])
        losses = [math.inf if run["val_loss"] is None else run["val_loss"] for run in runs]
        left, tuned = iter(losses), {}
        for arm, grid in grids.items():
            means = [statistics.fmean(next(left) for _ in seeds) for _ in grid]
            if (least := min(means)) == math.inf:
                raise ConfigError(f"{arm} diverged at every point of tuning; give smaller values "
                                  f"of optimizer.lr")
            tuned[arm], config = grid[means.index(least)]
            self.arms[arm] = config, 0
            for key, value in tuned[arm].items():
                tried = {point[key] for point, _ in grid if isinstance(point[key], (int, float))}
                if len(tried) > 2 and value in (min(tried), max(tried)):
                    self.doubts.append(f"the best {key} of {arm} is the smallest or largest value; "
                                       f"more values may change the verdict")
        return tuned, {"points": len(grid), "runs": len(runs), "seconds": _seconds(runs)}

    def _seeds(self, arm: str, n: int, **changes: Any) -> list[Config]:
        """Return the tuned config of an arm with n seeds, and with further changes."""
        config, first = self.arms[arm]
        return [config.replace({"seed": first + k, **changes}) for k in range(n)]

    def _compare(self, a: str, b: str, n: int, tuning_runs: int) -> dict[str, Any]:
        """Return the verdict on arm `b` against arm `a` with at most n seeds per arm,
        JSON-ready."""
        claim, seen = self.claim, {}

        def losses(seeds: int) -> tuple[list[float], list[float]]:
            # alternate the arms, so that other processes on the machine slow both arms equally
            pairs = zip(self._seeds(a, seeds), self._seeds(b, seeds))
            runs = self.run(f"{b} against {a}", [config for pair in pairs for config in pair])
            seen.update({a: runs[::2], b: runs[1::2]})
            return _losses(seen[a], a), _losses(seen[b], b)

        verdict = referee.judge(losses, n, claim.looks, len(claim.arms) - 1)
        configs = {arm: self.arms[arm][0] for arm in (a, b)}
        costs = {"seconds": {arm: statistics.median(run["step_seconds"] for run in runs)
                             for arm, runs in seen.items()},
                 "flops": {arm: protocol.step_flops(config) for arm, config in configs.items()}}
        comparison = {"arm": b, "against": a, "verdict": verdict.word, **asdict(verdict),
                 "losses": {arm: _losses(runs, arm) for arm, runs in seen.items()},
                 "steps": {arm: config.steps for arm, config in configs.items()}}
        for kind, cost in costs.items():
            comparison |= {f"step_{kind}": cost, f"equal_{kind}": None}
            # equal cost is tested only after a difference was detected, and in one look
            if verdict.word != "no difference":
                better, other = (b, a) if verdict.gain > 0 else (a, b)
                took = {arm: cost[arm] * config.steps for arm, config in configs.items()}
                comparison[f"equal_{kind}"] = self._at_equal(better, comparison["losses"][other],
                                                        took[better] / took[other])
        return comparison | {"sentence": sentence(claim, comparison, tuning_runs)}

    def _at_equal(self, better: str, others: list[float], ratio: float) -> dict[str, Any]:
        """Tests whether the better arm still wins with the cost (seconds or FLOPs) of the other
        arm. If the better arm costs more, it is trained again with fewer steps, and with a learning
        rate schedule for so many steps.

        others: losses of the other arm
        ratio:  cost of the better arm / cost of the other arm"""
        steps = self.arms[better][0].steps
        if ratio <= SAME:
            return {"ratio": ratio, "steps": steps, "survives": True}
        fewer = max(1, int(steps / ratio))
        runs = self.run(f"{better} in {fewer} steps", self._seeds(better, len(others), steps=fewer))
        verdict = referee.look(others, _losses(runs, better),
                               referee.ALPHA / (len(self.claim.arms) - 1))
        return {"ratio": ratio, "steps": fewer, "survives": verdict.word == "better",
                **asdict(verdict)}


def sentence(claim: Claim, comparison: Mapping[str, Any], tuning_runs: int) -> str:
    """Return the verdict as a sentence: which arm is better, by how much, the conditions of the
    test, and the smallest difference that it could detect."""
    gain, (low, high) = comparison["gain"], comparison["interval"]
    arms = comparison["arm"], comparison["against"]
    p = "p < 0.0001" if comparison["p"] < 1e-4 else f"p = {comparison['p']:.2g}"
    mine, theirs = map(comparison["steps"].get, arms)
    steps = f"{mine} steps and {theirs}, " * (mine != theirs)
    numbers = (f"{claim.target} {abs(gain):.2%} {'lower' if gain > 0 else 'higher'}, 95% interval "
               f"of the gain {low:+.2%} to {high:+.2%}, {p}, {steps}{comparison['seeds']} seeds an "
               f"arm, arms tuned alike in {tuning_runs} runs")
    unseen = f"differences below {comparison['could_see']:.2%} could not have been seen"
    if comparison["verdict"] == "no difference":
        out = "" if high < claim.effect else "not "
        return (f"No difference between {' and '.join(arms)} was seen ({numbers}); "
                f"a gain of {claim.effect:.2%} is {out}ruled out, {unseen}.")
    small = f", but by less than {claim.effect:.2%}" if abs(gain) < claim.effect else ""
    equal = f"at equal seconds {_stays(comparison['equal_seconds'], 'its steps take no longer')}"
    if abs(math.log(comparison["equal_flops"]["ratio"])) > math.log(SAME):
        equal += f", at equal FLOPs {_stays(comparison['equal_flops'], 'it has no more')}"
    return (f"{arms[0]} is {comparison['verdict']} than {arms[1]}{small} ({numbers}); {equal}; "
            f"{unseen}.")


def _stays(equal: Mapping[str, Any], why: str) -> str:
    """Return whether the difference remains at equal cost, in words. `why`: the reason in brackets
    if no further runs were needed."""
    if "gain" in equal:
        low, high = equal["interval"]
        why = f"{equal['steps']} steps: {low:+.2%} to {high:+.2%}"
    return f"{'it stays so' if equal['survives'] else 'that is not seen'} ({why})"


def _seconds(runs: Records) -> float:
    """Return the total seconds of runs."""
    return math.fsum(run["seconds"] for run in runs)


def _losses(runs: Records, arm: str) -> list[float]:
    """Return the final losses of an arm's runs. Raises RunFailedError if a run diverged."""
    if gone := [run["error"] for run in runs if run["val_loss"] is None]:
        raise RunFailedError(f"{arm} diverged in {len(gone)} of {len(runs)} runs, so it has no "
                             f"mean loss: {gone[0]}")
    return [run["val_loss"] for run in runs]
