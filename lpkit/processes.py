"""Processes that end with this one, however it ends, and signals that are not lost.

A child is started under a keeper: a small process (this file, run as a script) to which we hold a
pipe. It makes the child's private folder and starts the child. When the pipe closes, because we
closed it or died (also of SIGKILL, also before the keeper first looked), it asks the child to end,
ends it, ends all that descends from it, and removes the folder. On Linux orphans become the
keeper's children, so a descendant cannot hide by leaving its parent, group or session; elsewhere
those are found whose parents live. A keeper that is killed leaves its folder, and the next keeper
removes it when nobody holds its lock: the keeper and its child hold that for life.
Sources: prctl(2), PR_SET_CHILD_SUBREAPER; signal.set_wakeup_fd of the Python library.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from lpkit.errors import in_one_line
from lpkit.signals import POLITE, heard_by

CHILD_SECONDS = 1.0         # after SIGTERM, before SIGKILL: for the child itself,
REST_SECONDS = 0.3          # and for what it left
SWEEP_SECONDS = 5.0         # for the system to bury what was killed
TAIL_BYTES = 1500           # of a log that goes with its folder
HELD = f".held-on-{platform.node()}"    # a folder for several machines may have locks for each
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def new_folder() -> Path:
    """The name of a private folder, which the keeper makes: then nobody can die between making it
    and having it removed."""
    return Path(tempfile.gettempdir()) / f"lpkit-{secrets.token_hex(8)}"


class Children:
    """The processes that one command starts."""

    def __init__(self):
        self._started: list[subprocess.Popen] = []
        self.over = False

    def start(self, command: Sequence[str], folder: Path, *, files: Mapping[str, Any] | None = None,
              log: str | None = None, cwd: Path | None = None, env: Mapping[str, str] | None = None,
              fds: Collection[int] = ()) -> subprocess.Popen:
        """The keeper of `command`. `with` it, the command ends at the latest when the block does.
        It exits as the command did (128 + the signal that ended it), and its standard output is
        then the end of `log`.

        folder: of `new_folder`; mode 0700, with `files` by relative path, mode 0600: text, or what
                becomes JSON
        log:    the file in `folder` for all that the command says; None: our standard error
        fds:    open files that the command inherits under the same numbers
        """
        keeper = subprocess.Popen(
            [sys.executable, "-P", __file__], env=env, pass_fds=fds, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
        self._started.append(keeper)
        told = {"command": list(map(str, command)), "folder": str(folder), "log": log,
                "files": dict(files or {}), "cwd": cwd and str(cwd), "fds": list(fds)}
        if not self.over:
            with contextlib.suppress(OSError, ValueError):  # it is gone; or `end` closed the pipe
                keeper.stdin.write(json.dumps(told) + "\n")
                keeper.stdin.flush()
        if self.over:       # since before, or since a moment ago
            end(keeper)
        return keeper

    def end(self) -> None:
        """Let them all end, and those started from now on; wait for none. For a signal: it raises
        nothing, and may be called again."""
        self.over = True
        for keeper in list(self._started):
            end(keeper)


def end(keeper: subprocess.Popen) -> None:
    with contextlib.suppress(OSError, ValueError):
        keeper.stdin.close()


def hear(work: Callable[[], Any], stop: Callable[[], None]) -> tuple[Any, int]:
    """Do `work` while SIGINT, SIGTERM and SIGHUP call `stop`, which must make it end. Returns its
    result and 0, or None and the signal.

    The work is done in a thread. An exception that a handler raises is lost when it interrupts a
    destructor or a callback, and a handler waits for a long call into C; so the main thread does
    nothing but read the bytes that the signals write into a pipe.
    """
    heard = 0
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with heard_by(lambda *_: None) as numbers, ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            done.add_done_callback(lambda _: os.write(writer, b"\0"))
            while number := os.read(reader, 1)[0]:
                if number in numbers:
                    heard = heard or number
                    stop()
        return (None, heard) if heard else (done.result(), 0)
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


class Channel:
    """Messages to and from another process over a socket: a kind and a value that becomes JSON, in
    a line each. Where the other has closed its end, or is gone, this end is `over`, and what is
    sent is lost without an error."""

    def __init__(self, end: socket.socket | int):
        self.socket = socket.socket(fileno=end) if isinstance(end, int) else end
        self.over = False
        self._part = b""            # of a message that has not arrived whole
        self._unsent = bytearray()
        self._sending = threading.RLock()       # a signal may send while its thread sends

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: str, value: Any = None) -> None:
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(self._unsent + _message(kind, value))
            self._unsent.clear()

    def post(self, kind: str, value: Any = None) -> None:
        """Sends it without waiting for a busy reader; the rest leaves by `flush`."""
        self._unsent += _message(kind, value)
        self.flush()

    def flush(self) -> None:
        """Sends as much of what was posted as the reader takes now."""
        with contextlib.suppress(OSError):      # it takes no more now; or it is gone
            while self._unsent:
                del self._unsent[:self.socket.send(self._unsent[:1 << 16], socket.MSG_DONTWAIT)]

    def receive(self, wait: bool = False) -> list[tuple[str, Any]]:
        """Returns the messages that have arrived. `wait`: until something has, or it is `over`."""
        try:
            some = self.socket.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:             # it is gone, before it had read everything; or closed here
            some = b""
        self.over = not some
        *lines, self._part = (self._part + some).split(b"\n")
        return [tuple(json.loads(line)) for line in lines]

    def finish(self) -> None:
        """Says that nothing more will be sent; messages still arrive."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.over = True
        self.socket.close()


