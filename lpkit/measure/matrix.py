"""Which recipe runs where, on what, and with what: native, emulated, or no; why; and the nearest
thing that works.

    probe(device)   this machine, found by running each: forward and backward of a tiny Linear
                    against its definition in float64, torch.compile, recomputation, accumulation.
                    In a process of its own, with a time limit
    by_rule(name)   another machine of the catalogue, from what the libraries say they need; each
                    rule has its source

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
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from lpkit.measure.doctor import reason
from lpkit.precision.backends import BACKENDS, HARDWARE, Library
from lpkit.precision.compute import autocast
from lpkit.precision.linear import ScaledLinear, advance, scaled_linears
from lpkit.precision.scaled import Scaled, quantise, reference
from lpkit.tables import markdown_table
from lpkit.techniques.machines import CATALOGUE
from lpkit.techniques.recipes import RECIPES, Cast, Recipe

FEATURES = ("forward", "backward", "compile", "recompute", "accumulate")
PROBE_SECONDS = 90.0
SIZE = 128      # of the tiny Linear: tiles every recipe
ERROR = 0.5     # relative, beyond which a result is not the recipe's
TORCH = "https://github.com/pytorch/pytorch/blob/main/test/test_scaled_matmul_cuda.py"
TE = "https://nvidia.github.io/TransformerEngine/support_matrix.html"
AO = "https://docs.pytorch.org/ao/stable/workflows/training.html"
HERE = "run on this machine"

Capability = tuple[int, int] | None     # None: not an NVIDIA GPU
CAPABILITY: dict[str, Capability] = {   # https://developer.nvidia.com/cuda-gpus
    "cpu": None, "t4": (7, 5), "a100-40": (8, 0), "a100-80": (8, 0), "l4": (8, 9), "l40s": (8, 9),
    "rtx-4090": (8, 9),
    "h100": (9, 0), "h100-pcie": (9, 0), "h200": (9, 0), "b200": (10, 0), "gb200": (10, 0),
    "rtx-5090": (12, 0),
    "mi300x": None,
}


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


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Where a library's own list departs from its least compute capability."""

    backend: str
    recipe: str
    capability: Capability
    status: str
    why: str
    source: str


DEPARTURES = (
    Departure(backend="transformer-engine", recipe="mxfp8", capability=(12, 0), status="no",
              source=TE, why="Transformer Engine lists MXFP8 for 10.0 and 10.3, not for 12.0"),
    Departure(backend="transformer-engine", recipe="nvfp4", capability=(12, 0), status="no",
              source=TE, why="Transformer Engine lists NVFP4 on 12.0 as partial"),
    Departure(backend="scaled_mm", recipe="fp8-rowwise", capability=(12, 0), status="no",
              why="with torch 2.10 a scale a row ends in CUBLAS_STATUS_NOT_SUPPORTED on 12.0",
              source="https://github.com/pytorch/pytorch/issues/192707"),
    Departure(backend="torchao", recipe="fp8-rowwise", capability=(12, 0), status="no",
              why="it calls torch._scaled_mm, which with torch 2.10 has no scale a row on 12.0",
              source="https://github.com/pytorch/pytorch/issues/192707"),
)
SOURCES = {"pytorch": "https://docs.pytorch.org/docs/stable/amp.html", "scaled_mm": TORCH,
           "transformer-engine": TE, "torchao": AO, "emulated": "lpkit.precision.scaled"}
FEATURE_RULES: dict[tuple[str, str], str] = {   # what is worth knowing where it works
    ("emulated", "compile"): "the Linear itself runs outside the graph",
    ("scaled_mm", "compile"): "with a history or stochastic rounding, the Linear itself runs "
    "outside the graph",
    ("torchao", "compile"): "and needs it to be fast: without, its casts are separate kernels",
    ("transformer-engine", "compile"): "te.Linear runs outside the graph",
    ("transformer-engine", "recompute"): "delayed scaling wants te.checkpoint instead of PyTorch's",
}


