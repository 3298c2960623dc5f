"""Start child processes that end when this process ends, and handle signals without losing any.

Each child is started by a keeper: a small process (this file, run as a script) whose standard input
is a pipe from this process. The keeper makes the child's private folder and starts the child. When
the pipe closes, the keeper sends SIGTERM to the child, sends SIGKILL if the child does not end,
kills all its descendants, and removes the folder. The pipe closes when this process closes it or
ends, even if it is killed by SIGKILL, and even before the keeper first reads the pipe.

On Linux, a descendant whose parent ends becomes a child of the keeper, so the keeper also finds
descendants in another process group or session. On other systems, the keeper finds only
descendants whose parents are alive.

The keeper and its child hold a lock file in the folder as long as they are alive. If a keeper is
killed, its folder remains; the next keeper removes the folder, because its lock is free.
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

CHILD_SECONDS = 1.0         # from SIGTERM to SIGKILL, for the child
REST_SECONDS = 0.3          # from SIGTERM to SIGKILL, for the child's descendants
SWEEP_SECONDS = 5.0         # most seconds to wait for killed processes
TAIL_BYTES = 1500           # the end of a log, which is kept when its folder is removed
# name of the lock file. It contains the machine's name: if machines share the temporary folder, a
# keeper removes only folders of its own machine, because it may not see the locks of others.
HELD = f".held-on-{platform.node()}"
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def new_folder() -> Path:
    """Returns the path for a new private folder, which does not exist yet. The keeper makes and
    removes the folder, so that it is removed even if this process is killed."""
    return Path(tempfile.gettempdir()) / f"lpkit-{secrets.token_hex(8)}"


class Children:
    """The child processes of one command. After `end`, `over` is True."""

    def __init__(self):
        self._started: list[subprocess.Popen] = []
        self.over = False

    def start(self, command: Sequence[str], folder: Path, *, files: Mapping[str, Any] | None = None,
              log: str | None = None, cwd: Path | None = None, env: Mapping[str, str] | None = None,
              fds: Collection[int] = ()) -> subprocess.Popen:
        """Start `command` under a keeper, and return the keeper's process. Use it in a `with`
        block: the end of the block ends the command. The keeper exits with the exit code of the
        command (128 + the signal number if a signal ended the command). Before it exits, it writes
        the last TAIL_BYTES of `log` to its standard output.

        folder: from `new_folder`; mode 0700
        files:  relative path -> content, text or a value that becomes JSON; mode 0600
        log:    the file in `folder` for the command's output; None: our standard error
        fds:    open files that the command inherits under the same numbers
        """
        keeper = subprocess.Popen(
            [sys.executable, "-P", __file__], env=env, pass_fds=fds, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
        self._started.append(keeper)
        job = {"command": list(map(str, command)), "folder": str(folder), "log": log,
                "files": dict(files or {}), "cwd": cwd and str(cwd), "fds": list(fds)}
        if not self.over:
            # errors: the keeper has ended, or `end` has closed the pipe
            with contextlib.suppress(OSError, ValueError):
                keeper.stdin.write(json.dumps(job) + "\n")
                keeper.stdin.flush()
        if self.over:       # `end` was called before or meanwhile
            end(keeper)
        return keeper

    def end(self) -> None:
        """Let the keepers of all children end them, and do not wait. Children that are started
        later are ended at once. A signal handler may call this method: it raises nothing, and may
        be called several times."""
        self.over = True
        for keeper in list(self._started):
            end(keeper)


def end(keeper: subprocess.Popen) -> None:
    """Close the pipe to a keeper, which then ends its child."""
    with contextlib.suppress(OSError, ValueError):
        keeper.stdin.close()


def hear(work: Callable[[], Any], stop: Callable[[], None]) -> tuple[Any, int]:
    """Call `work` in a thread. On SIGINT, SIGTERM and SIGHUP, call `stop`, which must make `work`
    return. Returns (the result of `work`, 0), or (None, the number of the first signal).

    Why a thread: an exception from a signal handler is lost if it interrupts a destructor or a
    callback, and a handler cannot run during a long call into C. So the main thread only waits for
    the bytes that signals write into a pipe (`signal.set_wakeup_fd`).
    """
    received = 0
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with heard_by(lambda *_: None) as numbers, ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            # byte 0, which is not the number of a signal, ends the loop below
            done.add_done_callback(lambda _: os.write(writer, b"\0"))
            while number := os.read(reader, 1)[0]:
                if number in numbers:
                    received = received or number
                    stop()
        return (None, received) if received else (done.result(), 0)
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


class Channel:
    """Messages to and from another process over a socket. A message is one line of JSON: [kind,
    value]. When `receive` finds that the other process has closed its end or has ended, `over`
    becomes True. Messages to a process that has ended are lost without an error."""

    def __init__(self, end: socket.socket | int):
        self.socket = socket.socket(fileno=end) if isinstance(end, int) else end
        self.over = False
        self._part = b""            # the received part of an incomplete message
        self._unsent = bytearray()
        self._sending = threading.RLock()       # a signal handler may send while its thread sends

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: str, value: Any = None) -> None:
        """Sends a message, after the rest of the posted messages. Waits for a busy reader."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(self._unsent + _message(kind, value))
            self._unsent.clear()

    def post(self, kind: str, value: Any = None) -> None:
        """Sends a message without waiting for a busy reader. `flush` sends the rest later."""
        self._unsent += _message(kind, value)
        self.flush()

    def flush(self) -> None:
        """Sends as much of the posted messages as the reader takes now."""
        with contextlib.suppress(OSError):      # the reader takes no more now, or has ended
            while self._unsent:
                del self._unsent[:self.socket.send(self._unsent[:1 << 16], socket.MSG_DONTWAIT)]

    def receive(self, wait: bool = False) -> list[tuple[str, Any]]:
        """Returns the messages that have arrived. With `wait`, waits until some bytes arrive or the
        channel is `over`."""
        try:
            some = self.socket.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        # the other process ended before it read everything, or our end is closed
        except OSError:
            some = b""
        self.over = not some
        *lines, self._part = (self._part + some).split(b"\n")
        return [tuple(json.loads(line)) for line in lines]

    def finish(self) -> None:
        """Closes the channel for sending. Messages can still be received."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close our end of the channel."""
        self.over = True
        self.socket.close()


