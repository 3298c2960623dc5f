"""`lpkit new experiment`: the files that it writes have the form of the course, run unchanged, and
fail if their row is broken.

Only these tests catch: an example or a written experiment that does not run unchanged, whose
test passes although its row is broken, or that overwrites a file.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from lpkit import cli
from lpkit.claims import protocol
from lpkit.commands import new
from lpkit.files import resource
from lpkit.techniques import outside
from tests import NOTEBOOKS, processors
from tests.course import test_notebooks as form

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(NOTEBOOKS) / "experiments"
# The checks of every notebook of the course that need only the notebook. The minutes of a
# notebook belong to a route through the course.
CHECKS = {name: check for name, check in vars(form).items()
          if name.startswith("test_") and "minutes" not in name
          and list(inspect.signature(check).parameters) == ["book"]}


@pytest.fixture
def own():
    """Remove the rows that the module of an experiment adds, after the test."""
    before, path, modules = {field: dict(table) for field, table in outside.TABLES.items()}, list(
        sys.path), set(sys.modules)
    yield
    for field, rows in before.items():
        outside.TABLES[field].clear()
        outside.TABLES[field].update(rows)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and "pytest-" in sys.modules[name].__file__:
            del sys.modules[name]


def lpkit(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run the commands as a user who has installed the package would type them in the folder."""
    path = os.pathsep.join([processors.AT_START, str(ROOT), str(folder)])
    return subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True,
                          text=True,
                          env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def test_an_example_of_each_family_lies_beside_the_package():
    assert (EXAMPLES == resource("notebooks") / "experiments"
            and set(new.FAMILIES.values()) <= set(outside.TABLES))
    there = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert there - {"distil.py", "length_ramp.py", "prune.py", "qat.py", "weighted.py"} == {
        file.format(f"my_{family}") for family in new.FAMILIES for file in new.FILES}


@pytest.mark.parametrize("family", new.FAMILIES)
def test_an_example_has_the_form_of_the_course(family):
    assert len(CHECKS) > 11
    for check in CHECKS.values():
        check(nbformat.read(EXAMPLES / f"my_{family}.ipynb", as_version=4))


@pytest.mark.parametrize("family", new.FAMILIES)
@pytest.mark.parametrize("name", ["own_row", "null", "e1"])
def test_the_name_is_the_row_the_module_and_the_files(family, name, own, tmp_path, monkeypatch,
        capsys):
    """Also a name that YAML would read as another type."""
    assert cli.main(["new", "experiment", name, "--family", family, "--out",
                     str(tmp_path / "deep" / "er"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    folder = tmp_path / "deep" / "er"
    assert answer["files"] == [str(folder / file.format(name)) for file in new.FILES]
    assert (sorted(path.name for path in folder.iterdir())
            == sorted(file.format(name) for file in new.FILES))
    assert not [path for path in folder.iterdir() if f"my_{family}" in path.read_text()]
    monkeypatch.syspath_prepend(folder)
    outside.load(name)
    claim = protocol.read(folder / f"{name}.yaml")
    assert (list(claim.arms)[1] == name
            and outside.TABLES[new.FAMILIES[family]][name].source.startswith(("Reddi", "OCP")))
    row = claim.config(name).to_dict()
    for key in new.FAMILIES[family].split("."):
        row = row[key]
    assert row["name"] == name


@pytest.mark.parametrize("name, sentence", [
    ("", "'' is no module's name"), ("a/b", "and no path"), ("../up", "and no path"),
    ("a.b", "is no module's name"), ("1st", "a letter first"),
    ("class", "'class' is no module's name"), ("a b", "is no module's name"),
    ("zażółć", "is no module's name"), ("x" * 65, "at most 64 letters"),
    ("my_rule\n", "is no module's name"), ("--help ", "is no module's name"),
    ("json", "there is a module json"), ("torch", "there is a module torch"),
    ("lpkit", "there is a module lpkit"), ("lessons", "there is a module lessons"),
    ("lion", "there is a row optimizer=lion"), ("taken", "taken.py exists"),
    ("linked", "linked.yaml exists"),
    ("folder", "folder exists")])
def test_what_cannot_be_is_a_sentence_and_nothing_is_written(name, sentence, tmp_path, monkeypatch,
        capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.py").write_text("mine")
    (tmp_path / "linked.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["new", "experiment", "--", name]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and sentence in err
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "taken.py").read_text() == "mine"


def test_all_files_are_written_or_none(tmp_path, monkeypatch, capsys):
    def full(path, text, write=new.write_atomically):
        if path.suffix == ".yaml":
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(new, "write_atomically", full)
    assert cli.main(["new", "experiment", "own_row", "--out", str(tmp_path)]) == 2
    assert "free some space" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an experiment of each family, and without any file of the course."""
    path = tmp_path_factory.mktemp("own")
    for family in new.FAMILIES:
        assert cli.main(["new", "experiment", f"own_{family}", "--family", family, "--out",
                         str(path)]) == 0
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", new.FAMILIES)
def test_it_runs_as_it_is(family, folder, tmp_path):
    name = f"own_{family}"
    done = lpkit(folder, "lpkit", "notebook", f"{name}.ipynb", "--tier", "smoke", "--out",
                 str(tmp_path), "--json")
    record = json.loads(done.stdout)
    assert (record["status"] == "done" and record["result"] == "cannot tell"
            and "few steps" in record["why"])
    tested = lpkit(folder, "pytest", "-q", f"test_{name}.py", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    done = lpkit(folder, "lpkit", "train", "cpu-3m", "--import", name,
                 f"{new.FAMILIES[family]}={name}", "steps=2", "model.layers=1",
                 "model.width=32", "model.heads=2", "eval_batches=1", "--out",
                 str(tmp_path / "run"), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "complete", done.stderr


BROKEN = {     # in the module of an example: the line that computes what the example promises
    "optimizer": ("largest.copy_(largest.maximum(square))", "largest.copy_(square)"),
    "recipe": ("block=(1, settings.block)", "block=(1, 2 * settings.block)")}


@pytest.mark.slow
@pytest.mark.parametrize("family", new.FAMILIES)
def test_its_test_fails_where_its_row_is_broken(family, folder, tmp_path):
    for path in folder.glob(f"*own_{family}.py"):
        (tmp_path / path.name).write_text(path.read_text().replace(*BROKEN[family]))
    assert (tmp_path / f"own_{family}.py").read_text() != (folder / f"own_{family}.py").read_text()
    done = lpkit(tmp_path, "pytest", "-q", f"test_own_{family}.py", "-p", "no:cacheprovider")
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout
