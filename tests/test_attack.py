"""The attacks of tests/attack, few of each: nothing may give way."""

import importlib

import pytest

from lpkit import records
from tests.attack import NAMES, bits, kills, signals


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_gives_way(name, tmp_path):
    module = importlib.import_module(f"tests.attack.{name}")
    outcome = module.attack(module.FEW, 1, tmp_path)
    assert outcome.tried >= module.FEW and outcome.failures == {}


# What a broken kit looks like to each: the attacks on the command line and on calls are broken in test_words.py, those on
# memory in test_leaks.py, on links in test_files.py, on processes in test_processes.py.

def test_bits_would_be_seen_without_checksums(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "digest", lambda value: "the same for all")
    assert "a number changed silently" in bits.attack(40, 1, tmp_path).failures


@pytest.mark.slow
@pytest.mark.parametrize("attack, breaking, seen", [
    (kills, "lpkit.training.training.Training.load_state_dict = lambda self, state, source='': None", "a loss differs"),
    (signals, "import contextlib, lpkit.training.background as b; b.heard_by = lambda _: contextlib.nullcontext()", "the record differs")], ids=["kills", "signals"])
def test_what_is_broken_is_seen(attack, breaking, seen, tmp_path):
    assert seen in attack.attack(3, 1, tmp_path, breaking).failures
