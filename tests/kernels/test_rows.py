"""What runs between products on a CPU, in C and by its definition, against float64.

Only these tests catch a wrong result of the C kernels of GELU, of attention's weights and of
cross-entropy on rows of other sizes than a vector's, on masks, and on numbers that are not finite;
and results that depend on the number of threads.
"""

import pytest
import torch
import torch.nn.functional as F

from lpkit.errors import ConfigError
from lpkit.kernels import compile_c, rows
from lpkit.kernels.cross_entropy import cross_entropy_

BF16_ULP = 2.0**-7      # the largest relative spacing; one rounding is off by half of it


@pytest.fixture(params=["native", "no compiler"], autouse=True)
def implementation(request, monkeypatch):
    """Each operator runs in C, and by its definition as where C did not compile."""
    if request.param == "no compiler":
        monkeypatch.setattr(rows, "library", lambda: None)
    elif compile_c.choice("rows").used != "native":
        pytest.skip(compile_c.choice("rows").why)
    return request.param


def random(*shape, scale=1.0, seed=0, dtype=torch.bfloat16):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def bits(x):
    return x.view(torch.int16).int()


def close(got, want, ulps):
    """Within `ulps` bf16 spacings of float64, or where spacings end within the least normal
    number's; NaN where NaN is."""
    assert got.shape == want.shape
    got, fine = got.double(), want.isfinite()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~fine & ~want.isnan()], want[~fine & ~want.isnan()])
    assert ((got - want).abs()[fine] <= ulps * BF16_ULP * want.abs()[fine] + 1e-37).all()


AWKWARD = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-6, 1e4, -3.0, -5.0, 9.0, -9.0, 30.0, 100.0,
                        -100.0, torch.inf, torch.nan])


@pytest.mark.parametrize("shape, scale", [((0,), 1.0), ((1,), 4.0), ((123,), 1e-3),
                                          ((3, 1, 17), 1.0), ((40, 1000), 4.0)], ids=str)
def test_gelu_and_its_gradient(shape, scale, implementation):
    """From float64, rounded once; PyTorch's own is up to two spacings off where 1 + tanh
    cancels."""
    x, dy = random(*shape, scale=scale), random(*shape, seed=1)
    exact = x.double().requires_grad_()
    want = F.gelu(exact, approximate="tanh")
    (want_dx,) = torch.autograd.grad(want, exact, dy.double())
    given = x.clone().requires_grad_()
    y = rows.gelu(given)
    (dx,) = torch.autograd.grad(y, given, dy)
    assert y.dtype == dx.dtype == torch.bfloat16
    if implementation == "native":
        # the derivative passes through zero at -0.75: there an absolute error counts
        bound = 0.5 * BF16_ULP * 1.01 * want_dx.abs() + 1e-6 * dy.double().abs()
        assert ((dx.double() - want_dx).abs() <= bound).all()
        # in the tail tanh is 1 - 1e-7: float64 itself cancels
        near = want.detach().abs() > 1e-7
        close(y[near], want.detach()[near], 0.51)
    assert torch.allclose(y.double(), want, rtol=2**-6, atol=2**-9)
    assert torch.allclose(dx.double(), want_dx, rtol=2**-6, atol=2**-7)


def test_gelu_of_awkward_numbers():
    x = AWKWARD.bfloat16()
    y, want = rows.gelu(x), F.gelu(x.double(), approximate="tanh")
    assert torch.equal(y.isnan(), want.isnan()) and y[-2] == torch.inf
    assert ((y - want).abs()[:-2] <= BF16_ULP * want.abs()[:-2] + 1e-6).all()
    (dx,) = torch.autograd.grad(rows.gelu(x.requires_grad_()), x, torch.ones_like(x))
    assert dx.isnan()[-1] and dx[:-2].isfinite().all()
    assert (dx[0], dx[11], dx[12]) == (0.5, 1, 0)


def test_every_nan_stays_one():
    """All payloads of bf16, both signs."""
    patterns = torch.arange(0x7F81, 0x8000)
    x = torch.cat((patterns, patterns - 0x8000)).to(torch.int16).view(torch.bfloat16)
    assert x.isnan().all() and rows.gelu(x).isnan().all()
    p = x.view(1, -1, 2).clone()
    rows.attention_(p, None, 1.0)
    assert p.isnan().all()


