"""Whole weights on every rank. With ZeRO 0, gradients are averaged over ranks. With ZeRO 1, each
rank gets only the average of its rows, updates these rows and sends them to the other ranks.

    all-reduce       every rank gets the sum over ranks      each sends 2 (n - 1) / n of the bytes
    reduce-scatter   rank i gets part i of the sum           (n - 1) / n
    all-gather       every rank gets the parts of all ranks  (n - 1) / n

So ZeRO 1 sends as many bytes as ZeRO 0, and a rank stores 1 / n of the optimizer's state.

Gradients are sent in buckets. The last parameters come first, because backward computes their
gradients first. When a bucket is complete, its message is sent while backward continues (Li et al.
2020, section 3.2.3, https://arxiv.org/abs/2006.15704). torch's DistributedDataParallel does the
same by wrapping the model's `forward`. This module uses hooks of parameters instead, because a loss
in chunks calls other methods than `forward`. tests/parallel/test_parallel.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lpkit.parallel.ranks import all_gather, reduce_scatter
from lpkit.parallel.sharding import OfRows, Sharding
from lpkit.techniques.layouts import REDUCTIONS

Finish = Callable[[], None]
# Sends numbers of these parameters. The function that it returns waits, and uses what arrived.
Send = Callable[[list[nn.Parameter]], Finish]


def buckets(parameters: Sequence[nn.Parameter], most_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Divides parameters into buckets, in their order. A bucket has one dtype, and at most
    `most_bytes` bytes, unless it has only one parameter."""
    bucket: list[nn.Parameter] = []
    for p in parameters:
        if bucket and (p.dtype != bucket[0].dtype
                       or sum(member.nbytes for member in (*bucket, p)) > most_bytes):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket


class Messages:
    """Sends the gradients of `parameters` by `send`. The row of REDUCTIONS decides when, and in
    which sizes."""

    def __init__(self, parameters: Sequence[nn.Parameter], reduction: str, send: Send):
        row = REDUCTIONS[reduction]
        self.buckets = list(buckets(parameters[::-1], row.bucket_bytes))
        self.send, self.listening = send, False
        # parameters whose gradients are missing, by bucket
        self.waiting: dict[int, set[nn.Parameter]] = {}
        # the next bucket to send; messages that have not arrived
        self.next, self.under_way = 0, list[Finish]()
        if row.overlaps:
            for i, bucket in enumerate(self.buckets):
                for p in bucket:
                    p.register_post_accumulate_grad_hook(lambda p, i=i: self._has_gradient(i, p))

    def backward(self, last: bool) -> None:
        self.listening = last
        self.waiting = {i: set(bucket) for i, bucket in enumerate(self.buckets)}

    def _has_gradient(self, i: int, p: nn.Parameter) -> None:
        self.waiting[i].discard(p)
        # All ranks must send the buckets in the same order, or messages of different buckets would
        # meet.
        while self.listening and self.next < len(self.buckets) and not self.waiting[self.next]:
            self._send()

    def _send(self) -> None:
        """Sends the next bucket, after all but the last of the earlier messages have arrived: each
        message on its way holds memory."""
        while len(self.under_way) > 1:
            self.under_way.pop(0)()
        self.under_way.append(self.send(self.buckets[self.next]))
        self.next += 1

    def finish(self) -> None:
        self.listening = False
        while self.next < len(self.buckets):
            self._send()
        while self.under_way:
            self.under_way.pop(0)()
        self.next = 0


class Sending(Sharding):
    """Sends gradients by `messages`, which call `send` for each bucket."""

    messages: Messages
    send: Send

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        super().own(model)
        self.messages = Messages(list(self.owned_of), self.layout.reduction, self.send)
        return self.owned

    def backward(self, last: bool) -> None:
        self.messages.backward(last)

    def reduce(self) -> None:
        self.messages.finish()
        super().reduce()


class Replicas(Sending):
    def send(self, bucket: list[nn.Parameter]) -> Finish:
        """Makes the gradients views of the message, so that no number is in memory twice."""
        used = [p for p in bucket if p.grad is not None]
        if not used:            # parameters that the model does not use
            return lambda: None
        flat = _flatten_dense_tensors([p.grad for p in used])
        for p, part in zip(used, _unflatten_dense_tensors(flat, used)):
            p.grad = part
        return self.averaged(bucket, flat)

    def averaged(self, bucket: list[nn.Parameter], flat: Tensor) -> Finish:
        """Begins to average the numbers of a bucket over the replicas, in place."""
        work = dist.all_reduce(flat, group=self.ranks.groups["replicas"], async_op=True)

        def arrived() -> None:
            with self.ranks.waits:
                work.wait()
            flat.div_(self.layout.replicas)

        return arrived


class ShardedOptimizer(Sending, OfRows):
    """ZeRO 1. A message has the rows of all ranks one after another, each padded to equal size."""

    def mine(self, p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self.rows(p.detach()))

    def _lengths(self, bucket: list[nn.Parameter]) -> list[int]:
        """Returns how many numbers of each parameter each rank sends."""
        return [self.each(len(p)) * p[0].numel() for p in bucket]

    def _lies_as_it_travels(self, bucket: list[nn.Parameter]) -> bool:
        """Returns whether the bucket is one parameter that divides evenly, so that its memory is in
        the order of the message."""
        return len(bucket) == 1 and not len(bucket[0]) % self.size

    def send(self, bucket: list[nn.Parameter]) -> Finish:
        """Leaves the mean of this rank's rows of each gradient, and frees the whole gradients."""
        used = [p.grad is not None for p in bucket]
        grads = [p.grad if there else torch.zeros_like(p) for p, there in zip(bucket, used)]
        parts = (grads[0].reshape(self.size, -1) if self._lies_as_it_travels(bucket) else
                 torch._chunk_cat(grads, 0, self.size))     # (ranks, numbers)
        del grads
        for p in bucket:
            p.grad = None
        mine = parts.new_empty(parts.shape[1])
        work = reduce_scatter(mine, parts.view(-1), group=self.group, async_op=True)

        def arrived() -> None:
            nonlocal parts
            with self.ranks.waits:
                work.wait()
            parts = None        # the message has been sent, so its memory can be freed
            if self.layout.data > 1:
                with self.ranks.waits:
                    dist.all_reduce(mine, group=self.ranks.groups["data"])
            mine.div_(self.layout.replicas)
            for p, there, part in zip(bucket, used, mine.split(self._lengths(bucket))):
                rows = self.owned_of[p]
                rows.grad = part[:rows.numel()].view_as(rows) if there else None

        return arrived

    def spread(self) -> None:
        with torch.no_grad():
            for bucket in self.messages.buckets:
                self._gather(bucket)

    def _gather(self, bucket: list[nn.Parameter]) -> None:
        lengths = self._lengths(bucket)
        mine = bucket[0].new_zeros(sum(lengths))
        for p, part in zip(bucket, mine.split(lengths)):
            rows = self.owned_of[p].detach()
            part[:rows.numel()] = rows.view(-1)
        direct = self._lies_as_it_travels(bucket)
        parts = bucket[0] if direct else mine.new_empty(self.size, len(mine))
        with self.ranks.waits:
            all_gather(parts.view(-1), mine, group=self.group)
        if direct:
            return
        for p, part in zip(bucket, parts.split(lengths, dim=1)):
            p.view(-1).copy_(part.reshape(-1)[:p.numel()])
