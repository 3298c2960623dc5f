"""Rows: what is known about a technique without running it. This package does not import torch.

A family is a dict of rows by name (`lpkit.techniques.row`), for example all optimizers. Config,
predictor, runtime, doctor and documentation read the same row. So a technique consists of one row,
in this package or in another, and one implementation. docs/techniques.md lists every family, row
and setting.
"""

from lpkit.techniques import (
    attention,
    attention_backends,
    blocks,
    changes,
    data,
    inits,
    memory,
    objectives,
    optimizers,
    recipes,
    schedules,
)

FAMILIES = {        # field of a Config: the family from which it names a row
    "optimizer": optimizers.OPTIMIZERS,
    "objective": objectives.OBJECTIVES,
    "schedule": schedules.SCHEDULES,
    "model.init": inits.INITS,
    "model.block": blocks.BLOCKS,
    "model.attention": attention.KINDS,
    "model.changes": blocks.MODEL_CHANGES,
    "system.attention": attention_backends.ATTENTION,
    "start.grow": changes.GROWTH,
    "data.policy": data.POLICIES,
    "sizes": data.SIZES,
    "precision.recipe": recipes.RECIPES,
    **{f"memory.{key}": table for key, table in memory.TABLES.items()},
    "transforms": changes.MODEL_TRANSFORMS,
    "governors": changes.GOVERNORS,
}
