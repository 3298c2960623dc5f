"""Number formats as data.

A magnitude code c of a format with m mantissa bits splits into c >> m, the exponent field, and c &
(2^m - 1). Field 0 holds the subnormals, evenly spaced from zero; the whole of an integer format is
such a row. What a value becomes in one, bit for bit, is in `notebooks/lessons/number_formats.py`.
"""

import math
from dataclasses import dataclass

from lpkit.errors import pick

IEEE = "IEEE 754-2019, https://doi.org/10.1109/IEEESTD.2019.8766229"
OFP8 = ("OCP 8-bit Floating Point Specification 1.0; Micikevicius et al. 2022, "
        "https://arxiv.org/abs/2209.05433")
FNUZ = "AMD HIP, https://rocm.docs.amd.com/projects/HIP/en/latest/reference/fp8_numbers.html"
MX = ("OCP Microscaling Formats (MX) Specification 1.0; Rouhani et al. 2023, "
      "https://arxiv.org/abs/2310.10537")


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format. Codes are magnitudes, without the sign bit."""

    name: str
    exponent_bits: int              # 0: integers, two's complement
    mantissa_bits: int              # stored, without the leading one
    bias: int  # a normal value is (1 + mantissa / 2^mantissa_bits) * 2^(field - bias)
    largest: float
    signed: bool = True
    has_infinities: bool = False
    zero_is_unsigned: bool = False  # the code of minus zero is the only NaN
    first_nan: int | None = None    # this code and all above it are NaN; None: there is no NaN
    nan: int | None = None          # the NaN that `encode` writes, as torch's casts do
    torch_dtype: str | None = None  # torch.<this> holds it; None: no dtype of its own
    source: str

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def has_negative_zero(self) -> bool:
        return self.signed and self.exponent_bits > 0 and not self.zero_is_unsigned

    @property
    def min_exponent(self) -> int:
        """The exponent of two below which spacing no longer shrinks; no mantissa, no subnormals."""
        return 1 - self.bias if self.mantissa_bits else -self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest value: the `emax` of the MX specification."""
        return math.frexp(self.largest)[1] - 1

    @property
    def smallest_normal(self) -> float | None:
        """None: integers have none."""
        return 2.0**self.min_exponent if self.exponent_bits else None

    @property
    def smallest(self) -> float:
        """The least value above zero, and the spacing around it; E8M0 has no subnormals."""
        return 2.0**(self.min_exponent - self.mantissa_bits)

    @property
    def lowest(self) -> float:
        """The most negative value; of an unsigned format, the smallest."""
        if not self.signed:
            return self.smallest
        return -self.largest if self.exponent_bits else -self.largest - 1


FORMATS: dict[str, Format] = {f.name: f for f in (
    Format(name="fp32", exponent_bits=8, mantissa_bits=23, bias=127,
           largest=(2 - 2.0**-23) * 2.0**127, has_infinities=True, first_nan=0x7F800001,
           nan=0x7FC00000, torch_dtype="float32", source=IEEE),
    Format(name="tf32", exponent_bits=8, mantissa_bits=10, bias=127,
           largest=(2 - 2.0**-10) * 2.0**127, has_infinities=True, first_nan=0x3FC01, nan=0x3FE00,
           source="NVIDIA A100 Tensor Core GPU Architecture, 2020; 19 of its 32 bits count"),
    Format(name="bf16", exponent_bits=8, mantissa_bits=7, bias=127,
           largest=(2 - 2.0**-7) * 2.0**127, has_infinities=True, first_nan=0x7F81, nan=0x7FC0,
           torch_dtype="bfloat16", source="Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322"),
    Format(name="fp16", exponent_bits=5, mantissa_bits=10, bias=15, largest=65504.0,
           has_infinities=True, first_nan=0x7C01, nan=0x7E00, torch_dtype="float16", source=IEEE),
    Format(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, largest=57344.0,
           has_infinities=True, first_nan=0x7D, nan=0x7F, torch_dtype="float8_e5m2", source=OFP8),
    Format(name="e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0,
           first_nan=0x7F, nan=0x7F, torch_dtype="float8_e4m3fn", source=OFP8),
    Format(name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, largest=57344.0, nan=0x80,
           zero_is_unsigned=True, torch_dtype="float8_e5m2fnuz", source=FNUZ),
    Format(name="e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, largest=240.0, nan=0x80,
           zero_is_unsigned=True, torch_dtype="float8_e4m3fnuz", source=FNUZ),
    Format(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3, largest=28.0, source=MX),
    Format(name="e2m3", exponent_bits=2, mantissa_bits=3, bias=1, largest=7.5, source=MX),
    Format(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0, source=MX),
    Format(name="e8m0", exponent_bits=8, mantissa_bits=0, bias=127, largest=2.0**127, signed=False,
           first_nan=0xFF, nan=0xFF, torch_dtype="float8_e8m0fnu", source=MX),
    # bias = 2 - bits: the spacing 2^(1 - bias - mantissa_bits) is one, and no code is normal
    Format(name="int8", exponent_bits=0, mantissa_bits=7, bias=-6, largest=127.0,
           torch_dtype="int8", source="two's complement"),
    Format(name="int4", exponent_bits=0, mantissa_bits=3, bias=-2, largest=7.0,
           source="two's complement"),
)}

def format_of(name: str) -> Format:
    """Raises ConfigError, with the nearest name."""
    return pick(FORMATS, name, "number format")
