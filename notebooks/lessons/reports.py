"""Reports of a learner's progress (guesses, exercises and claims, without the learner's code) to
the teacher of a room, if the learner agreed.

The environment variable LPKIT_PROGRESS is the path of the Unix socket on which the room's service
listens (`notebooks/hosting/progress.py`). It is set if the learner agreed when the server started.
Only root can listen at that path, and the operating system tells the service which user connects,
so no token is sent.

A report is first written to the learner's outbox, a file. It is removed from the outbox after the
service has answered that the report is on disk, so a crash of the service loses no report. A report
may be sent twice; the service counts reports with equal ids once.
"""

import http.client
import json
import os
import secrets
import socket
import threading
import time
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any

from lessons import claims
from lpkit.files import data_dir, locked, own_folder, write_atomically

AGAIN_SECONDS = 2.0     # wait after a failed attempt; it doubles with each failure, up to 15 s
AT_ONCE = 50            # most reports in one message
MOST_TEXT = 300         # characters to which a text field is cut, which is the service's limit
_last = [time.monotonic()]      # time of this kernel's last report
_sending = threading.Lock()


def report(kind: str, **facts: Any) -> None:
    """Write a report of this kind with these facts to the outbox, and send it in a thread. Does
    nothing if the learner did not agree. Never raises and never waits for the service. The field
    `seconds` is the time since the previous report of this kernel."""
    if not (path := os.environ.get("LPKIT_PROGRESS")):
        return
    now = time.monotonic()
    seconds, _last[0] = now - _last[0], now
    line = {"id": secrets.token_hex(8), "kind": kind, "time": time.time(), "seconds": seconds,
            "notebook": Path(os.environ.get("JPY_SESSION_NAME", "")).stem,
            **{key: " ".join(value.split())[:MOST_TEXT] if isinstance(value, str) else value
               for key, value in facts.items()}}
    # a full disk, a number that JSON lacks, no thread left: a report must not break the notebook
    with suppress(OSError, ValueError, RuntimeError):
        own_folder(data_dir("course"), 0o700)
        with locked(_outbox().with_suffix(".lock")), _outbox().open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        threading.Thread(target=_send_all, args=[path], daemon=True).start()


def claim(sentence: str) -> AbstractContextManager[None]:
    """Return `lessons.claims.claim(sentence)`, which also reports its verdict when it shows its
    card."""
    return claims.claim(sentence, lambda state: report("claim", name=sentence, verdict=state))


def _outbox() -> Path:
    """Return the path of the outbox: a file with one report, a JSON text, per line."""
    return data_dir("course") / "outbox.jsonl"


def _send_all(path: str) -> None:
    """Send reports until the outbox is empty, unless another thread of this kernel is sending. The
    loop reads the outbox again after sending: a thread that found this thread busy has given up,
    and its report may have been written after this thread's last look."""
    with suppress(OSError, ValueError):
        while _outbox().read_text() and _sending.acquire(blocking=False):
            try:
                _empty(path)
            finally:
                _sending.release()


def _empty(path: str) -> None:
    """Send the reports in the outbox, up to AT_ONCE at a time, and remove those that were sent.
    After a failure, wait and try again."""
    wait = AGAIN_SECONDS
    while some := _outbox().read_text().splitlines()[:AT_ONCE]:
        try:
            send(path, some)
        except OSError:
            time.sleep(wait)
            wait = min(2 * wait, 15.0)
            continue
        with locked(_outbox().with_suffix(".lock")):
            left = [line for line in _outbox().read_text().splitlines() if line not in set(some)]
            write_atomically(_outbox(), "".join(f"{line}\n" for line in left))


class _OnSocket(http.client.HTTPConnection):
    """An HTTP connection to the Unix socket at `path`."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def send(path: str, lines: list[str]) -> None:
    """Send reports (one JSON text each) in one POST request. Raises OSError unless the service
    answers 200, which means that the reports are on disk."""
    connection = _OnSocket("localhost", timeout=20)
    connection.path = path
    with closing(connection):
        try:
            connection.request("POST", "/services/progress/report", f"[{','.join(lines)}]".encode())
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise OSError(f"the connection to the progress service failed: {error}") from error
    if status != 200:
        raise OSError(f"the progress service answered {status}, not 200")
