"""Run benchmarks of the kit and of its peers in the same process.

    lpkit bench                 list the benchmarks
    lpkit bench loader
    lpkit bench import loader --rounds 25 --out data/measured
    lpkit bench --all

A ratio is the median of the paired ratios over interleaved rounds, with its quartiles. If a target
is missed, the row says by how much, and the exit code is 0. For --json, see docs/commands.md.
"""

import sys
from importlib import import_module

from lpkit.errors import ConfigError
from lpkit.files import PACKAGE

ROOT = PACKAGE.parent
if not (ROOT / "tests" / "bench").is_dir():
    raise ConfigError("lpkit bench needs tests/bench, which this installation does not have; run "
                      "it in a clone of the repository")
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
command = import_module("tests.bench.command")
arguments, run, text = command.arguments, command.run, command.text
