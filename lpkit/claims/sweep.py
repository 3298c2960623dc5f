"""A search over settings: a file says what is searched, optuna suggests trials, runs answer.

The journal has a line for each trial that has ended. A sweep that was killed asks for its trials
once more, in order, and tells what the journal says of them: a sampler of one seed that is told the
same values suggests the same. A trial that was running has no line, and is run again.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from lpkit import records
from lpkit.claims import protocol, runs
from lpkit.config import Config, flat
from lpkit.errors import ConfigError, RunFailedError, pick, shown
from lpkit.files import append_lines
from lpkit.machine_facts import versions
from lpkit.presets import resolve
from lpkit.values import Checked, Count, Text, between, convert

WAYS = "{low: 1e-4, high: 1e-2, log: true} or {choices: [...]}"
NEEDED = {"search": f"a mapping of settings, each to {WAYS}", "trials": "how many runs, such as 20",
          "target": "val_loss"}
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "cmaes": "CmaEsSampler"}
KEPT = ("val_loss", "seconds", "error", "name")     # of a run's record
ENOUGH = 20     # trials for an importance, which is of the best tenth: one alone says nothing


@dataclass(frozen=True, kw_only=True)
class Sweep(Checked):
    """A sweep as its file says it. Raises ConfigError before anything runs."""

    base: Text = "cpu-3m"               # a preset or a config file
    settings: Mapping = field(default_factory=dict)     # over it, of all trials
    search: Mapping
    trials: Count
    target: Literal["val_loss"]         # at the end, as `Training.evaluate` has it
    sampler: Literal["tpe", "random", "cmaes"] = "tpe"
    seed: Annotated[int, between(0, 2**32 - 1)] = 0     # of the sampler
    batch: Count = 1                    # trials that are suggested together, and run side by side

    def __post_init__(self):
        super().__post_init__()
        text = protocol.evaluated_text(self.config({}))
        for key, (_, given) in zip(self.search, map(self.domain, self.search)):
            for value in given.get("choices") or (given["low"], given["high"]):
                if protocol.evaluated_text(self.config({key: value})) != text:
                    raise ConfigError(f"search.{key} would evaluate trials on other text, where "
                                      f"losses do not compare; leave it out")

    def config(self, point: Mapping[str, Any]) -> Config:
        """Makes a trial's; on one thread: more add in other orders."""
        config = resolve(self.base).replace(self.settings).replace(point)
        return config.replace({"system.threads": config.system.threads or 1})

    def domain(self, key: str) -> tuple[str, dict[str, Any]]:
        """Returns the name of optuna's distribution, and what it is given."""
        told, name, here = self.search[key], f"search.{key}", flat(self.config({}))
        keys = set(told) if isinstance(told, Mapping) else set()
        if keys == {"choices"} and isinstance(told["choices"], list) and told["choices"]:
            return "CategoricalDistribution", dict(told)
        if not {"low", "high"} <= keys <= {"low", "high", "log"}:
            raise ConfigError(f"{name} must be {WAYS}, got {shown(told)}")
        if (kind := type(pick(here, key, "setting"))) not in (int, float):
            raise ConfigError(f"{name} has a range, and {key}={shown(here[key])} is no number; "
                              f"give {{choices: [...]}}")
        low, high = (convert(told[end], kind, f"{name}.{end}") for end in ("low", "high"))
        log = convert(told.get("log", False), bool, f"{name}.log")
        if not (0 if log else -math.inf) < low < high < math.inf:
            raise ConfigError(f"{name} must have a low below its high{', and above 0 as log' * log}, "
                              f"got low={low} and high={high}")
        return f"{kind.__name__.title()}Distribution", {"low": low, "high": high, "log": log}


def settle(sweep: Sweep, out: Path, finished: Callable[[str, list[Config]], list[dict]],
           say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what the command prints; `finished`, `say`: as of `Settling`. The journal is
    `out`-MARK.jsonl. Raises RunFailedError for a run that could not go on, or if none has a number."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    mark = records.digest([{**asdict(sweep), "trials": None}, runs.name_of(sweep.config({})),
                           versions(("optuna", "cmaes"))])[:records.MARK_DIGITS]
    lines, problems = records.read_lines(path := Path(f"{out}-{mark}.jsonl"), mark)
    for problem in problems:
        say(problem)
    known, chain = {line["trial"]: line for line in lines}, records.Chain(path, mark)
    study = optuna.create_study(sampler=getattr(optuna.samplers, SAMPLERS[sweep.sampler])(
        seed=sweep.seed))
    domains = {key: getattr(optuna.distributions, name)(**given) for key, (name, given) in
               zip(sweep.search, map(sweep.domain, sweep.search))}
    for first in range(0, sweep.trials, sweep.batch):
        asked = [study.ask(domains) for _ in range(sweep.trials)[first:first + sweep.batch]]
        new, due = [], []
        for one in asked:
            if known.get(one.number, {}).get("settings") != one.params:
                known[one.number] = line = {"trial": one.number, "settings": one.params} | {
                    "val_loss": None, "seconds": 0.0}
                new.append(line)
                try:
                    due.append((line, sweep.config(one.params)))
                except ConfigError as error:    # settings that do not go together
                    line["error"] = str(error)
        made = finished(f"{first + len(asked)} of {sweep.trials} trials", [c for _, c in due])
        for (line, _), found in zip(due, made):
            line |= {key: found[key] for key in KEPT}
        append_lines(path, map(chain.line, new))
        for one in asked:
            study.tell(one, _value(known[one.number]))
    trials = [known[number] for number in range(sweep.trials)]
    if _value(best := min(trials, key=_value)) == math.inf:
        raise RunFailedError(f"none of {len(trials)} trials came to a number: {best['error']}")
    enough = sum(map(math.isfinite, map(_value, trials))) >= ENOUGH
    return {"best": best, "trials": trials, "target": sweep.target, "journal": str(path),
            "importance": optuna.importance.get_param_importances(study) if enough else None,
            "seconds": math.fsum(line["seconds"] for line in trials)}


def _value(line: Mapping[str, Any]) -> float:
    return math.inf if line["val_loss"] is None else line["val_loss"]
