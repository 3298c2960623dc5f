"""Runs of a claim, each done once. NAME.json in a folder is the record of one that has ended, whose
NAME is a hash of its config, the code, the data and the machine; NAME/ is one that has begun.

The record is written when the run has come to its end, and then the run's folder goes. A kill loses
no more than the steps since the newest checkpoint, and the same command goes on. Workers stay for
all runs of a command, under keepers that end them when this process ends, however it does. One that
is killed is replaced, and its run goes on: its record says how often.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
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
RESTARTS = 2                # of a run whose worker is killed, by one command


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


@dataclass
class _Worker:
    keeper: subprocess.Popen
    told: int                   # a pipe: a line for each run
    name: str = ""              # of the run that it is at


class Workers(ExitStack):
    """Processes that make runs, the next when one has ended; they end when the block does."""

    def __init__(self, out: Path, children: processes.Children, at_once: int | None = None):
        super().__init__()
        self.out, self.children, self.at_once = out, children, at_once
        self.workers: list[_Worker] = []

    def finished(self, configs: list[Config], say: Callable[[str], None] = lambda line: None
                 ) -> list[dict[str, Any]]:
        """Returns the records of `configs`, in order; what `out` lacks is run. Raises RunFailedError
        for a run that could not go on, OSError; KeyboardInterrupt when told to end."""
        names = [name_of(config) for config in configs]
        due = {name: config for name, config in zip(names, configs) if not self._has(name)}
        if due:
            config = configs[0]
            alone = gpus() and config.system.device != "cpu"
            beside = 1 if alone else max(1, cores() // config.system.threads)
            self._run(due, min(len(due), self.at_once or beside), say)
        for name in names:
            remove(self.out / name)
        return [records.read(self.out / f"{name}.json") for name in names]

    def _has(self, name: str) -> bool:
        return (self.out / f"{name}.json").is_file()

    def _start(self) -> None:
        # modules are looked for where this process finds them
        reader, writer = os.pipe()
        start = f"import sys; sys.path[:] = {sys.path!r}; from lpkit.claims.runs import work; work("
        keeper = self.children.start([sys.executable, "-P", "-c", f"{start}{reader})"],
                                     processes.new_folder(), log="log", fds=[reader])
        os.close(reader)
        self.workers.append(_Worker(self.enter_context(keeper), writer))
        self.callback(os.close, writer)
        with suppress(BrokenPipeError):
            os.write(writer, f"{keeper.pid}\n".encode())

    def _run(self, due: Mapping[str, Config], at_once: int, say: Callable[[str], None]) -> None:
        waiting, done, dead, begun = list(due), 0, [], Counter()
        while done < len(due):
            for one in [one for one in self.workers if one.keeper.poll() is not None]:
                self.workers.remove(one)
                if one.name in due and not self._has(one.name):     # else it had nothing to do
                    killed = not 0 <= one.keeper.returncode <= 128      # no error of its own
                    again = killed and begun[one.name] <= RESTARTS and not self.children.over
                    (waiting.insert(0, one.name) if again else dead.append(one))
            while waiting and not dead and len(self.workers) < at_once:
                self._start()
            for one in self.workers[:at_once]:
                if waiting and (not one.name or self._has(one.name)):
                    one.name = waiting.pop(0)
                    config = due[one.name]
                    told = (str(self.out / one.name), config.imports, config.to_dict(),
                            begun[one.name])
                    begun[one.name] += 1
                    with suppress(BrokenPipeError):     # it has just died
                        os.write(one.told, f"{json.dumps(told)}\n".encode())
            if done < (done := sum(map(self._has, due))):
                say(f"{done} of {len(due)} runs")
            elif dead and not any(one.name and not self._has(one.name) for one in self.workers):
                break
            time.sleep(LOOK_SECONDS)
        if self.children.over:
            raise KeyboardInterrupt
        if done < len(due):
            words = " ".join(" ".join(one.keeper.stdout.read() for one in dead).split())[-600:]
            words = words or "nothing, and were killed"
            raise RunFailedError(f"{len(due) - done} of {len(due)} runs did not come to their end; "
                                 f"the same command goes on. They said: {words}")


def work(told: int) -> None:
    """Makes the runs of a worker, as it is told them by this pipe, one after the other."""
    from lpkit.training.background import train
    from lpkit.training.runs import Run

    lines = open(told)
    # a keeper that is killed ends nobody, also where this was still importing
    processes.end_with_parent(int(next(lines)))
    for line in lines:
        where, imports, values, restarts = json.loads(line)
        path, begun = Path(where), time.perf_counter()
        Config(imports=imports)     # as the process has that started this one
        config = Config.from_dict(values)
        try:
            found = train(config, out=path, resume=path.exists()).summary
            if found["status"] != "complete":       # told to stop, it kept a checkpoint
                sys.exit(1)
        except RunFailedError as error:
            last = ([{}, *Run.open(path).metrics])[-1]
            if last.get("loss", 0) is not None and last.get("grad_norm", 0) is not None:
                raise
            # a loss that is no number is a result
            found = last | {"val_loss": None, "error": str(error)}
        if found.get("energy_wh") and found["energy_tokens"]:
            found["step_joules"] = (3600 * found["energy_wh"] * config.tokens_per_step
                                    / found["energy_tokens"])
        keep = ("val_loss", "final_loss", "step_seconds", "energy_wh", "step_joules", "error")
        records.write(path.with_suffix(".json"), {
            **{key: found.get(key) for key in keep}, "name": path.name, "config": values,
            "restarts": restarts, "seconds": time.perf_counter() - begun})
