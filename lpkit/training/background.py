"""Starts training runs, waits for them and stops them.

    run = lpkit.train(config)            blocks, and returns the Run
    handle = lpkit.start(config)         returns at once. A notebook can follow the run, stop it,
                                         and wait for it with `run = await handle`
    series = start_each({"a": config})   several runs, one after the other: `runs = await series`

All of them write the same run folder. Stopping saves a checkpoint and returns the partial Run.
"""

import asyncio
import datetime
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from lpkit.config import Config
from lpkit.contracts import Observer, StepRecord
from lpkit.errors import ConfigError
from lpkit.files import one_name, own_folder
from lpkit.parallel.processes import ranks_from_environment
from lpkit.training.control import Control
from lpkit.training.runs import Observers, Run
from lpkit.values import Folder, checked


def default_folder(name: str = "run") -> Path:
    return Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"


@checked
def train(config: Config, *, out: Folder | None = None, resume: bool = False,
          observers: Sequence[Observer] = (), control: Control | None = None) -> Run:
    """Train until the last step, and return the Run. After a signal (Ctrl-C, SIGTERM, SIGHUP), save
    a checkpoint and return the partial Run.

    out:       the run folder; by default a new folder under runs/
    resume:    continue the run in `out`. `config.steps` may be larger than before, to train longer
    observers: each is called with the StepRecord of every step
    control:   an observer can use it to stop the run

    Raises ConfigError for settings that do not go together.
    Raises RunFailedError if the run cannot continue (a loss that is not a number, a full disk).
    """
    return _fit(config, Path(out or default_folder()), resume, Observers(observers),
                control or Control())


def _fit(config: Config, path: Path, resume: bool, observers: Observers, control: Control) -> Run:
    # With several ranks, rank 0 may have written to the folder already: `loop.fit` checks it there.
    if ranks_from_environment(config)["world"] == 1:
        refuse(config, path, resume)
    from lpkit.training.trainer import train_here

    with _let_go():
        return train_here(config, path, resume, observers, control)


def refuse(config: Config, path: Path, resume: bool) -> None:
    """Raise ConfigError if the run folder or the text of `config` cannot be used. This is called
    before torch is imported, so that such an error takes no seconds."""
    from lpkit.datasets import prepared, sources  # NumPy, and every command imports this module

    Run.at(path).refuse_another(config, resume=resume)
    if not prepared.is_prepared(config.data.source):
        sources.find(config.data.source)


@contextmanager
def _let_go() -> Iterator[None]:
    """If an error leaves this block, clear the local variables in its traceback; the lines of the
    traceback stay. Otherwise an object that keeps the error (a handle, `sys.last_exc` in a
    notebook) would also keep the model and its tensors in memory."""
    try:
        yield
    except BaseException as error:
        below: BaseException | None = error
        while below is not None:
            traceback.clear_frames(below.__traceback__)
            below = below.__cause__ or below.__context__
        raise


class Background:
    """Work in a background thread. Any thread may wait for the work, pause it and stop it. A
    subclass has the method `_do`."""

    def __init__(self, name: str, control: Control | None = None):
        self._control = control or Control()
        self._outcome: Future = Future()
        # Set after `_outcome` has called its callbacks, which for example draw the last point of a
        # figure. So a caller that waits for this event sees the figure complete.
        self._callbacks_done = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def begin(self) -> Self:
        """Start the work, and return this object."""
        self._thread.start()
        return self

    def _do(self) -> Any:
        """Do the work and return its result. Called in the background thread."""
        raise NotImplementedError

    def _work(self) -> None:
        try:
            self._outcome.set_result(self._do())
        except BaseException as error:      # `result` raises it in the thread that waits
            self._outcome.set_exception(error)
        self._callbacks_done.set()

    @property
    def done(self) -> bool:
        return self._outcome.done()

    @property
    def error(self) -> BaseException | None:
        return self._outcome.exception() if self.done else None

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the work has ended, or now if it has ended already."""
        self._outcome.add_done_callback(lambda outcome: callback())

    @property
    def paused(self) -> bool:
        return not self._control.go_on.is_set()

    def pause(self) -> None:
        self._control.go_on.clear()

    def resume(self) -> None:
        self._control.go_on.set()

    def stop(self) -> None:
        """Request a stop: the run gives up the current step at its next micro-batch (or an
        evaluation at its next batch), and saves a checkpoint. Does not wait."""
        self._control.stop()

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the end and return the result (`run = await handle`). Unlike `result`, it lets
        the event loop run, so that the buttons of a notebook work."""
        try:
            while not self._callbacks_done.is_set():
                yield from asyncio.sleep(0.05).__await__()
        except (KeyboardInterrupt, asyncio.CancelledError):   # the notebook's interrupt button
            self.stop()
        return self.result()

    def result(self) -> Any:
        """Wait for the end and return the result, or raise the error of the work. Ctrl-C stops the
        work, and the result is then partial."""
        try:
            self._callbacks_done.wait()
        except KeyboardInterrupt:
            self.stop()
            self._callbacks_done.wait()
        return self._outcome.result()


