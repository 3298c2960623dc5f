"""What the text of notebooks 19 and 22 to 25 says in numbers: each sentence beside its record, its
formula or its figure.

Only these tests catch: such a number that is no longer so, series of a legend that look alike, and
a claim of seconds that noise decides.
"""

import contextlib
import itertools
import json
import math
from statistics import NormalDist, fmean, stdev
from types import SimpleNamespace

import pytest
import torch

from lessons import claims, signals
from lessons import l19_is_it_progress as chance
from lessons import l22_blocks as blocks
from lessons import l23_less_of_the_model as less
from lessons import l24_start_from_a_run as begun_from
from lessons.l06_fp8_training import LiveRuns
from lessons.race import race_figure
from lpkit import records
from lpkit.config import Config
from lpkit.predict.evidence import MEASURED
from tests.course.test_notebooks import numbered, said_in
from tests.lessons.figures.test_ui import lab, linear


def record(name):
    bench = json.loads((MEASURED / name).read_text())
    return bench, {case["case"]: case for case in bench["cases"]}


# ---- figures: one legend, one colour for each series

def apart(spec):
    """Series of a legend that look alike: under 25 in CIE Lab, which is a step that one sees
    without both side by side, and the same dash."""
    shown = [trace for trace in spec["data"] if trace.get("name")
             and trace.get("showlegend") is not False and trace["type"] != "heatmap"]
    return [(a["name"], b["name"]) for a, b in itertools.combinations(shown, 2)
            if math.dist(seen(a), seen(b)) < 25 and dash_of(a) == dash_of(b)]


def seen(trace):
    return lab(linear(trace.get("line", {}).get("color") or trace["marker"]["color"]))


def dash_of(trace):
    return trace.get("line", {}).get("dash", "solid")


def test_series_of_19_have_a_colour_each():
    _, losses = chance.pool()
    seeds = {f"seed {seed}": {1: 2.0, 2: 1.0 + seed} for seed in range(12)}
    for spec in (chance.verdict_figure(chance.replayed(chance.LION)),
                 chance.progress_of_nothing(losses),
                 chance.difference_view(losses)(3, 0.5), race_figure(seeds, paired=["seed 0"])):
        assert not apart(spec), spec["layout"]["title"]


def test_runs_that_share_no_batch_have_no_panel_of_differences():
    """Of the seeds of 19 each reads other batches: there is no difference to draw, only a line at
    zero."""
    runs = {name: {1: 3.0, 2: 2.0 + i} for i, name in enumerate(("a", "b", "c"))}
    alone, two = race_figure(runs, paired=["a"], planned_steps=2), race_figure(runs,
        paired=["a", "b"], planned_steps=2)
    assert ([trace["name"] for trace in alone["data"]] == list(runs)
            and "yaxis2" not in alone["layout"])
    assert two["layout"]["yaxis2"] and [trace["y"] for trace in two["data"]
        if trace.get("yaxis") == "y2"] == [[0, 0], [0, pytest.approx(50)], []]

    def live(*seeds):
        handle = SimpleNamespace(
            handles={"a": SimpleNamespace(records=[SimpleNamespace(step=1, loss=2.0)])},
            planned_steps=2, title="a",
                                 configs=dict(zip("abc", (Config(seed=seed) for seed in seeds))))
        return LiveRuns._spec(SimpleNamespace(handle=handle, _read=None))

    assert "yaxis2" not in live(0, 1, 2)["layout"] and "yaxis2" in live(0, 0, 1)["layout"]


# ---- 19

def test_what_19_says_of_searches_is_what_they_are():
    text, (_, losses) = said_in("19"), chance.pool()
    searches = [chance.best_so_far(losses, seed=seed) for seed in range(500)]
    ends = [gains[-1] for gains in searches]
    over = sum(end > 0.02 for end in ends)
    assert (f"In {over} of 500 searches the best run looks more than 2% better, and in "
            f"{500 - over} it does not" in text and over == 321)
    assert (f"The best run of the search looks {fmean(ends):.1%} better than the first run"
            in text)
    assert (f"On average, a search keeps {fmean(map(chance.changes_kept, searches)):.1f} changes"
            in text)
    # the best config once more: any run beside any other
    again = fmean(1 - b / a for a, b in itertools.permutations(losses[:60], 2))
    assert abs(again) < 0.001 and "its loss is on average the loss of the first run" in text
    n = chance.TRIES + 1
    assert (1 - (n - 0.375) / (n + 0.25) == pytest.approx(0.6 / n, rel=0.05)
            and "about `0.6 / n` of all runs would be better still" in text)


