"""A rank of a pipeline keeps the layers of its stages.

The model is made whole, so that weights begin as in one process, and its parts keep their names, so
that checkpoints fit any layout. The first stage has the embedding, the last one norm and head.
Where these two are one matrix, both have it, and their gradients are summed, as in Megatron-LM
(Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from lpkit.contracts import Stage, Transform
from lpkit.parallel.ranks import Ranks
from lpkit.techniques.pipelines import PIPELINES
from lpkit.techniques.stages import stage_layers


@dataclass(frozen=True, kw_only=True)
class KeepStages(Transform):
    """Says in `twice`, which fills up, which other rank of the pipeline has a parameter, too."""

    ranks: Ranks
    twice: dict[str, int]
    stage = Stage.PIPELINE

    def __call__(self, model: nn.Module) -> nn.Module:
        layout = self.ranks.layout
        rank, size = dist.get_rank(self.ranks.groups["pipeline"]), layout.pipeline
        mine = PIPELINES[layout.schedule].stages(rank, size, layout.interleave)
        last = size * layout.interleave - 1
        for stage, its in enumerate(stage_layers(model.config, layout)):
            for layer in its if stage not in mine else ():
                delattr(model.blocks, str(layer))
        tied = model.head.weight is model.embed.weight
        if tied and (0 in mine) != (last in mine):
            self.twice["embed.weight"] = 0 if last in mine else size - 1
        if 0 not in mine:
            for part in model.positions.modules():      # what turns q and k in each layer stays
                for name in part._parameters:
                    part._parameters[name] = None
            if not (tied and last in mine):
                model.embed = nn.Identity()
        if last not in mine:
            model.norm, model.head = nn.Identity(), nn.Identity()
        return model
