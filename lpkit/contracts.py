"""Every seam of lpkit on one page. To add a technique, implement one of these and add one row to
its family in `lpkit.techniques`. Nothing here imports an implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a widget that shows a StepRecord does not need torch
    import torch
    from torch import Tensor, nn

# q (B, H, T, E), k and v (B, G, T, E), ids of documents (B, T) int64 or None, what the kind has
# besides or None (a score (H,) of each head's sink; FAVOR+'s features; gates of the delta rule) ->
# (B, H, T, E). A backend of softmax kinds has the `techniques.attention.Rule` too, by name
Attend = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None", "Tensor | None"], "Tensor"]
# q (B, H, Tq, E), k and v (B, G, Tk, E), ids of the documents of queries (B, Tq) and of keys (B, Tk)
# or None, and by name the rule, which says where both begin -> what Attend gives, and the logarithm
# of each query's sum of exponentials, (B, H, Tq); both have gradients. A query that sees no key has
# zeros, and -inf. Parts are combined with the weights softmax(log-sums)
Partial = Callable[..., "tuple[Tensor, Tensor]"]
Loss = Callable[["nn.Module", "Batch"], "Tensor"]   # mean nats per token, by the batch's weights
Schedule = Callable[[int], float]                   # step, from 0 -> multiplier of the peak rate


IGNORED = -100      # a target that does not count, as in PyTorch and transformers


class Stage(IntEnum):
    """The moment when a model transform must run. Stages are sorted, so that a Config cannot get
    the order wrong."""

    TENSOR = 0      # keep a part of each layer, before anything moves to its device
    PIPELINE = 1    # keep this rank's layers
    STORAGE = 2     # the dtype of the parameters, before anything is made of them
    PRECISION = 3   # swap Linears, before anything wraps them
    KERNELS = 4     # which version of a kernel a layer calls: a forward shows the tensors at hand
    RECOMPUTE = 5   # activation checkpointing
    COMPILE = 6
    DATA = 7        # FSDP or DDP wraps what is left


class Transform(ABC):
    stage: Stage

    @abstractmethod
    def __call__(self, model: nn.Module) -> nn.Module: ...


@dataclass(frozen=True)
class ObjectiveContext:
    """The parts that an objective is made from. `next_token` is the loss that evaluation
    reports."""

    device: torch.device
    autocast: AbstractContextManager
    ranks: Any
    next_token: Loss
    tokenizer: Mapping[str, Any]    # of the run; empty where its data was handed over


class StatePlacement:
    """A place where an optimizer's state is stored between updates. This one is where it was
    allocated."""

    name = "device"
    in_memory = True    # the device's or the host's, and not a file

    def __init__(self, why: str = ""):
        self.why = why      # it is here and not where it was asked for; empty: as the row says

    @property
    def used(self) -> str:
        return self.name

    def store(self, t: Tensor) -> Tensor:
        """`t`, new or from a checkpoint, as it is stored there."""
        return t

    def prefetch(self, stored: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Start to copy them to `device`; call the result to have them there."""
        return lambda: stored

    def write_back(self, stored: list[Tensor], used: list[Tensor]) -> None:
        """Copy what `prefetch` gave, updated, to where it is stored."""


