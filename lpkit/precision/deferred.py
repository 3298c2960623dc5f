"""The gradient of a weight may come later than that of the input: the W of a zero-bubble pipeline.

    B:  dx = g @ w      the stage before waits for it
    W:  dw = g.T @ x    nobody waits for it before the optimizer: it fills the pipeline's bubbles

(Qi et al. 2024, section 2, https://arxiv.org/abs/2401.10241). PyTorch asks the graph twice, and a
Function in Python, as a Linear in low precision is, multiplies both each time (pytorch #166577).
Here B leaves a closure in a list, which is W:

    with deferring(queue):
        y = model(x)
    y.backward(g)                   # B, and the gradients of what is no Linear
    queue.pop(0)()                  # W, one for each Linear, after other micro-batches if need be

A W holds g and x, in low precision their casts, made in B by the scales and draws of this
micro-batch. The weight gets its gradient as from autograd, hooks included: the same bits where the
Ws of a weight run in the order of their Bs, unless it is an embedding too. A backward is undivided
where a graph is compiled, a library multiplies, a plain Linear's x is not trained, and in a loss in
chunks. FSDP2 frees weights after B, and cannot be given a gradient then.
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
QUEUE: ContextVar[Queue | None] = ContextVar("queue", default=None)     # of the forward that runs
# functions f(x, weight, bias), and the product a @ b.T of their gradients
PRODUCTS = {F.linear: lambda a, b: a @ b.T, wide_linear: partial(multiply, bias=None, alpha=None)}


@contextmanager
def deferring(queue: Queue | None) -> Iterator[None]:
    """A context around a forward, whose backward leaves the gradients of Linears' weights and
    biases in `queue`. None: it leaves nothing, also inside another such context."""
    token = QUEUE.set(queue)
    try:
        with nullcontext() if queue is None else _Linears():
            yield
    finally:
        QUEUE.reset(token)


def apart(t: Tensor | None) -> Tensor | None:
    """A leaf over the same numbers: who comes to a parameter without a gradient calls its hooks."""
    return t if t is None else t.detach().requires_grad_(t.requires_grad)


def defer(queue: Queue, weight: Tensor, bias: Tensor | None, dw: Callable[[], Tensor] | None,
          db: Tensor | None) -> tuple[None, None]:
    """Leaves a W. `dw` makes the gradient of `weight`; None: it is not trained."""
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
    """x, saved before its product: recomputation ends with the last tensor that is saved."""

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
    folds = input.ndim == 2 or input.is_contiguous()    # else constant weights multiply otherwise
    if (queue := QUEUE.get()) is None or not (trained and leaves and folds):
        return function(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))       # the one that is kept
    input = _Keep.apply(input)
    y = function(input, weight.detach(), None if bias is None else bias.detach())     # gives dx
    y.register_hook(partial(_wait, queue, weight, bias, PRODUCTS[function], input.grad_fn))
    return y


def _wait(queue: Queue, weight: Tensor, bias: Tensor | None, product: Callable, kept, g) -> None:
    rows, (x,) = g.reshape(-1, g.shape[-1]), kept.saved_tensors
    dw = partial(product, rows.T, x.reshape(-1, x.shape[-1]).T)
    defer(queue, weight, bias, dw, rows.sum(0) if bias is not None and bias.requires_grad else None)
