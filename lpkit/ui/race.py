"""Recipes on one model, one after the other: live while they train, and what each cost when they
have. Losses in nats per token."""

from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any, Protocol

from lpkit.contracts import StepRecord
from lpkit.errors import ConfigError
from lpkit.tables import FAINT, INK
from lpkit.ui.draw import LEGEND_ABOVE, NAMES, axis, bars, box, figure, note, scatter
from lpkit.ui.live import LiveRun, RunHandle
from lpkit.ui.style import COLOURS

DECIBELS = (15.0, 45.0)     # of the live map's colours: from 4-bit floats to INT8 at its best
NOISE = ("x", "w", "dy")


class SeriesHandle(RunHandle, Protocol):
    """What `LiveRuns` needs: the run at hand as a RunHandle, and all of them by name."""

    configs: Mapping[str, Any]      # of all that are planned
    handles: Mapping[str, Any]  # of those that have begun, each with `records`, `path` and `done`


def line_of(i: int) -> dict[str, Any]:
    """How the i-th recipe is drawn: the base in dots, the others each in a colour of its own, then
    dashed."""
    if i == 0:
        return {"color": FAINT, "width": 2, "dash": "dot"}
    return {"color": COLOURS[(i - 1) % len(COLOURS)], "width": 2,
            "dash": ("solid", "dash")[(i - 1) // len(COLOURS) % 2]}


def race_figure(losses: Mapping[str, Mapping[int, float]],
                samples: Mapping[str, Sequence[Any]] | None = None, *, title: str = "",
                planned_steps: int | None = None, paired: Collection[str] | None = None) -> dict:
    """The plotly spec of runs as they go: training losses by step; what each lies above the first;
    and, from telemetry samples by run, how noisy each layer is at the last sampled step. `paired`:
    the runs that met the batches of the first;
    None: all."""
    names = list(losses)
    first = losses[names[0]] if names else {}
    data: list[dict] = []
    for i, name in enumerate(names):
        one, shared = losses[name], {"line": line_of(i), "legendgroup": name}
        both = [step for step in one if step in first] if paired is None or name in paired else []
        data += [scatter(one, one.values(), escape(name), hover="step %{x}: %{y:.4f}", **shared),
                 scatter(both, [100 * (one[step] / first[step] - 1) for step in both], escape(name),
                         showlegend=False, xaxis="x2", yaxis="y2", hover="step %{x}: %{y:+.2f}%",
                         **shared)]
    if samples:
        data.append(_noise_map(samples))
    reach = {"range": [0, planned_steps], "autorange": False} if planned_steps else {}
    base = escape(names[0]) if names else "the first"
    small = {"type": "category", "showgrid": False, "ticks": "", "tickfont": {"size": 11}}
    words = "signal over noise of the worst of x, w and dy, dB"
    return figure(
        data, escape(title), height=500, uirevision="race", hovermode="closest",
        margin={"t": 112, "r": 70}, x={"domain": [0, 0.46], "anchor": "y", "matches": "x2",
                                       "showticklabels": False, **reach},
        y=axis("training loss", domain=[0.54, 1]),
        xaxis2=axis("step", domain=[0, 0.46], anchor="y2", **reach),
        yaxis2=axis(f"above {base}, %", domain=[0, 0.44], anchor="x2"),
        xaxis3={**small, "domain": [0.64, 1], "anchor": "y3", "tickangle": -40},
        yaxis3={**small, "anchor": "x3", "autorange": "reversed"},
        legend={**LEGEND_ABOVE, "y": 1.07},
        annotations=[note(words, 1, 1.01, "right bottom", xref="paper", yref="paper",
                          font={"size": 12})])


def _noise_map(samples: Mapping[str, Sequence[Any]]) -> dict:
    layers = list(dict.fromkeys(sample.layer for some in samples.values() for sample in some))
    worst: dict[tuple[str, str], float] = {}
    for name, some in samples.items():
        last = max((sample.step for sample in some), default=0)
        for sample in some:
            db = None if sample.own is None else sample.own.sqnr_db
            if sample.step == last and sample.role in NOISE and db is not None:
                worst[sample.layer, name] = min(db, worst.get((sample.layer, name), db))
    values = [[worst.get((layer, name)) for name in samples] for layer in layers]
    return {"type": "heatmap", "x": [escape(name) for name in samples], "y": layers, "z": values,
            "xaxis": "x3", "yaxis": "y3", "zmin": DECIBELS[0], "zmax": DECIBELS[1],
            "colorscale": "Cividis", "xgap": 1, "ygap": 1, "hoverongaps": False,
            "colorbar": {"thickness": 10, "len": 1, "x": 1.01, "ypad": 0, "tickfont": {"size": 11}},
            "hovertemplate": "%{x}, %{y}: %{z:.1f} dB<extra></extra>"}


class LiveRuns(LiveRun):
    """A live figure of a series of runs, with Stop and Pause. Stop ends the run at hand and begins
    no other.

    `read(path)` returns the telemetry samples of a run folder, and raises ConfigError while there
    are none; None: no map.
    """

    handle: SeriesHandle

    def __init__(self, series: SeriesHandle, *, read: Callable[[Any], Sequence[Any]] | None = None,
                 **settings: Any):
        self._read, self._ended = read, {}
        super().__init__(series, **settings)

    def _spec(self) -> dict:
        begun = dict(self.handle.handles)
        losses = {name: {record.step: record.loss for record in list(one.records)}
                  for name, one in begun.items()}
        seeds = {name: config.seed for name, config in self.handle.configs.items()}
        first = seeds[next(iter(seeds))]
        return race_figure(losses, self._samples(begun), planned_steps=self.handle.planned_steps,
                           title=f"{len(begun)} of {len(seeds)}: {self.handle.title}",
                           paired=[name for name in begun if seeds[name] == first])

    def _samples(self, begun: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """Of a run that has ended they are read once."""
        found = {}
        for name, one in begun.items() if self._read else ():
            ended = one.done
            try:
                found[name] = self._ended[name] if name in self._ended else self._read(one.path)
            except ConfigError:
                continue
            if ended:
                self._ended[name] = found[name]
        return found

    @property
    def _reached_all(self) -> bool:
        return len(self.handle.handles) == len(self.handle.configs) and super()._reached_all

    def _words(self, records: Sequence[StepRecord], planned: int) -> str:
        return f"{self.handle.title} · {super()._words(records, planned)}"


def gap_figure(gaps: Mapping[str, Mapping[int, float]], *, band: float | None,
               predicted: Mapping[str, float], measured: Mapping[str, float | None], base: str,
               title: str = "") -> dict:
    """The plotly spec of what recipes cost. Left: the validation loss above the base's, in percent
    over the steps, over a band of +-`band` that two seeds of the base differ by; None where the
    second was not run. Right: signal over noise of a product in dB, by formula and measured."""
    data: list[dict] = []
    reach = (1.15 * max([band or 0, *(abs(value) for gap in gaps.values()
                                      for value in gap.values())]) or 1.0)
    for i, (name, gap) in enumerate(gaps.items(), 1):
        data.append(scatter(gap, gap.values(), escape(name), mode="lines+markers", line=line_of(i),
                            marker={"size": 6}, legendgroup=name, hover="step %{x}: %{y:+.2f}%"))
    order = sorted(predicted, key=lambda name: -predicted[name])
    colours = {name: line_of(i)["color"] for i, name in enumerate(gaps, 1)}
    right = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
    data += [
        bars(order, [predicted[name] for name in order], "formula", width=0.62,
             hover="%{y}: %{x:.1f} dB by formula<extra></extra>", **right)
        | {"marker": {"color": [colours.get(name, FAINT) for name in order], "opacity": 0.45}},
        scatter([measured.get(name) for name in order], order, "measured", mode="markers",
                marker={"symbol": "line-ns", "size": 18, "line": {"color": INK, "width": 3}},
                hover="%{y}: %{x:.1f} dB measured<extra></extra>", **right)]
    notes = [note("bar: formula; mark: measured", 0, 1.01, xref="x2 domain", yref="paper",
                  font={"size": 12})]
    shapes = []
    if band is not None:
        shapes.append(box(0, 1, -band, band, fill=COLOURS[6], xref="x domain", yref="y",
                          layer="below", opacity=0.22))
        notes.insert(0, note(f"two seeds of {escape(base)} differ by {band:.2g}%", 0.01, -band,
                             xref="x domain", font={"color": FAINT, "size": 12}))
    return figure(
        data, escape(title), height=440, hovermode="closest", margin={"t": 92}, shapes=shapes,
        annotations=notes, x=axis("step", domain=[0, 0.56], rangemode="tozero"),
        y=axis(f"validation loss above {escape(base)}'s, %", zeroline=True, zerolinecolor=FAINT,
               range=[-reach, reach]), xaxis2=axis("signal over noise of a product, dB",
                                                   domain=[0.72, 1], anchor="y2",
                                                   rangemode="tozero"),
        yaxis2={**NAMES, "anchor": "x2"}, legend={**LEGEND_ABOVE, "y": 1.08})
