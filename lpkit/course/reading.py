"""The kit's own code, to be read beside what one has written by hand."""

import html
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
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
    """Of functions, kernels, classes and modules; of a Path the whole file."""
    return Source(dict(map(_part, objects)))


def _part(one: Any) -> tuple[str, str]:
    if isinstance(one, Path):
        return one.name, one.read_text().rstrip()
    one = getattr(one, "fn", one)       # a kernel's
    where = one.__name__ if isinstance(one, ModuleType) else f"{one.__module__}.{one.__qualname__}"
    return where, textwrap.dedent(inspect.getsource(one)).rstrip()
