"""A run that begins from a smaller one: the same function where a row says so, and what the papers'
formulas say.

Only these tests catch: a growth that changes the logits where it says that it keeps them, copies
other layers or neurons than its paper, keeps two models in memory, or begins from weights that
evaluation does not read; and a grown run that differs after a resume or on ranks.
"""

import weakref
from dataclasses import replace

import pytest
import torch

import lessons.rows.depth
import lessons.rows.linear_attention  # noqa: F401  adds kinds
import lpkit
from lessons.rows import blocks as blocks
from lessons.rows import growth as rows
from lessons.rows import growth_torch
from lessons.rows.growth import refusal
from lpkit import cli
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.nn.transformer import Transformer
from lpkit.predict.params import parameter_count
from lpkit.predict.prediction import predict
from lpkit.techniques.changes import GROWTH
from lpkit.techniques.row import chosen
from lpkit.training.checkpoint import load_latest
from lpkit.training.sampling import sample, trained
from lpkit.training.training import Training
from tests.training.resuming import in_parts

SMALL = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=24, vocab=40, context=16)
# each pair of heads with each norm and MLP; the others turn with them
LAYOUTS = [{"norm": norm, "mlp": mlp, "position": ("learned", "rope")[(i + j) % 2],
            "heads": heads, "kv_heads": groups, "width": 8 * heads, "tied": (i + k) % 2 == 0,
            "bias": (j + k) % 2 == 0}
           for i, norm in enumerate(("layernorm", "rmsnorm"))
           for j, mlp in enumerate(("gelu", "swiglu"))
           for k, (heads, groups) in enumerate(((2, 2), (4, 2), (4, 1)))]
OTHERS = [{"block": block} for block in rows.KNOWN["block"]] + [
    {"norm": "none", "tied": False}, {"qk_norm": True, "position": "rope"}, {"attention": "delta"},
    {"attention": {"name": "window"}},
    {"qkv_bias": True, "bias": False}, {"block": "layerscale", "norm": "rmsnorm", "mlp": "swiglu",
        "tied": False}]


def settings(name, **more):
    return replace(chosen(GROWTH, name), **more)


def models(small, large, asked, draw=0):
    """Both, the small one with weights of which none is where an initialisation has it."""
    assert refusal(asked, small, large) == ""
    torch.manual_seed(draw)
    small_model, large_model = Transformer(small), Transformer(large)
    due = dict(large_model.named_parameters())
    beside = {"blocks.0.attention.qkv.amax_history": torch.ones(3, 17)}     # a buffer of FP8
    with torch.no_grad():
        for p in small_model.parameters():
            # without norms the stream would grow until rounding does
            p.normal_(std=0.1 if small.norm == "none" else 0.3)
        weights = {n: p.detach() for n, p in small_model.named_parameters()}
        for name, t in GROWTH[asked.name].load()(weights | beside, small, large, asked):
            if name.endswith("history"):
                continue
            assert t.shape == due[name].shape
            due.pop(name).copy_(t)
    assert not due
    return small_model, large_model


@torch.no_grad()
def error(small, large, asked):
    small_model, large_model = models(small, large, asked)
    tokens = torch.randint(small.V, (2, small.T), generator=torch.Generator().manual_seed(1))
    due = small_model(tokens)
    return ((large_model(tokens) - due).norm() / due.norm()).item()


def wider_ones(small):
    yield replace(small, width=2 * small.D, heads=2 * small.H, kv_heads=2 * small.G,
                  head_dim=small.E, mlp_width=2 * small.F)
    # more queries of as many keys; a factor that is no power of two; some neurons twice, others
    # once; new layers
    yield replace(small, layers=5, width=3 * small.D, heads=3 * small.H, kv_heads=small.G,
                  head_dim=small.E, mlp_width=small.F + 7)


@pytest.mark.parametrize("layout", LAYOUTS + OTHERS,
                         ids=lambda layout: "-".join(map(str, layout.values())))
def test_a_preserving_row_has_the_logits_of_the_small_model(layout):
    small = replace(SMALL, **layout)
    assert error(small, replace(small, layers=5), settings("identity-depth")) < 1e-6
    for large in wider_ones(small):
        for uneven in (0.0, 0.5):
            assert error(small, large, settings("bert2bert", uneven=uneven)) < 1e-6


@pytest.mark.parametrize("asked", [settings("stack"), settings("interpolate"),
                                   settings("bert2bert", aki=True),
                                   settings("bert2bert", depth="stack")],
                         ids=repr)