def nearest(machine: str, recipe: str, capability: Capability) -> str:
    """Another backend that runs `recipe` natively, or the native recipe most like it, or
    emulation."""
    for backend in BACKENDS:
        if backend != "emulated" and _rule(backend, recipe, machine, capability)[0] == "native":
            return f"{recipe} with {backend}"
    if not RECIPES[recipe].products:
        return "fp32"
    for other in ("mxfp8", "fp8-blockwise", "fp8-rowwise", "fp8-tensorwise"):
        if any(_rule(backend, other, machine, capability)[0] == "native" for backend in BACKENDS):
            return f"{other}, or {recipe} emulated"
    return f"{recipe} emulated: the same numbers, without the speed"


def by_rule(machine: str) -> tuple[Cell, ...]:
    """Every recipe, backend and feature on a machine of the catalogue, or on "cpu"."""
    capability, cells = CAPABILITY[machine], []
    for recipe in RECIPES:
        for backend in backends_of(RECIPES[recipe]):
            status, why, source = _rule(backend, recipe, machine, capability)
            for feature in FEATURES:
                said, instead = why, ""
                if status == "no":
                    instead = nearest(machine, recipe, capability)
                elif (backend, feature) in FEATURE_RULES:
                    said = f"{why}; {FEATURE_RULES[backend, feature]}".removeprefix("; ")
                cells.append(Cell(machine=machine, recipe=recipe, backend=backend, feature=feature,
                                  status=status, why=said, source=source, nearest=instead))
    return tuple(cells)


def backends_of(recipe: Recipe) -> tuple[str, ...]:
    """Those that the question makes sense for: a recipe that casts nothing needs none."""
    return tuple(name for name in BACKENDS if (name == "pytorch") != bool(recipe.products))


@cache
def _rule(backend: str, name: str, machine: str, capability: Capability) -> tuple[str, str, str]:
    """Status, why, source."""
    recipe, source = RECIPES[name], SOURCES[backend]
    for one in DEPARTURES:
        if (one.backend, one.recipe, one.capability) == (backend, name, capability):
            return one.status, one.why, one.source
    return _RULES[type(BACKENDS[backend]).__name__](BACKENDS[backend], name, recipe, machine,
                                                    capability, source)


def _pytorch(backend, name: str, recipe: Recipe, machine: str, capability: Capability, source: str):
    if recipe.products:
        return "no", "nn.Linear casts no operands", source
    if machine == "cpu":
        return ("native", "fast where the CPU has instructions for it (AVX-512 BF16, AMX); `auto` "
                "holds a race", source)
    if recipe.dtype in CATALOGUE[machine].flops:
        return "native", f"the datasheet lists {recipe.dtype}", CATALOGUE[machine].source
    return ("emulated", f"no {recipe.dtype} units; PyTorch converts and computes in float32",
            CATALOGUE[machine].source)


def _emulated(backend, name: str, recipe: Recipe, machine: str, capability: Capability,
              source: str):
    return ("emulated", "the same numbers in bf16 or float32 products",
            source) if recipe.products else (
        "no", "it casts nothing", source)


def _scaled_mm(backend, name: str, recipe: Recipe, machine: str, capability: Capability,
               source: str):
    if not recipe.products:
        return "no", "it casts nothing", source
    for product, (a, b) in recipe.products.items():
        found = HARDWARE.get(a.format, {}).get((a.block, b.block))
        if found is None:
            return ("no", f"PyTorch has no product of {a.format} {a.block} and {b.format} "
                    f"{b.block}, as {product} needs", source)
        needed, on_cpu, what = found
        if machine == "cpu":
            if not on_cpu:
                return "no", f"{what}: PyTorch has it on GPUs alone", source
            continue
        if capability is None:
            return ("no", "MI300's FP8 is the FNUZ variant, with other largest values than E4M3FN",
                    AO)
        if capability < needed:
            return "no", f"{what}: needs compute capability {_dotted(needed)}", source
        if a.block == (1, 128) and capability >= (10, 0):
            return ("no", f"{what}: PyTorch has them on 9.0 alone",
                    "https://github.com/pytorch/pytorch/pull/158037")
    if machine == "cpu":
        return "emulated", "PyTorch's CPU kernel takes these formats and converts them", source
    return "native", f"compute capability {_dotted(capability)}", source


