"""Every exercise: the definition passes, the known mistake is caught, an empty attempt is only "to do"."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lpkit.course.exercises import EXERCISES, Exercise, Verdict, check
from lpkit.course.kernel_exercises import PUZZLES
from lpkit.errors import ConfigError
from lpkit.kernels.tiled_attention import tiles
from lpkit.precision.scaled import quantise
from lpkit.techniques.attention import Rule
from lpkit.techniques.recipes import Cast

BOOKS = {path.stem[:2]: path for path in Path(__file__).parents[1].glob("notebooks/*.ipynb")}


def stub(*args):
    raise NotImplementedError


@pytest.mark.parametrize("name", [name for name in EXERCISES if name not in PUZZLES])     # those: test_kernel_exercises.py
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
    "09.tensor_ranks": lambda states, device, heads: min((n for n in (1, 2, 4, 8) if n <= heads and states <= n * device), default=0),
}.items())
def test_wrong_answers_that_a_few_cases_do_not_find(name, attempt):
    assert check(EXERCISES[name], attempt).status == "wrong"


def by_numpy(losses, seconds, base, base_seconds):
    steps = np.interp(-base[-1], [-loss for loss in losses], range(1, len(losses) + 1))
    return 0 if losses[-1] > base[-1] else len(base) * base_seconds / (steps * seconds)


def by_ml_dtypes(x, exponent_bits, mantissa_bits, largest):
    dtype = {(4, 3): ml_dtypes.float8_e4m3fn, (5, 2): ml_dtypes.float8_e5m2, (2, 1): ml_dtypes.float4_e2m1fn,
             (3, 2): ml_dtypes.float6_e3m2fn}[exponent_bits, mantissa_bits]
    return torch.from_numpy(x.clamp(-largest, largest).numpy().astype(dtype).astype(np.float32))


def by_counter(a, b):
    with FlopCounterMode(display=False) as counter:
        torch.matmul(a, b)
    return counter.get_total_flops()


def by_grad_scaler(finite, scale, interval):
    scaler, found = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval), []
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    for ok in finite:
        found.append(scaler.get_scale())
        scaler.scale(weight.sum() * (1.0 if ok else math.inf)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return found


def by_autograd(h, w, targets, chunk):
    h = h.requires_grad_()
    loss = torch.nn.functional.cross_entropy(h @ w.T, targets)
    return loss.detach(), torch.autograd.grad(loss, h)[0]


def by_checkpoint(block, x, dy):
    x = x.requires_grad_()
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    y.backward(dy)      # a reentrant checkpoint's only way
    return y.detach(), x.grad


def by_numbers(x, w, dy, sx, sw, sdy):
    def cast(t, scale, dtype):
        largest = float(ml_dtypes.finfo(dtype).max)
        return scale * torch.from_numpy((t / scale).clamp(-largest, largest).numpy().astype(dtype).astype(np.float64))
    x, w, dy = (cast(t, scale, dtype) for t, scale, dtype in (
        (x, sx, ml_dtypes.float8_e4m3fn), (w, sw, ml_dtypes.float8_e4m3fn), (dy, sdy, ml_dtypes.float8_e5m2)))
    return dy @ w, torch.einsum("to,ti->oi", dy, x)


def by_neighbours(x, dice):
    """Down to bf16's neighbour nearer to zero, or up when the dice carry the rest over."""
    down = torch.from_numpy(np.trunc(np.ldexp(np.frexp(x.double().numpy())[0], 8)))
    exponents = torch.frexp(x.double())[1] - 8
    rest = (x.double() / 2.0**exponents - down).abs()       # of a gap
    up = rest + dice / 2**16 >= 1
    return ((down + up * x.sign()) * 2.0**exponents).float().copysign(x)


def by_python(v, g, beta, block):
    new, found = [beta * a + (1 - beta) * b * b for a, b in zip(v.tolist(), g.tolist())], []
    for i in range(0, len(new), block):
        scale = next(2.0**e for e in range(-200, 50) if max(new[i:i + block]) <= 255 * 2.0**e)
        found += [round(one / scale) * scale for one in new[i:i + block]]
    return found


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
    return torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*leaves), leaves, d_out)


def by_storages(B, H, T, E, itemsize, flash):
    heads = torch.empty(B, H, T, E, dtype={2: torch.bfloat16, 4: torch.float32}[itemsize], device="meta")
    scores = torch.empty(B, H, T, T, dtype=heads.dtype, device="meta")
    kept = [heads] * 4 + [heads[..., 0].float()] if flash else [heads] * 3 + [scores]
    return sum(t.numel() * t.element_size() for t in kept)


