"""Only these tests catch a stop that waits for the end of a step or of an evaluation, and a run
that a stop in the middle of either leaves other than bit for bit."""

import os
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
import torch

import lpkit
from lpkit.config import Config
from lpkit.nn.transformer import Transformer
from lpkit.techniques.changes import GOVERNORS
from lpkit.techniques.row import TechniqueRow
from lpkit.training import checkpoint
from lpkit.training.background import start, train
from lpkit.training.control import Control
from lpkit.training.loop import fit
from lpkit.training.runs import Run
from lpkit.training.training import Training
from tests.attack import patience

SECONDS = 2.0


@pytest.fixture
def tiny(corpus, monkeypatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return Config().replace({
        "model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 32,
        "data.source": str(corpus / "*.py"), "steps": 6, "global_batch": 8, "grad_accum_steps": 4,
        "eval_every": 3, "eval_batches": 1, "checkpoint_every": 0, "schedule.warmup_steps": 2,
        "precision.recipe": "fp32", "precision.backend": "auto", "system.device": "cpu",
        "system.compile": False, "system.threads": 1})


def at_forward(monkeypatch, number: int, what) -> list:
    """Call `what` in the forward with that number, of training and of evaluation alike."""
    calls, build = [], Training.build.__func__

    def built(cls, *args, **more):
        training = build(cls, *args, **more)
        loss = training.loss

        def watched(model, batch):
            calls.append(model.training)
            if len(calls) == number:
                what()
            return loss(model, batch)

        # what evaluation reports, and what updates make smaller
        for name in ("loss", "objective"):
            object.__setattr__(training, name, watched)
        return training

    monkeypatch.setattr(Training, "build", classmethod(built))
    return calls


def lines(run) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in ("step_seconds", "peak_bytes")}
            for line in run.metrics]


def hold_to_the_end(tiny, run, whole):
    """Bit for bit, once it went on."""
    again = train(tiny, out=run.path, resume=True)
    a, b = (checkpoint.load_latest(run.checkpoints)[0].tensors for run in (again, whole))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert lines(again) == lines(whole) and again.problems == []
    return again


def stopped_at(tiny, folder, monkeypatch, number: int):
    """The run that was asked to stop in that forward, and how many it took."""
    control = Control()
    with monkeypatch.context() as patch:
        calls = at_forward(patch, number, lambda: control.stop("SIGTERM"))
        run = fit(Training.build(tiny), folder, resume=folder.exists(), control=control)
    assert len(calls) == number, "no forward after it"
    assert run.summary["status"] == "stopped" and run.problems == []
    return run


class Fades:
    """After each update the last norm's gains are a hundredth smaller; counts how often."""

    def __init__(self, settings):
        self.times = torch.zeros((), dtype=torch.int64)

    def end(self, training, step):
        with torch.no_grad():
            training.model.norm.weight.mul_(0.99)
        self.times += 1

    def state_dict(self):
        return {"times": self.times.clone()}

    def load_state_dict(self, state):
        self.times = state["times"].clone()


@pytest.mark.parametrize("changes", [
    {"precision.recipe": "fp8-delayed", "governors": "fades"},
    {"precision.recipe": "nvfp4", "precision.recipe.high_precision_layers": "head"}], ids=str)
def test_a_step_is_given_up_between_micro_batches(tiny, tmp_path, monkeypatch, changes):
    """Histories of casts, draws of roundings and what a governor has at its end are those of the
    step before, and so is all that comes."""
    monkeypatch.setitem(GOVERNORS, "fades", TechniqueRow(implementation=f"{__name__}:Fades"))
    tiny = tiny.replace(changes)
    whole = train(tiny, out=tmp_path / "whole")
    # in step 5: an evaluation came after 3
    run = stopped_at(tiny, tmp_path / "run", monkeypatch, 3 * 4 + 4 + 4 + 2)
    loaded = checkpoint.load_latest(run.checkpoints)[0]
    assert run.summary["steps"] == loaded.step == 4 and "governors" not in run.summary["chosen"]
    assert loaded.tensors.get("governor/fades/times", 4) == 4
    hold_to_the_end(tiny, run, whole)


