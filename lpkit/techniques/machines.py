"""What a device can do at best: memory, bandwidth, arithmetic, links, power, price.

Bytes, bytes/s, FLOP/s, watts. Arithmetic is dense (datasheets like to print twice as much, "with
sparsity") and accumulates in float32; 8- and 4-bit rates count operations. Links are the
datasheet's figure, both directions together; the network between nodes is a device's share, one
direction. Prices and networks are assumptions, not quotations: pass your own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lpkit.errors import ConfigError, nearest, printable, shown
from lpkit.values import convert

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
GB, T = 10**9, 10**12
PRICE_SOURCE = ("assumed: a round on-demand price per GPU and hour in 2025; change it with "
                "price_per_hour")
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
    link_bytes_per_second: float | None = None
    link: str = ""
    link_seconds: float = 3.4e-6        # latency of a hop
    devices_per_node: int = 1           # that the link joins
    network_bytes_per_second: float | None = None   # between nodes, one device's share, one way
    network: str = ""
    network_seconds: float = 14e-6      # latency of a hop
    watts: float | None = None          # rated, for the whole device
    price_per_hour: float | None = None     # US dollars
    price_source: str = PRICE_SOURCE
    source: str
    details: Mapping[str, object] = field(default_factory=dict)     # how it was measured

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


def _link(name: str, gigabytes: int) -> dict[str, Any]:
    return {"link": name, "link_bytes_per_second": gigabytes * GB}


def _nodes(devices: int, gigabytes: float, network: str) -> dict[str, Any]:
    return {"devices_per_node": devices, "network_bytes_per_second": gigabytes * GB,
            "network": network}


AMPERE = _tera(fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624)
HOPPER = _tera(fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9)
HALVED = "sparse figures halved"
NVIDIA = "https://www.nvidia.com/en-us/data-center/"
IMAGES = "https://images.nvidia.com/aem-dam/Solutions/geforce/"

CATALOGUE = {machine.name: machine for machine in (
    Machine(name="a100-40", title="NVIDIA A100 40GB SXM", watts=400, price_per_hour=1.3,
            memory_bytes=40 * GB, bytes_per_second=1.555 * T, flops=AMPERE,
            **_link("NVLink 3", 600), **_nodes(8, 25, "8 x 200 Gb/s a server, as DGX A100"),
            source=f"NVIDIA A100 Tensor Core GPU datasheet, SXM column, {NVIDIA}a100/"),
    Machine(name="a100-80", title="NVIDIA A100 80GB SXM", watts=400, price_per_hour=1.8,
            memory_bytes=80 * GB, bytes_per_second=2.039 * T, flops=AMPERE,
            **_link("NVLink 3", 600), **_nodes(8, 25, "8 x 200 Gb/s a server, as DGX A100"),
            source=f"NVIDIA A100 Tensor Core GPU datasheet, SXM column, {NVIDIA}a100/"),
    Machine(name="h100", title="NVIDIA H100 SXM", watts=700, price_per_hour=3.0,
            memory_bytes=80 * GB, bytes_per_second=3.35 * T, flops=HOPPER,
            **_link("NVLink 4", 900), **_nodes(8, 50, "8 x 400 Gb/s a server, as DGX H100"),
            source=f"NVIDIA H100 Tensor Core GPU datasheet, SXM column, {HALVED}, {NVIDIA}h100/"),
    Machine(name="h100-pcie", title="NVIDIA H100 PCIe", watts=350, price_per_hour=2.4,
            memory_bytes=80 * GB, bytes_per_second=2 * T,
            flops=_tera(fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513),
            **_link("NVLink bridge between two cards", 600),
            **_nodes(2, 25, "assumed: 200 Gb/s a card"),
            source=f"NVIDIA H100 Tensor Core GPU datasheet (2022), PCIe column, {HALVED}, "
            f"{NVIDIA}h100/"),
    Machine(name="h200", title="NVIDIA H200 SXM", watts=700, price_per_hour=3.5,
            memory_bytes=141 * GB, bytes_per_second=4.8 * T, flops=HOPPER,
            **_link("NVLink 4", 900), **_nodes(8, 50, "8 x 400 Gb/s a server, as DGX H200"),
            source=f"NVIDIA H200 Tensor Core GPU datasheet, SXM column, {HALVED}, {NVIDIA}h200/"),
    Machine(name="b200", title="NVIDIA B200 (HGX)", watts=1000, price_per_hour=5.0,
            memory_bytes=180 * GB, bytes_per_second=7.7 * T,
            flops=_tera(fp32=75, tf32=1100, bf16=2250, fp16=2250, fp8=4500, int8=4500, fp4=9000),
            **_link("NVLink 5", 1800), **_nodes(8, 50, "8 x 400 Gb/s a server, as DGX B200"),
            source=f"NVIDIA HGX platform specifications, HGX B200 divided by 8, {HALVED}, "
            f"{NVIDIA}hgx/"),
    Machine(name="gb200", title="NVIDIA GB200, one of its two GPUs", watts=1200, price_per_hour=6.0,
            memory_bytes=186 * GB, bytes_per_second=8 * T,
            flops=_tera(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=5000, fp4=10_000),
            **_link("NVLink 5", 1800), **_nodes(72, 50, "400 Gb/s a GPU, as GB200 NVL72"),
            source=f"NVIDIA GB200 NVL72 specifications divided by 72, {HALVED}, "
            f"{NVIDIA}gb200-nvl72/"),
    Machine(name="l4", title="NVIDIA L4", watts=72, price_per_hour=0.7,
            memory_bytes=24 * GB, bytes_per_second=0.3 * T,
            flops=_tera(fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5),
            **_link("PCIe 4 x16", 64), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"),
            source=f"NVIDIA L4 Tensor Core GPU datasheet, {HALVED}, {NVIDIA}l4/"),
    Machine(name="l40s", title="NVIDIA L40S", watts=350, price_per_hour=1.2,
            memory_bytes=48 * GB, bytes_per_second=0.864 * T,
            flops=_tera(fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733),
            **_link("PCIe 4 x16", 64), **_nodes(8, 6.25, "assumed: 400 Gb/s a server of 8"),
            source=f"NVIDIA L40S GPU datasheet, dense figures, {NVIDIA}l40s/"),
    Machine(name="t4", title="NVIDIA T4", watts=70, price_per_hour=0.4,
            memory_bytes=16 * GB, bytes_per_second=0.32 * T,
            flops=_tera(fp32=8.1, fp16=65, int8=130),
            **_link("PCIe 3 x16", 32), **_nodes(4, 3.125, "assumed: 100 Gb/s a server of 4"),
            source=f"NVIDIA T4 Tensor Core GPU datasheet, {NVIDIA}tesla-t4/"),
    Machine(name="rtx-4090", title="NVIDIA GeForce RTX 4090", watts=450, price_per_hour=0.45,
            memory_bytes=24 * GB, bytes_per_second=1.008 * T,
            flops=_tera(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6),
            **_link("PCIe 4 x16", 64), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"),
            source=f"NVIDIA Ada GPU Architecture whitepaper, appendix A, fp32 accumulation, dense, "
            f"{IMAGES}ada/nvidia-ada-gpu-architecture.pdf"),
    Machine(name="rtx-5090", title="NVIDIA GeForce RTX 5090", watts=575, price_per_hour=0.8,
            memory_bytes=32 * GB, bytes_per_second=1.792 * T,
            flops=_tera(fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838,
                        fp4=1676),
            **_link("PCIe 5 x16", 128), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"),
            source=f"NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A, fp32 "
            f"accumulation, dense, {IMAGES}blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"),
    Machine(name="mi300x", title="AMD Instinct MI300X", watts=750, price_per_hour=2.5,
            memory_bytes=192 * GB, bytes_per_second=5.3 * T,
            flops=_tera(fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9, int8=2614.9),
            **_link("Infinity Fabric, 7 links", 896),
            **_nodes(8, 50, "assumed: 8 x 400 Gb/s a server"),
            source="AMD Instinct MI300X Accelerator data sheet, dense figures, "
            "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
)}


def find(name: "str | Machine") -> Machine:
    """The named row, or the Machine that is given. Raises ConfigError with the nearest name."""
    if isinstance(name, Machine):
        return name
    if name.lower() not in CATALOGUE:
        hint = nearest(name.lower(), CATALOGUE)
        there_is = f" There is {', '.join(CATALOGUE)}." if hint.startswith("did you mean") else "."
        raise ConfigError(f"there is no machine {shown(name)} in the catalogue; {hint}{there_is} "
                          f"Or give the path of a YAML file that describes your own: {NEEDS}")
    return CATALOGUE[name.lower()]


WORDS = {"name", "title", "kind", "link", "source", "price_source", "network"}
WHOLE = {"memory_bytes", "devices_per_node"}
LARGEST = {"memory_bytes": 1e15, "bytes_per_second": 1e16, "flops": 1e19,
           "link_bytes_per_second": 1e15, "network_bytes_per_second": 1e15, "watts": 1e6,
           "price_per_hour": 1e5, "devices_per_node": 1e4}
LEAST = ("memory_bytes", "bytes_per_second", "flops")
NEEDS = f"it needs {', '.join(LEAST)} (FLOP/s by dtype, as `flops: {{bf16: 9.9e14}}`)"
HOW = (f"{NEEDS}, and may have link_bytes_per_second (both directions), devices_per_node, "
       f"network_bytes_per_second (a device's share), watts, price_per_hour, source")


def from_dict(values: Mapping[str, Any], *, name: str = "mine") -> Machine:
    """A machine of one's own, from plain values in base units, strings like "3.35e12" too. Raises
    ConfigError for what is missing, unknown, not a number, not positive or beyond any machine."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"a machine is a table of settings, got {shown(values)}; {HOW}")
    known = {f.name for f in fields(Machine)} - {"details"}
    for key in values:
        if key not in known:
            raise ConfigError(f"a machine has no {shown(key)}; {nearest(key, known)}")
    missing = [key for key in LEAST if values.get(key) is None]
    if missing:
        raise ConfigError(f"the machine lacks {', '.join(missing)}; {HOW}")
    flops = values["flops"]
    if not isinstance(flops, Mapping) or not flops:
        raise ConfigError(f"flops must be FLOP/s by dtype, as {{bf16: 9.9e14}}, got "
                          f"{shown(flops)}")
    for dtype in flops:
        if dtype not in DTYPES:
            raise ConfigError(f"flops has no dtype {shown(dtype)}; {nearest(dtype, DTYPES)}")
    if values.get("kind", "gpu") not in ("gpu", "cpu"):
        raise ConfigError(f"kind must be gpu or cpu, got {shown(values['kind'])}")
    made: dict[str, Any] = {"name": name, "title": name, "source": "described by its user"}
    made["flops"] = {dtype: _number(f"flops.{dtype}", rate) for dtype, rate in flops.items()}
    if values.get("price_per_hour") is not None:
        made["price_source"] = "given by its user"
    for key, value in values.items():
        if key in WORDS:
            made[key] = printable(convert(value, str, f"{key} of a machine"))[:200]
        elif key != "flops" and value is not None:
            made[key] = _number(key, value)
    return Machine(**made)


def _number(key: str, value: Any) -> float:
    number = convert(value, int if key in WHOLE else float, f"{key} of a machine")
    most = LARGEST.get(key.partition(".")[0], math.inf)
    if not 0 < number <= most:
        raise ConfigError(f"{key} of a machine must be positive and at most {most:g}, got "
                          f"{shown(value)}; base units: bytes, bytes/s, FLOP/s, seconds, watts, "
                          f"dollars")
    return number
