"""The kit's kernels on a CPU: attention beside PyTorch's, quantise-dequantise beside ml_dtypes',
PyTorch's and torchao's.

What is quantised is 4 Mi float32 values, in buffers that together are larger than a cache and take
turns; all contenders make their result, fresh pages included, as in a run. Values are compared bit
for bit first.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lpkit.config import ModelConfig
from lpkit.contracts import Attend
from lpkit.execution.attention import IN_16_BITS, ON_A_CPU
from lpkit.execution.attention import race as choose
from lpkit.kernels import cast, compile_c, jit
from lpkit.kernels.blocked_attention import blocked
from lpkit.nn.attention import plain, sdpa, sees
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import ATTENTION, Attending
from lpkit.techniques.formats import FORMATS
from tests.bench.harness import ROUNDS, Result, race

ATTENTION_SHAPES, ATTENTION_TARGET = ((16, 6, 256, 64), (4, 12, 1024, 64)), 1.5   # B, H, T, E
ATTENTION_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}   # of the norm
BEHIND = 0.97       # of the speed of the fastest that auto may choose, at least
MASKED_SHAPE, NEAR, SHORTER = (1, 8, 4096, 64), 256, 100     # the first document is, by so many
MASKED = {"window": Rule(window=NEAR), "documents": Rule(documents=True)}
MASKED_TARGETS, MASK_TARGET = {torch.float32: 2.5, torch.bfloat16: 1.5}, 5.0
SHAPE = (1024, 4096)    # 16 MiB
THREADS = (1, 2)
QDQ_TARGETS = {"ml_dtypes": 25.0, "torch eager": 5.0, "torch compiled": 1.15}
MX_TARGET = 6.0
E4M3 = FORMATS["e4m3fn"]


def attention(rounds: int = ROUNDS) -> list[Result]:
    """Forward and backward: what system.attention=auto takes beside all that it may take; blocks of
    products beside PyTorch's flash kernel, causal in bf16; and a window and documents beside its
    full attention, and beside it with these as a mask."""
    return [*(result for shape in ATTENTION_SHAPES for dtype in MASKED_TARGETS
              for result in _auto(shape, dtype, rounds)),
            *(result for shape in ATTENTION_SHAPES for result in _attention(shape, rounds)),
            *(result for name, rule in MASKED.items() for dtype in MASKED_TARGETS
              for result in _masked(name, rule, dtype, min(rounds, 5)))]


def _masked(name: str, rule: Rule, dtype: torch.dtype, rounds: int) -> list[Result]:
    places = torch.arange(MASKED_SHAPE[2])
    ids = ((places + SHORTER) // NEAR)[None] if rule.documents else None
    full, masked = "full causal sdpa", f"sdpa with the {name} as a mask"
    peers = {full: sdpa, masked: partial(F.scaled_dot_product_attention,
                                         attn_mask=sees(rule, places, places, ids))}
    return _race(MASKED_SHAPE, dtype, partial(blocked, documents=ids, rule=rule), peers, rounds,
                 target={full: MASKED_TARGETS[dtype], masked: MASK_TARGET},
                 same=peers[masked], case=f"{name} {NEAR}, {dtype}, ")


def _auto(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> list[Result]:
    B, H, T, E = shape
    model = ModelConfig(heads=H, width=H * E, context=T)
    asked = Attending(model=model, dtype=str(dtype).removeprefix("torch."), here=True)
    used = choose(asked, B, torch.device("cpu")).used
    may = ON_A_CPU if dtype == torch.float32 else IN_16_BITS
    peers = {name: ATTENTION[name].load() for name in may if name != used}
    return _race(shape, dtype, ATTENTION[used].load(), peers, rounds, target=BEHIND, same=plain,
                 case=f"auto is {used}, {dtype}, ")


def _attention(shape: tuple[int, ...], rounds: int) -> list[Result]:
    return _race(shape, torch.bfloat16, blocked, {"sdpa": sdpa}, rounds, target=ATTENTION_TARGET,
                 same=plain)


def _race(shape: tuple[int, ...], dtype: torch.dtype, ours: Attend, peers: dict[str, Attend],
          rounds: int, *, target: float | dict[str, float], same: Attend,
          case: str = "") -> list[Result]:
    rng = torch.Generator().manual_seed(0)
    *inputs, d_out = (torch.randn(shape, generator=rng, dtype=dtype) for _ in range(4))
    for x in inputs:
        x.requires_grad_()

    def both(attend, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return (out, *torch.autograd.grad(out, inputs, d_out.to(out.dtype)))

    def check():
        """Within rounding of `same` in float32: in bf16 8 bits in scores of order 1, summed over
        the context."""
        want = both(same, *(x.detach().float().requires_grad_() for x in inputs))
        for got, expected in zip(both(ours, *inputs), want, strict=True):
            error = (got.float() - expected).norm() / expected.norm()
            assert error < ATTENTION_ERROR[dtype], f"blocked: relative error {error:.1e}"

    return race("attention-cpu", ours=partial(both, ours), over=[inputs], check=check,
                peers={name: partial(both, peer) for name, peer in peers.items()}, target=target,
                rounds=rounds, case=case + "x".join(map(str, shape)))


def qdq(rounds: int = ROUNDS) -> list[Result]:
    """E4M3 and back, beside ml_dtypes, PyTorch's casts, and the same casts compiled."""
    before, results = torch.get_num_threads(), []
    try:
        for count in THREADS:
            torch.set_num_threads(count)
            results += _qdq(count, rounds)
    finally:
        torch.set_num_threads(before)
    return results


