"""The training loop. It meets only contracts: `assembly.assemble` makes the Job that it steps."""

import fcntl
import json
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lpkit.config import Config, flat
from lpkit.contracts import Choice, DataPolicy, Loss, Observer, Schedule, StatePlacement, Step, StepRecord
from lpkit.errors import ConfigError
from lpkit.files import write_atomically
from lpkit.hardware import energy_joules, peak_bytes
from lpkit.training import checkpoint, runs
from lpkit.training.runs import Run, RunFailedError


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything built that one run needs."""

    config: Config
    device: torch.device
    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    step: Step
    finish: Callable[[], Tensor]        # what is left of the update after `step`: returns the norm of the gradients
    loss: Loss
    place: StatePlacement               # where the optimizer's state is stored
    data: DataPolicy
    val: DataPolicy
    tokenizer: dict[str, Any]
    chosen: dict[str, Choice]
    environment: dict[str, Any]
    flops_per_token: float
    peak_flops: Callable[[], float]   # of the chosen dtype on this machine; measured when asked
    state: nn.Module = field(default_factory=nn.Module)     # what a checkpoint holds besides the model: a loss scaler
    more: Callable[[], dict[str, float]] = dict             # fields of the StepRecord that the step knows
    diagnose: Callable[[nn.Module], str] = lambda model: ""     # what is known about a loss that is not a number


@dataclass
class Control:
    """The way into a running loop from another thread or a signal: stop at the next step, or wait."""

    go_on: threading.Event = field(default_factory=threading.Event)
    stopped_by: str = ""       # who asked: "stop", "SIGINT", "SIGTERM"

    def __post_init__(self):
        self.go_on.set()

    def stop(self, by: str = "stop") -> None:
        self.stopped_by = self.stopped_by or by
        self.go_on.set()

    def stopped(self) -> bool:
        """Waits while paused."""
        self.go_on.wait()
        return bool(self.stopped_by)


def fit(job: Job, path: Path, *, resume: bool = False, observers: Sequence[Observer] = (),
        control: Control | None = None) -> Run:
    """Train `job` into the run folder `path` and return the Run, whole or, when stopped, partial.

    Raises ConfigError when the folder holds another run, RunFailedError when the run cannot go on.
    """
    config, control, run = job.config, control or Control(), Run(path)
    with _owned(path):
        _check_folder(run, config, resume)
        write_atomically(path / runs.CONFIG, config.to_yaml())
        start = _restore(job, run)
        write_atomically(path / runs.TOKENIZER, json.dumps(job.tokenizer))
        write_atomically(path / runs.ENVIRONMENT, json.dumps(job.environment, indent=1))
        history = _keep_metrics(path / runs.METRICS, start)
        status, used = "stopped", energy_joules(job.device)
        try:
            with (path / runs.METRICS).open("a") as log:
                for record in _steps(job, run, start, control):
                    history.append(record.to_dict())
                    log.write(_line(record))
                    log.flush()
                    for observe in observers:
                        observe(record)
                    _refuse_nan(record, run, job)
            if not history or history[-1]["step"] == config.steps:
                status = "complete"
        except RunFailedError:
            status = "failed"
            raise
        finally:
            summary = _summary(job, run, history, status) | {"stopped_by": control.stopped_by or None}
            summary |= _energy(used, energy_joules(job.device))
            write_atomically(path / runs.SUMMARY, json.dumps(summary, indent=1))
    return run


def update(job: Job, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One update on x and y (B, T), on the job's device: the mean loss before it, and the norm of its gradients."""
    loss = job.step(job.model, x, y)
    return loss, job.finish()


