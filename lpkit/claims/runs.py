"""Make the runs of a claim, each once. NAME.json is the record of a run that has ended, NAME/ the
folder of a run that has begun. NAME is a hash of its config, the code, the data and the machine.

After a kill, the same command goes on from the newest checkpoints. Keepers end all workers when
this process ends, however it does. A worker that is killed is replaced, and the record of its run
says how often. NAME.stop has the step after which a run is to end.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lpkit import processes, records
from lpkit.config import Config, DataConfig
from lpkit.contracts import StepRecord
from lpkit.errors import ConfigError, DamagedError, RunFailedError, named
from lpkit.files import PACKAGE, is_locked, move_into, remove, sha256, sweep, write_atomically
from lpkit.machine_facts import cores, cpu_name, gpus, versions
from lpkit.techniques import lessons
from lpkit.training.launch import launch, spread
from lpkit.training.runs import CONFIG, LOCK, MANIFESTS, METRICS, Run

NUMBERS = ("config.py", "contracts.py", "datasets", "exchange", "execution", "kernels", "memory",
           "nn", "optim", "parallel", "precision", "techniques", "training")   # of a run
LOOK_SECONDS = 0.1
DAMAGED = "damaged"         # the folder for what was in the place of a record or a run
RESTARTS = 2                # of a run whose worker or job is killed, by one command
Evaluations = list[tuple[int, float | None]]        # steps and losses, None: not a number
RESULTS = ("val_loss", "final_loss", "step_seconds", "energy_wh", "step_joules")
FIELDS = dict.fromkeys(RESULTS, float | None) | {"seconds": float, "restarts": int,
    "error": str | None, "stopped_after": int | None, "device": str | None}     # of a record
Submit = Callable[..., Any]     # hands `make` its arguments; a future, `done()` and `exception()`


@functools.cache
def code() -> str:
    """Returns the SHA-256 of the code, the libraries' versions and the processor."""
    found = hashlib.sha256(repr([cpu_name(), versions(("torch", "triton", "numpy"))]).encode())
    for room in (*(PACKAGE / name for name in NUMBERS), lessons.folder()):
        for path in sorted([room, *room.rglob("*")]):
            if path.suffix in (".py", ".c"):
                found.update(path.read_bytes())
    return found.hexdigest()


@functools.cache
def _data(data: DataConfig, vocab: int) -> dict[str, str]:
    """Hashes of the tokens, which are prepared here before all workers want them at once."""
    from lpkit.datasets.prepared import prepare

    return {split: one["sha256"] for split, one in prepare(data, vocab).header["splits"].items()}


def name_of(config: Config, tag: str = "") -> str:
    """`tag`: of a run that may be stopped. The weights that it begins from, and scores, count."""
    base = sorted(Path(config.start.run or os.devnull).glob(MANIFESTS))[-1:]
    held = [sha256(Path(one)) for one in [*base, config.data.scores] if os.path.isfile(one)]
    told = [config.to_dict(), code(), _data(config.data, config.model.vocab), *[tag] * bool(tag)]
    return records.digest(told + held)[:records.MARK_DIGITS]


def evaluations(path: Path) -> Evaluations:
    """Reads those that a run has made so far, but for damaged lines. Raises OSError."""
    metrics, found = path / METRICS, []
    for text in metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else ():
        with suppress(*records.UNREADABLE):
            # asked ten times a second: lines without the key, which are most, are not parsed
            if b'"val_loss"' in text and (line := records.Line.parse(text).value):
                found.append((line["step"], line["val_loss"]))
    return found


@dataclass
class _Worker:
    """Also the future of the run that it is at."""

    keeper: subprocess.Popen
    told: int                   # a pipe: a line for each run
    at: Path                    # the record of the run

    def done(self) -> bool:
        return self.keeper.poll() is not None

    def exception(self) -> Exception:
        killed = not 0 <= self.keeper.returncode <= 128
        said = self.keeper.stdout.read() or "nothing, and were killed"
        return (ChildProcessError if killed else RunFailedError)(said)


