"""Measure this machine: its memory, its highest speeds, and the dtype in which its matmuls are
fastest.

Values are bytes, FLOP/s and bytes/s, not rounded. A ceiling is the best of several tries, because
other processes on the machine can only make a try slower.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lpkit import machine_facts
from lpkit.contracts import Choice
from lpkit.machine_facts import cpu_name, memory_limit_bytes, status_bytes
from lpkit.techniques.machines import DTYPES as RATES
from lpkit.techniques.machines import Machine
from lpkit.timing import interleaved_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# format -> the least compute capability of NVIDIA GPUs with matmul instructions for it
LOW = {"fp8": (8, 9), "int8": (7, 5)}
LEAST = (7, 0)              # least compute capability for Triton
CLEAR_REFS = Path("/proc/self/clear_refs")
RAPL = Path("/sys/class/powercap")
SMALL_FLOPS = 1e8           # FLOPs of a matmul that takes one core about a millisecond
BUSY_SHARE = 0.25           # if other processes use a larger share of the cores: one thread
# the fields of psutil.cpu_times in which a core is busy
WORKING = ("user", "nice", "system", "irq", "softirq", "steal")
SLOW_SECONDS = 2.0          # matmuls that would take longer are not measured
# highest credible ratio of the speeds in bf16 and fp32 on a CPU; AMX has 16 times the FLOP/s of
# AVX-512
MOST_SPEEDUP = 32
PROBE = 256                 # rows and columns of the first matmul, which estimates the speed


def bf16_choice(device: torch.device | str, *, size: int = 512, rounds: int = 50) -> Choice:
    """Returns the dtype of matmuls under `precision.recipe=auto`, "bf16" or "fp32", and the reason.

    On a GPU, the compute capability decides: tensor cores multiply bf16 from 8.0 (Ampere) on. On a
    CPU, a race of (size, size) matmuls decides, because some CPUs emulate bf16 at a tenth of the
    speed. The race compares CPU times of one thread, not wall-clock times: while other processes
    ran, ratios of wall-clock times were 2 to 31 on a machine where the true ratio is 2.
    """
    device = torch.device(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        used, why = (("bf16", "has bf16 tensor cores") if major >= 8 else
                     ("fp32", "has no bf16 tensor cores, they came with 8.0"))
        return Choice(asked="auto", used=used, why=f"compute capability {major}.{minor} {why}")
    products = [product((size, size), (size, size), dtype, device) for dtype in DTYPES]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fp32, bf16 = interleaved_seconds(products, rounds=rounds, within_seconds=0.25,
                                         clock=time.thread_time)
    finally:
        torch.set_num_threads(threads)
    ratio = min(fp32) / max(min(bf16), 1e-9)
    return Choice(asked="auto", used="bf16" if 1.1 < ratio <= MOST_SPEEDUP else "fp32",
                  why=f"a {size} x {size} matmul in bf16 ran at {ratio:.2f}x the speed of fp32 on "
                  f"one thread of this {device.type}, by the best CPU time of {len(fp32)} rounds; "
                  f"bf16 is used above 1.1x, and a ratio above {MOST_SPEEDUP}x is not believed")


def threads_choice(requested: int | None, device: torch.device, *, flops: float,
                   before: str | None = None, processes: int = 1) -> Choice:
    """Returns the number of threads of a run on the CPU, and the reason. On a GPU, it is PyTorch's
    number.

    flops:     FLOPs of the run's largest matmul
    before:    number of threads with which a resumed run began. It is kept, because with another
               number, sums are added in another order and round differently
    processes: number of processes that share the cores

    Why one thread can be best: threads wait for each other in a busy loop after every operation. If
    matmuls are small, or if other processes use the cores, an update with all threads takes up to
    ten times as long as with one thread.
    """
    allowed = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    most = min(max(1, machine_facts.cores() // processes),
               int(allowed) if allowed.isdigit() else sys.maxsize)

    def used(threads: int | str, why: str) -> Choice:
        return Choice(asked=str(requested or "auto"), used=str(threads), why=why)

    if requested:
        return used(requested, "requested")
    if before:
        return used(before, "as when this run began")
    if device.type != "cpu":
        return used(torch.get_num_threads(), f"{device.type} computes")
    if most == 1:
        shared = f"; {processes} processes share {machine_facts.cores()}" if processes > 1 else ""
        return used(1, f"this process may use one core{shared}")
    if flops < SMALL_FLOPS:
        return used(1, f"the largest matmul has {flops / 1e6:.0f} MFLOPs; below "
                       f"{SMALL_FLOPS / 1e6:.0f} MFLOPs, threads wait longer than they compute")
    share = others()
    time.sleep(0.1)
    busy = share()
    if busy > BUSY_SHARE:
        return used(1, f"other processes use {busy:.0%} of the cores, and all threads would wait "
                       f"for the slowest thread; system.threads={most} overrides this")
    return used(most, f"other processes use {busy:.0%} of the cores")


def others() -> Callable[[], float]:
    """Returns a function that measures the load by other processes. Each call returns the share (0
    to 1) of this process's cores that other processes used since `others` was called. Children of
    this process do not count as other processes; time that the host takes from a virtual machine
    does."""
    def busy() -> float:
        """Total seconds in which the cores of this process were busy, for any process."""
        each = psutil.cpu_times(percpu=True)
        spent = (each[core] for core in cores if core < len(each))
        return sum(getattr(times, field, 0.0) for times in spent for field in WORKING)

    def ours() -> float:
        """CPU seconds of this process and of its children, including children that have ended."""
        me = psutil.Process()
        spent = time.process_time() + sum(me.cpu_times()[2:4])
        for child in me.children(recursive=True):
            with contextlib.suppress(psutil.Error):     # the child ended meanwhile
                spent += sum(child.cpu_times()[:4])
        return spent

    on_linux = sys.platform == "linux"
    cores = psutil.Process().cpu_affinity() if on_linux else range(psutil.cpu_count())
    began, before = time.perf_counter(), busy() - ours()

    def share() -> float:
        theirs = busy() - ours() - before
        return min(1.0, max(0.0, theirs / (time.perf_counter() - began) / len(cores)))

    return share


def peak_bytes(device: torch.device | str) -> int:
    """Return the peak memory in bytes since the process began, or since the last `reset_peak`,
    which a run calls when it starts. A call is cheap enough for every step.

    On a GPU, the peak counts the tensors in PyTorch's allocator. On other devices, it counts the
    RAM of the whole process (VmHWM on Linux), which includes about 300 MB of Python and its
    libraries.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # tried before getrusage, whose maximum includes the memory of the parent process before fork
    if (peak := status_bytes("VmHWM")) is not None:
        return peak
    import resource  # only Unix has it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def held_bytes(device: torch.device | str) -> int | None:
    """Returns the bytes that are in use now; `peak_bytes` is their maximum over time. None if the
    system does not report them."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    return status_bytes("VmRSS")


def reset_peak(device: torch.device | str) -> bool:
    """Reset the maximum that `peak_bytes` returns to the bytes that are in use now. Returns False
    if the system does not allow the reset."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")   # "reset the peak resident set size", proc(5)
    except OSError:
        return False
    return True


