"""Optimizers: each rule against an independent reference, and one stepper whose record is what
happens.

Only these tests catch: a rule that is not PyTorch's or its paper's, a record that names another
format, place or rounding than the optimizer has, noise that does not go on after a restart, wrong
bytes of state or of one update, a wrong group for a parameter, and a cut matrix that is updated
otherwise than a whole one.
"""

import copy
import itertools
import threading
from collections import defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lessons.rows.disk  # noqa: F401  adds rows
from lessons.rows import adapters as adapters
from lessons.rows import blocks as blocks
from lessons.rows import optimizers as of_lessons
from lpkit.config import Config
from lpkit.contracts import Choice, Parameter
from lpkit.errors import ConfigError
from lpkit.kernels.jit import INTERPRETED
from lpkit.measure.tracking import Tracker
from lpkit.memory.loss import labels
from lpkit.optim import one_pass, rules
from lpkit.optim.muon import orthogonalised
from lpkit.optim.rounding import generator
from lpkit.optim.stepper import Stepper, build, recorded
from lpkit.predict import memory, parameter_count
from lpkit.predict.ledger import UPDATE
from lpkit.predict.params import optimizer_work
from lpkit.predict.time import step_time
from lpkit.predict.updates import update_bytes, whole_update_bytes, work
from lpkit.presets import preset
from lpkit.techniques import operation
from lpkit.techniques.memory import OPTIMIZER_STATE
from lpkit.techniques.optimizers import (
    MOMENT_FORMATS,
    OPTIMIZERS,
    AdamWSettings,
    LionSettings,
    OptimizerSettings,
    Slot,
    parameter_groups,
)
from lpkit.techniques.recipes import RECIPES
from lpkit.training import checkpoint, graphs
from lpkit.training.background import train
from lpkit.training.training import RandomTokens, Training
from tests.techniques import toys
from tests.training.resuming import in_parts

CPU = torch.device("cpu")
# settings by which every update needs as many bytes as the largest does
MOST = defaultdict(dict, {name: {"every": 1} for name in ("galore", "shampoo", "soap")})
# Every format, place and dtype with slots of each kind: PyTorch's own, rows and columns, and other
# matrices. All other rules, in both formats, where most is done: on a disk, with noise.
STORED = [case for case in itertools.product(
              [name for name, row in OPTIMIZERS.items() if row.slots], MOMENT_FORMATS,
              OPTIMIZER_STATE, (torch.float32, torch.bfloat16))
          if case[0] in ("adamw", "adafactor", "soap") or case[2:] == ("disk", torch.bfloat16)]


def settings_of(name: str, **changes) -> OptimizerSettings:
    return replace(OPTIMIZERS[name].settings, name=name, **changes)


# ---- rules

MATRICES, VECTORS = ((24, 40), (48, 16)), ((24, 40), (17,))


def two_sizes(dtype, shapes):
    draw = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype))
            for shape in shapes]


def gradient(p: torch.Tensor, update: int) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(update),
                       dtype=torch.float64).to(p.dtype)


def after(name: str, shapes, dtype=torch.float64, rule=None, **settings) -> list[torch.Tensor]:
    """Weights after 20 updates by the rule itself, and by gradients that `oracle` has too."""
    row, settings, got = OPTIMIZERS[name], settings_of(name, **settings), []
    rule = rule or row.load()
    for p in two_sizes(dtype, shapes):
        w, shape = p.detach().clone(), tuple(p.shape)
        slots = [torch.zeros(shape if (own := slot.shape(shape, settings)) is None else own,
                             dtype=dtype) for slot in row.slots]
        for update in range(20):
            rule(w, gradient(p, update), slots, settings, update + 1,
                 *[Parameter("p.weight", shape)] * row.takes_parameter)
        got.append(w.double())
    return got


def oracle(make, shapes, dtype=torch.float64) -> list[torch.Tensor]:
    parameters = two_sizes(dtype, shapes)
    optimizer = make(parameters)
    for update in range(20):
        for p in parameters:
            p.grad = gradient(p, update)
        optimizer.step()
    return [p.detach().double() for p in parameters]


@pytest.mark.parametrize("rule", [rules.adamw, rules.adamw_kernel])
def test_adamw_is_pytorchs_and_float64s(rule):
    def make(p):
        return torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)

    ours = after("adamw", VECTORS, torch.float32, rule, lr=1e-2)
    for dtype in (torch.float32, torch.float64):
        for a, b in zip(ours, oracle(make, VECTORS, dtype), strict=True):
            assert (a - b).norm() < 1e-6 * b.norm()


class Decayed(torch.optim.SGD):
    """PyTorch's adds its decay to the gradient; here the weight is scaled, as AdamW does it."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.mul_(1 - 1e-2 * 0.1)
        super().step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name, shapes, settings, make", [
    ("muon", MATRICES, {"weight_decay": 0.1},
     lambda p: torch.optim.Muon(p, lr=0.02, momentum=0.95, weight_decay=0.1)),
    ("adafactor", VECTORS, {}, lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1,
        eps=(torch.finfo(torch.float32).eps, 1e-3))),
    ("adam", VECTORS, {"weight_decay": 0.1},
     lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)),
    ("momentum", VECTORS, {"lr": 1e-2, "momentum": 0.8},
     lambda p: Decayed(p, lr=1e-2, momentum=0.8, foreach=False)),
    ("sgd", VECTORS, {"lr": 1e-2}, lambda p: Decayed(p, lr=1e-2, foreach=False)),
], ids=["muon", "adafactor", "adam", "momentum", "sgd"])
def test_rules_are_those_of_pytorch(monkeypatch, name, shapes, settings, make, dtype):
    """Its Muon multiplies in bf16: that cast is taken out of it, and the rest of it is left."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for ours, theirs, w in zip(after(name, shapes, dtype, **settings), oracle(make, shapes, dtype),
                               two_sizes(torch.float64, shapes), strict=True):
        moved = (theirs - w).norm().item()
        assert ((ours - theirs).norm() < 1e-6 * theirs.norm()
                and (dtype == torch.float32 or (ours - theirs).norm() < 1e-9 * moved))

# ---- the stepper

def model_in(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).to(dtype)


def trained(name: str, *, dtype=torch.float32, updates: int = 4, optimizer=None, model=None,
            **settings):
    """The model and its optimizer after some updates on the same gradients."""
    model = model or model_in(dtype)
    optimizer = optimizer or build(dict(model.named_parameters()), settings_of(name), **settings)
    for update in range(updates):
        draw = torch.Generator().manual_seed(update)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
        optimizer.step()
    return model, optimizer


