"""The promise of the architecture: a technique is one row and one function, also from outside.

Each family gets a toy from this file. Nothing of the kit is edited: a row goes into the family's table, its implementation
is named by this module. Then the toy is predicted, planned, trained, traced, measured, resumed, sampled, and looked at by
`lpkit doctor`.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import lpkit
from lpkit import measure
from lpkit.config import Config
from lpkit.contracts import Batch, DataPolicy, Stage, Transform
from lpkit.errors import ConfigError
from lpkit.measure import doctor
from lpkit.memory.recompute import Recomputation, Recompute
from lpkit.nn.layers import GeluMLP
from lpkit.predict import flops, memory, predict
from lpkit.predict.plan import plan
from lpkit.techniques import (
    FAMILIES,
    attention_backends,
    blocks,
    changes,
    data,
    inits,
    objectives,
    operation,
    optimizers,
    recipes,
    schedules,
)
from lpkit.techniques import memory as techniques
from lpkit.techniques.layouts import Layout
from lpkit.techniques.row import Row, Settings
from lpkit.training import build
from lpkit.training.runs import Run
from lpkit.training.training import Training
from tests import toys

HERE = f"{__name__}:"


# ---- implementations: one function or class each

def sign_descent(w: Tensor, g: Tensor, slots: list[Tensor], settings: Settings, update: int) -> None:
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
        self.same = Batch(window[:-1].expand(batch, -1).contiguous(), window[1:].expand(batch, -1).contiguous())

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
        settings=optimizers.OptimizerSettings(lr=1e-3), slots=(optimizers.Slot(name="positive", signed=False),),
        implementation=HERE + "sign_descent", why="the sign of the gradient"), {"optimizer": "toy"}),
    "schedule": (schedules.SCHEDULES, schedules.LearningRateSchedule(settings=Low(), shape=staircase),
                 {"schedule": "toy", "schedule.low": 0.5}),
    "init": (inits.INITS, Row(implementation=HERE + "small_init"), {"model.init": "toy"}),
    "block": (blocks.BLOCKS, operation.Kind(operations=parallel_operations, implementation=HERE + "Parallel"),
              {"model.block": "toy"}),
    "attention": (attention_backends.ATTENTION, attention_backends.Backend(operations=attention_backends.plain, implementation=HERE + "attend_plainly"),
                  {"system.attention": "toy"}),
    "recipe": (recipes.RECIPES, None, {"precision.recipe": "toy"}),
    "memory": (techniques.RECOMPUTE, techniques.Recompute(
        implementation=HERE + "first_blocks", settings=FirstHalf(), repeats=frozenset({"products", "attention", "pointwise"}),
        every=lambda settings: 2, why="every second block"), {"memory.recompute": "toy", "memory.recompute.blocks": 2}),
    "data": (data.POLICIES, data.Policy(implementation=HERE + "Again"), {"data.policy": "toy"}),
    "transform": (changes.MODEL_TRANSFORMS, Row(implementation=HERE + "scale_head", settings=Scale()),
                  {"transforms": [{"name": "toy", "by": 0.25}]}),
    "governor": (changes.GOVERNORS, Row(implementation=HERE + "Shrink"), {"governors": "toy"}),
}
TOYS["sizes"] = data.SIZES, toys.SIZES["ramp"], {"sizes": "toy", "grad_accum_steps": 2}
TOYS["objective"] = objectives.OBJECTIVES, toys.OBJECTIVES["z-loss"], {"objective": "toy"}
for _name, _row in toys.OPTIMIZERS.items():
    TOYS[_name] = optimizers.OPTIMIZERS, _row, toys.SAYS[_name] | {"optimizer": "toy"}


@pytest.fixture(params=TOYS)
def toy(request, corpus, monkeypatch):
    """The Config that names a toy, its row in its family for as long as the test runs."""
    table, row, changed = TOYS[request.param]
    if row is None:     # E5M2 with a scale for each row of 16: a recipe is a function of its settings
        made = dict(recipes.RECIPES)
        recipes.add("toy", partial(recipes._fp8, block=(1, 16)), recipes.Fp8Settings(gradient_format="e5m2"), "this file")
        row = recipes.RECIPES["toy"]
        recipes.RECIPES.clear()
        recipes.RECIPES.update(made)
    monkeypatch.setitem(table, "toy", row)
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return SimpleNamespace(family=request.param, config=Config().replace({
        "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "data.source": str(corpus / "*.py"),
        "steps": 6, "global_batch": 4, "eval_every": 3, "eval_batches": 1, "checkpoint_every": 2, "schedule.warmup_steps": 1,
        "precision.recipe": "bf16", "system.device": "cpu"} | changed))


def test_one_row_and_one_function_do_everything(toy, tmp_path):
    config = toy.config
    assert Config.from_yaml(config.to_yaml()) == config
    # predict and plan
    assert predict(config, "h200").step_seconds > 0
    found = plan(config, 1e9, "h200", devices=2)
    assert found.options and found.options[0].config.to_dict().keys() == config.to_dict().keys()
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
    handle = lpkit.start(config, out=tmp_path / "parts")
    handle.subscribe(lambda record: handle.stop() if record.step >= 2 else None)
    handle.result()
    parts = lpkit.train(config, out=tmp_path / "parts", resume=True)
    assert [line["loss"] for line in parts.metrics] == [line["loss"] for line in run.metrics]
    # sample, and the doctor
    assert lpkit.sample(Run(tmp_path / "whole"), tokens=5, seed=1).startswith("\n")
    assert any(probe.name.endswith("=toy") and probe.works for probe in doctor.techniques())


def _cpu():
    from lpkit.measure.trace import _machine

    return _machine(torch.device("cpu"))


def test_the_page_of_techniques_is_made_of_the_rows():
    from lpkit.techniques.__main__ import page

    assert (Path(__file__).parents[1] / "docs" / "techniques.md").read_text() == page(), "python -m lpkit.techniques"


def test_every_row_of_the_kit_can_be_loaded():
    for field, table in FAMILIES.items():
        for name, row in table.items():
            assert not row.implementation or callable(row.load()), f"{field}={name}"


SMALL = Config().replace({
    "model.layers": 2, "model.width": 36, "model.heads": 2, "model.context": 24, "model.vocab": 256, "steps": 4, "global_batch": 4, "eval_batches": 1,
    "schedule": "constant", "schedule.warmup_steps": 0, "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1})
LAYOUTS = [{"parallel.data": 2}, *({"parallel.shard": 2, "parallel.zero": zero} for zero in (1, 2, 3))]


@pytest.fixture
def with_toys(corpus, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    for name, row in toys.OPTIMIZERS.items():
        monkeypatch.setitem(optimizers.OPTIMIZERS, name, row)
    for name, row in toys.OBJECTIVES.items():
        monkeypatch.setitem(objectives.OBJECTIVES, name, row)
    monkeypatch.setitem(data.SIZES, "ramp", toys.SIZES["ramp"])
    return SMALL.replace({"data.source": str(corpus / "*.py")})


@pytest.mark.parametrize("name", toys.SAYS)
def test_ranks_have_the_numbers_of_one_process(name, with_toys, on_ranks, tmp_path):
    """Float32 sums in another order, and steps that divide by roots of them."""
    if name == "distil":
        lpkit.train(with_toys.replace({"model.layers": 1}), out=tmp_path / "teacher")
        with_toys = with_toys.replace({"objective": {"name": "distil", "teacher": str(tmp_path / "teacher")}})
    config = with_toys.replace(toys.SAYS[name] | ({"optimizer.head_dim": 18} if name == "muon" else {}))
    losses, evaluated, weights = toys.trained(config)
    for found in on_ranks("toys_train", config, layouts=LAYOUTS):
        for layout, (here, val, theirs) in zip(LAYOUTS, found, strict=True):
            assert here == pytest.approx(losses, rel=1e-5) and val == pytest.approx(evaluated, rel=1e-5), layout
            assert torch.tensor(theirs).sub(torch.tensor(weights)).norm() < 1e-5 * torch.tensor(weights).norm(), layout


def test_evaluation_checkpoints_and_samples_take_the_average(with_toys, tmp_path):
    """What goes on is what was trained; what is evaluated, sampled and exported is the average."""
    from lpkit.training.export import export
    from lpkit.training.sampling import trained

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
    assert any(torch.equal(t, average[0]) for t in load_file(tmp_path / "exported" / "model.safetensors").values())


def test_a_student_is_evaluated_by_what_it_says_next(with_toys, tmp_path):
    """Its objective is the teacher's; val_loss is the nats of the next token. The teacher is priced, and doubted with the trace's name."""
    lpkit.train(with_toys.replace({"model.layers": 1, "steps": 2}), out=tmp_path / "teacher")
    config = with_toys.replace({"objective": {"name": "distil", "teacher": str(tmp_path / "teacher")}})
    run = lpkit.train(config, out=tmp_path / "run")
    assert run.config == config == Config.from_yaml(config.to_yaml())
    training = Training.build(config)
    batch = training.batch(0)
    assert run.metrics[0]["loss"] == training.objective(training.model, batch).item() != training.loss(training.model, batch).item()
    alone = Training.build(with_toys)
    alone.model.load_state_dict(training.model.state_dict())
    assert training.evaluate() == alone.evaluate()
    plain, taught = (predict(one, "h200") for one in (with_toys, config))
    assert taught.step["objective"].seconds > 0 and taught.step.step_seconds > plain.step.step_seconds
    assert taught.memory.peak_bytes > plain.memory.peak_bytes and "predict_trace" in taught.memory.doubt
    assert lpkit.sample(Run(tmp_path / "run"), tokens=3)
    assert lpkit.predict_trace(config).peak_bytes > lpkit.predict_trace(with_toys).peak_bytes
    handle = lpkit.start(config, out=tmp_path / "parts")
    handle.subscribe(lambda record: handle.stop() if record.step >= 2 else None)
    handle.result()
    parts = lpkit.train(config, out=tmp_path / "parts", resume=True)
    assert [line["loss"] for line in parts.metrics] == [line["loss"] for line in run.metrics]


def test_a_ramp_reads_the_sequences_of_the_whole_in_their_order(with_toys, tmp_path):
    """Tokens, FLOPs and the pace of a run are sums over its steps; what is no whole micro-batch is refused before anything is allocated."""
    config = with_toys.replace({"sizes": "ramp", "sizes.until": 3, "data.policy": "sequential-windows", "steps": 5, "grad_accum_steps": 2})
    whole, ramped = (Training.build(one).data for one in (with_toys.replace({"data.policy": "sequential-windows"}), config))
    read = torch.cat([ramped.batch(step).tokens for step in (*range(5), 1)])
    assert [len(ramped.batch(step).tokens) for step in range(5)] == [2, 2, 2, 4, 4]
    assert torch.equal(read[:14], torch.cat([whole.batch(step).tokens for step in range(4)])[:14]) and torch.equal(read[14:], read[2:4])
    run = lpkit.train(config, out=tmp_path / "run")
    T = config.model.context
    assert [line["tokens"] for line in run.metrics] == [2 * T, 4 * T, 6 * T, 10 * T, 14 * T] and run.summary["tokens"] == 14 * T
    assert flops.run_flops(config) == 14 * flops.training_flops(config.model)
    assert flops.run_flops(with_toys) == 4 * flops.training_flops(with_toys.model, batch=4)
    short = config.replace({"sizes.short": True})
    assert flops.run_flops(short) < flops.run_flops(config) and predict(config, "h200").run.tokens == 14 * T
    with pytest.raises(ConfigError, match="sizes=ramp gives update 1 2 sequences of 24 tokens; let it give a multiple of 4"):
        build.decide(config.replace({"parallel.data": 4}), ranks=None)


def test_extra_tensors_are_split_by_rows_like_the_rest():
    tokens, scores = torch.arange(12).view(4, 3), {"scores": torch.arange(4.0), "teacher": torch.arange(24.0).view(4, 3, 2)}
    batch = Batch(tokens, tokens, extra=scores)
    assert Batch.of(batch.present).present.keys() == batch.to(torch.device("cpu")).present.keys() == batch.present.keys()
    first, second = batch.chunk(2)
    assert torch.equal(second.extra["scores"], torch.tensor([2.0, 3.0])) and torch.equal(first.extra["teacher"], scores["teacher"][:2])
    assert first.document_ids is None and not Batch(tokens, tokens).extra


@pytest.mark.parametrize("name", [name for name in toys.SAYS if name != "distil"])
def test_toys_train_in_fp8(name, with_toys):
    """Casts are of the forward and backward passes, and nothing of a toy is: losses fall as those of float32 do."""
    config = with_toys.replace(toys.SAYS[name] | {"model.width": 64, "model.context": 32, "optimizer.lr": 3e-3, "steps": 8})
    found = []
    for recipe in ("fp32", "fp8-tensorwise"):
        training = Training.build(config.replace({"precision.recipe": recipe}))
        found.append([training.update(step).loss.item() for step in range(8)])
    assert found[0] != found[1] == pytest.approx(found[0], rel=0.02)


@pytest.mark.parametrize("name", [*toys.OPTIMIZERS, "z-loss", "ramp"])
@pytest.mark.parametrize("layout", [Layout(), Layout(shard=2, zero=1), Layout(shard=2, zero=2), Layout(shard=2, zero=3)], ids=str)
def test_the_formula_of_a_toy_is_the_trace(name, layout, with_toys):
    """Its states to the byte, the peak within 2%, or a doubt that names the trace."""
    config = with_toys.replace(toys.SAYS[name] | {"model.layers": 4, "model.width": 64, "model.heads": 4})
    traced = lpkit.predict_trace(config, layout.devices, layout=layout)
    there = memory(config, _cpu(), layout=layout, attention=traced.chosen["attention"].used)
    assert there.at(there.peak_moment)["optimizer state"] == pytest.approx(traced.rows["optimizer state"], rel=1e-3 if name in ("z-loss", "ramp") else 1e-9)
    assert there.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.05 if "predict_trace" in there.doubt else 0.02)
