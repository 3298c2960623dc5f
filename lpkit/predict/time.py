"""Seconds of one step in any layout, operation by operation; energy and cost of a run.

This is the only module that predicts the seconds of a step. A floor, an estimate, "40% MFU" and a
verdict on low precision use the same formulas with another `Efficiency`
(`lpkit.predict.roofline`).

The rows are the seconds of the slowest pipeline stage, summed over all of its micro-batches. In
each phase (forward, backward, optimizer, communication) the rows add up to the phase, and the
phases add up to the step. Seconds of matmuls, attention and pointwise work follow the roofline
model. Messages take the seconds of a ring or a tree (`lpkit.predict.links`). Some messages overlap
with computation; `hidden_seconds` are the seconds that overlap:

- FSDP gathers the weights of the next block, and scatters the gradients of the previous block,
  while a block computes.
- The messages of a whole stage's gradients overlap with one backward pass. ZeRO-1's gather of
  weights overlaps with one forward pass.
- Pipeline messages overlap with other micro-batches, except for messages on the schedule's longest
  path (`hops` of `lpkit.techniques.pipelines`, from `notebooks/lessons/ranks/clock.py`).
- Tensor-parallel and context-parallel messages do not overlap.

Messages and computation slow each other, so only the share `Efficiency.overlap` of the seconds that
could overlap does.

Not predicted: stragglers, failures, checkpoints, evaluation, data loading, clock throttling,
contention of overlapped kernels, transfers to the host or a disk. `calibrate` turns one short
measured run into a factor that covers them.

The host starts kernels while the device computes, so a step takes the longer of the two times. The
row "host" has the seconds by which the host takes longer. With a CUDA graph, the host starts all
kernels at once, and only the gaps between kernels on the device remain.

Sources: Narayanan et al. 2021 for pipelines, https://arxiv.org/abs/2104.04473; Korthikanti et al.
2022 for tensor and sequence parallelism, https://arxiv.org/abs/2205.05198.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.predict import evidence, flops
from lpkit.predict.casts import CastRecipe, as_run, linear_seconds
from lpkit.predict.device import on_device
from lpkit.predict.evidence import Spread
from lpkit.predict.governed import governed
from lpkit.predict.ledger import AMP, CHECKPOINTS, ZERO
from lpkit.predict.links import RINGS, Link, link
from lpkit.predict.messages import gathered_itemsizes, reduced_itemsize
from lpkit.predict.params import (
    optimizer_settings,
    optimizer_work,
    parameter_count,
    parameters,
    recompute_of,
    trained_count,
)
from lpkit.predict.recipes import Precision, moments_of, precision_of, stored
from lpkit.predict.roofline import Efficiency, nearest
from lpkit.predict.stacks import DEFAULT, STACKS, stack_of
from lpkit.predict.updates import Work
from lpkit.tables import picked
from lpkit.techniques import machines
from lpkit.techniques.blocks import operations
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.memory import CROSS_ENTROPY, RECOMPUTE, RecomputeRow
from lpkit.techniques.objectives import OBJECTIVES
from lpkit.techniques.operation import FP32, MicroBatch, Op, fused
from lpkit.techniques.optimizers import find, rules
from lpkit.techniques.pipelines import PIPELINES
from lpkit.techniques.row import Settings, chosen
from lpkit.techniques.stages import rank_layers
from lpkit.values import between

TENSOR = "Korthikanti et al. 2022, section 4.2, https://arxiv.org/abs/2205.05198"
PIPELINE = "Narayanan et al. 2021, section 2.2, https://arxiv.org/abs/2104.04473"
GATHERED_KEYS = "Llama 3 team 2024, section 3.3.2, https://arxiv.org/abs/2407.21783"
FSDP = "Zhao et al. 2023, https://arxiv.org/abs/2304.11277"
FLASH = "Dao et al. 2022, https://arxiv.org/abs/2205.14135"
ROOFLINE = "lpkit.predict.roofline.product_seconds"
# If a smaller share of the parameters is trained, the kind of the run is "adapters".
MOSTLY = 0.5
GRAPH_SECONDS = 2.5e-6  # seconds between kernels of a CUDA graph, per operation of a module

PHASES = ("forward", "backward", "optimizer", "communication")
HOST = "host"
# dtype of the matmuls that a low-precision recipe does not cast, for example attention's matmuls
BASE = "bf16"
WAITED = "; the factor is 1, because the measured update had no CUDA graph and waited for its host"
# Bytes that pointwise work moves in backward, divided by its bytes in forward: backward reads a
# gradient and a saved tensor and writes a gradient; forward reads a tensor and writes one.
BACKWARD_MOVES = 1.5
# Speed of attention in float32, divided by the speed of float32 matmuls. Its kernels compute all
# pairs and use no tensor cores.
ATTENTION_FP32 = 0.4
# The next numbers count the operations that the host starts. `RankWork.launches` counts the
# operations of one block in forward. The numbers are fitted to the eager steps of
# data/measured/ledger-nvidia-h200.json.
BACKWARD_OPS = 2.0      # operations in backward per operation in forward
# the host's seconds per update outside forward and backward: data, clipping, optimizer, log
STEP_SECONDS = 2.7e-3
# operations in forward of one micro-batch outside the blocks: embedding, norm, head, loss
OUTSIDE_OPS = 12
CHUNK_OPS = 7           # operations of one chunk of the loss
# A matrix with fewer numbers than this share of the largest matrix belongs to an adapter; few
# adapters are cast.
THIN = 0.02
CAST_OPS = 32           # operations of a Linear with cast operands, forward and backward together
TURN_OPS = 10           # operations that rotate q and k
WRITTEN_OUT_OPS = 6     # more operations in a norm of several kernels than in a norm of one kernel


class TimeRow(NamedTuple):
    """Seconds of one part of a step, by phase of PHASES, on the slowest pipeline stage.
    `hidden_seconds` overlap with other rows and are not in `phases`."""

    name: str
    phases: Mapping[str, float]
    formula: str
    source: str
    hidden_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def times(self, factor: float) -> "TimeRow":
        """Return a copy with all seconds multiplied by `factor`."""
        phases = {phase: factor * seconds for phase, seconds in self.phases.items()}
        return self._replace(phases=phases, hidden_seconds=factor * self.hidden_seconds)

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "seconds": self.seconds}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of one update with the whole batch."""

    rows: tuple[TimeRow, ...]
    tokens: int
    devices: int
    model_flops: float          # FLOPs that define MFU: all pairs of tokens, no recomputation
    peak_flops: float           # peak FLOP/s of one device
    micro_batches: int          # micro-batches of one rank
    sequences: int              # sequences in one micro-batch
    precision: str
    dtype: str                  # dtype of the matmuls that are not cast
    attention: str
    efficiency: Efficiency
    stack: str                  # row of `stacks.STACKS`
    machine: Machine
    layout: Layout
    weights: float = evidence.SMALL     # parameters of the model
    adapted: bool = False       # most parameters are frozen
    emulated: str = ""          # the reason why the run emulates its recipe; "": it does not
    factor: float = 1.0         # factor of a calibration; the rows include it
    # weight of one measured step, from 0 to 1 (`evidence.spread`)
    calibrated: float = 0.0

    @functools.cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of the step by phase of PHASES."""
        phases = dict.fromkeys(PHASES, 0.0)
        for row in self.rows:
            for phase, seconds in row.phases.items():
                phases[phase] += seconds
        return phases

    @property
    def step_seconds(self) -> float:
        return sum(self.phases.values())

    @functools.cached_property
    def spread(self) -> Spread:
        """The error range of the predicted seconds."""
        if self.efficiency.flat:
            return evidence.GIVEN
        return evidence.spread(self.kind, self.layout, self.stack, calibrated=self.calibrated)

    @property
    def kind(self) -> str:
        """The kind of run, one of `evidence.KINDS`. Published runs of this kind give the range."""
        if self.emulated:
            return evidence.UNSEEN
        host = sum(row.seconds for row in self.rows if row.name == HOST)
        return evidence.kind_of(self.machine, self.precision, weights=self.weights,
                                adapted=self.adapted, host_share=host / self.step_seconds)

    @property
    def seconds_range(self) -> tuple[float, float]:
        """The seconds between which nine of ten runs of this kind are: (least, most)."""
        return self.spread.around(self.step_seconds)

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

    def __getitem__(self, name: str) -> TimeRow:
        return next(row for row in self.rows if row.name == name)


def calibrate(config: Config, machine: "str | Machine", measured_step_seconds: float,
              layout: Layout | None = None, **how: Any) -> float:
    """Return the measured seconds of a step of `config`, divided by the predicted seconds. Pass
    this factor to `step_time` as `calibration` to predict other layouts or sizes. `how`: other
    arguments of `step_time`."""
    if not 0 < measured_step_seconds < 1e7:
        raise ConfigError(f"a measured step takes more than 0 and less than 1e7 seconds, "
                          f"got {measured_step_seconds}")
    return measured_step_seconds / step_time(config, machine, layout, **how).step_seconds


def with_step(on: Machine) -> Machine:
    """Return a machine that `lpkit measure` wrote with a calibration factor: the seconds of its
    measured step, divided by the predicted seconds of this step. Other machines are returned
    unchanged.

    If a GPU ran without CUDA graphs, its step waited for the host. The host's time does not grow
    with the width of the model, so the factor would be wrong for other widths, and it is set to 1.
    Raises ConfigError for a factor that is not from 0.1 to 10."""
    if not (row := on.measured):
        return on
    config = Config.from_dict(row["config"])
    if on.kind == "gpu" and config.system.cuda_graphs is not True:
        return replace(on, measured={**row, "factor": 1.0, "why": WAITED})
    factor = calibrate(config, on, row["seconds"])
    between(0.1, 10)("measured.seconds over their prediction (measure a larger config)", factor)
    return replace(on, measured={**row, "factor": factor})


def step_time(config: Config, machine: "str | Machine" = "h200", layout: Layout | None = None, *,
              precision: str | None = None, optimizer: str | None = None,
              recompute: str | None = None, efficiency: Efficiency | None = None,
              stack: str | None = None,
              calibration: float | None = None, recipe: CastRecipe | None = None) -> StepTime:
    """Predict the seconds of one update of `config`.

    layout       None: the config's `parallel`
    precision    a row of `recipes.PRECISIONS`; None: the config's recipe, where "auto" means bf16
                 if the machine has bf16, else fp32
    optimizer    a row of OPTIMIZERS; None: the config's
    recompute    a row of `techniques.memory.RECOMPUTE`; None: the config's
    efficiency   the shares of the ceilings that the step reaches; None: by published and measured
                 runs (`lpkit.predict.evidence`)
    stack        a row of `stacks.STACKS`, which chooses among published runs; None: the config's
    calibration  a factor from one measured step (`calibrate`) that multiplies all seconds
    recipe       the casts to price instead of the precision's; None: the casts of a run on this
                 machine, which emulates a recipe that the machine cannot multiply

    Raises ConfigError if the settings do not go together.
    """
    on, layout, config = machines.find(machine), layout or config.parallel, governed(config)
    precision = precision_of(config, on, precision)
    row, recompute = recompute_of(config, recompute)
    stack = stack or stack_of(config)
    if config.system.stack != "auto":
        layout = STACKS[stack].layout(layout)
    efficiency = efficiency or evidence.efficiency(on, stack)
    p = stored(config, precision)
    s, pieces = on_device(config, on, layout, p)
    emulated = ""
    if recipe is None and p.low is not None:
        recipe, emulated = as_run(config, precision, on)
        p = replace(p, dtype=BASE if BASE in on.flops else "fp32")
    if efficiency.flat is None:
        gathered = gathered_itemsizes(config, layout, precision)
        if starts_by_graph(config, on, layout, efficiency):
            efficiency = replace(efficiency, op_seconds=GRAPH_SECONDS)
        loss = config.memory.cross_entropy
        chunk = CROSS_ENTROPY[loss.name].chunk_tokens(loss)
        rank = _Rank(work_of(s, layout), on, layout, p, efficiency, recipe, pieces, recompute,
                     gathered, s.tokens / chunk if chunk else 0.0)
        rank.reduced = reduced_itemsize(config.model, layout, p.weights, p.gradients)
        own = rank_layers(config.model, layout, config.system.stack == "auto")
        rows = rank.rows(optimizer_work(config, optimizer, moments_of(config, p)), own)
        if extra := OBJECTIVES[config.objective.name].operations(s, config.objective):
            rows.append(rank.beside(extra))
        for rule in rules(optimizer_settings(config, optimizer)):
            for what, every in find(rule.name).passes(rule).items():
                again = sum(row.seconds for row in rows if "optimizer" not in row.phases) / every
                rows.append(TimeRow(f"optimizer: {what}", {"optimizer": again}, "forward and "
                                    f"backward, every {every} updates", find(rule.name).source))
    else:
        rows = _flat(config, on.peak_flops(p.dtype) * layout.devices, efficiency, row)
    return _step(rows, on, layout, p, efficiency, calibration, precision=precision, stack=stack,
                 near=0.0 if efficiency.flat else rank.near,
                 model_flops=flops.training_flops(config.model, batch=config.global_batch),
                 tokens=config.tokens_per_step, micro_batches=pieces, sequences=s.batch,
                 attention=s.attention, emulated=emulated, weights=parameter_count(config.model),
                 adapted=trained_count(config.model) < MOSTLY * parameter_count(config.model))


def starts_by_graph(config: Config, on: Machine, layout: Layout, rate: Efficiency) -> bool:
    """Return whether a run by lpkit starts all kernels of an update as one CUDA graph."""
    system = config.system
    return (system.stack == "auto" and on.kind == "gpu" and layout.devices == 1
            and rate.op_seconds > GRAPH_SECONDS and False not in (system.compile,
                                                                  system.cuda_graphs))


def _step(rows: list[TimeRow], on: Machine, layout: Layout, p: Precision, efficiency: Efficiency,
          calibration: float | None, near: float, **more: Any) -> StepTime:
    factor = efficiency.factor ** (near if efficiency.fades else 1.0)
    factor *= 1.0 if calibration is None else calibration
    if factor != 1.0:
        rows = [row.times(factor) for row in rows]
    return StepTime(rows=tuple(rows), devices=layout.devices, peak_flops=on.peak_flops(p.dtype),
                    dtype=p.dtype, efficiency=efficiency, machine=on, layout=layout, factor=factor,
                    calibrated=near * (efficiency.factor != 1) if calibration is None else 1.0,
                    **more)


def _flat(config: Config, peak: float, efficiency: Efficiency,
          recompute: RecomputeRow) -> list[TimeRow]:
    """Return the rows of a step at one rate: the share `efficiency.flat` of `peak` FLOP/s. Model
    FLOPs take this time, and so do recomputed FLOPs, which MFU does not count."""
    rate, m, batch = peak * efficiency.flat, config.model, config.global_batch
    once = flops.forward_flops(m, batch=batch) / rate
    formula = f"at {efficiency.flat:g} of the peak"
    rows = [TimeRow(name="model FLOPs", phases={"forward": once, "backward": 2 * once},
                    formula=formula, source=efficiency.source)]
    if "products" in recompute.repeats:
        again = {"backward": flops.recomputed_flops(m, batch=batch) / rate}
        rows.append(TimeRow(name="recomputation", phases=again, formula=formula,
                            source=CHECKPOINTS))
    return rows


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The work of one micro-batch on one rank. The blocks are alike, or count as copies of the
    average block. Counts and bytes are per average block, unless the comment says otherwise."""

    blocks: int                         # number of blocks of the model
    running: float = 1.0                # share of the blocks that an update runs
    tokens: int                         # tokens of the micro-batch, before context ranks split it
    stream_numbers: int                 # element count of the residual stream
    # matmuls of a forward pass over all blocks; the output head's is named "head"
    products: tuple[flops.Product, ...]
    attentions: tuple[tuple[Op, float], ...]    # operations of attention, and calls of each
    attention: str                      # the attention backend
    launches: float = 0.0               # operations that the host starts in forward
    # bytes that norms, additions and activations move in forward, without fusion
    moved_bytes: float
    outside_bytes: float                # the same bytes outside the blocks, of the whole model
    stream_bytes: float = 0.0           # the part of moved_bytes on the residual stream
    norms: float = 0.0                  # number of norms
    linear_weights: float
    trained_weights: float              # the part of linear_weights with gradients
    key_numbers: int = 0                # element count of the keys; values have as many
    parameters: float
    outside_parameters: float           # parameters outside the blocks, of the whole model
    trained: float                      # share of the model's parameters that is updated

    @property
    def block_calls(self) -> float:
        return self.blocks * self.running


