"""Text from a run: one token at a time, with a key/value cache."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lpkit.config import MemoryConfig
from lpkit.datasets import tokenizer_from_dict
from lpkit.errors import ConfigError
from lpkit.nn.transformer import KVCache
from lpkit.precision.compute import compute_dtype
from lpkit.training import checkpoint
from lpkit.training.runs import Run
from lpkit.training.training import RandomTokens, Training
from lpkit.values import Count, Place, PositiveOrZero, Seed, checked


@checked
def sample(run: Run | Place, *, prompt: str = "\n", tokens: Count = 200,
           temperature: PositiveOrZero = 0.8, top_k: Count | None = 50, seed: Seed = 0,
           device: str = "cpu") -> str:
    """The prompt and `tokens` more, from the newest good checkpoint of `run`. `temperature` 0 is
    greedy.

    Raises ConfigError for a folder without a run or a checkpoint, an empty prompt, or bad settings.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    training = trained(run, device)
    tokenizer = tokenizer_from_dict(run.tokenizer)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ConfigError("the prompt is empty; give at least one character")
    rng = torch.Generator(device).manual_seed(seed)
    new = list(_generate(training, ids, tokens, temperature, top_k, rng))
    return tokenizer.decode([*ids, *new])


def trained(run: Run, device: str = "cpu") -> Training:
    """The model of `run` as it was trained, with its newest good weights, in evaluation. Standard
    error says which newer ones were damaged.

    Raises ConfigError for a run without a checkpoint.
    """
    found, problems = checkpoint.load_latest(run.checkpoints, run=run.identity["run"],
                                             only="model/", quarantine=False)
    if found is None:
        said = "; ".join([f"{str(run.path)!r} has no checkpoint to sample from", *problems])
        raise ConfigError(said)
    for problem in problems:
        print(f"lpkit: the weights are those of step {found.step}: {problem}", file=sys.stderr)
    # of the memory techniques, sampling needs the dtype of the parameters alone
    config = replace(run.config, memory=MemoryConfig(param_dtype=run.config.memory.param_dtype))
    # and one token at a time is small work for one thread
    config = config.replace({"system.device": device, "system.compile": False,
                             "system.threads": config.system.threads or 1})
    if run.environment.get("chosen", {}).get("device", {}).get("used") != device:
        config = config.replace({"precision.backend": "auto"})  # the one asked for may not run here
    training = Training.build(config, before=run.environment, data=RandomTokens(config, device))
    training.load_model(found.tensors, source=found.path)
    # else a layer casts for a backward pass too, which wants whole blocks of tokens
    training.model.eval().requires_grad_(False)
    return training


def _generate(training: Training, ids: list[int], count: int, temperature: float, top_k: int | None,
              rng: torch.Generator) -> Iterator[int]:
    """When the context is full, begin again from its newer half."""
    config, device = training.config.model, training.device
    dtype = compute_dtype(training.decisions.recipe) or next(training.model.parameters()).dtype
    seen, cache = list(ids), None
    for _ in range(count):
        if cache is None or cache.length == config.T:
            cache = KVCache(config, 1, dtype=dtype, device=device)
            given = seen[-max(1, config.T // 2):] if len(seen) >= config.T else seen
        logits = training.logits(torch.tensor([given], device=device), cache)[0, -1]
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
