"""Who may import whom: docs/architecture.md says it, and this test holds it, also for imports
inside functions.

Only these tests catch: an import against the layers or in a circle, PyTorch that a command imports
for nothing, a path of a batch that grows, and an example of a docstring that is false.
"""

import ast
import doctest
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from lpkit import cli
from tests.path import circles, entered, imported_by, imports

ROOT = Path(__file__).parents[2] / "lpkit"
# settings, seams, tools: anybody
BASE = {"config", "contracts", "errors", "files", "machine_facts", "names", "plain_yaml",
        "processes", "records", "signals", "tables", "timing", "turns", "values"}
MAY_IMPORT = {
    "config": {"errors", "plain_yaml", "techniques", "values"}, "contracts": {"config", "errors"},
    "files": {"errors", "machine_facts"}, "errors": {"names"}, "names": set(),
    "plain_yaml": {"errors", "files"}, "values": {"errors", "files"},
    "tables": {"errors"}, "timing": set(), "turns": set(), "machine_facts": set(), "signals": set(),
    "processes": {"errors", "signals"}, "records": {"errors", "files"},
    # rows: settings and facts, no implementation
    "techniques": {"config", "errors", "files", "values"},
    "predict": {"config", "errors", "files", "presets", "records", "tables", "techniques",
                "values"},
    "kernels": BASE | {"techniques"},
    "precision": BASE | {"techniques", "kernels"},
    # a model does not know that it is quantised or sharded
    "nn": BASE | {"techniques", "kernels"},
    "optim": BASE | {"techniques", "kernels"},
    "memory": BASE | {"techniques", "kernels", "nn", "optim", "precision"},
    "functions": BASE | {"techniques", "kernels", "nn", "memory", "precision"},
    "datasets": BASE | {"techniques", "predict"},
    "hardware": BASE | {"techniques", "predict"},
    "presets": BASE,
    "execution": BASE | {"hardware", "kernels", "nn", "parallel", "techniques"},
    "exchange": BASE | {"datasets", "nn", "techniques", "training"},
    "training": BASE | {"datasets", "execution", "hardware", "kernels", "memory", "nn", "optim",
                        "parallel", "precision", "predict", "techniques"},
    "measure": BASE | {"execution", "hardware", "kernels", "memory", "nn", "optim", "parallel",
                       "precision", "predict", "techniques", "training"},
    "modules": BASE | {"exchange", "execution", "hardware", "kernels", "measure", "memory", "optim",
                       "parallel", "precision", "predict", "techniques", "training"},
    "claims": BASE | {"datasets", "predict", "presets", "techniques", "training"},
    "parallel": BASE | {"kernels", "precision", "techniques"},
    "beside": {"errors", "files"},
    "cli": BASE | {"beside", "commands", "training"},
    "__main__": {"cli"},
}
EVERYTHING = {"commands"}          # nobody imports it but the command line
WITHOUT_TORCH = ["config", "contracts", "errors", "files", "machine_facts", "names", "plain_yaml",
                 "processes", "records", "signals", "tables", "timing", "turns", "values",
                 "techniques", "predict", "presets", "training.runs", "exchange.families",
                 "beside", "cli",
                 "parallel.processes", "training.launch", "claims.protocol", "claims.settle",
                 "claims.runs", "measure.probes", "commands.doctor"]
# From what anybody stands on to what nobody does: a room imports itself and those before it.
LAYERS = ["names", "errors", "turns", "signals", "machine_facts", "timing", "processes", "files",
          "plain_yaml", "records", "values", "tables", "techniques", "config",
          "contracts", "presets", "predict", "kernels", "hardware", "precision", "nn", "optim",
          "memory", "functions", "datasets", "parallel", "execution", "training", "exchange",
          "measure", "modules", "claims",
          "beside", "commands", "cli", "__main__"]
