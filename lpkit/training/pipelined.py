"""Forward and backward of an update on one rank of a pipeline: the rank computes its stages of
every micro-batch, in the order of the schedule.

In one process, each micro-batch ends before the next begins. In a pipeline, several are under way
at the same time. This has three consequences:

- The amax histories of delayed scaling advance once per update, with the largest amax of all
  micro-batches, instead of once per micro-batch.
- The counters from which stochastic rounding draws its noise are set before each action, so that a
  micro-batch gets the same noise as in one process.
- Only the last stage knows the loss, and sends it to all ranks.
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
class StageModel:
    """One stage, with the methods of a model that a loss calls (`hidden`, the call, `head`)."""

    model: nn.Module
    layers: range           # the layers of the stage
    x: Tensor | None        # input of the stage, (B, T, D); None: stage 0, which embeds the tokens

    def hidden(self, tokens: Tensor, **beside: Tensor) -> Tensor:
        return self.model.hidden(tokens, x=self.x, layers=self.layers, **beside)

    def __call__(self, tokens: Tensor, **beside: Tensor) -> Tensor:
        return self.model.head(self.hidden(tokens, **beside))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class PipelineExecutor(Executor):
    """Runs forward and backward of an update, or a forward for evaluation, on a pipeline's rank."""

    # several micro-batches are under way at a time, so an update cannot end between two of them
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
        share = [1 / m] * m         # loss of the batch = sum of share[i] * loss of micro-batch i
        if batch.weights is not None:
            whole = ranks.mean(batch.weights.sum()).clamp(min=LEAST_WEIGHT)
            share = [piece.weights.sum() / whole for piece in pieces]
        draws = [(t, t.clone()) for name, t in model.named_buffers() if name.endswith(".draws")]

        # Set the noise counters to the action's micro-batch: a schedule may interleave them.
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
        """Run all actions of `pipeline` on the micro-batches `pieces`. Return a number whose mean
        over all ranks is the loss of the batch.

        loss:   f(model, micro-batch) -> mean loss. Only ranks of the last stage call it. They are 1
                of p ranks, so their number is p times the loss; all other ranks return 0
        share:  the weight of each micro-batch's loss
        scale:  of loss scaling
        before: called before each action
        """
        config, last, model = self.config, len(self.layers) - 1, training.model
        B, T = pieces[0].tokens.shape
        like = torch.empty(B, T // config.parallel.tensor, config.model.D, device=training.device,
                           dtype=next(model.parameters()).dtype)
        total = torch.zeros((), device=training.device)

        def forward(stage: int, micro: int, x: Tensor | None) -> Tensor:
            piece, part = pieces[micro], StageModel(model, self.layers[stage], x)
            if stage < last:
                with training.decisions.autocast:
                    return part.hidden(piece.tokens, **piece.beside)
            nats = loss(part, piece) * share[micro]
            total.add_(nats.detach(), alpha=config.parallel.pipeline)
            return nats * scale

        # Autocast caches the 16-bit casts of weights until its outermost context ends. This outer
        # nesting keeps the cache, so that all micro-batches share the casts.
        torch.autocast_increment_nesting()
        try:
            pipeline.step(forward, like, before)
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        return total
