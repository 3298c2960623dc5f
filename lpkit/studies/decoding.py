"""A token at its place in a sequence, read beside the live cache of those before it."""

from collections.abc import Callable

import torch
from torch import Tensor

from lpkit.hardware import synchronised
from lpkit.nn.kv_cache import Cache, new_cache
from lpkit.training.training import Training


def at(training: Training, place: int, format: str = "same") -> tuple[Callable[[], Tensor], Cache]:
    """Reads a token after `place` others, again and again: a call that waits for the device, and
    the cache, in float32, which has room for them all. The model is left in evaluation."""
    m, device = training.config.model, training.device
    training.model.eval().requires_grad_(False)
    cache = new_cache(m, tokens=place + 1, format=format, dtype=torch.float32, device=device)
    with torch.no_grad():
        training.model.hidden(torch.randint(m.V, (1, place), device=device), cache)
    given = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def step() -> Tensor:
        cache.lengths.fill_(place)
        return training.logits(given, cache)

    return synchronised(step, device), cache
