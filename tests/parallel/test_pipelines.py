"""Only these tests catch an order of a pipeline that is wrong or waits for ever, a clock or a
closed form of a bubble that is off, a wrong message between stages, a cut of layers that is slower
than another, and a schedule whose gradients or losses are not those of one process."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import lessons.rows.optimizers
import lessons.rows.pipelines  # noqa: F401  ten rules and four orders more
from lessons.ranks.clock import clock
from lessons.ranks.rehearsal import rehearse
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
from lpkit.training.runs import Run
from lpkit.training.training import Training
from tests.parallel.pipeline_ranks import counted, trained, whole
from tests.parallel.test_parallel import goes_on

SIZES = list(itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 7, 8)))


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
    for name, (ranks, chunks, m), by_rank in orders():
        row = PIPELINES[name]
        assert {rank: {stage for stage, _, _ in actions} for rank, actions in by_rank.items()} == {
            rank: set(row.stages(rank, ranks, chunks)) for rank in range(ranks)}
        kinds = [kind for actions in by_rank.values() for _, kind, _ in actions]
        assert kinds.count("F") == ranks * chunks * m and ("W" in kinds) == row.splits
        clock(by_rank, forward=1.0, dx=1.0, dw=1.0)
        count += 1
    assert count > 150


def test_what_a_row_refuses_pytorch_refuses():
    for name, row in PIPELINES.items():
        for ranks, chunks, m in SIZES:
            if row.problem(ranks, chunks, m) and row.chunks[0] <= chunks <= row.chunks[1]:
                with pytest.raises(ValueError):
                    pytorchs(row, ranks, chunks, m)
                with pytest.raises(ConfigError, match=f"{name} has no order of {m} micro-batches"):
                    order(name, ranks, chunks, m)


class StandIn:
    """Notes how a schedule calls its stage: GPipe and 1F1B have no other order. (Their
    `pipeline_order` is none: in 2.13 the last stage of 1F1B begins with micro-batch 1.)"""

    submod, has_backward, is_first, is_last = None, True, False, False

    def __init__(self, stage, rank, stages, ranks):
        self.stage_index, self.group_rank = stage, rank
        self.num_stages, self.group_size = stages, ranks
        self.called = []

    def forward_one_chunk(self, micro, *args, **more):
        self.called.append((self.stage_index, "F", micro))

    def backward_one_chunk(self, micro, **more):
        self.called.append((self.stage_index, "B", micro))

    def nothing(self, *args, **more):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing
    perform_reduce_grad = nothing


def pytorchs(row, ranks, chunks, m):
    kind, by_rank = row.load(), {}
    for rank in range(ranks):
        stages = [StandIn(stage, rank, ranks * chunks, ranks)
                  for stage in row.stages(rank, ranks, chunks)]
        single = issubclass(kind, PipelineScheduleSingle)
        schedule = kind(stages[0] if single else stages, m, loss_fn=print)
        if not single:
            return {rank: [(action.stage_index, action.computation_type.value,
                            action.microbatch_index)
                           for action in actions if action.is_compute_op]
                    for rank, actions in schedule.pipeline_order_with_comms.items()}
        schedule._initialize_stage = stages[0].nothing
        schedule._step_microbatches([()] * m, [{}] * m, [None] * m, [])
        by_rank[rank] = stages[0].called
    return by_rank


def test_closed_orders_are_pytorchs():
    closed = 0
    for name, sizes, _ in orders():
        if (row := PIPELINES[name]).warm_up:
            assert closed_order(row, *sizes) == pytorchs(row, *sizes), (name, sizes)
            closed += 1
    assert closed > 75


# ---- the clock


def by_relaxation(by_rank, seconds, message):
    """The end of an update, another way: each action begins after the last action of its rank and
    after what it needs, until nothing moves."""
    rank_of = {stage: rank for rank, actions in by_rank.items() for stage, _, _ in actions}
    last, ends, before = max(rank_of), {}, None
    while ends != before:
        before = dict(ends)
        for rank, actions in by_rank.items():
            now = 0.0
            for stage, kind, micro in actions:
                needed, at = {"F": ("F", stage - 1), "W": ("I", stage)}.get(
                    kind, ("I", stage + 1) if stage < last else ("F", stage))
                late = message if rank_of.get(at, rank) != rank else 0.0
                now = max(now, ends.get((needed, at, micro), 0.0) + late) + seconds[kind][stage]
                ends["I" if kind == "B" else kind, stage, micro] = now
    return max(ends.values())


def test_the_clock_is_that_of_the_longest_path():
    rng = torch.Generator().manual_seed(0)
    for name, (ranks, chunks, _), by_rank in orders([(1, 1, 3), (3, 2, 6), (4, 1, 8), (4, 3, 12)]):
        f, i, w = (torch.rand(3, ranks * chunks, generator=rng) + 0.5).tolist()
        done = clock(by_rank, forward=f, dx=i, dw=w, message_seconds=0.3)
        seconds = {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w)]}
        due = by_relaxation(by_rank, seconds, 0.3)
        assert done.step_seconds == pytest.approx(due, rel=1e-12), name
        work = sum(map(sum, (f, i, w))) * len({micro for _, _, micro in by_rank[0]})
        assert done.bubble_share == pytest.approx(1 - work / (ranks * done.step_seconds), abs=1e-12)


def cut_in(row):
    return (sizes for sizes in ((2, 2, 4), (4, 1, 8), (4, 2, 16), (4, 3, 12), (8, 2, 16))
            if not row.problem(*sizes))


@pytest.mark.parametrize("name", PIPELINES)
def test_bubbles_are_the_closed_forms(name):
    """Exactly, over a grid of costs; of a V where F, I and W take equally long, and else within a
    tenth of the update."""
    row, off = PIPELINES[name], []
    for ranks, chunks, m in cut_in(row):
        by_rank = order(name, ranks, chunks, m)
        for f, i, w in itertools.product((0.5, 1, 3), repeat=3):
            step = clock(by_rank, forward=f, dx=i, dw=w).step_seconds
            work = m * chunks * (f + i + w)
            bubble = row.bubble(ranks, f, i, w)
            if not row.even or f == i == w:
                assert step - work == pytest.approx(bubble, rel=1e-9, abs=1e-9), (f, i, w)
            off.append((work + bubble) / step - 1)
    assert row.even == (max(map(abs, off)) > 1e-9) and max(map(abs, off)) < 0.105


@pytest.mark.parametrize("name", PIPELINES)
def test_messages_in_a_row_are_those_of_the_clock(name):
    """What an update grows by, over a small message; of zero bubble where dx is longer than F or dw
    it is less."""
    row = PIPELINES[name]
    for sizes in cut_in(row):
        by_rank = order(name, *sizes)
        took = [clock(by_rank, forward=1, dx=1, dw=1, message_seconds=late).step_seconds
                for late in (0, 1e-3)]
        assert 1e3 * (took[1] - took[0]) == pytest.approx(row.hops(*sizes), rel=1e-6), sizes


@pytest.mark.parametrize("name", PIPELINES)
def test_shares_of_a_predicted_update_are_those_of_the_clock(name):
    """llama-8b with a small vocabulary, so that stages are alike but for one gather in the last:
    what bubble and messages take of an update, by `predict` and by the clock over the order with
    the predicted seconds of a stage and of a message, over a slow network. That gather and rounding
    are 0.0025; of a V the form of the bubble holds less where dx and dw are not F."""
    on = replace(CATALOGUE["h100"],
                 network_bytes_per_second=CATALOGUE["h100"].network_bytes_per_second / 8)
    row, ranks, m = PIPELINES[name], 4, 16
    layout = Layout(pipeline=ranks, tensor=8, schedule=name, interleave=least_chunks(name))
    config = preset("llama-8b").replace({"model.vocab": 8, "global_batch": m,
        "grad_accum_steps": m})
    predicted = step_time(config, on, layout)
    late = predicted["pipeline: send and receive"].seconds / row.hops(ranks, layout.interleave, m)
    assert late > 0 and set(rank_layers(config.model, layout)) == {8}
    mine = [cost for cost in predicted.rows
            if not cost.name.startswith(("pipeline", "optimizer", "tensor"))]
    between = predicted["tensor: gathers and scatters"].seconds / 2
    forward, backward = (sum(cost.phases.get(phase, 0) for cost in mine) + between
                         for phase in ("forward", "backward"))
    each = m * layout.interleave
    done = clock(order(name, ranks, layout.interleave, m), forward=forward / each,
                 dx=backward / each / 2, dw=backward / each / 2,
                 message_seconds=late)
    due = 1 - (forward + backward) / done.step_seconds
    lost = predicted["pipeline: send and receive"].seconds + predicted["pipeline: bubble"].seconds
    share = lost / (lost + forward + backward)
    assert share == pytest.approx(due, abs=0.005 if row.even else 0.0025) and due > 0.04


def test_peaks():
    """GPipe holds all; 1F1B as many as there are stages from it on, also where dw waits (ZB-H1: Qi
    et al., section 3.1)."""
    done = {name: clock(order(name, 4, least_chunks(name), 8), forward=1, dx=1, dw=1)
            for name in PIPELINES}
    assert done["gpipe"].peaks == [8] * 4 and done["1f1b"].peaks == [4, 3, 2, 1]
    assert done["looped-bfs"].peaks == [8] * 8
    assert done["zero-bubble"].peaks == [4] * 4
    # halves of a rank's layers: on every rank what 1F1B holds on its first (section 6)
    assert list(done["zbv"].rank_peaks.values()) == [2 * 4] * 4
    # a warm-up of (v - 1) p + 2 (p - 1) forwards of halves, and the one of the first turn
    # (Narayanan et al., section 2.2)
    assert done["interleaved"].rank_peaks[0] == 4 + 2 * 3 + 1


@pytest.mark.parametrize("spoil, message", [
    (lambda o: o[0].pop(), "actions for 4 micro-batches in 2 stages; each micro-batch needs"),
    (lambda o: o[0].append((0, "B", 3)), "actions for 4 micro-batches in 2 stages; each"),
    (lambda o: o[1].reverse(), "rank [01] waits forever for the input of . of micro-batch . in"),
    (lambda o: o[0].__setitem__(0, (0, "W", 0)), "rank 0 waits forever for the input of W of")])
def test_an_order_that_is_none_is_refused(spoil, message):
    by_rank = order("1f1b", 2, 1, 4)
    spoil(by_rank)
    with pytest.raises(ConfigError, match=message):
        clock(by_rank, forward=1, dx=1, dw=1)


# ---- the runtime

def on_pipeline(parent, function, ranks, **job):
    with Processes(f"tests.parallel.pipeline_ranks:{function}", job, world=ranks,
                   parent=parent) as running:
        return running.wait()


def test_both_sides_of_a_pair_agree_on_the_order_of_messages():
    """NCCL knows no tags. And who receives asks for each message once, and before it needs it."""
    for name, (ranks, _, _), by_rank in orders():
        stages = 1 + max(stage for actions in by_rank.values() for stage, _, _ in actions)
        sends, asks = zip(*(routes(by_rank, rank) for rank in range(ranks)))
        for a, b in itertools.permutations(range(ranks), 2):
            sent = [msg for msg in (message(action, stages, 1) for action in by_rank[a])
                    if sends[a].get(msg) == b]
            received = [msg for asked in asks[b] for msg, source in asked if source == a]
            assert sent == received, (name, a, b)
        for b in range(ranks):
            there = set()
            for action, asked in zip(by_rank[b], asks[b]):
                there |= {msg for msg, _ in asked}
                needed = message(action, stages, 0)
                if needed is not None and needed not in there:
                    before = needed[1] + (1 if needed[0] == "B" else -1)
                    assert before in {stage for stage, _, _ in by_rank[b]}


@pytest.mark.dist
@pytest.mark.parametrize("ranks, untagged", [(2, False), (4, True)])
def test_gradients_are_those_of_one_process(parent, ranks, untagged):
    """Bit for bit where micro-batches are summed in the same order: looped breadth-first takes the
    last first. PyTorch's runtime divides by the micro-batches at the end: 1e-6 of the largest."""
    by_rank = on_pipeline(parent, "gradients", ranks, untagged=untagged, peer=not untagged,
                          cases=[(name, least_chunks(name), 8) for name in PIPELINES])
    for name in PIPELINES:
        stages = ranks * least_chunks(name)
        due = whole(stages, 8, range(8)[::-1] if name == "looped-bfs" else range(8))
        of_stages = {int(stage): both for of_rank in by_rank
                     for stage, both in of_rank[name].items()}
        assert sorted(of_stages) == list(range(stages))
        for stage, (ours, theirs) in of_stages.items():
            assert torch.equal(torch.tensor(ours), due[stage]), (name, stage)
            assert (torch.tensor(theirs) - due[stage]).abs().max() < 1e-6 * due[stage].abs().max()


