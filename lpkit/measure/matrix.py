"""Find which recipe runs with which backend on this machine: native, emulated, or not, and why.

Each pair is tried: forward and backward of a tiny Linear against its definition in float64, then
torch.compile, recomputation and gradient accumulation. docs/matrix.md has other machines, from what
the libraries require.

native      the device multiplies these formats itself
emulated    equal results by wider products, slower than the wider recipe without casts
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lpkit.kernels import jit
from lpkit.measure.probes import Check, UnavailableError, compare, reason
from lpkit.precision.backends import BACKENDS
from lpkit.precision.compute import autocast
from lpkit.precision.linear import ScaledLinear, scaled_linears
from lpkit.precision.scaled import Emulated, Scaled, quantise, reference
from lpkit.techniques.recipes import RECIPES, Cast, Recipe
from lpkit.training.steps import advance

KIND = "recipe"
FEATURES = ("compile", "recompute", "accumulate")   # a pair works without these
SIZE = 128      # width of the tiny Linear; it tiles every recipe
ERROR = 0.5     # relative; a result with a larger error is not the recipe's


def backends_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the backends that the recipe can use; a recipe without casts uses only PyTorch."""
    return tuple(name for name in BACKENDS if (name == "pytorch") != bool(recipe.products))


def checks() -> dict[str, Check]:
    """Return a check for every pair of recipe and backend, by name."""
    checks_by_name = {}
    for recipe, row in RECIPES.items():
        instead = f"{recipe} with precision.backend=emulated" if row.products else "fp32"
        for backend in backends_of(row):
            name = f"{recipe}, {backend}"
            checks_by_name[name] = Check(name, KIND, partial(tried, recipe, backend), instead)
    return checks_by_name


def tried(recipe: str, backend: str, device: torch.device) -> str:
    """Return whether the pair is native or emulated, its error, and which features fail with it."""
    row = RECIPES[recipe]
    if why := BACKENDS[backend].why_not(recipe, row, device):
        raise UnavailableError(why)
    emulated = backend == "emulated" or (row.products and device.type == "cpu")
    trial = Trial(recipe, backend, device)
    findings = [f"{'emulated' if emulated else 'native'}, {trial.numbers()}"]
    for feature in FEATURES:
        try:
            getattr(trial, feature)()
        except Exception as error:
            findings.append(f"no {feature}: {reason(error)}")
    return "; ".join(findings)


_compare = partial(compare, "the numbers are not the recipe's")


class Definition(Emulated):
    """The definition of a recipe: its casts, multiplied in float64."""

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax, noise, both=False) -> Scaled:
        return quantise(x, cast, amax=amax, noise=noise)

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        y = reference(a, b)
        return (y if bias is None else y + bias).to(dtype)


class Trial:
    """One recipe with one backend on one device. Each method raises if the numbers are wrong."""

    def __init__(self, recipe: str, backend: str, device: torch.device):
        self.recipe, self.backend, self.device = RECIPES[recipe], BACKENDS[backend], device
        # a backend that is not exact must only have errors of the recipe's size
        self.limit = 0.01 if self.backend.exact else ERROR

    def linear(self) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(SIZE, SIZE, device=self.device)

    def model(self, wrap: Callable[..., nn.Module] | None = None) -> nn.Module:
        """Wrap a Linear and run one micro-batch, which only fills the amax history, if any."""
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
        """Return y, dx and dw of one micro-batch with a known gradient of y."""
        x = self.input(seed).to(model.weight.dtype).requires_grad_()
        with autocast(self.recipe, self.device) if x.dtype == torch.float32 else nullcontext():
            # `or` would fail: a compiled module has no truth value
            y = model(x) if call is None else call(x)
        y.backward(self.input(3).to(y.dtype))
        advance(model)
        return [y.detach(), x.grad, model.weight.grad]

    def definition(self) -> list[Tensor]:
        """Return the right y, dx and dw; float64 for a recipe that casts nothing."""
        model = self.linear().double()
        if self.recipe.products:
            model = self.model(partial(ScaledLinear.wrap, arithmetic=Definition()))
        return self.gradients(model)

    def numbers(self) -> str:
        """Compare y, dx and dw with the definition."""
        return _compare(self.gradients(self.model()), self.definition(), self.limit)

    def compile(self) -> str:
        """Trace forward and backward and run them. No code is generated, since that would take
        minutes for all pairs. The doctor's row for Triton tests code generation."""
        model, plain = self.model(), self.model()
        torch._dynamo.reset()
        got = self.gradients(model, call=jit.compiled(model, backend="aot_eager"))
        return f"traced, {_compare(got, self.gradients(plain), self.limit)}"

    def recompute(self) -> str:
        """Check that a repeated forward gives the same numbers and advances the history once."""
        model, plain = self.model(), self.model()
        got = self.gradients(model, call=partial(checkpoint, model, use_reentrant=False))
        want = self.gradients(plain)
        for ours, theirs in zip(scaled_linears(model), scaled_linears(plain), strict=True):
            if not all(map(torch.equal, ours.buffers(), theirs.buffers())):
                raise ArithmeticError("its state moved twice")
        return _compare(got, want, 1e-6 if self.backend.exact else ERROR)

    def accumulate(self) -> str:
        """Check that two micro-batches give the sum of both gradients."""
        model, apart = self.model(), self.model()
        total = 0
        for seed in (1, 2):
            apart.weight.grad = None
            total = total + self.gradients(apart, seed=seed)[2]
            self.gradients(model, seed=seed)
        return _compare([model.weight.grad], [total], 1e-3)
