"""Only these tests catch a lock that two processes have, a file that is more open than the umask
says, and a link or a name that leads out of a folder."""

import errno
import fcntl
import os
import signal
import stat
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from lpkit import files, records
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.training import loop
from lpkit.training.background import start_each
from tests.attack import until


def forked(work) -> int:
    """A process that does `work` and ends; its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


@contextmanager
def child(work):
    """The same, which does not outlive the block."""
    pid = forked(work)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hold(lock, ready):
    with files.locked(lock):
        ready.touch()
        time.sleep(60)


def test_another_process_is_kept_out_and_a_killed_one_lets_go(tmp_path):
    lock, ready = tmp_path / "run" / ".lock", tmp_path / "ready"
    assert not files.is_locked(lock)
    with child(lambda: hold(lock, ready)) as pid:
        until(ready.exists)
        assert files.is_locked(lock)
        with pytest.raises(BlockingIOError) as caught:
            with files.locked(lock, wait=False):
                pass
        assert "\n" not in caught.value.strerror and str(lock) in caught.value.strerror
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
    assert not files.is_locked(lock)
    with files.locked(lock, wait=False):
        assert files.is_locked(lock)
    assert not files.is_locked(lock)
    assert {path.name for path in lock.parent.iterdir()} == {".lock"}


def test_increments_of_many_processes_are_all_counted(tmp_path):
    """Each reads, waits and writes under the lock; some are killed while they hold it."""
    lock, number = tmp_path / "lock", tmp_path / "number"
    number.write_text("0")

    def count():
        for _ in range(10):
            with files.locked(lock):
                seen = int(number.read_text())
                time.sleep(0.0005)
                number.write_text(str(seen + 1))

    def die():
        with files.locked(lock):
            os._exit(7)

    for process in [forked(work) for work in (count, die, count, die, count)]:
        assert exit_code(process) in (0, 7)
    assert number.read_text() == "30"


def test_looking_keeps_nobody_out(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()

    def look():
        while True:
            files.is_locked(lock)

    with child(look) as pid:
        for _ in range(200):
            with files.locked(lock, wait=False):
                pass
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)


@pytest.mark.parametrize("code, call", [
    (errno.ENOLCK, lambda path: files.locked(path).__enter__()),
    (errno.ENOSYS, lambda path: loop._owned(path.parent).__enter__()),
    (errno.EOPNOTSUPP, files.is_locked),
    (errno.EINVAL, lambda path: files.lockable(path.parent, "TMPDIR"))],
    ids=["locked", "a run", "is_locked", "lockable"])
def test_where_nothing_can_be_locked_one_sentence_says_so(tmp_path, monkeypatch, code, call):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"nothing can be locked in .* \(.*\), and two processes "
                                          r"could write there at once; .*local disk"):
        call(tmp_path / "lock")


# ---- modes

@contextmanager
def umask(bits):
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("bits", [0o077, 0o002, 0o177])
def test_what_is_written_is_as_open_as_the_umask_says(bits, tmp_path):
    with umask(bits):
        files.write_atomically(tmp_path / "whole", "x")
        records.write(tmp_path / "record", {})
        files.append_lines(tmp_path / "lines", ["x\n"])
        with files.whole_file(tmp_path / "copy") as temporary:
            assert mode(temporary) == 0o666 & ~bits, "and never more open on the way"
            temporary.write_text("x")
    assert {mode(path) for path in tmp_path.iterdir()} == {0o666 & ~bits}


def test_what_was_closed_stays_closed_when_it_is_replaced(tmp_path):
    for has in (0o600, 0o640, 0o644):
        (tmp_path / "file").write_text("old")
        (tmp_path / "file").chmod(has)
        with umask(0o022):
            files.write_atomically(tmp_path / "file", "new")
        assert mode(tmp_path / "file") == has and (tmp_path / "file").read_text() == "new"


def test_a_private_folder_is_made_closed_and_an_own_one_is_closed(tmp_path):
    with umask(0):
        folder = files.private_folder(tmp_path / "a" / "b" / "c")
    assert [mode(path) for path in (folder, *folder.parents[:2])] == [0o700, 0o755, 0o755]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o775)
    assert mode(files.own_folder(tmp_path / "open", 0o700)) == 0o700
    with umask(0):
        assert mode(files.own_folder(tmp_path / "new", 0o700)) == 0o700


def test_a_home_that_nobody_has_is_one_sentence(monkeypatch):
    for path in ("~nobody-here/x", "\udcff/x"):
        for variable, place in (("XDG_CACHE_HOME", files.cache_dir),
                                ("XDG_DATA_HOME", files.data_dir)):
            monkeypatch.setenv(variable, path)
            with pytest.raises(ConfigError, match=r"whom this machine does not|is not UTF-8"):
                place("course")
    assert files.expanded("~") == Path.home() and files.expanded("a/~b") == Path("a/~b")


# ---- links

@pytest.fixture(params=["link", "dangling", "loop", "null", "pipe", "folder", "hard"])
def planted(request, tmp_path):
    """A name in `inside` that is another thing's."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").mkdir()
    victim, path = tmp_path / "outside" / "victim", tmp_path / "inside" / "name"
    victim.write_text("theirs\nand a torn li")
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "hard":
        path.hardlink_to(victim)
    else:
        path.symlink_to({"link": victim, "dangling": victim.with_name("new"), "loop": path,
                         "null": "/dev/null", "folder": victim.parent}[request.param])
    return path


