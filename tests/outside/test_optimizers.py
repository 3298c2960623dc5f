"""Update rules: those that PyTorch has, beside its own classes; the others, beside their papers'
words in float64 NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import lessons.rows.optimizers  # noqa: F401  ten rules more
from lpkit.optim.stepper import build
from lpkit.techniques.optimizers import OPTIMIZERS

SHAPES = ((24, 40), (48, 16))


def gradients(updates: int, seed: int = 0) -> list[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]
            for _ in range(updates)]


def weights() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(9)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]


def by_the_kit(name: str, each: list[list[torch.Tensor]], **settings) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(w.float()) for w in weights()]
    row = OPTIMIZERS[name]
    optimizer = build({f"blocks.{i}.weight": p for i, p in enumerate(parameters)},
                      replace(row.settings, name=name, **settings))
    for grads in each:
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g.float()
        optimizer.step()
    return [p.detach().double() for p in parameters]


def by_torch(make, each: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(w) for w in weights()]
    optimizer = make(parameters)
    for grads in each:
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


def near(found: list[torch.Tensor], due: list[torch.Tensor], share: float) -> None:
    """Of how far the weights moved."""
    for one, of_definition, w in zip(found, due, weights(), strict=True):
        moved = (of_definition - w).norm()
        assert moved > 0 and (one - of_definition).norm() <= share * moved + 1e-6 * w.norm()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.95, 0.5)])
@pytest.mark.parametrize("lr", [1e-4, 1e-2])
@pytest.mark.parametrize("name, theirs", [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_adam_and_adamw(name, theirs, lr, betas, eps, decay):
    each = gradients(12)
    found = by_the_kit(name, each, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps,
                       weight_decay=decay)
    near(found, by_torch(lambda p: theirs(p, lr=lr, betas=betas, eps=eps, weight_decay=decay),
                         each), 2e-4)


@pytest.mark.parametrize("lr", [1e-3, 0.1])
def test_plain_descent(lr):
    each = gradients(12)
    near(by_the_kit("sgd", each, lr=lr, weight_decay=0.0),
         by_torch(lambda p: torch.optim.SGD(p, lr=lr), each), 2e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("lr", [1e-3, 0.1])
def test_momentum(lr, momentum):
    each = gradients(12)
    found = by_the_kit("momentum", each, lr=lr, momentum=momentum, weight_decay=0.0)
    near(found, by_torch(lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum), each), 2e-4)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
@pytest.mark.parametrize("lr", [1e-3, 2e-2])
def test_muon(lr, momentum, decay, monkeypatch):
    """Theirs multiplies in bf16: that cast is taken out of it."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    each = gradients(6)
    found = by_the_kit("muon", each, lr=lr, momentum=momentum, weight_decay=decay)
    near(found, by_torch(lambda p: torch.optim.Muon(p, lr=lr, momentum=momentum,
        weight_decay=decay), each), 1e-3)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-3, 1e-2])
def test_adafactor(lr, decay):
    each = gradients(8)
    eps = (torch.finfo(torch.float32).eps, 1e-3)
    found = by_the_kit("adafactor", each, lr=lr, weight_decay=decay)
    near(found, by_torch(lambda p: torch.optim.Adafactor(p, lr=lr, weight_decay=decay, eps=eps),
                         each), 1e-3)


# ---- papers, in NumPy

def lion(w, grads, lr=1e-4, beta1=0.9, beta2=0.99, decay=0.0):
    """Chen et al. 2023, algorithm 2."""
    m = np.zeros_like(w)
    for g in grads:
        c = beta1 * m + (1 - beta1) * g
        w = w - lr * (np.sign(c) + decay * w)
        m = beta2 * m + (1 - beta2) * g
    return w


def lamb(w, grads, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, decay=0.0):
    """You et al. 2020, algorithm 2, with the norm of the weights as it is."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        u = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + eps) + decay * w
        w = w - lr * np.linalg.norm(w) / np.linalg.norm(u) * u
    return w


def schedule_free(w, grads, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.0):
    """Defazio et al. 2024, AdamW without a warm-up: the weights that are trained are y. Their code
    squares the rate in the average."""
    z, x, v = w.copy(), w.copy(), np.zeros_like(w)
    y = w
    for t, g in enumerate(grads, 1):
        v = beta2 * v + (1 - beta2) * g * g
        z = z - lr * (g / (np.sqrt(v / (1 - beta2**t)) + eps) + decay * y)
        x = x + (z - x) / t
        y = (1 - beta1) * z + beta1 * x
    return y


PAPERS = {"lion": (lion, [{"lr": 1e-3}, {"lr": 1e-4, "decay": 0.1},
                          {"lr": 1e-2, "beta1": 0.5, "beta2": 0.5}, {"lr": 1e-3, "beta1": 0.0}]),
          "lamb": (lamb, [{"lr": 1e-3, "eps": 1e-6}, {"lr": 1e-2, "eps": 1e-6, "decay": 0.1},
                          {"lr": 1e-3, "eps": 1e-6, "beta2": 0.5}]),
          "schedule-free": (schedule_free, [{"lr": 1e-3}, {"lr": 1e-2, "decay": 0.1},
              {"lr": 1e-3, "beta1": 0.5}])}
OURS = {"decay": "weight_decay"}


@pytest.mark.parametrize("name, settings",
                         [pytest.param(name, settings, id=f"{name} {settings}")
                          for name, (_, each) in PAPERS.items() for settings in each])
def test_other_rules_are_their_papers(name, settings):
    rule, each = PAPERS[name][0], gradients(10)
    of_kit = {OURS.get(key, key): value for key, value in {"decay": 0.0, "beta1": 0.9,
        "beta2": 0.99 if name == "lion" else 0.999, **settings}.items()}
    due = [torch.from_numpy(rule(w.numpy(), [grads[i].numpy() for grads in each],
                                 **{"beta2": of_kit["beta2"], **settings}))
           for i, w in enumerate(weights())]
    near(by_the_kit(name, each, **of_kit), due, 1e-3)
