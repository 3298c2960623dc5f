"""nn.Linear whose three matrix products run under a recipe. Weights stay what they were: float32
masters.

Six casts, three products, no branches on names. A cast that is its own transpose (tensorwise,
square blocks) is made once and serves two products. What backward needs is kept as it was cast, in
forward.

State, in persistent buffers, so that a checkpoint carries it:
- `amax_history` (3, 1 + history), for delayed scaling: column 0 is being filled by the micro-batch
at hand, the others
  decide its scales. `advance` moves them on after each micro-batch, as Transformer Engine does at
  the end of its autocast. Nothing moves inside a micro-batch, so a forward that is recomputed sees
  the same scales and adds nothing.
- `draws` (), for stochastic rounding: how many micro-batches have drawn.
Evaluation (`model.eval()`) uses the history and leaves it alone.

Inside `weights_cached(model)`, around the micro-batches of one update, a weight is cast once and
not in each of them.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.errors import ConfigError
from lpkit.kernels.cast import Noise
from lpkit.precision.scaled import Scaled
from lpkit.techniques.recipes import PRODUCTS, RECIPES, SCALES, Cast, Recipe, untiled

FLOAT32 = 4                 # bytes
ROLES = ("x", "w", "g")     # activations, weights, gradients of the output
HISTORY_RULES = {           # which scale a history of amaxes gives; the newest comes first
    "max": lambda history: history.amax(-1),
    "most-recent": lambda history: history[..., 0],
}


class Arithmetic(Protocol):
    """What a backend does: cast an operand (rows, contracted axis last), and multiply two, a @ b.T
    + bias."""

    traceable: bool = False     # by torch.compile
    alignment: int = 0          # bytes of which the rows of operands must be a multiple; 0: any

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax: Tensor | None,
             noise: Noise | None) -> Scaled: ...

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype,
                bias: Tensor | None = None) -> Tensor: ...

    def held(self, cast: Cast, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of a value and of a block's scale, as `cast` leaves them; a scale of 0 bytes is in
        the values already."""
        ...


class WeightCache:
    """The casts of one weight, until it changes: until it is another tensor, lies elsewhere, or
    counts another version.

    What the version counter of a tensor does not see must not happen while a cache lives: PyTorch's
    fused optimizers and writes through `tensor.data`. So caches live within one update
    (`weights_cached`), and the optimizer comes after it.
    """

    def __init__(self):
        self.weight: Callable[[], Tensor | None] = lambda: None
        self.storage: Any = None        # held, so that no other can have its address
        self.version = -1
        self.casts: dict[str, tuple[Any, Scaled]] = {}      # by product

    def see(self, w: Tensor) -> None:
        """Before its casts are asked for."""
        storage = w.untyped_storage()
        if self.weight() is not w or self.storage._cdata != storage._cdata or self.version != w._version:
            self.weight, self.storage, self.version = weakref.ref(w), storage, w._version
            self.casts.clear()

    def get(self, product: str, key: Any, make: Callable[[], Scaled]) -> Scaled:
        """`make()`, or what it gave for the same key. One cast a product is kept."""
        if product not in self.casts or self.casts[product][0] != key:
            self.casts[product] = key, make()
        return self.casts[product][1]

    @property
    def bytes(self) -> int:
        """Of values and scales."""
        return sum(t.nbytes for _, made in self.casts.values()
                   for t in (made.data, made.scale, made.tensor) if t is not None)


