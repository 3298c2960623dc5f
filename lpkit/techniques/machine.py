"""A machine, as predictions know one. `lpkit.techniques.machines` is the catalogue of them, in whose
units it is; `lpkit.hardware` measures the one at hand.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lpkit.errors import ConfigError

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
PRICE_SOURCE = ("assumed: a round on-demand price per GPU and hour in November 2026; change it "
                "with price_per_hour")
NVLINK_SECONDS, NETWORK_SECONDS = 3.4e-6, 18e-6     # source: machines.LATENCY_SOURCE


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device. `flops` holds FLOP/s by dtype, without those that it lacks."""

    name: str
    title: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_bytes: int
    bytes_per_second: float             # of the device's own memory
    flops: Mapping[str, float]
    link_bytes_per_second: float | None = None
    link: str = ""
    link_seconds: float = NVLINK_SECONDS    # latency of a hop
    devices_per_node: int = 1           # that the link joins
    network_bytes_per_second: float | None = None   # between nodes, one device's share, one way
    network: str = ""
    network_seconds: float = NETWORK_SECONDS  # latency of a hop
    watts: float | None = None          # rated, for the whole device
    price_per_hour: float | None = None     # US dollars
    price_source: str = PRICE_SOURCE
    source: str
    details: Mapping[str, object] = field(default_factory=dict)     # how it was measured
    measured: Mapping[str, object] = field(default_factory=dict)    # by `lpkit measure`

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s in `dtype`. Raises ConfigError with what the machine has."""
        if dtype not in self.flops:
            raise ConfigError(f"{self.title} has no {dtype}; it has {', '.join(self.flops)}")
        return self.flops[dtype]

    @property
    def multiplies_tiles(self) -> bool:
        """True for a CPU with units for bf16 (AMX, 8 times float32's peak; others have 2)."""
        return self.kind == "cpu" and self.flops.get("bf16", 0) > 4 * self.flops.get("fp32", math.inf)