def test_others_do_not(asked):
    large = replace(SMALL, layers=4)
    assert error(SMALL, large if asked.name != "bert2bert" else next(wider_ones(large)),
                 asked) > 0.05
    # and what is no larger is copied, so that the config of a grown run begins from that run, too
    assert error(SMALL, SMALL, asked) == 0


def test_where_layers_come_from():
    small, large = replace(SMALL, layers=3), replace(SMALL, layers=6)
    for name, order in {"stack": [0, 1, 2, 0, 1, 2], "interpolate": [0, 0, 1, 1, 2, 2],
                        "identity-depth": [0, 1, 2, 0, 1, 2]}.items():
        small_model, large_model = models(small, large, settings(name))
        for new, old in enumerate(order):
            for (key, p), q in zip(large_model.blocks[new].named_parameters(),
                                   small_model.blocks[old].parameters(), strict=True):
                silent = (name == "identity-depth" and new >= 3
                          and key in ("attention.out.weight", "attention.out.bias",
                                      "mlp.down.weight", "mlp.down.bias"))
                assert torch.equal(p, 0 * q if silent else q), (name, new, key)


@pytest.mark.parametrize("aki", [False, True])
def test_neurons_are_copied_as_the_paper_says(aki):
    """Chen et al. 2021, section 3.2 and 3.3, number by number: g(j) = j mod n; in-dimension,
    divided by how many map to the same; then out-dimension, whose new rows AKI takes from the layer
    above."""
    small = replace(SMALL, layers=3)
    large = replace(small, width=64, heads=8, kv_heads=4, mlp_width=30)
    small_model, large_model = models(small, large, settings("bert2bert", uneven=0.0, aki=aki))
    for layer in range(3):
        above = layer + 1 if aki and layer < 2 else layer
        for module, new, ins, outs in (("up", (30, 64), 32, 24), ("down", (64, 30), 24, 32)):
            w, next_w = (getattr(small_model.blocks[at].mlp, module) for at in (layer, above))
            linear = getattr(large_model.blocks[layer].mlp, module)
            count = [sum(k % ins == j for k in range(new[1])) for j in range(ins)]
            for i in range(new[0]):
                source = w if i < outs else next_w
                assert linear.bias[i] == source.bias[i % outs]
                for j in range(0, new[1], 5):
                    assert linear.weight[i, j].item() == pytest.approx(source.weight[i % outs,
                        j % ins].item() / count[j % ins], rel=1e-6)
        # whole groups: of 4 rows of 8 numbers each (two queries, a key, a value), two groups, then
        # the same again
        qkv, next_qkv = (small_model.blocks[at].attention.qkv.weight for at in (layer, above))
        due = torch.cat((qkv, next_qkv))[:, torch.arange(64) % 32] / 2
        torch.testing.assert_close(large_model.blocks[layer].attention.qkv.weight, due, rtol=1e-6,
                                   atol=0)
        assert torch.equal(large_model.blocks[layer].norm1.weight,
                           small_model.blocks[layer].norm1.weight.repeat(2))


def test_what_is_made_is_let_go():
    """A row hands over one tensor after the other: who copies them has no second model."""
    weights = {n: p.detach() for n, p in Transformer(SMALL).named_parameters()}
    large, seen = next(wider_ones(SMALL)), []
    for _, t in growth_torch.wider(weights, SMALL, large, settings("bert2bert")):
        seen.append((weakref.ref(t), t.nbytes))
        assert (sum(nbytes for reference, nbytes in seen if reference() is not None) <= 2
                * max(nbytes for _, nbytes in seen))
        del t
    assert not [reference for reference, _ in seen if reference() is not None]


REFUSED = [
    ("stack", {}, {"layers": 5}, "model.layers=5 is not a multiple of 2; nearest: 4 or 6"),
    ("interpolate", {"layers": 4}, {"layers": 2}, "model.layers=2, not 4; set model.layers=4"),
    ("stack", {}, {"layers": 4, "width": 64, "head_dim": 8},
     "model.width=64, not 32; set model.width=32"),
    ("bert2bert, stack", {}, {"layers": 5, "width": 64, "heads": 8, "kv_heads": 4},
     "not a multiple of 2"),
    ("identity-depth", {}, {"layers": 3, "vocab": 41},
     "model.vocab=41, not 40; set model.vocab=40"),
    ("identity-depth", {"block": "sandwich"}, {"layers": 3},
     "model.block=sandwich is not supported; use pre-norm, "),
    ("bert2bert", {}, {"width": 80, "head_dim": 8, "heads": 8},
     "model.width=80 is not a multiple of 32; nearest: 64 or 96"),
    ("bert2bert", {}, {"width": 64}, "model.head_dim=16, not 8; set model.head_dim=8"),
    ("bert2bert", {}, {"width": 64, "heads": 8, "kv_heads": 8},
     "model.heads=8 are fewer than 2 for each of model.kv_heads=8, as in that run; set "
     "model.heads=16"),
    ("bert2bert", {}, {"width": 64, "heads": 8, "norm": "rmsnorm"}, "model.norm=rmsnorm, not "
        "layernorm; set model.norm=layernorm"),
    ("bert2bert", {}, {"width": 64, "heads": 8, "mlp_width": 20}, "model.mlp_width=20, not 24; set "
        "model.mlp_width=24"),
    ("bert2bert", {"norm": "none"}, {"width": 64, "heads": 8}, "model.width=64 with a tied head "
        "and no norm has other logits; set model.width=32"),
    ("bert2bert", {"changes": ["lora"]}, {"changes": []}, "that run has model.changes=lora; grow a "
                                                         "run without"),
]


