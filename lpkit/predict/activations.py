"""Bytes that autograd keeps between the forward and the backward pass, by operation: a fold over
`techniques.blocks`.

Counted in storages, each once, under the operation that keeps it first: a tensor that a norm and
the product after it both need is one tensor. Names are those of the modules in
`lpkit.nn.transformer`; `lpkit.measure.saved_bytes` uses the same ones, and tests/test_predict.py
holds the two equal, to the byte, on the CPU.
"""

from dataclasses import dataclass, replace

from lpkit.config import ModelConfig
from lpkit.techniques.blocks import MicroBatch, Operations, operations
from lpkit.techniques.memory import RECOMPUTE
from lpkit.techniques.row import Settings, chosen

AGAIN = "again"                                 # what is kept of blocks that run again
OUTSIDE = ("embed", "norm", "head", "loss")     # operations that are not a block's


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one micro-batch holds when its forward pass ends."""

    operations: dict[str, float]    # over all blocks; of those that run again, under AGAIN
    block: dict[str, float]         # of one block, everything kept: recomputing it holds it
    last: dict[str, float]          # of the last block, whose products may be in other bits
    weight_copy_bytes: float        # the weights once more in the compute dtype, by autocast
    again_bytes: float              # what a block keeps that runs again

    def sharded(self, cut: int, depth: float) -> "Kept":
        """Of a device that has 1/cut of each tensor and `depth` of the blocks."""
        def share(saved: dict[str, float]) -> dict[str, float]:
            return {name: nbytes / cut for name, nbytes in saved.items()}

        operations = share(self.operations)
        for name in operations.keys() - OUTSIDE:
            operations[name] *= depth
        return Kept(operations=operations, block=share(self.block), last=share(self.last),
                    weight_copy_bytes=self.weight_copy_bytes / cut * depth,
                    again_bytes=self.again_bytes / cut)

    def offloaded(self, shares: dict[str, float], again_share: float) -> "Kept":
        """With a share of what each operation of the blocks keeps, or of what blocks keep that run
        again: in low precision, or nothing, elsewhere."""
        if AGAIN in self.operations:
            again = {AGAIN: self.operations[AGAIN] * again_share}
            return replace(self, operations=self.operations | again,
                           again_bytes=self.again_bytes * again_share)

        def shrunk(saved: dict[str, float]) -> dict[str, float]:
            return {name: nbytes * shares.get(name, 1.0) for name, nbytes in saved.items()}

        return replace(self, operations=shrunk(self.operations), block=shrunk(self.block),
                       last=shrunk(self.last))

    @property
    def block_bytes(self) -> float:
        return sum(self.block.values())

    @property
    def total_bytes(self) -> float:
        """Without the weight copies."""
        return sum(self.operations.values())

    @property
    def waiting_bytes(self) -> float:
        """When backward begins: without what the loss keeps, and without the token ids."""
        return self.total_bytes - self.operations["loss"] - self.operations["embed"]


def kept(model: ModelConfig, *, batch: int, recompute: str = "none", **sizes: object) -> Kept:
    """For `batch` sequences of model.context tokens; `sizes` are the other fields of a MicroBatch.
    `recompute`, the name of a row, decides what blocks keep."""
    settings = chosen(RECOMPUTE, recompute, "memory.recompute")
    s = MicroBatch(model=model, batch=batch, **sizes,
                   attends_again=RECOMPUTE[recompute].attention_alone)
    ops = operations(s)
    return saved(s, ops, settings, last=ops)


def saved(s: MicroBatch, ops: Operations, recompute: Settings, *, last: Operations) -> Kept:
    """As `kept`; `last` are the operations as the last block has them."""
    L, row, block, last_block = s.model.L, RECOMPUTE[recompute.name], ops.saved, last.saved
    again, again_bytes, whole = 0, 0.0, 1
    if row.repeats_blocks:
        every = row.every(recompute)
        again = len(range(0, L, every))             # blocks that run again
        whole = 0 if (L - 1) % every == 0 else 1    # whether the last one is kept
        again_bytes = row.again_bytes(s.tokens * s.model.D * s.residual_bytes, sum(block.values()),
                                      sum(op.result_bytes for op in ops.block), recompute)
    held = {"embed": ops.embed.saved_bytes}
    if again < L:
        for name in {**block, **last_block}:
            held[name] = (L - again - whole) * block.get(name, 0) + whole * last_block.get(name, 0)
    if again:
        held[AGAIN] = again * again_bytes
    if ops.positions.saved_bytes:       # once for all blocks
        held[ops.positions.name if again < L else AGAIN] += ops.positions.saved_bytes
    for op in (ops.norm, ops.head, ops.loss):
        held[op.name] = op.saved_bytes
    copied = 0
    if s.mixed:
        copied = ops.head.weights + sum([op.weights for op in ops.linears]) * (L - again)
    return Kept(operations=held, block=block, last=last_block, again_bytes=again_bytes,
                weight_copy_bytes=copied * s.compute_bytes)
