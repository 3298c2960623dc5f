"""`lpkit sweep --executor`: jobs of submitit and tasks of Ray give the same trials as workers, also
if the sweep is killed.

Only these tests catch: a trial of a job of submitit or Ray that is lost, made twice or different
from a worker's trial, and jobs that outlive a sweep that was ended.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml

from lpkit import records
from lpkit.claims import executors, sweep
from lpkit.errors import ConfigError

pytest.importorskip("optuna")
ROOT = Path(__file__).parents[2]
NAMES = [name for name, start in executors.EXECUTORS.items() if start]
FILE = {"settings": {"model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 16,
                     "global_batch": 4, "eval_batches": 2, "eval_every": 2,
                     "checkpoint_every": 20, "schedule.warmup_steps": 2, "system.device": "cpu",
                     "steps": 80},
        "search": {"optimizer.lr": {"low": 1e-5, "high": 1e-1, "log": True}}, "trials": 4,
        "target": "val_loss", "seed": 3, "at_once": 2, "pruner": "asha"}
SAID = ("trial", "settings", "val_loss", "pruned", "evaluations", "name")


@pytest.fixture(params=NAMES)
def name(request):
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: pip install {request.param}")
    return request.param


def started(folder, *more):
    path = folder / "few.yaml"
    path.write_text(yaml.safe_dump(FILE))
    return subprocess.Popen([sys.executable, "-m", "lpkit", "sweep", str(path), "--out",
                             str(folder / "out"), "--json", *more], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1",
                                              "PYTHONPATH": os.pathsep.join([str(ROOT),
                                                  os.environ.get("PYTHONPATH", "")])})


def trials(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return [{key: trial[key] for key in SAID} for trial in json.loads(out)["trials"]]


def test_the_file_and_the_table_have_the_same_executors():
    for name in executors.EXECUTORS:
        assert sweep.Sweep(**FILE | {"executor": name}).executor == name
    with pytest.raises(ConfigError, match="choose one of ray, submitit, workers"):
        sweep.Sweep(**FILE | {"executor": "slurm"})


def test_a_job_that_cannot_be_is_refused_in_one_sentence(name, tmp_path):
    with ExitStack() as stack, pytest.raises(ConfigError,
            match=r"refuses this job: .*num_gpsu") as error:
        executors.EXECUTORS[name](tmp_path, {"num_gpsu": 1}, stack)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_others_make_the_trials_that_workers_make_also_after_a_kill(name, tmp_path):
    """The jobs of a killed sweep finish or end. The next sweep waits for a job that is still
    running, and no trial is made twice."""
    for folder in ("theirs", "ours"):
        (tmp_path / folder).mkdir()
    whole = trials(started(tmp_path / "ours"))
    assert any(trial["pruned"] for trial in whole)
    process, out = started(tmp_path / "theirs", "--executor", name), tmp_path / "theirs" / "out"
    while not list(out.glob("*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    their_trials = trials(started(tmp_path / "theirs", "--executor", name))
    assert their_trials == whole
    assert not psutil.wait_procs(children, timeout=30)[1], "nothing goes on for ever"
    assert not [path for path in out.iterdir() if (path.is_dir() and path.name != name)
                or path.suffix in (".lock", ".stop")]
    for pipe in (process.stdout, process.stderr):     # jobs that outlive the sweep hold these locks
        pipe.close()
    assert ({records.read(out / f"{trial['name']}.json")["name"] for trial in their_trials}
            == {path.stem for path in out.glob("*.json")})


@pytest.mark.slow
def test_a_sweep_that_is_told_to_end_ends_its_jobs(name, tmp_path):
    process, out = started(tmp_path, "--executor", name), tmp_path / "out"
    while not list(out.glob("*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    err = process.communicate()[1]
    assert (process.returncode == 128 + signal.SIGTERM
            and "stopped; repeat the command to continue" in err)
    assert not psutil.wait_procs(children, timeout=30)[1]
