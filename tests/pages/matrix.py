"""docs/matrix.md: which recipe runs on which machine of the catalogue, from what the libraries say
they need. Each rule has its source; `lpkit.measure.matrix` tries the machine at hand."""

from functools import cache
from typing import NamedTuple

from lpkit.measure.matrix import backends_of
from lpkit.precision.backends import BACKENDS
from lpkit.precision.libraries import Library
from lpkit.techniques.hardware import (
    FNUZ,
    ISSUE,
    TORCH,
    UNTRIED,
    capability_of,
    dotted,
    multiplied,
)
from lpkit.techniques.machines import CATALOGUE, Machine
from lpkit.techniques.recipes import RECIPES
from tests.pages import markdown_table

TE = "https://nvidia.github.io/TransformerEngine/support_matrix.html"
AO = "https://docs.pytorch.org/ao/stable/workflows/training.html"

CPU = Machine(name="cpu", title="any CPU", kind="cpu", memory_bytes=2**30, bytes_per_second=1e10,
              flops={}, source="")
Capability = tuple[int, int] | None     # None: not an NVIDIA GPU
CAPABILITY: dict[str, Capability] = {"cpu": None, **dict(sorted(
    ((name, capability_of(row)) for name, row in CATALOGUE.items()),
    key=lambda item: item[1] or (99, 0)))}

# Where a library's own list departs from its least compute capability: why not, and the source.
DEPARTURES: dict[tuple[str, str, Capability], tuple[str, str]] = {
    ("transformer-engine", "mxfp8", (12, 0)): (
        "Transformer Engine lists MXFP8 for 10.0 and 10.3, not for 12.0", TE),
    ("transformer-engine", "nvfp4-published", (12, 0)): (
        "Transformer Engine lists NVFP4 on 12.0 as partial", TE),
    ("torchao", "fp8-rowwise", (12, 0)): (
        "it calls torch._scaled_mm, which with torch 2.10 has no scale a row on 12.0", ISSUE),
}
SOURCES = {"pytorch": "https://docs.pytorch.org/docs/stable/amp.html", "scaled_mm": TORCH,
           "transformer-engine": TE, "torchao": AO, "emulated": "lpkit.precision.scaled"}
FEATURE_RULES: dict[tuple[str, str], str] = {   # what is worth knowing where it works
    ("torchao", "compile"): "needed for speed, because without it casts are separate kernels",
    ("transformer-engine", "compile"): "`te.Linear` runs outside the graph",
    ("transformer-engine", "recompute"): "delayed scaling needs `te.checkpoint`, not PyTorch's",
}


class Cell(NamedTuple):
    """One answer. `source`: an address."""

    recipe: str
    backend: str
    status: str         # native, emulated, no
    why: str
    nearest: str        # what to use where the answer is no
    source: str


def by_rule(machine: str) -> tuple[Cell, ...]:
    """Every recipe with every backend on a machine of the catalogue, or on "cpu"."""
    cells = []
    for recipe, row in RECIPES.items():
        for backend in backends_of(row):
            status, why, source = _rule(machine, recipe, backend)
            instead = nearest(machine, recipe) if status == "no" else ""
            cells.append(Cell(recipe, backend, status, why, instead, source))
    return tuple(cells)


def _native(machine: str, recipe: str) -> list[str]:
    return [backend for backend in backends_of(RECIPES[recipe])
            if _rule(machine, recipe, backend)[0] == "native"]


def nearest(machine: str, recipe: str) -> str:
    """A backend that runs `recipe` natively, or the native recipe most like it, or emulation."""
    for backend in _native(machine, recipe):
        return f"{recipe} with {backend}"
    for other in ("mxfp8", "fp8-blockwise", "fp8-rowwise", "fp8-tensorwise"):
        if _native(machine, other):
            return f"{other}, or {recipe} emulated"
    return f"{recipe} emulated: the same numbers, without the speed"


