"""Only these tests catch a checkpoint that is lost, half written or read with a wrong bit: the
process dies at each call of the disk, bytes change, the disk is full, and two ranks write and read
pieces."""

import os
import random
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo  # FSDP would import it in each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lpkit import records
from lpkit.parallel.cut import Cut, TensorPiece
from lpkit.parallel.processes import Processes
from lpkit.training import checkpoint, shards
from lpkit.training.checkpoint import DamagedError
from lpkit.training.runs import RunFailedError

TENSORS = {
    "model/a": torch.randn(17, 5, generator=torch.Generator().manual_seed(0)),
    "model/bf16": torch.arange(64, dtype=torch.bfloat16),
    "optimizer/a/step": torch.tensor(7.0),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
}
STATE = {"optimizer": {"b": 1.5}}


def load(folder, only=""):
    """One checkpoint, once it is verified."""
    return checkpoint._read(folder, checkpoint.by_first(checkpoint.verify, folder), only)


def write(root, step, keep=2):
    return checkpoint.save(root, step,
                           {name: t + step if t.dtype.itemsize > 1 else t
                            for name, t in TENSORS.items()},
                           STATE | {"step": step}, keep=keep)


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


# the calls through which a save touches the disk
DISK = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def die_at(k: int, root) -> int:
    """Save step 2 over step 1 in a child that dies just before its k-th disk call; the child's exit
    code."""
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
        loaded, problems = checkpoint.load_latest(root)
        assert loaded.step in (1, 2) and not problems
        assert torch.equal(loaded.tensors["model/a"], TENSORS["model/a"] + loaded.step)
        assert not list(root.glob(".*.tmp"))
        write(root, 3)                                  # and the next save works
        assert checkpoint.load_latest(root)[0].step == 3
        if codes[-1] == 0:
            break
    assert codes[-1] == 0 and set(codes[:-1]) == {9} and len(codes) > 8


def test_any_changed_or_missing_byte_is_found_and_the_one_before_is_used(tmp_path):
    """A damaged checkpoint is moved aside and never deleted."""
    rng = random.Random(0)
    write(tmp_path, 1, keep=3)
    newest = write(tmp_path, 2, keep=3)
    originals = {p: p.read_bytes() for p in newest.iterdir()}
    for trial in range(40):
        path = rng.choice(sorted(originals))
        whole = originals[path]
        at = rng.randrange(len(whole))
        flipped = bytes([whole[at] ^ (1 << rng.randrange(8))])
        path.write_bytes(whole[:at] + (b"" if trial % 2 else flipped + whole[at + 1:]))
        changed = path.read_bytes()
        with pytest.raises(DamagedError, match=newest.name):
            load(newest)
        loaded, problems = checkpoint.load_latest(tmp_path, quarantine=False)
        assert loaded.step == 1 and newest.name in problems[0]
        assert path.read_bytes() == changed             # a reader leaves it where it is
        path.write_bytes(whole)
    assert load(newest).step == 2
    (newest / "tensors.safetensors").write_bytes(b"gone")
    loaded, problems = checkpoint.load_latest(tmp_path)
    assert loaded.step == 1 and "has 4 bytes" in problems[0] and "quarantine" in problems[0]
    assert (tmp_path / "quarantine" / newest.name / "tensors.safetensors").read_bytes() == b"gone"


def test_a_manifest_that_points_elsewhere_is_refused(tmp_path):
    folder = write(tmp_path / "run", 1)
    manifest = records.read(folder / "manifest.json")
    manifest["files"] = {"../../secret": {"bytes": 0, "sha256": ""}}
    records.write(folder / "manifest.json", manifest)
    with pytest.raises(DamagedError, match="does not describe"):
        load(folder)


def same_bits(first, second):
    assert first.dtype == second.dtype and first.shape == second.shape
    assert torch.equal(first.reshape(-1).contiguous().view(torch.uint8),
                       second.reshape(-1).contiguous().view(torch.uint8))


