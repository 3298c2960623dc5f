"""The gradient of a weight may come later than that of the input: the W of a zero-bubble pipeline.

    B:  dx = g @ w      the stage before waits for it
    W:  dw = g.T @ x    nobody waits for it before the optimizer: it fills the pipeline's bubbles

(Qi et al. 2024, section 2, https://arxiv.org/abs/2401.10241). PyTorch's pipelines split a backward
by asking the graph twice, first for dx and then for dw. A Function in Python, as a Linear in low
precision is, then multiplies both each time (https://github.com/pytorch/pytorch/issues/166577).
Here it is asked once: B leaves a closure, which is W.

    queue = []
    with deferring(queue):
        y = model(x)
    y.backward(g)               # B, and the gradients of what is no Linear
    while queue:
        queue.pop(0)()          # W, after other micro-batches if need be

A W holds x and g until it has run, in low precision their casts: those are made in B, whose scales
and draws are those of this micro-batch. It gives its product to the weight as autograd does, hooks
included. So gradients are the same bit for bit where the Ws of a weight run in the order of the
backwards, with as many casts and products. A weight that is an embedding too adds its two gradients
in another order.

Forward takes the queue along, since backward runs in threads of autograd, and at another time.
Ordinary backward is left to what is compiled, to libraries' Linears, and to a loss in chunks
(`memory.loss`), which makes the head's gradients in forward. FSDP2 frees weights after B, and
cannot be given a gradient then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lpkit.kernels.wide_product import multiply, wide_linear

Queue = list[Callable[[], None]]
# that of the forward which runs; None: its backward is undivided
QUEUE: ContextVar[Queue | None] = ContextVar("queue", default=None)


@contextmanager
def deferring(queue: Queue | None) -> Iterator[None]:
    """A context around a forward, whose backward leaves the gradients of Linears' weights and
    biases in `queue`, to be called. None: it leaves nothing, also inside another such context."""
    token = QUEUE.set(queue)
    try:
        with nullcontext() if queue is None else _Linears():
            yield
    finally:
        QUEUE.reset(token)


def in_same(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that can be computed again in backward, outside the context: it saves the same."""
    queue = QUEUE.get()
    if queue is None:
        return forward

    @wraps(forward)
    def again(*args: Any) -> Any:
        with deferring(queue):
            return forward(*args)

    return again


def apart(t: Tensor | None) -> Tensor | None:
    """A leaf over the same numbers. Autograd calls a parameter's hooks whenever it comes by, also
    without a gradient; so B does not come by."""
    return t if t is None else t.detach().requires_grad_(t.requires_grad)


def defer(queue: Queue, weight: Tensor, bias: Tensor | None, dw: Callable[[], Tensor] | None,
          db: Tensor | None) -> None:
    """Leaves a W in `queue`. `dw` makes the gradient of `weight`; None: it is not trained."""
    def w() -> None:
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            if dw is not None:
                torch.autograd.backward(weight, dw().to(weight.dtype))
            if db is not None:
                torch.autograd.backward(bias, db.to(bias.dtype))

    if dw is not None or db is not None:
        queue.append(w)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


# functions y = f(x, weight, bias), and the product a @ b.T of their gradients
PRODUCTS = {F.linear: _product, wide_linear: partial(multiply, bias=None, alpha=None)}


class _Linears(TorchFunctionMode):
    """Calls of PRODUCTS by weights that are trained leave a W."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in PRODUCTS or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _linear(function, QUEUE.get(), *args, **kwargs)


def _linear(function: Callable[..., Tensor], queue: Queue | None, input: Tensor, weight: Tensor,
            bias: Tensor | None = None) -> Tensor:
    trained = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf
    # of others PyTorch multiplies by constant weights otherwise than by trained ones
    folds = input.ndim == 2 or input.is_contiguous()
    if queue is None or not trained or not folds or not (bias is None or bias.is_leaf):
        return function(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))       # the one that is kept
    kept = _Keep.apply(input, apart(weight))
    y = function(input, weight.detach(), None if bias is None else bias.detach())
    return _Wait.apply(y, kept, PRODUCTS[function], partial(defer, queue, weight, bias),
                       bias is not None and bias.requires_grad)


class _Keep(torch.autograd.Function):
    """Saves x before its product: recomputation ends with the last tensor that is saved."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[None, None]:
        return None, None


class _Wait(torch.autograd.Function):
    """y as it is. It was made of constant weights, whose backward gives dx alone."""

    @staticmethod
    def forward(ctx, y: Tensor, kept: Tensor, product: Callable[[Tensor, Tensor], Tensor],
                leave: Callable[..., None], biased: bool) -> Tensor:
        ctx.kept, ctx.product, ctx.leave, ctx.biased = kept.grad_fn, product, leave, biased
        return torch.ops.aten._unsafe_view(y, y.shape)      # a view must not change in place

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, (x,) = g.reshape(-1, g.shape[-1]), ctx.kept.saved_tensors
        ctx.leave(partial(ctx.product, rows.T, x.reshape(-1, x.shape[-1]).T),
                  rows.sum(0) if ctx.biased else None)
        return g, None, None, None, None
