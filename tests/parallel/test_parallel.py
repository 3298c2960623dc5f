"""Only these tests catch gradients of data parallel ranks that are not those of PyTorch's DDP, a
run that does not go on in another layout, waits that are not counted, and a world of processes, a
folder or data that does not fit and is not refused."""

import json
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

import lessons.rows.depth
import lessons.rows.disk  # noqa: F401  adds governors
from lessons.rows import blocks as blocks
from lpkit import files, train
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.exchange.export import export
from lpkit.parallel import meeting
from lpkit.parallel.meeting import here, joined
from lpkit.parallel.processes import Processes
from lpkit.parallel.ranks import Ranks
from lpkit.parallel.replicas import buckets
from lpkit.parallel.sharding import Sharding
from lpkit.techniques.layouts import UNSHARDED, Layout, refuse_untrainable
from lpkit.training.runs import LOCK, Run, RunFailedError
from lpkit.training.training import Training
from tests.exchange.test_export import logits_agree
from tests.parallel.training_ranks import weighted

pytestmark = pytest.mark.dist
SMALL = Config().replace({
    "model.layers": 2, "model.width": 32, "model.heads": 4, "model.context": 32, "global_batch": 12,
    "grad_accum_steps": 1, "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1,
    "schedule": "constant", "eval_batches": 2, "checkpoint_every": 2})


def laid(config, layout):
    return config.replace({f"parallel.{axis}": n for axis, n in layout.items()})


def goes_on(on_ranks, folder, config, layouts):
    """Two updates in each layout, one after the other, against one process all along. Float32 sums
    in another order differ by some 2^-24 of the loss an update; 1e-5 at the end allows for their
    growth."""
    single, many = folder / "one", folder / "many"
    for i, layout in enumerate(layouts):
        config = laid(config.replace({"steps": 2 * (i + 1)}), vars(Layout()) | layout)
        train(laid(config, vars(Layout())), out=single, resume=i > 0)
        if config.parallel.devices == 1:
            train(config, out=many, resume=True)
        else:
            on_ranks("chain", config, config.parallel.devices, out=str(many), resume=i > 0)
    alone, together = Run(single).metrics, Run(many).metrics
    assert len(alone) == len(together) == 2 * len(layouts)
    for a, b in zip(alone, together):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b.get("val_loss", 0) == pytest.approx(a.get("val_loss", 0), rel=1e-5)


def test_a_run_goes_on_in_any_layout(on_ranks, tmp_path):
    """4 -> 2 -> 1 -> 3 -> 2 -> 4 -> 2 ranks."""
    goes_on(on_ranks, tmp_path, SMALL.replace({"grad_accum_steps": 12}), [
        {"shard": 4}, {"tensor": 2}, {}, {"shard": 3, "zero": 2}, {"pipeline": 2},
        {"context": 2, "zero": 3}, {"tensor": 2, "shard": 2, "zero": 1}, {"data": 2}])


LATE = [({"data": 2}, True), ({"data": 2, "reduction": "per-parameter"}, False),
        ({"shard": 2, "zero": 1}, True), ({"shard": 2}, True)]


def test_an_early_rank_waits_and_a_late_rank_does_not(on_ranks, tmp_path):
    """Rank 1 sleeps 0.6 s when the other is in its backward. What that computes until it waits is
    some milliseconds of it, and half of it is left for a busy machine."""
    early, late = on_ranks("late", SMALL, folder=str(tmp_path), seconds=0.6,
                           layouts=[laid(SMALL, layout).to_dict() for layout, _ in LATE])
    for (_, within_backward), (waited, in_backward, whole), (own, *_) in zip(LATE, early, late,
                                                                             strict=True):
        assert own + 0.3 < waited < whole
        assert in_backward > 0.3 if within_backward else in_backward == 0


