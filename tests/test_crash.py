"""A run that is really killed, at random moments, is the uninterrupted run in the end."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lpkit.training import checkpoint
from lpkit.training.runs import Run

# One process imports torch and then forks the trainers: a fork costs milliseconds, an import seconds.
NURSERY = """
import os, sys
import torch
import lpkit.training.training, lpkit.training.background
from lpkit.config import Config

torch.set_num_threads(1)
for line in sys.stdin:
    out, config = line.split()
    pid = os.fork()
    if pid == 0:
        os.close(0)
        try:
            lpkit.training.background.train(Config.from_yaml(open(config).read()), out=out, resume=True)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
SETTINGS = {"model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 32, "steps": 120, "global_batch": 4,
            "eval_every": 0, "eval_batches": 1, "checkpoint_every": 2, "precision.recipe": "fp32",
            "system.device": "cpu", "system.threads": 1}


@pytest.fixture
def nursery(tmp_path, monkeypatch):
    from lpkit.config import Config

    (tmp_path / "corpus.txt").write_text("".join(f"{i} bottles of beer on the wall\n" for i in range(20_000)))
    (tmp_path / "config.yaml").write_text(
        Config().replace(SETTINGS | {"data.source": str(tmp_path / "corpus.txt")}).to_yaml())
    env = dict(os.environ, XDG_CACHE_HOME=str(tmp_path / "cache"), OMP_NUM_THREADS="1")
    with subprocess.Popen([sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=env, cwd=tmp_path) as process:
        yield process
        process.stdin.close()


def spawn(nursery, folder: Path) -> int:
    nursery.stdin.write(f"{folder} {folder.parent / 'config.yaml'}\n")
    nursery.stdin.flush()
    return int(nursery.stdout.readline())


def end(nursery) -> int:
    return int(nursery.stdout.readline())


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in Run.open(folder).metrics]


@pytest.mark.slow
def test_twenty_kills_change_no_loss(nursery, tmp_path):
    begun = time.monotonic()
    spawn(nursery, tmp_path / "whole")
    assert end(nursery) == 0
    seconds = time.monotonic() - begun
    rng, folder, kills, inside_a_save, steps = random.Random(0), tmp_path / "killed", 0, 0, []
    while kills < 20:
        pid = spawn(nursery, folder)
        deadline = time.monotonic() + rng.uniform(0.1, 0.4) * seconds
        while time.monotonic() < deadline and nursery.poll() is None:
            time.sleep(0.001)
        newest = checkpoint.folders(folder / "checkpoints")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if end(nursery) == 0:       # it was quicker than the kill: begin again, elsewhere
            assert losses(folder) == losses(tmp_path / "whole")
            folder = tmp_path / f"killed-{kills}"
            continue
        kills += 1
        inside_a_save += bool(list((folder / "checkpoints").glob(".*.tmp")))
        after = checkpoint.folders(folder / "checkpoints")
        for complete in after:
            checkpoint.verify(complete)     # what looks complete is complete
        if newest:
            assert after and after[0].name >= newest[0].name    # nothing complete was lost
            steps.append(after[0].name)
    spawn(nursery, folder)
    assert end(nursery) == 0
    assert losses(folder) == losses(tmp_path / "whole")
    whole, killed = (checkpoint.load_latest(Run.open(f).checkpoints)[0] for f in (tmp_path / "whole", folder))
    assert all((whole.tensors[name] == killed.tensors[name]).all() for name in whole.tensors)
    assert steps == sorted(steps) or folder != tmp_path / "killed"


def test_sigterm_saves_and_exits_143(nursery, tmp_path):
    config = (tmp_path / "config.yaml").read_text().replace("steps: 120", "steps: 1000000")
    (tmp_path / "long.yaml").write_text(config)
    command = [sys.executable, "-m", "lpkit", "train", str(tmp_path / "long.yaml"), "--out", str(tmp_path / "run"), "--json"]
    env = dict(os.environ, XDG_CACHE_HOME=str(tmp_path / "cache"))
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while not checkpoint.folders(tmp_path / "run" / "checkpoints"):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    run = Run.open(tmp_path / "run")
    assert run.summary["stopped_by"] == "SIGTERM" and f'"steps": {run.summary["steps"]},' in out
    assert checkpoint.load_latest(run.checkpoints)[0].step == run.summary["steps"] == run.metrics[-1]["step"]
