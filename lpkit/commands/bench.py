"""Every performance figure that the project claims, measured beside its peer in one process.

    lpkit bench                 what there is
    lpkit bench loader
    lpkit bench import loader --rounds 25 --out data/measured
    lpkit bench --all

A ratio is the median over interleaved rounds of the paired ratio, with its quartiles. Being slow is
a result, not a failure: the exit code stays 0, and the row says by how much the target was missed.
With --json, `ratio`, `quartiles` and `peer` are those of the case that does worst against its
target, and `cases` has them all; several benchmarks make one object with a list `benches`.
The benches, and their options, lie in tests/bench of a checkout.
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
