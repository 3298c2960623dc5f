"""JupyterLab on the course, served to this machine and to nobody else.

What is not left to chance, whatever the user's own Jupyter settings say: the address (127.0.0.1), a
fresh token in a file that only its owner reads (command lines are public on a shared machine), no
unauthenticated access, no request to another host (news, updates, the extension list), encrypted
kernel channels. These go in through a private folder at the head of Jupyter's search path, so
nothing under ~/.jupyter is written, and what the kit does not set stays as the user has it.

`serve` proves its promise before it returns: the server must turn a stranger away and let the token
in.
Sources: Jupyter Server 2.21 (security, config path), JupyterLab 4 (setting overrides).
"""

import contextlib
import http.client
import ipaddress
import json
import logging
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpkit.errors import ConfigError
from lpkit.files import resource

FIRST = "notebooks/00_start_here.ipynb"
LOCAL = "127.0.0.1"
PORT = 8888                 # Jupyter's own
START_SECONDS = 120.0       # a cold disk reads slowly
STOP_SECONDS = 10.0         # for the kernels to save and leave

QUIET_APP = {  # no telemetry, no news, no update check, no list of extensions from elsewhere
    "news_url": None,
    "check_for_updates_class": "jupyterlab.handlers.announcements.NeverCheckForUpdate",
    "extension_manager": "readonly",
}
QUIET_SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false",
                                                                  "checkForUpdates": False}}
QUIET_LOG = {"filters": {"known": {"()": f"{__name__}.KnownNoise"}},
             "handlers": {"console": {"filters": ["known"]}}}
QUIET = {"KernelManager": {"transport_encryption": "auto"}, "LabApp": QUIET_APP,
         "ServerApp": {"logging_config": QUIET_LOG}}


class KnownNoise(logging.Filter):
    """Drops one warning: Jupyter Server gives its ping times in milliseconds where tornado expects
    seconds, so tornado finds them odd at the first kernel and pings every 8 hours. Jupyter's own
    pings, each 30 s, are what counts."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("The websocket_ping_timeout")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A JupyterLab that answers. It lives as long as the `with serve(...)` that made it."""

    ip: str
    port: int
    token: str
    token_file: Path        # mode 0600
    log_path: Path
    base_url: str           # where the reader is: http://127.0.0.1:8888
    process: subprocess.Popen

    @property
    def url(self) -> str:
        return self.url_of(FIRST)

    def url_of(self, path: str) -> str:
        """Of one file in the lab, with the token: for a person or a browser, never for `ps`."""
        return f"{self.base_url}/lab/tree/{path}?token={self.token}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


def find_root(start: Path | None = None) -> Path:
    """The folder that holds notebooks/: the current one, else the checkout's or the installed
    package's."""
    here, beside = start or Path.cwd(), resource("notebooks").parent
    for root in (here, beside):
        if (root / FIRST).is_file():
            return root.resolve()
    raise ConfigError(f"there is no {FIRST} in {here} or {beside}; run this in the folder that "
                      f"holds notebooks/")


