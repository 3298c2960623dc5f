"""What a model is called elsewhere: rows that read both ways, for export and import.

A family says which models it has, the names of its settings and weights there, and how a tensor of
ours is made of those of theirs: heads by group here, one after the other there; `gate_up` is two;
GPT-2's Conv1D lies transposed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lpkit.config import ModelConfig
from lpkit.errors import ConfigError, pick, shown
from lpkit.nn.adapters import side_by_side
from lpkit.nn.layers import FAST, SLOW, TRAINED

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
    """`needs`: settings of the model. `names`: ours, and what to write instead, one after the
    other; `last`: the last norm; `prefix`: what the names lack in a file of the bare model.
    `parts` makes of a name and tensor of ours those of theirs, and `whole` one of ours of them.
    `sizes`: settings of ours by the names that they have there. `means`: other settings of theirs
    that change what is computed, and the values under which it is what we compute, the one that
    is meant where none is given first.
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
    tied: bool = False      # where their config does not say
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def config(self, m: ModelConfig) -> dict[str, Any]:
        """Returns what `config.json` says of a model of ours."""
        ours = vars(m) | {"kv_heads": m.G, "head_dim": m.E, "mlp_width": m.F}
        found = {"architectures": [self.architecture], "model_type": self.model_type,
                 "vocab_size": m.V, "tie_word_embeddings": m.tied, "bos_token_id": None,
                 "eos_token_id": None, **{there: ours[key] for key, there in self.sizes.items()}}
        if self.needs["position"] == "rope":
            found["rope_parameters"] = {"rope_type": "default", "rope_theta": m.rope_theta}
            if m.rope_factor != 1:
                found["rope_parameters"] |= SLOWED | {"factor": m.rope_factor}
        return found

    def model(self, said: Mapping[str, Any]) -> ModelConfig:
        """Returns the model that a `config.json` describes. Raises ConfigError for one that is not
        computed as ours are, or whose sizes are no sizes."""
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"config.json has rope_parameters={shown(rope)}, which must be an "
                              f"object; get the folder again")
        flat = {**said, **{f"rope {key}": value for key, value in rope.items()}}
        for key, fine in self.means.items():
            if flat.get(key, fine[0]) not in fine:
                raise ConfigError(f"a {self.model_type} model with {key}={shown(flat[key])} computes "
                                  f"something else than this kit's; {key} may be "
                                  f"{' or '.join(map(str, fine))}")
        lacks = [there for key, there in self.sizes.items() if said.get(there) is None
                 and key not in self.defaults]
        if lacks or "vocab_size" not in said:
            raise ConfigError(f"config.json of a {self.model_type} model has no "
                              f"{', '.join(lacks) or 'vocab_size'}; get the whole folder again")
        sizes = {key: self.defaults.get(key) if said.get(there) is None else said[there]
                 for key, there in self.sizes.items()}
        if self.needs["position"] == "rope":
            sizes["rope_theta"] = float(rope.get("rope_theta") or said.get("rope_theta") or 1e4)
            if "llama3" in (rope.get("rope_type"), rope.get("type")):
                sizes["rope_factor"] = float(rope.get("factor", 1))
        needs = {"qkv_bias" if key == "biased_qkv" else key: due for key, due in self.needs.items()}
        return ModelConfig(**needs | sizes | {
            "vocab": said["vocab_size"], "tied": said.get("tie_word_embeddings", self.tied)})

    def weights(self, ours: Mapping[str, Tensor], m: ModelConfig) -> dict[str, Tensor]:
        return {self.named(one): part.contiguous() for name, t in ours.items()
                if not (m.tied and name == "head.weight")
                for one, part in self.parts(name, t, m).items()}

    def named(self, name: str) -> str:
        """Returns the name there of a parameter of ours, or of a part of one."""
        for ours, theirs in self.names.items():
            name = name.replace(ours, theirs)
        return name.replace("norm.", self.last) if name.startswith("norm.") else name


def _gpt2_parts(name: str, t: Tensor, m: ModelConfig) -> dict[str, Tensor]:
    if ".qkv." in name:
        t = torch.cat(_queries_keys_values(t, m))
    return {name: t.mT if t.ndim == 2 and name.startswith("blocks.") else t}    # (in, out) there


def _gpt2_whole(name: str, parts: Sequence[Tensor], m: ModelConfig) -> Tensor:
    [t] = parts
    t = t.mT if t.ndim == 2 and name.startswith("blocks.") else t
    parts = t.split([m.H * m.E, m.G * m.E, m.G * m.E]) if ".qkv." in name else [t]
    return _llama_whole(name, parts, m)


