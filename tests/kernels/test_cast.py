"""The cast kernels: the C kernel against its definition in PyTorch, both against the formats,
torchao, Transformer Engine's sources and float64.

Only these tests catch a wrong bit of a cast on a CPU (its rounding, scale, noise, transform or
layout), an operator that crashes on a tensor that it cannot read, and a C library that is loaded
although it is cut off, planted by another user or wrong.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lessons.number_formats import encode, round_to
from lpkit.errors import ConfigError
from lpkit.kernels import cast, compile_c
from lpkit.kernels.cast import Noise
from lpkit.precision.scaled import quantise
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.recipes import RECIPES
from tests.attack import patience
from tests.precision.test_formats import hard_cases

ELEMENTS = ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1", "int8", "int4"]
E2M1, E4M3 = FORMATS["e2m1"], FORMATS["e4m3fn"]
DTYPES = [torch.float32, torch.bfloat16]
NATIVE = pytest.mark.skipif(compile_c.load("cast") is None, reason=compile_c.choice("cast").why)


@pytest.fixture
def in_torch(monkeypatch):
    """Runs a call by the definition in PyTorch."""
    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(cast, "_library", lambda: None)
            return call()

    return run


def spread(rows=64, columns=512, seed=0):
    """Values over 30 binary orders, with zeros, -0 and a row that is tiny."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=generator)
         * torch.exp2(8 * torch.randn(rows, columns, generator=generator)))
    x[0, :64], x[3, :5], x[5] = 0, -0.0, x[5] * 2.0**-60
    return x


def compare(call, x, in_torch):
    same(call(x), in_torch(lambda: call(x)))


def same(got, want):
    """Raw bits; NaN as NaN."""
    if isinstance(got, tuple):
        for g, w in zip(got, want, strict=True):
            same(g, w)
    elif got is not None:
        assert got.shape == want.shape and got.dtype == want.dtype
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        bad = got.contiguous().view(bits) != want.contiguous().view(bits)
        bad &= ~(got.isnan() & want.isnan()) if got.is_floating_point() else True
        assert not bad.any(), (f"{int(bad.sum())} differ: {got[bad][:5].tolist()} for "
                                 f"{want[bad][:5].tolist()}")


# Every format once; e4m3fn in every way.
WAYS = [(noise, dtype) for dtype in (*DTYPES, torch.uint8)
        for noise in (None, Noise(seed=3, counter=2**32 - 1000))]


@NATIVE
@pytest.mark.parametrize("name, way", [
    *((name, i % len(WAYS)) for i, name in enumerate(ELEMENTS)),
    *(("e4m3fn", i) for i in range(1, len(WAYS)))])
def test_c_is_the_definition(name, way, in_torch):
    noise, dtype = WAYS[way]
    f, how = FORMATS[name], {"dtype": dtype, "noise": noise}

    def in_blocks(*block):
        return lambda x: cast.qdq(x, f, cast.amax(x, block).values / f.largest, block=block, **how)

    calls = [lambda x: cast.qdq(x, f, **how),
             lambda x: cast.qdq(x, f, 0.3, rescale=False, **how),
             lambda x: cast.qdq(x.T, f, 0.25, **how),
             *(in_blocks(*block) for block in ((1, 0), (32, 128), (1, 16), (16, 16))),
             lambda x: cast.qdq(x, f, cast.amax(x, (16, 1)).values / 4, block=(16, 1),
                                rescale=cast.amax(x, (16, 1)).values, **how),
             *(lambda x, rule=rule: cast.mx(x, f, rule=rule, **how) for rule in cast.SCALE_RULES),
             *(lambda x, block=block: cast.mx(x, f, block=block, **how)
               for block in ((32, 1), (4, 8), (16, 16), (2, 0)))]
    for call in calls:
        for x in (spread(32, 256), spread(32, 256).bfloat16(), spread(256, 32).T):
            compare(call, x, in_torch)


