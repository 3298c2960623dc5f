"""Computes the gradients of weights later than the gradients of inputs: the step W of a zero-bubble
pipeline.

    B:  dx = g @ w      the stage before waits for it
    W:  dw = g.T @ x    only the optimizer waits for it, so it can fill the pipeline's bubbles

(Qi et al. 2024, section 2, https://arxiv.org/abs/2401.10241). PyTorch runs backward through the
graph twice, and a Function in Python, such as a Linear in low precision, then computes both
products each time (pytorch #166577). Here B appends a closure to a list, and the closure is W:

    with deferring(queue):
        y = model(x)
    y.backward(g)                   # B, and the gradients of all parameters outside of Linears
    queue.pop(0)()                  # W, one for each Linear, also after other micro-batches

A W holds g and x, or in low precision their casts. B made these casts with the scales and the
random draws of its micro-batch. The weight gets its gradient through autograd, so its hooks run.
Gradients are the same bit for bit if a weight's Ws run in the order of their Bs, unless the weight
is also an embedding. Backward is not split in these cases: a compiled graph; a library's Linear; a
plain Linear whose x needs no gradient; a loss in chunks. FSDP2 frees weights after B, so it cannot
accept a gradient afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lpkit.kernels.wide_product import multiply, wide_linear

Queue = list[Callable[[], None]]
# the queue of the forward that is running
QUEUE: ContextVar[Queue | None] = ContextVar("queue", default=None)
# functions f(x, weight, bias), and how to compute a @ b.T for their gradients
PRODUCTS = {F.linear: lambda a, b: a @ b.T, wide_linear: partial(multiply, bias=None, alpha=None)}


@contextmanager
def deferring(queue: Queue | None) -> Iterator[None]:
    """In this context, a forward is recorded such that its backward leaves the gradients of
    Linears' weights and biases in `queue`. None: backward computes them at once, also inside of
    another such context."""
    token = QUEUE.set(queue)
    try:
        with nullcontext() if queue is None else _Linears():
            yield
    finally:
        QUEUE.reset(token)


def apart(t: Tensor | None) -> Tensor | None:
    """Return a leaf with the same numbers. A parameter that took part in the graph without getting
    a gradient would still have its hooks called."""
    return t if t is None else t.detach().requires_grad_(t.requires_grad)


def defer(queue: Queue, weight: Tensor, bias: Tensor | None, dw: Callable[[], Tensor] | None,
          db: Tensor | None) -> tuple[None, None]:
    """Append a W to the queue. `dw` computes the gradient of `weight`; None if `weight` is not
    trained."""
    def w() -> None:
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            if dw is not None:
                torch.autograd.backward(weight, dw().to(weight.dtype))
            if db is not None:
                torch.autograd.backward(bias, db.to(bias.dtype))

    if dw is not None or db is not None:
        queue.append(w)
    return None, None


class _Keep(torch.autograd.Function):
    """Saves x before its product: recomputation stops at the last tensor that was saved."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g


class _Linears(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS and not torch.compiler.is_compiling():
            function = partial(_linear, function)
        return function(*args, **(kwargs or {}))


def _linear(function: Callable, input: Tensor, weight: Tensor, bias=None) -> Tensor:
    trained = input.requires_grad and weight.requires_grad and torch.is_grad_enabled()
    leaves = weight.is_leaf and (bias is None or bias.is_leaf)
    # otherwise F.linear with a constant weight computes in another order
    folds = input.ndim == 2 or input.is_contiguous()
    if (queue := QUEUE.get()) is None or not (trained and leaves and folds):
        return function(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))       # the cast that is saved
    input = _Keep.apply(input)
    # backward of this product gives dx alone
    y = function(input, weight.detach(), None if bias is None else bias.detach())
    y.register_hook(partial(_wait, queue, weight, bias, PRODUCTS[function], input.grad_fn))
    return y


def _wait(queue: Queue, weight: Tensor, bias: Tensor | None, product: Callable, kept, g) -> None:
    rows, (x,) = g.reshape(-1, g.shape[-1]), kept.saved_tensors
    dw = partial(product, rows.T, x.reshape(-1, x.shape[-1]).T)
    defer(queue, weight, bias, dw, rows.sum(0) if bias is not None and bias.requires_grad else None)
