"""Chooses the version of each kernel that a model runs, for `system.kernels`.

A layer has a dictionary `kernels`, from its attributes to the kernels that it calls through them
(`lpkit.nn.layers`). The object that casts for a Linear has one, too
(`lpkit.precision.scaled_mm.ScaledMM`). On a GPU, all versions of a kernel are compared with the
definition and raced, on the tensors that the first layer with this kernel receives
(`lpkit.kernels.choose`). If blocks are compiled, each version is compiled before it is timed. The
fastest version becomes the attribute of every layer. On a CPU, layers keep PyTorch's versions,
unless the config requests others.
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

# Tokens in the comparison with the definition, which takes 50 times the memory of its input in
# float64; and tokens of these for the loss in chunks.
FEW = 256
LOGITS = 32


@dataclass(frozen=True, kw_only=True)
class Kernels(Transform):
    """Chooses the kernels of a model and sets them. The first rank of `ranks` chooses for all
    ranks. Raises ConfigError if `system.kernels` names a kernel that no layer calls.

    asked:    `system.kernels`
    besides:  the name of the optimizer's kernel, which is chosen elsewhere
    batch:    (B, T), sequences and tokens per sequence of a micro-batch
    piece:    tokens of a chunk of the loss; 0: the loss calls no kernel
    autocast: the context in which the model runs
    before:   the versions with which a resumed run began, by kernel
    in_block: whether blocks are compiled (a loss in chunks is never compiled)
    captured: whether a CUDA graph launches the kernels
    choices:  the choices to record, filled when the transform is called
    """

    asked: str
    besides: str = ""
    batch: tuple[int, int]
    piece: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    autocast: AbstractContextManager
    before: Mapping[str, str] = field(default_factory=dict)
    in_block: bool = False
    captured: bool = False
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
        """Return two lists of argument tuples for each kernel, by its name: with at most FEW
        tokens, for the comparison with the definition, and with a micro-batch, for the race."""
        B, T = self.batch
        (few, some), (many, logits) = self._seen(model, 1, min(T, FEW)), self._seen(model, B, T)
        arguments = {name: (list(few[name].values()), list(calls.values()))
                 for name, calls in many.items()}
        if self.piece:
            arguments[LOSS] = _of_loss(some[:LOGITS]), _of_loss(logits)
        return arguments

    def _seen(self, model: nn.Module, B: int, T: int
              ) -> tuple[dict[str, dict[tuple, tuple]], Tensor]:
        """Return the arguments of kernel calls for (B, T) tokens, by kernel and by kind of call
        (`_watched`), and the logits of the first tokens.

        The calls come from the forward of the whole model without gradients, and from a forward and
        backward of the first block. If both call a kernel, the calls of the second are used.
        """
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
    """Return two argument tuples of the loss kernel, for logits (n, V): without weights of tokens
    and with weights."""
    rows = torch.arange(len(logits), device=logits.device)
    targets = rows * 7 % logits.shape[1]
    return [(logits, targets), (logits, targets, (rows % 3).float())]


def offered(name: str) -> Mapping[str, Callable[..., Any]]:
    """Return the candidates of the kernel `name`, the definition first."""
    kernel = KERNELS[name].load()
    return kernel.offered or candidates(kernel)


@contextmanager
def watched(model: nn.Module, seen: dict[str, dict[tuple, tuple]]) -> Iterator[None]:
    """Record kernel calls in this context: `seen` gets the arguments of the first call of each
    kind, by kernel."""
    all_sites = list(sites(model))
    for module, attribute, name in all_sites:
        call = partial(_watched, getattr(module, attribute), seen.setdefault(name, {}))
        setattr(module, attribute, call)
    yield
    for module, attribute, name in all_sites:
        delattr(module, attribute)      # makes the attribute of the class visible again
        if not seen.get(name, True):
            del seen[name]


def sites(model: nn.Module) -> Iterator[tuple[Any, str, str]]:
    """Yield each place where a model calls a kernel: an object, the attribute that it calls, and
    the kernel's name."""
    for module in model.modules():
        for holder in (module, getattr(module, "arithmetic", None)):
            for attribute, name in getattr(holder, "kernels", {}).items():
                yield holder, attribute, name


def _watched(call: Callable[..., Any], seen: dict[tuple, tuple], *arguments: Any) -> Any:
    """Return call(*arguments). If this is the first call of its kind, record copies of the
    arguments. Calls are of the same kind if their tensors agree in dtype, number of dimensions and
    contiguity, and if their other arguments are equal."""
    kind = tuple((a.dtype, a.ndim, a.is_contiguous()) if isinstance(a, Tensor) else
                 type(a) if isinstance(a, tuple) else a for a in arguments)
    if kind not in seen:
        seen[kind] = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in arguments)
    return call(*arguments)
