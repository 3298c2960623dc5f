"""A room with real learners in it: the hub, its proxy, a server and kernels each, asked as a
browser asks.

Learners are other Unix users and must reach Python. Where it lies in a home that is closed to
others (pyenv in /root), the room is opened in a mount namespace of its own in which they may pass;
the machine's own permissions stay.
"""

import asyncio
import contextlib
import csv
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClosedError, websocket_connect

from lpkit import files
from tests.attack import patience

HERE = Path(__file__).parents[2]
PROXY = "configurable-http-proxy"
VERSION = "5.3.0"
PASS = """
set -e
mount --make-rprivate /
real=$(mktemp -d)
mount --bind /root "$real"
mount -t tmpfs -o mode=755 tmpfs /root
for name in $(ls -A "$real"); do
    if [ -d "$real/$name" ]; then mkdir "/root/$name"; mount --bind "$real/$name" "/root/$name"; fi
done
exec "$@"
"""


def proxy() -> str:
    """configurable-http-proxy, of this machine or fetched by npm once and kept in the cache. Empty
    where neither can be."""
    if installed := shutil.which(PROXY):
        return installed
    folder = files.cache_dir("npm") / f"{PROXY}-{VERSION}"
    path = folder / "node_modules" / ".bin" / PROXY
    if not path.exists() and (npm := shutil.which("npm")):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([npm, "install", "--silent", "--no-audit", "--prefix", folder,
                        f"{PROXY}@{VERSION}"], check=False, timeout=300)
    return str(path) if path.exists() else ""


def why_no_room() -> str:
    """The reason, in one clause; empty: one can be opened here."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "a room is opened by root, on Linux"
    if not proxy():
        return f"neither {PROXY} nor npm, which brings it, is on this machine"
    if (passing() and subprocess.run(["unshare", "-m", "true"], check=False,
                                     capture_output=True).returncode):
        return "Python lies where others may not pass, and no mount namespace can be made here"
    return ""


def passing() -> list[str]:
    """How the room's process begins: as it is, or where others may pass through root's home."""
    closed = any(not folder.stat().st_mode & 1 for place in (sys.prefix, sys.base_prefix, HERE)
                 for folder in (Path(place), *Path(place).parents))
    return ["unshare", "-m", "bash", "-c", PASS, "-"] if closed else []


@contextlib.contextmanager
def passable_folder() -> Iterator[Path]:
    """pytest's own folders are closed to others, again and again."""
    folder = Path(tempfile.mkdtemp(prefix="lpkit-room-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield folder / "room"
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def opened(folder: Path, *words: str, port: int) -> Iterator[dict[str, Any]]:
    """What `lpkit room` prints, and the room until the block ends."""
    env = os.environ | {"PYTHONPATH": str(HERE)}
    command = [*passing(), sys.executable, "-m", "lpkit", "room", "--folder", str(folder), "--port",
               str(port), "--proxy", proxy(), "--json", *words]
    with open("/var/tmp/lpkit-tests-room", "w") as alone, contextlib.ExitStack() as stack:
        fcntl.flock(alone, fcntl.LOCK_EX)       # rooms of one machine share users and sockets
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, env=env,
            text=True))
        try:
            line = process.stdout.readline()
            assert line, f"no room: exit code {process.wait()}"
            yield json.loads(line) | {"pid": process.pid}
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def codes(folder: Path) -> dict[str, str]:
    return dict(list(csv.reader((folder / "codes.csv").read_text().splitlines()))[1:])


class Person:
    """One who has signed in by name and code, and has a token of their own."""

    def __init__(self, url: str, name: str, code: str):
        self.url, self.name, self.kernel = url, name, ""
        credentials = {"auth": {"username": name, "password": code}}
        self.token = ask(f"{url}/hub/api/users/{name}/tokens", credentials)["token"]

    def ask(self, path: str, payload: Any = None, method: str = "") -> Any:
        return ask(f"{self.url}{path}", payload, self.token, method)

    def start(self, **options: Any) -> float:
        """Returns the seconds until the server answers."""
        begun, self.kernel = time.monotonic(), ""
        self.ask(f"/hub/api/users/{self.name}/server", options)
        while not (server := self.ask(f"/hub/api/users/{self.name}").get("servers", {}).get("",
                {})).get("ready"):
            assert server, f"{self.name}'s server did not start"
            assert time.monotonic() - begun < 300 * patience(), (
                f"{self.name}'s server does not start")
            time.sleep(0.25)
        return time.monotonic() - begun

    def run(self, code: str, name: str = "03_number_formats.ipynb", seconds: float = 300) -> str:
        """What the code prints or raises, in this person's one kernel."""
        if not self.kernel:
            session = {"kernel": {"name": "python3"}, "name": name, "path": name,
                       "type": "notebook"}
            self.kernel = self.ask(f"/user/{self.name}/api/sessions", session)["kernel"]["id"]
        with ThreadPoolExecutor(1) as pool:     # a test with a browser has a loop of its own here
            try:
                return pool.submit(lambda: asyncio.run(asyncio.wait_for(self._run(code),
                    seconds))).result()
            except TimeoutError:
                raise AssertionError(f"{self.name}'s kernel has not ended {code[:60]!r} in "
                                     f"{seconds:g} s") from None

    async def _run(self, code: str) -> str:
        address = (f"{self.url.replace('http', 'ws', 1)}/user/{self.name}/api/kernels/"
                   f"{self.kernel}/channels")
        request = HTTPRequest(address, headers={"Authorization": f"token {self.token}"},
                              request_timeout=300, connect_timeout=300)
        while True:
            socket = await websocket_connect(request)
            try:
                return await _output(socket, code)
            # before it took the code: a browser connects again, too
            except WebSocketClosedError:
                await asyncio.sleep(0.1)
            finally:
                socket.close()
                # until the other side has closed, too
                while await socket.read_message() is not None:
                    pass


async def _output(socket: Any, code: str) -> str:
    me, output = uuid.uuid4().hex, ""
    header = {"msg_id": me, "username": "", "session": me, "msg_type": "execute_request",
              "version": "5.3"}
    await socket.write_message(json.dumps({
        "header": header, "parent_header": {}, "metadata": {}, "channel": "shell", "buffers": [],
        "content": {"code": code, "silent": False, "store_history": False, "allow_stdin": False}}))
    while (text := await socket.read_message()) is not None:
        message = json.loads(text)
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") == me:
            output += content.get("text", "") if kind == "stream" else ""
            output += f"{content['ename']}: {content['evalue']}" if kind == "error" else ""
            if kind == "status" and content["execution_state"] == "idle":
                return output
        elif kind == "status" and content["execution_state"] in ("restarting", "dead"):
            return f"{output}the kernel died"
    return f"{output}the connection ended"


def ask(url: str, payload: Any = None, token: str = "", method: str = "") -> Any:
    headers = {"Authorization": f"token {token}"} if token else {}
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, headers | {"Content-Type": "application/json"},
                                     method=method or ("POST" if data else "GET"))
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read()
    return json.loads(text) if text[:1] in b"{[" and text else text


def status(url: str, token: str = "") -> int:
    """Of a request that may be refused."""
    try:
        ask(url, token=token)
        return 200
    except urllib.error.HTTPError as error:
        with error:
            return error.code

