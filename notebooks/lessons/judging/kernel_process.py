"""Runs a learner's kernel in the process of its attempt (`lessons.judging.attempts`).

Triton's interpreter reads and writes through `Memory`, which maps each address to a tensor's
element, counts bytes, and detects races, which the interpreter otherwise hides because it runs one
program after the other.
"""

import ast
import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

from lessons.judging import attempts
from lessons.judging.attempts import Answer, Parcel, line_of
from lessons.judging.judge import Exercise
from lessons.judging.kernel_parts import e2m1, e4m3, e4m3_value
from lessons.judging.launches import Held, Launch, bits
from lpkit.kernels.interpreter import mend_calls

LARGE = 1 << 27                 # elements of the timing on a GPU
TARGET, NAME = GPUTarget("cuda", 90, 32), "an H100 (sm_90)"     # used without a GPU
NEAR_BYTES = 1 << 20            # an address this close to a tensor is attributed to it


class FaultError(Exception):
    """Raised for a forbidden access of a kernel, with a message for the learner."""


class Memory:
    """Replaces the interpreter's loads and stores for one launch. `own`: the interpreter's object,
    which does the access; `held`: the launch's tensors; `builder`: knows the current program."""

    def __init__(self, own: Any, held: Sequence[Held], builder: Any):
        self._own, self._held, self._builder = own, held, builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def _number(self) -> int:
        """Return the number of the current program in the grid, from 0."""
        (x, y, z), (_, ny, nz) = self._builder.grid_idx, self._builder.grid_dim
        return (x * ny + y) * nz + z

    def _find(self, ptrs: np.ndarray, mask: np.ndarray, size: int,
              does: str) -> tuple[Held, np.ndarray, np.ndarray] | None:
        """Return the accessed tensor, and the addresses and indices of the accessed elements; None
        if the mask hides all of them. `size`: bytes of an element; `does`: the verb for messages.
        Raises FaultError for an access outside of every tensor."""
        ptrs, mask = np.broadcast_arrays(ptrs, mask)
        used = ptrs[mask].astype(np.int64)
        if not used.size:
            return None
        first = int(used[0])
        held = min(self._held, key=lambda tensor: tensor.distance(first))
        if held.distance(first) > NEAR_BYTES:
            raise FaultError(f"program {self._said()} {does} far outside of every tensor (an empty "
                             f"tensor has no address)")
        at, rest = np.divmod(used - held.whole.data_ptr(), size)
        wrong = (at < 0) | (at >= len(held.inside)) | (rest != 0) | (size != held.whole.itemsize)
        wrong |= ~held.inside[np.clip(at, 0, len(held.inside) - 1)]
        if wrong.any():
            element, shape = held.element(int(at[wrong][0])), tuple(held.tensor.shape)
            raise FaultError(f"program {self._said()} {does} {element}, outside of a tensor of "
                             f"shape {shape} (the first of {int(wrong.sum())} such elements)")
        return held, used, at

    def _said(self) -> str:
        """Return the current program's grid index for messages, without unused axes."""
        axes = max((i + 1 for i, n in enumerate(self._builder.grid_dim) if n > 1), default=1)
        return f"({', '.join(map(str, self._builder.grid_idx[:axes]))})"

    def load(self, ptrs: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> np.ndarray:
        if access := self._find(ptrs, mask, np.dtype(dtype).itemsize, "reads"):
            held, _, at = access
            held.loaded_bytes += np.unique(at).size * held.whole.itemsize
            self._race(held, at, "reads")
        return self._own.load(ptrs, mask, other, dtype)

    def store(self, ptrs: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        if access := self._find(ptrs, mask, values.dtype.itemsize, "writes"):
            held, used, at = access
            if not held.is_output:
                raise FaultError(f"it writes to {held.element(int(at[0]))}, and {held.name} is an "
                                 f"input")
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
        if access := self._find(ptrs, mask, values.dtype.itemsize, "writes"):
            access[0].stored_bytes += access[1].size * access[0].whole.itemsize
        return self._own.atomic_rmw(op, ptrs, values, mask, *more)

    def _race(self, held: Held, at: np.ndarray, does: str) -> None:
        """Raise FaultError if another program has written one of the elements at indices `at`."""
        others = at[(held.owner[at] >= 0) & (held.owner[at] != self._number())]
        if others.size:
            raise FaultError(f"program {self._said()} {does} {held.element(int(others[0]))}, which "
                             f"another program wrote: on a GPU, both run at the same time")


def run(kernel: Any, puzzle: Exercise, case: tuple, *, turn: int, device: str = "cpu") -> Answer:
    """Launch the kernel once and return its outputs, or why they do not count. Memory around the
    inputs is NaN if `turn` is even and very large if it is odd, so an output that depends on it
    differs from the definition in one of two cases."""
    np.seterr(all="ignore")
    warnings.simplefilter("ignore")
    launch = puzzle.launch(*case)
    outside = (math.nan, 3e38)[turn % 2]
    held = [Held.of(name, x, outside=outside, device=device, is_output=name in launch.out)
            for name, x in launch.tensors.items()]
    arguments = launch.arguments | {tensor.name: tensor.tensor for tensor in held}
    try:
        with watched(held, outside) if device == "cpu" else contextlib.nullcontext():
            kernel[launch.grid](**arguments)
        if device != "cpu":
            torch.cuda.synchronize()
    except Exception as error:
        return _raised(error)
    once = [tensor for tensor in held if tensor.name in puzzle.once]
    for why in (*(tensor.trespass() for tensor in held), *(tensor.read_again() for tensor in once)):
        if why:
            return Answer(why=why)
    return Answer({
        "left": {tensor.name: tensor.tensor.cpu() for tensor in held if tensor.is_output},
        "moved": {tensor.name: (tensor.loaded_bytes, tensor.stored_bytes) for tensor in held}})


@contextlib.contextmanager
def watched(held: Sequence[Held], outside: float) -> Iterator[None]:
    """Route the interpreter's accesses through `Memory` within the block. `outside`: the value of
    masked loads without `other`."""
    mend_calls()
    own, builder = interpreter._interpreter, interpreter.interpreter_builder
    load = builder.create_masked_load

    def masked(ptrs: Any, mask: Any, other: Any, *more: Any) -> Any:
        """Load `outside` for masked elements without `other`, since they are undefined on a GPU;
        the interpreter would load 0, which hides the mistake."""
        if other is None:
            dtype = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty()))
            fill = outside if dtype.kind == "f" else np.iinfo(dtype).max
            other = interpreter.TensorHandle(np.full(ptrs.data.shape, fill, dtype),
                                             ptrs.get_element_ty())
        return load(ptrs, mask, other, *more)

    interpreter._interpreter, builder.create_masked_load = Memory(own, held, builder), masked
    try:
        yield
    finally:
        interpreter._interpreter = own
        del builder.create_masked_load      # restores the method of the class


