"""Rows: facts about a technique that are known without running it. No torch.

docs/techniques.md lists every family, row and setting.

A family is a dict of rows by name (`lpkit.techniques.row`). Config, predictor, runtime, doctor and
documentation read the same row. So a technique is one row, in this package or in another, and one
implementation.
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

FAMILIES = {        # by the field of a Config that names a row
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
