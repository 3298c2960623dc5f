"""The attacks of tests/attack, few of each: nothing may give way."""

import importlib

import pytest

from tests.attack import NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_gives_way(name, tmp_path):
    module = importlib.import_module(f"tests.attack.{name}")
    outcome = module.attack(module.FEW, 1, tmp_path)
    assert outcome.tried >= module.FEW and outcome.failures == {}
