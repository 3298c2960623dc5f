"""The set-up: what make would do, and that every file of it names the same versions.

Only these tests catch: a set-up that is kept though it is broken or of other versions, a file that
a wheel lacks, a command that works in the checkout alone, and a test of `make test` that is no
longer there.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import machine

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {canonicalize_name(name): version for name, version in
        re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.M)}
# [gpu] follows the GPU's own stack
HEAVY = {"flash-attn", "transformer-engine", "liger-kernel"}
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*words, folder=ROOT):
    env = {key: value for key, value in os.environ.items()
           if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=folder, env=env, capture_output=True, text=True)


def test_everything_is_pinned_and_every_pin_is_allowed():
    for line in [*PROJECT["dependencies"],
                 *(x for group in PROJECT["optional-dependencies"].values() for x in group)]:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if name != PROJECT["name"] and name not in HEAVY:
            assert wanted.specifier.contains(PINS[name]), (
                f"constraints.txt has {name} {PINS[name]}, not {wanted}")
    assert PINS["torch"] == "2.13.0"


@needs_make
def test_make_without_a_goal_explains():
    printed = make().stdout
    assert all(f"make {goal}" in printed for goal in ("lab", "test", "docs", "upgrade", "clean"))


@needs_make
@pytest.mark.parametrize("goal, last", [("lab", "-m lpkit lab"), ("docs", "docs/build.py"),
    ("test", "build/smoke tests")])
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


@needs_make
@pytest.mark.parametrize("ends, says", [
    ("", ""), ("ERROR: [Errno 28] No space left on device", "The disk is full: .venv takes "),
    ("Retrying after connection broken by 'NewConnectionError()'", "pip could not reach its "
        "package index. Check the network"),
    ("ERROR: something else", "pip could not install the packages of the project.")])
def test_a_setup_says_how_far_it_is_and_keeps_pips_words_in_a_file(fresh, ends, says):
    """No terminal. Pip's words appear only after a failure: one sentence first, then the end of the
    log and its path."""
    python = fresh / "python"
    python.write_text(f"""#!/bin/sh
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
    *"-c constraints.txt"*)
        for i in 1 2 3 4 5 6 7 8 9; do echo "Collecting noise $i"; done
        echo "  Downloading torch-2-cp311.whl.metadata (5.3 kB)"; echo "  Downloading \
torch-2-cp311.whl (900.1 MB)"; echo "  Using cached x.whl (1.2 GB)"
        sleep 1; test -z "{ends}" || {{ echo "{ends}"; exit 1; }};;
esac
""")
    python.chmod(0o755)
    done = make("setup", f"PYTHON={python}", "EVERY=0.2", folder=fresh)
    first, *more = done.stdout.splitlines()
    assert re.match(r"Setting up \.venv, once: [\d.]+ GB to download .*, [\d.]+ GB on the disk, "
                    r"\d+ minutes.*Log: build/setup.log$", first)
    assert (re.search(r"  2 packages of about \d+, 2\.1 GB$", done.stdout, re.M)
            and "noise" not in done.stdout)
    assert "noise 1\n" in (fresh / "build/setup.log").read_text()
    if not ends:
        assert done.returncode == 0 and done.stderr == "" and more[-1] == ".venv is ready."
        return
    sentence, where, *tail = done.stderr.splitlines()
    assert (done.returncode == 2 and sentence.startswith(says)
            and where == "The end of build/setup.log:")
    assert (tail[4] == f"    {ends}" and "noise 1" not in done.stderr
            and not list((fresh / ".venv").glob("ready-*")))


@pytest.mark.parametrize("script", [".ci/run", "binder/postBuild", "binder/start"])
def test_scripts_are_executable_and_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_binder_takes_a_torch_without_cuda_within_the_projects_versions():
    environment = yaml.safe_load((ROOT / "binder/environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    wanted = {Requirement(re.sub(r"(?<![<>=])=(?!=)", "==", line)).name:
              Requirement(re.sub(r"(?<![<>=])=(?!=)", "==", line)).specifier
              for line in environment["dependencies"]}
    torch, allowed = wanted["pytorch-cpu"], Requirement(
        next(x for x in PROJECT["dependencies"] if "torch" in x)).specifier
    assert (torch.contains(PINS["torch"])
            and str(max(torch, key=lambda part: part.operator == "<=")) == f"<={PINS['torch']}")
    assert set(allowed) <= set(torch)
    assert all(part.version in ("3.11", "3.12") for part in wanted["python"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the files under version control."""
    pytest.importorskip("setuptools", minversion="77")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("lpkit", "notebooks", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
                    "--no-index",
                    "--quiet", "-w", built, source], check=True, capture_output=True)
    return next(built.glob("low_precision_kit-*.whl"))


