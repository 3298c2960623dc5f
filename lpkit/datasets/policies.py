"""Data policies: a policy chooses the tokens that a run reads, and their order. To add a policy,
write a subclass of `Windows` with `starts(step)`, and add a row to `lpkit/techniques/data.py`.

A batch depends only on the settings and the step, so a policy has no state to save: step 1000 of a
resumed run reads the same tokens as step 1000 of an uninterrupted run. Random positions are hashes
of a counter (splitmix64: Steele, Lea and Flood 2014). A hash takes microseconds; creating a random
generator for each step would take as long as reading the batch.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from lpkit.contracts import Batch, DataPolicy
from lpkit.errors import ConfigError, in_one_line, shown

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15     # step of the counter: 2**64 / golden ratio, rounded to odd


class Windows(DataPolicy):
    """A policy whose batches are windows: T + 1 consecutive tokens of the corpus, at the positions
    that `starts` returns. The first T tokens are the input, the last T tokens the targets.

    tokens:  (N,) unsigned integers, usually a memory map; a batch copies B * (T + 1) of them
    batch:   B, the number of sequences
    context: T, the number of tokens in a sequence

    Raises ConfigError if N < T + 1.
    """

    def __init__(self, *, tokens: np.ndarray, batch: int, context: int, seed: int = 0):
        if len(tokens) <= context:
            raise ConfigError(f"model.context={context} needs {context + 1} tokens in a row, but a "
                              f"split of this corpus has only {len(tokens)}; set "
                              f"model.context={len(tokens) - 1} or less, or use more text")
        self.B, self.T, self.seed = batch, context, seed
        # np.asarray returns a plain array that is a view, so it copies no token. Slices of a memmap
        # would be slower, because each copies the memmap's Python attributes.
        self._windows = sliding_window_view(np.asarray(tokens), context + 1)

    @abstractmethod
    def starts(self, step: int) -> np.ndarray:
        """Return the positions of the windows of this step: (B,) int64, each from 0 to N - T - 1.
        """

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: tokens (B, T) and targets (B, T), both int64. They are
        contiguous and share no memory, so the caller may change both in place."""
        # (B, T + 1); only this line accesses random positions of the file
        windows = self._windows[self.starts(step)]
        return Batch(torch.from_numpy(windows[:, :-1].astype(np.int64)),
                     torch.from_numpy(windows[:, 1:].astype(np.int64)))