BYTES = torch.arange(256, dtype=torch.uint8)
FORMATS = {f"every/{kind}".replace("torch.", ""): BYTES.clone().view(kind) for kind in (
    torch.uint8, torch.int8, torch.int64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)}
SHAPES = {"a/b/c.d": torch.randn(3, 4).T, "bool": torch.tensor([True, False]),
          "none": torch.empty(0, 3), "scalar": torch.tensor(0.1),
          "scalar/bf16": torch.tensor(0.1, dtype=torch.bfloat16),
          "scalar/int": torch.tensor(2**62)}


def test_every_bit_comes_back(tmp_path):
    tensors = FORMATS | SHAPES
    loaded = load(checkpoint.save(tmp_path, 3, tensors, STATE, keep=1))
    assert (loaded.step, loaded.state) == (3, STATE) and loaded.tensors.keys() == tensors.keys()
    for name, t in tensors.items():
        same_bits(loaded.tensors[name], t)


def test_the_reader_of_torch_reads_the_files_too(tmp_path):
    folder = write(tmp_path, 0)
    into = {name: torch.zeros_like(t) for name, t in TENSORS.items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, t in TENSORS.items():
        same_bits(into[name], t)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_save_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch, error):
    write(tmp_path, 1)

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise error("so it goes")

    monkeypatch.setattr(shards, "save_file", fail)
    with pytest.raises(OSError if error is RuntimeError else error, match="so it goes"):
        write(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


# ---- two processes

class Small(nn.Module):
    """Seven rows and one row on two processes: pieces of unequal size, and one of none."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.hidden, self.head = nn.Linear(6, 5, dtype=torch.bfloat16), nn.Linear(5, 1)
        self.register_buffer("scale", torch.randn(3).to(torch.float8_e4m3fn))

    def forward(self, ids):
        return self.head(self.hidden(self.norm(self.embed(ids)).bfloat16()).float().tanh())


def trained(seed, updates, model=None):
    model = model or Small(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for i in range(updates):
        update(model, optimizer, i)
    return model, optimizer


def update(model, optimizer, i):
    optimizer.zero_grad()
    ids = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(i))
    model(ids).square().mean().backward()
    optimizer.step()


def sharded(seed, updates):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Small(seed), init_device_mesh("cpu", (2,))
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(seed, updates, model)


def state_of(model, optimizer):
    names = {p: name for name, p in model.named_parameters()}
    tensors = {f"model/{name}": t for name, t in model.state_dict().items()}
    for p, slots in optimizer.state.items():
        tensors |= {f"optimizer/{names[p]}/{slot}": t for slot, t in slots.items()}
    return {name: cut(t) if isinstance(t, DTensor) else t for name, t in tensors.items()}


def cut(t):
    """PyTorch says where the rows lie."""
    _, offsets = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    rows = t.detach().to_local()
    return Cut(t.shape, t.dtype, (TensorPiece(tuple(offsets), rows),) if rows.numel() else (),
                     (dist.get_rank(),))


def whole(tensors):
    return {name: (t.full_tensor() if isinstance(t, Cut) else t).detach().clone()
            for name, t in tensors.items()}


def keep_whole(model, optimizer, path):
    tensors = whole(state_of(model, optimizer))
    if dist.get_rank() == 0:
        save_file(tensors, path)


def fill(into, tensors):
    """Copy what one file had whole; the rest was read into its place."""
    for name, t in into.items():
        if tensors[name] is not t:
            t.copy_(tensors[name])


def full_disk(*args, **more):
    raise OSError(28, "No space left on device")


def two_ranks(place, argument):
    """Both ranks save two steps and read them again, also a step whose piece is damaged and a step
    that one process wrote. Then process 0 finds the disk full after all pieces are written, and
    process 1 while it writes its piece. At last process 1 dies inside a save."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.store, rank=place.rank,
                            world_size=place.world)
    folder, rank = Path(argument["folder"]), place.rank
    model, optimizer = sharded(0, 1)
    for step in (1, 2):
        tensors = state_of(model, optimizer)
        assert any(isinstance(t, Cut) for t in tensors.values())
        for root in ("root", "damaged"):
            checkpoint.save(folder / root, step, tensors, {"step": step}, keep=2)
        keep_whole(model, optimizer, folder / f"{step}.safetensors")
        update(model, optimizer, step)
    keep_whole(model, optimizer, folder / "3.safetensors")
    if rank == 0:
        path = folder / "damaged/step-00000002/tensors-00002-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    dist.barrier()
    for root, truth in (("root", 2), ("plain", 0), ("damaged", 1)):
        model, optimizer = sharded(rank + 5, 1)
        into = state_of(model, optimizer)
        loaded, problems = checkpoint.load_latest(folder / root,
                                                  blank=lambda name, *_, into=into: into[name])
        fill(into, loaded.tensors)
        assert loaded.step == loaded.state["step"] == (truth or 7)
        assert bool(problems) == (root == "damaged")
        assert not problems or "does not match its checksum; moved to quarantine/" in problems[0]
        hold(whole(state_of(model, optimizer)), folder / f"{truth}.safetensors")
        if root == "root":
            update(model, optimizer, 2)
            hold(whole(state_of(model, optimizer)), folder / "3.safetensors")

    whole_file, piece = checkpoint.files.sha256, shards.save_file
    checkpoint.files.sha256 = full_disk
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(folder / "root", 3, tensors, {}, keep=2)
    checkpoint.files.sha256, shards.save_file = whole_file, full_disk if rank else piece
    with pytest.raises(OSError, match=r"on process 1: .*No space left"):
        checkpoint.save(folder / "root", 3, tensors, {}, keep=2)

    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    shards.save_file = half if rank else piece
    dist.barrier()
    checkpoint.save(folder / "dying", 3, tensors, {}, keep=2)


