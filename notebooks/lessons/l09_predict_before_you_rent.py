"""Lesson 09, predict before you rent: its study, its figures and its exercises."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from random import Random
from textwrap import wrap
from typing import Any

from lessons.figures.colours import ANSWER_COLOURS, WARNING
from lessons.figures.drawing import BYTES, NAMES, axis, bars, figure, note, rule, scatter
from lessons.figures.opened import KIND_OF, KINDS, opened_memory, opened_time
from lessons.figures.step_bytes import ROW_COLOURS, limit_of
from lessons.figures.style import COLOURS
from lessons.figures.waiting import progress
from lessons.judging.judge import Exercise, adding_to
from lessons.published import Run, optimism
from lessons.terms import moved_terms, terms_table
from lessons.timing import in_turns
from lpkit import hardware
from lpkit.commands import machine as find_machine
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.predict.compare import Row, disturbance, percent
from lpkit.predict.evidence import efficiency
from lpkit.predict.links import Link
from lpkit.predict.params import parameter_count
from lpkit.predict.plan import USABLE_MEMORY_SHARE, Option, Plan, plan
from lpkit.predict.scaling import DEFAULT, FLOPS_PER_PARAMETER_AND_TOKEN, LAWS
from lpkit.predict.stacks import STACKS
from lpkit.predict.time import StepTime, bill, calibrate, step_time
from lpkit.predict.units import between, duration, quantity
from lpkit.presets import PRESETS
from lpkit.tables import FAINT, INK, html_table
from lpkit.techniques import machines as known
from lpkit.techniques.machines import Machine, find, mixed_prices

# notebook 09 imports these from here
__all__ = ["CATALOGUE", "PRESETS", "STACKS", "Link", "calibrate", "disturbance", "efficiency",
           "find_machine", "hardware", "in_turns", "progress"]
# only machines with a price, because the explorers of this notebook show dollars
CATALOGUE = {name: machine for name, machine in known.CATALOGUE.items() if machine.price_per_hour}

# ---- The study

# The impossible triangle: speed, quality and cost cannot all be best. A point beats another point
# if it is at least as good on every axis and better on at least one axis (Pareto).

@dataclass(frozen=True, kw_only=True)
class Point:
    """A way to train a model, with its cost and its quality."""

    name: str
    values: Mapping[str, float]     # by axis: "days", "dollars", "loss", ...
    # what a figure shows or filters by: "machine", "devices", "layout", ...
    facts: Mapping[str, Any] = field(default_factory=dict)
    where: str = "formula"          # source of the loss: "formula", "extrapolated" or "measured"


def frontier(points: Iterable[Point], *, least: Sequence[str] = (),
             most: Sequence[str] = ()) -> tuple[Point, ...]:
    """Return the points that no other point beats, in their order. Of equal points, all are kept.

    least: the axes on which the smallest value is best
    most:  the axes on which the largest value is best

    Raises ConfigError without axes, and for a point without a finite number on an axis.
    """
    points = tuple(points)
    if not (least or most):
        raise ConfigError("a frontier needs an axis: least=('days', 'dollars'), "
                          "most=('tokens_per_second',)")
    goals = []
    for point in points:
        for goal in (*least, *most):
            if not math.isfinite(point.values.get(goal, math.nan)):
                raise ConfigError(f"{point.name} has no {goal!r}; it has {', '.join(point.values)}")
        goals.append((*(point.values[goal] for goal in least),
                      *(-point.values[goal] for goal in most)))
    rivals = set(goals)
    return tuple(point for point, mine in zip(points, goals)
                 if not any(_beats(rival, mine) for rival in rivals))


def _beats(point: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether `point` beats `other`; on every axis, smaller is better."""
    return point != other and all(a <= b for a, b in zip(point, other))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train a model whose cost and loss `triangle` computes."""

    name: str
    config: Config                      # with its layout, `config.parallel`
    machine: str | Machine = "h200"
    tokens: float                       # training tokens


def grid(configs: Mapping[str, Config], machines: Iterable[str | Machine], devices: Iterable[int],
         tokens: Iterable[float]) -> tuple[Candidate, ...]:
    """Return a candidate for every combination of a config, a machine, a number of devices and a
    number of tokens, in the fastest layout whose memory fits (`lpkit.predict.plan`). Combinations
    for which no layout fits are left out."""
    candidates, tokens = [], tuple(tokens)
    for (name, config), machine, count in itertools.product(configs.items(), map(find, machines),
                                                            devices):
        for best in plan(config, max(tokens), machine, devices=count).options[:1]:
            for many in tokens:
                words = f"{name}, {quantity(many, 'tokens')}, {count:,} {machine.name}"
                candidates.append(Candidate(name=words, config=best.config, machine=machine,
                                            tokens=many))
    return tuple(candidates)


CANDIDATES = {      # by tier of the notebook: presets, machines and numbers of devices for `grid`
    "smoke": (["gpt2-1.5b", "llama-8b"], ["a100-80", "h200"], [8, 64]),
    "cpu": (["gpt2-350m", "gpt2-1.5b", "llama-1b", "llama-8b", "llama-70b"],
            ["a100-80", "h100", "h200", "b200"], [8, 64, 512]),
}


def triangle(candidates: Iterable[Candidate], *,
             measured: Mapping[str, float] | None = None) -> tuple[Point, ...]:
    """Return a point for each candidate with the values `days`, `dollars`, `loss` (in nats per
    token, by the scaling law DEFAULT) and `tokens_per_second`.

    measured: losses by name of the candidate, all on the same corpus. They replace the losses of
        the law.

    `Point.where` is "measured" for a measured loss, "extrapolated" for a loss outside the range of
    models and tokens that the law was fitted to, else "formula". Raises ConfigError for a machine
    without a price.
    """
    measured, points = measured or {}, []
    for candidate in candidates:
        on, count = find(candidate.machine), parameter_count(candidate.config.model)
        step = step_time(candidate.config, on)
        paid = bill(step, on, candidate.tokens)
        if paid.cost is None:
            raise ConfigError(f"{on.title} has no price_per_hour, so {candidate.name} has no cost; "
                              f"describe the machine with one")
        forecast = LAWS[DEFAULT].extrapolate(count, candidate.tokens)
        loss, note = forecast.nats, forecast.note
        where = "formula" if forecast.inside else "extrapolated"
        if candidate.name in measured:
            loss, where, note = measured[candidate.name], "measured", "measured"
        values = {"days": paid.seconds / 86_400, "dollars": paid.cost, "loss": loss,
                  "tokens_per_second": step.tokens_per_second}
        dollars = between(paid.range_of(paid.cost), lambda value: "$" + quantity(value))
        likely = f"nine of ten: {between(paid.range_of(paid.seconds), duration)}, {dollars}"
        facts = {"range": likely, "machine": on.name, "devices": step.devices, "parameters": count,
                 "tokens": candidate.tokens, "layout": str(candidate.config.parallel), "note": note}
        points.append(Point(name=candidate.name, where=where, values=values, facts=facts))
    return tuple(points)


# ---- Figures

ROW_PIXELS, GAP_PIXELS, SHOWN = 25, 110, 6      # SHOWN: rows of the table of layouts
POINTS = 81         # points of a curve
LOGARITHMIC = {"type": "log", "dtick": 1}
GOALS = {"days": axis("days", **LOGARITHMIC), "loss": axis("loss (nats per token)", type="linear"),
         "dollars": axis("US dollars", **LOGARITHMIC)}
# colour scale of a goal: transform, range and ticks. They are fixed, so that a point keeps its
# colour when others are filtered out.
SHADES = {
    "days": (math.log10, (-3, 3), {power: f"{10.0**power:,g}" for power in range(-3, 4)}),
    "loss": (float, (1.9, 2.7), {loss: f"{loss:.1f}" for loss in (1.9, 2.1, 2.3, 2.5, 2.7)}),
}
# for each panel: goal of its vertical axis, goal of its colours, and its axes
PANELS = (("loss", "days", {"coloraxis": "coloraxis", "yaxis": "y"}),
          ("days", "loss", {"coloraxis": "coloraxis2", "yaxis": "y2"}))
SYMBOLS = {"formula": "circle", "extrapolated": "circle-open", "measured": "diamond"}
EVERY = "every machine"
View = Callable[..., tuple[dict, str]]      # returns (spec, html), for an Explorer


# Layouts.

def plan_view(model: Config, machine: Machine, tokens: float, devices: int, budget: float,
              deadline: float) -> tuple[dict, str]:
    """Return (spec, html) for an Explorer: the best layout as a figure; the best layouts, and the
    reasons why other layouts are excluded, as tables.

    tokens: training tokens
    budget, deadline: limits in dollars and in seconds; infinity: no limit
    """
    budget, deadline = (None if math.isinf(limit) else limit for limit in (budget, deadline))
    result = plan(model, tokens, machine, devices=devices, budget=budget, deadline_seconds=deadline)
    rows = [(name, f"{refusal.layouts:,}", refusal.nearest)
            for name, refusal in result.refusals.items() if refusal.layouts]
    heads = ("excluded by", "layouts", "nearest layout")
    refused = html_table(heads, rows) if rows else ""
    if result.options:
        return option_figure(result.options[0], result), _ranked(result) + refused
    title = f"None of {result.counted} layouts meets every limit; the table has the nearest misses"
    hidden = {"visible": False}
    return figure([], title, height=80, xaxis=hidden, yaxis=hidden), refused


def layouts_view(result: Plan) -> tuple[View, dict[str, dict[str, Option]]]:
    """Return the arguments of an Explorer of the layouts of a plan, with the formula and the source
    of each row of memory and time:

    show, controls = layouts_view(result); Explorer(show, **controls)
    """
    def show(layout: Option) -> tuple[dict, str]:
        return option_figure(layout, result), opened(layout)

    return show, {"layout": {
        f"{i}. {option.layout}; {_chunks(option)} sequences; recompute {option.recompute}": option
        for i, option in enumerate(result.options, 1)}}


def option_figure(option: Option, result: Plan) -> dict:
    """Return the plotly spec of two staircases, in which each row starts where the previous row
    ends. Upper panel: the bytes of a device at the peak, row by row, and the device's memory as a
    limit. Lower panel: the seconds of a step, row by row; communication that overlaps with other
    rows is drawn pale, at the time of those rows."""
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
                           f"overlaps with other rows. {row.formula}"))
    data += [_stairs(stairs, "seconds", name=kind, colour=KINDS[kind], **right)
             for kind, stairs in kinds.items() if stairs]
    if hidden:
        data.append(_stairs(hidden, "seconds", name="hidden communication", colour=COLOURS[1],
                            opacity=0.35, text="", **right))

    below = ROW_PIXELS * len(step.rows)
    height = ROW_PIXELS * len(sizes) + GAP_PIXELS + below
    limit, ends, shapes = limit_of(held), "", []
    if limit:
        ends = (f"; dotted line: usable memory, {USABLE_MEMORY_SHARE:.0%} of "
                f"{quantity(limit, 'bytes')}")
        shapes = [rule(x=x, colour=INK, dash=dash, yref="y domain", layer="below")
                  for x, dash in ((limit, "dash"), (USABLE_MEMORY_SHARE * limit, "dot"))]
    cost = "" if option.bill.cost is None else f", {_dollars(option)}"
    title = (f"{option.layout.devices:,} x {result.machine.title}: {duration(option.bill.seconds)} "
             f"({between(option.bill.range_of(option.bill.seconds), duration)}){cost}, "
             f"MFU {step.mfu:.0%}")
    names = {**NAMES, "type": "category"}
    return figure(
        data, title, barmode="overlay", bargap=0.25, height=height + 120, shapes=shapes,
        legend={"y": (below + 6) / height},     # a legend of the seconds only
        xaxis=axis(f"bytes of a device at the peak ({held.peak_moment}){ends}", **BYTES, anchor="y",
                   zeroline=False, range=[0, 1.14 * max(held.peak_bytes, limit or 0)]),
        yaxis={**names, "domain": [(below + GAP_PIXELS) / height, 1], "categoryarray": list(sizes)},
        xaxis2=axis(f"seconds of a step of {quantity(step.tokens, 'tokens')}", ticksuffix="s",
                    exponentformat="SI", anchor="y2", zeroline=False,
                    range=[0, 1.14 * step.step_seconds]),
        yaxis2={**names, "domain": [0, below / height], "anchor": "x2",
                "categoryarray": [row.name for row in step.rows]})


def kind_of(row: str) -> str:
    """Return the key of KINDS for the name of a row of a step's time."""
    return KIND_OF.get(row, "communication" if ":" in row else "products")


