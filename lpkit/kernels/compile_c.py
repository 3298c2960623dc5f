"""C kernels, compiled on first use by the system's compiler, and stored in the user's cache.

`load("cast")` compiles lpkit/kernels/cast.c into a shared library and opens it with ctypes. If the
compilation fails, `load` returns None, and `choice("cast")` has the reason. `load` never raises,
because the caller can compute the same numbers in PyTorch.

The file name of a library contains two hashes. The first is the hash of the source, the flags, the
compiler's version and the processor. So an outdated library is never loaded. The second is the hash
of the library's content. So a truncated or changed library does not match its name, and is compiled
again. Each C file has a function `lp_check`, which tests the kernels. A library gets its name only
after `lp_check` has returned 0 in a separate process, where a crash does no harm.

Loading a library executes its code. So a library is refused if another user could have written it:
the file and its folder must belong to this user, and nobody else may be able to write or replace
them. Each user has a folder of their own, also if many users share a cache. The file stays open
between the check and the load, so that nobody can replace it in between.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lpkit.contracts import Choice
from lpkit.errors import ConfigError, printable
from lpkit.files import open_own, own_cache, private_folder, refuse_others, sha256, whole_file
from lpkit.machine_facts import cpu_facts

COMPILERS = ("cc", "gcc", "clang")
# No contraction to fused multiply-adds: such an instruction rounds once, but the definition, a
# multiplication and an addition, rounds twice.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC")
# The first of these sets of flags that compiles is used. Not every compiler supports every flag.
ATTEMPTS = {
    "for this processor, with OpenMP": ("-march=native", "-fopenmp"),
    "for this processor, without OpenMP and so on one thread": ("-march=native",),
    "for this kind of processor, without OpenMP and so on one thread": (),
}
CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).lp_check())"
SECONDS = 120                       # limit of one compilation
SECONDS_TO_ANSWER = 20              # limit of a version query, and of a library's check
MOST_SAID = 2**24                   # most bytes of output; a process that writes more is killed


def load(name: str, arguments: Mapping[str, Sequence[Any]] | None = None) -> ctypes.CDLL | None:
    """Return the library of `name`.c in this folder, or None if it cannot be compiled. `arguments`:
    the ctypes argument types of each function, as the C source declares them."""
    library = _opened(name)[0]
    for function, types in (arguments or {}).items() if library else ():
        getattr(library, function).argtypes, getattr(library, function).restype = types, None
    return library


def choice(name: str) -> Choice:
    """Return whether C ("native") or PyTorch ("torch") computes the kernels of `name`.c, and why.
    """
    return _opened(name)[1]


@functools.cache
def _opened(name: str) -> tuple[ctypes.CDLL | None, Choice]:
    return open_library(Path(__file__).with_name(f"{name}.c"), own_cache())


def open_library(source: Path, cache: Path,
                 compilers: tuple[str, ...] = COMPILERS) -> tuple[ctypes.CDLL | None, Choice]:
    """Return the library of `source`, from the folder `cache` or newly compiled, and the choice to
    record; None if it cannot be compiled."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        return None, _torch(f"there is no C compiler here ({', '.join(compilers)}); install one, "
                            f"for example gcc")
    try:
        text, version = source.read_text(), _version(compiler)
        private_folder(cache)
        for how, more in ATTEMPTS.items():
            key = "\0".join((text, *FLAGS, *more, version, _processor()))
            stem = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
            why = f"compiled by {version} {how}"
            library = _trusted(cache, stem)
            if library is None:
                command = [compiler, *FLAGS, *more, str(source), "-lm"]
                why = _compile(command, cache, stem) or why
                library = _trusted(cache, stem)
            if library is not None:
                return library, Choice(asked="native", used="native", why=why)
    except (OSError, ConfigError) as error:
        why = str(error)
    return None, _torch(f"{compiler}: {why}")


def _torch(why: str) -> Choice:
    return Choice(asked="native", used="torch", why=why)


# ---- which library may be loaded

def _trusted(cache: Path, stem: str) -> ctypes.CDLL | None:
    """Return the library of that name if its content matches its name. Raises ConfigError for a
    library that may not be loaded, and OSError."""
    for path in sorted(cache.glob(f"{stem}-*")):
        with open_own(path, "rb") as file:
            refuse_others(os.fstat(file.fileno()), path)
            if path.name == _named(stem, hashlib.file_digest(file, "sha256").hexdigest()):
                return _loaded(file, path)
    return None


def _named(stem: str, digest: str) -> str:
    return f"{stem}-{digest}.so"


def _loaded(file: IO, path: Path) -> ctypes.CDLL:
    # The descriptor is never closed. Otherwise its number could be reused, and for a name that it
    # knows, the loader returns the library that it loaded first.
    name = f"/proc/self/fd/{os.dup(file.fileno())}"
    return ctypes.CDLL(name if os.path.exists(name) else str(path))


# ---- compiling

def _compile(command: list[str], cache: Path, stem: str) -> str:
    """Store a library that passed its check in `cache`; otherwise return one line with the
    reason. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        library = Path(scratch, "made.so")
        wrong, output = _ran([*command, "-o", str(library)], SECONDS)
        if wrong:
            return next(iter(output), wrong)
        if not library.is_file():
            return "it reported success, but wrote no library"
        check = [sys.executable, "-I", "-S", "-c", CHECK, str(library)]
        wrong, output = _ran(check, SECONDS_TO_ANSWER)
        if wrong:
            return f"its library fails its check: {' '.join([wrong, *output[-1:]])}"
        # `whole_file` writes a temporary file and renames it, so another process sees the complete
        # file or no file.
        with whole_file(cache / _named(stem, sha256(library)), 0o600) as temporary:
            shutil.copyfile(library, temporary)
    return ""


@functools.cache
def _version(compiler: str) -> str:
    _, output = _ran([compiler, "--version"], SECONDS_TO_ANSWER, stderr=subprocess.DEVNULL)
    return next(iter(output), compiler)


def _ran(command: list[str], limit: float, *,
         stderr: int = subprocess.STDOUT) -> tuple[str, list[str]]:
    """Run a command. Return how it failed, or "", and the first lines of its output.

    The output goes to a file, not to a pipe: a pipe stays open until all child processes of the
    command have ended. Raises OSError for a command that takes more than `limit` seconds, or writes
    more than MOST_SAID bytes.
    """
    code, end, name = None, time.monotonic() + limit, Path(command[0]).name
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=stderr,
                                   start_new_session=True, env=os.environ | {"LC_ALL": "C"})
        try:
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.1)
                if os.fstat(out.fileno()).st_size > MOST_SAID:
                    raise OSError(f"{name} printed more than {MOST_SAID:,} bytes")
                if code is None and time.monotonic() > end:
                    raise TimeoutError(f"{name} did not end in {limit} seconds")
        finally:
            if code is None:        # kill the command and the processes that it started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        lines = out.read(2**16).decode(errors="replace").strip().splitlines()
    wrong = f"it died: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
    return wrong if code else "", [printable(line[:200]) for line in lines]


def _processor() -> str:
    """Return the facts on which -march=native depends."""
    facts = cpu_facts()
    keys = ("model name", "flags", "Features", "CPU part")
    known = (facts.get(key, "") for key in keys)
    return " ".join([platform.machine(), platform.processor(), *known])