PATH_TOKENS = 73_200
UPDATE_FUNCTIONS, UPDATE_FILES = 109, 25        # 90 and 18
FILES = [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


@cache
def imported(path: Path) -> set[str]:
    """Every module named, also inside functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    for n in nodes:
        if isinstance(n, ast.ImportFrom) and n.module:
            names |= ({f"lpkit.{alias.name}" for alias in n.names} if n.module == "lpkit"
                      else {n.module})
    return names


THERE = {path.name.removesuffix(".py") for path in ROOT.iterdir()}


def rooms(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.startswith("lpkit.")} & THERE


def test_imports_stay_in_their_rooms():
    wrong = {}
    for path in FILES:
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room not in EVERYTHING and (more := rooms(path) - {room} - MAY_IMPORT[room]):
            wrong[str(path.relative_to(ROOT))] = more
    assert not wrong


def test_no_circle_of_imports():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["a", "b"], ["b", "c"], ["c", "b"]]
    assert not circles(imports(lazy=True))


def test_no_arrow_back_up():
    place = {room: i for i, room in enumerate(LAYERS)}
    assert not [(name, other) for name, theirs in imports(lazy=True).items() for other in theirs
                if "." in name and "." in other
                and place[other.split(".")[1]] > place[name.split(".")[1]]]


def test_the_path_of_a_batch_grows_no_longer():
    """`python -m tests.path` prints it. Whoever shortens it lowers the bound."""
    assert sum(imported_by("lpkit.training.loop").values()) <= PATH_TOKENS
    seen = entered()
    assert seen.total() <= UPDATE_FUNCTIONS and len(seen) <= UPDATE_FILES


def test_lessons_stand_on_the_package_and_it_on_none_of_them():
    """A learner may break one; whoever needs one of an exercise looks for it beside the
    notebook."""
    assert not [path for path in FILES for name in imported(path)
                if name.split(".")[0] == "lessons"]
    for path in (ROOT.parent / "notebooks" / "lessons").rglob("*.py"):
        outside = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names
        assert outside <= {"lessons", "lpkit", "nbformat", "torch", "triton", "anywidget",
                           "ipywidgets", "numpy", "psutil", "safetensors",
                          "traitlets", "IPython", "PIL", "matplotlib"}, (path.name, outside)


def test_two_doors_lead_to_hosting():
    """`lpkit.cli` imports the file of a hosted command, and `lpkit.begin` the check of a notebook's
    parameters. A lesson imports nothing of hosting."""
    place = ROOT.parent / "notebooks"
    lessons = sorted((place / "lessons").rglob("*.py"))
    assert not [path for path in (*FILES, *lessons) for name in imported(path)
                if name.split(".")[0] == "hosting"]
    doors = {(path.stem, node.value) for path in FILES
             for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and str(node.value).startswith("hosting.")}
    assert doors == {("cli", "hosting.commands."), ("beside", "hosting.parameters")}
    commands = {path.stem for path in (place / "hosting" / "commands").glob("*.py")}
    assert commands == {"__init__", *cli.HOSTED} and cli.HOSTED <= cli.COMMANDS.keys()
    for path in (place / "hosting").rglob("*.py"):
        outside = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names
        assert (outside <= {"hosting", "lessons", "lpkit", "IPython", "jupyter_client",
                            "jupyter_server", "jupyterhub", "nbclient", "nbconvert", "nbformat",
                            "psutil", "tornado", "traitlets"}), (path.name, outside)


@pytest.mark.parametrize("room", ["techniques", "predict"])
def test_rows_and_predictions_need_the_standard_library_alone(room):
    outside = {name.split(".")[0] for path in (ROOT / room).rglob("*.py")
               for name in imported(path)} - {"lpkit"}
    assert outside <= sys.stdlib_module_names, outside - sys.stdlib_module_names


def test_importing_does_not_import_torch():
    code = (f"import sys, lpkit.cli; [__import__('lpkit.' + room) for room in {WITHOUT_TORCH}]; "
            f"[lpkit.cli.module_of(name) for name in {sorted(cli.HOSTED)}]; "
            f"import hosting.desk, hosting.parameters; print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True,
                          text=True, check=True)
    assert done.stdout == "False\n"


# those that import no torch
@pytest.mark.parametrize("name", ["Config", "Run", "begin", "launch", "preset", "train"])
def test_any_name_of_the_package_may_be_the_first(name):
    """A circle of imports shows where nothing has been imported before."""
    subprocess.run([sys.executable, "-c", f"import lpkit; lpkit.{name}"], check=True)


def test_techniques_are_rows_and_not_branches():
    """No `if name == "..."`: a name is looked up in a table."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
                left = ast.unparse(node.left)
                assert not (left.endswith(("recipe", "optimizer", "source.name"))
                            and isinstance(node.comparators[0], ast.Constant)), \
                    f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", [p for p in FILES if ">>> " in p.read_text()],
                         ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_in_docstrings_hold(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    results = doctest.testmod(module)
    assert results.attempted and not results.failed