def _stairs(rows: Sequence[tuple[str, float, float, str]], unit: str, **more) -> dict:
    """Return a trace of horizontal bars; each of `rows` has a name, start, size and formula."""
    names, starts, sizes, formulas = zip(*rows)
    says = [quantity(size, unit) for size in sizes]
    return bars(names, sizes, base=list(starts), hovertext=says,
                customdata=["<br>".join(wrap(escape(formula), 90)) for formula in formulas],
                hover="%{y}: %{hovertext}<br>%{customdata}<extra></extra>",
                **{"text": says, **more})


def _starts(sizes: Iterable[float]) -> list[float]:
    """Return where each size starts if they are laid end to end, and where the last one ends."""
    return [0.0, *itertools.accumulate(sizes)]


def _chunks(option: Option) -> str:
    """Return "micro-batches x sequences in each"."""
    return f"{option.time.micro_batches} x {option.time.sequences}"


def _dollars(option: Option) -> str:
    """Return the cost of a plan as text; "-" if it is unknown."""
    return "-" if option.bill.cost is None else "$" + quantity(option.bill.cost)


def _ranked(result: Plan) -> str:
    """Return an HTML table of the best SHOWN layouts of a plan."""
    rows = [(option.layout, _chunks(option), option.recompute,
             quantity(option.memory.peak_bytes, "bytes"), duration(option.time.step_seconds),
             f"{option.time.mfu:.0%}", duration(option.bill.seconds),
             between(option.bill.range_of(option.bill.seconds), duration), _dollars(option),
             "predicts" if option.why_untrained else "trains")
            for option in result.options[:SHOWN]]
    caption = f"{len(result.options)} of {result.counted} layouts meet every limit; {result.order}"
    energy = result.options[0].bill.energy_wh
    if energy is not None:
        caption += f", {quantity(energy, 'Wh')} at rated power for the first"
    heads = ("layout", "micro-batches", "recompute", "peak memory", "step", "MFU", "time",
             "range of the time", "cost", "lpkit")
    price = result.machine.price_source.partition(";")[0]
    caption += f"; range of the time: {result.options[0].bill.spread.words}"
    return html_table(heads, rows, caption=f"{caption}; price {price}")


