"""A plan to look into: what a layout holds and how long it takes, row by row, each row with its
formula and source; why other layouts are left out; what a budget buys by a scaling law; and days,
loss and dollars, which cannot all be least."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from textwrap import wrap

from lpkit.config import Config
from lpkit.predict.frontier import Point, frontier
from lpkit.predict.ledger import MOMENTS, Memory
from lpkit.predict.params import parameter_count
from lpkit.predict.plan import USABLE_MEMORY_SHARE, Option, Plan, plan
from lpkit.predict.scaling import FLOPS_PER_PARAMETER_AND_TOKEN, LAWS
from lpkit.predict.time import StepTime
from lpkit.predict.units import between, duration, quantity
from lpkit.tables import FAINT, INK, html_table, opened_rows
from lpkit.techniques.machines import Machine
from lpkit.ui.draw import BYTES, NAMES, axis, bars, figure, rule, scatter
from lpkit.ui.memory import ROW_COLOURS, limit_of
from lpkit.ui.style import COLOURS

KINDS = {   # of the rows of a step's time
    "products": COLOURS[0], "attention": COLOURS[2], "limited by memory": COLOURS[3],
    "recomputation": "#e0a3ad", "communication": COLOURS[1], "idle": COLOURS[6],
}
KIND_OF = {     # what is not here: communication where the name has a colon, else a product
    "attention": "attention", "norms, activations, loss": "limited by memory",
    "weight copies": "limited by memory", "optimizer": "limited by memory",
    "recomputation": "recomputation", "pipeline: bubble": "idle", "between kernels": "idle",
}
ROW_PIXELS, GAP_PIXELS, SHOWN = 25, 110, 6
POINTS = 81         # of a curve
LOGARITHMIC = {"type": "log", "dtick": 1}
GOALS = {"days": axis("days", **LOGARITHMIC), "loss": axis("loss (nats a token)", type="linear"),
         "dollars": axis("US dollars", **LOGARITHMIC)}
SHADES = {      # by colour: how, the ends, and ticks; fixed, so that limits do not repaint points
    "days": (math.log10, (-3, 3), {power: f"{10.0**power:,g}" for power in range(-3, 4)}),
    "loss": (float, (1.9, 2.7), {loss: f"{loss:.1f}" for loss in (1.9, 2.1, 2.3, 2.5, 2.7)}),
}
PANELS = (("loss", "days", {"coloraxis": "coloraxis", "yaxis": "y"}),
          ("days", "loss", {"coloraxis": "coloraxis2", "yaxis": "y2"}))
SYMBOLS = {"formula": "circle", "extrapolated": "circle-open", "measured": "diamond"}
EVERY = "every machine"
View = Callable[..., tuple[dict, str]]      # for an Explorer: a figure, and a table


# Layouts.

def plan_view(model: Config, machine: Machine, tokens: float, devices: int, budget: float,
              deadline: float) -> tuple[dict, str]:
    """For an Explorer. Budget in dollars, deadline in seconds, infinite: no limit. The best layout
    as a figure; the next ones, and the reasons why the rest are left out, as tables."""
    budget, deadline = (None if math.isinf(limit) else limit for limit in (budget, deadline))
    found = plan(model, tokens, machine, devices=devices, budget=budget, deadline_seconds=deadline)
    rows = [(name, f"{refusal.layouts:,}", refusal.nearest)
            for name, refusal in found.refusals.items() if refusal.layouts]
    heads = ("left out by", "layouts", "the nearest of them")
    refused = html_table(heads, rows) if rows else ""
    if found.options:
        return option_figure(found.options[0], found), _ranked(found) + refused
    title = f"None of {found.counted} layouts will do; the nearest misses stand in the table"
    hidden = {"visible": False}
    return figure([], title, height=80, xaxis=hidden, yaxis=hidden), refused


def layouts_view(found: Plan) -> tuple[View, dict[str, dict[str, Option]]]:
    """One layout of a plan, its rows open to formula and source.

    show, controls = layouts_view(found); Explorer(show, **controls)
    """
    def show(layout: Option) -> tuple[dict, str]:
        return option_figure(layout, found), opened(layout)

    return show, {"layout": {
        f"{i}. {option.layout}; {_chunks(option)} sequences; recompute {option.recompute}": option
        for i, option in enumerate(found.options, 1)}}


def option_figure(option: Option, found: Plan) -> dict:
    """The plotly spec of two staircases: bytes of a device at the peak, up to the device's; seconds
    of a step. Each row begins where the one before it ended. What hides behind other rows is drawn
    pale, under the rows that it hides behind."""
    held, step = option.memory, option.time
    sizes, right = held.at(held.peak_moment), {"xaxis": "x2", "yaxis": "y2"}
    rows = [row for row in held.rows if row.name in sizes]
    data = [_stairs([(row.name, start, sizes[row.name], row.formula)
                     for row, start in zip(rows, _starts(sizes.values()))], "bytes",
                    name="bytes", colour=[ROW_COLOURS[name] for name in sizes], showlegend=False)]
    kinds: dict[str, list] = {kind: [] for kind in KINDS}
    hidden = []
    for row, start in zip(step.rows, _starts(row.seconds for row in step.rows)):
        kind = kind_of(row.name)
        if row.seconds:
            kinds[kind].append((row.name, start, row.seconds, row.formula))
        if row.hidden_seconds:
            hidden.append((row.name, max(0.0, start - row.hidden_seconds), row.hidden_seconds,
                           f"hidden behind other rows. {row.formula}"))
    data += [_stairs(stairs, "seconds", name=kind, colour=KINDS[kind], **right)
             for kind, stairs in kinds.items() if stairs]
    if hidden:
        data.append(_stairs(hidden, "seconds", name="hidden communication", colour=COLOURS[1],
                            opacity=0.35, text="", **right))

    below = ROW_PIXELS * len(step.rows)
    height = ROW_PIXELS * len(sizes) + GAP_PIXELS + below
    limit, ends, shapes = limit_of(held), "", []
    if limit:
        ends = f"; dotted: the usable {USABLE_MEMORY_SHARE:.0%} of {quantity(limit, 'bytes')}"
        shapes = [rule(x=x, colour=INK, dash=dash, yref="y domain", layer="below")
                  for x, dash in ((limit, "dash"), (USABLE_MEMORY_SHARE * limit, "dot"))]
    cost = "" if option.bill.cost is None else f", {_dollars(option)}"
    title = (f"{option.layout.devices:,} x {found.machine.title}: {duration(option.bill.seconds)} "
             f"({between(option.bill.range_of(option.bill.seconds), duration)}){cost}, "
             f"MFU {step.mfu:.0%}")
    names = {**NAMES, "type": "category"}
    return figure(
        data, title, barmode="overlay", bargap=0.25, height=height + 120, shapes=shapes,
        legend={"y": (below + 6) / height},     # of the seconds alone
        xaxis=axis(f"bytes of a device at the peak ({held.peak_moment}){ends}", **BYTES, anchor="y",
                   zeroline=False, range=[0, 1.14 * max(held.peak_bytes, limit or 0)]),
        yaxis={**names, "domain": [(below + GAP_PIXELS) / height, 1], "categoryarray": list(sizes)},
        xaxis2=axis(f"seconds of a step of {quantity(step.tokens, 'tokens')}", ticksuffix="s",
                    exponentformat="SI", anchor="y2", zeroline=False,
                    range=[0, 1.14 * step.step_seconds]),
        yaxis2={**names, "domain": [0, below / height], "anchor": "x2",
                "categoryarray": [row.name for row in step.rows]})


def kind_of(row: str) -> str:
    """Of KINDS, by the name of a row of a step's time."""
    return KIND_OF.get(row, "communication" if ":" in row else "products")


