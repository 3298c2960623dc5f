"""Kernels by what they move: bytes of an element, and where a machine's ceilings put them."""

import math
from collections.abc import Mapping

from lpkit.predict.roofline import attainable_flops
from lpkit.predict.units import quantity
from lpkit.techniques.machines import Machine
from lpkit.ui.draw import NAMES, POWERS, axis, bars, figure, scatter
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
