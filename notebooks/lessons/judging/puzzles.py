"""Puzzles: exercises whose answer is a Triton kernel, and the way to judge them.

A puzzle has a definition in PyTorch, a right kernel, and a launch. The text of the learner's cell
is written to a file, made a kernel there (by `triton.jit`, if the cell does not) and run in a
separate process (`lessons.judging.attempts`), in Triton's interpreter and, if there is a GPU,
compiled as well (`lessons.judging.kernel_process`). Only this text leaves the notebook: a kernel
can use `tl` and the functions of `lessons.judging.kernel_parts`.
"""

import ast
import importlib
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lessons.judging.attempts import Answer, Attempt, asked, is_stub, limit_memory, text_of
from lessons.judging.defects import DOES_NOT_RUN, defects
from lessons.judging.judge import Exercise, Verdict, short, source_of, to_do
from lessons.judging.launches import UNTOUCHED, Launch, bits
from lpkit.machine_facts import versions

SECONDS = 30.0          # for one attempt
COMPILED_SECONDS = 120.0    # for one attempt on a GPU, where each block size is compiled
ELEMENTS = 1 << 16      # elements for counting bytes
DRAWN = 4               # random cases; the interpreter takes a millisecond per operation
DIFFERS = ("it is right in the interpreter and wrong when compiled (a GPU rounds `/` and tl.dot of "
           "float32 differently; use tl.div_rn and input_precision='ieee' to round alike):")
# defects of the interpreter that may explain a wrong number, by a word in the kernel's source
TOUCHED = {"float8e4": ("E4M3",), "float8e5": ("E5M2",), "bfloat16": ("bf16",)}


def __getattr__(name: str) -> Any:
    """Return `tl` for the annotations of a stub: Triton's language, or a substitute if Triton is
    not installed."""
    if name != "tl":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("triton.language")
    except ImportError:
        return SimpleNamespace(constexpr=int)


def triton() -> ModuleType:
    """Return the module that runs kernels. Raises ImportError without Triton."""
    return importlib.import_module("lessons.judging.kernel_process")


