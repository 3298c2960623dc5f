"""Stores the weights of a frozen base model in few bits, for training adapters (QLoRA): a code for
each weight, and a scale for each block of weights.

A matrix is decoded for its matmul in forward, and again in backward; autograd does not save the
decoded matrix. The 16 values of NF4 are quantiles of a normal distribution, one of them zero, so
each value is used about equally often. With `double`, the scales are also stored in 8 bits, after
their mean is subtracted, in the format of 8-bit moments (`lpkit.optim.moments`).

    bytes per weight in NF4, blocks of 64: 1/2 + 4/64 = 0.5625
    with `double`, about:                  1/2 + 1/64 + 4/(64 * 256) = 0.5159

Source: Dettmers et al. 2023, section 3 and appendix E, https://arxiv.org/abs/2305.14314
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.kernels.scales import cast, packed, stored_dtype
from lpkit.optim.moments import blocks_of, from_blocks, nearest, to_blocks
from lpkit.techniques.adapters import QuantisedBaseSettings
from lpkit.techniques.formats import FORMATS, Format

NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)


def encode(blocks: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return the codes (blocks, numbers) uint8 of `blocks` (blocks, numbers) float32, and the scale
    of each block, (blocks,) float32. format: "nf4", or the name of a format in FORMATS."""
    if fmt := FORMATS.get(format):
        scaled = cast(blocks, fmt, (1, 0), "float32")
        return scaled.data.view(torch.uint8), scaled.scale.flatten()
    book = torch.tensor(NF4, device=blocks.device)
    return nearest(blocks, (book[:-1] + book[1:]) / 2)


class QuantisedProduct(torch.autograd.Function):
    """y = x @ w.T + bias, for x (..., in) in the compute dtype and a frozen w. A custom Function,
    because autograd would save the decoded w; backward decodes w again."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, base: "QuantisedLinear") -> Tensor:
        ctx.base = base         # holds the codes; the decoded matrix is freed
        return F.linear(x, base.dequantised(x.dtype), bias)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None]:
        return g @ ctx.base.dequantised(g.dtype), None, None


class QuantisedLinear(nn.Module):
    """Replaces a frozen Linear. Its weight is stored in buffers:

    codes:  uint8; a byte has one 8-bit code, or two 4-bit codes, the first in the low half. The
            last block is padded with zeros
    scales: one number for each block, float32, or uint8 with `double`
    table:  (256, codes in a byte) float32: the values of the codes in a byte
    """

    def __init__(self, linear: nn.Linear, settings: QuantisedBaseSettings, table: Tensor):
        super().__init__()
        self.bias, self.shape, self.block = linear.bias, linear.weight.shape, settings.block
        blocks = blocks_of(linear.weight.float().flatten(), self.block)
        codes, scales = encode(blocks, settings.format)
        codes = packed(codes) if table.shape[1] == 2 else codes
        stored = {"codes": codes.flatten(), "scales": scales}
        # The mean is computed in float64, so that it has the same bits for any number of threads.
        if settings.double:
            stored["scales_mean"] = mean = scales.mean(dtype=torch.float64).float()
            stored["scales"], stored["scales_scale"] = to_blocks(scales - mean, signed=True)
        # names of these buffers: a run that starts from another run does not store them in its
        # checkpoints
        self.from_base = tuple(stored)
        for name, t in stored.items():
            self.register_buffer(name, t)
        self.register_buffer("table", table, persistent=False)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the decoded weight (out, in) in `dtype`, rounded once from float32."""
        scales = self.scales
        if scales.dtype == torch.uint8:
            scales = from_blocks(scales, self.scales_scale, signed=True).add_(self.scales_mean)
        numbers = self.table.index_select(0, self.codes.int()).view(-1, self.block)
        numbers.mul_(scales[:, None])
        return numbers.flatten()[:self.shape.numel()].view(self.shape).to(dtype)

    @property
    def weight(self) -> Tensor:
        return self.dequantised(torch.float32)

    def merged(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:     # (..., in) -> (..., out)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return QuantisedProduct.apply(x.to(dtype), self.bias, self)


def values(fmt: Format) -> Tensor:
    """Return the value of each code of a format, (2^bits,) float32."""
    codes, half = torch.arange(2**fmt.bits), 2**(fmt.bits - 1)
    if fmt.exponent_bits:
        return codes.to(torch.uint8).view(stored_dtype(fmt)).float()
    return ((codes ^ half) - half).float()      # two's complement


@torch.no_grad()
def quantise_base(model: nn.Module, settings: QuantisedBaseSettings) -> None:
    """Replace the frozen Linears in the blocks of `model` by QuantisedLinears."""
    fmt = FORMATS.get(settings.format)
    table = values(fmt) if fmt else torch.tensor(NF4)
    if len(table) == 16:        # a byte has two 4-bit codes: list the pairs of values of all bytes
        table = torch.stack((table.repeat(16), table.repeat_interleave(16)), 1)
    for name, module in list(model.blocks.named_modules()):
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            new = QuantisedLinear(module, settings, table.view(256, -1).to(module.weight.device))
            model.blocks.set_submodule(name, new)