class ScaledLinear(nn.Linear):
    """Drop-in for nn.Linear, with any leading dimensions, with or without a bias, under autocast or
    not."""

    recipe: Recipe
    arithmetic: Arithmetic
    name: str
    seed: int
    cache: WeightCache | None = None    # see `weights_cached`

    @classmethod
    def wrap(cls, linear: nn.Linear, recipe: Recipe, arithmetic: Arithmetic, *,
             name: str = "linear", seed: int = 0) -> ScaledLinear:
        """Share the parameters, allocate the state alone."""
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        new.recipe, new.arithmetic, new.name, new.seed = recipe, arithmetic, name, seed
        device = linear.weight.device
        if recipe.delayed:
            new.register_buffer("amax_history",
                                torch.zeros(len(ROLES), 1 + recipe.delayed.history, device=device))
        if recipe.stochastic:
            # read on the host, without waiting
            new.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        new.register_buffer("nonfinite", torch.zeros(len(ROLES), dtype=torch.int64, device=device),
                            persistent=False)
        return new.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        # torch.compile fuses the casts of hardware formats. It must not see state that backward
        # writes, nor host code.
        state = self.recipe.delayed is not None or self.recipe.stochastic
        apply = _apply if self.arithmetic.traceable and not state else _apply_eager
        return apply(self, x.reshape(-1, x.shape[-1]), dtype).unflatten(0, x.shape[:-1])

    def cast(self, product: str, role: str, x: Tensor, dtype: torch.dtype, *,
             first: bool = False) -> Scaled:
        """The operand `role` of `product`, (rows, contracted axis). `first`: of the casts of this
        tensor, the one that is counted, and whose amax goes into the history.
        """
        casts = getattr(self.recipe, product)
        if casts is None:  # this product is not low-precision: one more Scaled, with a scale of one
            return Scaled(data=x.to(dtype), scale=torch.ones(1, 1, device=x.device))
        cast, i = casts[PRODUCTS[product].index(role)], ROLES.index(role)
        amax = noise = None
        if (delayed := self.recipe.delayed) is not None:
            amax = HISTORY_RULES[delayed.rule](self.amax_history[i, 1:]) * 2.0**delayed.margin
        if cast.rounding == "stochastic":
            key = zlib.crc32(f"{self.name} {product} {role}".encode())
            noise = Noise(seed=self.seed << 32 | key, counter=int(self.draws) << 32)
        make = partial(self.arithmetic.cast, x, cast, dtype, amax=amax, noise=noise)
        if role == "w" and self.cache is not None and not torch.compiler.is_compiling():
            # a history moves on between micro-batches, and may give the same weight another scale
            made = self.cache.get(product, (cast, dtype, self.arithmetic,
                                            None if amax is None else amax.item()),
                                  lambda: replace(kept := make(),
                                                  amax=kept.amax if delayed else None))
        else:
            made = make()
        if first:
            self.nonfinite[i] += made.nonfinite
        if first and self.training and delayed is not None:
            now = self.amax_history[i, 0]
            now.copy_(torch.maximum(now, made.amax.view(()).nan_to_num(0, 0)))
        return made

    def transposed(self, made: Scaled, product: str, other: str, role: str, x: Tensor,
                   dtype: torch.dtype) -> Scaled:
        """The operand `role` of `other`, x transposed: `made` for `product` where that is the same
        cast, else a new one."""
        ours, theirs = getattr(self.recipe, product), getattr(self.recipe, other)
        if ours is not None and theirs is not None:
            one, two = ours[PRODUCTS[product].index(role)], theirs[PRODUCTS[other].index(role)]
            if one == two and one.transposes:
                return made.T
        return self.cast(other, role, x.T, dtype)

    def advance(self) -> None:
        """After the backward of a micro-batch: histories move on, the next stochastic rounding
        draws anew."""
        if self.recipe.delayed is not None:
            self.amax_history.copy_(self.amax_history.roll(1, dims=1))
            self.amax_history[:, 0] = 0
        if self.recipe.stochastic:
            self.draws += 1


def _apply(layer: ScaledLinear, x: Tensor, dtype: torch.dtype) -> Tensor:
    sizes = {"M": x.shape[0], "K": layer.in_features, "N": layer.out_features}
    if not torch.is_grad_enabled():
        sizes.pop("M")      # tokens are contracted in backward alone
    w, bias, M = layer.weight, layer.bias, x.shape[0]
    if not torch.compiler.is_compiling() and layer.cache is not None:
        layer.cache.see(w)
    if problem := untiled(layer.recipe, sizes, layer.arithmetic.alignment):
        if not layer.recipe.pad:
            refuse(layer.name, problem, sizes)
        # of 4-bit elements, two to a byte
        tile = max(layer.recipe.tile, 2 * layer.arithmetic.alignment)
        x, w = (F.pad(t, (0, -t.shape[1] % tile, 0, -t.shape[0] % tile)) for t in (x, w))
        bias = bias if bias is None else F.pad(bias, (0, -len(bias) % tile))
    return ScaledMatmul.apply(x, w, bias, layer, dtype)[:M, :layer.out_features]


_apply_eager = torch.compiler.disable(_apply)


def refuse(name: str, problem: str, sizes: dict[str, int]) -> None:
    """Raise ConfigError with the recipes that would do."""
    fits = [name for name, recipe in RECIPES.items() if recipe.products
            and not untiled(recipe, sizes)]
    raise ConfigError(f"{name}: {problem}; set precision.recipe.pad=true, keep it in 16 bits with "
                      f"precision.recipe.high_precision_layers={name}, or use {' or '.join(fits)}")


def _of_weight(made: Scaled) -> Scaled:
    """Marked, for `lpkit.memory.saved`: what moves activations away leaves these where they are."""
    if not torch.compiler.is_compiling():
        for t in (made.data, made.scale, made.tensor):
            if t is not None:
                t.of_weight = True
    return made


