"""A frozen base in few bits, which adapters train beside (QLoRA): codes, and a scale for each block.

A matrix is made of them for its product in forward, and once more for that in backward; between
them nothing of it is kept, and it has no gradient.

NF4: its 16 values are quantiles of a normal distribution, zero among them, so that each is used as
often as the others where weights are normal; tests/test_qlora.py computes them. `double`: scales are
positive, so their mean is taken off, and the rest is stored in 8 bits of their own (as moments are,
`lpkit.optim.moments`). Source: Dettmers et al. 2023, section 3 and appendix E,
https://arxiv.org/abs/2305.14314
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.kernels import cast
from lpkit.optim.moments import from_blocks, to_blocks
from lpkit.precision.formats import values
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.quantised_base import QuantisedBaseSettings

NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)


def levels(format: str) -> Tensor:
    """Returns the value of each code, float32."""
    return values(FORMATS[format]) if format in FORMATS else torch.tensor(NF4)


def encode(blocks: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """(blocks, numbers) float32 -> codes, uint8, and the scale of each block, float32."""
    amax = blocks.abs().amax(1)
    if fmt := FORMATS.get(format):
        scale = amax / fmt.largest
        return cast.qdq(blocks, fmt, scale[:, None], block=(1, 0), dtype=torch.uint8), scale
    ratio, book = blocks / amax.clamp(min=torch.finfo(torch.float32).tiny)[:, None], levels(format)
    middles = ((book[:-1] + book[1:]) / 2).to(blocks.device)
    return torch.bucketize(ratio, middles, out_int32=True).to(torch.uint8), amax


class Product(torch.autograd.Function):
    """y = x @ w.T + bias, of x (..., K) in the compute dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, base: QuantisedLinear) -> Tensor:
        ctx.base = base
        return F.linear(x, base.made(x.dtype), bias)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None]:
        return g @ ctx.base.made(g.dtype), None, None


class QuantisedLinear(nn.Module):
    """Stands for a Linear that is frozen. `codes` are by block, two of 4 bits to a byte, the first in
    the low half; a last block is filled up with zeros. `table`: what each byte stands for."""

    def __init__(self, linear: nn.Linear, settings: QuantisedBaseSettings, table: Tensor):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self.block = linear.bias, settings.block
        flat = linear.weight.detach().float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        codes, scales = encode(blocks, settings.format)
        if table.shape[1] == 2:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        stored = {"codes": codes, "scales": scales}
        if settings.double:     # a mean whose bits no number of threads decides
            mean = scales.mean(dtype=torch.float64).float()
            rest, scale = to_blocks(scales - mean, signed=True)
            stored = {"codes": codes, "scales": rest, "scales_scale": scale, "scales_mean": mean}
        for name, t in stored.items():
            self.register_buffer(name, t)
        self.from_base = tuple(stored)      # what a checkpoint need not have, where the base has it
        self.register_buffer("table", table, persistent=False)

    def made(self, dtype: torch.dtype) -> Tensor:
        """The matrix, (out, in), rounded once from float32."""
        scales = self.scales
        if scales.dtype == torch.uint8:
            scales = from_blocks(scales, self.scales_scale, signed=True).add_(self.scales_mean)
        made = self.table.index_select(0, self.codes.flatten().int()).view(-1, self.block)
        made.mul_(scales[:, None])
        size = self.out_features, self.in_features
        return made.flatten()[:size[0] * size[1]].view(size).to(dtype)

    @property
    def weight(self) -> Tensor:
        """What the codes stand for, float32."""
        return self.made(torch.float32)

    def merged(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:     # (..., in) -> (..., out)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return Product.apply(x.to(dtype), self.bias, self)


def quantise_base(model: nn.Module, settings: QuantisedBaseSettings) -> None:
    book = levels(settings.format).to(next(model.parameters()).device)
    if len(book) == 16:     # both codes of a byte
        book = torch.stack((book.repeat(16), book.repeat_interleave(16)), 1)
    table = book.view(256, -1)
    for name, linear in list(_frozen(model.blocks)):
        parent, _, leaf = name.rpartition(".")
        setattr(model.blocks.get_submodule(parent), leaf, QuantisedLinear(linear, settings, table))


def _frozen(blocks: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, one) for name, one in blocks.named_modules()
            if isinstance(one, nn.Linear) and not one.weight.requires_grad)
