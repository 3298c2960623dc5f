"""Number formats, read from data/published/formats.toml.

A number is stored as a sign bit and a code c, which stands for its magnitude. In a format with m
mantissa bits, the upper bits of the code, c >> m, are the exponent field, and the lower bits,
c & (2^m - 1), are the mantissa. Codes with exponent field 0 are the subnormals, which are evenly
spaced from zero. All codes of an integer format are evenly spaced.
`notebooks/lessons/number_formats.py` rounds values to these formats, bit for bit.
"""

import math
import tomllib
from dataclasses import dataclass

from lpkit.errors import pick
from lpkit.files import resource


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format. Codes are without the sign bit."""

    name: str
    exponent_bits: int              # 0: integers, two's complement
    mantissa_bits: int              # stored bits; the leading 1 of normal values is not stored
    bias: int  # a normal value is (1 + mantissa / 2^mantissa_bits) * 2^(field - bias)
    largest: float
    signed: bool = True
    has_infinities: bool = False
    zero_is_unsigned: bool = False  # there is no minus zero: its bits are the only NaN
    first_nan: int | None = None    # this code and all larger codes are NaN; None: no code is NaN
    nan: int | None = None          # code of the NaN that casts write, as those of PyTorch do
    torch_dtype: str | None = None  # name of the dtype in torch; None: torch does not have it
    source: str

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def has_negative_zero(self) -> bool:
        return self.signed and self.exponent_bits > 0 and not self.zero_is_unsigned

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value, 2^min_exponent. Smaller values are subnormals,
        if the format has mantissa bits."""
        return 1 - self.bias if self.mantissa_bits else -self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest value, which the MX specification calls `emax`."""
        return math.frexp(self.largest)[1] - 1

    @property
    def smallest_normal(self) -> float | None:
        """The smallest normal value; None for integers, which have no normal values."""
        return 2.0**self.min_exponent if self.exponent_bits else None

    @property
    def smallest(self) -> float:
        """The smallest value above zero. In a format with subnormals, it is also their spacing."""
        return 2.0**(self.min_exponent - self.mantissa_bits)

    @property
    def lowest(self) -> float:
        """The lowest value: the most negative value, or the smallest value of an unsigned format.
        """
        if not self.signed:
            return self.smallest
        return -self.largest if self.exponent_bits else -self.largest - 1


FILE = resource("data/published") / "formats.toml"
FORMATS = {name: Format(name=name, **row)
           for name, row in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}


def format_of(name: str) -> Format:
    """Return the format `name`. For an unknown name, raise ConfigError with the nearest name."""
    return pick(FORMATS, name, "number format")
