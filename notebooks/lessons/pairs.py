"""Compares your technique with a technique of the kit in a few minutes.

Both arms (configs) are trained with the same seeds, and the referee of `lpkit claim` judges the
pairs of losses. Notebooks that `lpkit new experiment` writes use this module. A result of a few
pairs is a first look. To test a claim, use `lpkit claim`, which tunes both arms and trains as many
seeds as the effect needs (docs/claim.md).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from lessons.figures.drawing import axis, figure, scatter
from lessons.figures.style import COLOURS
from lpkit.claims import referee
from lpkit.config import Config
from lpkit.tables import FAINT
from lpkit.training.training import Training

SMALL = {"model.layers": 2, "model.width": 192, "model.heads": 4, "model.context": 64,
         "global_batch": 8, "eval_batches": 32, "schedule.warmup_steps": 10, "steps": 60}
SMOKE = SMALL | {"model.width": 64, "eval_batches": 2, "schedule.warmup_steps": 1, "steps": 4}
# by tier: settings of the config, and number of pairs
SIZES = {"smoke": (SMOKE, 2), "cpu": (SMALL, 3), "gpu": ({"steps": 200}, 5)}
Losses = Mapping[str, Sequence[float]]      # validation losses by name of the arm, one per seed


def trained(config: Config) -> Training:
    """Return a training after all `config.steps` updates. No run folder is written."""
    training = Training.build(config)
    for step in range(config.steps):
        training.update(step)
    return training


def losses(arms: Mapping[str, Config], pairs: int,
           watch: Callable[[Sequence], Iterable] = iter) -> dict[str, list[float]]:
    """Train each arm with the seeds 0 to `pairs` - 1 and return its validation losses in nats per
    token, one per seed. A seed sets the initialisation and the order of the data. `watch` wraps the
    list of trainings, for example to show progress."""
    by_arm: dict[str, list[float]] = {name: [] for name in arms}
    for seed, name in watch([(seed, name) for seed in range(pairs) for name in arms]):
        by_arm[name].append(trained(arms[name].replace({"seed": seed})).evaluate())
    return by_arm


def verdict(by_arm: Losses) -> referee.Verdict:
    """Return the referee's verdict on the losses of two arms, after one look at all pairs. No
    setting of the arms was tuned."""
    return referee.look(*by_arm.values(), referee.ALPHA)


def state_bytes(training: Training) -> int:
    """Return the bytes that the optimizer keeps between updates. PyTorch's step counters, which are
    scalars, are not counted."""
    return sum(slot.nbytes for slots in training.optimizer.state.values()
               for slot in slots.values() if isinstance(slot, Tensor) and slot.ndim)


def pairs_figure(by_arm: Losses, unit: str = "nats per token") -> dict:
    """Return the plotly spec: a point for each pair, at the first arm's loss (x) and the second
    arm's loss (y). Below the line of equal losses, the second arm has the lower loss."""
    (first, ours), (second, theirs) = by_arm.items()
    low, high = min(*ours, *theirs), max(*ours, *theirs)
    room = 0.1 * (high - low) or 0.01
    ends = [low - room, high + room]
    line = scatter(ends, ends, "equal losses", FAINT, hover=None)
    points = scatter(ours, theirs, "a pair of one seed", COLOURS[0], mode="markers",
                     hover=f"{first} %{{x:.4f}}, {second} %{{y:.4f}}", marker={"size": 11})
    return figure([line, points], f"{second} compared with {first}", height=380,
                  xaxis=axis(f"{first}, {unit}", range=ends),
                  yaxis=axis(f"{second}, {unit}", range=ends))
