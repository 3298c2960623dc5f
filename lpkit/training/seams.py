"""Tries rows on something small before a run begins, to find rows that their interface cannot
carry.

A row from outside of the kit may need more than its interface gives. A block may set a weight, and
the initialisation fills every parameter afterwards. An optimizer may read whole parameters, and
ZeRO gives it rows. Neither raises an error: both would train other numbers. Here both are refused.
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
    """Raises ConfigError for a config that would silently train other numbers than it says."""
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
    """Refuses a part from outside that sets a parameter which the initialisation then fills. Such a
    parameter is one number everywhere, or belongs to a module that is not PyTorch's."""
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
        own = not type(holder).__module__.startswith(("torch.", *OWN))
        same = bool((was == was.flatten()[0]).all())
        if (own or same) and not torch.equal(was, p):
            first = f"{was.flatten()[0].item():.3g}"
            raise ConfigError(
                f"model.init={m.init.name} fills every parameter, also {name}, which "
                f"{' or '.join(parts)} sets to {first if same else f'{first}, ...'}; add a row to "
                f"lpkit.techniques.inits that leaves it as it is, and name that, or "
                f"give the part a method reset(init), which comes after the initialisation")


def refuse_rows(config: Config) -> None:
    """Refuses an optimizer whose update of a parameter differs from the updates of its rows."""
    layout = config.parallel
    for settings in optimizers.rules(config.optimizer):
        row = optimizers.find(settings.name)
        if layout.tensor > 1 and row.after:
            raise ConfigError(f"optimizer={settings.name} may read all logits of a token after an "
                              f"update, and parallel.tensor={layout.tensor} gives each rank a part "
                              f"of them; set parallel.tensor=1")
        if layout.tensor > 1:
            _refuse_parts(settings, 1, f"parallel.tensor={layout.tensor} gives each rank a part "
                                       f"of it", "parallel.tensor=1")
        if layout.stage and not row.told:
            _refuse_parts(settings, 0, f"ZeRO {layout.stage} gives each rank rows of it",
                          "parallel.zero=0, or let its row be told, and its rule ask "
                          "contracts.Parameter for norms and whole tensors")


def _refuse_parts(settings: OptimizerSettings, dim: int, parts: str, way_out: str) -> None:
    """Compares an update of halves along `dim` with an update of the whole."""
    row = optimizers.find(settings.name)
    rule, draw = row.load(), torch.Generator().manual_seed(0)
    w = torch.randn(32, 32, generator=draw)
    g = torch.randn(32, 32, generator=draw)
    # halves of different size, so that a norm of the whole differs from a norm of its rows
    w.narrow(dim, 16, 16).mul_(100)
    g.narrow(dim, 0, 16).mul_(100)

    def updated(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        w, shapes = w.clone(), [slot.shape(tuple(w.shape), settings) for slot in row.slots]
        slots = [w.new_zeros(w.shape if shape is None else shape) for shape in shapes]
        for update in (1, 2):
            rule(w, g.clone(), slots, settings, update)
        return w

    # a rule with `told` asks its Parameter for the other parts, which halves do not have
    halves = () if row.told else map(updated, w.chunk(2, dim), g.chunk(2, dim))
    near = {"rtol": 1e-6, "atol": 1e-7}
    if row.told or not torch.allclose(updated(w, g), torch.cat([*halves], dim), **near):
        raise ConfigError(f"optimizer={settings.name} reads a parameter as a whole, and {parts}, "
                          f"which it would update otherwise; set {way_out}")


def governing(governors: Mapping[str, Governor]) -> dict[str, Choice]:
    """Returns the warning to record for governors that change weights before an update."""
    names = ", ".join(name for name, governor in governors.items() if not hasattr(governor, "end"))
    why = ("it changes weights before an update, which changes them again: what is evaluated, "
           "sampled and saved is as the update left it; a governor's `end` comes after it")
    return {"governors": Choice(asked=names, used=names, why=why)} if names else {}