@pytest.mark.parametrize(("name", "small", "large", "sentence"), REFUSED,
                         ids=lambda value: value if isinstance(value, str) else None)
def test_what_does_not_fit_is_one_sentence(name, small, large, sentence):
    small, (name, _, depth) = replace(SMALL, **small), name.partition(", ")
    asked = settings(name, depth=depth) if depth else settings(name)
    assert sentence in refusal(asked, small, replace(small, **large))


# Runs.

TINY = Config().replace({
    "imports": "lessons.rows.growth",
    "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "steps": 20,
    "global_batch": 4, "eval_every": 0, "eval_batches": 1,
    "checkpoint_every": 5, "keep_checkpoints": 9, "schedule.warmup_steps": 2, "optimizer.lr": 0.01,
    "precision.recipe": "fp32", "system.device": "cpu",
    "system.threads": 1})
GROWN = {"identity-depth": {"model.layers": 4},
         "bert2bert": {"model.layers": 3, "model.width": 64, "model.heads": 4},
         "stack": {"model.layers": 4}}
AVERAGED = {"imports": "lessons.rows.optimizers", "optimizer": "schedule-free"}


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
        yield lpkit.train(TINY.replace({"data.source": str(corpus / "*.py")}),
                          out=tmp_path_factory.mktemp("base") / "small")


@pytest.fixture(scope="module")
def averaged(base, tmp_path_factory):
    config = base.config.replace(AVERAGED | {"optimizer.lr": 0.01, "schedule": "constant"})
    return lpkit.train(config, out=tmp_path_factory.mktemp("run") / "averaged")


def grown(base, name, **more):
    return base.config.replace({"start.run": str(base.path), "start.grow": name, **GROWN[name],
                                "steps": 6, "checkpoint_every": 3, **more})


@torch.no_grad()
def loss_of(training, batch):
    return training.loss(training.model, batch).item()


@pytest.mark.parametrize("how", [{}, {"start.grow": "identity-depth", "model.layers": 4},
                                 {"model.changes": [{"name": "lora", "rank": 4}], **AVERAGED}])
def test_a_start_has_the_weights_that_evaluation_reads(averaged, how, tmp_path):
    """A schedule-free run trains others: at a rate of 1e-12 the new run must have its val_loss."""
    still = averaged.config.replace({"start.run": str(averaged.path), "optimizer": "adamw",
                                     "optimizer.lr": 1e-12, "steps": 2, **how})
    begun = lpkit.train(still, out=tmp_path / "begun")
    assert begun.summary["val_loss"] == pytest.approx(averaged.summary["val_loss"], rel=1e-6)
    trained = load_latest(averaged.checkpoints, only="model/")[0].tensors
    assert any(not torch.equal(t, Training.build(still).model.state_dict().get(name[6:], t))
               for name, t in trained.items())


