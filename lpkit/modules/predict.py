"""Predict the bytes and seconds of one training step of any model, before it runs.

The step runs on shapes only, without memory for the tensors (`lpkit.measure.trace`). A first
forward and backward pass records the operations. Then two updates run: the first allocates the
optimizer's state, and the allocations of the second are recorded, because its peak is the peak of
all later steps. `lpkit.predict.time` computes the seconds from the recorded operations, with the
efficiencies, machines, stacks and ranges that it uses for a Config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lpkit.config import Config
from lpkit.errors import ConfigError, pick, shown
from lpkit.exchange import families
from lpkit.measure.trace import fake_step, fake_world
from lpkit.measure.tracking import Footprint, short
from lpkit.modules.convert import CONVERTED, Converted, Report
from lpkit.modules.step import Asked, ForwardOperations, Step, blocks_of, in_block
from lpkit.predict import cards, evidence
from lpkit.predict.attention import of_sizes
from lpkit.predict.casts import CastRecipe, casts_of, where_run
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
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.techniques.recipes import RECIPES
from lpkit.techniques.row import chosen
from lpkit.values import Count, Place, Text, checked

# relative difference of the formula's peak and the traced peak up to which there is no doubt
CLOSE = 0.05
# operations that the host starts, as `lpkit.predict.time` counts them, per recorded kernel of the
# forward pass
KERNELS = 0.7
FROM_MODEL = "as the model is"      # the precision of a prediction without a recipe


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelPrediction:
    """The predicted training step of a model on `layout.devices` devices. Bytes and batch are those
    of one device."""

    footprint: Footprint        # traced bytes of one device
    step: StepTime
    machine: Machine
    layout: Layout
    parameters: int
    trained_parameters: int
    # FLOPs of the forward pass's matmuls for one device's batch; attention counts all pairs of
    # tokens, as if it had no mask
    forward_flops: int
    precision: str
    optimizer: str
    converted: Report | None
    work: RankWork              # the operations from which the seconds are predicted
    casts: CastRecipe | None        # the casts of the recipe, as this machine runs them
    formula_bytes: int | None   # peak bytes by the formulas of `lpkit predict`; None: unknown model
    model: str                  # name of the model's class

    @property
    def peak_bytes(self) -> int:
        return self.footprint.peak_bytes

    @property
    def step_seconds(self) -> float:
        return self.step.step_seconds

    @property
    def doubt(self) -> str:
        """The reason to trust the trace more than the formula; empty if both agree within CLOSE, or
        if there is no formula for this model."""
        off = (self.formula_bytes or self.peak_bytes) / self.peak_bytes - 1
        return "" if abs(off) <= CLOSE else (
            f"the formula of this architecture gives {quantity(self.formula_bytes, 'bytes')} "
            f"({off:+.0%}), for fused GELUs and norms, without dropout or checkpointing; trust the "
            f"trace")

    def card(self, path: Place, **measured: Any) -> list[str]:
        """Write the prediction to PATH.json, and as a picture to PATH.svg (`lpkit.predict.cards`).
        Return both paths. `measured`: measurements for the same card."""
        model = picked(self, "parameters precision optimizer work.tokens", name="model",
                       layers="work.blocks", trained="trained_parameters")
        return cards.write(path, model, self, **measured)

    @property
    def fits(self) -> bool:
        """True if the peak is at most the memory of the device."""
        return self.peak_bytes <= self.machine.memory_bytes

    @property
    def _sentences(self) -> tuple[str, str]:
        """Two sentences: about the peak memory of a device, and about the seconds of a step."""
        moment = f"in {self.footprint.phase}, {self.footprint.module or 'the model'}"
        return (f"{self.parameters:,} parameters, {self.precision}, {self.optimizer}, on "
                f"{self.layout.devices} x {self.machine.title}: peak "
                f"{quantity(self.peak_bytes, 'bytes')} of "
                f"{quantity(self.machine.memory_bytes, 'bytes')} ({moment})",
                f"a step takes {duration(self.step_seconds)} ({self.step.spread.words}: "
                f"{between(self.step.seconds_range, duration)})")

    @property
    def summary(self) -> str:
        """The peak memory, the seconds of a step and the doubt, in one line."""
        return "; ".join(filter(None, (*self._sentences, self.doubt)))

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction, JSON-ready."""
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
            keep: object = (), pad: bool = False) -> ModelPrediction:
    """Predict the memory and the seconds of a training step of `model` with one `batch` per device.
    Return a ModelPrediction. The model does not change.

    batch      arguments of the model: a mapping, a tuple or one value. Only the shapes and dtypes
               of tensors count. Tensors and model may be on the meta device
    optimizer  the name of a row of OPTIMIZERS, an optimizer of this model, or a function from a
               list of parameters to an optimizer
    machine    a row of the catalogue of machines, or its name
    devices    number of devices; each has its own batch
    shard      number of devices over which weights, gradients and optimizer state are sharded
               (FSDP2, one block at a time); it divides devices. None: all devices
    precision  the name of a row of RECIPES, under autocast; None: the model's own dtypes, without
               autocast
    loss       function (model, batch) -> scalar; None: the loss that the model returns
    stack      the software whose speed is assumed: a row of `lpkit.predict.stacks.STACKS`; None:
               compiled if the model is compiled, else eager
    keep, pad  arguments of `lpkit.convert`

    Raises ConfigError.
    """
    on, shard = machines.find(machine), devices if shard is None else shard
    if not (loss is None or callable(loss)):
        raise ConfigError(f"loss must be a function (model, batch) -> scalar, got {shown(loss)}")
    if devices % shard:
        raise ConfigError(f"devices={devices} must be a multiple of shard={shard}")
    layout = Layout(shard=shard, data=devices // shard)
    stack = stack or ("eager", "compiled")[hasattr(model, "_orig_mod")]
    pick(evidence.STACKS, stack, "stack")
    model = getattr(model, "_orig_mod", model)      # set by torch.compile
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError("this model is sharded already; predict takes it before fully_shard, and "
                          "shard=N")
    if any(isinstance(module, Converted) for module in model.modules()):
        raise ConfigError("this model is converted already; call lpkit.unconvert(model), then "
                          "predict with precision=RECIPE")
    if precision is not None:
        pick(RECIPES, precision, "precision")
    norms = _OneKernel() if on.kind == "gpu" else nullcontext()
    # oneDNN is off, because it computes an LSTM in one kernel, whose matmuls the trace would not
    # see
    with (fake_world(Layout(shard=shard), "cpu") as ranks, fake_step("cpu"), norms,
          torch.backends.mkldnn.flags(False, allow_tf32=None, fp32_precision=None)):
        step = Step(model, batch, optimizer, precision, loss)
        seen = step.recorded()
        if PRECISIONS[step.priced_as].low is not None:
            step.convert(on, keep, pad)
        footprint = step.watched(ranks, foreach=on.kind == "gpu")
    return _priced(step, seen, footprint, on, layout, stack,
                   _closed_form(model, batch, on, layout, optimizer, step.priced_as))


def _closed_form(model: nn.Module, batch: Any, on: Machine, layout: Layout, optimizer: Asked,
                 precision: str) -> int | None:
    """Returns the peak bytes per device by the formulas of `lpkit predict`. They are a check of the
    traced peak. None if `model` is not a model of transformers that the kit knows, if it has other
    parameters than its config says, or if the batch has no `input_ids`."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(optimizer, str) or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    try:
        known = model.config.to_dict()
        config = Config(model=families.of_type(known["model_type"]).model(known))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # different if the model has an adapter or another head
        if parameter_count(config.model) != trained:
            return None
        config = config.replace({
            "model.context": ids.shape[1], "global_batch": len(ids) * layout.devices,
            "grad_accum_steps": 1, "optimizer.name": optimizer, "optimizer.clip": 0,
            "system.attention": "sdpa"})
        return round(memory(config, on, layout=layout, precision=precision).peak_bytes)
    except (AttributeError, KeyError, ConfigError):     # the kit has no such architecture
        return None


class _OneKernel(TorchFunctionMode):
    """Replace PyTorch's RMSNorm by its LayerNorm during a trace for a GPU. The trace runs CPU code,
    in which RMSNorm is several operations, which save and move more bytes than the single kernel of
    a GPU. LayerNorm is a single kernel on both; it saves one number per row more than RMSNorm."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        weight = (kwargs or {}).get("weight")
        if func is nn.functional.rms_norm and (weight is None or weight.dtype == args[0].dtype):
            return nn.functional.layer_norm(*args[:2], weight)
        return func(*args, **(kwargs or {}))


def _priced(step: Step, seen: ForwardOperations, footprint: Footprint, on: Machine,
            layout: Layout, stack: str, formula_bytes: int | None) -> ModelPrediction:
    """Returns the ModelPrediction of a step. seen: the recorded operations; footprint: the traced
    bytes; on: the machine; formula_bytes: from `_closed_form`."""
    report, recipe, emulated = step.report, None, ""
    # modules that the recipe does not convert
    left = {row.name for row in report.rows if row.status != CONVERTED} if report else set()
    products, kept_calls = _products(seen, step.heads, left)
    if not products:
        raise ConfigError("this step multiplies no matrices, so there are no seconds to predict")
    if report is not None:
        row = RECIPES[step.precision]
        recipe, emulated = where_run(casts_of(step.precision, row, kept_calls), row, on, "auto")
    parameters = [*step.copies]
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    blocks = blocks_of(step.model)
    in_blocks = sum(p.numel() for name, p in step.model.named_parameters() if in_block(name))
    # "is trained" -> elements of the weights of Linears, without the head
    weights = Counter()
    for product in products:
        if product.name != "head":
            weights[product.trained] += product.N * product.K * product.calls
    work = RankWork(
        blocks=blocks, tokens=max(product.M for product in products), stream_numbers=0,
        products=products, attention="as traced", attentions=tuple(
            (of_sizes(*sizes), calls / blocks) for sizes, calls in seen.attentions.items()),
        launches=KERNELS * seen.kernels[True] / blocks,
        moved_bytes=seen.moved[True] / blocks, outside_bytes=seen.moved[False],
        linear_weights=weights.total() / blocks, trained_weights=weights[True] / blocks,
        parameters=in_blocks / blocks, outside_parameters=count - in_blocks,
        trained=trained / max(1, count))
    name = step.optimizer if isinstance(step.optimizer, str) else (
        type(step.optimizer).__name__.lower())
    time = work_time(
        work, on, layout, PRECISIONS[step.priced_as], _work(step.updater, name),
        model_flops=seen.flops(backward=True), precision=step.precision or "fp32", recipe=recipe,
        emulated=emulated, stack=stack)
    return ModelPrediction(
        footprint=footprint, step=time, machine=on, layout=layout, parameters=count,
        trained_parameters=trained, forward_flops=seen.flops(backward=False), optimizer=name,
        precision=step.precision or FROM_MODEL, converted=report, work=work, casts=recipe,
        model=type(step.model).__name__, formula_bytes=formula_bytes)


def _products(seen: ForwardOperations, heads: Collection[str], left: Collection[str]
              ) -> tuple[tuple[Product, ...], Counter[str]]:
    """Returns (matmuls, calls without the recipe). Linears of the same role and sizes in all blocks
    become one Product with their total number of calls. The Counter has, for each Product's name,
    the number of calls by modules in `heads` or `left`, which the recipe does not convert."""
    label = {name: "head" if name in heads else short(name) or "Linears"
             for name, *_ in seen.products}
    kinds = {(label[name], *sizes) for name, *sizes in seen.products}
    several = Counter(name for name, *_ in kinds)
    calls, kept_calls = Counter(), Counter()
    for (name, M, N, K, trained), count in seen.products.items():
        title = label[name] if several[label[name]] == 1 else f"{label[name]} {N} x {K}"
        calls[title, M, N, K, trained] += count
        kept_calls[title] += count * (name in left or name in heads)
    return tuple(Product(name=name, M=M, N=N, K=K, calls=count, trained=trained)
                 for (name, M, N, K, trained), count in calls.items()), kept_calls


def _work(optimizer: torch.optim.Optimizer, name: str) -> Work:
    """Returns the Work of an update: FLOPs and bytes of the optimizer. The rule of a parameter is
    the field "rule" of its group, or else `name`. An unknown rule counts as AdamW."""
    updates = []
    for group in optimizer.param_groups:
        rule = group.get("rule", name)
        rule = chosen(OPTIMIZERS, rule if rule in OPTIMIZERS else "adamw", "optimizer")
        thirds = (1, 1, 1) * (group.get("layout") == "thirds")
        updates += [(tuple(p.shape), rule, thirds) for p in group["params"]]
    return work_of(updates)
