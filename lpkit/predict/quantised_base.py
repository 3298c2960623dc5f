"""Operations of a base in few bits, which `lpkit.techniques.quantised_base` names, and its bytes."""

from dataclasses import replace

from lpkit.errors import ConfigError
from lpkit.techniques.blocks import Operations
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.operation import FP32, MicroBatch, Op
from lpkit.techniques.optimizers import BLOCK
from lpkit.techniques.quantised_base import QuantisedBaseSettings

BITS = {"nf4": 4, **{name: one.bits for name, one in FORMATS.items()}}      # of a code


def stored_bytes(numbers: int, settings: QuantisedBaseSettings) -> int:
    """Bytes of a matrix. A last block that is not full takes what a full one does."""
    blocks = -(-numbers // settings.block)
    scales = blocks + FP32 * (-(-blocks // BLOCK) + 1) if settings.double else FP32 * blocks
    return blocks * settings.block * BITS[settings.format] // 8 + scales


def in_codes(ops: Operations, s: MicroBatch, settings: QuantisedBaseSettings) -> Operations:
    """Codes become float32 by an index of int32 for each byte, and then the compute dtype."""
    def stored(op: Op) -> Op:
        scales, index = FP32 / settings.block, FP32 * BITS[settings.format] / 8
        wide = FP32 + scales + max(index, s.compute_bytes % FP32)
        moved = 2 * (index + FP32) + s.compute_bytes
        return replace(op, stored_bytes=stored_bytes(op.weights, settings),
                       made_bytes=op.weights * wide, moved_bytes=op.weights * moved)

    if not any(op.matmul and not op.trained for op in ops.block):
        raise ConfigError(f"model.changes={settings.name} keeps what is frozen in few bits, and "
                          f"nothing before it freezes a matrix; name an adapter first: "
                          f"model.changes=lora,{settings.name}")
    return replace(ops, block=tuple(stored(op) if op.matmul and not op.trained else op
                                    for op in ops.block))
