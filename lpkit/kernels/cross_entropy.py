"""Cross-entropy that overwrites the logits by their gradient.

    nats = logsumexp(logits) - logits[target]           for each row, float32
    logits <- (softmax(logits) - onehot(target)) * weight

A row has the V logits of one token. A Triton program processes one row, in pieces of up to PIECE
logits, in two passes. The first pass computes the largest logit and the sum of exponentials
together (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). The second pass writes the
gradient over the logits. So a row is read twice and written once, and no tensor of the size of the
logits is allocated (Hsu et al. 2024, https://arxiv.org/abs/2410.10989). On a CPU, C does the same
(rows.c).

A row with the target IGNORED has 0 nats and a gradient of 0. A row with any other target outside of
the vocabulary has NaN nats and a NaN gradient: to raise an error instead, the host would have to
wait for the GPU. With a weight of 0 the gradient is 0, even if the row contains a NaN or an
infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lpkit.contracts import IGNORED
from lpkit.errors import ConfigError
from lpkit.kernels import rows
from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Kernel, floats, spoiled, wide
from lpkit.kernels.operator import EVERY_DEVICE, operator

PIECE, WARPS = 8192, 16


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None
                  ) -> tuple[Tensor, Tensor]:
    """Return the nats (M,) of each row in float32, not weighted, and the gradient (M, V) of
    sum(weights * nats) in the dtype of the logits: the definition.

    logits: (M, V); targets: (M,) integers; weights: (M,), or None for weights of 1
    """
    targets, entries = targets[:, None], torch.arange(logits.shape[1], device=logits.device)
    counts, known = targets != IGNORED, (targets >= 0) & (targets < len(entries))
    log_probabilities = torch.where(known, torch.log_softmax(wide(logits), -1), torch.nan)
    nats = -log_probabilities.gather(1, torch.where(known, targets, 0).long())
    # one-hot targets by a comparison, because torch.compile fuses comparisons, but not scatters
    gradient = log_probabilities.exp() - (entries == targets).to(nats.dtype)
    weight = counts.to(nats.dtype) if weights is None else weights[:, None].to(nats.dtype) * counts
    gradient = gradient.mul_(weight).masked_fill_(weight == 0, 0.0)
    return torch.where(counts, nats, 0.0)[:, 0], gradient.to(logits.dtype)


@jit
def _in_place(logits, targets, weights, nats, V, IGNORED: tl.constexpr, WEIGHTED: tl.constexpr,
              PIECE: tl.constexpr):
    """Store the nats of one row, and overwrite its V logits by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    target = tl.load(targets + row)
    top, total = float("-inf"), 0.0
    for first in range(0, V, PIECE):
        at = first + tl.arange(0, PIECE)
        v = tl.load(start + at, mask=at < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, 0))
        # If all logits so far are -inf, the maximum is -inf, and -inf - (-inf) would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        # Rescale the sum so far from the old maximum to the new one. So no exponential overflows.
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(v - shift), 0)
        top = higher
    known = (target >= 0) & (target < V)
    log_sum = tl.where(known, top + tl.log(total), float("nan"))
    row_nats = log_sum - tl.load(start + tl.where(known, target, 0)).to(tl.float32)
    tl.store(nats + row, tl.where(target == IGNORED, 0.0, row_nats))
    weight = tl.where(target == IGNORED, 0.0, 1.0)
    if WEIGHTED:
        weight *= tl.load(weights + row)
    pieces = tl.cdiv(V, PIECE)
    # The pieces are read in reverse order, because the last piece may still be in a cache.
    for piece in range(pieces):
        at = (pieces - 1 - piece) * PIECE + tl.arange(0, PIECE)
        v = tl.load(start + at, mask=at < V, other=float("-inf")).to(tl.float32)
        g = (tl.exp(v - log_sum) - tl.where(at == target, 1.0, 0.0)) * weight
        g = tl.where(weight == 0.0, 0.0, g)
        tl.store(start + at, g.to(logits.dtype.element_ty), mask=at < V)


# ---- versions that work in place: nats = f(logits, targets, weights), which also overwrites the
# logits by their gradient

