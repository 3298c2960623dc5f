"""Find the defects of the installed version of Triton's interpreter, so that learners do not search
for the fault in their own kernels.

`TRITON_INTERPRET=1` runs a kernel on a CPU, with numpy. Each probe below has a few lines whose
result is right on a GPU; a probe whose result differs, or that does not run, becomes a sentence.
Triton reads the variable when it is imported, so `defects` runs the probes in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

from lpkit.machine_facts import versions

SECONDS = 120.0
DOES_NOT_RUN = " does not run: "        # between the probe's name and the interpreter's message


@cache
def defects() -> tuple[str, ...]:
    """Return a sentence per defect, or one sentence if the probes could not run."""
    if versions(["triton"])["triton"] is None:
        return ("Triton is not installed, so kernels cannot run; Triton needs Linux",)
    try:
        done = subprocess.run([sys.executable, "-m", __name__], timeout=SECONDS, text=True,
                              capture_output=True, check=True, env={
                                  **os.environ, "TRITON_INTERPRET": "1",
                                  "PYTHONPATH": os.pathsep.join(sys.path)})
        return tuple(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return (f"the self-test of Triton's interpreter failed: {error}",)


def _probe() -> list[str]:
    """Run all probes and return a sentence per defect."""
    import numpy as np
    import torch
    import triton
    import triton.language as tl

    from lpkit.kernels.interpreter import mend_calls

    mend_calls()                # as in the process of a learner's kernel
    globals()["tl"] = tl        # a kernel's globals are those of its module
    np.seterr(all="ignore")

    @triton.jit
    def cast(x, y, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < n).to(y.dtype.element_ty), mask=i < n)

    @triton.jit
    def add(x, y):
        i = tl.arange(0, 16)
        tl.store(y + i, tl.load(x + i) + tl.load(x + i))

    @triton.jit
    def total(x, y):
        tl.store(y, tl.sum(tl.load(x + tl.arange(0, 16)), 0))

    @triton.jit
    def product(x, y):
        at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(y + at, tl.dot(tl.load(x + at), tl.load(x + at)))

    @triton.jit
    def loop(x, y, n):
        total = 0.0
        for i in range(n):
            total += tl.load(x + i)
        tl.store(y, total)

    sentences = []

    def hold(what: str, kernel, x, want, *more, **numbers) -> None:
        """Run kernel(x, got, ...) and add a sentence about `what` if `got` differs from `want`."""
        got = torch.zeros_like(want)
        try:
            kernel[(1,)](x, got, *more, **numbers)
        except Exception as error:
            why = str(error.__cause__ or error).splitlines()[0]
            sentences.append(what + DOES_NOT_RUN + why)
            return
        wrong = (got.float() != want.float()).flatten()
        if wrong.any():
            at = int(wrong.nonzero()[0])
            sentences.append(f"{what} is wrong for {wrong.float().mean():.0%} of the numbers "
                             f"tried: {want.flatten()[at].item():g} comes out as "
                             f"{got.flatten()[at].item():g}")

    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 30
    whole = torch.arange(256).view(16, 16) % 5 + 1.0        # sums of these numbers are exact
    low = whole.bfloat16()
    for name, dtype in (("E4M3", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2),
                        ("bf16", torch.bfloat16)):
        hold(f"a cast to {name}", cast, x, x.to(dtype), 1000, BLOCK=1024)
    hold("a sum of two bf16 numbers", add, low[0], 2 * low[0])
    hold("tl.sum of bf16 numbers", total, low[0], low[0].sum()[None])
    hold("tl.dot of bf16 numbers", product, low, whole @ whole)
    hold("tl.dot of float32 numbers", product, whole, whole @ whole)
    hold("a loop", loop, whole, whole.flatten()[:5].sum()[None], 5)
    room = torch.zeros(8)
    cast[(1,)](whole, room[:5], 8, BLOCK=8)
    if room[5:].any():
        sentences.append("a store out of bounds is silent")
    return sentences


if __name__ == "__main__":
    print(json.dumps(_probe()))
