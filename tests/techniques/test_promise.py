"""The promise of the architecture: a technique is one row and one function, also from outside.

Each family gets a toy from this file. Nothing of the kit is edited: a row goes into the family's
table, its implementation is named by this module. Then the toy is predicted, planned, trained,
traced, measured, resumed, sampled, and looked at by `lpkit doctor`.

Only these tests catch: a door, a rank or a restart that knows the kit's rows alone, a formula that
does not follow a row's operations, a module that a stranger's file imports, and what is trained,
evaluated, saved and sampled where an objective, a policy, a size or a start is one's own.
"""

import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lessons.rows.cast_gather
import lessons.tasks  # noqa: F401  the policy that reads no corpus
import lpkit
from experiments.weighted import scores_of_rare_tokens
from lessons.decoding import decoding
from lpkit import cli, measure
from lpkit.config import Config
from lpkit.contracts import Batch, DataPolicy, Stage, Transform
from lpkit.datasets import prepare
from lpkit.errors import ConfigError
from lpkit.exchange.export import export
from lpkit.measure import doctor
from lpkit.memory.recompute import Recomputation, Recompute
from lpkit.nn.attention import backend
from lpkit.nn.kv_cache import new_cache
from lpkit.nn.mlps import GeluMLP
from lpkit.nn.transformer import Transformer
from lpkit.parallel.processes import WarmParent
from lpkit.predict import memory, predict
from lpkit.predict.flops import training_flops
from lpkit.predict.params import of
from lpkit.predict.plan import plan
from lpkit.presets import resolve
from lpkit.techniques import (
    FAMILIES,
    attention_backends,
    blocks,
    changes,
    data,
    inits,
    layouts,
    objectives,
    operation,
    optimizers,
    outside,
    recipes,
    schedules,
)
from lpkit.techniques import memory as techniques
from lpkit.techniques.attention import Rule
from lpkit.techniques.layouts import Layout
from lpkit.techniques.row import Settings, TechniqueRow
from lpkit.training import build
from lpkit.training.checkpoint import load_latest
from lpkit.training.runs import SEAL, Run
from lpkit.training.sampling import trained
from lpkit.training.training import Training
from tests.techniques import toys
from tests.training.resuming import in_parts

HERE = f"{__name__}:"


# ---- implementations: one function or class each

def sign_descent(w: Tensor, g: Tensor, slots: list[Tensor], settings: Settings,
                 update: int) -> None:
    """A slot that counts how often a gradient was positive, and a step of lr against its sign."""
    slots[0].add_((g > 0).float())
    w.sub_(g.sign(), alpha=settings.lr)


def staircase(progress: float, settings: Settings) -> float:
    return 1.0 if progress < 0.5 else settings.low


def small_init(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            nn.init.normal_(p, std=0.01) if p.ndim > 1 else nn.init.ones_(p)


class Parallel(nn.Module):
    """Attention and MLP side by side, after one norm."""

    def __init__(self, config, attend):
        from lpkit.nn.transformer import Attention

        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attention, self.mlp = Attention(config, attend), GeluMLP(config)

    def forward(self, x, rotation=None, cache=None, layer=0, documents=None):
        h = self.norm1(x)
        return x + self.attention(h, rotation, cache, layer, documents) + self.mlp(h)


def parallel_operations(s: operation.MicroBatch):
    first, *rest = blocks.pre_norm(s)
    yield first
    yield from (op for op in rest if op.name not in ("norm2", "add1"))


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, documents=None, sinks=None) -> Tensor:
    from lpkit.nn.attention import plain

    return plain(q, k, v)


@dataclass(frozen=True, kw_only=True)
class FirstHalf(Settings):
    blocks: int = 1


def first_blocks(settings: FirstHalf) -> Recomputation:
    return Recomputation(transforms=(Recompute(every=2),))


class Again(DataPolicy):
    """The same window at every step."""

    def __init__(self, *, tokens, batch, context, seed):
        window = torch.tensor(tokens[:context + 1].astype("int64"))
        self.same = Batch(window[:-1].expand(batch, -1).contiguous(),
                          window[1:].expand(batch, -1).contiguous())

    def batch(self, step: int) -> Batch:
        return self.same


@dataclass(frozen=True, kw_only=True)
class Scale(Settings):
    by: float = 0.5


@dataclass(frozen=True, kw_only=True)
class ScaleHead(Transform):
    by: float
    stage = Stage.PRECISION

    def __call__(self, model: nn.Module) -> nn.Module:
        model.head.register_forward_hook(lambda module, inputs, out: out * self.by)
        return model


def scale_head(settings: Scale) -> ScaleHead:
    return ScaleHead(by=settings.by)


class Shrink:
    """Weights of the last norm are pulled towards zero before each update; counts how often."""

    def __init__(self, settings: Settings):
        self.times = torch.zeros((), dtype=torch.int64)

    def begin(self, training: Training, step: int) -> None:
        with torch.no_grad():
            training.model.norm.weight.mul_(0.99)
        self.times += 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"times": self.times}

    def load_state_dict(self, state) -> None:
        self.times = state["times"].clone()


# ---- rows: one each

@dataclass(frozen=True, kw_only=True)
class Low(schedules.ScheduleSettings):
    low: float = 0.25


