"""A bare machine with a GPU lacks most packages that the notebooks need. An import blocker makes
this machine such a machine.

Only these tests catch a command, a bench or a GPU test that imports a missing package without need,
and a traceback where one sentence should name the package.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import OPTIONAL

ROOT = Path(__file__).parents[2]
BLOCKER = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {absent}:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def bare(code: str, absent: set[str], **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", BLOCKER.format(absent=absent) + code],
                          capture_output=True, text=True, cwd=ROOT, timeout=560,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **env})


def command(words: list[str], absent: set[str]) -> subprocess.CompletedProcess:
    return bare(f"from lpkit.cli import main\nsys.exit(main({words}))", absent)


@pytest.mark.parametrize("words, absent, message", [
    (["notebook", "--all"], {"nbclient", "nbformat", "plotly"},
     "lpkit: lpkit notebook needs nbclient, nbformat, plotly, which "),
    (["lab", "--no-browser"], {"jupyterlab", "jupyter_server"},
     "lpkit: lpkit lab needs jupyterlab, jupyter-server, which ")])
def test_what_needs_the_absent_is_one_sentence(words, absent, message):
    done = command(words, absent)
    assert done.returncode == 2 and not done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith(message) and "-m pip install" in line


@pytest.mark.slow
def test_the_doctor_and_the_benches_start_without_them():
    done = command(["predict", "gpt2-124m", "--json"], OPTIONAL)
    assert done.returncode == 0 and json.loads(done.stdout), done.stderr
    done = bare("import tests.bench.ledger, tests.bench.fp8, tests.bench.steps, "
                "tests.bench.kernels, lpkit.measure.doctor, tests.bench.evidence",
                OPTIONAL - {"tokenizers"})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_tests_for_a_gpu_are_collected_without_them():
    """No plugin but the one that pyproject.toml configures; hypothesis's own would not load."""
    code = ("import pytest\n"
            "sys.exit(pytest.main(['--collect-only', '-q', '-m', 'gpu', 'tests', '-p', "
            "'no:cacheprovider', '-p', 'pytest_timeout']))")
    done = bare(code, OPTIONAL - {"tokenizers"}, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "test_gpu.py::test_tensor_cores_give_the_emulated_numbers" in done.stdout
    assert "error" not in done.stdout.lower().splitlines()[-1]
