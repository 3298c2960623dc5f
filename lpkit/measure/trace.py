"""Trace a step: run the model and the trainer's step with fake tensors, on any number of ranks, and
count every byte that a real step would hold.

Operations compute shapes only (torch._subclasses.FakeTensorMode). Nothing is allocated or computed,
but each storage has its size, and `lpkit.measure.tracking` watches it like a real storage.
Collectives go to PyTorch's "fake" process group, which answers at once for a world of any size. The
traced rank holds the same bytes as this rank in a real world.

A trace does not count the memory that a kernel allocates and frees within one operation, nor the
memory that an allocator reserves (but it counts CUDA's rounding to blocks of 512 bytes). If the
step reads a number from a tensor, it gets the number of a healthy step: gradients are finite, and
the number of NaNs is 0.

PyTorch's FSDP tracker (torch.distributed._tools.fsdp2_mem_tracker) cannot do this. Its bytes for
the optimizer are right in the first update and wrong in the second: with the fused AdamW of torch
2.13 it adds each whole parameter, gradient and moment to the shards, 9 times the state that 4 ranks
hold (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from typing import Annotated, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode

from lpkit import hardware, measure
from lpkit.config import Config
from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.execution.attention import of_parts
from lpkit.measure.tracking import ROWS, Footprint, wrapped
from lpkit.optim import moments
from lpkit.parallel.ranks import Ranks, groups_of
from lpkit.predict.compare import Comparison, percent
from lpkit.predict.ledger import MOMENTS, memory
from lpkit.predict.units import quantity
from lpkit.tables import html_table
from lpkit.techniques.adapters import attended
from lpkit.techniques.attention_backends import choose_attention
from lpkit.techniques.layouts import Layout, check
from lpkit.training.build import Decisions, decide
from lpkit.values import between, checked

World = Annotated[int, between(1, 65_536)]      # number of devices


@checked
def predict_trace(config: Config, world_size: World = 1, *, layout: Layout | None = None,
                  rank: int = 0, device: Literal["cpu", "cuda"] = "cpu") -> Footprint:
    """Return the Footprint of one rank in the second update of `config` on `world_size` devices:
    the live bytes by row, as `measure.memory` measures them, and the messages that the rank sends.

    layout  a layout of `data` and `shard` ranks that training supports; None: the config's
            `parallel` if `world_size` is 1, else all devices shard (ZeRO 3)
    rank    the rank to trace
    device  "cpu" or "cuda": the device whose operations to trace. "cuda" needs a machine with a
            GPU, but does not use the GPU.

    Raises ConfigError for a config that cannot be trained or traced.
    """
    given = layout is not None or world_size > 1
    layout = layout or (Layout(shard=world_size) if given else config.parallel)
    measure.refuse_compiled(config)
    check(config, layout, world_size if given else None)
    config = replace(config, parallel=layout)
    decisions = _decide(config, device)
    with fake_world(layout, device, rank) as ranks, fake_step(device):
        bench = measure.Bench(config, decisions=decisions, ranks=ranks)
        tracker, messages = bench.watched()
        return tracker.footprint(chosen=decisions.choices, messages=messages,
                                 where=f"traced on {layout}, {device}, {bench.how}")


def _decide(config: Config, device: str) -> Decisions:
    """Return the decisions that a run makes before it starts (precision, attention, backend),
    without timing anything on the device."""
    if device == "cuda" and not torch.cuda.is_available():      # autograd needs a CUDA stream
        raise ConfigError("PyTorch sees no GPU here, and without a GPU it cannot trace the "
                          "backward pass of CUDA operations; use device=cpu, which keeps the "
                          "same tensors, except those of RMSNorm")
    named = used = config.precision.recipe.name
    if named == "auto":
        used = "bf16"       # a run decides by timing, which a trace cannot do
    decisions = decide(config.replace({"system.device": "cpu", "system.compile": False,
                                       "system.kernels": "auto", "system.attention": "plain",
                                       "system.threads": torch.get_num_threads(),
                                       "precision.recipe": used}))
    chosen = decisions.choices | {"device": Choice(asked=device, used=device, why="traced")}
    if named == "auto":
        chosen["precision"] = Choice(asked=named, used=used,
                                     why="assumed: a run decides by a race where it runs")
    attention = config.system.attention
    used, why = choose_attention(attention, device=device, model=attended(config.model),
                                 low_precision=decisions.recipe.compute == "bfloat16",
                                 tiles=hardware.multiplies_tiles())
    chosen["attention"] = of_parts(config) or Choice(asked=attention, used=used, why=why)
    if device == "cuda" and config.precision.backend == "auto":
        chosen["backend"] = Choice(asked="auto",
                                   used="scaled_mm" if decisions.recipe.products else "pytorch",
                                   why="assumed: a GPU that multiplies these formats")
    return replace(decisions, device=torch.device(device), choices=chosen)


@contextmanager
def fake_world(layout: Layout, device: str, rank: int = 0) -> Iterator[Ranks]:
    """Join a fake world of `layout.devices` ranks as one rank, in this block. Raises ConfigError if
    this process already has a process group."""
    if layout.devices == 1:
        yield Ranks()
        return
    if dist.is_initialized():
        raise ConfigError("this process has a process group already, and a trace needs a fake "
                          "process group; trace before the group is made, or in another process")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.devices)
    try:
        yield Ranks(world=layout.devices, layout=layout, device=device,
                    groups=dict(groups_of(layout, rank)))
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_step(device: str) -> Iterator[None]:
    """Make all tensors in this block fake. Tensors that lpkit caches for the whole process are
    computed before the block, so that the cache has real tensors."""
    for signed in (True, False):
        moments.midpoints(signed)
    with (mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
          mock.patch.object(dist.Work, "is_completed", lambda self: True),
          FakeTensorMode(allow_non_fake_inputs=True), _Healthy(), torch.device(device)):
        yield


class _Chunks:
    """The result of torch.chunk, which makes each piece only when it is read. FSDP reads 1 piece of
    1,024, and each fake tensor takes 0.1 ms."""

    def __init__(self, tensor: Tensor, count: int, dim: int):
        self.tensor, self.dim, self.length = tensor, dim, -(-tensor.shape[dim] // count)

    def __getitem__(self, i: int) -> Tensor:
        start, whole = i * self.length, self.tensor.shape[self.dim]
        if start >= whole:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.length, whole - start))


class _Healthy(TorchDispatchMode):
    """Return numbers when a step reads a number from a fake tensor, which has none: True for other
    tests than `any`; False for `any`, so that a loop that draws values again ends; 0.5 for floats;
    0 for integers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if wrapped(types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].dtype == torch.bool:
                return not getattr(args[0], "of_any", False)
            # not 1.0, since the step divides by 1 - this number
            return 0.5 if args[0].dtype.is_floating_point else 0
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.any:
            out.of_any = True
        return out


