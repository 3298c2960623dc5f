"""Checkpoints against a process that dies at every moment, a disk that lies, and a disk that is
full."""

import json
import os
import random
import shutil
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
from lpkit.parallel.cut import Cut, Piece
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


def test_every_bit_comes_back(tmp_path):
    found = load(checkpoint.save(tmp_path, 3, TENSORS, STATE, keep=1))
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
        path.write_bytes(whole[:at] if trial % 2
                         else whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))])
                         + whole[at + 1:])
        changed = path.read_bytes()
        with pytest.raises(DamagedError, match=newest.name):
            load(newest)
        found, problems = checkpoint.load_latest(tmp_path, quarantine=False)
        assert found.step == 1 and newest.name in problems[0]
        assert path.read_bytes() == changed             # a reader leaves it where it is
        path.write_bytes(whole)
    assert load(newest).step == 2


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
    manifest = records.read(folder / "manifest.json")
    manifest["files"] = {"../../secret": {"bytes": 0, "sha256": ""}}
    records.write(folder / "manifest.json", manifest)
    with pytest.raises(DamagedError, match="does not describe"):
        load(folder)


def same_bits(one, two):
    assert one.dtype == two.dtype and one.shape == two.shape
    assert torch.equal(one.reshape(-1).contiguous().view(torch.uint8),
                       two.reshape(-1).contiguous().view(torch.uint8))


BYTES = torch.arange(256, dtype=torch.uint8)
FORMATS = {f"every/{kind}".replace("torch.", ""): BYTES.clone().view(kind) for kind in (
    torch.uint8, torch.int8, torch.int64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)}
SHAPES = {"a/b/c.d": torch.randn(3, 4).T, "bool": torch.tensor([True, False]),
          "none": torch.empty(0, 3), "scalar": torch.tensor(0.1),
          "scalar/bf16": torch.tensor(0.1, dtype=torch.bfloat16),
          "scalar/int": torch.tensor(2**62)}


def test_every_number_format_and_shape_comes_back_bit_for_bit(tmp_path):
    tensors = FORMATS | SHAPES
    folder = checkpoint.save(tmp_path, 1, tensors, {}, keep=1)
    found = load(folder).tensors
    assert found.keys() == tensors.keys()
    for name, t in tensors.items():
        same_bits(found[name], t)


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


def test_one_process_hears_no_warning(tmp_path):
    with warnings.catch_warnings(action="error"):
        load(write(tmp_path, 1))


# Two processes. Each is given its rank and a folder, and leaves there what it found.

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
    return Cut(t.shape, t.dtype, (Piece(tuple(offsets), rows),) if rows.numel() else (),
               (dist.get_rank(),))


def whole(tensors):
    return {name: (t.full_tensor() if isinstance(t, Cut) else t).detach().clone()
            for name, t in tensors.items()}


def keep_whole(model, optimizer, path):
    tensors = whole(state_of(model, optimizer))
    if dist.get_rank() == 0:
        save_file(tensors, path)


def save_two(rank, folder):
    model, optimizer = sharded(0, 1)
    for step in (1, 2):
        tensors = state_of(model, optimizer)
        assert any(isinstance(t, Cut) for t in tensors.values())
        checkpoint.save(folder / "root", step, tensors, {"step": step}, keep=2)
        keep_whole(model, optimizer, folder / f"{step}.safetensors")
        update(model, optimizer, step)
    keep_whole(model, optimizer, folder / "3.safetensors")


def fill(into, tensors):
    """What one file had whole; the rest was read into its place."""
    for name, t in into.items():
        if tensors[name] is not t:
            t.copy_(tensors[name])


def load_two(rank, folder):
    for root in ("root", "plain", "damaged"):
        model, optimizer = sharded(rank + 5, 1)
        into = state_of(model, optimizer)
        found, problems = checkpoint.load_latest(folder / root,
            blank=lambda name, *_, into=into: into[name])
        fill(into, found.tensors)
        assert found.step == found.state["step"]
        keep_whole(model, optimizer, folder / f"{root}.safetensors")
        (folder / f"{root}.{rank}.json").write_text(json.dumps([found.step, problems]))
        if root == "root":
            update(model, optimizer, 2)
            keep_whole(model, optimizer, folder / "resumed.safetensors")
            alone = load(found.path).tensors
            for name, t in load_file(folder / "2.safetensors").items():
                same_bits(alone[name], t)


def die_saving(victim):
    def program(rank, folder):
        model, optimizer = sharded(0, 1)
        tensors = state_of(model, optimizer)
        checkpoint.save(folder / "root", 1, tensors, {}, keep=1)

        def half(tensors, path, metadata):
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == victim:
            shards.save_file = half
        checkpoint.save(folder / "root", 2, tensors, {}, keep=1)
    return program


