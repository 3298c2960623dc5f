"""Layouts: how a training run is divided over devices. A layout has five axes, and the product of
their sizes is the number of devices (ranks).

The names are those of torchtitan's ParallelDims (https://github.com/pytorch/torchtitan). The number
of a rank counts `tensor` fastest, then `context`, `shard`, `data`, and `pipeline` slowest. So ranks
that communicate most have consecutive numbers, and are in the same node. For example, with tensor=2
and data=2, rank 1 has tensor coordinate 1 and data coordinate 0.

data      replicas with different sequences, which all-reduce their gradients (with `shard` above 1:
          hybrid sharding)
shard     ranks with different sequences, over which ZeRO stage `zero` divides the model states
          (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); FSDP is stage 3
tensor    ranks that have a part of each matrix, and, between the matrices, a part of each sequence:
          tensor and sequence parallelism (Korthikanti et al. 2022,
          https://arxiv.org/abs/2205.05198)
pipeline  stages of consecutive layers (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473)
context   ranks that have a part of each sequence in all layers, in zig-zag order, so that each rank
          has the same work under a causal mask (Liu et al. 2023,
          https://arxiv.org/abs/2310.01889). ZeRO divides the model states over these ranks, too
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from lpkit.errors import ConfigError, shown
from lpkit.techniques.adapters import virtual
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.blocks import BLOCKS
from lpkit.techniques.changes import running
from lpkit.techniques.inits import INITS
from lpkit.techniques.pipelines import PIPELINES
from lpkit.techniques.recipes import RECIPES, Recipe
from lpkit.techniques.row import TechniqueRow, pick_row
from lpkit.values import Checked, Count

AXES = ("data", "shard", "tensor", "pipeline", "context")
FASTEST_FIRST = ("tensor", "context", "shard", "data", "pipeline")


# What ZeRO divides over ranks, by stage. The implementation is a class of `sharding.Sharding`.
STAGES = {
    0: TechniqueRow(why="no sharding: every rank has all states, and gradients are averaged",
                    implementation="lpkit.parallel.replicas:Replicas"),
    1: TechniqueRow(why="each rank has the optimizer state of a part of every parameter, and "
                        "updates it",
                    implementation="lpkit.parallel.replicas:ShardedOptimizer"),
    2: TechniqueRow(why="FSDP2; whole weights exist from forward to the end of backward",
                    implementation="lpkit.parallel.fully_sharded:FullySharded"),
    3: TechniqueRow(why="FSDP2; the whole weights of a block exist only while it runs",
                    implementation="lpkit.parallel.fully_sharded:FullySharded"),
}


@dataclass(frozen=True, kw_only=True)
class Reduction(TechniqueRow):
    """A way to send gradients with ZeRO 0 and 1.

    bucket_bytes: most bytes of one message; a larger parameter is a message of its own
    overlaps:     a message is sent during backward, as soon as its gradients are computed
    sent:         f(shape, ranks, itemsize) -> bytes that each rank sends for one message. The shape
                  of the message is the parameter's shape if it has only one parameter. Only rows of
                  other packages have it, and they are for ZeRO 0. Their implementation returns a
                  `replicas.Replicas`, as `lessons.rows.reductions_torch.Averaged`
    """

    implementation: str = "lpkit.parallel.replicas:Replicas"
    bucket_bytes: int
    overlaps: bool = False
    sent: Callable[[tuple[int, ...], int, int], float] | None = None


DDP = "Li et al. 2020, https://arxiv.org/abs/2006.15704"
REDUCTIONS = {
    "per-parameter": Reduction(why="one message for each parameter, after backward",
                               bucket_bytes=0, overlaps=False),
    "buckets": Reduction(why="messages of 25 MiB, after backward", source=DDP,
                         bucket_bytes=25 << 20, overlaps=False),
    "overlapped": Reduction(why="messages of 25 MiB, during backward", source=DDP,
                            bucket_bytes=25 << 20, overlaps=True),
}


@dataclass(frozen=True, kw_only=True)
class Gathered(TechniqueRow):
    """The form in which weights are gathered with ZeRO 2 and 3.

    mixed: all weights are sent in the dtype in which the recipe computes
    cast:  weights that the recipe casts to 8 bits are sent as their casts. The implementation is
           f(Sharding) -> contracts.Transform
    """

    mixed: bool = False
    cast: bool = False


GATHERED = {
    "compute": Gathered(mixed=True, why="in the compute dtype, as in FSDP's mixed precision; the "
                                        "residual stream has this dtype, too"),
    "float32": Gathered(why="in float32, with the numbers of one device"),
}


@dataclass(frozen=True, kw_only=True)
class ContextAttention(TechniqueRow):
    """A way to compute attention if each rank of a context group has a part of each sequence.

    The implementation is f(attend, Ranks) -> contracts.Attend, as `lpkit.parallel.context.Ring`.
    partial: `attend` is a `contracts.Partial` over some of the keys. False: it is a
             `contracts.Attend` over all keys for some of the heads, whose number must be divisible
             by the number of ranks
    """

    partial: bool = False


CONTEXT = {
    "ring": ContextAttention(
        why="keys and values go from rank to rank during the computation", partial=True,
        implementation="lpkit.parallel.context:Ring",
        source="Liu et al. 2023, https://arxiv.org/abs/2310.01889"),
}


def _stage(name: str, value: int) -> None:
    """Raise ConfigError if `value` is not a stage of ZeRO."""
    if value not in STAGES:
        raise ConfigError(f"there is no ZeRO stage {shown(value)}; choose 0, 1, 2 or 3")


@dataclass(frozen=True, kw_only=True)
class Layout(Checked):
    """The sizes of the five axes, and how their ranks work together.

    zero:       stage of ZeRO, if there are several `shard` or `context` ranks
    interleave: number of chunks of layers (virtual stages) that each rank of a pipeline has
    reduction, gathered, schedule, attention: rows of REDUCTIONS, GATHERED, PIPELINES and CONTEXT
    """

    where = "parallel."

    data: Count = 1
    shard: Count = 1
    tensor: Count = 1
    pipeline: Count = 1
    context: Count = 1
    zero: Annotated[int, _stage] = 3
    interleave: Count = 1
    reduction: Annotated[str, lambda name, value: pick_row(REDUCTIONS, value, name)] = "overlapped"
    gathered: Annotated[str, lambda name, value: pick_row(GATHERED, value, name)] = "compute"
    schedule: Annotated[str, lambda name, value: pick_row(PIPELINES, value, name)] = "1f1b"
    attention: Annotated[str, lambda name, value: pick_row(CONTEXT, value, name)] = "ring"

    @property
    def devices(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline * self.context

    @property
    def batch_ranks(self) -> int:
        """The number of groups that read different sequences."""
        return self.data * self.shard

    @property
    def replicas(self) -> int:
        """The number of ranks with the same weights that read different tokens."""
        return self.data * self.state_ranks

    @property
    def state_ranks(self) -> int:
        """The number of ranks over which ZeRO shards; a context group has the same weights."""
        return self.shard * self.context

    @property
    def stage(self) -> int:
        """The stage of ZeRO; 0 if there are no ranks over which to divide model states."""
        return self.zero if self.state_ranks > 1 else 0

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` on each axis.

        >>> Layout(tensor=2, data=2).coordinates(1)["tensor"]
        1
        """
        coordinates = {}
        for axis in FASTEST_FIRST:
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return coordinates

    def peers(self, rank: int, axes: Collection[str]) -> list[int]:
        """Return the ranks (with `rank` itself, in order) that have the same coordinates as `rank`
        on all axes except `axes`.

        >>> Layout(tensor=2, data=2).peers(1, ["data"])
        [1, 3]
        """
        step, peers = 1, [rank]
        for axis in FASTEST_FIRST:
            size = getattr(self, axis)
            if axis in axes:
                first = -(rank // step % size)
                peers = [peer + (first + i) * step for i in range(size) for peer in peers]
            step *= size
        return sorted(peers)

    def batch_rank(self, rank: int) -> int:
        """Return the number of the group of ranks that read the same sequences as `rank`: 0 to
        batch_ranks - 1."""
        at = self.coordinates(rank)
        return at["data"] * self.shard + at["shard"]

    def __str__(self) -> str:
        axes = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        axes += [f"ZeRO {self.zero}"] if self.state_ranks > 1 else []
        if self.interleave > 1:
            axes += [f"{self.schedule} with {self.interleave} chunks a stage"]
        return ", ".join(axes) or "one device"


def check(config: Any, layout: Layout, devices: int | None = None,
          even: bool = True) -> None:
    """Raise ConfigError if `config` cannot run in `layout`, with the nearest sizes that can.

    devices: number of devices that the layout must have; None: any
    even:    all stages of a pipeline must have the same number of layers, except that the first and
             the last may have one layer fewer
    """
    if devices is not None and layout.devices != devices:
        raise ConfigError(wrong_world(config, layout, devices))
    if REDUCTIONS[layout.reduction].sent and (
            layout.stage or not 1 < layout.replicas == layout.devices):
        raise ConfigError(f"parallel.reduction={layout.reduction} averages over two or more whole "
                          f"replicas, and this layout is {layout}; set parallel.data=2 and every "
                          f"other axis to 1, or parallel.reduction=overlapped")
    m, t, c, chunks = config.model, layout.tensor, layout.context, layout.interleave
    order = PIPELINES[layout.schedule]
    if chunks > 1 and layout.pipeline == 1:
        raise ConfigError(f"interleave={chunks} chunks of layers need pipeline stages; set "
                          f"parallel.interleave=1")
    parts = {"model.heads": m.H, "model.kv_heads": m.G, "model.mlp_width": m.F, "model.vocab": m.V,
             "a context rank's share of model.context": m.T // c}
    if layout.pipeline > 1 and chunks != order.nearest_chunks(chunks):
        _refuse_chunks(config, layout, even)
    uneven = next((f"{what}={count}" for what, count in parts.items() if count % t), "")
    times = f" x interleave={chunks}" if chunks > 1 else ""
    heads = 0 if CONTEXT[layout.attention].partial else m.G // t
    for axis, most, fits, why in (
            ("context", m.T, lambda n: n == 1 or m.T % (2 * n) == 0,
             f"model.context={m.T} does not split into 2 x context={c} pieces (zig-zag deals each "
             f"rank an early and a late one)"),
            ("context", m.G, lambda n: n == 1 or (heads % n == 0 and m.T % (2 * n) == 0),
             f"parallel.attention={layout.attention} does not split {heads} key/value heads over "
             f"context={c} ranks, and parallel.attention=ring splits none"),
            ("tensor", m.H, lambda n: all(count % n == 0 for count in parts.values()),
             f"{uneven} does not split over tensor={t} ranks"),
            ("pipeline", m.L, lambda n: (stages_fit(m.L, n, chunks, order.places)
                                         or (not even and n * chunks <= m.L)),
             f"model.layers={m.L} does not split over pipeline={layout.pipeline}{times} stages, "
             f"not even with one layer fewer in the first and the last")):
        if not fits(asked := getattr(layout, axis)):
            raise ConfigError(f"{why}; {_nearest(asked, most, fits, axis)}")
    batch, ranks = config.global_batch, layout.batch_ranks
    if batch % ranks:
        splits = lambda n: batch % n == 0
        whole = math.lcm(ranks, config.grad_accum_steps)
        below = batch // whole * whole
        near = " or ".join(str(size) for size in (below, below + whole) if size)
        raise ConfigError(f"global_batch={batch} sequences does not split over data={layout.data} "
                          f"x shard={layout.shard} = {ranks} ranks; set global_batch to {near}, or "
                          f"{_nearest(ranks, batch, splits, 'data x shard')}")


def _refuse_chunks(config: Any, layout: Layout, even: bool) -> None:
    """Raise ConfigError: the schedule cannot have this number of chunks. Suggest changes with which
    the layout can be trained, or, if there are none, predicted."""
    order, chunks = PIPELINES[layout.schedule], layout.interleave
    least, most = order.chunks
    ways = [{"interleave": order.nearest_chunks(chunks)},
            {"schedule": "interleaved" if chunks > 1 else "1f1b"}, {"pipeline": 1, "interleave": 1}]
    able = [[way for way in ways if _allowed(config, replace(layout, **way), train, even)]
            for train in (True, False)]
    ways = [" ".join(f"parallel.{key}={value}" for key, value in way.items())
            for way in able[0] or able[1] or ways[2:]]
    has = f"{least} to {most} chunks" if most > least else f"{least} chunk{'s' * (least > 1)}"
    raise ConfigError(f"parallel.schedule={layout.schedule} has {has} of layers a stage, got "
                      f"parallel.interleave={chunks}; set {' or '.join(ways[:2])}")


def micro_batch(global_batch: int, pieces: int, ranks: int) -> tuple[int, int]:
    """Return (sequences of one micro-batch, micro-batches of one update) for each of `ranks` ranks.
    A micro-batch has at most `global_batch // pieces` sequences: as many as on one device that
    divides the batch into `pieces` micro-batches.

    >>> micro_batch(64, 4, 8)
    (8, 1)
    """
    share = global_batch // ranks
    piece = max(n for n in divisors(share) if n <= global_batch // pieces)
    return piece, share // piece


class Unsharded(NamedTuple):
    """A setting that must have one value in certain layouts.

    several: the layouts: an integer is a stage of ZeRO (this stage or a higher one, on several
             ranks); a string is an axis (with several ranks)
    key:     the setting
    only:    the value that it must have
    why:     what another value would do, as the end of a sentence that begins with the setting
    less:    f(config) -> whether another value is allowed in this config
    """

    several: int | str
    key: str
    only: Any
    why: str
    less: Callable[[Any], bool] = lambda config: False


UNSHARDED = (
    Unsharded(0, "memory.optimizer_step", "after",
              "updates a parameter before its gradient is reduced over the ranks"),
    *(Unsharded(several, "memory.moment_format", "float32",
                "has blocks that would cross the parts of two ranks")
      for several in (1, "tensor")),
    Unsharded(1, "memory.optimizer_state", "device",
              "moves whole states, and a rank has only a part"),
    Unsharded(2, "precision.cache_weight_casts", False,
              "keeps casts of weights that each micro-batch gathers again"),
    *(Unsharded(several, "precision.telemetry_every", 0,
                "reads whole weights, and a rank has only a part") for several in (2, "tensor")),
    Unsharded(2, "memory.param_dtype", "fp32", "leaves no float32 weights to gather from"),
    Unsharded(2, "model.init", "gpt2",
              "changes parameters after they are filled, and ranks build one parameter at a time",
              lambda config: not getattr(INITS[config.model.init.name], "again", False)),
    Unsharded(2, "governors", (), "changes whole weights, and a rank has only some rows",
              lambda config: len(running(config)) == len(config.governors)),
    *(Unsharded("tensor", key, (), "changes whole matrices, and a rank has only parts")
      for key in ("governors", "transforms", "model.changes")),
    Unsharded("pipeline", "memory.activation_offload", "device",
              "supports only one micro-batch at a time"),
    *(Unsharded("pipeline", key, only, "needs the whole model, and a rank has only some layers")
      for key, only in (("system.kernels", "auto"), ("precision.telemetry_every", 0),
                        ("objective", "next-token"), ("governors", ()), ("transforms", ()),
                        ("model.changes", ()))),
    Unsharded("pipeline", "sizes", "constant",
              "changes the number of micro-batches, which the schedule fixes"),
    Unsharded("tensor", "objective", "next-token",
              "reads all logits of a token, and a rank has only a part"),
    Unsharded("context", "objective", "next-token",
              "may read whole sequences, and a rank has only a part"),
)
# Groups of ranks that communicate: {name: the axes on which the members have other coordinates}
GROUPS = {
    "data": ("data",), "shard": ("shard", "context"), "replicas": ("data", "shard", "context"),
    "tensor": ("tensor",), "context": ("context",), "pipeline": ("pipeline",),
    "pipeline down": ("pipeline",),     # messages from higher ranks to lower ones
    "stage": ("data", "shard", "context", "tensor"),
}
APART = {"pipeline down"}       # these groups are separate, though another group has the same ranks


def trains(config: Any, changes: Mapping[str, Any]) -> bool:
    """Return whether training accepts the layout of `config` with `changes`."""
    try:
        changed = config.replace(changes)
        refuse_untrainable(changed)
    except ConfigError:
        return False
    layout = changed.parallel
    return layout.devices == 1 or layout.stage > 1 or not GATHERED[layout.gathered].cast


def refuse_ungatherable(config: Any, recipe: Recipe) -> None:
    """Raise ConfigError if `parallel.gathered` sends weights as casts (Gathered.cast), and the
    layout, the model or `recipe` (the resolved recipe of `config`) does not allow that."""
    layout = config.parallel
    if layout.devices == 1 or not GATHERED[layout.gathered].cast:
        return
    asked, name = f"parallel.gathered={layout.gathered}", recipe.settings.name
    if layout.stage < 2:
        whole = f"parallel.zero={layout.stage} keeps"
        if layout.state_ranks == 1:
            whole = f"parallel.shard={layout.shard} leaves"
        more = trains(config, {"parallel.zero": 3}) and layout.state_ranks > 1
        raise ConfigError(f"{asked} is a setting of ZeRO 2 and 3, and {whole} whole weights; set "
                          f"parallel.gathered=float32{', or parallel.zero=3' if more else ''}")
    if config.model.changes:
        names = ",".join(change.name for change in config.model.changes)
        raise ConfigError(f"{asked} casts the weights that a rank updates, and "
                          f"model.changes={names} may freeze some; set parallel.gathered=compute")
    if not recipe.gathers:
        can = [row for row, recipe in RECIPES.items() if recipe.gathers]
        raise ConfigError(f"{asked} sends each weight as one 8-bit cast for both of its products, "
                          f"and precision.recipe={name} has none; set "
                          f"parallel.gathered=compute, or use {', '.join(can[:-1])} or {can[-1]}")


def refuse_untrainable(config: Any) -> None:
    """Raise ConfigError if training does not support the layout with the other settings of
    `config`, although `lpkit predict` may. The error has all settings to change."""
    layout, stack = config.parallel, config.system.stack
    if stack != "auto":
        raise ConfigError(f"system.stack={stack} is for predictions; leave it out to train")
    if layout.devices == 1:
        return
    why, changes, lower = "", dict[str, Any](), layout.stage
    for row in UNSHARDED:
        value = functools.reduce(getattr, row.key.split("."), config)
        value = getattr(value, "name", value)
        at_stage = isinstance(row.several, int)
        asked = layout.stage >= row.several if at_stage else getattr(layout, row.several) > 1
        if asked and value != row.only and not row.less(config):
            text = ",".join(part.name for part in value) if isinstance(value, tuple) else value
            why = why or f"{row.key}={text} {row.why}"
            changes[row.key] = row.only
            lower = min(lower, row.several - 1) if at_stage else lower
    if layout.pipeline > 1 and layout.stage > 1:
        why = why or (f"parallel.zero={layout.zero} gathers weights again for each micro-batch, "
                      f"and a pipeline has several micro-batches under way")
        changes["parallel.zero"], lower = 1, layout.stage
        changes |= {"parallel.gathered": "compute"} if GATHERED[layout.gathered].cast else {}
    if layout.pipeline > 1 and (problem := PIPELINES[layout.schedule].problem(
            layout.pipeline, layout.interleave, config.micro_batches)):
        why = why or f"parallel.schedule={layout.schedule} has no order of {problem}"
        changes |= _ordered(config, layout)
    m = config.model
    if layout.tensor > 1 and m.attention.rule(m.T) is None:
        why = why or (f"model.attention={m.attention.name} has gates and states, which training "
                      f"cannot divide by heads yet")
        changes["parallel.tensor"] = 1
    if layout.tensor * layout.context > 1 and (uncut := getattr(BLOCKS[m.block], "uncut", "")):
        why = why or f"model.block={m.block} {uncut}"
        changes |= {"parallel.tensor": 1, "parallel.context": 1}
    if layout.context > 1 and (virtual(m) or m.attention.rule(m.T) is None):
        setting = (f"model.changes={','.join(change.name for change in m.changes)}" if virtual(m)
                   else f"model.attention={m.attention.name}")
        why = why or f"{setting} takes whole sequences; parallel.context={layout.context} cuts them"
        changes["parallel.context"] = 1
    way, backend = layout.attention, ATTENTION.get(config.system.attention)     # None: auto
    if layout.context > 1 and CONTEXT[way].partial and backend and not backend.partial:
        why = why or (f"parallel.attention={way} combines parts of the keys by their log-sums, and "
                      f"system.attention={config.system.attention} does not compute the gradient "
                      f"of log-sums")
        changes["system.attention"] = "auto"
    if not why:
        return
    words = " ".join(f"{key}={'' if value == () else value}" for key, value in changes.items())
    less = 0 <= lower < layout.stage and trains(config, {"parallel.zero": lower})
    other = f", or parallel.zero={lower}" if less else ""
    raise ConfigError(f"{why}; set {words}{other}")


def _ordered(config: Any, layout: Layout) -> dict[str, Any]:
    """Return changes of settings with which the pipeline schedule has an order: the nearest number
    of micro-batches that divides a rank's sequences. If there is none: no pipeline."""
    row, ranks = PIPELINES[layout.schedule], layout.pipeline
    chunks = row.nearest_chunks(layout.interleave)
    for m in sorted(divisors(config.global_batch // layout.batch_ranks),
                    key=lambda m: abs(m - config.micro_batches)):
        if (stages_fit(config.model.L, ranks, chunks, row.places)
                and not row.problem(ranks, chunks, m)):
            changes = {"parallel.interleave": chunks} if chunks != layout.interleave else {}
            more = {"grad_accum_steps": m * layout.batch_ranks} if m != config.micro_batches else {}
            return changes | more
    return {"parallel.pipeline": 1, "parallel.interleave": 1}


def stages_fit(layers: int, stages: int, chunks: int, places: str = "loop") -> bool:
    """Return whether `layers` can be divided so that all chunks have the same number of layers, or
    so that the first and the last chunk have one layer fewer and each rank has some layers. With
    `places` "v", one rank has the first and the last chunk."""
    fewer = 2 if places == "v" else 1
    return (layers % (stages * chunks) == 0
            or ((layers + 2) % (stages * chunks) == 0 and (layers + 2) // stages > fewer))


def _nearest(asked: int, most: int, fits: Callable[[int], bool], name: str) -> str:
    """Return a clause such as "tensor may be 4 or 8": the nearest sizes that fit, one below `asked`
    and one above it, up to `most`."""
    # Even splits divide `most`. Stages of layers may also divide most + 2.
    sizes = sorted(n for n in {*divisors(most), *divisors(most + 2)} if n <= most and fits(n))
    below, above = [n for n in sizes if n < asked][-1:], [n for n in sizes if n > asked][:1]
    return f"{name} may be {' or '.join(map(str, below + above))}"


def wrong_world(config: Any, layout: Layout, devices: int) -> str:
    """Return the error for a layout that does not have `devices` devices. It has axis sizes with
    which the layout would have them, and which training supports."""
    product = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES)
    ways = []
    for axis in AXES:
        size, left = divmod(devices * getattr(layout, axis), layout.devices)
        if not left and _allowed(config, replace(layout, **{axis: max(1, size)})):
            ways.append(f"parallel.{axis}={size}")
    out = f"set {' or '.join(ways)}" if ways else f"use {layout.devices} devices"
    return f"{product} is {layout.devices} devices, not {devices}; {out}"


def _allowed(config: Any, layout: Layout, train: bool = True, even: bool = True) -> bool:
    """Return whether `config` can run in this layout. With train=False, return whether its layout
    can at least be predicted."""
    try:
        check(config, layout, even=even)
        return not train or trains(replace(config, parallel=layout), {})
    except ConfigError:
        return False


def divisors(count: int) -> list[int]:
    """Return the divisors of count in ascending order."""
    small = [n for n in range(1, int(count**0.5) + 1) if count % n == 0]
    return sorted({*small, *(count // n for n in small)})