class OneRun(Background):
    """A run in the background. It starts when `begin` is called. Its result is the Run."""

    def __init__(self, config: Config, *, out: str | Path | None = None, resume: bool = False,
                 observers: Iterable[Observer] = (), control: Control | None = None):
        self.config, self.planned_steps, self._resume = config, config.steps, resume
        self.path = Path(out or default_folder())
        self.title = self.path.name
        self.records: list[StepRecord] = []
        self._observers = Observers([self.records.append, *observers])
        super().__init__(f"train {self.title}", control)

    def subscribe(self, observer: Observer) -> None:
        """Call `observer(record)` after every step, in the thread of the run. If an observer raises
        an error, it is not called again."""
        self._observers.add(observer)


class Handle(OneRun):
    """A run in a background thread."""

    def _do(self) -> Run:
        return _fit(self.config, self.path, self._resume, self._observers, self._control)


class Series(Background):
    """Named runs, one after the other, in folders of those names. A figure shows the current run.

    The result is {name: Run} of all runs that have begun. If a run fails, its Run records the
    error, and the next run begins. Invalid settings end the series with their error. `stop` ends
    the current run, and no other run begins.
    """

    def __init__(self, configs: Mapping[str, Config], *, out: str | Path | None = None):
        if not configs:
            raise ConfigError("a series needs at least one config to train")
        self.configs = {one_name(name): config for name, config in configs.items()}
        self.path = Path(out or default_folder("series"))
        self.handles: dict[str, Handle] = {}        # handles of the runs that have begun
        # observers of every run, also of runs that have not begun
        self._subscribed: list[Observer] = []
        self._lock = threading.Lock()
        super().__init__(f"train {self.path.name}")

    def _do(self) -> dict[str, Run]:
        for name, config in self.configs.items():
            if self._control.stopped_by:
                break
            folder = own_folder(self.path / name)       # a link could lead outside `out`
            with self._lock:
                self.handles[name] = handle = Handle(
                    config, out=folder, observers=self._subscribed, control=self._control)
            try:
                # Begin only after the handle is in `handles`, from which `title` and `records`
                # read: an observer may ask for them at the first step.
                handle.begin().result()
            except Exception:
                # If the status is "failed", the Run has recorded the error: go on with the next.
                if Run.at(handle.path).summary.get("status") != "failed":
                    raise
        return {name: Run.at(handle.path) for name, handle in self.handles.items()}

    def subscribe(self, observer: Observer) -> None:
        with self._lock:
            self._subscribed.append(observer)
            for handle in self.handles.values():
                handle.subscribe(observer)

    @property
    def title(self) -> str:
        return list(self.handles)[-1] if self.handles else next(iter(self.configs))

    @property
    def records(self) -> list[StepRecord]:
        return self.handles[self.title].records if self.handles else []

    @property
    def planned_steps(self) -> int:
        return self.configs[self.title].steps


@checked
def start(config: Config, *, out: Folder | None = None, resume: bool = False) -> Handle:
    """Begin training in the background, and return the Handle at once."""
    return Handle(config, out=out, resume=resume).begin()


@checked
def start_each(configs: Mapping[str, Config], *, out: Folder | None = None) -> Series:
    """Begin to train all of `configs`, one after the other, in the background. Return the Series at
    once. The run folder of a config is `out`/name.

    Raises ConfigError if `configs` is empty, or if a name cannot be the name of a folder.
    """
    return Series(configs, out=out).begin()