def opened(option: Option) -> str:
    """Return HTML of the rows of a layout's memory and time; a click on a row opens its formula and
    source. The largest row of each is open already."""
    return opened_memory(option.memory) + opened_time(option.time)


# What a budget buys.

def budget_view(model: Config, machine: Machine, dollars: float, mfu: float) -> tuple[dict, str]:
    """Return (spec, html) for an Explorer: the FLOPs that `dollars` buy on `machine` at this MFU,
    and the loss that each scaling law predicts for these FLOPs over the size of the model."""
    dtype = "bf16" if "bf16" in machine.flops else "fp16"
    flops = dollars / machine.price_per_hour * 3600 * machine.peak_flops(dtype) * mfu
    count = parameter_count(model.model)
    rows = []
    for law in LAWS.values():
        for words, size in (("size of the lowest loss", law.optimum(flops).parameters),
                            ("this model", count)):
            tokens = _tokens(flops, size)
            loss = law.extrapolate(size, tokens)
            rows.append((f"{law.name}, {words}", quantity(size), quantity(tokens),
                         f"{tokens / size:.3g}", f"{loss.nats:.3f}",
                         "inside" if loss.inside else "extrapolated"))
    heads = ("law, model", "parameters", "tokens", "tokens per parameter", "loss",
             "range of the law's fit")
    return optimum_figure(flops, count), html_table(heads, rows)


