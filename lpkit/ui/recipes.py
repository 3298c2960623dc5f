"""Scaling recipes and mixed precision, drawn. Every function takes numbers and returns a plotly
spec."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lpkit.tables import INK
from lpkit.ui.draw import POWERS, axis, box, figure, rule, scatter
from lpkit.ui.style import COLOURS

KIND_COLOURS = ("#e8eef5", COLOURS[1], COLOURS[2], INK)


def outlier_map(*, kinds: Sequence[Sequence[int]], names: Sequence[str],
                values: Sequence[Sequence[float]], becomes: Sequence[Sequence[float]], recipe: str,
                sqnr_db: float, block: tuple[int, int]) -> dict:
    """Every element of a small tensor by what became of it; the frame is the block that holds the
    outlier."""
    rows, columns = len(kinds), len(kinds[0])
    (row, column), = [(r, c) for r, line in enumerate(kinds) for c, kind in enumerate(line)
                      if kind == len(names) - 1]
    high, wide = (size or whole for size, whole in zip(block, (rows, columns)))
    top, left = row // high * high, column // wide * wide
    step = 1 / len(names)
    scale = [[edge, colour] for i, colour in enumerate(KIND_COLOURS)
             for edge in (i * step, (i + 1) * step)]
    share = sum(kind == 2 for line in kinds for kind in line) / (rows * columns)
    words = [[f"{x:.4g} becomes {y:.4g}" for x, y in zip(*lines)] for lines in zip(values, becomes)]
    return figure([{
        "type": "heatmap", "z": kinds, "zmin": -0.5, "zmax": len(names) - 0.5, "colorscale": scale,
        "text": words,
        "hovertemplate": "row %{y}, column %{x}: %{text}<extra></extra>", "xgap": 0.4, "ygap": 0.4,
        "colorbar": {"tickvals": list(range(len(names))), "ticktext": list(names), "ticks": "",
                     "len": 0.9, "thickness": 14}}], f"{recipe}: {sqnr_db:.1f} dB for the others, "
                  f"{share:.0%} of them flushed to zero", height=330,
                  x=axis("column (the contracted axis)", showgrid=False, constrain="domain"),
                  y=axis("row", autorange="reversed", showgrid=False),
                  shapes=[box(left - 0.5, left + wide - 0.5, top - 0.5, top + high - 0.5, edge=INK,
                              width=2)])


def outlier_figure(axis_values: Sequence[float], formula: Mapping[str, Sequence[float]],
                   sizes: Sequence[float], measured: Mapping[str, Sequence[float]], *,
                   title: str = "") -> dict:
    """Signal over noise of the other elements against the outlier's size: lines over `axis_values`
    by formula, points measured."""
    data = []
    for i, name in enumerate(formula):
        colour = COLOURS[i % len(COLOURS)]
        data += [scatter(axis_values, formula[name], name, colour, legendgroup=name,
                         hover="%{y:.1f} dB by formula"),
                 scatter(sizes, measured[name], name, colour, mode="markers", marker={"symbol": i},
                         legendgroup=name, showlegend=False, hover="%{y:.1f} dB measured")]
    return figure(data, title, height=440,
                  x=axis("outlier, in standard deviations of the others", **POWERS),
                  y=axis("signal over noise of the others, dB", rangemode="tozero"))


def lost_figure(rates: Sequence[float], formula: Mapping[str, Sequence[float]],
                measured: Mapping[float, float], *, title: str = "") -> dict:
    """Share of the updates that a bf16 weight does not feel, against the learning rate: limits, and
    what was counted."""
    lines = [scatter(rates, [100 * y for y in shares], name, COLOURS[i],
                     line={"dash": ("solid", "dash")[i % 2]})
             for i, (name, shares) in enumerate(formula.items())]
    points = scatter(measured, [100 * y for y in measured.values()], "measured", COLOURS[4],
                     mode="markers", marker={"size": 10})
    return figure([*lines, points], title, height=360, x=axis("learning rate", **POWERS),
                  y=axis("updates lost, %", range=[0, 105]))


def losses_figure(curves: Mapping[str, Sequence[float]], *, title: str = "") -> dict:
    """Training losses by name, step by step."""
    lines = [scatter(range(1, len(losses) + 1), losses, name, COLOURS[i % len(COLOURS)],
                     line={"dash": ("solid", "dash", "dot")[i % 3]})
             for i, (name, losses) in enumerate(curves.items())]
    return figure(lines, title, height=380, x=axis("step"), y=axis("training loss, nats per token"))


def scaling_figure(shares: Mapping[int, float], *, smallest: float, largest: float, scale: float,
                   title: str = "") -> dict:
    """Exponents of gradients times `scale` between the ends of a format: what lies left of the
    window becomes zero, what lies right of it infinite. `shares` by the exponent of two."""
    moved = {e + math.log2(scale): share for e, share in shares.items()}
    low, high = math.log2(smallest) - 1, math.log2(largest)
    inside = {e: low <= e + 0.999 and e <= high for e in moved}
    lost = sum(share for e, share in moved.items() if e + 0.999 < low)
    shown = [{"type": "bar", "name": name, "x": [e for e in moved if inside[e] == kept],
              "y": [100 * moved[e] for e in moved if inside[e] == kept],
              "marker": {"color": colour}, "width": 0.9}
             for name, kept, colour in (("held", True, COLOURS[0]), ("lost", False, COLOURS[2]))]
    return figure(
        shown, title or f"Scaled by 2^{math.log2(scale):.0f}: {lost:.1%} of the gradients become "
        f"zero", height=360, barmode="overlay",
        x=axis("exponent of two of a gradient, scaled", range=[-50, 20]),
        y=axis("share of the gradients, %"),
        shapes=[rule(x=x, width=1.5, dash="dash") for x in (low, high)])


def scaling_view(shares: Mapping[int, float], smallest: float, largest: float) -> Any:
    """For an Explorer with one control, `exponent` of the scale."""
    return lambda exponent: scaling_figure(shares, smallest=smallest, largest=largest,
                                           scale=2.0**exponent)
