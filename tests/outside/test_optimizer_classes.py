"""Rules as classes of PyTorch's kind, used as in torch.optim: `torch.optim`'s own items, beside its
classes and by hand."""

import copy
from itertools import pairwise

import pytest
import torch

import lessons.rows.optimizers  # noqa: F401  ten rules more
from lpkit import optim

# ours, theirs, and settings that both take
PAIRS = [
    ("AdamW", torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8,
                                  "weight_decay": 0.01}),
    ("AdamW", torch.optim.AdamW, {"lr": 1e-2, "betas": (0.0, 0.5), "eps": 1e-3,
                                  "weight_decay": 0.0}),
    ("Adam", torch.optim.Adam, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8,
                                "weight_decay": 0.01}),
    ("SGD", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.0}),
    ("Momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}),
]
IDS = [f"{name} {settings['lr']}" for name, _, settings in PAIRS]


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def trained(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10,
            scheduler=None) -> list[float]:
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(32, 6, generator=draw)
        optimizer.zero_grad()
        loss = (net(x) - x[:, :3].sin()).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def alike(one: torch.nn.Module, other: torch.nn.Module, atol: float = 2e-6) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=atol)


@pytest.mark.parametrize("name, theirs, settings", PAIRS, ids=IDS)
def test_a_network_is_trained_alike(name, theirs, settings):
    ours, other = model(), model()
    a, b = trained(ours, getattr(optim, name)(ours.parameters(), **settings)), trained(other,
        theirs(other.parameters(), **settings))
    assert a == pytest.approx(b, rel=1e-5)
    alike(ours, other)


@pytest.mark.parametrize("name, theirs, settings", PAIRS, ids=IDS)
def test_groups_have_their_own_rate_and_decay(name, theirs, settings):
    def groups(net):
        return [{"params": net[0].parameters(), "lr": settings["lr"] / 10},
                {"params": net[2].parameters()}]

    ours, other = model(), model()
    trained(ours, getattr(optim, name)(groups(ours), **settings))
    trained(other, theirs(groups(other), **settings))
    alike(ours, other)


@pytest.mark.parametrize("name, theirs, settings", PAIRS, ids=IDS)
def test_a_scheduler_changes_the_rate(name, theirs, settings):
    ours, other = model(), model()
    one, two = getattr(optim, name)(ours.parameters(), **settings), theirs(other.parameters(),
        **settings)
    trained(ours, one, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(one, 10))
    trained(other, two, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(two, 10))
    assert one.param_groups[0]["lr"] == two.param_groups[0]["lr"]
    alike(ours, other)


ROWS = ["AdamW", "Adam", "Lion", "SGD", "Momentum", "Adafactor", "Lamb", "Lars"]


@pytest.mark.parametrize("name", ROWS)
def test_a_state_dict_goes_on_to_the_bit(name):
    first, second = model(), model(5)
    one = getattr(optim, name)(first.parameters())
    trained(first, one)
    second.load_state_dict(first.state_dict())
    two = getattr(optim, name)(second.parameters())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert trained(first, one) == trained(second, two)


@pytest.mark.parametrize("name", ROWS)
def test_a_parameter_without_a_gradient_stays(name):
    net = model()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    trained(net, getattr(optim, name)(net.parameters()), steps=3)
    assert torch.equal(net[0].weight, before) and net[2].weight.grad is not None


@pytest.mark.parametrize("name", ROWS)
def test_a_closure_is_called_and_its_loss_comes_back(name):
    net = model()
    optimizer, x = getattr(optim, name)(net.parameters()), torch.ones(4, 6)

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(model()(x).square().mean().item())
    assert net(x).square().mean() < model()(x).square().mean()


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion", "Momentum", "Lamb"])
def test_a_loss_falls(name):
    """Over 150 steps, to less than half: torch.optim's own test of each class asks that a loss
    fall."""
    net = model()
    losses = trained(net, getattr(optim, name)(net.parameters(),
        lr={"Lion": 3e-3, "Momentum": 0.05}.get(name, 1e-2)), steps=150)
    means = [sum(losses[i:i + 50]) / 50 for i in (0, 50, 100)]
    assert all(after < before for before, after in pairwise(means)) and means[-1] < means[0] / 2


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("settings, error",
                         [({"lr": -1.0}, ValueError), ({"beta3": 0.5}, TypeError),
                          ({"weight_decay": -0.1}, ValueError)], ids=str)
def test_what_a_rule_cannot_take_is_refused(name, settings, error):
    with pytest.raises(error):
        getattr(optim, name)(model().parameters(), **settings)


def test_no_parameters_are_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.AdamW([])
