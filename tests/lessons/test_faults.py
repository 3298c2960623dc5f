"""The failure lab: each fault shows in the telemetry where its row says, and the search finds what
was planted.

Only these tests catch: a fault that its telemetry does not show or its cure does not end, a NaN
that is laid to another layer, and a search that misses a large effect, or names a layer with high
certainty where runs drift by as much.
"""

import math
import random
import statistics

import pytest
import torch

from lessons.judging import learner
from lessons.judging.learner import keep
from lessons.judging.questions import TIED
from lessons.l07_when_fp8_fails import (
    FAULTS,
    Accusation,
    Case,
    Injection,
    Starts,
    bisect,
    case_figure,
    cure,
    inject,
    low_precision_products,
    nonfinite_report,
    run_in_high_precision,
    search,
    search_figure,
    source_of_nonfinite,
    standing_out,
    telemetry_explorer,
    train,
)
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure import telemetry
from lpkit.precision.linear import scaled_linears
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import Training

TINY = Config().replace({
    "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 32, "global_batch": 8,
    "steps": 60,
    "schedule.warmup_steps": 4, "optimizer.lr": 5e-3, "system.device": "cpu", "system.threads": 1,
    "system.compile": False})
LAYER = "blocks.0.attention.qkv"
# Whose every layer matters to its loss before long: notebook 07's.
LLAMA = TINY.replace({
    "global_batch": 16, "optimizer.lr": 5e-3, "model.mlp_width": 128, "model.norm": "rmsnorm",
    "model.position": "rope", "model.mlp": "swiglu",
    "model.bias": False, "model.init": "llama"})
SEEN, UNSEEN = ([name for name, row in FAULTS.items() if bool(row.unseen) == unseen]
                for unseen in (False, True))
PLACES = [f"blocks.{i}.{part}" for i in range(2) for part in ("attention.qkv", "attention.out",
    "mlp.gate_up", "mlp.down")]


@pytest.fixture(scope="module")
def starts():
    """Two models of 121 steps, for every case of this file: what is looked at first is the first
    step after that."""
    return Starts(LLAMA, steps=121)


def training_with(fault: str | None, recipe: str, *, cured: bool = False, **settings):
    training = Training.build(TINY.replace({"precision.recipe": recipe,
        "precision.recipe.high_precision_layers": "head", "precision.backend": "emulated"}))
    if fault is not None:
        planted = Injection(fault=fault, layers=(LAYER,))
        inject(training.model, planted)
        if cured:
            cure(training.model, planted)
    return training, telemetry.attach(training, None, every=1, rows=None, layers=(LAYER,),
                                      counterfactuals=(), **settings)


def seen(fault: str | None, recipe: str, role: str, number: str, **settings) -> list[float]:
    """Step by step. The batches are the same in each, so that steps can be compared one by one: a
    mean hangs on a single spike."""
    training, watched = training_with(fault, recipe, roles=(role,), **settings)
    # some only show when a tensor happens to grow from one step to the next
    train(training, 0, 36)
    return [getattr(sample.own, number) for sample in watched.samples if sample.own]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_where_its_row_says_and_not_under_its_cure(name):
    fault = FAULTS[name]
    role, number, sign = fault.shows
    without, with_it = (seen(planted, fault.recipe, role, number) for planted in (None, name))
    cured = (seen(name, fault.recipe, role, number, cured=True) if fault.cure != fault.recipe
             else without)
    steps = [step for step in zip(without, with_it, cured) if None not in step]
    moved = statistics.fmean((sign * (bad - good) > 0) - (sign * (bad - good) < 0)
                             for good, bad, _ in steps)
    assert moved > 0.2, f"{number} of {role}: {without} without, {with_it} with it"
    nearer = statistics.fmean(sign * (bad - well) > abs(well - good) for good, bad, well in steps)
    assert nearer > 0.2, f"{number} of {role}: {cured} under {fault.cure}"


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


@pytest.mark.parametrize("settings, message", [
    (Injection(fault="stale-max"), "stale-amax"),
    (Injection(fault="stale-amax", layers=("blocks.9.*",)), "matches no low-precision Linear"),
    (Injection(fault="stale-amax"), "has no history to spoil"),
])
def test_a_plant_that_cannot_be(settings, message):
    model = Training.build(TINY.replace({"precision.recipe": "fp8-tensorwise"})).model
    with pytest.raises(ConfigError, match=message):
        inject(model, settings)


# ---- where a NaN came from

def samples_of(training: Training, steps: int = 1, **settings):
    watched = telemetry.attach(training, every=1, counterfactuals=(), **settings)
    train(training, 0, steps)
    return watched.samples