@dataclass(frozen=True)
class Batch:
    """The tensors that one update reads, (B, T) each. A technique that needs more than tokens adds
    it here."""

    tokens: Tensor                      # int64
    targets: Tensor     # int64, `tokens` shifted by one; IGNORED ones have no loss and no weight
    document_ids: Tensor | None = None  # which document a token is from
    weights: Tensor | None = None       # of each target in the loss; None: all alike
    places: Tensor | None = None        # int64, in the sequence, alike in all; None: in order
    # (B, ...) each, what a technique reads besides: scores, a teacher's words
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def present(self) -> dict[str, Tensor]:
        """Every tensor by its name, flat."""
        own = {name: t for name, t in vars(self).items() if t is not None and name != "extra"}
        return own | {f"extra/{name}": t for name, t in self.extra.items()}

    @classmethod
    def of(cls, present: Mapping[str, Tensor]) -> Batch:
        """The inverse of `present`."""
        extra = {name.removeprefix("extra/"): t for name, t in present.items()
                 if name.startswith("extra/")}
        own = {name: t for name, t in present.items() if not name.startswith("extra/")}
        return cls(**own, extra=extra)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.present.values())

    @property
    def beside(self) -> dict[str, Tensor]:
        """The arguments that a model reads besides tokens."""
        found = {} if self.document_ids is None else {"documents": self.document_ids}
        return found if self.places is None else found | {"places": self.places[0]}

    def to(self, device: torch.device) -> Batch:
        """Returns it on `device`, with IGNORED targets as targets of weight 0 where it has some. Those
        that are on a GPU already stay as they are: looking would wait for the GPU."""
        if self.tokens.is_cpu and int((out := self.targets == IGNORED).sum()):
            weights = (~out).float() if self.weights is None else self.weights.masked_fill(out, 0)
            targets = self.targets.masked_fill(out, 0)
            return replace(self, targets=targets, weights=weights).to(device)
        if self.tokens.device == device:        # all of a batch lies in one place
            return self
        there = {name: t.to(device, non_blocking=True) for name, t in self.present.items()}
        return Batch.of(there)

    def chunk(self, parts: int) -> list[Batch]:
        """Micro-batches: `parts` of B / `parts` sequences each."""
        if parts == 1:
            return [self]
        pieces = [t.chunk(parts) for t in self.tensors]
        return [Batch.of(dict(zip(self.present, one))) for one in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class Parameter:
    """The facts that an optimizer's rule is told of the parameter that it updates, where its row
    asks for it.

    ZeRO 1 to 3 give a rule this rank's rows of a parameter, of its gradient and of the slots of the
    parameter's shape; then these methods send messages, and all ranks call them alike. Here all
    rows are this rank's.
    """

    name: str
    shape: tuple[int, ...]      # of the whole parameter
    fused: tuple[int, ...] = field(default=(), kw_only=True)   # as `techniques.operation.fused`
    # True if weight decay applies; None: to matrices and embeddings, and to no vector
    decays: bool | None = field(default=None, kw_only=True)

    def sum(self, t: Tensor) -> Tensor:
        """The sum of what each rank has."""
        return t

    def norm(self, t: Tensor) -> Tensor:
        """The Euclidean norm of all rows, from this rank's."""
        return self.sum(t.square().sum()).sqrt()

    def gather(self, t: Tensor) -> Tensor:
        """Returns all rows, from this rank's."""
        return t

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows, from all."""
        return whole


class DataPolicy(ABC):
    """A policy says which tokens are seen, in what order. A batch depends on nothing but the
    policy's settings and `step`: a resumed run needs no loader state."""

    @abstractmethod
    def batch(self, step: int) -> Batch: ...


class Tokenizer(Protocol):
    """Text to token ids and back. `name` and `vocab` go into the token file's header."""

    name: str
    vocab: int

    def encode(self, text: str, special: bool = False) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


class RunAccount(Protocol):
    """The account that formulas give of a run that goes on (`lpkit.training.formulas`)."""

    def mfu(self, tokens_per_second: float) -> float:
        """The share of the peak FLOP/s that the model's own FLOPs are."""
        ...

    def report(self, error: BaseException, last_checkpoint: str | None) -> dict[str, Any]:
        """Returns what the summary says of a run whose memory ended by `error`, and a
        "sentence"."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of metrics.jsonl. Steps count from 1; `tokens` is the total so far."""

    step: int
    loss: float             # nats per token, mean over the batch, before the update
    grad_norm: float        # before clipping; inf (null in JSON): overflowed, so nothing was updated
    lr: float
    tokens: int
    step_seconds: float
    peak_bytes: int         # the most held since the run began: of `hardware.peak_bytes`
    val_loss: float | None = None   # only after an evaluation
    extra: dict[str, float] = field(default_factory=dict)   # what techniques report, by their names

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, {})}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A choice has what was asked, what was used, and why: nothing falls back silently."""

    asked: str
    used: str
    why: str


Observer = Callable[[StepRecord], None]   # observers read and never steer


class Governor(Protocol):
    """Changes a run between updates: prunes weights, drops layers, ramps a setting.

    What it does depends on nothing but the step (from 0) and its state, so a resumed run repeats
    it. A checkpoint holds the state under `governor/NAME/`. It has `begin`, `end`, or both; only a
    run whose governors have `end` alone can be stopped between the micro-batches of an update.
    """

    def begin(self, training: Any, step: int) -> None:
        """Called before every update of a `Training`. May change `training.model` in place."""

    def end(self, training: Any, step: int) -> None:
        """Called after the update, before the model is evaluated, saved or sampled. May change
        `training.model` in place, on each rank that has all of it alike."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...
