"""A learner's copies of the course. An update adds the course's changes to the copies, and keeps
everything that the learner has written.

A work folder contains the notebooks, and in PRISTINE the course's version of each notebook at the
last update. An update compares cells by their ids:

    a cell that the learner changed       keeps the learner's text
    other cells                           get the course's text
    a lesson (the module of a notebook)   is kept as a whole if the learner changed it
    pictures                              are always the course's
    other files                           are not touched

Files are written atomically, by one process at a time.
"""

import copy
import shutil
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hosting.notebooks import MOST_BYTES, by_name, parse, tagged
from lessons import way_back
from lpkit import files
from lpkit.errors import ConfigError, named, shown

if TYPE_CHECKING:
    from nbformat import NotebookNode

PRISTINE = ".pristine"
LESSONS, PICTURES = "lessons", "pictures"       # folders next to the notebooks
BESIDE = "-beside"      # suffix of the id of the course's cell next to the learner's changed cell


def work_folder(asked: Path | None = None) -> Path:
    """Return the work folder: `asked`, or `course` in the user's data directory. A missing folder
    is made. Raises ConfigError for a link, for the folder of the course itself, and for a folder
    with other contents. Raises OSError if the folder cannot be made."""
    folder = (files.own_folder(asked) if asked else
              files.own_folder(files.data_dir("course"), 0o700)).resolve()
    if files.resource("notebooks").resolve() in (folder, *folder.parents):
        raise ConfigError(f"{named(folder)} is the course itself, which must not change; choose "
                          f"another folder for your copies")
    if asked and any(folder.iterdir()) and not (folder / PRISTINE).is_dir():
        raise ConfigError(f"{named(folder)} is not empty and has no copies of the course; choose a "
                          f"new folder or an empty folder")
    files.own_folder(folder / PRISTINE)
    return folder


def update(folder: Path) -> list[dict[str, Any]]:
    """Update all notebooks, lessons and pictures in `folder`. Returns the changes: `notebook`,
    `done` (copied, updated, left) and `notes` (sentences). Raises ConfigError, OSError."""
    with _alone(folder):
        for path in (files.resource("notebooks") / PICTURES).glob("*.*"):
            here = files.own_folder(folder / PICTURES) / path.name
            if not _is_there(here) or here.read_bytes() != path.read_bytes():
                _copy(path, here)
        changes = [_update(path, folder) for path in _course()]
        changes += [*map(partial(_lesson, folder), _lessons()), *_given_up(folder)]
        return [change for change in changes if change]


def reset(folder: Path, name: str) -> dict[str, Any]:
    """Replace the copies of a notebook and of its lesson by the course's versions, and return the
    change. `name`: such as 03_number_formats, 03 or number_formats. Answers to exercises are kept.
    The old files stay in the folder under other names; the change's `backup` is the old notebook's
    name."""
    path = by_name(_course(), Path(name).stem)
    with _alone(folder):
        reset_notes = [note for lesson in _lessons() if lesson.name == f"l{path.stem}.py"
                for note in _reset_lesson(folder, lesson)]
        change = _reset(folder, path)
    change["notes"] += reset_notes
    return change | {"done": "reset"} if reset_notes and change["done"] == "unchanged" else change


def _reset(folder: Path, path: Path) -> dict[str, Any]:
    mine, new, notes = folder / path.name, parse(text := path.read_text(), path.name), []
    if not _is_there(mine):
        return _bring(folder, path, text, text, "copied")
    try:
        answers = {cell.id: cell.source for cell in _read(mine).cells}
    except ConfigError as error:
        answers, notes = {}, [f"{error}; your answers could not be kept"]
    for cell in tagged(new, "exercise"):
        cell.source = answers.get(cell.id, cell.source)
    if answers and _written(new) == mine.read_text():
        return _change(path, "unchanged", ["your copy equals the course's notebook"])
    backup = str(_beside_today(mine))
    return _bring(folder, path, text, _written(new), "reset", notes) | {"backup": backup}


