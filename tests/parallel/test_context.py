"""Only these tests catch attention over a cut sequence that is not the attention of one process in
float64, unequal work, wrong messages of a ring or an exchange, and a training over context ranks
whose losses, messages, bytes or checkpoints are not as they should be."""


import pytest
import torch

import lessons.rows.context
import lessons.rows.linear_attention  # noqa: F401  adds rows
from lessons.ranks.messages import messages
from lessons.rows import adapters as adapters
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.errors import ConfigError
from lpkit.measure.trace import predict_trace
from lpkit.parallel.context import share
from lpkit.parallel.processes import Processes
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.layouts import refuse_untrainable
from lpkit.training import build
from lpkit.training.training import Training
from tests.parallel.context_ranks import RULES, T, updates

pytestmark = pytest.mark.dist
B, H, E = 2, 8, 16      # of tests.parallel.context_ranks
# Of the largest number. Float32 sums some hundred terms, in another order. In bf16 one process
# alone is 1.2% off: a result is rounded once, by 2^-9, and `plain` rounds probabilities and their
# gradients besides; a part is rounded, and what comes home once a rank.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-6}
PARTIAL = [name for name, row in ATTENTION.items() if row.partial]
MANY = [("ring", backend) for backend in PARTIAL] + [
    ("all-to-all", backend) for backend in ("plain", "tiled", "blocked")]
BOTH = [("ring", "tiled"), ("all-to-all", "tiled")]
# way, backend, rule, key/value heads, dtype: every rule by every backend, and others of each
KINDS = [(*way, rule, 4, "float32") for way in MANY for rule in RULES]
NARROW = [(*way, rule, H, "bfloat16") for way in BOTH for rule in RULES]
HEADS = [(*way, "causal", heads, dtype) for way in BOTH for heads in (2, 4, H)
         for dtype in TOLERANCE]


def on_context(parent, function, job, world):
    with Processes(f"tests.parallel.context_ranks:{function}", job, world=world,
                   parent=parent) as running:
        return running.wait()


@pytest.fixture(scope="module", params=[2, 4])
def attended(request, parent):
    """Ranks, and by case what each of them found."""
    world = request.param
    cases = [case for case in dict.fromkeys(KINDS + NARROW + HEADS)
             if (world == 2 or case[1] == "tiled") and (case[0] == "ring" or case[3] % world == 0)]
    by_rank = on_context(parent, "attend", {"cases": cases}, world)
    return world, dict(zip(cases, zip(*by_rank), strict=True))


def test_parts_of_a_sequence_attend_as_the_whole(attended):
    """Answers and gradients, of every kind of attention, by every backend; heads of their own and
    grouped."""
    for case, by_rank in attended[1].items():
        for off, *_ in by_rank:
            assert max(off) < TOLERANCE[case[-1]], (case, off)      # a NaN is not less, either
            assert len(off) == 4 + RULES[case[2]].sinks


