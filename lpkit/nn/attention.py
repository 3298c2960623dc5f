"""Attention backends: the same function, computed differently.

A backend is any `contracts.Attend`: (q, k, v) -> out with q (B, H, T, E), k and v (B, G, T, E), causal.
`plain` is the definition; every other backend is tested against it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lpkit.contracts import Choice
from lpkit.kernels.blocked_attention import BlockedAttention


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(E)) v over the tokens so far. Holds the (B, H, T, T) scores."""
    H, T, E = q.shape[-3:]
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))   # grouped heads share k and v
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / math.sqrt(E)).masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own choice of kernel (flash, memory-efficient, cuDNN or plain)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def blocked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of queries in the inputs' own dtype, for CPUs and short contexts; see `kernels.blocked_attention`."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (k, v))
    return BlockedAttention.apply(*(t.flatten(0, 1) for t in (q, k, v))).view(q.shape)


def last_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query (B, H, 1, E) against every key so far (B, G, T, E): a decoding step, where nothing is in the future."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


BACKENDS = {"plain": plain, "sdpa": sdpa, "blocked": blocked}
BLOCKED_CONTEXT = 1024   # tokens; beyond, the kept probabilities cost more memory than the speed is worth


def choose(asked: str, *, device_type: str, recipe: str, context: int) -> Choice:
    """What `model.attention=auto` means here. See `lpkit bench attention-cpu`."""
    if asked != "auto":
        return Choice(asked=asked, used=asked, why="asked for")
    if device_type == "cpu" and recipe != "fp32" and context <= BLOCKED_CONTEXT:
        return Choice(asked=asked, used="blocked", why="PyTorch's CPU flash kernel computes in float32 whatever it is "
                                                       "given; blocks of low-precision products are faster")
    return Choice(asked=asked, used="sdpa", why="PyTorch picks the fastest fused kernel for this device and dtype")
