"""What ranks do in tests of pipelines; each is `f(place, told)`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from lpkit.parallel.pipeline import Pipeline, order
from lpkit.parallel.processes import Place
from lpkit.techniques.pipelines import SCHEDULES

QUEUE: ContextVar[list | None] = ContextVar("queue", default=None)
WIDTH, ROWS = 16, 4


@contextmanager
def deferring(queue: list) -> Iterator[None]:
    """Around a forward: its backward leaves the gradients of weights in `queue`."""
    token = QUEUE.set(queue)
    yield
    QUEUE.reset(token)


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


class Nap(torch.autograd.Function):
    """Sleeps in forward, in dx and in dw."""

    @staticmethod
    def forward(ctx, x, w, seconds):
        ctx.seconds, ctx.queue = seconds, QUEUE.get()
        time.sleep(seconds[0])
        return x + w

    @staticmethod
    def backward(ctx, g):
        time.sleep(ctx.seconds[1])
        if ctx.queue is None:
            time.sleep(ctx.seconds[2])
        else:
            ctx.queue.append(lambda: time.sleep(ctx.seconds[2]))
        return g, torch.zeros(()), None


@contextmanager
def joined(place: Place) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.store, rank=place.rank, world_size=place.world, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def pipeline(place: Place, name: str, chunks: int, m: int, like: torch.Tensor) -> Pipeline:
    return Pipeline(order(name, place.world, chunks, m), place.rank, like, groups=(dist.group.WORLD,) * 2, deferring=deferring)


def slept(place: Place, told: dict) -> dict[str, float]:
    """Seconds of an update of stages that sleep, by schedule: the less of two."""
    w, found = torch.zeros((), requires_grad=True), {}
    with joined(place):
        for name, chunks, m in told["cases"]:
            run = pipeline(place, name, chunks, m, torch.zeros(1))
            taken, seconds = [], [one / chunks for one in told["seconds"]]
            for _ in range(2):
                dist.barrier()
                began = time.perf_counter()
                run.step(lambda stage, micro, x, s=seconds: Nap.apply(torch.zeros(1) if x is None else x, w, s))
                dist.barrier()
                taken.append(time.perf_counter() - began)
            found[name] = min(taken)
    return found


def layers(stages: int) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(WIDTH, WIDTH, generator=rng) / WIDTH**0.5) for _ in range(stages)]


def batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(4)
    return torch.randn(m, ROWS, WIDTH, generator=rng), torch.randn(m, ROWS, WIDTH, generator=rng)


def whole(stages: int, m: int, backwards: range) -> list[torch.Tensor]:
    """The gradients of one process that has all stages, whose micro-batches go backward in this order."""
    weights, (x, target) = layers(stages), batch(m)
    for micro in backwards:
        y = x[micro]
        for w in weights:
            y = torch.tanh(Product.apply(y, w))
        ((y - target[micro]).square().mean() / m).backward()
    return [w.grad for w in weights]


def gradients(place: Place, told: dict) -> dict[str, dict[int, list]]:
    """Those of this rank's stages, by schedule, of the kit's runtime and of PyTorch's."""
    found = {}
    if told["untagged"]:        # as on NCCL: messages come in the order in which they were sent
        Pipeline._tag = lambda self, named: 0
    with joined(place):
        for name, chunks, m in told["cases"]:
            stages, (x, target) = place.world * chunks, batch(m)
            ids = SCHEDULES[name].stages(place.rank, place.world, chunks)
            weights = layers(stages)

            def forward(stage, micro, got, weights=weights, x=x, target=target, m=m):
                y = torch.tanh(Product.apply(x[micro] if got is None else got, weights[stage]))
                return (y - target[micro]).square().mean() / m if stage == len(weights) - 1 else y

            run = pipeline(place, name, chunks, m, torch.zeros(ROWS, WIDTH))
            run.step(forward)
            ours = {stage: weights[stage].grad.clone() for stage in ids}
            assert [stage for stage in range(stages) if weights[stage].grad is not None] == sorted(ids)
            for w in weights:
                w.grad = None
            run.step(forward)       # of the first nothing is left
            assert all(torch.equal(weights[stage].grad, ours[stage]) for stage in ids)
            theirs = torchs(place, name, ids, stages, m) if told["peer"] else ours
            found[name] = {stage: [ours[stage].tolist(), theirs[stage].tolist()] for stage in ids}
    return found


class Layer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.w))


def torchs(place: Place, name: str, ids: list[int], stages: int, m: int) -> dict[int, torch.Tensor]:
    kind, weights, (x, target) = SCHEDULES[name].load(), layers(stages), batch(m)
    parts = [PipelineStage(Layer(weights[stage]), stage, stages, torch.device("cpu")) for stage in ids]
    made = kind(parts[0] if issubclass(kind, PipelineScheduleSingle) else parts, n_microbatches=m,
                loss_fn=lambda y, target: (y - target).square().mean())
    more = {"target": target.flatten(0, 1), "losses": []} if stages - 1 in ids else {}
    made.step(*((x.flatten(0, 1),) if 0 in ids else ()), **more)
    return {stage: weights[stage].grad for stage in ids}
