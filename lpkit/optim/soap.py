"""Steps in directions that a matrix's gradients show. SOAP: Adam in the eigenbasis of Shampoo's
preconditioner (Vyas et al. 2024, arXiv:2409.11321; in the order of
https://github.com/nikhilvyas/SOAP/blob/a1e5535/soap.py). Shampoo: a gradient is made as long in all
directions that gradients have had (Gupta et al. 2018, arXiv:1802.09568). GaLore: Adam's moments of
a gradient's projection onto few directions (Zhao et al. 2024, arXiv:2403.03507)."""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots, adamw
from lpkit.techniques.optimizers import GaloreSettings, ShampooSettings, SoapSettings


def turned(x: Tensor, left: Tensor, right: Tensor, back: bool = False) -> Tensor:
    x = (left if back else left.mT) @ x if len(left) else x
    return x @ (right.mT if back else right) if len(right) else x


def soap(w: Tensor, g: Tensor, slots: Slots, settings: SoapSettings, update: int,
         parameter: Parameter) -> None:
    """Algorithms 3 and 4, with both moments in the bases. The first update finds these alone."""
    m, v, *grams, left, right = slots
    whole, n, turns = parameter.gather(g), update - 1, (update - 1) % settings.every == 0
    if n:
        mine = parameter.part(turned(whole, left, right))
        m.lerp_(mine, 1 - settings.beta1)
        v.mul_(settings.beta2).addcmul_(mine, mine, value=1 - settings.beta2)
        mine = (v / (1 - settings.beta2**n)).sqrt_().add_(settings.eps).reciprocal_().mul_(m)
        mine = parameter.part(turned(parameter.gather(mine), left, right, back=True))
        w.mul_(1 - settings.lr * settings.weight_decay)
        w.sub_(mine, alpha=settings.lr / (1 - settings.beta1**n))
    mine = turned(parameter.gather(m), left, right, back=True) if turns else m
    pairs = zip(grams, (left, right), (whole, whole.t()))
    for gram, basis, x in [pair for pair in pairs if len(pair[0])]:
        gram.addmm_(x, x.mT, beta=settings.beta2, alpha=1 - settings.beta2)
        if turns and n:
            order = (basis * (gram @ basis)).sum(0).argsort(descending=True)
            basis[:, order] = torch.orgqr(*torch.geqrf(gram @ basis[:, order]))
        elif turns:
            basis.copy_(torch.linalg.svd(x, full_matrices=len(x) > x.shape[1])[0])
    if turns:
        m.copy_(parameter.part(turned(mine, left, right)))


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


def galore(w: Tensor, g: Tensor, slots: Slots, settings: GaloreSettings, update: int,
           parameter: Parameter) -> None:
    """Algorithm 2, of the shorter side; AdamW for a vector. Moments outlive their projection."""
    *moments, projection = slots
    if not len(projection):
        return adamw(w, g, moments, settings, update)
    whole = parameter.gather(g)
    x = whole if whole.shape[0] < whole.shape[1] else whole.mT
    if (update - 1) % settings.every == 0:
        projection.copy_(torch.linalg.svd(x, full_matrices=False)[0][:, :projection.shape[1]])
    step = torch.zeros_like(moments[0])     # nothing of it decays
    adamw(step, projection.mT @ x, moments, settings, update)
    step = projection @ step
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(parameter.part(step if x is whole else step.mT), alpha=settings.scale)
