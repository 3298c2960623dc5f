"""One judge for the learner's function, the definition, and known mistakes.

An exercise consists of a definition (a plain function whose source is also the shown solution), the
cases that distinguish it from plausible mistakes, and a way to draw more cases. The tests check
every exercise: the definition is right, each mistake is caught and recognised, a stub is "to do".

The judge compares with the definition in float64. The tolerance of a number is relative to the size
of its terms. To find that size, the definition runs four more times, with each operation disturbed
by up to 2^-20 of its result, and the judge measures how far the answer moves. For example, a
gradient that is a difference of equal terms may be 0 on one processor and -2.7e-8 on another; both
are right.

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

DRAWN = 200             # random cases after the written cases
RECOGNISED = 30         # cases in which an attempt must agree with a known mistake
TOLERANCE = 1e-6        # relative; for a tensor, relative to the size of its terms
ROUNDING = 2.0**-20     # relative disturbance of each operation to find that size
DISTURBED = 4           # runs with disturbance
ARRAY_LIMIT = 1 << 17   # smallest limit for arrays; below it, Python's objects would dominate
MARKS = {"to do": ("#6b7280", "○"), "right": ("#15803d", "✓"), "wrong": ("#b91c1c", "✗")}


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """`spec` and each of `mistakes` take the arguments of a case and return a number, text, a
    tensor, or sequences and dicts of these. A tolerance of 0 compares bits: -0 is not 0."""

    spec: Callable[..., Any]
    cases: tuple[tuple, ...]        # arguments, smallest first; the first failing case is shown
    mistakes: Mapping[str, Callable[..., Any]] = field(default_factory=dict)    # by hint
    draw: Callable[[random.Random], tuple] | None = None
    tolerance: float = TOLERANCE
    stars: int = 1
    minutes: int = 3
    name: str = ""                  # the name in the learner's file: "03.cast"
    drawn: int = DRAWN
    # by case: the most bytes that tensors may take at once; the same limit holds, separately, for
    # Python's objects and NumPy's arrays
    most_bytes: Callable[..., int] | None = None
    # arguments that the exercise asks to change; the changed arguments are judged
    in_place: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.cases:
            raise ConfigError("an exercise needs at least one case, a tuple of arguments")

    def all_cases(self) -> Iterator[tuple]:
        """Yield the written cases, then the drawn cases; they are the same for all learners."""
        yield from self.cases
        if self.draw is not None:
            chance = random.Random(self.spec.__name__)
            for _ in range(self.drawn):
                yield self.draw(chance)

    @property
    def arguments(self) -> list[str]:
        return list(inspect.signature(self.spec).parameters)

    def called(self, function: Callable[..., Any], given: tuple) -> Any:
        """Return the part of a call that is judged: its result, or the arguments it changes."""
        result = function(*given)
        if not self.in_place:
            return result
        return tuple(argument for name, argument in zip(self.arguments, given)
                     if name in self.in_place)

    @property
    def answer(self) -> Callable[..., Any]:
        """The right answer: the spec."""
        return self.spec

    @property
    def solution(self) -> str:
        return source_of(self.answer)

    def prepare(self) -> None:
        """Import modules that every fork needs. The warm process calls this before it forks."""
        if self.most_bytes:
            importlib.import_module("lpkit.measure.tracking")

    def judged(self, attempt: Callable[..., Any]) -> "Verdict":
        """Return the verdict on a learner's function. This method ends and does not raise, whatever
        the attempt does. The attempt of an exercise without a name (a caller's own exercise) runs
        in this process; any other attempt runs in a separate process."""
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

    def outcome(self, job: Mapping[str, Any], hung_up: int) -> dict[str, str]:
        """Return `status` and `detail` of the verdict, in the judge's process. `job` is the message
        from the notebook; `hung_up` is readable when the notebook no longer waits."""
        with Attempt(partial(_answers, self, job), job["seconds"], hung_up) as attempt:
            result = verdict(self, iter(attempt))
            printed = attempt.printed if result.status == "wrong" else ""
        return {"status": result.status, "detail": result.detail + printed}


def _answers(exercise: Exercise, job: Mapping[str, Any]) -> Iterator[Answer]:
    limit_memory()
    attempt = load(Parcel(**job["parcel"]))
    for case in exercise.all_cases():
        yield answer(exercise, attempt, case)


def source_of(function: Callable) -> str:
    """Return the source without decorators. Raises OSError or TypeError if there is no source."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    return "\n".join(lines[ast.parse("\n".join(lines)).body[0].lineno - 1:])


def adding_to(table: dict[str, Exercise], kind: type[Exercise] = Exercise,
              field: str = "spec") -> Callable[..., Callable[[Callable], Callable]]:
    """Return a decorator for the `field` of an exercise: `@exercise(name, *cases, draw=, ...)`."""
    def exercise(name: str, *cases: tuple, **more: Any) -> Callable[[Callable], Callable]:
        def add(function: Callable) -> Callable:
            table[name] = kind(cases=cases, name=name, **{field: function}, **more)
            return function

        return add

    return exercise


def badge(status: str) -> str:
    """Return HTML: the status's sign in white on the status's colour, which is readable in a dark
    theme, too."""
    colour, sign = MARKS[status]
    return f"<span style='background:{colour};color:#fff;padding:0 4px'>{sign}</span>"


@dataclass(frozen=True)
class Verdict:
    """The judge's result for one attempt. `str()` gives one line; a notebook shows HTML."""

    status: str             # a key of MARKS
    detail: str = ""        # a message for the learner, without a full stop
    solution: str = field(default="", compare=False, repr=False)
    held: str = field(default="", compare=False, repr=False)    # why the solution is hidden
    untried: bool = field(default=False, compare=False, repr=False)     # this machine cannot judge

    @property
    def _more(self) -> str:
        return f": {self.detail}" if self.detail else ""

    def __str__(self) -> str:
        return f"{MARKS[self.status][1]} {self.status}{self._more}"

    def _repr_html_(self) -> str:
        more = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(self._more))
        page = f"{badge(self.status)} <b>{self.status}</b>{more}"
        if self.solution:
            page += (f"<details><summary>a solution</summary><pre>{html.escape(self.solution)}"
                     f"</pre></details>")
        elif self.held:
            page += f"<br><small>{html.escape(self.held)}</small>"
        return page


