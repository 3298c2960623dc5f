"""`lpkit claim --executor`: jobs of submitit and tasks of Ray give the verdict that workers give,
one that is killed is started again, and a run may be of several ranks.

Only these tests catch: a job of submitit or Ray that gives another verdict or another record than
a worker, a killed job that is lost, a step metered on one kind of machine that decides the budget
on another, and ranks that outlive the worker that started them.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import lpkit
from lpkit import cli, records
from lpkit.claims import executors, protocol, runs, settle
from lpkit.errors import ConfigError, RunFailedError
from lpkit.machine_facts import cores
from tests.claims.test_claim import TINY, claim, settled, worker_of, written

ROOT = Path(__file__).parents[2]
NAMES = [name for name, start in executors.EXECUTORS.items() if start]
TIMED = ("seconds", "step_seconds", "sha256")
TWO = TINY["settings"] | {"parallel.data": 2}
pairs = pytest.mark.skipif(cores() < 2, reason="two ranks need two cores")


@pytest.fixture(params=NAMES)
def name(request):
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: pip install {request.param}")
    return request.param


def untimed(value):
    """All but what a clock says, as text."""
    def kept(part):
        if isinstance(part, dict):
            return {key: kept(each) for key, each in part.items() if key not in TIMED}
        return [kept(each) for each in part] if isinstance(part, list) else part

    return json.dumps(kept(value))


def claimed(path, out, *more):
    """What the command prints. It runs in a process of its own, whose jobs are its alone."""
    env = os.environ | {"OMP_NUM_THREADS": "1",
                        "PYTHONPATH": os.pathsep.join([str(ROOT),
                            os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "lpkit", "claim", str(path), "--out", str(out),
                           "--processes", "2", "--json", *more],
                          capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, "a job that had made its run was cancelled"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def by_workers(tmp_path_factory):
    """What the command prints, and the folder that it writes."""
    folder = tmp_path_factory.mktemp("ours")
    return claimed(written(folder), folder / "out"), folder / "out"


@pytest.mark.slow
def test_others_give_the_verdict_that_workers_give(name, tmp_path, request):
    """Byte for byte but for seconds, in the file too; and so is the record of each run."""
    path, (ours, folder) = written(tmp_path), request.getfixturevalue("by_workers")
    theirs = claimed(path, tmp_path / "theirs", "--executor", name)
    assert ours["verdicts"][0]["equal_seconds"] is None, "seconds decide nothing here"
    assert untimed(ours) == untimed(theirs)
    assert (tmp_path / "theirs" / name).is_dir() == (name == "submitit")
    kept = [{file.name: untimed(records.read(file)) for file in who.glob("*.*")
             if file.suffix in (".json", ".verdict")} for who in (folder, tmp_path / "theirs")]
    assert kept[0] == kept[1] and len(kept[0]) == ours["runs"] + 1
    asked = theirs["claim"]
    assert not {"executor", "job"} & asked.keys() and protocol.Claim(**asked) == protocol.read(path)
    left = [file for file in (tmp_path / "theirs").iterdir() if file.suffix in (".lock", ".stop")
            or (file.is_dir() and file.name != name)]
    assert [file.name for file in left] in ([], [".lock"])


def children(*words):
    """Processes below this one in whose command line one of `words` is."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word in " ".join(process.cmdline()) for word in words):
                processes.append(process)
    return processes


