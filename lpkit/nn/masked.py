"""The encoder of a masked autoencoder (`lpkit.techniques.masked`)."""

from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from lpkit.techniques.masked import Autoencoder, hidden_tokens


def encode_visible(model: nn.Module, settings: Autoencoder) -> None:
    model.encoder = partial(encoded, settings, model.config.V - 1)


def encoded(settings: Autoencoder, mask: int, x: Tensor, tokens: Tensor, positions: nn.Module,
            blocks) -> Tensor:
    """(B, T, D) -> (B, T, D). Takes the first layers from `blocks`, an iterator, and runs them over
    the tokens that are not `mask`: of these the embedding stays."""
    (B, T), x = tokens.shape, x.flatten(0, 1)
    n = T - hidden_tokens(settings.hidden, T)
    # visible ones first, in their order; `gather` would keep x for backward
    places = (tokens == mask).byte().argsort(dim=1, stable=True)[:, :n]
    rows = (places + T * torch.arange(B, device=x.device)[:, None]).flatten()
    seen = x.index_select(0, rows).view(B, n, -1)
    rotation = positions.rotation(n, places, seen)
    for layer, block in islice(blocks, settings.encoder_layers):
        seen = block(seen, rotation, None, layer)
    return x.index_put((rows,), seen.flatten(0, 1).type_as(x)).view(B, T, -1)
