"""The kernels of `lpkit.techniques.kernels`, and linear with cross-entropy, beside the same in
eager PyTorch, compiled, and in other libraries, and beside a copy of the bytes that must move.

Ours is the fastest version that runs here; without a GPU that is what torch.compile makes. Every
contender is held against the definition before anything is timed. Two cases each: forward alone,
beside the copy, which says how much of this machine's memory speed is reached; and forward with
backward. Inputs take turns, so that the cache does not flatter. What is products for the most part
is beside these alone instead, and its peak of memory beside others'.
"""

from functools import partial

import torch
from torch import Tensor

from lpkit.bench import losses
from lpkit.bench.harness import ROUNDS, Result, paired, race
from lpkit.hardware import peak_bytes, reset_peak, synchronised
from lpkit.kernels.choose import COMPILE, REFERENCE, candidates, why_not
from lpkit.kernels.kernel import Kernel, Version, far, gradients_of, weights_of
from lpkit.kernels.targets import FLOORS
from lpkit.techniques.kernels import KERNELS

COPY, PRODUCTS = FLOORS
# on a GPU, at least, times the speed of
FORWARD_TARGETS = {COPY: 0.85}
TARGETS = {"cross-entropy": {"liger": 2.0, COMPILE: 1.5},
           "linear-cross-entropy": {"liger": 1.25, "liger, cutedsl": 0.97, PRODUCTS: 0.9}}
PEAK_TARGET = 1.1       # of a peer's peak of memory, at most
BUFFERS = 4
SAMPLE_SECONDS = 0.01
PEERS = ("torch", "triton", "liger-kernel", "quack-kernels", "torchao", "transformer-engine")
ALONE = {"linear-cross-entropy": losses.products}      # the products


def kernels() -> dict[str, Kernel]:
    """What is timed, by name."""
    known = {name: row.load() for name, row in KERNELS.items()}
    return {**{name: one for name, one in known.items() if one.timed},
            "linear-cross-entropy": losses.KERNEL}


def fused(rounds: int = ROUNDS) -> list[Result]:
    return [result for name in kernels() for result in of(name, rounds)]


def of(name: str, rounds: int = ROUNDS) -> list[Result]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel, gpu = kernels()[name], device.type == "cuda"
    count = 1 if name in ALONE else BUFFERS
    turns = [list(kernel.timed(torch.Generator().manual_seed(i), device)) for i in range(count)]
    results = []
    for over in zip(*turns):
        contenders, missing = _contenders(kernel, over[0])
        ours = next(key for key in ("triton", "cpu", COMPILE) if key in contenders)
        call = contenders.pop(ours)
        case = f"{name}, {'x'.join(map(str, over[0][0].shape))}, {ours}"
        described = {"name": "kernels", "rounds": rounds, "over": over,
                     "sample_seconds": SAMPLE_SECONDS, "packages": PEERS,
                     "device": torch.cuda.get_device_name(device) if gpu else None,
                     "facts": {"missing": missing, "kernel": name},
                     "sync": synchronised(lambda: None, device)}

        def targets(peers, of):
            return {peer: of.get(peer) if gpu else None for peer in peers}

        if name not in ALONE:
            forward = {COPY: _copy(kernel.moved_bytes(*over[0]), device),
                       **{key: partial(_forward, one) for key, one in contenders.items()}}
            results += race(ours=partial(_forward, call), peers=forward, case=f"{case}, forward",
                            target=targets(forward, FORWARD_TARGETS), **described)
        if kernel.gradients:
            want = kernel.definition(*over[0])
            weights = weights_of(want if isinstance(want, tuple) else (want,))
            both = {key: partial(_both, kernel, one, weights)
                    for key, one in {**contenders, ours: call}.items()}
            peaks = _peaks(both, over[0], device) if name in ALONE else {}
            first = both.pop(ours)
            if name in ALONE:
                both[PRODUCTS] = ALONE[name]
            results += race(ours=first, peers=both, case=f"{case}, and backward",
                            target=targets(both, TARGETS.get(name, {})), **described)
            results += [paired("kernels", ours=[peaks[ours]], peer=[peaks[key]], peer_name=key,
                               better="lower", unit="bytes", case=f"{case}, peak",
                               packages=PEERS, device=described["device"],
                               target=PEAK_TARGET if "liger" in key else None)
                        for key in peaks if key != ours]
    return results


def _peaks(calls: dict[str, Version], arguments: tuple, device: torch.device) -> dict[str, int]:
    """Bytes beside what was there before; of a GPU."""
    peaks = {}
    for key, call in calls.items() if device.type == "cuda" else ():
        before = torch.cuda.memory_allocated(device)
        reset_peak(device)
        call(*arguments)
        peaks[key] = peak_bytes(device) - before
    return peaks


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