@functools.lru_cache(maxsize=256)
def work_of(s: MicroBatch, layout: Layout) -> RankWork:
    """Return the work of one micro-batch `s` of a Config's model on one rank of the layout."""
    m, ops, parts = s.model, operations(s), parameters(s.model)
    outside = parts["embedding"] + parts["positions"] + parts["head"]
    moved, moved_outside = flops.moved_bytes(ops)
    return RankWork(
        blocks=m.L, running=m.running, tokens=s.tokens, stream_numbers=s.tokens * m.D,
        launches=len(ops.block) + TURN_OPS * s.turns + sum(     # coded weights are decoded first
            len(fused(m, f"{op.name}.weight")) or 1 for op in ops.block if op.stored_bytes),
        products=rank_products(m, layout, s.batch), attention=s.attention,
        attentions=tuple((op, 1.0) for op in ops.block if op.pairs), moved_bytes=moved,
        outside_bytes=moved_outside, linear_weights=ops.linear_weights,
        stream_bytes=sum([op.moved_bytes for op in ops.block if op.in_stream]),
        norms=sum([op.part == "norms" for op in ops.block]), trained_weights=ops.trained_weights,
        key_numbers=s.tokens * m.G * m.E, outside_parameters=outside,
        parameters=(sum(parts.values()) - outside) / m.L,
        trained=trained_count(m) / parameter_count(m))


