"""Cross-entropy that leaves its gradient where the logits were.

    nats = logsumexp(logits) - logits[target]           for each row, float32
    logits <- (softmax(logits) - onehot(target)) * weight

A program takes a row in pieces: the first pass finds the largest logit and the sum of exponentials
as it goes (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867), the second writes the
gradient over the logits. So a row is read twice and written once, and nothing of its size is made
(Hsu et al. 2024, https://arxiv.org/abs/2410.10989).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Build, Kernel, floats, matrix
from lpkit.kernels.operator import EVERY_DEVICE, operator

PIECE, WARPS = 8192, 16


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None
                  ) -> tuple[Tensor, Tensor]:
    """logits (M, V), targets (M,) int64, weights (M,) float32 -> nats (M,) float32 without the
    weights, and the gradient of the weighted sum of nats, like logits. A target outside 0 ... V - 1
    counts nothing: 0 nats, no gradient."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    counted = (targets >= 0) & (targets < logits.shape[1])
    at = targets.clamp(0, max(logits.shape[1] - 1, 0))[:, None]
    log_probabilities = torch.log_softmax(wide, -1)
    nats = -log_probabilities.gather(1, at)[:, 0]
    gradient = log_probabilities.exp().scatter_add(1, at, -wide.new_ones(at.shape))
    if weights is not None:
        gradient *= weights[:, None].to(wide.dtype)
    gradient = torch.where(counted[:, None], gradient, 0)
    return torch.where(counted, nats, 0), gradient.to(logits.dtype)


@jit
def _in_place(logits, targets, weights, nats, V, WEIGHTED: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    target = tl.load(targets + row)
    top, total = float("-inf"), 0.0
    for first in range(0, V, PIECE):
        at = first + tl.arange(0, PIECE)
        v = tl.load(start + at, mask=at < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, 0))
        # while all were -inf there is nothing to shift by
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(v - shift), 0)
        top = higher
    log_sum = top + tl.log(total)
    counted = (target >= 0) & (target < V)
    hit = tl.load(start + tl.where(counted, target, 0)).to(tl.float32)
    tl.store(nats + row, tl.where(counted, log_sum - hit, 0.0))
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row)
    for first in range(0, V, PIECE):
        at = first + tl.arange(0, PIECE)
        v = tl.load(start + at, mask=at < V, other=float("-inf")).to(tl.float32)
        g = (tl.exp(v - log_sum) - tl.where(at == target, 1.0, 0.0)) * weight
        g = tl.where(counted, g, 0.0)
        tl.store(start + at, g.to(logits.dtype.element_ty), mask=at < V)


@operator("cross_entropy_triton_(Tensor(a!) logits, Tensor targets, Tensor? weights) -> Tensor",
          key=EVERY_DEVICE, fake=lambda logits, targets, weights: logits.new_empty(
              len(logits), dtype=torch.float32))
def in_place(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """The nats; `logits` becomes the gradient."""
    floats(logits)
    M, V = logits.shape
    if targets.shape != (M,) or targets.dtype != torch.int64:
        raise ConfigError(f"logits {(M, V)} take targets {(M,)} in int64; got "
                          f"{tuple(targets.shape)} in {targets.dtype}")
    nats = logits.new_empty(M, dtype=torch.float32)
    piece = min(PIECE, triton.next_power_of_2(max(V, 1)))
    _in_place[(M,)](logits, targets.contiguous(), weights, nats, V, WEIGHTED=weights is not None,
                    PIECE=piece, num_warps=max(1, WARPS * piece // PIECE))
    return nats


def _copied(logits: Tensor, targets: Tensor, weights: Tensor | None = None
            ) -> tuple[Tensor, Tensor]:
    gradient = logits.contiguous().clone()
    return in_place(gradient, targets, weights), gradient


def _examples(rng: torch.Generator, device: torch.device):
    for dtype in (torch.float32, torch.bfloat16):
        for M, V in ((5, 123), (3, 1), (0, 8), (4, 8192), (3, 8200)):
            logits = (3 * torch.randn(M, V, generator=rng)).to(device, dtype)
            targets = torch.randint(V, (M,), generator=rng).to(device)
            yield logits, targets
            yield logits, targets, torch.rand(M, generator=rng).to(device)
    logits = torch.randn(6, 48, generator=rng).to(device)
    targets = torch.tensor([0, 47, -100, 48, 3, 5], device=device)
    yield logits, targets                       # two of them count nothing
    yield logits * 1e4, targets                 # the exponential of all but one is 0
    masked = logits.clone()
    masked[:, 7:40] = -torch.inf
    yield masked, targets
    bad = logits.clone()
    bad[1, 3], bad[4, 5] = torch.nan, torch.inf
    yield bad, targets


def _timed(rng: torch.Generator, device: torch.device):
    sizes = ((512, 8192),) if device.type == "cpu" else ((16_384, 50_304), (8192, 128_256))
    for M, V in sizes:
        logits = torch.randn(M, V, generator=rng).to(device, torch.bfloat16)
        yield logits, torch.randint(V, (M,), generator=rng).to(device)


def _liger(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    # without requires_grad it makes no gradient
    nats, *_, gradient = cross_entropy_forward(logits.clone().requires_grad_(), targets, None, -100,
                                               0.0, 0.0, "none", None, False)
    return nats.float(), gradient.detach()


CROSS_ENTROPY = Kernel(
    definition=cross_entropy, versions={"triton": _copied}, examples=_examples,
    timed=_timed,
    typical=lambda: {"": (matrix(), torch.empty(16384, dtype=torch.int64, device="meta"))},
    peers={"liger": _liger},
    moved_bytes=lambda logits, targets, *_: 2 * logits.nbytes + targets.nbytes + 4 * len(logits),
    builds=(Build(kernel=_in_place, constants={"WEIGHTED": True, "PIECE": PIECE}, warps=WARPS,
                  signature={"logits": "*bf16", "targets": "*i64", "weights": "*fp32",
                             "nats": "*fp32", "V": "i32"}),))
