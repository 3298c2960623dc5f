"""The optimizer that applies every rule of `lpkit.optim.rules`: the stepper.

A slot is a tensor of optimizer state, for example the first moments of a parameter. The stepper
updates one parameter at a time:

1. It fetches the slots from where they are stored, while the previous parameter is updated.
2. It decodes the slots to float32 (`moments`). A 16-bit weight is converted to float32.
3. The rule changes weight and slots in place.
4. It encodes the slots and writes them back. A 16-bit weight is rounded stochastically
   (`rounding`).

With float32 slots and weights, the results are bit-equal to the rule's. On a GPU a single kernel
does steps 2 to 4 (`one_pass`), if there is one for the rule, and PyTorch has none for these
weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lpkit.contracts import Choice, Parameter, StatePlacement
from lpkit.errors import ConfigError
from lpkit.optim.rounding import generator, noise, to_bf16
from lpkit.techniques import optimizers
from lpkit.techniques.kernels import asked_of
from lpkit.techniques.optimizers import Optimizer, OptimizerSettings

if TYPE_CHECKING:   # imported only if a kernel is used, on a GPU
    from lpkit.optim.one_pass import OnePass


def build(named: Mapping[str, nn.Parameter], settings: OptimizerSettings, *,
          moment_format: str = "float32", placement: StatePlacement | None = None, seed: int = 0,
          kernels: str = "auto", by_first: Callable = operator.call,
          facts: Callable[[str], Parameter] | None = None) -> torch.optim.Optimizer:
    """Return the optimizer `settings.name`: PyTorch's fused optimizer if it computes the same,
    otherwise a Stepper.

    named:         the trained parameters, by name
    moment_format: format of the state, `memory.moment_format`
    placement:     where state is stored; None: on the device
    seed:          seed of stochastic rounding
    kernels:       `system.kernels`
    by_first:      `Ranks.by_first`: calls a function on the first rank, and returns its result on
                   all ranks
    facts:         a function that returns the `Parameter` of a name: its shape, and how ranks share
                   it (`Sharding.parameter`). None: no parameter is sharded

    Raises ConfigError for an unknown name or pattern, and for a format or place of state that the
    optimizer does not support.
    """
    facts = facts or (lambda name: Parameter(name, tuple(named[name].shape)))
    parameter_groups = optimizers.parameter_groups(map(facts, named), settings)
    rows = {group.settings: optimizers.find(group.settings.name) for group in parameter_groups}
    placement = placement or StatePlacement()
    stays = placement.name == StatePlacement.name
    plain = stays and not optimizers.find_format(moment_format).encoded
    if not any(row.slots for row in rows.values()) and not plain:
        raise ConfigError(f"optimizer={settings.name} keeps no state, so that memory.moment_format "
                          f"and memory.optimizer_state change nothing; leave them at their "
                          f"defaults")
    # one PyTorch optimizer for all parameters, if they have one rule and are plain float32
    groups = [{"params": [named[name] for name in group.names], "lr": group.lr,
               "weight_decay": group.weight_decay} for group in parameter_groups]
    fused = optimizers.find(settings.name).fused
    if (fused and plain and len(rows) == 1
            and all(p.dtype == torch.float32 for p in named.values())):
        return resolve_name(fused)(groups, settings)
    for group, of in zip(groups, parameter_groups):
        group["settings"] = of.settings
    return Stepper(groups, settings, moment_format=moment_format, placement=placement, seed=seed,
                   kernels=kernels, by_first=by_first,
                   facts={p: facts(name) for name, p in named.items()})


@dataclass(frozen=True)
class ParameterRule:
    """The rule of a parameter: its row and settings, the function that updates the parameter, and
    the single kernel that does the same, or None."""

    row: Optimizer
    settings: OptimizerSettings
    function: Callable[..., None]
    one_pass: OnePass | None


class Stepper(torch.optim.Optimizer):
    """Updates parameters by any rule. The state of a parameter is `update`, the number of its
    updates so far, and the stored tensors of its slots.

    groups:   parameter groups as in torch.optim; `settings` of a group names its own rule
    facts:    facts about each parameter (`contracts.Parameter`)
    Other arguments are those of `build`. The random numbers of stochastic rounding depend only on
    the seed, the parameter and the update, so a resumed run has the same numbers.
    """

    def __init__(self, groups: list[dict], settings: OptimizerSettings, *, moment_format: str,
                 placement: StatePlacement, seed: int, kernels: str, by_first: Callable,
                 facts: Mapping[nn.Parameter, Parameter]):
        super().__init__(groups, {"lr": settings.lr, "weight_decay": settings.weight_decay,
                                  "settings": settings})
        self.moment_format = moment_format
        self.codec = optimizers.find_format(moment_format).load()()
        self.placement, self.seed, self.facts = placement, seed, facts
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.number = {p: i for i, p in enumerate(parameters)}
        plain = not optimizers.find_format(moment_format).encoded
        # Functions (g, slots, settings) by settings. If there are any, `step` calls them instead of
        # rules, and changes no weight (for rules that estimate curvature between updates).
        self.instead: Mapping[OptimizerSettings, Callable[..., None]] = {}
        self.rule_of: dict[nn.Parameter, ParameterRule] = {}
        self.choices: dict[str, Choice] = {}
        for of in dict.fromkeys(group["settings"] for group in self.param_groups):
            row = optimizers.find(of.name)
            its = [p for group in self.param_groups if group["settings"] == of
                   for p in group["params"]]
            fast = None
            serves = any(p.is_cuda and not (row.kernel and p.dtype == torch.float32) for p in its)
            if plain and row.one_pass and (serves or asked_of(kernels, of.name) != "auto"):
                choose = resolve_name(row.one_pass)
                fast, choices = choose(of.name, kernels, its, by_first)
                self.choices |= choices
            rule = ParameterRule(row, of, resolve_name(row.kernel or row.implementation), fast)
            self.rule_of |= dict.fromkeys(its, rule)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        work = []
        for group in self.param_groups:
            work += [(p, group) for p in group["params"] if p.grad is not None
                     and (not self.instead or self.rule_of[p].settings in self.instead)]
        fetched = self._fetch([p for p, _ in work])
        # `fetched` is the first argument of zip, so that zip runs it to its end, where it writes
        # back the last tensors.
        for tensors, (p, group) in zip(fetched, work):
            self.state[p]["update"] += not self.instead
            self._update(p, group, tensors, self.state[p]["update"])

    def _fetch(self, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
        """Yield the state tensors of each parameter, on its device. While the caller updates a
        parameter, the tensors of the next parameter are fetched. When the caller requests the next
        parameter, the changed tensors of the previous one are written back."""
        stored = [self._stored(p) for p in parameters]
        coming = []
        for i, tensors in enumerate(stored):
            # fetch the tensors of this parameter, if necessary, and of the next
            coming += [self.placement.prefetch(stored[j], parameters[j].device)
                       for j in range(i + len(coming), min(i + 2, len(stored)))]
            used = coming.pop(0)()
            yield used
            # A generator continues here when the caller requests the next parameter, so the update
            # is complete.
            self.placement.write_back(tensors, used)

    def is_cut(self, p: nn.Parameter, name: str) -> bool:
        """Return whether the tensor `name` of p's state is sharded like p. Otherwise, because its
        slot has a shape of its own, every rank has the whole tensor."""
        return not any(name in (slot.name + suffix for suffix in self.codec.suffixes)
                       and slot.shape(self.facts[p].shape, self.rule_of[p].settings) is not None
                       for slot in self.rule_of[p].row.slots)

    @torch.no_grad()
    def evaluated(self, p: nn.Parameter) -> Tensor | None:
        """Return the weights that an evaluation uses instead of p, for example an average of past
        weights; None: p itself."""
        rule = self.rule_of[p]
        if not (rule.row.evaluated and self.state[p]):
            return None
        slots = self._decoded(self.placement.prefetch(self._stored(p), p.device)(), rule)
        function = resolve_name(rule.row.evaluated)
        return function(p.detach().float(), slots, rule.settings).to(p.dtype)

    def _decoded(self, tensors: list[Tensor], rule: ParameterRule) -> list[Tensor]:
        """Return the slots in float32, from their stored tensors."""
        return [self.codec.decode(part, signed=slot.signed)
                for part, slot in zip(self._by_slot(tensors), rule.row.slots)]

    def _by_slot(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Return the stored tensors of each slot: in 8 bits, codes and scales."""
        each = len(self.codec.suffixes)
        return [tensors[i:i + each] for i in range(0, len(tensors), each)]

    def _stored(self, p: nn.Parameter) -> list[Tensor]:
        """Return the stored tensors of p, which are zeros before the first update. Their names in a
        checkpoint are the slot's name + a suffix of the format."""
        slots = self.rule_of[p].row.slots
        names = [slot.name + suffix for slot in slots for suffix in self.codec.suffixes]
        state = self.state[p]
        if not state:
            state["update"] = 0
            zeros = []
            for slot in slots:
                shape = slot.shape(self.facts[p].shape, self.rule_of[p].settings)
                like = p if shape is None else p.new_empty(shape)
                zeros += self.codec.zeros(like, signed=slot.signed)
            for name, t in zip(names, zeros, strict=True):
                state[name] = self.placement.store(t)
        return [state[name] for name in names]

    def _update(self, p: nn.Parameter, group: dict, tensors: list[Tensor], update: int) -> None:
        """Update p and the stored tensors of its slots. `update`: the number of this update."""
        of_group, rule = {"lr": group["lr"], "weight_decay": group["weight_decay"]}, self.rule_of[p]
        now = SimpleNamespace(**vars(rule.settings) | of_group)
        drawing = None
        if p.dtype != torch.float32:
            drawing = generator(p.device, self.seed, self.number[p], update)
        if rule.one_pass and p.is_contiguous() and not self.instead:
            bits = None if drawing is None else noise(p, drawing)
            w = p.detach()
            rule.one_pass.launch(w, p.grad.contiguous(), tensors, bits, now, update, (w, *tensors))
            return
        slots = self._decoded(tensors, rule)
        w = p.detach() if drawing is None else p.float()
        parameter = (self.facts[p],) if rule.row.takes_parameter else ()
        if self.instead:
            self.instead[rule.settings](p.grad.float(), slots, now)
        else:
            rule.function(w, p.grad.float(), slots, now, update, *parameter)
        for part, moment, slot in zip(self._by_slot(tensors), slots, rule.row.slots):
            self.codec.encode(part, moment, signed=slot.signed)
        if drawing is not None and not self.instead:
            p.copy_(to_bf16(w, drawing))


def recorded(optimizer: torch.optim.Optimizer, chosen: Mapping[str, Choice]) -> dict[str, Choice]:
    """Return the choices to record in a run: `chosen`, corrected by what the built `optimizer`
    really does: where its state is, in which format, and how 16-bit weights are rounded."""
    does, rounding = {"optimizer_state": StatePlacement.name, "moment_format": "float32"}, "nearest"
    if isinstance(optimizer, Stepper):
        does = {"optimizer_state": optimizer.placement.name,
                "moment_format": optimizer.moment_format}
        rounding = "stochastic"
        chosen = {**chosen, **optimizer.choices}
    choices = dict(chosen)
    for key in does.keys() & choices.keys():
        if choices[key].used != does[key]:
            why = f"the optimizer {type(optimizer).__name__} does this"
            choices[key] = replace(choices[key], used=does[key], why=why)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype != torch.float32 for p in parameters):
        why = ("of bf16 weights after their update in float32: small updates survive on average "
               "(Zamirai et al. 2020, arXiv:2010.06192)")
        choices["rounding"] = Choice(asked="stochastic", used=rounding, why=why)
    return choices
