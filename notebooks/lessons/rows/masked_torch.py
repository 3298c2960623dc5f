"""The policy that hides tokens, and the encoder of a masked autoencoder (rows of `masked.py`)."""

from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from lessons.rows.masked import Autoencoder, hidden_tokens
from lpkit.contracts import Batch
from lpkit.datasets.policies import RandomWindows
from lpkit.errors import ConfigError


class Masked(RandomWindows):
    """Targets are the tokens themselves. An equal number of tokens per sequence, drawn by seed and
    step, is replaced by `mask`; only these tokens have a weight in the loss."""

    def __init__(self, *, share: float, mask: int, **settings):
        super().__init__(**settings)
        self.hidden, self.mask = hidden_tokens(share, self.T), mask

    def batch(self, step: int) -> Batch:
        tokens = super().batch(step).tokens
        if (tokens >= self.mask).any():
            raise ConfigError(f"data.policy.mask={self.mask} is a token of the text, or less; set "
                              f"it to the tokenizer's vocabulary, and model.vocab to one more")
        drawn = np.random.default_rng((self.seed, step)).random(tokens.shape)
        places = torch.from_numpy(drawn.argpartition(self.hidden)[:, :self.hidden])
        hidden = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, places, True)
        return Batch(tokens.masked_fill(hidden, self.mask), tokens, weights=hidden.float())


def encode_visible(model: nn.Module, settings: Autoencoder) -> None:
    model.encoder = partial(encoded, settings, model.config.V - 1)


def encoded(settings: Autoencoder, mask: int, x: Tensor, tokens: Tensor, positions: nn.Module,
            blocks) -> Tensor:
    """(B, T, D) -> (B, T, D). Takes the first layers from `blocks`, an iterator, and runs them on
    the tokens that are not `mask`. Masked tokens keep their embedding."""
    (B, T), x = tokens.shape, x.flatten(0, 1)
    n = T - hidden_tokens(settings.hidden, T)
    # visible tokens first, in order; `gather` would save x for backward
    places = (tokens == mask).byte().argsort(dim=1, stable=True)[:, :n]
    rows = (places + T * torch.arange(B, device=x.device)[:, None]).flatten()
    seen = x.index_select(0, rows).view(B, n, -1)
    rotation = positions.rotation(n, places, seen)
    for layer, block in islice(blocks, settings.encoder_layers):
        seen = block(seen, rotation, None, layer)
    return x.index_put((rows,), seen.flatten(0, 1).type_as(x)).view(B, T, -1)
