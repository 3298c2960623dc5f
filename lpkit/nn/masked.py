"""The encoder of a masked autoencoder (`lpkit.techniques.masked`)."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from lpkit.techniques.masked import Autoencoder, hidden_tokens


class Encoder(nn.Module):
    """Runs the first layers over the tokens that are not `mask`. Embeddings of masks stay."""

    def __init__(self, settings: Autoencoder, mask: int):
        super().__init__()
        self.settings, self.mask = settings, mask

    def forward(self, x: Tensor, tokens: Tensor, positions: nn.Module,
                blocks: Iterator[tuple[int, nn.Module]]) -> Tensor:
        """(B, T, D) -> (B, T, D); takes its layers from `blocks`."""
        B, T = tokens.shape
        n = T - hidden_tokens(self.settings.hidden, T)
        # visible ones first, in their order; `gather` would keep x for backward
        places = (tokens == self.mask).byte().argsort(dim=1, stable=True)[:, :n]
        rows = (places + T * torch.arange(B, device=x.device)[:, None]).flatten()
        seen = x.flatten(0, 1).index_select(0, rows).view(B, n, -1)
        rotation = positions.rotation(n, places, seen)
        for layer, block in islice(blocks, self.settings.encoder_layers):
            seen = block(seen, rotation, None, layer)
        seen = seen.flatten(0, 1).type_as(x)
        return x.flatten(0, 1).scatter(0, rows[:, None].expand_as(seen), seen).view_as(x)


def encode_visible(model: nn.Module, settings: Autoencoder) -> None:
    model.encoder = Encoder(settings, model.config.V - 1)
