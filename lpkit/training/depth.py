"""Blocks that an update leaves out, or that see some of its tokens: rows of `techniques.depth`.

Before an update each block's `forward` is put into one that says what passes it by; after it, the
block is as it was. It is around whatever else a block does (recomputation, a compiled function), so
that these meet the tokens that were kept, also the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpkit.techniques.blocks import operations
from lpkit.techniques.changes import GOVERNORS
from lpkit.techniques.depth import hashed
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.row import Settings

OF_TOKENS = 1       # what is drawn, beside layers


class Depth:
    """A contracts.Governor without a state."""

    def __init__(self, settings: Settings):
        self.settings, self.row = settings, GOVERNORS[settings.name]
        self.left_out: dict[int, nn.Module] = {}
        self.before: list[tuple[nn.Module, Callable | None]] = []   # and forwards of their own

    def shares(self, training: Any, step: int) -> tuple[float, ...]:
        config = training.config
        return self.row.shares(self.settings, config.model.L, config.steps, config.seed, step)

    def begin(self, training: Any, step: int) -> None:
        self.end(training, step)        # of an update that was given up
        config, shares = training.config, self.shares(training, step)
        scales = self.row.scales(self.settings, config.model.L, config.steps, step)
        for layer, block in enumerate(training.model.blocks):
            share, scale = shares[layer], scales[layer]
            if not share:       # nor are its weights gathered, where ranks have shards
                self.left_out[layer] = block
                training.model.blocks[layer] = PassedBy()
            elif share < 1 or scale != 1:
                self.before.append((block, vars(block).get("forward")))
                draw = hashed(config.seed, step, 0 if self.row.alike else layer, OF_TOKENS)
                block.forward = partial(partly, block.forward, share, scale, draw)

    def end(self, training: Any, step: int) -> None:
        for layer, block in self.left_out.items():
            training.model.blocks[layer] = block
        for block, forward in self.before:
            del block.forward
            if forward is not None:
                block.forward = forward
        self.before, self.left_out = [], {}

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass


class PassedBy(nn.Module):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x


def partly(forward: Callable[..., Tensor], share: float, scale: float, draw: int, x: Tensor,
           rotation: Any = None, cache: Any = None, layer: int = 0,
           documents: Tensor | None = None) -> Tensor:
    """The others pass it by. What turns q and k, and says the document of a token, goes along."""
    if share == 1:
        return torch.lerp(x, forward(x, rotation, cache, layer, documents), scale)
    kept = drawn(x.shape[1], share, draw).to(x.device)
    some = x[:, kept]
    rotation = None if rotation is None else tuple(t[kept] for t in rotation)
    documents = None if documents is None else documents[:, kept]
    y = forward(some, rotation, cache, layer, documents)
    return x.index_copy(1, kept, y if scale == 1 else torch.lerp(some, y, scale))


def drawn(tokens: int, share: float, draw: int) -> Tensor:
    """Which tokens are kept, in their order: the same ones for the same `draw`, on any device."""
    generator = torch.Generator("cpu").manual_seed(draw)
    order = torch.randperm(tokens, generator=generator, device="cpu")
    return order[:max(1, round(share * tokens))].sort().values


class Stacking(Depth):
    """Layers that do not run yet add nothing, in evaluation neither: until they are copied onto,
    the Linears that write to the residual stream are 0. Each rank copies what it owns."""

    def begin(self, training: Any, step: int) -> None:
        running = int(sum(self.shares(training, step)))
        below = int(sum(self.shares(training, step - 1))) if step else 0
        layers = training.config.model.L
        if running > below and step:
            self.set(training, range(below, running), below)
        if step == 0 or (running > below and self.settings.preserve):
            self.set(training, range(running if step == 0 else below, layers), 0)
        super().begin(training, step)

    @torch.no_grad()
    def set(self, training: Any, layers: range, down: int) -> None:
        """Copies layers from those `down` below; where that is 0, makes their outputs 0."""
        owned = training.sharding.owned
        writing = [f".{op.name}." for op in operations(MicroBatch(model=training.config.model)).block
                   if op.writes_residual]
        for layer in layers:
            here = f"blocks.{layer}."
            for name in [name for name in owned if name.startswith(here)]:
                if down:
                    owned[name].copy_(owned[f"blocks.{layer - down}." + name.removeprefix(here)])
                elif any(part in name for part in writing):
                    owned[name].zero_()
        training.sharding.spread()
