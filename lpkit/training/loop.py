"""The training loop: update, evaluate, save, and write down what happened."""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lpkit import hardware, records
from lpkit.config import Config, flat
from lpkit.contracts import Observer, StepRecord
from lpkit.errors import ConfigError
from lpkit.files import locked, open_own, sweep, sync, write_atomically
from lpkit.precision.linear import nonfinite_report
from lpkit.predict.flops import training_flops_per_token
from lpkit.training import checkpoint, runs
from lpkit.training.ahead import AHEAD, Arriving, moment
from lpkit.training.background import PAUSE, STOP, Control
from lpkit.training.build import environment
from lpkit.training.exhausted import Account, out_of_memory
from lpkit.training.runs import Observers, Run, RunFailedError
from lpkit.training.training import Training, Update

PAUSED_SECONDS = 0.1        # after which the other ranks hear again that they wait


def fit(training: Training, path: Path, *, resume: bool = False,
        observers: Sequence[Observer] | Observers = (), control: Control | None = None) -> Run:
    """Train into the run folder `path` and return the Run, whole or, when stopped, partial.

    An observer that raises is dropped and named in the summary, and the run goes on.
    Raises ConfigError when the folder holds another run, RunFailedError when the run cannot go on
    (a loss that is not a number, a full disk, no memory left). Whatever else is raised on the way
    is recorded as the run's error first.
    """
    config, control, run = training.config, control or Control(), Run(path)
    observers = observers if isinstance(observers, Observers) else Observers(observers)
    if not training.ranks.first:
        return _follow(training, run, observers)
    hardware.reset_peak(training.device)
    account = Account(training)
    # what stays "running" was killed
    summary: dict[str, Any] = {"status": "running", "error": None, "out_of_memory": None,
                               "from_step": 0, "damaged": []}
    with _owned(path):
        here = environment(training.decisions) | _identified(training, run, resume)
        sweep(path)
        energy_before, reached = hardware.energy_joules(training.device), None
        try:
            summary |= _begin(training, run, here)
            reached = summary["from_step"]
            with open_own(path / runs.METRICS, "a") as log:
                for record in _steps(training, run, reached, control):
                    log.write(records.line(record.to_dict()))
                    log.flush()
                    observers(record)
                    _refuse_nan(record, run, training)
                    reached = record.step
            summary["status"] = "complete" if reached == config.steps else "stopped"
        except BaseException as error:
            # a second Ctrl-C did not wait for a checkpoint
            status = "killed" if isinstance(error, KeyboardInterrupt) else "failed"
            summary |= {"status": status, "error": f"{type(error).__name__}: {error}"}
            if out_of_memory(error):
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
                    summary |= _mfu(training, found["tokens_per_second"], observers.errors)
                    summary |= _energy(energy_before, hardware.energy_joules(training.device))
                    trained = reached - summary["from_step"]
                    summary["energy_tokens"] = trained * config.tokens_per_step
                _conclude(run, found | summary, reached, config)
    return run


def _follow(training: Training, run: Run, observers: Observers) -> Run:
    """What the other ranks do: the same updates, and their part of each checkpoint. They write
    nothing else, and stop when the first one does. Raises RunFailedError, as `fit`."""
    hardware.reset_peak(training.device)
    account, reached = Account(training), 0
    try:
        reached, _ = _restore(training, run)
        for record in _steps(training, run, reached, Control()):
            observers(record)
            _refuse_nan(record, run, training)
            reached = record.step
    except Exception as error:
        if out_of_memory(error):
            said = _without_memory(error, account, reached, run)["error"]
            raise RunFailedError(said) from error
        raise
    return run


def _begin(training: Training, run: Run, here: dict[str, Any]) -> dict[str, Any]:
    """Go back to the newest good checkpoint, and record this start. Returns `from_step`, and
    `damaged`: a sentence for each file or line that is passed over."""
    start, damaged = _restore(training, run)
    good, problems = records.read_lines(run.path / runs.METRICS)
    damaged += problems
    before = run.environments
    if before and not start:
        print(f"lpkit: {str(run.path)!r} has no whole checkpoint, so it starts again from step 0; "
              f"{'; '.join(damaged) or 'none was saved'}", file=sys.stderr)
    begun = {"from_step": start, "damaged": damaged}
    records.write(run.path / runs.ENVIRONMENT, {"starts": [*before, here | begun]})
    history = [line for line in good if line["step"] <= start]      # the rest is done again
    write_atomically(run.path / runs.METRICS, "".join(map(records.line, history)))
    records.write(run.path / runs.SUMMARY, {"status": "running"})
    return begun


