"""Start a training run, hold it, stop it.

    run = lpkit.train(config)            blocks, returns the Run
    handle = lpkit.start(config)         returns at once; a notebook follows it, stops it, and says `run = await handle`

Both write the same run folder. Stopping keeps a checkpoint and the partial Run.
"""

import asyncio
import datetime
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpkit.config import Config
from lpkit.contracts import Observer, StepRecord
from lpkit.runs import Run

if TYPE_CHECKING:
    from lpkit.trainer import Job


def default_folder(name: str = "run") -> Path:
    return Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"


def train(config: Config, *, out: str | Path | None = None, resume: bool = False,
          observers: Sequence[Observer] = ()) -> Run:
    """Train to the end, or to Ctrl-C or SIGTERM, which keep a checkpoint and return the partial Run.

    `out` is the run folder, a new one under runs/ by default. Raises ConfigError for settings that cannot be,
    RunFailedError when the run cannot go on (a loss that is not a number, a full disk).
    """
    from lpkit.trainer import Control, fit

    control, path = Control(), Path(out or default_folder())
    with _signals_stop(control.stop):
        return fit(_job(config, path, resume), path, resume=resume, observers=observers, control=control)


def _job(config: Config, path: Path, resume: bool) -> "Job":
    from lpkit.assembly import assemble
    from lpkit.precision import telemetry

    job = assemble(config, before=Run(path).environment if resume else None)
    every = config.precision.telemetry_every
    return telemetry.attach(job, path, every=every) if every else job


@contextmanager
def _signals_stop(stop: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop after the step at hand; a second Ctrl-C interrupts at once.

    Only the main thread may hear signals; elsewhere the handle's `stop` serves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def heard(number, frame):
        stop(signal.Signals(number).name)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        for number in before:
            signal.signal(number, heard)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Handle:
    """A run in a background thread. Everything here may be called from any thread."""

    def __init__(self, config: Config, *, out: str | Path | None = None, resume: bool = False):
        from lpkit.trainer import Control

        self.config, self.planned_steps = config, config.steps
        self.path = Path(out or default_folder())
        self.title = self.path.name
        self.records: list[StepRecord] = []
        self.error: BaseException | None = None
        self._control = Control()
        self._observers: list[Observer] = [self.records.append]
        self._when_done: list[Callable[[], None]] = []
        self._run: Run | None = None
        self._lock = threading.Lock()
        self._finished = threading.Event()      # the run has ended
        self._told = threading.Event()          # and everybody who asked knows: a figure has its last point
        self._thread = threading.Thread(target=self._work, args=(resume,), name=f"train {self.title}", daemon=True)
        self._thread.start()

    def _work(self, resume: bool) -> None:
        from lpkit.trainer import fit

        try:
            self._run = fit(_job(self.config, self.path, resume), self.path, resume=resume, observers=[self._tell],
                            control=self._control)
        except BaseException as error:   # kept for `result`, which raises it where somebody is looking
            self.error = error
        with self._lock:
            self._finished.set()
            callbacks = list(self._when_done)
        for callback in callbacks:
            callback()
        self._told.set()

    def _tell(self, record: StepRecord) -> None:
        for observe in list(self._observers):
            observe(record)

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def paused(self) -> bool:
        return not self._control.go_on.is_set()

    def subscribe(self, observer: Observer) -> None:
        """Call `observer(record)` after every step, on the training thread."""
        self._observers.append(observer)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call once when the run has ended; at once when it already has."""
        with self._lock:
            if not self.done:
                self._when_done.append(callback)
                return
        callback()

    def stop(self) -> None:
        """After the step at hand; keeps a checkpoint."""
        self._control.stop()

    def pause(self) -> None:
        self._control.go_on.clear()

    def resume(self) -> None:
        self._control.go_on.set()

    def __await__(self) -> Generator[Any, None, Run]:
        """`run = await handle`: as `result`, but a notebook's buttons keep working meanwhile."""
        try:
            while not self._told.is_set():
                yield from asyncio.sleep(0.05).__await__()
        except (KeyboardInterrupt, asyncio.CancelledError):   # the notebook's interrupt button
            self.stop()
        return self.result()

    def result(self) -> Run:
        """Wait for the end and return the Run. Interrupting the wait stops the training and returns the partial Run."""
        try:
            self._told.wait()
        except KeyboardInterrupt:
            self.stop()
            self._told.wait()
        if self.error is not None:
            raise self.error
        return self._run


def start(config: Config, *, out: str | Path | None = None, resume: bool = False) -> Handle:
    """Begin training in the background and return its Handle."""
    return Handle(config, out=out, resume=resume)