def _stairs(rows: Sequence[tuple[str, float, float, str]], unit: str, **more) -> dict:
    """Rows: name, start, size, formula."""
    names, starts, sizes, formulas = zip(*rows)
    says = [quantity(size, unit) for size in sizes]
    return bars(names, sizes, base=list(starts), hovertext=says,
                customdata=["<br>".join(wrap(escape(formula), 90)) for formula in formulas],
                hover="%{y}: %{hovertext}<br>%{customdata}<extra></extra>",
                **{"text": says, **more})


def _starts(sizes: Iterable[float]) -> list[float]:
    """Where each begins, when they lie end to end."""
    return [0.0, *itertools.accumulate(sizes)]


def _chunks(option: Option) -> str:
    return f"{option.time.micro_batches} x {option.time.sequences}"


def _dollars(option: Option) -> str:
    return "-" if option.bill.cost is None else "$" + quantity(option.bill.cost)


def _ranked(found: Plan) -> str:
    rows = [(option.layout, _chunks(option), option.recompute,
             quantity(option.memory.peak_bytes, "bytes"), duration(option.time.step_seconds),
             f"{option.time.mfu:.0%}", duration(option.bill.seconds),
             between(option.bill.range_of(option.bill.seconds), duration), _dollars(option),
             "trains" if option.trained else "predicts")
            for option in found.options[:SHOWN]]
    caption = f"{len(found.options)} of {found.counted} layouts will do; {found.order}"
    energy = found.options[0].bill.energy_wh
    if energy is not None:
        caption += f", {quantity(energy, 'Wh')} at rated power for the first"
    heads = ("layout", "micro-batches", "recompute", "memory", "step", "MFU", "time", "nine of ten",
             "cost", "lpkit")
    price = found.machine.price_source.partition(";")[0]
    caption += f"; nine of ten: {found.options[0].bill.spread.words}"
    return html_table(heads, rows, caption=f"{caption}; price {price}")


