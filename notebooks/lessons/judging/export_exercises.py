"""Export the exercises of a notebook for nbgrader and otter-grader.

    python -m lessons.judging.export_exercises 03 --out grading

Run this command in the folder that contains `lessons/`. It writes `nbgrader/source/03/03.ipynb` and
`otter/03.ipynb` into `grading`. The tests in these notebooks call the kit's judge on the learner's
function and fail with the judge's message. The points of an exercise are its stars. lpkit and
`lessons` must be importable where answers are graded.
Formats: nbgrader's cell metadata, schema 3 (nbgrader 0.9, nbgraderformat/v3.py); otter-assign's raw
cells (otter-grader 7, otter/assign).
"""

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_raw_cell

from lessons.judging import index
from lessons.judging.judge import Exercise
from lessons.judging.puzzles import Puzzle
from lpkit.errors import ConfigError, pick
from lpkit.files import own_folder, resource, write_atomically

CHECK = re.compile(r"\n*^check\(EXERCISES\[\"(?P<name>[\w.]+)\"\], (?P<function>\w+)\)\s*$", re.M)
TODO = "raise NotImplementedError"


def graded(name: str, attempt: Callable[..., Any]) -> None:
    """Raise AssertionError with the judge's sentence unless the attempt is right. Nothing is
    written to the learner's file."""
    verdict = index.exercise(name).judged(attempt)
    if verdict.status != "right":
        raise AssertionError(str(verdict))


@dataclass(frozen=True)
class Asked:
    """An exercise as its notebook asks it."""

    exercise: Exercise
    prose: str              # the text of the markdown cell above the stub
    stub: str               # the source of the cell that the learner fills
    function: str           # the name of the function in the stub

    @property
    def test(self) -> str:
        return f'graded("{self.exercise.name}", {self.function})'

    @property
    def id(self) -> str:
        return self.exercise.name.replace(".", "_")

    def solved(self, begin: str, end: str, after: str = "") -> str:
        """Return the stub with a right body between the lines `begin` and `end`. Both graders cut
        this body out of the learners' notebook; `after` is put behind it."""
        indent = re.search(rf"^( *){TODO}", self.stub, re.M)
        if not indent:
            raise ConfigError(f"the stub of exercise {self.exercise.name} has no `{TODO}`")
        body = "\n".join(filter(None, (begin, self._body(), end, after)))
        return self.stub.replace(indent[0], textwrap.indent(body, indent[1]))

    def _body(self) -> str:
        """Return a right body: a kernel's own body, or else a call of the exercise's definition,
        whose imports the notebook may lack."""
        if isinstance(self.exercise, Puzzle):
            lines = self.exercise.solution.splitlines()
            first = ast.parse(self.exercise.solution).body[0].body[0].lineno - 1
            return textwrap.dedent("\n".join(lines[first:]))
        node = next(statement for statement in ast.parse(self.stub).body
                    if isinstance(statement, ast.FunctionDef) and statement.name == self.function)
        names = ", ".join(argument.arg for argument in node.args.args)
        return (f"from lessons.judging.index import exercise\n"
                f"return exercise(\"{self.exercise.name}\").spec({names})")


def asked(book: Any) -> Iterator[Asked]:
    """Yield the exercises of a notebook, each with the text above it."""
    prose = ""
    for cell in book.cells:
        if cell.cell_type == "markdown":
            prose = cell.source
        elif "exercise" in cell.metadata.get("tags", ()):
            match = CHECK.search(cell.source)
            if match:
                stub = CHECK.sub("", cell.source).rstrip()
                yield Asked(index.exercise(match["name"]), prose, stub, match["function"])
                prose = ""


def imports(book: Any) -> str:
    """Return the notebook's imports, which stubs and tests need."""
    kept = [ast.unparse(statement) for cell in book.cells if cell.cell_type == "code"
            and cell.metadata.get("jupyter", {}).get("source_hidden")
            for statement in ast.parse(cell.source).body
            if isinstance(statement, ast.Import | ast.ImportFrom)]
    return "\n".join([*kept, "from lessons.judging.export_exercises import graded"])


def _marked(source: str, id: str, **flags: Any) -> Any:
    """Return a code cell with nbgrader's metadata; `flags` are set, all other flags are False."""
    marks = {"grade": False, "solution": False, "locked": False, "task": False, **flags}
    return new_code_cell(source, metadata={"nbgrader": {
        "schema_version": 3, "grade_id": id, "cell_type": "code", **marks}})


def nbgrader(book: Any, name: str) -> Any:
    """Return nbgrader's source notebook, from which `nbgrader generate_assignment` makes the
    learners' notebook."""
    cells = [_marked(imports(book), "imports", locked=True)]
    for item in asked(book):
        source = item.solved("### BEGIN SOLUTION", "### END SOLUTION")
        cells += [new_markdown_cell(item.prose),
                  _marked(source, f"answer_{item.id}", solution=True),
                  _marked(item.test, f"test_{item.id}", grade=True, locked=True,
                          points=item.exercise.stars)]
    return _notebook(cells)


def otter(book: Any, name: str) -> Any:
    """Return otter's source notebook, from which `otter assign` makes the learners' notebook and
    the autograder's notebook."""
    config = f"# ASSIGNMENT CONFIG\nname: lpkit_{name}\nexport_cell: false\ncheck_all_cell: false"
    cells = [new_raw_cell(config), new_code_cell(imports(book))]
    for item in asked(book):
        source = item.solved("# BEGIN SOLUTION", "# END SOLUTION",
                            f'""" # BEGIN PROMPT\n{TODO}\n"""; # END PROMPT')
        cells += [new_raw_cell(f"# BEGIN QUESTION\nname: q{item.id}\n"
                               f"points: {item.exercise.stars}"),
                  new_markdown_cell(item.prose), new_raw_cell("# BEGIN SOLUTION"),
                  new_code_cell(source), new_raw_cell("# END SOLUTION"),
                  new_raw_cell("# BEGIN TESTS"), new_code_cell(item.test),
                  new_raw_cell("# END TESTS"), new_raw_cell("# END QUESTION")]
    return _notebook(cells)


def _notebook(cells: list[Any]) -> Any:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"      # not random: equal courses give equal files
    book = new_notebook(cells=cells, metadata={"kernelspec": kernel,
                                               "language_info": {"name": "python"}})
    nbformat.validate(book)
    return book


def export(name: str, out: Path) -> list[Path]:
    """Write both notebooks of `name` into the folder `out` and return their paths. Raises
    ConfigError for an unknown notebook or a notebook without exercises."""
    course = {key: path for path in sorted(resource("notebooks").glob("*.ipynb"))
              for key in (path.stem, path.stem.partition("_")[0])}
    path = pick(course, name, "notebook")
    book, number = nbformat.read(path, as_version=4), path.stem.partition("_")[0]
    if not any(asked(book)):
        raise ConfigError(f"{path.stem} has no exercises to export")
    books = {out / "nbgrader" / "source" / number / f"{number}.ipynb": nbgrader(book, number),
             out / "otter" / f"{number}.ipynb": otter(book, number)}
    for file, exported in books.items():
        own_folder(file.parent)
        write_atomically(file, nbformat.writes(exported) + "\n")
    return list(books)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lessons.judging.export_exercises",
                                     description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", help="03, or 03_number_formats")
    parser.add_argument("--out", type=Path, default=Path("grading"), help="a folder")
    args = parser.parse_args(argv)
    try:
        print("\n".join(map(str, export(args.notebook, args.out))))
    except (ConfigError, OSError) as error:
        print(f"export_exercises: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
