"""Every command in the README is run unchanged, in order.

Only these tests catch: a command, a link, a printed line or a measured number of the README that
is no longer true.
"""

import json
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
from lpkit.measure import probes
from tests.measure import probe_process

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHOWN = [line.partition("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", README,
    re.DOTALL)
         for line in block.splitlines()]
COMMANDS = [line for line in SHOWN if line.startswith("lpkit ")]


# Settings that are added to a command, so that it runs faster: two short sequences per step instead
# of 16, and one timing of each matmul.
LESS = {"train": ["--set", "global_batch=2", "--set", "model.context=64"],
        "bench": ["--rounds", "1"], "measure": ["model.layers=1", "global_batch=4"]}


@pytest.mark.slow
def test_every_command_of_the_readme(tmp_path, monkeypatch, capsys, doctors_report):
    """In this process, so that the report of `lpkit doctor` is shared with other tests."""
    assert len(COMMANDS) == 9
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probes, "answers", lambda **how: probe_process.answers(doctors_report))
    for command in COMMANDS:
        program, name, *words = shlex.split(command)
        assert program == "lpkit"
        code = cli.main([name, *words, *LESS.get(name, [])])
        printed = capsys.readouterr()
        assert code == 0, f"{command}\n{printed.out}\n{printed.err}"
        assert printed.out.strip() and "Traceback" not in printed.err, command


def test_the_readmes_program_is_this_package():
    """Run `lpkit` in a process of its own, as a shell does."""
    words = [sys.executable, "-m", *shlex.split(COMMANDS[1])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["lpkit"] == f"{cli.__name__}:{cli.main.__name__}"


def test_the_first_screen_is_short_and_links_exist():
    """Return the part of the README above the table of notebooks."""
    assert (len(README.partition("| notebook |")[0].splitlines()) <= 44
            and sum(not line.startswith("| [") for line in README.splitlines()) <= 62)
    wide = [line for block in re.findall(r"```\w+\n(.*?)```", README, re.DOTALL)
            for line in block.splitlines() if len(line) > 90]
    assert not wide
    for name in re.findall(r'(?:src|srcset)="([^"]+)"', README):
        assert (ROOT / name).exists(), name
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README)
             if not link.startswith("https://")]
    assert ({f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb")}
            <= set(links)), "the table of notebooks"
    assert links and all((ROOT / link).exists() for link in links), [x for x in links
        if not (ROOT / x).exists()]


def test_the_sample_is_what_the_command_prints(capsys):
    """Each line of the sample is the beginning of a printed line; a line that ends in ... was
    shortened."""
    [(command, sample)] = re.findall(r"```text\n\$ \.venv/bin/(.*?)\n(.*?)```", README, re.DOTALL)
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    for line in filter(None, sample.splitlines()):
        assert any(printed_line.startswith(line.removesuffix(" ..."))
                   for printed_line in printed), line


def test_the_measured_numbers_are_those_of_the_records():
    cases = {case["case"]: case["ratio"] for case in recorded("your-model-amd-epyc")["cases"]}
    percent = float(re.search(r"at most ([\d.]+)% for 12 of 14", README)[1]) / 100
    assert (max(cases[f"peak, {kind}: 12 of 14 models are within"] for kind in ("as it is", "bf16"))
            <= percent)
    step = recorded("fp8-step-nvidia-h200")
    measured, predicted = map(float, re.search(r"is ([\d.]+) times as fast as a bf16 step\. .*? "
                                               r"predicted ([\d.]+)", README).groups())
    [case] = [case for case in step["cases"] if case["case"].startswith("fp8-delayed, 4 x 4096")]
    assert round(case["ratio"], 2) == measured
    assert f"a step {predicted} times as fast as bf16" in step["advice"]["4 x 4096, 8 x 1024 "
        "tokens"]["sentence"]
    runs, kills, inside = re.search(r"killed (\d+) training runs ([\d,]+) times in total, (\d+) "
                                    r"times during", README).groups()
    row = next(line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
               if line.startswith("| kills |") and f"inside a save: {inside}" in line)
    assert f"| {kills} | none |" in row and f"runs: {runs}" in row


def recorded(name: str) -> dict:
    return json.loads((ROOT / "data" / "measured" / f"{name}.json").read_text())


@pytest.mark.slow
def test_make_lab_serves_the_first_notebook(tmp_path):
    """The first command of the README, in an environment that exists: without any input, the
    page is served."""
    if not list((ROOT / ".venv").glob("ready-*")):
        pytest.skip("needs the set-up of `make lab`; `make test` has it")
    with subprocess.Popen(["make", "lab"], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True,
                          start_new_session=True, env=os.environ | {"BROWSER": "true"}) as process:
        try:
            url = next(addresses[0] for line in process.stdout
                       if (addresses := re.findall(r"http://127\.0\.0\.1:\S+", line)))
            with urllib.request.urlopen(url, timeout=30) as page:
                assert page.status == 200 and b"JupyterLab" in page.read()
            assert "00_start_here.ipynb" in url
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.stdout.read()
