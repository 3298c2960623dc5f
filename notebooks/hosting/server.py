"""The process that `lab.serve` starts: JupyterLab, locked, on a socket that listens already.

`python server.py FILE`: FILE is private JSON with `fd`, the number of the socket, and `traits`, by
class. Jupyter takes a trait from the most specific class that any file names, whatever the order of
the files. So once all files are read, `OURS` are removed from every class and are Jupyter's
defaults again, and then `traits` are set. What is not named here stays as the user has it.
Source: Jupyter Server 2.21, `ServerApp.initialize`.
"""

import json
import logging
import os
import secrets
import socket
import sys
from pathlib import Path

from jupyter_server.serverapp import ServerApp
from traitlets.config import Config

OURS = frozenset("""
    ip port port_retries sock base_url certfile keyfile client_ca ssl_options
    token password hashed_password password_required allow_password_change
    allow_unauthenticated_access authenticate_prometheus identity_provider_class authorizer_class
    login_handler_class logout_handler_class cookie_name cookie_options cookie_secret
    cookie_secret_file secure_cookie get_secure_cookie_kwargs
    allow_origin allow_origin_pat allow_credentials allow_remote_access local_hostnames
    disable_check_xsrf tornado_settings trust_xheaders websocket_url
    root_dir notebook_dir preferred_dir file_to_run allow_root open_browser
    transport_encryption
    """.split())
# A gateway runs the kernels on another host; an empty Session.key leaves their messages unsigned.
NOBODYS = ("GatewayClient", "Session")
COMPUTED = {"token", "notebook_dir", "cookie_secret"}      # their defaults follow from others


class KnownNoise(logging.Filter):
    """Drops one warning: Jupyter Server gives its ping times in milliseconds where tornado expects
    seconds, so tornado finds them odd at the first kernel and pings every 8 hours. Jupyter's own
    pings, each 30 s, are what counts."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("The websocket_ping_timeout")


class OnSocket(ServerApp):
    """A server on `listener`, a socket that another process opened and hands down."""

    listener: socket.socket

    @classmethod
    def inherit(cls, fd: int) -> None:
        cls.listener = socket.socket(fileno=fd)
        cls.listener.set_inheritable(False)
        cls.listener.setblocking(False)

    def _find_http_port(self) -> None:
        """The socket has its port already."""

    def _bind_http_server_tcp(self) -> bool:
        self.http_server.add_socket(self.listener)
        return True


class LockedServer(OnSocket):
    """`locked`, which are traits by class, is set before it is initialized."""

    locked: dict[str, dict]

    def init_configurables(self) -> None:
        """Locks the options when every file is read, before any part of the server is made."""
        for name in NOBODYS:
            self.config.pop(name, None)
        for section in filter(lambda value: isinstance(value, Config), self.config.values()):
            for name in OURS & set(section):
                del section[name]
        for name in OURS & set(self.trait_names()) - COMPUTED:
            setattr(self, name, self.trait_defaults(name))
        self.update_config(Config(self.locked))
        super().init_configurables()

    def check(self) -> None:
        """An extension may have changed what the handlers read."""
        settings = self.web_app.settings
        for name in sorted(OURS & set(settings) & set(self.trait_names()) - COMPUTED):
            if settings[name] != getattr(self, name):
                self.exit(f"a Jupyter extension or setting changed {name} to {settings[name]!r}")


def main(path: Path) -> None:
    told = json.loads(path.read_text())
    LockedServer.inherit(told["fd"])
    app = LockedServer.instance(jpserver_extensions={"jupyterlab": True})
    app.locked = told["traits"]
    # cookies of an earlier server, or of who knows the user's secret, are worth nothing
    app.locked["ServerApp"]["cookie_secret"] = secrets.token_bytes(32)
    app.initialize(argv=[], starter_extension="lab")
    app.check()
    os.chdir(app.root_dir)      # for terminals; until now Jupyter would run what is configured here
    app.start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
