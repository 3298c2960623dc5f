"""One judge for the learner's function, for the definition, and for a known mistake.

An exercise is a definition written as a plain function, one thing that somebody plausibly writes
instead, and the cases to try. The tests hold every exercise to it: the definition is right, the
mistake is caught, a stub is "to do".
"""

import html
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lpkit.errors import ConfigError

TOLERANCE = 1e-6        # relative
MARKS = {"to do": ("#6b7280", "○"), "right": ("#15803d", "✓"), "wrong": ("#b91c1c", "✗")}


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """`spec` and `mistake` take the arguments of a case and return a number, text, or sequences and
    dicts of these."""

    spec: Callable[..., Any]
    mistake: Callable[..., Any]
    cases: tuple[tuple, ...]        # arguments, smallest first: the first that fails is shown

    def __post_init__(self):
        if not self.cases:
            raise ConfigError("an exercise needs at least one case, a tuple of arguments")


@dataclass(frozen=True)
class Verdict:
    status: str             # of MARKS
    detail: str = ""

    @property
    def _more(self) -> str:
        return f": {self.detail}" if self.detail else ""

    def __str__(self) -> str:
        return f"{MARKS[self.status][1]} {self.status}{self._more}"

    def _repr_html_(self) -> str:
        colour, sign = MARKS[self.status]
        return (f"<span style='color:{colour}'>{sign} <b>{self.status}</b>"
                f"{html.escape(self._more)}</span>")


def check(exercise: Exercise, attempt: Callable[..., Any]) -> Verdict:
    """Try `attempt` on every case. Never raises for what the attempt does, so that a notebook runs
    to its end."""
    for case in exercise.cases:
        try:
            why = difference(attempt(*case), exercise.spec(*case))
        except NotImplementedError:
            return Verdict("to do", "replace `raise NotImplementedError`")
        except Exception as error:      # whatever it is, it is the learner's: show it
            why = f"it raised {type(error).__name__}: {error}"
        if why:
            return Verdict("wrong", f"for ({', '.join(map(_short, case))}) {why}")
    return Verdict("right")


def difference(got: Any, want: Any, where: str = "") -> str:
    """Why `got` is not `want`, in half a sentence; empty when it is. Tensors and arrays count as
    nested lists."""
    got, want = (value.tolist() if hasattr(value, "tolist") else value for value in (got, want))
    unlike = f"expected {_short(want)}{where}, got {_short(got)}"
    if got is None and want is not None:
        return f"{unlike}; is there a `return`?"
    if isinstance(want, (bool, str)) or want is None:
        return "" if type(got) is type(want) and got == want else unlike
    if isinstance(want, numbers.Number):
        if isinstance(got, bool) or not isinstance(got, numbers.Real):
            return unlike
        same = math.isclose(got, want, rel_tol=TOLERANCE) or (math.isnan(got) and math.isnan(want))
        return "" if same else unlike
    kind = Mapping if isinstance(want, Mapping) else Sequence
    if not isinstance(got, kind) or isinstance(got, str) or len(got) != len(want):
        return unlike
    if kind is Mapping and got.keys() != want.keys():
        return unlike
    for key in want if kind is Mapping else range(len(want)):
        why = difference(got[key], want[key], f"{where} at [{key!r}]")
        if why:
            return why
    return ""


def _short(value: Any) -> str:
    text = f"{value:,.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
