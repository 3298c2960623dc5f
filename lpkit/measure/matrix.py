"""Which recipe runs where, on what, and with what: native, emulated, or no; why; and the nearest
thing that works.

`probe` runs each on this machine: forward and backward of a tiny Linear against its definition in
float64, torch.compile, recomputation, accumulation; in a process of its own, with a time limit.
docs/matrix.md says the same of machines that are not here, from what the libraries say they need.

Statuses: native, the device multiplies these formats itself; emulated, the same numbers in wider
products, slower than the wider recipe alone; no. `python -m lpkit.measure.matrix DEVICE` probes and
prints one JSON line a pair.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lpkit.kernels import jit
from lpkit.measure.doctor import compare, reason
from lpkit.precision.backends import BACKENDS, Emulated, Library
from lpkit.precision.compute import autocast
from lpkit.precision.linear import ScaledLinear, advance, scaled_linears
from lpkit.precision.scaled import Scaled, quantise, reference
from lpkit.techniques.recipes import RECIPES, Cast, Recipe

FEATURES = ("forward", "backward", "compile", "recompute", "accumulate")
PROBE_SECONDS = 90.0
SIZE = 128      # of the tiny Linear: tiles every recipe
ERROR = 0.5     # relative, beyond which a result is not the recipe's
HERE = "run on this machine"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One answer. `source` is an address, or HERE when it was run."""

    machine: str
    recipe: str
    backend: str
    feature: str
    status: str         # native, emulated, no
    why: str
    nearest: str = ""   # what to use where the answer is no
    source: str


def backends_of(recipe: Recipe) -> tuple[str, ...]:
    """Those that the question makes sense for: a recipe that casts nothing needs none."""
    return tuple(name for name in BACKENDS if (name == "pytorch") != bool(recipe.products))


def _pairs() -> list[tuple[str, str]]:
    return [(name, backend) for name, recipe in RECIPES.items() for backend in backends_of(recipe)]


# This machine: run it.

def probe(device: torch.device | str | None = None, *, seconds: float = PROBE_SECONDS,
          only: Iterable[tuple[str, str]] | None = None) -> tuple[Cell, ...]:
    """Every recipe, backend and feature here, by running each, in another process.

    A pair that crashes it or takes longer than what is left of `seconds` is a no with that reason,
    and a fresh process goes on behind it.
    """
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    waiting = list(only or _pairs())
    cells: list[Cell] = []
    while waiting:
        command = [sys.executable, "-W", "ignore", "-m", "lpkit.measure.matrix", device,
                   json.dumps(waiting)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds)
            out, why = done.stdout, f"the process that tried it ended with {done.returncode}"
        except subprocess.TimeoutExpired as late:
            out, why = late.stdout or b"", f"no answer within {seconds:g} s"
        for line in out.decode(errors="replace").splitlines():
            if line.startswith("[{"):
                cells += [Cell(**cell) for cell in json.loads(line)]
                waiting.pop(0)
        if waiting:
            cells += _refused(*waiting.pop(0), why)
    return tuple(cells)


_here = partial(Cell, machine="this", source=HERE)


def _refused(recipe: str, backend: str, why: str) -> list[Cell]:
    instead = "fp32"
    if RECIPES[recipe].products:
        instead = f"{recipe} emulated: the same numbers, without the speed"
    return [_here(recipe=recipe, backend=backend, feature=feature, status="no", why=why,
                  nearest=instead) for feature in FEATURES]


def _try(recipe: str, backend: str, device: torch.device) -> list[Cell]:
    """One pair, here and now. Whatever it raises is the reason why not."""
    row = RECIPES[recipe]
    if why := BACKENDS[backend].why_not(recipe, row, device):
        return _refused(recipe, backend, why)
    emulated = backend == "emulated" or (row.products and device.type == "cpu")
    cells, trial = [], Trial(recipe, backend, device)
    for feature in FEATURES:
        try:
            why, instead = getattr(trial, feature)(), ""
            status = "emulated" if emulated else "native"
        except Exception as error:
            why, status, instead = reason(error), "no", f"{recipe} emulated"
        cells.append(_here(recipe=recipe, backend=backend, feature=feature, status=status, why=why,
                           nearest=instead))
    return cells


_compare = partial(compare, "the numbers are not the recipe's")


class Definition(Emulated):
    """The recipe itself: its casts, multiplied in float64."""

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax, noise, both=False) -> Scaled:
        return quantise(x, cast, amax=amax, noise=noise)

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        y = reference(a, b)
        return (y if bias is None else y + bias).to(dtype)


