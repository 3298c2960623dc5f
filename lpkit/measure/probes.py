"""A probe is the result of trying one technique on a device: the technique works, or the probe has
the reason and an alternative.

`examine` returns the doctor's report. It runs the checks of `lpkit.measure.doctor` in another
process, because a check may crash or hang. If a check takes too long, its process is killed, and a
new process runs the remaining checks. This module does not import torch, so that the facts that
need no torch are shown at once.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import psutil

from lpkit.errors import ConfigError
from lpkit.machine_facts import cores, cpu_flags, cpu_name, memory_limit_bytes, versions
from lpkit.processes import Children, new_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SECONDS = 10.0          # time limit of a check
START_SECONDS = 120.0   # time limit to import PyTorch on a busy machine
# messages of the ranks' supervisor (`lpkit.parallel.supervisor`) that mean a time limit
LATE = ("gave no sign of life for", "got no further for")
LIBRARIES = ("torch", "triton", "flash-attn", "transformer-engine", "torchao", "liger-kernel",
             "accelerate", "safetensors", "tokenizers", "transformers", "datasets", "jupyterlab",
             "ipywidgets", "plotly", "nbclient", "nvidia-ml-py", "numpy")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16",
                "amx_int8", "amx_fp16", "asimd", "bf16", "i8mm", "sve")


class UnavailableError(Exception):
    """A technique does not work on this machine. The message is the reason, for the user."""


@dataclass(frozen=True)
class Check:
    """One technique to try."""

    name: str
    kind: str               # section of the report: precision, attention, parallel, ...
    # takes the device and returns a detail in words; any exception is the reason of a failure
    run: Callable[[torch.device], str]
    nearest: str = ""       # the alternative if the technique does not work


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The outcome of a Check."""

    name: str
    kind: str
    works: bool | None      # None: unknown, because the check took too long
    detail: str = ""        # if it works: details such as the error
    why: str = ""           # if it does not work: the reason
    nearest: str = ""       # if it does not work: the alternative


def reason(error: Exception) -> str:
    """Return the first line of the error's message that is not empty, at most 200 characters."""
    lines = filter(None, map(str.strip, str(error).splitlines()))
    return next(lines, type(error).__name__)[:200]


def probe(check: Check, device: torch.device) -> Probe:
    """Run `check` on `device` and return its outcome. Every exception becomes a reason."""
    outcome = partial(Probe, name=check.name, kind=check.kind)
    try:
        with warnings.catch_warnings():
            # torch explains at length why something fails; `reason` takes the first line
            warnings.simplefilter("ignore")
            return outcome(works=True, detail=check.run(device))
    except Exception as error:
        late = isinstance(error, TimeoutError) or any(words in str(error) for words in LATE)
        # a reason may end with the alternative
        why, other = re.fullmatch(r"(.*?)(?:; ([\w-]+) can)?", reason(error)).groups()
        return outcome(works=None if late else False, nearest=other or check.nearest,
                     why="not measured in time: " * late + why)


def compare(what: str, got: Iterable[Tensor], want: Iterable[Tensor], limit: float) -> str:
    """Return the largest relative error of the tensors `got` against `want`, in words. If it is
    above `limit`, raise UnavailableError with a message that begins with `what`."""
    errors = []
    for a, b in zip(got, want, strict=True):
        a, b = a.detach().double().cpu(), b.detach().double().cpu()
        errors.append(float((a - b).norm() / b.norm()))
    if not all(error <= limit for error in errors):
        raise UnavailableError(f"{what}: relative error {', '.join(f'{e:.1e}' for e in errors)}")
    return f"relative error {max(errors):.0e}"


def facts() -> dict[str, Any]:
    """Return the facts that the operating system reports about this machine. Sizes are in bytes."""
    flags, memory, driver = cpu_flags(), psutil.virtual_memory(), Path("/sys/module/nvidia/version")
    return {"os": platform.platform(), "python": platform.python_version(), "cpu": cpu_name(),
            "cpu_features": [name for name in CPU_FEATURES if name in flags], "cores": cores(),
            "memory_bytes": memory.total, "memory_available_bytes": memory.available,
            "memory_limit_bytes": memory_limit_bytes(),
            "driver": driver.read_text().strip() if driver.exists() else None,
            "libraries": versions(LIBRARIES)}


def examine(show: Callable[[dict[str, Any]], object] = lambda part: None,
            **how: Any) -> dict[str, Any]:
    """Return the doctor's report, JSON-ready. `show` is called with each part of the report as soon
    as it is known. `how`: arguments of `answers`. In the report, `ceilings` and `chosen` are None
    if the speed was not measured in time."""
    report = {"machine": {}, "device": None, "probes": [], "ceilings": None, "chosen": None}
    for part in chain([{"machine": facts()}], answers(**how)):
        show(part)
        report["machine"].update(part.get("machine", {}))
        report["probes"] += part.get("probes", ())
        report |= {key: part[key] for key in ("device", "ceilings", "chosen") if key in part}
    return report


def answers(*, device: str = "", only: Iterable[str] | None = None, imports: Iterable[str] = (),
            seconds: float = SECONDS, module: str = "lpkit.measure.doctor"
            ) -> Iterator[dict[str, Any]]:
    """Yield the parts of the report that a process of `module` writes: first the device and the
    list `checks` (name, kind and alternative of each check), then a part for each check.

    device      the device to try; "": the device that a run uses
    only        names of the checks to run; None: all
    imports     files to import first, which may add rows
    seconds     time limit of a check

    A check that crashes its process fails. A check that takes longer than `seconds` is unknown. In
    both cases, a new process runs the remaining checks. Raises ConfigError if a process does not
    start.
    """
    # checks that have not been run yet; None: the first process has not listed them yet
    waiting: list[list[str]] | None = None
    while waiting is None or waiting:
        request = {"device": device, "imports": [*imports],
                "only": [check[0] for check in waiting] if waiting else only and [*only]}
        lines: SimpleQueue[str] = SimpleQueue()
        reader, writer = os.pipe()
        with Children().start(
                [sys.executable, "-W", "ignore", "-m", module, str(writer), json.dumps(request)],
                new_folder(), log="log", fds=[writer]) as keeper:
            os.close(writer)
            Thread(target=_read, args=(reader, lines), daemon=True).start()
            begun, works, why = False, False, ""
            try:
                part, begun = json.loads(lines.get(timeout=START_SECONDS)), True
                if waiting is None:
                    waiting = list(part["checks"])
                    yield part
                while waiting:
                    part = json.loads(lines.get(timeout=seconds))
                    waiting.pop(0)
                    yield part
            except Empty:
                works, why = None, f"not measured within {seconds if begun else START_SECONDS:g} s"
            except ValueError:      # not JSON: the process ended, perhaps in the middle of a line
                last = keeper.stdout.read().strip().rpartition("\n")[2]
                why = f"its process ended with exit code {keeper.wait()} {last}".strip()
        if not begun:
            raise ConfigError(f"the process that tests this machine did not start: {why}; run "
                              f"`{sys.executable} -c 'import torch'` to see the error")
        if waiting:     # the first of them crashed the process or took too long
            lost = dict(zip(("name", "kind", "nearest"), waiting.pop(0)))
            yield {"probes": [asdict(Probe(**lost, works=works, why=why))]}


def _read(reader: int, lines: SimpleQueue[str]) -> None:
    """Put the lines of a pipe into a queue, where waiting has a time limit; "" ends them."""
    with open(reader, encoding="utf-8") as file:
        for line in chain(file, [""]):
            lines.put(line)
