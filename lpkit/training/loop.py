"""The training loop: update, evaluate, save, and write down what happened. A GPU never waits for
the host: an update's numbers are read when they have arrived."""

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from lpkit import hardware, records
from lpkit.config import Config
from lpkit.contracts import Observer, RunAccount, StepRecord
from lpkit.errors import ConfigError, out_of_memory
from lpkit.files import locked, open_own, sweep, sync, write_atomically
from lpkit.parallel.cut import Cut
from lpkit.parallel.ranks import everybodys
from lpkit.training import checkpoint, runs
from lpkit.training.build import environment
from lpkit.training.checkpoint import Checkpoint
from lpkit.training.control import PAUSE, STOP, Control, GivenUp
from lpkit.training.runs import Observers, Run, RunFailedError
from lpkit.training.steps import Phases
from lpkit.training.training import Training, Update

RECORD = "record"       # in a checkpoint's state: of the step whose evaluation was given up
AHEAD = 2       # updates in the device's queue at most, whose numbers the host has not read
PAUSED_SECONDS = 0.1        # after which the other ranks hear again that they wait


def fit(training: Training, path: Path, *, resume: bool = False,
        observers: Sequence[Observer] | Observers = (), control: Control | None = None,
        account: RunAccount | None = None) -> Run:
    """Train into the run folder `path` and return the Run, whole or, when stopped, partial.

    With an `account`, the summary has its MFU, and says what was held where memory ended.
    An observer that raises is dropped and named in the summary, and the run goes on.
    Raises ConfigError when the folder holds another run, RunFailedError when the run cannot go on
    (a loss that is not a number, a full disk, no memory left). Whatever else is raised on the way
    is recorded as the run's error first.
    """
    config, control, run = training.config, control or Control(), Run.at(path)
    observers = observers if isinstance(observers, Observers) else Observers(observers)
    if not training.ranks.first:
        return _follow(training, run, observers, account)
    hardware.reset_peak(training.device)
    # what stays "running" was killed
    summary: dict[str, Any] = {"status": "running", "error": None, "out_of_memory": None,
                               "from_step": 0, "damaged": []}
    with _owned(path):
        here = environment(training.decisions) | _identified(training, run, resume)
        sweep(path)
        energy_before, reached = hardware.energy_joules(training.device), None
        try:
            found, begun = _begin(training, run, here)
            summary |= begun
            reached = summary["from_step"]
            with open_own(path / runs.METRICS, "a") as log:
                chain = records.Chain(path / runs.METRICS, run.mark)
                for record in _steps(training, run, found, control):
                    log.write(chain.line(record.to_dict()))
                    log.flush()
                    observers(record)
                    _refuse_nan(record, run, training)
                    reached = record.step
            summary["status"] = "complete" if reached == config.steps else "stopped"
        except BaseException as error:
            # a second Ctrl-C did not wait for a checkpoint
            status = "killed" if isinstance(error, KeyboardInterrupt) else "failed"
            summary |= {"status": status, "error": f"{type(error).__name__}: {error}"}
            if account and out_of_memory(error):
                summary |= _without_memory(error, account, reached or 0, run)
                raise RunFailedError(summary["error"]) from error
            raise
        finally:
            summary |= {"observer_errors": observers.errors,
                        "stopped_by": control.stopped_by or None}
            # the first error is the one to raise
            with suppress(OSError, MemoryError) if summary["error"] else nullcontext():
                found = runs.results(run)
                if summary["error"] is None:    # a device that failed is not measured any more
                    if account:
                        summary |= _mfu(account, found["tokens_per_second"], observers.errors)
                    summary |= _energy(energy_before, hardware.energy_joules(training.device))
                    summary["energy_tokens"] = (config.tokens_after(reached)
                                                - config.tokens_after(summary["from_step"]))
                _conclude(run, found | summary, reached, config)
    return run


def _follow(training: Training, run: Run, observers: Observers, account: RunAccount | None) -> Run:
    """The other ranks make the same updates, and their part of each checkpoint. They write nothing
    else, and stop when the first one does. Raises RunFailedError, as `fit`."""
    hardware.reset_peak(training.device)
    reached = 0
    try:
        saved, _ = _restore(training, run)
        reached = saved.step if saved else 0
        for record in _steps(training, run, saved, Control()):
            observers(record)
            _refuse_nan(record, run, training)
            reached = record.step
    except Exception as error:
        if account and out_of_memory(error):
            said = _without_memory(error, account, reached, run)["error"]
            raise RunFailedError(said) from error
        raise
    return run


