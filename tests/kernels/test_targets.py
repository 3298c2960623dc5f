"""What the compiler makes of the Triton kernels for Ampere, Ada and GeForce Blackwell;
tests/kernels/test_kernels.py has Hopper and Blackwell, and the page. Each in a process without the
interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lpkit.kernels.jit import tl
from lpkit.techniques.hardware import HARDWARE
from tests.kernels.builds import BY_TRITON_3_6, PROOFS
from tests.pages.kernels import FP8_SINCE, ON_PAGE, TARGETS, runs

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.skipif(tl is None, reason="Triton is not installed"),
              pytest.mark.timeout(900)]
MORE = sorted(TARGETS.keys() - set(ON_PAGE))
BUILDS = [(name, build) for name in PROOFS for build in PROOFS[name].builds]
# Heads of 128 in tiles of 128 x 64: without wgmma and tensor memory, which read operands and keep
# sums elsewhere, 255 registers are
# too few for a thread by some numbers. Bytes of a thread, at most.
SPILLS = {"flash-attention": 136}


def without_interpreter(*words: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=clean,
                         cwd=ROOT)
    assert out.returncode == 0, out.stderr
    return out.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", MORE)
def test_other_gpus_have_good_machine_code_too(target):
    rows = json.loads(without_interpreter("-m", "tests.pages.kernels", "--target", target))
    assert (len(rows) == sum(runs(build, target) for _, build in BUILDS)
            and {one["target"] for one in rows} == {target})
    for one in rows:
        where = f"{one['kernel']}'s {one['function']} ({one['way']})"
        assert one["stack_bytes"] <= SPILLS.get(one["kernel"], 8 * BY_TRITON_3_6), f"{where} spills"
        assert one["shared_bytes"] <= TARGETS[target], (
            f"{where} has more shared memory than there is")
        assert not one["calls"], f"{where} calls a slow path"
        assert one["wide_accesses"], f"{where} moves less than 128 bits at a time"
        assert (one["registers"] * one["warps"] * 32
                <= 65536), f"{where} does not fit a multiprocessor"
        if one["function"] in ("_cast", "_rows", "_blocks", "_square"):
            assert one["fp8_conversions"] >= 16, f"{where} converts by many instructions"


AMPERE = """
from tests.pages import kernels as targets
from lpkit.kernels.rounding import plan
from tests.kernels.builds import PROOFS
from triton.compiler.errors import CompilationError
from dataclasses import replace
import json
refused, eight = [], []
for name in PROOFS:
    for i, build in enumerate(PROOFS[name].builds):
        if targets.runs(build, "sm_80"):
            continue
        try:
            targets._compile(name, build, "sm_80")
        except CompilationError as error:
            if "not supported in this architecture" in str(error):
                refused.append((name, i))
for build in PROOFS["cast-rows"].builds:
    to = build.constants["TO"]
    to = plan(replace(to.cast, format="int8").words, to.rows, to.columns, to.swizzled, to.history, to.noise)
    signature = {key: "*i8" if kind == "*fp8e4nv" else kind for key, kind in build.signature.items()}
    eight.append(targets._compile("cast-rows", replace(build, constants={**build.constants, "TO": to}, signature=signature), "sm_80"))
print(json.dumps([refused, [vars(one) for one in eight]]))
"""


@pytest.mark.slow
def test_ampere_has_the_casts_that_its_tensor_cores_multiply():
    """Triton has no FP8 for it, and no recipe in FP8 or FP4 takes a product there; INT8 has
    both."""
    left_out = [(name, PROOFS[name].builds.index(build)) for name, build in BUILDS
                if not runs(build, "sm_80")]
    refused, eight = json.loads(without_interpreter("-c", AMPERE))
    assert [tuple(one) for one in refused] == left_out
    least = {format: min(needed for needed, *_ in HARDWARE[format].values()) for format in HARDWARE}
    assert min(least.pop(format) for format in ("e4m3fn", "e5m2", "e2m1")) == divmod(FP8_SINCE, 10)
    assert least == {"int8": (7, 5)}
    assert eight and not any(one["stack_bytes"] or one["calls"] for one in eight)


SLOW_PATH = """
import sys; sys.path.insert(0, sys.argv[1])
from tests.pages import kernels as targets
from tests.kernels.builds import Build
from planted import quotient
build = Build(kernel=quotient, signature={"x": "*fp32", "y": "*fp32"}, constants={"BLOCK": 512})
print([targets._compile("planted", build, target).calls for target in targets.TARGETS])
"""
PLANTED = """
import triton, triton.language as tl
@triton.jit
def quotient(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.div_rn(tl.load(x + at), tl.load(y + at)))
"""


def test_a_slow_path_is_counted_for_every_gpu(tmp_path):
    """A jump within a function, which older GPUs take by the same instruction, is not (above)."""
    (tmp_path / "planted.py").write_text(PLANTED)
    assert min(json.loads(without_interpreter("-c", SLOW_PATH, str(tmp_path)))) >= 1
