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
    """Return HTML with the source of each object, folded under its name. An object is a function, a
    Triton kernel, a class, a module, or the Path of a file."""
    return HTML("\n".join(
        f"<details><summary><code style='{WRAPS}'>{escape(where)}</code></summary>"
        f"<pre>{escape(text)}</pre></details>" for where, text in map(_part, objects)))


def _part(thing: Any) -> tuple[str, str]:
    """Return the name and the source of an object."""
    if isinstance(thing, Path):
        return thing.name, thing.read_text().rstrip()
    thing = getattr(thing, "fn", thing)     # a Triton kernel wraps its Python function as `fn`
    where = (thing.__name__ if isinstance(thing, ModuleType)
             else f"{thing.__module__}.{thing.__qualname__}")
    return where, textwrap.dedent(inspect.getsource(thing)).rstrip()
