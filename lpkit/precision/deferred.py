"""Computes the gradients of weights later than the gradients of inputs, for a zero-bubble pipeline.
Backward of a Linear y = x @ w.T, with g the gradient of y, has two parts:

    B:  dx = g @ w      the previous stage of the pipeline waits for dx
    W:  dw = g.T @ x    only the optimizer waits for dw, so W can run in a bubble of the pipeline

(Qi et al. 2024, section 2, https://arxiv.org/abs/2401.10241). PyTorch's own way is to run backward
through the graph twice. Then a custom autograd Function, such as a Linear in low precision,
computes both matmuls each time (pytorch #166577). Here B appends a function to a list, a queue, and
calling this function is W:

    with deferring(queue):
        y = model(x)
    y.backward(g)                   # B, and the gradients of all parameters outside of Linears
    queue.pop(0)()                  # the W of one Linear; it may run after other micro-batches

The function of a W holds g and x, or in low precision their casts, which B made with the scales and
the random numbers of its micro-batch. A W gives the weight its gradient through autograd, so hooks
of the weight run. Gradients are the same bit for bit as without a queue, if the Ws of a weight run
in the order of their Bs, unless the weight is also an embedding.

Backward is not split in these cases: a compiled graph; a library's Linear; a plain Linear whose x
needs no gradient; a loss in chunks. FSDP2 cannot be used, because it frees weights after B, and
cannot accept a gradient afterwards.
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
# the queue for the forward that is running; None: backward is not split
QUEUE: ContextVar[Queue | None] = ContextVar("queue", default=None)
# functions f(x, weight, bias) whose backward is split, and functions that compute a @ b.T for dw
PRODUCTS = {F.linear: lambda a, b: a @ b.T, wide_linear: partial(multiply, bias=None, alpha=None)}


@contextmanager
def deferring(queue: Queue | None) -> Iterator[None]:
    """Run forwards in this context such that their backward does not compute the gradients of
    Linears' weights and biases, but appends functions to `queue` that compute them. queue None:
    backward computes these gradients, also inside of another such context."""
    token = QUEUE.set(queue)
    try:
        with nullcontext() if queue is None else _Linears():
            yield
    finally:
        QUEUE.reset(token)


def apart(t: Tensor | None) -> Tensor | None:
    """Return a leaf tensor with the same numbers, which takes the place of a parameter in the
    graph. If the parameter itself were in the graph, autograd would call its hooks in B, although
    its gradient is computed in W."""
    return t if t is None else t.detach().requires_grad_(t.requires_grad)


def defer(queue: Queue, weight: Tensor, bias: Tensor | None, dw: Callable[[], Tensor] | None,
          db: Tensor | None) -> tuple[None, None]:
    """Append the W of one Linear to `queue`. dw: a function that returns the gradient of `weight`,
    or None if `weight` is not trained; db: the gradient of `bias`, or None. Returns (None, None),
    the gradients that B passes on."""
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
    """Returns x, and saves it for `_wait`. F.linear does not save x, because its weight is
    detached. A recomputed block restores only saved tensors, and stops at the last of them, so the
    graph must save x."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g


class _Linears(TorchFunctionMode):
    """Replaces calls of the functions in PRODUCTS by `_linear`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS and not torch.compiler.is_compiling():
            function = partial(_linear, function)
        return function(*args, **(kwargs or {}))


def _linear(function: Callable, input: Tensor, weight: Tensor, bias=None) -> Tensor:
    """Return function(input, weight, bias). If backward can be split, its backward computes dx and
    appends the W to the queue."""
    trained = input.requires_grad and weight.requires_grad and torch.is_grad_enabled()
    leaves = weight.is_leaf and (bias is None or bias.is_leaf)
    # For other shapes and strides, F.linear with a weight that needs no gradient adds in another
    # order, so the bits would differ.
    folds = input.ndim == 2 or input.is_contiguous()
    if (queue := QUEUE.get()) is None or not (trained and leaves and folds):
        return function(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        # cast before `_Keep`, so that the cast is saved instead of the wider input
        input = input.to(torch.get_autocast_dtype(input.device.type))
    input = _Keep.apply(input)
    # The weight is detached, so backward of this call computes only dx.
    y = function(input, weight.detach(), None if bias is None else bias.detach())
    y.register_hook(partial(_wait, queue, weight, bias, PRODUCTS[function], input.grad_fn))
    return y


def _wait(queue: Queue, weight: Tensor, bias: Tensor | None, product: Callable, kept, g) -> None:
    """Append the W of a plain Linear to `queue`: a hook that gets g, the gradient of the output.
    `kept`: the graph node of `_Keep`, which has saved x."""
    rows, (x,) = g.reshape(-1, g.shape[-1]), kept.saved_tensors
    dw = partial(product, rows.T, x.reshape(-1, x.shape[-1]).T)
    defer(queue, weight, bias, dw, rows.sum(0) if bias is not None and bias.requires_grad else None)
