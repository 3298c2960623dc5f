"""Every exercise: the definition passes, the known mistake is caught, an empty attempt is only "to
do".

Only these tests catch: a definition that another library contradicts, a judge that refuses a right
answer of another form or of a processor that rounds otherwise, a hint that no mistake brings up,
and a comparison that takes a wrong type, shape, sign of zero or changed argument for right.
"""

import functools
import itertools
import math
import struct
from collections import deque
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lessons.judging import judge
from lessons.judging.judge import Disturbed, Exercise, Verdict
from lessons.l30_silicon import Array, simulate
from lessons.rows.adapters import StableLoraSettings
from lessons.rows.depth import Drop, Progressive, falling, progressive
from lessons.rows.depth_torch import Partly
from lessons.rows.growth_torch import shares
from lessons.rows.optimizers import adafactor
from lpkit.contracts import Parameter
from lpkit.errors import ConfigError
from lpkit.exchange import families
from lpkit.kernels.tiled_attention import tiles
from lpkit.nn.adapters import Lora
from lpkit.optim import muon
from lpkit.precision.scaled import quantise
from lpkit.techniques.adapters import LoraSettings
from lpkit.techniques.attention import Rule
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.techniques.recipes import Cast
from tests.lessons.judging.course import EXERCISES, ON_RANKS, PUZZLES


def check(exercise, attempt):
    """In this process: where an attempt runs is tests/lessons/judging/test_attempts.py's, and ranks
    are processes anyway."""
    return exercise.judged(attempt) if exercise.name in ON_RANKS else judge.check(exercise, attempt)


def stub(*args):
    raise NotImplementedError


@pytest.mark.usefixtures("judged_on_ranks")
# those: test_kernel_exercises.py
@pytest.mark.parametrize("name", [name for name in EXERCISES if name not in PUZZLES])
def test_exercise(name):
    exercise = EXERCISES[name]
    assert check(exercise, exercise.spec) == Verdict("right")
    for hint, mistake in exercise.mistakes.items():
        verdict = check(exercise, mistake)
        assert verdict.status == "wrong" and verdict.detail.endswith(hint), (hint, verdict)
    assert check(exercise, stub).status == "to do"
    assert exercise.draw is not None and exercise.mistakes


@pytest.mark.parametrize("name, attempt", {
    "05.is_lost": lambda w, update: update < 2.0 ** (math.floor(math.log2(w)) - 9),
    "04.delayed_scale": lambda history, margin, largest: max(history[:2]) * 2**margin / largest,
    "08.segment": lambda layers, block, kept: max(1, round(math.sqrt(layers * kept / block))),
    "09.tensor_ranks": lambda states, device, heads:
    min((n for n in (1, 2, 4, 8) if n <= heads and states <= n * device), default=0),
}.items())
def test_wrong_answers_that_a_few_cases_do_not_find(name, attempt):
    assert check(EXERCISES[name], attempt).status == "wrong"


def by_numpy(losses, seconds, base, base_seconds):
    steps = np.interp(-base[-1], [-loss for loss in losses], range(1, len(losses) + 1))
    return 0 if losses[-1] > base[-1] else len(base) * base_seconds / (steps * seconds)


def by_ml_dtypes(x, exponent_bits, mantissa_bits, largest):
    dtype = {(4, 3): ml_dtypes.float8_e4m3fn, (5, 2): ml_dtypes.float8_e5m2,
             (2, 1): ml_dtypes.float4_e2m1fn,
             (3, 2): ml_dtypes.float6_e3m2fn}[exponent_bits, mantissa_bits]
    return torch.from_numpy(x.clamp(-largest, largest).numpy().astype(dtype).astype(np.float32))


def by_counter(a, b):
    with FlopCounterMode(display=False) as counter:
        torch.matmul(a, b)
    return counter.get_total_flops()


