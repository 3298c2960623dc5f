"""Optimizers for models and loops of other people: torch.optim's ways, and the bits of torch.optim
and of the kit's stepper.

Only these tests catch: a class whose update is not the stepper's or PyTorch's to the bit, a
schedule that changes nothing, a copy that shares state, a closure, scaler or sparse gradient that
is not taken, and a wrong setting that is not refused as PyTorch does.
"""

import copy
import io
import operator
import pickle

import pytest
import torch
from torch.optim import lr_scheduler

import lessons.rows.optimizers  # noqa: F401  ten rules more
import lpkit.optim
from lpkit.contracts import Parameter, StatePlacement
from lpkit.errors import ConfigError
from lpkit.optim import Adam, AdamW, Lion, Muon
from lpkit.optim.classes import optimizer
from lpkit.optim.stepper import Stepper
from lpkit.techniques.optimizers import OPTIMIZERS
from tests.optim.test_optim import gradient, settings_of, two_sizes
from tests.techniques import toys

NAMES = [name for name, row in OPTIMIZERS.items() if not (row.after or row.evaluated)]
MATRICES, MIXED = ((24, 16), (16, 30)), ((24, 16), (17,))
# so that later updates differ from the first
EVERY = {name: {"every": 3} for name in ("galore", "shampoo", "soap")}


def shapes_of(name: str):
    return MATRICES if OPTIMIZERS[name].matrices else MIXED


def step(opt, parameters, updates=range(20)):
    for update in updates:
        for p in parameters:
            p.grad = gradient(p, update)
        opt.step()
    return [p.detach().clone() for p in parameters]


def equal(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_two_groups_are_updated_as_by_the_kits_stepper(name, dtype):
    """Of float32; in float64, which a run has not, by the rule that it has. A group has settings of
    its own, and all of it decays."""
    ours, theirs = (two_sizes(dtype, shapes_of(name)) for _ in range(2))
    row, own = OPTIMIZERS[name], EVERY.get(name, {})
    lr, second = 0.7 * row.settings.lr, {"lr": 1e-3, "weight_decay": 0.3}
    beta = {"betas": (0.8, 0.7)} if hasattr(row.settings, "beta1") else {}
    got = step(optimizer(name)([{"params": ours[:1]}, {"params": ours[1:], **second, **beta}],
                               lr=lr, weight_decay=0.02, **own), ours)
    of = settings_of(name, lr=lr, weight_decay=0.02, **own)
    by_group = settings_of(name, **second, **own, **({"beta1": 0.8, "beta2": 0.7} if beta else {}))
    if dtype == torch.float32:
        groups = [{"params": [p], "settings": s, "lr": s.lr, "weight_decay": s.weight_decay}
                  for p, s in zip(theirs, (of, by_group))]
        parameter_of = {p: Parameter("p", tuple(p.shape)) for p in theirs}
        want = step(Stepper(groups, of, moment_format="float32", placement=StatePlacement(), seed=0,
                            kernels="auto", by_first=operator.call, facts=parameter_of), theirs)
    else:
        rule, want = optimizer(name).rule, []
        for p, s in zip(theirs, (of, by_group)):
            w = p.detach().clone()
            slots = [torch.zeros(w.shape if (shape := slot.shape(tuple(w.shape), s)) is None
                                 else shape, dtype=dtype) for slot in row.slots]
            for update in range(20):
                rule(w, gradient(w, update), slots, s, update + 1,
                     *[Parameter("p", tuple(w.shape))] * row.takes_parameter)
            want.append(w)
    assert equal(got, want) and not equal(got, two_sizes(dtype, shapes_of(name)))


@pytest.mark.parametrize("name, theirs, settings", [
    ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.2,
                                  "fused": True}),
    ("adam", torch.optim.Adam, {"betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.2,
                                "fused": True}),
    ("momentum", torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.0, "foreach": False}),
    ("sgd", torch.optim.SGD, {"weight_decay": 0.0, "foreach": False})])