@contextlib.contextmanager
def jobs(name, out):
    """What `runs.Workers` is given. Ends when jobs have, though submitit never asks after their
    processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subprocess [0-9]+ is still running", ResourceWarning)
        with ExitStack() as stack:
            yield executors.EXECUTORS[name](out, {}, stack)
            psutil.wait_procs(children("submitit."), 30)
        gc.collect()


@pytest.mark.slow
def test_a_run_whose_job_is_killed_is_started_again(name, tmp_path):
    """Once it has made a step. Its loss is that of a run that nobody disturbed."""
    out, killed, over = tmp_path / "out", [], threading.Event()
    out.mkdir()
    config = claim(budget={"steps": 200}).config("adamw")

    def kill():
        while not over.wait(0.01) and not killed:
            if any(path.stat().st_size for path in out.glob("*/metrics.jsonl")):
                for process in children("ray::alone", "submitit.core._submit"):
                    process.kill()
                    killed.append(process.pid)

    with jobs(name, out) as hooks, \
            runs.Workers(out, runs.processes.Children(), 1, *hooks) as workers:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            [record] = workers.finished([config])
        finally:
            over.set()
            killer.join()
    assert len(killed) == 1 and record["restarts"] == 1
    whole = lpkit.train(config, out=tmp_path / "whole").summary
    assert record["val_loss"] == whole["val_loss"]


@pytest.mark.slow
def test_a_job_that_fails_by_itself_is_not_started_again(name, tmp_path):
    """An error of its own would be one again."""
    begun, config = [], claim().config("adamw")
    tmp_path.joinpath(runs.name_of(config)).write_text("no folder")
    with jobs(name, tmp_path) as (submit, lost), \
            runs.Workers(tmp_path, runs.processes.Children(), 1,
                         lambda *args: begun.append(args) or submit(*args), lost) as workers, \
            pytest.raises(RunFailedError, match=r"Their errors: .*rror"):
        workers.finished([config])
    assert len(begun) == 1


# what is refused

@pytest.mark.parametrize("more, changes, message", [
    (["--executor", "submtit"], {}, "executor cannot be 'submtit'; did you mean 'submitit'?"),
    (["--executor", "slurm"], {},
     "executor cannot be 'slurm'; choose one of ray, submitit, workers"),
    ([], {"executor": "rai"}, "executor cannot be 'rai'; did you mean 'ray'?"),
    ([], {"job": 3}, "job must be a mapping"),
    (["--executor", "ray"], {"budget": {"joules": 500}}, "budget.joules needs a meter that counts "
                                                         "one run on this machine alone: give "
                                                         "executor"),
    ([], {"budget": {"joules": 500}, "settings": TWO}, "budget.joules needs a meter that counts "
                                                       "one run"),
    ([], {"settings": TINY["settings"] | {"parallel.data": 3}}, "global_batch=4 sequences does not "
        "split over data=3")])
def test_a_wrong_executor_is_refused_in_one_sentence(more, changes, message, tmp_path, capsys,
        monkeypatch):
    monkeypatch.setattr(runs.Workers, "finished", lambda *args: pytest.fail("a run"))
    assert cli.main(["claim", str(written(tmp_path, **changes)), "--out", str(tmp_path / "out"),
                     *more]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err, err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("absent, given_in", [("submitit", "file"), ("ray", "option")])
def test_what_is_not_installed_is_named_with_its_extra(absent, given_in, tmp_path, capsys,
        monkeypatch):
    monkeypatch.setattr("lpkit.commands._there", lambda package: package != absent)
    path, more = ((written(tmp_path, executor=absent), []) if given_in == "file"
                  else (written(tmp_path), ["--executor", absent]))
    assert cli.main(["claim", str(path), "--out", str(tmp_path / "out"), *more]) == 2
    err = capsys.readouterr().err
    assert (f"executor={absent} needs {absent}, which this Python does not have" in err
            and err.count("\n") == 1)
    assert not (tmp_path / "out").exists()


def test_the_option_wins_over_the_file(tmp_path):
    path = written(tmp_path, executor="ray")
    assert (protocol.read(path).executor == "ray"
            and protocol.read(path, executor="workers").executor == "workers")


def test_seconds_of_two_kinds_of_machine_are_refused():
    """A step that is metered on one says nothing of the budget on another; steps and FLOPs do not
    ask."""
    where = iter(["a fast one", "a slow one"] * 100)

    def settle_with(budget):
        def finished(what, configs):
            return [{"name": runs.name_of(config), "val_loss": 2 + config.seed % 7 / 1e3,
                     "seconds": 1.0, "energy_wh": None, "step_seconds": 0.5,
                     "error": None, "device": next(where)} for config in configs]

        return settle.Settling(claim(budget=budget), finished, lambda line: None).settle(False)

    with pytest.raises(ConfigError,
                       match=r"budget\.seconds needs machines of one kind, and runs were made on a "
                             r"fast one and a slow one; let job ask"):
        settle_with({"seconds": 10})
    assert (settle_with({"steps": 20})["runs"]
            and settled(lambda config: 2.0 + config.seed % 7 / 1e3, {"budget": {"seconds": 10}}))


# ranks

@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """One worker for all tests of ranks: it imports PyTorch once."""
    folder = tmp_path_factory.mktemp("ranks")
    with runs.Workers(folder, runs.processes.Children(), 1) as workers:
        yield workers


@pytest.mark.slow
@pairs
def test_ranks_that_a_judge_stops_end_on_the_way(workers):
    """As a run that a sweep prunes."""
    class Judge:
        tag, stop_after = "pruned", None

        def __call__(self, evaluations):
            self.stop_after = evaluations[0][0] if evaluations else None

    config = claim(settings=TWO, budget={"steps": 2000}).config("adamw").replace({"eval_every": 5})
    [record] = workers.finished([config], judges=[Judge()])
    assert record["val_loss"] is None and record["error"] is None
    assert 5 <= record["stopped_after"] < 2000


@pytest.mark.slow
@pairs
def test_ranks_that_diverge_are_a_result(workers):
    config = claim(settings=TWO).config("adamw",
        {"optimizer.lr": 1e30}).replace({"optimizer.clip": 0, "steps": 20})
    [record] = workers.finished([config])
    assert record["val_loss"] is None and "loss" in record["error"]


@pytest.mark.slow
@pairs
def test_a_run_of_two_ranks_is_what_launch_makes(workers, tmp_path):
    """Though its worker is killed: its ranks end with it, and the run goes on."""
    config = claim(settings=TWO, budget={"steps": 100}).config("adamw")
    gone, over, path = [], threading.Event(), workers.out / runs.name_of(config) / "metrics.jsonl"

    def killer():
        while not (path.exists() and path.stat().st_size):
            if over.wait(0.01):
                return
        worker = worker_of(workers.workers[0].keeper.pid)
        gone.extend(psutil.Process(worker).children(recursive=True))
        os.kill(worker, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        [record] = workers.finished([config])
    finally:
        over.set()
        thread.join()
    assert record["restarts"] == 1 and len(gone) >= 2
    assert not psutil.wait_procs(gone, timeout=10)[1]
    whole = lpkit.launch(config, processes=2, out=tmp_path / "whole").result().summary
    assert (record["val_loss"], record["device"]) == (
        whole["val_loss"], lpkit.Run(tmp_path / "whole").environment["device"])


def test_more_ranks_than_cores_are_refused_before_a_worker_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("lpkit.training.launch.cores", lambda: 1)
    monkeypatch.setattr("lpkit.training.launch.gpus", lambda: 0)
    with runs.Workers(tmp_path, runs.processes.Children(), 1) as workers, pytest.raises(ConfigError,
            match="need as many cores, and there is 1"):
        workers.finished([claim(settings=TWO).config("adamw")])
    assert not workers.workers
