"""Every performance figure that the project claims, measured beside its peer in one process.

    lpkit bench                 what there is
    lpkit bench loader
    lpkit bench import loader --rounds 25 --out data/measured
    lpkit bench --all

A ratio is the median over interleaved rounds of the paired ratio, with its quartiles. Being slow is
a result, not a failure: the exit code stays 0, and the row says by how much the target was missed.
With --json, `ratio`, `quartiles` and `peer` are those of the case that does worst against its
target, and `cases` has them all; several benchmarks make one object with a list `benches`.
The benches lie in tests/bench of a checkout.
"""

import argparse
import sys
from pkgutil import resolve_name
from typing import Any

from lpkit.commands import a_folder
from lpkit.errors import ConfigError
from lpkit.files import PACKAGE


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="without one, all are listed")
    parser.add_argument("--all", action="store_true", help="run every benchmark")
    parser.add_argument("--rounds", type=int, default=9, metavar="N",
                        help="interleaved rounds (%(default)s)")
    parser.add_argument("--configs", type=int, metavar="N",
                        help="of ledger's configs, spread over all, or fp8-step's sizes: this many")
    parser.add_argument("--kernel", metavar="NAME", help="of kernels, this one alone")
    parser.add_argument("--seconds", type=int, metavar="N",
                        help="of evidence: end after these; the same command goes on")
    parser.add_argument("--pieces", metavar="NAME,NAME",
                        help="of evidence or reliability: these alone, such as smoke,linear")
    parser.add_argument("--out", type=a_folder, metavar="DIR",
                        help="also keep each result there, as NAME-DEVICE.json")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError where lpkit is installed without its tests."""
    root = PACKAGE.parent
    if not (root / "tests" / "bench").is_dir():
        raise ConfigError("the benches lie in tests/bench of a checkout, and this lpkit is installed "
                          "without them; run this in a clone of the repository")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return resolve_name("tests.bench.command:run")(args)


def text(result: dict[str, Any]) -> str:
    return resolve_name("tests.bench.command:text")(result)
