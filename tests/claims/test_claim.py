"""`lpkit claim`: the statistics compared with independent values, the files that are refused, and
runs that are neither lost nor made twice.

Only these tests catch: a wrong critical value or power of the referee, a budget that gives an
arm a wrong number of steps, a file that imports code, a record or folder of another run whose
losses are used, and a claim that was killed and ends with another verdict than an uninterrupted
claim.
"""

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import plotly.graph_objects as go
import psutil
import pytest
import yaml

from lessons import l19_is_it_progress as lesson
from lpkit import cli, files, hardware
from lpkit.claims import protocol, referee, runs, settle
from lpkit.commands import claim as command
from lpkit.errors import ConfigError, RunFailedError
from lpkit.training.background import train
from lpkit.training.runs import Run
from tests.attack import verdicts as attacked
from tests.bench import claims as bench

ROOT = Path(__file__).parents[2]
TINY = {
    "settings": {"model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 16,
                 "global_batch": 4, "eval_batches": 2,
                 "eval_every": 0, "checkpoint_every": 0, "schedule.warmup_steps": 2,
                 "system.device": "cpu"},
    "arms": {"adamw": {"optimizer": "adamw"}, "lion": {"optimizer": "lion"}},
    "differ": ["optimizer"], "target": "val_loss", "effect": 0.2, "budget": {"steps": 4},
    "seeds": 4, "pilot": 3,
    "tuning": {"optimizer.lr": [1e-3, 1e-2], "optimizer.weight_decay": [0.0]}}


def claim(**changes):
    return protocol.Claim(**TINY | changes)


def written(folder, **changes):
    path = folder / "claim.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (TINY | changes).items()
                                    if value is not None}))
    return path


# statistics

def test_students_t_is_the_tables():
    """Expected: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2, upper
    critical values."""
    for df, p, t in ((1, .975, 12.706), (2, .975, 4.303), (3, .995, 5.841), (4, .9, 1.533),
                     (5, .95, 2.015), (10, .99, 2.764),
                     (29, .975, 2.045), (60, .975, 2.000), (100, .999, 3.174)):
        assert referee.t_quantile(p, df) == pytest.approx(t, abs=6e-4), (df, p)


