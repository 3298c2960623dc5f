"""Rooms, each in a network of its own, with a teacher, a learner at work, and Eve: a learner who is
hostile, and has an account on the machine besides. She plays every role below, in an order of
chance; while services, labs, the proxy and at last the hub are killed, she takes ports. In every
eighth room a process of hers binds ports as fast as it can before the room opens and as long as it
is open: at first all, so that the room cannot open and says so, then all but few.

Harm is done if she gets what is another's or is believed in another's place; if the neighbour's
cell, the teacher's map and table or `lpkit progress` does not answer, or a report of the
neighbour's is lost. Each role does first to what is Eve's what it then does to others'.
"""

import csv
import http.client
import io
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tests.attack import NOT_TRIED, Outcome, _guest, patience
from tests.attack._strangers import own_network
from tests.bench import room as bench
from tests.hosting import rooms

COUNT, FEW = 23, 1
LOOP_EVERY, LOOP_AT = 8, 6      # rooms beside a loop on ports
PORT = 983                      # of those that only root may take: docs/teach.md says when
NAMES = ("eve", "ben")
UIDS = {"guest": 52_000, "teacher": 52_001, "eve": 52_002, "ben": 52_003}
STRANGER = 51_999               # who is not in the room
PROMISED_SECONDS = 30.0         # in which the teacher's map answers, and a report arrives
PORTS = (10_000, 65_000)
SENT, BURST, MOST = 5, 50_000, 2000     # reports; the last: of one learner, as docs/teach.md says
# connections: twice as many as a process has files where nobody raised the limit
CROWD = 2100
MAP = rooms.HERE / "notebooks" / "hosting" / "map.html"
ONE = ("import json, os, random, threading, time; from tests.attack import _guest as g; PATH = "
       "os.environ['LPKIT_PROGRESS']")


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    if why := rooms.why_no_room():
        outcome.facts[NOT_TRIED] = why
        return outcome
    kinds: dict[str, dict[str, int]] = {}
    facts: dict[str, float] = {}
    for number in range(count):
        loop = number % LOOP_EVERY == LOOP_AT
        words = [sys.executable, "-m", "tests.attack.rooms", "loop" if loop else "hostile",
                 f"{seed} {number}"]
        begun = time.monotonic()
        with (folder / f"{number}.log").open("w+") as log:
            done = subprocess.run(words, cwd=rooms.HERE, stdout=subprocess.PIPE, stderr=log,
                                  text=True, check=False)
            log.seek(0)
            heard = log.read()
        trial = f"seed {seed}, room {number}"
        if not done.stdout.startswith("{"):
            outcome.tried += 1
            outcome.failed("the room did not get to its end",
                           f"{trial}: exit code {done.returncode}, {heard[-600:]}")
            continue
        report = json.loads(done.stdout)
        if NOT_TRIED in report:
            outcome.facts[NOT_TRIED] = report[NOT_TRIED]
            return outcome
        outcome.tried += 1
        for what, details in report["failures"].items():
            for detail in details:
                outcome.failed(what, f"{trial}: {detail}")
        for role, tried in report["tried"].items():
            counts = kinds.setdefault(role, {"attempts": 0, "did harm": 0})
            counts["attempts"] += tried
            counts["did harm"] += report["harm"].get(role, 0)
        for key, value in (report["facts"] | {"slowest_room_seconds": time.monotonic()
                - begun}).items():
            facts[key] = round(max(facts.get(key, 0.0), value), 2)
    outcome.facts = facts | kinds
    return outcome


