"""Only these tests catch an all-reduce of lesson 18 that adds up wrongly or takes other messages
than its formula, an eigenvalue that is not the ring's, and text that the record contradicts."""

import queue
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

import nbformat
import numpy as np
import pytest
import torch

from lessons import l18_talk_less as lesson
from lessons.l18_talk_less import LINK, NEAR, NODE, REDUCTIONS
from tests import NOTEBOOKS


class Clocked:
    """A link of one rank on a clock that only messages move, so that threads may take any turn."""

    def __init__(self, rank, queues, near=None):
        self.rank, self.queues, self.near = rank, queues, near
        self.now = self.free = 0.0

    def send(self, x, to):
        speed = self.near if self.near and to // NODE == self.rank // NODE else LINK
        self.free = max(self.free, self.now) + x.nbytes / speed.bytes_per_second
        self.queues[self.rank, to].put((self.free + speed.latency, x.clone()))

    def receive(self, like, sender):
        arrives, x = self.queues[sender, self.rank].get(timeout=60)
        self.now = max(self.now, arrives)
        return x

    def swap(self, x, to, like, sender):
        self.send(x, to)
        return self.receive(like, sender)


def clocked(function, n, numbers, near=None):
    """The seconds of the slowest rank; every rank must have the sum."""
    queues = {(a, b): queue.Queue() for a in range(n) for b in range(n)}
    links = [Clocked(rank, queues, near) for rank in range(n)]
    given = torch.randn(n, numbers, generator=torch.Generator().manual_seed(0)).double()
    with ThreadPoolExecutor(n) as pool:
        sums = list(pool.map(lambda rank: function(given[rank].clone(), rank, n, links[rank]),
                             range(n)))
    for total in sums:
        torch.testing.assert_close(total, given.sum(0))
    return max(link.now for link in links)


@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("name", lesson.ALGORITHMS)
def test_an_all_reduce_takes_what_its_formula_says(name, n):
    took = clocked(lesson.ALGORITHMS[name], n, 4096)
    assert took == pytest.approx(lesson.seconds(name, 8 * 4096, LINK, n), rel=1e-9)


def test_two_nodes_take_what_their_formula_says():
    numbers = 1 << 16
    due = lesson.in_nodes(8 * numbers)
    assert clocked(lesson.hierarchical, lesson.RANKS, numbers, NEAR) == pytest.approx(
        due["hierarchical"], rel=1e-9)
    assert clocked(lesson.ring, lesson.RANKS, numbers, NEAR) == pytest.approx(due["ring"], rel=0.1)


@pytest.mark.parametrize("n", [3, 8, 50])
def test_the_second_eigenvalue_is_that_of_the_matrix(n):
    matrix = sum(np.roll(np.eye(n), shift, 1) for shift in (-1, 0, 1)) / 3
    assert lesson.second_eigenvalue(n) == pytest.approx(np.linalg.eigvalsh(matrix)[-2])


@pytest.mark.parametrize("k", [4, 10, 25])
def test_a_gradient_in_bursts_moves_adam_less_far_by_the_root(k):
    """The page's reason, by PyTorch's Adam: k gradients at once, every k updates."""
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer, updates = torch.optim.Adam([w], lr=1.0, betas=(0.9, 0.95)), 2000
    for i in range(updates):
        w.grad = torch.full_like(w, float(k * (i % k == 0)))
        optimizer.step()
    assert -w.item() / updates == pytest.approx(k**-0.5, rel=0.1)


def test_crossings():
    nbytes = lesson.crossing("tree", "ring", LINK)
    assert lesson.seconds("tree", nbytes, LINK) == pytest.approx(
        lesson.seconds("ring", nbytes, LINK))
    assert nbytes == pytest.approx(lesson.crossing_bytes(8, 0.01, 1 / 4e6))
    flat = {(name, size): lesson.seconds(name, size, LINK) for name in lesson.ALGORITHMS
            for size in lesson.SIZES}
    assert lesson.measured_crossing("tree", "ring", flat) == pytest.approx(nbytes)
    for late in flat:       # one message that comes 0.3 s late
        near = lesson.measured_crossing("tree", "ring", flat | {late: flat[late] + 0.3})
        assert near == pytest.approx(nbytes, rel=0.01)


def test_bytes_of_the_record_are_those_of_the_rows():
    record = lesson.record()
    for method in lesson.METHODS:
        assert record.bytes_of(method) == pytest.approx(lesson.predicted_bytes(method), abs=1)
        assert [run["seed"] for run in record.by_method[method]] == list(range(lesson.SEEDS))
        assert (record.by_method[method][0]["apart"] > 0) == method.startswith("gossip")


def test_what_the_page_says_of_the_record():
    book = nbformat.read(f"{NOTEBOOKS}/18_talk_less.ipynb", as_version=4)
    text = " ".join(" ".join(cell.source.split()) for cell in book.cells)
    record = lesson.record()
    for method, words in SAID.items():
        assert words.format(100 * fmean(record.more(method))) in text, method
    bits, plain = (REDUCTIONS[name].sent for name in ("bits-4", "local-10"))
    least = next(n for n in range(2, 99) if bits((1 << 20,), n, 4) > 10 * plain((1 << 20,), n, 4))
    assert f"from {least} ranks on, 4 bits send more" in text
    assert f"It sends {fewer('top-k-0.001'):.0f} times fewer bytes" in text


def fewer(method):
    return lesson.predicted_bytes(lesson.PLAIN) / lesson.predicted_bytes(method)


SAID = {"bits-4": "the loss is {:.1f}% above", "top-k-0.001": "its loss is {:.1f}% above",
        "top-k-0.01": "Top-k at 1% costs {:.1f}%", "sign": "one bit per number (sign) {:.1f}%",
        "powersgd-4": "PowerSGD costs {:.1f}%", "local-10": "(local SGD) cost {:.1f}%",
        "diloco-10": "outer step {:.1f}%", "gossip-ring": "Gossip costs {:.1f}% on either graph",
        "gossip-exponential": "Gossip costs {:.1f}% on either graph"}