def test_gelu_keeps_its_input_and_other_kinds_take_the_definition():
    kept = []
    x = random(8, 16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rows.gelu(x * 1)
    assert ([(t.shape, t.dtype) for t in kept if t.grad_fn is None or t.shape == x.shape][:1]
            == [(x.shape, x.dtype)])
    for other in (random(4, 6, dtype=torch.float32), random(4, 6, dtype=torch.float16),
                  random(6, 4).T):
        assert torch.equal(rows.gelu(other), rows.reference_gelu(other))
    assert rows.gelu(torch.empty(2, 3, dtype=torch.bfloat16, device="meta")).shape == (2, 3)


def by_definition(scores, seen, scale, cap, sinks):
    """Weights in float64 from numbers as they are; 0 where nothing is seen."""
    s = scores.double() * scale
    s = cap * torch.tanh(s / cap) if cap else s
    s[..., s.shape[-1] - seen.shape[-1]:].masked_fill_(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.double()[:, None, None].expand(*s.shape[:2], 1)), dim=-1)
    p = torch.nan_to_num(s.softmax(-1), nan=0.0)
    return p if sinks is None else p[..., :-1]


def masks(rows, columns):
    """Causal, a band, holes with a row that sees nothing, and one of the last columns alone."""
    i, j = torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)[None]
    holes = torch.rand(rows, columns, generator=torch.Generator().manual_seed(3)) < 0.5
    holes[rows // 2] = False
    return {"causal": j <= i, "band": (j <= i) & (j > i - 3), "holes": holes,
            "the last": (j <= i)[:, columns - rows:]}


@pytest.mark.parametrize("dtype, spread, shape, cap, sunk, mask", [
    (torch.bfloat16, 0.01, (2, 5, 5), 0.0, False, "causal"),
    (torch.float32, 3.0, (1, 1, 1), 3.0, True, "causal"),
    (torch.bfloat16, 200.0, (3, 128, 256), 3.0, True, "band"),
    (torch.float32, 200.0, (3, 128, 256), 0.0, False, "the last"),
    (torch.bfloat16, 3.0, (2, 7, 130), 0.0, True, "holes"),
    (torch.float32, 0.01, (2, 7, 130), 3.0, False, "holes"),
    (torch.bfloat16, 3.0, (1, 3, 1500), 3.0, False, "the last"),
    (torch.float32, 200.0, (1, 3, 1500), 0.0, True, "causal"),
    (torch.bfloat16, 3.0, (0, 4, 4), 0.0, False, "causal"),
    (torch.float32, 3.0, (2, 1, 9), 0.0, False, "band")], ids=str)
def test_weights_of_scores_and_their_gradients(dtype, spread, shape, cap, sunk, mask):
    """A weight is rounded once, of an exponential to 2e-6; a capped score of 3 tanh(...) is off by
    1e-6 more, one of 75 by its own spacing in float32."""
    N, R, C = shape
    seen, scale = masks(R, C)[mask], 0.125
    scores, d = random(*shape, scale=spread, dtype=dtype), random(*shape, seed=1, dtype=dtype)
    sinks = random(N, seed=2, dtype=torch.float32) if sunk else None
    want, p = by_definition(scores, seen, scale, cap, sinks), scores.clone()
    sums = rows.attention_(p, seen, scale, cap, sinks)
    spacing = torch.finfo(dtype).eps
    bound = (0.51 * spacing + 4e-6 + 1e-6 * spread) * want + 1e-7
    assert ((p.double() - want).abs() <= bound).all()
    hidden = ~torch.cat((torch.ones(R, C - seen.shape[1], dtype=torch.bool), seen),
                        dim=1).expand(shape)
    assert (p[hidden] == 0).all() and sums.dtype == torch.float32
    again, got = scores.clone(), d.clone()
    dots = rows.attention_backward_(again, got, sums, seen, scale, cap)
    assert ((again.double() - want).abs() <= bound).all() and (got[hidden] == 0).all()
    of_weights = (d.double() * want).sum(-1)
    slope = scale * (1 - torch.tanh(scores.double() * scale / cap) ** 2 if cap else 1)
    want_d = slope * want * (d.double() - of_weights[..., None])
    sizes = (d.double() * want).abs().sum(-1)
    off = 2 * spacing + 1e-5 + 1e-6 * spread
    terms = scale * want * (d.double().abs() + sizes[..., None])
    assert ((got.double() - want_d).abs() <= off * terms + 1e-7).all()
    assert ((dots.double() - of_weights).abs() <= off * sizes + 1e-6).all()


def test_a_bad_row_of_scores_stays_in_its_row():
    p = random(1, 4, 8)
    # the last is in the future
    p[0, 1, 0], p[0, 2, 1], p[0, 0, 6] = torch.nan, torch.inf, torch.nan
    rows.attention_(p, torch.ones(4, 8, dtype=torch.bool).tril(4), 1.0)
    assert p[0, 1, :6].isnan().all() and p[0, 2, :7].isnan().any() and p[0, [0, 3]].isfinite().all()
    out = torch.tensor([[[-torch.inf, 1.0]]]).bfloat16()
    rows.attention_(out, None, 1.0)
    assert out.tolist() == [[[0.0, 1.0]]]


@pytest.mark.parametrize("n, V, dtype, weighted", [
    (1, 1, torch.float32, False), (3, 5, torch.bfloat16, True), (7, 1000, torch.float32, True),
    (7, 1000, torch.bfloat16, False), (2, 50_304, torch.bfloat16, True),
    (3, 5, torch.float16, False), (0, 9, torch.float32, True)], ids=str)
def test_cross_entropy_in_place(n, V, dtype, weighted):
    logits = random(n, V, scale=3, dtype=dtype)
    y = torch.randint(V, (n,), generator=torch.Generator().manual_seed(2))
    weights = torch.rand(n, generator=torch.Generator().manual_seed(3)) if weighted else None
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(exact, y, reduction="none")
    (g,) = torch.autograd.grad((want * (1 if weights is None else weights.double())).sum(), exact)
    nats = cross_entropy_(logits, y, weights)
    assert nats.dtype == torch.float32 and logits.dtype == dtype
    # float32, of logits up to 12
    assert ((nats.double() - want).abs() <= 2e-6 * (1 + want.abs())).all()
    # a probability in float32, less 1 at the target, rounded once; under a weight once more
    spacing = torch.finfo(dtype).eps
    once = 1.02 if weighted else 0.51
    # Log-probabilities to -24 are rounded twice, by 1e-6 each, and with AVX2 alone PyTorch's sum of
    # exponentials by as much.
    bound = once * spacing * g.abs() + 8e-6 * exact.softmax(-1) + torch.finfo(dtype).tiny
    assert ((logits.double() - g).abs() <= bound).all()


def test_cross_entropy_of_what_is_not_finite():
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [torch.nan, 0.0, 0.0], [torch.inf, 0.0, 0.0],
                           [3e38, -3e38, 0.0]])
    want = logits.clone().requires_grad_()
    nats = F.cross_entropy(want, torch.zeros(4, dtype=torch.long), reduction="none")
    (g,) = torch.autograd.grad(nats.sum(), want)
    got = cross_entropy_(logits, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(got, nats.detach(), equal_nan=True)
    torch.testing.assert_close(logits, g, equal_nan=True)


@pytest.mark.parametrize("target", [-1, 5, 2**40])
def test_a_target_that_is_none_makes_its_row_nan_and_no_other(target):
    logits = torch.zeros(3, 5)
    nats = cross_entropy_(logits, torch.tensor([0, target, 4]))
    assert nats.isnan().tolist() == [False, True, False] and logits[1].isnan().all()
    assert logits[[0, 2]].isfinite().all()


@pytest.mark.parametrize("targets, weights",
                         [(torch.zeros(3).long(), None), (torch.zeros(2), None),
                          (torch.zeros(2).long(), torch.ones(1))])
def test_what_is_not_one_for_each_row_is_refused(targets, weights):
    with pytest.raises(ConfigError,
                       match=r"logits \(2, 5\) take an integer target and a weight for each row"):
        cross_entropy_(torch.zeros(2, 5), targets, weights)


def test_the_operators_are_what_pytorch_asks_of_one():
    x = random(3, 8)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for op, args in {
        rows._gelu: (x,), rows._gelu_backward: (x, x),
        rows._attention: (random(2, 4, 4), None, 0.5, 0.0, None),
        rows._attention_backward: (random(2, 4, 4), random(2, 4, 4), torch.ones(2, 4), None, 0.5,
                                   0.0),
        cross_entropy_: (random(3, 8, dtype=torch.float32), torch.tensor([0, 1, 7]), None)}.items():
        torch.library.opcheck(op, args, test_utils=checks)


def test_threads_give_the_same_bits():
    before, results = torch.get_num_threads(), []
    x, scores = random(64, 4096), random(8, 128, 512)
    logits, y = random(16, 9000, dtype=torch.float32), torch.arange(16)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            mine = logits.clone()
            nats = cross_entropy_(mine, y)
            weights, d = scores.clone(), scores.clone()
            sums = rows.attention_(weights, None, 0.1)
            dots = rows.attention_backward_(scores.clone(), d, sums, None, 0.1)
            results.append([rows.gelu(x), weights, sums, d, dots, mine, nats])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results))
