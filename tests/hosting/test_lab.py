"""The lab is this machine's alone: proved on a real server, against a user's Jupyter settings that
would open it.

Only these tests catch: a setting, an impostor or a command line that gives the lab or its token to
somebody else, and a process that outlives the lab.
"""

import http.client
import json
import os
import queue
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hosting import lab
from lpkit import cli
from lpkit.errors import ConfigError
from tests.attack import patience
from tests.attack import processes as attack
from tests.hosting.served import user

OPEN_DOORS = """
c.ServerApp.ip = "0.0.0.0"
c.ServerApp.port_retries = 50
c.ServerApp.base_url = "/somewhere"
c.ServerApp.allow_unauthenticated_access = True
c.ServerApp.identity_provider_class = "jupyter_server.auth.identity.IdentityProvider"
c.ServerApp.token = c.IdentityProvider.token = c.PasswordIdentityProvider.token = ""
c.ServerApp.password = c.PasswordIdentityProvider.hashed_password = "sha1:1:1"
c.PasswordIdentityProvider.allow_password_change = True
c.ServerApp.cookie_secret = b"known"
c.PasswordIdentityProvider.cookie_options = {"domain": "elsewhere.example"}
c.ServerApp.allow_origin = "*"
c.ServerApp.allow_origin_pat = ".*"
c.ServerApp.allow_credentials = True
c.ServerApp.allow_remote_access = True
c.ServerApp.local_hostnames = ["localhost", "elsewhere.example"]
c.ServerApp.disable_check_xsrf = True
c.ServerApp.tornado_settings = {"allow_origin": "*", "disable_check_xsrf": True, "xsrf_cookies": \
False,
                                "headers": {"Access-Control-Allow-Origin": "*"}}
c.ServerApp.trust_xheaders = True
c.ServerApp.websocket_url = "wss://192.0.2.1"
c.ServerApp.root_dir = c.FileContentsManager.root_dir = c.AsyncLargeFileManager.root_dir = "/"
c.ServerApp.open_browser = True
c.KernelManager.ip = c.AsyncIOLoopKernelManager.ip = c.ServerKernelManager.ip = "0.0.0.0"
c.ServerKernelManager.transport_encryption = "disabled"
c.Session.key = b""
c.GatewayClient.url = "http://192.0.2.1"
c.LabApp.news_url = "http://192.0.2.1/feed"
c.LabApp.blocked_extensions_uris = "http://192.0.2.1/list"
c.ContentsManager.untitled_notebook = "Mine"        # harmless, and so the user's
"""
CONFIGS = ("jupyter_config.py", "jupyter_server_config.py", "jupyter_lab_config.py")
TRACKER = "@jupyterlab/notebook-extension:tracker"
NOTIFICATION = "@jupyterlab/apputils-extension:notification"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX: modes, signals, /proc")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / lab.FIRST).write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4,
        "nbformat_minor": 5}))
    return root


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> Path:
    """A user whose own settings leave every door open."""
    state = tmp_path_factory.mktemp("user")
    (state / "config").mkdir()
    for name in CONFIGS:
        (state / "config" / name).write_text(OPEN_DOORS)
    return state


class Impostor:
    """Another user of this machine, who takes a port as soon as the lab has chosen it, and listens
    to what comes."""

    def __init__(self):
        with socket.create_server((lab.LOCAL, 0)) as free:
            self.port = free.getsockname()[1]
        self.heard, self.threads = b"", []

    def strike(self) -> None:
        with suppress(OSError):     # it is taken
            door = socket.create_server((lab.LOCAL, self.port))
            self.threads.append(threading.Thread(target=self.listen, args=[door], daemon=True))
            self.threads[-1].start()

    def listen(self, door) -> None:
        while True:
            with door.accept()[0] as caller:
                self.heard += caller.recv(10_000)


@pytest.fixture(scope="module")
def impostor():
    return Impostor()


@pytest.fixture(scope="module")
def server(project, state, impostor):
    """Started while the impostor does what he can."""
    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            impostor.strike()
            super().__init__(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Popen)
        with (user(state, {"LabApp": {"expose_app_in_browser": True}},
                   {TRACKER: {"windowingMode": "none"}}),
              lab.serve(project, port=impostor.port) as server):
            yield server


