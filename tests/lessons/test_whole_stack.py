"""Lesson 31: the costs of updates, the effects of techniques, and what its record may say."""

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lpkit
from lessons import l31_whole_stack as lesson
from lessons.l31_whole_stack import ARMS, BASELINE, LEARNING, WHOLE
from lessons.rows import depth
from lpkit.claims.protocol import Claim
from lpkit.errors import ConfigError
from lpkit.presets import preset
from lpkit.training.training import Training

KINDS = {lesson.kind(config, step) for config in map(lesson.config, lesson.subsets(ARMS))
         for step in (0, 20, 40)}


def record_of(updates, seconds=None):
    """A record whose three seeds scatter by 10% and whose techniques multiply."""
    names = {arms: math.prod(updates[name] for name in arms) for arms in lesson.subsets(LEARNING)}
    return lesson.Record(
        {lesson.title(arms): [80 / factor * noise for noise in (0.9, 1.0, 1.1)]
         for arms, factor in names.items()},
        dict.fromkeys(map(lesson.title, names), 0.012), seconds or dict.fromkeys(KINDS, 0.01))


def test_flops_are_those_that_pytorch_counts():
    for arms in (BASELINE, frozenset(["Muon"]), frozenset(LEARNING)):
        config = lesson.config(arms)
        training = Training.build(config)       # of plain attention, which the counter knows
        for step in (1, 21, 41):
            with FlopCounterMode(display=False) as counter:
                training.update(step)
            assert counter.get_total_flops() == lesson.flops(config, step), (arms, step)


@pytest.mark.parametrize("arms", [BASELINE, frozenset(LEARNING)])
def test_the_runs_that_count_updates_learn_as_the_priced_ones(arms):
    """Attention and micro-batches add the same numbers in other orders."""
    losses = []
    for config in (lesson.config(arms, 0.012), lesson.learning(arms, 0.012, 0)):
        training = Training.build(config)
        losses.append([training.update(step).loss.item() for step in range(6)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_costs_the_sum_of_its_updates():
    config = lesson.config(frozenset(["small batches first"]))
    for updates in (1, 20, 33, 70):
        tokens = lesson.total(config, updates,
                              lambda run_config, step: math.prod(run_config.sizes_at(step)))
        assert tokens == config.tokens_after(updates)
    each = [lesson.flops(config, step) for step in range(70)]
    assert lesson.total(config, 60.5, lesson.flops) == pytest.approx(sum(each[:60]) + each[60] / 2)


def test_effects_of_all_parts_are_the_whole():
    generator = torch.Generator().manual_seed(0)
    sets = lesson.subsets("abcd")
    drawn = torch.randn(len(sets), generator=generator, dtype=torch.float64)
    logs = dict(zip(sets, drawn.tolist()))
    effects = lesson.effects(logs)
    # by linear algebra: a row for each set, a column for each part of it
    parts = torch.tensor([[float(part <= some) for part in sets] for some in sets],
                         dtype=torch.float64)
    solved = torch.linalg.solve(parts, torch.tensor(list(logs.values()), dtype=torch.float64))
    assert list(effects.values()) == pytest.approx(solved.tolist(), abs=1e-12)


def test_factors_that_multiply_have_no_effects_of_pairs():
    factors = dict(zip(LEARNING, (1.6, 0.9, 1.2)))
    record = record_of(factors)
    whole = record.factor(WHOLE, "updates")
    assert (whole.value, whole.low, whole.high) == pytest.approx([math.prod(factors.values())] * 3)
    for order in (1, 2):
        assert record.gap("updates", order).value == pytest.approx(1.0)
    for first, second in itertools.combinations(ARMS, 2):
        assert record.gap("updates", 1, frozenset((first, second))).value == pytest.approx(1.0)


def test_two_techniques_that_save_the_same_updates_do_not_multiply():
    """In closed form: of 80 updates 20 have a quarter of the layers or sequences, 20 a half."""
    record = record_of(dict.fromkeys(LEARNING, 1.0))
    both = frozenset(("stacked layers", "small batches first"))
    baseline = lesson.config(BASELINE)
    seconds = {kind: math.prod(float(words.split()[0]) for words in kind.split(", ")[-2:])
               for kind in KINDS}
    record = lesson.Record(record.updates, record.rates, seconds)
    speedups = [80 * 128 / record.costs(arms, "seconds")[1] for arms in (*map(
        frozenset, zip(both)), both)]
    singly, together = 80 / (20 / 4 + 20 / 2 + 40), 80 / (20 / 16 + 20 / 4 + 40)
    assert speedups == pytest.approx([singly, singly, together])
    assert baseline.micro_batches == 16 and together < singly**2


def test_an_h100s_seconds_of_stages_are_those_of_the_governor():
    """`lpkit predict` averages over the stages of a schedule; the lesson adds them up."""
    config = preset("gpt2-124m").replace({
        "imports": depth.__name__, "precision.recipe": "bf16", "grad_accum_steps": 256,
        "system.attention": "plain", "governors": [{"name": "stack", "start": 3}]})
    stages = sum(share * lesson.h100_seconds(BASELINE, layers, 32)
                 for layers, share in ((1, 0.25), (2, 0.25), (4, 0.5)))
    assert lpkit.predict(config, "h100").step_seconds == pytest.approx(stages, rel=0.01)


def test_what_is_compared_differs_in_what_was_declared():
    claim = lesson.protocol()
    assert isinstance(claim, Claim) and len(claim.arms) == 8 and len(claim.points) == 6
    assert {config.seed for config in map(lesson.config, lesson.subsets(ARMS))} == {0}


@pytest.mark.parametrize("call, words", [
    (lambda path: lesson.Record.read(path), "has no whole-stack-\\*.json; record it with `lpkit "),
    (lambda path: lesson.settings(["Muonn"]), "Muon"),
    (lambda path: record_of(dict.fromkeys(LEARNING, 1.0)).costs(WHOLE, "hours"), "unit")])
def test_bad_input_is_refused_in_a_sentence(tmp_path, call, words):
    with pytest.raises(ConfigError, match=words) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []
