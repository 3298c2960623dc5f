"""The kernels of `lpkit.techniques.kernels` beside the same in eager PyTorch, compiled, and in
other libraries, and beside a copy of the bytes that must move.

Ours is the fastest version that runs here; without a GPU that is what torch.compile makes. Every
contender is held against the definition before anything is timed. Two cases each: forward alone,
beside the copy, which says how much of this machine's memory speed is reached; and forward with
backward. Inputs take turns, so that the cache does not flatter.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lpkit.bench.harness import ROUNDS, Result, race
from lpkit.hardware import synchronised
from lpkit.kernels.choose import COMPILE, REFERENCE, candidates, why_not
from lpkit.kernels.kernel import Kernel, Version, far, gradients_of, weights_of
from lpkit.techniques.kernels import KERNELS

COPY, COPY_TARGET = "a copy of as many bytes", 0.85
BUFFERS = 4
SAMPLE_SECONDS = 0.01


def fused(rounds: int = ROUNDS) -> list[Result]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [result for name, row in KERNELS.items() for result in _kernel(name, row.load(), device,
                                                                          rounds)]


def _kernel(name: str, kernel: Kernel, device: torch.device, rounds: int) -> Iterator[Result]:
    if kernel.timed is None:
        return
    turns = [list(kernel.timed(torch.Generator().manual_seed(i), device)) for i in range(BUFFERS)]
    for over in zip(*turns):
        contenders, missing = _contenders(kernel, over[0])
        ours = next(key for key in ("triton", "cpu", COMPILE) if key in contenders)
        call = contenders.pop(ours)
        case = f"{name}, {'x'.join(map(str, over[0][0].shape))}, {ours}"
        gpu = device.type == "cuda"
        described = {"rounds": rounds, "sample_seconds": SAMPLE_SECONDS,
                     "packages": ("torch", "triton", "liger-kernel", "quack-kernels", "torchao"),
                     "device": torch.cuda.get_device_name(device) if gpu else None,
                     "facts": {"missing": missing} if missing else None,
                     "sync": synchronised(lambda: None, device)}
        forward = {key: partial(_forward, one) for key, one in contenders.items()}
        copy = _copy(kernel.moved_bytes(*over[0]), device)
        yield from race("kernels", ours=partial(_forward, call), peers={COPY: copy, **forward},
                        over=over, case=f"{case}, forward", **described,
                        target={COPY: COPY_TARGET if gpu else None, **dict.fromkeys(forward)})
        if kernel.gradients:
            want = kernel.definition(*over[0])
            weights = weights_of(want if isinstance(want, tuple) else (want,))
            both = {key: partial(_both, kernel, one, weights) for key, one in contenders.items()}
            yield from race("kernels", ours=partial(_both, kernel, call, weights), peers=both,
                            over=over, case=f"{case}, and backward", **described)


def _contenders(kernel: Kernel, arguments: tuple) -> tuple[dict[str, Version], dict[str, str]]:
    """What runs here and is right, and why the others do not."""
    want = gradients_of(kernel, kernel.definition, arguments)
    right, missing = {}, {}
    for key, call in {**candidates(kernel), **kernel.peers}.items():
        why = why_not(key, arguments) if key != COMPILE else ""
        try:
            why = why or far(gradients_of(kernel, call, arguments), want)
        except Exception as error:      # whatever a library raises where it does not run
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        if why:
            missing[key] = why
        else:
            right[key] = call
    assert REFERENCE in right
    return right, missing


def _forward(call: Version, *arguments) -> None:
    with torch.no_grad():
        call(*arguments)


def _both(kernel: Kernel, call: Version, weights: list[Tensor], *arguments) -> None:
    gradients_of(kernel, call, arguments, weights)


def _copy(nbytes: int, device: torch.device) -> Version:
    """Half is read and half is written."""
    source, to = torch.empty(2, BUFFERS, max(1, nbytes // 2), dtype=torch.uint8, device=device)
    turn = iter(range(10**12))

    def copy(*_) -> None:
        i = next(turn) % BUFFERS
        to[i].copy_(source[i])

    return copy
