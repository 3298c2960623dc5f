"""Governors by which an update runs less of the model: some layers, or some tokens of a layer.

A step's cost is a sum over layers of the tokens that each sees. A row says of each update which
share of them a layer sees (`shares`); 0: the layer is left out, and the residual stream passes it.
The run and the prediction read the same function. It depends on the seed and the step alone, so
that ranks agree without a word and a resumed run goes on. Numbers are drawn by hashing (splitmix64:
Steele, Lea and Flood 2014, https://doi.org/10.1145/2714064.2660195).

Evaluation, sampling and checkpoints have the whole model. A layer that is left out has no gradient
in that update: the optimizer leaves its weights and its moments as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from lpkit.techniques.row import Row, Settings
from lpkit.values import Count, CountOrZero, InnerShare, Positive, Rate, check

_MASK, _GAMMA = 2**64 - 1, 0x9E3779B97F4A7C15
Shares = tuple[float, ...]      # a number for each layer


def hashed(*numbers: int) -> int:
    """64 bits that look drawn, the same ones for the same numbers."""
    z = 0
    for number in numbers:
        z = ((z ^ number) + _GAMMA) & _MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = ((z ^ (z >> shift)) * factor) & _MASK
        z ^= z >> 31
    return z


@dataclass(frozen=True, kw_only=True)
class Governor(Row):
    """`shares(settings, layers, steps, seed, step)`: of each layer, the share of the tokens that it
    sees in the update after `step` others. `scales(settings, layers, steps, step)`: what a layer
    adds to the residual stream is multiplied by it. `alike`: layers see the same tokens.
    `problem(settings, config)`: why it cannot be, and the way out; empty: it can."""

    shares: Callable[[Any, int, int, int, int], Shares]
    scales: Callable[[Any, int, int, int], Shares] = lambda settings, layers, steps, step: (
        (1.0,) * layers)
    alike: bool = False
    problem: Callable[[Any, Any], str] = lambda settings, config: ""
    implementation: str = "lpkit.training.depth:Depth"


@dataclass(frozen=True, kw_only=True)
class Drop(Settings):
    where = "governors."

    rate: Rate = 0.2        # the probability that a layer is left out; of the last, where it rises


@dataclass(frozen=True, kw_only=True)
class Progressive(Settings):
    where = "governors."

    theta: InnerShare = 0.5             # the probability that the last layer is kept, in the end
    gamma: Positive | None = None       # how fast it gets there, a step; None: 100 / steps


_rising = check(lambda value: all(a < b for a, b in pairwise((0, *value))),
                "updates in ascending order, from 1")


@dataclass(frozen=True, kw_only=True)
class Stack(Settings):
    where = "governors."

    start: CountOrZero = 0              # layers at first; 0: half of them
    at: Annotated[tuple[int, ...], _rising] = ()    # updates before each growth; (): evenly, to half the run
    preserve: bool = False              # new layers add nothing at first: their outputs are 0

    def growths(self, layers: int, steps: int) -> tuple[int, ...]:
        times = round(math.log2(layers / (self.start or layers / 2)))
        return self.at or tuple(max(i, steps * i // (2 * times)) for i in range(1, times + 1))


@dataclass(frozen=True, kw_only=True)
class Tokens(Settings):
    where = "governors."

    share: InnerShare = 0.5             # of the tokens, what a middle layer sees


@dataclass(frozen=True, kw_only=True)
class GrowingTokens(Tokens):            # at first
    grow_steps: Count | None = None     # updates until it sees all; None: two thirds of the run
    rises: Count = 16                   # by so many equal rises


def layer_drop(settings: Drop, layers: int, steps: int, step: int) -> Shares:
    return (1 - settings.rate,) * layers


def stochastic_depth(settings: Drop, layers: int, steps: int, step: int) -> Shares:
    return tuple(1 - settings.rate * (layer + 1) / layers for layer in range(layers))


def progressive(settings: Progressive, layers: int, steps: int, step: int) -> Shares:
    gamma = 100 / steps if settings.gamma is None else settings.gamma
    last = (1 - settings.theta) * math.exp(-gamma * step) + settings.theta
    return tuple(1 - (1 - last) * (layer + 1) / layers for layer in range(layers))


def drawn(keeps: Callable[..., Shares], settings: Any, layers: int, steps: int, seed: int,
          step: int) -> Shares:
    """Each layer is kept with its probability, by itself."""
    return tuple(float(hashed(seed, step, layer) < p * 2**64)
                 for layer, p in enumerate(keeps(settings, layers, steps, step)))


def inverse(keeps: Callable[..., Shares], *of: Any) -> Shares:
    return tuple(1 / p for p in keeps(*of))


def stacked(settings: Stack, layers: int, steps: int, seed: int, step: int) -> Shares:
    running = (settings.start or layers // 2) * 2 ** sum(
        at <= step for at in settings.growths(layers, steps))
    return (1.0,) * running + (0.0,) * (layers - running)


def middle(settings: Tokens, layers: int, steps: int, seed: int, step: int) -> Shares:
    return 1.0, *(settings.share,) * (layers - 2), 1.0


def random_ltd(settings: GrowingTokens, layers: int, steps: int, seed: int, step: int) -> Shares:
    rise = min(1.0, step // _each(settings, steps) / settings.rises)
    return 1.0, *(settings.share + (1 - settings.share) * rise,) * (layers - 2), 1.0


def _each(settings: GrowingTokens, steps: int) -> float:
    """Updates of each rise."""
    return max(1, settings.grow_steps or 2 * steps // 3) / settings.rises


# Problems: what a Config's other settings leave no room for.

def no_stack(settings: Stack, config: Any) -> str:
    asked, layers, steps = settings, config.model.layers, config.steps
    starts = [layers >> i for i in range(1, layers.bit_length()) if layers % (1 << i) == 0]
    if not starts:
        return (f" doubles its layers, and model.layers={layers} is odd; set model.layers="
                f"{' or '.join(str(n) for n in (layers - 1, layers + 1) if n > 1)}")
    if asked.start and asked.start not in starts:
        near = min(starts, key=lambda n: abs(n - asked.start))
        return (f":start={asked.start} does not become model.layers={layers} by doubling; set "
                f"start={near}")
    doublings = starts.index(asked.start or starts[0]) + 1
    if asked.at and len(asked.at) != doublings:
        return (f":at={list(asked.at)} has {len(asked.at)} growths, and from "
                f"{asked.start or starts[0]} layers to {layers} there are {doublings}; name as "
                f"many, or leave at out")
    if asked.at and asked.at[-1] >= steps:
        return (f":at={list(asked.at)} grows after the run's end, steps={steps}; set the last to "
                f"{steps - 1} or less")
    named = [key for key, given in (("start.run", config.start.run),
                                    ("model.changes", config.model.changes)) if given]
    return (f" begins with layers that are not trained, and {named[0]} has others; leave one of "
            f"them out" if named else "")


def no_tokens(settings: Tokens, config: Any) -> str:
    layers, ends = config.model.layers, getattr(settings, "grow_steps", None) or 0
    if layers < 3:
        return (f" drops tokens between the first layer and the last, and model.layers={layers} "
                f"has nothing there; set model.layers=3 or more")
    if ends > config.steps:
        return (f":grow_steps={ends} ends after the run's end, steps={config.steps}; set it to "
                f"{config.steps} or less")
    return (f" gives a layer some of a sequence's tokens, and parallel.context="
            f"{config.parallel.context} has them on several ranks; set parallel.context=1"
            if config.parallel.context > 1 else "")


DEPTH: dict[str, Governor] = {
    "stochastic-depth": Governor(
        why="leaves out layers at random, more of the last ones: the probability falls linearly "
            "with depth. What a kept one adds is divided by it (the paper multiplies by it in "
            "evaluation instead)", settings=Drop(rate=0.5),
        shares=partial(drawn, stochastic_depth), scales=partial(inverse, stochastic_depth),
        source="Huang et al. 2016, arXiv:1603.09382"),
    "layer-drop": Governor(
        why="leaves out layers at random, all alike; nothing is scaled", settings=Drop(),
        shares=partial(drawn, layer_drop), source="Fan et al. 2019, arXiv:1909.11556"),
    "progressive-layer-drop": Governor(
        why="leaves out more and more layers at random, down to theta of the last one. What a "
            "kept one adds is divided by its probability", settings=Progressive(),
        shares=partial(drawn, progressive), scales=partial(inverse, progressive),
        source="Zhang and He 2020, arXiv:2010.13369"),
    "stack": Governor(
        why="begins with some of the layers, which are copied on top of themselves until all run; "
            "the others add nothing before. Moments are not copied", settings=Stack(),
        shares=stacked, problem=no_stack, implementation="lpkit.training.depth:Stacking",
        source="Gong et al. 2019, StackBERT, proceedings.mlr.press/v97/gong19a.html"),
    "random-ltd": Governor(
        why="each layer between the first and the last sees a random part of the tokens, another "
            "one in each; the part grows to all of them", settings=GrowingTokens(),
        shares=random_ltd, problem=no_tokens, source="Yao et al. 2022, arXiv:2211.11586"),
    "token-drop": Governor(
        why="all layers between the first and the last see the same part of the tokens, drawn for "
            "each update: the paper keeps those whose entry of the vocabulary has a high running "
            "loss, here none counts more than another", settings=Tokens(), shares=middle,
        alike=True, problem=no_tokens, source="Hou et al. 2022, arXiv:2203.13240"),
}