def energy_joules(device: torch.device | str) -> tuple[float, str] | None:
    """Returns (joules, source): the reading of an energy counter, and the name of the counter. None
    if the device has no counter. The counter starts at an arbitrary value, so only the difference
    of two readings has a meaning.

    A GPU is read by NVML (package nvidia-ml-py, Volta and later), a CPU by RAPL, if this user may
    read it.
    """
    device = torch.device(device)
    try:
        if device.type == "cuda":
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            return joules, "NVML's counter, this GPU alone"
        counters = [int(path.read_text()) for path in RAPL.glob("intel-rapl:?/energy_uj")]
    except Exception:   # no library, driver, counter or permission: each raises another error
        return None
    if device.type != "cpu" or not counters:
        return None
    return sum(counters) / 1e6, "RAPL's counters, all packages, whatever ran on them"


def machine(device: str | None = None) -> Machine:
    """Returns this machine as a row of the catalogue of machines, with measured ceilings: the
    FLOP/s of the fastest matmul in each dtype, and the bytes/s of the fastest memory sweep. On a
    GPU, these are lower than the figures of the datasheet. The measurement takes less than 3 s; its
    result is cached for the process and its number of threads."""
    return _machine(device or usable(), torch.get_num_threads())


def usable() -> str:
    """Returns the device that runs can use on this machine: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.device_count() and not why_no_gpu() else "cpu"


def why_no_gpu(index: int | None = None) -> str:
    """Returns the reason why no run can use the GPU `index` (None: the current GPU), as one clause;
    empty if runs can use it. If PyTorch refuses the GPU, the reason is PyTorch's message, which
    `is_available` and `device_count` would only print as a warning, once per process."""
    try:
        torch.cuda.init()
        # creates a CUDA context, which fails if other processes use all memory of the GPU
        torch.cuda.mem_get_info(index)
        about = torch.cuda.get_device_properties(index)
    except Exception as error:      # AssertionError, RuntimeError, or a CUDA error
        return str(error).partition("\n")[0].rstrip(". ")
    if torch.version.hip:
        return ""
    built, has = torch.cuda.get_arch_list(), 10 * about.major + about.minor
    why = f"{about.name} has compute capability {about.major}.{about.minor}, and "
    if built and not any(_made_for(architecture, has) for architecture in built):
        return (f"{why}PyTorch {torch.__version__} is built for {', '.join(built)}; install a "
                f"build that has it (https://pytorch.org)")
    return "" if (about.major, about.minor) >= LEAST else f"{why}Triton needs 7.0"


def _made_for(architecture: str, has: int) -> bool:
    """Returns True if code that was compiled for `architecture` runs on compute capability `has`.
    Machine code (sm_80) runs on the same and later minor versions of its major version; PTX
    (compute_80) also runs on later major versions; the suffix `a` means exactly this version."""
    kind, _, number = architecture.partition("_")
    capability = int(number.rstrip("af"))
    return capability == has or (capability < has and number[-1] != "a"
                                 and (kind == "compute" or capability // 10 == has // 10))


@functools.cache
def _machine(device: str, threads: int) -> Machine:
    """Measure the ceilings for `machine`. threads: PyTorch's current number of threads."""
    on, details = torch.device(device), {}
    flops = {name: peak_flops(name, device, threads) for name in (*DTYPES, *low_formats(on))}
    if "fp8" in flops:      # Hopper adds all products in float32 only without fast accumulation
        details["fp8_without_fast_accumulation"] = peak_flops("fp8", device, threads, fast=False)
    sweep, swept = triad(on)
    (seconds,) = interleaved_seconds([sweep], rounds=9, within_seconds=0.35)
    if on.type == "cuda":
        kind, title = "gpu", torch.cuda.get_device_name(on)
        details["capability"] = torch.cuda.get_device_capability(on)
    else:
        kind, title, details["threads"] = "cpu", cpu_name(), threads
    return Machine(
        name="this", title=title, kind=kind, memory_bytes=memory_bytes(on),
        bytes_per_second=swept / min(seconds), flops=flops, price_source="unknown: pass "
        "price_per_hour", source=f"measured here, torch {torch.__version__}", details=details)


