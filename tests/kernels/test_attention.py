"""Attention of every backend of a CPU against the definition in float64, forward and backward.

Only these tests catch a wrong tile, span, mask, group of heads or rounding of tiled and blocked
attention, a rule that a backend computes wrongly instead of refusing it, and FLOPs and peaks of
memory that are not those of the blocks that are visited.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lessons.rows.masked  # noqa: F401  adds rows
from lessons.rows.sparse_attention import BlockSparse
from lpkit import measure
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.kernels import blocked_attention, wide_product
from lpkit.kernels.blocked_attention import blocked, blocked_wide
from lpkit.kernels.tiled_attention import tiled
from lpkit.nn.attention import backend, partial_of
from lpkit.predict import memory
from lpkit.predict.flops import products
from lpkit.presets import preset
from lpkit.techniques.attention import Rule, Window
from lpkit.techniques.attention_backends import ATTENTION, query_blocks
from lpkit.techniques.operation import MicroBatch
from tests.kernels.attention_cases import defined, gradients, tensors
from tests.predict.test_predict import CPU

T = 300         # three blocks of 128 queries
HOLES = BlockSparse(block=16, table=tuple("".join("01"[(a + b) % 3 == 1] for b in range(19))
                                          for a in range(19))).rule(T)
RULES = {
    "full": Rule(), "keys to come": Rule(causal=False), "window": Rule(window=40),
    "window of one": Rule(window=1), "window and global": Rule(window=130, global_tokens=5),
    "many global tokens": Rule(window=20, global_tokens=200),
    "block-sparse": BlockSparse(block=16, local=2, stride=3).rule(T),
    "queries that see nothing": HOLES, "cap": Rule(soft_cap=1.5), "sinks": Rule(sinks=True),
    "documents": Rule(documents=True), "documents both ways": Rule(causal=False, documents=True),
    "all": Rule(window=50, global_tokens=2, documents=True, soft_cap=2.0, sinks=True),
    "later queries": Rule(query_start=3), "later keys": Rule(key_start=2, causal=False, sinks=True),
    "a part in a window": Rule(window=5, query_start=3, key_start=3),
}
FUNCTIONS = {name: ATTENTION[name].load()
             for name in ("plain", "tiled", "blocked", "blocked-wide", "sdpa")}
# Of the norm. In 16 bits tiled attention rounds a result once, and blocked attention rounds the
# weights and the products of a block, too.
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 0.012, torch.float16: 2e-3}
TILED = BOUNDS | {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def held(name, rule, arguments, dtype=torch.float64):
    exact = [t.detach().double().requires_grad_() if t is not None and t.requires_grad else t
             for t in arguments]
    got, (want, _) = FUNCTIONS[name](*arguments, rule=rule), defined(*exact, rule=rule)
    assert got.dtype == dtype
    ours, exactly = [got, *gradients(got, arguments)], [want, *gradients(want, exact)]
    for i, (result, true) in enumerate(zip(ours, exactly, strict=True)):
        bound = (TILED if name == "tiled" else BOUNDS)[dtype] * (2 if i and name == "tiled" else 1)
        bound = max(bound, 5e-7 if i == 4 else 0)       # sinks are float32
        nothing = 1e-12 if dtype == torch.float64 else 1e-6      # a gradient may be zero
        assert (result.double() - true).norm() <= bound * true.norm() + nothing, i


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_backend_computes_the_rule_or_names_its_field(rule, name):
    arguments = tensors(rule, Tq=T, Tk=T)
    try:
        held(name, rule, arguments)
    except ConfigError as error:
        assert name == "sdpa" and str(error).startswith("system.attention=sdpa has no ")
        field, value = str(error).partition("(its ")[2].partition("); ")[0].split("=")
        assert str(getattr(rule, field)) == value != str(getattr(Rule(), field)), error
    else:
        assert name != "sdpa" or not (rule.soft_cap or rule.sinks)


@pytest.mark.parametrize("name", ["tiled", "blocked", "blocked-wide"])
@pytest.mark.parametrize("dtype, length, groups, rule", [
    (torch.float32, 123, 4, "all"), (torch.bfloat16, T, 2, "all"), (torch.float16, T, 2, "all"),
    (torch.bfloat16, 123, 1, "queries that see nothing"), (torch.float32, 5, 1, "window"),
    (torch.float16, 1, 2, "cap")], ids=str)
def test_every_dtype_length_and_number_of_groups(dtype, length, groups, rule, name):
    arguments = tensors(RULES[rule], Tq=length, Tk=length, G=groups, dtype=dtype)
    held(name, RULES[rule], arguments, dtype)


@pytest.mark.parametrize("name", ["triton", "sdpa-cudnn"])
def test_a_kernel_refuses_a_rule_that_it_does_not_compute(name):
    for rule in RULES.values():
        if any(getattr(rule, field) != getattr(Rule(), field)
               and field not in (*ATTENTION[name].why_not.rule, "block")
               for field in Rule.__dataclass_fields__):
            with pytest.raises(ConfigError, match=f"system.attention={name} has no "):
                ATTENTION[name].load()(*tensors(rule, dtype=torch.bfloat16, E=16), rule=rule)


@pytest.mark.parametrize("name", [*FUNCTIONS, "triton", "sdpa-cudnn"])
def test_what_does_not_fit_the_rule_is_refused(name):
    attend = ATTENTION[name].load()
    q, k, v, *_ = tensors(Rule(), dtype=torch.float32, E=16)
    with pytest.raises(ConfigError, match="takes as many queries as keys, not 1 and 19"):
        attend(q[:, :, :1], k, v)
    if name in ("plain", "tiled", "blocked"):
        for rule, words in ((Rule(documents=True), "needs an id of each token's document"),
                            (Rule(sinks=True), "needs a score for each head"),
                            (Rule(block=4, blocks=((True,),)), "needs blocks for 19 tokens")):
            with pytest.raises(ConfigError, match=words):
                attend(q, k, v, rule=rule)
    elif name in ("sdpa", "sdpa-cudnn"):        # scores that nobody asked for count, too
        with pytest.raises(ConfigError, match=f"{name} has no sinks"):
            attend(q, k, v, None, torch.zeros(4), rule=Rule())


@pytest.mark.parametrize("field, value", [("window", 0), ("soft_cap", -1.0)])
def test_a_rule_that_means_nothing_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} of a rule must be above 0 or None"):
        Rule(**{field: value})


def test_a_model_gets_no_backend_that_computes_another_rule():
    capped, both = (Config().replace({"model.attention": kind, "data.policy": policy,
                                      "model.vocab": 257}).model for kind, policy in (
        ({"name": "full", "soft_cap": 20.0, "sinks": True}, "random-windows"),
        ({"name": "bidirectional"}, "masked")))
    for name, model in (("sdpa", capped), ("triton", both)):
        with pytest.raises(ConfigError, match=f"system.attention={name} has no "):
            backend(name, model)
    assert backend("triton", capped) and backend("sdpa", both)


def test_a_graph_of_a_user_refuses_too():
    """torch.compile traces the check, and what it says reaches the caller."""
    compiled = torch.compile(lambda *qkv: FUNCTIONS["sdpa"](*qkv, rule=Rule(soft_cap=2.0)),
                             backend="eager")
    with pytest.raises(Exception, match="has no cap on scores"):
        compiled(*tensors(Rule())[:3])


# ---- parts of the keys

def ring(part, q, k, v, rule):
    """Causal attention as two ranks compute it, of which each has half of the keys: the second half
    of the queries sees both."""
    (early, late), keys, values = (t.chunk(2, dim=2) for t in (q, k, v))
    parts = [part(late, keys[0], values[0], rule=replace(rule, causal=False)),
             part(late, keys[1], values[1], rule=rule)]
    outs, sums = zip(*parts)
    shares = torch.stack(sums).softmax(0)
    merged = sum(share[..., None].type_as(out) * out for share, out in zip(shares, outs))
    return torch.cat((part(early, keys[0], values[0], rule=rule)[0], merged), dim=2)


@pytest.mark.parametrize("name", [name for name, row in ATTENTION.items() if row.partial])
def test_parts_of_the_keys_are_merged_by_their_log_sums(name):
    """Answer and gradients, which go through the log-sums too, are those of all keys."""
    rule = Rule(soft_cap=1.5)
    q, k, v, *_ = tensors(rule, Tq=310, Tk=310)
    got, want = ring(partial_of(name), q, k, v, rule), defined(q, k, v, rule=rule)[0]
    for ours, exact in zip((got, *gradients(got, (q, k, v))), (want, *gradients(want, (q, k, v)))):
        assert (ours - exact).norm() <= 1e-12 * exact.norm()


def test_a_backend_without_a_gradient_of_log_sums_is_refused():
    with pytest.raises(ConfigError, match=r"sdpa gives no gradient of its log-sums, .*; choose one "
                                          r"of plain, tiled"):
        partial_of("sdpa")


# ---- tiled attention

def test_large_scores_neither_overflow_nor_vanish():
    """exp(1000) is beyond every format; the second tile has the larger scores, so that the first
    one shrinks to nothing."""
    q = torch.full((1, 1, 200, 4), 40.0)
    k = torch.cat((torch.full((1, 1, 150, 4), -30.0), torch.full((1, 1, 50, 4), 30.0)), dim=2)
    v = torch.randn(1, 1, 200, 4)
    out = tiled(q, k, v)
    for part in (slice(150), slice(150, 200)):
        values = v[:, :, part]
        mean = values.cumsum(2) / torch.arange(1, values.shape[2] + 1)[:, None]
        torch.testing.assert_close(out[:, :, part], mean, rtol=0, atol=1e-5)


def test_no_tokens_have_no_tile():
    assert tiled(*torch.zeros(3, 2, 4, 0, 8)).shape == (2, 4, 0, 8)


@pytest.mark.parametrize("context, kind", [
    (96, {}), (T, {}), (T, {"attention": Window(name="window", size=100)}),
    (T, {"attention": BlockSparse(name="block-sparse", block=32)})],
    ids=["one tile", "full", "window", "block-sparse"])
def test_flops_are_those_of_the_tiles_that_are_visited(context, kind):
    """By PyTorch's counter: two products over these pairs forward, five backward."""
    model = replace(ModelConfig(layers=1, width=32, heads=4, vocab=50, context=context), **kind)
    op = ATTENTION["tiled"].formula(MicroBatch(model=model, batch=2))
    square = sum(product.flops for product in products(model, batch=2) if product.pairs)
    q = torch.randn(3, 2, 4, context, 8, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = backend("tiled", model)(*q)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == pytest.approx(square * op.pairs_share)
    assert backward.get_total_flops() == pytest.approx(square * op.pairs_share * op.backward_pairs)


@pytest.mark.parametrize("context, recipe", [(160, "bf16"), (256, "fp32")])
def test_the_peak_of_a_step_that_ends_in_tiles(context, recipe):
    """Its last block is the peak here. What a tile works on is counted in whole tiles, which is up
    to 4% off in a model this small."""
    config = preset("cpu-3m").replace({
        "model.layers": 2, "model.width": 64, "model.vocab": 64, "model.mlp_width": 64,
        "model.context": context, "global_batch": 2, "grad_accum_steps": 1,
        "precision.recipe": recipe, "system.attention": "tiled"})
    predicted = memory(config, CPU, attention="tiled").peak_bytes
    assert predicted == pytest.approx(measure.memory(config, device="cpu").peak_bytes, rel=0.04)


# ---- blocked attention

def test_a_cpu_that_multiplies_in_a_loop_widens(monkeypatch):
    q, k, v, *_ = tensors(Rule(), Tq=T, Tk=T, dtype=torch.bfloat16)
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: False)
    wide, narrow = blocked_wide(q, k, v), blocked(q, k, v)
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: True)
    assert blocked(q, k, v).equal(wide) and not narrow.equal(wide)


