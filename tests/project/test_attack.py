"""The attacks of tests/attack, few of each: nothing may give way.

Only these tests catch: a number, a run or a secret that is lost at a random kill, signal, flipped
bit, planted link or hostile neighbour, and an attack that sees nothing.
"""

import importlib
from pathlib import Path

import pytest

from tests.attack import NAMES, NOT_TRIED
from tests.attack._nursery import nursery, tell_of_writes


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "inputs"])
def test_nothing_gives_way(name, tmp_path):
    """All of `inputs` is in tests/commands/test_inputs.py."""
    module = importlib.import_module(f"tests.attack.{name}")
    outcome = module.attack(module.FEW, 1, tmp_path)
    if NOT_TRIED in outcome.facts:
        assert not outcome.tried
        pytest.skip(f"{name}: {outcome.facts[NOT_TRIED]}")
    assert outcome.tried >= module.FEW and outcome.failures == {}


def writes(places: list[str]) -> int:
    """In the nursery."""
    tell_of_writes()
    for place in places:
        Path(place).write_text("")
    Path(places[-1]).unlink()
    return 0


def test_the_nursery_tells_of_what_is_written_elsewhere(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside.txt"
    inside.mkdir()
    with nursery(inside, "tests.project.test_attack:writes",
                 "tests.attack.command_line:nothing") as forks:
        assert (forks.lpkit(inside / "a.txt", "b.txt", "/dev/null", "b.txt") == 0
                and forks.wrote == "")
        assert forks.lpkit("a.txt", outside) == 0
        assert ([line.split()[0] for line in forks.wrote.splitlines() if str(outside) in line]
                == ["open", "os.remove"])


@pytest.mark.slow
@pytest.mark.parametrize("name, trials, seen", [
    ("python_calls", ["Config()", "1 / 0", "open('../a', 'w') and predict(Config(), 'h201')",
                      "open('b', 'w') and predict(Config(), 'h201')"],
     {"nothing raised": 1, "another error": 1, "writes elsewhere": 1, "leaves something": 1}),
    ("command_line", [["predict", "cpu-3m"], ["doctor", "--help"],
                      ["train", "cpu-3m", "data.source=odd/short.txt"],
                      ["data", "prepare", "odd/short.txt", "--out", "../tokens"]],
     {"exit code": 2, "not one sentence": 2, "imports torch": 1, "writes elsewhere": 1}),
])
def test_attacks_see_what_gives_way(name, trials, seen, tmp_path, monkeypatch):
    module = importlib.import_module(f"tests.attack.{name}")
    monkeypatch.setattr(module, "trials", lambda *_: trials)
    monkeypatch.setattr(module, "SECONDS", 100)
    (tmp_path / "inside").mkdir()
    failures = module.attack(len(trials), 0, tmp_path / "inside").failures
    assert {what: len(each) for what, each in failures.items()} == seen, failures
