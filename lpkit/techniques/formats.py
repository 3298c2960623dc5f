"""Number formats as data: data/published/formats.toml.

In a format with m mantissa bits, a magnitude code c has the exponent field c >> m and the mantissa
c & (2^m - 1). Field 0 has the subnormals, evenly spaced from zero. In an integer format, all codes
are spaced like this. `notebooks/lessons/number_formats.py` rounds values to formats, bit for bit.
"""

import math
import tomllib
from dataclasses import dataclass

from lpkit.errors import pick
from lpkit.files import resource


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format. A code is a magnitude, without the sign bit."""

    name: str
    exponent_bits: int              # 0: integers, two's complement
    mantissa_bits: int              # stored, without the leading one
    bias: int  # a normal value is (1 + mantissa / 2^mantissa_bits) * 2^(field - bias)
    largest: float
    signed: bool = True
    has_infinities: bool = False
    zero_is_unsigned: bool = False  # the code of minus zero is the only NaN
    first_nan: int | None = None    # this code and all above it are NaN; None: no NaN
    nan: int | None = None          # the NaN that `encode` writes, as torch's casts do
    torch_dtype: str | None = None  # torch.<this> stores it; None: torch has no such dtype
    source: str

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def has_negative_zero(self) -> bool:
        return self.signed and self.exponent_bits > 0 and not self.zero_is_unsigned

    @property
    def min_exponent(self) -> int:
        """The exponent of two below which spacing no longer shrinks. Without mantissa bits, there
        are no subnormals."""
        return 1 - self.bias if self.mantissa_bits else -self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest value: the `emax` of the MX specification."""
        return math.frexp(self.largest)[1] - 1

    @property
    def smallest_normal(self) -> float | None:
        """None for integers, which have no normal values."""
        return 2.0**self.min_exponent if self.exponent_bits else None

    @property
    def smallest(self) -> float:
        """The least value above zero, which is also the spacing there; E8M0 has no subnormals."""
        return 2.0**(self.min_exponent - self.mantissa_bits)

    @property
    def lowest(self) -> float:
        """The most negative value; the smallest value of an unsigned format."""
        if not self.signed:
            return self.smallest
        return -self.largest if self.exponent_bits else -self.largest - 1


FILE = resource("data/published") / "formats.toml"
FORMATS = {name: Format(name=name, **row)
           for name, row in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}


def format_of(name: str) -> Format:
    """Return the format `name`. Raises ConfigError with the nearest name."""
    return pick(FORMATS, name, "number format")
