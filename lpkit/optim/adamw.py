"""AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101).

`AdamW` as PyTorch has it, fused, where moments are float32 on the device beside float32 weights. Otherwise `PiecewiseAdamW`:
the same fused kernel, a parameter at a time, on moments that rest in another form (`moments`), in another place (whatever
`place` is given) or beside weights of 16 bits (`rounding`). What rests as float32 beside float32 gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lpkit.contracts import OptimizerSpec, Place
from lpkit.optim.moments import Blocks8, Float32, Form
from lpkit.optim.rounding import generator, to_bf16


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay for matrices and embeddings, none for gains and biases."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [dict(params=[p for p in params if p.ndim >= 2], weight_decay=weight_decay),
            dict(params=[p for p in params if p.ndim < 2], weight_decay=0.0)]


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerSpec):
    """Two float32 moments a parameter. `seed` is that of stochastic rounding, for weights in bf16."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    seed: int = 0
    form = Float32()
    state_bytes_per_param = Float32.bytes_per_param

    def build(self, model: nn.Module, place: Place | None = None) -> Optimizer:
        groups, betas = decay_groups(model, self.weight_decay), (self.beta1, self.beta2)
        if place is None and type(self.form) is Float32 and all(p.dtype == torch.float32 for p in model.parameters()):
            return torch.optim.AdamW(groups, lr=self.lr, betas=betas, eps=self.eps, fused=True)
        return PiecewiseAdamW(groups, lr=self.lr, betas=betas, eps=self.eps, form=self.form, place=place, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(AdamW):
    """Two 8-bit moments a parameter, and a float32 scale for each 256 of them."""

    form = Blocks8()
    state_bytes_per_param = Blocks8.bytes_per_param


class PiecewiseAdamW(Optimizer):
    """AdamW a parameter at a time: its moments come, the fused kernel updates them and the weight, and they go back.

    State: `update`, how many there were, and the tensors of `form` at their place. Weights in bf16 are updated in float32
    and rounded stochastically; the noise depends on the seed, the parameter and the update alone.
    """

    def __init__(self, groups: list[dict], *, lr: float, betas: tuple[float, float], eps: float, form: Form,
                 place: Place | None = None, seed: int = 0):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps))
        self.form, self.place, self.seed = form, place or Place(), seed
        self.number = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for moments, (p, group) in zip(self._moments([p for p, _ in work]), work):     # in this order: it ends itself
            self.state[p]["update"] += 1
            self._update(p, group, moments, self.state[p]["update"])

    def _moments(self, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
        """Of each parameter, on its device, the next one's under way meanwhile; and back when the caller is done."""
        rests = [self._resting(p) for p in parameters]
        coming = [self.place.bring(tensors, p.device) for tensors, p in zip(rests[:1], parameters)]
        for i, rest in enumerate(rests):
            coming += [self.place.bring(tensors, p.device) for tensors, p in zip(rests[i + 1:i + 2], parameters[i + 1:])]
            moments = coming.pop(0)()
            yield moments
            self.place.leave(rest, moments)

    def _resting(self, p: nn.Parameter) -> list[Tensor]:
        state = self.state[p]
        if not state:
            state["update"] = 0
            state |= zip(self.form.slots, map(self.place.rest, self.form.zeros(p)))
        return [state[slot] for slot in self.form.slots]

    def _update(self, p: nn.Parameter, group: dict, moments: list[Tensor], update: int) -> None:
        m, v = self.form.decode(moments, p.shape)
        w = p.detach() if p.dtype == torch.float32 else p.float()
        before = torch.full((), update - 1.0, device=p.device)      # the kernel counts on
        beta1, beta2 = group["betas"]
        adamw([w], [p.grad.float()], [m], [v], [], [before], fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
              lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)
        self.form.encode(moments, m, v)
        if p.dtype != torch.float32:
            p.copy_(to_bf16(w, generator(p.device, self.seed, self.number[p], update)))
