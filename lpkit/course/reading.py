"""The kit's own code, to be read beside what one has written by hand."""

import html
import inspect
import textwrap
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Source:
    """Shown folded, one part for each object."""

    parts: dict[str, str]       # where it is: what it says

    def __str__(self) -> str:
        return "\n\n".join(f"# {where}\n{text}" for where, text in self.parts.items())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "\n".join(f"<details><summary><code>{html.escape(where)}</code></summary><pre>"
                         f"{html.escape(text)}</pre></details>"
                         for where, text in self.parts.items())


def source(*objects: Any) -> Source:
    """Of functions, classes and modules."""
    return Source({
        one.__name__ if isinstance(one, ModuleType) else f"{one.__module__}.{one.__qualname__}":
        textwrap.dedent(inspect.getsource(one)).rstrip() for one in objects})