def _llama_parts(name: str, t: Tensor, m: ModelConfig) -> dict[str, Tensor]:
    if ".qkv." in name:
        names = (name.replace("qkv", f"{one}_proj") for one in "qkv")
        return dict(zip(names, _queries_keys_values(t, m)))
    if ".gate_up." in name:
        return {name.replace("gate_up", f"{one}_proj"): part
                for one, part in zip(("gate", "up"), t.chunk(2))}
    return {name: t}


def _llama_whole(name: str, parts: Sequence[Tensor], m: ModelConfig) -> Tensor:
    return side_by_side(parts, m.G if ".qkv." in name else 1, 0)


def _queries_keys_values(t: Tensor, m: ModelConfig) -> list[Tensor]:
    """Returns the rows of each, heads one after the other; ours lie by group."""
    parts = t.unflatten(0, (m.G, m.H // m.G + 2, m.E)).split([m.H // m.G, 1, 1], dim=1)
    return [part.flatten(0, 2) for part in parts]


COMMON = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
          "context": "max_position_embeddings", "kv_heads": "num_key_value_heads",
          "head_dim": "head_dim", "mlp_width": "intermediate_size", "norm_eps": "rms_norm_eps"}
SLOWED = {"rope_type": "llama3", "low_freq_factor": SLOW, "high_freq_factor": FAST,
          "original_max_position_embeddings": TRAINED}
PLAIN = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
         "use_sliding_window": (False,), "quantization_config": (None,),
         "rope rope_type": ("default", "llama3"), "rope type": ("default", "llama3"),
         "rope partial_rotary_factor": (1.0,),
         **{f"rope {key}": (due,) for key, due in SLOWED.items() if key != "rope_type"}}
LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False}
FAMILIES = (
    Family(architecture="GPT2LMHeadModel", model_type="gpt2", prefix="transformer.",
           parts=_gpt2_parts, whole=_gpt2_whole, names=IN_GPT2, last="transformer.ln_f.", tied=True,
           needs={"norm": "layernorm", "position": "learned", "mlp": "gelu", "bias": True,
                  "kv_heads": None, "qk_norm": False, "tied": True},
           sizes={"layers": "n_layer", "width": "n_embd", "heads": "n_head",
                  "context": "n_positions", "mlp_width": "n_inner",
                  "norm_eps": "layer_norm_epsilon"},
           means={"activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                  "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
                  "add_cross_attention": (False,), "quantization_config": (None,)},
           defaults={"mlp_width": None, "norm_eps": 1e-5}),
    *(Family(architecture=f"{name}ForCausalLM", model_type=name.lower(), names=IN_LLAMA,
             needs=LLAMA | {"biased_qkv": bias, "qk_norm": norms}, last="model.norm.",
             prefix="model.", parts=_llama_parts, whole=_llama_whole, sizes=COMMON,
             means=PLAIN | more, defaults={"kv_heads": None, "head_dim": head_dim, "norm_eps": 1e-6})
      for name, bias, norms, head_dim, more in (
          ("Llama", False, False, None, {}), ("Qwen2", True, False, None, {}),
          ("Qwen3", False, True, 128, {}),
          ("Mistral", False, False, None, {"sliding_window": (None,)}))))


def of_model(m: ModelConfig) -> Family:
    """Raises ConfigError for a model that none of FAMILIES is."""
    def differs(one: Family) -> dict[str, Any]:
        return {key: due for key, due in one.needs.items() if getattr(m, key) != due}

    nearest = min(FAMILIES, key=lambda one: len(differs(one)))
    wrong = [f"model.{key}={getattr(m, key)}" for key in differs(nearest)]
    if m.attention != type(m)().attention:
        wrong.append(f"model.attention={m.attention}")
    wrong += [f"model.changes={one}" for one in m.changes]
    if m.block != type(m)().block:
        wrong.append(f"model.block={m.block}")
    if wrong:
        due = ", ".join(f"model.{key}={value}" for key, value in differs(nearest).items())
        raise ConfigError(f"transformers has no model with {', '.join(wrong)}; the nearest, "
                          f"{nearest.architecture}, has {due or 'full attention, pre-norm'}")
    return nearest


def of_type(model_type: object) -> Family:
    """Raises ConfigError for an architecture that none of FAMILIES is."""
    return pick({one.model_type: one for one in FAMILIES}, str(model_type), "model_type")