TOYS = {    # family: the table, its row, what a Config says
    "optimizer": (optimizers.OPTIMIZERS, optimizers.Optimizer(
        settings=optimizers.OptimizerSettings(lr=1e-3),
        slots=(optimizers.Slot(name="positive", signed=False),),
        implementation=HERE + "sign_descent", why="the sign of the gradient"),
        {"optimizer": "toy"}),
    "schedule": (schedules.SCHEDULES, schedules.LearningRateSchedule(settings=Low(),
        shape=staircase),
                 {"schedule": "toy", "schedule.low": 0.5}),
    "init": (inits.INITS, TechniqueRow(implementation=HERE + "small_init"), {"model.init": "toy"}),
    "block": (blocks.BLOCKS, operation.Kind(operations=parallel_operations,
        implementation=HERE + "Parallel"),
              {"model.block": "toy"}),
    "attention": (attention_backends.ATTENTION,
                  attention_backends.AttentionBackend(operations="lpkit.predict.attention:plain",
                                                      implementation=HERE + "attend_plainly"),
                  {"system.attention": "toy"}),
    "recipe": (recipes.RECIPES, None, {"precision.recipe": "toy"}),
    "memory": (techniques.RECOMPUTE, techniques.RecomputeRow(
        implementation=HERE + "first_blocks", settings=FirstHalf(),
        repeats=frozenset({"products", "attention", "pointwise"}),
        every=lambda settings: 2, why="every second block"),
        {"memory.recompute": "toy", "memory.recompute.blocks": 2}),
    "data": (data.POLICIES, data.Policy(implementation=HERE + "Again"), {"data.policy": "toy"}),
    "transform": (changes.MODEL_TRANSFORMS,
                  TechniqueRow(implementation=HERE + "scale_head", settings=Scale()),
                  {"transforms": [{"name": "toy", "by": 0.25}]}),
    "governor": (changes.GOVERNORS, TechniqueRow(implementation=HERE + "Shrink"),
                 {"governors": "toy"}),
}
TOYS["sizes"] = data.SIZES, toys.SIZES["ramp"], {"sizes": "toy", "grad_accum_steps": 2}
TOYS["objective"] = objectives.OBJECTIVES, toys.OBJECTIVES["z-loss"], {"objective": "toy"}
for _name in ("trust", "soap", "schedule-free"):
    TOYS[_name] = optimizers.OPTIMIZERS, (optimizers.OPTIMIZERS | toys.OPTIMIZERS)[
        _name], toys.SAYS[_name] | {"optimizer": "toy"}


@pytest.fixture(params=TOYS)
def toy(request, corpus, monkeypatch):
    """The Config that names a toy, its row in its family for as long as the test runs."""
    table, row, changed = TOYS[request.param]
    # E5M2 with a scale for each row of 16: a recipe is a function of its settings
    if row is None:
        saved = dict(recipes.RECIPES)
        recipes.add("toy", partial(recipes._fp8, block=(1, 16)),
                    recipes.Fp8Settings(gradient_format="e5m2"), "this file")
        row = recipes.RECIPES["toy"]
        recipes.RECIPES.clear()
        recipes.RECIPES.update(saved)
    monkeypatch.setitem(table, "toy", row)
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return SimpleNamespace(family=request.param, config=Config().replace({
        "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32,
        "data.source": str(corpus / "*.py"),
        "steps": 6, "global_batch": 4, "eval_every": 3, "eval_batches": 1, "checkpoint_every": 2,
        "schedule.warmup_steps": 1,
        "precision.recipe": "bf16", "system.device": "cpu"} | changed))


def test_one_row_and_one_function_do_everything(toy, tmp_path):
    config = toy.config
    assert Config.from_yaml(config.to_yaml()) == config
    # predict and plan
    assert predict(config, "h200").step_seconds > 0
    plans = plan(config, 1e9, "h200", devices=2)
    assert plans.options and plans.options[0].config.to_dict().keys() == config.to_dict().keys()
    # train
    run = lpkit.train(config, out=tmp_path / "whole")
    assert run.summary["status"] == "complete" and run.config == config
    # trace and measure: the formula knows the toy's bytes, the trace is the step to the byte
    measured, traced = measure.memory(config, device="cpu"), lpkit.predict_trace(config)
    assert traced.rows == measured.rows
    there = memory(config.replace({"precision.recipe": measured.chosen["precision"].used}
                                  if toy.family != "recipe" else {}), _cpu())
    assert there.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05)
    # resume: the same bits
    parts = in_parts(config, tmp_path / "parts", 2)
    assert [line["loss"] for line in parts.metrics] == [line["loss"] for line in run.metrics]
    # sample, and the doctor
    assert lpkit.sample(Run(tmp_path / "whole"), tokens=5, seed=1).startswith("\n")
    assert any(check.name.endswith("=toy") and check.run(torch.device("cpu"))
               for check in doctor.techniques())


def _cpu():
    from lpkit.hardware import room

    return room("cpu")


# ---- what a module of one's own adds: docs/own_technique.md and tests/techniques/own_rows.py

