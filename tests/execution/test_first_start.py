"""The first start: how many graphs are compiled before step 1, which rank races, what is shown, and
what fills the cache beforehand.

Only these tests catch a graph too many before the first step, a compiled version that is not
verified at the step's size, a loss in pieces that forgets a piece, and ranks that choose for
themselves.
"""

import dataclasses
import json

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lpkit import cli
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.execution import attention
from lpkit.execution import kernels as choosing_kernels
from lpkit.kernels import choose as choosing
from lpkit.kernels import cross_entropy as cross_entropy_rows
from lpkit.kernels import jit
from lpkit.kernels.choose import choose
from lpkit.nn import library_attention as library_attention_torch
from lpkit.optim import one_pass
from lpkit.techniques.attention_backends import Attending
from lpkit.techniques.kernels import KERNELS
from lpkit.training import build
from lpkit.training.training import RandomTokens, Training

CPU = torch.device("cpu")
MOST_GRAPHS, OF_FLEX = 12, 3
NORM = KERNELS["rms-norm"].load()
TINY = Config().replace({
    "model.layers": 2, "model.width": 64, "model.heads": 4, "model.context": 32, "model.vocab": 64,
    "global_batch": 4, "eval_batches": 1, "precision.recipe": "bf16", "system.device": "cpu",
    "system.compile": True, "system.threads": 1})
LLAMA = {"model.norm": "rmsnorm", "model.mlp": "swiglu", "model.position": "rope",
         "model.kv_heads": 2, "model.mlp_width": 128}
FP8 = {"precision.backend": "scaled_mm"}


@pytest.fixture
def graphs(monkeypatch, tmp_path):
    """What PyTorch compiles from now on; a CPU stands for a GPU that Triton does not run on."""
    compiled_graphs = []

    def backend(graph, _):
        compiled_graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit, "compiled", lambda function, **how: torch.compile(function,
        **how | {"backend": backend}))
    monkeypatch.setattr(choosing, "why_not", lambda version, at_hand: "not here"
                        if version in ("triton", "cpu") else "")
    monkeypatch.setattr(choosing, "ROUNDS", 1)
    monkeypatch.setattr(choosing, "FUSES", 0.0)     # the fastest alone is taken
    choosing._compiled.cache_clear()
    yield compiled_graphs
    choosing._compiled.cache_clear()


@pytest.fixture
def flex():
    """In its place; each kind of tensors is one graph, and so is each mask of more than a few
    tokens."""
    def call(q, k, v, documents=None, sinks=None):
        call.shapes |= ({(q.shape, k.shape, q.dtype)} | {T for T in q.shape[2:3]
            if T > library_attention_torch.EAGER_MASK})
        return plain(q, k, v)

    call.shapes, call.by_shape = set(), library_attention_torch.flex.by_shape
    return call


def plain(q, k, v, *_):
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def raced_attention(**model):
    sizes = {"layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "width": 16, "context": 1100,
             **model}
    config = Config().replace({f"model.{key}": value for key, value in sizes.items()})
    return attention.race(Attending(model=config.model, device="gpu", here=True), 1, CPU)


def test_attention_is_compiled_for_two_shapes(graphs, flex, monkeypatch):
    """At hand, where float64 has room, and at the step's size."""
    monkeypatch.setattr(attention, "candidates",
                        lambda given: {"plain": attention._with_rule("plain", given.rule),
                                       "sdpa": plain, "flex": flex})
    raced_attention()
    assert {shape[0][2] for shape in flex.shapes if isinstance(shape, tuple)} == {1024, 1100}
    assert len(flex.shapes) == OF_FLEX


def test_what_is_compiled_for_a_shape_is_still_verified(graphs, flex, monkeypatch):
    """Strictly at hand; and at the step's size, where another program runs."""
    def off(q, k, v, *_):
        return plain(q, k, v) * 1.01

    def off_at_work(q, k, v, *_):
        return plain(q, k, v) * (1 if q.shape[2] <= 1024 else 1.2)

    off.by_shape = off_at_work.by_shape = True
    monkeypatch.setattr(attention, "candidates", lambda given: {
        "plain": attention._with_rule("plain", given.rule), "sdpa": plain, "flex": off,
        "flex-2": off_at_work})
    why = raced_attention().why
    assert "not flex: differs" in why
    assert "not flex-2: differs from its definition: result 1 of 4, at the run's size" in why


@pytest.mark.parametrize("changes", [
    {}, LLAMA | {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 32},
    *(LLAMA | FP8 | {"precision.recipe": recipe, "model.width": 128, "model.context": 128,
                     "model.mlp_width": 256}
      for recipe in ("fp8-delayed", "fp8-rowwise"))],
    ids=lambda changes: changes.get("precision.recipe") or " ".join(changes) or "gpt2")
