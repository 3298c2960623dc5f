"""Which version of a kernel runs here: those that compute the same are raced, once for a machine.

First each candidate is held against the definition on this machine, forward and backward, on the
kernel's own examples and on the tensors at hand. One that differs is refused, and is named. Those
that pass are raced forward and backward, with the definition among them. What was found is kept in
the user's cache, under the machine, its driver, the versions of PyTorch and Triton, the kernel's
source and the shapes at hand; another of any of these, and it is found out anew.

A wrong backend is worse than a slow one, and its numbers look like numbers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lpkit import records
from lpkit.contracts import Choice
from lpkit.errors import ConfigError, pick
from lpkit.files import cache_dir
from lpkit.kernels.jit import INTERPRETED, why_no_triton
from lpkit.kernels.kernel import Kernel, Version, difference, gradients_of
from lpkit.machine_facts import cpu_flags, cpu_name, versions
from lpkit.timing import interleaved_seconds

REFERENCE, PYTORCH, COMPILE = "reference", "pytorch", "compile"
TRUSTED = (REFERENCE, PYTORCH)    # what everybody trains with is rounded in between
ROUNDS, WARM_UP = 7, 1
HOPELESS = 3.0      # times the fastest, after one call each: raced no further
LIBRARIES = ("torch", "triton", "flash-attn", "flash-attn-4", "flash_attn_3", "transformer-engine")
WRONG = ("differs from its definition", "fails")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """`refused`: why, by the names of candidates that differ or cannot run here."""

    call: Version
    choice: Choice
    refused: Mapping[str, str]


def candidates(kernel: Kernel) -> dict[str, Version]:
    return {REFERENCE: kernel.definition, **kernel.versions,
            COMPILE: lambda *arguments: compiled(kernel.definition)(*arguments)}


@functools.cache        # to compile imports much, and not before it is called
def compiled(definition: Version) -> Version:
    return torch.compile(definition, dynamic=False)


def choose(name: str, kernel: Kernel, asked: str, arguments: tuple, *,
           offered: Mapping[str, Version] | None = None, raced: tuple | None = None,
           within_seconds: float = math.inf, setting: str = "system.kernels",
           definition: str = "", cache: Path | None = None) -> Chosen:
    """The version for `arguments`, tensors like those of a step. asked: "auto" or a version's name,
    by `setting`, where `definition` is the definition's.

    offered:  the candidates, the definition first; None: the kernel's.
    raced:    arguments of the race, which takes `within_seconds` or one round; None: `arguments`.
    Raises ConfigError for an unknown version, and for one that differs or cannot run here.
    """
    offered = offered or candidates(kernel)
    raced = arguments if raced is None else raced
    if asked != "auto":
        call = pick(offered, asked, f"version of the kernel {name}")
        why = why_not(asked, arguments)
        if why or (asked not in TRUSTED and (why := wrong(kernel, call, arguments))):
            raise ConfigError(f"{setting}={asked}: {name} {why}; the nearest that is right: "
                              f"{definition or next(iter(offered))}")
        return Chosen(call=call, refused={},
                      choice=Choice(asked=asked, used=asked, why="asked for, and verified here"))
    path = (cache or cache_dir("kernels-raced")) / f"{_key(name, kernel, offered, raced)}.json"
    found = _kept(path)
    if found is None:
        found = _find(kernel, offered, arguments, raced, within_seconds)
        with contextlib.suppress(OSError):      # no room, or read-only: found out anew next time
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            records.write(path, found)
    seconds: dict[str, float] = found["seconds"]
    used = min(seconds, key=seconds.__getitem__)
    why = f"the fastest of {', '.join(seconds)} here, and verified"
    if len(seconds) == 1:
        why = "nothing else runs here"
    if found["refused"]:
        why += "; not " + "; not ".join(f"{key}: {said}" for key, said in found["refused"].items())
    return Chosen(call=offered[used], refused=found["refused"],
                  choice=Choice(asked=asked, used=used, why=why))


def _find(kernel: Kernel, offered: Mapping[str, Version], arguments: tuple, raced: tuple,
          within_seconds: float) -> dict:
    refused, right = {}, {}
    for key, call in offered.items():
        why = why_not(key, arguments)
        if not why and key not in TRUSTED and call is not kernel.definition:
            why = wrong(kernel, call, arguments)
        if why:
            refused[key] = why
        else:
            right[key] = call
    if len(right) == 1:
        return {"seconds": dict.fromkeys(right, 0.0), "refused": refused}
    runners, seconds = {}, {}
    for key, call in right.items():
        runners[key] = functools.partial(_step, kernel, call, raced)
        try:        # what is right on small tensors may not fit
            runners[key]()
            [[seconds[key]]] = interleaved_seconds([runners[key]], rounds=1, warm_up=0)
        except Exception as error:
            refused[key] = _failed(error)
    close = [key for key, one in seconds.items() if one <= HOPELESS * min(seconds.values())]
    times = interleaved_seconds([runners[key] for key in close], rounds=ROUNDS, warm_up=WARM_UP,
                                shuffle=True, within_seconds=within_seconds)
    seconds |= dict(zip(close, map(statistics.median, times), strict=True))
    return {"seconds": seconds, "refused": refused}


def why_not(version: str, arguments: tuple) -> str:
    """Why `version` is no candidate on this device, in one clause, or empty."""
    on_cpu = _device(arguments).type == "cpu"
    if version == "triton":
        return why_no_triton() or ("needs a GPU" if on_cpu and not INTERPRETED else "")
    if version == "cpu" and not on_cpu:
        return "is for a CPU"
    if version == COMPILE and on_cpu:
        return "a CPU fuses little, and compiling takes seconds"
    return "needs a GPU" if version == "cuda" and on_cpu else ""


def wrong(kernel: Kernel, call: Version, arguments: tuple) -> str:
    """What is wrong with it on the examples and at hand; whatever it raises is wrong."""
    device = _device(arguments)
    examples: Iterable[tuple] = kernel.examples(torch.Generator().manual_seed(0), device)
    for example in itertools.chain(examples, [arguments]):
        try:
            if said := difference(kernel, call, example):
                return f"{WRONG[0]}: {said}"
        except Exception as error:
            return _failed(error)
    return ""


def _failed(error: Exception) -> str:
    return f"{WRONG[1]}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _step(kernel: Kernel, call: Version, arguments: tuple) -> None:
    gradients_of(kernel, call, arguments)
    if _device(arguments).type == "cuda":
        torch.cuda.synchronize()


def _device(arguments: tuple) -> torch.device:
    return next(a.device for a in arguments if torch.is_tensor(a))


def _kept(path: Path) -> dict | None:
    try:
        found = records.read(path)
    except (OSError, ConfigError):
        return None
    return found if {"seconds", "refused"} <= found.keys() else None


def refused_here() -> dict[str, dict[str, str]]:
    """Why, by kernel and version, of all that were tried on this machine and found wrong."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(cache_dir("kernels-raced").glob(f"*-{_machine()}-*.json")):
        for version, why in (_kept(path) or {"refused": {}})["refused"].items():
            if why.startswith(WRONG):
                found.setdefault(path.name.partition(f"-{_machine()}-")[0], {})[version] = why
    return found


def _key(name: str, kernel: Kernel, offered: Mapping[str, Version], arguments: tuple) -> str:
    shapes = [(tuple(a.shape), str(a.dtype), a.stride(), a.device.type) if torch.is_tensor(a) else a
              for a in arguments]
    said = (_source(kernel.definition, *offered.values()), list(offered), shapes,
            torch.get_num_threads())
    return f"{name}-{_machine()}-{_short(said)}"


def _machine() -> str:
    """With its libraries."""
    machine: list[Any] = [cpu_name(), *sorted(cpu_flags())]
    if torch.cuda.is_available():
        made = torch.cuda.get_device_properties()
        machine += [made.name, made.major, made.minor, torch.version.cuda, _driver()]
    return _short((machine, versions(LIBRARIES)))


def _short(said: object) -> str:
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


@functools.cache
def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""


def _source(*calls: Callable) -> str:
    """Of the files that they are in, and what they are told."""
    files = {inspect.getsourcefile(inspect.unwrap(getattr(one, "func", one))) for one in calls}
    told = repr([getattr(one, "keywords", {}) for one in calls])
    return told + "".join(hashlib.sha256(Path(one).read_bytes()).hexdigest()
                          for one in sorted(files))
