"""Stacks: training programs, each described by the facts that decide its seconds and bytes.

The rows are in data/published/stacks.toml, and `system.stack` names a row. A row says how the stack
stores weights, gradients and master weights, which kernels it has for low precision, and how
efficient its compiler, its fused kernels and its host are. Numbers that no source states are fitted
to published runs (`lpkit.predict.evidence`).
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
    """One training program. A field that is None is fitted to published runs.

    words               the stack in words
    attention           its attention's speed, divided by the speed of the best attention kernels on
                        the GPU generation
    fused               the share of the pointwise bytes that move after its compiler has fused
                        operations
    overlap, split_overlap, pooled, weight_copies
                        as in `roofline.Efficiency`
    op_seconds          the host's seconds to start one operation of a module
    host_shown          the share of the host's time that a step waits for the host, although the
                        device is slower
    low_bits            the share of the speed of low-precision kernels that a step keeps, divided
                        by the share that it keeps in 16 bits
    storage             a row of `lpkit.predict.recipes.PRECISIONS`: the dtypes in which it stores
                        numbers if matmuls have 16 bits or fewer; "": float32 weights, autocast
    gradient_bytes      bytes of a gradient; None: as in `storage`
    codes               the row of PRECISIONS in which a model computes whose frozen weights are
                        stored as codes (QLoRA); "": the precision of the config
    code_bytes          bytes that decoding moves per weight; 0: as many as lpkit's decoding
    adapter_bytes       bytes that a low-rank adapter moves in forward in addition to its matmuls:
                        per number of its Linear's input, and per number of its result
    recipes             recipes for which it has kernels of its own, in addition to PyTorch's; for
                        each recipe the machines, by the first letters of their names
    bucket_bytes        bytes of gradients that replicas send at once; 0: all gradients
    zero                the ZeRO stage with which its replicas share model states by default
    caches_casts        True: a weight is cast once in an update, by rows and by columns; False:
                        once in each micro-batch
    eight_bit_weights   recipes whose weights are stored as two casts of 8 bits, by rows and by
                        columns, instead of in 16 bits
    saves_inputs        SwiGLU is a single kernel that saves only its input, and so is the rotation
                        of q and k
    fused_loss          head and loss keep logits in the dtype of the head, and no other tensor
    sequence_parallel   between the matmuls, each tensor rank has a part of each sequence
    norm_bytes          bytes per number that a norm moves in forward, in addition to those of a
                        single kernel. If above 0, a norm is several operations in float32, and an
                        RMSNorm saves two tensors of its input's size.
    keeps_gathered      each tensor rank gathers the logits and keeps the logits of two
                        micro-batches; it also keeps the gathered inputs of Linears for backward
    stages_by_work      True: a pipeline stage ends with the block whose matmuls exceed the stage's
                        share of all matmuls, including the head's. False: all stages have the same
                        number of blocks.
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
        """The fields of a MicroBatch that count the bytes that adapters move."""
        return {"code_bytes": self.code_bytes, "adapter_bytes": tuple(self.adapter_bytes)}

    def layout(self, given: Layout) -> Layout:
        """Return the layout that this stack uses for the `given` layout: its replicas may share
        model states by default (`zero`)."""
        if self.zero <= given.stage or given.data == 1 or given.shard > 1:
            return given
        return replace(given, shard=given.data, data=1, zero=self.zero)

    def multiplies(self, recipe: str, machine: str) -> bool:
        """Return whether the stack has a kernel for `recipe` on this machine of the catalogue."""
        return machine.startswith(tuple(self.recipes.get(recipe, ()) or ("\0",)))


PATH = resource("data/published") / "stacks.toml"
STACKS = {name: Stack(**dict.fromkeys(row.pop("fitted")), **row)
          for name, row in tomllib.loads(PATH.read_text(encoding="utf-8")).items()}
# fields of a Stack that are copied to the fields of an Efficiency with the same names
AS_THEY_ARE = ("fused", "overlap", "split_overlap", "op_seconds", "host_shown", "pooled",
               "weight_copies", "norm_bytes", "sequence_parallel", "bucket_bytes")
DEFAULT = "compiled"
# If fit.json has no fitted number for a stack, the number of "eager" is used.


def stack_of(config: Any) -> str:
    """Return the name of the row of STACKS that the config uses. "auto" is lpkit itself: "eager"
    if the config turns torch.compile off, else "compiled". Raises ConfigError for an unknown name.
    """
    name = config.system.stack
    if name == "auto":
        return "eager" if config.system.compile is False else DEFAULT
    pick({"auto": None, **STACKS}, name, "system.stack")
    return name
