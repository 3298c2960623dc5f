"""A training run is spread over devices along five axes, whose product is the world.

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
from lpkit.techniques.row import Row, pick_row
from lpkit.values import Checked, Count

AXES = ("data", "shard", "tensor", "pipeline", "context")
FASTEST_FIRST = ("tensor", "context", "shard", "data", "pipeline")


# What ZeRO spreads over ranks; the implementation is a `lpkit.parallel.sharding.Sharding`.
STAGES = {
    0: Row(why="every rank has everything, and gradients are averaged",
           implementation="lpkit.parallel.replicas:Replicas"),
    1: Row(why="each rank updates its part of every parameter, and has the optimizer's state of it",
           implementation="lpkit.parallel.replicas:ShardedOptimizer"),
    2: Row(why="FSDP2; whole weights from forward to the end of backward",
           implementation="lpkit.parallel.fully_sharded:FullySharded"),
    3: Row(why="FSDP2; a block's whole weights while it is at work",
           implementation="lpkit.parallel.fully_sharded:FullySharded"),
}


@dataclass(frozen=True, kw_only=True)
class Reduction(Row):
    """A way to send whole gradients (ZeRO 0 and 1): in messages of `bucket_bytes`, a parameter at
    least; `overlaps`: each as soon as backward has its gradients.

    A row from outside has `sent`, and is for ZeRO 0. sent(shape, ranks, itemsize): bytes of one
    message that each rank sends in an update; the message of one parameter has its shape. The
    implementation makes a `replicas.Replicas`, as `lessons.rows.reductions_torch.Averaged` is."""

    implementation: str = "lpkit.parallel.replicas:Replicas"
    bucket_bytes: int
    overlaps: bool = False
    sent: Callable[[tuple[int, ...], int, int], float] | None = None


DDP = "Li et al. 2020, https://arxiv.org/abs/2006.15704"
REDUCTIONS = {
    "per-parameter": Reduction(why="a message a parameter, after backward; the naive way",
                               bucket_bytes=0, overlaps=False),
    "buckets": Reduction(why="messages of 25 MiB, after backward", source=DDP,
                         bucket_bytes=25 << 20, overlaps=False),
    "overlapped": Reduction(why="messages of 25 MiB, beside the rest of backward", source=DDP,
                            bucket_bytes=25 << 20, overlaps=True),
}


@dataclass(frozen=True, kw_only=True)
class Gathered(Row):
    """A form in which gathered weights travel (ZeRO 2 and 3). `mixed`: all in the dtype of the
    computation; `cast`: those that the recipe casts as their cast, in its 8 bits, by the transform
    that the implementation makes of the `Sharding`."""

    mixed: bool = False
    cast: bool = False


GATHERED = {
    "compute": Gathered(mixed=True, why="in the dtype of the computation, as FSDP's mixed precision "
                                        "has it: the residual stream is then in it, too"),
    "float32": Gathered(why="as they rest: the numbers of one device"),
}


@dataclass(frozen=True, kw_only=True)
class ContextAttention(Row):
    """A way to attend over sequences of which each rank of a context group has a part. The
    implementation makes a `contracts.Attend` of what one rank attends with, and of the ranks.
    `partial`: it is a `contracts.Partial`, of some keys; else of some heads, which must divide."""

    partial: bool = False


CONTEXT = {
    "ring": ContextAttention(
        why="keys and values go from rank to rank, while those at hand are used", partial=True,
        implementation="lpkit.parallel.context:Ring",
        source="Liu et al. 2023, https://arxiv.org/abs/2310.01889"),
}


def _stage(name: str, value: int) -> None:
    if value not in STAGES:
        raise ConfigError(f"there is no ZeRO stage {shown(value)}; choose 0, 1, 2 or 3")


@dataclass(frozen=True, kw_only=True)
class Layout(Checked):
    """Sizes of the axes. `interleave`: chunks of layers (virtual stages) that each stage holds;
    `attention`: how context ranks attend to one another's tokens."""

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
        """Groups that read different sequences."""
        return self.data * self.shard

    @property
    def replicas(self) -> int:
        """Ranks that read different tokens by the same weights."""
        return self.data * self.state_ranks

    @property
    def state_ranks(self) -> int:
        """Ranks over which ZeRO spreads model states; a context group holds the same weights."""
        return self.shard * self.context

    @property
    def stage(self) -> int:
        """ZeRO's, where there are ranks to shard over."""
        return self.zero if self.state_ranks > 1 else 0

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns where `rank` stands on each axis."""
        found = {}
        for axis in FASTEST_FIRST:
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def peers(self, rank: int, axes: Collection[str]) -> list[int]:
        """Returns the ranks, in order, that stand where `rank` does but on `axes`."""
        step, found = 1, [rank]
        for axis in FASTEST_FIRST:
            size = getattr(self, axis)
            if axis in axes:
                first = -(rank // step % size)
                found = [one + (first + i) * step for i in range(size) for one in found]
            step *= size
        return sorted(found)

    def batch_rank(self, rank: int) -> int:
        """Returns which of the `batch_ranks` it belongs to."""
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
    """Raises ConfigError when `config` cannot run in this layout, on `devices` where given, with
    the nearest that can. Not `even`: stages have layers, but not as many each."""
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
    """Raises ConfigError: the schedule has another number of chunks. The ways out train, or at least
    exist."""
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
    """Sequences that a rank forwards at a time, and how many times until the update. `pieces`, into
    which one device would split the batch, say how large one may be."""
    share = global_batch // ranks
    piece = max(n for n in divisors(share) if n <= global_batch // pieces)
    return piece, share // piece


class Unsharded(NamedTuple):
    """A setting that must be `only` where training has `several`: a stage of ZeRO's or above it on
    several ranks, or several on that axis."""

    several: int | str
    key: str
    only: Any
    why: str
    less: Callable[[Any], bool] = lambda config: False      # where it may be all the same


UNSHARDED = (
    Unsharded(0, "memory.optimizer_step", "after",
              "updates a parameter before its gradient has met those of other ranks"),
    *(Unsharded(several, "memory.moment_format", "float32",
                "has scales of blocks that cross the parts of two ranks")
      for several in (1, "tensor")),
    Unsharded(1, "memory.optimizer_state", "device", "moves whole states, and a rank has a part"),
    Unsharded(2, "precision.cache_weight_casts", False,
              "keeps casts of weights that are gathered anew in each micro-batch"),
    *(Unsharded(several, "precision.telemetry_every", 0,
                "looks at whole weights, and a rank has a part") for several in (2, "tensor")),
    Unsharded(2, "memory.param_dtype", "fp32", "leaves no float32 weights to gather from"),
    Unsharded(2, "model.init", "gpt2",
              "changes what it has filled, and ranks make one whole parameter at a time",
              lambda config: not getattr(INITS[config.model.init.name], "again", False)),
    Unsharded(2, "governors", (), "changes whole weights, and a rank has rows",
              lambda config: len(running(config)) == len(config.governors)),
    *(Unsharded("tensor", key, (), "changes whole matrices, and a rank has parts")
      for key in ("governors", "transforms", "model.changes")),
    Unsharded("pipeline", "memory.activation_offload", "device",
              "moves activations back as one micro-batch at a time needs them"),
    *(Unsharded("pipeline", key, only, "is of a whole model, and a rank has some layers")
      for key, only in (("system.kernels", "auto"), ("precision.telemetry_every", 0),
                        ("objective", "next-token"), ("governors", ()), ("transforms", ()),
                        ("model.changes", ()))),
    Unsharded("pipeline", "sizes", "constant",
              "changes the number of micro-batches, and an order is of one"),
    Unsharded("tensor", "objective", "next-token",
              "reads all logits of a token, and a rank has a part"),
    Unsharded("context", "objective", "next-token",
              "may read whole sequences, and a rank has a part"),
)
# The ranks that talk, by what they are to one another: the axes on which they differ.
GROUPS = {
    "data": ("data",), "shard": ("shard", "context"), "replicas": ("data", "shard", "context"),
    "tensor": ("tensor",), "context": ("context",), "pipeline": ("pipeline",),
    "pipeline down": ("pipeline",),     # messages from higher ranks to lower ones
    "stage": ("data", "shard", "context", "tensor"),
}
APART = {"pipeline down"}       # of their own, though another group has the same ranks


def trains(config: Any, changes: Mapping[str, Any]) -> bool:
    """True if training has the layout of `config` with `changes`: a way out that no one refuses."""
    try:
        changed = config.replace(changes)
        refuse_untrainable(changed)
    except ConfigError:
        return False
    layout = changed.parallel
    return layout.devices == 1 or layout.stage > 1 or not GATHERED[layout.gathered].cast


def refuse_ungatherable(config: Any, recipe: Recipe) -> None:
    """Raises ConfigError where weights cannot travel as the recipe, that of the config, casts
    them."""
    layout = config.parallel
    if layout.devices == 1 or not GATHERED[layout.gathered].cast:
        return
    asked, name = f"parallel.gathered={layout.gathered}", recipe.settings.name
    if layout.stage < 2:
        whole = f"parallel.zero={layout.stage} keeps"
        if layout.state_ranks == 1:
            whole = f"parallel.shard={layout.shard} leaves"
        more = trains(config, {"parallel.zero": 3}) and layout.state_ranks > 1
        raise ConfigError(f"{asked} is of ZeRO 2 and 3, and {whole} whole weights; set "
                          f"parallel.gathered=float32{', or parallel.zero=3' if more else ''}")
    if config.model.changes:
        names = ",".join(one.name for one in config.model.changes)
        raise ConfigError(f"{asked} casts the weights that a rank updates, and "
                          f"model.changes={names} may freeze some; set parallel.gathered=compute")
    if not recipe.gathers:
        can = [row for row, recipe in RECIPES.items() if recipe.gathers]
        raise ConfigError(f"{asked} sends a weight as the one cast, of 8 bits, that both its "
                          f"products take, and precision.recipe={name} has none; set "
                          f"parallel.gathered=compute, or use {', '.join(can[:-1])} or {can[-1]}")


def refuse_untrainable(config: Any) -> None:
    """Raises ConfigError for what is predicted and not trained; its way out sets all that must be."""
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
            said = ",".join(one.name for one in value) if isinstance(value, tuple) else value
            why = why or f"{row.key}={said} {row.why}"
            changes[row.key] = row.only
            lower = min(lower, row.several - 1) if at_stage else lower
    if layout.pipeline > 1 and layout.stage > 1:
        why = why or (f"parallel.zero={layout.zero} gathers weights anew for each micro-batch, and "
                      f"a pipeline has many under way")
        changes["parallel.zero"], lower = 1, layout.stage
        changes |= {"parallel.gathered": "compute"} if GATHERED[layout.gathered].cast else {}
    if layout.pipeline > 1 and (problem := PIPELINES[layout.schedule].problem(
            layout.pipeline, layout.interleave, config.micro_batches)):
        why = why or f"parallel.schedule={layout.schedule} has no order of {problem}"
        changes |= _ordered(config, layout)
    m = config.model
    if layout.tensor > 1 and m.attention.rule(m.T) is None:
        why = why or (f"model.attention={m.attention.name} has gates and states that are not cut by "
                      f"heads so far")
        changes["parallel.tensor"] = 1
    if layout.tensor * layout.context > 1 and (uncut := getattr(BLOCKS[m.block], "uncut", "")):
        why = why or f"model.block={m.block} {uncut}"
        changes |= {"parallel.tensor": 1, "parallel.context": 1}
    if layout.context > 1 and (virtual(m) or m.attention.rule(m.T) is None):
        said = (f"model.changes={','.join(one.name for one in m.changes)}" if virtual(m) else
                f"model.attention={m.attention.name}")
        why = why or f"{said} takes whole sequences, and parallel.context={layout.context} cuts them"
        changes["parallel.context"] = 1
    way, backend = layout.attention, ATTENTION.get(config.system.attention)     # None: auto
    if layout.context > 1 and CONTEXT[way].partial and backend and not backend.partial:
        why = why or (f"parallel.attention={way} combines parts of the keys by their log-sums, "
                      f"whose gradient system.attention={config.system.attention} has not")
        changes["system.attention"] = "auto"
    if not why:
        return
    words = " ".join(f"{key}={'' if value == () else value}" for key, value in changes.items())
    less = 0 <= lower < layout.stage and trains(config, {"parallel.zero": lower})
    other = f", or parallel.zero={lower}" if less else ""
    raise ConfigError(f"{why}; set {words}{other}")


def _ordered(config: Any, layout: Layout) -> dict[str, Any]:
    """Returns what to set so that the schedule has an order: of the nearest number of micro-batches
    that divides a rank's sequences; else there is no pipeline."""
    row, ranks = PIPELINES[layout.schedule], layout.pipeline
    chunks = row.nearest_chunks(layout.interleave)
    for m in sorted(divisors(config.global_batch // layout.batch_ranks),
                    key=lambda m: abs(m - config.micro_batches)):
        if (stages_fit(config.model.L, ranks, chunks, row.places)
                and not row.problem(ranks, chunks, m)):
            found = {"parallel.interleave": chunks} if chunks != layout.interleave else {}
            more = {"grad_accum_steps": m * layout.batch_ranks} if m != config.micro_batches else {}
            return found | more
    return {"parallel.pipeline": 1, "parallel.interleave": 1}


def stages_fit(layers: int, stages: int, chunks: int, places: str = "loop") -> bool:
    """True if the chunks of layers are equal, or with one layer fewer in the first and last, which
    leaves layers to each rank: in a V one rank has both."""
    fewer = 2 if places == "v" else 1
    return (layers % (stages * chunks) == 0
            or ((layers + 2) % (stages * chunks) == 0 and (layers + 2) // stages > fewer))


def _nearest(asked: int, most: int, fits: Callable[[int], bool], name: str) -> str:
    """'tensor may be 4 or 8': the next size that fits below `asked`, and above up to `most`."""
    # what splits evenly divides `most`; stages of layers may also divide two more
    sizes = sorted(n for n in {*divisors(most), *divisors(most + 2)} if n <= most and fits(n))
    below, above = [n for n in sizes if n < asked][-1:], [n for n in sizes if n > asked][:1]
    return f"{name} may be {' or '.join(map(str, below + above))}"


def wrong_world(config: Any, layout: Layout, devices: int) -> str:
    """The way out is a size of an axis that is trained, and that all else allows."""
    product = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES)
    ways = []
    for axis in AXES:
        size, left = divmod(devices * getattr(layout, axis), layout.devices)
        if not left and _allowed(config, replace(layout, **{axis: max(1, size)})):
            ways.append(f"parallel.{axis}={size}")
    out = f"set {' or '.join(ways)}" if ways else f"use {layout.devices} devices"
    return f"{product} is {layout.devices} devices, not {devices}; {out}"


def _allowed(config: Any, layout: Layout, train: bool = True, even: bool = True) -> bool:
    """True if `config` can run in this layout, or without `train` at least be predicted."""
    try:
        check(config, layout, even=even)
        return not train or trains(replace(config, parallel=layout), {})
    except ConfigError:
        return False


def divisors(count: int) -> list[int]:
    """Returns the divisors of count in ascending order."""
    small = [n for n in range(1, int(count**0.5) + 1) if count % n == 0]
    return sorted({*small, *(count // n for n in small)})
