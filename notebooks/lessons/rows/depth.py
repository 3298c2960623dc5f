"""Governors that make an update run only some layers, or only some tokens of a layer.

    lpkit train cpu-3m governors=random-ltd --import lessons.rows.depth

A row's `shares` (by layer: the share of the tokens that it sees) are drawn by a hash of the seed,
the update and the layer (splitmix64: Steele, Lea and Flood 2014,
https://doi.org/10.1145/2714064.2660195). So all ranks draw the same, and a resumed run continues
with the same draws. A skipped layer has no gradient: its weights and moments do not change.
Evaluation, samples and checkpoints use the whole model. `depth_torch.py` applies the rows to the
model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from lpkit.techniques.blocks import BLOCKS
from lpkit.techniques.changes import GOVERNORS, GovernorRow
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.row import Settings
from lpkit.values import Count, CountOrZero, InnerShare, Positive, Rate, check

_MASK, _GAMMA = 2**64 - 1, 0x9E3779B97F4A7C15
Shares = tuple[float, ...]      # one share per layer


def hashed(*numbers: int) -> int:
    """Return 64 random bits that depend only on the numbers."""
    z = 0
    for number in numbers:
        z = ((z ^ number) + _GAMMA) & _MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = ((z ^ (z >> shift)) * factor) & _MASK
        z ^= z >> 31
    return z


@dataclass(frozen=True, kw_only=True)
class Depth(GovernorRow):
    """`keeps(settings, layers, steps, step)`: by layer, the probability of keeping it, by which the
    layer's output is divided. `alike`: all layers see the same tokens."""

    keeps: Callable[[Any, int, int, int], Shares] | None = None
    alike: bool = False
    implementation: str = "lessons.rows.depth_torch:Depth"


@dataclass(frozen=True, kw_only=True)
class Drop(Settings):
    rate: Rate = 0.2        # probability that a layer is skipped; if it rises, the last layer's


@dataclass(frozen=True, kw_only=True)
class Progressive(Settings):
    theta: InnerShare = 0.5             # final probability of keeping the last layer
    gamma: Positive | None = None       # rate of approaching theta per step; None: 100 / steps


_rising = check(lambda value: all(a < b for a, b in pairwise((0, *value))), "ascending, from 1")


