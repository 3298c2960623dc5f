"""The bytes of a training step, drawn: by moment of the closed form; as a step went, event by
event, with those moments on top; and what techniques take off them, against the time that they
cost."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.predict import walk
from lpkit.predict.ledger import MOMENTS, Memory, memory
from lpkit.predict.messages import messages, sent_bytes
from lpkit.predict.time import step_time
from lpkit.predict.units import duration, quantity
from lpkit.tables import FAINT, INK, html_table
from lpkit.techniques.layouts import STAGES
from lpkit.techniques.machines import Machine
from lpkit.ui.draw import BYTES, NAMES, SECONDS, axis, bars, box, figure, note, rule, scatter
from lpkit.ui.style import ANSWER_COLOURS, COLOURS, ROLE_COLOURS, WARNING

ROW_COLOURS = {   # one family of rows, one hue
    "weights": ROLE_COLOURS["w"], "master weights": "#4d7eb3", "optimizer state": "#a5d8f0",
    "gradients": "#6b7280", "gathered weights": "#b8860b", "weight copies": "#ddaa33",
    "activations": ROLE_COLOURS["x"], "recomputed block": "#e0a3ad", "logits and loss": "#1f7a6f",
    "logits' gradients": "#8fd0c6", "low-precision weights": "#cc9966", "scales": "#996633",
    "amax histories": "#663300", "communication buffers": "#808000", "temporaries": "#bbbbbb",
    "optimizer temporaries": "#888888", "batch": "#000000", "transposed copies": "#e6c79c",
    "attention workspace": "#7b5ea7", "allocator": "#e5e5e5",
}
SENT_COLOURS = {"all-reduce": ROLE_COLOURS["w"], "reduce-scatter": ROLE_COLOURS["x"],
                "all-gather": "#b8860b"}
PLAIN = "plain"     # the technique that the others are counted from


# By formula.

def limit_of(held: Memory) -> float | None:
    """The device's bytes, to be drawn. None: so far outside that the bars would be squeezed to
    nothing."""
    limit = held.memory_bytes
    return limit if limit and held.peak_bytes > 0.1 * limit else None


def stacked_figure(names: Sequence[str], rows: Mapping[str, Sequence[float | None]], *,
                   title: str = "", axis_title: str = "bytes per device",
                   about: Mapping[str, str] | None = None, said: Sequence[float] = (),
                   limit: float | None = None) -> dict:
    """The plotly spec of bytes by row, a bar for each name. `about` the rows, when pointed at;
    `said`: the sum of each bar as a formula has it, a diamond; `limit`: of the device."""
    data, about = [], about or {}
    for row, sizes in rows.items():
        data.append(bars(names, sizes, row, {**ROW_COLOURS, **SENT_COLOURS}[row],
                         textposition="inside",
                         text=["" if size is None else quantity(size, "bytes") for size in sizes],
                         hover=f"{row}: %{{text}}<extra>{about.get(row, '')}</extra>"))
    most = max((sum(filter(None, sizes)) for sizes in zip(*rows.values())), default=0)
    shapes = []
    if limit:
        shapes = [rule(x=limit, colour=INK if most <= limit else WARNING, width=2, dash="dash")]
    if said:
        data.append(scatter(said, names, "predicted", mode="markers", hover="%{x:.4s}B",
                            marker={"symbol": "diamond", "size": 11, "color": "#ffffff",
                                    "line": {"width": 2, "color": INK}}))
    below = 21 * math.ceil(len(data) / 4)
    return figure(
        data, title, height=120 + 46 * len(names) + below, barmode="stack", bargap=0.35,
        shapes=shapes, yaxis=NAMES,
        # below: many rows would grow into the title
        legend={"yref": "container", "y": 0, "yanchor": "bottom"}, margin={"b": 60 + below},
        xaxis=axis(axis_title, **BYTES, range=[0, 1.08 * max(most, limit or 0, *said)]))


def memory_figure(held: Memory, *, title: str = "") -> dict:
    """The plotly spec. The longest bar is the peak."""
    return stacked_figure(
        list(MOMENTS), {row.name: [row.at.get(one) for one in MOMENTS] for row in held.rows},
        about={row.name: row.formula for row in held.rows}, limit=limit_of(held), title=title)


def stages_view(model: Config, machine: Machine, ranks: int, micro_batches: int) -> dict:
    """For an Explorer: what a rank holds at its peak by stage of ZeRO; bf16 with AdamW, each block
    recomputed, one sequence at a time."""
    config = dataclasses.replace(model, global_batch=ranks * micro_batches,
                                 grad_accum_steps=ranks * micro_batches)
    found = {stage: memory(config, machine, ranks, precision="bf16", optimizer="adamw", zero=stage,
                           recompute="block") for stage in STAGES}
    held = [one.at(one.peak_moment) for one in found.values()]
    rows = {row: [each.get(row) for each in held]
            for row in ROW_COLOURS if any(row in each for each in held)}
    fit = [str(stage) for stage, one in found.items() if one.fits]
    fits = f"fits with ZeRO {', '.join(fit)}" if fit else "fits with no stage of ZeRO"
    return stacked_figure(
        [f"ZeRO {stage}" for stage in found], rows, limit=machine.memory_bytes,
        title=f"{ranks:,} ranks of {quantity(machine.memory_bytes, 'bytes')}: {fits}",
        axis_title=f"bytes per {machine.title}, at the peak")


def gathers_view(ways: Callable[[Config, int], Mapping[str, Config]]) -> Callable[..., Any]:
    """For an Explorer, of what `ways` makes of a model on so many ranks: what each sends in an
    update, one sequence at a time, each block recomputed; what that takes, and what a rank holds."""
    def show(model: Config, machine: Machine, ranks: int) -> tuple[dict, str]:
        config = model.replace({"global_batch": ranks, "grad_accum_steps": ranks,
                                "memory.recompute": "block"})
        sent, rows = {}, []
        for name, one in ways(config, ranks).items():
            sent[name] = sent_bytes(messages(one, machine))
            step, held = step_time(one, machine), memory(one, machine)
            shards = [row for row in step.rows if row.name.startswith("shard")]
            seen, hidden = (sum(getattr(row, key) for row in shards)
                            for key in ("seconds", "hidden_seconds"))
            rows.append((name, quantity(sum(sent[name].values()), "bytes"), duration(seen + hidden),
                         duration(hidden), duration(step.step_seconds),
                         quantity(held.peak_bytes, "bytes")))
        spec = stacked_figure(
            list(sent), {kind: [each.get(kind) for each in sent.values()] for kind in SENT_COLOURS
                         if kind != "all-reduce"},
            axis_title="sent in an update, bytes per rank",
            title=f"{ranks:,} x {machine.title}, a sequence each: what a rank sends")
        heads = ("", "sent", "by links alone", "of it hidden", "step", "peak")
        return spec, html_table(heads, rows)

    return show


def memory_view(model: Config, machine: Machine, sequences: int, devices: int, precision: str,
                optimizer: str, zero_stage: int, recompute: str) -> tuple[dict, str]:
    """For an Explorer: `sequences` per device at a time, no accumulation. The figure, and the peak
    as a table."""
    config = dataclasses.replace(model, global_batch=sequences * devices, grad_accum_steps=1)
    held = memory(config, machine, devices, precision=precision, optimizer=optimizer,
                  zero=zero_stage, recompute=recompute)
    peak, moment = quantity(held.peak_bytes, "bytes"), held.peak_moment
    title = (f"A peak of {peak} {'fits' if held.fits else 'does not fit'} into the "
             f"{quantity(machine.memory_bytes, 'bytes')} of one {machine.title}")
    rows = [(name, quantity(size, "bytes"), f"{size / held.peak_bytes:.0%}")
            for name, size in sorted(held.at(moment).items(), key=lambda row: -row[1])]
    heads = ("held at the peak", "per device", "share")
    return memory_figure(held, title=title), html_table(
        heads, [*rows, ("sum", peak, "100%")], caption=f"{moment}: {MOMENTS[moment]}")


# As a step went. The horizontal axis counts events, not seconds: a forward pass and the backward
# pass that undoes it look alike. A point has `phase` (forward, backward, optimizer), `module`
# ("blocks.3.mlp.up"; empty between two) and `rows`, bytes by name: lpkit.measure.tracking.Point.

MAX_POINTS = 400
PHASES = {"forward": "#ffffff", "backward": "#f3f4f6", "optimizer": "#e5e7eb"}
# of the axis: narrower stretches go without a name, blocks without their number
WORD, NUMBER = 0.075, 0.014
BEGINS, OUTSIDE = ("loss",), ("head", "norm")      # moments of backward, by what is at work
NOBODYS = ("", "gradient")      # no module of the model: a gradient reaches its parameter

Points = Sequence[Any]
Places = Sequence[tuple[str, str]]      # phase and part of the model, by point


def timeline_figure(points: Points, *, formula: Memory | None = None, title: str = "",
                    highest: float | None = None) -> dict:
    """The plotly spec: live bytes, stacked by row. `formula`: its moments, each a diamond over the
    largest point of that part of the step. `highest`: bytes at the top of the axis, to compare
    figures. Raises ConfigError without points."""
    if not points:
        raise ConfigError("a timeline needs at least one point; "
                          "`lpkit.measure.memory(config).timeline` has them")
    size = -(-len(points) // MAX_POINTS)      # of neighbours the largest
    points = [max(points[i:i + size], key=_total) for i in range(0, len(points), size)]
    x, totals, places = range(len(points)), list(map(_total, points)), _places(points)
    data = []
    for row, colour in ROW_COLOURS.items():
        held = [point.rows.get(row, 0) for point in points]
        if any(held):
            data.append(scatter(x, held, row, colour, stackgroup="rows", fillcolor=colour,
                                line={"width": 0, "shape": "hv"}, hover=None))
    data.append(scatter(x, totals, "", INK, line={"width": 1, "shape": "hv"}, showlegend=False,
                        text=list(map(_words, points)), hover="%{text}"))
    top = max(totals)
    predicted = list(_predicted(places, totals, formula)) if formula else []
    if predicted:
        at, sizes, words = zip(*predicted)
        top = max(top, *sizes)
        data.append(scatter(at, sizes, "formula", mode="markers", text=words, hover="%{text}",
                            marker={"symbol": "diamond", "size": 10, "color": "#ffffff",
                                    "line": {"width": 2, "color": INK}}))
    shapes, annotations = _phases(places)
    annotations.append(_peak(points, totals))
    return figure(
        data, title, height=470, shapes=shapes, annotations=annotations,
        xaxis=axis("allocations and frees of one step, in order, and the block at work",
                   showgrid=False, range=[0, len(points) - 1], zeroline=False, **_ticks(places)),
        yaxis=axis("live bytes", **BYTES, range=[0, 1.16 * (highest or top)]))


def timelines_view(steps: Mapping[str, tuple[Points, Memory | None]]) -> Callable[[str], dict]:
    """For an Explorer: a function of `step`, one of the names, on one axis for all."""
    highest = max(_total(point) for points, _ in steps.values() for point in points)

    def show(step: str) -> dict:
        points, formula = steps[step]
        return timeline_figure(points, formula=formula, title=step, highest=highest)

    return show


def _total(point: Any) -> int:
    return sum(point.rows.values())


def _words(point: Any) -> str:
    rows = sorted(((nbytes, row) for row, nbytes in point.rows.items()
                   if nbytes >= 1e-3 * _total(point)), reverse=True)
    return "<br>".join([f"<b>{escape(point.phase)} {escape(point.module)}</b>",
                        *(f"{escape(row)}: {quantity(nbytes, 'bytes')}" for nbytes, row in rows)])


def _places(points: Points) -> Places:
    """Phase and part of the model by point: "blocks.3" or the name of what is outside the blocks.
    What has no module of its own, gradients that are added up and frees, belongs to what went
    before; updates in backward are backward's."""
    last = max((i for i, point in enumerate(points) if point.phase == "backward"), default=-1)
    places, part = [], ""
    for i, point in enumerate(points):
        phase = point.phase
        if point.module not in NOBODYS:
            names = point.module.split(".")
            part = ".".join(names[:2]) if names[0] == "blocks" else names[0]
        elif phase == "optimizer" and i > last:
            part = "optimizer"
        if phase == "optimizer" and i < last:
            phase = "backward"
        places.append((phase, part))
    return places


