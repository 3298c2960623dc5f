"""nn.Linear whose three matrix products run under a recipe. Weights stay float32 master weights.

    y  = x @ w.T    operands x (M, K) and w (N, K)        M tokens, K and N features
    dx = g @ w      operands g (M, N) and w.T (K, N)
    dw = g.T @ x    operands g.T (N, M) and x.T (K, M)

Tensor cores read 8- and 4-bit operands with the contracted axis last. So each product is
`product(a, b)` = a @ b.T, and each of x, w and g is cast twice: as stored, and transposed. These
are six casts, without branches on names. If a cast is its own transpose (tensorwise, square
blocks), one cast serves two products. Forward saves the operands of backward already cast.

A recipe has its state in persistent buffers, so that checkpoints contain it:
- `amax_history` (3, 1 + history), for delayed scaling. Columns from 1 on decide the scales. Column
  0 is empty between micro-batches, as in Transformer Engine. `advance` inserts the amaxes of the
  current micro-batch, as the end of that library's autocast does. The history is constant within a
  micro-batch, so a recomputed forward uses the same scales and adds nothing.
- `draws` (), for stochastic rounding: how many micro-batches have drawn.
Evaluation (`model.eval()`) uses the history and does not change it.

The amaxes and counts of a micro-batch go into buffers of one number for each tensor. Forward writes
the buffers of x and w, backward the buffer of g, and neither reads them. So torch.compile may
include both in its graphs, and may run anything in between.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.kernels.cast import Noise, seed_words
from lpkit.kernels.scales import Scaled
from lpkit.precision.backends import Backend, sharing, tiles
from lpkit.precision.deferred import QUEUE, apart, defer
from lpkit.techniques.recipes import PRODUCTS, Cast, Recipe

ROLES = ("x", "w", "g")     # activations, weights, gradients of the output
HISTORY_RULES = {           # how a history of amaxes gives a scale; the newest amax comes first
    "max": lambda history: history.amax(-1),
    "most-recent": lambda history: history[..., 0],
}


class ScaledMatmul(torch.autograd.Function):
    """y = x @ w.T + bias for x (M, K), w (N, K), in `dtype`. The gradient of w goes to `carrier`:
    w itself, or the tensor that represents a w that was gathered in 8 bits."""

    @staticmethod
    def forward(ctx, x: Tensor, carrier: Tensor, bias: Tensor | None, layer: Scaling,
                dtype: torch.dtype, trained: bool, w: Tensor, leave: Callable | None) -> Tensor:
        x_trained, w_trained = (ctx.needs_input_grad[:2] if trained else (False, False))
        product, fast = layer.arithmetic.product, layer.recipe.fast_accumulation
        # Operands are cast explicitly, so autocast must not cast them once more.
        with torch.autocast(x.device.type, enabled=False):
            cast_x, x_T = layer.operands("y", "dw", "x", x, dtype, both=w_trained)      # x_T (K, M)
            cast_w, w_T = layer.operands("y", "dx", "w", w, dtype, both=x_trained)      # w_T (K, N)
            y = product(cast_x, cast_w, dtype, bias, fast="y" in fast)                  # (M, N)
            # gathered weights are freed after forward, and gathered again for backward
            regather = x_trained and layer.gathered is not None
            saved = w_T().stored if x_trained and not regather else ()
            inputs = x_T().stored if w_trained else ()
            if not torch.compiler.is_compiling():
                for t in filter(torch.is_tensor, saved):
                    # offloading of activations (memory.saved) skips casts of weights
                    t.of_weight = True
                for t in filter(torch.is_tensor, inputs):
                    # all ranks of a tensor group have it, so each saves only a part
                    # (parallel.tensor)
                    t.cast_for = layer
            saved += inputs
        ctx.save_for_backward(*saved)
        ctx.layer, ctx.dtype, ctx.w_T = layer, dtype, w_T if regather else None
        ctx.dtypes, ctx.leave = (x.dtype, carrier.dtype), leave
        # A new tensor: in a graph, torch up to 2.11 gives the gradient of y to the last tensor that
        # is y, for example the product before a cast that did nothing, and zeros to y itself.
        return y.view_as(y) if torch.compiler.is_compiling() else y

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        layer, dtype, saved = ctx.layer, ctx.dtype, iter(ctx.saved_tensors)
        product, fast = layer.arithmetic.product, layer.recipe.fast_accumulation
        g = g.contiguous()      # it may be an expanded or transposed view
        # forward saved the casts of w.T and x.T, so backward casts only g

        def saved_operand() -> Scaled:
            return Scaled(data=next(saved), scale=next(saved), tensor=next(saved))

        dx = dw = None
        with torch.autocast(g.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                cast_g, g_T = layer.operands("dx", "dw", "g", g, dtype,                 # g_T (N, M)
                                             both=ctx.needs_input_grad[1])
                w_T = saved_operand() if ctx.w_T is None else ctx.w_T()
                dx = product(cast_g, w_T, dtype, fast="dx" in fast)                 # (M, K)
                dx = dx.to(ctx.dtypes[0])
            else:
                g_T = partial(layer.cast, "dw", "g", g.T, dtype, first=True)
            if ctx.needs_input_grad[1]:
                dw = partial(product, g_T(), saved_operand(), dtype, fast="dw" in fast)     # (N, K)
                if ctx.leave is None:
                    dw = dw()
                    dw = dw.to(ctx.dtypes[1])
            db = g.sum(0, dtype=torch.float32).to(g.dtype) if ctx.needs_input_grad[2] else None
        if ctx.leave is not None:
            dw, db = ctx.leave(dw, db)
        return dx, dw, db, None, None, None, None, None


class Arithmetic(Backend):
    """A backend that casts operands (rows, contracted axis), and computes a @ b.T + bias."""

    # the bytes of an operand's row must be a multiple of this; 0: no condition
    alignment: int = 0

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        return ScaledLinear.wrap(linear, recipe, self, name=name, seed=seed)

    @abstractmethod
    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax: Tensor | None,
             noise: Noise | None, both: bool = False) -> Scaled:
        """Return the cast of x. both: the cast of x.T will be needed, as `.T` of the result."""

    @abstractmethod
    def shares(self, cast: Cast) -> bool:
        """Return whether one cast can serve x and x.T."""

    @abstractmethod
    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor: ...

    @abstractmethod
    def taken(self, existing: Scaled, cast: Cast, dtype: torch.dtype, *,
              both: bool = False) -> Scaled:
        """Return the operand that `cast` would return, from existing 8-bit values and scales."""


class Scaling(nn.Module):
    """The products of a module that has a Linear's weight, bias and sizes, under any autocast."""

    recipe: Recipe
    arithmetic: Arithmetic
    name: str
    cache: Any = None       # a WeightCache inside of `weights_cached`
    # `gathered`: the cast of `weight` that other ranks sent (`lessons.rows.cast_gather`). `carrier`
    # receives its gradient in float32: for a tensor of 8 bits autograd would round it to 8 bits.
    gathered: Scaled | None = None
    carrier: Tensor | None = None
    transposed = False          # whether `weight` is (in_features, out_features)

    def equip(self, recipe: Recipe, arithmetic: Arithmetic, *, name: str, seed: int = 0) -> Any:
        """Allocate the recipe's state, and return the module."""
        self.recipe, self.arithmetic, self.name = recipe, arithmetic, name
        # computed now, because a compiled graph cannot compute these cached properties
        _ = recipe.cast_of, recipe.tile
        zero = partial(torch.zeros, device=self.weight.device)
        if recipe.delayed:
            self.register_buffer("amax_history", zero(len(ROLES), 1 + recipe.delayed.history))
        if recipe.stochastic:
            self.register_buffer("draws", zero((), dtype=torch.int64))
            keys = [[seed_words(seed << 32 | zlib.crc32(f"{name} {product} {role}".encode()))
                     for role in ROLES] for product in PRODUCTS]
            self.register_buffer("keys", torch.tensor(keys).to(self.weight.device),
                                 persistent=False)
        for role in ROLES:
            self.register_buffer(f"nonfinite_{role}", zero((), dtype=torch.int64), persistent=False)
            if recipe.delayed:
                self.register_buffer(f"amax_{role}", zero(()), persistent=False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        kind, shape = x.device.type, x.shape
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x, bias = x.reshape(-1, shape[-1]), self.bias
        w = self.weight.T if self.transposed else self.weight
        M = len(x)
        sizes = {"M": M, "K": self.in_features, "N": self.out_features}
        if not torch.is_grad_enabled():
            sizes.pop("M")      # only backward contracts tokens
        if not torch.compiler.is_compiling() and self.cache is not None:
            self.cache.see(w)
        recipe, alignment = self.recipe, self.arithmetic.alignment
        tile = max(recipe.tile, 2 * alignment)      # in 4-bit elements, of which a byte has two
        if tile > 1 and not tiles(self.name, recipe, sizes, alignment):
            x, w = (F.pad(t, (0, -t.shape[1] % tile, 0, -t.shape[0] % tile)) for t in (x, w))
            bias = bias if bias is None else F.pad(bias, (0, -len(bias) % tile))
        carrier = w if self.carrier is None else self.carrier
        leave = None        # leaves the gradients of w and bias for later
        if not torch.compiler.is_compiling() and (queue := QUEUE.get()) is not None:
            leave, carrier, bias = partial(defer, queue, carrier, bias), apart(carrier), apart(bias)
        y = ScaledMatmul.apply(x, carrier, bias, self, dtype, torch.is_grad_enabled(), w.detach(),
                               leave)
        return y[:M, :self.out_features].unflatten(0, shape[:-1])

    def cast(self, product: str, role: str, x: Tensor, dtype: torch.dtype, *,
             first: bool = False, both: bool = False) -> Scaled:
        """Return the operand `role` of `product`, (rows, contracted axis). `first`: this cast of
        the tensor is counted, and its amax goes into the history. `both`: x.T is needed, too."""
        cast = self.recipe.cast_of[product, role]
        if cast is None:  # this product is not in low precision: a Scaled with a scale of one
            return Scaled(data=x.to(dtype), scale=torch.ones(1, 1, device=x.device))
        delayed, noise = self.recipe.delayed, None
        amax = None if delayed is None else self.past_amax(role)
        if cast.rounding == "stochastic":
            at = list(PRODUCTS).index(product), ROLES.index(role)
            noise = Noise(seed=self.keys[at], counter=self.draws << 32)
        make = partial(self.arithmetic.cast, x, cast, dtype, amax=amax, noise=noise,
                       both=both)
        if role == "w" and self.gathered is not None:
            result = self.arithmetic.taken(replace(self.gathered, data=x), cast, dtype, both=both)
        elif role == "w" and self.cache is not None and not torch.compiler.is_compiling():
            # a history advances between micro-batches, and may give the same weight another scale
            same = cast, dtype, both, self.arithmetic, None if amax is None else amax.item()
            result = self.cache.get(product, same, make, with_amax=delayed is not None)
        else:
            result = make()
        if first:
            getattr(self, f"nonfinite_{role}").add_(result.nonfinite)
        if first and self.training and delayed is not None:
            now = getattr(self, f"amax_{role}")
            now.copy_(torch.maximum(now, result.amax.view(()).nan_to_num(0, 0)))
        return result

    def past_amax(self, role: str) -> Tensor:
        """The amax () float32 of delayed scaling; 0 while its history is empty."""
        delayed, history = self.recipe.delayed, self.amax_history[ROLES.index(role), 1:]
        return HISTORY_RULES[delayed.history_rule](history) * 2.0**delayed.margin

    def operands(self, product: str, other: str, role: str, x: Tensor, dtype: torch.dtype, *,
                 both: bool) -> tuple[Scaled, Callable[[], Scaled]]:
        """Return x as the operand `role` of `product`, and a function that returns x.T as that of
        `other`. A separate second cast is made only when the function is called, to save memory
        during the first product. `both`: the function will be called."""
        # the cast exists already, and can be transposed
        if role == "w" and self.gathered is not None:
            operand = self.cast(product, role, x, dtype, first=True)
            return operand, lambda: self.cast(product, role, x, dtype, both=True).T
        cast, other_cast = self.recipe.cast_of[product, role], self.recipe.cast_of[other, role]
        shared = both and cast is not None and cast == other_cast and self.arithmetic.shares(cast)
        operand = self.cast(product, role, x, dtype, first=True, both=shared)
        return operand, lambda: operand.T if shared else self.cast(other, role, x.T, dtype)

    def of_roles(self, what: str) -> list[Tensor]:
        return [getattr(self, f"{what}_{role}") for role in ROLES]

    def advance(self) -> None:
        """Called after the backward of a micro-batch: advances histories, and gives the next
        rounding new random draws."""
        if self.recipe.delayed is not None:
            amaxes = self.of_roles("amax")
            newest = torch.stack(amaxes)[:, None]
            self.amax_history[:, 1:] = torch.cat((newest, self.amax_history[:, 1:-1]), 1)
            torch._foreach_zero_(amaxes)
        if self.recipe.stochastic:
            self.draws += 1


class ScaledLinear(Scaling, nn.Linear):
    """A replacement for nn.Linear."""

    @classmethod
    def wrap(cls, linear: nn.Linear, recipe: Recipe, arithmetic: Arithmetic, *,
             name: str = "linear", seed: int = 0) -> ScaledLinear:
        """Return a ScaledLinear that shares the parameters of `linear`, with new state."""
        return sharing(cls, linear).equip(recipe, arithmetic, name=name, seed=seed)


def scaled_linears(model: nn.Module) -> Iterator[Scaling]:
    return (module for module in model.modules() if isinstance(module, Scaling))


def nonfinite_report(model: nn.Module) -> str:
    """Return a sentence that names the tensors that held a NaN or an Inf when they were cast, in
    the order of the model; "" if there are none."""
    words = dict(zip(ROLES, ("activations", "weights", "gradients")))
    places = [f"{count} in the {words[role]} of {layer.name}" for layer in scaled_linears(model)
              for role, count in zip(ROLES, torch.stack(layer.of_roles("nonfinite")).tolist())
              if count]
    if not places:
        return ""
    more = f" and of {len(places) - 3} more" if len(places) > 3 else ""
    return f"NaN or Inf met in casts: {', '.join(places[:3])}{more}"
