"""`Run`: the folder that records a training. This module reads the folder; `loop` writes it.

    run.json           the run's identity, written once: all that decides its numbers, and a hash of
                       that
    config.yaml        every setting
    environment.json   versions, device, date and command of each start
    metrics.jsonl      one StepRecord per line
    summary.json       the result, always replaced as a whole
    tokenizer.json     the tokenizer, so that sampling needs no corpus
    checkpoints/       see `lpkit.training.checkpoint`; each checkpoint names its run

Every file has a checksum and the mark of its run, which is the first digits of the identity's hash.
The summary also has checksums of the other files, and a checkpoint has checksums of the lines up to
its step. All of these are verified when a file is read: see `lpkit.records`.
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
from lpkit.errors import ConfigError, DamagedError, named, nearest
from lpkit.errors import RunFailedError as RunFailedError
from lpkit.files import refuse_links
from lpkit.tables import html_table
from lpkit.techniques.layouts import Layout
from lpkit.values import Checked, Place

IDENTITY, LOCK = "run.json", ".lock"
CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
SUMMARY, TOKENIZER, CHECKPOINTS = "summary.json", "tokenizer.json", "checkpoints"
LATEST, MANIFESTS = "latest", f"{CHECKPOINTS}/step-*/manifest.json"


# Settings that may differ when a run is resumed. `steps` may be raised. The other settings do not
# change the run's numbers, except that other layouts add numbers in another order.
MAY_CHANGE = {*(f"parallel.{f.name}" for f in fields(Layout)), "steps", "eval_every",
              "eval_batches", "checkpoint_every", "keep_checkpoints", "precision.telemetry_every",
              "imports", "start.run", "data.scores", "data.special_tokens"}
SEAL = "# The SHA-256 of what is above, so that a change is seen: "
OF_RUN = "# The run: "


class Observers:
    """Calls all observers after every step. An observer that raises an error is not called again;
    the error is added to `errors`, which the summary records."""

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
class Run(Checked):
    """A run in the folder `path`. Raises ConfigError for a folder without a run, and for a folder
    that contains symbolic links: through a link, files outside of the folder would be written."""

    path: Place

    def __post_init__(self):
        super().__post_init__()
        if not (self.path / CONFIG).is_file():
            runs = [p.parent.name for p in self.path.parent.glob(f"*/{CONFIG}")]
            beside = f"; {nearest(self.path.name, runs)}" if runs else ""
            beside = files.of_transformers(self.path) or beside
            raise ConfigError(f"{named(self.path)!r} holds no run (no {CONFIG}){beside}")
        self._refuse_links()

    @classmethod
    def open(cls, path: Place) -> "Run":
        return cls(path)

    @classmethod
    def at(cls, path: Path) -> "Run":
        """Return the Run of a folder that may not contain a run yet."""
        run = object.__new__(cls)
        object.__setattr__(run, "path", path)
        run._refuse_links()
        return run

    def _refuse_links(self) -> None:
        refuse_links(self.path)
        refuse_links(self.checkpoints)

    def refuse_another(self, config: Config, *, resume: bool) -> dict[str, Any]:
        """Raise ConfigError if `config` cannot be trained in this folder: it contains other files,
        or a run although `resume` is false, or a run with other settings (except MAY_CHANGE).

        If the run is resumed with more steps, return {"extended": a sentence}, to be recorded in
        environment.json. Otherwise return an empty dict.
        """
        if not (self.path / CONFIG).exists():
            if any(self.path.glob("[!.]*")):
                raise ConfigError(f"{str(self.path)!r} is not empty and holds no run; choose "
                                  f"another --out")
            return {}
        if resume and self.summary.get("status") == "imported":
            raise ConfigError(f"{str(self.path)!r} was imported, and has no optimizer states to go "
                              f"on with; begin another run from it: start.run={self.path}")
        if not resume:
            raise ConfigError(f"{str(self.path)!r} already holds a run; choose another --out, or "
                              f"go on with --resume")
        was, now = flat(self.config), flat(config)
        changes = [f"{key} was {was.get(key)} and is {now[key]}" for key in now
                   if now[key] != was.get(key) and key not in MAY_CHANGE]
        if now["steps"] < was["steps"]:
            changes.append(f"steps was {was['steps']} and is {now['steps']}")
        if changes:
            raise ConfigError(f"cannot resume {str(self.path)!r} with other settings: "
                              f"{', '.join(changes)}; leave them, or start a new run with another "
                              f"--out. Only steps may be raised")
        if now["steps"] == was["steps"]:
            return {}
        return {"extended": f"steps was {was['steps']} and is {now['steps']}; from here on the "
                            f"learning rate follows the schedule of {now['steps']} steps, and so "
                            f"does weight decay, as if the run had been begun with them"}

    @property
    def config(self) -> Config:
        """The config. Raises DamagedError if config.yaml was changed after the run wrote it."""
        return Config.from_yaml(_unsealed_yaml(self.path / CONFIG))

    @property
    def mark(self) -> str | None:
        """The mark that every line and record of this run carries. None if run.json is missing or
        damaged."""
        try:
            return records.read(self.path / IDENTITY)["run"][:records.MARK_DIGITS]
        except DamagedError:
            return None

    def _record(self, name: str) -> dict[str, Any]:
        """Read the JSON file `name`. Raises DamagedError if it was changed, or belongs to another
        run."""
        record, mark = records.read(self.path / name), self.mark
        if record.pop(records.RUN, None) != mark and mark:
            raise _of_another(self.path / name, "run", self.path)
        return record

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The content of run.json, after checking that config.yaml and tokenizer.json belong to it.
        Raises DamagedError if they do not, and ConfigError if the run was trained with another
        version of the model's code."""
        record = records.read(self.path / IDENTITY)
        here = identify(self.config, tokenizer=self.tokenizer, **{key: record.get(key) for key in (
            "tokens", "born", "start", "model_version")})
        if _unsealed_yaml(self.path / CONFIG).rpartition(OF_RUN)[2].strip() != self.mark:
            raise _of_another(self.path / CONFIG, "run", self.path)
        for part, path in (("settings", CONFIG), ("tokenizer", TOKENIZER), ("run", IDENTITY)):
            if record.get(part) != here[part]:
                raise _of_another(self.path / path, part, self.path)
        if record["model_version"] != nn.VERSION:
            raise ConfigError(f"{str(self.path)!r} was trained with version "
                              f"{record['model_version']} of the model, and this lpkit has version "
                              f"{nn.VERSION}: the same weights are another function; use lpkit "
                              f"{self.environment.get('lpkit')}, which trained it")
        return record

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json. For a run that is training (status "running") or was killed
        (status "killed"), it is computed from the metrics so far. Empty for a folder without a run.
        Raises DamagedError."""
        if not (self.path / CONFIG).is_file():
            return {}
        record = self._record(SUMMARY) if (self.path / SUMMARY).is_file() else {"status": "running"}
        record.pop("vouches", None)
        if record["status"] != "running":
            return record
        status = "running" if files.is_locked(self.path / LOCK) else "killed"
        return results(self) | {"status": status}

    @property
    def environments(self) -> list[dict[str, Any]]:
        """The environments of all starts, oldest first. Raises DamagedError."""
        known = (self.path / ENVIRONMENT).is_file()
        return self._record(ENVIRONMENT)["starts"] if known else []

    @property
    def environment(self) -> dict[str, Any]:
        """The environment of the newest start."""
        return self.environments[-1] if self.environments else {}

    @property
    def tokenizer(self) -> dict[str, Any]:
        return self._record(TOKENIZER)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each recorded step. Damaged lines are left out, and named in `problems`."""
        return records.read_lines(self.path / METRICS, self.mark)[0]

    def vouches(self, *, ended: bool) -> dict[str, Any]:
        """Return checksums of the run's files as they are now, for the summary. With them,
        `problems` finds a file that is missing, or that comes from another time of the run.
        Checkpoints are included only if the run has `ended`, because a running run replaces them.
        """
        paths = [self.path / name for name in (IDENTITY, CONFIG, ENVIRONMENT, TOKENIZER)]
        if ended:
            paths += [*self.path.glob(MANIFESTS), *self.checkpoints.glob(LATEST)]
        return {"files": {str(path.relative_to(self.path)): files.sha256(path) for path in paths
                          if path.is_file()},       # a reader reports a missing file itself
                "lines": {path.name: records.head(path) for path in self.path.glob("*.jsonl")}}

    @property
    def problems(self) -> list[str]:
        """One sentence for each file or line that is missing, or was changed after it was written.
        """
        problems, vouches, starts = [], {}, []
        reads = [lambda: self.identity, lambda: starts.extend(self.environments)]
        # a run that has begun has both files
        if (self.path / ENVIRONMENT).exists() or (self.path / SUMMARY).exists():
            reads.append(lambda: vouches.update(self._record(SUMMARY).get("vouches", {})))
        for read in reads:
            try:
                read()
            except ConfigError as error:
                problems.append(str(error))
        latest = self.checkpoints / LATEST
        with suppress(DamagedError):        # `latest` is not text
            name = records.text_of(latest).strip()
            if not (self.checkpoints / name).is_dir():
                problems.append(f"{named(latest)} names {named(name)}, which is not there")
        for name, due in vouches.get("files", {}).items():
            path = self.path / name
            if not path.is_file():
                problems.append(f"{named(path)} is missing, and {SUMMARY} vouches for it")
            elif files.sha256(path) != due:
                problems.append(f"{named(path)} is not the file that {SUMMARY} vouches for: one of "
                                f"the two was altered, or is from another time of the run")
        heads = [(SUMMARY, vouches.get("lines", {})),
                 *((ENVIRONMENT, start.get("lines", {})) for start in starts)]
        for path in self.path.glob(MANIFESTS):
            with suppress(ConfigError):
                heads.append((path.parent.name, records.read(path).get("lines", {})))
        names = {METRICS, *(path.name for path in self.path.glob("*.jsonl"))}
        for name in sorted(names.union(*(lines for _, lines in heads))):
            vouched = [(who, *lines[name]) for who, lines in heads if name in lines]
            problems += records.read_lines(self.path / name, self.mark, vouched)[1]
        return list(dict.fromkeys(problems))

    def _repr_html_(self) -> str:
        summary = {}
        with suppress(DamagedError):        # show what is readable, although a file is damaged
            summary = self.summary or results(self)
        rows = described(results(self) | {"status": "not known"} | summary)
        return html_table((), [*rows, *(("problem", problem) for problem in self.problems)])


