"""Choose which version of a kernel runs: time all correct versions once per machine, and take the
fastest. Such a comparison of times is called a race.

1. Each candidate is compared with the definition on this machine, forward and backward, on the
   kernel's examples and on small tensors of the current run (`at_hand`). A candidate that differs
   is refused, and the choice names it.
2. The other candidates and the definition are raced, forward and backward. If the blocks of the
   model are compiled, each candidate is raced inside of a compiled function.
3. The result is stored in a folder that only this user can write to. Its key consists of the
   machine, the limits of its processor, its driver, the versions of PyTorch and Triton, the
   kernel's source, the shapes, and whether blocks are compiled. If any of these changes, a new race
   is run. A race takes up to a minute on a GPU, so only few shapes are compiled.

A wrong kernel is worse than a slow kernel, because nobody sees that its numbers are wrong. So a
stored result is used only if this machine could produce it today: it must name the current
candidates, and its winner must be correct on an example, on `at_hand` and at the run's size.
Otherwise the result is ignored, and the choice gives the reason.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lpkit import records
from lpkit.contracts import Choice
from lpkit.errors import ConfigError, DamagedError, out_of_memory, pick, printable, shown
from lpkit.files import own_cache, private_folder, read_private, write_atomically
from lpkit.kernels import capture, jit
from lpkit.kernels.jit import INTERPRETED, why_no_compiler, why_no_triton
from lpkit.kernels.kernel import Kernel, Version, apart, difference, gradients_of
from lpkit.machine_facts import cpu_flags, cpu_limits, cpu_name, versions
from lpkit.timing import interleaved_seconds

REFERENCE, PYTORCH, COMPILE = "reference", "pytorch", "compile"
# Not compared with the definition: PyTorch's versions are widely used, but they round between
# operations, so they may differ from it.
TRUSTED = (REFERENCE, PYTORCH)
# Candidates are compared with these versions if the device has no memory for the definition.
PEERS = (PYTORCH, "sdpa")
ROUNDS, WARM_UP = 7, 1
# In a compiled block, a version must be this many times as fast as the compiled definition, which
# the compiler also fuses with neighbouring operations.
FUSES = 1.25
# If the first call of a candidate takes this many times as long as the fastest first call, the
# candidate is not timed again.
HOPELESS = 3.0
LIBRARIES = ("torch", "triton", "flash-attn")
RACED, MOST_BYTES = "raced", 1 << 20
WRONG = ("differs from its definition", "fails")
LACKS = "lacks memory now"      # free memory changes, so this reason is never stored
CALLS = 32          # calls of a version on `at_hand`: some versions are wrong only sometimes


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A choice. `refused`: the candidates that differ or cannot run here, each with its reason."""

    choice: Choice
    refused: Mapping[str, str]


def candidates(kernel: Kernel) -> dict[str, Version]:
    """Return the versions that are raced, by name: the definition, `kernel.versions`, and the
    definition compiled by torch.compile."""
    return {REFERENCE: kernel.definition, **kernel.versions,
            COMPILE: functools.partial(compiled, kernel.definition)}


def compiled(definition: Version, *arguments: Any, only: Collection[tuple] = ()) -> Any:
    """Return definition(*arguments), compiled for the shapes of these arguments.

    only: keys (`shapes`) that are compiled; empty: all. Other shapes run uncompiled, because each
    compilation takes seconds. Inside of another compiled function, the definition becomes a part of
    that function's graph.
    """
    if torch.compiler.is_compiling():
        return definition(*arguments)
    key = shapes(arguments)
    return (definition if only and key not in only else _compiled(definition, key))(*arguments)


compiled.by_shape = True


@functools.cache
def _compiled(definition: Version, _: tuple) -> Version:
    return jit.compiled(jit.fresh(definition), dynamic=False)


