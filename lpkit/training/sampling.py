"""Text from a run: one token at a time, with a key/value cache."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lpkit.datasets import tokenizer_from_dict
from lpkit.errors import ConfigError
from lpkit.nn.transformer import KVCache, Transformer
from lpkit.training import checkpoint, runs
from lpkit.training.runs import Run


def sample(run: Run | str | Path, *, prompt: str = "\n", tokens: int = 200, temperature: float = 0.8,
           top_k: int | None = 50, seed: int = 0, device: str = "cpu") -> str:
    """The prompt and `tokens` more, from the newest good checkpoint of `run`. `temperature` 0 is greedy.

    Raises ConfigError for a folder without a run or a checkpoint, an empty prompt, or bad settings.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    for name, value, low in (("tokens", tokens, 1), ("temperature", temperature, 0), ("top_k", top_k or 1, 1)):
        if value < low:
            raise ConfigError(f"{name} must be at least {low}, got {value}")
    found, problems = checkpoint.load_latest(run.checkpoints, only="model/", quarantine=False)
    if found is None:
        raise ConfigError(f"{str(run.path)!r} has no checkpoint to sample from" + "".join(f"; {p}" for p in problems))
    tokenizer = tokenizer_from_dict(run._json(runs.TOKENIZER))
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ConfigError("the prompt is empty; give at least one character")
    model = Transformer(run.config.model).to(device).eval()
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in ours.items():
            p.copy_(found.tensors[f"model/{name}"])
        new = list(_generate(model, ids, tokens, temperature, top_k, torch.Generator(device).manual_seed(seed)))
    return tokenizer.decode([*ids, *new])


def _generate(model: Transformer, ids: list[int], count: int, temperature: float, top_k: int | None,
              rng: torch.Generator) -> Iterator[int]:
    """When the context is full, begin again from its newer half."""
    config, device = model.config, model.embed.weight.device
    seen, cache = list(ids), None
    for _ in range(count):
        if cache is None or cache.length == config.T:
            cache = KVCache(config, 1, dtype=model.embed.weight.dtype, device=device)
            given = seen[-max(1, config.T // 2):] if len(seen) >= config.T else seen
        logits = model(torch.tensor([given], device=device), cache)[0, -1]
        token = choose(logits, temperature, top_k, rng)
        seen.append(token)
        given = [token]
        yield token


def choose(logits: Tensor, temperature: float, top_k: int | None, rng: torch.Generator) -> int:
    """One token from logits (V,)."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=rng))
