"""docs/attention.md was made by running it, and is true here too for what a CPU can say.

Only these tests catch: a kind of attention that a backend computes otherwise than docs/attention.md
says.
"""

import re
from pathlib import Path

import pytest

from lpkit.measure import attention
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import ATTENTION
from tests.pages.attention import DTYPES, error, models, run

PAGE = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
TABLE = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines()
         if line.startswith("| ")]


@pytest.fixture(scope="module")
def cells_by_pair():
    """The results of each backend and each kind of attention, in two dtypes."""
    return run("cpu", dtypes=("float32", "bfloat16"))


def test_every_kind_by_every_backend_is_on_the_page_and_true_here(cells_by_pair):
    heads = TABLE[0]
    assert (heads == ["backend", *models()] and set(KINDS)
            <= set(heads)), "python -m tests.pages attention"
    rows = {row[0]: dict(zip(heads, row)) for row in TABLE[1:1 + len(ATTENTION)]}
    assert list(rows) == list(ATTENTION)
    for (name, kind), cells in cells_by_pair.items():
        errors = rows[name][kind].split(" ")
        errors = dict(zip(DTYPES, errors if len(errors) == 3 else ["-"] * 3, strict=True))
        for dtype, cell in cells.items():
            assert (errors[dtype] == "-") == bool(cell.why), (name, kind, dtype, cell)
            # other processors sum in another order; errors of FP8 and 16 bits come from the formats
            if not cell.why:
                listed = float(errors[dtype])
                assert listed / 10 <= float(error(cell)) <= 10 * listed, (
                    name, kind, dtype, cell)
            else:
                assert cell.why in PAGE, cell


def test_what_does_not_work_says_what_does(cells_by_pair):
    for (backend, _), cells in cells_by_pair.items():
        for cell in cells.values():
            assert bool(cell.why) == (error(cell) == "-")
            alone = cell.nearest in ATTENTION and cell.nearest != backend
            assert not cell.why or alone or re.search(r"; \S+( and \S+)? (can|has|computes every "
                                                      r"kind)$", cell.why), cell


@pytest.mark.parametrize("call, why", [
    (lambda q, k, v, documents: q + 0 * (k + v), "the numbers are wrong, relative error"),
    (lambda q, k, v, documents: 1 / 0, "ZeroDivisionError"),
    (lambda q, k, v, documents: q * float("nan") + k + v, "the numbers are wrong, relative error "
                                                          "nan")])
def test_a_backend_that_raises_or_is_wrong_is_a_sentence(call, why, monkeypatch):
    real = attention.backend
    monkeypatch.setattr(attention, "backend", lambda name, model: real(name, model)
                        if name == "plain" else call)
    cell = run("cpu", kinds=["full"], backends=["sdpa"], dtypes=["float32"])["sdpa",
        "full"]["float32"]
    assert (cell.why.startswith(why) and cell.nearest
            == "plain"), "what fails is no alternative to itself"


def test_each_kind_leaves_something_out():
    """At the page's sizes, each kind hides some pairs of tokens; else it would be tried as full
    attention."""
    full = models()["full"].attention.rule(130).pairs(130)
    for name in ("window", "block-sparse", "global"):
        assert models()[name].attention.rule(130).pairs(130) < full, name
