"""Loss from the number of parameters and of tokens, by published scaling laws, and the best number
of parameters for a compute budget.

In this module, N is the number of parameters (without embeddings in the law of Kaplan et al.), and
D is the number of training tokens. Loss is in nats per token of the authors' text and tokenizer, so
compare only losses of the same law. A law holds in the range of sizes that it was fitted to.
Outside, `Law.extrapolate` returns a loss, too, with a note. Compute is 6 N D FLOPs, as the papers
count it.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lpkit.errors import ConfigError
from lpkit.files import resource
from lpkit.predict.units import quantity

FLOPS_PER_PARAMETER_AND_TOKEN = 6


class Loss(NamedTuple):
    """The loss that a law predicts for two sizes."""

    parameters: float
    tokens: float
    nats: float     # per token
    inside: bool    # both sizes are in the range that the law was fitted to
    note: str       # the same in words, with the range


def additive(N: float, D: float, *, E: float, A: float, B: float, alpha: float,
             beta: float) -> float:
    """Return the loss E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2)."""
    return E + A / N**alpha + B / D**beta


def additive_best(product: float, *, E: float, A: float, B: float, alpha: float,
                  beta: float) -> float:
    """Return the N with the least `additive` loss, for a given product N D (Hoffmann et al. 2022,
    equation 4)."""
    return (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * product ** (beta / (alpha + beta))


def joint(N: float, D: float, *, N_c: float, D_c: float, alpha_n: float, alpha_d: float) -> float:
    """Return the loss ((N_c / N)^(alpha_n / alpha_d) + D_c / D)^alpha_d (Kaplan et al. 2020,
    equation 1.5)."""
    return ((N_c / N) ** (alpha_n / alpha_d) + D_c / D) ** alpha_d


def joint_best(product: float, *, N_c: float, D_c: float, alpha_n: float, alpha_d: float) -> float:
    """Return the N with the least `joint` loss, for a given product N D: the derivative of the sum
    in the parentheses is zero there."""
    ratio = alpha_n / alpha_d
    return (ratio * N_c**ratio * product / D_c) ** (1 / (1 + ratio))


# for each form: the loss L(N, D), and the N that minimises L(N, product / N) for a product N D
FORMS = {"additive": (additive, additive_best), "joint": (joint, joint_best)}


@dataclass(frozen=True, kw_only=True)
class Law:
    """A scaling law: a row of data/published/laws.toml."""

    name: str
    parameters: tuple[float, float]     # fewest and most parameters of the fit
    tokens: tuple[float, float]         # fewest and most tokens of the fit
    source: str
    constants: Mapping[str, float]      # arguments of the form, by name
    form: str                           # a key of FORMS

    def extrapolate(self, parameters: float, tokens: float) -> Loss:
        """Return the loss for any sizes. Its note says whether the sizes are in the range of the
        fit. Raises ConfigError for a size that is not positive."""
        for what, value in (("parameters", parameters), ("tokens", tokens)):
            if not (0 < value < math.inf):
                raise ConfigError(f"{what} must be positive, got {value}")
        (fewest, most), (least, longest) = self.parameters, self.tokens
        inside = fewest <= parameters <= most and least <= tokens <= longest
        where = "inside" if inside else "extrapolated beyond"
        fitted = (f"{quantity(fewest)} to {quantity(most, 'parameters')}, "
                  f"{quantity(least)} to {quantity(longest, 'tokens')}")
        nats = FORMS[self.form][0](parameters, tokens, **self.constants)
        return Loss(parameters, tokens, nats, inside, f"{where} the fit of {self.name}: {fitted}")

    def optimum(self, flops: float) -> Loss:
        """Return the least loss that `flops` FLOPs can reach, with its N and D: the minimum of
        L(N, D) over all sizes with 6 N D = flops. Raises ConfigError if `flops` is not positive."""
        if not (0 < flops < math.inf):
            raise ConfigError(f"FLOPs must be positive, got {flops}")
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        parameters = FORMS[self.form][1](product, **self.constants)
        return self.extrapolate(parameters, product / parameters)


FILE = resource("data/published") / "laws.toml"
LAWS = {name: Law(name=name, **row)
        for name, row in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}
# "besiroglu" is a new fit to the data of "hoffmann", whose constants do not agree with the other
# two approaches in its paper.
DEFAULT = "besiroglu"