def _predicted(places: Places, totals: Sequence[int],
               formula: Memory) -> Iterator[tuple[int, float, str]]:
    """Where each moment is, its bytes, and words."""
    blocks = sorted({part for _, part in places if part.startswith("blocks.")},
                    key=lambda part: int(part.split(".")[1]))
    parts = {walk.HEAD: OUTSIDE, walk.LAST: blocks[-1:], walk.FIRST: blocks[:1]}

    def belongs(phase: str, part: str, moment: str) -> bool:
        if moment == walk.UPDATE:
            return phase == "optimizer"
        if moment == walk.LOSS:       # in chunks its gradients are made in forward
            return part in BEGINS
        if moment == walk.EMBED:
            return phase == "backward" and part not in (*BEGINS, *OUTSIDE, *blocks)
        return phase == "backward" and part in parts[moment]

    for moment, words in MOMENTS.items():
        at = [i for i, place in enumerate(places) if belongs(*place, moment)]
        nbytes = sum(formula.at(moment).values())
        if at and nbytes:
            yield (max(at, key=totals.__getitem__), nbytes,
                   f"{moment}: {quantity(nbytes, 'bytes')}<br>{escape(words)}")


def _peak(points: Points, totals: Sequence[int]) -> dict:
    """An arrow to the largest point, with its bytes and the module that was at work."""
    peak = max(range(len(points)), key=totals.__getitem__)
    modules = [point.module for point in points[:peak + 1] if point.module not in NOBODYS]
    place = ", ".join([points[peak].phase, *modules[-1:]])
    across, side = ("right", -1) if peak > len(points) / 2 else ("left", 1)
    words = f"{quantity(totals[peak], 'bytes')}, {escape(place)}"
    return {**note(words, peak, totals[peak], f"{across} auto", bgcolor="rgba(255,255,255,0.8)",
                   font={"size": 12, "color": INK}), "showarrow": True, "ax": 14 * side,
            "ay": -16, "arrowhead": 0, "arrowcolor": FAINT}


