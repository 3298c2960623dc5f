"""Compile the Triton kernels for GPUs that need not be present, and count what the code contains.

    python -m tests.pages kernels                   # docs/kernels.md
    python -m tests.pages.kernels                   # a list of `Compiled`, of what tests compile
    python -m tests.pages.kernels --target sm_80    # for another GPU

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
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from lpkit.kernels.jit import keep_privately, triton
from lpkit.techniques.kernels import KERNELS
from tests.bench import code
from tests.kernels.builds import PROOFS, Build

MEASURED = Path(__file__).parents[2] / "data" / "measured"
FLOORS = ("a copy of as many bytes", "its products alone")      # peers in `tests.bench.fused`
# Ampere, Ada, Hopper, Blackwell and its GeForce: bytes of shared memory that a program may have
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
TARGETS = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
           "sm_120": 99 << 10}
ON_PAGE, FP8_SINCE = ("sm_90", "sm_100"), 89
WARP = 32


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Counts are of instructions in the machine code, each once however often it runs."""

    kernel: str             # the row of KERNELS
    function: str
    way: str                # what its constants switch on, and the sides of what a program takes
    target: str
    registers: int          # of a thread
    stack_bytes: int        # of a thread; spills are there
    shared_bytes: int       # of a program
    warps: int
    wide_accesses: int      # global loads and stores of 128 bits
    narrow_accesses: int    # of less than 32, where a whole row of them would be slow
    fp8_conversions: int
    calls: int              # functions that may be called
    torn: int               # pairs converted to FP8 that are kept together and also taken apart


def compiled(*, quick: bool = False, targets: Collection[str] = ON_PAGE) -> Iterator[Compiled]:
    """`quick`: without `Proof.more_builds`. Raises ImportError without Triton."""
    for name, proof in PROOFS.items():
        for build in proof.builds + (() if quick else proof.more_builds):
            yield from (_compile(name, build, target) for target in targets if runs(build, target))


def runs(build: Build, target: str) -> bool:
    """Triton has no FP8 below 8.9, where no product takes it either (`techniques.hardware`)."""
    kinds = (*build.signature.values(), *build.constants.values())
    return _number(target) >= FP8_SINCE or not any(fp8_name in str(kind) for kind in kinds
                                                   for fp8_name in ("fp8", "e4m3", "e5m2"))


def _number(target: str) -> int:
    return int(target.removeprefix("sm_"))


def _compile(name: str, build: Build, target: str) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = build.kernel.arg_names
    signature = {arg: build.signature.get(arg, "constexpr") for arg in order}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(order)
               if arg in build.signature and arg not in build.unaligned}
    constants = {(order.index(arg),): value for arg, value in build.constants.items()}
    keep_privately()
    program = triton.compile(
        ASTSource(fn=build.kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", _number(target), WARP),
        options={"num_warps": build.warps, "num_stages": build.stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        usage, code = _dump("--dump-resource-usage", file.name), _dump("--dump-sass", file.name)
        called = re.findall(r"\$__internal_\d+_\$(\w+)", _dump("--dump-elf-symbols", file.name))
    instructions = Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\S+\s+)?([A-Z][\w.]*)",
                                      code, re.MULTILINE))

    def count(pattern: str) -> int:
        return sum(n for name, n in instructions.items() if re.match(pattern, name))

    return Compiled(
        kernel=name, function=build.kernel.__name__, way=_way(build), target=target,
        warps=build.warps,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared_bytes=program.metadata.shared,
        wide_accesses=count(r"(LDG|STG)\b.*\.128"),
        narrow_accesses=count(r"(LDG|STG)\b.*\.[US](8|16)\b"),
        fp8_conversions=count(r"F2FP.*E[45]M[23]"),
        # a CALL within a function is a jump; guardrails of tensor memory are there for an error
        calls=count(r"CALL\.ABS") + sum("guardrail" not in name for name in called),
        torn=_torn(program.asm["ptx"]))


