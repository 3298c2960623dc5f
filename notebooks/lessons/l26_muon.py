"""Lesson 26, Muon: its study, its figures and its exercises.

Muon's update multiplies matrices, so its FLOPs are counted and compared with its seconds.
Newton-Schulz does not change singular vectors, so it only changes the singular values of a step, by
a polynomial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lessons import l20_optimizers as optimizers
from lessons.draws import normal
from lessons.figures.drawing import axis, figure, note, rule, scatter
from lessons.figures.style import COLOURS
from lessons.figures.waiting import progress as progress
from lessons.judging.judge import adding_to
from lessons.l20_optimizers import flops, overhead
from lessons.l20_optimizers import seconds_table as seconds_table
from lessons.timing import by_phase
from lpkit import hardware, preset
from lpkit.config import Config
from lpkit.contracts import Parameter
from lpkit.measure.updates import Bench
from lpkit.optim import muon
from lpkit.predict.flops import training_flops
from lpkit.predict.params import shapes
from lpkit.predict.updates import matrices
from lpkit.tables import FAINT, html_table
from lpkit.techniques.operation import fused
from lpkit.techniques.optimizers import OPTIMIZERS, rules_of
from lpkit.timing import Watch
from lpkit.training.training import Training

# ---- The study

# the examples of https://kellerjordan.github.io/posts/muon/, and the tokens B of their updates
PUBLISHED = {"gpt2-124m": 524_288, "llama-405b": 16_000_000}


def published(config: Config) -> float:
    """Return T m / B, the bound on Muon's overhead in https://kellerjordan.github.io/posts/muon/: T
    steps of Newton-Schulz, width m, B tokens per update."""
    return muon.NEWTON_SCHULZ * config.model.width / config.tokens_per_step


# Seconds.

@dataclass(frozen=True, kw_only=True)
class Timed(optimizers.Timed):
    """The times of AdamW and Muon, and of two parts of their work, in seconds."""

    forward_backward_fp32: float    # forward and backward in float32
    products: float                 # Newton-Schulz alone, for all matrices that Muon updates


def orthogonalisation(config: Config, device: Any) -> Callable[[], None]:
    """Return a runner that orthogonalises random matrices of the shapes that Muon updates."""
    muons, each = config.replace({"optimizer": "muon"}), shapes(config.model)
    ruled = rules_of(each, muons.optimizer)
    whole = [torch.randn(shape, device=device) for name, p in each.items()
             if ruled[name].name == "muon" for shape in matrices(p, fused(config.model, name))]

    def run() -> None:
        for x in whole:
            muon.orthogonalised(x.clone())

    return hardware.synchronised(run, device)


def timed(config: Config, *, rounds: int, watch: Watch = iter) -> Timed:
    """Measure AdamW, Muon, the float32 passes and Newton-Schulz, which take turns."""
    plain, phases = Bench(config.replace({"precision.recipe": "fp32"})), []
    beside = (lambda: phases.append(by_phase(plain)), orthogonalisation(config, plain.device))
    times = optimizers.timed(config, ["adamw", "muon"], rounds=rounds, watch=watch, beside=beside)
    return Timed(**vars(times), products=times.beside[-1], forward_backward_fp32=min(
        forward + backward for forward, backward, _ in phases[1:]))


# The effect of orthogonalisation.

def momenta(config: Config, updates: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Train with AdamW for some updates, and return the two moments of each matrix of the first
    block, by name. Queries, keys and values are separate matrices, as in Muon."""
    training = Training.build(config.replace({"optimizer": "adamw", "system.compile": False}))
    for step in range(updates):
        training.update(step)
    pairs = {}
    for name, p in training.model.named_parameters():
        if name.startswith("blocks.0.") and p.ndim == 2:
            parameter = Parameter(name, tuple(p.shape), fused=fused(config.model, name))
            held, own = training.optimizer.state[p], OPTIMIZERS["muon"].settings
            parts = [muon.apart(held[slot].float().cpu(), parameter, own)
                     for slot in ("exp_avg", "exp_avg_sq")]
            short = name.removeprefix("blocks.0.").removesuffix(".weight")
            names = [f"{short}, {what}" for what in ("query", "key", "value")]
            for each, *pair in zip(names if parameter.fused else [short], *parts):
                pairs[each] = tuple(t.flatten(0, 1) for t in pair)
    return pairs


def over_rms(values: Tensor) -> Tensor:
    """Return singular values over their root mean square. All are 1 if a step moves equally far in
    all directions."""
    return values / values.square().mean().sqrt()


