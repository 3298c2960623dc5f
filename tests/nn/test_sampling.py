"""Generation with a cache against the same without, in float64: every kind of attention, formats,
several prompts, past the context.

Only these tests catch: a key that a cache loses, keeps too long or puts into another's slot, codes
that are further off than their scale, a prompt that feels its neighbours, and predicted bytes or
seconds of a cache that are others.
"""

import json

import pytest
import torch

import lessons.rows.linear_attention
import lessons.rows.sparse_attention  # noqa: F401  adds rows
import lpkit
from lessons.decoding import cache_bytes, decoding, vector_bytes
from lpkit.cli import main
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.nn.attention import backend
from lpkit.nn.kv_cache import new_cache
from lpkit.nn.transformer import Transformer
from lpkit.predict import parameter_count
from lpkit.predict.roofline import FLOOR
from lpkit.presets import preset
from lpkit.techniques.attention import Rule
from lpkit.techniques.caches import CACHES, slots
from lpkit.training.sampling import generate
from lpkit.training.training import RandomTokens, Training

SMALL = dict(layers=2, width=32, heads=4, vocab=61, context=24, tied=False)
ROPE = dict(kv_heads=2, position="rope", norm="rmsnorm", mlp="swiglu", qk_norm=True)
KINDS = {
    "full": "full", "window": {"name": "window", "size": 5}, "documents": "documents",
    "window, global": {"name": "window", "size": 5, "global_tokens": 2},
    "window, all global": {"name": "window", "size": 2, "global_tokens": 24},
    "blocks": {"name": "block-sparse", "block": 3, "local": 2, "stride": 3},
    "table": {"name": "block-sparse", "block": 12, "table": ["10", "10"]},
    "table, nothing seen, cap": {"name": "block-sparse", "block": 12, "table": ["11", "00"],
                                 "soft_cap": 2.0},
    "cap": {"name": "full", "soft_cap": 2.0}, "sinks": {"name": "full", "sinks": True},
    "window, cap, sinks": {"name": "window", "size": 5, "global_tokens": 1, "soft_cap": 2.0,
                           "sinks": True},
    "blocks, sinks": {"name": "block-sparse", "block": 4, "local": 1, "stride": 2, "sinks": True},
}
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
POSITION = pytest.mark.parametrize("more", [{}, ROPE], ids=["learned", "rope"])
# float64 rounding: 2 layers of sums over at most 128 terms of order 1
ROUNDING = dict(rtol=0, atol=1e-11)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def model_of(config: ModelConfig, seed: int = 0) -> Transformer:
    """Its attention is far from even, so that a key too many or too few shows."""
    torch.manual_seed(seed)
    model = Transformer(config, backend("plain", config)).double().eval()
    return drawn_anew(model)


def drawn_anew(model: torch.nn.Module) -> torch.nn.Module:
    for name, p in model.named_parameters():
        p.copy_(torch.randn_like(p) * (0.4 if p.ndim > 1 else 0.2)
                + ("norm" in name and name.endswith("weight")))
    return model


def cache_of(config: ModelConfig, batch: int = 1, **how):
    return new_cache(config, batch, dtype=torch.float64, device="cpu", **how)


def documents(tokens):
    return torch.zeros_like(tokens)


def in_steps(model, tokens, cache, prompt: int):
    parts = [model(tokens[:, :prompt], cache)] if prompt else []
    return torch.cat(parts + [model(tokens[:, i:i + 1], cache)
                              for i in range(prompt, tokens.shape[1])], dim=1)


@KIND
@pytest.mark.parametrize("more, prompt", [({}, 11), (ROPE, 0)], ids=["learned", "rope"])
def test_a_cache_changes_no_logit(kind, more, prompt):
    config = ModelConfig(**SMALL, **more, attention=kind)
    model, tokens = model_of(config), torch.randint(0, 61, (2, 24),
        generator=torch.Generator().manual_seed(1))
    want = model(tokens, documents=documents(tokens))
    got = in_steps(model, tokens, cache_of(config, 2), prompt)
    torch.testing.assert_close(got, want, **ROUNDING)


@KIND
def test_sequences_at_different_places_take_a_step_together(kind):
    config = ModelConfig(**SMALL, **ROPE, attention=kind)
    model, tokens = model_of(config), torch.randint(0, 61, (3, 24),
        generator=torch.Generator().manual_seed(1))
    want, cache, lengths = model(tokens, documents=documents(tokens)), cache_of(config, 3), (0, 4,
        13)
    for b, n in enumerate(lengths):
        if n:
            model(tokens[b:b + 1, :n], cache.row(b))
    for i in range(24 - max(lengths)):
        at = torch.tensor(lengths) + i
        got = model(tokens[range(3), at][:, None], cache)[:, 0]
        torch.testing.assert_close(got, want[range(3), at], **ROUNDING)
    # and one begins anew beside the others
    cache.row(1).clear()
    if cache.goes_on:
        assert (torch.isfinite(model(tokens[:, :1], cache)).all()
                and cache.lengths.tolist() == [12, 1, 25])
        torch.testing.assert_close(cache.places[1].max(), torch.tensor(0))