@dataclass(frozen=True, kw_only=True)
class Reconciled:
    """The bytes of one device by row at the peak of a step, in up to three ways: by the formula, in
    a trace, and measured. Each way has a peak of its own."""

    formula: dict[str, float]
    formula_moment: str             # a value of ledger.MOMENTS: the moment of the formula's peak
    traced: Footprint
    measured: Footprint | None      # None: more than one device

    @property
    def truth(self) -> Footprint:
        """The footprint to compare with: measured, or traced if nothing was measured."""
        return self.measured or self.traced

    def comparison(self, of: str = "formula") -> Comparison:
        """Compare the rows of `of` ("formula" or "trace") with the rows of `truth`."""
        rows = self.formula if of == "formula" else self.traced.rows
        return Comparison.of_rows(_with_peak(rows), _with_peak(self.truth.rows), unit="bytes",
                                  where=self.truth.where)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences about the errors of formula and trace: their size, and the row that explains
        most of the difference."""
        if not self.measured:
            return (self._sentence("formula", self.formula_moment, "traced"),)
        return (self._sentence("formula", self.formula_moment, "measured"),
                self._sentence("trace", _moment(self.traced), "measured"))

    def _sentence(self, of: str, moment: str, truth: str) -> str:
        rows = {row.name: row for row in self.comparison(of)}
        peak = rows.pop("peak")
        off = peak.formula - peak.measured
        size = quantity(abs(off), "bytes")
        if not off:
            return f"The {of}'s peak equals the {truth} peak to the byte."
        if abs(peak.error) < 0.001:
            return f"The {of}'s peak is within 0.1% of the {truth} peak: {size} off."
        widest = max(rows.values(), key=lambda row: (row.formula - row.measured) * off)
        return (f"The {of}'s peak is {size} ({percent(peak.error)}) "
                f"{'above' if off > 0 else 'below'} the {truth} peak. Most of the difference "
                f"is in {widest.name!r}: {quantity(widest.formula, 'bytes')} by the {of}, {truth} "
                f"{quantity(widest.measured, 'bytes')}. The {of}'s peak is at: {moment}; the "
                f"{truth} peak: {_moment(self.truth)}.")

    def _repr_html_(self) -> str:
        sides = {"formula": self.formula, "traced": self.traced.rows}
        if self.measured:
            sides["measured"] = self.measured.rows
        columns = [_with_peak(rows) for rows in sides.values()]
        lines = [(name, *(quantity(rows.get(name, 0), "bytes") for rows in columns))
                 for name in (*ROWS, "peak") if any(name in rows for rows in columns)]
        paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return html_table(("", *sides), lines) + paragraphs


def _with_peak(rows: dict[str, float]) -> dict[str, float]:
    return {**rows, "peak": sum(rows.values())}


def _moment(footprint: Footprint) -> str:
    return f"in {footprint.phase}, {footprint.module}"


@checked
def reconcile(config: Config, world_size: World = 1) -> Reconciled:
    """Compare the memory of a step by row: by the formula, and by a trace as in `predict_trace`. If
    `world_size` is 1, also measure a step on this machine; then formula and trace use the recipe,
    attention and backend that the measured step chose. Raises ConfigError."""
    measured, device = None, "cpu"
    if world_size == 1:
        measured = measure.memory(config)
        device = torch.device(measured.chosen["device"].used).type
        config = config.replace({"precision.recipe": measured.chosen["precision"].used,
                                 "precision.backend": measured.chosen["backend"].used,
                                 "system.attention": measured.chosen["attention"].used})
    traced = predict_trace(config, world_size, device=device)
    used = {key: choice.used for key, choice in traced.chosen.items()}
    config = config.replace({"precision.recipe": used["precision"], "system.stack": "auto"})
    predicted = memory(config, hardware.room(device), layout=Layout(shard=world_size),
                  attention=used["attention"])
    return Reconciled(formula=predicted.at(predicted.peak_moment), traced=traced,
                      formula_moment=MOMENTS[predicted.peak_moment], measured=measured)
