"""Saving and resuming, so that a kill at any moment loses at most the steps since the last complete checkpoint.

A checkpoint is a folder `step-00000100/` with `tensors.safetensors`, `state.json` and `manifest.json` (sizes and SHA-256).
It is written under a temporary name, synced, renamed, and only then does the file `latest` name it. Loading takes the
newest folder whose manifest verifies; a damaged one is moved to `quarantine/` and named, never deleted.
No pickle: tensors are safetensors, everything else is JSON.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lpkit.files import sync, write_atomically

FORMAT = 1
TENSORS, STATE, MANIFEST, LATEST = "tensors.safetensors", "state.json", "manifest.json", "latest"


class DamagedError(ValueError):
    """A checkpoint that does not match its manifest. The message names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(root: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of `step` under `root` and return its folder; the `keep` newest stay.

    Raises OSError (a full disk, a read-only folder) with nothing visible written.
    """
    from safetensors.torch import save_file

    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{step:08d}"
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir()
        try:
            save_file({name: t.detach().contiguous() for name, t in tensors.items()}, temporary / TENSORS)
        except Exception as error:   # safetensors wraps the system's error in its own class
            raise OSError(f"could not write {temporary / TENSORS}: {error}") from error
        (temporary / STATE).write_text(json.dumps(dict(state)))
        files = {name: {"bytes": (temporary / name).stat().st_size, "sha256": _sha256(temporary / name)}
                 for name in (TENSORS, STATE)}
        (temporary / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files}))
        for name in (TENSORS, STATE, MANIFEST):
            sync(temporary / name)
        sync(temporary)
        if final.exists():           # the same step again, after a resume from an earlier one
            os.rename(final, _free_name(root / "quarantine", final.name))
        os.rename(temporary, final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(root)
    write_atomically(root / LATEST, final.name + "\n")
    for old in folders(root)[keep:]:     # renamed first, so that a half-removed one never looks complete
        shutil.rmtree(old.rename(root / f".{old.name}.{os.getpid()}.tmp"))
    return final


def folders(root: Path) -> list[Path]:
    """Complete-looking checkpoints, newest first."""
    return sorted((p for p in root.glob("step-*") if p.is_dir()), reverse=True) if root.is_dir() else []


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, after every file matched it. Raises DamagedError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        step, files = manifest["step"], manifest["files"]
        if manifest["format"] > FORMAT or set(files) != {TENSORS, STATE} or folder.name != f"step-{step:08d}":
            raise DamagedError(f"{folder / MANIFEST} does not describe this folder")
        for name, want in files.items():
            size = (folder / name).stat().st_size
            if size != want["bytes"]:
                raise DamagedError(f"{folder / name} has {size} bytes, its manifest says {want['bytes']}")
            if _sha256(folder / name) != want["sha256"]:
                raise DamagedError(f"{folder / name} does not match its checksum")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{folder / MANIFEST} cannot be read ({error})") from error
    return manifest


def load(folder: Path, *, only: str = "") -> Checkpoint:
    """A verified checkpoint; `only` keeps the tensors whose name starts so. Raises DamagedError."""
    from safetensors import safe_open

    manifest = verify(folder)
    with safe_open(folder / TENSORS, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith(only)}
    return Checkpoint(path=folder, step=manifest["step"], tensors=tensors,
                      state=json.loads((folder / STATE).read_text()))


def load_latest(root: Path, *, only: str = "", quarantine: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and a sentence for each damaged one passed over.

    `quarantine` moves damaged ones aside; a reader that does not own the run leaves them where they are.
    """
    problems = []
    for folder in folders(root):
        try:
            return load(folder, only=only), problems
        except DamagedError as error:
            problems.append(str(error))
            if quarantine:
                os.rename(folder, _free_name(root / "quarantine", folder.name))
                problems[-1] += "; moved to quarantine/"
    return None, problems


def sweep(root: Path) -> None:
    """Remove what a killed save left behind. Only for the owner of the run, before it saves."""
    if root.is_dir():
        for leftover in root.glob(".*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _free_name(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    taken = {p.name for p in folder.iterdir()}
    return folder / next(n for n in (name, *(f"{name}-{i}" for i in range(1, len(taken) + 2))) if n not in taken)
