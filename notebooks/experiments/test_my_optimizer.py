"""Compares my_optimizer with PyTorch's AMSGrad: pytest test_my_optimizer.py

For your rule, compare with another library or with the paper's formula, number by number. Then
break the rule, and check that a test fails.
"""

import my_optimizer
import pytest
import torch

import lpkit
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.training.training import Training

ROW = OPTIMIZERS["my_optimizer"]
TINY = {"imports": "my_optimizer", "optimizer": "my_optimizer", "model.layers": 1,
        "model.width": 32, "model.heads": 2, "model.context": 32, "global_batch": 2,
        "eval_batches": 1, "steps": 5, "schedule.warmup_steps": 0}


def gradients():
    """Return gradients of which the third is large. Afterwards the largest second moment so far is
    not the last one, so a rule without the maximum fails."""
    chance = torch.Generator().manual_seed(0)
    sizes = (1.0, 1.0, 30.0, 0.1, 0.1, 0.1)
    return [size * torch.randn(5, 3, generator=chance, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_rule_is_pytorchs(decay):
    w = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)
    theirs = torch.nn.Parameter(w.clone())
    settings = type(ROW.settings)(lr=1e-2, weight_decay=decay)
    reference = torch.optim.AdamW(
        [theirs], lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps,
        weight_decay=decay, amsgrad=True)
    slots = [torch.zeros_like(w) for _ in ROW.slots]
    for update, g in enumerate(gradients(), 1):
        theirs.grad = g.clone()
        reference.step()
        my_optimizer.rule(w, g, slots, settings, update)
    assert torch.allclose(w, theirs.detach(), rtol=1e-12, atol=0)


def test_the_definition_is_the_rule():
    first_elements = [g.flatten()[0].item() for g in gradients()]
    w, *slots = (torch.zeros(1, dtype=torch.float64) for _ in range(1 + len(ROW.slots)))
    for update, g in enumerate(first_elements, 1):
        settings = type(ROW.settings)(lr=1e-2, weight_decay=0.0)
        my_optimizer.rule(w, torch.tensor([g], dtype=torch.float64), slots, settings, update)
    assert my_optimizer.definition(first_elements, 1e-2) == pytest.approx(w.item(), rel=1e-9)


def test_the_row_says_what_a_run_keeps():
    training = Training.build(lpkit.preset("cpu-3m").replace(TINY))
    first = training.update(0).loss
    for step in range(1, 5):
        last = training.update(step).loss
    kept = sum(slot.nbytes for slots in training.optimizer.state.values()
               for slot in slots.values() if isinstance(slot, torch.Tensor))
    weights = sum(p.numel() for p in training.model.parameters())
    assert kept == ROW.state_bytes() * weights and last < first
