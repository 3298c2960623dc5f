"""The kit's kernels as PyTorch operators, `torch.ops.lpkit.<name>`.

A function that hands `data_ptr()` to C works for a plain tensor and for nothing else. An operator
passes through PyTorch's dispatcher, which asks every subclass and mode before the kernel runs. It
needs four facts: a schema, a kernel, a fake (the shapes of the results, so that fake tensors,
torch.compile and the trace need no memory), and a FLOP formula for `FlopCounterMode`.
Source: https://docs.pytorch.org/docs/stable/library.html

The kit registers with `torch.library.Library` and not with `torch.library.custom_op`, whose Python
layers take 22 us a call where these take 7. What those layers would add, a kernel does itself: it
checks what it is given, and it does not alias its inputs.
"""

from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

LIBRARY = torch.library.Library("lpkit", "FRAGMENT")
EVERY_DEVICE = "CompositeExplicitAutograd"
MADE_OF_OPERATIONS: dict[OpOverload, Callable] = {}     # kernels written in PyTorch, for who counts
PRODUCTS: list[OpOverload] = []     # of matrices: what recomputation may keep


def over_pairs(count: int) -> Callable[..., int]:
    """A formula for the FLOPs of `count` products over all pairs of tokens, of shapes of which the
    first is (B, H, T, E)."""
    def flops(*shapes: torch.Size, **_) -> int:
        B, H, T, E = shapes[0]
        return count * 2 * B * H * T * T * E
    return flops


def operator(schema: str, *, key: str = "CPU", fake: Callable | None = None,
             flops: Callable[..., int] = lambda *_, **__: 0, product: bool = False,
             inside: bool = False) -> Callable[[Callable], OpOverload]:
    """Register the decorated kernel under the name in `schema`; the operator takes its place.

    key: the dispatch key that the kernel serves. fake: None for a kernel that is made of PyTorch's
    operations and so its own fake. flops: from shapes in place of tensors. product: see PRODUCTS.
    """
    def register(kernel: Callable) -> OpOverload:
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"lpkit::{name}", fake or kernel, lib=LIBRARY)
        packet = getattr(torch.ops.lpkit, name)
        register_flop_formula(packet)(flops)
        packet.default.__wrapped__ = kernel      # where its source is
        if fake is None or inside:
            MADE_OF_OPERATIONS[packet.default] = kernel
        if product:
            PRODUCTS.append(packet.default)
        return packet.default

    return register
