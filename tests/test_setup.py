"""The set-up: what make would do, and that every file of it names the same versions."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {canonicalize_name(name): version for name, version in
        re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.M)}
HEAVY = {"flash-attn", "transformer-engine", "liger-kernel"}       # [gpu] follows the GPU's own stack
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*words, folder=ROOT):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=folder, env=env, capture_output=True, text=True)


def test_everything_is_pinned_and_every_pin_is_allowed():
    for line in [*PROJECT["dependencies"], *(x for group in PROJECT["optional-dependencies"].values() for x in group)]:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if name != "lpkit" and name not in HEAVY:
            assert wanted.specifier.contains(PINS[name]), f"constraints.txt has {name} {PINS[name]}, not {wanted}"
    assert PINS["torch"] == "2.13.0"


@needs_make
def test_make_without_a_goal_explains():
    said = make().stdout
    assert all(f"make {goal}" in said for goal in ("lab", "test", "docs", "upgrade", "clean"))


@needs_make
@pytest.mark.parametrize("goal, last", [("lab", "-m lpkit lab"), ("docs", "docs/build.py"), ("test", "build/smoke tests")])
def test_each_goal_sets_up_first(goal, last):
    planned = make("-n", goal)
    assert planned.returncode == 0 and planned.stderr == ""
    assert "ready-" in planned.stdout.splitlines()[0] and planned.stdout.strip().endswith(last)


@pytest.fixture
def fresh(tmp_path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@needs_make
@pytest.mark.parametrize("python, says", [
    ("no-such-python", "lpkit needs Python 3.11 or newer, and no-such-python is"),
    ("./old", "lpkit needs Python 3.11 or newer, and ./old is Python 3.9.1"),
    ("./bare", "./bare has no venv; on Debian and Ubuntu: apt-get install python3-venv")])
def test_a_python_that_will_not_do_is_named(fresh, python, says):
    (fresh / "old").write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1\nexit 1\n')
    (fresh / "bare").write_text('#!/bin/sh\ncase "$2" in *venv*) exit 1;; esac\n')
    for name in ("old", "bare"):
        (fresh / name).chmod(0o755)
    done = make("setup", f"PYTHON={python}", folder=fresh)
    assert done.returncode == 2 and says in done.stderr and not (fresh / ".venv").exists()


PYTHON = """#!/bin/sh
# Stands in for Python: makes a .venv that holds itself, and writes down what it was asked.
echo "$@" >> {log}
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
    *"find_spec"*) test ! -e broken;;
    *"-c constraints.txt"*) test ! -e offline;;
esac
"""


@needs_make
def test_the_setup_is_kept_while_its_inputs_are_and_recovers(fresh):
    log, python = fresh / "log", fresh / "python"
    python.write_text(PYTHON.format(log=log))
    python.chmod(0o755)

    def setup(code=0):
        log.write_text("")
        assert make("setup", f"PYTHON={python}", folder=fresh).returncode == code
        asked = log.read_text()
        return "-m venv .venv" in asked, "-c constraints.txt -e .[dev]" in asked

    assert setup() == (True, True)
    assert setup() == (False, False)                      # kept
    with (fresh / "constraints.txt").open("a") as file:
        file.write("more==1\n")
    assert setup() == (False, True)                       # other inputs: updated in place
    assert setup() == (False, False)
    (fresh / "broken").touch()
    assert setup() == (True, True)                        # it no longer runs: from nothing
    (fresh / "broken").unlink()
    with (fresh / "constraints.txt").open("a") as file:
        file.write("less==1\n")
    (fresh / "offline").touch()
    assert setup(code=2) == (False, True)                 # interrupted ...
    (fresh / "offline").unlink()
    assert setup() == (True, True)                        # ... so from nothing
    assert len(list((fresh / ".venv").glob("ready-*"))) == 1


@pytest.mark.parametrize("script", [".ci/run", "binder/postBuild", "binder/start"])
def test_scripts_are_executable_and_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_binder_takes_a_torch_without_cuda_within_the_projects_versions():
    environment = yaml.safe_load((ROOT / "binder/environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    wanted = {Requirement(re.sub(r"(?<![<>=])=(?!=)", "==", line)).name: Requirement(re.sub(r"(?<![<>=])=(?!=)", "==", line)).specifier
              for line in environment["dependencies"]}
    torch, allowed = wanted["pytorch-cpu"], Requirement(next(x for x in PROJECT["dependencies"] if "torch" in x)).specifier
    assert torch.contains(PINS["torch"]) and str(max(torch, key=lambda part: part.operator == "<=")) == f"<={PINS['torch']}"
    assert set(allowed) <= set(torch)
    assert all(part.version in ("3.11", "3.12") for part in wanted["python"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The content of a wheel that was built from the files under version control."""
    pytest.importorskip("setuptools", minversion="77")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("lpkit", "notebooks", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
                    "--quiet", "-w", built, source], check=True, capture_output=True)
    (packed,) = built.glob("lpkit-*.whl")
    zipfile.ZipFile(packed).extractall(built / "content")
    return built / "content"


def test_a_wheel_holds_all_that_the_package_reads(wheel):
    names = {path.relative_to(wheel / "lpkit").as_posix() for path in (wheel / "lpkit").rglob("*.*")}
    assert {path.relative_to(ROOT / "lpkit").as_posix() for path in (ROOT / "lpkit").rglob("*.*")
            if path.suffix in (".py", ".c", ".js")} <= names
    for folder, pattern in (("notebooks", "*.ipynb"), ("data/measured", "*.json"), ("data/published", "*.csv"), ("data/published", "*.toml")):
        assert {f"{folder}/{path.name}" for path in (ROOT / folder).glob(pattern)} <= names


def test_an_installed_wheel_finds_the_course_and_the_measured_figures(wheel, tmp_path):
    def python(*words):
        env = {**os.environ, "PYTHONPATH": str(wheel)}
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = json.loads(python("-m", "lpkit", "notebook", "--list", "--json"))["notebooks"]
    assert [book["name"] for book in listed] == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    found = python("-c", "from lpkit.studies.advice import MEASURED; from lpkit.files import resource; "
                         "print(MEASURED, len(list(MEASURED.glob('*.json'))), resource('notebooks'))").split()
    assert found == [str(wheel / "lpkit/data/measured"), str(len(list((ROOT / "data/measured").glob("*.json")))),
                     str(wheel / "lpkit/notebooks")]