def outside(path):
    folder = path.parent.parent / "outside"
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


@pytest.mark.parametrize("write", [
    lambda path: files.append_lines(path, ["ours\n"]), lambda path: files.open_own(path, "wb"),
    lambda path: files.open_own(path, "rb"), files.is_locked,
    lambda path: files.locked(path).__enter__()], ids=["append", "w", "r", "is_locked", "locked"])
def test_nothing_is_opened_under_the_name_of_another_thing(planted, write):
    before = outside(planted)
    with pytest.raises(ConfigError, match=r"inside/name' (is a link|is a pipe|has other names)"):
        write(planted)
    assert outside(planted) == before


def test_a_folder_with_links_is_refused_and_links_alone_are_removed(planted):
    before = outside(planted)
    if not planted.is_file() or planted.is_symlink():
        with pytest.raises(ConfigError, match="inside/name' is a"):
            files.refuse_links(planted.parent)
        with pytest.raises(ConfigError, match="inside/name' is a"):
            files.own_folder(planted)
    files.remove(planted)
    assert not os.path.lexists(planted) and outside(planted) == before
    files.refuse_links(planted.parent)


def test_a_folder_is_made_and_a_file_in_its_place_is_named(tmp_path):
    assert files.own_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file' is a file where a folder is needed; remove it"):
        files.own_folder(tmp_path / "file")
    for write, content in ((files.append_lines, []), (files.write_atomically, "")):
        with pytest.raises(ConfigError, match="a' is a folder where a file is needed; remove it"):
            write(tmp_path / "a", content)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "file"}


@pytest.mark.parametrize("before, after", [
    (b"", b"c\n"), (b"a\nb\n", b"a\nb\nc\n"), (b"a\nb", b"a\nc\n"), (b"a", b"c\n")])
def test_lines_are_appended_to_whole_lines(before, after, tmp_path):
    (tmp_path / "lines").write_bytes(before)
    files.append_lines(tmp_path / "lines", ["c\n"])
    assert (tmp_path / "lines").read_bytes() == after


@pytest.mark.parametrize("name", ["", "..", "/root", "a/b", "a\\b", "a\0", "\x1b[2J", "\udc80",
                                  "ä" * 101, 3])
def test_names_of_a_series_stay_inside_its_folder(name, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be the name of a folder; use|must be text, got"):
        start_each({"a": Config(), name: Config()}, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert files.one_name("bf16, größer") == "bf16, größer"


def test_a_run_of_a_series_is_not_led_outside_its_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        start_each({"a": Config()}, out=tmp_path / "out").result()
    assert not list((tmp_path / "elsewhere").iterdir())
