"""Compares your technique with the kit's: both are trained on pairs with equal seeds, and the
referee judges these few pairs. `lpkit new experiment` writes notebooks that use this module. The
result that counts is that of `lpkit claim`, which tunes both arms and uses as many seeds as an
effect needs (docs/claim.md).
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
SIZES = {"smoke": (SMOKE, 2), "cpu": (SMALL, 3), "gpu": ({"steps": 200}, 5)}    # and pairs, by tier
Losses = Mapping[str, Sequence[float]]


def trained(config: Config) -> Training:
    """Run all updates of `config` without writing a folder."""
    training = Training.build(config)
    for step in range(config.steps):
        training.update(step)
    return training


def losses(arms: Mapping[str, Config], pairs: int,
           watch: Callable[[Sequence], Iterable] = iter) -> dict[str, list[float]]:
    """Returns the validation losses of each arm by seed; a seed sets the initialisation and the
    order of the data."""
    by_arm: dict[str, list[float]] = {name: [] for name in arms}
    for seed, name in watch([(seed, name) for seed in range(pairs) for name in arms]):
        by_arm[name].append(trained(arms[name].replace({"seed": seed})).evaluate())
    return by_arm


def verdict(by_arm: Losses) -> referee.Verdict:
    """Return the referee's verdict on two arms, without tuning and by one look."""
    return referee.look(*by_arm.values(), referee.ALPHA)


def state_bytes(training: Training) -> int:
    """Return the bytes that the optimizer keeps between updates, without PyTorch's counters."""
    return sum(slot.nbytes for slots in training.optimizer.state.values()
               for slot in slots.values() if isinstance(slot, Tensor) and slot.ndim)


def pairs_figure(by_arm: Losses, unit: str = "nats per token") -> dict:
    """One point per pair; the second arm won a pair whose point is below the line."""
    (first, ours), (second, theirs) = by_arm.items()
    low, high = min(*ours, *theirs), max(*ours, *theirs)
    room = 0.1 * (high - low) or 0.01
    ends = [low - room, high + room]
    line = scatter(ends, ends, "both the same", FAINT, hover=None)
    points = scatter(ours, theirs, "a pair of one seed", COLOURS[0], mode="markers",
                     hover=f"{first} %{{x:.4f}}, {second} %{{y:.4f}}", marker={"size": 11})
    return figure([line, points], f"{second} beside {first}", height=380,
                  xaxis=axis(f"{first}, {unit}", range=ends),
                  yaxis=axis(f"{second}, {unit}", range=ends))
