"""Casts to 8 bits with a scale for the tensor or for each row, compared with torchao."""

import pytest
import torch

from lpkit.precision.scaled import quantise
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import ALL, Cast

pytest.importorskip("torchao")
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

DTYPES = [torch.float32, torch.bfloat16]
EIGHT = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 8, 16), (128, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("by", ["tensor", "row"])
def test_dynamic_casts_to_float8(by, name, dtype, shape, power_of_two):
    """torchao multiplies by a scale, and the kit divides by a scale, so a value next to a
    midpoint may round to the other side. At least 99% are equal bit for bit, the others differ
    by one step. If scales are powers of two, all are equal."""
    x = drawn(*shape, dtype=dtype)
    granularity = ScalingGranularity.TENSORWISE if by == "tensor" else ScalingGranularity.AXISWISE
    theirs = hp_tensor_to_float8_dynamic(x, EIGHT[name], LinearMMConfig(),
        scaling_granularity=granularity, axiswise_dim=None if by == "tensor" else -1,
                                         round_scales_to_power_of_2=power_of_two)
    due = theirs._data.float() / theirs._scale
    block = (ALL, ALL) if by == "tensor" else (1, ALL)
    ours = quantise(x.reshape(-1, shape[-1]),
                     Cast(format=name, block=block, scale="power-of-two" if power_of_two
                          else "float32")).dequantise()
    ours, due = ours.reshape(shape), due.reshape(shape)
    if power_of_two:
        assert torch.equal(ours, due)
        return
    near = (ours - due).abs() <= 1e-6 * due.abs()
    assert near.float().mean() > 0.99
    step = 2.0 ** (1 - format_of(name).mantissa_bits)
    assert ((ours - due).abs() <= step * torch.maximum(due.abs(),
        x.float().abs().amax() * 1e-3)).all()
