"""One judge for the learner's function, for the definition, and for known mistakes.

An exercise is a definition written as a plain function, whose source is also the solution that is
shown; the cases that tell it from what somebody plausibly writes instead; and a way to draw more
of them. The tests hold every exercise to it: the definition is right, each mistake is caught and
recognised, a stub is "to do".
"""

import ast
import contextlib
import copy
import html
import inspect
import itertools
import math
import numbers
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lpkit.errors import ConfigError

DRAWN = 200             # random cases, after those that are written down
RECOGNISED = 30         # cases in which an attempt agrees with a known mistake
TOLERANCE = 1e-6        # relative; of a tensor, to its largest magnitude
MARKS = {"to do": ("#6b7280", "○"), "right": ("#15803d", "✓"), "wrong": ("#b91c1c", "✗")}


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """`spec` and each of `mistakes` take the arguments of a case and return a number, text, a
    tensor, or sequences and dicts of these. A tolerance of 0 compares bits: -0 is not 0."""

    spec: Callable[..., Any]
    cases: tuple[tuple, ...]        # arguments, smallest first: the first that fails is shown
    mistakes: Mapping[str, Callable[..., Any]] = field(default_factory=dict)    # by what to say
    draw: Callable[[random.Random], tuple] | None = None
    tolerance: float = TOLERANCE
    stars: int = 1
    minutes: int = 3
    name: str = ""                  # as the learner's file has it: "03.cast"
    drawn: int = DRAWN

    def __post_init__(self):
        if not self.cases:
            raise ConfigError("an exercise needs at least one case, a tuple of arguments")

    def all_cases(self) -> Iterator[tuple]:
        """Those that are written down, then the drawn ones: the same for everybody."""
        yield from self.cases
        if self.draw is not None:
            chance = random.Random(self.spec.__name__)
            for _ in range(self.drawn):
                yield self.draw(chance)

    @property
    def answer(self) -> Callable[..., Any]:
        """One that is right."""
        return self.spec

    @property
    def solution(self) -> str:
        return source_of(self.answer)

    def judged(self, attempt: Callable[..., Any]) -> "Verdict":
        return check(self, attempt)


def source_of(function: Callable) -> str:
    """Without its decorators. Raises OSError or TypeError where there is none."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    return "\n".join(lines[ast.parse("\n".join(lines)).body[0].lineno - 1:])


def adding_to(table: dict[str, Exercise], kind: type[Exercise] = Exercise
              ) -> Callable[..., Callable[[Callable], Callable]]:
    """A decorator for definitions: `@exercise(name, *cases, draw=, mistakes=, ...)`."""
    def exercise(name: str, *cases: tuple, **more: Any) -> Callable[[Callable], Callable]:
        def add(spec: Callable) -> Callable:
            table[name] = kind(spec=spec, cases=cases, name=name, **more)
            return spec

        return add

    return exercise


def badge(status: str) -> str:
    """HTML: the sign, white on its colour, which can be read in a dark theme, too."""
    colour, sign = MARKS[status]
    return f"<span style='background:{colour};color:#fff;padding:0 4px'>{sign}</span>"


@dataclass(frozen=True)
class Verdict:
    status: str             # of MARKS
    detail: str = ""
    solution: str = field(default="", compare=False, repr=False)

    @property
    def _more(self) -> str:
        return f": {self.detail}" if self.detail else ""

    def __str__(self) -> str:
        return f"{MARKS[self.status][1]} {self.status}{self._more}"

    def _repr_html_(self) -> str:
        said = f"{badge(self.status)} <b>{self.status}</b>{html.escape(self._more)}"
        if self.solution:
            said += (f"<details><summary>a solution</summary><pre>{html.escape(self.solution)}"
                     f"</pre></details>")
        return said


def check(exercise: Exercise, attempt: Callable[..., Any]) -> Verdict:
    """Try `attempt` on every case. Never raises for what the attempt does, so that a notebook runs
    to its end."""
    for case in exercise.all_cases():
        want = exercise.spec(*copy.deepcopy(case))
        try:
            # a copy: whatever it writes into its arguments
            why = difference(attempt(*copy.deepcopy(case)), want, exercise.tolerance)
        except NotImplementedError:
            return to_do(exercise)
        except Exception as error:      # whatever it is, it is the learner's: show it
            why = f"it raised {type(error).__name__}: {error}"
        if why:
            named = zip(inspect.signature(exercise.spec).parameters, case, strict=True)
            given = ", ".join(f"{name}={short(value)}" for name, value in named)
            hint = _hint(exercise, attempt)
            return Verdict("wrong", f"for {given} {why}{hint and f'; {hint}'}", exercise.solution)
    return Verdict("right", "", exercise.solution)


def to_do(exercise: Exercise) -> Verdict:
    return Verdict("to do", f"replace `raise NotImplementedError` ({'★' * exercise.stars}, about "
                            f"{exercise.minutes} minutes)", exercise.solution)


def _hint(exercise: Exercise, attempt: Callable[..., Any]) -> str:
    """What to say to who makes a known mistake: `attempt` agrees with it in every case."""
    cases = list(itertools.islice(exercise.all_cases(), RECOGNISED))
    for hint, mistake in exercise.mistakes.items():
        with contextlib.suppress(Exception):
            if not any(difference(attempt(*copy.deepcopy(case)), mistake(*copy.deepcopy(case)),
                                  exercise.tolerance) for case in cases):
                return hint
    return ""


def difference(got: Any, want: Any, tolerance: float = TOLERANCE, where: str = "",
               scale: float = 0.0) -> str:
    """Why `got` is not `want`, in half a sentence; empty when it is. Tensors and arrays count as
    nested lists, whose numbers may be off by `tolerance` of the largest magnitude, `scale`."""
    if hasattr(want, "tolist"):
        scale = max((abs(one) for one in _numbers(want.tolist()) if math.isfinite(one)), default=0)
    got, want = (value.tolist() if hasattr(value, "tolist") else value for value in (got, want))
    unlike = f"expected {short(want)}{where}, got {short(got)}"
    if got is None and want is not None:
        return f"{unlike}; is there a `return`?"
    if isinstance(want, (bool, str)) or want is None:
        return "" if type(got) is type(want) and got == want else unlike
    if isinstance(want, numbers.Number):
        if isinstance(got, bool) or not isinstance(got, numbers.Real):
            return unlike
        if math.isnan(got) or math.isnan(want):
            return "" if math.isnan(got) and math.isnan(want) else unlike
        if not tolerance:
            same = got == want and math.copysign(1, got) == math.copysign(1, want)
        else:
            same = math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance * scale)
        return "" if same else unlike
    kind = Mapping if isinstance(want, Mapping) else Sequence
    if not isinstance(got, kind) or isinstance(got, str) or len(got) != len(want):
        return unlike
    if kind is Mapping and got.keys() != want.keys():
        return unlike
    for key in want if kind is Mapping else range(len(want)):
        why = difference(got[key], want[key], tolerance, f"{where} at [{key!r}]", scale)
        if why:
            return why
    return ""


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    else:
        yield value


def short(value: Any) -> str:
    if hasattr(value, "tolist"):
        text = f"{list(value.shape)} {short(value.tolist())}"
    elif isinstance(value, list):
        text = f"[{', '.join(map(short, value))}]"
    elif inspect.isfunction(value):
        text = f"a function {value.__name__}"
    else:
        text = f"{value:,.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
