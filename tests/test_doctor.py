"""The doctor says only what it tried: its rows against torch itself, and against checks that fail in every way."""

import json
import os
from functools import partial
from importlib import metadata

import pytest
import torch

from lpkit import cli
from lpkit.measure import attention, doctor, matrix
from lpkit.measure.probes import Check, UnavailableError, compare, probe
from lpkit.nn.attention import backend

CPU = torch.device("cpu")


def row(name):
    return next(check for check in doctor.CHECKS if check.name == name)


@pytest.fixture
def report(doctors_report):
    return doctors_report


def test_the_report_is_json_and_each_row_has_its_reason(report):
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    names = [check.name for check in doctor.CHECKS]
    assert [found["name"] for found in report["probes"]] == [*names, *matrix.checks()]
    for found in report["probes"]:
        assert found["works"] != bool(found["why"]) and found["works"] == bool(found["detail"]), found
        assert found["works"] or found["nearest"], f"{found['name']} does not work here, and nothing is offered instead"


def test_the_machine_is_this_one(report):
    machine = report["machine"]
    assert machine["libraries"]["torch"] == metadata.version("torch")
    assert machine["cores"] <= os.cpu_count() and machine["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES")
    assert len(machine["gpus"]) == torch.cuda.device_count()


def test_what_every_torch_can_do_works_here(report):
    works = {found["name"] for found in report["probes"] if found["works"]}
    assert {"fp32", "bf16", "plain", "sdpa", "tiled", "gloo", "DDP", "FSDP2"} <= works
    assert report["chosen"]["precision"]["used"] in ("bf16", "fp32") and report["chosen"]["precision"]["why"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_the_gpu_rows_say_so(report):
    found = {row["name"]: row for row in report["probes"]}
    for name in ("tf32", "mxfp8, scaled_mm", "nvfp4, scaled_mm", "flash-attn", "nccl", "triton", "fp8 stores"):
        assert not found[name]["works"] and found[name]["why"] and found[name]["nearest"]


def test_a_wrong_product_does_not_count_as_working(monkeypatch):
    a, b = doctor._operands(CPU)
    with pytest.raises(UnavailableError, match="wrong: relative error"):
        compare("the product is wrong", [a @ b], [a @ b.T], 1e-2)      # not transposed
    with pytest.raises(UnavailableError, match="nan"):
        compare("the product is wrong", [torch.full((64, 64), torch.nan)], [a @ b.T], 1e-2)
    monkeypatch.setattr(attention, "backend", lambda name, model: backend("plain", model) if name == "plain" else
                        lambda q, k, v, documents: torch.nn.functional.scaled_dot_product_attention(q, k, v))   # not causal
    with pytest.raises(UnavailableError, match=r"the numbers are wrong, relative error .* can$"):
        attention.check("sdpa", CPU)


def test_compiled_fp8_stores_are_compared_bit_by_bit():
    """A store that went wrong is a sentence: NaN bytes in the transposed one, as Triton leaves them, or one bit of the other."""
    assert "PyTorch's own bits" in doctor.fp8_stores(CPU, lambda function: function)

    def spoiled(which: int, byte: int):
        def compiled(function):
            def run(x):
                made = function(x)
                made[which].view(torch.uint8)[3, 5] = byte
                return made
            return run
        return compiled

    with pytest.raises(UnavailableError, match=r"e4m3fn, stored transposed, has 1 wrong values of 196,608, 1 of them NaN.*11111"):
        doctor.fp8_stores(CPU, spoiled(1, 0x7F))
    with pytest.raises(UnavailableError, match=r"stored as it is, has 1 wrong values of 196,608, 0 of them NaN"):
        doctor.fp8_stores(CPU, spoiled(0, 0x31))
    found = probe(row("fp8 stores"), CPU)
    assert not found.works and "nothing compiles with Triton for a CPU" in found.why and "system.compile=false" in found.nearest


def test_the_ceilings_are_measured(report):
    assert report["ceilings"]["flops"].keys() >= {"fp32", "bf16"} and report["ceilings"]["bytes_per_second"] > 1e8


def test_the_operands_are_exact_in_eight_bits():
    for x in doctor._operands(CPU):
        assert torch.equal(x.to(torch.float8_e4m3fn).float(), x) and torch.equal((4 * x).to(torch.int8).float(), 4 * x)


@pytest.mark.parametrize("error, why", [(RuntimeError("no such\nthing"), "no such"), (NotImplementedError(), "NotImplementedError"),
                                        (ImportError("\n  libcudnn"), "libcudnn")])
def test_what_a_check_raises_is_its_reason(error, why):
    def run(device):
        raise error

    found = probe(Check(name="x", kind="precision", run=run, nearest="y"), CPU)
    assert (found.works, found.why, found.nearest, found.detail) == (False, why, "y", "")


@pytest.mark.dist
@pytest.mark.parametrize("function, works, why", [("crash", False, "died at step 0 in start of SIGKILL"), ("wrong", False, "AssertionError: the sum is wrong"),
                                                  ("hang", None, "not known: ranks 0 and 1 of 2 got no further for 3 s")])
def test_processes_that_crash_or_hang_are_a_row(function, works, why, monkeypatch, parent):
    monkeypatch.setattr(doctor, "_warm_parent", lambda: parent)
    monkeypatch.setattr(doctor, "PROGRAM", f"tests.rank_functions:{function}")
    monkeypatch.setattr(doctor, "PROCESS_SECONDS", 3.0)
    found = probe(Check(name="x", kind="parallel", run=partial(doctor._processes, function, "gloo")), CPU)
    assert found.works is works and why in found.why


def test_the_command_prints_one_object_and_a_page_for_people(report, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: dict(report))
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert cli.main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert all(check.name in page for check in doctor.CHECKS) and max(map(len, page.splitlines()[:-1])) <= 120
