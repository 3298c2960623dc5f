"""Generate text with the model of a run, one token at a time for each prompt, with a key/value
cache.

First the model reads each prompt by itself, into its row of the cache, so that no prompt is padded.
Then all rows take each step together, each row at its own position. When a row of the cache is
full: with rotary positions, each new key replaces the oldest key; with learned positions, or
block-sparse attention, the row is computed again from the newer half of its tokens.
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
    """Return the prompt followed by up to `tokens` generated tokens, as text; for a list of
    prompts, return a list of texts. The weights are from the newest good checkpoint of `run`.

    temperature:    0 takes the most probable token. Otherwise tokens are drawn; prompt i uses the
                    seed `seed` + i, so that its text does not depend on the other prompts
    top_k:          draw from the k most probable tokens only; None: from all tokens
    cache:          format of the key/value cache, a row of `techniques.caches.CACHES`
    special_tokens: special tokens may be written in the prompt

    A text ends early at an end token. If the context is full, see above. If a prompt is longer than
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
    """Return a Training with the model of `run` in evaluation mode, with the weights of its newest
    good checkpoint. Damaged checkpoints and files are named on standard error.

    Raises ConfigError for a run without a checkpoint.
    """
    # The caller may be a trace, which uses fake tensors (an objective may need this model): the
    # checkpoint is read with real tensors.
    with unset_fake_temporarily():
        saved, _ = checkpoint.load_latest(
            run.checkpoints, run=run.identity["run"], only=checkpoint.WEIGHTS,
            lack=f"{str(run.path)!r} has no checkpoint to sample from")
    for problem in run.problems:
        print(f"lpkit: {problem}", file=sys.stderr)
    # of the memory techniques, only the dtype of the parameters has an effect on sampling
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
    # Without requires_grad_(False), a layer would also cast its input for the backward pass, which
    # needs whole blocks of tokens.
    training.model.eval().requires_grad_(False)
    return training


def cast_once(training: Training) -> Training:
    """Cast the weights of Linears to the dtype of autocast, in place, and return `training`. The
    numbers stay the same. Otherwise autocast would cast the weights again for each token, because
    it caches only casts of tensors that require a gradient."""
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
    """Yield a list with the next token of each prompt, `count` times.

    prompts: token ids of each prompt
    rngs:    a random generator for each prompt
    format:  format of the key/value cache
    Other arguments are as in `sample`.
    """
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
    """Compute the keys and values of all but the last token of `ids`, and store them in `cache`,
    the row of this sequence. If the sequence fills the context (T tokens), only its end is read:
    the last T tokens, or the last T / 2 if the cache cannot drop its oldest key."""
    cache.clear()
    T = training.config.model.T
    given = ids[-(T if cache.goes_on else max(1, T // 2)):] if len(ids) >= T else ids
    if len(given) > 1 or training.model.prompt is not None:
        read = torch.tensor([given[:-1]], dtype=torch.int64, device=training.device)
        with training.decisions.autocast:
            training.model.hidden(read, cache)


def choose(logits: Tensor, temperature: float, top_k: int | None, rng: torch.Generator) -> int:
    """Return one token, drawn from logits (V,). Raises ConfigError for NaN or infinite logits."""
    if not torch.isfinite(logits).all():
        raise ConfigError("the logits are NaN or infinite; sample a run whose loss is a number")
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=rng))
