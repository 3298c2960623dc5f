"""Techniques from outside, each one row and one function, for tests: in this process and on
ranks."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import experiments.distil
import experiments.length_ramp
import experiments.weighted  # noqa: F401
import lessons.rows.masked
import lessons.rows.optimizers  # noqa: F401  ten rules more
from lpkit.config import Config
from lpkit.contracts import Batch, Loss, ObjectiveContext, Parameter
from lpkit.parallel.cut import Cut
from lpkit.parallel.ranks import Ranks
from lpkit.techniques import data, objectives, optimizers
from lpkit.techniques.blocks import operations
from lpkit.techniques.objectives import Objective
from lpkit.techniques.operation import MicroBatch, Op
from lpkit.techniques.optimizers import Optimizer, OptimizerSettings, Slot
from lpkit.techniques.row import Settings
from lpkit.training.training import Training

HERE = f"{__name__}:"


# ---- optimizers

@dataclass(frozen=True, kw_only=True)
class TrustSettings(OptimizerSettings):
    trust: float = 0.01
    momentum: float = 0.9


def by_trust(w: Tensor, g: Tensor, slots: list[Tensor], s: TrustSettings, update: int,
             parameter: Parameter) -> None:
    """A learning rate for each parameter: the share of its norm in that of its gradient (You et al.
    2017, arXiv:1708.03888, algorithm 1)."""
    (m,) = slots
    weight, length = parameter.norm(w), parameter.norm(g)
    local = torch.where(weight > 0, s.trust * weight / (length + s.weight_decay * weight), 1.0)
    m.mul_(s.momentum).add_(g.add(w, alpha=s.weight_decay).mul_(local * s.lr))
    w.sub_(m)


OPTIMIZERS = {
    "trust": Optimizer(why="a trust ratio", settings=TrustSettings(),
                       slots=(Slot(name="momentum_buffer"),), takes_parameter=True,
                       temporary_bytes=4, implementation=HERE + "by_trust"),
}
SAYS = {    # what a Config says of each
    "trust": {"optimizer": "trust", "optimizer.lr": 1.0},
    "lars": {"optimizer": "lars", "optimizer.lr": 10.0},
    "normuon": {"optimizer": "normuon"},
    "soap": {"optimizer": "soap", "optimizer.every": 2, "optimizer.clip": 0.0},
    # the second update, which is measured, takes roots too
    "shampoo": {"optimizer": "shampoo", "optimizer.every": 1},
    "galore": {"optimizer": "galore", "optimizer.rank": 8, "optimizer.every": 2},
    # a gradient that is rounding, as that of keys' biases, moves nothing far
    "sophia": {"optimizer": "sophia", "optimizer.every": 2, "optimizer.eps": 1e-5},
    "lamb": {"optimizer": "lamb", "optimizer.lr": 1e-2},
    "muon": {"optimizer": "muon",
             "optimizer.groups": "embed*:lr_scale=0.1:beta2=0.99:optimizer=adamw"},
    "adafactor": {"optimizer": "adafactor"},
    "adam": {"optimizer": "adam", "optimizer.weight_decay": 0.01},
    "schedule-free": {"optimizer": "schedule-free", "optimizer.lr": 1e-2},
}
RULES = (*SAYS,)        # of this module and of the kit


# ---- objectives

@dataclass(frozen=True, kw_only=True)
class ZLoss(Settings):
    weight: float = 1e-4


def z_loss(settings: ZLoss, context: ObjectiveContext) -> Loss:
    """Logits are kept small: plus the square of the logarithm of their exponentials' sum (PaLM,
    section 5)."""
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with context.autocast:
            logits = model(batch.tokens, **batch.beside).float().flatten(0, 1)
        return (F.cross_entropy(logits, batch.targets.flatten()) + settings.weight
                * logits.logsumexp(-1).square().mean())
    return loss


def of_z_loss(s: MicroBatch, settings: ZLoss) -> tuple[Op, ...]:
    """The logits once more, and their gradient beside that of the cross-entropy."""
    return (replace(operations(s).loss, name="z", saved_bytes=2 * operations(s).loss.saved_bytes),)


OBJECTIVES = {
    "z-loss": Objective(settings=ZLoss(), implementation=HERE + "z_loss",
                        why="logits are kept small", operations=of_z_loss),
    **{name: objectives.OBJECTIVES[name] for name in ("weighted", "distil")},
}
SAYS |= {"weighted": {"objective": "weighted"},
         "z-loss": {"objective": "z-loss", "objective.weight": 0.01},
         "distil": {"objective": "distil"}}


# ---- the kit's own masked models, which no toy's next tokens are

HIDDEN = {"imports": "lessons.rows.masked", "model.attention": "bidirectional",
          "data.policy": "masked", "model.vocab": 257}
SAYS |= {"masked": HIDDEN}


# ---- sizes of updates

SIZES = {"ramp": data.SIZES["ramp"]}
SAYS |= {"ramp": {"sizes": "ramp", "sizes.short": True, "global_batch": 8, "grad_accum_steps": 4}}


ROWS = ((optimizers.OPTIMIZERS, OPTIMIZERS), (objectives.OBJECTIVES, OBJECTIVES),
        (data.SIZES, SIZES))


def add() -> None:
    """Into the kit's tables, for as long as this process lives."""
    for table, rows in ROWS:
        table.update(rows)


def trained(config: Config, ranks: Ranks | None = None, updates: int = 4) -> list:
    """Losses of some updates, the last validation loss, and the weights. Half of the way a second
    training goes on from what is saved."""
    training = Training.build(config, ranks=ranks)
    losses = []
    for step in range(updates):
        if step == updates // 2:
            saved = {name: whole(t).clone() if isinstance(t, (Tensor, Cut)) else t
                     for name, t in training.state_dict().items()}
        losses.append(training.update(step).loss.item())
    other = Training.build(config, ranks=ranks)
    other.load_state_dict(saved)
    assert losses[updates // 2:] == [other.update(step).loss.item()
                                     for step in range(updates // 2, updates)]
    state = training.state_dict()
    weights = [state[f"model/{name}"] for name in training.sharding.owned]
    return [losses, training.evaluate(),
            torch.cat([whole(t).detach().flatten() for t in weights]).tolist()]


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, Cut) else t