OWN = {"lora": {"model.changes": [{"name": "my-lora", "rank": 2}]},
       "prune": {"governors": "prune"},
       "layer drop": {"governors": "drop-a-layer"}, "bare": {"model.block": "bare"},
       "block": {"model.block": "deepnorm"},
       "drop tokens": {"model.changes": "drop-tokens", "model.layers": 4},
       "drop turned": {"model.changes": "drop-tokens", "model.layers": 3, "model.position": "rope",
                       "memory.recompute": "block"},
       "sparse": {"model.changes": "sparse"}}
PAGE = Path(__file__).parents[2] / "docs" / "own_technique.md"


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """The folder of a notebook, with the modules of the page; and a parent of ranks, which finds
    what this process finds."""
    folder, code = tmp_path_factory.mktemp("beside"), re.findall(r"```python\n(.*?)```",
        PAGE.read_text(), re.DOTALL)
    [block] = [text for text in code if "class DeepNorm" in text]
    for name, text in {"my_rows": code[0], "my_modules": code[1], "my_block": block}.items():
        (folder / f"{name}.py").write_text(text)
    assert len(code[0].splitlines()) <= 40 and len(block.splitlines()) < 40
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with WarmParent() as parent:
            yield folder, parent


MODULES = ("my_rows", "my_modules", "my_block", "tests.techniques.own_rows", "experiments.prune")


def forget():
    """Another file of tests may have imported a module of them before."""
    for table in outside.TABLES.values():
        for name in [name for name, row in table.items()
                     if str(row.implementation).startswith(MODULES)]:
            del table[name]
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def own(beside, corpus, monkeypatch):
    """A small config that names the modules; what they add is gone afterwards."""
    forget()
    before = {field: dict(table) for field, table in outside.TABLES.items()}
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    yield Config().replace({
        "imports": "my_rows,my_block,tests.techniques.own_rows",
        "model.layers": 2, "model.width": 32,
        "model.heads": 2, "model.context": 32,
        "data.source": str(corpus / "*.py"), "steps": 6, "global_batch": 4, "eval_every": 3,
        "eval_batches": 1,
        "checkpoint_every": 2, "schedule.warmup_steps": 1, "precision.recipe": "bf16",
        "system.device": "cpu"})
    for field, rows in before.items():
        outside.TABLES[field].clear()
        outside.TABLES[field].update(rows)
    forget()


@pytest.mark.parametrize("name", [name for name in OWN if name != "drop tokens"])
def test_a_module_of_ones_own_does_everything(own, name, tmp_path):
    config = own.replace(OWN[name])
    assert Config.from_yaml(config.to_yaml()) == config
    assert predict(config, "h200").step_seconds > 0 and plan(config, 1e9, "h200", devices=2).options
    training = Training.build(config)
    assert predict(config, "h200").parameters == sum(p.numel() for p in training.model.parameters())
    measured, traced = measure.memory(config, device="cpu"), lpkit.predict_trace(config)
    formula = memory(config, _cpu())
    if not config.governors:
        assert traced.rows == measured.rows
        assert formula.peak_bytes == pytest.approx(traced.peak_bytes,
            rel=0.05 if "predict_trace" in formula.doubt else 0.02)
    assert formula.doubt or name in ("bare", "block")       # whose operations say all
    run = lpkit.train(config, out=tmp_path / "whole")
    parts = in_parts(config, tmp_path / "parts", 3)
    numbers = [[(line["loss"], line.get("val_loss")) for line in metrics]
               for metrics in (run.metrics, parts.metrics)]
    assert numbers[0] == numbers[1] and numbers[0][-1][0] < numbers[0][0][0]
    assert lpkit.sample(Run(tmp_path / "whole"), tokens=5, seed=1).startswith("\n")
    cast = lpkit.train(config.replace({"precision.recipe": "fp8-tensorwise"}),
                       out=tmp_path / "cast")
    assert (cast.summary["status"] == "complete"
            and cast.summary["val_loss"] == pytest.approx(run.summary["val_loss"], rel=0.02))


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in OWN if name != "drop tokens"])
def test_ranks_know_a_module_of_ones_own(own, beside, name, tmp_path):
    """One process's numbers with whole parameters and with rows, or a sentence before a folder is
    made."""
    config = own.replace(OWN[name] | {"precision.recipe": "fp32", "steps": 3})
    alone = lpkit.train(config, out=tmp_path / "alone")
    for zero in (1, 3) if config.governors or name == "lora" else (3,):
        out, sharded = tmp_path / f"zero{zero}", config.replace({"parallel.shard": 2,
            "parallel.zero": zero})
        if config.governors and zero > 1:
            with pytest.raises(ConfigError,
                               match=r"governors=.* changes whole weights, and a rank has only "
                                     r"some rows; set governors="):
                lpkit.launch(sharded, processes=2, out=out, parent=beside[1])
            assert not out.exists()
            continue
        run = lpkit.launch(sharded, processes=2, out=out, parent=beside[1]).result()
        for key in ("loss", "grad_norm"):
            assert ([line[key] for line in run.metrics]
                    == pytest.approx([line[key] for line in alone.metrics], rel=1e-5)), zero
        assert run.summary["val_loss"] == pytest.approx(alone.summary["val_loss"], rel=1e-5)


