"""`train`: what each rank of a launched run does. It trains, and reports its progress to the
process that launched it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lpkit.config import Config
from lpkit.contracts import StepRecord
from lpkit.parallel.meeting import joined
from lpkit.parallel.processes import MEETING, Place
from lpkit.techniques import outside
from lpkit.training.control import Control
from lpkit.training.formulas import Account, raise_out_of_memory_as_run_failure
from lpkit.training.loop import fit
from lpkit.training.runs import Observers
from lpkit.training.trainer import built


class Asked(Control):
    """The requests that the process which launched the ranks sends to this rank's loop."""

    def __init__(self, place: Place):
        super().__init__()
        self.place = place

    def asked(self) -> int:
        word = self.place.asked()
        if word == "stop":
            self.stop(self.place.asked_by)
        elif word == "pause":
            self.go_on.clear()
        else:
            self.go_on.set()
        return super().asked()


def train(place: Place, job: dict[str, Any]) -> None:
    """Train as one rank. `job` has `config` (as a dict), the run folder `out`, and `resume`."""
    # import the same modules of rows as the process that launched the ranks
    outside.load(job["config"]["imports"])
    config = Config.from_dict(job["config"])
    place.at(0, MEETING)
    with raise_out_of_memory_as_run_failure(config, "this rank", place.local_world), joined(
            config, local_rank=place.local_rank, **place.among) as ranks:
        ranks.waits.tell = place.waits
        place.at(0, "building")
        training = built(config, Path(job["out"]), job["resume"], ranks)
        training.watchers.append(lambda step: _noted(place, step + 1))
        if training.device.type == "cpu":       # on a GPU the host does not wait for messages
            training.step_metrics["waited_seconds"] = lambda: ranks.waits.seconds

        def tell(record: StepRecord) -> None:
            waited = record.extra.get("waited_seconds")
            own = {"rank": place.rank, "pid": os.getpid(), "step": record.step,
                   "step_seconds": record.step_seconds, "loss": record.loss,
                   "peak_bytes": record.peak_bytes,
                   "communication_share": waited and waited / record.step_seconds}
            place.tell(own | ({"record": record.to_dict()} if ranks.first else {}))

        fit(training, Path(job["out"]), resume=job["resume"], observers=Observers([tell]),
            control=Asked(place), account=Account(training))


@contextmanager
def _noted(place: Place, step: int) -> Iterator[None]:
    """A watcher that records this rank's step and phase for the supervisor (`Place.at`)."""
    place.at(step, "forward and backward")
    yield
    place.at(step, "update")