# independent of the definitions, or right in another way
RIGHT = {
    "00.cross_entropy": torch.nn.functional.cross_entropy,
    "02.flops": by_counter,
    "02.smallest_square": lambda peak, speed, itemsize: math.ceil(1.5 * itemsize * peak / speed),
    "03.cast": by_ml_dtypes,
    "03.mx_cast": lambda x: quantise(x[None], Cast(format="e4m3fn", block=(1, 32), scale="power-of-two-floor")).dequantise()[0],
    "03.stochastic_bf16": by_neighbours,
    "04.int8_db": lambda crest: 10.7918125 + 42.0760744 - 20 * math.log10(crest),
    "05.is_lost": lambda w, update: bool(torch.tensor(w).bfloat16() + torch.tensor(update).bfloat16() == torch.tensor(w).bfloat16()),
    "05.loss_scaler": by_grad_scaler,
    "06.fp8_backward": by_numbers,
    "06.speedup": by_numpy,
    "07.margin": lambda growth: next(m for m in range(-9, 99) if 2.0**m >= growth),
    "08.chunked_loss": by_autograd,
    "08.moment": by_python,
    "08.recomputed": by_checkpoint,
    "13.window_pairs": lambda T, window: sum(min(i + 1, window) for i in range(T)),
    "13.document_mask": lambda lengths: torch.block_diag(*(torch.ones(n, n).tril() for n in lengths.tolist())).bool(),
    "13.linear_attention": lambda q, k, v: torch.nn.functional.normalize((q @ k.T).tril(), p=1, dim=-1) @ v,
    "09.reduce_scatter": lambda values, turns: [
        [sum(values[rank - k][chunk] for k in range(1 + gone * (gone <= turns))) for chunk in range(len(values))
         for gone in [(rank - chunk) % len(values)]] for rank in range(len(values))],
    "15.interval": lambda save, apart, devices: (2 * save / (devices / apart)) ** 0.5,
    "15.pieces": lambda rows, wrote, reads, rank: [
        (writer, mine[0], mine[-1] + 1) for writer in range(wrote)
        if (mine := [row for row in range(rows) if row // -(-rows // reads) == rank and row // -(-rows // wrote) == writer])],
    "12.backward": by_autograd_of_attention,
    "12.kept_bytes": by_storages,
    "12.merge": by_whole_sums,
    "12.step": by_softmax,
    "12.tiles": lambda T, tile, window: sum(len(keys) for _, keys in tiles(Rule(window=window), T, tile)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_of_another_kind(name):
    assert check(EXERCISES[name], RIGHT[name]) == Verdict("right")


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise_is_asked_in_its_notebook(name):
    book = BOOKS.get(name.split(".")[0])
    assert book is None or name in book.read_text(), f"{book.name} does not use EXERCISES[{name!r}]"


squares = Exercise(spec=lambda x: x * x, cases=((2.0,), (3.0,)), mistakes={"that is twice x": lambda x: 2 * x})


def test_the_first_case_that_fails_is_named():
    assert check(squares, lambda x: 2 * x) == Verdict("wrong", "for x=3 expected 9, got 6; that is twice x")


@pytest.mark.parametrize("attempt, said", [
    (lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
    (lambda x, y: x, "TypeError"),
    (lambda x: None, "is there a `return`?"),
    (lambda x: "4", "got '4'"),
    (lambda x: x > 1, "got True"),
    (lambda x: math.nan, "got nan"),
    (lambda x: [4.0], "got [4]"),
])
def test_whatever_an_attempt_does_is_a_verdict(attempt, said):
    verdict = check(squares, attempt)
    assert verdict.status == "wrong" and said in verdict.detail


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


def test_an_attempt_may_write_into_its_arguments():
    exercise = Exercise(spec=lambda xs: sum(xs), cases=(([1, 2],),))
    assert check(exercise, lambda xs: sum(xs) if not xs.append(0) else 0) == Verdict("right")
    assert exercise.cases == (([1, 2],),)


def test_the_solution_is_the_definition_s_source():
    assert EXERCISES["05.with_masters"].solution.startswith("def with_masters(weight: Tensor")
    shown = check(EXERCISES["05.with_masters"], stub)
    assert "★, about 5 minutes" in str(shown) and "<details>" in shown._repr_html_()


def test_html_is_one_escaped_line():
    shown = check(squares, lambda x: "<script>")._repr_html_()
    assert "<script>" not in shown and "\n" not in shown and "#b91c1c" in shown


def test_an_exercise_without_cases_is_refused():
    with pytest.raises(ConfigError, match="at least one case"):
        Exercise(spec=abs, cases=())
