"""What the formula of activations says of a model alone: all kept, or what a recomputation leaves."""

from lpkit.config import ModelConfig
from lpkit.predict.activations import Kept, saved
from lpkit.techniques.blocks import operations
from lpkit.techniques.memory import RECOMPUTE
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.row import chosen


def kept(model: ModelConfig, *, batch: int, recompute: str = "none", **sizes: object) -> Kept:
    """Returns what is kept for `batch` sequences of model.context tokens; `sizes` are the other
    fields of a MicroBatch. `recompute`, the name of a row, decides what blocks keep."""
    settings = chosen(RECOMPUTE, recompute, "memory.recompute")
    s = MicroBatch(model=model, batch=batch, **sizes,
                   attends_again=RECOMPUTE[recompute].attention_alone)
    ops = operations(s)
    return saved(s, ops, settings, plain=ops)
