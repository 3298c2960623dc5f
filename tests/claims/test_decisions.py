"""The counts of `lpkit bench decisions` and `claim-overhead`, compared with formulas and with
counts by hand.

Only these tests catch: an arm that shares runs with the other arm, a rule that accepts more or
fewer changes than its formula says, a claim that repeats runs of its first arm, and seconds of a
claim that are counted twice or not at all.
"""

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from lpkit.claims import protocol, runs, settle
from tests.bench import decisions as bench
from tests.bench import overhead

ROOT = Path(__file__).parents[2]
RECORDED = max((json.loads(path.read_text())
                for path in (ROOT / "data/measured").glob("decisions-*.json")),
    key=lambda record: record["date"])


@pytest.fixture(scope="module")
def losses():
    return json.loads(bench.POOL.read_text())["losses"]["adamw"]


def kept(losses, rule, sequences, real=0, **how):
    return [bench.sequence(seed, losses, rule, real, **how) for seed in range(sequences)]


def seen(losses, verdicts, **how):
    """Return what a rule sees that accepts changes as `verdicts` say: for each decision, three
    runs of each arm and a pilot of the first arm."""
    comparisons, verdict = [], iter(verdicts)

    def rule(first, other):
        comparisons.append((first.pilot(), first.seeds(3), other(3)))
        return next(verdict, False)

    return bench.sequence(0, losses, rule, **how), comparisons


# the runs that are drawn

def test_an_arm_keeps_its_runs_and_shares_none_with_the_other(losses):
    done, comparisons = seen(losses, [False, False, True, False])
    pilots, first, other = zip(*comparisons)
    assert first[0] == first[1] == first[2] and pilots[0] == pilots[1] == pilots[2]
    assert first[3] == first[4] == other[2], (
        "what was kept is to be beaten, by the runs that it won by")
    assert pilots[3] == pilots[4] != pilots[2]
    assert len(set(map(tuple, other))) == len(other) == bench.DECISIONS
    for comparison in comparisons:
        assert len({loss for part in comparison for loss in part}) == bench.PILOT + 6, "a run twice"
        assert {loss for part in comparison for loss in part} <= set(losses)
    assert done.kept == [False, False, True, *[False] * 47]
    assert (done.runs == 50 * 3 + bench.PILOT + 3
            + bench.PILOT), "of both incumbents the pilot, of the first its seeds, too"


def test_arms_that_run_anew_share_no_run_with_the_decision_before(losses):
    done, comparisons = seen(losses, [False, True], anew=True)
    assert (len({tuple(first) for _, first, _ in comparisons}) == bench.DECISIONS
            and done.runs == 50 * (bench.PILOT + 6))
    assert comparisons[2][1] != comparisons[1][2]


def test_planted_gains_are_where_they_are_said_to_be():
    """If losses hardly vary, every rule finds all gains, and accepts changes without effect only
    by chance."""
    flat = [3.0 + 1e-9 * k for k in range(320)]
    for how in ({}, {"anew": True}):
        done = bench.sequence(3, flat, lambda first, other: statistics.fmean(other(3)) < 0.99
                              * statistics.fmean(first.seeds(3)), 10, **how)
        assert done.kept == [gain == bench.PLANTED for gain in done.gains] and sum(done.kept) == 10
        assert (done.count(True), done.count(True, False), done.count(False),
                done.count(False, False)) == (10, 0, 0, 40)
    orders = {tuple(bench.sequence(seed, flat, lambda *_: False, 10).gains) for seed in range(9)}
    assert len(orders) == 9


# the changes that are accepted

def test_one_run_beside_the_best_so_far_keeps_one_in_k(losses):
    """The k-th run has the lowest loss of the first k runs with probability 1 / k."""
    counts = [sequence.count(real=False) for sequence in kept(losses, bench.by_means(losses), 400)]
    expected, variance = sum(1 / k for k in range(2, 52)), sum(1 / k - 1 / k**2
        for k in range(2, 52))
    assert abs(statistics.fmean(counts) - expected) < 4 * math.sqrt(variance / 400)


