"""Causal attention on a CPU in bf16, forward and backward: blocks of products beside PyTorch's
flash kernel."""

import torch
from torch import Tensor

from lpkit.bench.harness import ROUNDS, Result, race
from lpkit.nn.attention import blocked, plain, sdpa

SHAPES = ((16, 6, 256, 64), (4, 12, 1024, 64))   # B, H, T, E
TARGET = 1.5


def run(rounds: int = ROUNDS) -> list[Result]:
    return [result for shape in SHAPES for result in _race(shape, rounds)]


def _race(shape: tuple[int, ...], rounds: int) -> list[Result]:
    rng = torch.Generator().manual_seed(0)
    *inputs, d_out = (torch.randn(shape, generator=rng, dtype=torch.bfloat16) for _ in range(4))
    for x in inputs:
        x.requires_grad_()

    def both(attend, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return (out, *torch.autograd.grad(out, inputs, d_out.to(out.dtype)))

    def check():
        """Both within bf16 rounding of float32: 8 bits in scores of order 1, summed over the
        context."""
        want = both(plain, *(x.detach().float().requires_grad_() for x in inputs))
        for attend in (blocked, sdpa):
            for got, expected in zip(both(attend, *inputs), want, strict=True):
                error = (got.float() - expected).norm() / expected.norm()
                assert error < 0.02, f"{attend.__name__}: relative error {error:.3f}"

    return race("attention-cpu", ours=lambda: both(blocked, *inputs), check=check, target=TARGET,
                peers={"sdpa": lambda: both(sdpa, *inputs)}, case="x".join(map(str, shape)),
                rounds=rounds)
