"""Bytes and seconds of one training step of any model, before it runs.

The step runs twice on shapes alone (`lpkit.measure.trace`): the first time makes the optimizer's
state and records what the forward multiplies, the second time is watched, so that its peak is that
of every later step. The seconds are those of `lpkit.predict.time` for the recorded operations: the
efficiencies, machines, stacks and ranges of a Config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lpkit.config import Config
from lpkit.errors import ConfigError, pick, shown
from lpkit.exchange import families
from lpkit.measure.trace import fake_step, fake_world
from lpkit.measure.tracking import Footprint, Tracker, short
from lpkit.modules.convert import CONVERTED, Converted, Report, converted, head_names, recipe_of
from lpkit.modules.operations import Recorder, Seen
from lpkit.modules.shapes import OnShapes
from lpkit.modules.step import Asked, MakeLoss, loss_of, make_optimizer, without_memory
from lpkit.parallel.fully_sharded import gathered
from lpkit.parallel.ranks import Ranks, shard_mesh
from lpkit.precision.backends import BACKENDS
from lpkit.precision.compute import autocast, compute_dtype
from lpkit.predict import cards, evidence
from lpkit.predict.attention import of_sizes
from lpkit.predict.casts import Recipe, casts_of, where_run, why_emulated
from lpkit.predict.flops import Product
from lpkit.predict.ledger import memory
from lpkit.predict.params import parameter_count
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.time import RankWork, StepTime, work_time
from lpkit.predict.units import between, duration, quantity
from lpkit.predict.updates import Work, work_of
from lpkit.tables import html_table, picked
from lpkit.techniques import machines
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.operation import Op
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.techniques.recipes import RECIPES
from lpkit.techniques.row import chosen
from lpkit.values import Count, Place, Text, checked

CLOSE = 0.05        # what the closed form may differ from the trace without a doubt
FROM_MODEL, MULTIPLIES = "as the model is", "this machine multiplies these formats itself"
OWN_PRECISION = {torch.bfloat16: "bf16-pure", torch.float16: "bf16-pure"}     # else float32


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction:
    """A step of a model, on each of `layout.devices` devices."""

    footprint: Footprint        # of one device
    step: StepTime
    machine: Machine
    layout: Layout
    parameters: int
    trained_parameters: int
    forward_flops: int          # of one device's batch, products alone, attention in full
    precision: str
    optimizer: str
    converted: Report | None
    work: RankWork              # what the seconds are of
    casts: Recipe | None        # as this machine runs them
    formula_bytes: int | None   # the closed form's peak, if `lpkit import` knows the architecture
    model: str                  # its class

    @property
    def peak_bytes(self) -> int:
        return self.footprint.peak_bytes

    @property
    def step_seconds(self) -> float:
        return self.step.step_seconds

    @property
    def doubt(self) -> str:
        """The reason to trust the trace alone; empty: the closed form agrees, or there is none."""
        off = (self.formula_bytes or self.peak_bytes) / self.peak_bytes - 1
        return "" if abs(off) <= CLOSE else (
            f"the formula of this architecture gives {quantity(self.formula_bytes, 'bytes')} "
            f"({off:+.0%}), for fused GELUs and norms, without dropout or checkpointing; trust the "
            f"trace")

    def card(self, path: Place, **measured: Any) -> list[str]:
        """Write PATH.json and PATH.svg as `lpkit.predict.cards.write` does; return both paths."""
        model = picked(self, "parameters precision optimizer work.tokens", name="model",
                       layers="work.blocks", trained="trained_parameters")
        return cards.write(path, model, self, **measured)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.machine.memory_bytes

    @property
    def _sentences(self) -> tuple[str, str]:
        """What a device holds, and how long a step takes."""
        moment = f"in {self.footprint.phase}, {self.footprint.module or 'the model'}"
        return (f"{self.parameters:,} parameters, {self.precision}, {self.optimizer}, on "
                f"{self.layout.devices} x {self.machine.title}: peak "
                f"{quantity(self.peak_bytes, 'bytes')} of "
                f"{quantity(self.machine.memory_bytes, 'bytes')} ({moment})",
                f"a step takes {duration(self.step_seconds)} ({self.step.spread.words}: "
                f"{between(self.step.seconds_range, duration)})")

    @property
    def summary(self) -> str:
        return "; ".join(filter(None, (*self._sentences, self.doubt)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**picked(
            self, "peak_bytes formula_bytes doubt fits parameters trained_parameters forward_flops "
            "step_seconds step.mfu precision optimizer step.stack", bytes="footprint.rows",
            activations="footprint.operations", step_seconds_range="step.seconds_range",
            machine="machine.name"),
            "peak_moment": [self.footprint.phase, self.footprint.module],
            "layout": str(self.layout), "time_rows": [row.to_dict() for row in self.step.rows],
            "converted": self.converted and self.converted.to_dict()}

    def __repr__(self) -> str:
        return self.summary

    def _repr_html_(self) -> str:
        rows = [(name, quantity(nbytes, "bytes")) for name, nbytes in self.footprint.rows.items()]
        times = [(row.name, duration(row.seconds)) for row in self.step.rows]
        held, takes = self._sentences
        held = "; ".join(filter(None, (held, self.doubt)))
        return (html_table(("bytes at the peak", ""), rows, caption=held)
                + html_table(("seconds of a step", ""), times, caption=takes))


@checked
def predict(model: nn.Module, batch: object, *, optimizer: object = "adamw",
            machine: str | Machine = "h200", devices: Count = 1, shard: Count | None = None,
            precision: Text | None = None, loss: object = None, stack: Text | None = None,
            keep: object = (), pad: bool = False) -> Prediction:
    """Predict the memory and the seconds of a training step of `model` on one `batch` a device.

    batch      what the model is called with: a mapping, a tuple or one value; of tensors only the
               shapes count, and they may be on the meta device, as the model may
    optimizer  a row of OPTIMIZERS, an optimizer of this model, or a function of the parameters
    machine    a row of the catalogue
    devices    that have a batch each; `shard` of them share the model's states (FSDP2, a block at a
               time); None: all
    precision  a row of RECIPES, which runs under autocast; None: the model's own dtypes, without
               autocast
    loss       (model, batch) -> scalar; None: the loss that the model returns
    stack      how the step is programmed, a row of `lpkit.predict.evidence.STACKS`; None: compiled
               if the model is, else eager
    keep, pad  as `lpkit.convert`
    The model stays as it is. Raises ConfigError.
    """
    on, shard = machines.find(machine), devices if shard is None else shard
    if not (loss is None or callable(loss)):
        raise ConfigError(f"loss must be a function (model, batch) -> scalar, got {shown(loss)}")
    if devices % shard:
        raise ConfigError(f"devices={devices} must be a multiple of shard={shard}")
    layout = Layout(shard=shard, data=devices // shard)
    stack = stack or ("eager", "compiled")[hasattr(model, "_orig_mod")]
    pick(evidence.STACKS, stack, "stack")
    model = getattr(model, "_orig_mod", model)      # of torch.compile
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError("this model is sharded already; predict takes it before fully_shard, and "
                          "shard=N")
    if any(isinstance(one, Converted) for one in model.modules()):
        raise ConfigError("this model is converted already; call lpkit.unconvert(model), then "
                          "predict with precision=RECIPE")
    if precision is not None:
        pick(RECIPES, precision, "precision")
    norms = _OneKernel() if on.kind == "gpu" else nullcontext()
    # oneDNN's LSTM is one kernel, whose products a trace would not see
    with (fake_world(Layout(shard=shard), "cpu") as ranks, fake_step("cpu"), norms,
          torch.backends.mkldnn.flags(False, allow_tf32=None, fp32_precision=None)):
        step = _Step(model, batch, optimizer, precision, loss)
        seen = step.recorded()
        if step.p.low is not None:
            step.convert(on, keep, pad)
        footprint = step.watched(ranks, foreach=on.kind == "gpu")
    return step.priced(seen, footprint, on, layout, stack,
                       _closed_form(model, batch, on, layout, optimizer, step.priced_as))


def _closed_form(model: nn.Module, batch: Any, on: Machine, layout: Layout, optimizer: Asked,
                 precision: str) -> int | None:
    """The peak that `lpkit predict` gives for the Config of a model of transformers."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(optimizer, str) or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    try:
        known = model.config.to_dict()
        config = Config(model=families.of_type(known["model_type"]).model(known))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if parameter_count(config.model) != trained:    # an adapter, or another head
            return None
        config = config.replace({
            "model.context": ids.shape[1], "global_batch": len(ids) * layout.devices,
            "grad_accum_steps": 1, "optimizer.name": optimizer, "optimizer.clip": 0,
            "system.attention": "sdpa"})
        return round(memory(config, on, layout=layout, precision=precision).peak_bytes)
    except (AttributeError, KeyError, ConfigError):     # another architecture
        return None