def _begin(training: Training, run: Run, here: dict[str, Any]
           ) -> tuple[Checkpoint | None, dict[str, Any]]:
    """Go back to the newest good checkpoint, and record this start. Returns that, `from_step`, and
    `damaged`: a sentence for each file or line that is passed over."""
    problems = run.problems
    saved, damaged = _restore(training, run)
    start, before = saved.step if saved else 0, run.environments
    damaged += problems
    if before and not start:
        print(f"lpkit: {str(run.path)!r} has no whole checkpoint, so it starts again from step 0; "
              f"{'; '.join(damaged) or 'none was saved'}", file=sys.stderr)
    begun = {"from_step": start, "damaged": damaged, "start": training.start.where or None}
    now = here | begun | {"lines": saved.lines if saved else {}}
    # a kill before the next summary leaves files of which this one says nothing
    running = {"status": "running", records.RUN: run.mark}
    records.write(run.path / runs.SUMMARY, running)
    write_atomically(run.path / runs.CONFIG, runs.sealed_yaml(training.config, run.mark))
    records.write(run.path / runs.ENVIRONMENT, {records.RUN: run.mark, "starts": [*before, now]})
    for path in {run.path / runs.METRICS, *run.path.glob("*.jsonl")}:
        again = path.name == runs.METRICS and saved and RECORD in saved.state
        records.rewind(path, start - bool(again))
    records.write(run.path / runs.SUMMARY, running | {"vouches": run.vouches(ended=False)})
    return saved, begun


def _conclude(run: Run, summary: dict[str, Any], reached: int | None, config: Config) -> None:
    """Write the summary. Of a run that could not go on at all, the one that it had stays."""
    path = run.path / runs.SUMMARY
    if reached is not None:
        summary |= {"steps": reached, "tokens": config.tokens_after(reached)}
    if reached is not None or not path.exists():
        more = {records.RUN: run.mark, "vouches": run.vouches(ended=True)}
        records.write(path, summary | more)


def _without_memory(error: BaseException, account: RunAccount, step: int, run: Run
                    ) -> dict[str, Any]:
    """Returns what the summary says of a run whose memory ended."""
    report = account.report(error, _last_checkpoint(run))
    said = (f"out of memory after step {step} ({report['error']}); {report.pop('sentence')}; kept: "
            f"{report['last_checkpoint'] or 'no checkpoint'}. Other settings need another --out; "
            f"with more memory, go on with --resume")
    return {"error": said, "out_of_memory": report}


class HostMoment:
    """Now, by the host's clock: what was computed before is there. As an event of a device."""

    def __init__(self):
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "HostMoment") -> float:
        """In milliseconds."""
        return 1e3 * (later.at - self.at)


def moment(device: torch.device) -> "HostMoment | torch.cuda.Event":
    """The moment when the device is done with its work so far, by its own clock."""
    if device.type != "cuda":
        return HostMoment()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Arriving:
    """Numbers by name, on their way to the host: from a GPU into pinned memory, without waiting."""

    def __init__(self, numbers: Mapping[str, Tensor | float], device: torch.device):
        self.numbers = dict(numbers)
        there = [name for name, one in numbers.items()
                 if torch.is_tensor(one) and one.device.type == device.type]
        sent = torch.stack([numbers[name].detach().double() for name in there])
        self.sent = there, sent.to("cpu", non_blocking=True)
        self.at = moment(device)

    def values(self) -> dict[str, float]:
        """Waits until they are there."""
        self.at.synchronize()
        names, sent = self.sent
        return {name: float(one) for name, one in (self.numbers | dict(zip(names, sent))).items()}


@dataclass(frozen=True)
class _Begun:
    """An update that the device was handed, and what is known of it without waiting."""

    step: int
    since: Any      # a moment: when the one before it was done
    done: Update
    numbers: Arriving

    @classmethod
    def after(cls, since: Any, step: int, training: Training, phases: Phases) -> "_Begun":
        with nullcontext() if phases is nullcontext else training.undone():
            done = training.update(step - 1, phases=phases)
        numbers = {"loss": done.loss, "grad_norm": done.grad_norm, **done.extra}
        return cls(step, since, done, Arriving(numbers, training.device))

    def record(self, training: Training) -> StepRecord:
        """Waits for the device, where it is not done."""
        extra = self.numbers.values()
        return StepRecord(
            step=self.step, loss=extra.pop("loss"), grad_norm=extra.pop("grad_norm"),
            lr=self.done.lr,
            tokens=training.config.tokens_after(self.step),
            step_seconds=self.since.elapsed_time(self.numbers.at) / 1e3,
            peak_bytes=hardware.peak_bytes(training.device), extra=extra)


