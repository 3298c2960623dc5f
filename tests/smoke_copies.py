"""Copies of the course at the smoke size, for nbval: `python -m tests.smoke_copies && pytest
--nbval-lax build/smoke`."""

import shutil
from pathlib import Path

import nbformat

from hosting import notebooks
from hosting.parameters import with_parameters


def copy_of(path: Path) -> nbformat.NotebookNode:
    """nbval takes `raises-exception` for leave to fail: in a copy nothing may."""
    book = with_parameters(notebooks.read(path), {"tier": "smoke"})
    for cell in notebooks.tagged(book, "raises-exception"):
        cell.metadata.tags.remove("raises-exception")
    return book


if __name__ == "__main__":
    into = Path("build/smoke")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    shutil.copytree("notebooks/lessons", into / "lessons",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for path in notebooks.course():
        nbformat.write(copy_of(path), into / path.name)