def opened(option: Option) -> str:
    """HTML: the rows of a layout's memory and time; a click opens formula and source. The largest
    are open already."""
    return opened_memory(option.memory) + opened_time(option.time)


def opened_memory(held: Memory) -> str:
    """As `opened`, of what a device holds."""
    sizes, rows = held.at(held.peak_moment), []
    for row in held.rows:
        moments = ", ".join(row.at) if len(row.at) < len(MOMENTS) else "every moment"
        rows.append((row.name, row.bytes, quantity(row.bytes, "bytes"),
                     "" if row.name in sizes else "not at the peak",
                     (row.formula, row.source, f"lives at: {moments}")))
    return opened_rows(f"memory of a device: {quantity(held.peak_bytes, 'bytes')} at most", rows,
                       held.peak_bytes)


def opened_time(step: StepTime) -> str:
    """As `opened`, of a step's seconds."""
    rows = []
    for row in step.rows:
        hidden = f"and {duration(row.hidden_seconds)} hidden behind other rows"
        rows.append((row.name, row.seconds, duration(row.seconds),
                     hidden if row.hidden_seconds else "", (row.formula, row.source)))
    return opened_rows(f"time of a step: {duration(step.step_seconds)}", rows, step.step_seconds)


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
        ends, nats = (optimum.parameters, parameters), (optimum.loss.nats, here)
        data.append(scatter(
            ends, nats, "", colour, mode="markers", showlegend=False, hover="%{text}",
            marker={"size": 11, "symbol": ["circle", "x"]},
            text=[f"{law.name}, {words}: {quantity(size, 'parameters')} on "
                  f"{quantity(_tokens(flops, size), 'tokens')}, {loss:.3f} nats"
                  for size, loss, words in zip(ends, nats, ("its least", "this model"))]))
    return figure(
        data, f"{flops:.2e} FLOPs: the least loss (circles), and this model's (crosses)",
        height=420, xaxis=axis("parameters", type="log", exponentformat="B", dtick=1),
        yaxis=axis("loss (nats a token of the authors' text)",
                   range=[floor - 0.05, min(top, floor + 3)]))


def _tokens(flops: float, parameters: float) -> float:
    return flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters


# Days, loss and dollars cannot all be least.

