"""JupyterHub's configuration file for `lpkit room`. LPKIT_ROOM names the room.

`Desk` starts each learner's lab as a separate Unix user. If this machine allows control groups
(version 1 or 2), the learner's share of memory limits all kernels of a lab together, and all labs
have equal weights for the processors. Otherwise, the share limits each process (by RLIMIT_DATA,
which counts allocated memory but not the address space that CUDA reserves), and the hub's log says
so. Each lab has a separate log. `Desk` writes the states of labs into `labs.json`; the map, the
teacher's terminal and the learner's page read failures from this file.
Sources: JupyterHub 6, `LocalProcessSpawner`; cgroups(7); getrlimit(2).
"""

import asyncio
import contextlib
import ctypes
import fcntl
import html
import json
import os
import resource
import secrets
import shutil
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property, partial
from hmac import compare_digest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jupyterhub.auth import Authenticator
from jupyterhub.spawner import LocalProcessSpawner, SpawnException
from jupyterhub.utils import wait_for_http_server
from tornado.netutil import bind_unix_socket
from traitlets import Bool, Unicode

from hosting import python
from hosting import room as rooms
from hosting.lab import FIRST, LOCAL
from lpkit import files
from lpkit.errors import in_one_line
from lpkit.processes import prctl

PR_SET_NO_NEW_PRIVS, CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 38, 0x40000000, 0x8914, 1
LOOK_SECONDS = 1.0      # seconds between checks of a starting server
START_SECONDS = 300.0   # a lab that does not answer within this time has failed
PROCESSES = 400         # most processes and threads of a learner
FILE_BYTES = 8 << 30    # largest file of a learner
OPEN_FILES, HUB_FILES = 4096, 1 << 20   # per process of a learner; of the hub, for all connections
CGROUPS = Path("/sys/fs/cgroup")
GROUP = "lpkit-room"


class Codes(Authenticator):
    """Authenticates learners by the names and codes in the room's file."""

    folder = Unicode().tag(config=True)

    async def authenticate(self, handler: Any, data: dict[str, str]) -> str | None:
        member = rooms.read(Path(self.folder)).members.get(data["username"])
        # a member who came through another authenticator has no code; "" must not match it
        code = member.code if member and member.code else rooms.new_code()
        right = compare_digest(code.encode(), data["password"].strip().lower().encode())
        return data["username"] if member and right else None


