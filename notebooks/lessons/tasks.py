"""Synthetic tasks that test only memory; each step draws new sequences. A few hundred steps of a
tiny model show what a kind of attention can remember over a distance.

    CopyTask    a b c 0 a b c 0 a b c   a random string, repeated; 0 is the marker in between
    RecallTask  k 7 m 4 0 0 m 4 k 7     pairs of a key and its value, then each pair once more, at
                                        random places between markers

    PYTHONPATH=notebooks lpkit train cpu-3m --import lessons.tasks --set data.policy=recall

The tokens to predict (the copies; the values of the repeated pairs) have weight 1 in the loss, all
other tokens 0. Copying: Graves et al. 2014,
https://arxiv.org/abs/1410.5401. Multi-query associative recall: Arora et al. 2023,
https://arxiv.org/abs/2312.04927.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpkit.contracts import Batch, DataPolicy
from lpkit.errors import ConfigError
from lpkit.techniques.data import POLICIES, Policy
from lpkit.techniques.row import Settings
from lpkit.values import Count


@dataclass(frozen=True, kw_only=True)
class Task(Settings):
    """Settings of a task. A task draws its batches and reads no corpus. Token 0 is a marker."""

    symbols: Count = 32         # number of symbols for keys, values or strings

    @property
    def vocab(self) -> int:
        """The number of different tokens."""
        return 1 + self.symbols

    @property
    def context(self) -> int:
        """The shortest context for a question and its answer."""
        raise NotImplementedError

    def problem(self, m: Any) -> str:
        """Return why a model with the settings `m` cannot learn this task; "" if it can."""
        if m.vocab < self.vocab:
            return (f"data.policy={self.name} has {self.vocab} tokens, but model.vocab={m.vocab}; "
                    f"set model.vocab={self.vocab} or more, or fewer data.policy.symbols")
        if m.context < self.context:
            return (f"data.policy={self.name} needs {self.context} tokens for its first "
                    f"question and its answer, but model.context={m.context}; set "
                    f"model.context={self.context} or more")
        return ""


@dataclass(frozen=True, kw_only=True)
class Copy(Task):
    """Settings of `CopyTask`."""
    length: Count = 16          # length of the string

    @property
    def context(self) -> int:
        return 2 * self.length


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Settings of `RecallTask`."""
    pairs: Count = 8            # pairs of a key and its value before the questions

    def __post_init__(self):
        super().__post_init__()
        if self.pairs > self.symbols:
            raise ConfigError(f"data.policy.pairs={self.pairs} needs {self.pairs} different keys, "
                              f"but data.policy.symbols={self.symbols} is the number of keys; set "
                              f"data.policy.symbols={self.pairs} or more")

    @property
    def vocab(self) -> int:
        return 1 + 2 * self.symbols

    @property
    def context(self) -> int:
        return 4 * self.pairs - 1


POLICIES["copy"] = Policy(
    why="a random string, repeated; only its copies count in the loss", settings=Copy(),
    implementation="lessons.tasks:CopyTask", evaluation="copy",
    source="Graves et al. 2014, https://arxiv.org/abs/1410.5401")
POLICIES["recall"] = Policy(
    why="pairs of a key and a value, then keys again; only the values of those keys count in the "
        "loss",
    settings=Recall(), implementation="lessons.tasks:RecallTask", evaluation="recall",
    source="Arora et al. 2023, https://arxiv.org/abs/2312.04927")


class Drawn(DataPolicy):
    """A data policy whose batches depend only on the seed and the step. The argument `tokens`, the
    tokens of a corpus, is not used."""

    def __init__(self, *, batch: int, context: int, seed: int = 0, tokens: object = None):
        self.B, self.T, self.seed = batch, context, seed

    @abstractmethod
    def distances(self, batch: Batch) -> Tensor:
        """Return (B, T) int64: for each token after which an answer is predicted, the number of
        places back to the earlier token that is the answer; 0 for all other tokens."""


class CopyTask(Drawn):
    """A random string of `length` tokens, repeated; each repetition begins after a marker. A token
    of a copy is `length` + 1 places after the token that it copies."""

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
    """`pairs` pairs of a key and a value, then each pair once more at a random place. Keys are the
    tokens 1 to `symbols`, values the tokens `symbols` + 1 to 2 * `symbols`."""

    def __init__(self, *, pairs: int, symbols: int, **settings):
        super().__init__(**settings)
        self.pairs, self.symbols = pairs, symbols

    def batch(self, step: int) -> Batch:
        rng, P, S = np.random.default_rng((self.seed, step)), self.pairs, self.symbols
        keys = rng.permuted(np.tile(np.arange(1, S + 1), (self.B, 1)), axis=1)[:, :P]
        values = rng.integers(S + 1, 2 * S + 1, (self.B, P))
        pairs = np.stack((keys, values), axis=-1)
        # The rest of a sequence consists of `count` slots of two tokens. Each pair is repeated in a
        # random slot; the other slots have two markers.
        count = (self.T + 1) // 2 - P
        places = rng.permuted(np.tile(np.arange(count), (self.B, 1)), axis=1)[:, :P]
        repeated = np.zeros((self.B, count, 2), np.int64)
        repeated[np.arange(self.B)[:, None], places] = pairs
        rows = np.zeros((self.B, self.T + 1), np.int64)
        rows[:, :2 * (P + count)] = np.concatenate((pairs, repeated), axis=1).reshape(self.B, -1)
        rows = torch.from_numpy(rows)
        answers = (torch.arange(self.T + 1) >= 2 * P) & (rows > S)
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(),
                     weights=answers[:, 1:].float())

    def distances(self, batch: Batch) -> Tensor:
        same = batch.tokens[:, :, None] == batch.tokens[:, None, :2 * self.pairs:2]
        value = 2 * same.long().argmax(-1) + 1
        return (torch.arange(self.T) - value) * (batch.weights > 0)
