"""An update of a pipeline: this rank computes its stages of every micro-batch, in the order of the
schedule.

Several micro-batches are in the pipeline at the same time. So histories of casts advance once per
update, by the largest amax of all its micro-batches, and each action draws the noise that its
micro-batch has in one process. The last stage knows the loss, and sends it to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.parallel.pipeline import Pipeline, order
from lpkit.parallel.ranks import Ranks
from lpkit.techniques.pipelines import PIPELINES, Action
from lpkit.techniques.stages import stage_layers
from lpkit.training.steps import LEAST_WEIGHT, Executor, Phases, advance


@dataclass(frozen=True)
class Part:
    """The model of one stage, as a loss calls it. It reads `x` instead of tokens."""

    model: nn.Module
    layers: range
    x: Tensor | None

    def hidden(self, tokens: Tensor, **beside: Tensor) -> Tensor:
        return self.model.hidden(tokens, x=self.x, layers=self.layers, **beside)

    def __call__(self, tokens: Tensor, **beside: Tensor) -> Tensor:
        return self.model.head(self.hidden(tokens, **beside))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class PipelineExecutor(Executor):
    # several micro-batches are in the pipeline, so an update cannot stop between them
    in_parts = False

    def __init__(self, config: Config, ranks: Ranks):
        name, p, v = (config.parallel.schedule, config.parallel.pipeline,
                      config.parallel.interleave)
        self.config, self.ranks, groups = config, ranks, ranks.groups
        self.layers = stage_layers(config.model, config.parallel)
        new_pipeline = partial(Pipeline, rank=dist.get_rank(groups["pipeline"]), waits=ranks.waits,
                               groups=(groups["pipeline"], groups["pipeline down"]))
        self.updates = new_pipeline(order(name, p, v, config.micro_batches))
        self.evaluations = new_pipeline({
            rank: [(stage, "F", 0) for stage in PIPELINES[name].stages(rank, p, v)]
            for rank in range(p)})

    @property
    def plain(self) -> Executor:
        return self

    def forward_backward(self, training: Any, batch: Batch, *, phases: Phases) -> Tensor:
        m, ranks, model = self.config.micro_batches, self.ranks, training.model
        pieces, scaler = batch.chunk(m), training.scaler
        scale = 1.0 if scaler is None else scaler.scale / ranks.layout.replicas
        share = [1 / m] * m         # weight of each micro-batch's loss in the batch's loss
        if batch.weights is not None:
            whole = ranks.mean(batch.weights.sum()).clamp(min=LEAST_WEIGHT)
            share = [piece.weights.sum() / whole for piece in pieces]
        draws = [(t, t.clone()) for name, t in model.named_buffers() if name.endswith(".draws")]

            # Set the noise counters to this micro-batch: a schedule may interleave micro-batches.
        def before(action: Action) -> None:
            for counter, begun in draws:
                counter.copy_(begun + action[2])

        training.sharding.backward(last=False)
        with training.cached_casts(model), phases("backward"):
            loss = self._run(self.updates, training, training.objective, pieces, share, scale,
                             before)
            training.sharding.reduce()
        before((0, "W", m - 1))     # leave the counters as after the last micro-batch
        group = ranks.groups.get("stage")
        advance(model, group and partial(ranks.largest, group=group))
        if scaler is not None:
            scaler.unscale(training.sharding.owned.values(), ranks)
        return ranks.mean(loss)

    def loss(self, training: Any, batch: Batch) -> Tensor:
        return self._run(self.evaluations, training, training.loss, [batch], [1.0])

    def _run(self, pipeline: Pipeline, training: Any, loss: Callable, pieces: list[Batch],
             share: list, scale: Any = 1.0, before: Callable = lambda action: None) -> Tensor:
        """Returns a loss whose mean over the ranks is the batch's loss. Only the last stage's ranks
        know the loss, so they add it once for each stage."""
        config, last, model = self.config, len(self.layers) - 1, training.model
        B, T = pieces[0].tokens.shape
        like = torch.empty(B, T // config.parallel.tensor, config.model.D, device=training.device,
                           dtype=next(model.parameters()).dtype)
        total = torch.zeros((), device=training.device)

        def forward(stage: int, micro: int, x: Tensor | None) -> Tensor:
            piece, part = pieces[micro], Part(model, self.layers[stage], x)
            if stage < last:
                with training.decisions.autocast:
                    return part.hidden(piece.tokens, **piece.beside)
            nats = loss(part, piece) * share[micro]
            total.add_(nats.detach(), alpha=config.parallel.pipeline)
            return nats * scale

        torch.autocast_increment_nesting()      # all micro-batches share the casts of weights
        try:
            pipeline.step(forward, like, before)
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        return total