class Desk(LocalProcessSpawner):
    """Starts and ends the server of one learner."""

    folder = Unicode().tag(config=True)
    own_network = Bool(True, help="Give each lab a loopback and nothing else.").tag(config=True)
    _began = 0.0        # time.monotonic() at the start

    @property
    def room(self) -> rooms.Room:
        return rooms.read(Path(self.folder))

    @property
    def home(self) -> Path:
        return Path(self.folder, "learners", self.user.name)

    @property
    def member(self) -> rooms.Member:
        return rooms.joined(self.room, self.user.name)

    async def start(self) -> tuple[str, int]:
        self._began = time.monotonic()
        try:
            uid = self.member.uid       # raises ConfigError for a name that no home may have
            self._note("starting")
            furnish(self.home, uid, Path(self.folder, "shared"))
            (path := rooms.log_path(Path(self.folder), self.user.name)).unlink(missing_ok=True)
            with path.open("ab") as log:
                self.popen_kwargs = {"pass_fds": (self.listener.fileno(),), "stdout": log,
                                     "stderr": log}
                address = await self._sit_down()
                if self.proc.poll() is not None:
                    self.log.warning("%s's lab ended while it started; starting it once more",
                                     self.user.name)
                    address = await self._sit_down()
            # without this check, the hub would wait for minutes: the socket accepts connections
            if self.proc.poll() is not None:
                raise self._failure("The lab ended twice while it started")
        except Exception as error:
            self._note("failed", str(getattr(error, "jupyterhub_message", error)))
            raise
        self._note("open")
        return address

    def _failure(self, what: str) -> SpawnException:
        line = rooms.last_line(Path(self.folder), self.user.name) or "(none)"
        error = SpawnException(what, reason="lab", status_code=500)
        error.jupyterhub_message = f"{what}. The last line of its log: {line}"
        return error

    def _note(self, state: str, reason: str = "") -> None:
        """Write the lab's state into the file that `rooms.labs` reads. The state "" removes it."""
        labs = rooms.labs(Path(self.folder)) | {self.user.name: {
            "state": state, "since": time.time(), "reason": in_one_line(reason)[:500]}}
        try:
            files.write_atomically(Path(self.folder, "hub", "labs.json"), json.dumps(
                {name: lab for name, lab in labs.items() if lab["state"]}), 0o600)
        except OSError as error:        # a full disk must not keep the hub from ending a lab
            self.log.error("%s's lab is %r %r, which cannot be noted: %s", self.user.name, state,
                           reason, error)

    def clear_state(self) -> None:
        """Remove the lab's state, except for a failure. JupyterHub calls this before a start and
        after an end."""
        super().clear_state()
        lab = rooms.labs(Path(self.folder)).get(self.user.name)
        if lab and lab["state"] != "failed":
            self._note("")

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the texts that the learner's page shows while the lab starts. Ends when the hub
        closes this generator."""
        while True:
            seconds = time.monotonic() - (self._began or time.monotonic())
            line = rooms.last_line(Path(self.folder), self.user.name)
            yield {"progress": round(90 * seconds / (seconds + 20)), "message":
                   f"Your lab has been starting for {seconds:.0f} s. {line}"}
            await asyncio.sleep(2 * LOOK_SECONDS)

    @cached_property
    def listener(self) -> socket.socket:
        """The socket of the learner's server. The hub keeps it open, so that no other user can take
        the port of a server that has died."""
        return socket.create_server((LOCAL, 0), backlog=128)

    async def _sit_down(self) -> tuple[str, int]:
        """Start the server, and wait until it answers or has ended. Returns its address and port.
        Raises SpawnException if it does not answer within START_SECONDS."""
        self.port = self.listener.getsockname()[1]
        ip, port = await super().start()
        url = f"http://{ip}:{port}{self.server.base_url}api"
        while self.proc.poll() is None:
            # a timeout is needed: the open socket accepts connections
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wait_for_http_server(url), LOOK_SECONDS)
                break
            if time.monotonic() > self._began + START_SECONDS:
                raise self._failure(f"The lab did not answer within {START_SECONDS:.0f} s")
        return ip, port

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return the function that the new process calls as root, before it becomes the learner's
        server."""
        most = self.room.memory_bytes
        groups = own_groups(name, most)
        if not groups:
            self.log.warning("no control groups can be made here: memory is limited by process")
        return partial(sit_down, self.member.uid, self.home, groups, most, self.own_network)

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Return the environment of the learner's server."""
        room, home = self.room, str(self.home)
        threads = str(room.threads)
        mine = {"HOME": home, "USER": self.user.name, "LOGNAME": self.user.name,
                "SHELL": "/bin/bash", "TMPDIR": f"{home}/tmp",
                "PATH": os.pathsep.join((f"{sys.prefix}/bin", os.defpath)),
                "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
                "LPKIT_IDLE_SECONDS": str(room.idle_seconds),
                "JUPYTER_RUNTIME_DIR": f"{rooms.SOCKETS}/{self.member.uid}",
                "LPKIT_LISTENER": str(self.listener.fileno())}
        if room.gpus:
            gpu = str(self.member.uid % room.gpus)
            mine |= {"CUDA_VISIBLE_DEVICES": gpu, "LPKIT_TURNS": f"{room.folder}/turns/{gpu}"}
        if self.user_options.get("share"):
            mine["LPKIT_PROGRESS"] = str(room.socket_path("reports"))
        return env | mine

    def options_from_form(self, form: dict[str, list[str]]) -> dict[str, bool]:
        return {"share": form.get("share") == ["yes"]}

    def move_certs(self, paths: Any) -> Any:
        return paths


