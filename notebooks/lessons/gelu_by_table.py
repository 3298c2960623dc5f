"""An MLP whose GELU is a table of straight lines, as in hardware without an exponential. It is an
example of your own row (docs/own_technique.md), for docs/claims/gelu-table.yaml:

    PYTHONPATH=notebooks lpkit claim docs/claims/gelu-table.yaml --import lessons.gelu_by_table

Yu et al. 2021 (NN-LUT, https://arxiv.org/abs/2112.02191) learn the points at which lines meet; here
LINES lines are equally wide from -LAST to LAST. Below -LAST the value is 0, above LAST it is x. The
gradient is the slope of the line.
"""

import math

import torch
from torch import Tensor

from lpkit.nn.mlps import GeluMLP
from lpkit.techniques.blocks import MLPS, gelu_mlp
from lpkit.techniques.operation import Kind

LINES, LAST = 16, 4.0
WIDE = 2 * LAST / LINES         # width of a line
POINTS = [-LAST + WIDE * i for i in range(LINES + 1)]
# GELU at the points; at both ends, 0 and x as outside the table, so that the function is continuous
VALUES = [0.0, *(x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in POINTS[1:-1]), LAST]
# slope and value at x = 0 of each line; the first is the line below -LAST, the last that above LAST
SLOPES = [0.0, *((VALUES[i + 1] - VALUES[i]) / WIDE for i in range(LINES)), 1.0]
STARTS = [0.0, *(VALUES[i] - SLOPES[i + 1] * POINTS[i] for i in range(LINES)), 0.0]


def gelu(x: Tensor) -> Tensor:   # any shape
    """Return GELU by the table: look up the line of each element in float32, and evaluate it. The
    result has the dtype of x."""
    line = ((x.detach().float() + LAST) / WIDE).floor().clamp(-1, LINES).long() + 1
    slopes, starts = (torch.tensor(table, device=x.device)[line] for table in (SLOPES, STARTS))
    return (slopes * x + starts).to(x.dtype)


class TableMLP(GeluMLP):
    """The MLP down(gelu(up(x))) with the GELU of this module."""

    def forward(self, x: Tensor) -> Tensor:   # (B, T, D) -> (B, T, D)
        return self.down(gelu(self.up(x)))


MLPS["gelu-table"] = Kind(operations=gelu_mlp, why=f"GELU by a table of {LINES} straight lines",
                          source="Yu et al. 2021, https://arxiv.org/abs/2112.02191",
                          implementation="lessons.gelu_by_table:TableMLP")