@pytest.mark.dist
def test_a_rehearsal_computes_as_the_clock_says(parent):
    """Stages that sleep, to see 4 ranks on 2 cores. What they hold, and in which order they
    compute, is exact; of seconds a busy machine has more than the clock."""
    by_rank, each = order("zbv", 4, 2, 8), {"forward": 0.015, "dx": 0.025, "dw": 0.01}
    done, due = rehearse(by_rank, **each, rounds=1, parent=parent), clock(by_rank, **each)
    assert done.how == "rehearsed: stages that sleep" != due.how
    assert (done.peaks, done.rank_peaks) == (due.peaks, due.rank_peaks)
    naps = {"F": 0.015, "I": 0.025, "W": 0.01, "B": 0.035}
    for rank, actions in by_rank.items():
        assert all(end - begin >= naps[kind] for begin, end, (_, kind, _) in zip(
            done.begins[rank], done.ends[rank], actions, strict=True))
    assert done.step_seconds >= due.step_seconds


# ---- training

SMALL = Config().replace({
    "model.layers": 8, "model.width": 32, "model.heads": 4, "model.context": 32, "global_batch": 16,
    "grad_accum_steps": 8, "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1,
    "schedule": "constant", "eval_batches": 2, "checkpoint_every": 2})
ALONE = {f"parallel.{axis}": n for axis, n in vars(Layout()).items()}


