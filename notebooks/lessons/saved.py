"""The tensors that autograd keeps of a forward pass, by the operation that kept them first."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from lpkit.measure.tracking import Tracker, short

ROWS = ("activations", "logits and loss", "low-precision weights", "scales")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that autograd kept for the backward pass, each storage once, under the operation that
    kept it first."""

    operations: dict[str, int]  # by module, block numbers left out: norm1, attention.qkv, ..., loss
    weight_copy_bytes: int      # copies of the weights in another dtype, made by autocast

    @property
    def total_bytes(self) -> int:
        """The bytes without the copies of the weights."""
        return sum(self.operations.values())


def live(tracker: Tracker) -> Counter[str]:
    """Return live bytes by row."""
    rows: Counter[str] = Counter()
    for record in tracker.records.values():
        rows[record.row] += record.nbytes
    return +rows


def kept(tracker: Tracker) -> dict[str, int]:
    """Return live bytes that autograd keeps for backward, by the module that kept them first."""
    saved: Counter[str] = Counter()
    for record in tracker.records.values():
        if record.kept_by is not None and record.row in ROWS:
            saved[short(record.kept_by)] += record.nbytes
    return dict(saved)


def saved_bytes(model: nn.Module, step: Callable[[], Tensor], *,
                ignore: Iterable[Tensor] = ()) -> Saved:
    """Run `step`, which returns a loss, and count the bytes that autograd keeps. Nothing is
    changed or slower afterwards.

    Bytes kept outside any module belong to the loss. The model's parameters and the tensors in
    `ignore` are not counted, since they exist in any case.
    """
    with Tracker(model, device=next(model.parameters()).device) as tracker:
        tracker.hold(ignore, "batch")
        loss = step()
        operations = kept(tracker)
    if not loss.requires_grad:
        raise ValueError("step() returned something that backward cannot start from")
    return Saved(operations=operations, weight_copy_bytes=live(tracker)["weight copies"])
