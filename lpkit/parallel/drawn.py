"""Initialise a sharded model: each rank keeps only its rows of each parameter. The numbers are the
same as in a model that one process initialises.

While the model is built, a stand-in replaces each parameter. A stand-in has the parameter's shape
and almost no memory: its row i + 1 begins one number after row i, so the rows overlap. Its memory
holds the first numbers of the parameter, which is enough for a forward pass that only inspects the
model.

An initializer fills one parameter after the other. For the parameter that is being filled, a whole
tensor exists, and all of its numbers are drawn, so that the random generator advances as in one
process. Then this rank keeps its rows and frees the whole tensor. So peak memory is this rank's
rows plus the largest parameter. PyTorch's meta device draws no numbers, so with it the random
generator would not advance, and all weights would differ.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lpkit.errors import ConfigError

# operations that overwrite the whole tensor without reading it
FILLS = {"uniform_", "normal_", "fill_", "zero_", "copy_"}


class Drawn(TorchDispatchMode):
    """A context in which each new parameter is replaced by a stand-in.

    cut:     f(whole parameter) -> this rank's rows
    rows:    this rank's rows on `device`, by stand-in
    at_work: the stand-in whose parameter an initializer is filling; None: no parameter
    whole:   the whole tensor of that parameter
    """

    def __init__(self, cut: Callable[[Tensor], Tensor], device: torch.device):
        super().__init__()
        self.cut, self.device = cut, device
        self.rows: dict[nn.Parameter, Tensor] = {}
        self.at_work: nn.Parameter | None = None
        self.whole: Tensor | None = None

    def stand_in(self, p: nn.Parameter | None) -> nn.Parameter | None:
        """Return the stand-in to register in place of `p`. Return None to register `p` itself: for
        a stand-in, or a parameter without dimensions."""
        if p is None or p in self.rows or not p.ndim:
            return None
        numbers = torch.empty(len(p) - 1 + p[0].numel(), dtype=p.dtype, device=self.device)
        stand_in = nn.Parameter(numbers.as_strided(p.shape, (1, *p.stride()[1:])),
                                requires_grad=p.requires_grad)
        self._keep(stand_in, p.detach())
        return stand_in

    def _keep(self, stand_in: nn.Parameter, whole: Tensor) -> None:
        """Copy the first numbers of `whole` into the stand-in, and this rank's rows into `rows`."""
        numbers = stand_in.detach().as_strided((len(whole) - 1 + whole[0].numel(),), (1,))
        numbers.copy_(whole.reshape(-1)[:len(numbers)])
        self.rows[stand_in] = self.cut(whole).to(self.device, copy=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Called by PyTorch for each operation in this context. Operations on the parameter that is
        being filled get its whole tensor; an operation on another stand-in begins to fill that."""
        name = func._opname
        # new_zeros, empty_like, ... read only the shape, which a stand-in has
        if not name.startswith("new_") and not name.endswith("_like"):
            for p in tree_leaves((args, kwargs)):
                if isinstance(p, nn.Parameter) and p in self.rows and p is not self.at_work:
                    self._begin(p, name, p is args[0] and (name in FILLS or func.is_view))
        as_whole = lambda p: self.whole if p is self.at_work else p
        args, kwargs = tree_map_only(nn.Parameter, as_whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _begin(self, p: nn.Parameter, operation: str, fills: bool) -> None:
        """Begin to fill the parameter of stand-in `p`. Raise ConfigError if its first operation
        reads the parameter, whose numbers do not exist yet (or no longer)."""
        self.finish()
        if not fills:
            raise ConfigError(f"model.init calls {operation} on a parameter that is not there, for "
                              f"parallel.zero=2 and 3 hold only one whole parameter in memory; "
                              f"fill one parameter after the other, or set parallel.zero=1")
        # NaN: an initializer that reads numbers before it fills them does not go unnoticed
        self.at_work, self.whole = p, torch.full(p.shape, math.nan, dtype=p.dtype)

    def finish(self) -> None:
        """Keep this rank's rows of the parameter that is being filled, and free the rest."""
        if self.at_work is not None:
            self._keep(self.at_work, self.whole)
            self.at_work = self.whole = None


@contextmanager
def drawing(cut: Callable[[Tensor], Tensor], device: torch.device) -> Iterator[Drawn]:
    """Return a context in which to build and initialise a model from stand-ins. Other threads are
    not affected. `cut(whole parameter)` returns this rank's rows."""
    drawn, here = Drawn(cut, device), threading.get_ident()

    def stand_in(module: nn.Module, name: str, p: nn.Parameter | None) -> nn.Parameter | None:
        return drawn.stand_in(p) if threading.get_ident() == here else None

    hook = register_module_parameter_registration_hook(stand_in)
    try:
        with drawn:
            yield drawn
            drawn.finish()
    finally:
        hook.remove()
