"""`system.kernels` chooses the version of each kernel that a model runs.

A layer lists the kernels that it calls, by attribute (`lpkit.nn.layers`), and so does the object
that casts for it (`lpkit.precision.scaled_mm.ScaledMM`). On a GPU, all versions of a kernel are
verified and raced on the tensors that its first layer receives (`lpkit.kernels.choose`). If blocks
are compiled, versions are raced as a compiled block runs them. The winner is set in every layer. On
a CPU PyTorch's kernels stay, unless the config requests others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lpkit.contracts import Choice, Stage, Transform
from lpkit.errors import ConfigError
from lpkit.kernels.choose import candidates, choose, version
from lpkit.parallel.ranks import Ranks
from lpkit.techniques.kernels import KERNELS, LOSS, OF_KERNEL, asked_of, by_name

FEW = 256                   # tokens: a definition in float64 takes 50 times the memory of its input
LOGITS = 32                 # tokens of them whose loss in chunks is compared with the definition


@dataclass(frozen=True, kw_only=True)
class Kernels(Transform):
    """Chooses the kernels of a model. The first of `ranks` chooses for all ranks. Raises
    ConfigError for a kernel that no layer calls.

    asked:    `system.kernels`
    besides:  a kernel that is chosen elsewhere: the optimizer's
    batch:    sequences and tokens of a micro-batch
    piece:    tokens of a chunk of the loss; 0: the loss calls no kernel
    before:   the kernels that a resumed run began with, by name
    in_block: whether blocks are compiled (a loss in chunks is not)
    captured: whether a CUDA graph launches the kernels
    choices:  filled when the transform is called
    """

    asked: str
    besides: str = ""
    batch: tuple[int, int]
    piece: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    autocast: AbstractContextManager
    before: Mapping[str, str] = field(default_factory=dict)
    in_block: bool = False
    captured: bool = False      # also whatever launches them
    choices: dict[str, Choice] = field(default_factory=dict)
    stage = Stage.KERNELS

    def __call__(self, model: nn.Module) -> nn.Module:
        first, named = next(model.parameters()), by_name(self.asked)
        on_cpu = first.device.type != "cuda"
        if isinstance(first, FakeTensor):       # a trace runs nothing, so there is nothing to race
            return model
        at_hand = self._at_hand(model)
        for name in named.keys() - at_hand.keys() - {"", self.besides}:
            raise ConfigError(f"system.kernels={self.asked}: no layer of this model calls {name}; "
                              f"its kernels: {', '.join(at_hand)}")
        choices = self.ranks.by_first(partial(self._raced, at_hand, on_cpu=on_cpu))
        for name, choice in choices.items():
            self.choices[OF_KERNEL + name] = Choice(**choice)
            call = version(offered(name), choice["used"], at_hand[name][1])
            for module, attribute, of in sites(model):
                if of == name:
                    setattr(module, attribute, call)
        return model

    def _raced(self, at_hand: Mapping[str, tuple[list, list]], on_cpu: bool) -> dict[str, dict]:
        choices = {}
        for name, (few, many) in at_hand.items():
            asked, versions = self.before.get(name, asked_of(self.asked, name)), offered(name)
            if on_cpu and asked == "auto":
                continue
            known = asked == "auto" or asked in versions or name in by_name(self.asked)
            choice = choose(name, KERNELS[name].load(), asked if known else "auto", few, raced=many,
                            offered=versions, in_block=self.in_block and name != LOSS,
                            captured=self.captured).choice
            note = "" if known else f"it has no version {asked}; "
            choices[name] = asdict(replace(choice, asked=self.asked, why=note + choice.why))
        return choices

    def _at_hand(self, model: nn.Module) -> dict[str, tuple[list[tuple], list[tuple]]]:
        """Return the arguments of each kernel in a training forward and backward, by its name: for
        a few tokens, for which float64 has room, and for a micro-batch."""
        B, T = self.batch
        (few, some), (many, logits) = self._seen(model, 1, min(T, FEW)), self._seen(model, B, T)
        arguments = {name: (list(few[name].values()), list(calls.values()))
                 for name, calls in many.items()}
        if self.piece:
            arguments[LOSS] = _of_loss(some[:LOGITS]), _of_loss(logits)
        return arguments

    def _seen(self, model: nn.Module, B: int, T: int
              ) -> tuple[dict[str, dict[tuple, tuple]], Tensor]:
        """Return the calls by kernel and by kind (all but tensor sizes), and the logits. The calls
        come from the first block's forward and backward, and from the model's forward without
        gradients."""
        everywhere: dict[str, dict[tuple, tuple]] = {}
        trained: dict[str, dict[tuple, tuple]] = {}
        tokens = torch.arange(B * T, device=next(model.parameters()).device) % model.config.V
        state = [(buffer, buffer.clone()) for buffer in model.buffers()]
        block, given = model.blocks[0], []
        hook = block.register_forward_pre_hook(lambda _, *call: given.append(call),
                                               with_kwargs=True)
        model.eval()        # does not change the state of recipes
        with self.autocast, hook, watched(model, everywhere), torch.no_grad():
            h = model.hidden(tokens.view(B, T)).flatten(0, 1)
            logits = model.head(h[:self.piece or len(h)])
        (x, *others), named = given[0]
        x = x.detach().requires_grad_()
        draw = torch.Generator(x.device).manual_seed(0)
        with watched(model, trained), torch.enable_grad():
            with self.autocast:
                out = block(x, *others, **named)
            g = torch.randn(out.shape, generator=draw, device=out.device) * 2.0**-12
            wanted = [x, *(p for p in block.parameters() if p.requires_grad)]
            torch.autograd.grad(out, wanted, g.to(out.dtype), allow_unused=True)
        model.train()
        for buffer, before in state:
            buffer.copy_(before)
        return everywhere | trained, logits


def _of_loss(logits: Tensor) -> list[tuple]:
    """Return arguments of the loss for these logits, without and with weights of tokens."""
    rows = torch.arange(len(logits), device=logits.device)
    targets = rows * 7 % logits.shape[1]
    return [(logits, targets), (logits, targets, (rows % 3).float())]


def offered(name: str) -> Mapping[str, Callable[..., Any]]:
    kernel = KERNELS[name].load()
    return kernel.offered or candidates(kernel)


@contextmanager
def watched(model: nn.Module, seen: dict[str, dict[tuple, tuple]]) -> Iterator[None]:
    """Fill `seen` with the first call of each kind in the block."""
    all_sites = list(sites(model))
    for module, attribute, name in all_sites:
        call = partial(_watched, getattr(module, attribute), seen.setdefault(name, {}))
        setattr(module, attribute, call)
    yield
    for module, attribute, name in all_sites:
        delattr(module, attribute)      # uncovers the class's attribute
        if not seen.get(name, True):
            del seen[name]


def sites(model: nn.Module) -> Iterator[tuple[Any, str, str]]:
    for module in model.modules():
        for holder in (module, getattr(module, "arithmetic", None)):
            for attribute, name in getattr(holder, "kernels", {}).items():
                yield holder, attribute, name


def _watched(call: Callable[..., Any], seen: dict[tuple, tuple], *arguments: Any) -> Any:
    kind = tuple((a.dtype, a.ndim, a.is_contiguous()) if isinstance(a, Tensor) else
                 type(a) if isinstance(a, tuple) else a for a in arguments)
    if kind not in seen:
        seen[kind] = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in arguments)
    return call(*arguments)
