"""`lpkit predict` of a `config.json`: the numbers of the imported run, without its weights; nothing
that the folder names is executed.

Only these tests catch: a number of a config's prediction that differs from the imported run,
code in a folder that is executed, and a config of strangers that ends in a traceback or prints
control characters.
"""

import json
import subprocess
import sys

import pytest
import torch

from lpkit import cli
from lpkit.commands import config_of
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.exchange.imported import planned
from lpkit.predict import parameter_count, predict
from tests.exchange.test_import import FOLDERS, saved, tokenizer  # noqa: F401

transformers = pytest.importorskip("transformers")
# the published config.json of Llama 3.2 1B: https://huggingface.co/meta-llama/Llama-3.2-1B
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 16,
    "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
    "max_position_embeddings": 131_072, "vocab_size": 128_256,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}}


@pytest.fixture
def file(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B | changes))
        return str(tmp_path / "config.json")

    return write


def asked(capsys, *words):
    code = cli.main([*words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if code == 0 else out, err


@pytest.mark.parametrize("kind, dtype", [*((kind, torch.bfloat16) for kind in FOLDERS),
                                         ("llama", torch.float32)])
def test_a_config_alone_has_the_numbers_of_the_imported_run(
        kind, dtype, tmp_path, tokenizer, capsys):  # noqa: F811
    saved(kind, tmp_path, tokenizer).to(dtype).save_pretrained(tmp_path)
    due = predict(planned(tmp_path).config, "h100").to_dict()
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    for target in (tmp_path, tmp_path / "config.json"):
        code, answer, _ = asked(capsys, "predict", str(target), "--machine", "h100")
        answer.pop("target"), answer.pop("measured"), answer.pop("card")
        assert code == 0 and answer == json.loads(json.dumps(due))


@pytest.mark.parametrize("kind, sizes",
                         [("llama", LLAMA_1B), ("gpt2", {"n_positions": 8192, "n_layer": 2}),
                          ("qwen3", {}), ("mistral", {"sliding_window": None})])
def test_parameters_are_those_of_transformers(kind, sizes, tmp_path):
    """With published and default sizes. Shorter sequences must not shorten a table of learned
    positions."""
    config = transformers.AutoConfig.for_model(kind,
        **{key: value for key, value in sizes.items() if key != "model_type"})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert (parameter_count(config_of(str(tmp_path), []).model)
            == sum(p.numel() for p in theirs.parameters()))


def test_sequences_are_short_by_default_and_the_choice_is_printed(file, capsys):
    path = file()
    code, answer, err = asked(capsys, "predict", path)
    assert (code == 0 and err == f"{path}: by default an update has 16 sequences of 4,096 tokens; "
                                 f"set global_batch, grad_accum_steps and model.context\n")
    assert (answer["parameters"] == 1_235_814_400 and answer["assumptions"]["sequences_per_device"]
            == 16)
    config = config_of(path, ["model.context=8192", "global_batch=2", "grad_accum_steps=2"])
    assert ((config.model.context, config.micro_batch, config.micro_batches) == (8192, 1, 2)
            and config.memory.param_dtype.name == "bf16")
    assert config_of(file(max_position_embeddings=2048), []).model.context == 2048
    assert config_of(file(torch_dtype="float16"), []).memory.param_dtype.name == "fp32"
    assert (config_of(file(dtype="float32"), []).memory.param_dtype.name
            == "fp32"), "the new name wins"


def test_plan_and_advise_take_it_and_a_run_wins(file, tmp_path, capsys):
    path = file()
    code, answer, _ = asked(capsys, "plan", "--model", path, "--tokens", "1e9", "--devices", "2")
    assert code == 0 and answer["parameters"] == 1_235_814_400
    code, answer, _ = asked(capsys, "advise", str(tmp_path), "--machine", "h200", "--recipe",
                           "fp8-rowwise")
    assert code == 0 and [row["recipe"] for row in answer["plans"]] == ["fp8-rowwise"]
    assert asked(capsys, "train", str(tmp_path))[2].endswith(
        f"import it first, by lpkit import {tmp_path} --out runs/{tmp_path.name}\n")
    (tmp_path / "config.yaml").write_text(Config().to_yaml())
    assert config_of(str(tmp_path), []) == Config()


SPY = "import pathlib, sys\npathlib.Path(r'{}').write_text('executed')\n"


@pytest.mark.parametrize("changes", [
    {}, {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    {"model_type": "../evil"}, {"architectures": ["evil"]}],
    ids=str)
def test_nothing_is_executed_or_imported(changes, file, tmp_path):
    path, marker = file(**changes), tmp_path / "marker"
    for name in ("evil.py", "configuration_evil.py", "modeling_evil.py", "sitecustomize.py",
                 "__init__.py"):
        (tmp_path / name).write_text(SPY.format(marker))
    code = (f"import socket, sys\nsocket.socket = None\nfrom lpkit import cli\ncode = "
            f"cli.main(['predict', {path!r}])\n"
            "print({'torch', 'transformers', 'safetensors'} & {*sys.modules}, code)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=tmp_path.parent)
    refused = bool(changes) and "architectures" not in changes
    assert done.stdout.endswith(f"set() {2 * refused}\n"), done.stderr
    assert not marker.exists() and len(done.stderr.splitlines()) == 1
    assert not refused or "lpkit.predict(model, batch) predicts any torch.nn.Module" in done.stderr


@pytest.mark.parametrize("changes, word", [
    ({"model_type": "bert"}, "model_type 'bert'"), ({"model_type": None}, "model_type"),
    ({"model_type": "\x1b]0;owned\x07\nlpkit: forged"}, "model_type"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"num_hidden_layers": 2_000_000_000}, "num_hidden_layers must be"),
    ({"num_hidden_layers": 1e999}, "num_hidden_layers"),
    ({"hidden_size": "1" * 5000}, "hidden_size"), ({"vocab_size": float("nan")}, "vocab_size"),
    ({"num_attention_heads": 33}, "num_attention_heads"), ({"rope_scaling": [1]}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type='yarn'"),
    ({"attention_bias": True}, "attention_bias")], ids=str)
def test_what_cannot_be_predicted_is_one_sentence(changes, word, file, capsys):
    code, _, err = asked(capsys, "predict", file(**changes))
    assert (code == 2 and err.startswith("lpkit: ") and err.count("\n") == 1
            and err[:-1].isprintable() and len(err) < 700)
    assert word in err and "torch.device('meta')" in err


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 100_000,
                                  '{"model_type": "llama", "hidden_size": 1' + "0" * 5000 + "}"],
    ids=lambda text: text[:9])
def test_so_is_a_file_that_is_no_config(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    code, _, err = asked(capsys, "predict", str(tmp_path))
    assert code == 2 and err.count("\n") == 1 and "is not the JSON object that it should be" in err
    (tmp_path / "config.json").unlink()
    assert asked(capsys, "predict", str(tmp_path / "config.json"))[2].endswith(
        "config.json: No such file or directory\n")
    with pytest.raises(ConfigError, match="there is no preset"):
        config_of(str(tmp_path), [])