def _raised(error: BaseException) -> Answer:
    """Return the answer of a kernel that raised `error`."""
    cause = error
    while cause.__cause__ is not None:      # the interpreter wraps the kernel's exception
        cause = cause.__cause__
    lines = str(cause).strip().splitlines() or ["no message"]
    # a compiler shows the source before its message
    words = f"{type(cause).__name__}: {lines[-1 if isinstance(cause, CompilationError) else 0]}"
    return replace(Answer.raised(cause, str(cause) if isinstance(cause, FaultError) else
                                 f"it raised {words}"), line=line_of(error))


def load(source: str) -> Any:
    """Return the kernel that a source defines, compiled by `triton.jit`."""
    name = ast.parse(source).body[0].name
    known = {"triton": triton, "tl": tl, "e2m1": e2m1, "e4m3": e4m3, "e4m3_value": e4m3_value}
    return triton.jit(attempts.load(Parcel(entry=name, texts={name: source}), **known))


def answers(puzzle: Exercise, cases: Sequence[tuple], source: str,
            compiled: bool) -> Iterator[Answer]:
    """Yield the outputs of the kernel for each case, with the moved bytes if it is interpreted. If
    `compiled`, one more answer is the speed on a GPU; without a GPU, the only answer says that the
    kernel compiles."""
    try:
        kernel = load(source)
        if compiled and not torch.cuda.is_available():
            yield Answer(compiles(kernel, puzzle.launch(*cases[0])))
            return
        for turn, case in enumerate(cases):
            yield run(kernel, puzzle, case, turn=turn, device="cuda" if compiled else "cpu")
        if compiled:
            yield Answer(speed(kernel, puzzle) if puzzle.large else "")
    except Exception as error:
        yield _raised(error)


def compiles(kernel: Any, launch: Launch) -> str:
    """Compile the kernel, which needs no GPU, and return the end of a message that says so. Raises
    CompilationError if Triton rejects the kernel."""
    given = launch.arguments
    fixed = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
    signature = {param.name: "constexpr" if param.is_constexpr else mangle_type(given[param.name])
                 for param in kernel.params}
    try:
        triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=TARGET)
    except CompilationError:
        raise
    except Exception as error:      # for example, the assembler for that GPU is missing
        return f"it was not compiled here ({type(error).__name__})"
    return f"and it compiles for {NAME}"


def speed(kernel: Any, puzzle: Exercise) -> str:
    """Return the kernel's speed on a GPU and its share of the roofline, as text. The roofline is
    measured with a copy (bytes per second) and a matmul (FLOP/s)."""
    case = puzzle.large(LARGE)
    launch = puzzle.launch(*case)
    tensors = {name: x.cuda() for name, x in launch.tensors.items()}
    least = sum(x.numel() * x.element_size() for x in tensors.values())     # each byte moves once

    def seconds(work: Callable[[], Any]) -> float:
        return 1e-3 * triton.testing.do_bench(work, return_mode="median")

    took = seconds(lambda: kernel[launch.grid](**launch.arguments | tensors))
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    roof = least * seconds(lambda: target.copy_(source)) / (2 * source.nbytes)
    rate = f"{least / took / 1e9:,.0f} GB/s"
    if puzzle.flops:
        torch.set_float32_matmul_precision("high")
        x = torch.randn(4096, 4096, device="cuda")
        roof = max(roof, puzzle.flops(*case) * seconds(lambda: x @ x) / (2 * 4096**3))
        rate = f"{puzzle.flops(*case) / took / 1e12:,.1f} TFLOP/s"
    return f"{rate}, {roof / took:.0%} of the roofline"
