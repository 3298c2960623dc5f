"""What test files share: a small corpus, what this machine can do, one served JupyterLab, one
Chromium.

`make test` divides the files between two processes (pytest-xdist); each computes with one thread.
"""

import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before torch is imported, here and in children

import psutil
import pytest
import torch

from tests import NOTEBOOKS, machine, processors

# Before lpkit is imported, here and in children: `auto` chooses as on one kind of processor,
# whichever the machine has.
os.environ.setdefault(processors.VARIABLE, processors.DEFAULT)
processors.install()
sys.path.insert(0, processors.AT_START)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None,
    (processors.AT_START, os.environ.get("PYTHONPATH"))))
if not torch.cuda.is_available():       # before anybody imports a kernel
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Files that share what is slow to make: one process has them all.
TOGETHER = {"test_doctor": "cells", "test_matrix": "cells", "test_readme": "cells"}
HERE = Path(__file__).parent
# Whoever starts tests by nohup, or behind a shell's `&`, has them ignore a signal, and all that
# they start. A handler is not
# inherited: these tests still outlive a terminal, and their children and what they train hear the
# signal.
for ignored, instead in (("SIGHUP", lambda *heard: None), ("SIGINT", signal.default_int_handler)):
    if hasattr(signal, ignored) and signal.getsignal(getattr(signal, ignored)) is signal.SIG_IGN:
        signal.signal(getattr(signal, ignored), instead)
TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i % 7}\n" for i in range(3000))


# What a bare machine with a GPU may lack: the tests of a file that needs one are skipped there, and
# the others run.
OPTIONAL = {"anywidget", "gfloat", "hypothesis", "ipykernel", "ipywidgets", "matplotlib",
            "ml_dtypes", "nbclient", "nbformat", "papermill",
            "PIL", "playwright", "plotly", "torchao", "transformers", "accelerate", "jupyterlab",
            "jupyter_server", "jupyter_client", "IPython",
            "traitlets", "tokenizers", "datasets", "triton"}


