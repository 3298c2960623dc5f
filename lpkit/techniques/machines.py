"""Machines for predictions. A row has the peak figures of a device: memory, bandwidth, arithmetic,
links, power, price. The rows are in data/published/machines.toml, and `lpkit.hardware` measures
this machine. Units are bytes, bytes/s, FLOP/s, seconds, watts and US dollars.

memory      the total that nvidia-smi or rocm-smi prints. It is what vendors give in "GB" (almost
            always GiB), minus what the device reserves
arithmetic  for dense matrices, with float32 accumulation; datasheets often print twice as much,
            "with sparsity". Rates of integer formats count operations
link        inside a node: the datasheet's figure, the sum of both directions
network     between nodes: one device's share, in one direction; some figures are assumptions
price       per hour, of one provider in one month; other providers may charge twice as much. The
            source says whether it is a list price or the lowest price of a market

Figures without a source are left out. You can describe your own machine in a file.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from lpkit.errors import ConfigError, nearest, printable, shown
from lpkit.files import resource
from lpkit.values import Check, Text, check, convert, read

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
MIB, GB, T = 2**20, 10**9, 10**12
FILE = resource("data/published") / "machines.toml"
UNITS = {       # {field in the file: (field of a Machine, factor to its base unit)}
    "memory_mib": ("memory_bytes", MIB), "terabytes_per_second": ("bytes_per_second", T),
    "link_gigabytes_per_second": ("link_bytes_per_second", GB),
    "network_gigabytes_per_second": ("network_bytes_per_second", GB)}
TABLES = tomllib.loads(FILE.read_text(encoding="utf-8"))
LATENCY_SOURCE = ("a hop in a node: NCCL's own figures for its simple protocol, "
                  "https://github.com/NVIDIA/nccl/blob/v2.28.7-1/src/graph/tuning.cc#L142-L199; "
                  "beyond, of published curves of 4 to 512 nodes, data/published/collectives.csv")
PRICE_SOURCE = "no list price was found, November 2026; give price_per_hour"
MARKET = ("the lowest", "community", "spot")    # words in the source of a market price
NVLINK_SECONDS, NETWORK_SECONDS = 3.4e-6, 18e-6     # from LATENCY_SOURCE


def within(least: float, most: float) -> Check:
    """Return a check for values from `least` to `most`, which rejects wrong units (80 for 80e9)."""
    return check(lambda value: least <= value <= most, f"from {least:g} to {most:g} (base units: "
                 f"bytes, bytes/s, FLOP/s, seconds, watts, dollars)")


RATE = within(1e6, 1e19)
Sent = Annotated[float, within(1e3, 1e15)]
Latency = Annotated[float, within(1e-9, 1)]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, and its connections to other devices. `flops` has the peak FLOP/s by dtype; a
    dtype that the device does not have is missing."""

    name: Text
    title: Text
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_bytes: Annotated[int, within(1e6, 1e15)]
    bytes_per_second: Annotated[float, within(1e6, 1e16)]   # bandwidth of the device's memory
    flops: Mapping[str, float]
    link_bytes_per_second: Sent | None = None
    link: Text = ""
    link_seconds: Latency = NVLINK_SECONDS      # latency of one hop
    devices_per_node: Annotated[int, within(1, 1e4)] = 1    # devices that the link joins
    # between nodes, one device's share, one direction
    network_bytes_per_second: Sent | None = None
    network: Text = ""
    network_seconds: Latency = NETWORK_SECONDS  # latency of one hop
    watts: Annotated[float, within(1e-3, 1e6)] | None = None    # rated, for the whole device
    price_per_hour: Annotated[float, within(1e-6, 1e5)] | None = None   # US dollars
    price_source: Text = PRICE_SOURCE
    source: Text
    details: Mapping[str, object] = field(default_factory=dict)     # how it was measured
    measured: Mapping[str, object] = field(default_factory=dict)    # by `lpkit measure`

    def peak_flops(self, dtype: str) -> float:
        """Return the peak FLOP/s in `dtype`. Raises ConfigError if the device does not have the
        dtype, with the dtypes that it has."""
        if dtype not in self.flops:
            raise ConfigError(f"{self.title} has no {dtype}; it has {', '.join(self.flops)}")
        return self.flops[dtype]

    @property
    def multiplies_tiles(self) -> bool:
        """True for a CPU with matrix units for bf16 (AMX). With them, the bf16 peak is 8 times the
        float32 peak; on other CPUs with bf16, it is 2 times."""
        return self.kind == "cpu" and self.flops.get("bf16", 0) > 4 * self.flops.get(
            "fp32", math.inf)