def low_formats(device: torch.device) -> tuple[str, ...]:
    """Returns the formats of LOW for which this device has matmul instructions."""
    if device.type != "cuda" or torch.version.hip:
        return ()
    return tuple(name for name, least in LOW.items()
                 if torch.cuda.get_device_capability(device) >= least)


def multiplies_tiles() -> bool:
    """Returns True if PyTorch multiplies bf16 by the tile instructions of this CPU (AMX).
    Environment variables such as ATEN_CPU_CAPABILITY can switch them off."""
    path = torch.backends.cpu.get_cpu_capability()
    return torch.cpu._is_amx_tile_supported() and path not in ("DEFAULT", "AVX2")


@functools.cache
def peak_flops(dtype: str, device: str, threads: int, *, fast: bool = True) -> float:
    """Returns the FLOP/s of the fastest square matmul in a dtype of DTYPES or LOW. Takes less than
    a second, once per process and number of threads. `threads` must be PyTorch's current number.
    `fast`: fast accumulation of FP8."""
    return max(2 * n**3 / min(*interleaved_seconds([square], rounds=9, within_seconds=0.35))
               for n, square in squares(dtype, torch.device(device), fast=fast).items())


def squares(dtype: str, device: torch.device, *,
            fast: bool = True) -> dict[int, Callable[[], object]]:
    """Returns functions that multiply two (n, n) matrices, by n. Leaves out sizes that would take
    more than SLOW_SECONDS.

    A CPU with only AVX2 multiplies bf16 one number at a time, at a hundredth of the speed of
    float32. On such a CPU, the kit converts the operands to float32 (`kernels.wide_product`), and
    the returned functions do the same."""
    if device.type == "cuda":
        return {n: product((n, n), (n, n), dtype, device, fast=fast) for n in (4096, 8192)}
    tried = interleaved_seconds(ways((PROBE, PROBE), (PROBE, PROBE), dtype, device), rounds=9,
                                within_seconds=0.1)
    seconds, way = min((min(each), way) for way, each in enumerate(tried))
    sizes = [n for n in (1024, 2048) if seconds * (n / PROBE)**3 < SLOW_SECONDS] or [PROBE]
    return {n: ways((n, n), (n, n), dtype, device)[way] for n in sizes}


def ways(left: tuple[int, ...], right: tuple[int, ...], dtype: str,
         device: torch.device) -> list[Callable[[], object]]:
    """Returns functions that compute the same matmul of shapes `left` and `right`: directly, and
    for bf16 on a CPU also with operands that are converted to float32."""
    if dtype != "bf16" or device.type == "cuda":
        return [product(left, right, dtype, device)]
    x, y = _drawn(left, device).bfloat16(), _drawn(right, device).bfloat16()
    return [product(left, right, dtype, device), lambda: (x.float() @ y.float()).bfloat16()]