class ScaledMatmul(torch.autograd.Function):
    """y = x @ w.T + bias for x (M, K), w (N, K), in `dtype`."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, bias: Tensor | None, layer: ScaledLinear,
                dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            cast_x = layer.cast("y", "x", x, dtype, first=True)
            cast_w = layer.cast("y", "w", w, dtype, first=True)
            y = layer.arithmetic.product(cast_x, cast_w, dtype, bias)
            kept = []
            if ctx.needs_input_grad[0]:
                # (K, N)
                kept.append(_of_weight(layer.transposed(cast_w, "y", "dx", "w", w, dtype)))
            if ctx.needs_input_grad[1]:
                kept.append(layer.transposed(cast_x, "y", "dw", "x", x, dtype))      # (K, M)
        ctx.save_for_backward(*(t for one in kept for t in (one.data, one.scale, one.tensor)))
        ctx.layer, ctx.dtype, ctx.dtypes = layer, dtype, (x.dtype, w.dtype)
        return y

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        layer, dtype, saved = ctx.layer, ctx.dtype, iter(ctx.saved_tensors)
        g = g.contiguous()      # from an expanded or transposed view

        def kept() -> Scaled:
            return Scaled(data=next(saved), scale=next(saved), tensor=next(saved))

        dx = dw = None
        with torch.autocast(g.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                cast_g = layer.cast("dx", "g", g, dtype, first=True)  # (M, N)
                dx = layer.arithmetic.product(cast_g, kept(), dtype).to(ctx.dtypes[0])  # (M, K)
            if ctx.needs_input_grad[1]:
                cast_gt = (layer.transposed(cast_g, "dx", "dw", "g", g, dtype) if dx is not None
                           else layer.cast("dw", "g", g.T, dtype, first=True))  # (N, M)
                dw = layer.arithmetic.product(cast_gt, kept(), dtype).to(ctx.dtypes[1])  # (N, K)
            db = g.sum(0, dtype=torch.float32).to(g.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


class Float16Linear(nn.Linear):
    """nn.Linear under float16 autocast, for CPUs without float16 products: operands and results are
    rounded to float16, the products are float32's."""

    @classmethod
    def wrap(cls, linear: nn.Linear) -> Float16Linear:
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x, w, b = (t if t is None else t.half().float() for t in (x, self.weight, self.bias))
            return F.linear(x, w, b).half()


def scaled_linears(model: nn.Module) -> Iterator[ScaledLinear]:
    return (module for module in model.modules() if isinstance(module, ScaledLinear))


def advance(model: nn.Module) -> None:
    """After the backward of every micro-batch."""
    for layer in scaled_linears(model):
        layer.advance()


@contextmanager
def weights_cached(model: nn.Module) -> Iterator[None]:
    """Around the forwards and backwards of one update: each weight is cast once for each product
    that casts it anew, and not once a micro-batch or recomputation. The same numbers, bit for bit.
    Not under torch.compile where it fuses the casts: there they are made as ever. Nothing is kept
    afterwards.
    """
    layers = list(scaled_linears(model))
    for layer in layers:
        layer.cache = WeightCache()
    try:
        yield
    finally:
        for layer in layers:
            layer.cache = None


def weight_cache_bytes(recipe: Recipe, arithmetic: Arithmetic, N: int, K: int,
                       dtype: torch.dtype = torch.bfloat16) -> int:
    """What `weights_cached` holds of a weight (N, K) whose sides tile: the operands of y and dx, or
    one that serves both.

    dtype: what the layer computes in.
    """
    y, dx = (casts and casts[PRODUCTS[product].index("w")]
             for product, casts in (("y", recipe.y), ("dx", recipe.dx)))
    total = 0
    for cast, rows, columns in ((y, N, K),
                                (None if dx == y and dx is not None and dx.transposes else dx, K,
                                 N)):
        if cast is not None:
            value, scale = arithmetic.held(cast, dtype)
            blocks = rows // (cast.block[0] or rows) * (columns // (cast.block[1] or columns))
            total += rows * columns * value + (blocks * scale if scale else FLOAT32)
            total += FLOAT32 * (SCALES[cast.scale].levels - 1)
    return total


def nonfinite_report(model: nn.Module) -> str:
    """Which tensors held a NaN or an Inf when they were cast, in the order of the model; empty when
    none did."""
    words = dict(zip(ROLES, ("activations", "weights", "gradients")))
    found = [f"{count} in the {words[role]} of {layer.name}" for layer in scaled_linears(model)
             for role, count in zip(ROLES, layer.nonfinite.tolist()) if count]
    if not found:
        return ""
    more = f" and of {len(found) - 3} more" if len(found) > 3 else ""
    return f"NaN or Inf met in casts: {', '.join(found[:3])}{more}"