ENDED = Answer(why="it ended its process")      # the answer to a case for which none arrived


def check(exercise: Exercise, attempt: Callable[..., Any]) -> Verdict:
    """Return the verdict on a trusted function, which runs in this process."""
    return verdict(exercise, (answer(exercise, attempt, case) for case in
                              exercise.all_cases()))


def answer(exercise: Exercise, attempt: Callable[..., Any], case: tuple) -> Answer:
    """Call the attempt with a copy of the case. Return its result, or why the result does not
    count: the attempt raised, changed an argument, or took more memory than the exercise allows."""
    try:
        given = copy.deepcopy(case)
        if exercise.most_bytes is None:
            with Unsaturated():
                got = _at_hand(exercise.called(attempt, given))
            return Answer(got, changed(exercise, case, given))
        from lpkit.measure.tracking import Tracker  # takes seconds; only few exercises need it
        with Tracker(nn.Module()) as tracker:
            got = _at_hand(exercise.called(attempt, given))
        peak = max(itertools.accumulate(change for _, change, *_ in tracker.log), default=0)
        what, most = "tensors take", exercise.most_bytes(*case)
        if peak <= most and most >= ARRAY_LIMIT:
            what, peak = "arrays and lists take", array_bytes(partial(
                exercise.called, attempt, copy.deepcopy(case)))
        return Answer(got, changed(exercise, case, given) if peak <= most else (
            f"its {what} {quantity(peak, 'bytes')} at once; the limit is "
            f"{quantity(most, 'bytes')}"))
    except Exception as error:      # any error of the learner's function is shown
        return Answer.raised(error)


def array_bytes(call: Callable[[], Any]) -> int:
    """Return the peak bytes of NumPy's arrays and Python's objects during a call. Memory of torch's
    tensors is not counted. Make the call once before, since a first call may import modules; the
    output of the call is dropped."""
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


