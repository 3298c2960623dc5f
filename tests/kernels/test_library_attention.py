"""Libraries' attention. Stand-ins with the libraries' signatures are called in place of libraries
that need a GPU, and the result must be the definition's.

Only these tests catch a window, cut of documents or layout that a library is given wrongly, a
backend that is named as the nearest and cannot, and a kind of attention that has no meaning.
"""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from lessons.rows.sparse_attention import BlockSparse
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.nn import library_attention as libraries
from lpkit.nn.attention import backend, plain
from lpkit.nn.transformer import Transformer
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import (
    ATTENTION,
    WORDS,
    Attending,
    choose_attention,
    nearest,
)

RULES = {"full": Rule(), "window": Rule(window=9), "a window of one": Rule(window=1),
         "global": Rule(window=9, global_tokens=3),
         "blocks": Rule(block=16, blocks=tuple(tuple(a - b in (0, 2) for b in range(5))
             for a in range(5))),
         "table": BlockSparse(block=16, table=("10000", "01111", "00000", "11000", "00111")).rule(
             70),
         "documents": Rule(documents=True), "cap": Rule(soft_cap=1.5), "sinks": Rule(sinks=True),
         "all": Rule(window=20, documents=True, soft_cap=2.0, sinks=True)}
EXACT = {"rtol": 1e-12, "atol": 1e-12}      # the same sums in float64, in another order
KINDS = {"window": {"name": "window", "size": 8},
         "global_tokens": {"name": "window", "size": 8, "global_tokens": 2},
         "blocks": "block-sparse", "documents": "documents",
         "soft_cap": {"name": "full", "soft_cap": 20.0},
         "sinks": {"name": "full", "sinks": True}}


def tensors(rule, *, B=2, H=4, G=2, T=70, E=16, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, T, E, generator=rng, dtype=dtype, requires_grad=True)
               for heads in (H, G, G))
    documents = (torch.tensor([[0] * 30 + [1] * 1 + [2] * (T - 31), [5] * T]) if rule.documents
                 else None)
    sinks = torch.randn(H, generator=rng, dtype=dtype, requires_grad=True) if rule.sinks else None
    return q, k, v, documents, sinks


def asked(**changes):
    given = {key: changes.pop(key) for key in ("device", "dtype", "here", "capability")
             if key in changes}
    changes = ({f"model.{key}": value for key, value in changes.items()}
               | {"data.policy": "random-documents"})
    return Attending(model=Config().replace(changes).model, **given)


def same(call, rule, arguments):
    want, got = plain(*arguments, rule=rule), call(*arguments, rule=rule)
    torch.testing.assert_close(got, want, **EXACT)
    leaves = [t for t in arguments if t is not None and t.requires_grad]
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    for ours, theirs in zip(torch.autograd.grad(got, leaves, weights),
                            torch.autograd.grad(want, leaves, weights), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


# ---- the libraries' functions, by their documentation

def of_cuts(q, k, v, at, call):
    """(total, H, E): `call` on each piece (1, n, H, E)."""
    ends = at.tolist()
    assert at.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(q)
    return torch.cat([call(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in pairwise(ends)])


def window_of(window_size, causal):
    """Left and right are inclusive, (-1, -1) are all; FlashAttention's `causal` sets right to 0."""
    left, right = window_size
    assert causal or right == 0
    return Rule(window=None if left == -1 else left + 1)


def tokens_first(q, k, v, rule):
    """(B, T, H, E)"""
    return plain(*(t.transpose(1, 2) for t in (q, k, v)), rule=rule).transpose(1, 2)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                    softcap=0.0, alibi_slopes=None,
                    deterministic=False, return_attn_probs=False):
    rule = window_of(window_size, causal)
    return tokens_first(q, k, v, Rule(window=rule.window, soft_cap=softcap or None))


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0):
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return of_cuts(q, k, v, cu_seqlens_q, lambda *qkv: flash_attn_func(*qkv, causal=causal,
        window_size=window_size, softcap=softcap))


@pytest.fixture
def stand_ins(monkeypatch):
    def module(name, **functions):
        stand_in = ModuleType(name)
        vars(stand_in).update(functions)
        monkeypatch.setitem(sys.modules, name, stand_in)

    module("flash_attn", flash_attn_func=flash_attn_func,
           flash_attn_varlen_func=flash_attn_varlen_func)


def can(row, rule):
    """Whether its limits have all that the rule has."""
    return all(name in row.why_not.rule for name in WORDS
               if getattr(rule, name) != getattr(Rule(), name))


@pytest.mark.parametrize("kind", [kind for kind in RULES
                                  if can(ATTENTION["flash-attn"], RULES[kind])])
def test_a_library_is_told_the_rule(kind, stand_ins):
    same(libraries.flash_attn, RULES[kind], tensors(RULES[kind]))


def test_a_batch_is_cut_once_and_again_when_it_changes(stand_ins, monkeypatch):
    calls = []
    monkeypatch.setattr(libraries, "cuts", lambda documents, cut=libraries.cuts: (calls.append(1),
        cut(documents))[1])
    rule = Rule(documents=True)
    arguments = tensors(rule)
    for _ in range(2):
        same(libraries.flash_attn, rule, arguments)
    assert len(calls) == 1
    arguments[3][1, 40:] = 6
    same(libraries.flash_attn, rule, arguments)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", RULES)
