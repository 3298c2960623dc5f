"""The rows of experiments/qat.py, out of the tables while other tests hold these to their pages."""

from experiments import qat  # noqa: F401
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.recipes import RECIPES

ROWS = [(RECIPES, "qat", RECIPES.pop("qat")),
        *((FORMATS, name, FORMATS.pop(name)) for name in ("int2", "int3"))]


def add(monkeypatch) -> None:
    """Puts the rows back into the tables for one test."""
    for table, name, row in ROWS:
        monkeypatch.setitem(table, name, row)