def test_each_rank_tells_its_share_of_waiting(parent, tmp_path):
    messages, config = [], SMALL.replace({"steps": 2, "parallel.shard": 2})
    with Processes("tests.parallel.training_ranks:chain",
                   {"config": config.to_dict(), "out": str(tmp_path / "run"), "resume": False},
                   world=2, parent=parent, heard=lambda *pair: messages.append(pair)) as running:
        running.wait()
    assert sorted((rank, message["step"]) for rank, message in messages) == [
        (0, 1), (0, 2), (1, 1), (1, 2)]
    assert all(0 < message["communication_share"] < 1 for _, message in messages)
    assert all(line["extra"]["waited_seconds"] < line["step_seconds"]
               for line in Run(tmp_path / "run").metrics)


def test_gradients_are_those_of_ddp(on_ranks):
    """Two summands: the same sums but for the mean's rounding. And how many all-reduces an update
    takes, by reduction; all ranks then have the same weights."""
    config = SMALL.replace({"parallel.data": 2, "grad_accum_steps": 3})
    parameters = len(list(Training.build(SMALL).model.parameters()))
    for by_reduction in on_ranks("beside_ddp", config,
                                 reductions=["per-parameter", "buckets", "overlapped"]):
        apart, messages = zip(*by_reduction)
        assert max(apart) < 1e-6 and messages == (parameters, 1, 1)


@pytest.mark.parametrize("layout", [{"data": 2}, {"shard": 2, "zero": 3}])
def test_weights_of_targets_count_over_all_ranks(on_ranks, layout):
    """The first sequences have most of the targets that count."""
    config = SMALL.replace({"global_batch": 8, "grad_accum_steps": 4})

    class Drawn:
        def batch(self, step):
            return weighted(config)

    alone = Training.build(config, data=Drawn())
    done = alone.update(0)
    due = [done.loss.item(), done.grad_norm.item(), alone.evaluate()]
    numbers = on_ranks("weights_and_zeros", laid(config, layout))
    assert numbers[0] == numbers[1] == pytest.approx(due, rel=1e-5)


def test_ranks_that_differ_are_named(on_ranks):
    with pytest.raises(ConfigError, match="rank 1 has another seed than rank 0: 1 and 0; start"):
        on_ranks("differs", SMALL.replace({"parallel.data": 2}))


