"""docs/tour.md: every row of the catalogue and every claim is a line with a prediction, a
measurement and a verdict.

Only these tests catch: a row of the catalogue, a claim or a sentence by protocol that the tour
leaves out, an empty cell, and a line that names a notebook, row, command or record that is not
there.
"""

import re
import shlex
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from lpkit import cli
from tests.bench import BENCHES, protocol
from tests.pages import tour
from tests.pages.claims import claims

ROOT = Path(__file__).parents[2]
LINES = list(chain.from_iterable(tour.techniques().values()))
NAMES = [line.name for line in LINES]
VERDICTS = {"confirmed", "smaller", "refuted", "not seen", "not testable here", "holds",
            "cannot tell", "met", "short by"}


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "tour.md").read_text() == tour.page(), "python -m tests.pages tour"


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_no_cell_is_empty_and_all_names_exist(line):
    """`cells` raises for a notebook, a record, a claim or a sentence that is not there."""
    row = tour.cells(line)
    assert len(row) == len(tour.HEADS) and all(cell.strip() for cell in row), row
    word = re.sub(r"short by.*", "short by", row[-1])
    assert word in VERDICTS, row
    assert line.rows or line.command or line.missing, "a row, a command, or why there is none"
    for name in line.rows:
        field, value = tour.named(name)
        outside = "experiments" in line.notebook and f'["{value}"] =' in (
            ROOT / "notebooks" / line.notebook).read_text()
        assert outside or (field, value) in tour.imports(), name


def test_rows_that_other_modules_added_are_not_listed(monkeypatch):
    """In a process of several tests, experiments and lessons have added rows to the tables."""
    from lpkit.techniques.outside import BROUGHT, TABLES
    table = TABLES["optimizer"]
    monkeypatch.setitem(table, "of-a-lesson", table["adamw"])
    monkeypatch.setitem(table, "of-an-import", row := replace(table["adamw"], why="another"))
    monkeypatch.setitem(BROUGHT, ("optimizer", "of-an-import"), (row, "tests.claims.test_tour"))
    tour.imports.cache_clear()
    names = {name for field, name in tour.imports() if field == "optimizer"}
    assert "adamw" in names and not {"of-a-lesson", "of-an-import"} & names


def test_every_row_claim_and_sentence_has_a_line():
    assert len(set(NAMES)) == len(NAMES) >= 119
    shown = {tour.named(row) for line in LINES for row in line.rows}
    assert tour.imports().keys() <= shown, sorted(tour.imports().keys() - shown)
    assert {line.claim for line in LINES} - {""} == claims().keys()
    assert {line.protocol for line in LINES} - {""} == protocol.published().keys()


@pytest.mark.parametrize("command", sorted({line.command for line in LINES} - {""}))
def test_a_command_exists(command, capsys):
    """Those that only print run; of benches the name is checked, of claims and sweeps the file."""
    program, *words = shlex.split(command)
    assert program == "lpkit"
    if words[0] == "bench":
        assert words[1] in BENCHES
    elif words[0] in ("claim", "sweep"):
        assert (ROOT / words[1]).is_file()
    elif words[0] == "sample":
        assert words[1] == "RUN"
    else:
        assert cli.main(words) == 0 and capsys.readouterr().out.strip()


@pytest.mark.parametrize("wrong, error", [
    ({"notebook": "77"}, KeyError), ({"notebook": "experiments/none.py"}, KeyError),
    ({"claim": "lion-lightr"}, KeyError), ({"record": "blocks: none"}, KeyError),
    ({"protocol": "leon"}, KeyError)])
def test_a_name_that_is_not_there_is_refused(wrong, error):
    [line] = [line for line in LINES if line.name == "AdamW and Adam"]
    with pytest.raises(error):
        tour.cells(replace(line, **wrong))


def test_predictions_are_those_of_the_closed_forms():
    """Lion moves 20 bytes a parameter where AdamW moves 28, and keeps 4 bytes less of 16; the base
    itself changes nothing."""
    assert tour.predicted("optimizer=adamw", "") == "1.00 of the seconds, 1.00 of the peak"
    seconds, peak = map(float, re.findall(r"\d\.\d+", tour.predicted("optimizer=lion", "")))
    assert 20 / 28 < seconds <= 1 and 12 / 16 < peak < 1
    pipelined = tour.predicted("parallel.schedule=gpipe", "parallel.pipeline=2 grad_accum_steps=8")
    assert pipelined.startswith("1.00 of the seconds"), "the bubble of 1F1B"
