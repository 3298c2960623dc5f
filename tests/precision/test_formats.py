"""Number formats against ml_dtypes, gfloat, torch's casts and IEEE's own arithmetic, bit for bit.

NaN is compared as NaN with its sign: payloads are nobody's promise.

Only these tests catch: a value that is rounded to another neighbour, on any pattern, tie or limit,
a code that is another number, a wrong row of the table or of its page, biased noise, and pictures
and tables of a lesson that show another number.
"""

import json
from pathlib import Path

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from lessons import l03_number_formats as linear_operands
from lessons.l03_number_formats import (
    Bits,
    exponents_figure,
    landing_figure,
    landings,
    listed,
    ranges_figure,
    value_figure,
)
from lessons.number_formats import ROUNDINGS, decode, encode, round_to, values
from lpkit.errors import ConfigError
from lpkit.techniques.formats import FORMATS, format_of

ML_DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "e5m2": ml_dtypes.float8_e5m2,
             "e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
             "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
             "e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn,
             "e2m1": ml_dtypes.float4_e2m1fn, "e8m0": ml_dtypes.float8_e8m0fnu}
GFLOAT = {"fp32": "binary32", "bf16": "bfloat16", "fp16": "binary16", "e5m2": "ocp_e5m2",
          "e4m3fn": "ocp_e4m3",
          "e3m2": "ocp_e3m2", "e2m3": "ocp_e2m3", "e2m1": "ocp_e2m1", "e8m0": "ocp_e8m0",
          # bits of precision: IEEE P3109's finite formats of 8 bits are these
          "e5m2fnuz": 3, "e4m3fnuz": 4}
FLOATS = [name for name in ML_DTYPES if name != "e8m0"]
BF16 = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float()     # every pattern
SMALL = [name for name, f in FORMATS.items() if f.bits <= 8]


def info(name):
    if name.endswith("fnuz"):
        return gfloat.formats.format_info_p3109(8, GFLOAT[name], domain=gfloat.Domain.Finite)
    return getattr(gfloat.formats, f"format_info_{GFLOAT[name]}")


def same(got, want, nan_sign=True):
    """Raw bits, NaN by sign (torch's vectorised casts to bf16 drop it)."""
    got, want = got.float(), want.float()
    nan = got.isnan() & want.isnan() & ((got.signbit() == want.signbit()) | (not nan_sign))
    bad = (got.view(torch.int32) != want.view(torch.int32)) & ~nan
    assert not bad.any(), (f"{int(bad.sum())} differ: {got[bad][:5].tolist()} for "
                             f"{want[bad][:5].tolist()}")


def hard_cases(name):
    """Every bf16 pattern; every midpoint between neighbours, on both sides of zero and past the
    largest value, and the two float32 values next to it; what every float format finds special."""
    f = FORMATS[name]
    grid = decode(torch.arange(f.first_nan or 1 << (f.bits - f.signed)), f).double()
    grid = grid[grid.isfinite()]
    middle = torch.cat([(grid[1:] + grid[:-1]) / 2,
                        2 * grid[-1:] - (grid[-1:] + grid[-2:-1]) / 2]).float()
    up, down = (torch.from_numpy(np.nextafter(middle.numpy(), np.float32(to)))
                for to in (np.inf, -np.inf))
    special = torch.tensor([0.0, 1e-45, 2.0**-149, 2.0**-126, 3.4e38, torch.inf, torch.nan])
    x = torch.cat([middle, up, down, grid.float(), special])
    return torch.cat([BF16, x, -x])


def cast_by_ml_dtypes(x, name):
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.numpy().astype(ML_DTYPES[name]).astype(np.float32))


@pytest.mark.parametrize("name", FLOATS)
def test_nearest_even_is_ml_dtypes(name):
    x = hard_cases(name)
    # ml_dtypes makes -0 of a NaN where there is none
    keep = ~x.isnan() | (FORMATS[name].nan is not None)
    same(round_to(x[keep], FORMATS[name], overflow="nonsaturating"),
         cast_by_ml_dtypes(x[keep], name),
         nan_sign=FORMATS[name].has_negative_zero)


