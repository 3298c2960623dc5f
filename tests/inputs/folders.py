"""Folders of transformers and of peft, whole, altered and damaged: the run has the logits that
their library computes, or it is refused.

A case saves a tiny model of each family once, alters a copy of its folder, imports it, and loads
the same folder by transformers (peft).
`expected` is "right", a word that the sentence must have (the name of the key), or "" for either.
What lpkit imports must have the logits of the other library to 1e-5 of their largest, so a model
that neither is refused nor equal fails, and so does one that the other library does not load. What
the library itself says of its classes (the fields of LlamaConfig, of LoraConfig) is walked, so that
a key that a new version knows becomes a case by itself. A field of the class that all inherit is
tried with one of them.

Only these cases catch: a key or a file of a model or an adapter that changes its logits, and that
an import passes over without a word.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lessons.rows import adapters as adapters
from lpkit.errors import ConfigError
from lpkit.exchange.adapted import bring_adapter, rebuilt
from lpkit.exchange.imported import ImportPlan, bring, planned
from lpkit.training import build, checkpoint
from lpkit.training.runs import Run

Case = tuple[str, Callable[[], str]]
RIGHT, EITHER = "right", ""
WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
V, T, L = 260, 16, 2
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": L,
         "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": T, "rms_norm_eps": 1e-4}
LLAMA31 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": T}
BASES = {
    "gpt2": {"vocab_size": V, "n_positions": T, "n_embd": 32, "n_layer": L, "n_head": 4,
             "layer_norm_epsilon": 1e-4},
    "llama": SIZES, "qwen2": SIZES, "qwen3": SIZES | {"head_dim": 12},
    "mistral": SIZES | {"sliding_window": None},
    "llama tied": SIZES | {"tie_word_embeddings": True},
    "llama 3.1": SIZES | {"rope_parameters": LLAMA31},
    # sizes that are the default of the class
    "qwen3 wide": SIZES | {"head_dim": 128},
    "mistral of 8": SIZES | {"num_attention_heads": 8, "num_key_value_heads": 8},
    "qwen2 of 32": SIZES | {"hidden_size": 64, "num_attention_heads": 32,
                            "num_key_value_heads": 32},
}
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mistral")
BOTH = FAMILIES[:2]     # of what all families read by the same lines

# What a key is set to in the walk over the fields of a class; else another value of its default's
# kind.
OTHER = {
    "hidden_act": "gelu", "activation_function": "relu",
    "rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 1e4}, "dtype": "float16",
    "layer_types": ["sliding_attention"] * L, "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "problem_type": "regression", "architectures": ["LlamaForSequenceClassification"],
    "transformers_version": "4.0.0", "pad_token_id": 3,
    "bos_token_id": 5, "eos_token_id": 6, "sliding_window": 8, "num_key_value_heads": 4,
    "head_dim": 16, "n_inner": 64, "initializer_range": 0.5,
    "summary_type": "last", "summary_activation": "tanh", "num_attention_heads": 8, "n_head": 8,
    "max_position_embeddings": 2 * T, "n_positions": 2 * T,
    "rms_norm_eps": 1e-2, "layer_norm_epsilon": 1e-2, "max_window_layers": 1, "pretraining_tp": 2}
# Keys that cannot change a forward pass without dropout: they must be right, so that nothing is
# refused needlessly.
HARMLESS = {
    "transformers_version", "architectures", "dtype", "output_hidden_states",
    "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range",
    "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "reorder_and_upcast_attn",
    "pretraining_tp", "max_window_layers", "rms_norm_eps", "layer_norm_epsilon"}
# Keys that no class has as a field, and that people's folders have.
SPELLINGS = [       # family, keys, expected
    *((family, {"is_causal": False}, "is_causal") for family in BOTH),
    *((family, {"_name_or_path": "x", "torch_dtype": "bfloat16", "model_max_length": 5,
                "unsloth_version": "2025.1", "temperature": 0.1,
                "neftune_noise_alpha": 5, "transformers.js_config": {"a": 1}}, RIGHT)
      for family in BOTH),
    *((family, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
       "quantization_config") for family in BOTH),
    *((family, {"attn_implementation": "eager", "output_attentions": False}, RIGHT)
      for family in BOTH),
    *((family, {"per_layer_config": {"0": {"sliding_window": 4}}}, "per_layer_config")
      for family in BOTH),
    *((family, {"attention_chunk_size": 4}, "attention_chunk_size") for family in BOTH),
    ("qwen2", {"rope_scaling": YARN}, "rope_scaling.rope_type='yarn'"),
    ("llama", {"rope_scaling": YARN}, "rope_scaling.rope_type='yarn'"),
    ("mistral", {"rope_scaling": YARN | {"rope_type": "yarn"}}, "rope_scaling"),
    ("qwen3", {"rope_scaling": YARN}, "rope_scaling"),
    ("llama", {"rope_scaling": None}, RIGHT), ("llama", {"rope_scaling": {}}, RIGHT),
    ("llama", {"rope_parameters": None, "rope_theta": 5e5}, RIGHT),
    # what stands inside wins
    ("llama", {"rope_parameters": None}, RIGHT), ("llama", {"rope_theta": 5e5}, RIGHT),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}},
     "rope_scaling.rope_type='linear'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ("qwen2", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
    ("llama", {"rope_scaling": {"type": "default", "factor": 8.0, "low_freq_factor": 2.0}}, RIGHT),
    ("llama", {"rope_scaling": {"type": "yarn", "rope_type": "default", "rope_theta": 2e4}}, RIGHT),
    ("llama", {"rope_parameters": {"rope_theta": 2e4}}, RIGHT),
    ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e4}, RIGHT),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
     "full_attention"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("gpt2", {"rope_scaling": YARN}, RIGHT),
    ("llama 3.1", {"rope_scaling": LLAMA31 | {"factor": 4.0}}, RIGHT),
    ("llama 3.1", {"rope_theta": 1e4}, RIGHT),
    *(("llama 3.1", {"rope_parameters": {key: value for key, value in LLAMA31.items()
                                           if key != gone}}, gone)
      for gone in ("factor", "low_freq_factor", "high_freq_factor",
                   "original_max_position_embeddings")),
    ("llama 3.1", {"rope_parameters": LLAMA31 | {"low_freq_factor": 2.0}}, "low_freq_factor"),
    ("llama 3.1", {"rope_parameters": LLAMA31 | {"low_freq_factor": 1}}, RIGHT),
    ("llama 3.1", {"rope_parameters": LLAMA31 | {"partial_rotary_factor": 0.5}}, "partial"),
    ("llama 3.1", {"original_max_position_embeddings": 32}, "original_max_position_embeddings"),
    ("llama", {"original_max_position_embeddings": 32}, "original_max_position_embeddings"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "freq_factor"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
     "sliding_window"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4 * T, "max_window_layers": 0},
     "use_sliding_window"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": T - 1, "max_window_layers": 0},
     "sliding_window"),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 8}, RIGHT),
    ("qwen2", {"layer_types": ["full_attention"] * L}, RIGHT),
    ("qwen2", {"layer_types": ["full_attention"] * (L + 1)}, "layer_types"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True,
               "sliding_window": 8}, "use_sliding_window"),
    ("mistral", {"sliding_window": T}, RIGHT),
    ("mistral", {"sliding_window": T - 1}, "sliding_window"),
    ("mistral", {"sliding_window": 8, "use_sliding_window": False}, "sliding_window"),
    ("llama", {"use_sliding_window": True}, RIGHT),
    ("llama", {"sliding_window": 8}, "sliding_window"),
    ("mistral", {"attention_bias": True}, RIGHT), ("qwen2", {"attention_bias": True}, RIGHT),
    ("qwen2", {"head_dim": 16}, "q_proj"), ("gpt2", {"n_ctx": 7, "head_dim": 3}, RIGHT),
    ("gpt2", {"num_attention_heads": 8}, RIGHT), ("gpt2", {"hidden_size": 64}, EITHER),
    ("gpt2", {"num_hidden_layers": 1}, "transformer.h.1"),
    ("gpt2", {"max_position_embeddings": 8}, "wpe"),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, RIGHT),
    ("gpt2", {"activation_function": "gelu"}, "activation_function"),
    ("llama", {"hidden_act": "swish"}, RIGHT),
    ("llama", {"architectures": ["MistralForCausalLM"]}, RIGHT),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "auto_map"),
    ("llama", {"transformers_weights": "other.safetensors"}, "transformers_weights"),
    ("llama", {"model_type": "llamo"}, "model_type"), ("llama", {"model_type": None}, "model_type"),
    ("llama", {"model_type": "mixtral"}, "model_type"),
    ("llama", {"is_llama_config": True, "rope_interleaved": False}, RIGHT),
    ("llama", {"num_experts": 8, "use_mrope": False}, RIGHT),
    ("llama tied", {"tie_word_embeddings": False}, "lm_head.weight"),
    ("mistral", {"num_attention_heads": 2, "num_key_value_heads": 1}, EITHER),
    ("llama", {"num_key_value_heads": 8}, "num_key_value_heads"),
    ("llama", {"head_dim": 9}, "head_dim"), ("llama", {"vocab_size": V - 8}, "embed_tokens"),
    ("llama", {"num_hidden_layers": 10**9}, "layers"),
    ("llama", {"hidden_size": 10**400}, "hidden_size"),
    ("llama", {"num_hidden_layers": 1}, "model.layers.1"),
]
KINDS = {"list": [1], "null": None, "text": "wide", "number": 2.5, "bool": True,
         "nan": float("nan"), "zero": 0}
READ = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "head_dim",
        "intermediate_size", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "attention_bias",
        "rope_parameters", "rope_scaling", "sliding_window",
        "layer_types", "model_type", "is_causal")


# ---- folders

@functools.cache
def room() -> Path:
    """Folder of the bases, which ends with the process."""
    folder = Path(tempfile.mkdtemp(prefix="lpkit-folders-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def base(kind: str) -> Path:
    """Saves a model whose every weight, norm, bias and epsilon shows in the logits."""
    import transformers

    config = transformers.AutoConfig.for_model(kind.partition(" ")[0], **BASES[kind],
        initializer_range=0.2)
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1 if "norm" in name
                                  or ("ln_" in name and name.endswith("weight")) else 0, 0.2)
        elif "embed" in name or "wte" in name or "wpe" in name:
            torch.nn.init.normal_(p, 0, 0.03)       # so small that an epsilon shows
    with quiet():
        model.save_pretrained(folder := room() / kind.replace(" ", "-"))
    return folder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and bars of other libraries."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def copied(kind: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lpkit-folder-", dir=room()) as temporary:
        yield Path(shutil.copytree(base(kind), Path(temporary) / "theirs"))


def tokens() -> torch.Tensor:
    return torch.randint(V, (2, T), generator=torch.Generator().manual_seed(2))


def by_transformers(folder: Path) -> torch.Tensor:
    import transformers

    with quiet(), torch.no_grad():
        # in float32 whatever the folder says of its dtype
        return transformers.AutoModelForCausalLM.from_pretrained(folder,
            dtype=torch.float32).eval()(tokens(), return_dict=True).logits


def by_peft(folder: Path, of: Path) -> torch.Tensor:
    import peft
    import transformers

    with quiet(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(model, str(folder)).eval()(tokens()).logits[:, -T:]


def of_run(run: Run) -> torch.Tensor:
    """Logits of the run's checkpoint in float32, without any choice that depends on the machine."""
    saved, problems = checkpoint.load_latest(run.checkpoints, run=run.identity["run"],
        only=checkpoint.WEIGHTS)
    assert not problems, problems
    with torch.no_grad():
        return rebuilt(run, {name.removeprefix("model/"): t for name, t in saved.tensors.items()})(
            tokens())