class RandomWindows(Windows):
    """A policy that draws windows uniformly, with replacement, from all N - T windows."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._lanes = np.arange(1, self.B + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        # the seed is hashed, so that the seeds 0 and 1 have unrelated keys
        self._key = int(_splitmix64(np.array([self.seed & _MASK], np.uint64))[0])

    def starts(self, step: int) -> np.ndarray:
        first = (self._key + step * self.B * _GAMMA) & _MASK
        drawn = _splitmix64(self._lanes + np.uint64(first))
        # `%` favours small positions, by less than N / 2**64
        return (drawn % np.uint64(len(self._windows))).astype(np.int64)


class SpreadWindows(Windows):
    """A policy for evaluation: it reads windows that do not overlap, each once in a pass.

    The stride from one window to the next is the number of windows times 0.618 (the golden ratio),
    so a few batches are a representative sample of the whole split. If windows were read in order,
    the first batches would come from the first files in the alphabet.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.count = 1 + (len(self._windows) - 1) // self.T
        self.stride = max(1, round(self.count * (math.sqrt(5) - 1) / 2))
        # stride and count must be coprime, so that one pass reads each window once
        while math.gcd(self.stride, self.count) > 1:
            self.stride += 1

    def __len__(self) -> int:
        """Return the number of batches in one pass. If the last batch is not full, it is completed
        with the first windows."""
        return -(-self.count // self.B)

    def starts(self, step: int) -> np.ndarray:
        numbers = np.arange(step * self.B, (step + 1) * self.B) % self.count
        return numbers * self.stride % self.count * self.T


class DocumentWindows(Windows):
    """A policy whose batches also have the number of each token's document: `document_ids` (B, T),
    and the `weights` (B, T) of the targets in the loss.

    The tokenizer's `end` token closes each document, and is the last token of each split. If a
    window begins inside a document, its queries do not see the part of the document before the
    window. The target of an `end` token is the first token of another document. It cannot be
    predicted, so its weight is 0."""

    def __init__(self, *, tokens: np.ndarray, **settings):
        super().__init__(tokens=tokens, **settings)
        self.end = int(tokens[-1])

    def batch(self, step: int) -> Batch:
        batch = super().batch(step)
        ends = batch.tokens == self.end
        return replace(batch, document_ids=ends.cumsum(1) - ends.long(), weights=(~ends).float())


class RandomDocuments(DocumentWindows, RandomWindows):
    pass


class SpreadDocuments(DocumentWindows, SpreadWindows):
    pass


def _splitmix64(z: np.ndarray) -> np.ndarray:
    """Hash the uint64 numbers z in place and return them. This is the last part of splitmix64: a
    bijection that maps consecutive multiples of _GAMMA to numbers that look random."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


class Scored(DataPolicy):
    """A policy that adds `extra["scores"]` to the batches of `policy`: a number for each target,
    (B, T) float32. `scores`: (N,), a number for each training token."""

    def __init__(self, policy: Windows, scores: np.ndarray):
        self.policy, self._windows = policy, sliding_window_view(scores, policy.T + 1)

    def batch(self, step: int) -> Batch:
        batch, scores = self.policy.batch(step), self._windows[self.policy.starts(step)][:, 1:]
        return replace(batch, extra={**batch.extra,
                                     "scores": torch.from_numpy(scores.astype(np.float32))})


def scored(policy: DataPolicy, file: str, tokens: int) -> DataPolicy:
    """Return `policy` with the scores of the .npy file `file`, which has a float for each of the
    `tokens` training tokens. Raises ConfigError if the file or the policy does not allow this."""
    setting = f"data.scores={shown(file)}"
    if not isinstance(policy, Windows):
        raise ConfigError(f"{setting} are of a corpus, and this data.policy draws its own tokens; "
                          f"leave the scores out")
    try:
        scores = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{setting} cannot be read ({in_one_line(str(error))}); save an array "
                          f"with numpy.save") from None
    if getattr(scores, "shape", None) != (tokens,) or scores.dtype.kind != "f":
        what = f"{scores.dtype} {scores.shape}" if hasattr(scores, "dtype") else "no array"
        raise ConfigError(f"{setting} holds {what}, and the corpus wants a float for each of its "
                          f"{tokens:,} training tokens, in their order; score what "
                          f"lpkit.datasets.prepare(config.data, vocab).train has")
    return Scored(policy, np.asarray(scores))


class Ramped(DataPolicy):
    """A policy that returns the sequences of `policy` in the same order, but in batches whose size
    changes during the run.

    sequences   number of sequences in a batch of `policy`
    sizes       sizes(step) returns the number of sequences in an update (at most `sequences`), and
                the number of tokens per sequence
    """

    def __init__(self, policy: DataPolicy, sequences: int, sizes: Callable[[int], tuple[int, int]]):
        self.policy, self.sequences, self.sizes = policy, sequences, sizes
        self.first = [0]        # number of the first sequence of each update

    def batch(self, step: int) -> Batch:
        while len(self.first) <= step:
            self.first.append(self.first[-1] + self.sizes(len(self.first) - 1)[0])
        count, tokens = self.sizes(step)
        # the update begins with sequence `start` of the policy's batch number `batch`
        batch, start = divmod(self.first[step], self.sequences)
        read = [self.policy.batch(batch).present]
        if start + count > self.sequences:
            read.append(self.policy.batch(batch + 1).present)
        context, cut = read[0]["tokens"].shape[1], {}
        for name in read[0]:
            t = torch.cat([tensors[name] for tensors in read])[start:start + count]
            cut[name] = t[:, :tokens] if t.ndim > 1 and t.shape[1] == context else t
        return Batch.of(cut)
