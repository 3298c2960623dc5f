"""Checkpoints against a process that dies at every moment, a disk that lies, and a disk that is full."""

import json
import os
import random

import pytest
import torch

from lpkit.training import checkpoint
from lpkit.training.checkpoint import DamagedError

TENSORS = {
    "model/a": torch.randn(17, 5, generator=torch.Generator().manual_seed(0)),
    "model/bf16": torch.arange(64, dtype=torch.bfloat16),
    "optimizer/a/step": torch.tensor(7.0),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
}
STATE = {"optimizer": {"b": 1.5}}


def write(root, step, keep=2):
    return checkpoint.save(root, step, {name: t + step if t.dtype.itemsize > 1 else t for name, t in TENSORS.items()},
                           STATE | {"step": step}, keep=keep)


def test_every_bit_comes_back(tmp_path):
    found = checkpoint.load(checkpoint.save(tmp_path, 3, TENSORS, STATE, keep=1))
    assert found.step == 3 and found.state == STATE and found.tensors.keys() == TENSORS.keys()
    for name, t in TENSORS.items():
        assert found.tensors[name].dtype == t.dtype
        assert torch.equal(found.tensors[name].view(torch.uint8) if t.ndim else found.tensors[name],
                           t.view(torch.uint8) if t.ndim else t)


def test_only_the_newest_are_kept_and_latest_names_the_newest(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    assert [p.name for p in checkpoint.folders(tmp_path)] == ["step-00000004", "step-00000003"]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"


def test_saving_a_step_again_keeps_the_old_one_aside(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 1)
    assert checkpoint.load_latest(tmp_path)[0].step == 1
    assert [p.name for p in (tmp_path / "quarantine").iterdir()] == ["step-00000001"]


DISK = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")   # the calls through which a save touches the disk


def die_at(k: int, root) -> int:
    """Save step 2 over step 1 in a child that dies just before its k-th disk call; the child's exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    calls = [0]

    def counted(real):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] == k:
                os._exit(9)
            return real(*args, **kwargs)
        return call

    try:
        for name in DISK:
            setattr(os, name, counted(getattr(os, name)))
        write(root, 2, keep=1)
        os._exit(0)
    finally:
        os._exit(1)


def test_a_death_before_any_disk_call_leaves_a_whole_checkpoint(tmp_path):
    codes = []
    for k in range(1, 100):
        root = tmp_path / str(k)
        write(root, 1)
        codes.append(die_at(k, root))
        checkpoint.sweep(root)
        found, problems = checkpoint.load_latest(root)
        assert found.step in (1, 2) and not problems
        assert torch.equal(found.tensors["model/a"], TENSORS["model/a"] + found.step)
        assert not list(root.glob(".*.tmp"))
        write(root, 3)                                  # and the next save works
        assert checkpoint.load_latest(root)[0].step == 3
        if codes[-1] == 0:
            break
    assert codes[-1] == 0 and set(codes[:-1]) == {9} and len(codes) > 8


def test_any_changed_or_missing_byte_is_found_and_the_one_before_is_used(tmp_path):
    rng = random.Random(0)
    write(tmp_path, 1, keep=3)
    newest = write(tmp_path, 2, keep=3)
    originals = {p: p.read_bytes() for p in newest.iterdir()}
    for trial in range(200):
        path = rng.choice(sorted(originals))
        whole = originals[path]
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] if trial % 2 else whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1:])
        changed = path.read_bytes()
        with pytest.raises(DamagedError, match=newest.name):
            checkpoint.load(newest)
        found, problems = checkpoint.load_latest(tmp_path, quarantine=False)
        assert found.step == 1 and newest.name in problems[0]
        assert path.read_bytes() == changed             # a reader leaves it where it is
        path.write_bytes(whole)
    assert checkpoint.load(newest).step == 2


def test_a_damaged_checkpoint_is_moved_aside_and_never_deleted(tmp_path):
    write(tmp_path, 1, keep=3)
    newest = write(tmp_path, 2, keep=3)
    (newest / "tensors.safetensors").write_bytes(b"gone")
    found, problems = checkpoint.load_latest(tmp_path)
    assert found.step == 1 and "has 4 bytes" in problems[0] and "quarantine" in problems[0]
    assert (tmp_path / "quarantine" / newest.name / "tensors.safetensors").read_bytes() == b"gone"


def test_nothing_is_left_of_a_save_that_found_no_space(tmp_path, monkeypatch):
    write(tmp_path, 1)
    real = os.fsync

    def full(handle):
        if "state.json" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        return real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert checkpoint.load_latest(tmp_path)[0].step == 1


def test_a_manifest_that_points_elsewhere_is_refused(tmp_path):
    folder = write(tmp_path / "run", 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {"../../secret": {"bytes": 0, "sha256": ""}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="does not describe"):
        checkpoint.load(folder)
