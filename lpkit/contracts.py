"""The interfaces of lpkit. To add a technique, implement the interface of its family, and add a row
to the family's table in `lpkit.techniques`. This module imports no implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # not at run time: a widget that shows a StepRecord does not need torch
    import torch
    from torch import Tensor, nn

# Attend(q, k, v, ids, more) -> (B, H, T, E), the backend of a kind of attention
#     q     (B, H, T, E)
#     k, v  (B, G, T, E)
#     ids   (B, T) int64, the document of each token, or None
#     more  a further tensor of this kind of attention, or None: a score (H,) for each head's sink,
#           the features of FAVOR+, or the gates of the delta rule
# A backend of softmax kinds also gets the `techniques.attention.Rule` as a keyword argument.
Attend = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None", "Tensor | None"], "Tensor"]
# Partial(q, k, v, ids, rule=...) -> (out, lse), attention over a part of the keys
#     q     (B, H, Tq, E)
#     k, v  (B, G, Tk, E)
#     ids   the documents of queries (B, Tq) and of keys (B, Tk), or None
#     rule  the Rule, with the positions of the first query and the first key
#     out   (B, H, Tq, E), 0 for a query that sees no key
#     lse   (B, H, Tq), logarithm of each query's sum of exponentials, -inf if it sees no key
# Both results have gradients. Parts are combined with the weights softmax(lse) over parts.
Partial = Callable[..., "tuple[Tensor, Tensor]"]
Loss = Callable[["nn.Module", "Batch"], "Tensor"]   # mean nats per token, weighted by batch.weights
Schedule = Callable[[int], float]       # step, from 0 -> multiplier of the peak learning rate


IGNORED = -100      # a target without loss, as in PyTorch and transformers


class Stage(IntEnum):
    """The stage at which a model transform runs. Transforms are sorted by stage, so the order in a
    Config does not matter."""

    TENSOR = 0      # keep this rank's part of each layer, before the model moves to its device
    PIPELINE = 1    # keep this rank's layers
    STORAGE = 2     # set the dtype of the parameters, before others use them
    PRECISION = 3   # replace Linears, before other transforms wrap them
    KERNELS = 4     # choose the version of each kernel, by a forward on the layers as they are now
    RECOMPUTE = 5   # activation checkpointing
    COMPILE = 6
    DATA = 7        # FSDP or DDP wraps the result


class Transform(ABC):
    """A change of the model before the first update, such as recomputation or sharding. Takes the
    model and returns the changed model, which may be the same object."""

    stage: Stage

    @abstractmethod
    def __call__(self, model: nn.Module) -> nn.Module: ...


@dataclass(frozen=True)
class ObjectiveContext:
    """The arguments of the function that makes an objective. `next_token` is the loss that
    evaluation reports."""

    device: torch.device
    autocast: AbstractContextManager
    ranks: Any
    next_token: Loss
    tokenizer: Mapping[str, Any]    # the run's tokenizer; empty if the data was passed in


class StatePlacement:
    """A place where an optimizer's state is stored between updates. In this class, the state stays
    where it was allocated."""

    name = "device"
    in_memory = True    # in device or host memory, not in a file

    def __init__(self, why: str = ""):
        # the reason why this place is used; empty if the user requested this place
        self.why = why

    @property
    def used(self) -> str:
        """The name of the place, for the record of choices."""
        return self.name

    def store(self, t: Tensor) -> Tensor:
        """Return the stored form of `t`, a state tensor that is new or from a checkpoint."""
        return t

    def prefetch(self, stored: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Start to copy the stored tensors to `device`. Return a function that waits for the copies
        and returns them."""
        return lambda: stored

    def write_back(self, stored: list[Tensor], used: list[Tensor]) -> None:
        """Copy the updated tensors that `prefetch` returned back to the stored tensors."""