def stored(optimizer) -> list[torch.Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]


@pytest.mark.parametrize("name, moment_format, place, dtype", STORED)
def test_what_is_recorded_is_what_happens(name, moment_format, place, dtype):
    """Bytes of state, use of the file and rounding, for every optimizer, format, place and
    dtype."""
    placement = OPTIMIZER_STATE[place].load()(CPU)
    model, optimizer = trained(name, dtype=dtype, moment_format=moment_format, placement=placement)
    asked = {"optimizer_state": Choice(asked=place, used=place, why="decided"),
             "moment_format": Choice(asked=moment_format, used=moment_format, why="decided")}
    choices = recorded(optimizer, asked)
    count = sum(p.numel() for p in model.parameters())
    slots = [t for state in optimizer.state.values() for key, t in state.items()
             if torch.is_tensor(t) and key != "step"]
    kept = {t.dtype for t in slots}
    assert choices["moment_format"].used == next(
        (name for name, of in (("int8", torch.uint8), ("bfloat16", torch.bfloat16)) if of in kept),
        "float32")
    # scales of last blocks that are not full
    short = 4 * len(optimizer.state) * len(OPTIMIZERS[name].slots)
    predicted = work({name: tuple(p.shape) for name, p in model.named_parameters()},
                     settings_of(name), choices["moment_format"].used)
    assert (0 <= sum(t.nbytes for t in slots) - count
            * (predicted.cut_bytes + predicted.whole_bytes) < short)
    in_file = isinstance(optimizer, Stepper) and hasattr(optimizer.placement, "where_is") and \
        all(t.data_ptr() in optimizer.placement.where_is for t in slots)
    assert (choices["optimizer_state"].used == ("disk" if in_file else "device")
            == {"cpu": "device"}.get(place, place))
    assert ("rounding" in choices) == (dtype == torch.bfloat16)

    # where nothing but the format counts, the place changes no bit
    same, _ = trained(name, dtype=dtype, moment_format=moment_format)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.skipif(not INTERPRETED, reason="Triton's kernels need a GPU, or its interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", one_pass.RULES)
def test_one_pass_over_memory_updates_as_the_rule_does(name, dtype, tmp_path, monkeypatch):
    """By the stepper, in place, with the same noise: a multiply-add rounds once, and may turn a
    rounding to bf16."""
    from lpkit.kernels.interpreter import mend

    mend()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both = []
    for kernels in ("auto", "triton"):
        # a disk: float32 alone has PyTorch's own
        model, placement = model_in(dtype), OPTIMIZER_STATE["disk"].load()(CPU)
        optimizer = build(dict(model.named_parameters()), settings_of(name), kernels=kernels,
                          placement=placement)
        both.append(trained(name, model=model, optimizer=optimizer))
    (want, by_rule), (got, at_once) = both
    assert {rule.one_pass for rule in by_rule.rule_of.values()} == {None}
    assert {rule.one_pass for rule in at_once.rule_of.values()} == {one_pass.RULES[name]}
    assert recorded(at_once, {})[f"kernel:{name}"].used == "triton" and not by_rule.choices
    ulp, share = (2.0**-7, 0.02) if dtype == torch.bfloat16 else (2.0**-22, 0.2)
    for a, b in zip(want.parameters(), got.parameters()):
        assert ((a.double() - b.double()).abs().max() <= ulp * a.double().abs().max()
                and (a != b).double().mean() < share)
    for a, b in zip(stored(by_rule), stored(at_once)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_weights_are_rounded_as_recorded(name):
    """An update of 2^-12 of each weight: nearest rounding loses it, stochastic rounding has it in
    the mean."""
    model = torch.nn.Linear(256, 256, bias=False).bfloat16()
    torch.nn.init.ones_(model.weight)
    # ones have one singular value, of 256
    scale = {"muon": 256, "soap": 256, "normuon": 5, "lars": 1000, "shampoo": 256,
             "galore": 4 * 17}.get(name, 1)
    # what rounding leaves in other directions
    noise = {"eps": 1.0} if name in ("galore", "soap") else {}
    optimizer = build(dict(model.named_parameters()),
                      settings_of(name, lr=scale * 2**-12, weight_decay=0.0, **noise))
    model.weight.grad = torch.ones_like(model.weight)
    for _ in range(1 + (name == "soap")):               # whose first update finds a basis
        optimizer.step()
    step = 2**-12 * {"muon": orthogonalised(torch.ones(256, 256)).mean().item() * scale,
                     "soap": 256 / 257}.get(name, 1)
    assert recorded(optimizer, {})["rounding"].used == "stochastic"
    # of the mean: each draw's variance is at most step * update
    spread = (step * 2**-8 / 256**2)**0.5
    assert model.weight.double().mean().item() == pytest.approx(1 - step, abs=5 * spread)


def test_an_optimizer_that_does_otherwise_is_recorded_as_it_does():
    model = model_in(torch.bfloat16)
    asked = {"optimizer_state": Choice(asked="disk", used="disk", why="a file"),
             "moment_format": Choice(asked="int8", used="int8", why="small")}
    choices = recorded(torch.optim.AdamW(model.parameters()), asked)
    assert ([choices[key].used for key in ("optimizer_state", "moment_format", "rounding")]
            == ["device", "float32", "nearest"])
    assert choices["optimizer_state"].asked == "disk" and "AdamW" in choices["optimizer_state"].why


@pytest.mark.parametrize("moment_format", MOMENT_FORMATS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_needs_the_temporary_bytes_that_its_row_says(name, moment_format):
    """The largest parameter alone counts. Single numbers, as the kernel's count, are on top."""
    if not OPTIMIZERS[name].slots and moment_format != "float32":
        pytest.skip("there is no state")
    rows, columns = shape = (384, 512)
    for dtype, weight_bytes in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = torch.nn.Linear(columns, rows, bias=False).to(dtype)
        optimizer = build(dict(model.named_parameters()), settings_of(name, **MOST[name]),
                          moment_format=moment_format)
        trained(name, model=model, optimizer=optimizer, updates=1)
        model.weight.grad = torch.randn(shape).to(dtype)
        with Tracker(model, optimizer) as tracker, tracker.optimizing():
            optimizer.step()
        footprint = tracker.footprint()
        before = sum(footprint.most.get(row, 0)
                     for row in ("weights", "gradients", "optimizer state"))
        needed = whole_update_bytes({"weight": shape}, settings_of(name), moment_format,
                                    weight_bytes)["weight"] / (rows * columns)
        assert ((footprint.peak_bytes - before) / (rows * columns)
                == pytest.approx(needed, rel=0.06, abs=0.01))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_stepper_goes_on_bit_for_bit(name):
    """Weights in bf16, so that rounding's noise goes on too; and the names of state are those of a
    checkpoint."""
    whole, _ = trained(name, dtype=torch.bfloat16, updates=4)
    model, half = trained(name, dtype=torch.bfloat16, updates=2)
    again = build(dict(model.named_parameters()), settings_of(name))
    for p, state in half.state.items():
        again.state[p].update(state)
    for update in (2, 3):
        draw = torch.Generator().manual_seed(update)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw).bfloat16()
        again.step()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters()))
    for p, state in again.state.items():
        row = OPTIMIZERS["adamw" if OPTIMIZERS[name].matrices and p.ndim == 1 else name]
        assert list(state) == ["update", *(slot.name for slot in row.slots)]


