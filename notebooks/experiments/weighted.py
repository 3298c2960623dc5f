"""A weight for each token of the loss, from a file of scores, one per token. In this folder, after
`scores_of_rare_tokens` (below) or your own program has written the scores, run:

    PYTHONPATH=. lpkit train cpu-3m --import weighted objective=weighted data.scores=scores.npy
"""

from pathlib import Path

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import Config
from lpkit.contracts import Batch, Loss, ObjectiveContext
from lpkit.datasets import prepare
from lpkit.techniques.objectives import OBJECTIVES, Objective
from lpkit.techniques.row import Settings


def loss_of(settings: Settings, context: ObjectiveContext) -> Loss:
    """Return the loss function: the mean over tokens of score times cross-entropy."""
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with context.autocast:
            logits = model(batch.tokens, **batch.beside).float().flatten(0, 1)
        nats = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        return (nats * batch.extra["scores"].flatten()).mean()
    return loss


def scores_of_rare_tokens(config: Config, path: Path) -> Config:
    """Write a score for each training token into the file `path`, and return the Config that reads
    it. A score is count^-1/4, divided by the mean of all scores, so rare tokens weigh more."""
    tokens = prepare(config.data, vocab=config.model.vocab).train
    counts = np.bincount(tokens, minlength=config.model.vocab)
    scores = counts[tokens].astype(np.float32) ** -0.25
    np.save(path, scores / scores.mean())
    return config.replace({"data.scores": str(path)})


OBJECTIVES["weighted"] = Objective(implementation=f"{__name__}:loss_of",
                                   why="each token counts as its score says")
