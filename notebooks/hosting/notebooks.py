"""Find and read notebooks of the course, and others. Executes nothing in a notebook."""

import ast
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lpkit.errors import ConfigError, named, pick, shown
from lpkit.files import read_text, resource

if TYPE_CHECKING:
    from nbformat import NotebookNode

MOST_BYTES = 1 << 28        # most bytes of a notebook


def course() -> list[Path]:
    """Return the paths of the course's notebooks, in order: in `notebooks/` of the current folder
    if it exists, else the project's. Raises ConfigError if there is neither folder."""
    for place in (Path.cwd() / "notebooks", resource("notebooks")):
        if place.is_dir():
            return sorted(place.glob("*.ipynb"))
    raise ConfigError("there is no notebooks/ folder here; run this in the repository, or give the "
                      "path of a notebook")


def find(name: str) -> Path:
    """Return the path of a notebook. `name`: such as 00_start_here, 00, start_here, or a path.
    Raises ConfigError for an unknown name, with the nearest name."""
    if name.endswith(".ipynb") or os.sep in name:
        if not Path(name).is_file():
            raise ConfigError(f"there is no notebook {shown(name)}; `lpkit notebook --list` shows "
                              f"the course")
        return Path(name).resolve()
    return by_name(course(), name)


def by_name(paths: Iterable[Path], name: str) -> Path:
    """Return the path with the stem `name`, with the number `name`, or with the stem NUMBER_`name`.
    Raises ConfigError for an unknown name; for an unknown number, the error lists the numbers."""
    known: dict[str, Path] = {}
    for path in paths:
        number, _, rest = path.stem.partition("_")
        known |= {path.stem: path, number: path, rest or number: path}
    if name.isdecimal():
        known = {number: path for number, path in known.items() if number.isdecimal()}
    return pick(known, name, "notebook")


def read(path: Path) -> "NotebookNode":
    book = parse(read_text(path, MOST_BYTES), path.name)
    kernel = book.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        raise ConfigError(f"{path.name} needs the kernel {kernel!r}; lpkit starts only python3")
    return book


def parse(text: str, name: str) -> "NotebookNode":
    """Return the notebook that a text contains. Raises ConfigError, which names the file `name`, if
    the text is not a notebook."""
    # jsonschema imports this optional package, which takes longer than everything else: disable it
    sys.modules.setdefault("rfc3987_syntax", None)
    import nbformat

    try:
        return nbformat.reads(text, as_version=4)
    # for other JSON, nbformat raises various errors
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError,
            nbformat.ValidationError) as error:
        why = named(str(error).partition("\n")[0])
        raise ConfigError(f"{named(name)} is not a notebook: {why}") from None


def tagged(book: "NotebookNode", tag: str) -> list["NotebookNode"]:
    """Return the code cells with a tag."""
    return [cell for cell in book.cells if cell.cell_type == "code"
            and tag in cell.metadata.get("tags", [])]


def claim(book: "NotebookNode") -> str:
    """Return the claims of a notebook, in one line. Raises ConfigError for a cell tagged `claim`
    that does not test its claim: a cell that is not plain Python (`%%script`), or whose
    `with claim(...)` block has no assert at its top level, where it always runs."""
    return "; ".join(_claimed(cell.source) for cell in tagged(book, "claim"))


def _claimed(source: str) -> str:
    try:
        body = ast.parse(source).body
    except SyntaxError:
        body = []
    for node in body:
        match node:
            case ast.With(items=[ast.withitem(context_expr=ast.Call(
                    func=ast.Name(id="claim"), args=[ast.Constant(value=str(sentence))]))]) \
                    if any(isinstance(held, ast.Assert) for held in node.body):
                return sentence
    raise ConfigError(f"the cell tagged `claim` that begins with {source[:40]!r} tests nothing; it "
                      f"must be plain Python with an `assert` directly in a `with claim(...):`")
