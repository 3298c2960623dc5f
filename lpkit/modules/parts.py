"""The kit's optimizers, recomputation and activation offload, for any model."""

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

# Kinds of parameters. The parameter groups of a row choose parameters by parts of their names in
# the kit's own models; each kind is such a part, and stands for a parameter of any model. A
# parameter that several modules share gets the kind that comes first in the alphabet. OTHER:
# kernels of convolutions, stacks of experts, and all unknown parameters.
EMBEDDING, HEAD, VECTOR, OTHER, MATRIX = "embed", "head", "norm", "positions", "weight"


def optimizer(model: nn.Module, name: str = "adamw", **settings: Any) -> torch.optim.Optimizer:
    """Return the optimizer `name`, a row of OPTIMIZERS, for the trained parameters of `model`
    (`lpkit.optim.classes`). `settings`: those of the row.

    A rule for matrices, such as Muon, updates the weights of Linears. Embeddings, the output head,
    vectors and other parameters get the rule, learning rate and weight decay that they have in a
    run of the kit; vectors have no weight decay. Raises ConfigError."""
    heads, facts, groups, base = output_heads(model), {}, {}, getattr(model, "base_model", None)
    # in a classifier of transformers, Linears outside of the base model with one output per label
    # are heads, too
    if isinstance(base, nn.Module) and hasattr(model, "num_labels"):
        heads |= {module for module in {*model.modules()} - {*base.modules()}
                  if getattr(module, "out_features", None) == model.num_labels}
    rates = {key: settings[key] for key in settings.keys() & {"lr", "weight_decay"}}
    row = replace(chosen(OPTIMIZERS, name, "optimizer"), **rates)
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
    """Set how the `blocks` of a model (such as `model.model.layers`) store activations for the
    backward pass. `del block.forward` undoes it for a block.

    recompute: none, block or selective
    offload:   a row of ACTIVATION_OFFLOAD

    Gradients stay bit-exact, unless the row stores activations in fewer bits. Raises ConfigError.
    """
    blocks = [*dict.fromkeys(blocks)]
    if not blocks or any("forward" in vars(block) for block in blocks):
        raise ConfigError("keep_activations needs blocks whose forward is that of their class; "
                          "`del block.forward` undoes an earlier call")
    again = pick({name: row for name, row in RECOMPUTE.items()
                  if not (row.attention_alone or row.needs_compile)}, recompute, "recompute")
    away = pick_row(ACTIVATION_OFFLOAD, offload, "memory.activation_offload").load()
    # Because of the Dropout, the transforms assume that a block draws random numbers, and restore
    # the state of the generator when they run a block again.
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "draws": nn.Dropout()})
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for transform in (*again.load()(again.settings).transforms, *away(device).transforms):
        vars(transform)["masked"] = True
        transform(model)
