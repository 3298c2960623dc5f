"""What a training step does between its products, each in one pass over memory on a CPU:

    gelu(x)                                      -> Tensor      tanh approximation
    causal_softmax_(scores, start, scale)        -> Tensor      in place
    causal_softmax_backward_(d, p, start, scale) -> Tensor      in place

Each has a definition in PyTorch, `reference_*` with the same arguments, and an operator
(`lpkit.kernels.operator`) whose kernel is C (rows.c), or the definition where there is no compiler.
PyTorch's own ways take several passes, or, in 16 bits, twice as long as float32 would. bf16 is read
and written, computed is in float32: a result is the float32 one, rounded once. The library has
`cross_entropy`'s rows too.

`gelu` is differentiable and keeps its input alone, as PyTorch's own. On other devices, for other
dtypes and under torch.compile, which fuses it, the definition runs. `choice()` says which it is on
CPU tensors here, and why.
"""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lpkit.contracts import Choice
from lpkit.kernels import compile_c
from lpkit.kernels.operator import operator

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
_ARGUMENTS = {      # as rows.c declares them
    "lp_gelu": (_P, _P, _L, _I), "lp_gelu_backward": (_P, _P, _P, _L, _I),
    "lp_causal_softmax": (_P, _L, _L, _L, _L, _F, _I),
    "lp_causal_softmax_backward": (_P, _P, _L, _L, _L, _L, _F, _I),
    "lp_cross_entropy_bf16": (_P, _P, _P, _P, _L, _L, _I),
    "lp_cross_entropy_fp32": (_P, _P, _P, _P, _L, _L, _I),
}


def choice() -> Choice:
    """Which implementation runs on CPU tensors here, and why. Compiles on first use."""
    return compile_c.choice("rows")


@functools.cache
def library() -> ctypes.CDLL | None:
    opened = compile_c.load("rows")
    for name, arguments in _ARGUMENTS.items() if opened else ():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, None
    return opened


def served(x: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> bool:
    """Whether C reads x as it is; else the definition takes it."""
    return x.dtype in dtypes and x.is_contiguous() and x.data_ptr() != 0 and library() is not None


# ---- GELU

def reference_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def reference_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")


@operator("gelu(Tensor x) -> Tensor", fake=torch.empty_like)
def _gelu(x: Tensor) -> Tensor:
    if not served(x):
        return reference_gelu(x)
    y = torch.empty_like(x)
    library().lp_gelu(x.data_ptr(), y.data_ptr(), x.numel(), torch.get_num_threads())
    return y


@operator("gelu_backward(Tensor dy, Tensor x) -> Tensor", fake=lambda dy, x: torch.empty_like(x))
def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    if not (served(x) and served(dy) and dy.shape == x.shape):
        return reference_gelu_backward(dy, x)
    dx = torch.empty_like(x)
    library().lp_gelu_backward(dy.data_ptr(), x.data_ptr(), dx.data_ptr(), x.numel(),
                                torch.get_num_threads())
    return dx


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        return _gelu_backward(dy.contiguous(), *ctx.saved_tensors)


def gelu(x: Tensor) -> Tensor:
    """Tanh approximation (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415)."""
    fast = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.is_contiguous()
    if not fast or torch.compiler.is_compiling():
        return reference_gelu(x)
    return _Gelu.apply(x)


# ---- softmax of causal attention, on scores (N, queries, keys) of queries from `start` on

def reference_causal_softmax_(scores: Tensor, start: int, scale: float) -> Tensor:
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(start + 1)
    return scores.mul_(scale).masked_fill_(future, -torch.inf).copy_(scores.softmax(-1))


def reference_causal_softmax_backward_(d: Tensor, p: Tensor, start: int, scale: float) -> Tensor:
    return d.copy_(torch._softmax_backward_data(d, p, -1, p.dtype)).mul_(scale)


@operator("causal_softmax_(Tensor(a!) scores, SymInt start, float scale) -> ()",
          fake=lambda *_: None)
def _causal_softmax(scores: Tensor, start: int, scale: float) -> None:
    if not served(scores):
        reference_causal_softmax_(scores, start, scale)
        return
    library().lp_causal_softmax(scores.data_ptr(), *scores.shape, start, scale,
                                 torch.get_num_threads())


@operator("causal_softmax_backward_(Tensor(a!) d, Tensor p, SymInt start, float scale) -> ()",
          fake=lambda *_: None)
def _causal_softmax_backward(d: Tensor, p: Tensor, start: int, scale: float) -> None:
    if not (served(d) and served(p) and p.shape == d.shape):
        reference_causal_softmax_backward_(d, p, start, scale)
        return
    library().lp_causal_softmax_backward(d.data_ptr(), p.data_ptr(), *d.shape, start, scale,
                                          torch.get_num_threads())


def causal_softmax_(scores: Tensor, start: int, scale: float) -> Tensor:
    """softmax(scale * scores) over the keys that each query may see; 0 for those after it."""
    if scores.device.type == "cpu":
        _causal_softmax(scores, start, scale)
        return scores
    return reference_causal_softmax_(scores, start, scale)


def causal_softmax_backward_(d: Tensor, p: Tensor, start: int, scale: float) -> Tensor:
    """Gradients `d` of the probabilities `p` become those of the scores."""
    if d.device.type == "cpu":
        _causal_softmax_backward(d, p, start, scale)
        return d
    return reference_causal_softmax_backward_(d, p, start, scale)
