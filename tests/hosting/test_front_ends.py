"""A notebook runs by papermill, jupyter execute, nbconvert, nbval and the kit, whatever the folder.
Only here do these commands run on the course itself, as somebody types them; the runner's own tests
use throwaway notebooks, and `make test` runs every notebook by nbval.

Only these tests catch: a notebook of the course that one of these commands, or a folder with spaces
in its name, breaks.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_notebook
from papermill.__main__ import papermill

from hosting import notebooks
from lessons.claims import FAILS, cards
from tests import NOTEBOOKS, smoke_copies

BIN = Path(sys.executable).parent
PARAMETRISED = {"papermill": ["papermill", "{theirs}", "{out}/papermill.ipynb", "-p", "tier",
                              "smoke", "--no-progress-bar"]}
# those that take no parameter get a copy at the smoke size, in which a claim that fails is an error
COPIED = {"execute": ["jupyter", "execute", "{copy}", "--output", "{out}/execute.ipynb"],
          "nbconvert": ["jupyter", "nbconvert", "--to", "notebook", "--execute", "{copy}",
                        "--output-dir", "{out}", "--output", "nbconvert.ipynb"]}
PLACES = {"notebooks": Path(NOTEBOOKS), "elsewhere": None}
# two notebooks: the course's first drawings, and runs of one's own model
MATRIX = [("papermill", "notebooks", "03"), ("papermill", "elsewhere", "25"),
          ("execute", "elsewhere", "03"), ("nbconvert", "elsewhere", "03")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("front", "place", "number"), MATRIX,
                         ids=["-".join(case) for case in MATRIX])
def test_a_notebook_runs_by_each_front_end_from_any_folder(front, place, number, tmp_path):
    [theirs] = Path(NOTEBOOKS).glob(f"{number}_*.ipynb")
    out, elsewhere = tmp_path / "out", tmp_path / "a folder with spaces"
    out.mkdir()
    elsewhere.mkdir()
    copy = elsewhere / theirs.name
    if front in COPIED:
        nbformat.write(smoke_copies.copy_of(theirs), copy)
    command, *words = [word.format(theirs=theirs, out=out, copy=copy)
                       for word in (PARAMETRISED | COPIED)[front]]
    done = subprocess.run([BIN / command, *words], cwd=PLACES[place] or elsewhere, text=True,
                          capture_output=True, timeout=850)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    [notebook] = out.glob("*.ipynb")
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells
             if cell.cell_type == "code"]
    assert (all(cell.execution_count for cell in cells)
            and any('tier = "smoke"' in cell.source or "tier = 'smoke'" in cell.source
                    for cell in cells))
    claimed = [card for cell in cells for card in cards(cell.outputs)]
    assert claimed and FAILS not in {card["state"] for card in claimed}, claimed
    assert not [output for cell in cells for output in cell.outputs
                if output.output_type == "error"]


@pytest.mark.parametrize("whose", ["learner", "course"])
def test_the_lessons_of_the_kernels_own_folder_come_first(whose, tmp_path, monkeypatch):
    """docs/slides_and_grading.md says so of papermill's --cwd."""
    book = new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3",
        "language": "python"}}, cells=[
        new_code_cell("from lpkit import begin\nbegin()\nimport "
                      "lessons\nprint(lessons.__path__[0])")])
    nbformat.write(book, tmp_path / "a.ipynb")
    (tmp_path / "mine" / "lessons").mkdir(parents=True)
    (tmp_path / "mine" / "lessons" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    folder = ["--cwd", "mine"] if whose == "learner" else []
    done = CliRunner().invoke(papermill, ["a.ipynb", "out.ipynb", "--no-progress-bar", *folder])
    assert done.exit_code == 0, done.output
    [printed] = nbformat.read("out.ipynb", as_version=4).cells[-1].outputs
    due = tmp_path / "mine" if whose == "learner" else notebooks.resource("notebooks")
    assert os.path.samefile(printed.text.strip(), due / "lessons")
