"""Measure this machine, so that you can predict other configs for it. The command times the matmuls
of a config's Linears, memory copies, messages between GPUs, and one training update.

    lpkit measure cpu-3m --save mine.yaml
    lpkit predict llama-8b --machine mine.yaml      on any computer; also for plan and advise
"""

import argparse
import shlex
from typing import Any

from lpkit.commands import options, settings, target_and_asked
from lpkit.errors import ConfigError, named
from lpkit.files import expanded, read_text, write_atomically
from lpkit.predict.time import WAITED, with_step
from lpkit.predict.units import duration, quantity
from lpkit.presets import resolve
from lpkit.tables import text_table
from lpkit.techniques.machines import from_dict

TARGET = "target? PRESET|config.yaml|RUN"
arguments = options(
    {TARGET: "config whose matmuls and update are timed (default cpu-3m)"}, settings,
    {"--save mine.yaml": "YAML file to write (default: only print)"})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the machine and return its row. `factor`: measured seconds of the update, divided by
    the predicted seconds; 1 if the device waited for the host."""
    target, changes = target_and_asked(args)
    words = [target or "cpu-3m", *changes]
    config, path = resolve(words[0], changes), expanded(args.save or "mine.yaml")
    if path.suffix not in (".yaml", ".yml") or not path.parent.is_dir():
        raise ConfigError(f"--save {named(path)} must be a .yaml file in an existing folder")
    import yaml

    from lpkit.measure import row  # imports torch

    machine = row(config, shlex.join(["lpkit", "measure", *words]))
    factor = with_step(from_dict(machine)).measured["factor"]
    head = f"# {machine['title']}, by lpkit measure\n"
    if args.save and path.exists() and not read_text(path, 2**20).startswith(head):
        raise ConfigError(f"{named(path)} does not begin with {head.strip()!r}, so it is not of "
                          f"this machine; remove it, or choose another name")
    if args.save:       # flops come last, in braces, so that a truncated file is invalid YAML
        write_atomically(path, head + yaml.safe_dump(machine, sort_keys=False, width=100,
                                                     default_flow_style=None))
    return {"target": words[0], "saved": args.save, "factor": factor, **machine}


def text(result: dict[str, Any]) -> str:
    row, link = result["measured"], "not measured: this machine has one device"
    if row["ranks"] > 1:
        speed = quantity(result["link_bytes_per_second"], "B/s")
        link = f"{speed} in both directions together, {row['ranks']} ranks"
    products = [(dtype, f"{len(each)} matmuls, {min(product[3] for product in each):.2f} to 1 "
                 f"times {quantity(result['flops'][dtype], 'FLOP/s')}")
                for dtype, each in row["products"].items()]
    how = (WAITED[2:] if result["factor"] == 1
           else f"predictions are multiplied by {result['factor']:.3f}")
    step = (f"{duration(row['seconds'])}, predicted {duration(row['seconds'] / result['factor'])}; "
            f"{how}; other processes took "
            f"{row['others']:.0%} of the CPUs{': measure again later' * (row['others'] > 0.25)}")
    rows = [("copies", quantity(result["bytes_per_second"], "B/s")), *products, ("link", link),
            ("update", step), ("saved", result["saved"] or "no; use --save mine.yaml")]
    return f"{result['target']} on {result['title']}\n{text_table(rows, indent='  ')}"