class Module(pytest.Module):
    def _getobj(self):
        try:
            return super()._getobj()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None) or ""
            if missing.partition(".")[0] not in OPTIONAL:
                raise
            pytest.skip(f"needs {missing}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """A limit finds what hangs, and no test that other work beside it makes slow."""
    from tests.attack import patience

    own = item.get_closest_marker("timeout")
    seconds = own.args[0] if own else float(item.config.getoption("timeout")
        or item.config.getini("timeout") or 0)
    item.add_marker(pytest.mark.timeout(seconds * (1 + patience())), append=False)
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def patient_waits():
    """So it is for children: seconds in which they have to end are those of a machine that does
    nothing else."""
    from tests.attack import patience

    def patient(wait, at):
        def call(*given, **named):
            given = [value * patience() if place == at and value and value >= 5 else value
                     for place, value in enumerate(given)]
            if (named.get("timeout") or 0) >= 5:
                named["timeout"] *= patience()
            return wait(*given, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, at in ((subprocess.Popen, "wait", 1), (subprocess.Popen, "communicate", 2),
                                (psutil, "wait_procs", 1), (psutil.Process, "wait", 1)):
            patch.setattr(owner, name, patient(getattr(owner, name), at))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """On a CPU torch 2.11 multiplies FP8 with one scale a tensor, and no other: what wants a scale
    a row is skipped there."""
    try:
        return (yield)
    except Exception as error:
        if "_scaled_mm only supports per-tensor scaling for CPU" not in str(error):
            raise
    pytest.skip("torch 2.11 multiplies FP8 on a CPU with one scale a tensor alone")


def pytest_ignore_collect(collection_path, config):
    """Files without a test of `make test` are not imported for it: seconds of each process."""
    if config.option.markexpr == "not prove" and collection_path.name.startswith("test_"):
        file = collection_path.relative_to(HERE) if HERE in collection_path.parents else None
        return (file is not None and file.as_posix() not in machine.NAMES) or None
    return None


def pytest_collection_modifyitems(items, config):
    """`prove` is on all tests but those of tests/machine.py and the cells of notebooks."""
    for item in items:
        if HERE in item.path.parents and not machine.proves_the_machine(
                item.path.relative_to(HERE).as_posix(), item.originalname):
            item.add_marker("prove")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process takes whole files, and all the files of a group."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0]
            return TOGETHER.get(Path(path).stem, path)

    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter):
    """Whoever runs the tests is told of a page that is older than the code: nobody renews it at
    every change, it takes an hour."""
    from tests.attack import _page

    if warning := _page.age((_page.ROOT / "docs" / "reliability.md").read_text()):
        terminalreporter.write_line(warning, yellow=True)


@pytest.fixture(params=processors.KINDS)
def each_processor(request, monkeypatch):
    """For a test whose result may depend on what `auto` chooses: it runs once with the choices of
    each kind of processor."""
    monkeypatch.setenv(processors.VARIABLE, request.param)
    return request.param


@pytest.fixture
def this_machine(monkeypatch):
    """For tests of what is asked of the machine at hand, and of races."""
    monkeypatch.delenv(processors.VARIABLE)


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """What a person made is not for tests to write: kernels and children inherit this, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        (folder / f"{i}.py").write_text(TEXT[i * 1000:(i + 30) * 1000])
    return folder


def pytest_runtest_setup(item):
    if item.get_closest_marker("dist") and not hasattr(os, "fork"):
        pytest.skip("POSIX: fork")


@pytest.fixture(scope="session")
def parent():
    """Has imported what ranks need, once for all files of this process."""
    from lpkit.parallel.processes import WarmParent

    with WarmParent() as parent:
        yield parent


@pytest.fixture(scope="session")
def on_ranks(parent):
    """f(function, config, world=2, **argument): what each rank returned that ran this function of
    training_ranks.py."""
    from lpkit.parallel.processes import Processes

    def run(function, config, world=2, **argument):
        argument["config"] = config.to_dict()
        with Processes(f"tests.parallel.training_ranks:{function}", argument, world=world,
                       parent=parent) as running:
            return running.wait()

    return run


@pytest.fixture(scope="session")
def parent_of_lessons(parent):
    """Has imported the lessons, too, as each rank would otherwise that judges."""
    from lpkit.parallel.processes import Processes

    with Processes("tests.lessons.judging.course:imported", world=1, parent=parent) as running:
        running.wait()
    return parent


@pytest.fixture
def judged_on_ranks(parent_of_lessons, monkeypatch):
    """Ranks of one parent judge all answers, which have one each elsewhere."""
    from lessons.ranks import on_ranks

    monkeypatch.setattr(on_ranks, "on_ranks",
                        functools.partial(on_ranks.on_ranks, parent=parent_of_lessons))


@pytest.fixture(scope="session")
def cells():
    """Every recipe with every backend, tried on this CPU: a process of its own and some seconds."""

    from lpkit.measure import matrix, probes

    parts = probes.answers(device="cpu", only=matrix.checks(), seconds=90)
    return [probes.Probe(**row) for part in parts for row in part.get("probes", ())]


@pytest.fixture(scope="session")
def doctors_report(cells):
    """What `lpkit doctor` finds here, with the time that a busy machine may need. On a machine
    without a GPU its matrix is `cells`."""
    from lpkit.measure import doctor, probes

    if torch.cuda.is_available():
        return probes.examine(seconds=90)
    report = probes.examine(only=["speed",
                                  *(check.name for check in (*doctor.CHECKS,
                                      *doctor.techniques()))], seconds=90)
    return report | {"probes": [*report["probes"], *map(dataclasses.asdict, cells)]}


@pytest.fixture(scope="session")
def context():
    """A context of a real browser. Playwright can be open only once in a process."""
    from tests.bench.browser import chromium, chromium_path

    if chromium_path() is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome on PATH")
    pytest.importorskip("playwright", reason="the browser is driven by playwright")
    with chromium() as context:
        yield context


@pytest.fixture(scope="session")
def lab(tmp_path_factory, context):
    """(open, folder): `open(name)` opens a notebook of `folder` in a served JupyterLab, in a real
    browser."""
    from tests.hosting.served import Notebook, served

    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(Path(NOTEBOOKS) / "lessons", folder / "lessons")
    with served(folder, tmp_path_factory.mktemp("state")) as server:
        yield lambda name: Notebook(context, server, name), folder
