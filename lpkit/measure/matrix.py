"""Find out for each pair of a recipe and a backend whether it runs on this machine: native,
emulated, or not at all, with the reason.

Each pair is tried with a tiny Linear. Forward and backward are compared with the recipe's
definition in float64. Then torch.compile, recomputation and gradient accumulation are tried.
docs/matrix.md lists the pairs on other machines, by the requirements of the libraries.

native      the device multiplies these formats itself
emulated    the same results from matmuls in 16 or 32 bits, which are slower than a recipe without
            casts
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
FEATURES = ("compile", "recompute", "accumulate")   # a pair may work without these
SIZE = 128      # width of the tiny Linear, a multiple of every recipe's block and tile sizes
ERROR = 0.5     # a result with a larger relative error does not follow the recipe


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
    """Return in words whether the pair is native or emulated, its relative error, and the features
    that fail with it. Raises UnavailableError if the pair does not work."""
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
    """The definition of a recipe: its casts, and matmuls in float64."""

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
        # A backend that is not `exact` may round in another way than the definition, so its error
        # may be as large as the recipe's own rounding error.
        self.limit = 0.01 if self.backend.exact else ERROR

    def linear(self) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(SIZE, SIZE, device=self.device)

    def model(self, wrap: Callable[..., nn.Module] | None = None) -> nn.Module:
        """Return a wrapped Linear after one micro-batch, which only fills the amax history, if the
        recipe has one. `wrap`: None: the backend's."""
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
        """Run one micro-batch with a fixed gradient of y; return y, dx and dw. `call` replaces the
        call of the model."""
        x = self.input(seed).to(model.weight.dtype).requires_grad_()
        with autocast(self.recipe, self.device) if x.dtype == torch.float32 else nullcontext():
            # not `(call or model)(x)`, because a compiled module has no truth value
            y = model(x) if call is None else call(x)
        y.backward(self.input(3).to(y.dtype))
        advance(model)
        return [y.detach(), x.grad, model.weight.grad]

    def definition(self) -> list[Tensor]:
        """Return the y, dx and dw to compare with: by the recipe's definition, or in float64 if the
        recipe casts nothing."""
        model = self.linear().double()
        if self.recipe.products:
            model = self.model(partial(ScaledLinear.wrap, arithmetic=Definition()))
        return self.gradients(model)

    def numbers(self) -> str:
        """Compare y, dx and dw with the definition; return the relative error in words."""
        return _compare(self.gradients(self.model()), self.definition(), self.limit)

    def compile(self) -> str:
        """Trace forward and backward with torch.compile and run the traces. The backend "aot_eager"
        generates no code, because code for all pairs would take minutes. The doctor's row "triton"
        tests code generation."""
        model, plain = self.model(), self.model()
        torch._dynamo.reset()
        got = self.gradients(model, call=jit.compiled(model, backend="aot_eager"))
        return f"traced, {_compare(got, self.gradients(plain), self.limit)}"

    def recompute(self) -> str:
        """Check that recomputation gives the same numbers, and that the forward pass that runs
        again does not advance the amax history a second time."""
        model, plain = self.model(), self.model()
        got = self.gradients(model, call=partial(checkpoint, model, use_reentrant=False))
        want = self.gradients(plain)
        for ours, theirs in zip(scaled_linears(model), scaled_linears(plain), strict=True):
            if not all(map(torch.equal, ours.buffers(), theirs.buffers())):
                raise ArithmeticError("its amax history advanced twice")
        return _compare(got, want, 1e-6 if self.backend.exact else ERROR)

    def accumulate(self) -> str:
        """Check that the gradient of two micro-batches is the sum of the gradients of each."""
        model, single = self.model(), self.model()
        total = 0
        for seed in (1, 2):
            single.weight.grad = None
            total = total + self.gradients(single, seed=seed)[2]
            self.gradients(model, seed=seed)
        return _compare([model.weight.grad], [total], 1e-3)
