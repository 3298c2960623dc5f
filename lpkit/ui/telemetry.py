"""What number formats do to the tensors of a run, drawn: layers by steps in colour, and one cell as
a histogram.

The functions take the samples of `lpkit.measure.telemetry.read` and know nothing else about them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from lpkit.errors import ConfigError, pick
from lpkit.tables import FAINT, INK, html_table
from lpkit.ui.draw import NAMES, axis, bars, box, figure, note, rule
from lpkit.ui.explorer import Explorer
from lpkit.ui.style import COLOURS, WARNING
from lpkit.ui.throttle import Throttle

AS_RUN = "as it ran"


@dataclass(frozen=True, kw_only=True)
class Metric:
    title: str
    value: Callable[[Any, Any], float | None]      # of a sample and a quality
    form: str
    colours: str = "Cividis"                       # light: high


def _of(field: str, scale: float = 1) -> Callable[[Any, Any], float | None]:
    def value(sample: Any, quality: Any) -> float | None:
        found = getattr(quality, field, None)
        return None if found is None else scale * found

    return value


METRICS = {
    "SQNR": Metric(title="signal to quantisation noise (dB)", value=_of("sqnr_db"), form=".1f"),
    "worst block": Metric(title="SQNR of the worst block (dB)", value=_of("worst_block_db"),
                          form=".1f"),
    "underflow": Metric(title="became zero (% of elements)", value=_of("underflow", 100),
                        form=".2f"),
    "saturated": Metric(title="saturated (% of elements)", value=_of("saturated", 100), form=".3f"),
    "saturated blocks": Metric(title="blocks with a saturated element (%)",
                               value=_of("saturated_blocks", 100), form=".2f"),
    "zeroed blocks": Metric(title="blocks of which nothing is left (%)",
                            value=_of("zeroed_blocks", 100), form=".2f"),
    "scale spread": Metric(title="largest over smallest scale (octaves)",
                           value=_of("scale_octaves"), form=".1f"),
    "amax": Metric(title="largest magnitude", value=lambda sample, quality: sample.amax,
                   form=".3g"),
}


def quality_of(sample: Any, recipe: str) -> Any:
    """What the run's own cast did to it, or what another recipe's would have; None where NaN or Inf
    were met."""
    return sample.own if recipe == AS_RUN else sample.others.get(recipe)


def heat_map(samples: Sequence[Any], *, metric: str = "SQNR", role: str = "x", recipe: str = AS_RUN,
             layer: str | None = None, step: int | None = None, title: str = "") -> dict:
    """The plotly spec of layers (top: the first) by steps; beside it the cell of `layer` and
    `step`, by default the last.

    Raises ConfigError when there are no samples of `role`.
    """
    what, some = (pick(METRICS, metric, "metric"),
                  [sample for sample in samples if sample.role == role])
    if not some:
        there = ", ".join(dict.fromkeys(sample.role for sample in samples))
        raise ConfigError(f"there are no samples of {role!r}"
                          + (f"; there are {there}" if there else " yet"))
    steps = list(dict.fromkeys(sample.step for sample in some))
    cells = {(sample.layer, sample.step): sample for sample in some}
    # gradients come from the last layer to the first; the map is the same for all
    there = {layer for layer, _ in cells}
    layers = [layer for layer in dict.fromkeys(sample.layer for sample in samples)
              if layer in there]
    shown = chosen(some, layer, step)
    values = [[cells[one, at] and what.value(cells[one, at], quality_of(cells[one, at], recipe))
               if (one, at) in cells else None for at in steps] for one in layers]
    words = [["" if (one, at) not in cells else "NaN" if cells[one, at].nonfinite else ""
              for at in steps] for one in layers]
    hover = [["" if value is None else f"{value:{what.form}}" for value in row] for row in values]
    column, row = steps.index(shown.step), layers.index(shown.layer)
    counts, layout = histogram(shown, recipe)
    heat = {"type": "heatmap", "x": [str(at) for at in steps], "y": layers, "z": values,
            "text": words, "texttemplate": "%{text}", "customdata": hover,
            "colorscale": what.colours, "xgap": 1, "ygap": 1, "hoverongaps": False,
            "hovertemplate": f"%{{y}}, step %{{x}}<br>{what.title}: %{{customdata}}<extra></extra>",
            # between the panels: outside, plotly moves the titles
            "colorbar": {"thickness": 10, "len": 1, "lenmode": "fraction", "x": 0.565,
                         "xanchor": "left", "ypad": 0,
                         "tickfont": {"size": 11}}}
    frame = box(column - 0.5, column + 0.5, row - 0.5, row + 0.5, edge=WARNING, width=2.5)
    return figure(
        [heat, *counts], escape(title), height=max(420, 150 + 22 * len(layers)), showlegend=False,
        margin={"t": 64 + 28 * bool(title)},
        x=axis("step", domain=[0, 0.56], type="category", showgrid=False),
        y={**NAMES, "type": "category"}, xaxis2={"domain": [0.68, 0.98], "anchor": "y2",
                                                 **layout["xaxis"]},
        yaxis2={"anchor": "x2", **layout["yaxis"]}, shapes=[frame, *layout["shapes"]],
        annotations=[note(what.title, 0, 1.02, xref="x domain", yref="y domain"),
                     *layout["annotations"]])


def chosen(samples: Sequence[Any], layer: str | None = None, step: int | None = None) -> Any:
    """The sample of `layer` at the last sampled step up to `step`; without a layer, of the
    first."""
    layer = (samples[0].layer if layer is None or all(sample.layer != layer for sample in samples)
             else layer)
    ours = [sample for sample in samples if sample.layer == layer]
    return max((sample for sample in ours if step is None or sample.step <= step),
               key=lambda s: s.step, default=ours[0])


def histogram(sample: Any, recipe: str = AS_RUN) -> tuple[list[dict], dict]:
    """Traces and layout (of axes x2 and y2) of the exponents of one tensor, and the window of the
    format over them."""
    exponents = sorted(sample.exponents)
    total = sum(sample.exponents.values()) or 1
    quality = quality_of(sample, recipe)
    counts = [{"type": "bar", "x": [e + 0.5 for e in exponents],
               "y": [100 * sample.exponents[e] / total for e in exponents], "xaxis": "x2",
               "yaxis": "y2", "marker": {"color": COLOURS[0]}, "width": 1,
               "hovertemplate": "2^%{x}: %{y:.3g}%<extra></extra>"}]
    panel = {"xref": "x2 domain", "yref": "y2 domain"}
    head = (f"<b>{escape(sample.layer)}</b><br>"
            f"{escape(sample.role)}, step {sample.step}: % of elements")
    if quality is not None:
        head += f"<br>shaded: {escape(sample.cast['format'] if recipe == AS_RUN else recipe)}"
    notes = [note(head, 0, 1.02, **panel, align="left", font={"size": 12})]
    layout = {"xaxis": axis("log2 |x|"), "shapes": [], "annotations": notes,
              "yaxis": {"type": "log", "exponentformat": "none", "dtick": 1, "side": "right",
                        "tickfont": {"size": 11}}}
    if quality is None:
        notes.append(note(f"{sample.nonfinite:,} NaN or Inf", 0.5, 0.5, "center middle", **panel,
                          font={"color": FAINT}))
        return counts, layout
    low, high = quality.window
    reach = [*exponents, high]
    layout["xaxis"]["range"] = [max(min([*reach, low]), high - 48) - 1, max(reach) + 2]
    inside = {"xref": "x2", "yref": "y2 domain"}
    layout["shapes"] = [box(low, high, 0, 1, fill=COLOURS[1], opacity=0.28, layer="below",
                            **inside), *(rule(x=x, colour=INK, **inside) for x in (low, high))]
    return counts, layout


def quality_table(sample: Any) -> str:
    """The cell under its own cast and under every other recipe's."""
    def line(name: str, quality: Any) -> tuple[str, ...]:
        ratio = "exact" if quality.sqnr_db is None else f"{quality.sqnr_db:.1f}"
        return name, ratio, f"{quality.underflow:.2%}", f"{quality.saturated:.2%}"

    rows = ([] if sample.own is None else [line(AS_RUN, sample.own),
                                           *(line(*item) for item in sample.others.items())])
    drawn = f"{sample.sampled_rows:,} of {sample.total_rows:,} rows"
    return html_table(("cast", "SQNR (dB)", "to zero", "saturated"), rows,
                      caption=f"{sample.role} of {sample.layer}, step {sample.step}; {drawn}")