def _stretches(keys: Iterator[str]) -> Iterator[tuple[str, int, int]]:
    """A key that stays, and from where to where."""
    start = 0
    for key, group in itertools.groupby(keys):
        end = start + len(list(group))
        yield key, start, end
        start = end


def _phases(places: Places) -> tuple[list[dict], list[dict]]:
    """Bands with names."""
    shapes, annotations = [], []
    for phase, start, end in _stretches(phase for phase, _ in places):
        shapes.append(box(start, end, 0, 1, fill=PHASES[phase], yref="paper", layer="below"))
        if end - start >= WORD * len(places):
            annotations.append(note(phase, (start + end) / 2, 1, "center top", yref="paper",
                                    font={"size": 12, "color": FAINT}))
    return shapes, annotations


def _ticks(places: Places) -> dict:
    """A tick where a part of the model begins; names of those that are wide enough."""
    ticks = {}
    for part, start, end in _stretches(part for _, part in places):
        if end - start >= len(places) * (NUMBER if part.startswith("blocks.") else WORD):
            ticks[(start + end) / 2] = part.removeprefix("blocks.")
    return {"tickmode": "array", "tickvals": list(ticks), "ticktext": list(ticks.values()),
            "tickangle": 0, "ticks": ""}


# What techniques buy: bytes against time paid, a point for each.

