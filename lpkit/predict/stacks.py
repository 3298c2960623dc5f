"""Stacks: training programs, described by what decides their seconds and bytes.

data/published/stacks.toml has the rows, and `system.stack` names one. A row says how the stack
stores weights, gradients and master copies, which kernels it has for low precision, and how much
time its compiler, its fused kernels and its host leave. Numbers that no source states are fitted to
published runs (`lpkit.predict.evidence`).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lpkit.errors import pick
from lpkit.files import resource
from lpkit.techniques.layouts import Layout


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One training program. A field that is None is fitted.

    attention           the share of the generation's attention kernels that its attention reaches
    fused               the share of pointwise bytes that its fused kernels still move
    op_seconds          the host's time to start one operation of a module
    host_shown          the share of the host's time that shows although the device is slower
    storage             a row of `lpkit.predict.recipes.PRECISIONS`: how it stores numbers if
                        matmuls have 16 bits or fewer; "": float32 weights, autocast
    gradient_bytes      bytes of a gradient, if not as in `storage`
    codes               the row of PRECISIONS that a base in codes (QLoRA) computes in; "": as asked
    code_bytes          bytes moved per weight when codes are decoded; 0: as lpkit does
    adapter_bytes       bytes that a low-rank adapter moves in forward besides its products, per
                        number of its Linear's input and of its result
    recipes             recipes that its own kernels multiply, in addition to PyTorch's: the first
                        letters of the names of machines, by recipe
    bucket_bytes        bytes of gradients that replicas send at once; 0: all of them
    zero                the ZeRO stage at which its replicas share model states by default
    caches_casts        a weight is cast once an update, by rows and by columns, not once a
                        micro-batch
    eight_bit_weights   recipes whose weights are stored as two casts of 8 bits, by rows and by
                        columns, instead of in 16 bits
    saves_inputs        SwiGLU and the rotation are one kernel each, which saves only its input
    fused_loss          head and loss keep logits in the dtype of the head and nothing else
    sequence_parallel   between the matrices, each tensor rank has a part of each sequence
    norm_bytes          extra bytes per number that a norm moves in forward, over one kernel; above
                        0 it is several operations in float32, and an RMSNorm saves two tensors of
                        its size
    keeps_gathered      each tensor rank gathers the logits and keeps those of two micro-batches; it
                        also keeps the gathered inputs of Linears for backward
    stages_by_work      a stage ends with the block that exceeds its share of the products, which
                        include the head's; else stages have equal numbers of blocks
    """

    words: str
    attention: float | None
    fused: float | None
    overlap: float | None
    op_seconds: float | None = None
    host_shown: float | None = None
    split_overlap: float | None = 0.0
    pooled: float = 1.0
    weight_copies: float = 1.0
    # share of its low-precision kernels' speed that a step keeps, times that of 16 bits
    low_bits: float | None = 1.0
    storage: str = ""
    gradient_bytes: int | None = None
    codes: str = ""
    code_bytes: float = 0.0
    adapter_bytes: tuple[float, float] = (0.0, 0.0)
    recipes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bucket_bytes: float = 0.0
    zero: int = 0
    caches_casts: bool = False
    eight_bit_weights: tuple[str, ...] = ()
    saves_inputs: bool = False
    fused_loss: bool = False
    norm_bytes: float = 0.0
    sequence_parallel: bool = True
    keeps_gathered: bool = False
    stages_by_work: bool = False

    @property
    def of_adapters(self) -> dict[str, Any]:
        """Return the fields of a MicroBatch that count what adapters move."""
        return {"code_bytes": self.code_bytes, "adapter_bytes": tuple(self.adapter_bytes)}

    def layout(self, asked: Layout) -> Layout:
        """Return the layout in this stack, whose replicas may share model states by default."""
        if self.zero <= asked.stage or asked.data == 1 or asked.shard > 1:
            return asked
        return replace(asked, shard=asked.data, data=1, zero=self.zero)

    def multiplies(self, recipe: str, machine: str) -> bool:
        """Return whether the stack has a kernel for `recipe` on this machine of the catalogue."""
        return machine.startswith(tuple(self.recipes.get(recipe, ()) or ("\0",)))


PATH = resource("data/published") / "stacks.toml"
STACKS = {name: Stack(**dict.fromkeys(row.pop("fitted")), **row)
          for name, row in tomllib.loads(PATH.read_text(encoding="utf-8")).items()}
# facts of a stack that are fields of an Efficiency with the same name
AS_THEY_ARE = ("fused", "overlap", "split_overlap", "op_seconds", "host_shown", "pooled",
               "weight_copies", "norm_bytes", "sequence_parallel", "bucket_bytes")
DEFAULT = "compiled"
# A fitted number that fit.json does not have for a stack is that of "eager".


def stack_of(config: Any) -> str:
    """Return the row of STACKS that `system.stack` names; for auto, lpkit's own. Raises
    ConfigError."""
    asked = config.system.stack
    if asked == "auto":
        return "eager" if config.system.compile is False else DEFAULT
    pick({"auto": None, **STACKS}, asked, "system.stack")
    return asked
