"""Each row says what a device can do at best: memory, bandwidth, arithmetic, links, power, price.

Bytes, bytes/s, FLOP/s, watts. Memory is what nvidia-smi or rocm-smi prints as the total: vendors'
GB are nearly GiB, less what the device keeps. Arithmetic is dense (datasheets like to print twice
as much, "with sparsity") and accumulates in float32; 8- and 4-bit rates count operations. Links are
the datasheet's figure, both directions together; the network between nodes is a device's share, one
direction. Prices are one provider's of one month, and another's may be twice as high; some, and
some networks, are assumptions. Pass your own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lpkit.errors import ConfigError, nearest, printable, shown
from lpkit.techniques.machine import DTYPES, PRICE_SOURCE, Machine
from lpkit.values import convert, not_empty

MIB, GB, T = 2**20, 10**9, 10**12
LATENCY_SOURCE = ("a hop in a node: NCCL's own figures for its simple protocol, "
                  "https://github.com/NVIDIA/nccl/blob/v2.28.7-1/src/graph/tuning.cc#L142-L199; "
                  "beyond, of published curves of 4 to 512 nodes, data/published/collectives.csv")
PCIE_SECONDS = 5.7e-6


def _tera(**flops: float) -> dict[str, float]:
    return {dtype: value * T for dtype, value in flops.items()}


def _link(name: str, gigabytes: int) -> dict[str, Any]:
    return {"link": name, "link_bytes_per_second": gigabytes * GB}


def _pcie(generation: int) -> dict[str, Any]:
    return {**_link(f"PCIe {generation} x16", 4 * 2**generation), "link_seconds": PCIE_SECONDS}


def _nodes(devices: int, gigabytes: float, network: str) -> dict[str, Any]:
    return {"devices_per_node": devices, "network_bytes_per_second": gigabytes * GB,
            "network": network}


def _price(dollars: float, source: str = PRICE_SOURCE) -> dict[str, Any]:
    return {"price_per_hour": dollars, "price_source": source}


AMPERE = _tera(fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624)
HOPPER = _tera(fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9)
CDNA3 = _tera(fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9, int8=2614.9)
HALVED = "sparse figures halved"
NVIDIA = "https://www.nvidia.com/en-us/data-center/"
AMD = "https://www.amd.com/en/products/accelerators/instinct/"
IMAGES = "https://images.nvidia.com/aem-dam/Solutions/geforce/"
GA102 = ("NVIDIA Ampere GA102 GPU Architecture whitepaper, fp32 accumulation, dense, https://"
         "www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf")
ULTRA = ("NVIDIA Blackwell Ultra datasheet, dense, by https://github.com/datacrunch-research/blogs/"
         "blob/5d40743b42df/gb300-technical-report/gb300_technical_report.md")
BOOK = "https://github.com/stas00/ml-engineering/blob/744d01e18b79/compute/accelerator/README.md"
PLANS = "https://github.com/api-evangelist/"
HYPERSTACK = ("Hyperstack, on demand, August 2026; "
              f"{PLANS}nexgen-cloud/blob/0fa0509ef79e/plans/nexgen-cloud-plans-pricing.yml")
LAMBDA = ("Lambda, on demand, September 2026; "
          f"{PLANS}lambda-labs/blob/1929382e7f9b/plans/lambda-labs-plans-pricing.yml")
COREWEAVE = ("CoreWeave, on demand, a node's divided, September 2026; "
             f"{PLANS}coreweave/blob/27bcc25e6b19/plans/coreweave-plans-pricing.yml")
AKASH = ("Akash, the lowest, September 2026; "
         f"{PLANS}akash/blob/4301f93c844d/plans/plans.yml")
RUNPOD = ("RunPod, community, August 2026; "
          "https://huggingface.co/datasets/privum/ai-compute-prices")
TENSORWAVE = ("TensorWave, on demand, May 2026; "
              "https://www.cliffcenter.com/research/amd-inference-economics")

# Totals as pasted. A100, H100, A10, L4, L40S, T4: github.com/modal-labs/modal-client/pull/2797;
# RTX 3090, 5090: github.com/noonghunna/club-3090/issues/390, 1229; MI300X: github.com/ROCm/
# legacy-rocm-build/issues/4750. The others are the same in all public outputs that were found.
CATALOGUE = {machine.name: machine for machine in (
    Machine(name="a100-40", title="NVIDIA A100 40GB SXM", watts=400, **_price(1.0, RUNPOD),
            memory_bytes=40_960 * MIB, bytes_per_second=1.555 * T, flops=AMPERE,
            **_link("NVLink 3", 600), **_nodes(8, 25, "8 x 200 Gb/s a server, as DGX A100"),
            source=f"NVIDIA A100 Tensor Core GPU datasheet, SXM column, {NVIDIA}a100/"),
    Machine(name="a100-80", title="NVIDIA A100 80GB SXM", watts=400, **_price(1.6, HYPERSTACK),
            memory_bytes=81_920 * MIB, bytes_per_second=2.039 * T, flops=AMPERE,
            **_link("NVLink 3", 600), **_nodes(8, 25, "8 x 200 Gb/s a server, as DGX A100"),
            source=f"NVIDIA A100 Tensor Core GPU datasheet, SXM column, {NVIDIA}a100/"),
    Machine(name="h100", title="NVIDIA H100 SXM", watts=700, **_price(3.2, HYPERSTACK),
            memory_bytes=81_559 * MIB, bytes_per_second=3.35 * T, flops=HOPPER,
            **_link("NVLink 4", 900), **_nodes(8, 50, "8 x 400 Gb/s a server, as DGX H100"),
            source=f"NVIDIA H100 Tensor Core GPU datasheet, SXM column, {HALVED}, {NVIDIA}h100/"),
    Machine(name="h100-pcie", title="NVIDIA H100 PCIe", watts=350, **_price(2.5, HYPERSTACK),
            memory_bytes=81_559 * MIB, bytes_per_second=2 * T,
            flops=_tera(fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513),
            **_link("NVLink bridge between two cards", 600),
            **_nodes(2, 25, "assumed: 200 Gb/s a card"),
            source=f"NVIDIA H100 Tensor Core GPU datasheet (2022), PCIe column, {HALVED}, "
            f"{NVIDIA}h100/"),
    Machine(name="h200", title="NVIDIA H200 SXM", watts=700, **_price(3.99, HYPERSTACK),
            memory_bytes=143_771 * MIB, bytes_per_second=4.8 * T, flops=HOPPER,
            **_link("NVLink 4", 900), **_nodes(8, 50, "8 x 400 Gb/s a server, as DGX H200"),
            source=f"NVIDIA H200 Tensor Core GPU datasheet, SXM column, {HALVED}, {NVIDIA}h200/"),
    Machine(name="gh200", title="NVIDIA GH200 96GB", watts=900, **_price(2.29, LAMBDA),
            memory_bytes=97_871 * MIB, bytes_per_second=4 * T, flops=HOPPER,
            **_link("NVLink 4", 900), **_nodes(4, 25, "assumed: 4 a server, 200 Gb/s each"),
            source=f"NVIDIA GH200 datasheet, HBM3, {HALVED}, {NVIDIA}grace-hopper-superchip/"),
    Machine(name="b200", title="NVIDIA B200 (HGX)", watts=1000, **_price(6.0, HYPERSTACK),
            memory_bytes=183_359 * MIB, bytes_per_second=7.7 * T,
            flops=_tera(fp32=75, tf32=1100, bf16=2250, fp16=2250, fp8=4500, int8=4500, fp4=9000),
            **_link("NVLink 5", 1800), **_nodes(8, 50, "8 x 400 Gb/s a server, as DGX B200"),
            source=f"NVIDIA HGX platform specifications, HGX B200 divided by 8, {HALVED}, "
            f"{NVIDIA}hgx/"),
    Machine(name="gb200", title="NVIDIA GB200, one of its two GPUs", watts=1200,
            memory_bytes=189_471 * MIB, bytes_per_second=8 * T, **_price(10.5, COREWEAVE),
            flops=_tera(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=5000, fp4=10_000),
            **_link("NVLink 5", 1800), **_nodes(72, 50, "400 Gb/s a GPU, as GB200 NVL72"),
            source=f"NVIDIA GB200 NVL72 specifications divided by 72, {HALVED}, "
            f"{NVIDIA}gb200-nvl72/"),
    Machine(name="b300", title="NVIDIA B300 (HGX)", watts=1100, **_price(7.4, HYPERSTACK),
            memory_bytes=275_040 * MIB, bytes_per_second=8 * T,
            flops=_tera(fp32=75, tf32=1100, bf16=2250, fp16=2250, fp8=4500, int8=150, fp4=14_000),
            **_link("NVLink 5", 1800), **_nodes(8, 100, "8 x 800 Gb/s a server, as DGX B300"),
            source=ULTRA),
    Machine(name="gb300", title="NVIDIA GB300, one of its two GPUs", watts=1400, **_price(12.0),
            memory_bytes=284_208 * MIB, bytes_per_second=8 * T,
            flops=_tera(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=165, fp4=15_000),
            **_link("NVLink 5", 1800), **_nodes(72, 100, "800 Gb/s a GPU, as GB300 NVL72"),
            source=ULTRA),
    Machine(name="a10g", title="NVIDIA A10G", watts=300, **_price(1.0),
            memory_bytes=23_028 * MIB, bytes_per_second=0.6 * T,
            flops=_tera(fp32=35, tf32=35, bf16=70, fp16=70),
            **_pcie(4), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"),
            source="NVIDIA A10G datasheet; 69.5 TFLOP/s of 70 were measured in 16 bits, "
            "https://github.com/zzc0721/torch-performance-test-data/issues/126"),
    Machine(name="a6000", title="NVIDIA RTX A6000", watts=300, **_price(0.5, HYPERSTACK),
            memory_bytes=49_140 * MIB, bytes_per_second=0.768 * T,
            flops=_tera(fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8, int8=309.7),
            **_pcie(4), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"), source=GA102),
    Machine(name="l4", title="NVIDIA L4", watts=72, **_price(0.7),
            memory_bytes=23_034 * MIB, bytes_per_second=0.3 * T,
            flops=_tera(fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5),
            **_pcie(4), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"),
            source=f"NVIDIA L4 Tensor Core GPU datasheet, {HALVED}, {NVIDIA}l4/"),
    Machine(name="l40s", title="NVIDIA L40S", watts=350, **_price(2.25, COREWEAVE),
            memory_bytes=46_068 * MIB, bytes_per_second=0.864 * T,
            flops=_tera(fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733),
            **_pcie(4), **_nodes(8, 6.25, "assumed: 400 Gb/s a server of 8"),
            source=f"NVIDIA L40S GPU datasheet, dense figures, {NVIDIA}l40s/"),
    Machine(name="t4", title="NVIDIA T4", watts=70, **_price(0.15, AKASH),
            memory_bytes=15_360 * MIB, bytes_per_second=0.32 * T,
            flops=_tera(fp32=8.1, fp16=65, int8=130),
            **_pcie(3), **_nodes(4, 3.125, "assumed: 100 Gb/s a server of 4"),
            source=f"NVIDIA T4 Tensor Core GPU datasheet, {NVIDIA}tesla-t4/"),
    Machine(name="v100", title="NVIDIA V100 32GB SXM2", watts=300, **_price(0.79, LAMBDA),
            memory_bytes=32_768 * MIB, bytes_per_second=0.9 * T, flops=_tera(fp32=15.7, fp16=125),
            **_link("NVLink 2", 300), **_nodes(8, 6.25, "4 x 100 Gb/s a server, as DGX-1"),
            source=f"NVIDIA V100 Tensor Core GPU datasheet, SXM2 column, {NVIDIA}v100/"),
    Machine(name="rtx-3090", title="NVIDIA GeForce RTX 3090", watts=350, **_price(0.16, AKASH),
            memory_bytes=24_576 * MIB, bytes_per_second=0.936 * T,
            flops=_tera(fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284),
            **_pcie(4), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"), source=GA102),
    Machine(name="rtx-4090", title="NVIDIA GeForce RTX 4090", watts=450, **_price(0.39, AKASH),
            memory_bytes=24_564 * MIB, bytes_per_second=1.008 * T,
            flops=_tera(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6),
            **_pcie(4), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"),
            source=f"NVIDIA Ada GPU Architecture whitepaper, appendix A, fp32 accumulation, dense, "
            f"{IMAGES}ada/nvidia-ada-gpu-architecture.pdf"),
    Machine(name="rtx-5090", title="NVIDIA GeForce RTX 5090", watts=575, **_price(0.67, AKASH),
            memory_bytes=32_607 * MIB, bytes_per_second=1.792 * T,
            flops=_tera(fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838,
                        fp4=1676),
            **_pcie(5), **_nodes(8, 1.5625, "assumed: 100 Gb/s a server of 8"),
            source=f"NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A, fp32 "
            f"accumulation, dense, {IMAGES}blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"),
    Machine(name="mi300x", title="AMD Instinct MI300X", watts=750, **_price(1.5, TENSORWAVE),
            memory_bytes=196_592 * MIB, bytes_per_second=5.3 * T, flops=CDNA3,
            **_link("Infinity Fabric, 7 links", 896),
            **_nodes(8, 50, "assumed: 8 x 400 Gb/s a server"),
            source=f"AMD Instinct MI300X Accelerator data sheet, dense figures; FP8 is FNUZ, "
            f"{AMD}mi300/mi300x.html"),
    Machine(name="mi325x", title="AMD Instinct MI325X", watts=1000, **_price(1.95, TENSORWAVE),
            memory_bytes=262_128 * MIB, bytes_per_second=6 * T, flops=CDNA3,
            **_link("Infinity Fabric, 7 links", 896),
            **_nodes(8, 50, "assumed: 8 x 400 Gb/s a server"),
            source=f"AMD Instinct MI325X, dense figures; FP8 is FNUZ, {AMD}mi300/mi325x.html, "
            f"by {BOOK}"),
    Machine(name="mi355x", title="AMD Instinct MI355X", watts=1400, **_price(2.5),
            memory_bytes=294_896 * MIB, bytes_per_second=8 * T,
            flops=_tera(fp32=157.3, bf16=2516.6, fp16=2516.6, fp8=5033.2, int8=5033.2, fp4=10_066),
            **_link("Infinity Fabric, 7 links", 1075),
            **_nodes(8, 50, "assumed: 8 x 400 Gb/s a server"),
            source=f"AMD Instinct MI355X, dense figures to the last digit by its clock, "
            f"{AMD}mi350/mi355x.html, by {BOOK}"),
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
# narrow enough for a slip of units (80 for 80e9)
RANGES = {"memory_bytes": (1e6, 1e15), "bytes_per_second": (1e6, 1e16), "flops": (1e6, 1e19),
          "link_bytes_per_second": (1e3, 1e15), "network_bytes_per_second": (1e3, 1e15),
          "link_seconds": (1e-9, 1), "network_seconds": (1e-9, 1), "watts": (1e-3, 1e6),
          "price_per_hour": (1e-6, 1e5), "devices_per_node": (1, 1e4)}
LEAST = ("memory_bytes", "bytes_per_second", "flops")
NEEDS = f"it needs {', '.join(LEAST)} (FLOP/s by dtype, as `flops: {{bf16: 9.9e14}}`)"
MEASURED = {"device": str, "torch": str, "date": str, "command": str, "ranks": int,     # of its link
            "others": float,    # share of the CPUs that other processes took meanwhile
            "products": Mapping[str, Sequence[Sequence[float]]],    # M, N, K, share of flops
            "seconds": float, "config": Mapping}        # of an update
HOW = (f"{NEEDS}, and may have link_bytes_per_second (both directions), devices_per_node, "
       f"network_bytes_per_second (a device's share), watts, price_per_hour, source")


def from_dict(values: Mapping[str, Any], *, name: str = "mine") -> Machine:
    """A machine of one's own, from plain values in base units, strings like "3.35e12" too. Raises
    ConfigError for what is missing, unknown, not a number or beyond any machine."""
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
        if key == "measured":
            made[key] = _measured(value, values.get("title")) if value else {}
        elif key in WORDS:
            made[key] = printable(convert(value, str, f"{key} of a machine"))[:400]
            not_empty(f"{key} of a machine", made[key])
        elif key != "flops" and value is not None:
            made[key] = _number(key, value)
    return Machine(**made)


def _measured(values: Any, title: Any) -> dict[str, Any]:
    again = "write the file again with `lpkit measure --save`"
    odd = (values if isinstance(values, Mapping) else {}).keys() ^ MEASURED.keys()
    if odd:
        raise ConfigError(f"measured has {', '.join(MEASURED)}; missing or too much: "
                          f"{shown(sorted(map(str, odd)))}; {again}")
    if values["device"] != title:
        raise ConfigError(f"measured is of another machine, {shown(values['device'])}, than "
                          f"{shown(title)}, the title; {again}")
    made = {key: convert(values[key], kind, f"measured.{key}") for key, kind in MEASURED.items()}
    for dtype, table in made["products"].items():
        for one in table or ((),):
            if dtype not in DTYPES or len(one) != 4 or not (all(0 < x < 1e9 for x in one)
                                                            and one[3] <= 1):
                raise ConfigError(f"measured.products.{dtype} has M, N, K and a share above 0 and at "
                                  f"most 1, got {shown(one)}; {again}")
    return made


def _number(key: str, value: Any) -> float:
    number = convert(value, int if key in WHOLE else float, f"{key} of a machine")
    least, most = RANGES[key.partition(".")[0]]
    if not least <= number <= most:
        raise ConfigError(f"{key} of a machine must be from {least:g} to {most:g}, got "
                          f"{shown(value)}; base units: bytes, bytes/s, FLOP/s, seconds, watts, "
                          f"dollars")
    return number
