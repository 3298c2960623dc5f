"""A rank of a pipeline keeps only the layers of its stages.

The model is first built whole, so that its weights start as in one process. Its parts keep their
names, so that checkpoints fit any layout. The first stage has the embedding, the last stage has the
norm and the head. If embedding and head share one matrix, both stages have it, and their gradients
are summed, as in Megatron-LM (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).
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
    """Keeps the layers of this rank's stages. Adds to `twice` each parameter that another rank of
    the pipeline has, too, with that rank."""

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
            # rotary positions, which each layer needs, are not parameters, and stay
            for part in model.positions.modules():
                for name in part._parameters:
                    part._parameters[name] = None
            if not (tied and last in mine):
                model.embed = nn.Identity()
        if last not in mine:
            model.norm, model.head = nn.Identity(), nn.Identity()
        return model
