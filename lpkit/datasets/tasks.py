"""Tasks that need memory and nothing else, drawn anew at each step: what a kind of attention can
carry over a distance, a few hundred steps of a tiny model tell.

    CopyTask    a b c 0 a b c 0 a b c   a string again and again, after the marker 0
    RecallTask  k 7 m 4 0 0 m 4 k 7     pairs of a key and a value, then each once more, somewhere

Answers have weight 1 in the loss, and all else 0. Copying: Graves et al. 2014,
https://arxiv.org/abs/1410.5401. Multi-query associative recall: Arora et al. 2023,
https://arxiv.org/abs/2312.04927.
"""

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from lpkit.contracts import Batch, DataPolicy


class Drawn(DataPolicy):
    """Batches that follow from the seed and the step; `tokens` of a corpus are not read."""

    def __init__(self, *, batch: int, context: int, seed: int = 0, tokens: object = None):
        self.B, self.T, self.seed = batch, context, seed

    @abstractmethod
    def distances(self, batch: Batch) -> Tensor:
        """(B, T) int64: how many places before a question its answer stands; 0 where none is
        asked."""


class CopyTask(Drawn):
    """Each token of a copy stands `length` + 1 places after the same token."""

    def __init__(self, *, length: int, symbols: int, **settings):
        super().__init__(**settings)
        self.length, self.symbols = length, symbols

    def batch(self, step: int) -> Batch:
        rng = np.random.default_rng((self.seed, step))
        strings = rng.integers(1, self.symbols + 1, (self.B, self.length))
        periods = np.tile(np.pad(strings, ((0, 0), (0, 1))), self.T // (self.length + 1) + 1)
        rows = torch.from_numpy(periods[:, :self.T + 1])
        copies = (torch.arange(self.T + 1) > self.length) & (rows > 0)
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(),
                     weights=copies[:, 1:].float())

    def distances(self, batch: Batch) -> Tensor:
        return (self.length * batch.weights).long()


class RecallTask(Drawn):
    """Keys are 1 to `symbols`, values those after them."""

    def __init__(self, *, pairs: int, symbols: int, **settings):
        super().__init__(**settings)
        self.pairs, self.symbols = pairs, symbols

    def batch(self, step: int) -> Batch:
        rng, P, S = np.random.default_rng((self.seed, step)), self.pairs, self.symbols
        keys = rng.permuted(np.tile(np.arange(1, S + 1), (self.B, 1)), axis=1)[:, :P]
        values = rng.integers(S + 1, 2 * S + 1, (self.B, P))
        pairs = np.stack((keys, values), axis=-1)
        # the rest in places for a pair: each is asked for in one of them, others hold markers
        count = (self.T + 1) // 2 - P
        places = rng.permuted(np.tile(np.arange(count), (self.B, 1)), axis=1)[:, :P]
        asked = np.zeros((self.B, count, 2), np.int64)
        asked[np.arange(self.B)[:, None], places] = pairs
        rows = np.zeros((self.B, self.T + 1), np.int64)
        rows[:, :2 * (P + count)] = np.concatenate((pairs, asked), axis=1).reshape(self.B, -1)
        rows = torch.from_numpy(rows)
        answers = (torch.arange(self.T + 1) >= 2 * P) & (rows > S)
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(),
                     weights=answers[:, 1:].float())

    def distances(self, batch: Batch) -> Tensor:
        same = batch.tokens[:, :, None] == batch.tokens[:, None, :2 * self.pairs:2]
        value = 2 * same.long().argmax(-1) + 1
        return (torch.arange(self.T) - value) * (batch.weights > 0)
