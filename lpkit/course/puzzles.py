"""Puzzles: exercises whose answer is a Triton kernel, and how one is judged.

A puzzle is a definition in PyTorch, a kernel that is right, and how it is launched. The learner's
kernel is text: what stands in the cell goes into a file, is made a kernel there (`triton.jit` where
it was not said) and runs in a process of its own (`lpkit.course.kernel_process`), in Triton's
interpreter, and where there is a GPU compiled as well. Nothing else of the notebook goes with it:
a kernel sees `tl` and the functions of `lpkit.course.kernel_parts`.
"""

import ast
import importlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lpkit import processes
from lpkit.course.judge import Exercise, Verdict, source_of, to_do
from lpkit.kernels.defects import defects
from lpkit.machine_facts import versions

SECONDS = 30.0          # for one attempt
COMPILED_SECONDS = 120.0    # the same on a GPU, where each block size is compiled
START_SECONDS = 60.0    # until torch and Triton are there, on a busy machine
ELEMENTS = 1 << 16      # on which bytes are counted
DRAWN = 4               # random cases: an interpreter takes a millisecond for each operation
# what no kernel has written yet, as bits: a NaN where there is one
UNTOUCHED = {torch.float32: 0x7FC0BEEF, torch.uint8: 0x7F, torch.int16: 0x7FC1,
             torch.int32: 0x7FC0BEEF}
DIFFERS = ("the interpreter accepts it, and compiled it is not right (a GPU rounds `/` and tl.dot "
           "of float32 otherwise, unless one says tl.div_rn and input_precision='ieee'):")
# sentences of the interpreter's self-test that may explain a wrong number, by what a kernel names
TOUCHED = {"float8e4": ("E4M3",), "float8e5": ("E5M2",), "bfloat16": ("bf16",)}


def __getattr__(name: str) -> Any:
    """`tl` for the annotations of a stub: Triton's, or a stand-in where there is no Triton."""
    if name != "tl":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("triton.language")
    except ImportError:
        return SimpleNamespace(constexpr=int)


class Launch:
    """How a kernel is called: its arguments by name, tensors and numbers. `out`, some of them: with
    what is in them before, in the order of what the definition returns."""

    def __init__(self, *grid: int, out: Mapping[str, Tensor], **given: Any):
        self.grid, self.out, self.arguments = grid, out, {**given, **out}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.arguments.items() if isinstance(one, Tensor)}


def bits(x: Tensor) -> Tensor:
    """A view as integers."""
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What nobody has written to yet."""
    empty = torch.empty(shape, dtype=dtype)
    bits(empty).fill_(UNTOUCHED[dtype])
    return empty


@dataclass(frozen=True, kw_only=True)
class Puzzle(Exercise):
    """`spec` takes a case and returns a tensor or a tuple of them; `mistakes` are small edits of
    the right kernel: (old, new) by what to say to who makes them."""

    kernel: Callable[..., None]
    launch: Callable[..., Launch]
    large: Callable[[int], tuple] | None = None     # a case of about so many elements, to measure
    mistakes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    once: tuple[str, ...] = ("x",)      # tensors that are to be read no more than once
    flops: Callable[..., float] | None = None       # of a case, where arithmetic is the limit
    drawn: int = DRAWN
    tolerance: float = 0.0

    @property
    def answer(self) -> Callable[..., None]:
        return self.kernel

    def mistaken(self) -> dict[str, str]:
        """The sources of the known mistakes, by hint."""
        return {hint: self.solution.replace(*edit) for hint, edit in self.mistakes.items()}

    def judged(self, attempt: Callable[..., Any]) -> Verdict:
        """Never raises, whatever the attempt does, and does not wait for ever."""
        source = as_text(self, getattr(attempt, "fn", attempt))
        if isinstance(source, Verdict):
            return source
        if versions(["triton"])["triton"] is None:
            return Verdict("to do", defects()[0], self.solution)
        found = run([(self.name, source)])[0]
        said = [found["detail"]]
        if found["status"] == "right":
            found = run([(self.name, source)], compiled=True, seconds=COMPILED_SECONDS)[0]
            said = [DIFFERS, found["detail"]] if found["status"] == "wrong" else \
                [", ".join(filter(None, (*said, found["detail"])))]
        if found["status"] == "to do":
            return to_do(self)
        if found["status"] == "wrong":
            said += [f"Not your fault, perhaps: {sentence}." for word, about in TOUCHED.items()
                     if word in source for sentence in defects()
                     if any(one in sentence for one in about)]
        return Verdict(found["status"], " ".join(said), self.solution)


def as_text(exercise: Exercise, attempt: Callable[..., Any]) -> str | Verdict:
    """The source of an attempt that leaves this process; or why it does not."""
    try:
        source = source_of(attempt)
        function, = ast.parse(source).body
        if not isinstance(function, ast.FunctionDef):
            raise TypeError("it is no function")
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        return Verdict("wrong", f"write it as a function in a cell: {error}", exercise.solution)
    body = [node for node in function.body if not isinstance(node, ast.Expr)]   # its docstring
    stub = len(body) == 1 and isinstance(body[0], ast.Raise)
    return to_do(exercise) if stub else source


def moved(kernels: Sequence[tuple[str, Callable]],
          elements: int = ELEMENTS) -> list[dict[str, tuple[float, float]]]:
    """What each (name of the puzzle, kernel) reads and writes of each tensor, in bytes for each of
    its first tensor's elements, as the interpreter's loads and stores are counted. Empty where a
    kernel does not run, or nothing was counted."""
    if versions(["triton"])["triton"] is None:
        return [{} for _ in kernels]
    found = run([(name, source_of(kernel)) for name, kernel in kernels], elements=elements)
    return [{name: tuple(both) for name, both in one.get("moved", {}).items()} for one in found]


def run(attempts: Sequence[tuple[str, str]], *, compiled: bool = False, seconds: float = SECONDS,
        elements: int = 0) -> list[dict[str, Any]]:
    """What became of each (name of the puzzle, source of a kernel): `status` and `detail`; where
    `elements` are asked for, `moved`, as above. `seconds` are for each of them."""
    reader, writer = os.pipe()
    job = {"attempts": [{"puzzle": name, "source": source} for name, source in attempts],
           "compiled": compiled, "seconds": seconds, "elements": elements, "fd": writer}
    folder = processes.new_folder()
    env = {**os.environ, "TRITON_INTERPRET": "0" if compiled else "1", "OMP_NUM_THREADS": "1",
           "TRITON_CACHE_DIR": str(folder / "cache")}
    keeper = processes.Children().start(
        [sys.executable, "-P", "-m", "lpkit.course.kernel_process", folder / "job.json"], folder,
        files={"job.json": job}, log="log", env=env, fds=[writer])
    os.close(writer)
    with keeper:
        said, _ = heard(reader, START_SECONDS + (seconds + 1) * len(attempts))
        processes.end(keeper)
        log = keeper.stdout.read()
    found = [json.loads(line) for line in said.splitlines(keepends=True) if line.endswith(b"\n")]
    why = (log.strip() or "nothing").splitlines()[-1]
    missing = {"status": "wrong", "detail": f"its process did not start; it said: {why}"}
    return found + [missing] * (len(attempts) - len(found))


def heard(reader: int, seconds: float) -> tuple[bytes, bool]:
    """What a pipe says until its other end closes, and whether it did within `seconds`; closes
    it."""
    said, deadline = b"", time.monotonic() + seconds
    with open(reader, "rb", buffering=0) as pipe:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([pipe], [], [], left)[0]:
                if not (more := pipe.read(1 << 16)):
                    return said, True
                said += more
    return said, False
