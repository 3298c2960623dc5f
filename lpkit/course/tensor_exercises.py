"""The exercises of the course that take tensors, or run: the mechanisms themselves, written by the
learner in plain PyTorch. Where a sum may be done in another order a tolerance says so; a tolerance
of 0 asks for the same bits.
"""

import math
from collections.abc import Callable
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from lpkit.course.judge import Exercise, adding_to

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)
FP8, LARGEST = torch.float8_e4m3fn, 448.0
UNCLAMPED = "clamp before the cast: up to PyTorch 2.11, what is too large becomes NaN"


def normal(r: Random, *shape: int, size: float = 1.0) -> Tensor:
    """Some with a gap behind each row."""
    rows, columns, gap = shape[:-1], shape[-1], r.choice((0, 0, 3))
    chance = torch.Generator().manual_seed(r.getrandbits(32))
    return (size * torch.randn(*rows, columns + gap, generator=chance))[..., :columns]


# 00, start here: what is minimised, and how far a step may go.

def _plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    rows = torch.arange(len(targets))
    return (logits.exp().sum(-1).log() - logits[rows, targets]).mean()


def _logits(r: Random) -> tuple[Tensor, Tensor]:
    n, vocab = r.randint(1, 6), r.randint(2, 9)
    return (normal(r, n, vocab, size=r.choice((1, 30, 1000))),
            torch.tensor([r.randrange(vocab) for _ in range(n)]))


@exercise("00.cross_entropy", (torch.zeros(1, 4), torch.tensor([2])),
          (torch.tensor([[1000.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])), draw=_logits,
          tolerance=1e-5, stars=2, minutes=10,
          mistakes={"exp overflows: subtract each row's largest first": _plain_cross_entropy,
                    "the mean over the tokens, not their sum":
                        lambda logits, targets: len(targets) * cross_entropy(logits, targets)})
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits - logits.amax(-1, keepdim=True)
    right = logits.gather(-1, targets[:, None])[:, 0]
    return (logits.exp().sum(-1).log() - right).mean()


def _clip_each(grads: list[Tensor], most: float) -> list[Tensor]:
    return [g * min(1.0, most / max(g.norm().item(), 1e-30)) for g in grads]


def _clip_always(grads: list[Tensor], most: float) -> list[Tensor]:
    norm = math.sqrt(sum(g.square().sum().item() for g in grads))
    return [g * (most / norm) for g in grads] if norm else grads


@exercise("00.clip", ([torch.tensor([3.0]), torch.tensor([4.0])], 1.0),
          ([torch.tensor([0.3]), torch.tensor([0.4])], 1.0), ([torch.zeros(2)], 1.0),
          draw=lambda r: ([normal(r, r.randint(1, 5)) for _ in range(r.randint(1, 3))],
                          r.choice((0.1, 1.0, 10.0))),
          tolerance=1e-4, minutes=6,
          mistakes={"one norm, over all of them": _clip_each,
                    "a short gradient stays as it is": _clip_always})
def clip(grads: list[Tensor], most: float) -> list[Tensor]:
    norm = torch.stack([g.norm() for g in grads]).norm()
    scale = min(1.0, most / norm.item()) if norm else 1.0
    return [g * scale for g in grads]


# 01, memory math: bytes that are there, and when.

def _views(r: Random) -> tuple[list[Tensor]]:
    bases = [torch.zeros(r.randint(1, 9), 8, dtype=r.choice((torch.float32, torch.bfloat16)))
             for _ in range(2)]
    return ([r.choice((base, base.t(), base[:1], base.flatten()[2:4]))
             for base in r.choices(bases, k=4)],)


@exercise("01.saved_bytes", ([torch.zeros(2, 3)],), ([torch.zeros(2, 8)[:1]],),
          ([(x := torch.zeros(4)), x, x[1:]],), draw=_views, tolerance=0, minutes=6, stars=2,
          mistakes={"what shares a storage is there once":
                        lambda tensors: sum(t.numel() * t.element_size() for t in tensors),
                    "a slice keeps the whole storage alive":
                        lambda tensors: sum({t.untyped_storage().data_ptr():
                                             t.numel() * t.element_size()
                                             for t in tensors}.values())})
def saved_bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _lives(r: Random) -> tuple[list[tuple[int, int, int]]]:
    begins = [r.randrange(10) for _ in range(r.randint(1, 8))]
    return ([(begin, begin + r.randint(1, 6), r.randint(1, 99)) for begin in begins],)


def _freed_late(lives: list[tuple[int, int, int]]) -> int:
    return max(sum(n for begin, end, n in lives if begin <= now <= end) for now, _, _ in lives)


@exercise("01.peak_bytes", ([(0, 1, 8)],), ([(0, 2, 8), (2, 3, 4), (1, 2, 1)],), draw=_lives,
          minutes=6, stars=2,
          mistakes={"not all of them at once": lambda lives: sum(n for _, _, n in lives),
                    "what ends at a moment makes room for what begins": _freed_late})
def peak_bytes(lives: list[tuple[int, int, int]]) -> int:
    changes = sorted([(begin, n) for begin, _, n in lives] + [(end, -n) for _, end, n in lives])
    return max(accumulate(n for _, n in changes))


# 02, where the time goes: the work of a product, and what bounds a chain of operations.

def _factors(r: Random) -> tuple[Tensor, Tensor]:
    M, N, K, batch, heads = (r.randint(1, 5) for _ in range(5))
    a, b = r.choice((((batch, heads, M, K), (heads, K, N)), ((M, K), (batch, K, N)),
                     ((batch, 1, M, K), (heads, K, N)), ((M, K), (K, N))))
    return torch.zeros(a), torch.zeros(b)


@exercise("02.flops", (torch.zeros(2, 3), torch.zeros(3, 4)),
          (torch.zeros(2, 3), torch.zeros(5, 3, 4)), draw=_factors, minutes=8, stars=2,
          mistakes={"a multiplication and an addition":
                        lambda a, b: (a @ b).numel() * a.shape[-1],
                    "what is in front broadcasts": lambda a, b: 2 * a.numel() * b.shape[-1]})
def flops(a: Tensor, b: Tensor) -> int:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]).numel()
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