# pixels of the axes, about: where names go is decided here, and the browser draws them
INSIDE = (820, 420)
HIGH, WIDE = 16, 6.6    # pixels of a name, and of a letter
# by plotly's name: where the middle of a name is, in its width and height
ANCHORS: dict[str, tuple[float, float]] = {
    "middle right": (0.5, 0), "middle left": (-0.5, 0), "top center": (0, 1),
    "bottom center": (0, -1), "top right": (0.5, 0.9), "bottom right": (0.5, -0.9),
    "top left": (-0.5, 0.9), "bottom left": (-0.5, -0.9)}

Gains = Mapping[str, tuple[float, float]]   # by technique: percent of time more, bytes less
Box = tuple[float, float, float, float]     # left, low, right, high; pixels


def bought_figure(predicted: Mapping[str, tuple[float, float | None]],
                  measured: Mapping[str, tuple[float, float]], *, title: str = "",
                  others: float = 0.0) -> dict:
    """The plotly spec. Both by name: bytes at the peak, and time as a multiple of the plain step's,
    None without a formula: such a prediction is a dash at the measured time. Edge: what no other
    technique beats in both, as measured. Raises ConfigError without "plain"."""
    if PLAIN not in predicted or PLAIN not in measured:
        raise ConfigError(f"what is bought is counted from {PLAIN!r}, and it is missing")
    most = measured[PLAIN][0]
    at, timed, untimed = {}, {}, {}
    for name, (size, time) in measured.items():
        if name == PLAIN:
            continue
        at[name] = (100 * (time - 1), most - size)
        if name in predicted:
            less, time = predicted[PLAIN][0] - predicted[name][0], predicted[name][1]
            if time is None:
                untimed[name] = (at[name][0], less)
            else:
                timed[name] = (100 * (time - 1), less)
    said, edge = timed | untimed, _edge(at)
    xs, ys = zip((0, 0), (1, 1), *at.values(), *said.values())
    wide, high = max(xs) - min(xs), max(ys) - min(ys)
    x_range = [min(xs) - 0.12 * wide, max(xs) + 0.25 * wide]
    y_range = [min(ys) - 0.08 * high, max(ys) + 0.1 * high]
    joined = [point for name in said for point in (at[name], said[name], (None, None))]
    names = {"mode": "markers+text", "text": [escape(name) for name in at],
             "textfont": {"size": 12, "color": INK}, "cliponaxis": False,
             "textposition": list(_positions(at, said, edge, x_range, y_range))}
    data = [
        scatter([at[name][0] for name in edge], [at[name][1] for name in edge],
                "not beaten by another", COLOURS[2], line={"width": 3, "shape": "hv"}, hover=None),
        scatter([x for x, _ in joined], [y for _, y in joined], "", FAINT, line={"width": 1.5},
                showlegend=False, hover=None),
        _marks("formula", timed, "circle-open", ANSWER_COLOURS["formula"]),
        _marks("formula for the bytes alone", untimed, "line-ew-open",
               ANSWER_COLOURS["formula"]),
        _marks("measured", at, "circle", ANSWER_COLOURS["measured"]) | names | SECONDS,
    ]
    return figure(
        [trace for trace in data if trace["x"]], title, others=others, height=560,
        xaxis=axis("time of a step, over plain", range=x_range, ticksuffix="%", zeroline=False),
        yaxis=axis(f"bytes less than plain's {quantity(most, 'bytes')}", **BYTES, range=y_range,
                   zeroline=False),
        shapes=[rule(x=0, layer="below"), rule(y=0, layer="below")])


