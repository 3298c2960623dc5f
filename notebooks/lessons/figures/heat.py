"""The errors that number formats add to the tensors of a run, from samples of
`lpkit.measure.telemetry.read`: a map of layers by steps with one cell as a histogram; or layers by
runs, next to a race."""

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

AS_RUN = "as it ran"
Samples = Sequence[Any]


def _percent(share: float) -> float:
    return 100 * share


def _octave(magnitude: float) -> float:
    return math.log2(max(magnitude, 2.0**-150))      # below float32's smallest value


SHARES, OCTAVES = (0, 100), (-30, 10)
METRICS = {     # title; field of a sample or its quality; conversion; format; range of the map
    "SQNR": ("signal to quantisation noise (dB)", "sqnr_db", float, ".1f", DECIBELS),
    "worst block": ("SQNR of the worst block (dB)", "worst_block_db", float, ".1f", DECIBELS),
    "underflow": ("became zero (% of elements)", "underflow", _percent, ".2f", SHARES),
    "saturated": ("saturated (% of elements)", "saturated", _percent, ".3f", SHARES),
    "saturated blocks": ("blocks with a saturated element (%)", "saturated_blocks", _percent, ".2f",
                         SHARES),
    "zeroed blocks": ("blocks of which nothing is left (%)", "zeroed_blocks", _percent, ".2f",
                      SHARES),
    "scale spread": ("largest over smallest scale (octaves)", "scale_octaves", float, ".1f",
                     (0, 20)),
    "amax": ("log2 of the largest magnitude", "amax", _octave, ".1f", OCTAVES),
}


def quality_of(sample: Any, recipe: str) -> Any:
    """Returns the quality of the run's cast, or of another recipe's cast of the same tensor; None
    if the tensor has NaN or Inf."""
    return sample.own if recipe == AS_RUN else sample.others.get(recipe)


def _overflows(quality: Any) -> bool:
    """True if the cast produced an infinity, so that its noise has no logarithm: FP16 without a
    scale. A cast without noise has no logarithm either, but saturates nothing."""
    return quality is not None and quality.sqnr_db is None and quality.saturated > 0


def heat_map(samples: Samples, *, metric: str = "SQNR", role: str = "x", recipe: str = AS_RUN,
             layer: str | None = None, step: int | None = None, title: str = "") -> dict:
    """The plotly spec of layers (the first on top) by steps, and next to it the cell of `layer` and
    `step`, by default the last step. Raises ConfigError without samples of `role`."""
    what, field, in_unit, form, ends = pick(METRICS, metric, "metric")
    cells = {(sample.layer, sample.step): sample for sample in samples if sample.role == role}
    if not cells:
        roles = ", ".join(_values(samples, "role"))
        raise ConfigError(f"there are no samples of {role!r}"
                          + (f"; there are {roles}" if roles else " yet"))
    # gradients are sampled from the last layer to the first; the map has the same order for all
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
    # the bar is between the panels, since outside of them plotly would move the titles
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
    return list(dict.fromkeys(getattr(sample, field) for sample in samples))


def _chosen(samples: Samples, layer: str | None, step: int | None) -> Any:
    """Return the sample of `layer` at the last sampled step up to `step`; if the layer has none,
    the first layer's."""
    ours = [sample for sample in samples if sample.layer == layer]
    ours = ours or [sample for sample in samples if sample.layer == samples[0].layer]
    before = [sample for sample in ours if step is None or sample.step <= step]
    return max(before, key=lambda sample: sample.step, default=ours[0])


def _histogram(sample: Any, recipe: str) -> tuple[dict, dict, list[dict], list[dict]]:
    """Return the exponents of one tensor on axes x2 and y2, the range of x2, the range of the
    format as a window, and notes."""
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
    """Return a table of the cell under its own cast and under every other recipe's cast."""
    casts = {} if sample.own is None else {AS_RUN: sample.own, **sample.others}
    rows = []
    for name, quality in casts.items():
        noise = "exact" if quality.sqnr_db is None else f"{quality.sqnr_db:.1f}"
        rows.append((name, "overflows to Inf" if _overflows(quality) else noise,
                     f"{quality.underflow:.2%}", f"{quality.saturated:.2%}"))
    drawn = f"{sample.sampled_rows:,} of {sample.total_rows:,} rows"
    return html_table(("cast", "SQNR (dB)", "to zero", "saturated"), rows,
                      caption=f"{sample.role} of {sample.layer}, step {sample.step}; {drawn}")


def explorer(show: Callable[..., tuple[dict, str]], samples: Samples,
             start: Mapping[str, Any] | None, **more: Any) -> Explorer:
    """Return menus for everything that was sampled, starting at the last step. A click on the map
    chooses the cell."""
    if not samples:
        raise ConfigError("there are no samples to show; the first comes with step 1")
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
    """Return the map with one chosen cell, and the table of that cell."""
    ours = [sample for sample in samples if sample.role == role]
    table = quality_table(_chosen(ours, layer, step)) if ours else ""
    return heat_map(samples, role=role, layer=layer, step=step, **choices), table


def beside_race(race: dict, samples: Mapping[str, Samples]) -> dict:
    """Return `race`, the spec of `lessons.race.race_figure`, with a map on its right: the noise of
    each layer at the last sampled step, by run. Without samples, the space is empty."""
    layout = {**race["layout"]}
    for name in layout.keys() & {"xaxis", "xaxis2"}:
        layout[name] = {**layout[name], "domain": [0, 0.46]}
    small = {"type": "category", "showgrid": False, "ticks": "", "tickfont": {"size": 11}}
    return {"data": [*race["data"], *([_noise_map(samples)] if samples else [])], "layout": {
        **layout, "xaxis3": {**small, "domain": [0.64, 1], "anchor": "y3", "tickangle": -40},
        "yaxis3": {**small, "anchor": "x3", "autorange": "reversed"},
        "annotations": [note("signal over noise of the worst of x, w and dy, dB", 1, 1.01,
                             "right bottom", xref="paper", yref="paper", font={"size": 12})]}}


def _noise_map(samples: Mapping[str, Samples]) -> dict:
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
