"""Seconds of one step in any layout, operation by operation; energy and money of a run.

The rows are those of the stage that is slowest, over all its micro-batches, and add up to the step. Products, attention
and pointwise work are rooflines at an `Efficiency` of `lpkit.predict.precision`; communication is alpha-beta over rings:
a hop costs a latency, a byte the inverse of a bandwidth. What hides behind computation is counted apart, in
`hidden_seconds`. Assumed of overlap:

    weights of the next block are gathered, and gradients of the last one scattered, while a block computes (FSDP);
    gradients of the whole stage, and ZeRO-1's gather of weights, hide behind one backward or forward pass;
    keys and values of context ranks hide behind attention; tensor-parallel and pipeline messages hide behind nothing.

Left out: stragglers, failures, checkpoints, evaluation, data, clock throttling, contention of overlapped kernels, launch
overheads but for the least time of a kernel. `calibrate` turns one short measured run into a factor for them.

Sources: Thakur, Rabenseifner, Gropp 2005 for rings, https://doi.org/10.1177/1094342005051521; Narayanan et al. 2021 for
pipelines, https://arxiv.org/abs/2104.04473; Korthikanti et al. 2022 for tensor and sequence parallelism,
https://arxiv.org/abs/2205.05198.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, nearest
from lpkit.predict.flops import Product, products, training_flops
from lpkit.predict.ledger import PRECISIONS, Precision, micro_batch
from lpkit.predict.params import parameters, product_weights
from lpkit.predict.precision import (
    ASSUMED,
    FP32,
    REACHED,
    Efficiency,
    Operand,
    Recipe,
    linear_cost,
    product_seconds,
)
from lpkit.predict.roofline import ADAMW_BYTES, causal_share, pointwise_bytes
from lpkit.techniques import machines
from lpkit.techniques.layouts import Layout, check, layers_of_stage
from lpkit.techniques.machines import LATENCY_SOURCE, Machine

RINGS = f"ring, Thakur et al. 2005, https://doi.org/10.1177/1094342005051521; latency: {LATENCY_SOURCE}"
TENSOR = "Korthikanti et al. 2022, section 4.2, https://arxiv.org/abs/2205.05198"
PIPELINE = "Narayanan et al. 2021, section 2.2, https://arxiv.org/abs/2104.04473"
RING_ATTENTION = "Liu et al. 2023, https://arxiv.org/abs/2310.01889"
FSDP = "Zhao et al. 2023, https://arxiv.org/abs/2304.11277"
FLASH = "Dao et al. 2022, https://arxiv.org/abs/2205.14135"
ROOFLINE = "lpkit.predict.precision.product_seconds"
ZERO = "Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054"
BASE = "bf16"           # what stays where Linears are cast to fewer bits
FINE_SHARE = 0.8        # of 8-bit products' efficiency where float32 scales are finer than a tensor (docs/advise.md)
BY_OUTPUT = ("attention.qkv", "mlp.up", "mlp.gate_up", "head")     # split over tensor ranks by columns, the others by rows

RECOMPUTED: dict[str, frozenset[str]] = {   # by a row of activations.RECOMPUTE: what runs once more in backward
    "none": frozenset(),
    "block": frozenset({"products", "attention", "pointwise", "tensor"}),
    "selective": frozenset({"pointwise", "unfused attention"}),
}


# Attention of one layer, forward: from the FLOPs that are left to do and the bytes of one (T, T) matrix of every head.

@dataclass(frozen=True, kw_only=True)
class Attention:
    """`passes` over the scores: of what is written to memory and read again."""

    passes: int
    backward: float             # of the forward's seconds
    words: str

    def seconds(self, flops: float, square_bytes: float, peak: float, bandwidth: float, efficiency: Efficiency,
                dtype: str) -> float:
        rate = efficiency.products[dtype] if self.passes else efficiency.attention
        return flops / (peak * rate) + self.passes * square_bytes / bandwidth


ATTENTION = {   # by model.attention; "auto" is a flash kernel, as on a GPU
    "sdpa": Attention(passes=0, backward=2.5, words="a flash kernel, over the pairs that the mask leaves: 2 products "
                                                    "forward, 5 backward"),
    "plain": Attention(passes=6, backward=2.0, words="scores written, masked, turned to probabilities, read: 6 passes over "
                                                     "(T, T) forward, 12 backward, 6 products"),
}


# Links.

@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the ranks of one group, per rank and direction. `hops_seconds` is the latency of going round once."""

    size: int
    bytes_per_second: float
    hops_seconds: float
    words: str


