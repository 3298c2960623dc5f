"""Find out which techniques work on this machine: each check runs its technique on a tiny input.

The report has a row for each check. If a technique does not work, its row has the reason and an
alternative. If a check takes too long, its row says that the answer is unknown. To add a row, add a
`Check` to `CHECKS`: its `run` takes the device and returns a detail in words, or raises if the
technique does not work. `lpkit.measure.probes` runs this module in a separate process, because a
check may crash or hang.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lpkit import hardware
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.kernels import jit
from lpkit.kernels.choose import refused_here
from lpkit.machine_facts import versions
from lpkit.measure import attention, matrix
from lpkit.measure.probes import SECONDS, Check, UnavailableError, compare, probe
from lpkit.parallel.processes import Processes, WarmParent
from lpkit.techniques import FAMILIES
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.outside import OWN
from lpkit.techniques.row import TechniqueRow

# time limit of ranks and of compiled casts: less than a check's, so that they can give a reason
PROCESS_SECONDS = 0.8 * SECONDS
PROGRAM = "lpkit.measure.ranks:run"
FP8_SHAPES = ((256, 768), (1024, 1024), (4096, 512))


def _need(device: torch.device, kind: str, why: str) -> None:
    if device.type != kind:
        raise UnavailableError(why)


def _installed(package: str) -> None:
    if versions([package])[package] is None:
        raise UnavailableError(f"{package} is not installed")


# Precisions: a matmul of fixed operands is compared with the same matmul in float64.

def _operands(device: torch.device, size: int = 64) -> list[Tensor]:
    """Return two (size, size) matrices of multiples of 1/4 in [-1, 1], which each format below
    represents exactly."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-4, 5, (size, size), generator=generator).div(4).to(device)
            for _ in range(2)]


def _cast(dtype: torch.dtype, tolerance: float, device: torch.device) -> str:
    a, b = _operands(device)
    return compare("the product is wrong", [a.to(dtype) @ b.to(dtype).T],
                   [a.cpu().double() @ b.cpu().double().T], tolerance)


def _tf32(device: torch.device) -> str:
    _need(device, "cuda", "TF32 is a mode of NVIDIA tensor cores")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise UnavailableError("TF32 came with compute capability 8.0 (Ampere)")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return _cast(torch.float32, 1e-3, device)
    finally:
        torch.set_float32_matmul_precision(before)


def _triton(device: torch.device) -> str:
    _need(device, "cuda", "Triton compiles for GPUs; TRITON_INTERPRET=1 runs a kernel on a CPU to "
                          "check its numbers")
    _installed("triton")
    f = jit.compiled(lambda x: torch.relu(x) * 2 + 1)
    x = torch.linspace(-1, 1, 256, device=device)
    torch.testing.assert_close(f(x), torch.relu(x) * 2 + 1)
    return "torch.compile ran a Triton kernel"


def _versions(device: torch.device) -> str:
    """Report the kernel versions that `lpkit.kernels.choose` found to be wrong in earlier runs. The
    doctor tries none itself, because each try takes seconds."""
    if wrong := [f"{version} of {name}" for name, each in refused_here().items()
                 for version in each]:
        raise UnavailableError(f"wrong here, so no run uses them: {', '.join(wrong)}")
    return "no version of a kernel that a run has tried here is wrong"


def _fp8_stores(device: torch.device) -> str:
    _need(device, "cuda", "Triton's stores are tried, and nothing compiles with Triton for a CPU")
    _installed("triton")
    return fp8_stores(device)


