"""Techniques from outside, each one row and one function, for tests: in this process and on
ranks."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lessons.rows.masked
import lessons.rows.optimizers  # noqa: F401  ten rules more
from lpkit.config import Config
from lpkit.contracts import Batch, Loss, ObjectiveContext, Parameter
from lpkit.datasets import prepare
from lpkit.parallel.cut import Cut
from lpkit.parallel.ranks import Ranks
from lpkit.techniques import data, objectives, optimizers
from lpkit.techniques.blocks import operations
from lpkit.techniques.data import Sizes
from lpkit.techniques.objectives import Objective
from lpkit.techniques.operation import MicroBatch, Op
from lpkit.techniques.optimizers import Optimizer, OptimizerSettings, Slot
from lpkit.techniques.row import Settings
from lpkit.training.runs import Run
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
                       slots=(Slot(name="momentum_buffer"),), told=True, temporary_bytes=4,
                      implementation=HERE + "by_trust"),
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


@dataclass(frozen=True, kw_only=True)
class Distil(Settings):
    teacher: str = ""       # the folder of a run
    share: float = 0.5      # of the teacher's words in the loss
    temperature: float = 2.0


def distil(settings: Distil, context: ObjectiveContext) -> Loss:
    """The teacher's probabilities beside the next token (Hinton et al. 2015, arXiv:1503.02531)."""
    from lpkit.training.sampling import trained as model_of

    teacher, T = model_of(Run(Path(settings.teacher)),
                          str(context.device)).model, settings.temperature

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with context.autocast:
            logits = model(batch.tokens, **batch.beside).float().flatten(0, 1)
            with torch.no_grad():
                theirs = teacher(batch.tokens, **batch.beside).float().flatten(0, 1)
        far = F.kl_div((logits / T).log_softmax(-1), (theirs / T).log_softmax(-1), log_target=True,
                       reduction="batchmean")
        return ((1 - settings.share) * F.cross_entropy(logits, batch.targets.flatten())
                + settings.share * T * T * far)
    return loss


def of_teacher(s: MicroBatch, settings: Distil) -> tuple[Op, ...]:
    """The teacher's forward: nothing of it is kept."""
    model = Run(Path(settings.teacher)).config.model
    ops = operations(replace(s, model=model))
    blocks = (ops.embed, ops.positions, *ops.block * model.L, ops.norm, replace(ops.head, params=0))
    saved = replace(ops.loss, moved_bytes=3 * ops.loss.moved_bytes,
                    saved_bytes=3 * ops.loss.saved_bytes)
    return (*(replace(op, saved_bytes=0) for op in blocks), saved)


def weighted(settings: Settings, context: ObjectiveContext) -> Loss:
    """Each token counts as much as its score says."""
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with context.autocast:
            logits = model(batch.tokens, **batch.beside).float().flatten(0, 1)
        nats = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        return (nats * batch.extra["scores"].flatten()).mean()
    return loss


def prepared_scores(config: Config, folder: Path) -> Config:
    """Rare tokens count more. In a run they might be another model's."""
    tokens = prepare(config.data, vocab=config.model.vocab).train
    scores = np.bincount(tokens, minlength=256)[tokens].astype(np.float32) ** -0.25
    np.save(folder / "scores.npy", scores / scores.mean())
    return config.replace({"data.scores": str(folder / "scores.npy")})


OBJECTIVES = {
    "weighted": Objective(implementation=HERE + "weighted", why="tokens count by their scores"),
    "z-loss": Objective(settings=ZLoss(), implementation=HERE + "z_loss",
                        why="logits are kept small",
                        operations=of_z_loss),
    "distil": Objective(settings=Distil(), implementation=HERE + "distil",
                        why="a teacher's probabilities", operations=of_teacher),
}
SAYS |= {"weighted": {"objective": "weighted"},
         "z-loss": {"objective": "z-loss", "objective.weight": 0.01},
         "distil": {"objective": "distil"}}


# ---- the kit's own masked models, which no toy's next tokens are

HIDDEN = {"imports": "lessons.rows.masked", "model.attention": "bidirectional",
          "data.policy": "masked", "model.vocab": 257}
SAYS |= {"masked": HIDDEN, "masked-autoencoder": HIDDEN | {"data.policy.share": 0.75,
    "model.changes": "masked-autoencoder:encoder_layers=1"}}


# ---- sizes of updates

@dataclass(frozen=True, kw_only=True)
class Ramp(Settings):
    until: int = 2          # updates of half the sequences
    short: bool = False     # and of half the tokens of each


def ramp(step: int, settings: Ramp, sequences: int, context: int) -> tuple[int, int]:
    if step >= settings.until:
        return sequences, context
    return sequences // 2, context // 2 if settings.short else context


SIZES = {"ramp": Sizes(settings=Ramp(), at=ramp, why="half the batch at first")}
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
