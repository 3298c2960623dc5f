"""What happened: a Run is a folder, and this is how to read one.

    run.json           which run this is, written once: what decides its numbers, and a hash of it
    config.yaml        every setting
    environment.json   versions, device, date, command, of each start
    metrics.jsonl      a StepRecord a line
    summary.json       the result, replaced whole
    tokenizer.json     so that sampling needs no corpus
    checkpoints/       see `lpkit.training.checkpoint`; each names its run

Every file carries a checksum, and the readers here compare it: see `lpkit.records`.
"""

import hashlib
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from lpkit import files, nn, records
from lpkit.config import Config, flat
from lpkit.contracts import Observer, StepRecord
from lpkit.errors import ConfigError, DamagedError, named
from lpkit.files import refuse_links
from lpkit.tables import html_table
from lpkit.techniques.layouts import Layout
from lpkit.values import Place, checked

IDENTITY, LOCK = "run.json", ".lock"
CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
SUMMARY, TOKENIZER, CHECKPOINTS = "summary.json", "tokenizer.json", "checkpoints"


# What may differ when a run goes on: steps may be raised, and the rest changes no number, but for
# the order in which ranks add up.
MAY_CHANGE = {*(f"parallel.{f.name}" for f in fields(Layout)), "steps", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints",
              "precision.telemetry_every"}
SEAL = "# The SHA-256 of what is above, so that a change is seen: "


class RunFailedError(RuntimeError):
    """A run that could not go on. The message says at which step, why, and what was kept."""


