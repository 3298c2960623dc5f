"""One judge for the learner's function, for the definition, and for known mistakes.

An exercise is a definition written as a plain function, whose source is also the solution that is
shown; the cases that tell it from what somebody plausibly writes instead; and a way to draw more
of them. The tests hold every exercise to it: the definition is right, each mistake is caught and
recognised, a stub is "to do".

The judge compares with the definition in float64. A number may be off by a share of its terms: the
definition runs four times more, with each operation off by 2^-20 of its result, and what an answer
moves by then is the size of what it was made of. A gradient that is a difference of equal terms is
0 on one processor and -2.7e-8 on another, and both are right.

The judge also compares the arguments before and after a call. An answer that changes an argument in
place is wrong, unless the exercise names that argument in `in_place`.
"""

import ast
import contextlib
import copy
import html
import importlib
import inspect
import itertools
import math
import numbers
import os
import random
import re
import textwrap
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lessons.judging.attempts import SECONDS, Answer, Attempt, Parcel, asked, limit_memory, load
from lpkit.errors import ConfigError
from lpkit.predict.units import quantity

DRAWN = 200             # random cases, after those that are written down
RECOGNISED = 30         # cases in which an attempt agrees with a known mistake
TOLERANCE = 1e-6        # relative; a tensor's is relative to the size of its terms
ROUNDING = 2.0**-20     # by which each operation is disturbed to find that size
DISTURBED = 4           # times
ARRAY_LIMIT = 1 << 17   # the least limit that arrays are held to: below it Python's objects count
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
    # of a case: what tensors may take at once, and what Python's objects and NumPy's arrays may
    most_bytes: Callable[..., int] | None = None
    # arguments that an answer changes, as the exercise's text says: the change is what is judged
    in_place: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.cases:
            raise ConfigError("an exercise needs at least one case, a tuple of arguments")

    def all_cases(self) -> Iterator[tuple]:
        """Yields the cases that are written down, then the drawn ones: the same for everybody."""
        yield from self.cases
        if self.draw is not None:
            chance = random.Random(self.spec.__name__)
            for _ in range(self.drawn):
                yield self.draw(chance)

    @property
    def arguments(self) -> list[str]:
        return list(inspect.signature(self.spec).parameters)

    def called(self, function: Callable[..., Any], given: tuple) -> Any:
        """Return what is judged of a call: its result, or the arguments that it changes."""
        made = function(*given)
        if not self.in_place:
            return made
        return tuple(one for name, one in zip(self.arguments, given) if name in self.in_place)

    @property
    def answer(self) -> Callable[..., Any]:
        """The spec, which is right."""
        return self.spec

    @property
    def solution(self) -> str:
        return source_of(self.answer)

    def prepare(self) -> None:
        """Runs in the warm process before it forks: imports what every fork would import again."""
        if self.most_bytes:
            importlib.import_module("lpkit.measure.tracking")

    def judged(self, attempt: Callable[..., Any]) -> "Verdict":
        """Never raises, whatever the attempt does, and does not wait for ever. An exercise without
        a name is its caller's own, and its attempt runs in this process."""
        if not self.name:
            return check(self, attempt)
        try:
            parcel = Parcel.of(attempt)
            result = None if parcel.is_stub else asked(self.name, SECONDS, parcel=vars(parcel))
        except ConfigError as error:
            return Verdict("to do", str(error), self.solution)
        if not result:
            return to_do(self)
        return Verdict(result["status"], result["detail"], self.solution)

    def found(self, job: Mapping[str, Any], hung_up: int) -> dict[str, str]:
        """Runs in the judge: returns the status, and what else there is to say."""
        with Attempt(partial(_answers, self, job), job["seconds"], hung_up) as attempt:
            said = verdict(self, iter(attempt))
            printed = attempt.printed if said.status == "wrong" else ""
        return {"status": said.status, "detail": said.detail + printed}


def _answers(exercise: Exercise, job: Mapping[str, Any]) -> Iterator[Answer]:
    limit_memory()
    attempt = load(Parcel(**job["parcel"]))
    for case in exercise.all_cases():
        yield answer(exercise, attempt, case)


