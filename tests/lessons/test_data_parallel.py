"""What ranks keep and send, by stage, beside traces, formulas and one process; and the figures over
it.

Only these tests catch: a stage that keeps or sends other bytes than its formula, a message that
leaves before or after its reduction says, and an answer on ranks that hangs without a sentence.
"""

import os
import re
from collections import Counter
from dataclasses import replace

import plotly.graph_objects as go
import pytest
import torch

import lpkit
from hosting.parameters import choose, parameters
from lessons import l14_data_parallel_and_zero as data_parallel
from lessons.figures.figure import plain
from lessons.figures.step_bytes import stacked_figure
from lessons.judging.learner import check
from lessons.l14_data_parallel_and_zero import (
    BACKWARD,
    FORWARD,
    Span,
    Timeline,
    overlap_figure,
    stages_view,
)
from lessons.l15_multi_gpu_fp8 import gathers_view
from lessons.ranks import rank_exercises
from lessons.ranks.messages import messages
from lpkit import cli
from lpkit.errors import ConfigError
from lpkit.measure.trace import predict_trace
from lpkit.parallel.processes import Processes
from lpkit.predict import CATALOGUE, quantity
from lpkit.predict.messages import ALL_REDUCE
from lpkit.techniques.layouts import Layout
from tests.course.test_notebooks import answers_of, numbered
from tests.lessons.judging.course import EXERCISES

