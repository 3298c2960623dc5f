"""The exercises of the course; the notebooks ask the questions. Each definition stands under the
mistake that somebody plausibly makes, and the cases that tell the two apart."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from lpkit.course.judge import Exercise, Verdict, check

__all__ = ["EXERCISES", "Exercise", "Verdict", "check"]

EXERCISES: dict[str, Exercise] = {}


def exercise(name: str, mistake: Callable, *cases: tuple) -> Callable[[Callable], Callable]:
    def add(spec: Callable) -> Callable:
        EXERCISES[name] = Exercise(spec=spec, mistake=mistake, cases=cases)
        return spec

    return add


# 00, start here: what a loss means, and what a step costs.

@exercise("00.uniform_loss", math.log2, (2,), (256,), (50_304,))
def uniform_loss(vocab: int) -> float:
    return math.log(vocab)


@exercise("00.bits_per_byte", lambda loss, size: loss / size,
          (math.log(2), 1.0), (2.0, 1.0), (3.3, 4.2))
def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token


@exercise("00.step_seconds", lambda N, tokens, peak, mfu: 2 * N * tokens / (peak * mfu),
          (1e6, 1e3, 1e12, 1.0), (124e6, 524_288, 989e12, 0.4), (70e9, 4e6, 64 * 989e12, 0.38))
def step_seconds(parameters: float, tokens: float, peak_flops: float, mfu: float) -> float:
    """6 FLOPs per parameter and token: 2 forward, 4 backward."""
    return 6 * parameters * tokens / (peak_flops * mfu)


# 01, memory math. Bytes.

@exercise("01.state_bytes", lambda N, devices, stage: 16 * N / (devices if stage else 1),
          (1_000, 1, 0), (1_000, 4, 3), (7_500_000_000, 64, 1), (7_500_000_000, 64, 2))
def state_bytes(parameters: int, devices: int, stage: int) -> float:
    """Stage 1 shards the optimizer's 12 bytes, 2 the gradients' 2 as well, 3 the weights' 2 too."""
    shared = [devices if stage >= needed else 1 for needed in (1, 2, 3)]
    return parameters * (12 / shared[0] + 2 / shared[1] + 2 / shared[2])


@exercise("01.loss_bytes", lambda sequences, context, vocab: 4 * sequences * context * vocab,
          (1, 1, 256), (16, 1024, 50_304))
def loss_bytes(sequences: int, context: int, vocab: int) -> int:
    """Log-probabilities, their gradients and the logits' gradients, float32 each."""
    return 3 * 4 * sequences * context * vocab


@exercise("01.score_bytes", lambda B, H, T, itemsize: B * T * (T * itemsize - 4),
          (1, 1, 8, 4), (2, 12, 1024, 2))
def score_bytes(sequences: int, heads: int, context: int, itemsize: int) -> int:
    """A probability per head and pair of tokens, against a float32 log-sum per head and token."""
    return sequences * heads * context * (context * itemsize - 4)


# 02, where the time goes. FLOPs, bytes, FLOP/s, bytes/s.

@exercise("02.intensity", lambda M, N, K, itemsize: 2 * M * N * K / ((M * K + K * N) * itemsize),
          (1, 1, 1, 4), (4096, 768, 256, 2))
def intensity(M: int, N: int, K: int, itemsize: int) -> float:
    """Both operands are read once, the result is written once."""
    return 2 * M * N * K / ((M * K + K * N + M * N) * itemsize)


@exercise("02.smallest_square", lambda peak, speed, itemsize: 0.5 * itemsize * peak / speed,
          (200e9, 40e9, 4), (989.4e12, 4.8e12, 2))
def smallest_square(peak_flops: float, bytes_per_second: float, itemsize: int) -> float:
    """The product meets the ridge: 2 n^3 / (3 n^2 itemsize) FLOPs per byte."""
    return 1.5 * itemsize * peak_flops / bytes_per_second


@exercise("02.attention_share", lambda width, context: context / (6 * width),
          (256, 256), (4096, 8192))
def attention_share(width: int, context: int) -> float:
    """4 T D of 2 * 12 D^2 + 4 T D FLOPs a token."""
    return context / (6 * width + context)


# 03, number formats.

