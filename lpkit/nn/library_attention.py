"""Attention by libraries: PyTorch's kernels by name, FlexAttention, varlen, flash-attn; and FP8,
emulated.

Each is a row of `lpkit.techniques.attention_backends` and computes what `attention.plain` does; what
it cannot, the row says. A library is imported when it is called. Signatures are those of torch
2.11 and newer (`tests/test_oldest_torch.py`), flash-attn at 0251105 (`flash_attn_interface.py`,
`cute/interface.py`). Packed documents lie one after the other.

Shapes: q (B, H, T, E), k and v (B, G, T, E), documents (B, T), sinks (H,); the result is like q.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from lpkit.kernels import jit
from lpkit.kernels.cast import amax, qdq
from lpkit.nn.attention import CAUSAL, probabilities, sdpa
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import limited
from lpkit.techniques.formats import format_of

ROW_LARGEST = 256.0     # of unnormalised probabilities in FP8, as FlashAttention 3 has it:
                        # Max_offset 8 in hopper/softmax.h
EAGER_MASK = 1024       # tokens, up to which a mask is not worth the seconds of compiling it


# PyTorch's kernels. With one enabled, PyTorch raises where it cannot, instead of another.

def _by(kernel: SDPBackend) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
               sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
        with sdpa_kernel(kernel):
            return sdpa(q, k, v, documents, sinks, rule=rule)

    return attend


sdpa_flash = _by(SDPBackend.FLASH_ATTENTION)
sdpa_cudnn = limited("sdpa-cudnn")(_by(SDPBackend.CUDNN_ATTENTION))


@limited("sdpa-fa3")
def sdpa_fa3(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
             sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    return _FlashAttention3.apply(q, k, v)


class _FlashAttention3(torch.autograd.Function):
    """PyTorch's flash kernel while FlashAttention 3 stands in its place, which is the whole
    process's: forward and backward put it there, and take it away."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        with _activated(), torch.enable_grad():
            ctx.given = [t.detach().requires_grad_() for t in qkv]
            ctx.out = sdpa_flash(*ctx.given)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        with _activated():
            return torch.autograd.grad(ctx.out, ctx.given, d_out)


@contextmanager
def _activated() -> Iterator[None]:
    jit.keep_privately()
    torch.nn.attention.activate_flash_attention_impl("FA3")
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


# FlexAttention

@limited("flex")
def flex(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
         sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """Attends by flex_attention. On a CPU forward alone, uncompiled: it makes all scores, to check
    what a GPU is told."""
    from torch.nn.attention.flex_attention import AuxRequest

    capped = None
    if (cap := rule.soft_cap) is not None:
        def capped(score, b, h, i, j):
            return cap * torch.tanh(score / cap)

    mask = (_block_mask(rule, q.shape[2], q.device) if documents is None or not rule.documents else
            _of_batch(documents, ("flex", rule), lambda: _masked(rule, q.shape[2], documents)))
    out = _compiled("flex_attention", (rule, q.shape, k.shape, q.dtype) if q.is_cuda else None)(
        q, k, v, score_mod=capped, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True))
    if sinks is None:
        return out
    out, aux = out      # a sink adds exp(sink) to the sum that each row was divided by
    return out * torch.sigmoid(aux.lse - sinks[:, None]).unsqueeze(-1).type_as(out)


flex.by_shape = True        # is compiled for each


@functools.cache
def _compiled(name: str, key: Any) -> Callable[..., Any]:
    """Compiled for this key; None: as it is."""
    from torch.nn.attention import flex_attention

    call = getattr(flex_attention, name)
    return call if key is None else jit.compiled(jit.fresh(call), dynamic=False)


@functools.lru_cache(maxsize=16)
def _block_mask(rule: Rule, T: int, device: torch.device) -> Any:
    return _masked(rule, T, None, device)


