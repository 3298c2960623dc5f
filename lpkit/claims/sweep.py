"""Search for the best settings: a YAML file defines the search, Optuna suggests the settings of
each trial, and the trial is a training run that returns a loss.

To continue a sweep that was killed, the command starts with an empty Optuna study and asks it for
all trials again. For trials whose runs have finished, it takes the losses from the runs' records. A
sampler with the same seed that gets the same losses suggests the same trials. The journal (a JSON
Lines file) is only for readers; it is written anew.
"""

import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from lpkit import records
from lpkit.claims import protocol, runs
from lpkit.config import Config, flat
from lpkit.errors import ConfigError, RunFailedError, pick, shown
from lpkit.files import append_lines, remove
from lpkit.presets import resolve
from lpkit.values import Count, Text, between, convert

# the values of the key `search`, for messages
WAYS = "{low: 1e-4, high: 1e-2, log: true} or {choices: [...]}"
NEEDED = {"search": f"a mapping of settings, each to {WAYS}", "trials": "how many runs, such as 20",
          "target": "val_loss"}
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "cmaes": "CmaEsSampler"}
# fields of a run's record that a trial gets, too
KEPT = ("val_loss", "seconds", "error", "name", "evaluations")
PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "asha": "SuccessiveHalvingPruner"}


@dataclass(frozen=True, kw_only=True)
class Sweep(protocol.Made):
    """The contents of a sweep's file. Raises ConfigError before anything runs."""

    base: Text = "cpu-3m"               # a preset or a config file
    settings: Mapping = field(default_factory=dict)     # changes of `base`, for all trials
    search: Mapping                     # setting -> range or choices, in the form of WAYS
    trials: Count                       # number of trials
    target: Literal["val_loss"]         # the loss after the last step
    sampler: Literal["tpe", "random", "cmaes"] = "tpe"
    seed: Annotated[int, between(0, 2**32 - 1)] = 0     # seed of the sampler
    # number of parallel trials; Optuna suggests each without the results of the others
    at_once: Count = 1
    # stops bad trials early; it decides at each evaluation of a trial
    pruner: Literal["none", "median", "asha"] = "none"

    def __post_init__(self):
        super().__post_init__()
        base = self.config({})
        if self.pruner != "none" and not 0 < base.eval_every < base.steps:
            raise ConfigError(f"pruner={self.pruner} decides at evaluations during a run, and "
                              f"eval_every={base.eval_every} of {base.steps} steps has none; set "
                              f"settings.eval_every to {max(1, base.steps // 10)}")
        for key in self.search:
            domain = self.domain(key)[1]
            for value in domain.get("choices") or (domain["low"], domain["high"]):
                if protocol.other_text(self.config({key: value}), base):
                    raise ConfigError(f"search.{key} would evaluate trials on other text, so "
                                      f"their losses do not compare; leave it out")

    def config(self, point: Mapping[str, Any]) -> Config:
        """Returns the Config of a trial with the settings `point`. It has one thread (unless the
        file says otherwise), because other numbers of threads add in other orders."""
        config = resolve(self.base).replace(self.settings).replace(point)
        return config.replace({"system.threads": config.system.threads or 1})

    def domain(self, key: str) -> tuple[str, dict[str, Any]]:
        """Returns the name of the Optuna distribution from which the setting `key` is drawn, and
        the arguments of the distribution. Raises ConfigError for an invalid range."""
        given, name, settings = self.search[key], f"search.{key}", flat(self.config({}))
        keys = set(given) if isinstance(given, Mapping) else set()
        if keys == {"choices"} and isinstance(given["choices"], list) and given["choices"]:
            return "CategoricalDistribution", dict(given)
        if not {"low", "high"} <= keys <= {"low", "high", "log"}:
            raise ConfigError(f"{name} must be {WAYS}, got {shown(given)}")
        if (kind := type(pick(settings, key, "setting"))) not in (int, float):
            raise ConfigError(
                f"{name} has low, but {shown(settings[key])} is not a number; give choices")
        low, high = (convert(given[end], kind, f"{name}.{end}") for end in ("low", "high"))
        log = convert(given.get("log", False), bool, f"{name}.log")
        if not (0 if log else -math.inf) < low < high < math.inf:
            raise ConfigError(f"{name} must have a low below its high{', and above 0 as log' * log}"
                              f", got low={low} and high={high}")
        return f"{kind.__name__.title()}Distribution", {"low": low, "high": high, "log": log}


