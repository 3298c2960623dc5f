"""JupyterLab on the course, for this machine only.

The kit sets the following, regardless of the user's own Jupyter settings:

    address          127.0.0.1
    token            a new one for each start, in a file that only its owner can read; not on a
                     command line, which other users of a shared machine can see
    access           none without authentication, none from pages of other sites
    requests         none to other hosts (news, updates, the list of extensions, a kernel gateway)
    kernel channels  encrypted

`hosting.server` sets the options for security after all files of the user have been read. The other
settings are in a private folder at the start of Jupyter's search path. Nothing under ~/.jupyter is
written, and settings that the kit does not set are the user's.

The server inherits a socket that already listens, so only our child can answer on its port. Before
`serve` yields, it checks that a request with the token gets access, and that these requests do not:
without the token, from a page of another site, under another host name, and a write without the
XSRF token.
Sources: Jupyter Server 2.21 (security, config path), JupyterLab 4 (setting overrides).
"""

import contextlib
import http.client
import os
import secrets
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lpkit import processes
from lpkit.errors import ConfigError

FIRST = "00_start_here.ipynb"      # in a work folder (hosting.copies)
LOCAL = "127.0.0.1"
PORT = 8888                 # Jupyter's default
START_SECONDS = 120.0       # long, since the first read from a disk is slow

QUIET_APP = {  # no telemetry, no news, no update check, no list of extensions from elsewhere
    "default_url": f"/lab/tree/{FIRST}",
    "news_url": None,
    "check_for_updates_class": "jupyterlab.handlers.announcements.NeverCheckForUpdate",
    "extension_manager": "readonly",
    "allowed_extensions_uris": "",
    "blocked_extensions_uris": "",
}
QUIET_SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false",
                                                                  "checkForUpdates": False}}
QUIET_LOG = {"filters": {"known": {"()": "__main__.KnownNoise"}},     # in server.py
             "handlers": {"console": {"filters": ["known"]}}}
QUIET = {"LabApp": QUIET_APP, "ServerApp": {"logging_config": QUIET_LOG}}


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running JupyterLab. It ends when the `with serve(...)` block that made it ends."""

    port: int
    token: str
    token_file: Path        # mode 0600
    log_path: Path
    process: subprocess.Popen   # the keeper; ends with the server's exit code

    @property
    def url(self) -> str:
        return self.url_of(FIRST)

    def url_of(self, path: str) -> str:
        """Return the address of a file in the lab, with the token. Do not pass it to a command as
        an argument, since other users can read command lines."""
        return f"http://{LOCAL}:{self.port}/lab/tree/{path}?token={self.token}"

    def open_browser(self) -> None:
        """Open the lab in a browser, through a private file that has the token, since other users
        can read command lines. This process starts the browser, because a child of the server would
        end with the server."""
        (page,) = self.token_file.parent.glob("runtime/jpserver-*-open.html")
        # in a thread, since `open` waits for some browsers
        threading.Thread(target=webbrowser.open, args=[page.as_uri()], daemon=True).start()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


def listen(asked: int = 0) -> socket.socket:
    """Return a socket that listens on port `asked`, or on the next free port of the 49 after it; 0
    means any free port. Raises ConfigError if all of these ports are in use."""
    if not 0 <= asked <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, got {asked}")
    for port in range(asked, min(asked + 50, 65536)) if asked else [0]:
        try:
            return socket.create_server((LOCAL, port), backlog=128)
        except OSError as error:
            taken = error
    raise ConfigError(f"no free port from {asked} to {asked + 49} on {LOCAL} ({taken.strerror}); "
                      f"choose another --port")


@contextlib.contextmanager
def serve(root: Path, *, port: int = 0,
          children: processes.Children | None = None) -> Iterator[Server]:
    """Start JupyterLab in `root`, and yield the server when it answers. At the end of the block,
    and if this process is killed, the server, its kernels, its terminals and all their descendants
    are killed.

    port      0: any free port; if the port is taken, the next free port (see `Server.port`)
    children  starts the server; another thread can end the server through it

    Raises ConfigError for a server that does not start.
    """
    token, folder = secrets.token_hex(24), processes.new_folder()
    with listen(port) as listener:
        port = listener.getsockname()[1]
        traits = {"ServerApp": {
                      "ip": LOCAL, "port": port, "port_retries": 0, "open_browser": False,
                      "root_dir": str(root.resolve()), "preferred_dir": str(root.resolve()),
                      "allow_root": os.geteuid() == 0, "allow_remote_access": False,
                      "allow_unauthenticated_access": False, "certfile": "", "keyfile": ""},
                  "PasswordIdentityProvider": {"token": token, "hashed_password": "",
                                               "allow_password_change": False},
                  "KernelManager": {"transport_encryption": "auto"}}
        # Jupyter reads one file for the server and one for the lab, so both have the same settings.
        files = {"token": token, "locked.json": {"fd": listener.fileno(), "traits": traits},
                 "config/jupyter_server_config.json": QUIET,
                 "config/jupyter_lab_config.json": QUIET,
                 "config/labconfig/default_setting_overrides.json": QUIET_SETTINGS}
        # The warning is ignored, because the two endpoints that it names (terminals, language
        # servers) check the token. The server starts in its own folder, because Jupyter would run a
        # configuration file in the current folder.
        keeper = (children or processes.Children()).start(
            [sys.executable, "-P", "-Wignore:Extension endpoints without",
             Path(__file__).with_name("server.py"), folder / "locked.json"],
            folder, files=files, log="server.log", cwd=folder, fds=[listener.fileno()],
            env=_environment(folder))
    with keeper:
        server = Server(port=port, token=token, token_file=folder / "token",
                        log_path=folder / "server.log", process=keeper)
        _prove(server)
        yield server


def _environment(folder: Path) -> dict[str, str]:
    """Return the server's environment. Variables that would replace the kit's token, gateway or
    configuration are left out."""
    left_out = ("JUPYTER_TOKEN", "JUPYTER_GATEWAY", "JUPYTER_NO_CONFIG")
    env = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    paths = [str(folder / "config"), env.get("JUPYTER_CONFIG_PATH")]
    env["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, paths))
    # holds the token and the keys of kernels; removed when the server ends
    env["JUPYTER_RUNTIME_DIR"] = str(folder / "runtime")
    return env


def _ask(server: Server, path: str, *, method: str = "GET", seconds: float = 10,
         **headers: str) -> tuple[int, http.client.HTTPMessage]:
    """Send a request to the server, without a proxy, and return the answer's status and headers."""
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=seconds)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers


