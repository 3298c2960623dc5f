"""Operations between the matmuls of a training step, each in one pass over memory on a CPU:

    gelu(x)                                    GELU, in its tanh approximation
    attention_(scores, ...)                    overwrite scores by attention weights
    attention_backward_(scores, d, sums, ...)  overwrite scores by weights, and d by the gradients
                                               of the products q k^T

Each operation has a definition in PyTorch, `reference_*` with the same arguments, and an operator
(`lpkit.kernels.operator`). The operator calls C (rows.c), or the definition if there is no C
compiler. PyTorch's own operations need several passes over memory, and some take twice as long in
16 bits as in float32. The C kernels read and write bf16 and compute in float32: a result is the
float32 result, rounded once. rows.c also contains the C version of `cross_entropy`.

`gelu` is differentiable and saves only its input for backward, as PyTorch's GELU does. The
definition runs on other devices, for other dtypes, and under torch.compile, which fuses it.
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
_ARGUMENTS = {      # as declared in rows.c
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
    """Return whether C can read these tensors: contiguous, of a dtype in `dtypes`, with memory, and
    compiled C is available. Otherwise the definition is used."""
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
    """GELU by C. A custom Function, because the operators have no derivative."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        return _gelu_backward(dy.contiguous(), *ctx.saved_tensors)


def gelu(x: Tensor) -> Tensor:
    """Return GELU of x, by its tanh approximation (Hendrycks & Gimpel 2016,
    https://arxiv.org/abs/1606.08415)."""
    fast = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.is_contiguous()
    if not fast or torch.compiler.is_compiling():
        return reference_gelu(x)
    return _Gelu.apply(x)


# ---- attention's weights

# `scores` (N, queries, keys) are the products q k^T of N heads. `seen` (queries, n) bool is the
# mask of the last n keys. All keys before them are seen, and without `seen` all keys. A score is
# multiplied by `scale`, and capped by tanh unless `cap` is 0. `sinks` (N,) float32 has one more
# score for each head, which takes part in the softmax and has no value.

def _scores(scores: Tensor, seen: Tensor | None, scale: float, cap: float) -> Tensor:
    """Return the scores that enter the softmax, in float32 or wider: scaled, capped, and -inf for
    hidden keys."""
    s = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if cap:
        s = cap * torch.tanh(s / cap)
    if seen is not None:
        s[..., s.shape[-1] - seen.shape[-1]:].masked_fill_(~seen, -torch.inf)
    return s


def _weights(s: Tensor, sums: Tensor) -> Tensor:
    """Return exp(s - sums): the attention weights of scores s (N, queries, keys), whose log-sums of
    exponentials are `sums` (N, queries). If a query sees no key and there is no sink, its log-sum
    is -inf, and its weights are 0."""
    return (s - sums[..., None].clamp(min=torch.finfo(s.dtype).min)).exp()


def reference_attention_(scores: Tensor, seen: Tensor | None, scale: float, cap: float,
                         sinks: Tensor | None) -> Tensor:
    """`attention_`, by PyTorch's operations."""
    s = _scores(scores, seen, scale, cap)
    sums = s.logsumexp(-1)
    if sinks is not None:
        sums = sums.logaddexp(sinks[:, None].to(s.dtype))
    scores.copy_(_weights(s, sums))
    return sums


def reference_attention_backward_(scores: Tensor, d: Tensor, sums: Tensor, seen: Tensor | None,
                                  scale: float, cap: float) -> Tensor:
    """`attention_backward_`, by PyTorch's operations."""
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
    """Overwrite `scores` (N, queries, keys) by softmax weights. Hidden keys, and all keys of a
    query that sees no key, get 0. Returns the log-sums of exponentials (N, queries) in float32."""
    call = _attention if scores.device.type == "cpu" else reference_attention_
    return call(scores, seen, scale, cap, sinks)


def attention_backward_(scores: Tensor, d: Tensor, sums: Tensor, seen: Tensor | None, scale: float,
                        cap: float = 0.0) -> Tensor:
    """Overwrite `scores` by the attention weights, and `d`, the gradients of the weights, by the
    gradients of the products q k^T; both (N, queries, keys). `sums`: the result of `attention_`.
    Returns the sum of weight times gradient for each query, (N, queries): the caller computes the
    gradient of a sink from it."""
    call = _attention_backward if scores.device.type == "cpu" else reference_attention_backward_
    return call(scores, d, sums, seen, scale, cap)
