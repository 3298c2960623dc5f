"""Lesson 00, start here: its study, its figures and its exercises."""

import math
import sys
from contextlib import redirect_stderr
from random import Random

import torch
from torch import Tensor

from lessons.draws import normal
from lessons.figures.live import LiveRun, training_figure
from lessons.judging.certificate import certificate
from lessons.judging.index import exercises
from lessons.judging.judge import Exercise, adding_to
from lessons.judging.your_progress import progress
from lpkit import datasets, hardware
from lpkit.commands.doctor import Page, text
from lpkit.config import Config
from lpkit.datasets.prepared import TokenFiles
from lpkit.measure import doctor, probes
from lpkit.training.loop import fit
from lpkit.training.training import Training

# notebook 00 imports these from here
__all__ = ["LiveRun", "Page", "Training", "certificate", "doctor", "exercises", "fit", "hardware",
           "probes", "progress", "text", "training_figure"]


def prepared(config: Config) -> TokenFiles:
    """Return the token files of the config's data; prepare them first if they are missing.
    `datasets.prepare` prints its progress to standard error, which a notebook shows in red, so this
    function redirects it to standard output."""
    with redirect_stderr(sys.stdout):
        return datasets.prepare(config.data, vocab=config.model.vocab)


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: the meaning of a loss, and the cost of a step.

@exercise("00.uniform_loss", (2,), (256,), (50_304,), draw=lambda r: (r.randint(2, 300_000),),
          mistakes={"this is in bits; nats come from the natural logarithm": math.log2})
def uniform_loss(vocab: int) -> float:
    return math.log(vocab)


@exercise("00.bits_per_byte", (math.log(2), 1.0), (2.0, 1.0), (3.3, 4.2),
          draw=lambda r: (r.uniform(0.1, 12), r.uniform(1, 6)),
          mistakes={"the result is still in nats": lambda loss, size: loss / size,
                    "a token is several bytes, which share its loss":
                        lambda loss, size: loss / math.log(2) * size})
def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token


@exercise("00.step_seconds", (1e6, 1e3, 1e12, 1.0), (124e6, 524_288, 989e12, 0.4),
          (70e9, 4e6, 64 * 989e12, 0.38),
          draw=lambda r: (10 ** r.uniform(6, 12), 10 ** r.uniform(3, 7), 10 ** r.uniform(11, 18),
                          r.uniform(0.05, 1)),
          mistakes={"that is the forward pass alone":
                        lambda N, t, peak, mfu: 2 * N * t / peak / mfu,
                    "at a lower utilisation a step takes longer":
                        lambda N, t, peak, mfu: 6 * N * t / peak * mfu})
def step_seconds(parameters: float, tokens: float, peak_flops: float, mfu: float) -> float:
    return 6 * parameters * tokens / (peak_flops * mfu)     # 2 forward, 4 backward


# Exercises: the loss that is minimised, and the length of a step.

def _plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    rows = torch.arange(len(targets))
    return (logits.exp().sum(-1).log() - logits[rows, targets]).mean()


def _logits(r: Random) -> tuple[Tensor, Tensor]:
    n, vocab = r.randint(1, 6), r.randint(2, 9)
    return (normal(r, n, vocab, size=r.choice((1, 30, 1000))),
            torch.tensor([r.randrange(vocab) for _ in range(n)]))


@exercise("00.cross_entropy", (torch.zeros(1, 4), torch.tensor([2])),
          (torch.tensor([[1000.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])), draw=_logits,
          tolerance=1e-5, stars=2, minutes=10,
          mistakes={"exp overflows: first subtract the largest logit of each row":
                        _plain_cross_entropy,
                    "return the mean over the tokens, not the sum":
                        lambda logits, targets: len(targets) * cross_entropy(logits, targets)})
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits - logits.amax(-1, keepdim=True)
    right = logits.gather(-1, targets[:, None])[:, 0]
    return (logits.exp().sum(-1).log() - right).mean()


def _clip_each(grads: list[Tensor], most: float) -> list[Tensor]:
    return [g * min(1.0, most / max(g.norm().item(), 1e-30)) for g in grads]


def _clip_always(grads: list[Tensor], most: float) -> list[Tensor]:
    norm = math.sqrt(sum(g.square().sum().item() for g in grads))
    return [g * (most / norm) for g in grads] if norm else grads


@exercise("00.clip", ([torch.tensor([3.0]), torch.tensor([4.0])], 1.0),
          ([torch.tensor([0.3]), torch.tensor([0.4])], 1.0), ([torch.zeros(2)], 1.0),
          draw=lambda r: ([normal(r, r.randint(1, 5)) for _ in range(r.randint(1, 3))],
                          r.choice((0.1, 1.0, 10.0))),
          tolerance=1e-4, minutes=6,
          mistakes={"take one norm over all gradients": _clip_each,
                    "a gradient shorter than `most` stays as it is": _clip_always})
def clip(grads: list[Tensor], most: float) -> list[Tensor]:
    norm = torch.stack([g.norm() for g in grads]).norm()
    scale = min(1.0, most / norm.item()) if norm else 1.0
    return [g * scale for g in grads]
