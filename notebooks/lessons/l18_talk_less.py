"""Lesson 18, Talk less: its study, its figures and its exercises.

Runs all-reduces built from messages between two ranks over slowed-down links, and ways to send
fewer bytes: compression with error feedback, averaging weights every few updates, gossip.

    paced(sizes).flat["ring", 65536]    # seconds of a real all-reduce over paced links of 8 ranks
    seconds("ring", 65536, LINK)        # by the alpha-beta formula
    crossing("tree", "ring", LINK)      # bytes at which both take the same time
    first_updates(["bits-4"])           # losses and bytes of four ranks that train here

The methods are rows of `lessons.rows.reductions`. `lpkit bench talk-less --out data/measured`
records the long runs.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lessons.rows.reductions  # noqa: F401  adds rows
from lessons.figures.drawing import SECONDS, axis, figure, note, rule, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import adding_to
from lessons.ranks.messages import each_sends
from lessons.ranks.rank_exercises import by_hand, meet_as, on_ranks
from lpkit import hardware
from lpkit.config import Config
from lpkit.measure.tracking import MessageCount
from lpkit.parallel.meeting import joined
from lpkit.parallel.processes import Place, WarmParent
from lpkit.predict.evidence import MEASURED
from lpkit.predict.messages import SEND, buckets
from lpkit.techniques.layouts import REDUCTIONS
from lpkit.training.training import Training

# the notebook imports these names of other modules from here
__all__ = ["REDUCTIONS", "by_hand", "dist", "fmean", "hardware"]

# ---- Links: a real message is delivered when an alpha-beta link would deliver it

@dataclass(frozen=True)
class Speed:
    """A link: `latency` (alpha) in seconds, and bytes per second (1 / beta)."""

    latency: float
    bytes_per_second: float


RANKS, NODE = 8, 4
LINK = Speed(0.01, 4e6)             # the link between any two ranks
NEAR = Speed(0.001, 40e6)           # the link between ranks of one node, if there are nodes


class Paced:
    """Sends and receives the messages of one rank at the speed of a slow link. A message occupies
    the rank's outgoing link for bytes / rate seconds. It carries its time of arrival, and the
    receiver sleeps until then; processes on one machine share a clock. `near`: the speed within a
    node; None: LINK everywhere."""

    def __init__(self, rank: int, near: Speed | None = None):
        self.rank, self.near, self.free = rank, near, 0.0
        self.pending: list[tuple[dist.Work, Tensor]] = []

    def send(self, x: Tensor, to: int) -> None:
        inside = self.near and to // NODE == self.rank // NODE
        speed = self.near if inside else LINK
        self.free = max(self.free, time.monotonic()) + x.nbytes / speed.bytes_per_second
        arrives = torch.tensor([self.free + speed.latency], dtype=torch.float64)
        message = torch.cat([arrives.view(torch.uint8), x.contiguous().view(-1).view(torch.uint8)])
        self.pending.append((dist.isend(message, to), message))

    def receive(self, like: Tensor, sender: int) -> Tensor:
        message = torch.empty(8 + like.nbytes, dtype=torch.uint8)
        dist.recv(message, sender)
        time.sleep(max(0.0, message[:8].view(torch.float64).item() - time.monotonic()))
        return message[8:].view(like.dtype).view_as(like)

    def swap(self, x: Tensor, to: int, like: Tensor, sender: int) -> Tensor:
        """Send x to rank `to`, and return the tensor from `sender`, which has `like`'s shape."""
        self.send(x, to)
        return self.receive(like, sender)

    def end(self) -> None:
        """Wait until all messages are sent."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


# ---- All-reduce by messages between two ranks: each function returns the sum over ranks

def direct(x: Tensor, rank: int, ranks: int, link: Paced) -> Tensor:
    """Every rank sends all of x to every other rank."""
    for other in range(1, ranks):
        link.send(x, (rank + other) % ranks)
    return x + sum(link.receive(x, (rank - other) % ranks) for other in range(1, ranks))


def ring(x: Tensor, rank: int, ranks: int, link: Paced) -> Tensor:
    """Each rank sends parts to the next rank: n - 1 steps add parts, n - 1 steps pass on sums."""
    parts = list(x.tensor_split(ranks))
    for step in range(2 * (ranks - 1)):
        give, take = (rank - step) % ranks, (rank - step - 1) % ranks
        part = link.swap(parts[give], (rank + 1) % ranks, parts[take], (rank - 1) % ranks)
        parts[take] = parts[take] + part if step < ranks - 1 else part
    return torch.cat(parts)


def tree(x: Tensor, rank: int, ranks: int, link: Paced) -> Tensor:
    """Sums of 2, 4, ... ranks reach rank 0, which sends the total back along the same tree."""
    distances = [1 << i for i in range((ranks - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            link.send(x, rank - distance)
        elif not rank % (2 * distance) and rank + distance < ranks:
            x = x + link.receive(x, rank + distance)
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            x = link.receive(x, rank - distance)
        elif not rank % (2 * distance) and rank + distance < ranks:
            link.send(x, rank + distance)
    return x


def halving_doubling(x: Tensor, rank: int, ranks: int, link: Paced) -> Tensor:
    """Partners exchange and add halves of the message, then quarters, and so on; then the sums are
    passed back the same way (Rabenseifner). `ranks` is a power of 2 that divides len(x)."""
    low, high, steps = 0, len(x), []
    x = x.clone()
    distance = ranks // 2
    while distance:
        middle, partner = (low + high) // 2, rank ^ distance
        keep, give = (low, middle), (middle, high)
        if rank & distance:
            keep, give = give, keep
        x[slice(*keep)] += link.swap(x[slice(*give)], partner, x[slice(*keep)], partner)
        steps.append((partner, keep, give))
        low, high = keep
        distance //= 2
    for partner, own, other in reversed(steps):
        x[slice(*other)] = link.swap(x[slice(*own)], partner, x[slice(*other)], partner)
    return x


def hierarchical(x: Tensor, rank: int, ranks: int, link: Paced) -> Tensor:
    """Each rank gets its node's sum of one part, adds the sums of its counterparts in the other
    nodes, and passes the result to the ranks of its node."""
    first, parts = rank - rank % NODE, list(x.tensor_split(NODE))
    after, before = first + (rank + 1) % NODE, first + (rank - 1) % NODE
    for step in range(NODE - 1):
        give, take = (rank - step) % NODE, (rank - step - 1) % NODE
        parts[take] = parts[take] + link.swap(parts[give], after, parts[take], before)
    own, peers = (rank + 1) % NODE, range(NODE, ranks, NODE)
    for other in peers:
        link.send(parts[own], (rank + other) % ranks)
    parts[own] = parts[own] + sum(link.receive(parts[own], (rank - other) % ranks)
                                  for other in peers)
    for step in range(NODE - 1):
        give, take = (rank + 1 - step) % NODE, (rank - step) % NODE
        parts[take] = link.swap(parts[give], after, parts[take], before)
    return torch.cat(parts)


ALGORITHMS: dict[str, Callable[[Tensor, int, int, Paced], Tensor]] = {
    "direct": direct, "ring": ring, "tree": tree, "halving-doubling": halving_doubling}


def costs(name: str, n: int) -> tuple[float, float]:
    """Return the cost of an all-reduce of n ranks: the number of latencies in a row, and the bytes
    that pass through a rank's link one after the other, over the bytes of the message."""
    steps = math.log2(n)
    return {"direct": (1, n - 1), "ring": (2 * (n - 1), 2 * (n - 1) / n),
            "tree": (2 * steps, 2 * steps), "halving-doubling": (2 * steps, 2 * (n - 1) / n)}[name]