@NATIVE
@pytest.mark.parametrize("threads", [1, 2])
def test_ragged_sizes_and_threads(threads, in_torch):
    """Sizes around the tile, the vector and the grain; more threads than pieces."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for n in (1, 15, 17, 2047, 2049, 16385, 70_001):
            for call in (lambda x: cast.qdq(x, E4M3, 0.7),
                         lambda x: cast.qdq(x, E4M3, noise=Noise(seed=1)), cast.amax):
                compare(call, spread(8, n)[-1], in_torch)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ELEMENTS)
def test_qdq_is_the_formats_own_rounding(name):
    f, x = FORMATS[name], spread()
    x[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    # every bf16 pattern, every midpoint and the float32 values beside it
    hard = hard_cases(name)
    same(cast.qdq(hard, f), round_to(hard, f))
    same(cast.qdq(x, f, 0.5, rescale=False), round_to(x / 0.5, f))
    finite = x[2:]
    same(cast.qdq(finite, f, 0.5), round_to(finite / 0.5, f) * 0.5)
    same(cast.qdq(finite, f, dtype=torch.uint8), encode(round_to(finite, f), f))


MX_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e3m2": "fp6_e3m2",
             "e2m3": "fp6_e2m3", "e2m1": torch.float4_e2m1fn_x2}
RULES_AND_DTYPES = [*((rule, torch.float32) for rule in cast.SCALE_RULES),
                    ("rceil", torch.bfloat16)]


@pytest.mark.parametrize("name, rule, dtype", [
    *((name, *RULES_AND_DTYPES[i]) for i, name in enumerate(("e4m3fn", "e5m2", "e2m1"))),
    *((name, *way) for name in ("e3m2", "e2m3") for way in RULES_AND_DTYPES)])
def test_mx_is_torchaos(name, rule, dtype):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

    x = spread(128).to(dtype)
    scales, codes = to_mx(x, MX_DTYPES[name], 32, ScaleCalculationMode(rule))
    got = cast.mx(x, FORMATS[name], rule=rule)
    assert torch.equal(got.scales, scales.view(torch.uint8))
    same(got.values, to_dtype(codes, scales, MX_DTYPES[name], 32, dtype))
    if codes.dtype == MX_DTYPES[name]:
        same(cast.mx(x, FORMATS[name], rule=rule, dtype=torch.uint8).values,
             codes.view(torch.uint8))


def every_exponent(dtype=torch.float32):
    """Blocks of 32 whose largest magnitudes are of every exponent of float32, 0, subnormals,
    infinities and NaN among them."""
    mantissas = torch.tensor([0, 1, 2, 1 << 22, (1 << 22) + 1, (1 << 23) - 1, 0x600000, 0x600001])
    top = ((torch.arange(256)[:, None] << 23) | mantissas).flatten().int().view(torch.float32)
    x = torch.zeros(len(top), 32)
    x[:, 7], x[:, 3], x[:, 9] = -top, top / 3, top * 0.77
    return x.to(dtype)


@pytest.mark.parametrize("rule, dtype", RULES_AND_DTYPES)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1"])
def test_mx_of_every_exponent_is_torchaos(name, rule, dtype, in_torch):
    """Scales and values bit for bit, but for what `mx` says: an infinity is NaN here, and torchao
    0.18 gives it a finite scale; it multiplies by 2^126 and divides by 2^127 where the scale is
    2^-127; and its logarithm of rceil, in float32, is exact here."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

    x, f = every_exponent(dtype), FORMATS[name]
    finite, top = x.isfinite().all(1), x.abs().amax(1).double()
    got = cast.mx(x, f, rule=rule)
    compare(lambda x: cast.mx(x, f, rule=rule), x, in_torch)
    # a NaN's sign is the operation's
    compare(lambda x: cast.mx(x, f, rule=rule, dtype=torch.uint8), x[finite], in_torch)
    assert (got.scales[~finite] == 255).all() and got.values[~finite].isnan().all()
    assert got.nonfinite == (~finite).sum()
    scales, codes = to_mx(x, MX_DTYPES[name], 32, ScaleCalculationMode(rule))
    code = scales.view(torch.uint8)[finite, 0].double()
    if rule == "rceil":
        code = ((top[finite] / f.largest).log2().ceil() + 127).clamp(min=0)
        assert (code != scales.view(torch.uint8)[finite, 0]).double().mean() < 0.15
    assert torch.equal(got.scales[finite, 0].double(), code)
    same(cast.qdq(x[code.eq(0).nonzero()[:, 0]], f, 2.0**-127),
         got.values[code.eq(0).nonzero()[:, 0]])
    alike = finite & (got.scales[:, 0] > 0) & (got.scales == scales.view(torch.uint8))[:, 0]
    assert alike.sum() > 0.8 * len(x)
    same(got.values[alike], to_dtype(codes, scales, MX_DTYPES[name], 32, dtype)[alike])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_is_torchaos(dtype):
    """Scales to the bit; values to the last bit of float32, where torchao multiplies in another
    order."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = spread(128).to(dtype)
    scale = per_tensor_amax_to_scale(x.abs().amax())
    want = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
    got = quantise(x, RECIPES["nvfp4"].y[0])
    assert torch.equal(got.scale.to(torch.float8_e4m3fn).view(torch.uint8),
                       want.scale.view(torch.uint8))
    assert torch.equal(got.tensor, scale)
    torch.testing.assert_close(got.dequantise(), want.dequantize().float(),
                               rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype, rows", [(torch.float32, 1), (torch.bfloat16, 16)])
def test_nvfp4_as_published_is_transformer_engines(dtype, rows):
    """Scales to the bit, in the order of its NVFP4QuantizerRef
    (transformer_engine/pytorch/custom_recipes/reference_nvfp4.py at d0067d0): normal, subnormal and
    zero. Values too, but beside a midpoint: it multiplies by an inverse where we divide."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x = (x * torch.logspace(-4, 4, 256)).to(dtype)
    blocks = x.float().view(64 // rows, rows, 16, 16)
    encode = torch.div(torch.tensor(448.0) * 6, x.abs().max().float())
    scale = blocks.abs().amax((1, 3)) * (encode * torch.reciprocal(torch.tensor(6.0)))
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn)
    decode = torch.div(torch.tensor(1.0), encode)
    most = torch.tensor(torch.finfo(torch.float32).max)
    factor = torch.min(torch.div(torch.tensor(1.0), scale.float() * decode), most)
    steps = (blocks * factor[:, None, :, None]).clamp(-6, 6)
    four = torch.from_numpy(steps.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32))
    want = (four * scale.float()[:, None, :, None] * decode).view(64, 256)

    got = quantise(x, RECIPES["nvfp4-published"].y[rows > 1])
    assert torch.equal(got.scale.to(torch.float8_e4m3fn).view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(got.tensor, decode)
    assert (scale.float() == 0).any() and ((scale.float() > 0) & (scale.float() < 2.0**-6)).any()
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    clear = ((steps.abs().flatten()[:, None] / midpoints - 1).abs() > 1e-6).all(1).view(64, 256)
    assert clear.double().mean() > 0.99
    torch.testing.assert_close(got.dequantise()[clear], want[clear], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("dtype, operand", [(torch.float32, 0), (torch.bfloat16, 1)])
def test_blocks_of_128_by_powers_of_two_are_transformer_engines_and_mxfp8s(dtype, operand):
    """Bit for bit: scale_from_amax_tensor (tests/pytorch/references/quantize_scale_calc.py at
    d0067d0). And torchao reads the same numbers from the same bytes as MXFP8, each scale four times
    over, which is how Transformer Engine multiplies them on Blackwell."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    x = (x * torch.logspace(-9, 9, 512)).to(dtype)
    x[128:, :128] = 0
    cast = RECIPES["fp8-blockwise-pow2"].y[operand]
    blocks = x.float().view(256 // cast.block[0], cast.block[0], 4, 128)
    top = blocks.abs().amax((1, 3))
    factor = torch.ldexp(torch.ones_like(top),
                         torch.frexp(448.0 / top).exponent - 1).masked_fill(top == 0, 1.0)
    data = (blocks * factor[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)

    got = quantise(x, cast)
    got = replace(got, data=got.data.to(torch.float8_e4m3fn))
    assert torch.equal(got.scale, factor.reciprocal())
    assert torch.equal(got.data.view(torch.uint8), data.view(256, 512).view(torch.uint8))
    # the emulation, in one pass where it can
    same(quantise(x, cast, fold=True).dequantise(), got.dequantise())

    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    scales = got.scale.repeat_interleave(cast.block[0], 0).repeat_interleave(4, 1)
    scales = scales.to(torch.float8_e8m0fnu)
    same(to_dtype(got.data, scales, torch.float8_e4m3fn, 32, torch.float32), got.dequantise())


def test_what_is_not_finite_is_counted_and_seen(in_torch):
    x = torch.ones(4, 64)
    x[0, 3], x[2, 40], x[2, 41] = torch.nan, torch.inf, -torch.inf
    for run in (lambda call: call(), in_torch):
        top = run(lambda: cast.amax(x, (1, 32)))
        assert top.nonfinite == 3 and top.values[2, 1] == torch.inf
        assert top.values[0].isnan().tolist() == [True, False]
        assert run(lambda: cast.amax(x)).values.isnan()
        blocks = run(lambda: cast.mx(x, E2M1))
        assert blocks.nonfinite == 2 and blocks.scales[0, 0] == blocks.scales[2, 1] == 255
        assert blocks.values.isnan().sum() == 64
        assert blocks.values[0, :32].isnan().all() and blocks.values[2, 32:].isnan().all()
        assert run(lambda: cast.qdq(x, E4M3)).isnan().sum() == 1


def hadamard_matrix():
    """(16, 16) float64, by Sylvester's construction, with Transformer Engine's signs of rows."""
    h = torch.ones(1, 1).double()
    while len(h) < 16:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])
    return signs[:, None] * h / 4


def test_a_hadamard_transform_is_its_matrix_in_float64(in_torch):
    """Small integers exactly; and all else but for the rounding of four sums, each of at most the
    sum of magnitudes."""
    whole = torch.randint(-8, 9, (48, 160), generator=torch.Generator().manual_seed(0)).float()
    for x in (whole, whole.bfloat16(), whole.T, spread(48, 160), spread(160, 48).bfloat16().T):
        blocks, matrix = x.double().unflatten(-1, (-1, 16)), hadamard_matrix()
        off = (cast.hadamard(x) - (blocks @ matrix).flatten(-2)).abs()
        bound = (blocks.abs() @ matrix.abs()).flatten(-2) * 4 * 2.0**-24
        assert (off <= (0 if x.abs().max() <= 8 else bound)).all()
        assert torch.equal(cast.hadamard(x), in_torch(lambda: cast.hadamard(x)))     # noqa: B023
    assert torch.equal(matrix @ matrix.T, torch.eye(16).double())


def test_under_a_scale_of_zero_everything_is_zero(in_torch):
    scale = torch.tensor([[0.0, 1.0]])
    for run in (lambda call: call(), in_torch):
        values = run(lambda: cast.qdq(torch.arange(4.0)[None], E4M3, scale, block=(1, 2)))
        assert values.tolist() == [[0, 0, 2, 3]]


@pytest.mark.parametrize("f", [E4M3, FORMATS["int8"]], ids=lambda f: f.name)
def test_noise_is_unbiased(f):
    """The mean over n elements lies within 5 standard errors of the value, and within 2^-25 of the
    spacing beside it."""
    n = 200_000
    for i, value in enumerate((1.3, -2.6, 5.01, f.smallest * 0.2)):
        x = torch.full((n,), value)
        y = cast.qdq(x, f, noise=Noise(seed=7, counter=i * n)).double()
        low, high = y.min().item(), y.max().item()
        p = (x[0].item() - low) / (high - low) if high > low else 0.0
        error = abs(y.mean().item() - x[0].item())
        assert 0 <= p <= 1 and error <= (high - low) * (5 * (p * (1 - p) / n) ** 0.5 + 2.0**-25)


def test_noise_is_a_function_of_seed_and_element():
    x = spread(8, 512)
    whole = cast.qdq(x, E4M3, noise=Noise(seed=1))
    halves = [cast.qdq(x[:4], E4M3, noise=Noise(seed=1)),
              cast.qdq(x[4:], E4M3, noise=Noise(seed=1, counter=4 * 512))]
    same(torch.cat(halves), whole)
    for other in (Noise(seed=2), Noise(seed=1, counter=4096), Noise(seed=1, counter=2**32)):
        assert (cast.qdq(x, E4M3, noise=other) != whole).sum() > 500
    # Neighbouring draws do not move together: 1 / sqrt(n) is one standard deviation of the
    # correlation.
    ups = cast.qdq(torch.full((100_000,), 1.0625), E4M3, noise=Noise(seed=5)) > 1.0625
    ups = ups.double() - 0.5
    assert max(abs((ups[k:] * ups[:-k]).mean() * 4) for k in (1, 2, 16, 64)) < 5 / 100_000**0.5


def test_strides_and_out():
    x = spread()
    column_major = cast.qdq(x.T, E4M3, 0.5)
    assert column_major.stride() == x.T.stride()    # a dense view keeps its order
    same(column_major, cast.qdq(x.T.contiguous(), E4M3, 0.5))
    for wide in (x.bfloat16(), spread(33, 70)):
        same(cast.qdq(wide.T, E4M3, noise=Noise(seed=1)),
             cast.qdq(wide.T.contiguous(), E4M3, noise=Noise(seed=1)))
        tall = wide.repeat(16, 1).T
        same(cast.hadamard(tall), cast.hadamard(tall.contiguous()))
    for block in ((1, 32), (64, 1), (16, 16), (0, 4), (512, 64)):
        # the stream's upper half moves on in the middle of a column
        noise = Noise(seed=1, counter=2**32 - 999)
        turned, copied = (cast.mx(t, E4M3, block=block, noise=noise)
                          for t in (x.T, x.T.contiguous()))
        same(turned, copied)
        tops = [cast.amax(t, block).values for t in (x.T, x.T.contiguous())]
        same(*tops)
        assert turned.values.stride() == x.T.stride()
        scale = tops[0] + 1
        how = {"block": block, "rescale": scale.sqrt(), "noise": noise}
        same(cast.qdq(x.T, E4M3, scale, **how), cast.qdq(x.T.contiguous(), E4M3, scale, **how))
    same(cast.qdq(x[:, ::2], E4M3), cast.qdq(x[:, ::2].contiguous(), E4M3))
    deep = x.view(4, 16, 512)
    same(cast.mx(deep, E4M3).values.view(64, 512), cast.mx(x, E4M3).values)
    assert cast.mx(deep, E4M3).scales.shape == (4, 16, 16)
    assert not cast.qdq(x.requires_grad_(), E4M3).requires_grad


@pytest.mark.parametrize(("call", "message"), [
    (lambda x: cast.mx(x[:, :500], E4M3),
     "blocks of 32 do not tile the last axis of 500; pad to 512"),
    (lambda x: cast.amax(x[:3], (2, 0)), "blocks of 2 do not tile the rows of 3; pad to 4"),
    (lambda x: cast.mx(x, E4M3, rule="flor"), "no rule of the scale 'flor'; did you mean 'floor'"),
    (lambda x: cast.qdq(x, FORMATS["e8m0"]), "e8m0 is no format to cast to here"),
    (lambda x: cast.qdq(x.double(), E4M3), "takes float32 or bfloat16, got torch.float64"),
    (lambda x: cast.qdq(x, E4M3, dtype=torch.float16), "not torch.float16"),
    (lambda x: cast.qdq(x, E4M3, torch.ones(3), block=(1, 0)), "64 x 1 blocks need as many scales"),
    (lambda x: cast.qdq(x[:0], E4M3), "has nothing to cast"),
    (lambda x: cast.mx(x.view(4, -1), E4M3, block=(1, 4096)),
     "a block of 4096 is larger than 2048"),
])
def test_bad_input_says_what_to_do(call, message):
    with pytest.raises(ConfigError, match=message):
        call(spread())


# ---- operators -----------------------------------------------------------------------------------

UNUSUAL = """
import json, subprocess, sys, warnings
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
run, subprocess.run = subprocess.run, None      # importing compiles nothing
from lpkit.kernels import cast
from lpkit.techniques.formats import FORMATS
subprocess.run = run

class Wrapper(torch.Tensor):
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented

class Named(torch.Tensor):
    pass

warnings.simplefilter("ignore")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
f, x = FORMATS["e4m3fn"], torch.randn(64, 64)
freed = x.clone()
freed.untyped_storage().resize_(0)
half = torch.view_as_complex(x.view(64, 32, 2)).conj()
tensors = {
    "DTensor": DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(0)]),
    "wrapper": Wrapper((64, 64)), "fake": FakeTensorMode().from_tensor(x),
    "functional": torch._to_functional_tensor(x), "meta": x.to("meta"), "negative": half.imag,
    "conjugate": half, "named": x.as_subclass(Named), "expanded": x[:1].expand(64, 64),
    "overlapping": torch.randn(200).as_strided((64, 64), (1, 1)), "empty": x[:0], "int": x.int(),
    "freed": freed, "sparse": x.to_sparse(), "mkldnn": x.to_mkldnn(),
    "nested": torch.nested.nested_tensor([x, x]),
    "jagged": torch.nested.nested_tensor([x, x[:32]], layout=torch.jagged), "list": [1.0],
    "codes": x.to(torch.uint8),
}
one, ops, last = torch.ones(1, 1), torch.ops.lpkit, (f.name, None, False, torch.float32)
calls = {
    "amax": lambda t: cast.amax(t).values, "qdq": lambda t: cast.qdq(t, f, 0.5),
    "mx": lambda t: cast.mx(t, f).values, "scale": lambda t: cast.qdq(x, f, t, block=(1, 1)),
    "lpkit::amax": lambda t: ops.amax(t, 1, 1), "lpkit::qdq": lambda t: ops.qdq(t, one, one, *last),
    "lpkit::qdq scale": lambda t: ops.qdq(x, t, None, *last),
    "lpkit::mx": lambda t: ops.mx(t, 64, 2, 0, 8, *last),
    "lpkit::hadamard": lambda t: ops.hadamard(t, False), "block": lambda t: ops.amax(x, -1, 5),
    "long": lambda t: ops.mx(x.view(1, -1), 1, 1, 0, 8, *last)}
