"""The files of notebooks/experiments, each by the command that its first lines print; a module is
imported as `experiments.NAME`, since other tests have imported it so.

Only these tests catch: an experiment that needs more than its command, and wrong teachers, masks
and shares that begin a run or end in a traceback.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import distil, length_ramp, prune, qat, weighted  # noqa: F401
from lpkit import cli, predict
from lpkit.errors import ConfigError
from lpkit.techniques import outside
from lpkit.training.runs import Run
from lpkit.training.training import Training
from tests import NOTEBOOKS
from tests.precision import qat_rows

EXPERIMENTS = Path(NOTEBOOKS) / "experiments"
COMMANDS = {name: ["train", *re.sub(
    r"\\\n\s+", "", (EXPERIMENTS / f"{name}.py").read_text()).partition(
    "lpkit train ")[2].splitlines()[0].replace(f"--import {name} ",
                                               f"--import experiments.{name} ").split()]
    for name in ("distil", "length_ramp", "prune", "qat", "weighted")}
SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32", "steps=3",
         "eval_batches=1", "schedule.warmup_steps=0", "system.device=cpu"]


@pytest.fixture
def door(corpus, tmp_path, monkeypatch, capsys):
    """Runs an experiment's own command, small, in a folder of its own; returns the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    monkeypatch.chdir(tmp_path)
    qat_rows.add(monkeypatch)
    before = {field: dict(table) for field, table in outside.TABLES.items()}

    def run(name: str, *changes: str, out: str = "run") -> Run:
        given = {word.partition("=")[0] for word in changes}
        words = [word for word in [*COMMANDS[name], *SMALL] if word.partition("=")[0] not in given]
        status = cli.main([*words, f"data.source={corpus}/*.py", *changes, "--out", out])
        if status:
            raise ConfigError(capsys.readouterr().err)
        return Run(tmp_path / out)

    yield run
    for field, rows in before.items():
        outside.TABLES[field].clear()
        outside.TABLES[field].update(rows)


def test_each_experiment_runs_by_its_own_command(door, corpus, tmp_path):
    door("prune", "governors=prune:share=0.25", out="teacher")
    pruned = [t for name, t in _weights("teacher").items() if t.ndim == 2 and "blocks." in name]
    assert pruned and all((t == 0).float().mean() == pytest.approx(0.25, abs=0.01) for t in pruned)
    rounded = door("qat", "global_batch=4", out="qat").summary["chosen"]
    assert rounded["backend"]["used"] == "emulated"
    ramped = door("length_ramp", "sizes.until=2", out="ramp")
    tokens = [line["tokens"] for line in ramped.metrics]
    assert [b - a for a, b in zip([0, *tokens], tokens)] == [256, 256, 512]
    taught = door("distil", "objective.teacher=teacher", "global_batch=4", out="student")
    assert taught.metrics[-1]["loss"] > 0
    config = weighted.scores_of_rare_tokens(taught.config.replace({"objective": "next-token"}),
                                            tmp_path / "scores.npy")
    assert door("weighted", f"data.scores={config.data.scores}", "global_batch=4",
                out="weighted").metrics[-1]["loss"] > 0
    assert np.load(config.data.scores).mean() == pytest.approx(1, abs=1e-3)


def _weights(folder: str) -> dict[str, torch.Tensor]:
    from lpkit.training.sampling import trained

    return trained(Run(Path(folder))).model.state_dict()


def test_a_wrong_teacher_is_one_sentence_and_no_run(door, tmp_path):
    with pytest.raises(ConfigError, match=r"objective=distil needs objective\.teacher"):
        distil.operations_of(None, distil.Distil(name="distil"))
    door("prune", "data.tokenizer=bpe", "model.vocab=300", out="other")
    with pytest.raises(ConfigError, match="has another tokenizer, so its probabilities"):
        door("distil", "objective.teacher=other", "model.vocab=300", out="none")
    assert not (tmp_path / "none").exists()
    student = door("qat", out="qat").config.replace({
        "precision.recipe": "fp32", "objective": {"name": "distil", "teacher": "other"}})
    with pytest.raises(ConfigError, match="has a vocabulary of 300 tokens and the student has 256"):
        predict(student, "h200")


def test_masks_and_shares_that_do_not_fit_are_refused(door):
    config = door("prune", out="run").config
    training = Training.build(config)
    governor = training.governors["prune"]
    name = "blocks.0.mlp.up.weight"
    governor.load_state_dict({name: torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(ConfigError, match=rf"the saved mask of {name} has shape \(2, 2\) and its"):
        governor.end(training, 5)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        config.replace({"governors": [{"name": "prune", "share": 1.5}]})
    assert prune.Prune(prune.Share(name="prune", share=0.0)).share == 0
