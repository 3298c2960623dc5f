"""The kit's optimizers and its techniques for activations, for any model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lpkit.contracts import Parameter
from lpkit.errors import ConfigError, pick
from lpkit.modules.convert import output_heads, transposed
from lpkit.optim import classes
from lpkit.techniques.memory import ACTIVATION_OFFLOAD, RECOMPUTE
from lpkit.techniques.optimizers import OPTIMIZERS, find, parameter_groups
from lpkit.techniques.row import chosen, pick_row

# Kinds of parameters. The values are parts of names that the parameter groups of a row match. A
# shared parameter has the kind whose value comes first in the alphabet. OTHER: kernels of
# convolutions, stacks of experts, and everything unknown.
EMBEDDING, HEAD, VECTOR, OTHER, MATRIX = "embed", "head", "norm", "positions", "weight"


def optimizer(model: nn.Module, name: str = "adamw", **settings: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a row of OPTIMIZERS (`lpkit.optim.classes`), with these settings, for
    the trained parameters of `model`. A rule for matrices updates the weights of Linears. Other
    kinds of parameters get the rule, learning rate and weight decay that they have in a run of the
    kit (vectors: no weight decay)."""
    heads, facts, groups, base = output_heads(model), {}, {}, getattr(model, "base_model", None)
    # a classifier of transformers
    if isinstance(base, nn.Module) and hasattr(model, "num_labels"):
        heads |= {module for module in {*model.modules()} - {*base.modules()}
                  if getattr(module, "out_features", None) == model.num_labels}
    own = {key: settings[key] for key in settings.keys() & {"lr", "weight_decay"}}
    row = replace(chosen(OPTIMIZERS, name, "optimizer"), **own)
    for module in model.modules():
        turned = transposed(module)
        linear = turned or isinstance(module, nn.Linear)
        for key, p in module.named_parameters(recurse=False):
            kind = VECTOR if p.ndim < 2 else OTHER
            weight = linear and key == "weight"
            if p.ndim == 2 and (weight or isinstance(module, nn.MultiheadAttention)):
                kind = HEAD if module in heads else MATRIX
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                kind = EMBEDDING
            layout = "transposed" if turned else "thirds" if key == "in_proj_weight" else ""
            kind = min(kind, facts.get(p, (MATRIX,))[0])
            facts[p] = kind, layout, getattr(module, "decays", None)
    for label, p in [pair for pair in model.named_parameters() if pair[1].requires_grad]:
        kind, layout, decays = facts[p]
        parameter = Parameter(kind, tuple(n for n in p.shape if n > 1), decays=decays)
        [of] = [group for group in parameter_groups([parameter], row) if group.names]
        key = of.settings.name, of.lr, of.weight_decay, layout * find(of.settings.name).matrices
        groups.setdefault(key, []).append((label, p))
    param_groups = [{"params": params, **dict(zip(("rule", "lr", "weight_decay", "layout"), key))}
            for key, params in groups.items()]
    return classes.optimizer(name)(sorted(param_groups, key=lambda group: group["rule"] != name),
                                   **settings)


def keep_activations(blocks: Iterable[nn.Module], recompute: str = "none",
                     offload: str = "device") -> None:
    """Set how the `blocks` of a model (`model.model.layers`) keep activations for the backward
    pass. `del block.forward` undoes it.

    recompute: none, block or selective
    offload:   a row of ACTIVATION_OFFLOAD

    Gradients are bit-exact, except if the row stores activations in fewer bits. Raises ConfigError.
    """
    blocks = [*dict.fromkeys(blocks)]
    if not blocks or any("forward" in vars(block) for block in blocks):
        raise ConfigError("keep_activations needs blocks whose forward is that of their class; "
                          "`del block.forward` undoes an earlier call")
    again = pick({name: row for name, row in RECOMPUTE.items()
                  if not (row.attention_alone or row.needs_compile)}, recompute, "recompute")
    away = pick_row(ACTIVATION_OFFLOAD, offload, "memory.activation_offload").load()
    # the Dropout tells the transforms that a block may draw random numbers
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "draws": nn.Dropout()})
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for transform in (*again.load()(again.settings).transforms, *away(device).transforms):
        vars(transform)["masked"] = True
        transform(model)