def frontier_figure(points: Sequence[Point], *, title: str = "") -> dict:
    """The plotly spec: two panels over dollars. Above loss, days in colour; below days, loss in
    colour; a point has one place across in both. Large: no other beats it in all three. The line
    is the least loss that dollars buy."""
    best = {id(point) for point in frontier(points, least=GOALS)}
    groups: dict[tuple[bool, str], list[Point]] = {}
    for point in points:
        groups.setdefault((id(point) in best, point.where), []).append(point)
    cheapest = sorted(frontier(points, least=("dollars", "loss")), key=_cost)
    data = [scatter(map(_cost, cheapest), [point.values["loss"] for point in cheapest],
                    "least loss for the money", FAINT, line={"shape": "hv"}, hover=None)]
    for (leads, where), group in sorted(groups.items()):
        look = {"size": 10 if leads else 6, "opacity": 1.0 if leads else 0.4,
                "symbol": SYMBOLS.get(where, "circle"), "line": {"width": leads, "color": INK}}
        for goal, shade, axes in PANELS:
            colour = [SHADES[shade][0](point.values[shade]) for point in group]
            data.append(scatter(
                map(_cost, group), [point.values[goal] for point in group],
                f"{'not beaten' if leads else 'beaten'}, {where}", mode="markers",
                marker={**look, "color": colour, "coloraxis": axes["coloraxis"]},
                text=list(map(_facts, group)), hover="%{text}<extra></extra>",
                xaxis="x", yaxis=axes["yaxis"], showlegend=goal == "loss", legendgroup=where))
    return figure(
        data, title, height=760, showlegend=True, margin={"b": 130},
        legend={"yref": "container", "y": 0, "yanchor": "bottom"},
        xaxis={**GOALS["dollars"], "anchor": "y2"},
        yaxis={**GOALS["loss"], "domain": [0.54, 1]},
        yaxis2={**GOALS["days"], "domain": [0, 0.48], "anchor": "x"},
        coloraxis=_shades("days", 0.77), coloraxis2=_shades("loss", 0.24))


def _cost(point: Point) -> float:
    return point.values["dollars"]


def _shades(goal: str, y: float) -> dict:
    _, (low, high), ticks = SHADES[goal]
    return {"colorscale": "Cividis", "cmin": low, "cmax": high,
            "colorbar": {"title": {"text": goal, "font": {"size": 12}}, "thickness": 10,
                         "len": 0.44, "y": y, "tickvals": list(ticks),
                         "ticktext": list(ticks.values())}}


def _facts(point: Point) -> str:
    values = [f"{name.replace('_', ' ')}: {quantity(value)}"
              for name, value in point.values.items()]
    return "<br>".join([point.name, *values, point.facts.get("range", ""),
                        point.facts.get("layout", ""),
                        point.facts.get("note", point.where)])


def frontier_view(points: Sequence[Point]) -> tuple[View, dict[str, list]]:
    """Which machine, and at most how many dollars and days.

    show, controls = frontier_view(points); Explorer(show, **controls)
    """
    machines = {point.facts.get("machine", "") for point in points}
    controls = {"machine": [EVERY, *sorted(machines)],
                "dollars_at_most": _steps([point.values["dollars"] for point in points]),
                "days_at_most": _steps([point.values["days"] for point in points])}

    def show(machine: str, dollars_at_most: float, days_at_most: float) -> tuple[dict, str]:
        inside = [point for point in points if machine in (EVERY, point.facts.get("machine"))
                  and point.values["dollars"] <= dollars_at_most
                  and point.values["days"] <= days_at_most]
        best = sorted(frontier(inside, least=GOALS), key=lambda point: point.values["loss"])
        rows = [(point.name, quantity(point.values["days"], "days"), f"{point.values['loss']:.3f}",
                 "$" + quantity(point.values["dollars"]), point.where) for point in best[:12]]
        title = f"{len(best)} of {len(inside)} are not beaten in speed, quality and cost"
        heads = ("not beaten", "time", "loss", "cost", "loss is")
        return frontier_figure(inside, title=title), html_table(heads, rows)

    return show, controls


def _steps(values: Sequence[float]) -> list[float]:
    """Ten limits from all points to few, the widest first; rounded up to two digits."""
    limits = set()
    for value in values:
        unit = 10.0 ** (math.floor(math.log10(value)) - 1)
        limits.add(float(f"{math.ceil(value / unit) * unit:.2g}"))
    return sorted(limits, reverse=True)[::max(1, len(limits) // 10)]