def optimum_figure(flops: float, parameters: float) -> dict:
    """Return the plotly spec of the loss over the model size for a fixed number of FLOPs: a line
    for each scaling law, dashed where it is extrapolated. Circles mark the lowest loss, crosses the
    loss of a model with this number of parameters."""
    best = [law.optimum(flops) for law in LAWS.values()]
    low = min(*(optimum.parameters / 20 for optimum in best), parameters / 2)
    high = max(*(optimum.parameters * 20 for optimum in best), parameters * 2)
    sizes = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
    data, floor = [], min(optimum.nats for optimum in best)
    top = floor + 0.6
    for law, optimum, colour in zip(LAWS.values(), best, COLOURS):
        losses = [law.extrapolate(size, _tokens(flops, size)) for size in sizes]
        for inside, name, dash in ((True, law.name, "solid"),
                                   (False, f"{law.name}, extrapolated", "dash")):
            ours = [loss.nats if loss.inside is inside else None for loss in losses]
            if any(ours):
                data.append(scatter(sizes, ours, name, colour, line={"dash": dash}, hover=None))
        this_loss = law.extrapolate(parameters, _tokens(flops, parameters)).nats
        top = max(top, this_loss + 0.05)
        ends, nats = (optimum.parameters, parameters), (optimum.nats, this_loss)
        data.append(scatter(
            ends, nats, "", colour, mode="markers", showlegend=False, hover="%{text}",
            marker={"size": 11, "symbol": ["circle", "x"]},
            text=[f"{law.name}, {words}: {quantity(size, 'parameters')} on "
                  f"{quantity(_tokens(flops, size), 'tokens')}, {loss:.3f} nats"
                  for size, loss, words in zip(ends, nats, ("lowest loss", "this model"))]))
    return figure(
        data, f"{flops:.2e} FLOPs: the lowest loss (circles), and this model's loss (crosses)",
        height=420, xaxis=axis("parameters", type="log", exponentformat="B", dtick=1),
        yaxis=axis("loss (nats per token of the authors' text)",
                   range=[floor - 0.05, min(top, floor + 3)]))