@dataclass(frozen=True, kw_only=True)
class Puzzle(Exercise):
    """`spec` takes a case and returns a tensor or a tuple of tensors; `mistakes` are small edits of
    the right kernel: (old, new) by the hint for learners who make this mistake."""

    kernel: Callable[..., None]
    launch: Callable[..., Launch]
    large: Callable[[int], tuple] | None = None     # a case of about n elements, for measurements
    mistakes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    once: tuple[str, ...] = ("x",)      # tensors that should be read only once
    flops: Callable[..., float] | None = None       # of a case, if arithmetic limits the kernel
    drawn: int = DRAWN
    tolerance: float = 0.0

    @property
    def answer(self) -> Callable[..., None]:
        return self.kernel

    def mistaken(self) -> dict[str, str]:
        """Return the sources of the known mistakes, by hint."""
        return {hint: self.solution.replace(*edit) for hint, edit in self.mistakes.items()}

    def prepare(self) -> None:
        triton()

    def judged(self, attempt: Callable[..., Any]) -> Verdict:
        source = as_text(self, getattr(attempt, "fn", attempt))
        if isinstance(source, Verdict):
            return source
        if versions(["triton"])["triton"] is None:
            return Verdict("to do", defects()[0], self.solution, untried=True)
        result = run([(self.name, source)])[0]
        details = [result["detail"]]
        if result["status"] == "right":
            result = run([(self.name, source)], compiled=True, seconds=COMPILED_SECONDS)[0]
            details = [DIFFERS, result["detail"]] if result["status"] == "wrong" else \
                [", ".join(filter(None, (*details, result["detail"])))]
        if result["status"] == "to do" and not result["detail"]:
            return to_do(self)
        if result["status"] == "wrong":
            touched = [fmt for word, formats in TOUCHED.items() if word in source
                       for fmt in formats]
            for sentence in defects():
                why = sentence.partition(DOES_NOT_RUN)[2]
                if any(fmt in sentence for fmt in touched) or (why and why in result["detail"]):
                    details.append(f"Not your fault, perhaps: {sentence}.")
        return Verdict(result["status"], " ".join(details), self.solution)

    def outcome(self, job: Mapping[str, Any], hung_up: int) -> dict[str, Any]:
        """Run the kernel of a job and return its finding, in the judge's process. With `elements`
        in the job, the finding is `moved`, the bytes per element; else `status` and `detail`."""
        counted, compiled = job["elements"], job["compiled"]
        cases = [self.large(counted)] if counted else list(self.all_cases())
        work = partial(_by_triton, self, cases, job["source"], compiled)
        with Attempt(work, job["seconds"], hung_up) as attempt:
            answers = list(attempt)
            printed = attempt.printed
        if counted:
            return {"moved": _for_each(answers[0], cases[0])}
        if any(answer.to_do for answer in answers):
            return {"status": "to do", "detail": ""}
        if compiled and isinstance(answers[0].value, str):      # compiled without a GPU, not run
            return {"status": "right", "detail": answers[0].value}
        both = zip_longest(cases, answers[:len(cases)], fillvalue=answers[-1])
        for turn, (case, answer) in enumerate(both):
            if why := self._why_not(answer, case):
                if not compiled and (mine := self._solution_fails(case, turn)):
                    return {"status": "to do", "detail": f"Triton's interpreter failed, not your "
                            f"kernel: a solution fails, too, for {_case(self, case)}: {mine}"}
                hint = "" if compiled else self._hint(cases, answers)
                return {"status": "wrong", "detail": f"for {_case(self, case)}: {why}"
                                                     f"{hint and f'; {hint}'}{printed}"}
        if compiled:
            return {"status": "right", "detail": answers[len(cases)].value or ""}
        if not self.large or self.flops:
            return {"status": "right", "detail": ""}
        case, answer = max(zip(cases, answers), key=lambda both: both[0][0].numel())
        each = sum(map(sum, _for_each(answer, case).values()))
        return {"status": "right", "detail": f"its loads and stores move {each:.3g} bytes per "
                                             f"element ({case[0].numel()} elements)"}

    def _why_not(self, answer: Answer, case: tuple) -> str:
        return answer.why + answer.line or difference(answer.value["left"], self, case)

    def _solution_fails(self, case: tuple, turn: int) -> str:
        """Return why the solution fails (then the interpreter is wrong); empty if it passes."""
        kernel = triton().load(self.solution)
        return self._why_not(triton().run(kernel, self, case, turn=turn), case)

    def _hint(self, cases: Sequence[tuple], answers: Sequence[Answer]) -> str:
        """Return the hint for a known mistake that gives the attempt's answers in every case."""
        for hint, source in self.mistaken().items():
            theirs = triton().answers(self, cases, source, False)
            if len(answers) >= len(cases) and all(
                    same(answer, other, self.tolerance) for answer, other in zip(answers, theirs)):
                return hint
        return ""


def as_text(exercise: Exercise, attempt: Callable[..., Any]) -> str | Verdict:
    """Return the source of an attempt, without decorators and with the line numbers of its cell;
    or a verdict that says why there is none. Only this text leaves the notebook's process."""
    try:
        text, function = text_of(attempt)
        if not isinstance(function, ast.FunctionDef):
            raise TypeError("it is not a function")
        defaults = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
        if any(not isinstance(default, ast.Constant) for default in defaults):
            raise TypeError("a default must be a number or text, since only the function's text is "
                            "sent to the process where it runs")
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        return Verdict("wrong", f"write it as a function in a cell: {error}", exercise.solution)
    lines, first = text.splitlines(), len(text) - len(text.lstrip("\n"))
    ahead = first + function.lineno - 1
    return to_do(exercise) if is_stub(function) else "\n" * ahead + "\n".join(lines[ahead:])


def moved(kernels: Sequence[tuple[str, Callable]],
          elements: int = ELEMENTS) -> list[dict[str, tuple[float, float]]]:
    """Return the bytes that each (name of the puzzle, kernel) reads and writes, by tensor and per
    element of the first tensor, counted in the interpreter's loads and stores. Empty for a kernel
    that does not run or is not counted."""
    if versions(["triton"])["triton"] is None:
        return [{} for _ in kernels]
    results = run([(name, source_of(kernel)) for name, kernel in kernels], elements=elements)
    return [{name: tuple(both) for name, both in result.get("moved", {}).items()}
            for result in results]


