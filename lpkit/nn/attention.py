"""Attention backends: the same function, computed differently. `lpkit.techniques.blocks.ATTENTION`
has their rows.

A backend is any `contracts.Attend`: (q, k, v) -> out with q (B, H, T, E), k and v (B, G, T, E),
causal. `plain` is the definition; every other backend is tested against it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lpkit.contracts import Attend, Choice
from lpkit.errors import pick
from lpkit.kernels.blocked_attention import BlockedAttention
from lpkit.techniques.blocks import ATTENTION, choose_attention


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(E)) v over the tokens so far. Holds the (B, H, T, T) scores."""
    H, T, E = q.shape[-3:]
    # grouped heads share k and v
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / math.sqrt(E)).masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own choice of kernel (flash, memory-efficient, cuDNN or plain)."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def blocked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of queries in the inputs' own dtype, for CPUs; see `kernels.blocked_attention`."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (k, v))
    return BlockedAttention.apply(*(t.flatten(0, 1) for t in (q, k, v))).view(q.shape)


def last_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query (B, H, 1, E) against every key so far (B, G, T, E); nothing is in the future."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def backend(name: str) -> Attend:
    """Raises ConfigError for an unknown name."""
    return pick(ATTENTION, name, "model.attention").load()


def choose(asked: str, *, device_type: str, recipe: str, context: int) -> Choice:
    """What `model.attention=auto` means here."""
    used, why = choose_attention(asked, device=device_type, low_precision=recipe != "fp32",
                                 context=context)
    return Choice(asked=asked, used=used, why=why)
