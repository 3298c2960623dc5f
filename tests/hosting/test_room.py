"""A room of learners, opened as a teacher opens it: nobody starves another, and no report is lost.
tests/attack/rooms.py has a hostile learner, who takes ports, sockets, files and names.

Only these tests catch: a learner who takes the memory or the processes of others, a report that is
lost, sent without consent or believed though it was altered, a lab whose failure nobody is told,
and a room that opens where it is not safe.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from hosting import progress
from hosting import room as rooms
from hosting.commands import room as room_command
from lessons import reports
from lpkit import cli, records, turns
from lpkit.errors import ConfigError
from tests.attack import patience
from tests.bench import room as bench
from tests.hosting import rooms as served

PORT, TITLE = 8573, "Friday <b>'s room"
SERVED = pytest.mark.skipif(bool(served.why_no_room()), reason=served.why_no_room())


@pytest.fixture(scope="module")
def room():
    with served.passable_folder() as folder, served.opened(folder, "anna", "ben", "cleo",
            "--learners", "20", "--title", TITLE, "--warm", port=PORT) as info:
        yield info | {"folder": folder}


@pytest.fixture(scope="module")
def anna(room):
    return _person(room, "anna", share=True)


@pytest.fixture(scope="module")
def ben(room):
    return _person(room, "ben", share=False)


def _person(room, name, **options):
    person = served.Person(room["url"], name, served.codes(room["folder"])[name])
    try:
        person.start(**options)
    except urllib.error.HTTPError as error:
        pytest.fail(
           f"{error.read().decode()}\n{(room['folder'] / 'hub' / 'hub.log').read_text()[-6000:]}")
    return person


@SERVED
@pytest.mark.slow
def test_a_learner_is_a_user_whose_kernels_are_its_own(room, anna, ben):
    ben.run("1")
    assert (anna.run("import os; print(os.getuid(), os.getgroups(), oct(os.umask(0o77)))").split()
            == ["52001", "[]", "0o77"])
    connection = ("import json, glob; "
                  "print(*map(json.load(open(glob.glob('/run/lpkit/*/kernel-*.json')[0])).get, "
                  "('transport', 'ip')))")
    for person, uid in ((anna, 52001), (ben, 52002)):      # of all kernels each finds its own
        transport, address = person.run(connection).split()
        assert (transport == "ipc" and address.startswith(f"/run/lpkit/{uid}/")
                and os.stat(f"/run/lpkit/{uid}").st_mode & 0o777 == 0o700)
    log = (room["folder"] / "hub" / "labs" / "ben.log").read_text()
    assert ("Will shut down after 3600 seconds with no kernels" in log
            and "Culling kernels with idle durations > 3600 seconds" in log)


@SERVED
@pytest.mark.slow
def test_who_takes_too_much_is_ended_and_the_neighbour_goes_on(room, anna, ben):
    assert room["memory_bytes"] < 2 << 30
    assert anna.run("x = 1; print(x)").strip() == "1"
    hog = (f"held = [b'x' * (64 << 20) for _ in range({room['memory_bytes'] >> 26} + 8)]; "
           f"print('got it')")
    assert anna.run(hog) != "got it\n"
    assert ben.run("print(len(b'x' * (64 << 20)))").strip() == str(64 << 20)
    output = anna.run("import os\nfor n in range(2000):\n    if not os.fork(): os._exit(not "
                      "__import__('time').sleep(3))")
    assert "BlockingIOError" in output and ben.run("print(6 * 7)").strip() == "42"
    # they are buried, and count no more
    assert "ChildProcessError" in anna.run("while True: os.wait()")


@SERVED
@pytest.mark.slow
def test_reports_of_those_who_agreed_reach_the_teacher_and_nobody_else(room, anna, ben):
    def now(person):
        while served.status(address := f"{room['url']}/services/progress/now", person.token) != 200:
            time.sleep(0.2)     # it was killed
        return served.ask(address, token=person.token)

    teacher = served.Person(room["url"], "teacher", served.codes(room["folder"])["teacher"])
    ben.run("from lessons.reports import report; report('exercise', name='03.ben', "
            "verdict='right')")
    before = len(now(teacher)["events"])
    sent = bench.SENT
    threading.Thread(target=lambda: [time.sleep(0.5)
                                     or [process.kill() for process in bench.service()]
                                     for _ in range(3)]).start()
    assert anna.run(bench.REPORT.format(sent)) == ""
    deadline = time.monotonic() + 120 * patience()
    while len(now(teacher)["events"]) < before + sent and time.monotonic() < deadline:
        time.sleep(0.5)
    events = now(teacher)["events"][before:]
    assert sorted(event["name"] for event in events) == sorted(f"03.{n}" for n in range(sent))
    assert ({event["notebook"] for event in events} == {"03_number_formats"}
            and len({event["pseudonym"] for event in events}) == 1)
    kept = (room["folder"] / "progress.jsonl").read_text()
    assert "anna" not in kept and "03.ben" not in kept
    assert len(now(anna)["events"]) == before + sent and now(ben)["events"] == []
    # a stranger is asked who he is
    assert b"<form" in served.ask(f"{room['url']}/services/progress/now")
    assert b"03.1" in served.ask(f"{room['url']}/services/progress/csv", token=teacher.token)
    assert b"03.1" not in served.ask(f"{room['url']}/services/progress/csv", token=ben.token)


@SERVED
@pytest.mark.slow
def test_a_server_that_ends_while_it_starts_is_started_once_more_and_the_log_says_why(room, ben):
    """JupyterHub 6 answered TypeError: what it raises for a failed start took another argument."""
    name = next(learner for learner in served.codes(room["folder"])
                if learner not in {"anna", "ben", "cleo", "teacher"})
    uid = json.loads((room["folder"] / "room.json").read_text())["members"][name]["uid"]
    home = room["folder"] / "learners" / name
    (home / "tmp").mkdir(parents=True)
    (home / ".room").touch()        # where a folder is needed
    for place in (home, home / "tmp", home / ".room"):
        os.chown(place, uid, uid)
    with pytest.raises((urllib.error.HTTPError, AssertionError), match=r"500|did not start"):
        (person := served.Person(room["url"], name, served.codes(room["folder"])[name])).start(
            share=False)
    why = f"{name}/.room' is a file where a folder is needed; remove it"
    assert (room["folder"] / "hub" / "labs" / f"{name}.log").read_text().count(why) == 2
    assert (room["folder"] / "hub" / "hub.log").read_text().count(f"{name}'s lab ended while it "
        f"started") == 1
    page = served.ask(f"{room['url']}/hub/api/users/{name}/server/progress",
                      token=person.token).decode()
    assert ("Spawn failed: The lab ended twice while it started. The last line of its log: " in page
            and why in page)
    teacher = served.Person(room["url"], "teacher", served.codes(room["folder"])["teacher"])
    shown = {who.name: served.ask(f"{room['url']}/services/progress/now",
                                  token=who.token)["troubles"] for who in (teacher, ben, person)}
    assert (why in shown["teacher"][name] and shown[name] == {name: shown["teacher"][name]}
            and not shown["ben"])


@SERVED
@pytest.mark.slow
@pytest.mark.browser
def test_two_learners_side_by_side_and_the_teachers_map(room, anna, ben, context):
    from playwright.sync_api import TimeoutError as Late

    codes = served.codes(room["folder"])

    def signed_in(name):
        page = context.browser.new_context().new_page()
        page.goto(room["url"])
        assert page.inner_text(".announcement").strip() == TITLE
        page.fill("#username_input", name)
        page.fill("#password_input", codes[name])
        page.click("#login_submit")
        return page

    pages = [signed_in(name) for name in ("cleo", "ben")]
    pages[0].check("input[value=yes]")
    pages[0].click("#spawn_form [type=submit]")
    pages[1].goto(f"{room['url']}/user/ben/lab/tree/01_memory_math.ipynb")
    for page in pages:
        try:
            page.wait_for_selector(".jp-Notebook", timeout=60_000 * patience())
        # a page of the hub that missed its server's start waits for ever: a learner reloads it
        except Late:
            page.reload()
            page.wait_for_selector(".jp-Notebook", timeout=120_000 * patience())
    anna.run("from lessons.reports import report; report('guess', name='03.bits', value=2.0, "
             "measured=4.0, held=True, unit='bits')")
    labs = room["folder"] / "hub" / "labs.json"
    markup = "<img src=x onerror=\"document.title='taken'\">"
    labs.write_text(json.dumps(json.loads(labs.read_text())
                               | {"eve": {"state": "failed", "since": 0, "reason": markup}}))
    teacher = signed_in("teacher")
    teacher.goto(f"{room['url']}/services/progress/")
    teacher.wait_for_selector("#guesses circle", timeout=30_000 * patience())
    assert markup in teacher.inner_text("#troubles") and teacher.title() == TITLE
    assert "1 of 1 held" in teacher.inner_text("#guesses") and teacher.inner_text("h1") == TITLE


def test_a_room_that_cannot_be_is_refused_in_a_sentence(monkeypatch, tmp_path, capsys):
    def refusal(*words):
        capsys.readouterr()
        assert cli.main(["room", *words]) == 2
        return capsys.readouterr().err

    monkeypatch.setattr("hosting.commands.room.needs", lambda *_: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in refusal("anna") and "lpkit lab" in refusal("anna")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(rooms, "refuse_closed", lambda *_: None)
    monkeypatch.setattr(sys, "platform", "linux")
    folder = ("--folder", str(tmp_path / "room"))
    assert "'../anna'" in refusal("../anna", *folder)
    pytest.importorskip("jupyterhub")
    assert "did you mean 'dummy'" in refusal("anna", *folder, "--authenticator", "dumy",
                                             "--teacher", "boss")
    assert "module.Class" in refusal("anna", *folder, "--authenticator", "lpkit.nothing.Here",
                                     "--teacher", "boss")
    rooms.refuse_missing("jupyterhub.auth.PAMAuthenticator")
    assert "--learners must be from 0 to 500, got -1" in refusal("--learners", "-1")
    assert "1 to 500 learners, got 0" in refusal(*folder)
    assert "unencrypted" in refusal("anna", "--address", "0.0.0.0")
    assert "--title must have at most 200 printable characters" in refusal("anna", "--title",
        "\x1b[2J") and "got" in refusal("anna", "--title", "x" * 201)
    assert "no file" in refusal("anna", "--address", "0.0.0.0", "--tls", "none.pem", "none.key")
    assert "has memory for" in refusal("--learners", "499", *folder)
    monkeypatch.setenv("PATH", "")
    assert "npm install -g configurable-http-proxy" in refusal("anna", *folder)


LEAVES = """
import socket, sys, tests
from hosting import hub
if not hub.leave_network():
    sys.exit("0")
