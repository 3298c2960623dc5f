"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv:2409.11321; in
the order of https://github.com/nikhilvyas/SOAP/blob/a1e5535/soap.py)."""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import SoapSettings


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
