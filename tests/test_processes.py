"""Only these tests catch a process or a private folder that outlives who started it, a folder that
is removed while somebody uses it, and a signal that is lost. See also tests/attack/processes.py."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

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
with processes.Children().start(["bash", "-c", sys.argv[1]], folder, files={{"secret/a": "x"}},
                                cwd=folder) as keeper:
    keeper.wait()
"""


def parent(place: Path, prelude: str = "") -> subprocess.Popen:
    (place / "tmp").mkdir()
    (place / "runtime").mkdir()
    return subprocess.Popen([sys.executable, "-c", PARENT.format(prelude=prelude), FAMILY],
                            env=os.environ | {"TMPDIR": str(place / "tmp"),
                                              attack.MARK: str(place)})


@contextlib.contextmanager
def until_the_end(process: subprocess.Popen):
    """An assertion that fails is reported, and not waited for until the parent's ten minutes are
    over."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


def test_nothing_outlives_a_parent_that_dies(tmp_path):
    with parent(tmp_path) as process, until_the_end(process):
        until(lambda: list(tmp_path.glob("tmp/*/ready")))
        # Parent, keeper, child and its sleep, orphans: on a busy machine they come after the word
        # that all is ready.
        until(lambda: len(attack.processes(tmp_path)) >= 6)
        (folder,) = (tmp_path / "tmp").iterdir()
        modes = [stat.S_IMODE(p.stat().st_mode)
                 for p in (folder, folder / "secret", folder / "secret" / "a")]
        assert modes == [0o700, 0o700, 0o600]
        begun = time.monotonic()
        process.kill()
    assert attack.until_nothing(tmp_path, begun + 3 * patience()) == []


def test_a_parent_that_dies_before_it_has_said_what_to_start(tmp_path):
    dies = "import os\nprocesses.json.dumps = lambda order: os.kill(os.getpid(), 9)"
    with parent(tmp_path, dies) as process:
        assert process.wait(10) == -9
    assert attack.until_nothing(tmp_path, time.monotonic() + 3 * patience()) == []


def test_half_an_order_is_none(tmp_path):
    done = subprocess.run([sys.executable, "-P", processes.__file__],
                          input=f'{{"folder": "{tmp_path}/a"', text=True,
                          capture_output=True, timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def channels():
    """The two ends of a channel, in one process."""
    ends = [processes.Channel(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_whole_and_in_order_however_they_are_cut(channels):
    ours, theirs = channels
    ours.send("told", {"loss": float("inf"), "text": "a\nb"})
    sent = processes._message("done", [None, "\u00e9" * 3])
    ours.socket.sendall(sent[:7])
    assert theirs.receive(wait=True) == [("told", {"loss": float("inf"), "text": "a\nb"})]
    assert theirs.receive() == [] and not theirs.over
    ours.socket.sendall(sent[7:])
    ours.send("ask")
    assert theirs.receive() == [("done", [None, "\u00e9" * 3]), ("ask", None)]


def test_a_busy_reader_loses_nothing_and_holds_up_nobody(channels):
    """More than the system keeps of a socket; what is sent at last comes last."""
    ours, theirs = channels
    got, due = [], [("told", [number, "x" * 4096]) for number in range(200)]
    for kind, value in due:
        ours.post(kind, value)
    sender = threading.Thread(target=ours.send, args=("values", 1))
    sender.start()
    while got[-1:] != [("values", 1)]:
        got += theirs.receive(wait=True)
    sender.join()
    assert got == [*due, ("values", 1)]


def test_who_has_said_all_is_over_and_hears_still(channels):
    ours, theirs = channels
    ours.finish()
    assert theirs.receive(wait=True) == [] and theirs.over
    theirs.send("values", [1])
    assert ours.receive(wait=True) == [("values", [1])] and not ours.over


def test_whoever_is_gone_is_over_and_what_is_sent_to_it_is_no_error(channels):
    """Also where it had read only a part, which a socket reports as an error of the reader."""
    ours, theirs = channels
    ours.send("told", 1)
    theirs.send("told", 2)
    theirs.close()
    for way in (ours.send, ours.post):
        way("ask", ["stop", ""])
    assert ours.receive(wait=True) == [("told", 2)]
    assert ours.receive(wait=True) == [] and ours.over
    ours.close()
    ours.finish()
    ours.send("ask")
    assert ours.receive() == []


def start(*command: str, children: processes.Children | None = None, **options) -> subprocess.Popen:
    return (children or processes.Children()).start(command, processes.new_folder(), **options)


def abandoned(place: Path, monkeypatch, kill_child: bool = True) -> Path:
    """The folder of a keeper that was killed, in `place`."""
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = processes.new_folder()
    command = ["bash", "-c", f"echo $$ > {place}/pid; exec sleep 600"]
    with processes.Children().start(command, folder, files={"secret": "x"}) as keeper:
        until((place / "pid").exists)
        until(lambda: (place / "pid").read_text().strip())
        keeper.kill()
    if kill_child:
        pid = int((place / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}/fd").exists()
              or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    assert (folder / "secret").exists()
    return folder


def test_the_folder_of_a_killed_keeper_goes_when_the_next_one_begins(tmp_path, monkeypatch):
    folder = abandoned(tmp_path, monkeypatch)
    with start("sleep", "600") as other:        # lives, and so does its folder
        until(lambda: not folder.exists())
        until(lambda: len(list(tmp_path.glob(f"lpkit-*/{processes.HELD}"))) == 1)
        with start("true") as keeper:
            assert keeper.wait(10) == 0
        assert len(list(tmp_path.glob("lpkit-*"))) == 1
        processes.end(other)


def test_what_somebody_may_still_use_stays(tmp_path, monkeypatch):
    """Its child lives; it belongs to another; it is a link; another machine of the same name for
    TMPDIR holds it; nobody says who."""
    folder = abandoned(tmp_path, monkeypatch, kill_child=False)
    far, strange, other = (tmp_path / f"lpkit-{letter * 16}" for letter in "abc")
    far.mkdir()
    (far / ".held-on-another-machine").touch()
    strange.mkdir()
    (tmp_path / "aim").mkdir()
    (tmp_path / "aim" / processes.HELD).touch()
    other.symlink_to("aim")
    kept = [folder, far, strange, other, tmp_path / "aim"]
    if os.geteuid() == 0:
        theirs = tmp_path / f"lpkit-{'d' * 16}"
        theirs.mkdir()
        (theirs / processes.HELD).touch()
        os.chown(theirs, 12345, -1)
        kept.append(theirs)
    try:
        with start("true") as keeper:
            assert keeper.wait(10) == 0
        assert all(path.exists() for path in kept)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_folder_that_is_taken_away_before_it_is_held_is_made_again(tmp_path, monkeypatch):
    """Between its making and its lock it looks like an abandoned one."""
    lock, taken = fcntl.flock, []

    def late(handle, how):
        if not taken:
            taken.append(1)
            shutil.rmtree(tmp_path / "folder")
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    held = processes.make_and_hold(tmp_path / "folder")
    assert taken and (tmp_path / "folder" / processes.HELD).exists()
    os.close(held)


def test_a_folder_that_is_made_again_is_not_removed_as_the_abandoned_folder(tmp_path, monkeypatch):
    """Another keeper removes the abandoned folder, and its owner makes it again, after
    `remove_abandoned` has opened the old lock file and before it locks the file."""
    folder, descriptors = tmp_path / f"lpkit-{'a' * 16}", []
    os.close(processes.make_and_hold(folder))

    def locks_late(file, operation):
        monkeypatch.undo()
        shutil.rmtree(folder)
        descriptors.append(processes.make_and_hold(folder))
        fcntl.flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", locks_late)
    processes.remove_abandoned(tmp_path)
    (descriptor,) = descriptors
    assert (folder / processes.HELD).exists()
    os.close(descriptor)
    processes.remove_abandoned(tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize("script, code", [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_end_of_the_child_is_the_keepers(script, code):
    with start("bash", "-c", f"echo first; echo last >&2; {script}", log="log") as keeper:
        assert keeper.wait(10) == code and keeper.stdout.read() == "first\nlast\n"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capfd):
    with processes.Children().start(["true"], tmp_path / "no" / "folder") as keeper:
        assert keeper.wait(10) == 1
    assert capfd.readouterr().err.startswith("lpkit: cannot start true: [Errno 2]")


def test_what_is_left_when_the_child_ends_is_ended(tmp_path):
    leaves = f"setsid bash -c 'trap \"\" TERM; sleep 600; true' & echo $! > {tmp_path}/pid"
    with start("bash", "-c", leaves) as keeper:
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
    before = signal.signal(sent, signal.SIG_DFL)        # also where somebody said nohup
    for _ in range(8):
        stop = threading.Event()

        def work(stop=stop):
            os.kill(os.getpid(), sent)
            while not stop.is_set():
                Slow()

        assert processes.hear(work, stop.set) == (None, sent)
    assert signal.signal(sent, before) is signal.SIG_DFL


def test_hearing_returns_what_was_done_and_raises_what_was_raised():
    assert processes.hear(lambda: 5, lambda: None) == (5, 0)
    with pytest.raises(ZeroDivisionError):
        processes.hear(lambda: 1 / 0, lambda: None)


def test_who_says_nohup_outlives_the_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hangs_up = lambda: os.kill(os.getpid(), signal.SIGHUP)
        assert processes.hear(hangs_up, lambda: None) == (None, 0)
    finally:
        signal.signal(signal.SIGHUP, before)