def test_a_first_start_makes_few_graphs(changes, graphs, monkeypatch):
    """Of kernels, of attention and of the first step: seconds each. Beside them one operator, as
    Triton's are, is a graph with nothing to build, which takes a tenth of that."""
    offered = choosing_kernels.offered
    monkeypatch.setattr(choosing_kernels, "offered",
                        lambda name: offered(name)
                        | {"planted": as_one_operator(KERNELS[name].load())})
    config = TINY.replace(changes)
    training = Training.build(config, data=RandomTokens(config))
    kernels = build.kernels(config, training.decisions, training.ranks)
    fresh = Training.build(config.replace({"system.compile": False}), data=RandomTokens(config))
    at_hand = kernels._at_hand(fresh.model)
    choices = kernels._raced(at_hand, on_cpu=False)
    within = at_hand.keys() - {choosing_kernels.LOSS}
    for name in at_hand:        # the loss in pieces is not compiled
        how = "compile, planted in a compiled block" if name in within else "here, and verified"
        assert how in choices[name]["why"], choices[name]
    training.update(0)
    light = ("opaque", "getitem", "Cast")
    to_build = [graph for graph in graphs
                if any(node.op.startswith("call") and getattr(node.target, "__name__", "")
                       not in light for node in graph.graph.nodes)]
    assert len(graphs) - len(to_build) == len(within) and len(to_build) > len(within)
    assert len(to_build) + OF_FLEX <= MOST_GRAPHS, (len(to_build), sorted(choices))


def as_one_operator(kernel):
    """In a graph it is a call."""
    def opaque(*arguments):
        return kernel.definition(*arguments)

    return torch._dynamo.allow_in_graph(opaque)


def test_a_compiled_version_is_held_to_the_step_s_size(graphs, tmp_path):
    def wrong(x, weight, eps):
        return NORM.definition(x, weight, eps) * 1.2

    record = choosing._find(NORM, {"reference": NORM.definition, "compile": wrong}, [rows()],
                           [rows(64)], 1.0)
    assert record["refused"]["compile"].startswith(
        "differs from its definition: result 1 of 3, at the run's size")
    chosen = choose("rms-norm", NORM, "auto", [rows()], raced=[rows(64)], cache=tmp_path)
    assert "compile" not in chosen.refused and len(graphs) == 1, "at the step's size alone"


def rows(n=6):
    draw = torch.Generator().manual_seed(n)
    return torch.randn(n, 64, generator=draw), torch.randn(64, generator=draw), 1e-5


