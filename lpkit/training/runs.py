"""What happened: a Run is a folder, and this is how to read one.

    config.yaml        every setting
    environment.json   versions, device, date, command
    metrics.jsonl      a StepRecord a line
    summary.json       the result, replaced whole
    tokenizer.json     so that sampling needs no corpus
    checkpoints/       see `lpkit.training.checkpoint`
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpkit.config import Config, ConfigError
from lpkit.tables import html_table

CONFIG, ENVIRONMENT, METRICS, SUMMARY = "config.yaml", "environment.json", "metrics.jsonl", "summary.json"
TOKENIZER, CHECKPOINTS = "tokenizer.json", "checkpoints"


class RunFailedError(RuntimeError):
    """A run that could not go on. The message says at which step, why, and what was kept."""


@dataclass(frozen=True)
class Run:
    path: Path

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Raises ConfigError when the folder holds no run."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            here = [p.parent.name for p in path.parent.glob(f"*/{CONFIG}")] if path.parent.is_dir() else []
            raise ConfigError(f"{str(path)!r} holds no run (no {CONFIG})"
                              + (f"; beside it: {', '.join(sorted(here))}" if here else ""))
        return cls(path)

    @property
    def config(self) -> Config:
        return Config.from_yaml((self.path / CONFIG).read_text())

    @property
    def summary(self) -> dict[str, Any]:
        return self._json(SUMMARY)

    @property
    def environment(self) -> dict[str, Any]:
        return self._json(ENVIRONMENT)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every step that was reported. A last line torn by a kill is left out."""
        return read_metrics(self.path / METRICS)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return json.loads(path.read_text()) if path.is_file() else {}

    def _repr_html_(self) -> str:
        return html_table((), described(self.summary), prose=1)


def described(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A summary for a person: (name, value with its unit)."""
    def number(key: str, form: str, unit: str, scale: float = 1) -> str:
        return "none" if summary[key] is None else f"{summary[key] * scale:{form}} {unit}"

    stopped = f" by {summary['stopped_by']}" if summary["stopped_by"] else ""
    return [
        ("run", summary["run_dir"]),
        ("status", f"{summary['status']}{stopped} after {summary['steps']:,} steps, {summary['tokens']:,} tokens"),
        ("loss", number("final_loss", ".4f", "nats per token")),
        ("validation loss", number("val_loss", ".4f", "nats per token")),
        ("speed", f"{number('tokens_per_second', ',.0f', 'tokens/s')}, {number('step_seconds', '.3f', 's a step')}, "
                  f"MFU {number('mfu', '.0f', '%', 100)}"),
        ("peak memory", number("peak_bytes", ".2f", "GB", 1e-9)),
        *([("energy", f"{summary['energy_wh']:.3g} Wh ({summary['energy_source']})")] if summary.get("energy_wh") else []),
    ]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
