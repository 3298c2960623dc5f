"""Drawings, to scale: where the values of a format lie; a Linear's three products, with the axis
that each sums over and the blocks that share a scale; what recomputation keeps and runs again."""

import math
from collections.abc import Mapping
from typing import Any

from lpkit.errors import ConfigError
from lpkit.tables import FAINT, INK
from lpkit.techniques.recipes import PRODUCTS, SIDE_WORDS, SIDES, Cast, Recipe
from lpkit.ui.draw import axis, bars, box, figure, note, rule, scatter
from lpkit.ui.style import COLOURS, ROLE_COLOURS, lines_of

HIDDEN = {"visible": False, "constrain": "domain"}


# Values.

def number_line_figure(formats: Mapping[str, Any], *, title: str = "") -> dict:
    """The plotly spec: a row of ticks for each `Listed` format (its `values` by code), as shares of
    its largest value; all of them, and below in powers of two."""
    data, names, lines = [], list(formats), lines_of(formats)
    for row, (name, listed) in enumerate(formats.items()):
        values = sorted({v for v in listed.values if math.isfinite(v) and v >= 0})
        shares = [v / values[-1] for v in values]
        for panel, xs in (("", shares), ("2", [s for s in shares if s])):
            data.append(scatter(
                xs, [row] * len(xs), name, mode="markers",
                showlegend=False, text=[f"{v:g}" for v in values[-len(xs):]],
                xaxis=f"x{panel}", yaxis=f"y{panel}", hover="%{text}, %{x:.3g} of the largest",
                marker={"symbol": "line-ns", "size": 18,
                        "line": {"width": 1.2, "color": lines[name]["color"]}}))
    rows = {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False,
            "range": [len(names) - 0.4, -0.6], "zeroline": False}
    powers = {"type": "log", "dtick": 4 * math.log10(2), "tick0": 0, "showgrid": True}
    exponents = range(-32, 1, 4)
    return figure(
        data, title, height=150 + 62 * len(names), hovermode="closest",
        xaxis=axis("share of the largest value", anchor="y", range=[-0.01, 1.01], zeroline=False),
        yaxis={**rows, "domain": [0.6, 1]},
        xaxis2={**axis("the same, in powers of two"), **powers, "anchor": "y2",
                "range": [-32 * math.log10(2), 0.1], "tickvals": [2.0**e for e in exponents],
                "ticktext": [f"2<sup>{e}</sup>" if e else "1" for e in exponents]},
        yaxis2={**rows, "anchor": "x2", "domain": [0, 0.38]})


# Products.

EQUATIONS = {"y": "y = x wᵀ", "dx": "dx = dy w", "dw": "dw = dyᵀ x"}
WORDS = {"x": "x", "w": "w", "g": "dy"}
NUMBERS = {"M": 256, "K": 384, "N": 512}        # tokens, features in, features out
MOST_LINES = 24     # in a grid of blocks: more would be a grey face
SPACE, GAP, LEFT = 200, 130, 60     # between panels and between matrices, margin; in numbers


def products_figure(recipe: Recipe, *, title: str = "") -> dict:
    """The plotly spec: a Linear of NUMBERS, forward and backward. Operands lie as they are
    multiplied, so the axis that is summed over runs along the first and down the second; lines are
    blocks that share a scale, and one of them is filled. Raises ConfigError for a recipe without
    casts."""
    if not recipe.products:
        raise ConfigError("this recipe casts no operand, so there are no blocks to draw")
    shapes, notes, top, wide = [], [], 0.0, 0.0
    for product, sides in SIDES.items():
        casts = recipe.products.get(product, (None, None))
        (rows, summed), (columns, _) = sides
        high, inner, out = NUMBERS[rows], NUMBERS[summed], NUMBERS[columns]
        tall = max(high, inner)
        middle, left = top - tall / 2, LEFT
        notes.append(note(f"<b>{EQUATIONS[product]}</b>   sums over {SIDE_WORDS[summed]}", 0,
                          top + 65, font={"size": 14}))
        names = [WORDS[tensor] for tensor in PRODUCTS[product]]
        turned = ("ᵀ" if product == "dw" else "", "ᵀ" if product == "y" else "")
        for i, (tensor, cast, (down, across), labels) in enumerate(zip(
                PRODUCTS[product], casts, ((high, inner), (inner, out)),
                ((rows, summed), (summed, columns)))):
            shapes += _operand(left, middle, down, across, ROLE_COLOURS[WORDS[tensor]],
                               cast, second=bool(i))
            notes += _sizes(left, middle, down, across, *labels)
            notes.append(note(names[i] + turned[i], left + across / 2, middle, "center middle",
                              font={"size": 17, "color": INK}, bgcolor="rgba(255,255,255,0.75)"))
            shapes.append(_along(left, middle, down, across, second=bool(i)))
            left += across + GAP
            notes.append(note("=" if i else "·", left - 0.6 * GAP, middle, "center middle",
                              font={"size": 20}))
        shapes.append(box(left, left + out, middle - high / 2, middle + high / 2, fill="#f3f4f6",
                          edge=FAINT, width=1))
        notes += [note(product, left + out / 2, middle, "center middle", font={"size": 17}),
                  *_sizes(left, middle, high, out, rows, columns)]
        wide, top = max(wide, left + out), top - tall - SPACE
    share = ", ".join(dict.fromkeys(
        f"{WORDS[tensor]} {_sides(cast)}" for product, casts in recipe.products.items()
        for tensor, cast in zip(PRODUCTS[product], casts)))
    return figure(
        [], title, height=900, shapes=shapes, annotations=[*notes, note(
            f"a scale for: {share}; the thick side is summed over", 0, 170, font={"color": FAINT})],
        margin={"l": 12, "r": 12, "t": 48, "b": 12},
        xaxis={**HIDDEN, "constraintoward": "left", "range": [-10, wide + 20]},
        yaxis={**HIDDEN, "range": [top + SPACE - 20, 230], "scaleanchor": "x"})


