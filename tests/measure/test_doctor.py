"""The doctor says only what it tried: its rows against torch itself, and against checks that fail
in every way.

Only these tests catch: a probe that says yes to wrong numbers, a crash or a hang without a row, a
row without its reason, and a race that other processes decide.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from importlib import metadata

import pytest
import torch

from lpkit import cli, hardware
from lpkit.commands import doctor as doctor_command
from lpkit.measure import attention, doctor, matrix, probes
from lpkit.measure.probes import Check, UnavailableError, compare, probe
from lpkit.nn.attention import backend
from lpkit.techniques.recipes import RECIPES
from tests.measure import probe_process

CPU = torch.device("cpu")


def row(name):
    return next(check for check in doctor.CHECKS if check.name == name)


@pytest.fixture
def report(doctors_report):
    return doctors_report


def test_the_report_is_json_and_each_row_has_its_reason(report):
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    names = [check.name for check in doctor.CHECKS]
    assert [probed["name"] for probed in report["probes"]] == [*names, *matrix.checks()]
    for probed in report["probes"]:
        assert (probed["works"] != bool(probed["why"])
                and probed["works"] == bool(probed["detail"])), probed
        assert probed["works"] or probed["nearest"], (
            f"{probed['name']} does not work here, and nothing is offered instead")


def test_rows_of_an_import_are_tried_beside_the_packages_own():
    import lessons.rows.linear_attention  # noqa: F401  adds a backend of attention

    assert "chunked" not in {check.name for check in doctor.CHECKS}
    assert "chunked" in {check.name for check in doctor.attention_checks(imported=True)}


def test_the_machine_is_this_one(report):
    machine = report["machine"]
    assert machine["libraries"]["torch"] == metadata.version("torch")
    assert (machine["cores"] <= os.cpu_count() and machine["memory_bytes"]
            == os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"))
    assert len(machine["gpus"]) == torch.cuda.device_count()


def test_what_every_torch_can_do_works_here(report):
    works = {probed["name"] for probed in report["probes"] if probed["works"]}
    assert {"fp32", "bf16", "plain", "sdpa", "tiled", "gloo", "DDP", "FSDP2"} <= works
    assert (report["chosen"]["precision"]["used"] in ("bf16", "fp32")
            and report["chosen"]["precision"]["why"])
    assert (report["ceilings"]["flops"].keys() >= {"fp32", "bf16"}
            and report["ceilings"]["bytes_per_second"] > 1e8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_the_gpu_rows_say_so(report):
    rows = {row["name"]: row for row in report["probes"]}
    for name in ("tf32", "mxfp8, scaled_mm", "nvfp4, scaled_mm", "flash-attn", "nccl", "triton",
                 "fp8 stores"):
        assert not rows[name]["works"] and rows[name]["why"] and rows[name]["nearest"]


def test_a_wrong_product_does_not_count_as_working(monkeypatch):
    a, b = doctor._operands(CPU)
    with pytest.raises(UnavailableError, match="wrong: relative error"):
        compare("the product is wrong", [a @ b], [a @ b.T], 1e-2)      # not transposed
    with pytest.raises(UnavailableError, match="nan"):
        compare("the product is wrong", [torch.full((64, 64), torch.nan)], [a @ b.T], 1e-2)
    monkeypatch.setattr(attention, "backend", lambda name, model: backend("plain", model)
                        if name == "plain" else
                        # not causal
                        lambda q, k, v, documents: torch.nn.functional.scaled_dot_product_attention(
                            q, k, v))
    with pytest.raises(UnavailableError, match=r"the numbers are wrong, relative error .* can$"):
        attention.check("sdpa", CPU)


def test_compiled_fp8_stores_are_compared_bit_by_bit():
    """A wrong store is reported: NaN bytes in the transposed store, which Triton's error leaves, or
    a single wrong bit in the other store."""
    assert doctor.fp8_stores(CPU, lambda function: function).startswith(
        "6 of 6 compiled casts to E4M3 and E5M2 were tried and have the bits")

    def spoiled(which: int, byte: int):
        def compiled(function):
            def run(x):
                stored = function(x)
                stored[which].view(torch.uint8)[3, 5] = byte
                return stored
            return run
        return compiled

    with pytest.raises(UnavailableError,
                       match=r"e4m3fn, stored transposed, has 1 wrong values of 196,608, 1 of them "
                             r"NaN.*11111"):
        doctor.fp8_stores(CPU, spoiled(1, 0x7F))
    with pytest.raises(UnavailableError,
                       match=r"stored as it is, has 1 wrong values of 196,608, 0 of them NaN"):
        doctor.fp8_stores(CPU, spoiled(0, 0x31))
    outcome = probe(row("fp8 stores"), CPU)
    assert (not outcome.works and "nothing compiles with Triton for a CPU" in outcome.why
            and "system.compile=false" in outcome.nearest)


def test_the_operands_are_exact_in_eight_bits():
    for x in doctor._operands(CPU):
        assert (torch.equal(x.to(torch.float8_e4m3fn).float(), x)
                and torch.equal((4 * x).to(torch.int8).float(), 4 * x))


@pytest.mark.parametrize("error, why", [(RuntimeError("no such\nthing"), "no such"),
    (NotImplementedError(), "NotImplementedError"),
                                        (ImportError("\n  libcudnn"), "libcudnn")])
def test_what_a_check_raises_is_its_reason(error, why):
    def run(device):
        raise error

    outcome = probe(Check(name="x", kind="precision", run=run, nearest="y"), CPU)
    assert (outcome.works, outcome.why, outcome.nearest, outcome.detail) == (False, why, "y", "")


@pytest.mark.dist
@pytest.mark.parametrize("function, works, why",
                         [("crash", False, "died at step 0 in start of SIGKILL"),
                          ("wrong", False, "AssertionError: the sum is wrong"),
                                                  ("hang", None, "not measured in time: ranks 0 "
                                                      "and 1 of 2 got no further for 3 s")])
def test_processes_that_crash_or_hang_are_a_row(function, works, why, monkeypatch, parent):
    monkeypatch.setattr(doctor, "_warm_parent", lambda: parent)
    monkeypatch.setattr(doctor, "PROGRAM", f"tests.parallel.rank_functions:{function}")
    monkeypatch.setattr(doctor, "PROCESS_SECONDS", 3.0)
    outcome = probe(Check(name="x", kind="parallel",
                        run=partial(doctor._processes, function, "gloo")), CPU)
    assert outcome.works is works and why in outcome.why


def test_fp8_stores_keep_to_a_budget_of_their_own(monkeypatch):
    """Compiling a kernel takes seconds on a GPU. If the time is over, the report says how many
    casts were tried, which is at least one."""
    monkeypatch.setattr(doctor, "PROCESS_SECONDS", -1.0)
    assert doctor.fp8_stores(CPU, lambda function: function).startswith("1 of 6 ")


def test_a_row_names_one_alternative():
    """The backend that the reason names replaces the check's own alternative."""
    def run(device):
        raise UnavailableError("needs a GPU; sdpa can")

    outcome = probe(Check(name="sdpa-fa3", kind="attention", run=run, nearest="plain"), CPU)
    assert (outcome.why, outcome.nearest) == ("needs a GPU", "sdpa")
    page = "\n".join(doctor_command.Page().lines({"probes": [asdict(outcome)]}))
    assert page.endswith("- sdpa-fa3            needs a GPU. Use sdpa instead.")


