"""A training step's work between its products, each in one pass over memory on a CPU:

    gelu(x)                                         -> Tensor      tanh approximation
    attention_(scores, ...)                         -> Tensor      scores become weights, in place
    attention_backward_(scores, d, sums, ...)       -> Tensor      both become gradients, in place

Each has a definition in PyTorch, `reference_*` with the same arguments, and an operator
(`lpkit.kernels.operator`) whose kernel is C (rows.c), or the definition where there is no compiler.
PyTorch's own ways take several passes, or, in 16 bits, twice as long as float32 would. bf16 is read
and written, computed is in float32: a result is the float32 one, rounded once. The library has
`cross_entropy`'s rows too.

`gelu` is differentiable and keeps its input alone, as PyTorch's own. On other devices, for other
dtypes and under torch.compile, which fuses it, the definition runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lpkit.kernels import compile_c
from lpkit.kernels.operator import operator

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
_ARGUMENTS = {      # as rows.c declares them
    "lp_gelu": (_P, _P, _L, _I), "lp_gelu_backward": (_P, _P, _P, _L, _I),
    **dict.fromkeys(("lp_attention_bf16", "lp_attention_fp32"),
                    (_P, _P, _P, _P, _L, _L, _L, _L, _F, _F, _I)),
    **dict.fromkeys(("lp_attention_backward_bf16", "lp_attention_backward_fp32"),
                    (_P, _P, _P, _P, _P, _L, _L, _L, _L, _F, _F, _I)),
    "lp_cross_entropy_bf16": (_P, _P, _P, _P, _L, _L, _I),
    "lp_cross_entropy_fp32": (_P, _P, _P, _P, _L, _L, _I),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    return compile_c.load("rows", _ARGUMENTS)


def served(*given: Tensor, dtypes: Collection[torch.dtype] = (torch.bfloat16,)) -> bool:
    """True if C reads these as they are; else the definition takes them."""
    for x in given:
        if x.dtype not in dtypes or not x.is_contiguous() or x.data_ptr() == 0:
            return False
    return library() is not None


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
    if not (served(x, dy) and dy.shape == x.shape):
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


# ---- attention's weights

# Of scores (N, queries, keys): the products q k^T, of which `seen` (queries, the last of the keys)
# says which count; without it all do. They are scaled, and capped where `cap` is not 0; `sinks`
# (N,) float32 is a score more for each of the N.

def _scores(scores: Tensor, seen: Tensor | None, scale: float, cap: float) -> Tensor:
    """Scores as they enter softmax, in float32 or wider."""
    s = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if cap:
        s = cap * torch.tanh(s / cap)
    if seen is not None:
        s[..., s.shape[-1] - seen.shape[-1]:].masked_fill_(~seen, -torch.inf)
    return s


def _weights(s: Tensor, sums: Tensor) -> Tensor:
    """Weights of scores; where nothing is seen, not even a sink, the sum is -inf and each is 0."""
    return (s - sums[..., None].clamp(min=torch.finfo(s.dtype).min)).exp()


def reference_attention_(scores: Tensor, seen: Tensor | None, scale: float, cap: float,
                         sinks: Tensor | None) -> Tensor:
    s = _scores(scores, seen, scale, cap)
    sums = s.logsumexp(-1)
    if sinks is not None:
        sums = sums.logaddexp(sinks[:, None].to(s.dtype))
    scores.copy_(_weights(s, sums))
    return sums


def reference_attention_backward_(scores: Tensor, d: Tensor, sums: Tensor, seen: Tensor | None,
                                  scale: float, cap: float) -> Tensor:
    s = _scores(scores, seen, scale, cap)
    p = _weights(s, sums)
    dots = (p * d).sum(-1)
    slope = (1 - (s / cap).square_()).clamp_(min=0) * scale if cap else scale
    d.copy_((d - dots[..., None]) * p * slope)
    scores.copy_(p)
    return dots


_ATTENTION = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@operator("attention_(Tensor(a!) scores, Tensor? seen, float scale, float cap, Tensor? sinks) "
          "-> Tensor", fake=lambda scores, *_: _sums_like(scores))
def _attention(scores: Tensor, seen: Tensor | None, scale: float, cap: float,
               sinks: Tensor | None) -> Tensor:
    if not served(scores, dtypes=_ATTENTION) or not (seen is None or seen.is_contiguous()):
        return reference_attention_(scores, seen, scale, cap, sinks)
    sums, columns = _sums_like(scores), scores.shape[-1]
    free = columns - (0 if seen is None else seen.shape[-1])
    getattr(library(), f"lp_attention_{_ATTENTION[scores.dtype]}")(
        scores.data_ptr(), None if seen is None else seen.data_ptr(),
        None if sinks is None else sinks.data_ptr(), sums.data_ptr(), *scores.shape, free,
        scale, cap, torch.get_num_threads())
    return sums


@operator("attention_backward_(Tensor(a!) scores, Tensor(b!) d, Tensor sums, Tensor? seen, "
          "float scale, float cap) -> Tensor", fake=lambda scores, *_: _sums_like(scores))
def _attention_backward(scores: Tensor, d: Tensor, sums: Tensor, seen: Tensor | None,
                        scale: float, cap: float) -> Tensor:
    if not served(scores, d, dtypes=_ATTENTION) or not (seen is None or seen.is_contiguous()):
        return reference_attention_backward_(scores, d, sums, seen, scale, cap)
    dots, columns = _sums_like(scores), scores.shape[-1]
    free = columns - (0 if seen is None else seen.shape[-1])
    getattr(library(), f"lp_attention_backward_{_ATTENTION[scores.dtype]}")(
        scores.data_ptr(), d.data_ptr(), None if seen is None else seen.data_ptr(),
        sums.data_ptr(), dots.data_ptr(),
        *scores.shape, free, scale, cap, torch.get_num_threads())
    return dots


def _sums_like(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape[:-1],
                            dtype=torch.promote_types(scores.dtype, torch.float32))


def attention_(scores: Tensor, seen: Tensor | None, scale: float, cap: float = 0.0,
               sinks: Tensor | None = None) -> Tensor:
    """Scores become softmax's weights of the keys that are seen, 0 for the others, and for a row
    that sees none. Log-sums of exponentials (N, queries) in float32."""
    call = _attention if scores.device.type == "cpu" else reference_attention_
    return call(scores, seen, scale, cap, sinks)


def attention_backward_(scores: Tensor, d: Tensor, sums: Tensor, seen: Tensor | None, scale: float,
                        cap: float = 0.0) -> Tensor:
    """Scores become weights, and `d`, the gradients of the weights, those of the products. Sums
    (N, queries) of weight times gradient, by which a sink has its own."""
    call = _attention_backward if scores.device.type == "cpu" else reference_attention_backward_
    return call(scores, d, sums, seen, scale, cap)