class Trial:
    """One room, and what went wrong in it."""

    def __init__(self, seed: str, folder: Path):
        self.rng, self.folder, self.outcome = random.Random(seed), folder, Outcome()
        self.tried: dict[str, int] = {}
        self.harms: dict[str, int] = {}
        self.role, self.reports = "", 0

    def attempts(self, count: int = 1) -> None:
        self.tried[self.role] = self.tried.get(self.role, 0) + count

    def harm(self, what: str, detail: object = "") -> None:
        self.harms[self.role] = self.harms.get(self.role, 0) + 1
        self.outcome.failed(what, f"{self.role}, {detail}")

    def controlled(self, works: object, what: str) -> None:
        """Without this, that nothing happened to others would say nothing."""
        if not works:
            self.harm("the attack cannot do even what it may", what)

    def slowest(self, what: str, seconds: float) -> None:
        self.outcome.facts[what] = max(self.outcome.facts.get(what, 0.0), seconds)

    def enter(self, room: dict[str, Any]) -> None:
        self.url, codes = room["url"], rooms.codes(self.folder)
        self.codes = codes
        self.eve, self.ben, self.teacher = (rooms.Person(self.url, name, codes[name])
            for name in (*NAMES, "teacher"))
        with_all((self.eve, self.ben, self.teacher), lambda person: person.start(share=True))
        self.eve.run(ONE)
        self.hub = next(process.parent() for process in psutil.process_iter(["cmdline"])
                        if is_proxy(process) and process.environ().get("LPKIT_ROOM")
                        == str(self.folder / "room.json"))

    def in_lab(self, code: str) -> Any:
        """What Eve's kernel says, which is JSON."""
        printed = self.eve.run(f"print(json.dumps({code}))")
        try:
            return json.loads(printed)
        except ValueError:
            self.harm("Eve's kernel said something else", printed[-300:])
            return None

    def machine(self, code: str, uid: int = UIDS["eve"]) -> Any:
        """What a process of this user on the machine says."""
        begin = (f"import json, os, random; from tests.attack import _guest as g; "
                 f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})")
        done = subprocess.run([sys.executable, "-c", f"{begin}\nprint(json.dumps({code}))"],
                              cwd=rooms.HERE, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)

    # ---- the lesson

    def shown(self, what: str) -> bytes:
        """What the teacher sees there. A service that was killed is there again in a second."""
        begun = time.monotonic()
        while time.monotonic() - begun < PROMISED_SECONDS * patience():
            status, text = asked(f"/services/progress/{what}", token=self.teacher.token)
            if status == 200:
                self.slowest("slowest_map_seconds", time.monotonic() - begun)
                return text
            time.sleep(0.2)
        self.harm("the teacher's map stopped", f"{what!r} answered {status}")
        return b'{"events": []}'

    def events(self) -> list[dict[str, Any]]:
        return json.loads(self.shown("now"),
                          parse_constant=lambda word: self.harm("the map is no JSON",
                              word))["events"]

    def report(self) -> None:
        """The neighbour reports, as the course does."""
        first, self.reports = self.reports, self.reports + SENT
        printed = self.ben.run("from lessons.reports import report\n"
                           f"for n in range({first}, {self.reports}): report('exercise', "
                           f"name=f'03.ben{{n}}', verdict='right')", seconds=60 * patience())
        if printed:
            self.harm("the neighbour's cell stopped", printed[-300:])

    def lesson(self) -> None:
        """All that a lesson needs goes on."""
        try:
            if (printed := self.ben.run("print(6 * 7)", seconds=60 * patience())).strip() != "42":
                self.harm("the neighbour's cell stopped", printed[-300:])
        except (AssertionError, OSError, urllib.error.HTTPError) as error:
            self.harm("the neighbour's cell stopped", error)
        if self.shown("") != MAP.read_bytes():
            self.harm("the teacher's map stopped", "no page")
        begun, names = time.monotonic(), set()
        while time.monotonic() - begun < PROMISED_SECONDS * patience():
            events = self.events()
            names = {event["name"] for event in events}
            if {f"03.ben{n}" for n in range(self.reports)} <= names:
                break
            time.sleep(0.2)
        else:
            self.harm("a report of the neighbour's was lost",
                      sorted({f"03.ben{n}" for n in range(self.reports)} - names)[:5])
        self.slowest("slowest_report_seconds", time.monotonic() - begun)
        rows = list(csv.reader(io.StringIO(self.shown("csv").decode())))
        if (len(rows) < len(events) + 1 or any(cell[:1] in ("=", "@") for row in rows
                for cell in row)):
            self.harm("the teacher's table is wrong", len(rows))

    def again(self, person: rooms.Person) -> None:
        """A lab that was killed is started again."""
        with suppress(urllib.error.HTTPError):
            person.ask(f"/hub/api/users/{person.name}/server", method="DELETE")
        while person.ask(f"/hub/api/users/{person.name}")["servers"]:
            time.sleep(0.1)
        try:
            person.start(share=True)
        except (AssertionError, urllib.error.HTTPError) as error:
            self.harm("a lab does not start again", error)

    # ---- the roles

    def listening(self) -> set[int]:
        """Ports of the hub, which holds those of the labs, of the proxy and of the service."""
        ports = set()
        for process in [self.hub, *self.hub.children(recursive=True)]:
            with suppress(psutil.Error):
                if process.uids().real == 0:
                    ports |= {each.laddr.port for each in process.net_connections("tcp")
                              if each.status == psutil.CONN_LISTEN}
        return ports

    def ports(self) -> None:
        """She takes ports of labs, of the service and of the proxy, from within and from without,
        while those who had them are killed."""
        theirs, free = self.listening(), free_port()
        if len(theirs) < 5:
            self.controlled(False, f"only {theirs} listen")
        self.in_lab(f"globals().update(taker=g.Taker().begin({[free, *theirs]})) or 1")
        with taking(UIDS["eve"], (0, 0), 0.0, [free, *theirs]) as stranger:
            victims = {"service": bench.service(), "the neighbour's lab": processes(UIDS["ben"]),
                       "the teacher's lab": processes(UIDS["teacher"]),
                       "proxy": [*filter(is_proxy, self.hub.children())]}
            for name, victim in sorted(victims.items(), key=lambda _: self.rng.random()):
                self.controlled(victim, f"there is no {name}")
                self.attempts(len(theirs))
                for process in victim:
                    with suppress(psutil.Error):
                        process.kill()
                for _ in range(2):
                    for port in theirs:
                        if b"EVE" in said_at(port):
                            self.harm("she is believed at a port", f"{name} was killed, {port}")
            self.controlled(b"EVE" in said_at(free, 20 * patience()), "a free port")
            deadline = time.monotonic() + PROMISED_SECONDS * patience()
            while asked("/hub/api/")[0] != 200 and time.monotonic() < deadline:
                time.sleep(0.2)
            with_all((self.ben, self.teacher), self.again)
            self.report()
            self.lesson()
        self.heard(stranger, {free})
        self.heard(self.in_lab("taker.end()"), set())

    def heard(self, report: dict[str, Any] | None, ours: set[int]) -> None:
        for line in (report or {"heard": ["nothing was said"]})["heard"]:
            if not line.partition(":")[0].isdigit() or int(line.partition(":")[0]) not in ours:
                self.harm("she heard what was for another", line)

    def sockets(self) -> None:
        """She replaces the sockets of root's services, asks the proxy for its routes, and reports
        as somebody else."""
        paths = [f"/run/lpkit/{name}-{PORT}" for name in ("hub", "proxy", "reports")]
        for where in (self.in_lab, self.machine):
            for path in paths:
                self.attempts(10)
                if ways := where(f"g.replaced({path!r})"):
                    self.harm("a socket of root's was replaced", f"{path}: {ways}")
            self.attempts(2)
            if where(f"g.asked({paths[1]!r}, 'GET', '/api/routes')[0]") == 200:
                self.harm("the proxy told its routes")
        own = f"/run/lpkit/{UIDS['eve']}/own"
        self.controlled("unlink" in self.in_lab(
            f"open({own!r}, 'w').close() or g.replaced({own!r})"), "a file of her own")
        body = json.dumps([_guest.report("x", name="03.ben0")])
        self.attempts(2)
        if ((status := self.machine(f"g.asked({paths[2]!r}, 'POST', '/services/progress/report', "
                                    f"{body!r})[0]", STRANGER)) != 403):
            self.harm("a stranger reports", status)
        if ((status := asked("/services/progress/report", "POST", self.eve.token, body)[0]) not
            in (403, 405)):
            self.harm("somebody reports through the proxy", status)

    def empty_codes(self) -> None:
        """She signs in as another without a code."""
        nothing = [{"password": word} for word in ("", " ", "\n", "\0", "-", None, 0, False, [],
            {}, ["", ""])] + [{}]
        for name in ("guest", "ben", "teacher", "eve", "zoe", "", None):
            for word in nothing:
                self.attempts()
                status, text = asked(f"/hub/api/users/{name or 'ben'}/tokens", "POST",
                                     body=json.dumps({"auth": {"username": name, **word}}))
                if status < 300 and b"token" in text:
                    self.harm("an empty code signs in", f"{name} {word}")
        right = {"username": "ben", "password": f" {self.codes['ben'].upper()}\n"}
        self.controlled(asked("/hub/api/users/ben/tokens", "POST",
                              body=json.dumps({"auth": right}))[0] < 300, "the right code")

    def odd_reports(self) -> None:
        """She reports by kind what no report is."""
        before = self.in_lab("g.asked(PATH, 'POST', '/services/progress/report', "
                             "json.dumps([g.report(random.random())]).encode())[1].decode()")
        self.controlled("burst" in self.tried or (before and json.loads(before)["kept"] == 1),
                        "a right report")
        names = ({event["pseudonym"] for event in self.events()
                  if event["name"].startswith("03.ben")}
                 or {"nobody"})
        statuses = self.in_lab(f"[g.asked(PATH, 'POST', '/services/progress/report', body)[0] for "
                               f"body in "
                               f"g.odd_bodies(random.Random({self.rng.random()}), {min(names)!r})]")
        self.attempts(len(statuses or []))
        self.report()
        self.lesson()
        for event in self.events():
            if event["name"] == "03.of-another" and event["pseudonym"] in names:
                self.harm("she reports as another", event)

    def burst(self) -> None:
        """She reports 50,000 times at once, while her neighbour reports."""
        self.in_lab(f"globals().update(result={{}}) or "
                    f"globals().update(thread=threading.Thread(target=lambda: "
                    f"result.update(g.burst(PATH, {BURST})))) "
                   "or thread.start() or 1")
        self.report()
        self.lesson()
        result = self.in_lab("thread.join() or result") or {"requests": 0, "kept": 0, "seconds": 0}
        self.attempts(result["requests"])
        self.slowest("slowest_burst_seconds", result["seconds"])
        self.controlled(result["kept"], "reports of a burst")
        if result["kept"] > MOST:
            self.harm("she keeps more than her share", result["kept"])
        self.report()
        self.lesson()

    def crowd(self) -> None:
        """She holds connections that never end their request, to the service and to the hub."""
        for name in ("reports", "hub"):
            held = self.in_lab(f"globals().update(crowd=g.crowd('/run/lpkit/{name}-{PORT}', "
                               f"{CROWD})) or len(crowd)") or 0
            self.attempts(held)
            self.controlled(held > CROWD / 2, f"{held} connections")
            self.report()
            self.lesson()
            self.in_lab("[client.close() for client in crowd] and 1")

    def files(self) -> None:
        """She reads files, processes, kernels and tokens of others."""
        uids = (UIDS["ben"], UIDS["teacher"])
        theirs = [(str(self.folder / "learners" / person.name), processes(UIDS[person.name])[0].pid)
                  for person in (self.ben, self.teacher)]
        read, asked_for = map(int, self.eve.run(f"THEIRS = {theirs!r}\n{bench.READER}").split())
        self.attempts(asked_for)
        if read:
            self.harm("files of others can be read", read)
        own = (str(self.folder / "learners" / "eve"), processes(UIDS["eve"])[0].pid)
        self.controlled(int(self.eve.run(f"THEIRS = [{own!r}]\n{bench.READER}").split()[0]) >= 8,
                        "her own files")
        words = [self.ben.token, self.teacher.token, self.codes["ben"], self.codes["teacher"]]
        words += [value for uid in uids for process in processes(uid)
                  if (value := process.environ().get("JUPYTERHUB_API_TOKEN"))]
        words += [process.environ()["CONFIGPROXY_AUTH_TOKEN"] for process in self.hub.children()
                  if "CONFIGPROXY_AUTH_TOKEN" in process.environ()]
        self.attempts(len(words))
        for where in (self.in_lab, self.machine):
            # her own command has them, else
            if secrets := where(f"g.secrets_seen([word[::-1] for word in "
                                f"{[word[::-1] for word in words]!r}])"):
                self.harm("secrets of others can be read", secrets)
        self.controlled(self.in_lab("g.secrets_seen([os.environ['JUPYTERHUB_API_TOKEN']])"),
                        "her own token")
        self.attempts(2 * len(uids))
        for uid in uids:
            for code in (f"os.listdir('/run/lpkit/{uid}')", f"os.kill({processes(uid)[0].pid}, 0)"):
                if "PermissionError" not in (printed := self.eve.run(f"print({code})")):
                    self.harm("kernels of others can be reached", printed[:200])

    def admin(self) -> None:
        """She acts as the teacher or as her neighbour, with her own tokens, through the proxy and
        at the hub's own socket."""
        users, ben, zoe = "/hub/api/users", "/hub/api/users/ben", "/hub/api/users/zoe"
        tries = [("GET", users, None), ("GET", ben, None), ("POST", f"{ben}/server", {}),
                 ("DELETE", f"{ben}/server", None), ("POST", f"{ben}/tokens", {}),
                 ("GET", f"{ben}/tokens", None), ("PATCH", f"{users}/eve", {"admin": True}),
                 ("PATCH", ben, {"name": "eva"}), ("DELETE", ben, None),
                 ("POST", users, {"usernames": ["zoe"], "admin": True}), ("POST", zoe, {}),
                 ("GET", "/hub/api/proxy", None), ("POST", "/hub/api/proxy", {}),
                 ("PATCH", "/hub/api/proxy", {"ip": "127.0.0.1", "port": 1, "protocol": "http",
                     "auth_token": "x"}), ("GET", "/hub/api/services", None),
                 ("GET", "/hub/api/groups", None), ("POST", "/hub/api/groups/g", {}),
                 ("POST", "/hub/api/shutdown", {}), ("GET", "/hub/admin", None),
                 ("GET", "/hub/spawn/ben", None), ("POST", "/hub/api/shares/ben/", {"user": "eve"}),
                 ("POST", "/hub/api/share-codes/ben/", {}),
                 ("POST", f"{users}/eve/tokens", {"scopes": ["admin:users"]}),
                 ("POST", f"{users}/eve/tokens", {"roles": ["admin"]}),
                 *((method, f"/user/{name}/api/{what}", None if method == "GET" else {})
                   for name in ("ben", "teacher") for method in ("GET", "POST")
                   for what in ("contents", "kernels", "terminals", "sessions")),
                 ("GET", "/user/teacher/files/00_start_here.ipynb", None),
                 ("GET", "/user/ben/lab", None)]
        lab = self.in_lab("os.environ['JUPYTERHUB_API_TOKEN']")
        for method, path, content in tries:
            body = None if content is None else json.dumps(content)
            for token in ("", self.eve.token, lab):
                self.attempts()
                status, text = asked(path, method, token, body)
                if (status < 300 and not (path == users and method == "GET" and b"ben" not in text
                                          and b"teacher" not in text)):
                    self.harm("she acts as another", f"{method} {path}: {status}")
        at_hub = [request for request in tries if request[1].startswith("/hub")]
        direct = self.in_lab(f"[g.asked('/run/lpkit/hub-{PORT}', method, path, "
                             f"json.dumps(content).encode() if content is not None else None, "
                            f"os.environ['JUPYTERHUB_API_TOKEN']) [0] for method, path, content in "
                            f"{at_hub!r}]") or []
        self.attempts(len(direct))
        for status, request in zip(direct, at_hub, strict=False):
            if 0 < status < 300:
                self.harm("she acts as another", f"at the hub's socket: {request}: {status}")
        known = json.loads(asked(users, token=self.teacher.token)[1])
        self.controlled({user["name"] for user in known} >= {"ben", "eve", "teacher"},
                        "the teacher's own list")
        if ([user["name"] for user in known if user["admin"]] != ["teacher"]
            or len(known) > len(UIDS)):
            self.harm("the room has other users", known)
        for name in ("now", "csv"):
            self.attempts()
            status, text = asked(f"/services/progress/{name}", token=self.eve.token)
            if status == 200 and b"03.ben" in text:
                self.harm("she reads reports of others", name)

    def play(self, roles: tuple[str, ...]) -> None:
        self.report()
        for role in sorted(roles, key=lambda _: self.rng.random()):
            self.role = role
            getattr(self, role)()
        self.role = "the end"
        self.report()
        self.lesson()
        self.command()

    def command(self) -> None:
        self.attempts()
        table = self.folder / "all.csv"
        done = subprocess.run([sys.executable, "-m", "lpkit", "progress", "--room",
                               str(self.folder), "--csv", str(table), "--json"], cwd=rooms.HERE,
                              stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode or json.loads(done.stdout)["problems"]:
            self.harm("`lpkit progress` stopped", done.returncode)
            return
        with table.open(newline="") as file:
            names = [row["name"] for row in csv.DictReader(file)
                     if row["name"].startswith("03.ben")]
        if sorted(names) != sorted(f"03.ben{n}" for n in range(self.reports)):
            self.harm("a report of the neighbour's was lost",
                      f"{len(names)} of {self.reports} are in the table")

    def hub_killed(self) -> None:
        """The hub dies, and its port and sockets are hers to take until all labs have ended."""
        self.role, theirs = "the hub dies", self.listening()
        self.attempts(len(theirs))
        with taking(UIDS["eve"], (0, 0), 0.0, [*theirs]) as stranger:
            self.hub.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + 60 * patience()
            while any(processes(UIDS[name]) for name in ("ben", "teacher")):
                if time.monotonic() > deadline:
                    self.harm("labs outlive the room", "60 s")
                    break
                time.sleep(0.1)
        self.heard(stranger, set())


# ---- a room, in a process and a network of its own

def hostile(trial: Trial) -> None:
    with rooms.opened(trial.folder, *NAMES, "--warm", port=PORT) as room:
        trial.enter(room)
        trial.play(("ports", "sockets", "empty_codes", "odd_reports", "burst", "crowd", "files",
                    "admin"))
        trial.hub_killed()


def loop(trial: Trial) -> None:
    trial.role = "all ports are taken"
    trial.attempts()
    with taking(UIDS["eve"], PORTS, 1.0, []) as stranger:
        opened = subprocess.run([*rooms.passing(), sys.executable, "-m", "lpkit", "room",
                                 "--folder", str(trial.folder), "--port", str(PORT), "--proxy",
                                 rooms.proxy(), *NAMES, "--warm"],
            env=os.environ | {"PYTHONPATH": str(rooms.HERE)}, cwd=rooms.HERE,
                                capture_output=True, text=True, check=False, timeout=120)
    trial.controlled(len(stranger["taken"]) > 50_000, f"she got {len(stranger['taken'])} ports")
    if (opened.returncode != 2 or "Traceback" in opened.stderr
        or "cannot listen" not in opened.stderr):
        trial.harm("a room that cannot open does not say so",
                   f"{opened.returncode}: {opened.stderr[-300:]}")
    trial.role = "ports beside a loop"
    with taking(UIDS["eve"], PORTS, 0.9, []) as stranger, rooms.opened(trial.folder, *NAMES,
            "--warm", port=PORT) as room:
        trial.enter(room)
        trial.in_lab("globals().update(inside=g.Taker().begin([], 3000, tuple(range(10_000, "
                     "65_000)))) or 1")
        trial.attempts(len(trial.listening()))
        trial.report()
        trial.lesson()
        for process in [*bench.service(), *processes(UIDS["ben"])]:
            process.kill()
        for port in trial.listening():
            if b"EVE" in said_at(port):
                trial.harm("she is believed at a port", port)
        trial.again(trial.ben)
        trial.report()
        trial.lesson()
        trial.command()
        trial.hub_killed()
    trial.role = "ports beside a loop"
    trial.heard(stranger, set())


@contextmanager
def taking(uid: int, ports: tuple[int, int], share: float,
           wanted: list[int]) -> Iterator[dict[str, Any]]:
    """A process of this user on the machine that takes ports; at the end the dict has what it got
    and heard."""
    words = [sys.executable, "-m", "tests.attack._guest", str(uid), *map(str, ports), str(share),
             *map(str, wanted)]
    result: dict[str, Any] = {}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=rooms.HERE,
                          text=True) as process:
        try:
            assert process.stdout.readline(), "the stranger did not begin"
            yield result
            result |= json.loads(process.communicate("", timeout=60)[0])
        finally:
            process.kill()


