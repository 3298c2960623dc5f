"""Optimizers of lesson 20 beyond the kit's own (adamw, lion, momentum, muon, sgd): their settings,
rows and rules.

    lpkit train cpu-3m --import lessons.rows.optimizers optimizer=soap
    lpkit.Config(imports="lessons.rows.optimizers", optimizer="soap")

A rule changes w and its slots in place, as `lpkit/optim/rules.py` describes. Rules import torch
when they run, so rows can be read, and memory and time predicted, without torch.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from lpkit.techniques.optimizers import (
    BY_ADAMW,
    FLOAT32,
    MOMENTS,
    OPTIMIZERS,
    AdamWSettings,
    MomentumSettings,
    Optimizer,
    OptimizerSettings,
    Shape,
    Slot,
)
from lpkit.values import Count, InnerShare, Positive, Rate, Share

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lpkit.contracts import Batch, Parameter
    from lpkit.optim.rules import Slots
    from lpkit.training.training import Training

LARGEST = 10_000        # largest side for which SOAP and Shampoo keep a Gram matrix
RMS = 0.2               # root mean square of NorMuon's step, about AdamW's
TINY = 1e-10            # added to the norms by which NorMuon divides
EPS = 2.0**-23          # as in torch.optim.Adafactor; the paper adds 1e-30 to squares


# ---- Adam, with the weight decay in the gradient

def adam(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980), with the weight decay as part of the gradient. Both
    are divided by the same root, so large gradients weaken the decay."""
    from lpkit.optim.rules import adamw

    coupled = SimpleNamespace(**vars(settings) | {"weight_decay": 0.0})
    adamw(w, g.add(w, alpha=settings.weight_decay), slots, coupled, update)


