"""From a claim to its verdict: pilot, tuning, looks, and the same comparison at equal seconds."""

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lpkit.claims import referee
from lpkit.claims.protocol import AGAIN_SEED, TUNING_SEED, Claim
from lpkit.config import Config
from lpkit.errors import ConfigError, RunFailedError
from lpkit.predict.units import duration

SAME_SECONDS = 1.02     # a step that takes longer than this is compared at equal seconds, too
Finished = Callable[[str, list[Config]], list[dict[str, Any]]]      # what they are for, and they


@dataclass(frozen=True, kw_only=True)
class _Arm:
    name: str
    config: Config              # tuned
    first_seed: int
    tuned: Mapping[str, Any]
    at_edge: tuple[str, ...]    # tuned settings whose best value is the grid's least or most

    def seeded(self, n: int, steps: int | None = None) -> list[Config]:
        changes = {"steps": steps} if steps else {}
        return [self.config.replace({"seed": self.first_seed + k, **changes}) for k in range(n)]


def settle(claim: Claim, finished: Finished, *, null: bool = False,
           say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
           ) -> dict[str, Any]:
    """What the command prints. `null`: the first arm against itself, with other seeds.

    Raises ConfigError where the budget cannot see the effect; RunFailedError for an arm that
    diverges.
    """
    ledger: dict[int, dict[str, Any]] = {}

    def run(what: str, configs: list[Config]) -> list[dict[str, Any]]:
        found = finished(what, configs)
        ledger.update((id(one), one) for one in found)
        return found

    first, *others = claim.arms
    sigma, n = _sigma(claim, first, run, say)
    before = len(ledger)
    arms = [_tuned(claim, arm, run) for arm in ([first] if null else claim.arms)]
    tuning = list(ledger.values())[before:]
    if null:
        again = {**vars(arms[0]), "name": f"{first} again", "first_seed": AGAIN_SEED}
        arms.append(_Arm(**again))
    seen: dict[tuple, list[dict[str, Any]]] = {}

    def losses(arm: _Arm, seeds: int, steps: int | None = None) -> list[float]:
        seen[arm.name, steps] = found = run(f"{seeds} seeds of {arm.name}",
                                            arm.seeded(seeds, steps))
        if gone := [one["error"] for one in found if one["val_loss"] is None]:
            raise RunFailedError(f"{arm.name} diverged in {len(gone)} of {seeds} runs, which no "
                                 f"mean can tell: {gone[0]}")
        return [one["val_loss"] for one in found]

    def compared(a: _Arm, b: _Arm) -> dict[str, Any]:
        verdict = referee.judge(lambda seeds: (losses(a, seeds), losses(b, seeds)), n,
                                claim.looks, claim.comparisons)
        steps = {arm.name: statistics.median(one["step_seconds"] for one in seen[arm.name, None])
                 for arm in (a, b)}
        result = {"arm": b.name, "against": a.name, "verdict": verdict.word, **asdict(verdict),
                  "step_seconds": steps,
                  "equal_seconds": _at_equal_seconds(claim, a, b, verdict, steps, losses)}
        return result | {"sentence": sentence(claim, result, len(tuning))}

    verdicts = [compared(arms[0], arm) for arm in arms[1:]]
    everything = list(ledger.values())
    energy = [one["energy_wh"] for one in everything]
    return {
        "verdicts": verdicts, "sentence": " ".join(one["sentence"] for one in verdicts),
        "target": claim.target, "effect": claim.effect, "budget": dict(claim.budget),
        "sigma": sigma, "seeds_asked": n, "null": null,
        "tuned": {arm.name: dict(arm.tuned) for arm in arms},
        "doubts": [f"the best {key} of {arm.name} is at the edge of the grid; a wider one may give "
                   f"another verdict" for arm in arms for key in arm.at_edge],
        "tuning": {"points": claim.points, "runs": len(tuning),
                   "seconds": math.fsum(one["seconds"] for one in tuning)},
        "runs": len(everything), "seconds": math.fsum(one["seconds"] for one in everything),
        "energy_wh": None if None in energy else math.fsum(energy)}


