"""Export of a run for transformers: the same logits, and every tensor once.

Only these tests catch: other logits in transformers, a tensor that is written twice, and a run
that is exported although transformers has no model for it.
"""

import json

import pytest
import torch
from safetensors import safe_open

from lpkit import cli, train
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.exchange.export import export
from lpkit.training.runs import Run
from lpkit.training.sampling import trained

SMALL = Config().replace({"model.layers": 2, "model.width": 48, "model.heads": 6,
                          "model.context": 32, "global_batch": 2, "steps": 2,
                          "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1,
                          "eval_batches": 1})
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.kv_heads": 2,
         "model.mlp_width": 64}
MODELS = {
    "GPT2LMHeadModel": {}, "LlamaForCausalLM": LLAMA | {"model.tied": False},
    "Qwen2ForCausalLM": LLAMA | {"model.qkv_bias": True},
    "Qwen3ForCausalLM": LLAMA | {"model.qk_norm": True, "model.head_dim": 10}}


def logits_agree(run: Run, folder) -> None:
    """Logits of order 1 agree to the rounding of float32 sums of about 100 terms."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(256, (2, run.config.model.T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, trained(run).logits(tokens), rtol=0,
                                   atol=2e-5)
    assert type(theirs).__name__ == json.loads((folder / "config.json").read_text())[
        "architectures"][0]


@pytest.mark.parametrize("name", MODELS)
def test_transformers_has_the_same_logits(name, tmp_path):
    pytest.importorskip("transformers")
    config = SMALL.replace(MODELS[name])
    run = train(config, out=tmp_path / "run")
    assert cli.main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    logits_agree(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [name]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not config.model.tied)
        total = sum(file.get_tensor(key).numel() for key in file.keys())
    assert total == sum(p.numel() for p in trained(run).model.parameters())


@pytest.mark.parametrize("changes, sentence", [
    ({"model.attention": "window"}, r"transformers has no model with model.attention=window.*; the "
                                    r"nearest, GPT2LMHeadModel, has full attention"),
    (LLAMA | {"model.norm": "layernorm"}, r"no model with model.norm=layernorm; the nearest, "
                                          r"LlamaForCausalLM, has model.norm=rmsnorm"),
    ({"model.tied": False}, r"no model with model.tied=False; the nearest, GPT2LMHeadModel, has "
                            r"model.tied=True")])
def test_what_transformers_does_not_have(changes, sentence, tmp_path):
    run = train(SMALL.replace({"steps": 1, **changes}), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=sentence):
        export(run.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_run_no_checkpoint_and_a_folder_that_is_there(tmp_path):
    run = train(SMALL.replace({"steps": 1}), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already; choose another --out"):
        export(run.path, tmp_path / "out")
    for folder in run.checkpoints.glob("step-*"):
        (folder / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"has no checkpoint; cannot read .*manifest.json"):
        export(run.path, tmp_path / "other")
