"""The exercises of the course that are arithmetic; those that take tensors are in
`lpkit.course.tensor_exercises`, kernels in `lpkit.course.kernel_exercises`, and what runs on several
processes in `lpkit.course.rank_exercises`. The notebooks ask the questions.

Each definition stands under the cases that tell it from what somebody plausibly writes instead,
and what to say to who did.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from statistics import fmean
from typing import Any

from lpkit.course import kernel_exercises, learner, rank_exercises, tensor_exercises
from lpkit.course.judge import Exercise, Verdict, adding_to

__all__ = ["EXERCISES", "Exercise", "Verdict", "check"]

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)


def check(exercise: Exercise, attempt: Callable[..., Any]) -> Verdict:
    """As the judge says, and the learner's file hears of it."""
    return learner.attempted(exercise, exercise.judged(attempt))


# 00, start here: what a loss means, and what a step costs.

@exercise("00.uniform_loss", (2,), (256,), (50_304,), draw=lambda r: (r.randint(2, 300_000),),
          mistakes={"those are bits; nats come from the natural logarithm": math.log2})
def uniform_loss(vocab: int) -> float:
    return math.log(vocab)


@exercise("00.bits_per_byte", (math.log(2), 1.0), (2.0, 1.0), (3.3, 4.2),
          draw=lambda r: (r.uniform(0.1, 12), r.uniform(1, 6)),
          mistakes={"you left it in nats": lambda loss, size: loss / size,
                    "a token is several bytes, which share its loss":
                        lambda loss, size: loss / math.log(2) * size})
def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token


@exercise("00.step_seconds", (1e6, 1e3, 1e12, 1.0), (124e6, 524_288, 989e12, 0.4),
          (70e9, 4e6, 64 * 989e12, 0.38),
          draw=lambda r: (10 ** r.uniform(6, 12), 10 ** r.uniform(3, 7), 10 ** r.uniform(11, 18),
                          r.uniform(0.05, 1)),
          mistakes={"that is the forward pass alone":
                        lambda N, t, peak, mfu: 2 * N * t / peak / mfu,
                    "at a lower utilisation a step takes longer":
                        lambda N, t, peak, mfu: 6 * N * t / peak * mfu})
def step_seconds(parameters: float, tokens: float, peak_flops: float, mfu: float) -> float:
    return 6 * parameters * tokens / (peak_flops * mfu)     # 2 forward, 4 backward


# 01, memory math. Bytes.

@exercise("01.state_bytes", (1_000, 1, 0), (1_000, 4, 3), (7_500_000_000, 64, 1),
          (7_500_000_000, 64, 2),
          draw=lambda r: (r.randint(1, 10**11), r.choice((1, 2, 4, 8, 64, 1024)), r.randrange(4)),
          mistakes={"each stage shards one thing more":
                        lambda N, devices, stage: 16 * N / (devices if stage else 1)})
def state_bytes(parameters: int, devices: int, stage: int) -> float:
    # 1 shards the optimizer's 12 bytes, 2 the gradients' as well, 3 the weights' too
    shared = [devices if stage >= needed else 1 for needed in (1, 2, 3)]
    return parameters * (12 / shared[0] + 2 / shared[1] + 2 / shared[2])


@exercise("01.loss_bytes", (1, 1, 256), (16, 1024, 50_304),
          draw=lambda r: (r.randint(1, 64), r.randint(1, 8192), r.randint(2, 200_000)),
          mistakes={"there are three of them": lambda B, T, V: 4 * B * T * V})
def loss_bytes(sequences: int, context: int, vocab: int) -> int:
    return 3 * 4 * sequences * context * vocab


@exercise("01.score_bytes", (1, 1, 8, 4), (2, 12, 1024, 2),
          draw=lambda r: (r.randint(1, 64), r.randint(1, 64), r.randint(8, 8192), r.choice((2, 4))),
          mistakes={"each head has its own":
                        lambda B, H, T, itemsize: B * T * (T * itemsize - 4),
                    "a flash kernel keeps a number per token and head":
                        lambda B, H, T, itemsize: B * H * T * T * itemsize})
def score_bytes(sequences: int, heads: int, context: int, itemsize: int) -> int:
    return sequences * heads * context * (context * itemsize - 4)


