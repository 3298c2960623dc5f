"""Number formats: every code, every rounding and every block, beside gfloat."""

import numpy as np
import pytest
import torch

from lessons import number_formats
from lpkit.kernels import cast
from lpkit.techniques.formats import FORMATS, format_of

gfloat = pytest.importorskip("gfloat")
formats = pytest.importorskip("gfloat.formats")


# theirs by ours; int4 and tf32 have no row of theirs
THEIRS = {"fp32": "binary32", "bf16": "bfloat16", "fp16": "binary16", "e5m2": "ocp_e5m2",
          "e4m3fn": "ocp_e4m3", "e3m2": "ocp_e3m2",
          "e2m3": "ocp_e2m3", "e2m1": "ocp_e2m1", "e8m0": "ocp_e8m0", "int8": "ocp_int8"}
SMALL = [name for name in THEIRS if format_of(name).bits <= 8 and name != "int8"]
GRIDS = [name for name in SMALL if name != "e8m0"]
# ocp_int8 of the MX specification has a scale of 1/64: ours counts
SCALE = {"int8": 64}


def theirs(name):
    return getattr(formats, f"format_info_{THEIRS[name]}")


def codes(name):
    bits = format_of(name).bits
    if bits <= 16:
        return np.arange(2**bits, dtype=np.int64)
    return np.random.default_rng(0).integers(0, 2**bits, 40_000, dtype=np.int64)


@pytest.mark.parametrize("name", THEIRS)
def test_every_code_decodes_to_the_same_number(name):
    each = codes(name)
    due = gfloat.decode_ndarray(theirs(name), each) * SCALE.get(name, 1)
    found = number_formats.decode(torch.from_numpy(each), format_of(name)).double().numpy()
    np.testing.assert_array_equal(found, due)
    assert name == "int8" or (np.signbit(found) == np.signbit(due))[
        ~np.isnan(due)].all(), "minus zero"


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "int8"])
def test_every_number_encodes_to_its_code(name):
    each = codes(name)
    values = gfloat.decode_ndarray(theirs(name), each)
    known = ~np.isnan(values)
    found = number_formats.encode(torch.from_numpy(values[known]).double(), format_of(name)).numpy()
    np.testing.assert_array_equal(found.astype(np.int64) & (2**format_of(name).bits - 1),
                                  each[known])


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "int8"])
def test_the_table_of_the_format_is_theirs(name):
    ours, info = format_of(name), theirs(name)
    assert (ours.bits, ours.largest, ours.has_infinities, ours.max_exponent) == (info.bits,
        info.max, info.num_infs > 0, info.emax)
    assert (ours.smallest_normal == info.smallest_normal
            and ours.lowest == (info.min if ours.signed else ours.smallest))
    if info.has_subnormals:
        assert ours.smallest == info.smallest_subnormal
    assert (ours.first_nan is None) == (info.num_nans == 0)


@pytest.mark.parametrize("scale, dtype", [(1.0, torch.bfloat16), (2.0**-9, torch.float32)], ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_rounding_to_nearest_even_with_saturation_is_theirs(name, dtype, scale):
    """Of all codes, their midpoints, and normal numbers over the whole range and beyond."""
    grid = gfloat.decode_ndarray(theirs(name), codes(name))
    grid = np.unique(grid[np.isfinite(grid)])
    beyond = np.array([1.01, 1.2, 4.0]) * format_of(name).largest
    draws = np.random.default_rng(1).standard_normal(4000) * format_of(name).largest / 3
    x = torch.from_numpy(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, beyond, -beyond, draws,
        draws / 1000]) * scale).to(dtype)
    due = gfloat.round_ndarray(theirs(name), x.double().numpy() / scale,
                               gfloat.RoundMode.TiesToEven, sat=True) * scale
    found = cast.qdq(x[None], format_of(name), scale, dtype=torch.float32)[0].double().numpy()
    np.testing.assert_array_equal(found, due)


@pytest.mark.parametrize("mode, rounding",
                         [("TiesToEven", "nearest-even"), ("TowardZero", "toward-zero")])
@pytest.mark.parametrize("name", GRIDS)
def test_other_roundings_are_theirs(name, mode, rounding):
    x = torch.from_numpy(np.random.default_rng(2).standard_normal(3000) * format_of(name).largest
                         / 3).float()
    due = gfloat.round_ndarray(theirs(name), x.double().numpy(), getattr(gfloat.RoundMode, mode),
                               sat=True)
    found = number_formats.round_to(x, format_of(name), rounding=rounding).double().numpy()
    np.testing.assert_array_equal(found, due)


BLOCKS = {"e5m2": "mxfp8_e5m2", "e4m3fn": "mxfp8_e4m3", "e3m2": "mxfp6_e3m2", "e2m3": "mxfp6_e2m3",
          "e2m1": "mxfp4_e2m1"}


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_theirs(name, seed):
    info = getattr(formats, f"format_info_{BLOCKS[name]}")
    x = (np.linspace(-37.0, 42.0, 32) if seed == 0
         else np.random.default_rng(seed).standard_normal(32) * 10.0**(4 * seed - 8))
    x = x.astype(np.float32).astype(np.float64)
    due = gfloat.quantize_block(info, x, gfloat.compute_scale_amax, gfloat.RoundMode.TiesToEven)
    found = cast.mx(torch.from_numpy(x).float()[None], format_of(name), rule="floor",
                    dtype=torch.float32).values[0].double().numpy()
    np.testing.assert_array_equal(found, due)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in THEIRS])
def test_formats_of_ml_dtypes_that_gfloat_has_not(name):
    """Every code of the fnuz formats and of int4; of tf32, that it is float32 with 13 bits
    fewer."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if name == "tf32":
        x = torch.randn(4000, generator=torch.Generator().manual_seed(0))
        due = ((x.view(torch.int32) + 0xFFF + (x.view(torch.int32) >> 13 & 1)) & ~0x1FFF).view(
            torch.float32)
        assert torch.equal(number_formats.round_to(x, format_of(name)), due)
        return
    kinds = {"e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "e4m3fnuz": ml_dtypes.float8_e4m3fnuz}
    each = codes(name).astype(np.uint8)
    due = (each.view(kinds[name]).astype(np.float64) if name in kinds
           else np.where(each < 8, each, each.astype(np.int64) - 16).astype(np.float64))
    found = number_formats.decode(torch.from_numpy(each.astype(np.int64)),
                                  format_of(name)).double().numpy()
    np.testing.assert_array_equal(found, due)