def test_comparing_means_of_new_runs_keeps_half(losses):
    many = kept(losses, bench.by_means(losses, 3), 100, anew=True)
    share = statistics.fmean(sequence.count(real=False) for sequence in many) / bench.DECISIONS
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / 5000)


def test_the_referee_keeps_few_of_what_does_nothing(losses):
    """At most 5 of 100 changes without effect are accepted over two sequences. In the long run,
    2.5% are accepted (the half of 5% with lower losses) if decisions share no runs."""
    rule = bench.by_referee(losses)
    for how in ({}, {"anew": True}):
        assert sum(sequence.count(real=False) for sequence in kept(losses, rule, 2, **how)) <= 5
    many = kept(losses, rule, 40, anew=True)
    share = statistics.fmean(sequence.count(real=False) for sequence in many) / bench.DECISIONS
    assert 0.012 < share < 0.036, "0.025, three standard errors either way"


def test_the_referee_finds_gains_by_sigma_and_effect(losses):
    """By the noncentral t: 22 pairs that detect 1% with probability 80% detect 1.5% with
    probability 99%."""
    many = kept(losses, bench.by_referee_with_sigma(losses), 20, 10)
    assert sum(sequence.count(real=True) for sequence in many) / 200 > 0.93
    assert sum(sequence.count(real=False) for sequence in many) / 800 < 0.04


def test_an_interval_by_hand():
    """Of 1, 2, 3 and 6, the mean is 3 and the variance is 14/3."""
    half = 1.96 * math.sqrt(14 / 3 / 4)
    assert bench.interval([1, 2, 3, 6]) == pytest.approx((3, 3 - half, 3 + half))


def test_what_is_told_of_sequences():
    def sequence(places, gains=()):
        return bench.Sequence([0.015 * (k in gains) for k in range(50)],
                              [k in places for k in range(50)], runs=100)

    nothing = [sequence({0, 9, 10}), sequence({1, 2, 3}), sequence(()), sequence({49})]
    summary = bench.summary_of(nothing, [sequence({0, 1, 2}, {0, 1, 5}), sequence({0}, {0, 1, 5})])
    assert (summary["kept"][0] == 7 / 4 and summary["of_first_10"] == 5 / 4
            and summary["middle"] == [0, 3])
    assert summary["pairs_above"] == 1 / 2, "3 + 3 are more than 5 of 100, 0 + 1 are not"
    assert (summary["runs_a_decision"] == 2 and summary["gains_kept"][0] == 1.5
            and summary["nothing_kept_beside_gains"][0] == 0.5)
    nulls, _, beside, missed = bench._results("the referee", nothing,
                                              [sequence({0, 1, 2}, {0, 1, 5})],
        {})
    assert ((nulls.ratio, beside.ratio, missed.ratio) == (6 / 100, 1 / 47, 1 / 3) and not nulls.met
            and beside.met and not missed.met)


def test_the_command_carries_runs_on_as_the_bench_does():
    """Two claims have the same first arm. The second claim repeats none of its runs, neither of
    the comparison, nor of the pilot, nor of the tuning."""
    def names(other):
        claim = protocol.Claim(**overhead.CLAIM
                               | {"arms": {"adamw": {"optimizer": "adamw"}, "other": other}})
        configs_by_name = {}

        def finished(what, configs):
            records = [{"name": runs.records.digest(config.to_dict()),
                      "val_loss": random.Random(config.seed).gauss(3, 0.01), "seconds": 1,
                      "step_seconds": 1, "energy_wh": None} for config in configs]
            configs_by_name.update((record["name"],
                                    (config.optimizer.name, config.optimizer.beta2, config.seed))
                        for record, config in zip(records, configs))
            return records

        settle.Settling(claim, finished, lambda line: None).settle(null=False)
        return configs_by_name

    lion, two = names({"optimizer": "lion"}), names({"optimizer": "adamw", "optimizer.beta2": 0.99})
    shared = {config_name for name, config_name in lion.items() if name in two}
    assert len(shared) == 3 + 1 + 3 and {what[:2] for what in shared} == {("adamw", 0.95)}


