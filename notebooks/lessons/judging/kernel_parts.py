"""Functions that a puzzle's kernel may call besides `tl`: FP8 and FP4 as integer codes.

Triton's interpreter does not convert to these formats as a GPU does (`lessons.judging.defects`), so
codes are computed with float32 additions and integer shifts, which give the same result everywhere.
`e2m1` (the codes of FP4, int32, 0 to 15) is the kit's. Needs Triton.
"""

import triton
import triton.language as tl

from lpkit.kernels.rounding import e2m1 as e2m1


@triton.jit
def e4m3(v):
    """Return the E4M3 codes (uint8) of float32 `v`, rounded to nearest-even, saturating at 448. NaN
    is 0x7F."""
    size = tl.where(v != v, 0.0, tl.minimum(tl.abs(v), 448.0))
    # the last bit of the sum has the value of the spacing, so the addition rounds
    field = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    magic = (field + (20 << 23)).to(tl.float32, bitcast=True)
    size = (size + magic) - magic
    normal = (size.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
    code = tl.where(v != v, 0x7F, code) | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def e4m3_value(codes):
    """Return the float32 values of E4M3 `codes` (uint8)."""
    code = codes.to(tl.int32)
    # a float32's exponent is larger by 120; subnormals are exact in float32
    size = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    size = tl.where((code & 127) == 127, float("nan"), size)
    return tl.where(code > 127, -size, size)