def product(left: tuple[int, ...], right: tuple[int, ...], dtype: str, device: torch.device, *,
            fast: bool = True) -> Callable[[], object]:
    """Returns a function that multiplies two matrices of shapes `left` (M, K) and `right` (K, N).
    Their elements are normally distributed, because zeros and ones take less power, so that a GPU
    would run at higher clocks than in training. In fp8 and int8, the right operand is stored column
    by column, as tensor cores need it. `fast`: fast accumulation of FP8."""
    x, y = _drawn(left, device), _drawn(right, device)
    if dtype == "int8":
        x, y = ((32 * t).round().clamp(-127, 127).to(torch.int8) for t in (x, y.mT.contiguous()))
        return synchronised(lambda: torch._int_mm(x, y.mT), device)
    if dtype == "fp8":
        x, y = (t.to(torch.float8_e4m3fn) for t in (x, y.mT.contiguous()))
        unit_scale = torch.ones((), device=device)
        return synchronised(lambda: torch._scaled_mm(
            x, y.mT, unit_scale, unit_scale, out_dtype=torch.bfloat16, use_fast_accum=fast), device)
    x, y = x.to(DTYPES[dtype]), y.to(DTYPES[dtype])
    return synchronised(lambda: x @ y, device)


def _drawn(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns normally distributed float32 numbers. They come from a separate generator, because a
    measurement must not change the random numbers of a run."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)


def triad(device: torch.device) -> tuple[Callable[[], object], int]:
    """Returns (function, bytes): the triad a = b + s c of the STREAM benchmark, over arrays that
    are larger than all caches, and the bytes that a call moves (it reads two arrays and writes one
    array)."""
    a, b, c = _drawn((3, 2**28 if device.type == "cuda" else 2**24), device)
    return synchronised(lambda: torch.add(b, c, alpha=3.0, out=a), device), 3 * a.nbytes


def provenance(device: torch.device | str) -> dict[str, Any]:
    """Returns the versions and settings on which the speed of a GPU depends: CUDA, cuDNN, HIP,
    driver, power limit, clocks. Leaves out unknown values. Empty for other devices."""
    if torch.device(device).type != "cuda":
        return {}
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
             "hip": torch.version.hip}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    known = {name: version for name, version in versions.items() if version}
    return known | machine_facts.gpu_facts(f"GPU-{uuid}")


def memory_bytes(device: torch.device | str) -> int:
    """Returns the memory in bytes: of the GPU, or else the RAM, or the limit of this process's
    container, if it is lower."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory_limit_bytes() or psutil.virtual_memory().total


def available_bytes(device: torch.device | str) -> int:
    """Returns the bytes that a run can still allocate. On a GPU: the driver's free bytes, and the
    bytes that PyTorch's allocator has reserved and does not use. Elsewhere:
    `machine_facts.available_bytes`."""
    if torch.device(device).type != "cuda":
        return machine_facts.available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused


def others_bytes(device: torch.device | str) -> int:
    """Returns the bytes of a GPU that other processes and all CUDA contexts use (a context uses
    about half a GiB). 0 for other devices."""
    if torch.device(device).type != "cuda":
        return 0
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free - torch.cuda.memory_reserved(device)


def room(device: torch.device | str, processes: int = 1) -> Machine:
    """Return this device as a Machine whose memory is what a run can still allocate, for checks of
    whether a run fits. `processes` share the memory of a CPU.

    Its speeds are invented round numbers, which are used only to sort techniques. On a CPU with
    AMX, fp32 has a tenth of the speed of the other dtypes."""
    device = torch.device(device)
    return Machine(
        name="room", title=str(device), kind="gpu" if device.type == "cuda" else "cpu",
        memory_bytes=available_bytes(device) // (processes if device.type == "cpu" else 1),
        bytes_per_second=2e12, link_bytes_per_second=1e11, network_bytes_per_second=1e11,
        flops=dict.fromkeys(RATES, 5e14) | {"fp32": 5e13 if multiplies_tiles() else 5e14},
        source="what is left of this machine's memory")


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or else of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def now(device: torch.device) -> float:
    """Waits until the device has finished its work. Returns the time of a clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def synchronised(runner: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Returns a function that calls `runner` and waits until the device has finished its work."""
    if device.type != "cuda":
        return runner

    def run() -> None:
        runner()
        torch.cuda.synchronize(device)

    return run
