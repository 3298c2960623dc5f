"""Attention over a sequence that is cut over 2 and 4 processes, beside one process in float64: answers, gradients, bytes, balance."""

from dataclasses import replace

import pytest
import torch

from lpkit.parallel.context import joined, part
from lpkit.parallel.processes import Processes
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.contexts import CONTEXT
from tests.context_ranks import RULES, T

pytestmark = pytest.mark.dist
B, H, E = 2, 8, 16      # of tests.context_ranks
BACKENDS = {"ring": [name for name, row in ATTENTION.items() if row.partial],
            "all-to-all": ["plain", "tiled", "blocked"]}
# Of the largest number. Float32 sums some hundred terms, in another order. In bf16 one process alone is 1.2% off: a result is rounded
# once, by 2^-9, and `plain` rounds probabilities and their gradients besides; a part is rounded, and what comes home once a rank.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-6}


@pytest.fixture
def attended(parent):
    def run(cases, world, mutant=""):
        with Processes("tests.context_ranks:attend", {"cases": cases, "mutant": mutant}, world=world, parent=parent) as running:
            return list(zip(*running.wait()))       # by case, then by rank

    return run


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", CONTEXT)
def test_parts_of_a_sequence_attend_as_the_whole(attended, way, world):
    """Answers and gradients, of every kind of attention, by every backend; heads of their own and grouped."""
    cases = [(way, backend, name, kv_heads, dtype) for backend in BACKENDS[way] for name in RULES for kv_heads in (4, H)
             for dtype in TOLERANCE]
    for case, found in zip(cases, attended(cases, world), strict=True):
        for off, *_ in found:
            assert max(off) < TOLERANCE[case[-1]], (case, off)      # a NaN is not less, either
            assert len(off) == 4 + RULES[case[2]].sinks


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_the_formula_message_by_message(attended, world):
    """A ring sends k and v c - 1 times forward, and twice that backward; queries' heads do not travel. An exchange keeps 1 / c."""
    cases = [(way, "tiled", "causal", kv_heads, dtype) for way in CONTEXT for kv_heads in (2, 4, H) for dtype in TOLERANCE
             if way == "ring" or kv_heads % world == 0]
    for (way, _, _, G, dtype), found in zip(cases, attended(cases, world), strict=True):
        a_head = B * T // world * E * getattr(torch, dtype).itemsize
        for _, _, forward, backward in found:
            if way == "ring":
                kv = 2 * G * a_head
                assert forward == [kv] * (world - 1) and backward == [kv] * 2 * (world - 1)
            else:
                qkv, out = ((n * a_head) * (world - 1) // world for n in (H + 2 * G, H))
                assert forward == [qkv, out] and backward == [out, qkv]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_as_many_pairs_and_none_that_is_hidden(attended, world):
    """Of 2c x 2c pairs of chunks, c(2c + 1) are causal: 2c + 1 a rank. A window reaches chunks that hold a key of it, and no other."""
    cases = [("ring", "tiled", name, 4, "float32") for name in RULES if not RULES[name].documents]
    C = T // (2 * world)
    for (_, _, name, *_), found in zip(cases, attended(cases, world), strict=True):
        places = torch.arange(T)
        seen = RULES[name].sees(places[:, None], places[None]).view(2 * world, C, 2 * world, C).any(3).any(1)
        due = [int(seen[[rank, 2 * world - 1 - rank]].sum()) for rank in range(world)]
        assert [pairs for _, pairs, *_ in found] == due
        if name in ("causal", "soft cap", "sinks"):
            assert due == [2 * world + 1] * world


# A shift that a full causal mask forgives, if its pairs are those of the same places, shows under a window.
MUTANTS = {"chunks one after the other": ("all-to-all", "causal"), "a late chunk first": ("all-to-all", "causal"),
           "the ring the other way": ("ring", "causal"), "no weights": ("ring", "causal"), "no weights backward": ("ring", "causal"),
           "all queries begin at 0": ("ring", "window"), "all keys begin at 0": ("ring", "window"),
           "what sees nothing weighs": ("ring", "documents")}


@pytest.mark.prove
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_way_is_seen(attended, mutant):
    way, rule = MUTANTS[mutant]
    ((off, *_), *_), = attended([(way, "tiled", rule, 4, "float32")], 4, mutant)
    assert not max(off) < 100 * TOLERANCE["float32"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_are_in_zig_zag_and_joined_again(ranks):
    whole = torch.arange(48).view(2, 24)
    parts = [part(whole, rank, ranks) for rank in range(ranks)]
    C = 24 // (2 * ranks)
    for rank, own in enumerate(parts):
        late = (2 * ranks - 1 - rank) * C
        assert own[0].tolist() == [*range(rank * C, rank * C + C), *range(late, late + C)]
    assert torch.equal(joined(parts), whole)


SHIFTED = [rule for name, rule in RULES.items() if not rule.documents and not rule.sinks]


@pytest.mark.parametrize("rule", SHIFTED, ids=str)
def test_a_rule_of_a_part_is_the_part_of_the_rule(rule):
    """`sees`, and what follows of it: spans have every key that is seen, hides says where any is left out."""
    i = torch.arange(T)
    whole = rule.sees(i[:, None], i[None])
    for q0, k0, n in ((0, 0, 16), (16, 0, 16), (48, 32, 16), (32, 48, 16), (8, 40, 24), (40, 8, 24)):
        own = replace(rule, query_start=q0, key_start=k0)
        seen = own.sees(i[:n, None], i[None, :n])
        assert torch.equal(seen, whole[q0:q0 + n, k0:k0 + n])
        for first, last in ((0, n), (3, 9)):
            spans = own.spans(first, last, n)
            inside = torch.zeros(n, dtype=torch.bool)
            for a, b in spans:
                assert 0 <= a < b <= n
                inside[a:b] = True
            assert not (seen[first:last].any(0) & ~inside).any()
            for a, b in ((0, n), (2, 7)):
                assert own.hides(first, last, a, b) >= bool((~seen[first:last, a:b]).any())
