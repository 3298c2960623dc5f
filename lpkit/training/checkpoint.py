"""Saving and resuming: a kill at any moment loses at most the steps since the last checkpoint.

A checkpoint is a folder `step-00000100/` with a safetensors file per process, `state.json` and
`manifest.json` (sizes and SHA-256, the run that it is of, and its own checksum). It is written
under a temporary name, synced, renamed, and only then does the file `latest` name it. Loading takes
the newest folder whose manifest verifies; a damaged one is moved to `quarantine/` and named, never
deleted.
No pickle is read or written: tensors are safetensors, everything else is JSON.

In a process group every process calls `save`, `load_latest` and `sweep`, in the same order.
Process 0 makes, checks, renames and removes folders, and the others learn what came of it.
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lpkit import files, records
from lpkit.errors import ConfigError, DamagedError, named
from lpkit.parallel.ranks import by_first
from lpkit.training import shards

FORMAT = 3
STATE, MANIFEST, LATEST, QUARANTINE = "state.json", "manifest.json", "latest", "quarantine"

EVALUATED = "evaluated/"            # weights that evaluation reads in place of the trained ones
Write = Callable[[Path, Mapping[str, Tensor]], None]
WEIGHTS = ("model/", EVALUATED)     # what a model is made of that is not trained on


def evaluated_weights(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The model of a checkpoint as evaluation reads it, by the names of the trained one."""
    theirs = {"model/" + name.removeprefix(EVALUATED): t for name, t in tensors.items()
              if name.startswith(EVALUATED)}
    return {name: t for name, t in tensors.items() if name.startswith("model/")} | theirs


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    lines: dict[str, Any]       # by file of the run, the number and checksum of its last line


def save(root: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *,
         keep: int, run: str = "", lines: Mapping[str, Any] | None = None,
         write: Write = shards.save) -> Path:
    """Write the checkpoint of `step` under `root` and return its folder; the `keep` newest stay.
    `run`: whose it is, the hash of its identity. `lines`: as Checkpoint's, of process 0. `write`
    puts the tensors into a folder, in `shards.file_names`.

    A tensor may be a `Cut`: each process writes its own pieces. What is not one is the same on
    all processes, and one of them writes it; `state` is that of process 0.
    Raises OSError (a full disk, a read-only folder) with nothing visible written, ConfigError for a
    link where a folder is needed.
    """
    final = root / f"step-{step:08d}"
    with ExitStack() as unfinished:
        def begin() -> Path:
            files.own_folder(root)
            return unfinished.enter_context(files.whole_folder(final, aside=root / QUARANTINE))

        def finish() -> None:
            (folder / STATE).write_text(json.dumps(dict(state)))
            facts = {path.name: {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
                     for path in sorted(folder.iterdir())}
            manifest = {"format": FORMAT, "run": run, "step": step, "files": facts,
                        "lines": dict(lines or {})}
            (folder / MANIFEST).write_text(records.sealed(manifest))
            unfinished.close()          # synced and renamed
            files.write_atomically(root / LATEST, final.name + "\n")
            for old in folders(root)[keep:]:
                files.remove_folder(old)

        folder = Path(by_first(begin))
        write(folder, tensors)
        by_first(finish)
    return final


def folders(root: Path) -> list[Path]:
    """Complete-looking checkpoints, newest first."""
    paths = (p for p in root.glob("step-*") if p.is_dir() and not p.is_symlink())
    return sorted(paths, reverse=True)


def verify(folder: Path, run: str = "") -> dict[str, Any]:
    """The manifest of `folder`, after every file matched it. Raises DamagedError, also for a
    checkpoint of another run than `run`."""
    try:
        files.refuse_links(folder)
        manifest = records.read(folder / MANIFEST)
        step, facts = manifest["step"], manifest["files"]
        due = {STATE, *shards.file_names(len(facts) - 1)}
        known = manifest["format"] == FORMAT and folder.name == f"step-{step:08d}"
        if not known or set(facts) != due:
            raise DamagedError(f"{folder / MANIFEST} does not describe this folder")
        if run and manifest["run"] != run:
            raise DamagedError(f"{named(folder)} is a checkpoint of another run")
        for name, want in facts.items():
            size = (folder / name).stat().st_size
            if size != want["bytes"]:
                raise DamagedError(
                    f"{folder / name} has {size} bytes, its manifest says {want['bytes']}")
            if files.sha256(folder / name) != want["sha256"]:
                raise DamagedError(f"{folder / name} does not match its checksum")
    except DamagedError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / MANIFEST} cannot be read ({error})") from error
    return manifest


def _read(folder: Path, manifest: dict[str, Any], only: shards.Prefix,
          blank: shards.Blank = shards.whole) -> Checkpoint:
    paths = [folder / name for name in shards.file_names(len(manifest["files"]) - 1)]
    return Checkpoint(path=folder, step=manifest["step"],
                      tensors=shards.load(paths, only=only, blank=blank),
                      state=json.loads((folder / STATE).read_text()),
                      lines=manifest["lines"])


def load_latest(root: Path, *, run: str = "", only: shards.Prefix = "",
                blank: shards.Blank = shards.whole, quarantine: bool = True, lack: str = ""
                ) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of `run` that verifies, and a sentence for each one passed over.

    `only` keeps the tensors whose name starts so. However many processes saved them, whole tensors
    come back, or what `blank` makes, as in `shards.load`.
    `quarantine` moves damaged ones aside. A reader that does not own the run leaves them there, and
    says what it lacks if there is none: that begins the ConfigError; of others it tells the user.
    """
    folder, manifest, problems = by_first(_newest_whole, root, run, quarantine and not lack, lack)
    if folder is None:
        return None, problems
    return _read(Path(folder), manifest, only, blank), problems


def _newest_whole(root: Path, run: str,
                  quarantine: bool, lack: str) -> tuple[Path | None, dict[str, Any], list[str]]:
    problems = []
    for folder in folders(root):
        try:
            manifest = verify(folder, run)
            said = f"lpkit: the weights are those of step {manifest['step']}:"
            for one in problems if lack else ():
                print(said, one, file=sys.stderr)
            return folder, manifest, problems
        except DamagedError as error:
            problems.append(str(error))
            if quarantine:
                files.move_into(root / QUARANTINE, folder)
                problems[-1] += "; moved to quarantine/"
    if lack:
        raise ConfigError("; ".join([lack, *problems]))
    return None, {}, problems


def sweep(root: Path) -> None:
    """Remove what a killed save left behind. Only for the owner of the run, before it saves."""
    by_first(files.sweep, root, ".*.tmp")