def seconds(name: str, nbytes: float, speed: Speed, n: int = RANKS) -> float:
    """Return the seconds of an all-reduce of `nbytes` by the alpha-beta formula."""
    latencies, times = costs(name, n)
    return latencies * speed.latency + times * nbytes / speed.bytes_per_second


def crossing(first: str, other: str, speed: Speed, n: int = RANKS) -> float:
    """Return the bytes at which two algorithms take the same time by the formula."""
    (a, b), (c, d) = costs(first, n), costs(other, n)
    return (a - c) / (d - b) * speed.latency * speed.bytes_per_second


def in_nodes(nbytes: float) -> dict[str, float]:
    """Return the seconds of a long all-reduce over two nodes of NODE ranks, by algorithm. In a
    ring, the links between nodes are always busy. In `hierarchical`, each rank sends one part of
    the message between nodes."""
    nodes, inside, hops = RANKS // NODE, 2 * (NODE - 1), 2 * (RANKS - 1)
    wire = nbytes / RANKS / LINK.bytes_per_second       # seconds of one part between nodes
    return {"ring": LINK.latency + hops * wire, "hierarchical": (
        inside * (NEAR.latency + nbytes / NODE / NEAR.bytes_per_second)
        + LINK.latency + (nodes - 1) * nbytes / NODE / LINK.bytes_per_second)}


