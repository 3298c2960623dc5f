"""Run benchmarks that compare lpkit with other libraries (its peers) in the same process.

    lpkit bench                 list the benchmarks
    lpkit bench loader
    lpkit bench import loader --rounds 25 --out data/measured
    lpkit bench --all

Each round runs lpkit and its peer once, one directly after the other, and gives one ratio of their
times. A row shows the median and the quartiles of these ratios. If the median misses its target,
the row says by how much, and the exit code is still 0. For --json, see docs/commands.md.
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
