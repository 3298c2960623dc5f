"""The command `lpkit bench`: its arguments, its runs and its tables."""

import argparse
import json
import pkgutil
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lpkit.commands import a_folder
from lpkit.errors import ConfigError, named, pick
from lpkit.files import write_atomically
from lpkit.tables import beside, text_table
from tests.bench import BENCHES


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="benchmark to run (default: list all benchmarks)")
    parser.add_argument("--all", action="store_true", help="run every benchmark")
    parser.add_argument("--rounds", type=int, default=9, metavar="N",
                        help="number of interleaved rounds (default %(default)s)")
    parser.add_argument("--configs", type=int, metavar="N",
                        help="measure only N configs: ledger takes them evenly from its list, "
                             "fp8-step takes its N largest sizes")
    parser.add_argument("--kernel", metavar="NAME", help="measure only this kernel (for kernels)")
    parser.add_argument("--seconds", type=int, metavar="N",
                        help="stop after N seconds (for evidence); repeat the command to continue")
    parser.add_argument("--pieces", metavar="NAME,NAME",
                        help="run only these pieces (for evidence, reliability, your-model, "
                             "course and fp8-step), such as smoke,linear or 20,21")
    parser.add_argument("--call", type=int, metavar="N",
                        help="run the pieces of call N: 1, 2 or 3 (for evidence)")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER",
                        help="let the benchmarks import the peers in this folder's wheels (for "
                             "evidence)")
    parser.add_argument("--out", type=a_folder, metavar="DIR",
                        help="folder in which each result is saved as NAME-DEVICE.json")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.all and args.names:
        raise ConfigError(f"--all runs every benchmark; leave out {args.names[0]}, or leave out "
                          f"--all")
    names = [name for name in BENCHES if name != "evidence"] if args.all else args.names
    rows, options = [pick(BENCHES, name, "benchmark") for name in names], {}
    if args.rounds < 1:
        raise ConfigError(f"--rounds must be 1 or more, got {args.rounds}; 9 or more give "
                          f"meaningful quartiles")
    for option, key, what in (("configs", "only", "ledger or fp8-step"),
                              ("seconds", "seconds", "evidence"), ("call", "call", "evidence"),
                              ("wheels", "wheels", "evidence"),
                              ("kernel", "kernel", "kernels"),
                              ("pieces", "pieces",
                               "evidence or reliability or your-model or course or fp8-step")):
        if (given := getattr(args, option)) is not None:
            if " ".join(names) not in what.split(" or ") or (isinstance(given, int) and given < 1):
                raise ConfigError(f"--{option} is for {what} alone, and 1 or more; got {given} "
                                  f"with {', '.join(names) or 'none'}")
            options[key] = given
    if not names:
        return {"known": {name: why for name, (_, why) in BENCHES.items()}}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)     # before minutes of work
        if names == ["evidence"]:
            options["out"] = args.out      # it writes as it goes
    summary = pkgutil.resolve_name("tests.bench.harness:summary")       # imports torch
    benches = [partial(pkgutil.resolve_name(f"tests.bench.{where}"), **options)
               for where, _ in rows]
    done, left_out = [], {}
    for name, bench in zip(names, benches, strict=True):
        print(f"bench {name} ...", file=sys.stderr)
        try:
            done.append(summary(bench(args.rounds)))
        except ConfigError as error:    # what needs a GPU is no reason to lose the rest
            if not args.all:
                raise
            print(f"lpkit: {name} was skipped: {error}", file=sys.stderr)
            left_out[name] = str(error)
            continue
        if args.out:
            keep(args.out, done[-1])
    return done[0] if len(done) == 1 and not args.all else {"benches": done, "left_out": left_out}


def text(result: dict[str, Any]) -> str:
    if "known" in result:
        return ("\n".join([*(beside(name, why, 24, 100) for name, why in result["known"].items()),
                       "", "`lpkit bench NAME` runs one benchmark, `lpkit bench --all` runs all."]))
    left_out = [f"{name} was skipped: {why}" for name, why in result.get("left_out", {}).items()]
    return "\n\n".join([*map(_table, result.get("benches", [result])), *left_out])


def _table(bench: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in bench["versions"].items())
    rows = []
    for case in bench["cases"]:
        low, high = case["quartiles"]
        ours, peer = (_amount(case[f"{who}_median"], case["unit"]) for who in ("ours", "peer"))
        rows.append((case["case"], case["peer"], f"{case['ratio']:.3g}x",
                     f"[{low:.3g}, {high:.3g}]", f"{ours} against {peer}", case["verdict"]))
    tables = [text_table(some, indent="  ")
              for some in (rows, bench.get("breakdown"), bench.get("peaks")) if some]
    return "\n\n".join([f"{bench['name']} on {bench['device']}, {bench['cores']} cores; {versions}",
                        *tables])


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB"
    for larger, smaller in (("s", "ms"), ("ms", "us")):
        if unit == larger and value < 1:
            value, unit = value * 1e3, smaller
    return f"{value:.3g} {unit}"


def keep(folder: Path, bench: dict[str, Any]) -> None:
    """A limited processor has a record of its own beside the whole one's."""
    label = " ".join([bench["device"], *bench.get("limits", [])])
    device = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{bench['name']}-{device}.json",
                         json.dumps(bench, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write to {named(folder)}: {error.strerror}; choose another "
                          f"folder with "
                          f"--out") from None