def _library(backend: Library, name: str, recipe: Recipe, machine: str, capability: Capability,
             source: str):
    if name not in backend.rows:
        return "no", f"it has no {name}; it has {', '.join(backend.rows)}", source
    needed = backend.rows[name].capability
    if machine == "cpu":
        if "cpu" not in backend.devices:
            return "no", "it needs an NVIDIA GPU", source
        return "emulated", "its CPU path converts", source
    if capability is None:
        return "no", "its AMD path uses the FNUZ formats, which the kit's rows do not name", source
    if capability < needed:
        return "no", f"it needs compute capability {_dotted(needed)}", source
    return ("native",
            f"when {backend.package} is installed; compute capability {_dotted(capability)}",
            source)


_RULES = {"PyTorch": _pytorch, "Emulated": _emulated, "ScaledMM": _scaled_mm, "Library": _library}


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# This machine: run it.

def probe(device: torch.device | str | None = None, *, seconds: float = PROBE_SECONDS,
          only: Iterable[tuple[str, str]] | None = None) -> tuple[Cell, ...]:
    """Every recipe, backend and feature here, by running each, in another process.

    A pair that crashes it or takes longer than what is left of `seconds` is a no with that reason,
    and a fresh process goes on behind it.
    """
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    waiting = list(only if only is not None else [(recipe, backend) for recipe in RECIPES
                                                  for backend in backends_of(RECIPES[recipe])])
    cells: list[Cell] = []
    while waiting:
        command = [sys.executable, "-W", "ignore", "-m", "lpkit.measure.matrix", device,
                   json.dumps(waiting)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            out, why = done.stdout, f"the process that tried it ended with {done.returncode}"
        except subprocess.TimeoutExpired as late:
            out = (late.stdout if isinstance(late.stdout, str)
                   else (late.stdout or b"").decode(errors="replace"))
            why = f"no answer within {seconds:g} s"
        answered = [json.loads(line) for line in out.splitlines() if line.startswith("[{")]
        cells += [Cell(**cell) for answer in answered for cell in answer]
        waiting = waiting[len(answered):]
        if waiting:
            cells += _refused(*waiting.pop(0), device, why)
    return tuple(cells)


def _refused(recipe: str, backend: str, device: str, why: str) -> list[Cell]:
    instead = (f"{recipe} emulated: the same numbers, without the speed" if RECIPES[recipe].products
               else "fp32")
    return [Cell(machine="this", recipe=recipe, backend=backend, feature=feature, status="no",
                 why=why, nearest=instead, source=HERE) for feature in FEATURES]


def _try(recipe: str, backend: str, device: torch.device) -> list[Cell]:
    """One pair, here and now. Whatever it raises is the reason why not."""
    row = RECIPES[recipe]
    if why := BACKENDS[backend].why_not(recipe, row, device):
        return _refused(recipe, backend, str(device), why)
    native = ("emulated" if backend == "emulated" or (row.products and device.type == "cpu")
              else "native")
    cells, trial = [], Trial(recipe, backend, device)
    for feature in FEATURES:
        try:
            why, status, instead = getattr(trial, feature)(), native, ""
        except Exception as error:
            why, status, instead = reason(error), "no", f"{recipe} emulated"
        cells.append(Cell(machine="this", recipe=recipe, backend=backend, feature=feature,
                          status=status, why=why, nearest=instead, source=HERE))
    return cells


def _input(device: torch.device, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, SIZE, generator=generator).to(device)


def _gradients(model: nn.Module, x: torch.Tensor, recipe: Recipe,
               call: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[torch.Tensor]:
    """y, dx, dw of one micro-batch, whose gradient of y is known."""
    x = x.detach().requires_grad_()
    with autocast(recipe, x.device):
        y = model(x) if call is None else call(x)     # a compiled module has no truth value
    y.backward(_input(x.device, seed=3).to(y.dtype))
    advance(model)
    return [y.detach(), x.grad, model.weight.grad]


def _compare(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor], limit: float) -> str:
    errors = [float((a.double() - b.double()).norm() / b.double().norm())
              for a, b in zip(got, want, strict=True)]
    if not all(error <= limit for error in errors):
        raise ArithmeticError(f"the numbers are not the recipe's: relative errors "
                              f"{', '.join(f'{e:.1e}' for e in errors)}")
    return f"relative error {max(errors):.0e}"


class Definition:
    """The recipe itself: its casts, multiplied in float64."""

    traceable, alignment = False, 0

    def cast(self, x: torch.Tensor, cast: Cast, dtype: torch.dtype, *, amax, noise) -> Scaled:
        return quantise(x, cast, amax=amax, noise=noise)

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype,
                bias: torch.Tensor | None = None) -> torch.Tensor:
        y = reference(a, b)
        return (y if bias is None else y + bias).to(dtype)


