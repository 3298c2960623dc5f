"""Bytes that autograd keeps between the forward and the backward pass, by operation.

The bytes are summed over the operations of `techniques.blocks`. Each storage counts once, under the
operation that saves it first: if a norm and the Linear after it save the same tensor, its bytes
count under the norm. An operation has the name of its module in `lpkit.nn.transformer`.
`saved_bytes` of notebooks/lessons/saved.py measures a real forward pass under the same names.
tests/predict/test_predict.py checks that formula and measurement agree to the byte on the CPU.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lpkit.techniques.blocks import Operations
from lpkit.techniques.memory import RECOMPUTE
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.row import Settings

AGAIN = "again"                                 # key of the bytes that recomputed blocks keep
OUTSIDE = ("embed", "norm", "head", "loss")     # operations outside the blocks


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The bytes that one micro-batch holds when its forward pass ends."""

    # bytes by operation, summed over all blocks; recomputed blocks have one entry, AGAIN
    operations: dict[str, float]
    # bytes by operation of one block that saves everything, as in the rerun of a recomputed block
    block: dict[str, float]
    plain: dict[str, float]         # the same for one block whose matmuls stay in 16 bits
    again_bytes: float              # bytes that one recomputed block keeps until its rerun

    def scaled(self, scale: Callable[[str, float], float], again_bytes: float,
               depth: float = 1.0) -> "Kept":
        """Return a copy for one of several devices. `scale(operation, bytes)` returns the new bytes
        of an operation. `again_bytes`: the bytes that one recomputed block keeps until its rerun,
        on this device. `depth`: the share of the blocks that the device has."""
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
        """The bytes of all operations. Copies of weights that autocast makes are not included."""
        return sum(self.operations.values())

    @property
    def waiting_bytes(self) -> float:
        """The bytes that are alive when backward begins, except for the loss and the token ids,
        which the ledger counts in rows of their own."""
        return self.total_bytes - self.operations["loss"] - self.operations["embed"]


def saved(s: MicroBatch, ops: Operations, recompute: Settings, *, plain: Operations,
          stay: Collection[int] = ()) -> Kept:
    """Return the bytes that a model with the operations `ops` keeps of the micro-batch `s`.

    `recompute` has the settings of recomputation, which decide what each block keeps. `stay` has
    the numbers of the blocks whose matmuls stay in 16 bits; `plain` are the operations of such a
    block."""
    L, row, block, plain_block = s.model.L, RECOMPUTE[recompute.name], ops.saved, plain.saved
    again, again_bytes, every = range(0), 0.0, 1
    if row.repeats_blocks:
        every = row.every(recompute)
        again = range(0, L, every)      # numbers of recomputed blocks
        again_bytes = row.again_bytes(s.stream_bytes * ops.stream_share, sum(block.values()),
                                      ops.result_bytes, recompute)
    held = {"embed": ops.embed.saved_bytes}
    whole = L - len(again)      # number of blocks that are not recomputed
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
