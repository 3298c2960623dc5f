"""The failure lab: each fault shows in the telemetry where its row says, and the search finds what was planted."""

import math
import random
import statistics

import pytest
import torch

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure import telemetry
from lpkit.studies.bisect import bisect, search, train
from lpkit.studies.faults import (
    FAULTS,
    Injection,
    inject,
    low_precision_products,
    run_in_high_precision,
)
from lpkit.training.training import Training

TINY = Config().replace({
    "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 32, "global_batch": 8, "steps": 60,
    "schedule.warmup_steps": 4, "optimizer.lr": 5e-3, "system.device": "cpu", "system.threads": 1, "system.compile": False})
LAYER = "blocks.0.attention.qkv"


def training_with(fault: str | None, recipe: str, **settings):
    training = Training.build(TINY.replace({"precision.recipe": recipe, "precision.recipe.high_precision_layers": "head", "precision.backend": "emulated"}))
    if fault is not None:
        inject(training.model, Injection(fault=fault, layers=(LAYER,)))
    return training, telemetry.attach(training, None, every=1, rows=None, layers=(LAYER,), counterfactuals=(), **settings)


def seen(fault: str | None, recipe: str, role: str, number: str) -> float:
    training, watched = training_with(fault, recipe, roles=(role,))
    train(training, 0, 24)      # some only show when a tensor happens to grow from one step to the next
    values = [getattr(sample.own, number) for sample in watched.samples if sample.own]
    return statistics.fmean(value for value in values if value is not None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_where_its_row_says(name):
    fault = FAULTS[name]
    role, number, sign = fault.shows
    without, with_it = (seen(planted, fault.recipe, role, number) for planted in (None, name))
    assert sign * (with_it - without) > 0, f"{number} of {role}: {without} without, {with_it} with it"


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "zero-amax-block"])
def test_in_16_bits_a_fault_changes_no_bit(name):
    losses = []
    for planted in (None, name):
        training, _ = training_with(planted, FAULTS[name].recipe)
        run_in_high_precision(training.model, low_precision_products(training.model))
        losses.append(train(training, 0, 1))
    assert losses[0] == losses[1]


def test_a_zero_block_is_harmless_to_the_kit_itself():
    training, watched = training_with(None, "mxfp8", roles=("w",))
    with torch.no_grad():
        training.model.blocks[0].attention.qkv.weight[:32, :32] = 0
    assert all(math.isfinite(loss) for loss in train(training, 0, 2))
    assert watched.samples[0].own.zero_blocks > 0
    broken, _ = training_with("zero-amax-block", "mxfp8")
    assert not math.isfinite(train(broken, 0, 1)[0])


@pytest.mark.parametrize("settings, said", [
    (Injection(fault="stale-max"), "stale-amax"),
    (Injection(fault="stale-amax", layers=("blocks.9.*",)), "matches no low-precision Linear"),
    (Injection(fault="stale-amax"), "has no history to spoil"),
])
def test_a_plant_that_cannot_be(settings, said):
    model = Training.build(TINY.replace({"precision.recipe": "fp8-tensorwise"})).model
    with pytest.raises(ConfigError, match=said):
        inject(model, settings)


# ---- the search, on losses made up ---------------------------------------------------------------------------------------

LAYERS = [f"blocks.{i}.{part}" for i in range(3) for part in ("qkv", "out", "up", "down")]
UNITS = [(layer, product) for layer in LAYERS for product in ("y", "dx", "dw")]


def made_up(damage: dict, noise: float = 1e-3):
    """Each product that is not promoted costs its damage; a nudge moves the loss by the noise."""
    calls = []

    def loss(promoted, seed, nudge):
        calls.append(promoted)
        return 2 + 0.1 * seed + sum(cost for unit, cost in damage.items() if unit not in promoted) + noise * (-1) ** nudge * (nudge > 0)

    return loss, calls


@pytest.mark.parametrize("unit", UNITS)
def test_every_single_culprit_is_found(unit):
    loss, calls = made_up({unit: 0.1})
    found = search("it", UNITS, loss)
    assert found.culprits == (unit,) and found.certainty == "high"
    assert found.gap == pytest.approx(0.1) and found.noise == pytest.approx(1e-3) and found.recovery == pytest.approx(1)
    assert found.runs == len(calls) <= 3 * (5 + 2 * math.ceil(math.log2(len(LAYERS))) + 4)
    assert unit[0] in str(found) and f"({unit[1]})" in str(found)


def test_products_that_share_a_fault_are_named_together():
    loss, _ = made_up({(LAYERS[5], "dx"): 0.1, (LAYERS[5], "y"): 0.1})
    found = search("it", UNITS, loss)
    assert {layer for layer, _ in found.culprits} == {LAYERS[5]} and found.certainty == "high"
    assert {(LAYERS[5], "dx"), (LAYERS[5], "y")} <= set(found.culprits)


@pytest.mark.parametrize("damage", [{}, {UNITS[3]: 2e-3}, dict.fromkeys(UNITS, 0.01),
                                    {UNITS[0]: 0.1, UNITS[20]: 0.1}])
