"""Remove from a model the layers that belong to other ranks of a pipeline.

The whole model is built first, so that its initial weights are the same as in one process. The
layers that stay keep their names, so that a run in any other layout can read the checkpoints. The
first stage also has the embedding, and the last stage has the final norm and the head. If the head
is tied to the embedding, both stages have the matrix, and `Sharding.reduce` sums its two gradients,
as Megatron-LM does (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).
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
    """Keep only the layers of this rank's stages. `twice` receives the name of each parameter that
    a second rank of the pipeline has, with the number of that rank in the pipeline."""

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
            # Learned positions are added to the embedding, so only the first stage needs them. The
            # tables of rotary positions are buffers, which every layer needs, so they stay.
            for part in model.positions.modules():
                for name in part._parameters:
                    part._parameters[name] = None
            if not (tied and last in mine):
                model.embed = nn.Identity()
        if last not in mine:
            model.norm, model.head = nn.Identity(), nn.Identity()
        return model
