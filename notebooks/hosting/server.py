"""The process that `lab.serve` starts: JupyterLab with locked options, on an inherited socket that
already listens.

    python server.py FILE

FILE is private JSON with `fd`, the file descriptor of the socket, and `traits`, the locked options
by class. Jupyter takes an option from the most specific class that any configuration file names,
regardless of the order of files. Therefore, after all files have been read, the options OURS are
removed from every class, which restores Jupyter's defaults, and then `traits` are set. All other
options are the user's.
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
COMPUTED = {"token", "notebook_dir", "cookie_secret"}      # defaults that depend on other options


class KnownNoise(logging.Filter):
    """Drops one warning of tornado. Jupyter Server passes its ping times in milliseconds where
    tornado expects seconds, so tornado warns at the first kernel, and pings every 8 hours. This has
    no effect, because Jupyter itself pings every 30 s."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("The websocket_ping_timeout")


class OnSocket(ServerApp):
    """A server on `listener`, a socket that another process opened and passed on."""

    listener: socket.socket

    @classmethod
    def inherit(cls, fd: int) -> None:
        cls.listener = socket.socket(fileno=fd)
        cls.listener.set_inheritable(False)
        cls.listener.setblocking(False)

    def _find_http_port(self) -> None:
        """Do nothing, since the socket already has a port."""

    def _bind_http_server_tcp(self) -> bool:
        self.http_server.add_socket(self.listener)
        return True


class LockedServer(OnSocket):
    """A server whose options `locked`, by class, replace all others. Set `locked` before
    `initialize`."""

    locked: dict[str, dict]

    def init_configurables(self) -> None:
        """Lock the options, after all files have been read, and before parts of the server are
        made."""
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
        """Exit if an extension has changed the locked options that the handlers read."""
        settings = self.web_app.settings
        for name in sorted(OURS & set(settings) & set(self.trait_names()) - COMPUTED):
            if settings[name] != getattr(self, name):
                self.exit(f"a Jupyter extension or setting changed {name} to {settings[name]!r}")


def main(path: Path) -> None:
    given = json.loads(path.read_text())
    LockedServer.inherit(given["fd"])
    app = LockedServer.instance(jpserver_extensions={"jupyterlab": True})
    app.locked = given["traits"]
    # a new secret makes cookies of earlier servers invalid, and cookies that others made
    app.locked["ServerApp"]["cookie_secret"] = secrets.token_bytes(32)
    app.initialize(argv=[], starter_extension="lab")
    app.check()
    # for terminals; only now, since Jupyter would run a configuration file there
    os.chdir(app.root_dir)
    app.start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
