"""Model families of transformers, for export and for import.

In this module, "ours" are settings, names and tensors of lpkit; "theirs" are those of transformers.
A family defines which of our models transformers can express, the names of settings and weights,
and how our tensors are converted to theirs and back. The layouts differ:

    q, k, v    ours: one matrix, in which the heads of each group are together; theirs: three
               matrices (Llama), or one matrix with all of q, then k, then v (GPT-2)
    gate_up    ours: one matrix; theirs: two matrices, gate and up
    Conv1D     GPT-2 stores matrices as (in, out); ours are (out, in)

This module imports torch only when a tensor is converted, so `lpkit predict` of a `config.json` is
fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpkit import records
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, pick, shown
from lpkit.techniques.operation import FAST, POSITIONS, SLOW, TRAINED

if TYPE_CHECKING:
    from torch import Tensor

# default limit of tokens per sequence, if a model is given only by its config.json: the contexts of
# many models are too long to train with
MOST_TOKENS = 4096

# part of our parameter names -> part of their names, applied in this order
IN_GPT2 = {"embed.": "transformer.wte.", "positions.transformer.wte.": "transformer.wpe.",
           "blocks.": "transformer.h.", "norm1.": "ln_1.", "norm2.": "ln_2.",
           "attention.qkv.": "attn.c_attn.", "attention.out.": "attn.c_proj.",
           "mlp.up.": "mlp.c_fc.", "mlp.down.": "mlp.c_proj.", "head.": "lm_head."}
IN_LLAMA = {"embed.": "model.embed_tokens.", "blocks.": "model.layers.",
            "norm1.": "input_layernorm.", "norm2.": "post_attention_layernorm.",
            "attention.": "self_attn.", ".out.": ".o_proj.", "mlp.down.": "mlp.down_proj.",
            "head.": "lm_head."}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model class of transformers.

    needs:    our settings that every model of the family has -> their values
    names:    part of our parameter names -> part of their names; applied in order
    last:     their name of the last norm, with a dot
    prefix:   the beginning of their names that is missing if a file was saved from the model
              without its head (GPT2Model instead of GPT2LMHeadModel)
    parts:    (our name, our tensor, model) -> their tensors by name
    whole:    (our name, their tensors, model) -> our tensor
    sizes:    our setting -> their key
    means:    their other keys that change the computation -> the values with which they compute
              what we compute; if the key is missing, it has the first of these values
    defaults: their keys -> default values of their config class
    also:     alternative name of a key -> the key, whose value it overrides
    """

    architecture: str
    model_type: str
    needs: Mapping[str, Any]
    names: Mapping[str, str]
    last: str
    prefix: str
    parts: Callable[[str, Tensor, ModelConfig], dict[str, Tensor]]
    whole: Callable[[str, Sequence[Tensor], ModelConfig], Tensor]
    sizes: Mapping[str, str]
    means: Mapping[str, tuple]
    defaults: Mapping[str, Any]
    also: Mapping[str, str] = field(default_factory=dict)

    def config(self, m: ModelConfig) -> dict[str, Any]:
        """Returns the content of `config.json` for our model `m`."""
        ours = vars(m) | {"kv_heads": m.G, "head_dim": m.E, "mlp_width": m.F}
        settings = {"architectures": [self.architecture], "model_type": self.model_type,
                 "bos_token_id": None, "eos_token_id": None,
                 **{theirs: ours[key] for key, theirs in self.sizes.items()}}
        if self.needs["position"] == "rope":
            settings["rope_parameters"] = {"rope_type": "default", "rope_theta": m.rope_theta}
            if m.rope_factor != 1:
                settings["rope_parameters"] |= {"rope_type": "llama3", "factor": m.rope_factor} | {
                    key: value for key, (value,) in SLOWED.items()}
        return settings

    def model(self, given: Mapping[str, Any]) -> ModelConfig:
        """Returns our settings for the model that transformers makes from a `config.json`. given:
        its content. Raises ConfigError, whose message names the key, for an invalid size and for a
        model that computes something that this kit does not compute."""
        values = {**self.defaults, **given, **{
            self.also[key]: value for key, value in given.items() if key in self.also}}
        sizes, means = dict(self.sizes), dict(self.means)
        if self.needs["position"] == "rope":
            where = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
            rope = {} if values.get(where) is None else values[where]
            if not isinstance(rope, Mapping):
                raise ConfigError(f"config.json has {where}={shown(rope)}, which must be an object")
            rope = {"rope_type": rope.get("type", "default"), AT_FIRST: values[sizes["context"]],
                    "rope_theta": values.get("rope_theta", 1e4), **dict.fromkeys(SLOWED), **rope}
            turned, sizes["rope_theta"] = TURNED, f"{where}.rope_theta"
            if rope["rope_type"] == "llama3":
                turned, sizes["rope_factor"] = TURNED | SLOWED, f"{where}.factor"
            values |= {f"{where}.{key}": value for key, value in rope.items()}
            means |= {f"{where}.{key}": fine for key, fine in turned.items()}
        needs = {"qkv_bias" if key == "biased_qkv" else key: value
                 for key, value in self.needs.items()}
        try:
            m = ModelConfig(**needs | {key: values.get(theirs) for key, theirs in sizes.items()})
        except ConfigError as error:
            sentence = str(error)
            for key, theirs in sizes.items():
                sentence = sentence.replace(f"model.{key}", theirs)
            raise ConfigError(f"config.json of a {self.model_type} model: {sentence}") from None
        # windows that are at least as long as the context mask nothing, so they may have any value
        idle = {key for key in WINDOWS if isinstance(values.get(key), int) and values[key] >= m.T}
        means["layer_types"] = (None, ["full_attention"] * min(m.L, 4096))
        for key, fine in means.items():
            value = values.get(key, fine[0])
            if key not in idle and (value, type(value) is bool) not in [
                    (value, type(value) is bool) for value in fine]:
                raise ConfigError(f"a {self.model_type} model with {key}={shown(value)} computes "
                                  f"something else than this kit's; {key} may be "
                                  f"{' or '.join(map(shown, fine))}")
        return m

    def weights(self, ours: Mapping[str, Tensor], m: ModelConfig) -> dict[str, Tensor]:
        """Return their tensors by their names, without a tied head. ours: our tensors by our
        names."""
        return {self.named(part_name): part.contiguous() for name, t in ours.items()
                if not (m.tied and name == "head.weight")
                for part_name, part in self.parts(name, t, m).items()}

    def named(self, name: str) -> str:
        """Returns their name for a name that `parts` returned: norm1.weight -> ln_1.weight."""
        for ours, theirs in self.names.items():
            name = name.replace(ours, theirs)
        return name.replace("norm.", self.last) if name.startswith("norm.") else name