def test_bytes_are_those_of_the_formula_message_by_message(attended):
    """A ring sends k and v c - 1 times forward, and twice that backward; queries' heads do not
    travel. An exchange keeps 1 / c."""
    world, by_case = attended
    for way, backend, rule, G, dtype in by_case.keys() & {*HEADS}:
        a_head = B * T // world * E * getattr(torch, dtype).itemsize
        kv, qkv, out = (n * a_head for n in (2 * G, H + 2 * G, H))
        for _, _, forward, backward in by_case[way, backend, rule, G, dtype]:
            if way == "ring":
                assert forward == [kv] * (world - 1) and backward == [kv] * 2 * (world - 1)
            else:
                sent = [n * (world - 1) // world for n in (qkv, out)]
                assert forward == sent and backward == sent[::-1]


def test_ranks_compute_as_many_pairs_and_none_that_is_hidden(attended):
    """Of 2c x 2c pairs of chunks, c(2c + 1) are causal: 2c + 1 a rank. A window reaches chunks that
    hold a key of it, and no other."""
    world, by_case = attended
    C, places = T // (2 * world), torch.arange(T)
    for name, rule in RULES.items():
        if rule.documents:
            continue
        seen = rule.sees(places[:, None], places[None])
        seen = seen.view(2 * world, C, 2 * world, C).any(3).any(1)
        due = [int(seen[[rank, 2 * world - 1 - rank]].sum()) for rank in range(world)]
        assert [pairs for _, pairs, *_ in by_case["ring", "tiled", name, 4, "float32"]] == due
        if name in ("causal", "soft cap", "sinks"):
            assert due == [2 * world + 1] * world


# ---- in training

SMALL = Config().replace({
    "model.layers": 2, "model.width": 32, "model.heads": 4, "model.context": 32, "global_batch": 4,
    "grad_accum_steps": 2, "steps": 20, "precision.recipe": "fp32", "system.device": "cpu",
    "system.threads": 1, "schedule": "constant", "eval_batches": 2, "checkpoint_every": 0})
LLAMA = {"model.position": "rope", "model.kv_heads": 2, "model.norm": "rmsnorm",
         "model.mlp": "swiglu"}
FLOAT32 = {"parallel.gathered": "float32"}
MODELS = [
    {}, LLAMA | {"memory.recompute": "block", "memory.cross_entropy": "chunked"},
    LLAMA | {"model.attention": "window"}, {"model.changes": ["lora"]},
    # not all targets count
    LLAMA | {"model.attention": "documents", "data.policy": "spread-documents"}]


def axes(**sizes):
    return {f"parallel.{name}": value for name, value in sizes.items()}


RING, EXCHANGE = axes(context=2), axes(context=2, attention="all-to-all")
ON_TWO = [*((MODELS[0], way) for way in (
    RING | axes(zero=0), RING | axes(zero=1), RING | axes(zero=3) | FLOAT32,
    EXCHANGE | axes(zero=0), EXCHANGE | axes(zero=1), EXCHANGE | axes(zero=3) | FLOAT32)),
    *((model, way | axes(zero=1)) for model in MODELS[1:] for way in (RING, EXCHANGE))]
ON_FOUR = [(MODELS[0], way) for way in (
    axes(context=4, zero=0), axes(context=4, zero=3) | FLOAT32,
    axes(context=4, zero=1, attention="all-to-all"), RING | axes(data=2, zero=0),
    RING | axes(shard=2, zero=1), EXCHANGE | axes(data=2, zero=3) | FLOAT32,
    RING | axes(tensor=2, zero=0), EXCHANGE | axes(tensor=2, zero=1))]


@pytest.mark.slow
@pytest.mark.parametrize("world, cases", [(2, ON_TWO), (4, ON_FOUR)], ids=["2 ranks", "4 ranks"])
def test_losses_are_those_of_one_process_and_messages_those_of_the_formula(parent, world, cases):
    """In float32. Sums in another order differ by some 2^-24 an update; the norm is a sum of
    squares."""
    configs = [SMALL.replace(model | way) for model, way in cases]
    by_rank = on_context(parent, "trained", {"configs": [config.to_dict() for config in configs],
                                             "updates": 5}, world)
    alone = [updates(Training.build(SMALL.replace(model)), 5) for model in MODELS]
    for (model, _), config, results in zip(cases, configs, zip(*by_rank), strict=True):
        *numbers, sent = results[0]
        assert all(other[:3] == numbers for other in results), f"ranks differ in {config.parallel}"
        for got, due in zip(numbers, alone[MODELS.index(model)]):
            assert got == pytest.approx(due, rel=1e-5), config.parallel
        assert sent == sorted([*message, times]
                              for message, times in messages(config).items()), config


@pytest.mark.slow
def test_a_rank_holds_what_a_trace_says_to_the_byte(on_ranks):
    configs = [SMALL.replace({"model.width": 64, "model.context": 128, "grad_accum_steps": 1} | way)
               for way in (RING | axes(zero=0), RING | axes(zero=3) | FLOAT32,
                           EXCHANGE | axes(zero=1))]
    results = on_ranks("each", SMALL, of="counted",
                       configs=[config.to_dict() for config in configs])
    for config, by_rank in zip(configs, zip(*results), strict=True):
        traced = predict_trace(config, 2, layout=config.parallel)
        for *_, peak, rows in by_rank:
            assert (peak, rows) == (traced.peak_bytes, traced.rows)


@pytest.mark.parametrize("changes, sentence", [
    ({"model.context": 36, **axes(context=4)},
     r"model.context=36 does not split into 2 x context=4 pieces .*; context may be 3 or 6"),
    (LLAMA | axes(context=4, attention="all-to-all"),
     r"split 2 key/value heads over context=4 ranks, .*ring splits none; context may be 2"),
    ({"model.attention": "linear", **RING},
     r"model.attention=linear takes whole sequences; .*; set parallel.context=1"),
    ({"model.changes": ["prefix"], **LLAMA, **RING}, r"model.changes=prefix takes whole sequences"),
    ({"system.attention": "sdpa", **RING},
     r"system.attention=sdpa does not compute the gradient .*; set system.attention=auto"),
    ({"system.compile": True, **RING},
     r"system.compile=true compiles whole blocks, and parallel.context=2 sends messages inside")])
def test_what_cannot_be_cut_is_refused_before_a_process_starts(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build.decide(SMALL.replace(changes))
    refuse_untrainable(SMALL.replace({"system.attention": "sdpa", **EXCHANGE}))


def test_a_rank_reads_its_tokens_and_where_they_stand():
    tokens = torch.arange(32).view(2, 16)
    batch = Batch(tokens, tokens + 1, weights=tokens.float(), extra={"scores": tokens * 2})
    own = share(batch, 1, 2)
    assert own.tokens[1].tolist() == [*range(20, 28)] and own.places[1].tolist() == [*range(4, 12)]
    assert torch.equal(own.targets, own.tokens + 1)
    assert torch.equal(own.extra["scores"], own.tokens * 2)
    assert own.chunk(2)[1].beside["places"].tolist() == own.places[0].tolist()
