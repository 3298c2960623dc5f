"""A kernel: a definition in PyTorch's operations, and other versions that compute the same.

A file of this folder contains the definition of a kernel, its Triton version, the PyTorch operator
that launches the Triton version, and a `Kernel` object. This object has all versions, examples on
which versions are compared, and limits on their errors. `lpkit.techniques.kernels.KERNELS` lists
all kernels.

`difference` compares a version with the definition. It is used by tests, by the bench, and by the
choice of a version on this machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lpkit.errors import ConfigError

Version = Callable[..., "Tensor | tuple[Tensor, ...]"]
LONGEST_ROW = 65536     # the most elements of a row that one Triton program holds
SLACK = 2.0             # default of `Kernel.slack`: versions may add in another order
CALL_SECONDS = 0.5      # time limit of the repeated calls of `difference`
# `apart`: largest error of a row, as a share of the norm of the row
ROW = 0.1
GRAIN = 2.0**-24        # default of `Kernel.grain`: the rounding error of float32


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """`definition` and all `versions` take the same arguments and return the same results.

    examples:  a function of a generator and a device. It yields argument tuples: random inputs and
               inputs on which a version is likely to fail
    gradients: positions of the arguments that have a gradient
    slack:     limits on a version's error, as multiples of the definition's error, both compared
               with float64: a limit on the norm of all errors, and a limit on the largest error
    grain:     an error below this share of the largest result is ignored, because a result may be
               the small difference of large terms
    exact:     whether a version must be bit-equal to the definition
    offered:   the candidates of a race, the definition first; empty: `choose.candidates`
    """

    definition: Version
    versions: Mapping[str, Version] = field(default_factory=dict)
    examples: Callable[[torch.Generator, torch.device], Iterable[tuple]]
    gradients: tuple[int, ...] = ()
    slack: tuple[float, float] = (SLACK, SLACK)
    grain: float = GRAIN
    exact: bool = False
    offered: Mapping[str, Version] = field(default_factory=dict)


def floats(*tensors: Tensor) -> None:
    """Check the arguments of an element-wise kernel. Raises ConfigError for a dtype other than
    float32, bf16 or fp16, and for a tensor that is not contiguous."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"a kernel takes float32, bfloat16 or float16, not {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ConfigError(f"a kernel takes contiguous tensors, not strides {tensor.stride()} "
                              f"of {tuple(tensor.shape)}; call .contiguous()")


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype in which definitions compute: float64 for float64, else float32."""
    return x if x.dtype == torch.float64 else x.float()


def rounded_once(version: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a definition that converts its arguments with `wide`, calls `version`, and rounds the
    result once, to the dtype of the first argument."""
    @functools.wraps(version)
    def definition(x: Tensor, *others: Any) -> Tensor:
        v = wide(x)
        others = [a.to(v.dtype) if torch.is_tensor(a) else a for a in others]
        return version(v, *others).to(x.dtype)
    return definition


def row_length(x: Tensor, *others: Tensor) -> int:
    """Return the length of the last axis of x (..., N), for a kernel whose program holds a row.
    Raises ConfigError as `floats` does, and for a row that no program can hold."""
    floats(x, *others)
    if x.shape[-1] > LONGEST_ROW:
        raise ConfigError(f"rows of {x.shape[-1]:,} elements do not fit into one program; at most "
                          f"{LONGEST_ROW:,}")
    return x.shape[-1]


def spoiled(x: Tensor, nan: tuple[int, ...], infinite: tuple[int, ...]) -> Tensor:
    """Return a copy of x with a NaN at index `nan` and an infinity at index `infinite`."""
    bad = x.clone()
    bad[nan], bad[infinite] = torch.nan, torch.inf
    return bad


def difference(kernel: Kernel, version: Version, arguments: tuple, calls: int = 1) -> str:
    """Return the first difference between `version` and the definition on these arguments, forward
    or backward, in one clause; "" if there is none. Calls the version up to `calls` times, for at
    most CALL_SECONDS, because some versions are wrong only sometimes."""
    want = gradients_of(kernel, kernel.definition, arguments)
    # Float64 is the reference for both. A gradient may be the small difference of large terms, and
    # then also the definition has a large relative error, which a version may have, too.
    true = [] if kernel.exact else gradients_of(kernel, kernel.definition, _wide(arguments))
    scale, right = max((_farthest(tensor) for tensor in true), default=0.0), None
    until = time.monotonic() + CALL_SECONDS
    for i in range(calls):
        if i and time.monotonic() > until:
            break
        got = gradients_of(kernel, version, arguments)
        # the same bits as in the first call, which was correct
        if right is not None and all(map(same_bits, got, right)):
            continue
        if len(got) != len(want):
            return f"{len(got)} results and gradients where the definition has {len(want)}"
        problems = ([_bits_differ(*pair) for pair in zip(got, want)] if kernel.exact else
                [_differs(kernel, *three, scale) for three in zip(got, want, true)])
        for i, problem in enumerate(problems, 1):
            if problem:
                return f"result {i} of {len(want)}: {problem}"
        right = got
    return ""


def apart(kernel: Kernel, got: list[Tensor], want: list[Tensor]) -> str:
    """Return the first difference between the results `got` and `want` in one clause, or "": a
    coarse comparison for a step's size, where float64 would need too much memory.

    The norm of the error of each row (..., N) must be at most ROW times the norm of the row, or
    ROW times the mean norm of all rows, whichever is larger. A correct version may sum in another
    order and may round in between. A version that omits a tile, a head or a sequence has completely
    wrong rows.
    """
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True), 1):
        problem = _bits_differ(ours, theirs) if kernel.exact else _unlike(ours, theirs)
        if not problem and not kernel.exact and ours.numel():
            off, length = (torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).flatten()
                           for rows in (torch.atleast_1d(ours - theirs), torch.atleast_1d(theirs)))
            share = off / length.clamp(min=length.nanmean().clamp(min=1e-30))
            finite = theirs.isfinite().all()
            if (finite and not (share <= ROW).all()) or (share > ROW).any():
                problem = f"a row is off by {share.nan_to_num(torch.inf).max():.3g} of its length"
        if problem:
            return f"result {i} of {len(want)}, at the run's size: {problem}"
    return ""


