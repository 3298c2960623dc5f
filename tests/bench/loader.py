"""Random-window batches from a file of 50 M tokens: `RandomWindows` beside the loop of small
trainers and DataLoader.

The loop slices each window out of the memory map, widens it, and stacks; it is what most compact
GPT trainers do. DataLoader has a map-style dataset of windows (one slice for x and y), its sampler
draws with replacement, and both of its usual settings of num_workers race. All hand over x and y as
(B, T) int64 tensors.
"""

import itertools
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lpkit.datasets.policies import RandomWindows
from lpkit.machine_facts import status_bytes
from tests.bench.harness import ROUNDS, Result, paired, race

TOKENS = 50_000_000
SHAPES = ((12, 1024), (64, 256), (16, 64))      # B, T
LOOP_TARGET, DATALOADER_TARGET = 3.5, 1.8       # times faster, at least
EXTRA_BYTES = 64 * 2**20                        # at most
WORKERS = (0, 2)
LOOP = "slice and stack loop"
PACKAGES = ("torch", "numpy")


def run(rounds: int = ROUNDS, tokens: int = TOKENS) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        np.random.default_rng(0).integers(0, 50257, tokens, dtype="<u2").tofile(path)
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


def _race(path: Path, B: int, T: int, rounds: int) -> list[Result]:
    tokens = np.memmap(path, dtype="<u2", mode="r")
    policy = RandomWindows(tokens=tokens, batch=B, context=T, seed=1)
    peers = {LOOP: lambda: stack_windows(tokens, torch.randint(len(tokens) - T, (B,)), T)}
    dataset = WindowDataset(tokens, T)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # more workers than cores: the race says what that costs
        for workers in WORKERS:
            sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)
            loader = DataLoader(dataset, batch_size=B, sampler=sampler, num_workers=workers)
            peers[f"DataLoader, num_workers={workers}"] = iter(loader).__next__

    def check():
        for step in range(3):
            want = stack_windows(tokens, torch.from_numpy(policy.starts(step)), T)
            for mine, theirs in zip(policy.batch(step).tensors, want, strict=True):
                assert torch.equal(mine, theirs), f"step {step} differs from the naive loop"

    # Samples long enough that the batches which workers fetched during the others' turns hardly
    # count.
    ours = map(policy.batch, itertools.count()).__next__
    return race("loader", ours=ours, peers=peers, check=check,
                target=dict.fromkeys(peers, DATALOADER_TARGET) | {LOOP: LOOP_TARGET},
                case=f"{B}x{T}", rounds=rounds, sample_seconds=0.05, packages=PACKAGES)


def _memory(path: Path, rounds: int) -> list[Result]:
    if status_bytes("RssAnon") is None:
        return []           # only Linux tells anonymous memory from a mapped file
    code = f"from tests.bench.loader import peak_extra_bytes as peak; print(peak({str(path)!r}))"
    extra = [int(subprocess.check_output([sys.executable, "-c", code], text=True))
             for _ in range(min(rounds, 3))]
    return [paired("loader", ours=extra, peer=[EXTRA_BYTES] * len(extra), peer_name="64 MiB",
                   case="peak extra memory", target=1.0, better="lower", unit="bytes",
                   packages=PACKAGES)]


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
