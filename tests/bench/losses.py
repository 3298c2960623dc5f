"""Linear and cross-entropy over 50,304 entries on a CPU, a piece of the tokens at a time: beside
the plain loss, which holds all logits, and beside PyTorch's `F.linear_cross_entropy` with equal
pieces (its own choice of pieces on a CPU takes several times as long).

Seconds are those of a forward and its gradients, in float32, with one thread and with two. Memory
is what a loss takes beside its inputs, the weight's gradient included: by the kit's own count of
bytes, without computing, and by the most that a process of its own had resident.

On a GPU it is one of the kernels of `lpkit bench kernels` (`KERNEL`), beside Liger's and QuACK's,
and beside its three products alone.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lpkit.kernels.cross_entropy import cross_entropy_
from lpkit.kernels.kernel import Kernel
from lpkit.machine_facts import status_bytes
from lpkit.measure.tracking import Tracker
from lpkit.memory.loss import _LinearCrossEntropy, counted, linear_cross_entropy
from tests.bench.harness import ROUNDS, Result, paired, race
from tests.bench.peers import CUTEDSL, liger

WIDTH, VOCAB, CHUNK = 384, 50_304, 128
TOKENS, TOKENS_HELD = 1024, 4096        # of the race, and where memory is counted
THREADS = (1, 2)
MEMORY_TARGET = 1 / 15                  # of the plain loss's peak
EQUAL_PIECES = "F.linear_cross_entropy, equal pieces"
PYTORCH_HAS_IT = hasattr(F, "linear_cross_entropy")     # 2.11 has not


def plain(h: Tensor, head: nn.Module, y: Tensor) -> Tensor:
    return F.cross_entropy(head(h), y)


def in_pieces(h: Tensor, head: nn.Module, y: Tensor) -> Tensor:
    return linear_cross_entropy(h, head, y, CHUNK)


def torchs(h: Tensor, head: nn.Module, y: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)
    return F.linear_cross_entropy(h, head.weight, y, options=options)


LOSSES = {"plain": plain, "in pieces": in_pieces}


def run(rounds: int = ROUNDS) -> list[Result]:
    before, results = torch.get_num_threads(), []
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            results += _seconds(threads, rounds)
    finally:
        torch.set_num_threads(before)
    return results + [_memory(how, peak) for how, peak in {
        "by the kit's count of bytes": counted_bytes, "by resident memory": _resident}.items()]


def inputs(tokens: int) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    nn.init.normal_(head.weight, std=0.02)
    return (torch.randn(tokens, WIDTH, requires_grad=True), head,
            torch.randint(VOCAB, (tokens,)))


def gradients(loss: Callable[..., Tensor], h: Tensor, head: nn.Linear,
              y: Tensor) -> tuple[Tensor, ...]:
    value = loss(h, head, y)
    return (value.detach(), *torch.autograd.grad(value, (h, head.weight)))


def _seconds(threads: int, rounds: int) -> list[Result]:
    over = [inputs(TOKENS)]
    contenders = {"plain": plain} | ({EQUAL_PIECES: torchs} if PYTORCH_HAS_IT else {})

    def check() -> None:
        want = gradients(plain, *over[0])
        for loss in (in_pieces, *contenders.values()):
            for got, expected in zip(gradients(loss, *over[0]), want, strict=True):
                error = (got - expected).norm() / expected.norm()
                assert error < 1e-5, f"{loss.__name__}: relative error {error:.1e}"

    return race("linear-cross-entropy", ours=partial(gradients, in_pieces), over=over, check=check,
                peers={name: partial(gradients, loss) for name, loss in contenders.items()},
                target=1.0, rounds=rounds,
                case=f"{TOKENS} x {WIDTH} to {VOCAB:,}, {CHUNK} tokens at a time, "
                f"threads: {threads}")


def _memory(how: str, peak_of: Callable[[str], int]) -> Result:
    ours, whole = peak_of("in pieces"), peak_of("plain")
    return paired("linear-cross-entropy", ours=[ours], peer=[whole], peer_name="plain",
                  better="lower", unit="bytes", target=MEMORY_TARGET,
                  case=f"{TOKENS_HELD} tokens, peak beside the inputs, {how}")


def counted_bytes(name: str) -> int:
    with FakeTensorMode():
        h, head, y = inputs(TOKENS_HELD)
        with Tracker(head) as tracker:
            tracker.hold([h, y], "temporaries")
            held = sum(record.nbytes for record in tracker.records.values())
            gradients(LOSSES[name], h, head, y)
        return tracker.footprint().peak_bytes - held


def _resident(name: str) -> int:
    code = f"from tests.bench.losses import resident_bytes; print(resident_bytes({name!r}))"
    return int(subprocess.check_output([sys.executable, "-c", code], text=True))


def resident_bytes(name: str) -> int:
    """What the loss `name` adds to the most that this process has had resident (Linux)."""
    given = inputs(TOKENS_HELD)
    few = (given[0][:1], given[1], given[2][:1])    # what is loaded and compiled once
    gradients(in_pieces, *few)
    before = status_bytes("VmRSS")
    gradients(LOSSES[name], *given)
    return status_bytes("VmHWM") - before


# Of a GPU: h (M, D), the head's weight (V, D), targets (M,), all in bf16.

PIECE = 4096            # tokens, on a GPU


def shaped(rng: torch.Generator, device: torch.device):
    M, D, V = (256, 64, 1000) if device.type == "cpu" else (32_768, 4096, 128_256)
    h, w = (torch.randn(shape, generator=rng, device=device).mul_(0.02 if i else 1).bfloat16()
            for i, shape in enumerate(((M, D), (V, D))))
    yield h, w, torch.randint(V, (M,), generator=rng, device=device)


def _ligers(h: Tensor, w: Tensor, y: Tensor, *, implementation: str = "") -> Tensor:
    function = liger("fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction",
                     implementation)
    return function.apply(h, w, y)[0]


def _quacks(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(h, w, y, chunk_size=PIECE)


def _torchs(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.linear_cross_entropy(h, w, y)


def products(h: Tensor, w: Tensor, y: Tensor) -> None:
    """The floor: three products a piece, and nothing between them."""
    dw = torch.zeros_like(w)
    for part in h.split(PIECE):
        logits = part @ w.T
        logits @ w
        dw.addmm_(logits.T, part)


def _in_pieces(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """`linear_cross_entropy` under a head that is no module, w (V, D)."""
    head = nn.Linear(*w.T.shape, bias=False, device="meta")
    head.weight = nn.Parameter(w.detach(), requires_grad=False)
    return _LinearCrossEntropy.apply(h, y, *counted(y, None), head, PIECE, cross_entropy_, w)


KERNEL = Kernel(
    definition=lambda h, w, y: F.cross_entropy((h @ w.T).float(), y), gradients=(0, 1),
    versions={"cpu": _in_pieces, "triton": _in_pieces}, examples=shaped)
PEERS = {"F.linear_cross_entropy": _torchs, "liger": _ligers, "quack": _quacks,
         CUTEDSL: partial(_ligers, implementation="cutedsl")}
