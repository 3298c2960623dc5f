"""tests/bench/code.py: a record names the code that it timed, and pages mark a record whose code
changed.

Only these tests catch: a digest that a comment or a local name changes, a digest that a change of
the code does not change, and a page that presents a number of older code as a number of this code.
"""

import json
from pathlib import Path

import pytest

from tests.bench import code, harness
from tests.pages import gpu, kernels

MODULE = '''"""A module."""

@jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    found = tl.load(x + i, mask=i < n)      # a comment
    tl.store(out + i, found * 2, mask=i < n)
'''
SHAPE = "\nSHAPE = {'BLOCK': 128}\n"


@pytest.mark.parametrize("old, new", [
    ("A module", "The module"), ("  # a comment", ""), ("found", "values"),
    ("(0, BLOCK)", "(0,  BLOCK)")])
def test_what_does_not_run_leaves_the_digest(old, new):
    assert old in MODULE and code.digest(MODULE) == code.digest(MODULE.replace(old, new))


@pytest.mark.parametrize("old, new", [
    ("* 2", "* 3"), ("i < n", "i <= n"), ("tl.load", "tl.loads"), ("kernel(", "kernels("),
    ("tl.store(out + i, found * 2", "tl.store(x + i, found * 2"), ("128", "256"), ("@jit\n", "")])
def test_a_change_of_the_code_changes_the_digest(old, new):
    source = MODULE + SHAPE
    assert old in source and code.digest(source) != code.digest(source.replace(old, new, 1))


def test_the_digest_is_the_same_in_every_version_of_python():
    assert code.digest(MODULE) == "14913fad14df"


def test_a_record_of_a_gpu_names_its_code_and_other_records_do_not(monkeypatch):
    assert not {"code"} & {**harness.provenance(), **harness.provenance(device="formulas")}.keys()
    monkeypatch.setattr(harness, "_gpu", lambda device: {"cuda": "13.0"} if device else {})
    assert harness.provenance(device="NVIDIA H200")["code"] == code.today()
    assert "code" not in harness.provenance()


def test_a_kernel_is_compiled_from_its_module_and_the_triton_functions_that_it_imports():
    assert code.compiled_from("kernels.fused_cast") == (
        "kernels.amax", "kernels.fused_cast", "kernels.rounding")


def test_a_changed_module_marks_its_kernels_and_no_others():
    record = {"code": code.today() | {"kernels.norm": "0" * code.DIGITS, "kernels.gone": "1"}}
    assert code.changed(record, "kernels.norm") == ["kernels.norm"]
    assert code.changed(record, "kernels.swiglu") == []
    assert code.changed(record) == ["kernels.norm", "kernels.gone"]
    assert code.changed({}) is None


def test_pages_say_whether_the_code_changed(tmp_path):
    record = {"device": "a GPU", "cpu": "a CPU", "date": "2026-11-26T00:00", "commit": "abc",
              "code": code.today() | {"kernels.norm": "0" * code.DIGITS}, "cases": [
                  {"case": f"{name}, 4x4", "peer": kernels.FLOORS[0], "ratio": 0.5}
                  for name in ("rms-norm", "swiglu", "linear-cross-entropy")]}
    (tmp_path / "kernels-a.json").write_text(json.dumps(record))
    ends = [line.rpartition("| ")[2] for line in kernels.measured(tmp_path) if "4x4" in line]
    assert ends == ["changed |", "same |", "same |"]
    assert gpu._since(record) == "changed"
    assert gpu._since(record | {"code": code.today()}) == "same"
    assert gpu._since({}) == "unknown"


def test_every_record_of_a_clean_commit_names_its_code():
    for path in sorted((Path(__file__).parents[2] / "data" / "measured").glob("*h200*.json")):
        record = json.loads(path.read_text())
        assert ("code" in record) == (not record["commit"].endswith("+")), path.name
