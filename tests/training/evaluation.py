"""Is `val_loss` the same number however an evaluation is cut?

40 configurations (what a batch is, which loss, which layout) are evaluated with 1, 2 and 4
micro-batches on 1 and on 2 ranks. Each number is held against the weighted sum of losses over the
sum of weights, in float64, from the logits of the whole batches: no code of the kit but the model
makes it. Float32 gives a mean to some 1e-7 of itself, so 1e-6 is asked.

    python -m tests.training.evaluation

prints a table, and exits 1 where a number differs by more.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn import functional

import lessons.rows.masked  # noqa: F401  adds rows
from lpkit.config import Config
from lpkit.contracts import IGNORED, Batch, DataPolicy
from lpkit.parallel.meeting import joined
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.parallel.ranks import Ranks
from lpkit.training.data import Share
from lpkit.training.training import Training

PIECES, RANKS, EQUAL = (1, 2, 4), (1, 2), 1e-6
SMALL = Config().replace({
    "model.layers": 2, "model.width": 32, "model.heads": 4, "model.context": 32, "model.vocab": 256,
    "global_batch": 8, "eval_batches": 3, "data.val_fraction": 0.3,
    "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1,
    "system.attention": "plain", "system.compile": False})
MASKED = {"data.policy": "masked", "data.policy.mask": 257, "model.vocab": 258,
          "model.attention": "bidirectional"}
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.tied": False}
CHUNKED = {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 24}
# what a batch is; the handed ones come as a policy of the user's: targets of -100, and batches in
# which few or no tokens count
BATCHES = {
    "random-windows": {}, "spread-windows": {"data.policy": "spread-windows"},
    "random-documents": {"data.policy": "random-documents"},
    "spread-documents": {"data.policy": "spread-documents"}, "masked": MASKED, "-100": {},
    "uneven": {}, "zeros": {}}
WAYS = {
    "data": {"parallel.data": 2},
    "ZeRO 1": {"parallel.shard": 2, "parallel.zero": 1, **CHUNKED},
    "tensor": {"parallel.tensor": 2, **LLAMA},
    "context": {"parallel.context": 2},
    "pipeline": {"parallel.pipeline": 2, **CHUNKED},
}
CASES = [(batches, way) for batches in BATCHES for way in WAYS]


class Handed(DataPolicy):
    """A user's batches: `kind` says which targets count. Targets of the first sequences count most
    often."""

    def __init__(self, kind: str, config: Config):
        self.kind, self.vocab = kind, config.model.vocab
        self.shape = config.global_batch, config.model.context

    def batch(self, step: int) -> Batch:
        rng = torch.Generator().manual_seed(step)
        tokens, targets = (torch.randint(self.vocab, self.shape, generator=rng) for _ in range(2))
        rare = torch.linspace(0.1, 0.95, self.shape[0])[:, None]
        counts = torch.rand(self.shape, generator=rng) > rare
        if self.kind == "-100":
            return Batch(tokens, targets.masked_fill(~counts, IGNORED))
        # the second rank has none, and most micro-batches
        counts[len(counts) // 2:] &= self.kind != "zeros"
        counts &= self.kind != "zeros" or step > 0              # nor has the first batch any
        weights = counts * torch.rand(self.shape, generator=rng).add(0.5)
        return Batch(tokens, targets, weights=weights)


def config_of(batches: str, way: str, source: str, pieces: int = 1, ranks: int = 1) -> Config:
    layout = {key: 1 if key != "parallel.zero" else 3 for key in WAYS[way]
              if key.startswith("parallel.")} if ranks == 1 else {}
    pieces *= ranks if way == "pipeline" else 1      # it needs a micro-batch a stage
    return SMALL.replace({"data.source": source, **BATCHES[batches], **WAYS[way], **layout,
                          "grad_accum_steps": pieces})


def built(batches: str, config: Config, ranks: Ranks) -> Training:
    """An untrained model says the same of each token; so its weights are made larger, alike on all
    ranks."""
    handed = batches in ("-100", "uneven", "zeros")
    data = Share(Handed(batches, config), ranks, config.global_batch) if handed else None
    training = Training.build(config, data=data, ranks=ranks)
    with torch.no_grad():
        for name, p in training.model.named_parameters():
            if "norm" not in name:
                p.mul_(5)
    return training


@torch.no_grad()
def due(batches: str, config: Config) -> float:
    """The weighted sum of losses over the sum of weights, of whole batches."""
    training, total, weight = built(batches, config, Ranks()), 0.0, 0.0
    training.model.eval()
    source = Handed(batches, config) if batches in ("-100", "uneven", "zeros") else training.val
    for i in range(config.eval_batches):
        batch = source.batch(i)
        logits = training.model(batch.tokens, **batch.beside).double().flatten(0, 1)
        nats = functional.cross_entropy(logits, batch.targets.flatten(), reduction="none",
                                        ignore_index=IGNORED)
        counts = batch.targets != IGNORED if batch.weights is None else batch.weights
        total += (nats * counts.double().flatten()).sum().item()
        weight += counts.double().sum().item()
    return total / weight


def trainings(place: Place, argument: dict) -> Iterator[Training]:
    """Yields that of each of argument["cases"], of (batches, way, pieces), on these ranks."""
    torch.set_num_threads(1)
    for i, (batches, way, pieces) in enumerate(argument["cases"]):
        config = config_of(batches, way, argument["source"], pieces, place.world)
        with joined(config, local_rank=place.local_rank,
                    **place.among | {"init_method": f"{place.store}-{i}"}) as ranks:
            yield built(batches, config, ranks)


def evaluations(place: Place, argument: dict) -> list[float]:
    """Return each val_loss."""
    return [training.evaluate() for training in trainings(place, argument)]


def updates(place: Place, argument: dict) -> list[list[float]]:
    """Return losses and gradient norms of two updates each."""
    return [two_updates(training) for training in trainings(place, argument)]


def two_updates(training: Training) -> list[float]:
    return [number.item() for done in map(training.update, range(2))
            for number in (done.loss, done.grad_norm)]


def val_losses(cases, source: str, parent=None) -> dict[tuple, float]:
    """val_loss by (batches, way, pieces, ranks)."""
    each = [(*case, pieces) for case in cases for pieces in PIECES]
    of = {(*case, 1): built(case[0], config_of(*case[:2], source, case[2]), Ranks()).evaluate()
          for case in each}
    with Processes("tests.training.evaluation:evaluations", {"cases": each, "source": source},
                   world=2, parent=parent) as running:
        first, second = running.wait()
    assert first == second
    return of | {(*case, 2): loss for case, loss in zip(each, first)}


@contextmanager
def text():
    with tempfile.TemporaryDirectory() as folder:
        for i in range(200):
            functions = (f"def f{j}(x):\n    return x * {j} + {j % 7}\n"
                         for j in range(i, i + 1 + i % 5))
            (Path(folder) / f"{i}.py").write_text("".join(functions))
        yield f"{folder}/*.py"


def main() -> int:
    with text() as source, WarmParent() as parent:
        losses, worst = val_losses(CASES, source, parent), 0.0
        print(f"{'batches':<18}{'layout':<10}{'sum / sum':>11}  the largest relative difference "
              f"over {PIECES} pieces and {RANKS} ranks")
        for case in CASES:
            right = due(case[0], config_of(*case, source))
            off = max(abs(losses[(*case, pieces, ranks)] / right - 1) for pieces in PIECES
                      for ranks in RANKS)
            worst = max(worst, off)
            print(f"{case[0]:<18}{case[1]:<10}{right:>11.6f}  "
                  f"{off:.1e}{'' if off <= EQUAL else '  DIFFERS'}")
    print(f"{len(CASES)} configurations, {len(losses)} evaluations: {worst:.1e} at most, and "
          f"{EQUAL:g} may be")
    return int(worst > EQUAL)


if __name__ == "__main__":
    sys.exit(main())