class _Rank:
    """Seconds of an average block, of the head and of messages, for one micro-batch on one rank.

    pieces      number of micro-batches in an update
    gathered    bytes per parameter that ZeRO 2 and 3 gather (`messages.gathered_itemsizes`)
    chunks      number of chunks of the loss in a micro-batch; 0: the loss has no chunks
    """

    def __init__(self, work: RankWork, on: Machine, layout: Layout, p: Precision,
                 efficiency: Efficiency, recipe: CastRecipe | None, pieces: int,
                 recompute: Settings, gathered: tuple[float, float, float], chunks: float = 0.0):
        split = layout.tensor * layout.context
        self.work, self.layout, self.p, self.efficiency = work, layout, p, efficiency
        self.pieces, self.recompute, self.gathered = pieces, recompute, gathered
        self.reduced = p.gradients
        self.bandwidth = on.bytes_per_second * efficiency.bandwidth
        self.link = functools.partial(link, on, layout, efficiency=efficiency)
        self.multiplying = on.peak_flops(p.dtype) * efficiency.products[p.dtype]
        dtype = "fp32" if "fp32" in on.flops else p.dtype
        self.optimizing = on.peak_flops(dtype) * efficiency.products[dtype]
        self.time_rows: list[TimeRow] = []
        # seconds of (forward, backward) of each Linear in one block
        self.linears: dict[str, tuple[float, float]] = {}
        self.sizes = {product.name: product.words for product in work.products}
        self.near = 0.0 if not (measured := efficiency.shapes.get(p.dtype)) else statistics.fmean(
            *zip(*[(nearest(measured, *shape)[0], product.flops) for product in work.products
                   if not product.pairs for shape in product.shapes.values()]))
        for product in work.products:
            if not product.pairs:
                calls = 1 if product.name == "head" else product.calls / work.block_calls
                self.linears[product.name] = tuple(calls * seconds for seconds in linear_seconds(
                    product, on, efficiency, recipe=recipe, base=p.dtype, itemsize=p.compute_bytes))
        self.head = self.linears.pop("head", (0.0, 0.0))
        forward, backward = (sum(phase) for phase in zip(*self.linears.values()))
        peak, attentions = on.peak_flops(p.dtype), [op for op, _ in work.attentions]
        each = [[calls * seconds for seconds in
                 _attention(op, split, p, peak, self.bandwidth, efficiency)]
                for op, calls in work.attentions]
        self.attended = tuple(map(sum, zip(*each))) or (0.0, 0.0)
        self.attention = "; ".join(_attention_words(work.attention, op) for op in attentions)
        # bytes of pointwise work in one block; `more`: norms that are several kernels
        more = efficiency.norm_bytes * work.norms * work.stream_numbers
        layer = work.moved_bytes + more + (
            # without sequence parallelism, each tensor rank repeats the work on the stream
            (not efficiency.sequence_parallel) * (layout.tensor - 1) * (work.stream_bytes + more))
        moved = efficiency.fused / split / self.bandwidth
        self.pointwise, self.pointwise_head = layer * moved, work.outside_bytes * moved
        # seconds per weight of autocast: in forward it reads the weight and writes a 16-bit copy;
        # in backward it casts the gradient back
        casts = 0.0
        if p.compute_bytes < p.weights:
            casts = efficiency.weight_copies * (p.compute_bytes + p.weights) / self.bandwidth
        shards = layout.state_ranks if layout.zero == 3 else 1
        self.casts = casts * work.linear_weights / layout.tensor / shards
        # operations of one block that the host starts for casts: autocast's copies of weights
        # (`cast_ops`), and the casts of a low-precision recipe (`low_ops`)
        matmuls = [product for product in work.products
                   if not (product.pairs or product.name == "head")]
        self.cast_ops = len(matmuls) * (casts > 0)
        wide = max((matmul.N * matmul.K for matmul in matmuls), default=0)
        self.low_ops = (recipe is not None) * CAST_OPS * sum(
            matmul.N * matmul.K > THIN * wide for matmul in matmuls)
        self.chunks = chunks
        # share of the weights whose gradients autocast casts back
        self.trained = work.trained_weights / max(1, work.linear_weights)
        # Tensor ranks send 4 collectives per layer in forward and 4 in backward; a fifth one in
        # backward overlaps. `tensor_once`: seconds of one collective of `group_bytes`.
        self.group_bytes = work.stream_numbers // layout.context * p.compute_bytes
        self.exposed = 1 - efficiency.split_overlap
        self.tensor_once = self.exposed * self.link("tensor").all_gather_seconds(self.group_bytes)
        # `repeated`: seconds of recomputation in a block's backward, on average over the blocks;
        # `blocks` is the share of the blocks that are recomputed
        row = RECOMPUTE[recompute.name]
        blocks, self.again = row.again_share(work.blocks, recompute), row.repeats
        self.repeats_blocks = blocks * row.repeats_blocks
        unfused = any(sum(op.score_passes) for op in attentions)
        attends = "attention" in self.again or (unfused and "unfused attention" in self.again)
        self.repeated = blocks * (
            forward * ("products" in self.again) + self.attended[0] * attends
            + self.pointwise * ("pointwise" in self.again))
        self.repeated_tensor = blocks * 4 * self.tensor_once * ("tensor" in self.again)
        self.forward = forward + self.attended[0] + self.pointwise
        self.backward = (backward + self.attended[1] + BACKWARD_MOVES * self.pointwise
                         + self.repeated)
        # Context ranks gather keys and values in forward and again in backward, and scatter their
        # gradients. `context_once`: seconds of one of these messages.
        keys = 2 * work.key_numbers * p.compute_bytes / layout.tensor
        self.context_once = self.link("context").all_gather_seconds(keys)

    def row(self, name: str, formula: str, source: str, hidden: float = 0.0,
            **phases: float) -> None:
        """Add a row with the seconds of its `phases`; nothing if all of them are 0."""
        if hidden or any(phases.values()):
            self.time_rows.append(TimeRow(name, phases, formula, source, hidden))

    def rows(self, update: Work, own: tuple[int, ...]) -> list[TimeRow]:
        """Return the rows of a pipeline's slowest rank. `update`: the work of the optimizer. `own`:
        the number of layers of each pipeline rank; the last entry is the rank with the head."""
        layout, pieces, rate, row = self.layout, self.pieces, self.efficiency, self.row
        running = self.work.running
        v, stages = layout.interleave, layout.pipeline
        # layer: seconds of one layer for one micro-batch, without overlap
        layer = running * (
            self.forward + self.backward + 2 * self.casts + 8 * self.tensor_once
            + self.repeated_tensor + 3 * self.context_once)
        pointwise_head = (1 + BACKWARD_MOVES) * self.pointwise_head
        seconds = [count * layer for count in own]      # of each rank, for one micro-batch
        seconds[-1] += sum(self.head) + pointwise_head + 2 * self.tensor_once
        has_head = seconds[-1] == max(seconds)
        layers = own[-1] if has_head else max(own)
        others = sum(seconds) - max(seconds)
        message = self.group_bytes / layout.tensor * self.p.residual_bytes / self.p.compute_bytes
        send = self.exposed * self.link("pipeline").send_seconds(message)
        times, heads = pieces * layers * running, pieces * has_head
        count = f"{pieces} micro-batches x {layers * running:g} layers"
        share = f"{self.p.dtype} at {rate.products[self.p.dtype]:.2f} of the peak"
        if rate.shapes:
            share = f"{self.p.dtype} at the share of the nearest measured shape" + (
                f" by a weight of {self.near:.2f}, else {share}" * rate.fades)
        for name, (forward, backward) in self.linears.items():
            row(name, f"{count}, {self.sizes[name]} and its two gradients, {share}", ROOFLINE,
                forward=times * forward, backward=times * backward)
        row("attention", f"{count}, {self.attention}", FLASH,
            forward=times * self.attended[0], backward=times * self.attended[1])
        row("head", f"{pieces} micro-batches, {self.sizes.get('head')} and its two gradients",
            ROOFLINE, forward=heads * self.head[0], backward=heads * self.head[1])
        moved = times * self.pointwise + heads * self.pointwise_head
        row("norms, activations, loss",
            f"{rate.fused:g} of the bytes move after fusion, at {rate.bandwidth:g} of the memory "
            f"bandwidth; backward moves {BACKWARD_MOVES:g} times as many",
            "lpkit.predict.flops.moved_bytes", forward=moved, backward=BACKWARD_MOVES * moved)
        row("weight copies",
            "casts of weights to the compute dtype, of gradients back, per micro-batch", AMP,
            forward=times * self.casts, backward=times * self.casts * self.trained)
        row("recomputation",
            f"recompute={self.recompute}: {', '.join(sorted(self.again)) or 'nothing'} again",
            CHECKPOINTS, backward=times * self.repeated)
        if layout.tensor > 1:
            row("tensor: gathers and scatters",
                f"4 collectives of {self.group_bytes:,} bytes a layer forward, 4 backward, over "
                f"{self.link('tensor').words}; one more in backward overlaps",
                f"{TENSOR}; {RINGS}", hidden=times * self.tensor_once,
                communication=times * (8 * self.tensor_once + self.repeated_tensor)
                + 2 * heads * self.tensor_once)
        row("context: keys and values",
            "gathers before attention, forward and backward; a scatter of their gradients",
            f"{GATHERED_KEYS}; {RINGS}", communication=times * 3 * self.context_once)
        if stages > 1:
            schedule = PIPELINES[layout.schedule]
            forward = self.forward + self.casts + 4 * self.tensor_once + self.context_once
            half = (layer - forward) / 2        # backward: half for dx, half for dw
            hops = schedule.hops(stages, v, pieces)
            row("pipeline: send and receive", f"{hops:g} messages in a row, activations forward "
                f"and gradients backward; others overlap with work", PIPELINE,
                communication=hops * send)
            left = schedule.bubble(2, forward, half, half) / layer
            row("pipeline: bubble", f"{left:.2g} x (stages - 1) / (micro-batches x chunks) of the "
                f"rest: ({stages} - 1) / ({pieces} x {v}), each stage at its own pace",
                schedule.source, communication=left * others / v)
        # states: trained parameters of a rank before ZeRO, in its layers and in the embedding or
        # the head; owned: the part of them that the rank updates under ZeRO
        block, outside = self.work.parameters, self.work.outside_parameters
        trained = self.work.trained
        states = trained * (max(own) * block + outside / min(stages, 2)) / layout.tensor
        owned = states / (layout.state_ranks if layout.zero else 1)
        self.state_rows(layers, states, owned, block / layout.tensor, trained)
        moved = update.moved_bytes(self.p.weights, self.p.gradients, self.p.master)
        row("optimizer", f"{moved:g} bytes a parameter that the rank updates",
            "each state read and written once", optimizer=moved * owned / self.bandwidth)
        row("optimizer: products", f"{update.flops:g} FLOPs a parameter, the same on every rank",
            "flops of the optimizer's row", optimizer=update.flops * states / self.optimizing)
        if update.gathered is not None and layout.zero and layout.state_ranks > 1:
            gather = self.link("states").all_gather_seconds(FP32 * update.gathered * states)
            row("optimizer: gathers", f"whole gradients of {update.gathered:.2f} of the parameters",
                RINGS, communication=gather)
        self.host(layers * running)
        return self.time_rows

    def host(self, layers: float) -> None:
        """Add the row of the seconds that the device waits for the host. `layers`: layers of a rank
        that run.

        The host needs `op_seconds` to start each operation. If it needs longer in all than the
        device computes, the device waits for the difference. At least the share `host_shown` of the
        host's time is added."""
        work, rate = self.work, self.efficiency
        block = work.launches + WRITTEN_OUT_OPS * work.norms * (rate.norm_bytes > 0) + self.cast_ops
        block *= 1 + BACKWARD_OPS + self.repeats_blocks
        outside = (1 + BACKWARD_OPS) * OUTSIDE_OPS + CHUNK_OPS * self.chunks
        count = self.pieces * (layers * (block + self.low_ops) + outside)
        host = count * rate.op_seconds + STEP_SECONDS * (rate.op_seconds > 0)
        device = sum(row.seconds for row in self.time_rows)
        late = max(rate.host_shown * host, host - device)
        self.row(HOST, f"starts {count:,.0f} operations, {rate.op_seconds * 1e6:.3g} us each, in "
                 f"{host:.3g} s, while the device computes for {device:.3g} s", rate.source,
                 hidden=host - late, forward=late / 3, backward=late * 2 / 3)

    def beside(self, ops: tuple[Op, ...]) -> TimeRow:
        """Return the row of the forward work that the objective adds with the operations `ops`,
        over all micro-batches of an update."""
        work = sum(2 * self.work.tokens * op.weights for op in ops)
        work += sum(2 * pair.M * pair.N * pair.K * pair.group for op in ops for pair in op.pairs)
        moved = sum(op.moved_bytes for op in ops) * self.efficiency.fused / self.bandwidth
        return TimeRow("objective", {"forward": self.pieces * (work / self.multiplying + moved)},
                       f"{work:,.0f} FLOPs a micro-batch, forward", "operations of its row")

    def state_rows(self, layers: int, states: float, owned: float, layer_parameters: float,
                   trained: float) -> None:
        """Add the rows of the messages that ZeRO's sharding and the replicas need in one update.

        ZeRO 3 gathers each layer's weights in forward and again in backward, and scatters its
        gradients, once per micro-batch. ZeRO 0 to 2 send the gradients of the whole rank in
        buckets: ZeRO 2 once per micro-batch, ZeRO 0 and 1 once per update. ZeRO 1 and 2 also gather
        the updated weights. Replicas (`layout.data`) all-reduce the gradients that the rank owns,
        once per update.

        layers            number of layers on this rank
        states            number of trained parameters of the rank, before ZeRO divides them
        owned             number of them that the rank updates under ZeRO
        layer_parameters  number of the rank's parameters in one layer, before ZeRO divides them;
                          the share `trained` of them is trained
        """
        layout, p, ring = self.layout, self.p, self.link("states")
        of_block, _, of_any = self.gathered     # gathered bytes per parameter
        # window: seconds of one micro-batch's backward pass with which no message overlaps yet
        window = layers * self.work.running * self.backward
        if layout.state_ranks > 1 and layout.zero == 3:
            # gather, scatter: seconds of one message of one layer. wait_per_layer: seconds per
            # micro-batch in which a layer's computation waits for its messages. total: seconds of
            # all messages of the update. shown: seconds of them that do not overlap with
            # computation. In each micro-batch nothing runs before the first gather ends; nothing
            # runs during the last scatter of the update.
            gather = ring.all_gather_seconds(layer_parameters * of_block)
            scatter = ring.reduce_scatter_seconds(trained * layer_parameters * p.gradients)
            wait_per_layer = (self.shown(gather, self.forward)
                              + self.shown(gather + scatter, self.backward))
            total = (2 * gather + scatter) * layers * self.pieces
            shown = min(wait_per_layer * layers * self.pieces + self.pieces * gather + scatter,
                        total)
            window = max(0.0, window - layers * (gather + scatter))
            self.row("shard: weights and gradients",
                     f"each micro-batch gathers {layer_parameters * of_block:,.0f} bytes a layer "
                     f"twice and scatters {trained * layer_parameters * p.gradients:,.0f}, over "
                     f"{ring.words}; the rest overlaps with the layers' computation",
                     f"{FSDP}; {RINGS}", hidden=total - shown, communication=shown)
        # With ZeRO 0, `state_ranks` are context ranks: they have the same weights, and sum their
        # gradients.
        elif layout.state_ranks > 1:
            how = "all-reduce"
            seconds = self.in_buckets(ring.all_reduce_seconds, states * self.reduced)
            if layout.zero:
                gather = self.in_buckets(ring.all_gather_seconds, states * of_any)
                self.behind("shard: gather weights", gather, layers * self.forward, ring, ZERO)
                seconds = self.in_buckets(ring.reduce_scatter_seconds, states * p.gradients)
                how = "scatter"
            self.behind(f"shard: {how} gradients", seconds, window, ring, ZERO,
                        times=self.pieces if layout.zero == 2 else 1)
            window = max(0.0, window - seconds)
        if layout.data > 1:
            ring = self.link("data")
            seconds = self.in_buckets(ring.all_reduce_seconds, owned * self.reduced)
            self.behind("data: all-reduce gradients", seconds, window, ring, RINGS)

    def in_buckets(self, seconds: Callable[[float], float], nbytes: float) -> float:
        """Return the seconds of a message of `nbytes` that is sent in buckets of
        `Efficiency.bucket_bytes`. `seconds(nbytes)` returns the seconds of one bucket. Each bucket
        pays the latency, so small buckets over many nodes reach less bandwidth."""
        count = max(1, math.ceil(nbytes / (self.efficiency.bucket_bytes or math.inf)))
        return count * seconds(nbytes / count)

    def shown(self, seconds: float, window: float) -> float:
        """Return the part of a message's `seconds` that does not overlap with work, if `window`
        seconds of work run while the message is sent."""
        return seconds - self.efficiency.overlap * min(seconds, window)

    def behind(self, name: str, seconds: float, window: float, on: Link, source: str,
               times: int = 1) -> None:
        """Add the row of a message of `seconds`, which is sent `times` times in an update over the
        link `on`. Each message can overlap with `window` seconds of work."""
        shown = self.shown(seconds, window)
        self.row(name, f"{times} x {seconds:.4g} s over {on.words}, of which "
                 f"{seconds - shown:.4g} s overlap with a pass of {window:.4g} s", source,
                 hidden=times * (seconds - shown), communication=times * shown)


