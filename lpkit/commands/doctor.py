"""Test what works on this machine: precisions, attention kernels, compilers, communication between
processes, and recipes of low precision. Each result is printed as soon as it is known:

  +  works
  -  does not work; the line says why, and what to use instead
  ?  could not be measured in time
"""

import argparse
import re
from collections.abc import Iterator
from typing import Any

from lpkit.commands import options, say
from lpkit.errors import printable
from lpkit.measure import probes
from lpkit.tables import beside

# BUSY: if other processes use a larger share of the cores, measured speeds are marked
GIB, BUSY = 2**30, 0.25
# kind of a result -> the heading above its lines, if it is not the name of the kind
TITLES = {"recipe": "Recipe: forward and backward by each backend; --json has the reasons"}


arguments = options()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Test the machine. Print each part of the report when it arrives, or with --json nothing.
    Return the whole report."""
    page = Page()
    return probes.examine(lambda part: args.json or [
        say(printable(line)) for line in page.lines(part)], imports=args.imports)


def text(result: dict[str, Any]) -> str:
    """Returns the last line of the report. `run` has already printed the other lines."""
    if not result["chosen"]:
        return "\nThe precision of runs on this machine is not known, because no race was measured."
    return ("\nRuns on this machine use {used}: {why}".format(**result["chosen"]["precision"])
            + f"{_busy(result['ceilings'])}.")


class Page:
    """Turns the parts of a report into lines, in the order in which the parts arrive."""

    def __init__(self):
        # kind of the previous line; recipe -> its backends
        self.kind, self.backends = "", {}
        # backend -> its result, for the recipe whose backends are being tried
        self.cells: dict[str, str] = {}

    def lines(self, part: dict[str, Any]) -> Iterator[str]:
        """Yield the lines of a part: facts about the machine, the list of coming checks (not
        printed), or results (probes)."""
        for title, value in _facts(part):
            yield beside(f"  {title}", value, 14, 118)
        for name, kind, _ in part.get("checks", ()):
            if kind == "recipe":
                recipe, backend = name.split(", ")
                self.backends.setdefault(recipe, []).append(backend)
        for row in part.get("probes", ()):
            if row["kind"] != self.kind:
                self.kind = row["kind"]
                yield f"\n{TITLES.get(self.kind, self.kind.capitalize())}"
            if self.kind == "recipe":
                yield from self._recipe(row)
            else:
                sign = {True: "+ ", None: "? "}.get(row["works"], "- ")
                instead = f". Use {row['nearest']} instead." if row["nearest"] else ""
                yield beside(f"  {sign}{row['name']}", row["detail"] or row["why"] + instead,
                             24, 118)

    def _recipe(self, row: dict[str, Any]) -> Iterator[str]:
        """Yields the line of a recipe once its last backend has been tried."""
        recipe, backend = row["name"].split(", ")
        self.cells[backend] = ", ".join([
            row["detail"].partition(",")[0] or {None: "not measured"}.get(row["works"], "no"),
            *re.findall(r"no \w+(?=:)", row["detail"])])
        if list(self.cells) == self.backends[recipe]:
            words = "; ".join(f"{name}: {how}" for name, how in self.cells.items())
            yield beside(f"    {recipe}", words, 24, 118)
            self.cells = {}


def _facts(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (title, value) for each fact about the machine in this part."""
    machine, ceilings = part.get("machine", {}), part.get("ceilings")
    if "gpus" in machine:
        gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / GIB:.0f} GiB, compute capability "
                f"{gpu['capability']}" for gpu in machine["gpus"]]
        yield "GPU", "; ".join([*(gpus or ["none that PyTorch can use"]),
                                *filter(None, [machine["gpu_problem"]])])
        yield "CUDA", machine["cuda"] or "none: PyTorch is a CPU build"
        yield "Tested on", part["device"]
    elif machine:
        memory = (f"{machine['memory_bytes'] / GIB:.1f} GiB, "
                  f"{machine['memory_available_bytes'] / GIB:.1f} GiB free")
        if machine["memory_limit_bytes"]:
            memory += f", {machine['memory_limit_bytes'] / GIB:.1f} GiB allowed to this container"
        libraries = machine["libraries"].items()
        yield "System", f"{machine['os']}, Python {machine['python']}"
        yield "CPU", (f"{machine['cpu']}, {machine['cores']} cores, "
                      f"{' '.join(machine['cpu_features']) or 'no known extensions'}")
        yield "Memory", memory
        yield "Driver", machine["driver"] or "none"
        yield "Installed", ", ".join(f"{name} {version}" for name, version in libraries if version)
        yield "Absent", ", ".join(name for name, version in libraries if not version) or "nothing"
    if ceilings:
        speeds = {**ceilings["flops"], "fp8 without fast accumulation":
                  ceilings["fp8_without_fast_accumulation"]}
        yield "Reached", ", ".join([f"{ceilings['bytes_per_second'] / 1e9:,.0f} GB/s", *(
            f"{name} {flops / 1e9:,.0f} GFLOP/s" for name, flops in speeds.items() if flops)]
            ) + _busy(ceilings, ", so this machine can do more")


def _busy(ceilings: dict[str, Any], then: str = "") -> str:
    """Returns a remark for speeds that were measured while other processes used the cores; else the
    empty text. `then`: its last clause."""
    if ceilings["others"] <= BUSY:
        return ""
    return f" (BUSY: other processes took {ceilings['others']:.0%} of the cores{then})"
