"""A room: a JupyterHub on one machine for many learners. Learners cannot read one another's files
or use up one another's resources.

Each learner is a Unix user without an account: a user id of UIDS, a private home, and a share of
memory and threads (`hosting.hub`). Therefore only root can open a room. Its files are in one
folder:

    room.json       names, user ids and codes; readable by root only. With the same folder, the same
                    room is opened again
    hub/            the hub's database, secrets and log; readable by root only
                    labs/NAME.log: a lab's log; labs.json: the state of each lab
    shared/         files that each new learner gets a copy of: tokens, verified and compiled
                    kernels
    turns/          the queue for each GPU (`lpkit.turns`)
    learners/NAME   a learner's home; `course` in it has the learner's copies

Sources: JupyterHub 6 (spawners, services, security); configurable-http-proxy 5; capabilities(7).
"""

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from hosting import python
from hosting.lab import LOCAL, START_SECONDS
from lpkit import files, machine_facts, processes
from lpkit.errors import ConfigError, in_one_line, named, nearest, shown

FOLDER = Path("/srv/lpkit-room")
NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
LETTERS = "abcdefghkmnpqrstuvwxyz23456789"      # without letters that look alike
SOCKETS = Path("/run/lpkit")    # Unix sockets need short paths; has a folder per learner, too
UIDS = range(52_000, 60_000)                    # Debian assigns 1,000 to 59,999, lowest first
MOST = 500                                      # learners
HUB_BYTES = 1 << 30                             # memory of the hub, its proxy and the page cache
LEAST_BYTES = 600 << 20                         # memory of a server and a kernel that imports torch
MOST_TEXT = 200                                 # characters of a log's line, or of the room's name


@dataclass(frozen=True, kw_only=True)
class Member:
    uid: int
    code: str


@dataclass(frozen=True, kw_only=True)
class Room:
    """The settings of a room; room.json stores them for the hub."""

    folder: str
    members: Mapping[str, Member]
    memory_bytes: int           # per learner
    threads: int
    gpus: int
    port: int
    address: str = LOCAL
    tls: Sequence[str] = ()     # certificate and key
    proxy: str = ""             # path of configurable-http-proxy
    authenticator: str = ""     # JupyterHub's name of an authenticator; "": `Codes`
    teacher: str = "teacher"
    config: str = ""            # a configuration file of JupyterHub, read after `hosting.hub`
    idle_seconds: int = 3600
    title: str = ""             # the room's name, on the hub's pages

    def socket_path(self, name: str) -> Path:
        """Return the path of a Unix socket of this room, in a folder that only root may change."""
        return SOCKETS / f"{name}-{self.port}"