def test_two_groups_are_updated_as_by_pytorch(name, theirs, settings):
    """Bit for bit, positional lr and names too. SGD's decay is part of its gradient in PyTorch, so
    there is none here."""
    own = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    both = []
    for make, given in ((optimizer(name), own), (theirs, settings)):
        parameters = two_sizes(torch.float32, MIXED)
        opt = make([{"params": [("one", parameters[0])], "lr": 0.3},
                    {"params": [("two", parameters[1])]}], 0.01, **given)
        assert [group["param_names"] for group in opt.param_groups] == [["one"], ["two"]]
        both.append(step(opt, parameters))
    assert equal(*both)


SCHEDULES = {
    "from zero": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(step / 5, 1.0)),
    "cosine to zero": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=10),
    "one cycle, momentum too": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[0.1, 0.02],
        total_steps=20),
    "warm-up, then cosine": lambda opt: lr_scheduler.SequentialLR(opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(opt, 12)],
        [4]),
}


@pytest.mark.parametrize("name, schedule", [*(("adamw", schedule) for schedule in SCHEDULES),
                                            ("momentum", "one cycle, momentum too")])
def test_schedules_of_pytorch_change_what_they_change_there(name, schedule):
    theirs = {"adamw": lambda p: torch.optim.AdamW(p, 1e-2, (0.9, 0.95), weight_decay=0.1,
                                                   fused=True),
              "momentum": lambda p: torch.optim.SGD(p, 1e-2, 0.9, foreach=False)}[name]
    both = []
    for make in (lambda p: optimizer(name)(p, 1e-2, weight_decay=0.1 * (name == "adamw")), theirs):
        parameters = two_sizes(torch.float32, MIXED)
        opt = make([{"params": parameters[:1]}, {"params": parameters[1:]}])
        schedule_ = SCHEDULES[schedule](opt)
        for update in range(19):
            step(opt, parameters, [update])
            schedule_.step()
        both.append([p.detach() for p in parameters])
    assert equal(*both)


@pytest.mark.parametrize("name, way", [*((name, "state_dict") for name in NAMES),
                                       ("adamw", "deepcopy"), ("soap", "deepcopy"),
                                       ("adamw", "pickle"), ("soap", "pickle")])
def test_a_copy_goes_on_bit_for_bit(name, way):
    """And it does not share state: the first one goes on before the second one does."""
    def new_optimizer(parameters, **changes):
        return optimizer(name)([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1e-3}],
                               **EVERY.get(name, {}) | changes)

    ours = two_sizes(torch.float32, shapes_of(name))
    opt = new_optimizer(ours)
    before = step(opt, ours, range(7))
    if way == "state_dict":
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        again = [torch.nn.Parameter(p.clone()) for p in before]
        other = new_optimizer(again, lr=0.5)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert ([group["lr"] for group in other.param_groups]
                == [group["lr"] for group in opt.param_groups])
    else:
        other = copy.deepcopy(opt) if way == "deepcopy" else pickle.loads(pickle.dumps(opt))
        again = [p for group in other.param_groups for p in group["params"]]
    want = step(opt, ours, range(7, 12))
    assert equal(step(other, again, range(7, 12)), want) and not equal(want, before)


