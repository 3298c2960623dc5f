"""The operating system's words of this machine: the one reader of /proc and of cgroups.

What torch must be asked is in `lpkit.hardware`, and psutil where its facts are used.
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
# A person limits a CPU's paths by these: oneDNN, MKL and PyTorch are other programs then.
CPU_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR",
              "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
CONTAINER_USE = (Path("/sys/fs/cgroup/memory.current"),
                 Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


def cpu_facts() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; empty where there is no such file."""
    facts: dict[str, str] = {}
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts


def cpu_name() -> str:
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Instruction sets: "flags" on x86, "Features" on ARM."""
    facts = cpu_facts()
    return set(facts.get("flags", facts.get("Features", "")).split())


def cpu_limits() -> list[str]:
    """The limits on the CPU's paths that are set here, as a shell sets them."""
    return [f"{name}={os.environ[name]}" for name in CPU_LIMITS if name in os.environ]


def cores() -> int:
    """The cores that this process may use. A container often allows fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> int:
    """NVIDIA's, that this process may use; found without loading a driver, on Linux alone. Of
    CUDA_VISIBLE_DEVICES CUDA takes those before the first that is none."""
    here = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(here))))
    there = itertools.takewhile(
        lambda one: one and one[0] != "-" and not (one.isdigit() and int(one) >= here),
        map(str.strip, visible.split(",")))
    return min(here, len(list(there)))


def memory_limit_bytes() -> int | None:
    """Returns what the container allows, or None without a limit below the machine's own memory."""
    for path in CONTAINER_LIMITS:
        text = _read(path).strip()
        if text.isdigit() and int(text) < psutil.virtual_memory().total:
            return int(text)
    return None


def available_bytes() -> int:
    """Returns what this process can still take: of the machine, its container, its own limits.

    Free swap counts, and so do pages of files, which give way; what others hold does not.
    """
    swap = psutil.swap_memory().free
    left = [psutil.virtual_memory().available + swap]
    for path, used in zip(CONTAINER_LIMITS, CONTAINER_USE):
        limit = _read(path).strip()
        if limit.isdigit():
            words = _read(path.with_name("memory.stat")).split()
            stat = dict(zip(words[::2], words[1::2]))
            pages = sum(int(stat.get(f"total_{name}", stat.get(name, 0)))   # version 1: total_
                        for name in ("active_file", "inactive_file"))
            left.append(int(limit) - int(_read(used) or 0) + pages + swap)
    try:
        import resource  # Unix alone has it
    except ImportError:
        return max(0, min(left))
    for limit, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY:
            left.append(allowed - (status_bytes(field) or 0))
    return max(0, min(left))


def status_bytes(field: str, pid: int | str = "self") -> int | None:
    """An entry of /proc/PID/status in bytes, such as VmHWM; None where the system has none."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


SMI = {"driver": "driver_version", "power_limit_watts": "enforced.power.limit",
       "sm_clock_mhz": "clocks.sm", "most_sm_clock_mhz": "clocks.max.sm",
       "memory_clock_mhz": "clocks.mem"}


def gpu_facts(uuid: str) -> dict[str, str | float]:
    """Driver, power limit and clocks of the GPU, as nvidia-smi says; empty where it does not."""
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(SMI.values())}",
               "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        driver, *numbers = said.stdout.strip().split(", ")
        found = zip(list(SMI)[1:], numbers, strict=True)
        return {"driver": driver, **{name: float(one) for name, one in found if "N/A" not in one}}
    except (OSError, ValueError, subprocess.SubprocessError):   # no program, no driver, no right
        return {}


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Returns the versions of Python packages, by name; None where one is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
