"""Number formats as data: data/published/formats.toml.

A magnitude code c of a format with m mantissa bits splits into c >> m, the exponent field, and c &
(2^m - 1). Field 0 holds the subnormals, evenly spaced from zero; the whole of an integer format is
such a row. What a value becomes in one, bit for bit, is in `notebooks/lessons/number_formats.py`.
"""

import math
import tomllib
from dataclasses import dataclass

from lpkit.errors import pick
from lpkit.files import resource


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


FILE = resource("data/published") / "formats.toml"
FORMATS = {name: Format(name=name, **row)
           for name, row in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}


def format_of(name: str) -> Format:
    """Raises ConfigError, with the nearest name."""
    return pick(FORMATS, name, "number format")
