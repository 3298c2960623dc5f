"""Pipelines: orders, their clock, and a runtime over real processes."""

import heapq
import itertools
import json
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import lessons.rows.optimizers
import lessons.rows.pipelines  # noqa: F401  ten rules and four orders more
from lessons.ranks.clock import clock
from lessons.ranks.rehearsal import rehearse
from lpkit import train
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure.trace import predict_trace
from lpkit.parallel.pipeline import message, order, routes
from lpkit.parallel.processes import Processes
from lpkit.predict import memory
from lpkit.predict.flops import products
from lpkit.predict.time import step_time
from lpkit.presets import preset
from lpkit.techniques.layouts import Layout, refuse_untrainable, stages_fit
from lpkit.techniques.machines import CATALOGUE
from lpkit.techniques.pipelines import PIPELINES, closed_order
from lpkit.techniques.stages import GAIN, head_layers, rank_layers, stage_layers
from lpkit.training.training import Training
from tests.parallel.pipeline_ranks import counted, trained, whole

SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4, 7, 8, 12, 16)))


def orders(sizes=SIZES):
    for name, row in PIPELINES.items():
        for ranks, chunks, m in sizes:
            if not row.problem(ranks, chunks, m):
                yield name, (ranks, chunks, m), order(name, ranks, chunks, m)


def least_chunks(name):
    return PIPELINES[name].chunks[0]


# ---- orders

def test_every_order_that_a_row_allows_is_one():
    """The stages lie where the row says, backward is split where it says, and nothing waits for
    ever (`clock` raises)."""
    count = 0
    for name, (ranks, chunks, m), found in orders():
        row = PIPELINES[name]
        assert {rank: {stage for stage, _, _ in actions} for rank, actions in found.items()} == {
            rank: set(row.stages(rank, ranks, chunks)) for rank in range(ranks)}
        assert (sum(kind == "F" for actions in found.values() for _, kind, _ in actions) == ranks
                * chunks * m)
        assert (any(kind == "W" for actions in found.values() for _, kind, _ in actions)
                == row.splits)
        clock(found, forward=1.0, dx=1.0, dw=1.0)
        count += 1
    assert count > 300


def test_what_a_row_refuses_pytorch_refuses():
    for name, row in PIPELINES.items():
        for ranks, chunks, m in SIZES:
            if row.problem(ranks, chunks, m) and row.chunks[0] <= chunks <= row.chunks[1]:
                with pytest.raises(ValueError):
                    pytorchs(row, ranks, chunks, m)
                with pytest.raises(ConfigError,
                                   match=f"parallel.schedule={name} has no order of {m} "
                                         f"micro-batches"):
                    order(name, ranks, chunks, m)


class StandIn:
    """Notes how a schedule calls its stage: GPipe and 1F1B have no other order. (What their
    `pipeline_order` shows is none: in
    2.13 the last stage of 1F1B begins with micro-batch 1.)"""

    submod, has_backward, is_first, is_last = None, True, False, False

    def __init__(self, stage, rank, stages, ranks):
        self.stage_index, self.group_rank, self.num_stages, self.group_size = (stage, rank, stages,
            ranks)
        self.called = []

    def forward_one_chunk(self, micro, *args, **more):
        self.called.append((self.stage_index, "F", micro))

    def backward_one_chunk(self, micro, **more):
        self.called.append((self.stage_index, "B", micro))

    def nothing(self, *args, **more):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = (nothing)


def pytorchs(row, ranks, chunks, m):
    kind, found = row.load(), {}
    for rank in range(ranks):
        stages = [StandIn(stage, rank, ranks * chunks, ranks)
                  for stage in row.stages(rank, ranks, chunks)]
        single = issubclass(kind, PipelineScheduleSingle)
        made = kind(stages[0] if single else stages, m, loss_fn=print)
        if not single:
            return {rank: [(one.stage_index, one.computation_type.value, one.microbatch_index)
                           for one in actions if one.is_compute_op]
                    for rank, actions in made.pipeline_order_with_comms.items()}
        made._initialize_stage = stages[0].nothing
        made._step_microbatches([()] * m, [{}] * m, [None] * m, [])
        found[rank] = stages[0].called
    return found


