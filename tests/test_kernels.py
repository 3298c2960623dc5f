"""Every kernel against its definition and float64, forward and backward; planted mistakes are found; what the compiler makes of the
Triton kernels for GPUs.

On a CPU Triton's interpreter runs them (conftest.py asks for it), with PyTorch's conversions instead of its own.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lpkit.errors import ConfigError
from lpkit.kernels.jit import INTERPRETED, tl
from lpkit.kernels.kernel import difference
from lpkit.techniques.kernels import KERNELS

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
              pytest.mark.skipif(tl is None, reason="Triton is not installed")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = [name for name in KERNELS if KERNELS[name].load().exact]


@pytest.fixture(scope="module", autouse=True)
def right_interpreter():
    if INTERPRETED:
        from lpkit.kernels.interpreter import mend
        mend()


def examples(kernel):
    return kernel.examples(torch.Generator().manual_seed(0), DEVICE)


@pytest.mark.parametrize("name", KERNELS)
def test_versions_compute_what_the_definition_says(name):
    kernel = KERNELS[name].load()
    for version, call in kernel.versions.items():
        for i, arguments in enumerate(examples(kernel)):
            said = difference(kernel, call, arguments)
            assert not said, f"{version}, example {i}: {said}"


def scaled(call):
    def wrong(*arguments):
        out = call(*arguments)
        return tuple(map(one_percent, out)) if isinstance(out, tuple) else one_percent(out)
    return wrong


def one_percent(t):
    if t.dtype.is_floating_point and t.dtype.itemsize > 1:
        return t * 1.01
    return t.reshape(-1).view(torch.uint8).roll(1).view(t.dtype).view(t.shape)


def zeros(call):
    def wrong(*arguments):
        out = call(*arguments)
        return tuple(map(torch.zeros_like, out)) if isinstance(out, tuple) else torch.zeros_like(out)
    return wrong


def nan_row(call):
    def wrong(*arguments):
        out = call(*arguments)
        first = out[0] if isinstance(out, tuple) else out
        bad = first.clone()
        bad.view(-1)[:1] = torch.nan if bad.dtype.is_floating_point else 77
        return (bad, *out[1:]) if isinstance(out, tuple) else bad
    return wrong




@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("plant", [scaled, zeros, nan_row])
def test_a_planted_mistake_is_found(name, plant):
    kernel = KERNELS[name].load()
    wrong = plant(kernel.definition)
    assert any(difference(kernel, wrong, arguments) for arguments in examples(kernel))


@pytest.fixture(scope="module")
def built():
    """What the compiler makes of them, in a process without the interpreter."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, "-m", "lpkit.kernels.targets", "--json"], capture_output=True, text=True, env=clean)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_the_compiler_makes_good_machine_code_of_them(built):
    """For Hopper and Blackwell: nothing spills, numbers come 128 bits at a time, no division takes the slow path, and FP8 is
    converted by the hardware's instruction."""
    assert {one["kernel"] for one in built} == {name for name in KERNELS if KERNELS[name].load().builds}
    for one in built:
        where = f"{one['function']} for {one['target']}"
        assert not one["stack_bytes"], f"{where} spills"
        assert not one["calls"], f"{where} calls a slow path"
        assert one["wide_accesses"], f"{where} moves less than 128 bits at a time"
        assert one["registers"] * one["warps"] * 32 <= 65536, f"{where} does not fit a multiprocessor"
    casts = {"_cast", "_rows", "_blocks", "_square"}
    assert all(one["fp8_conversions"] >= 16 for one in built if one["function"] in casts)
    assert not any(one["narrow_accesses"] for one in built if one["kernel"] in ("amax", "cast-tensor", "cast-rows", "cast-blocks"))


def test_the_page_shows_what_the_compiler_makes(built):
    from lpkit.kernels.targets import Compiled, page

    there = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
    if f"By Triton {metadata.version('triton')}," not in there:
        pytest.skip("the page is by another version of Triton")
    assert page([Compiled(**one) for one in built]) == there


def test_casts_move_the_bytes_that_they_must():
    """Of bfloat16, both layouts: 6 an element with the tensor's own amax, 4 with a history; today's compiled casts move 8."""
    each = {}
    for name in ("cast-tensor", "cast-rows", "cast-blocks", "cast-mx", "cast-nvfp4"):
        kernel = KERNELS[name].load()
        each |= {(name, case): kernel.moved_bytes(*a) / a[0].numel() for case, a in kernel.typical().items()}
    assert each["cast-tensor", "current scaling"] == 6 and each["cast-tensor", "delayed scaling"] == 4
    assert max(each.values()) <= 6


@pytest.mark.parametrize("bad, says", [
    (torch.randn(4, 8).int(), "not torch.int32"), (torch.randn(8, 4).T, "contiguous"),
    (torch.empty(1, 65537, dtype=torch.bfloat16), "65,537")])
def test_what_a_row_kernel_does_not_take_is_refused(bad, says):
    from lpkit.kernels.rms_norm import forward_op

    with pytest.raises(ConfigError, match=says):
        forward_op(bad, torch.ones(bad.shape[-1]), 1e-5)