def link(machine: Machine, layout: Layout, axis: str, efficiency: Efficiency = ASSUMED) -> Link:
    """The group along an axis of the layout; "states" is `shard` and `context` together.

    Inside a node the link counts. Beyond it every rank has its own share of the network, and the members that a group has
    in one node pull together. Raises ConfigError for a machine that nothing joins.
    """
    first, size = ("context", layout.state_ranks) if axis == "states" else (axis, getattr(layout, axis))
    stride = layout.stride(first)
    local = max(1, min(size, machine.devices_per_node // stride))
    nodes = -(-size // local)
    wire = (machine.link_bytes_per_second or 0) / 2         # the datasheet adds both directions
    if size > 1 and ((local > 1 and not wire) or (nodes > 1 and not machine.network_bytes_per_second)):
        what = ("network_bytes_per_second, between its nodes" if nodes > 1 and not machine.network_bytes_per_second
                else "link_bytes_per_second, inside its node")
        raise ConfigError(f"{axis}={size} on {machine.title} needs {what}, and it says none; "
                          f"use one device, or describe the machine in YAML with it")
    rate = wire if nodes == 1 else min(local * machine.network_bytes_per_second, wire if local > 1 else float("inf"))
    where = f"{machine.link or 'link'} in one node" if nodes == 1 else f"network, {nodes} nodes, {local} rank(s) in each"
    return Link(size=size, bytes_per_second=max(rate, 1.0) * efficiency.links, words=where,
                hops_seconds=(nodes - 1) * machine.network_seconds + (size - nodes) * machine.link_seconds)


def all_gather_seconds(nbytes: float, on: Link) -> float:
    """`nbytes` is the whole result: (n - 1) hops, each of an n-th of it."""
    return on.hops_seconds + (on.size - 1) / on.size * nbytes / on.bytes_per_second if on.size > 1 else 0.0


reduce_scatter_seconds = all_gather_seconds     # the same messages, the other way round; `nbytes` is the whole operand


def all_reduce_seconds(nbytes: float, on: Link) -> float:
    """A reduce-scatter, then an all-gather: 2 (n - 1) hops."""
    return 2 * all_gather_seconds(nbytes, on)


def send_seconds(nbytes: float, on: Link) -> float:
    """To the next rank."""
    return on.hops_seconds / max(1, on.size - 1) + nbytes / on.bytes_per_second if on.size > 1 else 0.0


# One step.

@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of the slowest stage in one step. `hidden_seconds` pass behind other rows."""

    name: str
    seconds: float
    formula: str
    source: str
    hidden_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One update of the whole batch."""

    rows: tuple[Row, ...]
    tokens: int
    devices: int
    model_flops: float          # by which MFU is defined: attention in full, nothing done twice
    peak_flops: float           # of one device
    micro_batches: int
    sequences: int              # of a micro-batch
    efficiency: Efficiency
    factor: float = 1.0         # of a calibration; it is in the rows already

    @property
    def step_seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def flops_per_device(self) -> float:
        """Model FLOP/s that one device reaches."""
        return self.model_flops / self.step_seconds / self.devices

    @property
    def mfu(self) -> float:
        return self.flops_per_device / self.peak_flops

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What one short measured run says about a prediction."""

    factor: float               # measured over predicted
    predicted_seconds: float
    measured_seconds: float

    @property
    def source(self) -> str:
        return (f"one measured step of {self.measured_seconds:.4g} s where the formula says {self.predicted_seconds:.4g} s: "
                f"all rows times {self.factor:.3f}")


def calibrate(config: Config, machine: "str | Machine", measured_step_seconds: float, layout: Layout | None = None,
              **how: Any) -> Calibration:
    """One factor from one measured step; give it to `step_time` for other layouts, sizes or numbers of devices."""
    if not 0 < measured_step_seconds < 1e7:
        raise ConfigError(f"a measured step takes more than 0 and less than 1e7 seconds, got {measured_step_seconds}")
    said = step_time(config, machine, layout, **how).step_seconds
    return Calibration(factor=measured_step_seconds / said, predicted_seconds=said,
                       measured_seconds=measured_step_seconds)


def step_time(config: Config, machine: "str | Machine" = "h200", layout: Layout | None = None, *,
              precision: str | None = None, recompute: str | None = None, efficiency: Efficiency | None = None,
              calibration: Calibration | None = None) -> StepTime:
    """One update of `config`. Raises ConfigError for what cannot be.

    precision    a row of `ledger.PRECISIONS`; one that casts its Linears pays for the casts, as `lpkit advise` counts
                 them. None: the config's recipe, where "auto" is bf16
    recompute    a row of RECOMPUTED; None: the config's. Every n-th block, as the config says
    efficiency   what is reached of the ceilings; None: ASSUMED, or REACHED for a machine that was measured
    """
    layout, on, recompute = layout or Layout(), machines.find(machine), recompute or config.memory.recompute
    precision = precision or {"auto": "bf16"}.get(config.precision.recipe, config.precision.recipe)
    check(config, layout)
    for value, known, what in ((precision, PRECISIONS, "precision"), (recompute, RECOMPUTED, "recompute mode")):
        if value not in known:
            raise ConfigError(f"there is no {what} {value!r}; {nearest(value, known)}")
    efficiency = efficiency or (REACHED if on.name == "this" else ASSUMED)
    p, m = PRECISIONS[precision], config.model
    sequences, pieces = micro_batch(config, layout.batch_ranks)
    recipe = _recipe(precision, p)
    if recipe is not None:
        on.peak_flops(p.dtype)      # refuses a machine that lacks it
        p = replace(p, dtype=BASE)
    again = -(-m.L // config.memory.recompute_every) / m.L      # the share of the blocks that run again
    parts = _Parts(m, on, layout, p, recompute, again, recipe, efficiency, sequences)
    rows = parts.rows(pieces)
    factor = calibration.factor if calibration else 1.0
    if factor != 1.0:
        rows = [replace(row, seconds=row.seconds * factor, hidden_seconds=row.hidden_seconds * factor) for row in rows]
    return StepTime(rows=tuple(rows), tokens=config.tokens_per_step, devices=layout.devices,
                    model_flops=training_flops(m, batch=config.batch),
                    peak_flops=on.peak_flops(p.dtype), micro_batches=pieces, sequences=sequences,
                    efficiency=efficiency, factor=factor)


class _Parts:
    """One micro-batch on one rank: seconds of one layer, of the head, and of what they say to other ranks."""

    def __init__(self, m: ModelConfig, on: Machine, layout: Layout, p: Precision, recompute: str, blocks: float,
                 recipe: Recipe | None, efficiency: Efficiency, sequences: int):
        self.m, self.on, self.layout, self.p, self.efficiency = m, on, layout, p, efficiency
        self.recompute, self.sequences = recompute, sequences
        self.bandwidth = on.bytes_per_second * efficiency.bandwidth
        peak = on.peak_flops(p.dtype)
        split = layout.tensor * layout.context
        self.forward: dict[str, float] = {}
        self.backward: dict[str, float] = {}
        self.sizes: dict[str, str] = {}
        self.attention = ATTENTION.get(m.attention, ATTENTION["sdpa"])
        attention, causal = 0.0, not self.attention.passes
        for one in rank_products(m, layout, sequences):
            if one.pairs:
                attention += one.flops / one.calls * (causal_share(one, m) if causal else 1)
            else:
                self.forward[one.name], self.backward[one.name] = _linear(one, on, efficiency, p, recipe)
                self.sizes[one.name] = f"({one.M:,}, {one.K:,}) x ({one.K:,}, {one.N:,})"
        self.forward["attention"] = self.attention.seconds(attention, sequences * m.H * m.T**2 / split * p.compute,
                                                           peak, self.bandwidth, efficiency, p.dtype)
        self.backward["attention"] = self.attention.backward * self.forward["attention"]
        layer, outside = pointwise_split(m, p.compute, p.stream)
        moved = sequences * efficiency.fused / split / self.bandwidth
        self.pointwise, self.pointwise_head = layer * moved, outside * moved
        casts = (p.compute + p.weights) / self.bandwidth if p.compute < p.weights else 0.0
        shards = layout.state_ranks if layout.zero == 3 else 1
        self.casts = 2 * casts * (product_weights(m) - m.V * m.D) / m.L / layout.tensor / shards
        # a forward pass has 4 collectives a layer; backward has 4, and one more gather that hides
        self.tensor_link = link(on, layout, "tensor", efficiency)
        self.activation_bytes = sequences * m.T // layout.context * m.D * p.compute     # of a tensor group, whole
        self.tensor_once = all_gather_seconds(self.activation_bytes, self.tensor_link)
        # what runs again in backward, on average over the layers
        self.again = RECOMPUTED[recompute]
        attention_again = {"attention", "unfused attention"} if self.attention.passes else {"attention"}
        self.layer_forward = self._layer(self.forward) + self.pointwise
        self.repeated = blocks * sum(seconds for kinds, seconds in (
            ({"products"}, self._layer(self.forward) - self.forward["attention"]),
            (attention_again, self.forward["attention"]), ({"pointwise"}, self.pointwise)) if kinds & self.again)
        self.repeated_tensor = blocks * 4 * self.tensor_once * ("tensor" in self.again)
        self.layer_backward = self._layer(self.backward) + 1.5 * self.pointwise + self.repeated
        keys = 2 * sequences * m.T * m.G * m.E * p.compute / layout.tensor if layout.context > 1 else 0.0
        ring = all_gather_seconds(keys, link(on, layout, "context", efficiency))
        # forward passes keys and values round; backward passes them and their gradients
        passes = ((ring, self.forward["attention"]), (2 * ring, self.backward["attention"]))
        self.context_shown = sum(max(0.0, said - behind) for said, behind in passes)
        self.context_all = 3 * ring

    def _layer(self, seconds: Mapping[str, float]) -> float:
        return sum(value for name, value in seconds.items() if name != "head")

    def rows(self, pieces: int) -> list[Row]:
        layout, p, L = self.layout, self.p, self.m.L
        v, stages = layout.interleave, layout.pipeline
        chunk, fewer = layers_of_stage(L, stages * v)
        middle = chunk * v
        ends = middle - 1 if fewer else middle
        states = self._states(middle)
        per_layer = (self.layer_forward + self.layer_backward + self.casts + 8 * self.tensor_once + self.repeated_tensor
                     + self.context_shown)
        head = (self.forward["head"] + self.backward["head"] + 2.5 * self.pointwise_head + 2 * self.tensor_once)
        send = 2 * v * send_seconds(self.activation_bytes / layout.tensor * p.stream / p.compute,
                                    link(self.on, layout, "pipeline", self.efficiency))
        first, last = ends * per_layer, ends * per_layer + head
        has_head = stages == 1 or last >= middle * per_layer
        if stages == 1:
            layers, total = L, L * per_layer + head
            others = 0.0
        else:
            layers = ends if has_head else middle
            total = max(last, middle * per_layer)
            others = first + last + (stages - 2) * middle * per_layer - total
        times = pieces * layers
        count = f"{pieces} micro-batches x {layers} layers"
        rows = [Row(name=name, seconds=times * (self.forward[name] + self.backward[name]), source=ROOFLINE,
                    formula=f"{count}, {self.sizes[name]} and its two gradients, {p.dtype} at "
                            f"{self.efficiency.products[p.dtype]:.2f} of the peak")
                for name in self.forward if name not in ("head", "attention")]
        rows.append(Row(name="attention", seconds=times * (self.forward["attention"] + self.backward["attention"]),
                        formula=f"{count}, {self.attention.words}", source=FLASH))
        if has_head:
            rows.append(Row(name="head", seconds=pieces * (self.forward["head"] + self.backward["head"]), source=ROOFLINE,
                            formula=f"{pieces} micro-batches, {self.sizes['head']} and its two gradients"))
        rows += [
            Row(name="norms, activations, loss", source="lpkit.predict.roofline.pointwise_bytes",
                seconds=2.5 * (times * self.pointwise + pieces * self.pointwise_head * has_head),
                formula=f"bytes moved, {self.efficiency.fused:g} of them left by fusion, at "
                        f"{self.efficiency.bandwidth:g} of the memory's bandwidth; backward moves 1.5 times as much"),
            Row(name="weight copies", seconds=times * self.casts, source="https://docs.pytorch.org/docs/stable/amp.html",
                formula="each weight to the compute dtype, each gradient back, once a micro-batch"),
            Row(name="recomputation", seconds=times * self.repeated,
                formula=f"recompute={self.recompute}: {', '.join(sorted(self.again)) or 'nothing'} once more",
                source="Chen et al. 2016, https://arxiv.org/abs/1604.06174"),
            Row(name="tensor: gathers and scatters", source=f"{TENSOR}; {RINGS}",
                seconds=times * (8 * self.tensor_once + self.repeated_tensor) + 2 * pieces * self.tensor_once * has_head,
                hidden_seconds=times * self.tensor_once,
                formula=f"4 collectives of {self.activation_bytes:,} bytes a layer forward, 4 backward, over "
                        f"{self.tensor_link.words}; the one more that backward needs is hidden"),
            Row(name="context: keys and values", seconds=times * self.context_shown, source=f"{RING_ATTENTION}; {RINGS}",
                hidden_seconds=times * (self.context_all - self.context_shown),
                formula="round the ring once forward, with their gradients backward; what attention does not hide"),
            Row(name="pipeline: send and receive", seconds=pieces * send, source=PIPELINE,
                formula=f"{pieces} micro-batches x {v} chunks, activations forward and gradients backward"),
            Row(name="pipeline: bubble", seconds=others / v + (stages - 1) * send / v, source=PIPELINE,
                formula=f"(stages - 1) / (micro-batches x chunks) of the rest: ({stages} - 1) / ({pieces} x {v}), "
                        f"each stage at its own pace"),
            *self._state_rows(pieces, layers, states),
            Row(name="optimizer", seconds=ADAMW_BYTES * states / (layout.state_ranks if layout.zero else 1) / self.bandwidth,
                formula=f"{ADAMW_BYTES} bytes a parameter that the rank updates", source="AdamW in float32"),
        ]
        return [row for row in rows if row.seconds or row.hidden_seconds]

    def _states(self, layers: int) -> float:
        """Parameters of a rank before ZeRO: its layers, and the embedding or the head, over tensor ranks."""
        outside, block = weights_split(self.m)
        ends = outside if self.layout.pipeline == 1 else outside / 2
        return (layers * block + ends) / self.layout.tensor

    def _state_rows(self, pieces: int, layers: int, states: float) -> list[Row]:
        layout, p, rows = self.layout, self.p, []
        _, block = weights_split(self.m)
        block /= layout.tensor
        ring = link(self.on, layout, "states", self.efficiency)
        forward, backward = self.layer_forward, self.layer_backward
        windows = {"forward": layers * forward, "backward": layers * backward}
        left = windows["backward"]
        if layout.state_ranks > 1 and layout.zero == 3:
            gather = all_gather_seconds(block * p.compute, ring)
            scatter = reduce_scatter_seconds(block * p.gradients, ring)
            shown = (max(0.0, gather - forward) + max(0.0, gather + scatter - backward)) * layers * pieces + pieces * gather
            said = (2 * gather + scatter) * layers * pieces
            shown = min(shown + scatter, said)
            left = max(0.0, windows["backward"] - layers * (gather + scatter))
            rows.append(Row(
                name="shard: weights and gradients", seconds=shown, hidden_seconds=said - shown, source=f"{FSDP}; {RINGS}",
                formula=f"each micro-batch gathers {block * p.compute:,.0f} bytes a layer twice and scatters "
                        f"{block * p.gradients:,.0f}, over {ring.words}; shown is what a layer does not hide"))
        elif layout.state_ranks > 1:
            grads, times = states * p.gradients, pieces if layout.zero == 2 else 1
            if layout.zero:
                said = reduce_scatter_seconds(grads, ring)
                gather = all_gather_seconds(states * p.compute, ring)
                rows.append(_hidden("shard: gather weights", gather, windows["forward"], 1, ring, ZERO))
            else:
                said = all_reduce_seconds(grads, ring)
            name = "shard: scatter gradients" if layout.zero else "shard: all-reduce gradients"
            rows.append(_hidden(name, said, windows["backward"], times, ring, ZERO))
            left = max(0.0, windows["backward"] - said)
        if layout.data > 1:
            ring = link(self.on, layout, "data", self.efficiency)
            nbytes = states * p.gradients / (layout.state_ranks if layout.zero else 1)
            rows.append(_hidden("data: all-reduce gradients", all_reduce_seconds(nbytes, ring), left, 1, ring, RINGS))
        return rows


def _hidden(name: str, said: float, window: float, times: int, ring: Link, source: str) -> Row:
    shown = max(0.0, said - window)
    return Row(name=name, seconds=times * shown, hidden_seconds=times * (said - shown), source=source,
               formula=f"{times} x {said:.4g} s over {ring.words}, of which {window:.4g} s hide behind a pass")


def rank_products(m: ModelConfig, layout: Layout, sequences: int) -> tuple[Product, ...]:
    """As `flops.products`, of one rank and one micro-batch. Heads and widths are split over tensor ranks, tokens over
    context ranks; keys of all tokens meet the queries of some."""
    t, c = layout.tensor, layout.context
    def cut(one: Product) -> Product:
        if one.pairs:
            return replace(one, M=one.M // c, group=one.group // t)
        if one.name in BY_OUTPUT:
            return replace(one, M=one.M // c, N=one.N // t)
        return replace(one, M=one.M // c, K=one.K // t)

    return tuple(cut(one) for one in products(m, batch=sequences))


def _recipe(name: str, p: Precision) -> Recipe | None:
    """The casts of a precision that has some, in the words of `lpkit.predict.precision`. Gradients are cast as activations
    are; the head stays in 16 bits."""
    low = getattr(p, "low", None)
    if low is None:
        return None
    x, w = (Operand(bits=low.bits, block=block, scale_bytes=low.scale_bytes, transposes=block[0] == block[1])
            for block in (low.x, low.w))
    fine = low.scale_bytes == FP32 and low.x != (0, 0)
    return Recipe(name=name, dtype=p.dtype, casts={"y": (x, w), "dx": (x, w), "dw": (x, x)}, history=low.history,
                  kept={"head": 1}, product_share=FINE_SHARE if fine else 1.0)


def _linear(one: Product, on: Machine, efficiency: Efficiency, p: Precision, recipe: Recipe | None) -> tuple[float, float]:
    """Seconds of one call, forward and backward. A recipe's casts are spread as its products are."""
    if recipe is not None and recipe.casts and not recipe.kept.get(one.name):
        cost = linear_cost(one, recipe, on, efficiency, base=p.dtype, calls=1)
        return cost.seconds / 3, cost.seconds * 2 / 3
    bits = 8 * p.compute
    M, N, K = one.M, one.N, one.K
    three = [product_seconds(*sizes, on, efficiency, dtype=p.dtype, bits=bits, result_bytes=p.compute)
             for sizes in ((M, N, K), (M, K, N), (N, K, M))]
    return three[0], three[1] + three[2]


@functools.cache
def pointwise_split(m: ModelConfig, compute: int, stream: int) -> tuple[float, float]:
    """`roofline.pointwise_bytes` of one sequence, as one layer's and what is outside the layers."""
    one, two = (pointwise_bytes(replace(m, layers=n), batch=1, compute=compute, stream=stream) for n in (1, 2))
    return two - one, 2 * one - two


@functools.cache
def weights_split(m: ModelConfig) -> tuple[float, float]:
    """Parameters outside the layers, and of one layer."""
    parts = parameters(m)
    layers = parts["attention"] + parts["mlp"] + parts["norms"]
    return sum(parts.values()) - layers, layers / m.L


# A run.

@dataclass(frozen=True, kw_only=True)
class Bill:
    """What a run takes. `energy_wh` is at rated power, all of it, all the time; None where the machine says none."""

    seconds: float
    device_hours: float
    tokens: float
    energy_wh: float | None
    cost: float | None              # US dollars

    def per_million_tokens(self, total: float | None) -> float | None:
        return None if total is None else total / self.tokens * 1e6

    def to_dict(self) -> dict[str, Any]:
        return {"run_seconds": self.seconds, "days": self.seconds / 86_400, "device_hours": self.device_hours,
                "energy_wh": self.energy_wh, "energy_how": "rated power, all of it, all the time", "cost": self.cost,
                "cost_per_million_tokens": self.per_million_tokens(self.cost),
                "energy_wh_per_million_tokens": self.per_million_tokens(self.energy_wh)}


def bill(step: StepTime, machine: Machine, tokens: float, *, price_per_hour: float | None = None) -> Bill:
    """`tokens` at the pace of `step`. Prices are per device; None: the machine's own."""
    seconds = tokens / step.tokens_per_second
    hours = step.devices * seconds / 3600
    price = machine.price_per_hour if price_per_hour is None else price_per_hour
    return Bill(seconds=seconds, device_hours=hours, tokens=tokens,
                energy_wh=None if machine.watts is None else machine.watts * hours,
                cost=None if price is None else price * hours)
