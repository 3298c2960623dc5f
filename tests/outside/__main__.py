"""Run the cases from other projects and print the number of each outcome by project: `python -m
tests.outside [pytest's options]`."""

import collections
import sys
from pathlib import Path

import pytest

from lpkit.tables import text_table
from tests.outside import DIFFERENT, SOURCES


class Count:
    def __init__(self):
        self.by_source: dict[str, collections.Counter] = collections.defaultdict(
            collections.Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.by_source[Path(report.fspath).stem][report.outcome] += 1


def main() -> int:
    count = Count()
    code = pytest.main(["-q", "-p", "no:cacheprovider", str(Path(__file__).parent), *sys.argv[1:]],
                       plugins=[count])
    outcomes = ("passed", "skipped", "failed")
    rows = [(SOURCES[name].project, SOURCES[name].version,
             *(str(counts[outcome]) for outcome in outcomes))
            for name, counts in sorted(count.by_source.items())]
    sums = [str(sum(counts[outcome] for counts in count.by_source.values()))
            for outcome in outcomes]
    print(text_table([("source", "version", *outcomes), *rows, ("all", "", *sums)]))
    print("\nDeliberate differences from the original:",
          *(f"  {name}: {why}" for name, why in DIFFERENT.items()), sep="\n")
    return int(code)


sys.exit(main())