@dataclass(frozen=True, kw_only=True)
class Stack(Settings):
    start: CountOrZero = 0      # layers at the start; 0: the largest proper divisor of all layers
    # updates before each growth; (): evenly spaced, the last growth in the middle of the run
    at: Annotated[tuple[int, ...], _rising] = ()
    preserve: bool = False      # new layers add 0 at first

    def begin(self, layers: int) -> int:
        return self.start or max((n for n in range(1, layers) if layers % n == 0), default=1)

    def growths(self, layers: int, steps: int) -> tuple[int, ...]:
        times = math.ceil(math.log2(layers / self.begin(layers)))
        return tuple(max(i, steps * i // (2 * times)) for i in range(1, times + 1))

    def problem(self, config: Any) -> str:
        m, steps, at = config.model, config.steps, self.at
        if m.L % self.begin(m.L):
            near = min((n for n in range(1, m.L + 1) if m.L % n == 0),
                       key=lambda n: abs(n - self.start))
            return (f":start={self.start} does not divide model.layers={m.L}, and growths are "
                    f"copies; set start={near}")
        due = self.growths(m.L, steps)
        if at and (len(at) != len(due) or at[-1] >= steps):
            return (f":at={list(at)} are not the {len(due)} growths to model.layers={m.L} within "
                    f"steps={steps}; set at={list(due)}")
        adds = [op for op in BLOCKS[m.block].formula(MicroBatch(model=m)) if op.name[:3] == "add"]
        other = ("start.run" if config.start.run else "model.changes" if m.changes
                 else f"model.block={m.block}" if len(adds) < 2 else "")
        return other and (f" starts with layers that add nothing, and {other} does not support "
                          f"this; leave one of the two out")


@dataclass(frozen=True, kw_only=True)
class Tokens(Settings):
    share: InnerShare = 0.5             # share of the tokens that a middle layer sees at first
    grow_steps: CountOrZero | None = 0  # updates until it sees all; 0: never; None: 2/3 of the run
    rises: Count = 16                   # number of equal rises

    def problem(self, config: Any) -> str:
        layers, context = config.model.layers, config.parallel.context
        if layers < 3:
            return (f" needs a layer between the first and the last, and model.layers={layers}; "
                    f"set model.layers=3")
        if (self.grow_steps or 0) > config.steps:
            return f":grow_steps={self.grow_steps} is after the run's end; set it to {config.steps}"
        return (f" draws from all tokens of a sequence, which parallel.context={context} splits; "
                f"set parallel.context=1" if context > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Masks(Settings):
    old: CountOrZero = 0                # lowest layers without a mask; 0: half of the layers
    rise_steps: Count | None = None     # updates until masks are 1; None: half of the run

    def problem(self, config: Any) -> str:
        layers, steps = config.model.L, config.steps
        if self.old >= layers:
            return f":old={self.old} are all of model.layers={layers}; set old={layers // 2}"
        late = f":rise_steps={self.rise_steps} is after the run's end; set it to {steps - 1}"
        return late if (self.rise_steps or 0) >= steps else ""


def masked(settings: Masks, layers: int, steps: int, step: int) -> Shares:
    mask = min(1.0, step / (settings.rise_steps or max(1, steps // 2)))
    old = settings.old or layers // 2
    return (1.0,) * old + (1 / mask if mask else math.inf,) * (layers - old)


def evenly(settings: Drop, layers: int, steps: int, step: int) -> Shares:
    return (1 - settings.rate,) * layers


def falling(settings: Drop, layers: int, steps: int, step: int) -> Shares:
    return tuple(1 - settings.rate * (layer + 1) / layers for layer in range(layers))


def progressive(settings: Progressive, layers: int, steps: int, step: int) -> Shares:
    fallen = math.exp(-step * (100 / steps if settings.gamma is None else settings.gamma))
    return falling(Drop(rate=(1 - settings.theta) * (1 - fallen)), layers, steps, step)


def drawn(keeps: Callable[..., Shares], settings: Any, layers: int, steps: int, seed: int,
          step: int) -> Shares:
    return tuple(float(hashed(seed, step, layer) < p * 2**64)
                 for layer, p in enumerate(keeps(settings, layers, steps, step)))


def stacked(settings: Stack, layers: int, steps: int, seed: int, step: int) -> Shares:
    grown = sum(at <= step for at in settings.at or settings.growths(layers, steps))
    running = min(layers, settings.begin(layers) << grown)
    return (1.0,) * running + (0.0,) * (layers - running)


def middle(settings: Tokens, layers: int, steps: int, seed: int, step: int) -> Shares:
    over = max(1, 2 * steps // 3) if settings.grow_steps is None else settings.grow_steps
    rise = min(1.0, step * settings.rises // over / settings.rises) if over else 0.0
    return 1.0, *(settings.share + (1 - settings.share) * rise,) * (layers - 2), 1.0


GOVERNORS["stochastic-depth"] = Depth(
    why="leaves out layers at random, with a probability that rises to `rate` in the last. What "
        "a kept one adds is divided by its own (the paper multiplies in evaluation instead)",
    settings=Drop(rate=0.5), shares=partial(drawn, falling), keeps=falling,
    source="Huang et al. 2016, arXiv:1603.09382")
GOVERNORS["layer-drop"] = Depth(
    why="leaves out layers at random, all with one probability; nothing is scaled",
    settings=Drop(), shares=partial(drawn, evenly), source="Fan et al. 2019, arXiv:1909.11556")
GOVERNORS["progressive-layer-drop"] = Depth(
    why="as stochastic-depth, and the probabilities rise from 0 as the run goes on",
    settings=Progressive(), shares=partial(drawn, progressive), keeps=progressive,
    source="Zhang and He 2020, arXiv:2010.13369")
GOVERNORS["stack"] = Depth(
    why="begins with some layers, which are copied on top until all run; others add nothing "
        "before. Moments begin anew", settings=Stack(), shares=stacked,
    implementation="lessons.rows.depth_torch:Stacking",
    source="Gong et al. 2019, https://proceedings.mlr.press/v97/gong19a.html")
GOVERNORS["masked-growth"] = Depth(
    why="what new layers add has a mask, which rises from 0 to 1: with start.grow=stack the "
        "small model's function goes over into the large one's", settings=Masks(),
    shares=lambda settings, layers, *_: (1.0,) * layers, keeps=masked,
    source="Yao et al. 2023, arXiv:2305.02869")
GOVERNORS["random-ltd"] = Depth(
    why="layers between the first and the last see a random part of the tokens, each another "
        "one, which grows to all", settings=Tokens(grow_steps=None), shares=middle,
    source="Yao et al. 2022, arXiv:2211.11586")
GOVERNORS["token-drop"] = Depth(
    why="the same, but one part for all these layers. It is drawn in each update: the paper "
        "keeps entries of the vocabulary with a high running loss", settings=Tokens(),
    shares=middle, alike=True,
    source="Hou et al. 2022, arXiv:2203.13240")
