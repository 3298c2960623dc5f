"""What a learner wrote survives every update and reset, and the course is never written to.

Only these tests catch: an update or a reset that loses a learner's words, that writes through a
link or into the course, and a broken lesson whose learner is not told the line and the way back.
"""

import json
import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from hosting import copies
from hosting.commands import lab as lab_command
from lessons.judging.attempts import asked
from lpkit import cli, files
from lpkit.errors import ConfigError
from tests import processors

NAME = "03_formats.ipynb"
TAGS = {"p": ["parameters"], "e": ["exercise"], "f": ["exercise"]}
FIRST = {"t": "# Formats", "p": "seed: int = 0  # of all", "a": "x = 1", "b": "y = 2",
         "e": "def one(): ...", "z": "done"}


def book(cells: dict[str, str]) -> nbformat.NotebookNode:
    return new_notebook(cells=[new_markdown_cell(source, id=id) if id == "t" else
                               new_code_cell(source, id=id, metadata={"tags": TAGS[id]}
                                             if id in TAGS else {})
                               for id, source in cells.items()])


@pytest.fixture
def course(tmp_path, monkeypatch):
    """`publish(cells)`: what the course holds from now on."""
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "site-packages" / "lpkit")
    (tmp_path / "site-packages" / "notebooks").mkdir(parents=True)

    def publish(cells: dict[str, str], name: str = NAME) -> Path:
        path = tmp_path / "site-packages" / "notebooks" / name
        nbformat.write(book(cells), path)
        return path

    return publish


@pytest.fixture
def folder(tmp_path, course):
    course(FIRST)
    folder = copies.work_folder(tmp_path / "mine")
    assert copies.update(folder) == [{"notebook": "03_formats", "done": "copied", "notes": []}]
    return folder


def read(folder: Path, name: str = NAME) -> nbformat.NotebookNode:
    notebook = nbformat.read(folder / name, as_version=4)
    nbformat.validate(notebook)
    return notebook


def sources(folder: Path) -> list[str]:
    return [cell.source for cell in read(folder).cells]


def edit(folder: Path, change) -> None:
    """As JupyterLab saves what a learner did."""
    notebook = read(folder)
    change(notebook.cells)
    nbformat.write(notebook, folder / NAME)


def put(id: str, source: str):
    def change(cells):
        next(cell for cell in cells if cell.id == id).source = source
    return change


def test_a_copy_is_the_courses_file_and_stays_what_it_is(folder, course):
    assert (folder / NAME).read_bytes() == course(FIRST).read_bytes()
    before = (folder / NAME).stat().st_mtime_ns
    assert copies.update(folder) == [] and (folder / NAME).stat().st_mtime_ns == before


def test_pictures_come_beside_the_notebooks_and_are_the_courses(folder, course):
    there, mine = course(FIRST).parent / "pictures", folder / "pictures"
    there.mkdir()
    for content in (b"<svg/>", b"\x89PNG\xff"):
        (there / "03.svg").write_bytes(content)
        assert copies.update(folder) == []
        assert {path.name: path.read_bytes() for path in mine.iterdir()} == {"03.svg": content}
    (mine / "03.svg").write_bytes(b"cut sh")
    (mine / "own.png").write_bytes(b"a learner's")
    copies.update(folder)
    assert ((mine / "03.svg").read_bytes() == b"\x89PNG\xff"
            and (mine / "own.png").read_bytes() == b"a learner's")
    (mine / "03.svg").unlink()
    (mine / "03.svg").symlink_to(folder / NAME)
    with pytest.raises(ConfigError):
        copies.update(folder)
    assert (folder / NAME).read_text().startswith("{")


def test_the_course_changes_what_the_learner_left_alone(folder, course):
    edit(folder, put("e", "def one(): return 1"))
    edit(folder, lambda cells: cells.insert(3, new_code_cell("my own note", id="own")))
    edit(folder, lambda cells: cells[2].outputs.append(new_output("stream", text="seen")))
    edit(folder, lambda cells: cells[4].outputs.append(new_output("stream", text="stale")))
    (folder / "progress.json").write_text("{}")
    course({"t": "# Formats", "p": FIRST["p"], "a": "x = 1", "n": "new", "b": "y = 3",
            "e": FIRST["e"], "f": "def two(): ..."})
    (change,) = copies.update(folder)
    assert (change["done"], change["notes"]) == ("updated", [])
    assert sources(folder) == ["# Formats", FIRST["p"], "x = 1", "my own note", "new", "y = 3",
                               "def one(): return 1",
                              "def two(): ..."], "z is gone from the course, and was not changed"
    seen = {cell.id: cell.get("outputs") for cell in read(folder).cells}
    assert (seen["a"][0].text == "seen" and seen["b"]
            == []), "an output stays with the text that made it"
    assert (folder / "progress.json").read_text() == "{}"
    assert copies.update(folder) == []


