"""What this machine can do, found by doing it: each row runs its technique on a tiny input, here
and now.

A row that does not work says why, in the library's own words where it has some, and names the
nearest thing that does; one without an answer in time is not known. To add a row, add a `Check` to
`CHECKS`: its `run` takes the device, returns a detail and raises when it cannot. What may crash or
hang (processes that talk to each other, the recipes of `matrix`) runs in its own process.
"""

import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lpkit import hardware
from lpkit.kernels import defects, jit
from lpkit.kernels.choose import refused_here
from lpkit.machine_facts import cores, cpu_flags, cpu_name, memory_limit_bytes, versions
from lpkit.measure import attention, matrix
from lpkit.measure.probes import Check, Probe, UnavailableError, compare, probe
from lpkit.parallel.processes import Processes, WarmParent
from lpkit.techniques import FAMILIES
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.row import Row

LIBRARIES = ("torch", "triton", "flash-attn", "transformer-engine", "torchao", "liger-kernel",
             "accelerate", "safetensors", "tokenizers", "transformers", "datasets", "jupyterlab",
             "ipywidgets", "plotly", "nbclient", "nvidia-ml-py", "numpy")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16",
                "amx_int8", "amx_fp16", "asimd", "bf16", "i8mm", "sve")
PROCESS_SECONDS = 60.0
PROGRAM = "lpkit.measure.ranks:run"
FP8_SHAPES = ((256, 768), (1024, 1024), (4096, 512))


def _need(device: torch.device, kind: str, why: str) -> None:
    if device.type != kind:
        raise UnavailableError(why)


def _installed(package: str) -> None:
    if versions([package])[package] is None:
        raise UnavailableError(f"{package} is not installed")


# Precisions: a matrix product of known operands against the same product in float64.

def _operands(device: torch.device, size: int = 64) -> list[Tensor]:
    """Two of (size, size), multiples of 1/4 in [-1, 1]: every format below holds them exactly."""
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


def _interpreter(device: torch.device) -> str:
    _installed("triton")
    if "did not end" in (found := "; ".join(defects.defects())):
        raise TimeoutError(found)
    return found or "right wherever it was tried"


def _versions(device: torch.device) -> str:
    """Reports what `lpkit.kernels.choose` found in the runs so far; new tries take seconds each."""
    if wrong := refused_here():
        raise UnavailableError("refused here: " + "; ".join(
            f"{version} of {name} {why}" for name, each in wrong.items()
            for version, why in each.items()))
    return "no version of a kernel that a run has tried here is wrong"


def _fp8_stores(device: torch.device) -> str:
    _need(device, "cuda", "Triton's stores are tried, and nothing compiles with Triton for a CPU")
    _installed("triton")
    return fp8_stores(device)


