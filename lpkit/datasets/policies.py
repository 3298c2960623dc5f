"""Data policies: which tokens are read, in what order. To add a policy, write a subclass of
`Windows` with `starts(step)`, and add a row to `lpkit/techniques/data.py`.

A batch depends only on the settings and the step, so there is no state to save: step 1000 of a
resumed run reads the same tokens as step 1000 of an uninterrupted run. Random positions are hashes
of a counter (splitmix64: Steele, Lea and Flood 2014). A hash takes microseconds; making a random
generator for each step would take as long as the batch.
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
    """Batches of windows. A window is T + 1 consecutive tokens; `starts` gives their positions.

    tokens:  (N,) unsigned integers, usually a memory map; a batch copies B * (T + 1) of them
    batch:   B, number of sequences
    context: T, number of tokens; raises ConfigError if N < T + 1
    """

    def __init__(self, *, tokens: np.ndarray, batch: int, context: int, seed: int = 0):
        if len(tokens) <= context:
            raise ConfigError(f"model.context={context} needs {context + 1} tokens in a row, but a "
                              f"split of this corpus has only {len(tokens)}; set "
                              f"model.context={len(tokens) - 1} or less, or use more text")
        self.B, self.T, self.seed = batch, context, seed
        # A plain array, because slices of a memmap copy its Python attributes. It is a view, so no
        # token is copied.
        self._windows = sliding_window_view(np.asarray(tokens), context + 1)

    @abstractmethod
    def starts(self, step: int) -> np.ndarray:
        """Return the positions of this step's windows: (B,) int64, each from 0 to N - T - 1."""

    def batch(self, step: int) -> Batch:
        """Return the batch of a step. Its tensors are contiguous and share no memory, so that both
        may be changed in place."""
        # (B, T + 1); the only random access to the file
        windows = self._windows[self.starts(step)]
        return Batch(torch.from_numpy(windows[:, :-1].astype(np.int64)),
                     torch.from_numpy(windows[:, 1:].astype(np.int64)))


class RandomWindows(Windows):
    """Windows drawn uniformly, with replacement, from all N - T windows."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._lanes = np.arange(1, self.B + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        # hashed, so that seeds 0 and 1 give unrelated keys
        self._key = int(_splitmix64(np.array([self.seed & _MASK], np.uint64))[0])

    def starts(self, step: int) -> np.ndarray:
        first = (self._key + step * self.B * _GAMMA) & _MASK
        drawn = _splitmix64(self._lanes + np.uint64(first))
        return (drawn % np.uint64(len(self._windows))).astype(np.int64)     # bias below N / 2**64


class SpreadWindows(Windows):
    """Windows without overlap. Each is read once per pass, with a stride of the golden ratio, so
    that a few batches are a representative sample of the whole split.

    For evaluation. Reading windows in order would start with the first files in the alphabet.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.count = 1 + (len(self._windows) - 1) // self.T
        self.stride = max(1, round(self.count * (math.sqrt(5) - 1) / 2))
        # coprime, so that one pass reads every window
        while math.gcd(self.stride, self.count) > 1:
            self.stride += 1

    def __len__(self) -> int:
        """Return the number of batches in one pass. The last batch is filled up with the first
        windows."""
        return -(-self.count // self.B)

    def starts(self, step: int) -> np.ndarray:
        numbers = np.arange(step * self.B, (step + 1) * self.B) % self.count
        return numbers * self.stride % self.count * self.T


class Documents(Windows):
    """Windows with the document of each token. The tokenizer's `end` token closes each document,
    and is the last token of each split. If a window begins inside a document, its queries cannot
    see the part before the window. The target after an `end` token belongs to another document and
    cannot be predicted, so its weight is 0."""

    def __init__(self, *, tokens: np.ndarray, **settings):
        super().__init__(tokens=tokens, **settings)
        self.end = int(tokens[-1])

    def batch(self, step: int) -> Batch:
        batch = super().batch(step)
        ends = batch.tokens == self.end
        return replace(batch, document_ids=ends.cumsum(1) - ends.long(), weights=(~ends).float())


class RandomDocuments(Documents, RandomWindows):
    pass


class SpreadDocuments(Documents, SpreadWindows):
    pass


def _splitmix64(z: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finalizer in place, modulo 2**64: a bijection that scatters consecutive
    multiples of _GAMMA."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


class Scored(DataPolicy):
    """The batches of `policy`, with `extra["scores"]`: a number for each target, (B, T) float32."""

    def __init__(self, policy: Windows, scores: np.ndarray):
        self.policy, self._windows = policy, sliding_window_view(scores, policy.T + 1)

    def batch(self, step: int) -> Batch:
        batch, scores = self.policy.batch(step), self._windows[self.policy.starts(step)][:, 1:]
        return replace(batch, extra={**batch.extra,
                                     "scores": torch.from_numpy(scores.astype(np.float32))})


def scored(policy: DataPolicy, file: str, tokens: int) -> DataPolicy:
    """Adds the scores of an .npy file, one for each of the `tokens` training tokens. Raises
    ConfigError."""
    asked = f"data.scores={shown(file)}"
    if not isinstance(policy, Windows):
        raise ConfigError(f"{asked} are of a corpus, and this data.policy draws its own tokens; "
                          f"leave the scores out")
    try:
        scores = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{asked} cannot be read ({in_one_line(str(error))}); save an array with "
                          f"numpy.save") from None
    if getattr(scores, "shape", None) != (tokens,) or scores.dtype.kind != "f":
        what = f"{scores.dtype} {scores.shape}" if hasattr(scores, "dtype") else "no array"
        raise ConfigError(f"{asked} holds {what}, and the corpus wants a float for each of its "
                          f"{tokens:,} training tokens, in their order; score what "
                          f"lpkit.datasets.prepare(config.data, vocab).train has")
    return Scored(policy, np.asarray(scores))


class Ramped(DataPolicy):
    """The sequences of `policy` in their order, in batches of other sizes. `sizes(step)` returns
    the number of sequences of an update, and the tokens per sequence. `sequences`: the number of
    sequences in a batch of `policy`."""

    def __init__(self, policy: DataPolicy, sequences: int, sizes: Callable[[int], tuple[int, int]]):
        self.policy, self.sequences, self.sizes = policy, sequences, sizes
        self.first = [0]        # number of the first sequence of each update

    def batch(self, step: int) -> Batch:
        while len(self.first) <= step:
            self.first.append(self.first[-1] + self.sizes(len(self.first) - 1)[0])
        count, tokens = self.sizes(step)
        batch, start = divmod(self.first[step], self.sequences)
        read = [self.policy.batch(batch).present]
        if start + count > self.sequences:
            read.append(self.policy.batch(batch + 1).present)
        context, cut = read[0]["tokens"].shape[1], {}
        for name in read[0]:
            t = torch.cat([tensors[name] for tensors in read])[start:start + count]
            cut[name] = t[:, :tokens] if t.ndim > 1 and t.shape[1] == context else t
        return Batch.of(cut)