@pytest.mark.dist
def test_optimizers_are_launched_by_a_module_beside_the_notebook(own, beside, tmp_path):
    """By `lpkit train --import` with a file, which imports nothing by itself."""
    (beside[0] / "toy_rows.py").write_text("from tests.techniques.toys import add\n\nadd()\n")
    config = SMALL.replace({"imports": "toy_rows", "data.source": own.data.source,
                            "model.width": 32}).replace(toys.SAYS["trust"])
    alone, sharded = lpkit.train(config, out=tmp_path / "alone"), config.replace(
        {"parallel.shard": 2, "parallel.zero": 3})
    (tmp_path / "config.yaml").write_text(sharded.to_yaml())
    assert cli.main(["train", str(tmp_path / "config.yaml"), "--import", "toy_rows",
                     "--processes", "2", "--out", str(tmp_path / "ranks")]) == 0
    run = Run(tmp_path / "ranks")
    assert ([line["loss"] for line in run.metrics]
            == pytest.approx([line["loss"] for line in alone.metrics], rel=1e-5))
    assert run.summary["val_loss"] == pytest.approx(alone.summary["val_loss"], rel=1e-5)
    sys.modules.pop("toy_rows")


def test_a_pruned_description_has_no_flops_of_zeros(own):
    """Zeros are stored and multiplied: bytes and seconds are those of all numbers, and MFU says
    what is wasted."""
    pruned, dense = (predict(own.replace({"model.changes": changes}), "h200")
                     for changes in ("sparse", ""))
    block = sum(op.weights for op in of(own.model).linears)
    assert (pruned.parameters == dense.parameters == dense.nonzero_parameters
            == pruned.nonzero_parameters + own.model.layers * block / 2)
    assert dense.flops_per_token - pruned.flops_per_token == 6 * own.model.layers * block / 2
    assert (pruned.step.mfu < dense.step.mfu
            and device_seconds(pruned) == pytest.approx(device_seconds(dense), rel=0.01))


def device_seconds(prediction):
    """The step without the host, which decides so small a model's."""
    return sum(row.seconds for row in prediction.step.rows if row.name != "host")


def test_dropped_tokens_are_in_no_formula(own):
    """Of four blocks the two in the middle see half, and a quarter of the pairs."""
    own = own.replace({"model.layers": 4})
    dropped, whole = (predict(own.replace({"model.changes": changes}), "h200")
                      for changes in ("drop-tokens", ""))
    m, linears = own.model, sum(op.weights for op in of(own.model).linears)
    pairs = 2 * 2 * m.T * m.D
    assert (whole.flops_per_token - dropped.flops_per_token == 3 * 2
            * (linears * 2 / 2 + pairs * 3 / 4))
    assert (dropped.parameters == whole.parameters
            and device_seconds(dropped) < device_seconds(whole))
    assert (0.6 < dropped.memory.at("backward begins")["activations"]
            / whole.memory.at("backward begins")["activations"] < 0.9)