def test_closed_orders_are_pytorchs():
    closed = 0
    for name, sizes, _ in orders():
        if (row := PIPELINES[name]).warm_up:
            assert closed_order(row, *sizes) == pytorchs(row, *sizes), (name, sizes)
            closed += 1
    assert closed > 150


# ---- the clock

def by_events(found, seconds, message):
    """The end of an update, another way: a queue of events, in the order of time."""
    rank_of = {stage: rank for rank, actions in found.items() for stage, _, _ in actions}
    last, at, busy, there = max(rank_of), dict.fromkeys(found, 0), dict.fromkeys(found, False), {}
    events, now = [], 0.0

    def begin(rank):
        if busy[rank] or at[rank] == len(found[rank]):
            return
        stage, kind, micro = found[rank][at[rank]]
        need = {"F": ("F", stage - 1, micro) if stage else None, "W": ("I", stage, micro)}.get(
            kind, ("I", stage + 1, micro) if stage < last else ("F", stage, micro))
        if need is None or (need, rank) in there:
            busy[rank] = True
            heapq.heappush(events, (now + seconds[kind][stage], 0, rank, stage, kind, micro))

    for rank in found:
        begin(rank)
    while events:
        now, arrives, rank, stage, kind, micro = heapq.heappop(events)
        made = ("F" if kind == "F" else "I", stage, micro)
        if arrives:
            there[made, rank] = True
        else:
            busy[rank], at[rank] = False, at[rank] + 1
            there[made, rank] = True
            to = rank_of.get(stage + 1 if kind == "F" else stage - 1 if kind in "IB" else None,
                             rank)
            if to != rank:
                heapq.heappush(events, (now + message, 1, to, stage, kind, micro))
        begin(rank)
    assert all(at[rank] == len(actions) for rank, actions in found.items())
    return now


@pytest.mark.parametrize("message", [0.0, 0.3])
def test_the_clock_is_that_of_events(message):
    rng = torch.Generator().manual_seed(0)
    for name, (ranks, chunks, _), found in orders([(1, 1, 3), (2, 2, 4), (3, 2, 6), (4, 1, 8),
            (4, 2, 8), (4, 3, 12)]):
        f, i, w = (torch.rand(3, ranks * chunks, generator=rng) + 0.5).tolist()
        done = clock(found, forward=f, dx=i, dw=w, message_seconds=message)
        seconds = {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w)]}
        assert done.step_seconds == pytest.approx(by_events(found, seconds, message),
            rel=1e-12), name
        work = sum(map(sum, (f, i, w))) * len({micro for _, _, micro in found[0]})
        assert done.bubble_share == pytest.approx(1 - work / (ranks * done.step_seconds), abs=1e-12)


def cut_in(row):
    for sizes in ((2, 2, 4), (4, 1, 8), (4, 2, 8), (4, 2, 16), (4, 3, 12), (8, 1, 16), (8, 2, 16),
                  (4, 4, 16)):
        if not row.problem(*sizes):
            yield sizes


@pytest.mark.parametrize("name", PIPELINES)
def test_bubbles_are_the_closed_forms(name):
    """Exactly, over a grid of costs; of a V where F, I and W take equally long, and else within a
    tenth of the update."""
    row, off = PIPELINES[name], []
    for ranks, chunks, m in cut_in(row):
        found = order(name, ranks, chunks, m)
        for f, i, w in itertools.product((0.5, 1, 1.25, 2, 3), repeat=3):
            step, work = clock(found, forward=f, dx=i, dw=w).step_seconds, m * chunks * (f + i + w)
            if not row.even or f == i == w:
                assert step - work == pytest.approx(row.bubble(ranks, f, i, w), rel=1e-9,
                    abs=1e-9), (f, i, w)
            off.append((work + row.bubble(ranks, f, i, w)) / step - 1)
    assert row.even == (max(map(abs, off)) > 1e-9) and max(map(abs, off)) < 0.105