def by_grad_scaler(finite, scale, interval):
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval), []
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    for ok in finite:
        scales.append(scaler.get_scale())
        scaler.scale(weight.sum() * (1.0 if ok else math.inf)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scales


def by_autograd(h, w, targets, chunk):
    h, loss = h.requires_grad_(), 0
    for rows, wanted in zip(h.split(chunk), targets.split(chunk)):
        part = torch.nn.functional.cross_entropy(rows @ w.T, wanted, reduction="sum") / len(h)
        part.backward()
        loss += part.detach()
    return loss, h.grad


def by_checkpoint(block, x, dy):
    x = x.requires_grad_()
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    y.backward(dy)      # a reentrant checkpoint's only way
    return y.detach(), x.grad


def by_numbers(x, w, dy, sx, sw, sdy):
    def cast(t, scale, dtype):
        largest = float(ml_dtypes.finfo(dtype).max)
        return scale * torch.from_numpy((t / scale).clamp(-largest,
            largest).numpy().astype(dtype).astype(np.float64))
    x, w, dy = (cast(t, scale, dtype) for t, scale, dtype in (
        (x, sx, ml_dtypes.float8_e4m3fn), (w, sw, ml_dtypes.float8_e4m3fn),
        (dy, sdy, ml_dtypes.float8_e5m2)))
    return dy @ w, torch.einsum("to,ti->oi", dy, x)


def by_neighbours(x, dice):
    """Down to bf16's neighbour nearer to zero, or up when the dice carry the rest over."""
    down = torch.from_numpy(np.trunc(np.ldexp(np.frexp(x.double().numpy())[0], 8)))
    exponents = torch.frexp(x.double())[1] - 8
    rest = (x.double() / 2.0**exponents - down).abs()       # of a gap
    up = rest + dice / 2**16 >= 1
    return ((down + up * x.sign()) * 2.0**exponents).float().copysign(x)


def by_python(v, g, beta, block):
    new, rounded = [beta * a + (1 - beta) * b * b for a, b in zip(v.tolist(), g.tolist())], []
    for i in range(0, len(new), block):
        scale = next(2.0**e for e in range(-200, 50) if max(new[i:i + block]) <= 255 * 2.0**e)
        rounded += [round(value / scale) * scale for value in new[i:i + block]]
    return rounded


def by_softmax(m, l, acc, scores, v):
    """In float64: what was there counts as one key of score m + log(l), whose value is acc / l."""
    m, l, acc, scores, v = (t.double() for t in (m, l, acc, scores, v))
    largest = torch.cat((m[:, None], scores), 1).max(1).values
    sums = torch.cat(((l.log() + m)[:, None], scores), 1)
    total = torch.logsumexp(sums, 1) - largest
    values = torch.cat((torch.nan_to_num(acc / l[:, None])[:, None], v.expand(len(m), -1, -1)), 1)
    return largest, total.exp(), torch.einsum("nk,nke->ne", (sums - largest[:, None]).exp(), values)


def by_whole_sums(a, lse_a, b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)     # in float32, where the last place of 900 is 6e-5
    return a * (lse_a - lse).exp()[:, None] + b * (lse_b - lse).exp()[:, None], lse


def by_autograd_of_attention(q, k, v, out, lse, d_out):
    leaves = [t.requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*leaves), leaves,
                               d_out)


def by_storages(B, H, T, E, itemsize, flash):
    heads = torch.empty(B, H, T, E, dtype={2: torch.bfloat16, 4: torch.float32}[itemsize],
                        device="meta")
    scores = torch.empty(B, H, T, T, dtype=heads.dtype, device="meta")
    kept = [heads] * 4 + [heads[..., 0].float()] if flash else [heads] * 3 + [scores]
    return sum(t.numel() * t.element_size() for t in kept)


# independent of the definitions, or right in another way
def by_the_kits_int8(x):
    rounded = quantise(x, Cast(format="int8", block=(1, x.shape[1]))).dequantise()
    return 20 * (x.double().norm() / (x - rounded).double().norm()).log10().item()


