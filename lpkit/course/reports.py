"""What a learner's kernel tells the teacher of a room, if the learner agreed: guesses, exercises,
claims, and nothing of their text.

LPKIT_PROGRESS is the address of the room's service (`notebooks/lessons/progress.py`), and is there where the
learner agreed, as the server began. A report is first written to the learner's own outbox and leaves
it when the service has said that it keeps it, so a service that dies loses nothing: each report has
an id, and the same twice is one.
"""

import json
import os
import secrets
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from lpkit.files import data_dir, locked, own_folder, write_atomically

AGAIN_SECONDS = 2.0     # until the next try, and then longer
AT_ONCE = 200           # reports
_last = [time.monotonic()]
_sending = threading.Lock()


def report(kind: str, **facts: Any) -> None:
    """Never raises, and waits for nobody. `seconds` of a report are those since the one before it,
    in this kernel."""
    if not (url := os.environ.get("LPKIT_PROGRESS")):
        return
    now = time.monotonic()
    seconds, _last[0] = now - _last[0], now
    line = {"id": secrets.token_hex(8), "kind": kind, "time": time.time(), "seconds": seconds,
            "notebook": Path(os.environ.get("JPY_SESSION_NAME", "")).stem, **facts}
    with suppress(OSError, ValueError, RuntimeError):   # a full disk, no thread left
        own_folder(data_dir("course"), 0o700)
        with locked(_outbox().with_suffix(".lock")), _outbox().open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        threading.Thread(target=_send_all, args=[url], daemon=True).start()


def _outbox() -> Path:
    return data_dir("course") / "outbox.jsonl"


def _send_all(url: str) -> None:
    """Sends until nothing is left, or another thread of this kernel does. It looks again when it is
    done: what came just then found it at work."""
    with suppress(OSError, ValueError):
        while _outbox().read_text() and _sending.acquire(blocking=False):
            try:
                _empty(url)
            finally:
                _sending.release()


def _empty(url: str) -> None:
    wait = AGAIN_SECONDS
    while some := _outbox().read_text().splitlines()[:AT_ONCE]:
        try:
            send(url, some)
        except OSError:
            time.sleep(wait)
            wait = min(2 * wait, 15.0)
            continue
        with locked(_outbox().with_suffix(".lock")):
            left = [one for one in _outbox().read_text().splitlines() if one not in set(some)]
            write_atomically(_outbox(), "".join(f"{one}\n" for one in left))


def send(url: str, lines: list[str]) -> None:
    """Raises OSError where the service did not say that it keeps them."""
    request = urllib.request.Request(
        f"{url}report", f"[{','.join(lines)}]".encode(), method="POST",
        headers={"Authorization": f"token {os.environ.get('JUPYTERHUB_API_TOKEN', '')}"})
    # no proxy: it is this machine
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20).close()
