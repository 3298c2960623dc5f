"""NorMuon: Muon, with its rows brought to one length by their second moments (Li et al. 2025,
arXiv:2510.05491)."""

import math

from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.muon import apart, orthogonalised
from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import NorMuonSettings

RMS = 0.2       # of a step's numbers, about that of AdamW's
EPS = 1e-10


def normuon(w: Tensor, g: Tensor, slots: Slots, settings: NorMuonSettings, update: int,
            parameter: Parameter) -> None:
    """Algorithm 1, whose momentum is not Nesterov's; matrices that are fused each by itself."""
    m, v = slots
    m.lerp_(g, 1 - settings.momentum)
    whole = parameter.gather(m.clone())
    matrices, rows = (apart(t, parameter, settings) for t in (whole, v[:, None]))
    for part, moment in zip(matrices, rows):
        step = orthogonalised(part.flatten(0, 1)).reshape(part.shape)
        moment.lerp_(step.square().mean(2, keepdim=True), 1 - settings.beta2)
        part.copy_(step.div_(moment.sqrt().add_(EPS)))
        part.mul_(RMS * math.sqrt(part.numel()) / step.norm().add_(EPS))
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(parameter.part(whole), alpha=-settings.lr)