@pytest.mark.parametrize("name", [name for name in FLOATS if FORMATS[name].torch_dtype])
def test_nearest_even_is_torchs_cast(name):
    x, dtype = hard_cases(name), getattr(torch, FORMATS[name].torch_dtype)
    # Up to 2.11 torch made NaN of what is too large for E4M3; since 2.12 it saturates, infinities
    # included.
    saturates = torch.tensor(torch.inf).to(dtype).float().isfinite()
    same(round_to(x, FORMATS[name], overflow="saturate" if saturates else "nonsaturating"),
         x.to(dtype).float(), nan_sign=False)


@pytest.mark.parametrize(("rounding", "mode"), [("nearest-even", gfloat.RoundMode.TiesToEven),
                                                ("toward-zero", gfloat.RoundMode.TowardZero)])
@pytest.mark.parametrize("overflow", ["saturate", "nonsaturating"])
@pytest.mark.parametrize("name", FLOATS)
def test_both_roundings_and_overflows_are_gfloats(name, rounding, mode, overflow):
    f, x = FORMATS[name], hard_cases(name)
    if f.nan is None:           # gfloat refuses what such a format has no code for
        x = x[~x.isnan() & (x.abs() <= f.largest)] if overflow == "nonsaturating" else x[~x.isnan()]
    want = gfloat.round_ndarray(info(name), x.double().numpy(), mode, overflow == "saturate")
    same(round_to(x, f, rounding=rounding, overflow=overflow), torch.from_numpy(want),
         nan_sign=f.has_negative_zero)


def test_e8m0_is_ml_dtypes_and_torch_on_powers_and_between():
    f, x = FORMATS["e8m0"], hard_cases("e8m0")
    # Both peers send everything between 2^-127 and 1.5 * 2^-127 up; the nearest is 2^-127.
    near = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
    assert (round_to(x[near], f) == 2.0**-127).all() and near.sum() > 10
    x = x[~near]
    positive = x[(x > 0) | x.isnan()].abs()
    same(round_to(positive, f, overflow="nonsaturating"), positive.to(torch.float8_e8m0fnu).float(),
         nan_sign=False)
    x = x.abs() * torch.where(x < 0, -1, 1)     # without -0 and signed NaN
    same(round_to(x, f, overflow="nonsaturating"), cast_by_ml_dtypes(x, "e8m0"), nan_sign=False)


def test_tf32_keeps_ten_bits():
    x = BF16[BF16.isfinite()] * torch.linspace(1, 2, 7)[:, None]
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    even = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    same(round_to(x, FORMATS["tf32"], overflow="nonsaturating"),
         even.to(torch.uint32).view(torch.float32))
    same(round_to(x, FORMATS["fp32"]), x.clamp(-FORMATS["fp32"].largest, FORMATS["fp32"].largest))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_are_torchs_round_and_clamp(name):
    f = FORMATS[name]
    x = torch.cat([torch.arange(-300, 300) / 2, BF16[~BF16.isnan()]])
    want = x.round().clamp(-2.0**(f.bits - 1), 2.0**(f.bits - 1) - 1) + 0.0
    same(round_to(x, f), want)
    codes = encode(want, f)
    assert torch.equal(codes.long(), want.long() & ((1 << f.bits) - 1))


@pytest.mark.parametrize("name", GFLOAT)
def test_the_table_is_gfloats(name):
    f, want = FORMATS[name], info(name)
    assert (f.largest == want.max and f.bits == want.k and f.bias == want.bias
            and f.signed == want.is_signed)
    assert f.exponent_bits == want.expBits and f.mantissa_bits == want.precision - 1
    assert f.has_infinities == (want.num_infs > 0) and (f.nan is not None) == (want.num_nans > 0)
    if f.mantissa_bits:
        assert f.smallest_normal == want.smallest_normal and f.smallest == want.smallest_subnormal
    else:
        assert f.smallest == want.smallest