def _by_definition(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    nats, gradient = cross_entropy(logits, targets, weights)
    logits.copy_(gradient)
    return nats


def _by_c(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    nats, library = _nats(logits), rows.library()
    kernel = library.lp_cross_entropy_fp32
    if logits.dtype == torch.bfloat16:
        kernel = library.lp_cross_entropy_bf16
    kernel(logits.data_ptr(), targets.data_ptr(), None if weights is None else weights.data_ptr(),
           nats.data_ptr(), *logits.shape, torch.get_num_threads())
    return nats


def _by_triton(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    floats(logits)
    M, V = logits.shape
    nats = _nats(logits)
    piece = min(PIECE, triton.next_power_of_2(max(V, 1)))
    _in_place[(M,)](logits, targets, weights, nats, V, IGNORED, weights is not None, piece,
                    num_warps=max(1, WARPS * piece // PIECE))
    return nats


def _nats(logits: Tensor, *_: Tensor | None) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(len(logits), dtype=dtype)


def _kernel_for(logits: Tensor) -> Callable[..., Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if logits.is_cuda and triton is not None and logits.is_contiguous() and logits.dtype in dtypes:
        return _by_triton
    if logits.device.type == "cpu" and rows.served(logits, dtypes=dtypes[:2]):
        return _by_c
    return _by_definition


BY = {"reference": _by_definition, "cpu": _by_c, "triton": _by_triton}


@operator("cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor? weights=None, str by='') "
          "-> Tensor", key=EVERY_DEVICE, fake=_nats)
def cross_entropy_(logits: Tensor, targets: Tensor, weights: Tensor | None = None,
                   by: str = "") -> Tensor:
    """Return the nats of `cross_entropy`, and overwrites `logits` by the gradient. `by`: a key of
    BY; empty for this device's default. Raises ConfigError if there is not one target and one
    weight for each row."""
    M, V = logits.shape
    vectors = [v for v in (targets, weights) if v is not None]
    if any(v.shape != (M,) for v in vectors) or targets.is_floating_point() or (M and not V):
        got = ", ".join(f"{tuple(v.shape)} in {v.dtype}" for v in vectors)
        raise ConfigError(f"logits {(M, V)} take an integer target and a weight for each row, and "
                          f"rows of at least one entry; got {got}")
    kernel = BY.get(by) or _kernel_for(logits)
    weights = weights if weights is None else weights.float().contiguous()
    return kernel(logits, targets.to(torch.int64).contiguous(), weights)


def of_a_copy(by: str, logits: Tensor, targets: Tensor, weights: Tensor | None = None
              ) -> tuple[Tensor, Tensor]:
    """Return the same as the definition `cross_entropy`, by the version `by`, without overwriting
    the logits."""
    gradient = logits.contiguous().clone()
    return cross_entropy_(gradient, targets, weights, by), gradient


on_cpu, in_triton = partial(of_a_copy, ""), partial(of_a_copy, "triton")
OFFERED = {by: partial(of_a_copy, by) for by in BY}


def _examples(rng: torch.Generator, device: torch.device):
    for dtype in (torch.float32, torch.bfloat16):
        for M, V in ((5, 123), (3, 1), (0, 8), (4, 8192), (3, 8200), (2, 2 * PIECE + 9)):
            logits = (3 * torch.randn(M, V, generator=rng)).to(device, dtype)
            targets = torch.randint(V, (M,), generator=rng).to(device)
            yield logits, targets
            yield logits, targets, torch.rand(M, generator=rng).to(device)
    logits = torch.randn(6, 48, generator=rng).to(device)
    targets = torch.tensor([0, 47, IGNORED, 48, 3, -1], device=device)
    # a target is ignored, and two are outside of the vocabulary
    yield logits, targets
    yield logits * 1e4, targets                 # all exponentials but one are 0
    masked = logits.clone()
    masked[:, 7:40] = -torch.inf
    yield masked, targets
    yield spoiled(logits, (1, 3), (4, 5)), targets
    yield spoiled(logits, (1, 3), (4, 5)), targets, torch.tensor([0.5, 0, 2, 0, 0, 1]).to(device)


CROSS_ENTROPY = Kernel(
    definition=cross_entropy, versions={"cpu": on_cpu, "triton": in_triton},
    examples=_examples, offered=OFFERED)