def merged(course: "NotebookNode", mine: "NotebookNode",
           was: "NotebookNode | None") -> tuple["NotebookNode", list[str]]:
    """Return the learner's notebook `mine` with the course's changes from `was` (the version of the
    last update) to `course`, and a sentence for each cell that the learner and the course both
    changed. Cells that the learner deleted stay deleted. A cell that the learner added stays after
    the same cell."""
    before = {cell.id: _content(cell) for cell in was.cells} if was else {}
    now, last = {cell.id: _content(cell) for cell in course.cells}, None
    # the learner's cells: those of the course by id, and own cells by the course's cell above them
    theirs: dict[str, NotebookNode] = {}
    own: dict[str | None, list[NotebookNode]] = defaultdict(list)
    for cell in mine.cells:
        id = cell.id.removesuffix(BESIDE)
        if cell.id in now and cell.id not in theirs:
            theirs[last := cell.id] = cell
        elif _content(cell) == now.get(id) or _content(cell) != before.get(id):
            own[last].append(cell)      # other cells were removed from the course
    cells, notes = own[None], []
    for new in course.cells:
        here, then = theirs.get(new.id), before.get(new.id)
        if here is None:
            cells += [new] if then is None else []
        elif _content(new) in (then, _content(here)):
            cells.append(_kept(here, new))
        elif _content(here) == then:
            cells.append(new)
        else:
            both, clause = _both(here, new)
            cells += both
            first = next(iter(new.source.splitlines()), "")
            notes.append(f"you and the course both changed {shown(first)}: {clause}")
        cells += own[new.id]
    seen: set[str] = set()
    for cell in cells:
        cell.id = uuid.uuid4().hex[:8] if cell.id in seen else cell.id
        seen.add(cell.id)
    mine.cells = cells
    mine.nbformat, mine.nbformat_minor = course.nbformat, course.nbformat_minor
    return mine, notes


def _both(here: "NotebookNode", new: "NotebookNode") -> tuple[list["NotebookNode"], str]:
    """Return the learner's cell `here` and the course's cell `new` in the order in which they
    should run, and the end of a sentence that says so. The learner's cell keeps the id and the
    tags."""
    tags = new.metadata.get("tags", [])
    if "exercise" in tags:
        return [_kept(here, new)], "your answer stays; the task may read differently now"
    if "parameters" in tags:        # the second cell sets the values
        return [_beside(new), _kept(here, new)], "your cell stays, and the new cell is before it"
    return [_kept(here, new), _beside(new)], "your cell stays, and the new cell is after it"


def _beside(cell: "NotebookNode") -> "NotebookNode":
    """Return a copy of the course's cell with another id and without tags, so that it stands next
    to the learner's cell and does not count as an exercise or a claim."""
    other = copy.deepcopy(cell)
    other.id += BESIDE
    other.metadata.pop("tags", None)
    return other


def _kept(here: "NotebookNode", new: "NotebookNode") -> "NotebookNode":
    """Return the learner's cell, with its outputs, and with the course's metadata and tags."""
    here.metadata.pop("tags", None)
    here.metadata.update(new.metadata)
    return here


def _content(cell: "NotebookNode") -> tuple[str, str]:
    return cell.cell_type, cell.source


def _course() -> list[Path]:
    if paths := sorted((ours := files.resource("notebooks")).glob("*.ipynb")):
        return paths
    raise ConfigError(f"there is no notebook in {named(ours)}; install lpkit again")


def _lessons() -> list[Path]:
    return sorted((files.resource("notebooks") / LESSONS).rglob("*.py"))


def _copy_of(lesson: Path, folder: Path) -> Path:
    """Return the path of a lesson's copy in `folder`, and make its parent folders."""
    place = lesson.relative_to(files.resource("notebooks"))
    for parent in (LESSONS, place.parent):
        files.own_folder(folder / parent)
    return folder / place


def _given_up(folder: Path) -> list[dict[str, Any]]:
    """Handle the copies of notebooks and lessons that the course no longer has. Copies of notebooks
    and of lessons that the learner changed are kept; copies of unchanged lessons are removed.
    Returns a change for each kept copy, once."""
    ours, pristine, gone = files.resource("notebooks"), folder / PRISTINE, []
    for was in sorted((*pristine.glob("*.ipynb"), *(pristine / LESSONS).rglob("*.py"))):
        place = was.relative_to(pristine)
        if (ours / place).is_file():
            continue
        mine, text = folder / place, was.read_bytes()
        was.unlink()
        if was.suffix == ".py" and mine.is_file() and mine.read_bytes() == text:
            mine.unlink()
        elif mine.is_file():
            gone.append({"notebook": str(place.with_suffix("")), "done": "left", "notes": [
                "the course no longer has it; your copy stays"]})
    return gone