def spectra(m: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Return the singular values of the steps of three rules from the same moments m and v, by
    rule: the largest first, over their root mean square."""
    steps = {"momentum": m, "AdamW": m / (v.sqrt() + 1e-8), "Lion": m.sign()}
    return {name: over_rms(torch.linalg.svdvals(step.double())) for name, step in steps.items()}


def lifted(values: Tensor, steps: int) -> Tensor:
    """Return singular values after `steps` steps of Newton-Schulz."""
    x = values / values.norm()
    for _ in range(steps):
        x = muon.A * x + muon.B * x**3 + muon.C * x**5
    return x


def newton_schulz(values: Tensor, steps: int) -> Tensor:
    """Return singular values after `steps` steps of Newton-Schulz, the largest first, over their
    root mean square."""
    return over_rms(lifted(values, steps).sort(descending=True).values)


NEAR = (0.5, 1.5)   # the range in which Muon's authors expect the singular values of a step
LEAST = 0.001068    # a singular value above this share of the Frobenius norm ends in NEAR


@dataclass(frozen=True)
class Near:
    """The share of a matrix's singular values that are in NEAR after five steps of Newton-Schulz:
    predicted from the momentum's singular values, and measured by decomposing the step."""

    predicted: float
    measured: float


def near(m: Tensor) -> Near:
    before = torch.linalg.svdvals(m.double())
    after = torch.linalg.svdvals(muon.orthogonalised(m.float().clone()).double())
    within = (after > NEAR[0]) & (after < NEAR[1])
    return Near(predicted=(before > LEAST * before.norm()).double().mean().item(),
                measured=within.double().mean().item())


# ---- Figures and tables


def spectrum_view(moments: Mapping[str, tuple[Tensor, Tensor]]) -> Callable[..., dict]:
    """Return a view for an Explorer: the singular values of a step, by rule."""
    known = {matrix: spectra(*pair) for matrix, pair in moments.items()}

    def show(matrix: str, steps: int) -> dict:
        last = newton_schulz(known[matrix]["momentum"], steps)
        by_rule = {**known[matrix], f"Muon, {steps} steps": last}
        colours = (FAINT, COLOURS[0], COLOURS[1], COLOURS[2])
        share = [100 * (i + 0.5) / len(last) for i in range(len(last))]
        lines = [scatter(share, values.clamp(min=1e-4).tolist(), name, colour,
                         line={"width": 4 if name.startswith("Muon") else 2},
                         hover="%{x:.0f}%: %{y:.3g}")
                 for (name, values), colour in zip(by_rule.items(), colours)]
        near = float(((last > 0.5) & (last < 2)).double().mean())
        return figure(lines, f"{matrix}: {near:.0%} of Muon's directions within a factor of 2 of "
                             f"their root mean square", height=420,
                      xaxis=axis("directions, sorted by singular value, %", range=[0, 100]),
                      yaxis=axis("singular value over the root mean square", type="log",
                                 range=[-4, 1.2], dtick=1, exponentformat="power"),
                      shapes=[rule(y=1)],
                      annotations=[note("1: all directions move equally far", 99, 0.03,
                                        "right bottom", font={"color": FAINT})])

    return show


def overhead_rows(config: Config) -> str:
    """Return an HTML table of Muon's FLOPs over those of forward and backward: the published bound,
    and as counted."""
    tokens_of = {"cpu-3m": preset("cpu-3m").tokens_per_step, **PUBLISHED}
    lines = []
    for name, tokens in tokens_of.items():
        with_muon = preset(name).replace({"optimizer": "muon"})
        m = with_muon.model
        counted = flops(with_muon) / (training_flops(m) * tokens / m.context)
        bound = muon.NEWTON_SCHULZ * m.width / tokens
        lines.append((name, f"{m.width:,}", f"{tokens:,}", f"{bound:.3%}", f"{counted:.3%}"))
    here = config.replace({"optimizer": "muon"})
    lines.append(("this notebook", f"{here.model.width:,}", f"{here.tokens_per_step:,}",
                  f"{published(here):.1%}", f"{overhead(here):.1%}"))
    return html_table(("model", "width m", "tokens per update B", "bound T m / B", "counted"),
                      lines)


def near_table(by_matrix: Mapping[str, Near]) -> str:
    """Return an HTML table of the share of each matrix's singular values that five steps of
    Newton-Schulz bring into NEAR."""
    rows = [(name, f"{share.predicted:.1%}", f"{share.measured:.1%}")
            for name, share in by_matrix.items()]
    return html_table(("matrix", f"before: above {LEAST:.4f} of the norm",
                       "after: between {} and {}".format(*NEAR)), rows)


def why_table(times: Timed, config: Config) -> str:
    """Return an HTML table of the FLOPs, time and FLOP/s of four parts of an update. The
    differences of FLOP/s explain the error of a prediction by FLOPs."""
    whole = training_flops(config.model, batch=config.global_batch)
    own = flops(config.replace({"optimizer": "muon"}))
    lines = [(name, f"{work / 1e9:.1f}", f"{1e3 * seconds:.1f} ms", f"{work / seconds / 1e9:.0f}")
             for name, work, seconds in (
                 ("forward and backward", whole, times.forward_backward),
                 ("forward and backward, float32", whole, times.forward_backward_fp32),
                 ("Newton-Schulz alone, float32", own, times.products),
                 ("Muon's whole update", own, times.optimizer["muon"]))]
    return html_table(("part", "GFLOPs", "time", "GFLOP/s"), lines, caption=times.caption)


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


def _iterated(x: Tensor, steps: int) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _step(w: Tensor, g: Tensor, m: Tensor, lr: float, decay: float, *, nesterov: bool = True,
          tall: bool = True, by_lr: bool = True, steps: int = 5) -> tuple[Tensor, Tensor]:
    """A step of Muon, and common mistakes."""
    m = m + 0.05 * (g - m)
    direction = g + 0.95 * (m - g) if nesterov else m
    x = _iterated(direction / direction.norm(), steps)
    factor = max(1, w.shape[0] / w.shape[1])**0.5 if tall else 1.0
    return w * (1 - (lr if by_lr else 1) * decay) - lr * factor * x, m


@exercise("26.step", (torch.ones(1, 1), torch.tensor([[2.0]]), torch.zeros(1, 1), 0.1, 0.0),
          (torch.ones(2, 2), torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.ones(2, 2), 0.1, 0.5),
          (torch.ones(2, 1), torch.tensor([[3.0], [4.0]]), torch.zeros(2, 1), 0.1, 0.0),
          minutes=8, stars=2, drawn=60,
          draw=lambda r: (*(normal(r, *shape, size=size) for shape in [
              (r.randint(1, 6), r.randint(1, 6))] for size in (0.5, 1.0, 0.3)),
              r.uniform(0.01, 0.2), r.uniform(0, 0.5)),
          mistakes={"take the gradient, moved towards the new momentum, as the direction":
                        lambda *case: _step(*case, nesterov=False),
                    "a matrix with more rows than columns takes a larger step":
                        lambda *case: _step(*case, tall=False),
                    "the decay is a share of lr": lambda *case: _step(*case, by_lr=False),
                    "take five steps of Newton-Schulz": lambda *case: _step(*case, steps=1)})
def muon_step(w: Tensor, g: Tensor, m: Tensor, lr: float,
              decay: float) -> tuple[Tensor, Tensor]:
    m = 0.95 * m + 0.05 * g
    direction = 0.05 * g + 0.95 * m
    x = direction / direction.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = max(1, w.shape[0] / w.shape[1])**0.5 * x
    return w * (1 - lr * decay) - lr * x, m


@exercise("26.overhead", ([torch.zeros(4, 4)], 100), ([torch.zeros(8, 2), torch.zeros(2, 2)], 10),
          minutes=5, drawn=60,
          draw=lambda r: ([torch.zeros(r.randint(1, 9), r.randint(1, 9))
                           for _ in range(r.randint(1, 4))], r.randint(10, 1000)),
          mistakes={"use the smaller of the two Gram matrices": lambda weights, tokens: sum(
                        5 * (4 * w.shape[0]**2 * w.shape[1] + 2 * w.shape[0]**3) for w in weights)
                        / (6 * tokens * sum(w.numel() for w in weights)),
                    "take five steps of Newton-Schulz": lambda weights, tokens: sum(
                        4 * min(w.shape) * w.numel() + 2 * min(w.shape)**3 for w in weights)
                        / (6 * tokens * sum(w.numel() for w in weights))})
def overhead_of(weights: list[Tensor], tokens: int) -> float:
    added = whole = 0
    for w in weights:
        n, m = sorted(w.shape)
        added += 5 * (2 * n * n * m + 2 * n**3 + 2 * n * n * m)
        whole += 6 * n * m * tokens
    return added / whole
