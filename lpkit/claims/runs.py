"""Runs of a claim, each done once. NAME.json in a folder is the record of one that has ended, whose
NAME is a hash of its config, the code, the data and the machine; NAME/ is one that has begun.

The record is written when the run has come to its end, and then the run's folder goes. A kill loses
no more than the steps since the newest checkpoint, and the same command goes on. Workers have every
so-manieth run each, under keepers that end them when this process ends, however it does.
"""

import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lpkit import processes, records
from lpkit.config import Config, DataConfig
from lpkit.errors import RunFailedError
from lpkit.files import PACKAGE, remove
from lpkit.machine_facts import cores, cpu_name, gpus, versions

NUMBERS = ("config.py", "contracts.py", "datasets", "kernels", "memory", "nn", "optim", "parallel",
           "precision", "techniques", "training")       # where the numbers of a run come from
LOOK_SECONDS = 0.1


@functools.cache
def code() -> str:
    """Returns the SHA-256 of the code, the libraries' versions and the processor."""
    found = hashlib.sha256(repr([cpu_name(), versions(("torch", "triton", "numpy"))]).encode())
    for room in NUMBERS:
        for path in sorted([PACKAGE / room, *(PACKAGE / room).rglob("*")]):
            if path.suffix in (".py", ".c", ".cu", ".h"):
                found.update(path.read_bytes())
    return found.hexdigest()


@functools.cache
def _data(data: DataConfig, vocab: int) -> dict[str, str]:
    """Hashes of the tokens, which are prepared here before all workers want them at once."""
    from lpkit.datasets.prepared import prepare

    return {split: one["sha256"] for split, one in prepare(data, vocab).header["splits"].items()}


def name_of(config: Config) -> str:
    told = [config.to_dict(), code(), _data(config.data, config.model.vocab)]
    return records.digest(told)[:records.MARK_DIGITS]


def finished(configs: list[Config], out: Path, children: processes.Children,
             at_once: int | None = None, say: Callable[[str], None] = lambda line: None
             ) -> list[dict[str, Any]]:
    """Returns the records of `configs`, in order; what `out` lacks is run. Raises RunFailedError
    for a run that could not go on, OSError; KeyboardInterrupt when `children` were told to end."""
    names = [name_of(config) for config in configs]
    due = {name: config for name, config in zip(names, configs)
           if not (out / f"{name}.json").is_file()}
    if due:
        config = configs[0]
        alone = gpus() and config.system.device != "cpu"
        beside = 1 if alone else max(1, cores() // config.system.threads)
        _run(due, out, children, min(len(due), at_once or beside), say)
    for name in names:
        remove(out / name)      # of a worker that was killed after its record
    return [records.read(out / f"{name}.json") for name in names]


def _run(due: Mapping[str, Config], out: Path, children: processes.Children, at_once: int,
         say: Callable[[str], None]) -> None:
    told = [(str(out / name), one.imports, one.to_dict()) for name, one in due.items()]
    # modules are looked for where this process finds them
    start = f"import sys; sys.path[:] = {sys.path!r}; from lpkit.claims.runs import work; work("
    done, there = 0, lambda: sum((out / f"{name}.json").is_file() for name in due)
    with ExitStack() as stack:
        keepers = []
        for first in range(at_once):
            folder = processes.new_folder()
            keepers.append(stack.enter_context(children.start(
                [sys.executable, "-P", "-c", f"{start}{str(folder)!r})"], folder, log="log",
                files={"told": json.dumps(told[first::at_once])})))
        while any(keeper.poll() is None for keeper in keepers) or done < there():
            if done < (done := there()):
                say(f"{done} of {len(due)} runs")
            time.sleep(LOOK_SECONDS)
        words = " ".join(" ".join(keeper.stdout.read() for keeper in keepers).split())[-600:]
    if children.over:
        raise KeyboardInterrupt
    if done < len(due):
        raise RunFailedError(f"{len(due) - done} of {len(due)} runs did not come to their end; the "
                             f"same command goes on. They said: {words}")


def work(folder: str) -> None:
    """Makes the runs of a worker, one after the other."""
    from lpkit.training.background import train
    from lpkit.training.runs import Run

    for where, imports, values in json.loads(Path(folder, "told").read_text()):
        path, begun = Path(where), time.perf_counter()
        Config(imports=imports)     # as the process has that started this one
        config = Config.from_dict(values)
        try:
            found = train(config, out=path, resume=path.exists()).summary
            if found["status"] != "complete":       # told to stop, it kept a checkpoint
                sys.exit(1)
        except RunFailedError as error:
            line = ([{}, *Run.open(path).metrics])[-1]
            if line.get("loss", 0) is not None and line.get("grad_norm", 0) is not None:
                raise
            # a loss that is no number is a result
            found = line | {"val_loss": None, "error": str(error)}
        keep = ("val_loss", "final_loss", "step_seconds", "energy_wh", "error")
        records.write(path.with_suffix(".json"), {
            **{key: found.get(key) for key in keep}, "name": path.name, "config": values,
            "seconds": time.perf_counter() - begun})
        remove(path)