def test_the_page_says_what_was_recorded():
    page = (ROOT / "docs" / "claim.md").read_text()
    recorded = {name: numbers for name, numbers in RECORDED["found"].items()
             if not ("sigma" in name and bench.ANEW in name)}
    assert len(recorded) == 2 * len(bench.RULES) - 1
    for name, numbers in recorded.items():
        (nothing, low, high), gains, beside = numbers["kept"], numbers["gains_kept"][0], numbers[
            "nothing_kept_beside_gains"][0]
        assert (f"| {nothing:.2f} ({low:.2f} to {high:.2f}) | {gains:.1f} | {beside:.1f} | "
                f"{numbers['runs_a_decision']:.0f} |") in page, (name)
    cases = {case["case"]: case["ratio"] for case in RECORDED["cases"]}
    first = [100 * cases[f"the referee, {how}: 2 sequences, what does nothing is kept"]
             for how in (bench.CARRIED, bench.ANEW)]
    assert ("it keeps {:.0f} of 100 changes, and {:.0f} if both arms run again for each decision"
            .format(*first) in " ".join(page.split()))


# the time of a claim in addition to its steps

def test_a_schedule_by_hand():
    assert overhead.makespan([3, 3, 3], 2) == 6 and overhead.makespan([3, 3, 3], 1) == 9
    assert overhead.makespan([5, 1, 1, 1], 2) == 5 and overhead.makespan([1, 1], 4) == 1


def test_where_seconds_go_by_hand():
    """The worker starts after 2 s. A run has 1 s of steps and takes 1.5 s, the first run 2 s.
    Between runs are 0.1 s; the verdict takes 0.4 s."""
    ends, end = [], 2.0
    for k in range(10):
        end += 2.0 if k == 0 else 1.6
        ends.append({"ended": end, "seconds": 2.0 if k == 0 else 1.5, "step_seconds": 0.25,
                     "config": {"steps": 4}})
    shares = overhead.accounted(ends, end + 0.4, 1)
    assert shares["parts"] == pytest.approx({
        overhead.COMPARED: 6, overhead.CHOSEN: 4, "in runs, beside their steps": 5, "in the first "
           "run of a worker, more than in others": 0.5,
        "until workers have begun": 2, "workers that wait": 0.9, "the verdict, and the end": 0.4})
    assert shares["wall"] == pytest.approx(18.8) == pytest.approx(sum(shares["parts"].values()))
    assert (shares[overhead.STEPS], shares[overhead.IN_ORDER], shares[overhead.COMPARED]) == (10,
                                                                                              10,
        6)
    two = overhead.accounted(ends, end + 0.4, 2)
    assert (two[overhead.STEPS] == 5 and two[overhead.IN_ORDER] == 2 + 1
            + 3), "a worker waits for the third of the pilot, and for tuning"
    assert sum(two["parts"].values()) == pytest.approx(2 * 18.8)


@pytest.mark.slow
def test_a_claim_of_ten_runs_is_measured(monkeypatch):
    monkeypatch.setattr(overhead, "cores", lambda: 1)
    small = {"model.layers": 1, "model.width": 64, "model.heads": 2, "model.context": 16,
             "global_batch": 4, "eval_batches": 2}
    results = overhead.run(1, overhead.CLAIM | {"settings": overhead.CLAIM["settings"] | small,
        "budget": {"steps": 12}})
    assert [(result.peer, result.target) for result in results] == [(overhead.STEPS, 1.03),
        (overhead.COMPARED, None)]
    whole, compared = results
    assert 1 < whole.ratio < compared.ratio and not whole.met
    [measured] = whole.provenance["claims"]["1"]
    assert sum(measured["parts"].values()) == pytest.approx(measured["wall"])
    assert measured["parts"]["until workers have begun"] > 0
    assert (measured["parts"][overhead.COMPARED] + measured["parts"][overhead.CHOSEN]
            == pytest.approx(measured[overhead.STEPS]))