def test_what_19_says_that_seeds_can_see_is_the_test_that_it_names():
    """Both columns by simulation: pairs of Gaussians whose gain is what the text says are found 80
    times in 100."""
    text, sigma = said_in("19"), chance.sigma_of(chance.pool()[1])
    for n, by_t, known in ((3, "4.93%", "2.49%"), (40, "0.70%", "0.68%")):
        assert (f"{chance.found_by_t(sigma, n):.2%}" == by_t
                and f"{chance.found_if_known(sigma, n):.2%}" == known and by_t in text
                and known in text)
        assert chance.seeds(chance.found_if_known(sigma, n) + 1e-9,
                            sigma) == n, "what exercise 2 asks for"
    assert ("three seeds find a gain of 4.93% 80 times in 100. With an exactly known sigma "
            "they would find 2.49%." in text)
    draw = NormalDist(0, 1)
    rolls = draw.samples(3 * 20_000, seed=0)
    for gain, critical in ((-math.log1p(-chance.found_by_t(sigma, 3)), None),
                           (chance.found_if_known(sigma, 3), 1.959964)):
        detections = 0
        for three in zip(*[iter(rolls)] * 3):
            pairs = [gain + math.sqrt(2) * sigma * roll for roll in three]
            sd = stdev(pairs) if critical is None else math.sqrt(2) * sigma
            # the t of two degrees of freedom
            detections += abs(fmean(pairs)) * math.sqrt(3) / sd > (critical or 4.302653)
        assert detections / 20_000 == pytest.approx(0.8, abs=0.01)


def test_what_19_says_of_other_runs_is_in_their_records():
    text = said_in("19")
    losses, _ = record("recipe-losses-amd-epyc.json")
    bf16 = losses["losses"]["bf16"]
    assert (f"(300 steps of `cpu-3m`: {stdev(map(math.log, bf16)):.2%}, from three seeds)" in text
            and (losses["steps"], len(bf16)) == (300, 3))
    means = {name: fmean(of) for name, of in losses["losses"].items()}
    assert (max(means.values()) - min(means.values()) < max(bf16) - min(bf16)
            and "differ by less than three seeds of one recipe do" in text)
    _, kept = record("decisions-amd-epyc.json")
    nothing = "runs carried on: 500 sequences, what does nothing is kept"
    for who, words in (("the referee", "that do nothing it keeps {:.2f} on average"),
                       ("the lower of two runs", 'lower of two runs" keeps {:.1f} (')):
        assert words.format(50 * kept[f"{who}, {nothing}"]["ratio"]) in text
    lion = records.read(chance.LION)
    assert (f"({lion['runs']} runs, {lion['seconds'] / 60:.1f} minutes on two cores of an AMD EPYC)"
            in text)


# ---- 22

def cells(number):
    return {cell.id: cell.source for cell in numbered(number).cells}


def test_the_recursion_by_hand_is_the_kits():
    there = {"torch": torch, "nn": torch.nn, "layers": 24, "lesson": blocks}
    of = signals.predicted(blocks.small("pre-norm", 24), blocks.tokens())
    exec(cells("22")["blocks-hand-recursion"], there | {"by_block": {"pre-norm": (of, of)}})


def test_what_22_answers_is_its_figure():
    text = " ".join(cells("22")["blocks-15"].split())
    of = {name: signals.predicted(blocks.small(block, 24, norm=norm), blocks.tokens(), form)
          for name, (block, form, norm) in blocks.STUDIED.items()}
    first = {name: prediction.variance[0] for name, prediction in of.items()}
    assert (of["gain of 0"].variance == [first["gain of 0"]] * 25
            and f"stays at {first['gain of 0']:g}" in text)
    shaped = of["no skip, shaped"].variance
    assert (first["no skip, shaped"] < 0.001 and shaped[1:] == pytest.approx([1] * 24, rel=0.02)
            and "the variance rises to 1" in text)
    assert f"grows by {of['no norm'].variance[-1] / first['no norm'] - 1:.0%} in 24 layers" in text
    bare = of["no skip"].variance
    assert (f"to {bare[-1] / bare[0]:.1f} times its first value" in text
            and bare[4] > 0.95 * bare[-1] and "mostly in four layers" in text)
    pre = of["pre-norm"]
    assert f"With pre-norm it grows to {pre.variance[-1] / pre.variance[0]:.0f} times" in text
    steps = [b - a for a, b in itertools.pairwise(pre.variance)]
    assert max(steps) < 1.6 * min(steps) and "by about the same amount in each layer" in text
    assert f"mean cosine is {pre.cosine[-1]:.2f} after 24 layers" in text
    gpt2 = signals.predicted(blocks.small("pre-norm", 24, init="gpt2"), blocks.tokens())
    assert f"the cosine is {gpt2.cosine[-1]:.2f}" in text


