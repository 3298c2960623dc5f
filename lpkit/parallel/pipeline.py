"""One rank's part of a pipeline: it computes its actions in the order of a schedule, and sends
their results to the ranks of the neighbouring stages.

PyTorch's runtime posts receives as early as its lowering can (pytorch #172668, #188833), so a late
message can hold up other messages behind it. Here a rank posts a receive one action before it needs
the message, so that the message travels during that action. gloo matches messages by tags. NCCL
does not: messages from one rank to another arrive in the order in which they were sent. So the
receiver posts receives in the order of the sender's actions, and each direction between two ranks
has a communicator of its own (from two groups, `up` to higher ranks and `down` to lower ones). A
message that waits in one direction then holds up nothing in the other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lpkit.errors import ConfigError
from lpkit.parallel.ranks import wait_for
from lpkit.precision.deferred import Queue, deferring
from lpkit.techniques.pipelines import PIPELINES, Action, Order, closed_order

Message = tuple[str, int, int]          # F or B, the stage that reads it, micro-batch
AHEAD = 1       # how many actions before its use a message is asked for


def order(name: str, ranks: int, chunks: int, m: int) -> Order:
    """Returns the order of the actions of m micro-batches in a schedule, as PyTorch defines it.
    Raises ConfigError."""
    row = PIPELINES[name]
    if problem := row.problem(ranks, chunks, m):
        raise ConfigError(f"parallel.schedule={name} has no order of {problem}")
    if row.warm_up:
        return closed_order(row, ranks, chunks, m)
    stages = [SimpleNamespace(stage_index=stage, num_stages=ranks * chunks, group_rank=0,
                              group_size=ranks, submod=None)
              for stage in row.stages(0, ranks, chunks)]
    return {rank: [(part.stage_index, part.computation_type.value, part.microbatch_index)
                   for action in actions if action.is_compute_op
                   for part in action.sub_actions or (action,)]
            for rank, actions in row.load()(stages, m).pipeline_order_with_comms.items()}


def message(action: Action, stages: int, hops: int) -> Message | None:
    """Returns the message that an action reads (0 hops) or sends (1 hop). None if there is none:
    the batch, the loss and the gradients of weights stay on their rank."""
    stage, kind, micro = action
    at = stage + hops if kind == "F" else stage - hops
    there = {"F": 0 < at < stages, "W": False}.get(kind, 0 <= at < stages - 1)
    return ("F" if kind == "F" else "B", at, micro) if there else None


def routes(order: Order, rank: int) -> tuple[dict[Message, int], list[list[tuple[Message, int]]]]:
    """Returns the destination rank of each message that `rank` sends, and the messages that it asks
    for before each of its actions, with their source ranks."""
    rank_of = {stage: source for source, actions in order.items() for stage, _, _ in actions}
    stages, sends, source_of = len(rank_of), {}, {}
    sent: dict[int, deque[Message]] = {source: deque() for source in order}
    for source, actions in order.items():
        for sending in filter(None, (message(action, stages, 1) for action in actions)):
            to = rank_of[sending[1]]
            if source == rank != to:
                sends[sending] = to
            elif to == rank != source:
                source_of[sending] = source
                sent[source].append(sending)
    asks: list[list[tuple[Message, int]]] = [[] for _ in order[rank]]
    for k, action in enumerate(order[rank]):
        source = source_of.get(needed := message(action, stages, 0))
        # and all messages that were sent before it
        while source is not None and needed in sent[source]:
            asks[max(0, k - AHEAD)].append((sent[source].popleft(), source))
    return sends, asks


class Pipeline:
    """`groups`: `up` and `down`, which may be the same group on gloo. `waits`: a context that is
    entered around each wait."""

    def __init__(self, order: Order, rank: int, *, groups: Sequence[dist.ProcessGroup],
                 waits: AbstractContextManager | None = None):
        self.rank, self.actions, self.groups = rank, order[rank], groups
        self.sends, self.asks = routes(order, rank)
        self.waits = waits or nullcontext()
        self.stages = 1 + max(stage for actions in order.values() for stage, _, _ in actions)
        self.split = {(stage, micro) for stage, kind, micro in self.actions if kind == "W"}

    def step(self, forward: Callable[[int, int, Tensor | None], Tensor], like: Tensor,
             before: Callable[[Action], None] = lambda action: None) -> None:
        """Computes all actions of an update. `forward(stage, micro-batch, x)` returns the next
        stage's input, a tensor like `like`; the last stage returns the tensor from which backward
        starts. `before` is called before every action."""
        self.like = like
        # messages that have arrived, or are on their way here
        self.here: dict[Message, Tensor] = {}
        self.coming: dict[Message, dist.Work] = {}
        self.going: deque[tuple[dist.Work, Tensor]] = deque()
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = {}
        queues: dict[tuple[int, int], Queue] = {of: [] for of in self.split}
        for action, asks in zip(self.actions, self.asks):
            for asked, source in asks:
                self._ask(asked, source)
            stage, kind, micro = action
            of = stage, micro
            before(action)
            got = self._take(message(action, self.stages, 0))
            if kind == "F":
                if got is not None:
                    got.requires_grad_(torch.is_grad_enabled())
                with deferring(queues.get(of)):
                    output = forward(stage, micro, got)
                given = message(action, self.stages, 1)
                # only the receiver needs the numbers; backward needs only the graph's edge
                if output.requires_grad:
                    kept[of] = got, get_gradient_edge(output) if given else output
                self._give(given, output.detach())
            elif kind == "W":
                queue = queues.pop(of)
                # each closure, and the tensors that it holds, is freed once it has run
                while queue:
                    queue.pop(0)()
            else:
                x, output = kept.pop(of)
                torch.autograd.backward(output, got)
                self._give(message(action, self.stages, 1), None if x is None else x.grad)
                del x
            got = output = None     # free the last references before the next action allocates
        # a sent tensor must stay in memory until its message has left
        with self.waits:
            while self.going:
                wait_for(*self.going.popleft())

    def _ask(self, asked: Message, source: int) -> None:
        self.here[asked] = torch.empty_like(self.like)
        self.coming[asked] = dist.irecv(self.here[asked], group=self.groups[source > self.rank],
                                        group_src=source, tag=self._tag(asked))

    def _take(self, needed: Message | None) -> Tensor | None:
        if needed in self.coming:
            with self.waits:
                wait_for(self.coming.pop(needed), self.here[needed])
        return self.here.pop(needed) if needed else None

    def _give(self, given: Message | None, tensor: Tensor | None) -> None:
        if given not in self.sends:
            # read by a stage of this rank, or by nobody
            self.here |= {given: tensor} if given else {}
            return
        while self.going and self.going[0][0].is_completed():
            self.going.popleft()
        to, tensor = self.sends[given], tensor.contiguous()
        self.going.append((dist.isend(tensor, group=self.groups[to < self.rank], group_dst=to,
                                      tag=self._tag(given)), tensor))

    def _tag(self, named: Message) -> int:
        kind, stage, micro = named
        return 2 * (micro * self.stages + stage) + (kind == "B")
