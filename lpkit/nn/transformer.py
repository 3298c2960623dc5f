"""A configurable decoder-only Transformer. With the right settings it is GPT-2 or Llama.

Techniques change the model from outside, after it is built: the code of the model does not depend
on what is quantised or sharded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.contracts import Attend
from lpkit.errors import ConfigError
from lpkit.kernels.pytorch import rotate_pytorch
from lpkit.nn.attention import able_backend
from lpkit.nn.layers import add_norm, linear
from lpkit.techniques.attention import KINDS
from lpkit.techniques.blocks import BLOCKS, MLPS, NORMS
from lpkit.techniques.operation import POSITIONS

if TYPE_CHECKING:   # only sampling creates a cache
    from lpkit.nn.kv_cache import Cache


class Attention(nn.Module):
    """Attention with q, k and v in one matmul. The rows of its weight are grouped by key/value
    head: for each key/value head, its H / G query heads, its key, its value. So a rank that has an
    equal share of the rows has an equal share of the heads. With `qk_norm`, q and k of each head
    have an RMSNorm before rotation (Qwen3, https://arxiv.org/abs/2505.09388).

    attend: the attention backend
    kind:   a module with the parameters of the kind of attention, for example sinks
    prefix: learned keys and values before the tokens, or None
    shape:  a function of (v, output of attention) that returns the input of the output projection;
            None: the output itself
    """

    kernels: ClassVar = {"rotate": "rotary"}
    rotate = staticmethod(rotate_pytorch)

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.G, self.E, self.queries, self.attend = config.G, config.E, config.H // config.G, attend
        self.project(config)
        self.kind = KINDS[config.attention.name].load()(config)
        self.q_norm = self.k_norm = self.prefix = self.shape = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(config.E, eps=config.norm_eps) for _ in range(2))

    def project(self, config: ModelConfig) -> None:
        self.qkv, self.out = linear(config, "attention.qkv"), linear(config, "attention.out")

    # (B, T, D) -> (B, T, H, E), (B, T, G, E), (B, T, G, E)
    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.qkv(x)      # with sequence parallelism, x has some tokens; rows has all tokens
        groups = rows.view(*rows.shape[:2], self.G, self.queries + 2, self.E)
        q, k, v = groups.split([self.queries, 1, 1], dim=3)
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)

    def step_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k together, (B, G, H / G + 1, E), since they rotate together, and v
        (B, G, 1, E), for one token x (B, 1, D)."""
        groups = self.qkv(x).view(len(x), self.G, -1, self.E)
        return groups.split([self.queries + 1, 1], dim=2)

    # (B, T, D) -> (B, T, D)
    def forward(self, x: Tensor, rotation, cache: Cache | None, layer: int,
                documents: Tensor | None = None) -> Tensor:
        if cache is not None and cache.stepping:
            return self.step(x, rotation, cache, layer)
        q, k, v = self.heads(x)
        if self.q_norm is not None:     # under autocast, the norms' results may be wider than v
            q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rotation is not None:
            rotate = self.rotate if rotation[0].ndim == 2 else rotate_pytorch
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        own = self.kind(x)
        if cache is None:
            out = self.attend(q, k, v, documents, own)
        else:
            out = cache.prompt(layer, self, q, k, v, documents, own)
        if self.shape is not None:
            out = self.shape(v, out)
        return self.out(out.transpose(1, 2).flatten(2))

    # (B, 1, D) -> (B, 1, D)
    def step(self, x: Tensor, rotation, cache: Cache, layer: int) -> Tensor:
        """Return the attention output for one token of each sequence, which attends to the cache.
        """
        qk, v = self.step_heads(x)
        if self.q_norm is not None:
            q, k = qk.split([self.queries, 1], dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2).type_as(v)
        if rotation is not None:
            # Kernels take angles (T, E). If positions differ between sequences, angles are
            # (B, 1, T, E), and PyTorch's version is used.
            rotate = self.rotate if rotation[0].ndim == 2 else rotate_pytorch
            qk = rotate(qk.reshape(len(x), -1, 1, self.E), *rotation).view(qk.shape)
        q, k = qk.split([self.queries, 1], dim=2)
        return self.out(self.read(cache, layer, q, k, v, self.kind(x)).reshape(len(x), 1, -1))

    def read(self, cache: Cache, layer: int, q: Tensor, k: Tensor, v: Tensor,
             own: Tensor | None) -> Tensor:
        """Return the input of the output projection, (B, G, H / G, E), for one token that attends
        to the cache: q (B, G, H / G, E), k and v (B, G, 1, E). own: the sinks, or None."""
        return cache.step(layer, self, q, k, v, own)


class Block(nn.Module):
    """A pre-norm block (Xiong et al. 2020, https://arxiv.org/abs/2002.04745)."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        norm, mlp = NORMS[config.norm].load(), MLPS[config.mlp].load()
        self.norm1, self.attention = norm(config), Attention(config, attend)
        self.norm2, self.mlp = norm(config), mlp(config)

    def forward(self, x: Tensor, rotation=None, cache: Cache | None = None,
                layer: int = 0, documents: Tensor | None = None) -> Tensor:
        delta = self.attention(self.norm1(x), rotation, cache, layer, documents)
        x, h = add_norm(self.norm2, x, delta)
        return x + self.mlp(h)


class Parallel(nn.Module):
    """A block with attention and MLP in parallel (Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311)."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.norm1 = NORMS[config.norm].load()(config)
        self.attention, self.mlp = Attention(config, attend), MLPS[config.mlp].load()(config)

    def forward(self, x: Tensor, rotation=None, cache: Cache | None = None,
                layer: int = 0, documents: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, rotation, cache, layer, documents)
        return x + self.mlp(h)


class Transformer(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V) in the compute dtype.

    vocabulary: with tensor parallelism, an object that computes nats from the part of the logits
                that this rank has (`lpkit.parallel.tensor.Vocabulary`); otherwise None
    """

    vocabulary: Any = None

    def __init__(self, config: ModelConfig, attend: Attend | None = None):
        super().__init__()
        self.config, attend = config, attend or able_backend(config)
        self.embed = nn.Embedding(config.V, config.D)
        self.positions = POSITIONS[config.position].load()(config)
        block = BLOCKS[config.block].load()
        self.blocks = nn.ModuleList(block(config, attend) for _ in range(config.L))
        self.norm = NORMS[config.norm].load()(config)
        self.head = nn.Linear(config.D, config.V, bias=False)
        self.prompt = None      # learned embeddings that precede the embeddings of the text
        self.encoder = None     # runs the first layers if they process only some of the tokens
        if config.tied:
            self.head.weight = self.embed.weight

    def hidden(self, tokens: Tensor, cache: Cache | None = None, documents: Tensor | None = None,
               places: Tensor | None = None, *, x: Tensor | None = None,
               layers: range | None = None) -> Tensor:
        """Return the hidden states (B, T, D) after the last norm, for tokens (B, T).

        cache:     of keys and values, for sampling
        documents: (B, T) int64 ids, for kinds of attention that need them
        places:    the position of each token, (T,) int64; None: 0, 1, 2, ...
        layers, x: for a stage of a pipeline: its layers, and the result of the previous stage,
                   (B, T, D), or None for the first stage. Only the last stage applies the norm
        Raises ConfigError if T exceeds the context.
        """
        T = tokens.shape[1]
        if T > self.config.T:
            raise ConfigError(f"{T} tokens do not fit model.context={self.config.T}")
        if documents is not None and documents.shape != tokens.shape:
            raise ConfigError(f"documents of {tuple(documents.shape)} do not fit tokens of "
                              f"{tuple(tokens.shape)}; give one id for each token")
        first, blocks = x is None, enumerate(self.blocks)
        if layers is not None:      # other layers may be on other ranks
            blocks = ((layer, self.blocks.get_submodule(str(layer))) for layer in layers)
        x, start, P = self.embed(tokens) if first else x, 0 if places is None else places, 0
        if self.prompt is not None and not (cache is not None and cache.lengths.any()):
            prompt = self.prompt.weight.type_as(x)
            x, P = torch.cat((prompt.expand(len(x), -1, -1), x), dim=1), len(prompt)
        if cache is not None:
            start = cache.begin(P + T)
        if documents is None and KINDS[self.config.attention.name].reads_ids:
            documents = torch.zeros_like(tokens)        # all tokens are one document
        x = self.positions.add(x, start) if first else x
        rotation = self.positions.rotation(P + T, start, x)
        if self.encoder is not None:
            x = self.encoder(x, tokens, self.positions, blocks)
        for layer, block in blocks:
            x = block(x, rotation, cache, layer, documents)
        if layers is not None and layers.stop < self.config.L:
            return x
        return self.norm(x[:, P:] if P else x)

    def forward(self, tokens: Tensor, cache: Cache | None = None, documents: Tensor | None = None,
                places: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(tokens, cache, documents, places))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean nats, () float32, over the tokens whose target is not -100; NaN if there are
    none (`contracts.Batch.to` gives such a batch weights of 0). logits (B, T, V) in any dtype;
    targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
