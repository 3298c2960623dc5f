"""The process in which a learner's kernels run: each in a fork of its own, which may loop, crash,
exit or eat memory, and is then a sentence.

    python -m lpkit.course.kernel_process JOB.json      # beside it the sources are written

Every tensor lies inside a larger one, whose margins are NaN (or very large) and are looked at
afterwards. Triton's interpreter reads and writes through `Memory`, which knows whose element each
address is, counts bytes, and sees the races that an interpreter hides, because it runs one program
after the other. The last line of standard output is JSON: a finding for each attempt.
"""

import ast
import contextlib
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

from lpkit.course.judge import short
from lpkit.course.kernel_exercises import PUZZLES
from lpkit.course.puzzles import UNTOUCHED, Launch, Puzzle, bits, heard

PRELUDE = """\
import triton
import triton.language as tl

from lpkit.course.kernel_parts import e2m1, e4m3, e4m3_value

"""
LARGE = 1 << 27                 # elements on which a GPU is timed
TARGET, NAME = GPUTarget("cuda", 90, 32), "an H100 (sm_90)"     # where there is no GPU
MARGIN = 64                     # elements around a tensor
NEAR_BYTES = 1 << 20            # within which a tensor is blamed for an address
MEMORY_BYTES = 1 << 30          # that an attempt may take
FILE_BYTES = 1 << 26            # that it may write: what it prints
SHOWN = 300                     # characters of what it printed


class FaultError(Exception):
    """What a kernel may not do, in words for a person."""


@dataclass
class Held:
    """A tensor in the midst of a larger one."""

    name: str
    whole: Tensor
    tensor: Tensor              # a view of it
    kept: Tensor                # what `whole` was before
    inside: np.ndarray          # bool, of `whole`: what belongs to the tensor
    is_output: bool
    owner: np.ndarray = field(init=False)       # of `whole`: which program wrote it last
    loaded_bytes: int = 0
    stored_bytes: int = 0

    def __post_init__(self):
        self.owner = np.full(len(self.inside), -1)

    def distance(self, address: int) -> int:
        start = self.whole.data_ptr()
        return max(start - address, address - start - self.whole.nbytes)

    def element(self, at: int) -> str:
        """Of an index into `whole`."""
        at, shape = at - MARGIN, list(self.tensor.shape)
        if len(shape) == 2 and at >= 0 and self.tensor.stride(1) == 1:
            row, column = divmod(at, max(self.tensor.stride(0), 1))
            return f"{self.name}[{row}, {column}]"
        return f"{self.name}[{at}]"


def hold(name: str, x: Tensor, *, outside: float, device: str, is_output: bool) -> Held:
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) \
        if x.numel() else 0
    whole = torch.empty(span + 2 * MARGIN, dtype=x.dtype, device=device)
    if x.is_floating_point() and not is_output:
        whole.fill_(outside)
    else:
        bits(whole).fill_(UNTOUCHED[x.dtype])
    view = whole.as_strided(x.shape, x.stride(), MARGIN)
    bits(view).copy_(bits(x))
    inside = torch.zeros(len(whole), dtype=torch.bool)
    inside.as_strided(x.shape, x.stride(), MARGIN).fill_(True)
    return Held(name, whole, view, whole.clone(), inside.numpy(), is_output)


