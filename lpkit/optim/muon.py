"""Muon: the update of a matrix has singular values that are all about 1, so it moves the matrix
equally far in all directions (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon). The
constants come from
https://github.com/KellerJordan/Muon/blob/857d1adc159e098212f828d927460782d3da59e9/muon.py.
"""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.errors import ConfigError
from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import NEWTON_SCHULZ, MomentumSettings

# A step of Newton-Schulz maps each singular value x to A x + B x^3 + C x^5.
A, B, C = 3.4445, -4.7750, 2.0315
LEAST = 1e-7                            # a matrix is divided by its norm, but at least by this


def orthogonalised(x: Tensor) -> Tensor:
    """Return a matrix (m, n) with the singular vectors of x (m, n), and with singular values
    between 0.7 and 1.2, except where the singular values of x are very small. Overwrites x."""
    if x.shape[0] > x.shape[1]:
        return orthogonalised(x.mT).mT
    x.div_(x.norm().clamp(min=LEAST))
    for _ in range(NEWTON_SCHULZ):
        gram = x @ x.mT
        gram = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.addmm(x, gram, x, beta=A)
    return x


def apart(whole: Tensor, parameter: Parameter, settings: MomentumSettings) -> tuple[Tensor, ...]:
    """Return a view (groups, rows, n) of `whole` (m, n) for each matrix that is fused in the
    parameter: q, k and v, or gate and up. Raises ConfigError for a parameter that is not a matrix.
    """
    if len(parameter.shape) != 2:
        raise ConfigError(f"optimizer={settings.name} updates matrices, and {parameter.name} has "
                          f"the shape {parameter.shape}; give it another rule, after the other "
                          f"ones of optimizer.groups: "
                          f"{parameter.name}:optimizer=adamw:lr_scale=0.05")
    fused = parameter.fused or parameter.shape[:1]
    return whole.unflatten(0, (-1, sum(fused))).split(fused, dim=1)


def muon(w: Tensor, g: Tensor, slots: Slots, settings: MomentumSettings, update: int,
         parameter: Parameter) -> None:
    """Muon: w moves by -lr times the orthogonalised Nesterov momentum. If a matrix has more rows
    than columns, its step is also multiplied by sqrt(rows / columns).

    Orthogonalisation needs the whole matrix. If ranks have parts of it, `parameter.gather` returns
    the whole matrix, and `parameter.part` returns this rank's part of the step.
    """
    (m,) = slots
    m.lerp_(g, 1 - settings.momentum)
    whole = parameter.gather(g.lerp(m, settings.momentum))
    for part in apart(whole, parameter, settings):
        step = orthogonalised(part.flatten(0, 1)).reshape(part.shape)
        part.copy_(step).mul_(max(1, part.shape[0] * part.shape[1] / part.shape[2])**0.5)
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(parameter.part(whole), alpha=-settings.lr)
