"""Loss from size and data, as published, and what is best for a budget.

N parameters (Kaplan et al. count them without embeddings), D tokens, loss in nats per token of the
authors' own text and tokenizer: compare losses of one law with one another, never with those of
another corpus. A law holds where it was fitted; outside, `Law.extrapolate` answers and says so.
Compute is 6 N D FLOPs, as the papers count it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lpkit.errors import ConfigError
from lpkit.predict.units import quantity

FLOPS_PER_PARAMETER_AND_TOKEN = 6


class Loss(NamedTuple):
    """`inside`: both sizes were among those that the law was fitted to. `note` says it in words."""

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
    """Equation 4."""
    return (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * product ** (beta / (alpha + beta))


def joint(N: float, D: float, *, N_c: float, D_c: float, alpha_n: float, alpha_d: float) -> float:
    """((N_c / N)^(alpha_n / alpha_d) + D_c / D)^alpha_d (Kaplan et al. 2020, equation 1.5)."""
    return ((N_c / N) ** (alpha_n / alpha_d) + D_c / D) ** alpha_d


def joint_best(product: float, *, N_c: float, D_c: float, alpha_n: float, alpha_d: float) -> float:
    """Returns the N where the derivative of the sum is zero."""
    ratio = alpha_n / alpha_d
    return (ratio * N_c**ratio * product / D_c) ** (1 / (1 + ratio))


@dataclass(frozen=True, kw_only=True)
class Law:
    """The ranges (least, most) that it was fitted to. `loss(N, D)` is L, and `best` the N of the least
    L(N, product / N); both have its constants."""

    name: str
    parameters: tuple[float, float]
    tokens: tuple[float, float]
    source: str
    constants: Mapping[str, float]
    loss: Callable[..., float] = additive
    best: Callable[..., float] = additive_best

    def extrapolate(self, parameters: float, tokens: float) -> Loss:
        """Anywhere; the note says whether the law was fitted there. Raises ConfigError."""
        for what, value in (("parameters", parameters), ("tokens", tokens)):
            if not (0 < value < math.inf):
                raise ConfigError(f"{what} must be positive, got {value}")
        (fewest, most), (least, longest) = self.parameters, self.tokens
        inside = fewest <= parameters <= most and least <= tokens <= longest
        where = "inside" if inside else "extrapolated beyond"
        fitted = (f"{quantity(fewest)} to {quantity(most, 'parameters')}, "
                  f"{quantity(least)} to {quantity(longest, 'tokens')}")
        return Loss(parameters, tokens, self.loss(parameters, tokens, **self.constants), inside,
                    f"{where} the fit of {self.name}: {fitted}")

    def optimum(self, flops: float) -> Loss:
        """Returns the least L(N, D) with 6 N D = flops, and its sizes."""
        if not (0 < flops < math.inf):
            raise ConfigError(f"FLOPs must be positive, got {flops}")
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        parameters = self.best(product, **self.constants)
        return self.extrapolate(parameters, product / parameters)


# Of both fits: 240 of 245 runs, read off the plots by Besiroglu et al.; the five of fewest tokens
# are left out, https://github.com/epoch-research/analyzing-chinchilla/blob/4c97be9c9f4c/
# data_analysis.ipynb
_RUNS = {"parameters": (57e6, 16e9), "tokens": (0.8e9, 318e9)}
LAWS = {law.name: law for law in (
    Law(name="hoffmann", **_RUNS,
        constants={"E": 1.6934, "A": 406.4, "B": 410.7, "alpha": 0.3392, "beta": 0.2849},
        source="Hoffmann et al. 2022, approach 3, with the digits of the paper's TeX source, "
        "https://arxiv.org/abs/2203.15556"),
    Law(name="besiroglu", **_RUNS,
        constants={"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658},
        source="Besiroglu et al. 2024, the same data fitted again, "
        "https://arxiv.org/abs/2404.10102"),
    Law(name="kaplan", loss=joint, best=joint_best,
        constants={"N_c": 6.4e13, "D_c": 1.8e13, "alpha_n": 0.076, "alpha_d": 0.103},
        parameters=(768, 1.5e9), tokens=(22e6, 23e9),
        source="Kaplan et al. 2020, table 2, https://arxiv.org/abs/2001.08361"),
)}
DEFAULT = "besiroglu"  # the first one's constants do not agree with its own other two approaches
