"""The kit's own flash attention against the definition in float64, forward and backward.

Only these tests catch a wrong tile, list of tiles, mask, bound of documents, sum or gradient of the
Triton kernel, and its refusals. On a CPU Triton's interpreter runs it, in tiles so small that few
tokens have many of them.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lessons.rows.sparse_attention import BlockSparse
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.kernels import flash_attention as flash
from lpkit.kernels.jit import INTERPRETED, tl
from lpkit.memory.recompute import PRODUCTS, selective
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import ATTENTION, Attending, choose_attention
from lpkit.techniques.memory import RECOMPUTE
from lpkit.techniques.operation import MicroBatch
from lpkit.training.training import RandomTokens, Training
from tests.kernels.attention_cases import defined

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
              pytest.mark.skipif(tl is None or (DEVICE.type == "cpu" and not INTERPRETED),
                                 reason="needs Triton, and a GPU or its interpreter")]
# Of the norm of an output: in 16 bits the probabilities and the output are rounded, each by at most
# half a unit in the last place, 2^-9 of bf16 and 2^-12 of fp16. For a gradient twice that: ds and
# the gradient, and the output that D is made of. float32: sums of some hundred terms.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
RULES = {
    "full": Rule(),
    "window": Rule(window=21),
    "window of one": Rule(window=1),
    "window and globals": Rule(window=9, global_tokens=18),
    "documents": Rule(documents=True),
    "documents in a window": Rule(documents=True, window=20, global_tokens=3),
    "block-sparse": BlockSparse(block=10, local=2, stride=3).rule(83),
    "blocks of a tile": BlockSparse(block=32, local=1, stride=2).rule(83),
    "table": BlockSparse(block=20, table=("00000", "11100", "00000", "10010", "00101")).rule(83),
    "blocks and documents": Rule(block=16, documents=True,
                                 blocks=tuple(tuple((a + b) % 3 != 1 for b in range(6))
                                              for a in range(6))),
    "cap and sinks": Rule(soft_cap=1.5, sinks=True),
    "everything": Rule(documents=True, soft_cap=2.0, sinks=True, block=16,
                       blocks=tuple(tuple((a * b) % 4 != 3 for b in range(6)) for a in range(6))),
}


@pytest.fixture
def small_tiles(monkeypatch):
    """No two kernels alike, and queries and keys not either."""
    sides = {"forward": (16, 32, 4, 2), "queries": (32, 16, 4, 2), "keys": (16, 32, 4, 2)}
    monkeypatch.setattr(flash, "SHAPES",
                        {name: dict.fromkeys((64, 128, 256, 512), shape)
                         for name, shape in sides.items()})
    monkeypatch.setattr(flash, "NARROWER", {})


def drawn(T, *, B=1, H=1, G=1, E=16, dtype=torch.float32, seed=0):
    """q, k, v, ids, sinks and the gradient of the output: as a Linear's product has them, heads
    beside each other."""
    rng = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, T, H + 2 * G, E, generator=rng).to(DEVICE, dtype)
    q, k, v = qkv.split([H, G, G], dim=2)
    ids = torch.randint(0, 5, (B, T), generator=rng).sort(1)[0].to(DEVICE)
    return [*(t.transpose(1, 2) for t in (q, k, v)), ids, torch.randn(H, generator=rng).to(DEVICE),
            torch.randn(B, T, H, E, generator=rng).to(DEVICE, dtype).transpose(1, 2)]


def both(attend, q, k, v, ids, sinks, d_out, rule):
    leaves = ([t.detach().requires_grad_() for t in (q, k, v)]
              + ([sinks.detach().requires_grad_()] if rule.sinks else []))
    out = attend(*leaves[:3], ids if rule.documents else None, leaves[3] if rule.sinks else None,
                 rule=rule)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def check(rule, *given, dtype=torch.float32):
    got = both(flash.flash_attention, *given, rule)
    want = both(lambda *t, rule: defined(*t, rule=rule)[0],
                *(t.double() if t.is_floating_point() else t for t in given), rule)
    largest = max(t.norm() for t in want)
    for name, ours, true in zip(("out", "dq", "dk", "dv", "dsinks"), got, want, strict=False):
        assert ours.dtype == (torch.float32 if name == "dsinks" else dtype), name
        # a sink's gradient is a sum over all tokens of differences from the rounded output
        bound = BOUND[dtype] * {"out": 1, "dsinks": 4}.get(name, 2)
        # it may be a difference of large terms
        assert (ours.double() - true).norm() <= bound * max(true.norm(), 0.1 * largest), name


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule(rule, small_tiles):
    check(rule, *drawn(83))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(dtype, small_tiles):
    check(RULES["cap and sinks"], *drawn(40, dtype=dtype, E=24), dtype=dtype)


@pytest.mark.parametrize("E", [5, 80, 256])
def test_every_width_in_its_own_tiles(E):
    check(Rule(), *drawn(70, E=E, dtype=torch.bfloat16), dtype=torch.bfloat16)


@pytest.mark.parametrize("T", [0, 1, 16, 33])
def test_every_length(T, small_tiles):
    check(Rule(), *drawn(T, B=2))
    check(Rule(window=4, documents=True), *drawn(T))


@pytest.mark.parametrize("H, G", [(4, 2), (3, 1)])
def test_groups_share_keys(H, G, small_tiles):
    check(Rule(documents=True), *drawn(17, H=H, G=G))


def test_documents_in_any_order(small_tiles):
    """Bounds by the least and the greatest id may be too wide, and never too narrow."""
    *given, sinks, d_out = drawn(50, B=2)
    given[3] = torch.randint(-2, 3, (2, 50), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    check(Rule(documents=True), *given, sinks, d_out)


@pytest.mark.parametrize("rule", ["full", "everything"])
def test_the_sum_that_it_keeps(rule, small_tiles):
    rule = RULES[rule]
    q, k, v, ids, sinks, _ = drawn(83)
    _, lse = flash.forward(q, k, v, ids if rule.documents else None, sinks if rule.sinks else None,
                           rule.words)
    want = defined(q, k, v, ids if rule.documents else None, sinks if rule.sinks else None,
                   rule=rule)[1]
    torch.testing.assert_close(lse.double(), want, rtol=1e-6, atol=1e-6)


def test_the_definition_of_the_kernel_is_the_definition():
    for rule in RULES.values():
        q, k, v, ids, sinks, _ = (t.double() if t.is_floating_point() else t
                                  for t in drawn(83, H=2))
        given = q, k, v, ids if rule.documents else None, sinks if rule.sinks else None
        torch.testing.assert_close(flash.attention(*given, rule), defined(*given, rule=rule)[0],
                                   rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.blocks],
                         ids=[name for name in RULES if RULES[name].blocks])
def test_lists_have_the_tiles_that_are_needed(rule, queries=16, keys=32):
    """Against pairs one by one: nothing that is seen is left out, and what has no mask is seen
    whole."""
    T = 83
    seen = torch.tensor([[bool(rule.sees(i, j)) for j in range(T)] for i in range(T)])
    for by_keys in (False, True):
        given = flash._lists(rule, T, queries, keys, by_keys, torch.device("cpu"))
        for a, (masked, every) in enumerate(given["counts"].tolist()):
            row = given["tiles"][a].tolist()[:every]
            assert len(set(row)) == every
            for b in range(-(-T // (queries if by_keys else keys))):
                i, j = (b, a) if by_keys else (a, b)
                pairs = seen[i * queries:(i + 1) * queries, j * keys:(j + 1) * keys]
                assert b in row or not pairs.any()
                assert b not in row[masked:] or pairs.all()


def met(monkeypatch, rule, T=300):
    """How many pairs of tiles a forward computes, in the interpreter."""
    functions, function = [], type(flash._attend)
    run = function.__call__
    monkeypatch.setattr(function, "__call__", lambda self, *given: functions.append(self)
                        or run(self, *given))
    q, k, v, *_ = drawn(T)
    flash.flash_attention(q, k, v, torch.arange(T)[None] // 64, None, rule)
    return functions.count(flash._attend)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter can be watched")
@pytest.mark.parametrize("rule, count", [
    (Rule(), 1 + 2 + 3 + 4 + 5), (Rule(window=64, global_tokens=3), 1 + 2 + 3 * 3),
    (Rule(documents=True), 5), (BlockSparse(block=64, local=1, stride=100).rule(300), 1 + 4 * 2)],
    ids=["full", "globals", "documents", "block-sparse"])
def test_what_is_left_out_is_not_computed(rule, count, monkeypatch):
    monkeypatch.setattr(flash, "SHAPES", {"forward": {64: (64, 64, 4, 2)}})
    assert met(monkeypatch, rule) == count


def test_the_same_input_gives_the_same_bits(small_tiles):
    first, again = (both(flash.flash_attention, *drawn(40, dtype=torch.bfloat16), Rule())
                    for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again))


def test_the_operators_keep_pytorchs_rules(small_tiles):
    q, k, v, ids, sinks, d_out = drawn(17, H=2)
    rule = (Rule(window=7, global_tokens=2, soft_cap=3.0, documents=True, sinks=True).words,)
    checks = ("test_schema", "test_faketensor")     # autograd is a Function's
    torch.library.opcheck(flash.forward, (q, k, v, ids, sinks, *rule), test_utils=checks)
    out, lse = flash.forward(q, k, v, ids, sinks, *rule)
    torch.library.opcheck(flash.backward, (d_out, q, k, v, ids, sinks, out, lse, *rule),
                          test_utils=checks)
    assert out.transpose(1, 2).is_contiguous()      # heads merge without a copy
    assert flash.forward in selective(RECOMPUTE["selective"].settings).transforms[0].keep
    assert flash.forward not in PRODUCTS


def test_flops_are_counted_as_pytorch_counts_its_own():
    """Two products over all pairs forward, five backward."""
    q, k, v = (torch.empty(2, heads, 64, 16, device="meta", requires_grad=True)
               for heads in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        out, lse = flash.forward(q, k, v, None, None, Rule().words)
        flash.backward(out, q, k, v, None, None, out, lse, Rule().words)
    assert counter.get_total_flops() == 7 * 2 * 2 * 4 * 64 * 64 * 16


def refused(message, *tensors):
    with pytest.raises(ConfigError, match=message):
        flash.flash_attention(*tensors)


def test_what_it_does_not_take_is_refused():
    q = torch.zeros(1, 2, 4, 16, device=DEVICE)
    refused("not torch.float64", *[q.double()] * 3)
    refused("the same for all", q, q, q.half())
    refused("up to 256 numbers wide, not 257", *[q.new_zeros(1, 1, 4, 257)] * 3)
    refused("G a divisor of H", q, q.new_zeros(1, 3, 4, 16), q.new_zeros(1, 3, 4, 16))


def test_who_may_ask_for_it(monkeypatch):
    row, model = ATTENTION["triton"], ModelConfig(head_dim=257)
    assert row.why_not(Attending(model=ModelConfig(), device="gpu")) == ""
    assert "needs a GPU" in row.why_not(Attending(model=ModelConfig()))
    assert "257" in row.why_not(Attending(model=model, device="gpu"))
    capped = Config().replace({"model.attention": {"name": "full", "soft_cap": 5.0}}).model
    assert choose_attention("auto", device="cpu", low_precision=False, model=capped)[0] == "blocked"
    assert choose_attention("auto", device="gpu", low_precision=True, model=capped)[0] == "triton"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"system.attention=triton needs a GPU.*plain"):
        choose_attention("triton", device="cpu", low_precision=False, model=ModelConfig())


@pytest.mark.parametrize("kind, share", [
    ({}, (128 * 128 + 72 * 200) / 200**2),      # tiles of 128 queries and 64 keys, cut at the end
    ({"name": "window", "size": 64}, (128 * 128 + 72 * (200 - 64)) / 200**2),
    ({"name": "block-sparse", "block": 64, "local": 1, "stride": 100},
     (128 * 128 + 72 * 136) / 200**2)], ids=str)
def test_its_row_counts_the_tiles(kind, share):
    changes = {"model.context": 200} | ({"model.attention": kind} if kind else {})
    model = Config().replace(changes).model
    assert ATTENTION["triton"].formula(MicroBatch(model=model)).pairs_share == pytest.approx(share)


def losses(config):
    training = Training.build(config, data=RandomTokens(config, DEVICE))
    return training, [training.update(step).loss.item() for step in range(2)]


@pytest.mark.parametrize("changes", [
    {"model.attention": {"name": "window", "size": 8, "global_tokens": 2, "sinks": True}},
    {"memory.recompute": "selective", "precision.recipe": "bf16"}], ids=str)
def test_a_model_trains_with_it(changes, small_tiles):
    """float32: the loss of plain to rounding; bf16 within its rounding of some layers."""
    tiny = Config().replace({
        "model.layers": 1, "model.width": 32, "model.heads": 2, "model.kv_heads": 1,
        "model.context": 16, "model.vocab": 64, "model.position": "rope", "global_batch": 1,
        "precision.recipe": "fp32", "system.device": DEVICE.type, "system.compile": "false",
        **changes})
    _, want = losses(tiny.replace({"system.attention": "plain", "memory.recompute": "none"}))
    training, got = losses(tiny.replace({"system.attention": "triton"}))
    assert training.decisions.choices["attention"].used == "triton"
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want),
                               rtol=1e-6 if tiny.precision.recipe.name == "fp32" else 1e-2, atol=0)