def _steps(training: Training, run: Run, begin: Checkpoint | None, control: Control
           ) -> Iterator[StepRecord]:
    """Update, evaluate, save. A step is told when its numbers have arrived: on a GPU up to AHEAD
    steps late, and before anything is evaluated, saved, paused or given up.

    A stop gives up the step that has micro-batches left, or the evaluation, which comes again when
    the run goes on: its checkpoint has the record that waits for it. A signal breaks off the first
    step, too, which may compile for minutes: nothing was done that could be lost.
    """
    config, device = training.config, training.device
    waiting: deque[_Begun] = deque()
    saved = start = begin.step if begin else 0
    # a governor's begin cannot be undone; its end comes when a step is not given up any more
    begins = any(hasattr(one, "begin") for one in training.governors.values())
    parts = config.micro_batches > 1 and training.executor.in_parts and not begins
    phases = partial(_heeding, training, control) if parts else nullcontext

    def every(n: int, step: int) -> bool:
        return step == config.steps or (n > 0 and step % n == 0)

    if begin and RECORD in begin.state:
        record, stopping = _evaluated(StepRecord(**begin.state[RECORD]), training, control)
        yield record
        if stopping:
            return
    for step in range(start + 1, config.steps + 1):
        if control.asked() == PAUSE:
            yield from _arrived(training, waiting, 0)
        if not (stopping := _stopped(training, control)):
            since = waiting[-1].numbers.at if waiting else moment(device)
            try:
                with control.breaking(step == start + 1 and training.ranks.world == 1):
                    waiting.append(_Begun.after(since, step, training, phases))
            except GivenUp:
                stopping = True
            except BaseException:
                with suppress(RuntimeError):    # of a device that failed nothing arrives
                    yield from _arrived(training, waiting, 0)
                raise
        step -= stopping
        evaluating = not stopping and every(config.eval_every, step)
        ending = evaluating or stopping or every(config.checkpoint_every, step)
        unevaluated = None
        for record in _arrived(training, waiting, 0 if ending else AHEAD):
            if evaluating and record.step == step and _finite(record):
                record, stopping = _evaluated(record, training, control)
                unevaluated = record if stopping else None
            if not unevaluated:
                yield record
        if step > saved and (stopping or every(config.checkpoint_every, step)):
            _save(training, run, step, unevaluated)
            saved = step
        if unevaluated:
            yield unevaluated
        if stopping:
            return


def _evaluated(record: StepRecord, training: Training, control: Control) -> tuple[StepRecord, bool]:
    """Returns the record with its evaluation, and whether that was given up."""
    try:
        with control.breaking(training.ranks.world == 1):   # ranks must give up the same thing
            loss = training.evaluate(phases=partial(_heeding, training, control))
    except GivenUp:
        return record, True
    return replace(record, val_loss=loss), False


# A frame that an error keeps is cleared, but not what a function closes over.
@contextmanager
def _heeding(training: Training, control: Control, phase: str) -> Iterator[None]:
    """Lets all ranks hear before each part whether to give up."""
    if phase in ("forward", "evaluation") and training.ranks.told(control.asked()) == STOP:
        raise GivenUp
    yield


def _stopped(training: Training, control: Control) -> bool:
    """Waits while paused. The first rank is asked, and all do what it says."""
    while (said := training.ranks.told(control.asked())) == PAUSE:
        control.go_on.wait(PAUSED_SECONDS)
    return said == STOP


def _arrived(training: Training, waiting: deque[_Begun], at_most: int) -> Iterator[StepRecord]:
    """Yields records whose numbers are there, and waits for all but `at_most`."""
    while waiting and (len(waiting) > at_most or waiting[0].numbers.at.query()):
        yield waiting.popleft().record(training)


def _save(training: Training, run: Run, step: int, unevaluated: StepRecord | None) -> None:
    if training.ranks.first:
        sync(run.path / runs.METRICS)   # no step that the checkpoint vouches for gets lost
    state = training.state_dict()
    tensors = {name: training.sharding.placed(name, value) for name, value in state.items()
               if isinstance(value, (Tensor, Cut))}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    if training.sharding.layout.pipeline > 1:       # each stage has those of its parameters
        numbers = {name: value for one in everybodys(numbers) for name, value in one.items()}
    waits = {RECORD: unevaluated.to_dict()} if unevaluated else {}
    try:
        checkpoint.save(run.checkpoints, step, tensors, {"optimizer": numbers, **waits},
                        run=run.identity["run"], keep=training.config.keep_checkpoints,
                        lines=run.vouches(ended=False)["lines"] if training.ranks.first else None)
    except OSError as error:
        raise RunFailedError(
            f"step {step}: the checkpoint could not be written ({error.strerror or error}); kept: "
            f"{_last_checkpoint(run) or 'none before it'}. Free some space or choose another "
            f"--out, then go on with --resume") from error


