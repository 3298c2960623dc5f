"""What a device can do at best: memory, bandwidth, arithmetic, links, power, price. Per device, not
per server.

Bytes, bytes/s, FLOP/s, watts. Arithmetic is dense (datasheets like to print twice as much, "with
sparsity") and accumulates in float32; 8- and 4-bit rates count operations. Links are the
datasheet's figure, both directions together; the network between nodes is a device's share, one
direction. Prices and networks are assumptions, not quotations: pass your own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lpkit.errors import ConfigError, nearest

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
GB, T = 10**9, 10**12
PRICE_SOURCE = "assumed: a round on-demand price per GPU and hour in 2025; change it with price_per_hour"
LINK_SECONDS, NETWORK_SECONDS = 3.4e-6, 14e-6
LATENCY_SOURCE = ("a hop of a ring: NCCL's own figures for its simple protocol, "
                  "https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device. `flops` holds FLOP/s by dtype; a dtype that the hardware lacks is absent."""

    name: str
    title: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_bytes: int
    bytes_per_second: float             # of the device's own memory
    flops: Mapping[str, float]
    link_bytes_per_second: float | None
    link: str = ""
    watts: float | None                 # rated, for the whole device
    price_per_hour: float | None        # US dollars
    source: str
    price_source: str = PRICE_SOURCE
    # of a measured machine: shapes, threads, rounds
    details: Mapping[str, object] = field(default_factory=dict)
    devices_per_node: int = 1           # that the link joins
    # between nodes, one device's share, one direction
    network_bytes_per_second: float | None = None
    network: str = ""
    link_seconds: float = LINK_SECONDS          # latency of a hop
    network_seconds: float = NETWORK_SECONDS

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s in `dtype`. Raises ConfigError with what the machine has."""
        if dtype not in self.flops:
            raise ConfigError(f"{self.title} has no {dtype}; it has {', '.join(self.flops)}")
        return self.flops[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOPs per byte above which arithmetic, not memory, is the limit."""
        return self.peak_flops(dtype) / self.bytes_per_second


def _tera(**flops: float) -> dict[str, float]:
    return {dtype: value * T for dtype, value in flops.items()}


HOPPER = _tera(fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9)
NVIDIA = "https://www.nvidia.com/en-us/data-center/"
IMAGES = "https://images.nvidia.com/aem-dam/Solutions/geforce/"