# 02, where the time goes. FLOPs, bytes, FLOP/s, bytes/s.

@exercise("02.intensity", (1, 1, 1, 4), (4096, 768, 256, 2),
          draw=lambda r: (r.randint(1, 9999), r.randint(1, 9999), r.randint(1, 9999),
                          r.choice((1, 2, 4))),
          mistakes={"the result is written, too":
                        lambda M, N, K, itemsize: 2 * M * N * K / ((M * K + K * N) * itemsize),
                    "a multiplication and an addition are two":
                        lambda M, N, K, itemsize: M * N * K / ((M * K + K * N + M * N) * itemsize)})
def intensity(M: int, N: int, K: int, itemsize: int) -> float:
    return 2 * M * N * K / ((M * K + K * N + M * N) * itemsize)


# who rounds up to a whole n is right
@exercise("02.smallest_square", (200e9, 40e9, 4), (989.4e12, 4.8e12, 2), tolerance=0.01,
          draw=lambda r: (10 ** r.uniform(13, 15), 10 ** r.uniform(10.5, 11), r.choice((1, 2, 4))),
          mistakes={"three matrices move":
                        lambda peak, speed, itemsize: 0.5 * itemsize * peak / speed})
def smallest_square(peak_flops: float, bytes_per_second: float, itemsize: int) -> float:
    # 2 n^3 / (3 n^2 itemsize) FLOPs per byte meet the ridge, peak / speed
    return 1.5 * itemsize * peak_flops / bytes_per_second


@exercise("02.attention_share", (256, 256), (4096, 8192),
          draw=lambda r: (r.randint(32, 16384), r.randint(1, 200_000)),
          mistakes={"a share of all, themselves included":
                        lambda width, context: context / (6 * width)})
def attention_share(width: int, context: int) -> float:
    return context / (6 * width + context)      # 4 T D of 2 * 12 D^2 + 4 T D FLOPs a token


# 03, number formats.

