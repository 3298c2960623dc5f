"""ZeRO 0 and 1, where every rank has the whole weights.

With ZeRO 0, every rank gets the mean of all gradients over ranks. With ZeRO 1, a rank gets only the
mean gradients of its rows, updates these rows, and sends them to the other ranks. Each of n ranks
sends, as a share of the bytes of all gradients or weights:

    all-reduce       every rank gets the sum over ranks      2 (n - 1) / n
    reduce-scatter   rank i gets part i of the sum           (n - 1) / n
    all-gather       every rank gets the parts of all ranks  (n - 1) / n

So ZeRO 1 (reduce-scatter and all-gather) sends as many bytes as ZeRO 0 (all-reduce), and a rank
stores 1 / n of the optimizer's state.

Gradients are sent in buckets: groups of parameters whose gradients are one message. The first
bucket has the last parameters, because backward computes their gradients first. When a bucket has
all of its gradients, it is sent while backward continues (Li et al. 2020, section 3.2.3,
https://arxiv.org/abs/2006.15704). PyTorch's DistributedDataParallel does the same by wrapping the
model's `forward`. This module uses hooks on parameters, because a loss in chunks calls other
methods than `forward`. tests/parallel/test_parallel.py compares it with DistributedDataParallel.
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

Finish = Callable[[], None]     # waits for one message, and stores what has arrived
# begins to send the gradients of the parameters of a bucket
Send = Callable[[list[nn.Parameter]], Finish]


def buckets(parameters: Sequence[nn.Parameter], most_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in buckets, in the given order. The parameters of a bucket have the same
    dtype and together at most `most_bytes` bytes. A parameter with more bytes has its own bucket.
    """
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
    """Sends the gradients of `parameters`, bucket by bucket, by calling `send(bucket)`.

    reduction: a row of REDUCTIONS, which has the size of a bucket, and whether buckets are sent
               during backward (`overlaps`) or afterwards
    """

    def __init__(self, parameters: Sequence[nn.Parameter], reduction: str, send: Send):
        row = REDUCTIONS[reduction]
        self.buckets = list(buckets(parameters[::-1], row.bucket_bytes))
        # listening: the backward of the last micro-batch runs, so complete buckets may be sent
        self.send, self.listening = send, False
        # by number of a bucket: its parameters whose gradients are not yet computed
        self.waiting: dict[int, set[nn.Parameter]] = {}
        # number of the next bucket to send; the messages that may not have arrived yet
        self.next, self.under_way = 0, list[Finish]()
        if row.overlaps:
            for i, bucket in enumerate(self.buckets):
                for p in bucket:
                    p.register_post_accumulate_grad_hook(lambda p, i=i: self._has_gradient(i, p))

    def backward(self, last: bool) -> None:
        """Called before each micro-batch's backward. Only the `last` one completes the gradients,
        so only in that one may buckets be sent."""
        self.listening = last
        self.waiting = {i: set(bucket) for i, bucket in enumerate(self.buckets)}

    def _has_gradient(self, i: int, p: nn.Parameter) -> None:
        self.waiting[i].discard(p)
        # All ranks must send the buckets in the same order: otherwise an all-reduce would add the
        # gradients of different parameters.
        while self.listening and self.next < len(self.buckets) and not self.waiting[self.next]:
            self._send()

    def _send(self) -> None:
        """Begin to send the next bucket. At most two messages are under way, because each message
        holds memory until it has arrived: so first wait for the earlier ones."""
        while len(self.under_way) > 1:
            self.under_way.pop(0)()
        self.under_way.append(self.send(self.buckets[self.next]))
        self.next += 1

    def finish(self) -> None:
        """Send the buckets that have not been sent, and wait for all messages."""
        self.listening = False
        while self.next < len(self.buckets):
            self._send()
        while self.under_way:
            self.under_way.pop(0)()
        self.next = 0


class Sending(Sharding):
    """A Sharding that sends gradients in buckets. `messages` calls the method `send` of a subclass
    for each bucket."""

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
    """ZeRO 0: every rank gets the mean of all gradients."""

    def send(self, bucket: list[nn.Parameter]) -> Finish:
        """Begin to average the gradients of a bucket over the ranks. They become views of one flat
        tensor, the message, so that no gradient is in memory twice."""
        used = [p for p in bucket if p.grad is not None]
        if not used:            # parameters that the model does not use
            return lambda: None
        flat = _flatten_dense_tensors([p.grad for p in used])
        for p, part in zip(used, _unflatten_dense_tensors(flat, used)):
            p.grad = part
        return self.averaged(bucket, flat)

    def averaged(self, bucket: list[nn.Parameter], flat: Tensor) -> Finish:
        """Begin to replace `flat`, the gradients of a bucket as one vector, by its mean over the
        replicas. A row of another package can override this method."""
        work = dist.all_reduce(flat, group=self.ranks.groups["replicas"], async_op=True)

        def arrived() -> None:
            with self.ranks.waits:
                work.wait()
            flat.div_(self.layout.replicas)

        return arrived


class ShardedOptimizer(Sending, OfRows):
    """ZeRO 1: each rank updates its rows of every parameter.

    A message has the shape (ranks, numbers): row r has the rows that rank r owns of all parameters
    of the bucket. The rows of the last ranks are padded with zeros to the same length.
    """

    def mine(self, p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self.rows(p.detach()))

    def _lengths(self, bucket: list[nn.Parameter]) -> list[int]:
        """Return, for each parameter of the bucket, how many numbers one row of the message has."""
        return [self.each(len(p)) * p[0].numel() for p in bucket]

    def _is_message(self, bucket: list[nn.Parameter]) -> bool:
        """Return whether the memory of the bucket is already in the order of a message, so that no
        copy is needed: the bucket is one parameter whose rows divide evenly over the ranks."""
        return len(bucket) == 1 and not len(bucket[0]) % self.size

    def send(self, bucket: list[nn.Parameter]) -> Finish:
        """Begin to average the gradients of a bucket over the ranks, and free the whole gradients.
        When the message has arrived, each owned parameter has the mean gradient of its rows."""
        used = [p.grad is not None for p in bucket]
        grads = [p.grad if there else torch.zeros_like(p) for p, there in zip(bucket, used)]
        parts = (grads[0].reshape(self.size, -1) if self._is_message(bucket) else
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
            parts = None        # free the whole gradients: the message has been sent
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
        """Fill the whole parameters of a bucket from the rows that each rank has updated."""
        lengths = self._lengths(bucket)
        mine = bucket[0].new_zeros(sum(lengths))
        for p, part in zip(bucket, mine.split(lengths)):
            rows = self.owned_of[p].detach()
            part[:rows.numel()] = rows.view(-1)
        direct = self._is_message(bucket)
        parts = bucket[0] if direct else mine.new_empty(self.size, len(mine))
        with self.ranks.waits:
            all_gather(parts.view(-1), mine, group=self.group)
        if direct:
            return
        for p, part in zip(bucket, parts.split(lengths, dim=1)):
            p.view(-1).copy_(part.reshape(-1)[:p.numel()])
