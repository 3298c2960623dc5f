"""The fused casts against `quantise`, for every cast of every recipe, and against ml_dtypes.

Only these tests catch a fused cast whose definition, or whose Triton kernel, does not give the
emulation's bits in the layout that hardware reads. On a CPU Triton's interpreter runs the kernels;
test_kernels.py holds each to its definition on awkward examples.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from lessons.number_formats import decode
from lpkit.errors import ConfigError
from lpkit.kernels import scales
from lpkit.kernels.cast import Noise, mx
from lpkit.kernels.fused_cast import cast_operand as fused
from lpkit.kernels.fused_cast import why_not
from lpkit.kernels.jit import INTERPRETED, jit, tl
from lpkit.kernels.rounding import divisor, quotient
from lpkit.precision.backends import BACKENDS
from lpkit.precision.scaled import quantise
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.kernels import KERNELS
from lpkit.techniques.recipes import MX_BLOCK, RECIPES, SCALES, Cast, resolve
from tests.kernels.test_cast import every_exponent

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
              pytest.mark.skipif(tl is None, reason="Triton is not installed")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = {name: recipe for name, recipe in RECIPES.items() if recipe.products}
LOW |= {f"{name} stochastic": resolve(name, gradient_rounding="stochastic", transform="hadamard")
        for name in ("fp8-tensorwise", "mxfp8", "int8")}
# Each cast once, whatever recipes have it; operands of dw are transposed views.
CASTS = list(dict.fromkeys((cast, product == "dw") for recipe in LOW.values()
                           for product, casts in recipe.products.items() for cast in casts))
NOISE = Noise(seed=11, counter=2**40)


@pytest.fixture(scope="module", autouse=True)
def right_interpreter():
    if INTERPRETED:
        from lpkit.kernels.interpreter import mend
        mend()


def operand_x(M=128, K=128, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=rng) * torch.exp2(torch.randint(-8, 8, (M, 1), generator=rng))
    x[3], x[:, 5] = 0, x[:, 5] * 50
    return x.to(DEVICE)


def cast_operand(*arguments, version="triton", **how):
    kernels = {name: KERNELS[name].load() for name in BACKENDS["scaled_mm"].kernels.values()}
    by = {name: {"reference": kernel.definition, **kernel.versions}[version]
          for name, kernel in kernels.items()}
    return fused(*arguments, by=by.__getitem__, **how)


def wanted(x, cast, **how):
    """As the emulation casts it, in the layouts that hardware reads."""
    operand = quantise(x, cast, dtype=torch.bfloat16, **how)      # which holds the values of 8 bits
    if cast.format != "e2m1":
        dtype = getattr(torch, FORMATS[cast.format].torch_dtype)
        operand = replace(operand, data=operand.data.to(dtype))
    scale = operand.scale
    if cast.format == "e2m1":
        scale = scales.swizzled(scale.repeat_interleave(cast.block[0], 0).to(torch.float8_e4m3fn))
    elif cast.block == MX_BLOCK:
        scale = scales.swizzled(scale.to(torch.float8_e8m0fnu))
    return operand, scale


def same(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype
    assert torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (got, want)))


def unpacked(data):
    codes = data.view(torch.uint8)
    return decode(torch.stack((codes & 15, codes >> 4), -1).flatten(-2), FORMATS["e2m1"])


def compare(got, x, cast, **how):
    want, scale = wanted(x, cast, **how)
    if cast.format == "e2m1":
        same(unpacked(got.data), want.data.float())
        same(got.tensor, want.tensor)
    else:
        same(got.data, want.data)
    same(got.scale, scale)
    assert got.nonfinite == want.nonfinite


@pytest.mark.parametrize("version", ["triton", "reference"])
def test_every_cast_of_every_recipe_is_quantises(version):
    for cast, transposed in CASTS:
        x = operand_x().to(torch.float32 if cast.block[0] > 1 else torch.bfloat16)
        x = x.T if transposed else x
        how = {"noise": NOISE} if cast.rounding == "stochastic" else {}
        compare(cast_operand(x, cast, version=version, **how), x, cast, **how)


@pytest.mark.parametrize("element, scale", [("e4m3fn", "power-of-two"),
                                            ("e5m2", "power-of-two-floor")])
def test_every_exponent_has_one_scale_and_the_same_codes_every_way(element, scale):
    """Triton's kernel, the definition of fused casts and `cast.mx` (C), of subnormals, infinities
    and NaN too. A block of zeros has the scale 1 or, as in torchao, the least."""
    x = every_exponent().to(DEVICE)
    how = Cast(format=element, block=MX_BLOCK, scale=scale)
    want = mx(x.cpu(), FORMATS[element], rule=SCALES[scale].fused, dtype=torch.uint8)
    some = x.cpu().abs().amax(1) != 0
    for version in ("triton", "reference"):
        got = cast_operand(x, how, version=version, swizzled=False)
        code, data = got.scale.view(torch.uint8).cpu()[:, 0], got.data.view(torch.uint8).cpu()
        assert torch.equal(code[some], want.scales[some, 0]), version
        of_zeros = 127 if scale == "power-of-two" else 126 - FORMATS[element].max_exponent
        assert (code[~some] == of_zeros).all()
        finite = x.isfinite().all(1).cpu()
        assert (code[~finite] == 255).all() and got.data.float().cpu()[~finite].isnan().all()
        assert torch.equal(data[finite], want.values[finite])
        assert got.nonfinite.item() == (~x.isfinite()).sum()


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4-published"])
def test_one_read_gives_both_operands(name):
    for cast in set(RECIPES[name].y):
        x = operand_x()
        for view in (x, x.T):
            straight = cast_operand(view, cast, both=True)
            compare(straight, view, cast)
            compare(straight.T, view.T, cast)


@pytest.mark.parametrize("past", [0.0, 3.0])
def test_a_history_decides_unless_it_is_empty(past):
    amax, x = torch.tensor(past, device=DEVICE), operand_x()
    cast = RECIPES["fp8-delayed"].dx[0]
    got = cast_operand(x, cast, amax=amax)
    compare(got, x, cast, amax=amax)
    same(got.amax, quantise(x, cast).amax)
    x[7, 7] = torch.inf
    got = cast_operand(x, cast, amax=amax)
    assert got.scale.isnan() and got.amax.isinf() and got.nonfinite == 1


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_values_are_ml_dtypes_casts_of_exact_quotients(name):
    """Against NumPy: float64 quotients, rounded to float32 and by ml_dtypes to FP8."""
    x = operand_x(130, 96)
    got = cast_operand(x, Cast(format=name))
    top = x.double().abs().max().item()
    scale = np.float32(np.float32(top) / np.float32(FORMATS[name].largest))
    assert got.scale.item() == scale
    kind = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[name]
    steps = (x.cpu().numpy().astype(np.float64) / np.float64(scale)).astype(np.float32)
    assert np.array_equal(got.data.cpu().view(torch.uint8).numpy(),
                          steps.astype(kind).view(np.uint8))


@jit
def _divide(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    turn, m, y = divisor(tl.load(b + at))
    tl.store(out + at, quotient(tl.load(a + at) * turn, m, y))


def test_division_by_a_reciprocal_has_the_bits_of_a_division():
    """Random bits, and the divisors that are hard: mantissas all ones, one more than a power of
    two."""
    rng = torch.Generator().manual_seed(0)
    n = 2**18
    mantissa = torch.randint(2**23, (n,), generator=rng)
    mantissa[::5], mantissa[1::5], mantissa[2::5] = 2**23 - 1, 1, 0
    b = (mantissa | (torch.randint(60, 190, (n,), generator=rng) << 23)).int().view(
        torch.float32).to(DEVICE)
    a = torch.randn(n, generator=rng).to(DEVICE) * 400 * b
    a[::7] = -0.0
    # near or at whole quotients
    a[3::7] = (b * torch.randint(1, 449, (n,), generator=rng).to(DEVICE))[3::7]
    out = torch.empty_like(a)
    _divide[(1,)](a, b, out, n)
    same(out, a / b)


def test_what_no_kernel_does_is_refused():
    x = operand_x()
    for cast, both, words in ((Cast(format="e4m3fn", block=(1, 64)), False, r"blocks of \(1, 64\)"),
                              (Cast(format="e4m3fn", block=(1, 0)), True, "both ways"),
                              (Cast(format="e2m1"), False, "e2m1"),
                              (Cast(format="e4m3fn", block=MX_BLOCK), False, "float32")):
        assert why_not(cast, both=both)
        with pytest.raises(ConfigError, match=words):
            cast_operand(x, cast, both=both)
    blocks = RECIPES["fp8-blockwise"].y[0]
    with pytest.raises(ConfigError, match="pad to 128"):
        cast_operand(x[:, :100].T, blocks, both=True)
    for bad in (x[:0], x.half(), x[0]):
        with pytest.raises(ConfigError, match="a fused cast takes a matrix"):
            cast_operand(bad, blocks)


def test_a_strided_or_misaligned_operand_is_cast_right():
    wide = operand_x(64, 257).bfloat16()
    for x in (wide[:, 1:129], wide[:, :256:2], wide.view(-1)[1:64 * 128 + 1].view(64, 128)):
        compare(cast_operand(x, RECIPES["mxfp8"].y[0]), x.contiguous(), RECIPES["mxfp8"].y[0])


def test_the_operators_trace_and_have_fakes():
    """What torch.compile asks of an operator: shapes of its results without running it."""
    x = operand_x()
    for name in ("fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"):
        cast = LOW[name].y[0]
        real = cast_operand(x, cast)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = cast_operand(mode.from_tensor(x), cast)
        shapes = [[(t.shape, t.dtype) for t in vars(operand).values() if t is not None]
                  for operand in (fake, real)]
        assert shapes[0] == shapes[1], name
