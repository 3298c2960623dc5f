"""torch.compile: what it is given, and what is used here.

    blocks  each block, by one compiled function. Its graph takes parameters as inputs, so the first
            block's serves them all, and compiling a deep model takes no longer than a shallow one
    model   `model.hidden` whole, which also fuses across blocks

Either way head and loss are one more graph, so that logits do not leave it: 8 bytes move for each
of them, where a loss outside of the graph moves 36 to 44.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lpkit.contracts import Batch, Choice, Loss, Stage, Transform
from lpkit.errors import ConfigError

BLOCKS, MODEL, OFF = "blocks", "model", "off"
NUMBERS = count()       # of compiled functions
HOW = {BLOCKS: "each block is compiled once for all of them, and head and loss together",
       MODEL: "all blocks in one graph, head and loss in another"}


def choose(asked: bool | str, device: torch.device) -> Choice:
    """Raises ConfigError where compiling was asked for, and nothing here can."""
    if asked == "auto" and device.type != "cuda":
        return Choice(asked="auto", used=OFF,
                      why="on a CPU, compiling takes longer than a short run")
    if asked is False:
        return Choice(asked="false", used=OFF, why="requested")
    from lpkit.kernels import jit

    if (problem := jit.why_no_compiler(device.type)) and asked == "auto":
        return Choice(asked="auto", used=OFF, why=problem)
    if problem:
        raise ConfigError(f"system.compile={str(asked).lower()}: {problem}, or set "
                          f"system.compile=false")
    used = asked if asked in HOW else BLOCKS
    why = "compiled code is faster on a GPU" if asked == "auto" else "requested"
    return Choice(asked=str(asked).lower(), used=used, why=f"{why}: {HOW[used]}")


def compiled(function: Callable[..., Any], backend: str | Callable = "inductor") -> Callable:
    """`function`, compiled for whoever asked alone. PyTorch keeps what it compiled by code object,
    and runs the ninth variant eagerly; by file, line and name it remembers sizes, and makes them
    dynamic where a second model brings others."""
    from lpkit.kernels import jit

    # Nor does its cache on disk know the vectors that a graph was generated for: what a processor
    # with AVX-512 has left there computes NaN on one without.
    caches = torch.compiler.config
    caches.cache_key_tag = caches.cache_key_tag or torch.backends.cpu.get_cpu_capability()
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(NUMBERS)}")
    own = FunctionType(code, function.__globals__, closure=function.__closure__)
    return jit.compiled(own, backend=backend)


def _call(forward: Callable[..., Tensor], *given: Any) -> Tensor:
    return forward(*given)


@dataclass(frozen=True, kw_only=True)
class Compile(Transform):
    """Compiles a model in place: parameter names stay. `what`: a key of HOW."""

    what: str = BLOCKS
    backend: str | Callable = "inductor"
    stage = Stage.COMPILE

    def __call__(self, model: nn.Module) -> nn.Module:
        call = compiled(_call, self.backend)
        if self.what == MODEL:
            model.hidden = partial(call, model.hidden)
            return model
        for block in model.blocks:
            block.forward = partial(call, block.forward)
        model.norm.forward = partial(compiled(_call, self.backend), model.norm.forward)
        return model


class _HiddenKnown:
    """Stands for a model whose hidden states are known, for a loss to call."""

    def __init__(self, h: Tensor, head: nn.Module):
        self.h, self.head = h, head

    def hidden(self, tokens: Tensor, **beside: Tensor) -> Tensor:
        return self.h

    def __call__(self, tokens: Tensor, **beside: Tensor) -> Tensor:
        return self.head(self.h)


def with_head(loss: Loss, autocast: AbstractContextManager,
              backend: str | Callable = "inductor") -> Loss:
    """`loss`, compiled together with the head of the model that it is given."""
    def tail(h: Tensor, head: nn.Module, batch: Batch) -> Tensor:
        return loss(_HiddenKnown(h, head), batch)

    tail = compiled(tail, backend)

    def whole(model: nn.Module, batch: Batch) -> Tensor:
        with autocast:
            h = model.hidden(batch.tokens, **batch.beside)
        return tail(h, model.head, batch)

    return whole
