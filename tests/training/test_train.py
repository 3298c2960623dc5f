"""Only these tests catch a trainer whose losses are not those of a loop in plain PyTorch, a run
that was cut and gives other numbers, and a run folder that is overwritten or not refused."""

import json
import math
from dataclasses import replace

import pytest
import torch

import lessons.rows.schedules  # noqa: F401  two schedules more
import lpkit
from lpkit.config import Config
from lpkit.contracts import Choice, Stage, Transform
from lpkit.errors import ConfigError
from lpkit.techniques.schedules import SCHEDULES, schedule
from lpkit.training import checkpoint, runs
from lpkit.training.background import start, train
from lpkit.training.build import initial_model, transformed
from lpkit.training.loop import fit
from lpkit.training.runs import Run, RunFailedError
from lpkit.training.training import Training
from tests.training.resuming import in_parts


@pytest.fixture
def tiny(corpus, tmp_path, monkeypatch):
    """A Config that trains in a blink, and never touches the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return Config().replace({
        "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32,
        "data.source": str(corpus / "*.py"), "steps": 12, "global_batch": 4, "eval_every": 5,
        "eval_batches": 2, "checkpoint_every": 4, "schedule.warmup_steps": 2,
        "precision.recipe": "fp32", "system.device": "cpu"})


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.metrics]


def test_a_run_leaves_everything_that_it_promises(tiny, tmp_path):
    run = train(tiny, out=tmp_path / "run")
    summary = run.summary
    assert {"final_loss", "val_loss", "tokens_per_second", "step_seconds", "peak_bytes", "mfu",
            "run_dir"} <= summary.keys()
    assert summary["status"] == "complete"
    assert (summary["steps"], summary["tokens"]) == (12, 12 * 4 * 32)
    assert all({"loss", "grad_norm", "lr", "tokens", "step_seconds", "peak_bytes"} <= line.keys()
               for line in run.metrics)
    assert [line["step"] for line in run.metrics] == list(range(1, 13))
    assert [line["step"] for line in run.metrics if "val_loss" in line] == [5, 10, 12]
    assert run.config == tiny and run.environment["torch"] == torch.__version__
    assert {"asked", "used", "why"} == summary["chosen"]["precision"].keys()
    assert [p.name for p in checkpoint.folders(run.checkpoints)] == [
        "step-00000012", "step-00000008"]


def test_the_loop_is_the_plain_loop(tiny, tmp_path):
    """Against the same updates written out with PyTorch alone."""
    training = Training.build(tiny)
    model, data = training.model, training.data
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([dict(params=decay, weight_decay=0.1),
                                   dict(params=rest, weight_decay=0.0)],
                                  betas=(0.9, 0.95), eps=1e-8)
    want = []
    for step in range(12):
        x, y = data.batch(step).tensors
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        progress = (step - 2) / 9
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * ((step + 1) / 2 if step < 2
                                  else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    # The fused optimizer multiplies in another order: float32 rounding, amplified by 12 steps of
    # training. A fresh model guesses: its logits have a standard deviation of 0.02 * sqrt(32).
    assert losses(train(tiny, out=tmp_path / "run")) == pytest.approx(want, rel=1e-5)
    assert want[0] == pytest.approx(math.log(256), abs=0.1)


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tiny, tmp_path):
    tiny = tiny.replace({"precision.recipe": "bf16"})
    runs = train(tiny, out=tmp_path / "whole"), in_parts(tiny, tmp_path / "parts", 7)
    a, b = ([(line["loss"], line.get("val_loss")) for line in run.metrics] for run in runs)
    assert a == b
    a, b = (checkpoint.load_latest(run.checkpoints)[0].tensors for run in runs)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_keeps_the_precision_that_it_began_with(tiny, tmp_path, monkeypatch):
    """The choice is a race, and a busy machine may end it otherwise."""
    tiny = tiny.replace({"precision.recipe": "auto"})
    races = iter(["bf16", "fp32"])
    monkeypatch.setattr("lpkit.hardware.bf16_choice",
                        lambda device: Choice(asked="auto", used=next(races), why="a race"))
    handle = start(tiny, out=tmp_path / "run")
    handle.subscribe(lambda record: handle.stop() if record.step >= 4 else None)
    assert handle.result().summary["chosen"]["precision"]["used"] == "bf16"
    chosen = train(tiny, out=tmp_path / "run", resume=True).summary["chosen"]["precision"]
    assert chosen == {"asked": "auto", "used": "bf16", "why": "as when this run began"}


def test_a_nan_loss_stops_the_run_and_keeps_the_last_checkpoint(tiny, tmp_path):
    training = Training.build(tiny)

    def poison(record):
        if record.step == 6:
            with torch.no_grad():
                training.model.embed.weight.fill_(math.nan)

    with pytest.raises(RunFailedError, match=r"step 7: loss=nan.*kept: step-00000004"):
        fit(training, tmp_path / "run", observers=[poison])
    run = Run.open(tmp_path / "run")
    assert run.summary["status"] == "failed" and run.summary["steps"] == 6
    lines = (run.path / runs.METRICS).read_text().splitlines()
    assert json.loads(lines[-1])["loss"] is None
    assert [p.name for p in checkpoint.folders(run.checkpoints)] == ["step-00000004"]


def test_a_folder_with_another_run_is_left_alone(tiny, tmp_path):
    train(tiny.replace({"steps": 2}), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        train(tiny, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"steps was 2 and is 1;"):
        train(tiny.replace({"steps": 1}), out=tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"other settings: global_batch was 4 and is 8;"):
        train(tiny.replace({"global_batch": 8}), out=tmp_path / "run", resume=True)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and holds no run"):
        train(tiny, out=tmp_path / "papers")
    assert (tmp_path / "papers" / "thesis.txt").read_text() == "mine"


def test_no_gpu_when_one_was_demanded(tiny, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"system.device=cuda: .* but PyTorch sees 0 GPUs"):
        train(tiny.replace({"system.device": "cuda"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_cannot_fit_is_refused_before_it_is_built(tiny, tmp_path):
    # which need no race at these sizes
    tiny = tiny.replace({"system.attention": "sdpa", "system.kernels": "reference"})
    huge = lpkit.preset("llama-405b").replace({
        "system": tiny.to_dict()["system"], "data.source": tiny.data.source})
    with pytest.raises(ConfigError, match=r"takes \d\.\d\d TB at its peak .* and cpu has .*; "):
        train(huge, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"model.context=1000000 needs 1000001 tokens"):
        train(tiny.replace({"model.context": 1_000_000, "model.width": 8, "model.layers": 1,
                            "global_batch": 1}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_transforms_run_in_stage_order_whatever_the_order_given():
    seen = []

    def spy(at: Stage) -> Transform:
        class Spy(Transform):
            stage = at

            def __call__(self, model):
                seen.append(at)
                return model

        return Spy()

    config = Config().replace({"model.layers": 1, "model.width": 8, "model.heads": 1})
    model = initial_model(config, "sdpa")
    transformed(model, (spy(Stage.DATA), spy(Stage.PRECISION), spy(Stage.COMPILE)))
    assert seen == [Stage.PRECISION, Stage.COMPILE, Stage.DATA]


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items()
                                  if hasattr(row.settings, "warmup_steps")])
def test_schedules_begin_with_a_warmup_and_end_where_they_say(name):
    ratio = schedule(replace(SCHEDULES[name].settings, name=name, warmup_steps=10), 100)
    assert [ratio(step) for step in range(10)] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert ratio(10) == pytest.approx(1.0)
    assert ratio(99) == pytest.approx(1.0 if name == "constant" else 0.1)
    if name == "wsd":     # flat until the last fifth of what follows the warm-up
        assert ratio(10 + int(89 * 0.79)) == 1.0


def test_cosine_is_pytorchs_cosine():
    ours = schedule(replace(SCHEDULES["cosine"].settings, name="cosine", warmup_steps=0), 51)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.1)
    for step in range(51):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_sampling_uses_the_run_and_the_cache_changes_nothing(tiny, tmp_path):
    run = train(tiny, out=tmp_path / "run")
    text = lpkit.sample(run, prompt="def ", tokens=60, temperature=0)
    assert text.startswith("def ") and len(text) == 64
    loaded, _ = checkpoint.load_latest(run.checkpoints, only="model/")
    model = initial_model(run.config, "sdpa")
    model.load_state_dict({name.removeprefix("model/"): t for name, t in loaded.tensors.items()},
                          strict=False)
    ids = list(b"def ")
    with torch.no_grad():
        for _ in range(28):     # as many as fit the context of 32, one whole forward pass each
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert text[:32] == bytes(ids).decode()
    with pytest.raises(ConfigError, match="holds no run"):
        lpkit.sample(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="the prompt is empty"):
        lpkit.sample(run, prompt="")