def choose(name: str, kernel: Kernel, asked: str, at_hand: Sequence[tuple], *,
           offered: Mapping[str, Version] | None = None, raced: Sequence[tuple] | None = None,
           within_seconds: float = math.inf, setting: str = "system.kernels",
           definition: str = "", in_block: bool = False, captured: bool = False,
           cache: Path | None = None) -> Chosen:
    """Choose the version of a kernel. Errors name the option `setting`, and call the definition
    `definition`.

    name:     the kernel's name
    asked:    "auto", or the name of a version
    at_hand:  argument tuples with few tokens, on which candidates are compared with the definition
    offered:  the candidates by name, the definition first; None: `candidates(kernel)`
    raced:    argument tuples of a training step's size, which are timed; None: `at_hand`
    within_seconds: time limit of the race, which has at least one round
    in_block: a compiled block calls the kernel, so each candidate is compiled before it is timed
    captured: a CUDA graph contains the kernel, so the host's time to launch it is not measured
    cache:    folder of stored results; None: the user's cache
    Raises ConfigError for an unknown version, and for a requested version that differs or cannot
    run here.
    """
    offered = offered or candidates(kernel)
    raced = at_hand if raced is None else raced
    if asked != "auto":
        pick(offered, asked, f"version of the kernel {name}")
        if why := (why_not(asked, at_hand)
                   or _wrong_anywhere(kernel, asked, offered, at_hand, raced)):
            raise ConfigError(f"{setting}={asked}: {name} {why}; set {setting}="
                              f"{definition or next(iter(offered))}")
        # no race: the requested version was compared with the definition just now
        return Chosen(refused={}, choice=Choice(asked=asked, used=asked,
                                                why="requested, and verified here"))
    key = _key(name, kernel, offered, raced, in_block, captured)
    path = (cache or own_cache(RACED)) / f"{key}.json"
    record, passed_over = None, ""
    try:
        private_folder(path.parent)
        record = _kept(path)
        _check(record, kernel, offered, at_hand, raced)
    except FileNotFoundError:       # there is no record yet
        pass
    except (OSError, ConfigError) as error:
        record, passed_over = None, f"; an earlier record was not used: {error}"
    if record is None:
        if _device(at_hand).type == "cuda":
            print(f"lpkit: {name}: verifies and times {', '.join(offered)}, once for this "
                  f"machine", file=sys.stderr, flush=True)
        record = _find(kernel, offered, at_hand, raced, within_seconds, in_block, captured)
        # If a candidate lacked memory, the record is not stored, because memory may be free next
        # time. If the record cannot be written, the next run races again.
        if not any(why.startswith(LACKS) for why in record["refused"].values()):
            with contextlib.suppress(OSError, ConfigError):
                private_folder(path.parent)
                write_atomically(path, records.sealed(record), 0o600)
    seconds: dict[str, float] = record["seconds"]
    used, fastest = _winner(seconds, in_block), min(seconds, key=seconds.__getitem__)
    where = ("in a compiled block" if in_block else "here") + ", in a CUDA graph" * captured
    why = f"the fastest of {', '.join(seconds)} {where}, and verified"
    if used != fastest:
        why = (f"{fastest} alone is less than {FUSES} times as fast {where}, and the compiler also "
               f"fuses {used} with other operations; verified")
    if len(seconds) == 1:
        why = "no other version runs here"
    if record["refused"]:
        why += "; not " + "; not ".join(
            f"{key}: {reason}" for key, reason in record["refused"].items())
    return Chosen(refused=record["refused"],
                  choice=Choice(asked=asked, used=used, why=why + passed_over))


def version(offered: Mapping[str, Version], used: str, raced: Sequence[tuple]) -> Version:
    """Return the version `used` of `offered`. The version COMPILE is compiled only for the shapes
    of `raced`; other shapes run uncompiled."""
    call = offered[used]
    return functools.partial(call, only=frozenset(map(shapes, raced))) if used == COMPILE else call