def of_plan(plan: ImportPlan) -> torch.Tensor:
    """The same of what `bring` would write."""
    model, read = build.initial_model(plan.config, "plain"), plan.read([*plan.ours])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(read.pop(f"model/{name}"))
        assert not read, f"without a place in the model: {[*read]}"
        return model(tokens())


def judged(ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor], expected: str,
           out: Path) -> str:
    try:
        logits = ours()
    except ConfigError as error:
        sentence = str(error)
        assert expected != RIGHT, f"refused, and it should be right: {sentence}"
        assert expected in sentence, f"the sentence does not have {expected!r}: {sentence}"
        assert (sentence.strip() and "\n" not in sentence
                and len(sentence) < 700), f"this is no sentence: {sentence}"
        assert not out.exists(), "refused, and it left something behind"
        return sentence
    except Exception as error:
        raise AssertionError(f"a traceback: {type(error).__name__}: {error}") from error
    assert expected in (RIGHT, EITHER), f"imported, and {expected} should be refused"
    try:
        due = theirs()
    except Exception as error:
        raise AssertionError(f"imported, and its own library does not load it: "
                             f"{type(error).__name__}: {error}") from error
    assert logits.shape == due.shape, (f"logits of shape {tuple(logits.shape)}, and theirs "
                                        f"{tuple(due.shape)}")
    off = (logits - due).abs().max().item() / due.abs().max().item()
    assert off < 1e-5, f"silent: logits off by {off:.2g} of the largest"
    return RIGHT