found = {}
for name, t in tensors.items():
    for how, call in calls.items():
        try:
            call(t)
            found[f"{name}, {how}"] = ["works", ""]
        except Exception as error:
            found[f"{name}, {how}"] = [type(error).__name__, str(error)]
x = tensors["negative"]
found["values"] = [torch.equal(cast.qdq(x, f), cast.qdq(x.clone(), f)), ""]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def unusual():
    """What becomes of tensors that a kernel cannot read as they are, in a process that may
    crash."""
    done = subprocess.run([sys.executable, "-c", UNUSUAL], capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-500:]}"
    return json.loads(done.stdout)


@NATIVE
def test_no_tensor_crashes_the_process(unusual):
    assert unusual.pop("values")[0]
    for case, (outcome, message) in unusual.items():
        name, how = case.split(", ")
        if how in ("amax", "qdq", "mx"):
            works = name in ("fake", "functional", "meta", "negative", "named", "expanded",
                             "overlapping")
            assert outcome == "works" if works else outcome in ("ConfigError", "TypeError"), (
                case, outcome, message)
        elif how in ("block", "long"):
            assert outcome == "TypeError", (case, outcome, message)


@NATIVE
def test_what_cannot_be_cast_is_refused_in_a_sentence(unusual):
    for case, message in {
            "DTensor, qdq": "a DTensor wraps other tensors; cast those, for example x.to_local()",
            "wrapper, mx": "a Wrapper wraps other tensors",
            "DTensor, scale": "a DTensor wraps other",
            "int, mx": "got torch.int32; call .float()",
            "sparse, amax": "takes a dense tensor, got torch.sparse_coo",
            "nested, qdq": "nested: True",
            "freed, qdq": "needs 4096 elements that lie together in memory, got torch.float32, .* "
                          "storage of 0 bytes",
            "list, qdq": "got a list; make one",
            "codes, lpkit::mx": "needs 4096 elements .* got torch.uint8",
            "int, lpkit::qdq scale": "got torch.int32",
            "expanded, lpkit::mx": "with strides \\(0, 1\\)",
            "DTensor, lpkit::qdq": "sharding strategy"}.items():
        assert re.search(message, unusual[case][1]), (case, unusual[case])