def _qdq(threads: int, rounds: int) -> list[Result]:
    import ml_dtypes

    def ours(x: Tensor) -> Tensor:
        return cast.qdq(x, E4M3)

    def numpy_way(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e4m3fn).astype("float32"))

    def eager(x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn).float()

    torch.compiler.reset()      # the number of threads is compiled in
    peers = {"ml_dtypes": numpy_way, "torch eager": eager, "torch compiled": jit.compiled(eager)}
    buffers = _buffers(8)

    def check() -> None:
        for name, function in {"ours": ours, **peers}.items():
            same_bits(name, function(*buffers[0]), eager(*buffers[0]))

    return race("qdq", ours=ours, peers=peers, over=buffers, check=check, target=QDQ_TARGETS,
                rounds=rounds, packages=("torch", "ml_dtypes"),
                case=f"E4M3 and back, 4 Mi float32, threads: {threads}, kernel: "
                f"{compile_c.choice('cast').used}")


def mx_qdq(rounds: int = ROUNDS) -> list[Result]:
    """MXFP8 and back, beside torchao's eager path."""
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def ours(x: Tensor) -> Tensor:
        return cast.mx(x, E4M3).values

    def torchaos(x: Tensor) -> Tensor:
        scales, codes = to_mx(x, torch.float8_e4m3fn, cast.MX_BLOCK[1])
        return to_dtype(codes, scales, torch.float8_e4m3fn, cast.MX_BLOCK[1], x.dtype)

    buffers = _buffers(4)

    def check() -> None:
        same_bits("MXFP8", ours(*buffers[0]), torchaos(*buffers[0]))

    return race("mx-qdq", ours=ours, peers={"torchao eager": torchaos}, over=buffers, check=check,
                target=MX_TARGET, rounds=rounds, packages=("torch", "torchao"),
                case=f"MXFP8, E4M3 elements, floor rule, 4 Mi float32, threads: "
                f"{torch.get_num_threads()}, kernel: {compile_c.choice('cast').used}")


def _buffers(count: int) -> list[tuple[Tensor]]:
    """Inputs: `count` times 16 MiB pass by before one comes back."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(SHAPE, generator=generator),) for _ in range(count)]


def same_bits(name: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got.contiguous().view(torch.int32), want.contiguous().view(torch.int32)):
        raise AssertionError(f"{name}: {int((got != want).sum())} of {got.numel()} values differ")
