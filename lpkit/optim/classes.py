"""Rows as classes of PyTorch's kind: parameters, groups, closures, schedulers and state_dict are as
in torch.optim, and settings the row's, with beta1 and beta2 as `betas`. All of a group decays."""

from dataclasses import replace
from functools import cache
from pkgutil import resolve_name
from types import SimpleNamespace

import torch

from lpkit.contracts import Parameter
from lpkit.errors import ConfigError, nearest, shown
from lpkit.techniques import optimizers

BETAS = ("beta1", "beta2")


@cache
def optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Returns the class of a row, for `optimizer("lion")(model.parameters(), lr=1e-4)`. Raises
    ConfigError for an unknown name, and for a rule that needs more than gradients."""
    row = optimizers.find(name)
    if row.estimate or row.evaluated:
        raise ConfigError(f"optimizer {name} needs more than gradients (labels that the model "
                          f"draws, or other weights in evaluation); use lpkit.train")
    own = {"name": name, "row": row, "__doc__": row.why, "__module__": "lpkit.optim",
           "rule": staticmethod(resolve_name(row.kernel or row.implementation))}
    return type(name.title().replace("-", ""), (_OfRow,), own)


class _OfRow(torch.optim.Optimizer):
    def __init__(self, params, lr=None, **settings):
        defaults = {key: value for key, value in vars(self.row.settings).items()
                    if key not in ("name", "clip", "groups")}
        if "beta1" in defaults:
            defaults["betas"] = tuple(map(defaults.pop, BETAS))
        for key in settings.keys() - defaults:
            raise TypeError(f"{self.name} has no setting {shown(key)}; {nearest(key, defaults)}")
        super().__init__(params, defaults | settings | ({} if lr is None else {"lr": lr}))

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups.pop()     # back if nothing is wrong
        self._settings(group)
        takes, sides = "tensors", range(99)
        if self.row.gathers:
            takes, sides = ("matrices", [2]) if self.row.matrices else ("1- and 2-D tensors", [1, 2])
        for p in group["params"]:
            if p.ndim not in sides or p.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{self.name} updates {takes} of float32 or float64, got "
                                 f"{p.dtype} of shape {tuple(p.shape)}; leave it out")
        self.param_groups.append(group)

    def _settings(self, group: dict) -> SimpleNamespace:
        """The group's settings as they are now: schedulers change them."""
        if len(group.get("betas", BETAS)) != 2:
            raise ValueError(f"betas must be two numbers, got {shown(group['betas'])}")
        own = {**group, **dict(zip(BETAS, group["betas"]) if "betas" in group else ())}
        own = {key: own[key] for key in own.keys() & vars(self.row.settings)}
        rate = {"name": self.name, "lr": group["lr"] or 1.0}    # of a run it is never 0
        checked = replace(self.row.settings, **own | rate)
        return SimpleNamespace(**vars(checked) | {"lr": group["lr"]})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            settings = self._settings(group)
            for p in [p for p in group["params"] if p.grad is not None]:
                state, told = self.state[p], Parameter("a parameter", tuple(p.shape))
                for slot in () if state else self.row.slots:
                    shape = slot.shape(told.shape, settings)
                    state[slot.name] = p.new_zeros(p.shape if shape is None else shape)
                state["step"] = int(state.get("step", 0)) + 1
                slots = [state[slot.name] for slot in self.row.slots]
                self.rule(p, p.grad.to_dense(), slots, settings, state["step"],
                          *[told] * self.row.told)
        return loss