def _tokens(flops: float, parameters: float) -> float:
    """Return the training tokens that `flops` pay for."""
    return flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters


# Days, loss and dollars cannot all be minimal.

def frontier_figure(points: Sequence[Point], *, title: str = "") -> dict:
    """Return the plotly spec of two panels over dollars. Upper panel: the loss; the colour is the
    days. Lower panel: the days; the colour is the loss. A large point is not beaten by any other
    point in dollars, loss and days. The line is the lowest loss that an amount of money buys."""
    best = {id(point) for point in frontier(points, least=GOALS)}
    groups: dict[tuple[bool, str], list[Point]] = {}
    for point in points:
        groups.setdefault((id(point) in best, point.where), []).append(point)
    cheapest = sorted(frontier(points, least=("dollars", "loss")), key=_cost)
    data = [scatter(map(_cost, cheapest), [point.values["loss"] for point in cheapest],
                    "lowest loss for the money", FAINT, line={"shape": "hv"}, hover=None)]
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
    """Return plotly's `coloraxis` of a goal; its colour bar is centred at the height `y`."""
    _, (low, high), ticks = SHADES[goal]
    return {"colorscale": "Cividis", "cmin": low, "cmax": high,
            "colorbar": {"title": {"text": goal, "font": {"size": 12}}, "thickness": 10,
                         "len": 0.44, "y": y, "tickvals": list(ticks),
                         "ticktext": list(ticks.values())}}


def _facts(point: Point) -> str:
    """Return the hover text of a point."""
    values = [f"{name.replace('_', ' ')}: {quantity(value)}"
              for name, value in point.values.items()]
    return "<br>".join([point.name, *values, point.facts.get("range", ""),
                        point.facts.get("layout", ""),
                        point.facts.get("note", point.where)])


def moved_table(models: Mapping[str, ModelConfig], *, batch: int) -> str:
    """Return two HTML tables of the bytes that the operations without a matmul move in a forward
    pass, as terms in letters: within a block, and outside the blocks. They hold for 16-bit matmuls
    and a float32 residual stream on a GPU, with SDPA. Each model has a column."""
    how = {"kind": "gpu", "attention": "sdpa", "compute_bytes": 2, "residual_bytes": 4}
    moved = {name: moved_terms(model, batch, **how) for name, model in models.items()}
    return (terms_table({name: inside for name, (inside, _) in moved.items()},
                        rows="bytes moved in forward, in a block")
            + terms_table({name: outside for name, (_, outside) in moved.items()},
                          rows="bytes moved in forward, outside the blocks"))