def test_the_page_drops_tokens_and_combines_parts(own):
    """What docs/own_technique.md shows beside LoRA runs, and the fold is that of
    tests/techniques/own_rows.py."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [drops], [combines] = ([text for text in code if words in text]
                           for words in ("settings.share] *", "partial_of"))
    here = {}
    exec(drops, here)
    exec(combines, {})
    own = own.replace({"model.layers": 4})
    ops, s, half = of(own.model), operation.MicroBatch(model=own.model), SimpleNamespace(share=0.5)
    named = of(own.replace({"model.changes": "drop-tokens"}).model)
    assert here["operations"](ops, s, half).block == named.block[1:]


def test_weights_do_not_travel_as_casts_where_some_are_frozen(own):
    config = own.replace(OWN["lora"] | {"precision.recipe": "fp8-tensorwise", "parallel.shard": 2,
        "parallel.zero": 3, "parallel.gathered": "fp8"})
    with pytest.raises(ConfigError,
                       match=r"parallel\.gathered=fp8 casts .* model\.changes=my-lora may freeze "
                             r"some; set parallel\.gathered=compute"):
        build.decide(config)
    layouts.refuse_ungatherable(config.replace({"parallel.gathered": "compute"}),
                                recipes.resolve(config.precision.recipe))


def test_a_pruned_run_evaluates_saves_and_samples_pruned_weights(own, tmp_path):
    training = trained(lpkit.train(own.replace({"governors": "prune"}), out=tmp_path / "run"))
    matrices = [p for name, p in training.model.named_parameters() if p.ndim == 2
                and "blocks." in name]
    assert all((p == 0).float().mean() == pytest.approx(0.5, abs=0.01) for p in matrices)


def test_a_block_has_the_last_word_about_its_start(own):
    block = Training.build(own.replace({"model.block": "bare"})).model.blocks[1]
    w = block.attention.out.weight.detach()
    assert block.gain.item() == 0.5 and torch.allclose(w @ w.T, torch.eye(32), atol=1e-5)


def test_frozen_weights_have_no_gradient_no_state_and_no_flops(own, tmp_path):
    config = own.replace(OWN["lora"])
    training = Training.build(config)
    frozen = {name for name, p in training.model.named_parameters() if not p.requires_grad}
    training.update(0)
    state = training.state_dict()
    assert frozen and not any(key.split("/")[1] in frozen for key in state
                              if key.startswith("optimizer/"))
    assert training_flops(config.model) < 0.8 * training_flops(replace(config.model, changes=()))
    with pytest.raises(ConfigError,
                      match=r"no matrix of a model is the same as one with model\.changes=my-lora"):
        export(lpkit.train(config, out=tmp_path / "run"), tmp_path / "out")


def test_an_adapter_begins_from_a_run_and_keeps_its_own_weights_alone(own, tmp_path):
    base = lpkit.train(own.replace({"precision.recipe": "fp32"}), out=tmp_path / "base")
    config = own.replace(OWN["lora"] | {"precision.recipe": "fp32", "start.run": str(base.path),
        "steps": 4, "optimizer.lr": 0.01})
    training = Training.build(config)
    assert training.evaluate() == base.summary["val_loss"]      # B is zero
    run = lpkit.train(config, out=tmp_path / "run")
    kept = load_latest(run.checkpoints)[0].tensors
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in kept
            if name.startswith("model/")} == {"A", "B"}
    assert run.identity["start"] == training.start.sha256 and lpkit.predict_trace(config).peak_bytes
    again = trained(Run(run.path))
    with torch.no_grad():
        nats = again.loss(again.model, training.val.batch(0)).item()
    assert (nats == pytest.approx(run.summary["val_loss"], rel=1e-6)
            and nats < base.summary["val_loss"])
    handle = lpkit.start(config, out=tmp_path / "parts")
    handle.subscribe(lambda record: handle.stop() if record.step >= 2 else None)
    handle.result()
    base.path.rename(tmp_path / "moved")
    moved = config.replace({"start.run": str(tmp_path / "moved")})
    with pytest.raises(ConfigError, match="holds no run"):
        lpkit.train(config, out=tmp_path / "parts", resume=True)
    parts = lpkit.train(moved, out=tmp_path / "parts", resume=True)
    assert [line["loss"] for line in parts.metrics] == [line["loss"] for line in run.metrics]
    lpkit.train(own.replace({"precision.recipe": "fp32", "steps": 8}), out=tmp_path / "moved",
                resume=True)
    with pytest.raises(ConfigError,
                       match=r"was begun from weights with the SHA-256 .*, and .*step-00000008 has "
                             r".*; give back the run"):
        lpkit.train(moved.replace({"steps": 6}), out=tmp_path / "parts", resume=True)


def test_a_run_begins_from_one_of_another_shape_by_a_map(own, tmp_path):
    base = lpkit.train(own, out=tmp_path / "base")
    deeper = own.replace({"model.layers": 3, "start.run": str(base.path)})
    with pytest.raises(ConfigError,
                       match=r"start.run: blocks.2.* is \(32,\) here, and blocks.2.* is not there "
                             r".*; give start.map=NEW:OLD"):
        Training.build(deeper)
    model = Training.build(deeper.replace(
        {"start.map": "blocks.2:blocks.0,blocks.1:blocks.0"})).model
    assert all(torch.equal(p, model.get_parameter(name.replace("blocks.0.", "blocks.2.")))
               for name, p in model.named_parameters())
    for bad in ({"start.map": "blocks.2"}, {"start.run": str(tmp_path / "none")},
                {"data.tokenizer": "bpe", "model.vocab": 300, "model.layers": 2}):
        with pytest.raises(ConfigError,
                           match=r"a list of NEW:OLD|holds no run|has another tokenizer"):
            Training.build(deeper.replace(bad))


BAD = {"absent_rows": (None, "there is no module of this name; put the folder that holds it on "
                             "PYTHONPATH"),
       "failing_rows": ("x = 1\nx.y\n", "fails at line 2 of .*failing_rows.py: AttributeError: "
                                        "'int' object has no attribute 'y'; mend it"),
       "broken_rows": ("x = (\n", "fails at line 1 of .*broken_rows.py: SyntaxError"),
       "leaving_rows": ("raise SystemExit(3)", "fails at line 1 of .*: SystemExit: 3"),
       "taken_rows": ("from lpkit.techniques.optimizers import OPTIMIZERS as o\no['adamw'] = "
                      "o['new'] = o['lion']\n",
                      "replaces optimizer=adamw, a row that exists; give its own row another name"),
       "../rows": (None, "is no module's name")}


@pytest.mark.parametrize("name", BAD)
def test_a_module_that_cannot_be_is_one_sentence(name, tmp_path, monkeypatch, capsys):
    text, sentence = BAD[name]
    monkeypatch.syspath_prepend(tmp_path)
    if text:
        (tmp_path / f"{name}.py").write_text(text)
    adamw = optimizers.OPTIMIZERS["adamw"]
    for _ in range(2):      # who asks again hears the same
        with pytest.raises(ConfigError, match=f"imports='{re.escape(name)}'.*{sentence}"):
            Config(imports=(name,))
    assert (cli.main(["predict", "cpu-3m", "--import", name]) == 2
            and len(capsys.readouterr().err.splitlines()) == 1)
    assert optimizers.OPTIMIZERS["adamw"] is adamw and "new" not in optimizers.OPTIMIZERS


def test_a_strangers_file_imports_nothing(tmp_path, monkeypatch, capsys, own):
    monkeypatch.syspath_prepend(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "evil_rows.py").write_text(f"import os\nos.mkdir({str(ran)!r})")
    file = tmp_path / "config.yaml"
    file.write_text("imports: [evil_rows]\n")
    run = lpkit.train(own.replace({"steps": 1}), out=tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text().partition(SEAL)[0].replace("- my_rows\n",
        "- evil_rows\n")
    (tmp_path / "run" / "config.yaml").write_text(
        f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n")
    for command in (["train", str(file)], ["predict", str(file)],
                    ["plan", "--model", str(file), "--tokens", "1e9", "--devices", "2"],
                    ["sample", str(run.path)],
                    ["export", str(run.path), "--out", str(tmp_path / "out")],
                    ["train", "--resume", "--out", str(run.path)]):
        assert cli.main(command) == 2
        assert ("imports='evil_rows': a file imports nothing by itself" in capsys.readouterr().err
                and not ran.exists()), command
    for read in (lambda: Config.from_yaml(file.read_text()), lambda: resolve(str(file)),
                 lambda: Run(run.path).config):
        with pytest.raises(ConfigError,
                           match="`import evil_rows` in Python, or `--import evil_rows` after "
                                 "a command"):
            read()
    assert cli.main(["predict", str(file), "--import", "evil_rows"]) == 0 and ran.exists()
    sys.modules.pop("evil_rows")


def test_the_page_of_techniques_is_made_of_the_rows():
    """In a process of its own: lessons that this one has imported may have brought rows."""
    root = Path(__file__).parents[2]
    page = subprocess.run([sys.executable, "-c",
                           "from tests.pages.techniques import page; print(page(), end='')"],
        cwd=root,
                          capture_output=True, text=True, check=True).stdout
    assert (root / "docs" / "techniques.md").read_text() == page, "python -m tests.pages techniques"


def test_every_row_of_the_kit_can_be_loaded():
    for field, table in FAMILIES.items():
        for name, row in table.items():
            assert not row.implementation or callable(row.load()), f"{field}={name}"


SMALL = Config().replace({
    "model.layers": 2, "model.width": 36, "model.heads": 2, "model.context": 24, "model.vocab": 256,
    "steps": 4, "global_batch": 4, "eval_batches": 1,
    "schedule": "constant", "schedule.warmup_steps": 0, "precision.recipe": "fp32",
    "system.device": "cpu", "system.threads": 1})
LAYOUTS = [{"parallel.data": 2},
           *({"parallel.shard": 2, "parallel.zero": zero} for zero in (2, 3))]


@pytest.fixture
def with_toys(corpus, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    for table, rows in toys.ROWS:
        for name, row in rows.items():
            monkeypatch.setitem(table, name, row)
    return SMALL.replace({"data.source": str(corpus / "*.py")})


@pytest.mark.parametrize("name", [
    name for name in toys.SAYS if name not in ("adam", "lars", "masked")])
def test_ranks_have_the_numbers_of_one_process(name, with_toys, on_ranks, tmp_path):
    """Float32 sums in another order, and steps that divide by roots of them. In directions that
    gradients have not had, SOAP's basis is what rounding makes of it, and its step as long as in
    any other: its sums are those of two micro-batches, in the order of ranks."""
    if name == "distil":
        lpkit.train(with_toys.replace({"model.layers": 1}), out=tmp_path / "teacher")
        with_toys = with_toys.replace({"objective": {"name": "distil",
            "teacher": str(tmp_path / "teacher")}})
    config = with_toys.replace(toys.SAYS[name])
    if name == "weighted":
        config = scores_of_rare_tokens(config, tmp_path / "scores.npy")
    losses, evaluated, weights = toys.trained(config.replace({"grad_accum_steps": 2}
        if name == "soap" else {}))
    for results in on_ranks("toys_train", config, layouts=LAYOUTS):
        for layout, (here, val, theirs) in zip(LAYOUTS, results, strict=True):
            assert (here == pytest.approx(losses, rel=1e-5)
                    and val == pytest.approx(evaluated, rel=1e-5)), layout
            assert (torch.tensor(theirs).sub(torch.tensor(weights)).norm() < 1e-5
                    * torch.tensor(weights).norm()), layout


def test_evaluation_checkpoints_and_samples_take_the_average(with_toys, tmp_path):
    """What goes on is what was trained; what is evaluated, sampled and exported is the average."""
    config = with_toys.replace(toys.SAYS["schedule-free"] | {"eval_every": 2, "eval_batches": 3})
    run = lpkit.train(config, out=tmp_path / "run")
    training = Training.build(config)
    for step in range(config.steps):
        training.update(step)
    before = [p.detach().clone() for p in training.model.parameters()]
    assert training.evaluate() == run.metrics[-1]["val_loss"]
    assert all(map(torch.equal, before, training.model.parameters()))
    with training.evaluated():
        average = [p.detach().clone() for p in training.model.parameters()]
    assert all(map(torch.equal, average, trained(Run(tmp_path / "run")).model.parameters()))
    assert not any(map(torch.equal, before, average))
    assert training.loss(training.model, training.val.batch(0)) != run.metrics[-1]["val_loss"]
    export(tmp_path / "run", tmp_path / "exported")
    from safetensors.torch import load_file
    assert any(torch.equal(t, average[0])
               for t in load_file(tmp_path / "exported" / "model.safetensors").values())


def test_a_student_is_evaluated_by_what_it_says_next(with_toys, tmp_path):
    """Its objective is the teacher's; val_loss is the nats of the next token. The teacher is
    priced, and doubted with the trace's name."""
    lpkit.train(with_toys.replace({"model.layers": 1, "steps": 2}), out=tmp_path / "teacher")
    config = with_toys.replace({"objective": {"name": "distil",
        "teacher": str(tmp_path / "teacher")}})
    run = lpkit.train(config, out=tmp_path / "run")
    assert run.config == config == Config.from_yaml(config.to_yaml())
    training = Training.build(config)
    batch = training.batch(0)
    assert run.metrics[0]["loss"] == training.objective(training.model,
        batch).item() != training.loss(training.model, batch).item()
    alone = Training.build(with_toys)
    alone.model.load_state_dict(training.model.state_dict())
    assert training.evaluate() == alone.evaluate()
    plain, taught = (predict(variant, "h200") for variant in (with_toys, config))
    assert (taught.step["objective"].seconds > 0
            and taught.step.step_seconds > plain.step.step_seconds)
    assert (taught.memory.peak_bytes > plain.memory.peak_bytes
            and "predict_trace" in taught.memory.doubt)
    assert lpkit.sample(Run(tmp_path / "run"), tokens=3)
    assert lpkit.predict_trace(config).peak_bytes > lpkit.predict_trace(with_toys).peak_bytes
    parts = in_parts(config, tmp_path / "parts", 2)
    assert [line["loss"] for line in parts.metrics] == [line["loss"] for line in run.metrics]