def laid(config, layout):
    return config.replace({f"parallel.{axis}": n for axis, n in layout.items()})


HEAVY_HEAD = {"model.vocab": 1024}      # of two layers' work: the last rank has fewer
# schedule, chunks a rank, other axes, settings
ON_TWO = [
    ("gpipe", 1, {}, {}), ("1f1b", 1, {}, HEAVY_HEAD),
    # embedding and head on two ranks share a matrix
    ("zero-bubble", 1, {}, {}), ("zero-bubble", 2, {}, HEAVY_HEAD),
    ("zbv", 2, {}, {"optimizer": "sophia", "memory.recompute": "core-attention"}),
    ("zbv", 2, {}, HEAVY_HEAD),
    # the first stage has the embedding alone, and the last one the head
    ("looped-bfs", 2, {}, {"model.layers": 2, "data.policy": "spread-documents"})]
ON_FOUR = [
    ("interleaved", 2, {"data": 2},
     HEAVY_HEAD | {"model.tied": False, "memory.cross_entropy": "chunked"}),
    ("dualpipev", 2, {"shard": 2, "zero": 1},
     {"model.position": "rope", "memory.recompute": "block"}),
    ("zero-bubble", 1, {"tensor": 2}, {}), ("zbv", 2, {"pipeline": 4}, {}),
    ("looped-bfs", 2, {"pipeline": 4}, {})]