@pytest.mark.parametrize("kind, beyond", [
    ("full", {"name": "window", "size": 24}), ("documents", {"name": "window", "size": 24}),
    (KINDS["cap"], {"name": "window", "size": 24, "soft_cap": 2.0}),
    (KINDS["sinks"], {"name": "window", "size": 24, "sinks": True}),
    *((KINDS[name], KINDS[name]) for name in ("window", "window, global", "window, cap, sinks")),
], ids=["full", "documents", "cap", "sinks", "window", "window, global", "window, cap, sinks"])
def test_past_the_context_the_oldest_key_goes(kind, beyond):
    """Which is what a model of a longer context computes, whose queries see as many keys."""
    longer = {**SMALL, **ROPE, "context": 80}
    config, wide = ModelConfig(**{**longer, "context": 24}, attention=kind), ModelConfig(**longer,
        attention=beyond)
    model, reference = model_of(config), model_of(wide)
    tokens = torch.randint(0, 61, (1, 80), generator=torch.Generator().manual_seed(1))
    cache = cache_of(config)
    held = cache.nbytes
    torch.testing.assert_close(in_steps(model, tokens, cache, 20), reference(tokens), **ROUNDING)
    assert cache.nbytes == held and cache.lengths.item() == 80


def test_learned_positions_and_blocks_end_with_the_context():
    for config in (ModelConfig(**SMALL), ModelConfig(**SMALL, **ROPE, attention="block-sparse")):
        model, cache = model_of(config), cache_of(config)
        assert not cache.goes_on
        in_steps(model, torch.zeros(1, 24, dtype=torch.int64), cache, 20)
        with pytest.raises(ConfigError, match=r"25 tokens do not fit model\.context=24"):
            model(torch.zeros(1, 1, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="one at a time; got 2"):
        model(torch.zeros(1, 2, dtype=torch.int64), cache)


@pytest.mark.parametrize("rule, most", [
    (Rule(), 40), (Rule(window=6), 6), (Rule(window=6, global_tokens=3), 9), (Rule(window=50), 40),
    (Rule(window=2, global_tokens=60), 40),
    (ModelConfig(attention={"name": "block-sparse", "block": 4, "local": 2,
                            "stride": 4}).attention.rule(40), 16),
    (ModelConfig(attention={"name": "block-sparse", "block": 4, "local": 1,
                            "stride": 99}).attention.rule(40), 8),
])
def test_what_a_query_sees_is_in_a_slot(rule, most):
    """No key is overwritten that a later query sees, and there are no more slots than are
    needed."""
    where, held = slots(rule, 40), {}
    for i in range(40):
        assert 0 <= where.of(i) < min(where.count, i + 1)
        held[where.of(i)] = i
        assert {j for j in range(i + 1) if rule.sees(i, j)} <= set(held.values())
    assert where.count == len(held) == most


# ---- formats

@pytest.mark.parametrize("E, scale", [(20, 1.0), (33, 1e-20), (64, 1.0), (80, 1e20)])
def test_codes_are_as_near_as_their_scale_lets_them(E, scale):
    x = torch.randn(2, 3, 50, E, generator=torch.Generator().manual_seed(0)) * scale
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2, 0] = 0, scale, 100 * scale
    for name, bound in (("same", lambda x: 0 * x),
                        ("int8", lambda x: x.abs().amax(-1, keepdim=True) * (1 / 254 + 1 / 2**15)),
                        ("int4", int4_bound)):
        stored = CACHES[name].load()(CACHES[name], x.shape, torch.float32, "cpu")
        stored.put((slice(None), slice(None), torch.arange(50)), x)
        error = (stored.read(50).double() - x.double()).abs()
        assert (error <= bound(x.double())).all(), name
        assert stored.nbytes == 2 * 3 * 50 * vector_bytes(CACHES[name], E, 4)


def int4_bound(x):
    """Half a step of the 15 in a group's range, which grows by the rounding of the least (2^-9 of
    it) and of the scale."""
    groups = CACHES["int4"].groups(x.shape[-1])
    size = -(-x.shape[-1] // groups)
    bounds = [(part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)) / 30 + part.abs().amax(-1,
        keepdim=True) * 2**-7
              for part in x.split(size, dim=-1)]
    return torch.cat([b.expand_as(part) for b, part in zip(bounds, x.split(size, dim=-1))], dim=-1)