def test_buckets():
    like = lambda *sizes: [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    of = lambda parameters, most: [[p.numel() for p in bucket]
                                   for bucket in buckets(parameters, most)]
    assert of(like(1, 2, 3, 9, 1), 16) == [[1, 2], [3], [9], [1]]
    assert of(like(1, 2, 3), 0) == [[1], [2], [3]]
    half = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    assert of([*like(1, 2), half], 1 << 20) == [[1, 2], [1]]


def test_alone_nothing_is_sent():
    """No process group is there."""
    ranks, t = Ranks(), torch.tensor(2.0)
    assert ranks.mean(t) is t and ranks.largest(t) is t and ranks.broadcast(3) == 3
    assert Sharding().norm([t], []) == t
    ranks.refuse_differences({"code": 1})


@pytest.mark.parametrize("row", UNSHARDED, ids=lambda row: f"{row.several} {row.key}")
def test_what_does_not_go_together_is_refused(row):
    on_axis = isinstance(row.several, str)
    value = {"memory.optimizer_step": "in-backward", "memory.moment_format": "int8",
             "memory.optimizer_state": "disk", "precision.cache_weight_casts": True,
             "precision.telemetry_every": 5, "memory.param_dtype": "bf16", "model.changes": "lora",
             "memory.activation_offload": "cpu", "model.init": "t-fixup",
             "system.kernels": "pytorch",
             "governors": "stochastic-depth" if on_axis else None}.get(row.key)
    if value is None:
        pytest.skip("the kit has no such row of its own")
    layout = ({f"parallel.{row.several}": 2} if on_axis
              else {"parallel.shard": 2, "parallel.zero": max(row.several, 1)})
    config = SMALL.replace({**layout, row.key: value, "optimizer.clip": 0, "grad_accum_steps": 1})
    with pytest.raises(ConfigError,
                       match=rf"{row.key}=.*; set {row.key}={'' if row.only == () else row.only}"):
        refuse_untrainable(config)
    if row.several and not on_axis:
        refuse_untrainable(config.replace({"parallel.zero": row.several - 1}))
    refuse_untrainable(config.replace(dict.fromkeys(layout, 1)))


def test_one_process_says_how_to_start_two(tmp_path):
    with pytest.raises(ConfigError, match=r"2 processes, .* `lpkit train --processes 2`"):
        train(SMALL.replace({"parallel.data": 2}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("environment, sentence", [
    ({"WORLD_SIZE": "3"}, r"3 processes were started; .* is 2 devices, not 3; set"),
    ({"WORLD_SIZE": "two"},
     r"environment variable WORLD_SIZE must be a number, got 'two'; start all ranks with"),
    ({"WORLD_SIZE": "2"}, r"rank 0 on .* cannot meet .* MASTER_ADDR expected, but not set; start"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "taken"},
     r"rank 0 .* cannot meet the others: .*address already in use"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1"},
     r"rank 1 .* cannot meet the others: .*timed out"),
], ids=["size", "word", "alone", "port in use", "nobody there"])
def test_worlds_that_cannot_be(monkeypatch, environment, sentence):
    monkeypatch.setattr(meeting, "MEETING_TIMEOUT", timedelta(seconds=0.5))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in environment.items():
            monkeypatch.setenv(name, str(taken.getsockname()[1]) if value == "taken" else value)
        with pytest.raises(ConfigError, match=sentence) as refusal, here(
                SMALL.replace({"parallel.data": 2})):
            pass
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("gpus, nccl, sentence", [
    (0, True, r"2 processes on .* take a GPU each, and PyTorch sees 0; use system\.device=cpu, or"),
    (2, False, "GPUs talk by NCCL, and this PyTorch is built without it; use system.device=cpu")])
def test_gpus_that_are_not_there_or_cannot_talk(monkeypatch, gpus, nccl, sentence):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    config = SMALL.replace({"parallel.data": 2, "system.device": "cuda"})
    with (pytest.raises(ConfigError, match=sentence),
          joined(config, rank=0, world=2, local_rank=0, local_world=2)):
        pass


def test_folders_in_which_ranks_cannot_write(on_ranks, tmp_path):
    """One sentence, and what is there stays as it is. Another process is any that holds the lock.
    tests/training/test_train.py holds the other reasons: one function finds them."""
    config, run = SMALL.replace({"parallel.data": 2, "steps": 1}), tmp_path / "run"
    with files.locked(run / LOCK), pytest.raises(
            ConfigError, match=r"rank 0 of 2: another process is training into '.*run' .*; choose"):
        on_ranks("chain", config, out=str(run), resume=False)
    assert [path.name for path in run.iterdir()] == [LOCK]
    with pytest.raises(ConfigError, match=r"cannot write the run folder '/proc/run' \(.*; choose"):
        on_ranks("chain", config, out="/proc/run", resume=False)


@pytest.mark.parametrize("second, sentence", [
    ([12, 10], "rank 1 of 2: batch 2 of the data policy has 10 sequences, and all are to have 12;"),
    ([12], "rank 1 of 2 failed at step 0 in start: StopIteration")])
def test_data_that_ends_early_on_a_rank(on_ranks, second, sentence):
    with pytest.raises((ConfigError, RunFailedError), match=sentence):
        on_ranks("draws", SMALL.replace({"parallel.data": 2}), sequences=[[12, 12], second])


def test_what_shards_saved_is_one_file_for_transformers(on_ranks, tmp_path):
    pytest.importorskip("transformers")
    config = SMALL.replace({"parallel.shard": 2, "steps": 2})
    on_ranks("chain", config, out=str(tmp_path / "run"), resume=False)
    run = Run(tmp_path / "run")
    assert len(list(run.checkpoints.glob("step-*/tensors-*-of-00002.safetensors"))) == 2
    logits_agree(run, export(run.path, tmp_path / "out"))


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# with --cpu it starts one process
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate launch"])
def test_others_run_the_same_command(tmp_path, launcher):
    """One process writes and speaks, and a default folder is the first one's."""
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "lpkit", "train", "cpu-3m", "model.layers=1",
         "model.width=32", "model.heads=2", "model.context=32", "steps=3", "system.device=cpu",
         "precision.recipe=fp32", "parallel.shard=2", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "complete"
    assert len(list((tmp_path / "runs").iterdir())) == 1
