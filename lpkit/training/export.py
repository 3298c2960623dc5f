"""A run's weights as transformers reads them: `model.safetensors` beside a `config.json`.

    lpkit export runs/six --out six          then AutoModelForCausalLM.from_pretrained("six")

However many ranks wrote the checkpoint, tensors are whole here. A tied head is the embedding, and
is not in the file: transformers ties it again, and a tensor that is there twice is read twice.
Families are rows: what a model must be, what its parts are called there, and its config.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lpkit.config import ModelConfig
from lpkit.errors import ConfigError
from lpkit.files import own_folder, whole_folder
from lpkit.training import checkpoint
from lpkit.training.runs import Run
from lpkit.values import Folder, Place, checked

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
    other; `last`: the last norm. `parts` makes of a name and tensor of ours those of theirs."""

    architecture: str
    model_type: str
    needs: Mapping[str, Any]
    names: Mapping[str, str]
    last: str
    parts: Callable[[str, Tensor, ModelConfig], dict[str, Tensor]]
    sizes: Callable[[ModelConfig], dict[str, Any]]

    def config(self, m: ModelConfig) -> dict[str, Any]:
        return {"architectures": [self.architecture], "model_type": self.model_type,
                "vocab_size": m.V, "tie_word_embeddings": m.tied, "bos_token_id": None,
                "eos_token_id": None, **self.sizes(m)}

    def weights(self, ours: Mapping[str, Tensor], m: ModelConfig) -> dict[str, Tensor]:
        found = {}
        for name, t in ours.items():
            if m.tied and name == "head.weight":
                continue
            for one, part in self.parts(name, t, m).items():
                found[self._named(one)] = part.contiguous()
        return found

    def _named(self, name: str) -> str:
        for ours, theirs in self.names.items():
            name = name.replace(ours, theirs)
        return name.replace("norm.", self.last) if name.startswith("norm.") else name


def _gpt2_parts(name: str, t: Tensor, m: ModelConfig) -> dict[str, Tensor]:
    if ".qkv." in name:
        t = torch.cat(_queries_keys_values(t, m))
    return {name: t.mT if t.ndim == 2 and name.startswith("blocks.") else t}    # (in, out) there


def _llama_parts(name: str, t: Tensor, m: ModelConfig) -> dict[str, Tensor]:
    if ".qkv." in name:
        names = (name.replace("qkv", f"{one}_proj") for one in "qkv")
        return dict(zip(names, _queries_keys_values(t, m)))
    if ".gate_up." in name:
        return {name.replace("gate_up", f"{one}_proj"): part
                for one, part in zip(("gate", "up"), t.chunk(2))}
    return {name: t}


def _queries_keys_values(t: Tensor, m: ModelConfig) -> list[Tensor]:
    """The rows of each, heads one after the other; ours lie by group."""
    parts = t.unflatten(0, (m.G, m.H // m.G + 2, m.E)).split([m.H // m.G, 1, 1], dim=1)
    return [part.flatten(0, 2) for part in parts]


def _gpt2_sizes(m: ModelConfig) -> dict[str, Any]:
    return {"n_positions": m.T, "n_embd": m.D, "n_layer": m.L, "n_head": m.H, "n_inner": m.F,
            "layer_norm_epsilon": m.norm_eps}


def _llama_sizes(m: ModelConfig) -> dict[str, Any]:
    return {"max_position_embeddings": m.T, "hidden_size": m.D, "num_hidden_layers": m.L,
            "num_attention_heads": m.H, "num_key_value_heads": m.G, "head_dim": m.E,
            "intermediate_size": m.F, "rms_norm_eps": m.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta}}


LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False}
FAMILIES = (
    Family(architecture="GPT2LMHeadModel", model_type="gpt2", parts=_gpt2_parts, sizes=_gpt2_sizes,
           needs={"norm": "layernorm", "position": "learned", "mlp": "gelu", "bias": True,
                  "kv_heads": None, "qk_norm": False, "tied": True},
           names=IN_GPT2, last="transformer.ln_f."),
    *(Family(architecture=f"{name}ForCausalLM", model_type=name.lower(), names=IN_LLAMA,
             needs=LLAMA | {"biased_qkv": bias, "qk_norm": norms}, last="model.norm.",
             parts=_llama_parts, sizes=_llama_sizes)
      for name, bias, norms in (("Llama", False, False), ("Qwen2", True, False),
                                ("Qwen3", False, True))))


def family(m: ModelConfig) -> Family:
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


@checked
def export(run: Run | Place, out: Folder) -> Path:
    """Write the newest good weights of a run, in float32 or as it keeps them. The tokenizer is the
    run's own, tokenizer.json of its folder, and is not converted.

    Raises ConfigError for a model that transformers does not have, a run without a checkpoint, and
    a folder that is there already.
    """
    run, out = run if isinstance(run, Run) else Run.open(run), Path(out)
    m = run.config.model
    kind = family(m)
    if out.exists():
        raise ConfigError(f"{str(out)!r} is there already; choose another --out")
    saved, problems = checkpoint.load_latest(run.checkpoints, run=run.identity["run"],
                                             only=checkpoint.WEIGHTS, quarantine=False)
    if saved is None:
        raise ConfigError("; ".join([f"{str(run.path)!r} has no checkpoint", *problems]))
    names = {name.removeprefix("model/"): t
             for name, t in checkpoint.evaluated_weights(saved.tensors).items()}
    ours = {name: t for name, t in names.items() if name.endswith((".weight", ".bias"))}
    own_folder(out.parent)
    with whole_folder(out) as folder:
        save_file(kind.weights(ours, m), folder / "model.safetensors", metadata={"format": "pt"})
        about = kind.config(m) | {"torch_dtype": str(next(iter(ours.values())).dtype)[6:]}
        (folder / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    return out