def test_a_wheel_holds_every_file_of_the_package_and_of_the_folders_beside_it(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("lpkit/")}
    # what lpkit.files.resource finds
    beside = [ROOT / name for name in ("notebooks", "data/measured", "data/published")]
    files = [path.relative_to(ROOT / "lpkit" if ROOT / "lpkit" in path.parents else ROOT).as_posix()
             for folder in (ROOT / "lpkit", *beside) for path in folder.rglob("*.*")
             if path.is_file() and path.suffix != ".pyc"]
    assert held - {"lpkit/notebooks/__init__.py"} == {f"lpkit/{name}" for name in files}


def test_a_wheel_carries_the_licence_and_names_it(wheel):
    held = zipfile.ZipFile(wheel)
    [metadata] = [held.read(name).decode() for name in held.namelist()
                  if name.endswith(".dist-info/METADATA")]
    assert ("\nLicense-Expression: Apache-2.0\n" in metadata
            and "\nLicense-File: LICENSE\n" in metadata)
    [licence] = [held.read(name) for name in held.namelist()
                 if name.endswith(".dist-info/licenses/LICENSE")]
    # of https://www.apache.org/licenses/LICENSE-2.0.txt, as it is
    assert (hashlib.sha256(licence).hexdigest()
            == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30")


def test_the_citation_is_of_this_version():
    """What the schema of CFF 1.2.0 asks for
    (https://github.com/citation-file-format/citation-file-format), and what pyproject.toml says,
    too."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert ({"cff-version", "message", "title", "authors"} <= citation.keys()
            and citation["cff-version"] == "1.2.0" and citation["type"] == "software")
    assert citation["authors"] == [{"name": "The lpkit developers"}]
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_every_folder_that_the_package_asks_for_travels():
    asked = {name for path in (ROOT / "lpkit").rglob("*.py")
             for name in re.findall(r"\bresource\(\"(.+?)\"\)", path.read_text())}
    assert asked == {"notebooks", "data/measured", "data/published"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel in an environment of its own, which has the dependencies of this one, and not the
    checkout. A function runs its `lpkit` with some words, or else its Python with some code, in a
    folder that is empty at first."""
    venv, folder = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", venv], check=True)
    subprocess.run([sys.executable, "-m", "pip", "--python", venv / "bin/python", "install",
                    "--no-deps", "--no-index", "--quiet", wheel], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path
        if path.endswith(("site-packages", "dist-packages"))))
    shutil.rmtree(venv / "share", ignore_errors=True)
    (venv / "share").symlink_to(Path(sys.prefix) / "share")     # JupyterLab's pages
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_DATA_HOME": str(folder / "home")}

    def run(*words: str, code: str = "") -> subprocess.Popen:
        command = [venv / "bin/python", "-c", code] if code else [venv / "bin/lpkit", *words]
        return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    run.site, run.folder = site, folder
    return run


def answer(started: subprocess.Popen) -> dict:
    with started:
        out, err = started.communicate()
    assert started.returncode == 0, err
    return json.loads(out)


def test_what_is_installed_is_not_the_checkout(installed):
    where = answer(installed(code="import json, lpkit.files as f; print(json.dumps([f.__file__, "
                                  "str(f.resource('data/published'))]))"))
    assert where == [str(installed.site / "lpkit/files.py"),
                     str(installed.site / "lpkit/data/published")]