def is_local(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:
        return ip == "localhost"    # any other name may resolve to a public address


def free_port(ip: str = LOCAL, asked: int = 0) -> int:
    """`asked` or the next free one; 0: any. Errors: ConfigError for an address that is not ours."""
    if not 0 <= asked <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, got {asked}")
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    for port in range(asked, min(asked + 50, 65536)) if asked else [0]:
        try:
            with socket.create_server((ip, port), family=family) as probe:
                return probe.getsockname()[1]
        except socket.gaierror:
            raise ConfigError(f"{ip!r} is not an address of this machine; leave --ip out for "
                              f"{LOCAL}") from None
        except OSError as error:
            taken = error
    raise ConfigError(f"no free port from {asked} to {asked + 49} on {ip} ({taken.strerror}); ask "
                      f"for another --port")


def check_public(ip: str, certfile: Path | None, keyfile: Path | None,
                 password_file: Path | None) -> str | None:
    """The hashed password, or None for a local server. Errors: ConfigError unless a public one is
    locked."""
    if (certfile is None) != (keyfile is None):
        raise ConfigError("--certfile and --keyfile come together")
    if not is_local(ip) and None in (certfile, password_file):
        raise ConfigError(
            f"--ip {ip} would open this machine to the network; leave --ip out and use an SSH "
            f"tunnel (ssh -N -L {PORT}:{LOCAL}:{PORT} USER@HOST), or give --certfile, --keyfile "
            f"and --password-file")
    for name, path in (("--certfile", certfile), ("--keyfile", keyfile),
                       ("--password-file", password_file)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{name} {path} is not a file")
    if password_file is None:
        return None
    if password_file.stat().st_mode & 0o077:
        raise ConfigError(f"--password-file {password_file} can be read by others; chmod 600 "
                          f"{password_file}")
    hashed = password_file.read_text(errors="replace").strip()
    if not hashed.startswith(("argon2:", "sha256:", "sha512:")) or "\n" in hashed:
        make = "from jupyter_server.auth import passwd; print(passwd())"
        raise ConfigError(f"--password-file {password_file} must hold one line, the hash of the "
                          f"password; make it with {sys.executable} -c \"{make}\"")
    return hashed


@contextlib.contextmanager
def serve(root: Path, *, ip: str = LOCAL, port: int = 0, browser: bool = False,
          certfile: Path | None = None, keyfile: Path | None = None,
          password_file: Path | None = None, config: Mapping[str, Mapping[str, Any]] | None = None,
          settings: Mapping[str, Mapping[str, Any]] | None = None,
          state: Path | None = None) -> Iterator[Server]:
    """Start JupyterLab in `root`, yield it once it answers, stop it and its kernels at the end.

    port:     0 for any free one; a taken one moves to the next (compare with `Server.port`)
    config:   more of Jupyter's own configuration, by class:
              {"LabApp": {"expose_app_in_browser": True}}
    settings: JupyterLab defaults, by plugin:
              {"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}
    state:    a folder for all that Jupyter keeps (settings, workspaces, history), instead of the
              user's own

    Raises ConfigError for a public address without TLS and a password, and for a server that does
    not start.
    """
    hashed = check_public(ip, certfile, keyfile, password_file)
    port, token = free_port(ip, port), secrets.token_hex(24)
    identity = {"IdentityProvider": {"token": token},
                "PasswordIdentityProvider": {"hashed_password": hashed} if hashed else {}}
    app = json.dumps(_merged(QUIET, config or {}, identity))
    # mode 0700
    with tempfile.TemporaryDirectory(prefix="lpkit-lab-", ignore_cleanup_errors=True) as folder:
        private = Path(folder)
        token_file, log_path = private / "token", private / "server.log"
        # Jupyter reads one file for the server and one for the lab; the same words in both leave no
        # gap.
        for path, text in ((token_file, token), (log_path, ""),
                           (private / "config" / "jupyter_server_config.json", app),
                           (private / "config" / "jupyter_lab_config.json", app),
                           (private / "config" / "labconfig" / "default_setting_overrides.json",
                            json.dumps(_merged(QUIET_SETTINGS, settings or {})))):
            _write_private(path, text)
        # The two endpoints that this warning names (terminals, language servers) check the token
        # themselves.
        hush = "-Wignore:Extension endpoints without"
        command = [sys.executable, hush, "-m", "jupyterlab", f"--ServerApp.ip={ip}",
                   f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
                   f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{FIRST}",
                   "--ServerApp.allow_unauthenticated_access=False"]
        if not browser:
            command.append("--no-browser")
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--allow-root")
        if certfile:
            command += [f"--ServerApp.certfile={certfile}", f"--ServerApp.keyfile={keyfile}"]
        with log_path.open("a") as log:
            # A session of its own: Ctrl-C reaches us, and we stop the server, which would ask
            # before it stops.
            process = subprocess.Popen(
                command, cwd=root, env=_environment(private / "config", state), text=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        scheme = "https" if certfile else "http"
        host = LOCAL if is_local(ip) else socket.gethostname()
        server = Server(ip=ip, port=port, token=token, token_file=token_file, log_path=log_path,
                        base_url=f"{scheme}://{host}:{port}", process=process)
        try:
            _wait(server)
            yield server
        finally:
            _stop(process)


def _merged(*parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Later parts win, key by key."""
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, values in part.items():
            merged.setdefault(name, {}).update(values)
    return merged


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _environment(config: Path, state: Path | None) -> dict[str, str]:
    left_out = ("JUPYTER_TOKEN", "JUPYTER_TOKEN_FILE", "JUPYTER_NO_CONFIG")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    paths = [str(config), env.get("JUPYTER_CONFIG_PATH")]
    env["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, paths))
    if state is not None:
        folders = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data",
                   "JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython",
                   "JUPYTERLAB_SETTINGS_DIR": "lab/settings",
                   "JUPYTERLAB_WORKSPACES_DIR": "lab/workspaces"}
        env |= {name: str(state / folder) for name, folder in folders.items()}
    return env


def _status(server: Server, token: str | None) -> int:
    """The HTTP status of a listing of the course, with and without the token. No proxy: it is this
    machine."""
    host = {"": LOCAL, "0.0.0.0": LOCAL, "::": "::1"}.get(server.ip, server.ip)
    if server.base_url.startswith("https"):
        trust = ssl.create_default_context()
        # our own child, through the loopback
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, server.port, timeout=5, context=trust)
    else:
        connection = http.client.HTTPConnection(host, server.port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", "/api/contents?content=0",
                           headers={"Authorization": f"token {token}"} if token else {})
        return connection.getresponse().status


def _wait(server: Server) -> None:
    """Until the token is let in; then a stranger must not be."""
    deadline, inside, failure = time.monotonic() + START_SECONDS, None, ""
    while inside is None:
        if server.process.poll() is not None:
            failure = "start"
        elif time.monotonic() > deadline:
            failure = f"answer within {START_SECONDS:.0f} s"
        if failure:
            raise ConfigError(f"JupyterLab did not {failure}; the end of its log:\n"
                              f"{server.log()[-1500:].strip()}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            inside = _status(server, server.token)
        time.sleep(0.05)
    stranger = _status(server, None)
    if inside != 200 or stranger not in (401, 403):
        raise ConfigError(f"JupyterLab answers {stranger} without the token and {inside} with it, "
                          f"instead of 403 and 200, so it was stopped; look for a setting of "
                          f"authentication in `jupyter --paths`")


def _stop(process: subprocess.Popen) -> None:
    """SIGTERM lets Jupyter shut its kernels down; what is left of its process group is killed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def has_display() -> bool:
    return (sys.platform in ("darwin", "win32")
            or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")))