def gradients_of(kernel: Kernel, version: Version, arguments: tuple,
                 weights: list[Tensor] | None = None) -> list[Tensor]:
    """Return the results of version(*arguments), then the gradients of the arguments at
    `kernel.gradients`. The gradients are of sum(weights * results); weights None: `weights_of`."""
    arguments = tuple(a.detach().requires_grad_() if i in kernel.gradients and a is not None else a
                      for i, a in enumerate(arguments))
    out = version(*arguments)
    out = out if isinstance(out, (tuple, list)) else (out,)
    results = [tensor.detach() for tensor in out]
    if wanted := [arguments[i] for i in kernel.gradients if arguments[i] is not None]:
        weights = weights_of(out) if weights is None else weights
        results += torch.autograd.grad(out, wanted, weights)
    return results


def weights_of(results: Iterable[Tensor]) -> list[Tensor]:
    """Return a weight for each element of the results: multiples of 1/4 from -1 to 1, without a
    visible pattern, and the same on every call and in every dtype."""
    return [((torch.arange(t.numel(), device=t.device) * 7 % 9 - 4) / 4).view(t.shape).to(t.dtype)
            for t in results]


def _wide(arguments: tuple) -> tuple:
    return tuple(a.double() if torch.is_tensor(a) and a.is_floating_point() else a
                 for a in arguments)


def _unlike(ours: Tensor, theirs: Tensor) -> str:
    if (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
        return ""
    return (f"{ours.dtype} {tuple(ours.shape)} where the definition has {theirs.dtype} "
            f"{tuple(theirs.shape)}")


def _bits_differ(ours: Tensor, theirs: Tensor) -> str:
    if unlike := _unlike(ours, theirs):
        return unlike
    wrong = (_bits(ours) != _bits(theirs)).any(-1)
    if ours.is_floating_point():        # any two NaN are equal, whatever their payload
        wrong &= ~(ours.isnan() & theirs.isnan())
    return _first(ours, theirs, wrong)


def _differs(kernel: Kernel, ours: Tensor, theirs: Tensor, true: Tensor, scale: float) -> str:
    """Return how `ours` (of a version) is less exact than `theirs` (of the definition), or "".

    true:  the result in float64
    scale: the largest magnitude of all results and gradients in float64
    """
    if unlike := _unlike(ours, theirs):
        return unlike
    wrong = ours.isnan() != theirs.isnan()
    wrong |= (ours.isinf() | theirs.isinf()) & (ours != theirs)
    if wrong.any():
        return _first(ours, theirs, wrong)
    keep = theirs.isfinite()
    ours, theirs, true = (t[keep].double() for t in (ours, theirs, true))
    sizes = {"all together": _length, "the farthest": _farthest}
    for (name, size), slack in zip(sizes.items(), kernel.slack, strict=True):
        mine, its = size(ours - true), size(theirs - true)
        if mine > slack * max(its, size(true) * kernel.grain, scale * kernel.grain):
            return f"{name} {mine:.3g} from float64's {size(true):.3g}, the definition {its:.3g}"
    return ""


def _length(t: Tensor) -> float:
    return torch.linalg.vector_norm(t).item() if t.numel() else 0.0


def _farthest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format).unsqueeze(-1).view(torch.uint8)


def _first(ours: Tensor, theirs: Tensor, wrong: Tensor) -> str:
    """Return the index and both values of the first element at which `wrong` is True, or ""."""
    if not wrong.any():
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"at {list(at)} {ours[at].item()!r}, the definition {theirs[at].item()!r}"
