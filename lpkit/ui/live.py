"""A training run as it happens: the loss, the gradient norm, the speed, and buttons to stop and
pause it.

`training_figure` is the pure function; `LiveRun` follows a handle with it. Losses are in nats per
token.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

import ipywidgets as widgets

from lpkit.contracts import StepRecord
from lpkit.predict.units import duration, quantity
from lpkit.tables import FAINT, FONT, INK
from lpkit.ui.draw import axis, figure, note, rule, scatter
from lpkit.ui.figure import Figure, Stored
from lpkit.ui.style import COLOURS
from lpkit.ui.throttle import Throttle


class RunHandle(Protocol):
    """What `LiveRun` needs of a run that is going on; all of it may be called from any thread."""

    records: list[StepRecord]
    title: str
    planned_steps: int
    done: bool
    error: BaseException | None

    def subscribe(self, observer: Callable[[StepRecord], None]) -> None: ...
    def on_done(self, callback: Callable[[], None]) -> None: ...
    def stop(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


def tokens_per_second(record: StepRecord) -> float:
    """`tokens` is the total so far, and every step has as many."""
    return record.tokens / record.step / record.step_seconds


def training_figure(records: Sequence[StepRecord], *, title: str = "",
                    planned_steps: int | None = None,
                    levels: Mapping[str, float] | None = None) -> dict:
    """The plotly spec of a run: loss and validation loss; gradient norm and speed beside them, over
    the same steps.

    `levels` are losses to compare with, by name: dotted lines.
    """
    steps = [record.step for record in records]
    evaluated = [record for record in records if record.val_loss is not None]
    data = [
        scatter(steps, [record.loss for record in records], "training loss", COLOURS[0],
                line={"width": 1.5}, hover="step %{x}: %{y:.4f}<extra></extra>"),
        scatter([r.step for r in evaluated], [r.val_loss for r in evaluated], "validation loss",
                COLOURS[1], mode="lines+markers", line={"width": 2.5}, marker={"size": 8},
                cliponaxis=False, hover="step %{x}: %{y:.4f} on held-out text<extra></extra>"),
        scatter(steps, [record.grad_norm for record in records], "gradient norm", COLOURS[2],
                line={"width": 1.2}, xaxis="x2", yaxis="y2", showlegend=False),
        scatter(steps, [tokens_per_second(record) for record in records], "tokens/s", COLOURS[4],
                line={"width": 1.2}, xaxis="x3", yaxis="y3", showlegend=False),
    ]
    levels = levels or {}
    reach = {"range": [0, max([planned_steps or 1, *steps[-1:]])], "autorange": False}
    right = {"domain": [0.7, 1], "matches": "x"}
    return figure(
        data, escape(title), height=380, hovermode="closest", uirevision="run",
        shapes=[rule(y=y, xref="x domain") for y in levels.values()],
        annotations=[note(escape(name), 1, y, "right bottom", xref="x domain",
                          font={"color": FAINT})
                     for name, y in levels.items()],
        x=axis("step", domain=[0, 0.6], **reach), y=axis("loss (nats per token)"),
        xaxis2={**right, "anchor": "y2", "showticklabels": False},
        yaxis2=axis("gradient norm", domain=[0.56, 1], anchor="x2", rangemode="tozero"),
        xaxis3=axis("step", **right, anchor="y3"),
        yaxis3=axis("tokens/s", domain=[0, 0.44], anchor="x3", rangemode="tozero"))


def progress(records: Sequence[StepRecord], planned_steps: int) -> str:
    """Where a run is, in words: 'step 20 of 300 · loss 3.121 · 12.3k tokens/s · 14 s left'."""
    if not records:
        return f"starting: {planned_steps} steps planned"
    last, recent = records[-1], records[-20:]
    # the first step also compiles
    seconds = sorted(record.step_seconds for record in recent)[len(recent) // 2]
    speed = last.tokens / last.step / seconds
    val = next((record.val_loss for record in reversed(records) if record.val_loss is not None),
               None)
    left = (planned_steps - last.step) * seconds
    parts = [f"step {last.step} of {planned_steps}", f"loss {last.loss:.3f}"]
    parts += [f"validation {val:.3f}"] if val is not None else []
    parts += [quantity(speed, "tokens/s")]
    return " · ".join(parts + ([f"about {duration(round(left))} left"] if left > 0 else []))


class LiveRun(Stored, widgets.VBox):
    """A live figure of a run, with Stop and Pause. Stop keeps a checkpoint and the partial run.

    The buttons work while the kernel is idle or awaits (`run = await handle`); a cell that blocks
    hears nothing.
    """

    def __init__(self, handle: RunHandle, *, max_hz: float = 8.0,
                 throttle: Callable[..., Throttle] = Throttle):
        self.handle = handle
        self._stopping = self._paused = False
        self.status = widgets.HTML(layout=widgets.Layout(flex="1 1 auto", min_width="0"))
        self.pause_button = widgets.Button(description="Pause", icon="pause",
                                           layout=widgets.Layout(width="104px"))
        self.stop_button = widgets.Button(description="Stop", icon="stop",
                                          layout=widgets.Layout(width="104px"),
                                          tooltip="stop after this step and keep a checkpoint")
        # throttled here, so that a spec that is not shown is not made
        self.figure = Figure(self._spec(), max_hz=60)
        bar = widgets.HBox([self.status, self.pause_button, self.stop_button],
                           layout=widgets.Layout(
            width="100%", align_items="center", padding="4px 12px"))
        super().__init__([bar, self.figure], layout=widgets.Layout(width="100%", overflow="hidden"))
        self.pause_button.on_click(self._pause)
        self.stop_button.on_click(self._stop)
        self._show()
        self._changed = throttle(self._show, max_hz=max_hz)
        handle.subscribe(self._changed)
        handle.on_done(self._done)

    def _spec(self) -> dict:
        return training_figure(list(self.handle.records), title=self.handle.title,
                               planned_steps=self.handle.planned_steps)

    def _show(self, _record: Any = None) -> None:
        self.figure.update(self._spec())
        self.figure.flush()
        self._say()

    @property
    def _reached_all(self) -> bool:
        """Whether what has ended has done all that was planned."""
        records = self.handle.records
        return bool(records) and records[-1].step >= self.handle.planned_steps

    def _words(self, records: Sequence[StepRecord], planned: int) -> str:
        return progress(records, planned)

    def _say(self) -> None:
        records, planned = list(self.handle.records), self.handle.planned_steps
        if self.handle.done:
            state = ("failed" if self.handle.error is not None else "done" if self._reached_all
                     else "stopped")
        else:
            state = "stopping" if self._stopping else "paused" if self._paused else "running"
        words = self._words(records, planned)
        words = words if state == "running" else words.split(" · about")[0]
        if state == "failed":
            words = str(self.handle.error)
        colour = {"failed": COLOURS[2], "paused": "#8a6500", "stopping": "#8a6500"}.get(state, INK)
        style = (f"font:13px {FONT};color:{FAINT};line-height:1.5;overflow:hidden;"
                 f"text-overflow:ellipsis")
        self.status.value = (f"<div style='{style}'><b style='color:{colour}'>{state}</b>&ensp;"
                             f"{escape(words)}</div>")

    def _stop(self, _button=None) -> None:
        self._stopping = True
        self.handle.stop()
        if self._paused:             # a paused run must wake up to end
            self.handle.resume()
        self.stop_button.disabled = self.pause_button.disabled = True
        self._say()

    def _pause(self, _button=None) -> None:
        self._paused = not self._paused
        (self.handle.pause if self._paused else self.handle.resume)()
        self.pause_button.description, self.pause_button.icon = (
            ("Resume", "play") if self._paused else ("Pause", "pause"))
        self._say()

    def _done(self) -> None:
        self._changed.flush()
        self._show()
        self.stop_button.disabled = self.pause_button.disabled = True
        self.refresh_output()