@pytest.mark.slow
def test_where_22_says_that_its_formula_is_furthest_off():
    m = blocks.small("unshaped", 24)
    both = signals.predicted(m, blocks.tokens(), "without skip"), signals.measured(m,
        blocks.tokens(), 4)
    assert f"({blocks.off(both)[0]:.0%} with four models)" in cells("22")["blocks-15"]
    m = blocks.small("pre-norm", 2, init="fan-in")
    formula, models = signals.predicted(m, blocks.tokens()).cosine[1], signals.measured(m,
        blocks.tokens(), 8).cosine[1]
    assert (f"the formula predicts a mean cosine of {formula:.2f}, and real models "
            f"have {models:.2f}" in said_in("22"))


def test_what_22_says_of_speed_is_in_its_record():
    text, (bench, rows) = said_in("22"), record("blocks-amd-epyc.json")
    fast = {(name, recipe): rows[f"{name}, 6 x 384, {recipe}"]["ratio"]
            for name in ("sas-p", "skipless") for recipe in ("fp32", "bf16")}
    assert (f"`sas-p` is {fast['sas-p', 'fp32']:.2f} times as fast as pre-norm, and FLOPs say "
            f"{rows['sas-p, 6 x 384, fp32']['by_flops']:.2f}" in text)
    assert (f"in bf16 it is {fast['sas-p', 'bf16']:.2f} times as fast" in text
            and fast["sas-p", "fp32"] < rows["sas-p, 6 x 384, fp32"]["by_flops"])
    assert (f"it has {fast['skipless', 'fp32']:.2f} times the speed of pre-norm in float32, and "
            f"{fast['skipless', 'bf16']:.2f} times in bf16" in text)
    assert (bench["cores"] == 2 and bench["others_share"] < 0.05
            and "saves less time than FLOPs" in text)
    [verdict] = records.read(MEASURED / "claim-sas-p.verdict")["verdicts"]
    same = verdict["equal_seconds"]
    for gain, (low, high), form in (((verdict["gain"], verdict["interval"],
                                     "{:.1%} lower than the loss of pre-norm (95% interval: {:.1%} "
                                     "to {:.1%})"),
                                    (same["gain"], same["interval"], "at equal seconds {:.1%} "
                                        "lower ({:.1%} to {:.1%})"))):
        assert form.format(gain, low, high) in text
    assert (verdict["seeds"], verdict["steps"]["sas-p"]) == (10, 100)


# ---- 23

def test_series_of_22_and_23_have_a_colour_each():
    arms = less.arms(8)
    spent = {name: less.Arm(config=config, losses=(2.0,), curves=((2.0,) * config.steps,))
             for name, config in arms.items()}
    runs = {name: ([2.0, 1.9], 1.9) for name in blocks.RUNS}
    for spec in (less.curves_figure(spent), blocks.losses_figure(runs),
                 blocks.speed_figure(["a", "b"], [1.0, 2.0], [1.0, 2.0], 0.0)):
        assert len(spec["data"]) > 1 and not apart(spec), spec["layout"]["title"]


def test_what_23_answers_is_the_picture():
    text = cells("23")["less-14"]
    config = less.preset("cpu-3m").replace(less.SMALL | {"steps": 60})

    def area(name, layers, steps=60):
        return fmean(itertools.chain(
            *less.picture(less.scheduled(config.replace({"model.layers": layers, "steps": steps}),
                                         name, share=0.5))))

    assert (f"`token-drop` goes from {area('token-drop', 4):.0%} to {area('token-drop', 24):.0%}"
            in " ".join(text.split()))
    whole = {name for name in less.SCHEDULES if set(less.picture(less.scheduled(config, name))[-1])
             == {1.0}}
    assert ({"stack", "random-ltd"} <= whole and "progressive-layer-drop" not in whole
            and "`stack` and `random-ltd` end with the whole model" in text)
    ltd = less.picture(less.scheduled(config, "random-ltd"))
    full = next(step for step, shares in enumerate(ltd) if set(shares) == {1.0})
    assert (full / len(ltd) == pytest.approx(2 / 3, abs=0.05)
            and "over two thirds of the run" in text)
    more = less.arms(150)[less.DROPPED].steps / 150
    assert (more == pytest.approx(4 / 3, abs=0.05)
            and "Progressive layer dropping also takes a third more updates" in said_in("23"))
    assert ("0.7 to 1.7% above the loss of the copies" in said_in("23")
            and "copies are 0.7 to 1.2% (deeper) and 1.7% (wider) ahead" in " ".join(
        (MEASURED.parents[1] / "docs/log.md").read_text().split()))


# ---- 24

