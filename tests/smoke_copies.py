"""Copies of the course at the smoke size, for nbval: `python tests/smoke_copies.py && pytest --nbval-lax build/smoke`."""

import shutil
from pathlib import Path

import nbformat

from lpkit.course import notebooks

if __name__ == "__main__":
    into = Path("build/smoke")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for path in notebooks.course():
        nbformat.write(notebooks.with_parameters(notebooks.read(path), {}, "smoke"), into / path.name)
