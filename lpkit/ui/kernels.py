"""Kernels by what they move: bytes of an element, and where a machine's ceilings put them."""

import math
from collections.abc import Mapping

from lpkit.predict.roofline import attainable_flops
from lpkit.predict.units import quantity
from lpkit.techniques.machines import Machine
from lpkit.ui.draw import NAMES, axis, bars, figure, scatter
from lpkit.ui.style import COLOURS

UNITS = {"fp32": "CUDA cores, fp32", "bf16": "tensor cores, bf16"}      # what calculates


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
    in which it calculates) lies where the machine's ceilings end it. Dotted: the ridges."""
    points = {name: (flops / moved, attainable_flops(machine, dtype, flops / moved))
              for name, (flops, moved, dtype) in kernels.items()}
    dtypes = list(dict.fromkeys(dtype for *_, dtype in kernels.values()))
    ridges = [machine.ridge(dtype) for dtype in dtypes]
    ends = [min(x for x, _ in points.values()) / 3, *sorted(ridges),
            max(*ridges, *(x for x, _ in points.values())) * 3]
    roofs = [scatter(ends, [attainable_flops(machine, dtype, x) for x in ends],
                     UNITS.get(dtype, dtype), COLOURS[i], hover=None)
             for i, dtype in enumerate(dtypes)]
    marks = scatter([x for x, _ in points.values()], [y for _, y in points.values()], "kernel",
                    COLOURS[2], mode="markers+text", text=list(points), marker={"size": 9},
                    textposition=["bottom right" if x < machine.ridge(kernels[name][2])
                                  else "bottom center" for name, (x, _) in points.items()],
                    textfont={"size": 12}, cliponaxis=False,
                    hover="%{customdata}<extra></extra>",
                    customdata=[f"{name}: {x:.3g} FLOPs a byte, at most {quantity(y, 'FLOP/s')}"
                                for name, (x, y) in points.items()])
    low, high = min(y for _, y in points.values()), max(map(machine.peak_flops, dtypes))
    return figure(
        [*roofs, marks], title, height=440,
        xaxis=axis("FLOPs per byte moved", type="log", dtick=1),
        yaxis=axis("FLOP/s", type="log", dtick=1, exponentformat="SI",
                   range=[math.log10(low / 4), math.log10(3 * high)]))
