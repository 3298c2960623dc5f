"""Shows the kit's code, to be compared with code written by hand."""

import inspect
import textwrap
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.display import HTML

WRAPS = "white-space:normal;overflow-wrap:anywhere"     # for phones; JupyterLab does not wrap code


def source(*objects: Any) -> HTML:
    """Show the source of functions, kernels, classes and modules, and the whole file of a Path:
    folded, one part per object."""
    return HTML("\n".join(
        f"<details><summary><code style='{WRAPS}'>{escape(where)}</code></summary>"
        f"<pre>{escape(text)}</pre></details>" for where, text in map(_part, objects)))


def _part(one: Any) -> tuple[str, str]:
    if isinstance(one, Path):
        return one.name, one.read_text().rstrip()
    one = getattr(one, "fn", one)       # the function of a kernel
    where = one.__name__ if isinstance(one, ModuleType) else f"{one.__module__}.{one.__qualname__}"
    return where, textwrap.dedent(inspect.getsource(one)).rstrip()
