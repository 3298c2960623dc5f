"""The attacks of tests/attack, few of each: nothing may give way."""

import importlib
import pkgutil

import pytest

import tests.attack

NAMES = sorted(m.name for m in pkgutil.iter_modules(tests.attack.__path__) if m.name[0] != "_")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_gives_way(name, tmp_path):
    module = importlib.import_module(f"tests.attack.{name}")
    outcome = module.attack(module.FEW, 1, tmp_path)
    assert outcome.tried >= module.FEW and outcome.failures == {}