def _no_subnormals(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    return (1 + fraction) * 2.0 ** (field - 2 ** (exponent_bits - 1) + 1)


@exercise("03.value_of", _no_subnormals,
          (0, 2, 1), (1, 2, 1), (7, 2, 1), (5, 4, 3), (126, 4, 3), (75, 5, 2))
def value_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Field 0 are the subnormals."""
    bias = 2 ** (exponent_bits - 1) - 1
    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    return (1 + fraction) * 2.0 ** (field - bias) if field else fraction * 2.0 ** (1 - bias)


@exercise("03.stochastic", lambda x, step, u: round(x / step) * step,
          (1.25, 1.0, 0.2), (1.25, 1.0, 0.3), (3.0, 0.5, 0.0), (0.7, 0.5, 0.39), (0.7, 0.5, 0.41))
def stochastic(x: float, step: float, u: float) -> float:
    down = x // step
    return (down + (u < x / step - down)) * step


@exercise("03.mx_exponent", lambda amax, largest: round(amax).bit_length() - largest,
          (448.0, 8), (1.0, 8), (0.75, 2), (6.5, 2), (1e-3, 15))
def mx_exponent(amax: float, largest_exponent: int) -> int:
    """floor(log2 amax), less the element format's largest exponent."""
    return math.frexp(amax)[1] - 1 - largest_exponent


# 04, scaling recipes: who shares a scale, what an integer pays for an outlier, where a delayed
# scale comes from.

@exercise("04.shared_by", lambda rows, columns, high, wide: high * wide,
          (256, 512, 1, 32), (256, 512, 0, 0), (256, 512, 1, 0), (256, 512, 128, 128))
def shared_by(rows: int, columns: int, block_rows: int, block_columns: int) -> int:
    return (block_rows or rows) * (block_columns or columns)


@exercise("04.int8_db", lambda crest: 20 * math.log10(127 / crest), (127.0,), (4.5,), (1000.0,))
def int8_db(crest: float) -> float:
    return 10 * math.log10(12 * (127 / crest) ** 2)


@exercise("04.delayed_scale", lambda history, margin, largest: history[0] * 2**margin / largest,
          ([4.48], 0, 448.0), ([1.0, 8.0, 2.0], 0, 448.0), ([1.0, 8.0, 2.0], 1, 57344.0))
def delayed_scale(history: list[float], margin: int, largest: float) -> float:
    return max(history) * 2**margin / largest


# 05, mixed precision: the update that a weight does not feel, the scale that saves a gradient, the
# bytes of it.

@exercise("05.is_lost", lambda weight, update: update < 2.0 ** (math.floor(math.log2(weight)) - 7),
          (1.0, 1e-3), (1.0, 5e-3), (0.02, 1e-5), (0.02, 1e-4))
def is_lost(weight: float, update: float) -> bool:
    """Half of the gap to the next number, 2^(floor(log2 w) - 7), is not reached."""
    return update < 2.0 ** (math.floor(math.log2(weight)) - 8)


@exercise("05.scale_for", lambda gradient: 2.0 ** math.ceil(-24 - math.log2(gradient)),
          (2.0**-14,), (1e-6,), (1e-9,), (0.5,))
def scale_for(gradient: float) -> float:
    return max(1.0, 2.0 ** math.ceil(-14 - math.log2(gradient)))


@exercise("05.state_bytes", lambda parameters, low: parameters * ((2 if low else 4) + 8),
          (1, False), (124_000_000, True))
def mixed_state_bytes(parameters: int, low_precision_weights: bool) -> int:
    return parameters * (4 + 8 + (2 if low_precision_weights else 0))


# 06, FP8 training: the noise of a product, the layers to keep, the time to an equal loss. Decibels,
# seconds.

@exercise("06.product_db", lambda x, w: (x + w) / 2, (31.5, 31.5), (31.5, 25.5), (40.0, 20.0))
def product_db(x: float, w: float) -> float:
    """Shares of noise add up."""
    return -10 * math.log10(10 ** (-x / 10) + 10 ** (-w / 10))


def _by_mean_decibel(samples: Sequence[tuple[str, float]], budget: int) -> list[str]:
    decibels: dict[str, list[float]] = {}
    for layer, db in samples:
        decibels.setdefault(layer, []).append(db)
    return sorted(decibels, key=lambda layer: fmean(decibels[layer]))[:budget]


@exercise("06.keep", _by_mean_decibel, ([("head", 30.0), ("up", 20.0)], 1),
          ([("up", 31.0), ("down", 24.0), ("up", 31.0), ("down", 24.0), ("head", 36.0),
            ("head", 12.0)], 2),
          ([("q", 30.0), ("k", 31.0), ("v", 29.0)], 0))
def keep(samples: Sequence[tuple[str, float]], budget: int) -> list[str]:
    """Noise is averaged, not its decibels."""
    noise: dict[str, list[float]] = {}
    for layer, db in samples:
        noise.setdefault(layer, []).append(10 ** (-db / 10))
    return sorted(noise, key=lambda layer: -fmean(noise[layer]))[:budget]


def _at_equal_steps(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
                    base_seconds: float) -> float:
    return base_seconds / seconds * base_losses[-1] / losses[-1]


@exercise("06.speedup", _at_equal_steps, ([4.0, 3.0, 2.0, 1.0], 0.5, [4.0, 3.0, 2.0], 1.0),
          ([4.0, 3.5, 3.0, 2.5, 2.0], 0.8, [4.0, 3.0, 2.8], 1.0),
          ([4.0, 3.5, 3.4], 0.5, [4.0, 3.0], 1.0))
def speedup(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
            base_seconds: float) -> float:
    """Between the two steps around the base's last loss, the loss is a straight line."""
    target = base_losses[-1]
    for step, loss in enumerate(losses, 1):
        if loss <= target:
            above = losses[step - 2] if step > 1 else loss
            part = (loss - target) / (loss - above) if above > loss else 0.0
            return len(base_losses) * base_seconds / ((step - part) * seconds)
    return 0.0


# 07, when FP8 fails. Decibels, shares, powers of two.

def _of_magnitudes(x: Sequence[float], y: Sequence[float]) -> float:
    return 10 * math.log10(sum(map(abs, x)) / sum(abs(a - b) for a, b in zip(x, y)))


@exercise("07.sqnr_db", _of_magnitudes, ((1.0, 0.0), (0.9, 0.0)),
          ((3.0, -1.0, 0.5), (3.25, -1.0, 0.5)), ((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 3.5)))
def sqnr_db(x: Sequence[float], y: Sequence[float]) -> float:
    """A ratio of energies."""
    return 10 * math.log10(sum(a * a for a in x) / sum((a - b) ** 2 for a, b in zip(x, y)))


@exercise("07.saturated", lambda x, amax: sum(abs(a) > amax for a in x) / len(x),
          ((1.0, 2.0), 1.0), ((1.02, -3.0, 0.5), 1.0), ((0.0, 0.0, 4.0, -1.0), 2.0))
def saturated(x: Sequence[float], amax: float) -> float:
    """The last spacing is 32, so up to 464 is still rounded to 448."""
    nonzero = [abs(a) for a in x if a]
    return sum(a > amax * 464 / 448 for a in nonzero) / len(nonzero)


@exercise("07.margin", lambda growth: int(math.log2(growth)), (2.0,), (3.0,), (64.0,), (0.5,))
def margin(growth: float) -> int:
    return max(0, math.ceil(math.log2(growth)))


# 08, recomputation and offload. Bytes, and numbers of blocks.

def _without_the_block(layers: int, block: int, kept: int, budget: int) -> int:
    fits = [n for n in range(1, layers + 1)
            if sum(kept if i % n == 0 else block for i in range(layers)) <= budget]
    return max(fits, default=0)


@exercise("08.every", _without_the_block, (4, 10, 1, 12), (4, 10, 1, 22), (4, 10, 1, 25),
          (12, 34, 2, 60), (12, 34, 2, 250), (3, 5, 1, 100))
def every(layers: int, block: int, kept: int, budget: int) -> int:
    """At the peak the last block is there whole, whether it ran twice or not."""
    fits = [n for n in range(1, layers + 1)
            if sum(kept if i % n == 0 else block for i in range(layers - 1)) + block <= budget]
    return max(fits, default=0)


@exercise("08.moment_bytes", lambda parameters, block: 2 * parameters,
          (256, 256), (1000, 256), (124_000_000, 2048))
def moment_bytes(parameters: int, block: int) -> int:
    return 2 * (parameters + 4 * math.ceil(parameters / block))


@exercise("08.segment", lambda layers, block, kept: round(math.sqrt(layers)),
          (64, 1, 1), (64, 16, 1), (32, 4, 2), (96, 34, 2))
def segment(layers: int, block: int, kept: int) -> int:
    """A checkpoint of `kept` bytes for each segment, and one segment whole."""
    return min(range(1, layers + 1), key=lambda n: math.ceil(layers / n) * kept + n * block)


# 09, predict before you rent. Micro-batches, tokens, ranks.

# (p - 1) / m is the bubble over the ideal time, not its share of the step
@exercise("09.micro_batches", lambda stages, most: max(1, math.ceil((stages - 1) / most)),
          (1, 0.5), (2, 0.5), (8, 0.125), (16, 0.11))
def micro_batches(stages: int, most: float) -> int:
    """(p - 1) of (m + p - 1) turns are idle."""
    return max(1, math.ceil((stages - 1) * (1 - most) / most))


@exercise("09.tokens", lambda dollars, price, peak, mfu, N: dollars / price * 3600 * peak / (6 * N),
          (1.0, 1.0, 6e12, 0.5, 1e9), (250_000.0, 3.5, 989.4e12, 0.4, 70.6e9))
def tokens(dollars: float, price_per_hour: float, peak_flops: float, mfu: float,
           parameters: float) -> float:
    """Dollars to device hours, to FLOPs at that utilisation, to tokens at 6 FLOPs a parameter."""
    return dollars / price_per_hour * 3600 * peak_flops * mfu / (6 * parameters)


@exercise("09.tensor_ranks", lambda states, device, kv_heads: math.ceil(states / device),
          (60e9, 80e9, 8), (141e9, 72e9, 8), (200e9, 72e9, 8), (1.13e12, 130e9, 8))
def tensor_ranks(state_bytes: float, device_bytes: float, kv_heads: int) -> int:
    fits = [n for n in range(1, kv_heads + 1)
            if kv_heads % n == 0 and state_bytes <= n * device_bytes]
    return min(fits, default=0)