def _conclude(run: Run, summary: dict[str, Any], reached: int | None, config: Config) -> None:
    """Write the summary. Of a run that could not go on at all, the one that it had stays."""
    path = run.path / runs.SUMMARY
    if reached is not None:
        summary |= {"steps": reached, "tokens": reached * config.tokens_per_step}
    if reached is not None or not path.exists():
        records.write(path, summary)


def _without_memory(error: BaseException, account: Account, step: int, run: Run) -> dict[str, Any]:
    """What the summary then says."""
    report = account.report(error, _last_checkpoint(run))
    said = (f"out of memory after step {step} ({report['error']}); {report.pop('sentence')}; kept: "
            f"{report['last_checkpoint'] or 'no checkpoint'}. Other settings need another --out; "
            f"with more memory, go on with --resume")
    return {"error": said, "out_of_memory": report}


@dataclass(frozen=True)
class _Begun:
    """An update that the device was handed, and what is known of it without waiting."""

    step: int
    since: Any      # a moment: when the one before it was done
    done: Update
    numbers: Arriving

    @classmethod
    def after(cls, since: Any, step: int, training: Training) -> "_Begun":
        done = training.update(step - 1)
        numbers = {"loss": done.loss, "grad_norm": done.grad_norm, **done.extra}
        return cls(step, since, done, Arriving(numbers, training.device))

    def record(self, training: Training, val_loss: Callable[[], float | None]) -> StepRecord:
        """Waits for the device, where it is not done."""
        extra = self.numbers.values()
        return StepRecord(
            step=self.step, loss=extra.pop("loss"), grad_norm=extra.pop("grad_norm"),
            lr=self.done.lr,
            tokens=self.step * training.config.tokens_per_step,
            step_seconds=self.numbers.at.seconds_since(self.since),
            peak_bytes=hardware.peak_bytes(training.device), val_loss=val_loss(),
            extra=extra)


def _steps(training: Training, run: Run, start: int, control: Control) -> Iterator[StepRecord]:
    """Update, evaluate, save. A step is told when its numbers have arrived: on a GPU up to AHEAD
    steps late, and before anything is evaluated, saved, paused or given up."""
    config, device = training.config, training.device
    waiting: deque[_Begun] = deque()
    saved = start

    def every(n: int, step: int) -> bool:
        return step == config.steps or (n > 0 and step % n == 0)

    for step in range(start + 1, config.steps + 1):
        if control.asked() == PAUSE:
            yield from _arrived(training, waiting, 0)
        if stopping := _stopped(training, control):
            step -= 1
        else:
            since = waiting[-1].numbers.at if waiting else moment(device)
            try:
                waiting.append(_Begun.after(since, step, training))
            except BaseException:
                with suppress(RuntimeError):    # of a device that failed nothing arrives
                    yield from _arrived(training, waiting, 0)
                raise
        evaluating = not stopping and every(config.eval_every, step)
        saving = step > saved and (stopping or every(config.checkpoint_every, step))
        yield from _arrived(training, waiting, 0 if evaluating or saving or stopping else AHEAD,
                            step if evaluating else 0)
        if saving:
            _save(training, run, step)
            saved = step
        if stopping:
            return


def _stopped(training: Training, control: Control) -> bool:
    """Waits while paused. The first rank is asked, and all do what it says."""
    while (said := training.ranks.told(control.asked())) == PAUSE:
        control.go_on.wait(PAUSED_SECONDS)
    return said == STOP


# A frame that an error keeps is cleared, but not what a function closes over.
def _arrived(training: Training, waiting: deque[_Begun], at_most: int,
             evaluate_at: int = 0) -> Iterator[StepRecord]:
    """Those whose numbers are there; all but `at_most` are waited for."""
    while waiting and (len(waiting) > at_most or waiting[0].numbers.at.reached()):
        one = waiting.popleft()
        yield one.record(training, training.evaluate if one.step == evaluate_at else _nothing)


def _nothing() -> None:
    return None


def _save(training: Training, run: Run, step: int) -> None:
    if training.ranks.first:
        sync(run.path / runs.METRICS)   # no step that the checkpoint vouches for gets lost
    state = training.state_dict()
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    try:
        checkpoint.save(run.checkpoints, step, tensors, {"optimizer": numbers},
                        run=run.identity["run"], keep=training.config.keep_checkpoints)
    except OSError as error:
        raise RunFailedError(
            f"step {step}: the checkpoint could not be written ({error.strerror or error}); kept: "
            f"{_last_checkpoint(run) or 'none before it'}. Free some space or choose another "
            f"--out, then go on with --resume") from error


