"""Shampoo: a gradient is made as long in all directions that gradients have had, rows and columns
each by its own matrix (Gupta et al. 2018, arXiv:1802.09568)."""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import ShampooSettings


def inverse_root(total: Tensor, eps: float, power: int) -> Tensor:
    """total^(-1/power) of a gram (n, n), or of each number of a diagonal (n,), that began at eps."""
    if total.ndim == 1:
        return total.clamp(min=eps).pow_(-1 / power)
    values, vectors = torch.linalg.eigh(total)
    return vectors * values.clamp_(min=eps).pow_(-1 / power) @ vectors.mT


def shampoo(w: Tensor, g: Tensor, slots: Slots, settings: ShampooSettings, update: int,
            parameter: Parameter) -> None:
    """Algorithm 1, whose step is a momentum's; a vector's only side has the root 1/2 (algorithm 2),
    of a diagonal. A side that is too long has a diagonal, too. Nothing is grafted."""
    m, *sums, left, right = slots
    whole = parameter.gather(g)
    step = whole.view(len(whole), -1)
    for total, root, x in zip(sums, (left, right), (step, step.mT)):
        if update == 1:     # also for LAPACK, which finds no eigenvectors of most rows of zeros
            (total.diagonal() if total.ndim == 2 else total).fill_(settings.eps)
        if total.ndim == 2:
            total.addmm_(x, x.mT)
        else:
            total.add_(x.square().sum(1))
        if (update - 1) % settings.every == 0:
            root.copy_(inverse_root(total, settings.eps, 2 * whole.ndim))
    for root in (left, right):
        if len(root):
            step = root @ step if root.ndim == 2 else root[:, None] * step
        step = step.mT
    w.mul_(1 - settings.lr * settings.weight_decay)
    m.mul_(settings.momentum).add_(parameter.part(step.view(whole.shape)))
    w.sub_(m, alpha=settings.lr)