@exercise("02.roofline_seconds", ([(1e9, 1e6)], 1e12, 1e9), ([(1e9, 0.0), (0.0, 1e6)], 1e12, 1e9),
          draw=lambda r: ([(10 ** r.uniform(6, 9), 10 ** r.uniform(3, 6)) for _ in range(
              r.randint(1, 5))], 10 ** r.uniform(11, 13), 10 ** r.uniform(8, 10)), minutes=4,
          mistakes={"the bound of each operation, then the sum": lambda ops, peak, speed:
                        max(sum(f for f, _ in ops) / peak, sum(b for _, b in ops) / speed),
                    "moving and computing overlap within one operation": lambda ops, peak, speed:
                        sum(f / peak + b / speed for f, b in ops)})
def roofline_seconds(operations: list[tuple[float, float]], peak_flops: float,
                     bytes_per_second: float) -> float:
    return sum(max(flops / peak_flops, moved / bytes_per_second) for flops, moved in operations)


# 03, number formats: the cast, and the cast of a block.

def _cast(x: Tensor, exponent_bits: int, mantissa_bits: int, largest: float, *,
          subnormals: bool = True, even: bool = True) -> Tensor:
    exponent = torch.frexp(x.double())[1] - 1
    if subnormals:
        exponent = exponent.clamp(min=2 - 2 ** (exponent_bits - 1))
    step = 2.0 ** (exponent - mantissa_bits)
    steps = x.double() / step
    whole = steps.round() if even else steps.sign() * (steps.abs() + 0.5).floor()
    return (whole * step).clamp(-largest, largest).float()


FORMATS = ((4, 3, 448.0), (5, 2, 57344.0), (2, 1, 6.0), (3, 2, 28.0))


@exercise("03.cast", (torch.tensor([1.0, 1.06]), 4, 3, 448.0),
          (torch.tensor([1.0625, 1.1875, -1.0625]), 4, 3, 448.0),
          (torch.tensor([2.0**-9, 2.0**-10, -(2.0**-11), -0.0, 0.0]), 4, 3, 448.0),
          (torch.tensor([449.0, -1e9, math.inf]), 4, 3, 448.0),
          draw=lambda r: (normal(r, 16, size=2.0 ** r.randint(-12, 8)), *r.choice(FORMATS)),
          tolerance=0, stars=3, minutes=20,
          mistakes={"half way goes to the even neighbour": lambda x, e, m, largest:
                        _cast(x, e, m, largest, even=False),
                    "below the smallest normal number the spacing stays":
                        lambda x, e, m, largest: _cast(x, e, m, largest, subnormals=False),
                    "what is too large becomes the largest":
                        lambda x, e, m, largest: cast(x, e, m, math.inf)})
def cast(x: Tensor, exponent_bits: int, mantissa_bits: int, largest: float) -> Tensor:
    exponent = torch.frexp(x.double())[1] - 1           # frexp's fraction is in [1/2, 1)
    exponent = exponent.clamp(min=2 - 2 ** (exponent_bits - 1))     # subnormals share a spacing
    step = 2.0 ** (exponent - mantissa_bits)
    whole = torch.round(x.double() / step)              # half way: to the even one
    return (whole * step).clamp(-largest, largest).float()


def _nearest_scale(x: Tensor) -> Tensor:
    scale = x.abs().amax() / LARGEST if x.any() else torch.tensor(1.0)
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8).float() * scale


