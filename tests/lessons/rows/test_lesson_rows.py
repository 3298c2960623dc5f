"""Rows of lessons (`notebooks/lessons/rows`): read and predicted without torch, and loaded.

Only these tests catch: a row of a lesson that imports torch before it runs, that replaces one of
the kit's, or whose implementation is not where it says.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from lpkit.techniques import lessons, outside
from tests import NOTEBOOKS

ALONE = """
import sys
from lpkit.config import Config
from lpkit.predict import memory
from lpkit.predict.time import step_time

module, changes = sys.argv[1], dict(change.split("=") for change in sys.argv[2:])
config = Config(imports=module).replace(changes)
print(memory(config, "h200").peak_bytes > 0 < step_time(config, "h200").step_seconds)
print(sorted(name for name in ("torch", "numpy") if name in sys.modules))
"""
CHANGES = {     # that name a row
    "optimizers": "optimizer=soap", "schedules": "schedule=linear", "depth": "governors=random-ltd",
    "growth": "start.grow=stack", "linear_attention": "model.attention=delta",
    "masked": "data.policy=masked data.policy.share=0.75 model.vocab=257 "
              "model.attention=bidirectional model.changes=masked-autoencoder",
    "sparse_attention": "model.attention=block-sparse"}


def alone(*words: str) -> list[str]:
    place = {"PYTHONPATH": f"{Path(__file__).parents[3]}:{NOTEBOOKS}"}
    return subprocess.run([sys.executable, "-c", ALONE, *words], env=place, capture_output=True,
                          text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("module", lessons.package().modules())
def test_rows_of_a_lesson_are_read_without_torch_and_replace_no_row_of_the_kit(module):
    """A Config refuses a module that replaces a row."""
    assert alone(module, *CHANGES.get(module.rpartition(".")[2], "").split()) == ["True", "[]"]


def test_a_row_of_a_lesson_is_loaded_from_its_own_file_and_a_second_import_changes_nothing():
    outside.load(lessons.package().modules())
    before = {field: dict(rows) for field, rows in outside.TABLES.items()}
    outside.load(lessons.package().modules())
    assert before == outside.TABLES
    lesson_rows = [row for rows in before.values() for row in rows.values()
                   if row.implementation.startswith("lessons.rows.")]
    assert len(lesson_rows) > 9 and all(row.load() for row in lesson_rows)
