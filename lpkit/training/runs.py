"""What happened: a Run is a folder, and this is how to read one.

    config.yaml        every setting
    environment.json   versions, device, date, command, of each start
    metrics.jsonl      a StepRecord a line
    summary.json       the result, replaced whole
    tokenizer.json     so that sampling needs no corpus
    checkpoints/       see `lpkit.training.checkpoint`
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpkit.config import Config
from lpkit.contracts import Observer, StepRecord
from lpkit.errors import ConfigError
from lpkit.tables import html_table

CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
SUMMARY, TOKENIZER, CHECKPOINTS = "summary.json", "tokenizer.json", "checkpoints"


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
    path: Path

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Raises ConfigError when the folder holds no run."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            runs = sorted(p.parent.name for p in path.parent.glob(f"*/{CONFIG}"))
            beside = f"; beside it: {', '.join(runs)}" if runs else ""
            raise ConfigError(f"{str(path)!r} holds no run (no {CONFIG}){beside}")
        return cls(path)

    @property
    def config(self) -> Config:
        return Config.from_yaml((self.path / CONFIG).read_text())

    @property
    def summary(self) -> dict[str, Any]:
        return self._json(SUMMARY)

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Of every start, the oldest first."""
        found = self._json(ENVIRONMENT) or []
        return [found] if isinstance(found, dict) else found    # older runs kept the last one alone

    @property
    def environment(self) -> dict[str, Any]:
        """The newest one."""
        return self.environments[-1] if self.environments else {}

    @property
    def tokenizer(self) -> dict[str, Any]:
        return self._json(TOKENIZER)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every step that was reported."""
        return read_lines(self.path / METRICS)

    def _json(self, name: str) -> Any:
        path = self.path / name
        return json.loads(path.read_text()) if path.is_file() else {}

    def _repr_html_(self) -> str:
        return html_table((), described({"run_dir": str(self.path), **self.summary}), prose=1)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON, a line each; of a missing file none. A last line torn by a kill is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def described(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A summary for a person: (name, value with its unit). A killed run left its folder alone."""
    if "status" not in summary:
        return [("run", summary["run_dir"]),
                ("status", "no summary: it has not ended yet, or it was killed")]

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
        energy = f"{summary['energy_wh']:.3g} Wh ({summary['energy_source']})"
        rows.append(("energy", energy))
    if summary.get("observer_errors"):
        rows.append(("observers that failed", "; ".join(summary["observer_errors"])))
    return rows
