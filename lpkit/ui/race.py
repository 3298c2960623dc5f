"""Recipes on one model, one after the other: live while they train, and what each cost when they
have. Losses in nats per token."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any

from lpkit.errors import ConfigError
from lpkit.tables import FAINT, INK
from lpkit.ui.draw import NAMES, axis, bars, box, figure, note, scatter
from lpkit.ui.live import LiveRun
from lpkit.ui.style import COLOURS

DECIBELS = (15.0, 45.0)     # of the live map's colours: from 4-bit floats to INT8 at its best
NOISE = ("x", "w", "dy")


def line_of(i: int) -> dict[str, Any]:
    """How the i-th recipe is drawn: the base in dots, the others each in a colour of its own, then
    dashed."""
    if i == 0:
        return {"color": FAINT, "width": 2, "dash": "dot"}
    again, colour = divmod(i - 1, len(COLOURS))
    return {"color": COLOURS[colour], "width": 2, "dash": ("solid", "dash")[again % 2]}


def race_figure(losses: Mapping[str, Mapping[int, float]],
                samples: Mapping[str, Sequence[Any]] | None = None, *, title: str = "",
                planned_steps: int | None = None, paired: Collection[str] | None = None) -> dict:
    """The plotly spec of runs as they go: training losses by step; what each lies above the first;
    and, from telemetry samples by run, how noisy each layer is at the last sampled step. `paired`:
    the runs that met the batches of the first; None: all."""
    first = next(iter(losses.values()), {})
    data: list[dict] = []
    for i, (name, curve) in enumerate(losses.items()):
        above = {}
        if paired is None or name in paired:
            above = {step: 100 * (loss / first[step] - 1)
                     for step, loss in curve.items() if step in first}
        shared = {"name": escape(name), "line": line_of(i), "legendgroup": name}
        data += [scatter(curve, curve.values(), hover="step %{x}: %{y:.4f}", **shared),
                 scatter(above, above.values(), hover="step %{x}: %{y:+.2f}%", showlegend=False,
                         xaxis="x2", yaxis="y2", **shared)]
    if samples:
        data.append(_noise_map(samples))
    reach = {"range": [0, planned_steps], "autorange": False} if planned_steps else {}
    small = {"type": "category", "showgrid": False, "ticks": "", "tickfont": {"size": 11}}
    return figure(
        data, title, height=500, uirevision="race", hovermode="closest",
        margin={"t": 112, "r": 70}, legend={"y": 1.07},
        xaxis={"domain": [0, 0.46], "anchor": "y", "matches": "x2", "showticklabels": False,
               **reach},
        yaxis=axis("training loss", domain=[0.54, 1]),
        xaxis2=axis("step", domain=[0, 0.46], anchor="y2", **reach),
        yaxis2=axis(f"above {escape(next(iter(losses), 'the first'))}, %", domain=[0, 0.44],
                    anchor="x2"),
        xaxis3={**small, "domain": [0.64, 1], "anchor": "y3", "tickangle": -40},
        yaxis3={**small, "anchor": "x3", "autorange": "reversed"},
        annotations=[note("signal over noise of the worst of x, w and dy, dB", 1, 1.01,
                          "right bottom", xref="paper", yref="paper", font={"size": 12})])


def _noise_map(samples: Mapping[str, Sequence[Any]]) -> dict:
    layers = list(dict.fromkeys(sample.layer for of_run in samples.values() for sample in of_run))
    worst: dict[tuple[str, str], float] = {}
    for name, of_run in samples.items():
        last = max((sample.step for sample in of_run), default=0)
        for sample in of_run:
            if sample.step == last and sample.role in NOISE and sample.own is not None:
                db, cell = sample.own.sqnr_db, (sample.layer, name)
                if db is not None:
                    worst[cell] = min(db, worst.get(cell, db))
    return {"type": "heatmap", "x": [escape(name) for name in samples], "y": layers,
            "z": [[worst.get((layer, name)) for name in samples] for layer in layers],
            "xaxis": "x3", "yaxis": "y3", "zmin": DECIBELS[0], "zmax": DECIBELS[1],
            "colorscale": "Cividis", "xgap": 1, "ygap": 1, "hoverongaps": False,
            "colorbar": {"thickness": 10, "len": 1, "x": 1.01, "ypad": 0, "tickfont": {"size": 11}},
            "hovertemplate": "%{x}, %{y}: %{z:.1f} dB<extra></extra>"}


class LiveRuns(LiveRun):
    """A live figure of the series of runs that `lpkit.start_each` returned, with Stop and Pause.
    Stop ends the run at hand and begins no other.

    `read(path)` returns the telemetry samples of a run folder, and raises ConfigError while there
    are none; None: no map.
    """

    def __init__(self, series: Any, *, read: Callable[[Any], Sequence[Any]] | None = None):
        self._read, self._ended = read, {}
        super().__init__(series)

    def _spec(self) -> dict:
        begun, configs = dict(self.handle.handles), self.handle.configs
        losses = {name: {record.step: record.loss for record in list(one.records)}
                  for name, one in begun.items()}
        first = next(iter(configs.values())).seed
        return race_figure(losses, self._samples(begun), planned_steps=self.handle.planned_steps,
                           title=f"{len(begun)} of {len(configs)}: {self.handle.title}",
                           paired=[name for name in begun if configs[name].seed == first])

    def _samples(self, begun: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """Of a run that has ended they are read once."""
        samples = {}
        for name, one in begun.items() if self._read else ():
            ended = one.done
            with contextlib.suppress(ConfigError):
                samples[name] = self._ended.get(name) or self._read(one.path)
                if ended:
                    self._ended[name] = samples[name]
        return samples

    @property
    def _reached_all(self) -> bool:
        return len(self.handle.handles) == len(self.handle.configs) and super()._reached_all

    def _words(self) -> str:
        return f"{self.handle.title} · {super()._words()}"


def gap_figure(gaps: Mapping[str, Mapping[int, float]], *, band: float | None,
               predicted: Mapping[str, float], measured: Mapping[str, float | None], base: str,
               title: str = "") -> dict:
    """The plotly spec of what recipes cost. Left: the validation loss above the base's, in percent
    over the steps, over a band of +-`band` that two seeds of the base differ by; None where the
    second was not run. Right: signal over noise of a product in dB, by formula and measured."""
    lines = {name: line_of(i) for i, name in enumerate(gaps, 1)}
    order = sorted(predicted, key=lambda name: -predicted[name])
    colours = [lines[name]["color"] if name in lines else FAINT for name in order]
    right = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
    data = [scatter(gap, gap.values(), escape(name), mode="lines+markers", line=lines[name],
                    marker={"size": 6}, legendgroup=name, hover="step %{x}: %{y:+.2f}%")
            for name, gap in gaps.items()]
    data += [
        bars(order, [predicted[name] for name in order], "formula", width=0.62,
             hover="%{y}: %{x:.1f} dB by formula<extra></extra>",
             marker={"color": colours, "opacity": 0.45}, **right),
        scatter([measured.get(name) for name in order], order, "measured", mode="markers",
                marker={"symbol": "line-ns", "size": 18, "line": {"color": INK, "width": 3}},
                hover="%{y}: %{x:.1f} dB measured<extra></extra>", **right)]
    notes = [note("bar: formula; mark: measured", 0, 1.01, xref="x2 domain", yref="paper",
                  font={"size": 12})]
    shapes = []
    if band is not None:
        shapes.append(box(0, 1, -band, band, fill=COLOURS[6], xref="x domain", yref="y",
                          layer="below", opacity=0.22))
        notes.append(note(f"two seeds of {escape(base)} differ by {band:.2g}%", 0.01, -band,
                          xref="x domain", font={"color": FAINT, "size": 12}))
    largest = max([band or 0, *(abs(value) for gap in gaps.values() for value in gap.values())])
    reach = 1.15 * largest or 1.0
    return figure(
        data, title, height=440, hovermode="closest", margin={"t": 92}, shapes=shapes,
        annotations=notes, legend={"y": 1.08},
        xaxis=axis("step", domain=[0, 0.56], rangemode="tozero"),
        yaxis=axis(f"validation loss above {escape(base)}'s, %", zeroline=True,
                   zerolinecolor=FAINT, range=[-reach, reach]),
        xaxis2=axis("signal over noise of a product, dB", domain=[0.72, 1], anchor="y2",
                    rangemode="tozero"),
        yaxis2={**NAMES, "anchor": "x2"})