def test_the_command_prints_one_object_and_a_page_for_people(report, monkeypatch, capsys):
    monkeypatch.setattr(probes, "answers", lambda **how: probe_process.answers(report))
    monkeypatch.setattr(probes, "facts",
                        lambda: {key: value for key, value in report["machine"].items()
                                 if key != "gpus"})
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert cli.main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert (all(check.name in page for check in doctor.CHECKS)
            and max(map(len, page.splitlines()[:-1])) <= 120)
    assert all(recipe in page for recipe in RECIPES) and "Use sdpa instead." in page


def test_each_row_is_printed_before_the_next_probe_starts(monkeypatch, capsys):
    """The rows about the system are printed before the first check runs. The test compares the
    order of events, not times."""
    row = {"name": "", "kind": "precision", "works": True, "detail": "x", "why": "", "nearest": ""}

    def answers(imports):
        assert imports == ["tests.techniques.own_rows"]
        assert "  System" in (printed := capsys.readouterr().out) and "  Installed" in printed
        yield {"machine": {"gpus": [], "gpu_problem": None, "cuda": None, "hip": None},
               "device": "cpu", "checks": []}
        for name in ("first", "second", "third"):
            before = capsys.readouterr().out
            assert ("  GPU" if name == "first" else row["name"]) in before and name not in before
            row["name"] = name
            yield {"probes": [dict(row)]}

    monkeypatch.setattr(probes, "answers", answers)
    assert cli.main(["doctor", "--import", "tests.techniques.own_rows"]) == 0
    printed = capsys.readouterr().out
    assert "third" in printed and printed.endswith("not known, because no race was measured.\n")


def test_what_is_printed_first_needs_no_torch():
    """Importing PyTorch takes seconds, and longer on a busy machine."""
    code = ("import sys; from lpkit.commands import doctor; from lpkit.measure import probes\n"
            "page = doctor.Page(); print(next(page.lines({'machine': probes.facts()})), 'torch' in "
            "sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("  System") and done.stdout.endswith("False\n")


def test_figures_of_a_busy_machine_are_marked():
    ceilings = {"bytes_per_second": 6e9, "flops": {"fp32": 8.7e8},
                "fp8_without_fast_accumulation": None}
    shown = [" ".join("\n".join(doctor_command.Page().lines(
        {"ceilings": ceilings | {"others": others}})).split()) for others in (0.1, 0.89)]
    assert shown == ["Reached 6 GB/s, fp32 1 GFLOP/s",
                    "Reached 6 GB/s, fp32 1 GFLOP/s (BUSY: other processes took 89% of the cores, "
                    "so this machine can do more)"]
    choice = {"chosen": {"precision": {"used": "bf16", "why": "it is"}},
              "ceilings": {"others": 0.89}}
    assert doctor_command.text(choice).endswith(
        "bf16: it is (BUSY: other processes took 89% of the cores).")


@pytest.mark.parametrize("fp32, bf16, used",
                         [(2.0, 1.0, "bf16"), (1.05, 1.0, "fp32"), (40.52, 1.0, "fp32")])
def test_the_race_counts_cpu_time_and_believes_no_wonder(monkeypatch, fp32, bf16, used):
    """Beside two busy processes, a matmul in bf16 fitted between two turns of the others and a
    matmul in fp32 did not. Wall-clock times gave a speed-up of up to 31, where the true one is 2. A
    speed-up that no processor can have decides nothing."""
    seen = {}

    def seconds(runners, *, rounds, within_seconds, clock):
        seen.update(clock=clock, threads=torch.get_num_threads())
        return [[fp32] * 3, [bf16] * 3]

    monkeypatch.setattr(hardware, "interleaved_seconds", seconds)
    before = torch.get_num_threads()
    choice = hardware.bf16_choice.__wrapped__("cpu", size=8)
    assert (choice.used == used and f"{fp32 / bf16:.2f}x" in choice.why
            and "above 32x is not believed" in choice.why)
    assert seen == {"clock": time.thread_time, "threads": 1} and torch.get_num_threads() == before