@pytest.mark.dist
@pytest.mark.parametrize("ranks, cases", [(2, ON_TWO), (4, ON_FOUR)], ids=["2 ranks", "4 ranks"])
def test_layouts_train_as_one_process(parent, ranks, cases):
    """Ranks tell the same, which is what one process does: float32 sums in another order differ by
    some 2^-24 of the loss an update; 1e-5 allows for their growth."""
    assert {name for name, *_ in ON_TWO + ON_FOUR} == {*PIPELINES}
    configs = [laid(SMALL.replace(settings), {"pipeline": 2, "schedule": name, "interleave": chunks,
                                              **axes}) for name, chunks, axes, settings in cases]
    first, *others = on_pipeline(parent, "trains", ranks, steps=3,
                                 configs=[config.to_dict() for config in configs])
    assert all(other == first for other in others)
    for config, theirs in zip(configs, first, strict=True):
        assert (len({*rank_layers(config.model, config.parallel)}) > 1) == (
            config.model.vocab == 1024)
        due = trained(Training.build(config.replace(ALONE)), 3)
        for numbers, ours in zip(theirs, due, strict=True):
            assert numbers == pytest.approx(ours, rel=1e-5), config.parallel


@pytest.mark.dist
def test_zero_bubble_computes_as_many_products_as_one_process(parent):
    config = SMALL.replace({"model.width": 64, "precision.recipe": "fp8-tensorwise"})
    due = counted(Training.build(config))
    layouts = [{"schedule": name, "interleave": least_chunks(name)}
               for name in ("1f1b", "zero-bubble", "dualpipev")]
    first, second = on_pipeline(parent, "products", 2, configs=[
        laid(config, {"pipeline": 2, **layout}).to_dict() for layout in layouts])
    assert [a + b for a, b in zip(first, second)] == [due] * 3 and due > 0


