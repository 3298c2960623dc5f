"""Only these tests catch a second place that updates a model, a weighted mean that depends on the
micro-batches, state that is lost on its way into another training, a model that is sampled other
than it was trained, and an error of an observer, a governor or a run of a series that ends more
than itself."""

import math
import re
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import lpkit
from lpkit import hardware
from lpkit.config import Config
from lpkit.contracts import Batch, StepRecord
from lpkit.errors import ConfigError
from lpkit.memory.loss import chunked_cross_entropy, full_cross_entropy
from lpkit.techniques.changes import GOVERNORS
from lpkit.techniques.row import TechniqueRow
from lpkit.training import checkpoint, sampling
from lpkit.training.background import Series, start_each, train
from lpkit.training.loop import fit
from lpkit.training.runs import RunFailedError
from lpkit.training.steps import accumulate
from lpkit.training.training import Training
from tests.training.resuming import in_parts

ROOT = Path(lpkit.__file__).parent


@pytest.fixture
def tiny(corpus, monkeypatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return Config().replace({
        "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32,
        "data.source": str(corpus / "*.py"), "steps": 6, "global_batch": 4, "eval_every": 0,
        "eval_batches": 1, "checkpoint_every": 2, "schedule.warmup_steps": 2,
        "precision.recipe": "fp32", "system.device": "cpu", "system.compile": False})


# ---- one update

# The update itself, and what is held against it: a library's own loop, one matrix product,
# PyTorch's own wrapper.
UPDATES_THEMSELVES = {
    "training/steps.py", "measure/ranks.py", "measure/matrix.py",
    "training/training.py",         # the estimate of a rule, which makes no update
    # a step of somebody's own loop, on shapes; a race of kernels
    "modules/step.py", "modules/convert.py"}
UPDATE = (r"optimizer\.step\(|\b(loss|part|sum\(\)|mean\(\)|scale\)?)\.backward\(|"
          r"\.param_groups\b.*\[.lr.\] =")


def test_nobody_else_updates_a_model():
    """`predict` and walks have methods of that name, which take products."""
    files = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")
             if re.search(UPDATE, path.read_text())}
    others = {name for name in files if not name.startswith(("optim/", "memory/", "predict/"))}
    assert others <= UPDATES_THEMSELVES, others - UPDATES_THEMSELVES


def test_phases_are_named_in_order_and_change_nothing(tiny):
    tiny, seen = tiny.replace({"grad_accum_steps": 2}), []

    def phases(name):
        seen.append(name)
        return nullcontext()

    timed = Training.build(tiny).update(0, phases=phases)
    plain = Training.build(tiny).update(0)
    assert seen == ["forward", "backward"] * 2 + ["optimizer"]
    assert torch.equal(timed.loss, plain.loss) and torch.equal(timed.grad_norm, plain.grad_norm)


def test_state_goes_into_another_training_bit_for_bit(tiny):
    tiny = tiny.replace({"precision.recipe": "fp8-delayed"})
    first, second = Training.build(tiny), Training.build(tiny.replace({"seed": 1}))
    for step in range(3):
        first.update(step)
    second.load_state_dict(first.state_dict())
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name]
               for name in a)
    batch = first.batch(3)
    assert torch.equal(first.forward_backward(batch), second.forward_backward(batch))
    with pytest.raises(RunFailedError,
                       match=r"lacks 1 of the run.s tensors, model/embed\.weight first"):
        second.load_state_dict({name: t for name, t in a.items() if name != "model/embed.weight"})


def test_a_copy_goes_its_own_way(tiny):
    original = Training.build(tiny)
    original.update(0)
    copy = original.copy()
    assert torch.equal(original.update(1).loss, copy.update(1).loss)
    before = copy.model.embed.weight.clone()
    original.update(2)
    assert torch.equal(copy.model.embed.weight, before)
    assert torch.equal(original.batch(5).tokens, copy.batch(5).tokens)


# ---- batches