def ask(server, path, *, token=None, method="GET", body=None):
    with closing(http.client.HTTPConnection(lab.LOCAL, server.port, timeout=60)) as connection:
        connection.request(method, path, body=body, headers={"Authorization": f"token {token}"}
                           if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_an_impostor_does_not_get_the_port_nor_the_token(server, impostor):
    assert server.port == impostor.port and not impostor.threads and impostor.heard == b""


@pytest.mark.parametrize("path", ["/api/contents", "/api/kernels", "/api/sessions", "/api/status",
                                  "/lab/api/settings",
                                  "/terminals/websocket/1", "/lsp/ws/pylsp"])
def test_a_stranger_is_refused(server, path):
    assert ask(server, path)[0] in (401, 403)
    assert ask(server, path, token="0" * 48)[0] in (401, 403)


def test_the_lab_itself_asks_a_stranger_to_log_in(server):
    assert ask(server, "/lab")[0] == 302


def test_the_token_opens_it(server):
    assert ask(server, server.url.removeprefix(f"http://127.0.0.1:{server.port}"))[0] == 200
    status, body = ask(server, "/api/contents", token=server.token)
    assert status == 200 and [entry["path"] for entry in json.loads(body)["content"]] == [lab.FIRST]


def test_a_browser_is_not_told_the_token_on_its_command_line(server, monkeypatch):
    opened = queue.Queue()
    monkeypatch.setattr(lab.webbrowser, "open", opened.put)
    server.open_browser()
    page = opened.get(timeout=10 * patience())
    assert (server.token not in page
            and server.token in Path(page.removeprefix("file://")).read_text())


def test_terminals_begin_in_the_course(server, project):
    assert ask(server, "/api/terminals", token=server.token, method="POST", body="{}")[0] == 200
    (jupyter,) = psutil.Process(server.process.pid).children()
    assert {Path(shell.cwd()) for shell in jupyter.children() if shell.terminal()} == {project}
    assert ask(server, "/api/terminals/1", token=server.token, method="DELETE")[0] == 204


def test_the_token_is_in_no_arguments(server):
    family = [psutil.Process(server.process.pid),
              *psutil.Process(server.process.pid).children(recursive=True)]
    words = []
    for process in family:
        # a helper that ended since, waited for or not, tells nobody anything
        with suppress(psutil.NoSuchProcess):
            words.append([*process.cmdline(), *process.environ().values()])
    assert len(words) > 1 and not any(server.token in word for strings in words for word in strings)


def test_it_listens_on_this_machine_only(server):
    (jupyter,) = psutil.Process(server.process.pid).children()
    listening = {c.laddr for c in jupyter.net_connections() if c.status == "LISTEN"}
    assert listening == {(lab.LOCAL, server.port)}


def test_what_it_keeps_is_private(server):
    folder = server.token_file.parent
    ours = [path for path in folder.rglob("*") if path.is_file()
            and folder / "runtime" not in path.parents]
    assert (server.token_file in ours and {stat.S_IMODE(path.stat().st_mode) for path in ours}
            == {0o600})
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "config",
        folder / "runtime")} == {0o700}
    assert server.token_file.read_text() == server.token


def test_settings_are_ours_and_the_users_files_are_untouched(server, state):
    def of_plugin(plugin):
        return json.loads(ask(server, f"/lab/api/settings/{plugin}", token=server.token)[1])

    def default(plugin, key):
        return of_plugin(plugin)["schema"]["properties"][key]["default"]

    assert of_plugin(TRACKER)["settings"]["windowingMode"] == "none"
    assert (default(NOTIFICATION, "fetchNews") == "false"
            and default(NOTIFICATION, "checkForUpdates") is False)
    page = ask(server, "/lab", token=server.token)[1].decode()
    assert '"exposeAppInBrowser": true' in page and '"news": {"disabled": true}' in page
    assert all((state / "config" / name).read_text() == OPEN_DOORS for name in CONFIGS)


def test_the_users_settings_open_nothing(server, project):
    """`serve` has asked over HTTP; here are the doors that answer to nobody over HTTP."""
    runtime = server.token_file.parent / "runtime"
    (info,) = [json.loads(path.read_text()) for path in runtime.glob("jpserver-*.json")]
    assert (info["root_dir"], info["base_url"], info["password"]) == (str(project), "/", False)
    kernel = json.loads(ask(server, "/api/kernels", token=server.token, method="POST",
                            body="{}")[1])["id"]
    connection = json.loads((runtime / f"kernel-{kernel}.json").read_text())
    assert (connection["ip"] == lab.LOCAL and len(connection["key"]) > 30
            and connection["curve_publickey"])
    assert ask(server, f"/api/kernels/{kernel}", token=server.token, method="DELETE")[0] == 204
    body = ask(server, "/api/contents", token=server.token, method="POST",
               body='{"type": "notebook"}')[1]
    assert json.loads(body)["path"] == "Mine.ipynb" and (project / "Mine.ipynb").exists()


def execute(port: int, token: str, code: str) -> str:
    """Start a kernel and do `code` in it; the kernel's path."""
    from websocket import create_connection

    where = SimpleNamespace(port=port)
    status, body = ask(where, "/api/kernels", token=token, method="POST", body="{}")
    assert status == 201
    kernel = f"/api/kernels/{json.loads(body)['id']}"
    with closing(create_connection(f"ws://{lab.LOCAL}:{port}{kernel}/channels?session_id=1",
                                   timeout=60,
                                   header=[f"Authorization: token {token}"])) as channels:
        channels.send(json.dumps({
            "channel": "shell", "parent_header": {}, "metadata": {}, "buffers": [],
            "content": {"code": code, "silent": True},
            "header": {"msg_id": "1", "msg_type": "execute_request", "version": "5.3",
                       "username": "", "session": "1",
                       "date": ""}}))
        while (answer := json.loads(channels.recv()))["msg_type"] != "execute_reply":
            pass
        assert answer["content"]["status"] == "ok"
    return kernel


