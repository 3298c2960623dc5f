"""One operation of a transformer: an `Op`. Each size of a model is a sum over operations. No torch.

An `Op` describes one operation on a `MicroBatch`, on a device that holds the whole model: its
parameters, its FLOPs, what autograd saves, how many bytes it moves, what its backward holds, and
which weights tensor parallelism cuts. This module also has the operations that attention needs
(Linears and positions). `lpkit.predict.attention` has attention itself. `blocks` has all other
operations and the list of a whole model.

Method: Korthikanti et al. 2022, section 4 (https://arxiv.org/abs/2205.05198) for saved tensors. The
terms are those of PyTorch's kernels for `lpkit.nn`; tests/predict/test_predict.py checks that they
equal a measured step to the byte.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, Literal

from lpkit.techniques.attention import Rule
from lpkit.techniques.row import Technique

FP32, TOKEN_ID = 4, 8       # bytes; token ids are int64


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A product over pairs of tokens, (M, K) with (K, N), for a `group` of heads x sequences."""

    name: str
    M: int
    N: int
    K: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Hold:
    """One moment of an operation's backward. `nbytes` are alive for a moment. Then the share
    `frees` of the saved bytes is freed, and gradients that wait for the next operation grow by
    `grows` bytes."""

    nbytes: float = 0.0
    frees: float = 0.0
    grows: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation. `name` is that of its module in lpkit.nn, if it has a module."""

    name: str
    part: str                               # group of its parameters: attention, mlp, norms, ...
    params: int = 0
    # shape of each parameter that is not a Linear's; (): one vector
    shape: tuple[int, ...] = ()
    matmul: tuple[int, int] | None = None   # numbers in and numbers out of a Linear, per token
    cut: Literal["", "column", "row"] = ""  # the side of the weight that tensor parallelism cuts
    # a Linear whose input has the dtype of the residual stream
    reads_residual: bool = False
    writes_residual: bool = False           # a Linear whose result is added to the residual stream
    pairs: tuple[Pairs, ...] = ()
    # each storage once, under the operation that saves it first
    saved_bytes: float = 0
    saved_itemsize: int = FP32              # bytes of one number in saved_bytes
    saves_result: bool = False              # the Linear after it then need not save its input
    result_bytes: int = 0                   # results that selective recomputation keeps
    moved_bytes: int = 0                    # read and written in forward, unfused, without matmuls
    # FLOPs of products of parameters only, in a forward pass
    weight_flops: int = 0
    pairs_share: float = 1.0                # share of `pairs` that is computed under a mask
    # products over pairs in backward, divided by those in forward
    backward_pairs: float = 2.0
    # times that scores are read or written again, in forward and in backward
    score_passes: tuple[int, int] = (0, 0)
    # in the order of backward; a Linear's are in lpkit.predict.walk
    backward: tuple[Hold, ...] = ()
    in_stream: bool = False                 # works on the residual stream, over its whole width
    trained: bool = True                    # its parameters have gradients and optimizer states
    tokens_share: float = 1.0               # share of the tokens that it sees, on average
    density: float = 1.0                    # share of its matrix that is not zero
    # share of the blocks whose parameters are not shared from another
    own: float = 1.0
    # the operation when its parameters are frozen, if different
    if_frozen: "Op | None" = None
    shares: Literal["", "input", "output"] = ""     # side whose gradient another Linear has, too
    # bytes of the codes that replace its matrix; 0: a plain matrix
    stored_bytes: float = 0.0
    made_bytes: float = 0.0                 # most bytes in backward while codes are decoded

    @functools.cached_property
    def weights(self) -> int:
        """The number of parameters in a matrix product."""
        return self.matmul[0] * self.matmul[1] if self.matmul else 0

    @property
    def frozen(self) -> "Op":
        """The operation with frozen parameters; a Linear then saves no input."""
        op = self.if_frozen or self
        return replace(op, trained=False, saved_bytes=0 if op.matmul else op.saved_bytes)

    def seeing(self, *shares: float) -> "Op":
        """Return the operation for blocks that see these shares of the tokens. It has the average
        of the blocks, since a model is a sum over its blocks. Pairs of tokens scale with the mean
        of the squares."""
        share, squares = (sum(part**power for part in shares) / len(shares) for power in (1, 2))
        backward = tuple(Hold(nbytes=share * hold.nbytes, frees=hold.frees,
                              grows=share * hold.grows) for hold in self.backward)
        return replace(self, tokens_share=share * self.tokens_share, backward=backward,
                       saved_bytes=share * self.saved_bytes, moved_bytes=share * self.moved_bytes,
                       result_bytes=share * self.result_bytes,
                       pairs=tuple(replace(product, M=squares * product.M)
                                   for product in self.pairs))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its parameters in its module."""
        if not self.params:
            return ()
        if self.matmul:
            bias = self.params - self.weights
            return (self.matmul[::-1], (bias,)) if bias else (self.matmul[::-1],)
        shape = self.shape or (self.params,)
        return (shape,) * (self.params // math.prod(shape))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The sizes and settings that an operation's bytes depend on.

    It has `batch` sequences of model.context tokens. `compute_bytes` is the size of a number in the
    products, `residual_bytes` in the residual stream: 4 and 4 in float32, 2 and 4 under 16-bit
    autocast, 2 and 2 for a model that is 16-bit throughout. `kind` matters where PyTorch's kernels
    differ on a GPU: its RMSNorm is fused, and autocast computes a plain softmax in float32.
    """

    model: Any                              # a ModelConfig
    batch: int = 1
    compute_bytes: int = 4
    residual_bytes: int = 4
    kind: Literal["cpu", "gpu"] = "cpu"
    attention: str = "sdpa"
    # bytes of a number in a Linear's saved input; None: as computed
    operand_bytes: float | None = None
    # backward repeats attention, so only q, k and v are saved
    attends_again: bool = False
    # bytes of a number in the head's saved input; None: as computed
    head_bytes: float | None = None
    made_anew: bool = False                 # q, k and v are copies of the product, not views of it
    norms_written_out: bool = False         # a GPU's RMSNorm is several operations in float32
    saves_inputs: bool = False      # SwiGLU and the rotation are one kernel each and save its input
    # bytes moved per weight when codes are decoded; 0: as lpkit's own decoder
    code_bytes: float = 0.0
    # bytes that a low-rank adapter moves in forward, per number of its Linear's input and result
    adapter_bytes: tuple[float, float] = (0.0, 0.0)

    @functools.cached_property
    def tokens(self) -> int:
        return self.batch * self.model.T

    @functools.cached_property
    def stream_bytes(self) -> int:
        """The bytes of the residual stream."""
        return self.tokens * self.model.D * self.residual_bytes

    @functools.cached_property
    def mixed(self) -> bool:
        return self.compute_bytes < self.residual_bytes

    @property
    def heads_are_views(self) -> bool:
        """True if B and H merge without a copy. (B, H, T, E) is stored as (B, T, H, E), so B or H
        must be 1."""
        return self.batch == 1 or self.model.H == 1

    @functools.cached_property
    def rule(self) -> Rule | None:
        return self.model.attention.rule(self.model.T)

    @property
    def masked_pairs(self) -> int:
        """The pairs in a mask of the whole rule, which differs by sequence if documents do."""
        return (self.batch if self.rule.documents else 1) * self.model.T**2

    @property
    def norms_save_qkv(self) -> bool:
        """True if the norms of q and k keep the product of q, k and v alive, since their input is a
        view of it. Otherwise the norms save a float32 cast of their input."""
        wide = self.compute_bytes == FP32 or (self.kind == "gpu" and not self.mixed)
        return self.model.qk_norm and wide

    @property
    def turns(self) -> bool:
        """True if q and k are computed again between the qkv product and attention."""
        return POSITIONS[self.model.position].turns or self.model.qk_norm


@dataclass(frozen=True, kw_only=True)
class Kind(Technique):
    """A row with its operations, or their "package.module:name" if a run does not need them."""

    operations: Callable[..., Any] | str
    turns: bool = False     # True for positions that rotate q and k in each block

    @property
    def formula(self) -> Callable[..., Any]:
        """The function `operations`, imported if it is given by name."""
        named = isinstance(self.operations, str)
        return resolve_name(self.operations) if named else self.operations


def linear(name: str, s: MicroBatch, K: int, out: int, *, cut: str, bias: bool,
           input_is_saved: bool = False) -> Op:
    """Return a Linear. A column-parallel Linear reads the residual stream, a row-parallel one
    writes it. The saved input is 0 bytes if the operation before it saves it (`input_is_saved`)."""
    as_it_is = 0 if input_is_saved else s.compute_bytes
    itemsize = as_it_is if s.operand_bytes is None else s.operand_bytes
    return Op(name=name, part=name.partition(".")[0], params=out * (K + bias), matmul=(K, out),
              cut=cut, reads_residual=cut == "column", writes_residual=cut == "row",
              saved_bytes=s.tokens * K * itemsize, saved_itemsize=s.compute_bytes,
              result_bytes=s.tokens * out * max(s.compute_bytes, s.operand_bytes or 0))


def fused(m: Any, name: str) -> tuple[int, ...]:
    """Return the row counts of the matrices that are interleaved in parameter `name`; () if it is a
    single matrix."""
    queries = m.H // m.G * m.E
    of = {"attention.qkv.weight": (queries, m.E, m.E), "attention.qk.weight": (m.E, m.E),
          "mlp.gate_up.weight": (m.F, m.F)}
    return next((rows for end, rows in of.items() if name.endswith(end)), ())


# Positions: these operations are outside the blocks.

def learned(s: MicroBatch) -> Op:
    m = s.model
    return Op(name="positions", part="positions", params=m.T * m.D, shape=(m.T, m.D))


def rope(s: MicroBatch) -> Op:
    """The cos and sin tables, computed once for all blocks. Attention counts the rotation."""
    return Op(name="attention", part="positions",
              saved_bytes=2 * s.model.T * s.model.E * s.residual_bytes)


# Llama 3.1: a pair of numbers that turns less than SLOW times in TRAINED tokens is slowed down by
# rope_factor, a pair that turns more than FAST times is not, and those between are interpolated.
TRAINED, SLOW, FAST = 8192, 1.0, 4.0
POSITIONS: dict[str, Kind] = {
    "learned": Kind(operations=learned, why="a trained vector for each position is added",
                    implementation="lpkit.nn.layers:LearnedPositions"),
    "rope": Kind(operations=rope, implementation="lpkit.nn.layers:RotaryPositions", turns=True,
                 why="pairs of a query's and a key's numbers are turned by the position",
                 source="Su et al. 2021, https://arxiv.org/abs/2104.09864"),
}