class Trial:
    """One recipe with one backend on one device. Each way to try it raises for wrong numbers."""

    def __init__(self, recipe: str, backend: str, device: torch.device):
        self.recipe, self.backend, self.device = RECIPES[recipe], BACKENDS[backend], device
        # libraries round, draw and scale in ways of their own: there, only the size of the error is
        # the recipe's
        self.library = isinstance(self.backend, Library)
        self.limit = ERROR if self.library else 0.01

    def linear(self) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(SIZE, SIZE, device=self.device)

    def model(self, wrap: Callable[..., nn.Module] | None = None) -> nn.Module:
        """With a history, the first micro-batch only fills it."""
        wrap = wrap or self.backend.wrap
        model = wrap(self.linear(), self.recipe, name="probe", seed=0)
        self.gradients(model)
        model.weight.grad = None
        return model

    def input(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(SIZE, SIZE, generator=generator).to(self.device)

    def gradients(self, model: nn.Module, *, seed: int = 1,
                  call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """y, dx, dw of one micro-batch, whose gradient of y is known."""
        x = self.input(seed).to(model.weight.dtype).requires_grad_()
        with autocast(self.recipe, self.device) if x.dtype == torch.float32 else nullcontext():
            y = model(x) if call is None else call(x)     # a compiled module has no truth value
        y.backward(self.input(3).to(y.dtype))
        advance(model)
        return [y.detach(), x.grad, model.weight.grad]

    def definition(self) -> list[Tensor]:
        """What y, dx and dw should be; for a recipe that casts nothing, in float64."""
        model = self.linear().double()
        if self.recipe.products:
            model = self.model(partial(ScaledLinear.wrap, arithmetic=Definition()))
        return self.gradients(model)

    def forward(self) -> str:
        return _compare(self.gradients(self.model())[:1], self.definition()[:1], self.limit)

    def backward(self) -> str:
        return _compare(self.gradients(self.model())[1:], self.definition()[1:], self.limit)

    def compile(self) -> str:
        """Traced and run, forward and backward. Code is not generated, which would take minutes for
        all of them; the doctor's row for Triton says whether that works."""
        model, plain = self.model(), self.model()
        torch._dynamo.reset()
        got = self.gradients(model, call=jit.compiled(model, backend="aot_eager"))
        return f"traced, {_compare(got, self.gradients(plain), self.limit)}"

    def recompute(self) -> str:
        """Forward twice, the same numbers, and a history that moves on once."""
        model, plain = self.model(), self.model()
        got = self.gradients(model, call=partial(checkpoint, model, use_reentrant=False))
        want = self.gradients(plain)
        for ours, theirs in zip(scaled_linears(model), scaled_linears(plain), strict=True):
            if not all(map(torch.equal, ours.buffers(), theirs.buffers())):
                raise ArithmeticError("its state moved twice")
        return _compare(got, want, ERROR if self.library else 1e-6)

    def accumulate(self) -> str:
        """Two micro-batches, one gradient: the sum of what each gives."""
        model, apart = self.model(), self.model()
        total = 0
        for seed in (1, 2):
            apart.weight.grad = None
            total = total + self.gradients(apart, seed=seed)[2]
            self.gradients(model, seed=seed)
        return _compare([model.weight.grad], [total], 1e-3)


# Shown

def grid(cells: Iterable[Cell]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads, and a row a recipe: one word a backend, with the features that fail. For a notebook:
    `html_table(*grid(cells))`."""
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        pairs.setdefault((cell.recipe, cell.backend), {})[cell.feature] = cell.status
    columns = [name for name in BACKENDS if name in {backend for _, backend in pairs}]
    rows = []
    for recipe in dict.fromkeys(recipe for recipe, _ in pairs):
        words = [_word(pairs.get((recipe, backend), {})) for backend in columns]
        rows.append((recipe, *words))
    return ("recipe", *columns), rows


def _word(statuses: dict[str, str]) -> str:
    works = [status for status in statuses.values() if status != "no"]
    missing = [feature for feature, status in statuses.items() if status == "no"]
    if not works:
        return "-" if missing else ""
    return works[0] + (f", no {', '.join(missing)}" if missing else "")


def to_dicts(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    return [asdict(cell) for cell in cells]


def _main(words: list[str]) -> None:
    device, pairs = torch.device(words[0]), json.loads(words[1])
    torch.set_num_threads(1)    # tiny products; more would only wait for one another
    warnings.simplefilter("ignore")
    for recipe, backend in pairs:
        print(json.dumps(to_dicts(_try(recipe, backend, device))), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
