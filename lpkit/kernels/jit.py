"""Triton, where it is installed: it exists for Linux alone, and a kernel's file also holds its
definition, which everybody imports.

`jit` marks a kernel; without Triton it leaves a function that nobody launches. `INTERPRETED` says
that kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors. What that
interpreter converts wrongly `lpkit.kernels.interpreter` mends, so kernels are written for a GPU.

PyTorch and Triton execute again what they have compiled, from folders in /tmp that everybody knows.
So each place that compiles begins at `compiled`, `jit` or `keep_privately`: it is then kept in
folders of this user alone. A folder that the user chose must be such a one, or is refused.
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
except ImportError:     # the definition serves
    triton = tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret


# By device; or what the first, a variable, names
COMPILERS = {"cuda": ("CC", "gcc", "clang"), "cpu": ("CXX", "g++", "clang++")}
# What libraries keep to execute it again, by default in folders that everybody knows, /tmp's too.
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton",
          "CUTE_DSL_CACHE_DIR": "cute"}


def keep_privately() -> None:
    """Makes PyTorch and Triton keep what they compile, and execute again, in folders of this user
    alone, here and in processes that begin here. Raises ConfigError for a folder that he chose and
    in which another user could have planted what is executed; OSError."""
    by_torch = os.path.join(tempfile.gettempdir(), "torchinductor_")    # when it is imported
    for variable, room in CACHES.items():
        chosen = os.environ.get(variable)
        if not chosen or chosen.startswith(by_torch):
            chosen = own_cache(room)
        folder = private_folder(Path(chosen), by=variable)
        lockable(folder, by=variable)
        os.environ[variable] = str(folder)


def compiled(function: Callable, **how: Any) -> Callable:
    """torch.compile(function, **how), whose caches are this user's."""
    keep_privately()
    import torch
    from torch._inductor import codecache

    # the one thing that it keeps in /tmp whatever the variable says: headers, included when it
    # compiles for a CPU
    codecache._HEADER_DIR = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
    return torch.compile(function, **how)


def fresh(function: Callable) -> Callable:
    """It, with a code object of its own. PyTorch compiles one for eight shapes and runs the ninth
    eagerly, without a word; so each shape needs its own."""
    def one(*given: Any, **how: Any) -> Any:
        return function(*given, **how)

    one.__code__ = one.__code__.replace()
    return one


def jit(function: Callable) -> Callable:
    """triton.jit(function), whose first launch looks after its cache, or mends the interpreter."""
    if triton is None:
        return function
    kernel = triton.jit(function)

    def first(*given: Any, **how: Any) -> Any:
        if INTERPRETED:
            from lpkit.kernels.interpreter import mend_calls
            mend_calls()
        else:
            keep_privately()
        vars(kernel).pop("run", None)       # of two threads, one was first
        return kernel.run(*given, **how)

    kernel.run = first
    return kernel


def tiles(M: int, N: int, shape: Mapping[str, int]) -> tuple[int, int]:
    """Programs along both axes, where one takes the first two sides of `shape`."""
    down, across = list(shape.values())[:2]
    return triton.cdiv(M, down), triton.cdiv(N, across)


def why_no_triton() -> str:
    """The reason, in one clause; empty: Triton is there."""
    if triton is None:
        return "Triton is not installed (pip install 'triton>=3.6', on Linux)"
    return ""


def why_no_compiler(device: str) -> str:
    """The reason, in one clause; empty: a compiler is there. Triton's launchers for a GPU, and all
    that is generated for a CPU, are built where they run."""
    variable, *names = COMPILERS[device]
    names = os.environ.get(variable, "").split()[:1] or names
    if not any(map(shutil.which, names)):
        return f"there is no compiler here ({', '.join(names)}); install gcc and g++"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else f"there is no {header}; install python3-dev"
