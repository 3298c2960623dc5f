"""Kernels by what they move: bytes of an element, and where a machine's ceilings put them. Products
by how they add: where scales go in, and what a sum of few bits loses."""

import math
from collections.abc import Mapping

from lpkit.predict.roofline import attainable_flops
from lpkit.predict.units import quantity
from lpkit.tables import FAINT
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import Recipe
from lpkit.ui.draw import NAMES, POWERS, axis, bars, figure, note, scatter
from lpkit.ui.style import COLOURS

UNITS = {"fp32": "CUDA cores, fp32", "bf16": "tensor cores, bf16"}      # what calculates
AFTER, CUDA_CORES, INSIDE = ("after the sum", "in the sum, by the CUDA cores",
                             "in the sum, by the tensor core")
SCALED_IN = {AFTER: COLOURS[0], CUDA_CORES: COLOURS[1], INSIDE: COLOURS[4]}


def moved_figure(moved: Mapping[str, tuple[float, float]], *, title: str = "") -> dict:
    """The plotly spec: bytes read and written for each element, by version, the first on top."""
    sums = [read + written for read, written in moved.values()]
    read, written = ([one[side] for one in moved.values()] for side in (0, 1))
    return figure(
        [bars(moved, read, "read", COLOURS[0], hover="%{x:.3g} bytes"),
         bars(moved, written, "written", COLOURS[1], hover="%{x:.3g} bytes",
              text=[f"{total:.3g}" for total in sums])],
        title, height=130 + 46 * len(moved), barmode="stack",
        xaxis=axis("bytes for each element", range=[0, 1.15 * max(sums)]), yaxis=NAMES)


def bounds_figure(machine: Machine, kernels: Mapping[str, tuple[float, float, str]], *,
                  title: str = "") -> dict:
    """The plotly spec of a roofline, both axes logarithmic: each of `kernels` (FLOPs, bytes, dtype
    in which it calculates) lies where the machine's ceilings end it. Those of one place share a
    mark."""
    places: dict[tuple[float, str], list[str]] = {}
    for name, (flops, moved, dtype) in kernels.items():
        places.setdefault((flops / moved, dtype), []).append(name)
    dtypes = list(dict.fromkeys(dtype for *_, dtype in kernels.values()))
    xs, roofs = [x for x, _ in places], [attainable_flops(machine, dtype, x) for x, dtype in places]
    ends = [min(xs) / 3, *sorted(map(machine.ridge, dtypes)), 3 * max(xs)]
    lines = [scatter(ends, [attainable_flops(machine, dtype, x) for x in ends],
                     UNITS.get(dtype, dtype), COLOURS[i], hover=None)
             for i, dtype in enumerate(dtypes)]
    marks = scatter(xs, roofs, "kernel", COLOURS[2], mode="markers+text",
                    text=[", ".join(names) for names in places.values()],
                    textposition=["bottom right" if x < machine.ridge(dtype) else "bottom center"
                                  for x, dtype in places],
                    marker={"size": 9}, textfont={"size": 12}, cliponaxis=False,
                    hover="%{customdata}<extra></extra>",
                    customdata=[f"{x:.3g} FLOPs a byte, at most {quantity(y, 'FLOP/s')}"
                                for x, y in zip(xs, roofs)])
    range_ = [math.log10(min(roofs) / 4), math.log10(3 * max(map(machine.peak_flops, dtypes)))]
    return figure([*lines, marks], title, height=440, xaxis=axis("FLOPs per byte moved", **POWERS),
                  yaxis=axis("FLOP/s", range=range_, **POWERS))


def sums_figure(recipes: Mapping[str, Recipe], *, products: int = 512, title: str = "") -> dict:
    """The plotly spec: for each recipe the sum of one number of y = x wT, as long as `products`, in
    pieces that share their scales, in the colour of who multiplies those in."""
    pieces = {name: max(cast.block[1] for cast in recipe.products["y"]) or products
              for name, recipe in recipes.items()}
    data = []
    for place, colour in SCALED_IN.items():
        shown = [(name, piece, start) for name, piece in pieces.items()
                 if place == (AFTER if piece == products else CUDA_CORES if piece > 32 else INSIDE)
                 for start in range(0, products, piece)]
        data.append(bars([name for name, *_ in shown], [piece for _, piece, _ in shown], place,
                         colour, base=[start for *_, start in shown],
                         text=["" if start + piece < products else f"{products // piece}"
                               for _, piece, start in shown],
                         hover="%{y}: the %{x} products of a piece share their scales"))
    return figure(data, title, height=170 + 46 * len(recipes), barmode="overlay",
                  xaxis=axis("products of one sum; behind it, how often scales are multiplied in",
                             range=[0, 1.2 * products], tickvals=range(0, products + 1, 128)),
                  yaxis={**NAMES, "categoryarray": list(recipes)}, margin={"t": 92})


def lost_sums_figure(panels: Mapping[str, Mapping[str, tuple[Mapping, Mapping]]], *,
                title: str = "") -> dict:
    """The plotly spec of relative errors over the length of a sum, a panel for each name: curves by
    name, each what a formula says (a line) and what was found (marks), by length. A curve without a
    formula is dashed."""
    data, axes, notes = [], {}, []
    for i, (panel, curves) in enumerate(panels.items(), 1):
        left, right = (i - 1) / len(panels), i / len(panels) - 0.06 * (i < len(panels))
        for (name, (said, found)), colour in zip(curves.items(), (COLOURS[2], COLOURS[0], FAINT)):
            more = {"xaxis": f"x{i}", "yaxis": f"y{i}", "legendgroup": name}
            if said:
                data.append(scatter(said, said.values(), "", colour, hover=None,
                                    showlegend=False, **more))
            data.append(scatter(found, found.values(), name, colour, showlegend=i == 1, **more,
                                mode="markers" if said else "lines+markers", line={"dash": "dot"},
                                hover="%{x:,} products: off by %{y:.2~%}"))
        lengths = list(found)
        ends = math.log10(lengths[0] / 1.3), math.log10(1.3 * lengths[-1])
        axes[f"xaxis{i}"] = axis("products in a sum", type="log", range=ends, anchor=f"y{i}",
                                 domain=[left, right], tickvals=lengths[::2],
                                 ticktext=[f"{length:,}" for length in lengths[::2]])
        axes[f"yaxis{i}"] = axis("off by, of the result" if i == 1 else "", type="log", dtick=1,
                                 tickformat=".2~%", range=[-4.3, 0], anchor=f"x{i}")
        notes.append(note(panel, left, 1.01, xref="paper", yref="paper", font={"size": 14}))
    return figure(data, title, height=460, annotations=notes, legend={"y": 1.08},
                  margin={"t": 112}, **axes)
