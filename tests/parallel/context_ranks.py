"""What ranks of tests/parallel/test_context.py do; each is `f(place, job)`."""

from unittest.mock import patch

import torch
import torch.distributed as dist

import lessons.rows.context  # noqa: F401  adds rows
from lessons.rows.sparse_attention import BlockSparse
from lpkit.measure.tracking import MessageCount
from lpkit.nn.attention import partial_of, plain
from lpkit.parallel import context
from lpkit.parallel.meeting import meet
from lpkit.parallel.processes import Place
from lpkit.parallel.ranks import Ranks
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.layouts import CONTEXT
from lpkit.training.training import Training
from tests.parallel.pipeline_ranks import built

T = 64
RULES = {
    "causal": Rule(),
    "window": Rule(window=9),
    "window over chunks": Rule(window=23),
    "window, global": Rule(window=5, global_tokens=3),
    "documents": Rule(documents=True),
    "documents in a window": Rule(documents=True, window=13),
    "soft cap": Rule(soft_cap=1.5),
    "sinks": Rule(sinks=True),
    "block-sparse": BlockSparse(block=4, local=2, stride=3).rule(T),
    # queries of every other block see nothing at all
    "blocks that see nothing": BlockSparse(block=8, table=("1" * 8, "0" * 8) * 4).rule(T),
    "keys to come": Rule(causal=False),
    "all": Rule(window=30, global_tokens=2, documents=True, soft_cap=2.0, sinks=True),
}


def drawn(rule: Rule, dtype: torch.dtype, kv_heads: int, B: int = 2, H: int = 8,
          E: int = 16) -> tuple:
    """q, k, v, documents, sinks; and the gradient of the answer."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, d_out = (torch.randn(B, n, T, E, generator=draw).to(dtype)
                      for n in (H, kv_heads, kv_heads, H))
    documents = (torch.rand(B, T, generator=draw) < 1 / 12).cumsum(1) if rule.documents else None
    sinks = torch.randn(H, generator=draw) if rule.sinks else None
    return [q, k, v, documents, sinks], d_out


def both(attend, inputs: list, d_out: torch.Tensor, rule: Rule) -> list[torch.Tensor]:
    """The answer, and the gradients of what has one."""
    leaves = [t.requires_grad_() for t in inputs if t is not None and t.is_floating_point()]
    out = attend(*inputs, rule=rule)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def attend(place: Place, job: dict) -> list[list]:
    """For each case [way, backend, rule, kv_heads, dtype]: how far this rank's part of the answer
    and of each gradient is from one process in float64, of the largest; pairs of chunks that were
    computed forward; bytes of each message, forward and backward."""
    torch.set_num_threads(1)
    results = []
    meet("gloo", **place.among)
    for way, backend, name, kv_heads, dtype in job["cases"]:
        results.append(_case(way, backend, RULES[name], kv_heads, getattr(torch, dtype)))
    dist.destroy_process_group()
    return results


def _case(way: str, backend: str, rule: Rule, kv_heads: int, dtype: torch.dtype) -> list:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, d_out = drawn(rule, dtype, kv_heads)
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in inputs]
    want = both(plain, wide, d_out.double(), rule)
    ranks, row = Ranks(groups={"context": dist.group.WORLD}), CONTEXT[way]
    here = row.load()(partial_of(backend) if row.partial else ATTENTION[backend].load(), ranks)
    part = context.part
    mine = lambda t, dim: part(t, rank, world, dim).contiguous()
    q, k, v, documents, sinks = inputs
    own = [*(mine(t, 2) for t in (q, k, v)), None if documents is None else mine(documents, 1),
           sinks]
    pairs, sent = 0, []
    right = here.attend

    def counted(*given, **named):
        nonlocal pairs
        pairs += 1
        return right(*given, **named)

    here.attend = counted
    isend, exchange = dist.isend, dist.all_to_all_single

    def sends(t, *given, **named):
        sent.append(t.nbytes)
        return isend(t, *given, **named)

    def exchanges(received, to, **named):
        sent.append(to.nbytes * (world - 1) // world)
        return exchange(received, to, **named)

    with patch.object(dist, "isend", sends), patch.object(dist.distributed_c10d, "isend", sends), \
            patch.object(dist, "all_to_all_single", exchanges):
        leaves = [t.requires_grad_() for t in own if t is not None and t.is_floating_point()]
        out = here(*own, rule=rule)
        forward, forward_pairs = list(sent), pairs
        sent.clear()
        got = [out.detach(), *torch.autograd.grad(out, leaves, mine(d_out, 2))]
    if sinks is not None:       # each rank has a share of it
        dist.all_reduce(got[4])
    assert ranks.waits.seconds > 0
    off = []
    for i, (ours, exact) in enumerate(zip(got, want, strict=True)):
        exact = mine(exact, 2) if i < 4 else exact
        off.append(((ours.double() - exact).abs().max() / exact.abs().max()).item())
        assert ours.dtype == (dtype if i < 4 else sinks.dtype)
    return [off, forward_pairs, forward, sent]


def trained(place: Place, job: dict) -> list:
    return [updates(training, job["updates"]) for training in built(place, job)]


def updates(training: Training, count: int) -> list:
    """Losses and gradients' norms of some updates, the messages of the last one, and what
    evaluation says, after which an update gathers less: weights are at hand."""
    done = [training.update(step) for step in range(count - 1)]
    with MessageCount() as counted:
        done.append(training.update(count - 1))
    return [[update.loss.item() for update in done], [update.grad_norm.item() for update in done],
            training.evaluate(),
            sorted([*message, times] for message, times in counted.sent.items())]
