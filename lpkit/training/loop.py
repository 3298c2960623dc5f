"""The training loop: update, evaluate, save, and write down what happened."""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from lpkit import hardware
from lpkit.config import Config, flat
from lpkit.contracts import Observer, StepRecord
from lpkit.errors import ConfigError
from lpkit.files import locked, write_atomically
from lpkit.precision.linear import nonfinite_report
from lpkit.predict.flops import training_flops_per_token
from lpkit.training import checkpoint, runs
from lpkit.training.background import Control
from lpkit.training.build import environment
from lpkit.training.runs import Observers, Run, RunFailedError
from lpkit.training.training import Training, Update


def fit(training: Training, path: Path, *, resume: bool = False,
        observers: Sequence[Observer] | Observers = (), control: Control | None = None) -> Run:
    """Train into the run folder `path` and return the Run, whole or, when stopped, partial.

    An observer that raises is dropped and named in the summary, and the run goes on.
    Raises ConfigError when the folder holds another run, RunFailedError when the run cannot go on.
    Whatever else is raised on the way (out of memory) is recorded as the run's error first.
    """
    config, control, run = training.config, control or Control(), Run(path)
    observers = observers if isinstance(observers, Observers) else Observers(observers)
    hardware.reset_peak(training.device)
    with _owned(path):
        extended = _check_folder(run, config, resume)
        write_atomically(path / runs.CONFIG, config.to_yaml())
        start, damaged = _restore(training, run)
        write_atomically(path / runs.TOKENIZER, json.dumps(training.tokenizer))
        here = environment(training.decisions) | extended
        here |= {"from_step": start, "damaged_checkpoints": damaged}
        write_atomically(path / runs.ENVIRONMENT, json.dumps([*run.environments, here], indent=1))
        history = [line for line in run.metrics if line["step"] <= start]   # the rest is done again
        lines = [json.dumps(line) + "\n" for line in history]
        write_atomically(path / runs.METRICS, "".join(lines))
        summary = {"status": "stopped", "error": None, "damaged_checkpoints": damaged}
        energy_before = hardware.energy_joules(training.device)
        try:
            with (path / runs.METRICS).open("a") as log:
                for record in _steps(training, run, start, control):
                    history.append(record.to_dict())
                    log.write(json.dumps(_finite(record.to_dict())) + "\n")
                    log.flush()
                    observers(record)
                    _refuse_nan(record, run, training)
            if not history or history[-1]["step"] == config.steps:
                summary["status"] = "complete"
        except Exception as error:
            summary |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            summary |= _results(training, run, history)
            summary |= {"observer_errors": observers.errors,
                        "stopped_by": control.stopped_by or None}
            if summary["error"] is None:        # a device that has failed is not measured any more
                summary |= _mfu(training, summary["tokens_per_second"])
                summary |= _energy(energy_before, hardware.energy_joules(training.device))
            # the first error is the one to raise
            with suppress(OSError) if summary["error"] else nullcontext():
                write_atomically(path / runs.SUMMARY, json.dumps(summary, indent=1))
    return run


def _steps(training: Training, run: Run, start: int, control: Control) -> Iterator[StepRecord]:
    """Update, evaluate, save. A GPU's loss is read one step late: it never waits for the log."""
    config, device = training.config, training.device
    waiting: deque[tuple[int, Update]] = deque()
    late = 1 if device.type == "cuda" else 0
    saved, mark = start, time.perf_counter()

    def every(n: int, step: int) -> bool:
        return step == config.steps or (n > 0 and step % n == 0)

    for step in range(start + 1, config.steps + 1):
        if stopping := control.stopped():
            step -= 1
        else:
            waiting.append((step, training.update(step - 1)))
        evaluating = not stopping and every(config.eval_every, step)
        saving = step > saved and (stopping or every(config.checkpoint_every, step))
        while len(waiting) > (0 if evaluating or saving or stopping else late):
            number, done = waiting.popleft()
            loss, grad_norm = done.loss.item(), done.grad_norm.item()       # waits for the device
            seconds = time.perf_counter() - mark
            yield StepRecord(
                step=number, loss=loss, grad_norm=grad_norm, lr=done.lr,
                tokens=number * config.tokens_per_step, step_seconds=seconds,
                peak_bytes=hardware.peak_bytes(device),
                val_loss=training.evaluate() if evaluating and number == step else None,
                extra={name: float(value) for name, value in done.extra.items()})
            mark = time.perf_counter()
        if saving:
            _save(training, run, step)
            saved, mark = step, time.perf_counter()
        if stopping:
            return