def frontier_view(points: Sequence[Point]) -> tuple[View, dict[str, list]]:
    """Return the arguments of an Explorer of the points, with controls for the machine and for
    limits on dollars and days:

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
        heads = ("not beaten", "time", "loss", "cost", "source of the loss")
        rented = {point.facts.get("machine") for point in inside} & CATALOGUE.keys()
        note = mixed_prices([CATALOGUE[name] for name in sorted(rented)])
        return frontier_figure(inside, title=title), html_table(heads, rows, caption=note)

    return show, controls


def _steps(values: Sequence[float]) -> list[float]:
    """Return about ten limits on the values for a control, the highest first. Limits are values
    rounded up to two digits."""
    limits = set()
    for value in values:
        unit = 10.0 ** (math.floor(math.log10(value)) - 1)
        limits.add(float(f"{math.ceil(value / unit) * unit:.2g}"))
    return sorted(limits, reverse=True)[::max(1, len(limits) // 10)]


PAPER_COLOURS = (COLOURS[0], "#8a6d1f", COLOURS[2], "#1f7a6f", COLOURS[5])
GOLDEN = (math.sqrt(5) - 1) / 2     # multiples of it modulo 1 spread points evenly


# What a roofline ignores.

def optimism_view(run: Run) -> tuple[dict, str]:
    """Return (spec, html) for an Explorer: the step time of a published run as published and by
    three predictions (`lessons.published.optimism`). The table has the rows of the predictions."""
    steps, published = optimism(run), run.published_seconds
    names = list(dict.fromkeys(row.name for step in steps.values() for row in step.rows))
    rows = [(name, *(_seconds_of(step, name) for step in steps.values())) for name in names]
    rows.append(("a step", *(duration(step.step_seconds) for step in steps.values())))
    rows.append(("predicted / published time", *(f"{step.step_seconds / published:.0%}"
                                            for step in steps.values())))
    return optimism_figure(run.name, steps, published), html_table(("", *steps), rows)


def _seconds_of(step: StepTime, name: str) -> str:
    """Return the seconds of the row `name` of a step as text; "" if the step has no such row."""
    return next((duration(row.seconds) for row in step.rows if row.name == name), "")


def optimism_figure(name: str, steps: Mapping[str, StepTime], published: float) -> dict:
    """Return the plotly spec of the seconds of a step: a bar for each prediction, divided by kind
    of row, and a bar for the published seconds."""
    data = []
    for kind, colour in KINDS.items():
        sizes = [sum(row.seconds for row in step.rows if kind_of(row.name) == kind)
                 for step in steps.values()]
        if any(sizes):
            data.append(bars(steps, sizes, kind, colour, hover="%{y}: %{x:.3g} s",
                             textposition="none"))
    data.append(bars(["published"], [published], "published", ANSWER_COLOURS["measured"],
                     hover="%{x:.3g} s", textposition="none"))
    return figure(data, name, barmode="stack", height=330, shapes=[rule(x=published, colour=INK)],
                  xaxis=axis("seconds of a step", rangemode="tozero"),
                  yaxis={**NAMES, "type": "category", "categoryarray": [*steps, "published"]})


# Runs that no number was fitted to.

def unseen_figure(compared: Sequence[Mapping[str, Any]]) -> dict:
    """Return the plotly spec of predicted over published speed of published runs, grouped by
    generation of the device and precision. Pale points are runs that numbers may be fitted to; red
    points are held-out runs outside the predicted range. A bar is the median of a group's held-out
    runs. `compared` is the first list of `lessons.published.table`."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for run in compared:
        groups[f"{run['generation']}, {run['precision']}"].append(run)
    # the groups with the most held-out runs on top
    names = sorted(groups, key=lambda name: -sum(run["held_out"] for run in groups[name]))
    looks = {"may be fitted": (FAINT, 0.35), "held out": (COLOURS[0], 0.8),
             "held out, outside the printed range": (WARNING, 0.9)}
    places: dict[str, list[tuple[float, float, str]]] = {look: [] for look in looks}
    medians: list[tuple[float | None, float | None]] = []
    for y, name in enumerate(names):
        for i, run in enumerate(groups[name]):
            ratio = 1 + run["error"]
            held = "held out" if run["inside"] else "held out, outside the printed range"
            look = held if run["held_out"] else "may be fitted"
            words = f"{run['source']}, {escape(run['at'])}<br>{run['layout']}, {run['stack']}"
            places[look].append((ratio, y + 0.64 * (i * GOLDEN % 1 - 0.5), words))
        if unseen := [1 + run["error"] for run in groups[name] if run["held_out"]]:
            medians += [(statistics.median(unseen), y + side) for side in (-0.4, 0.4)]
            medians.append((None, None))
    data = [scatter([x for x, _, _ in some], [y for _, y, _ in some], look, looks[look][0],
                    mode="markers", marker={"size": 6, "opacity": looks[look][1]},
                    text=[words for _, _, words in some],
                    hover="%{x:.2f} of the published speed<br>%{text}<extra></extra>")
            for look, some in places.items() if some]
    data.append(scatter([x for x, _ in medians], [y for _, y in medians], "median, held out", INK,
                        line={"width": 3}, hover=None))
    errors = [abs(run["error"]) for run in compared if run["held_out"]]
    return figure(
        data, f"{len(errors)} held-out runs: {statistics.median(errors):.0%} off at the median",
        height=150 + 42 * len(names),
        xaxis=axis("predicted over published speed", type="log",
                   tickvals=[0.5, 0.7, 1, 1.4, 2, 3, 10, 30, 100]),
        yaxis={"tickvals": list(range(len(names))), "ticktext": names, "ticks": "",
               "showgrid": False, "zeroline": False, "range": [len(names) - 0.4, -0.6]},
        shapes=[rule(x=1, colour=INK, layer="below")])