def _sigma(claim: Claim, first: str, run: Finished, say: Callable[[str], None]
           ) -> tuple[float, int]:
    """The sigma of one arm's target, a share of it, and the seeds an arm that see the effect. Of
    the pilot's runs none is compared, so no error is spent; they are the first seeds."""
    df, sigma, of = None, claim.sigma, "recorded"
    if sigma is None:
        pilot = [claim.config(first).replace({"seed": seed}) for seed in range(claim.pilot)]
        found = [one["val_loss"] for one in run(f"a pilot of {first}", pilot)]
        if None in found:
            raise RunFailedError(f"{first} diverged in the pilot; choose other settings for it")
        df, of = claim.pilot - 1, f"of {claim.pilot} runs of {first}"
        sigma = statistics.stdev(map(math.log, found))
    sees = ", ".join(f"{n}: {referee.visible(n, math.sqrt(2) * sigma, claim.level(), df):.2%}"
                     for n in sorted({3, 5, 8, 12, 20, claim.seeds}))
    say(f"sigma {sigma:.2%} of {claim.target} ({of}); gains that so many seeds an arm find "
        f"{referee.POWER:.0%} of the time, {sees}")
    n = claim.seeds_to_see(sigma, df)
    say(f"an effect of {claim.effect:.2%} asks for {n} seeds an arm, of {claim.seeds} at most")
    return sigma, n


def _tuned(claim: Claim, arm: str, run: Finished) -> _Arm:
    """The best point of the grid, by seeds that the comparison does not use."""
    grid = list(claim.grid(arm))
    seeds = range(TUNING_SEED, TUNING_SEED + claim.tuning_seeds)
    found = iter(run(f"tuning {arm}", [config.replace({"seed": seed}) for _, config in grid
                                       for seed in seeds]))
    means = []
    for _ in grid:
        some = [next(found)["val_loss"] for _ in seeds]
        means.append(math.inf if None in some else statistics.fmean(some))
    best = min(range(len(grid)), key=means.__getitem__)
    if means[best] == math.inf:
        raise ConfigError(f"{arm} diverged at every point of tuning; give smaller optimizer.lr")
    point, config = grid[best]
    edge = [key for key, values in claim.tuning.items()
            if len(values) > 2 and point[key] in (min(values), max(values))]
    return _Arm(name=arm, config=config, first_seed=0, tuned=point, at_edge=tuple(edge))


def _at_equal_seconds(claim: Claim, a: _Arm, b: _Arm, verdict: referee.Verdict,
                      steps: Mapping[str, float], losses: Callable[..., list[float]]
                      ) -> dict[str, Any] | None:
    """Whether the better arm stays so with as many seconds as the other's steps take: fewer steps,
    whose schedule ends there. Asked of a difference that was seen, once, at the same error. None:
    there was none."""
    if verdict.word == "no difference":
        return None
    better, other = (b, a) if verdict.gain > 0 else (a, b)
    ratio = steps[better.name] / steps[other.name]
    if ratio <= SAME_SECONDS:
        return {"survives": True, "ratio": ratio, "steps": better.config.steps, "gain": None}
    fewer = max(1, int(better.config.steps / ratio))
    level = referee.ALPHA / claim.comparisons
    found = referee.look(losses(other, verdict.seeds), losses(better, verdict.seeds, fewer), level)
    return {"survives": found.word == "better", "ratio": ratio, "steps": fewer, **asdict(found)}


def sentence(claim: Claim, found: Mapping[str, Any], tuning_runs: int) -> str:
    """One sentence that a person may quote."""
    gain, (low, high), seeds = found["gain"], found["interval"], found["seeds"]
    p = "p < 0.0001" if found["p"] < 1e-4 else f"p = {found['p']:.2g}"
    numbers = (f"{claim.target} {abs(gain):.2%} {'lower' if gain > 0 else 'higher'}, 95% interval "
               f"of the gain {low:+.2%} to {high:+.2%}, {p}, {seeds} seeds an arm, tuned alike in "
               f"{tuning_runs} runs")
    arm, against, equal = found["arm"], found["against"], found["equal_seconds"]
    if equal is None:
        limits = (f"a gain of {claim.effect:.2%} or more is ruled out" if high < claim.effect else
                  f"a gain of {claim.effect:.2%} is not ruled out")
        return (f"No difference between {arm} and {against} was seen ({numbers}); {limits}, and "
                f"gains below {found['could_see']:.2%} could not have been seen.")
    small = "" if abs(gain) >= claim.effect else (
        f", by less than the {claim.effect:.2%} that was asked for")
    if equal["gain"] is None:
        time = "at equal seconds it holds, since a step of the better one takes no longer"
    else:
        time = (f"at equal seconds ({equal['steps']} steps) it "
                f"{'holds' if equal['survives'] else 'does not hold'}: "
                f"{equal['gain']:+.2%}, {equal['interval'][0]:+.2%} to {equal['interval'][1]:+.2%}")
    return (f"{arm} is {found['verdict']} than {against}{small} ({numbers}); {time}; gains below "
            f"{found['could_see']:.2%} could not have been seen.")


def costs(result: Mapping[str, Any]) -> str:
    return (f"{result['runs']} runs, {duration(result['seconds'])} of them all; tuning "
            f"{result['tuning']['runs']} of them, {duration(result['tuning']['seconds'])}")
