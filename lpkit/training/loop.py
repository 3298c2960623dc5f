"""The training loop: update the weights, evaluate, save checkpoints, and record each step.

A GPU never waits for the host: the host gives the GPU up to AHEAD more updates before it reads the
loss of an update, which by then has arrived in host memory.
"""

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

# Key in a checkpoint's state. If a stop has interrupted the evaluation after a step, the checkpoint
# has the StepRecord of the step under this key, and the resumed run repeats the evaluation.
RECORD = "record"
AHEAD = 2       # most updates that the device has been given and whose numbers are not yet read
PAUSED_SECONDS = 0.1        # a paused run looks for a new request this often


def fit(training: Training, path: Path, *, resume: bool = False,
        observers: Sequence[Observer] | Observers = (), control: Control | None = None,
        account: RunAccount | None = None) -> Run:
    """Train into the run folder `path`, and return the Run. It is partial if the run was stopped.

    resume:    continue the run in `path`
    observers: each is called with the StepRecord of every step. An observer that raises an error is
               not called again, the summary has the error, and the run continues
    control:   the requests to pause or stop
    account:   with an account, the summary has the MFU, and, if memory has run out, the bytes that
               were held

    Raises ConfigError if the folder holds another run. Raises RunFailedError if the run cannot
    continue (a loss that is not a number, a full disk, no memory left). Every other error is
    recorded in the summary and raised.
    """
    config, control, run = training.config, control or Control(), Run.at(path)
    observers = observers if isinstance(observers, Observers) else Observers(observers)
    if not training.ranks.first:
        return _follow(training, run, observers, account)
    hardware.reset_peak(training.device)
    # If the process is killed, the summary keeps "running", and `Run.summary` reports "killed".
    summary: dict[str, Any] = {"status": "running", "error": None, "out_of_memory": None,
                               "from_step": 0, "damaged": []}
    with _owned(path):
        here = environment(training.decisions) | _identified(training, run, resume)
        sweep(path)
        energy_before, reached = hardware.energy_joules(training.device), None
        try:
            saved, begun = _begin(training, run, here)
            summary |= begun
            reached = summary["from_step"]
            with open_own(path / runs.METRICS, "a") as log:
                chain = records.Chain(path / runs.METRICS, run.mark)
                for record in _steps(training, run, saved, control):
                    log.write(chain.line(record.to_dict()))
                    log.flush()
                    observers(record)
                    _refuse_nan(record, run, training)
                    reached = record.step
            summary["status"] = "complete" if reached == config.steps else "stopped"
        except BaseException as error:
            # KeyboardInterrupt: a second Ctrl-C, which does not wait for a checkpoint
            status = "killed" if isinstance(error, KeyboardInterrupt) else "failed"
            summary |= {"status": status, "error": f"{type(error).__name__}: {error}"}
            if account and out_of_memory(error):
                summary |= _without_memory(error, account, reached or 0, run)
                raise RunFailedError(summary["error"]) from error
            raise
        finally:
            summary |= {"observer_errors": observers.errors,
                        "stopped_by": control.stopped_by or None}
            # If the run has failed, its own error must be raised, not an error of this block.
            with suppress(OSError, MemoryError) if summary["error"] else nullcontext():
                results = runs.results(run)
                if summary["error"] is None:    # after an error, the device may have failed
                    if account:
                        summary |= _mfu(account, results["tokens_per_second"], observers.errors)
                    summary |= _energy(energy_before, hardware.energy_joules(training.device))
                    summary["energy_tokens"] = (config.tokens_after(reached)
                                                - config.tokens_after(summary["from_step"]))
                _conclude(run, results | summary, reached, config)
    return run


def _follow(training: Training, run: Run, observers: Observers, account: RunAccount | None) -> Run:
    """Train on a rank other than rank 0: take the same updates, and write this rank's part of each
    checkpoint, but no other file. Stop when rank 0 stops. Raises RunFailedError, as `fit` does."""
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
            message = _without_memory(error, account, reached, run)["error"]
            raise RunFailedError(message) from error
        raise
    return run