# One colour per paper.

def published_figure(runs: Iterable[Row], calibrated: Iterable[Row] = ()) -> dict:
    """Return the plotly spec of predicted over published speed of each run; each paper has a
    colour. Hollow diamonds are predictions that were calibrated by one measured step."""
    papers: dict[str, list[Row]] = {}
    for row in runs:
        papers.setdefault(row.where.partition(",")[0], []).append(row)
    names = [row.name for rows in papers.values() for row in rows]
    calibrated, data, white = list(calibrated), [], {"bgcolor": "#ffffff"}
    notes = [note("calibrated by one step", _faster(row), row.name, "left auto", xshift=8, **white)
             for row in calibrated]
    for (paper, rows), colour in zip(papers.items(), PAPER_COLOURS):
        data.append(_ratios(paper, rows, {"color": colour, "size": 9}))
        x, at = (0.99, "right auto") if _faster(rows[0]) < 1.25 else (0.02, "left auto")
        notes.append(note(escape(paper), x, rows[0].name, at, xref="paper", **white,
                          font={"color": colour}))
    data.append(_ratios("calibrated by one measured step", calibrated,
                        {"color": INK, "size": 11, "symbol": "diamond-open", "line": {"width": 2}}))
    return figure(
        data, "Published runs: right of 1, the formula is too optimistic", showlegend=False,
        height=110 + 21 * len(names), annotations=notes,
        xaxis=axis("predicted speed / published speed", tickformat=".1f", dtick=0.1),
        yaxis={"ticks": "", "type": "category", "categoryarray": names,
               "range": [len(names) - 0.4, -0.6]},
        shapes=[rule(x=1, colour=INK, layer="below")])


def _ratios(name: str, rows: Sequence[Row], marker: dict) -> dict:
    """Return the trace of predicted over published speed of some runs."""
    words = [f"{quantity(row.formula, row.unit)} predicted, {quantity(row.measured, row.unit)} "
             f"published ({percent(row.error)})<br>{escape(row.where)}" for row in rows]
    return scatter(map(_faster, rows), [row.name for row in rows], name, mode="markers",
                   marker=marker, text=words, hover="%{y}<br>%{text}<extra></extra>")


def _faster(row: Row) -> float:
    """Return the predicted speed of a row divided by its published speed. A row in seconds has the
    published seconds divided by the predicted seconds."""
    return row.measured / row.formula if row.unit == "seconds" else row.formula / row.measured


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: micro-batches, tokens, ranks.

@exercise("09.micro_batches", (1, 0.5), (2, 0.5), (8, 0.125), (16, 0.11),
          draw=lambda r: (r.randint(1, 64), r.uniform(0.02, 0.6)),
          mistakes={"the bubble is a share of the whole step, the bubble included":
                        lambda stages, most: max(1, math.ceil((stages - 1) / most))})
