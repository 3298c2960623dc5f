"""Turn the text of a run into batches: tokenize the text, choose sequences by a data policy, give
each rank its sequences, and copy them to its device before they are needed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpkit.config import Config
from lpkit.contracts import Batch, DataPolicy, StatePlacement
from lpkit.datasets.policies import Ramped, scored
from lpkit.datasets.prepared import prepare
from lpkit.errors import ConfigError
from lpkit.files import sha256
from lpkit.memory.state import on_host
from lpkit.parallel.ranks import Ranks
from lpkit.techniques.data import POLICIES, SIZES, evaluating
from lpkit.techniques.row import Settings

VALIDATION = 1 << 63    # added to the seed, so that validation draws differ from training draws


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text of a run as batches of training data (`data`) and of validation data (`val`)."""

    data: DataPolicy
    val: DataPolicy
    tokenizer: dict[str, Any]
    # SHA-256 of the training tokens, the validation tokens and the scores
    tokens: dict[str, str]


def corpus(config: Config, ranks: Ranks, device: torch.device) -> Corpus:
    """Return the batches of `config` for this rank. Tokenize the text, unless its tokens are on
    disk already. Raises ConfigError for a text that cannot be used."""
    files = prepare(config.data, vocab=config.model.vocab)
    tokens = {split: entry["sha256"] for split, entry in files.header["splits"].items()}
    asked, batch = config.data.policy, config.global_batch
    data = _policy(config, asked, files.train, batch, config.seed)
    if scores := config.data.scores:
        data = scored(data, scores, len(files.train))
        tokens["scores"] = sha256(Path(scores))
    if SIZES[config.sizes.name].at:
        data = Ramped(data, batch, config.sizes_at)
    data = prefetched(Share(data, ranks, batch, config.sizes_at), device)
    val = Share(_policy(config, evaluating(asked), files.val, batch, config.seed + VALIDATION),
                ranks, batch)
    return Corpus(data=data, val=val, tokenizer=files.tokenizer.to_dict(), tokens=tokens)


def _policy(config: Config, asked: Settings, tokens: Any, batch: int, seed: int) -> DataPolicy:
    """Return the data policy with the settings `asked`, over `tokens`, with `batch` sequences."""
    settings = {key: value for key, value in vars(asked).items() if key != "name"}
    return POLICIES[asked.name].load()(tokens=tokens, batch=batch, context=config.model.context,
                                       seed=seed, **settings)


class Share(DataPolicy):
    """This rank's part of each batch of `policy`. A batch has `sequences` sequences for all ranks
    together, or as many as `sizes(step)` says, which returns (sequences, tokens of each). With
    context parallelism, the part has only this rank's tokens of each sequence."""

    def __init__(self, policy: DataPolicy, ranks: Ranks, sequences: int,
                 sizes: Callable[[int], tuple[int, int]] | None = None):
        self.policy, self.ranks = policy, ranks
        self.sizes = sizes or (lambda step: (sequences, 0))

    def batch(self, step: int) -> Batch:
        batch, (sequences, _) = self.policy.batch(step).to(torch.device("cpu")), self.sizes(step)
        if len(batch.tokens) != sequences:
            raise ConfigError(f"batch {step + 1} of the data policy has {len(batch.tokens)} "
                              f"sequences, and all are to have {sequences}; let it begin "
                              f"again where its text ends")
        layout, rank = self.ranks.layout, self.ranks.rank
        mine = batch.chunk(layout.batch_ranks)[layout.batch_rank(rank)]
        if layout.context == 1:
            return mine
        from lpkit.parallel.context import share

        return share(mine, layout.coordinates(rank)["context"], layout.context)


class Prefetched(DataPolicy):
    """Computes the batches of `policy` in another thread, one batch ahead. Each batch is copied to
    pinned memory by `lane`, and from there to `device` while the GPU computes.

    initializer: called once in the new thread
    """

    def __init__(self, policy: DataPolicy, device: torch.device, lane: StatePlacement,
                 initializer: Callable[[], None] | None = None):
        self.policy, self.device, self.lane = policy, device, lane
        self.thread = ThreadPoolExecutor(1, "lpkit-batches", initializer)
        self.next: tuple[int, Future | None] = (-1, None)

    def batch(self, step: int) -> Batch:
        expected, future = self.next
        if future is None or step != expected:
            future = self.thread.submit(self._make, step)
        if expected != step + 1:
            self.next = step + 1, self.thread.submit(self._make, step + 1)
        names, arrived = future.result()
        return Batch.of(dict(zip(names, arrived())))

    def _make(self, step: int) -> tuple[list[str], Callable[[], list[Tensor]]]:
        """Return the names of the batch's tensors, and a function that waits for their copies on
        the device."""
        present = self.policy.batch(step).present
        stored = [self.lane.store(t) for t in present.values()]
        return list(present), self.lane.prefetch(stored, self.device)


def prefetched(policy: DataPolicy, device: torch.device) -> DataPolicy:
    """Return `policy` as Prefetched on a GPU. On a CPU there is no copy to hide behind computation:
    return `policy` itself."""
    if device.type != "cuda":
        return policy
    index = torch.cuda.current_device() if device.index is None else device.index
    return Prefetched(policy, device, on_host(device), partial(torch.cuda.set_device, index))