@pytest.mark.dist
def test_who_waits_for_weights_holds_no_more_than_it_must():
    """Traced peaks of the first rank, over that of 1F1B. GPipe holds 4 micro-batches, and 1F1B 2.
    Zero bubble holds between I and W what is multiplied of one more, and not what is left of
    micro-batches that are done."""
    config = laid(preset("cpu-3m").replace({
        "system.device": "cpu", "precision.recipe": "fp32", "grad_accum_steps": 4}),
        {"pipeline": 2})
    layouts = {name: laid(config, {"schedule": name, "interleave": least_chunks(name)})
               for name in ("gpipe", "1f1b", "zero-bubble", "zbv")}
    peaks = {name: predict_trace(laid_out).peak_bytes for name, laid_out in layouts.items()}
    over = {name: peak / peaks["1f1b"] for name, peak in peaks.items()}
    assert over["gpipe"] > 1.5 and over["zero-bubble"] < 1.05 and over["zbv"] < 1.1, over
    assert memory(layouts["gpipe"]).peak_bytes == pytest.approx(peaks["gpipe"], rel=0.06)


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_of_muon_goes_on_in_any_layout(on_ranks, tmp_path):
    """AdamW does so in tests/parallel/test_parallel.py, in these layouts and others."""
    goes_on(on_ranks, tmp_path, SMALL.replace({"optimizer": "muon", "grad_accum_steps": 4}), [
        {"pipeline": 2}, {}, {"pipeline": 2, "shard": 2, "zero": 1},
        {"pipeline": 2, "schedule": "zbv", "interleave": 2}])


@pytest.mark.slow
@pytest.mark.dist
def test_recipes_keep_their_state_in_checkpoints(on_ranks, tmp_path):
    """Histories, draws and the loss scale of every stage: a run that stops and goes on is the one
    that did not, bit for bit."""
    config, runs = laid(SMALL.replace({"model.width": 128, "grad_accum_steps": 4,
                                       "schedule.warmup_steps": 0}),
                        {"pipeline": 2, "schedule": "zero-bubble"}), []
    recipes = ("fp8-delayed", "nvfp4", "fp16")
    for recipe in recipes:
        runs += [{"out": str(tmp_path / folder / recipe), "resume": resume,
                  "settings": {"precision.recipe": recipe, "steps": steps}}
                 for folder, resume, steps in (("whole", False, 4), ("stopped", False, 2),
                                               ("stopped", True, 4))]
    on_ranks("chains", config, runs=runs)
    for recipe in recipes:
        whole_run, stopped = ([(line["loss"], line["grad_norm"])
                               for line in Run(tmp_path / folder / recipe).metrics]
                              for folder in ("whole", "stopped"))
        assert whole_run == stopped and len(stopped) == 4


def sized(layers, head):
    """A model of so many layers whose head is as much work as `head` of them, to a thousandth."""
    config = SMALL.replace({"model.layers": layers, "model.vocab": 1000})
    return config.replace({"model.vocab": round(1000 * head / head_layers(config.model))}).model