def identify(config: Config, tokens: Any, tokenizer: dict[str, Any], *, born: str, start: str,
             model_version: int = nn.VERSION) -> dict[str, Any]:
    """Return all that decides the numbers of a run, as a dict, with its hash under "run".

    tokens: SHA-256 of the training tokens, the validation tokens and the scores
    born:   random digits, drawn when the run is created, so that two runs with the same settings
            have different hashes
    start:  SHA-256 of the weights that the run starts from; "": it starts from no other run
    """
    settings = {key: value for key, value in flat(config).items() if key not in MAY_CHANGE}
    facts = records.plain({"settings": settings, "tokens": tokens, "born": born, "start": start,
                           "tokenizer": records.digest(tokenizer), "model_version": model_version})
    return facts | {"run": records.digest(facts)}


def _of_another(path: Path, part: str, run: Path) -> DamagedError:
    """Return the error for a file of another run. `part`: the entry of run.json that differs."""
    return DamagedError(f"{named(path)} belongs to another run than {named(run / IDENTITY)}: their "
                        f"{part} differ{'s' * (part == 'run')}; put the run's own file back")


def sealed_yaml(config: Config, mark: str) -> str:
    """Return the text of config.yaml: the settings, the mark of the run, and a checksum."""
    text = f"{config.to_yaml()}{OF_RUN}{mark}\n"
    return f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _unsealed_yaml(path: Path) -> str:
    """Return the text of config.yaml without its checksum. Raises DamagedError if the checksum is
    wrong."""
    text, seal, due = records.text_of(path).partition(SEAL)
    if not seal or due.strip() != hashlib.sha256(text.encode()).hexdigest():
        raise DamagedError(f"{named(path)} is not what the run wrote: it was cut off or altered. "
                           f"Undo the change. Set a setting that may change with --set; for any "
                           f"other setting, train a copy of the file with another --out")
    return text


