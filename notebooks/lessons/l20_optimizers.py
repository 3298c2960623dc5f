"""Lesson 20, optimizers: its study, its figures and its exercises.

Updates the kit's model with every rule (optimizer). The bytes of a rule's state are predicted and
compared with a real update. The seconds of a rule's update are compared with the bytes that it
moves. (Lesson 26 compares Muon's seconds with its FLOPs.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lessons.rows.disk  # noqa: F401  adds rows
from lessons.draws import normal
from lessons.figures.drawing import NAMES, axis, bars, figure
from lessons.figures.style import COLOURS
from lessons.figures.waiting import progress as progress
from lessons.judging.index import Moved
from lessons.judging.judge import adding_to
from lessons.rows.optimizers import soap as soap
from lessons.timing import by_phase
from lpkit import hardware, measure
from lpkit import preset as preset
from lpkit.config import Config
from lpkit.contracts import Parameter
from lpkit.measure.updates import Bench, take_turns
from lpkit.predict import memory, parameter_count
from lpkit.predict import quantity as quantity
from lpkit.predict.compare import disturbance
from lpkit.predict.flops import training_flops
from lpkit.predict.params import optimizer_work, shapes
from lpkit.tables import html_table
from lpkit.techniques.optimizers import (
    BLOCK,
    FLOAT32,
    OPTIMIZERS,
    Optimizer,
    find,
    rules,
    rules_of,
)
from lpkit.timing import Watch

# ---- The study

ON_A_GPU = ("on a GPU, both rules make one pass over their data, and a small batch may show the "
            "difference")

# ways to store a rule's state between updates
FORMS = {"float32": {}, "8 bits": {"memory.moment_format": "int8"},
         "on a disk": {"memory.optimizer_state": "disk"}}
TINY = {"model.layers": 1, "model.context": 32, "global_batch": 2}     # for fast measurements


def count(config: Config, form: str = "") -> int:
    """Return the bytes of the optimizer state of a config, summed tensor by tensor.

    Without `form`, all slots are float32. A form of FORMS adds its overhead: in 8 bits, each tensor
    has whole blocks with a scale; in float32, PyTorch's fused kernel has one counter per tensor; on
    a disk, an empty slot takes one number."""
    nbytes, each = 0, shapes(config.model)
    for name, own in rules_of(each, config.optimizer).items():
        for slot in find(own.name).slots:
            numbers = math.prod(slot.shape(each[name], own) or each[name])
            if form == "8 bits":
                nbytes += numbers + FLOAT32 * -(-numbers // BLOCK)
            else:
                nbytes += FLOAT32 * max(numbers, form == "on a disk")
    counted = find(config.optimizer.name).fused and form == "float32"
    return nbytes + FLOAT32 * len(each) * bool(counted)


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes of one rule's optimizer state: predicted in two ways, and measured."""

    formula: float          # the kit's prediction, by bytes per parameter
    counted: int            # by `count`, tensor by tensor
    measured: int
    peak: int               # peak bytes of the whole update
    elsewhere: int          # bytes off the device


def state(config: Config, form: str, *, beside: int = 0) -> State:
    """Run two real updates and measure the state in the second one. `beside`: bytes off the device
    that are not optimizer state, such as labels that are drawn for a GPU. Raises ConfigError for a
    rule without state that is stored in 8 bits or on a disk."""
    seen = measure.memory(config.replace(FORMS[form]))
    here = {"memory.optimizer_state": "device"}
    if form == "8 bits":
        here |= FORMS[form]
    ledger = {row.name: row.bytes for row in memory(config.replace(here), hardware.machine()).rows}
    row = "optimizer state"
    measured = seen.offloaded_bytes - beside if form == "on a disk" else seen.most.get(row, 0)
    return State(formula=ledger.get(row, 0), counted=count(config, form), measured=measured,
                 peak=seen.peak_bytes, elsewhere=seen.offloaded_bytes)


def states(config: Config, names: Sequence[str]) -> dict[str, dict[str, State | None]]:
    """Return the state of each rule by form; None for a form that a rule without state lacks."""
    by_rule = {}
    for name in names:
        with_rule = config.replace({"optimizer": name})
        first = state(with_rule, "float32")
        by_rule[name] = {"float32": first} | {
            form: state(with_rule, form, beside=first.elsewhere) if OPTIMIZERS[name].slots else None
            for form in ("8 bits", "on a disk")}
    return by_rule


