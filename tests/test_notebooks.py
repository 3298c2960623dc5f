"""What every notebook must look like. (That they run is `make test`: nbval over copies at the smoke size.)"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from papermill.inspection import inspect_notebook

from lpkit.course import notebooks

BOOKS = sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb"))
HEADINGS = ["Predict", "Run", "Reconcile", "By hand", "Exercise", "Further reading"]
MAX_CELL_LINES, MAX_LINES_BY_HAND = 15, 25
MAX_BYTES = 100_000


@pytest.fixture(params=BOOKS, ids=lambda path: path.stem)
def book(request):
    return nbformat.read(request.param, as_version=4)


def code_of(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def text_of_code(book):
    return "\n".join(cell.source for cell in code_of(book))


def text_of(book):
    return "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_small_and_named_in_order(path):
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)
    assert path.stat().st_size < MAX_BYTES


def test_numbers_are_used_once():
    numbers = [path.stem[:2] for path in BOOKS]
    assert len(set(numbers)) == len(numbers)


def test_stripped(book):
    nbformat.validate(book)
    dirty = [cell.source for cell in code_of(book) if cell.execution_count is not None or cell.outputs]
    assert not dirty, "run: nbstripout notebooks/*.ipynb"
    assert set(book.metadata) <= {"kernelspec", "language_info"}, "widget state or a tool's own metadata"
    assert book.metadata.kernelspec.name == "python3"


def test_title_first(book):
    assert book.cells[0].cell_type == "markdown" and book.cells[0].source.startswith("# ")


def test_parameters_first_and_commented(book):
    first = code_of(book)[0]
    assert first.metadata.get("tags") == ["parameters"] and notebooks.tagged(book, "parameters") == [first]
    found = notebooks.parameters(book)
    assert found["tier"].annotation == "Literal['smoke', 'cpu', 'gpu']" and found["tier"].default == "cpu"
    assert all(parameter.comment for parameter in found.values()), "say after each parameter what it is, and its unit"


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_papermill_reads_the_parameters_as_the_kit_does(path):
    """`papermill --help-notebook` splits lines by a pattern, the kit walks the syntax tree."""
    theirs = {name: (ast.unparse(ast.parse(p["inferred_type_name"])), ast.literal_eval(p["default"]), p["help"])
              for name, p in inspect_notebook(path).items()}
    ours = {name: (p.annotation, p.default, p.comment) for name, p in notebooks.parameters(notebooks.read(path)).items()}
    assert theirs == ours and list(theirs) == list(ours)


def test_imports_second(book):
    """One cell of imports right after the parameters; later cells import nothing."""
    second, *rest = code_of(book)[1:]
    assert any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(second.source).body)
    late = [node for cell in rest for node in ast.walk(ast.parse(cell.source))
            if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not late, f"move it to the cell of imports: {ast.unparse(late[0])}"


def test_headings_in_order(book):
    """`## Predict` ... `## Further reading`, each once; an exercise heading may be plural or numbered."""
    found = re.findall(r"^## +(.+?)\s*$", text_of(book), flags=re.MULTILINE)
    known = [next(heading for heading in HEADINGS if title.startswith(heading)) for title in found
             if title.startswith(tuple(HEADINGS))]
    assert list(dict.fromkeys(known)) == HEADINGS, found
    assert known == sorted(known, key=HEADINGS.index), found


def test_thin(book):
    for cell in code_of(book):
        lines = [line for line in cell.source.splitlines() if not line.startswith(("import ", "from "))]
        by_hand = "by-hand" in cell.metadata.get("tags", [])
        most = MAX_LINES_BY_HAND if by_hand else MAX_CELL_LINES
        assert len(lines) <= most, f"{len(lines)} lines; move it to lpkit:\n{cell.source[:200]}"
        defines = [node for node in ast.walk(ast.parse(cell.source))
                   if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
        assert not defines or by_hand or "exercise" in cell.metadata.get("tags", []), f"define it in lpkit: {defines[0].name}"


def test_the_mechanism_is_built_by_hand_and_held_against_the_kit(book):
    cells = [cell for cell in code_of(book) if "by-hand" in cell.metadata.get("tags", [])]
    assert any("assert " in cell.source for cell in cells) and any("torch." in cell.source for cell in cells)
    assert "source(" in text_of_code(book), "the kit's own code, beside it"


def test_claims_are_said_and_asserted(book):
    cells = notebooks.tagged(book, "claim")
    assert cells, "tag the cell whose assert is what this notebook claims"
    for cell in cells:
        assert "with claim(" not in cell.source or "raises-exception" in cell.metadata.tags, "a claim that fails stops Run All"
    assert notebooks.claim(book), "say what is claimed"
    assert len(notebooks.claim(book)) <= 160, "a claim is one line of a table"


def test_exercises_are_stubs_and_checked(book):
    cells = notebooks.tagged(book, "exercise")
    assert cells and any("check(" in cell.source for cell in code_of(book))
    for cell in cells:
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert "raise NotImplementedError" in ast.unparse(node), f"{node.name} gives the answer away"


def test_nothing_of_a_machine_and_no_other_host(book):
    for cell in book.cells:
        assert not re.search(r"(?<![\w.:/])/(home|root|tmp|work|Users|mnt|content)/", cell.source), cell.source
        assert "http://" not in cell.source and not re.search(r"^\s*[!%]", cell.source, re.MULTILINE), cell.source
        if cell.cell_type == "markdown":
            assert not re.search(r"!\[|<img|<script|<iframe", cell.source), "pictures are drawn by cells"
            assert not re.search(r"\$[^$\n]+\$", cell.source), "write formulas as code: the site ships no MathJax"
    assert "https://" in text_of(book).split("## Further reading")[-1]