def work_time(work: RankWork, on: Machine, layout: Layout, p: Precision, update: Work, *,
              model_flops: float, precision: str, recipe: CastRecipe | None, emulated: str,
              efficiency: Efficiency | None = None, stack: str = DEFAULT,
              recompute: str = "none", pieces: int = 1, sequences: int = 1) -> StepTime:
    """Predict one update of `pieces` micro-batches of `work` on each rank, for a model that is not
    a Config's; `step_time` predicts a Config. The layout has no tensor, context or pipeline ranks.
    `model_flops` are the model FLOPs of one rank in an update. Raises ConfigError."""
    efficiency = efficiency or evidence.efficiency(on, stack)
    if p.low is not None:
        p = replace(p, dtype=BASE if BASE in on.flops else "fp32")
    rank = _Rank(work, on, layout, p, efficiency, recipe, pieces,
                 chosen(RECOMPUTE, recompute, "memory.recompute"),
                 (p.compute_bytes, p.gradients, p.compute_bytes))
    return _step(rank.rows(update, (work.blocks,)), on, layout, p, efficiency, None, near=rank.near,
                 precision=precision, stack=stack, model_flops=model_flops * layout.batch_ranks,
                 tokens=work.tokens * pieces * layout.batch_ranks, micro_batches=pieces,
                 sequences=sequences, attention=work.attention, emulated=emulated,
                 weights=work.parameters * work.blocks + work.outside_parameters,
                 adapted=work.trained < MOSTLY)


