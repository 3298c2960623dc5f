"""The kit's kernels as PyTorch operators, `torch.ops.lpkit.<name>`.

A function that passes `data_ptr()` to C works only for plain tensors. An operator goes through
PyTorch's dispatcher, which asks every subclass and mode before the kernel runs. An operator needs a
schema, a kernel, a fake (which returns empty results, so that fake tensors, torch.compile and the
trace need no memory), and a FLOP formula for `FlopCounterMode`.
Source: https://docs.pytorch.org/docs/stable/library.html

The kit uses `torch.library.Library` instead of `torch.library.custom_op`, whose Python layers take
22 us per call instead of 7. Kernels therefore do themselves what those layers would: they check
their arguments, and their results do not alias them.
"""

from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

LIBRARY = torch.library.Library("lpkit", "FRAGMENT")
EVERY_DEVICE = "CompositeExplicitAutograd"
# kernels written in PyTorch; counters look inside
MADE_OF_OPERATIONS: dict[OpOverload, Callable] = {}
PRODUCTS: list[OpOverload] = []     # products of matrices, which recomputation may keep


def over_pairs(count: int) -> Callable[..., int]:
    """Return the FLOP formula of `count` products over all pairs of tokens. The first shape is
    (B, H, T, E)."""
    def flops(*shapes: torch.Size, **_) -> int:
        B, H, T, E = shapes[0]
        return count * 2 * B * H * T * T * E
    return flops


def operator(schema: str, *, key: str = "CPU", fake: Callable | None = None,
             flops: Callable[..., int] = lambda *_, **__: 0, product: bool = False,
             inside: bool = False) -> Callable[[Callable], OpOverload]:
    """Register the decorated kernel under the name in `schema`, and return the operator.

    key:     the dispatch key that the kernel serves
    fake:    None for a kernel that is made of PyTorch's operations, and so is its own fake
    flops:   called with shapes instead of tensors
    product: see PRODUCTS
    inside:  counters of operations look inside of the kernel, even if it has a fake
    """
    def register(kernel: Callable) -> OpOverload:
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"lpkit::{name}", fake or kernel, lib=LIBRARY)
        packet = getattr(torch.ops.lpkit, name)
        register_flop_formula(packet)(flops)
        packet.default.__wrapped__ = kernel      # lets `inspect` find the kernel's source
        if fake is None or inside:
            MADE_OF_OPERATIONS[packet.default] = kernel
        if product:
            PRODUCTS.append(packet.default)
        return packet.default

    return register