with socket.create_server(("127.0.0.1", 0)) as server, \
        socket.create_connection(server.getsockname(), timeout=10):
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_a_process_with_a_network_of_its_own_takes_no_port_of_the_machine():
    pytest.importorskip("jupyterhub")
    with subprocess.Popen([sys.executable, "-c", LEAVES], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        if not (port := int(process.stdout.readline() or 0)):
            pytest.skip("no network namespace can be made here")
        with socket.socket() as probe:        # within it answers, and here the port is free
            probe.bind(("127.0.0.1", port))
        process.communicate("")


def test_a_taken_port_is_said(tmp_path):
    with rooms.socket.create_server(("127.0.0.1", 0)) as taken:
        room = rooms.Room(folder=str(tmp_path), members={}, memory_bytes=1, threads=1, gpus=0,
                          port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="another --port"):
            rooms.refuse_taken(room)
    rooms.refuse_taken(room)


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0,
                    reason="only root may become another user")
def test_a_learner_who_took_the_port_before_the_proxy_is_not_asked(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        room = rooms.Room(folder=str(tmp_path), members={}, memory_bytes=1, threads=1, gpus=0,
                          port=free.getsockname()[1])
    for uid, believed in ((52_001, False), (0, True)):
        with subprocess.Popen([sys.executable, "-m", "tests.attack._guest", str(uid), "0", "0", "0",
                               str(room.port)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=served.HERE,
                              text=True) as taker:
            assert taker.stdout.readline()
            with socket.create_connection(("127.0.0.1", room.port), timeout=10) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert b"200 OK" in connection.recv(1000)
            assert rooms.answers(room) == believed      # it says 200 to everybody
            taker.communicate("")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no Unix users here")
def test_who_is_there_keeps_number_and_code(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "refuse_what_cannot_be", lambda: None)
    monkeypatch.setattr(rooms, "refuse_closed", lambda *_: None)
    first = rooms.opened(tmp_path, ["anna"], proxy="sh", port=1)
    again = rooms.opened(tmp_path, ["ben"], proxy="sh", port=1)
    assert (again.members["anna"] == first.members["anna"]
            and set(again.members) == {"teacher", "anna", "ben"})
    joined = rooms.joined(again, "cleo")
    assert (rooms.read(tmp_path).members["cleo"] == joined
            and len({member.uid for member in rooms.read(tmp_path).members.values()}) == 4)
    assert (tmp_path / "room.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="cannot be"):
        rooms.joined(again, "../cleo")
    (tmp_path / "room.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not a room of lpkit"):
        rooms.opened(tmp_path, ["anna"], proxy="sh", port=1)


# ---- labs that do not start

SAYS = "print('copied'); print('\\x1b[2J<b>no space left</b>' + 300 * 'x'); print()"


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A spawner of JupyterHub, whose labs are the command in `says`: no hub and no other user is
    needed."""
    hub = pytest.importorskip("hosting.hub")
    rooms.write(rooms.Room(folder=str(tmp_path), members={"anna": rooms.Member(uid=52001, code="")},
                           memory_bytes=1, threads=1, gpus=0, port=1))
    (tmp_path / "hub" / "labs").mkdir(parents=True)

    async def start(self):
        self.proc = subprocess.Popen([sys.executable, "-c", self.says],
                                     stdout=self.popen_kwargs["stdout"],
                                     stderr=self.popen_kwargs["stderr"])
        return "127.0.0.1", self.port

    monkeypatch.setattr(hub.LocalProcessSpawner, "start", start)
    monkeypatch.setattr(hub.LocalProcessSpawner, "server", SimpleNamespace(base_url="/user/anna/"))
    monkeypatch.setattr(hub, "furnish", lambda *_: None)
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.1)
    spawner = hub.Desk(folder=str(tmp_path), user=SimpleNamespace(name="anna"))
    yield spawner
    spawner.listener.close()
    if spawner.proc and spawner.proc.poll() is None:
        spawner.proc.kill()
        spawner.proc.wait()


def started(desk, says):
    """The sentence of the failure, as JupyterHub finds it."""
    def run():
        with pytest.raises(Exception) as caught:
            asyncio.run(desk.start())
        return caught.value

    desk.says = says
    # a browser's test may have left an event loop in this thread
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(run).result()
    return getattr(error, "jupyterhub_message", error)


def test_a_lab_that_ends_is_named_with_the_last_line_of_its_log(desk, tmp_path):
    message = started(desk, SAYS)
    last = "\\x1b[2J<b>no space left</b>"
    assert message.startswith(f"The lab ended twice while it started. The last line of its log: "
                              f"{last}xxx") and message.endswith("x...") and len(message) < 300
    assert rooms.log_path(tmp_path, "anna").read_text().count("copied") == 2
    assert progress.troubles(tmp_path) == {"anna": message}
    desk.clear_state()      # JupyterHub's own, at the end of a failed start and before the next
    assert progress.troubles(tmp_path) == {"anna": message}
    desk._note("open")
    assert not progress.troubles(tmp_path) and rooms.labs(tmp_path)["anna"]["state"] == "open"
    desk.clear_state()
    assert rooms.labs(tmp_path) == {}


def test_a_lab_that_does_not_answer_is_named(desk, tmp_path, monkeypatch):
    monkeypatch.setattr("hosting.hub.START_SECONDS", 1.0)
    message = started(desk, "import time; print('waits for the disk', flush=True); time.sleep(60)")
    assert message == ("The lab did not answer within 1 s. The last line of its log: waits for "
                       "the disk")
    assert progress.troubles(tmp_path) == {"anna": message}


def test_a_lab_that_cannot_be_furnished_is_named(desk, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hosting.hub.furnish", full)
    assert ("No space left" in str(started(desk, ""))
            and "No space left" in progress.troubles(tmp_path)["anna"])
    monkeypatch.setattr("hosting.hub.files.write_atomically", full)
    desk._note("open")      # the hub must be able to end a lab on a full disk, too


def test_a_learners_page_shows_the_seconds_and_the_last_line(desk, tmp_path):
    async def first():
        async for event in desk.progress():
            return event

    rooms.log_path(tmp_path, "anna").write_text("copied\n")
    desk._began = time.monotonic() - 20
    with ThreadPoolExecutor(1) as pool:
        event = pool.submit(lambda: asyncio.run(first())).result()
    # "message": JupyterHub shows it as text
    assert event == {"progress": 45, "message": "Your lab has been starting for 20 s. copied"}


def test_the_teachers_terminal_counts_labs_and_names_each_late_one_once(tmp_path, monkeypatch,
        capsys):
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "TELL_SECONDS", 0.0)
    room = rooms.Room(folder=str(tmp_path), members=dict.fromkeys(["anna", "ben", "cleo"]),
                      memory_bytes=1, threads=1, gpus=0, port=1)
    (tmp_path / "hub" / "labs").mkdir(parents=True)
    rooms.log_path(tmp_path, "ben").write_text("x\n\x1b]0;mine\x07\u202e of ben\n\n")
    now = time.time()
    (tmp_path / "hub" / "labs.json").write_text(json.dumps({
        "anna": {"state": "open", "since": now, "reason": ""},
        "ben": {"state": "starting", "since": now - 100, "reason": ""},
        "\x1b[2Jeve": {"state": "failed", "since": now, "reason": "ended"}}))
    with subprocess.Popen([sys.executable, "-c",
                           "import time; time.sleep(0.5); raise SystemExit(3)"]) as hub:
        assert progress.watch(room, hub) == 3
    printed = capsys.readouterr().err
    assert (printed.count("ben: The lab has been starting for 10") == 1
            and r"The last line of its log: \x1b]0;mine\x07\u202e of ben" in printed)
    assert (printed.count(r"\x1b[2Jeve: ended") == 1
            and printed.count("1 of 3 labs are open; 1 more has been starting for up to 10") == 1)


def test_names_of_logs_stay_in_their_folder(tmp_path):
    assert rooms.log_path(tmp_path, "../../etc/x").parent == tmp_path / "hub" / "labs"
    assert rooms.last_line(tmp_path, "nobody") == ""
    (tmp_path / "hub" / "labs").mkdir(parents=True)
    rooms.log_path(tmp_path, "anna").write_bytes(b"\xff" * 5000)
    assert len(rooms.last_line(tmp_path, "anna")) <= 203


def test_the_rooms_name_stands_on_the_hubs_pages_as_text(tmp_path):
    hub = pytest.importorskip("hosting.hub")
    config = hub.LocalProcessSpawner().config.__class__()
    room = rooms.Room(folder=str(tmp_path), members={}, memory_bytes=1, threads=1, gpus=0, port=1,
                      title=TITLE)
    with socket.create_server(("127.0.0.1", 0)) as page:
        hub.configure(config, room, page, "secret")
    assert (config.JupyterHub.template_vars == {"announcement": "Friday &lt;b&gt;&#x27;s room"}
            and 'name="share"' in config.Desk.options_form)


def test_warming_prints_how_long_it_takes_and_what_went_wrong(tmp_path, monkeypatch, capsys):
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 0.5\necho no kernel for this processor "
                                     ">&2\nexit $ENDS\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(room_command, "TELL_SECONDS", 0.1)
    monkeypatch.setenv("ENDS", "3")
    (tmp_path / "shared").mkdir()
    room = rooms.Room(folder=str(tmp_path), members={}, memory_bytes=1, threads=1, gpus=0, port=1)
    with pytest.raises(ConfigError,
                       match="'cpu-3m' could not be prepared: no kernel for this processor"):
        room_command.warm(room, ["cpu-3m"])
    assert "preset cpu-3m (1 of 1), 0 s" in capsys.readouterr().err
    monkeypatch.setenv("ENDS", "0")
    room_command.warm(room, ["a", "b"])
    printed = capsys.readouterr().err
    assert printed.count("preset a (1 of 2), 0 s") > 1 and "preset b (2 of 2), 1 s" in printed
    room_command.warm(room, ["a", "b"])     # once per room
    assert capsys.readouterr().err == ""


# ---- reports

def report(id, **more):
    return {"id": id, "kind": "exercise", "notebook": "03_number_formats", "name": "03.cast",
            "verdict": "wrong", **more}


def test_a_store_keeps_each_report_once_and_mends_what_a_kill_cut_off(tmp_path):
    store = progress.Store(tmp_path)
    store.add("anna", [report("1"), report("2"), report("1")])
    with store.path.open("a") as file:
        file.write('{"id": "3", "ki')
    store.add("anna", [report("2"), report("3")])
    store.add("ben", [report("4")])
    assert [event["id"] for event in progress.Store(tmp_path).events()] == ["1", "2", "3", "4"]
    names = store.pseudonyms()
    assert [event["pseudonym"] for event in store.events()] == [names["anna"]] * 3 + [names["ben"]]
    assert "anna" not in store.path.read_text()
    assert store.delete() == 4 and not store.events() and not store.pseudonyms()


BAD = [None, [], 7, {"id": "1"}, report("2", value="x" * 1000), report(["1"]),
       report("2", value=float("nan")), report("2", value=float("inf")),
       report("2", seconds=10**400), report("2", notebook=5), {**report("2"), "name": None},
       report("2", name=7), report("2", name="\ud800"),
       report("2", name="\x1b[2J"), report("2", held="yes"), report("2", attempts=True),
       report("2", kind="party"), report("2", kind=["exercise"])]


def test_what_is_no_report_is_passed_over_and_stops_nothing(tmp_path, capsys):
    """One such report stopped the map, the table and the command for good."""
    store = progress.Store(tmp_path)
    assert not [bad for bad in BAD if store.add("anna", [bad])]
    assert store.add("anna", [report("9"), *BAD, report("8")]) == 2
    assert [event["id"] for event in store.events()] == ["9", "8"]
    (tmp_path / "room.json").write_text("{}")
    assert cli.main(["progress", "--room", str(tmp_path), "--csv", str(tmp_path / "all.csv")]) == 0
    assert (len((tmp_path / "all.csv").read_text().splitlines()) == 3
            and "2 reports of 1 learners" in capsys.readouterr().out)


def test_a_learner_fills_the_own_share_and_nobody_elses(tmp_path):
    store = progress.Store(tmp_path)
    assert store.add("anna", [report(str(n)) for n in range(progress.EACH + 50)]) == progress.EACH
    assert store.add("anna", [report("late")]) == 0 and store.add("ben", [report("b")]) == 1
    again = progress.Store(tmp_path)        # a service that was started again counts on
    assert (again.add("anna", [report("later")]) == 0
            and again.add("ben", [report("b"), report("c")]) == 1)


def test_a_store_sees_what_the_command_deleted(tmp_path):
    store = progress.Store(tmp_path)
    store.add("anna", [report("1")])
    assert progress.Store(tmp_path).delete() == 1
    assert store.add("anna", [report("1")]) == 1 and len(store.events()) == 1


@pytest.mark.parametrize("way", ["flip", "cut", "drop", "double", "swap", "garbage"])
def test_an_altered_report_is_named_and_stops_nothing(tmp_path, way, capsys):
    store, chance = progress.Store(tmp_path), random.Random(way)
    store.add("anna", [report(str(n)) for n in range(6)])
    whole = store.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for _ in range(8):
        n = chance.randrange(1, 5)
        at = len(b"".join(lines[:n])) + chance.randrange(len(lines[n]) - 2)
        changed = {"flip": whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(7)])
                   + whole[at + 1:], "cut": whole[:at] + whole[at + 5:],
                   "drop": b"".join(lines[:n] + lines[n + 1:]),
                   "double": b"".join([*lines[:n], lines[n - 1], *lines[n:]]),
                   "swap": b"".join([*lines[:n], lines[n + 1] if n < 5 else lines[0], lines[n],
                                     *lines[n + 2:]]),
                   "garbage": b"".join([*lines[:n], b"[" * 5000 + b"\n", *lines[n:]])}[way]
        store.path.write_bytes(changed)
        kept = store.events()
        assert (store.problems and {event["id"] for event in kept} <= set("012345")
                and len(kept) >= 3)
        assert all(event == report(event["id"], pseudonym=event["pseudonym"]) for event in kept)
    (tmp_path / "room.json").write_text("{}")
    assert (cli.main(["progress", "--room", str(tmp_path)]) == 0
            and "progress.jsonl" in capsys.readouterr().out)


def test_damaged_pseudonyms_are_set_aside(tmp_path, capsys):
    store = progress.Store(tmp_path)
    store.add("anna", [report("1")])
    store.names.write_text(store.names.read_text().replace("anna", "ben"))
    assert (store.pseudonyms() == {} and (tmp_path / "damaged" / "pseudonyms.json").exists()
            and "checksum" in capsys.readouterr().err)
    assert store.add("anna", [report("2")]) == 1


def test_a_lost_end_and_lost_names_of_reports_are_named(tmp_path):
    """A chain of lines does not show that its last lines are gone; the record of the pseudonyms
    does."""
    store = progress.Store(tmp_path)
    for name in ("anna", "ben"):
        store.add(name, [report(name)])
    assert len(store.events()) == 2 and not store.problems
    whole, names = store.path.read_bytes(), store.names.read_bytes()
    for text in (whole.splitlines(keepends=True)[0], b""):
        store.path.write_bytes(text)
        assert (len(store.events()) < 2 and "lacks lines that" in store.problems[0]
                and "pseudonyms.json" in store.problems[0])
    store.path.write_bytes(whole)
    store.names.unlink()
    assert len(store.events()) == 2 and all(name in store.problems[0]
        for name in records.unsealed(names.decode(), store.names)["names"].values())


@pytest.mark.parametrize("which, make", [
    ("progress.jsonl", os.mkfifo), ("progress.jsonl", lambda path: path.symlink_to("/dev/zero")),
    ("progress.jsonl", lambda path: (path.touch(), os.truncate(path, 2 << 30))),
    ("pseudonyms.json", os.mkfifo), ("pseudonyms.json", lambda path: path.mkdir())],
    ids=["pipe", "link", "huge", "pipe of names", "folder of names"])
def test_what_is_no_file_of_reports_is_set_aside(make, which, tmp_path, capsys):
    make(tmp_path / which)
    store = progress.Store(tmp_path)
    assert store.events() == [] and len(store.problems) == (which == "progress.jsonl")
    assert store.add("anna", [report("1")]) == 1 and len(store.events()) == 1 and not store.problems
    assert (f"{tmp_path / which} " in (errors := capsys.readouterr().err)
            and "it was moved to damaged/" in errors
            and os.path.lexists(tmp_path / "damaged" / which))


def test_an_empty_code_signs_in_as_nobody(tmp_path):
    """A member who signed up at another authenticator has no code."""
    hub = pytest.importorskip("hosting.hub")
    members = {"anna": rooms.Member(uid=52001, code=""),
               "ben": rooms.Member(uid=52002, code=rooms.new_code())}
    rooms.write(rooms.Room(folder=str(tmp_path), members=members, memory_bytes=1, threads=1, gpus=0,
                           port=1))
    codes = hub.Codes(folder=str(tmp_path))

    def enters(name, code):
        # a browser's test may have left an event loop in this thread
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, codes.authenticate(None,
                {"username": name, "password": code})).result()

    assert enters("anna", "") is None and enters("ben", "") is None and enters("cleo", "") is None
    assert enters("ben", members["ben"].code.upper()) == "ben"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no Unix users here")
def test_another_authenticator_needs_the_teachers_own_name(monkeypatch, tmp_path, capsys):
    """Whoever is called teacher there would rule the room."""
    assert cli.main(["room", "anna", "--authenticator", "dummy", "--folder",
                     str(tmp_path / "room")]) == 2
    assert "--teacher" in capsys.readouterr().err and not (tmp_path / "room").exists()


def test_a_report_carries_no_token(tmp_path, monkeypatch):
    """It went to whoever had taken the port of a service that had died."""
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret-of-anna")
    heard = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path := str(tmp_path / "socket"))
        server.listen()

        def answer():
            end, _ = server.accept()
            with end:
                request = b""
                while not request.endswith(b"]"):      # headers and body come apart
                    request += end.recv(1 << 16)
                heard.append(request)
                end.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        reports.send(path, ['{"id": "1"}'])
        thread.join(20)
    assert b"POST /services/progress/report" in heard[0] and b"secret-of-anna" not in heard[0]
    with pytest.raises(OSError):
        reports.send(str(tmp_path / "nobody"), ["{}"])


def test_a_report_has_known_fields_alone_and_no_formula(tmp_path):
    kept = progress.checked(report("1", text="my code", name="=HYPERLINK(1)"))
    assert "text" not in kept
    assert "'=HYPERLINK(1)" in progress.table([kept]).splitlines()[1]


def test_the_command_says_who_is_stopped_writes_a_table_and_deletes(tmp_path, capsys):
    def printed(*words):
        assert cli.main(["progress", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    (tmp_path / "room.json").write_text("{}")
    store = progress.Store(tmp_path)
    store.add("anna", [report("1"), report("2", verdict="right"), report("3", name="03.round")])
    store.add("ben", [report("4")])
    table = tmp_path / "all.csv"
    summary = printed("--room", str(tmp_path), "--csv", str(table))
    assert summary["exercises"] == {"03.cast": {"right": 1, "not_yet": 1},
                                    "03.round": {"right": 0, "not_yet": 1}}
    assert len(table.read_text().splitlines()) == 5
    assert (printed("--room", str(tmp_path), "--delete")["deleted"] == 4
            and printed("--room", str(tmp_path))["reports"] == 0)
    assert cli.main(["progress", "--room", str(tmp_path / "none")]) == 2


def test_files_that_learners_hand_in_are_collected(tmp_path, capsys):
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / "learner.json").write_text(json.dumps({
        "format": "lpkit-learner", "version": 1,
        "exercises": {"03.cast": {"right": True, "attempts": 2, "first_right": "2026-11-24"}},
        "guesses": [{"name": "03.bits", "question": "?", "value": 3.0, "unit": "bits",
                     "factor": 2.0, "date": "2026-11-24", "measured": 4.0, "held": True}]}))
    assert cli.main(["progress", "--collect", str(tmp_path / "anna" / "learner.json"), "--csv",
                     str(tmp_path / "all.csv"), "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["exercises"]
            == {"03.cast": {"right": 1, "not_yet": 0}})
    assert ([line.split(",")[0] for line in (tmp_path / "all.csv").read_text().splitlines()]
            == ["pseudonym", "anna", "anna"])
    (tmp_path / "anna" / "learner.json").write_text("{")
    assert cli.main(["progress", "--collect", str(tmp_path / "anna" / "learner.json")]) == 2


def test_reports_wait_for_a_service_that_is_away(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(reports, "AGAIN_SECONDS", 0.01)
    sent, down = [], [True] * 3

    def send(url, lines):
        if down:
            down.pop()
            raise OSError("it is away")
        sent.extend(lines)

    monkeypatch.setattr(reports, "send", send)
    reports.report("exercise", name="03.cast", verdict="right")
    assert not reports._outbox().exists()       # nobody asked
    monkeypatch.setenv("LPKIT_PROGRESS", "/nowhere")
    for n in range(3):
        reports.report("exercise", name=f"03.{n}", verdict="right")
    deadline = time.monotonic() + 20 * patience()
    while reports._outbox().read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    # one that still looks whether it is done would hold the lock in the next test
    for thread in threading.enumerate():
        if "(_send_all)" in thread.name:
            thread.join(20 * patience())
    assert sorted(json.loads(line)["name"] for line in sent) == ["03.0", "03.1", "03.2"]


def test_a_report_that_finds_the_sender_at_its_end_is_sent_too(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    sent, empty = [], reports._empty

    def late(url):
        empty(url)
        if len(sent) == 1:      # its thread meets one that sends, and leaves it to that one
            with reports._outbox().open("a") as file:
                file.write("second\n")

    monkeypatch.setattr(reports, "send", lambda url, lines: sent.extend(lines))
    monkeypatch.setattr(reports, "_empty", late)
    reports._outbox().parent.mkdir(parents=True)
    reports._outbox().write_text("first\n")
    reports._send_all("/nowhere")
    assert (sent == ["first", "second"] and not reports._outbox().read_text()
            and not reports._sending.locked())


# ---- turns at a GPU

WAITS = """
import sys, time
from lpkit.turns import turn
with turn("cuda"):
    print("mine", flush=True)
    sys.stdin.readline()
"""


def test_one_at_a_time_in_order_and_a_killed_one_counts_no_more(tmp_path):
    env = os.environ | {"LPKIT_TURNS": str(tmp_path)}

    def asks(before):
        process = subprocess.Popen([sys.executable, "-c", WAITS], env=env, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = process.stderr.readline() if before else process.stdout.readline()
        assert line == (f"the GPU is in use: {before} before you\n" if before else "mine\n")
        return process

    first, second, third = (asks(before) for before in range(3))
    second.send_signal(signal.SIGKILL)
    second.wait()
    first.communicate("\n")
    assert third.stdout.readline() == "mine\n"
    third.communicate("\n")
    assert len(list(tmp_path.iterdir())) == 1       # the killed one's, which counts no more
    for process in (first, second, third):
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def test_what_begins_in_a_turn_has_it_and_a_cpu_waits_for_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("LPKIT_TURNS", str(tmp_path))
    with turns.turn("cpu"):
        assert not list(tmp_path.iterdir())
    with turns.turn("cuda"), turns.turn("cuda"):
        assert len(list(tmp_path.iterdir())) == 1
    assert os.environ["LPKIT_TURNS"] == str(tmp_path) and not list(tmp_path.iterdir())
    Path(tmp_path, "pipe").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe")        # a trap: who opens it to read would wait for ever
    with turns.turn("cuda"):
        pass


def test_the_page_has_what_was_measured():
    from tests.pages.room import PAGE, page

    assert PAGE.read_text() == page()