def _lesson(folder: Path, path: Path) -> dict[str, Any] | None:
    """Update the copy of a lesson in `folder`. Returns a change if the learner and the course both
    changed the lesson, else None."""
    # `text`: the course's lesson; `before`: that of the last update; `mine`: the learner's copy
    text, here, was = path.read_text(), _copy_of(path, folder), _copy_of(path, folder / PRISTINE)
    before, there = was.read_text() if was.exists() else None, _is_there(here)
    mine = here.read_text("utf-8", "replace") if there else None    # not UTF-8: the learner's
    if there and mine not in (before, text):
        if text == before:
            return None
        files.write_atomically(was, text)       # so that it is reported once
        return {"notebook": str(here.relative_to(folder).with_suffix("")), "done": "updated",
                "notes": [f"you and the course both changed it: your copy stays; "
                          f"{way_back(path)}"]}
    for place, old in ((here, mine), (was, before)):
        if old != text:
            files.write_atomically(place, text)
    return None


def _reset_lesson(folder: Path, path: Path) -> list[str]:
    """Replace the copy of a lesson by the course's lesson. Returns a sentence that says where the
    learner's version is now, or that the copy was missing; nothing if the copy is unchanged."""
    here, clause = _copy_of(path, folder), "was missing and has been restored"
    if _is_there(here):
        if here.read_bytes() == path.read_bytes():
            return []
        clause = f"is now {_beside_today(here).name}"
    files.write_atomically(here, path.read_text())
    return [f"your {LESSONS}/{here.name} {clause}"]


def _beside_today(mine: Path) -> Path:
    """Copy the learner's file to a name with today's date. Returns the path."""
    return _copy(mine, files.free(mine.with_stem(f"{mine.stem}-{date.today()}")))


def _copy(path: Path, to: Path) -> Path:
    with files.whole_file(to) as temporary:
        shutil.copyfile(path, temporary)
    return to


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of the work folder within the block, since two labs may start at once. Removes
    temporary files that a killed process left."""
    pristine = files.own_folder(folder / PRISTINE)
    files.refuse_links(pristine)
    with files.locked(pristine / ".lock"):
        lessons = {place / path.parent.relative_to(files.resource("notebooks"))
                   for path in _lessons() for place in (pristine, folder)}
        for place in (pristine, folder / PICTURES, *lessons):
            files.sweep(place)
        for path in _course():
            files.sweep(folder, f".{path.name}.????????.tmp")
        yield


def _update(path: Path, folder: Path) -> dict[str, Any] | None:
    text, mine, was = path.read_text(), folder / path.name, folder / PRISTINE / path.name
    if not _is_there(mine):
        return _bring(folder, path, text, text, "copied")
    before = was.read_text() if was.exists() else None
    if before == text:
        return None
    try:
        book = _read(mine)
    except ConfigError as error:
        return _change(path, "left", [f"{error}; `lpkit lab --reset {path.stem}` replaces your "
                                      f"copy by the course's and keeps it under another name"])
    new, before = parse(text, path.name), parse(before, was.name) if before else None
    if not {cell.id for cell in book.cells} & {cell.id for cell in new.cells}:
        return _change(path, "left", ["it has no cell of the course's notebook; rename your file "
                                      "to get the course's notebook"])
    book, notes = merged(new, book, before)
    return _bring(folder, path, text, _written(book), "updated", notes)


def _bring(folder: Path, path: Path, text: str, mine: str, done: str,
           notes: Sequence[str] = ()) -> dict[str, Any]:
    """Write the copy `mine`, then the course's version `text` into PRISTINE, and return the change.
    If the process is killed between the two writes, the copy counts as changed by the learner, so
    nothing is lost."""
    files.write_atomically(folder / path.name, mine)
    files.write_atomically(folder / PRISTINE / path.name, text)
    return _change(path, done, notes)


def _change(path: Path, done: str, notes: Sequence[str]) -> dict[str, Any]:
    return {"notebook": path.stem, "done": done, "notes": list(notes)}


def _is_there(path: Path) -> bool:
    """Return True if the file exists. Raises ConfigError for a link, a folder or a device."""
    with suppress(FileNotFoundError), files.open_own(path, "rb"):
        return True
    return False


def _read(path: Path) -> "NotebookNode":
    # for a repeated id, nbformat warns, and gives the second cell a new id
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        book = parse(files.read_text(path, MOST_BYTES), path.name)
    if all(cell.keys() >= {"id", "cell_type", "source", "metadata"} for cell in book.cells):
        return book
    raise ConfigError(f"{named(path.name)} has cells without an id; an older tool wrote it")


def _written(book: "NotebookNode") -> str:
    import nbformat

    return nbformat.writes(book) + "\n"