@pytest.mark.parametrize("f", [f for f in FORMATS.values() if f.torch_dtype and f.exponent_bits
                               and f.signed],
                         ids=lambda f: f.name)
def test_the_table_is_torchs(f):
    want = torch.finfo(getattr(torch, f.torch_dtype))
    assert (f.largest, f.smallest_normal, f.lowest) == (want.max, want.smallest_normal, want.min)
    # torch has that of E4M3FNUZ
    assert want.eps == 2.0**-f.mantissa_bits or f.name == "e5m2fnuz"


@pytest.mark.parametrize("name", [name for name in SMALL if name in ML_DTYPES])
def test_every_value_of_a_small_format(name):
    f = FORMATS[name]
    codes = np.arange(2**f.bits, dtype=np.uint8)
    same(values(f), torch.from_numpy(codes.view(ML_DTYPES[name]).astype(np.float32)))
    known = values(f)[~values(f).isnan()]
    assert torch.equal(encode(known, f), torch.from_numpy(codes)[~values(f).isnan()])
    assert f.max_exponent == np.floor(np.log2(f.largest))


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "fp16", "bf16"])
def test_bit_patterns_are_torchs(name):
    f, x = FORMATS[name], hard_cases(name)
    x = x[(x.abs() <= f.largest) | x.isnan()]
    got = x.to(getattr(torch, f.torch_dtype)).view(torch.uint8 if f.bits == 8
        else torch.uint16).long()
    nan = x.isnan()
    assert torch.equal(encode(round_to(x, f), f).long()[~nan], got[~nan])
    same(decode(got, f), x.to(getattr(torch, f.torch_dtype)).float(), nan_sign=False)


@pytest.mark.parametrize("name", ["e4m3fn", "e2m1", "bf16", "int8"])
def test_stochastic_rounding_is_unbiased(name):
    """The mean of n draws between neighbours d apart lies within 5 standard errors, d * sqrt(p (1 -
    p) / n), of the value:
    a fair coin fails once in 1.7 million tries, and this seed is one try."""
    f, n = FORMATS[name], 200_000
    generator = torch.Generator().manual_seed(0)
    for value in (1.0 + 2.0**-10, 1.3, -1.7, 5.1, 0.0009, -3.999, f.smallest / 3):
        x = torch.full((n,), value)
        y = round_to(x, f, rounding="stochastic", generator=generator).double()
        low, high = round_to(x[:1], f, rounding="toward-zero").item(), y[y.abs().argmax()].item()
        assert set(y.unique().tolist()) <= {low, high}
        p = (x[0].item() - low) / (high - low) if high != low else 0.0
        assert (abs(y.mean().item() - x[0].item()) <= abs(high - low)
                * (5 * (p * (1 - p) / n) ** 0.5 + 2.0**-50) + 1e-9)