def loads(m, layout, cut):
    """The work of each rank, in layers."""
    work = [float(len(each)) for each in cut]
    work[-1] += head_layers(m)
    stages = PIPELINES[layout.schedule].stages
    return [sum(work[stage] for stage in stages(rank, layout.pipeline, layout.interleave))
            for rank in range(layout.pipeline)]


def cuts(layers, stages):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield [range(*both) for both in itertools.pairwise((0, *ends, layers))]


@pytest.mark.parametrize("head", [0.3, 1.6, 4.9])
def test_no_cut_has_a_faster_slowest_rank(head):
    for layers, ranks, name in ((9, 3, "gpipe"), (10, 4, "1f1b"), (8, 2, "interleaved"),
                                (12, 3, "zbv")):
        layout = Layout(pipeline=ranks, schedule=name, interleave=least_chunks(name))
        m = sized(layers, head)
        assert head_layers(m) == pytest.approx(head, rel=0.01)
        stages = stage_layers(m, layout)
        assert [layer for stage in stages for layer in stage] == list(range(layers)) and all(stages)
        by_rank = [sum(len(stages[stage])
                       for stage in PIPELINES[name].stages(rank, ranks, layout.interleave))
                   for rank in range(ranks)]
        if PIPELINES[name].places == "v":
            by_rank = by_rank[1:] + by_rank[:1]
        assert rank_layers(m, layout) == (*by_rank,)
        took = max(loads(m, layout, stages))
        least = min(max(loads(m, layout, cut)) for cut in cuts(layers, ranks * layout.interleave))
        even = len({*map(len, stages)}) == 1
        assert took == pytest.approx(least) or (even and took < (1 + GAIN) * least), (layers, name)


def test_work_of_layers_and_head_is_that_of_the_flops():
    m = preset("llama-8b").model
    flops = [(product.name,
              product.flops * (m.T + 1) / (2 * m.T) if product.pairs else product.flops)
             for product in products(m, batch=1)]
    head = sum(number for name, number in flops if name == "head")
    layers = sum(number for _, number in flops) - head
    assert head_layers(m) == pytest.approx(head / (layers / m.L), rel=1e-3)


def test_layers_of_stages():
    """Where a head is less than a layer they are even, with one fewer in the first and the last if
    need be."""
    for layers, stages, chunks in itertools.product(range(1, 20), range(1, 7), (1, 2)):
        if stages_fit(layers, stages, chunks) and (stages > 1 or chunks == 1):
            layout = Layout(pipeline=stages, interleave=chunks,
                            schedule="interleaved" if chunks > 1 else "1f1b")
            cut = stage_layers(sized(layers, 0.5), layout)
            assert [layer for stage in cut for layer in stage] == list(range(layers))
            fewer = layers % (stages * chunks) > 0
            sizes = [(layers + 2 * fewer) // (stages * chunks)] * (stages * chunks)
            sizes[0] -= fewer
            sizes[-1] -= fewer
            assert [*map(len, cut)] == sizes
            assert (rank_layers(sized(layers, 9), layout, balanced=False)
                    == rank_layers(sized(layers, 0.5), layout))


@pytest.mark.parametrize("settings, sentence", [
    ({"parallel.schedule": "zbv"}, "zbv has 2 chunks of layers a stage, got parallel.interleave=1; "
                                   "set parallel.interleave=2"),
    ({"parallel.schedule": "dualpipev", "parallel.interleave": 2, "grad_accum_steps": 2},
     "over 2 ranks, but of one a stage or more; set grad_accum_steps=4"),
    ({"parallel.interleave": 2}, "1f1b has 1 chunk of layers a stage, got parallel.interleave=2; "
                                 "set parallel.interleave=1"),
    ({"parallel.shard": 2}, "a pipeline has several micro-batches under way; set parallel.zero=1"),
    ({"global_batch": 1, "grad_accum_steps": 1}, "set parallel.pipeline=1 parallel.interleave=1"),
    ({"system.kernels": "pytorch"}, "system.kernels=pytorch needs the whole model")])
def test_what_cannot_be_is_refused(settings, sentence):
    with pytest.raises(ConfigError) as refusal:
        refuse_untrainable(SMALL.replace({"parallel.pipeline": 2, **settings}))
    assert sentence in str(refusal.value)