class Observers:
    """Those who are told of every step. One that raises is dropped; the summary has its error."""

    def __init__(self, observers: Iterable[Observer] = ()):
        self._observers = list(observers)
        self.errors: list[str] = []

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def __call__(self, record: StepRecord) -> None:
        for observe in list(self._observers):
            try:
                observe(record)
            except Exception as error:
                self._observers.remove(observe)
                name = getattr(observe, "__qualname__", type(observe).__qualname__)
                self.errors.append(f"{name} at step {record.step}: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Run:
    """Raises ConfigError for a folder with links in it: it would be read and written elsewhere."""

    path: Path

    def __post_init__(self):
        refuse_links(self.path)
        refuse_links(self.checkpoints)

    @classmethod
    @checked
    def open(cls, path: Place) -> "Run":
        """Raises ConfigError when the folder holds no run."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            runs = sorted(p.parent.name for p in path.parent.glob(f"*/{CONFIG}"))
            beside = f"; beside it: {named(', '.join(runs))}" if runs else ""
            raise ConfigError(f"{named(path)!r} holds no run (no {CONFIG}){beside}")
        return cls(path)

    @property
    def config(self) -> Config:
        """Raises DamagedError when config.yaml is not what was written."""
        return Config.from_yaml(_unsealed_yaml(self.path / CONFIG))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What run.json says, once config.yaml and tokenizer.json agree with it. Raises
        DamagedError."""
        said = records.read(self.path / IDENTITY)
        here = identify(self.config, said.get("tokens"), self.tokenizer, said.get("model_version"))
        for part, path in (("settings", CONFIG), ("tokenizer", TOKENIZER), ("run", IDENTITY)):
            if said.get(part) != here[part]:
                raise DamagedError(f"{self.path / path} belongs to another run than "
                                   f"{self.path / IDENTITY}: their {part} differ; put the run's "
                                   f"own file back")
        if said["model_version"] != nn.VERSION:
            raise ConfigError(f"{str(self.path)!r} was trained with version "
                              f"{said['model_version']} of the model, and this lpkit has version "
                              f"{nn.VERSION}: the same weights are another function; use lpkit "
                              f"{self.environment.get('lpkit')}, which trained it")
        return said

    @property
    def summary(self) -> dict[str, Any]:
        """The result. Of a run that goes on or was killed, what its metrics say so far. Of no run,
        nothing. Raises DamagedError."""
        path = self.path / SUMMARY
        if not (self.path / CONFIG).is_file():
            return {}
        said = records.read(path) if path.is_file() else {"status": "running"}
        if said["status"] != "running":
            return said
        status = "running" if files.is_locked(self.path / LOCK) else "killed"
        return results(self) | {"status": status}

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Of every start, the oldest first. Raises DamagedError."""
        path = self.path / ENVIRONMENT
        return records.read(path)["starts"] if path.is_file() else []

    @property
    def environment(self) -> dict[str, Any]:
        """The newest one."""
        return self.environments[-1] if self.environments else {}

    @property
    def tokenizer(self) -> dict[str, Any]:
        return records.read(self.path / TOKENIZER)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every step that was reported. A damaged line is left out, and named in `problems`."""
        return records.read_lines(self.path / METRICS)[0]

    @property
    def problems(self) -> list[str]:
        """A sentence for each file or line that is not what was written."""
        found = records.read_lines(self.path / METRICS)[1]
        for read in (lambda: self.identity, lambda: self.summary, lambda: self.environments):
            try:
                read()
            except ConfigError as error:
                found.append(str(error))
        return found

    def _repr_html_(self) -> str:
        summary = {}
        with suppress(DamagedError):        # a bad file does not hide the run
            summary = self.summary or results(self)
        rows = described(results(self) | {"status": "not known"} | summary)
        return html_table((), [*rows, *(("problem", one) for one in self.problems)])


def identify(config: Config, tokens: Any, tokenizer: dict[str, Any],
             model_version: int = nn.VERSION) -> dict[str, Any]:
    """What decides the numbers of a run, and under "run" the hash of it all. `tokens`: the SHA-256
    of the training and the validation tokens."""
    settings = {key: one for key, one in flat(config).items() if key not in MAY_CHANGE}
    facts = {"settings": settings, "tokens": tokens, "tokenizer": records.digest(tokenizer),
             "model_version": model_version}
    facts = records.plain(facts)
    return facts | {"run": records.digest(facts)}


def sealed_yaml(config: Config) -> str:
    text = config.to_yaml()
    return f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _unsealed_yaml(path: Path) -> str:
    text, seal, due = records.text_of(path).partition(SEAL)
    if not seal or due.strip() != hashlib.sha256(text.encode()).hexdigest():
        raise DamagedError(f"{path} is not what the run wrote: it was cut off or altered. Undo the "
                           f"change; settings that may change are given with --set, and others "
                           f"need a run of their own (train a copy of the file with another --out)")
    return text


def results(run: Run) -> dict[str, Any]:
    """What the metrics and the newest start say; nothing is asked of the device."""
    done = [line for line in run.metrics if line["loss"] is not None]
    last = done[-1] if done else {}
    vals = [line["val_loss"] for line in done if "val_loss" in line]
    kept = sorted(path.name for path in run.checkpoints.glob("step-*"))
    # The first step of a process pays for compilation and first touches; the median does not.
    seconds = statistics.median(line["step_seconds"] for line in done) if done else None
    tokens = last["tokens"] / last["step"] if done else 0
    chosen: dict[str, Any] = {}
    with suppress(DamagedError):
        chosen = run.environment.get("chosen", {})
    return {
        "final_loss": last.get("loss"), "val_loss": vals[-1] if vals else None,
        "steps": last.get("step", 0), "tokens": last.get("tokens", 0), "step_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "peak_bytes": max((line["peak_bytes"] for line in done), default=None),
        "mfu": None, "energy_wh": None, "energy_tokens": None, "energy_source": None,
        "last_checkpoint": kept[-1] if kept else None, "run_dir": str(run.path), "chosen": chosen,
    }


def described(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A summary for a person: (name, value with its unit)."""
    def number(key: str, form: str, unit: str, scale: float = 1) -> str:
        value = summary.get(key)
        return "none" if value is None else f"{value * scale:{form}} {unit}"

    by = f" by {summary['stopped_by']}" if summary.get("stopped_by") else ""
    speed = (number("tokens_per_second", ",.0f", "tokens/s"),
             number("step_seconds", ".3f", "s a step"), "MFU " + number("mfu", ".0f", "%", 100))
    rows = [
        ("run", summary["run_dir"]),
        ("status", f"{summary['status']}{by} after {summary['steps']:,} steps, "
                   f"{summary['tokens']:,} tokens"),
        ("loss", number("final_loss", ".4f", "nats per token")),
        ("validation loss", number("val_loss", ".4f", "nats per token")),
        ("speed", ", ".join(speed)), ("peak memory", number("peak_bytes", ".2f", "GB", 1e-9))]
    if summary.get("error"):
        kept = summary.get("last_checkpoint") or "no checkpoint"
        rows.append(("error", f"{summary['error']}; kept: {kept}"))
    if summary.get("energy_wh"):
        rows.append(("energy", f"{summary['energy_wh']:.3g} Wh for {summary['energy_tokens']:,} "
                               f"tokens ({summary['energy_source']})"))
    if summary.get("observer_errors"):
        rows.append(("observers that failed", "; ".join(summary["observer_errors"])))
    return rows