IDS = {"one": lambda rng: torch.zeros(T, dtype=torch.int64),
       "of a token each": lambda rng: torch.randperm(T, generator=rng),
       "runs in another order": lambda rng: 2**62 - (torch.rand(T, generator=rng) < 0.02).cumsum(0),
       "runs that come back": lambda rng: torch.randint(-2, 2, (T // 20,), generator=rng)
       .repeat_interleave(20),
       "drawn for each token": lambda rng: torch.randint(0, 5, (T,), generator=rng)}


@pytest.mark.parametrize("rule", [Rule(documents=True),
                                  Rule(documents=True, window=150, global_tokens=3)],
                         ids=["full", "window"])
@pytest.mark.parametrize("name", IDS)
def test_documents_by_any_ids(name, rule):
    """Runs or not, in order or not; each row of the batch has others."""
    q, k, v, *_ = tensors(rule, Tq=T, Tk=T)
    rng = torch.Generator().manual_seed(1)
    held("blocked", rule, (q, k, v, torch.stack([IDS[name](rng) for _ in range(2)]), None))


@pytest.mark.parametrize("name", ["window and global", "queries that see nothing", "documents"])
def test_no_block_computes_what_its_spans_leave_out(name):
    """PyTorch's counter looks inside the kernel: two products over the pairs of spans forward, five
    backward, of which it does not count the two that add in place."""
    rule = RULES[name]
    q, k, v, documents, _ = (t if t is None else t.detach() for t in tensors(rule, Tq=T, Tk=T))
    with FlopCounterMode(display=False) as forward:
        out, sums = blocked_attention.attend.__wrapped__(q, k, v, documents, None, rule.words,
                                                         False)
    with FlopCounterMode(display=False) as backward:
        blocked_attention.gradients.__wrapped__(out, q, k, v, documents, None, sums, rule.words,
                                                False)
    computed = 0
    for ids in documents.tolist() if rule.documents else [[0] * T] * 2:
        begins = [ids.index(document) for document in ids]
        computed += sum((last - first) * sum(max(0, b - max(a, min(begins[first:last])))
                                             for a, b in spans)
                        for first, last, spans in query_blocks(rule, T))
    assert forward.get_total_flops() == 2 * 2 * 4 * 8 * computed
    assert backward.get_total_flops() == (5 - 2) * 2 * 4 * 8 * computed


@pytest.mark.parametrize("kind, batch, recipe, used", [
    ({"name": "full"}, 4, "fp32", "blocked"),
    ({"name": "window", "size": 40, "global_tokens": 3}, 1, "bf16", "blocked"),
    ({"name": "block-sparse", "block": 32}, 4, "bf16", "blocked-wide")], ids=str)
def test_the_peak_of_a_step_of_blocks(kind, batch, recipe, used, monkeypatch):
    """What is not in the formula are two numbers of each query of a block, and one of the
    losses."""
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: False)
    config = preset("cpu-3m").replace({
        "model.layers": 2, "model.width": 64, "model.vocab": 16, "model.mlp_width": 64,
        "model.context": T, "global_batch": batch, "precision.recipe": recipe,
        "system.attention": used, "model.attention": kind})
    measured, predicted = measure.memory(config, device="cpu"), memory(config, CPU)
    assert measured.module == "blocks.1.attention"
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=2e-3)


def test_the_operators_are_what_pytorch_asks_of_one():
    rule = RULES["all"]
    arguments = [t if t is None else t.detach() for t in tensors(rule, dtype=torch.float32)]
    torch.library.opcheck(blocked_attention.attend, (*arguments, rule.words, True),
                          test_utils=("test_schema", "test_faketensor"))