@pytest.mark.parametrize("name", PIPELINES)
def test_messages_in_a_row_are_those_of_the_clock(name):
    """What an update grows by, over a small message; of zero bubble where dx is longer than F or dw
    it is less."""
    row = PIPELINES[name]
    for sizes in cut_in(row):
        found = order(name, *sizes)
        took = [clock(found, forward=1, dx=1, dw=1, message_seconds=late).step_seconds
                for late in (0, 1e-3)]
        assert 1e3 * (took[1] - took[0]) == pytest.approx(row.hops(*sizes), rel=1e-6), sizes


@pytest.mark.parametrize("slow", [1, 8])
@pytest.mark.parametrize("name", PIPELINES)
def test_shares_of_a_predicted_update_are_those_of_the_clock(name, slow):
    """llama-8b with a small vocabulary, so that stages are alike but for one gather in the last:
    what bubble and messages take of an update, by `predict` and by the clock over the order with
    the predicted seconds of a stage and of a message; also over a network `slow` times as slow.
    That gather and rounding are 0.0025; of a V the form of the bubble holds less where dx and dw
    are not F."""
    on = replace(CATALOGUE["h100"],
                 network_bytes_per_second=CATALOGUE["h100"].network_bytes_per_second / slow)
    row, ranks, m = PIPELINES[name], 4, 16
    layout = Layout(pipeline=ranks, tensor=8, schedule=name, interleave=least_chunks(name))
    config = preset("llama-8b").replace({"model.vocab": 8, "global_batch": m,
        "grad_accum_steps": m})
    found = step_time(config, on, layout)
    late = found["pipeline: send and receive"].seconds / row.hops(ranks, layout.interleave, m)
    assert late > 0 and set(rank_layers(config.model, layout)) == {8}
    mine = [one for one in found.rows
            if not one.name.startswith(("pipeline", "optimizer", "tensor"))]
    between = found["tensor: gathers and scatters"].seconds / 2
    forward, backward = (sum(one.phases.get(phase, 0) for one in mine) + between
                         for phase in ("forward", "backward"))
    each = m * layout.interleave
    done = clock(order(name, ranks, layout.interleave, m), forward=forward / each,
                 dx=backward / each / 2, dw=backward / each / 2,
                 message_seconds=late)
    due = 1 - (forward + backward) / done.step_seconds
    lost = found["pipeline: send and receive"].seconds + found["pipeline: bubble"].seconds
    share = lost / (lost + forward + backward)
    assert share == pytest.approx(due, abs=0.005 if row.even else 0.0025) and due > 0.04


def test_peaks():
    """GPipe holds all; 1F1B as many as there are stages from it on, also where dw waits (ZB-H1: Qi
    et al., section 3.1)."""
    done = {name: clock(order(name, 4, least_chunks(name), 8), forward=1, dx=1, dw=1)
            for name in PIPELINES}
    assert (done["gpipe"].peaks == [8] * 4 and done["1f1b"].peaks == [4, 3, 2, 1]
            and done["looped-bfs"].peaks == [8] * 8)
    assert done["zero-bubble"].peaks == [4] * 4
    # halves of a rank's layers: on every rank what 1F1B holds on its first (section 6)
    assert list(done["zbv"].rank_peaks.values()) == [2 * 4] * 4
    # a warm-up of (v - 1) p + 2 (p - 1) forwards of halves, and the one of the first turn
    # (Narayanan et al., section 2.2)
    assert done["interleaved"].rank_peaks[0] == 4 + 2 * 3 + 1


