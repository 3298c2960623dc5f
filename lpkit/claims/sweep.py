"""A search over settings: a file says what is searched, optuna suggests trials, runs answer.

A trial that has ended is a line of the journal; any other is run. A killed sweep asks for all anew
and tells what the lines say: a sampler of one seed that is told the same suggests the same.
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
from lpkit.presets import resolve
from lpkit.values import Checked, Count, Text, between, convert

WAYS = "{low: 1e-4, high: 1e-2, log: true} or {choices: [...]}"
NEEDED = {"search": f"a mapping of settings, each to {WAYS}", "trials": "how many runs, such as 20",
          "target": "val_loss"}
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "cmaes": "CmaEsSampler"}


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
    at_once: Count = 1                  # trials side by side, which do not hear of each other

    def __post_init__(self):
        super().__post_init__()
        text = protocol.evaluated_text(self.config({}))
        for key in self.search:
            for value in (one := self.domain(key)[1]).get("choices") or (one["low"], one["high"]):
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
            raise ConfigError(f"{name} has low, and {shown(here[key])} is no number; give choices")
        low, high = (convert(told[end], kind, f"{name}.{end}") for end in ("low", "high"))
        log = convert(told.get("log", False), bool, f"{name}.log")
        if not (0 if log else -math.inf) < low < high < math.inf:
            raise ConfigError(f"{name} must have a low below its high{', and above 0 as log' * log}, "
                              f"got low={low} and high={high}")
        return f"{kind.__name__.title()}Distribution", {"low": low, "high": high, "log": log}


def settle(sweep: Sweep, out: Path, finished: Callable[[str, list[Config]], list[dict]]) -> dict:
    """Returns what the command prints. `finished`: as of `Settling`; the journal: `out`-MARK.jsonl.
    Raises RunFailedError for a run that could not go on, or if no trial has a number."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    mark = records.digest([{**asdict(sweep), "trials": None}, optuna.__version__,
                           runs.name_of(sweep.config({}))])[:records.MARK_DIGITS]
    chain = records.Chain(path := Path(f"{out}-{mark}.jsonl"), mark)
    known = {line["trial"]: line for line in records.read_lines(path, mark)[0]}
    liar = {"constant_liar": True} if sweep.sampler == "tpe" and sweep.at_once > 1 else {}
    sampler = getattr(optuna.samplers, SAMPLERS[sweep.sampler])(seed=sweep.seed, **liar)
    study, trials, losses = optuna.create_study(sampler=sampler), [], []
    named = {key: sweep.domain(key) for key in sweep.search}
    domains = {key: getattr(optuna.distributions, name)(**x) for key, (name, x) in named.items()}
    while len(trials) < sweep.trials:
        asked = [study.ask(domains) for _ in range(min(sweep.at_once, sweep.trials - len(trials)))]
        lines, due = {}, {}
        for one in asked:
            line = known.get(one.number, {})
            if line.get("settings") != one.params:
                line = {"trial": one.number, "settings": one.params, "val_loss": None,
                        "seconds": 0.0}
                try:
                    due[one.number] = sweep.config(one.params)
                except ConfigError as error:        # settings that do not go together
                    line["error"] = str(error)
            lines[one.number] = line
        if due:
            word = f"trial {' and '.join(str(number + 1) for number in due)} of {sweep.trials}"
            for number, run in zip(due, finished(word, [*due.values()])):
                lines[number] |= {key: run[key] for key in ("val_loss", "seconds", "error", "name")}
        for one in asked:
            trials.append(line := lines[one.number])
            if line is not known.get(one.number):
                append_lines(path, [chain.line(line)])
            losses.append(math.inf if line["val_loss"] is None else line["val_loss"])
            study.tell(one, losses[-1])
    if (least := min(losses)) == math.inf:
        raise RunFailedError(f"none of {len(trials)} trials has a number: {trials[0]['error']}")
    enough = len({*losses} - {math.inf}) >= 20      # it is of the best tenth: not of one
    return {"best": trials[losses.index(least)], "trials": trials, "journal": str(path),
            "importance": optuna.importance.get_param_importances(study) if enough else None,
            "seconds": math.fsum(line["seconds"] for line in trials)}
