"""E4M3 quantise-dequantise on a CPU: the kit's kernel beside ml_dtypes, PyTorch's casts, and the
same casts compiled.

4 Mi float32 values, in buffers that together are larger than a cache and take turns; all contenders
write into buffers that exist already where they can, so that nobody pays for fresh pages alone. Raw
bits are compared first.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lpkit.bench.harness import ROUNDS, Result, race
from lpkit.kernels import cast
from lpkit.techniques.formats import FORMATS

SIZE = 4 * 2**20        # float32 values: 16 MiB
BUFFERS = 8             # of inputs and of outputs each: 256 MiB pass by before one comes back
THREADS = (1, 2)
TARGETS = {"ml_dtypes": 25.0, "torch eager": 5.0, "torch compiled": 1.15}


def run(rounds: int = ROUNDS) -> list[Result]:
    results = []
    for count in THREADS:
        with threads(count):
            results += _race(count, rounds)
    return results


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch's threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rotating(function: Callable[[Tensor, Tensor], object], inputs: list[Tensor],
             outputs: list[Tensor]) -> Callable[[], object]:
    """Calls `function(x, out)` with the next pair each time."""
    pairs = itertools.cycle(zip(inputs, outputs, strict=True))
    return lambda: function(*next(pairs))


def same_bits(name: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got.contiguous().view(torch.int32), want.contiguous().view(torch.int32)):
        raise AssertionError(f"{name}: {int((got != want).sum())} of {got.numel()} values differ")


def eager(x: Tensor, out: Tensor) -> None:
    out.copy_(x.to(torch.float8_e4m3fn))


def _race(count: int, rounds: int) -> list[Result]:
    import ml_dtypes

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SIZE, generator=generator) for _ in range(BUFFERS)]
    outputs = [torch.empty(SIZE) for _ in range(BUFFERS)]
    fmt = FORMATS["e4m3fn"]

    def ours(x: Tensor, out: Tensor) -> None:
        cast.qdq(x, fmt, out=out)

    def numpy_way(x: Tensor, out: Tensor) -> None:
        out.numpy()[:] = x.numpy().astype(ml_dtypes.float8_e4m3fn)

    torch.compiler.reset()      # the number of threads is compiled in
    contenders = {"ml_dtypes": numpy_way, "torch eager": eager,
                  "torch compiled": torch.compile(eager)}

    def check() -> None:
        want = inputs[0].to(torch.float8_e4m3fn).float()
        for name, function in {"ours": ours, **contenders}.items():
            outputs[0].fill_(torch.nan)
            function(inputs[0], outputs[0])
            same_bits(name, outputs[0], want)

    return race("qdq", ours=rotating(ours, inputs, outputs), check=check, target=TARGETS,
                rounds=rounds, peers={name: rotating(function, inputs, outputs)
                                      for name, function in contenders.items()},
                case=f"E4M3 and back, 4 Mi float32, threads: {count}, kernel: {cast.choice().used}",
                packages=("torch", "ml_dtypes"))
