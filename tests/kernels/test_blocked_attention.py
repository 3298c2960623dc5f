"""Blocked attention against the definition in float64, for every kind of softmax attention."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lessons.rows.sparse_attention import BlockSparse
from lpkit import measure
from lpkit.kernels import blocked_attention, wide_product
from lpkit.kernels.blocked_attention import blocked, blocked_wide
from lpkit.nn.attention import sees
from lpkit.predict import memory
from lpkit.presets import preset
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import query_blocks
from tests.predict.test_predict import CPU

HOLES = BlockSparse(block=16, table=tuple("".join("01"[(a + b) % 3 == 1] for b in range(19))
    for a in range(19))).rule(300)
RULES = {"full": Rule(), "window": Rule(window=7),
         "window and global tokens": Rule(window=130, global_tokens=5),
         "many global tokens": Rule(window=20, global_tokens=200), "capped": Rule(soft_cap=2.0),
         "sinks": Rule(sinks=True),
         "keys to come": Rule(causal=False), "documents both ways": Rule(causal=False,
             documents=True),
         "documents": Rule(documents=True, soft_cap=3.0, sinks=True),
         "documents in windows": Rule(documents=True, window=50),
         "block-sparse": BlockSparse(block=16).rule(300), "queries that see nothing": HOLES}
# of the norm. float32: sums of 300 terms, and tanh of a capped score; 16 bits: q, k, v and weights
# of 8 or 11 bits are rounded
# once, gradients of a block's products once more each
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 0.012, torch.float16: 2e-3}
SINKS_ARE_FLOAT32 = 5e-7
IDS = {"one": lambda T, rng: torch.zeros(T, dtype=torch.int64),
       "of a token each": lambda T, rng: torch.randperm(T, generator=rng),
       "runs": lambda T, rng: (torch.rand(T, generator=rng) < 0.02).cumsum(0),
       "runs in another order": lambda T, rng: 2**62
       - (torch.rand(T, generator=rng) < 0.02).cumsum(0),
       "runs that come back": lambda T, rng: torch.randint(-2, 2, (T // 20,),
           generator=rng).repeat_interleave(20),
       "drawn for each token": lambda T, rng: torch.randint(0, 5, (T,), generator=rng)}


def definition(q, k, v, documents, sinks, rule):
    """Weights that are 0 where nothing is seen, without a NaN on the way."""
    H, T, E = q.shape[-3:]
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT / E**0.5
    if rule.soft_cap:
        s = rule.soft_cap * torch.tanh(s / rule.soft_cap)
    seen = sees(rule, torch.arange(T), torch.arange(T), documents)
    s = s.masked_fill(~seen, -1e300)
    top = s.amax(-1, keepdim=True)
    weights = (s - top).exp() * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - top).exp()
    return weights / total.clamp(min=1e-300) @ v


def drawn(T, groups, dtype, rule, batch=2):
    rng = torch.Generator().manual_seed(0)
    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    inputs = [normal(batch, T, heads, 16).to(dtype).transpose(1, 2).requires_grad_()
              for heads in (4, groups, groups)]
    if rule.sinks:
        inputs.append(normal(4).float().requires_grad_())
    documents = (torch.rand(batch, T, generator=rng) < 0.05).cumsum(-1)
    return inputs, documents, normal(batch, 4, T, 16).to(dtype)


@pytest.mark.parametrize("dtype, products",
                         [(torch.float64, ""), (torch.float32, ""), (torch.bfloat16, "float32"),
                                             (torch.bfloat16, "bf16"), (torch.float16, "")],
                         ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 5, 123, 300])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_forward_and_backward(name, T, groups, dtype, products):
    attend = blocked_wide if products == "float32" else blocked
    rule = RULES[name]
    inputs, documents, d_out = drawn(T, groups, dtype, rule)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    sinks, exact_sinks = (one[3] if rule.sinks else None for one in (inputs, exact))
    ours, want = attend(*inputs[:3], documents, sinks, rule=rule), definition(*exact[:3], documents,
        exact_sinks, rule)
    assert ours.dtype == dtype
    found = [ours, *torch.autograd.grad(ours, inputs, d_out)]
    expected = [want, *torch.autograd.grad(want, exact, d_out.double())]
    for got, right in zip(found, expected, strict=True):
        bound = max(TOLERANCE[dtype], SINKS_ARE_FLOAT32 if got.shape == (4,) else 0)
        assert (got.double() - right).norm() <= bound * right.norm() + 1e-6


def test_a_cpu_that_multiplies_in_a_loop_widens(monkeypatch):
    (q, k, v), documents, _ = drawn(300, 2, torch.bfloat16, Rule())
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: False)
    wide, narrow = blocked_wide(q, k, v, documents), blocked(q, k, v, documents)
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: True)
    assert blocked(q, k, v, documents).equal(wide) and not narrow.equal(wide)


@pytest.mark.parametrize("rule", [Rule(documents=True),
                                  Rule(documents=True, window=150, global_tokens=3)],
    ids=["full", "window"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", IDS)
def test_documents_by_any_ids(name, groups, rule):
    """Runs or not, in order or not; each row of the batch has others."""
    inputs, _, d_out = drawn(300, groups, torch.float64, rule)
    rng = torch.Generator().manual_seed(1)
    documents = torch.stack([IDS[name](300, rng) for _ in range(2)])
    ours, want = blocked(*inputs, documents, rule=rule), definition(*inputs, documents, None, rule)
    for got, right in zip((ours, *torch.autograd.grad(ours, inputs, d_out)),
                          (want, *torch.autograd.grad(want, inputs, d_out))):
        assert (got - right).norm() <= 1e-12 * right.norm()


def test_queries_that_see_nothing_are_zeros_and_their_gradients_finite():
    inputs, _, d_out = drawn(300, 2, torch.float32, HOLES)
    blind = ~sees(HOLES, torch.arange(300), torch.arange(300), None).any(1)
    out = blocked(*inputs, rule=HOLES)
    grads = torch.autograd.grad(out, inputs, d_out)
    assert blind.any() and (out[:, :, blind] == 0).all() and (grads[0][:, :, blind] == 0).all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", RULES)
def test_no_block_computes_what_its_spans_leave_out(name):
    """PyTorch's counter looks inside the kernel: two products over the pairs of spans forward, five
    backward, of which it does not count the two that add in place."""
    rule, T = RULES[name], 300
    inputs, documents, d_out = drawn(T, 2, torch.float32, rule)
    documents, sinks = documents if rule.documents else None, inputs[3] if rule.sinks else None
    words = rule.words
    with FlopCounterMode(display=False) as forward:
        _, sums = blocked_attention.attend.__wrapped__(*inputs[:3], documents, sinks, words, False)
    with FlopCounterMode(display=False) as backward:
        blocked_attention.gradients.__wrapped__(d_out, *inputs[:3], documents, sinks, sums, words,
            False)
    pairs = 0
    for ids in documents.tolist() if rule.documents else [[0] * T] * 2:
        begins = [ids.index(one) for one in ids]
        pairs += sum((last - first) * sum(max(0, b - max(a, min(begins[first:last])))
            for a, b in spans)
                     for first, last, spans in query_blocks(rule, T))
    assert forward.get_total_flops() == 2 * 2 * 4 * 16 * pairs
    assert backward.get_total_flops() == (5 - 2) * 2 * 4 * 16 * pairs


@pytest.mark.parametrize("recipe, used",
                         [("fp32", "blocked"), ("bf16", "blocked"), ("bf16", "blocked-wide")])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", [{"name": "full"},
                                  {"name": "window", "size": 40, "global_tokens": 3},
                                  {"name": "block-sparse", "block": 32}],
                         ids=lambda kind: kind["name"])
def test_the_peak_of_a_step_that_is_its_own(kind, batch, recipe, used, monkeypatch):
    """What is not in the formula are two numbers of each query of a block, and one of the
    losses."""
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: False)
    config = preset("cpu-3m").replace({
        "model.layers": 2, "model.width": 64, "model.vocab": 16, "model.mlp_width": 64,
        "model.context": 300, "global_batch": batch,
        "precision.recipe": recipe, "system.attention": used, "model.attention": kind})
    found, said = measure.memory(config, device="cpu"), memory(config, CPU)
    assert (found.module == "blocks.1.attention"
            and said.peak_bytes == pytest.approx(found.peak_bytes, rel=2e-3))


def test_the_operators_are_what_pytorch_asks_of_one():
    inputs, documents, _ = drawn(20, 2, torch.float32, RULES["documents"])
    for rule in (Rule(), RULES["documents"]):
        words = rule.words
        q, k, v, *sinks = (t.detach() for t in inputs)
        args = (q, k, v, documents if rule.documents else None, sinks[0] if rule.sinks else None)
        torch.library.opcheck(blocked_attention.attend, (*args, words, True),
                              test_utils=("test_schema", "test_faketensor"))
