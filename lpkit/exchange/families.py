"""Families of transformers' models: names, settings and layouts, for export and for import.

A family defines which of our models it contains, the names of their settings and weights in
transformers, and how a tensor of ours is made of theirs. The layouts differ:

    q, k, v    ours: one matrix with heads sorted by group; theirs: one after the other
    gate_up    ours: one matrix; theirs: two
    Conv1D     GPT-2 stores matrices transposed

Nothing imports torch before a tensor is converted, so `lpkit predict` of a `config.json` is fast.
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

MOST_TOKENS = 4096      # default limit of a sequence for a model that only a config.json describes

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
    """A family of models in transformers.

    needs:    our settings that every model of the family has
    names:    part of our parameter name -> replacement; applied in order
    last:     their prefix of the last norm
    prefix:   the prefix that their names lack in a file of the bare model
    parts:    (our name, our tensor, model) -> their tensors by name
    whole:    (our name, their tensors, model) -> our tensor
    sizes:    our setting -> their key
    means:    their other keys that change the computation -> the values with which it equals ours;
              the first value applies if the key is absent
    defaults: default values of their class
    also:     alternative key -> key that it overrides
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
        """Returns the `config.json` of a model of ours."""
        ours = vars(m) | {"kv_heads": m.G, "head_dim": m.E, "mlp_width": m.F}
        settings = {"architectures": [self.architecture], "model_type": self.model_type,
                 "bos_token_id": None, "eos_token_id": None,
                 **{there: ours[key] for key, there in self.sizes.items()}}
        if self.needs["position"] == "rope":
            settings["rope_parameters"] = {"rope_type": "default", "rope_theta": m.rope_theta}
            if m.rope_factor != 1:
                settings["rope_parameters"] |= {"rope_type": "llama3", "factor": m.rope_factor} | {
                    key: due for key, (due,) in SLOWED.items()}
        return settings

    def model(self, given: Mapping[str, Any]) -> ModelConfig:
        """Returns the model that transformers makes from a `config.json`. Raises ConfigError, which
        names the key, for an invalid size and for a model that this kit does not compute."""
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
        needs = {"qkv_bias" if key == "biased_qkv" else key: due for key, due in self.needs.items()}
        try:
            m = ModelConfig(**needs | {key: values.get(there) for key, there in sizes.items()})
        except ConfigError as error:
            sentence = str(error)
            for key, there in sizes.items():
                sentence = sentence.replace(f"model.{key}", there)
            raise ConfigError(f"config.json of a {self.model_type} model: {sentence}") from None
        # a window as long as the context masks nothing
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
        return {self.named(part_name): part.contiguous() for name, t in ours.items()
                if not (m.tied and name == "head.weight")
                for part_name, part in self.parts(name, t, m).items()}

    def named(self, name: str) -> str:
        """Returns their name of our parameter, or of a part of it."""
        for ours, theirs in self.names.items():
            name = name.replace(ours, theirs)
        return name.replace("norm.", self.last) if name.startswith("norm.") else name


def _gpt2_parts(name: str, t: Tensor, m: ModelConfig) -> dict[str, Tensor]:
    import torch

    if ".qkv." in name:
        t = torch.cat(_queries_keys_values(t, m))
    return {name: t.mT if t.ndim == 2 and name.startswith("blocks.") else t}    # theirs: (in, out)


def _gpt2_whole(name: str, parts: Sequence[Tensor], m: ModelConfig) -> Tensor:
    [t] = parts
    t = t.mT if t.ndim == 2 and name.startswith("blocks.") else t
    parts = t.split([m.H * m.E, m.G * m.E, m.G * m.E]) if ".qkv." in name else [t]
    return _llama_whole(name, parts, m)


def _llama_parts(name: str, t: Tensor, m: ModelConfig) -> dict[str, Tensor]:
    if ".qkv." in name:
        names = (name.replace("qkv", f"{letter}_proj") for letter in "qkv")
        return dict(zip(names, _queries_keys_values(t, m)))
    if ".gate_up." in name:
        return {name.replace("gate_up", f"{half}_proj"): part
                for half, part in zip(("gate", "up"), t.chunk(2))}
    return {name: t}


def _llama_whole(name: str, parts: Sequence[Tensor], m: ModelConfig) -> Tensor:
    from lpkit.nn.adapters import side_by_side

    return side_by_side(parts, m.G if ".qkv." in name else 1, 0)


def _queries_keys_values(t: Tensor, m: ModelConfig) -> list[Tensor]:
    """Returns the rows of q, of k and of v, with heads one after the other. Ours are sorted by
    group."""
    parts = t.unflatten(0, (m.G, m.H // m.G + 2, m.E)).split([m.H // m.G, 1, 1], dim=1)
    return [part.flatten(0, 2) for part in parts]


COMMON = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
          "context": "max_position_embeddings", "kv_heads": "num_key_value_heads",
          "head_dim": "head_dim", "mlp_width": "intermediate_size", "norm_eps": "rms_norm_eps",
          "vocab": "vocab_size", "tied": "tie_word_embeddings"}
OF_GPT2 = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "context": "n_positions",
           "mlp_width": "n_inner", "norm_eps": "layer_norm_epsilon", "vocab": "vocab_size",
           "tied": "tie_word_embeddings"}
AT_FIRST, WINDOWS = "original_max_position_embeddings", ("sliding_window", "attention_chunk_size")
SLOWED = {"low_freq_factor": (SLOW,), "high_freq_factor": (FAST,), AT_FIRST: (TRAINED,)}
TURNED = {"rope_type": ("default", "llama3"), "partial_rotary_factor": (None, 1.0),
          "full_attention": (None,), "sliding_attention": (None,)}
# keys that transformers reads for every class
ALWAYS = {"is_causal": (True,), "is_encoder_decoder": (False,), "auto_map": (None, {}),
          "per_layer_config": (None, {}), **dict.fromkeys((
              "attention_chunk_size", "quantization_config", "transformers_weights"), (None,))}
LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False}
UNBIASED, WHOLE = {"attention_bias": (False,)}, {"sliding_window": (None,)}
SWITCHED = {"use_sliding_window": (False,)}     # if false, sliding_window is ignored
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
    """Returns the family of a model. Raises ConfigError if FAMILIES has none."""
    def differs(family: Family) -> dict[str, Any]:
        return {key: due for key, due in family.needs.items() if getattr(m, key) != due}

    nearest = min(FAMILIES, key=lambda family: len(differs(family)))
    keys = [*differs(nearest), *(key for key in ("attention", "block")
                                 if getattr(m, key) != getattr(type(m)(), key))]
    wrong = [f"model.{key}={getattr(m, key)}" for key in keys]
    wrong += [f"model.changes={change}" for change in m.changes]
    if wrong:
        due = ", ".join(f"model.{key}={value}" for key, value in differs(nearest).items())
        raise ConfigError(f"transformers has no model with {', '.join(wrong)}; the nearest, "
                          f"{nearest.architecture}, has {due or 'full attention, pre-norm'}")
    return nearest


def of_type(model_type: object) -> Family:
    """Returns the family of a `model_type`. Raises ConfigError if FAMILIES has none."""
    return pick({family.model_type: family for family in FAMILIES}, str(model_type), "model_type")


def described(path: Path) -> Config:
    """Returns the Config of the model that a `config.json` describes. It is the Config that `lpkit
    import` would make from the folder, but with sequences of at most MOST_TOKENS. Reads only this
    file. Raises ConfigError."""
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