def fp8_stores(device: torch.device,
               compiled: Callable[[Callable], Callable] = jit.compiled) -> str:
    """A clamp and a cast, stored as it is and transposed by one compiled kernel, as FP8 training
    does, bit for bit against PyTorch. Triton miscompiles the transposed store beside instructions
    that propagate NaN, which torch generates since June 2026; whether it does depends on the launch
    that was tuned, so several shapes are tried.
    Source: https://github.com/triton-lang/triton/issues/11111, pytorch/ao#4652 and #4657.
    """
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        def cast(x: Tensor, dtype: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
            top = torch.finfo(dtype).max
            made = (x.float() * 64).clamp(-top, top).to(dtype)
            return made, made.T.contiguous()

        run = compiled(cast)
        for shape in FP8_SHAPES:
            x = torch.randn(shape, generator=draw).to(device, torch.bfloat16)
            for how, got, want in zip(("as it is", "transposed"), run(x), cast(x), strict=True):
                wrong = int((got.view(torch.uint8) != want.view(torch.uint8)).sum())
                if wrong:
                    nans = int(got.float().isnan().sum())
                    raise UnavailableError(
                        f"a compiled cast to {str(dtype).removeprefix('torch.')}, stored {how}, "
                        f"has {wrong:,} wrong values of {want.numel():,}, {nans:,} of them NaN: "
                        f"https://github.com/triton-lang/triton/issues/11111")
    return f"compiled casts to E4M3 and E5M2 of {len(FP8_SHAPES)} shapes are PyTorch's own bits"


# Parallel modes: each in processes of its own, so that a crash or a hang is a row.

_warm_parent = cache(WarmParent)      # until this process ends


def _processes(program: str, backend: str, device: torch.device, world: int = 2) -> str:
    """Run one of `ranks.PROGRAMS` as `world` ranks."""
    if backend == "nccl":
        _need(device, "cuda", "NCCL moves data between NVIDIA GPUs")
        if (here := torch.cuda.device_count()) < world:
            raise UnavailableError(f"it takes {world} GPUs, and {here} is here")
    with Processes(PROGRAM, {"program": program, "backend": backend}, world=world,
                   timeout_seconds=PROCESS_SECONDS, progress_seconds=PROCESS_SECONDS,
                   parent=_warm_parent()) as ranks:
        ranks.wait()
    return f"{world} processes; the numbers are those of one"


CHECKS: tuple[Check, ...] = (
    Check("fp32", "precision", partial(_cast, torch.float32, 1e-5)),
    Check("tf32", "precision", _tf32, "fp32"),
    Check("bf16", "precision", partial(_cast, torch.bfloat16, 1e-2), "fp32"),
    Check("fp16", "precision", partial(_cast, torch.float16, 1e-2),
          "bf16, which needs no loss scaling"),
    *(Check(name, "attention", partial(attention.check, name),
            "" if name == "plain" else "plain, the definition")
      for name in ATTENTION),
    Check("triton", "compiler", _triton,
          "plain PyTorch, which every kernel of the kit has beside it"),
    Check("triton interpreter", "compiler", _interpreter, "the definition in PyTorch"),
    Check("kernels", "compiler", _versions, "what is right runs in its place"),
    Check("fp8 stores", "compiler", _fp8_stores,
          "system.compile=false, or precision.recipe=bf16"),
    Check("gloo", "parallel", partial(_processes, "all-reduce", "gloo"), "one process"),
    Check("nccl", "parallel", partial(_processes, "all-reduce", "nccl"),
          "gloo: the same program, on CPUs"),
    Check("DDP", "parallel", partial(_processes, "DDP", "gloo"),
          "one process, with gradient accumulation"),
    Check("FSDP2", "parallel", partial(_processes, "FSDP2", "gloo"), "DDP"),
)


# The machine

def machine() -> dict[str, Any]:
    """Returns what was found, without trying anything. Sizes are bytes."""
    flags, memory = cpu_flags(), psutil.virtual_memory()
    driver, problem = Path("/sys/module/nvidia/version"), hardware.why_no_gpu()
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    gpus = map(torch.cuda.get_device_properties, range(count))
    return {"os": platform.platform(), "python": platform.python_version(), "cpu": cpu_name(),
            "cpu_features": [name for name in CPU_FEATURES if name in flags],
            "cores": cores(), "memory_bytes": memory.total,
            "memory_available_bytes": memory.available, "memory_limit_bytes": memory_limit_bytes(),
            "gpus": [{"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}",
                      "memory_bytes": gpu.total_memory,
                      "multiprocessors": gpu.multi_processor_count} for gpu in gpus],
            "gpu_problem": problem or None,
            "driver": driver.read_text().strip() if driver.exists() else None,
            "cuda": torch.version.cuda, "hip": torch.version.hip,
            "libraries": versions(LIBRARIES)}


def techniques() -> list[Probe]:
    """Checks that the implementation of every row, also from outside, can be imported here."""
    return [probe(Check(f"{field}={name}", "technique", partial(_loaded, row)), torch.device("cpu"))
            for field, table in FAMILIES.items() for name, row in table.items()]


def _loaded(row: Row, device: torch.device) -> str:
    if not row.implementation:
        return "in the row itself"
    row.load()
    return row.implementation


def examine(checks: Iterable[Check] = CHECKS, *, recipes: bool = True) -> dict[str, Any]:
    """The whole report, JSON-ready: the machine, the device that was tried, a row for each check and
    for every precision recipe with every backend, and which dtype a run takes here by itself. That
    bf16 works says nothing of its speed, so that choice comes from a race.

    Checks of kind `parallel` and `recipes` start processes, each with a torch of its own: some GB
    for some seconds.
    """
    device = torch.device(hardware.usable())
    choice, here = hardware.bf16_choice(device), hardware.machine(str(device))  # while all is quiet
    with ThreadPoolExecutor(1) as beside:       # it waits for a process of its own
        pairs = beside.submit(matrix.probes, device) if recipes else None
        probes = [probe(check, device) for check in checks]
        probes += [found for found in techniques() if not found.works]
    return {"machine": machine(), "device": str(device),
            "probes": list(map(asdict, [*probes, *(pairs.result() if pairs else ())])),
            "ceilings": {
                "bytes_per_second": here.bytes_per_second, "flops": here.flops,
                "fp8_without_fast_accumulation": here.details.get("fp8_without_fast_accumulation")},
            "chosen": {"precision": asdict(choice)}}