def test_stochastic_rounding_leaves_the_grid_alone_and_repeats():
    f, x = FORMATS["e4m3fn"], values(FORMATS["e4m3fn"])
    same(round_to(x, f, rounding="stochastic"), x)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    first, again = (round_to(x, f, rounding="stochastic",
                             generator=torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(first, again) and not torch.equal(first, round_to(x, f))


def test_bad_input_says_what_to_do():
    x = torch.tensor([1.0, 1.06, torch.nan])
    with pytest.raises(ConfigError, match="did you mean 'e4m3fn'"):
        format_of("e4m3")
    with pytest.raises(ConfigError, match="no rounding 'nearest'; did you mean 'nearest-even'"):
        round_to(x, FORMATS["e2m1"], rounding="nearest")
    with pytest.raises(ConfigError, match=r"torch.int64; call .float\(\)"):
        round_to(torch.tensor([1]), FORMATS["e2m1"])
    with pytest.raises(ConfigError, match=r"2 of 3 numbers are not values of e2m1, for .* 1\.06"):
        encode(x, FORMATS["e2m1"])
    with pytest.raises(ConfigError, match=r"fp16 has 2\^16 values"):
        values(FORMATS["fp16"])
    assert list(ROUNDINGS) == ["nearest-even", "toward-zero", "stochastic"]


# ---- what a format makes of a tensor, and how it is drawn

@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1", "int8", "int4"])
def test_expected_noise_is_that_of_a_gaussian(name):
    """A million normal numbers, cut off at 4.5 standard deviations so that the crest factor is what
    it is said to be."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).clamp(-4.5, 4.5)
    expected = linear_operands.expected_db(FORMATS[name], crest=linear_operands.crest(x))
    assert linear_operands.measured_db(x, FORMATS[name]) == pytest.approx(expected, abs=0.25)
    assert linear_operands.crest(x) == pytest.approx(4.5, rel=0.01)


def test_expected_zeros_are_those_of_a_gaussian():
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    for name in ("e4m3fn", "e5m2", "fp16"):
        share = linear_operands.zero_share(x, FORMATS[name])
        assert share == pytest.approx(linear_operands.expected_zero_share(FORMATS[name],
            sigma=1e-3), abs=0.002)
        assert (share == ((round_to(x, FORMATS[name]) == 0) & (x != 0)).sum().item()
                / (x != 0).sum().item())


def test_exponents_are_counted_as_math_does():
    x = [0.0, 1.0, -1.5, 2.0, 3.9, 0.25, 1e-30, 1e30]
    assert linear_operands.exponent_shares([torch.tensor(x)]) == {0: 2 / 7, 1: 2 / 7, -2: 1 / 7,
        -60: 1 / 7, 20: 1 / 7}


def test_every_code_of_every_listed_format_is_drawn():
    for name, grid in listed().items():
        for code in range(0, 256, 5):
            spec = value_figure(grid, code)
            value = grid.values[code % (1 << grid.format.bits)]
            title = spec["layout"]["title"]["text"]
            assert title.startswith(f"{name.upper()}, code {code % (1 << grid.format.bits)} of "
                                    f"{1 << grid.format.bits}: ")
            drawn = [x for trace in spec["data"] if trace.get("name") == "this value"
                     for x in trace["x"]
                    ] if np.isfinite(value) and value else [abs(value)]
            assert np.array_equal(drawn, [abs(value)], equal_nan=True)
    assert "5.5; neighbours: 5 and 6" in value_figure(listed()["e4m3fn"],
        0b01001011)["layout"]["title"]["text"]


@pytest.fixture(scope="module")
def landed():
    """Numbers of every size, most of them those of the narrow formats, and where they land."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(160) * 2.0 ** np.concatenate(
        [rng.uniform(-30, 100, 40), rng.uniform(-12, 10, 40), rng.uniform(-4, 2.5, 80)])
    return {x: landings(x) for x in map(float, np.float32([*numbers, 0.0, 0.3, -1.5]))}


@pytest.mark.parametrize("name", FLOATS)
def test_a_number_lands_where_ml_dtypes_says(name, landed):
    """Value and bits by its cast, neighbours by its nextafter: random numbers of every size, and
    all that is odd."""
    dtype, f = np.dtype(ML_DTYPES[name]), FORMATS[name]
    odd = map(float, np.float32([f.largest, -f.largest, f.smallest, f.smallest / 3]))
    for x, landing in (landed | {x: landings(x) for x in odd}).items():
        if abs(x) > f.largest:
            continue
        got, nearest = landing[name], np.float32([x]).astype(dtype)
        assert got.value == x and got.nearest == float(nearest[0])
        assert (int(got.bits.replace(" ", ""), 2)
                == int(nearest.view(np.uint16 if f.bits > 8 else np.uint8)[0])
                & ((1 << f.bits) - 1))
        assert [len(part) for part in got.bits.split()] == [1, f.exponent_bits, f.mantissa_bits]
        if got.nearest == x:
            assert got.toward == got.away == x
            continue
        # x lies between the nearest value and its neighbour on the other side
        over = abs(got.nearest) > abs(x)
        beyond = np.nextafter(nearest, np.zeros(1, dtype) if over
                              else np.array([np.sign(x) * f.largest]).astype(dtype))
        around = (beyond[0], nearest[0])[::1 if over else -1]
        assert (got.toward, got.away) == tuple(map(float, around))


def test_what_is_too_large_for_a_format_has_nothing_above():
    landing = landings(1000.0)
    e4m3 = landing["e4m3fn"]
    assert e4m3.nearest == e4m3.toward == 448 and e4m3.away is None
    assert (landing["int8"].nearest, landing["int8"].bits) == (127, "0 1111111")
    assert "e8m0" not in landings(-1.0) and (landings(-130.0)["int8"].nearest,
        landings(-130.0)["int8"].away) == (-128, None)
    with pytest.raises(ConfigError, match="finite number can be rounded to a format, got nan"):
        landings(float("nan"))


def test_a_landing_is_drawn_and_said():
    spec, table = landing_figure(landings(0.3).values())
    go.Figure(spec, skip_invalid=False)
    mark = next(trace for trace in spec["data"] if trace["name"] == "e4m3fn"
                and trace["marker"].get("symbol") == "line-ns")
    assert mark["x"] == [pytest.approx((0.3 - 0.28125) / (0.3125 - 0.28125))]
    assert "<td" in table and all(words in table for words in ("0.3125", "0 0101 010", "4.2%",
        "10%"))
    spec, table = landing_figure(landings(0.0).values())
    json.dumps(spec, allow_nan=False)
    assert table.count("exact") == len(FORMATS) - 1      # all but E8M0 have a zero


def test_bits_and_code_are_one_number():
    bits, seen = Bits(), []
    bits.observe(lambda change: seen.append(change["new"]), names="value")
    bits.buttons[0].value = True
    assert bits.value == bits.slider.value == 128
    bits.slider.value = 5
    assert ([button.value for button in bits.buttons] == [False] * 5 + [True, False, True]
            and bits.value == 5)
    bits.value = 255
    assert bits.slider.value == 255 and all(button.description == "1" for button in bits.buttons)
    assert seen == [128, 5, 255]


def test_ranges_are_drawn_from_the_table():
    spec = ranges_figure(FORMATS.values())
    ends = {trace["name"]: (2 ** trace["x"][0], 2 ** trace["x"][-1]) for trace in spec["data"]}
    for name, f in FORMATS.items():
        assert ends[name] == pytest.approx((f.smallest, f.largest))
    shares = exponents_figure({"weights": {-3: 0.5, 0: 0.5}}, [FORMATS["e4m3fn"]])
    assert [trace["y"] for trace in shares["data"]] == [[0.5, 0.5], ["e4m3fn"] * 2]


def test_the_page_has_the_table():
    """docs/formats.md, row by row."""
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()
            if line.startswith("| `")]
    rows = {row[0].strip("`"): row[1:] for row in rows if row[0].strip("`") in FORMATS}
    assert list(rows) == list(FORMATS)
    for f in FORMATS.values():
        bits, exponent, mantissa, largest, normal, subnormal, infinities, nans = rows[f.name]
        assert [int(bits), int(exponent), int(mantissa)] == [f.bits, f.exponent_bits,
            f.mantissa_bits]
        for text, value in ((largest, f.largest), (normal, f.smallest_normal),
                            (subnormal, f.smallest if f.mantissa_bits else None)):
            on_page = (None if text == "none" else 2.0**int(text[2:]) if text.startswith("2^")
                    else float(text))
            assert on_page == (None if value is None else pytest.approx(value, rel=1e-6))
        assert (infinities == "yes") == f.has_infinities
        count = 0 if f.first_nan is None else (1 << (f.bits - f.signed)) - f.first_nan
        assert nans == (f"{count:,}" if count else "none")