def flops(config: Config) -> float:
    """Return the FLOPs of the matmuls in a rule's update; 0 for a rule without matmuls."""
    return optimizer_work(config).flops * parameter_count(config.model)


def drawn(config: Config) -> float:
    """Return how many additional forward and backward passes a rule makes per update, on average.
    Sophia makes one for labels drawn from the model in every n-th update."""
    return sum(1 / every for rule in rules(config.optimizer)
               for every in find(rule.name).passes(rule).values())


def overhead(config: Config) -> float:
    """Return the FLOPs of a rule's update over the FLOPs of forward and backward."""
    return flops(config) / training_flops(config.model, batch=config.global_batch) + drawn(config)


# Bytes that a rule moves.

PRODUCTS = ("mm", "addmm", "bmm", "geqrf", "orgqr", "_linalg_svd", "_linalg_eigh")


class Passes(TorchDispatchMode):
    """Counts the bytes that operations read and write (`moved`), and the elements that operations
    other than matmuls write (`written`)."""

    def __init__(self):
        super().__init__()
        self.moved, self.written = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in func.__name__:
            return out
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        wrote = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.moved += sum(t.nbytes for t in [*read.values(), *wrote])
        if func.__name__.partition(".")[0] not in PRODUCTS:
            self.written += sum(t.numel() for t in wrote)
        return out


@cache
def passes(name: str, side: int = 128) -> tuple[float, float]:
    """Run the second update of a rule's definition on a matrix of `side` x `side`. Returns, per
    element of the matrix, the bytes that are moved and the operations other than matmuls."""
    row, p = OPTIMIZERS[name], (side, side)
    settings, w, g = row.settings, torch.randn(p), torch.randn(p)
    shapes = [slot.shape(p, settings) for slot in row.slots]
    slots = [torch.zeros(p if own is None else own) for own in shapes]
    parameter = (Parameter("a", p),) if row.takes_parameter else ()
    update = row.load()
    update(w, g, slots, settings, 1, *parameter)
    with Passes() as seen:
        update(w, g, slots, settings, 2, *parameter)
    return seen.moved / w.numel(), seen.written / w.numel()


# Seconds.

@dataclass(frozen=True, kw_only=True)
class Timed:
    """The best seconds over rounds in which all rules and the runners `beside` took turns."""

    forward_backward: float         # seconds of forward and backward
    optimizer: dict[str, float]     # seconds of the update, by rule
    beside: tuple[float, ...]       # seconds of each further runner
    others: float                   # share of the cores that other processes used
    where: str                      # the device and the number of rounds, for captions

    @property
    def caption(self) -> str:
        return "; ".join(filter(None, (self.where, disturbance(self.others))))

    def share(self, name: str) -> float:
        """Return the time of a rule's update over the time of forward and backward."""
        return self.optimizer[name] / self.forward_backward

    def gain(self, name: str, base: str) -> float:
        """Return the speed-up of a whole update with rule `name` over an update with `base`."""
        return (1 + self.share(base)) / (1 + self.share(name))


def timed(config: Config, names: Sequence[str], *, rounds: int, watch: Watch = iter,
          beside: Sequence[Callable[[], object]] = ()) -> Timed:
    """Measure the rules `names` and the runners `beside`, which take turns in `rounds` rounds."""
    benches = {name: Bench(config.replace({"optimizer": name})) for name in names}
    spent: dict[str, list] = {name: [] for name in names}

    def runner(name: str, bench: Bench) -> Callable[[], None]:
        return lambda: spent[name].append(by_phase(bench))

    first = benches[names[0]]
    runners = [runner(name, bench) for name, bench in benches.items()]
    times, others = take_turns([*runners, *beside], rounds, watch)
    # by rule: the seconds of each phase in all rounds; the first round is a warm-up
    phases = {name: list(zip(*by_round[1:])) for name, by_round in spent.items()}
    return Timed(forward_backward=min(min(map(sum, zip(*each[:2]))) for each in phases.values()),
                 optimizer={name: min(each[2]) for name, each in phases.items()},
                 beside=tuple(map(min, times[len(runners):])),
                 others=others, where=f"{first.where}, the best of {rounds} rounds")


# ---- Figures and tables

