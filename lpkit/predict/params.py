"""Parameter counts of a model, by part. tests/predict/test_predict.py compares the counts with
PyTorch's.
"""

import functools

from lpkit.config import Config, ModelConfig
from lpkit.predict.updates import Work, elementwise, work
from lpkit.techniques.blocks import Operations, operations
from lpkit.techniques.memory import RECOMPUTE, RecomputeRow
from lpkit.techniques.operation import MicroBatch, Op, fused
from lpkit.techniques.optimizers import OPTIMIZERS, OptimizerSettings, find
from lpkit.techniques.row import Settings, chosen


@functools.lru_cache(maxsize=256)
def of(model: ModelConfig) -> Operations:
    """Return the operations of `model` for one sequence in the default precision: enough for counts
    that depend on neither."""
    return operations(MicroBatch(model=model))


def parameters(model: ModelConfig) -> dict[str, int]:
    """Return the parameter counts by part: embedding, positions, attention, mlp, norms, head, and
    parts that adapters add. Their sum is the model's parameter count. A tied head counts 0, because
    its weight is the embedding."""
    return dict(_parts(model))


@functools.lru_cache(maxsize=256)
def _parts(model: ModelConfig) -> dict[str, int]:
    ops = of(model)
    counts = dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0)
    for times, group in ((1, ops.outside), (model.L, ops.block)):
        for op in group:
            if op.params:
                counts[op.part] = counts.get(op.part, 0) + _held(times, op)
    return counts


def _held(times: int, op: Op) -> int:
    """Return the parameters of `times` copies of an operation, if a share `op.own` of them has
    parameters of its own; the others share these."""
    return op.params * (times if op.own == 1 else round(times * op.own))


@functools.lru_cache(maxsize=256)
def trained_count(model: ModelConfig) -> int:
    """Return the number of parameters that have gradients and optimizer states."""
    ops = of(model)
    return sum(_held(times, op) for times, group in ((1, ops.outside), (model.L, ops.block))
               for op in group if op.trained)


@functools.lru_cache(maxsize=64)
def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained parameters, by the parameters' names in lpkit.nn."""
    ops, shape_of = of(model), {}
    blocks = [(f"blocks.{i}.", [op for op in ops.block if i < round(model.L * op.own)])
              for i in range(model.L)]
    for where, group in (("", ops.outside), *blocks):
        for op in group:
            suffixes = ("sinks",) if op.name == "attention" else ("weight", "bias")
            for suffix, shape in zip(suffixes, op.shapes if op.trained else ()):
                shape_of[f"{where}{op.name}.{suffix}"] = shape
    return shape_of


def optimizer_settings(config: Config, name: str | None = None) -> OptimizerSettings:
    """Return the settings of the optimizer `name`: the config's settings if this is its optimizer
    (or None), else the defaults of the row `name`."""
    if name in (None, config.optimizer.name):
        return config.optimizer
    return chosen(OPTIMIZERS, name, "optimizer")


def recompute_of(config: Config, name: str | None = None) -> tuple[RecomputeRow, Settings]:
    """Return the row `name` of RECOMPUTE and its settings: the config's settings if this is its row
    (or None), else the defaults of the row."""
    settings = config.memory.recompute
    if name not in (None, settings.name):
        settings = chosen(RECOMPUTE, name, "memory.recompute")
    return RECOMPUTE[settings.name], settings


def optimizer_work(config: Config, name: str | None = None, moments: str | None = None) -> Work:
    """Return the work of the optimizer `name` (None: the config's) in an update of the model.
    `moments`: the format of its moments; None: the config's."""
    settings, moments = (optimizer_settings(config, name),
                         moments or config.memory.moment_format.name)
    if elementwise(settings):
        return Work(find(settings.name).state_bytes(moments))
    return work(shapes(config.model), settings, moments, functools.partial(fused, config.model))


def nonzero_count(model: ModelConfig) -> int:
    """Return the parameter count without the zeros of pruned matrices. These zeros are still
    stored."""
    zeros = sum(round(model.L * op.own) * round(op.weights * (1 - op.density))
                for op in of(model).linears)
    return parameter_count(model) - zeros


def parameter_count(model: ModelConfig) -> int:
    return sum(parameters(model).values())