def test_flex_is_told_the_rule(kind):
    """Forward: it has no backward on a CPU, and uncompiled it makes the scores that the definition
    makes."""
    rule = RULES[kind]
    arguments = tuple(t if t is None else t.detach() for t in tensors(rule))
    torch.testing.assert_close(libraries.flex(*arguments, rule=rule), plain(*arguments, rule=rule),
                               **EXACT)
    assert "has no backward on a CPU; sdpa can" in ATTENTION["flex"].why_not(asked())


def test_a_kernel_by_name_never_falls_to_another():
    q, k, v, *_ = tensors(Rule())
    with pytest.raises(RuntimeError, match="No viable backend"):
        ATTENTION["sdpa-cudnn"].load()(q, k, v)


# ---- who cannot says why, and what can

@pytest.mark.parametrize("name, given, why", [
    ("sdpa-cudnn", {"head_dim": 60},
     "takes heads up to 256 that are multiples of 8, not 60; sdpa can"),
    ("flash-attn", {"dtype": "float32"}, "takes bfloat16 or float16, not float32; sdpa can"),
    ("flash-attn", {"attention": {"name": "full", "sinks": True}}, "has no sinks; triton can"),
    ("sdpa-cudnn", {"device": "cpu"}, "needs a GPU; sdpa can"),
    ("flash-attn", {"here": True},
     "needs the package flash-attn, which is not installed here; sdpa can"),
    ("flash-attn", {"capability": (7, 5)},
     "needs compute capability 8.0, and here is 7.5; sdpa can")])
def test_why_not_is_one_clause_with_what_can(name, given, why):
    given = {"device": "gpu", "dtype": "bfloat16", **given}
    assert ATTENTION[name].why_not(asked(**given)) == why


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_what_is_named_as_nearest_can(kind, device):
    changes = {"attention": KINDS[kind]} if kind else {}
    for dtype in ("float32", "bfloat16"):
        given = asked(device=device, dtype=dtype, **changes)
        for name, row in ATTENTION.items():
            if why := row.why_not(given):
                assert "\n" not in why and not ATTENTION[nearest(given)].why_not(given), name
        used, _ = choose_attention("auto", device=device, low_precision=dtype != "float32",
                                   model=given.model)
        assert ATTENTION[used].assumed, "a prediction takes what has to be tried first"


@pytest.mark.parametrize("key, name, way", [
    ("model.attention", "sdpa", "set system.attention=sdpa, or choose one of full, window"),
    ("system.attention", "window", "set model.attention=window, or choose one of auto, plain"),
    ("model.attention", "spda", "choose one of"),
    ("optimizer", "cosine", "set schedule=cosine, or choose one of")])
def test_a_kind_is_no_backend_and_the_reverse(key, name, way):
    with pytest.raises(ConfigError, match=rf"^there is no {key} '{name}'; {way}"):
        Config().replace({key: name})


def test_asked_for_and_impossible_is_one_sentence():
    with pytest.raises(ConfigError, match=r"^system\.attention=flash-attn needs a GPU; sdpa can$"):
        choose_attention("flash-attn", device="cpu", low_precision=False, model=ModelConfig())


@pytest.mark.parametrize("changes, why", [
    ({"model.attention": {"name": "window", "size": 0}}, r"model\.attention\.size"),
    ({"model.kv_heads": 3}, "kv_heads may be 1, 2, 4"),
    ({"model.attention": {"name": "block-sparse", "block": 0}}, r"model\.attention\.block"),
    ({"model.attention": {"name": "full", "soft_cap": -1.0}}, r"model\.attention\.soft_cap"),
    *[({"model.attention.name": "block-sparse", "model.attention.table": table},
       "table must have 4 rows of 4 digits 0 or 1, one for each 64")
      for table in ("10,11", ["1000"] * 3 + ["10000"], ["1000"] * 3 + ["100x"])],
    ({"model.attention": {"name": "block-sparse", "table": [1000] * 4}}, r"model\.attention\.table "
        r"must be")])
def test_impossible_kinds_are_one_sentence(changes, why):
    with pytest.raises(ConfigError, match=why) as error:
        Config().replace(changes)
    assert "\n" not in str(error.value)


def test_a_table_of_ones_own_is_as_good_as_a_pattern():
    strided = ModelConfig(attention="block-sparse")
    table = ["1000", "1100", "1110", "1011"]
    own = Config().replace({"model.attention": "block-sparse",
                            "model.attention.table": ",".join(table)})
    assert (own == Config.from_yaml(own.to_yaml())
            == Config().replace({"model.attention": {"name": "block-sparse", "table": table}}))
    assert (own.model.attention.rule(256) == strided.attention.rule(256)
            and own.model.attention.rule(256).pairs(256) == 256 * 257 // 2 - 64 * 64)


@pytest.mark.parametrize("shape", [(2, 21), (2, 19), (1, 20)])
def test_documents_have_an_id_for_each_token(shape):
    config = ModelConfig(layers=1, width=16, heads=2, vocab=10, context=20,
                         attention=asked(attention="documents").model.attention)
    model = Transformer(config, backend("plain", config))
    documents = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ConfigError, match="give one id for each token"):
        model(torch.zeros(2, 20, dtype=torch.long), documents=documents)
    model(torch.zeros(2, 20, dtype=torch.long), documents=torch.zeros(2, 20, dtype=torch.long))