def _at_hand(value: Any) -> Any:
    """Return an answer whose tensors are dense, detached and on the CPU. Raises for a tensor
    without values, such as one on the meta device."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu().to_dense(), value)


def changed(exercise: Exercise, case: tuple, given: tuple) -> str:
    """Return a message that names the first argument that a call has changed; empty if there is
    none. `case` has the arguments before the call, `given` the arguments after it."""
    for name, before, after in zip(exercise.arguments, case, given):
        if name not in exercise.in_place and not _same(before, after):
            clone = f"{name}.clone()" if isinstance(before, Tensor) else f"copy.deepcopy({name})"
            return f"it changes its argument `{name}`: change a copy (`{clone}`) instead"
    return ""


def _same(before: Any, after: Any) -> bool:
    """Whether values are the same; tensors are compared bit by bit. Objects of other types, such as
    functions, may keep counts and are not compared."""
    if isinstance(before, Tensor):
        return (before.shape, before.dtype) == (after.shape, after.dtype) and torch.equal(
            *(t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (before, after)))
    if isinstance(before, Mapping):
        return list(before) == list(after) and all(_same(before[key], after[key]) for key in before)
    if isinstance(before, list | tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    return not isinstance(before, numbers.Number | str) or repr(before) == repr(after)


def verdict(exercise: Exercise, answers: Iterator[Answer]) -> Verdict:
    """Compare the attempt's answers with the definition's, and return the verdict. No code of the
    attempt runs here. `answers`: one answer per case, in order; they are read one by one, so the
    first wrong answer ends the comparison."""
    seen: list[Answer] = []
    for case in exercise.all_cases():
        seen.append(answer := next(answers, ENDED))
        if answer.to_do:
            return to_do(exercise)
        if why := answer.why or unlike(exercise, case, answer.value):
            # more answers, so that a hint is given only for a mistake that explains all of them
            seen += itertools.islice(answers, max(0, RECOGNISED - len(seen)))
            named = zip(exercise.arguments, case, strict=True)
            given = ", ".join(f"{name}={short(value)}" for name, value in named)
            hint = _hint(exercise, seen)
            return Verdict("wrong", f"for {given} {why}{answer.line}{hint and f'; {hint}'}",
                           exercise.solution)
    return Verdict("right", "", exercise.solution)


def unlike(exercise: Exercise, case: tuple, got: Any) -> str:
    """Return a message that says why `got` is wrong for the case; empty if it is right. The
    disturbed runs of the definition are needed only if the plain comparison fails."""
    given = partial(copy.deepcopy, case)
    want = expected(exercise, given)
    return difference(got, want, exercise.tolerance) and difference(
        got, want, exercise.tolerance, disturbed(exercise, given))


def expected(exercise: Exercise, given: Callable[[], tuple]) -> Any:
    """Return the definition's answer. Unless bits are compared, it is computed in float64, so that
    it is the same on every processor."""
    return exercise.called(exercise.spec, _widened(given()) if exercise.tolerance else given())


def disturbed(exercise: Exercise, given: Callable[[], tuple]) -> list[Any]:
    """Return DISTURBED answers of the definition, in which each operation's result is disturbed by
    up to ROUNDING of itself (Monte Carlo arithmetic: Parker 1997). If an answer is a difference of
    large terms, it moves in proportion to these terms, even if the answer itself is near 0. Empty
    for a tolerance of 0."""
    answers = []
    for seed in range(DISTURBED if exercise.tolerance else 0):
        case = given()
        with Disturbed(seed):
            answers.append(exercise.called(exercise.spec, _widened(case)))
    return answers


class Disturbed(TorchDispatchMode):
    """A mode that multiplies each element of each operation's result by a random factor between
    1 - `size` and 1 + `size`. Views and integers are left as they are."""

    def __init__(self, seed: int, size: float = ROUNDING):
        super().__init__()
        self.size, self.chance = size, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace == "aten":
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64):
                    off = torch.rand(tensor.shape, generator=self.chance, dtype=tensor.dtype)
                    tensor.mul_(1 + self.size * (2 * off - 1))
        return result


class Unsaturated(TorchDispatchMode):
    """A mode in which values too large for E4M3 become NaN, as in PyTorch up to 2.11. Since then
    PyTorch saturates, which would hide a missing clamp."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CASTS and result.dtype == torch.float8_e4m3fn:
            source = args[CASTS[func]].float()      # values up to 464 are rounded to 448
            result.view(torch.uint8).masked_fill_(source.abs() > 464, 0x7F)
        return result


CASTS = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}   # index of the input


def _widened(case: tuple) -> tuple:
    """Return the case with its float32 tensors as float64."""
    return tree_map_only(Tensor, lambda x: x.double() if x.dtype == torch.float32 else x, case)


def to_do(exercise: Exercise) -> Verdict:
    return Verdict("to do", f"replace `raise NotImplementedError` ({'★' * exercise.stars}, about "
                            f"{exercise.minutes} minutes)", exercise.solution)


def _hint(exercise: Exercise, answers: Sequence[Answer]) -> str:
    """Return the hint for a known mistake that gives all of `answers`; empty if there is none."""
    both = list(itertools.islice(zip(exercise.all_cases(), answers), RECOGNISED))
    for hint, mistake in exercise.mistakes.items():
        with contextlib.suppress(Exception), Unsaturated():
            theirs = (exercise.called(mistake, copy.deepcopy(case)) for case, _ in both)
            if not any(answer.value is None or difference(answer.value, other, exercise.tolerance)
                       for (_, answer), other in zip(both, theirs)):
                return hint
    return ""


def difference(got: Any, want: Any, tolerance: float = TOLERANCE, others: Sequence[Any] = (),
               where: tuple = (), scale: float = 0.0) -> str:
    """Return a message that says how `got` differs from `want`; empty if it does not.

    Tensors and arrays are compared as nested lists. Their numbers may differ by `tolerance` times
    `scale`, which is the largest magnitude of `want` or, if that is larger, the largest movement in
    `others` (the answers of `disturbed`) divided by ROUNDING. `where`: the indices of `want` within
    the whole answer, for the message. A tolerance of 0 compares exactly, with the sign of 0."""
    if tolerance and hasattr(want, "tolist"):
        want = torch.as_tensor(want)
        sizes = [want, *((answer.double() - want.double()) / ROUNDING for answer in others)]
        scale = max((float(abs(size[size.isfinite()]).max()) for size in sizes
                     if size.isfinite().any()), default=0.0)
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
        why = difference(got[key], want[key], tolerance, [answer[key] for answer in others],
                         (*where, key), scale)
        if why:
            return why
    return ""


def short(value: Any) -> str:
    """Return a value as text for a message: at most 120 characters, floats with six digits."""
    if hasattr(value, "tolist"):
        text = f"{list(value.shape)} {short(value.tolist())}"
    elif isinstance(value, list):
        text = f"[{', '.join(map(short, value))}]"
    elif inspect.isfunction(value):
        text = f"a function {value.__name__}"
    else:
        text = f"{value:,.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