@pytest.mark.parametrize("kind, format, bound", [
    ("full", "int8", 0.02), ("full", "int4", 0.2), (KINDS["window, global"], "int4", 0.2)], ids=str)
def test_logits_from_fewer_bits(format, bound, kind):
    """Relative, of the root mean square. Rounding of a key or value is 1/254 (int8) and 1/30 (int4)
    of a range at most, about a third of that in the mean; four times as much leaves room for two
    layers of it."""
    config = ModelConfig(**{**SMALL, "width": 128}, **ROPE, attention=kind)
    model, tokens = model_of(config), torch.randint(0, 61, (4, 24),
        generator=torch.Generator().manual_seed(1))
    want = model(tokens)
    error = (in_steps(model, tokens, cache_of(config, 4, format=format),
                      4) - want).square().mean().sqrt() / want.std()
    assert 0 < error < bound


# ---- generation

def training_of(kind="full", **more) -> Training:
    changed = {f"model.{key}": value for key, value in {**SMALL, "context": 16, **more,
        "attention": kind}.items()}
    config = Config().replace({**changed, "system.device": "cpu", "precision.recipe": "fp32",
                               "system.attention": "plain",
                                "data.policy": "random-documents"})
    torch.manual_seed(0)
    training = Training.build(config, data=RandomTokens(config))
    drawn_anew(training.model.double().eval())
    return training


def greedy(training, *prompts, count=30, **how):
    return [list(ids) for ids in zip(*generate(training, prompts, count, 0, None,
        [None] * len(prompts), **how))]


def without_cache(training, ids, count):
    """Token after token by whole forwards, from the newer half when the context is full; or, where
    that can go on, of a window."""
    config, ids, new, first = training.config.model, list(ids), [], 0
    for _ in range(count):
        if len(ids) - first > config.T or (not new and len(ids) >= config.T):
            first = len(ids) - config.T // 2
        tokens = torch.tensor([ids[first:]])
        new.append(int(training.model(tokens, documents=documents(tokens))[0, -1].argmax()))
        ids.append(new[-1])
    return new


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], list(range(20, 36)), list(range(40)), [3, 1, 4]]


# every kind in a format, and full attention in all; with either position
@pytest.mark.parametrize("kind, more, format", [
    pytest.param(kind, ({}, ROPE)[i % 2], format,
                 id=f"{name}-{('learned', 'rope')[i % 2]}-{format}")
    for i, (name, kind) in enumerate(KINDS.items()) for j, format in enumerate(CACHES)
    if name == "full" or i % len(CACHES) == j])
def test_several_prompts_are_continued_as_each_alone(kind, more, format):
    """Of different lengths, one with a single token, one as long as the context, one longer; and
    far past the context."""
    training = training_of(kind, **more)
    together = greedy(training, *PROMPTS, format=format)
    assert together == [greedy(training, ids, format=format)[0] for ids in PROMPTS]
    assert together[0] == together[5] != together[1] and all(len(new) == 30 for new in together)


@pytest.mark.parametrize("kind", [KINDS[name] for name in ("full", "documents", "blocks, sinks",
                                                           "window, cap, sinks")], ids=str)
def test_learned_positions_begin_again_from_the_newer_half(kind):
    training = training_of(kind)
    for ids in PROMPTS:
        assert greedy(training, ids)[0] == without_cache(training, ids, 30)


def test_draws_are_those_of_each_alone():
    training = training_of(**ROPE)

    def drawn(*prompts, seed):
        rngs = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
        return [list(ids) for ids in zip(*generate(training, prompts, 12, 1.0, 20, rngs))]

    together = drawn(*PROMPTS, seed=7)
    assert (together == [drawn(ids, seed=7 + i)[0] for i, ids in enumerate(PROMPTS)]
            and together[0] != together[5])


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    config = Config().replace({"model.layers": 1, "model.width": 32, "model.heads": 2,
                               "model.context": 32, "data.source": str(corpus / "*.py"),
                               "steps": 2, "global_batch": 2, "eval_batches": 1,
                               "system.device": "cpu", "schedule.warmup_steps": 1})
    with torch.enable_grad():
        return lpkit.train(config, out=tmp_path_factory.mktemp("sampling") / "run")


