"""Builds a model of which each rank has only its rows, with the same numbers as in one process.

A stand-in replaces each parameter. It has the parameter's shape and almost no memory: each row
begins one number after the row before, so rows overlap. Its numbers are the first ones of the
parameter, which is enough to run a forward for inspection. An initializer fills one whole parameter
at a time. All of that parameter is drawn, so that the random generator advances as in one process;
then this rank keeps its rows. Peak memory is therefore this rank's rows plus the largest parameter.
PyTorch's meta device is no substitute: it draws nothing, so later weights would differ.
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

# operations that overwrite all that was there
FILLS = {"uniform_", "normal_", "fill_", "zero_", "copy_"}


class Drawn(TorchDispatchMode):
    """Replaces each parameter that is created in this context by a stand-in. `rows` maps each
    stand-in to the rows that `cut` takes of the whole parameter, on `device`."""

    def __init__(self, cut: Callable[[Tensor], Tensor], device: torch.device):
        super().__init__()
        self.cut, self.device = cut, device
        self.rows: dict[nn.Parameter, Tensor] = {}
        self.at_work: nn.Parameter | None = None
        self.whole: Tensor | None = None

    def stand_in(self, p: nn.Parameter | None) -> nn.Parameter | None:
        """Returns the stand-in of a parameter; None to register the parameter itself."""
        if p is None or p in self.rows or not p.ndim:
            return None
        numbers = torch.empty(len(p) - 1 + p[0].numel(), dtype=p.dtype, device=self.device)
        stand_in = nn.Parameter(numbers.as_strided(p.shape, (1, *p.stride()[1:])),
                                requires_grad=p.requires_grad)
        self._keep(stand_in, p.detach())
        return stand_in

    def _keep(self, stand_in: nn.Parameter, whole: Tensor) -> None:
        numbers = stand_in.detach().as_strided((len(whole) - 1 + whole[0].numel(),), (1,))
        numbers.copy_(whole.reshape(-1)[:len(numbers)])
        self.rows[stand_in] = self.cut(whole).to(self.device, copy=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._opname
        # these use only its shape
        if not name.startswith("new_") and not name.endswith("_like"):
            for p in tree_leaves((args, kwargs)):
                if isinstance(p, nn.Parameter) and p in self.rows and p is not self.at_work:
                    self._begin(p, name, p is args[0] and (name in FILLS or func.is_view))
        as_whole = lambda p: self.whole if p is self.at_work else p
        args, kwargs = tree_map_only(nn.Parameter, as_whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _begin(self, p: nn.Parameter, operation: str, fills: bool) -> None:
        self.finish()
        if not fills:
            raise ConfigError(f"model.init calls {operation} on a parameter that is not there, for "
                              f"parallel.zero=2 and 3 make one whole parameter at a time; fill one "
                              f"after the other, or set parallel.zero=1")
        # NaN shows if an initializer reads numbers that nobody filled
        self.at_work, self.whole = p, torch.full(p.shape, math.nan, dtype=p.dtype)

    def finish(self) -> None:
        """Keeps this rank's rows of the parameter that is being drawn."""
        if self.at_work is not None:
            self._keep(self.at_work, self.whole)
            self.at_work = self.whole = None


@contextmanager
def drawing(cut: Callable[[Tensor], Tensor], device: torch.device) -> Iterator[Drawn]:
    """Replaces the parameters of a model that is built and initialised in this context and this
    thread. `cut` returns this rank's rows of a whole parameter."""
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
