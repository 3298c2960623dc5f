"""Make the runs of a claim, each once.

    NAME        a hash of the run's config, the code, the data and the machine
    NAME/       the folder of a run that has begun
    NAME.json   the record of a run that has ended
    NAME.stop   the step after which a run must end

After a kill, the same command continues from the newest checkpoints. Keepers end all workers when
this process ends, also when it is killed. A killed worker is replaced, and the record of its run
counts the restarts.
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

# the code that decides the results of a run
NUMBERS = ("config.py", "contracts.py", "datasets", "exchange", "execution", "kernels", "memory",
           "nn", "optim", "parallel", "precision", "techniques", "training")
LOOK_SECONDS = 0.1
DAMAGED = "damaged"         # the folder for damaged records and runs
RESTARTS = 2                # most restarts per command of a run whose worker or job was killed
Evaluations = list[tuple[int, float | None]]        # (step, loss); None: the loss is NaN
RESULTS = ("val_loss", "final_loss", "step_seconds", "energy_wh", "step_joules")
FIELDS = dict.fromkeys(RESULTS, float | None) | {"seconds": float, "restarts": int,
    "error": str | None, "stopped_after": int | None, "device": str | None}     # a record's
Submit = Callable[..., Any]     # calls `make` with its arguments; returns a future of the run


@functools.cache
def code() -> str:
    """Returns the SHA-256 of the code, the libraries' versions and the processor."""
    digest = hashlib.sha256(repr([cpu_name(), versions(("torch", "triton", "numpy"))]).encode())
    for room in (*(PACKAGE / name for name in NUMBERS), lessons.folder()):
        for path in sorted([room, *room.rglob("*")]):
            if path.suffix in (".py", ".c"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _data(data: DataConfig, vocab: int) -> dict[str, str]:
    """Returns the hashes of the tokens, and prepares them here, before all workers need them."""
    from lpkit.datasets.prepared import prepare

    splits = prepare(data, vocab).header["splits"]
    return {split: facts["sha256"] for split, facts in splits.items()}


def name_of(config: Config, tag: str = "") -> str:
    """Returns the name of a run: a hash that includes the weights that it starts from and its
    scores. `tag` marks a run that a judge may stop."""
    base = sorted(Path(config.start.run or os.devnull).glob(MANIFESTS))[-1:]
    held = [sha256(Path(path)) for path in [*base, config.data.scores] if os.path.isfile(path)]
    identity = [config.to_dict(), code(), _data(config.data, config.model.vocab),
                *[tag] * bool(tag)]
    return records.digest(identity + held)[:records.MARK_DIGITS]


def evaluations(path: Path) -> Evaluations:
    """Reads the evaluations that a run has made so far. Skips damaged lines. Raises OSError."""
    metrics, pairs = path / METRICS, []
    for text in metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else ():
        with suppress(*records.UNREADABLE):
            # called ten times per second, so lines without the key (most lines) are not parsed
            if b'"val_loss"' in text and (line := records.Line.parse(text).value):
                pairs.append((line["step"], line["val_loss"]))
    return pairs


@dataclass
class _Worker:
    """A worker process, and the future of the run that it makes now."""

    keeper: subprocess.Popen
    told: int                   # file descriptor of a pipe: one line of JSON for each run
    at: Path                    # where the run's record will be

    def done(self) -> bool:
        return self.keeper.poll() is not None

    def exception(self) -> Exception:
        killed = not 0 <= self.keeper.returncode <= 128
        message = self.keeper.stdout.read() or "nothing, and were killed"
        return (ChildProcessError if killed else RunFailedError)(message)


class Workers(ExitStack):
    """Worker processes, each of which makes one run after another. They end when the block ends.

    submit: starts a run elsewhere, so that no workers are started here; None: workers
    lost:   true for an exception of a future that is no error of the run itself
    """

    def __init__(self, out: Path, children: processes.Children, at_once: int | None = None,
                 submit: Submit | None = None,
                 lost: Callable[[Any], bool] = lambda error: isinstance(error, ChildProcessError)):
        super().__init__()
        self.out, self.children, self.at_once = out, children, at_once
        self.submit, self.lost, self.workers = submit or self._submit, lost, []

    def finished(self, configs: list[Config], say: Callable[[str], None] = lambda line: None,
                 judges: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Returns the records of `configs`, in order, and makes the runs whose records `out` lacks.
        Each judge (a sweep has them) is called with the evaluations of its run. Raises
        RunFailedError for a run that could not continue, OSError, and KeyboardInterrupt when this
        process must end."""
        names = [name_of(config, judge.tag if judge else "")
                 for config, judge in zip_longest(configs, judges)]
        wanted, attempts = dict(zip(names, configs)), Counter()
        while None in (ended := {name: self._ended(name, wanted[name])
                                 for name in wanted}).values():
            due = {name: config for name, config in wanted.items() if ended[name] is None}
            attempts.update([*due])
            if max(attempts.values()) > 1 + RESTARTS:
                raise RunFailedError(f"{named(self.out)}: records are altered as they are written")
            for config in due.values() if self.submit == self._submit else ():
                # raises here, so that the message is one sentence
                spread(config, config.parallel.devices)
            alone = gpus() and configs[0].system.device != "cpu"
            most = max(config.system.threads * config.parallel.devices for config in configs)
            beside = 1 if alone else max(1, cores() // most)
            self._run(due, min(len(due), self.at_once or beside), say, dict(zip(names, judges)))
        sweep(self.out)     # half-written records of killed processes
        for name in names:
            remove(self.out / name)
            remove(self.out / f"{name}.stop")
        for name in attempts:
            if os.path.lexists(aside := self.out / DAMAGED / name):
                processes.tell(f"lpkit: {named(aside)} was the folder of a run, and is damaged, or "
                               f"another's; the run was made again")
        return [ended[name] for name in names]

    def _ended(self, name: str, config: Config) -> dict[str, Any] | None:
        """Returns the record of a run, or None if the run must be made. Moves a file that is not
        the run's record to DAMAGED."""
        path, every = self.out / f"{name}.json", config.eval_every or config.steps
        if not os.path.lexists(path):
            return None
        with suppress(*records.UNREADABLE):
            record, steps = records.read(path), [*range(every, config.steps, every), config.steps]
            curve, over = record["evaluations"], record["error"] or record["stopped_after"]
            kinds = [*((record[key], kind) for key, kind in FIELDS.items()),
                     *((loss, float | None) for _, loss in curve)]
            if (record | {"name": name, "config": records.plain(config.to_dict())} == record
                    and all(isinstance(value, kind) for value, kind in kinds)
                    and [step for step, _ in curve] == steps[:len(curve) if over else None]
                    and record["val_loss"] == (None if over else curve[-1][1])):
                return record
        processes.tell(f"lpkit: {named(path)} is damaged, or not the record of its run; it is "
                       f"moved to {DAMAGED}/, and the run is made again")
        move_into(self.out / DAMAGED, path)
        return remove(self.out / name)      # the record may come from this folder

    def _submit(self, *arguments: Any) -> _Worker:
        self.workers = [worker for worker in self.workers if not worker.done()]
        free = [worker for worker in self.workers if worker.at.is_file()]
        worker = free[0] if free else self._start()
        worker.at = Path(f"{arguments[0]}.json")
        with suppress(BrokenPipeError):     # the worker has just died
            os.write(worker.told, f"{json.dumps(arguments)}\n".encode())
        return worker

    def _start(self) -> _Worker:
        # the worker gets this process's sys.path
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
                remove(self.out / f"{name}.stop")       # left by a killed command
                going[name] = self.submit(str(self.out / name), config.imports, config.to_dict(),
                                          begun[name])
                begun[name] += 1
            time.sleep(LOOK_SECONDS)
            for name, job in list(going.items()):
                # asked before the record is looked for, since the job writes its record first
                over = job.done()
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
            # the last line of a traceback is a sentence
            words = "; ".join({str(error).strip().rpartition("\n")[2]: 0 for error in failed})
            raise RunFailedError(f"{len(due) - done} of {len(due)} runs did not finish; "
                                 f"repeat the command to continue. Their errors: {words}")


def work(pipe: int) -> None:
    """Makes the runs of a worker one after another. `told`: the file descriptor of a pipe with one
    line for each run."""
    lines = open(pipe)
    # a killed keeper cannot end this process, even if it dies while this process still imports
    processes.end_with_parent(int(next(lines)))
    for line in lines:
        make(*json.loads(line))


def make(where: str, imports: Sequence[str], values: Mapping[str, Any], restarts: int) -> None:
    """Makes a run, or continues it. `restarts`: how often it was restarted. If the run cannot
    continue from its folder, moves the folder to DAMAGED. Raises RunFailedError, and SystemExit
    when this process must end."""
    from lpkit.training.background import train
    from lpkit.training.control import Control

    path, begun, control = Path(where), time.perf_counter(), Control()
    resume = os.path.lexists(path)
    Config(imports=imports)     # the modules that the parent process has imported
    config = Config.from_dict(values)

    def heed(record: StepRecord) -> None:
        # >=, because a run that continues from a checkpoint repeats steps
        if (stop := Path(f"{where}.stop")).is_file() and record.step >= int(stop.read_text()):
            end("judge")

    try:
        if (path / CONFIG).is_file() and Run.open(path).config.to_dict() != config.to_dict():
            raise DamagedError(f"{named(path)} is the folder of another run")
        more = {"out": path, "resume": resume, "observers": [heed]}
        world = config.parallel.devices
        ranks = launch(config, processes=world, **more) if world > 1 else None
        end = ranks.stop if ranks else control.stop         # set before any rank has imported torch
        summary = (ranks.result() if ranks else train(config, control=control, **more)).summary
        if summary["stopped_by"] == "judge":
            summary |= {"val_loss": None, "stopped_after": summary["steps"]}
        elif summary["status"] != "complete":     # it was stopped, and wrote a checkpoint
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
        # a loss of NaN or infinity is a result
        summary = last | {"val_loss": None, "error": str(error)}
    if summary.get("energy_wh") and summary["energy_tokens"]:
        summary["step_joules"] = (3600 * summary["energy_wh"] * config.tokens_per_step
                                / summary["energy_tokens"])
    run = Run.open(path)
    records.write(path.with_suffix(".json"), {
        **{key: summary.get(key) for key in FIELDS}, "name": path.name, "config": values,
        "evaluations": [(record["step"], record["val_loss"]) for record in run.metrics
                        if "val_loss" in record],
        "restarts": restarts, "device": run.environment.get("device"),
        "seconds": time.perf_counter() - begun})