@cache
def _rule(machine: str, recipe: str, backend: str) -> tuple[str, str, str]:
    """Status, why, source."""
    capability, source = CAPABILITY[machine], SOURCES[backend]
    if (backend, recipe, capability) in DEPARTURES:
        return "no", *DEPARTURES[backend, recipe, capability]
    if backend == "emulated":
        return "emulated", "the same numbers in bf16 or float32 products", source
    if backend == "pytorch":
        return _pytorch(machine, RECIPES[recipe].dtype)
    if backend == "scaled_mm":
        return multiplied(CATALOGUE.get(machine, CPU), RECIPES[recipe])
    return *_library(machine, recipe, BACKENDS[backend]), source


def _pytorch(machine: str, dtype: str) -> tuple[str, str, str]:
    if machine == "cpu":
        return ("native", "fast where the CPU has instructions for it (AVX-512 BF16, AMX); `auto` "
                "holds a race", SOURCES["pytorch"])
    if dtype in CATALOGUE[machine].flops:
        return "native", f"the datasheet lists {dtype}", CATALOGUE[machine].source
    return ("emulated", f"no {dtype} units; PyTorch converts and computes in float32",
            CATALOGUE[machine].source)


def _library(machine: str, recipe: str, library: Library) -> tuple[str, str]:
    if recipe not in library.rows:
        return "no", f"it has no {recipe}; it has {', '.join(library.rows)}"
    capability, needed = CAPABILITY[machine], library.rows[recipe].capability
    if machine == "cpu":
        if "cpu" not in library.devices:
            return "no", "it needs an NVIDIA GPU"
        return "emulated", "its CPU path converts"
    if capability is None:
        return "no", (FNUZ if machine != "mi355x" else UNTRIED)[0]
    if capability < needed:
        return "no", f"it needs compute capability {dotted(needed)}"
    return ("native", f"when {library.package} is installed; compute capability "
            f"{dotted(capability)}")


INTRODUCTION = """\
# What runs where

The tables show which precision recipe runs on which machine, and with which backend. They follow
from the rules in `lpkit.techniques.hardware`. To test your machine, run `lpkit doctor`: it runs
every recipe with every backend and compares the numbers.

- **native**: the device multiplies these formats in hardware.
- **emulated**: the same numbers, in bf16 or float32 matmuls: for learning and for loss curves, not
  for speed.
- **no**: the reason is below; the recipe can still be emulated.

The best support for each recipe, with its backends:
"""
ON_FEATURES = """
## Features

Forward, backward, `torch.compile`, recomputation and gradient accumulation work with every
supported recipe. Notes:
"""


def page() -> str:
    """Every machine by rule."""
    best, machines = [], {}
    for machine in CAPABILITY:
        title = CATALOGUE[machine].title if machine in CATALOGUE else "any CPU"
        best.append((title, *(_best(machine, recipe) for recipe in RECIPES)))
        for cell in by_rule(machine):
            if cell.status == "no":
                link = cell.source
                if link.startswith("https"):
                    link = f"[source]({link})"
                refusal = (cell.recipe, cell.backend, cell.why, cell.nearest, link)
                machines.setdefault(refusal, []).append(machine)
    refusals = [("all" if len(named) == len(CAPABILITY) else ", ".join(named), *refusal)
                for refusal, named in machines.items()]
    heads = ("machine", "recipe", "backend", "why", "nearest", "source")
    rules = [f"- {backend}, {feature}: {why}." for (backend, feature), why in FEATURE_RULES.items()]
    return "\n".join([INTRODUCTION, markdown_table(("machine", *RECIPES), best), "\n## Why not\n",
                      markdown_table(heads, refusals), ON_FEATURES, *rules, ""])


def _best(machine: str, recipe: str) -> str:
    native = _native(machine, recipe)
    if not native:
        return "emulated"
    return "**native**" if native == ["pytorch"] else f"**native** ({', '.join(native)})"
