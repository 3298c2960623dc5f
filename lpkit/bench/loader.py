"""Random-window batches from a file of 50 M tokens: `RandomWindows` beside the loop of small
trainers and DataLoader.

The loop slices each window out of the memory map, widens it, and stacks; it is what most compact
GPT trainers do. DataLoader has a map-style dataset of windows (one slice for x and y), its sampler
draws with replacement, and both of its usual settings of num_workers race. All hand over x and y as
(B, T) int64 tensors.
"""

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lpkit.bench.harness import ROUNDS, Result, paired, provenance, race
from lpkit.datasets.policies import RandomWindows
from lpkit.machine_facts import status_bytes

TOKENS = 50_000_000
SHAPES = ((12, 1024), (64, 256), (16, 64))      # B, T
LOOP_TARGET, DATALOADER_TARGET = 3.5, 1.8       # times faster, at least
EXTRA_BYTES = 64 * 2**20                        # at most
WORKERS = (0, 2)
LOOP = "slice and stack loop"


def run(rounds: int = ROUNDS, tokens: int = TOKENS) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        _write(path, tokens)
        results = [result for B, T in SHAPES for result in _race(path, B, T, rounds)]
        return results + _memory(path, rounds)


class WindowDataset(Dataset):
    """Window i: (T,) int64 twice, the second shifted by one token."""

    def __init__(self, tokens: np.ndarray, context: int):
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = torch.from_numpy(self.tokens[i:i + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


def stack_windows(tokens: np.ndarray, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The usual loop: x and y, each (B, T) int64."""
    starts = starts.tolist()    # kinder than the usual loop, which slices with one-element tensors
    x = torch.stack([torch.from_numpy(tokens[i:i + context].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1:i + 1 + context].astype(np.int64))
                     for i in starts])
    return x, y


def peak_extra_bytes(path: str) -> int:
    """Anonymous memory that drawing batches adds to this process; the page cache behind the map is
    not ours."""
    tokens = np.memmap(path, dtype="<u2", mode="r")
    before = peak = status_bytes("RssAnon")
    for B, T in SHAPES:
        policy = RandomWindows(tokens=tokens, batch=B, context=T, seed=1)
        for step in range(1000):
            batch = policy.batch(step)      # held while the next one is made, as in training
            peak = max(peak, status_bytes("RssAnon"))
        del batch
    return peak - before


def _race(path: Path, B: int, T: int, rounds: int) -> list[Result]:
    tokens = np.memmap(path, dtype="<u2", mode="r")
    policy = RandomWindows(tokens=tokens, batch=B, context=T, seed=1)
    ours = policy.batches()

    def loop():
        return stack_windows(tokens, torch.randint(len(tokens) - T, (B,)), T)

    def check():
        for step in range(3):
            for mine, theirs in zip(policy.batch(step).tensors,
                                    stack_windows(tokens, torch.from_numpy(policy.starts(step)), T),
                                    strict=True):
                assert torch.equal(mine, theirs), f"step {step} differs from the naive loop"

    with _loaders(tokens, B, T) as loaders:
        peers = {LOOP: loop} | {name: batches.__next__ for name, batches in loaders.items()}
        targets = {name: LOOP_TARGET if name == LOOP else DATALOADER_TARGET for name in peers}
        # Samples long enough that the batches which workers fetched during the others' turns hardly
        # count.
        return race("loader", ours=ours.__next__, peers=peers, check=check, target=targets,
                    case=f"{B}x{T}", rounds=rounds, sample_seconds=0.05,
                    packages=["torch", "numpy"])


@contextmanager
def _loaders(tokens: np.ndarray, B: int, T: int) -> Iterator[dict[str, Iterator]]:
    dataset = WindowDataset(tokens, T)
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # more workers than cores: the race says what that costs
        for workers in WORKERS:
            sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)
            made[f"DataLoader, num_workers={workers}"] = iter(
                DataLoader(dataset, batch_size=B, sampler=sampler, num_workers=workers))
    try:
        yield made
    finally:
        made.clear()        # its workers end with the iterator


def _memory(path: Path, rounds: int) -> list[Result]:
    if status_bytes("RssAnon") is None:
        return []           # only Linux tells anonymous memory from a mapped file
    code = f"from lpkit.bench.loader import peak_extra_bytes as peak; print(peak({str(path)!r}))"
    extra = [int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                                check=True).stdout)
             for _ in range(min(rounds, 3))]
    return [paired("loader", ours=extra, peer=[EXTRA_BYTES] * len(extra), peer_name="64 MiB",
                   case="peak extra memory", target=1.0, better="lower", unit="bytes",
                   facts=provenance(["torch", "numpy"]))]


def _write(path: Path, tokens: int) -> None:
    rng, chunk = np.random.default_rng(0), 1 << 20
    with path.open("wb") as file:
        for start in range(0, tokens, chunk):
            file.write(rng.integers(0, 50257, min(chunk, tokens - start), dtype="<u2"))