def furnish(home: Path, uid: int, shared: Path) -> None:
    """Make a learner's home with a copy of the shared caches, if it does not exist. Root fills the
    new folder before the learner owns it, so the learner cannot redirect a write by a link."""
    if home.exists():
        return
    new = home.with_name(f".{home.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(0o700)
    (new / "tmp").mkdir()
    if (shared / "lpkit").is_dir():
        shutil.copytree(shared / "lpkit", new / ".cache" / "lpkit")
        for kept in sorted(new.glob(f".cache/lpkit/kernels-{os.geteuid()}*")):
            kept.rename(kept.with_name(kept.name.replace(f"-{os.geteuid()}", f"-{uid}", 1)))
    for folder, folders, names in os.walk(new, topdown=False):
        for name in (*folders, *names):
            os.lchown(os.path.join(folder, name), uid, uid)
    os.chown(new, uid, uid)
    new.rename(home)


def own_groups(name: str, memory_bytes: int) -> list[Path]:
    """Return the files `cgroup.procs` of a learner's control groups; missing groups are made. Empty
    if this machine does not allow control groups."""
    try:
        if (CGROUPS / "cgroup.controllers").exists():       # control groups, version 2
            top = CGROUPS / GROUP
            for above in (CGROUPS, top):
                above.mkdir(exist_ok=True)
                (above / "cgroup.subtree_control").write_text("+memory +cpu")
            return [_limited(top / name, "memory.max", memory_bytes)]
        return [_limited(CGROUPS / "memory" / GROUP / name, "memory.limit_in_bytes", memory_bytes),
                _limited(CGROUPS / "cpu" / GROUP / name)]
    except OSError:
        return []


def _limited(group: Path, file: str = "", most: int = 0) -> Path:
    group.mkdir(parents=True, exist_ok=True)
    if file:
        (group / file).write_text(str(most))
    return group / "cgroup.procs"


def sit_down(uid: int, home: Path, groups: list[Path], memory_bytes: int,
             own_network: bool) -> None:
    """Set limits, groups and the user of a new process, before it becomes the learner's server."""
    if own_network and not leave_network():
        os.write(2, b"no network namespace can be made here: learners share the machine's ports\n")
    (kernels := rooms.SOCKETS / str(uid)).mkdir(exist_ok=True)
    kernels.chmod(0o700)
    os.chown(kernels, uid, uid)
    for procs in groups:
        procs.write_text(str(os.getpid()))
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not groups:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o077)
    os.chdir(home)


