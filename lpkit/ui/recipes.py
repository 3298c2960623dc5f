"""Scaling recipes and mixed precision, drawn. Every function takes numbers and returns a plotly
spec."""

import math
from collections.abc import Callable, Mapping, Sequence

from lpkit.tables import INK
from lpkit.ui.draw import POWERS, axis, box, columns, figure, rule, scatter
from lpkit.ui.style import COLOURS

KIND_COLOURS = ("#e8eef5", COLOURS[1], COLOURS[2], INK)


def outlier_map(*, kinds: Sequence[Sequence[int]], names: Sequence[str],
                values: Sequence[Sequence[float]], becomes: Sequence[Sequence[float]], recipe: str,
                sqnr_db: float, block: tuple[int, int]) -> dict:
    """Every element of a small tensor by what became of it; the frame is the block that holds the
    outlier."""
    rows, width = len(kinds), len(kinds[0])
    everything = [kind for line in kinds for kind in line]
    row, column = divmod(everything.index(len(names) - 1), width)
    high, wide = block[0] or rows, block[1] or width
    top, left = row // high * high - 0.5, column // wide * wide - 0.5
    scale = []
    for i, colour in enumerate(KIND_COLOURS):
        scale += [[i / len(names), colour], [(i + 1) / len(names), colour]]
    words = [[f"{x:.4g} becomes {y:.4g}" for x, y in zip(*lines)] for lines in zip(values, becomes)]
    cells = {
        "type": "heatmap", "z": kinds, "zmin": -0.5, "zmax": len(names) - 0.5, "colorscale": scale,
        "text": words, "xgap": 0.4, "ygap": 0.4,
        "hovertemplate": "row %{y}, column %{x}: %{text}<extra></extra>",
        "colorbar": {"tickvals": list(range(len(names))), "ticktext": list(names), "ticks": "",
                     "len": 0.9, "thickness": 14}}
    flushed = everything.count(2) / len(everything)
    return figure([cells], f"{recipe}: {sqnr_db:.1f} dB for the others, {flushed:.0%} of them "
                  f"flushed to zero", height=330,
                  xaxis=axis("column (the contracted axis)", showgrid=False, constrain="domain"),
                  yaxis=axis("row", autorange="reversed", showgrid=False),
                  shapes=[box(left, left + wide, top, top + high, edge=INK, width=2)])


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
                  xaxis=axis("outlier, in standard deviations of the others", **POWERS),
                  yaxis=axis("signal over noise of the others, dB", rangemode="tozero"))


def lost_figure(rates: Sequence[float], formula: Mapping[str, Sequence[float]],
                measured: Mapping[float, float], *, title: str = "") -> dict:
    """Share of the updates that a bf16 weight does not feel, against the learning rate: limits, and
    what was counted."""
    data = [scatter(rates, [100 * y for y in shares], name, COLOURS[i],
                    line={"dash": ("solid", "dash")[i % 2]})
            for i, (name, shares) in enumerate(formula.items())]
    data.append(scatter(measured, [100 * y for y in measured.values()], "measured", COLOURS[4],
                        mode="markers", marker={"size": 10}))
    return figure(data, title, height=360, xaxis=axis("learning rate", **POWERS),
                  yaxis=axis("updates lost, %", range=[0, 105]))


def losses_figure(curves: Mapping[str, Sequence[float]], *, title: str = "") -> dict:
    """Training losses by name, step by step."""
    lines = [scatter(range(1, len(losses) + 1), losses, name, COLOURS[i % len(COLOURS)],
                     line={"dash": ("solid", "dash", "dot")[i % 3]})
             for i, (name, losses) in enumerate(curves.items())]
    return figure(lines, title, height=380, xaxis=axis("step"),
                  yaxis=axis("training loss, nats per token"))


def scaling_view(shares: Mapping[int, float], smallest: float,
                 largest: float) -> Callable[[int], dict]:
    """For an Explorer with one control, `exponent` of the scale: gradients, as `shares` by the
    exponent of two, times 2^exponent between the ends of a format. What lies left of the window
    becomes zero, what lies right of it infinite."""
    low, high = math.log2(smallest) - 1, math.log2(largest)

    def show(exponent: int) -> dict:
        moved = {float(e + exponent): 100 * share for e, share in shares.items()}
        held = {e: share for e, share in moved.items() if low <= e + 0.999 and e <= high}
        lost = {e: share for e, share in moved.items() if e not in held}
        zero = sum(share for e, share in lost.items() if e < low)
        return figure(
            [columns(held, held.values(), "held", COLOURS[0], width=0.9),
             columns(lost, lost.values(), "lost", COLOURS[2], width=0.9)],
            f"Scaled by 2^{exponent}: {zero:.1f}% of the gradients become zero", height=360,
            barmode="overlay",
            xaxis=axis("exponent of two of a gradient, scaled", range=[-50, 20]),
            yaxis=axis("share of the gradients, %"),
            shapes=[rule(x=x, width=1.5, dash="dash") for x in (low, high)])

    return show
