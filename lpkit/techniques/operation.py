"""An operation of a transformer: what everything about a model's size is a sum over. No torch.

Parameters, FLOPs, what autograd saves, what moves through memory, what each backward holds, which
weights tensor parallelism cuts: an `Op` says all of it, of one `MicroBatch` on one device that
holds the whole model. Here are also the operations that attention needs, Linears and positions;
`lpkit.predict.attention` has attention's own, `blocks` all others and the list of a whole model.

Methods: Korthikanti et al. 2022, section 4 (https://arxiv.org/abs/2205.05198) for what is saved;
the terms are those of PyTorch's kernels for `lpkit.nn`, and tests/predict/test_predict.py holds them equal
to a measured step, to the byte.
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
    """A product over pairs of tokens, (M, K) with (K, N), `group` at once: heads x sequences."""

    name: str
    M: int
    N: int
    K: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A moment of an operation's backward: `nbytes` are there for a while; then a share of what it
    saved is freed, and the gradients that wait grow by `grows`."""

    nbytes: float = 0.0
    frees: float = 0.0
    grows: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation. `name` is the module's in lpkit.nn, where it has one."""

    name: str
    part: str                               # of the parameters: attention, mlp, norms, ...
    params: int = 0
    shape: tuple[int, ...] = ()             # of each parameter that is no Linear's; (): one vector
    matmul: tuple[int, int] | None = None   # of a Linear: numbers in, numbers out, for each token
    cut: Literal["", "column", "row"] = ""  # the side of the weight that tensor parallelism cuts
    reads_residual: bool = False            # a Linear's input has the residual stream's dtype
    writes_residual: bool = False           # a Linear's result is added to the residual stream
    pairs: tuple[Pairs, ...] = ()
    saved_bytes: float = 0                  # each storage once, under what saves it first
    saved_itemsize: int = FP32              # of a number of these
    saves_result: bool = False              # so that the Linear after it need not save its input
    result_bytes: int = 0                   # selective recomputation keeps these
    moved_bytes: int = 0                    # in forward, unfused; of products nothing
    weight_flops: int = 0                   # of products of parameters alone, in a forward pass
    pairs_share: float = 1.0                # of `pairs`, what is computed: a mask may leave less
    backward_pairs: float = 2.0             # products over pairs in backward, over those of forward
    score_passes: tuple[int, int] = (0, 0)  # scores written or read again, forward and backward
    backward: tuple[Hold, ...] = ()         # in order; a Linear's own is in lpkit.predict.walk
    in_stream: bool = False                 # works on the residual stream, whole in its width
    trained: bool = True                    # its parameters have gradients and optimizer states
    tokens_share: float = 1.0               # of the tokens, what it sees, on average
    density: float = 1.0                    # of its matrix, what is not zero
    own: float = 1.0                        # of the blocks, those that share nobody's parameters
    if_frozen: "Op | None" = None           # what else it is without gradients of its parameters
    shares: Literal["", "input", "output"] = ""     # the side whose gradient another Linear has, too
    stored_bytes: float = 0.0               # of a matrix that codes stand for; 0: it is there
    made_bytes: float = 0.0                 # the most at once in backward while it is made of them

    @functools.cached_property
    def weights(self) -> int:
        """Parameters in a matrix product."""
        return self.matmul[0] * self.matmul[1] if self.matmul else 0

    @property
    def frozen(self) -> "Op":
        """The same without gradients of its parameters; a Linear then saves no input."""
        op = self.if_frozen or self
        return replace(op, trained=False, saved_bytes=0 if op.matmul else op.saved_bytes)

    def seeing(self, *shares: float) -> "Op":
        """The same where blocks see these shares of the tokens. It has their average, since a model
        is a sum over its blocks; pairs of tokens go with the squares."""
        share, squares = (sum(part**power for part in shares) / len(shares) for power in (1, 2))
        backward = tuple(Hold(nbytes=share * hold.nbytes, frees=hold.frees,
                              grows=share * hold.grows) for hold in self.backward)
        return replace(self, tokens_share=share * self.tokens_share, backward=backward,
                       saved_bytes=share * self.saved_bytes, moved_bytes=share * self.moved_bytes,
                       result_bytes=share * self.result_bytes,
                       pairs=tuple(replace(one, M=squares * one.M) for one in self.pairs))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its parameters, as its module has them."""
        if not self.params:
            return ()
        if self.matmul:
            bias = self.params - self.weights
            return (self.matmul[::-1], (bias,)) if bias else (self.matmul[::-1],)
        shape = self.shape or (self.params,)
        return (shape,) * (self.params // math.prod(shape))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What an operation's bytes depend on. `batch` sequences of model.context tokens.

    `compute_bytes` is of a number in the products, `residual_bytes` in the residual stream: 4 and 4
    in float32, 2 and 4 under 16-bit autocast, 2 and 2 for a model that is 16-bit throughout. `kind`
    matters where PyTorch's kernels differ on a GPU: its RMSNorm is fused, and autocast takes a
    plain softmax in float32.
    """

    model: Any                              # a ModelConfig
    batch: int = 1
    compute_bytes: int = 4
    residual_bytes: int = 4
    kind: Literal["cpu", "gpu"] = "cpu"
    attention: str = "sdpa"
    operand_bytes: float | None = None      # of a number of a Linear's saved input; None: as it is
    attends_again: bool = False             # in backward; of attention q, k and v alone are kept
    head_bytes: float | None = None         # of the head's
    made_anew: bool = False                 # q, k and v, copied from the product that gave them
    norms_written_out: bool = False         # a GPU's RMSNorm is several operations in float32
    saves_inputs: bool = False      # SwiGLU and the rotation are one kernel each and save its input
    code_bytes: float = 0.0                 # that move when a weight is made of its code; 0: lpkit's
    adapter_bytes: tuple[float, float] = (0.0, 0.0)     # that a low-rank adapter moves, forward,
    #                                         for a number of its Linear's input and of its result

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
        """(B, H, T, E) lies as (B, T, H, E): B and H merge without a copy only if one is 1."""
        return self.batch == 1 or self.model.H == 1

    @functools.cached_property
    def rule(self) -> Rule | None:
        return self.model.attention.rule(self.model.T)

    @property
    def masked_pairs(self) -> int:
        """The pairs in a mask of the whole rule: documents differ by sequence."""
        return (self.batch if self.rule.documents else 1) * self.model.T**2

    @property
    def norms_save_qkv(self) -> bool:
        """True if norms of q and k keep the product of q, k and v alive, a view of which is their
        input; else they have cast it to float32."""
        wide = self.compute_bytes == FP32 or (self.kind == "gpu" and not self.mixed)
        return self.model.qk_norm and wide

    @property
    def turns(self) -> bool:
        """True if q and k are computed again between their product and attention."""
        return POSITIONS[self.model.position].turns or self.model.qk_norm