@pytest.mark.parametrize("name", GROWN)
def test_a_grown_run_goes_on_where_the_small_one_ended(base, name, tmp_path):
    config = grown(base, name)
    run = lpkit.train(config, out=tmp_path / "run")
    small = loss_of(trained(base), Training.build(config).batch(0))
    first = run.metrics[0]["loss"]
    assert ((first == pytest.approx(small, rel=1e-5)) == (name != "stack")
            and small < 3.5 < 5.5 < Training.build(
        config.replace({"start.grow": "none", "start.run": ""})).evaluate())
    assert (run.metrics[-1]["loss"] != first and run.identity["start"]
            == Training.build(config).start.sha256)
    assert predict(config, "h200").parameters == sum(p.numel()
        for p in trained(run).model.parameters()) == parameter_count(config.model)
    assert lpkit.predict_trace(config).peak_bytes > 0
    assert len(sample(run, prompt="def ", tokens=4, temperature=0)) > 4
    # bit for bit
    parts = in_parts(config, tmp_path / "parts", 4)
    assert (parts.summary["from_step"] in (4, 5) and [line["loss"] for line in parts.metrics]
            == [line["loss"] for line in run.metrics])
    ours, theirs = (load_latest(trained.checkpoints)[0].tensors for trained in (run, parts))
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[key])
        for key, t in ours.items())
    with pytest.raises(ConfigError, match=r"start\.grow"):
        lpkit.train(config.replace({"start.grow": "none", "start.map": "blocks.2:blocks.0"}),
                    out=tmp_path / "parts", resume=True)
    # a config of the grown run begins from that run as it is
    further = Training.build(config.replace({"start.run": str(run.path)}))
    assert all(torch.equal(p, ours[f"model/{key}"]) for key, p in further.model.named_parameters())


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_of_zero_grow_the_same_model(base, tmp_path):
    config = grown(base, "bert2bert", steps=2)
    alone = lpkit.train(config, out=tmp_path / "alone")
    for zero in (1, 3):
        ranks = lpkit.launch(config.replace({"parallel.shard": 2, "parallel.zero": zero}),
                             processes=2, out=tmp_path / f"zero{zero}").result()
        assert ([line["loss"] for line in ranks.metrics]
                == pytest.approx([line["loss"] for line in alone.metrics], rel=1e-5))
        again = lpkit.train(config.replace({"steps": 3}), out=ranks.path, resume=True)
        assert again.summary["from_step"] == 2 and again.summary["status"] == "complete"


def test_adapters_of_a_grown_model_are_all_that_is_kept(base, tmp_path):
    config = grown(base, "bert2bert", **{"model.changes": [{"name": "lora", "rank": 2}],
        "steps": 4})
    run = lpkit.train(config, out=tmp_path / "run")
    kept = {name for name in load_latest(run.checkpoints)[0].tensors if name.startswith("model/")}
    assert kept and all(name.split(".")[-3] == "B" or name.split(".")[-2] == "A" for name in kept)
    assert run.metrics[0]["loss"] == pytest.approx(loss_of(trained(base),
        Training.build(config).batch(0)), rel=1e-5)
    again = trained(run)
    assert (loss_of(again, Training.build(config).val.batch(0))
            == pytest.approx(run.summary["val_loss"], rel=1e-6))
    assert lpkit.train(config.replace({"steps": 5}), out=run.path,
                       resume=True).summary["from_step"] == 4


def test_equal_shares_keep_copies_alike_for_ever(base):
    """Their gradients are the same, so that a model twice as wide learns what the small one could;
    uneven shares end that."""
    apart = {}
    for uneven in (0.0, None):      # None: as it is by default
        config = grown(base, "bert2bert",
                       **{"model.layers": 2} | ({} if uneven is None
                           else {"start.grow.uneven": uneven}))
        training = Training.build(config)
        for step in range(6):
            training.update(step)
        w = training.model.blocks[0].mlp.up.weight.detach()
        once, again = w.chunk(2)
        apart[uneven] = ((once - again).norm() / w.norm()).item()
    assert apart[0.0] < 1e-3 < 1e-2 < apart[None]


def test_the_command_line(base, tmp_path, capsys):
    def train(*asked):
        start = ([] if any(argument.startswith("start.run=") for argument in asked)
                 else [f"start.run={base.path}"])
        words = [str(base.path / "config.yaml"), *start, "steps=2", *asked, "--out",
                 str(tmp_path / "out")]
        return cli.main(["train", *words]), capsys.readouterr().err

    for asked, sentence in {
        ("start.grow=stak", "model.layers=4"): "there is no start.grow 'stak'; did you mean "
                                               "'stack'?",
        ("start.grow=stack", "start.run=", "model.layers=4"): "set start.run to a run's folder",
        ("start.grow=stack", "start.map=blocks.2:blocks.0",
         "model.layers=4"): "leave start.map out",
        ("start.grow=stack", "start.grow.uneven=0.1"): "bert2bert has it",
        ("start.grow=stack", f"start.run={tmp_path}"): "holds no run",
    }.items():
        code, errors = train(*asked)
        assert (code == 2 and sentence in errors and errors.count("\n") == 1
                and not (tmp_path / "out").exists()), errors
    assert (train("start.grow=stack", "model.layers=4")[0] == 0
            and "grow: stack" in (tmp_path / "out" / "config.yaml").read_text())