def test_names_of_adamws_state_are_those_of_older_checkpoints():
    _, whole = trained("adamw")
    assert {key for state in whole.state.values() for key in state} == {"step", "exp_avg",
        "exp_avg_sq"}
    _, lean = trained("adamw", moment_format="int8")
    assert next(list(state) for state in lean.state.values()) == \
        ["update", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"]


def test_an_optimizer_without_state_refuses_a_format_and_a_place_for_it():
    for settings in ({"moment_format": "int8"}, {"placement": OPTIMIZER_STATE["disk"].load()(CPU)}):
        with pytest.raises(ConfigError, match="sgd keeps no state"):
            build(dict(model_in(torch.float32).named_parameters()), OptimizerSettings(name="sgd"),
                  **settings)


def test_bytes_of_state_and_traffic_follow_from_the_slots():
    state = {(name, f): OPTIMIZERS[name].state_bytes(f) for name in OPTIMIZERS
             for f in MOMENT_FORMATS}
    assert state["adamw", "float32"] == 8 and state["adamw", "int8"] == 2 * (1 + 4 / 256)
    assert (state["lion", "float32"] == state["momentum", "float32"] == 4
            and state["sgd", "float32"] == 0)
    # w, g, m and v are read; w, m and v are written
    assert optimizer_work(Config()).moved_bytes(4, 4) == 7 * 4
    # two decoded slots; blocks, ratios and indices of 4 bytes, codes of 1
    assert (update_bytes(OPTIMIZERS["adamw"], "int8") == 8 + 13
            and update_bytes(OPTIMIZERS["adamw"]) == 0)


# ---- groups of parameters

def test_matrices_are_decayed_whatever_they_are_called_and_vectors_are_not():
    parameters = [Parameter("mixer.decay", (4,)), Parameter("norm.weight", (4,)),
            Parameter("up.bias", (4, 4)), Parameter("norm.map", (2, 2)),
            Parameter("gains", (3, 2), decays=False), Parameter("own", (4,), decays=True)]
    decayed, rest = parameter_groups(parameters, AdamWSettings(name="adamw"))
    assert (decayed.names == ("up.bias", "norm.map", "own")
            and rest.names == ("mixer.decay", "norm.weight", "gains"))
    decayed, rest, asked = parameter_groups(parameters,
        AdamWSettings(name="adamw", groups=("mixer.*:weight_decay=0.2",)))
    assert asked.names == ("mixer.decay",) and asked.weight_decay == 0.2


STILL = Config().replace({"model.layers": 1, "model.width": 16, "model.heads": 2,
                          "model.context": 8, "model.vocab": 32, "global_batch": 1,
                          "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1})
# what a model has besides matrices, each in a model or an adapter that has it
GAINS = {"ia3": {"model.changes": "ia3"}, "dora": {"model.changes": "dora:rank=4"},
         "gains": {"model.block": "layerscale"},
         "shaped attention": {"model.block": "skipless"}, "sinks": {"model.attention.sinks": True}}


@pytest.mark.parametrize("name, optimizer", [*((name, "adamw") for name in GAINS),
                                             ("ia3", "lion"), ("dora", "schedule-free")])
def test_gains_and_scales_stay_where_they_are_without_gradients(name, optimizer):
    """100 updates with gradients of 0: all that is no matrix keeps its bits, and matrices shrink as
    decay says. Those of schedule-free are averages, which shrink later."""
    training = Training.build(STILL.replace({"optimizer": optimizer, "optimizer.lr": 3e-3,
        "optimizer.weight_decay": 0.1, **GAINS[name]}),
                              data=RandomTokens(STILL))
    named = {key: p for key, p in training.model.named_parameters() if p.requires_grad}
    gains = [key for key in named if not key.endswith((".weight", ".bias")) or "gain" in key
             or "shape" in key]
    assert gains        # else this asks nothing
    before = {key: p.detach().clone() for key, p in named.items()}
    for _ in range(100):
        for p in named.values():
            p.grad = torch.zeros_like(p)
        training.optimizer.step()
    for key, p in named.items():
        if p.ndim < 2 or "shape" in key:
            assert torch.equal(p, before[key]), key
        elif optimizer != "schedule-free":
            torch.testing.assert_close(p, before[key] * (1 - 3e-3 * 0.1)**100, rtol=1e-5,
                                       atol=0, msg=key)


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"shard": 2, "zero": 3}, {"tensor": 2}])
def test_cut_parameters_decay_as_whole_ones_do(on_ranks, layout):
    """A rank may have one row of a matrix, or a part of it, and of a vector as well."""
    config = STILL.replace({"global_batch": 2, "model.bias": True, "model.changes": "ia3",
                              "imports": ["lessons.rows.adapters"]} if "tensor" not in layout
        else {"global_batch": 2})
    training = Training.build(config, data=RandomTokens(config))
    names = {p: name for name, p in training.model.named_parameters()}
    due = sorted(names[p] for p in training.optimizer.param_groups[0]["params"])
    assert (on_ranks("decayed",
                     config.replace({f"parallel.{axis}": n for axis, n in layout.items()})) == [due]
        * 2)