def _torn(ptx: str) -> int:
    """Counts such pairs: ptxas 12.8 loses the first byte where one is taken apart (docs/log.md)."""
    lines = [line for line in ptx.splitlines() if "%rs" in line]
    pairs = re.findall(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32\s+(%rs\d+)", ptx)
    used = [[line for line in lines if re.search(rf"{pair}\b", line) and "satfinite" not in line]
            for pair in pairs]
    return sum(0 < sum(bool(re.search(r"mov\.b32\s+%r\d+, \{", line)) for line in each) < len(each)
               for each in used)


def _way(build: Build) -> str:
    on = [key.lower() for key, value in build.constants.items() if value is True]
    sides = [str(value) for key, value in build.constants.items()
             if key.startswith(("B", "TILE")) and type(value) is int]
    return ", ".join([*filter(None, [build.way]), *on, " x ".join(sides)])


def _dump(what: str, cubin: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout


PAGE = """# Kernels

The kit's own GPU kernels. Each file of `lpkit/kernels/` has one definition in PyTorch
operations and one Triton kernel. Tests compare both, forward and backward, in Triton's
interpreter. `python -m tests.pages kernels` makes this page.

## Bytes that each kernel moves

Any implementation must read and write these bytes in the forward pass, per element of a bfloat16
tensor of 16,384 x 4,096:

| kernel | what | case | bytes an element |
|---|---|---|---|
{moved}

The kit has no kernel for a norm that writes FP8, because the compiler does better. With
`system.compile` it computes the norm inside the amax and inside the cast and writes no 16-bit
result: forward moves 7 bytes per element (sums of squares 2, amax 2, cast 2 + 1), and backward
casts x.T again from the norm's input. Separate kernels for norm and cast move 8, x.T included. The
compiler does write the result of SwiGLU: 11 bytes in forward (4 + 2, amax 2, cast 2 + 1); kernels
move 10, x.T included. `tests/gpu/test_gpu_path.py` checks these numbers.

## Compiled code

Triton {version} compiled each kernel for Hopper (sm_90) and Blackwell (sm_100), without a GPU.

| column | meaning |
|---|---|
| `way` | enabled options, and the tile of a program |
| `registers`, `stack` | registers and bytes of stack of a thread; spills would use the stack |
| `shared`, `warps` | bytes of shared memory and warps of a program |
| `wide`, `narrow` | global loads and stores of 128 bits, and of 16 bits or less |
| `fp8` | conversions by the hardware's instruction |
| `calls` | calls of functions, such as the slow path of a division |
| `torn` | FP8 pairs that are used whole and also split; ptxas 12.8 loses a byte of such pairs \
([log](log.md)). Casts to FP8 have none |

Tests apply the same limits, and the limit of shared memory, to sm_80, sm_89 and sm_120. Casts
to FP8 need sm_89.

Flash attention's backward computes 7 matmuls although 5 would suffice, because each of its two
kernels recomputes the scores and d_out v^T. With 5 matmuls, tiles of keys would add to dq
atomically, so the order of the sum and the bits would change in each run. Heads of 256 use
wgmma on Hopper and tcgen05 on Blackwell in the forward pass. Their backward uses mma.sync on
both: the other instructions need 64 rows, and on Hopper tiles of this size spill
([log](log.md)).

{compiled}

## Measured on a GPU

{measured}
"""
NONE = "No GPU was measured yet: run `lpkit bench kernels --out data/measured` on a GPU."
COLUMNS = ("kernel", "function", "way", "target", "registers", "stack", "shared", "warps", "wide",
           "narrow", "fp8", "calls", "torn")


def _row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def moved() -> Iterator[str]:
    """A row of the page for each kernel and case."""
    for name, row in KERNELS.items():
        proof, what = PROOFS[name], row.why
        for case, arguments in proof.typical().items():
            each = proof.moved_bytes(*arguments) / arguments[0].numel()
            yield _row((f"`{name}`", what, case, f"{each:.2f}"))


def measured(folder: Path = MEASURED) -> Iterator[str]:
    """By recorded `lpkit bench kernels`: the share of the roofline, which is a copy of as many
    bytes or products alone, that each kernel reaches at each size; 20 blocks are all of it."""
    for path in sorted(folder.glob("kernels-*.json")):
        record = json.loads(path.read_text())
        if record["device"] == record["cpu"]:
            continue
        yield from (f"{record['device']}, {record['date'][:10]}, at commit {record['commit']}.", "",
                    _row(("case", "compared with", "share", "", "code since")),
                    _row(["---"] * 5))
        for case in record["cases"]:
            if case["peer"] in FLOORS:
                bar = "\N{FULL BLOCK}" * round(20 * min(case["ratio"], 1))
                since = code.changed(record, module_of(case["case"].partition(",")[0]))
                yield _row((case["case"], case["peer"], f"{case['ratio']:.2f}", bar,
                            "unknown" if since is None else "changed" if since else "same"))
        yield ""


def module_of(kernel: str) -> str:
    """Return the module of a kernel of `lpkit bench kernels`, below lpkit: "kernels.norm"."""
    row = KERNELS["cross-entropy" if kernel == "linear-cross-entropy" else kernel]
    return row.implementation.removeprefix("lpkit.").partition(":")[0]


def page(rows: list[Compiled]) -> str:
    table = [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(astuple(row)) for row in rows)]
    return PAGE.format(version=triton.__version__, moved="\n".join(moved()),
                       compiled="\n".join(table),
                       measured="\n".join(measured()).rstrip() or NONE)


def kernels_page() -> str:
    """docs/kernels.md."""
    return page(list(compiled()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, action="append")
    asked = parser.parse_args()
    rows = compiled(quick=True, targets=asked.target or ON_PAGE)
    print(json.dumps([asdict(compiled_kernel) for compiled_kernel in rows], indent=1))


if __name__ == "__main__":
    main()
