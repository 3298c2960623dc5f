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
        operations = {name: nbytes / cut * (1 if name in OUTSIDE else depth)
                      for name, nbytes in self.operations.items()}
        return Kept(operations=operations,
                    block={name: nbytes / cut for name, nbytes in self.block.items()},
                    last={name: nbytes / cut for name, nbytes in self.last.items()},
                    weight_copy_bytes=self.weight_copy_bytes / cut * depth,
                    again_bytes=self.again_bytes / cut)

    def offloaded(self, number_bytes: float, ops: Operations, residual_bytes: int) -> "Kept":
        """With `number_bytes` for each number that blocks keep: in low precision, or 0,
        elsewhere."""
        shares = {op.name: number_bytes / op.saved_itemsize for op in ops.block}
        if AGAIN in self.operations:
            share = number_bytes / residual_bytes
            again = {AGAIN: self.operations[AGAIN] * share}
            return replace(self, operations=self.operations | again,
                           again_bytes=self.again_bytes * share)
        outside = dict.fromkeys(OUTSIDE, 1.0)

        def shrunk(saved: dict[str, float]) -> dict[str, float]:
            return {name: nbytes * (outside | shares)[name] for name, nbytes in saved.items()}

        return replace(self, operations=shrunk(self.operations), block=shrunk(self.block),
                       last=shrunk(self.last))

    @property
    def block_bytes(self) -> float:
        return sum(self.block.values())

    @property
    def loss_bytes(self) -> float:
        """Log-probabilities and targets."""
        return self.operations["loss"]

    @property
    def total_bytes(self) -> float:
        """Without the weight copies."""
        return sum(self.operations.values())


def kept(model: ModelConfig, *, batch: int, recompute: Settings | str = "none",
         last_operand_bytes: float | None = None, **sizes: object) -> Kept:
    """For `batch` sequences of model.context tokens; `sizes` are the other fields of a MicroBatch.

    `recompute` decides what blocks keep: settings, or the name of a row with its own.
    `last_operand_bytes` is `operand_bytes` of the last block.
    """
    s = MicroBatch(model=model, batch=batch, **sizes)
    if isinstance(recompute, str):
        recompute = chosen(RECOMPUTE, recompute, "memory.recompute")
    return saved(s, recompute, last=replace(s, operand_bytes=last_operand_bytes))


def saved(s: MicroBatch, recompute: Settings, *, last: MicroBatch) -> Kept:
    """As `kept`; `last` is the micro-batch as the last block takes it."""
    m, ops, row = s.model, operations(s), RECOMPUTE[recompute.name]
    block, last_block, every = ops.saved, operations(last).saved, row.every(recompute)
    again = len(range(0, m.L, every)) if row.repeats else 0        # blocks that run again
    stream = s.tokens * m.D * s.residual_bytes
    results = sum(op.result_bytes for op in ops.block)
    again_bytes = row.again_bytes(stream, sum(block.values()), results, recompute)
    whole = 0 if row.repeats and (m.L - 1) % every == 0 else 1     # whether the last one is kept
    blocks: dict[str, float] = {}
    if again < m.L:
        for name in {**block, **last_block}:
            blocks[name] = ((m.L - again - whole) * block.get(name, 0)
                            + whole * last_block.get(name, 0))
    if again:
        blocks[AGAIN] = again * again_bytes
    if ops.positions.saved_bytes:       # once for all blocks
        blocks[ops.positions.name if again < m.L else AGAIN] += ops.positions.saved_bytes
    copied = ops.head.weights + m.L * sum(op.weights for op in ops.linears) * (m.L - again) // m.L
    return Kept(
        operations={"embed": ops.embed.saved_bytes, **blocks, "norm": ops.norm.saved_bytes,
                    "head": ops.head.saved_bytes, "loss": ops.loss.saved_bytes},
        block=dict(block), last=dict(last_block),
        weight_copy_bytes=copied * s.compute_bytes if s.mixed else 0, again_bytes=again_bytes)
