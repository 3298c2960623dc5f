"""`Op`: one operation of a Transformer. The parameters, FLOPs and bytes of a model are sums over
its operations. This module does not import torch.

An `Op` describes one operation on a `MicroBatch`, on a device that holds the whole model: its
parameters, its FLOPs, the bytes that autograd saves, the bytes that it reads and writes, the bytes
that its backward holds, and the weights that tensor parallelism cuts. This module also has Linears
and positions. `lpkit.predict.attention` has attention, and `blocks` has all other operations and
the list of a whole model.

The method for saved tensors is that of Korthikanti et al. 2022, section 4
(https://arxiv.org/abs/2205.05198). The bytes are those that PyTorch's kernels save for `lpkit.nn`;
tests/predict/test_predict.py checks that they are equal to a measured step, to the byte.
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
    """A matmul over pairs of tokens, as q k^T: `group` products of (M, K) and (K, N), where `group`
    is the number of heads times the number of sequences."""

    name: str
    M: int
    N: int
    K: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Hold:
    """One moment of an operation's backward. First `nbytes` are allocated. At the end of the moment
    they are freed, and so is the share `frees` of the operation's saved bytes. The bytes of
    gradients that wait for the next operation change by `grows`. `blocks` has an example."""

    nbytes: float = 0.0
    frees: float = 0.0
    grows: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation. `name` is the name of its module in a block of lpkit.nn, if it has one."""

    name: str
    part: str                               # group of its parameters: attention, mlp, norms, ...
    params: int = 0
    # shape of each parameter, if it is not a Linear; (): all parameters are one vector
    shape: tuple[int, ...] = ()
    matmul: tuple[int, int] | None = None   # (input features, output features) of a Linear
    # how tensor parallelism cuts a Linear: column layer, row layer (`lpkit.parallel.tensor`)
    cut: Literal["", "column", "row"] = ""
    # the input of the Linear has the dtype of the residual stream
    reads_residual: bool = False
    writes_residual: bool = False           # the Linear's result is added to the residual stream
    pairs: tuple[Pairs, ...] = ()
    # bytes saved for backward; a tensor that several operations save counts for the first of them
    saved_bytes: float = 0
    saved_itemsize: int = FP32              # bytes of one number in saved_bytes
    saves_result: bool = False              # the result is saved, so the next Linear saves no input
    result_bytes: int = 0       # bytes of the result, if selective recomputation keeps the result
    moved_bytes: int = 0                    # bytes read and written in forward, without matmuls
    # FLOPs, in a forward pass, of matmuls of parameters with each other
    weight_flops: int = 0
    pairs_share: float = 1.0                # share of `pairs` that is computed under the mask
    # FLOPs of matmuls over pairs in backward, divided by those in forward
    backward_pairs: float = 2.0
    # how often scores are read or written in memory: (in forward, in backward)
    score_passes: tuple[int, int] = (0, 0)
    # the moments of backward, in order; `lpkit.predict.walk` has those of Linears
    backward: tuple[Hold, ...] = ()
    in_stream: bool = False                 # it computes on the whole width of the residual stream
    trained: bool = True                    # its parameters have gradients and optimizer state
    tokens_share: float = 1.0               # share of the tokens that it computes, on average
    density: float = 1.0                    # share of the numbers of its matrix that are not zero
    # share of the blocks that have their own parameters, not those of another block
    own: float = 1.0
    # the operation if its parameters are frozen; None: the same operation without saved input
    if_frozen: "Op | None" = None
    # the side that this Linear has in common with another Linear, as an adapter: they read the same
    # input, or add to the same output, so both have the gradient of that side
    shares: Literal["", "input", "output"] = ""
    # bytes of the codes that are stored instead of its matrix; 0: the matrix itself is stored
    stored_bytes: float = 0.0
    made_bytes: float = 0.0                 # peak bytes while backward decodes the codes

    @functools.cached_property
    def weights(self) -> int:
        """The number of parameters in a matrix product."""
        return self.matmul[0] * self.matmul[1] if self.matmul else 0

    @property
    def frozen(self) -> "Op":
        """This operation with frozen parameters. A frozen Linear saves no input."""
        op = self.if_frozen or self
        return replace(op, trained=False, saved_bytes=0 if op.matmul else op.saved_bytes)

    def seeing(self, *shares: float) -> "Op":
        """Return this operation for blocks that compute only these shares of the tokens, one share
        for each block. Its bytes and FLOPs are the mean over the blocks: predictions multiply it by
        the number of blocks. Matmuls over pairs of tokens scale with the mean squared share."""
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
        """The shapes of its parameters, as its module has them: a Linear's weight is (out, in)."""
        if not self.params:
            return ()
        if self.matmul:
            bias = self.params - self.weights
            return (self.matmul[::-1], (bias,)) if bias else (self.matmul[::-1],)
        shape = self.shape or (self.params,)
        return (shape,) * (self.params // math.prod(shape))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The sizes and settings on which the bytes and FLOPs of operations depend.

    batch:          number of sequences, each with model.context tokens
    compute_bytes:  bytes of a number in matmuls
    residual_bytes: bytes of a number in the residual stream. The two are 4 and 4 in float32, 2 and
                    4 under 16-bit autocast, 2 and 2 for a model with 16-bit parameters
    kind:           PyTorch's kernels differ: on a GPU, RMSNorm is fused, and autocast computes a
                    plain softmax in float32
    """

    model: Any                              # a ModelConfig
    batch: int = 1
    compute_bytes: int = 4
    residual_bytes: int = 4
    kind: Literal["cpu", "gpu"] = "cpu"
    attention: str = "sdpa"
    # bytes of a number in the saved input of a Linear; None: compute_bytes
    operand_bytes: float | None = None
    # attention runs again in backward, so only q, k and v are saved
    attends_again: bool = False
    # bytes of a number in the saved input of the head; None: compute_bytes
    head_bytes: float | None = None
    made_anew: bool = False                 # q, k and v are copies of the qkv product, not views
    norms_written_out: bool = False         # a GPU's RMSNorm is several operations in float32
    saves_inputs: bool = False      # SwiGLU and rotary are one kernel each, which saves its input
    # bytes moved per weight when codes are decoded; 0: those of lpkit's own decoder
    code_bytes: float = 0.0
    # bytes that a low-rank adapter moves in forward: (per number of its Linear's input, result)
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
        """True under 16-bit autocast: matmuls have fewer bits than the residual stream."""
        return self.compute_bytes < self.residual_bytes

    @property
    def heads_are_views(self) -> bool:
        """True if (B, H, T, E) can be viewed as (B H, T, E) without a copy. Its memory is in the
        order (B, T, H, E), so B or H must be 1."""
        return self.batch == 1 or self.model.H == 1

    @functools.cached_property
    def rule(self) -> Rule | None:
        return self.model.attention.rule(self.model.T)

    @property
    def masked_pairs(self) -> int:
        """The number of elements of a mask over T queries and T keys. With documents, each sequence
        has its own mask; otherwise all share one."""
        return (self.batch if self.rule.documents else 1) * self.model.T**2

    @property
    def norms_save_qkv(self) -> bool:
        """True if the norms of q and k save their input, which is a view of the qkv product, so
        that the whole product stays in memory. Otherwise they save a float32 cast of their input.
        """
        wide = self.compute_bytes == FP32 or (self.kind == "gpu" and not self.mixed)
        return self.model.qk_norm and wide

    @property
    def turns(self) -> bool:
        """True if q and k change between the qkv product and attention: by rotary positions or by
        norms."""
        return POSITIONS[self.model.position].turns or self.model.qk_norm


@dataclass(frozen=True, kw_only=True)
class Kind(Technique):
    """A row whose technique changes the operations of a model. `operations`: the function that
    returns its operations, or the function's "package.module:name"."""

    operations: Callable[..., Any] | str
    turns: bool = False     # True for positions that rotate q and k in each block

    @property
    def formula(self) -> Callable[..., Any]:
        """The function `operations`, imported if it is given by name."""
        named = isinstance(self.operations, str)
        return resolve_name(self.operations) if named else self.operations


def linear(name: str, s: MicroBatch, K: int, out: int, *, cut: str, bias: bool,
           input_is_saved: bool = False) -> Op:
    """Return a Linear with K input features and `out` output features as an operation. With
    cut="column" it reads the residual stream, with cut="row" it writes to it. `input_is_saved`: the
    operation before it saves the Linear's input, so that it is not counted again."""
    as_it_is = 0 if input_is_saved else s.compute_bytes
    itemsize = as_it_is if s.operand_bytes is None else s.operand_bytes
    return Op(name=name, part=name.partition(".")[0], params=out * (K + bias), matmul=(K, out),
              cut=cut, reads_residual=cut == "column", writes_residual=cut == "row",
              saved_bytes=s.tokens * K * itemsize, saved_itemsize=s.compute_bytes,
              result_bytes=s.tokens * out * max(s.compute_bytes, s.operand_bytes or 0))


def fused(m: Any, name: str) -> tuple[int, ...]:
    """Return the numbers of rows of the matrices that parameter `name` combines: q, k and v of one
    group of heads, or gate and up. (): the parameter is a single matrix."""
    queries = m.H // m.G * m.E
    of = {"attention.qkv.weight": (queries, m.E, m.E), "attention.qk.weight": (m.E, m.E),
          "mlp.gate_up.weight": (m.F, m.F)}
    return next((rows for end, rows in of.items() if name.endswith(end)), ())


# Positions: these operations are outside the blocks.

def learned(s: MicroBatch) -> Op:
    """Return the addition of a trained vector for each position."""
    m = s.model
    return Op(name="positions", part="positions", params=m.T * m.D, shape=(m.T, m.D))


def rope(s: MicroBatch) -> Op:
    """Return the tables of cos and sin, (T, E) each, which are computed once for all blocks. The
    rotation itself is counted in attention."""
    return Op(name="attention", part="positions",
              saved_bytes=2 * s.model.T * s.model.E * s.residual_bytes)


# Rotary positions of Llama 3.1: rope_factor divides the frequency of a pair of numbers that turns
# less than SLOW times in TRAINED tokens. It does not change pairs that turn more than FAST times.
# In between, the frequency is interpolated.
TRAINED, SLOW, FAST = 8192, 1.0, 4.0
POSITIONS: dict[str, Kind] = {
    "learned": Kind(operations=learned, why="a trained vector for each position is added",
                    implementation="lpkit.nn.layers:LearnedPositions"),
    "rope": Kind(operations=rope, implementation="lpkit.nn.layers:RotaryPositions", turns=True,
                 why="pairs of a query's and a key's numbers are turned by the position",
                 source="Su et al. 2021, https://arxiv.org/abs/2104.09864"),
}
