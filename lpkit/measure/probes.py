"""A probe tries one thing on a device: it works, or there is a reason and an alternative.

`examine` makes the doctor's report. `lpkit.measure.doctor` tries everything in another process,
since a probe may crash or hang. A probe that takes too long is killed, and the next process tries
the rest. This module does not import torch, so that facts without torch are known at once.
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

SECONDS = 10.0          # time limit of a probe
START_SECONDS = 120.0   # time limit to import PyTorch, while other processes may run
LATE = ("gave no sign of life for", "got no further for")       # words of the ranks' supervisor
LIBRARIES = ("torch", "triton", "flash-attn", "transformer-engine", "torchao", "liger-kernel",
             "accelerate", "safetensors", "tokenizers", "transformers", "datasets", "jupyterlab",
             "ipywidgets", "plotly", "nbclient", "nvidia-ml-py", "numpy")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16",
                "amx_int8", "amx_fp16", "asimd", "bf16", "i8mm", "sve")


class UnavailableError(Exception):
    """The tried thing does not work here. The message is the reason, for the user."""


@dataclass(frozen=True)
class Check:
    """One thing to try. `run(device) -> detail`; any exception is the reason why it fails."""

    name: str
    kind: str
    run: Callable[[torch.device], str]
    nearest: str = ""       # the alternative if it does not work


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The outcome of a Check."""

    name: str
    kind: str
    works: bool | None      # None: not measured in time
    detail: str = ""        # how it works
    why: str = ""           # why it does not work
    nearest: str = ""       # the alternative


def reason(error: Exception) -> str:
    """Return the first line of the message that is not empty."""
    lines = filter(None, map(str.strip, str(error).splitlines()))
    return next(lines, type(error).__name__)[:200]


def probe(check: Check, device: torch.device) -> Probe:
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
    """Return the largest relative error. Raises UnavailableError with `what` above `limit`."""
    errors = []
    for a, b in zip(got, want, strict=True):
        a, b = a.detach().double().cpu(), b.detach().double().cpu()
        errors.append(float((a - b).norm() / b.norm()))
    if not all(error <= limit for error in errors):
        raise UnavailableError(f"{what}: relative error {', '.join(f'{e:.1e}' for e in errors)}")
    return f"relative error {max(errors):.0e}"


def facts() -> dict[str, Any]:
    """Return what the system reports about this machine. Sizes are bytes."""
    flags, memory, driver = cpu_flags(), psutil.virtual_memory(), Path("/sys/module/nvidia/version")
    return {"os": platform.platform(), "python": platform.python_version(), "cpu": cpu_name(),
            "cpu_features": [name for name in CPU_FEATURES if name in flags], "cores": cores(),
            "memory_bytes": memory.total, "memory_available_bytes": memory.available,
            "memory_limit_bytes": memory_limit_bytes(),
            "driver": driver.read_text().strip() if driver.exists() else None,
            "libraries": versions(LIBRARIES)}


def examine(show: Callable[[dict[str, Any]], object] = lambda part: None,
            **how: Any) -> dict[str, Any]:
    """Return the doctor's report, JSON-ready. `show` gets each part of the report as soon as it is
    known. `ceilings` and `chosen` are None if no speed was measured in time."""
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
    """Yield parts of the report from a process of `module`: first the device and `checks` (name,
    kind and alternative of each thing to try), then a part for each check.

    A check fails if it crashes its process. It is unknown if it takes longer than `seconds`. Then a
    new process tries the remaining checks. Raises ConfigError if a process does not start.
    """
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
            except ValueError:      # the process ended, perhaps within a line
                last = keeper.stdout.read().strip().rpartition("\n")[2]
                why = f"its process ended with exit code {keeper.wait()} {last}".strip()
        if not begun:
            raise ConfigError(f"the process that tries this machine did not begin: {why}; try "
                              f"`{sys.executable} -c 'import torch'`")
        if waiting:
            lost = dict(zip(("name", "kind", "nearest"), waiting.pop(0)))
            yield {"probes": [asdict(Probe(**lost, works=works, why=why))]}


def _read(reader: int, lines: SimpleQueue[str]) -> None:
    with open(reader, encoding="utf-8") as file:
        for line in chain(file, [""]):
            lines.put(line)
