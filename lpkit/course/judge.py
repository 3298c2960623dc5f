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
from typing import Any, Literal

from lpkit.errors import ConfigError

COLOURS = {"to do": "#6b7280", "right": "#15803d", "wrong": "#b91c1c"}
SIGNS = {"to do": "○", "right": "✓", "wrong": "✗"}


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """`spec` and `mistake` take the arguments of a case and return a number, text, or sequences and
    dicts of these."""

    spec: Callable[..., Any]
    mistake: Callable[..., Any]
    cases: tuple[tuple, ...]        # arguments, smallest first: the first that fails is shown
    tolerance: float = 1e-6         # relative

    def __post_init__(self):
        if not self.cases or not all(isinstance(case, tuple) for case in self.cases):
            raise ConfigError(f"an exercise needs at least one case, each a tuple of arguments, "
                              f"got {self.cases!r}")


@dataclass(frozen=True)
class Verdict:
    status: Literal["to do", "right", "wrong"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{SIGNS[self.status]} {self.status}" + (f": {self.detail}" if self.detail else "")

    def _repr_html_(self) -> str:
        detail = f": {html.escape(self.detail)}" if self.detail else ""
        return (f'<span style="color:{COLOURS[self.status]}">{SIGNS[self.status]} '
                f"<b>{self.status}</b>{detail}</span>")


def check(exercise: Exercise, attempt: Callable[..., Any]) -> Verdict:
    """Try `attempt` on every case. Never raises for what the attempt does, so that a notebook runs
    to its end."""
    for case in exercise.cases:
        called = f"({', '.join(map(_short, case))})"
        try:
            got = attempt(*case)
        except NotImplementedError:
            return Verdict("to do", "replace `raise NotImplementedError`")
        except Exception as error:      # whatever it is, it is the learner's: show it
            return Verdict("wrong", f"for {called} it raised {type(error).__name__}: {error}")
        want = exercise.spec(*case)
        try:
            why = difference(got, want, exercise.tolerance)
        except Exception as error:
            why = f"{_short(got)} cannot be compared: {error}"
        if why:
            return Verdict("wrong", f"for {called} {why}")
    return Verdict("right")


def difference(got: Any, want: Any, tolerance: float, where: str = "") -> str:
    """Why `got` is not `want`, in half a sentence; empty when it is. Tensors and arrays count as
    nested lists."""
    if not isinstance(got, (bool, numbers.Number)) and hasattr(got, "tolist"):
        got = got.tolist()
    if not isinstance(want, (bool, numbers.Number)) and hasattr(want, "tolist"):
        want = want.tolist()
    if got is None and want is not None:
        return f"expected {_short(want)}{where}, got None; is there a `return`?"
    unlike = f"expected {_short(want)}{where}, got {_short(got)}"
    if isinstance(want, (bool, str)) or want is None:
        return "" if type(got) is type(want) and got == want else unlike
    if isinstance(want, numbers.Number):
        if isinstance(got, bool) or not isinstance(got, numbers.Real):
            return unlike
        same = math.isclose(got, want, rel_tol=tolerance) or (math.isnan(got) and math.isnan(want))
        return "" if same else unlike
    if isinstance(want, Mapping):
        if not isinstance(got, Mapping) or set(got) != set(want):
            return f"expected the keys {sorted(map(str, want))}{where}, got " + (
                f"{sorted(map(str, got))}" if isinstance(got, Mapping) else _short(got))
        pairs = [(got[key], want[key], f" at {key!r}") for key in want]
    elif isinstance(want, Sequence):
        if not isinstance(got, Sequence) or isinstance(got, str) or len(got) != len(want):
            return unlike
        pairs = [(*pair, f" at [{i}]") for i, pair in enumerate(zip(got, want))]
    else:
        raise TypeError(f"an exercise returns numbers, text, sequences or dicts of these, not "
                        f"{type(want).__name__}")
    return next((why for g, w, at in pairs if (why := difference(g, w, tolerance, where + at))), "")


def _short(value: Any) -> str:
    text = f"{value:,.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