@functools.lru_cache(maxsize=256)
def rank_products(m: ModelConfig, layout: Layout, sequences: int) -> tuple[flops.Product, ...]:
    """Return the matmuls of one rank in the forward pass of one micro-batch of `sequences`."""
    return tuple(product.on_rank(layout.tensor, layout.context)
                 for product in flops.products(m, batch=sequences))


def _attention(op: Op, split: int, p: Precision, peak: float, bandwidth: float,
               efficiency: Efficiency) -> tuple[float, float]:
    """Return the seconds of attention's matmuls over pairs of tokens, in forward and in backward,
    on one of `split` ranks. `peak` is in FLOP/s, `bandwidth` in bytes per second. An unfused kernel
    writes the scores to memory and reads them again `op.score_passes` times."""
    first, share = op.pairs[0], op.pairs_share
    work = sum(2 * pair.M * pair.N * pair.K * pair.group for pair in op.pairs) * share / split
    scores = first.M * first.N * first.group * share / split
    move = scores * p.compute_bytes / bandwidth
    forward_passes, backward_passes = op.score_passes
    unfused = forward_passes > 0
    share = efficiency.products[p.dtype] if unfused else efficiency.attention
    if p.dtype == "fp32" and not efficiency.overlapped:
        share = efficiency.products["fp32"] * ATTENTION_FP32
    forward = work / (peak * share)
    backward = op.backward_pairs * forward
    if efficiency.overlapped:       # a floor: each matmul reads or writes the scores once
        return max(forward, 2 * unfused * move), max(backward, 4 * unfused * move)
    return forward + forward_passes * move, backward + backward_passes * move