def asked(path: str, method: str = "GET", token: str = "", body: str | None = None) -> tuple[int,
        bytes]:
    """Status and body of one answer of the room, and no other page's; 599 where none came."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT,
        timeout=PROMISED_SECONDS * patience())
    try:
        connection.request(method, path, body,
                           {"Content-Type": "application/json"}
                           | ({"Authorization": f"token {token}"} if token else {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 599, str(error).encode()
    finally:
        connection.close()


def said_at(port: int, seconds: float = 0.1) -> bytes:
    """What answers soon there; what does not is heard, if by her."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as client:
        client.settimeout(seconds)
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return client.recv(1000)
    return b""


def is_proxy(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(word.endswith("bin/configurable-http-proxy") for word in process.cmdline())
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def processes(uid: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["uids"]) if process.info["uids"]
            and process.info["uids"].real == uid]


def with_all(people: tuple[rooms.Person, ...], do: Any) -> None:
    threads = [threading.Thread(target=do, args=(person,)) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(kind: str, seed: str) -> None:
    if why := own_network():
        print(json.dumps({NOT_TRIED: why}))
        return
    from hosting import room as kit

    with rooms.passable_folder() as folder:
        # a guest is there already, who came by another authenticator and has no code
        folder.mkdir(0o755)
        kit.write(kit.Room(folder=str(folder), memory_bytes=1, threads=1, gpus=0, port=PORT,
                           members={name: kit.Member(uid=uid,
                               code="" if name == "guest" else kit.new_code())
                               for name, uid in UIDS.items()}))
        trial = Trial(seed, folder)
        {"hostile": hostile, "loop": loop}[kind](trial)
    print(json.dumps(asdict(trial.outcome) | {"tried": trial.tried, "harm": trial.harms}))


if __name__ == "__main__":
    main(*sys.argv[1:])
