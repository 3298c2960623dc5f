"""What this machine can do, found by trying it; for what it cannot, why and what works instead."""

import argparse
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from lpkit.tables import beside, text_table

GIB = 2**30


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit.measure import doctor

    return doctor.examine()


def text(result: dict[str, Any]) -> str:
    machine, libraries = result["machine"], result["machine"]["libraries"]
    memory = (f"{machine['memory_bytes'] / GIB:.1f} GiB, "
              f"{machine['memory_available_bytes'] / GIB:.1f} GiB free")
    if machine["memory_limit_bytes"]:
        memory += f", {machine['memory_limit_bytes'] / GIB:.1f} GiB allowed to this container"
    gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / GIB:.0f} GiB, compute capability "
            f"{gpu['capability']}" for gpu in machine["gpus"]]
    installed = [f"{name} {version}" for name, version in libraries.items() if version]
    absent = [name for name, version in libraries.items() if not version]
    extensions = " ".join(machine["cpu_features"]) or "no known extensions"
    rows = {"System": f"{machine['os']}, Python {machine['python']}",
            "CPU": f"{machine['cpu']}, {machine['cores']} cores, {extensions}", "Memory": memory,
            "GPU": "; ".join([*(gpus or ["none that torch can use"]),
                              *filter(None, [machine["gpu_problem"]])]),
            "Driver": machine["driver"] or "none",
            "CUDA": machine["cuda"] or "none: this torch is a CPU build",
            "Installed": ", ".join(installed), "Absent": ", ".join(absent) or "nothing",
            "Tried on": result["device"]}
    if ceilings := result.get("ceilings"):
        speeds = {**ceilings["flops"], "fp8 without fast accumulation":
                  ceilings["fp8_without_fast_accumulation"]}
        rows["Reached"] = ", ".join([f"{ceilings['bytes_per_second'] / 1e9:,.0f} GB/s", *(
            f"{name} {flops / 1e12:,.2f} TFLOP/s" for name, flops in speeds.items() if flops)])
    lines = [_row(name, value) for name, value in rows.items()]
    recipes = [row for row in result["probes"] if row["kind"] == "recipe"]
    others = [row for row in result["probes"] if row not in recipes]
    for kind, probes in groupby(others, key=lambda row: row["kind"]):
        lines += ["", kind.capitalize()]
        for row in probes:
            nearest = f" -> {row['nearest']}" if row["nearest"] else ""
            lines.append(_row({True: "+ ", None: "? "}.get(row["works"], "- ") + row["name"],
                              row["detail"] or row["why"] + nearest, 16))
    if recipes:
        lines += ["", "Recipes, forward and backward; the reasons are in --json",
                  text_table(_grid(recipes), indent="  ")]
    choice = result["chosen"]["precision"]
    return "\n".join([*lines, "", f"A run here computes in {choice['used']}: {choice['why']}."])


def _row(name: str, value: str, width: int = 10) -> str:
    return beside(f"  {name}", value, width + 4, 118)


def _grid(probes: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line a recipe: with each backend how it runs, and what does not work with it."""
    words: dict[str, dict[str, str]] = {}
    for row in probes:
        recipe, backend = row["name"].split(", ")
        how = [row["detail"].partition(",")[0] or {None: "not known"}.get(row["works"], "-"),
               *re.findall(r"no \w+(?=:)", row["detail"])]
        words.setdefault(recipe, {})[backend] = ", ".join(how)
    backends = list(dict.fromkeys(backend for of_recipe in words.values() for backend in of_recipe))
    return [("recipe", *backends), *((recipe, *(of_recipe.get(backend, "") for backend in backends))
                                     for recipe, of_recipe in words.items())]
