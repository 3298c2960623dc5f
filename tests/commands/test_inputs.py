"""The files and command lines of users, in tests/inputs: the result is right, or there is one error
message.

Only these tests catch: a wrong result without a message, or a traceback, for a file or a command
line of a user; the modules of tests/inputs list them.
"""

import json

import pytest

from tests.attack import _page, inputs

TABLES = inputs.tables()
LEAST = {"yamls": 48, "command_lines": 60, "folders": 120, "tokenizers": 20, "texts": 50}


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{table}-{name}"[:90])
                                  for table, cases in TABLES.items() for name, case in cases])
def test_what_users_bring_is_right_or_refused_in_a_sentence(case):
    answer = case()
    assert answer == "right" or (answer.strip() and "\n" not in answer.strip()), answer


def test_the_tables_are_as_long_as_they_say():
    for table, least in LEAST.items():
        names = [name for name, _ in TABLES[table]]
        assert len(names) >= least and len(set(names)) == len(names)


def test_the_attack_tells_silence_and_tracebacks(monkeypatch, tmp_path):
    def silent():
        raise AssertionError("another number")

    table = [("a", lambda: "right"), ("b", lambda: "it is refused"), ("c", silent),
             ("d", lambda: [][0])]
    monkeypatch.setattr(inputs, "tables", lambda: {"made_up": table})
    outcome = inputs.attack(9, 0, tmp_path)
    assert {what: len(each) for what, each in outcome.failures.items()} == {"silent": 1,
        "tracebacks": 1}
    assert (outcome.tried, outcome.facts) == (4,
        {"made_up": {"tried": 4, "right": 1, "refused": 1, "silent": 1, "tracebacks": 1}})


def test_the_page_has_a_table_by_kind(monkeypatch, tmp_path):
    measured = {"device": "a CPU", "versions": {}, "commit": "0" * 12, "date": "2026-11-28",
                "command": "lpkit bench reliability", "cases": [
        {"case": "inputs", "peer_median": 4, "seconds": 1, "failures": {},
         "facts": {"YAML files": {"tried": 4, "silent": 0}, "seen": 3}}]}
    (tmp_path / "reliability-cpu.json").write_text(json.dumps(measured))
    monkeypatch.setattr(_page, "resource", lambda name: tmp_path)
    monkeypatch.setattr(_page, "recorded", lambda result: [])
    page = _page.page()
    assert ("| inputs | tried | silent |\n|---|---|---|\n| YAML files | 4 | 0 |" in page
            and "| inputs | 4 | none | 1 | 000000000000 | seen: 3 |" in page)