def _message(kind: str, value: Any) -> bytes:
    """Return the line of a message: b'["loss", 2.5]\\n'."""
    return f"{json.dumps([kind, value])}\n".encode()


def tell(line: str) -> None:
    """Prints a line to standard error, with control characters escaped."""
    with contextlib.suppress(OSError):      # the terminal is closed
        print(in_one_line(line), file=sys.stderr, flush=True)


# --- the keeper

def keep() -> int | str:
    """Run the keeper: start the command that standard input describes, and end it when standard
    input closes. Returns the exit code, or an error message."""
    # A keeper ends only when its pipe closes, not by a signal such as Ctrl-C. Signals get a handler
    # that does nothing; the child would inherit SIG_IGN and then ignore SIGTERM.
    for number in POLITE:
        signal.signal(number, lambda *_: None)
    line = sys.stdin.readline()
    if not line.endswith("\n"):     # the parent ended before it had written the whole line
        return 0
    job = json.loads(line)
    folder = Path(job["folder"])
    held = None
    try:
        remove_abandoned(folder.parent)
        held = make_and_hold(folder)
        for name, text in job["files"].items():
            _write_private(folder / name, text if isinstance(text, str) else json.dumps(text))
        code = _run(job, held)
        if job["log"]:
            with contextlib.suppress(OSError):      # the parent has ended
                os.write(1, (folder / job["log"]).read_bytes()[-TAIL_BYTES:])
    except OSError as error:
        return f"lpkit: cannot start {job['command'][0]}: {error}"
    finally:
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
    return code if code >= 0 else 128 - code


def make_and_hold(folder: Path) -> int:
    """Make a folder (mode 0700) with a lock file in it, and lock the file. Return the file's
    descriptor. Raises OSError.

    Between the creation of the lock file and the lock, another keeper can take the file for
    abandoned, lock it, and remove the folder (`remove_abandoned`). Then start again."""
    while True:
        folder.mkdir(mode=0o700)
        # error: the folder has been removed since it was made
        with contextlib.suppress(FileNotFoundError):
            held = os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # waits while another keeper removes the folder; without flock on this filesystem, no
            # keeper can lock the file, so no keeper removes the folder
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX)
            # the lock may be on a file that has been removed meanwhile
            if os.path.exists(folder / HELD):
                return held
            os.close(held)


def remove_abandoned(place: Path) -> None:
    """Removes the folders in `place` that keepers left when they were killed: folders of this user
    and this machine whose lock is free."""
    for lock in place.glob(f"lpkit-*/{HELD}"):
        # errors: another user's folder, a link, or a lock that is held
        with contextlib.suppress(OSError), \
                open(os.open(lock, os.O_RDWR | os.O_NOFOLLOW), "rb") as held:
            status = lock.parent.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # If the folder was removed and made again since we opened its lock file
                # (`make_and_hold`), it has a new lock file, and its keeper is alive.
                if os.path.samestat(os.fstat(held.fileno()), os.stat(lock)):
                    shutil.rmtree(lock.parent)


def _write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read (mode 0600)."""
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _run(job: Mapping[str, Any], held: int) -> int:
    """Runs the command of `job`, as `Children.start` describes it. Returns its exit code after all
    its descendants have ended. `held`: the lock file, which the command inherits."""
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        out: Any = 2
        if job["log"]:
            path = Path(job["folder"], job["log"])
            out = stack.enter_context(open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "a"))
        child = subprocess.Popen(job["command"], cwd=job["cwd"], stdin=subprocess.DEVNULL,
                                 stdout=out, stderr=out, pass_fds=[*job["fds"], held])
    for fd in job["fds"]:
        os.close(fd)
    ended = threading.Event()
    threading.Thread(target=_end_at_eof, args=(child.pid, ended), daemon=True).start()
    while True:                     # also reaps adopted orphans, so that they do not stay zombies
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            break
    ended.set()
    sweep()
    return os.waitstatus_to_exitcode(status)


def _end_at_eof(pid: int, ended: threading.Event) -> None:
    """Wait until standard input closes, then end the process `pid`: SIGTERM, and SIGKILL if `ended`
    is not set within CHILD_SECONDS."""
    os.read(0, 1)
    with contextlib.suppress(ProcessLookupError):
        if not ended.is_set():
            os.kill(pid, signal.SIGTERM)
        if not ended.wait(CHILD_SECONDS):
            os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let descendants of this process become its children when their own parents end (Linux)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends. If `parent` is given and has already
    ended, kills this process at once."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    """Call prctl(2) on Linux; do nothing on other systems."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):      # Linux
        libc.prctl(option, value, 0, 0, 0)


def sweep() -> None:
    """End all descendants of this process, and wait until they are reaped."""
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