def _find(kernel: Kernel, offered: Mapping[str, Version], at_hand: Sequence[tuple],
          raced: Sequence[tuple], within_seconds: float, in_block: bool = False,
          captured: bool = False) -> dict:
    """Compare all candidates with the definition, and time the correct candidates. Return a record:
    "seconds" by candidate, and "refused", the reason for each other candidate. Raises ConfigError
    if no candidate is correct."""
    refused, right = {}, {}
    for key, call in offered.items():
        why = why_not(key, at_hand)
        if not why and in_block and key in TRUSTED and not why_not(COMPILE, at_hand):
            why = "in a compiled block it becomes the same code as compile"
        if not why and key == COMPILE and kernel.exact and not in_block:
            why = "compiling takes seconds for each operand, so it is used only by name"
        if not why and key not in (*TRUSTED, COMPILE) and call is not kernel.definition:
            why = wrong(kernel, call, at_hand)
        if why:
            refused[key] = why
        else:
            right[key] = call
    if len(right) == 1:
        return {"seconds": dict.fromkeys(right, 0.0), "refused": refused}
    if in_block:
        kernel, raced, right = _as_in_a_block(kernel, raced, right)
    runners, seconds, known = {}, {}, (kernel.definition, *right.values())
    for key, call in right.items():
        step = functools.partial(_step, kernel, call, raced)
        runners[key] = functools.partial(_waited, step, _device(raced))
        try:
            problems = (_unlike(kernel, call, known, arguments) for arguments in raced)
            if problem := next(filter(None, problems), ""):
                refused[key] = f"{WRONG[0]}: {problem}"
                continue
            if captured:
                runners[key]()      # compiles, which must not happen during capture
                run, _ = capture.captured(step)
                runners[key] = functools.partial(_waited, run, _device(raced))
            [[seconds[key]]] = interleaved_seconds([runners[key]], rounds=1, warm_up=0)
        except Exception as error:
            refused[key] = _failed(error, "cannot be compiled with a block" if in_block else "")
    # No candidate could be timed (for example, each lacked memory). Use the first candidate that
    # does not differ from the definition.
    if not seconds:
        usable = [key for key in right if not refused[key].startswith(WRONG[0])]
        if not usable:
            raise ConfigError("no version is right on this machine: " + "; ".join(
                f"{key}: {why}" for key, why in refused.items()))
        del refused[first := COMPILE if in_block and COMPILE in usable else usable[0]]
        return {"seconds": {first: 0.0}, "refused": refused}
    close = [key for key, duration in seconds.items()
             if duration <= HOPELESS * min(seconds.values())]
    times = interleaved_seconds([runners[key] for key in close], rounds=ROUNDS, warm_up=WARM_UP,
                                shuffle=True, within_seconds=within_seconds)
    seconds |= dict(zip(close, map(statistics.median, times), strict=True))
    return {"seconds": seconds, "refused": refused}


def _winner(seconds: Mapping[str, float], in_block: bool) -> str:
    """Return the fastest candidate, or in a compiled block COMPILE, unless the fastest candidate is
    FUSES times as fast."""
    fastest = min(seconds, key=seconds.__getitem__)
    close = in_block and seconds.get(COMPILE, math.inf) <= FUSES * seconds[fastest]
    return COMPILE if close else fastest


def _as_in_a_block(kernel: Kernel, raced: Sequence[tuple], right: Mapping[str, Version]
                   ) -> tuple[Kernel, list[tuple], dict[str, Version]]:
    """Return a kernel, one argument tuple and compiled versions that make all calls of `raced` at
    once. Each version is compiled into one graph without graph breaks. So a kernel needs only two
    or three compilations, however many calls are raced; more would make a first start too slow."""
    ends = list(itertools.accumulate(map(len, raced)))
    begins = [0, *ends[:-1]]

    def whole(call: Version) -> Version:
        def calls(*given: Any) -> tuple[torch.Tensor, ...]:
            results = [call(*given[begin:end]) for begin, end in zip(begins, ends, strict=True)]
            return tuple(t for outputs in results
                         for t in (outputs if isinstance(outputs, tuple) else (outputs,)))

        return calls

    places = tuple(begin + place for begin in begins for place in kernel.gradients)
    compiles = {key: jit.compiled(jit.fresh(whole(call)), dynamic=False, fullgraph=True)
                for key, call in right.items()}
    return (replace(kernel, definition=whole(kernel.definition), gradients=places),
            [tuple(itertools.chain(*raced))], compiles)


