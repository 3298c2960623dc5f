"""`key=value` and `--set key=value` are two spellings of one thing, on every command that takes either."""

import argparse
import json
import os
import signal
from pathlib import Path

import pytest

from lpkit import cli
from lpkit.errors import ConfigError

NOTEBOOK = str(Path(__file__).parents[1] / "notebooks" / "00_start_here.ipynb")
# what comes before a setting, what may come after it, a setting that changes the answer, the same with a slip
COMMANDS = {
    "predict": (["gpt2-124m"], ["--devices", "2"], "model.layers=4", "model.layes=4", "model.layers"),
    "advise": (["gpt2-124m"], ["--machine", "h200"], "model.layers=4", "model.layes=4", "model.layers"),
    "plan": (["--model", "gpt2-124m"], ["--tokens", "1e9", "--devices", "2"], "model.layers=4", "model.layes=4", "model.layers"),
    "train": (["cpu-3m"], ["--out", "somewhere"], "steps=3", "stepz=3", "steps"),
    "notebook": ([NOTEBOOK], ["--tier", "smoke"], "seed=3", "sede=3", "seed"),
}


@pytest.fixture
def answer(capsys, monkeypatch, tmp_path):
    """(exit code, what the command found or was about to do, standard error)"""
    def stop(what, **options):
        raise ConfigError(f"ready {what}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lpkit.training.background.train", stop)
    monkeypatch.setattr("lpkit.course.notebooks.run_all", stop)

    def ask(*words):
        code = cli.main([*words, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else out, err

    return ask


@pytest.mark.parametrize("name", COMMANDS)
def test_both_spellings_mean_the_same_wherever_they_stand(name, answer):
    before, after, setting, _, _ = COMMANDS[name]
    first = answer(name, *before, setting, *after)
    assert first != answer(name, *before, *after), "the setting changes the answer"
    assert first[0] == 0 or "lpkit: ready" in first[2]
    for words in ([*before, *after, setting], [*before, "--set", setting, *after], ["--set", setting, *before, *after]):
        assert answer(name, *words) == first


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("spelling", [[], ["--set"]])
def test_a_slip_is_told_the_nearest_name(name, spelling, answer):
    before, after, _, wrong, right = COMMANDS[name]
    code, out, err = answer(name, *before, *spelling, wrong, *after)
    assert (code, out) == (2, "") and f"did you mean '{right}'?" in err and err.count("\n") == 1


def test_a_run_that_goes_on_takes_a_setting_without_a_target(answer):
    code, _, err = answer("train", "--resume", "--out", "nowhere", "steps=3")
    assert code == 2 and "'nowhere' holds no run" in err
    assert "cannot read a=b.yaml" in answer("train", "a=b.yaml")[2], "a file's name may hold an ="


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_arguments_are_read_is_no_traceback(number, monkeypatch, capsys):
    """argparse asks for the usage just before it marks what it restores: interrupted there, it would restore nothing it has."""
    usage = argparse.ArgumentParser.format_usage

    def interrupted(parser):
        os.kill(os.getpid(), number)
        return usage(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "format_usage", interrupted)
    before = signal.signal(number, signal.default_int_handler)      # a shell has what it starts in the background ignore SIGINT
    try:
        assert cli.main(["predict", "cpu-3m", "--json"]) == 128 + number
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err.splitlines()[-1].startswith("lpkit: ")