def mixed_prices(compared: Sequence[Machine]) -> str:
    """Return a sentence that the prices of these machines cannot be compared, if some are market
    prices and some are list prices; otherwise ""."""
    market = [machine.name for machine in compared
              if any(word in machine.price_source for word in MARKET)]
    listed = [machine.name for machine in compared
              if machine.price_per_hour and machine.name not in market]
    if not (market and listed):
        return ""
    return (f"prices of {', '.join(market)} are the lowest of a market, and those of "
            f"{', '.join(listed)} are list prices: they do not compare")


def _machine(name: str, row: Mapping[str, Any]) -> Machine:
    """Return the Machine of a row of the file."""
    machine_fields = {"name": name}
    for key, value in row.items():
        to, unit = UNITS.get(key, (key, None))
        machine_fields[to] = value if unit is None else value * unit
    flops = {dtype: rate * T for dtype, rate in machine_fields.pop("teraflops").items()}
    return Machine(flops=flops, **machine_fields)


CATALOGUE = {name: _machine(name, row) for name, row in TABLES["machines"].items()}


def find(name: "str | Machine") -> Machine:
    """Return the machine `name` of the catalogue; a Machine is returned as it is. For an unknown
    name, raise ConfigError with the nearest name."""
    if isinstance(name, Machine):
        return name
    if name.lower() not in CATALOGUE:
        hint = nearest(name.lower(), CATALOGUE)
        there_is = f" There is {', '.join(CATALOGUE)}." if hint.startswith("did you mean") else "."
        raise ConfigError(f"there is no machine {shown(name)} in the catalogue; {hint}{there_is} "
                          f"Or describe your own in a YAML file with {', '.join(LEAST)}")
    return CATALOGUE[name.lower()]


LEAST = ("memory_bytes", "bytes_per_second", "flops")
NEEDS = f"it needs {', '.join(LEAST)} (FLOP/s by dtype, as `flops: {{bf16: 9.9e14}}`)"
# The table `measured` of a file that `lpkit measure --save` has written: fields and their types.
# ranks: number of processes with which the link was measured
MEASURED = {"device": str, "torch": str, "date": str, "command": str, "ranks": int,
            "others": float,    # share of the CPUs that other processes took during the measurement
            "products": Mapping[str, Sequence[Sequence[float]]],    # M, N, K, share of flops
            "seconds": float, "config": Mapping}        # seconds and config of an update
HOW = (f"{NEEDS}, and may have link_bytes_per_second (both directions), devices_per_node, "
       f"network_bytes_per_second (a device's share), watts, price_per_hour, source")


def from_dict(values: Mapping[str, Any], *, name: str = "mine") -> Machine:
    """Return the Machine that a user describes, by plain values in base units; numbers may be
    strings such as "3.35e12". Raises ConfigError for missing or unknown fields, and for values that
    no machine has."""
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
        raise ConfigError(f"flops must be FLOP/s by dtype, as {{bf16: 9.9e14}}, got {shown(flops)}")
    rates = {}
    for dtype, rate in flops.items():
        if dtype not in DTYPES:
            raise ConfigError(f"flops has no dtype {shown(dtype)}; {nearest(dtype, DTYPES)}")
        rates[dtype] = convert(rate, float, f"flops.{dtype}")
        RATE(f"flops.{dtype}", rates[dtype])
    machine_fields: dict[str, Any] = {"name": name, "title": name,
                                      "source": "described by its user"}
    if values.get("price_per_hour") is not None:
        machine_fields["price_source"] = "given by its user"
    given = {key: value for key, value in values.items()
             if value is not None and key not in ("flops", "measured")}
    for key, value in read(Machine, given, "").items():
        machine_fields[key] = printable(value)[:400] if isinstance(value, str) else value
    if values.get("measured"):
        machine_fields["measured"] = _measured(values["measured"], values.get("title"))
    return Machine(flops=rates, **machine_fields)


def _measured(values: Any, title: Any) -> dict[str, Any]:
    """Return the checked table `measured` of a machine's file. `title`: the machine's title."""
    again = "write the file again with `lpkit measure --save`"
    odd = (values if isinstance(values, Mapping) else {}).keys() ^ MEASURED.keys()
    if odd:
        raise ConfigError(f"measured has {', '.join(MEASURED)}; missing or too much: "
                          f"{shown(sorted(map(str, odd)))}; {again}")
    if values["device"] != title:
        raise ConfigError(f"measured is of another machine, {shown(values['device'])}, than "
                          f"{shown(title)}, the title; {again}")
    measured = {key: convert(values[key], kind, f"measured.{key}")
                for key, kind in MEASURED.items()}
    for dtype, table in measured["products"].items():
        for product in table or ((),):
            if dtype not in DTYPES or len(product) != 4 or not (
                    all(0 < x < 1e9 for x in product) and product[3] <= 1):
                raise ConfigError(f"measured.products.{dtype} has M, N, K and a share above 0 and "
                                  f"at most 1, got {shown(product)}; {again}")
    return measured