def _restore(training: Training, run: Run) -> tuple[int, list[str]]:
    """Load the newest good checkpoint. Its step, or 0, and a sentence for each damaged one."""
    checkpoint.sweep(run.checkpoints)
    found, damaged = checkpoint.load_latest(run.checkpoints, run=run.identity["run"],
                                            blank=training.blank)
    if found is None:
        return 0, damaged
    training.load_state_dict(found.tensors | found.state["optimizer"], source=found.path)
    return found.step, damaged


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
    who = runs.identify(config, training.tokens, training.tokenizer)
    extended = {}
    if not (path / runs.CONFIG).exists():
        if any(not p.name.startswith(".") for p in path.iterdir()):
            raise ConfigError(f"{str(path)!r} is not empty and holds no run; choose another --out")
    elif not resume:
        raise ConfigError(f"{str(path)!r} already holds a run; choose another --out, or go on "
                          f"with --resume")
    else:
        extended = _refuse_another(run, config, who)
    write_atomically(path / runs.CONFIG, runs.sealed_yaml(config))
    records.write(path / runs.TOKENIZER, training.tokenizer)
    if not (path / runs.IDENTITY).exists():
        records.write(path / runs.IDENTITY, who)
    return extended


def _refuse_another(run: Run, config: Config, who: dict[str, Any]) -> dict[str, Any]:
    """A run goes on as what it was begun as. Raises ConfigError, which names what differs."""
    was, now = flat(run.config), flat(config)
    changes = [f"{key} was {was.get(key)} and is {now[key]}" for key in now
               if now[key] != was.get(key) and key not in runs.MAY_CHANGE]
    if now["steps"] < was["steps"]:
        changes.append(f"steps was {was['steps']} and is {now['steps']}")
    if changes:
        raise ConfigError(f"cannot resume {str(run.path)!r} with other settings: "
                          f"{', '.join(changes)}; leave them, or start anew with another "
                          f"--out. Only steps may be raised")
    # a kill in the first moments came between the files
    if (run.path / runs.IDENTITY).exists() or checkpoint.folders(run.checkpoints):
        said = run.identity
        if said["tokens"] != who["tokens"]:
            raise ConfigError(f"cannot resume {str(run.path)!r}: its tokens have the SHA-256 "
                              f"{said['tokens']}, and data.source={config.data.source} now gives "
                              f"{who['tokens']}; give back the text that it was begun with, or "
                              f"start anew with another --out")
        if said["run"] != who["run"]:
            raise ConfigError(f"cannot resume {str(run.path)!r}: data.source={config.data.source} "
                              f"now gives another tokenizer than the one that it was begun with; "
                              f"start anew with another --out")
    if now["steps"] == was["steps"]:
        return {}
    return {"extended": f"steps was {was['steps']} and is {now['steps']}; from here on the "
                        f"learning rate follows the schedule of {now['steps']} steps, as if the "
                        f"run had been begun with them"}


def _refuse_nan(record: StepRecord, run: Run, training: Training) -> None:
    if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
        happened = f"step {record.step}: loss={record.loss}, grad_norm={record.grad_norm}"
        if casts := nonfinite_report(training.model):
            happened += f"; {casts}"
        raise RunFailedError(
            f"{happened}; kept: {_last_checkpoint(run) or 'no checkpoint yet'}. A smaller "
            f"optimizer.lr or a longer schedule.warmup_steps is the usual way out")


def _energy(before: tuple[float, str] | None, after: tuple[float, str] | None) -> dict[str, Any]:
    """Of this call, evaluation and checkpoints included. A counter that went round says nothing."""
    known = before and after and after[0] >= before[0]
    return {"energy_wh": (after[0] - before[0]) / 3600 if known else None,
            "energy_source": after[1] if known else None}


def _mfu(training: Training, tokens_per_second: float | None,
         errors: list[str]) -> dict[str, float]:
    """Of the 16-bit peak, measured here, so that a faster recipe has a higher MFU. Where that fails
    the run is what it was, and `errors` say why."""
    if not tokens_per_second:
        return {}
    dtype = "fp32" if training.decisions.recipe.compute is None else "bf16"
    try:
        peak, _ = hardware.peak_flops(dtype, str(training.device), torch.get_num_threads())
    except Exception as error:
        errors.append(f"the peak FLOP/s for the MFU: {type(error).__name__}: {error}")
        return {}
    flops = tokens_per_second * training_flops_per_token(training.config.model)
    return {"mfu": flops / (peak * training.ranks.world)}
