"""Distillation: the student learns the next token and its teacher's probabilities (Hinton et al.
2015, arXiv:1503.02531). In this folder, run:

    PYTHONPATH=. lpkit train cpu-3m --import distil objective=distil objective.teacher=runs/TEACHER
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.contracts import Batch, Loss, ObjectiveContext
from lpkit.errors import ConfigError
from lpkit.techniques.blocks import operations
from lpkit.techniques.objectives import OBJECTIVES, Objective
from lpkit.techniques.operation import MicroBatch, Op
from lpkit.techniques.row import Settings
from lpkit.training.runs import Run


@dataclass(frozen=True, kw_only=True)
class Distil(Settings):
    teacher: str = ""       # the folder of a run
    share: float = 0.5      # weight of the teacher's part in the loss
    temperature: float = 2.0


def teacher_of(settings: Distil) -> Run:
    if not settings.teacher:
        raise ConfigError("objective=distil needs objective.teacher, the folder of a trained run")
    return Run.open(Path(settings.teacher))


def loss_of(settings: Distil, context: ObjectiveContext) -> Loss:
    """Return the loss function (1 - share) cross-entropy + share T^2 KL(teacher || student). For
    KL, both models' logits are divided by the temperature T."""
    from lpkit.training.sampling import trained

    run = teacher_of(settings)
    if context.tokenizer and run.tokenizer != context.tokenizer:
        raise ConfigError(f"objective.teacher={settings.teacher} has another tokenizer, so its "
                          f"probabilities belong to other tokens; set data.tokenizer="
                          f"{settings.teacher}, which is the tokenizer of the teacher")
    teacher = trained(run, str(context.device)).model
    T = settings.temperature

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with context.autocast:
            logits = model(batch.tokens, **batch.beside).float().flatten(0, 1)
            with torch.no_grad():
                targets = teacher(batch.tokens, **batch.beside).float().flatten(0, 1)
        divergence = F.kl_div((logits / T).log_softmax(-1), (targets / T).log_softmax(-1),
                              log_target=True, reduction="batchmean")
        return ((1 - settings.share) * F.cross_entropy(logits, batch.targets.flatten())
                + settings.share * T * T * divergence)
    return loss


def operations_of(s: MicroBatch, settings: Distil) -> tuple[Op, ...]:
    """Return the operations that distillation adds, for predictions: the teacher's forward, which
    saves nothing for backward, and the second loss."""
    model = teacher_of(settings).config.model
    if model.vocab != s.model.vocab:
        raise ConfigError(f"objective.teacher={settings.teacher} has a vocabulary of "
                          f"{model.vocab:,} tokens and the student has {s.model.vocab:,}; use one "
                          f"tokenizer for both")
    ops = operations(replace(s, model=model))
    forward = (ops.embed, ops.positions, *ops.block * model.L, ops.norm,
               replace(ops.head, params=0))
    second = replace(ops.loss, moved_bytes=3 * ops.loss.moved_bytes,
                     saved_bytes=3 * ops.loss.saved_bytes)
    return (*(replace(op, saved_bytes=0) for op in forward), second)


OBJECTIVES["distil"] = Objective(
    settings=Distil(), implementation=f"{__name__}:loss_of", operations=operations_of,
    why="the next token and a teacher's probabilities")
