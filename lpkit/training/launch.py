"""Trains on several processes of this machine, started from a notebook or a shell.

    handle = lpkit.launch(config, processes=2)      await it, as the handle of lpkit.start
    handle.ranks                                    the last report of each rank

The ranks are new processes (`lpkit.parallel.processes`). The calling process, which may be a
notebook kernel that holds a GPU, is none of them. Only the ranks write the run folder.
"""

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpkit.config import Config
from lpkit.contracts import Observer, StepRecord
from lpkit.errors import ConfigError
from lpkit.machine_facts import cores, gpus
from lpkit.parallel.processes import PROGRESS_SECONDS, TIMEOUT_SECONDS, Processes, WarmParent
from lpkit.techniques import layouts
from lpkit.training.background import OneRun, refuse
from lpkit.training.control import signals_stop
from lpkit.training.runs import METRICS, Run
from lpkit.values import Count, Folder, Positive, checked

TRAIN = "lpkit.training.rank:train"
# ranks in a step notice a stop within a micro-batch; after this time they are not in a step
DEAF_SECONDS = 0.5


class Launched(OneRun):
    """A run on several processes.

    ranks: the newest report of each rank: its process id `pid`, step, step_seconds, loss,
           peak_bytes, communication_share (the share of the step's time in waits for messages;
           None on GPUs, where streams wait)

    `watched`: the limits and the parent, as for Processes.
    """

    def __init__(self, config: Config, *, out: str | Path | None, resume: bool,
                 observers: Sequence[Observer], **watched: Any):
        super().__init__(config, out=out, resume=resume, observers=observers)
        refuse(config, self.path, resume)
        self._before = self._written()
        self.ranks: dict[int, dict[str, Any]] = {}
        # set by the first step, or by the end of a run without a step
        self._stepped = threading.Event()
        self.on_done(self._stepped.set)
        argument = {"config": config.to_dict(), "out": str(self.path), "resume": resume}
        self._processes = Processes(TRAIN, argument, heard=self._hear, **watched)

    def _do(self) -> Run:
        with self._processes:
            self._processes.wait()
        return Run(self.path)

    def _hear(self, rank: int, report: dict[str, Any]) -> None:
        """Takes a StepRecord, under "record", and a rank's report of itself."""
        if record := report.pop("record", None):
            self._stepped.set()
            self._observers(StepRecord(**record))
        if report:
            self.ranks[rank] = report

    def _written(self) -> int:
        """Returns the size of the run's metrics, in bytes."""
        metrics = self.path / METRICS
        return metrics.stat().st_size if metrics.exists() else 0

    def pause(self) -> None:
        super().pause()
        self._processes.pause()

    def resume(self) -> None:
        super().resume()
        self._processes.resume()

    def stop(self, by: str = "stop") -> None:
        """Stops as `Background.stop` does."""
        self._control.stop(by)
        self._processes.stop(by)

    def kill(self) -> None:
        """Ends the run at once, without a checkpoint."""
        self._processes.kill()

    def result(self) -> Run:
        """Waits for the end. A first Ctrl-C (SIGTERM, SIGHUP) stops the run, and a second one kills
        it. Ranks that are still importing cannot hear a stop and have nothing to save, so the first
        one kills a run that has not written a step."""
        try:
            try:
                self._stepped.wait()
                with signals_stop(self.stop):
                    self._told.wait()
            except KeyboardInterrupt as heard:
                if self._control.stopped_by:        # this is a second one
                    raise
                self.stop(signal.Signals(*heard.args or [signal.SIGINT]).name)
                # steps may have been written before the first report arrives
                if not self._told.wait(DEAF_SECONDS) and self._written() == self._before:
                    raise
                self._told.wait()
        except BaseException:
            self.kill()
            self._told.wait()
            raise
        return self._outcome.result()


@checked
def launch(config: Config, *, processes: Count = 2, out: Folder | None = None,
           resume: bool = False, observers: Sequence[Observer] = (),
           timeout_seconds: Positive = TIMEOUT_SECONDS,
           progress_seconds: Positive = PROGRESS_SECONDS,
           parent: WarmParent | None = None) -> Launched:
    """Begins training on `processes` processes of this machine, in the background, and returns the
    handle.

    A config for one device becomes `processes` replicas (parallel.data). If a rank gives no sign of
    life for `timeout_seconds`, or no rank progresses for `progress_seconds`, the hung ranks are
    named with their stacks, and all ranks are ended. If you launch often, give every launch the
    same `parent`: only the first launch then waits for imports.
    Raises ConfigError for a layout of another number of devices, and for more processes than there
    are GPUs, or cores.
    """
    return Launched(spread(config, processes), out=out, resume=resume, observers=observers,
                    world=processes, timeout_seconds=timeout_seconds,
                    progress_seconds=progress_seconds, parent=parent).begin()


def spread(config: Config, processes: int) -> Config:
    """Returns `config` for `processes` processes on this machine. Raises ConfigError."""
    layouts.refuse_untrainable(config)
    here, what = (gpus(), "GPU") if config.system.device != "cpu" and gpus() else (cores(), "core")
    if processes > here:
        ways = ({"parallel.data": n, "parallel.shard": 1} for n in range(here, 0, -1))
        way = next(way for way in ways if layouts.trains(config, way))
        words = " ".join(f"{key}={size}" for key, size in way.items())
        also = f" {words}" if config.parallel.devices > 1 else ""
        raise ConfigError(f"processes={processes} need as many {what}s, and there "
                          f"{'is' if here == 1 else 'are'} {here}; use "
                          f"processes={way['parallel.data']}{also}")
    if config.parallel.devices == 1:
        config = config.replace({"parallel.data": processes})
    layouts.check(config, config.parallel, processes)
    layouts.refuse_untrainable(config)
    return config