def run(attempts: Sequence[tuple[str, str]], *, compiled: bool = False, seconds: float = SECONDS,
        elements: int = 0) -> list[dict[str, Any]]:
    """Return the result of each (name of the puzzle, source of a kernel): `status` and `detail`;
    if `elements` is given, `moved`, as in the function `moved`. `seconds` are per kernel."""
    env = {"TRITON_INTERPRET": "0" if compiled else "1"}
    return [asked(name, seconds, env, source=source, compiled=compiled, elements=elements)
            for name, source in attempts]


def _by_triton(puzzle: Puzzle, cases: Sequence[tuple], source: str,
               compiled: bool) -> Iterator[Answer]:
    """Yield the kernel's answers, in the attempt's process."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    if not compiled:                # a GPU's driver reserves terabytes of addresses
        limit_memory()
    yield from triton().answers(puzzle, cases, source, compiled)


def _for_each(answer: Answer, case: tuple) -> dict[str, list[float]]:
    """Return bytes read and written by tensor, per element of the first tensor; empty if the
    kernel did not run."""
    moved = answer.value["moved"] if answer.value else {}
    return {name: [n / case[0].numel() for n in both] for name, both in moved.items()}


# The judge's comparison of the tensors that a kernel has written.

def _wrong(got: Tensor, want: Tensor, tolerance: float) -> Tensor:
    """Return a bool tensor that is True where `got` differs from `want`. With a tolerance of 0, and
    for integers, bits must be equal; any NaN equals any NaN."""
    if not tolerance or not want.is_floating_point():
        return ~((bits(got) == bits(want)) | (got.isnan() & want.isnan()))
    finite = want[want.isfinite()]
    near = tolerance * (finite.abs().max() if finite.numel() else 0)
    return ~got.isclose(want, rtol=tolerance, atol=float(near), equal_nan=True)


def same(answer: Answer, other: Answer, tolerance: float) -> bool:
    """Whether two answers have the same outputs, or the same reason why they have none."""
    if answer.why or other.why:
        return answer.why == other.why
    left, others = answer.value["left"], other.value["left"]
    return not any(_wrong(left[name], others[name], tolerance).any() for name in left)


def difference(left: Mapping[str, Tensor], puzzle: Puzzle, case: tuple) -> str:
    """Return a message about the first wrong element of the outputs `left`: its index, its value
    and the right value; empty if all elements are right."""
    want = puzzle.spec(*case)
    wanted = want if isinstance(want, tuple) else (want,)
    for (name, got), want in zip(left.items(), wanted, strict=True):
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            return (f"{name} is a {got.dtype} tensor of shape {tuple(got.shape)}, not {want.dtype} "
                    f"of shape {tuple(want.shape)}")
        if (wrong := _wrong(got, want, puzzle.tolerance)).any():
            at = tuple(wrong.nonzero()[0].tolist())
            value = _value(got[at])
            if bits(got[at]).item() == UNTOUCHED[got.dtype]:
                value = "not written" if got.dtype != torch.uint8 else \
                    f"{value}: NaN, or not written"
            return (f"{name}[{', '.join(map(str, at))}] should be {_value(want[at])} and is {value}"
                    f" ({int(wrong.sum())} of {wrong.numel()} are wrong)")
    return ""


def _value(x: Tensor) -> str:
    if x.dtype == torch.uint8:
        return f"0x{x.item():02X}"
    return f"{x.item():.6g}"


def _case(puzzle: Puzzle, case: tuple) -> str:
    """Return a case for a message: "x=(64, 8), n=3"; small tensors are written out."""
    def shape_or_value(value: Any) -> str:
        if not isinstance(value, Tensor) or value.numel() <= 6:
            return short(value)
        strided = "" if value.is_contiguous() else f", strides {tuple(value.stride())}"
        return f"{tuple(value.shape)}{strided}"

    named = zip(inspect.signature(puzzle.spec).parameters, case, strict=True)
    return ", ".join(f"{name}={shape_or_value(value)}" for name, value in named)
