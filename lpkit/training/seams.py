"""Refuse techniques of other packages that would silently train other numbers than their authors
intend. Each is tried on small tensors before a run begins.

A module may set initial values of its parameters, but the initialisation fills every parameter
afterwards. An optimizer may need a whole parameter, but with ZeRO or tensor parallelism it gets
only a part of it. Neither case raises an error by itself, so both are checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lpkit.config import Config
from lpkit.contracts import Choice, Governor
from lpkit.errors import ConfigError
from lpkit.nn.init import initialise
from lpkit.nn.transformer import Transformer
from lpkit.techniques import blocks, optimizers
from lpkit.techniques.attention import KINDS
from lpkit.techniques.optimizers import OptimizerSettings

OWN = ("lpkit.", "lessons.rows.")     # the kit's implementations
PARTS = {"block": blocks.BLOCKS, "norm": blocks.NORMS, "mlp": blocks.MLPS, "attention": KINDS}


def refuse(config: Config) -> None:
    """Raise ConfigError if a technique that `config` names would not work as its author intends."""
    reads = [change.name for change in config.model.changes if getattr(change, "reads_base", False)]
    if reads and config.parallel.stage > 1:
        raise ConfigError(f"model.changes={reads[0]} is initialised from whole weights, "
                          f"and ZeRO {config.parallel.stage} gives each rank rows; set "
                          f"parallel.zero=1")
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.no_grad():
        refuse_overwritten(config)
        if config.parallel.stage or config.parallel.tensor > 1:
            refuse_rows(config)


def refuse_overwritten(config: Config) -> None:
    """Raise ConfigError if a module of another package sets a parameter, and the initialisation
    then overwrites it. A parameter counts as set if all of its numbers are equal (as 1 in a norm),
    or if its module is not from PyTorch, whose modules fill their parameters with random numbers.
    """
    m = config.model
    named = {field: getattr(getattr(m, field), "name", getattr(m, field)) for field in PARTS}
    parts = [f"model.{field}={name}" for field, name in named.items()
             if not (PARTS[field][name].implementation or "lpkit.").startswith(OWN)
             and not hasattr(PARTS[field][name].load(), "reset")]
    if not parts:
        return
    model = Transformer(replace(m, layers=1, vocab=2, changes=()))
    before = {name: p.clone() for name, p in model.named_parameters()}
    initialise(model, m.init)
    for name, p in model.named_parameters():
        was, holder = before[name], model.get_submodule(name.rpartition(".")[0])
        foreign = not type(holder).__module__.startswith(("torch.", *OWN))
        same = bool((was == was.flatten()[0]).all())
        if (foreign or same) and not torch.equal(was, p):
            first = f"{was.flatten()[0].item():.3g}"
            raise ConfigError(
                f"model.init={m.init.name} fills every parameter, also {name}, which "
                f"{' or '.join(parts)} sets to {first if same else f'{first}, ...'}; add a row to "
                f"lpkit.techniques.inits that does not change it, and set model.init to it, or "
                f"give the module a method reset(init), which is called after the initialisation")


def refuse_rows(config: Config) -> None:
    """Raise ConfigError if the layout gives an optimizer only a part of each parameter, and the
    update of a whole parameter differs from the updates of its parts."""
    layout = config.parallel
    for settings in optimizers.rules(config.optimizer):
        row = optimizers.find(settings.name)
        if layout.tensor > 1 and row.after:
            raise ConfigError(f"optimizer={settings.name} may read all logits of a token after an "
                              f"update, and parallel.tensor={layout.tensor} gives each rank a part "
                              f"of them; set parallel.tensor=1")
        if layout.tensor > 1:
            _refuse_parts(settings, 1, f"parallel.tensor={layout.tensor} gives each rank a part "
                                       f"of each parameter", "parallel.tensor=1")
        if layout.stage and not row.takes_parameter:
            _refuse_parts(settings, 0, f"ZeRO {layout.stage} gives each rank rows of each "
                                       f"parameter",
                          "parallel.zero=0, or set takes_parameter=True in its row, and let its "
                          "rule ask contracts.Parameter for norms and whole tensors")


def _refuse_parts(settings: OptimizerSettings, dim: int, parts: str, way_out: str) -> None:
    """Raise ConfigError if two updates of a 32 x 32 parameter differ from the same updates of its
    two halves along `dim`. `parts` and `way_out` are clauses for the error."""
    row = optimizers.find(settings.name)
    rule, draw = row.load(), torch.Generator().manual_seed(0)
    w = torch.randn(32, 32, generator=draw)
    g = torch.randn(32, 32, generator=draw)
    # one half has larger numbers, so that the norm of the whole differs from the norm of a half
    w.narrow(dim, 16, 16).mul_(100)
    g.narrow(dim, 0, 16).mul_(100)

    def updated(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        w, shapes = w.clone(), [slot.shape(tuple(w.shape), settings) for slot in row.slots]
        slots = [w.new_zeros(w.shape if shape is None else shape) for shape in shapes]
        for update in (1, 2):
            rule(w, g.clone(), slots, settings, update)
        return w

    # A rule with `takes_parameter` asks its Parameter for the numbers of other ranks. These halves
    # have no Parameter, so such a rule is always refused (only tensor parallelism calls it).
    halves = () if row.takes_parameter else map(updated, w.chunk(2, dim), g.chunk(2, dim))
    near = {"rtol": 1e-6, "atol": 1e-7}
    if row.takes_parameter or not torch.allclose(updated(w, g), torch.cat([*halves], dim), **near):
        raise ConfigError(f"optimizer={settings.name} needs whole parameters, because the update "
                          f"of a part differs from that part of the whole update; {parts}; set "
                          f"{way_out}")


def governing(governors: Mapping[str, Governor]) -> dict[str, Choice]:
    """Return a warning, for the run's recorded choices, if a governor has no method `end`. Such a
    governor changes weights only before an update."""
    names = ", ".join(name for name, governor in governors.items() if not hasattr(governor, "end"))
    why = ("it changes weights before an update, which changes them again: what is evaluated, "
           "sampled and saved is as the update left it; a governor's `end` comes after it")
    return {"governors": Choice(asked=names, used=names, why=why)} if names else {}
