"""What ranks do in tests of pipelines; each is `f(place, job)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import lessons.rows.optimizers
import lessons.rows.pipelines  # noqa: F401  ten rules and four orders more
from lpkit.config import Config
from lpkit.parallel import meeting
from lpkit.parallel.pipeline import Pipeline, order
from lpkit.parallel.processes import Place
from lpkit.precision.deferred import QUEUE
from lpkit.precision.linear import scaled_linears
from lpkit.techniques.pipelines import PIPELINES
from lpkit.training.training import Training

WIDTH, ROWS = 16, 4


class Product(torch.autograd.Function):
    """x @ w.T, whose dw waits where a queue is at hand."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.queue = QUEUE.get()
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        if ctx.queue is None:
            return g @ w, g.T @ x
        ctx.queue.append(lambda: torch.autograd.backward(w, g.T @ x))
        return g @ w, None


@contextmanager
def joined(place: Place) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.store, rank=place.rank,
                            world_size=place.world, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def pipeline(place: Place, name: str, chunks: int, m: int) -> Pipeline:
    return Pipeline(order(name, place.world, chunks, m), place.rank, groups=(dist.group.WORLD,) * 2)


def layers(stages: int) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(WIDTH, WIDTH, generator=rng) / WIDTH**0.5)
            for _ in range(stages)]


def batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(4)
    return torch.randn(m, ROWS, WIDTH, generator=rng), torch.randn(m, ROWS, WIDTH, generator=rng)


def whole(stages: int, m: int, backwards: range) -> list[torch.Tensor]:
    """The gradients of one process that has all stages, whose micro-batches go backward in this
    order."""
    weights, (x, target) = layers(stages), batch(m)
    for micro in backwards:
        y = x[micro]
        for w in weights:
            y = torch.tanh(Product.apply(y, w))
        ((y - target[micro]).square().mean() / m).backward()
    return [w.grad for w in weights]


def gradients(place: Place, job: dict) -> dict[str, dict[int, list]]:
    """Those of this rank's stages, by schedule, of the kit's runtime and of PyTorch's."""
    by_schedule = {}
    if job["untagged"]:        # as on NCCL: messages come in the order in which they were sent
        Pipeline._tag = lambda self, named: 0
    with joined(place):
        for name, chunks, m in job["cases"]:
            stages, (x, target) = place.world * chunks, batch(m)
            ids = PIPELINES[name].stages(place.rank, place.world, chunks)
            weights = layers(stages)

            def forward(stage, micro, got, weights=weights, x=x, target=target, m=m):
                y = torch.tanh(Product.apply(x[micro] if got is None else got, weights[stage]))
                return (y - target[micro]).square().mean() / m if stage == len(weights) - 1 else y

            run = pipeline(place, name, chunks, m)
            run.step(forward, x[0])
            ours = {stage: weights[stage].grad.clone() for stage in ids}
            reached = [stage for stage in range(stages) if weights[stage].grad is not None]
            assert reached == sorted(ids)
            for w in weights:
                w.grad = None
            run.step(forward, x[0])     # of the first nothing is left
            assert all(torch.equal(weights[stage].grad, ours[stage]) for stage in ids)
            theirs = torchs(place, name, ids, stages, m) if job["peer"] else ours
            by_schedule[name] = {stage: [ours[stage].tolist(), theirs[stage].tolist()]
                                 for stage in ids}
    return by_schedule


class Layer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.w))


def torchs(place: Place, name: str, ids: list[int], stages: int, m: int) -> dict[int, torch.Tensor]:
    kind, weights, (x, target) = PIPELINES[name].load(), layers(stages), batch(m)
    parts = [PipelineStage(Layer(weights[stage]), stage, stages, torch.device("cpu"))
             for stage in ids]
    schedule = kind(parts[0] if issubclass(kind, PipelineScheduleSingle) else parts,
                    n_microbatches=m, loss_fn=lambda y, target: (y - target).square().mean())
    more = {"target": target.flatten(0, 1), "losses": []} if stages - 1 in ids else {}
    schedule.step(*((x.flatten(0, 1),) if 0 in ids else ()), **more)
    return {stage: weights[stage].grad for stage in ids}


def trained(training: Training, steps: int) -> list[list[float]]:
    """Loss and gradient norm of each update, and at last the loss of evaluation."""
    done = [training.update(step) for step in range(steps)]
    return [*([update.loss.item(), update.grad_norm.item()] for update in done),
            [training.evaluate()]]


def built(place: Place, job: dict) -> Iterator[Training]:
    """Yields a training of each config, among ranks that meet for it."""
    torch.set_num_threads(1)
    for i, given in enumerate(job["configs"]):
        config = Config.from_dict(given)
        with meeting.joined(config, local_rank=place.local_rank,
                            **place.among | {"init_method": f"{place.store}-{i}"}) as ranks:
            yield Training.build(config, ranks=ranks)


def trains(place: Place, job: dict) -> list[list[list[float]]]:
    return [trained(training, job["steps"]) for training in built(place, job)]


def products(place: Place, job: dict) -> list[int]:
    """How many products in low precision this rank computes in an update of each config."""
    return [counted(training) for training in built(place, job)]


def counted(training: Training) -> int:
    kind, count = type(next(scaled_linears(training.model)).arithmetic), 0
    product = kind.product

    def counts(self, *args, **more):
        nonlocal count
        count += 1
        return product(self, *args, **more)

    with patch.object(kind, "product", counts):
        training.update(0)
    return count
