"""Adapters: what is trained, to the byte; the model that they begin as; the Linear that they
equal.

Only these tests catch: an adapter that begins as another model, trains or keeps other weights than
its row says, or is another Linear after merging; bytes or FLOPs of it counted wrongly; ranks,
recomputation or a cache that change its numbers.
"""

import random
import re
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lpkit
from lessons.activations import kept
from lessons.rows import adapters as adapters
from lessons.rows.adapters_torch import Dora
from lessons.saved import saved_bytes
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.nn.adapters import Adapter
from lpkit.nn.kv_cache import new_cache
from lpkit.nn.transformer import cross_entropy
from lpkit.predict.flops import training_flops
from lpkit.predict.ledger import memory
from lpkit.predict.prediction import predict
from lpkit.techniques.adapters import AdapterRow as Row
from lpkit.techniques.adapters import adapted
from lpkit.techniques.blocks import MODEL_CHANGES
from lpkit.training import build
from lpkit.training.checkpoint import load_latest
from lpkit.training.sampling import trained
from lpkit.training.training import RandomTokens, Training
from tests import processors
from tests.techniques.test_promise import _cpu
from tests.training.resuming import in_parts

ADAPTERS = {name: row for name, row in sorted(MODEL_CHANGES.items()) if isinstance(row, Row)
            and name != "quantised-base"}
SMALL = Config().replace({"model.layers": 2, "model.width": 48, "model.heads": 6,
                          "model.kv_heads": 2, "model.mlp": "swiglu",
                          "model.context": 32, "global_batch": 2, "steps": 30,
                          "schedule.warmup_steps": 3, "precision.recipe": "fp32",
                          "system.device": "cpu",
                          "system.threads": 1, "eval_batches": 1, "optimizer.lr": 0.01})
OPTIONS = {"lora": {"rank": 4}, "dora": {"rank": 4}, "rslora": {"rank": 4}, "pissa": {"rank": 4},
           "bottleneck": {"width": 8}, "ia3": {},
           "prompt": {"length": 8}, "prefix": {"length": 8}}
VIRTUAL = ("prompt", "prefix")
# each is one Linear
LINEAR = [name for name in ADAPTERS if name not in ("bottleneck", *VIRTUAL)]


def of(name, base=SMALL, **more):
    if name in VIRTUAL:
        base = base.replace({"model.position": "rope"})
    return base.replace({"model.changes": [{"name": name, **OPTIONS[name], **more}]})


def built(config):
    return Training.build(config, data=RandomTokens(config, "cpu"))


# a shared A is of those with a rank alone
EACH = [(name, shared) for name in ADAPTERS for shared in (False, True)
        if not shared or "rank" in OPTIONS[name]]


@pytest.mark.parametrize("name, shared", EACH)
def test_trained_weights_are_those_of_the_description(name, shared):
    config = of(name, **({"shared": True} if shared else {}))
    training = built(config)
    trained = {n: p for n, p in training.model.named_parameters() if p.requires_grad}
    predicted = predict(config, "h200")
    assert sum(p.numel() for p in training.model.parameters()) == predicted.parameters
    training.update(0)
    states = [t for key, t in training.state_dict().items() if key.startswith("optimizer/")
              and not key.endswith("/step") and torch.is_tensor(t)]
    assert sum(t.nbytes for t in states) == 2 * 4 * sum(p.numel() for p in trained.values())
    assert all(p.grad is None for n, p in training.model.named_parameters() if n not in trained)


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name not in VIRTUAL])
def test_it_begins_as_the_model_that_it_adapts(name):
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        due, logits = (built(config).logits(tokens) for config in (SMALL, of(name)))
    torch.testing.assert_close(logits, due, rtol=0, atol=2e-6 if name == "pissa" else 0)


