"""Every seam of lpkit on one page. To add a technique, implement one of these and add
one row to its family's table in `presets`. Nothing here imports an implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lpkit.config import ConfigError, nearest

if TYPE_CHECKING:  # a widget that shows a StepRecord does not need torch
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

Attend = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]   # q (B,H,T,E), k and v (B,G,T,E) -> (B,H,T,E), causal
Init = Callable[["nn.Module"], None]                          # fills every parameter in place
Schedule = Callable[[int], float]                             # step, from 0 -> multiplier of the learning rate
Loss = Callable[["nn.Module", "Tensor", "Tensor"], "Tensor"]  # x and y (B, T) -> mean nats per token
Step = Callable[["nn.Module", "Tensor", "Tensor"], "Tensor"]  # forward, backward: leaves gradients, returns mean loss


class Stage(IntEnum):
    """When a model transform must run. Sorted, so that a Config cannot get the order wrong."""

    STORAGE = 0     # the dtype of the parameters, before anything is made of them
    PRECISION = 1   # swap Linears, before anything wraps them
    PIPELINE = 2    # keep this rank's layers
    TENSOR = 3      # shard inside a layer
    RECOMPUTE = 4   # activation checkpointing
    COMPILE = 5
    DATA = 6        # FSDP or DDP wraps what is left


class Transform(ABC):
    stage: Stage

    @abstractmethod
    def __call__(self, model: nn.Module) -> nn.Module: ...


class Place:
    """Where an optimizer's state rests between updates. This one: where it was made."""

    in_memory = True    # the device's or the host's, and not a file

    def rest(self, t: Tensor) -> Tensor:
        """`t`, new or from a checkpoint, as it lies there."""
        return t

    def bring(self, resting: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Start to move them to `device`; call the result to have them there."""
        return lambda: resting

    def leave(self, resting: list[Tensor], used: list[Tensor]) -> None:
        """Write what `bring` gave, updated, back to where it rests."""


class OptimizerSpec(ABC):
    """Frozen hyper-parameters that build a torch optimizer. `place`: for its state; None: the device."""

    state_bytes_per_param: float

    @abstractmethod
    def build(self, model: nn.Module, place: Place | None = None) -> Optimizer: ...


class DataPolicy(ABC):
    """Which tokens are seen, in what order.

    `batch(step)` depends on nothing but the policy's settings and `step`: a resumed run needs no loader state.
    Returns x and y, each (B, T) int64 on the CPU, y being x shifted by one token.
    """

    @abstractmethod
    def batch(self, step: int) -> tuple[Tensor, Tensor]: ...

    def batches(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        step = start
        while True:
            yield self.batch(step)
            step += 1


class Tokenizer(Protocol):
    """Text to token ids and back. `name` and `vocab` go into the token file's header."""

    name: str
    vocab: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of metrics.jsonl. Steps count from 1; `tokens` is the total so far."""

    step: int
    loss: float             # nats per token, mean over the batch, before the update
    grad_norm: float        # before clipping
    lr: float
    tokens: int
    step_seconds: float
    peak_bytes: int
    val_loss: float | None = None   # only after an evaluation
    loss_scale: float | None = None     # only under loss scaling; an update that overflowed is skipped: grad_norm is 0

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was asked, what was used, and why: nothing falls back silently."""

    asked: str
    used: str
    why: str


Observer = Callable[[StepRecord], None]   # observers read and never steer
T = TypeVar("T")


def pick(table: dict[str, T], name: str, what: str = "entry") -> T:
    """Look `name` up, and say what there is when it is not there."""
    if name not in table:
        raise ConfigError(f"there is no {what} {name!r}; {nearest(name, table)}")
    return table[name]