def source_of(function: Callable) -> str:
    """Returns the source without decorators. Raises OSError or TypeError where there is none."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    return "\n".join(lines[ast.parse("\n".join(lines)).body[0].lineno - 1:])


def adding_to(table: dict[str, Exercise], kind: type[Exercise] = Exercise,
              field: str = "spec") -> Callable[..., Callable[[Callable], Callable]]:
    """A decorator for what `field` of an exercise is: `@exercise(name, *cases, draw=, ...)`."""
    def exercise(name: str, *cases: tuple, **more: Any) -> Callable[[Callable], Callable]:
        def add(function: Callable) -> Callable:
            table[name] = kind(cases=cases, name=name, **{field: function}, **more)
            return function

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
    held: str = field(default="", compare=False, repr=False)    # why there is no solution to see
    untried: bool = field(default=False, compare=False, repr=False)     # this machine cannot judge

    @property
    def _more(self) -> str:
        return f": {self.detail}" if self.detail else ""

    def __str__(self) -> str:
        return f"{MARKS[self.status][1]} {self.status}{self._more}"

    def _repr_html_(self) -> str:
        more = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(self._more))
        said = f"{badge(self.status)} <b>{self.status}</b>{more}"
        if self.solution:
            said += (f"<details><summary>a solution</summary><pre>{html.escape(self.solution)}"
                     f"</pre></details>")
        elif self.held:
            said += f"<br><small>{html.escape(self.held)}</small>"
        return said


ENDED = Answer(why="it ended its process")


def check(exercise: Exercise, attempt: Callable[..., Any]) -> Verdict:
    """The verdict on a function that is trusted: it runs in this process."""
    return verdict(exercise, (answer(exercise, attempt, case) for case in
                              exercise.all_cases()))


def answer(exercise: Exercise, attempt: Callable[..., Any], case: tuple) -> Answer:
    """The attempt's part: what it returns for a copy of the case; or that it changed an argument,
    or that its tensors were too large where the exercise limits them."""
    try:
        given = copy.deepcopy(case)
        if exercise.most_bytes is None:
            with Unsaturated():
                got = _at_hand(exercise.called(attempt, given))
            return Answer(got, changed(exercise, case, given))
        from lpkit.measure.tracking import Tracker  # seconds to import, for few exercises
        with Tracker(nn.Module()) as tracker:
            got = _at_hand(exercise.called(attempt, given))
        peak = max(itertools.accumulate(change for _, change, *_ in tracker.log), default=0)
        what, most = "tensors take", exercise.most_bytes(*case)
        if peak <= most and most >= ARRAY_LIMIT:
            what, peak = "arrays and lists take", array_bytes(partial(
                exercise.called, attempt, copy.deepcopy(case)))
        return Answer(got, changed(exercise, case, given) if peak <= most else (
            f"its {what} {quantity(peak, 'bytes')} at once, and {quantity(most, 'bytes')} are the "
            f"limit"))
    except Exception as error:      # whatever it is, it is the learner's: show it
        return Answer.raised(error)


def array_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes that NumPy's arrays and Python's objects take at once during a call.
    Memory of torch's tensors is not counted. Call before once, since a first call may import
    modules; what the call prints is dropped."""
    tracing = tracemalloc.is_tracing()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            call()
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            if not tracing:
                tracemalloc.stop()


def _at_hand(made: Any) -> Any:
    """Return an answer whose tensors can be read here. Raises for those that have no numbers."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu().to_dense(), made)


def changed(exercise: Exercise, case: tuple, given: tuple) -> str:
    """Say which argument of `given` a call has changed, in half a sentence; empty for none. `case`
    has the arguments as they were."""
    for name, before, after in zip(exercise.arguments, case, given):
        if name not in exercise.in_place and not _same(before, after):
            clone = f"{name}.clone()" if isinstance(before, Tensor) else f"copy.deepcopy({name})"
            return f"it changes its argument `{name}`: change a copy (`{clone}`) instead"
    return ""


def _same(before: Any, after: Any) -> bool:
    """Whether numbers are the same, bit by bit in tensors. Objects of other kinds, such as
    functions, may keep counts and are not compared."""
    if isinstance(before, Tensor):
        return (before.shape, before.dtype) == (after.shape, after.dtype) and torch.equal(
            *(one.detach().reshape(-1).contiguous().view(torch.uint8) for one in (before, after)))
    if isinstance(before, Mapping):
        return list(before) == list(after) and all(_same(before[key], after[key]) for key in before)
    if isinstance(before, list | tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    return not isinstance(before, numbers.Number | str) or repr(before) == repr(after)


def verdict(exercise: Exercise, answers: Iterator[Answer]) -> Verdict:
    """The judge's part: no code of the attempt runs here. `answers` are to all cases, in order."""
    seen: list[Answer] = []
    for case in exercise.all_cases():
        seen.append(one := next(answers, ENDED))
        if one.to_do:
            return to_do(exercise)
        if why := one.why or unlike(exercise, case, one.value):
            seen += itertools.islice(answers, max(0, RECOGNISED - len(seen)))
            named = zip(exercise.arguments, case, strict=True)
            given = ", ".join(f"{name}={short(value)}" for name, value in named)
            hint = _hint(exercise, seen)
            return Verdict("wrong", f"for {given} {why}{one.line}{hint and f'; {hint}'}",
                           exercise.solution)
    return Verdict("right", "", exercise.solution)