def opened(folder: Path, names: Sequence[str], *, teacher: str = Room.teacher,
           proxy: str = "", authenticator: str = "", title: str = "", **how: object) -> Room:
    """Return the room in `folder`, with learners `names` added. A missing room is made.

    Raises ConfigError if the room cannot be opened, and OSError if its files cannot be written.
    """
    refuse_what_cannot_be()
    refuse_missing(authenticator)
    for name in (teacher, *names):
        if not NAME.fullmatch(name):
            raise ConfigError(f"{shown(name)} cannot be a learner's name; use up to 32 small "
                              f"letters, digits, - and _, and begin with a letter")
    folder = files.own_folder(folder).resolve()
    for place, mode in (("", 0o711), ("hub", 0o700), ("hub/labs", 0o700), ("shared", 0o755),
                        ("learners", 0o711)):
        files.own_folder(folder / place).chmod(mode)        # regardless of the umask
    refuse_closed(folder, "the room")
    members = dict(read(folder).members) if (folder / "room.json").exists() else {}
    for name in (teacher, *names):
        members.setdefault(name, Member(uid=_free_uid(members), code=new_code()))
    learners = len(members) - 1
    if not 0 < learners <= MOST:
        raise ConfigError(f"a room must have 1 to {MOST} learners, got {learners}; give their "
                          f"names, or a number such as --learners 30")
    usable = machine_facts.memory_limit_bytes() or psutil.virtual_memory().total
    share = (usable - HUB_BYTES) // learners
    if share < LEAST_BYTES:
        most = (usable - HUB_BYTES) // LEAST_BYTES
        raise ConfigError(f"{learners} learners would have {share >> 20} MiB each, and a lab with "
                          f"one kernel needs {LEAST_BYTES >> 20} MiB; this machine has memory for "
                          f"{most} learners")
    room = Room(folder=str(folder), teacher=teacher, members=members, memory_bytes=share,
                threads=max(1, machine_facts.cores() // learners), gpus=machine_facts.gpus(),
                proxy=_proxy(proxy), authenticator=authenticator, title=cut(title or folder.name),
                **how)
    # 1777: all users may make tickets in the queue, and remove only their own tickets
    for gpu in range(room.gpus):
        files.own_folder(folder / "turns").chmod(0o711)
        files.own_folder(folder / "turns" / str(gpu)).chmod(0o1777)
    write(room)
    return room


def log_path(folder: Path, name: str) -> Path:
    return folder / "hub" / "labs" / f"{quote(name, safe='')}.log"


def last_line(folder: Path, name: str) -> str:
    """Return the last line in the log of a learner's lab, shortened by `cut`, or ""."""
    with contextlib.suppress(OSError), log_path(folder, name).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().decode(errors="replace").splitlines()
        return cut(next(filter(str.strip, reversed(lines)), ""))
    return ""


def cut(text: str) -> str:
    """Return a text, which a learner may have written, as one line of at most MOST_TEXT characters.
    Control characters are escaped, so that a terminal does not obey them."""
    text = in_one_line(text.strip())
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


def labs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the labs of an open room by the learner's name: `state` ("starting", "open" or
    "failed"), `since` (seconds since 1970), and the `reason` of a failure."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "hub" / "labs.json").read_text())
    return {}


def write(room: Room) -> None:
    with files.whole_file(Path(room.folder, "room.json"), 0o600) as temporary:
        temporary.write_text(json.dumps(asdict(room), indent=1))


def read(folder: Path) -> Room:
    """Return the room in a folder. Raises ConfigError if there is none."""
    path = folder / "room.json"
    try:
        stored = json.loads(files.read_private(path, 1 << 24))
        known = {field.name: stored[field.name] for field in fields(Room) if field.name in stored}
        return Room(**known | {"members": {name: Member(**values)
                                           for name, values in stored["members"].items()}})
    except FileNotFoundError:
        raise ConfigError(f"there is no room in {named(folder)}; `lpkit room` opens one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{named(path)} is not a room of lpkit ({error}); move the file "
                          f"away") from None


def joined(room: Room, name: str) -> Member:
    """Return the member with this name. A user who signed in through another authenticator becomes
    a new member. Raises ConfigError for a name that cannot be a home's name."""
    if name in room.members:
        return room.members[name]
    if not NAME.fullmatch(name):
        raise ConfigError(f"{shown(name)} cannot be a learner's name")
    new = Member(uid=_free_uid(room.members), code="")
    write(replace(room, members={**room.members, name: new}))
    return new


def _free_uid(members: Mapping[str, Member]) -> int:
    return min(set(UIDS) - {member.uid for member in members.values()})


def new_code() -> str:
    """Return a code of 59 random bits that is easy to read from paper."""
    return "-".join("".join(secrets.choice(LETTERS) for _ in range(4)) for _ in range(3))


def refuse_what_cannot_be() -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise ConfigError("a room runs each learner as a separate Unix user, so root must open it "
                          "on a Linux machine: `sudo lpkit room ...`; for one person, use `lpkit "
                          "lab`")
    for place in {sys.prefix, sys.base_prefix, str(files.PACKAGE),
                  str(files.resource("notebooks"))}:
        refuse_closed(Path(place), "what learners run")


