"""Triton, if it is installed, and private folders for compiled code.

Triton exists only for Linux. The file of a kernel also contains its definition, so it must import
without Triton. `triton` and `tl` are then None, and a function under `@jit` is never launched.

`INTERPRETED`: kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors.
`lpkit.kernels.interpreter` corrects its errors, so kernels need no code for the interpreter.

PyTorch and Triton execute code that they compiled earlier. By default they store it in folders in
/tmp with known names, where another user could plant code. So all code that compiles goes through
`compiled`, `jit` or `keep_privately`, which use folders that only this user can write to. A folder
that the user chose is refused if others can write to it.
"""

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lpkit.files import lockable, own_cache, private_folder

try:
    import triton
    import triton.language as tl
except ImportError:     # the definition is used
    triton = tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret


# by device: the environment variable that names the compiler, and the compilers that are tried
COMPILERS = {"cuda": ("CC", "gcc", "clang"), "cpu": ("CXX", "g++", "clang++")}
# Environment variables of the folders whose content PyTorch and Triton execute, and the names of
# the private folders.
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton",
          "CUTE_DSL_CACHE_DIR": "cute"}


def keep_privately() -> None:
    """Make PyTorch and Triton store compiled code in folders that only this user can write to, in
    this process and in processes that it starts. Raises ConfigError if the user chose a folder in
    which another user could have planted code; OSError."""
    # PyTorch sets TORCHINDUCTOR_CACHE_DIR to this prefix and the user's name when it is imported.
    # Such a value is not a choice of the user.
    by_torch = os.path.join(tempfile.gettempdir(), "torchinductor_")
    for variable, room in CACHES.items():
        chosen = os.environ.get(variable)
        if not chosen or chosen.startswith(by_torch):
            chosen = own_cache(room)
        folder = private_folder(Path(chosen), by=variable)
        lockable(folder, by=variable)
        os.environ[variable] = str(folder)


def compiled(function: Callable, **how: Any) -> Callable:
    """Return torch.compile(function, **how), with caches that only this user can write to."""
    keep_privately()
    import torch
    from torch._inductor import codecache

    # PyTorch always stores precompiled headers in /tmp, and includes them when it compiles for a
    # CPU. So their folder is replaced, too.
    codecache._HEADER_DIR = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
    return torch.compile(function, **how)


def fresh(function: Callable) -> Callable:
    """Return a function that calls `function` and has a new code object. torch.compile compiles a
    code object for at most eight shapes, and silently runs other shapes eagerly. So each shape
    gets its own code object."""
    def call(*given: Any, **how: Any) -> Any:
        return function(*given, **how)

    call.__code__ = call.__code__.replace()
    return call


def jit(function: Callable) -> Callable:
    """Return triton.jit(function), or `function` without Triton. The first launch of the kernel
    moves the caches to private folders, or corrects the interpreter."""
    if triton is None:
        return function
    kernel = triton.jit(function)

    def first(*given: Any, **how: Any) -> Any:
        if INTERPRETED:
            from lpkit.kernels.interpreter import mend_calls
            mend_calls()
        else:
            keep_privately()
        vars(kernel).pop("run", None)       # another thread may have removed it already
        return kernel.run(*given, **how)

    kernel.run = first
    return kernel


def tiles(M: int, N: int, shape: Mapping[str, int]) -> tuple[int, int]:
    """Return the grid for a matrix (M, N): the numbers of programs along both axes. A program
    processes a tile whose sides are the first two values of `shape`."""
    down, across = list(shape.values())[:2]
    return triton.cdiv(M, down), triton.cdiv(N, across)


def why_no_triton() -> str:
    """Return the reason why Triton is not available, in one clause, or ""."""
    if triton is None:
        return "Triton is not installed (pip install 'triton>=3.6', on Linux)"
    return ""


def why_no_compiler(device: str) -> str:
    """Return the reason why there is no compiler, in one clause, or "". Triton's launchers for a
    GPU, and all code that is generated for a CPU, are compiled on this machine."""
    variable, *names = COMPILERS[device]
    names = os.environ.get(variable, "").split()[:1] or names
    if not any(map(shutil.which, names)):
        return f"there is no compiler here ({', '.join(names)}); install gcc and g++"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else f"there is no {header}; install python3-dev"
