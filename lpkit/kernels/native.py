"""C kernels, compiled on first use by the system's compiler and kept in the user's cache.

`load("cast")` compiles lpkit/kernels/cast.c into a shared library and opens it with ctypes. None where that cannot be
done; `choice("cast")` says what happened.
"""

from __future__ import annotations

import ctypes
import functools

from lpkit.contracts import Choice


@functools.cache
def _opened(name: str) -> tuple[ctypes.CDLL | None, Choice]:
    return None, Choice(asked="native", used="torch", why="no C kernel yet")


def load(name: str) -> ctypes.CDLL | None:
    return _opened(name)[0]


def choice(name: str) -> Choice:
    return _opened(name)[1]