def search_figure(finding: Any, *, title: str = "") -> dict:
    """The plotly spec of a `Finding`'s path, the first run on top: what was promoted, and what
    share of the loss it brought back."""
    def words(trial: Any) -> str:
        layers = list(dict.fromkeys(layer for layer, _ in trial.promoted))
        products = [product for _, product in trial.promoted]
        if len(layers) > 1:
            return f"{len(layers)} layers, {layers[0]} to {layers[-1]}"
        return f"{layers[0]}: {', '.join(products)}" if layers else "nothing"

    names = [f"{i}. {words(trial)}" for i, trial in enumerate(finding.path, 1)]
    if names:
        names[-1] = f"{len(names)}. everything but the culprit"
    shares = [100 * trial.recovery for trial in finding.path]
    colours = [COLOURS[0] if share > 50 else COLOURS[3] for share in shares]
    return figure([bars(names, shares, colour=colours, textposition="outside", cliponaxis=False,
                        text=[f"{share:.0f}%" for share in shares], hover="%{y}: %{x:.1f}%")],
                  escape(title), height=140 + 30 * len(names), showlegend=False, y=NAMES,
                  x=axis("of the lost loss that comes back (%)",
                         range=[min([0, *shares]) - 20, 120]))


class Handle(Protocol):
    def subscribe(self, observer: Callable[[Any], None]) -> None: ...
    def on_done(self, callback: Callable[[], None]) -> None: ...


