"""One stepper for every rule. It owns where slots are stored, their format, and rounding.

A parameter at a time: its slots are fetched while the one before is updated, and decoded; the rule
changes float32 numbers in place; slots are encoded and written back. A weight of 16 bits is widened
for its update and rounded stochastically (`rounding`). Slots that are stored as float32 beside
float32 weights give the bits of the rule itself. On a GPU all of it is one kernel where there is
one (`one_pass`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lpkit.contracts import Choice, StatePlacement
from lpkit.errors import ConfigError
from lpkit.optim import one_pass
from lpkit.optim.rounding import generator, noise, to_bf16
from lpkit.techniques import optimizers
from lpkit.techniques.optimizers import OptimizerSettings


def build(named: Mapping[str, nn.Parameter], settings: OptimizerSettings, *,
          moment_format: str = "float32", placement: StatePlacement | None = None, seed: int = 0,
          kernels: str = "auto", by_first: Callable = operator.call) -> torch.optim.Optimizer:
    """The optimizer of `settings.name` for trained parameters by their names. `placement` None: on
    the device. `seed`: of rounding. `kernels`: as `system.kernels`; `by_first`: as
    `Ranks.by_first`, which chooses among them.

    Raises ConfigError for an unknown name or pattern, and for a format or place of state that the
    optimizer does not keep.
    """
    row = optimizers.find(settings.name)
    stays = placement is None or placement.name == StatePlacement.name
    plain = stays and not optimizers.find_format(moment_format).encoding_bytes
    if not row.slots and not plain:
        raise ConfigError(f"optimizer={settings.name} keeps no state, so that memory.moment_format "
                          f"and memory.optimizer_state change nothing; leave them at their "
                          f"defaults")
    groups = []
    for group in optimizers.parameter_groups(list(named), settings):
        groups.append({"params": [named[name] for name in group.names], "lr": group.lr,
                       "weight_decay": group.weight_decay})
    if row.fused and plain and all(p.dtype == torch.float32 for p in named.values()):
        return resolve_name(row.fused)(groups, settings)
    return Stepper(groups, settings, moment_format=moment_format, placement=placement, seed=seed,
                   kernels=kernels, by_first=by_first)


class Stepper(torch.optim.Optimizer):
    """State of each parameter: `update`, the number of updates, and the tensors of its slots.

    The noise of rounding depends on the seed, the parameter and the update alone.
    """

    def __init__(self, groups: list[dict], settings: OptimizerSettings, *,
                 moment_format: str = "float32", placement: StatePlacement | None = None,
                 seed: int = 0, kernels: str = "auto", by_first: Callable = operator.call):
        super().__init__(groups, {"lr": settings.lr, "weight_decay": settings.weight_decay})
        row = optimizers.find(settings.name)
        self.settings, self.slots = settings, row.slots
        self.rule = resolve_name(row.kernel or row.implementation)
        self.moment_format = moment_format
        self.codec = optimizers.find_format(moment_format).load()()
        self.placement, self.seed = placement or StatePlacement(), seed
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.number = {p: i for i, p in enumerate(parameters)}
        plain = not optimizers.find_format(moment_format).encoding_bytes
        self.one_pass, self.choices = (
            one_pass.chosen(settings.name, kernels, parameters, by_first) if plain else (None, {}))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        work = []
        for group in self.param_groups:
            work += [(p, group) for p in group["params"] if p.grad is not None]
        fetched = self._fetch([p for p, _ in work])
        for tensors, (p, group) in zip(fetched, work):  # in this order: `fetched` ends itself
            self.state[p]["update"] += 1
            self._update(p, group, tensors, self.state[p]["update"])

    def _fetch(self, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
        """The tensors of each parameter on its device. While the caller uses them, the next ones
        travel; when it comes back for those, the first ones are written back."""
        stored = [self._stored(p) for p in parameters]
        coming = []
        for i, tensors in enumerate(stored):
            for j in range(i + len(coming), min(i + 2, len(stored))):   # this one and the next one
                coming.append(self.placement.prefetch(stored[j], parameters[j].device))
            used = coming.pop(0)()
            yield used
            self.placement.write_back(tensors, used)

    def _stored(self, p: nn.Parameter) -> list[Tensor]:
        """Zeros before the first update. A checkpoint holds them as slot + suffix."""
        names = [slot.name + suffix for slot in self.slots for suffix in self.codec.suffixes]
        state = self.state[p]
        if not state:
            state["update"] = 0
            zeros = [t for slot in self.slots for t in self.codec.zeros(p, signed=slot.signed)]
            for name, t in zip(names, zeros, strict=True):
                state[name] = self.placement.store(t)
        return [state[name] for name in names]

    def _update(self, p: nn.Parameter, group: dict, tensors: list[Tensor], update: int) -> None:
        of_group = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        now = SimpleNamespace(**vars(self.settings) | of_group)
        drawing = None
        if p.dtype != torch.float32:
            drawing = generator(p.device, self.seed, self.number[p], update)
        if self.one_pass and p.is_contiguous():
            bits = None if drawing is None else noise(p, drawing)
            w = p.detach()
            self.one_pass.launch(w, p.grad.contiguous(), tensors, bits, now, update, (w, *tensors))
            return
        each = len(self.codec.suffixes)
        parts = [tensors[i:i + each] for i in range(0, len(tensors), each)]
        slots = [self.codec.decode(part, signed=slot.signed)
                 for part, slot in zip(parts, self.slots)]
        w = p.detach() if drawing is None else p.float()
        self.rule(w, p.grad.float(), slots, now, update)
        for part, moment, slot in zip(parts, slots, self.slots):
            self.codec.encode(part, moment, signed=slot.signed)
        if drawing is not None:
            p.copy_(to_bf16(w, drawing))


def recorded(optimizer: torch.optim.Optimizer, chosen: Mapping[str, Choice]) -> dict[str, Choice]:
    """`chosen` as the built `optimizer` carries it out: where its state is, its format, and how
    weights of 16 bits are rounded. What it does otherwise than decided replaces the decision."""
    does, rounding = {"optimizer_state": StatePlacement.name, "moment_format": "float32"}, "nearest"
    if isinstance(optimizer, Stepper):
        does = {"optimizer_state": optimizer.placement.name,
                "moment_format": optimizer.moment_format}
        rounding = "stochastic"
        chosen = {**chosen, **optimizer.choices}
    found = dict(chosen)
    for key in does.keys() & found.keys():
        if found[key].used != does[key]:
            why = f"the optimizer that was built, {type(optimizer).__name__}, does this"
            found[key] = replace(found[key], used=does[key], why=why)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype != torch.float32 for p in parameters):
        why = ("of bf16 weights after their update in float32: small updates survive on average "
               "(Zamirai et al. 2020, arXiv:2010.06192)")
        found["rounding"] = Choice(asked="stochastic", used=rounding, why=why)
    return found
