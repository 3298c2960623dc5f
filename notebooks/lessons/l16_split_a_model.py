"""Lesson 16, split a model: its study, its figures and its exercises.

Compares a block whose matrices are split over processes, and a ring of keys and values, with one
process.

    cuts = split(processes=4)           # errors and sent bytes, by study
    cuts["tensor"].off["y"], cuts["tensor"].sent_bytes, cuts["zig-zag"].scores
    tensor_bytes(m, tokens, ranks), ring_bytes(m, tokens, ranks)    # per layer, both passes
    pairs_view(ranks=8, window=0)       # for an Explorer: who computes which pair, and when
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lessons.draws import normal
from lessons.figures.drawing import NAMES, axis, figure, heat, note
from lessons.judging.judge import Exercise, adding_to
from lessons.ranks.messages import sent_bytes
from lessons.ranks.on_ranks import WORLD, OnRanks
from lessons.ranks.rank_exercises import by_hand, meet_as
from lpkit.measure.tracking import MessageCount
from lpkit.nn.attention import plain, plain_partial
from lpkit.parallel import context
from lpkit.parallel.context import Ring, part
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.parallel.ranks import Ranks, all_gather, reduce_scatter
from lpkit.predict.units import quantity
from lpkit.presets import preset

# the notebook imports these names of other modules from here
__all__ = ["by_hand", "context", "preset", "quantity"]

# ---- The study: splits and their results

T, H, G, E, F_, V = 64, 32, 4, 4, 192, 256     # sizes of the block that is split; D is H E
D = H * E
BLOCK = SimpleNamespace(D=D, G=G, E=E)          # the model's sizes that the byte formulas need
ZIG_ZAG, IN_ORDER = "zig-zag", "in order"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The result of one study.

    off         by tensor: the largest error over ranks, compared with one process in float64, over
                the largest element
    sent_bytes  by kind of message: bytes that rank 0 sends
    scores      by step and rank: attention scores that the rank computes (only for a ring)
    """

    off: dict[str, float]
    sent_bytes: dict[str, float]
    scores: list[list[int]]

    @property
    def total(self) -> float:
        return sum(self.sent_bytes.values())

    @property
    def busiest(self) -> int:
        """Scores that a ring waits for: the sum over steps of the busiest rank's scores."""
        return sum(map(max, self.scores))


def split(processes: int, parent: WarmParent | None = None) -> dict[str, Cut]:
    """Run every study on `processes` real processes, and return the results by study."""
    with Processes(f"{__name__}:_study", world=processes, parent=parent) as running:
        by_rank = running.wait()
    return {name: Cut(off={key: max(result[name]["off"][key] for result in by_rank)
                           for key in first["off"]},
                      sent_bytes=first["sent"],
                      scores=list(map(list, zip(*(result[name]["scores"] for result in by_rank)))))
            for name, first in by_rank[0].items()}


def tensor_bytes(m: Any, tokens: int, ranks: int, itemsize: int = 4) -> float:
    """Return the bytes that a rank of tensor parallelism sends per layer, forward and backward:
    four gathers and four scatters of `tokens` rows of D elements."""
    return 8 * (ranks - 1) / ranks * tokens * m.D * itemsize


def ring_bytes(m: Any, tokens: int, ranks: int, itemsize: int = 4) -> float:
    """Return the bytes that a rank of a ring sends per layer: keys and values in forward; keys,
    values and their gradients in backward."""
    return 3 * 2 * (ranks - 1) / ranks * tokens * m.G * m.E * itemsize


# Code that runs in a rank.

def _study(place: Place, given: dict[str, Any]) -> dict[str, Any]:
    """Run all studies on this rank; each returns what `_result` returns."""
    meet_as(place, "split")
    results = {"tensor": _tensor(_weights()), "gate and up in halves": _halves(_weights()),
               "vocabulary": _vocabulary(), ZIG_ZAG: _round(ZIG_ZAG), IN_ORDER: _round(IN_ORDER),
               "kit": _kit()}
    dist.destroy_process_group()
    return results


def _result(got: Mapping[str, Tensor], want: Mapping[str, Tensor], sent: Mapping[str, float],
            scores: Sequence[int] = ()) -> dict[str, Any]:
    """Return a study's result on this rank: the errors of `got` against `want` (float64), the sent
    bytes and the scores."""
    off = {name: ((t.double() - want[name]).abs().max() / want[name].abs().max()).item()
           for name, t in got.items()}
    return {"off": off, "sent": dict(sent), "scores": list(scores)}


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1])