def states_table(states: Mapping[str, Mapping[str, State | None]], parameters: int) -> str:
    """Return an HTML table of measured bytes per parameter by rule and form, and of the differences
    (in bytes) of the formula and of the count by tensor from the measurement."""
    lines = []
    for name, forms in states.items():
        cells = []
        for state in forms.values():
            cells += ["-", "", ""] if state is None else [
                f"{state.measured / parameters:.3f}", f"{state.formula - state.measured:+,.0f}",
                f"{state.counted - state.measured:+,}"]
        lines.append((name, *cells))
    heads = [head for form in FORMS for head in (
        f"{form}, bytes per parameter", "formula off by, bytes", "count off by, bytes")]
    return html_table(("rule", *heads), lines)


def rules_view(models: Mapping[str, Config]) -> Callable[..., dict]:
    """Return a view for an Explorer: the bytes that each rule stores, and the FLOPs of its update
    over those of forward and backward."""
    operations = {name: passes(name)[1] for name in OPTIMIZERS}

    def show(model: str, tokens: int) -> dict:
        m, own = models[model].model, {}
        numbers, whole = parameter_count(m), training_flops(m) * tokens / m.context
        for name in OPTIMIZERS:
            config = models[model].replace({"optimizer": name})
            again = drawn(config)
            products = flops(config) / whole + again
            own[name] = (count(config) / numbers, products + operations[name] * numbers / whole,
                         COLOURS[2 if products else 0])
        order = sorted(own, key=lambda name: own[name])
        colours = [own[name][2] for name in order]
        left = bars(order, [own[name][0] for name in order], "state", colours, showlegend=False,
                    hover="%{y}: %{x:.3f} bytes per parameter",
                    text=[f"{own[name][0]:.3g}" for name in order])
        right = bars(order, [100 * own[name][1] for name in order], "FLOPs", colours,
                     showlegend=False, xaxis="x2", hover="%{y}: %{x:.3g}%",
                     text=[f"{100 * own[name][1]:.2g}%" for name in order])
        return figure(
            [left, right], f"{model}, {tokens:,} tokens per update", height=460,
            xaxis=axis("state, bytes per parameter", domain=[0, 0.44], range=[0, 48]),
            xaxis2=axis("FLOPs, % of forward and backward", domain=[0.54, 1], type="log",
                        range=[-4.5, 3.2], anchor="y", dtick=1, exponentformat="power"),
            yaxis=axis("", **NAMES), bargap=0.3)

    return show


def seconds_table(timed: Timed, config: Config) -> str:
    """Return an HTML table of the time of each rule's update, compared with forward and
    backward."""
    lines = []
    for name, seconds in timed.optimizer.items():
        share = overhead(config.replace({"optimizer": name}))
        lines.append((name, f"{1e3 * seconds:.2f} ms", f"{timed.share(name):.1%}",
                      f"{share:.1%}" if share else "no matmuls",
                      f"{timed.gain(name, 'adamw'):.3f} times"))
    return html_table(("rule", "time of its update", "over forward and backward",
                       "FLOPs, over forward and backward", "speed-up of a step over AdamW"), lines,
                      caption=timed.caption)


def moved_table(timed: Timed) -> str:
    """Return an HTML table of the bytes that a rule moves per parameter, in one pass and operation
    by operation, and of its time."""
    lines = []
    for name in ("adamw", "lion"):
        row = OPTIMIZERS[name]
        lines.append((name, f"{one_pass(row):.0f}", f"{passes(name)[0]:.0f}",
                      "PyTorch's fused kernel" if row.fused else "its definition",
                      f"{1e3 * timed.optimizer[name]:.2f} ms"))
    return html_table(("rule", "one pass, bytes per parameter", "operation by operation",
                       "runs on a CPU as", "time"), lines, caption=timed.caption)


def one_pass(row: Optimizer) -> float:
    """Return the bytes per parameter of one pass, which reads the weight, the gradient and the
    slots, and writes the weight and the slots."""
    return FLOAT32 * (3 + 2 * row.slots_per_number)


# ---- Exercises

EXERCISES: dict = Moved()
exercise = adding_to(EXERCISES)


