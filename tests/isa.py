"""Do the kit's answers hang on one processor's rounding? `python -m tests.isa [--only TEXT] [--on
TEXT]`, hours; with `--quick` what decides an exercise's verdict, on one other path than this
machine's own, and tests whose results may depend on `auto` with the choices of each other kind of
processor (processors.py), minutes, as pytest says it.

Runs the numeric tests, and every notebook's claim with seeds 0 to 4, as other processors and other
numbers of threads would round them, and as `auto` chooses on other kinds, and prints which fail
where (exit code 1). What fails here was luck: mend its statement (more seeds, a noise floor,
"cannot tell"), not its tolerance.
A setting that changes no bit of `probe` here (an AMD processor takes MKL's AVX2, AVX512 and SSE4_2
for one path) is named and left out.
oneDNN reads ONEDNN_MAX_CPU_ISA,
https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html MKL reads MKL_CBWR,
https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2024-0/specifying-code-branches.html
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from tests import processors

SETTINGS = {
    "as it is": {},
    **{f"MKL {path}": {"MKL_CBWR": path} for path in ("COMPATIBLE", "SSE4_2", "AVX2", "AVX2,STRICT",
        "AVX512", "AVX512,STRICT")},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX512_CORE_BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATen default": {"ATEN_CPU_CAPABILITY": "default"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
    **{f"auto of {kind}": {processors.VARIABLE: kind, "PYTHONPATH": processors.AT_START}
       for kind in processors.KINDS},
}
# Another whole path, by what ATen takes here: the next older one.
OTHERS = {"AVX512": {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
                     "ATEN_CPU_CAPABILITY": "avx2"},
          "": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41",
               "ATEN_CPU_CAPABILITY": "default"}}
JUDGES = re.compile(r"^from lessons\.judging(\.| import .*)(index|judge|capstone|puzzles)\b|"
                    r"^from (lessons import .*capstone|tests\.lessons\.judging import mutants)",
                    re.M)
NUMBERS = re.compile(r"\b(approx|assert_close|allclose|isclose|equal|array_equal)\(")
# these ask a judge, but about processes, pages, files and other machines; each of their exercises
# is in test_exercises
NO_VERDICTS = {"attempts", "browser", "certificate", "data_parallel", "gpu_lessons", "learner",
               "notebook_runner", "notebooks", "solutions"}
# nor what plays a processor that rounds otherwise, on every one alike; and Triton's interpreter is
# NumPy, which no path here changes: wrong kernels
# (right ones and those with a mistake stay, as the definitions are torch's), and what kernels do to
# it
NO_PATH = ("rounds_otherwise or changes_of_each_kernel or planted_bugs or small_cases_alone or "
           "interpreter or whatever_a_kernel_does")
ROOT = Path(__file__).parents[1]
# Where each file of tests lies, by its name without test_ and .py.
FILES = {path.stem.removeprefix("test_"): str(path.relative_to(ROOT))
         for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.parent.name != "outside"}
# Files whose results depend on what `auto` chooses in 16 bits, and words in the names of those
# tests. Others have `each_processor`.
OF_AUTO = "depth", "fit", "memory", "qlora", "split_memory", "trace", "tracking", "wide_product"
QUICK = "bf16 or 16_bits or fp8 or bfloat16 or auto or fit or held or wide or trace"


def named(says: re.Pattern) -> list[str]:
    """The files of tests whose text says so, without test_ and .py."""
    return [name for name, path in FILES.items() if says.search((ROOT / path).read_text())]


VERDICTS = [name for name in named(JUDGES) if name not in NO_VERDICTS]
TESTS = list(dict.fromkeys(VERDICTS + named(NUMBERS)))      # what a learner is told comes first
SEEDS = range(5)


def probe() -> str:
    """The bits of products, sums and functions, as this process's libraries round them."""
    import torch

    digest = hashlib.sha256()
    chance = torch.Generator().manual_seed(0)
    for n in (5, 64, 257):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            a, b = (torch.randn(n, n, generator=chance).to(dtype) for _ in range(2))
            heads = a.view(1, 1, n, n)
            for x in (a @ b, torch.nn.functional.linear(a, b, b[0]), a.exp().sum(), a.softmax(-1),
                      a.tanh(), a.norm(),
                      torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)):
                digest.update(x.double().numpy().tobytes())
    return digest.hexdigest()


def bits(environment: dict[str, str]) -> str:
    words = [sys.executable, "-c", "from tests.isa import probe; print(probe())"]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout


def quick() -> int:
    """pytest's own output and exit code: the last line is its count."""
    import torch

    path = next(change for words, change in OTHERS.items()
                if words in torch.backends.cpu.get_cpu_capability())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    other = environment | path
    same = " (which changes nothing here)" * (bits(environment) == bits(other))
    print(f"{', '.join(VERDICTS)}, once more under "
           f"{' '.join(f'{key}={value}' for key, value in path.items())}{same}", flush=True)
    words = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope",
             "--no-loadscope-reorder", "-k", f"not ({NO_PATH})",
             *map(FILES.get, VERDICTS)]
    codes = [subprocess.run(words, env=other).returncode]
    for kind in sorted(processors.KINDS.keys()
                       - {environment.get(processors.VARIABLE, processors.DEFAULT)}):
        print(f"{', '.join(OF_AUTO)}, once more as `auto` chooses with {kind}", flush=True)
        words = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope",
                 "--no-loadscope-reorder", "-m", "not slow", "-k", QUICK,
                 *map(FILES.get, OF_AUTO)]
        codes.append(subprocess.run(words, env=environment
                                    | {processors.VARIABLE: kind}).returncode)
    return max(codes)


def tests(names: list[str], environment: dict[str, str]) -> dict[str, list[str]]:
    """What fails of each file of tests, by one process for all of them."""
    files = [FILES[name] for name in names]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *files]
        subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed: dict[str, list[str]] = {name: [] for name in names}
    ran = Counter(case.get("classname", "").rpartition(".test_")[2] for case in cases)
    for case in cases:
        name = case.get("classname", "").rpartition(".test_")[2]
        if case.find("failure") is not None or case.find("error") is not None:
            failed.setdefault(name, []).append(case.get("name", ""))
    for name in names:
        if not ran[name]:
            failed[name].append("no test ran")
    return failed


def claims(path: Path, environment: dict[str, str]) -> list[str]:
    """Why the claim of this notebook fails, by seed, at the smoke size."""
    from hosting import notebooks
    from hosting.parameters import parameters

    seeded = "seed" in parameters(notebooks.read(path))
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
    from hosting import notebooks

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="tests and notebooks named so")
    parser.add_argument("--on", default="", metavar="TEXT", help=f"settings: {', '.join(SETTINGS)}")
    parser.add_argument("--quick", action="store_true",
                        help="what decides verdicts, on one other path")
    args = parser.parse_args()
    if args.quick:
        return quick()
    files = [name for name in TESTS if args.only in f"test_{name}"]
    books = [path for path in notebooks.course() if args.only in path.stem]
    width = max(map(len, [*files, *(book.stem for book in books), "failed"]))
    failures, seen = 0, {}
    for setting, changes in SETTINGS.items():
        if args.on not in setting:
            continue
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
        print(f"\n{setting}", flush=True)
        if (not changes.keys() & {"OMP_NUM_THREADS", processors.VARIABLE}
            and (like := seen.setdefault(bits(environment), setting)) != setting):
            print(f"  rounds as {like!r} does here: left out", flush=True)
            continue
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
