"""Generates text from a run, one token at a time for each prompt, with a key/value cache.

Prompts are read one by one by the run's own attention backend, each into its row of the cache, so
that nothing is padded. Then all rows take a step together, each at its own position. If the cache
is full and positions are rotary, it drops its oldest key for each new one. With learned positions,
or a table of blocks, a full row starts again from its newer half.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lpkit.config import Config, MemoryConfig
from lpkit.datasets.tokenizers import tokenizer_from_dict
from lpkit.errors import ConfigError, pick
from lpkit.kernels.wide_product import WideLinear
from lpkit.nn.kv_cache import Cache, new_cache
from lpkit.precision.compute import compute_dtype
from lpkit.techniques.caches import CACHES, refuse_keys_to_come
from lpkit.techniques.layouts import Layout
from lpkit.training import checkpoint
from lpkit.training.runs import Run
from lpkit.training.training import RandomTokens, Training
from lpkit.values import Count, Place, PositiveOrZero, Seed, checked, utf8


@checked
def sample(run: Run | Place, *, prompt: str | Sequence[str] = "\n", tokens: Count = 200,
           temperature: PositiveOrZero = 0.8, top_k: Count | None = 50, seed: Seed = 0,
           device: str = "cpu", cache: str = "same", special_tokens: bool = False
           ) -> str | list[str]:
    """Returns the prompt and `tokens` more tokens, from the newest good checkpoint of `run`; for
    several prompts a list. `temperature` 0 is greedy. Otherwise prompt i draws with seed + i, as it
    would alone. `cache` is a row of `techniques.caches.CACHES`. With `special_tokens`, prompts may
    spell special tokens. End tokens end texts.

    If the context is full, rotary positions lose the oldest token for each new one. Learned
    positions and block-sparse attention start again from the newer half. If a prompt is longer than
    the context, only its end is read.

    Raises ConfigError for a folder without a run or a checkpoint, an empty prompt, or bad settings.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    pick(CACHES, cache, "cache")        # before loading, which may take minutes
    refuse_keys_to_come(run.config.model)
    training = cast_once(trained(run, device))
    tokenizer = tokenizer_from_dict(run.tokenizer)
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    for text in texts:
        utf8("prompt", text)
    prompts = [tokenizer.prompt(text, special_tokens) for text in texts]
    if not prompts:
        raise ConfigError("there is no prompt in the list; give at least one")
    if not all(prompts):
        which = f"prompt {prompts.index([]) + 1}" if len(prompts) > 1 else "the prompt"
        raise ConfigError(f"{which} is empty; give at least one character")
    rngs = [torch.Generator(device).manual_seed((seed + i) % 2**63) for i in range(len(prompts))]
    steps, ended = [], {}
    for step in generate(training, prompts, tokens, temperature, top_k, rngs, cache):
        ended = {i: len(steps) for i, token in enumerate(step) if token in tokenizer.ends} | ended
        steps.append(step)
        if len(ended) == len(prompts):
            break
    for i, (ids, new) in enumerate(zip(prompts, zip(*steps))):
        texts[i] += tokenizer.decode([*ids, *new[:ended.get(i)]])[len(tokenizer.decode(ids)):]
    return texts[0] if isinstance(prompt, str) else texts


def trained(run: Run, device: str = "cpu") -> Training:
    """Returns the trained model of `run` in evaluation mode, with its newest good weights. Newer
    checkpoints that are damaged are named on standard error.

    Raises ConfigError for a run without a checkpoint.
    """
    # also in a trace, if the traced run's objective needs this model
    with unset_fake_temporarily():
        saved, _ = checkpoint.load_latest(
            run.checkpoints, run=run.identity["run"], only=checkpoint.WEIGHTS,
            lack=f"{str(run.path)!r} has no checkpoint to sample from")
    for problem in run.problems:
        print(f"lpkit: {problem}", file=sys.stderr)
    # sampling uses only one of the memory techniques, the dtype of the parameters
    config = replace(run.config, memory=MemoryConfig(param_dtype=run.config.memory.param_dtype),
                     parallel=Layout(), objective=Config().objective)
    # a single token is too little work for several threads
    config = config.replace({"system.device": device, "system.compile": False,
                             "system.threads": config.system.threads or 1})
    if run.environment.get("chosen", {}).get("device", {}).get("used") != device:
        # the requested backend may not run on this device
        config = config.replace({"precision.backend": "auto"})
    training = Training.build(config, before=run.environment, data=RandomTokens(config, device))
    training.start.refuse_other(run)
    training.load_model(saved.tensors, source=saved.path)
    # otherwise a layer also casts for a backward pass, which needs whole blocks of tokens
    training.model.eval().requires_grad_(False)
    return training


def cast_once(training: Training) -> Training:
    """Casts the weights of Linears once, to the dtype to which autocast would cast them for each
    token: it caches no cast of a tensor without a gradient. The numbers are the same."""
    dtype = compute_dtype(training.decisions.recipe)
    for module in training.model.modules() if dtype else ():
        if type(module) in (nn.Linear, WideLinear):
            for name, p in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(p.to(dtype), requires_grad=False))
    return training


@torch.inference_mode()
def generate(training: Training, prompts: Sequence[Sequence[int]], count: int, temperature: float,
             top_k: int | None, rngs: Sequence[torch.Generator],
             format: str = "same") -> Iterator[list[int]]:
    """Yields a token for each prompt, `count` times. Prompts are read one by one, so that none is
    padded; then all take a step together."""
    config, device = training.config.model, training.device
    dtype = compute_dtype(training.decisions.recipe) or next(training.model.parameters()).dtype
    seen = [list(ids) for ids in prompts]
    cache = new_cache(config, len(seen), tokens=max(map(len, seen)) + count, format=format,
                      dtype=dtype, device=device)
    for b, ids in enumerate(seen):
        _read(training, ids, cache.row(b))
    for _ in range(count):
        if not cache.goes_on:
            for b, length in enumerate(cache.lengths.tolist()):
                if length == config.T:
                    _read(training, seen[b], cache.row(b))
        given = torch.tensor([ids[-1:] for ids in seen], device=device)
        logits = training.logits(given, cache)[:, -1]
        new = [choose(row, temperature, top_k, rng)
               for row, rng in zip(logits, rngs, strict=True)]
        for ids, token in zip(seen, new, strict=True):
            ids.append(token)
        yield new


def _read(training: Training, ids: list[int], cache: Cache) -> None:
    """Reads all but the last token of a sequence into its row. If the sequence is longer than the
    context, only its end is read: as much as fits, or half of it if the cache cannot drop keys."""
    cache.clear()
    T = training.config.model.T
    given = ids[-(T if cache.goes_on else max(1, T // 2)):] if len(ids) >= T else ids
    if len(given) > 1 or training.model.prompt is not None:
        read = torch.tensor([given[:-1]], dtype=torch.int64, device=training.device)
        with training.decisions.autocast:
            training.model.hidden(read, cache)


def choose(logits: Tensor, temperature: float, top_k: int | None, rng: torch.Generator) -> int:
    """Draws one token from logits (V,). Raises ConfigError if they are NaN or infinite."""
    if not torch.isfinite(logits).all():
        raise ConfigError("the logits are NaN or infinite; sample a run whose loss is a number")
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=rng))
