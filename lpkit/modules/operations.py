"""What the forward of a model multiplies and moves, read from a step on shapes alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpkit.measure.tracking import Tracker

aten = torch.ops.aten
# where the two operands of a product are among an operation's arguments
PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}
# operations that read as many numbers of their first argument as they return
LOOK_UP = "embedding gather index index_select nll_loss_forward nll_loss2d_forward".split()


@dataclass
class Seen:
    """A forward of a model: products by module, attention by its sizes, other operations by bytes."""

    products: Counter[tuple[str, int, int, int, bool]] = field(default_factory=Counter)
    attentions: Counter[tuple[int, ...]] = field(default_factory=Counter)
    moved: Counter[bool] = field(default_factory=Counter)     # bytes, by whether in a block

    @property
    def flops(self) -> int:
        """Of the forward."""
        return self._flops(lambda trained: 1)

    @property
    def training_flops(self) -> int:
        """Of forward and backward: a product has two gradients, one if its weight is frozen."""
        return self._flops(lambda trained: 2 + trained)

    def _flops(self, times: Callable[[bool], int]) -> int:
        products = sum(2 * M * N * K * calls * times(trained)
                       for (_, M, N, K, trained), calls in self.products.items())
        return products + sum(2 * B * T * S * (E + V) * calls * times(True)
                              for (B, T, S, E, V, _), calls in self.attentions.items())


class Recorder(Tracker):
    """A Tracker that also records operations of the forward, by module."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seen, self.by_name = Seen(), dict(self.model.named_modules())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented and self._where()[0] == "forward":
            self._note(func, args, kwargs or {}, out)
        return out

    def _note(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        name, packet = self._at_work, func.overloadpacket
        if packet in PRODUCTS:
            a, b = args[PRODUCTS[packet]:][:2]
            *batch, M, K = a.shape
            if batch:       # of pairs of tokens: one of the two products of attention
                self.seen.attentions[math.prod(batch), M, b.shape[-1], K, 0, False] += 1
            else:
                self._product(name, M, b.shape[1], K)
        elif packet is aten.convolution:
            weight = args[1]
            self._product(name, out.numel() // out.shape[1], len(weight), weight[0].numel())
        elif "scaled_dot_product" in func.__name__ and "backward" not in func.__name__:
            q, k, v = args[:3]
            causal = next((bool(one) for one, spec in zip(args, func._schema.arguments)
                           if spec.name == "is_causal"), kwargs.get("is_causal", False))
            B, T, E = q.shape[0] * q.shape[1], *q.shape[2:]
            self.seen.attentions[B, T, k.shape[2], E, v.shape[3], causal] += 1
        elif func.namespace != "prim" and not (packet is aten._to_copy and self._is_weight(args[0])):
            args = (out, *args[1:]) if packet.__name__ in LOOK_UP else args
            made, read = ({t.untyped_storage()._cdata: t for t in tree_leaves(one)
                           if isinstance(t, Tensor)} for one in (out, (args, kwargs)))
            in_block = any(part.isdigit() for part in name.split("."))
            if func._schema.is_mutable or packet.__name__ in LOOK_UP or made.keys() - read.keys():
                self.seen.moved[in_block] += sum(t.nbytes for t in (*made.values(), *read.values()))

    def _is_weight(self, t: Any) -> bool:
        found = self._find(t) if isinstance(t, Tensor) else None
        return found is not None and found.row in ("weights", "weight copies")

    def _product(self, name: str, M: int, N: int, K: int) -> None:
        weight = getattr(self.by_name.get(name), "weight", None)
        trained = not isinstance(weight, nn.Parameter) or weight.requires_grad
        self.seen.products[name, M, N, K, trained] += 1
