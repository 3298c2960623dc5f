"""The bench for a machine that is at hand for minutes: what it meets is a line, and nothing is done twice."""

import json
import sys
import time

import psutil
import pytest

from lpkit import cli
from lpkit.bench import evidence

WORKER = """
import os, sys, time
from pathlib import Path
from lpkit.bench import evidence

def cases(on):
    count = Path(sys.argv[2]) / "ran"
    def case(key, does):
        def measure():
            with count.open("a") as file:
                file.write(key + " ")
            does()
            return {"value": key}
        return key, measure
    def fail():
        raise ValueError("no such product")
    def hang():
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        count.with_name("child").write_text(str(child.pid))
        time.sleep(100)
    yield case("good", lambda: None)
    yield case("fails", fail)
    yield case("crashes", lambda: os._exit(9))
    yield case("after a crash", lambda: None)
    yield case("hangs", hang)
    yield case("last", lambda: None)

evidence.PIECES["bad"] = evidence.Piece(cases)
sys.exit(evidence._work(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
"""


@pytest.mark.slow
def test_what_a_case_meets_is_a_line_and_nothing_runs_twice(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(evidence, "WORKER", [sys.executable, str(tmp_path / "worker.py")])
    monkeypatch.setattr(evidence, "LEAST_SECONDS", 5)
    start = time.monotonic()
    evidence._piece("bad", 50, tmp_path)
    assert time.monotonic() - start < 60
    evidence._piece("bad", 50, tmp_path)
    lines = evidence._lines(tmp_path, "bad")
    assert [*lines] == ["good", "fails", "crashes", "after a crash", "hangs", "last"]
    assert [lines[case].get("error") for case in lines] == [
        None, "ValueError: no such product", "its process ended with 9", None, "its process ended with -9", None]
    assert lines["fails"]["where"][-1].startswith("worker.py:") and lines["last"]["value"] == "last"
    assert (tmp_path / "ran").read_text().split() == ["good", "fails", "crashes", "after", "a", "crash", "hangs", "last"]
    try:
        status = psutil.Process(int((tmp_path / "child").read_text())).status()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_ZOMBIE
    assert status == psutil.STATUS_ZOMBIE, "what a case started went with it"


@pytest.mark.slow
def test_rehearsed_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Products, an update and a run, through the command, twice: the second time there is nothing left to do."""
    monkeypatch.setattr(evidence, "PIECES", {name: evidence.PIECES[name] for name in ("steps", "products", "train")})
    words = ["bench", "evidence", "--out", str(tmp_path), "--json"]
    assert cli.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    errors = {case: line["error"] for name in evidence.PIECES for case, line in evidence._lines(tmp_path, name).items() if "error" in line}
    assert not errors
    assert [case["ratio"] for case in said["cases"]] == [1, 1, 1]
    [train] = evidence._lines(tmp_path, "train").values()
    assert train["said"]["status"] == "complete"
    [update] = [line for case, line in evidence._lines(tmp_path, "steps").items() if case == "eager"]
    assert len(update["losses"]) == 2 and update["tokens_per_second"] > 0 and update["chosen"]["compile"]["used"] == "off"
    ceilings = evidence._lines(tmp_path, "products")["ceilings"]
    assert ceilings["flops"]["bf16"] > 0 and ceilings["bytes_per_second"] > 0
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["versions"]["torch"] and "commit" in facts
    before = {path: path.read_text() for path in tmp_path.glob("*.jsonl")}
    assert cli.main([*words, "--seconds", "100"]) == 0
    assert {path: path.read_text() for path in tmp_path.glob("*.jsonl")} == before


def test_every_piece_ends_within_eight_minutes_and_has_cases():
    assert [*evidence.PIECES][:3] == ["tests", "recipes", "doctor"], "right, before fast"
    assert all(piece.seconds <= 480 for piece in evidence.PIECES.values())
    found = {name: [key for key, _ in piece.cases(evidence._device())] for name, piece in evidence.PIECES.items()}
    assert all(len(keys) == len(set(keys)) for keys in found.values())
    assert {"bf16, auto, eager", "mxfp8, emulated, eager", "fp8-delayed, scaled_mm, eager"} <= set(found["recipes"])
    assert {"test_gpu", "test_memory"} <= set(found["tests"])
    assert {"rms-norm", "linear-cross-entropy"} <= set(found["kernels"])


@pytest.mark.parametrize("words", [["ledger", "--seconds", "3"], ["evidence", "--configs", "3"], ["evidence", "--seconds", "0"]])
def test_options_of_one_bench_are_for_no_other(words, capsys):
    assert cli.main(["bench", *words]) == 2
    assert "alone, and 1 or more" in capsys.readouterr().err
