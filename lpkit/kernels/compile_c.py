"""C kernels, compiled on first use by the system's compiler and kept in the user's cache.

`load("cast")` compiles lpkit/kernels/cast.c into a shared library and opens it with ctypes. Where
that fails it returns None, and `choice("cast")` says what happened and why. Nothing raises: the
caller has the same numbers in PyTorch.

A library's name is a hash of its source, the flags, the compiler's version and the processor, so an
old one is never met. It is written under another name and moved: two processes that compile at once
leave one whole file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
from pathlib import Path

from lpkit.contracts import Choice
from lpkit.files import cache_dir, whole_file
from lpkit.machine_facts import cpu_facts

COMPILERS = ("cc", "gcc", "clang")
# No contraction: a multiply-add rounds once where the definition rounds twice.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC")
ATTEMPTS = {    # the first that compiles is taken; not every compiler knows every flag
    "for this processor, with OpenMP": ("-march=native", "-fopenmp"),
    "for this processor, without OpenMP and so on one thread": ("-march=native",),
    "for this kind of processor, without OpenMP and so on one thread": (),
}
SECONDS = 120                       # for one compilation


def load(name: str) -> ctypes.CDLL | None:
    """The library of `name`.c in this folder."""
    return _opened(name)[0]


def choice(name: str) -> Choice:
    return _opened(name)[1]


@functools.cache
def _opened(name: str) -> tuple[ctypes.CDLL | None, Choice]:
    return open_library(Path(__file__).with_name(f"{name}.c"), cache_dir("kernels"))


def open_library(source: Path, cache: Path,
                 compilers: tuple[str, ...] = COMPILERS) -> tuple[ctypes.CDLL | None, Choice]:
    """Open the library of `source`, from `cache` or newly compiled."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        return None, _torch(f"there is no C compiler here ({', '.join(compilers)}); install one, "
                            f"for example gcc")
    try:
        text, version = source.read_text(), _version(compiler)
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        for how, more in ATTEMPTS.items():
            key = "\0".join((text, *FLAGS, *more, version, _processor()))
            path = cache / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
            why = f"compiled by {version} {how}"
            if not path.exists():
                why = _compile([compiler, *FLAGS, *more, str(source), "-lm"], path) or why
            if path.exists():
                return ctypes.CDLL(str(path)), Choice(asked="native", used="native", why=why)
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    return None, _torch(f"{compiler}: {why}")


def _torch(why: str) -> Choice:
    return Choice(asked="native", used="torch", why=why)


def _compile(command: list[str], path: Path) -> str:
    """Leave `path` whole, or say in one line why not."""
    try:
        with whole_file(path) as temporary:
            subprocess.run([*command, "-o", str(temporary)], capture_output=True, text=True,
                           timeout=SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        return (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[0]
    return ""


@functools.cache
def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True,
                          timeout=SECONDS)
    return (done.stdout.strip().splitlines() or [compiler])[0]


def _processor() -> str:
    """What -march=native depends on."""
    facts = cpu_facts()
    keys = ("model name", "flags", "Features", "CPU part")
    known = (facts.get(key, "") for key in keys)
    return " ".join([platform.machine(), platform.processor(), *known])