def _begin(training: Training, run: Run, here: dict[str, Any]
           ) -> tuple[Checkpoint | None, dict[str, Any]]:
    """Load the newest good checkpoint, if there is one, and record this start of the run in its
    folder. Lines of the metrics after the checkpoint are removed.

    here: the entry of this start in environment.json
    Return the checkpoint, and three entries of the summary: `from_step` (its step, or 0), `damaged`
    (a sentence for each damaged file or line) and `start` (the weights that the run started from).
    """
    problems = run.problems
    saved, damaged = _restore(training, run)
    start, before = saved.step if saved else 0, run.environments
    damaged += problems
    if before and not start:
        print(f"lpkit: {str(run.path)!r} has no whole checkpoint, so it starts again from step 0; "
              f"{'; '.join(damaged) or 'none was saved'}", file=sys.stderr)
    begun = {"from_step": start, "damaged": damaged, "start": training.start.where or None}
    now = here | begun | {"lines": saved.lines if saved else {}}
    # The summary has checksums of the other files ("vouches"). If the process is killed between two
    # of these writes, no checksum may be wrong. So the first summary has no checksums, and the
    # summary with the checksums of the new files is written last.
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
    """Write the summary. `reached`: the last step. If it is None, the run could not even load its
    checkpoint, and the summary of its earlier start stays."""
    path = run.path / runs.SUMMARY
    if reached is not None:
        summary |= {"steps": reached, "tokens": config.tokens_after(reached)}
    if reached is not None or not path.exists():
        more = {records.RUN: run.mark, "vouches": run.vouches(ended=True)}
        records.write(path, summary | more)


def _without_memory(error: BaseException, account: RunAccount, step: int, run: Run
                    ) -> dict[str, Any]:
    """Return the entries `error` and `out_of_memory` for the summary of a run whose memory has run
    out after `step` updates."""
    report = account.report(error, _last_checkpoint(run))
    message = (f"out of memory after step {step} ({report['error']}); {report.pop('sentence')}; "
               f"kept: {report['last_checkpoint'] or 'no checkpoint'}. Other settings need another "
               f"--out; with more memory, go on with --resume")
    return {"error": message, "out_of_memory": report}


class HostMoment:
    """The time at which it is created, by the host's clock. It has the methods of torch.cuda.Event
    that the loop uses. A CPU has finished all earlier work when it is created."""

    def __init__(self):
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "HostMoment") -> float:
        """Returns milliseconds."""
        return 1e3 * (later.at - self.at)


def moment(device: torch.device) -> "HostMoment | torch.cuda.Event":
    """Return an event that is complete when the device has finished the work that it has been given
    so far. Times between two events are measured by the device's clock."""
    if device.type != "cuda":
        return HostMoment()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Arriving:
    """Named numbers of an update, of which some are tensors on the device. They are copied to the
    host without waiting for the GPU; `values` waits for them."""

    def __init__(self, numbers: Mapping[str, Tensor | float], device: torch.device):
        self.numbers = dict(numbers)
        there = [name for name, number in numbers.items()
                 if torch.is_tensor(number) and number.device.type == device.type]
        sent = torch.stack([numbers[name].detach().double() for name in there])
        self.sent = there, sent.to("cpu", non_blocking=True)
        self.at = moment(device)

    def values(self) -> dict[str, float]:
        """Wait for the numbers, and return them."""
        self.at.synchronize()
        names, sent = self.sent
        return {name: float(number)
                for name, number in (self.numbers | dict(zip(names, sent))).items()}