SIZES = tuple(2**i for i in range(12, 19))      # bytes: 4 KiB to 256 KiB


@dataclass(frozen=True)
class Race:
    """Measured seconds of all-reduces: the slowest rank in the fastest round."""

    flat: dict[tuple[str, int], float]      # by algorithm and bytes, without nodes
    nodes: dict[str, float]                 # by algorithm, for the largest message, with nodes
    error: float        # largest difference from PyTorch's all-reduce, over the largest sum
    spreads: dict[str, list[float]]         # distances from the mean after each round of gossip


def paced(sizes: Sequence[int] = SIZES, rounds: int = 3, gossips: int = 40,
          parent: WarmParent | None = None) -> Race:
    """Run every algorithm on RANKS processes over paced links, and then `gossips` rounds of
    gossip. `sizes`: bytes of the messages."""
    by_rank = on_ranks(race, RANKS, parent, sizes=list(sizes), rounds=rounds, gossips=gossips)
    slowest = {key: max(rank["seconds"][key] for rank in by_rank) for key in by_rank[0]["seconds"]}
    flat = {(key.split()[0], int(key.split()[1])): value for key, value in slowest.items()
            if len(key.split()) == 2}
    nodes = {key.split()[1]: value for key, value in slowest.items() if len(key.split()) == 3}
    return Race(flat, nodes, max(rank["error"] for rank in by_rank), by_rank[0]["spreads"])


