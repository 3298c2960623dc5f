"""Modules of the rows in `depth.py`: layers that an update skips, or that see some of its tokens.

During an update, `Partly` takes the place of a layer. It is outside of everything else that wraps
the layer (recomputation, shards, a compiled function), so these see only the kept tokens, also when
they run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lessons.rows.depth import hashed
from lpkit.techniques.blocks import operations
from lpkit.techniques.changes import GOVERNORS
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.row import Settings


class Partly(nn.Module):
    """Runs the block on a share of the tokens; the other tokens skip it. Rotations and document ids
    are selected for the kept tokens. `block`: None skips all tokens; `keep`: the probability by
    which the block's output is divided; `draw`: the seed of the kept tokens, which gives the same
    tokens on any device."""

    def __init__(self, block: nn.Module | None, share: float, keep: float, draw: int):
        super().__init__()
        self.block, self.share, self.keep, self.draw = block, share, keep, draw

    def kept(self, tokens: int) -> Tensor:
        """Return the positions of the kept tokens, in order."""
        generator = torch.Generator("cpu").manual_seed(self.draw)
        order = torch.randperm(tokens, generator=generator, device="cpu")
        return order[:max(1, round(self.share * tokens))].sort().values

    def forward(self, x: Tensor, rotation: Any = None, cache: Any = None, layer: int = 0,
                documents: Tensor | None = None) -> Tensor:
        if self.block is None:
            return x
        if self.share == 1:
            return torch.lerp(x, self.block(x, rotation, cache, layer, documents), 1 / self.keep)
        kept = self.kept(x.shape[1]).to(x.device)
        rotation = None if rotation is None else tuple(t[kept] for t in rotation)
        documents = None if documents is None else documents[:, kept]
        return x.index_copy(1, kept, self.block(x[:, kept], rotation, cache, layer, documents))


class Depth:
    """The governor of a row: wraps the layers at the start of an update, and unwraps them at its
    end. It has no state."""

    def __init__(self, settings: Settings):
        self.settings, self.row = settings, GOVERNORS[settings.name]
        self.whole: list[nn.Module] = []

    def shares(self, training: Any, step: int) -> tuple[float, ...]:
        config = training.config
        return self.row.shares(self.settings, config.model.L, config.steps, config.seed, step)

    def begin(self, training: Any, step: int) -> None:
        self.end(training, step)        # in case an update was aborted
        config, blocks = training.config, training.model.blocks
        self.whole, keeps = list(blocks), (1.0,) * len(blocks)
        if self.row.keeps:
            keeps = self.row.keeps(self.settings, len(blocks), config.steps, step)
        for layer, share in enumerate(self.shares(training, step)):
            if share < 1 or keeps[layer] != 1:
                draw = hashed(config.seed, step, 0 if self.row.alike else layer, 1)
                blocks[layer] = Partly(blocks[layer] if share else None, share, keeps[layer], draw)

    def end(self, training: Any, step: int) -> None:
        for layer, block in enumerate(self.whole):
            training.model.blocks[layer] = block
        self.whole = []

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass


class Stacking(Depth):
    """The governor `stack`. The output matrices of layers that do not run yet are 0, so that these
    layers add nothing in evaluation either. When the model grows, each rank copies the rows that it
    owns."""

    @torch.no_grad()
    def begin(self, training: Any, step: int) -> None:
        running = int(sum(self.shares(training, step)))
        below = int(sum(self.shares(training, step - 1))) if step else running
        owned = training.sharding.owned
        outputs = [op.name for op in operations(MicroBatch(model=training.config.model)).block
                   if op.cut == "row"]
        for layer in range(below, running if step else training.config.model.L):
            here, there = f"blocks.{layer}.", f"blocks.{layer - below}."
            for name in [name.removeprefix(here) for name in owned if name.startswith(here)]:
                if step:
                    owned[here + name].copy_(owned[there + name])
                if name.rpartition(".")[0] in outputs and (not step or self.settings.preserve):
                    owned[here + name].zero_()
        if running > below or not step:
            training.sharding.spread()
        super().begin(training, step)