def test_patterns_change_learning_rate_and_decay():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "norm": torch.nn.LayerNorm(4),
                                 "up": torch.nn.Linear(4, 4)})
    settings = LionSettings(name="lion", lr=1e-2, weight_decay=0.5,
                            groups=("*.weight:weight_decay=0.2",
                                    "embed.*:lr_scale=0.1:weight_decay=0"))
    groups = build(dict(model.named_parameters()), settings).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    rates = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups
             for p in group["params"]}
    assert rates == {"embed.weight": (pytest.approx(1e-3), 0.0), "norm.weight": (1e-2, 0.2),
                     "norm.bias": (1e-2, 0.0),
                    "up.weight": (1e-2, 0.2), "up.bias": (1e-2, 0.0)}
    assert groups[0]["lr"] == 1e-2      # the run's own, whatever the groups are
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(dict(model.named_parameters()), settings)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        lr, decay = rates[name]
        assert torch.allclose(p, before[name] * (1 - lr * decay) - lr, atol=1e-7)


@pytest.mark.parametrize("group, message", {
    "hed.weight:lr_scale=0.1": "no parameter is called 'hed.weight'; did you mean 'head.weight'",
    "head.weight:lr=0.1": "a group has no 'lr'; set lr_scale or weight_decay",
    "head.weight:lr_scale=-1": "lr_scale must be 0 or more, got -1",
    "head.weight": "write it as pattern:lr_scale=0.1",
}.items())
def test_a_group_that_is_wrong_says_the_way_out(group, message):
    with pytest.raises(ConfigError, match=message):
        parameter_groups([Parameter("head.weight", (2, 2)), Parameter("embed.weight", (2, 2))],
                         AdamWSettings(name="adamw", groups=(group,)))


@pytest.mark.parametrize("name, values, message", [
    ("adamw", {"beta1": 1.0}, "beta1 must be 0 or more and below 1, got 1.0"),
    ("momentum", {"momentum": -0.1}, "momentum must be 0 or more and below 1"),
    ("adamw", {"eps": 0.0}, "eps must be positive"),
    ("sgd", {"lr": 0.0}, "lr must be positive"),
    ("schedule-free", {"beta1": 0.0}, "beta1 must be"),
    ("sgd", {"clip": -1.0}, "clip must be 0 or more"),
])
def test_settings_check_themselves_and_a_config_says_their_key(name, values, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        replace(OPTIMIZERS[name].settings, **values)
    with pytest.raises(ConfigError, match=rf"^optimizer\.{message}"):
        Config(optimizer={"name": name, **values})


# ---- a run

@pytest.mark.parametrize("changes, state_names", [
    ({"optimizer": "lion", "optimizer.groups": "embed.*:lr_scale=0.5",
      "memory.moment_format": "int8", "memory.optimizer_state": "disk",
      "memory.param_dtype": "bf16", "precision.recipe": "bf16"}, {"exp_avg", "exp_avg_scale"}),
    ({"optimizer": "sgd", "optimizer.lr": 0.5, "optimizer.clip": 0,
      "memory.optimizer_step": "in-backward"}, set()),
], ids=["lion-8bit-disk-bf16", "sgd-in-backward"])
def test_a_run_learns_resumes_bit_for_bit_and_records_what_it_used(corpus, tmp_path, monkeypatch,
        changes, state_names):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    config = Config().replace({
        "model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 32,
        "data.source": str(corpus / "*.py"),
        "steps": 24, "global_batch": 8, "eval_batches": 1, "checkpoint_every": 4,
        "schedule.warmup_steps": 2,
        "optimizer.lr": 3e-3, "precision.recipe": "fp32", "system.device": "cpu"} | changes)
    whole = train(config, out=tmp_path / "whole")
    parts = in_parts(config, tmp_path / "parts", 10)
    losses = [[line["loss"] for line in run.metrics] for run in (whole, parts)]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] - 0.5
    want, got = (checkpoint.load_latest(run.checkpoints)[0].tensors for run in (whole, parts))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    slots = {name.rpartition("/")[2] for name in want if name.startswith("optimizer/")}
    assert slots - {"update"} == state_names
    used = {key: choice["used"] for key, choice in whole.summary["chosen"].items()}
    assert used.get("optimizer_state") == changes.get("memory.optimizer_state")
    assert used.get("rounding") == ("stochastic" if "memory.param_dtype" in changes else None)


@pytest.mark.parametrize("moment_format", MOMENT_FORMATS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_is_predicted(name, moment_format):
    """Of one update in this process's memory, and that none of it would be there on a disk
    (`test_what_is_recorded_is_what_happens`)."""
    config = preset("cpu-3m").replace({"optimizer": name, "memory.moment_format": moment_format,
        "model.layers": 1, "model.context": 32, "global_batch": 1,
        "grad_accum_steps": 1, "system.device": "cpu"})
    predicted, elsewhere = (memory(config.replace({"memory.optimizer_state": place}),
                              "h200").at(UPDATE).get("optimizer state", 0)
                       for place in ("device", "disk"))
    assert elsewhere == 0
    if not OPTIMIZERS[name].slots:
        assert predicted == 0
        return
    built = Training.build(config, data=RandomTokens(config))
    built.update(0)
    state = sum(t.nbytes for slots in built.optimizer.state.values() for key, t in slots.items()
                if torch.is_tensor(t) and key != "step")
    assert predicted == pytest.approx(state, rel=1e-3 if moment_format == "int8" else 1e-9)


# ---- rules that are told their parameter (tests/techniques/toys.py)

@pytest.fixture
def toy_rows(monkeypatch):
    for name, row in toys.OPTIMIZERS.items():
        monkeypatch.setitem(OPTIMIZERS, name, row)


@pytest.mark.parametrize("function", ["adam_kernel", "adam_fused"])
def test_adams_kernels_are_its_rule(function):
    """One parameter by the kernel, and all by `fused`, which float32 weights on the device take:
    through the stepper's own choice."""
    fused = function == "adam_fused"
    ours = two_sizes(torch.float32, VECTORS)
    named = {f"p{i}.weight": p for i, p in enumerate(ours)}
    optimizer = build(named, settings_of("adam", weight_decay=0.1),
                      facts=lambda name: Parameter(name, named[name].shape, decays=True),
                      moment_format="float32", placement=None if fused
                      else OPTIMIZER_STATE["disk"].load()(CPU))
    assert isinstance(optimizer, torch.optim.Adam if fused else Stepper)
    for update in range(20):
        for p in ours:
            p.grad = gradient(p, update)
        optimizer.step()
    for a, b in zip(ours, after("adam", VECTORS, weight_decay=0.1), strict=True):
        assert (a.detach() - b).norm() < 1e-6 * b.norm()


def test_what_has_no_ratio_moves_without_it():
    """LARS as SGD, where a weight or a gradient is zero; LAMB as Adam, where a weight is."""
    (lars, settings), ones = ((OPTIMIZERS["lars"].load(), settings_of("lars", lr=0.5,
        weight_decay=0.0)), torch.ones(3))
    w, still = torch.zeros(3), torch.ones(3)
    lars(w, ones, [torch.zeros(3)], settings, 1, Parameter("b", (3,)))
    lars(still, torch.zeros(3), [torch.zeros(3)], settings, 1, Parameter("b", (3,)))
    assert torch.equal(w, torch.full((3,), -0.5)) and torch.equal(still, ones)
    w = torch.zeros(3)
    OPTIMIZERS["lamb"].load()(w, ones, [torch.zeros(3), torch.zeros(3)],
                              settings_of("lamb", lr=0.01), 1, Parameter("b", (3,)))
    assert torch.allclose(w, torch.full((3,), -0.01))


def lion_by_hand(x, settings):
    """Chen et al. 2023, algorithm 2: c = b1 m + (1 - b1) g; theta -= lr (sign(c) + lambda theta);
    m = b2 m + (1 - b2) g."""
    m = torch.zeros_like(x)
    for t in range(20):
        g = gradient(x, t)
        c = 0.9 * m + (1 - 0.9) * g
        x = x - settings.lr * (torch.sign(c) + 0.3 * x)
        m = 0.99 * m + (1 - 0.99) * g
    return x


def lamb_by_hand(x, settings):
    """You et al. 2019, algorithm 2: r = m / (sqrt(v) + eps), and x moves by lr |x| / |r + lambda x|
    (r + lambda x)."""
    m, v = 0.0, 0.0
    for t in range(1, 21):
        g = gradient(x, t - 1)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-6) + 0.1 * x
        x = x - settings.lr * x.norm() / r.norm() * r
    return x


