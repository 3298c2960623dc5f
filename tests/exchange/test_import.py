"""A folder that transformers wrote becomes a run: with the same logits, with the same bytes after
an export, and with one message for a folder without a model.

Only these tests catch: a weight that is read into another place, a byte or a token that is lost
in an export and import, a folder that computes something else and is accepted, and an incomplete
run that is left.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lpkit import cli, hardware, train
from lpkit.datasets.tokenizers import tokenizer_from_dict
from lpkit.errors import ConfigError
from lpkit.exchange.export import export
from lpkit.exchange.imported import bring, planned
from lpkit.training.runs import Run
from lpkit.training.sampling import sample, trained
from lpkit.training.training import RandomTokens, Training
from tests.exchange.test_export import MODELS, SMALL, logits_agree

transformers = pytest.importorskip("transformers")
V = 300
LLAMA = {"vocab_size": V, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.2}
FOLDERS = {
    "gpt2": {"vocab_size": V, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 6,
             "initializer_range": 0.2},
    "llama": LLAMA, "qwen2": LLAMA | {"tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": LLAMA | {"head_dim": 10},
    "mistral": LLAMA | {"sliding_window": None}, "llama 3.1": LLAMA | {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}}}


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE of 300 entries, as the library writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(
        add_prefix_space=False), decoders.ByteLevel()
    text = ["def import(folder): return the run of the model in the folder\n" * 20]
    (library.train_from_iterator(text, trainers.BpeTrainer(vocab_size=V, special_tokens=["</s>"],
       show_progress=False,
                                             initial_alphabet=pre_tokenizers.ByteLevel.alphabet())))
    return library


def saved(kind, folder, tokenizer, **options):
    """A model of random weights, also biases and gains, as save_pretrained writes it."""
    config = transformers.AutoConfig.for_model(kind.partition(" ")[0],
        **FOLDERS[kind] | {"eos_token_id": 0, "bos_token_id": 0})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1 if p.mean() > 0.5 else 0, 0.2)
    model.save_pretrained(folder, **options)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("llama")
    saved("llama", folder, tokenizer)
    return folder


@pytest.fixture
def theirs(llama, tmp_path):
    """A copy of a Llama folder, which a test may damage."""
    return shutil.copytree(llama, tmp_path / "theirs")


@pytest.mark.parametrize("kind", FOLDERS)
def test_logits_of_the_run_are_those_of_transformers(kind, tmp_path, tokenizer):
    """Logits of a run that starts from the imported run, in float32: equal to 5e-6 for logits of
    order 1, because both sum about 100 terms in different orders."""
    theirs = saved(kind, tmp_path / "theirs", tokenizer, max_shard_size="40KB")
    assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 2
    assert cli.main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "run")]) == 0
    run = Run.open(tmp_path / "run")
    assert not run.problems and run.config.model.V == V and run.summary["status"] == "imported"
    tokens = torch.randint(V, (2, 32), generator=torch.Generator().manual_seed(2))
    config = run.config.replace({"start.run": str(run.path), "precision.recipe": "fp32",
                                 "system.device": "cpu"})
    with torch.no_grad():
        due, logits = theirs(tokens).logits, Training.build(config,
            data=RandomTokens(config, "cpu")).logits(tokens)
    assert due.std() > 0.3
    torch.testing.assert_close(logits, due, rtol=0, atol=5e-6 * max(1, due.std().item()))


@pytest.mark.parametrize("kind, dtype", [*((kind, torch.bfloat16) for kind in FOLDERS),
                                         ("llama", torch.float32)])
def test_what_is_exported_again_has_every_byte(kind, dtype, tmp_path, tokenizer):
    model = saved(kind, tmp_path / "theirs", tokenizer)
    model.to(dtype).save_pretrained(tmp_path / "theirs")
    run = bring(planned(tmp_path / "theirs"), tmp_path / "run")
    export(run, tmp_path / "out")
    due, exported = (load_file(tmp_path / folder / "model.safetensors")
                  for folder in ("theirs", "out"))
    assert exported.keys() == due.keys()
    for name, t in due.items():
        assert t.dtype == dtype and torch.equal(exported[name].view(torch.uint8),
            t.view(torch.uint8)), name
    assert (json.loads((tmp_path / "out" / "tokenizer.json").read_text())
            == json.loads((tmp_path / "theirs" / "tokenizer.json").read_text()))
    again = bring(planned(tmp_path / "out"), tmp_path / "again")
    assert (planned(tmp_path / "out").family.config(again.config.model)
            == planned(tmp_path / "out").family.config(run.config.model))
    assert all(again.tokenizer[key] == run.tokenizer[key] for key in ("name", "model"))
    assert tokenizer_from_dict(again.tokenizer).end == tokenizer_from_dict(run.tokenizer).end == 0


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Qwen3ForCausalLM"])
def test_a_run_of_ours_comes_back(name, tmp_path):
    run = train(SMALL.replace({**MODELS[name], "data.tokenizer": "bpe", "model.vocab": 257}),
                out=tmp_path / "run")
    back = bring(planned(export(run, tmp_path / "out")), tmp_path / "back")
    ours, theirs = trained(run).model.state_dict(), trained(back).model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    logits_agree(run, tmp_path / "out")
    assert sample(back, prompt="def ", tokens=4, temperature=0) == sample(run, prompt="def ",
        tokens=4, temperature=0)


def test_a_run_begins_from_it_with_its_tokenizer(tmp_path, theirs):
    base = bring(planned(theirs), tmp_path / "base")
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(f"def import{i}(folder): return the run\n" * 40)
    config = base.config.replace({"start.run": str(base.path), "data.source": str(text),
                                  "data.tokenizer": str(base.path), "steps": 2,
                                  "eval_batches": 1, "global_batch": 2, "system.device": "cpu",
                                  "system.threads": 1})
    run = train(config, out=tmp_path / "run")
    assert run.identity["start"] and run.identity["tokenizer"] == base.identity["tokenizer"]
    assert tokenizer_from_dict(run.tokenizer).end == 0
    with pytest.raises(ConfigError,
                       match=r"has another tokenizer, .*set data.tokenizer=.*base, which is that "
                             r"run's"):
        train(config.replace({"data.tokenizer": "bytes"}), out=tmp_path / "other")
    with pytest.raises(ConfigError,
                       match=r"was imported, and has no optimizer states to go on with; begin "
                             r"another run from it: start.run="):
        train(base.config, out=base.path, resume=True)


def test_files_of_the_bare_model_and_of_old_versions(tmp_path, tokenizer):
    """GPT-2 as on the Hugging Face hub: names without a prefix, and the causal mask among the
    weights."""
    saved("gpt2", tmp_path / "theirs", tokenizer)
    path = tmp_path / "theirs" / "model.safetensors"
    bare = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.bool)}, path)
    run, due = bring(planned(tmp_path / "theirs"),
                     tmp_path / "run"), bare["h.1.mlp.c_proj.weight"].mT
    assert torch.equal(trained(run).model.get_parameter("blocks.1.mlp.down.weight"), due)


def test_70_billion_by_their_headers(tmp_path, tokenizer):
    """Llama 2 70B: a sparse file of zeros, of which only the header is read."""
    config = transformers.LlamaConfig(vocab_size=32000, hidden_size=8192, intermediate_size=28672,
                                      num_hidden_layers=80,
                                      num_attention_heads=64, num_key_value_heads=8, eos_token_id=0)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    header, at = {}, 0
    for name, t in model.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(t.shape),
                        "data_offsets": [at, at := at + 2 * t.numel()]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    plan = planned(tmp_path)
    assert plan.weights == sum(t.numel() for t in model.parameters()) == 68_976_648_192
    assert plan.config.memory.param_dtype.name == "bf16"


def test_links_to_a_cache_are_followed(tmp_path, tokenizer):
    """A folder as in the cache of the hub: with links."""
    saved("llama", tmp_path / "blobs", tokenizer)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert bring(planned(tmp_path / "snapshot"), tmp_path / "run").config.model.L == 2


def changed(folder, **values):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


def replaced(folder, name, t):
    path = folder / "model.safetensors"
    save_file({key: tensor
               for key, tensor in (load_file(path) | {name: t}).items() if tensor is not None},
              path)


def indexed(folder, weight_map):
    (folder / "model.safetensors").unlink()     # a file that transformers would read
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("harm, sentence", [
    (lambda f: (f / "config.json").unlink(), r"holds no model of transformers \(no config.json\); "
                                             r"give the folder"),
    (lambda f: (f / "config.json").write_text("[1]"), "config.json is not the JSON object that it "
                                                      "should be"),
    (lambda f: changed(f, model_type="mixtral"), "there is no model_type 'mixtral'; did you mean "
                                                 "'mistral'"),
    (lambda f: changed(f, model_type="mistral", sliding_window=31), "a mistral model with "
        "sliding_window=31 computes something else"),
    (lambda f: changed(f, hidden_act="gelu"), "a llama model with hidden_act='gelu' computes "
                                              "something else.*may be 'silu' or 'swish'"),
    (lambda f: changed(f, rope_parameters={"rope_type": "yarn", "rope_theta": 5e5}),
     "rope_parameters.rope_type='yarn' computes something else"),
    (lambda f: changed(f, rope_parameters="gone", rope_scaling={"type": "linear", "factor": 2.0}),
     "rope_scaling.rope_type='linear'"),
    (lambda f: changed(f, quantization_config={"bits": 4}), "quantization_config=.* computes "
                                                            "something else"),
    (lambda f: changed(f, num_hidden_layers=3), "lacks 9 tensors of a LlamaForCausalLM of 3 "
                                                "layers, model.layers.2.input_layernorm.weight "
                                                "first"),
    (lambda f: changed(f, num_hidden_layers=1), "has 9 tensors that no LlamaForCausalLM of this "
                                                "kit has, model.layers.1"),
    (lambda f: changed(f, num_hidden_layers=10**9), "num_hidden_layers must be from 1 to 10,000, "
                                                    "got 1000000000"),
    (lambda f: changed(f, hidden_size="wide"), "config.json of a llama model: hidden_size must be "
                                               "a whole number, got 'wide'"),
    (lambda f: changed(f, rope_parameters=[1]), r"config.json has rope_parameters=\[1\], which "
                                                r"must be an object"),
    (lambda f: changed(f, vocab_size=200), r"embed_tokens.weight is \(300, 48\)"),
    (lambda f: replaced(f, "model.norm.weight", torch.ones(48, dtype=torch.int8)),
     "model.norm.weight in model.safetensors is in I8; this kit"),
    (pickled, "has its weights in pytorch_model.bin, a pickle, which can execute any code when it "
              "is read; if you trust it, convert it"),
    (cut, "model.safetensors' is not a whole file of safetensors .*file not fully covered.*get it "
          "again"),
    (lambda f: (f / "model.safetensors").unlink(), "lacks model.safetensors; get the whole folder "
                                                   "again"),
    (lambda f: indexed(f, {"a": "../a.safetensors"}), "cannot be the name"),
    (lambda f: indexed(f, ["model.safetensors"]), r"model.safetensors.index.json has "
                                                  r"weight_map=\['model.safetensors'\], which must "
                                                  r"be an object"),
    (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json of the `tokenizers` "
                                                "library; save it from a fast tokenizer, or name "
                                                "one"),
    (lambda f: (f / "tokenizer.json").write_text('{"model": 1, "version": 1}'),
     "is not a tokenizer of the `tokenizers` library"),
    (lambda f: changed(f, eos_token_id=300), "config.json has eos_token_id=300, which is no token "
                                             "of tokenizer.json"),
])
def test_what_is_no_model_is_said_in_a_sentence_and_leaves_nothing(harm, sentence, tmp_path,
        theirs, capsys):
    harm(theirs)
    before = {path: path.read_bytes() for path in theirs.iterdir()}
    with pytest.raises(ConfigError, match=sentence):
        planned(theirs)
    capsys.readouterr()
    assert cli.main(["import", str(theirs), "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lpkit: ") and err.count("\n") == 1
    assert ([*tmp_path.iterdir()] == [theirs]
            and before == {path: path.read_bytes() for path in theirs.iterdir()})


def test_a_disk_that_fills_leaves_nothing(tmp_path, theirs, monkeypatch):
    plan = planned(theirs)
    shutil.rmtree(theirs)     # and weights that disappear between the plan and the reading
    with pytest.raises(Exception, match="No such file"):
        bring(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_that_it_prints_runs(tmp_path, tokenizer, monkeypatch, capsys):
    """The context is 131,072 tokens, and 16 such sequences do not fit into 64 MiB."""
    monkeypatch.setattr(hardware, "available_bytes", lambda device: 2**26)
    config = transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 1,
        "max_position_embeddings": 131_072, "eos_token_id": 0})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    assert cli.main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "run")]) == 0
    command = capsys.readouterr().out.split("lpkit train ")[1].replace("--out ...",
        f"--out {tmp_path / 'books'}")
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"def import{i}(folder): return the run\n"
            * 300)
    words = command.replace("data.source=...",
                           f"data.source={tmp_path / 'text'} system.device=cpu "
                           f"system.attention=sdpa eval_batches=1").split()
    assert cli.main(["train", *words]) == 0
    run = Run.open(tmp_path / "books")
    assert (run.config.model.T * run.config.global_batch >= 1024
            and run.summary["status"] == "complete")
    whole = [word
             for word in words if not word.startswith(("model.context=", "global_batch=", "--out",
        str(tmp_path / "books")))]
    capsys.readouterr()
    assert (cli.main(["train", *whole, "--out", str(tmp_path / "other")]) == 2
            and "at its peak" in capsys.readouterr().err)


@pytest.mark.parametrize("command", ["train", "export"])
def test_a_command_that_needs_a_run_says_to_import_it_first(command, tmp_path, theirs, capsys):
    more = ["--out", str(tmp_path / "out")] if command == "export" else []
    capsys.readouterr()
    assert cli.main([*command.split(), str(theirs), *more]) == 2
    err = capsys.readouterr().err
    assert (f"it is a folder of transformers: import it first, by lpkit import "
            f"{tmp_path / 'theirs'} --out runs/theirs" in err and err.count("\n") == 1)


def test_a_folder_that_is_there_and_no_out(tmp_path, theirs, capsys):
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="exists already; choose another --out"):
        bring(planned(theirs), tmp_path / "run")
    assert cli.main(["import", str(theirs)]) == 2
    assert cli.main(["import", str(theirs), "--check"]) == 0
    assert "LlamaForCausalLM, " in capsys.readouterr().out
