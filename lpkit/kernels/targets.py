"""What the compiler makes of the Triton kernels, for GPUs that need not be there.

    python -m lpkit.kernels.targets             # a table
    python -m lpkit.kernels.targets --json      # a list of `Compiled`

Triton brings NVIDIA's assembler and disassembler along, so each `Build` is compiled to machine code
and read back: registers and shared memory; stack, which spills use; the width of global loads and
stores; conversions to FP8; calls, which is how a division takes its slow path.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lpkit.kernels.jit import triton
from lpkit.kernels.kernel import Build
from lpkit.techniques.kernels import KERNELS

TARGETS = {"sm_90": 90, "sm_100": 100}      # Hopper, Blackwell
WARP = 32


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Counts are of instructions in the machine code, each once however often it runs."""

    kernel: str             # the row of KERNELS
    function: str
    target: str
    registers: int          # of a thread
    stack_bytes: int        # of a thread; spills are there
    shared_bytes: int       # of a program
    warps: int
    wide_accesses: int      # global loads and stores of 128 bits
    narrow_accesses: int    # of less than 32, where a whole row of them would be slow
    fp8_conversions: int
    calls: int


def compiled(names: list[str] | None = None) -> Iterator[Compiled]:
    """Raises ImportError without Triton."""
    for name in names or KERNELS:
        for build in KERNELS[name].load().builds:
            for target in TARGETS:
                yield _compile(name, build, target)


def _compile(name: str, build: Build, target: str) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = build.kernel.arg_names
    signature = {arg: build.signature.get(arg, "constexpr") for arg in order}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(order)
               if arg in build.signature and arg not in build.unaligned}
    constants = {(order.index(arg),): value for arg, value in build.constants.items()}
    made = triton.compile(
        ASTSource(fn=build.kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", TARGETS[target], WARP), options={"num_warps": build.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = _dump("--dump-resource-usage", file.name), _dump("--dump-sass", file.name)
    instructions = Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\S+\s+)?([A-Z][\w.]*)",
                                      code, re.MULTILINE))

    def count(pattern: str) -> int:
        return sum(n for name, n in instructions.items() if re.match(pattern, name))

    return Compiled(
        kernel=name, function=build.kernel.__name__, target=target, warps=build.warps,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared_bytes=made.metadata.shared,
        wide_accesses=count(r"(LDG|STG)\b.*\.128"),
        narrow_accesses=count(r"(LDG|STG)\b.*\.[US](8|16)\b"),
        fp8_conversions=count(r"F2FP.*E[45]M[23]"), calls=count(r"CALL"))


def _dump(what: str, cubin: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="KERNEL")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [asdict(one) for one in compiled(asked.names)]
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    print("| " + " | ".join(key.replace("_", " ") for key in rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