def _scaled_up(x: Tensor) -> Tensor:
    scale = 2.0 ** torch.ceil(torch.log2(x.abs().amax() / LARGEST)) if x.any() else 1.0
    return (x / scale).to(FP8).float() * scale


@exercise("03.mx_cast", (torch.ones(32),), (torch.arange(32.0),), (torch.zeros(32),),
          draw=lambda r: (normal(r, 32, size=10 ** r.uniform(-4, 4)),), tolerance=0, stars=2,
          minutes=10,
          mistakes={UNCLAMPED: lambda x: mx_cast(x).masked_fill(     # 464 in units of the scale
                        x.abs() > 464 * 2.0 ** (torch.frexp(x.abs().amax())[1] - 9), math.nan),
                    "the scale is a power of two": _nearest_scale,
                    "OCP rounds the scale down, and what exceeds 448 then saturates": _scaled_up})
def mx_cast(x: Tensor) -> Tensor:
    scale = 2.0 ** (torch.frexp(x.abs().amax())[1] - 1 - 8.0)   # 2^8 <= amax / scale < 2^9
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _dice(r: Random) -> tuple[Tensor, Tensor]:
    return (normal(r, 16, size=10 ** r.uniform(-6, 6)),
            torch.tensor([r.randrange(2**16) for _ in range(16)], dtype=torch.int32))


@exercise("03.stochastic_bf16",
          (torch.tensor([1.001953125]), torch.tensor([2**15], dtype=torch.int32)),
          (torch.tensor([-1.001953125, 1.0, -0.0, 1.99999]),
           torch.tensor([2**16 - 1] * 4, dtype=torch.int32)), draw=_dice, tolerance=0, stars=2,
          minutes=10,
          mistakes={"nearest never uses the dice": lambda x, dice: x.bfloat16().float(),
                    "dice of 0 round toward zero, large ones away from it": lambda x, dice:
                        (x.view(torch.int32) - dice & -(2**16)).view(torch.float32)})
def stochastic_bf16(x: Tensor, dice: Tensor) -> Tensor:
    bits = x.view(torch.int32) + dice           # a carry goes on into the exponent, as it should
    return (bits & -(2**16)).view(torch.float32)


# 04, scaling recipes: the scale of a block, and the scale of yesterday.

def _column_scales(x: Tensor, block: int) -> Tensor:
    amax = x.unflatten(1, (-1, block)).abs().amax((0, 2)) / LARGEST
    return torch.where(amax > 0, amax, 1.0).expand(len(x), -1)


def _rows(r: Random) -> tuple[Tensor, int]:
    block = r.choice((1, 2, 4))
    x = normal(r, r.randint(1, 4), block * r.randint(1, 4), size=10 ** r.uniform(-3, 3))
    return x * (normal(r, len(x), 1) > -0.7), block


@exercise("04.block_scales", (torch.tensor([[1.0, -448.0, 2.0, 0.0]]), 2),
          (torch.tensor([[0.0, 0.0, 1.0, 1.0]]), 2),
          draw=_rows, minutes=6, stars=2,
          mistakes={"a block of zeros has the scale 1, or its values become NaN":
                        lambda x, block: x.unflatten(1, (-1, block)).abs().amax(-1) / LARGEST,
                    "each row has its own": _column_scales,
                    "the largest magnitude, not the largest value": lambda x, block: torch.where(
                        (top := x.unflatten(1, (-1, block)).amax(-1)) > 0, top / LARGEST, 1.0)})
def block_scales(x: Tensor, block: int) -> Tensor:
    amax = x.unflatten(1, (-1, block)).abs().amax(-1)
    return torch.where(amax > 0, amax / 448, 1.0)


@exercise("04.delayed", ([448.0], 2), ([448.0, 896.0, 448.0], 2),
          draw=lambda r: ([10 ** r.uniform(-2, 4) for _ in range(r.randint(1, 12))],
                          r.randint(1, 4)), minutes=8, stars=2,
          mistakes={"today's amax is not known before the cast": lambda amaxes, length:
                        [max(amaxes[max(0, i + 1 - length):i + 1]) / LARGEST
                         for i in range(len(amaxes))],
                    "what is older than `length` steps is forgotten": lambda amaxes, length:
                        [max(amaxes[:i], default=LARGEST) / LARGEST for i in range(len(amaxes))]})
def delayed(amaxes: list[float], length: int) -> list[float]:
    scales = []
    for step in range(len(amaxes)):
        history = amaxes[max(0, step - length):step]
        scales.append(max(history) / 448 if history else 1.0)
    return scales


# 05, mixed precision: the loss scaler, and what masters are for.

def _never_reset(finite: list[bool], scale: float, interval: int) -> list[float]:
    scales, good = [], 0
    for ok in finite:
        scales.append(scale)
        good += ok
        scale = scale / 2 if not ok else scale
        if ok and good % interval == 0:
            scale *= 2
    return scales


