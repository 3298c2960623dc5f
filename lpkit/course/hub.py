"""What JupyterHub reads as its configuration when `lpkit room` starts it; LPKIT_ROOM names the room.

`Desk` starts a learner's server as a Unix user of its own, in a control group where this machine lets
us make one (both versions), so that all its kernels together have the learner's share of memory and
an equal weight of the processors. Elsewhere each process has the limit (RLIMIT_DATA, which counts
what a process has allocated and not what CUDA reserves), and the log says so.
Sources: JupyterHub 6, `LocalProcessSpawner`; cgroups(7); getrlimit(2).
"""

import asyncio
import os
import resource
import shutil
import sys
from collections.abc import Callable
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any

from jupyterhub.auth import Authenticator
from jupyterhub.spawner import LocalProcessSpawner
from jupyterhub.utils import can_connect
from traitlets import Unicode

from lpkit import files
from lpkit.course import room as rooms
from lpkit.course.lab import FIRST, LOCAL
from lpkit.processes import prctl

PR_SET_NO_NEW_PRIVS = 38
PROCESSES = 400         # threads count
FILE_BYTES = 8 << 30    # the largest file
CGROUPS = Path("/sys/fs/cgroup")
GROUP = "lpkit-room"
SOCKETS = Path("/run/lpkit")    # of kernels, by learner: their paths must be short
AGREE = """
<p>May your teacher see how you get on? What you guess and measure, which exercises you solve in how
many tries, and when, is then shown to the teacher of this room under a name that is drawn for you.
Nothing that you write is sent, and the teacher can delete all of it. You can change this when you
start your server again.</p>
<p><label><input type="radio" name="share" value="yes" required> yes</label> &nbsp;
<label><input type="radio" name="share" value="no"> no</label></p>
"""


class Codes(Authenticator):
    """Names and codes of the room's file."""

    folder = Unicode().tag(config=True)

    async def authenticate(self, handler: Any, data: dict[str, str]) -> str | None:
        member = rooms.read(Path(self.folder)).members.get(data["username"])
        right = compare_digest((member.code if member else rooms.new_code()).encode(),
                               data["password"].strip().lower().encode())
        return data["username"] if member and right else None


class Desk(LocalProcessSpawner):
    """One learner's server."""

    folder = Unicode().tag(config=True)

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
        furnish(self.home, self.member.uid, Path(self.folder, "shared"))
        address = await self._sit_down()
        if self.proc.poll() is not None:
            self.log.warning("%s's server ended while it started, and is started once more; what it "
                             "said stands above", self.user.name)
            address = await self._sit_down()
        return address

    async def _sit_down(self) -> tuple[str, int]:
        """Returns when the server listens, or has ended."""
        self.port = rooms.free_port(rooms.ports(self.member.uid))
        address = await super().start()
        while self.proc.poll() is None and not can_connect(*address):
            await asyncio.sleep(0.2)
        return address

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        most = self.room.memory_bytes
        groups = own_groups(name, most)
        if not groups:
            self.log.warning("no control groups can be made here: memory is limited by process")
        return partial(sit_down, self.member.uid, self.home, groups, most)

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        room, home = self.room, str(self.home)
        threads = str(room.threads)
        mine = {"HOME": home, "USER": self.user.name, "LOGNAME": self.user.name, "SHELL": "/bin/bash",
                "TMPDIR": f"{home}/tmp", "PATH": os.pathsep.join((f"{sys.prefix}/bin", os.defpath)),
                "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
                "JUPYTER_RUNTIME_DIR": f"{SOCKETS}/{self.member.uid}"}
        if room.gpus:
            gpu = str(self.member.uid % room.gpus)
            mine |= {"CUDA_VISIBLE_DEVICES": gpu, "LPKIT_TURNS": f"{room.folder}/turns/{gpu}"}
        if self.user_options.get("share"):
            mine["LPKIT_PROGRESS"] = room.progress_url
        return env | mine

    options_form = AGREE

    def options_from_form(self, form: dict[str, list[str]]) -> dict[str, bool]:
        return {"share": form.get("share") == ["yes"]}

    def move_certs(self, paths: Any) -> Any:
        return paths


def furnish(home: Path, uid: int, shared: Path) -> None:
    """Makes a home on its owner's first day, with a copy of what all share. As root we write only
    into a folder that no learner owns yet."""
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
    """The control groups of a learner's processes, made if need be; none where that cannot be."""
    try:
        if (CGROUPS / "cgroup.controllers").exists():       # version 2
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


def sit_down(uid: int, home: Path, groups: list[Path], memory_bytes: int) -> None:
    """In the new process, before it becomes the learner's server."""
    for folder, mode, owner in ((SOCKETS, 0o755, 0), (SOCKETS / str(uid), 0o700, uid)):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
        os.chown(folder, owner, owner)
    for procs in groups:
        procs.write_text(str(os.getpid()))
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not groups:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o077)
    os.chdir(home)


def configure(c: Any, room: rooms.Room) -> None:
    hub = Path(room.folder, "hub")
    scheme = "https" if room.tls else "http"
    c.JupyterHub.bind_url = f"{scheme}://{room.address}:{room.port}/"
    own = rooms.free_port(range(14_000, 15_000))
    c.JupyterHub.hub_bind_url = f"http://{LOCAL}:{own}/"
    c.ConfigurableHTTPProxy.api_url = f"http://{LOCAL}:{rooms.free_port(range(own + 1, 15_000))}"
    if room.tls:
        c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = room.tls
    c.JupyterHub.db_url = f"sqlite:///{hub}/hub.sqlite"
    c.JupyterHub.cookie_secret_file = str(hub / "cookie_secret")
    c.JupyterHub.authenticator_class = room.authenticator or Codes
    c.JupyterHub.spawner_class = Desk
    c.Codes.folder = c.Desk.folder = room.folder
    c.Codes.allowed_users = {*room.members}
    c.Authenticator.admin_users = {room.teacher}
    c.ConfigurableHTTPProxy.command = [room.proxy]
    c.ConfigurableHTTPProxy.pid_file = str(hub / "proxy.pid")
    c.Spawner.cmd = [sys.executable, "-P", str(Path(__file__).with_name("desk.py"))]
    c.Spawner.env_keep = ["LANG", "LC_ALL", "PYTHONPATH", "LPKIT_SOLUTIONS"]
    c.Spawner.default_url = f"/lab/tree/{FIRST}"
    c.Spawner.start_timeout = c.Spawner.http_timeout = 300
    c.JupyterHub.concurrent_spawn_limit = 0        # all come at once, and nobody is sent away
    c.JupyterHub.load_roles = [{
        "name": "culler", "services": ["culler"],
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"]}, {
        "name": "user", "scopes": ["self", "access:services!service=progress"]}, {
        "name": "server", "scopes": ["users:activity!user", "access:servers!server",
                                     "access:services!service=progress"]}]
    c.JupyterHub.services = [
        {"name": "culler", "command": [sys.executable, "-m", "jupyterhub_idle_culler",
                                       f"--timeout={room.idle_seconds}"]},
        {"name": "progress", "url": room.progress_url.partition("/services")[0],
         "command": [sys.executable, "-P", str(files.resource("notebooks") / "lessons" / "progress.py")],
         "environment": {"LPKIT_ROOM": room.folder, "LPKIT_TEACHER": room.teacher},
         "oauth_no_confirm": True}]


if "get_config" in globals():       # JupyterHub's, when it reads this file
    config = globals()["get_config"]()
    configure(config, told := rooms.read(Path(os.environ["LPKIT_ROOM"]).parent))
    if told.config:
        globals()["load_subconfig"](told.config)