@dataclass(frozen=True)
class _Begun:
    """An update that the device has been given and may not have finished."""

    step: int
    since: Any      # a `moment`: the end of the previous update, from which step_seconds counts
    done: Update
    numbers: Arriving

    @classmethod
    def after(cls, since: Any, step: int, training: Training, phases: Phases) -> "_Begun":
        with nullcontext() if phases is nullcontext else training.undone():
            done = training.update(step - 1, phases=phases)
        numbers = {"loss": done.loss, "grad_norm": done.grad_norm, **done.extra}
        return cls(step, since, done, Arriving(numbers, training.device))

    def record(self, training: Training) -> StepRecord:
        """Return the step's record. Waits until the device has finished the update."""
        extra = self.numbers.values()
        return StepRecord(
            step=self.step, loss=extra.pop("loss"), grad_norm=extra.pop("grad_norm"),
            lr=self.done.lr,
            tokens=training.config.tokens_after(self.step),
            step_seconds=self.since.elapsed_time(self.numbers.at) / 1e3,
            peak_bytes=hardware.peak_bytes(training.device), extra=extra)


def _steps(training: Training, run: Run, begin: Checkpoint | None, control: Control
           ) -> Iterator[StepRecord]:
    """Take all steps after checkpoint `begin`: update, evaluate, save. Yield a record of each step.

    A record is yielded after its numbers have arrived from the device. On a GPU this is up to AHEAD
    steps later, but always before the run evaluates, saves, pauses or gives up a step.

    If a stop is requested, the current step is given up if it has micro-batches left, and its
    gradients are discarded. An evaluation is given up, too; the resumed run repeats it, because the
    checkpoint stores the record of the step (RECORD). The first step may compile for minutes and
    has no work to lose, so a signal interrupts it at any instruction.
    """
    config, device = training.config, training.device
    waiting: deque[_Begun] = deque()
    saved = start = begin.step if begin else 0
    # what a governor's `begin` has changed cannot be undone, so such a step is never given up
    begins = any(hasattr(governor, "begin") for governor in training.governors.values())
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
                # Record the earlier steps. RuntimeError: the device has failed, nothing arrives.
                with suppress(RuntimeError):
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
    """Evaluate, and return (the record with its val_loss, False). If the evaluation was given up
    because of a stop, return (the record as it was, True)."""
    try:
        # With several ranks, a signal must not raise: all ranks must give up at the same batch.
        with control.breaking(training.ranks.world == 1):
            loss = training.evaluate(phases=partial(_heeding, training, control))
    except GivenUp:
        return record, True
    return replace(record, val_loss=loss), False


# Not a closure over training: after an error, `background` clears the variables of the traceback's
# frames, but a closure that the traceback holds would keep the model in memory.
@contextmanager
def _heeding(training: Training, control: Control, phase: str) -> Iterator[None]:
    """Raise GivenUp before a micro-batch or an evaluation's batch, if a stop was requested. Rank 0
    decides, so that all ranks give up at the same point."""
    if phase in ("forward", "evaluation") and training.ranks.broadcast(control.asked()) == STOP:
        raise GivenUp
    yield


def _stopped(training: Training, control: Control) -> bool:
    """Wait while the run is paused, and return whether to stop. Rank 0 decides for all ranks."""
    while (request := training.ranks.broadcast(control.asked())) == PAUSE:
        control.go_on.wait(PAUSED_SECONDS)
    return request == STOP


def _arrived(training: Training, waiting: deque[_Begun], at_most: int) -> Iterator[StepRecord]:
    """Yield the records of updates whose numbers have arrived, oldest first. Wait until at most
    `at_most` updates are left in `waiting`."""
    while waiting and (len(waiting) > at_most or waiting[0].numbers.at.query()):
        yield waiting.popleft().record(training)


def _save(training: Training, run: Run, step: int, unevaluated: StepRecord | None) -> None:
    """Save a checkpoint of `step`. `unevaluated`: the step's record, if its evaluation was given
    up."""
    if training.ranks.first:
        # The checkpoint has a checksum of the metrics so far, so they must be on disk first.
        sync(run.path / runs.METRICS)
    state = training.state_dict()
    tensors = {name: training.sharding.placed(name, value) for name, value in state.items()
               if isinstance(value, (Tensor, Cut))}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    # in a pipeline, each stage has only the numbers of its own parameters, so all are joined
    if training.sharding.layout.pipeline > 1:
        numbers = {name: value for numbers_of_rank in everybodys(numbers)
                   for name, value in numbers_of_rank.items()}
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
    """Load the newest good checkpoint into `training`. Return the checkpoint without its tensors
    (None: there is none), and a sentence for each damaged checkpoint."""
    checkpoint.sweep(run.checkpoints)       # all ranks wait here until rank 0 has removed old files
    saved, damaged = checkpoint.load_latest(run.checkpoints, run=run.identity["run"],
                                            blank=training.blank)
    if saved is not None:
        training.load_state_dict(saved.tensors | saved.state["optimizer"], source=saved.path)
        saved = replace(saved, tensors={})      # free the loaded tensors
    return saved, damaged