def test_what_both_changed_stays_twice_and_is_said(folder, course):
    edit(folder, put("a", "x = 10"))
    edit(folder, put("e", "def one(): return 1"))
    edit(folder, put("p", "seed: int = 7  # of all"))
    edit(folder, put("z", "finished"))
    course(FIRST | {"a": "x = 1.0", "e": "def one(tensor): ...",
                    "p": "seed: int = 0\nsize: int = 2", "z": "finished"})
    (change,) = copies.update(folder)
    assert sources(folder) == ["# Formats", "seed: int = 0\nsize: int = 2",
                               "seed: int = 7  # of all", "x = 10", "x = 1.0", "y = 2",
                              "def one(): return 1", "finished"]
    assert change["notes"] == [
        "you and the course both changed 'seed: int = 0': your cell stays, and the new cell is "
        "before it",
        "you and the course both changed 'x = 1.0': your cell stays, and the new cell is after it",
        "you and the course both changed 'def one(tensor): ...': your answer stays; the task may "
        "read differently now"]
    tagged = {cell.id: cell.metadata.tags for cell in read(folder).cells if "tags" in cell.metadata}
    assert tagged == {"p": ["parameters"], "e": ["exercise"]}, (
        "the values that hold are the ones that a run may set")
    assert copies.update(folder) == []


def test_of_the_courses_own_versions_the_newest_stands(folder, course):
    edit(folder, put("a", "x = 10"))
    course(FIRST | {"a": "x = 1.0"})
    copies.update(folder)
    course(FIRST | {"a": "x = 1.0", "b": "y = 3"})
    copies.update(folder)
    assert sources(folder)[2:5] == ["x = 10", "x = 1.0",
                                    "y = 3"], "what is still the course's stays"
    course(FIRST | {"a": "x = 2"})
    copies.update(folder)
    assert sources(folder)[2:5] == ["x = 10", "x = 2", "y = 2"]
    edit(folder, put("a-beside", "x = 20"))
    course(FIRST | {"a": "x = 3"})
    copies.update(folder)
    assert sources(folder)[2:6] == ["x = 10", "x = 3", "x = 20", "y = 2"]


def test_a_deleted_cell_stays_away_and_a_changed_one_that_the_course_gave_up_stays(folder, course):
    edit(folder, lambda cells: cells.pop(3))
    edit(folder, put("z", "mine now"))
    course({"t": "# Number formats", "a": "x = 1", "b": "y = 2", "e": FIRST["e"]})
    copies.update(folder)
    assert sources(folder) == ["# Number formats", "x = 1", FIRST["e"], "mine now"]


def test_a_writer_that_was_killed_in_between_loses_nothing(folder, course, monkeypatch):
    edit(folder, put("e", "def one(): return 1"))
    course(FIRST | {"b": "y = 3"})
    real = files.write_atomically

    def killed(path, text):
        if path.parent.name == copies.PRISTINE:
            raise KeyboardInterrupt
        real(path, text)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "write_atomically", killed)
        copies.update(folder)
    after = sources(folder)
    assert after == ["# Formats", FIRST["p"], "x = 1", "y = 3", "def one(): return 1", "done"]
    (folder / f".{NAME}.abcdefgh.tmp").write_text("half")
    copies.update(folder)
    assert sources(folder) == after and not list(folder.glob(".*.tmp"))


def test_a_reset_keeps_the_answers_and_the_old_file(folder, course):
    edit(folder, put("a", "x = 10"))
    edit(folder, put("e", "def one(): return 1"))
    edit(folder, lambda cells: cells.append(new_code_cell("mine")))
    course(FIRST | {"b": "y = 3"})
    old = (folder / NAME).read_bytes()
    change = copies.reset(folder, "03")
    backup = folder / f"03_formats-{date.today()}.ipynb"
    assert ((change["done"], change["backup"]) == ("reset", str(backup))
            and backup.read_bytes() == old)
    assert sources(folder) == ["# Formats", FIRST["p"], "x = 1", "y = 3", "def one(): return 1",
                               "done"]
    assert copies.update(folder) == [], "and it is the newest"
    assert copies.reset(folder, "formats")["done"] == "unchanged"
    edit(folder, put("a", "x = 11"))
    again = copies.reset(folder, "mine/03_formats.ipynb")["backup"]
    assert (Path(again).name == f"03_formats-{date.today()}-1.ipynb"
            and backup.read_bytes() == old), "no backup is overwritten"


