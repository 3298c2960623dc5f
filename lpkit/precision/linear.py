"""nn.Linear whose three matmuls run under a recipe. Weights stay float32 master weights.

    y  = x @ w.T    operands x (M, K) and w (N, K)        M tokens, K and N features
    dx = g @ w      operands g (M, N) and w.T (K, N)
    dw = g.T @ x    operands g.T (N, M) and x.T (K, M)

Tensor cores read 8- and 4-bit operands with the contracted axis last. So each matmul is computed as
`product(a, b)` = a @ b.T, and each of x, w and g is cast twice: as stored, and transposed. These
are six casts. If the cast of a transpose is the transpose of the cast (tensorwise scales, square
blocks), one cast is used for two matmuls. Forward saves the operands of backward already cast.

The state of a recipe is in persistent buffers, so that checkpoints contain it:
- `amax_history` (3, 1 + history), for delayed scaling: one row for each of x, w and g. The scales
  follow from columns 1 and higher. Column 0 is empty between micro-batches, as in Transformer
  Engine. After each micro-batch, `advance` inserts its amaxes in column 1. Within a micro-batch the
  history is constant, so a recomputed forward uses the same scales, and does not count twice.
- `draws` (), for stochastic rounding: the number of micro-batches that have drawn random numbers.
Evaluation (`model.eval()`) uses the history and does not change it.

The amaxes and the numbers of non-finite elements of a micro-batch go into one buffer of one number
for each of x, w and g. Forward writes the buffers of x and w, and backward writes the buffer of g.
Neither reads them, so torch.compile may include both in its graphs, in any order.
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

ROLES = ("x", "w", "g")     # input, weights, gradient of the output
# how the amax that sets the scale follows from a history of amaxes, whose newest comes first
HISTORY_RULES = {
    "max": lambda history: history.amax(-1),
    "most-recent": lambda history: history[..., 0],
}


class ScaledMatmul(torch.autograd.Function):
    """y = x @ w.T + bias (M, N) in `dtype`, for x (M, K) and w (N, K).

    This is a custom Function, because the three matmuls have low-precision operands, and because
    forward saves the casts of x.T and w.T instead of x and w.

    carrier: the tensor that gets the gradient of w: w itself, or a float32 tensor in place of a w
             that other ranks sent in 8 bits
    trained: whether gradients are computed at all
    leave:   a function (dw, db) that postpones these gradients (`deferred.defer`), or None
    """

    @staticmethod
    def forward(ctx, x: Tensor, carrier: Tensor, bias: Tensor | None, layer: Scaling,
                dtype: torch.dtype, trained: bool, w: Tensor, leave: Callable | None) -> Tensor:
        x_trained, w_trained = (ctx.needs_input_grad[:2] if trained else (False, False))
        product, fast = layer.arithmetic.product, layer.recipe.fast_accumulation
        # This code casts the operands itself, so autocast must not cast them once more.
        with torch.autocast(x.device.type, enabled=False):
            cast_x, x_T = layer.operands("y", "dw", "x", x, dtype, both=w_trained)      # x_T (K, M)
            cast_w, w_T = layer.operands("y", "dx", "w", w, dtype, both=x_trained)      # w_T (K, N)
            y = product(cast_x, cast_w, dtype, bias, fast="y" in fast)                  # (M, N)
            # A gathered weight is freed after forward and gathered again for backward, so its cast
            # is not saved.
            regather = x_trained and layer.gathered is not None
            saved = w_T().stored if x_trained and not regather else ()
            inputs = x_T().stored if w_trained else ()
            if not torch.compiler.is_compiling():
                for t in filter(torch.is_tensor, saved):
                    # a mark for offloading of activations (memory.saved), which skips such casts
                    t.of_weight = True
                for t in filter(torch.is_tensor, inputs):
                    # a mark for tensor parallelism (parallel.tensor): all ranks of the tensor group
                    # have the same cast of x.T, so each rank saves only a part of it
                    t.cast_for = layer
            saved += inputs
        ctx.save_for_backward(*saved)
        ctx.layer, ctx.dtype, ctx.w_T = layer, dtype, w_T if regather else None
        ctx.dtypes, ctx.leave = (x.dtype, carrier.dtype), leave
        # Return a new tensor. If y is the same tensor object as an earlier result (for example of a
        # cast that changed nothing), torch up to 2.11 gives the gradient to the earlier result in a
        # compiled graph, and zeros to y.
        return y.view_as(y) if torch.compiler.is_compiling() else y

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        layer, dtype, saved = ctx.layer, ctx.dtype, iter(ctx.saved_tensors)
        product, fast = layer.arithmetic.product, layer.recipe.fast_accumulation
        g = g.contiguous()      # g may be an expanded or transposed view

        # Forward saved the casts of w.T, then of x.T, three tensors each. Backward casts only g.
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

    # a row of an operand must have a multiple of so many bytes; 0: no condition
    alignment: int = 0

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        return ScaledLinear.wrap(linear, recipe, self, name=name, seed=seed)

    @abstractmethod
    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax: Tensor | None,
             noise: Noise | None, both: bool = False) -> Scaled:
        """Return the cast of x (rows, contracted axis). dtype: of the matmul's result; amax: of a
        history, or None; noise: for stochastic rounding, or None; both: the caller will also need
        `.T` of the result, the cast of x.T."""

    @abstractmethod
    def shares(self, cast: Cast) -> bool:
        """Return whether one call of `cast` can return the casts of x and of x.T."""

    @abstractmethod
    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        """Return a @ b.T + bias, (M, N) in `dtype`; a (M, K), b (N, K), bias (N,). fast: whether
        the hardware may accumulate with fewer bits (`use_fast_accum`)."""

    @abstractmethod
    def taken(self, existing: Scaled, cast: Cast, dtype: torch.dtype, *,
              both: bool = False) -> Scaled:
        """Return the operand that `cast` would return, made from `existing` 8-bit values and
        scales, which other ranks sent."""


class Scaling(nn.Module):
    """The matmuls of a module with the weight, bias and sizes of a Linear, under a recipe."""

    recipe: Recipe
    arithmetic: Arithmetic
    name: str
    cache: Any = None       # a WeightCache inside of `weights_cached`
    # `gathered`: the cast of `weight` that other ranks sent (`lessons.rows.cast_gather`). Its
    # float32 gradient goes to `carrier`, because autograd would round the gradient of an 8-bit
    # tensor to 8 bits.
    gathered: Scaled | None = None
    carrier: Tensor | None = None
    transposed = False          # whether `weight` is (in_features, out_features)

    def equip(self, recipe: Recipe, arithmetic: Arithmetic, *, name: str, seed: int = 0) -> Any:
        """Allocate the buffers of the recipe's state, and return this module. `seed` and the name
        of the Linear determine the random numbers of stochastic rounding."""
        self.recipe, self.arithmetic, self.name = recipe, arithmetic, name
        # Compute these cached properties now, because a compiled graph cannot.
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
            sizes.pop("M")      # only dw sums over tokens, so M does not matter without backward
        if not torch.compiler.is_compiling() and self.cache is not None:
            self.cache.see(w)
        recipe, alignment = self.recipe, self.arithmetic.alignment
        tile = max(recipe.tile, 2 * alignment)      # elements; a byte has two 4-bit elements
        if tile > 1 and not tiles(self.name, recipe, sizes, alignment):
            x, w = (F.pad(t, (0, -t.shape[1] % tile, 0, -t.shape[0] % tile)) for t in (x, w))
            bias = bias if bias is None else F.pad(bias, (0, -len(bias) % tile))
        carrier = w if self.carrier is None else self.carrier
        leave = None        # a function that postpones the gradients of w and bias
        if not torch.compiler.is_compiling() and (queue := QUEUE.get()) is not None:
            leave, carrier, bias = partial(defer, queue, carrier, bias), apart(carrier), apart(bias)
        y = ScaledMatmul.apply(x, carrier, bias, self, dtype, torch.is_grad_enabled(), w.detach(),
                               leave)
        return y[:M, :self.out_features].unflatten(0, shape[:-1])

    def cast(self, product: str, role: str, x: Tensor, dtype: torch.dtype, *,
             first: bool = False, both: bool = False) -> Scaled:
        """Return x (rows, contracted axis) as the operand `role` ("x", "w", "g") of the matmul
        `product` ("y", "dx", "dw").

        first: this is the first of two casts of the tensor, so its non-finite elements are counted,
               and its amax is recorded for the history
        both:  the cast of x.T is needed, too
        """
        cast = self.recipe.cast_of[product, role]
        if cast is None:  # the recipe does not cast this operand: a Scaled with a scale of 1
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
            # The amax is part of the key, because the history changes between micro-batches, and
            # may give the same weight another scale.
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
        """Return the amax of the history for `role`, () float32, times 2^margin; 0 while the
        history is empty."""
        delayed, history = self.recipe.delayed, self.amax_history[ROLES.index(role), 1:]
        return HISTORY_RULES[delayed.history_rule](history) * 2.0**delayed.margin

    def operands(self, product: str, other: str, role: str, x: Tensor, dtype: torch.dtype, *,
                 both: bool) -> tuple[Scaled, Callable[[], Scaled]]:
        """Return x as the operand `role` of the matmul `product`, and a function that returns x.T
        as the operand `role` of the matmul `other`.

        If x.T needs its own cast, it is computed when the function is called, to save memory during
        the first matmul. `both`: the caller will call the function.
        """
        # A gathered weight is already cast. Its transpose is made from the same values.
        if role == "w" and self.gathered is not None:
            operand = self.cast(product, role, x, dtype, first=True)
            return operand, lambda: self.cast(product, role, x, dtype, both=True).T
        cast, other_cast = self.recipe.cast_of[product, role], self.recipe.cast_of[other, role]
        shared = both and cast is not None and cast == other_cast and self.arithmetic.shares(cast)
        operand = self.cast(product, role, x, dtype, first=True, both=shared)
        return operand, lambda: operand.T if shared else self.cast(other, role, x.T, dtype)

    def of_roles(self, what: str) -> list[Tensor]:
        """Return the buffers `what`_x, `what`_w and `what`_g."""
        return [getattr(self, f"{what}_{role}") for role in ROLES]

    def advance(self) -> None:
        """Insert the amaxes of a micro-batch into the histories, and select new random numbers for
        the next one. Must be called after the backward of each micro-batch."""
        if self.recipe.delayed is not None:
            amaxes = self.of_roles("amax")
            newest = torch.stack(amaxes)[:, None]
            self.amax_history[:, 1:] = torch.cat((newest, self.amax_history[:, 1:-1]), 1)
            torch._foreach_zero_(amaxes)
        if self.recipe.stochastic:
            self.draws += 1


class ScaledLinear(Scaling, nn.Linear):
    """An nn.Linear under a recipe."""

    @classmethod
    def wrap(cls, linear: nn.Linear, recipe: Recipe, arithmetic: Arithmetic, *,
             name: str = "linear", seed: int = 0) -> ScaledLinear:
        """Return a ScaledLinear that shares the parameters of `linear`, with new state."""
        return sharing(cls, linear).equip(recipe, arithmetic, name=name, seed=seed)


def scaled_linears(model: nn.Module) -> Iterator[Scaling]:
    return (module for module in model.modules() if isinstance(module, Scaling))


def nonfinite_report(model: nn.Module) -> str:
    """Return a sentence that names the first three tensors of the model that had a NaN or an Inf
    when they were cast; "" if there are none."""
    words = dict(zip(ROLES, ("activations", "weights", "gradients")))
    places = [f"{count} in the {words[role]} of {layer.name}" for layer in scaled_linears(model)
              for role, count in zip(ROLES, torch.stack(layer.of_roles("nonfinite")).tolist())
              if count]
    if not places:
        return ""
    more = f" and of {len(places) - 3} more" if len(places) > 3 else ""
    return f"NaN or Inf met in casts: {', '.join(places[:3])}{more}"
