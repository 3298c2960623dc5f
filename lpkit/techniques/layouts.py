"""How a training run is spread over devices: five axes, whose product is the world.

The names are those of torchtitan's ParallelDims (https://github.com/pytorch/torchtitan). Ranks
count with `tensor` fastest, then `context`, `shard`, `data`, and `pipeline` slowest, so that those
who talk most sit in one node.

data      replicas of everything, which all-reduce gradients (with `shard` above 1: hybrid sharding)
shard     ranks with batches of their own that keep a part of the model states each, ZeRO stage
          `zero` (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); FSDP is stage 3
tensor    ranks that hold a part of each matrix, and of each sequence between the matrices: tensor
          with sequence parallelism (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198)
pipeline  stages of consecutive layers, one after the other (Narayanan et al. 2021,
          https://arxiv.org/abs/2104.04473)
context   ranks that hold a part of each sequence everywhere, dealt in zig-zag so that a causal mask
          leaves each the same work (Liu et al. 2023, https://arxiv.org/abs/2310.01889). They share
          model states as `shard` ranks do
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from lpkit.errors import ConfigError, shown
from lpkit.values import Checked, Count

if TYPE_CHECKING:
    from lpkit.config import Config

AXES = ("data", "shard", "tensor", "pipeline", "context")
FASTEST_FIRST = ("tensor", "context", "shard", "data", "pipeline")


def _stage(name: str, value: int) -> None:
    if value not in (0, 1, 2, 3):
        raise ConfigError(f"there is no ZeRO stage {shown(value)}; choose 0, 1, 2 or 3")


@dataclass(frozen=True, kw_only=True)
class Layout(Checked):
    """Sizes of the axes. `interleave`: chunks of layers (virtual stages) that each stage holds."""

    where = "parallel."

    data: Count = 1
    shard: Count = 1
    tensor: Count = 1
    pipeline: Count = 1
    context: Count = 1
    zero: Annotated[int, _stage] = 3
    interleave: Count = 1

    @property
    def devices(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline * self.context

    @property
    def batch_ranks(self) -> int:
        """Groups that read different sequences."""
        return self.data * self.shard

    @property
    def state_ranks(self) -> int:
        """Ranks over which ZeRO spreads model states; a context group holds the same weights."""
        return self.shard * self.context

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along an axis."""
        faster = FASTEST_FIRST[:FASTEST_FIRST.index(axis)]
        return math.prod(getattr(self, other) for other in faster)

    def __str__(self) -> str:
        axes = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        axes += [f"ZeRO {self.zero}"] if self.state_ranks > 1 else []
        axes += [f"interleave {self.interleave}"] if self.interleave > 1 else []
        return ", ".join(axes) or "one device"


def check(config: "Config", layout: Layout, devices: int | None = None) -> None:
    """Raises ConfigError when `config` cannot run in this layout, on `devices` where given, with
    the nearest that can."""
    if devices is not None and layout.devices != devices:
        raise ConfigError(_wrong_world(layout, devices))
    m, t, c = config.model, layout.tensor, layout.context
    splits = lambda n: n == 1 or m.T % (2 * n) == 0
    if not splits(c):
        raise ConfigError(f"model.context={m.T} does not split into 2 x context={c} pieces "
                          f"(zig-zag deals each rank an early and a late one); "
                          f"{_nearest(c, m.T, splits, 'context')}")
    parts = {"model.heads": m.H, "model.kv_heads": m.G, "model.mlp_width": m.F, "model.vocab": m.V,
             "a context rank's share of model.context": m.T // c}
    splits = lambda n: all(count % n == 0 for count in parts.values())
    for what, count in parts.items():
        if count % t:
            raise ConfigError(f"{what}={count} does not split over tensor={t} ranks; "
                              f"{_nearest(t, m.H, splits, 'tensor')}")
    chunks = layout.interleave
    if chunks > 1 and layout.pipeline == 1:
        raise ConfigError(f"interleave={chunks} chunks of layers need pipeline stages; set "
                          f"interleave=1, or pipeline to 2 or more")
    splits = lambda n: stages_fit(m.L, n, chunks)
    if not splits(layout.pipeline):
        times = f" x interleave={chunks}" if chunks > 1 else ""
        raise ConfigError(f"model.layers={m.L} does not split over pipeline={layout.pipeline}"
                          f"{times} stages, not even with one layer fewer in the first and the "
                          f"last; {_nearest(layout.pipeline, m.L, splits, 'pipeline')}")
    batch, ranks = config.global_batch, layout.batch_ranks
    if batch % ranks:
        splits = lambda n: batch % n == 0
        below = batch // ranks * ranks
        near = " or ".join(str(size) for size in (below, below + ranks) if size)
        raise ConfigError(f"global_batch={batch} sequences does not split over data={layout.data} "
                          f"x shard={layout.shard} = {ranks} ranks; set global_batch to {near}, or "
                          f"{_nearest(ranks, batch, splits, 'data x shard')}")


def layers_of_stage(layers: int, stages: int) -> tuple[int, bool]:
    """Layers of a middle stage, or chunk; and whether the first and the last hold one fewer, beside
    the embedding and the head, as Llama 3 does (126 layers on 16 stages of 8 chunks,
    https://arxiv.org/abs/2407.21783, section 3.3.2)."""
    if layers % stages == 0:
        return layers // stages, False
    return (layers + 2) // stages, True


def stages_fit(layers: int, stages: int, chunks: int) -> bool:
    """Whether the chunks of layers are equal, or are with one layer fewer in the first and last."""
    return (layers % (stages * chunks) == 0
            or ((layers + 2) % (stages * chunks) == 0 and (layers + 2) // stages > 1))


def _nearest(asked: int, most: int, fits: Callable[[int], bool], name: str) -> str:
    """'tensor may be 4 or 8': the next size that fits below `asked`, and above up to `most`."""
    # what splits evenly divides `most`; stages of layers may also divide two more
    sizes = sorted(n for n in {*divisors(most), *divisors(most + 2)} if n <= most and fits(n))
    below, above = [n for n in sizes if n < asked][-1:], [n for n in sizes if n > asked][:1]
    return f"{name} may be {' or '.join(map(str, below + above))}"


def _wrong_world(layout: Layout, devices: int) -> str:
    product = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES)
    rest = {axis: layout.devices // getattr(layout, axis) for axis in AXES}
    ways = [f"{axis}={devices // others}" for axis, others in rest.items()
            if devices % others == 0 and devices // others != getattr(layout, axis)]
    out = f"set {' or '.join(ways[:2])}" if ways else f"use {layout.devices} devices"
    return f"{product} is {layout.devices} devices, not {devices}; {out}"


def divisors(count: int) -> list[int]:
    """In ascending order."""
    small = [n for n in range(1, int(count**0.5) + 1) if count % n == 0]
    return sorted({*small, *(count // n for n in small)})


def powers_of_two(first: int, last: int) -> list[int]:
    """From `first` (a power of two) to at most `last`."""
    return [first << i for i in range((last // first).bit_length())]