@pytest.mark.parametrize("df", [1, 2, 7, 30])
def test_students_t_is_the_integral_of_its_density(df):
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    for t in (-2.5, 0.3, 1.0, 4.0):
        n = 2000    # Simpson's rule from 0
        h = t / n
        f = [scale * (1 + (i * h) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
        area = h / 3 * (f[0] + f[-1] + 4 * sum(f[1:-1:2]) + 2 * sum(f[2:-1:2]))
        assert referee.t_cdf(t, df) == pytest.approx(0.5 + area, abs=1e-10)


def test_levels_spend_no_more_than_alpha():
    assert referee.levels(1) == [0.05]
    # O'Brien-Fleming-like spending at half and at thirds of the information: Lan and DeMets 1983;
    # R's gsDesign prints 0.0031 one-sided
    assert [round(level, 4) for level in referee.levels(2)] == [0.0056, 0.0444]
    for looks in range(1, 6):
        for comparisons in (1, 3):
            assert sum(referee.levels(looks, comparisons)) == pytest.approx(0.05 / comparisons)


def test_seeds_of_the_issue():
    """Sigma is 0.48%, and the runs of a pair are uncorrelated. By hand, an effect of 1% needs
    (1.96 + 0.84)^2 * 2 * 0.48^2 = 3.6 pairs, and a few more because sigma is estimated (t-test)."""
    assert referee.needed(0.01, math.sqrt(2) * 0.0048, 0.05) == 6
    assert referee.needed(0.005, math.sqrt(2) * 0.0048, 0.05) == 17
    assert (referee.needed(1e-9, 1.0, 0.05) == referee.MOST
            and referee.needed(0.5, 1e-3, 0.05) == referee.LEAST)
    for effect in (0.003, 0.01, 0.02):     # with one pair fewer, the power is too low
        n = referee.needed(effect, 0.01, 0.05, 4)
        assert referee.visible(n, 0.01, 0.05, 4) <= effect < referee.visible(n - 1, 0.01, 0.05, 4)


@pytest.mark.parametrize("n, level", [(3, 0.05), (4, 0.01), (12, 0.0336), (50, 0.05)])
def test_power_is_what_is_said(n, level):
    """Expected: the tails of the noncentral t, by integration over the sample's sigma. Critical
    values come from the function that is tested against tables above."""
    df, critical = n - 1, referee.t_quantile(1 - level / 2, n - 1)
    shift = -math.log1p(-referee.visible(n, 0.01, level)) / 0.01 * math.sqrt(n)
    scale, step, power = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2), 0.002, 0.0
    for i in range(3000):
        s = (i + 0.5) * step
        density = math.exp(scale + (df - 1) * math.log(s) - df * s * s / 2)
        power += step * density * (referee.NORMAL.cdf(shift - critical * s)
                                   + referee.NORMAL.cdf(-shift - critical * s))
    assert 0.799 < power < 0.806


@pytest.mark.parametrize("sigma, pilot", [(0.005, 5), (0.03, 5), (0.01, 10)])
def test_power_with_a_pilots_sigma(sigma, pilot):
    """Expected: a simulation of pilots, of the numbers of pairs that they request, and of the
    tests."""
    rng, detected, tries = random.Random(1), 0, 1500
    for _ in range(tries):
        sd = statistics.stdev(rng.gauss(0, sigma) for _ in range(pilot))
        n = referee.needed(0.015, sd, 0.05, pilot - 1)
        detected += referee.look([1.0] * n,
                                 [0.985 * math.exp(rng.gauss(0, sigma)) for _ in range(n)],
                              0.05).word == "better"
    assert detected / tries > 0.78     # 80%, minus two standard errors of the simulation


def test_a_look_by_hand():
    """The log gains are 1, 2 and 3%: mean 2%, standard deviation 1%, so t = 2 sqrt(3) with 2
    degrees of freedom, and p = 1 - t / sqrt(t^2 + 2)."""
    verdict = referee.look([math.exp(g) for g in (0.01, 0.02, 0.03)], [1.0] * 3, 0.05)
    t = 2 * math.sqrt(3)
    assert verdict.p == pytest.approx(1 - t / math.sqrt(t * t + 2))
    assert verdict.gain == pytest.approx(1 - math.exp(-0.02))
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert verdict.interval == pytest.approx((1 - math.exp(-0.02 + half),
        1 - math.exp(-0.02 - half)), rel=1e-5)
    assert verdict.word == "no difference"
    assert (referee.look([2.0] * 3, [1.0] * 3, 0.05).word == "better"
            and referee.look([1.0] * 3, [1.0] * 3, 0.05).p == 1)


def test_an_interval_leaves_zero_out_where_p_is_small_and_only_there():
    rng = random.Random(0)
    for _ in range(500):
        level = rng.choice(referee.levels(3))
        verdict = referee.look([math.exp(rng.gauss(0.01, 0.01)) for _ in range(6)], [1.0] * 6,
                               level)
        assert (verdict.p <= 0.05) == (verdict.interval[0] > 0 or verdict.interval[1] < 0)


def test_looks_end_at_a_difference():
    asked = []

    def losses(n):
        asked.append(n)
        return [2.0 + 1e-4 * k for k in range(n)], [1.0 + 1e-4 * k * k for k in range(n)]

    assert referee.judge(losses, 20, 2).seeds == 10 and asked == [10]
    asked.clear()
    assert (referee.judge(lambda n: (losses(n)[0],) * 2, 20, 2).word == "no difference"
            and asked == [10, 20])


@pytest.mark.slow
def test_the_referees_errors_on_real_runs():
    """A claim that docs/claim.md describes, with fewer settings."""
    pool = json.loads(bench.POOL.read_text())
    assert len(pool["losses"]["adamw"]) >= 300 and len(set(pool["losses"]["adamw"])) >= 300
    rng = random.Random(5)
    for gain, word, least in ((0.0, "no difference", 0.94), (bench.PLANTED, "better", 0.80)):
        words = [bench.drawn(rng, pool["losses"]["adamw"], gain, 2)[0].word for _ in range(2000)]
        assert words.count(word) / 2000 > least


# the file

WRONG = [
    ({"target": None}, "has no target; give target: val_loss"),
    ({"target": "val_los"}, "did you mean 'val_loss'?"),
    ({"budget": None}, "has no budget; give budget: {steps: 300}"),
    ({"tunning": {}}, "there is no key of a claim 'tunning'; did you mean 'tuning'?"),
    ({"settings": {"model.layer": 2}}, "there is no setting 'model.layer'; did you mean "
                                      "'model.layers'?"),
    ({"arms": {"a": {}, "b": {"optimizer": "lion", "model.layers": 2}}},
     "a and b differ in model.layers (4 and 2), which was not declared"),
    ({"arms": {"a": {}, "b": {"schedule.warmup_steps": 3}}, "differ": ["schedule.warmup"]},
     "did you mean 'schedule.warmup_steps'?"),
    ({"arms": {"a": {}, "b": {}}}, "a and b have the same settings"),
    ({"arms": {"a": {}}}, "arms must be two or more names"),
    ({"arms": {"a": {}, "b": {"seed": 3}}}, "b sets seed, which the claim's seeds decides"),
    ({"arms": {"a": {}, "b": 3}}, "b must be a mapping of settings, got 3"),
    *(({"arms": {"a": {}, "b": {key: value}}, "differ": [key]}, f"a and b are evaluated on other "
        f"text, so their losses do not compare; make {message}")
      for key, value, message in (
         ("model.context", 8, "model.context"), ("global_batch", 8, "eval_batches * global_batch"),
         ("eval_batches", 4, "eval_batches * global_batch"), ("data.source", "x", "data.source"),
         ("data.tokenizer", "bpe", "data.tokenizer and model.vocab"),
         ("data.val_fraction", 0.2, "data.val_fraction"),
         ("data.policy", "random-documents", "data.policy"))),
    ({"tuning": {"optimizer.lr": [1e-3], "optimizer.weight_decay": [0.0], "eval_batches": [2, 4]}},
     "adamw and adamw with {'eval_batches': 4, 'optimizer.lr': 0.001, 'optimizer.weight_decay': "
     "0.0} are evaluated on other text"),
    ({"tuning": {"optimizer.lr": [1e-3]}}, "tuning.optimizer.weight_decay must be a list of "
                                          "values, got None"),
    ({"tuning": {"optimizer.lr": 1e-3, "optimizer.weight_decay": [0.0]}}, "tuning.optimizer.lr "
        "must be a list of values, got 0.001"),
    ({"tuning": {"optimizer.lr": [-1.0], "optimizer.weight_decay": [0.0]}}, "optimizer.lr must be "
        "positive"),
    ({"sigma": 0.1}, "4 seeds per arm cannot detect an effect of 20.00% if sigma is 10.00%: with "
                     "probability 80% they detect 27.02%; give seeds: 6, or a larger effect"),
    ({"seeds": 2}, "seeds must be from 3 to 1,000, got 2"),
    ({"effect": 1.5}, "effect must be above 0 and below 1"),
    ({"budget": {"watts": 3}}, "budget must be {steps: 300}, {flops: 1e13}, {seconds: 30} or "
                              "{joules: 500}, got {'watts': 3}"),
    ({"budget": {"seconds": -1}}, "budget.seconds must be positive, got -1"),
    ({"budget": {"joules": "a few"}}, "budget.joules must be a number, got 'a few'"),
    ({"budget": {"flops": 10}}, "budget.flops=10 must be at least the cost of one step of adamw"),
    ({"budget": {"steps": 0}}, "steps must be positive"),
]


@pytest.mark.parametrize("changes, message", WRONG,
                         ids=[f"{next(iter(changes))}-{i}" for i, (changes, _) in enumerate(WRONG)])
def test_a_file_is_refused_in_one_sentence_before_any_run(changes, message, tmp_path, capsys,
        monkeypatch):
    monkeypatch.setattr(runs.Workers, "finished", lambda *args: pytest.fail("a run"))
    if isinstance(changes.get("arms"), dict) and "a" in changes["arms"]:     # on the preset itself
        changes = {"settings": {}, **changes}
    assert cli.main(["claim", str(written(tmp_path, **changes)), "--out", str(tmp_path / "out"),
                     "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("lpkit: ") and message in err, err
    assert not (tmp_path / "out").exists()


def test_a_file_imports_nothing_by_itself(tmp_path, monkeypatch, capsys):
    """docs/own_technique.md promises that a file alone imports no module: the user names the
    modules that are trusted."""
    (tmp_path / "strangers_rows.py").write_text("raise SystemError('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    message = "imports='strangers_rows': a file imports nothing by itself"
    for changes in ({"settings": TINY["settings"] | {"imports": ["strangers_rows"]}},
                    {"settings": TINY["settings"] | {"imports": "strangers_rows"}},
                    {"arms": {"a": {}, "b": {"imports": ["strangers_rows"]}}},
                    {"tuning": TINY["tuning"] | {"imports": [["strangers_rows"], []]}}):
        assert cli.main(["claim", str(written(tmp_path, **changes)), "--out",
                         str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert "strangers_rows" not in sys.modules


@pytest.mark.parametrize("text", ["", "- a", "a: [", "3"])
def test_no_claim_at_all(text, tmp_path, capsys):
    (tmp_path / "claim.yaml").write_text(text)
    assert (cli.main(["claim", str(tmp_path / "claim.yaml")]) == 2
            and capsys.readouterr().err.count("\n") == 1)
    assert cli.main(["claim", str(tmp_path / "none.yaml")]) == 2
    assert cli.main(["claim", str(written(tmp_path)), "--processes", "0"]) == 2


def test_flops_give_each_arm_its_own_steps():
    two_widths = claim(arms={"narrow": {}, "wide": {"model.width": 64}}, differ=["model.width"],
                 budget={"flops": 1e9})
    narrow, wide = two_widths.config("narrow"), two_widths.config("wide")
    assert narrow.steps > 2 * wide.steps > 2
    assert claim().config("lion").steps == 4


def test_flops_of_a_step_are_counted_by_torch_and_by_hand():
    """Expected: the model's FLOPs by PyTorch's own counter, and by hand Muon's five
    Newton-Schulz steps for each matrix, which a counter of the model's matmuls does not see."""
    from torch.utils.flop_counter import FlopCounterMode

    from lpkit.training.training import Training

    adamw, muon = (claim(arms={"adamw": {}, "muon": {"optimizer": "muon"}}).config(arm)
                   for arm in ("adamw", "muon"))
    training = Training.build(adamw.replace({"system.attention": "plain"}))
    with FlopCounterMode(display=False) as counter:
        training.loss(training.model, training.data.batch(0)).backward()
    assert protocol.step_flops(adamw) == counter.get_total_flops()

    def orthogonalised(*shape):
        """Return the FLOPs of the five steps for a matrix (a, b) with a <= b: X X^T, A A and B
        X; a multiply and an add are two FLOPs."""
        a, b = sorted(shape)
        return 5 * 2 * (a * b * a + a * a * a + a * a * b)

    # q, k, v and the output projection; then the two Linears of the MLP
    hidden = 4 * orthogonalised(32, 32) + 2 * orthogonalised(32, 128)
    assert protocol.step_flops(muon) - protocol.step_flops(adamw) == pytest.approx(hidden)


# the verdict, with losses that are made up

def settled(losses, changes=None, null=False, seconds=lambda arm: 1.0, joules=None):
    """Settle a claim with made-up losses. Return the result, the (purpose, number) of the runs that
    were made, and the printed lines.

    losses: function of a config\nseconds, joules: functions of the optimizer's name; cost of a
    step
    """
    asked, printed = [], []

    def finished(what, configs):
        asked.append((what, len(configs)))
        return [{"name": runs.records.digest(config.to_dict()), "val_loss": losses(config),
                 "seconds": 2.0, "energy_wh": None,
                 "step_seconds": seconds(config.optimizer.name),
                 "step_joules": joules and joules(config.optimizer.name),
                 "error": None if losses(config) else "loss=nan"} for config in configs]

    return settle.Settling(claim(**changes or {}), finished,
                           printed.append).settle(null), asked, printed


def noisy(config):
    better = {"lion": 0.98}.get(config.optimizer.name, 1.0)
    return 2.0 * better * math.exp(random.Random(f"{config.seed} {config.optimizer.name}").gauss(0,
        0.003)) + abs(config.optimizer.lr - 1e-3)


SEES = {"effect": 0.02, "seeds": 10, "pilot": 5}


def test_a_gain_that_is_there_is_seen():
    outcome, asked, printed = settled(noisy, SEES)
    [verdict] = outcome["verdicts"]
    assert (verdict["verdict"] == "better" and verdict["interval"][0] < 0.02
            < verdict["interval"][1] and verdict["p"] < 0.05)
    assert verdict["equal_seconds"] == {"ratio": 1.0, "steps": 4, "survives": True}
    assert outcome["tuned"]["lion"] == {"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.0}
    assert asked[:2] == [("pilot", 5), ("tuning", 4)] and outcome["tuning"]["runs"] == 4
    assert (outcome["runs"] == 5 + 4 + 2 * verdict["seeds"]
            and outcome["seconds"] == 2 * outcome["runs"])
    assert (verdict["sentence"].startswith("lion is better than adamw")
            and verdict["sentence"].count(". ") == 0)
    assert "seeds per arm detect" in printed[0]


def test_the_edge_of_the_grid_is_a_doubt():
    """The grid has numbers and texts: YAML reads 1e-4 as text and 1.0e-4 as a number."""
    rates = {"optimizer.lr": ["1e-4", 3e-4, "1e-3"], "optimizer.weight_decay": [0, "0.1"]}
    outcome, _, _ = settled(noisy, SEES | {"tuning": rates})
    assert outcome["tuned"]["lion"]["optimizer.lr"] == 1e-3
    assert outcome["doubts"] == [f"the best optimizer.lr of {arm} is the smallest or largest "
                                 f"value; more values may change the verdict"
                                 for arm in ("adamw", "lion")]
    assert not settled(noisy, SEES | {"tuning": rates | {"optimizer.lr": [3e-4, "1e-3", 3e-3]}})[0][
        "doubts"]


def test_a_slower_arm_must_win_at_equal_seconds():
    def slow(config):
        return noisy(config) * (1.5 if config.steps < 4 else 1)

    outcome, asked, _ = settled(slow, SEES, seconds=lambda name: {"lion": 1.4}.get(name, 1.0))
    equal = outcome["verdicts"][0]["equal_seconds"]
    assert (equal["steps"] == 2 and not equal["survives"] and equal["gain"] < -0.4
            and asked[-1][0] == "lion in 2 steps")
    assert "at equal seconds that is not seen (2 steps" in outcome["sentence"]
    wide = {"arms": {"narrow": {"model.width": 16}, "wide": {"optimizer": "lion"}},
            "differ": ["model.width", "optimizer"], "budget": {"flops": 1e9}}
    equal = settled(noisy, SEES | wide, seconds=lambda name: {"lion": 2.5}.get(name,
        1.0))[0]["verdicts"][0]["equal_seconds"]
    wide, narrow = (claim(**wide).config(arm).steps for arm in ("wide", "narrow"))
    assert (narrow > 1.5 * wide and equal["ratio"] == 2.5 * wide
            / narrow), "of equal FLOPs each has its own steps"
    assert settled(noisy, SEES, seconds=lambda name: {"lion": 1.4}.get(name, 1.0))[0]["verdicts"][
        0]["equal_seconds"]["survives"]


def test_equal_flops():
    """With so small a batch, the matmuls of Muon's update are a large share of a step's FLOPs.
    Muon wins at equal steps, and does not win at equal FLOPs."""
    arms = {"arms": {"adamw": {"optimizer": "adamw"}, "muon": {"optimizer": "muon"}},
            "budget": {"steps": 40}}
    cost = {arm: protocol.step_flops(claim(**arms).config(arm)) for arm in ("adamw", "muon")}
    fewer = int(40 / (cost["muon"] / cost["adamw"]))
    assert 1 < fewer < 39

    def losses(config):
        gain = 0.97 if config.optimizer.name == "muon" and config.steps == 40 else 1
        return gain * noisy(config)

    outcome, asked, _ = settled(losses, SEES | arms)
    [verdict] = outcome["verdicts"]
    assert (verdict["verdict"] == "better" and verdict["step_flops"] == cost
            and verdict["equal_seconds"]["survives"])
    equal = verdict["equal_flops"]
    assert (equal["steps"] == fewer and not equal["survives"]
            and asked[-1][0] == f"muon in {fewer} steps")
    assert (f"it stays so (its steps take no longer), at equal FLOPs that is not seen ({fewer} "
            f"steps" in verdict["sentence"])
    # in the other direction, the better arm has fewer FLOPs, so no further runs are made
    lost, asked, _ = settled(lambda config: noisy(config)
                             * (1.03 if config.optimizer.name == "muon" else 1), SEES | arms)
    assert lost["verdicts"][0]["equal_flops"] == {"ratio": cost["adamw"] / cost["muon"],
        "steps": 40, "survives": True}
    assert ("steps" not in asked[-1][0] and "at equal FLOPs it stays so (it has no more)"
            in lost["sentence"])
    # Lion has the FLOPs of AdamW, so the sentence does not mention FLOPs
    same, _, _ = settled(noisy, SEES)
    assert (same["verdicts"][0]["equal_flops"] == {"ratio": 1.0, "steps": 4, "survives": True}
            and "FLOPs" not in same["sentence"])


def test_three_kinds_of_budget_give_each_arm_its_own_steps():
    slow = {"lion": 0.5}
    outcome, asked, _ = settled(noisy, SEES | {"budget": {"seconds": 10}},
                              seconds=lambda name: slow.get(name, 0.25))
    [verdict] = outcome["verdicts"]
    assert asked[0] == ("what a step costs", 6) and verdict["steps"] == {"adamw": 40, "lion": 20}
    assert verdict["equal_seconds"]["ratio"] == 1 and verdict["equal_flops"]["ratio"] == 0.5
    assert "20 steps and 40, " in verdict["sentence"]
    outcome, asked, _ = settled(noisy, SEES | {"budget": {"joules": 10}},
                              joules=lambda name: slow.get(name, 0.25))
    assert outcome["verdicts"][0]["steps"] == {"adamw": 40, "lion": 20}
    assert asked[:6] == [("what a step costs", 1)] * 6, "a meter counts what runs beside a run"
    outcome, asked, _ = settled(noisy, SEES | {"budget": {"seconds": 10}}, null=True)
    assert asked[0] == ("what a step costs", 3) and outcome["verdicts"][0]["steps"] == {"adamw": 10,
        "adamw again": 10}


def test_what_is_tuned_and_slows_a_step_has_steps_of_its_own():
    """The three metered runs have different seconds, and the median counts. Learning rate and
    weight decay need no metered runs of their own."""
    rounds = iter(range(100))
    grid = {**TINY["tuning"], "model.mlp_width": [64, 128]}
    tuned = claim(tuning=grid, budget={"seconds": 10})
    by_width = {64: 0.2, 128: 0.4}
    seen = []

    def finished(what, configs):
        seen.extend((what, config.model.mlp_width, config.steps) for config in configs)
        return [{"name": str(next(rounds)), "val_loss": noisy(config), "seconds": 1,
                 "energy_wh": None, "error": None,
                 "step_seconds": by_width.get(config.model.mlp_width, 0.5)} for config in configs]

    settle.Settling(tuned, finished, lambda line: None).settle(null=False)
    metered = [run for run in seen if run[0] == "what a step costs"]
    assert (len(metered) == 3 * 2 * 3 and {steps for _, _, steps in metered}
            == {protocol.METERED_STEPS}), "as it is, and both widths"
    assert {(width, steps) for what, width, steps in seen if what == "tuning"} == {(64, 50),
        (128, 25)}
    assert {steps for what, width, steps in seen if what == "pilot"} == {20}


def test_a_budget_that_no_meter_tells_is_refused_with_what_to_use_instead():
    asked = []
    with pytest.raises(ConfigError,
                       match=r"budget.joules=500 needs the joules of a step, which a run here does "
                             r"not tell \(no energy counter: .*\); "
                                          r"give budget: \{seconds: 30\}"):
        settled(lambda config: asked.append(config) or 2.0, {"budget": {"joules": 500}})
    assert len({id(config) for config in asked}) == 1, "by one short run"
    with pytest.raises(ConfigError,
                       match=r"budget.seconds=0.1 must be at least the cost of one step of lion "
                             r"\(0.5 seconds\)"):
        settled(noisy, {"budget": {"seconds": 0.1}},
                seconds=lambda name: {"lion": 0.5}.get(name, 0.01))
    with pytest.raises(ConfigError, match=r"does not tell \(loss=nan\)"):
        settled(lambda config: None, {"budget": {"joules": 500}})


def test_an_arm_against_itself_has_other_seeds():
    outcome, asked, _ = settled(noisy, SEES, null=True)
    [verdict] = outcome["verdicts"]
    assert (verdict["arm"] == "adamw again" and verdict["verdict"] == "no difference"
            and verdict["gain"] != 0)
    assert ("No difference between adamw again and adamw was seen" in outcome["sentence"]
            and asked[1] == ("tuning", 2))


def test_a_budget_that_cannot_see_is_told_after_the_pilot():
    with pytest.raises(ConfigError,
                       match=r"4 seeds per arm cannot detect an effect of 0.10% .* give seeds: "):
        settled(noisy, {"effect": 0.001})
    _, asked, _ = settled(noisy, SEES | {"sigma": 0.003})
    assert asked[0][0] == "tuning", "a recorded sigma needs no pilot"


def test_an_arm_that_diverges():
    outcome, _, _ = settled(lambda config: None if config.optimizer.lr == 1e-2 else noisy(config),
                          SEES)
    assert outcome["tuned"]["adamw"]["optimizer.lr"] == 1e-3
    with pytest.raises(ConfigError, match="lion diverged at every point of tuning"):
        settled(lambda config: None if config.optimizer.name == "lion" else noisy(config), SEES)
    with pytest.raises(RunFailedError, match=r"lion diverged in . of . runs"):
        settled(lambda config: None if config.optimizer.name == "lion" and config.seed == 1
                else noisy(config), SEES)


def test_three_arms_share_the_error():
    arms = {**TINY["arms"], "again": {"optimizer": "adamw", "optimizer.beta2": 0.99}}
    outcome, _, _ = settled(noisy, SEES | {"arms": arms})
    assert [verdict["arm"] for verdict in outcome["verdicts"]] == ["lion", "again"]
    assert claim(arms=arms).level == pytest.approx(claim().level / 2)


# a verdict, from its file alone

def filed(folder, losses=noisy, **changes):
    """Settle a claim with made-up losses, and write its verdict as the command does. Return the
    path and the result."""
    outcome, _, _ = settled(losses, SEES | changes)
    path = folder / "lion.verdict"
    runs.records.write(path, outcome | {"command": "lpkit claim lion.yaml"})
    return path, outcome


def test_a_verdict_is_replayed_from_its_file_alone(tmp_path):
    path, outcome = filed(tmp_path)
    again = lesson.replayed(path)
    assert again["sentence"] == outcome["sentence"] and again["command"] == "lpkit claim lion.yaml"
    [verdict] = again["verdicts"]
    assert (settle.sentence(protocol.Claim(**again["claim"]), verdict, again["tuning"]["runs"])
            == outcome["sentence"])
    assert protocol.Claim(**again["claim"]) == claim(**SEES), "and by whoever has not its file"
    path.write_text(path.read_text().replace('"better"', '"worse"'))
    with pytest.raises(ConfigError, match="does not match its checksum"):
        lesson.replayed(path)
    verdict["losses"]["lion"][0] *= 1.01
    runs.records.write(path, again)
    with pytest.raises(ConfigError,
                       match=r"and its losses give .*; settle it anew: lpkit claim lion.yaml"):
        lesson.replayed(path)


def test_the_figure_of_a_verdict_has_its_numbers(tmp_path):
    def slow(config):
        return noisy(config) * (1.5 if config.steps < 4 else 1)

    outcome, _, _ = settled(slow, SEES, seconds=lambda name: {"lion": 1.4}.get(name, 1.0))
    [verdict] = outcome["verdicts"]
    spec = lesson.verdict_figure(json.loads(json.dumps(outcome)))
    pairs, gains, *_ = spec["data"]
    assert gains["x"] == [100 * verdict["gain"], 100 * verdict["equal_seconds"]["gain"]]
    assert gains["y"] == ["lion against adamw", "lion, equal seconds<br>(2 steps)"]
    for i, comparison in enumerate((verdict, verdict["equal_seconds"])):
        low, high = comparison["interval"]
        assert gains["x"][i] + gains["error_x"]["array"][i] == pytest.approx(100 * high)
        assert gains["x"][i] - gains["error_x"]["arrayminus"][i] == pytest.approx(100 * low)
    assert (len(pairs["x"]) == verdict["seeds"] and statistics.fmean(pairs["x"])
            == pytest.approx(100 * verdict["gain"], abs=0.01))
    boxes = [shape for shape in spec["layout"]["shapes"] if shape["type"] == "rect"]
    assert (spec["layout"]["yaxis"]["categoryarray"] == gains["y"]
            and [shape["y0"] for shape in boxes] == [-0.4, 0.6]), "its place is its row"
    assert [shape["x1"] for shape in boxes] == [100 * comparison["could_see"]
        for comparison in (verdict, verdict["equal_seconds"])]
    lines = {shape["x0"] for shape in spec["layout"]["shapes"] if shape["type"] == "line"}
    assert lines == {0, 2, -2}, "the effect of interest"
    go.Figure(json.loads(json.dumps(spec, allow_nan=False)))


def test_a_gain_in_the_figure_is_that_of_the_arm_named_first():
    """Lion is worse and its steps are faster, so AdamW is run again with fewer steps."""
    outcome, _, _ = settled(lambda config: noisy(config)
                          * (1.06 if config.optimizer.name == "lion" else 1), SEES,
                          seconds=lambda name: {"lion": 0.5}.get(name, 1.0))
    gains = lesson.verdict_figure(outcome)["data"][1]
    assert (gains["y"] == ["lion against adamw", "adamw, equal seconds<br>(2 steps)"]
            and gains["x"][0] < 0 < gains["x"][1])


def test_the_recorded_verdict_is_of_its_file():
    outcome, file = lesson.replayed(lesson.LION), ROOT / "docs" / "claims" / "lion.yaml"
    assert (protocol.Claim(**outcome["claim"]) == protocol.read(file)
            and outcome["command"] == "lpkit claim docs/claims/lion.yaml")
    assert outcome["verdicts"][0]["verdict"] == "worse"


# runs

def test_a_name_changes_with_what_changes_numbers():
    config = claim().config("adamw")
    names = {runs.name_of(config) for config in (config, config.replace({"seed": 1}),
        config.replace({"data.val_fraction": 0.2}), claim().config("lion"))}
    assert len(names) == 4 and runs.name_of(claim().config("adamw")) in names


def test_a_name_changes_with_the_weights_that_a_run_begins_from(tmp_path):
    """If the base run under the same path is trained further, or the file of scores changes,
    losses change; so the name of the run must change."""
    manifest, scores = (tmp_path / "base" / "checkpoints" / "step-00000002" / "manifest.json",
                        tmp_path / "scores.npy")
    for key, value, file in (("start.run", tmp_path / "base", manifest),
                             ("data.scores", scores, scores)):
        config, names = claim().config("adamw").replace({key: str(value)}), set()
        for text in (None, "a", "b", "a"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text) if text else None
            names.add(runs.name_of(config))
        assert len(names) == 3, key


# records that are damaged or of another run

CLAIMED = [claim().config("adamw").replace({"seed": k, "steps": attacked.STEPS, "eval_every": 2})
           for k in range(3)]


def settled_in(out, submit=attacked.made_up):
    with runs.Workers(out, runs.processes.Children(), 2, submit) as workers:
        return workers.finished(CLAIMED)


def resealed(change):
    return lambda a, b: runs.records.write(a, change(runs.records.read(a), runs.records.read(b)))


def special(make):
    return lambda a, b: (a.unlink(), make(a))


def exchanged(a, b):
    first, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two), b.write_bytes(first)


ALTERED = {
    "exchanged": exchanged,
    "another's losses": resealed(lambda record, two: two | {"name": record["name"],
        "config": record["config"], "val_loss": 3.0}),
    "another's config": resealed(lambda record, two: record | {"config": two["config"]}),
    "a loss": resealed(lambda record, two: record | {"val_loss": record["val_loss"] * 0.9}),
    "no loss": resealed(lambda record, two: record | {"val_loss": None}),
    "an error": resealed(lambda record, two: record | {"error": "loss=nan"}),
    "a short curve": resealed(lambda record,
                              two: record | {"evaluations": record["evaluations"][1:]}),
    "a curve in another order": resealed(lambda record, two: record
        | {"evaluations": [*record["evaluations"][1::-1], *record["evaluations"][2:]]}),
    "no curve": resealed(lambda record, two: record | {"evaluations": 3}),
    "seconds": resealed(lambda record, two: record | {"seconds": "2"}),
    "a device": resealed(lambda record, two: record | {"device": []}),
    "no key": resealed(lambda record,
                       two: {key: record[key] for key in record if key != "step_seconds"}),
    "a digit": lambda a, b: a.write_text(a.read_text().replace('"val_loss": ', '"val_loss": 1')),
    "empty": lambda a, b: a.write_text(""),
    "NaN": lambda a, b: a.write_text('{"val_loss": NaN, "sha256": "0"}'),
    "a list": lambda a, b: a.write_text("[]"),
    "deep": lambda a, b: a.write_text("[" * 100_000), "bytes": lambda a, b: a.write_bytes(b"\xff"),
    "a folder": special(lambda path: path.mkdir()),
    "a pipe": special(os.mkfifo), "a link": special(lambda path: path.symlink_to("/dev/zero")),
    "huge": special(lambda path: (path.touch(), os.truncate(path, 1 << 29)))}


@pytest.mark.parametrize("how", ALTERED)
def test_a_record_that_is_not_of_its_run_is_set_aside_and_made_again(how, tmp_path, capsys,
        monkeypatch):
    monkeypatch.setattr(runs, "LOOK_SECONDS", 1e-3)
    whole = settled_in(tmp_path)
    a, b = (tmp_path / f"{record['name']}.json" for record in whole[:2])
    ALTERED[how](a, b)
    aside = tmp_path / "damaged"
    theirs = [path for path in (a, b) if how == "exchanged" or path == a]
    kept = {path: path.read_bytes() for path in theirs if path.is_file() and how != "huge"}
    assert settled_in(tmp_path) == whole
    err = capsys.readouterr().err.splitlines()
    assert len(err) == len(theirs) and all(line.startswith(f"lpkit: {path} ") and line.endswith(
        " is damaged, or not the record of its run; it is moved to damaged/, and the run is made "
        "again") for line, path in zip(err, theirs)), (err)
    assert (all((aside / path.name).read_bytes() == content for path, content in kept.items())
            and os.path.lexists(aside / a.name))
    assert (settled_in(tmp_path, lambda *arguments: pytest.fail("a run")) == whole
            and capsys.readouterr().err == "")
    ALTERED["empty"](a, b)
    assert settled_in(tmp_path) == whole and {path.name for path in aside.iterdir()} >= {a.name,
        f"{a.stem}-1.json"}


def test_records_that_are_altered_as_they_are_written_end_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LOOK_SECONDS", 1e-3)

    def altered(where, *arguments):
        done = attacked.made_up(where, *arguments)
        Path(f"{where}.json").write_text("{}")
        return done

    with pytest.raises(RunFailedError, match="records are altered as they are written"):
        settled_in(tmp_path, altered)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Make two runs that were killed after a checkpoint. The folder of one has more steps than
    its config, as a resumed run may. Return their configs, their folders, and the metrics of the
    uninterrupted runs."""
    folder, whole = tmp_path_factory.mktemp("begun"), tmp_path_factory.mktemp("whole")
    configs = [claim().config("adamw").replace({"steps": steps, "eval_every": 1,
                                                "checkpoint_every": 2}) for steps in (6, 8)]
    paths = [whole / runs.name_of(config) for config in configs]
    for config, path in zip(configs, paths):
        def keep(record, path=path):
            if record.step == 5:
                shutil.copytree(path, folder / path.name)

        train(config, out=path, observers=[keep])
    return configs, folder, [Run(path).metrics for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exchanged", "config", "weights", "evaluation",
                                 "another's evaluations", "stop"])
def test_a_folder_that_is_not_of_its_run_changes_no_loss(how, begun, tmp_path, capsys):
    configs, folder, whole = begun
    shutil.copytree(folder, tmp_path / "out")
    a, b = (tmp_path / "out" / runs.name_of(config) for config in configs)
    if how == "exchanged":
        a.rename(tmp_path / "aside"), b.rename(a), (tmp_path / "aside").rename(b)
    elif how == "config":
        (a / "config.yaml").write_text((a / "config.yaml").read_text().replace("seed: 0",
            "seed: 1"))
    elif how == "weights":
        [path] = (a / "checkpoints" / "step-00000004").glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "evaluation":
        (a / "metrics.jsonl").write_text((a / "metrics.jsonl").read_text().replace('"val_loss": ',
            '"val_loss": 1', 1))
    elif how == "another's evaluations":
        (a / "metrics.jsonl").write_text((b / "metrics.jsonl").read_text())
    else:
        a.with_suffix(".stop").write_text("2")     # left by a command that was killed
    with runs.Workers(tmp_path / "out", runs.processes.Children(), 1, attacked._in_here) as workers:
        records = workers.finished(configs)
    for record, metrics in zip(records, whole):
        assert (record["evaluations"] == [[line["step"], line["val_loss"]] for line in metrics]
                and record["val_loss"] == metrics[-1]["val_loss"])
    err = capsys.readouterr().err
    due = {"exchanged": 2, "config": 1, "evaluation": 1, "another's evaluations": 1}.get(how, 0)
    assert (err.count("\n") == err.count("moved to damaged/")
            + err.count("; the run was made again") == due
            and len([*(tmp_path / "out").glob("damaged/*")]) == due), err


def test_a_run_that_fails_says_its_whole_sentence(tmp_path):
    sentence = (f"lpkit.errors.RunFailedError: step 3: the checkpoint could not be written (No "
                f"space left on device); kept: none. {'x' * 700} end")
    failed = Future()
    failed.set_exception(RunFailedError(f"Traceback (most recent call last):\n  File x, line "
                                        f"3\n{sentence}\n"))
    with pytest.raises(RunFailedError) as error:
        settled_in(tmp_path, lambda *arguments: failed)
    assert str(error.value).endswith(f"Their errors: {sentence}")


def test_names_of_arms_reach_no_terminal_as_they_are(tmp_path, capsys):
    name = "lion\x1b[31m\nlpkit: better"
    outcome, _, _ = settled(noisy, SEES | {"arms": {"adamw": {"optimizer": "adamw"},
        name: {"optimizer": "lion"}}})
    shown = command.text(outcome)
    assert ("\x1b" not in shown and r"lion\x1b[31m\nlpkit: better is better than adamw" in shown
            and "\nlpkit" not in shown)
    runs.processes.tell(f"{name} against adamw: 1 of 3 runs")
    assert capsys.readouterr().err == "lion\\x1b[31m\\nlpkit: better against adamw: 1 of 3 runs\n"


@pytest.mark.slow
def test_a_killed_claim_goes_on_with_the_same_steps_and_does_no_run_twice(tmp_path, capsys):
    """The claim gets SIGTERM during the runs that measure the cost of a step, and SIGKILL after
    them. Their records are kept, so a later measurement of the cost does not change the number
    of steps."""
    path, out = written(tmp_path, budget={"seconds": 0.05}), tmp_path / "out"
    words = ["claim", str(path), "--out", str(out), "--processes", "1", "--json"]

    def records():
        return {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}

    before = {}
    # the claim has 6 runs or more
    for number, most in ((signal.SIGTERM, 3), (signal.SIGKILL, 8)):
        with subprocess.Popen([sys.executable, "-m", "lpkit", *words], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
            while len(records()) < most:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            process.communicate()
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert len(children) >= 2
        assert not psutil.wait_procs(children, timeout=10)[1], "nothing outlives the command"
        assert before.items() <= records().items(), "a run was done twice"
        before = records()
    assert cli.main(words) == 0
    outcome, after = json.loads(capsys.readouterr().out), records()
    assert before.items() <= after.items(), "a run was done twice"
    assert len(after) == outcome["runs"] and not [path for path in out.iterdir() if path.is_dir()]
    [verdict] = outcome["verdicts"]
    assert verdict["verdict"] in ("better", "worse", "no difference")
    assert outcome["sentence"].endswith(".")
    made_records = [runs.records.read(out / name) for name in after]
    rates = {"adamw": [], "lion": []}
    for record in made_records:
        if record["config"]["seed"] >= settle.METERED_SEED:
            optimizer = record["config"]["optimizer"]
            name = optimizer if isinstance(optimizer, str) else optimizer["name"]
            rates[name].append(record["step_seconds"])
    assert {arm: len(each) for arm, each in rates.items()} == {"adamw": 3, "lion": 3}
    assert verdict["steps"] == {arm: int(0.05 / statistics.median(each))
                                for arm, each in rates.items()}
    fewer = [comparison["steps"]
             for comparison in (verdict["equal_seconds"], verdict["equal_flops"]) if comparison]
    assert {record["config"]["steps"] for record in made_records} <= {
        protocol.METERED_STEPS, *verdict["steps"].values(), *fewer}
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out) == outcome and records() == after


@contextlib.contextmanager
def killer(workers, victim, most=1):
    """While the block runs, kill the process that `victim(pid of the keeper)` returns, at most
    `most` times. Yields the list of killed processes."""
    killed, over = [], threading.Event()

    def kill():
        while not over.wait(0.01) and len(killed) < most:
            for worker in workers.workers[:1]:
                target = victim(worker.keeper.pid)
                if target and target not in killed:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(target, signal.SIGKILL)
                        killed.append(target)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def worker_of(keeper):
    with contextlib.suppress(psutil.NoSuchProcess):
        return next((child.pid for child in psutil.Process(keeper).children()), None)


@pytest.mark.slow
def test_a_run_whose_worker_or_keeper_is_killed_is_started_again(tmp_path):
    """A worker or keeper is killed after the first step of the run, or between two runs. The
    losses are those of undisturbed runs. A run that fails by its own error is not started again,
    because it would fail again."""
    out, children = tmp_path / "out", runs.processes.Children()
    out.mkdir()
    first, of_worker, of_keeper, late, locked = (
        claim(budget={"steps": 200}).config("adamw").replace({"seed": k}) for k in range(5))

    def once_begun(config, who):
        def victim(keeper):
            path = out / runs.name_of(config) / "metrics.jsonl"
            return who(keeper) if path.exists() and path.stat().st_size else None
        return victim

    with runs.Workers(out, children, 1) as workers:
        workers.finished([first])
        for config, who in ((of_worker, worker_of), (of_keeper, lambda keeper: keeper)):
            with killer(workers, once_begun(config, who)) as killed:
                workers.finished([config])
            assert len(killed) == 1
        [worker] = workers.workers
        psutil.Process(worker_of(worker.keeper.pid)).kill()
        worker.keeper.wait()
        # a worker that is killed while it writes a record leaves this file
        half = out / ".0123.json.abcdefgh.tmp"
        half.touch()
        records = workers.finished([first, of_worker, of_keeper, late])
        assert [each["restarts"] for each in records] == [0, 1, 1, 0]
        assert workers.workers != [worker] and not half.exists()
        assert not [path for path in out.iterdir() if path.is_dir()]
        begun, lock = len(children._started), out / runs.name_of(locked) / ".lock"
        message = (r"^1 of 1 runs did not finish; repeat the command to continue. Their errors: "
                r"lpkit.errors.ConfigError: another process is ")
        with files.locked(lock), pytest.raises(RunFailedError, match=message):
            workers.finished([locked])
        assert len(children._started) == begun and lock.exists()
    with runs.Workers(tmp_path, children, 1, attacked._in_here) as workers:
        plain = workers.finished([of_worker, of_keeper])
    assert [each["val_loss"] for each in plain] == [each["val_loss"] for each in records[1:3]]


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_again_and_again_ends_the_command(tmp_path):
    configs = [claim().config("adamw").replace({"seed": k}) for k in range(2)]
    with (runs.Workers(tmp_path, runs.processes.Children(), 1) as workers,
          killer(workers, worker_of, 99),
          pytest.raises(RunFailedError, match=r"2 of 2 runs did not finish; .* Their errors: "
                                              r"nothing, and were killed")):
        workers.finished(configs)


def test_joules_of_a_step_are_those_of_the_steps_that_were_made(tmp_path, monkeypatch):
    """The energy counter rises by 20 J between its two readings, which cover five steps."""
    readings = itertools.count(0, 20)
    monkeypatch.setattr(hardware, "energy_joules", lambda device: (next(readings), "a meter"))
    config = claim(budget={"joules": 1}).config("adamw").replace({"steps": 5})
    runs.make(str(tmp_path / "run"), config.imports, config.to_dict(), 1)
    record = runs.records.read(tmp_path / "run.json")
    assert record["energy_wh"] == pytest.approx(20 / 3600)
    assert record["step_joules"] == pytest.approx(20 / 5) and record["restarts"] == 1


def test_a_worker_whose_keeper_was_killed_while_it_was_importing_makes_no_run(tmp_path):
    """PR_SET_PDEATHSIG does not act if the parent ended before the call. Then a worker would
    make the runs that are in its pipe, at the same time as the workers of the next command."""
    reader, writer = os.pipe()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True).stdout.strip()
    config = claim().config("adamw")
    job = json.dumps([str(tmp_path / "run"), config.imports, config.to_dict(), 0])
    os.write(writer, f"{gone}\n{job}\n".encode())
    os.close(writer)
    ended = subprocess.run([sys.executable, "-c",
                            f"from lpkit.claims.runs import work; work({reader})"],
        pass_fds=[reader], timeout=120)
    os.close(reader)
    assert ended.returncode == -signal.SIGKILL and not list(tmp_path.iterdir())