def hold(tensors, path):
    truth = load_file(path)
    assert tensors.keys() == truth.keys()
    for name, t in truth.items():
        same_bits(tensors[name], t)


@pytest.mark.dist
def test_two_processes_write_read_fail_and_die(parent, tmp_path):
    """What one process reads of it: all pieces, and what one process has trained."""
    model, optimizer = trained(9, 1)
    state = state_of(model, optimizer)
    checkpoint.save(tmp_path / "plain", 7, state, {"step": 7}, keep=1)
    save_file(state, tmp_path / "0.safetensors")
    folders = [tmp_path / name for name in ("root", "damaged", "dying")]
    checkpoint.save(folders[2], 1, state, {}, keep=1)
    with (pytest.raises(RunFailedError, match=r"rank 1 of 2 died .* of SIGKILL"),
          Processes(f"{__name__}:two_ranks", {"folder": str(tmp_path)}, world=2,
                    parent=parent) as ranks):
        ranks.wait()
    for folder, step in zip(folders, (2, 1, 1)):
        checkpoint.sweep(folder)
        names = {p.name for p in folder.iterdir()} - {"quarantine"}
        assert max(names - {"latest"}) == f"step-{step:08}" and not any("tmp" in n for n in names)
        assert checkpoint.load_latest(folder)[0].step == step
    assert [p.name for p in (folders[1] / "quarantine").iterdir()] == ["step-00000002"]
    loaded, _ = checkpoint.load_latest(folders[0])
    assert sorted(p.name for p in loaded.path.iterdir()) == [
        "manifest.json", "state.json", "tensors-00001-of-00002.safetensors",
        "tensors-00002-of-00002.safetensors"]
    assert (folders[0] / "latest").read_text() == "step-00000002\n"
    # 7 parameters with two moments and a step each, one buffer
    assert len(loaded.tensors) == 7 * 4 + 1 and loaded.tensors.keys() == state.keys()
    hold(loaded.tensors, tmp_path / "2.safetensors")
