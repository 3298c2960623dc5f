"""The kit's own code, to be read beside what one has written by hand."""

import inspect
import textwrap
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.display import HTML

WRAPS = "white-space:normal;overflow-wrap:anywhere"     # on a phone; JupyterLab's code does not


def source(*objects: Any) -> HTML:
    """Shows the source of functions, kernels, classes and modules, and of a Path the whole file:
    folded, one part for each."""
    return HTML("\n".join(
        f"<details><summary><code style='{WRAPS}'>{escape(where)}</code></summary>"
        f"<pre>{escape(text)}</pre></details>" for where, text in map(_part, objects)))


def _part(one: Any) -> tuple[str, str]:
    if isinstance(one, Path):
        return one.name, one.read_text().rstrip()
    one = getattr(one, "fn", one)       # a kernel's
    where = one.__name__ if isinstance(one, ModuleType) else f"{one.__module__}.{one.__qualname__}"
    return where, textwrap.dedent(inspect.getsource(one)).rstrip()
