"""When parameters are updated, and their dtype.

`after` updates all parameters after backward. `InBackward` updates each parameter as soon as its
gradient is computed. Both give a function without arguments, which the trainer calls after forward
and backward, and which returns the global norm of the gradients. `ParameterDtype` stores parameters
in another dtype; optimizers still compute in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lpkit.contracts import Stage, Transform

# returns the global norm of the gradients before clipping, ()
OptimizerStep = Callable[[], Tensor]
# A function of the gradients' norms on this rank, one for each parameter, and of these parameters.
# It returns the global norm over all ranks.
OfAll = Callable[[Sequence[Tensor], Sequence[nn.Parameter]], Tensor]


def after(optimizer: Optimizer, parameters: list[nn.Parameter], clip: float,
          of_all: OfAll | None = None) -> OptimizerStep:
    """Return a function that clips all gradients by their global norm, calls optimizer.step(), and
    frees the gradients. clip: the largest norm; 0: no clipping.

    The function is a partial, because deepcopy copies its arguments: the copy of a Training then
    updates its own parameters. A closure would keep the parameters of the first Training.
    """
    return partial(_after, optimizer, parameters, clip or math.inf, of_all or global_norm)


def _after(optimizer: Optimizer, parameters: list[nn.Parameter], clip: float,
           of_all: OfAll) -> Tensor:
    trained = [p for p in parameters if p.grad is not None]
    norm = of_all(torch._foreach_norm([p.grad for p in trained], 2, torch.float32)
                  if trained else (), trained)
    nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def global_norm(norms: Sequence[Tensor], _: Sequence[nn.Parameter] = ()) -> Tensor:
    """Return the global norm, () float32, from the norms of all gradients; 0 if there are none.
    PyTorch's clip_grad_norm_ would return bf16 for bf16 gradients."""
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


class InBackward:
    """Updates each parameter as soon as backward has computed its gradient, and then frees the
    gradient. So the gradients of all parameters never exist at the same time (LOMO, Lv et al. 2023,
    https://arxiv.org/abs/2306.09782).

    A call returns the global norm of the gradients. Updates and norm are bit-equal to those of
    `after` without clipping.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[nn.Parameter], clip: float,
                 of_all: OfAll | None = None):
        self.of_all = of_all or global_norm
        self.optimizer, self.parameters = optimizer, parameters
        self.group = {p: group for group in optimizer.param_groups for p in group["params"]}
        self.norms: dict[nn.Parameter, Tensor] = {}
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._update)

    def _update(self, p: nn.Parameter) -> None:
        """Update p and free its gradient. Autograd calls this hook when the gradient is complete.
        """
        self.norms[p] = torch.linalg.vector_norm(p.grad, dtype=torch.float32)
        all_groups = self.optimizer.param_groups
        # For this call the optimizer has only this parameter, with the settings of its group.
        self.optimizer.param_groups = [{**self.group[p], "params": [p]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = all_groups
        p.grad = None

    def __call__(self) -> Tensor:
        trained = [p for p in self.parameters if p in self.norms]
        norms = [self.norms.pop(p) for p in trained]
        return self.of_all(norms, trained)


@dataclass(frozen=True, kw_only=True)
class ParameterDtype(Transform):
    """Casts every parameter to `dtype`, in place, except parameters that later transforms add."""

    dtype: torch.dtype
    stage = Stage.STORAGE

    def __call__(self, model: nn.Module) -> nn.Module:
        # `data` is replaced, not the parameter object, so that tied parameters stay tied.
        for p in model.parameters():
            p.data = p.data.to(self.dtype)
        return model


def as_built() -> tuple[Transform, ...]:
    return ()


def in_bf16() -> tuple[Transform, ...]:
    return (ParameterDtype(dtype=torch.bfloat16),)