class Workers(ExitStack):
    """Processes that make runs, the next when one has ended; they end when the block does. None are
    started where others `submit`; `lost`: whether a future's exception is no error of the run's."""

    def __init__(self, out: Path, children: processes.Children, at_once: int | None = None,
                 submit: Submit | None = None,
                 lost: Callable[[Any], bool] = lambda one: isinstance(one, ChildProcessError)):
        super().__init__()
        self.out, self.children, self.at_once = out, children, at_once
        self.submit, self.lost, self.workers = submit or self._submit, lost, []

    def finished(self, configs: list[Config], say: Callable[[str], None] = lambda line: None,
                 judges: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Returns the records of `configs`, in order; what `out` lacks is run. Judges (of sweeps)
        hear evaluations. Raises RunFailedError for a run that could not go on, OSError;
        KeyboardInterrupt when told to end."""
        names = [name_of(config, judge.tag if judge else "")
                 for config, judge in zip_longest(configs, judges)]
        wanted, made = dict(zip(names, configs)), Counter()
        while None in (found := {one: self._ended(one, wanted[one]) for one in wanted}).values():
            due = {name: config for name, config in wanted.items() if found[name] is None}
            made.update([*due])
            if max(made.values()) > 1 + RESTARTS:
                raise RunFailedError(f"{named(self.out)}: records are altered as they are written")
            for one in due.values() if self.submit == self._submit else ():
                spread(one, one.parallel.devices)       # refused here, in one sentence
            alone = gpus() and configs[0].system.device != "cpu"
            most = max(one.system.threads * one.parallel.devices for one in configs)
            beside = 1 if alone else max(1, cores() // most)
            self._run(due, min(len(due), self.at_once or beside), say, dict(zip(names, judges)))
        sweep(self.out)     # half-written records of those that were killed
        for name in names:
            remove(self.out / name)
            remove(self.out / f"{name}.stop")
        for name in made:
            if os.path.lexists(aside := self.out / DAMAGED / name):
                processes.tell(f"lpkit: {named(aside)} was the folder of a run, and is damaged, or "
                               f"another's; the run was made again")
        return [found[name] for name in names]

    def _ended(self, name: str, config: Config) -> dict[str, Any] | None:
        """Returns the record of a run; None: it is due. What is not its record is set aside."""
        path, every = self.out / f"{name}.json", config.eval_every or config.steps
        if not os.path.lexists(path):
            return None
        with suppress(*records.UNREADABLE):
            found, steps = records.read(path), [*range(every, config.steps, every), config.steps]
            curve, over = found["evaluations"], found["error"] or found["stopped_after"]
            kinds = [*((found[key], kind) for key, kind in FIELDS.items()),
                     *((loss, float | None) for _, loss in curve)]
            if (found | {"name": name, "config": records.plain(config.to_dict())} == found
                    and all(isinstance(one, kind) for one, kind in kinds)
                    and [step for step, _ in curve] == steps[:len(curve) if over else None]
                    and found["val_loss"] == (None if over else curve[-1][1])):
                return found
        processes.tell(f"lpkit: {named(path)} is damaged, or not the record of its run; it is "
                       f"moved to {DAMAGED}/, and the run is made again")
        move_into(self.out / DAMAGED, path)
        return remove(self.out / name)      # its folder, which it may have been made from

    def _submit(self, *told: Any) -> _Worker:
        self.workers = [one for one in self.workers if not one.done()]
        free = [one for one in self.workers if one.at.is_file()]
        worker = free[0] if free else self._start()
        worker.at = Path(f"{told[0]}.json")
        with suppress(BrokenPipeError):     # it has just died
            os.write(worker.told, f"{json.dumps(told)}\n".encode())
        return worker

    def _start(self) -> _Worker:
        # modules are looked for where this process finds them
        reader, writer = os.pipe()
        start = f"import sys; sys.path[:] = {sys.path!r}; from lpkit.claims.runs import work; work("
        keeper = self.children.start([sys.executable, "-P", "-c", f"{start}{reader})"],
                                     processes.new_folder(), log="log", fds=[reader])
        os.close(reader)
        self.workers.append(_Worker(self.enter_context(keeper), writer, self.out))
        self.callback(os.close, writer)
        with suppress(BrokenPipeError):
            os.write(writer, f"{keeper.pid}\n".encode())
        return self.workers[-1]

    def _run(self, due: Mapping[str, Config], at_once: int, say: Callable[[str], None],
             judges: Mapping[str, Any]) -> None:
        waiting, going, failed, done, begun = list(due), {}, [], 0, Counter()
        while (going or (waiting and not failed)) and not self.children.over:
            while waiting and not failed and len(going) < at_once:
                config = due[name := waiting.pop(0)]
                remove(self.out / f"{name}.stop")       # of a command that was killed
                going[name] = self.submit(str(self.out / name), config.imports, config.to_dict(),
                                          begun[name])
                begun[name] += 1
            time.sleep(LOOK_SECONDS)
            for name, job in list(going.items()):
                over = job.done()       # before the record is looked for, which comes first
                if (self.out / f"{name}.json").is_file():
                    del going[name]
                    done += 1
                    say(f"{done} of {len(due)} runs")
                elif over:
                    del going[name]
                    again = self.lost(error := job.exception()) and begun[name] <= RESTARTS
                    (waiting.insert(0, name) if again else failed.append(error))
                elif judge := judges.get(name):
                    judge(evaluations(self.out / name))
                    if judge.stop_after and not (stop := self.out / f"{name}.stop").exists():
                        write_atomically(stop, str(judge.stop_after))
        if self.children.over:
            raise KeyboardInterrupt
        if failed:
            # of a traceback the last line, which is a sentence
            words = "; ".join({str(error).strip().rpartition("\n")[2]: 0 for error in failed})
            raise RunFailedError(f"{len(due) - done} of {len(due)} runs did not finish; "
                                 f"repeat the command to continue. Their errors: {words}")


def work(told: int) -> None:
    """Makes the runs of a worker, as it is told them by this pipe, one after the other."""
    lines = open(told)
    # a keeper that is killed ends nobody, also where this was still importing
    processes.end_with_parent(int(next(lines)))
    for line in lines:
        make(*json.loads(line))


def make(where: str, imports: Sequence[str], values: Mapping[str, Any], restarts: int) -> None:
    """Makes a run, or goes on with it; `restarts`: so often already. A folder from which it cannot
    go on is set aside. Raises RunFailedError, SystemExit when told to end."""
    from lpkit.training.background import train
    from lpkit.training.control import Control

    path, begun, control = Path(where), time.perf_counter(), Control()
    resume = os.path.lexists(path)
    Config(imports=imports)     # as the process has that started this one
    config = Config.from_dict(values)

    def heed(record: StepRecord) -> None:
        # one that goes on from a checkpoint comes to that step again
        if (stop := Path(f"{where}.stop")).is_file() and record.step >= int(stop.read_text()):
            end("judge")

    try:
        if (path / CONFIG).is_file() and Run.open(path).config.to_dict() != config.to_dict():
            raise DamagedError(f"{named(path)} is the folder of another run")
        more = {"out": path, "resume": resume, "observers": [heed]}
        world = config.parallel.devices
        ranks = launch(config, processes=world, **more) if world > 1 else None
        end = ranks.stop if ranks else control.stop         # before a rank has imported torch
        found = (ranks.result() if ranks else train(config, control=control, **more)).summary
        if found["stopped_by"] == "judge":
            found |= {"val_loss": None, "stopped_after": found["steps"]}
        elif found["status"] != "complete":     # told to stop, it kept a checkpoint
            sys.exit(1)
    except ConfigError:
        if not resume or is_locked(path / LOCK):
            raise
        move_into(path.parent / DAMAGED, path)
        return make(where, imports, values, restarts)
    except RunFailedError as error:
        last = ([{}, *Run.open(path).metrics])[-1]
        if last.get("loss", 0) is not None and (last.get("grad_norm", 0) is not None
                                                or last.get("extra", {}).get("dropped")):
            raise
        # a loss that is no number is a result
        found = last | {"val_loss": None, "error": str(error)}
    if found.get("energy_wh") and found["energy_tokens"]:
        found["step_joules"] = (3600 * found["energy_wh"] * config.tokens_per_step
                                / found["energy_tokens"])
    run = Run.open(path)
    records.write(path.with_suffix(".json"), {
        **{key: found.get(key) for key in FIELDS}, "name": path.name, "config": values,
        "evaluations": [(one["step"], one["val_loss"]) for one in run.metrics if "val_loss" in one],
        "restarts": restarts, "device": run.environment.get("device"),
        "seconds": time.perf_counter() - begun})
