"""Parameter counts of a model, by part; tests/predict/test_predict.py compares them with PyTorch.
"""

import functools

from lpkit.config import Config, ModelConfig
from lpkit.predict.updates import Work, elementwise, work
from lpkit.techniques.blocks import Operations, operations
from lpkit.techniques.memory import RECOMPUTE, Recompute
from lpkit.techniques.operation import MicroBatch, Op, fused
from lpkit.techniques.optimizers import OPTIMIZERS, OptimizerSettings, find
from lpkit.techniques.row import Settings, chosen


@functools.lru_cache(maxsize=256)
def of(model: ModelConfig) -> Operations:
    """Return the operations of `model` for counts that do not depend on tokens or precision."""
    return operations(MicroBatch(model=model))


def parameters(model: ModelConfig) -> dict[str, int]:
    """Return the parameter counts by part; their sum is the model's size. A tied head adds 0."""
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
    return op.params * (times if op.own == 1 else round(times * op.own))


@functools.lru_cache(maxsize=256)
def trained_count(model: ModelConfig) -> int:
    """Return the number of parameters that have gradients and optimizer states."""
    ops = of(model)
    return sum(_held(times, op) for times, group in ((1, ops.outside), (model.L, ops.block))
               for op in group if op.trained)


@functools.lru_cache(maxsize=64)
def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained parameters by their names in lpkit.nn."""
    ops, shape_of = of(model), {}
    blocks = [(f"blocks.{i}.", [op for op in ops.block if i < round(model.L * op.own)])
              for i in range(model.L)]
    for where, group in (("", ops.outside), *blocks):
        for op in group:
            suffixes = ("sinks",) if op.name == "attention" else ("weight", "bias")
            for suffix, shape in zip(suffixes, op.shapes if op.trained else ()):
                shape_of[f"{where}{op.name}.{suffix}"] = shape
    return shape_of


def optimizer_settings(config: Config, asked: str | None = None) -> OptimizerSettings:
    """Return the settings of the optimizer `asked`: the config's, or the defaults of its row."""
    if asked in (None, config.optimizer.name):
        return config.optimizer
    return chosen(OPTIMIZERS, asked, "optimizer")


def recompute_of(config: Config, asked: str | None = None) -> tuple[Recompute, Settings]:
    """Return the row and its settings: the config's, or the defaults of a row that is given."""
    settings = config.memory.recompute
    if asked not in (None, settings.name):
        settings = chosen(RECOMPUTE, asked, "memory.recompute")
    return RECOMPUTE[settings.name], settings


def optimizer_work(config: Config, asked: str | None = None, moments: str | None = None) -> Work:
    """Return the work of the optimizer `asked`. `moments`: their format; None: the config's."""
    settings, moments = (optimizer_settings(config, asked),
                         moments or config.memory.moment_format.name)
    if elementwise(settings):
        return Work(find(settings.name).state_bytes(moments))
    return work(shapes(config.model), settings, moments, functools.partial(fused, config.model))


def nonzero_count(model: ModelConfig) -> int:
    """Return the parameter count without zeros of pruned matrices, which are still stored."""
    zeros = sum(round(model.L * op.own) * round(op.weights * (1 - op.density))
                for op in of(model).linears)
    return parameter_count(model) - zeros


def parameter_count(model: ModelConfig) -> int:
    return sum(parameters(model).values())
