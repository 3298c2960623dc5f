"""Casts in MX blocks, compared with the text of the specification (OCP Microscaling 1.0, section
6.3), computed in float64, for microxcaling's kinds of blocks, elements and special values."""

import numpy as np
import pytest
import torch

from lpkit.errors import ConfigError
from lpkit.kernels import cast
from lpkit.techniques.formats import format_of

ml_dtypes = pytest.importorskip("ml_dtypes")

# dtype of ml_dtypes; exponent of the largest value
ELEMENTS = {"e4m3fn": (ml_dtypes.float8_e4m3fn, 8, 448.0),
            "e5m2": (ml_dtypes.float8_e5m2, 15, 57344.0),
            "e3m2": (ml_dtypes.float6_e3m2fn, 4, 28.0),
            "e2m3": (ml_dtypes.float6_e2m3fn, 2, 7.5), "e2m1": (ml_dtypes.float4_e2m1fn, 2, 6.0)}


def by_the_specification(x: np.ndarray, name: str, block: int, *,
                         up: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and the exponents of the scales of x (rows, n). Both are exact: all
    numbers are powers of two, or casts of ml_dtypes."""
    kind, emax, largest = ELEMENTS[name]
    blocks = x.astype(np.float64).reshape(len(x), -1, block)
    top = np.abs(blocks).max(-1, keepdims=True)
    mantissa, exponent = np.frexp(top)
    if up:     # the least power of two with which nothing overflows
        mantissa, exponent = np.frexp(np.float32(top) / np.float32(largest))
        exponent = exponent - (mantissa == 0.5)
    else:
        exponent = exponent - 1 - emax
    exponent = np.clip(np.where(top > 0, exponent, -127), -127, 127)
    elements = np.clip(np.ldexp(blocks, -exponent), -largest,
                       largest).astype(kind).astype(np.float64)
    return np.ldexp(elements, exponent).reshape(x.shape), exponent[..., 0]


def drawn(rows: int, columns: int, spread: float, dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=draw)
            * torch.exp2(spread * torch.randn(rows, columns, generator=draw))).to(dtype)


@pytest.mark.parametrize("rule", ["floor", "rceil"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [9, 32])
@pytest.mark.parametrize("name", ELEMENTS)
def test_blocks_are_the_specifications(name, block, dtype, rule):
    x = drawn(24, 4 * block, 3.0, dtype, block)
    values, exponents = by_the_specification(x.double().numpy(), name, block, up=rule == "rceil")
    ours = cast.mx(x, format_of(name), rule=rule, block=(1, block), dtype=torch.float32)
    np.testing.assert_array_equal(ours.scales.numpy().astype(int) - 127, exponents)
    np.testing.assert_array_equal(ours.values.double().numpy(), values)


CORNERS = {
    "all zero": [0.0] * 32, "minus zeros": [-0.0] * 32, "one that is not zero": [0.0] * 31 + [3.0],
    "equal": [5.0] * 32,
    "powers of two": [2.0**i for i in range(-16, 16)],
    "just below a power": [float(np.float32(2) ** -i * (1 - 2.0**-24)) for i in range(32)],
    "at the largest": [448.0, 57344.0, 28.0, 7.5, 6.0] + [1.0] * 27,
    "the largest of float32": [3.4028234663852886e38] + [1.0] * 31,
    "the smallest normal": [2.0**-126] * 32,
    "subnormals of float32": [2.0**-149 * i for i in range(32)],
    "far apart": [1e30] + [1e-30] * 31, "halves": [i + 0.5 for i in range(32)],
}


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_corners_are_the_specifications(name, corner):
    x = torch.tensor([CORNERS[corner]], dtype=torch.float32)
    values, exponents = by_the_specification(x.double().numpy(), name, 32)
    ours = cast.mx(x, format_of(name), rule="floor", dtype=torch.float32)
    assert ours.scales.item() - 127 == exponents.item()
    # if float32 cannot hold an element times its scale, the matmul flushes the product to zero;
    # compare in float32
    np.testing.assert_array_equal(ours.values.numpy(), values.astype(np.float32))


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_nan_makes_its_block_nan_and_no_other(name):
    x = drawn(2, 64, 1.0, torch.float32, 0)
    x[0, 5] = torch.nan
    ours = cast.mx(x, format_of(name), rule="floor", dtype=torch.float32)
    assert (ours.values[0, :32].isnan().all() and ours.values[0, 32:].isfinite().all()
            and ours.values[1].isfinite().all())
    assert ours.scales[0, 0] == 255 and ours.nonfinite > 0


@pytest.mark.parametrize("shape", [(0, 32), (4, 0)])
def test_nothing_is_refused(shape):
    """For this input, the original function returns nothing."""
    with pytest.raises(ConfigError, match="has nothing to cast"):
        cast.mx(torch.empty(shape), format_of("e4m3fn"), rule="floor")


def test_blocks_that_do_not_tile_are_refused():
    with pytest.raises(ConfigError, match="33"):
        cast.mx(torch.ones(4, 33), format_of("e4m3fn"), rule="floor")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ELEMENTS)
def test_along_either_axis(name, axis):
    """The blocks of a transposed view run along the columns."""
    x = drawn(64, 96, 2.0, torch.float32, 7)
    due, _ = by_the_specification(x.double().numpy() if axis else x.T.double().numpy(), name, 32)
    ours = cast.mx(x if axis else x.T, format_of(name), rule="floor", dtype=torch.float32).values
    np.testing.assert_array_equal(ours.double().numpy(), due)