@pytest.mark.parametrize("layer", PLACES[::2])
def test_a_nan_is_followed_to_the_layer_that_made_it(layer):
    """It is met first downstream, in another layer, and everywhere from the second step on."""
    training = Training.build(LLAMA.replace({"precision.recipe": "mxfp8"}))
    inject(training.model, Injection(fault="zero-amax-block", layers=(layer,)))
    samples = samples_of(training, 2)
    met = next(sample.layer for sample in samples if sample.nonfinite)
    order = [*PLACES, "head"]
    assert order.index(met) == order.index(layer) + 1
    assert source_of_nonfinite(samples) == standing_out(samples)[0][0] == layer
    assert f"produced by {layer}" in nonfinite_report(samples)


@pytest.mark.parametrize("layer", PLACES[1::2])
def test_a_nan_of_backward_is_followed_the_other_way(layer):
    training = Training.build(LLAMA.replace({"precision.recipe": "fp8-tensorwise"}))
    module = training.model.get_submodule(layer)
    module.register_forward_pre_hook(lambda module, args: args[0].register_hook(lambda dx: dx
        * math.nan) and None)
    assert source_of_nonfinite(samples_of(training)) == layer


def test_a_nan_that_was_there_before_the_look_accuses_nobody():
    training = Training.build(LLAMA.replace({"precision.recipe": "fp8-tensorwise"}))
    with torch.no_grad():
        training.model.embed.weight.fill_(math.nan)
    samples = samples_of(training)
    assert source_of_nonfinite(samples) == "" and "already there" in nonfinite_report(samples)


# ---- the case

def solved(case: Case):
    well, ill, cured = case.run(6, faulty=False), case.run(6, every=5), case.run(6, cured=True,
        every=5)
    assert ({sample.step for sample in ill.samples} == {sample.step for sample in cured.samples}
            == {1, 6})
    finding = bisect(case.starts, case.injection, seeds=2, steps=3)
    return standing_out(ill.samples), finding, case.recovered(well, ill, cured), case.outcome(well,
        ill, cured)


@pytest.mark.parametrize("name", SEEN)
def test_a_seen_fault_is_named_by_both_witnesses_and_its_cure_cures(starts, name):
    """Far beyond chance: five times what the search calls clear, and half of a tensor."""
    case = Case.open(starts, name, seed=0)
    (first, second, *_), finding, recovered, text = solved(case)
    assert first[0] == case.layer and first[1] > 0.5 + second[1]
    assert ({layer for layer, _ in finding.culprits} == {case.layer} and finding.certainty != "low"
            and finding.effect > 20), str(finding)
    assert (recovered == pytest.approx(1, abs=0.1)
            and f"With {case.layer} in {FAULTS[name].cure}" in text)


@pytest.mark.parametrize("name", UNSEEN)
def test_an_unseen_fault_accuses_nobody(starts, name):
    case = Case.open(starts, name, seed=0)
    _, finding, _, text = solved(case)
    assert finding.certainty == "low" and "chance" in text and FAULTS[name].unseen in text
    assert case.answers == [f"{name} in {case.layer}", f"{TIED} in {case.layer}"]


@pytest.mark.parametrize("name, layer", [
    (name, layer) for i, name in enumerate(fault for fault in SEEN if fault != "zero-amax-block")
    for layer in PLACES[i % 2::2]])
def test_wherever_it_is_hidden_the_telemetry_names_it(starts, name, layer):
    """Each fault at half of the places, each place under half of the faults. (A NaN: above.)"""
    training = starts.under(FAULTS[name].recipe)
    inject(training.model, Injection(fault=name, layers=(layer,)))
    (first, second, *_) = standing_out(samples_of(training, 2))
    assert first[0] == layer and first[1] > 0.5 + second[1]


def test_a_case_is_drawn_by_seed_from_what_can_be_seen(starts):
    drawn = [Case.open(starts, "unknown", seed) for seed in range(10)]
    assert ({case.injection.fault for case in drawn} == set(SEEN)
            and len({case.layer for case in drawn}) > len(PLACES) / 2)
    assert drawn[:2] == [Case.open(starts, "unknown", seed) for seed in range(2)]
    with pytest.raises(ConfigError, match="stale-amax"):
        Case.open(starts, "stale-max", seed=0)


