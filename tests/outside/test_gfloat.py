"""Casts to number formats, and casts in blocks with a scale, compared with gfloat."""

import numpy as np
import pytest
import torch

from lpkit.kernels import cast
from lpkit.techniques.formats import format_of

gfloat = pytest.importorskip("gfloat")
formats = pytest.importorskip("gfloat.formats")


# our name of a format -> gfloat's name
GRIDS = {"e5m2": "ocp_e5m2", "e4m3fn": "ocp_e4m3", "e3m2": "ocp_e3m2", "e2m3": "ocp_e2m3",
         "e2m1": "ocp_e2m1"}


@pytest.mark.parametrize("scale, dtype", [(1.0, torch.bfloat16), (2.0**-9, torch.float32)], ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_rounding_to_nearest_even_with_saturation_is_theirs(name, dtype, scale):
    """All codes, the midpoints between them, and normally distributed numbers over the whole
    range and beyond it."""
    info = getattr(formats, f"format_info_{GRIDS[name]}")
    grid = gfloat.decode_ndarray(info, np.arange(2**format_of(name).bits, dtype=np.int64))
    grid = np.unique(grid[np.isfinite(grid)])
    beyond = np.array([1.01, 1.2, 4.0]) * format_of(name).largest
    draws = np.random.default_rng(1).standard_normal(4000) * format_of(name).largest / 3
    x = torch.from_numpy(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, beyond, -beyond, draws,
        draws / 1000]) * scale).to(dtype)
    due = gfloat.round_ndarray(info, x.double().numpy() / scale, gfloat.RoundMode.TiesToEven,
                               sat=True) * scale
    ours = cast.qdq(x[None], format_of(name), scale, dtype=torch.float32)[0].double().numpy()
    np.testing.assert_array_equal(ours, due)


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
    ours = cast.mx(torch.from_numpy(x).float()[None], format_of(name), rule="floor",
                    dtype=torch.float32).values[0].double().numpy()
    np.testing.assert_array_equal(ours, due)
