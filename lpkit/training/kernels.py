"""Which version of each of its kernels a model runs: `system.kernels`.

A layer names the kernels that it calls, by attribute (`lpkit.nn.layers`), and so does what casts
for it (`lpkit.precision.backends.ScaledMM`). On a GPU each is verified and raced on the tensors
that its first layer is given (`lpkit.kernels.choose`), and what won stands in every layer. On a CPU
PyTorch's own stay, unless others are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lpkit.contracts import Choice, Stage, Transform
from lpkit.errors import ConfigError
from lpkit.kernels.choose import candidates, choose
from lpkit.techniques.kernels import KERNELS, asked_of, by_name

OF_KERNEL = "kernel:"       # before its name, among a run's choices


@dataclass(frozen=True, kw_only=True)
class Kernels(Transform):
    """asked: `system.kernels`; besides: a kernel that is chosen elsewhere, the optimizer's; before:
    what a run that goes on was begun with, by kernel; batch: a micro-batch's sequences and tokens.
    `choices` fills up when it is called. Raises ConfigError for a kernel that no layer calls."""

    asked: str
    besides: str = ""
    batch: tuple[int, int]
    autocast: AbstractContextManager
    before: Mapping[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    stage = Stage.KERNELS

    def __call__(self, model: nn.Module) -> nn.Module:
        first, named = next(model.parameters()), by_name(self.asked)
        on_cpu = first.device.type != "cuda"
        # a trace runs nothing that could be raced
        if isinstance(first, FakeTensor) or (on_cpu and set(named.values()) == {"auto"}):
            return model
        at_hand = self._at_hand(model)
        for name in named.keys() - at_hand.keys() - {"", self.besides}:
            raise ConfigError(f"system.kernels={self.asked}: no layer of this model calls {name}; "
                              f"its kernels: {', '.join(at_hand)}")
        for name, arguments in at_hand.items():
            kernel = KERNELS[name].load()
            asked = self.before.get(name, asked_of(self.asked, name))
            if on_cpu and asked == "auto":
                continue
            known = asked == "auto" or asked in candidates(kernel) or name in named
            chosen = choose(name, kernel, asked if known else "auto", arguments)
            choice = replace(chosen.choice, asked=self.asked)
            if not known:
                choice = replace(choice, why=f"it has no version {asked}; {choice.why}")
            self.choices[OF_KERNEL + name] = choice
            for module, attribute, of in _sites(model):
                if of == name:
                    setattr(module, attribute, chosen.call)
        return model

    @torch.no_grad()
    def _at_hand(self, model: nn.Module) -> dict[str, tuple]:
        """What the first call of each kernel is given in a forward, by the kernel's name."""
        seen: dict[str, tuple] = {}
        sites = list(_sites(model))
        for module, attribute, name in sites:
            setattr(module, attribute, partial(_watched, getattr(module, attribute), name, seen))
        B, T = self.batch
        tokens = torch.arange(B * T, device=next(model.parameters()).device) % model.config.V
        model.eval()        # the state of recipes stays
        with self.autocast:
            model(tokens.view(B, T))
        model.train()
        for module, attribute, _ in sites:
            delattr(module, attribute)      # the class's own shows again
        return seen


def _sites(model: nn.Module) -> Iterator[tuple[Any, str, str]]:
    for module in model.modules():
        for holder in (module, getattr(module, "arithmetic", None)):
            for attribute, name in getattr(holder, "kernels", {}).items():
                yield holder, attribute, name


def _watched(call: Callable[..., Any], name: str, seen: dict[str, tuple], *arguments: Any) -> Any:
    if name not in seen:
        seen[name] = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
    return call(*arguments)