class Table(nn.Module):
    """Logits are a row of a table and then a head."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.rows = nn.Parameter(torch.randn(11, 5, generator=draw))
        self.head = nn.Linear(5, 11, bias=False)
        nn.init.normal_(self.head.weight, generator=draw)

    def hidden(self, x, documents=None):
        return self.rows[x]

    def forward(self, x, documents=None):
        return self.head(self.hidden(x))


def weighted(rows: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randint(11, (rows, 7), generator=draw) for _ in range(2))
    weights = torch.rand(rows, 7, generator=draw)
    weights[2:4] = 0        # a whole micro-batch of three
    return Batch(x, y, torch.zeros_like(x), weights)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("loss", [full_cross_entropy, partial(chunked_cross_entropy, chunk=4)],
                         ids=["whole", "chunked"])
def test_weights_weigh_the_mean(loss, parts):
    """Against float64: sum w_i nats_i / sum w_i over the whole batch, whatever the
    micro-batches."""
    batch, model = weighted(), Table()
    mean = accumulate(model, partial(loss, autocast=nullcontext()), batch, parts)
    exact = Table().double()
    nats = nn.functional.cross_entropy(exact(batch.tokens).flatten(0, 1), batch.targets.flatten(),
                                       reduction="none")
    want = (nats * batch.weights.flatten().double()).sum() / batch.weights.double().sum()
    want.backward()
    assert mean.item() == pytest.approx(want.item(), rel=1e-6)
    for p, q in zip(model.parameters(), exact.parameters()):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        evaluated = loss(model, batch, autocast=nullcontext()).item()
    assert evaluated == pytest.approx(want.item(), rel=1e-6)


def test_a_batch_is_cut_and_moved_whole():
    batch = weighted()
    pieces = batch.chunk(3)
    assert [piece.weights.sum().item() == 0 for piece in pieces] == [False, True, False]
    assert torch.equal(torch.cat([piece.document_ids for piece in pieces]), batch.document_ids)
    assert len(batch.to("meta").tensors) == 4 and batch.to("meta").weights.is_meta
    assert Batch(batch.tokens, batch.targets).chunk(2)[1].weights is None


# ---- governors and observers

class Shrink:
    """Multiplies a bias by 1 - 2^-k before update k, and counts."""

    def __init__(self, settings):
        self.count = torch.tensor(0.0)

    def begin(self, training, step):
        self.count += 1
        with torch.no_grad():
            training.model.norm.bias.mul_(1 - 2.0 ** -float(self.count)).add_(2.0**-10)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"].clone()


def test_a_governor_changes_the_run_and_resumes_with_it(tiny, tmp_path, monkeypatch):
    plain = train(tiny, out=tmp_path / "plain")
    monkeypatch.setitem(GOVERNORS, "shrink", TechniqueRow(implementation=f"{__name__}:Shrink"))
    governed = tiny.replace({"governors": "shrink"})
    whole_run = train(governed, out=tmp_path / "whole")
    parts = in_parts(governed, tmp_path / "parts", 3)
    losses = [[line["loss"] for line in run.metrics] for run in (plain, whole_run, parts)]
    assert losses[0] != losses[1] == losses[2]
    assert checkpoint.load_latest(parts.checkpoints)[0].tensors["governor/shrink/count"] == 6
    with pytest.raises(ConfigError, match="governors was"):
        train(governed.replace({"steps": 7}), out=tmp_path / "plain", resume=True)
    with pytest.raises(RunFailedError, match="governor/shrink/count first"):
        Training.build(governed).load_state_dict(Training.build(tiny).state_dict())
    assert lpkit.sample(parts, tokens=3)


def test_an_observer_that_fails_is_named_and_the_run_goes_on(tiny, tmp_path):
    heard = []

    def broken(record):
        heard.append(record.step)
        if record.step == 2:
            raise ValueError("no more ink")

    steps = []
    run = train(tiny, out=tmp_path / "run",
                observers=[broken, lambda record: steps.append(record.step)])
    assert heard == [1, 2] and steps == [1, 2, 3, 4, 5, 6] and run.summary["status"] == "complete"
    [error] = run.summary["observer_errors"]
    assert error.endswith("broken at step 2: ValueError: no more ink")
    assert "no more ink" in run._repr_html_()


def test_what_techniques_report_is_in_the_metrics(tiny, tmp_path):
    built = Training.build(tiny)
    built.step_metrics.update({"sparsity": lambda: torch.tensor(0.25), "broken": lambda: math.nan})
    lines = fit(built, tmp_path / "run").metrics
    assert all(line["extra"] == {"sparsity": 0.25, "broken": None} for line in lines)
    plain = StepRecord(step=1, loss=1.0, grad_norm=0.0, lr=0.0, tokens=1, step_seconds=1.0,
                       peak_bytes=1)
    assert "extra" not in plain.to_dict() and plain.to_dict()["grad_norm"] == 0.0


# ---- sampling

@pytest.mark.parametrize("changes", [
    {"precision.recipe": "bf16", "memory.param_dtype": "bf16"},
    {"precision.recipe": "fp8-delayed", "memory.recompute": "block"},
    {"precision.recipe": "mxfp8", "memory.cross_entropy": "chunked"}], ids=str)
def test_a_model_is_sampled_as_it_was_trained(tiny, tmp_path, changes):
    built = Training.build(tiny.replace(changes | {"steps": 2}))
    run = fit(built, tmp_path / "run")
    built.model.eval()
    tokens = built.val.batch(0).tokens
    sampled = sampling.trained(run)
    want = built.logits(tokens)
    assert torch.equal(sampled.logits(tokens), want)
    a, b = ({name: t.dtype for name, t in training.model.state_dict().items()}
            for training in (sampling.trained(run), built))
    assert a == b
    once = sampling.cast_once(sampled)
    assert torch.equal(once.logits(tokens), want)
    assert once.model.embed.weight.dtype == built.model.embed.weight.dtype
    assert all(m.weight.dtype == torch.bfloat16 for m in once.model.modules()
               if type(m) is nn.Linear)
    # beyond the context
    assert len(lpkit.sample(run, prompt="def ", tokens=40, temperature=0)) > 4


# ---- runs that go on, and runs that end early

def test_a_finished_run_is_trained_longer(tiny, tmp_path):
    constant = tiny.replace({"schedule": "constant", "steps": 4})
    longer = constant.replace({"steps": 8})
    train(constant, out=tmp_path / "run")
    run = train(longer, out=tmp_path / "run", resume=True)
    want = train(longer, out=tmp_path / "whole")
    assert [line["loss"] for line in run.metrics] == [line["loss"] for line in want.metrics]
    assert run.summary["status"] == "complete"
    assert run.summary["steps"] == run.config.steps == 8
    first, second = run.environments
    assert run.environment == second and (first["from_step"], second["from_step"]) == (0, 4)
    assert second["extended"].startswith("steps was 4 and is 8; from here on the learning rate ")
    assert "extended" not in first
    with pytest.raises(ConfigError, match="steps was 8 and is 4"):
        train(constant, out=tmp_path / "run", resume=True)


def test_a_series_goes_on_after_any_failed_run(tiny, tmp_path, monkeypatch):
    fine = Training.update

    def update(self, step, **settings):
        if self.config.seed == 7 and step == 1:
            raise torch.OutOfMemoryError("out of memory")
        return fine(self, step, **settings)

    monkeypatch.setattr(Training, "update", update)
    runs = start_each({"large": tiny.replace({"seed": 7}), "small": tiny}, out=tmp_path).result()
    statuses = {name: run.summary["status"] for name, run in runs.items()}
    assert statuses == {"large": "failed", "small": "complete"}


def test_peak_memory_is_that_of_the_run(tiny, tmp_path):
    if not hardware.reset_peak("cpu"):
        pytest.skip("this system does not let a process reset its peak")
    big = torch.ones(100_000_000)      # 400 MB
    held = hardware.peak_bytes("cpu")
    del big
    run = train(tiny.replace({"steps": 2}), out=tmp_path / "run")
    assert run.summary["peak_bytes"] < held - 0.3e9


def test_a_series_names_the_run_at_hand(tiny, tmp_path):
    """From its first step on, however slowly the series itself gets to know of it."""
    class Slow(dict):
        def __setitem__(self, name, handle):
            time.sleep(0.5)
            super().__setitem__(name, handle)

    series, seen = Series({"one": tiny, "two": tiny}, out=tmp_path), []
    series.handles = Slow()
    series.subscribe(lambda record: seen.append(
        (series.title, series.records[-1].step, record.step)))
    series.begin().result()
    assert seen == [(name, step, step) for name in ("one", "two") for step in range(1, 7)]