class Trial:
    """One recipe with one backend on one device, tried in every way. Each way raises when the
    numbers are wrong."""

    def __init__(self, recipe: str, backend: str, device: torch.device):
        self.recipe, self.backend, self.device = RECIPES[recipe], BACKENDS[backend], device
        # libraries round, draw and scale in ways of their own: there, only the size of the error is
        # the recipe's
        self.library = isinstance(self.backend, Library)
        self.limit = ERROR if self.library else 0.01

    def linear(self) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(SIZE, SIZE, device=self.device)

    def warm(self, model: nn.Module | None = None) -> nn.Module:
        """With a history, the first micro-batch only fills it."""
        model = model or self.backend.wrap(self.linear(), self.recipe, name="probe", seed=0)
        self.gradients(model)
        model.weight.grad = None
        return model

    def gradients(self, model: nn.Module, seed: int = 1,
                  call: Callable | None = None) -> list[torch.Tensor]:
        return _gradients(model, _input(self.device, seed), self.recipe, call)

    def definition(self) -> list[torch.Tensor]:
        """What y, dx and dw should be; for a recipe that casts nothing, in float64."""
        if not self.recipe.products:
            return _gradients(self.linear().double(), _input(self.device).double(), RECIPES["fp32"])
        return self.gradients(self.warm(ScaledLinear.wrap(self.linear(), self.recipe, Definition(),
                                                          name="probe")))

    def forward(self) -> str:
        return _compare(self.gradients(self.warm())[:1], self.definition()[:1], self.limit)

    def backward(self) -> str:
        return _compare(self.gradients(self.warm())[1:], self.definition()[1:], self.limit)

    def compile(self) -> str:
        """Traced and run, forward and backward. Code is not generated, which would take minutes for
        all of them; the doctor's row for Triton says whether that works."""
        model, plain = self.warm(), self.warm()
        torch._dynamo.reset()
        got = self.gradients(model, call=torch.compile(model, backend="aot_eager"))
        return f"traced, {_compare(got, self.gradients(plain), self.limit)}"

    def recompute(self) -> str:
        """Forward twice, the same numbers, and a history that moves on once."""
        from torch.utils.checkpoint import checkpoint

        model, plain = self.warm(), self.warm()
        got = self.gradients(model, call=lambda x: checkpoint(model, x, use_reentrant=False))
        want = self.gradients(plain)
        for ours, theirs in zip(scaled_linears(model), scaled_linears(plain), strict=True):
            for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
                if not torch.equal(a, b):
                    raise ArithmeticError("its state moved twice")
        return _compare(got, want, ERROR if self.library else 1e-6)

    def accumulate(self) -> str:
        """Two micro-batches, one gradient: the sum of what each gives."""
        model, apart = self.warm(), self.warm()
        parts = []
        for seed in (1, 2):
            apart.weight.grad = None
            parts.append(self.gradients(apart, seed)[2].clone())
            self.gradients(model, seed)
        return _compare([model.weight.grad], [sum(parts)], 1e-3)