def test_progress_is_shown_where_it_takes_long(graphs, monkeypatch, tmp_path, capsys):
    """On a GPU; once, since what was found is kept."""
    alone = dataclasses.replace(NORM, examples=lambda draw, device: [])
    choose("rms-norm", alone, "auto", [rows()], cache=tmp_path / "cpu")
    assert not capsys.readouterr().err
    monkeypatch.setattr(choosing, "_device", lambda calls: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for shown in ("lpkit: rms-norm: verifies and times reference, pytorch, triton, compile, once "
                  "for this machine\n", ""):
        choose("rms-norm", alone, "auto", [rows()], cache=tmp_path / "gpu")
        assert capsys.readouterr().err == shown


def test_the_optimizer_s_record_says_what_runs(graphs, monkeypatch):
    """It runs Triton's version or the definition, eagerly: no other may win."""
    seen = {}

    def seen_by(name, kernel, asked, at_hand, *, offered):
        seen.update(at_hand=at_hand, offered=list(offered))
        return choose(name, kernel, asked, at_hand, offered=offered)

    monkeypatch.setattr(one_pass, "choose", seen_by)
    w = torch.randn(40, 8)
    for asked in ("triton,adamw:reference", "adamw:compile,reference"):
        rule, choices = one_pass.chosen("adamw", asked, [w])
        assert seen["offered"] == ["reference", "triton"] and rule is None
        assert choices["kernel:adamw"].used == "reference"
    # w, g, two slots, noise, settings, update
    assert [len(call) for call in seen["at_hand"]] == [7] and not graphs


# ---- the loss in pieces

CHUNKED = {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 24,
           "system.compile": False, "system.products": "bf16"}


def forgets(pieces):
    """The version that stops after so many pieces of a row."""
    def kernel(logits, targets, weights):
        V = pieces * cross_entropy_rows.PIECE
        nats = cross_entropy_rows._by_definition(logits[:, :V].clone(), targets, weights)
        gradient = logits.clone()
        cross_entropy_rows._by_definition(gradient, targets, weights)
        logits[:, :V] = gradient[:, :V]
        return nats

    return kernel


def test_a_third_piece_forgotten_is_found(monkeypatch, tmp_path):
    """By the kernel's own examples, and by what a run with a large vocabulary gives it."""
    monkeypatch.setitem(cross_entropy_rows.BY, "planted", forgets(2))
    offered = {"reference": cross_entropy_rows.OFFERED["reference"],
               "planted": lambda *given: cross_entropy_rows.of_a_copy("planted", *given)}
    kernel, small = KERNELS["cross-entropy"].load(), torch.randn(4, 99)
    hand = choosing_kernels._of_loss(small)
    assert choose("cross-entropy", kernel, "auto", hand, offered=offered,
                  cache=tmp_path).refused["planted"].startswith("differs")
    alone, wide = dataclasses.replace(kernel, examples=lambda *_: []), torch.randn(8, 40_000)
    monkeypatch.setitem(cross_entropy_rows.BY, "planted", forgets(3))
    for few, many in ((wide[:2], wide), (small, wide)):
        chosen = choose("cross-entropy", alone, "auto", choosing_kernels._of_loss(few),
                       offered=offered, cache=tmp_path,
                       raced=choosing_kernels._of_loss(many), within_seconds=0.01)
        assert chosen.refused["planted"].startswith("differs") and chosen.choice.used == "reference"


def test_the_loss_is_given_the_run_s_logits(monkeypatch):
    """Those of a piece, in the run's dtype; and never all."""
    config = TINY.replace(CHUNKED)
    training = Training.build(config, data=RandomTokens(config))
    heads = []
    training.model.head.register_forward_hook(lambda module, given, out: heads.append(len(out)))
    kernels = choosing_kernels.Kernels(asked="auto", batch=(4, 32), piece=24,
                                       autocast=training.decisions.autocast)
    few, many = kernels._at_hand(training.model)["cross-entropy"]
    assert [len(call[0]) for call in (*few, *many)] == [24, 24, 24, 24] and heads == [24, 24]
    assert {call[0].dtype for call in many} == {torch.bfloat16} and many[0][0].shape[1] == 64
    assert [len(call) for call in many] == [2, 3] and many[1][2].unique().tolist() == [0, 1, 2]


def test_the_version_of_the_loss_is_chosen_recorded_and_run(monkeypatch):
    asked = "cross-entropy:reference"
    ran = []
    monkeypatch.setitem(cross_entropy_rows.BY, "reference",
                        lambda *given: ran.append(1) or cross_entropy_rows._by_definition(*given))
    config = TINY.replace(CHUNKED | {"system.kernels": asked})
    data = RandomTokens(config)
    training, own = (Training.build(settings, data=data)
                     for settings in (config, config.replace({"system.kernels": "auto"})))
    choice = training.decisions.choices["kernel:cross-entropy"]
    assert (choice.asked, choice.used) == (asked, "reference")
    assert "kernel:cross-entropy" not in own.decisions.choices
    ran.clear()
    mine, theirs = training.update(0).loss, own.update(0).loss
    assert len(ran) == 6, "pieces of 128 tokens"
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
    with pytest.raises(ConfigError, match="no layer of this model calls cross-entropy"):
        Training.build(config.replace({"memory.cross_entropy": "full",
                                       "system.kernels": asked}), data=RandomTokens(config))


# ---- ranks

@pytest.mark.dist
def test_the_first_rank_races_for_all(on_ranks):
    """What it found, or raised, holds for all."""
    config = TINY.replace({"system.compile": False, "system.kernels": "rms-norm:pytorch",
                           "model.norm": "rmsnorm", "parallel.data": 2})
    reports = on_ranks("races", config)
    assert [report["asked"] for report in reports] == [["rms-norm"], []]
    used = ["rms-norm", "pytorch", "rms_norm_pytorch"]
    assert [report["used"] for report in reports] == [used] * 2
    assert reports[0]["raised"] == reports[1]["raised"] == "ConfigError: planted"


@pytest.mark.dist
def test_the_first_rank_races_the_optimizer_for_all(on_ranks):
    """Else some would round as Triton does, and some as the definition."""
    config = TINY.replace({"system.compile": False, "system.kernels": "lion:reference",
                           "optimizer": "lion", "parallel.data": 2})
    raced = on_ranks("optimizers_race", config)
    assert raced == [[["lion"], "reference", True], [[], "reference", True]]


# ---- beforehand

def test_warm_does_what_the_first_run_waits_for(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    updates, update = [], Training.update
    monkeypatch.setattr(Training, "update", lambda self, step, **how: updates.append(self.config)
                        or update(self, step, **how))
    words = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32",
             "global_batch=2", "system.device=cpu"]
    assert cli.main(["warm", "cpu-3m", *words, "--set", "system.kernels=reference", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == "cpu-3m" and report["seconds"] > 0
    assert report["cache"].startswith(str(tmp_path / "cache"))
    assert report["chosen"]["device"]["used"] == "cpu"
    assert [config.model.width for config in updates] == [32]
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"], "no run"
    assert cli.main(["warm", "cpu-3m", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("prepared cpu-3m in ") and "\n  attention: " in shown