def test_nothing_or_everything_is_no_culprit(damage):
    loss, _ = made_up(damage)
    assert search("it", UNITS, loss).certainty == "low"


def by_chance(damage: dict, *, own: float = 0.0, noise: float = 1e-3, world: int = 0):
    """As `made_up`, but no two runs drift alike: by `noise`, and by `own` in low precision."""
    def loss(promoted, seed, nudge):
        draw = random.Random(f"{world} {sorted(promoted)} {seed} {nudge}")
        left = [unit for unit in UNITS if unit not in promoted]
        cost = sum(damage.get(unit, 0.0) for unit in left)
        return 2 + 0.1 * seed + cost + draw.gauss(0, noise) + draw.gauss(0, own if left else 0.0)

    return loss


WORLDS = 120
# Damage and the low-precision runs' own drift, in units of the noise of nudged runs in 16 bits.
HARD = [(2, 0), (5, 0), (10, 0), (10, 10), (20, 10), (20, 40), (0, 10), (0, 40)]


@pytest.mark.parametrize("times, own", HARD)
@pytest.mark.parametrize("seeds", [2, 3])
def test_a_wrong_layer_is_never_named_with_high_certainty(times, own, seeds):
    """Where runs drift more than in 16 bits, the answer is the layer or "cannot tell"."""
    wrong = high = 0
    for world in range(WORLDS):
        unit = random.Random(world).choice(UNITS)
        loss = by_chance({unit: times * 1e-3}, own=own * 1e-3, world=world)
        found = search("it", UNITS, loss, seeds=seeds)
        missed = not times or {name for name, _ in found.culprits} != {unit[0]}
        wrong += missed and found.certainty != "low"
        high += missed and found.certainty == "high"
        assert found.runs <= found.seeds * (9 + 2 * math.ceil(math.log2(len(LAYERS))))
        assert found.seeds <= 3 * seeds
        assert found.certainty != "low" or str(found).startswith(("Cannot tell", "Nothing to find"))
    assert high == 0 and wrong <= 0.05 * WORLDS


@pytest.mark.parametrize("times, own", [(50, 0), (100, 5)])
@pytest.mark.parametrize("seeds", [2, 3])
def test_a_large_effect_is_found_in_every_world(times, own, seeds):
    for world in range(WORLDS):
        unit = random.Random(world).choice(UNITS)
        loss = by_chance({unit: times * 1e-3}, own=own * 1e-3, world=world)
        found = search("it", UNITS, loss, seeds=seeds)
        assert {name for name, _ in found.culprits} == {unit[0]} and unit in found.culprits
        assert found.certainty == "high", str(found)


def test_more_seeds_are_drawn_where_seeds_do_not_agree():
    """One of two seeds has a second culprit: two seeds cannot tell, some more can."""
    culprit, second = UNITS[5], UNITS[30]

    def loss(promoted, seed, nudge):
        damage = {culprit: 0.06, second: 0.04} if seed == 1 else {culprit: 0.1}
        cost = sum(cost for unit, cost in damage.items() if unit not in promoted)
        return 2 + cost + 1e-3 * (nudge > 0)

    found = search("it", UNITS, loss, seeds=2)
    assert 2 < found.seeds <= 6 and found.certainty == "high"
    assert {name for name, _ in found.culprits} == {culprit[0]}
    assert found.recovery == pytest.approx(1 - 0.4 / found.seeds)


def test_what_seeds_do_not_agree_on_cannot_be_told():
    """A gap that no half brings back is no finding, however large beside the noise."""
    def loss(promoted, seed, nudge):
        return 2 + (0.0 if set(promoted) == set(UNITS) else [0.3, -0.2][seed % 2])

    found = search("it", UNITS, loss)
    assert found.certainty == "low" and found.culprits == tuple(UNITS)
    assert str(found).startswith("Cannot tell")
    assert "12 layers, blocks.0.qkv to blocks.2.down" in str(found)


# ---- on real runs ----------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("fault, layer, warm_steps", [("stale-amax", "blocks.0.mlp.down", 150), ("zero-amax-block", "blocks.1.mlp.up", 60)])
def test_bisect_finds_what_was_planted(fault, layer, warm_steps):
    """After 150 steps every seed loses to a stale amax; after 60 one in three does not."""
    found = bisect(TINY, Injection(fault=fault, layers=(layer,)), seeds=2, warm_steps=warm_steps, steps=6)
    assert {name for name, _ in found.culprits} == {layer} and found.certainty != "low"


@pytest.mark.slow
def test_bisect_finds_nothing_where_nothing_is():
    found = bisect(TINY, "fp8-tensorwise", seeds=2, warm_steps=30, steps=4)
    assert found.certainty == "low"
    again = bisect(TINY, "fp8-tensorwise", seeds=2, warm_steps=30, steps=4)
    assert found == again


@pytest.mark.parametrize("suspect, said", [("mxfp9", "mxfp8"), ("bf16", "no low-precision product"),
                                           (Injection(fault="x"), "no fault")])
def test_a_suspect_that_cannot_be(suspect, said):
    with pytest.raises(ConfigError, match=said):
        bisect(TINY, suspect, seeds=1, warm_steps=0, steps=1)
