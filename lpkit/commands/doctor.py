"""What this machine can do, found by trying it; for what it cannot, why and what works instead."""

import argparse
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
    found, libraries = result["machine"], result["machine"]["libraries"]
    memory = (f"{found['memory_bytes'] / GIB:.1f} GiB, "
              f"{found['memory_available_bytes'] / GIB:.1f} GiB free")
    if found["memory_limit_bytes"]:
        memory += f", {found['memory_limit_bytes'] / GIB:.1f} GiB allowed to this container"
    gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / GIB:.0f} GiB, compute capability "
            f"{gpu['capability']}" for gpu in found["gpus"]]
    installed = [f"{name} {version}" for name, version in libraries.items() if version]
    absent = [name for name, version in libraries.items() if not version]
    extensions = " ".join(found["cpu_features"]) or "no known extensions"
    rows = {"System": f"{found['os']}, Python {found['python']}",
            "CPU": f"{found['cpu']}, {found['cores']} cores, {extensions}", "Memory": memory,
            "GPU": "; ".join([*(gpus or ["none that torch can use"]),
                              *filter(None, [found["gpu_problem"]])]),
            "Driver": found["driver"] or "none",
            "CUDA": found["cuda"] or "none: this torch is a CPU build",
            "Installed": ", ".join(installed), "Absent": ", ".join(absent) or "nothing",
            "Tried on": result["device"]}
    if ceilings := result.get("ceilings"):
        speeds = {**ceilings["flops"], "fp8 without fast accumulation":
                  ceilings["fp8_without_fast_accumulation"]}
        rows["Reached"] = ", ".join([f"{ceilings['bytes_per_second'] / 1e9:,.0f} GB/s", *(
            f"{name} {flops / 1e12:,.2f} TFLOP/s" for name, flops in speeds.items() if flops)])
    lines = [_row(name, value) for name, value in rows.items()]
    for kind, probes in groupby(result["probes"], key=lambda row: row["kind"]):
        lines += ["", kind.capitalize()]
        for row in probes:
            nearest = f" -> {row['nearest']}" if row["nearest"] else ""
            lines.append(_row(("+ " if row["works"] else "- ") + row["name"],
                              row["detail"] or row["why"] + nearest, 16))
    if result["recipes"]:
        from lpkit.measure import matrix

        heads, cells = matrix.grid([matrix.Cell(**cell) for cell in result["recipes"]])
        lines += ["", "Recipes, forward and backward; the reasons are in --json",
                  text_table([heads, *cells], indent="  ")]
    choice = result["chosen"]["precision"]
    return "\n".join([*lines, "", f"A run here computes in {choice['used']}: {choice['why']}."])


def _row(name: str, value: str, width: int = 10) -> str:
    return beside(f"  {name}", value, width + 4, 118)