@dataclass
class Judge:
    """Reports the evaluations of a trial's run to the pruner, and decides when the run must stop.
    The evaluation after the last step is not reported, because then nothing is left to prune."""

    trial: Any                          # an optuna.trial.Trial
    tag: str                            # argument of `runs.name_of`
    steps: float = math.inf             # number of steps of the run
    heard: runs.Evaluations = field(default_factory=list)   # the evaluations that were reported
    stop_after: int | None = None       # step of the evaluation after which the pruner stopped it

    def __call__(self, evaluations: runs.Evaluations) -> None:
        # only the new evaluations: the method is called again and again with all evaluations so far
        for step, loss in evaluations[len(self.heard):]:
            if self.stop_after is None and step < self.steps:
                self.heard.append((step, loss))
                if loss is not None:        # None is NaN; such a run ends by itself
                    self.trial.report(loss, step)
                    self.stop_after = step if self.trial.should_prune() else None


def settle(sweep: Sweep, out: Path,
           finished: Callable[[str, list[Config], list[Judge]], list[dict[str, Any]]],
           ended: Callable[[list[dict]], None] = lambda trials: None) -> dict:
    """Makes all trials, and returns the object that `lpkit sweep --json` prints. Writes the journal
    `out`-MARK.jsonl, where MARK is a hash of the search.

    finished: function (purpose, configs, judges) that makes runs and returns their records, in
              order; one Judge for each run
    ended:    is called with all trials so far, each time some trials have ended

    Raises RunFailedError for a run that could not continue, or if no trial has a loss.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    base = sweep.config({})
    # the search without the fields that do not change a trial
    alike = asdict(replace(sweep, trials=1, executor="workers", job={}))
    mark = records.digest([alike, optuna.__version__, runs.name_of(base)])[:records.MARK_DIGITS]
    if os.path.lexists(path := Path(f"{out}-{mark}.jsonl")):
        remove(before := path.with_name(f"{path.name}.before"))
        path.rename(before)
    chain = records.Chain(path, mark)
    liar = {"constant_liar": True} if sweep.sampler == "tpe" and sweep.at_once > 1 else {}
    sampler = getattr(optuna.samplers, SAMPLERS[sweep.sampler])(seed=sweep.seed, **liar)
    rungs = {"min_resource": base.eval_every} if sweep.pruner == "asha" else {}
    pruner = getattr(optuna.pruners, PRUNERS[sweep.pruner])(**rungs)
    study, trials, losses = optuna.create_study(sampler=sampler, pruner=pruner), [], []
    # A view of the study for the pruner, which contains finished trials only. So a decision does
    # not depend on how far parallel trials happen to be.
    before = copy.copy(study)
    before.get_trials = lambda deepcopy=True, states=None: [
        trial for trial in study.get_trials(deepcopy, states) if trial.state.is_finished()]
    domains = {key: getattr(optuna.distributions, name)(**given)
               for key in sweep.search for name, given in [sweep.domain(key)]}
    while len(trials) < sweep.trials:
        numbers = range(len(trials), min(len(trials) + sweep.at_once, sweep.trials))
        judges = [Judge(study.ask(domains), f"{mark} {number}" * (sweep.pruner != "none"))
                  for number in numbers]
        lines = [{"trial": number, "settings": judge.trial.params, "val_loss": None, "seconds": 0.0}
                 for number, judge in zip(numbers, judges)]
        configs: dict[int, Config] = {}
        for i, judge in enumerate(judges):
            judge.trial.study = before
            try:
                configs[i] = sweep.config(judge.trial.params)
                judge.steps = configs[i].steps
            except ConfigError as error:        # settings that contradict each other: no run
                lines[i]["error"] = str(error)
        if configs:
            word = f"trial {' and '.join(str(numbers[i] + 1) for i in configs)} of {sweep.trials}"
            for i, run in zip(configs,
                              finished(word, [*configs.values()], [judges[i] for i in configs])):
                lines[i] |= {key: run[key] for key in KEPT}
        # all judges decide before Optuna gets the first result of these parallel trials
        for judge, line in zip(judges, lines):
            judge(line.get("evaluations", []))
            line |= {"evaluations": judge.heard, "pruned": None}
            # the run may have made further evaluations before it stopped; they do not count
            if judge.stop_after is not None:
                line |= {"val_loss": None, "error": None,
                         "pruned": dict(zip(("step", "val_loss"), judge.heard[-1]))}
        for judge, line in zip(judges, lines):
            append_lines(path, [chain.line(line)])
            trials.append(line)
            losses.append(math.inf if line["val_loss"] is None else line["val_loss"])
            over = optuna.trial.TrialState.PRUNED if line["pruned"] else None
            study.tell(judge.trial, None if over else losses[-1], over)
        ended(trials)
    if (least := min(losses)) == math.inf:
        raise RunFailedError(f"none of {len(trials)} trials has a loss: {trials[0]['error']}")
    # the importance of settings is computed from the best tenth of the trials: at least two of 20
    enough = len({*losses} - {math.inf}) >= 20
    return {"best": trials[losses.index(least)], "trials": trials, "journal": str(path),
            "importance": optuna.importance.get_param_importances(study) if enough else None,
            "seconds": math.fsum(line["seconds"] for line in trials)}
