"""A training step of any model: its loss, its optimizer, and a copy of the model without memory."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lpkit.errors import ConfigError
from lpkit.modules.parts import optimizer

# PyTorch's own class of a row, which a loop without this kit has
PYTORCHS = {"adamw": torch.optim.AdamW}
MakeLoss = Callable[[nn.Module, Any], Tensor]
# a row of OPTIMIZERS, a function of the parameters, or an optimizer of the model
Asked = str | torch.optim.Optimizer | Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Call the model on a batch (a mapping: by keywords; a tuple or list: by position) and return
    the scalar loss: the output's `loss`, the output, or its first element. Raises ConfigError."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    first = out[0] if isinstance(out, tuple | list) and out else out
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    loss = first if loss is None else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else (
            f"{type(out).__name__} without a loss")
        raise ConfigError(f"the model returned {shape}, and a training step needs a scalar loss; "
                          f"put labels into the batch, or give loss=lambda model, batch: ...")
    return loss.view(())


def make_optimizer(asked: Asked, model: nn.Module, copies: Mapping[nn.Parameter, nn.Parameter],
                   foreach: bool = False) -> torch.optim.Optimizer:
    """Make the optimizer of a copied model: that of `asked`, with its groups and settings. copies:
    by the original parameters; foreach: PyTorch's own optimizers work on all parameters at once,
    as they do by default on a GPU. Raises ConfigError."""
    trained = [p for p in copies.values() if p.requires_grad]
    if isinstance(asked, str):
        kind = PYTORCHS.get(asked)
        return kind(trained, lr=1e-3, foreach=foreach) if kind else optimizer(model, asked)
    if not isinstance(asked, torch.optim.Optimizer):
        return asked(trained)
    groups = []
    for group in asked.param_groups:
        if any(p not in copies for p in group["params"]):
            raise ConfigError("the optimizer updates a parameter that the model does not have; "
                              "give the optimizer of this model")
        own = {**group, "params": [copies[p] for p in group["params"]]}
        if foreach and own.get("foreach", 0) is None and not own.get("fused"):
            own["foreach"] = True
        groups.append(own)
    takes = inspect.signature(type(asked)).parameters      # AdamW's defaults have one key more
    return type(asked)(groups, **{key: asked.defaults[key] for key in takes & asked.defaults.keys()})


def without_memory(model: nn.Module, batch: Any, device: str
                   ) -> tuple[nn.Module, Any, dict[nn.Parameter, nn.Parameter]]:
    """Copy a model and a batch inside a FakeTensorMode: shapes and dtypes without values. Tensors
    that are shared stay shared, and weights on the meta device get `device`. Returns the copy, the
    batch, and the copies of parameters by the originals."""
    known: dict[int, Any] = {}

    def like(t: Tensor) -> Tensor:
        if id(t) not in known:
            known[id(t)] = torch.empty_like(t.detach(), device=device)
            if isinstance(t, nn.Parameter):
                known[id(t)] = nn.Parameter(known[id(t)], requires_grad=t.requires_grad)
        return known[id(t)]

    copies = {p: like(p) for p in model.parameters()}
    for module in model.modules():
        tree_map_only(Tensor, like, [dict(module._buffers), vars(module)])
    return copy.deepcopy(model, known), tree_map_only(Tensor, like, batch), copies