def _no_subnormals(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    return (1 + fraction) * 2.0 ** (field - 2 ** (exponent_bits - 1) + 1)


def _code(r: Random) -> tuple[int, int, int]:
    exponent_bits, mantissa_bits = r.randint(2, 5), r.randint(1, 3)
    return r.randrange(2 ** (exponent_bits + mantissa_bits)), exponent_bits, mantissa_bits


@exercise("03.value_of", (0, 2, 1), (1, 2, 1), (7, 2, 1), (5, 4, 3), (126, 4, 3), (75, 5, 2),
          draw=_code, mistakes={"with exponent field 0 there is no leading one": _no_subnormals})
def value_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    bias = 2 ** (exponent_bits - 1) - 1
    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    return (1 + fraction) * 2.0 ** (field - bias) if field else fraction * 2.0 ** (1 - bias)


@exercise("03.stochastic", (1.25, 1.0, 0.2), (1.25, 1.0, 0.3), (3.0, 0.5, 0.0), (0.75, 0.5, 0.6),
          draw=lambda r: (r.uniform(0, 8), r.choice((0.125, 0.5, 1.0, 2.0)), r.random()),
          mistakes={"that is the nearest; u decides": lambda x, step, u: round(x / step) * step,
                    "up when u is below the remainder":
                        lambda x, step, u: (x // step + (u >= x / step - x // step)) * step})
def stochastic(x: float, step: float, u: float) -> float:
    down = x // step
    return (down + (u < x / step - down)) * step


@exercise("03.mx_exponent", (448.0, 8), (1.0, 8), (0.75, 2), (6.5, 2), (1e-3, 15),
          draw=lambda r: (2 ** r.uniform(-30, 30), r.choice((2, 8, 15))),
          mistakes={"the exponent is rounded down":
                        lambda amax, largest: round(math.log2(amax)) - largest,
                    "below 1 exponents are negative":
                        lambda amax, largest: max(round(amax), 1).bit_length() - 1 - largest})
def mx_exponent(amax: float, largest_exponent: int) -> int:
    return math.frexp(amax)[1] - 1 - largest_exponent       # frexp's fraction is in [1/2, 1)


# 04, scaling recipes: who shares a scale, what an integer pays for an outlier, where a delayed
# scale comes from.

@exercise("04.shared_by", (256, 512, 1, 32), (256, 512, 0, 0), (256, 512, 1, 0),
          (256, 512, 128, 128),
          draw=lambda r: (r.choice((256, 4096)), r.choice((512, 1024)), r.choice((0, 1, 16, 128)),
                          r.choice((0, 1, 32, 128))),
          mistakes={"a side of 0 spans the axis": lambda rows, columns, high, wide: high * wide})
def shared_by(rows: int, columns: int, block_rows: int, block_columns: int) -> int:
    return (block_rows or rows) * (block_columns or columns)


# 52.9 dB less the crest, as notebook 03 rounds it, is right
@exercise("04.int8_db", (4.5,), (12.0,), draw=lambda r: (r.uniform(1.1, 12),), tolerance=0.0012,
          mistakes={"the noise is a twelfth of the spacing's square":
                        lambda crest: 20 * math.log10(127 / crest)})
def int8_db(crest: float) -> float:
    return 10 * math.log10(12 * (127 / crest) ** 2)


@exercise("04.delayed_scale", ([4.48], 0, 448.0), ([1.0, 8.0, 2.0], 0, 448.0),
          ([1.0, 2.0, 9.0], 1, 57344.0),
          draw=lambda r: ([10 ** r.uniform(-3, 3) for _ in range(r.randint(1, 16))], r.randrange(4),
                          r.choice((448.0, 57344.0))),
          mistakes={"the largest of the history, not the newest":
                        lambda history, margin, largest: history[0] * 2**margin / largest,
                    "all of the history counts":
                        lambda history, margin, largest: max(history[:2]) * 2**margin / largest})
def delayed_scale(history: list[float], margin: int, largest: float) -> float:
    return max(history) * 2**margin / largest


# 05, mixed precision: the update that a weight does not feel, the scale that saves a gradient, the
# bytes of it.

def _update(r: Random) -> tuple[float, float]:
    weight = r.randrange(128, 256) * 2.0 ** r.randint(-16, -4)      # a bf16 number
    return weight, 2.0 ** (math.floor(math.log2(weight)) - 8) * r.choice((0.3, 0.7, 0.9, 1.1, 1.7))


@exercise("05.is_lost", (1.0, 1e-3), (1.0, 5e-3), (0.01953125, 1e-5), (0.01953125, 1e-4),
          draw=_update,
          mistakes={"from half the gap on it is rounded up":
                        lambda w, update: update < 2.0 ** (math.floor(math.log2(w)) - 7),
                    "half the gap, not a quarter":
                        lambda w, update: update < 2.0 ** (math.floor(math.log2(w)) - 9)})
def is_lost(weight: float, update: float) -> bool:
    return update < 2.0 ** (math.floor(math.log2(weight)) - 8)      # half of the gap


@exercise("05.scale_for", (2.0**-14,), (1e-6,), (1e-9,), (0.5,),
          draw=lambda r: (2.0 ** r.uniform(-40, 4),),
          mistakes={"2^-24 is the smallest subnormal number":
                        lambda gradient: max(1.0, 2.0 ** math.ceil(-24 - math.log2(gradient))),
                    "1 or more": lambda gradient: 2.0 ** math.ceil(-14 - math.log2(gradient))})
def scale_for(gradient: float) -> float:
    return max(1.0, 2.0 ** math.ceil(-14 - math.log2(gradient)))


@exercise("05.state_bytes", (1, False), (124_000_000, True),
          draw=lambda r: (r.randint(1, 10**11), r.random() < 0.5),
          mistakes={"the masters stay":
                        lambda parameters, low: parameters * ((2 if low else 4) + 8)})
def mixed_state_bytes(parameters: int, low_precision_weights: bool) -> int:
    return parameters * (4 + 8 + (2 if low_precision_weights else 0))


# 06, FP8 training: the noise of a product, the layers to keep, the time to an equal loss. Decibels,
# seconds.

@exercise("06.product_db", (31.5, 31.5), (31.5, 25.5), (40.0, 20.0),
          draw=lambda r: (r.uniform(5, 60), r.uniform(5, 60)),
          mistakes={"shares of noise add up, decibels do not": lambda x, w: (x + w) / 2,
                    "the other operand's noise is there, too": min})
def product_db(x: float, w: float) -> float:
    return -10 * math.log10(10 ** (-x / 10) + 10 ** (-w / 10))


def _by_mean_decibel(samples: Sequence[tuple[str, float]], budget: int) -> list[str]:
    decibels: dict[str, list[float]] = {}
    for layer, db in samples:
        decibels.setdefault(layer, []).append(db)
    return sorted(decibels, key=lambda layer: fmean(decibels[layer]))[:budget]


def _samples(r: Random) -> tuple[list[tuple[str, float]], int]:
    layers = ["q", "k", "v", "o", "up", "down", "head"][:r.randint(2, 7)]
    samples = [(layer, r.uniform(10, 40)) for layer in layers for _ in range(r.randint(1, 4))]
    return samples, r.randint(0, 3)


@exercise("06.keep", ([("head", 30.0), ("up", 20.0)], 1), draw=_samples, minutes=8, stars=2,
          mistakes={"average the noise, not its decibels": _by_mean_decibel})
def keep(samples: Sequence[tuple[str, float]], budget: int) -> list[str]:
    noise: dict[str, list[float]] = {}
    for layer, db in samples:
        noise.setdefault(layer, []).append(10 ** (-db / 10))
    return sorted(noise, key=lambda layer: -fmean(noise[layer]))[:budget]


def _losses(r: Random) -> tuple[list[float], float, list[float], float]:
    ours, theirs = (list(accumulate([r.uniform(8, 9)] + [-r.uniform(0.1, 0.9)
                                                         for _ in range(r.randint(0, 9))]))
                    for _ in range(2))
    return ours, r.uniform(0.2, 2), theirs, r.uniform(0.2, 2)


def _at_equal_steps(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
                    base_seconds: float) -> float:
    return base_seconds / seconds * base_losses[-1] / losses[-1]


def _whole_steps(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
                 base_seconds: float) -> float:
    steps = next((step for step, loss in enumerate(losses, 1) if loss <= base_losses[-1]), math.inf)
    return len(base_losses) * base_seconds / (steps * seconds)


@exercise("06.speedup", ([4.0, 3.0], 0.5, [4.0, 3.0], 1.0), draw=_losses, minutes=10, stars=2,
          mistakes={"compare times at an equal loss": _at_equal_steps,
                    "it gets there between two steps": _whole_steps})
def speedup(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
            base_seconds: float) -> float:
    target = base_losses[-1]
    for step, loss in enumerate(losses, 1):
        if loss <= target:
            above = losses[step - 2] if step > 1 else loss
            part = (loss - target) / (loss - above) if above > loss else 0.0
            return len(base_losses) * base_seconds / ((step - part) * seconds)
    return 0.0


# 07, when FP8 fails. Decibels, shares, powers of two.

def _of_magnitudes(x: Sequence[float], y: Sequence[float]) -> float:
    return 10 * math.log10(sum(map(abs, x)) / sum(abs(a - b) for a, b in zip(x, y, strict=True)))


def _noisy(r: Random) -> tuple[tuple[float, ...], tuple[float, ...]]:
    x = tuple(r.gauss(0, 2) for _ in range(5))
    return x, tuple(a + r.gauss(0, 0.1) for a in x)


@exercise("07.sqnr_db", ((1.0, 0.0), (0.9, 0.0)), ((3.0, -1.0, 0.5), (3.25, -1.0, 0.5)),
          ((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 3.5)), draw=_noisy,
          mistakes={"it is a ratio of energies: squares": _of_magnitudes})
def sqnr_db(x: Sequence[float], y: Sequence[float]) -> float:
    noise = sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
    return 10 * math.log10(sum(a * a for a in x) / noise)


def _grown(r: Random) -> tuple[tuple[float, ...], float]:
    amax = r.uniform(0.5, 4)
    beyond = (0.0, 0.5, 1.0, 1.0345, 1.037, 1.05, 2.0, -1.0345, -1.5)
    return (amax / 3, *(amax * r.choice(beyond) for _ in range(6))), amax


@exercise("07.saturated", ((1.0, 2.0), 1.0), ((1.02, -3.0, 0.5), 1.0), ((0.0, 0.0, 4.0, -1.0), 2.0),
          draw=_grown,
          mistakes={"up to 464 it is rounded to 448":
                        lambda x, amax: sum(abs(a) > amax for a in x) / sum(a != 0 for a in x),
                    "of the non-zero elements":
                        lambda x, amax: sum(abs(a) > amax * 464 / 448 for a in x) / len(x)})
def saturated(x: Sequence[float], amax: float) -> float:
    nonzero = [abs(a) for a in x if a]      # the last spacing is 32
    return sum(a > amax * 464 / 448 for a in nonzero) / len(nonzero)


# not just above a power of two, where rounding still saves it
@exercise("07.margin", (1.0,), (2.0,), (3.0,), (64.0,),
          draw=lambda r: (r.uniform(1.04, 2) * 2 ** r.randrange(10),),
          mistakes={"round up": lambda growth: int(math.log2(growth))})
def margin(growth: float) -> int:
    return math.ceil(math.log2(growth))


# 08, recomputation and offload. Bytes, and numbers of blocks.

def _without_the_block(layers: int, block: int, kept: int, budget: int) -> int:
    fits = [n for n in range(1, layers + 1)
            if sum(kept if i % n == 0 else block for i in range(layers)) <= budget]
    return max(fits, default=0)


@exercise("08.every", (4, 10, 1, 12), (4, 10, 1, 22), (4, 10, 1, 25), minutes=10, stars=2,
          draw=lambda r: (r.randint(1, 40), r.randint(4, 40), r.randint(1, 3), r.randint(5, 900)),
          mistakes={"at the peak the last block is there whole": _without_the_block})
def every(layers: int, block: int, kept: int, budget: int) -> int:
    fits = [n for n in range(1, layers + 1)
            if sum(kept if i % n == 0 else block for i in range(layers - 1)) + block <= budget]
    return max(fits, default=0)


@exercise("08.moment_bytes", (256, 256), (1000, 256), (124_000_000, 2048),
          draw=lambda r: (r.randint(1, 10**9), r.choice((64, 128, 256, 2048))),
          mistakes={"the scales are bytes, too": lambda parameters, block: 2 * parameters,
                    "a block that is not full has a scale":
                        lambda parameters, block: 2 * (parameters + 4 * (parameters // block))})
def moment_bytes(parameters: int, block: int) -> int:
    return 2 * (parameters + 4 * math.ceil(parameters / block))


@exercise("08.segment", (64, 1, 1), (64, 16, 1), (10, 3, 2), minutes=6, stars=2,
          draw=lambda r: (r.randint(1, r.choice((4, 128))), r.randint(1, 40), r.randint(1, 6)),
          mistakes={"a checkpoint is smaller than a block":
                        lambda layers, block, kept: round(math.sqrt(layers)),
                    "segments are whole: try each number of blocks": lambda layers, block, kept:
                        max(1, round(math.sqrt(layers * kept / block)))})
def segment(layers: int, block: int, kept: int) -> int:
    # a checkpoint for each segment, and one segment whole
    return min(range(1, layers + 1), key=lambda n: math.ceil(layers / n) * kept + n * block)


# 09, predict before you rent. Micro-batches, tokens, ranks.

@exercise("09.micro_batches", (1, 0.5), (2, 0.5), (8, 0.125), (16, 0.11),
          draw=lambda r: (r.randint(1, 64), r.uniform(0.02, 0.6)),
          mistakes={"a share of the step, the bubble included":
                        lambda stages, most: max(1, math.ceil((stages - 1) / most))})
def micro_batches(stages: int, most: float) -> int:
    # (p - 1) of (m + p - 1) turns are idle
    return max(1, math.ceil((stages - 1) * (1 - most) / most))


@exercise("09.tokens", (1.0, 1.0, 6e12, 0.5, 1e9), (250_000.0, 3.5, 989.4e12, 0.4, 70.6e9),
          draw=lambda r: (10 ** r.uniform(2, 7), r.uniform(0.5, 10), 10 ** r.uniform(14, 16),
                          r.uniform(0.1, 0.7), 10 ** r.uniform(8, 12)),
          mistakes={"no device reaches its peak": lambda dollars, price, peak, mfu, N:
                        dollars / price * 3600 * peak / (6 * N),
                    "the price is for an hour": lambda dollars, price, peak, mfu, N:
                        dollars / price * peak * mfu / (6 * N)})
def tokens(dollars: float, price_per_hour: float, peak_flops: float, mfu: float,
           parameters: float) -> float:
    return dollars / price_per_hour * 3600 * peak_flops * mfu / (6 * parameters)


def _powers_of_two(states: float, device: float, kv_heads: int) -> int:
    fits = [n for n in (1, 2, 4, 8, 16, 32) if n <= kv_heads and states <= n * device]
    return min(fits, default=0)


@exercise("09.tensor_ranks", (60e9, 80e9, 8), (160e9, 80e9, 8),
          draw=lambda r: (10 ** r.uniform(9, 12.5), r.choice((24e9, 80e9, 141e9, 192e9)),
                          r.choice((1, 4, 6, 8, 10, 12, 16))),
          mistakes={"the heads must come out even":
                        lambda states, device, kv_heads: math.ceil(states / device),
                    "not only powers of two divide them": _powers_of_two})
def tensor_ranks(state_bytes: float, device_bytes: float, kv_heads: int) -> int:
    fits = [n for n in range(1, kv_heads + 1)
            if kv_heads % n == 0 and state_bytes <= n * device_bytes]
    return min(fits, default=0)


# 12, flash attention. Bytes, tiles.

@exercise("12.kept_bytes", (1, 1, 8, 4, 4, True), (1, 1, 8, 4, 4, False),
          (2, 12, 1024, 64, 2, True), (2, 12, 1024, 64, 2, False),
          draw=lambda r: (r.randint(1, 64), r.randint(1, 64), r.randint(8, 8192),
                          r.choice((16, 64, 128)), r.choice((2, 4)), r.random() < 0.5), minutes=5,
          mistakes={"the log of a sum is kept in float32, in 16 bits too":
                        lambda B, H, T, E, itemsize, flash: B * H * T * itemsize
                        * (4 * E + 1 if flash else 3 * E + T),
                    "flash keeps the answer as well": lambda B, H, T, E, itemsize, flash:
                        B * H * T * (3 * E * itemsize + (4 if flash else T * itemsize)),
                    "half of the scores are masked, and kept all the same":
                        lambda B, H, T, E, itemsize, flash: B * H * T * (
                        4 * E * itemsize + 4 if flash else (3 * E + (T + 1) / 2) * itemsize)})
def attention_kept_bytes(B: int, H: int, T: int, E: int, itemsize: int, flash: bool) -> int:
    if flash:
        return B * H * T * (4 * E * itemsize + 4)
    return B * H * T * (3 * E + T) * itemsize


def _causal(T: int, tile: int) -> int:
    return math.ceil(T / tile) * (math.ceil(T / tile) + 1) // 2


@exercise("12.tiles", (128, 128, 128), (256, 128, 256), (300, 128, 300), (512, 128, 129),
          draw=lambda r: (r.randint(1, 3000), r.choice((16, 64, 128)), r.randint(1, 3000)),
          minutes=8, stars=2,
          mistakes={"the window is that of the tile's first query, and its last sees more keys":
                        lambda T, tile, window: sum(math.ceil(min(window, first + 1) / tile)
                                                    for first in range(0, T, tile)),
                    "the future is skipped": lambda T, tile, window: math.ceil(T / tile) ** 2,
                    "what the window leaves out is skipped, too":
                        lambda T, tile, window: _causal(T, tile),
                    "the last tile may be short, and is visited":
                        lambda T, tile, window: visited_tiles(T // tile * tile, tile, window)})
def visited_tiles(T: int, tile: int, window: int) -> int:
    visited = 0
    for first in range(0, T, tile):
        last = min(first + tile, T)                     # of the queries; no key lies beyond
        begin = max(0, first - window + 1)              # the oldest key that the first one sees
        visited += math.ceil((last - begin) / tile)
    return visited


# 13, efficient attention: what a query sees.

@exercise("13.window_pairs", (4, 8), (4, 2), (1, 1), (4096, 256),
          draw=lambda r: (r.randint(1, 9000), r.randint(1, 600)), minutes=5,
          mistakes={"the first queries have not so many keys yet": lambda T, window: T * window,
                    "a window may be longer than the sequence": lambda T, window:
                        window * (window + 1) // 2 + (T - window) * window,
                    "that is full attention": lambda T, window: T * (T + 1) // 2})
def window_pairs(T: int, window: int) -> int:
    window = min(window, T)
    return window * (window + 1) // 2 + (T - window) * window   # the first ones, then all others


# 14, data parallel and ZeRO. Bytes that a rank sends, rows that it has, messages.

@exercise("14.sent_bytes", (4_000, 2, 0, 1), (4_000, 4, 3, 1), (4_000, 4, 2, 4),
          draw=lambda r: (10 ** r.uniform(3, 12), r.choice((2, 3, 8, 64)), r.randrange(4),
                          r.randint(1, 16)), minutes=8, stars=2,
          mistakes={"a rank does not send its own part to itself":
                        lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, stage, pieces) * ranks / (ranks - 1),
                    "whole gradients wait for the last micro-batch, and travel once":
                        lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, max(stage, 2), pieces),
                    "ZeRO 2 and 3 send in every micro-batch": lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, stage, 1),
                    "that is the paper's ZeRO 2, whose weights stay whole; FSDP2 gathers them in "
                    "each micro-batch": lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, stage, pieces)
                        * ((pieces + 1) / (2 * pieces) if stage == 2 else 1),
                    "ZeRO 3 gathers once for forward and once for backward":
                        lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, min(stage, 2), pieces)})
def sent_bytes(nbytes: float, ranks: int, stage: int, micro_batches: int) -> float:
    rounds = micro_batches * stage if stage > 1 else 2      # of 3: two gathers and one scatter
    return rounds * (ranks - 1) / ranks * nbytes


@exercise("14.rows", (4, 2, 1), (5, 2, 1), (5, 4, 2), (5, 4, 3), (2, 4, 3),
          draw=lambda r: (r.randint(1, 40), (ranks := r.randint(1, 9)), r.randrange(ranks)),
          minutes=5,
          mistakes={"each gets as many as the first, rounded up: none are left over":
                        lambda rows, ranks, rank:
                        (rank * (rows // ranks), (rank + 1) * (rows // ranks)),
                    "there may be fewer rows than ranks: nobody has rows beyond the last":
                        lambda rows, ranks, rank: (rank * math.ceil(rows / ranks),
                                                   (rank + 1) * math.ceil(rows / ranks)),
                    "one more for the first ones is another cut: all but the last have as many":
                        lambda rows, ranks, rank:
                        tuple(one * (rows // ranks) + min(one, rows % ranks)
                              for one in (rank, rank + 1))})
def rows_of_rank(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    each = math.ceil(rows / ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def _in_order(sizes: list[int], most: int) -> list[list[int]]:
    found: list[list[int]] = []
    for size in sizes:
        if found and sum(found[-1]) + size <= most:
            found[-1].append(size)
        else:
            found.append([size])
    return found


def _until_full(sizes: list[int], most: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for size in sizes[::-1]:
        if sum(found[-1]) >= most:
            found.append([])
        found[-1].append(size)
    return found


@exercise("14.buckets", ([4], 8), ([4, 3, 2], 5), ([1, 20, 1], 8), ([1, 2, 3, 4, 5], 6),
          draw=lambda r: ([r.randint(1, 9) for _ in range(r.randint(1, 12))], r.randint(1, 20)),
          minutes=8, stars=2,
          mistakes={"backward has the last parameters' gradients first": _in_order,
                    "a bucket holds `most` at most, unless one alone is larger": _until_full,
                    "that is a message for each parameter":
                        lambda sizes, most: [[size] for size in sizes[::-1]]})
def buckets(sizes: list[int], most: int) -> list[list[int]]:
    found: list[list[int]] = []
    for size in sizes[::-1]:
        if found and sum(found[-1]) + size <= most:
            found[-1].append(size)
        else:
            found.append([size])
    return found


# 15, multi-GPU FP8. What a cast saves on the way, how often to save, and who reads what.

def _shapes(r: Random) -> tuple[list[tuple[int, int]], list[bool], int]:
    shapes = [(r.randint(1, 99), r.randint(1, 99)) for _ in range(r.randint(1, 5))]
    return shapes, [r.random() < 0.5 for _ in shapes], r.choice((2, 3, 8))


def _unpadded(shapes: list[tuple[int, int]], cast: list[bool], ranks: int) -> float:
    whole = sum(rows * columns * (1 if eight_bits else 4)
                for (rows, columns), eight_bits in zip(shapes, cast))
    return (ranks - 1) / ranks * whole


def _others_in_bf16(shapes: list[tuple[int, int]], cast: list[bool], ranks: int) -> float:
    eight = gathered_bytes(shapes, [True] * len(shapes), ranks)
    return 2 * eight - gathered_bytes([one for one, is_cast in zip(shapes, cast) if is_cast],
                                      [True] * sum(cast), ranks)


@exercise("15.gathered_bytes", ([(4, 8)], [True], 2), ([(4, 8), (8, 1)], [True, False], 2),
          draw=_shapes, minutes=8, stars=2,
          mistakes={"a rank does not send its own part to itself":
                        lambda shapes, cast, ranks: gathered_bytes(shapes, cast, ranks)
                        * ranks / (ranks - 1),
                    "what is not cast travels as it rests, in float32": _others_in_bf16,
                    "parts of one message are of one size: rows are rounded up": _unpadded})
def gathered_bytes(shapes: list[tuple[int, int]], cast: list[bool], ranks: int) -> float:
    whole = 0
    for (rows, columns), eight_bits in zip(shapes, cast):
        whole += math.ceil(rows / ranks) * ranks * columns * (1 if eight_bits else 4)
    return (ranks - 1) / ranks * whole


@exercise("15.interval", (50.0, 100.0, 1), (60.0, 1e6, 100), (60.0, 1.825e8, 16_384),
          draw=lambda r: (10 ** r.uniform(0, 3), 10 ** r.uniform(5, 9), r.randint(1, 20_000)),
          minutes=6, stars=2,
          mistakes={"each of them may fail: all together do so `devices` times as often":
                        lambda save, apart, devices: math.sqrt(2 * save * apart),
                    "a failure costs half an interval on average":
                        lambda save, apart, devices: math.sqrt(save * apart / devices),
                    "that is how often they fail":
                        lambda save, apart, devices: apart / devices})
def interval(save_seconds: float, apart_seconds: float, devices: int) -> float:
    # of each second save / t is spent on saving, and t / 2 / (apart / devices) lost: least in t
    return math.sqrt(2 * save_seconds * apart_seconds / devices)


def _of_every_file(rows: int, wrote: int, reads: int, rank: int) -> list[tuple[int, int, int]]:
    start, stop = rows_of_rank(rows, reads, rank)
    parts = (rows_of_rank(rows, wrote, writer) for writer in range(wrote))
    return [(writer, max(start, first), min(stop, last))
            for writer, (first, last) in enumerate(parts)]


def _from_its_first(rows: int, wrote: int, reads: int, rank: int) -> list[tuple[int, int, int]]:
    return [(writer, first - rows_of_rank(rows, wrote, writer)[0],
             last - rows_of_rank(rows, wrote, writer)[0])
            for writer, first, last in pieces(rows, wrote, reads, rank)]


@exercise("15.pieces", (4, 2, 1, 0), (4, 1, 2, 1), (5, 2, 3, 1),
          draw=lambda r: (r.randint(1, 40), r.randint(1, 6), (reads := r.randint(1, 6)),
                          r.randrange(reads)), minutes=10, stars=2,
          mistakes={"leave out files that have nothing for it": _of_every_file,
                    "rows count from the parameter's first, not from the file's": _from_its_first,
                    "that is the whole of each file; only the rows of this rank are asked for":
                        lambda rows, wrote, reads, rank:
                        [(writer, *rows_of_rank(rows, wrote, writer))
                         for writer, *_ in pieces(rows, wrote, reads, rank)]})
def pieces(rows: int, wrote: int, reads: int, rank: int) -> list[tuple[int, int, int]]:
    def part(ranks: int, rank: int) -> tuple[int, int]:
        each = math.ceil(rows / ranks)
        return min(rank * each, rows), min((rank + 1) * each, rows)

    start, stop = part(reads, rank)
    found = []
    for writer in range(wrote):
        first, last = part(wrote, writer)
        if max(start, first) < min(stop, last):
            found.append((writer, max(start, first), min(stop, last)))
    return found


EXERCISES |= tensor_exercises.EXERCISES | kernel_exercises.PUZZLES | rank_exercises.EXERCISES
