"""Hosting: what its processes import, and what a learner's kernel sends to it.

Only these tests catch: a process of hosting that runs a learner's copy of a module, and a claim of
a notebook that is reported with another verdict.
"""

import subprocess
from pathlib import Path

import pytest

from hosting import python
from lessons import reports, toolbox
from lpkit import cli, files
from tests import NOTEBOOKS

PROBE = """
import sys
def main():
    import hosting
    import lessons
    print(hosting.__file__, lessons.__file__, *sys.argv[1:], sep="\\n")
"""


def test_a_process_of_hosting_imports_the_courses_own_modules(tmp_path, monkeypatch):
    """A learner's folder has a copy of the lessons, which may be broken."""
    (tmp_path / "probe.py").write_text(PROBE)
    for name in ("hosting", "lessons"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run([*python("probe"), "-f", "one"], cwd=tmp_path, capture_output=True,
                          text=True, check=True)
    ours = [str(Path(NOTEBOOKS, name, "__init__.py")) for name in ("hosting", "lessons")]
    assert done.stdout.splitlines() == [*ours, "-f", "one"]


@pytest.mark.parametrize("command", sorted(cli.HOSTED))
def test_a_hosted_command_says_that_the_notebooks_are_not_there(command, tmp_path, monkeypatch,
                                                                capsys):
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "lpkit")
    assert cli.main([command, "--help"]) == 2
    assert capsys.readouterr().err == (f"lpkit: there is no folder {tmp_path / 'notebooks'}; "
                                       f"install lpkit again\n")


def test_a_claim_of_a_notebook_is_reported_with_its_verdict(monkeypatch, capsys):
    events = []
    monkeypatch.setattr(reports, "report", lambda kind, **facts: events.append((kind, facts)))
    with toolbox.claim("two is two"):
        assert len("ab") == 2
    with toolbox.claim("the GPU is fast"):
        toolbox.cannot_tell(True, "there is none")
    with pytest.raises(AssertionError), toolbox.claim("two is three"):
        raise AssertionError("it is not")
    assert events == [("claim", {"name": name, "verdict": verdict}) for name, verdict in (
        ("two is two", "holds"), ("the GPU is fast", "cannot tell"), ("two is three", "fails"))]