@dataclass(frozen=True, kw_only=True)
class Kind(Technique):
    """A row with its operations, or their "package.module:name" where a run needs none."""

    operations: Callable[..., Any] | str
    turns: bool = False     # of positions: q and k are turned in each block

    @property
    def formula(self) -> Callable[..., Any]:
        """`operations`, also where they are named."""
        named = isinstance(self.operations, str)
        return resolve_name(self.operations) if named else self.operations


def linear(name: str, s: MicroBatch, K: int, out: int, *, cut: str, bias: bool,
           input_is_saved: bool = False) -> Op:
    """A column-parallel one reads the residual stream, a row-parallel one writes it."""
    as_it_is = 0 if input_is_saved else s.compute_bytes
    itemsize = as_it_is if s.operand_bytes is None else s.operand_bytes
    return Op(name=name, part=name.partition(".")[0], params=out * (K + bias), matmul=(K, out),
              cut=cut, reads_residual=cut == "column", writes_residual=cut == "row",
              saved_bytes=s.tokens * K * itemsize, saved_itemsize=s.compute_bytes,
              result_bytes=s.tokens * out * max(s.compute_bytes, s.operand_bytes or 0))


def fused(m: Any, name: str) -> tuple[int, ...]:
    """Rows of the matrices that the parameter `name` is made of, which take turns; (): one."""
    queries = m.H // m.G * m.E
    of = {"attention.qkv.weight": (queries, m.E, m.E), "attention.qk.weight": (m.E, m.E),
          "mlp.gate_up.weight": (m.F, m.F)}
    return next((rows for end, rows in of.items() if name.endswith(end)), ())


# Positions: operations outside the blocks.

def learned(s: MicroBatch) -> Op:
    m = s.model
    return Op(name="positions", part="positions", params=m.T * m.D, shape=(m.T, m.D))


def rope(s: MicroBatch) -> Op:
    """cos and sin, made once for all blocks; what turning saves and moves is attention's."""
    return Op(name="attention", part="positions",
              saved_bytes=2 * s.model.T * s.model.E * s.residual_bytes)


# Llama 3.1: a pair that turns less than once in so many tokens is slowed down by rope_factor, one
# that turns more than four times is not, and between them it is mixed
TRAINED, SLOW, FAST = 8192, 1.0, 4.0
POSITIONS: dict[str, Kind] = {
    "learned": Kind(operations=learned, why="a trained vector for each position is added",
                    implementation="lpkit.nn.layers:LearnedPositions"),
    "rope": Kind(operations=rope, implementation="lpkit.nn.layers:RotaryPositions", turns=True,
                 why="pairs of a query's and a key's numbers are turned by the position",
                 source="Su et al. 2021, https://arxiv.org/abs/2104.09864"),
}
