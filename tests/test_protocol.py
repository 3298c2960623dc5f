"""Published claims that `lpkit claim` settles: the rule of their verdicts, their files, and the record that the page shows."""

import json

import pytest

from lpkit.claims import protocol as files
from tests.bench import protocol
from tests.pages import claims

RECORD = max((json.loads(path.read_text()) for path in claims.MEASURED.glob("protocol-*.json")), key=lambda one: one["date"])


@pytest.mark.parametrize("expects, verdict, gain, low, said", [
    ("better", "better", 0.03, 0.01, "confirmed"), ("better", "better", 0.01, 0.001, "smaller"),
    ("better", "no difference", 0.01, -0.01, "not seen"), ("better", "worse", -0.01, -0.03, "refuted"),
    ("no worse", "better", 0.01, 0.001, "confirmed"), ("no worse", "no difference", -0.01, -0.019, "confirmed"),
    ("no worse", "no difference", -0.01, -0.021, "not seen"), ("no worse", "worse", -0.001, -0.002, "refuted")])
def test_a_verdict_follows_from_what_was_found(expects, verdict, gain, low, said):
    assert protocol.word(expects, {"verdict": verdict, "gain": gain, "interval": [low, 1.0]}, 0.02) == said


def test_each_sentence_has_a_file_that_can_be_settled_and_a_reason():
    rows = protocol.published()
    assert {path.stem for path in protocol.FILES.glob("*.yaml")} == rows.keys() == RECORD["found"].keys()
    for name, row in rows.items():
        claim = files.read(protocol.FILES / f"{name}.yaml")
        assert len(claim.arms) == 2 and claim.effect == 0.02 and claim.base == "cpu-3m"
        assert row.keys() == {"says", "source", "conditions", "expects", "why"} and row["why"].endswith(".") and "https://" in row["source"]
        assert row["expects"] in ("better", "no worse")


def test_the_page_has_enough_that_held_and_enough_that_did_not():
    said = [protocol.word(row["expects"], RECORD["found"][name]["verdicts"][0], 0.02) for name, row in protocol.published().items()]
    assert said.count("confirmed") >= 3 and len(said) - said.count("confirmed") >= 3
    page = "\n".join(claims._by_protocol())
    for name, one in RECORD["found"].items():
        assert f"| `{name}` | " in page and f"{one['verdicts'][0]['gain']:+.2%}" in page
