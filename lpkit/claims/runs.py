"""Make the runs of a claim or sweep, each run once. The folder of the runs contains:

    NAME/       the folder of a run that has begun
    NAME.json   the record of a run that has ended
    NAME.stop   the step after which a run must end

NAME is a hash of the run's config, the code, the data and the processor, so a record is used again
only if a new run would give the same numbers.

If a command was killed, the same command continues from the newest checkpoints. Worker processes
make the runs. Their keepers (`lpkit.processes`) end them when this process ends, even if it is
killed. A worker that is killed is replaced, and the record of its run counts the restarts.
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

# modules and packages of lpkit that decide the results of a run
NUMBERS = ("config.py", "contracts.py", "datasets", "exchange", "execution", "kernels", "memory",
           "nn", "optim", "parallel", "precision", "techniques", "training")
LOOK_SECONDS = 0.1          # time between two looks at the runs in progress
DAMAGED = "damaged"         # the folder for damaged records and runs
RESTARTS = 2                # most restarts, per command, of a run whose worker or job was killed
Evaluations = list[tuple[int, float | None]]        # (step, loss); None: the loss is NaN
RESULTS = ("val_loss", "final_loss", "step_seconds", "energy_wh", "step_joules")
# field of a record -> the type of its value
FIELDS = dict.fromkeys(RESULTS, float | None) | {"seconds": float, "restarts": int,
    "error": str | None, "stopped_after": int | None, "device": str | None}
# starts `make(*arguments)` in another process, and returns a future with done() and exception()
Submit = Callable[..., Any]


@functools.cache
def code() -> str:
    """Returns the SHA-256 of the code, the versions of libraries and the name of the processor."""
    digest = hashlib.sha256(repr([cpu_name(), versions(("torch", "triton", "numpy"))]).encode())
    for room in (*(PACKAGE / name for name in NUMBERS), lessons.folder()):
        for path in sorted([room, *room.rglob("*")]):
            if path.suffix in (".py", ".c"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _data(data: DataConfig, vocab: int) -> dict[str, str]:
    """Returns the SHA-256 of the tokens of each split. Prepares missing token files, so that the
    workers do not all prepare them at the same time."""
    from lpkit.datasets.prepared import prepare

    splits = prepare(data, vocab).header["splits"]
    return {split: facts["sha256"] for split, facts in splits.items()}


def name_of(config: Config, tag: str = "") -> str:
    """Returns the name of a run, a hash of MARK_DIGITS digits: of its config, the code, the tokens,
    the weights that it starts from, and its file of scores. `tag`: distinguishes a run that a judge
    may stop from a whole run; empty for a whole run."""
    base = sorted(Path(config.start.run or os.devnull).glob(MANIFESTS))[-1:]
    held = [sha256(Path(path)) for path in [*base, config.data.scores] if os.path.isfile(path)]
    identity = [config.to_dict(), code(), _data(config.data, config.model.vocab),
                *[tag] * bool(tag)]
    return records.digest(identity + held)[:records.MARK_DIGITS]


def evaluations(path: Path) -> Evaluations:
    """Returns the evaluations so far of the run in the folder `path`. Skips damaged lines. Raises
    OSError."""
    metrics, pairs = path / METRICS, []
    for text in metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else ():
        with suppress(*records.UNREADABLE):
            # called ten times per second, so lines without the key (most lines) are not parsed
            if b'"val_loss"' in text and (line := records.Line.parse(text).value):
                pairs.append((line["step"], line["val_loss"]))
    return pairs


@dataclass
class _Worker:
    """A worker process. It is also the future of the run that it is making."""

    keeper: subprocess.Popen
    requests_fd: int                 # file descriptor of a pipe: one line of JSON for each run
    at: Path                    # path of the record that the run will write

    def done(self) -> bool:
        """Return True if the worker process has ended."""
        return self.keeper.poll() is not None

    def exception(self) -> Exception:
        """Return the error of a worker that has ended. Its message is the end of the worker's
        log."""
        killed = not 0 <= self.keeper.returncode <= 128
        message = self.keeper.stdout.read() or "nothing, and were killed"
        return (ChildProcessError if killed else RunFailedError)(message)


class Workers(ExitStack):
    """Worker processes. Each worker makes one run after another. All workers end at the end of the
    `with` block.

    out:      folder of the runs and records
    children: starts the workers, and is `over` when this process must end
    at_once:  number of parallel runs; None: as many as the cores allow
    submit:   an executor's function, which starts a run in another place; None: workers
    lost:     is true for an exception of a future if the worker or job was killed, and false for an
              error of the run itself
    """

    def __init__(self, out: Path, children: processes.Children, at_once: int | None = None,
                 submit: Submit | None = None,
                 lost: Callable[[Any], bool] = lambda error: isinstance(error, ChildProcessError)):
        super().__init__()
        self.out, self.children, self.at_once = out, children, at_once
        self.submit, self.lost, self.workers = submit or self._submit, lost, []

    def finished(self, configs: list[Config], say: Callable[[str], None] = lambda line: None,
                 judges: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Returns the records of the runs of `configs`, in order. Makes the runs that have no
        record in `out`.

        say:    is called with a line after each run: "3 of 8 runs"
        judges: one `sweep.Judge` for each config, or none. It is called with the evaluations of its
                run, and may stop the run

        Raises RunFailedError for a run that could not continue, OSError, and KeyboardInterrupt when
        this process must end."""
        names = [name_of(config, judge.tag if judge else "")
                 for config, judge in zip_longest(configs, judges)]
        wanted, attempts = dict(zip(names, configs)), Counter()
        while None in (ended := {name: self._record_of(name, wanted[name])
                                 for name in wanted}).values():
            missing = {name: config for name, config in wanted.items() if ended[name] is None}
            attempts.update([*missing])
            if max(attempts.values()) > 1 + RESTARTS:
                raise RunFailedError(f"{named(self.out)}: records are altered as they are written")
            for config in missing.values() if self.submit == self._submit else ():
                # check the layout here: an error of a worker would be a traceback
                spread(config, config.parallel.devices)
            alone = gpus() and configs[0].system.device != "cpu"
            most = max(config.system.threads * config.parallel.devices for config in configs)
            beside = 1 if alone else max(1, cores() // most)
            self._run(missing, min(len(missing), self.at_once or beside), say,
                      dict(zip(names, judges)))
        sweep(self.out)     # removes half-written records of killed processes
        for name in names:
            remove(self.out / name)
            remove(self.out / f"{name}.stop")
        for name in attempts:
            if os.path.lexists(aside := self.out / DAMAGED / name):
                processes.tell(f"lpkit: {named(aside)} is a damaged run folder, or the folder of "
                               f"another run; the run was made again")
        return [ended[name] for name in names]

    def _record_of(self, name: str, config: Config) -> dict[str, Any] | None:
        """Returns the record of the run `name`, or None if the run must be made. If the record is
        damaged or belongs to another run, moves it to DAMAGED, and removes the run's folder."""
        path, interval = self.out / f"{name}.json", config.eval_every or config.steps
        if not os.path.lexists(path):
            return None
        with suppress(*records.UNREADABLE):
            record = records.read(path)
            # an evaluation after each interval and after the last step; a run that ended early may
            # have only the first of them, and has no val_loss
            steps = [*range(interval, config.steps, interval), config.steps]
            pairs, ended_early = record["evaluations"], record["error"] or record["stopped_after"]
            # (value, type that it must have)
            typed = [*((record[key], kind) for key, kind in FIELDS.items()),
                     *((loss, float | None) for _, loss in pairs)]
            if (record["name"] == name and record["config"] == records.plain(config.to_dict())
                    and all(isinstance(value, kind) for value, kind in typed)
                    and [step for step, _ in pairs] == steps[:len(pairs) if ended_early else None]
                    and record["val_loss"] == (None if ended_early else pairs[-1][1])):
                return record
        # a check failed, or an error of UNREADABLE was suppressed
        processes.tell(f"lpkit: {named(path)} is damaged, or not the record of its run; it is "
                       f"moved to {DAMAGED}/, and the run is made again")
        move_into(self.out / DAMAGED, path)
        return remove(self.out / name)      # the wrong record may have been made from this folder

    def _submit(self, *arguments: Any) -> _Worker:
        """Send a run to a free worker, or to a new worker. `arguments`: those of `make`."""
        self.workers = [worker for worker in self.workers if not worker.done()]
        # a worker is free when the record of its run exists
        free = [worker for worker in self.workers if worker.at.is_file()]
        worker = free[0] if free else self._start()
        worker.at = Path(f"{arguments[0]}.json")
        with suppress(BrokenPipeError):     # the worker has just died
            os.write(worker.requests_fd, f"{json.dumps(arguments)}\n".encode())
        return worker

    def _start(self) -> _Worker:
        """Start a worker process with this process's sys.path."""
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

    def _run(self, missing: Mapping[str, Config], at_once: int, say: Callable[[str], None],
             judges: Mapping[str, Any]) -> None:
        """Make the runs `missing`, at most `at_once` at the same time, and restart runs that were
        lost. After a run has failed, start no further runs, and wait for those in progress."""
        waiting, going, failed, done, begun = list(missing), {}, [], 0, Counter()
        while (going or (waiting and not failed)) and not self.children.over:
            while waiting and not failed and len(going) < at_once:
                config = missing[name := waiting.pop(0)]
                remove(self.out / f"{name}.stop")       # left by a killed command
                going[name] = self.submit(str(self.out / name), config.imports, config.to_dict(),
                                          begun[name])
                begun[name] += 1
            time.sleep(LOOK_SECONDS)
            for name, job in list(going.items()):
                # before the look for the record, because a job writes its record before it is done
                over = job.done()
                if (self.out / f"{name}.json").is_file():
                    del going[name]
                    done += 1
                    say(f"{done} of {len(missing)} runs")
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
            # keep the last line of each traceback, which is the error message
            words = "; ".join({str(error).strip().rpartition("\n")[2]: 0 for error in failed})
            raise RunFailedError(f"{len(missing) - done} of {len(missing)} runs did not finish; "
                                 f"repeat the command to continue. Their errors: {words}")


def work(pipe: int) -> None:
    """The main function of a worker process: makes one run after another. `pipe`: the file
    descriptor of a pipe. Its first line is the pid of the worker's keeper; each further line has
    the arguments of `make` for one run, as JSON."""
    lines = open(pipe)
    # A keeper that is killed cannot end this process. So the kernel kills this process when the
    # keeper ends, and at once if the keeper ended while this process was importing.
    processes.end_with_parent(int(next(lines)))
    for line in lines:
        make(*json.loads(line))


def make(where: str, imports: Sequence[str], values: Mapping[str, Any], restarts: int) -> None:
    """Makes or continues a run, and writes its record `where`.json.

    where:    path of the run folder
    imports:  modules that the parent process imported
    values:   the Config as a dict
    restarts: how often the run was restarted, for the record

    If the run cannot continue from its folder, moves the folder to DAMAGED and starts again. Raises
    RunFailedError, and SystemExit when this process must end."""
    from lpkit.training.background import train
    from lpkit.training.control import Control

    path, begun, control = Path(where), time.perf_counter(), Control()
    resume = os.path.lexists(path)
    Config(imports=imports)     # imports the modules, so that `values` may name their rows
    config = Config.from_dict(values)

    def heed(record: StepRecord) -> None:
        """Stop the run after the step that the file `where`.stop names."""
        # >=, because a run that continues from a checkpoint repeats steps
        if (stop := Path(f"{where}.stop")).is_file() and record.step >= int(stop.read_text()):
            end("judge")

    try:
        if (path / CONFIG).is_file() and Run.open(path).config.to_dict() != config.to_dict():
            raise DamagedError(f"{named(path)} is the folder of another run")
        more = {"out": path, "resume": resume, "observers": [heed]}
        world = config.parallel.devices
        ranks = launch(config, processes=world, **more) if world > 1 else None
        # `heed` needs it; set before any rank has imported torch and made its first step
        end = ranks.stop if ranks else control.stop
        summary = (ranks.result() if ranks else train(config, control=control, **more)).summary
        if summary["stopped_by"] == "judge":
            summary |= {"val_loss": None, "stopped_after": summary["steps"]}
        elif summary["status"] != "complete":     # a signal stopped it; it wrote a checkpoint
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
        # the loss diverged to NaN or infinity: for a claim, this is a result, not an error
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
