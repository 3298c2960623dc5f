"""`lpkit sweep`: what a file is refused for, what is drawn, and that a killed one is the unbroken
one.

Only these tests catch: trials that are evaluated on other text, values that are drawn outside their
range or by another law, a pruner that is shown something else than Optuna shows it, and a journal
that a kill, an edit or a run side by side changes.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

import lessons.rows.masked  # noqa: F401  adds rows
from lpkit import cli, records
from lpkit.claims import protocol, runs, sweep
from lpkit.commands import sweep as command
from lpkit.errors import ConfigError, RunFailedError
from lpkit.plain_yaml import read_yaml
from tests.attack.verdicts import _in_here

optuna = pytest.importorskip("optuna")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "lr-search.yaml"
LOG = {"low": 1e-5, "high": 1e-1, "log": True}
TINY = {"settings": {"model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 16,
                     "global_batch": 4, "eval_batches": 2,
                     "eval_every": 0, "checkpoint_every": 0, "schedule.warmup_steps": 2,
                     "system.device": "cpu", "steps": 3},
        "search": {"optimizer": {"choices": ["adamw", "lion"]}, "optimizer.lr": LOG}, "trials": 4,
        "target": "val_loss", "seed": 3}
SMALL = TINY["settings"]


def written(folder, **changes):
    path = folder / "few.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (TINY | changes).items()
                                    if value is not None}))
    return path


# the file

MASKED = {"data.policy": "masked", "model.vocab": 257, "model.attention": "bidirectional"}
WRONG = [
    ({"search": None}, "says no search; give search: a mapping of settings, each to {low: 1e-4"),
    ({"search": {}}, "says no search; give search"),
    ({"trials": None}, "says no trials; give trials: how many runs, such as 20"),
    ({"target": None}, "says no target; give target: val_loss"),
    ({"target": "val_los"}, "target cannot be 'val_los'; did you mean 'val_loss'?"),
    ({"sampler": "grid"}, "sampler cannot be 'grid'; choose one of cmaes, random, tpe"),
    ({"trials": 0}, "trials must be positive, got 0"),
    ({"pruner": "median"}, "pruner=median decides at evaluations during a run, and "
                           "eval_every=0 of 3 steps has none; set settings.eval_every to 1"),
    ({"pruner": "asha", "settings": SMALL | {"eval_every": 3}}, "eval_every=3 of 3 steps has none"),
    ({"executor": "slurm"}, "executor cannot be 'slurm'; choose one of ray, submitit, workers"),
    ({"job": 3}, "job must be a mapping"),
    ({"seed": -1}, "seed must be from 0 to 4,294,967,295, got -1"),
    ({"serach": {}}, "there is no key of a sweep 'serach'; did you mean 'search'?"),
    ({"settings": {"model.layer": 1}}, "there is no setting 'model.layer'; did you mean "
                                       "'model.layers'?"),
    ({"search": {"optimizer.lrr": LOG}}, "there is no setting 'optimizer.lrr'; did you mean "
                                         "'optimizer.lr'?"),
    ({"search": {"optimizer": {"choices": ["lions"]}}}, "did you mean 'lion'?"),
    ({"search": {"optimizer": {"choices": []}}}, "search.optimizer must be {low: 1e-4"),
    ({"search": {"optimizer": LOG}}, "search.optimizer has low, and 'adamw' is no number; give "
                                     "choices"),
    ({"search": {"optimizer.lr": 0.1}}, "search.optimizer.lr must be {low: 1e-4"),
    ({"search": {"optimizer.lr": {"low": 1, "hihg": 2}}}, "search.optimizer.lr must be {low: 1e-4"),
    ({"search": {"optimizer.lr": {"low": 0.1, "high": 0.1}}},
     "must have a low below its high, got low=0.1 and high=0.1"),
    ({"search": {"optimizer.lr": {"low": 0.1, "high": math.inf}}},
     "must have a low below its high, got low=0.1 and high=inf"),
    ({"search": {"optimizer.lr": LOG | {"low": 0}}},
     "must have a low below its high, and above 0 as log, got low=0.0"),
    ({"search": {"model.layers": {"low": 0.5, "high": 3}}},
     "search.model.layers.low must be a whole number, got 0.5"),
    ({"search": {"optimizer.lr": {"low": -1, "high": 1}}},
     "optimizer.lr must be positive, got -1.0"),
    ({"search": {"imports": {"choices": [["strangers_rows"], []]}}},
     "imports='strangers_rows': a file imports nothing by itself"),
    *(({"settings": TINY["settings"] | settings, "search": {key: {"choices": choices}}},
       f"search.{key} would evaluate trials on other text")
      for key, choices, settings in (
          ("data.source", ["python-stdlib", "README.md"], {}),
          ("data.tokenizer", ["bytes", "bpe"], {"model.vocab": 300}),
          ("data.val_fraction", [0.1, 0.2], {}),
          ("data.policy", ["random-windows", "random-documents"], {}), ("seed", [0, 1], MASKED),
          ("model.context", [16, 32], {}), ("model.vocab", [300, 400], {"data.tokenizer": "bpe"}),
          ("eval_batches", [2, 4], {}), ("global_batch", [4, 8], {}))),
    ({"settings": TINY["settings"] | MASKED,
      "search": {"data.policy.share": {"low": 0.15, "high": 0.75}}},
     "search.data.policy.share would evaluate trials on other text"),
]


@pytest.mark.parametrize("key, choices", [
    ("data.policy", ["random-windows", "spread-windows"]), ("model.vocab", [300, 400]),
    ("seed", [0, 1]), ("grad_accum_steps", [1, 2]),
    ("sizes", ["constant"]), ("optimizer", ["adamw", "lion"]), ("model.layers", [1, 2])])
def test_what_leaves_the_text_as_it_is_may_be_searched(key, choices):
    sweep.Sweep(**TINY | {"settings": TINY["settings"] | {"model.vocab": 300},
                          "search": {key: {"choices": choices}}})


@pytest.mark.parametrize("changes, message", WRONG,
                         ids=[f"{next(iter(changes))}-{i}" for i, (changes, _) in enumerate(WRONG)])
def test_a_file_is_refused_in_one_sentence_before_any_run(changes, message, tmp_path, capsys,
        monkeypatch):
    monkeypatch.setattr(runs.Workers, "finished", lambda *args: pytest.fail("a run"))
    assert cli.main(["sweep", str(written(tmp_path, **changes)), "--out", str(tmp_path / "out"),
                     "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("lpkit: ") and message in err, err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("absent, changes, more", [
    ("optuna", {}, []), ("cmaes", {"sampler": "cmaes"}, []), ("ray", {}, ["--executor", "ray"])])
def test_what_is_not_installed_is_named(absent, changes, more, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lpkit.commands._there", lambda package: package != absent)
    assert cli.main(["sweep", str(written(tmp_path, **changes)), "--out", str(tmp_path / "out"),
                     *more]) == 2
    err = capsys.readouterr().err
    what = "a sweep" if absent in ("optuna", "cmaes") else f"executor={absent}"
    assert (f"lpkit: {what} needs {absent}, which this Python does not have" in err
            and err.count("\n") == 1)
    assert not (tmp_path / "out").exists()


def test_optuna_is_imported_where_a_sweep_runs_and_nowhere_else():
    code = ("import sys; import lpkit.commands.sweep, lpkit.claims.sweep; print({'optuna', "
            "'torch', 'cmaes'} & {*sys.modules})")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=ROOT).stdout == "set()\n"


# trials, with losses that are made up

def bowl(config):
    """Least at a rate of 1e-3."""
    return 2 + (math.log10(config.optimizer.lr) + 3) ** 2


def recorded(folder, make, most):
    """Makes the records that `folder` lacks, as `runs.Workers` does. Returns that, and the list of
    what it makes."""
    ran, path = [], folder / "made.json"

    def finished(what, configs, judges):
        kept = json.loads(path.read_text()) if path.exists() else {}
        names = [runs.name_of(config, judge.tag) for config, judge in zip(configs, judges)]
        if due := [i for i, name in enumerate(names) if name not in kept]:
            if len(ran) == most:
                raise KeyboardInterrupt
            ran.extend(configs[i] for i in due)
            kept |= zip([names[i] for i in due],
                        make([configs[i] for i in due], [judges[i] for i in due]))
            path.write_text(json.dumps(kept))
        return [kept[name] for name in names]

    return finished, ran


def searched(folder, loss=bowl, most=None, **changes):
    """Returns what the command prints, and the configs that were run. `most`: of runs, and then the
    process is killed."""
    folder.mkdir(exist_ok=True)
    finished, ran = recorded(folder, lambda configs, judges: [
        {"val_loss": loss(config), "seconds": 1.0, "error": None, "name": "x", "evaluations": []}
        for config in configs], most)
    return sweep.settle(sweep.Sweep(**TINY | changes), folder / "few", finished), ran


def test_random_values_are_log_uniform_within_bounds(tmp_path):
    result, ran = searched(tmp_path, sampler="random", trials=400, search={
        "optimizer.lr": LOG, "optimizer.weight_decay": {"low": 0.1, "high": 0.3},
        "schedule.warmup_steps": {"low": 1, "high": 3},
        "optimizer": {"choices": ["adamw", "lion"]}})
    assert len(ran) == len(result["trials"]) == 400

    def off(values):
        """The Kolmogorov-Smirnov distance to the uniform distribution on (0, 1)."""
        values = sorted(values)
        assert 0 <= values[0] and values[-1] <= 1
        return max(max(abs(v - i / 400), abs(v - (i + 1) / 400)) for i, v in enumerate(values))

    settings = [trial["settings"] for trial in result["trials"]]
    rates = [setting["optimizer.lr"] for setting in settings]
    assert (off([(math.log10(rate) + 5) / 4 for rate in rates]) < 1.63
            / 20), "the 1% bound of n = 400"
    assert off([rate / 0.1 for rate in rates]) > 0.5, "of a log range, not uniform in itself"
    assert off([(setting["optimizer.weight_decay"] - 0.1) / 0.2
                for setting in settings]) < 1.63 / 20
    for key, values in (("schedule.warmup_steps", (1, 2, 3)), ("optimizer", ("adamw", "lion"))):
        drawn = [setting[key] for setting in settings]
        assert set(drawn) == set(values) and min(map(drawn.count, values)) > 0.8 * 400 / len(values)
    for config, setting in zip(ran, settings):
        assert (config.optimizer.name, config.optimizer.lr, config.schedule.warmup_steps) == (
            setting["optimizer"], setting["optimizer.lr"], setting["schedule.warmup_steps"])
        assert config.system.threads == 1 and config.model.width == 32


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_a_sampler_that_looks_at_losses_finds_the_least(sampler, tmp_path):
    result, _ = searched(tmp_path, sampler=sampler, trials=40,
                         search={"optimizer.lr": LOG, "optimizer.weight_decay": {"low": 0,
                            "high": 1}})
    assert result["best"]["val_loss"] == min(trial["val_loss"] for trial in result["trials"]) < 2.05
    late = [trial["val_loss"] for trial in result["trials"][20:]]
    drawn, _ = searched(tmp_path, sampler="random", trials=40, search={"optimizer.lr": LOG})
    assert sum(late) / 20 < sum(trial["val_loss"] for trial in drawn["trials"][20:]) / 20
    assert (result["importance"]["optimizer.lr"] > 0.5
            > result["importance"]["optimizer.weight_decay"])
    assert searched(tmp_path, sampler=sampler, trials=19)[0]["importance"] is None


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_a_sweep_that_goes_on_is_the_unbroken_one(sampler, tmp_path):
    """Past the first ten trials, which TPE draws at random; and then with more trials than were
    asked for."""
    whole, ran = searched(tmp_path / "whole", sampler=sampler, trials=25)
    for most in (0, 3, 14):
        with pytest.raises(KeyboardInterrupt):
            searched(tmp_path, sampler=sampler, trials=25, most=most)
    cut = Path(whole["journal"].replace("/whole", ""))
    assert (len(cut.read_text().splitlines())
            == len(json.loads((tmp_path / "made.json").read_text())) == 17)
    with cut.open("a") as file:
        file.write('{"trial": 17, "settings"')      # torn by the kill
    result, again = searched(tmp_path, sampler=sampler, trials=22)
    assert (result["trials"] == whole["trials"][:22]
            and again == ran[17:22]), "told anew, it suggests the same"
    assert searched(tmp_path, sampler=sampler, trials=25) == (whole | {"journal": str(cut)},
        ran[22:])
    other, _ = searched(tmp_path, sampler=sampler, trials=25, seed=4)
    assert other["trials"] != whole["trials"] and other["journal"] != str(cut)


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_trials_side_by_side_do_not_hear_of_each_other(sampler, tmp_path):
    """Suggestions of a batch are those that a study gives which is told nothing in between; a
    killed sweep and one that grows are the unbroken one."""
    whole, ran = searched(tmp_path / "whole", sampler=sampler, trials=25, at_once=3)
    liar = {"constant_liar": True} if sampler == "tpe" else {}
    study = optuna.create_study(sampler=getattr(optuna.samplers, sweep.SAMPLERS[sampler])(seed=3,
        **liar))
    domains = {"optimizer": optuna.distributions.CategoricalDistribution(["adamw", "lion"]),
               "optimizer.lr": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)}
    for first in range(0, 25, 3):
        for trial, line in [(study.ask(domains), line)
                            for line in whole["trials"][first:first + 3]]:
            assert trial.params == line["settings"]
            study.tell(trial, line["val_loss"])
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path, sampler=sampler, trials=25, at_once=3, most=6)
    result, again = searched(tmp_path, sampler=sampler, trials=14, at_once=3)
    assert result["trials"] == whole["trials"][:14] and again == ran[6:14]
    assert searched(tmp_path, sampler=sampler, trials=25, at_once=3)[0]["trials"] == whole["trials"]
    assert searched(tmp_path / "one", sampler=sampler, trials=25)[0]["trials"] != whole["trials"]


def summed(line, **changes):
    """A line of a journal with other values, and a checksum that is right again."""
    value = json.loads(line) | changes
    value.pop(records.LINE_SUM)
    return (json.dumps(value | {records.LINE_SUM: records.digest(value)[:records.MARK_DIGITS]})
            + "\n")


@pytest.mark.parametrize("alter", [
    pytest.param(lambda lines: [lines[0], lines[1].replace('"val_loss": ', '"val_loss": 1'),
                                *lines[2:]], id="flipped"),
    pytest.param(lambda lines: [*lines[:3], summed(lines[3], val_loss=0.1)], id="last with a "
        "checksum"),
    pytest.param(lambda lines: [lines[0], summed(lines[1], trial=0), *lines[2:]], id="renumbered"),
    pytest.param(lambda lines: [lines[1], lines[0], *lines[2:]], id="exchanged"),
    pytest.param(lambda lines: lines[1:], id="lost"),
    pytest.param(lambda lines: [line.replace(json.loads(line)["run"], "0" * 16) for line in lines],
                 id="of another sweep"),
    pytest.param(lambda lines: [*lines, "[]\n"], id="no line")])
def test_a_journal_that_was_altered_changes_no_trial(alter, tmp_path):
    """Records of runs say what came of trials. The journal is written again as it was, and the old
    one kept."""
    whole, _ = searched(tmp_path)
    path = Path(whole["journal"])
    text = path.read_text()
    path.write_text("".join(alter(text.splitlines(keepends=True))))
    altered = path.read_text()
    assert (searched(tmp_path) == (whole, []) and path.read_text() == text
            and Path(f"{path}.before").read_text() == altered)
    path.unlink()
    path.mkdir()
    assert (searched(tmp_path) == (whole, []) and path.read_text() == text
            and Path(f"{path}.before").is_dir())
    assert searched(tmp_path) == (whole, []) and Path(f"{path}.before").read_text() == text


def test_what_has_no_number_is_a_trial_and_steers_away(tmp_path):
    """Every rate above 1e-3, half of the range, diverges, and the others are alike: trials that
    were left out would draw on from there."""
    flat = lambda config: None if config.optimizer.lr > 1e-3 else 2.0
    result, _ = searched(tmp_path, flat, trials=40, search={"optimizer.lr": LOG})
    lost = [trial["val_loss"] is None for trial in result["trials"]]
    assert (0 < sum(lost[:20]) and sum(lost[20:]) <= 6
            and result["best"]["settings"]["optimizer.lr"] <= 1e-3)
    assert result["importance"] is None, "of trials that are alike"
    assert searched(tmp_path, flat, trials=40, search={"optimizer.lr": LOG}) == (result, [])
    shown = command.text(result)
    assert shown.splitlines()[1].split()[:2] == [str(result["best"]["trial"]),
        f"{result['best']['val_loss']:.5g}"]
    with pytest.raises(RunFailedError, match="none of 4 trials has a number"):
        searched(tmp_path, lambda config: None)


def test_settings_that_do_not_go_together_are_a_trial_without_a_run(tmp_path):
    result, ran = searched(tmp_path, sampler="random", trials=12,
                           search={"model.width": {"low": 32, "high": 40}})
    odd = [trial for trial in result["trials"] if trial["val_loss"] is None]
    widths = {trial["settings"]["model.width"] for trial in result["trials"]
              if trial["val_loss"] is not None}
    assert (odd and {config.model.width for config in ran} == widths and len(ran) == len(widths)
            and all("model.width" in trial["error"] for trial in odd))
    assert searched(tmp_path, sampler="random", trials=12,
                    search={"model.width": {"low": 32, "high": 40}}) == (result, [])


# pruning, with curves that are made up

EVERY, STEPS = 10, 80
CURVES = {"pruner": "asha", "sampler": "tpe",
          "settings": SMALL | {"eval_every": EVERY, "steps": STEPS}}


def curve(config):
    """Falls to the bowl of its rate, the slower the further away that is: early evaluations say
    something, and not all."""
    least = bowl(config)
    return [(step, least + (1.5 + math.sin(50 * least)) * math.exp(-step / 30))
            for step in range(EVERY, STEPS + 1, EVERY)]


def pruned(folder, most=None, lag=0, seed=0, **changes):
    """As `searched`. Judges hear of runs side by side in an order at random, and a run goes on for
    `lag` evaluations after it is told to end, or to its own end."""
    order = random.Random(seed)

    def make(configs, judges):
        records, going = [{"evaluations": [], "seconds": 1.0, "error": None, "name": "x",
                           "val_loss": None} for _ in configs], [*range(len(configs))]
        while going:
            i = order.choice(going)
            record, due, judge = records[i], curve(configs[i]), judges[i]
            record["evaluations"].append(due[len(record["evaluations"])])
            judge(record["evaluations"])
            if record["evaluations"] == due:
                record["val_loss"] = due[-1][1]
                going.remove(i)
            elif judge.stop_after and (
                    record["evaluations"][-1][0] >= judge.stop_after + lag * EVERY):
                going.remove(i)
        return records

    folder.mkdir(exist_ok=True)
    finished, ran = recorded(folder, make, most)
    return sweep.settle(sweep.Sweep(**TINY | CURVES | changes), folder / "few", finished), ran


PRUNED = ("trial", "settings", "val_loss", "pruned", "evaluations")


@pytest.mark.parametrize("pruner, at_once", [("median", 1), ("asha", 3)])
def test_a_pruner_sees_what_optuna_shows_it(pruner, at_once, tmp_path):
    """A loop over optuna alone gives the same trials. Side by side it is shown those that had ended
    before."""
    result, _ = pruned(tmp_path, pruner=pruner, at_once=at_once, trials=30)
    cut = [trial for trial in result["trials"] if trial["pruned"]]
    assert (5 <= len(cut) <= 27 and result["best"]["val_loss"]
            == min(trial["val_loss"] for trial in result["trials"] if not trial["pruned"]))
    assert len({trial["pruned"]["step"] for trial in cut}) > 1, "not all after the first evaluation"
    pruners = {"median": optuna.pruners.MedianPruner(),
               "asha": optuna.pruners.SuccessiveHalvingPruner(min_resource=EVERY)}
    spec = sweep.Sweep(**TINY | CURVES)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=3,
        constant_liar=at_once > 1), pruner=pruners[pruner])
    domains = {"optimizer": optuna.distributions.CategoricalDistribution(["adamw", "lion"]),
               "optimizer.lr": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)}
    for first in range(0, 30, at_once):
        asked, ends = [study.ask(domains) for _ in range(at_once)], []
        for trial in asked:       # each with no other beside it in the study
            alone = optuna.create_study(sampler=optuna.samplers.RandomSampler(),
                                        pruner=pruners[pruner])
            alone.add_trials([old for old in study.trials if old.state.is_finished()])
            shadow, end = alone.ask(), None
            for step, loss in curve(spec.config(trial.params)):
                shadow.report(loss, step)
                trial.report(loss, step)
                if step < STEPS and shadow.should_prune():
                    end = {"step": step, "val_loss": loss}
                    break
            for key, value in alone.trials[-1].system_attrs.items():
                trial.storage.set_trial_system_attr(trial._trial_id, key, value)
            ends.append((trial, loss, end))
        for (trial, loss, end), line in zip(ends, result["trials"][first:]):
            assert (line["pruned"] == end and line["settings"] == trial.params
                    and line["val_loss"] == (None if end else loss))
            study.tell(trial, None if end else loss,
                       optuna.trial.TrialState.PRUNED if end else None)


@pytest.mark.parametrize("pruner, at_once", [("median", 3), ("asha", 1)])
def test_a_pruned_sweep_that_goes_on_is_the_unbroken_one(pruner, at_once, tmp_path):
    """Also where trials side by side report in another order, and where a run hears late that it is
    to end."""
    ways = {"pruner": pruner, "at_once": at_once}
    whole, _ = pruned(tmp_path / "whole", trials=24, **ways)
    assert any(trial["pruned"] for trial in whole["trials"])
    for most in (6, 12):
        with pytest.raises(KeyboardInterrupt):
            pruned(tmp_path / "cut", most=most, seed=most, lag=most % 5, trials=24, **ways)
    result, again = pruned(tmp_path / "cut", seed=3, lag=9, trials=24, **ways)
    assert ([{key: trial[key] for key in PRUNED} for trial in result["trials"]]
            == [{key: trial[key] for key in PRUNED} for trial in whole["trials"]])
    assert len(again) < 24 and result["best"] == whole["best"]
    assert pruned(tmp_path / "cut", trials=24, **ways) == (result, []), "read back from its journal"


@pytest.mark.parametrize("pruner", ["MedianPruner", "SuccessiveHalvingPruner"])
def test_a_trial_whose_loss_is_no_number_is_left_to_end_by_itself(pruner):
    ways = {"n_startup_trials": 1} if pruner == "MedianPruner" else {"min_resource": 1}
    study = optuna.create_study(pruner=getattr(optuna.pruners, pruner)(**ways))
    sweep.Judge(first := study.ask(), "", 10)([(1, 2.0), (4, 1.0)])
    study.tell(first, 1.0)
    judge = sweep.Judge(study.ask(), "", 10)
    judge([(1, None)])
    judge([(1, None), (4, None), (5, None)])
    assert (judge.heard == [(1, None), (4, None), (5, None)] and judge.stop_after is None
            and study.trials[1].intermediate_values == {})
    other = sweep.Judge(study.ask(), "", 10)
    other(heard := [(1, 2.5), (4, 1.0)])
    assert other.stop_after == 1 and other.heard == heard[:1]
    last = sweep.Judge(study.ask(), "", 4)
    last([(4, 99.0)])
    assert last.stop_after is None, "the last evaluation of a run prunes nothing"


def test_what_is_pruned_is_shown_as_such(tmp_path, capsys):
    result, _ = pruned(tmp_path, trials=12)
    lines = command.text(result).splitlines()
    cut = [trial for trial in result["trials"] if trial["pruned"]]
    assert (lines[0].split()[:3] == ["trial", "val_loss", "pruned"]
            and lines[1].split()[2] == "None" and len(cut) > 3)
    assert [str(cut[0]["trial"]), "None", str(cut[0]["pruned"]["step"])] in [line.split()[:3]
        for line in lines]
    show = command.bar(12)
    for n in (4, 12):
        show(result["trials"][:n])
    best = min(trial["val_loss"] for trial in result["trials"] if not trial["pruned"])
    assert "12/12" in (printed := capsys.readouterr().err) and f"best {best:.4g}" in printed


def test_a_journal_is_of_one_search_and_one_code(tmp_path, monkeypatch):
    first = searched(tmp_path)[0]["journal"]
    names = {first, *(searched(tmp_path, **changes)[0]["journal"] for changes in (
        {"sampler": "random"}, {"pruner": "asha", "settings": SMALL | {"eval_every": 1}},
        {"settings": SMALL | {"steps": 4}}, {"search": {"optimizer.lr": LOG}}))}
    monkeypatch.setattr(runs, "code", lambda: "other")
    assert len(names | {searched(tmp_path)[0]["journal"]}) == 6
    assert searched(tmp_path, trials=5)[1], "more trials go on"


# real runs

def lines(out):
    return [line for path in out.glob("few-*.jsonl") for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_sweep_that_was_killed_ends_as_the_unbroken_one(tmp_path, capsys):
    path, out = written(tmp_path, pruner="asha", at_once=2, settings=SMALL | {
        "eval_every": 2, "steps": 300, "checkpoint_every": 50}), tmp_path / "out"
    words = ["sweep", str(path), "--json", "--out"]
    with subprocess.Popen([sys.executable, "-m", "lpkit", *words, str(out)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        while len(lines(out)) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=10)[1], "nothing outlives the command"
    before = lines(out)
    assert 2 <= len(before) < 4
    assert cli.main([*words, str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    (tmp_path / "whole").mkdir()
    with runs.Workers(tmp_path / "whole", runs.processes.Children(), 2, _in_here) as workers:
        unbroken = sweep.settle(protocol.read(path, sweep.Sweep, sweep.NEEDED),
                                tmp_path / "whole" / "few", lambda what, configs, judges:
                                workers.finished(configs, judges=judges))
    cut, whole = ([{key: trial[key] for key in (*PRUNED, "name")} for trial in each["trials"]]
                  for each in (result, json.loads(json.dumps(unbroken))))
    assert cut == whole and len(whole) == 4 and any(trial["pruned"] for trial in whole)
    assert result["best"]["val_loss"] == min(
        trial["val_loss"] for trial in whole if not trial["pruned"])
    assert lines(out)[:len(before)] == before, "a trial was done twice"
    assert len(lines(out)) == 4 and not [path for path in out.iterdir() if path.is_dir()]
    for trial in result["trials"]:
        record = records.read(out / f"{trial['name']}.json")
        assert record["config"]["optimizer"]["lr"] == trial["settings"]["optimizer.lr"]
        if trial["pruned"]:
            assert record["evaluations"][:len(trial["evaluations"])] == trial["evaluations"]
            assert (trial["pruned"]["step"] <= record["stopped_after"]
                    < 300), "it was stopped on the way"
        else:
            assert record["val_loss"] == trial["val_loss"] and record["stopped_after"] is None


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path, capsys):
    example = read_yaml(EXAMPLE)
    small = written(tmp_path, **example | {"settings": example["settings"] | SMALL, "trials": 2})
    assert cli.main(["sweep", str(small), "--out", str(tmp_path / "out")]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert (head.split() == ["trial", "val_loss", "pruned", *example["search"]] and len(rows) == 2
            and last.startswith("the best of 2 trials; all took "))


def test_the_page_says_every_key_of_a_file_and_of_the_object(tmp_path):
    page, keys = (ROOT / "docs" / "sweep.md").read_text(), (ROOT / "docs"
        / "commands.md").read_text().partition("**`sweep`**")[2].partition("\n\n")[0]
    assert protocol.read(EXAMPLE, sweep.Sweep, sweep.NEEDED).trials == 20
    assert not [key for key in sweep.Sweep.__dataclass_fields__ if f"`{key}`" not in page]
    result, _ = searched(tmp_path)
    assert not [key for key in {**result, **result["best"]} if f"`{key}`" not in keys]


def test_one_command_at_a_time_in_a_folder(tmp_path, capsys):
    from lpkit.files import locked

    with locked(tmp_path / ".lock"), pytest.raises(ConfigError,
            match="another claim or sweep is running"):
        command.run(type("Args", (), {"file": written(tmp_path), "out": tmp_path,
                                      "executor": None}))