@pytest.mark.parametrize("name, shared", [pair for pair in EACH if pair[0] in LINEAR])
def test_merged_it_is_one_linear(name, shared):
    """In float64, with weights of every adapter drawn anew: to 1e-12."""
    training = built(of(name, **({"shared": True} if shared else {})))
    model, generator = training.model.double(), torch.Generator().manual_seed(2)
    for p in model.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    assert adapters
    for adapter in adapters:
        x = torch.randn(5, adapter.in_features, generator=generator, dtype=torch.float64)
        weight, bias = adapter.merged()
        torch.testing.assert_close(torch.nn.functional.linear(x, weight.double(),
            bias if bias is None else bias.double()), adapter(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_peak_in_16_bits_is_near_the_trace_on_each_processor(name, each_processor):
    """Attention and products are others there; a wide product saves no input of a frozen weight."""
    config = of(name, SMALL.replace({"model.width": 96, "model.context": 128, "global_batch": 4,
                                     "precision.recipe": "bf16"}))
    formula, trace = memory(config, _cpu()).peak_bytes, lpkit.predict_trace(config).peak_bytes
    assert formula == pytest.approx(trace, rel=0.02)


@pytest.mark.parametrize("settings, sentence", [
    ({"name": "lora", "rank": 49}, r"has rank 49, more than attention.qkv \(80 x 48\) has; use at "
                                   r"most 48"),
    ({"name": "lora", "targets": ["attention.q"]}, "has the target 'attention.q', but no Linear of "
                                                   "a block is called so; did you mean"),
    ({"name": "lorra"}, "did you mean 'lora'")])
def test_bad_settings(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        predict(SMALL.replace({"model.changes": [settings]}), "h200")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return lpkit.train(SMALL, out=tmp_path_factory.mktemp("base") / "run")


@pytest.mark.parametrize("name", ADAPTERS)
def test_it_begins_from_a_run_and_resumes_bit_for_bit(name, base, tmp_path):
    config = of(name).replace({"start.run": str(base.path), "steps": 6, "checkpoint_every": 3})
    whole = lpkit.train(config, out=tmp_path / "whole")
    parts = in_parts(config, tmp_path / "parts", 3)
    assert [line["loss"] for line in parts.metrics] == [line["loss"] for line in whole.metrics]
    held = {name for name in load_latest(whole.checkpoints)[0].tensors if name.startswith("model/")}
    assert held and not any(".base." in name or "norm" in name for name in held)


def test_targets_are_in_the_order_of_the_model():
    """In which A is drawn: in that of a set, one seed would be another adapter in every process."""
    names = [f"mlp.{i}" for i in range(20)]
    assert adapted(names, ADAPTERS["lora"].settings) == names


def drawn(seed):
    """A config of any adapter, beside other techniques of memory and precision."""
    rng = random.Random(seed)
    name = rng.choice([*ADAPTERS])
    heads = rng.choice([2, 4])
    base = SMALL.replace({
        "model.layers": rng.randint(1, 5), "model.width": 16 * heads * rng.randint(1, 3),
        "model.heads": heads, "model.kv_heads": rng.choice([None, 1, heads]),
        "model.mlp": rng.choice(["gelu", "swiglu"]),
        "model.norm": rng.choice(["layernorm", "rmsnorm"]),
        "model.position": rng.choice(["learned", "rope"]),
        "model.bias": rng.choice([True, False]), "model.tied": rng.choice([True, False]),
        "model.context": rng.choice([64, 128]),
        "global_batch": 4, "grad_accum_steps": rng.choice([1, 2]),
        "precision.recipe": rng.choice(["fp32", "bf16", "fp8-tensorwise"]),
        "memory.recompute": rng.choice(["none", "block"]),
        "memory.cross_entropy": rng.choice(["full", "chunked"]),
        "memory.moment_format": rng.choice(["float32", "int8"]),
        "optimizer": rng.choice(["adamw", "lion", "momentum"])})
    if base.precision.recipe.name != "fp32":
        base = base.replace({"memory.param_dtype": rng.choice(["fp32", "bf16"])})
    own = {key: value for key, value in {"rank": 16, "width": 32, "length": 20}.items()
           if key in OPTIONS[name]}
    shared = {"shared": rng.choice([True, False])} if "rank" in own else {}
    if name in VIRTUAL:
        base = base.replace({"model.position": "rope"})
    return base.replace({"model.changes": [{"name": name, **own, **shared}]})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_peaks_of_drawn_configs(seed, monkeypatch):
    """In 8 bits the formula says a doubt, and how far it was off."""
    config = drawn(seed)
    # with AVX2 blocked attention works in float32
    monkeypatch.setenv(processors.VARIABLE, ("AVX512", "AMX")[seed % 2])
    formula, trace = memory(config, _cpu()), lpkit.predict_trace(config)
    low = config.precision.recipe.name == "fp8-tensorwise"
    assert ("short-lived tensors of adapters in low precision" in formula.doubt) == low
    least, most = (-0.15, 0.05) if low else (-0.02, 0.02)
    assert least < formula.peak_bytes / trace.peak_bytes - 1 < most, str(config.to_dict()["model"])


@pytest.mark.parametrize("name", [*LINEAR, *VIRTUAL])
def test_flops_are_those_that_torch_counts(name):
    """But for what the first block need not hand down: its input has no gradient."""
    config = of(name, SMALL.replace({"system.attention": "plain"}))
    training = built(config)
    with FlopCounterMode(display=False) as counter:
        training.forward_backward(training.batch(0))
    tokens, D, qkv = 2 * 32, 48, 48 + 2 * 2 * 8
    unused = 2 * tokens * D * (qkv + 3 * OPTIONS[name].get("rank", 0))
    if name == "prefix":        # nor have its queries
        unused += 2 * 2 * D * (32 + 8)**2
    unused *= name != "prompt"
    assert training_flops(config.model, batch=2) - unused == counter.get_total_flops()


def test_rows_and_their_settings_on_the_command_line():
    """As in optimizer.groups: name:setting=value, several by commas."""
    asked = SMALL.replace({"model.changes": "lora:rank=4:shared=true:targets=mlp.*,ia3"})
    assert asked == SMALL.replace(
        {"model.changes": [{"name": "lora", "rank": 4, "shared": True, "targets": ["mlp.*"]},
                          {"name": "ia3"}]})
    for text, sentence in (("lora:rank", r"model\.changes\.rank must be a whole number, got ''"),
                           ("lora:rnk=4", "has no setting 'rnk'; did you mean 'rank'"),
                           ("lora:rank=0", r"model\.changes\.rank must be"),
                           (":rank=4", "there is no model.changes ''")):
        with pytest.raises(ConfigError, match=sentence):
            SMALL.replace({"model.changes": text})


def test_rates_of_a_and_b_are_groups_of_the_optimizer():
    """LoRA+ (arXiv:2402.12354)."""
    config = of("lora").replace({"optimizer.groups": "*.B.*:lr_scale=16"})
    training = built(config)
    names = {p: name for name, p in training.model.named_parameters()}
    rates = {names[p]: group["initial_lr"] for group in training.optimizer.param_groups
             for p in group["params"]}
    assert ({name: rate / config.optimizer.lr for name, rate in rates.items()}
            == {name: 16 if ".B." in name else 1 for name in rates})
    assert len({*rates.values()}) == 2


NEW = ("dora", *VIRTUAL)


@pytest.mark.parametrize("backend, norm", [("sdpa", "layernorm"), ("plain", "rmsnorm")])
@pytest.mark.parametrize("name", NEW)
def test_activations_are_what_autograd_keeps_to_the_byte(name, backend, norm):
    """By the operation; but for what the first block need not keep, since nothing before it is
    trained."""
    config = of(name).replace({"model.position": "rope", "model.norm": norm})
    model, x = build.initial_model(config, backend), torch.zeros(3, 32, dtype=torch.long)
    saved = saved_bytes(model, lambda: cross_entropy(model(x), x)).operations
    formula = kept(config.model, batch=3, attention=backend).operations
    short = lambda name: re.sub(r"\.(magnitude|prefix|B\.\d+|B)$", "", name)
    due, has = Counter(), Counter()
    for counter, by_operation in ((due, formula), (has, saved)):
        for operation, nbytes in by_operation.items():
            counter[short(operation)] += nbytes
    due["embed"] -= 8 * 3 * 32                  # its tokens are for a gradient
    if name != "prompt":
        due["norm1"] -= formula["norm1"] // 2
    if name == "prefix" and backend == "plain":     # keys, for the gradient of its queries
        due["attention"] -= 4 * 3 * 48 * (32 + 8)
    assert {operation: nbytes for operation, nbytes in due.items() if nbytes} == has


@pytest.mark.dist
@pytest.mark.parametrize("name", [*NEW, "pissa"])
def test_ranks_have_the_numbers_of_one_process_or_are_refused(name, parent, tmp_path):
    config = of(name).replace({"steps": 3, "imports": ["lessons.rows.adapters"]})
    due = [line["loss"] for line in lpkit.train(config, out=tmp_path / "one").metrics]
    for zero in (0, 1, 2, 3) if name == "prefix" else (0, 3):
        layout = config.replace({"parallel.shard": 2, "parallel.zero": zero} if zero
                                else {"parallel.data": 2})
        if zero > 1 and name in ("dora", "pissa"):
            with pytest.raises(ConfigError,
                               match=rf"model\.changes={name} is initialised from whole "
                                     rf"weights, and ZeRO {zero} gives each rank rows"):
                Training.build(layout)
            continue
        run = lpkit.launch(layout, processes=2, out=tmp_path / f"zero{zero}",
                           parent=parent).result()
        assert [line["loss"] for line in run.metrics] == pytest.approx(due, rel=1e-5), zero


@pytest.mark.parametrize("name", [*NEW, "lora"])
def test_recomputed_blocks_have_the_same_numbers(name):
    losses = {}
    for how in ("none", "block", "core-attention", "selective"):
        training = built(of(name).replace({"memory.recompute": how}))
        losses[how] = tuple(training.update(step).loss.item() for step in range(3))
    assert len({*losses.values()}) == 1, losses


@pytest.mark.parametrize("name, changes", [*((name, {}) for name in NEW),
                                           ("prefix", {"precision.recipe": "bf16"})], ids=str)
def test_what_is_sampled_with_a_cache_is_what_the_model_says(name, changes, tmp_path):
    """Greedy, of prompts of several lengths at once; the first of one token. Past the context it
    goes on, and what was learned stays in sight."""
    run = lpkit.train(of(name).replace({"model.position": "rope", "steps": 12, **changes}),
                      out=tmp_path / "run")
    prompts, training = ["a", "import ", "def f(self, x):"], trained(run)
    texts = lpkit.sample(run, prompt=prompts, tokens=12, temperature=0)
    for prompt, text in zip(prompts, texts):
        ids = torch.tensor([list(text.encode())])[:, :len(prompt) + 12]
        with torch.no_grad():
            logits = training.logits(ids[:, :-1])[0, len(prompt) - 1:].float()
        best, sampled = logits.max(-1).values, logits.gather(1, ids[0, len(prompt):, None])[:, 0]
        assert (best - sampled).max() < (1e-5 if not changes else 0.1)
    assert len(lpkit.sample(run, prompt="a", tokens=50, temperature=0)) > 40


@pytest.mark.parametrize("name", VIRTUAL)
def test_a_full_cache_drops_text_and_no_place_before_it(name, tmp_path):
    """The newest logits of a cache that has lost its oldest tokens: those of its tokens alone,
    turned as they stand."""
    training = built(of(name, length=5))
    tokens = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = new_cache(training.config.model, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        training.model.hidden(tokens[:, :20], cache)
        for i in range(20, 40):
            logits = training.logits(tokens[:, i:i + 1], cache)
    slots = cache.slots
    assert (slots.count, slots.first) == ((37, 5) if name == "prompt" else (32, 0))
    places = cache.places[0].tolist()
    assert (places[:slots.first] == [*range(slots.first)]
            and sorted(places)[slots.first:] == [*range(8 + slots.first, 40 + slots.first)])
    assert logits.isfinite().all()


def test_an_adapter_in_16_bits_beside_a_base_in_8():
    """The recipe names what stays: its norm is of the weights as they are kept."""
    config = of("dora").replace({"model.width": 64, "model.heads": 4, "model.context": 32,
                                 "precision.recipe": {"name": "fp8-tensorwise",
                                     "high_precision_layers": ["*.A", "*.B.*", "head"]}})
    training = built(config)
    kinds = {name: type(module).__name__ for name, module in training.model.named_modules()
             if isinstance(module, torch.nn.Linear)}
    assert {kind for name, kind in kinds.items() if name.endswith(".base")} == {"ScaledLinear"}
    assert {kind for name, kind in kinds.items() if ".A" in name or ".B." in name} == {"Linear"}
    before = training.update(0).loss
    assert training.update(1).loss.isfinite() and before.isfinite()
    adapter = next(module for module in training.model.modules() if isinstance(module, Dora))
    torch.testing.assert_close(adapter.norm(),
                               (adapter.base.weight + adapter.delta()).norm(dim=1), rtol=1e-5,
                               atol=1e-6)


@pytest.mark.parametrize("changes, sentence", [
    ({"model.changes": "prompt,lora"},
     "model.changes=prompt cannot be combined with other changes; leave the others out"),
    ({"model.changes": "prefix", "model.position": "learned"}, "model.changes=prefix adds "
        "positions to 32 tokens, and model.position=learned has no more positions; set "
        "model.position=rope"),
    ({"model.changes": "prefix", "model.attention": "window"}, "model.changes=prefix must be "
        "visible to every token, and model.attention=window may hide it; "
        "set model.attention=full")])
def test_what_cannot_stand_before_a_text(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        SMALL.replace({"model.position": "rope", **changes})
