"""What `lpkit bench kernels` gives each kernel: arguments like those of a training step, less on a
CPU."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from lpkit.kernels.flash_attention import CAUSAL
from lpkit.kernels.rotary import angles
from lpkit.optim.one_pass import RULES
from lpkit.optim.rounding import noise

Timed = Callable[[torch.Generator, torch.device], Iterator[tuple]]


def rows(device: torch.device) -> tuple[tuple[int, int], ...]:
    """Tokens and width, as a step has them: those of GPT-2 1.5B, Llama 8B and its MLP."""
    return ((1024, 768),) if device.type == "cpu" else ((65_536, 1664), (16_384, 4096),
        (16_384, 14_336))


def _norm(rng: torch.Generator, device: torch.device, *, add: bool, bias: bool) -> Iterator[tuple]:
    for shape in rows(device):
        x, delta = (torch.randn(shape, generator=rng, device=device).bfloat16() for _ in range(2))
        w, b = (torch.randn(shape[1], generator=rng, device=device) for _ in range(2))
        yield x, *([delta] if add else []), w, *([b] if bias else []), 1e-5


def _swiglu(rng: torch.Generator, device: torch.device) -> Iterator[tuple]:
    for M, N in rows(device):
        yield (torch.randn(M, 2 * N, generator=rng, device=device).bfloat16(),)


def _rotary(rng: torch.Generator, device: torch.device) -> Iterator[tuple]:
    shape = (1, 4, 256, 64) if device.type == "cpu" else (4, 32, 4096, 128)
    cos, sin = (t.to(device, torch.bfloat16) for t in angles(*shape[-2:]))
    yield torch.randn(shape, generator=rng, device=device).bfloat16(), cos, sin


def _cross_entropy(rng: torch.Generator, device: torch.device) -> Iterator[tuple]:
    for M, V in ((512, 8192),) if device.type == "cpu" else ((16_384, 50_304), (8192, 128_256)):
        logits = torch.randn(M, V, generator=rng, device=device).bfloat16()
        yield logits, torch.randint(V, (M,), generator=rng, device=device)


def _attention(rng: torch.Generator, device: torch.device) -> Iterator[tuple]:
    """On a CPU `lpkit bench attention-cpu` has its own."""
    for shape in ((4, 32, 4096, 128), (16, 16, 1024, 64)) if device.type == "cuda" else ():
        q, k, v = (torch.randn(shape, generator=rng, device=device).bfloat16() for _ in range(3))
        yield q, k, v, None, None, CAUSAL


def _update(name: str, rng: torch.Generator, device: torch.device) -> Iterator[tuple]:
    w = torch.randn(2**20 if device.type == "cpu" else 2**26, generator=rng, device=device)
    yield RULES[name].arguments(w)
    yield RULES[name].arguments(w.bfloat16(), noise(w, None))


# A cast's are those of its page (`tests.kernels.builds`), for the matrices of a step.
TIMED: dict[str, Timed] = {
    "rms-norm": partial(_norm, add=False, bias=False),
    "layer-norm": partial(_norm, add=False, bias=True),
    "add-rms-norm": partial(_norm, add=True, bias=False),
    "add-layer-norm": partial(_norm, add=True, bias=True),
    "swiglu": _swiglu, "rotary": _rotary, "cross-entropy": _cross_entropy,
    "flash-attention": _attention,
    "adamw": partial(_update, "adamw"), "lion": partial(_update, "lion"),
}
