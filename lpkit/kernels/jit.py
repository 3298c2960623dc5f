"""Triton, where it is installed: it exists for Linux alone, and a kernel's file also holds its
definition, which everybody imports.

`jit` marks a kernel; without Triton it leaves a function that nobody launches. `INTERPRETED` says
that kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors. What that
interpreter converts wrongly `lpkit.kernels.interpreter` mends, so kernels are written for a GPU.
"""

from collections.abc import Callable, Mapping

try:
    import triton
    import triton.language as tl
except ImportError:     # the definition serves
    triton = tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret


def jit(function: Callable) -> Callable:
    return function if triton is None else triton.jit(function)


def tiles(M: int, N: int, shape: Mapping[str, int]) -> tuple[int, int]:
    """Programs along both axes, where one takes the first two sides of `shape`."""
    down, across = list(shape.values())[:2]
    return triton.cdiv(M, down), triton.cdiv(N, across)


def why_no_triton() -> str:
    """In one clause, or empty: it is there."""
    if triton is None:
        return "Triton is not installed (pip install triton, on Linux)"
    return ""
