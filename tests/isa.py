"""Do the kit's answers hang on one processor's rounding? `python -m tests.isa [--only TEXT] [--on TEXT]`.

Runs the numeric tests, and every notebook's claim with seeds 0 to 4, as other processors and other
numbers of threads would round them, and prints which fail where (exit code 1). What fails here was
luck: mend its statement (more seeds, a noise floor, "cannot tell"), not its tolerance.
oneDNN reads ONEDNN_MAX_CPU_ISA, https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

SETTINGS = {
    "as it is": {},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX512_CORE_BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
}
# What hangs on rounding most comes first.
TESTS = ("faults", "race", "memory", "outliers", "train", "telemetry", "recipes", "scaled_linear",
         "cast", "rows", "formats", "cached_weights", "model", "predict", "trace")
SEEDS = range(5)


def tests(names: list[str], environment: dict[str, str]) -> dict[str, list[str]]:
    """What fails of each file of tests, by one process for all of them."""
    files = [f"tests/test_{name}.py" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *files]
        subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed: dict[str, list[str]] = {name: [] for name in names}
    ran = Counter(case.get("classname", "").removeprefix("tests.test_") for case in cases)
    for case in cases:
        name = case.get("classname", "").removeprefix("tests.test_")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.setdefault(name, []).append(case.get("name", ""))
    for name in names:
        if not ran[name]:
            failed[name].append("no test ran")
    return failed


def claims(path: Path, environment: dict[str, str]) -> list[str]:
    """Why the claim of this notebook fails, by seed, at the smoke size."""
    from lpkit.course import notebooks

    seeded = "seed" in notebooks.parameters(notebooks.read(path))
    settings = ["seed=" + ",".join(map(str, SEEDS))] if seeded else []
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "lpkit", "notebook", str(path), *settings, "--tier", "smoke", "--json"]
        done = subprocess.run([sys.executable, *words, "--out", folder], env=environment,
                              capture_output=True, text=True)
    if not done.stdout:
        return [done.stderr.strip()]
    result = json.loads(done.stdout)
    failed = []
    for run in result.get("runs", [result]):
        if run["status"] != "done":
            failed.append(f"seed {run['parameters'].get('seed')}: {run['error']['message'][:300]}")
    return failed


def main() -> int:
    from lpkit.course import notebooks

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="tests and notebooks named so")
    parser.add_argument("--on", default="", metavar="TEXT", help=f"settings: {', '.join(SETTINGS)}")
    args = parser.parse_args()
    files = [name for name in TESTS if args.only in f"test_{name}"]
    books = [path for path in notebooks.course() if args.only in path.stem]
    width = max(map(len, [*files, *(book.stem for book in books), "failed"]))
    failures = 0
    for setting, changes in SETTINGS.items():
        if args.on not in setting:
            continue
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
        print(f"\n{setting}", flush=True)
        if files:
            for name, failed in tests(files, environment).items():
                failures += report(name, failed, width)
        for book in books:
            failures += report(book.stem, claims(book, environment), width)
    return bool(failures)


def report(name: str, failed: list[str], width: int) -> int:
    print(f"  {name.ljust(width)}  {f'{len(failed)} failed' if failed else 'passed'}", flush=True)
    for line in failed:
        print(f"      {line}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
