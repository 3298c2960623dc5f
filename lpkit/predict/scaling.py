"""Loss from size and data, by published laws, and the best size for a budget.

N is the number of parameters (Kaplan et al. count them without embeddings) and D that of tokens.
Loss is in nats per token of the authors' text and tokenizer, so compare only losses of the same
law. A law holds in the range where it was fitted. Outside, `Law.extrapolate` answers and says so.
Compute is 6 N D FLOPs, as the papers count it.
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
    """`inside`: both sizes are in the range that the law was fitted to. `note` states this."""

    parameters: float
    tokens: float
    nats: float
    inside: bool
    note: str


def additive(N: float, D: float, *, E: float, A: float, B: float, alpha: float,
             beta: float) -> float:
    """E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2)."""
    return E + A / N**alpha + B / D**beta


def additive_best(product: float, *, E: float, A: float, B: float, alpha: float,
                  beta: float) -> float:
    """Return the best N for a product N D (Hoffmann et al. 2022, equation 4)."""
    return (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * product ** (beta / (alpha + beta))


def joint(N: float, D: float, *, N_c: float, D_c: float, alpha_n: float, alpha_d: float) -> float:
    """((N_c / N)^(alpha_n / alpha_d) + D_c / D)^alpha_d (Kaplan et al. 2020, equation 1.5)."""
    return ((N_c / N) ** (alpha_n / alpha_d) + D_c / D) ** alpha_d


def joint_best(product: float, *, N_c: float, D_c: float, alpha_n: float, alpha_d: float) -> float:
    """Return the N where the derivative of the sum is zero."""
    ratio = alpha_n / alpha_d
    return (ratio * N_c**ratio * product / D_c) ** (1 / (1 + ratio))


# L(N, D), and the N that minimises L(N, product / N)
FORMS = {"additive": (additive, additive_best), "joint": (joint, joint_best)}


@dataclass(frozen=True, kw_only=True)
class Law:
    """A row of data/published/laws.toml."""

    name: str
    parameters: tuple[float, float]
    tokens: tuple[float, float]
    source: str
    constants: Mapping[str, float]
    form: str

    def extrapolate(self, parameters: float, tokens: float) -> Loss:
        """Return the loss for any sizes; the note says whether the law was fitted there. Raises
        ConfigError."""
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
        """Return the least L(N, D) with 6 N D = flops, and its sizes."""
        if not (0 < flops < math.inf):
            raise ConfigError(f"FLOPs must be positive, got {flops}")
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        parameters = FORMS[self.form][1](product, **self.constants)
        return self.extrapolate(parameters, product / parameters)


FILE = resource("data/published") / "laws.toml"
LAWS = {name: Law(name=name, **row)
        for name, row in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}
# the constants of "hoffmann" do not agree with its authors' other two approaches
DEFAULT = "besiroglu"