def _case(r: Random) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a weight, a gradient and a momentum of the same shape."""
    shape = (r.randint(1, 4), r.randint(1, 5))
    return tuple(normal(r, *shape, size=size) for size in (0.5, 1.0, 0.3))


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, update: int, lr: float, decay: float, *,
           corrected: bool = True, coupled: bool = False, by_lr: bool = True) -> tuple[Tensor, ...]:
    """AdamW, and common mistakes."""
    g = g + decay * w if coupled else g
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    m_hat, v_hat = (m / (1 - 0.9**update), v / (1 - 0.95**update)) if corrected else (m, v)
    kept = 1.0 if coupled else 1 - (lr if by_lr else 1) * decay
    return w * kept - lr * m_hat / (v_hat.sqrt() + 1e-8), m, v


@exercise("20.adamw",
          (torch.ones(1, 2), torch.tensor([[1.0, -2.0]]), torch.zeros(1, 2), torch.zeros(1, 2), 1,
           0.1, 0.0),
          (torch.ones(1, 2), torch.tensor([[1.0, -2.0]]), torch.ones(1, 2), torch.ones(1, 2), 3,
           0.1, 0.5),
          (torch.ones(1, 2), torch.tensor([[1e-8, 0.0]]), torch.zeros(1, 2), torch.zeros(1, 2), 1,
           0.1, 0.0), minutes=6,
          draw=lambda r: ((case := _case(r)) + (case[2].square() + 0.01, r.randint(1, 9),
                                               r.uniform(0.01, 0.2), r.uniform(0, 0.5))),
          mistakes={"both means begin at 0: divide them by 1 - beta^update":
                        lambda *case: _adamw(*case, corrected=False),
                    "the decay scales the weight; do not add it to the gradient":
                        lambda *case: _adamw(*case, coupled=True),
                    "the decay is a share of lr":
                        lambda *case: _adamw(*case, by_lr=False)})
def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, update: int, lr: float,
          decay: float) -> tuple[Tensor, Tensor, Tensor]:
    m = 0.9 * m + 0.1 * g
    v = 0.95 * v + 0.05 * g**2
    step = (m / (1 - 0.9**update)) / ((v / (1 - 0.95**update)).sqrt() + 1e-8)
    return w * (1 - lr * decay) - lr * step, m, v


def _lion(w: Tensor, m: Tensor, direction: Tensor, lr: float,
          decay: float) -> tuple[Tensor, Tensor]:
    return w * (1 - lr * decay) - lr * direction, m


@exercise("20.lion", (torch.ones(1, 2), torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2), 0.1, 0.0),
          (torch.ones(1, 2), torch.tensor([[1.0, -2.0]]), torch.tensor([[-0.05, 0.5]]), 0.1, 0.5),
          minutes=5, draw=lambda r: (*_case(r), r.uniform(0.01, 0.2), r.uniform(0, 0.5)),
          mistakes={"the direction has its own beta, 0.9": lambda w, g, m, lr, decay: _lion(
                        w, 0.99 * m + 0.01 * g, (0.99 * m + 0.01 * g).sign(), lr, decay),
                    "the momentum that is kept has its own beta, 0.99":
                        lambda w, g, m, lr, decay: _lion(
                            w, 0.9 * m + 0.1 * g, (0.9 * m + 0.1 * g).sign(), lr, decay),
                    "take the sign of the direction": lambda w, g, m, lr, decay: _lion(
                        w, 0.99 * m + 0.01 * g, 0.9 * m + 0.1 * g, lr, decay)})
def lion(w: Tensor, g: Tensor, m: Tensor, lr: float, decay: float) -> tuple[Tensor, Tensor]:
    direction = torch.sign(0.9 * m + 0.1 * g)
    return w * (1 - lr * decay) - lr * direction, 0.99 * m + 0.01 * g


@exercise("20.factored", (torch.zeros(1), torch.zeros(2), torch.tensor([[1.0, 3.0]]), 1.0),
          (torch.ones(2), torch.ones(2), torch.tensor([[1.0, 2.0], [0.0, 4.0]]), 0.5),
          minutes=8, stars=2,
          draw=lambda r: ((g := normal(r, r.randint(1, 4), r.randint(1, 5)))[:, 0].square() + 0.1,
                          g[0].square() + 0.1, g, r.uniform(0.1, 1)),
          mistakes={"both means contain the gradient's size: divide once by their mean":
                        lambda rows, columns, g, share: (
                            rows + share * ((g**2).mean(1) - rows),
                            columns + share * ((g**2).mean(0) - columns),
                            (rows + share * ((g**2).mean(1) - rows))[:, None]
                            * (columns + share * ((g**2).mean(0) - columns)))})
def factored(rows: Tensor, columns: Tensor, g: Tensor,
             share: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = (1 - share) * rows + share * (g**2).mean(1)
    columns = (1 - share) * columns + share * (g**2).mean(0)
    return rows, columns, rows[:, None] * columns / rows.mean()