def _gpt2_parts(name: str, t: Tensor, m: ModelConfig) -> dict[str, Tensor]:
    """Return {name: their tensor} for our tensor `t`: matrices of blocks become (in, out)."""
    import torch

    if ".qkv." in name:
        t = torch.cat(_queries_keys_values(t, m))
    return {name: t.mT if t.ndim == 2 and name.startswith("blocks.") else t}


def _gpt2_whole(name: str, parts: Sequence[Tensor], m: ModelConfig) -> Tensor:
    """Inverse of `_gpt2_parts`: return our tensor. `parts`: a list with their tensor."""
    [t] = parts
    t = t.mT if t.ndim == 2 and name.startswith("blocks.") else t
    parts = t.split([m.H * m.E, m.G * m.E, m.G * m.E]) if ".qkv." in name else [t]
    return _llama_whole(name, parts, m)


def _llama_parts(name: str, t: Tensor, m: ModelConfig) -> dict[str, Tensor]:
    """Return their tensors for our tensor `t`: qkv becomes q_proj, k_proj and v_proj; gate_up
    becomes gate_proj and up_proj. The keys are our name with this replacement."""
    if ".qkv." in name:
        names = (name.replace("qkv", f"{letter}_proj") for letter in "qkv")
        return dict(zip(names, _queries_keys_values(t, m)))
    if ".gate_up." in name:
        return {name.replace("gate_up", f"{half}_proj"): part
                for half, part in zip(("gate", "up"), t.chunk(2))}
    return {name: t}


def _llama_whole(name: str, parts: Sequence[Tensor], m: ModelConfig) -> Tensor:
    """Inverse of `_llama_parts`: return our tensor, made of their tensors in the order of
    `parts`."""
    from lpkit.nn.adapters import side_by_side

    return side_by_side(parts, m.G if ".qkv." in name else 1, 0)


def _queries_keys_values(t: Tensor, m: ModelConfig) -> list[Tensor]:
    """Returns q (H E, ...), k (G E, ...) and v (G E, ...) of our qkv weight or bias ((H + 2 G) E,
    ...).

    Our rows are sorted by group: the H / G query heads of group 0, its key head, its value head,
    then group 1. Theirs are all query heads, all key heads, all value heads."""
    parts = t.unflatten(0, (m.G, m.H // m.G + 2, m.E)).split([m.H // m.G, 1, 1], dim=1)
    return [part.flatten(0, 2) for part in parts]


# our setting -> their key
COMMON = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
          "context": "max_position_embeddings", "kv_heads": "num_key_value_heads",
          "head_dim": "head_dim", "mlp_width": "intermediate_size", "norm_eps": "rms_norm_eps",
          "vocab": "vocab_size", "tied": "tie_word_embeddings"}
OF_GPT2 = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "context": "n_positions",
           "mlp_width": "n_inner", "norm_eps": "layer_norm_epsilon", "vocab": "vocab_size",
           "tied": "tie_word_embeddings"}
AT_FIRST, WINDOWS = "original_max_position_embeddings", ("sliding_window", "attention_chunk_size")
# keys of the RoPE scaling of Llama 3.1, and of RoPE, with the values that we compute
SLOWED = {"low_freq_factor": (SLOW,), "high_freq_factor": (FAST,), AT_FIRST: (TRAINED,)}
TURNED = {"rope_type": ("default", "llama3"), "partial_rotary_factor": (None, 1.0),
          "full_attention": (None,), "sliding_attention": (None,)}
