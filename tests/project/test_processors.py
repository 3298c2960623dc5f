"""No test depends on what `auto` picks on the machine at hand: what it asks of a processor has one
answer for each kind.

Only these tests catch: a function of the kit that newly asks what the processor is, and a test
whose result hangs on the machine at hand.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lpkit
from lpkit import hardware
from lpkit.config import Config
from lpkit.kernels import choose as choosing
from lpkit.kernels import wide_product
from lpkit.parallel.processes import Processes, WarmParent
from lpkit.training import build
from tests import processors

PACKAGE, HERE = Path(lpkit.__file__).parent, Path(__file__).parents[1]
SMALL = Config().replace({"system.device": "cpu", "model.layers": 2, "model.width": 64,
                          "model.heads": 2, "model.context": 64, "steps": 2})
LARGE = {"model.width": 512, "model.heads": 4, "model.context": 512}

# What tells one processor from another, or one moment from another, by the name that is called.
ASKS = {"get_cpu_capability", "_is_amx_tile_supported", "_is_amx_fp16_supported",
        "_is_avx512_bf16_supported", "_is_avx512_supported", "_is_vnni_supported",
        "_is_avx2_supported", "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported",
        "_is_mkldnn_acl_supported", "is_mkldnn_bf16_supported",
        "cpu_facts", "cpu_flags", "cpu_name", "cpu_limits", "interleaved_seconds", "cpu_count",
        "process_cpu_count", "sched_getaffinity", "cpu_affinity",
        "cpu_times", "cpu_percent", "cpu_freq", "getloadavg", "processor", "cores"}
# Every function of the kit that asks, and why no number of a test depends on what it is told.
KNOWN = {
    "hardware:multiplies_tiles": "has an answer for each kind",
    "hardware:bf16_choice": "has an answer for each kind",
    "kernels.wide_product:in_a_loop": "has an answer for each kind",
    "hardware:others": "has an answer",
    "hardware:busy": "is a part of others", "hardware:ours": "is a part of others",
    "hardware:share": "is a part of others",
    "hardware:threads_choice": "OMP_NUM_THREADS=1 (conftest.py) leaves one thread",
    "kernels.choose:_find": "is the race: those of products and attention on a CPU have answers, "
                            "and others run on a GPU alone",
    "hardware:_machine": "measures speeds", "hardware:peak_flops": "measures speeds",
    "hardware:squares": "measures speeds",
    "measure.ranks:_all_gather": "measures speeds", "measure.updates:_rates": "measures speeds",
    "measure.updates:take_turns": "measures speeds",
    "kernels.choose:_machine": "names a record", "kernels.compile_c:_processor": "names a record",
    "execution.compiled:compiled": "names a record",
    "claims.runs:code": "names a record", "hardware:device_name": "describes",
    "measure.probes:facts": "describes",
    "claims.runs:finished": "counts runs at a time",
    "training.launch:spread": "refuses more processes than cores",
    "machine_facts:cores": "asks for others", "machine_facts:cpu_name": "asks for others",
    "machine_facts:cpu_flags": "asks for others",
}
# Tests that start Python with another path on purpose: what they start computes nothing that is
# compared, or is without this checkout.
OTHER_PATHS = {"anywhere", "bare_machine", "commands", "evidence", "first_verdict",
               "lesson_rows", "notebook_runner", "processors", "promise", "ranks", "rooms",
               "ui"}


def callers():
    """module:function of the innermost function around each name of ASKS."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            nested = [inner for inner in ast.walk(function) if inner is not function
                      and isinstance(inner, ast.FunctionDef)]
            inside = {id(node) for inner in nested for node in ast.walk(inner)}
            if any(getattr(node, "attr", getattr(node, "id", "")) in ASKS
                   for node in ast.walk(function) if id(node) not in inside):
                yield f"{module}:{function.name}"


def test_nothing_else_asks_what_the_processor_is():
    """A new function that asks needs an answer in processors.py, or a reason here."""
    assert set(callers()) == set(KNOWN)