def _save(training: Training, run: Run, step: int) -> None:
    state = training.state_dict()
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    try:
        checkpoint.save(run.checkpoints, step, tensors, {"optimizer": numbers},
                        keep=training.config.keep_checkpoints)
    except OSError as error:
        raise RunFailedError(
            f"step {step}: the checkpoint could not be written ({error.strerror or error}); kept: "
            f"{_last_checkpoint(run) or 'none before it'}. Free some space or choose another "
            f"--out, then go on with --resume") from error


def _restore(training: Training, run: Run) -> tuple[int, list[str]]:
    """Load the newest good checkpoint. Its step, or 0, and a sentence for each damaged one."""
    checkpoint.sweep(run.checkpoints)
    found, damaged = checkpoint.load_latest(run.checkpoints)
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
            held.enter_context(locked(path / ".lock", wait=False))
        except BlockingIOError:
            raise ConfigError(
                f"another process is training into {str(path)!r}; choose another --out") from None
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {str(path)!r} ({error.strerror}); "
                              f"choose another --out") from None
        yield


# What may differ when a run goes on: none of it changes a number of the training.
MAY_CHANGE = {"eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints",
              "precision.telemetry_every"}


def _check_folder(run: Run, config: Config, resume: bool) -> dict[str, Any]:
    """Refuses what cannot be trained into this folder. Returns what the record says of a run that
    is trained longer than it was meant to be."""
    if not (run.path / runs.CONFIG).exists():
        if any(not p.name.startswith(".") for p in run.path.iterdir()):
            raise ConfigError(f"{str(run.path)!r} is not empty and holds no run; choose another "
                              f"--out")
        return {}
    if not resume:
        raise ConfigError(f"{str(run.path)!r} already holds a run; choose another --out, or go on "
                          f"with --resume")
    was, now = flat(run.config), flat(config)
    changes = {key: f"{key} was {was.get(key)} and is {now[key]}" for key in now
               if now[key] != was.get(key) and key not in MAY_CHANGE}
    longer = changes.pop("steps") if now["steps"] > was["steps"] else ""
    if changes:
        raise ConfigError(f"cannot resume {str(run.path)!r} with other settings: "
                          f"{', '.join(changes.values())}; leave them, or start anew with another "
                          f"--out. Only steps may be raised")
    if not longer:
        return {}
    return {"extended": f"{longer}; from here on the learning rate follows the schedule of "
                        f"{now['steps']} steps, as if the run had been begun with them"}


def _finite(value: Any) -> Any:
    """NaN is written as null, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def _mfu(training: Training, tokens_per_second: float | None) -> dict[str, float]:
    """Of the 16-bit peak, measured here, so that a faster recipe has a higher MFU."""
    if not tokens_per_second:
        return {}
    dtype = "fp32" if training.decisions.recipe.compute is None else "bf16"
    peak, _ = hardware.peak_flops(dtype, str(training.device))
    return {"mfu": tokens_per_second * training_flops_per_token(training.config.model) / peak}


def _results(training: Training, run: Run, history: list[dict[str, Any]]) -> dict[str, Any]:
    """What the metrics say; nothing is asked of the device."""
    done = [line for line in history if math.isfinite(line["loss"])]
    last = done[-1] if done else {}
    vals = [line["val_loss"] for line in done if "val_loss" in line]
    # The first step of a process pays for compilation and first touches; the median does not.
    seconds = statistics.median(line["step_seconds"] for line in done) if done else None
    return {
        "final_loss": last.get("loss"), "val_loss": vals[-1] if vals else None,
        "steps": last.get("step", 0), "tokens": last.get("tokens", 0), "step_seconds": seconds,
        "tokens_per_second": training.config.tokens_per_step / seconds if seconds else None,
        "peak_bytes": max((line["peak_bytes"] for line in done), default=None),
        "mfu": None, "energy_wh": None, "energy_source": None,
        "last_checkpoint": _last_checkpoint(run), "run_dir": str(run.path),
        "chosen": training.decisions.record,
    }
