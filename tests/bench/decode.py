"""A token for one sequence: the kit's cache beside `transformers.generate` with its own, the same
weights, the same greedy tokens; and a late position beside an early one. One thread, float32."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lessons.l12_flash_attention import at
from lpkit.commands import needs
from lpkit.config import Config
from lpkit.exchange.families import of_model
from lpkit.training.sampling import generate
from lpkit.training.training import RandomTokens, Training
from tests.bench.harness import ROUNDS, Result, race

FASTER, SLOWER = 2.0, 1.5       # than the peer, at least; at 1,024 than at 64, at most
EARLY, LATE, NEW = 64, 1024, 64
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.tied": False, "model.kv_heads": 2}


def as_transformers(training: Training) -> Any:
    """The same model as transformers has it."""
    import transformers

    m = training.config.model
    kind = of_model(m)
    config = transformers.AutoConfig.for_model(**kind.config(m))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    left = model.load_state_dict(kind.weights(training.model.state_dict(), m), strict=False)
    tied = ["lm_head.weight"] if m.tied else []
    assert not left.unexpected_keys and left.missing_keys == tied, left
    model.tie_weights()
    model.generation_config.update(pad_token_id=0, bos_token_id=None, eos_token_id=None)
    return model


# the last is bound by its weights, which both read from memory
CASES: dict[str, tuple[dict[str, Any], float | None]] = {
    "cpu-3m": ({}, FASTER),
    "4 x 256, as Llama, 4 heads a group": ({**LLAMA, "model.heads": 8}, FASTER),
    "1 x 768, as GPT-2": ({"model.layers": 1, "model.width": 768, "model.heads": 12,
                           "model.vocab": 50_304}, None),
}


def run(rounds: int = ROUNDS) -> list[Result]:
    """Raises ConfigError where transformers is not installed."""
    needs("bench decode", "transformers")
    results = []
    for case, (changed, target) in CASES.items():
        config = Config().replace({"model.context": 2 * LATE, **changed, "system.device": "cpu",
                                   "system.threads": 1, "precision.recipe": "fp32"})
        ours = Training.build(config, data=RandomTokens(config))
        ours.model.eval().requires_grad_(False)
        theirs = as_transformers(ours)
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
