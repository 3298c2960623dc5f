"""The kit's own code, to be read beside what one has written by hand."""

import inspect
import textwrap
from html import escape
from types import ModuleType
from typing import Any

from IPython.display import HTML


def source(*objects: Any) -> HTML:
    """Of functions, classes and modules: shown folded, one part for each."""
    parts = []
    for one in objects:
        where = one.__name__
        if not isinstance(one, ModuleType):
            where = f"{one.__module__}.{one.__qualname__}"
        text = textwrap.dedent(inspect.getsource(one)).rstrip()
        parts.append(f"<details><summary><code>{escape(where)}</code></summary><pre>"
                     f"{escape(text)}</pre></details>")
    return HTML("\n".join(parts))