def leave_network() -> bool:
    """Move this process into a new network namespace with a loopback interface. Open sockets stay
    open. Returns False if this machine does not allow it."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return False
    with socket.socket() as any_socket:     # struct ifreq: name (16 bytes), flags
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    return True


def configure(c: Any, room: rooms.Room, page: socket.socket, token: str) -> None:
    """Set JupyterHub's configuration `c`. `page`: the socket of the service for reports; `token`:
    the service's token for the hub's API."""
    hub = Path(room.folder, "hub")
    scheme = "https" if room.tls else "http"
    c.JupyterHub.bind_url = f"{scheme}://{room.address}:{room.port}/"
    # Unix sockets in root's folder, not ports: the process that answers here receives tokens
    c.JupyterHub.hub_bind_url, c.ConfigurableHTTPProxy.api_url = (
        f"http+unix://{quote(str(room.socket_path(name)), safe='')}" for name in ("hub", "proxy"))
    c.JupyterHub.hub_connect_url, c.JupyterHub.hub_socket_mode = c.JupyterHub.hub_bind_url, 0o666
    if room.tls:
        c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = room.tls
    c.JupyterHub.db_url = f"sqlite:///{hub}/hub.sqlite"
    c.JupyterHub.cookie_secret_file = str(hub / "cookie_secret")
    c.JupyterHub.authenticator_class = room.authenticator or Codes
    c.JupyterHub.spawner_class = Desk
    c.Codes.folder = c.Desk.folder = room.folder
    c.Desk.options_form = Path(__file__).with_name("agree.html").read_text()
    c.Codes.allowed_users = {*room.members}
    c.JupyterHub.template_vars = {"announcement": html.escape(room.title)}  # inserted as HTML
    c.Authenticator.admin_users = {room.teacher}
    c.ConfigurableHTTPProxy.command = [room.proxy]
    c.ConfigurableHTTPProxy.pid_file = str(hub / "proxy.pid")
    c.Spawner.cmd = python("hosting.desk")
    c.Spawner.env_keep = ["LANG", "LC_ALL", "PYTHONPATH", "LPKIT_SOLUTIONS"]
    c.Spawner.default_url = f"/lab/tree/{FIRST}"
    c.Spawner.start_timeout = c.Spawner.http_timeout = round(START_SECONDS) + 30
    c.JupyterHub.concurrent_spawn_limit = 0        # 0: no limit, since all learners start at once
    c.JupyterHub.load_roles = [{
        "name": "user", "scopes": ["self", "access:services!service=progress"]}, {
        "name": "server", "scopes": ["users:activity!user", "access:servers!server",
                                     "access:services!service=progress"]}]
    c.JupyterHub.services = [
        {"name": "progress", "url": f"http://{LOCAL}:{page.getsockname()[1]}", "api_token": token,
         "oauth_no_confirm": True}]


async def keep_progress(room: rooms.Room, hub_url: str, token: str, sockets: Sequence[socket.socket]
                        ) -> None:
    """Run the service for reports, and start it again whenever it ends. The hub keeps its sockets
    open, so that no other user can take them meanwhile, and requests wait."""
    scopes = json.dumps(["access:services", "access:services!service=progress"])
    env = os.environ | {
        "JUPYTERHUB_API_TOKEN": token, "JUPYTERHUB_API_URL": f"{hub_url}/hub/api",
        "JUPYTERHUB_BASE_URL": "/", "JUPYTERHUB_CLIENT_ID": "service-progress",
        "JUPYTERHUB_SERVICE_NAME": "progress", "JUPYTERHUB_OAUTH_ACCESS_SCOPES": scopes,
        "JUPYTERHUB_SERVICE_PREFIX": "/services/progress/", "LPKIT_ROOM": room.folder,
        "LPKIT_SOCKETS": ",".join(str(each.fileno()) for each in sockets),
        "LPKIT_TEACHER": room.teacher}
    while True:
        service = await asyncio.create_subprocess_exec(
            *python("hosting.progress"), env=env, pass_fds=[each.fileno() for each in sockets])
        print(f"the service of reports ended with {await service.wait()}", file=sys.stderr)
        await asyncio.sleep(1.0)


def listeners(room: rooms.Room) -> list[socket.socket]:
    """Return two listening sockets: a port for the teacher's page, and a Unix socket for reports in
    a folder that only root can change."""
    rooms.SOCKETS.mkdir(mode=0o755, exist_ok=True)
    rooms.SOCKETS.chmod(0o755)
    reports = bind_unix_socket(str(room.socket_path("reports")), mode=0o666)
    return [socket.create_server((LOCAL, 0), backlog=128), reports]


if "get_config" in globals():       # defined when JupyterHub runs this file, in its event loop
    with contextlib.suppress(OSError, ValueError):      # some containers do not allow it
        resource.setrlimit(resource.RLIMIT_NOFILE, (HUB_FILES, HUB_FILES))
    config, room = globals()["get_config"](), rooms.read(Path(os.environ["LPKIT_ROOM"]).parent)
    sockets, secret = listeners(room), secrets.token_hex(32)
    configure(config, room, sockets[0], secret)
    service = asyncio.ensure_future(        # noqa: RUF006  the event loop keeps it: it waits there
        keep_progress(room, config.JupyterHub.hub_bind_url, secret, sockets))
    if room.config:
        globals()["load_subconfig"](room.config)