def _steps(job: Job, run: Run, start: int, control: Control) -> Iterator[StepRecord]:
    """Step, evaluate, save. Reads a GPU's loss one step late, so that the GPU never waits for the log."""
    config, device = job.config, job.device
    base_lr = [group["lr"] for group in job.optimizer.param_groups]
    waiting: deque[tuple[int, float, Tensor, Tensor, dict[str, float]]] = deque()
    late = 1 if device.type == "cuda" else 0
    saved, mark = start, time.perf_counter()

    def every(n: int, step: int) -> bool:
        return step == config.steps or (n > 0 and step % n == 0)

    for step in range(start + 1, config.steps + 1):
        if stopping := control.stopped():
            step -= 1
        else:
            x, y = job.data.batch(step - 1)
            for group, lr in zip(job.optimizer.param_groups, base_lr, strict=True):
                group["lr"] = lr * job.schedule(step - 1)
            loss, grad_norm = update(job, x.to(device, non_blocking=True), y.to(device, non_blocking=True))
            waiting.append((step, job.optimizer.param_groups[0]["lr"], loss, grad_norm, job.more()))
        evaluating = not stopping and every(config.eval_every, step)
        saving = step > saved and (stopping or every(config.checkpoint_every, step))
        while len(waiting) > (0 if evaluating or saving or stopping else late):
            number, lr, loss, grad_norm, more = waiting.popleft()
            values = loss.item(), grad_norm.item()       # waits for the device
            seconds = time.perf_counter() - mark
            yield StepRecord(
                step=number, loss=values[0], grad_norm=values[1], lr=lr, tokens=number * config.tokens_per_step,
                step_seconds=seconds, peak_bytes=peak_bytes(str(device)),
                val_loss=evaluate(job) if evaluating and number == step else None, **more)
            mark = time.perf_counter()
        if saving:
            _save(job, run, step)
            saved, mark = step, time.perf_counter()
        if stopping:
            return


@torch.no_grad()
def evaluate(job: Job) -> float:
    """Mean nats per token over the first `eval_batches` batches of the validation data."""
    losses = []
    job.model.eval()
    for i in range(job.config.eval_batches):
        x, y = job.val.batch(i)
        losses.append(job.loss(job.model, x.to(job.device), y.to(job.device)))
    job.model.train()
    return torch.stack(losses).mean().item()


def _save(job: Job, run: Run, step: int) -> None:
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)      # state may still be on its way to where it rests
    names = {p: name for name, p in job.model.named_parameters()}
    tensors = _saved_tensors(job)
    numbers = {}
    for p, slots in job.optimizer.state.items():
        for slot, value in slots.items():
            (tensors if torch.is_tensor(value) else numbers)[f"optimizer/{names[p]}/{slot}"] = value
    tensors["rng/cpu"] = torch.get_rng_state()
    if job.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(job.device)
    try:
        checkpoint.save(run.checkpoints, step, tensors, {"optimizer": numbers}, keep=job.config.keep_checkpoints)
    except OSError as error:
        kept = [folder.name for folder in checkpoint.folders(run.checkpoints)]
        raise RunFailedError(f"step {step}: the checkpoint could not be written ({error.strerror or error}); "
                             f"kept: {kept[0] if kept else 'none before it'}. Free some space or choose another "
                             f"--out, then go on with --resume") from error


def _saved_tensors(job: Job) -> dict[str, Tensor]:
    """Parameters and saved buffers, tied ones once."""

    def of(module: nn.Module) -> dict[str, Tensor]:
        wanted = module.state_dict(keep_vars=True).keys()
        return {name: t for name, t in (*module.named_parameters(), *module.named_buffers()) if name in wanted}

    return {f"{part}/{name}": t for part, module in (("model", job.model), ("state", job.state))
            for name, t in of(module).items()}


def _restore(job: Job, run: Run) -> int:
    """Load the newest good checkpoint into `job`, and return its step; 0 when there is none."""
    checkpoint.sweep(run.checkpoints)
    found, problems = checkpoint.load_latest(run.checkpoints)
    job.environment["damaged_checkpoints"] = problems
    if found is None:
        return 0
    ours = _saved_tensors(job)
    missing = [name for name in ours if name not in found.tensors]
    if missing:
        raise RunFailedError(f"{found.path} lacks {len(missing)} of the model's tensors, {missing[0]} first")
    for name, t in ours.items():
        if t.shape != found.tensors[name].shape:    # copy_ would broadcast a shorter history into a longer one
            raise RunFailedError(f"{found.path} holds {name} as {tuple(found.tensors[name].shape)}, and this run has it "
                                 f"as {tuple(t.shape)}; resume with the settings that it was saved with")
    params = dict(job.model.named_parameters())
    with torch.no_grad():
        for name, t in ours.items():
            t.copy_(found.tensors[name])
    for name, value in (*found.tensors.items(), *found.state["optimizer"].items()):
        if name.startswith("optimizer/"):
            _, param, slot = name.split("/")
            value = job.place.store(value.to(job.device)) if torch.is_tensor(value) else value
            job.optimizer.state[params[param]][slot] = value
    torch.set_rng_state(found.tensors["rng/cpu"])
    if job.device.type == "cuda" and "rng/cuda" in found.tensors:
        torch.cuda.set_rng_state(found.tensors["rng/cuda"], job.device)
    return found.step