def race(place: Place, given: dict[str, Any]) -> dict[str, Any]:
    """Time all algorithms, together with the other ranks. Returns the fastest `seconds` by case,
    the largest `error`, and the `spreads` of gossip."""
    meet_as(place, "race")
    rank, ranks, largest = place.rank, place.world, max(given["sizes"])
    cases = [(f"{name} {nbytes}", function, nbytes, None) for nbytes in given["sizes"]
             for name, function in ALGORITHMS.items()]
    cases += [(f"nodes {function.__name__} {largest}", function, largest, NEAR)
              for function in (ring, hierarchical)]
    fastest, error = {}, 0.0
    for function in (*ALGORITHMS.values(), hierarchical):       # connects each pair of ranks
        function(torch.zeros(64), rank, ranks, link := Paced(rank, NEAR))
        link.end()
    for number, (key, function, nbytes, near) in enumerate(cases):
        place.at(number, key)
        draw = torch.Generator().manual_seed(rank)
        x = torch.randn(nbytes // 4, generator=draw)
        for _ in range(given["rounds"]):
            link = Paced(rank, near)
            dist.barrier()
            begun = time.monotonic()
            total = function(x, rank, ranks, link)
            took = time.monotonic() - begun
            link.end()
            worst = torch.tensor(took)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            fastest[key] = min(fastest.get(key, math.inf), worst.item())
        due = x.clone()
        dist.all_reduce(due)
        error = max(error, ((total - due).abs().max() / due.abs().max()).item())
    return {"seconds": fastest, "error": error, "spreads": spreads(given["gossips"])}


def spreads(rounds: int) -> dict[str, list[float]]:
    """Return, by method of gossip, the distance of the ranks' vectors from their mean after each
    round, over the distance at the start. The distance is the root of the sum of squares over ranks
    and elements. The averaging functions are the functions that training uses."""
    by_method = {}
    for name in ("gossip-ring", "gossip-exponential"):
        average, state = REDUCTIONS[name].load().keywords["average"], {}
        x = torch.randn(64, generator=torch.Generator().manual_seed(dist.get_rank())).double()
        mean = x.clone()
        dist.all_reduce(mean)
        distances = []
        for _ in range(rounds + 1):
            average(x, dist.group.WORLD, state)     # the first call only counts
            far = (x - mean / dist.get_world_size()).square().sum()
            dist.all_reduce(far)
            distances.append(far.sqrt().item())
        by_method[name] = [distance / distances[0] for distance in distances]
    return by_method


def second_eigenvalue(n: int) -> float:
    """Return lambda_2, the second largest eigenvalue of averaging with both neighbours on a ring of
    n ranks. Each round of gossip shrinks the distance from the mean by this factor."""
    return (1 + 2 * math.cos(2 * math.pi / n)) / 3


def decay(distances: Sequence[float]) -> float:
    """Return the factor by which a round shrinks the distance from the mean. It is measured over
    the second half of the rounds, where only the slowest mode is left."""
    half = len(distances) // 2
    return (distances[-1] / distances[half]) ** (1 / (len(distances) - 1 - half))


def line(name: str, flat: Mapping[tuple[str, int], float]) -> tuple[float, float]:
    """Fit a line through an algorithm's measured times. Returns the seconds of an empty message and
    the seconds per byte. The slope is the median over all pairs of points (Theil-Sen), so one late
    message does not change it."""
    points = [(nbytes, took) for (algorithm, nbytes), took in flat.items() if algorithm == name]
    slope = median((b - a) / (y - x) for (x, a), (y, b) in itertools.combinations(points, 2))
    return median(took - slope * nbytes for nbytes, took in points), slope


def measured_crossing(first: str, other: str, flat: Mapping[tuple[str, int], float]) -> float:
    """Return the bytes at which the lines through the measured times of two algorithms cross."""
    (a, b), (c, d) = line(first, flat), line(other, flat)
    return (a - c) / (d - b)


# ---- Training: four ranks, ten ways to send less

WORLD, STEPS, SEEDS, FIRST = 4, 300, 3, 10
PLAIN = "buckets"       # an all-reduce of 25 MiB at a time
METHODS = (PLAIN, "bits-8", "bits-4", "powersgd-4", "top-k-0.01", "top-k-0.001", "sign", "local-10",
           "diloco-10", "gossip-ring", "gossip-exponential")
BASE = {"imports": "lessons.rows.reductions", "model.layers": 2, "model.width": 64,
        "model.heads": 4, "model.context": 64, "model.norm": "rmsnorm", "model.mlp": "swiglu",
        "model.position": "rope", "model.bias": False, "global_batch": 8, "steps": STEPS,
        "optimizer.lr": 3e-3, "optimizer.beta2": 0.95, "schedule.warmup_steps": 20,
        "eval_batches": 32, "precision.recipe": "fp32", "system.device": "cpu",
        "system.threads": 1, "parallel.data": WORLD, "parallel.zero": 0}


def config(method: str, seed: int = 0) -> Config:
    return Config().replace(BASE | {"parallel.reduction": method, "seed": seed})


def predicted_bytes(method: str) -> float:
    """Return the bytes that a rank sends per update, as the method's row predicts; for the plain
    all-reduce, the bytes of a ring."""
    row, m = REDUCTIONS[method], config(method).model
    shapes = [bucket[0] if len(bucket) == 1 else (sum(map(math.prod, bucket)),)
              for bucket in buckets(m, row.bucket_bytes // 4)]
    sent = row.sent or REDUCTIONS["local-10"].sent
    # local-10 sends the bytes of one all-reduce in ten updates
    return sum(sent(shape, WORLD, 4) for shape in shapes) * (1 if row.sent else 10)


def parameters() -> int:
    return sum(map(math.prod, sum(buckets(config(PLAIN).model, 1 << 40), ())))


def train(place: Place, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Train the runs given["runs"] (method, seed) for given["updates"] updates, one run after the
    other. Returns for each run the losses of the first updates, the `bytes` that this rank sends
    per update, the last `val_loss`, and `apart`: the mean distance of the ranks' weights from the
    mean of the weights, over the norm of that mean."""
    torch.set_num_threads(1)
    results, store = [], place.store
    for number, (method, seed) in enumerate(given["runs"]):
        place.at(number, method)
        place.store = f"{store}-{number}"
        settings = config(method, seed)
        with joined(settings, local_rank=place.local_rank, **place.among) as ranks:
            training = Training.build(settings, ranks=ranks)
            with MessageCount() as count:       # ten updates: local SGD averages every tenth update
                losses = [training.update(step).loss.item() for step in range(FIRST)]
            for step in range(FIRST, given["updates"]):
                training.update(step)
            sent = sum(each_sends(message) * times for message, times in count.sent.items()
                       if message.nbytes > 4 or message.kind == SEND)
            weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
            mean = ranks.mean(weights)
            far = ranks.mean((weights - mean).norm()) / mean.norm()
            results.append({"method": method, "seed": seed, "losses": losses,
                            "bytes": sent / FIRST, "apart": far.item(),
                            "val_loss": training.evaluate() if given["evaluate"] else None})
    return results


def first_updates(methods: Sequence[str], parent: WarmParent | None = None) -> dict[str, dict]:
    """Return rank 0's results of `train` by method, for the first ten updates of the recorded
    runs."""
    runs = [(method, 0) for method in methods]
    results, *_ = on_ranks(train, WORLD, parent, runs=runs, updates=FIRST, evaluate=False)
    return {run["method"]: run for run in results}


@dataclass(frozen=True)
class Record:
    """The recorded runs of `lpkit bench talk-less`."""

    runs: list[dict[str, Any]]
    by_method: dict[str, list[dict[str, Any]]] = field(init=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "by_method", {
            method: [run for run in self.runs if run["method"] == method] for method in METHODS})

    def more(self, method: str) -> list[float]:
        """Return, by seed, the method's loss over the loss of the plain all-reduce, minus 1."""
        plain = {run["seed"]: run["val_loss"] for run in self.by_method[PLAIN]}
        return [run["val_loss"] / plain[run["seed"]] - 1 for run in self.by_method[method]]

    def bytes_of(self, method: str) -> float:
        """Return the bytes that a rank sent per update."""
        return self.by_method[method][0]["bytes"]

    def first(self, method: str) -> list[float]:
        """Return the losses of the first updates of seed 0."""
        return self.by_method[method][0]["losses"]


def record() -> Record:
    return Record(json.loads(next(MEASURED.glob("talk-less-*.json")).read_text())["runs"])


# ---- Figures

def race_figure(measured: Race, others: float = 0.0) -> dict:
    """Return the plotly spec of seconds over bytes: lines by formula, measured points."""
    sizes, data = sorted({nbytes for _, nbytes in measured.flat}), []
    for name, colour in zip(ALGORITHMS, (*COLOURS[:3], COLOURS[4])):
        data.append(scatter(sizes, [seconds(name, size, LINK) for size in sizes],
                            f"{name}, formula", colour, hover="%{x} bytes: %{y:.3f} s"))
        data.append(scatter(sizes, [measured.flat[name, size] for size in sizes],
                            f"{name}, measured", colour, mode="markers", marker={"size": 9},
                            showlegend=False, hover="%{x} bytes: %{y:.3f} s", **SECONDS))
    return figure(data, "All-reduce over slowed links of 8 ranks", others=others, height=440,
                  xaxis=axis("bytes of the message", type="log", dtick=1, exponentformat="SI"),
                  yaxis=axis("seconds", type="log", dtick="D2"))


def frontier_figure(record: Record) -> dict:
    """The plotly spec of loss over bytes: a point per method with its range over seeds, and the
    frontier: the methods that no other method beats in both."""
    plain, n = record.bytes_of(PLAIN), parameters()
    points = {method: (record.bytes_of(method) / n, 100 * fmean(record.more(method)))
              for method in METHODS}
    front, best = [], math.inf
    for x, y in sorted(points.values()):
        if y < best:
            front.append((x, y))
            best = y
    data = [scatter(*zip(*front), "frontier", line={"dash": "dot", "shape": "hv"}, hover=None,
                    colour="#777")]
    for i, (method, (x, y)) in enumerate(points.items()):
        each = [100 * more for more in record.more(method)]
        data.append(scatter(
            [x], [y], "all-reduce" if method == PLAIN else method, COLOURS[i % len(COLOURS)],
            mode="markers", marker={"size": 10, "symbol": SYMBOLS[i // len(COLOURS)]},
            error_y={"type": "data", "symmetric": False, "array": [max(each) - y],
                     "arrayminus": [y - min(each)]},
            hover=f"%{{x:.3g}} bytes per parameter, {plain / n / x:.3g} times fewer: "
                  f"%{{y:+.1f}}%"))
    return figure(data, "Loss over sent bytes: four ranks, 300 updates", height=520,
                  legend={"orientation": "h", "y": -0.25},
                  xaxis=axis("bytes that a rank sends per parameter and update", type="log",
                             dtick=1),
                  yaxis=axis("loss above the all-reduce's, %"),
                  shapes=[rule(y=2.0)], annotations=[note("2%", 0.0, 2.0, xref="paper")])


SYMBOLS = ("circle", "diamond", "square", "x")


def spread_figure(measured: Race) -> dict:
    """The plotly spec of gossip's distance from the mean, with lambda_2 to the power of the round.
    The zeros of the exponential graph are left out, since the axis is logarithmic."""
    names = {"gossip-ring": "ring, measured", "gossip-exponential": "exponential graph, measured"}
    data = [scatter(range(len(distances)), [d if d > 1e-9 else None for d in distances],
                    names[name], colour, mode="markers", hover="round %{x}: %{y:.2g}")
            for (name, distances), colour in zip(measured.spreads.items(), COLOURS)]
    eigenvalue, rounds = second_eigenvalue(RANKS), range(len(measured.spreads["gossip-ring"]))
    data.append(scatter(list(rounds), [eigenvalue**count for count in rounds],
                        "ring, lambda_2 to the power of the round", COLOURS[0], hover=None))
    return figure(data, "Gossip: distance of 8 ranks from their mean", height=400,
                  xaxis=axis("rounds"), yaxis=axis("distance, over that at the start", type="log",
                                                   dtick=1, exponentformat="power"))


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


@exercise("18.crossing", (8, 1e-5, 1e-9), (16, 2e-6, 1e-10), (4, 1e-3, 1e-8), minutes=5,
          draw=lambda r: (2 ** r.randint(2, 10), 10 ** r.uniform(-6, -3), 10 ** r.uniform(-11, -8)),
          mistakes={"a tree sends all bytes up and all bytes down: 2 log2(n) times":
                        lambda n, a, b: (2 * (n - 1) - 2 * math.log2(n)) * a
                        / ((math.log2(n) - 2 * (n - 1) / n) * b),
                    "the ring has more latencies, the tree has more bytes": lambda n, a, b: (
                        2 * math.log2(n) - 2 * (n - 1)) * a
                        / ((2 * math.log2(n) - 2 * (n - 1) / n) * b),
                    "bytes, and not seconds: divide by beta": lambda n, a, b: (
                        2 * (n - 1) - 2 * math.log2(n)) * a
                        / (2 * math.log2(n) - 2 * (n - 1) / n)})
def crossing_bytes(n: int, a: float, b: float) -> float:
    latencies, times = 2 * (n - 1) - 2 * math.log2(n), 2 * math.log2(n) - 2 * (n - 1) / n
    return latencies * a / (times * b)


def _gradients(r: Random) -> tuple[list[list[float]]]:
    return ([[round(r.uniform(-1, 1), 3) for _ in range(4)] for _ in range(r.randint(2, 6))],)


def _feedback(gradients: Sequence[Sequence[float]], error: Callable) -> list[list[float]]:
    """Send the largest element of each gradient; `error` computes what is added to the next one."""
    left, sent = [0.0] * len(gradients[0]), []
    for g in gradients:
        x = [a + b for a, b in zip(g, left)]
        top = max(range(len(x)), key=lambda i: abs(x[i]))
        sent.append([value if i == top else 0.0 for i, value in enumerate(x)])
        left = error(x, sent[-1], g)
    return sent


@exercise("18.feedback", ([[1.0, 0.6, 0.0], [0.0, 0.6, 0.0], [0.1, 0.1, 0.2]],),
          ([[0.5, -0.4], [0.1, -0.4], [0.0, 0.0]],), minutes=8, stars=2, draw=_gradients,
          mistakes={"what is left out is added to the next gradient": lambda gradients: _feedback(
                        gradients, lambda x, sent, g: [0.0] * len(x)),
                    "the error is of gradient plus error, not of the gradient alone":
                        lambda gradients: _feedback(gradients, lambda x, sent, g: [
                            a - b for a, b in zip(g, sent)])})
def top_one(gradients: list[list[float]]) -> list[list[float]]:
    left, sent = [0.0] * len(gradients[0]), []
    for g in gradients:
        x = [a + b for a, b in zip(g, left)]
        top = max(range(len(x)), key=lambda i: abs(x[i]))
        sent.append([value if i == top else 0.0 for i, value in enumerate(x)])
        left = [a - b for a, b in zip(x, sent[-1])]
    return sent


@exercise("18.rounds", (8, 0.1), (16, 0.01), (5, 0.5), minutes=5,
          draw=lambda r: (r.randint(4, 40), r.uniform(0.001, 0.5)),
          mistakes={"the distance falls by lambda_2 in a round, not by 1 - lambda_2":
                        lambda n, share: math.ceil(math.log(share) / math.log(
                            1 - (1 + 2 * math.cos(2 * math.pi / n)) / 3)),
                    "an average of three: divide by 3": lambda n, share: math.ceil(
                        math.log(share) / math.log((1 + math.cos(2 * math.pi / n)) / 2)),
                    "at most the share: round up": lambda n, share: math.floor(
                        math.log(share) / math.log((1 + 2 * math.cos(2 * math.pi / n)) / 3))})
def rounds_needed(n: int, share: float) -> int:
    return math.ceil(math.log(share) / math.log((1 + 2 * math.cos(2 * math.pi / n)) / 3))
