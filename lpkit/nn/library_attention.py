"""Attention backends of libraries: PyTorch's kernels by name, FlexAttention, flash-attn.

Each function is a row of `lpkit.techniques.attention_backends`, and computes the same as
`attention.plain`. The row lists the rules that the function does not support. A library is imported
when its function is called. The calls match the signatures of torch 2.11 and newer
(`tests/gpu/test_oldest_torch.py`), and of flash-attn at commit 0251105 (`flash_attn_interface.py`).

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

# Most tokens for which `flex` computes the block mask without compiling: compiling would take
# longer than it saves.
EAGER_MASK = 1024


@limited("sdpa-cudnn")
def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
               sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    # PyTorch raises an error if its cuDNN kernel does not support these arguments.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, documents, sinks, rule=rule)


# FlexAttention

@limited("flex")
def flex(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
         sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """Return the attention output by flex_attention. On a CPU it runs uncompiled, only forward, and
    stores all scores; this serves only to test the arguments that a GPU would get."""
    from torch.nn.attention.flex_attention import AuxRequest

    capped = None
    if (cap := rule.soft_cap) is not None:
        def capped(score, b, h, i, j):
            return cap * torch.tanh(score / cap)

    mask = (_block_mask(rule, q.shape[2], q.device) if documents is None or not rule.documents else
            _of_batch(documents, ("flex", rule),
                      lambda: _new_block_mask(rule, q.shape[2], documents)))
    out = _compiled("flex_attention", (rule, q.shape, k.shape, q.dtype) if q.is_cuda else None)(
        q, k, v, score_mod=capped, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True))
    if sinks is None:
        return out
    # A sink adds exp(sink) to the sum of exponentials, exp(lse), by which each row was divided. So
    # multiply by exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
    out, aux = out
    return out * torch.sigmoid(aux.lse - sinks[:, None]).unsqueeze(-1).type_as(out)


flex.by_shape = True        # `kernels.choose`: this function is compiled for each shape


@functools.cache
def _compiled(name: str, key: Any) -> Callable[..., Any]:
    """Return the function `name` of torch.nn.attention.flex_attention, compiled once for each
    `key`; key None: uncompiled."""
    from torch.nn.attention import flex_attention

    call = getattr(flex_attention, name)
    return call if key is None else jit.compiled(jit.fresh(call), dynamic=False)


@functools.lru_cache(maxsize=16)
def _block_mask(rule: Rule, T: int, device: torch.device) -> Any:
    return _new_block_mask(rule, T, None, device)


def _new_block_mask(rule: Rule, T: int, documents: Tensor | None,
                    device: torch.device | None = None) -> Any:
    """Return FlexAttention's BlockMask of `rule` for T queries and T keys, the same for all heads.

    documents  (B, T), ids of documents, or None: the mask is the same for all sequences
    device     of the mask; None: that of `documents`

    `sees(b, h, i, j)` is true if query i of sequence b and head h sees key j. PyTorch traces it
    with index tensors, so it may not index a tuple (`rule.blocks`) or make a tensor: `table` is
    made first.
    """
    device = device or documents.device
    by_position = replace(rule, blocks=None)
    table = None if rule.blocks is None else torch.tensor(rule.blocks, device=device)

    def sees(b, h, i, j):
        seen = by_position.sees(i, j)
        if table is not None:
            seen = seen & table[i // rule.block, j // rule.block]
        return seen if documents is None else seen & (documents[b, i] == documents[b, j])

    B = None if documents is None else len(documents)
    # Uncompiled, create_block_mask allocates a mask (T, T).
    compiles = device.type == "cuda" and T > EAGER_MASK
    key = (rule, T, B) if compiles else None
    return _compiled("create_block_mask", key)(sees, B, None, T, T, device=device)


# flash-attn takes packed sequences (B x T, heads, E), divided where a document begins.

# Tensors that depend only on the documents of a batch, so that all layers share them.
_KEPT = WeakTensorKeyDictionary()


def _of_batch(documents: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    """Return `make()`, computed once for each key and for the current contents of `documents`."""
    cached, key = _KEPT.setdefault(documents, {}), (key, documents._version)
    if key not in cached:
        cached[key] = make()
    return cached[key]


@torch.compiler.disable     # the number of documents is known only when the kernel runs
def cuts(documents: Tensor) -> tuple[Tensor, int]:
    """Return the first index of each document in the flattened `documents` (B, T), followed by B T,
    int32; and the length of the longest document. A document ends with its sequence.

    >>> cuts(torch.tensor([[5, 5, 6], [6, 6, 6]]))
    (tensor([0, 2, 3, 6], dtype=torch.int32), 3)
    """
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
    # window_size: how many keys before and after its own position a query sees; -1: all
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