def _weights() -> dict[str, Tensor]:
    shapes = {"q": (H * E, D), "k": (G * E, D), "v": (G * E, D), "out": (D, H * E),
              "gate": (F_, D), "up": (F_, D), "down": (D, F_)}
    return {name: _drawn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


COLUMNS = ("out", "down")       # matrices split by columns; the others are split by rows


def _part(name: str, w: Tensor) -> Tensor:
    """Return this rank's part of the whole matrix w."""
    return w.chunk(dist.get_world_size(), dim=int(name in COLUMNS))[dist.get_rank()]


def gathered(x: Tensor) -> Tensor:
    """Return the tokens of all ranks: (T / R, D) -> (T, D)."""
    whole = x.new_empty(len(x) * dist.get_world_size(), x.shape[1])
    all_gather(whole, x.contiguous())
    return whole


def scattered(x: Tensor) -> Tensor:
    """Reduce-scatter: (T, D) -> (T / R, D), the sum over ranks for this rank's tokens."""
    own = x.new_empty(len(x) // dist.get_world_size(), x.shape[1])
    reduce_scatter(own, x.contiguous())
    return own


class Gather(torch.autograd.Function):
    """Gathers whole sequences before matrices split by rows. Its backward is Scatter's forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return scattered(g)


class Scatter(torch.autograd.Function):
    """Reduces to a part of each sequence after matrices split by columns; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return gathered(g)


def block(x: Tensor, w: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] = lambda x: x,
          scatter: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Return the output of attention and an MLP for tokens x: (T, D) -> (T, D).

    With `gather` and `scatter`, x are this rank's tokens (T / R, D) and w this rank's parts of the
    matrices; the result is the output for this rank's tokens. Between `gather` and `scatter`, the
    rank has all tokens and some of the heads or of the MLP's columns."""
    h = gather(F.rms_norm(x, (D,), eps=1e-6))
    q, k, v = ((h @ w[name].mT).unflatten(1, (-1, E)).movedim(1, 0)[None] for name in "qkv")
    x = x + scatter(plain(q, k, v)[0].movedim(0, 1).flatten(1) @ w["out"].mT)
    h = gather(F.rms_norm(x, (D,), eps=1e-6))
    return x + scatter((F.silu(h @ w["gate"].mT) * (h @ w["up"].mT)) @ w["down"].mT)


def _with_gradients(x: Tensor, w: Mapping[str, Tensor], d_y: Tensor,
                    *sent: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return y = block(x, w) and the gradients of x and of each w, given the gradient d_y of y."""
    leaves = {"x": x, **w}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    y = block(leaves["x"], {name: leaves[name] for name in w}, *sent)
    grads = torch.autograd.grad(y, list(leaves.values()), d_y)
    return {"y": y.detach()} | {f"d{name}": g for name, g in zip(leaves, grads)}


def _tensor(w: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compare the block that is split over all ranks with the whole block in float64."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, d_y = (_drawn(T, D, seed=seed) for seed in (11, 12))
    want = _with_gradients(x.double(), {name: t.double() for name, t in w.items()}, d_y.double())
    with MessageCount() as count:
        got = _with_gradients(x.chunk(ranks)[rank], {name: _part(name, t) for name, t in w.items()},
                              d_y.chunk(ranks)[rank], Gather.apply, Scatter.apply)
    mine = {name: t.chunk(ranks)[rank] if name in ("y", "dx") else _part(name[1:], t)
            for name, t in want.items()}
    return _result(got, mine, _sent(count))


def _sent(count: MessageCount) -> Counter[str]:
    """Return the bytes that each rank sends, by kind of message."""
    return Counter(sent_bytes(count.sent))


def _halves(w: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compare two ways to split an MLP whose gate and up are stacked in one matrix (2 F, D). Each
    rank treats the first half of its rows as gate. "in the middle" splits the stacked matrix, so
    the first ranks get only gate rows and the result is wrong; "alike" splits gate and up
    separately, so each rank gets a part of both."""
    x, wide = _drawn(T, D, seed=11), {name: t.double() for name, t in w.items()}
    want = F.silu(x.double() @ wide["gate"].mT) * (x.double() @ wide["up"].mT) @ wide["down"].mT

    def mlp(rows: Tensor) -> Tensor:
        gate, up = (x @ rows.mT).chunk(2, dim=1)
        total = (F.silu(gate) * up) @ _part("down", w["down"]).mT
        dist.all_reduce(total)
        return total

    middle = _part("rows", torch.cat((w["gate"], w["up"])))
    alike = torch.cat((_part("gate", w["gate"]), _part("up", w["up"])))
    return _result({"in the middle": mlp(middle), "alike": mlp(alike)},
                   {"in the middle": want, "alike": want}, {})


def _vocabulary() -> dict[str, Any]:
    """Compute the cross-entropy (nats) of logits that are split over ranks by vocabulary. Three
    numbers per token are all-reduced: the largest logit, the sum of exponentials and the target's
    logit. No logits are sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    h, head = 8 * _drawn(T, D, seed=13), 4 * _drawn(V, D, seed=14)
    targets = torch.randint(V, (T,), generator=torch.Generator().manual_seed(15))
    logits, first = h @ head.chunk(ranks)[rank].mT, rank * V // ranks
    with MessageCount() as count:
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        total = (logits - top[:, None]).exp().sum(1)
        dist.all_reduce(total)
        here = (targets >= first) & (targets < first + V // ranks)     # targets of this rank
        own = logits.gather(1, (targets - first).clamp(0, V // ranks - 1)[:, None])[:, 0] * here
        dist.all_reduce(own)
    want = F.cross_entropy(h.double() @ head.double().mT, targets, reduction="none")
    return _result({"nats": top + total.log() - own}, {"nats": want}, _sent(count))


# A ring, step by step.

def chunks_of(rank: int, ranks: int, order: str) -> tuple[int, int]:
    """Return the numbers of the two chunks of the sequence that the rank holds; there are two
    chunks per rank."""
    return (rank, 2 * ranks - 1 - rank) if order == ZIG_ZAG else (2 * rank, 2 * rank + 1)


def _qkv() -> tuple[Tensor, ...]:
    """Return q (1, H, T, E), k and v (1, G, T, E), and the output's gradient (1, H, T, E)."""
    return tuple(_drawn(1, n, T, E, seed=20 + i) * math.sqrt(E) for i, n in enumerate((H, G, G, H)))


def _round(order: str) -> dict[str, Any]:
    """Run one forward round of the ring, step by step. After each step, `off` has the error of the
    output that combines the keys received so far; before the last step some keys are missing, so
    the error is large."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v, _ = _qkv()
    want = plain(*(t.double() for t in (q, k, v)))
    C, own = T // (2 * ranks), chunks_of(rank, ranks, order)
    rows = torch.cat([torch.arange(n * C, n * C + C) for n in own])
    outs, sums, at_hand = [], [], (k[:, :, rows], v[:, :, rows])
    off, scores = {}, []
    for step in range(ranks):
        columns = torch.cat([torch.arange(n * C, n * C + C)
                             for n in chunks_of((rank - step) % ranks, ranks, order)])
        seen = columns <= rows[:, None]
        s = q[:, :, rows] @ at_hand[0].repeat_interleave(H // G, 1).mT / math.sqrt(E)
        s = s.masked_fill(~seen, -torch.inf)
        # the output for these keys alone, and the logarithm of its softmax's denominator; rows
        # without a visible key get clamped values and a weight of 0
        sums.append(s.logsumexp(-1))
        outs.append((s - s.amax(-1, keepdim=True).clamp(min=-1e30)).exp())
        outs[-1] = outs[-1] / outs[-1].sum(-1, keepdim=True).clamp(min=1e-30)
        outs[-1] = outs[-1] @ at_hand[1].repeat_interleave(H // G, 1)
        # outputs of several sets of keys are averaged with their denominators as weights
        weights = torch.stack(sums).softmax(0)[..., None]
        out = sum(w * o for w, o in zip(weights, outs))
        distance = (out - want[:, :, rows]).abs().max() / want.abs().max()
        off[f"after step {step + 1}"] = distance.item()
        blocks = seen.view(2, C, 2, C).any(3).any(1)
        scores.append(int(seen.sum()) if blocks.any() else 0)
        if step < ranks - 1:
            at_hand = _passed(torch.stack(at_hand)).unbind()
    return {"off": off, "sent": {}, "scores": scores}


def _passed(t: Tensor) -> Tensor:
    """Send t to the next rank and return the tensor of the previous rank."""
    rank, ranks, came = dist.get_rank(), dist.get_world_size(), torch.empty_like(t)
    sending = dist.isend(t, (rank + 1) % ranks)
    dist.recv(came, (rank - 1) % ranks)
    sending.wait()
    return came


def _kit() -> dict[str, Any]:
    """Compare the kit's ring with plain attention in float64: the output and the gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    *qkv, d_out = _qkv()

    def both(attend: Callable[..., Tensor], *given: Tensor) -> dict[str, Tensor]:
        *leaves, d = given
        leaves = [t.clone().requires_grad_() for t in leaves]
        out = attend(*leaves)
        values = out.detach(), *torch.autograd.grad(out, leaves, d)
        return dict(zip(("out", "dq", "dk", "dv"), values))

    want = both(plain, *(t.double() for t in (*qkv, d_out)))
    with MessageCount() as count:
        own = [part(t, rank, ranks, 2) for t in (*qkv, d_out)]
        got = both(Ring(plain_partial, Ranks(groups={"context": dist.group.WORLD})), *own)
    return _result(got, {name: part(t, rank, ranks, 2) for name, t in want.items()}, _sent(count))


# ---- Figures

def turns(ranks: int, order: str, window: int = 0) -> list[list[int | None]]:
    """Return a table of pairs of chunks (rows: queries, columns: keys): the step of the ring in
    which the pair is computed; None if no key of the pair is visible. `window`: the chunks of keys
    before its own chunk that a query sees; 0 means all."""
    holder = holders(ranks, order)
    return [[(holder[a] - holder[b]) % ranks if 0 <= a - b <= (window or a) else None
             for b in range(2 * ranks)] for a in range(2 * ranks)]


def holders(ranks: int, order: str) -> dict[int, int]:
    """Return the rank that holds each chunk."""
    return {n: rank for rank in range(ranks) for n in chunks_of(rank, ranks, order)}


def waits(ranks: int, order: str, window: int = 0) -> float:
    """Return the pairs of chunks that a ring waits for: the sum over steps of the busiest
    rank's pairs. A pair on the diagonal counts as half."""
    steps = turns(ranks, order, window)
    work = [[0.0] * ranks for _ in range(ranks)]
    for rank in range(ranks):
        for a in chunks_of(rank, ranks, order):
            for b, step in enumerate(steps[a]):
                if step is not None:
                    work[step][rank] += 0.5 if a == b else 1.0
    return sum(map(max, work))


def pairs_view(ranks: int, window: int) -> dict:
    """Return a figure for an Explorer: the pairs of chunks of queries and keys, with the step in
    which each pair is computed (number) and its rank (colour), in order and in zig-zag."""
    data, notes = [], []
    for x, y, order in (("x", "y", IN_ORDER), ("x2", "y2", ZIG_ZAG)):
        steps, holder = turns(ranks, order, window), holders(ranks, order)
        names = [str(n) for n in range(2 * ranks)]
        colours = [[None if step is None else holder[a] for step in row]
                   for a, row in enumerate(steps)]
        words = [["" if step is None else str(step + 1) for step in row] for row in steps]
        data.append(heat(
            names, names, colours, ends=(0, max(1, ranks - 1)), text=words, xaxis=x, yaxis=y,
            bar={"title": {"text": "rank"}, "x": 1.01, "dtick": max(1, ranks // 8)},
            texttemplate="%{text}" if ranks <= 8 else "", showscale=order == ZIG_ZAG,
            hovertemplate="queries %{y}, keys %{x}: rank %{z}, step %{text}<extra></extra>"))
        notes.append(note(f"<b>{order}</b>: a ring waits for {waits(ranks, order, window):g} pairs",
                          0, 1.02, xref=f"{x} domain", yref="paper"))
    across = {"showgrid": False, "type": "category"}
    return figure(
        data, "The rank and the step of the ring that compute each pair of chunks",
        height=520, annotations=notes, margin={"t": 90},
        xaxis=axis("chunk of keys", domain=[0, 0.46], **across),
        xaxis2=axis("chunk of keys", domain=[0.54, 1], anchor="y2", **across),
        yaxis={**NAMES, **axis("chunk of queries"), "type": "category"},
        yaxis2={**NAMES, "type": "category", "anchor": "x2"})


# ---- Exercises

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)
rank_exercise = adding_to(EXERCISES, OnRanks)


def _in_order(rank: int, ranks: int, step: int) -> list[tuple[int, int]]:
    source = (rank - step) % ranks
    return [(a, b) for a in (2 * rank, 2 * rank + 1)
            for b in (2 * source, 2 * source + 1) if b <= a]


def _other_way(rank: int, ranks: int, step: int) -> list[tuple[int, int]]:
    source = (rank + step) % ranks
    return [(a, b) for a in (rank, 2 * ranks - 1 - rank)
            for b in (source, 2 * ranks - 1 - source) if b <= a]


@exercise("16.pairs", (0, 2, 0), (0, 2, 1), (1, 2, 1), (2, 4, 3),
          draw=lambda r: ((ranks := r.randint(1, 9)) and r.randrange(ranks), ranks,
                          r.randrange(ranks)),
          minutes=8, stars=2,
          mistakes={"a rank has one early chunk and one late one": _in_order,
                    "after s steps, rank r holds the keys of rank r - s": _other_way,
                    "leave out pairs whose keys come after the queries":
                        lambda rank, ranks, step: [
                            (a, b) for a in (rank, 2 * ranks - 1 - rank)
                            for b in ((rank - step) % ranks, 2 * ranks - 1
                                      - (rank - step) % ranks)]})
def pairs(rank: int, ranks: int, step: int) -> list[tuple[int, int]]:
    source = (rank - step) % ranks
    return [(a, b) for a in (rank, 2 * ranks - 1 - rank)
            for b in (source, 2 * ranks - 1 - source) if b <= a]


def _drawn_rows(r: Random) -> tuple[Tensor, int, int]:
    ranks = r.randint(1, 4)
    return normal(r, 2 * ranks * r.randint(1, 3), r.randint(1, 3)), r.randrange(ranks), ranks


@exercise("16.gate_up", (torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 0, 2),
          (torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 1, 2), draw=_drawn_rows, tolerance=0,
          minutes=5,
          mistakes={"cut gate and up separately: a cut in the middle gives some ranks only gates":
                        lambda w, rank, ranks: w.chunk(ranks)[rank],
                    "the gate's rows come first, because the layer splits them in this order":
                        lambda w, rank, ranks: torch.cat(
                            [w.chunk(2)[1].chunk(ranks)[rank], w.chunk(2)[0].chunk(ranks)[rank]])})
def gate_up_rows(w: Tensor, rank: int, ranks: int) -> Tensor:
    gate, up = w.chunk(2)
    return torch.cat((gate.chunk(ranks)[rank], up.chunk(ranks)[rank]))


def _logits(r: Random) -> tuple[Tensor, int]:
    each = r.randint(1, 5)
    return normal(r, WORLD, each, size=r.choice((1.0, 200.0))), r.randrange(WORLD * each)


# Processes receive only the text of a function, so each function must stand on its own.
def _own_maximum(logits, target, rank, ranks, all_reduce_max, all_gather):
    total = all_gather((logits - logits.max()).exp().sum()[None]).sum()
    first = rank * len(logits)
    here = first <= target < first + len(logits)
    own = logits[target - first] if here else logits.new_zeros(())
    return all_reduce_max(logits.max()) + total.log() - all_gather(own[None]).sum()


def _own_vocabulary(logits, target, rank, ranks, all_reduce_max, all_gather):
    first = rank * len(logits)
    here = first <= target < first + len(logits)
    own = logits[target - first] if here else logits.new_zeros(())
    return logits.logsumexp(0) - all_gather(own[None]).sum()


def _everybodys_target(logits, target, rank, ranks, all_reduce_max, all_gather):
    top = all_reduce_max(logits.max())
    total = all_gather((logits - top).exp().sum()[None]).sum()
    return top + total.log() - all_gather(logits[target % len(logits)][None]).sum()


@rank_exercise("16.nats", (torch.tensor([[0.0], [0.0]]), 0),
               (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 2),
               (torch.arange(16.0).view(WORLD, 8), 9), most_sent=4,
               draw=_logits, tolerance=1e-5, stars=3, minutes=15,
               mistakes={"all ranks must subtract the same maximum before their exponentials add up":
                             _own_maximum,
                         "sum the exponentials over all ranks": _own_vocabulary,
                         "one rank alone has the target's logit; the others add zero":
                             _everybodys_target})
def nats(logits: Tensor, target: int, rank: int, ranks: int,
         all_reduce_max: Callable[[Tensor], Tensor],
         all_gather: Callable[[Tensor], Tensor]) -> Tensor:
    top = all_reduce_max(logits.max())
    total = all_gather((logits - top).exp().sum()[None]).sum()
    first = rank * len(logits)
    here = first <= target < first + len(logits)
    own = logits[target - first] if here else logits.new_zeros(())
    return top + total.log() - all_gather(own[None]).sum()