def goes_on_to_the_bit(config, run, folder):
    """A run that was stopped after two updates, and resumed, has the lines of `run`."""
    parts = in_parts(config, folder, 2)
    lines = [[(line["loss"], line.get("val_loss")) for line in metrics]
             for metrics in (parts.metrics, run.metrics)]
    assert lines[0] == lines[1]


def test_what_needs_the_past_alone_refuses_a_masked_model(with_toys, tmp_path):
    """Caches, samples and exports; tests/lessons/rows/test_masked.py has what such a model does."""
    config = with_toys.replace(toys.SAYS["masked"] | {"steps": 2, "model.layers": 1})
    run = lpkit.train(config, out=tmp_path / "run")
    for ask in (lambda: lpkit.sample(run), lambda: decoding(config, "h200"),
                lambda: new_cache(config.model, dtype=torch.float32, device="cpu")):
        with pytest.raises(ConfigError,
                           match=r"model\.attention=bidirectional sees tokens to come, so that .* "
                                 r"nothing can be generated or cached; ask"):
            ask()
    with pytest.raises(ConfigError,
                       match=r"transformers has no model with .*model\.attention=bidirectional"):
        export(run, tmp_path / "out")
    with pytest.raises(ConfigError,
                       match=r"system\.attention=sdpa-cudnn needs a GPU|has no attention to keys "
                             r"to come"):
        build.decide(config.replace({"system.attention": "sdpa-cudnn"}))
    with pytest.raises(ConfigError, match="a window and blocks are of the past; give"):
        Rule(causal=False, window=3)


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_tokens_stand_where_their_places_say(position, with_toys):
    """A rank of a context-parallel group has some of a text's tokens: each is turned, or gets the
    vector, of its own place."""
    m = with_toys.replace(toys.SAYS["masked"] | {"model.position": position}).model
    model = Transformer(m, attend=backend("plain", m))
    tokens, places = torch.randint(256, (2, m.T)), torch.randperm(m.T)
    assert torch.allclose(model(tokens[:, places], places=places), model(tokens)[:, places],
                          atol=1e-5)
    assert not torch.allclose(model(tokens[:, places]), model(tokens)[:, places], atol=1e-2)