def micro_batches(stages: int, most: float) -> int:
    # of the (m + p - 1) turns, (p - 1) are idle
    return max(1, math.ceil((stages - 1) * (1 - most) / most))


@exercise("09.tokens", (1.0, 1.0, 6e12, 0.5, 1e9), (250_000.0, 3.5, 989.4e12, 0.4, 70.6e9),
          draw=lambda r: (10 ** r.uniform(2, 7), r.uniform(0.5, 10), 10 ** r.uniform(14, 16),
                          r.uniform(0.1, 0.7), 10 ** r.uniform(8, 12)),
          mistakes={"no device reaches its peak": lambda dollars, price, peak, mfu, N:
                        dollars / price * 3600 * peak / (6 * N),
                    "the price is for an hour": lambda dollars, price, peak, mfu, N:
                        dollars / price * peak * mfu / (6 * N)})
def tokens(dollars: float, price_per_hour: float, peak_flops: float, mfu: float,
           parameters: float) -> float:
    return dollars / price_per_hour * 3600 * peak_flops * mfu / (6 * parameters)


def _powers_of_two(states: float, device: float, kv_heads: int) -> int:
    fits = [n for n in (1, 2, 4, 8, 16, 32) if n <= kv_heads and states <= n * device]
    return min(fits, default=0)


@exercise("09.tensor_ranks", (60e9, 80e9, 8), (160e9, 80e9, 8),
          draw=lambda r: (10 ** r.uniform(9, 12.5), r.choice((24e9, 80e9, 141e9, 192e9)),
                          r.choice((1, 4, 6, 8, 10, 12, 16))),
          mistakes={"the number of ranks must divide the heads":
                        lambda states, device, kv_heads: math.ceil(states / device),
                    "numbers other than powers of two divide the heads, too": _powers_of_two})
def tensor_ranks(state_bytes: float, device_bytes: float, kv_heads: int) -> int:
    fits = [n for n in range(1, kv_heads + 1)
            if kv_heads % n == 0 and state_bytes <= n * device_bytes]
    return min(fits, default=0)


# Exercises: the order in which ranks add, and what fits on one device.

def _backwards(values: list[list[float]], turns: int) -> list[list[float]]:
    values, ranks = [list(row) for row in values], len(values)
    for turn in range(turns):
        sent = [values[rank][(rank + turn) % ranks] for rank in range(ranks)]
        for rank in range(ranks):
            values[(rank + 1) % ranks][(rank + turn) % ranks] += sent[rank]
    return values


def _ring(r: Random) -> tuple[list[list[float]], int]:
    n = r.randint(2, 6)
    return [[float(r.randint(-99, 99)) for _ in range(n)] for _ in range(n)], r.randrange(n)


@exercise("09.reduce_scatter", ([[1.0, 2.0], [30.0, 40.0]], 1),
          ([[1.0] * 3, [10.0] * 3, [100.0] * 3], 2), draw=_ring, minutes=12, stars=3,
          mistakes={"in turn t rank r sends chunk r - t": _backwards})
def reduce_scatter(values: list[list[float]], turns: int) -> list[list[float]]:
    values, ranks = [list(row) for row in values], len(values)
    for turn in range(turns):
        sent = [values[rank][(rank - turn) % ranks] for rank in range(ranks)]   # all at once
        for rank in range(ranks):
            values[(rank + 1) % ranks][(rank - turn) % ranks] += sent[rank]
    return values


@exercise("09.micro_batch", (10, 5, 40, 8), (10, 5, 60, 12), (50, 5, 40, 8),
          draw=lambda r: (r.randint(1, 60), r.randint(1, 20), r.randint(20, 200),
                          r.choice((1, 8, 12, 30, 64))), minutes=5,
          mistakes={"micro-batches are of one size: it must divide the batch":
                        lambda states, each, device, batch:
                        max(0, min((device - states) // each, batch)),
                    "return 0 if not even one sequence fits": lambda states, each, device, batch:
                        max((n for n in range(1, batch + 1)
                             if batch % n == 0 and states + n * each <= device), default=1)})
def micro_batch(state_bytes: int, sequence_bytes: int, device_bytes: int, batch: int) -> int:
    fits = [n for n in range(1, batch + 1)
            if batch % n == 0 and state_bytes + n * sequence_bytes <= device_bytes]
    return max(fits, default=0)