def lars_by_hand(x, settings):
    """You et al. 2017, algorithm 1: lambda = trust |w| / (|g| + beta |w|), v = m v + lr lambda (g +
    beta w), w = w - v."""
    v = 0.0
    for t in range(20):
        g = gradient(x, t)
        local = settings.trust * x.norm() / (g.norm() + settings.weight_decay * x.norm())
        v = settings.momentum * v + settings.lr * local * (g + settings.weight_decay * x)
        x = x - v
    return x


def turned(m: torch.Tensor) -> torch.Tensor:
    """The polynomial of Newton and Schulz on singular values, (a s + b s^3 + c s^5) five times
    over."""
    u, s, vt = torch.linalg.svd(m, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vt


def normuon_by_hand(x, settings):
    """Li et al. 2025, algorithm 1."""
    m, v = 0.0, 0.0
    for t in range(20):
        m = 0.95 * m + 0.05 * gradient(x, t)
        o = turned(m)
        v = 0.95 * v + 0.05 * (o**2).mean(1)
        o = o / (v.sqrt()[:, None] + 1e-10)
        x = (x - settings.lr * settings.weight_decay * x - 0.2 * settings.lr
             * (x.numel() ** 0.5 / o.norm()) * o)
    return x


def soap_by_hand(x, settings, largest=10_000):
    """Vyas et al. 2024, algorithms 3 and 4: the momentum as it is, and both it and the gradient
    turned anew; v goes with the columns that the public code sorts. A vector is Adam's, and so is a
    side above `largest`."""
    m, v, grams, bases = 0.0, 0.0, [0.0, 0.0], [torch.eye(n, dtype=x.dtype)
        for n in (*x.shape, 1)[:2]]
    whole = x.reshape(len(x), -1)
    for t in range(20):
        g = gradient(x, t).reshape(whole.shape)
        grams = [0.95 * gram + 0.05 * of for gram, of in zip(grams, (g @ g.T, g.T @ g))]
        sides = [i for i, n in enumerate(x.shape) if n <= largest and x.ndim == 2]
        if t == 0:
            for i in sides:
                bases[i] = torch.linalg.eigh(grams[i])[1].flip(1)
            continue
        (left, right), m = bases, 0.95 * m + 0.05 * g
        v = 0.95 * v + 0.05 * (left.T @ g @ right) ** 2
        step = (left @ ((left.T @ m @ right / (1 - 0.95**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
                @ right.T)
        whole = whole - settings.lr * settings.weight_decay * whole - settings.lr * step
        for i in sides if t % settings.every == 0 else ():
            order = (bases[i].T @ grams[i] @ bases[i]).diag().argsort(descending=True)
            v, bases[i] = v.index_select(i, order), torch.linalg.qr(grams[i] @ bases[i][:,
                order])[0]
    return whole.reshape(x.shape)


def shampoo_by_hand(x, settings, largest=10_000):
    """Gupta et al. 2018, algorithms 1 and 2: W = W - lr L^(-1/4) G R^(-1/4) of sums L and R that
    begin as eps I, with the momentum and the weight decay of this kit. A vector, and a side above
    `largest`, has its diagonal alone, as in the authors' code (tensorflow/contrib/opt at
    e6921fd)."""
    w, m, order = x.reshape(len(x), -1), 0.0, x.ndim
    sums = [settings.eps * torch.eye(n, dtype=x.dtype) for n in w.shape[:order]]
    roots = [None, torch.eye(1, dtype=x.dtype)]
    for t in range(20):
        g = gradient(x, t).reshape(w.shape)
        for i, of in enumerate((g, g.T)[:order]):
            gram = of @ of.T
            sums[i] = sums[i] + (gram if order == 2 and len(of) <= largest else gram.diag().diag())
            if t % settings.every == 0:     # by a singular value decomposition
                u, s, vt = torch.linalg.svd(sums[i])
                roots[i] = u @ (s ** (-1 / (2 * order))).diag() @ vt
        m = settings.momentum * m + roots[0] @ g @ roots[1]
        w = w - settings.lr * settings.weight_decay * w - settings.lr * m
    return w.reshape(x.shape)


def galore_by_hand(x, settings):
    """Zhao et al. 2024, algorithm 2 (P from the left where m <= n, else from the right), by
    eigenvectors of the gram, each with the sign that a decomposition of the gradient gives it:
    moments outlive their projection, and a sign counts."""
    m = v = 0.0
    for t in range(20):
        g = gradient(x, t)
        flat = x.ndim == 1
        wide = g[None] if flat else g if g.shape[0] < g.shape[1] else g.T
        if t % settings.every == 0:
            P = (torch.eye(1, dtype=x.dtype) if flat
                 else torch.linalg.eigh(wide @ wide.T)[1].flip(1)[:, :settings.rank])
            if not flat:
                P = P * (P * torch.linalg.svd(wide, full_matrices=False)[0][:,
                    :settings.rank]).sum(0).sign()
        low = P.T @ wide
        m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
        step = P @ ((m / (1 - 0.9 ** (t + 1))) / ((v / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8))
        step = step[0] if flat else settings.scale * (step if g.shape[0] < g.shape[1] else step.T)
        x = x - settings.lr * settings.weight_decay * x - settings.lr * step
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name, by_hand, shapes, settings", [
    ("lion", lion_by_hand, VECTORS, {"lr": 1e-2, "weight_decay": 0.3}),
    ("lamb", lamb_by_hand, VECTORS, {"lr": 0.01}),
    ("lars", lars_by_hand, VECTORS, {"lr": 10.0, "weight_decay": 0.1}),
    ("normuon", normuon_by_hand, MATRICES, {"lr": 0.01}),
    ("soap", soap_by_hand, ((24, 24), (17,)), {"every": 3}),
    ("soap", soap_by_hand, ((24, 24), (17,)), {}),
    # a side longer than the other has any basis
    ("soap", partial(soap_by_hand, largest=30), ((24, 40), (40, 24), (40, 40)), {"every": 3}),
    ("shampoo", shampoo_by_hand, ((24, 24), (17,)), {"every": 3, "lr": 1e-3}),
    ("shampoo", shampoo_by_hand, MATRICES, {"every": 1, "momentum": 0.0, "lr": 0.03}),
    ("shampoo", partial(shampoo_by_hand, largest=30), ((24, 40), (40, 24), (40, 40)),
     {"every": 1, "lr": 0.03}),
    ("galore", galore_by_hand, ((24, 40), (40, 24), (24, 24), (17,)), {"every": 3, "rank": 5}),
    ("galore", galore_by_hand, ((24, 40),), {"weight_decay": 0.1}),
], ids=["lion", "lamb", "lars", "normuon", "soap, 3", "soap, 10", "soap of one side", "shampoo, 3",
        "shampoo, 1", "shampoo of one side", "galore, 3", "galore, whole"])
def test_rules_are_those_of_their_papers(monkeypatch, name, by_hand, shapes, settings, dtype):
    """In float64, of whole matrices."""
    largest = getattr(by_hand, "keywords", {"largest": 10_000})["largest"]
    monkeypatch.setattr(of_lessons, "LARGEST", largest)
    starts = two_sizes(torch.float64, shapes)
    for ours, w in zip(after(name, shapes, dtype, **settings), starts, strict=True):
        theirs = by_hand(w.detach(), settings_of(name, **settings))
        assert ((ours - theirs).norm() < 1e-6 * theirs.norm()
                and (dtype == torch.float32 or (ours - theirs).norm() < 1e-9 * (theirs - w).norm()))


def test_sophia_is_algorithms_2_and_3_of_the_paper():
    """Liu et al. 2023, in float64: h = b2 h + (1 - b2) B g^2 of drawn labels, and x = x - lr l x -
    lr clip(m / max(gamma h, eps), 1)."""
    row, settings, B = OPTIMIZERS["sophia"], settings_of("sophia", lr=0.01), 64.0
    for dtype in (torch.float32, torch.float64):
        for x in two_sizes(torch.float64, VECTORS):
            w, (m, h), clipped = x.detach().clone().to(dtype), (torch.zeros(x.shape, dtype=dtype)
                for _ in range(2)), []
            x, ours, theirs = x.detach(), [m, h], [0.0, 0.0]
            for t in range(20):
                g = gradient(x, t) * 1e-2
                row.load()(w, g.to(dtype), ours, settings, t + 1)
                theirs[0] = 0.96 * theirs[0] + 0.04 * g
                step = theirs[0] / torch.clamp(0.05 * torch.as_tensor(theirs[1]), min=1e-12)
                clipped.append((step.abs() > 1).double().mean().item())
                x = x - 0.01 * 0.1 * x - 0.01 * torch.clamp(step, -1, 1)
                if t % 5 == 0:
                    g = gradient(x, 100 + t)
                    of_lessons.estimate(g.to(dtype), ours, settings, B)
                    theirs[1] = 0.99 * theirs[1] + 0.01 * B * g**2
            assert (w - x).norm() < 1e-6 * x.norm() and clipped[0] == 1 and clipped[-1] < 0.5


SOPHIA = Config().replace({"model.layers": 2, "model.width": 32, "model.heads": 4,
                           "model.context": 32, "model.vocab": 64, "global_batch": 4,
                           "optimizer": "sophia",
                           "optimizer.every": 3, "precision.recipe": "fp32",
                           "system.device": "cpu"})


def test_sophias_curvature_is_that_of_labels_that_the_model_draws():
    """After the first update and the fourth: by torch's autograd, of labels that numpy draws from
    probabilities in float64."""
    training = Training.build(SOPHIA, data=RandomTokens(SOPHIA))
    h, tokens = {name: 0.0 for name, _ in training.model.named_parameters()}, training.batch(
        0).tokens
    for step in range(5):
        training.update(step)
        if step % 3 == 0:
            logits = training.model(tokens)
            draw = generator(CPU, SOPHIA.seed, step)
            at = torch.rand(tokens.shape, generator=draw).double().numpy()
            sums = np.cumsum(logits.detach().double().softmax(-1).numpy(), axis=-1)
            labels = torch.from_numpy((sums <= at[..., None]).sum(-1))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            for name, g in zip(h, torch.autograd.grad(loss, tuple(training.model.parameters()))):
                h[name] = 0.99 * h[name] + 0.01 * tokens.numel() * g.double()**2
        for name, p in training.model.named_parameters():
            state = training.optimizer.state[p]
            assert state["update"] == step + 1 and p.grad is None
            assert (state["hessian"] - h[name]).norm() <= 1e-5 * h[name].norm()


@pytest.mark.parametrize("changes",
                         [{"memory.cross_entropy": "chunked",
                           "memory.cross_entropy.chunk_tokens": 48}, {"grad_accum_steps": 4},
                                     {"memory.optimizer_step": "in-backward"},
                                     {"memory.recompute": "block"},
                                     {"memory.optimizer_state": "disk"}], ids=str)
def test_sophias_estimate_is_the_same_by_every_memory_technique(changes):
    plain = SOPHIA.replace({"optimizer.clip": 0.0, "optimizer.eps": 1e-6})
    numbers = []
    for config in (plain, plain.replace(changes)):
        training = Training.build(config, data=RandomTokens(plain))
        numbers.append([training.update(step).loss.item() for step in range(6)]
                     + [t.sum().item() for t in training.model.parameters()])
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-4, abs=1e-4)


def test_labels_are_drawn_as_often_as_they_are_probable():
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0]).expand(200_000, 4)
    drawn = labels(logits, torch.rand(200_000, generator=torch.Generator().manual_seed(5)))
    assert torch.allclose(drawn.bincount(minlength=4) / 200_000, logits[0].softmax(0), atol=0.005)
    assert labels(logits[:2], torch.tensor([0.0, 1 - 2**-24])).tolist() == [0, 3]