def refuse_missing(authenticator: str) -> None:
    """Raise ConfigError for an authenticator that JupyterHub would not find."""
    known = {entry.name for entry in entry_points(group="jupyterhub.authenticators")}
    module, _, name = authenticator.rpartition(".")
    with contextlib.suppress(ImportError, AttributeError):
        if authenticator in {"", *known}:
            return
        if getattr(import_module(module or "builtins"), name, None):
            return
    raise ConfigError(f"there is no authenticator {shown(authenticator)}; give an installed "
                      f"authenticator or a class as module.Class; {nearest(authenticator, known)}")


def refuse_closed(place: Path, what: str) -> None:
    """Raise ConfigError if other users cannot reach a folder."""
    for folder in (place, *place.parents):
        if not folder.stat().st_mode & 0o001:
            raise ConfigError(f"{what} is in {named(place)}, and learners may not enter "
                              f"{named(folder)}; run `chmod o+x {named(folder)}`, or move it to a "
                              f"place such as /opt")


def _proxy(asked: str) -> str:
    """Return the path of configurable-http-proxy. Raises ConfigError if it is not installed."""
    if path := shutil.which(asked or "configurable-http-proxy"):
        return path
    name = shown(asked) if asked else "configurable-http-proxy"
    raise ConfigError(f"{name}, the hub's proxy, is not installed; run `npm install -g "
                      f"configurable-http-proxy`")


@contextlib.contextmanager
def serve(room: Room, children: processes.Children | None = None) -> Iterator[subprocess.Popen]:
    """Start the hub, and yield its keeper (the process that ends when the hub ends) once the hub
    answers. At the end of the block, the hub and all labs are killed."""
    refuse_taken(room)
    Path(room.folder, "hub", "labs.json").unlink(missing_ok=True)       # left by an earlier hub
    folder = processes.new_folder()
    keeper = (children or processes.Children()).start(
        [*python("jupyterhub.app"), "-f", Path(__file__).with_name("hub.py")],
        folder, log=str(Path(room.folder, "hub", "hub.log")), cwd=Path(room.folder, "hub"),
        env=os.environ | {"LPKIT_ROOM": str(Path(room.folder, "room.json"))})
    with keeper:
        deadline = time.monotonic() + START_SECONDS
        while not answers(room):
            if keeper.poll() is not None or time.monotonic() > deadline:
                processes.end(keeper)
                raise ConfigError(f"the hub did not start; the end of its log:\n"
                                  f"{keeper.stdout.read().strip()}")
            time.sleep(0.2)
        try:
            yield keeper
        finally:
            processes.end(keeper)
            for member in read(Path(room.folder)).members.values():    # folders of kernels' sockets
                shutil.rmtree(SOCKETS / str(member.uid), ignore_errors=True)
            for name in ("hub", "proxy", "reports"):
                room.socket_path(name).unlink(missing_ok=True)


def refuse_taken(room: Room) -> None:
    try:
        for port in (room.port, 0):     # 0: any free port, for the service for reports
            socket.create_server((room.address, port)).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"the room cannot listen on {room.address}, port {room.port} "
                          f"({getattr(error, 'strerror', None) or error}); choose another --port "
                          f"or --address") from None


def url(room: Room) -> str:
    return f"http{'s' if room.tls else ''}://{room.address}:{room.port}"


def answers(room: Room) -> bool:
    """Return True if the hub answers at the room's port, and only root listens there."""
    table = Path("/proc/net", "tcp6" if ":" in room.address else "tcp").read_text()
    # the user ids (column 7) of the sockets that listen (state 0A) on the room's port
    if {row[7] for row in map(str.split, table.splitlines()[1:])
            if row[3] == "0A" and row[1].endswith(f":{room.port:04X}")} != {"0"}:
        return False
    kind = http.client.HTTPSConnection if room.tls else http.client.HTTPConnection
    how = {"context": ssl._create_unverified_context()} if room.tls else {}
    with contextlib.suppress(OSError, http.client.HTTPException), \
            contextlib.closing(kind(LOCAL, room.port, timeout=5, **how)) as connection:
        connection.request("GET", "/hub/api/")
        return connection.getresponse().status == 200
    return False
