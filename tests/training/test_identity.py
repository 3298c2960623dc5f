"""Only these tests catch a file of a run that was changed, lost or taken from another run, and is
then read as if it were right; and a run whose status is wrong."""

import json
import math
import shutil
import warnings

import pytest
import torch

import lpkit
from lessons.rows.blocks import BLOCKS
from lpkit import cli, nn, records
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, DamagedError
from lpkit.exchange.export import export
from lpkit.files import locked
from lpkit.measure import telemetry
from lpkit.nn.transformer import Transformer
from lpkit.techniques import blocks, operation
from lpkit.training import checkpoint, runs
from lpkit.training.background import train
from lpkit.training.runs import Run, RunFailedError
from lpkit.training.training import RandomTokens, Training


@pytest.fixture(scope="module")
def tiny(corpus):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
        yield Config().replace({
            "model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 16,
            "data.source": str(corpus / "*.py"), "steps": 4, "global_batch": 2, "eval_every": 0,
            "eval_batches": 1, "checkpoint_every": 2, "schedule.warmup_steps": 2,
            "precision.recipe": "fp32", "system.device": "cpu"})


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A finished run, and the folder of another run."""
    folder = tmp_path_factory.mktemp("trained")
    other = {"data.tokenizer": "bpe", "model.vocab": 300, "optimizer.lr": 1e-4, "seed": 1}
    return train(tiny, out=folder / "run"), train(tiny.replace(other), out=folder / "other").path


@pytest.fixture
def run(trained, tmp_path):
    """A copy, which is as whole as the run that was trained."""
    copy = Run.open(shutil.copytree(trained[0].path, tmp_path / "run"))
    assert copy.problems == []
    return copy


# ---- records

RECORD = {"step": 7, "of": [2.5e-9, None], "text": "é\n", "nested": {"b": True, "a": -0.0}}


def flips(data: bytes):
    """Two flipped bits of each byte, one at a time; all bits have their turn."""
    for at in range(len(data)):
        for bit in (at % 8, (at + 3) % 8):
            yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:]


def same(first, second) -> bool:
    # 0.0 and -0.0 differ there
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def test_no_flipped_bit_changes_a_record(tmp_path):
    path, caught = tmp_path / "record.json", 0
    records.write(path, RECORD)
    assert same(records.read(path), RECORD)
    whole = path.read_bytes()
    for data in flips(whole):
        path.write_bytes(data)
        try:
            assert same(records.read(path), RECORD)        # of a space, say
        except DamagedError as error:
            assert str(path) in str(error)
            caught += 1
    assert caught > 1.8 * len(whole)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(DamagedError):
            records.read(path)


def test_no_flipped_bit_changes_a_line_or_hides_the_others(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = [RECORD | {"step": step} for step in range(3)]
    chain = records.Chain(path, "me")
    whole = "".join(map(chain.line, lines)).encode()
    for data in flips(whole):
        path.write_bytes(data)
        good, problems = records.read_lines(path)
        assert all(any(same(kept, line) for line in lines) for kept in good)
        assert len(good) == 3 or problems
        assert len(good) >= 1       # of two, when it was the end of a line
    path.write_bytes(whole[:-5])
    good, [problem] = records.read_lines(path)
    assert good[-1]["step"] == 1 and problem.startswith(f"{path}, line 3, is cut off")
    assert records.read_lines(tmp_path / "none") == ([], [])


def test_what_json_does_not_have_is_written_as_it_comes_back(tmp_path):
    value = {"keys": {1: (2, math.nan)}, "inf": -math.inf}
    more = {records.RUN: None, records.NUMBER: 1, records.BEFORE: "", records.LINE_SUM: ""}
    due, line = {"keys": {"1": [2, None]}, "inf": None}, records.Chain(tmp_path / "none", None)
    assert json.loads(line.line(value)) | {records.LINE_SUM: ""} == due | more
    assert records.unsealed(records.sealed(value), "x") == due


# ---- whose it is

def change(path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def first_lines(run, other):
    path = run.path / runs.CONFIG
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))


@pytest.mark.parametrize("spoil, match", [
    (lambda run, _: change(run.path / runs.CONFIG, "steps: 4", "steps: 6"),
     "config.yaml is not what the run wrote"),
    (first_lines, "config.yaml is not what the run wrote"),
    (lambda run, other: shutil.copy(other / runs.TOKENIZER, run.path), "belongs to another run"),
    (lambda run, other: shutil.copy(other / runs.IDENTITY, run.path), "belongs to another run"),
    (lambda run, _: (run.path / runs.IDENTITY).unlink(), r"cannot read .*run\.json"),
], ids=["a digit", "half a config", "tokenizer", "identity", "no identity"])
def test_a_changed_or_foreign_file_is_refused_and_nothing_is_written(run, tiny, trained, spoil,
                                                                      match):
    """By resume and by sample alike."""
    spoil(run, trained[1])
    refused(run, match, tiny)


def test_the_config_of_another_run_is_refused(run, trained):
    shutil.copy(trained[1] / runs.CONFIG, run.path)
    refused(run, "config.yaml belongs to another run", Run(trained[1]).config)


def refused(run, match, config):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=match):
        lpkit.sample(run.path, tokens=2)
    with pytest.raises(ConfigError, match=match):
        train(config, out=run.path, resume=True)
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_another_version_of_the_model_is_refused(run, tiny, monkeypatch):
    monkeypatch.setattr(nn, "VERSION", nn.VERSION + 1)
    refused(run, f"trained with version {nn.VERSION - 1} of the model, and this lpkit has", tiny)


def test_another_corpus_under_the_same_name_is_refused(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} bottles\n" for i in range(20_000)))
    tiny = tiny.replace({"data.source": str(text), "data.val_fraction": 0.3})
    train(tiny, out=tmp_path / "run")
    text.write_text("".join(f"{i} glasses\n" for i in range(20_000)))
    with pytest.raises(ConfigError, match=r"tokens have the SHA-256 .*=.*text.txt now gives"):
        train(tiny.replace({"steps": 6}), out=tmp_path / "run", resume=True)
    assert lpkit.sample(tmp_path / "run", tokens=2)         # which needs no corpus


def test_a_checkpoint_of_another_run_is_passed_over(run, tiny, trained, capsys):
    for folder in checkpoint.folders(run.checkpoints):
        shutil.rmtree(folder)
    shutil.copytree(Run(trained[1]).checkpoints / "step-00000002",
                    run.checkpoints / "step-00000002")
    with pytest.raises(ConfigError, match="step-00000002 is a checkpoint of another run"):
        lpkit.sample(run.path)
    losses = [line["loss"] for line in run.metrics]
    again = train(tiny, out=run.path, resume=True)
    errors = capsys.readouterr().err
    assert "has no whole checkpoint, so it starts again from step 0" in errors
    assert "of another run; moved to quarantine" in errors
    assert [line["loss"] for line in again.metrics] == losses
    assert again.environment["from_step"] == 0 and "another run" in again.summary["damaged"][0]
    assert (run.checkpoints / "quarantine" / "step-00000002").is_dir()


FUNCTIONS = {1: [       # what these models of nn.VERSION say, as one number
    ({"norm": "layernorm", "position": "learned", "mlp": "gelu"}, -2.635250301968),
    ({"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "kv_heads": 2,
      "tied": False}, -5.741868935539),
    ({"qk_norm": True, "qkv_bias": True, "head_dim": 6, "mlp_width": 20}, 1.341421859866),
    ({"norm": "none"}, -13373.654649225529),
    ({"block": "parallel"}, 15.061403346481),
    ({"block": "sandwich"}, -0.340047109129),
    ({"block": "rezero"}, -6.882014603262),
    ({"block": "skipinit"}, 0.433203292626),
    ({"block": "layerscale"}, 0.712041998825),
    ({"block": "skipless"}, 0.750530161941),
    ({"block": "sas"}, 0.226589108470),
    ({"block": "sas-p"}, 0.189260214434)]}


@pytest.mark.parametrize("settings, number", FUNCTIONS[nn.VERSION])
def test_one_version_of_the_model_is_one_function(settings, number):
    """Where this fails, runs that exist would be another function: raise nn.VERSION and add a line
    to FUNCTIONS."""
    model = Transformer(ModelConfig(layers=2, width=16, heads=4, vocab=11, context=8,
                                    **settings)).double()
    with torch.no_grad():
        for i, (_, weight) in enumerate(sorted(model.named_parameters())):
            weight.copy_(torch.sin(0.7 * torch.arange(weight.numel(), dtype=torch.float64)
                                   + i).view_as(weight))
        logits = model(torch.arange(16).view(2, 8) % 11)
    assert ((logits.flatten() @ torch.cos(torch.arange(logits.numel(), dtype=torch.float64))).item()
            == pytest.approx(number, rel=1e-9))


def test_every_kind_of_block_is_among_the_functions():
    for field, table in {"block": BLOCKS, "norm": blocks.NORMS, "position": operation.POSITIONS,
                         "mlp": blocks.MLPS}.items():
        assert {settings.get(field, getattr(ModelConfig(), field))
                for settings, _ in FUNCTIONS[nn.VERSION]} >= {
            # a lesson adds its own
            name for name, row in table.items()
            if row.implementation.startswith(("lpkit.", "lessons.rows."))}


def test_sampling_from_an_older_checkpoint_says_so(run, capsys):
    want = lpkit.sample(run.path, tokens=2)
    assert capsys.readouterr().err == ""
    (run.checkpoints / "step-00000004" / "state.json").write_text("{}")
    assert isinstance(lpkit.sample(run.path, tokens=2), str) and isinstance(want, str)
    errors = capsys.readouterr().err
    assert "the weights are those of step 2" in errors and "step-00000004" in errors


def flip_a_weight(folder):
    [path] = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


DAMAGE = {"a weight": flip_a_weight, "folder": shutil.rmtree}


def test_a_start_is_refused_where_the_summary_vouches_for_a_newer_checkpoint(
        run, tiny, tmp_path, capsys):
    """The way out that the sentence names makes the same weights again."""
    config = tiny.replace({"start.run": str(run.path), "steps": 2})
    whole = train(config, out=tmp_path / "whole")
    base = str(run.checkpoints / "step-00000004")
    assert whole.summary["start"] == whole.environment["start"] == base
    assert run.summary["start"] is None
    shutil.rmtree(base)
    command = f"lpkit train {run.path}/config.yaml --out {run.path} --resume"
    for go_on in (False, True):     # so is a run that had begun from the newer one
        with pytest.raises(ConfigError, match=r"for step-00000004, .* of step 2; ") as error:
            train(config.replace({"steps": 4}), out=tmp_path / ("whole" if go_on else "new"),
                  resume=go_on)
    assert str(error.value).endswith(command)
    assert cli.main(command.split()[1:]) == 0
    capsys.readouterr()
    again = train(config, out=tmp_path / "again")
    assert again.identity["start"] == whole.identity["start"] and capsys.readouterr().err == ""


@pytest.mark.parametrize("how", DAMAGE)
def test_a_start_from_an_older_checkpoint_of_a_killed_run_says_so(how, run, tiny, tmp_path, capsys):
    records.write(run.path / runs.SUMMARY, {"status": "running", records.RUN: run.mark})
    DAMAGE[how](run.checkpoints / "step-00000004")
    new = train(tiny.replace({"start.run": str(run.path), "steps": 2}), out=tmp_path / "new")
    errors = capsys.readouterr().err
    assert "step-00000004" in errors
    assert ("the weights are those of step 2: " in errors) == (how != "folder")
    older, _ = checkpoint.load_latest(run.checkpoints, quarantine=False)
    assert older.step == 2 and new.summary["start"] == str(older.path)
    begun = dict(Training.build(
        tiny.replace({"start.run": str(run.path)})).model.named_parameters())
    assert all(torch.equal(t, older.tensors[f"model/{name}"]) for name, t in begun.items())
    capsys.readouterr()
    export(run.path, tmp_path / "export")
    assert "step-00000004" in capsys.readouterr().err, "and an export"


def test_settings_that_change_no_number_keep_the_identity(run, tiny):
    who = run.identity
    again = train(tiny.replace({"steps": 6, "eval_every": 3, "keep_checkpoints": 5}), out=run.path,
                  resume=True)
    assert Run(again.path).identity == who and again.summary["steps"] == 6
    for folder in checkpoint.folders(run.checkpoints):
        assert checkpoint.verify(folder, who["run"])["run"] == who["run"]


def test_what_does_not_fit_the_model_is_not_loaded(tiny):
    """By one function, for resume and sample alike."""
    training = Training.build(tiny, data=RandomTokens(tiny))
    state, name = training.state_dict(), "model/embed.weight"
    for wrong, why in (({"model/more": torch.ones(1)}, "does not have, model/more first"),
                       ({"optimizer/more/exp_avg": torch.ones(1)}, "optimizer/more/exp_avg first"),
                       ({name: state[name].bfloat16()}, r"as torch\.bfloat16"),
                       ({name: state[name][:1]}, r"\(1, 16\), and this run")):
        with pytest.raises(RunFailedError, match=why):
            training.load_state_dict(state | wrong)
        if "optimizer" not in why:
            with pytest.raises(RunFailedError, match=why):
                training.load_model({name: t for name, t in (state | wrong).items()
                                     if name.startswith("model/")})


# ---- what a run says became of it

def test_a_run_that_goes_on_is_told_from_one_that_was_killed(run):
    records.write(run.path / runs.SUMMARY, {"status": "running", records.RUN: run.mark})
    with locked(run.path / runs.LOCK):
        assert run.summary["status"] == "running"
    assert (run.summary["status"], run.summary["steps"]) == ("killed", 4)
    assert run.summary["final_loss"] == run.metrics[-1]["loss"]
    assert "killed after 4 steps" in run._repr_html_()


@pytest.mark.parametrize("raised, status",
                         [(SystemExit(0), "failed"), (KeyboardInterrupt(), "killed")])
def test_what_ended_a_run_is_its_status(tiny, tmp_path, monkeypatch, raised, status):
    """While it trains, that is "running"."""
    fine, running = Training.update, []

    def update(self, step, **settings):
        running.append(Run(tmp_path / "run").summary["status"])
        if step == 3:
            raise raised
        return fine(self, step, **settings)

    monkeypatch.setattr(Training, "update", update)
    with pytest.raises(type(raised)):
        train(tiny, out=tmp_path / "run")
    summary = Run(tmp_path / "run").summary
    assert running == ["running"] * 4
    assert (summary["status"], summary["steps"]) == (status, 3)
    assert summary["last_checkpoint"] == "step-00000002"
    assert summary["error"].startswith(type(raised).__name__)


def test_a_finished_run_that_lost_its_metrics_is_complete_after_its_steps(run, tiny):
    (run.path / runs.METRICS).unlink()
    summary = train(tiny, out=run.path, resume=True).summary
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("complete", 4, 4 * 2 * 16)


def test_one_bad_line_does_not_hide_a_run(run, tiny):
    change(run.path / runs.METRICS, '"step": 2,', '"step": 5,')
    assert [line["step"] for line in run.metrics] == [1, 3, 4]
    [problem] = run.problems
    assert "metrics.jsonl, line 2, is damaged" in problem
    assert "line 2, is damaged" in run._repr_html_()
    summary = train(tiny.replace({"steps": 6}), out=run.path, resume=True).summary
    assert summary["damaged"] == [problem]
    assert [line["step"] for line in run.metrics] == [1, 3, 4, 5, 6]


def test_a_damaged_summary_does_not_hide_a_run(run):
    change(run.path / runs.SUMMARY, '"status": "complete"', '"status": "completE"')
    with pytest.raises(DamagedError, match=r"summary\.json does not match its checksum"):
        print(run.summary)
    assert ("not known after 4 steps" in run._repr_html_()
            and "summary.json does not match" in run._repr_html_())


def test_a_damaged_sample_is_named(tiny, tmp_path):
    run = train(tiny.replace({"precision.telemetry_every": 2}), out=tmp_path / "run")
    path, samples = run.path / telemetry.FILE, telemetry.read(run.path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0].replace('"step"', '"stop"'), *lines[1:]]))
    with pytest.warns(UserWarning, match="telemetry.jsonl, line 1, is damaged"):
        assert telemetry.read(path) == samples[1:]
    path.write_text("".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert telemetry.read(path) == samples


def test_energy_and_tokens_are_of_the_same_steps(tiny, tmp_path, monkeypatch):
    joules = iter([(0.0, "a counter"), (7200.0, "a counter")] * 2)
    monkeypatch.setattr("lpkit.hardware.energy_joules", lambda device: next(joules))
    assert train(tiny, out=tmp_path / "run").summary["energy_tokens"] == 4 * 2 * 16
    summary = train(tiny.replace({"steps": 6}), out=tmp_path / "run", resume=True).summary
    assert summary["energy_wh"] == 2.0
    assert (summary["energy_tokens"], summary["tokens"]) == (2 * 2 * 16, 6 * 2 * 16)


def test_metrics_are_on_the_disk_before_the_checkpoint_that_vouches_for_them(
        tiny, tmp_path, monkeypatch):
    done, real_sync, real_save = [], runs.files.sync, checkpoint.save

    def sync(path):
        done.append((path.name, len(Run(tmp_path / "run").metrics)))
        real_sync(path)

    def save(root, step, *args, **more):
        done.append(("save", step))
        return real_save(root, step, *args, **more)

    monkeypatch.setattr("lpkit.training.loop.sync", sync)
    monkeypatch.setattr(checkpoint, "save", save)
    train(tiny, out=tmp_path / "run")
    assert done == [("metrics.jsonl", 2), ("save", 2), ("metrics.jsonl", 4), ("save", 4)]


def test_what_a_killed_writer_left_goes_with_the_next_start(run, tiny):
    for name in (".summary.json.ab12cd34.tmp", ".metrics.jsonl.x_12cd34.tmp"):
        (run.path / name).write_text("half")
    (run.path / ".kept").write_text("of somebody")
    train(tiny.replace({"steps": 6}), out=run.path, resume=True)
    assert (not list(run.path.glob("*.tmp")) and not list(run.path.glob(".*.tmp"))
            and (run.path / ".kept").exists())


# ---- lines and files are held together

def chained(path, run="me", of=6) -> list[bytes]:
    chain = records.Chain(path, run)
    return [chain.line({"step": step}).encode() for step in range(1, of + 1)]


@pytest.mark.parametrize("order, steps, expected", [
    ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], []),
    ([2, 3, 4, 5, 6], [2, 3, 4, 5, 6], ["line 1, is not the one that followed"]),
    ([1, 2, 3, 4, 5, 6, 2], [1, 2, 3, 4, 5, 6], ["line 7, is there twice"]),
    ([1, 3, 2, 4, 5, 6], [1, 3, 2, 4, 5, 6], ["lines 2 to 4, are not the one that followed"]),
    ([1, 2, 3, 4], [1, 2, 3, 4], ["lacks lines that the summary vouches for"]),
    ([], [], ["lacks lines that the summary vouches for"]),
    ([1, -2, -3, -4, 5, 6], [1, 5, 6], ["lines 2 to 4, are of another run"]),
])
def test_lines_hold_together(tmp_path, order, steps, expected):
    """Whole lines that are lost, doubled, moved or of another run (the negative ones) are named;
    the others are read."""
    path = tmp_path / "lines.jsonl"
    ours, theirs = chained(path), chained(path, "you")
    path.write_bytes(b"".join(ours))
    vouched = [("the summary", *records.head(path))]
    path.write_bytes(b"".join(ours[number - 1] if number > 0 else theirs[-number - 1]
                              for number in order))
    good, problems = records.read_lines(path, "me", vouched)
    assert [line["step"] for line in good] == steps and len(problems) == len(expected)
    assert all(part in problem for part, problem in zip(expected, problems)), problems


def test_an_altered_line_with_a_right_checksum_breaks_the_chain(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = chained(path)
    value = json.loads(lines[3]) | {"step": 40}
    value.pop(records.LINE_SUM)
    lines[3] = json.dumps(value | {records.LINE_SUM:
                                   records.digest(value)[:records.MARK_DIGITS]}).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    assert "line 5, is not the one that followed" in records.read_lines(path, "me")[1][0]


def test_a_line_that_was_lost_is_named_also_after_the_run_went_on(run, tiny):
    """In the summary of the run that went on, and whenever the run is opened later."""
    path = run.path / runs.METRICS
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    again = train(tiny.replace({"steps": 9, "keep_checkpoints": 1}), out=run.path, resume=True)
    assert "metrics.jsonl lacks lines that" in again.summary["damaged"][0]
    assert "metrics.jsonl lacks lines that environment.json vouches for" in again.problems[0]
