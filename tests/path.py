"""The path of a batch, counted: `python -m tests.path`. What `lpkit.training.loop` imports, module
by module, and what one FP8 update enters, function by function. tests/project/test_architecture.py
holds both.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import lpkit
from tests.size import size_of

ROOT = Path(lpkit.__file__).parent


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _statements(node: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    """All below `node`, without what only a type checker reads; without functions' where not
    `lazy`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _statements(child, lazy)


@cache
def imports(lazy: bool) -> dict[str, set[str]]:
    """The modules that each module imports; where `lazy`, also in its functions."""
    graph = {}
    for name, path in MODULES.items():
        theirs = set()
        for node in _statements(ast.parse(path.read_text()), lazy):
            if isinstance(node, ast.Import):
                theirs |= {alias.name for alias in node.names} & MODULES.keys()
            elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                theirs |= inner & MODULES.keys()
                if not inner <= MODULES.keys():
                    theirs.add(node.module)
        graph[name] = theirs - {name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import one another: what is left once nobody's last import is taken away."""
    left = {name: set(theirs) for name, theirs in graph.items()}
    while gone := {name for name, theirs in left.items() if not theirs & left.keys()}:
        left = {name: theirs for name, theirs in left.items() if name not in gone}
    return [[name, *sorted(theirs & left.keys())] for name, theirs in left.items()]


def imported_by(name: str) -> dict[str, int]:
    """The modules that are there once `name` is imported, packages included, and their code
    tokens, without comments and docstrings."""
    tokens, ahead = {}, [name]
    while ahead:
        module = ahead.pop()
        if module not in tokens:
            tokens[module] = size_of(MODULES[module]).tokens
            ahead += [*imports(lazy=False)[module], *filter(None, [module.rpartition(".")[0]])]
    return tokens


def entered() -> Counter:
    """Functions of lpkit that the third update of a small FP8 run enters on a CPU, by file; also
    those without a name, as the parts of a comprehension."""
    from lpkit.config import Config
    from lpkit.training.training import RandomTokens, Training

    config = Config().replace({
        "precision.recipe": "fp8-tensorwise", "system.device": "cpu", "system.threads": 1,
        "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 32,
        "global_batch": 4, "grad_accum_steps": 1})
    training = Training.build(config, data=RandomTokens(config))
    for step in range(2):
        training.update(step)
    seen = set()

    def saw(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(saw)
    try:
        training.update(2)
    finally:
        sys.setprofile(before)
    return Counter(str(Path(code.co_filename).relative_to(ROOT)) for code in seen)


if __name__ == "__main__":
    modules, files = imported_by("lpkit.training.loop"), entered()
    for name, tokens in sorted(modules.items(), key=lambda pair: -pair[1]):
        print(f"{tokens:6} {name}")
    print(f"{sum(modules.values()):6} code tokens in {len(modules)} modules that training.loop "
          f"imports")
    for name, count in files.most_common():
        print(f"{count:6} {name}")
    print(f"{files.total():6} functions in {len(files)} files that one FP8 update enters")