# Shown

def grid(cells: Iterable[Cell]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads, and a row a recipe: one word a backend, with the features that fail. For a notebook:
    `html_table(*grid(cells))`."""
    cells = list(cells)
    columns = [name for name in BACKENDS if any(cell.backend == name for cell in cells)]
    rows = []
    for recipe in dict.fromkeys(cell.recipe for cell in cells):
        row = [recipe]
        for backend in columns:
            found = {cell.feature: cell.status for cell in cells
                     if (cell.recipe, cell.backend) == (recipe, backend)}
            works = [status for status in found.values() if status != "no"]
            missing = [feature for feature, status in found.items() if status == "no"]
            word = works[0] if works else "-" if found else ""
            row.append(word + (f", no {', '.join(missing)}" if works and missing else ""))
        rows.append(tuple(row))
    return ("recipe", *columns), rows


def page() -> str:
    """docs/matrix.md: every machine by rule. Regenerate with `python -m lpkit.measure.matrix --page
    > docs/matrix.md`."""
    lines = [
        "# What runs where", "", "Which precision recipe runs on which machine, and through which "
        "backend. This page is made from the rules that", "the kit itself uses "
        "(`lpkit.measure.matrix`). On the machine at hand nothing is looked up: `lpkit doctor` "
        "runs", "every recipe with every backend and compares the numbers.", "",
        "- **native**: the device multiplies these formats itself.", "- **emulated**: the same "
        "numbers, in bf16 or float32 products. Good for learning and for loss curves, never "
        "faster.", "- **no**: the reason is below; the recipe can still be emulated.", "",
        "The best of each, with the backends that give it:", ""]
    every = {machine: by_rule(machine) for machine in CAPABILITY}
    best = [(_title(machine), *(_best(cells, recipe) for recipe in RECIPES))
            for machine, cells in every.items()]
    lines += [markdown_table(("machine", *RECIPES), best), "", "## Why not", ""]
    machines: dict[tuple[str, ...], list[str]] = {}
    for machine, cells in every.items():
        for cell in cells:
            if cell.status == "no" and cell.feature == "forward":
                link = (f"[source]({cell.source})" if cell.source.startswith("https")
                        else cell.source)
                machines.setdefault((cell.recipe, cell.backend, cell.why, cell.nearest, link),
                                    []).append(machine)
    refusals = [("all" if len(named) == len(CAPABILITY) else ", ".join(named), *row)
                for row, named in machines.items()]
    lines.append(markdown_table(("machine", "recipe", "backend", "why", "nearest", "source"),
                                refusals))
    lines += ["", "## Features", "", "Forward, backward, `torch.compile`, recomputation and "
              "gradient accumulation work wherever the recipe does.", "Worth knowing:", ""]
    lines += [f"- {backend}, {feature}: {why}."
              for (backend, feature), why in FEATURE_RULES.items()]
    return "\n".join(lines) + "\n"


def _title(machine: str) -> str:
    return CATALOGUE[machine].title if machine in CATALOGUE else "any CPU"


def _best(cells: Iterable[Cell], recipe: str) -> str:
    here = [cell for cell in cells if cell.recipe == recipe and cell.feature == "forward"]
    native = [cell.backend for cell in here if cell.status == "native"]
    if native:
        return "**native**" if native == ["pytorch"] else f"**native** ({', '.join(native)})"
    return "emulated" if any(cell.status == "emulated" for cell in here) else "no"


def to_dicts(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    return [asdict(cell) for cell in cells]


def _main(words: list[str]) -> None:
    if words == ["--page"]:
        print(page(), end="")
        return
    device, pairs = torch.device(words[0]), json.loads(words[1])
    torch.set_num_threads(1)    # tiny products; more would only wait for one another
    warnings.simplefilter("ignore")
    for recipe, backend in pairs:
        print(json.dumps(to_dicts(_try(recipe, backend, device))), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
