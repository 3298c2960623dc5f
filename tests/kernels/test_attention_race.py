"""`system.attention=auto`: a wrong backend is refused and named, right ones are raced, and small
runs pay for neither.

Only these tests catch a planted backend (stale, off by one, without a gradient) that is not
refused, a race at other shapes than the run's, and a choice that the predictor does not share.
"""

import random
import time
from functools import partial

import pytest
import torch

import lessons.rows.sparse_attention  # noqa: F401  adds rows
from lessons.rows import adapters as adapters
from lpkit import hardware
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.execution import attention
from lpkit.kernels.choose import choose, wrong
from lpkit.measure import trace
from lpkit.nn.attention import CAUSAL, plain, sdpa
from lpkit.predict import predict
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import ATTENTION, Attending, AttentionBackend
from lpkit.techniques.machines import Machine
from lpkit.training import build

CPU = torch.device("cpu")
KINDS = {"full": "full", "window": {"name": "window", "size": 24},
         "global": {"name": "window", "size": 24, "global_tokens": 3},
         "blocks": {"name": "block-sparse", "block": 32}, "documents": "documents"}


def asked(kind="full", dtype="float32", **changes):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "context": 160, "attention": KINDS[kind],
             **changes}
    changes = ({f"model.{key}": value for key, value in sizes.items()}
               | {"data.policy": "random-documents"})
    return Attending(model=Config().replace(changes).model, dtype=dtype)


# ---- planted

def scaled(q, k, v, documents, sinks, *, rule):
    return 1.01 * plain(q, k, v, documents, sinks, rule=rule)


def zeros(q, k, v, documents, sinks, *, rule):
    """As FlashAttention 4 returned for causal:
    https://github.com/NVIDIA/TransformerEngine/issues/3528"""
    return plain(q, k, v, documents, sinks, rule=rule) * 0


def nan_row(q, k, v, documents, sinks, *, rule):
    out = plain(q, k, v, documents, sinks, rule=rule).clone()
    out[:, :, -1] = torch.nan
    return out


