"""What users bring: each of the tables of tests/inputs is right, or refused in one sentence."""

import json
import os
import shutil
import warnings

import numpy as np
import pytest
import torch

from tests.inputs import texts, warned

pytest.importorskip("tokenizers")
from tests.inputs import tokenizers  # noqa: E402

CASES = [pytest.param(call, id=name) for table in (tokenizers, texts) for name, call in table.cases()]


def test_the_tables_are_as_long_as_they_should_be():
    assert len([*tokenizers.cases()]) >= 20 and len([*texts.cases()]) >= 50


@pytest.mark.parametrize("call", CASES)
def test_is_right_or_refused_in_one_sentence(call):
    assert call()
