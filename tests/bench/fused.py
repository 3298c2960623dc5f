"""The kernels of `lpkit.techniques.kernels`, and linear with cross-entropy, beside the same in
eager PyTorch, compiled, and in other libraries, and beside a copy of the bytes that must move.

    lpkit bench kernels                     all, at this machine's ceilings
    lpkit bench kernels --kernel rms-norm   one

Ours is the fastest version that runs here; without a GPU that is what torch.compile makes. Every
contender is held against the definition before anything is timed; one that writes over its argument
is held to it on a copy, and timed without: a copy is no part of its count. Two cases each: forward
alone, beside the copy, which says how much of this machine's memory speed is reached; and forward
with backward. Inputs take turns, so that the cache does not flatter. What is products for the most
part is beside these alone instead, and its peak of memory beside others'.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lessons import cuda_norm
from lpkit import hardware
from lpkit.errors import ConfigError, pick
from lpkit.hardware import peak_bytes, reset_peak, synchronised
from lpkit.kernels.choose import COMPILE, REFERENCE, candidates, why_not
from lpkit.kernels.cross_entropy import cross_entropy_
from lpkit.kernels.kernel import Kernel, Version, gradients_of, weights_of
from lpkit.techniques.kernels import KERNELS
from tests.bench import losses, peers, sizes
from tests.bench.harness import ROUNDS, Result, paired, race
from tests.bench.peers import CUTEDSL, far, liger_in_place
from tests.kernels.builds import PROOFS
from tests.pages.kernels import FLOORS

COPY, PRODUCTS = FLOORS
# on a GPU, at least, times the speed of
FORWARD_TARGETS = {COPY: 0.85}
TARGETS = {"cross-entropy": {"liger": 2.0, COMPILE: 1.5},
           "linear-cross-entropy": {"liger": 1.25, CUTEDSL: 0.97, PRODUCTS: 0.9}}
PEAK_TARGET = 1.1       # of a peer's peak of memory, at most
BUFFERS = 4
SAMPLE_SECONDS = 0.01
PACKAGES = ("torch", "triton", "liger-kernel", "quack-kernels", "torchao", "transformer-engine")
PEERS = {**peers.PEERS, "linear-cross-entropy": losses.PEERS}
TIMED = {**sizes.TIMED, "linear-cross-entropy": losses.shaped}
ALONE = {"linear-cross-entropy": losses.products}      # the products
# what writes over its logits, as a step lets it; the version of the same name does so on a copy
IN_PLACE: dict[str, dict[str, Version]] = {"cross-entropy": {
    "cpu": cross_entropy_, "triton": cross_entropy_, "liger": liger_in_place,
    CUTEDSL: partial(liger_in_place, implementation="cutedsl")}}
HISTORY = 5.0           # about the largest of as many numbers of a normal distribution


def kernels() -> dict[str, Kernel]:
    """What is timed, by name."""
    return {**{name: row.load() for name, row in KERNELS.items()},
            "add-rms-norm": cuda_norm.ADD_RMS_NORM, "linear-cross-entropy": losses.KERNEL}


def fused(rounds: int = ROUNDS, *, kernel: str | None = None) -> list[Result]:
    """`kernel`: this one alone. Raises ConfigError for one that has no case on this device."""
    known, device = kernels(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernel:
        pick(known, kernel, "kernel")
    here = hardware.machine(str(device))
    ceilings = [("ceiling", ""), ("memory", f"{here.bytes_per_second / 1e9:,.0f} GB/s"), *(
        (name, f"{flops / 1e12:,.2f} TFLOP/s") for name, flops in here.flops.items())]
    results = [result for name in ([kernel] if kernel else known)
               for result in of(name, known[name], device, rounds, {"breakdown": ceilings})]
    if not results:
        raise ConfigError(f"{kernel} is timed on a GPU; on a CPU use lpkit bench attention-cpu")
    left_out: dict[tuple[str, str], dict] = {}
    for result in results:
        for peer, why in result.provenance.get("missing", {}).items():
            left_out.setdefault((peer, why), {})[result.provenance["kernel"]] = None
    ceilings += [(f"{peer} left out", f"{why} ({', '.join(of_these)})")
                 for (peer, why), of_these in left_out.items()]
    return results


def _timed(name: str, kernel: Kernel, seed: int,
           device: torch.device) -> Iterator[tuple[str, tuple]]:
    """What the case is called, and arguments. A cast's: as its page has them, for the matrices of
    a step."""
    rng = torch.Generator(device).manual_seed(seed)     # a CPU's takes minutes for a GPU's sizes
    if name in TIMED:
        yield from (("", arguments) for arguments in TIMED[name](rng, device))
        return
    for shape in sizes.rows(device):
        x = torch.randn(shape, generator=rng, device=device).bfloat16()
        for case, (_, *others) in PROOFS[name].typical().items():
            yield f", {case}" if case else "", (x, *(
                torch.tensor(HISTORY, device=device) if torch.is_tensor(argument) else argument
                for argument in others))


def of(name: str, kernel: Kernel, device: torch.device, rounds: int, facts: dict) -> list[Result]:
    gpu = device.type == "cuda"
    count = 1 if name in ALONE else BUFFERS
    turns = [_timed(name, kernel, seed, device) for seed in range(count)]
    results = []
    for taken in zip(*turns):
        over = [arguments for _, arguments in taken]
        torch.compiler.reset()      # the same definition serves several, and may compile few times
        contenders, missing = _contenders(name, kernel, over[0])
        ours = next((key for key in ("triton", "cpu", COMPILE) if key in contenders), REFERENCE)
        call, x = contenders.pop(ours), over[0][0]
        case = (f"{name}, {'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}"
                f"{taken[0][0]}, {ours}")
        described = {"name": "kernels", "rounds": rounds, "over": over,
                     "sample_seconds": SAMPLE_SECONDS, "packages": PACKAGES,
                     "device": torch.cuda.get_device_name(device) if gpu else None,
                     "facts": {"missing": missing, "kernel": name, **facts},
                     "sync": synchronised(lambda: None, device)}

        def targets(peers, of):
            return {peer: of.get(peer) if gpu else None for peer in peers}

        if name not in ALONE:
            forward = {COPY: _copy(PROOFS[name].moved_bytes(*over[0]), device),
                       **{key: partial(_forward, contender)
                          for key, contender in contenders.items()}}
            results += race(ours=partial(_forward, call), peers=forward, case=f"{case}, forward",
                            target=targets(forward, FORWARD_TARGETS), **described)
        if kernel.gradients:
            want = kernel.definition(*over[0])
            weights = weights_of(want if isinstance(want, tuple) else (want,))
            both = {key: partial(_both, kernel, contender, weights)
                    for key, contender in {**contenders, ours: call}.items()}
            peaks = _peaks(both, over[0], device) if name in ALONE else {}
            first = both.pop(ours)
            if name in ALONE:
                both[PRODUCTS] = ALONE[name]
            results += race(ours=first, peers=both, case=f"{case}, and backward",
                            target=targets(both, TARGETS.get(name, {})), **described)
            results += [paired("kernels", ours=[peaks[ours]], peer=[peaks[key]], peer_name=key,
                               better="lower", unit="bytes", case=f"{case}, peak",
                               packages=PACKAGES, device=described["device"],
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


def _contenders(name: str, kernel: Kernel, arguments: tuple) -> tuple[dict[str, Version],
        dict[str, str]]:
    """What runs here and is right, as it is timed, and why the others do not."""
    want = gradients_of(kernel, kernel.definition, arguments)
    right, missing = {}, {}
    for key, call in {**candidates(kernel), **PEERS.get(name, {})}.items():
        why = why_not(key, [arguments]) if key != COMPILE else ""
        try:
            why = why or far(gradients_of(kernel, call, arguments), want)
        except Exception as error:      # whatever a library raises where it does not run
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        if why:
            missing[key] = why
        else:
            right[key] = IN_PLACE.get(name, {}).get(key, call)
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
