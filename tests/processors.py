"""The processors that tests run on. What `auto` chooses on a CPU depends on a few facts of the
processor and on races, and so it would differ between machines. Here each of those facts has a
value for every kind of processor, and a test run has one kind:
`TESTS_PROCESSOR`, AVX512 by default. Only `this_machine` (conftest.py), for tests of the facts
themselves, asks the machine at hand.

This module needs the standard library alone. It replaces the functions when `lpkit` imports their
modules, in the process of the tests (conftest.py) and in every Python that they start
(at_start/sitecustomize.py); `test_processors.py` holds that there are no others.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VARIABLE, DEFAULT = "TESTS_PROCESSOR", "AVX512"
AT_START = os.path.join(os.path.dirname(__file__), "at_start")      # for PYTHONPATH


@dataclass(frozen=True, kw_only=True)
class Processor:
    in_a_loop: bool         # PyTorch multiplies bf16 number by number
    tiles: bool             # and by units for tiles of bf16
    products: str           # the winner of the race of large products of bf16 operands
    precision: str          # and of the race of dtypes


KINDS = {"AVX2": Processor(in_a_loop=True, tiles=False, products="float32", precision="fp32"),
         "AVX512": Processor(in_a_loop=False, tiles=False, products="float32", precision="bf16"),
         "AMX": Processor(in_a_loop=False, tiles=True, products="bf16", precision="bf16")}


def at_hand() -> Processor:
    return KINDS[os.environ[VARIABLE]]


def _said(used: str) -> Any:
    from lpkit.contracts import Choice

    return Choice(asked="auto", used=used,
                  why=f"assumed of a processor with {os.environ[VARIABLE]}")


def multiplies_tiles(real: Callable) -> bool:
    return at_hand().tiles


def in_a_loop(real: Callable) -> bool:
    return at_hand().in_a_loop


def bf16_choice(real: Callable, device: Any, **how: Any) -> Any:
    """The race of dtypes, of `precision.recipe=auto`."""
    return _said(at_hand().precision) if str(device) == "cpu" else real(device, **how)


def others(real: Callable) -> Callable[[], float]:
    """Nobody else computes, however busy this machine is: the load decides about threads."""
    return lambda: 0.0


def choice(real: Callable, asked: str, threads: int) -> Any:
    """The race of products, of `system.products=auto`."""
    return _said(at_hand().products) if asked == "auto" else real(asked, threads)


def race(real: Callable, given: Any, batch: int, device: Any) -> Any:
    """The race of attention of long runs on a CPU: the kind's rule for short ones holds."""
    from lpkit.techniques.attention_backends import choose_attention

    if given.device != "cpu":
        return real(given, batch, device)
    used, _ = choose_attention("auto", device="cpu", low_precision=given.dtype != "float32",
                               model=given.model, tiles=at_hand().tiles)
    return _said(used)


FACTS = {"lpkit.hardware": (multiplies_tiles, bf16_choice, others),
         "lpkit.kernels.wide_product": (in_a_loop, choice),
         "lpkit.execution.attention": (race,)}


def _replaced(real: Callable, kind: Callable) -> Callable:
    @functools.wraps(real)
    def call(*given: Any, **named: Any) -> Any:
        return kind(real, *given, **named) if VARIABLE in os.environ else real(*given, **named)

    call.__wrapped__ = getattr(real, "__wrapped__", real)       # without the cache, too
    return call


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        for kind in FACTS[module.__name__]:
            setattr(module, kind.__name__, _replaced(getattr(module, kind.__name__), kind))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in FACTS else None
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    sys.meta_path.insert(0, _Finder())
