"""Casts and products in 8 and 4 bits, beside torchao's own functions."""

import pytest
import torch

from lpkit.kernels import cast
from lpkit.precision import backends
from lpkit.precision.scaled import quantise
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import ALL, RECIPES, Cast

pytest.importorskip("torchao")
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

DTYPES = [torch.float32, torch.bfloat16]
EIGHT = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MX = {**EIGHT, "e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "e2m1": torch.float4_e2m1fn_x2}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8),
        b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 8, 16), (128, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("by", ["tensor", "row"])
def test_dynamic_casts_to_float8(by, name, dtype, shape, power_of_two):
    """Their scale multiplies, ours divides, so that a value beside a midpoint may round to the
    other side: all but one in a hundred to the bit, and those by one step. With powers of two all
    are alike."""
    x = drawn(*shape, dtype=dtype)
    granularity = ScalingGranularity.TENSORWISE if by == "tensor" else ScalingGranularity.AXISWISE
    theirs = hp_tensor_to_float8_dynamic(x, EIGHT[name], LinearMMConfig(),
        scaling_granularity=granularity, axiswise_dim=None if by == "tensor" else -1,
                                         round_scales_to_power_of_2=power_of_two)
    due = theirs._data.float() / theirs._scale
    block = (ALL, ALL) if by == "tensor" else (1, ALL)
    found = quantise(x.reshape(-1, shape[-1]),
                     Cast(format=name, block=block, scale="power-of-two" if power_of_two
                          else "float32")).dequantise()
    found, due = found.reshape(shape), due.reshape(shape)
    if power_of_two:
        assert torch.equal(found, due)
        return
    near = (found - due).abs() <= 1e-6 * due.abs()
    assert near.float().mean() > 0.99
    step = 2.0 ** (1 - format_of(name).mantissa_bits)
    assert ((found - due).abs() <= step * torch.maximum(due.abs(),
        x.float().abs().amax() * 1e-3)).all()


@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
@pytest.mark.parametrize("shape", [(3, 96), (2, 4, 32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MX)
def test_mx_casts_to_the_bit(name, dtype, shape, rule):
    x = drawn(*shape, dtype=dtype) * torch.logspace(-3, 3, shape[-1]).to(dtype)
    scales, data = to_mx(x, MX[name], 32, ScaleCalculationMode(rule))
    found = cast.mx(x, format_of(name), rule=rule)
    assert torch.equal(found.scales, scales.view(torch.uint8))
    same_bits(found.values, to_dtype(data, scales, MX[name], 32, dtype))


@pytest.mark.parametrize("two_levels", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (1, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_casts(dtype, shape, two_levels):
    """Scales to the bit; values to the last place, since they multiply in another order. They
    multiply by an inverse, too, where we divide:
    at a midpoint, where up to 1 value in 16 of bf16 may be, both neighbours are right."""
    x = drawn(*shape, dtype=dtype)
    if not two_levels:
        x = x / x.abs().amax() * 448 * 6    # a scale of the tensor of 1
    tensor = per_tensor_amax_to_scale(x.abs().amax())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tensor)
    found = quantise(x, RECIPES["nvfp4"].y[0])
    assert torch.equal(found.tensor, tensor)
    same_bits(found.scale.to(torch.float8_e4m3fn), theirs.scale.reshape(found.scale.shape))
    scale = (found.scale * found.tensor).repeat_interleave(16, dim=1)
    steps = (x.float() / scale).abs()
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    clear = ((steps[..., None] / midpoints - 1).abs() > 1e-6).all(-1)
    assert clear.float().mean() > 0.9
    torch.testing.assert_close(found.dequantise()[clear], theirs.dequantize().float()[clear],
                               rtol=torch.finfo(dtype).eps, atol=0)


def wrapped(linear: torch.nn.Linear, recipe: str) -> torch.nn.Module:
    return backends.BACKENDS["emulated"].wrap(linear, RECIPES[recipe], name="linear", seed=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (3, 2, 16, 16)], ids=str)
def test_float8_linear_forward_and_backward(shape, dtype, bias):
    """Their emulation with E4M3 throughout the forward and E5M2 gradients, as our fp8-tensorwise.
    By how much both stray from the product in float64 says what the format costs: theirs and ours
    stray alike, to a tenth."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    linear = torch.nn.Linear(shape[-1], 32, bias=bias).to(dtype)
    theirs = Float8Linear.from_float(torch.nn.Linear(shape[-1], 32, bias=bias).to(dtype),
                                     Float8LinearConfig(emulate=True))
    theirs.load_state_dict(linear.state_dict())
    ours = wrapped(linear, "fp8-tensorwise")
    x, g = drawn(*shape, dtype=dtype), drawn(*shape[:-1], 32, seed=1, dtype=dtype)
    wide = torch.nn.Linear(shape[-1], 32, bias=bias).double()
    wide.load_state_dict({key: t.double() for key, t in linear.state_dict().items()})
    results = []
    for layer, to in ((ours, dtype), (theirs, dtype), (wide, torch.float64)):
        own = x.to(to).detach().requires_grad_()
        y = layer(own)
        y.backward(g.to(to))
        results.append([t.detach().double() for t in (y, own.grad, layer.weight.grad)])
    for ours_, theirs_, exact in zip(*results, strict=True):
        strayed = [((one - exact).norm() / exact.norm()).item() for one in (ours_, theirs_)]
        assert strayed[1] > 0.01 and strayed[0] == pytest.approx(strayed[1], rel=0.1)
        assert (ours_ - theirs_).norm() < 0.6 * (theirs_ - exact).norm()