def fp8_stores(device: torch.device,
               compiled: Callable[[Callable], Callable] = jit.compiled) -> str:
    """Compare a compiled clamp and cast to FP8 with PyTorch's, bit by bit. One compiled kernel
    stores the result both as it is and transposed, as FP8 training does. Raises UnavailableError if
    a bit differs.

    Triton miscompiles the transposed store if the kernel also has instructions that propagate NaN;
    torch generates these since June 2026. The error occurs only with some of the launch settings
    that the autotuner chooses by shape, so several shapes are tried.
    Source: https://github.com/triton-lang/triton/issues/11111, pytorch/ao#4652 and #4657.
    """
    draw, tried = torch.Generator().manual_seed(0), 0
    until = time.perf_counter() + PROCESS_SECONDS
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        def cast(x: Tensor, dtype: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
            top = torch.finfo(dtype).max
            rounded = (x.float() * 64).clamp(-top, top).to(dtype)
            return rounded, rounded.T.contiguous()

        run = compiled(cast)
        for shape in FP8_SHAPES:
            if tried and time.perf_counter() > until:
                break
            tried += 1
            x = torch.randn(shape, generator=draw).to(device, torch.bfloat16)
            for how, got, want in zip(("as it is", "transposed"), run(x), cast(x), strict=True):
                wrong = int((got.view(torch.uint8) != want.view(torch.uint8)).sum())
                if wrong:
                    nans = int(got.float().isnan().sum())
                    raise UnavailableError(
                        f"a compiled cast to {str(dtype).removeprefix('torch.')}, stored {how}, "
                        f"has {wrong:,} wrong values of {want.numel():,}, {nans:,} of them NaN: "
                        f"https://github.com/triton-lang/triton/issues/11111")
    return (f"{tried} of {2 * len(FP8_SHAPES)} compiled casts to E4M3 and E5M2 were tried and have "
            f"the bits of PyTorch's casts")


# Parallel modes: each runs in separate processes, so that a crash or a hang fails only its own row.

# the process that imports PyTorch once and forks the ranks; it lives until this process ends
_warm_parent = cache(WarmParent)


def _processes(program: str, backend: str, device: torch.device, world: int = 2) -> str:
    """Run one of `ranks.PROGRAMS` on `world` ranks; return a detail in words."""
    if backend == "nccl":
        _need(device, "cuda", "NCCL moves data between NVIDIA GPUs")
        if (gpus := torch.cuda.device_count()) < world:
            raise UnavailableError(f"it needs {world} GPUs, and this machine has {gpus}")
    with Processes(PROGRAM, {"program": program, "backend": backend}, world=world,
                   timeout_seconds=PROCESS_SECONDS, progress_seconds=PROCESS_SECONDS,
                   parent=_warm_parent()) as ranks:
        ranks.wait()
    return f"{world} processes; the numbers are those of one"


def attention_checks(*, imported: bool) -> list[Check]:
    """Return a check for each attention backend of lpkit, or, if `imported`, for each backend that
    imported modules added."""
    own = OWN["system.attention"]
    return [Check(name, "attention", partial(attention.check, name),
                  "" if name == "plain" else "plain")
            for name in ATTENTION if imported == (name not in own)]


CHECKS: tuple[Check, ...] = (
    Check("fp32", "precision", partial(_cast, torch.float32, 1e-5)),
    Check("tf32", "precision", _tf32, "fp32"),
    Check("bf16", "precision", partial(_cast, torch.bfloat16, 1e-2), "fp32"),
    Check("fp16", "precision", partial(_cast, torch.float16, 1e-2), "bf16"),
    *attention_checks(imported=False),
    Check("triton", "compiler", _triton, "system.kernels=reference"),
    Check("kernels", "compiler", _versions, "system.kernels=auto"),
    Check("fp8 stores", "compiler", _fp8_stores, "system.compile=false"),
    Check("gloo", "parallel", partial(_processes, "all-reduce", "gloo"), "one process"),
    Check("nccl", "parallel", partial(_processes, "all-reduce", "nccl"), "gloo"),
    Check("DDP", "parallel", partial(_processes, "DDP", "gloo"), "gradient accumulation"),
    Check("FSDP2", "parallel", partial(_processes, "FSDP2", "gloo"), "DDP"),
)


def machine() -> dict[str, Any]:
    """Return the facts that PyTorch reports about GPUs. Sizes are in bytes."""
    problem = hardware.why_no_gpu()
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    gpus = map(torch.cuda.get_device_properties, range(count))
    return {
        "gpus": [{"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}",
                  "memory_bytes": gpu.total_memory, "multiprocessors": gpu.multi_processor_count}
                 for gpu in gpus],
        "gpu_problem": problem or None, "cuda": torch.version.cuda, "hip": torch.version.hip}


def techniques() -> list[Check]:
    """Return a check for each row of each family, including rows of other packages. The check
    imports the row's implementation."""
    return [Check(f"{field}={name}", "technique", partial(_loaded, row))
            for field, table in FAMILIES.items() for name, row in table.items()]


def _loaded(row: TechniqueRow, device: torch.device) -> str:
    if not row.implementation:
        return "in the row itself"
    row.load()
    return row.implementation


# The process that makes the report

def speed(device: torch.device) -> dict[str, Any]:
    """Measure this machine's ceilings, and the precision that a run with precision=auto chooses by
    timing. `others` in the result is the share of the cores that other processes took meanwhile."""
    share, choice, here = hardware.others(), hardware.bf16_choice(device), hardware.machine(
        str(device))
    return {"chosen": {"precision": asdict(choice)}, "ceilings": {
        "bytes_per_second": here.bytes_per_second, "flops": here.flops, "others": share(),
        "fp8_without_fast_accumulation": here.details.get("fp8_without_fast_accumulation")}}


def _part(check: Check, device: torch.device) -> dict[str, Any]:
    """Run `check` and return its part of the report. A technique has a row only if it fails."""
    if check.kind == "speed":
        return speed(device)        # first, with PyTorch's default number of threads
    torch.set_num_threads(1)    # matmuls are tiny, so more threads would only wait for each other
    if check.kind != "technique":
        # start the parent of the ranks now: it imports PyTorch while other checks run
        with suppress(ConfigError):
            _warm_parent()
    outcome = probe(check, device)
    return {"probes": [asdict(outcome)] if outcome.kind != "technique" or not outcome.works else []}


def _main(writer: str, request: str) -> None:
    """Run the checks and write the parts of the report, one JSON line each, to the open file with
    the number `writer`. `request` is the JSON of `probes.answers`: device, imports, only."""
    wanted = json.loads(request)
    Config(imports=wanted["imports"])
    device = torch.device(wanted["device"] or hardware.usable())
    checks = [Check("speed", "speed", speed), *CHECKS, *attention_checks(imported=True),
              *techniques(), *matrix.checks().values()]
    checks = [check for check in checks if wanted["only"] is None or check.name in wanted["only"]]
    first = {"machine": machine(), "device": str(device),
             "checks": [(check.name, check.kind, check.nearest) for check in checks]}
    with open(int(writer), "w", encoding="utf-8") as out:
        for part in chain([first], (_part(check, device) for check in checks)):
            print(json.dumps(part), file=out, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