class Memory:
    """In place of the interpreter's own loads and stores, for one launch."""

    def __init__(self, own: Any, held: Sequence[Held], builder: Any):
        self._own, self._held, self._builder = own, held, builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @property
    def program(self) -> tuple[int, ...]:
        dims = max((i + 1 for i, n in enumerate(self._builder.grid_dim) if n > 1), default=1)
        return self._builder.grid_idx[:dims]

    def _number(self) -> int:
        (x, y, z), (_, ny, nz) = self._builder.grid_idx, self._builder.grid_dim
        return (x * ny + y) * nz + z

    def _find(self, ptrs: np.ndarray, mask: np.ndarray, size: int,
              does: str) -> tuple[Held, np.ndarray, np.ndarray] | None:
        """Whose elements they are: the tensor, the addresses, the indices. Raises FaultError."""
        used = np.broadcast_to(ptrs, np.broadcast_shapes(ptrs.shape, mask.shape))[
            np.broadcast_to(mask, np.broadcast_shapes(ptrs.shape, mask.shape))].astype(np.int64)
        if not used.size:
            return None
        first = int(used[0])
        held = min(self._held, key=lambda one: one.distance(first))
        if held.distance(first) > NEAR_BYTES:
            raise FaultError(f"program {self._said()} {does} far outside of every tensor; an empty "
                             f"one has no address")
        at, rest = np.divmod(used - held.whole.data_ptr(), size)
        wrong = (at < 0) | (at >= len(held.inside)) | (rest != 0) | (size != held.whole.itemsize)
        wrong |= ~held.inside[np.clip(at, 0, len(held.inside) - 1)]
        if wrong.any():
            element, shape = held.element(int(at[wrong][0])), tuple(held.tensor.shape)
            raise FaultError(f"program {self._said()} {does} {element}, the first of "
                             f"{int(wrong.sum())} outside of a tensor of {shape}")
        return held, used, at

    def _said(self) -> str:
        return f"({', '.join(map(str, self.program))})"

    def load(self, ptrs: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> np.ndarray:
        if found := self._find(ptrs, mask, np.dtype(dtype).itemsize, "reads"):
            held, used, at = found
            held.loaded_bytes += used.size * held.whole.itemsize
            self._race(held, at, "reads")
        return self._own.load(ptrs, mask, other, dtype)

    def store(self, ptrs: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        if found := self._find(ptrs, mask, values.dtype.itemsize, "writes"):
            held, used, at = found
            if not held.is_output:
                raise FaultError(f"it writes to {held.element(int(at[0]))}, and {held.name} is not "
                                 f"its to write")
            held.stored_bytes += used.size * held.whole.itemsize
            before = held.whole[at].clone()
            stored = self._own.store(ptrs, values, mask)
            changed = (bits(before) != bits(held.whole[at])).numpy()
            self._race(held, at[changed], "writes")
            held.owner[at] = self._number()
            return stored
        return None

    def atomic_rmw(self, op: Any, ptrs: np.ndarray, values: np.ndarray, mask: np.ndarray,
                   *more: Any) -> np.ndarray:
        if found := self._find(ptrs, mask, values.dtype.itemsize, "writes"):
            found[0].stored_bytes += found[1].size * found[0].whole.itemsize
        return self._own.atomic_rmw(op, ptrs, values, mask, *more)

    def _race(self, held: Held, at: np.ndarray, does: str) -> None:
        others = at[(held.owner[at] >= 0) & (held.owner[at] != self._number())]
        if others.size:
            raise FaultError(f"program {self._said()} {does} {held.element(int(others[0]))}, which "
                             f"another program wrote: on a GPU they run at the same time")


@dataclass
class Outcome:
    """Of one launch: what it left, or what was wrong with how it ran."""

    left: Mapping[str, Tensor] = field(default_factory=dict)
    fault: str = ""
    line: str = ""              # of the attempt, where it happened
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)     # bytes read, written

    def same(self, other: "Outcome", tolerance: float) -> bool:
        if self.fault or other.fault:
            return self.fault == other.fault
        return not any(_wrong(self.left[name], other.left[name], tolerance).any()
                       for name in self.left)


def run(kernel: Any, puzzle: Puzzle, case: tuple, *, turn: int, device: str = "cpu") -> Outcome:
    """One launch. What is outside of a tensor is NaN in one turn and very large in the next."""
    launch = puzzle.launch(*case)
    outside = (math.nan, 3e38)[turn % 2]
    held = [hold(name, x, outside=outside, device=device, is_output=name in launch.out)
            for name, x in launch.tensors.items()]
    arguments = launch.arguments | {one.name: one.tensor for one in held}
    try:
        with watched(held) if device == "cpu" else contextlib.nullcontext():
            kernel[launch.grid](**arguments)
        if device != "cpu":
            torch.cuda.synchronize()
    except Exception as error:
        if isinstance(cause := _cause(error), NotImplementedError):
            raise cause from None
        if isinstance(cause, MemoryError):
            cause = FaultError(f"it took more than {MEMORY_BYTES >> 20} MB of memory")
        said = str(cause) if isinstance(cause, FaultError) else f"it raised {_words(cause)}"
        return Outcome(fault=said, line=_line(error))
    for one in held:
        changed = (bits(one.whole) != bits(one.kept)).cpu()
        changed &= ~torch.from_numpy(one.inside) if one.is_output else True
        if changed.any():
            element = one.element(int(changed.nonzero()[0]))
            why = "which is outside" if one.is_output else f"and {one.name} is not its to write"
            return Outcome(fault=f"it wrote to {element}, {why}")
    moved = {one.name: (one.loaded_bytes, one.stored_bytes) for one in held}
    for one in held:
        least = one.tensor.numel() * one.whole.itemsize
        if one.name in puzzle.once and one.loaded_bytes > least:
            return Outcome(fault=f"it reads {one.name} {one.loaded_bytes / least:.3g} times, and "
                                 f"once is enough")
    return Outcome({one.name: one.tensor.cpu() for one in held if one.is_output}, moved=moved)


@contextlib.contextmanager
def watched(held: Sequence[Held]) -> Iterator[None]:
    own = interpreter._interpreter
    interpreter._interpreter = Memory(own, held, interpreter.interpreter_builder)
    try:
        yield
    finally:
        interpreter._interpreter = own


def _cause(error: BaseException) -> BaseException:
    """What was raised in the kernel: the interpreter wraps it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _words(error: BaseException) -> str:
    """The line that says it: a compiler shows the source before."""
    lines = str(error).strip().splitlines() or ["no words"]
    return f"{type(error).__name__}: {lines[-1 if isinstance(error, CompilationError) else 0]}"


def _line(error: BaseException) -> str:
    """The line of the attempt in which it happened."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if Path(frame.filename).name.startswith("attempt_") and frame.line:
                return f", in `{frame.line.strip()}`"
        error = error.__cause__
    return ""


def _wrong(got: Tensor, want: Tensor, tolerance: float) -> Tensor:
    """Where they differ. A tolerance of 0, or whole numbers: the same bits."""
    if not tolerance or not want.is_floating_point():
        return ~((bits(got) == bits(want)) | (got.isnan() & want.isnan()))
    finite = want[want.isfinite()]
    near = tolerance * (finite.abs().max() if finite.numel() else 0)
    return ~got.isclose(want, rtol=tolerance, atol=float(near), equal_nan=True)


def difference(outcome: Outcome, puzzle: Puzzle, case: tuple) -> str:
    """The first coordinate that is wrong, what is there, what should be."""
    want = puzzle.spec(*case)
    wanted = want if isinstance(want, tuple) else (want,)
    for (name, got), want in zip(outcome.left.items(), wanted, strict=True):
        if (wrong := _wrong(got, want, puzzle.tolerance)).any():
            at = tuple(wrong.nonzero()[0].tolist())
            said = _value(got[at])
            if bits(got[at]).item() == UNTOUCHED[got.dtype]:
                said = "as it was: was it written?" if got.dtype != torch.uint8 else \
                    f"{said}: NaN, or never written"
            return (f"{name}[{', '.join(map(str, at))}] should be {_value(want[at])} and is {said}"
                    f" ({int(wrong.sum())} of {wrong.numel()} are wrong)")
    return ""


def _value(x: Tensor) -> str:
    if x.dtype == torch.uint8:
        return f"0x{x.item():02X}"
    return f"{x.item():.6g}" if x.is_floating_point() else f"{x.item()}"


def _case(puzzle: Puzzle, case: tuple) -> str:
    def one(value: Any) -> str:
        if not isinstance(value, Tensor) or value.numel() <= 6:
            return short(value)
        strided = "" if value.is_contiguous() else f", strides {tuple(value.stride())}"
        return f"{tuple(value.shape)}{strided}"

    named = zip(inspect.signature(puzzle.spec).parameters, case, strict=True)
    return ", ".join(f"{name}={one(value)}" for name, value in named)


def load(source: str, path: Path) -> Any:
    """The kernel: Triton wants its source in a file."""
    path.write_text(f"{PRELUDE}\n@triton.jit\n{source}\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, ast.parse(source).body[0].name)


def examine(attempt: Mapping[str, Any], folder: Path, number: int, compiled: bool) -> dict:
    """The finding on one attempt: status, detail. What moved is counted where it is interpreted;
    compiled, it says how fast it is on a GPU, and without one that it compiles."""
    puzzle = PUZZLES[attempt["puzzle"]]
    cases, moved = list(puzzle.all_cases()), {}
    try:
        kernel = load(attempt["source"], folder / f"attempt_{number}.py")
        if compiled and not torch.cuda.is_available():
            return {"status": "right", "detail": compiles(kernel, puzzle.launch(*cases[0]))}
        device = "cuda" if compiled else "cpu"
        for turn, case in enumerate(cases):
            outcome = run(kernel, puzzle, case, turn=turn, device=device)
            if why := outcome.fault + outcome.line or difference(outcome, puzzle, case):
                hint = "" if compiled else _hint(puzzle, kernel, cases, folder, number)
                return {"status": "wrong",
                        "detail": f"for {_case(puzzle, case)}: {why}{hint and f'; {hint}'}"}
            moved[case[0].numel()] = outcome.moved
        detail = ""
        if not compiled and puzzle.large and not puzzle.flops:
            most = max(moved)
            each = sum(map(sum, moved[most].values())) / most
            detail = f"on {most} elements its loads and stores are {each:.3g} bytes each"
        if compiled and puzzle.large:
            detail = speed(kernel, puzzle)
    except NotImplementedError:
        return {"status": "to do", "detail": ""}
    except Exception as error:
        return {"status": "wrong", "detail": f"it raised {_words(error)}{_line(error)}"}
    return {"status": "right", "detail": detail}


def count(attempt: Mapping[str, Any], folder: Path, number: int, elements: int) -> dict:
    """By tensor the bytes read and written, for each element of the first, on a case of about so
    many."""
    puzzle = PUZZLES[attempt["puzzle"]]
    case = puzzle.large(elements)
    kernel = load(attempt["source"], folder / f"attempt_{number}.py")
    return {"moved": {name: [n / case[0].numel() for n in both]
                      for name, both in run(kernel, puzzle, case, turn=0).moved.items()}}


def compiles(kernel: Any, launch: Launch) -> str:
    """What is to be said of it; this needs no GPU. Raises CompilationError."""
    given = launch.arguments
    fixed = {one.name: given[one.name] for one in kernel.params if one.is_constexpr}
    signature = {one.name: "constexpr" if one.is_constexpr else mangle_type(given[one.name])
                 for one in kernel.params}
    try:
        triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=TARGET)
    except CompilationError:
        raise
    except Exception as error:      # no assembler for that GPU here, for one
        return f"it was not compiled here ({type(error).__name__})"
    return f"and it compiles for {NAME}"


def _hint(puzzle: Puzzle, kernel: Any, cases: Sequence[tuple], folder: Path, number: int) -> str:
    """What to say to who makes a known mistake: the attempt does as it does, in every case."""
    @cache
    def mine(turn: int) -> Outcome:
        return run(kernel, puzzle, cases[turn], turn=turn)

    for i, (hint, source) in enumerate(puzzle.mistaken().items()):
        mistake = load(source, folder / f"mistake_{number}_{i}.py")
        if all(run(mistake, puzzle, case, turn=turn).same(mine(turn), puzzle.tolerance)
               for turn, case in enumerate(cases)):
            return hint
    return ""


def speed(kernel: Any, puzzle: Puzzle) -> str:
    """On a GPU: which share of the roofline it reaches, beside a copy and a product measured
    there."""
    case = puzzle.large(LARGE)
    launch = puzzle.launch(*case)
    tensors = {name: x.cuda() for name, x in launch.tensors.items()}
    least = sum(x.numel() * x.element_size() for x in tensors.values())

    def seconds(work: Callable[[], Any]) -> float:
        return 1e-3 * triton.testing.do_bench(work, return_mode="median")

    took = seconds(lambda: kernel[launch.grid](**launch.arguments | tensors))
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    roof = least * seconds(lambda: target.copy_(source)) / (2 * source.nbytes)
    said = f"{least / took / 1e9:,.0f} GB/s"
    if puzzle.flops:
        torch.set_float32_matmul_precision("high")
        x = torch.randn(4096, 4096, device="cuda")
        roof = max(roof, puzzle.flops(*case) * seconds(lambda: x @ x) / (2 * 4096**3))
        said = f"{puzzle.flops(*case) / took / 1e12:,.1f} TFLOP/s"
    return f"{said}, {roof / took:.0%} of the roofline"


def limited(attempt: Mapping[str, Any], folder: Path, number: int, job: Any) -> dict:
    """`examine` in a fork, which has `job.seconds` and MEMORY_BYTES."""
    reader, writer = os.pipe()
    printed = folder / f"printed_{number}"
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)
            os.close(reader)
            for stream in (1, 2):
                os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if not job.compiled:    # a GPU's driver takes addresses by the terabyte
                most = _address_bytes() + MEMORY_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            found = count(attempt, folder, number, job.elements) if job.elements else \
                examine(attempt, folder, number, job.compiled)
            told = json.dumps(found).encode()
            while told:
                told = told[os.write(writer, told):]
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writer)
    said, ended = heard(reader, job.seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if said.endswith(b"}"):
        found = json.loads(said)
    elif not ended:
        found = {"status": "wrong", "detail": f"it did not end within {job.seconds:.0f} s"}
    else:
        how = f" ({signal.Signals(-status).name})" if status < 0 else ""
        found = {"status": "wrong", "detail": f"it ended its process{how}"}
    words = printed.read_text(errors="replace").strip() if printed.exists() else ""
    if words and found.get("status") == "wrong":
        found["detail"] += f". It printed: {words[:SHOWN]}"
    return found


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(path: str) -> None:
    job = SimpleNamespace(**json.loads(Path(path).read_text()))
    np.seterr(all="ignore")
    warnings.simplefilter("ignore")
    for number, attempt in enumerate(job.attempts):
        found = limited(attempt, Path(path).parent, number, job)
        os.write(job.fd, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