def _restore(training: Training, run: Run) -> tuple[Checkpoint | None, list[str]]:
    """Load the newest good checkpoint, if there is one. A sentence for each damaged one."""
    checkpoint.sweep(run.checkpoints)       # and no rank reads before the first has written
    saved, damaged = checkpoint.load_latest(run.checkpoints, run=run.identity["run"],
                                            blank=training.blank)
    if saved is not None:
        training.load_state_dict(saved.tensors | saved.state["optimizer"], source=saved.path)
        saved = replace(saved, tensors={})      # a run is long, and they are loaded
    return saved, damaged


def _last_checkpoint(run: Run) -> str | None:
    kept = checkpoint.folders(run.checkpoints)
    return kept[0].name if kept else None


@contextmanager
def _owned(path: Path) -> Iterator[None]:
    """Two processes must not write one run."""
    with ExitStack() as held:       # an OSError of the training itself is not about the lock
        try:
            held.enter_context(locked(path / runs.LOCK, wait=False))
        except BlockingIOError as error:
            raise ConfigError(f"another process is training into {str(path)!r} "
                              f"({error.strerror}); choose another --out") from None
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {str(path)!r} ({error.strerror}); "
                              f"choose another --out") from None
        yield


def _identified(training: Training, run: Run, resume: bool) -> dict[str, Any]:
    """Makes the folder this run's, or refuses it. Returns what the record says of a run that is
    trained longer than it was meant to be."""
    config, path = training.config, run.path
    extended = run.refuse_another(config, resume=resume)
    _refuse_other_data(run, training)
    if not (path / runs.IDENTITY).exists():
        who = runs.identify(config, training.tokens, training.tokenizer, born=uuid4().hex,
                            start=training.start.sha256)
        mark = who["run"][:records.MARK_DIGITS]
        write_atomically(path / runs.CONFIG, runs.sealed_yaml(config, mark))
        records.write(path / runs.TOKENIZER, {**training.tokenizer, records.RUN: mark})
        records.write(path / runs.IDENTITY, who)
    return extended


def _refuse_other_data(run: Run, training: Training) -> None:
    """A run goes on with the weights and the text that it was begun with. Raises ConfigError."""
    # a kill in the first moments came between the files
    if not (any((run.path / name).exists() for name in (runs.IDENTITY, runs.ENVIRONMENT))
            or checkpoint.folders(run.checkpoints)):
        return
    said, source = run.identity, training.config.data.source
    training.start.refuse_other(run)
    if said["tokens"] != training.tokens:
        raise ConfigError(f"cannot resume {str(run.path)!r}: its tokens have the SHA-256 "
                          f"{said['tokens']}, and data.source={source} now gives "
                          f"{training.tokens}; give back the text that it was begun with, or "
                          f"start anew with another --out")
    if said["tokenizer"] != records.digest(training.tokenizer):
        raise ConfigError(f"cannot resume {str(run.path)!r}: data.source={source} now gives "
                          f"another tokenizer than the one that it was begun with; start anew "
                          f"with another --out")


def _finite(record: StepRecord) -> bool:
    return math.isfinite(record.loss) and (math.isfinite(record.grad_norm)
                                           or record.extra.get("dropped", 0) > 0)


def _refuse_nan(record: StepRecord, run: Run, training: Training) -> None:
    if not _finite(record):
        happened = f"step {record.step}: loss={record.loss}, grad_norm={record.grad_norm}"
        from lpkit.precision.linear import nonfinite_report  # of runs that cast, and of them alone

        if casts := nonfinite_report(training.model):
            happened += f"; {casts}"
        raise RunFailedError(
            f"{happened}; kept: {_last_checkpoint(run) or 'no checkpoint yet'}. A smaller "
            f"optimizer.lr or a longer schedule.warmup_steps is the usual way out")


def _energy(before: tuple[float, str] | None, after: tuple[float, str] | None) -> dict[str, Any]:
    """Returns the energy of this call, evaluation and checkpoints included. A counter that went
    round says nothing."""
    known = before and after and after[0] >= before[0]
    return {"energy_wh": (after[0] - before[0]) / 3600 if known else None,
            "energy_source": after[1] if known else None}


def _mfu(account: RunAccount, tokens_per_second: float | None,
         errors: list[str]) -> dict[str, float]:
    """A run whose MFU cannot be measured is what it was, and `errors` say why."""
    if not tokens_per_second:
        return {}
    try:
        return {"mfu": account.mfu(tokens_per_second)}
    except Exception as error:
        errors.append(f"the peak FLOP/s for the MFU: {type(error).__name__}: {error}")
        return {}