def judge(kind: str, alter: Callable[[Path], object], expected: str = EITHER, *,
          written: bool = False) -> str:
    """Imports an altered copy of a base: "right", or the sentence of its refusal. `written`: as a
    run on the disk."""
    with copied(kind) as folder:
        alter(folder)
        out = folder.parent / "run"

        def ours() -> torch.Tensor:
            plan = planned(folder, "bytes")
            return of_run(bring(plan, out)) if written else of_plan(plan)

        return judged(ours, lambda: by_transformers(folder), expected, out)


# ---- ways to alter one

def changed(name: str = "config.json", *gone: str, **values: Any) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        path = folder / name
        config = {key: value for key, value in json.loads(path.read_text()).items()
                  if key not in gone}
        path.write_text(json.dumps(config | values))

    return alter


def tensors(change: Callable[[dict[str, torch.Tensor]], object],
            name: str = WEIGHTS) -> Callable[[Path], None]:
    """`change` alters the dict in place."""
    def alter(folder: Path) -> None:
        weights = load_file(folder / name)
        change(weights)
        save_file({key: t.contiguous() for key, t in weights.items()}, folder / name,
                  metadata={"format": "pt"})

    return alter


def cast(dtype: torch.dtype, *which: str) -> Callable[[Path], None]:
    return tensors(lambda weights: weights.update({key: t.to(dtype) for key, t in weights.items()
        if not which or key in which}))