def test_what_24_says_of_the_share_is_counted_by_hand():
    text, config = said_in("24"), begun_from.preset("cpu-3m").replace({"model.context": 128})
    D, F, r = config.model.width, config.model.F, 2
    # q, k and v have an A and a B each
    block = r * (3 * (D + D) + (D + D) + (D + F) + (F + D))
    trained = begun_from.trained_count(begun_from.adapted(config, r).model)
    assert trained == config.model.layers * block == 36_864 and f"{trained:,} numbers" in text
    whole = begun_from.parameter_count(config.model)
    assert f"{trained / whole:.2%} of the model's {whole:,} weights" in text
    assert "queries, keys and values, and each of the three has its own `A` and `B`" in text


def test_what_24_says_is_forgotten_is_in_the_record():
    text, (bench, _) = said_in("24"), record("forgetting-amd-epyc.json")
    points = bench["points"]

    def best(rank, seed):
        """(what was forgotten at the rate at which most was learned, that)."""
        name = f"rank {rank} at" if rank else "all weights at"
        winner = max((case for case in points if case.startswith(name)),
                     key=lambda case: points[case]["learned"][seed])
        return points[winner]["forgotten"][seed], points[winner]["learned"][seed]

    ranks, seeds = (1, 2, 4, 8, 16), range(3)
    assert (all(best(rank, seed)[1] < best(0, seed)[1] for rank in ranks for seed in seeds)
            and "LoRA learns less at every rank" in text)
    first = {rank: best(rank, 0)[0] for rank in (0, *ranks)}
    assert max(first[1], first[2]) < first[0] < min(first[4], first[8], first[16])
    assert ("ranks 1 and 2 forget less than all weights, and ranks 4 to 16 forget more" in text
            and "forgets no less" not in text)
    assert (f"{first[1]:.2f}, 0.11 to 0.13, and {min(first[4], first[8], first[16]):.2f} to "
            f"{max(first[4], first[8], first[16]):.2f} nats; all weights {first[0]:.2f}" in text)
    assert 0.105 < first[2] < 0.135
    for seed in (1, 2):
        assert max(best(rank, seed)[0] for rank in ranks) < best(0, seed)[0]
    assert ("from two other bases all weights did best at a higher rate, and every rank forgot less"
            in text)
    for seed in seeds:
        low, high = (points[f"all weights at {lr}"] for lr in ("0.0015", "0.005"))
        assert (abs(low["learned"][seed] - high["learned"][seed]) < 0.03
                and 1.7 < high["forgotten"][seed] / low["forgotten"][seed] < 2.2)
        gentle, rank_2 = points["all weights at 0.0005"], points["rank 2 at 0.005"]
        assert (abs(gentle["learned"][seed] - rank_2["learned"][seed]) < 0.05
                and gentle["forgotten"][seed] < rank_2["forgotten"][seed])
    assert (gentle["forgotten"][0] < rank_2["forgotten"][0] / 2
            and "forgets less than half as much of the code" in text)
    assert all(points[f"rank 16 at {lr}"]["learned"][seed] < low["learned"][seed]
               for lr in ("0.0015", "0.005", "0.015") for seed in seeds)


def test_the_sentence_on_the_page_of_claims_is_the_recorded_one():
    page, lion = " ".join((MEASURED.parents[1] / "docs/claim.md").read_text().replace("> ",
        "").split()), records.read(chance.LION)
    assert (lion["sentence"] in page and f"{lion['runs']} runs of 1 million weights, 100 steps of "
                                         f"512 tokens, in {lion['seconds'] / 60:.1f} minutes"
                                         in page)


@pytest.mark.parametrize("speed, others, verdict",
                         [(1.3, 0.0, "holds"), (0.9, 0.0, "fails"), (1.3, 0.9, "cannot tell"),
                          (0.9, 0.9, "cannot tell")])
def test_noise_does_not_decide_what_22_claims_of_seconds(speed, others, verdict, capsys):
    alike = ([1.0, 1.0], [0.0, 0.99]), ([1.0, 1.0], [0.0, 0.0])
    by_block = {name: (SimpleNamespace(variance=v, cosine=c),) * 2
                for name, (v, c) in zip(("no skip", "no skip, shaped"), alike)}
    there = {"by_block": by_block, "lesson": blocks, "tier": "cpu", "updates": 60,
             "runs": {"unshaped": ([], 3.0), "sas-p": ([], 2.5)}, "speed": speed,
             "turns": SimpleNamespace(other_cpu_share=others), "disturbance": blocks.disturbance,
             "goal": lambda *_: None, "claim": claims.claim,
             "cannot_tell": claims.cannot_tell}
    for cell in ("blocks-28", "blocks-28-claim"):
        with contextlib.suppress(AssertionError):
            exec(cells("22")[cell], there)
    assert f"'text/plain': '{verdict}: " in capsys.readouterr().out
