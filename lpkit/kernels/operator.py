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


def operator(schema: str, *, fake: Callable, flops: Callable[..., int] = lambda *_, **__: 0,
             key: str = "CPU") -> Callable[[Callable], OpOverload]:
    """Register the decorated kernel under the name in `schema`; the operator takes its place.

    flops: from shapes in place of tensors. key: the dispatch key that the kernel serves.
    """
    def register(kernel: Callable) -> OpOverload:
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"lpkit::{name}", fake, lib=LIBRARY)
        packet = getattr(torch.ops.lpkit, name)
        register_flop_formula(packet)(flops)
        return packet.default

    return register