def _last_checkpoint(run: Run) -> str | None:
    """Return the name of the newest checkpoint's folder."""
    kept = checkpoint.folders(run.checkpoints)
    return kept[0].name if kept else None


@contextmanager
def _owned(path: Path) -> Iterator[None]:
    """Lock the run folder in this block: two processes must not write the same run."""
    # ExitStack: only errors of the lock become ConfigErrors, not an OSError of the block.
    with ExitStack() as held:
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
    """Write the run's identity, config and tokenizer, if the folder holds no run yet. Otherwise
    check that it holds this run: raise ConfigError if not. Return the entry `extended` for
    environment.json if `config.steps` was raised; else an empty dict."""
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
    """Raise ConfigError if a resumed run would get other initial weights (`start`), other tokens or
    another tokenizer than when it began."""
    # A run that was killed while it began may have only some of these files: without them and
    # without a checkpoint, it has not begun.
    if not (any((run.path / name).exists() for name in (runs.IDENTITY, runs.ENVIRONMENT))
            or checkpoint.folders(run.checkpoints)):
        return
    identity, source = run.identity, training.config.data.source
    training.start.refuse_other(run)
    if identity["tokens"] != training.tokens:
        raise ConfigError(f"cannot resume {str(run.path)!r}: its tokens have the SHA-256 "
                          f"{identity['tokens']}, and data.source={source} now gives "
                          f"{training.tokens}; give back the text that it was begun with, or "
                          f"start a new run with another --out")
    if identity["tokenizer"] != records.digest(training.tokenizer):
        raise ConfigError(f"cannot resume {str(run.path)!r}: data.source={source} now gives "
                          f"another tokenizer than the one that it was begun with; start a new run "
                          f"with another --out")


def _finite(record: StepRecord) -> bool:
    return math.isfinite(record.loss) and (math.isfinite(record.grad_norm)
                                           or record.extra.get("dropped", 0) > 0)


def _refuse_nan(record: StepRecord, run: Run, training: Training) -> None:
    """Raise RunFailedError if the loss or the gradient norm of a step is NaN or infinite."""
    if not _finite(record):
        happened = f"step {record.step}: loss={record.loss}, grad_norm={record.grad_norm}"
        from lpkit.precision.linear import nonfinite_report  # only runs that cast load this module

        if casts := nonfinite_report(training.model):
            happened += f"; {casts}"
        raise RunFailedError(
            f"{happened}; kept: {_last_checkpoint(run) or 'no checkpoint yet'}. A smaller "
            f"optimizer.lr or a longer schedule.warmup_steps is the usual way out")


def _energy(before: tuple[float, str] | None, after: tuple[float, str] | None) -> dict[str, Any]:
    """Return the energy of the device between two readings (joules, source), in watt-hours. It
    includes evaluations and checkpoints. None if there is no counter, or if it has wrapped around.
    """
    known = before and after and after[0] >= before[0]
    return {"energy_wh": (after[0] - before[0]) / 3600 if known else None,
            "energy_source": after[1] if known else None}


def _mfu(account: RunAccount, tokens_per_second: float | None,
         errors: list[str]) -> dict[str, float]:
    """Return {"mfu": MFU}. If the peak FLOP/s cannot be measured, append the reason to `errors` and
    return an empty dict: the run is complete without its MFU."""
    if not tokens_per_second:
        return {}
    try:
        return {"mfu": account.mfu(tokens_per_second)}
    except Exception as error:
        errors.append(f"the peak FLOP/s for the MFU: {type(error).__name__}: {error}")
        return {}
