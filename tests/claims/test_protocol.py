"""Published claims that `lpkit claim` settles: the rule of their verdicts, their files, and the
record that the page shows.

Only these tests catch: a published claim whose word does not follow from its verdict, a file of a
claim that is no longer settled as its record was, and a wrong GELU of the table.
"""

import importlib
import json
import math
import shlex
import statistics
import sys

import pytest
import torch

from lessons.rows import blocks as blocks
from lpkit.claims import protocol as files
from lpkit.techniques.blocks import MLPS
from tests.bench import protocol
from tests.pages import claim_numbers, claims

RECORD, FOUND = protocol.recorded()


@pytest.mark.parametrize("expects, verdict, gain, low, expected", [
    ("better", "better", 0.03, 0.01, "confirmed"), ("better", "better", 0.01, 0.001, "smaller"),
    ("better", "no difference", 0.01, -0.01, "not seen"),
    ("better", "worse", -0.01, -0.03, "refuted"),
    ("no worse", "better", 0.01, 0.001, "confirmed"),
    ("no worse", "no difference", -0.01, -0.019, "confirmed"),
    ("no worse", "no difference", -0.01, -0.021, "not seen"),
    ("no worse", "worse", -0.001, -0.002, "refuted")])
def test_a_verdict_follows_from_what_was_found(expects, verdict, gain, low, expected):
    assert protocol.word(expects, {"verdict": verdict, "gain": gain, "interval": [low, 1.0]},
                         0.02) == expected


def test_each_sentence_has_a_file_that_can_be_settled_and_a_reason():
    rows = protocol.published()
    assert ({path.stem for path in protocol.FILES.glob("*.yaml")} | {protocol.SEARCHES[0]}
            == rows.keys() == FOUND.keys())
    for name, row in rows.items():
        if name not in (*protocol.SEARCHES, "gelu-table"):      # a file imports nothing by itself
            claim = files.read(protocol.FILES / f"{name}.yaml")
            assert (len(claim.arms) == 2 and claim.effect == protocol.EFFECT
                    and claim.base == "cpu-3m")
        assert (row.keys() == {"says", "source", "conditions", "expects", "why"}
                and row["why"].endswith(".") and "https://" in row["source"])
        assert row["expects"] in ("better", "no worse")


def test_the_page_has_enough_that_held_and_enough_that_did_not():
    words = [protocol.word(row["expects"], FOUND[name]["verdicts"][0], 0.02)
             for name, row in protocol.published().items()]
    assert words.count("confirmed") >= 3 and len(words) - words.count("confirmed") >= 3
    page = "\n".join(claims._by_protocol())
    for name, claim in FOUND.items():
        assert f"| `{name}` | " in page and f"{claim['verdicts'][0]['gain']:+.2%}" in page


def test_searches_are_judged_by_a_paired_test_on_what_was_recorded():
    """Against scipy-free arithmetic: the mean log ratio of the best of 20 trials, and its t."""
    record = max((json.loads(path.read_text())
                  for path in claim_numbers.MEASURED.glob("tpe-random-*.json")),
        key=lambda record: record["date"])
    gains = [math.log(min(other) / min(mine)) for mine, other in zip(record["losses"]["tpe"],
        record["losses"]["random"], strict=True)]
    [verdict] = protocol.searched()["verdicts"]
    mean, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    assert (verdict["seeds"] == len(gains) == 20
            and verdict["gain"] == pytest.approx(1 - math.exp(-mean)))
    assert ((verdict["verdict"] != "no difference")
            == (abs(mean / error) > 2.093)), "the table's t of 19 degrees of freedom"


@pytest.fixture
def gelu_by_table():
    """It adds a row, which other tests of this process must not find."""
    before = dict(MLPS)
    yield importlib.import_module("lessons.gelu_by_table")
    sys.modules.pop("lessons.gelu_by_table")
    MLPS.clear()
    MLPS.update(before)


def test_gelu_by_table_is_gelu_where_lines_meet_and_near_it_between(gelu_by_table):
    """Linear interpolation is off by h^2 / 8 times the most of |f''|, which is 2 phi(0) for GELU;
    at the ends it bends to 0 and to x."""
    x = torch.linspace(-8, 8, 4001, requires_grad=True)
    y, exact = gelu_by_table.gelu(x), torch.nn.functional.gelu(x)
    within = gelu_by_table.WIDE**2 / 8 * 2 / math.sqrt(2 * math.pi)
    assert 0.9 * within < (y - exact).abs().max() < within
    points = torch.tensor(gelu_by_table.POINTS[1:-1])
    torch.testing.assert_close(gelu_by_table.gelu(points), torch.nn.functional.gelu(points), rtol=0,
                               atol=1e-6)
    assert (y[x < -4] == 0).all() and torch.equal(y[x >= 4], x[x >= 4])
    assert gelu_by_table.gelu(x.bfloat16()).dtype == torch.bfloat16
    [slope] = torch.autograd.grad(y.sum(), x)
    i = 1000        # inside a line: its slope is that of two points of it
    assert slope[i] == pytest.approx(((y[i + 1] - y[i]) / (x[i + 1] - x[i])).item(), abs=1e-3)
    assert (slope[x < -4] == 0).all() and (slope[x > 4.01] == 1).all()


def test_equal_flops_of_what_was_recorded_before_they_were_asked():
    """SOAP lost to AdamW, which has fewer; a Muon that won would have to run again."""
    for name, survives in (("soap", True), ("rope", True), ("large-batch", True), ("muon", None)):
        claim = FOUND[name]
        assert protocol.at_equal_flops(name, claim["verdicts"][0], claim["tuned"]) is survives
    won = FOUND["muon"]["verdicts"][0] | {"verdict": "better"}
    assert protocol.at_equal_flops("muon", won, FOUND["muon"]["tuned"]) is None
    assert protocol.at_equal_flops("muon", won | {"gain": -0.1, "verdict": "worse"},
                                   FOUND["muon"]["tuned"]) is True
    assert protocol.at_equal_flops("muon", {"verdict": "worse",
        "equal_flops": {"survives": False}}, {}) is False


def test_what_a_claim_begins_from_is_made_as_its_file_says():
    head = (protocol.FILES / "lora.yaml").read_text().partition("base:")[0].replace("#",
        "").replace("\\\n", "")
    train, data = (shlex.split(line.partition("lpkit ")[2]) for line in head.splitlines()
                   if line.strip().startswith("lpkit "))
    assert tuple(train) == protocol.BEGINS["lora"][0] and data[-1] == protocol.BEGINS["lora"][1][-1]
    claim = files.read(protocol.FILES / "lora.yaml")
    assert {claim.config("lora").start.run, claim.config("lora").data.source} == {train[-1],
        data[-1]}