def _message(kind: str, value: Any) -> bytes:
    return f"{json.dumps([kind, value])}\n".encode()


def tell(line: str) -> None:
    """Prints a line to standard error, and nothing that a terminal would obey."""
    with contextlib.suppress(OSError):      # the terminal is closed
        print(in_one_line(line), file=sys.stderr, flush=True)


# --- the keeper

def keep() -> int | str:
    """Do what standard input says, until it closes. Returns the exit code, or what is wrong."""
    for number in POLITE:           # the pipe alone says when; a handler, since exec resets it
        signal.signal(number, lambda *_: None)
    line = sys.stdin.readline()
    if not line.endswith("\n"):     # our parent died before it had said everything
        return 0
    told = json.loads(line)
    folder = Path(told["folder"])
    held = None
    try:
        remove_abandoned(folder.parent)
        held = make_and_hold(folder)
        for name, text in told["files"].items():
            _write_private(folder / name, text if isinstance(text, str) else json.dumps(text))
        code = _run(told, held)
        if told["log"]:
            with contextlib.suppress(OSError):      # nobody listens any more
                os.write(1, (folder / told["log"]).read_bytes()[-TAIL_BYTES:])
    except OSError as error:
        return f"lpkit: cannot start {told['command'][0]}: {error}"
    finally:
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
    return code if code >= 0 else 128 - code


def make_and_hold(folder: Path) -> int:
    """The folder's lock file, open and locked; with it, the folder is made (0700). Raises
    OSError."""
    while True:
        folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):    # taken for an abandoned one in between
            held = os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with contextlib.suppress(OSError):          # no flock here: nobody will remove it
                fcntl.flock(held, fcntl.LOCK_EX)
            if os.path.exists(folder / HELD):
                return held
            os.close(held)


def remove_abandoned(place: Path) -> None:
    """The folders in `place` of keepers of this user and machine that were killed."""
    for lock in place.glob(f"lpkit-*/{HELD}"):
        # another's, or a link, or one that is held
        with contextlib.suppress(OSError), \
                open(os.open(lock, os.O_RDWR | os.O_NOFOLLOW), "rb") as held:
            status = lock.parent.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _run(told: Mapping[str, Any], held: int) -> int:
    """The exit code of the command, when none of its descendants is left."""
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        out: Any = 2
        if told["log"]:
            path = Path(told["folder"], told["log"])
            out = stack.enter_context(open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "a"))
        child = subprocess.Popen(told["command"], cwd=told["cwd"], stdin=subprocess.DEVNULL,
                                 stdout=out, stderr=out, pass_fds=[*told["fds"], held])
    for fd in told["fds"]:
        os.close(fd)
    ended = threading.Event()
    threading.Thread(target=_end_at_eof, args=(child.pid, ended), daemon=True).start()
    while True:                     # also orphans, that none of them stays a zombie
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            break
    ended.set()
    sweep()
    return os.waitstatus_to_exitcode(status)


def _end_at_eof(pid: int, ended: threading.Event) -> None:
    os.read(0, 1)
    with contextlib.suppress(ProcessLookupError):
        if not ended.is_set():
            os.kill(pid, signal.SIGTERM)
        if not ended.wait(CHILD_SECONDS):
            os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Processes that descend from this one, and whose parent ends, become its children."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int | None = None) -> None:
    """This process gets SIGKILL when its parent ends; at once where that was `parent`, and ended
    before this was called."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):      # Linux
        libc.prctl(option, value, 0, 0, 0)


def sweep() -> None:
    """End what descends from this process, and wait until it is buried."""
    keeper = psutil.Process()
    for number, seconds in ((signal.SIGTERM, REST_SECONDS), (signal.SIGKILL, SWEEP_SECONDS)):
        signalled, deadline = set(), time.monotonic() + seconds
        while (left := set(keeper.children(recursive=True))) and time.monotonic() < deadline:
            for process in left - signalled:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            signalled |= left
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(keep())