def _prove(server: Server) -> None:
    """Check that requests with the token get access, and that other requests do not. Raises
    ConfigError for a wrong answer, or if the server does not start. The socket already listens, so
    the first request waits until the server has started or ended."""
    course, nothing, token = "/api/contents?content=0", "/api/kernels/none", f"token {server.token}"
    try:
        inside, headers = _ask(server, course, seconds=START_SECONDS, Authorization=token)
        set_ = headers.get_all("Set-Cookie", [])
        cookie = "; ".join(header.partition(";")[0] for header in set_)    # as browsers send it
        answers = {
            "with the token": (inside, (200,)),
            "with its cookie": (_ask(server, course, Cookie=cookie)[0], (200,)),
            "without the token": (_ask(server, course)[0], (401, 403)),
            "to a page of another site": (
                _ask(server, course, Cookie=cookie, Origin="https://elsewhere.example")[0],
                (403, 404)),
            "to a write without the XSRF token": (
                _ask(server, nothing, method="DELETE", Cookie=cookie)[0], (403,)),
            "under another host name": (
                _ask(server, course, Authorization=token, Host="elsewhere.example")[0], (403,))}
    except TimeoutError:
        raise ConfigError(f"JupyterLab did not answer within {START_SECONDS:.0f} s; the end of its "
                          f"log:\n{server.log()[-processes.TAIL_BYTES:].strip()}") from None
    except (OSError, http.client.HTTPException):
        processes.end(server.process)
        raise ConfigError(f"JupyterLab did not start; the end of its log:\n"
                          f"{server.process.stdout.read().strip()}") from None
    wrong = [f"{status} {how} instead of {expected[0]}"
             for how, (status, expected) in answers.items() if status not in expected]
    if wrong:
        raise ConfigError(f"JupyterLab answers {', '.join(wrong)}, so it was stopped; look in the "
                          f"folders of `jupyter --paths` for a setting or an extension that allows "
                          f"such access")


def has_display() -> bool:
    return (sys.platform in ("darwin", "win32")
            or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")))