def _marks(name: str, gains: Gains, symbol: str, colour: str) -> dict:
    words = [f"{escape(technique)}: {quantity(less, 'bytes')} less, {more:+.0f}% time"
             for technique, (more, less) in gains.items()]
    return scatter([more for more, _ in gains.values()], [less for _, less in gains.values()], name,
                   colour, mode="markers", customdata=words, hover="%{customdata}",
                   marker={"symbol": symbol, "size": 11, "line": {"width": 2, "color": colour}})


def _edge(at: Gains) -> list[str]:
    """Those that save more than all that cost less, from cheap to dear."""
    best, edge = 0.0, []
    for name in sorted(at, key=lambda name: (at[name][0], -at[name][1])):
        if at[name][1] > best:
            best = at[name][1]
            edge.append(name)
    return edge


def _positions(at: Gains, said: Gains, edge: Sequence[str], x_range: Sequence[float],
               y_range: Sequence[float]) -> Iterator[str]:
    """For each name the side of its point on which it covers least: other names, points, and
    lines."""
    def pixel(point: tuple[float, float]) -> tuple[float, float]:
        return tuple(size * (value - low) / (high - low)
                     for size, value, (low, high) in zip(INSIDE, point, (x_range, y_range)))

    taken = []
    for name in at:
        (x, y), (u, v) = pixel(at[name]), pixel(said.get(name, at[name]))
        taken.append((min(x, u) - 7, min(y, v) - 7, max(x, u) + 7, max(y, v) + 7))
    # to the right, then up
    for (x, y), (u, v) in itertools.pairwise(pixel(at[name]) for name in edge):
        taken += [(x, y - 2, u, y + 2), (u - 2, y, u + 2, v)]
    for name in at:
        boxes = {anchor: _box(*pixel(at[name]), WIDE * len(name), anchor) for anchor in ANCHORS}
        best = min(boxes, key=lambda anchor: _hidden(boxes[anchor], taken))
        taken.append(boxes[best])
        yield best


def _box(x: float, y: float, width: float, anchor: str) -> Box:
    x, y = x + ANCHORS[anchor][0] * (width + 20), y + ANCHORS[anchor][1] * HIGH
    return x - width / 2, y - HIGH / 2, x + width / 2, y + HIGH / 2


def _hidden(box: Box, others: Sequence[Box]) -> float:
    """Square pixels, those outside the axes too."""
    left, low, right, high = box
    area = HIGH * (max(0.0, -left) + max(0.0, right - INSIDE[0] - 20))
    for a, b, c, d in others:
        area += max(0.0, min(right, c) - max(left, a)) * max(0.0, min(high, d) - max(low, b))
    return area
