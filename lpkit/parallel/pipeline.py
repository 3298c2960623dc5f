"""One rank's part of a pipeline: it computes its actions in the order of a schedule, and sends
their results to the ranks of the neighbouring stages.

An action is (stage, kind, micro-batch); its kind is F (forward), B (backward), I (gradient of the
input) or W (gradients of weights): see `lpkit.techniques.pipelines`. A message carries the output
of an F, or the gradient that a B or I computed, to the next or the previous stage.

PyTorch's pipeline runtime posts receives as early as it can (pytorch #172668, #188833), so a
message that is late can delay the messages behind it. Here a rank posts a receive one action before
the action that needs the message, so that the message travels meanwhile. gloo matches messages by
tags. NCCL ignores tags: messages from one rank to another arrive in the order in which they were
sent. Therefore the receiver posts its receives in the order of the sender's actions. And the two
directions between two ranks use different communicators, of the process groups `up` (to higher
ranks) and `down` (to lower ranks), so that a message in one direction never waits for a message in
the other.
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

# Kind, the stage that reads the message, micro-batch. Kind F: activations, kind B: their gradients
Message = tuple[str, int, int]
AHEAD = 1       # a receive is posted this many actions before the action that needs the message


def order(name: str, ranks: int, chunks: int, m: int) -> Order:
    """Return the actions of each rank, in order, for the schedule `name` with `chunks` stages on
    each rank and m micro-batches. A row with `warm_up` has a closed form; for all other rows,
    PyTorch's schedule class computes the order. Raises ConfigError if the schedule does not support
    this number of ranks, chunks or micro-batches."""
    row = PIPELINES[name]
    if problem := row.problem(ranks, chunks, m):
        raise ConfigError(f"parallel.schedule={name} has no order of {problem}")
    if row.warm_up:
        return closed_order(row, ranks, chunks, m)
    # PyTorch's class computes the order of all ranks from the stages of any one rank, here rank 0,
    # of which it reads only these attributes.
    stages = [SimpleNamespace(stage_index=stage, num_stages=ranks * chunks, group_rank=0,
                              group_size=ranks, submod=None)
              for stage in row.stages(0, ranks, chunks)]
    # Keep only computations: this module plans its own messages. An action that overlaps a forward
    # and a backward has them as sub_actions.
    return {rank: [(part.stage_index, part.computation_type.value, part.microbatch_index)
                   for action in actions if action.is_compute_op
                   for part in action.sub_actions or (action,)]
            for rank, actions in row.load()(stages, m).pipeline_order_with_comms.items()}


def message(action: Action, stages: int, hops: int) -> Message | None:
    """Return the message that an action reads (hops=0) or sends (hops=1). None if it reads or sends
    no message: the tokens of the batch, the loss and the gradients of weights stay on their rank.

    stages: number of stages of the pipeline
    """
    stage, kind, micro = action
    at = stage + hops if kind == "F" else stage - hops
    there = {"F": 0 < at < stages, "W": False}.get(kind, 0 <= at < stages - 1)
    return ("F" if kind == "F" else "B", at, micro) if there else None


def routes(order: Order, rank: int) -> tuple[dict[Message, int], list[list[tuple[Message, int]]]]:
    """Return the messages of `rank` to and from other ranks: {message that it sends: destination
    rank}, and for each of its actions the list of (message, source rank) whose receives it posts
    before the action."""
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
        # Receives must be posted in the order of the sends, so first come the receives of all
        # messages that `source` sends before the one that this action needs.
        while source is not None and needed in sent[source]:
            asks[max(0, k - AHEAD)].append((sent[source].popleft(), source))
    return sends, asks


class Pipeline:
    """The actions of one rank, and its messages.

    rank:   this rank's number among the ranks of the pipeline
    groups: the process groups (up, down); on gloo both may be the same group
    waits:  a context that is entered around each wait for a message
    """

    def __init__(self, order: Order, rank: int, *, groups: Sequence[dist.ProcessGroup],
                 waits: AbstractContextManager | None = None):
        self.rank, self.actions, self.groups = rank, order[rank], groups
        self.sends, self.asks = routes(order, rank)
        self.waits = waits or nullcontext()
        self.stages = 1 + max(stage for actions in order.values() for stage, _, _ in actions)
        self.split = {(stage, micro) for stage, kind, micro in self.actions if kind == "W"}

    def step(self, forward: Callable[[int, int, Tensor | None], Tensor], like: Tensor,
             before: Callable[[Action], None] = lambda action: None) -> None:
        """Compute all actions of an update.

        forward: f(stage, micro-batch, x) -> the input of the next stage. x is the stage's input,
                 None for stage 0. The last stage returns the loss, from which backward starts
        like:    a tensor with the shape, dtype and device of every message
        before:  called with each action before it is computed
        """
        self.like = like
        # tensors that this rank reads: they have arrived, or are still being received
        self.here: dict[Message, Tensor] = {}
        # receives that have been posted, and sends (with their tensors) that may not be complete
        self.coming: dict[Message, dist.Work] = {}
        self.going: deque[tuple[dist.Work, Tensor]] = deque()
        # by (stage, micro-batch), from F to B: the stage's input, and where its backward starts
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
                # Keep the edge of the autograd graph, not the output: only the receiver needs the
                # output's numbers, so its memory can be freed once it is sent.
                if output.requires_grad:
                    kept[of] = got, get_gradient_edge(output) if given else output
                self._give(given, output.detach())
            elif kind == "W":
                queue = queues.pop(of)
                # Each closure computes the gradient of one weight. `pop` frees the closure, and the
                # tensors that it holds, once it has run.
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
        """Post the receive of message `asked` from rank `source`."""
        self.here[asked] = torch.empty_like(self.like)
        self.coming[asked] = dist.irecv(self.here[asked], group=self.groups[source > self.rank],
                                        group_src=source, tag=self._tag(asked))

    def _take(self, needed: Message | None) -> Tensor | None:
        """Wait for the message `needed`, and return its tensor. None: no message is needed."""
        if needed in self.coming:
            with self.waits:
                wait_for(self.coming.pop(needed), self.here[needed])
        return self.here.pop(needed) if needed else None

    def _give(self, given: Message | None, tensor: Tensor | None) -> None:
        """Send `tensor` as the message `given`, or keep it if a stage of this rank reads it."""
        if given not in self.sends:
            # Another stage of this rank reads the message, or no stage does.
            self.here |= {given: tensor} if given else {}
            return
        while self.going and self.going[0][0].is_completed():
            self.going.popleft()
        to, tensor = self.sends[given], tensor.contiguous()
        self.going.append((dist.isend(tensor, group=self.groups[to < self.rank], group_dst=to,
                                      tag=self._tag(given)), tensor))

    def _tag(self, named: Message) -> int:
        """Return a number that differs for all messages of an update."""
        kind, stage, micro = named
        return 2 * (micro * self.stages + stage) + (kind == "B")