def test_scores_come_with_the_tokens_that_they_are_of(with_toys, tmp_path):
    """They are part of what a run is, wherever their file lies; what is no array of them is refused
    in one sentence."""
    config = with_toys.replace(toys.SAYS["weighted"] | {"grad_accum_steps": 2,
                                                        "checkpoint_every": 2})
    config = scores_of_rare_tokens(config, tmp_path / "scores.npy")
    assert Config.from_yaml(config.to_yaml()) == config and predict(config, "h200").memory.doubt
    run = lpkit.train(config, out=tmp_path / "run")
    goes_on_to_the_bit(config, run, tmp_path / "parts")
    training = Training.build(config)
    batch, scores = training.batch(0), np.load(config.data.scores)
    # of a token, here
    of = dict(zip(prepare(config.data, vocab=256).train.tolist(), scores.tolist()))
    assert (batch.extra["scores"].flatten().tolist()
            == pytest.approx([of[token] for token in batch.targets.flatten().tolist()]))
    assert run.metrics[0]["loss"] == pytest.approx(training.objective(training.model,
        batch).item(), rel=1e-6)
    assert run.metrics[0]["loss"] != pytest.approx(training.loss(training.model, batch).item(),
        rel=1e-4)
    assert run.identity["tokens"]["scores"] and lpkit.sample(run, tokens=3)
    assert measure.memory(config, device="cpu").rows == lpkit.predict_trace(config).rows
    moved = tmp_path / "moved.npy"
    Path(config.data.scores).rename(moved)
    longer = config.replace({"data.scores": str(moved), "steps": 5})
    assert lpkit.train(longer, out=tmp_path / "run", resume=True).summary["status"] == "complete"
    np.save(moved, scores + 1)
    with pytest.raises(ConfigError, match=r"cannot resume .* its tokens have the SHA-256"):
        lpkit.train(longer.replace({"steps": 6}), out=tmp_path / "run", resume=True)
    for bad, sentence in ((scores[1:], "holds float32 .*, and the corpus wants a float for each of "
                                       "its .* training tokens"),
                          (scores.astype(int), "holds int64"), (None, "cannot be read")):
        moved.unlink()
        if bad is not None:
            np.save(moved, bad)
        with pytest.raises(ConfigError, match=f"data.scores='.*moved.npy' {sentence}"):
            Training.build(longer)
    with pytest.raises(ConfigError,
                       match=r"are of a corpus, and this data\.policy draws its own tokens"):
        Training.build(config.replace({"data.policy": "copy", "model.context": 32}))


