"""The benches of whole FP8 steps, end to end on a CPU at a tiny size: PyTorch's own FP8 products
run there, slowly.

Only these tests catch a bench that times another recipe or cast than it names, or a wrong cast, and
a record that the advisor does not find again.
"""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.kernels import fused_cast
from lpkit.kernels.jit import INTERPRETED
from lpkit.measure.advice import case_name, recorded_steps
from lpkit.predict.evidence import catalogued
from lpkit.techniques.machines import CATALOGUE
from tests.bench import fp8
from tests.bench.harness import provenance, summary

CPU = torch.device("cpu")
TINY = Config().replace({"model.layers": 1, "model.width": 64, "model.heads": 2, "model.vocab": 64,
                         "model.context": 32, "global_batch": 2})
WIDE = TINY.replace({"model.width": 128})
# torch 2.11 has no scale a row on a CPU
COMPARED = [name for name in fp8.COMPARED if name in fp8.runs_here(CPU)]


def test_all_sizes_with_the_advisor_s_choice(tmp_path):
    facts = provenance(["torch"])
    results = fp8.compare([TINY, WIDE], CPU, CATALOGUE["h200"], 2, facts=facts)
    cases = [(result.case, result.peer, result.target) for result in results]
    for i, width in enumerate((64, 128)):
        size = f"1 x {width}, 2 x 32 tokens"
        *compared, advised = cases[(len(COMPARED) + 1) * i:(len(COMPARED) + 1) * (i + 1)]
        assert compared == [(f"{name}, {size}", "bf16", None) for name in COMPARED]
        assert advised[0] == f"advised: bf16, {size}" and advised[2] == 0.99
        assert facts["advice"][size]["sentence"].startswith(
            "bf16: at these widths the casts cost more")
        # random tokens of 64 kinds: about ln 64 before anything is learned
        assert facts["losses"][size].keys() == {"bf16", *COMPARED}
        assert facts["losses"][size]["bf16"] == pytest.approx(math.log(64), rel=0.1)
    kept = summary(results)
    assert kept["advice"].keys() == kept["losses"].keys() == {
        f"1 x {width}, 2 x 32 tokens" for width in (64, 128)}
    # the advisor looks for what is recorded, and the row of its own choice is not among it
    (tmp_path / "fp8-step-h200.json").write_text(json.dumps(kept | {"device": "NVIDIA H200"}))
    recorded = recorded_steps(CATALOGUE["h200"], "bf16", tmp_path)
    assert recorded.keys() == {case_name(name, config) for name in COMPARED
                               for config in (TINY, WIDE)}


@pytest.fixture
def interpreted(monkeypatch):
    """On a CPU, and nothing is compiled. Returns what puts another cast in the place of
    Triton's."""
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    from lpkit.kernels.interpreter import mend

    mend()
    monkeypatch.setattr(fp8.jit, "compiled", lambda layer: layer)
    return lambda call: monkeypatch.setattr(fused_cast, "TENSOR",
        replace(fused_cast.TENSOR, versions={"triton": call}))


def test_a_linear_is_timed_with_the_kit_s_casts_beside_the_compiler_s(interpreted, monkeypatch):
    calls, counts, real = Counter(), {}, fp8.race

    def counted(*arguments):
        calls["triton"] += 1
        return fused_cast.in_triton(*arguments)

    def race(name, *, ours, peers, over, **more):
        for who, call in {"ours": ours, **peers}.items():
            calls.clear()
            call(*over[0])
            counts[who] = calls["triton"]
        return real(name, ours=ours, peers=peers, over=over, **more)

    interpreted(counted)
    monkeypatch.setattr(fp8, "race", race)
    results = fp8._linear((64, 128, 256), CPU, 1)
    casts = counts.pop("ours")
    assert casts == 3, "x, w and g, each both ways by one read"
    assert {"bf16", fp8.FUSED} <= counts.keys() and not any(counts.values())
    assert [result.peer for result in results] == [*counts]
    assert {result.case for result in results} == {"64x128 @ 128x256"}


def test_a_cast_that_is_not_its_definition_is_not_timed(interpreted):
    def wrong(x, *how):
        data, *rest = fused_cast.in_triton(x, *how)
        return torch.roll(data.view(torch.uint8), 1, 0).view(data.dtype), *rest

    interpreted(wrong)
    with pytest.raises(ConfigError,
                       match=r"system\.kernels=triton: cast-tensor differs from its definition"):
        fp8._linear((64, 128, 256), CPU, 1)


@pytest.mark.parametrize(("device", "row"), [
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
    ("Tesla T4", "t4"), ("NVIDIA GeForce RTX 5090", "rtx-5090"), ("NVIDIA RTX A6000", "a6000"),
    ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA GB300", "gb300"),
    ("NVIDIA GeForce RTX 2080 Ti", None)])
def test_a_gpu_is_found_by_its_model(device, row):
    machine = catalogued(device)
    assert (machine and machine.name) == row
