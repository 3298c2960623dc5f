"""Optimizers as classes like those of torch.optim: parameters, groups, closures, schedulers and
state_dict work in the same way.

Each class is made from a row of `lpkit.techniques.optimizers`, with the row's settings and
defaults; beta1 and beta2 are given as `betas`. Weight decay applies to all parameters of a group.

A group may have `rule`, the name of another row, and then has the defaults of that row. If a rule
updates matrices, a group may have `layout`: "transposed" if its weights are (in, out), or "thirds"
if each weight is three matrices, one below the other.
"""

from dataclasses import replace
from functools import cache
from itertools import repeat
from pkgutil import resolve_name
from types import SimpleNamespace

import torch

from lpkit.contracts import Parameter
from lpkit.errors import ConfigError, nearest, shown
from lpkit.techniques import optimizers

BETAS = ("beta1", "beta2")


@cache
def optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class of the row `name`, to be used like
    `optimizer("lion")(model.parameters(), lr=1e-4)`. Raises ConfigError for an unknown name, and
    for a rule that needs more than gradients."""
    row = optimizers.find(name)
    if row.after or row.evaluated:
        raise ConfigError(f"optimizer {name} needs more than gradients (more passes, or other "
                          f"weights in evaluation); use lpkit.train")
    defaults = {key: value for key, value in vars(row.settings).items()
                if key not in ("name", "clip", "groups")}
    if "beta1" in defaults:
        defaults["betas"] = tuple(map(defaults.pop, BETAS))
    rule = resolve_name(row.kernel or row.implementation)
    own = {"name": name, "row": row, "of_row": defaults, "__doc__": row.why,
           "__module__": "lpkit.optim", "rule": staticmethod(rule)}
    return type(name.title().replace("-", ""), (_OfRow,), own)


class _OfRow(torch.optim.Optimizer):
    """The base class. Class attributes of a subclass: `name` and `row`; `of_row`, the default
    settings; `rule`, the function that updates a parameter (`lpkit.optim.rules`)."""

    def __init__(self, params, lr=None, **settings):
        for key in settings.keys() - self.of_row:
            raise TypeError(f"{self.name} has no setting {shown(key)}; {nearest(key, self.of_row)}")
        super().__init__(params, self.of_row | settings | ({} if lr is None else {"lr": lr}))

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, as torch.optim does. Raises an error for settings, shapes and dtypes that
        the group's rule does not support."""
        of = optimizer(param_group.get("rule", self.name))
        super().add_param_group({**(of.of_row if of.name != self.name else {}), **param_group})
        group = self.param_groups.pop()     # appended again below if the group is valid
        of._settings(group)
        takes, sides = "tensors", range(99)
        if of.row.gathers:
            takes, sides = ("matrices", [2]) if of.row.matrices else ("1- and 2-D tensors", [1, 2])
        for p, label in zip(group["params"], group.get("param_names", repeat("it"))):
            if p.ndim not in sides or p.dtype not in (torch.float32, torch.float64):
                raise ConfigError(f"{of.name} updates {takes} of float32 or float64, got {p.dtype} "
                                 f"of shape {tuple(p.shape)}; leave {label} out, or give it a "
                                 f"group with rule='adamw'")
            if of.row.takes_parameter and hasattr(p, "placements"):
                raise ConfigError(f"{of.name} reads whole parameters, and fully_shard cuts them; "
                                  f"use adamw or lion, or lpkit.train, whose ranks gather them")
        self.param_groups.append(group)

    @classmethod
    def _settings(cls, group: dict) -> SimpleNamespace:
        """Return the group's current settings, since schedulers change them."""
        if len(group.get("betas", BETAS)) != 2:
            raise ValueError(f"betas must be two numbers, got {shown(group['betas'])}")
        own = {**group, **dict(zip(BETAS, group["betas"]) if "betas" in group else ())}
        own = {key: own[key] for key in own.keys() & vars(cls.row.settings)}
        # The check of settings refuses a learning rate of 0, which a scheduler may set.
        rate = {"name": cls.name, "lr": group["lr"] or 1.0}
        checked = replace(cls.row.settings, **own | rate)
        return SimpleNamespace(**vars(checked) | {"lr": group["lr"]})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            of, layout = optimizer(group.get("rule", self.name)), group.get("layout")
            settings = of._settings(group)
            for p in [p for p in group["params"] if p.grad is not None]:
                w, g, state = p, p.grad.to_dense(), self.state[p]
                w, g = (w.mT, g.mT) if layout == "transposed" else (w, g)
                thirds = (p.shape[0] // 3,) * 3 if layout == "thirds" else ()
                parameter = Parameter("a parameter", tuple(w.shape), fused=thirds)
                for slot in () if state else of.row.slots:
                    shape = slot.shape(parameter.shape, settings)
                    state[slot.name] = w.new_zeros(w.shape if shape is None else shape)
                state["step"] = int(state.get("step", 0)) + 1
                slots = [state[slot.name] for slot in of.row.slots]
                of.rule(w, g, slots, settings, state["step"], *[parameter] * of.row.takes_parameter)
        return loss
