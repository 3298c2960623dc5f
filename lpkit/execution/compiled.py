"""Chooses whether a run uses torch.compile, and on which parts of the model.

    blocks  each block, by one compiled function. Its graph takes the parameters as inputs, so all
            blocks use the graph of the first block, and a deep model compiles as fast as a shallow
            model
    model   `model.hidden`, all blocks in one graph, which also fuses operations across blocks

In both cases head and loss are together in one more graph. Then the GPU moves 8 bytes per logit; if
the loss is outside of the graph, it moves 36 to 44 bytes per logit.
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
NUMBERS = count()       # numbers for the names of compiled functions
HOW = {BLOCKS: "each block is compiled once for all of them, and head and loss together",
       MODEL: "all blocks in one graph, head and loss in another"}


def choose(asked: bool | str, device: torch.device) -> Choice:
    """Choose BLOCKS, MODEL or OFF. asked: `system.compile`: "auto", True, False, or the name.
    Raises ConfigError if compiling was requested and this machine has no compiler."""
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
    """Return `function`, compiled, with a new code object and a new name.

    PyTorch stores compiled variants by code object, and runs a function eagerly after eight
    variants. It also stores sizes by file, line and name, and makes them dynamic if a second model
    has other sizes. With its own code object and name, a function is not affected by other models.
    """
    from lpkit.kernels import jit

    # The keys of PyTorch's cache on disk do not contain the vector instructions of the processor.
    # Code that was compiled for AVX-512 computes NaN on a processor without it. So they are added.
    caches = torch.compiler.config
    caches.cache_key_tag = caches.cache_key_tag or torch.backends.cpu.get_cpu_capability()
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(NUMBERS)}")
    own = FunctionType(code, function.__globals__, closure=function.__closure__)
    return jit.compiled(own, backend=backend)


def _call(forward: Callable[..., Tensor], *given: Any) -> Tensor:
    return forward(*given)


@dataclass(frozen=True, kw_only=True)
class Compile(Transform):
    """Compiles a model in place; parameter names do not change. `what`: a key of HOW."""

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
    """Stands for the model in a call of a loss, if the hidden states `h` are already computed: then
    the loss only computes the head."""

    def __init__(self, h: Tensor, head: nn.Module):
        self.h, self.head = h, head

    def hidden(self, tokens: Tensor, **beside: Tensor) -> Tensor:
        return self.h

    def __call__(self, tokens: Tensor, **beside: Tensor) -> Tensor:
        return self.head(self.h)


def with_head(loss: Loss, autocast: AbstractContextManager,
              backend: str | Callable = "inductor") -> Loss:
    """Return `loss`, compiled together with the model's head. The returned function first runs
    `model.hidden` under `autocast`, outside of this graph."""
    def tail(h: Tensor, head: nn.Module, batch: Batch) -> Tensor:
        return loss(_HiddenKnown(h, head), batch)

    tail = compiled(tail, backend)

    def whole(model: nn.Module, batch: Batch) -> Tensor:
        with autocast:
            h = model.hidden(batch.tokens, **batch.beside)
        return tail(h, model.head, batch)

    return whole