def test_sophias_flops_and_seconds_are_one_more_forward_and_backward_of_every_k():
    counted = []
    for name in ("adamw", "sophia"):
        training = Training.build(config := SOPHIA.replace({"optimizer": name}),
                                  data=RandomTokens(config))
        with FlopCounterMode(display=False) as counter:
            for step in range(3):
                training.update(step)
        counted.append(counter.get_total_flops())
    assert counted[1] == counted[0] * 4 / 3
    time = step_time(config.replace({"optimizer.every": 5}), "h200")
    rest = sum(row.seconds for row in time.rows if "optimizer" not in row.phases)
    assert time["optimizer: drawn labels"].seconds == pytest.approx(rest / 5)
    assert "runs forward and backward once more" in graphs.why_not(config, RECIPES["bf16"],
        torch.device("cuda"), 1)


@pytest.mark.parametrize("name, changes", [
    ("galore", {}), ("shampoo", {"model.mlp": "swiglu", "model.kv_heads": 2}), ("soap", {})])
def test_flops_of_rules_are_those_that_pytorch_counts(name, changes):
    """Of `every` updates. The counter is told what it does not know: a product in place, and that a
    QR has 8/3 n^3 (Golub & Van Loan, section 5.2:
    4/3 for R, and as many for Q), eigenvectors of a symmetric matrix 9 n^3 (8.3), and singular ones
    6 m n^2 + 20 n^3 (8.6)."""
    config = Config().replace({"model.layers": 2, "model.width": 64, "model.heads": 4,
                               "model.context": 32, "global_batch": 2, "optimizer": name,
                               "optimizer.every": 3, "precision.recipe": "fp32",
                               "system.device": "cpu"} | changes)
    training = Training.build(config, data=RandomTokens(config))
    training.forward_backward(training.batch(0))
    training.optimizer.step()
    more = {torch.ops.aten.geqrf: lambda shape, **_: 8 * shape[0]**3 // 3,
            torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],
            torch.ops.aten._linalg_eigh: lambda shape, *_, **__: 9 * shape[0]**3,
            torch.ops.aten._linalg_svd: lambda shape, *_, **__: 6 * max(shape) * min(shape)**2 + 20
            * min(shape)**3}
    with FlopCounterMode(display=False, custom_mapping=more) as counter:
        for _ in range(3):
            training.optimizer.step()
    work = optimizer_work(config)
    count = parameter_count(config.model)
    assert counter.get_total_flops() == pytest.approx(3 * work.flops * count, rel=1e-6) != 0
    whole = ("left", "right") if name != "galore" else ("exp_avg", "projection")
    held = sum(t.nbytes for p, state in training.optimizer.state.items() for key, t in state.items()
               if key.startswith(whole) and not training.optimizer.is_cut(p, key))
    assert (work.gathered == pytest.approx(OPTIMIZERS[name].gathers, rel=0.3)
            and round(work.whole_bytes * count) == held > 0)


