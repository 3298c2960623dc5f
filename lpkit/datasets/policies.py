"""Data policies: which tokens are seen, in what order. To add one: a subclass of `Windows` with
`starts(step)`, and a row in `lpkit/techniques/data.py`.

A batch follows from the settings and the step alone, so there is no state to save: step 1000 of a
resumed run reads what step 1000 of an uninterrupted one reads. Random positions come from hashing a
counter (splitmix64: Steele, Lea and Flood 2014), which costs microseconds where building a
generator for each step costs as much as the batch.
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
_GAMMA = 0x9E3779B97F4A7C15     # 2**64 / golden ratio, odd: the step of the counter


class Windows(DataPolicy):
    """Batches of windows of T + 1 consecutive tokens, given by where they start.

    tokens:  (N,) unsigned integers, a memory map as a rule; a batch copies B * (T + 1) of them and
             holds nothing else
    batch:   B, sequences
    context: T, tokens; raises ConfigError when N < T + 1
    """

    def __init__(self, *, tokens: np.ndarray, batch: int, context: int, seed: int = 0):
        if len(tokens) <= context:
            raise ConfigError(f"model.context={context} needs {context + 1} tokens in a row, but a "
                              f"split of this corpus has only {len(tokens)}; set "
                              f"model.context={len(tokens) - 1} or less, or use more text")
        self.B, self.T, self.seed = batch, context, seed
        # A plain array, because slices of a memmap carry its Python attributes along; a view, so
        # nothing is copied.
        self._windows = sliding_window_view(np.asarray(tokens), context + 1)

    @abstractmethod
    def starts(self, step: int) -> np.ndarray:
        """(B,) int64: where the windows of this step start, each in 0 ... N - T - 1."""

    def batch(self, step: int) -> Batch:
        """Contiguous tensors that share memory with nothing: both may be changed in place."""
        windows = self._windows[self.starts(step)]      # (B, T + 1): the only random access
        return Batch(torch.from_numpy(windows[:, :-1].astype(np.int64)),
                     torch.from_numpy(windows[:, 1:].astype(np.int64)))


class RandomWindows(Windows):
    """Windows drawn uniformly, with replacement, from all N - T of them."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._lanes = np.arange(1, self.B + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        # seeds 0 and 1 are far apart
        self._key = int(_splitmix64(np.array([self.seed & _MASK], np.uint64))[0])

    def starts(self, step: int) -> np.ndarray:
        first = (self._key + step * self.B * _GAMMA) & _MASK
        drawn = _splitmix64(self._lanes + np.uint64(first))
        return (drawn % np.uint64(len(self._windows))).astype(np.int64)     # bias below N / 2**64


class SpreadWindows(Windows):
    """Windows without overlap, each once, then again, in strides of the golden ratio: any few
    batches are a fair sample of the whole split.

    For evaluation: the first windows in order are the first files in the alphabet.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.count = 1 + (len(self._windows) - 1) // self.T
        self.stride = max(1, round(self.count * (math.sqrt(5) - 1) / 2))
        while math.gcd(self.stride, self.count) > 1:    # coprime, so one pass meets every window
            self.stride += 1

    def __len__(self) -> int:
        """Batches in one pass; the last one is filled up from the front."""
        return -(-self.count // self.B)

    def starts(self, step: int) -> np.ndarray:
        numbers = np.arange(step * self.B, (step + 1) * self.B) % self.count
        return numbers * self.stride % self.count * self.T


class Documents(Windows):
    """Windows that know their documents. A document is closed by the tokenizer's `end` token, which
    is the last of each split; what a window cuts off its first one is not there for any query. The
    token after an `end` is another document's, and nothing of this one tells it: weight 0."""

    def __init__(self, *, tokens: np.ndarray, **settings):
        super().__init__(tokens=tokens, **settings)
        self.end = int(tokens[-1])

    def batch(self, step: int) -> Batch:
        found = super().batch(step)
        ends = found.tokens == self.end
        return replace(found, document_ids=ends.cumsum(1) - ends.long(), weights=(~ends).float())


class RandomDocuments(Documents, RandomWindows):
    pass


class SpreadDocuments(Documents, SpreadWindows):
    pass


def _splitmix64(z: np.ndarray) -> np.ndarray:
    """The finalizer, in place and modulo 2**64: a bijection that scatters consecutive multiples of
    _GAMMA."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


class Scored(DataPolicy):
    """The batches of `policy`, with a number for each target, (B, T) float32, as extra scores."""

    def __init__(self, policy: Windows, scores: np.ndarray):
        self.policy, self._windows = policy, sliding_window_view(scores, policy.T + 1)

    def batch(self, step: int) -> Batch:
        batch, scores = self.policy.batch(step), self._windows[self.policy.starts(step)][:, 1:]
        return replace(batch, extra={**batch.extra,
                                     "scores": torch.from_numpy(scores.astype(np.float32))})


def scored(policy: DataPolicy, file: str, tokens: int) -> DataPolicy:
    """Adds the scores of an .npy file, one for each of `tokens`. Raises ConfigError."""
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
    """The sequences of `policy`, whose batches have `sequences` each, in their order: as many for
    an update, and as many tokens of each, as `sizes(step)` says."""

    def __init__(self, policy: DataPolicy, sequences: int, sizes: Callable[[int], tuple[int, int]]):
        self.policy, self.sequences, self.sizes = policy, sequences, sizes
        self.first = [0]        # sequence of each update

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
            t = torch.cat([one[name] for one in read])[start:start + count]
            cut[name] = t[:, :tokens] if t.ndim > 1 and t.shape[1] == context else t
        return Batch.of(cut)