@dataclass(frozen=True)
class Batch:
    """The tensors that one update reads, (B, T) each. A technique that needs more inputs adds a
    field here."""

    tokens: Tensor                      # int64
    targets: Tensor     # int64, `tokens` shifted by one; a target IGNORED has no loss, no weight
    document_ids: Tensor | None = None  # int64, the document of each token
    weights: Tensor | None = None       # weight of each target in the loss; None: equal weights
    places: Tensor | None = None        # int64, positions, equal in all sequences; None: 0, 1, ...
    # (B, ...) each, further inputs of a technique: scores, a teacher's predictions
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def present(self) -> dict[str, Tensor]:
        """Every tensor by its name. Tensors of `extra` are named extra/NAME."""
        tensors = {name: t for name, t in vars(self).items() if t is not None and name != "extra"}
        return tensors | {f"extra/{name}": t for name, t in self.extra.items()}

    @classmethod
    def of(cls, present: Mapping[str, Tensor]) -> Batch:
        """Make a batch from tensors by name: the inverse of `present`."""
        extra = {name.removeprefix("extra/"): t for name, t in present.items()
                 if name.startswith("extra/")}
        fields = {name: t for name, t in present.items() if not name.startswith("extra/")}
        return cls(**fields, extra=extra)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.present.values())

    @property
    def beside(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward, in addition to the tokens."""
        arguments = {} if self.document_ids is None else {"documents": self.document_ids}
        return arguments if self.places is None else arguments | {"places": self.places[0]}

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on `device`. If the batch is in host memory, its IGNORED targets first
        become targets 0 with weight 0. A batch that is already on a GPU is not searched for IGNORED
        targets, because the search would wait for the GPU."""
        if self.tokens.is_cpu and int((out := self.targets == IGNORED).sum()):
            weights = (~out).float() if self.weights is None else self.weights.masked_fill(out, 0)
            targets = self.targets.masked_fill(out, 0)
            return replace(self, targets=targets, weights=weights).to(device)
        if self.tokens.device == device:        # all tensors of a batch are on one device
            return self
        moved = {name: t.to(device, non_blocking=True) for name, t in self.present.items()}
        return Batch.of(moved)

    def chunk(self, parts: int) -> list[Batch]:
        """Returns `parts` micro-batches of B / `parts` sequences each."""
        if parts == 1:
            return [self]
        pieces = [t.chunk(parts) for t in self.tensors]
        return [Batch.of(dict(zip(self.present, tensors))) for tensors in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class Parameter:
    """Facts about a parameter, for the rule of an optimizer whose row requests them.

    With ZeRO 1 to 3, a rule sees only this rank's rows of a parameter, of its gradient and of its
    slots. A subclass then sends messages in these methods, and all ranks must call them in the same
    order. In this class, the rank owns all rows.
    """

    name: str
    shape: tuple[int, ...]      # shape of the whole parameter
    fused: tuple[int, ...] = field(default=(), kw_only=True)   # see `techniques.operation.fused`
    # True if weight decay applies; None: it applies to matrices and embeddings, not to vectors
    decays: bool | None = field(default=None, kw_only=True)

    def sum(self, t: Tensor) -> Tensor:
        """Returns the sum of `t` over the ranks."""
        return t

    def norm(self, t: Tensor) -> Tensor:
        """Returns the Euclidean norm of all rows. `t`: this rank's rows."""
        return self.sum(t.square().sum()).sqrt()

    def gather(self, t: Tensor) -> Tensor:
        """Returns all rows. `t`: this rank's rows."""
        return t

    def part(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of all rows."""
        return whole


class DataPolicy(ABC):
    """A policy decides which tokens each update reads. A batch depends only on the policy's
    settings and on `step`, so a resumed run needs no state of a data loader."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return the batch of update `step`, from 0."""


class Tokenizer(Protocol):
    """Text to token ids and back. `name` and `vocab` are written into the header of token files."""

    name: str
    vocab: int

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text. special: the text <|endoftext|> is the special token."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids."""

    def to_dict(self) -> dict[str, Any]:
        """Return the tokenizer, JSON-ready, for the header of token files."""


class RunAccount(Protocol):
    """Predictions about the current run by formulas (`lpkit.training.formulas`)."""

    def mfu(self, tokens_per_second: float) -> float:
        """Returns the model FLOPs utilisation: the model's FLOP/s as a share of the peak."""
        ...

    def report(self, error: BaseException, last_checkpoint: str | None) -> dict[str, Any]:
        """Returns the fields of the summary of a run that ran out of memory with `error`. The field
        "sentence" explains it."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of metrics.jsonl. Steps count from 1. `tokens` is the total since the first step."""

    step: int
    loss: float             # mean nats per token of the batch, before the update
    # before clipping; inf (null in JSON): it overflowed, and the update was skipped
    grad_norm: float
    lr: float
    tokens: int
    step_seconds: float
    peak_bytes: int         # `hardware.peak_bytes` since the run began
    val_loss: float | None = None   # only after an evaluation
    extra: dict[str, float] = field(default_factory=dict)   # reports of techniques, by name

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, {})}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A setting that the kit resolved: the requested value, the used value, and the reason. The run
    records it, so no fallback is silent."""

    asked: str
    used: str
    why: str


Observer = Callable[[StepRecord], None]     # called after each update; must not change the run


class Governor(Protocol):
    """Changes a run between updates: prunes weights, drops layers, ramps a setting.

    Its changes depend only on the step (from 0) and on its state, so that a resumed run makes the
    same changes. A checkpoint stores the state under `governor/NAME/`. A governor has `begin`,
    `end`, or both. A run can be stopped between the micro-batches of an update only if its
    governors have no `begin`.
    """

    def begin(self, training: Any, step: int) -> None:
        """Called before every update of a `Training`. May change `training.model` in place."""

    def end(self, training: Any, step: int) -> None:
        """Called after the update, before the model is evaluated, saved or sampled. May change
        `training.model` in place. Ranks with equal copies of the model must change it equally."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...