def telemetry_explorer(read: Callable[[], Sequence[Any]] | Sequence[Any], *,
                       handle: Handle | None = None, start: Mapping[str, Any] | None = None,
                       title: str = "") -> Explorer:
    """An Explorer over samples: metric, role, recipe, and the cell, by menu or by a click into the
    map.

    `read` returns the samples, or is them. With a `handle`, what is read is read again while the
    run goes on. Raises ConfigError when there is nothing to show and no run that could bring it.
    """
    held = list(read()) if callable(read) else list(read)
    if not held:
        raise ConfigError("there are no samples to show; the first comes with step 1")
    explorer = Explorer(lambda **choices: _cell(held, title=title, **choices),
                        **_menus(held, start))
    _by_click(explorer)
    if handle is not None and callable(read):
        def again(_record: Any = None) -> None:
            held[:] = read()
            control = explorer.controls["step"]
            last = control.value == control.options[-1][1]
            if (now := list(dict.fromkeys(sample.step for sample in held))) != [value
                                                                                for _, value
                                                                                in control.options]:
                control.options = [(f"{at:,}", at) for at in now]
                explorer.set(step=now[-1] if last else control.value)

        throttled = Throttle(again, max_hz=2)
        handle.subscribe(throttled)
        handle.on_done(lambda: (throttled.flush(), again(), explorer.refresh_output()))
    return explorer


def telemetry_of_runs(runs: Mapping[str, Sequence[Any]], *,
                      start: Mapping[str, Any] | None = None) -> Explorer:
    """The same over the samples of several runs of one model, by name: one menu says which run,
    another what its tensors are looked at as. Raises ConfigError when no run has samples."""
    held = {name: list(samples) for name, samples in runs.items() if samples}
    if not held:
        raise ConfigError("no run has samples to show; the first comes with step 1")

    def show(run: str, **choices: Any) -> tuple[dict, str]:
        return _cell(held[run], title=f"Trained with {run}", **choices)

    explorer = Explorer(show, run=list(held),
                        labels={"run": "trained with", "role": "tensor", "recipe": "looked at"},
                        **_menus([sample for samples in held.values() for sample in samples],
                                 start))
    _by_click(explorer)
    return explorer


def _menus(samples: Sequence[Any], start: Mapping[str, Any] | None) -> dict[str, Any]:
    """The controls over all that was sampled; they begin at the last step."""
    roles, layers = (list(dict.fromkeys(getattr(sample, key) for sample in samples))
                     for key in ("role", "layer"))
    steps = sorted({sample.step for sample in samples})
    recipes = [AS_RUN, *max((sample.others for sample in samples), key=len)]
    return {"metric": list(METRICS), "role": roles, "recipe": recipes, "layer": layers,
            "step": steps, "start": {"step": steps[-1], **(start or {})}}


def _cell(samples: Sequence[Any], *, role: str, layer: str, step: int,
          **choices: Any) -> tuple[dict, str]:
    """The map with one cell chosen, and the table of that cell."""
    some = [sample for sample in samples if sample.role == role]
    table = quality_table(chosen(some, layer, step)) if some else ""
    return heat_map(samples, role=role, layer=layer, step=step, **choices), table


def _by_click(explorer: Explorer) -> None:
    """A click into the map chooses the cell."""
    def clicked(change: dict) -> None:
        point = change["new"]
        if point.get("curve") == 0:
            explorer.set(layer=point["y"], step=int(point["x"]))

    explorer.figure.observe(clicked, names="clicked")
