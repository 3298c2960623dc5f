"""A token for one sequence: the kit's cache beside `transformers.generate` with its own, the same
weights, the same greedy tokens; and a late position beside an early one. One thread, float32."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpkit.bench.harness import ROUNDS, Result, race
from lpkit.commands import needs
from lpkit.config import Config, ModelConfig
from lpkit.studies.decoding import at
from lpkit.training.sampling import generate
from lpkit.training.training import RandomTokens, Training

FASTER, SLOWER = 2.0, 1.5       # than the peer, at least; at 1,024 than at 64, at most
EARLY, LATE, NEW = 64, 1024, 64
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.tied": False, "model.kv_heads": 2}
GPT2_NAMES = {"embed.": "transformer.wte.", "positions.transformer.wte.": "transformer.wpe.",
              "blocks.": "transformer.h.", "norm1.": "ln_1.", "norm2.": "ln_2.",
              "attention.qkv.": "attn.c_attn.", "attention.out.": "attn.c_proj.",
              "mlp.up.": "mlp.c_fc.", "mlp.down.": "mlp.c_proj.", "head.": "lm_head."}
LLAMA_NAMES = {"embed.": "model.embed_tokens.", "blocks.": "model.layers.",
               "norm1.": "input_layernorm.", "norm2.": "post_attention_layernorm.",
               "attention.": "self_attn.", ".out.": ".o_proj.", "mlp.down.": "mlp.down_proj.",
               "head.": "lm_head."}


def _renamed(name: str, names: dict[str, str], last: str) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name.replace("norm.", last) if name.startswith("norm.") else name


def _queries_keys_values(t: Tensor, m: ModelConfig) -> list[Tensor]:
    """The rows of each, heads one after the other; ours lie by group."""
    parts = t.unflatten(0, (m.G, m.H // m.G + 2, m.E)).split([m.H // m.G, 1, 1], dim=1)
    return [part.flatten(0, 2) for part in parts]


def gpt2(training: Training) -> Any:
    """The same model as transformers has it."""
    import transformers

    m, weights = training.config.model, {}
    for name, t in training.model.state_dict().items():
        if ".qkv." in name:
            t = torch.cat(_queries_keys_values(t, m))
        if t.ndim == 2 and name.startswith("blocks."):
            t = t.mT        # (in, out) there
        weights[_renamed(name, GPT2_NAMES, "transformer.ln_f.")] = t.clone()
    return _loaded(transformers.GPT2LMHeadModel, transformers.GPT2Config(
        vocab_size=m.V, n_positions=m.T, n_embd=m.D, n_layer=m.L, n_head=m.H, n_inner=m.F,
        layer_norm_epsilon=m.norm_eps, bos_token_id=None, eos_token_id=None), weights)


def llama(training: Training) -> Any:
    """The same model as transformers has it."""
    import transformers

    m, weights = training.config.model, {}
    for name, t in training.model.state_dict().items():
        parts = {name: t}
        if ".qkv." in name:
            names = (name.replace("qkv", f"{one}_proj") for one in "qkv")
            parts = dict(zip(names, _queries_keys_values(t, m)))
        elif ".gate_up." in name:
            names = (name.replace("gate_up", f"{one}_proj") for one in ("gate", "up"))
            parts = dict(zip(names, t.chunk(2)))
        weights |= {_renamed(one, LLAMA_NAMES, "model.norm."): part.clone()
                    for one, part in parts.items()}
    return _loaded(transformers.LlamaForCausalLM, transformers.LlamaConfig(
        vocab_size=m.V, max_position_embeddings=m.T, hidden_size=m.D, num_hidden_layers=m.L,
        num_attention_heads=m.H, num_key_value_heads=m.G, intermediate_size=m.F,
        rms_norm_eps=m.norm_eps, tie_word_embeddings=m.tied, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta}), weights)


def _loaded(kind: Any, config: Any, weights: dict[str, Tensor]) -> Any:
    model = kind(config).eval()
    model.load_state_dict(weights, strict=True)
    model.generation_config.update(pad_token_id=0, bos_token_id=None, eos_token_id=None)
    return model


# the last is bound by its weights, which both read from memory
CASES: dict[str, tuple[dict[str, Any], Callable[[Training], Any], float | None]] = {
    "cpu-3m": ({}, gpt2, FASTER),
    "4 x 256, as Llama, 4 heads a group": ({**LLAMA, "model.heads": 8}, llama, FASTER),
    "1 x 768, as GPT-2": ({"model.layers": 1, "model.width": 768, "model.heads": 12,
                           "model.vocab": 50_304}, gpt2, None),
}


def run(rounds: int = ROUNDS) -> list[Result]:
    """Raises ConfigError where transformers is not installed."""
    needs("bench decode", "transformers")
    results = []
    for case, (changed, peer, target) in CASES.items():
        config = Config().replace({"model.context": 2 * LATE, **changed, "system.device": "cpu",
                                   "system.threads": 1, "precision.recipe": "fp32"})
        ours = Training.build(config, data=RandomTokens(config))
        ours.model.eval().requires_grad_(False)
        theirs = peer(ours)
        prompt = torch.randint(config.model.V, (1, EARLY),
                               generator=torch.Generator().manual_seed(0))
        steps = {"kit": partial(_ours, ours, prompt), "peer": partial(_theirs, theirs, prompt)}
        facts = {"prompt": EARLY, "new_tokens": NEW, "precision": "float32"}
        packages = ("torch", "transformers")
        results += race("decode", ours=steps["kit"], peers={"transformers.generate": steps["peer"]},
                        check=partial(_agree, *steps.values()), target=target, rounds=rounds,
                        case=f"{case}: {NEW} tokens after {EARLY}", packages=packages, facts=facts)
        early = {f"position {EARLY}": at(ours, EARLY)[0]}
        results += race("decode", ours=at(ours, LATE)[0], peers=early,
                        target=SLOWER, better="lower", rounds=max(rounds, ROUNDS),
                        case=f"{case}: position {LATE:,}", packages=packages, facts=facts)
    return results


def _ours(training: Training, prompt: Tensor) -> list[int]:
    steps = generate(training, prompt.tolist(), NEW, 0, None, [torch.Generator()])
    return list(itertools.chain.from_iterable(steps))


def _theirs(model: Any, prompt: Tensor) -> list[int]:
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                         use_cache=True, max_new_tokens=NEW)
    return out[0, prompt.shape[1]:].tolist()


def _agree(ours: Callable[[], list[int]], theirs: Callable[[], list[int]]) -> None:
    mine, other = ours(), theirs()
    assert mine == other, f"greedy tokens differ: {mine} and {other}"
