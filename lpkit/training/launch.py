"""Train on several processes of this machine, from a notebook or a shell.

    handle = lpkit.launch(config, processes=2)      `run = await handle` waits for the end
    handle.ranks                                    the last report of each rank

All ranks are new processes (`lpkit.parallel.processes`). The calling process is not a rank, because
it may be a notebook's kernel that holds a GPU. Only rank 0 writes the run folder.
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
# Time that `result` waits for a stop before the first step is reported: see there.
DEAF_SECONDS = 0.5


class Launched(OneRun):
    """A run on several processes.

    ranks:   by number of a rank, its newest report: pid (its process id), step, step_seconds, loss,
             peak_bytes, communication_share (seconds that the host waited for messages, divided by
             step_seconds; None on GPUs, where the host does not wait)
    watched: the arguments of Processes after `heard`, for example timeout_seconds and parent
    """

    def __init__(self, config: Config, *, out: str | Path | None, resume: bool,
                 observers: Sequence[Observer], **watched: Any):
        super().__init__(config, out=out, resume=resume, observers=observers)
        refuse(config, self.path, resume)
        self._before = self._written()
        self.ranks: dict[int, dict[str, Any]] = {}
        # set by the first report of a step, or by the end of the run
        self._stepped = threading.Event()
        self.on_done(self._stepped.set)
        argument = {"config": config.to_dict(), "out": str(self.path), "resume": resume}
        self._processes = Processes(TRAIN, argument, heard=self._hear, **watched)

    def _do(self) -> Run:
        with self._processes:
            self._processes.wait()
        return Run(self.path)

    def _hear(self, rank: int, report: dict[str, Any]) -> None:
        """Take a report of a rank: what `ranks` has, and from rank 0 also a StepRecord "record".
        """
        if record := report.pop("record", None):
            self._stepped.set()
            self._observers(StepRecord(**record))
        if report:
            self.ranks[rank] = report

    def _written(self) -> int:
        """Return the bytes of the run's metrics file, which grows with every step."""
        metrics = self.path / METRICS
        return metrics.stat().st_size if metrics.exists() else 0

    def pause(self) -> None:
        super().pause()
        self._processes.pause()

    def resume(self) -> None:
        super().resume()
        self._processes.resume()

    def stop(self, by: str = "stop") -> None:
        """As `Background.stop`. `by`: "stop", or the name of the signal that requested it."""
        self._control.stop(by)
        self._processes.stop(by)

    def kill(self) -> None:
        """End the run at once, without a checkpoint."""
        self._processes.kill()

    def result(self) -> Run:
        """Wait for the end, and return the Run. The first Ctrl-C (SIGTERM, SIGHUP) stops the run,
        and a second Ctrl-C kills it. If the run has not written a step, the ranks may still be
        importing, and would not notice a stop for seconds. They have nothing to save, so in this
        case the first Ctrl-C kills the run."""
        try:
            try:
                self._stepped.wait()
                with signals_stop(self.stop):
                    self._callbacks_done.wait()
            except KeyboardInterrupt as heard:
                if self._control.stopped_by:        # this is the second Ctrl-C
                    raise
                self.stop(signal.Signals(*heard.args or [signal.SIGINT]).name)
                # A rank in a step stops within a micro-batch. If the run has not ended after
                # DEAF_SECONDS and its metrics have not grown, no rank is in a step: kill the run.
                if (not self._callbacks_done.wait(DEAF_SECONDS)
                        and self._written() == self._before):
                    raise
                self._callbacks_done.wait()
        except BaseException:
            self.kill()
            self._callbacks_done.wait()
            raise
        return self._outcome.result()


@checked
def launch(config: Config, *, processes: Count = 2, out: Folder | None = None,
           resume: bool = False, observers: Sequence[Observer] = (),
           timeout_seconds: Positive = TIMEOUT_SECONDS,
           progress_seconds: Positive = PROGRESS_SECONDS,
           parent: WarmParent | None = None) -> Launched:
    """Begin training on `processes` processes of this machine, in the background, and return the
    handle at once.

    config:           a config for one device becomes `processes` replicas (parallel.data)
    timeout_seconds:  if a rank's process gives no sign of life for this long, or
    progress_seconds: if no rank progresses for this long, the run ends with an error that has the
                      numbers and the stacks of the hung ranks
    parent:           if you launch often, pass the same WarmParent to every launch: then only the
                      first launch waits for imports

    Raises ConfigError if the layout has another number of devices, or if the machine has fewer GPUs
    (without GPUs: cores) than `processes`.
    """
    return Launched(spread(config, processes), out=out, resume=resume, observers=observers,
                    world=processes, timeout_seconds=timeout_seconds,
                    progress_seconds=progress_seconds, parent=parent).begin()


def spread(config: Config, processes: int) -> Config:
    """Return `config` with a layout of `processes` devices. Raises ConfigError if this machine does
    not have enough GPUs or cores, or if the layout cannot be trained."""
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
