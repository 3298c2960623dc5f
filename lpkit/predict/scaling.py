"""Loss from size and data, as published: L(N, D) = E + A / N^alpha + B / D^beta, and what is best
for a budget.

N parameters, D tokens, loss in nats per token of the authors' own text and tokenizer: compare
losses of one law with one another, never with those of another corpus. A law holds where it was
fitted. Outside, `Law.loss` refuses, and `Law.extrapolate` answers and says so. Compute is 6 N D
FLOPs, as both papers count it.
"""

import math
from dataclasses import dataclass

from lpkit.errors import ConfigError
from lpkit.predict.units import quantity

FLOPS_PER_PARAMETER_AND_TOKEN = 6


@dataclass(frozen=True, kw_only=True)
class Loss:
    """`inside`: both sizes were among those that the law was fitted to. `note` says it in words."""

    nats: float
    inside: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The sizes of least loss for `flops`."""

    law: str
    flops: float
    parameters: float
    tokens: float
    loss: Loss


@dataclass(frozen=True, kw_only=True)
class Law:
    """Constants, and the ranges (least, most) that they were fitted to."""

    name: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float
    parameters: tuple[float, float]
    tokens: tuple[float, float]
    source: str

    def extrapolate(self, parameters: float, tokens: float) -> Loss:
        """Anywhere; the note says whether the law was fitted there. Raises ConfigError."""
        for what, value in (("parameters", parameters), ("tokens", tokens)):
            if not (0 < value < math.inf):
                raise ConfigError(f"{what} must be positive, got {value}")
        (fewest, most), (least, longest) = self.parameters, self.tokens
        inside = fewest <= parameters <= most and least <= tokens <= longest
        where = "inside" if inside else "extrapolated beyond"
        return Loss(nats=self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta,
                    inside=inside, note=f"{where} the fit of {self.name}: {self.range}")

    def loss(self, parameters: float, tokens: float) -> Loss:
        """Inside the range of the fit. Raises ConfigError outside."""
        found = self.extrapolate(parameters, tokens)
        if not found.inside:
            raise ConfigError(f"{quantity(parameters, 'parameters')} and "
                              f"{quantity(tokens, 'tokens')} are outside the fit of {self.name} "
                              f"({self.range}); ask for `extrapolate` to have it anyway, labelled")
        return found

    def optimum(self, flops: float) -> Optimum:
        """Of the least L(N, D) with 6 N D = flops (Hoffmann et al. 2022, equation 4)."""
        if not (0 < flops < math.inf):
            raise ConfigError(f"FLOPs must be positive, got {flops}")
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        parameters = G * product ** (self.beta / (self.alpha + self.beta))
        tokens = product / parameters
        return Optimum(law=self.name, flops=flops, parameters=parameters, tokens=tokens,
                       loss=self.extrapolate(parameters, tokens))

    @property
    def range(self) -> str:
        return (f"{quantity(self.parameters[0])} to {quantity(self.parameters[1], 'parameters')}, "
                f"{quantity(self.tokens[0])} to {quantity(self.tokens[1], 'tokens')}")


# abstract of Hoffmann et al.; the other fit reads its plots
_RANGE = {"parameters": (70e6, 16e9), "tokens": (5e9, 500e9)}
LAWS = {law.name: law for law in (
    Law(name="hoffmann", E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28, **_RANGE,
        source="Hoffmann et al. 2022, approach 3, https://arxiv.org/abs/2203.15556"),
    Law(name="besiroglu", E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658, **_RANGE,
        source="Besiroglu et al. 2024, the same data fitted again, "
        "https://arxiv.org/abs/2404.10102"),
)}
DEFAULT = "besiroglu"  # the first one's constants do not agree with its own other two approaches