def test_a_ramp_reads_the_sequences_of_the_whole_in_their_order(with_toys, tmp_path):
    """Tokens, FLOPs and the pace of a run are sums over its steps; what is no whole micro-batch is
    refused before anything is allocated."""
    config = with_toys.replace({"sizes": "ramp", "sizes.until": 3, "data.policy": "spread-windows",
                                "steps": 5, "grad_accum_steps": 2})
    whole, ramped = (Training.build(variant).data
                     for variant in (with_toys.replace({"data.policy": "spread-windows"}), config))
    read = torch.cat([ramped.batch(step).tokens for step in (*range(5), 1)])
    assert [len(ramped.batch(step).tokens) for step in range(5)] == [2, 2, 2, 4, 4]
    assert (torch.equal(read[:14], torch.cat([whole.batch(step).tokens for step in range(4)])[:14])
            and torch.equal(read[14:], read[2:4]))
    run = lpkit.train(config, out=tmp_path / "run")
    T = config.model.context
    assert ([line["tokens"] for line in run.metrics] == [2 * T, 4 * T, 6 * T, 10 * T, 14 * T]
            and run.summary["tokens"] == 14 * T)
    assert predict(config, "h200").run.tokens == 14 * T
    with pytest.raises(ConfigError,
                       match="sizes=ramp gives update 1 2 sequences of 24 tokens; let it give a "
                             "multiple of 4"):
        build.decide(config.replace({"parallel.data": 4}), ranks=None)


def test_extra_tensors_are_split_by_rows_like_the_rest():
    tokens, scores = torch.arange(12).view(4, 3), {"scores": torch.arange(4.0),
        "teacher": torch.arange(24.0).view(4, 3, 2)}
    batch = Batch(tokens, tokens, extra=scores)
    assert (Batch.of(batch.present).present.keys() == batch.to(torch.device("cpu")).present.keys()
            == batch.present.keys())
    first, second = batch.chunk(2)
    assert (torch.equal(second.extra["scores"], torch.tensor([2.0, 3.0]))
            and torch.equal(first.extra["teacher"], scores["teacher"][:2]))
    assert first.document_ids is None and not Batch(tokens, tokens).extra


@pytest.mark.parametrize("name", ["soap", "schedule-free", "z-loss", "weighted", "ramp"])
def test_toys_train_in_fp8(name, with_toys, tmp_path):
    """Casts are of the forward and backward passes, and nothing of a toy is: losses fall as those
    of float32 do."""
    config = with_toys.replace(toys.SAYS[name] | {"model.width": 64, "model.context": 32,
        "optimizer.lr": 3e-3, "steps": 8})
    if name == "weighted":
        config = scores_of_rare_tokens(config, tmp_path / "scores.npy")
    losses = []
    for recipe in ("fp32", "fp8-tensorwise"):
        training = Training.build(config.replace({"precision.recipe": recipe}))
        losses.append([training.update(step).loss.item() for step in range(8)])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("name, layout", [
    *((name, Layout(shard=2, zero=3)) for name in (*toys.RULES, "z-loss", "ramp")),
    *((name, Layout()) for name in ("adam", "muon", "soap")),
    ("shampoo", Layout(shard=2, zero=1)), ("soap", Layout(shard=2, zero=2))], ids=str)
def test_the_formula_of_a_toy_is_the_trace(name, layout, with_toys):
    """Its states to the byte (PyTorch's own Adam counts in 4 a parameter), the peak within 2%, or a
    doubt that names the trace. SOAP's first update, which is traced, holds less than those that
    turn its bases, and ZeRO 1's buffer of weights is gone when Shampoo takes a root."""
    config = with_toys.replace(toys.SAYS[name] | {"model.layers": 4, "model.width": 64,
        "model.heads": 4})
    traced = lpkit.predict_trace(config, layout.devices, layout=layout)
    there = memory(config, _cpu(), layout=layout, attention=traced.chosen["attention"].used)
    assert (there.at(there.peak_moment)["optimizer state"]
            == pytest.approx(traced.rows["optimizer state"],
                             rel=1e-9 if name in {*toys.RULES} - {"adam"} else 1e-3))
    assert there.peak_bytes == pytest.approx(traced.peak_bytes,
        rel=0.05 if "predict_trace" in there.doubt or name in ("shampoo", "soap") else 0.02)
