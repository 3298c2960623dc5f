"""Runs of a claim, each done once: NAME.json in a folder is the record of one that has ended, whose
NAME is a hash of its config, the code, the data and the machine; NAME/ is one that has begun.

A record is written when the run has come to its end, and then the run's folder goes. So a kill at
any moment loses nothing but the steps since the run's newest checkpoint, and the same command goes
on. Runs share the cores: workers take names from one pipe, under keepers that end them when this
process ends, however it does.
"""

import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lpkit import processes, records
from lpkit.config import Config, DataConfig
from lpkit.errors import ConfigError, RunFailedError
from lpkit.files import PACKAGE, remove
from lpkit.machine_facts import cores, cpu_name, gpus, versions

NUMBERS = ("config.py", "contracts.py", "datasets", "kernels", "memory", "nn", "optim", "parallel",
           "precision", "techniques", "training")       # what a run's numbers come from
CODE = (".py", ".c", ".cu", ".h")
DIGITS = 16
LINE = DIGITS + 1       # bytes of a name in the pipe, which a read takes whole
LOOK_SECONDS = 0.1


@functools.cache
def code() -> str:
    """The SHA-256 of the code, of the libraries' versions and of the machine."""
    found = hashlib.sha256(json.dumps([platform.python_version(), cpu_name(),
                                       *sorted(versions(("torch", "triton", "numpy")).items())],
                                      ).encode())
    for room in NUMBERS:
        for path in sorted([PACKAGE / room, *(PACKAGE / room).rglob("*")]):
            if path.suffix in CODE:
                found.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return found.hexdigest()


@functools.cache
def _data(data: DataConfig, vocab: int) -> dict[str, str]:
    """The hashes of the tokens, which are prepared here before workers want them all at once."""
    from lpkit.datasets.prepared import prepare

    return {split: one["sha256"] for split, one in prepare(data, vocab).header["splits"].items()}


def name_of(config: Config) -> str:
    return records.digest({"config": config.to_dict(), "code": code(),
                           "data": _data(config.data, config.model.vocab)})[:DIGITS]


def finished(configs: list[Config], out: Path, *, at_once: int | None = None,
             say: Callable[[int, int], None] = lambda done, of: None,
             children: processes.Children | None = None) -> list[dict[str, Any]]:
    """The records of `configs`, in order; what is not in the folder `out` yet is run. `say` hears
    how many of how many are there. Raises RunFailedError for a run that could not go on, OSError;
    KeyboardInterrupt when `children` were told to end."""
    names = [name_of(config) for config in configs]
    due = {name: config for name, config in zip(names, configs, strict=True)
           if not _record(out, name).is_file()}
    if due:
        _run(due, out, min(len(due), at_once or workers(configs[0])), children, say)
    return [records.read(_record(out, name)) for name in names]


def workers(config: Config) -> int:
    """As many as the cores let run side by side; one for GPUs."""
    if gpus() and config.system.device != "cpu":
        return 1
    return max(1, cores() // (config.system.threads or 1))


def _record(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def _run(due: Mapping[str, Config], out: Path, at_once: int, children: processes.Children | None,
         say: Callable[[int, int], None]) -> None:
    children = children or processes.Children()
    names, writer = os.pipe()
    os.write(writer, "".join(f"{name}\n" for name in due).encode())     # protocol.MOST_RUNS fit
    os.close(writer)
    told = {"out": str(out), "configs": {name: one.to_dict() for name, one in due.items()},
            "imports": sorted({module for one in due.values() for module in one.imports})}
    with ExitStack() as stack:
        keepers = []
        for _ in range(at_once):
            folder = processes.new_folder()
            # modules are looked for where this process finds them
            start = (f"import sys; sys.path[:] = {sys.path!r}; "
                     f"from lpkit.claims.runs import work; work({str(folder)!r}, {names})")
            keepers.append(stack.enter_context(children.start(
                [sys.executable, "-P", "-c", start], folder, files={"told": told}, log="log",
                fds=[names])))
        os.close(names)
        try:
            while any(keeper.poll() is None for keeper in keepers):
                say(sum(_record(out, name).is_file() for name in due), len(due))
                time.sleep(LOOK_SECONDS)
        except BaseException:       # the block waits for them: end them first
            children.end()
            raise
        said = [keeper.stdout.read() for keeper in keepers]
    if children.over:
        raise KeyboardInterrupt
    if left := [name for name in due if not _record(out, name).is_file()]:
        words = " ".join(" ".join(said).split())[-600:]
        raise RunFailedError(f"{len(left)} of {len(due)} runs did not come to their end, the first "
                             f"is {left[0]}; give the same command to go on. They said: {words}")
    say(len(due), len(due))


def work(folder: str, names: int) -> None:
    """The process of a worker: runs whose names come from a pipe, until it is empty."""
    from lpkit.training.background import train

    told = json.loads(Path(folder, "told").read_text())
    Config(imports=told["imports"])     # the claim's own process has imported them
    out = Path(told["out"])
    while name := os.read(names, LINE).decode().strip():
        path, config = out / name, Config.from_dict(told["configs"][name])
        begun = time.perf_counter()
        try:
            found = train(config, out=path, resume=path.exists()).summary
            if found["status"] != "complete":       # asked to stop; a checkpoint was kept
                raise SystemExit(found["stopped_by"])
        except RunFailedError as error:
            found = _diverged(path, error)
        keep = ("val_loss", "final_loss", "step_seconds", "steps", "tokens", "energy_wh", "error")
        records.write(_record(out, name), {
            **{key: found.get(key) for key in keep}, "config": config.to_dict(),
            "seconds": time.perf_counter() - begun, "code": code()})
        remove(path)


def _diverged(path: Path, error: RunFailedError) -> dict[str, Any]:
    """A loss that is no number is a result, any other failure is not."""
    from lpkit.training.runs import Run

    lines = Run.open(path).metrics
    if lines and (lines[-1]["loss"] is None or lines[-1]["grad_norm"] is None):
        return {"val_loss": None, "error": str(error), "steps": lines[-1]["step"],
                "step_seconds": lines[-1]["step_seconds"]}
    raise ConfigError(str(error)) from error
