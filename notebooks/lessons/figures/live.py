"""A live figure of a training run: loss, gradient norm and speed, with buttons to stop and pause.

`training_figure` is a pure function of a run's records; `LiveRun` redraws it while the run adds
records. Losses are in nats per token.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from lessons.figures.drawing import SECONDS, axis, figure, note, rule, scatter
from lessons.figures.figure import Figure, Stored
from lessons.figures.style import COLOURS
from lpkit.contracts import StepRecord
from lpkit.predict.units import duration, quantity
from lpkit.tables import FAINT, FONT, QUIET, TEXT, html_table

STATUS = f"font:13px {FONT};color:{QUIET};line-height:1.5;overflow:hidden;text-overflow:ellipsis"
PERIOD_SECONDS = 1 / 8      # shortest time between two redraws
STATE_COLOURS = {"failed": COLOURS[2], "paused": "#8a6500", "stopping": "#8a6500"}


def training_figure(records: Sequence[StepRecord], *, title: str = "",
                    planned_steps: int | None = None,
                    levels: Mapping[str, float] | None = None, others: float = 0.0) -> dict:
    """Return the plotly spec of a run. Left: training loss and validation loss over the steps.
    Right: gradient norm and tokens per second over the same steps.

    planned_steps: the end of the step axis, so that the axis does not grow during the run
    levels: losses to compare with, by name; each is a dotted line
    others: the share of the cores that other processes used (see `lessons.figures.drawing.figure`)
    """
    levels = levels or {}
    steps = [record.step for record in records]
    evaluated = [record for record in records if record.val_loss is not None]
    # `tokens` is the total so far, and every step has the same number of tokens: tokens / step is
    # that number
    speeds = [record.tokens / record.step / record.step_seconds for record in records]
    thin = {"line": {"width": 1.2}, "showlegend": False}
    data = [
        scatter(steps, [record.loss for record in records], "training loss", COLOURS[0],
                line={"width": 1.5}, hover="step %{x}: %{y:.4f}<extra></extra>"),
        scatter([record.step for record in evaluated], [record.val_loss for record in evaluated],
                "validation loss", COLOURS[1], mode="lines+markers", line={"width": 2.5},
                marker={"size": 8}, cliponaxis=False,
                hover="step %{x}: %{y:.4f} on held-out text<extra></extra>"),
        scatter(steps, [record.grad_norm for record in records], "gradient norm", COLOURS[2],
                xaxis="x2", yaxis="y2", **thin),
        scatter(steps, speeds, "tokens/s", COLOURS[4], xaxis="x3", yaxis="y3", **thin, **SECONDS),
    ]
    reach = {"range": [0, max([planned_steps or 1, *steps[-1:]])], "autorange": False}
    right = {"domain": [0.7, 1], "matches": "x"}
    return figure(
        data, title, others=others, height=380, uirevision="run",
        shapes=[rule(y=y, xref="x domain") for y in levels.values()],
        annotations=[note(escape(name), 1, y, "right bottom", xref="x domain", yshift=2,
                          font={"color": FAINT}) for name, y in levels.items()],
        xaxis=axis("step", domain=[0, 0.6], **reach), yaxis=axis("loss (nats per token)"),
        xaxis2={**right, "anchor": "y2", "showticklabels": False},
        yaxis2=axis("gradient norm", domain=[0.56, 1], anchor="x2", rangemode="tozero"),
        xaxis3=axis("step", **right, anchor="y3"),
        yaxis3=axis("tokens/s", domain=[0, 0.44], anchor="x3", rangemode="tozero"))


def progress(records: Sequence[StepRecord], planned_steps: int) -> str:
    """Return the progress of a run in words, for example 'step 20 of 300 · loss 3.121 · 12.3k
    tokens/s · about 14 s left'. The time left assumes the median time of the last 20 steps."""
    if not records:
        return f"starting: {planned_steps} steps planned"
    last = records[-1]
    # the median, because the first step also compiles and takes much longer
    recent = sorted(record.step_seconds for record in records[-20:])
    seconds = recent[len(recent) // 2]
    parts = [f"step {last.step} of {planned_steps}", f"loss {last.loss:.3f}"]
    validations = [record.val_loss for record in records if record.val_loss is not None]
    parts += [f"validation {loss:.3f}" for loss in validations[-1:]]
    parts.append(quantity(last.tokens / last.step / seconds, "tokens/s"))
    if last.step < planned_steps:
        parts.append(f"about {duration(round((planned_steps - last.step) * seconds))} left")
    return " · ".join(parts)


# for each field that a rank reports: the heading of its column, and the format of its cells
RANK = {
    "step": ("step", "{:,}".format),
    "loss": ("loss", "{:.3f}".format),
    "step_seconds": ("seconds per step", "{:.3f}".format),
    "peak_bytes": ("peak memory", lambda nbytes: quantity(nbytes, "bytes")),
    "communication_share": ("share of communication", "{:.0%}".format),
}


def ranks_table(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Return an HTML table with a row for each rank, from the fields that each rank reported last
    (see RANK); "-" for a field that is not reported yet. "" without ranks."""
    if not ranks:
        return ""
    rows = [[rank, *(form(facts[name]) if facts.get(name) is not None else "-"
                     for name, (_, form) in RANK.items())] for rank, facts in sorted(ranks.items())]
    return html_table(["rank", *(head for head, _ in RANK.values())], rows)


class LiveRun(Stored, widgets.VBox):
    """A live figure of a run, with the buttons Stop and Pause, and a table of ranks if the run has
    several. Stop ends the run after the current step; its checkpoint and its records are kept.

    handle: the running training, as `lpkit.start` or `lpkit.launch` returns it
    others: returns the share of the cores that other processes used since the start
    clock: returns the time in seconds

    The buttons work while the kernel is idle or awaits the run (`run = await handle`). While a cell
    blocks the kernel, they have no effect.
    """

    def __init__(self, handle: Any, *, others: Callable[[], float] = float,
                 clock: Callable[[], float] = time.monotonic):
        self.handle, self.others = handle, others
        self._clock, self._next = clock, -math.inf
        self._stopping = self._paused = False
        # The training's thread and the kernel's thread, which handles buttons, both write the
        # status line. Without the lock, a button could replace the final status by an older one.
        self._saying = threading.Lock()
        self.status = widgets.HTML(layout={"flex": "1 1 300px", "min_width": "0"})
        self.pause_button, self.stop_button = (
            widgets.Button(description=word, icon=word.lower(), layout={"flex": "0 0 104px"})
            for word in ("Pause", "Stop"))
        self.stop_button.tooltip = "stop after this step and keep a checkpoint"
        self.figure = Figure()
        bar = widgets.HBox(
            [self.status, self.pause_button, self.stop_button],
            layout={"flex_flow": "row wrap", "align_items": "center", "padding": "4px 12px"})
        self.ranks = widgets.HTML(layout={"overflow": "auto", "max_width": "100%"})
        below = [self.ranks] if hasattr(handle, "ranks") else []
        super().__init__([bar, self.figure, *below], layout={"width": "100%", "overflow": "hidden"})
        self.pause_button.on_click(self._pause)
        self.stop_button.on_click(self._stop)
        self._show()
        handle.subscribe(self._changed)
        handle.on_done(self._done)

    def _spec(self) -> dict:
        """Return the plotly spec of the run so far."""
        return training_figure(list(self.handle.records), title=self.handle.title,
                               planned_steps=self.handle.planned_steps, others=self.others())

    def _words(self) -> str:
        """Return the progress of the run in words."""
        return progress(list(self.handle.records), self.handle.planned_steps)

    @property
    def _reached_all(self) -> bool:
        """Whether the last record is that of the last planned step."""
        records = self.handle.records
        return bool(records) and records[-1].step >= self.handle.planned_steps

    @property
    def _state(self) -> str:
        """The state of the run: running, paused, stopping, stopped, done or failed."""
        if self.handle.done:
            if self.handle.error is not None:
                return "failed"
            return "done" if self._reached_all else "stopped"
        if self._stopping:
            return "stopping"
        return "paused" if self._paused else "running"

    def _changed(self, _record: Any) -> None:
        """Redraw after a new record, unless the last redraw was too recent: a browser falls behind
        if it has to draw more than a few times per second. A skipped record is drawn at a later
        step, or at the end of the run. After a redraw that took t seconds, no redraw starts for
        4 t seconds, so redraws take at most a fifth of the time."""
        began = self._clock()
        if self._state == "running" and began < self._next:
            return
        self._show()
        ended = self._clock()
        self._next = max(began + PERIOD_SECONDS, ended + 4 * (ended - began))

    def _show(self) -> None:
        """Redraw the figure, the table of ranks and the status line."""
        self.figure.show(self._spec())
        self.ranks.value = ranks_table(dict(getattr(self.handle, "ranks", {})))
        self._say()

    def _say(self) -> None:
        """Write the status line: the state, and the progress or the reason of a failure."""
        with self._saying:
            state, words = self._state, self._words()
            if state != "running":
                words = words.split(" · about")[0]
            if state == "failed":
                # the first line is the reason; errors of several ranks add a traceback to it
                words = str(self.handle.error).split("\n")[0]
            colour = STATE_COLOURS.get(state, TEXT)
            self.status.value = (f'<div style="{STATUS}">'
                                 f'<span style="color:{colour}">&#9679;</span> '
                                 f'<b style="color:{TEXT}">{state}</b>&ensp;'
                                 f"{escape(words)}</div>")
            ending = self._stopping or self.handle.done
            self.stop_button.disabled = self.pause_button.disabled = ending

    def _stop(self, _button: Any) -> None:
        self._stopping = True
        self.handle.stop()
        if self._paused:             # a paused run does not see the stop until it resumes
            self.handle.resume()
        self._say()

    def _pause(self, _button: Any) -> None:
        self._paused = not self._paused
        if self._paused:
            self.handle.pause()
        else:
            self.handle.resume()
        self.pause_button.description = "Resume" if self._paused else "Pause"
        self.pause_button.icon = "play" if self._paused else "pause"
        self._say()

    def _done(self) -> None:
        """Show the end of the run, and store the final figure in the output."""
        self._show()
        self.refresh_output()