CATALOGUE = {machine.name: machine for machine in (
    Machine(name="a100-40", title="NVIDIA A100 40GB SXM", memory_bytes=40 * GB,
            bytes_per_second=1.555 * T, flops=_tera(fp32=19.5, tf32=156, bf16=312, fp16=312,
                                                    int8=624),
            link_bytes_per_second=600 * GB, link="NVLink 3",
            devices_per_node=8, network_bytes_per_second=25 * GB,
            network="8 x 200 Gb/s a server, as DGX A100", watts=400, price_per_hour=1.3,
            source=f"NVIDIA A100 Tensor Core GPU datasheet, SXM column, {NVIDIA}a100/"),
    Machine(name="a100-80", title="NVIDIA A100 80GB SXM", memory_bytes=80 * GB,
            bytes_per_second=2.039 * T, flops=_tera(fp32=19.5, tf32=156, bf16=312, fp16=312,
                                                    int8=624),
            link_bytes_per_second=600 * GB, link="NVLink 3",
            devices_per_node=8, network_bytes_per_second=25 * GB,
            network="8 x 200 Gb/s a server, as DGX A100", watts=400, price_per_hour=1.8,
            source=f"NVIDIA A100 Tensor Core GPU datasheet, SXM column, {NVIDIA}a100/"),
    Machine(name="h100", title="NVIDIA H100 SXM", memory_bytes=80 * GB, bytes_per_second=3.35 * T,
            flops=HOPPER, link_bytes_per_second=900 * GB, link="NVLink 4",
            devices_per_node=8, network_bytes_per_second=50 * GB,
            network="8 x 400 Gb/s a server, as DGX H100", watts=700, price_per_hour=3.0,
            source=f"NVIDIA H100 Tensor Core GPU datasheet, SXM column, sparse figures halved, "
            f"{NVIDIA}h100/"), Machine(name="h100-pcie", title="NVIDIA H100 PCIe",
                                       memory_bytes=80 * GB, bytes_per_second=2 * T,
                                       flops=_tera(fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513,
                                                   int8=1513),
                                       link_bytes_per_second=600 * GB,
                                       link="NVLink bridge between two cards",
                                       devices_per_node=2, network_bytes_per_second=25 * GB,
                                       network="assumed: 200 Gb/s a card",
                                       watts=350, price_per_hour=2.4,
                                       source=f"NVIDIA H100 Tensor Core GPU datasheet (2022), PCIe "
                                       f"column, sparse figures halved, {NVIDIA}h100/"),
    Machine(name="h200", title="NVIDIA H200 SXM", memory_bytes=141 * GB, bytes_per_second=4.8 * T,
            flops=HOPPER, link_bytes_per_second=900 * GB, link="NVLink 4",
            devices_per_node=8, network_bytes_per_second=50 * GB,
            network="8 x 400 Gb/s a server, as DGX H200", watts=700, price_per_hour=3.5,
            source=f"NVIDIA H200 Tensor Core GPU datasheet, SXM column, sparse figures halved, "
            f"{NVIDIA}h200/"), Machine(name="b200", title="NVIDIA B200 (HGX)",
                                       memory_bytes=180 * GB, bytes_per_second=7.7 * T,
                                       flops=_tera(fp32=75, tf32=1100, bf16=2250, fp16=2250,
                                                   fp8=4500, int8=4500, fp4=9000),
                                       link_bytes_per_second=1800 * GB, link="NVLink 5",
                                       devices_per_node=8, network_bytes_per_second=50 * GB,
                                       network="8 x 400 Gb/s a server, as DGX B200", watts=1000,
                                       price_per_hour=5.0, source=f"NVIDIA HGX platform "
                                       f"specifications, HGX B200 divided by 8, sparse figures "
                                       f"halved, {NVIDIA}hgx/"),
    Machine(name="gb200", title="NVIDIA GB200, one of its two GPUs", memory_bytes=186 * GB,
            bytes_per_second=8 * T, flops=_tera(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000,
                                                int8=5000, fp4=10_000),
            link_bytes_per_second=1800 * GB, link="NVLink 5",
            devices_per_node=72, network_bytes_per_second=50 * GB,
            network="400 Gb/s a GPU, as GB200 NVL72",
            watts=1200, price_per_hour=6.0, source=f"NVIDIA GB200 NVL72 specifications divided by "
            f"72, sparse figures halved, {NVIDIA}gb200-nvl72/"),
    Machine(name="l4", title="NVIDIA L4", memory_bytes=24 * GB, bytes_per_second=0.3 * T,
            flops=_tera(fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5),
            link_bytes_per_second=64 * GB, link="PCIe 4 x16",
            devices_per_node=8, network_bytes_per_second=1.5625 * GB,
            network="assumed: 100 Gb/s a server of 8", watts=72, price_per_hour=0.7,
            source=f"NVIDIA L4 Tensor Core GPU datasheet, sparse figures halved, {NVIDIA}l4/"),
    Machine(name="l40s", title="NVIDIA L40S", memory_bytes=48 * GB, bytes_per_second=0.864 * T,
            flops=_tera(fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733),
            link_bytes_per_second=64 * GB, link="PCIe 4 x16",
            devices_per_node=8, network_bytes_per_second=6.25 * GB,
            network="assumed: 400 Gb/s a server of 8", watts=350, price_per_hour=1.2,
            source=f"NVIDIA L40S GPU datasheet, dense figures, {NVIDIA}l40s/"),
    Machine(name="t4", title="NVIDIA T4", memory_bytes=16 * GB, bytes_per_second=0.32 * T,
            flops=_tera(fp32=8.1, fp16=65, int8=130),
            link_bytes_per_second=32 * GB, link="PCIe 3 x16",
            devices_per_node=4, network_bytes_per_second=3.125 * GB,
            network="assumed: 100 Gb/s a server of 4", watts=70, price_per_hour=0.4,
            source=f"NVIDIA T4 Tensor Core GPU datasheet, {NVIDIA}tesla-t4/"),
    Machine(name="rtx-4090", title="NVIDIA GeForce RTX 4090", memory_bytes=24 * GB,
            bytes_per_second=1.008 * T, flops=_tera(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2,
                                                    fp8=330.3, int8=660.6),
            link_bytes_per_second=64 * GB, link="PCIe 4 x16",
            devices_per_node=8, network_bytes_per_second=1.5625 * GB,
            network="assumed: 100 Gb/s a server of 8", watts=450, price_per_hour=0.45,
            source=f"NVIDIA Ada GPU Architecture whitepaper, appendix A, fp32 accumulation, dense, "
            f"{IMAGES}ada/nvidia-ada-gpu-architecture.pdf"),
    Machine(name="rtx-5090", title="NVIDIA GeForce RTX 5090", memory_bytes=32 * GB,
            bytes_per_second=1.792 * T, flops=_tera(fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5,
                                                    fp8=419, int8=838, fp4=1676),
            link_bytes_per_second=128 * GB, link="PCIe 5 x16",
            devices_per_node=8, network_bytes_per_second=1.5625 * GB,
            network="assumed: 100 Gb/s a server of 8", watts=575, price_per_hour=0.8,
            source=f"NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A, fp32 "
            f"accumulation, dense, {IMAGES}blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"),
    Machine(name="mi300x", title="AMD Instinct MI300X", memory_bytes=192 * GB,
            bytes_per_second=5.3 * T, flops=_tera(fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4,
                                                  fp8=2614.9, int8=2614.9),
            link_bytes_per_second=896 * GB, link="Infinity Fabric, 7 links",
            devices_per_node=8, network_bytes_per_second=50 * GB,
            network="assumed: 8 x 400 Gb/s a server",
            watts=750, price_per_hour=2.5,
            source="AMD Instinct MI300X Accelerator data sheet, dense figures, "
            "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
)}


def find(name: "str | Machine") -> Machine:
    """The named row, or the Machine that was measured or described here. Raises ConfigError with
    the nearest name."""
    if isinstance(name, Machine):
        return name
    if name.lower() not in CATALOGUE:
        hint = nearest(name.lower(), CATALOGUE)
        there_is = f" There is {', '.join(CATALOGUE)}." if hint.startswith("did you mean") else "."
        raise ConfigError(f"there is no machine {name!r} in the catalogue; {hint}{there_is} "
                          f"Or describe your own in a YAML file and give its path: {HOW}")
    return CATALOGUE[name.lower()]


WORDS = {"name", "title", "kind", "link", "source", "price_source", "network"}
LEAST = ("memory_bytes", "bytes_per_second", "flops")
HOW = (f"it needs {', '.join(LEAST)} (FLOP/s by dtype, as `flops: {{bf16: 9.9e14}}`), and may have "
       f"link_bytes_per_second (both directions), devices_per_node, network_bytes_per_second (a "
       f"device's share), watts, price_per_hour, source")


def from_dict(values: Mapping[str, Any], *, name: str = "mine") -> Machine:
    """A machine of one's own, from plain values as a YAML file gives them; base units, strings like
    "3.35e12" too.

    Raises ConfigError for what is missing, unknown, not a number, not positive or beyond any
    machine.
    """
    known = {f.name for f in fields(Machine)} - {"details"}
    if not isinstance(values, Mapping):
        raise ConfigError(f"a machine is a table of settings, got {values!r:.40}; {HOW}")
    for key in values:
        if key not in known:
            raise ConfigError(f"a machine has no {str(key)!r}; {nearest(str(key), known)}")
    missing = [key for key in LEAST if values.get(key) is None]
    if missing:
        raise ConfigError(f"the machine lacks {', '.join(missing)}; {HOW}")
    if not isinstance(values["flops"], Mapping) or not values["flops"]:
        raise ConfigError(f"flops must be FLOP/s by dtype, as {{bf16: 9.9e14}}, got "
                          f"{values['flops']!r:.40}")
    unknown = [dtype for dtype in values["flops"] if dtype not in DTYPES]
    if unknown:
        raise ConfigError(f"flops has no dtype {unknown[0]!r}; {nearest(str(unknown[0]), DTYPES)}")
    made: dict[str, Any] = {"name": name, "title": name, "source": "described by its user",
                            "watts": None, "price_per_hour": None, "link_bytes_per_second": None}
    for key, value in values.items():
        if key == "flops":
            made[key] = {dtype: _number(f"flops.{dtype}", rate) for dtype, rate in value.items()}
        elif key in WORDS:
            made[key] = str(value)
        elif value is not None:
            made[key] = _number(key, value)
    for key in ("memory_bytes", "devices_per_node"):
        if key in made:
            made[key] = int(made[key])
    if made.get("kind", "gpu") not in ("gpu", "cpu"):
        raise ConfigError(f"kind must be gpu or cpu, got {made['kind']!r}")
    if made.get("price_per_hour") is not None:
        made.setdefault("price_source", "given by its user")
    return Machine(**made)


LARGEST = {"memory_bytes": 1e15, "bytes_per_second": 1e16, "flops": 1e19,
           "link_bytes_per_second": 1e15, "network_bytes_per_second": 1e15, "watts": 1e6,
           "price_per_hour": 1e5, "devices_per_node": 1e4}


def _number(key: str, value: Any) -> float:
    try:
        number = float(value.replace("_", "")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"{key} of a machine must be a number, got {value!r}") from None
    most = LARGEST.get(key.partition(".")[0], math.inf)
    if not 0 < number <= most or isinstance(value, bool):
        raise ConfigError(f"{key} of a machine must be positive and at most {most:g}, got "
                          f"{value!r}; base units: bytes, bytes/s, FLOP/s, seconds, watts, dollars")
    return number
