"""Train on several processes of this machine, from a notebook or a shell.

    handle = lpkit.launch(config, processes=2)      as lpkit.start: await handle
    handle.ranks                                    what each rank said last

The processes are those of `lpkit.parallel.processes`: a kernel that holds a GPU is none of them.
They write the run folder, and this process writes nothing.
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
DEAF_SECONDS = 0.5      # ranks that take a step hear within a micro-batch that they are to stop


class Launched(OneRun):
    """A run on several processes.

    ranks: by rank, the newest of what each said of itself: its process id `pid`, step,
           step_seconds, loss, peak_bytes, communication_share (of the step's time, in waits for
           messages; None on GPUs, where streams wait)

    `watched`: how, as of Processes.
    """

    def __init__(self, config: Config, *, out: str | Path | None, resume: bool,
                 observers: Sequence[Observer], **watched: Any):
        super().__init__(config, out=out, resume=resume, observers=observers)
        refuse(config, self.path, resume)
        self._before = self._written()
        self.ranks: dict[int, dict[str, Any]] = {}
        self._stepped = threading.Event()       # or ended without a step
        self.on_done(self._stepped.set)
        told = {"config": config.to_dict(), "out": str(self.path), "resume": resume}
        self._processes = Processes(TRAIN, told, heard=self._hear, **watched)

    def _do(self) -> Run:
        with self._processes:
            self._processes.wait()
        return Run(self.path)

    def _hear(self, rank: int, said: dict[str, Any]) -> None:
        """A StepRecord, under "record"; or what a rank says of itself."""
        if record := said.pop("record", None):
            self._stepped.set()
            self._observers(StepRecord(**record))
        if said:
            self.ranks[rank] = said

    def _written(self) -> int:
        """Returns how long the run's metrics are, in bytes."""
        metrics = self.path / METRICS
        return metrics.stat().st_size if metrics.exists() else 0

    def pause(self) -> None:
        super().pause()
        self._processes.pause()

    def resume(self) -> None:
        super().resume()
        self._processes.resume()

    def stop(self, by: str = "stop") -> None:
        """Stops as Background does."""
        self._control.stop(by)
        self._processes.stop(by)

    def kill(self) -> None:
        """Ends it at once, without a checkpoint."""
        self._processes.kill()

    def result(self) -> Run:
        """Wait for the end. A first Ctrl-C (SIGTERM, SIGHUP) stops, and a second kills. Ranks that
        have not written a step and do not hear it, because they are still importing, say, have
        nothing to keep: a first one kills them."""
        try:
            try:
                self._stepped.wait()
                with signals_stop(self.stop):
                    self._told.wait()
            except KeyboardInterrupt as heard:
                if self._control.stopped_by:        # a second one
                    raise
                self.stop(signal.Signals(*heard.args or [signal.SIGINT]).name)
                # steps may be written before one is told
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
    """Begin training on `processes` of this machine, in the background, and return the handle.

    A config for one device becomes `processes` replicas (parallel.data). A rank without a sign of
    life for `timeout_seconds`, or ranks of which none gets further for `progress_seconds`, are
    named with their stacks, and all is ended. Who launches again and again gives them all one
    `parent`, and only the first waits for what is imported.
    Raises ConfigError for a layout of another number of devices, and for more processes than there
    are GPUs, or cores.
    """
    return Launched(spread(config, processes), out=out, resume=resume, observers=observers,
                    world=processes, timeout_seconds=timeout_seconds,
                    progress_seconds=progress_seconds, parent=parent).begin()


def spread(config: Config, processes: int) -> Config:
    """`config` for so many processes here. Raises ConfigError."""
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