def _masked(rule: Rule, T: int, documents: Tensor | None,
            device: torch.device | None = None) -> Any:
    """The block mask of a rule. What a mask reads besides places are tensors, made before it."""
    device = device or documents.device
    near = replace(rule, blocks=None)
    table = None if rule.blocks is None else torch.tensor(rule.blocks, device=device)

    def sees(b, h, i, j):
        seen = near.sees(i, j)
        if table is not None:
            seen = seen & table[i // rule.block, j // rule.block]
        return seen if documents is None else seen & (documents[b, i] == documents[b, j])

    sequences = None if documents is None else len(documents)
    large = device.type == "cuda" and T > EAGER_MASK     # it would make T x T
    key = (rule, T, sequences) if large else None
    return _compiled("create_block_mask", key)(sees, sequences, None, T, T, device=device)


# Packed sequences: (B x T, heads, E), cut where a document begins.

_KEPT = WeakTensorKeyDictionary()       # what follows from a batch's documents, for all layers


def _of_batch(documents: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    """`make()`, once for these documents as they are."""
    cached, key = _KEPT.setdefault(documents, {}), (key, documents._version)
    if key not in cached:
        cached[key] = make()
    return cached[key]


@torch.compiler.disable     # how many documents there are is known when they are
def cuts(documents: Tensor) -> tuple[Tensor, int]:
    """Returns where each of documents (B, T) begins in B x T, and the end: int32; the longest."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    ends = begins.flatten().nonzero().flatten()
    ends = torch.cat((ends, ends.new_tensor([documents.numel()]))).to(torch.int32)
    return ends, int(ends.diff().max())


def _packed(q: Tensor, documents: Tensor | None, rule: Rule) -> tuple[Tensor, int]:
    """`cuts` of the sequences of q, or of their documents."""
    B, _, T, _ = q.shape
    if rule.documents:
        return _of_batch(documents, "cuts", lambda: cuts(documents))
    return torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device), T


def _tokens(*heads: Tensor) -> tuple[Tensor, ...]:
    """(B, H, T, E) -> (B x T, H, E)"""
    return tuple(t.transpose(1, 2).flatten(0, 1) for t in heads)


def _heads(out: Tensor, q: Tensor) -> Tensor:
    """(B x T, H, E) or (B, T, H x E) as q is"""
    B, H, T, E = q.shape
    return out.reshape(B, T, H, E).transpose(1, 2)


def _left(rule: Rule) -> int:
    """Keys before its own that a query sees, as flash kernels count them; -1: all."""
    return -1 if rule.window is None else rule.window - 1


@limited("varlen")
def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
           sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    at, longest = _packed(q, documents, rule)
    grouped, repeats = {}, q.shape[1] // k.shape[1]
    if repeats > 1 and knows_groups(varlen_attn):
        grouped = {"enable_gqa": True}
    elif repeats > 1:
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    out = varlen_attn(*_tokens(q, k, v), at, at, longest, longest, window_size=(_left(rule), 0),
                      **grouped)
    return _heads(out, q)


@functools.cache
def knows_groups(varlen_attn: Callable[..., Any]) -> bool:
    """True if it takes fewer heads of k and v than of q, which torch 2.11's does not."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@limited("flash-attn")
def flash_attn(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
               sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    import flash_attn as library

    window = _left(rule), 0 if rule.window else -1
    return _by_flash(library, q, k, v, documents, rule, window_size=window)


@limited("flash-attn-4")
def flash_attn_4(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
                 sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    import flash_attn.cute as library

    window = (_left(rule), 0) if rule.window else (None, None)
    return _by_flash(library, q, k, v, documents, rule, window_size=window, learnable_sink=sinks)


def _by_flash(library: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, rule: Rule,
              **how: Any) -> Tensor:
    """flash_attn 4 returns the log-sums besides."""
    how |= {"causal": True, "softcap": rule.soft_cap or 0.0}
    if rule.documents:
        at, longest = _packed(q, documents, rule)
        found = library.flash_attn_varlen_func(
            *_tokens(q, k, v), cu_seqlens_q=at, cu_seqlens_k=at, max_seqlen_q=longest,
            max_seqlen_k=longest, **how)
    else:
        found = library.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **how)
    return _heads(found[0] if isinstance(found, tuple) else found, q)


# FP8

@limited("fp8")
def fp8(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
        sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """q, k and v in E4M3 with a scale a head, probabilities with one a row. Backward takes the
    casts for nothing, and is of what they gave."""
    q, k, v = (_E4M3.apply(t, None) for t in (q, k, v))
    weights = _E4M3.apply(probabilities(q, k, documents, sinks, rule=rule), ROW_LARGEST)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


class _E4M3(torch.autograd.Function):
    """x (B, H, M, N), scaled a head to the format's largest number; with `largest`, a row to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: float | None) -> Tensor:
        grid = format_of("e4m3fn")
        rows = x.float().contiguous().flatten(0, 1 if largest is None else 2).flatten(1)
        block = (1, rows.shape[1])
        scale = amax(rows, block).values / (largest or grid.largest)
        return qdq(rows, grid, scale, block=block).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return d_out, None