def test_a_copy_that_is_gone_comes_back(folder):
    (folder / NAME).unlink()
    assert (copies.reset(folder, "03")["done"] == "copied"
            and sources(folder) == list(FIRST.values()))
    (folder / NAME).unlink()
    assert copies.update(folder)[0]["done"] == "copied" and sources(folder) == list(FIRST.values())


@pytest.mark.parametrize("text, message", [
    ("{", "is not a notebook"), (b"\xff", "not UTF-8"),
    (json.dumps(book({"q": "else"})), "it has no cell of the course's notebook"),
    (json.dumps({"nbformat": 4, "nbformat_minor": 4, "metadata": {},
                 "cells": [{"cell_type": "raw", "source": "", "metadata": {}}]}),
     "cells without an id")])
def test_what_cannot_be_read_is_left_and_a_reset_keeps_it_beside(folder, course, text, message):
    old = text if isinstance(text, bytes) else text.encode()
    (folder / NAME).write_bytes(old)
    course(FIRST | {"b": "y = 3"})
    for _ in range(2):      # it is said again until something is done
        (change,) = copies.update(folder)
        assert (change["done"] == "left" and message in change["notes"][0]
                and (folder / NAME).read_bytes() == old)
    assert Path(copies.reset(folder, "03")["backup"]).read_bytes() == old
    assert sources(folder)[3] == "y = 3"


@pytest.mark.parametrize("strange", [NAME, f"{copies.PRISTINE}/{NAME}", copies.PRISTINE])
def test_nothing_is_written_through_a_link(folder, tmp_path, course, strange):
    outside = tmp_path / "outside"
    (folder / strange).rename(outside)
    (folder / strange).symlink_to(outside)
    before = outside.read_bytes() if outside.is_file() else sorted(outside.iterdir())
    course(FIRST | {"b": "y = 3"})
    for act in (copies.update, lambda folder: copies.reset(folder, "03")):
        with pytest.raises(ConfigError, match="is a link"):
            act(folder)
    assert (outside.read_bytes() if outside.is_file() else sorted(outside.iterdir())) == before
    assert (folder / strange).is_symlink() and not list(folder.glob("*-2*"))


def test_strange_folders_are_refused(tmp_path, course):
    ours = course(FIRST).parent
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path, message in ((ours, "is the course itself"), (ours / "mine", "is the course itself"),
                          (tmp_path / "full", "is not empty"),
                          (tmp_path / "link", "is a link"),
                          (tmp_path / "full" / "letter.txt", "is a file")):
        with pytest.raises(ConfigError, match=message):
            copies.work_folder(path)
    assert ([path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]
            and not (tmp_path / "elsewhere").exists())
    assert [path.name for path in ours.iterdir() if path.is_file()] == [NAME]


def test_without_the_course_it_says_where_it_looked(tmp_path, course):
    with pytest.raises(ConfigError, match=r"no notebook in .*site-packages/notebooks; install"):
        copies.update(copies.work_folder(tmp_path / "mine"))


def test_the_default_folder_may_hold_other_things(course):
    """A file of progress may be there before the first copy."""
    course(FIRST)
    place = files.data_dir("course")
    assert place.is_relative_to(os.environ["XDG_DATA_HOME"]), "tests write to a place of their own"
    place.mkdir(parents=True, exist_ok=True)
    (place / "a-file-of-another.json").write_text("{}")
    assert copies.work_folder() == place.resolve() and copies.update(place)
    (place / "a-file-of-another.json").unlink()


def test_two_at_once_do_it_once(tmp_path):
    words = [sys.executable, "-m", "lpkit", "lab", "--update", "--json", "--course",
             str(tmp_path / "mine")]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    done = [len(json.loads(process.communicate(timeout=60)[0])["changes"]) for process in both]
    course = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
    assert sorted(done) == [0, len(course)]
    assert all((tmp_path / "mine" / path.name).read_bytes() == path.read_bytes() for path in course)