def test_a_kernel_starts_without_a_warning(server):
    kernel = execute(server.port, server.token, "")
    assert ask(server, kernel, token=server.token, method="DELETE")[0] == 204
    # The refusals that this file asks for are logged, as they should be. Nothing else may be, but
    # what a kernel was
    # importing when its end interrupted it: the names of categories count, not a line such as
    # `import warnings`.
    refusals = ("403", "Forbidden", "authenticate", "400 GET /lsp", "404 GET /terminals",
                "elsewhere.example",
                "disable the check", "404 GET /api/contents", "Not Found", "deprecated")
    complaints = [line for line in server.log().splitlines()
                  if re.search(r"Warning\b|WARNING|^\[[WE]", line)]
    assert [line for line in complaints if not any(words in line for words in refusals)] == []


def test_a_notebook_runs_in_the_work_folder_where_its_runs_belong(server, project):
    words = {"path": lab.FIRST, "name": lab.FIRST, "type": "notebook",
             "kernel": {"name": "python3"}}
    status, body = ask(server, "/api/sessions", token=server.token, method="POST",
                       body=json.dumps(words))
    session = json.loads(body)
    family = psutil.Process(server.process.pid).children(recursive=True)
    (kernel,) = [process for process in family
                 if any(session["kernel"]["id"] in word for word in process.cmdline())]
    assert status == 201 and Path(kernel.cwd()) == project
    assert (ask(server, f"/api/sessions/{session['id']}", token=server.token, method="DELETE")[0]
            == 204)


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_the_command_prints_one_object_serves_and_stops(project, state, tmp_path, sent, code):
    """With all that was started in it: a kernel, and what the kernel put into a session of its
    own."""
    taken = socket.create_server((lab.LOCAL, 0))
    asked = taken.getsockname()[1]
    for name in ("tmp", "runtime"):
        (tmp_path / name).mkdir()
    env = os.environ | {"JUPYTER_CONFIG_DIR": str(state / "config"),
                        "TMPDIR": str(tmp_path / "tmp"),
                       attack.MARK: str(tmp_path)}
    with taken, subprocess.Popen(
            [sys.executable, "-m", "lpkit", "lab", "--json", "--no-browser", "--port", str(asked),
             "--course", "work"], cwd=tmp_path,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=env) as it, ExitStack() as stack:
        stack.callback(it.kill)
        printed = json.loads(it.stdout.readline())
        assert printed["port"] != asked and Path(printed["root"]) == tmp_path / "work"
        assert (len(printed["changes"]) == len(list((tmp_path / "work").glob("*.ipynb")))
                and (tmp_path / "work" / lab.FIRST).exists())
        assert f":{printed['port']}/lab/tree/{lab.FIRST}?token=" in printed["url"]
        assert f"-L {printed['port']}:127.0.0.1:{printed['port']}" in printed["tunnel"]
        execute(printed["port"], Path(printed["token_file"]).read_text(),
                "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)")
        # Jupyter looks for language servers by children that end at once
        deadline = time.monotonic() + patience()
        while len(there := attack.processes(tmp_path)) > 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(there) == 5      # the command, its keeper, Jupyter, the kernel, sleep
        begun = time.monotonic()
        it.send_signal(sent)
        out, err = it.communicate(timeout=30)
        assert (it.returncode == code and out == ""
                and f"port {asked} is taken; using {printed['port']}" in err)
    assert attack.until_nothing(tmp_path, begun + 2 * patience()) == []


@pytest.mark.parametrize("words", [["--port", "70000"], ["--port", "-1"]])
def test_what_is_refused_is_refused_before_anything_starts(words, project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert cli.main(["lab", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("lpkit: ") and err.count("\n") == 1


OPENERS = """
from jupyter_server.auth import identity
from jupyter_server.base import handlers
identity.PasswordIdentityProvider.get_user = lambda self, handler: identity.User("anybody")
handlers.JupyterHandler.check_origin = lambda *_: True
handlers.JupyterHandler.check_host = lambda *_: True
handlers.JupyterHandler.check_xsrf_cookie = lambda *_: None
"""


@pytest.mark.parametrize("code, messages", [
    (OPENERS, ("200 without the token", "200 to a page of another site", "200 under another host "
        "name",
               "404 to a write without the XSRF token")),
    ("import re\nc.LabApp.settings = {'allow_origin_pat': re.compile('.*')}",
     ("changed allow_origin_pat",))])
def test_a_server_that_lets_others_in_is_stopped(code, messages, project, tmp_path):
    """What only code of the user's can open, since the kit sets every setting: the proof finds
    it."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "jupyter_lab_config.py").write_text(code)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError) as caught:
        with user(tmp_path, {}, {}), lab.serve(project):
            pytest.fail("it was yielded")
    assert [words for words in messages if words not in str(caught.value)] == []
    assert set(psutil.Process().children(recursive=True)) <= before