pytestmark = pytest.mark.dist
SMALL = lpkit.preset("cpu-3m").replace({
    "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "global_batch": 8,
    "grad_accum_steps": 1,
    "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1})


@pytest.fixture(autouse=True)
def warm(parent, monkeypatch):
    for module in (data_parallel, rank_exercises):
        monkeypatch.setattr(module, "Processes",
                            lambda *given, **named: Processes(*given,
                                **named | {"parent": named.get("parent") or parent}))


def test_each_stage_keeps_and_sends_what_was_said():
    """By a trace of one process to the byte; by one process the same losses but for the order of
    sums, some 2^-24 an update."""
    configs = {(name, pieces): replace(
        SMALL.replace({"grad_accum_steps": 2 * pieces if pieces > 1 else 1}), parallel=layout)
               for name, layout in data_parallel.layouts(2).items() for pieces in (1, 2)}
    alone, steps = data_parallel.losses(SMALL, 3), data_parallel.steps(configs, processes=2,
        updates=3)
    for name, config in configs.items():
        assert steps[name].losses == pytest.approx(alone, rel=1e-6)
        assert steps[name].messages == messages(config)
        assert steps[name].most == data_parallel.states(predict_trace(config, 2,
            layout=config.parallel))
    sent = {name: sum(step.sent_bytes.values()) for name, step in steps.items()}
    for stage in ("ZeRO 0", "ZeRO 1"):
        assert sent[stage, 1] == sent[stage, 2]
    assert sent["ZeRO 3", 2] == pytest.approx(2 * sent["ZeRO 3", 1], rel=1e-3)


def test_what_is_gathered_changes_bytes_and_no_bit():
    """Casts that travel are those of whole weights; bytes are those of the formula, and of a
    trace."""
    configs = data_parallel.gathers(SMALL, 2)
    steps = data_parallel.steps(configs, processes=2, updates=3)
    for name, config in configs.items():
        assert steps[name].messages == messages(config)
        assert steps[name].most == data_parallel.states(predict_trace(config, 2,
            layout=config.parallel))
    assert steps["FP8"].losses == steps["FP8, sent in float32"].losses != steps["bf16"].losses


def test_a_world_of_one_is_one_process():
    step = data_parallel.steps({"one": SMALL}, processes=1, updates=3)["one"]
    assert step.losses == data_parallel.losses(SMALL, 3) and not sum(step.sent_bytes.values())
    assert step.most == data_parallel.states(predict_trace(SMALL, 1))


def test_messages_leave_when_their_reduction_says():
    """By PyTorch's profiler, on each rank: which messages there are, and which of them left while
    backward went on."""
    ways = ({name: Layout(data=2, reduction=name) for name in data_parallel.REDUCTIONS}
            | {"ZeRO 1": Layout(shard=2, zero=1), "ZeRO 3": Layout(shard=2)})
    configs = {name: replace(SMALL.replace({"global_batch": 2}), parallel=layout)
               for name, layout in ways.items()}
    timelines = data_parallel.timelines(configs, processes=2, updates=2)
    for name, config in configs.items():
        assert len(timelines[name]) == 2
        for timeline in timelines[name]:
            assert Counter((span.kind, span.nbytes) for span in timeline.messages) == Counter(
                {(message.kind, message.nbytes): count
                 for message, count in messages(config).items()})
            early = [span.start < timeline.backward_end for span in timeline.messages
                     if span.nbytes > 4]
            assert (any(early) == (name not in ("per-parameter", "buckets"))
                    and all(early[:1]) == any(early))
            assert (0 < timeline.message_seconds < timeline.step_seconds
                    and 0 <= timeline.hidden_seconds <= timeline.message_seconds)
    spec = plain(overlap_figure(timelines))
    go.Figure(spec)
    drawn = Counter({bars["name"]: len(bars["x"]) for bars in spec["data"]})
    assert drawn == Counter(span.kind for ranks in timelines.values() for timeline in ranks
                            for span in timeline.spans)


def test_what_is_hidden():
    """By hand: messages from 1 to 3 and from 2 to 5, computing from 0 to 2 and from 4 to 6."""
    first, second = Timeline.aligned([[(FORWARD, 10.0, 12.0), (BACKWARD, 14.0, 16.0),
                                       (ALL_REDUCE, 11.0, 13.0, 8), (ALL_REDUCE, 12.0, 15.0, 8)],
                                      [(FORWARD, 11.0, 12.0)]])
    assert (first.step_seconds, first.message_seconds, first.hidden_seconds,
            first.exposed_seconds) == (6, 4, 2, 2)
    assert (first.backward_end == 6 and second.spans == (Span(FORWARD, 1.0, 2.0),)
            and second.message_seconds == 0)


def test_one_core_carries_two_ranks(monkeypatch):
    # of a parent that has one core, too
    monkeypatch.setattr(data_parallel, "Processes", Processes)
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("Linux")
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        steps = data_parallel.steps({"ZeRO 3": data_parallel.spread(SMALL, 2,
            sequences=1)["ZeRO 3"]}, processes=2, updates=1)
    finally:
        os.sched_setaffinity(0, mine)
    assert steps["ZeRO 3"].messages


def test_one_rank_is_none(capsys, tmp_path):
    with pytest.raises(ConfigError,
                       match="a layout of ZeRO needs 2 ranks or more, got 1; several ranks can run "
                             "on one core"):
        data_parallel.spread(SMALL, 1, sequences=1)
    assert cli.main(["notebook", "14", "processes=1", "--out", str(tmp_path)]) == 2
    assert "processes cannot be '1'; choose one of 2, 3, 4, 6, 8" in capsys.readouterr().err
    assert choose(parameters(numbered("14")), {"processes": "3"})["processes"] == 3


def ring(x, rank, ranks):
    dist.all_reduce(x)      # noqa: F821  what the processes know
    return x


def test_what_is_written_by_hand_runs_on_ranks():
    given = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    reduced, = rank_exercises.by_hand([ring], given)
    torch.testing.assert_close(reduced, given.sum(0).expand(3, -1))


def sends_float32(rows, rank, ranks, all_reduce_max, all_gather_bytes):
    return all_gather_bytes(rows)


@pytest.mark.usefixtures("judged_on_ranks")
def test_an_all_gather_of_bytes_takes_bytes():
    verdict = check(EXERCISES["15.eight_bits"], sends_float32)
    assert (verdict.status == "wrong" and "all_gather_bytes sends uint8, got torch.float32"
            in verdict.detail)


def one_rank_raises(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    m = 0.9 * m + reduce_scatter(g) / ranks
    if rank == 1:
        raise RuntimeError("no")
    return all_gather(w.chunk(ranks)[rank] - lr * m), m


def uneven(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    return reduce_scatter(g[1:]), m


def waits_for_ever(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    m = 0.9 * m + reduce_scatter(g) / ranks
    return all_gather(m) if rank else w, m


@pytest.mark.usefixtures("judged_on_ranks")
@pytest.mark.parametrize("attempt, message",
                         [(one_rank_raises, "rank 1 of 2: it raised RuntimeError: no, in line "),
                                           (uneven, "a multiple of the 2 ranks, got"),
                                           (waits_for_ever, "got no further for 3 s"),
                                           (len, "write it as a function")])
def test_an_attempt_that_fails_on_a_rank_is_a_sentence(attempt, message, monkeypatch):
    if attempt is waits_for_ever:       # the others end by themselves, on a busy machine late
        monkeypatch.setattr(rank_exercises, "PROGRESS_SECONDS", 3.0)
    verdict = check(EXERCISES["14.zero_one"], attempt)
    assert verdict.status == "wrong" and message in verdict.detail, verdict


def test_figures():
    rows = {"weights": [1.0, 2.0], "all-reduce": [3.0, None]}
    spec = stacked_figure(["a", "b"], rows, predicted=[4.0, 2.0], limit=3.0)
    go.Figure(spec)
    assert (spec["layout"]["xaxis"]["range"][1] == pytest.approx(4 * 1.08)
            and spec["data"][-1]["x"] == [4.0, 2.0])


def peaks(model, ranks, micro_batches=1):
    """By stage, as quantities; and the title."""
    spec = stages_view(lpkit.preset(model), CATALOGUE["h200"], ranks, micro_batches)
    go.Figure(spec)
    return [quantity(sum(row["x"][i] or 0 for row in spec["data"]), "bytes")
            for i in range(4)], spec


def test_the_answers_about_what_is_gathered_are_those_of_the_explorer():
    text, show = answers_of("15"), gathers_view(data_parallel.gathers)

    def shown(model, ranks):
        spec, table = show(lpkit.preset(model), CATALOGUE["h200"], ranks)
        go.Figure(spec)
        bf16, float32, fp8 = (re.findall("<td[^>]*>(.*?)</td>", row)
                              for row in re.findall("<tr>(.*?)</tr>", table)[-3:])
        gathered = next(row for row in spec["data"] if row["name"] == "all-gather")["x"]
        return bf16, float32, fp8, [quantity(nbytes, "bytes") for nbytes in gathered]

    *_, gathered = shown("llama-8b", 8)
    assert f"shrink from {gathered[0].removesuffix(' GB')} to {gathered[2]}" in text
    seconds = lambda row: float(row[4].split()[0])
    bf16, _, fp8, _ = shown("llama-70b", 64)
    assert (f"{fp8[1].removesuffix(' GB')} of {bf16[1]}" in text and "seven tenths" in text
            and 0.65 < seconds(fp8) / seconds(bf16) < 0.75)
    bf16, _, fp8, _ = shown("gpt2-124m", 8)
    assert bf16[4].endswith("ms") and fp8[4].endswith("ms") and seconds(fp8) > 1.05 * seconds(bf16)


def test_the_answers_about_stages_are_those_of_the_explorer():
    text = answers_of("14")
    gradients = lambda spec: next((row["x"][1] for row in spec["data"]
                                   if row["name"] == "gradients"), None)
    (_, single, *_), spec = peaks("llama-8b", 8)
    (_, four, *_), more = peaks("llama-8b", 8, 4)
    assert (not gradients(spec) and f"{quantity(gradients(more), 'bytes')}, and a peak of {four} "
                                    f"instead of {single.removesuffix(' GB')}" in text)
    (_, few, _, third), (_, many, _, last) = peaks("llama-8b", 64)[0], peaks("llama-8b", 1024)[0]
    for before, after in ((few, many), (third, last)):
        assert before.removesuffix(" GB") in text and after.removesuffix(" GB") in text
    assert (peaks("llama-70b", 8)[1]["layout"]["title"]["text"].endswith("no stage of ZeRO")
            and f"With 8, its {peaks('llama-70b', 8)[0][3]} are 6 GB" in text)
    for ranks in (16, 1024):
        assert peaks("llama-70b", ranks)[1]["layout"]["title"]["text"].endswith("fits with ZeRO 3")
