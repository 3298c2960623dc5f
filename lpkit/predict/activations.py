"""Bytes that autograd keeps between the forward and the backward pass, by operation: a fold over
`techniques.blocks`.

Counted in storages, each once, under the operation that keeps it first: a tensor that a norm and
the product after it both need is one tensor. Names are those of the modules in
`lpkit.nn.transformer`; `saved_bytes` of notebooks/lessons/saved.py uses the same ones, and
tests/predict/test_predict.py holds the two equal, to the byte, on the CPU.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lpkit.techniques.blocks import Operations
from lpkit.techniques.memory import RECOMPUTE
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.row import Settings

AGAIN = "again"                                 # what is kept of blocks that run again
OUTSIDE = ("embed", "norm", "head", "loss")     # operations that are not a block's


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one micro-batch holds when its forward pass ends."""

    operations: dict[str, float]    # over all blocks; of those that run again, under AGAIN
    block: dict[str, float]         # of one block, everything kept: recomputing it holds it
    plain: dict[str, float]         # of one whose products stay in 16 bits
    again_bytes: float              # what a block keeps that runs again

    def scaled(self, scale: Callable[[str, float], float], again_bytes: float,
               depth: float = 1.0) -> "Kept":
        """Returns it with `scale(operation, bytes)` for the bytes of each, `again_bytes`, and
        `depth` of the blocks."""
        def each(saved: dict[str, float]) -> dict[str, float]:
            return {name: scale(name, nbytes) for name, nbytes in saved.items()}

        operations = each(self.operations)
        if self.again_bytes:
            operations[AGAIN] = self.operations[AGAIN] * (again_bytes / self.again_bytes)
        for name in operations.keys() - OUTSIDE:
            operations[name] *= depth
        return replace(self, operations=operations, block=each(self.block), plain=each(self.plain),
                       again_bytes=again_bytes)

    @property
    def block_bytes(self) -> float:
        return sum(self.block.values())

    @property
    def total_bytes(self) -> float:
        """The bytes without the weight copies."""
        return sum(self.operations.values())

    @property
    def waiting_bytes(self) -> float:
        """The bytes held when backward begins: without the loss's, and without the token ids."""
        return self.total_bytes - self.operations["loss"] - self.operations["embed"]


def saved(s: MicroBatch, ops: Operations, recompute: Settings, *, plain: Operations,
          stay: Collection[int] = ()) -> Kept:
    """Returns what is kept of a micro-batch by a model of these operations; `recompute` decides
    what blocks keep. `plain` are the operations in the blocks whose numbers are in `stay`."""
    L, row, block, plain_block = s.model.L, RECOMPUTE[recompute.name], ops.saved, plain.saved
    again, again_bytes, every = range(0), 0.0, 1
    if row.repeats_blocks:
        every = row.every(recompute)
        again = range(0, L, every)      # blocks that run again
        again_bytes = row.again_bytes(s.stream_bytes * ops.stream_share, sum(block.values()),
                                      ops.result_bytes, recompute)
    held = {"embed": ops.embed.saved_bytes}
    whole = L - len(again)
    if whole:
        others = len([number for number in stay if number not in again])
        for name, nbytes in block.items():
            held[name] = (whole - others) * nbytes
        for name, nbytes in plain_block.items() if others else ():
            held[name] = held.get(name, 0) + others * nbytes
    if again:
        held[AGAIN] = len(again) * again_bytes
    if ops.positions.saved_bytes:       # once for all blocks
        held[ops.positions.name if whole else AGAIN] += ops.positions.saved_bytes
    for op in (ops.norm, ops.head, ops.loss):
        held[op.name] = op.saved_bytes
    return Kept(operations=held, block=block, plain=plain_block, again_bytes=again_bytes)