def test_all_runs_of_a_case_meet_the_same_batches(starts):
    """Without fault and cast they are one run: the one that trained the model goes on."""
    case = Case.open(starts, "stale-amax", seed=0)
    model = starts.under("fp8-delayed").model
    trained = starts.trained(0)
    for name, p in trained.model.named_parameters():
        assert torch.equal(p, model.get_parameter(name))
    ours = starts.under("fp8-delayed")
    for layer in scaled_linears(ours.model):
        layer.recipe = RECIPES["bf16"]
    bf16, well = train(ours, starts.steps, starts.steps + 3), case.run(3, faulty=False).losses
    on = train(trained.copy(), starts.steps, starts.steps + 3)
    assert well == pytest.approx(on, abs=0.02) and bf16 == pytest.approx(on, abs=0.02)


def test_an_accusation_is_a_click_a_choice_and_a_lock_and_is_kept(starts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    case = Case.open(starts, "zero-amax-block", seed=0)
    samples = case.run(2, every=1).samples

    def asked():
        return keep("07.accused", Accusation("Who?", telemetry_explorer(samples), (*FAULTS, TIED)))

    accusation = asked()
    accusation.button.click()
    # neither a layer nor a fault yet
    assert not accusation.locked and accusation.answer is None
    accusation.figure.clicked = {"curve": 0, "x": "1", "y": PLACES[0]}   # the menu shows it already
    assert accusation.value is None and accusation.fault.description == PLACES[0]
    # a bar of the histogram is no layer
    accusation.figure.clicked = {"curve": 1, "x": 3, "y": 3}
    accusation.fault.value = "zero-amax-block"
    assert accusation.value == f"zero-amax-block in {PLACES[0]}"
    accusation.figure.clicked = {"curve": 0, "x": "1", "y": case.layer}
    accusation.button.click()
    # looking on changes nothing
    accusation.figure.clicked = {"curve": 0, "x": "1", "y": PLACES[-1]}
    assert accusation.answer == f"zero-amax-block in {case.layer}" and accusation.fault.disabled
    accusation.judged(case.answers)
    again = asked()         # another day
    assert again.answer == accusation.answer and (again.fault.value,
        again.layer) == ("zero-amax-block", case.layer)
    again.judged(case.answers)
    assert "That is right." in again.status.value and learner.read().guesses[0].held
    late = Accusation("Who was it?", telemetry_explorer(samples), FAULTS)
    late.judged(case.answers)
    late.restore(accusation.value, None)
    assert late.locked and late.answer is None


def test_a_run_that_breaks_says_so_in_the_figure():
    spec = case_figure({"well": [3.0, 2.9], "ill": [3.0, math.nan]})
    assert [trace["y"] for trace in spec["data"]] == [[3.0, 2.9], [3.0, None]]
    (annotation,) = spec["layout"]["annotations"]
    assert annotation["text"] == "ill: NaN from step 2 on"


def test_the_path_of_the_search_is_drawn_as_it_was_walked():
    loss, _ = made_up({})
    assert "nothing was searched" in search_figure(search("it", UNITS, loss),
        LAYERS)["layout"]["annotations"][0]["text"]
    loss, _ = made_up({UNITS[4]: 0.1})
    finding = search("it", UNITS, loss)
    (cells,) = search_figure(finding, LAYERS)["data"]
    for column, trial in enumerate(finding.path):
        promoted = {layer for layer, _ in trial.promoted}
        assert ({layer for row, layer in enumerate(LAYERS) if cells["z"][row][column] is not None}
                == promoted)
        assert cells["x"][column].endswith(f"<br>{trial.recovery:.0%}".replace("-0%", "0%"))


# ---- the search, on losses made up

LAYERS = [f"blocks.{i}.{part}" for i in range(3) for part in ("qkv", "out", "up", "down")]
UNITS = [(layer, product) for layer in LAYERS for product in ("y", "dx", "dw")]


def made_up(damage: dict, noise: float = 1e-3):
    """Each product that is not promoted costs its damage; a nudge moves the loss by the noise."""
    calls = []

    def loss(promoted, seed, nudge):
        calls.append(promoted)
        return (2 + 0.1 * seed + sum(cost for unit, cost in damage.items() if unit not in promoted)
                + noise * (-1) ** nudge * (nudge > 0))

    return loss, calls


def test_every_single_culprit_is_found():
    for unit in UNITS:
        loss, calls = made_up({unit: 0.1})
        finding = search("it", UNITS, loss)
        assert finding.culprits == (unit,) and finding.certainty == "high"
        assert (finding.gap == pytest.approx(0.1) and finding.noise == pytest.approx(1e-3)
                and finding.alone.recovery == pytest.approx(1))
        assert finding.runs == len(calls) <= 3 * (5 + 2 * math.ceil(math.log2(len(LAYERS))) + 4)
        assert unit[0] in str(finding) and f"({unit[1]})" in str(finding)


def test_products_that_share_a_fault_are_named_together():
    loss, _ = made_up({(LAYERS[5], "dx"): 0.1, (LAYERS[5], "y"): 0.1})
    finding = search("it", UNITS, loss)
    assert {layer for layer, _ in finding.culprits} == {LAYERS[5]} and finding.certainty == "high"
    assert {(LAYERS[5], "dx"), (LAYERS[5], "y")} <= set(finding.culprits)


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


WORLDS = 60
# Damage and the low-precision runs' own drift, in units of the noise of nudged runs in 16 bits.
HARD = [(2, 0), (10, 0), (10, 10), (20, 10), (20, 40), (0, 40)]


@pytest.mark.parametrize("times, own", HARD)
@pytest.mark.parametrize("seeds", [2, 3])
def test_a_wrong_layer_is_never_named_with_high_certainty(times, own, seeds):
    """Where runs drift more than in 16 bits, the answer is the layer or "cannot tell"."""
    wrong = high = 0
    for world in range(WORLDS):
        unit = random.Random(world).choice(UNITS)
        loss = by_chance({unit: times * 1e-3}, own=own * 1e-3, world=world)
        finding = search("it", UNITS, loss, seeds=seeds)
        missed = not times or {name for name, _ in finding.culprits} != {unit[0]}
        wrong += missed and finding.certainty != "low"
        high += missed and finding.certainty == "high"
        assert finding.runs <= finding.seeds * (9 + 2 * math.ceil(math.log2(len(LAYERS))))
        assert finding.seeds <= 3 * seeds
        assert finding.certainty != "low" or str(finding).startswith(
            ("Cannot tell", "Nothing to find"))
    assert high == 0 and wrong <= 0.05 * WORLDS


@pytest.mark.parametrize("times, own", [(50, 0), (100, 5)])
@pytest.mark.parametrize("seeds", [2, 3])
def test_a_large_effect_is_found_in_every_world(times, own, seeds):
    for world in range(WORLDS):
        unit = random.Random(world).choice(UNITS)
        loss = by_chance({unit: times * 1e-3}, own=own * 1e-3, world=world)
        finding = search("it", UNITS, loss, seeds=seeds)
        assert {name for name, _ in finding.culprits} == {unit[0]} and unit in finding.culprits
        assert finding.certainty == "high", str(finding)


def test_more_seeds_are_drawn_where_seeds_do_not_agree():
    """One of two seeds has a second culprit: two seeds cannot tell, some more can."""
    culprit, second = UNITS[5], UNITS[30]

    def loss(promoted, seed, nudge):
        damage = {culprit: 0.06, second: 0.04} if seed == 1 else {culprit: 0.1}
        cost = sum(cost for unit, cost in damage.items() if unit not in promoted)
        return 2 + cost + 1e-3 * (nudge > 0)

    finding = search("it", UNITS, loss, seeds=2)
    assert 2 < finding.seeds <= 6 and finding.certainty == "high"
    assert {name for name, _ in finding.culprits} == {culprit[0]}
    assert finding.alone.recovery == pytest.approx(1 - 0.4 / finding.seeds)


def test_what_seeds_do_not_agree_on_cannot_be_told():
    """A gap that no half brings back is no finding, however large beside the noise."""
    def loss(promoted, seed, nudge):
        return 2 + (0.0 if set(promoted) == set(UNITS) else [0.3, -0.2][seed % 2])

    finding = search("it", UNITS, loss)
    assert finding.certainty == "low" and finding.culprits == tuple(UNITS)
    assert str(finding).startswith("Cannot tell")
    assert "12 layers, blocks.0.qkv to blocks.2.down" in str(finding)


# ---- on real runs

@pytest.mark.slow
def test_bisect_finds_nothing_where_nothing_is(starts):
    finding = bisect(starts, "fp8-tensorwise", seeds=2, steps=4)
    assert finding.certainty == "low"
    again = bisect(starts, "fp8-tensorwise", seeds=2, steps=4)
    assert finding == again


@pytest.mark.parametrize("suspect, message", [("mxfp9", "mxfp8"),
                                              ("bf16", "no low-precision product"),
                                              (Injection(fault="x"), "no fault")])
def test_a_suspect_that_cannot_be(suspect, message):
    with pytest.raises(ConfigError, match=message):
        bisect(Starts(TINY, steps=0), suspect, seeds=1, steps=1)