def off_by_one(q, k, v, documents, sinks, *, rule):
    """A query sees the next token too."""
    T, E = q.shape[-2:]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    seen = torch.ones(T, T, dtype=torch.bool).tril(1)
    return (q @ k.mT / E**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def edge(q, k, v, documents, sinks, *, rule, more=1):
    """A window as wide as left + right without its own token."""
    return plain(q, k, v, documents, sinks,
                 rule=Rule(window=rule.window + more, global_tokens=rule.global_tokens))


def wrong_backward(q, k, v, documents, sinks, *, rule):
    """Right forward; keys have no gradient of the last block."""
    return plain(q, torch.cat((k[:, :, :-1], k[:, :, -1:].detach()), dim=2), v, documents, sinks,
                 rule=rule)


class Stale:
    """Right the first time that it sees a shape."""

    def __init__(self):
        self.kept = {}

    def __call__(self, q, k, v, documents, sinks, *, rule):
        key = tuple(q.shape)
        if key not in self.kept:
            self.kept[key] = [t.detach().clone() for t in (q, k, v)]
        old = [(t * 0 + o) if t.requires_grad else o for t, o in zip((q, k, v), self.kept[key])]
        return plain(*old, documents, sinks, rule=rule)


PLANTED = {"scaled": lambda: scaled, "zeros": lambda: zeros, "a NaN": lambda: nan_row,
           "stale": Stale, "off by one": lambda: off_by_one,
           "too wide": lambda: edge, "too narrow": lambda: partial(edge, more=-1),
           "no gradient": lambda: wrong_backward}


def test_planted_backends_are_refused_and_right_ones_pass():
    """In turns through kinds, dtypes, widths and heads."""
    draw, passed = random.Random(0), {}
    for i, (name, plant) in enumerate([*PLANTED.items()] * 3):
        kind = "window" if name.startswith("too") else list(KINDS)[i % len(KINDS)]
        given = asked(kind, draw.choice(("float32", "bfloat16")), head_dim=draw.choice((8, 16, 40)),
                      kv_heads=draw.choice((1, 2, 4)), context=draw.choice((70, 130, 160)))
        kernel, hand = attention.of_backends(given), attention.at_hand(given, CPU)
        why = wrong(kernel, partial(plant(), rule=given.rule), hand)
        assert why.startswith("differs from its definition"), (name, kind, given, why)
        for right in attention.candidates(given) if i % 4 == 0 else ():
            passed[right] = passed.get(right, "") or wrong(kernel,
                                                           attention._with_rule(right, given.rule),
                                                           hand)
    assert set(passed) >= {"plain", "sdpa", "tiled"} and not any(passed.values()), passed


# ---- the race

@pytest.fixture
def planted(monkeypatch, tmp_path):
    """A wrong backend that would win, in the table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(ATTENTION, "planted",
                        AttentionBackend(operations=ATTENTION["sdpa"].operations,
                                         implementation=f"{__name__}:zeros_", assumed=False))
    for name in ("ON_A_CPU", "IN_16_BITS"):
        monkeypatch.setattr(attention, name, (*getattr(attention, name), "planted"))


def zeros_(q, k, v, documents=None, sinks=None, *, rule=CAUSAL):
    return sdpa(q, k, v, documents, rule=rule) * 0


def test_a_race_refuses_names_and_remembers(planted, monkeypatch, this_machine):
    given = asked("window")
    choice = attention.race(given, 2, CPU)
    assert choice.used in attention.candidates(given) and choice.used != "planted"
    assert "planted: differs from its definition: result 1 of 4" in choice.why
    assert "verified" in choice.why
    monkeypatch.setattr("lpkit.kernels.choose._find", lambda *a: pytest.fail("raced again"))
    assert attention.race(given, 2, CPU) == choice


def test_what_is_asked_for_by_name_is_verified(planted):
    with pytest.raises(ConfigError,
                       match=r"^system\.attention=planted: .* differs from its definition: .*; "
                             r"set system\.attention=plain$"):
        build.decide(Config().replace({"system.attention": "planted", "system.device": "cpu",
                                       "precision.recipe": "fp32"}))
    chosen = build.decide(Config().replace({"system.attention": "blocked-wide",
        "system.device": "cpu", "precision.recipe": "fp32"}))
    assert chosen.choices["attention"].why == "requested, and verified here"
    with pytest.raises(ConfigError,
                       match=r"system\.attention=sdpa-cudnn needs a GPU; sdpa can"):
        build.decide(Config().replace({"system.attention": "sdpa-cudnn", "system.device": "cpu"}))


def test_a_small_run_keeps_the_rule_and_a_long_one_races(planted, monkeypatch, this_machine):
    config = Config().replace({"system.device": "cpu", "precision.recipe": "fp32", "steps": 20})
    races = []
    monkeypatch.setattr(attention, "race", lambda *a: races.append(a)
                        or attention.Choice(asked="auto", used="sdpa", why="raced"))
    start = time.process_time()
    assert build.decide(config).choices["attention"].used == "sdpa" and not races
    assert time.process_time() - start < 1
    assert build.decide(config.replace({"steps": 10**7})).choices["attention"].why == "raced"
    assert len(races) == 1
    begun = {"chosen": {"attention": {"asked": "auto", "used": "blocked", "why": "raced"}}}
    again = build.decide(config.replace({"steps": 10**7}), before=begun).choices["attention"]
    assert (again.used, again.why) == ("blocked", "as when this run began") and len(races) == 1


@pytest.mark.parametrize("dtype, context", [("float32", 16), ("bfloat16", 300)])
def test_a_cpu_races_at_a_runs_shape_what_keeps_no_scores(monkeypatch, dtype, context,
        this_machine):
    """As many sequences and heads as a call of 4 GFLOP has; `plain` where its scores are no more
    than q."""
    given, seen = asked(dtype=dtype, context=context, head_dim=16), {}
    monkeypatch.setattr("lpkit.kernels.choose.choose",
                        lambda *a, **settings: seen.update(settings) or choose(*a, **settings))
    attention.race(given, 3, CPU)
    may = attention.ON_A_CPU if dtype == "float32" else attention.IN_16_BITS
    assert set(seen["offered"]) == {*may, *(["plain"] if context == 16 else [])}
    assert seen["raced"][0][0].shape == (3, 4, context, 16)
    monkeypatch.setattr(attention, "RACED_FLOPS", attention.flops(given.model) / given.model.L)
    attention.race(given, 3, CPU)
    assert seen["raced"][0][0].shape == (1, 4, context, 16)
    monkeypatch.setattr(attention, "RACED_FLOPS", attention.flops(given.model) / given.model.L / 4)
    attention.race(given, 3, CPU)
    # half of one group's pairs: fewer tokens
    assert seen["raced"][0][0].shape == (1, 2, round(context / 2**0.5 - 0.5), 16)


def test_a_short_run_is_ruled_by_what_multiplies_bf16(monkeypatch, this_machine):
    """With AMX PyTorch's kernel was 1.45 times as fast as blocks at 1,024 tokens; without, blocks
    are faster."""
    config = Config().replace({"system.device": "cpu", "precision.recipe": "bf16", "steps": 1})
    for tiles, path, used in ((True, "AVX512", "sdpa"), (False, "AVX512", "blocked"),
                              (True, "AVX2", "blocked")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda path=path: path)
        assert build.decide(config).choices["attention"].used == used
        there = Machine(name="here", title="here", kind="cpu", memory_bytes=2**36,
                        bytes_per_second=1e10, source="",
                        flops={"fp32": 1e11, "bf16": 8e11 if used == "sdpa" else 1.9e11})
        for machine in (there, hardware.room("cpu")):       # the latter decides whether a run fits
            assert predict(config, machine).assumptions["attention"] == used


@pytest.mark.parametrize("context, used", [(1016, "blocked"), (1017, "sdpa")])
def test_a_trace_counts_the_tokens_of_a_prefix_as_the_run_does(context, used):
    config = Config().replace({"system.device": "cpu", "precision.recipe": "bf16",
                               "model.context": context, "model.position": "rope",
                               "model.changes": [{"name": "prefix", "length": 8}]})
    for decided in (build.decide(config), trace._decide(config, "cpu")):
        assert decided.choices["attention"].used == used


def test_what_pytorch_runs_is_said_and_its_formula_is_refused(monkeypatch):
    given = asked("documents")
    assert attention.ran("sdpa", given, CPU) == "; here flash"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *a, **k: 0)
    with pytest.raises(ConfigError,
                       match=r"system\.attention=sdpa would use PyTorch's formula here, .*; use "
                             r"(tiled|blocked)"):
        attention.ran("sdpa", given, CPU, refuse=True)
