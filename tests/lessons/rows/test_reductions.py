"""Only these tests catch a reduction that sends other bytes than its row says, forgets its state at
a checkpoint, or feeds back another error than the definition."""

import math

import pytest
import torch

import lessons.rows.reductions as rows
from lessons.ranks.messages import each_sends, messages
from lpkit import predict_trace
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.hardware import room
from lpkit.measure.trace import fake_world
from lpkit.measure.tracking import MessageCount
from lpkit.parallel.processes import Processes
from lpkit.predict import memory
from lpkit.predict.time import step_time
from lpkit.techniques.layouts import REDUCTIONS, Layout
from tests.lessons.rows.reduction_ranks import ROUNDS, gradients

pytestmark = pytest.mark.dist
NAMES = [name for name, row in REDUCTIONS.items() if row.sent]
OWN_WEIGHTS = ["local-10", "diloco-10", "gossip-ring", "gossip-exponential"]
CODED = ["top-k-0.01", "top-k-0.001", "bits-8", "bits-4", "sign", "powersgd-4"]
SMALL = Config().replace({
    "imports": "lessons.rows.reductions", "model.layers": 2, "model.width": 32, "model.heads": 4,
    "model.context": 16, "global_batch": 8, "precision.recipe": "fp32", "system.device": "cpu",
    "system.threads": 1, "parallel.data": 2, "parallel.zero": 0})


def on_ranks(parent, function, world, **given):
    with Processes(f"tests.lessons.rows.reduction_ranks:{function}", given, world=world,
                   parent=parent) as running:
        return running.wait()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_are_those_of_the_row(name, ranks):
    """Ten updates, so that an average every ten updates is one of them."""
    row, average = REDUCTIONS[name], REDUCTIONS[name].load().keywords["average"]
    with fake_world(Layout(data=ranks, zero=0), "cpu") as world:
        for shape in (1,), (1000,), (48, 20), (7, 3):
            with MessageCount() as count:
                state = {}
                for _ in range(10 + (name in OWN_WEIGHTS)):
                    average(torch.ones(shape), world.groups["replicas"], state)
            sent = sum(each_sends(message) * times for message, times in count.sent.items())
            assert sent == pytest.approx(10 * row.sent(shape, ranks, 4), abs=1e-9)


@pytest.mark.parametrize("name", CODED)
def test_a_trace_sends_what_is_predicted(name):
    config = SMALL.replace({"parallel.reduction": name})
    sent, due = (sum(each_sends(message) * times for message, times in counted.items())
                 for counted in (predict_trace(config).messages, messages(config)))
    assert sent == pytest.approx(due, abs=1)
    assert "is not counted" in str(memory(config, room("cpu")).doubt)


def test_seconds_are_priced_by_bytes():
    def seconds(name):
        config = SMALL.replace({"parallel.data": 4, "parallel.reduction": name,
                                "model.width": 2048, "model.layers": 8})
        rows = step_time(config, "h200").rows
        row = next(row for row in rows if row.name.startswith("data: "))
        return row.seconds + getattr(row, "hidden_seconds", 0)

    assert seconds("local-10") < 0.2 * seconds("overlapped")
    assert seconds("bits-4") == pytest.approx(
        3 * (4 / 8 + 4 / 256) / (1.5 * 4) * seconds("overlapped"), rel=0.2)
    assert seconds("buckets") == seconds("overlapped")


def defined(name, by_rank):
    """Error feedback in float64, on whole arrays of all ranks."""
    n, shape = len(by_rank), by_rank[0][0].shape
    errors = [torch.zeros(shape, dtype=torch.float64) for _ in range(n)]
    q = torch.randn(shape[1], 4, generator=torch.Generator().manual_seed(0)).double()
    averages = []
    for i in range(ROUNDS):
        xs = [by_rank[r][i].double() + errors[r] for r in range(n)]
        if name == "powersgd-4":
            p = torch.linalg.qr(sum(x @ q for x in xs) / n)[0]
            q = sum(x.T @ p for x in xs) / n
            sent = [p @ q.T] * n
        else:
            sent = [approximation(name, x.flatten()).view(shape) for x in xs]
        errors = [x - coded for x, coded in zip(xs, sent)]
        averages.append(sum(sent) / n)
    return averages


def approximation(name, x):
    if name == "sign":
        return torch.where(x < 0, -1.0, 1.0) * x.abs().mean()
    if name.startswith("top"):
        count = max(1, int(float(name.rpartition("-")[2]) * len(x)))
        return torch.where(x.abs() >= x.abs().sort().values[-count], x, 0.0)
    most = 2**(int(name[-1]) - 1) - 1
    return torch.cat([(part * most / part.abs().max()).round() * part.abs().max() / most
                      for part in x.split(rows.BLOCK)])


def test_error_feedback_is_that_of_float64(parent):
    """1e-5 of the largest number: float32 sums of 1,000 numbers. Of 1,073 codes a few lie so near
    the middle of two that float32 takes the other one: those are a step of a code off at most."""
    shape, world = (37, 29), 3
    config = SMALL.replace({"parallel.data": world, "global_batch": 6})
    by_rank = on_ranks(parent, "averages", world, names=CODED, shape=shape,
                       config=config.to_dict())
    for name in CODED:
        assert all(results[name] == by_rank[0][name] for results in by_rank)      # to the bit
        due = defined(name, [gradients(shape, rank) for rank in range(world)])
        for got, want in zip(by_rank[0][name], due, strict=True):
            off = (torch.tensor(got).double() - want).abs().flatten().sort().values
            off = off / want.abs().max()
            assert off[-6] < 1e-5 and off[-1] < (0.16 if name == "bits-4" else 0.01), name


def test_a_resumed_run_is_the_uninterrupted_run(parent, tmp_path):
    """To the bit, also where each rank has its own weights. The ring of 3 never agrees."""
    names = [name for name in NAMES if name not in ("top-k-0.001", "bits-8")]
    config = SMALL.replace({"parallel.data": 3, "global_batch": 6})
    by_rank = on_ranks(parent, "resumed", 3, names=names, folder=str(tmp_path),
                       config=config.to_dict())
    for name, *of in zip(names, *by_rank, strict=True):
        assert all(first == again for first, again in of), name
        agree = all(of_rank[0][1] == of[0][0][1] for of_rank in of)
        assert agree == (name not in OWN_WEIGHTS), name


@pytest.mark.parametrize("changes, sentence", [
    ({"parallel.reduction": "bits-5"}, "there is no parallel.reduction 'bits-5'"),
    ({"parallel.reduction": "bits-4", "parallel.data": 1},
     "parallel.reduction=bits-4 averages over two or more whole replicas, and this layout is one "
     "device; set parallel.data=2"),
    ({"parallel.reduction": "sign", "parallel.data": 1, "parallel.shard": 2, "parallel.zero": 1},
     "averages over two or more whole replicas, and this layout is shard 2, ZeRO 1"),
    ({"parallel.reduction": "sign", "parallel.tensor": 2}, "this layout is data 2, tensor 2")])
def test_refusals(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        SMALL.replace(changes)


def test_counts():
    assert rows.top_count(0.01, 50) == 1 and rows.top_count(0.01, 250) == 2
    assert rows.coded_bytes(4, 257) == 2 * (128 + 4) and rows.sign_bytes(9) == 6
    assert math.isclose(REDUCTIONS["gossip-ring"].sent((10,), 4, 4), 80)