def test_the_command(folder, course, capsys):
    course(FIRST | {"b": "y = 3"}), course(FIRST, "04_new.ipynb")
    edit(folder, put("b", "y = 20"))
    assert cli.main(["lab", "--update", "--course", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"Your copies of the course are in {folder}", "    copied: 04_new",
        "    updated: 03_formats",
        "        you and the course both changed 'y = 3': your cell stays, and the new cell is "
        "after it"]
    assert cli.main(["lab", "--reset", "3", "--course", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "no notebook '3'" in err and err.count("\n") == 1
    assert cli.main(["lab", "--reset", "03", "--course", str(folder), "--json"]) == 0
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert change["notebook"] == "03_formats" and Path(change["backup"]).exists()
    (folder / NAME).write_text("{")
    course(FIRST | {"b": "y = 4"})
    assert (cli.main(["lab", "--update", "--course", str(folder)]) == 1
            and "--reset 03_formats" in capsys.readouterr().out)


def test_what_asks_for_nothing_is_one_line(folder):
    changes = [{"notebook": f"{number:02}_x", "done": done, "notes": []}
               for done, numbers in (("copied", range(25)), ("updated", (7, 8)))
               for number in numbers]
    changes.insert(3, {"notebook": "09_y", "done": "left", "notes": ["it is no notebook"]})
    lines = lab_command.text({"root": str(folder), "changes": changes}).splitlines()
    assert lines[1:] == ["    copied: 25 notebooks; updated: 07_x, 08_x", "    left: 09_y",
                         "        it is no notebook"]


def test_a_lesson_comes_beside_its_notebook_and_a_changed_one_stays(folder, course):
    lessons, mine = course(FIRST).parent / "lessons", folder / "lessons" / "l03_formats.py"
    lessons.mkdir()
    theirs = lessons / mine.name

    def publish(text: str) -> list[dict]:
        theirs.write_text(text)
        return copies.update(folder)

    assert publish("x = 1\n") == [] and mine.read_text() == "x = 1\n"
    # as it was: it takes the course's
    assert publish("x = 2\n") == [] and mine.read_text() == "x = 2\n"
    mine.write_text("x = 5\n")
    assert copies.update(folder) == [] and mine.read_text() == "x = 5\n"
    [change] = publish("x = 3\n")
    assert (change["notebook"] == "lessons/l03_formats" and "--reset 03" in change["notes"][0]
            and mine.read_text() == "x = 5\n")
    assert copies.update(folder) == []      # it is said once
    change = copies.reset(folder, "03")
    backup = f"l03_formats-{date.today()}.py"
    assert (change["done"] == "reset" and change["notes"][-1]
            == f"your lessons/l03_formats.py is now {backup}")
    assert (mine.read_text() == theirs.read_text() == "x = 3\n"
            and mine.with_name(backup).read_text() == "x = 5\n")
    assert publish("x = 4\n") == [] and mine.read_text() == "x = 4\n"
    mine.unlink()
    assert copies.update(folder) == [] and mine.read_text() == "x = 4\n"
    mine.unlink()
    change = copies.reset(folder, "03")
    assert (mine.read_text() == "x = 4\n" and change["notes"][-1]
            == "your lessons/l03_formats.py was missing and has been restored")
    mine.write_bytes(b"x = \xff")
    assert (copies.update(folder) == [] and mine.read_bytes()
            == b"x = \xff"), "what is no text keeps no lab from opening"
    copies.reset(folder, "03")
    assert (mine.read_text() == "x = 4\n"
            and mine.with_name(f"l03_formats-{date.today()}-1.py").read_bytes() == b"x = \xff")
    mine.unlink()
    mine.symlink_to(theirs)
    with pytest.raises(ConfigError, match="link"):
        copies.update(folder)
    assert theirs.read_text() == "x = 4\n"


def test_rooms_of_lessons_come_too(folder, course):
    room = course(FIRST).parent / "lessons" / "rows"
    room.mkdir(parents=True)
    (room / "optimizers.py").write_text("x = 1\n")
    assert copies.update(folder) == []
    mine = folder / "lessons" / "rows" / "optimizers.py"
    assert mine.read_text() == "x = 1\n"
    (room / "optimizers.py").write_text("x = 2\n")
    (leftover := mine.with_name(".optimizers.py.abcdefgh.tmp")).touch()
    assert copies.update(folder) == [] and mine.read_text() == "x = 2\n" and not leftover.exists()
    mine.write_text("x = 5\n")
    (room / "optimizers.py").write_text("x = 3\n")
    [change] = copies.update(folder)
    assert change["notebook"] == "lessons/rows/optimizers" and mine.read_text() == "x = 5\n"
    (room / "optimizers.py").rename(room.parent / "optimizers.py")      # to another room
    [change] = copies.update(folder)
    assert change["notes"] == ["the course no longer has it; your copy stays"]
    assert mine.read_text() == "x = 5\n" and (moved := folder / "lessons/optimizers.py").is_file()
    (room.parent / "optimizers.py").unlink()
    assert copies.update(folder) == [] and not moved.exists(), "an unchanged lesson goes"


def test_a_notebook_that_the_course_gave_up_is_reported_once_and_stays(folder, course):
    edit(folder, put("a", "x = 7"))
    course({"t": "# Another", "z": "end"}, "04_other.ipynb").with_name(NAME).unlink()
    changes = copies.update(folder)
    assert changes == [
        {"notebook": "04_other", "done": "copied", "notes": []},
        {"notebook": "03_formats", "done": "left",
         "notes": ["the course no longer has it; your copy stays"]}]
    assert "x = 7" in sources(folder) and copies.update(folder) == []


# ---- a lesson that its learner broke

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
BROKEN = {
    "SyntaxError": ("x = 1\ndef f(:\n", 2, "SyntaxError: invalid syntax"),
    "at import": ("def f():\n    return 1 / 0\n\n\nx = f()\n", 2,
                  "ZeroDivisionError: division by zero"),
    "a module": ("\nimport nothing_of_the_kind\n", 2,
                 "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
    "in what it calls": ("import json\n\njson.loads('{')\n", 3,
                         "JSONDecodeError: Expecting property name"),
    "bytes": (b"x = '\xff'\n", 1, "SyntaxError: ")}


@pytest.fixture
def lessons(tmp_path):
    """`say(code)`: the last line of what Python says of `code` beside a copy of the lessons."""
    shutil.copytree(NOTEBOOKS / "lessons", tmp_path / "lessons")

    def say(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                              text=True,
                              env=os.environ | {"PYTHONPATH": os.pathsep.join([processors.AT_START,
                                  str(NOTEBOOKS.parent)])})
        return (done.stdout + done.stderr).strip().splitlines()[-1]

    return say


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_lesson_is_told_with_its_line_and_the_way_back(what, lessons, tmp_path):
    text, line, why = BROKEN[what]
    (tmp_path / "lessons" / "l03_number_formats.py").write_bytes(text if isinstance(text, bytes)
        else text.encode())
    ways = ["from lessons.judging.index import lesson; lesson('03.value_of')",
            "from lessons.l03_number_formats import EXERCISES",
            "from lessons import l03_number_formats as lesson"]
    for code in ways if what == "SyntaxError" else ways[:1]:
        message = lessons(code)
        assert message.startswith(
            f"lpkit.errors.ConfigError: your copy of lessons/l03_number_formats.py fails in line "
            f"{line} ({why}"), message
        assert message.endswith("; `lpkit lab --reset 03` restores the course's file and keeps "
                                "your copy next to it")


def test_what_no_reset_would_mend_is_told_as_it_is(lessons, tmp_path):
    """A package that is missing, a lesson of one's own; and what several lessons share comes back
    another way."""
    assert lessons(
        "import sys; sys.modules['torch'] = None; import lessons.l03_number_formats").startswith(
            "ModuleNotFoundError: import of torch")
    (tmp_path / "lessons" / "mine.py").write_text("1 / 0")
    assert lessons("import lessons.mine") == "ZeroDivisionError: division by zero"
    (tmp_path / "lessons" / "draws.py").write_text("1 / 0")
    assert lessons("import lessons.draws").endswith(
        "rename it, then `lpkit lab --update` restores the course's file")


def test_a_lesson_that_broke_meanwhile_makes_no_answer_wrong(lessons, tmp_path, monkeypatch):
    """The judge imports it anew."""
    (tmp_path / "lessons" / "l03_number_formats.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    verdict = asked("03.value_of", 60, env={"OF_THIS_TEST": "1"}, parcel={})
    assert (verdict["status"] == "to do"
            and "fails in line 1 (ZeroDivisionError: division by zero); `lpkit lab --reset 03`"
            in verdict["detail"])
