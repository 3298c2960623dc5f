"""Families of transformers with different values in their configs: a folder becomes a run, and
the run has the logits of the transformers class."""

import pytest
import torch

from lpkit import cli
from lpkit.training.runs import Run
from lpkit.training.training import RandomTokens, Training

transformers = pytest.importorskip("transformers")
V, T = 300, 24
GPT2 = {"vocab_size": V, "n_positions": T, "n_embd": 48, "n_layer": 2, "n_head": 6}
LLAMA = {"vocab_size": V, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 2,
         "max_position_embeddings": T}
BASE = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA | {"sliding_window": None}, "qwen2": LLAMA,
        "qwen3": LLAMA | {"head_dim": 10}}
# for each family, the settings that its own tests vary: sizes, groups, ties, eps, rotary bases,
# biases
VARIANTS = {
    "gpt2": [{"n_layer": 3, "n_head": 1}, {"n_inner": 100, "layer_norm_epsilon": 1e-3},
             {"n_embd": 30, "n_head": 5, "vocab_size": 411}],
    "llama": [{"num_key_value_heads": 6, "tie_word_embeddings": True},
              {"num_key_value_heads": 1, "rms_norm_eps": 1e-3, "num_hidden_layers": 1},
              {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
              {"intermediate_size": 31, "head_dim": 16}],
    "mistral": [{"head_dim": 4, "rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}],
    "qwen2": [{"num_key_value_heads": 6, "rms_norm_eps": 1e-3}],
    "qwen3": [{"num_key_value_heads": 3, "intermediate_size": 31}, {"tie_word_embeddings": True}],
}


@pytest.mark.parametrize("family, changes",
                         [pytest.param(family, changes, id=f"{family} {changes}"[:80])
                          for family, each in VARIANTS.items()
                                             for changes in each])
def test_logits_are_those_of_the_class(family, changes, tmp_path, capsys):
    """In float32, logits of order 1 agree to 1e-5: in each of ten matmuls, sums of up to 100
    terms run in another order."""
    config = transformers.AutoConfig.for_model(family,
        **{**BASE[family], "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0,
           **changes})
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in theirs.parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1 if p.mean() > 0.5 else 0, 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    assert cli.main(["import", str(tmp_path / "theirs"), "--tokenizer", "bytes", "--out",
                     str(tmp_path / "run")]) == 0, capsys.readouterr().err
    run = Run.open(tmp_path / "run")
    ours = run.config.replace({"start.run": str(run.path), "precision.recipe": "fp32",
                               "system.device": "cpu", "system.attention": "sdpa",
                               "system.kernels": "pytorch", "system.compile": False})
    tokens = torch.randint(config.vocab_size, (2, T), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        due, logits = theirs(tokens).logits, Training.build(ours,
            data=RandomTokens(ours, "cpu")).logits(tokens)
    assert due.std() > 0.3
    torch.testing.assert_close(logits, due, rtol=0, atol=1e-5 * max(1, due.std().item()))