def _unlike(kernel: Kernel, call: Version, known: Iterable[Version], arguments: tuple) -> str:
    """Return how `call` differs, at a step's size, from the first version of `known` for which this
    device has enough memory; "" if it does not differ."""
    for other in known:
        if other is call:
            break
        try:
            want = gradients_of(kernel, other, arguments)
        except Exception as error:
            if not out_of_memory(error):
                raise
            continue
        return apart(kernel, gradients_of(kernel, call, arguments), want)
    return ""


def _wrong_anywhere(kernel: Kernel, key: str, offered: Mapping[str, Version],
                    at_hand: Sequence[tuple], raced: Sequence[tuple],
                    examples: int | None = None) -> str:
    """Return why the candidate `key` is wrong on `at_hand` or on `raced`, or "". The versions in
    TRUSTED are not compared. A candidate is not compared on `raced` if the device has too little
    memory, or in Triton's interpreter, which would take minutes."""
    call = offered[key]
    if key in TRUSTED or call is kernel.definition:
        return ""
    why = wrong(kernel, call, at_hand, examples)
    if why or raced is at_hand or (key == "triton" and INTERPRETED):
        return why
    known = (kernel.definition, *(offered[peer] for peer in PEERS if peer in offered))
    try:
        problems = (_unlike(kernel, call, known, arguments) for arguments in raced)
        problem = next(filter(None, problems), "")
    except Exception as error:
        return "" if out_of_memory(error) else _failed(error)
    return f"{WRONG[0]}: {problem}" if problem else ""


def why_not(version: str, at_hand: Sequence[tuple]) -> str:
    """Return why `version` is no candidate on this device, in one clause, or ""."""
    on_cpu = _device(at_hand).type == "cpu"
    if version == "triton" and (why := why_no_triton()):
        return why
    if version in ("triton", COMPILE) and not on_cpu:
        return why_no_compiler("cuda")
    if version == "cpu" and not on_cpu:
        return "is for a CPU"
    if version == COMPILE and on_cpu:
        return "a CPU fuses little, and compiling takes seconds"
    return "needs a GPU" if version == "triton" and not INTERPRETED and on_cpu else ""


def wrong(kernel: Kernel, call: Version, at_hand: Sequence[tuple],
          examples: int | None = None) -> str:
    """Return why `call` is wrong, or "".

    examples: how many of the kernel's examples are tried; None: all examples, and CALLS calls for
    each argument tuple of `at_hand`. An example is skipped if the version refuses it by a
    ConfigError. A version that is compiled for each shape is another program for each shape, so it
    is tried only on `at_hand`.
    """
    draw = torch.Generator().manual_seed(0)
    drawn: Iterable[tuple] = kernel.examples(draw, _device(at_hand))
    if getattr(getattr(call, "func", call), "by_shape", False):
        drawn = ()
    calls = CALLS if examples is None else 1
    for times, some in ((1, itertools.islice(drawn, examples)), (calls, at_hand)):
        for arguments in some:
            try:
                if problem := difference(kernel, call, arguments, times):
                    return f"{WRONG[0]}: {problem}"
            except Exception as error:
                if some is at_hand or not isinstance(error, ConfigError):
                    return _failed(error)
    return ""


def _failed(error: Exception, cannot: str = "") -> str:
    """Return the reason that is recorded for an error: its kind, and its first line."""
    what = str(error).partition("\n")[0][:200]
    if isinstance(error, ConfigError):
        return f"cannot: {what}"
    lacks = out_of_memory(error)
    return f"{LACKS if lacks else cannot or WRONG[1]}: {type(error).__name__}: {what}"


def _step(kernel: Kernel, call: Version, raced: Sequence[tuple]) -> None:
    for arguments in raced:
        gradients_of(kernel, call, arguments)


def _waited(step: Callable[[], None], device: torch.device) -> None:
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()


