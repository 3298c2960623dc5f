"""Attention by libraries: PyTorch's kernels by name, FlexAttention, flash-attn.

Each function is a row of `lpkit.techniques.attention_backends`, and computes the same as
`attention.plain`. The row lists what it cannot compute. A library is imported when it is called.
Signatures are those of torch 2.11 and newer (`tests/gpu/test_oldest_torch.py`), and of flash-attn
at 0251105 (`flash_attn_interface.py`). Packed documents follow one another.

Shapes: q (B, H, T, E), k and v (B, G, T, E), documents (B, T), sinks (H,); the result is like q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from lpkit.kernels import jit
from lpkit.nn.attention import CAUSAL, sdpa
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import limited

EAGER_MASK = 1024       # tokens; up to this size compiling the mask takes longer than it saves


@limited("sdpa-cudnn")
def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
               sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    # PyTorch raises if this kernel cannot compute it
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, documents, sinks, rule=rule)


# FlexAttention

@limited("flex")
def flex(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
         sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """Attend by flex_attention. On a CPU it is uncompiled, only forward, and stores all scores: it
    is there to check the arguments that a GPU would be given."""
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
    out, aux = out      # a sink adds exp(sink) to the sum by which each row was divided
    return out * torch.sigmoid(aux.lse - sinks[:, None]).unsqueeze(-1).type_as(out)


flex.by_shape = True        # it is compiled for each shape


@functools.cache
def _compiled(name: str, key: Any) -> Callable[..., Any]:
    """Return a function of flex_attention, compiled for this key; uncompiled if key is None."""
    from torch.nn.attention import flex_attention

    call = getattr(flex_attention, name)
    return call if key is None else jit.compiled(jit.fresh(call), dynamic=False)


@functools.lru_cache(maxsize=16)
def _block_mask(rule: Rule, T: int, device: torch.device) -> Any:
    return _masked(rule, T, None, device)


def _masked(rule: Rule, T: int, documents: Tensor | None,
            device: torch.device | None = None) -> Any:
    """Return the block mask of a rule. A mask function may read only places and tensors that were
    made before it."""
    device = device or documents.device
    near = replace(rule, blocks=None)
    table = None if rule.blocks is None else torch.tensor(rule.blocks, device=device)

    def sees(b, h, i, j):
        seen = near.sees(i, j)
        if table is not None:
            seen = seen & table[i // rule.block, j // rule.block]
        return seen if documents is None else seen & (documents[b, i] == documents[b, j])

    sequences = None if documents is None else len(documents)
    large = device.type == "cuda" and T > EAGER_MASK     # uncompiled, it would allocate T x T
    key = (rule, T, sequences) if large else None
    return _compiled("create_block_mask", key)(sees, sequences, None, T, T, device=device)


# Packed sequences: (B x T, heads, E), divided where a document begins.

# tensors that depend only on a batch's documents, for all layers
_KEPT = WeakTensorKeyDictionary()


def _of_batch(documents: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    """Return `make()`, computed once for the current contents of these documents."""
    cached, key = _KEPT.setdefault(documents, {}), (key, documents._version)
    if key not in cached:
        cached[key] = make()
    return cached[key]


@torch.compiler.disable     # the number of documents is known only when the kernel runs
def cuts(documents: Tensor) -> tuple[Tensor, int]:
    """Return where each of documents (B, T) begins in B x T, and the end, in int32; and the length
    of the longest."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    ends = begins.flatten().nonzero().flatten()
    ends = torch.cat((ends, ends.new_tensor([documents.numel()]))).to(torch.int32)
    return ends, int(ends.diff().max())


@limited("flash-attn")
def flash_attn(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
               sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    import flash_attn

    B, H, T, E = q.shape
    # keys before its own that a query sees, as flash-attn counts them; -1: all
    how = {"causal": True, "softcap": rule.soft_cap or 0.0,
           "window_size": (rule.window - 1, 0) if rule.window else (-1, -1)}
    if not rule.documents:
        out = flash_attn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **how)
    else:
        at, longest = _of_batch(documents, "cuts", lambda: cuts(documents))
        out = flash_attn.flash_attn_varlen_func(
            *(t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=at, cu_seqlens_k=at,
            max_seqlen_q=longest, max_seqlen_k=longest, **how)
    return out.reshape(B, T, H, E).transpose(1, 2)
