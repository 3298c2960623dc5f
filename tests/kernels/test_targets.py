"""What the compiler makes of the Triton kernels for Ampere, Ada and GeForce Blackwell;
tests/kernels/test_kernels.py has Hopper and Blackwell, and the page.

Only these tests catch a kernel that does not compile, spills, or has too much shared memory on
those GPUs. One process without the interpreter compiles all of them.
"""

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
pytestmark = [pytest.mark.skipif(tl is None, reason="Triton is not installed"), pytest.mark.slow,
              pytest.mark.timeout(900)]
MORE = sorted(TARGETS.keys() - set(ON_PAGE))
BUILDS = [(name, build) for name in PROOFS for build in PROOFS[name].builds]
# Heads of 128 in tiles of 128 x 64: without wgmma and tensor memory, which read operands and keep
# sums elsewhere, 255 registers are too few for a thread by some numbers. Most bytes of a thread.
SPILLS = {"flash-attention": 136}
CODE = """
import json, sys
from dataclasses import replace
from triton.compiler.errors import CompilationError
from lpkit.kernels.rounding import plan
from tests.kernels.builds import PROOFS
from tests.pages import kernels as pages

rows = [vars(one) for one in pages.compiled(quick=True, targets=json.loads(sys.argv[1]))]
refused, eight = [], []
for name, proof in PROOFS.items():
    for build in [one for one in proof.builds if not pages.runs(one, "sm_80")][:1]:
        try:
            pages._compile(name, build, "sm_80")
        except CompilationError as error:
            if "not supported in this architecture" in str(error):
                refused.append(name)
for build in PROOFS["cast-rows"].builds:
    to = build.constants["TO"]
    to = plan(replace(to.cast, format="int8").words, to.rows, to.columns, to.swizzled, to.history,
              to.noise)
    types = {key: "*i8" if kind == "*fp8e4nv" else kind for key, kind in build.signature.items()}
    build = replace(build, constants={**build.constants, "TO": to}, signature=types)
    eight.append(vars(pages._compile("cast-rows", build, "sm_80")))
print(json.dumps({"rows": rows, "refused": refused, "eight": eight}))
"""

@pytest.fixture(scope="module")
def built():
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, "-c", CODE, json.dumps(MORE)], cwd=ROOT,
                         capture_output=True, text=True, env=clean)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_other_gpus_have_good_machine_code_too(built):
    assert len(built["rows"]) == sum(runs(build, target) for _, build in BUILDS for target in MORE)
    for row in built["rows"]:
        where = f"{row['kernel']}'s {row['function']} ({row['way']}) for {row['target']}"
        assert row["stack_bytes"] <= SPILLS.get(row["kernel"], 8 * BY_TRITON_3_6), f"{where} spills"
        assert row["shared_bytes"] <= TARGETS[row["target"]], f"{where} has too much shared memory"
        assert not row["calls"], f"{where} calls a slow path"
        assert row["wide_accesses"], f"{where} moves less than 128 bits at a time"
        assert row["registers"] * row["warps"] * 32 <= 65536, f"{where} has no room"
        if row["function"] in ("_cast", "_rows", "_blocks", "_square"):
            assert row["fp8_conversions"] >= 16, f"{where} converts by many instructions"


def test_ampere_has_the_casts_that_its_tensor_cores_multiply(built):
    """Triton has no FP8 for it, and no recipe in FP8 or FP4 takes a product there; INT8 has
    both."""
    left_out = [name for name, build in BUILDS if not runs(build, "sm_80")]
    assert built["refused"] == list(dict.fromkeys(left_out))
    least = {format: min(needed for needed, *_ in HARDWARE[format].values()) for format in HARDWARE}
    assert min(least.pop(format) for format in ("e4m3fn", "e5m2", "e2m1")) == divmod(FP8_SINCE, 10)
    assert least == {"int8": (7, 5)}
    assert built["eight"]
    assert not any(code["stack_bytes"] or code["calls"] for code in built["eight"])