def sharded(folder: Path) -> None:
    """Two files and their index."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, index = sorted(weights), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({key: weights[key] for key in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))


def both(*alters: Callable[[Path], object]) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        for change in alters:
            change(folder)

    return alter


def with_head(scale: float) -> Callable[[Path], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights[next(key for key in weights
            if key.endswith(("embed_tokens.weight", "wte.weight")))].clone() * scale

    return tensors(change)


def doubled(folder: Path) -> None:
    """One tensor in both shards, with other values."""
    sharded(folder)
    first = load_file(folder / "model-00001-of-00002.safetensors")
    name = min(first)
    tensors(lambda weights: weights.update({name: first[name] + 1}),
            "model-00002-of-00002.safetensors")(folder)


def stale(folder: Path) -> None:
    """An index of other shards beside the one file, which transformers reads first."""
    whole = (folder / WEIGHTS).read_bytes()
    sharded(folder)
    tensors(lambda weights: weights.update({key: t + 1 for key, t in weights.items()}),
            "model-00001-of-00002.safetensors")(folder)
    (folder / WEIGHTS).write_bytes(whole)


def bare(prefix: str) -> Callable[[Path], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for key in list(weights):
            weights[key.removeprefix(prefix)] = weights.pop(key)

    return tensors(change)


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


FILES = [       # name, base, how it is altered, expected
    *(("as it was saved", kind, lambda folder: None, RIGHT) for kind in BASES),
    *(("in two files", family, sharded, RIGHT) for family in FAMILIES),
    *((f"in {dtype}", family, cast(dtype), RIGHT) for family in ("llama", "gpt2")
      for dtype in (torch.float16, torch.bfloat16)),
    ("one tensor in bf16", "llama", cast(torch.bfloat16, "model.norm.weight"), RIGHT),
    ("in float64", "llama", cast(torch.float64), "F64"),
    ("of the bare model", "gpt2", bare("transformer."), RIGHT),
    ("of the bare model", "llama tied", bare("model."), RIGHT),
    ("of the bare model without a head", "llama",
     both(bare("model."), tensors(lambda weights: weights.pop("lm_head.weight"))),
     "lm_head.weight"),
    ("the causal mask among the weights", "gpt2",
     tensors(lambda weights: weights.update({"transformer.h.0.attn.bias": torch.ones(1, 1, T, T)})),
     RIGHT),
    ("old frequencies among the weights", "llama",
     tensors(lambda weights: weights.update(
         {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})), RIGHT),
    ("a tied head that is the embedding", "llama tied", with_head(1.0), RIGHT),
    ("a tied head that is the embedding", "gpt2", with_head(1.0), RIGHT),
    ("a tied head that is another", "llama tied", with_head(2.0), "tie_word_embeddings"),
    ("a tied head that is another", "gpt2", with_head(2.0), "tie_word_embeddings"),
    ("an untied head beside the embedding", "gpt2",
     both(with_head(2.0), changed(tie_word_embeddings=False)), RIGHT),
    ("a tied head in another file that is another", "llama tied", both(with_head(2.0), sharded),
     "tie_word_embeddings"),
    ("one tensor in two files", "llama", doubled, "keep one"),
    ("an index of other shards beside the one file", "llama", stale, RIGHT),
    ("an adapter beside the model", "llama", written(ADAPTER, '{"peft_type": "LORA"}'), ADAPTER),
    ("a head of classes", "llama",
     tensors(lambda weights: weights.update({"score.weight": torch.ones(2, 32)})), "score.weight"),
    ("biases of queries", "llama",
     tensors(lambda weights: weights.update(
         {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
     "q_proj.bias"),
    ("norms of queries", "llama",
     tensors(lambda weights: weights.update(
         {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})),
     "q_norm"),
    ("no norm", "llama", tensors(lambda weights: weights.pop("model.norm.weight")),
     "model.norm.weight"),
    ("integers", "llama", cast(torch.int8, "model.norm.weight"), "I8"),
    ("cut off", "llama", cut(WEIGHTS), "not a whole file"),
    ("no weights", "llama", gone(WEIGHTS), "lacks"), ("a pickle", "llama", pickled, "pickle"),
    ("no config", "llama", gone("config.json"), "config.json"),
    ("a shard is missing", "llama", both(sharded, gone("model-00002-of-00002.safetensors")),
     "lacks"),
    ("a shard is cut off", "llama", both(sharded, cut("model-00002-of-00002.safetensors")),
     "not a whole file"),
    ("a list for a config", "llama", written("config.json", "[1]"), "config.json"),
    ("no JSON", "llama", written("config.json", "{"), "config.json"),
    ("no text", "llama", lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"),
     "config.json"),
    *((f"without {key}", family, changed("config.json", key), EITHER) for family in FAMILIES
      for key in (
        "layer_norm_epsilon", "n_head", "n_inner") if family == "gpt2"),
    *((f"without {key}", family, changed("config.json", key), EITHER) for family in FAMILIES
      for key in (
        "rms_norm_eps", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "tie_word_embeddings", "rope_parameters", "hidden_act",
        "sliding_window", "num_hidden_layers") if family != "gpt2"),
    ("without head_dim", "qwen3 wide", changed("config.json", "head_dim"), RIGHT),
    ("without num_key_value_heads", "mistral of 8", changed("config.json", "num_key_value_heads"),
     RIGHT),
    ("without sliding_window", "mistral of 8", changed("config.json", "sliding_window"), RIGHT),
    ("without num_attention_heads", "qwen2 of 32",
     changed("config.json", "num_attention_heads", "num_key_value_heads"), RIGHT),
    ("num_key_value_heads=None", "qwen2 of 32", changed(num_key_value_heads=None), RIGHT),
]


# as runs on the disk, too
WRITTEN = ("as it was saved", "in two files", "a tied head that is another", "cut off")


def with_index(value: Any) -> Callable[[Path], None]:
    return both(sharded, changed(INDEX, weight_map=value))


# ---- adapters

PEFT = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
VIRTUAL = {"PROMPT_TUNING": "PromptTuningConfig", "PREFIX_TUNING": "PrefixTuningConfig"}
ADAPTER_WEIGHTS = "adapter_model.safetensors"
OTHER_OF_PEFT = {       # what a key of an adapter is set to in the walk
    "task_type": "SEQ_CLS", "peft_type": "IA3",
    "auto_mapping": {"base_model_class": "LlamaForCausalLM"}, "peft_version": "0.1.0",
    "base_model_name_or_path": "nobody/nothing", "revision": "main", "inference_mode": False,
    "r": 2, "target_modules": ["q_proj"],
    "exclude_modules": ["v_proj"], "bias": "all", "modules_to_save": ["lm_head"],
    "init_lora_weights": "pissa", "layers_to_transform": [0],
    "layers_pattern": ["layers"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "megatron_config": {"a": 1},
    "megatron_core": "other.core", "trainable_token_indices": [1, 2],
    "loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "kpm"}, "lora_ga_config": {"direction": "ArBr"},
    "velora_config": {"rank": 1}, "alora_invocation_tokens": [1, 2],
    "monteclora_config": {"num_samples": 2}, "layer_replication": [[0, 2], [1, 2]],
    "runtime_config": {"ephemeral_gpu_offload": False},
    "target_parameters": ["mlp.gate_proj.weight"], "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 1}, "kasa_config": {"beta": 1e-3},
    "num_virtual_tokens": 3, "token_dim": 8, "num_transformer_submodules": 2,
    "num_attention_heads": 8, "num_layers": 3, "prompt_tuning_init": "TEXT",
    "prompt_tuning_init_text": "a", "tokenizer_name_or_path": "nobody/nothing",
    "tokenizer_kwargs": {"use_fast": True}, "init_weights": "zero",
    "encoder_hidden_size": 7, "prefix_projection": True, "feedforward_modules": ["down_proj"]}
# they go together
TEXT = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "a",
        "tokenizer_name_or_path": "nobody/nothing"}
HARMLESS_OF_PEFT = {"auto_mapping", "peft_version", "base_model_name_or_path", "revision",
                    "inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core",
                    "use_rslora", "lora_alpha", "qalora_group_size", "prompt_tuning_init_text",
                    "tokenizer_name_or_path", "init_weights", "encoder_hidden_size",
                    "prompt_tuning_init", "tokenizer_kwargs"}


@functools.cache
def base_run(kind: str) -> Run:
    return bring(planned(base(kind), "bytes"), room() / f"run-{kind}")


@functools.cache
def adapter(kind: str, of: str) -> Path:
    """Saves an adapter of random numbers as peft does."""
    import peft
    import transformers

    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(base(of), dtype=torch.float32)
        asked = {"LORA": lambda: peft.LoraConfig(r=4, lora_alpha=6, target_modules=PEFT[of],
            fan_in_fan_out=of == "gpt2", task_type="CAUSAL_LM"),
                 "DORA": lambda: peft.LoraConfig(r=4, target_modules=PEFT[of], use_dora=True,
                     task_type="CAUSAL_LM"),
                 "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM",
                     num_virtual_tokens=5),
                 "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM",
                     num_virtual_tokens=5),
                 "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM")}[kind]()
        theirs = peft.get_peft_model(model, asked)
        torch.manual_seed(3)
        for name, p in theirs.named_parameters():
            if "magnitude" in name:
                p.data *= torch.rand_like(p) + 0.5
            elif p.requires_grad:
                torch.nn.init.normal_(p, 0, 0.3)
        theirs.save_pretrained(folder := room() / f"{kind}-{of}")
    return folder


def judge_adapter(kind: str, of: str, alter: Callable[[Path], object],
                  expected: str = EITHER) -> str:
    with tempfile.TemporaryDirectory(prefix="lpkit-adapter-", dir=room()) as temporary:
        folder = Path(shutil.copytree(adapter(kind, of), Path(temporary) / "theirs"))
        alter(folder)
        out = Path(temporary) / "run"
        return judged(lambda: of_run(bring_adapter(folder, base_run(of), out)),
                      lambda: by_peft(folder, base(of)), expected, out)


def renamed(change: Callable[[str], str]) -> Callable[[Path], None]:
    """The tensors of an adapter by other names."""
    return tensors(lambda weights: [weights.__setitem__(change(key), weights.pop(key))
                                    for key in list(weights)], ADAPTER_WEIGHTS)


def only(word: str) -> Callable[[Path], None]:
    return tensors(lambda weights: [weights.pop(key) for key in list(weights) if word not in key],
                   ADAPTER_WEIGHTS)


ADAPTERS = [        # name, kind, base, how it is altered, expected
    *(("as peft saved it", kind, of, lambda folder: None, RIGHT) for kind in ("LORA", "DORA")
      for of in PEFT),
    *(("as peft saved it", kind, "llama", lambda folder: None, RIGHT) for kind in VIRTUAL),
    ("as peft saved it", "IA3", "llama", lambda folder: None, "IA3"),
    *((f"init_lora_weights={init}", "LORA", "llama", changed(ADAPTER, init_lora_weights=init),
       RIGHT) for init in (True, False, "gaussian", "orthogonal", "eva", "mica")),
    *((f"init_lora_weights={init}", "LORA", "llama", changed(ADAPTER, init_lora_weights=init),
       "init_lora_weights") for init in (
        "pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "other")),
    ("init_lora_weights=loftq", "LORA", "llama",
     changed(ADAPTER, init_lora_weights="loftq", loftq_config={"loftq_bits": 4}), "loftq"),
    ("use_rslora and use_dora", "DORA", "llama", changed(ADAPTER, use_rslora=True), RIGHT),
    *((f"use_rslora and r={r}", "LORA", "llama", changed(ADAPTER, use_rslora=True, r=r), "r")
      for r in ("wide", [4], 4.0, -4, 10**400, None)),
    ("use_dora without lengths", "LORA", "llama", changed(ADAPTER, use_dora=True), "magnitude"),
    ("lengths without use_dora", "DORA", "llama", changed(ADAPTER, use_dora=False), "magnitude"),
    ("one layer by full names", "LORA", "llama",
     both(changed(ADAPTER, target_modules=["model.layers.1.self_attn.q_proj"]),
          only("layers.1.self_attn.q_proj")), RIGHT),
    ("one layer by full names", "DORA", "llama",
     both(changed(ADAPTER, target_modules=["layers.0.self_attn.v_proj"]),
          only("layers.0.self_attn.v_proj")), RIGHT),
    ("one layer by full names", "LORA", "gpt2",
     both(changed(ADAPTER, target_modules=["h.0.attn.c_attn"]), only("h.0.attn.c_attn")), RIGHT),
    ("one layer by its number", "LORA", "llama",
     both(changed(ADAPTER, layers_to_transform=[1]), only("layers.1.")), "layers_to_transform"),
    ("fewer targets than tensors", "LORA", "llama",
     changed(ADAPTER, target_modules=["q_proj", "v_proj"]), "down_proj"),
    ("more targets than tensors", "LORA", "llama",
     changed(ADAPTER, target_modules=["q_proj", "v_proj", "down_proj", "up_proj"]), "up_proj"),
    ("the head among the targets", "LORA", "llama",
     changed(ADAPTER, target_modules=[*PEFT["llama"], "lm_head"]), RIGHT),
    ("a target that is nothing there", "LORA", "llama",
     changed(ADAPTER, target_modules=[*PEFT["llama"], "W_pack"]), RIGHT),
    ("a pattern", "LORA", "llama", changed(ADAPTER, target_modules=".*(q|v|down)_proj"),
     "target_modules"),
    ("all-linear", "LORA", "llama", changed(ADAPTER, target_modules="all-linear"), "all-linear"),
    ("a key of a later version, off", "LORA", "llama",
     changed(ADAPTER, use_novelty=False, novelty_config=None), RIGHT),
    ("a key of a later version, on", "LORA", "llama", changed(ADAPTER, use_novelty=True),
     "use_novelty"),
    ("r is another", "LORA", "llama", changed(ADAPTER, r=8), "by r"),
    ("without r", "LORA", "llama", changed(ADAPTER, "r"), "by r"),
    ("without lora_alpha", "LORA", "llama", changed(ADAPTER, "lora_alpha"), RIGHT),
    ("without peft_type", "LORA", "llama", changed(ADAPTER, "peft_type"), "peft_type"),
    ("without target_modules", "LORA", "llama", changed(ADAPTER, "target_modules"),
     "target_modules"), ("without task_type", "LORA", "llama", changed(ADAPTER, "task_type"),
                         RIGHT),
    ("without task_type", "PROMPT_TUNING", "llama", changed(ADAPTER, "task_type"), "task_type"),
    ("of the wrong base", "LORA", "llama", renamed(lambda key: key.replace("self_attn", "attn")),
     "attn"),
    ("no weights", "LORA", "llama", gone(ADAPTER_WEIGHTS), ADAPTER_WEIGHTS),
    ("cut off", "LORA", "llama", cut(ADAPTER_WEIGHTS), "not a whole file"),
    ("no config", "LORA", "llama", gone(ADAPTER), ADAPTER),
    ("a list for a config", "LORA", "llama", written(ADAPTER, "[]"), ADAPTER),
    ("no tensors", "LORA", "llama", only("nothing"), "not there"),
    ("no prompt", "PROMPT_TUNING", "llama", only("nothing"), "prompt_embeddings"),
    ("one number a place", "PREFIX_TUNING", "llama",
     tensors(lambda weights: weights.update({"prompt_embeddings": torch.ones(5, 1)}),
             ADAPTER_WEIGHTS), "(5, 1)"),
    ("in bf16", "LORA", "llama",
     tensors(lambda weights: weights.update({key: t.bfloat16() for key, t in weights.items()}),
             ADAPTER_WEIGHTS), RIGHT),
    *((f"{key} is {kind}", "LORA", "llama", changed(ADAPTER, **{key: value}), EITHER)
      for key in ("r", "lora_alpha", "target_modules", "peft_type", "init_lora_weights", "use_dora")
      for kind, value in KINDS.items()),
    *((f"num_virtual_tokens is {kind}", "PROMPT_TUNING", "llama",
       changed(ADAPTER, num_virtual_tokens=value), "num_virtual_tokens")
        for kind, value in KINDS.items()),
]


# ---- the walks

def other(key: str, default: Any, table: dict[str, Any]) -> Any:
    """A value other than the default."""
    if key in table:
        return table[key]
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1 if isinstance(default, int) else default + 0.25
    raise AssertionError(f"{key}, whose default is {default!r}, needs a value in the table of "
                         f"tests/inputs/folders.py")


def fields(kind: type) -> dict[str, Any]:
    """Fields of a class of theirs, and their defaults."""
    defaults = {}
    for field in dataclasses.fields(kind):
        if field.init:
            defaults[field.name] = (field.default if field.default_factory is dataclasses.MISSING
                                    else field.default_factory())
    return defaults


def walk() -> Iterator[Case]:
    """Every key that a class knows, set to another value, one at a time."""
    import transformers

    inherited = fields(transformers.PreTrainedConfig).keys()
    for family in FAMILIES:
        for key, default in fields(type(transformers.AutoConfig.for_model(family))).items():
            # the form of an output; transformers' own forward fails without it
            if key == "return_dict" or (key in inherited and family != FAMILIES[0]):
                continue
            value = other(key, default, OTHER)
            expected = RIGHT if key in HARMLESS else EITHER
            yield f"{family}: {key}={value}", functools.partial(judge, family,
                changed(**{key: value}), expected)


def cases() -> Iterator[Case]:
    """Every case: its name, and a function that returns "right" or the sentence of the refusal.
    Raises AssertionError where it is neither."""
    import peft

    for name, kind, alter, expected in FILES:
        yield f"{kind}: {name}", functools.partial(judge, kind, alter, expected,
            written=name in WRITTEN)
    for kind, values, expected in SPELLINGS:
        yield f"{kind}: {', '.join(f'{key}={str(value)[:150]}' for key, value in values.items())}"[
            :200], functools.partial(judge, kind, changed(**values), expected)
    for key in READ:
        for name, value in KINDS.items():
            yield f"llama: {key} is {name}", functools.partial(judge, "llama",
                changed(**{key: value}), EITHER)
    for name, value in (KINDS | {"a path": {"a": "../a.safetensors"}, "lists": {"a": [1]},
                                 "numbers": {"a": 1}}).items():
        yield f"llama: weight_map is {name}", functools.partial(judge, "llama", with_index(value),
            EITHER)
    yield from walk()
    for name, kind, of, alter, expected in ADAPTERS:
        yield f"peft {kind} of {of}: {name}", functools.partial(judge_adapter, kind, of, alter,
            expected)
    for kind, name in ({"LORA": "LoraConfig"} | VIRTUAL).items():
        for key, default in fields(getattr(peft, name)).items():
            if kind in VIRTUAL and key in fields(peft.PeftConfig):
                continue
            value = other(key, default, OTHER_OF_PEFT)
            expected = RIGHT if key in HARMLESS_OF_PEFT else EITHER
            yield f"peft {kind}: {key}={value}", functools.partial(judge_adapter, kind, "llama",
                changed(ADAPTER, **(TEXT if key in (*TEXT, "tokenizer_kwargs") else {})
                        | {key: value}), expected)
