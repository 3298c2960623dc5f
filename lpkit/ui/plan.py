"""A plan to look into: what a layout holds and how long it takes, row by row, each row with its
formula and source; why other layouts are left out; what a budget buys by a scaling law; published
runs beside the formula."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape

import ipywidgets as widgets

from lpkit.config import Config
from lpkit.predict.compare import Row, percent
from lpkit.predict.ledger import MOMENTS
from lpkit.predict.params import parameter_count
from lpkit.predict.plan import USABLE_MEMORY_SHARE, Option, Plan, plan
from lpkit.predict.scaling import FLOPS_PER_PARAMETER_AND_TOKEN, LAWS, Law
from lpkit.predict.units import duration, quantity
from lpkit.tables import FAINT, FONT, GRID, INK, html_table
from lpkit.techniques.machines import Machine
from lpkit.ui.memory import COLOURS as MEMORY_COLOURS
from lpkit.ui.style import COLOURS

KINDS = {   # of the rows of a step's time
    "products": COLOURS[0], "attention": COLOURS[2], "limited by memory": COLOURS[3],
    "recomputation": "#e0a3ad",
    "communication": COLOURS[1], "idle": COLOURS[6],
}
KIND_OF = {     # what is not here: communication where the name has a colon, else a product
    "attention": "attention", "norms, activations, loss": "limited by memory",
    "weight copies": "limited by memory",
    "optimizer": "limited by memory", "recomputation": "recomputation", "pipeline: bubble": "idle",
}
ROW_PIXELS, GAP_PIXELS, SHOWN = 25, 76, 6
POINTS = 81         # of a curve


def plan_view(model: Config, machine: Machine, tokens: float, devices: int, budget: float,
              deadline: float,
              ) -> tuple[dict, str]:
    """For an Explorer. Budget in dollars, deadline in seconds, infinite: no limit. The best layout
    as a figure; the next ones, and the reasons why the rest are left out, as tables."""
    budget, deadline = (None if math.isinf(limit) else limit for limit in (budget, deadline))
    found = plan(model, tokens, machine, devices=devices, budget=budget, deadline_seconds=deadline)
    figure = option_figure(found.options[0], found) if found.options else _nothing(found)
    return figure, _ranked(found) + _refused(found)


def layouts_view(found: Plan) -> tuple[Callable[[Option], tuple[dict, str]],
                                       dict[str, widgets.Dropdown]]:
    """A function for an Explorer, and its control: one layout of a plan, its rows open to formula
    and source.

    show, controls = layouts_view(found); Explorer(show, **controls)
    """
    # its words want the whole row
    menu = widgets.Dropdown(options=[(f"{i}. {_words(option)}", option)
                                     for i, option in enumerate(found.options, 1)],
                            layout=widgets.Layout(grid_area="1 / 1 / 2 / -1"))
    return lambda layout: (option_figure(layout, found), opened(layout)), {"layout": menu}


def option_figure(option: Option, found: Plan) -> dict:
    """The plotly spec of two staircases: bytes of a device at the peak, up to the device's; seconds
    of a step. Each row begins where the one before it ended. What hides behind other rows is drawn
    pale, under the rows that it hides behind."""
    held, step, on, moment = option.held, option.step, found.machine, option.held.peak_moment
    sizes = held.at(moment)
    times = [(row.name, row.seconds, row.hidden_seconds, row.formula) for row in step.rows]
    formulas = {row.name: row.formula for row in held.rows}
    data = [_stairs([(name, size, 0.0, formulas[name]) for name, size in sizes.items()],
                    [MEMORY_COLOURS[name] for name in sizes], "bytes", name="bytes",
                    showlegend=False)]
    starts = _starts([row[1] for row in times])
    for kind, colour in KINDS.items():
        rows = [(row, start) for row, start in zip(times, starts) if _kind(row[0]) == kind
                and row[1]]
        if rows:
            data.append(_stairs([row for row, _ in rows], colour, "seconds", name=kind,
                                starts=[start for _, start in rows], xaxis="x2", yaxis="y2"))
    hidden = [(row, start) for row, start in zip(times, starts) if row[2]]
    if hidden:
        data.append(_stairs([(name, behind, 0.0, f"hidden behind other rows. {why}")
                             for (name, _, behind, why), _ in hidden], COLOURS[1], "seconds",
                            name="hidden communication", opacity=0.35, xaxis="x2", yaxis="y2",
                            starts=[max(0.0, start - row[2]) for row, start in hidden], text=""))
    below = ROW_PIXELS * len(times)
    height = ROW_PIXELS * len(sizes) + GAP_PIXELS + below
    # far outside it would squeeze the stairs
    limit = (on.memory_bytes if held.peak_bytes > 0.1 * on.memory_bytes else None)
    ends = (f"; dotted: the usable {USABLE_MEMORY_SHARE:.0%} of "
            f"{quantity(on.memory_bytes, 'bytes')}" if limit else "")
    cost = "" if option.paid.cost is None else f", {_dollars(option)}"
    title = f"{option.layout.devices:,} x {on.title}: {duration(option.paid.seconds)}{cost}, MFU {step.mfu:.0%}"
    axis = {"exponentformat": "SI", "rangemode": "tozero", "zeroline": False}
    names = {"autorange": "reversed", "ticks": "", "showgrid": False, "type": "category"}
    return {"data": data, "layout": {
        "title": {"text": title}, "barmode": "overlay", "bargap": 0.25, "height": height + 160,
        "xaxis": {**axis, "ticksuffix": "B", "anchor": "y",
                  "range": [0, 1.14 * max(held.peak_bytes, limit or 0)],
                  "title": {"text": f"bytes of a device at the peak ({moment}){ends}"}},
        "yaxis": {**names, "domain": [(below + GAP_PIXELS) / height, 1],
                  "categoryarray": list(sizes)},
        "xaxis2": {**axis, "ticksuffix": "s", "anchor": "y2",
                   "range": [0, 1.14 * step.step_seconds],
                   "title": {"text": f"seconds of a step of {quantity(step.tokens, 'tokens')}"}},
        "yaxis2": {**names, "domain": [0, below / height],
                   "categoryarray": [row[0] for row in times], "anchor": "x2"},
        "shapes": [_line(limit), _line(USABLE_MEMORY_SHARE * limit, dash="dot")] if limit else []}}


def _stairs(rows: Sequence[tuple[str, float, float, str]], colour: str | list[str], unit: str, *,
            starts: Sequence[float] | None = None, **more) -> dict:
    sizes = [row[1] for row in rows]
    says = [quantity(size, unit) for size in sizes]
    return {"type": "bar", "orientation": "h", "y": [row[0] for row in rows], "x": sizes,
            "base": list(starts if starts is not None else _starts(sizes)),
            "marker": {"color": colour}, "text": says, "textposition": "outside",
            "cliponaxis": False, "customdata": [_wrapped(row[3]) for row in rows],
            "hovertext": says,
            "hovertemplate": "%{y}: %{hovertext}<br>%{customdata}<extra></extra>", **more}


def _starts(sizes: Sequence[float]) -> list[float]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _kind(name: str) -> str:
    return KIND_OF.get(name) or ("communication" if ":" in name else "products")


def _line(x: float, *, dash: str = "dash") -> dict:
    return {"type": "line", "x0": x, "x1": x, "yref": "y domain", "y0": 0, "y1": 1,
            "layer": "below", "line": {"color": INK, "width": 1, "dash": dash}}


def _wrapped(text: str, width: int = 90) -> str:
    return re.sub(rf"(.{{1,{width}}})(?:\s+|$)", r"\1<br>", escape(text)).removesuffix("<br>")


def _words(option: Option) -> str:
    chunked = f"{option.step.micro_batches} x {option.step.sequences}"
    return f"{option.layout}; {chunked} sequences; recompute {option.recompute}"


def _dollars(option: Option) -> str:
    return "-" if option.paid.cost is None else "$" + quantity(option.paid.cost)


def _nothing(found: Plan) -> dict:
    """No bars, and a title that says so."""
    return {"data": [], "layout": {
        "title": {"text": f"None of {found.counted} layouts will do; the nearest misses stand in "
                  f"the table"}, "height": 80,
        "xaxis": {"visible": False}, "yaxis": {"visible": False}}}


def _ranked(found: Plan) -> str:
    if not found.options:
        return ""
    rows = [(str(one.layout), f"{one.step.micro_batches} x {one.step.sequences}", one.recompute,
             quantity(one.held.peak_bytes, "bytes"), duration(one.step.step_seconds),
             f"{one.step.mfu:.0%}", duration(one.paid.seconds), _dollars(one))
            for one in found.options[:SHOWN]]
    best = found.options[0].paid
    energy = ("" if best.energy_wh is None else f", {quantity(best.energy_wh, 'Wh')} at rated "
              f"power for the first")
    return html_table(("layout", "micro-batches", "recompute", "memory", "step", "MFU", "time",
                       "cost"), rows, prose=0, caption=f"{len(found.options)} of {found.counted} "
                      f"layouts will do, the {found.first} first{energy}; price "
                      f"{found.machine.price_source.partition(';')[0]}")


def _refused(found: Plan) -> str:
    rows = [(name, f"{one.layouts:,}", one.nearest) for name, one in found.refusals.items()
            if one.layouts]
    return (html_table(("left out by", "layouts", "the nearest of them"), rows, prose=2) if rows
            else "")


# Every row, to be opened.

def opened(option: Option) -> str:
    """HTML: the rows of a layout's memory and time; a click opens formula and source. The largest
    are open already."""
    held, moment = option.held, option.held.peak_moment
    sizes = held.at(moment)
    memory = [(row.name, row.bytes, quantity(row.bytes, "bytes"),
               "" if row.name in sizes else "not at the peak", row.formula, row.source,
               f"lives at: {', '.join(row.at) if len(row.at) < len(MOMENTS) else 'every moment'}")
              for row in held.rows]
    time = [(row.name, row.seconds, duration(row.seconds),
             f"and {duration(row.hidden_seconds)} hidden behind other rows" if row.hidden_seconds
             else "",
             row.formula, row.source, "") for row in option.step.rows]
    return "".join((
        f"<div style='font:13px {escape(FONT)};color:{INK};line-height:1.5;max-width:1000px'>",
        _opened(f"memory of a device: {quantity(held.peak_bytes, 'bytes')} at most", memory,
                held.peak_bytes), _opened(f"time of a step: {duration(option.step.step_seconds)}",
                                          time, option.step.step_seconds), "</div>"))


def _opened(title: str, rows: Sequence[tuple[str, float, str, str, str, str, str]],
            whole: float) -> str:
    """Rows: name, value, the value in words, what else to say of it; and, inside: formula, source,
    more."""
    largest = max(rows, key=lambda row: row[1])
    lines = [f"<div style='font-weight:600;padding:8px 0 2px'>{escape(title)}</div>"]
    for row in rows:
        name, value, says, beside, formula, source, more = row
        cells = "".join(
            f"<span style='display:inline-block;width:{width};text-align:{side}'>{escape(text)}</span>"
            for text, width, side in ((name, "15em", "left"), (says, "6em", "right"),
                                      (f"{value / whole:.1%}", "4.5em", "right")))
        cells += f"<span style='padding-left:1.5em;color:{FAINT}'>{escape(beside)}</span>"
        inside = "<br>".join(part for part in (escape(formula), _linked(source), escape(more))
                             if part)
        lines.append(f"<details{' open' if row is largest else ''} style='border-bottom:1px solid "
                     f"{GRID}'><summary "
                     f"style='cursor:pointer;font-variant-numeric:tabular-nums'>{cells}</summary><div style='padding:2px 0 6px 2em;color:{FAINT}'>{inside}</div></details>")
    return "".join(lines)


def _linked(source: str) -> str:
    link = f"<a style='color:{COLOURS[0]};text-decoration:underline' target='_blank' rel='noopener'"
    return re.sub(r"https://[^\s,;)]+", lambda found: f"{link} href='{found[0]}'>{found[0]}</a>",
                  escape(source))


# What a budget buys.

def budget_view(model: Config, machine: Machine, dollars: float, mfu: float) -> tuple[dict, str]:
    """For an Explorer: dollars as FLOPs, and the loss that they buy at each size of model, by each
    law. Dashed is beyond the sizes that the laws were fitted to."""
    dtype = "bf16" if "bf16" in machine.flops else "fp16"
    flops = dollars / machine.price_per_hour * 3600 * machine.peak_flops(dtype) * mfu
    count = parameter_count(model.model)
    return optimum_figure(flops, count), _optima(flops, count)


def optimum_figure(flops: float, parameters: float) -> dict:
    """The plotly spec: loss over size at `flops` by each law, its least marked, and the loss at
    `parameters`."""
    data, best = [], [law.optimum(flops) for law in LAWS.values()]
    low, high = min(one.parameters for one in best) / 20, max(one.parameters for one in best) * 20
    low, high = min(low, parameters / 2), max(high, parameters * 2)
    sizes = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
    for law, optimum, colour in zip(LAWS.values(), best, COLOURS):
        points = [(size, law.extrapolate(size, _tokens(flops, size))) for size in sizes]
        for inside, dash in ((True, "solid"), (False, "dash")):
            ours = [one.nats if one.inside is inside else None for _, one in points]
            if any(ours):
                data.append({"type": "scatter", "mode": "lines",
                             "name": f"{law.name}{'' if inside else ', extrapolated'}", "x": sizes,
                             "y": ours, "line": {"color": colour, "dash": dash},
                             "hoverinfo": "skip"})
        marks = ((optimum.parameters, "its least", "circle"), (parameters, "this model", "x"))
        data.append({"type": "scatter", "mode": "markers", "showlegend": False,
                     "x": [size for size, *_ in marks],
                     "y": [_loss(law, flops, size) for size, *_ in marks],
                     "marker": {"color": colour, "size": 11,
                                "symbol": [symbol for *_, symbol in marks]},
                     "text": [f"{law.name}, {words}: {quantity(size, 'parameters')} on "
                              f"{quantity(_tokens(flops, size), 'tokens')}, "
                              f"{_loss(law, flops, size):.3f} nats" for size, words, _ in marks],
                     "hovertemplate": "%{text}<extra></extra>"})
    floor = min(one.loss.nats for one in best)
    top = max(floor + 0.6, max(_loss(law, flops, parameters) for law in LAWS.values()) + 0.05)
    return {"data": data, "layout": {
        "title": {"text": f"{flops:.2e} FLOPs: the least loss (circles), and this model's "
                  f"(crosses)"}, "height": 420,
        "xaxis": {"type": "log", "title": {"text": "parameters"}, "exponentformat": "B",
                  "dtick": 1},
        "yaxis": {"title": {"text": "loss (nats a token of the authors' text)"},
                  "range": [floor - 0.05, min(top, floor + 3)]}}}


def _tokens(flops: float, parameters: float) -> float:
    return flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters


def _loss(law: Law, flops: float, parameters: float) -> float:
    return law.extrapolate(parameters, _tokens(flops, parameters)).nats


def _optima(flops: float, parameters: float) -> str:
    rows = []
    for law in LAWS.values():
        for words, size in (("least loss", law.optimum(flops).parameters),
                            ("this model", parameters)):
            tokens = _tokens(flops, size)
            said = law.extrapolate(size, tokens)
            rows.append((f"{law.name}, {words}", quantity(size), quantity(tokens),
                         f"{tokens / size:.3g}", f"{said.nats:.3f}",
                         "inside" if said.inside else "extrapolated"))
    return html_table(("law", "parameters", "tokens", "tokens each", "loss", "of its fit"), rows)


# What others measured.

def published_figure(runs: Iterable[Row], calibrated: Iterable[Row] = ()) -> dict:
    """The plotly spec: predicted over published speed of each run, a colour a paper; hollow
    diamonds are `calibrated`."""
    groups: dict[str, list[Row]] = {}
    for row in runs:
        groups.setdefault(row.where.partition(",")[0], []).append(row)
    colours = dict(zip(groups, (COLOURS[0], "#8a6d1f", COLOURS[2], "#1f7a6f", COLOURS[5])))
    data = [{"type": "scatter", "mode": "markers", "name": name,
             "marker": {"color": colours[name], "size": 9}, **_ratios(rows)}
            for name, rows in groups.items()]
    words = [{"y": rows[0].name, "xref": "paper", "text": escape(name),
              "font": {"color": colours[name]}, "showarrow": False, "bgcolor": "#ffffff",
              **({"x": 0.99, "xanchor": "right"} if _faster(rows[0]) < 1.25
                 else {"x": 0.02, "xanchor": "left"})} for name, rows in groups.items()]
    for row in calibrated:
        words.append({"x": _faster(row), "y": row.name, "text": "calibrated by one step",
                      "xanchor": "left", "xshift": 8, "bgcolor": "#ffffff", "showarrow": False})
    data.append({"type": "scatter", "mode": "markers", "name": "calibrated by one measured step",
                 **_ratios(calibrated), "marker": {"color": INK, "size": 11,
                                                   "symbol": "diamond-open", "line": {"width": 2}}})
    names = [row.name for rows in groups.values() for row in rows]
    return {"data": data, "layout": {
        "title": {"text": "Published runs: right of 1, the formula is too hopeful"},
        "height": 110 + 21 * len(names),
        "showlegend": False, "annotations": words,
        "xaxis": {"title": {"text": "predicted speed / published speed"}, "tickformat": ".1f",
                  "dtick": 0.1},
        "yaxis": {"ticks": "", "type": "category", "categoryarray": names,
                  "range": [len(names) - 0.4, -0.6]},
        "shapes": [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1,
                    "layer": "below",
                    "line": {"color": INK, "width": 1, "dash": "dot"}}]}}


def _ratios(rows: Iterable[Row]) -> dict:
    rows = list(rows)
    return {"x": [_faster(row) for row in rows], "y": [row.name for row in rows], "text": [
        f"{quantity(row.formula, row.unit)} predicted, {quantity(row.measured, row.unit)} "
        f"published ({percent(row.error)})<br>{escape(row.where)}" for row in rows],
            "hovertemplate": "%{y}<br>%{text}<extra></extra>"}


def _faster(row: Row) -> float:
    """Predicted over published speed; of seconds, published over predicted."""
    return row.measured / row.formula if row.unit == "seconds" else row.formula / row.measured
