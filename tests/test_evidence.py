"""The bench for a machine that is at hand for minutes: what it meets is a line, and nothing is done twice."""

import argparse
import importlib
import json
import time
from functools import partial

import psutil
import pytest
import torch

from lpkit import cli
from lpkit.bench import BENCHES, evidence
from lpkit.commands import target_and_asked
from lpkit.presets import resolve

CASE = """
import os, subprocess, sys, time
from pathlib import Path

folder, case = Path(sys.argv[1]), sys.argv[2]
with (folder / "ran").open("a") as file:
    file.write(case + "\\n")
def hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "child").write_text(str(child.pid))
    time.sleep(100)
def fail():
    raise ValueError("no such product")
does = {"fails": fail, "crashes": lambda: os._exit(9), "hangs": hang, "is late": lambda: time.sleep(2)}
does.get(case, lambda: None)()
print('{"value": "%s"}' % case)
"""


@pytest.mark.slow
def test_what_a_case_meets_is_a_line_and_nothing_runs_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(evidence, "PIECE_SECONDS", 8)
    cases = ["good", "fails", "crashes", "after a crash", "hangs", "last"]
    commands = {case: ("-c", CASE, str(tmp_path), case) for case in cases}
    start = time.monotonic()
    evidence._piece("bad", commands, 8, tmp_path)
    assert time.monotonic() - start < 12 and [*evidence._lines(tmp_path, "bad")] == cases[:-1]
    evidence._piece("bad", commands, 8, tmp_path)
    lines = evidence._lines(tmp_path, "bad")
    assert [*lines] == cases and (tmp_path / "ran").read_text().splitlines() == cases
    assert lines["good"]["said"] == {"value": "good"} and lines["last"]["took"] > 0
    assert lines["fails"]["error"].endswith("ValueError: no such product") and lines["fails"]["exit_code"] == 1
    assert lines["crashes"]["error"] == "nothing was said" and lines["crashes"]["exit_code"] == 9
    assert lines["hangs"]["error"].startswith("not done after ")
    try:
        status = psutil.Process(int((tmp_path / "child").read_text())).status()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_ZOMBIE
    assert status == psutil.STATUS_ZOMBIE, "what a case started went with it"


@pytest.mark.slow
def test_a_case_that_began_late_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "LEAST_SECONDS", 0.1)
    monkeypatch.setattr(evidence, "PIECE_SECONDS", 8)
    commands = {"is late": ("-c", CASE, str(tmp_path), "is late")}
    evidence._piece("late", commands, 1, tmp_path)
    assert not evidence._lines(tmp_path, "late") and (tmp_path / "ran").exists()
    evidence._piece("late", commands, 8, tmp_path)
    assert evidence._lines(tmp_path, "late")["is late"]["said"] == {"value": "is late"}


@pytest.mark.slow
def test_rehearsed_on_a_cpu(tmp_path, monkeypatch, capsys):
    """An update, a recipe and a kernel, through the command, twice: the second time there is nothing left to do."""
    def one(piece, case, on):
        return {case: piece(on)[case]}

    pieces = {name: evidence.PIECES[name] for name in ("recipes", "steps", "kernels")}
    some = {"recipes": "fp8-delayed", "steps": "eager", "kernels": "rotary"}
    monkeypatch.setattr(evidence, "PIECES", {name: partial(one, piece, some[name]) for name, piece in pieces.items()})
    words = ["bench", "evidence", "--out", str(tmp_path), "--json"]
    assert cli.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".jsonl", ".json", ""} and not [*tmp_path.glob("tmp*")], "runs are gone"
    lines = {name: evidence._lines(tmp_path, name)[some[name]] for name in pieces}
    assert not [line["error"] for line in lines.values() if "error" in line]
    assert [case["ratio"] for case in result["cases"]] == [1, 1, 1]
    for name in ("recipes", "steps"):
        said = lines[name]["said"]
        assert said["status"] == "complete" and said["tokens_per_second"] > 0 and said["chosen"]["compile"]["used"] == "off"
    assert lines["kernels"]["said"]["name"] == "kernels"
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["versions"]["torch"] and "commit" in facts
    before = {path: path.read_text() for path in tmp_path.glob("*.jsonl")}
    assert cli.main([*words, "--seconds", "100"]) == 0
    assert {path: path.read_text() for path in tmp_path.glob("*.jsonl")} == before


def test_every_piece_ends_within_eight_minutes_and_is_commands_that_exist(monkeypatch):
    assert [*evidence.PIECES][:3] == ["tests", "recipes", "doctor"], "right, before fast"
    assert evidence.PIECE_SECONDS <= 480
    for on in map(torch.device, ("cpu", "cuda")):
        monkeypatch.setattr(evidence, "runs_here", lambda on: ["fp8-tensorwise"])
        found = {name: piece(on) for name, piece in evidence.PIECES.items()}
        assert {"bf16", "mxfp8", "fp8-delayed"} <= found["recipes"].keys() and {"test_gpu", "test_memory"} <= found["tests"].keys()
        assert {"rms-norm", "cast-mx", "linear-cross-entropy"} <= found["kernels"].keys()
        for words in (words for commands in found.values() for words in commands.values()):
            if words[:2] == ("-m", "lpkit"):
                parser = argparse.ArgumentParser()
                parser.add_argument("--json", action="store_true")
                importlib.import_module(f"lpkit.commands.{words[2]}").arguments(parser)
                asked = parser.parse_args(words[3:])
                if words[2] == "train":
                    assert resolve(*target_and_asked(asked)).tokens_per_step > 0
                elif words[2] == "bench":
                    assert BENCHES.keys() >= {*asked.names}
            else:
                assert words[:2] == ("-m", "pytest")


@pytest.mark.parametrize("words", [["ledger", "--seconds", "3"], ["evidence", "--configs", "3"], ["evidence", "--seconds", "0"],
                                   ["ledger", "--kernel", "amax"]])
def test_options_of_one_bench_are_for_no_other(words, capsys):
    assert cli.main(["bench", *words]) == 2
    assert "alone, and 1 or more" in capsys.readouterr().err
