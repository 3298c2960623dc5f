"""Recomputes activations in backward instead of saving them (Chen et al. 2016,
https://arxiv.org/abs/1604.06174).

The second forward of a block computes the same numbers as the first, so gradients are the same bit
for bit: dropout draws the same masks again, and the state of a ScaledLinear is constant within a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, register_flop_formula

from lpkit.contracts import Stage, Transform
from lpkit.errors import ConfigError
from lpkit.kernels import operator
from lpkit.precision.deferred import QUEUE, deferring
from lpkit.techniques.memory import EveryBlock
from lpkit.techniques.row import Settings

aten = torch.ops.aten
# Selective recomputation saves the results of these operations: matmuls with weights, and fused
# attention. It does not save batched matmuls. They compute unfused attention, whose scores have T
# numbers per token and head: many bytes for few FLOPs (Korthikanti et al. 2022, section 5).
PRODUCTS = (aten.mm.default, aten.addmm.default, aten._scaled_mm.default,
            aten._scaled_mm_v2.default, aten._int_mm.default)
ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def _flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    packed = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    return 2 * a.shape[0] * a.shape[1] * packed * b.shape[1]


# Register FLOP formulas that PyTorch lacks: FlopCounterMode, and the memory budget of a compiled
# model, only count operations that have one.
for product in (aten._scaled_mm_v2, aten._int_mm):
    if product not in flop_registry:
        register_flop_formula(product, get_raw=True)(_flops)


@dataclass(frozen=True, kw_only=True)
class Recompute(Transform):
    """Recomputes the blocks 0, every, 2 * every, ... in backward. Forward saves only the input of
    such a block, and the results of the operations in `keep`."""

    every: int = 1
    keep: tuple = ()
    stage = Stage.RECOMPUTE

    def __call__(self, model: nn.Module) -> nn.Module:
        contexts = draws(model)     # torch.compile supports only the context_fn below
        if self.keep:
            keep = partial(create_selective_checkpoint_contexts, list(self.keep))
            contexts["context_fn"] = keep
        for block in model.blocks[::self.every]:
            block.forward = partial(_block_twice, block.forward, contexts)
        return model


def draws(model: nn.Module) -> dict[str, Any]:
    """Return arguments of torch's `checkpoint`: whether it must restore the state of the random
    generator for the second forward, which only dropout needs."""
    return {"preserve_rng_state": any(isinstance(module, nn.Dropout) for module in model.modules())}


def _block_twice(forward: Callable[..., Any], contexts: dict[str, Any], x: Tensor | None = None,
                 *rest, **named) -> Any:
    """Return the result of a block, and let backward run its forward again. x: the block's input;
    None: the first tensor in `named`."""
    # Caches of the transformers library have `get_seq_length`. Under torch.compile, only named
    # arguments are checked: a positional argument may be the layer's number, for each value of
    # which Dynamo would compile a graph.
    looked = named.values() if torch.compiler.is_compiling() else (*rest, *named.values())
    if torch.is_grad_enabled() and any(hasattr(argument, "get_seq_length") for argument in looked):
        raise ConfigError("a block that runs again in backward would fill its cache of keys and "
                          "values twice; call the model with use_cache=False")
    if x is None:       # checkpoint finds the device from a tensor argument
        key = next(key for key, argument in named.items() if isinstance(argument, Tensor))
        return _twice(lambda x: forward(**named, **{key: x}), contexts, named.pop(key))
    # Only x is an argument of `checkpoint`. If `checkpoint` also received the layer's number, torch
    # 2.11 would compile two graphs: one for layer 0 and one for all other layers.
    return _twice(lambda x: forward(x, *rest, **named), contexts, x)


def _twice(forward: Callable[..., Tensor], contexts: dict[str, Any], *given) -> Tensor:
    """Return forward(*given), computed again in backward."""
    if not torch.is_grad_enabled():
        return forward(*given)
    if not torch.compiler.is_compiling() and (queue := QUEUE.get()) is not None:
        # The second forward runs outside of the caller's context, so `forward` itself enters it.
        forward = deferring(queue)(forward)
    return checkpoint(forward, *given, use_reentrant=False, **contexts)


@dataclass(frozen=True, kw_only=True)
class CoreAttention(Transform):
    """Recomputes attention in backward. Forward saves only q, k and v of it."""

    stage = Stage.RECOMPUTE

    def __call__(self, model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.attention.attend = partial(_twice, block.attention.attend, draws(model))
        return model


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """A way to recompute: transforms of the model, and the backend of torch.compile."""

    transforms: tuple[Transform, ...] = ()
    compiler: str | Callable = "inductor"


def nothing(settings: Settings) -> Recomputation:
    return Recomputation()


def block(settings: EveryBlock) -> Recomputation:
    return Recomputation(transforms=(Recompute(every=settings.every),))


def core_attention(settings: Settings) -> Recomputation:
    return Recomputation(transforms=(CoreAttention(),))


def selective(settings: EveryBlock) -> Recomputation:
    keep = (*PRODUCTS, *operator.PRODUCTS, *ATTENTION)
    return Recomputation(transforms=(Recompute(every=settings.every, keep=keep),))
