"""`Explorer`: menus and sliders that choose the arguments of a pure function, and the figure that
the function returns for them."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from lessons.figures.colours import WARNING
from lessons.figures.figure import Figure, Stored
from lpkit.errors import ConfigError, pick
from lpkit.tables import FONT, TEXT

Control = Sequence | range | Mapping | float | widgets.Widget
ALERT = (f"font:13px {FONT};color:{TEXT};border-left:3px solid {WARNING};padding:2px 10px;"
         f"margin:4px 12px")
WIDE = {"width": "100%", "overflow": "hidden"}
WORDS = 36          # a menu with a longer label gets a whole row of the panel


class Explorer(Stored, widgets.VBox):
    """A figure with controls. A change of a control calls `show(**choices)` and draws the result.

    show      a pure function that takes less than 50 ms and returns a plotly spec, or (spec, html)
              with a table that is shown next to the figure. If it raises ConfigError, its message
              is shown above the last valid figure
    controls  one keyword per argument of `show`: name=[values] (a slider if all values are numbers,
              else a menu), name={label: value} (a menu), name=range(...) (a slider), name=0.3 (a
              field for a number), or a widget with a `value`
    labels    {name: text next to the control}; by default the name
    start     {name: initial value}; by default the first value of the control

    explorer.set(devices=8, zero_stage=3) moves controls from Python and redraws once.
    Raises ConfigError for a control without values, and for unknown names in `labels` or `start`.
    """

    def __init__(self, show: Callable[..., Any], /, *, labels: Mapping[str, str] | None = None,
                 start: Mapping[str, Any] | None = None, **controls: Control):
        labels, start = labels or {}, start or {}
        for name in (*labels, *start):
            pick(controls, name, "control")
        self.show, self._moving = show, False
        self.controls = {name: _control(control, labels.get(name, name.replace("_", " ")))
                         for name, control in controls.items()}
        for name, value in start.items():
            self.controls[name].value = value
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self.figure = Figure()
        self.table = widgets.HTML(layout={"flex": "0 1 auto", "margin": "8px 0 0 0",
                                          "overflow": "auto"})
        self.message = widgets.HTML(layout={"display": "none"})
        panel = widgets.GridBox(list(self.controls.values()), layout={
            "grid_template_columns": "repeat(auto-fill, minmax(min(300px, 100%), 1fr))",
            "width": "100%", "grid_gap": "2px 24px", "align_items": "center",
            "padding": "8px 12px"})
        drawing = widgets.Box([self.figure], layout={"flex": "1 1 640px", "min_width": "0",
                                                     "overflow": "hidden"})
        row = widgets.HBox([drawing, self.table], layout={
            "flex_flow": "row wrap", "align_items": "flex-start", **WIDE})
        super().__init__([panel, self.message, row], layout=WIDE)
        self.draw()

    @property
    def choices(self) -> dict[str, Any]:
        """The current values of all controls, by name."""
        return {name: control.value for name, control in self.controls.items()}

    def set(self, **choices: Any) -> None:
        """Move these controls to these values and redraw once, not once per control. Raises
        ConfigError for an unknown control."""
        for name in choices:
            pick(self.controls, name, "control")
        self._moving = True
        try:
            for name, value in choices.items():
                self.controls[name].value = value
        finally:
            self._moving = False
        self.draw()

    def _changed(self, _change: dict) -> None:
        if not self._moving:
            self.draw()

    def draw(self) -> None:
        """Call `show` with the current choices and show its figure and table; if `show` raises
        ConfigError, keep the figure and show the message."""
        try:
            shown = self.show(**self.choices)
        except ConfigError as error:
            self.message.value = f'<div role="alert" style="{ALERT}">{escape(str(error))}</div>'
            self.message.layout.display = None
            return
        spec, self.table.value = shown if isinstance(shown, tuple) else (shown, "")
        self.figure.show(spec)
        self.message.layout.display = "none"
        self.table.layout.display = None if self.table.value else "none"


def _control(control: Control, label: str) -> widgets.Widget:
    """Return the ipywidget for `control` (see `Explorer`), at its first value, with its label."""
    if isinstance(control, widgets.Widget):
        widget = control
    elif isinstance(control, float):
        widget = widgets.FloatText(value=control, step=None)
    elif isinstance(control, range):
        widget = widgets.IntSlider(value=control[0], min=control[0], max=control[-1],
                                   step=control.step)
    elif not control:
        raise ConfigError(f"the control {label!r} has no values to choose from")
    elif isinstance(control, Mapping):
        widget = widgets.Dropdown(options=list(control.items()))
    elif all(isinstance(value, (int, float)) for value in control):
        widget = widgets.SelectionSlider(options=[(f"{value:,.15g}", value) for value in control])
    else:
        widget = widgets.Dropdown(options=[(str(value), value) for value in control])
    widget.description = widget.description or label
    widget.style.description_width = "118px"
    widget.layout.width = "auto"
    if (isinstance(widget, widgets.Dropdown)
            and max(len(label) for label, _ in widget.options) > WORDS):
        widget.layout.grid_area = "auto / 1 / auto / -1"      # the whole row
    return widget
