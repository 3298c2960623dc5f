"""Notebook 03, number formats."""

from lpkit.course.exercises.judge import Exercise


def value_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """A code without sign, infinities and NaN: bias 2^(exponent_bits - 1) - 1, field 0 are the
    subnormals."""
    bias = 2 ** (exponent_bits - 1) - 1
    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    return (1 + fraction) * 2.0 ** (field - bias) if field else fraction * 2.0 ** (1 - bias)


def _no_subnormals(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    return (1 + fraction) * 2.0 ** (field - 2 ** (exponent_bits - 1) + 1)


def stochastic(x: float, step: float, u: float) -> float:
    """x >= 0 on multiples of `step`: up when u, uniform in [0, 1), is below the remainder in
    steps."""
    down = x // step
    return (down + (u < x / step - down)) * step


def mx_exponent(amax: float, largest_exponent: int) -> int:
    """The power of two that the OCP rule gives a block: floor(log2 amax) - the element format's
    largest exponent."""
    e = -largest_exponent
    while amax >= 2:
        amax, e = amax / 2, e + 1
    while amax < 1:
        amax, e = amax * 2, e - 1
    return e


EXERCISES = {
    "03.value_of": Exercise(spec=value_of, mistake=_no_subnormals,
                            cases=((0, 2, 1), (1, 2, 1), (7, 2, 1), (5, 4, 3), (126, 4, 3),
                                   (75, 5, 2))),
    "03.stochastic": Exercise(spec=stochastic, mistake=lambda x, step, u: round(x / step) * step,
                              cases=((1.25, 1.0, 0.2), (1.25, 1.0, 0.3), (3.0, 0.5, 0.0),
                                     (0.7, 0.5, 0.39), (0.7, 0.5, 0.41))),
    "03.mx_exponent": Exercise(spec=mx_exponent, mistake=lambda amax,
                               largest_exponent: round(amax).bit_length() - largest_exponent,
                               cases=((448.0, 8), (1.0, 8), (0.75, 2), (6.5, 2), (1e-3, 15))),
}