def unlike(exercise: Exercise, case: tuple, got: Any) -> str:
    """The judge's part: why `got` is no answer to the case, in half a sentence; empty when it is
    one."""
    given = partial(copy.deepcopy, case)
    want = expected(exercise, given)
    return difference(got, want, exercise.tolerance) and difference(
        got, want, exercise.tolerance, disturbed(exercise, given))


def expected(exercise: Exercise, given: Callable[[], tuple]) -> Any:
    """The definition's answer. Numbers that need not agree to the bit are calculated in float64, so
    that it is the same on every processor."""
    return exercise.called(exercise.spec, _widened(given()) if exercise.tolerance else given())


def disturbed(exercise: Exercise, given: Callable[[], tuple]) -> list[Any]:
    """Returns the definition's answers when each of its operations is off by up to ROUNDING of its
    result (Monte Carlo arithmetic: Parker 1997). An answer that is a difference of large terms
    moves by these terms, however near to 0 it is itself."""
    answers = []
    for seed in range(DISTURBED if exercise.tolerance else 0):
        case = given()
        with Disturbed(seed):
            answers.append(exercise.called(exercise.spec, _widened(case)))
    return answers


class Disturbed(TorchDispatchMode):
    """A mode in which each result of an operation is off by up to `size` of itself."""

    def __init__(self, seed: int, size: float = ROUNDING):
        super().__init__()
        self.size, self.chance = size, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace == "aten":
            for one in tree_leaves(made):
                if isinstance(one, Tensor) and one.dtype in (torch.float32, torch.float64):
                    off = 2 * torch.rand(one.shape, generator=self.chance, dtype=one.dtype) - 1
                    one.mul_(1 + self.size * off)
        return made


class Unsaturated(TorchDispatchMode):
    """A mode in which what is too large for E4M3 is cast to NaN, as PyTorch did up to 2.11: that it
    saturates since then hides a clamp that is missing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in CASTS and made.dtype == torch.float8_e4m3fn:
            source = args[CASTS[func]].float()      # values up to 464 are rounded to 448
            made.view(torch.uint8).masked_fill_(source.abs() > 464, 0x7F)
        return made


CASTS = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}   # what is cast


def _widened(case: tuple) -> tuple:
    return tree_map_only(Tensor, lambda x: x.double() if x.dtype == torch.float32 else x, case)


def to_do(exercise: Exercise) -> Verdict:
    return Verdict("to do", f"replace `raise NotImplementedError` ({'★' * exercise.stars}, about "
                            f"{exercise.minutes} minutes)", exercise.solution)


def _hint(exercise: Exercise, answers: Sequence[Answer]) -> str:
    """Returns the hint for a known mistake whose answers all `answers` are; empty for none."""
    both = list(itertools.islice(zip(exercise.all_cases(), answers), RECOGNISED))
    for hint, mistake in exercise.mistakes.items():
        with contextlib.suppress(Exception), Unsaturated():
            theirs = (exercise.called(mistake, copy.deepcopy(case)) for case, _ in both)
            if not any(one.value is None or difference(one.value, other, exercise.tolerance)
                       for (_, one), other in zip(both, theirs)):
                return hint
    return ""


def difference(got: Any, want: Any, tolerance: float = TOLERANCE, others: Sequence[Any] = (),
               where: tuple = (), scale: float = 0.0) -> str:
    """Says why `got` is not `want`, in half a sentence; empty when it is. Tensors and arrays count
    as nested lists, whose numbers may be off by `tolerance` of `scale`: of their largest magnitude,
    or of what they are off by in `others`, the answers of `disturbed`."""
    if tolerance and hasattr(want, "tolist"):
        want = torch.as_tensor(want)
        sizes = [want, *((one.double() - want.double()) / ROUNDING for one in others)]
        scale = max((float(abs(one[one.isfinite()]).max()) for one in sizes if one.isfinite().any()),
                    default=0.0)
    got, want = (value.tolist() if hasattr(value, "tolist") else value for value in (got, want))
    place = f" at [{', '.join(map(repr, where))}]" if where else ""
    unlike = f"expected {short(want)}{place}, got {short(got)}"
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
        why = difference(got[key], want[key], tolerance, [one[key] for one in others],
                         (*where, key), scale)
        if why:
            return why
    return ""


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