def _attention_words(name: str, op: Op) -> str:
    forward, backward = op.score_passes
    words = (f"{name}: {len(op.pairs)} products forward, {len(op.pairs) * op.backward_pairs:g} "
             f"backward, over {op.pairs_share:.2f} of the pairs")
    if forward:
        words += f"; {forward} passes over the scores forward, {backward} backward"
    return words


# The cost of a whole run.

@dataclass(frozen=True, kw_only=True)
class Bill:
    """The time, energy and cost of a run."""

    seconds: float
    device_hours: float             # hours summed over all devices
    tokens: float
    energy_wh: float | None         # at rated power; None: the machine's row has no rating
    cost: float | None              # US dollars; None: no price is known
    spread: Spread                  # error range of all fields but `tokens`

    def range_of(self, total: float | None) -> tuple[float, float] | None:
        """Return the range (least, most) of a field: seconds, hours, energy or cost."""
        return None if total is None else self.spread.around(total)

    def per_million_tokens(self, total: float | None) -> float | None:
        return None if total is None else total / self.tokens * 1e6

    def to_dict(self) -> dict[str, Any]:
        values = picked(self, "device_hours energy_wh cost", run_seconds="seconds",
                        range_is="spread.words")
        ranges = {f"{key}_range": self.range_of(values[key])
                  for key in ("run_seconds", "cost", "energy_wh")}
        shares = {f"{key}_per_million_tokens": self.per_million_tokens(values[key])
                  for key in ("cost", "energy_wh")}
        return {**values, **ranges, **shares, "days": self.seconds / 86_400,
                "energy_how": "rated power, all of it, all the time"}


def bill(step: StepTime, machine: Machine, tokens: float, *,
         price_per_hour: float | None = None) -> Bill:
    """Return the bill of a run over `tokens` tokens, if each step takes as long as `step`.
    `price_per_hour`: US dollars per device; None: the machine's price."""
    seconds = tokens / step.tokens_per_second
    hours = step.devices * seconds / 3600
    price = machine.price_per_hour if price_per_hour is None else price_per_hour
    return Bill(seconds=seconds, device_hours=hours, tokens=tokens,
                energy_wh=None if machine.watts is None else machine.watts * hours,
                cost=None if price is None else price * hours, spread=step.spread)
