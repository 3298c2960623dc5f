"""Every command that the README shows is run, in order, as it stands there."""

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHOWN = [line.partition("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
         for line in block.splitlines()]
COMMANDS = [line for line in SHOWN if line.startswith("lpkit ")]


@pytest.mark.slow
def test_every_command_of_the_readme(tmp_path):
    assert len(COMMANDS) == 7
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    for command in COMMANDS:
        done = subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True,
                              text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip() and "Traceback" not in done.stderr, command


def test_the_readme_is_one_screen_and_its_links_exist():
    assert len(README.splitlines()) <= 50
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
