"""Every command that the README shows is run, in order, as it stands there."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest

from lpkit import cli
from lpkit.measure import doctor

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHOWN = [line.partition("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
         for line in block.splitlines()]
COMMANDS = [line for line in SHOWN if line.startswith("lpkit ")]


# Added to a command: the same work on less. Two short sequences a step instead of 16, one timing each.
LESS = {"train": ["--set", "global_batch=2", "--set", "model.context=64"], "bench": ["--rounds", "1"], "measure": ["model.layers=1", "global_batch=4"]}


@pytest.mark.slow
def test_every_command_of_the_readme(tmp_path, monkeypatch, capsys, doctors_report):
    """In this process: the report of `lpkit doctor` is the one that other tests look at, too."""
    assert len(COMMANDS) == 9
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "examine", lambda: dict(doctors_report))
    for command in COMMANDS:
        program, name, *words = shlex.split(command)
        assert program == "lpkit"
        code = cli.main([name, *words, *LESS.get(name, [])])
        said = capsys.readouterr()
        assert code == 0, f"{command}\n{said.out}\n{said.err}"
        assert said.out.strip() and "Traceback" not in said.err, command


def test_the_readmes_program_is_this_package():
    """`lpkit` in a process of its own, as a shell starts it."""
    words = [sys.executable, "-m", *shlex.split(COMMANDS[1])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["lpkit"] == f"{cli.__name__}:{cli.main.__name__}"


def test_the_readme_is_one_screen_and_its_links_exist():
    assert len(README.splitlines()) <= 54
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("https://")]
    assert {f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb")} <= set(links), "the table of notebooks"
    assert links and all((ROOT / link).exists() for link in links), [x for x in links if not (ROOT / x).exists()]


@pytest.mark.slow
def test_make_lab_serves_the_first_notebook(tmp_path):
    """The README's first command, on a set-up that exists: nothing is typed, and the page is there."""
    if not list((ROOT / ".venv").glob("ready-*")):
        pytest.skip("needs the set-up of `make lab`; `make test` has it")
    with subprocess.Popen(["make", "lab"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True, env=os.environ | {"BROWSER": "true"}) as process:
        try:
            url = next(found[0] for line in process.stdout if (found := re.findall(r"http://127\.0\.0\.1:\S+", line)))
            with urllib.request.urlopen(url, timeout=30) as page:
                assert page.status == 200 and b"JupyterLab" in page.read()
            assert "00_start_here.ipynb" in url
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.stdout.read()