def test_a_run_answers_one_prompt_or_several(run, capsys):
    prompts = ["def ", "x", "return x + 1" * 9]
    texts = lpkit.sample(run, prompt=prompts, tokens=40, temperature=0)
    assert texts == [lpkit.sample(run, prompt=prompt, tokens=40, temperature=0)
                     for prompt in prompts]
    assert isinstance(texts, list) and all(text.startswith(prompt)
        for prompt, text in zip(prompts, texts))
    assert main(["sample", str(run.path), "--prompt", "def ", "--prompt", "x", "--tokens", "9",
                 "--temperature", "0", "--cache", "int8", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["prompts"] == ["def ", "x"] and printed["texts"] == lpkit.sample(run,
        prompt=["def ", "x"], tokens=9, temperature=0, cache="int8")


@pytest.mark.parametrize("words, sentence", [
    (["--cache", "int7"], "there is no cache 'int7'; did you mean 'int8'?"),
    (["--prompt", "a", "--prompt", ""], "prompt 2 is empty; give at least one character"),
    (["--prompt", ""], "the prompt is empty"), (["--tokens", "0"], "tokens must be positive"),
])
def test_wrong_input_is_one_sentence(run, capsys, words, sentence):
    assert main(["sample", str(run.path), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_no_prompt_at_all(run):
    with pytest.raises(ConfigError, match="no prompt in the list; give at least one"):
        lpkit.sample(run, prompt=[])
    with pytest.raises(ConfigError, match="prompt must be text or a list of text, got 5"):
        lpkit.sample(run, prompt=5)


# ---- predicted

@pytest.mark.parametrize("format, dtype", [("same", torch.float32), ("same", torch.bfloat16),
                                           ("int8", torch.float32), ("int4", torch.bfloat16)])
@KIND
def test_bytes_are_those_of_the_tensors(kind, dtype, format):
    for head_dim in (8, 33, 80):
        config = ModelConfig(**SMALL, kv_heads=2, head_dim=head_dim, attention=kind)
        for batch, tokens in ((1, 1), (3, 7), (2, 24), (1, 500)):
            cache = new_cache(config, batch, tokens=tokens, format=format, dtype=dtype,
                              device="cpu")
            assert (cache_bytes(config, tokens, batch, format, itemsize=dtype.itemsize)
                    == cache.nbytes)
            assert cache.nbytes == sum(part.nbytes for pair in cache.layers for stored in pair
                                       for part in stored.parts)


def test_a_window_takes_constant_memory_and_full_attention_grows():
    full, window = (preset("gpt2-124m").replace({"model.attention": kind}).model
                    for kind in ("full", "window"))
    assert [cache_bytes(window, n) for n in (256, 257, 1024)] == [cache_bytes(full, 256)] * 3
    assert cache_bytes(full, 1024) == 4 * cache_bytes(full, 256) == 12 * 2 * 1024 * 768 * 2


def test_seconds_of_a_token():
    """By hand: Llama 3 8B at 8,192 tokens on an H200, 2 bytes a number. Its head is no embedding; a
    row of that is read."""
    config = preset("llama-8b")
    step = decoding(config, "h200", efficiency=FLOOR, precision="bf16")
    weights = 2 * (parameter_count(config.model) - 128_256 * 4096)
    assert step.weight_bytes == weights and step.cache_bytes == 2 * 32 * 8 * 128 * 8192 * 2
    assert (step.seconds == pytest.approx((weights + step.cache_bytes) / 4.8e12)
            and step.limit == "bandwidth")
    eight = decoding(config, "h200", batch=8, format="int8", efficiency=FLOOR, precision="bf16")
    assert eight.weight_bytes == weights and eight.cache_bytes == 8 * 2 * 32 * 8 * (128 + 2) * 8192
    # decoded, read again
    assert eight.seconds == pytest.approx((weights + eight.cache_bytes + 2 * 8 * step.cache_bytes)
        / 4.8e12)
    assert decoding(config, "h200", tokens=1, batch=4096, efficiency=FLOOR).limit == "arithmetic"
    with pytest.raises(ConfigError, match="no cache 'int5'; did you mean"):
        cache_bytes(config.model, 1, format="int5")
    with pytest.raises(ConfigError, match="at least 1 token and 1 sequence; got 0 tokens"):
        cache_bytes(config.model, 0)


# ---- kinds without softmax

STATES = {"linear": "linear", "performer": {"name": "performer", "features": 12}, "delta": "delta"}


@POSITION
@pytest.mark.parametrize("kind", STATES.values(), ids=STATES)
def test_a_state_is_a_cache(kind, more):
    """Each logit as without one, several prompts as each alone, past the context, and the predicted
    bytes."""
    config = ModelConfig(**SMALL, **more, attention=kind)
    model, tokens = model_of(config), torch.randint(0, 61, (2, 24),
        generator=torch.Generator().manual_seed(1))
    cache = cache_of(config, 2)
    torch.testing.assert_close(in_steps(model, tokens, cache, 11), model(tokens), **ROUNDING)
    assert cache.nbytes == 2 * cache_bytes(config, 24, 2)           # float64 here, float32 there
    training = training_of(kind, **more)
    assert greedy(training, *PROMPTS) == [greedy(training, ids)[0] for ids in PROMPTS]
    with pytest.raises(ConfigError,
                       match="attention keeps a state, and no keys and values that 8 bits could "
                             "hold; choose cache=same"):
        cache_of(config, format="int8")
