"""What is started under a keeper ends with its parent, and no signal is lost. No Jupyter here: see also
tests/attack/processes.py."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lpkit import processes
from tests.attack import patience, until
from tests.attack import processes as attack

# A child that hears no SIGTERM, with a session of its own inside, and an orphan.
FAMILY = """trap '' TERM; setsid sleep 600 & (setsid bash -c "trap '' TERM; sleep 600; true" &)
echo ready > ready; sleep 600; true"""
PARENT = """
import sys
from pathlib import Path
from lpkit import processes
{prelude}
folder = processes.new_folder()
with processes.Children().start(["bash", "-c", sys.argv[1]], folder, files={{"secret/a": "x"}}, cwd=folder) as keeper:
    keeper.wait()
"""


def parent(place: Path, prelude: str = "") -> subprocess.Popen:
    (place / "tmp").mkdir()
    (place / "runtime").mkdir()
    return subprocess.Popen([sys.executable, "-c", PARENT.format(prelude=prelude), FAMILY],
                            env=os.environ | {"TMPDIR": str(place / "tmp"), attack.MARK: str(place)})


@contextlib.contextmanager
def until_the_end(process: subprocess.Popen):
    """An assertion that fails is reported, and not waited for until the parent's ten minutes are over."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_parent_that_dies(tmp_path, sent):
    with parent(tmp_path) as process, until_the_end(process):
        until(lambda: list(tmp_path.glob("tmp/*/ready")))
        # Parent, keeper, child and its sleep, orphans: on a busy machine they come after the word that all is ready.
        until(lambda: len(attack.processes(tmp_path)) >= 6)
        (folder,) = (tmp_path / "tmp").iterdir()
        assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "secret", folder / "secret" / "a")] == [
            0o700, 0o700, 0o600]
        begun = time.monotonic()
        process.send_signal(sent)
    assert attack.until_nothing(tmp_path, begun + 3 * patience()) == []


def test_a_parent_that_dies_before_it_has_said_what_to_start(tmp_path):
    with parent(tmp_path, "import os\nprocesses.json.dumps = lambda told: os.kill(os.getpid(), 9)") as process:
        assert process.wait(10) == -9
    assert attack.until_nothing(tmp_path, time.monotonic() + 3 * patience()) == []


def test_half_an_order_is_none(tmp_path):
    done = subprocess.run([sys.executable, "-P", processes.__file__], input=f'{{"folder": "{tmp_path}/a"', text=True,
                          capture_output=True, timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and list(tmp_path.iterdir()) == []


def start(*command: str, children: processes.Children | None = None, **options) -> subprocess.Popen:
    return (children or processes.Children()).start(command, processes.new_folder(), **options)


@pytest.mark.parametrize("script, code", [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_end_of_the_child_is_the_keepers(script, code):
    with start("bash", "-c", f"echo first; echo last >&2; {script}", log="log") as keeper:
        assert keeper.wait(10) == code and keeper.stdout.read() == "first\nlast\n"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capfd):
    with processes.Children().start(["true"], tmp_path / "no" / "folder") as keeper:
        assert keeper.wait(10) == 1
    assert capfd.readouterr().err.startswith("lpkit: cannot start true: [Errno 2]")


def test_what_is_left_when_the_child_ends_is_ended(tmp_path):
    with start("bash", "-c", f"setsid bash -c 'trap \"\" TERM; sleep 600; true' & echo $! > {tmp_path}/pid") as keeper:
        assert keeper.wait(10) == 0
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_nothing_starts_once_all_should_end(tmp_path):
    children = processes.Children()
    with start("sleep", "600", children=children) as first:
        children.end()
        children.end()
        first.wait(5)
    with start("touch", str(tmp_path / "late"), children=children) as second:
        second.wait(5)
    assert not (tmp_path / "late").exists()


class Slow:
    """Python cannot raise from a destructor: it prints the exception and goes on."""

    def __del__(self):
        time.sleep(0.001)


@pytest.mark.parametrize("sent", processes.POLITE)
def test_no_signal_is_lost(sent):
    """What goes on is all destructors, where an exception that a handler raises is ignored."""
    before = signal.getsignal(sent)
    for _ in range(20):
        stop = threading.Event()

        def work(stop=stop):
            os.kill(os.getpid(), sent)
            while not stop.is_set():
                Slow()

        assert processes.hear(work, stop.set) == (None, sent)
    assert signal.getsignal(sent) is before


def test_hearing_returns_what_was_done_and_raises_what_was_raised():
    assert processes.hear(lambda: 5, lambda: None) == (5, 0)
    with pytest.raises(ZeroDivisionError):
        processes.hear(lambda: 1 / 0, lambda: None)


def test_who_says_nohup_outlives_the_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert processes.hear(lambda: os.kill(os.getpid(), signal.SIGHUP), lambda: None) == (None, 0)
    finally:
        signal.signal(signal.SIGHUP, before)


CARELESS = """
import json, os, sys
told = json.loads(sys.stdin.readline())
os.mkdir(told["folder"])
os.execvp("sleep", ["sleep", "600"])
"""


def test_the_attack_sees_what_a_careless_keeper_leaves(tmp_path, monkeypatch):
    def sleep(seconds):
        """Until the keeper has begun, not for the second in which it usually has."""
        if seconds < 1:
            return time.sleep(seconds)
        until(lambda: list(max((tmp_path / "attack").iterdir()).glob("tmp/*")))

    (tmp_path / "keeper.py").write_text(CARELESS)
    monkeypatch.setattr(attack, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(attack, "PRELUDE", f"processes.__file__ = {str(tmp_path / 'keeper.py')!r}")
    monkeypatch.setattr(attack, "COMMANDS", {"notebook": attack.COMMANDS["notebook"]})
    monkeypatch.setattr(attack, "SIGNALS", (signal.SIGKILL, signal.SIGTERM))
    monkeypatch.setattr(attack, "EARLIEST_SECONDS", 1.0)
    monkeypatch.setattr(attack, "LATEST_SECONDS", 1.0)
    monkeypatch.setattr(attack, "POLITE_SECONDS", 0.5)
    monkeypatch.setattr(attack, "KILLED_SECONDS", 1.0)
    outcome = attack.attack(2, 1, tmp_path / "attack")
    assert outcome.tried == 2 and {what: len(trials) for what, trials in outcome.failures.items()} == {
        "left behind": 2, "too slow": 1, "a record lies": 1}
    assert json.dumps(outcome.failures).count("sleep 600") == 2