@pytest.mark.parametrize("spoil, said", [
    (lambda o: o[0].pop(), "has .* actions for 4 micro-batches in 2 stages; each needs F, and B or "
                           "I and W"),
    (lambda o: o[0].append((0, "B", 3)), "has .* actions for 4 micro-batches in 2 stages; each "
                                         "needs F, and B or I and W, once"),
    (lambda o: o[1].reverse(), "rank [01] waits for ever before . of micro-batch . in stage .; "
                               "what that needs"),
    (lambda o: o[0].__setitem__(0, (0, "W", 0)), "rank 0 waits for ever before W of micro-batch 0 "
                                                 "in stage 0")])
def test_an_order_that_is_none_is_refused(spoil, said):
    found = order("1f1b", 2, 1, 4)
    spoil(found)
    with pytest.raises(ConfigError, match=said):
        clock(found, forward=1, dx=1, dw=1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_4096_ranks_are_timed_in_2_s(name):
    """32 micro-batches; processor time, whatever else runs."""
    row, began = PIPELINES[name], time.process_time()
    done = clock(closed_order(row, 4096, row.chunks[0], 32), forward=1, dx=1, dw=1)
    assert time.process_time() - began < 2 and len(done.ends) == 4096
    if row.chunks == (1, 1):        # so few micro-batches fill no pipeline of chunks
        assert done.step_seconds == 3 * 32 + row.bubble(4096, 1, 1, 1)


# ---- the runtime

def test_both_sides_of_a_pair_agree_on_the_order_of_messages():
    """NCCL knows no tags. And who receives asks for each message once, and before it needs it."""
    for name, (ranks, _, _), found in orders():
        stages = 1 + max(stage for actions in found.values() for stage, _, _ in actions)
        sends, asks = zip(*(routes(found, rank) for rank in range(ranks)))
        for a, b in itertools.permutations(range(ranks), 2):
            sent = [made for action in found[a] if sends[a].get(made := message(action, stages, 1))
                    == b]
            assert sent == [one for asked in asks[b] for one, source in asked if source == a], (
                name, a, b)
        for b in range(ranks):
            there = set()
            for action, asked in zip(found[b], asks[b]):
                there |= {one for one, _ in asked}
                needed = message(action, stages, 0)
                assert (needed is None or needed in there
                        or needed[1] + (1 if needed[0] == "B" else -1) in {one
                            for one, _, _ in found[b]})


def cases(ranks, m):
    return [(name, least_chunks(name), m) for name in PIPELINES]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("untagged", [False, True])
def test_gradients_are_those_of_one_process(parent, ranks, untagged):
    """Bit for bit where micro-batches are summed in the same order: looped breadth-first takes the
    last first. PyTorch's runtime divides by the micro-batches at the end: 1e-6 of the largest."""
    told = {"cases": cases(ranks, 8), "untagged": untagged, "peer": not untagged}
    with Processes("tests.parallel.pipeline_ranks:gradients", told, world=ranks, parent=parent) as running:
        found = running.wait()
    for name, chunks, m in told["cases"]:
        backwards = range(m)[::-1] if name == "looped-bfs" else range(m)
        due = whole(ranks * chunks, m, backwards)
        of_stages = {int(stage): both for one in found for stage, both in one[name].items()}
        assert sorted(of_stages) == list(range(ranks * chunks))
        for stage, (ours, theirs) in of_stages.items():
            assert torch.equal(torch.tensor(ours), due[stage]), (name, stage)
            assert (torch.tensor(theirs) - due[stage]).abs().max() < 1e-6 * due[stage].abs().max()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks, seconds", [(4, (0.03, 0.05, 0.02)), (8, (0.04, 0.04, 0.04))])
def test_steps_take_what_the_clock_says(parent, ranks, seconds):
    """Stages that sleep, a rank's together `seconds`: the only honest way to see 8 of them on 2
    cores. What they hold, and in which order they compute, is exact; of seconds a machine has more
    than the clock, and a busy one more still: the fastest of a few counts."""
    off = {}
    for name, chunks, m in cases(ranks, 2 * ranks):
        found = order(name, ranks, chunks, m)
        each = dict(zip(("forward", "dx", "dw"), (one / chunks for one in seconds)))
        done, due = rehearse(found, **each, parent=parent), clock(found, **each)
        assert done.how == "rehearsed: stages that sleep" != due.how
        assert (done.peaks, done.rank_peaks) == (due.peaks, due.rank_peaks), name
        for rank, actions in found.items():
            kinds = [each["forward"] if kind == "F" else each["dx"] * (kind != "W") + each["dw"]
                     * (kind != "I") for _, kind, _ in actions]
            assert all(end - begin >= nap for begin, end, nap in zip(done.begins[rank],
                done.ends[rank], kinds, strict=True)), name
        step_seconds = done.step_seconds
        for _ in range(4):
            if step_seconds >= 1.1 * due.step_seconds:
                step_seconds = min(step_seconds,
                                   rehearse(found, **each, parent=parent).step_seconds)
        off[name] = step_seconds / due.step_seconds - 1
    print({name: f"{one:+.1%}" for name, one in off.items()})
    assert max(map(abs, off.values())) < 0.1, off


# ---- training

SMALL = Config().replace({
    "model.layers": 8, "model.width": 32, "model.heads": 4, "model.context": 32, "global_batch": 16,
    "grad_accum_steps": 8,
    "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1, "schedule": "constant",
    "eval_batches": 2,
    "checkpoint_every": 2})
ALONE = {f"parallel.{axis}": n for axis, n in vars(Layout()).items()}


def laid(config, layout):
    return config.replace({f"parallel.{axis}": n for axis, n in layout.items()})


def agree(parent, config, steps):
    """Ranks tell the same, which is what one process does: float32 sums in another order differ by
    some 2^-24 of the loss an update; 1e-5 allows for their growth."""
    with Processes("tests.parallel.pipeline_ranks:trains", {"config": config.to_dict(), "steps": steps},
                   world=config.parallel.devices,
                   parent=parent) as running:
        found = running.wait()
    due = trained(Training.build(config.replace(ALONE)), steps)
    assert all(one == found[0] for one in found)
    for theirs, ours in zip(found[0], due, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5), config.parallel


SCHEDULED = ([{"schedule": name, "interleave": least_chunks(name)} for name in PIPELINES]
             + [{"schedule": "zero-bubble", "interleave": 2}])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("pipeline", [2, 4])
def test_every_schedule_trains_as_one_process(parent, pipeline):
    for layout in SCHEDULED:
        agree(parent, laid(SMALL, {"pipeline": pipeline, **layout}), 20)


@pytest.mark.dist
@pytest.mark.parametrize("layout, settings", [
    # embedding and head on two ranks share a matrix
    ({"schedule": "zero-bubble"}, {}),
    ({"schedule": "zbv", "interleave": 2},
     {"optimizer": "sophia", "memory.recompute": "core-attention"}),
    ({"data": 2, "schedule": "interleaved", "interleave": 2},
     {"model.tied": False, "memory.cross_entropy": "chunked"}),
    ({"shard": 2, "zero": 1, "schedule": "dualpipev", "interleave": 2},
     {"model.position": "rope", "memory.recompute": "block"}),
    ({"tensor": 2, "schedule": "zero-bubble"}, {}),
    # a head of two layers' work: the last rank has fewer
    ({"schedule": "zero-bubble"}, {"model.vocab": 1024}),
    ({"schedule": "interleaved", "interleave": 2, "data": 2},
     {"model.vocab": 1024, "model.tied": False}),
    ({"schedule": "zbv", "interleave": 2}, {"model.vocab": 1024}),
    # the first stage has the embedding alone, and the last one the head
    ({"schedule": "looped-bfs", "interleave": 2},
     {"model.layers": 2, "data.policy": "spread-documents"})])
def test_layouts_train_as_one_process(parent, layout, settings):
    config = laid(SMALL.replace(settings), {"pipeline": 2, **layout})
    assert (len({*rank_layers(config.model, config.parallel)}) > 1) == ("model.vocab" in settings)
    agree(parent, laid(SMALL.replace(settings), {"pipeline": 2, **layout}), 4)


@pytest.mark.dist
def test_zero_bubble_computes_as_many_products_as_one_process(parent):
    config = SMALL.replace({"model.width": 64, "precision.recipe": "fp8-tensorwise"})
    due = counted(Training.build(config))
    for layout in ({"schedule": "1f1b"}, {"schedule": "zero-bubble"},
                   {"schedule": "dualpipev", "interleave": 2}):
        config = laid(config, {"pipeline": 2, **layout})
        with Processes("tests.parallel.pipeline_ranks:products", {"config": config.to_dict()}, world=2,
                       parent=parent) as running:
            assert sum(running.wait()) == due > 0


@pytest.mark.dist
def test_who_waits_for_weights_holds_no_more_than_it_must():
    """Traced peaks of the first rank, over that of 1F1B. GPipe holds 4 micro-batches, and 1F1B 2.
    Zero bubble holds between I and W what is multiplied of one more, and not what is left of
    micro-batches that are done."""
    config = laid(preset("cpu-3m").replace({"system.device": "cpu", "precision.recipe": "fp32",
        "grad_accum_steps": 4}), {"pipeline": 2})
    peaks = {name: predict_trace(laid(config, {"schedule": name,
        "interleave": least_chunks(name)})).peak_bytes
             for name in ("gpipe", "1f1b", "zero-bubble", "zbv")}
    over = {name: peak / peaks["1f1b"] for name, peak in peaks.items()}
    assert over["gpipe"] > 1.5 and over["zero-bubble"] < 1.05 and over["zbv"] < 1.1, over
    assert memory(laid(config, {"schedule": "gpipe"})).peak_bytes == pytest.approx(peaks["gpipe"],
        rel=0.05)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_goes_on_in_any_layout(on_ranks, tmp_path, optimizer):
    layouts = [{"pipeline": 2}, {}, {"pipeline": 4, "schedule": "zero-bubble"},
               {"pipeline": 2, "shard": 2, "zero": 1}, {"data": 2},
               {"pipeline": 2, "schedule": "zbv", "interleave": 2},
               {"pipeline": 2, "tensor": 2} if optimizer == "adamw" else {},
               {"pipeline": 2, "data": 2}]
    one, many = tmp_path / "one", tmp_path / "many"
    for i, layout in enumerate(layouts):
        config = laid(SMALL.replace({"steps": 2 * (i + 1), "grad_accum_steps": 4,
                                     "optimizer": optimizer}), layout)
        train(config.replace(ALONE), out=one, resume=i > 0)
        if config.parallel.devices == 1:
            train(config, out=many, resume=True)
        else:
            on_ranks("chain", config, config.parallel.devices, out=str(many), resume=i > 0)
    alone, together = ([json.loads(line)
                        for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (one, many))
    assert len(alone) == len(together) == 2 * len(layouts)
    for a, b in zip(alone, together):
        assert (b["loss"] == pytest.approx(a["loss"], rel=1e-5)
                and b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4))
        assert b.get("val_loss", 0) == pytest.approx(a.get("val_loss", 0), rel=1e-5)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", "fp16"])
def test_what_recipes_keep_is_in_checkpoints(on_ranks, tmp_path, recipe):
    """Histories, draws and the loss scale of every stage: a run that stops and goes on is the one
    that did not, bit for bit."""
    config = laid(SMALL.replace({"model.width": 128, "precision.recipe": recipe,
                                 "grad_accum_steps": 4, "schedule.warmup_steps": 0}),
                  {"pipeline": 2, "data": 2, "schedule": "zero-bubble"})
    found = []
    for folder, parts in (("whole", [4]), ("stopped", [2, 4])):
        for i, steps in enumerate(parts):
            on_ranks("chain", config.replace({"steps": steps}), 4, out=str(tmp_path / folder),
                     resume=i > 0)
        lines = (json.loads(line) for line in (tmp_path / folder
            / "metrics.jsonl").read_text().splitlines())
        found.append([(line["loss"], line["grad_norm"]) for line in lines])
    assert found[0] == found[1] and len(found[0]) == 4


def test_a_schedule_is_predicted():
    """The bubble of llama-8b over 4 stages, in seconds: as the rows have it, with dx and dw half of
    backward each. Over tensor ranks forward has as many messages as backward, so that it takes more
    than a third."""
    config = preset("llama-8b").replace({"parallel.pipeline": 4, "parallel.tensor": 8,
        "global_batch": 32, "grad_accum_steps": 32})

    def bubble(name):
        time = step_time(laid(config, {"schedule": name, "interleave": least_chunks(name)}), "h100")
        return next(sum(row.phases.values()) for row in time.rows if row.name == "pipeline: bubble")

    found = {name: bubble(name) for name in PIPELINES}
    assert found["gpipe"] == found["1f1b"] > found["interleaved"] > 0.5 * found["1f1b"] * 0.99
    assert (0.42 * found["1f1b"] > found["zero-bubble"] > found["1f1b"] / 3
            and found["zbv"] < 0.6 * found["zero-bubble"])


def sized(layers, head):
    """A model of so many layers whose head is as much work as `head` of them, to a thousandth."""
    config = SMALL.replace({"model.layers": layers, "model.vocab": 1000})
    return config.replace({"model.vocab": round(1000 * head / head_layers(config.model))}).model


def loads(m, layout, cut):
    """The work of each rank, in layers."""
    found = [float(len(each)) for each in cut]
    found[-1] += head_layers(m)
    return [sum(found[stage] for stage in PIPELINES[layout.schedule].stages(rank, layout.pipeline,
        layout.interleave))
            for rank in range(layout.pipeline)]


def cuts(layers, stages):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield [range(*both) for both in itertools.pairwise((0, *ends, layers))]


@pytest.mark.parametrize("head", [0.3, 1.6, 4.9])
def test_no_cut_has_a_faster_slowest_rank(head):
    for layers, ranks, name in ((8, 2, "1f1b"), (9, 3, "gpipe"), (12, 4, "zero-bubble"),
                                (10, 4, "1f1b"), (8, 2, "interleaved"),
                                (12, 3, "looped-bfs"), (12, 3, "zbv"), (10, 3, "dualpipev")):
        layout = Layout(pipeline=ranks, schedule=name, interleave=least_chunks(name))
        m = sized(layers, head)
        assert head_layers(m) == pytest.approx(head, rel=0.01)
        found = stage_layers(m, layout)
        assert ([layer for one in found for layer in one] == list(range(layers))
                and min(map(len, found)) >= 1)
        by_rank = [sum(len(found[stage]) for stage in PIPELINES[name].stages(rank, ranks,
            layout.interleave)) for rank in range(ranks)]
        assert (rank_layers(m, layout)
                == (*(by_rank[1:] + by_rank[:1] if PIPELINES[name].places == "v" else by_rank),))
        took, least = max(loads(m, layout, found)), min(max(loads(m, layout, cut))
            for cut in cuts(layers, ranks * layout.interleave))
        even = len({*map(len, found)}) == 1
        assert took == pytest.approx(least) or (even and took < (1 + GAIN) * least), (layers, name)


def test_work_of_layers_and_head_is_that_of_the_flops():
    for name in ("gpt2-124m", "llama-8b"):
        m = preset(name).model
        head, all_of_it = (sum(one.flops * (m.T + 1) / (2 * m.T) if one.pairs else one.flops
                               for one in products(m, batch=1) if keep(one))
                           for keep in (lambda one: one.name == "head", lambda one: True))
        assert head_layers(m) == pytest.approx(head / ((all_of_it - head) / m.L), rel=1e-3)


def test_layers_of_stages():
    """Where a head is less than a layer they are even, with one fewer in the first and the last if
    need be."""
    for layers, stages in itertools.product(range(1, 40), range(1, 12)):
        for chunks in (1, 2):
            if stages_fit(layers, stages, chunks) and (stages > 1 or chunks == 1):
                layout = Layout(pipeline=stages, interleave=chunks,
                                schedule="interleaved" if chunks > 1 else "1f1b")
                found = stage_layers(sized(layers, 0.5), layout)
                assert (len(found) == stages * chunks and [layer for one in found for layer in one]
                        == list(range(layers)))
                fewer = layers % (stages * chunks) > 0
                each = (layers + 2 * fewer) // (stages * chunks)
                assert [*map(len, found)] == ([each] * len(found) if not fewer
                    else [each - 1, *[each] * (len(found) - 2), each - 1])
                assert (rank_layers(sized(layers, 9), layout, balanced=False)
                        == rank_layers(sized(layers, 0.5), layout))


@pytest.mark.parametrize("name", PIPELINES)
def test_an_update_of_balanced_stages_takes_no_longer(name):
    """By the clock, whose stages take what their layers and the head multiply: beside stages of as
    many layers."""
    faster = []
    for model, ranks, chunks in itertools.product(("gpt2-1.5b", "llama-8b", "llama-70b"), (2, 4, 8),
            (1, 2, 4)):
        m = preset(model).model
        layout = Layout(pipeline=ranks, schedule=name,
                        interleave=PIPELINES[name].nearest_chunks(chunks))
        stages = ranks * layout.interleave
        if layout.interleave != chunks or m.L % stages:
            continue
        found, took = order(name, ranks, chunks, 4 * ranks), []
        for counts in ([*map(len, stage_layers(m, layout))], [m.L // stages] * stages):
            work = [float(count) for count in counts]
            work[-1] += head_layers(m)
            took.append(clock(found, forward=work, dx=work, dw=work).step_seconds)
        faster.append((model, ranks, chunks, took[1] / took[0]))
    assert min(one[-1] for one in faster) >= 1 and max(one[-1] for one in faster) > 1.1


@pytest.mark.parametrize("settings, sentence", [
    ({"parallel.schedule": "zbv"}, "no order of 1 chunks a rank, but of 2; set "
                                   "parallel.interleave=2"),
    ({"parallel.schedule": "dualpipev", "parallel.interleave": 2, "grad_accum_steps": 2},
     "no order of 2 micro-batches over 2 ranks, but of one a stage or more; set grad_accum_steps=4"),
    ({"parallel.interleave": 2}, "parallel.schedule=1f1b has no order of 2 chunks a rank, but of "
                                 "1; set parallel.interleave=1"),
    ({"parallel.shard": 2}, "parallel.zero=3 gathers weights anew for each micro-batch, and a "
                            "pipeline has many under way; set parallel.zero=1"),
    ({"global_batch": 1, "grad_accum_steps": 1}, "set parallel.pipeline=1 parallel.interleave=1"),
    ({"parallel.schedule": "gpip"}, "there is no parallel.schedule 'gpip'; did you mean 'gpipe'"),
    ({"system.kernels": "pytorch"}, "system.kernels=pytorch is of a whole model")])
def test_what_cannot_be_is_refused(settings, sentence):
    with pytest.raises(ConfigError) as refusal:
        refuse_untrainable(SMALL.replace({"parallel.pipeline": 2, **settings}))
    assert sentence in str(refusal.value)