def products_view(recipes: Mapping[str, Recipe]) -> Any:
    """For an Explorer: a function of `recipe`, one of the names."""
    return lambda recipe: products_figure(recipes[recipe], title=f"The three products of {recipe}")


def _sides(cast: Cast) -> str:
    return " x ".join(str(side or "all") for side in cast.block)


def _operand(left: float, middle: float, down: float, across: float, colour: str,
             cast: Cast | None, *, second: bool) -> list[dict]:
    """A matrix; its blocks, the contracted axis last in a cast; and one of them filled."""
    top = middle + down / 2
    shapes = [box(left, left + across, top - down, top, edge=colour, width=1.5)]
    if cast is None:
        return shapes
    high, wide = reversed(cast.block) if second else cast.block
    high, wide = high or down, wide or across
    row, column = down // high // 3, across // wide // 3
    shapes.append(box(left + column * wide, left + (column + 1) * wide, top - (row + 1) * high,
                      top - row * high, fill=colour, edge=colour, width=2, opacity=0.55))
    for rows, size, length in ((True, high, down), (False, wide, across)):
        if length / size > MOST_LINES:
            continue
        for at in range(size, length, size):
            ends = {"x0": left, "x1": left + across, "y0": top - at, "y1": top - at}
            if not rows:
                ends = {"x0": left + at, "x1": left + at, "y0": top, "y1": top - down}
            shapes.append({"type": "line", **ends, "line": {"color": colour, "width": 0.6}})
    return shapes


def _along(left: float, middle: float, down: float, across: float, *, second: bool) -> dict:
    """The side that is summed over: of the first operand its upper edge, of the second its left."""
    top = middle + down / 2
    ends = {"x0": left, "x1": left, "y0": top, "y1": top - down} if second else \
        {"x0": left, "x1": left + across, "y0": top, "y1": top}
    return {"type": "line", **ends, "line": {"color": INK, "width": 5}}


def _sizes(left: float, middle: float, down: float, across: float, row: str,
           column: str) -> list[dict]:
    small = {"font": {"size": 12, "color": FAINT}}
    return [note(row, left - 12, middle, "right middle", **small),
            note(column, left + across / 2, middle + down / 2 + 8, "center bottom", **small)]


# Recomputation.

FORWARD, BACKWARD = 1, 2        # times of a block, in those of its forward pass


def recompute_figure(layers: int = 6, *, title: str = "") -> dict:
    """The plotly spec: for each block, from when to when its activations are there; above with
    everything kept, below with blocks that keep their input and run again."""
    if layers < 2:
        raise ConfigError(f"a drawing of recomputation needs 2 blocks or more, got layers={layers}")
    names = [f"block {i + 1}" for i in range(layers)]
    forward_ends = layers * FORWARD
    plain_end, again = forward_ends + layers * BACKWARD, FORWARD + BACKWARD
    done = [forward_ends + (layers - i) * BACKWARD for i in range(layers)]
    redone = [forward_ends + (layers - i) * again for i in range(layers)]
    begun = [i * FORWARD for i in range(layers)]
    data = []

    def stairs(name: str, colour: str, ends: list[tuple[float, float]], panel: str, width: float,
               shown: bool = True) -> None:
        data.append(bars(names, [end - start for start, end in ends], name, colour,
                         base=[start for start, _ in ends], width=width, xaxis=f"x{panel}",
                         yaxis=f"y{panel}", showlegend=shown,
                         hover="%{y}: " + name + ", %{base} to %{x}"))

    stairs("all that the block saved", COLOURS[2], list(zip(begun, done)), "", 0.7)
    stairs("its input alone", COLOURS[1], list(zip(begun, redone)), "2", 0.14)
    stairs("all of it, made again", COLOURS[2],
           [(end - again, end) for end in redone], "2", 0.7, shown=False)
    stairs("its forward pass, again", COLOURS[0],
           [(end - again, end - BACKWARD) for end in redone], "2", 0.3)
    end = forward_ends + layers * again
    names_axis = {"range": [layers - 0.5, -0.5], "showgrid": False, "ticks": ""}
    across = {"range": [0, end + 0.2], "zeroline": False, "dtick": layers}
    words = {"font": {"size": 12, "color": FAINT}, "bgcolor": "rgba(255,255,255,0.8)"}
    shapes = [rule(x=forward_ends, xref=f"x{i}", yref=f"y{i} domain") for i in ("", 2)]
    notes = [note("forward", forward_ends - 0.1, 1, "right bottom", yref="paper", **words),
             note("backward", forward_ends + 0.1, 1, "left bottom", yref="paper", **words),
             note(f"the step ends at {plain_end}", plain_end, layers - 1, "left middle", **words,
                  xshift=8),
             note(f"it ends at {end}: {end / plain_end:.2f} times", end, layers - 1, "right middle",
                  xref="x2", yref="y2", **words)]
    return figure(
        data, title, height=220 + 48 * layers, barmode="overlay", shapes=shapes,
        annotations=notes, legend={"y": 1.06}, margin={"t": 104},
        xaxis=axis("", anchor="y", **across), yaxis={**names_axis, "domain": [0.56, 1]},
        xaxis2=axis("time, in forward passes of a block", anchor="y2", **across),
        yaxis2={**names_axis, "anchor": "x2", "domain": [0, 0.44]})