def _device(calls: Sequence[tuple]) -> torch.device:
    return next(a.device for a in calls[0] if torch.is_tensor(a))


def _kept(path: Path) -> dict:
    """Return a stored record. Raises DamagedError, a ConfigError, if it does not have the form that
    this module writes, and OSError if it cannot be read."""
    record = records.unsealed(read_private(path, MOST_BYTES), path)
    forms = {"seconds": lambda s: isinstance(s, float) and 0 <= s < math.inf,
             "refused": lambda why: isinstance(why, str) and why == printable(why)}
    for part, of_form in forms.items():
        if not isinstance(record.get(part), dict) or not all(map(of_form, record[part].values())):
            raise DamagedError(f"its part {part!r} is {shown(record.get(part))}")
    return record


def _check(record: dict, kernel: Kernel, offered: Mapping[str, Version],
           at_hand: Sequence[tuple], raced: Sequence[tuple]) -> None:
    """Raise DamagedError for a record that this machine would not write today."""
    seconds, refused = record["seconds"], record["refused"]
    if not seconds or sorted([*seconds, *refused]) != sorted(offered):
        raise DamagedError(f"it is of {shown(', '.join([*seconds, *refused]))}, and the candidates "
                           f"are {', '.join(offered)}")
    for key in seconds:
        if why := why_not(key, at_hand):
            raise DamagedError(f"it has raced {key}, which {why}")
    # The fastest candidate had to be correct, whether or not blocks are compiled.
    winner = min(seconds, key=seconds.__getitem__)
    if winner != COMPILE and (
            why := _wrong_anywhere(kernel, winner, offered, at_hand, raced, examples=1)):
        raise DamagedError(f"its winner, {winner}, {why}")


def refused_here() -> dict[str, dict[str, str]]:
    """Return the versions that were wrong on this machine: reasons by kernel and version. The
    "version" `the record` has the reason why the stored result of a race is ignored."""
    reasons: dict[str, dict[str, str]] = {}
    for path in sorted(own_cache(RACED).glob(f"*-{_machine()}-*.json")):
        name = path.name.partition(f"-{_machine()}-")[0]
        try:
            refused = _kept(path)["refused"]
        except (OSError, ConfigError) as error:
            refused = {"the record": f"{WRONG[1]}: {error}"}
        for version, why in refused.items():
            if why.startswith(WRONG):
                reasons.setdefault(name, {})[version] = why
    return reasons


def _key(name: str, kernel: Kernel, offered: Mapping[str, Version],
         raced: Sequence[tuple], in_block: bool, captured: bool = False) -> str:
    facts = (_source(kernel.definition, *offered.values()), list(offered), list(map(shapes, raced)),
            torch.get_num_threads(), in_block, captured)
    return f"{name}-{_machine()}-{_short(facts)}"


def shapes(arguments: tuple) -> tuple:
    """Return a key of arguments: shape, dtype, strides and device of tensors; other arguments as
    they are."""
    return tuple((tuple(a.shape), str(a.dtype), a.stride(), a.device.type) if torch.is_tensor(a)
                 else shapes(a) if isinstance(a, tuple) else a for a in arguments)


def _machine() -> str:
    """Return a digest of the machine, its libraries, and whether it can compile for a GPU."""
    machine: list[Any] = [cpu_name(), *sorted(cpu_flags()), *cpu_limits()]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties()
        machine += [gpu.name, gpu.major, gpu.minor, torch.version.cuda, _driver(),
                    why_no_compiler("cuda")]
    return _short((machine, versions(LIBRARIES)))


def _short(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


@functools.cache
def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""


def _source(*calls: Callable) -> str:
    """Return digests of the files that define these functions, and their keyword arguments."""
    files = {inspect.getsourcefile(inspect.unwrap(getattr(call, "func", call))) for call in calls}
    keywords = repr([getattr(call, "keywords", {}) for call in calls])
    return keywords + "".join(hashlib.sha256(Path(file).read_bytes()).hexdigest()
                          for file in sorted(files))
