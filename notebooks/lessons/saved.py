"""The bytes that autograd keeps of a forward pass, by the operation that kept them first."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from lpkit.measure.tracking import Tracker, short

# rows of a tracker's records that count as kept for backward
ROWS = ("activations", "logits and loss", "low-precision weights", "scales")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that autograd kept for the backward pass, each storage once, under the operation that
    kept it first."""

    # bytes by module, summed over the blocks: norm1, attention.qkv, ..., loss
    operations: dict[str, int]
    weight_copy_bytes: int      # copies of the weights in another dtype, made by autocast

    @property
    def total_bytes(self) -> int:
        """The bytes without the copies of the weights."""
        return sum(self.operations.values())


def live(tracker: Tracker) -> Counter[str]:
    """Return the bytes that are alive now, by row of the ledger (activations, weights, ...)."""
    rows: Counter[str] = Counter()
    for record in tracker.records.values():
        rows[record.row] += record.nbytes
    return +rows


def kept(tracker: Tracker) -> dict[str, int]:
    """Return the bytes alive now that autograd keeps for backward, by the module that kept them
    first, summed over the blocks."""
    saved: Counter[str] = Counter()
    for record in tracker.records.values():
        if record.kept_by is not None and record.row in ROWS:
            saved[short(record.kept_by)] += record.nbytes
    return dict(saved)


def saved_bytes(model: nn.Module, step: Callable[[], Tensor], *,
                ignore: Iterable[Tensor] = ()) -> Saved:
    """Run `step`, which computes a loss with `model` and returns it, and return the bytes that
    autograd keeps at that moment. The tracking leaves no trace in the model.

    Bytes that are kept outside all modules count under "loss". The model's parameters and the
    tensors in `ignore` (the batch) are not counted, since they exist in any case. Raises ValueError
    if the result of `step` has no graph.
    """
    with Tracker(model, device=next(model.parameters()).device) as tracker:
        tracker.hold(ignore, "batch")
        loss = step()
        operations = kept(tracker)
    if not loss.requires_grad:
        raise ValueError("step() returned a tensor without a graph, which backward cannot start "
                         "from")
    return Saved(operations=operations, weight_copy_bytes=live(tracker)["weight copies"])
