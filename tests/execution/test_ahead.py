"""Work that is queued ahead of a GPU, with a device that answers late: a clock of the test stands
for CUDA's events.

Only these tests catch a line of metrics that is lost, doubled or late when a run evaluates, stops,
pauses, fails or is resumed, and a batch that is made in the wrong order or thread.
"""

import gc
import math
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch

from lpkit.config import Config
from lpkit.contracts import Batch, DataPolicy, StatePlacement
from lpkit.training import checkpoint, loop
from lpkit.training.control import Control
from lpkit.training.data import Prefetched
from lpkit.training.loop import AHEAD, HostMoment, fit
from lpkit.training.runs import Run, RunFailedError
from lpkit.training.training import Training
from tests.attack import patience


@pytest.fixture
def tiny(corpus, monkeypatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return Config().replace({
        "model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 32, "steps": 9,
        "data.source": str(corpus / "*.py"), "global_batch": 4, "eval_every": 4, "eval_batches": 1,
        "checkpoint_every": 0, "schedule.warmup_steps": 2, "precision.recipe": "fp32",
        "system.device": "cpu", "system.compile": False, "system.threads": 1})


@pytest.fixture
def queue(monkeypatch) -> list:
    """A device that has done nothing until it is waited for: every moment that was waited for."""
    waited = []

    class Late(HostMoment):
        there = False

        def query(self) -> bool:
            return self.there

        def synchronize(self) -> None:
            self.there = True
            waited.append(self)

    monkeypatch.setattr(loop, "HostMoment", Late)
    return waited


def lines(run: Run) -> list[dict]:
    return [{key: value for key, value in line.items()
             if key not in ("step_seconds", "peak_bytes", "sha256")} for line in run.metrics]


def test_numbers_are_told_when_they_arrive_and_none_is_lost(tiny, tmp_path, queue, monkeypatch):
    """At most AHEAD updates are in the queue; before an evaluation it is empty. The lines are those
    of a host that waits."""
    training, observed, handed = Training.build(tiny), [], []
    update = Training.update

    def counted(self, step, **more):
        handed.append((step + 1, len(observed)))
        return update(self, step, **more)

    monkeypatch.setattr(Training, "update", counted)
    run = fit(training, tmp_path / "late", observers=[lambda record: observed.append(record.step)])
    assert observed == list(range(1, 10))
    behind = [step - 1 - done for step, done in handed]
    assert max(behind) == AHEAD and behind == [0, 1, 2, 2, 0, 1, 2, 2, 0], "evaluated at 4, 8 and 9"
    assert len(queue) == 9
    monkeypatch.setattr(loop, "HostMoment", HostMoment)
    assert lines(run) == lines(fit(Training.build(tiny), tmp_path / "at-once"))
    assert run.summary["status"] == "complete"
    assert all(line["step_seconds"] > 0 for line in run.metrics)


def test_a_stop_tells_everything_first(tiny, tmp_path, queue):
    control = Control()
    training = Training.build(tiny)
    training.watchers.append(lambda step: (control.stop("SIGTERM") if step == 6 else None,
        nullcontext())[1])
    run = fit(training, tmp_path / "run", control=control)
    assert [line["step"] for line in run.metrics] == list(range(1, 8)) and run.summary["steps"] == 7
    assert checkpoint.load_latest(run.checkpoints)[0].step == 7
    whole = fit(Training.build(tiny), tmp_path / "whole")
    assert lines(fit(Training.build(tiny), tmp_path / "run", resume=True)) == lines(whole)


def test_a_failure_tells_what_was_done(tiny, tmp_path, queue):
    def fail(step: int):
        if step == 7:
            raise ZeroDivisionError("at step 8")
        return nullcontext()

    training = Training.build(tiny)
    training.watchers.append(fail)
    with pytest.raises(ZeroDivisionError):
        fit(training, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == list(range(1, 8)) and run.summary["steps"] == 7
    assert "at step 8" in run.summary["error"]


def test_a_device_that_failed_is_not_asked_for_the_rest(tiny, tmp_path, queue, monkeypatch):
    """The first error is the one that is told."""
    def fail(step: int):
        if step == 7:
            monkeypatch.setattr(loop.Arriving, "values",
                                lambda self: (_ for _ in ()).throw(
                                    RuntimeError("CUDA error: sticky")))
            raise RuntimeError("CUDA error: the first")
        return nullcontext()

    training = Training.build(tiny)
    training.watchers.append(fail)
    with pytest.raises(RuntimeError, match="the first"):
        fit(training, tmp_path / "run")
    steps = [line["step"] for line in Run(tmp_path / "run").metrics]
    assert steps == list(range(1, 6)), "two were in the queue"


def test_a_loss_that_is_not_a_number_ends_the_run_and_is_not_saved(tiny, tmp_path, queue):
    def poison(step: int):
        if step == 5:
            with torch.no_grad():
                next(training.model.parameters()).fill_(math.nan)
        return nullcontext()

    training = Training.build(tiny.replace({"checkpoint_every": 4}))
    training.watchers.append(poison)
    with pytest.raises(RunFailedError, match="step 6: loss=nan"):
        fit(training, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert checkpoint.load_latest(run.checkpoints)[0].step == 4 and run.summary["steps"] == 5


def test_a_pause_tells_everything_first(tiny, tmp_path, queue):
    control, observed = Control(), []

    def pause(record):
        observed.append(record.step)

    training = Training.build(tiny)
    training.watchers.append(lambda step: (control.go_on.clear() if step == 6 else None,
        nullcontext())[1])
    thread = threading.Thread(target=fit, args=(training, tmp_path / "run"),
                              kwargs={"control": control, "observers": [pause]})
    thread.start()
    for _ in range(600):
        if observed[-1:] == [7]:
            break
        thread.join(0.05)
    assert observed == list(range(1, 8))
    control.go_on.set()
    thread.join()
    assert observed == list(range(1, 10))


# ---- batches

class Counted(DataPolicy):
    """Says which thread made which batch."""

    def __init__(self):
        self.batches_made: list[tuple[int, str]] = []

    def batch(self, step: int) -> Batch:
        if step == 5:
            raise ValueError("there is no sixth batch")
        self.batches_made.append((step, threading.current_thread().name))
        return Batch(torch.full((2, 3), step), torch.full((2, 3), step + 1),
                     weights=torch.full((2, 3), float(step)))


class Lane(StatePlacement):
    """Where CUDA's pinned memory and stream would be: what went through them, in order."""

    def __init__(self):
        super().__init__()
        self.stored, self.arrived = [], []

    def store(self, t):
        self.stored.append(t)
        return t.clone()

    def prefetch(self, stored, device):
        return lambda: (self.arrived.append(int(stored[0][0, 0])), stored)[1]


def test_batches_are_the_policys_made_ahead_by_one_thread():
    policy, lane = Counted(), Lane()
    ahead_of = Prefetched(policy, torch.device("cpu"), lane)
    # in order, and as two trainings that share the data, or one that resumes, ask
    asked = [0, 1, 2, 2, 1, 2, 3, 0, 4]
    for step in asked:
        got, want = ahead_of.batch(step), Counted().batch(step)
        assert got.present.keys() == want.present.keys()
        assert all(map(torch.equal, got.tensors, want.tensors))
    assert {thread for _, thread in policy.batches_made} == {"lpkit-batches_0"}
    assert len(policy.batches_made) > len(asked), "the next batch is made ahead"
    assert lane.arrived == asked and len(lane.stored) == 3 * len(policy.batches_made)
    # it was made ahead, and failed when it was asked for
    with pytest.raises(ValueError, match="no sixth"):
        ahead_of.batch(5)
    assert torch.equal(ahead_of.batch(3).tokens, Counted().batch(3).tokens)


def test_nothing_is_left_of_it():
    policy = Prefetched(Counted(), torch.device("cpu"), StatePlacement())
    policy.batch(0)
    [thread] = [running for running in threading.enumerate() if running.name == "lpkit-batches_0"
                and running in policy.thread._threads]
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    thread.join(10 * patience())
    assert gone() is None and not thread.is_alive()
