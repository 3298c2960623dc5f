"""Attention by its tiles: what it holds over the context, what it moves over the size of fast
memory, and its online softmax, step by step."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lpkit.tables import FAINT, INK
from lpkit.ui.draw import BYTES, axis, box, columns, figure, heat, note, rule, scatter
from lpkit.ui.style import ANSWER_COLOURS, COLOURS, WARNING

SO_FAR, IN_THE_END = ANSWER_COLOURS["formula"], ANSWER_COLOURS["measured"]
LEVEL = {"symbol": "line-ew", "size": 16, "line": {"width": 3, "color": IN_THE_END}}
NEVER = "#eceef1"       # tiles that are skipped


def held_figure(held: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]], *,
                title: str = "") -> dict:
    """The plotly spec of bytes over the context, both axes logarithmic: for each name what a
    formula says (a line) and what was measured (marks), by tokens."""
    data, ticks = [], sorted({T for _, found in held.values() for T in found})
    for (name, (said, found)), colour in zip(held.items(), COLOURS):
        data.append(scatter(said, said.values(), "", colour, hover=None, showlegend=False,
                            legendgroup=name))
        (before, last) = list(found.values())[-2:]
        data.append(scatter(found, found.values(), f"{name}: {last / before:.2f} times",
                            colour, mode="markers", legendgroup=name,
                            hover="%{x:,} tokens: %{y:.4s}B"))
    return figure(
        data, title, height=440,
        xaxis=axis("tokens; above, what the last doubling does", type="log", tickvals=ticks,
                   ticktext=[f"{T:,}" for T in ticks]),
        yaxis=axis("bytes at the most", type="log", dtick=1, **BYTES))


def traffic_figure(lines: Mapping[str, tuple[Mapping[float, float], Mapping[float, float]]], *,
                   machines: Mapping[str, float], title: str = "") -> dict:
    """The plotly spec of bytes moved over bytes of fast memory, both axes logarithmic: for each
    name what a formula says (a line) and what was counted (marks). One without a count is dashed.
    `machines`: bytes of fast memory to mark, by name."""
    data = []
    for (name, (said, found)), colour in zip(lines.items(), COLOURS):
        data.append(scatter(said, said.values(), name if not found else "", colour,
                            hover=None, showlegend=not found, legendgroup=name,
                            line={"dash": "solid" if found else "dash"}))
        if found:
            data.append(scatter(found, found.values(), name, colour, mode="lines+markers",
                                line={"width": 0}, legendgroup=name,
                                hover="%{y:.4s}B with %{x:.3s}B of fast memory"))
    marks = [rule(x=size, layer="below") for size in machines.values()]
    notes = [note(name, math.log10(size), 0.78, "left middle", yref="paper", xshift=4,
                  font={"size": 12, "color": FAINT}) for name, size in machines.items()]
    return figure(
        data, title, height=440, shapes=marks, annotations=notes,
        xaxis=axis("fast memory of a program", type="log", dtick="D2", **BYTES),
        yaxis=axis("bytes moved", type="log", dtick="D2", **BYTES))


def steps_view(steps: Sequence[Any], scores: Sequence[Sequence[float]], tile: int
               ) -> Callable[[int], dict]:
    """For an Explorer: a function of `step`, from 1. `steps` are those of
    `studies.attention_tiles.online`, `scores` (T, T), causal."""
    T = len(scores)
    ends = min(map(min, scores)), max(map(max, scores))
    final = {one.queries.start: one for one in steps}       # the last of each tile of queries
    least = min(one.m.min().item() for one in steps)

    def show(step: int) -> dict:
        now = steps[step - 1]
        end = final[now.queries.start]
        rows, shrink = list(range(now.queries.start, now.queries.stop)), now.shrink.min().item()
        shrinks = f"; a sum shrinks to {shrink:.0%}" if 0 < shrink < 1 else ""
        done = [(one.queries, one.keys) for one in steps[:step]]
        return figure(
            [_map(scores, done, ends), *_queries(rows, now, end), *_answer(now, end)],
            f"Step {step} of {len(steps)}: queries {rows[0]} to {rows[-1]} meet keys "
            f"{now.keys.start} to {now.keys.stop - 1}{shrinks}",
            height=560, margin={"t": 92}, shapes=_grid(T, tile, now), barmode="overlay",
            annotations=_words(T, rows, now), legend={"y": 1.06, "x": 0.58},
            xaxis=axis("keys", range=[-0.5, T - 0.5], domain=[0, 0.44], dtick=tile, tick0=0,
                       showgrid=False, zeroline=False),
            yaxis=axis("queries", range=[T - 0.5, -0.5], dtick=tile, tick0=0, showgrid=False,
                       zeroline=False),
            **{f"xaxis{i}": axis(words, domain=[0.58, 1], anchor=f"y{i}", tickvals=ticks)
               for i, words, ticks in ((2, "", rows), (3, "query", rows), (4, "number", None))},
            yaxis2=axis("", domain=[0.76, 0.96], anchor="x2", range=[least - 1, ends[1] + 1]),
            yaxis3=axis("", domain=[0.42, 0.62], anchor="x3", range=[0, 1.08], tickformat=".0%"),
            yaxis4=axis("", domain=[0, 0.22], anchor="x4"))

    return show


def _map(scores: Sequence[Sequence[float]], done: Sequence[tuple[slice, slice]],
         ends: tuple[float, float]) -> dict:
    """The scores of the tiles that were visited."""
    T = len(scores)
    z: list[list[float | None]] = [[None] * T for _ in range(T)]
    for queries, keys in done:
        for i in range(queries.start, queries.stop):
            for j in range(keys.start, min(keys.stop, i + 1)):
                z[i][j] = scores[i][j]
    return heat(list(range(T)), list(range(T)), z, ends=ends, bar={"x": 0.45, "title": ""},
                hovertemplate="query %{y}, key %{x}: %{z:.2f}<extra>score</extra>")


def _queries(rows: Sequence[int], now: Any, end: Any) -> list[dict]:
    """m and l of each query of the tile."""
    second, third = {"xaxis": "x2", "yaxis": "y2"}, {"xaxis": "x3", "yaxis": "y3"}
    return [
        scatter(rows, end.m.tolist(), "in the end", IN_THE_END, mode="markers", **second,
                marker=LEVEL, hover="query %{x}: %{y:.2f}"),
        scatter(rows, now.m.tolist(), "so far", SO_FAR, mode="markers", **second,
                marker={"size": 9}, hover="query %{x}: %{y:.2f}"),
        columns(rows, now.there.tolist(), "so far", SO_FAR, showlegend=False, **third,
                hover="query %{x}: %{y:.1%}")]


def _answer(now: Any, end: Any) -> list[dict]:
    """That of the last query of the tile."""
    fourth, numbers = {"xaxis": "x4", "yaxis": "y4"}, list(range(now.answer.shape[1]))
    return [
        columns(numbers, now.answer[-1].tolist(), "so far", SO_FAR, showlegend=False, **fourth,
                hover="%{y:.3f}"),
        scatter(numbers, end.answer[-1].tolist(), "in the end", IN_THE_END, mode="markers",
                showlegend=False, **fourth, hover="%{y:.3f}",
                marker=LEVEL)]


def _grid(T: int, tile: int, now: Any) -> list[dict]:
    """Every tile, those that nobody visits filled, and the one at work."""
    shapes = []
    for top in range(0, T, tile):
        for left in range(0, T, tile):
            sides = left - 0.5, left + tile - 0.5, top - 0.5, top + tile - 0.5
            shapes.append(box(*sides, fill=NEVER if left > top else None, edge="#c9ced6", width=1))
    shapes.append(box(now.keys.start - 0.5, now.keys.stop - 0.5, now.queries.start - 0.5,
                      now.queries.stop - 0.5, edge=WARNING, width=4))
    return shapes


def _words(T: int, rows: Sequence[int], now: Any) -> list[dict]:
    small = {"xref": "paper", "yref": "paper", "font": {"size": 13, "color": INK}}
    return [note("m, the largest score so far", 0.58, 0.965, **small),
            note("l, the share of the sum that is there", 0.58, 0.625, **small),
            note(f"the answer of query {rows[-1]}", 0.58, 0.225, **small),
            note("the future: never visited", 0.97 * T, 0.06 * T, "right middle",
                 font={"size": 12, "color": FAINT})]