# keys that transformers reads for every model class, with the values that we compute
ALWAYS = {"is_causal": (True,), "is_encoder_decoder": (False,), "auto_map": (None, {}),
          "per_layer_config": (None, {}), **dict.fromkeys((
              "attention_chunk_size", "quantization_config", "transformers_weights"), (None,))}
LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False}
UNBIASED, WHOLE = {"attention_bias": (False,)}, {"sliding_window": (None,)}
# with the value False, transformers ignores sliding_window
SWITCHED = {"use_sliding_window": (False,)}
FAMILIES = (
    Family(architecture="GPT2LMHeadModel", model_type="gpt2", prefix="transformer.",
           parts=_gpt2_parts, whole=_gpt2_whole, names=IN_GPT2, last="transformer.ln_f.",
           needs={"norm": "layernorm", "position": "learned", "mlp": "gelu", "bias": True,
                  "kv_heads": None, "qk_norm": False, "tied": True}, sizes=OF_GPT2,
           means=ALWAYS | WHOLE | {"activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                                   "scale_attn_weights": (True,), "add_cross_attention": (False,),
                                   "scale_attn_by_inverse_layer_idx": (False,)},
           defaults=dict(zip(OF_GPT2.values(), (12, 768, 12, 1024, None, 1e-5, 50257, True))),
           also={"hidden_size": "n_embd", "max_position_embeddings": "n_positions",
                 "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}),
    *(Family(architecture=f"{name}ForCausalLM", model_type=name.lower(), names=IN_LLAMA,
             needs=LLAMA | {"biased_qkv": bias, "qk_norm": norms}, last="model.norm.",
             prefix="model.", parts=_llama_parts, whole=_llama_whole, sizes=COMMON,
             means=ALWAYS | means | {"hidden_act": ("silu", "swish"), AT_FIRST: (None, TRAINED),
                                     "partial_rotary_factor": (None, 1.0)},
             defaults=dict(zip(COMMON.values(), (32, 4096, 32, *sizes, False))) | more)
      # sizes: defaults of context, kv_heads, head_dim, mlp_width, norm_eps, vocab
      for name, bias, norms, means, sizes, more in (
          ("Llama", False, False, UNBIASED | WHOLE | {"mlp_bias": (False,)},
           (2048, None, None, 11008, 1e-6, 32000), {}),
          ("Qwen2", True, False, SWITCHED, (32768, 32, None, 22016, 1e-6, 151936), {}),
          ("Qwen3", False, True, SWITCHED | UNBIASED, (32768, 32, 128, 22016, 1e-6, 151936), {}),
          ("Mistral", False, False, WHOLE, (131072, 8, None, 14336, 1e-6, 32000),
           {"sliding_window": 4096}))))


def of_model(m: ModelConfig) -> Family:
    """Returns the family that can express our model `m`. Raises ConfigError if there is none; the
    message names the settings that differ from the nearest family."""
    def differs(family: Family) -> dict[str, Any]:
        return {key: value for key, value in family.needs.items() if getattr(m, key) != value}

    nearest = min(FAMILIES, key=lambda family: len(differs(family)))
    keys = [*differs(nearest), *(key for key in ("attention", "block")
                                 if getattr(m, key) != getattr(type(m)(), key))]
    wrong = [f"model.{key}={getattr(m, key)}" for key in keys]
    wrong += [f"model.changes={change}" for change in m.changes]
    if wrong:
        wanted = ", ".join(f"model.{key}={value}" for key, value in differs(nearest).items())
        raise ConfigError(f"transformers has no model with {', '.join(wrong)}; the nearest, "
                          f"{nearest.architecture}, has {wanted or 'full attention, pre-norm'}")
    return nearest


def of_type(model_type: object) -> Family:
    """Returns the family whose `model_type` in config.json is this. Raises ConfigError if FAMILIES
    has none."""
    return pick({family.model_type: family for family in FAMILIES}, str(model_type), "model_type")


def described(path: Path) -> Config:
    """Returns a Config with the model that a `config.json` describes. It is the Config that `lpkit
    import` would make from the folder, but its sequences have at most MOST_TOKENS tokens. Reads
    only this file. Raises ConfigError."""
    settings = records.of_others(path)
    try:
        m = of_type(settings.get("model_type")).model(settings)
    except ConfigError as error:
        raise ConfigError(f"{error}; in Python, lpkit.predict(model, batch) predicts any "
                          f"torch.nn.Module, and weights are not needed: make the model under "
                          f"torch.device('meta')") from None
    in_bf16 = settings.get("dtype", settings.get("torch_dtype")) == "bfloat16"
    # learned positions are parameters, so a shorter context would be another model
    context = min(m.T, MOST_TOKENS) if POSITIONS[m.position].turns else m.T
    return Config(model=m).replace({"model.context": context, "steps": 1,
                                    "memory.param_dtype": "bf16" if in_bf16 else "fp32"})
