"""The variance of a gradient under importance sampling, compared with uniform sampling.

    lpkit bench importance --out data/measured      two minutes

A sequence is drawn with a probability in proportion to the norm of its gradient, which no other
choice beats, and weighted so that the mean stays. With norms g and mean gradient G, the variance
falls to ((E g)^2 - |G|^2) / (E g^2 - |G|^2). `ours` is that formula, from norms alone. `peer` is
what batches drawn so vary by, over batches drawn uniformly. Norms of all candidates are free here;
`by_loss` has the loss as the score, which costs a forward pass.
"""

import torch

from lpkit.config import Config
from lpkit.training.training import Training
from tests.bench.harness import Result, paired

POOL, BATCH, DRAWS, AFTER = 384, 8, 400, (0, 100, 400)
BASE = Config().replace({
    "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 64,
    "model.vocab": 257, "global_batch": 16, "steps": AFTER[-1], "schedule.warmup_steps": 20,
    "optimizer.lr": 3e-3, "precision.recipe": "fp32", "system.device": "cpu", "eval_every": 0})


def run(rounds: int) -> list[Result]:
    training = Training.build(BASE)
    pool = Training.build(BASE.replace({"global_batch": POOL, "seed": 7})).batch(0)
    variances, done = {}, 0
    for after in AFTER:
        for step in range(done, after):
            training.update(step)
        done = after
        variances[after] = ratios(*gradients(training, pool))
    return [paired("importance", case=f"after {after} updates", ours=[formula], peer=[measured],
                   peer_name="400 batches that were drawn so", better="lower",
                   unit="of the variance", facts={"by_loss": {str(at): shares[2]
                                                              for at, shares in variances.items()}})
            for after, (formula, measured, _) in variances.items()]


def gradients(training: Training, pool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient (POOL, parameters) and the loss (POOL) of each sequence, in float64."""
    rows, losses, parameters = [], [], list(training.model.parameters())
    for tokens, targets in zip(pool.tokens, pool.targets, strict=True):
        logits = training.model(tokens[None]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits.float(), targets)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        losses.append(loss.detach())
    return torch.stack(rows).double(), torch.stack(losses).double()


def ratios(rows: torch.Tensor, losses: torch.Tensor) -> tuple[float, float, float]:
    """Returns the variance over uniform sampling's: by formula, measured, by loss as score."""
    norms, mean = rows.norm(dim=1), rows.mean(0)
    square = mean.square().sum()
    formula = (norms.mean()**2 - square) / (norms.square().mean() - square)
    uniform, by_norm, by_loss = (variance(rows, score / score.sum())
                                 for score in (torch.ones_like(norms), norms, losses))
    return float(formula), by_norm / uniform, by_loss / uniform


def variance(rows: torch.Tensor, chances: torch.Tensor) -> float:
    """Returns the mean square distance of DRAWS batches' gradients from the pool's gradient."""
    generator, mean, total = torch.Generator().manual_seed(3), rows.mean(0), 0.0
    for _ in range(DRAWS):
        drawn = torch.multinomial(chances, BATCH, replacement=True, generator=generator)
        weights = 1 / (len(rows) * chances[drawn])
        total += float(((weights[:, None] * rows[drawn]).mean(0) - mean).square().sum())
    return total / DRAWS
