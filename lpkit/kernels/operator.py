"""The kit's kernels as PyTorch operators, `torch.ops.lpkit.<name>`.

A function that passes `data_ptr()` to C works only for plain tensors. An operator goes through
PyTorch's dispatcher, so tensor subclasses and modes can handle the call before the kernel runs. An
operator needs four things:

- a schema: its name and the types of its arguments and results
- a kernel: the function that computes
- a fake: a function that returns empty results, so that fake tensors, torch.compile and a trace of
  memory need no memory
- a FLOP formula for `FlopCounterMode`

Source: https://docs.pytorch.org/docs/stable/library.html

The kit uses `torch.library.Library`, which takes 7 us per call, instead of
`torch.library.custom_op`, which takes 22 us because of its Python layers. These layers check the
arguments and that no result shares memory with an argument. So the kit's kernels check their
arguments themselves, and never return an argument or a view of it.
"""

from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

LIBRARY = torch.library.Library("lpkit", "FRAGMENT")
EVERY_DEVICE = "CompositeExplicitAutograd"
# Kernels that are made of PyTorch operations. Counters of operations count these operations.
MADE_OF_OPERATIONS: dict[OpOverload, Callable] = {}
# Matmuls and fused attention, whose results selective recomputation keeps (`memory.recompute`).
PRODUCTS: list[OpOverload] = []


def over_pairs(count: int) -> Callable[..., int]:
    """Return the FLOP formula of `count` matmuls over all pairs of tokens: a function of the shapes
    of an operator's arguments, whose first shape is (B, H, T, E).

    >>> over_pairs(2)((1, 1, 4, 8))
    512
    """
    def flops(*shapes: torch.Size, **_) -> int:
        B, H, T, E = shapes[0]
        return count * 2 * B * H * T * T * E
    return flops


def operator(schema: str, *, key: str = "CPU", fake: Callable | None = None,
             flops: Callable[..., int] = lambda *_, **__: 0, product: bool = False,
             inside: bool = False) -> Callable[[Callable], OpOverload]:
    """Return a decorator that registers a kernel under the name in `schema`, and returns the
    operator.

    key:     the dispatch key for which the kernel is registered, for example "CPU"
    fake:    the fake; None for a kernel that is made of PyTorch operations and is its own fake
    flops:   the FLOP formula, called with the shapes of the tensors
    product: whether the operator is added to PRODUCTS
    inside:  whether the operator is added to MADE_OF_OPERATIONS although it has a fake
    """
    def register(kernel: Callable) -> OpOverload:
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"lpkit::{name}", fake or kernel, lib=LIBRARY)
        packet = getattr(torch.ops.lpkit, name)
        register_flop_formula(packet)(flops)
        packet.default.__wrapped__ = kernel      # so that `inspect.unwrap` finds the kernel
        if fake is None or inside:
            MADE_OF_OPERATIONS[packet.default] = kernel
        if product:
            PRODUCTS.append(packet.default)
        return packet.default

    return register
