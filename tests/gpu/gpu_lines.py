"""Lines of lpkit that only a GPU executes, and that no test of FILES does on a fake one: `python -m
tests.gpu.gpu_lines`.

Such a line stands where a test of the code has said that this is a GPU (`if device.type == "cuda"`,
`if x.is_cuda`), or where a function or a class cannot begin without one
(`torch.cuda.Stream(device)`). Half a line (`a if gpu else b`) is not counted.
"""

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
FILES = ("test_fake_gpus.py", "test_gpu_choice.py", "test_gpu_lessons.py", "test_measure.py")
# answered without one, too
ASKS = ("torch.cuda.is_available", "torch.cuda.device_count", "is_nccl_available")
NEEDS = ("torch.cuda.", "pynvml")


def _needs(node: ast.AST) -> bool:
    """Whether it cannot be executed without a GPU: not within a condition."""
    if isinstance(node, ast.IfExp | ast.BoolOp | ast.Lambda):
        return False
    if (isinstance(node, ast.Attribute | ast.Import) and (text := ast.unparse(node))
        and any(word in text for word in NEEDS)):
        return not any(ask in text for ask in ASKS)
    if isinstance(node, ast.keyword) and ast.unparse(node) == "pin_memory=True":
        return True
    return any(_needs(child) for child in ast.iter_child_nodes(node)
               if not isinstance(child, ast.stmt))


def _says(test: ast.expr) -> bool | None:
    """True: where it holds there is a GPU; False: where it does not; None: neither."""
    if isinstance(test, ast.BoolOp):
        parts = [_says(one) for one in test.values]
        sure = isinstance(test.op, ast.And)
        return sure if sure in parts else None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _says(test.operand)
        return None if inner is None else not inner
    text = ast.unparse(test)
    if (isinstance(test, ast.Compare) and len(test.ops) == 1
        and any(word in text for word in ("'cuda'", "'nccl'", "'cpu'", "'gpu'"))):
        equal = isinstance(test.ops[0], ast.Eq)
        return equal if "'cpu'" not in text else not equal
    names = {node.id if isinstance(node, ast.Name) else node.attr for node in ast.walk(test)
             if isinstance(node, ast.Name | ast.Attribute)}
    return (True if names & {"is_cuda", "on_gpu", "gpu"} or text == "torch.cuda.is_available()"
            else None)


def _ends(block: list[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _walk(block: list[ast.stmt], gpu: bool) -> Iterable[int]:
    for node in block:
        inside = gpu
        if isinstance(node, ast.ClassDef):
            begins = [one for one in node.body if isinstance(one, ast.FunctionDef)
                      and one.name == "__init__"]
            inside = gpu or any(map(_needs, [line for one in begins for line in one.body]))
        elif isinstance(node, ast.FunctionDef):
            inside = gpu or any(map(_needs, node.body))
        elif _needs(node):
            inside = True
        if inside and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno
        if isinstance(node, ast.If):
            said = _says(node.test)
            yield from _walk(node.body, inside or said is True)
            yield from _walk(node.orelse, inside or said is False)
            gpu = gpu or (said is False and _ends(node.body))      # what comes after it
            continue
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.expr) and isinstance(getattr(node, part, None), list):
                yield from _walk(getattr(node, part), inside)
        for handler in getattr(node, "handlers", ()):
            yield from _walk(handler.body, inside)


def gpu_lines(source: str) -> set[int]:
    return set(_walk(ast.parse(source).body, False))


def unexecuted(files: Iterable[str] = FILES) -> dict[str, list[int]]:
    """By module; the files' tests run in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        done = subprocess.run(
            [sys.executable, "-m", "coverage", "run", f"--data-file={data}", "--source=lpkit", "-m",
             "pytest", "-q", "-x", "-m",
             "not gpu", "-p", "no:cacheprovider", *(str(ROOT / "tests" / file) for file in files)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        seen = coverage.Coverage(data_file=str(data))
        seen.load()
        found = {}
        for path in sorted((ROOT / "lpkit").rglob("*.py")):
            source = path.read_text()
            if "import torch" in source and (alone := gpu_lines(source)):
                _, statements, _, missing, _ = seen.analysis2(str(path))
                if left := sorted(alone & set(statements) & set(missing)):
                    found[str(path.relative_to(ROOT))] = left
    return found


if __name__ == "__main__":
    left = unexecuted(sys.argv[1:] or FILES)
    for name, lines in left.items():
        print(f"{name}: {', '.join(map(str, lines))}")
    print(f"{sum(map(len, left.values()))} lines that only a GPU executes were not executed")
