"""Measure the performance figures of the kit, each with its peer in the same process.

    lpkit bench                 list the benchmarks
    lpkit bench loader
    lpkit bench import loader --rounds 25 --out data/measured
    lpkit bench --all

A ratio is the median of the paired ratios over interleaved rounds, with its quartiles. If a target
is missed, the exit code stays 0, and the row says by how much. With --json, `ratio`, `quartiles`
and `peer` belong to the case that is worst compared with its target, and `cases` has all of them;
several benchmarks make one object with a list `benches`. They are in tests/bench of a checkout.
"""

import sys
from importlib import import_module

from lpkit.errors import ConfigError
from lpkit.files import PACKAGE

ROOT = PACKAGE.parent
if not (ROOT / "tests" / "bench").is_dir():
    raise ConfigError("the benches lie in tests/bench of a checkout, and this lpkit is installed "
                      "without them; run this in a clone of the repository")
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
command = import_module("tests.bench.command")
arguments, run, text = command.arguments, command.run, command.text