@pytest.mark.parametrize("changes, used", [
    ({"precision.recipe": "auto"},
     {"precision": {"AVX2": "fp32", "AVX512": "bf16", "AMX": "bf16"}}),
    ({"precision.recipe": "bf16"},
     {"attention": {"AVX2": "blocked", "AVX512": "blocked", "AMX": "sdpa"},
                                    "products": {"AVX2": "float32", "AVX512": "bf16",
                                                 "AMX": "bf16"}}),
    ({"precision.recipe": "bf16", **LARGE},
     {"products": {"AVX2": "float32", "AVX512": "float32", "AMX": "bf16"}}),
    ({"precision.recipe": "fp32"}, {"attention": dict.fromkeys(processors.KINDS, "sdpa")}),
    ({"precision.recipe": "bf16", "steps": 10**9},
     {"attention": {"AVX2": "blocked", "AVX512": "blocked", "AMX": "sdpa"}}),
    ({"precision.recipe": "fp8-tensorwise"},
     {"attention": {"AVX2": "blocked", "AVX512": "blocked", "AMX": "sdpa"}})])
def test_auto_has_one_answer_for_each_kind(changes, used, each_processor, monkeypatch):
    """Whatever is asked of the machine at hand, and whatever is raced, fails here."""
    def asked(*given, **named):
        pytest.fail("the machine at hand was asked")

    for module, name in ((torch.cpu, "_is_amx_tile_supported"),
                         (torch.backends.cpu, "get_cpu_capability"),
                         (hardware, "interleaved_seconds"),
                         (choosing, "interleaved_seconds"), (hardware.psutil, "cpu_times"),
                         (hardware.psutil, "cpu_count")):
        monkeypatch.setattr(module, name, asked)
    monkeypatch.setattr(wide_product, "KERNEL", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(hardware.machine_facts, "cores", lambda: 2)
    before = torch.get_num_threads()
    choices = build.decide(SMALL.replace(changes)).choices
    torch.set_num_threads(before)
    assert ({key: choices[key].used for key in used}
            == {key: kinds[each_processor] for key, kinds in used.items()})
    assert choices["threads"].used == ("2" if LARGE.items() <= changes.items() else "1")


def test_this_machine_is_asked_where_a_test_says_so(this_machine, monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda there=there: there)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        assert hardware.multiplies_tiles() == there
    assert wide_product.in_a_loop() == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())


def tiles(place, argument):
    return [hardware.multiplies_tiles(), wide_product.in_a_loop()]


def test_children_have_the_kind_too(monkeypatch):
    """A command, and ranks. This machine cannot have both kinds."""
    code = ("from lpkit import hardware; from lpkit.kernels import wide_product; "
            "print(hardware.multiplies_tiles(), wide_product.in_a_loop())")
    for kind, expected in (("AMX", "True False"), ("AVX2", "False True")):
        monkeypatch.setenv(processors.VARIABLE, kind)
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                               check=True).stdout.strip() == expected
    with WarmParent() as parent, Processes("tests.project.test_processors:tiles", world=1,
            parent=parent) as ranks:
        assert ranks.wait() == [[False, True]]


def test_no_test_hides_it_from_its_children():
    """PYTHONPATH brings it: where a test sets that, what was there stays, or `sys.path` is
    there."""
    hiding = set()
    for path in (path for path in HERE.rglob("*.py") if path.parent.name
                 not in ("bench", "inputs", "outside", "pages", "at_start")):
        text = path.read_text()
        for there in re.finditer(r"""PYTHONPATH["']?\s*[:=,](?! path)""", text):
            value = text[there.start() - 100:there.end() + 120]
            if not re.search(r"""sys\.path|get\(\s*"PYTHONPATH"|AT_START""", value):
                hiding.add(path.stem.removeprefix("test_"))
    assert hiding <= OTHER_PATHS, (f"let {', '.join(sorted(hiding - OTHER_PATHS))} begin its "
                                     f"PYTHONPATH with processors.AT_START")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX: signals")
def test_tests_that_nohup_began_hear_signals():
    code = ("import signal, subprocess, sys; import tests.conftest; "
            "deaf = 'import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "
            "signal.getsignal(signal.SIGINT) is signal.SIG_IGN)'; "
            "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "
            "subprocess.run([sys.executable, '-c', deaf], capture_output=True, text=True).stdout)")
    out = subprocess.run(["sh", "-c", "trap '' HUP INT; exec \"$@\"", "sh", sys.executable, "-c",
                          code], cwd=HERE.parent, capture_output=True, text=True)
    assert out.stdout.split() == ["False"] * 3, out