@pytest.mark.parametrize("name", ["galore", "shampoo", "soap", "normuon"])
def test_ranks_with_rows_of_a_matrix_update_it_as_one_process_does(name):
    """25 rows on two threads, 13 and 12; the same gradients; slots of other shapes whole on
    both."""
    w, rows, at, sent = two_sizes(torch.float32, ((25, 24),))[0].detach(), (slice(13),
        slice(13, 25)), threading.Barrier(2), [None, None]
    row, settings = OPTIMIZERS[name], settings_of(name,
        **({"every": 2} if name != "normuon" else {}), **({"rank": 6} if name == "galore" else {}))

    class Cut(Parameter):
        def gather(self, t):
            sent[rank := int(threading.current_thread().name)] = t
            at.wait()
            whole = torch.cat([part.clone() for part in sent])
            at.wait()
            assert rank in (0, 1)
            return whole

        def part(self, whole):
            return whole[rows[int(threading.current_thread().name)]]

    def run(parameter, mine):
        its = w[mine].clone()
        slots = [torch.zeros(its.shape if (shape := slot.shape((25, 24), settings)) is None
                             else shape) for slot in row.slots]
        for update in range(1, 8):
            row.load()(its, gradient(w, update)[mine], slots, settings, update, parameter)
        return its, slots

    whole, slots = run(Parameter("w", (25, 24)), slice(25))
    results = [None, None]
    threads = [threading.Thread(name=str(i),
                                target=lambda i=i: results.__setitem__(i,
                                    run(Cut("w", (25, 24)), rows[i]))) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(torch.cat([its for its, _ in results]), whole) and not torch.equal(whole, w)
    for slot, want, *two in zip(row.slots, slots, *(of for _, of in results)):
        assert all(torch.equal(t, want[mine] if slot.shape((25, 24), settings) is None else want)
                   for t, mine in zip(two, rows))


def test_muon_turns_singular_values_alone():
    g = torch.randn(12, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(orthogonalised(g.clone()), turned(g), atol=1e-12)
    assert torch.allclose(orthogonalised(g.T.clone()), turned(g).T, atol=1e-12)


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2)])
def test_muon_takes_q_k_and_v_apart(heads, groups):
    """Rows of the fused weight lie by key/value head; each of the three moves as it would in a
    weight of its own."""
    model = Config().replace({"model.width": 32, "model.heads": heads, "model.kv_heads": groups,
                              "model.mlp": "swiglu"}).model
    rows = operation.fused(model, "blocks.0.attention.qkv.weight")
    E, Q = 8, heads // groups
    assert (rows == (Q * E, E, E) and operation.fused(model, "blocks.1.mlp.gate_up.weight")
            == (model.F, model.F))
    assert operation.fused(model, "blocks.0.attention.qkv.bias") == operation.fused(model,
        "blocks.0.mlp.down.weight") == ()
    count, (rule, settings) = groups * (Q + 2) * E, (OPTIMIZERS["muon"].load(), settings_of("muon"))
    whole = torch.randn(count, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    g = torch.randn(count, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got = whole.clone()
    rule(got, g, [torch.zeros_like(g)], settings, 1,
         Parameter("qkv.weight", (count, 32), fused=rows))
    # by hand: a row's place in its group says whose it is
    of = torch.arange(count).view(groups, -1)
    for place in (slice(Q * E), slice(Q * E, Q * E + E), slice(Q * E + E, None)):
        its = of[:, place].flatten()
        w = whole[its].clone()
        rule(w, g[its], [torch.zeros_like(w)], settings, 1, Parameter("q.weight", tuple(w.shape)))
        assert torch.allclose(got[its], w, atol=1e-12) and not torch.equal(w, whole[its])


@pytest.mark.parametrize("name, changes", [
    ("muon", {"model.mlp": "swiglu", "model.kv_heads": 2, "model.tied": False}),
    ("muon", {"model.attention.sinks": True}), ("normuon", {})])
def test_muons_flops_are_those_that_pytorch_counts(name, changes):
    """And its rules are by name: matrices of blocks alone are orthogonalised."""
    config = Config().replace({"model.layers": 2, "model.width": 64, "model.heads": 4,
                               "model.context": 32, "global_batch": 2, "optimizer": name,
                               "precision.recipe": "fp32", "system.device": "cpu"} | changes)
    training = Training.build(config, data=RandomTokens(config))
    training.forward_backward(training.batch(0))
    with FlopCounterMode(display=False) as counter:
        training.optimizer.step()
    assert counter.get_total_flops() == pytest.approx(optimizer_work(config).flops
        * parameter_count(config.model), rel=1e-12) != 0
    names = {p: name for name, p in training.model.named_parameters()}
    for p, rule in training.optimizer.rule_of.items():
        assert rule.row.matrices == (names[p].startswith("blocks.") and p.ndim == 2), names[p]
        assert rule.settings.name == (name if rule.row.matrices else "adamw")
    fused = {training.optimizer.facts[p].fused for p, name in names.items()
             if name.endswith("qkv.weight")}
    assert fused == {operation.fused(config.model, "attention.qkv.weight")} != {()}


def test_what_is_no_matrix_is_no_parameter_of_muons():
    way = ("give it another rule, after the other ones of optimizer.groups: "
           ".*norm1.weight:optimizer=adamw:lr_scale=0.05")
    config = preset("cpu-3m").replace({"optimizer.groups": "blocks.*:optimizer=muon"})
    with pytest.raises(ConfigError,
                       match=f"optimizer=muon updates matrices, and blocks.0.norm1.weight has the "
                             f"shape .256,.; {way}"):
        memory(config, "h200")
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = build({"own.norm1.weight": p},
                      settings_of("adamw", groups=("own*:optimizer=muon",)))
    p.grad = torch.ones(4)
    with pytest.raises(ConfigError,
                       match=f"updates matrices, and own.norm1.weight has the shape .4,.; {way}"):
        optimizer.step()
    # the rule's own groups may match nothing, a user's may not
    with pytest.raises(ConfigError, match="no parameter is called 'hed"):
        parameter_groups([Parameter("blocks.0.up.weight", (2, 2))],
                         settings_of("muon", groups=("hed*:lr_scale=0.1",)))


def test_groups_by_name_have_rules_of_their_own(toy_rows):
    """Each parameter is updated as it would be by its rule alone, at its share of the learning
    rate; the settings are the group's."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16, bias=False))
    alone = copy.deepcopy(model[1])
    settings = replace(OPTIMIZERS["lion"].settings, name="lion",
                       groups=("1.*:optimizer=adamw:lr_scale=0.5:beta2=0.9",))
    both = build(dict(model.named_parameters()), settings)
    adamw = build({"weight": alone.weight}, AdamWSettings(name="adamw", lr=settings.lr / 2,
        beta2=0.9))
    for update in range(5):
        for p in (alone.weight, *model.parameters()):
            p.grad = gradient(p, update)
        both.step()
        adamw.step()
    assert torch.equal(model[1].weight, alone.weight)
    assert (list(both.state[model[0].weight]) == ["update", "exp_avg"]
            and list(both.state[model[1].weight]) == ["update", "exp_avg", "exp_avg_sq"])
    for group, sentence in (("*:optimizer=adamm",
                             "no optimizer of optimizer.groups 'adamm'; did you mean 'adam"),
        ("*:optimizer=sgd:beta2=0.9", "a group has no 'beta2'"),
                            ("*:optimizer=adamw:beta2=2", "beta2")):
        with pytest.raises(ConfigError, match=sentence):
            Config().replace({"optimizer.groups": (group,)})


def test_schedule_free_averages_what_moves():
    """By the published form in float64: y = (1 - beta) z + beta x, z moves against the gradient at
    y, x is the mean of all z."""
    p = torch.nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(1)))
    optimizer = build({"p.weight": p}, settings_of("schedule-free", lr=0.05))
    x = z = p.detach().double()
    v = torch.zeros_like(x)
    assert optimizer.evaluated(p) is None
    for update in range(1, 21):
        draw = torch.Generator().manual_seed(update)
        p.grad = torch.randn(6, 5, generator=draw)
        y, g = 0.1 * z + 0.9 * x, p.grad.double()
        assert torch.allclose(p.detach().double(), y, atol=1e-6)
        optimizer.step()
        v = 0.999 * v + 0.001 * g * g
        z = z - 0.05 * (g / ((v / (1 - 0.999**update)).sqrt() + 1e-8) + 0.1 * y)
        x = x + (z - x) / update
    assert torch.allclose(optimizer.evaluated(p).double(), x, atol=1e-6)


def test_a_slot_of_its_own_shape_is_whole_whatever_the_shape_of_a_rows_part(toy_rows, monkeypatch):
    """(n, n) beside a parameter (2n, n) has the shape of one of two ranks' rows, and beside (n, n)
    that of all: what is cut is declared."""
    square = replace(OPTIMIZERS["adafactor"],
                     slots=(Slot(name="right", shape=lambda p, s: p[-1:] * 2),
                            Slot(name="exp_avg")))
    monkeypatch.setitem(OPTIMIZERS, "square", square)
    rows = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = build({"w": rows}, replace(square.settings, name="square"),
                      facts=lambda name: Parameter(name, (16, 8)))
    assert [optimizer.is_cut(rows, name) for name in ("right", "exp_avg", "update")] == [False,
        True, True]
    assert [t.shape for t in optimizer._stored(rows)] == [(8, 8), (8, 8)]