def adam_kernel(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """PyTorch's fused kernel on one parameter."""
    from torch.optim.adam import adam as kernel

    from lpkit.optim.rules import adamw_kernel

    adamw_kernel(w, g, slots, settings, update, kernel=kernel)


def adam_fused(groups: list[dict], settings: AdamWSettings) -> torch.optim.Optimizer:
    """Make the Adam that updates all parameters at once."""
    from torch.optim import Adam

    from lpkit.optim.rules import adamw_fused

    return adamw_fused(groups, settings, kind=Adam)


OPTIMIZERS["adam"] = Optimizer(
    why="AdamW, with the weight decay in the gradient",
    source="Kingma & Ba 2015, arXiv:1412.6980", slots=MOMENTS,
    settings=AdamWSettings(weight_decay=0.0, beta2=0.999),
    implementation=f"{__name__}:adam", kernel=f"{__name__}:adam_kernel",
    fused=f"{__name__}:adam_fused")


# ---- Adafactor: second moments of rows and columns

@dataclass(frozen=True, kw_only=True)
class AdafactorSettings(OptimizerSettings):
    lr: Positive = 1e-2     # relative to the weights' root mean square, which is at least `least`
    least: Positive = 1e-3
    decay: Share = 0.8      # a gradient's weight in second moments is update^-decay


def adafactor(w: Tensor, g: Tensor, slots: Slots, settings: AdafactorSettings, update: int,
              parameter: Parameter) -> None:
    """Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5, without momentum. The second
    moments of a matrix are estimated from those of its rows and columns. The step's root mean
    square is at most 1. The learning rate is relative to the weight's root mean square and falls as
    1 over the root of the update."""
    rows, columns, v = slots
    share, numbers = update**-settings.decay, math.prod(parameter.shape)
    if len(parameter.shape) == 2:
        rows.lerp_(parameter.gather(g.square().mean(1)), share)
        columns.lerp_(parameter.sum(g.square().sum(0)) / parameter.shape[0], share)
        v = parameter.part(rows)[:, None] * (columns / rows.mean().clamp(min=EPS))
    else:
        v.lerp_(g.square(), share)
        v = v.clone()
    step = v.clamp_(min=EPS**2).rsqrt_().mul_(g)
    length = (parameter.norm(step) / math.sqrt(numbers)).clamp(min=1.0)
    scale = (parameter.norm(w) / math.sqrt(numbers)).clamp(min=settings.least)
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.sub_(step.mul_(scale / length * min(settings.lr, update**-0.5)))


OPTIMIZERS["adafactor"] = Optimizer(
    why="Adam's step, by sums over rows and columns of a matrix's squares",
    source="Shazeer & Stern 2018, arXiv:1804.04235", settings=AdafactorSettings(),
    takes_parameter=True,
    slots=tuple(Slot(name=name, signed=False, shape=shape) for name, shape in (
        ("rows", lambda p, s: p[:1] if len(p) == 2 else (0,)),
        ("columns", lambda p, s: p[1:] if len(p) == 2 else (0,)),
        ("exp_avg_sq", lambda p, s: (0,) if len(p) == 2 else None))),
    temporary_bytes=2 * FLOAT32, implementation=f"{__name__}:adafactor")


# ---- LAMB and LARS: the step's length is a share of the parameter's norm

@dataclass(frozen=True, kw_only=True)
class LarsSettings(MomentumSettings):
    trust: Positive = 1e-3  # share of a parameter's norm by which it moves at lr 1


def lamb(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int,
         parameter: Parameter) -> None:
    """You et al. 2019, arXiv:1904.00962, algorithm 2. The weight decay is added to Adam's step
    before the step's norm is computed; a parameter of zeros moves by the unscaled step."""
    import torch

    m, v = slots
    m.lerp_(g, 1 - settings.beta1)
    v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
    root = (v / (1 - settings.beta2**update)).sqrt_().add_(settings.eps)
    step = torch.div(m, 1 - settings.beta1**update).div_(root)
    del root
    step.add_(w, alpha=settings.weight_decay)
    weight, length = parameter.norm(w), parameter.norm(step)
    trust = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
    w.sub_(step.mul_(trust * settings.lr))


def lars(w: Tensor, g: Tensor, slots: Slots, settings: LarsSettings, update: int,
         parameter: Parameter) -> None:
    """You et al. 2017, arXiv:1708.03888, algorithm 1: the weight decay is part of the gradient, the
    learning rate part of the velocity. If the norm of a parameter or gradient is 0, the step is
    SGD's."""
    import torch

    (velocity,) = slots
    weight, length = parameter.norm(w), parameter.norm(g)
    local = settings.trust * weight / (length + settings.weight_decay * weight)
    local = torch.where((weight > 0) & (length > 0), local, 1.0)
    step = g.add(w, alpha=settings.weight_decay).mul_(local * settings.lr)
    w.sub_(velocity.mul_(settings.momentum).add_(step))


OPTIMIZERS["lamb"] = Optimizer(
    why="AdamW's step, made as long as lr times the norm of its parameter",
    source="You et al. 2019, arXiv:1904.00962, algorithm 2",
    settings=AdamWSettings(lr=1e-2, beta2=0.999, eps=1e-6), slots=MOMENTS,
    takes_parameter=True, temporary_bytes=2 * FLOAT32, implementation=f"{__name__}:lamb")
OPTIMIZERS["lars"] = Optimizer(
    why="SGD with momentum, whose step is a share of the norm of its parameter",
    source="You et al. 2017, arXiv:1708.03888, algorithm 1",
    settings=LarsSettings(lr=1.0, weight_decay=5e-4),
    slots=(Slot(name="momentum_buffer"),), takes_parameter=True, temporary_bytes=FLOAT32,
    implementation=f"{__name__}:lars")


# ---- Schedule-free: an average of the weights instead of a falling learning rate

@dataclass(frozen=True, kw_only=True)
class ScheduleFreeSettings(AdamWSettings):
    beta1: InnerShare = 0.9     # weight of the average in the weights that are trained
    beta2: Rate = 0.999


def schedule_free(y: Tensor, g: Tensor, slots: Slots, settings: ScheduleFreeSettings,
                  update: int) -> None:
    """AdamW with an average of the weights instead of a falling learning rate (Defazio et al. 2024,
    arXiv:2405.15682, algorithm 1). Gradients are computed at y = (1 - beta1) z + beta1 x. z moves
    against the gradients. x is the mean of all z, weighted by the squared learning rate; x is not
    stored."""
    z, v, total = slots
    if update == 1:
        z.copy_(y)
    total.add_(settings.lr**2)
    share = settings.lr**2 / total
    v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
    step = g / (v / (1 - settings.beta2**update)).sqrt_().add_(settings.eps)
    step.add_(y, alpha=settings.weight_decay)
    y.lerp_(z, share).add_(step * (settings.lr * (settings.beta1 * (1 - share) - 1)))
    z.sub_(step, alpha=settings.lr)


def average(y: Tensor, slots: Slots, settings: ScheduleFreeSettings) -> Tensor:
    """Return x, the weights that evaluation uses, from y and z."""
    return y.lerp(slots[0], 1 - 1 / settings.beta1)


OPTIMIZERS["schedule-free"] = Optimizer(
    why="AdamW, and the average of its weights in place of a falling learning rate",
    source="Defazio et al. 2024, arXiv:2405.15682", settings=ScheduleFreeSettings(),
    slots=(Slot(name="z"), Slot(name="exp_avg_sq", signed=False),
           Slot(name="weight_sum", signed=False, shape=lambda p, s: (1,))),
    temporary_bytes=2 * FLOAT32, evaluated=f"{__name__}:average",
    implementation=f"{__name__}:schedule_free")


# ---- Sophia: momentum divided by the curvature

@dataclass(frozen=True, kw_only=True)
class SophiaSettings(AdamWSettings):
    gamma: Positive = 0.05  # factor on the curvature; with a larger one, fewer elements are clipped
    every: Count = 10       # the curvature is estimated after every n-th update


def sophia(w: Tensor, g: Tensor, slots: Slots, settings: SophiaSettings, update: int) -> None:
    """No element moves by more than lr; elements without curvature move by lr (Liu et al. 2023,
    arXiv:2305.14342, algorithm 3)."""
    m, h = slots
    m.lerp_(g, 1 - settings.beta1)
    step = (h * settings.gamma).clamp_(min=settings.eps).reciprocal_().mul_(m).clamp_(-1, 1)
    w.mul_(1 - settings.lr * settings.weight_decay).sub_(step, alpha=settings.lr)


def estimate(g: Tensor, slots: Slots, settings: SophiaSettings, labels: float) -> None:
    """Algorithm 2, Gauss-Newton-Bartlett. g: gradient of the mean loss of `labels` drawn labels."""
    slots[1].lerp_(g.square().mul_(labels), 1 - settings.beta2)


def after_update(training: Training, settings: SophiaSettings, batch: Batch, step: int) -> None:
    """After every n-th update, estimate the curvature from gradients of labels that the model
    draws. The draws depend only on the seed and the update, not on the ranks. The estimate is never
    skipped."""
    import torch

    from lpkit.optim.rounding import generator

    if step % settings.every:
        return
    draw = generator(torch.device("cpu"), training.config.seed, step)
    layout = training.ranks.layout
    world, own = layout.batch_ranks, layout.batch_rank(training.ranks.rank)
    drawn = torch.rand(world * len(batch.targets), *batch.targets.shape[1:], generator=draw)
    labels = drawn.numel() if batch.weights is None else (
        training.ranks.mean(batch.weights.sum()) * world)
    batch = replace(batch, targets=drawn.chunk(world)[own].to(training.device))
    training.optimizer.instead = {settings: partial(estimate, labels=labels)}
    training.executor.plain.forward_backward(replace(training, objective=training.loss), batch,
                                             phases=nullcontext)
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.optimizer.instead = {}


OPTIMIZERS["sophia"] = Optimizer(
    why="a momentum over the curvature that labels of the model's own show, clipped at lr",
    source="Liu et al. 2023, arXiv:2305.14342, algorithm 3 (Sophia-G)",
    slots=(Slot(name="exp_avg"), Slot(name="hessian", signed=False)), temporary_bytes=FLOAT32,
    settings=SophiaSettings(beta1=0.96, beta2=0.99, eps=1e-12),
    after=f"{__name__}:after_update", passes=lambda s: {"drawn labels": s.every},
    implementation=f"{__name__}:sophia")


# ---- NorMuon: Muon's step with rows of equal length

@dataclass(frozen=True, kw_only=True)
class NorMuonSettings(MomentumSettings):
    beta2: Rate = 0.95


def normuon(w: Tensor, g: Tensor, slots: Slots, settings: NorMuonSettings, update: int,
            parameter: Parameter) -> None:
    """Bring the rows of Muon's step to equal length by their second moments (Li et al. 2025,
    arXiv:2510.05491). Algorithm 1, without Nesterov's momentum; the matrices of a fused matrix are
    updated separately."""
    from lpkit.optim.muon import apart, orthogonalised

    m, v = slots
    m.lerp_(g, 1 - settings.momentum)
    whole = parameter.gather(m.clone())
    matrices, rows = (apart(t, parameter, settings) for t in (whole, v[:, None]))
    for part, moment in zip(matrices, rows):
        step = orthogonalised(part.flatten(0, 1)).reshape(part.shape)
        moment.lerp_(step.square().mean(2, keepdim=True), 1 - settings.beta2)
        part.copy_(step.div_(moment.sqrt().add_(TINY)))
        part.mul_(RMS * math.sqrt(part.numel()) / step.norm().add_(TINY))
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(parameter.part(whole), alpha=-settings.lr)


OPTIMIZERS["normuon"] = replace(
    OPTIMIZERS["muon"],
    why="Muon's step, with rows of one length; embeddings, head and vectors by AdamW",
    source="Li et al. 2025, arXiv:2510.05491, algorithm 1",
    # an lr for steps whose root mean square is 0.2
    settings=NorMuonSettings(lr=1e-3, weight_decay=0.01, momentum=0.95),
    slots=(Slot(name="momentum_buffer"),
           Slot(name="rows", signed=False, shape=lambda p, s: p[:1])),
    groups=BY_ADAMW, implementation=f"{__name__}:normuon")


# ---- Shampoo and SOAP: directions from the Gram matrices of gradients

@dataclass(frozen=True, kw_only=True)
class ShampooSettings(MomentumSettings):
    eps: Positive = 1e-2    # added to the sums; it sets the step in directions not seen yet
    every: Count = 10       # the roots are computed at every n-th update


@dataclass(frozen=True, kw_only=True)
class SoapSettings(AdamWSettings):
    every: Count = 10       # the bases are renewed at every n-th update


def sides(p: Shape) -> list[int]:
    """Return the sides of a matrix for which SOAP has a basis; 0 for a side without one."""
    return [n * (n <= LARGEST and len(p) == 2) for n in (*p, 0)]


def _sums(p: Shape, i: int) -> Shape:
    """Shampoo's sums of side i: a Gram matrix; a diagonal for a vector or an oversized side."""
    return (sides(p)[i],) * 2 if sides(p)[i] else p[i:i + 1] or (0,)


def inverse_root(total: Tensor, eps: float, power: int) -> Tensor:
    """Return total^(-1/power) of a Gram matrix (n, n) or a diagonal (n,) that started at eps."""
    import torch

    if total.ndim == 1:
        return total.clamp(min=eps).pow_(-1 / power)
    values, vectors = torch.linalg.eigh(total)
    return vectors * values.clamp_(min=eps).pow_(-1 / power) @ vectors.mT


def shampoo(w: Tensor, g: Tensor, slots: Slots, settings: ShampooSettings, update: int,
            parameter: Parameter) -> None:
    """Scale a gradient to equal length in all directions of past gradients (Gupta et al. 2018,
    arXiv:1802.09568). Algorithm 1 with momentum. The only side of a vector has the root 1/2 of a
    diagonal (algorithm 2). A side that is too long has a diagonal, too. The step is not
    grafted."""
    m, *sums, left, right = slots
    whole = parameter.gather(g)
    step = whole.view(len(whole), -1)
    for total, root, x in zip(sums, (left, right), (step, step.mT)):
        if update == 1:     # also for LAPACK, which may find no eigenvectors if most rows are zeros
            (total.diagonal() if total.ndim == 2 else total).fill_(settings.eps)
        if total.ndim == 2:
            total.addmm_(x, x.mT)
        else:
            total.add_(x.square().sum(1))
        if (update - 1) % settings.every == 0:
            root.copy_(inverse_root(total, settings.eps, 2 * whole.ndim))
    for root in (left, right):
        if len(root):
            step = root @ step if root.ndim == 2 else root[:, None] * step
        step = step.mT
    w.mul_(1 - settings.lr * settings.weight_decay)
    m.mul_(settings.momentum).add_(parameter.part(step.view(whole.shape)))
    w.sub_(m, alpha=settings.lr)


def turned(x: Tensor, left: Tensor, right: Tensor, back: bool = False) -> Tensor:
    """Return x in the bases `left` and `right`; an empty basis leaves its side unchanged."""
    x = (left if back else left.mT) @ x if len(left) else x
    return x @ (right.mT if back else right) if len(right) else x


def soap(w: Tensor, g: Tensor, slots: Slots, settings: SoapSettings, update: int,
         parameter: Parameter) -> None:
    """Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv:2409.11321), with
    the order of https://github.com/nikhilvyas/SOAP/blob/a1e5535/soap.py. Algorithms 3 and 4, with
    both moments in the bases. The first update only computes the bases."""
    import torch

    m, v, *grams, left, right = slots
    whole, n, turns = parameter.gather(g), update - 1, (update - 1) % settings.every == 0
    if n:
        mine = parameter.part(turned(whole, left, right))
        m.lerp_(mine, 1 - settings.beta1)
        v.mul_(settings.beta2).addcmul_(mine, mine, value=1 - settings.beta2)
        mine = (v / (1 - settings.beta2**n)).sqrt_().add_(settings.eps).reciprocal_().mul_(m)
        mine = parameter.part(turned(parameter.gather(mine), left, right, back=True))
        w.mul_(1 - settings.lr * settings.weight_decay)
        w.sub_(mine, alpha=settings.lr / (1 - settings.beta1**n))
    mine = turned(parameter.gather(m), left, right, back=True) if turns else m
    pairs = zip(grams, (left, right), (whole, whole.t()))
    for gram, basis, x in [pair for pair in pairs if len(pair[0])]:
        gram.addmm_(x, x.mT, beta=settings.beta2, alpha=1 - settings.beta2)
        if turns and n:
            order = (basis * (gram @ basis)).sum(0).argsort(descending=True)
            basis[:, order] = torch.orgqr(*torch.geqrf(gram @ basis[:, order]))
        elif turns:
            basis.copy_(torch.linalg.svd(x, full_matrices=len(x) > x.shape[1])[0])
    if turns:
        m.copy_(parameter.part(turned(mine, left, right)))


OPTIMIZERS["shampoo"] = Optimizer(
    why="the gradient times the inverse fourth roots of its grams' sums, from both sides",
    source="Gupta et al. 2018, arXiv:1802.09568, algorithm 1",
    settings=ShampooSettings(lr=0.03, weight_decay=0.01),
    slots=(Slot(name="momentum_buffer"),
           *(Slot(name=name, shape=lambda p, s, i=i: _sums(p, i)) for name, i in (
               ("left", 0), ("right", 1), ("left_root", 0), ("right_root", 1)))),
    takes_parameter=True, gathers=1,
    whole_bytes=lambda p, s: FLOAT32 * max(2 * math.prod(p), 3 * max(sides(p))**2),
    # both Gram matrices, both products; eigenvectors of a Gram matrix take 9 n^3, its root 2 n^3
    flops=lambda p, s: (4 * math.prod(p) * sum(sides(p))
                        + 11 * sum(n**3 for n in sides(p)) / s.every),
    implementation=f"{__name__}:shampoo")
OPTIMIZERS["soap"] = Optimizer(
    why="Adam's step, in the basis in which Shampoo's preconditioner is diagonal",
    source="Vyas et al. 2024, arXiv:2409.11321, algorithm 3",
    settings=SoapSettings(lr=3e-3, weight_decay=0.01, beta1=0.95),
    slots=(*MOMENTS, *(Slot(name=n, shape=lambda p, s, i=i: (sides(p)[i],) * 2) for n, i in (
        ("left", 0), ("right", 1), ("left_basis", 0), ("right_basis", 1)))),
    takes_parameter=True, gathers=2, temporary_bytes=FLOAT32,
    whole_bytes=lambda p, s: 2 * FLOAT32 * max(math.prod(p) * any(sides(p)), max(sides(p))**2),
    # to the basis, back, and the Gram matrix; a renewed basis rotates the momentum, QR has 8/3 n^3
    flops=lambda p, s: (2 * math.prod(p) * sum(sides(p)) * (3 + 2 / s.every)
                        + (4 + 8 / 3) * sum(n**3 for n in sides(p)) / s.every),
    implementation=f"{__name__}:soap")


# ---- GaLore: Adam in a few directions of a matrix's gradient

@dataclass(frozen=True, kw_only=True)
class GaloreSettings(AdamWSettings):
    rank: Count = 128       # of the projection; at most the shorter side
    every: Count = 200      # the projection is renewed at every n-th update
    scale: Positive = 0.25  # factor on the learning rate of projected steps


def _low(p: Shape, settings: GaloreSettings) -> Shape | None:
    """Return the shape of GaLore's projected gradient; None for a vector, which has none."""
    return (min(settings.rank, *p), max(p)) if len(p) == 2 else None


def galore(w: Tensor, g: Tensor, slots: Slots, settings: GaloreSettings, update: int,
           parameter: Parameter) -> None:
    """Adam's moments of a gradient's projection onto a few directions (Zhao et al. 2024,
    arXiv:2403.03507). Algorithm 2, projecting the shorter side; AdamW for a vector. The moments are
    kept when the projection is renewed."""
    import torch

    from lpkit.optim.rules import adamw

    *moments, projection = slots
    if not len(projection):
        return adamw(w, g, moments, settings, update)
    whole = parameter.gather(g)
    x = whole if whole.shape[0] < whole.shape[1] else whole.mT
    if (update - 1) % settings.every == 0:
        projection.copy_(torch.linalg.svd(x, full_matrices=False)[0][:, :projection.shape[1]])
    step = torch.zeros_like(moments[0])     # without weight decay
    adamw(step, projection.mT @ x, moments, settings, update)
    step = projection @ step
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(parameter.part(step if x is whole else step.mT), alpha=settings.scale)


OPTIMIZERS["galore"] = Optimizer(
    why="AdamW in the r directions in which a matrix's gradient is largest; others by AdamW",
    source="Zhao et al. 2024, arXiv:2403.03507, algorithm 2",
    settings=GaloreSettings(lr=1e-2, weight_decay=0.0, beta2=0.999),
    slots=(*(replace(slot, shape=_low) for slot in MOMENTS), Slot(
        name="projection", shape=lambda p, s: (min(p), min(s.rank, *p)) if p[1:] else (0,))),
    groups=BY_ADAMW[:3], takes_parameter=True, gathers=1,
    # singular vectors; the projection, Adam's step and its root; that step and the whole one
    whole_bytes=lambda p, s: FLOAT32 * max(
        math.prod(p) + min(p)**2 * len(p[1:]), math.prod(p) + math.prod(_low(p, s) or (0,)),
        3 * math.prod(_low(p, s) or (0,))),
    # to the projection and back; singular vectors take 6 m n^2 + 20 n^3 (Golub & Van Loan)
    flops=lambda p, s: len(p[1:]) * (4 * math.prod(p) * min(s.rank, *p) + (
        6 * max(p) * min(p)**2 + 20 * min(p)**3) / s.every),
    implementation=f"{__name__}:galore")
