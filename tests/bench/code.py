"""Name the code that a record timed, so that a page can mark a record whose code has changed since.

    python -m tests.bench.code data/measured/NAME.json      # add the code at the record's commit

A record of a GPU has `code`: a digest for each module of PACKAGES. A digest covers the syntax tree
without comments, docstrings and the names of local variables, so rewriting a comment or renaming a
local variable does not change it.
"""

import argparse
import ast
import functools
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lpkit.files import PACKAGE

PACKAGES = ("kernels", "optim", "precision")    # of lpkit
DIGITS = 12
# fields that depend on the version of Python, or on nothing that runs
SKIPPED = {"ctx", "kind", "type_comment", "type_params", "lineno", "col_offset"}


@functools.cache
def today() -> Mapping[str, str]:
    """Return the digest of each module, by its name below lpkit: "kernels.amax"."""
    return {f"{package}.{path.stem}": digest(path.read_text(encoding="utf-8"))
            for package in PACKAGES for path in sorted((PACKAGE / package).glob("*.py"))}


def digest(source: str) -> str:
    """Return the digest of a module's source.

    >>> digest("def f(x): return x + 1") == digest("def f(y):  # add\\n    return y + 1")
    True
    >>> digest("def f(x): return x + 1") == digest("def f(x): return x + 2")
    False
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            node.body = node.body[1:]
    for node in [*tree.body, *(part for top in tree.body for part in getattr(top, "body", ()))]:
        if isinstance(node, ast.FunctionDef):
            _number_locals(node)
    return hashlib.sha256(json.dumps(_plain(tree)).encode()).hexdigest()[:DIGITS]


def _number_locals(function: ast.FunctionDef) -> None:
    """Replace the names that a function binds by numbers, in the order in which they appear."""
    bound: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            bound.setdefault(node.arg, f"local {len(bound)}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, f"local {len(bound)}")
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.arg = bound[node.arg]
        elif isinstance(node, ast.Name):
            node.id = bound.get(node.id, node.id)


def _plain(node: Any) -> Any:
    """Return a syntax tree as lists, without fields that are empty or in SKIPPED."""
    if isinstance(node, list):
        return [_plain(child) for child in node]
    if isinstance(node, ast.AST):
        fields = {name: value for name, value in ast.iter_fields(node)
                  if name not in SKIPPED and value not in (None, [])}
        return [type(node).__name__, *([name, _plain(value)] for name, value in fields.items())]
    return repr(node)


def changed(record: Mapping[str, Any], module: str = "") -> list[str] | None:
    """Return the modules that changed since a record, or are gone; None if the record does not name
    its code. `module` ("kernels.norm"): compare only the modules that `compiled_from` returns."""
    if "code" not in record:
        return None
    now = today()
    names = compiled_from(module) if module else record["code"]
    return [name for name in names if record["code"].get(name) != now.get(name)]


@functools.cache
def compiled_from(module: str) -> tuple[str, ...]:
    """Return a kernel's module and those that it imports, directly or through others, and that have
    Triton functions."""
    names, known = [module], {module}
    while names:
        for name in _imports(names.pop()):
            if name not in known:
                known.add(name)
                names.append(name)
    return tuple(name for name in sorted(known)
                 if name == module or re.search(r"^@jit$", _source(name), re.MULTILINE))


def _source(module: str) -> str:
    return (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def _imports(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                name = name.removeprefix("lpkit.")
                if (name.partition(".")[0] in PACKAGES
                        and (PACKAGE / f"{name.replace('.', '/')}.py").is_file()):
                    yield name


def at(commit: str) -> dict[str, str]:
    """Return `today()` as it was at a commit."""
    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=PACKAGE.parent, capture_output=True, text=True,
                              check=True).stdout

    files = git("ls-tree", "--name-only", commit, *(f"lpkit/{name}/" for name in PACKAGES))
    return {name.removeprefix("lpkit/").removesuffix(".py").replace("/", "."):
            digest(git("show", f"{commit}:{name}"))
            for name in files.splitlines() if name.endswith(".py")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", nargs="+", type=Path)
    for path in parser.parse_args().records:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["commit"].endswith("+"):
            print(f"{path.name}: measured with uncommitted changes, so its code is unknown")
            continue
        path.write_text(json.dumps(record | {"code": at(record["commit"])}, indent=1) + "\n",
                        encoding="utf-8")
        print(f"{path.name}: the code of commit {record['commit']}")


if __name__ == "__main__":
    main()
