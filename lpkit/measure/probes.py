"""A probe tries one thing on a device: it works, or there is a reason and the nearest that does."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

LATE = ("gave no sign of life for", "got no further for")       # ranks, says their supervisor

class UnavailableError(Exception):
    """Not here. The message is the reason, for a person."""


@dataclass(frozen=True)
class Check:
    """One thing to try. `run(device) -> detail`; anything it raises is the reason why not."""

    name: str
    kind: str
    run: Callable[[torch.device], str]
    nearest: str = ""       # what to use where it does not work


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The outcome of a Check."""

    name: str
    kind: str
    works: bool | None      # None: not known, because no answer came in time
    detail: str = ""        # how it was found to work
    why: str = ""           # why it does not
    nearest: str = ""       # and what to use instead


def reason(error: Exception) -> str:
    """The first line that says something."""
    lines = filter(None, map(str.strip, str(error).splitlines()))
    return next(lines, type(error).__name__)[:200]


def probe(check: Check, device: torch.device) -> Probe:
    found = partial(Probe, name=check.name, kind=check.kind)
    try:
        with warnings.catch_warnings():
            # torch explains at length why it will not; the reason is asked below
            warnings.simplefilter("ignore")
            return found(works=True, detail=check.run(device))
    except Exception as error:
        late = isinstance(error, TimeoutError) or any(words in str(error) for words in LATE)
        return found(works=None if late else False, nearest=check.nearest,
                     why="not known: " * late + reason(error))


def compare(what: str, got: Iterable[Tensor], want: Iterable[Tensor], limit: float) -> str:
    """The largest relative error. Raises UnavailableError, which says `what`, beyond `limit`."""
    errors = []
    for a, b in zip(got, want, strict=True):
        a, b = a.detach().double().cpu(), b.detach().double().cpu()
        errors.append(float((a - b).norm() / b.norm()))
    if not all(error <= limit for error in errors):
        raise UnavailableError(f"{what}: relative error {', '.join(f'{e:.1e}' for e in errors)}")
    return f"relative error {max(errors):.0e}"