RIGHT = {
    "00.cross_entropy": torch.nn.functional.cross_entropy,
    "02.flops": by_counter,
    "02.smallest_square": lambda peak, speed, itemsize: math.ceil(1.5 * itemsize * peak / speed),
    "03.cast": by_ml_dtypes,
    "03.mx_cast": lambda x: quantise(x[None],
                                     Cast(format="e4m3fn", block=(1, 32),
                                          scale="power-of-two-floor")).dequantise()[0],
    "03.stochastic_bf16": by_neighbours,
    "04.int8_db": lambda crest: 10.7918125 + 42.0760744 - 20 * math.log10(crest),
    "05.is_lost": lambda w, update: bool(torch.tensor(w).bfloat16()
        + torch.tensor(update).bfloat16() == torch.tensor(w).bfloat16()),
    "05.loss_scaler": by_grad_scaler,
    "06.fp8_backward": by_numbers,
    "06.speedup": by_numpy,
    "07.margin": lambda growth: next(m for m in range(-9, 99) if 2.0**m >= growth),
    "08.chunked_loss": by_autograd,
    "08.moment": by_python,
    "08.recomputed": by_checkpoint,
    "13.window_pairs": lambda T, window: sum(min(i + 1, window) for i in range(T)),
    "13.document_mask": lambda lengths: torch.block_diag(
        *(torch.ones(n, n).tril() for n in lengths.tolist())).bool(),
    "09.reduce_scatter": lambda values, turns: [
        [sum(values[rank - k][chunk] for k in range(1 + gone * (gone <= turns)))
         for chunk in range(len(values))
         for gone in [(rank - chunk) % len(values)]] for rank in range(len(values))],
    "15.interval": lambda save, apart, devices: (2 * save / (devices / apart)) ** 0.5,
    "15.pieces": lambda rows, wrote, reads, rank: [
        (writer, mine[0], mine[-1] + 1) for writer in range(wrote)
        if (mine := [row for row in range(rows) if row // -(-rows // reads) == rank
                     and row // -(-rows // wrote) == writer])],
    "12.backward": by_autograd_of_attention,
    "12.kept_bytes": by_storages,
    "12.merge": by_whole_sums,
    "12.step": by_softmax,
    "12.tiles": lambda T, tile, window: sum(len(keys)
        for _, keys in tiles(Rule(window=window), T, tile)),
}


F = torch.nn.functional


def in_place_softmax(m, l, acc, scores, v):
    scores, acc = scores.clone(), acc.clone()
    m_new = torch.cat((m[:, None], scores), 1).max(1)[0]
    scores.sub_(m_new.unsqueeze(1)).exp_()
    old = torch.exp(m - m_new)
    return m_new, torch.addcmul(scores.sum(-1), l, old), torch.addmm(acc.mul_(old.view(-1, 1)),
        scores, v)


def by_stack(a, lse_a, b, lse_b):
    lse = torch.stack((lse_a, lse_b))
    return torch.einsum("hq,hqe->qe", lse.softmax(0), torch.stack((a, b))), lse.logsumexp(0)


def row_by_row(q, k, v, out, lse, d_out):
    dq, dk, dv, scale = (*map(torch.zeros_like, (q, k, v)), 1 / math.sqrt(q.size(1)))
    for i in range(len(q)):
        p = torch.exp((k * q[i]).sum(1) * scale - lse[i])
        ds = p * (v @ d_out[i] - d_out[i] @ out[i])
        dq[i] = (ds[:, None] * k).sum(0) * scale
        dk += torch.outer(ds, q[i]) * scale
        dv += p[:, None] * d_out[i]
    return dq, dk, dv


def by_convolution(gains):
    """How many ways there are to each sum."""
    ways = {0: 1}
    for gain in gains:
        ways = {total: ways.get(total - gain, 0) + ways.get(total + gain, 0) for last in ways
                for total in (last - gain, last + gain)}
    return (sum(count for total, count in ways.items() if abs(total) >= abs(sum(gains)))
            / sum(ways.values()))


def by_the_kit(name, w, g, slots, lr, decay, update=1):
    """The kit's own rule, in float64."""
    row = OPTIMIZERS[name]
    settings = SimpleNamespace(**vars(row.settings) | {"lr": lr, "weight_decay": decay})
    w, *slots = (t.double().clone() for t in (w, *slots))
    row.load()(w, g.double(), slots, settings, update)
    return w, *slots


def by_the_kits_adafactor(rows, columns, g, share):
    """From its step: g over the root of the second moments, before its length is cut."""
    rows, columns, g = rows.double().clone(), columns.double().clone(), g.double()
    update, w = 2, torch.zeros_like(g)
    settings = SimpleNamespace(lr=1.0, weight_decay=0.0, least=1.0, decay=-math.log2(share))
    adafactor(w, g, [rows, columns, torch.empty(0)], settings, update,
              Parameter("", tuple(g.shape)))
    v = rows[:, None] * columns / rows.mean()
    step = g / v.sqrt()
    length = step.square().mean().sqrt().clamp(min=1)
    torch.testing.assert_close(w, -step / length * 2**-0.5)
    return rows, columns, v


def by_the_kits_muon(w, g, m, lr, decay):
    settings = SimpleNamespace(lr=lr, weight_decay=decay, momentum=0.95, name="muon")
    w, g, m = w.double().clone(), g.double().clone(), m.double().clone()
    muon.muon(w, g, [m], settings, 1, Parameter("w", tuple(w.shape)))
    return w, m


def by_polyfit(widths, changes):
    return float(np.polyfit(np.log2(widths), np.log2(changes), 1)[0])


def by_least_squares(w, H, q):
    """The weights that are left solve the normal equations of the outputs that w had."""
    left = [i for i in range(len(w)) if i != q]
    out = torch.zeros_like(w)
    out[left] = torch.linalg.solve(H[left][:, left], H[left] @ w)
    return out


def by_registers(rows, columns, M, N, K):
    """A fold in the lesson's simulator, and the folds counted by tiles that are cut."""
    down, across = (len(torch.ones(size).split(side)) for size, side in ((K, rows), (N, columns)))
    fold = simulate(Array(rows, columns, "weight"), torch.ones(M, 1), torch.ones(1, 1))
    return (fold.cycles + 1) * down * across


def by_cycles_of_lanes(nonzeros, columns):
    """One cycle after the other, until the queues of a fold are empty."""
    cycles, left = 0, list(nonzeros)
    while left:
        fold, left = left[:columns], left[columns:]
        while any(fold):
            fold, cycles = [max(0, n - 1) for n in fold], cycles + 1
    return cycles


def by_bisection(a, c):
    """The minimum of a / f + c f^2 by bisection of its slope in exact fractions."""
    low, high = Fraction(0), Fraction(10)
    for _ in range(60):
        middle = (low + high) / 2
        rising = 2 * Fraction(c) * middle**3 > Fraction(a)
        low, high = (low, middle) if rising else (middle, high)
    return float(low)


def by_walking(ahead, behind):
    """One pair after another: a coin moves the lead up or down."""
    leads = {0: Fraction(1)}
    for _ in range(ahead + behind):
        leads = {lead: (leads.get(lead - 1, 0) + leads.get(lead + 1, 0)) / 2
                 for lead in {before + step for before in leads for step in (-1, 1)}}
    return float(sum(share for lead, share in leads.items() if abs(lead) >= abs(ahead - behind)))


def by_hops(n, a, b):
    """Bytes at which a ring and a tree, hop by hop, take the same time."""
    hops = n.bit_length() - 1
    late = lambda size: (sum(a + b * size for _ in range(2 * hops))
                         - sum(a + b * size / n for _ in range(2 * (n - 1))))
    low, high = 1e-12, 1e15
    for _ in range(400):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if late(middle) < 0 else (low, middle)
    return low


def by_scatter(gradients):
    left, sent = torch.zeros(len(gradients[0]), dtype=torch.float64), []
    for g in gradients:
        left += torch.tensor(g, dtype=torch.float64)
        top = left.abs().argmax()
        sent.append(torch.zeros_like(left).index_put_((top,), left[top]).tolist())
        left[top] = 0
    return sent


def by_powers(n, share):
    matrix = sum(np.roll(np.eye(n), shift, 1) for shift in (-1, 0, 1)) / 3
    each, far = np.linalg.eigvalsh(matrix)[-2], 1.0
    return next(i for i in itertools.count(1) if (far := far * each) <= share)


def by_mean_of_pairs(singles, pairs):
    """Each technique is in one pair fewer than there are techniques."""
    logs = sum(map(math.log, pairs)) - (len(singles) - 2) * sum(map(math.log, singles))
    return math.exp(logs)


def by_the_kits_lora(w, A, B, alpha):
    layer = Lora(torch.nn.Linear(*w.mT.shape, bias=False), len(A),
                 LoraSettings(name="lora", rank=len(A), alpha=alpha).scale)
    for own, t in ((layer.base, w), (layer.A, A), (layer.B[0], B)):
        own.weight.data = t
    return layer(torch.eye(w.shape[1], dtype=w.dtype)).mT


def by_the_kits_stochastic_depth(layers, rate):
    return falling(Drop(rate=rate), layers, 1, 0)


def by_the_kits_progressive(layers, steps, theta, gamma):
    asked = Progressive(theta=theta, gamma=gamma)
    return (sum(sum(progressive(asked, layers, steps, step)) for step in range(steps)) / steps
            / layers)


def by_the_kits_partly(x, w, kept):
    """With these tokens instead of the kit's own draw."""
    partly = Partly(torch.nn.Identity(), 0.5, 1.0, 0)
    partly.block.forward = lambda some, *_: some + (some.cumsum(1) / torch.arange(1,
        some.shape[1] + 1)[:, None]) @ w
    partly.kept = lambda tokens: kept
    return partly(x[None])[0]


def by_the_kits_wider(up, bias, down, i):
    """Its copies' even shares of a number."""
    pick = torch.tensor([*range(len(bias)), i])
    return up[pick], bias[pick], down[:, pick] * shares(down, pick, 0.0, torch.Generator())


def by_eigenvectors(w, rank):
    """What the largest eigenvectors of W W^T leave of W."""
    vectors = torch.linalg.eigh(w.double() @ w.double().mT)[1][:, -rank:]
    product = vectors @ vectors.mT @ w.double()
    return w - product, product


def by_gpt2s_names(qkv, heads):
    sizes = SimpleNamespace(H=heads, G=heads, E=len(qkv) // heads // 3)
    [t] = families.of_type("gpt2").parts("blocks.0.attention.qkv.weight", qkv, sizes).values()
    return t


def by_counted_products(weights, tokens):
    """PyTorch counts those of the kit's own rule, and of a Linear forward and backward."""
    with FlopCounterMode(display=False) as added:
        for w in weights:
            muon.orthogonalised(w.clone())
    with FlopCounterMode(display=False) as whole:
        for w in weights:
            x = torch.zeros(tokens, w.shape[1], requires_grad=True)
            F.linear(x, w.clone().requires_grad_()).sum().backward()
    return added.get_total_flops() / whole.get_total_flops()


def by_cumsum(q, k, v):
    states = (k[:, :, None] * v[:, None]).cumsum(0)
    return torch.einsum("tf,tfe->te", q, states) / (q * k.cumsum(0)).sum(1, keepdim=True)


def in_chunks(q, k, v):
    """A (16, 16) matrix at a time, and the state of all before: as GPUs have it."""
    v1, outputs = torch.cat((v, torch.ones(len(v), 1)), 1), []
    state = torch.zeros(k.shape[1], v1.shape[1])
    for a, b, c in zip(q.split(16), k.split(16), v1.split(16)):
        outputs.append(a @ state + (a @ b.T).tril() @ c)
        state += b.T @ c
    whole = torch.cat(outputs)
    return whole[:, :-1] / whole[:, -1:]


def logits_in_place(h, w, targets, chunk):
    total, grads = 0.0, []
    for rows, wanted in zip(h.split(chunk), targets.split(chunk)):
        logits = rows @ w.T
        lse = logits.logsumexp(1)
        total += (lse - logits.gather(1, wanted[:, None])[:, 0]).sum().item()
        logits.sub_(lse[:, None]).exp_().scatter_add_(1, wanted[:, None], -torch.ones(len(rows), 1))
        grads.append(logits @ w / len(h))
    return total / len(h), torch.cat(grads)


def by_bits(x, dice):
    return torch.tensor([struct.unpack("f",
        struct.pack("I", (struct.unpack("I", struct.pack("f", value))[0] + d) & 0xFFFF0000))[0]
                         for value, d in zip(x.tolist(), dice.tolist())])


def by_deque(amaxes, length):
    history, scales = deque(maxlen=length), []
    for amax in amaxes:
        scales.append(max(history) / 448.0 if history else 1)
        history.append(amax)
    return scales


def by_events(lives):
    moments = sorted({begin for begin, _, _ in lives})
    return max(sum(size for begin, end, size in lives if begin <= now < end) for now in moments)


def by_sorted_noise(samples, budget):
    ranking = [(-np.mean([10 ** (db / -10) for layer, db in samples if layer == name]), name)
               for name in dict.fromkeys(name for name, _ in samples)]
    return [name for _, name in sorted(ranking)[:budget]]


def right_half_first(layers, fails):
    low, high = 0, len(layers)
    while high - low > 1:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fails(layers[middle:high]) else (low, middle)
    return layers[low]


def from_the_last(sizes, most):
    groups, room = [], 0
    for size in reversed(sizes):
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(size)
        room -= size
    return groups


def by_counting(rows, ranks, rank):
    own = [row for row in range(rows) if row // -(-rows // ranks) == rank]
    return [own[0], own[-1] + 1] if own else [rows, rows]


def fp8(x, scale, dtype=torch.float8_e4m3fn):
    largest = torch.finfo(dtype).max
    return torch.clamp(x.double() * (1 / scale), min=-largest, max=largest).to(dtype).double()


def by_passes(orders, forward, backward):
    """Rank after rank, as far as each gets, until all are done."""
    ends = {}
    while len(ends) < sum(map(len, orders)):
        for rank, actions in enumerate(orders):
            at = 0.0
            for action in actions:
                other = rank + (1 if action[0] == "B" else -1)
                needed = (other, action) if 0 <= other < len(orders) else None
                if needed and needed not in ends:
                    break
                at = max(at, ends.get(needed, 0.0)) + (backward if action[0] == "B" else forward)
                ends[rank, action] = at
    return max(ends.values())


# Another form of what is no short formula, and of sums whose order or place decides
# about a last place: the kit's own rule, float64 inside, in place, views, loops.
OTHERS = {
    "00.uniform_loss": [lambda vocab: F.cross_entropy(torch.zeros(1, vocab, dtype=torch.float64),
                            torch.tensor([0])).item()],
    "01.saved_bytes": [lambda tensors: sum({t.untyped_storage()._cdata: t.untyped_storage().size()
        for t in tensors}.values())],
    "01.peak_bytes": [by_events],
    "02.roofline_seconds": [lambda ops, peak, speed: math.fsum(f / peak if f / b > peak / speed
        else b / speed for f, b in ops if b) + sum(
        f / peak for f, b in ops if not b)],
    "03.value_of": [lambda code, e, m: math.ldexp(code % 2**m + 2**m * (code >= 2**m),
        max(code >> m, 1) - 2 ** (e - 1) + 1 - m)],
    "03.stochastic": [lambda x, step, u: (math.floor(x / step) + (1 if u < x / step % 1 else 0))
                      * step],
    "03.mx_exponent": [lambda amax, largest: math.floor(math.log2(amax)) - largest],
    "03.stochastic_bf16": [by_bits],
    "04.delayed": [by_deque],
    "05.with_masters": [lambda weight, updates: functools.reduce(torch.sub, updates,
        weight.float()).bfloat16()],
    "19.false_share": [lambda bar, sigma, n: math.erfc(bar * math.sqrt(n) / (2 * sigma)) / 2],
    "19.seeds": [lambda effect, sigma: math.ceil(15.6977586 * (sigma / effect) ** 2)],
    "19.sign_flip": [by_convolution],
    "20.adamw": [lambda w, g, m, v, update, lr, decay: by_the_kit("adamw", w, g, (m, v), lr, decay,
        update)],
    "20.lion": [lambda w, g, m, lr, decay: by_the_kit("lion", w, g, (m,), lr, decay)],
    "20.factored": [by_the_kits_adafactor],
    "22.gram": [lambda G, a: G + a * (P := torch.ones_like(G).tril()
                                      / torch.ones_like(G).tril().sum(1, keepdim=True))
                @ (G / torch.outer(G.diag().sqrt(), G.diag().sqrt())) @ P.mT],
    "23.probabilities": [by_the_kits_stochastic_depth],
    "23.area": [by_the_kits_progressive],
    "23.some_tokens": [by_the_kits_partly],
    "23.split": [by_the_kits_wider],
    "24.merged": [by_the_kits_lora],
    "24.rslora": [lambda alpha, rank: (StableLoraSettings(name="rslora", rank=rank,
        alpha=alpha).scale, alpha * math.sqrt(rank))],
    "24.pissa": [by_eigenvectors],
    "24.c_attn": [by_gpt2s_names],
    "25.distinct": [lambda weights: sum(w.numel() for i, w in enumerate(weights)
        if not any(w is earlier for earlier in weights[:i]))],
    "25.input_db": [by_the_kits_int8],
    "26.step": [by_the_kits_muon],
    "26.overhead": [by_counted_products],
    "27.power": [by_polyfit],
    "28.trials": [lambda q, p: next(n for n in itertools.count(1) if 1 - (1 - q) ** n >= p)],
    "28.coin": [by_walking],
    "29.bits": [lambda bits, group, scale: (bits * group + scale) / group],
    "29.two_of_four": [lambda w: torch.cat([part * (part.abs() >= part.abs().topk(2).values[:, 1:])
                                            for part in w.split(4, 1)], 1)],
    "29.compensate": [by_least_squares],
    "30.cycles": [by_registers],
    "30.skipping": [by_cycles_of_lanes],
    "30.frequency": [by_bisection],
    "31.with_pairs": [by_mean_of_pairs],
    "31.same_seconds": [lambda share, a, b: 1 / (share / a / b + (1 - share))],
    "06.keep": [by_sorted_noise],
    "06.fp8_forward": [lambda x, w, sx, sw: torch.einsum("ti,oi->to", fp8(x, sx), fp8(w, sw)) * sx
                       * sw, lambda x, w, sx, sw: F.linear(fp8(x, sx).float() * sx,
                           fp8(w, sw).float() * sw)],
    "07.saturated": [lambda x, amax: np.mean([abs(a) * 448 / amax > 448 + 16 for a in x
        if a != 0]).item()],
    "07.bisect": [right_half_first],
    "08.every": [lambda layers, block, kept, budget: next(
        (n for n in range(layers, 0, -1) if kept * len(range(0, layers - 1, n)) + block * (
        layers - len(range(0, layers - 1, n))) <= budget), 0)],
    "08.segment": [lambda layers, block, kept: min((-(-layers // n) * kept + n * block, n)
        for n in range(1, layers + 1))[1]],
    "08.chunked_loss": [logits_in_place],
    "09.micro_batches": [lambda stages, most: next(m for m in itertools.count(1)
        if (stages - 1) / (m + stages - 1) <= most)],
    "09.tensor_ranks": [lambda states, device, heads: next(
        (n for n in range(1, heads + 1) if not heads % n and states / n <= device), 0)],
    "09.micro_batch": [lambda states, each, device, batch: next(
        (n for n in range(batch, 0, -1) if not batch % n and n * each <= device - states), 0)],
    "12.step": [in_place_softmax],
    "12.merge": [by_stack],
    "12.backward": [row_by_row],
    "13.linear_attention": [by_cumsum, in_chunks],
    "14.rows": [by_counting],
    "14.buckets": [from_the_last],
    "16.pairs": [lambda rank, ranks, step: [(a, b) for a in range(2 * ranks)
        for b in range(2 * ranks) if min(a, 2 * ranks - 1 - a) == rank
                                            and (rank - min(b, 2 * ranks - 1 - b)) % ranks == step
        and b <= a]],
    "16.gate_up": [lambda w, rank, ranks: w.unflatten(0, (2, ranks, -1))[:, rank].flatten(0, 1)],
    "17.order": [lambda rank, ranks, m: [step for k in range(-(ranks - rank), m) for step in (
        f"B{k}" if k >= 0 else "",
        f"F{k + ranks - rank}" if k + ranks - rank < m else "") if step]],
    "17.step": [by_passes],
    "18.crossing": [by_hops], "18.feedback": [by_scatter], "18.rounds": [by_powers],
}


@pytest.mark.parametrize("name, attempt",
                         [pytest.param(name, attempt, id=f"{name}-{i}")
                          for name in {**RIGHT, **OTHERS}
                          for i, attempt in enumerate(
    [RIGHT[name] for _ in range(name in RIGHT)] + OTHERS.get(name, []))])
def test_right_answers_of_another_kind(name, attempt):
    assert check(EXERCISES[name], attempt) == Verdict("right")


def nudged(value):
    """Numbers off by some last places, as another order of the same arithmetic has them."""
    if isinstance(value, list | tuple):
        return type(value)(map(nudged, value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * (1 + 2.0**-22)
    return value * (1 + 2.0**-48) if isinstance(value, float) else value


@pytest.mark.parametrize("name", [name for name in EXERCISES
                                  if name not in {*RIGHT, *OTHERS, *ON_RANKS, *PUZZLES}])
def test_a_last_place_of_a_number_does_not_decide(name):
    """Of all without another form above, which are short formulas."""
    spec = EXERCISES[name].spec
    assert check(EXERCISES[name], lambda *case: nudged(spec(*case))) == Verdict("right")


@pytest.mark.parametrize("name", [name for name, exercise in EXERCISES.items() if exercise.tolerance
                                  and name not in PUZZLES and name not in ON_RANKS])
def test_a_processor_that_rounds_otherwise_does_not_decide(name):
    """The definition in float32, each operation off by a last place: where terms cancel, something
    near 0 is left of 0."""
    exercise, seeds = EXERCISES[name], itertools.count(100)

    def elsewhere(*case):
        with Disturbed(next(seeds), 2.0**-23):      # each case otherwise
            return exercise.spec(*case)
    for _ in range(2):
        assert check(exercise, elsewhere) == Verdict("right")


def test_an_answer_may_be_off_by_a_share_of_its_terms():
    """12.backward with one key: the gradient is 0, and a difference of equal terms."""
    exercise = Exercise(spec=lambda x, y: x @ y - (x * y).sum(),
                        cases=((torch.ones(3), torch.full((3,), 2.0)),))
    for right in (0.0, -2.7e-8, 5e-7):
        assert check(exercise, lambda x, y, right=right: torch.tensor(right)) == Verdict("right")
    for wrong in (1e-4, -1e-4, 6.0, math.nan):
        assert check(exercise, lambda x, y, wrong=wrong: torch.tensor(wrong)).status == "wrong"
    assert check(EXERCISES["12.backward"],
                 lambda q, k, v, out, lse, d_out: [x * (len(q) > 1) if i < 2 else x
                     for i, x in enumerate(
        EXERCISES["12.backward"].spec(q, k, v, out, lse, d_out))]) == Verdict("right")


squares = Exercise(spec=lambda x: x * x, cases=((2.0,), (3.0,)),
                   mistakes={"that is twice x": lambda x: 2 * x})


def test_the_first_case_that_fails_is_named():
    assert check(squares, lambda x: 2 * x) == Verdict("wrong",
        "for x=3 expected 9, got 6; that is twice x")


@pytest.mark.parametrize("attempt, message", [
    (lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
    (lambda x, y: x, "TypeError"),
    (lambda x: None, "is there a `return`?"),
    (lambda x: "4", "got '4'"),
    (lambda x: x > 1, "got True"),
    (lambda x: math.nan, "got nan"),
    (lambda x: [4.0], "got [4]"),
    (lambda x: torch.zeros(2, device="meta"), "it raised NotImplementedError: Cannot copy out of "
                                              "meta tensor"),
    (lambda x: torch.zeros(2, dtype=torch.float8_e4m3fn) + torch.zeros(2,
        dtype=torch.float8_e4m3fn), "not implemented for 'Float8_e4m3fn'"),
])
def test_whatever_an_attempt_does_is_a_verdict(attempt, message):
    verdict = check(squares, attempt)
    assert verdict.status == "wrong" and message in verdict.detail


@pytest.mark.parametrize("want, right, wrong", [
    (1.0, 1.0 + 1e-9, 1.001),
    (0, 0.0, 1e-9),
    ([1, 2.0], (1.0, 2), [1, 2, 3]),
    ((1, (2, 3)), [1, [2, 3]], [1, [2, 4]]),
    ({"a": 1, "b": [2]}, {"b": (2,), "a": 1.0}, {"a": 1}),
    ({"a": 1}, {"a": 1}, {"a": 2}),
    ("ring", "ring", "tree"),
    (True, True, 1),
    (None, None, 0),
    (math.nan, math.nan, 0.0),
    (math.inf, math.inf, -math.inf),
])
def test_what_counts_as_the_same(want, right, wrong):
    exercise = Exercise(spec=lambda: want, cases=((),))
    assert check(exercise, lambda: right) == Verdict("right")
    assert check(exercise, lambda: wrong).status == "wrong"


def test_a_tensor_counts_as_its_numbers():
    exercise = Exercise(spec=lambda n: torch.arange(n), cases=((3,),))
    assert check(exercise, lambda n: list(range(n))) == Verdict("right")
    assert check(exercise, lambda n: torch.zeros(n)).detail == "for n=3 expected 1 at [1], got 0"


def test_a_tensor_s_numbers_may_be_off_by_a_share_of_its_largest():
    exercise = Exercise(spec=lambda: torch.tensor([1e-6, 1.0]), cases=((),), tolerance=1e-5)
    assert check(exercise, lambda: torch.tensor([0.0, 1.0])) == Verdict("right")
    assert check(exercise, lambda: torch.tensor([0.0, 1.001])).status == "wrong"


def test_a_tolerance_of_zero_asks_for_the_sign_of_zero():
    exercise = Exercise(spec=lambda: torch.tensor([-0.0]), cases=((),), tolerance=0)
    assert check(exercise, lambda: torch.tensor([-0.0])) == Verdict("right")
    assert check(exercise, lambda: torch.tensor([0.0])).status == "wrong"


@pytest.mark.parametrize("given, change", [
    ([1, 2], lambda x: x.append(0)), ([2, 1], lambda x: x.sort()),
    ([[1], [2]], lambda x: x[1].pop()), ({"a": 1.0}, lambda x: x.update(a=2.0)),
    ([1, 2], lambda x: x.__setitem__(0, 1.0)), (torch.zeros(2), lambda x: x.neg_()),
    (torch.ones(2, 3), lambda x: x.t_()),
    (torch.tensor(1.0), lambda x: x.mul_(2)),
    (torch.ones(2, dtype=torch.bfloat16), lambda x: x[1:].zero_()),
    ([torch.ones(3)[::2]], lambda x: x[0].add_(1)),
    (torch.ones(2), lambda x: setattr(x, "data", x.data.double())),
])
def test_an_attempt_that_changes_its_argument_is_told_so(given, change):
    exercise = Exercise(spec=lambda x: 3, cases=((given,),))
    verdict = check(exercise, lambda x: (change(x), 3)[1])
    assert (verdict.status == "wrong" and "it changes its argument `x`: change a copy (`"
            in verdict.detail)
    assert check(exercise, lambda x: 3) == Verdict("right")


@pytest.mark.parametrize("given, change", [
    (torch.ones(2), lambda x: x.requires_grad_().square().sum().backward()), ([math.nan], len),
    (torch.tensor([math.nan]), torch.relu),
    (deque([1]), lambda x: x.append(2)), (torch.zeros(0, 2), lambda x: x.add_(1)),
])
def test_what_is_no_change(given, change):
    """Gradients and NaN; and an object that is no number, tensor, list or dict, such as a function
    that counts its calls."""
    assert (check(Exercise(spec=lambda x: 3, cases=((given,),)), lambda x: (change(x), 3)[1])
            == Verdict("right"))


def test_an_exercise_may_ask_for_the_change():
    exercise = Exercise(spec=lambda x, y: x.add_(y), cases=((torch.zeros(2), torch.ones(2)),),
                        in_place=("x",),
                        mistakes={"the other one": lambda x, y: x.sub_(y)})
    assert check(exercise, lambda x, y: x.copy_(x + y)) == check(exercise,
        lambda x, y: (x.add_(y), None)[1]) == Verdict("right")
    # a new tensor
    assert "expected 1 at [0, 0], got 0" in check(exercise, lambda x, y: x + y).detail
    assert check(exercise, lambda x, y: x.sub_(y)).detail.endswith("the other one")
    assert "its argument `y`" in check(exercise, lambda x, y: x.add_(y.neg_().neg())).detail


def test_an_index_is_written_as_one_types_it():
    exercise = Exercise(spec=lambda: {"a": torch.tensor([[1, 2], [3, 4]])}, cases=((),))
    assert (check(exercise, lambda: {"a": [[1, 2], [5, 4]]}).detail
            == "for  expected 3 at ['a', 1, 0], got 5")


def test_the_solution_is_the_definition_s_source():
    assert EXERCISES["05.with_masters"].solution.startswith("def with_masters(weight: Tensor")
    shown = check(EXERCISES["05.with_masters"], stub)
    assert "★, about 5 minutes" in str(shown) and "<details>" in shown._repr_html_()


def test_html_is_one_escaped_line():
    shown = check(squares, lambda x: "<script>")._repr_html_()
    sentence = shown.partition("<details>")[0]      # below it stands the solution, line by line
    assert "<script>" not in shown and "\n" not in sentence and "#b91c1c" in sentence


def test_an_exercise_without_cases_is_refused():
    with pytest.raises(ConfigError, match="at least one case"):
        Exercise(spec=abs, cases=())
