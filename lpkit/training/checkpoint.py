"""Saving and resuming: a kill at any moment loses at most the steps since the last checkpoint.

A checkpoint is a folder `step-00000100/` with a safetensors file per process, `state.json` and
`manifest.json` (sizes and SHA-256 of the files, the run, and its own checksum). It is written under
a temporary name, synced and renamed; only then is its name written to the file `latest`. Loading
takes the newest folder whose manifest verifies. A damaged folder is moved to `quarantine/` and
named in a message, never deleted. No pickle is read or written: tensors are safetensors, all else
is JSON.

In a process group, every process calls `save`, `load_latest` and `sweep`, in the same order.
Process 0 creates, checks, renames and removes folders, and sends the outcome to the others.
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

EVALUATED = "evaluated/"            # weights that evaluation reads instead of the trained ones
Write = Callable[[Path, Mapping[str, Tensor]], None]
WEIGHTS = ("model/", EVALUATED)     # all tensors of a model, without the state of its training


def evaluated_weights(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model of a checkpoint as evaluation reads it, by the names of trained weights."""
    theirs = {"model/" + name.removeprefix(EVALUATED): t for name, t in tensors.items()
              if name.startswith(EVALUATED)}
    return {name: t for name, t in tensors.items() if name.startswith("model/")} | theirs


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    # by file of the run: number and checksum of the last line that the checkpoint vouches for
    lines: dict[str, Any]


def save(root: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *,
         keep: int, run: str = "", lines: Mapping[str, Any] | None = None,
         write: Write = shards.save) -> Path:
    """Writes the checkpoint of `step` under `root`, and returns its folder. The `keep` newest
    checkpoints stay.

    run:   the hash of the run's identity
    lines: as in Checkpoint, from process 0
    write: writes tensors into a folder, as the files `shards.file_names`

    Each process writes its own pieces of a `Cut`. Other tensors are equal on all processes, and one
    process writes them. `state` is taken from process 0.
    Raises OSError (a full disk, a read-only folder) without leaving anything visible, and
    ConfigError for a link where a folder is needed.
    """
    # The order makes a kill at any moment safe: the manifest is written after the files that it
    # describes, the folder gets its name after the manifest, and old checkpoints go last.
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
            unfinished.close()          # syncs and renames the folder
            files.write_atomically(root / LATEST, final.name + "\n")
            for old in folders(root)[keep:]:
                files.remove_folder(old)

        folder = Path(by_first(begin))
        write(folder, tensors)
        by_first(finish)
    return final


def folders(root: Path) -> list[Path]:
    """Returns the folders with a checkpoint's name, newest first."""
    paths = (p for p in root.glob("step-*") if p.is_dir() and not p.is_symlink())
    return sorted(paths, reverse=True)


def verify(folder: Path, run: str = "") -> dict[str, Any]:
    """Returns the manifest of `folder`, if every file matches it. Raises DamagedError otherwise,
    also for a checkpoint of another run than `run`."""
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
    """Returns the newest checkpoint of `run` that verifies, and a sentence for each one skipped.

    only:       keep only tensors whose names start so
    blank:      as in `shards.load`; by default tensors are whole, however many processes saved them
    quarantine: move damaged checkpoints aside
    lack:       for a reader that does not own the run. It leaves damaged checkpoints in place and
                prints a sentence for each. Without a good checkpoint it raises ConfigError, which
                begins with `lack`
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
            heading = f"lpkit: the weights are those of step {manifest['step']}:"
            for problem in problems if lack else ():
                print(heading, problem, file=sys.stderr)
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
    """Removes files that a killed save left behind. Only the owner of the run may call it, before
    it saves."""
    by_first(files.sweep, root, ".*.tmp")