@exercise("05.loss_scaler", ([True, False], 8.0, 2), ([True, True, True], 8.0, 2),
          draw=lambda r: ([r.random() < 0.8 for _ in range(r.randint(1, 20))],
                          r.choice((1.0, 65536.0)), r.randint(1, 4)), minutes=10, stars=2,
          mistakes={"an overflow starts the count again": _never_reset,
                    "the scale that a step was done with": lambda finite, scale, interval:
                        loss_scaler([*finite, True], scale, interval)[1:]})
def loss_scaler(finite: list[bool], scale: float, interval: int) -> list[float]:
    scales, good = [], 0
    for ok in finite:
        scales.append(scale)
        good = good + 1 if ok else 0
        if not ok:
            scale /= 2
        elif good == interval:
            scale, good = scale * 2, 0
    return scales


def _without_masters(weight: Tensor, updates: list[Tensor]) -> Tensor:
    for update in updates:
        weight = (weight - update).to(torch.bfloat16)
    return weight


@exercise("05.with_masters", (torch.tensor([1.0]).bfloat16(), [torch.tensor([0.5])]),
          (torch.tensor([1.0]).bfloat16(), [torch.tensor([0.001])] * 16),
          draw=lambda r: (normal(r, 8).bfloat16(),
                          [normal(r, 8, size=1e-3) for _ in range(r.randint(1, 20))]),
          tolerance=0, minutes=5,
          mistakes={"each update is rounded away in 16 bits: add them in float32":
                        _without_masters})
def with_masters(weight: Tensor, updates: list[Tensor]) -> Tensor:
    master = weight.float()
    for update in updates:
        master = master - update
    return master.to(torch.bfloat16)


# 06, FP8 training: a Linear's three products. Scales are powers of two, so that a division and a
# multiplication by the reciprocal give the same bits.

def to_fp8(x: Tensor, scale: float, dtype: torch.dtype = FP8) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x / scale).clamp(-largest, largest).to(dtype).float()


def _operands(r: Random, backward: bool = False) -> tuple:
    tokens, into, out = r.randint(1, 5), r.randint(1, 6), r.randint(1, 7)
    tensors = [normal(r, tokens, into), normal(r, out, into), normal(r, tokens, out)]
    count = 3 if backward else 2
    sizes = [2.0 ** r.randint(-6, 6) for _ in range(count)]
    # some saturate, others are subnormal
    scales = [size * 2.0 ** -r.randint(-6, most)
              for size, most in zip(sizes, (10, 10, 17), strict=False)]
    return (*(x * size for x, size in zip(tensors, sizes, strict=False)), *scales)


@exercise("06.fp8_forward", (torch.ones(1, 1), torch.ones(1, 1), 0.5, 0.25),
          (torch.tensor([[1.06, 500.0]]), torch.tensor([[2.0, 1.0]]), 1.0, 1.0), draw=_operands,
          tolerance=1e-5, stars=2, minutes=10,
          mistakes={UNCLAMPED: lambda x, w, sx, sw: fp8_forward(
                        *(t.masked_fill(t.abs() > 464 * s, math.nan) for t, s in ((x, sx), (w, sw))),
                        sx, sw),
                    "the product is to be scaled back": lambda x, w, sx, sw:
                        to_fp8(x, sx) @ to_fp8(w, sw).T,
                    "the operands are to be cast": lambda x, w, sx, sw: x @ w.T})
