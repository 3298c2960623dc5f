"""A training run as it happens: the loss, the gradient norm, the speed, and buttons to stop and
pause it.

`training_figure` is the pure function; `LiveRun` follows a handle with it. Losses are in nats per
token.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from lpkit.contracts import StepRecord
from lpkit.predict.units import duration, quantity
from lpkit.tables import FAINT, FONT, INK
from lpkit.ui.draw import axis, figure, note, rule, scatter
from lpkit.ui.figure import Figure, Stored
from lpkit.ui.style import COLOURS
from lpkit.ui.throttle import Throttle

WAITING = "#8a6500"


def training_figure(records: Sequence[StepRecord], *, title: str = "",
                    planned_steps: int | None = None,
                    levels: Mapping[str, float] | None = None) -> dict:
    """The plotly spec of a run: loss and validation loss; gradient norm and speed beside them, over
    the same steps.

    `levels` are losses to compare with, by name: dotted lines.
    """
    levels = levels or {}
    steps = [record.step for record in records]
    evaluated = [record for record in records if record.val_loss is not None]
    # `tokens` is the total so far, and every step has as many
    speeds = [record.tokens / record.step / record.step_seconds for record in records]
    data = [
        scatter(steps, [record.loss for record in records], "training loss", COLOURS[0],
                line={"width": 1.5}, hover="step %{x}: %{y:.4f}<extra></extra>"),
        scatter([record.step for record in evaluated], [record.val_loss for record in evaluated],
                "validation loss", COLOURS[1], mode="lines+markers", line={"width": 2.5},
                marker={"size": 8}, cliponaxis=False,
                hover="step %{x}: %{y:.4f} on held-out text<extra></extra>"),
        scatter(steps, [record.grad_norm for record in records], "gradient norm", COLOURS[2],
                line={"width": 1.2}, xaxis="x2", yaxis="y2", showlegend=False),
        scatter(steps, speeds, "tokens/s", COLOURS[4],
                line={"width": 1.2}, xaxis="x3", yaxis="y3", showlegend=False),
    ]
    reach = {"range": [0, max([planned_steps or 1, *steps[-1:]])], "autorange": False}
    right = {"domain": [0.7, 1], "matches": "x"}
    return figure(
        data, title, height=380, hovermode="closest", uirevision="run",
        shapes=[rule(y=y, xref="x domain") for y in levels.values()],
        annotations=[note(escape(name), 1, y, "right bottom", xref="x domain",
                          font={"color": FAINT}) for name, y in levels.items()],
        xaxis=axis("step", domain=[0, 0.6], **reach), yaxis=axis("loss (nats per token)"),
        xaxis2={**right, "anchor": "y2", "showticklabels": False},
        yaxis2=axis("gradient norm", domain=[0.56, 1], anchor="x2", rangemode="tozero"),
        xaxis3=axis("step", **right, anchor="y3"),
        yaxis3=axis("tokens/s", domain=[0, 0.44], anchor="x3", rangemode="tozero"))


def progress(records: Sequence[StepRecord], planned_steps: int) -> str:
    """Where a run is, in words: 'step 20 of 300 · loss 3.121 · 12.3k tokens/s · about 14 s
    left'."""
    if not records:
        return f"starting: {planned_steps} steps planned"
    last = records[-1]
    # the first step also compiles
    recent = sorted(record.step_seconds for record in records[-20:])
    seconds = recent[len(recent) // 2]
    parts = [f"step {last.step} of {planned_steps}", f"loss {last.loss:.3f}"]
    validations = [record.val_loss for record in records if record.val_loss is not None]
    if validations:
        parts.append(f"validation {validations[-1]:.3f}")
    parts.append(quantity(last.tokens / last.step / seconds, "tokens/s"))
    if last.step < planned_steps:
        left = round((planned_steps - last.step) * seconds)
        parts.append(f"about {duration(left)} left")
    return " · ".join(parts)


class LiveRun(Stored, widgets.VBox):
    """A live figure of the run of a `handle` that `lpkit.start` returned, with Stop and Pause. Stop
    keeps a checkpoint and the partial run.

    The buttons work while the kernel is idle or awaits (`run = await handle`); a cell that blocks
    hears nothing.
    """

    def __init__(self, handle: Any, *, throttle: Callable[..., Throttle] = Throttle):
        self.handle = handle
        self._stopping = self._paused = False
        self.status = widgets.HTML(layout={"flex": "1 1 auto", "min_width": "0"})
        self.pause_button = widgets.Button(description="Pause", icon="pause",
                                           layout={"width": "104px"})
        self.stop_button = widgets.Button(description="Stop", icon="stop",
                                          layout={"width": "104px"},
                                          tooltip="stop after this step and keep a checkpoint")
        # throttled here, so that a spec that is not shown is not made
        self.figure = Figure(max_hz=60)
        bar = widgets.HBox(
            [self.status, self.pause_button, self.stop_button],
            layout={"width": "100%", "align_items": "center", "padding": "4px 12px"})
        super().__init__([bar, self.figure], layout={"width": "100%", "overflow": "hidden"})
        self.pause_button.on_click(self._pause)
        self.stop_button.on_click(self._stop)
        self._show()
        self._changed = throttle(self._show, max_hz=8.0)
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

    def _state(self) -> str:
        if self.handle.done:
            if self.handle.error is not None:
                return "failed"
            return "done" if self._reached_all else "stopped"
        if self._stopping:
            return "stopping"
        return "paused" if self._paused else "running"

    def _words(self) -> str:
        return progress(list(self.handle.records), self.handle.planned_steps)

    def _say(self) -> None:
        state = self._state()
        words = str(self.handle.error) if state == "failed" else self._words()
        if state != "running":
            words = words.split(" · about")[0]
        colour = {"failed": COLOURS[2], "paused": WAITING, "stopping": WAITING}.get(state, INK)
        style = (f"font:13px {FONT};color:{FAINT};line-height:1.5;overflow:hidden;"
                 f"text-overflow:ellipsis")
        self.status.value = (f"<div style='{style}'><b style='color:{colour}'>{state}</b>&ensp;"
                             f"{escape(words)}</div>")

    def _stop(self, _button: Any) -> None:
        self._stopping = True
        self.handle.stop()
        if self._paused:             # a paused run must wake up to end
            self.handle.resume()
        self._end()

    def _pause(self, _button: Any) -> None:
        self._paused = not self._paused
        if self._paused:
            self.handle.pause()
        else:
            self.handle.resume()
        self.pause_button.description = "Resume" if self._paused else "Pause"
        self.pause_button.icon = "play" if self._paused else "pause"
        self._say()

    def _end(self) -> None:
        self.stop_button.disabled = self.pause_button.disabled = True
        self._say()

    def _done(self) -> None:
        self._changed.flush()
        self._show()
        self._end()
        self.refresh_output()