def fail_saving(rank, folder):
    """Process 0 finds the disk full when all pieces are written; then process 1, with its piece."""
    tensors = state_of(*sharded(0, 1))
    checkpoint.save(folder / "root", 1, tensors, {}, keep=1)

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    real = checkpoint.files.sha256, shards.save_file
    checkpoint.files.sha256 = full
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(folder / "root", 2, tensors, {}, keep=1)
    checkpoint.files.sha256, shards.save_file = real[0], full if rank else real[1]
    with pytest.raises(OSError, match=r"on process 1: .*No space left"):
        checkpoint.save(folder / "root", 2, tensors, {}, keep=1)
    dist.barrier()
    assert sorted(p.name for p in (folder / "root").iterdir()) == ["latest", "step-00000001"]


PROGRAMS = {"save": save_two, "load": load_two, "fail": fail_saving,
            "die 0": die_saving(0), "die 1": die_saving(1)}


def process(place, told):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.store, rank=place.rank,
                            world_size=place.world)
    PROGRAMS[told["program"]](place.rank, Path(told["folder"]))


def run_two(parent, program, folder):
    """Raises RunFailedError."""
    with Processes(f"{__name__}:process", {"program": program, "folder": str(folder)}, world=2,
                   parent=parent) as ranks:
        ranks.wait()


@pytest.fixture(scope="module")
def two(parent, tmp_path_factory):
    """A run of two processes: checkpoints after one and two updates, and what they must hold."""
    folder = tmp_path_factory.mktemp("two")
    run_two(parent, "save", folder)
    return folder


@pytest.mark.dist
def test_two_processes_write_what_one_reads(two):
    found, problems = checkpoint.load_latest(two / "root")
    names = sorted(p.name for p in found.path.iterdir())
    assert names == ["manifest.json", "state.json", "tensors-00001-of-00002.safetensors",
                     "tensors-00002-of-00002.safetensors"]
    assert found.step == 2 and not problems
    assert (two / "root/latest").read_text() == "step-00000002\n"
    truth = load_file(two / "2.safetensors")
    assert found.tensors.keys() == truth.keys()
    assert len(truth) == 7 * 4 + 1      # 7 parameters with two moments and a step each, one buffer
    model, optimizer = trained(9, 1)
    into = state_of(model, optimizer)
    assert into.keys() == truth.keys()
    fill(into, found.tensors)
    for name, t in truth.items():
        same_bits(found.tensors[name], t)
        same_bits(state_of(model, optimizer)[name], t)


@pytest.mark.dist
def test_two_processes_read_what_two_and_what_one_wrote_and_pass_over_damage(two, parent, tmp_path):
    for name in ("1", "2", "3"):
        shutil.copy(two / f"{name}.safetensors", tmp_path)
    shutil.copytree(two / "root", tmp_path / "root")
    shutil.copytree(two / "root", tmp_path / "damaged")
    model, optimizer = trained(9, 1)
    fill(state_of(model, optimizer), checkpoint.load_latest(two / "root")[0].tensors)
    checkpoint.save(tmp_path / "plain", 7, state_of(model, optimizer), {"step": 7}, keep=1)
    path = tmp_path / "damaged/step-00000002/tensors-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    run_two(parent, "load", tmp_path)
    for found, due in (("root", "2"), ("plain", "2"), ("damaged", "1"), ("resumed", "3")):
        one, other = (load_file(tmp_path / f"{name}.safetensors") for name in (found, due))
        assert one.keys() == other.keys()
        for name in one:
            same_bits(one[name], other[name])
    for root, step in (("root", 2), ("plain", 7), ("damaged", 1)):
        said = [json.loads((tmp_path / f"{root}.{rank}.json").read_text()) for rank in range(2)]
        assert said[0] == said[1] and said[0][0] == step
    assert "does not match its checksum; moved to quarantine/" in said[0][1][0]
    assert [p.name for p in (tmp_path / "damaged/quarantine").iterdir()] == ["step-00000002"]


@pytest.mark.dist
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_inside_a_save_leaves_the_checkpoint_before_the_newest(parent, tmp_path,
        victim):
    with pytest.raises(RunFailedError, match=f"rank {victim} of 2 died .* of SIGKILL"):
        run_two(parent, f"die {victim}", tmp_path)
    assert [p.name for p in checkpoint.folders(tmp_path / "root")] == ["step-00000001"]
    assert (tmp_path / "root/latest").read_text() == "step-00000001\n"
    checkpoint.sweep(tmp_path / "root")
    found, problems = checkpoint.load_latest(tmp_path / "root")
    assert found.step == 1 and not problems
    assert sorted(p.name for p in (tmp_path / "root").iterdir()) == ["latest", "step-00000001"]


@pytest.mark.dist
def test_an_error_of_one_process_is_said_by_all_and_leaves_nothing(parent, tmp_path):
    run_two(parent, "fail", tmp_path)