def fp8_forward(x: Tensor, w: Tensor, x_scale: float, w_scale: float) -> Tensor:
    x8 = (x / x_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    w8 = (w / w_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return x8.float() @ w8.float().T * (x_scale * w_scale)


def _uncast_backward(x: Tensor, w: Tensor, dy: Tensor, sx: float, sw: float,
                     sdy: float) -> tuple[Tensor, Tensor]:
    dy = sdy * to_fp8(dy, sdy, torch.float8_e5m2)
    return dy @ w, dy.T @ x


def _e4m3_backward(x: Tensor, w: Tensor, dy: Tensor, sx: float, sw: float,
                   sdy: float) -> tuple[Tensor, Tensor]:
    dy = sdy * to_fp8(dy, sdy)
    return dy @ to_fp8(w, sw) * sw, dy.T @ to_fp8(x, sx) * sx


@exercise("06.fp8_backward", (*[torch.full((1, 1), 1.06)] * 3, 1.0, 1.0, 1.0),
          draw=lambda r: _operands(r, backward=True), tolerance=1e-5, stars=3, minutes=15,
          mistakes={UNCLAMPED: lambda x, w, dy, sx, sw, sdy: fp8_backward(
                        x.masked_fill(x.abs() > 464 * sx, math.nan),
                        w.masked_fill(w.abs() > 464 * sw, math.nan),
                        dy.masked_fill(dy.abs() >= 61440 * sdy, math.inf), sx, sw, sdy),
                    "all three are cast": _uncast_backward,
                    "gradients are cast to E5M2": _e4m3_backward})
def fp8_backward(x: Tensor, w: Tensor, dy: Tensor, x_scale: float, w_scale: float,
                 dy_scale: float) -> tuple[Tensor, Tensor]:
    x8 = (x / x_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    w8 = (w / w_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    dy8 = (dy / dy_scale).clamp(-57344, 57344).to(torch.float8_e5m2).float()
    return dy8 @ w8 * (dy_scale * w_scale), dy8.T @ x8 * (dy_scale * x_scale)


# 07, when FP8 fails: which row it is, and which layer.

def _row_noise(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1)


def _unequal_rows(r: Random) -> tuple[Tensor, Tensor]:
    x = normal(r, r.randint(2, 6), 5) * 10 ** normal(r, 1)
    sizes = 10 ** normal(r, len(x), 1)
    x, exact = x * sizes, normal(r, len(x), 1) > 0.8
    y = torch.where(exact, x, x + 0.1 * normal(r, len(x), 5))
    silent = torch.arange(len(x))[:, None] == r.randrange(-2, len(x))
    return x * ~silent, y * ~silent


@exercise("07.worst_row",
          (torch.tensor([[1.0, 1.0], [9.0, 9.0]]), torch.tensor([[1.0, 1.5], [9.0, 8.0]])),
          (torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.1]])),
          draw=_unequal_rows, minutes=8, stars=2,
          mistakes={"noise counts in proportion to the row's signal":
                        lambda x, y: int(_row_noise(x, y).argmax()),
                    "0 / 0: a row that is exact is never the worst": lambda x, y:
                        int((x.square().sum(-1) / _row_noise(x, y)).argmin())})
def worst_row(x: Tensor, y: Tensor) -> int:
    noise, signal = (x - y).square().sum(-1), x.square().sum(-1)
    return int(torch.where(noise > 0, noise / signal, 0.0).argmax())


class Trial:
    """`fails(layers)`: whether training fails with these layers in FP8. It counts how often."""

    def __init__(self, culprit: str, most: int):
        self.culprit, self.most, self.asked = culprit, most, 0

    def __call__(self, layers: list[str]) -> bool:
        self.asked += 1
        if self.asked > self.most:
            raise RuntimeError(f"more than {self.most} trainings")
        return self.culprit in layers

    def __repr__(self) -> str:
        return f"fails (because of {self.culprit})"


def _suspects(r: Random) -> tuple[list[str], Trial]:
    layers = [f"block{i}.{name}" for i in range(8) for name in ("qkv", "out", "up", "down")]
    layers = layers[:r.randint(1, 32)]
    return layers, Trial(r.choice(layers), math.ceil(math.log2(len(layers))))


@exercise("07.bisect", (["up"], Trial("up", 0)), (["up", "down"], Trial("down", 1)),
          (["q", "k", "v", "o"], Trial("o", 2)), draw=_suspects, minutes=8, stars=2,
          mistakes={"halve the suspects": lambda layers, fails: layers[0]})
def bisect(layers: list[str], fails: Callable[[list[str]], bool]) -> str:
    while len(layers) > 1:
        half = layers[:len(layers) // 2]
        layers = half if fails(half) else layers[len(layers) // 2:]
    return layers[0]


# 08, recomputation and offload: a block that runs again, and a loss in pieces.

class Watched:
    """A block that says so when a first forward keeps what it computes."""

    def __init__(self, weight: Tensor):
        self.weight, self.calls = weight.detach().requires_grad_(), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = (x @ self.weight.to(x.dtype)).tanh()
        if self.calls == 1 and y.requires_grad:
            raise RuntimeError("the first forward kept its activations; see torch.no_grad()")
        return y

    def __repr__(self) -> str:
        return f"a block of {list(self.weight.shape)}"


def _block(r: Random) -> tuple[Watched, Tensor, Tensor]:
    tokens, width = r.randint(1, 4), r.randint(1, 5)
    return Watched(normal(r, width, width)), normal(r, tokens, width), normal(r, tokens, width)


@exercise("08.recomputed", (Watched(torch.eye(1)), torch.zeros(1, 1), torch.ones(1, 1)),
          draw=_block, tolerance=1e-5, stars=3, minutes=12,
          mistakes={"dy is the gradient of the result; do not leave it out": lambda block, x, dy:
                        recomputed(block, x, torch.ones_like(dy))})
def recomputed(block: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = block(x)                            # forward: only x is kept
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        again = block(x)                        # backward: once more, with its graph
    return y, torch.autograd.grad(again, x, dy)[0]


def _chunks(r: Random, tokens: int = 0, vocab: int = 0) -> tuple[Tensor, Tensor, Tensor, int]:
    tokens, width, vocab = tokens or r.randint(1, 9), r.randint(1, 4), vocab or r.randint(2, 7)
    targets = torch.tensor([r.randrange(vocab) for _ in range(tokens)])
    return normal(r, tokens, width), normal(r, vocab, width), targets, r.randint(1, 4)


def _mean_of_means(h: Tensor, w: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    h = h.detach().requires_grad_()
    losses = [torch.nn.functional.cross_entropy(a @ w.T, b)
              for a, b in zip(h.split(chunk), targets.split(chunk), strict=True)]
    loss = torch.stack(losses).mean()
    return loss.detach(), torch.autograd.grad(loss, h)[0]


@exercise("08.chunked_loss",
          (torch.ones(2, 1), torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1]), 1),
          _chunks(Random(1), 256, 64), draw=_chunks, tolerance=1e-5, stars=3, minutes=15,
          # half of all logits
          most_bytes=lambda h, w, targets, chunk: max(2 * len(h) * len(w), 1 << 14),
          mistakes={"the last chunk may be shorter: divide by all tokens": _mean_of_means})
def chunked_loss(h: Tensor, w: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    loss, dh = torch.zeros(()), torch.empty_like(h)
    for start in range(0, len(h), chunk):
        rows = slice(start, start + chunk)
        logits = h[rows] @ w.T                  # all logits that exist at any time
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        p[torch.arange(len(p)), targets[rows]] -= 1
        loss -= log_p.gather(-1, targets[rows, None]).sum() / len(h)
        dh[rows] = p @ w / len(h)
    return loss, dh


def _moments(r: Random) -> tuple[Tensor, Tensor, float, int]:
    """Dyadic and few bits: the new moment is the same in whatever order one calculates."""
    n = r.randint(1, 20)
    stored = [r.choice((0, r.randrange(256))) * 2.0 ** r.randint(-12, 2) for _ in range(n)]
    return (torch.tensor(stored), torch.tensor([r.choice((0, r.randint(-40, 40))) / 16
                                                for _ in range(n)]),
            r.choice((0.5, 0.75, 0.875)), r.choice((4, 8)))


@exercise("08.moment", (torch.tensor([255.0]), torch.tensor([1.0]), 0.5, 4),
          (torch.tensor([64.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 0.25]), 0.5, 2),
          (torch.zeros(5), torch.zeros(5), 0.5, 4), draw=_moments, tolerance=0, stars=2, minutes=12,
          mistakes={"each block has a scale of its own": lambda v, g, beta, block:
                        moment(v, g, beta, len(v)),
                    "the second moment averages squares": lambda v, g, beta, block:
                        moment(beta * v + (1 - beta) * g.abs(), 0 * g, 1.0, block),
                    "what is stored has eight bits": lambda v, g, beta, block:
                        beta * v + (1 - beta) * g * g})
def moment(v: Tensor, g: Tensor, beta: float, block: int) -> Tensor:
    v = beta * v + (1 - beta) * g.square()
    stored = torch.empty_like(v)
    for start in range(0, len(v), block):
        part = v[start:start + block]
        scale = 2.0 ** torch.ceil(torch.log2(part.max() / 255)) if part.any() else 1.0
        stored[start:start + block] = (part / scale).round() * scale    # codes 0 to 255
    return stored


# 09, predict before you rent: how ranks add, and what fits into one.

def _backwards(values: list[list[float]], turns: int) -> list[list[float]]:
    values, ranks = [list(row) for row in values], len(values)
    for turn in range(turns):
        sent = [values[rank][(rank + turn) % ranks] for rank in range(ranks)]
        for rank in range(ranks):
            values[(rank + 1) % ranks][(rank + turn) % ranks] += sent[rank]
    return values


def _ring(r: Random) -> tuple[list[list[float]], int]:
    n = r.randint(2, 6)
    return [[float(r.randint(-99, 99)) for _ in range(n)] for _ in range(n)], r.randrange(n)


@exercise("09.reduce_scatter", ([[1.0, 2.0], [30.0, 40.0]], 1),
          ([[1.0] * 3, [10.0] * 3, [100.0] * 3], 2), draw=_ring, minutes=12, stars=3,
          mistakes={"in turn t rank r sends chunk r - t": _backwards})
def reduce_scatter(values: list[list[float]], turns: int) -> list[list[float]]:
    ranks = len(values)
    for turn in range(turns):
        sent = [values[rank][(rank - turn) % ranks] for rank in range(ranks)]   # all at once
        for rank in range(ranks):
            values[(rank + 1) % ranks][(rank - turn) % ranks] += sent[rank]
    return values


@exercise("09.micro_batch", (10, 5, 40, 8), (10, 5, 60, 12), (50, 5, 40, 8),
          draw=lambda r: (r.randint(1, 60), r.randint(1, 20), r.randint(20, 200),
                          r.choice((1, 8, 12, 30, 64))), minutes=5,
          mistakes={"micro-batches are of one size: it must divide the batch":
                        lambda states, each, device, batch:
                        max(0, min((device - states) // each, batch)),
                    "0 where not even one fits": lambda states, each, device, batch:
                        max((n for n in range(1, batch + 1)
                             if batch % n == 0 and states + n * each <= device), default=1)})
def micro_batch(state_bytes: int, sequence_bytes: int, device_bytes: int, batch: int) -> int:
    fits = [n for n in range(1, batch + 1)
            if batch % n == 0 and state_bytes + n * sequence_bytes <= device_bytes]
    return max(fits, default=0)


# 12, flash attention: one tile, two partial answers, and backward from a number for each query.

def _tile(r: Random) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, keys, E = r.randint(1, 4), r.randint(1, 5), r.randint(1, 4)
    m, l, acc = normal(r, n, size=3), 0.1 + normal(r, n).abs(), normal(r, n, E)
    if r.random() < 0.3:        # the first tile
        m, l, acc = torch.full((n,), -math.inf), torch.zeros(n), torch.zeros(n, E)
    scores = normal(r, n, keys, size=r.choice((1, 5, 60)))
    return m, l, acc, scores, normal(r, keys, E)


def _kept_its_size(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
                   ) -> tuple[Tensor, Tensor, Tensor]:
    m_new = torch.maximum(m, scores.amax(1))
    p = (scores - m_new[:, None]).exp()
    return m_new, l + p.sum(1), acc + p @ v


def _sum_alone_shrinks(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
                       ) -> tuple[Tensor, Tensor, Tensor]:
    m_new, l_new, _ = step(m, l, acc, scores, v)
    return m_new, l_new, acc + (scores - m_new[:, None]).exp() @ v


def _largest_of_the_tile(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
                         ) -> tuple[Tensor, Tensor, Tensor]:
    m_new = scores.amax(1)
    p, shrink = (scores - m_new[:, None]).exp(), (m - m_new).exp()
    return m_new, l * shrink + p.sum(1), acc * shrink[:, None] + p @ v


@exercise("12.step",
          (torch.tensor([-math.inf]), torch.zeros(1), torch.zeros(1, 1), torch.tensor([[0.0]]),
           torch.tensor([[3.0]])),
          draw=_tile, tolerance=1e-5, stars=2, minutes=12,
          mistakes={"when m grows, what was added so far shrinks by exp(m - m_new)": _kept_its_size,
                    "acc shrinks as l does": _sum_alone_shrinks,
                    "m never falls: a tile may have no larger score": _largest_of_the_tile})
def step(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
         ) -> tuple[Tensor, Tensor, Tensor]:
    m_new = torch.maximum(m, scores.amax(1))
    shrink, p = (m - m_new).exp(), (scores - m_new[:, None]).exp()
    return m_new, l * shrink + p.sum(1), acc * shrink[:, None] + p @ v


def _halves(r: Random) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, E, size = r.randint(1, 4), r.randint(1, 4), r.choice((1, 5, 300))
    lse = [normal(r, n, size=size) for _ in range(2)]
    of = r.randrange(2)
    lse[of][torch.tensor([r.random() < 0.2 for _ in range(n)])] = -math.inf     # saw nothing
    a, b = (normal(r, n, E) * one.isfinite()[:, None] for one in lse)
    return a, lse[0], b, lse[1]


def _overflows(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    total = lse_a.exp() + lse_b.exp()
    return ((a * lse_a.exp()[:, None] + b * lse_b.exp()[:, None]) / total[:, None], total.log())


@exercise("12.merge",
          (torch.tensor([[1.0]]), torch.tensor([0.0]), torch.tensor([[3.0]]), torch.tensor([0.0])),
          draw=_halves, tolerance=1e-5, stars=2, minutes=10,
          mistakes={"whoever saw the larger sum counts more":
                        lambda a, lse_a, b, lse_b: ((a + b) / 2, torch.logaddexp(lse_a, lse_b)),
                    "exp overflows: subtract the larger of the two first": _overflows,
                    "logs do not add up, what they are logs of does":
                        lambda a, lse_a, b, lse_b: (merge(a, lse_a, b, lse_b)[0], lse_a + lse_b)})
def merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(lse_a, lse_b)
    of_a, of_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = of_a + of_b
    return (a * of_a[:, None] + b * of_b[:, None]) / total[:, None], top + total.log()


def _attended(r: Random) -> tuple[Tensor, ...]:
    T, E = r.randint(1, 5), r.randint(1, 4)
    q, k, v, d_out = (normal(r, T, E) for _ in range(4))
    scores = q @ k.T / math.sqrt(E)
    return q, k, v, scores.softmax(1) @ v, scores.logsumexp(1), d_out


def _without_the_rows_sum(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                          d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return backward(q, k, v, torch.zeros_like(out), lse, d_out)


def _unscaled(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
              ) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = backward(q, k, v, out, lse, d_out)
    return dq * math.sqrt(q.shape[1]), dk * math.sqrt(q.shape[1]), dv


@exercise("12.backward", _attended(Random(1)), draw=_attended, tolerance=1e-5,
          stars=3, minutes=20,
          mistakes={"of dp, what all of a row have in common goes: the sum of d_out times out":
                        _without_the_rows_sum,
                    "scores were divided by sqrt(E), and so are their gradients": _unscaled})
def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
             ) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[1] ** -0.5
    p = (q @ k.T * scale - lse[:, None]).exp()      # the softmax, without looking for a maximum
    ds = p * (d_out @ v.T - (d_out * out).sum(1, keepdim=True)) * scale
    return ds @ k, ds.T @ q, p.T @ d_out
# 13, efficient attention: a mask, and a state in place of one.

def _lengths(r: Random) -> tuple[Tensor]:
    return (torch.tensor([r.randint(1, 5) for _ in range(r.randint(1, 5))]),)


def _ids(lengths: Tensor) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths)


@exercise("13.document_mask", (torch.tensor([1, 2]),), (torch.tensor([3]),), draw=_lengths,
          tolerance=0, minutes=8,
          mistakes={"a token does not see the future of its document": lambda lengths:
                        _ids(lengths)[:, None] == _ids(lengths)[None],
                    "a document does not see the one before it": lambda lengths:
                        torch.ones(int(lengths.sum()), int(lengths.sum())).tril().bool(),
                    "a token sees itself": lambda lengths: document_mask(lengths).tril(-1)})
def document_mask(lengths: Tensor) -> Tensor:
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    return (ids[:, None] == ids[None]).tril()


def _mapped(r: Random, T: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    T, features = T or r.randint(1, 6), r.randint(1, 4)
    return (normal(r, T, features).exp(), normal(r, T, features).exp(),
            normal(r, T, r.randint(1, 4)))


def _unnormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T).tril() @ v


def _of_the_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.T @ v) / (q @ k.sum(0))[:, None]


def _after_reading(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.T).tril(-1)
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-30)


@exercise("13.linear_attention",
          (torch.ones(2, 1), torch.ones(2, 1), torch.tensor([[1.0], [3.0]])),
          _mapped(Random(1), 256), draw=_mapped, tolerance=1e-5, minutes=12, stars=2,
          most_bytes=lambda q, k, v: max(2 * len(q) ** 2, 1 << 14),     # half of a (T, T) matrix
          mistakes={"weights add up to 1: divide by their sum": _unnormalised,
                    "a token sees its past alone": _of_the_whole,
                    "a token sees itself: add it to the state before you read": _after_reading})
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, total, out = torch.zeros(k.shape[1], v.shape[1]), torch.zeros(k.shape[1]), []
    for t in range(len(q)):
        state = state + k[t][:, None] * v[t]
        total = total + k[t]
        out.append(q[t] @ state / (q[t] @ total))
    return torch.stack(out)


# 14, data parallel and ZeRO: one number for a gradient that lies in parts.

def _parts(r: Random) -> tuple[list[list[Tensor]], float]:
    ranks, parameters = r.randint(1, 4), r.randint(1, 3)
    return ([[normal(r, r.randint(0, 3)) for _ in range(parameters)] for _ in range(ranks)],
            r.choice((0.1, 1.0, 100.0)))


def _clip_own(parts: list[list[Tensor]], most: float) -> list[float]:
    return [clip_factors([one], most)[0] for one in parts]


@exercise("14.clip", ([[torch.tensor([3.0])], [torch.tensor([4.0])]], 1.0),
          ([[torch.tensor([0.3])], [torch.tensor([0.4])]], 1.0),
          draw=_parts, tolerance=1e-4, stars=2, minutes=8,
          mistakes={"one norm over all ranks: theirs are parts of the same gradient": _clip_own,
                    "squares add up, norms do not": lambda parts, most:
                        [min(1.0, most / max(sum(g.norm().item() for one in parts for g in one),
                                             1e-30))] * len(parts),
                    "a short gradient stays as it is": lambda parts, most:
                        [most / max(math.sqrt(sum(g.square().sum().item() for one in parts
                                                  for g in one)), 1e-30)] * len(parts)})
def clip_factors(parts: list[list[Tensor]], most: float) -> list[float]:
    squares = [sum(g.square().sum().item() for g in one) for one in parts]      # on each rank
    norm = math.sqrt(sum(squares))                                              # an all-reduce
    return [min(1.0, most / norm) if norm else 1.0] * len(parts)
