"""Save and load checkpoints. If a run is killed at any moment, it loses at most the steps since its
last checkpoint.

A checkpoint is a folder `step-00000100/` with

    tensors*.safetensors    one file for each process: see `shards`
    state.json              numbers that are not tensors
    manifest.json           size and SHA-256 of each file, the run, and a checksum of the manifest

A folder is written under a temporary name, synced to disk and renamed. Then its name is written to
the file `latest`. Loading takes the newest folder whose files match its manifest. A damaged folder
is moved to `quarantine/`, and a message names it; it is never deleted. No pickle is read or
written, because unpickling can run any code.

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
    """Return the weights that evaluation uses, by the names of the trained weights ("model/...").
    Where the optimizer keeps other weights for evaluation ("evaluated/..."), these are returned
    instead of the trained weights."""
    theirs = {"model/" + name.removeprefix(EVALUATED): t for name, t in tensors.items()
              if name.startswith(EVALUATED)}
    return {name: t for name, t in tensors.items() if name.startswith("model/")} | theirs


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    path: Path
    step: int               # number of updates before it was saved
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    # {file of the run: (number, checksum) of its last line when the checkpoint was saved}
    lines: dict[str, Any]


def save(root: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *,
         keep: int, run: str = "", lines: Mapping[str, Any] | None = None,
         write: Write = shards.save) -> Path:
    """Write the checkpoint of `step` into a new folder in `root`, and return the folder. Remove all
    but the `keep` newest checkpoints.

    tensors: a process writes its pieces of each `Cut`. All other tensors are the same on all
             processes, and one process writes each of them
    state:   what becomes state.json; only process 0's is used
    run:     the hash of the run's identity
    lines:   as in Checkpoint; only process 0's is used
    write:   f(folder, tensors) writes the files that `shards.file_names` returns

    Raises OSError (a full disk, a read-only folder) and ConfigError (a link where a folder is
    needed). Then no unfinished checkpoint is left under a valid name.
    """
    # The order of the steps makes a kill at any moment safe. The manifest is written after the
    # files that it describes. The folder gets its final name after the manifest is written. Old
    # checkpoints are removed last.
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
    """Return the folders in `root` that are named like checkpoints, newest first."""
    paths = (p for p in root.glob("step-*") if p.is_dir() and not p.is_symlink())
    return sorted(paths, reverse=True)


def verify(folder: Path, run: str = "") -> dict[str, Any]:
    """Return the manifest of the checkpoint `folder`. Raise DamagedError if a file does not match
    the manifest, or if the checkpoint belongs to another run than `run` (a hash; "": any run)."""
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
                    f"{folder / name} has {size} bytes; its manifest has {want['bytes']}")
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
    """Return the newest checkpoint of `run` whose files match its manifest (None: there is none),
    and a sentence for each newer checkpoint that was skipped.

    run:        the hash of the run's identity; "": any run
    only:       load only tensors whose names start with this
    blank:      as in `shards.load`; by default all tensors are loaded whole
    quarantine: move damaged checkpoints to `quarantine/`
    lack:       set by readers that only use the run's weights, for example to sample. Damaged
                checkpoints then stay in place, and their sentences are printed. Without a good
                checkpoint, ConfigError is raised, whose message begins with `lack`
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
    """Remove temporary files of a `save` that was killed. Only the process that trains the run may
    call it, before it saves."""
    by_first(files.sweep, root, ".*.tmp")