@pytest.mark.slow
@pytest.mark.timeout(900)       # half a minute, where nobody else computes
def test_every_command_of_an_installed_wheel_runs(installed):
    """One after another in one process: each imports PyTorch for longer than it works. What a shell
    starts is in the other tests. `doctor` tries one thing, in its process of its own."""
    from lpkit.cli import COMMANDS
    from lpkit.techniques import lessons

    tiny = {"arms": {"adamw": {}, "lion": {"optimizer": "lion"}}, "differ": ["optimizer"],
            "target": "val_loss", "effect": 0.5, "budget": {"steps": 2},
            "seeds": 3, "sigma": 0.01, "tuning": {"optimizer.lr": [1e-3],
                "optimizer.weight_decay": [0.0]},
            "settings": {"global_batch": 4, "eval_batches": 1, "model.layers": 1,
                         "model.context": 16}}
    few = {"trials": 1, "target": "val_loss",
           "search": {"optimizer.lr": {"low": 1e-4, "high": 1e-2}},
           "settings": {**tiny["settings"], "steps": 2}}
    for name, content in (("tiny", tiny), ("few", few)):
        Path(installed.folder, f"{name}.yaml").write_text(json.dumps(content))     # which is YAML
    says = {
        "predict gpt2-124m": lambda out: out["fits"],
        "predict gpt2-124m --card cards/card": lambda out: out["card"] == ["cards/card.json",
            "cards/card.svg"],
        "cards cards": lambda out: out["cards"][0]["card"] == "card.json",
        "plan --model llama-8b --tokens 1e9 --devices 8": lambda out: out["plans"],
        "advise gpt2-124m": lambda out: out["plans"],
        "claims": lambda out: len(out["claims"]) > 10,
        "techniques": lambda out: {row["import"] for rows in out["families"].values()
                                   for row in rows} == {"", *lessons.package().modules()},
        "claim tiny.yaml": lambda out: out["verdicts"],
        "sweep few.yaml": lambda out: out["best"],
        "doctor": lambda out: out["probes"],
        "train cpu-3m steps=2 global_batch=4 eval_batches=1 --out run": lambda out:
        out["status"] == "complete",
        "launch cpu-3m --on slurm --processes 2": lambda out: Path(installed.folder,
            out["file"]).read_text() == out["job"],
        "warm cpu-3m global_batch=4": lambda out: out["chosen"],
        "measure cpu-3m global_batch=4 grad_accum_steps=1 --save mine.yaml": lambda out:
        out["saved"] == "mine.yaml",
        "predict cpu-3m --machine mine.yaml": lambda out: out["assumptions"]["factor"] != 1,
        "sample run --tokens 4": lambda out: out["texts"],
        "export run --out weights": lambda out: Path(installed.folder, out["out"],
            "model.safetensors").is_file(),
        "import weights --check --tokenizer bytes": lambda out: out["architecture"]
        == "GPT2LMHeadModel",
        "data prepare python-stdlib --out corpus": lambda out: out["splits"].keys() == {"train",
            "val"},
        "new experiment own_row": lambda out: all(Path(installed.folder, file).is_file()
            for file in out["files"]),
        "progress --collect learner.json": lambda out: out["exercises"]
        == {"03.cast": {"right": 1, "not_yet": 0}},
        "notebook own_row.ipynb --tier smoke": lambda out: out["status"] == "done"
        and out["result"] == "cannot tell",
        "notebook 01 --tier smoke": lambda out: out["status"] == "done",
        "notebook --list": lambda out: [book["name"] for book in out["notebooks"]] == sorted(
            path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))}
    Path(installed.folder, "cards").mkdir()
    Path(installed.folder, "learner.json").write_text(
        json.dumps({"format": "lpkit-learner", "version": 1, "guesses": [], "exercises": {
        "03.cast": {"right": True, "attempts": 1, "first_right": "2026-11-24"}}}))
    assert {line.split()[0] for line in says} | {"lab", "bench", "pack", "room",
        "slides"} == set(COMMANDS), ("a command that no wheel is tried with; below: lab, bench, "
                                      "pack")
    outputs = answer(installed(code=f"""
import contextlib, functools, io, json
from lpkit import cli
from lpkit.measure import doctor, probes

probes.examine = functools.partial(probes.examine, only=["speed", doctor.CHECKS[0].name])
outputs = []
for line in {list(says)}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main([*line.split(), "--json"]) == 0, line
    outputs.append(json.loads(out.getvalue()))
print(json.dumps(outputs))
"""))
    assert len(outputs) == len(says)
    for (line, holds), out in zip(says.items(), outputs):
        assert holds(out), (line, out)


@pytest.mark.parametrize("words", [["bench"], ["bench", "import", "--rounds", "1"],
                                   ["pack", "room.tar"]], ids=" ".join)
def test_what_needs_a_checkout_is_said_by_an_installed_wheel(installed, words):
    with installed(*words) as started:
        err = started.communicate()[1]
    [sentence] = [line for line in err.splitlines() if line.startswith("lpkit: ")]
    assert started.returncode == 2 and "clone of the repository" in sentence


@pytest.mark.slow
def test_the_lab_of_an_installed_wheel_starts_and_stops(installed):
    with installed("lab", "--no-browser", "--port", "0", "--json") as lab:
        try:
            report = json.loads(lab.stdout.readline())
            with urlopen(report["url"], timeout=60) as page:
                assert b"JupyterLab" in page.read()
            assert len(report["changes"]) == len(list((ROOT / "notebooks").glob("*.ipynb")))
        finally:
            lab.send_signal(signal.SIGINT)
        err = lab.communicate()[1]
    assert lab.returncode == 0 and "stopped" in err, err


def test_make_test_runs_tests_that_exist_in_each_room():
    """A test that is renamed would silently be in `make test` no more."""
    for file, names in machine.NAMES.items():
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert {name for name in names if f"def {name}(" not in text} == set(), file
    rooms = {path.parent.name for path in (ROOT / "lpkit").glob("*/__init__.py")}
    assert rooms - {file.split("/")[0] for file in machine.NAMES} == set()