class _OneKernel(TorchFunctionMode):
    """Run PyTorch's RMSNorm as its LayerNorm. A GPU has a kernel for each; a CPU writes RMSNorm
    out, and keeps and moves more. LayerNorm keeps one number more for each row."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        weight = (kwargs or {}).get("weight")
        if func is nn.functional.rms_norm and (weight is None or weight.dtype == args[0].dtype):
            return nn.functional.layer_norm(*args[:2], weight)
        return func(*args, **(kwargs or {}))


class _Step:
    """A training step of a copy of the model, inside `fake_step`."""

    def __init__(self, model: nn.Module, batch: Any, optimizer: Asked, precision: str | None,
                 loss: MakeLoss | None):
        self.model, self.batch, self.copies = without_memory(model, batch, "cpu")
        self.loss, self.optimizer, self.precision = loss or loss_of, optimizer, precision
        self.report: Report | None = None
        self.heads = head_names(self.model)
        dtypes = Counter(p.dtype for p in self.model.parameters())
        own = OWN_PRECISION.get(dtypes.most_common(1)[0][0], "fp32") if dtypes else "fp32"
        self.priced_as = precision or own
        self.p = PRECISIONS[self.priced_as]
        self.around = nullcontext()
        if precision is not None:
            self.around = autocast(RECIPES[precision], torch.device("cpu"))

    def recorded(self) -> Seen:
        """The operations of a step as it is without casts."""
        self.model.train()
        with Recorder(self.model, heads=self.heads) as recorder:
            self._backward()
        for p in self.model.parameters():
            p.grad = None
        return recorder.seen

    def convert(self, on: Machine, keep: Any, pad: bool) -> None:
        """Convert the copy as a run on this machine would be."""
        name, row = recipe_of(self.precision, pad)
        why = why_emulated(row, on)
        by = BACKENDS["emulated"] if why else OnShapes()
        rows = converted(self.model, name, row, by, keep)
        self.report = Report(name, "emulated" if why else "scaled_mm", why or MULTIPLIES, rows)

    def watched(self, ranks: Ranks, foreach: bool) -> Footprint:
        """The bytes of the second update."""
        names = {p: name for name, p in self.model.named_parameters()}
        if ranks.world > 1:
            compute = compute_dtype(RECIPES[self.precision]) if self.precision else None
            self.around = nullcontext()     # weights are gathered in the dtype of the products
            _shard(self.model, shard_mesh(ranks), MixedPrecisionPolicy(
                param_dtype=compute, reduce_dtype=torch.float32))
        now = dict(self.model.named_parameters())
        copies = {p: now[names[one]] for p, one in self.copies.items()}
        optimizer = self.updater = make_optimizer(self.optimizer, self.model, copies, foreach)
        self._update(optimizer)
        with Tracker(self.model, optimizer, heads=self.heads) as tracker:
            tracker.hold(tree_leaves(self.batch), "batch")
            tracker.hold(gathered(self.model), "gathered weights")
            self._update(optimizer)
        return tracker.footprint(where="traced on shapes alone")

    def _backward(self) -> Tensor:
        try:
            with self.around:
                loss = self.loss(self.model, self.batch)
        except ConfigError:
            raise
        except Exception as error:      # anything that a model may raise
            shapes = type(error).__module__.startswith("torch._subclasses")
            hint = "; a size depends on values, and a prediction knows shapes alone" * shapes
            raise ConfigError(f"the model raised {type(error).__name__} on this batch: "
                              f"{str(error).strip().partition(chr(10))[0]}{hint}") from error
        if not loss.requires_grad:
            raise ConfigError("the loss has no gradient: every parameter of the model is frozen")
        loss.backward()
        return loss

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        _loss = self._backward()        # which a loop keeps until it has another
        optimizer.step()

    def priced(self, seen: Seen, footprint: Footprint, on: Machine, layout: Layout, stack: str,
               formula_bytes: int | None) -> Prediction:
        report = self.report
        recipe, emulated, stay = None, "", Counter()
        left = {row.name for row in report.rows if row.status != CONVERTED} if report else ()
        products, attentions, blocks = self._products(seen, left, stay)
        if not products:
            raise ConfigError("this step multiplies no matrices, so there are no seconds to predict")
        if report is not None:
            row = RECIPES[self.precision]
            recipe, emulated = where_run(casts_of(self.precision, row, stay), row, on, "auto")
        count = sum(p.numel() for p in self.copies)
        trained = sum(p.numel() for p in self.copies if p.requires_grad)
        in_blocks = sum(p.numel() for name, p in self.model.named_parameters() if in_block(name))
        linear, trained_linear = (
            sum(one.N * one.K * one.calls for one in products if one.name != "head" and one.trained
                >= least) for least in (False, True))
        tokens = max((one.M for one in products), default=1)
        work = RankWork(
            blocks=blocks, tokens=tokens, stream_numbers=0, products=products,
            attentions=attentions, attention="as traced", moved_bytes=seen.moved[True] / blocks,
            outside_bytes=seen.moved[False], linear_weights=linear / blocks,
            trained_weights=trained_linear / blocks,
            parameters=in_blocks / blocks, outside_parameters=count - in_blocks,
            trained=trained / max(1, count))
        name = self.optimizer if isinstance(self.optimizer, str) else (
            type(self.optimizer).__name__.lower())
        step = work_time(work, on, layout, self.p, _work(self.updater, name), model_flops=seen.training_flops,
                         precision=self.precision or "fp32", recipe=recipe, emulated=emulated,
                         stack=stack)
        return Prediction(
            footprint=footprint, step=step, machine=on, layout=layout, parameters=count,
            trained_parameters=trained, forward_flops=seen.flops, optimizer=name,
            precision=self.precision or FROM_MODEL, converted=report, work=work, casts=recipe,
            model=type(self.model).__name__, formula_bytes=formula_bytes)

    def _products(self, seen: Seen, left: Collection[str], stay: Counter[str]
                  ) -> tuple[tuple[Product, ...], tuple[tuple[Op, float], ...], int]:
        """Products, attention and the number of blocks. Fills `stay` with the calls of Linears
        among `left`."""
        blocks = blocks_of(self.model)
        calls: Counter[tuple] = Counter()
        for (name, *sizes), count in seen.products.items():
            label = "head" if name in self.heads else short(name) or "Linears"
            calls[label, *sizes] += count
        several = Counter(label for label, *_ in calls)
        names = {key: key[0] if several[key[0]] == 1 else f"{key[0]} {key[2]} x {key[3]}"
                 for key in calls}
        for (name, *sizes), count in seen.products.items():
            label = "head" if name in self.heads else short(name) or "Linears"
            stay[names[label, *sizes]] += count * (name in left or name in self.heads)
        products = tuple(Product(name=names[key], M=key[1], N=key[2], K=key[3], calls=count,
                                 trained=key[4]) for key, count in calls.items())
        attentions = []
        for sizes, calls in seen.attentions.items():
            attentions.append((of_sizes(*sizes), calls / blocks))
        return products, tuple(attentions), blocks


def _work(optimizer: torch.optim.Optimizer, name: str) -> Work:
    """Each parameter's rule is its group's, else `name`; an unknown rule counts as AdamW."""
    found = []
    for group in optimizer.param_groups:
        rule = group.get("rule", name)
        rule = chosen(OPTIMIZERS, rule if rule in OPTIMIZERS else "adamw", "optimizer")
        thirds = (1, 1, 1) * (group.get("layout") == "thirds")
        found += [(tuple(p.shape), rule, thirds) for p in group["params"]]
    return work_of(found)


def blocks_of(model: nn.Module) -> int:
    """Count the modules of the outermost lists: an encoder's and a decoder's together."""
    return sum(map(len, outermost_lists(model))) or 1


def outermost_lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    inside = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(inside):
            inside += (f"{name}." * bool(name),)
            yield module


def in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _shard(model: nn.Module, mesh: Any, policy: MixedPrecisionPolicy) -> None:
    """FSDP2 as most loops have it: each block of the outermost lists, then the rest."""
    for blocks in outermost_lists(model):
        for block in blocks:
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
