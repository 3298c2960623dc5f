"""A plan to look into: what a layout holds and how long it takes, row by row, each row with its
formula and source; why other layouts are left out; what a budget buys by a scaling law; published
runs beside the formula."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from textwrap import wrap

import ipywidgets as widgets

from lpkit.config import Config
from lpkit.predict.compare import Row, percent
from lpkit.predict.ledger import MOMENTS
from lpkit.predict.params import parameter_count
from lpkit.predict.plan import USABLE_MEMORY_SHARE, Option, Plan, plan
from lpkit.predict.scaling import FLOPS_PER_PARAMETER_AND_TOKEN, LAWS
from lpkit.predict.units import duration, quantity
from lpkit.tables import FAINT, FONT, GRID, INK, html_table
from lpkit.techniques.machines import Machine
from lpkit.ui.draw import NAMES, axis, bars, figure, note, rule, scatter
from lpkit.ui.memory import COLOURS as MEMORY_COLOURS
from lpkit.ui.memory import limit_of
from lpkit.ui.style import COLOURS

KINDS = {   # of the rows of a step's time
    "products": COLOURS[0], "attention": COLOURS[2], "limited by memory": COLOURS[3],
    "recomputation": "#e0a3ad", "communication": COLOURS[1], "idle": COLOURS[6],
}
KIND_OF = {     # what is not here: communication where the name has a colon, else a product
    "attention": "attention", "norms, activations, loss": "limited by memory",
    "weight copies": "limited by memory", "optimizer": "limited by memory",
    "recomputation": "recomputation", "pipeline: bubble": "idle",
}
ROW_PIXELS, GAP_PIXELS, SHOWN = 25, 76, 6
POINTS = 81         # of a curve


def plan_view(model: Config, machine: Machine, tokens: float, devices: int, budget: float,
              deadline: float) -> tuple[dict, str]:
    """For an Explorer. Budget in dollars, deadline in seconds, infinite: no limit. The best layout
    as a figure; the next ones, and the reasons why the rest are left out, as tables."""
    budget, deadline = (None if math.isinf(limit) else limit for limit in (budget, deadline))
    found = plan(model, tokens, machine, devices=devices, budget=budget, deadline_seconds=deadline)
    if found.options:
        return option_figure(found.options[0], found), _ranked(found) + _refused(found)
    title = f"None of {found.counted} layouts will do; the nearest misses stand in the table"
    nothing = figure([], title, height=80, xaxis={"visible": False}, yaxis={"visible": False})
    return nothing, _refused(found)


def layouts_view(found: Plan) -> tuple[Callable[[Option], tuple[dict, str]],
                                       dict[str, widgets.Dropdown]]:
    """A function for an Explorer, and its control: one layout of a plan, its rows open to formula
    and source.

    show, controls = layouts_view(found); Explorer(show, **controls)
    """
    def show(layout: Option) -> tuple[dict, str]:
        return option_figure(layout, found), opened(layout)

    names = [(f"{i}. {option.layout}; {_chunks(option)} sequences; recompute {option.recompute}",
              option) for i, option in enumerate(found.options, 1)]
    # its words want the whole row
    return show, {"layout": widgets.Dropdown(options=names, layout={"grid_area": "1 / 1 / 2 / -1"})}


def option_figure(option: Option, found: Plan) -> dict:
    """The plotly spec of two staircases: bytes of a device at the peak, up to the device's; seconds
    of a step. Each row begins where the one before it ended. What hides behind other rows is drawn
    pale, under the rows that it hides behind."""
    held, step, on = option.held, option.step, found.machine
    sizes, right = held.at(held.peak_moment), {"xaxis": "x2", "yaxis": "y2"}
    rows = [row for row in held.rows if row.name in sizes]
    data = [_stairs([(row.name, start, sizes[row.name], row.formula)
                     for row, start in zip(rows, _starts(sizes.values()))], "bytes",
                    name="bytes", colour=[MEMORY_COLOURS[name] for name in sizes],
                    showlegend=False)]
    times = list(zip(step.rows, _starts(row.seconds for row in step.rows)))
    for kind, colour in KINDS.items():
        stairs = [(row.name, start, row.seconds, row.formula) for row, start in times
                  if _kind(row.name) == kind and row.seconds]
        if stairs:
            data.append(_stairs(stairs, "seconds", name=kind, colour=colour, **right))
    hidden = [(row.name, max(0.0, start - row.hidden_seconds), row.hidden_seconds,
               f"hidden behind other rows. {row.formula}")
              for row, start in times if row.hidden_seconds]
    if hidden:
        data.append(_stairs(hidden, "seconds", name="hidden communication", colour=COLOURS[1],
                            opacity=0.35, text="", **right))

    below = ROW_PIXELS * len(times)
    height = ROW_PIXELS * len(sizes) + GAP_PIXELS + below
    limit, ends, shapes = limit_of(held), "", []
    if limit:
        ends = f"; dotted: the usable {USABLE_MEMORY_SHARE:.0%} of {quantity(limit, 'bytes')}"
        shapes = [rule(x=x, colour=INK, dash=dash, yref="y domain", layer="below")
                  for x, dash in ((limit, "dash"), (USABLE_MEMORY_SHARE * limit, "dot"))]
    cost = "" if option.paid.cost is None else f", {_dollars(option)}"
    numbers = {"exponentformat": "SI", "rangemode": "tozero", "zeroline": False}
    names = {**NAMES, "type": "category"}
    return figure(
        data, f"{option.layout.devices:,} x {on.title}: {duration(option.paid.seconds)}{cost}, "
        f"MFU {step.mfu:.0%}", barmode="overlay", bargap=0.25, height=height + 160, shapes=shapes,
        xaxis=axis(f"bytes of a device at the peak ({held.peak_moment}){ends}", **numbers,
                   ticksuffix="B", anchor="y",
                   range=[0, 1.14 * max(held.peak_bytes, limit or 0)]),
        yaxis={**names, "domain": [(below + GAP_PIXELS) / height, 1], "categoryarray": list(sizes)},
        xaxis2=axis(f"seconds of a step of {quantity(step.tokens, 'tokens')}", **numbers,
                    ticksuffix="s", anchor="y2", range=[0, 1.14 * step.step_seconds]),
        yaxis2={**names, "domain": [0, below / height], "anchor": "x2",
                "categoryarray": [row.name for row in step.rows]})


def _stairs(rows: Sequence[tuple[str, float, float, str]], unit: str, **more) -> dict:
    """Rows: name, start, size, formula."""
    names, starts, sizes, formulas = zip(*rows)
    says = [quantity(size, unit) for size in sizes]
    more = {"text": says, "textposition": "outside", "cliponaxis": False, **more}
    return bars(names, sizes, base=list(starts), hovertext=says,
                customdata=["<br>".join(wrap(escape(formula), 90)) for formula in formulas],
                hover="%{y}: %{hovertext}<br>%{customdata}<extra></extra>", **more)


def _starts(sizes: Iterable[float]) -> list[float]:
    """Where each begins, when they lie end to end."""
    return [0.0, *itertools.accumulate(sizes)][:-1]


def _kind(name: str) -> str:
    return KIND_OF.get(name) or ("communication" if ":" in name else "products")


def _chunks(option: Option) -> str:
    return f"{option.step.micro_batches} x {option.step.sequences}"


def _dollars(option: Option) -> str:
    return "-" if option.paid.cost is None else "$" + quantity(option.paid.cost)


def _ranked(found: Plan) -> str:
    rows = [(option.layout, _chunks(option), option.recompute,
             quantity(option.held.peak_bytes, "bytes"), duration(option.step.step_seconds),
             f"{option.step.mfu:.0%}", duration(option.paid.seconds), _dollars(option))
            for option in found.options[:SHOWN]]
    caption = f"{len(found.options)} of {found.counted} layouts will do, the {found.first} first"
    energy = found.options[0].paid.energy_wh
    if energy is not None:
        caption += f", {quantity(energy, 'Wh')} at rated power for the first"
    heads = ("layout", "micro-batches", "recompute", "memory", "step", "MFU", "time", "cost")
    price = found.machine.price_source.partition(";")[0]
    return html_table(heads, rows, prose=0, caption=f"{caption}; price {price}")


def _refused(found: Plan) -> str:
    rows = [(name, f"{refusal.layouts:,}", refusal.nearest)
            for name, refusal in found.refusals.items() if refusal.layouts]
    heads = ("left out by", "layouts", "the nearest of them")
    return html_table(heads, rows, prose=2) if rows else ""


# Every row, to be opened.

def opened(option: Option) -> str:
    """HTML: the rows of a layout's memory and time; a click opens formula and source. The largest
    are open already."""
    held, step = option.held, option.step
    sizes, memory, time = held.at(held.peak_moment), [], []
    for row in held.rows:
        moments = ", ".join(row.at) if len(row.at) < len(MOMENTS) else "every moment"
        memory.append((row, row.bytes, quantity(row.bytes, "bytes"),
                       "" if row.name in sizes else "not at the peak", f"lives at: {moments}"))
    for row in step.rows:
        beside = f"and {duration(row.hidden_seconds)} hidden behind other rows"
        time.append((row, row.seconds, duration(row.seconds), beside if row.hidden_seconds else "",
                     ""))
    style = f"font:13px {escape(FONT)};color:{INK};line-height:1.5;max-width:1000px"
    peak = quantity(held.peak_bytes, "bytes")
    return (f"<div style='{style}'>"
            + _opened(f"memory of a device: {peak} at most", memory, held.peak_bytes)
            + _opened(f"time of a step: {duration(step.step_seconds)}", time, step.step_seconds)
            + "</div>")


def _opened(title: str, rows: Sequence[tuple], whole: float) -> str:
    """Rows: a row with name, formula and source; its value, also in words; what else to say of it;
    and what to say inside."""
    largest = max(rows, key=lambda row: row[1])
    lines = [f"<div style='font-weight:600;padding:8px 0 2px'>{escape(title)}</div>"]
    for line in rows:
        row, value, says, beside, more = line
        cells = ""
        for text, width, side in ((row.name, "15em", "left"), (says, "6em", "right"),
                                  (f"{value / whole:.1%}", "4.5em", "right")):
            cells += (f"<span style='display:inline-block;width:{width};text-align:{side}'>"
                      f"{escape(text)}</span>")
        inside = "<br>".join(filter(None, (escape(row.formula), _linked(row.source), more)))
        lines.append(
            f"<details{' open' if line is largest else ''} style='border-bottom:1px solid {GRID}'>"
            f"<summary style='cursor:pointer;font-variant-numeric:tabular-nums'>{cells}"
            f"<span style='padding-left:1.5em;color:{FAINT}'>{beside}</span></summary>"
            f"<div style='padding:2px 0 6px 2em;color:{FAINT}'>{inside}</div></details>")
    return "".join(lines)


def _linked(source: str) -> str:
    style = f"color:{COLOURS[0]};text-decoration:underline"
    link = rf"<a style='{style}' target='_blank' rel='noopener' href='\g<0>'>\g<0></a>"
    return re.sub(r"https://[^\s,;)]+", link, escape(source))


# What a budget buys.

def budget_view(model: Config, machine: Machine, dollars: float, mfu: float) -> tuple[dict, str]:
    """For an Explorer: dollars as FLOPs, and the loss that they buy at each size of model, by each
    law. Dashed is beyond the sizes that the laws were fitted to."""
    dtype = "bf16" if "bf16" in machine.flops else "fp16"
    flops = dollars / machine.price_per_hour * 3600 * machine.peak_flops(dtype) * mfu
    count = parameter_count(model.model)
    rows = []
    for law in LAWS.values():
        for words, size in (("least loss", law.optimum(flops).parameters), ("this model", count)):
            tokens = _tokens(flops, size)
            loss = law.extrapolate(size, tokens)
            rows.append((f"{law.name}, {words}", quantity(size), quantity(tokens),
                         f"{tokens / size:.3g}", f"{loss.nats:.3f}",
                         "inside" if loss.inside else "extrapolated"))
    heads = ("law", "parameters", "tokens", "tokens each", "loss", "of its fit")
    return optimum_figure(flops, count), html_table(heads, rows)


def optimum_figure(flops: float, parameters: float) -> dict:
    """The plotly spec: loss over size at `flops` by each law, its least marked, and the loss at
    `parameters`."""
    best = [law.optimum(flops) for law in LAWS.values()]
    low = min(*(optimum.parameters / 20 for optimum in best), parameters / 2)
    high = max(*(optimum.parameters * 20 for optimum in best), parameters * 2)
    sizes = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
    data, floor = [], min(optimum.loss.nats for optimum in best)
    top = floor + 0.6
    for law, optimum, colour in zip(LAWS.values(), best, COLOURS):
        losses = [law.extrapolate(size, _tokens(flops, size)) for size in sizes]
        for inside, name, dash in ((True, law.name, "solid"),
                                   (False, f"{law.name}, extrapolated", "dash")):
            ours = [loss.nats if loss.inside is inside else None for loss in losses]
            if any(ours):
                data.append(scatter(sizes, ours, name, colour, line={"dash": dash}, hover=None))
        here = law.extrapolate(parameters, _tokens(flops, parameters)).nats
        top = max(top, here + 0.05)
        marks = ((optimum.parameters, optimum.loss.nats, "its least"),
                 (parameters, here, "this model"))
        data.append(scatter(
            [size for size, *_ in marks], [nats for _, nats, _ in marks], "", colour,
            mode="markers", marker={"size": 11, "symbol": ["circle", "x"]}, showlegend=False,
            text=[f"{law.name}, {words}: {quantity(size, 'parameters')} on "
                  f"{quantity(_tokens(flops, size), 'tokens')}, {nats:.3f} nats"
                  for size, nats, words in marks], hover="%{text}"))
    return figure(
        data, f"{flops:.2e} FLOPs: the least loss (circles), and this model's (crosses)",
        height=420, xaxis=axis("parameters", type="log", exponentformat="B", dtick=1),
        yaxis=axis("loss (nats a token of the authors' text)",
                   range=[floor - 0.05, min(top, floor + 3)]))


def _tokens(flops: float, parameters: float) -> float:
    return flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters


# What others measured.

def published_figure(runs: Iterable[Row], calibrated: Iterable[Row] = ()) -> dict:
    """The plotly spec: predicted over published speed of each run, a colour a paper; hollow
    diamonds are `calibrated`."""
    papers: dict[str, list[Row]] = {}
    for row in runs:
        papers.setdefault(row.where.partition(",")[0], []).append(row)
    calibrated, data, notes, names = list(calibrated), [], [], []
    white = {"bgcolor": "#ffffff"}
    for (paper, rows), colour in zip(papers.items(), (COLOURS[0], "#8a6d1f", COLOURS[2], "#1f7a6f",
                                                      COLOURS[5])):
        data.append(_ratios(paper, rows, {"color": colour, "size": 9}))
        names += [row.name for row in rows]
        x, at = (0.99, "right auto") if _faster(rows[0]) < 1.25 else (0.02, "left auto")
        notes.append(note(escape(paper), x, rows[0].name, at, xref="paper", **white,
                          font={"color": colour}))
    notes += [note("calibrated by one step", _faster(row), row.name, "left auto", xshift=8, **white)
              for row in calibrated]
    data.append(_ratios("calibrated by one measured step", calibrated,
                        {"color": INK, "size": 11, "symbol": "diamond-open", "line": {"width": 2}}))
    return figure(
        data, "Published runs: right of 1, the formula is too hopeful", showlegend=False,
        height=110 + 21 * len(names), annotations=notes,
        xaxis=axis("predicted speed / published speed", tickformat=".1f", dtick=0.1),
        yaxis={"ticks": "", "type": "category", "categoryarray": names,
               "range": [len(names) - 0.4, -0.6]},
        shapes=[rule(x=1, colour=INK, layer="below")])


def _ratios(name: str, rows: Sequence[Row], marker: dict) -> dict:
    words = [f"{quantity(row.formula, row.unit)} predicted, {quantity(row.measured, row.unit)} "
             f"published ({percent(row.error)})<br>{escape(row.where)}" for row in rows]
    return scatter(map(_faster, rows), [row.name for row in rows], name, mode="markers",
                   marker=marker, text=words, hover="%{y}<br>%{text}<extra></extra>")


def _faster(row: Row) -> float:
    """Predicted over published speed; of seconds, published over predicted."""
    return row.measured / row.formula if row.unit == "seconds" else row.formula / row.measured