def results(run: Run) -> dict[str, Any]:
    """Return the entries of a summary that can be computed from the files of the run."""
    done = [line for line in run.metrics if line["loss"] is not None]
    last = done[-1] if done else {}
    vals = [line["val_loss"] for line in done if "val_loss" in line]
    kept = sorted(path.name for path in run.checkpoints.glob("step-*"))
    # The first step of a process is slow: it compiles, and allocates memory. The median ignores it.
    seconds = statistics.median(line["step_seconds"] for line in done) if done else None
    tokens = last["tokens"] / last["step"] if done else 0
    chosen: dict[str, Any] = {}
    with suppress(DamagedError):
        chosen = run.environment.get("chosen", {})
    return {
        "final_loss": last.get("loss"), "val_loss": vals[-1] if vals else None,
        "dropped_updates": sum(line.get("extra", {}).get("dropped", 0) > 0 for line in done),
        "steps": last.get("step", 0), "tokens": last.get("tokens", 0), "step_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "peak_bytes": max((line["peak_bytes"] for line in done), default=None),
        "mfu": None, "energy_wh": None, "energy_tokens": None, "energy_source": None,
        "last_checkpoint": kept[-1] if kept else None, "run_dir": str(run.path), "chosen": chosen,
    }


def described(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a summary for printing: (name, value with its unit)."""
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
    if dropped := summary.get("dropped_updates"):
        more = "; no weight has moved: lower precision.recipe.loss_scale"
        rows.append(("dropped updates", f"{dropped:,}, because gradients overflowed float16"
                                        f"{more * (dropped == summary['steps'])}"))
    if summary.get("error"):
        kept = summary.get("last_checkpoint") or "no checkpoint"
        rows.append(("error", f"{summary['error']}; kept: {kept}"))
    if summary.get("energy_wh"):
        rows.append(("energy", f"{summary['energy_wh']:.3g} Wh for {summary['energy_tokens']:,} "
                               f"tokens ({summary['energy_source']})"))
    if summary.get("observer_errors"):
        rows.append(("observers that failed", "; ".join(summary["observer_errors"])))
    return rows