def test_an_evaluation_is_given_up_and_comes_again(tiny, tmp_path, monkeypatch):
    """Also when it is given up a second time; the line of its step then has the loss that it would
    have had."""
    whole = train(tiny, out=tmp_path / "whole")
    run = stopped_at(tiny, tmp_path / "run", monkeypatch, 3 * 4 + 2)
    assert run.summary["steps"] == 3 and checkpoint.load_latest(run.checkpoints)[0].step == 3
    assert [line.get("val_loss") for line in run.metrics] == [None] * 3
    run = stopped_at(tiny, run.path, monkeypatch, 1)
    assert [line["step"] for line in run.metrics] == [1, 2, 3] and run.summary["steps"] == 3
    assert "val_loss" in hold_to_the_end(tiny, run, whole).metrics[2]


def test_a_governors_step_is_finished(tiny, tmp_path, monkeypatch):
    """Its begin may have changed the model, which nothing undoes."""
    class Begins(Fades):
        def begin(self, training, step):
            pass

    control = Control()
    with monkeypatch.context() as patch:
        at_forward(patch, 2, control.stop)
        training = Training.build(tiny)
        training.governors["begins"] = Begins(None)
        assert fit(training, tmp_path / "run", control=control).summary["steps"] == 1


@pytest.mark.parametrize("number, changes", [
    (2, {"global_batch": 400, "grad_accum_steps": 200}), (4 * 3 + 2, {"eval_batches": 200})],
    ids=["step", "evaluation"])
def test_the_handle_of_a_notebook_stops_a_long_step_and_a_long_evaluation(
        tiny, tmp_path, monkeypatch, number, changes):
    reached, hidden = threading.Event(), Transformer.hidden
    calls = at_forward(monkeypatch, number, reached.set)

    def slow(self, *args, **more):
        time.sleep(0.2 * (len(calls) >= number))
        return hidden(self, *args, **more)

    monkeypatch.setattr(Transformer, "hidden", slow)
    handle = start(tiny.replace(changes), out=tmp_path / "run")
    assert reached.wait(60 * patience())
    begun = time.monotonic()
    handle.stop()
    assert handle.result().summary["status"] == "stopped"
    assert time.monotonic() - begun < SECONDS * patience()


@pytest.mark.parametrize("number, number_of", [(1, signal.SIGTERM), (4 * 3 + 1, signal.SIGINT)],
                         ids=["first step", "evaluation"])
def test_a_signal_breaks_off_what_is_not_saved(tiny, tmp_path, monkeypatch, number, number_of):
    """The first step, which may compile for minutes, and a batch of an evaluation that takes longer
    than all of it."""
    def long():
        threading.Timer(0.1, os.kill, (os.getpid(), number_of)).start()
        time.sleep(280)

    at_forward(monkeypatch, number, long)
    begun = time.monotonic()
    run = lpkit.train(tiny, out=tmp_path / "run")
    assert time.monotonic() - begun < min(25 * patience(), 270)
    assert (run.summary["status"], run.summary["stopped_by"]) == ("stopped", number_of.name)
    assert run.summary["steps"] == (0 if number == 1 else 3) and run.problems == []


COMMAND = """
import fcntl, sys, termios
from lpkit import cli
fcntl.ioctl(0, termios.TIOCSCTTY, 0)        # its terminal: who closes it hangs up
sys.exit(cli.main(["train", sys.argv[1], "--out", sys.argv[2]]))
"""


def test_a_terminal_that_closes_is_a_hangup(tiny, tmp_path):
    """With one process, too, whose result nobody can read: 129, and not 2 for an error of the
    output."""
    (tmp_path / "config.yaml").write_text(tiny.replace({"steps": 10**6, "eval_every": 0}).to_yaml())
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    with open(ours, "r+b", buffering=0) as terminal, subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(tmp_path / "config.yaml"), str(tmp_path / "run")],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as command:
        os.close(theirs)
        shown = b""
        while b"loss" not in shown:
            shown += terminal.read(4096)
        terminal.close()
        assert command.wait(60) == 129
    run = Run(tmp_path / "run")
    assert run.summary["stopped_by"] == "SIGHUP" and checkpoint.load_latest(run.checkpoints)[0]


def test_a_step_given_up_in_a_destructor_says_nothing(monkeypatch):
    """The exception is lost there, and the run stops at its next micro-batch; what others lose is
    said."""
    control, exceptions = Control(), []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: exceptions.append(what.exc_type))

    class Dying:
        def __init__(self, dies):
            self.dies = dies

        def __del__(self):
            self.dies()

    with control.breaking(True):
        Dying(lambda: control.signalled("SIGHUP"))
        Dying(lambda: 1 / 0)
    Dying(lambda: 1 / 0)
    assert exceptions == [ZeroDivisionError] * 2 and control.stopped_by == "SIGHUP"
