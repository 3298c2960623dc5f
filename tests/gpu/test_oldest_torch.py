"""Only these tests catch a call of PyTorch whose arguments the oldest supported PyTorch does not
have; `torch_2_11.json` holds the parameters of that version.

Where PyTorch 2.11 is installed, `python -m tests.gpu.test_oldest_torch` prints the parameters of
every function and class with a signature that lpkit names.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import torch

ROOT = Path(__file__).parents[2]
OLDEST = json.loads((ROOT / "tests" / "torch_2_11.json").read_text())
HERE = torch.__version__.startswith("2.11.")


def names_of(tree: ast.AST) -> dict[str, str]:
    """What a module calls each part of PyTorch that it imports."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "torch": alias.name if alias.asname else "torch"
                      for alias in node.names if alias.name.split(".")[0] == "torch"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}"
                      for alias in node.names}
    return names


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    tree = ast.parse(source)
    names = names_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            head, *rest = ast.unparse(node.func).split(".")
            if head in names and all(map(str.isidentifier, rest)):
                yield ".".join([names[head], *rest]), node


def parameters(name: str) -> str | None:
    """As they stand in a def, every default 0; None: it has no signature."""
    try:
        signature = inspect.signature(resolve_name(name))
    except (ValueError, TypeError, ImportError, AttributeError):
        return None
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty, default=empty if parameter.default is empty else 0)
            for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


def why_not(name: str, call: ast.Call) -> str:
    """What PyTorch 2.11 does not take of this call; what is starred is told at run time."""
    signature = inspect.signature(eval(f"lambda {OLDEST[name]}: 0"))
    places = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    named = {keyword.arg: 0 for keyword in call.keywords if keyword.arg}
    try:
        signature.bind_partial(*places, **named)
    except TypeError as error:
        return str(error)
    return ""


def sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text()
            for path in sorted((ROOT / "lpkit").rglob("*.py"))}


def test_every_call_binds_to_the_oldest_signature():
    bound = [(f"{path}:{call.lineno}", name, why_not(name, call))
             for path, source in sources().items() for name, call in calls(source)
             if name in OLDEST]
    assert len(bound) > 200
    assert [call for call in bound if call[2]] == []


def test_the_table_is_of_the_oldest_that_can_be_installed():
    """Where it is installed, word for word."""
    assert '"torch>=2.11"' in (ROOT / "pyproject.toml").read_text()
    for name, held in OLDEST.items():
        here = parameters(name)
        assert here == held if HERE else here is not None, name


if __name__ == "__main__":
    called = sorted({name for source in sources().values() for name, _ in calls(source)})
    print(json.dumps({name: held for name in called if (held := parameters(name)) is not None},
                     indent=1))