def test_compiles_as_one_operation_of_a_graph():
    x, graphs = spread(), []

    def look(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def call(x):
        return cast.qdq(x, E4M3, 0.5), cast.mx(x, E2M1, noise=Noise(seed=3)), cast.amax(x, (1, 0))

    same(torch.compile(call, backend=look, fullgraph=True)(x), call(x))
    (graph,) = graphs
    operations = [str(node.target) for node in graph.graph.nodes if "lpkit" in str(node.target)]
    assert operations == ["lpkit.qdq.default", "lpkit.mx.default", "lpkit.amax.default"]


def test_fakes_have_the_shapes_and_strides_of_what_they_stand_for():
    x = spread(64, 64)
    for op, arguments in {
            torch.ops.lpkit.amax.default: (x, 1, 32),
            torch.ops.lpkit.qdq.default: (x, torch.ones(1, 1), None, "e4m3fn", None, False,
                                          torch.bfloat16),
            torch.ops.lpkit.mx.default: (x, 64, 2, 0, 8, "e4m3fn", torch.arange(3), True,
                                         torch.uint8),
            torch.ops.lpkit.hadamard.default: (x, True)}.items():
        torch.library.opcheck(op, arguments, test_utils=(
            "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_casts_count_no_flops():
    with FlopCounterMode(display=False) as counter:
        cast.mx(cast.qdq(spread(), E4M3), E4M3)
    assert counter.get_total_flops() == 0


# ---- compiling -----------------------------------------------------------------------------------

SOURCE = Path(cast.__file__).with_name("cast.c")


def test_no_compiler_is_a_choice_and_not_an_error(tmp_path):
    library, choice = compile_c.open_library(SOURCE, tmp_path, compilers=("no-such-compiler",))
    assert library is None and choice.used == "torch" and "no C compiler" in choice.why
    broken = tmp_path / "broken.c"
    broken.write_text("this is not C")
    library, choice = compile_c.open_library(broken, tmp_path / "cache")
    assert library is None and choice.used == "torch" and "broken.c" in choice.why
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert compile_c.open_library(SOURCE, occupied)[1].used == "torch"


@NATIVE
def test_compiled_once_and_whole(tmp_path):
    """Two processes at once: each gets a library that works, one file is left, and the next opens
    it as it is."""
    code = ("import sys; from pathlib import Path; from lpkit.kernels import compile_c; "
            "library, choice = compile_c.open_library(Path(sys.argv[1]), Path(sys.argv[2])); "
            "library.lp_qdq; print(choice.used)")
    command = [sys.executable, "-c", code, str(SOURCE), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0] for p in both] == ["native\n"] * 2
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    assert compile_c.open_library(SOURCE, tmp_path)[1] == compile_c.choice("cast")
    assert path.stat().st_mtime_ns == before
    source = tmp_path / "cast.c"
    source.write_text(SOURCE.read_text() + "\n/* changed */\n")
    compile_c.open_library(source, tmp_path / "other")
    assert next((tmp_path / "other").iterdir()).name != path.name


HARMLESS = "int lp_check(void) { return 0; }\n"


@pytest.fixture
def kernel(tmp_path):
    """open(): a small kernel, in a cache of its own."""
    source, cache = tmp_path / "small.c", tmp_path / "cache"
    source.write_text(HARMLESS)
    return lambda **how: compile_c.open_library(source, cache, **how), source, cache


@NATIVE
@pytest.mark.parametrize("share", [0, 0.99])
def test_a_truncated_library_is_compiled_again(share, kernel):
    """Loaded as it is, it would end this process by a signal."""
    opened, _, cache = kernel
    opened()
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.unlink()       # this process has it mapped, and would die at its end
    path.write_bytes(whole[:int(share * len(whole))])
    library, choice = opened()
    assert library.lp_check() == 0 and choice.used == "native"
    assert path.read_bytes() == whole and list(cache.iterdir()) == [path]


@NATIVE
@pytest.mark.parametrize("plant, reason", [
    (lambda path: path.chmod(0o666), "may be written by others"),
    (lambda path: path.parent.chmod(0o770), "may be written by others"),
    (lambda path: os.chown(path, 12345, -1), "belongs to user 12345"),
    (lambda path: (path.rename(path.parent.parent / "far"),
                   path.symlink_to(path.parent.parent / "far")), "is a link"),
    (lambda path: path.hardlink_to(path.rename(path.parent.parent / "far")), "has other names"),
    (lambda path: (path.unlink(), os.mkfifo(path)), "is a pipe"),
], ids=["file for all", "folder for a group", "another's file", "link", "hard link", "pipe"])
def test_a_library_that_another_could_have_planted_is_refused(plant, reason, kernel, monkeypatch):
    opened, _, cache = kernel
    opened()
    (path,) = cache.iterdir()
    try:
        plant(path)
    except PermissionError:
        pytest.skip("only root gives files away")
    monkeypatch.setattr(compile_c, "_loaded", lambda *_: pytest.fail("it was loaded"))
    library, choice = opened()
    assert library is None and choice.used == "torch"
    assert reason in choice.why and "remove it" in choice.why


@NATIVE
@pytest.mark.parametrize("body, reason", [
    ("__builtin_trap(); return 0;", "Illegal instruction"),
    ("*(volatile int *)8 = 1; return 0;", "Segmentation fault"),
    ("return 3;", "fails its check: exit code 3"), ("for (;;);", "did not end in 0.5 seconds")])
def test_a_library_that_fails_its_check_is_never_loaded(body, reason, kernel, monkeypatch):
    monkeypatch.setattr(compile_c, "SECONDS_TO_ANSWER", 0.5)
    opened, source, cache = kernel
    source.write_text(f"int lp_check(void) {{ {body} }}\n")
    library, choice = opened()
    assert library is None and choice.used == "torch"
    assert reason in choice.why and list(cache.iterdir()) == []


@NATIVE
def test_a_wrong_result_of_any_function_fails_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_c, "ATTEMPTS", {"quickly": ("-O0",)})
    text = SOURCE.read_text()
    for right, wrong in (("out[0] = float_of(top);", "out[0] = float_of(top + 1);"),
                         ("(size + magic) - magic;", "(size + magic) - magic + 1;"),
                         ("scales[at + k] = (uint8_t)(is_nan ? 255 : code);",
                          "scales[at + k] = 7;"),
                         ("const float value = row[block];", "const float value = row[0];"),
                         ("float sum = a[i] + b[i];", "float sum = a[i];")):
        assert text.count(right) == 1
        (tmp_path / "cast.c").write_text(text.replace(right, wrong))
        _, choice = compile_c.open_library(tmp_path / "cast.c", tmp_path / "cache")
        assert choice.used == "torch" and "its library fails its check: exit code" in choice.why


ANSWERS = 'case "$*" in *--version*) echo "odd 1.0"; exit;; esac\n'


@pytest.mark.parametrize("script, reason", [
    (ANSWERS + "exit 3", "exit code 3"),
    (ANSWERS + "printf 'caf\\351 \\033[31m' >&2; exit 1", "caf\ufffd \\x1b[31m"),
    (ANSWERS + "head -c 40000000 /dev/zero >&2; exit 1", "printed more than 16,777,216 bytes"),
    (ANSWERS + "sleep 60 & sleep 60", "did not end in 0.5 seconds"),
    (ANSWERS + 'for last; do :; done; mkdir "$last"; exit 0', "wrote no library"),
    ("sleep 60", "did not end"), ("head -c 300 /dev/urandom", "wrote no library"),
], ids=["silent", "not UTF-8", "much", "hangs", "folder", "hangs when asked", "noise"])
def test_odd_compilers_are_survived(script, reason, kernel, tmp_path, monkeypatch):
    if "sleep" in script:       # the others end by themselves, on a busy machine late
        monkeypatch.setattr(compile_c, "SECONDS", 0.5)
        monkeypatch.setattr(compile_c, "SECONDS_TO_ANSWER", 0.5)
    compiler = tmp_path / "odd-cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    opened, _, cache = kernel
    began = time.monotonic()
    library, choice = opened(compilers=(str(compiler),))
    assert time.monotonic() - began < 50 * patience()
    assert library is None and choice.used == "torch" and "odd-cc" in choice.why
    assert len(choice.why) < 500 and choice.why.isprintable()
    assert reason in choice.why and list(cache.glob("*")) == []