@pytest.mark.parametrize("ours, theirs", [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
def test_a_state_of_pytorchs_own_goes_on_here(ours, theirs):
    """The names of state are PyTorch's, so that a loop may change its optimizer for this one."""
    a, b = two_sizes(torch.float32, MIXED), two_sizes(torch.float32, MIXED)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    first, second = theirs(a, fused=True, **settings), ours(b, **settings)
    for p, q in zip(b, step(first, a, range(5))):
        p.data.copy_(q)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert equal(step(second, b, range(5, 10)), step(first, a, range(5, 10)))


@pytest.mark.parametrize("name", ["adamw", "soap"])
def test_a_model_of_other_people_learns_by_a_closure(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Tanh(),
                                torch.nn.Linear(16, 4, bias=False))
    x, y = torch.randn(64, 8), torch.randn(64, 4)
    opt, seen = optimizer(name)(model.named_parameters(), weight_decay=0.0), []

    def closure():
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(30):
        seen.append(opt.step(closure).item())
    assert seen[-1] < seen[0] - 1e-3 and opt.zero_grad() is None and model[0].weight.grad is None


def test_a_group_is_added_and_a_scaler_leaves_out_what_overflowed():
    a, b = two_sizes(torch.float32, MIXED)
    opt = Lion([a], lr=0.1, weight_decay=0.0)
    opt.add_param_group({"params": b, "lr": 0.2})
    scaler, before = torch.amp.GradScaler("cpu", init_scale=8.0), [a.detach().clone(),
        b.detach().clone()]
    for bad in (True, False):
        scaler.scale((a.sum() + b.sum()) * (torch.inf if bad else 1)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert equal([a, b], before) == bad
    assert torch.equal(a, before[0] - 0.1) and torch.equal(b, before[1] - 0.2)


def test_a_sparse_gradient_is_that_of_its_rows():
    embed = torch.nn.Embedding(10, 4, sparse=True)
    dense = copy.deepcopy(embed)
    dense.sparse = False
    for embedding in (embed, dense):
        opt = AdamW(embedding.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            embedding(torch.tensor([1, 3, 3])).sum().backward()
            opt.step()
    assert embed.weight.grad.is_sparse and torch.equal(embed.weight, dense.weight)


def test_a_row_from_outside_is_a_class_too(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "my-rule", next(iter(toys.OPTIMIZERS.values())))
    parameters = two_sizes(torch.float32, MATRICES)
    assert lpkit.optim.MyRule is optimizer("my-rule") and lpkit.optim.MyRule.__name__ == "MyRule"
    assert not equal(step(lpkit.optim.MyRule(parameters), parameters),
                     two_sizes(torch.float32, MATRICES))


P = torch.nn.Parameter(torch.ones(4, 4))
V = torch.nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("make, kind, message", [
    (lambda: AdamW([P], lr=-1.0), ValueError, "lr must be positive, got -1.0"),
    (lambda: Lion([P], lr=float("nan")), ValueError, "lr must be positive, got nan"),
    (lambda: AdamW([]), ValueError, "optimizer got an empty parameter list"),
    (lambda: AdamW([{"params": [P], "betas": (1.0, 0.9)}]), ValueError, "beta1 must be 0 or more "
        "and below 1, got 1.0"),
    (lambda: AdamW([P], betas=(0.9,)), ValueError, r"betas must be two numbers, got \(0.9,\)"),
    (lambda: AdamW([P], beta=0.9), TypeError, "adamw has no setting 'beta'; did you mean 'betas'"),
    (lambda: Lion([P], momentum=0.9), TypeError, "lion has no setting 'momentum'; choose one of "
                                                 "betas, lr, weight_decay"),
    (lambda: Muon([("embed", P), ("bias", V)]), ValueError, r"muon updates matrices of float32 or "
                                                            r"float64, got torch.float32 of shape "
                                                            r"\(4,\); leave bias out, or give it a "
                                                            r"group"),
    (lambda: optimizer("soap")([torch.nn.Parameter(torch.ones(2, 2, 3))]), ValueError,
     r"soap updates 1- and 2-D tensors of float32 or float64, got torch.float32 of shape \(2, 2, "
     r"3\)"),
    (lambda: optimizer("sophia"), ConfigError, "sophia needs more than gradients"),
    (lambda: optimizer("lyon"), ConfigError, "there is no optimizer 'lyon'"),
    (lambda: lpkit.optim.Lyon, AttributeError, "no attribute 'Lyon'"),
])
def test_what_is_wrong_is_an_error_of_pytorchs_kind(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_group_that_is_refused_is_not_kept():
    opt = Muon([P])
    with pytest.raises(ValueError, match="muon updates matrices"):
        opt.add_param_group({"params": [V]})
    assert len(opt.param_groups) == 1
