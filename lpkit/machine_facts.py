"""Facts about this machine from the operating system. Only this module reads /proc and cgroups.

Facts from torch are in `lpkit.hardware`; facts from psutil are read where they are used.
Sources: proc(5); https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

import itertools
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import psutil

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"),
                    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# environment variables that limit which CPU instructions oneDNN, MKL and PyTorch use
CPU_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR",
              "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
CONTAINER_USE = (Path("/sys/fs/cgroup/memory.current"),
                 Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


def cpu_facts() -> dict[str, str]:
    """Returns the entries of the first processor in /proc/cpuinfo; empty without this file."""
    facts: dict[str, str] = {}
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts


def cpu_name() -> str:
    """Return the processor's name, such as "AMD EPYC 9654"."""
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Returns the instruction sets of the processor, such as avx2: the entry "flags" of
    /proc/cpuinfo on x86, "Features" on ARM."""
    facts = cpu_facts()
    return set(facts.get("flags", facts.get("Features", "")).split())


def cpu_limits() -> list[str]:
    """Returns the variables of CPU_LIMITS that are set in this process, as NAME=VALUE."""
    return [f"{name}={os.environ[name]}" for name in CPU_LIMITS if name in os.environ]


def cores() -> int:
    """Returns the number of cores that this process may use. In a container, it is often lower than
    the number of cores of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use. Does not load the driver; works
    on Linux only. Counts the entries of CUDA_VISIBLE_DEVICES up to the first invalid entry, as CUDA
    does."""
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    valid = itertools.takewhile(
        lambda entry: entry and entry[0] != "-" and not (entry.isdigit() and int(entry) >= count),
        map(str.strip, visible.split(",")))
    return min(count, len(list(valid)))


def memory_limit_bytes() -> int | None:
    """Returns the container's memory limit; None if there is none below the machine's memory."""
    for path in CONTAINER_LIMITS:
        text = _read(path).strip()
        if text.isdigit() and int(text) < psutil.virtual_memory().total:
            return int(text)
    return None


def available_bytes() -> int:
    """Returns the bytes that this process can still allocate: the minimum over the machine, the
    container and the resource limits (ulimit) of the process.

    Free swap counts as available. Cached pages of files count, too, because the system can drop
    them.
    """
    swap = psutil.swap_memory().free
    left = [psutil.virtual_memory().available + swap]
    for path, used in zip(CONTAINER_LIMITS, CONTAINER_USE):
        limit = _read(path).strip()
        if limit.isdigit():
            words = _read(path.with_name("memory.stat")).split()
            stat = dict(zip(words[::2], words[1::2]))
            pages = sum(int(stat.get(f"total_{name}", stat.get(name, 0)))   # cgroup v1: total_
                        for name in ("active_file", "inactive_file"))
            left.append(int(limit) - int(_read(used) or 0) + pages + swap)
    try:
        import resource  # only Unix has it
    except ImportError:
        return max(0, min(left))
    for limit, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY:
            left.append(allowed - (status_bytes(field) or 0))
    return max(0, min(left))


def status_bytes(field: str, pid: int | str = "self") -> int | None:
    """Returns an entry of /proc/PID/status in bytes, such as VmHWM; None if there is none."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


# our name -> the name in nvidia-smi --query-gpu
SMI = {"driver": "driver_version", "power_limit_watts": "enforced.power.limit",
       "sm_clock_mhz": "clocks.sm", "most_sm_clock_mhz": "clocks.max.sm",
       "memory_clock_mhz": "clocks.mem"}


def gpu_facts(uuid: str) -> dict[str, str | float]:
    """Returns the driver, power limit and clocks of a GPU from nvidia-smi; empty if it fails."""
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(SMI.values())}",
               "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        driver, *numbers = done.stdout.strip().split(", ")
        values = zip(list(SMI)[1:], numbers, strict=True)
        return {"driver": driver,
                **{name: float(value) for name, value in values if "N/A" not in value}}
    except (OSError, ValueError, subprocess.SubprocessError):   # no program, driver or permission
        return {}


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Returns the versions of Python packages by name; None for a package that is not installed."""
    installed: dict[str, str | None] = {}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def _read(path: Path) -> str:
    """Return the text of a file, or the empty text if the file cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