@contextmanager
def _owned(path: Path) -> Iterator[None]:
    """Two processes must not write one run."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {str(path)!r} ({error.strerror}); choose another --out") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"another process is training into {str(path)!r}; choose another --out") from None
    finally:
        os.close(lock)


# What may differ when a run goes on: none of it changes a number of the training.
MAY_CHANGE = {"eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints", "precision.telemetry_every"}


def _check_folder(run: Run, config: Config, resume: bool) -> None:
    if (run.path / runs.CONFIG).exists():
        if not resume:
            raise ConfigError(f"{str(run.path)!r} already holds a run; choose another --out, or go on with --resume")
        was, now = flat(run.config), flat(config)
        changed = [key for key in now if now[key] != was.get(key) and key not in MAY_CHANGE]
        if changed:
            said = ", ".join(f"{key} was {was.get(key)} and is {now[key]}" for key in changed)
            raise ConfigError(f"cannot resume {str(run.path)!r} with other settings: {said}; leave them, or start anew "
                              f"with another --out")
    elif any(not p.name.startswith(".") for p in run.path.iterdir()):
        raise ConfigError(f"{str(run.path)!r} is not empty and holds no run; choose another --out")


def _keep_metrics(path: Path, upto: int) -> list[dict[str, Any]]:
    """Drop the lines of steps that will be done again."""
    history = [line for line in runs.read_metrics(path) if line["step"] <= upto]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in history))
    return history


def _line(record: StepRecord) -> str:
    """JSON has no NaN: a loss that is none becomes null."""
    return json.dumps({key: value if not isinstance(value, float) or math.isfinite(value) else None
                       for key, value in record.to_dict().items()}) + "\n"


def _refuse_nan(record: StepRecord, run: Run, job: Job) -> None:
    if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
        kept, known = checkpoint.folders(run.checkpoints), job.diagnose(job.model)
        raise RunFailedError(
            f"step {record.step}: loss={record.loss}, grad_norm={record.grad_norm}; {known}{known and '; '}kept: "
            f"{kept[0].name if kept else 'no checkpoint yet'}. A smaller optimizer.lr or a longer "
            f"optimizer.warmup_steps is the usual way out")


def _energy(before: tuple[float, str] | None, after: tuple[float, str] | None) -> dict[str, Any]:
    """Of this call, evaluation and checkpoints included. A counter that went round says nothing."""
    known = before and after and after[0] >= before[0]
    return {"energy_wh": (after[0] - before[0]) / 3600 if known else None, "energy_source": after[1] if known else None}


def _summary(job: Job, run: Run, history: list[dict[str, Any]], status: str) -> dict[str, Any]:
    done = [line for line in history if math.isfinite(line["loss"])]
    last = done[-1] if done else {}
    vals = [line["val_loss"] for line in done if "val_loss" in line]
    # The first step of a process pays for compilation and first touches; the median does not.
    seconds = statistics.median(line["step_seconds"] for line in done) if done else None
    rate = job.config.tokens_per_step / seconds if seconds else None
    return {
        "status": status,
        "final_loss": last.get("loss"), "val_loss": vals[-1] if vals else None,
        "steps": last.get("step", 0), "tokens": last.get("tokens", 0),
        "tokens_per_second": rate, "step_seconds": seconds,
        "peak_bytes": max((line["peak_bytes"] for line in done), default=None),
        "mfu": rate * job.flops_per_token / job.peak_flops() if rate else None,
        "run_dir": str(run.path), "chosen": {key: asdict(choice) for key, choice in job.chosen.items()},
        "damaged_checkpoints": job.environment["damaged_checkpoints"],
    }
