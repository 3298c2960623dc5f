"""Maps of the errors that number formats add to the tensors of a run, drawn from the samples that
`lpkit.measure.telemetry.read` returns.

`heat_map` draws layers by steps, and the elements of one chosen cell as a histogram. `beside_race`
draws layers by runs, next to the losses of the runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from lessons.figures.colours import DECIBELS, WARNING
from lessons.figures.drawing import GROUND, NAMES, axis, box, columns, figure, heat, note, rule
from lessons.figures.explorer import Explorer
from lessons.figures.style import COLOURS
from lpkit.errors import ConfigError, pick
from lpkit.tables import FAINT, INK, html_table

AS_RUN = "the run's own cast"     # in the menu of recipes; the other choices are names of recipes
Samples = Sequence[Any]


def _percent(share: float) -> float:
    return 100 * share


def _octave(magnitude: float) -> float:
    """Return log2 of a magnitude."""
    return math.log2(max(magnitude, 2.0**-150))      # for 0: below float32's smallest value


SHARES, OCTAVES = (0, 100), (-30, 10)
# for each metric: title, field of the sample or of its quality, conversion to the title's unit,
# format of the number, range of the colours
METRICS = {
    "SQNR": ("signal to quantisation noise (dB)", "sqnr_db", float, ".1f", DECIBELS),
    "worst block": ("SQNR of the worst block (dB)", "worst_block_db", float, ".1f", DECIBELS),
    "underflow": ("elements that became zero (%)", "underflow", _percent, ".2f", SHARES),
    "saturated": ("elements that saturated (%)", "saturated", _percent, ".3f", SHARES),
    "saturated blocks": ("blocks with a saturated element (%)", "saturated_blocks", _percent, ".2f",
                         SHARES),
    "zeroed blocks": ("blocks that became zero (%)", "zeroed_blocks", _percent,
                      ".2f", SHARES),
    "scale spread": ("largest / smallest scale (octaves)", "scale_octaves", float, ".1f",
                     (0, 20)),
    "amax": ("log2 of the largest magnitude", "amax", _octave, ".1f", OCTAVES),
}


def quality_of(sample: Any, recipe: str) -> Any:
    """Return the measured quality (SQNR, underflow, ...) of the cast that the run used, or, if
    `recipe` is a name, of that recipe's cast of the same tensor. None if the tensor contains NaN or
    Inf, or if the recipe was not tried."""
    return sample.own if recipe == AS_RUN else sample.others.get(recipe)


def _overflows(quality: Any) -> bool:
    """Return whether the cast produced an infinity, as FP16 without a scale can. Its `sqnr_db` is
    then None, because the noise is infinite. `sqnr_db` is also None for an exact cast, but an exact
    cast saturates no element."""
    return quality is not None and quality.sqnr_db is None and quality.saturated > 0


def heat_map(samples: Samples, *, metric: str = "SQNR", role: str = "x", recipe: str = AS_RUN,
             layer: str | None = None, step: int | None = None, title: str = "") -> dict:
    """Return the plotly spec of a map of layers (the first on top) by steps, and of a histogram of
    the cell of `layer` and `step` next to it.

    metric, role, recipe: a key of METRICS, "x", "w" or "dy", and AS_RUN or the name of a recipe
    layer, step: the cell of the histogram; by default the first layer and the last step

    Raises ConfigError for an unknown metric, and without samples of `role`."""
    what, field, in_unit, form, ends = pick(METRICS, metric, "metric")
    cells = {(sample.layer, sample.step): sample for sample in samples if sample.role == role}
    if not cells:
        roles = ", ".join(_values(samples, "role"))
        raise ConfigError(f"there are no samples of {role!r}"
                          + (f"; there are {roles}" if roles else " yet"))
    # Backward samples gradients from the last layer to the first. `_values(samples, ...)` takes the
    # order of the layers from all samples, so the map of every role has the order of forward.
    seen = {name for name, _ in cells}
    layers = [name for name in _values(samples, "layer") if name in seen]
    steps = _values(cells.values(), "step")
    values, words, hover = ([[gap] * len(steps) for _ in layers] for gap in (None, "", ""))
    for (name, at), sample in cells.items():
        row, column = layers.index(name), steps.index(at)
        value = getattr(sample if field == "amax" else quality_of(sample, recipe), field, None)
        if value is not None:
            values[row][column] = in_unit(value)
            hover[row][column] = f"{in_unit(value):{form}}"
        elif _overflows(quality_of(sample, recipe)):
            words[row][column] = hover[row][column] = "Inf"
        if sample.nonfinite:
            words[row][column] = hover[row][column] = "NaN"
    # the colour bar is between the two panels: outside of them, plotly would move the titles
    cells_of = heat([str(at) for at in steps], layers, values, ends=ends, text=words,
                    bar={"x": 0.425, "xanchor": "left"}, texttemplate="%{text}", customdata=hover,
                    hoverongaps=True,
                    hovertemplate=f"%{{y}}, step %{{x}}<br>{what}: %{{customdata}}"
                    f"<extra></extra>")
    shown = _chosen(list(cells.values()), layer, step)
    row, column = layers.index(shown.layer), steps.index(shown.step)
    frame = box(column - 0.5, column + 0.5, row - 0.5, row + 0.5, edge=WARNING, width=2.5)
    counts, powers, window, notes = _histogram(shown, recipe)
    return figure(
        [cells_of, counts], title, height=max(420, 150 + 22 * len(layers)), showlegend=False,
        margin={"t": 64 + 28 * bool(title)}, shapes=[frame, *window],
        annotations=[note(what, 0, 1.02, xref="x domain", yref="y domain"), *notes],
        xaxis=axis("step", domain=[0, 0.42], type="category", showgrid=False),
        yaxis={**NAMES, "type": "category"},
        xaxis2=axis("log2 |x|", domain=[0.54, 0.98], anchor="y2", **powers),
        yaxis2={"anchor": "x2", "type": "log", "exponentformat": "none", "dtick": 1,
                "side": "right", "tickfont": {"size": 11}})


def _values(samples: Samples, field: str) -> list:
    """Return the different values of a field of the samples, in order of appearance."""
    return list(dict.fromkeys(getattr(sample, field) for sample in samples))


def _chosen(samples: Samples, layer: str | None, step: int | None) -> Any:
    """Return the sample of `layer` at the last sampled step that is not after `step` (None: the
    last sampled step). If `layer` has no samples, use the first sample's layer; if all its samples
    are after `step`, return the first of them."""
    ours = [sample for sample in samples if sample.layer == layer]
    ours = ours or [sample for sample in samples if sample.layer == samples[0].layer]
    before = [sample for sample in ours if step is None or sample.step <= step]
    return max(before, key=lambda sample: sample.step, default=ours[0])


def _histogram(sample: Any, recipe: str) -> tuple[dict, dict, list[dict], list[dict]]:
    """Return what the panel of one tensor shows, on the axes x2 and y2: the trace of the share of
    elements by exponent, settings of x2, the shaded range of the cast's format, and the notes. If
    the tensor has NaN or Inf, there is a note instead of the shaded range."""
    exponents, quality = sorted(sample.exponents), quality_of(sample, recipe)
    total = sum(sample.exponents.values()) or 1
    counts = columns([e + 0.5 for e in exponents],
                     [100 * sample.exponents[e] / total for e in exponents], "", COLOURS[0],
                     xaxis="x2", yaxis="y2", width=1, hover="2^%{x}: %{y:.3g}%")
    panel = {"xref": "x2 domain", "yref": "y2 domain"}
    head = note(f"<b>{escape(sample.layer)}</b><br>{escape(sample.role)}, step {sample.step}: % of "
                f"elements", 0, 1.02, **panel, align="left", font={"size": 12})
    if quality is None:
        words = f"{sample.nonfinite:,} NaN or Inf"
        return counts, {}, [], [head, note(words, 0.5, 0.5, "center middle", **panel,
                                           bgcolor=GROUND, font={"color": FAINT})]
    shaded = sample.cast["format"] if recipe == AS_RUN else recipe
    head["text"] += f"<br>shaded: {escape(shaded)}"
    low, high = quality.window
    inside = {"xref": "x2", "yref": "y2 domain"}
    window = [box(low, high, 0, 1, fill=COLOURS[1], opacity=0.28, layer="below", **inside),
              *(rule(x=x, colour=INK, **inside) for x in (low, high))]
    reach = [max(min(low, *exponents), high - 48) - 1, max(high, *exponents) + 2]
    return counts, {"range": reach}, window, [head]


def quality_table(sample: Any) -> str:
    """Return an HTML table of one sampled tensor: a row for the cast that the run used, and a row
    for the cast of each other recipe that was tried on it."""
    casts = {} if sample.own is None else {AS_RUN: sample.own, **sample.others}
    rows = []
    for name, quality in casts.items():
        noise = "exact" if quality.sqnr_db is None else f"{quality.sqnr_db:.1f}"
        rows.append((name, "overflows to Inf" if _overflows(quality) else noise,
                     f"{quality.underflow:.2%}", f"{quality.saturated:.2%}"))
    drawn = f"{sample.sampled_rows:,} of {sample.total_rows:,} rows"
    return html_table(("cast", "SQNR (dB)", "became zero", "saturated"), rows,
                      caption=f"{sample.role} of {sample.layer}, step {sample.step}; "
                      f"sampled: {drawn}")


def explorer(show: Callable[..., tuple[dict, str]], samples: Samples,
             start: Mapping[str, Any] | None, **more: Any) -> Explorer:
    """Return an Explorer of `show` with controls for metric, role, recipe, layer and step, which
    offer what `samples` contain. It starts at the last step. A click on a cell of the map chooses
    the layer and the step of that cell.

    show: takes the choices and returns (spec, html), as `cell_and_table` does
    start: initial values of controls
    more: further controls, and `labels`, of `Explorer`

    Raises ConfigError without samples."""
    if not samples:
        raise ConfigError("there are no telemetry samples to show yet; a run records the first "
                          "samples in step 1")
    steps = sorted(_values(samples, "step"))
    others = max((sample.others for sample in samples), key=len)
    shown = Explorer(show, **more, metric=list(METRICS), role=_values(samples, "role"),
                     recipe=[AS_RUN, *others], layer=_values(samples, "layer"), step=steps,
                     start={"step": steps[-1], **(start or {})})

    def clicked(change: dict) -> None:
        point = change["new"]
        if point.get("curve") == 0:
            shown.set(layer=point["y"], step=int(point["x"]))

    shown.figure.observe(clicked, names="clicked")
    return shown


def cell_and_table(samples: Samples, *, role: str, layer: str, step: int,
                   **choices: Any) -> tuple[dict, str]:
    """Return (spec, html) for an Explorer: `heat_map` with the cell of `layer` and `step`, and
    `quality_table` of that cell. `choices` are the metric, the recipe and a title."""
    ours = [sample for sample in samples if sample.role == role]
    table = quality_table(_chosen(ours, layer, step)) if ours else ""
    return heat_map(samples, role=role, layer=layer, step=step, **choices), table


def beside_race(race: dict, samples: Mapping[str, Samples]) -> dict:
    """Return `race`, the spec of `lessons.race.race_figure`, with a map of layers by runs on its
    right: the lowest SQNR of x, w and dy in each layer, at the run's last sampled step. `samples`
    are the telemetry samples by run. Without samples, the space on the right is empty."""
    layout = {**race["layout"]}
    for name in layout.keys() & {"xaxis", "xaxis2"}:
        layout[name] = {**layout[name], "domain": [0, 0.46]}
    small = {"type": "category", "showgrid": False, "ticks": "", "tickfont": {"size": 11}}
    return {"data": [*race["data"], *([_noise_map(samples)] if samples else [])], "layout": {
        **layout, "xaxis3": {**small, "domain": [0.64, 1], "anchor": "y3", "tickangle": -40},
        "yaxis3": {**small, "anchor": "x3", "autorange": "reversed"},
        "annotations": [note("lowest SQNR of x, w and dy (dB), by layer and run", 1, 1.01,
                             "right bottom", xref="paper", yref="paper", font={"size": 12})]}}


def _noise_map(samples: Mapping[str, Samples]) -> dict:
    """Return the heat map that `beside_race` describes."""
    layers = list(dict.fromkeys(sample.layer for of_run in samples.values() for sample in of_run))
    worst: dict[tuple[str, str], float] = {}
    for name, of_run in samples.items():
        last = max((sample.step for sample in of_run), default=0)
        for sample in of_run:
            cell, db = (sample.layer, name), getattr(sample.own, "sqnr_db", None)
            if sample.step == last and sample.role in ("x", "w", "dy") and db is not None:
                worst[cell] = min(db, worst.get(cell, db))
    values = [[worst.get((layer, name)) for name in samples] for layer in layers]
    return heat([escape(name) for name in samples], layers, values, ends=DECIBELS, bar={"x": 1.01},
                xaxis="x3", yaxis="y3",
                hovertemplate="%{x}, %{y}: %{z:.1f} dB<extra></extra>")
