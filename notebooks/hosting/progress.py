"""The service of a room that stores learners' reports under pseudonyms and shows them to the
teacher.

    POST report       a learner's reports; they are stored when the answer is 200. Only on the Unix
                      socket, where the kernel tells which user sends, so that no token is needed
    GET  .            the map, a page that requests `now` as long as it is open
    GET  now          reports: all for the teacher, their own for a learner
    GET  csv          the same reports as a table

`progress.jsonl` contains no names; `pseudonyms.json` does. `lpkit progress --delete` removes both
files, and later reports begin new files. If a kill cuts off a line, its report was not
acknowledged, and the learner's kernel sends it again.
Sources: JupyterHub 6, `HubOAuthenticated`; MDN, Content-Security-Policy.
"""

import contextlib
import csv
import io
import json
import os
import secrets
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hosting import room as rooms
from hosting.room import cut
from lpkit import records
from lpkit.errors import ConfigError, DamagedError, named
from lpkit.files import locked, move_into, sync
from lpkit.processes import tell

TEXTS = ("id", "kind", "notebook", "name", "verdict", "unit")
NUMBERS = ("attempts", "seconds", "value", "factor", "measured", "time")
FIELDS = ("pseudonym", "kind", "notebook", "name", "verdict", "attempts", "seconds", "value",
          "unit", "factor", "measured", "held", "time")
NEEDED = {"exercise": {"name", "verdict"}, "guess": {"name"}, "claim": {"name", "verdict"}}
MOST_BYTES = 1 << 17        # bytes of a request, which has at most `reports.AT_ONCE` reports
MOST_KEPT = 1 << 30         # bytes of all reports
EACH = 2_000                # most reports of a learner; a course makes about 500
MOST_TEXT = 300             # characters of a field
LARGEST = 1e300
CHAIN = "progress"          # the `run` of the chain of lines (`lpkit.records`)
LOOK_SECONDS = 1.0          # seconds between checks of the labs' states
TELL_SECONDS = 5.0          # seconds between lines of progress
LATE_SECONDS = 60.0         # a lab that takes longer to start is listed by name
FIRST = ("amber azure bold brisk calm clear coral eager early fair fleet gold green jade keen "
         "kind").split()
SECOND = ("alder badger birch crane dune ember fern finch fjord grove harbor heron iris larch lark "
          "lynx maple marsh meadow newt otter owl pine plover quartz reed robin sage stone swift "
          "teal wren").split()


class Store:
    """The reports of learners. They are on disk when `add` returns. Lines form a chain with
    checksums (`lpkit.records`): altered lines are skipped and listed in `problems`."""

    def __init__(self, folder: Path):
        self.path, self.names = folder / "progress.jsonl", folder / "pseudonyms.json"
        self._known: dict[str, set[str]] = {}   # ids by pseudonym, in the file at `_seen`
        self._seen: tuple[int, int] | None = None
        self.problems: list[str] = []

    def events(self) -> list[dict[str, Any]]:
        """Return the reports in the order of arrival, without damaged lines. Sets `problems` to a
        sentence for each altered or lost line, and for pseudonyms without a name."""
        names = self._names()
        head = [(named(self.names), *names["lines"])] if "lines" in names else []
        if self._is_none():
            self.problems = [f"{named(self.path)} is not a file of reports; the next report sets "
                             f"it aside"]
            return []
        events, self.problems = records.read_lines(self.path, CHAIN, head)
        events = [event for event in events if event.keys() >= {"pseudonym", "id", "kind"}]
        known = set(names["names"].values())
        if lost := {str(event["pseudonym"]) for event in events} - known:
            self.problems.append(f"{named(self.names)} lacks the names of "
                                 f"{', '.join(sorted(lost))}")
        return events

    def pseudonyms(self) -> dict[str, str]:
        """Return the pseudonyms by learner's name. A damaged file is moved to damaged/, and new
        pseudonyms are drawn."""
        return self._names()["names"]

    def _names(self) -> dict[str, Any]:
        """Return the contents of pseudonyms.json. `names`: pseudonyms by learner's name. `lines`:
        the number and the checksum of the last report, which show whether lines at the end are
        lost."""
        if not os.path.lexists(self.names):
            return {"names": {}}
        try:
            stored = records.read(self.names)
            if not all(isinstance(pseudonym, str) for pseudonym in stored["names"].values()):
                raise DamagedError(f"{named(self.names)} has a pseudonym that is no text")
            return stored
        except (ConfigError, KeyError, AttributeError) as error:
            move_into(self.names.parent / "damaged", self.names)
            tell(f"lpkit: {error}; it was moved to damaged/, and learners get new names")
            return {"names": {}}

    def _is_none(self) -> bool:
        """Return True if the path of the reports is a pipe, a link, a folder, or too large a
        file."""
        return os.path.lexists(self.path) and (self.path.is_symlink() or not self.path.is_file()
                                               or self.path.stat().st_size > MOST_KEPT)

    def pseudonym(self, name: str) -> str:
        """Return the pseudonym of a learner's name. The pseudonym stays the same until all reports
        are deleted. It is random, so that nobody can compute it from the name."""
        known = self.pseudonyms()
        while name not in known:
            drawn = f"{secrets.choice(FIRST)}-{secrets.choice(SECOND)}"
            drawn += f"-{secrets.randbelow(10_000)}" if len(known) > 100 else ""
            if drawn not in known.values():
                known[name] = drawn
                records.write(self.names, self._names() | {"names": known})
        return known[name]

    def add(self, name: str, reports: Iterable[Any]) -> int:
        """Store the reports that are new, and return how many they are. Invalid reports are
        ignored, and so are reports beyond EACH per learner, so that no learner can fill the
        disk."""
        with locked(self.path.with_suffix(".lock")):
            if self._is_none():
                move_into(self.path.parent / "damaged", self.path)
                tell(f"lpkit: {named(self.path)} is not a file of reports; it was moved to "
                     f"damaged/, and a new file begins")
            who, mine = self.pseudonym(name), []
            self._look()
            ids = self._known.setdefault(who, set())
            for report in reports:
                with contextlib.suppress(ConfigError):
                    if (report := checked(report))["id"] not in ids and len(ids) < EACH:
                        ids.add(report["id"])
                        mine.append(report | {"pseudonym": who})
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)     # drops a line that a kill cut off
                chain = records.Chain(self.path, CHAIN)
                file.seek(0, os.SEEK_END)
                file.write("".join(map(chain.line, mine)).encode())
                file.flush()
                os.fsync(file.fileno())
            records.write(self.names, self._names() | {"lines": [chain.number, chain.sum]})
            sync(self.path.parent)
            self._seen = self._stamp()
        return len(mine)

    def _look(self) -> None:
        """Read the ids of the reports again if another process has changed the file."""
        if self._stamp() != self._seen:
            self._known = {}
            for event in self.events():
                self._known.setdefault(event["pseudonym"], set()).add(event["id"])

    def _stamp(self) -> tuple[int, int] | None:
        if not self.path.exists():
            return None
        stat = self.path.stat()
        return stat.st_ino, stat.st_size

    def delete(self) -> int:
        """Deletes all reports and pseudonyms. Returns the number of deleted reports."""
        with locked(self.path.with_suffix(".lock")):
            events = len(self.events())
            for path in (self.names, self.path):
                path.unlink(missing_ok=True)
        return events


def checked(report: Any) -> dict[str, Any]:
    """Return the known fields of a report. Raises ConfigError if the report is invalid, since a
    learner may send anything."""
    if not isinstance(report, dict) or report.get("kind") not in list(NEEDED):
        raise ConfigError(f"a report is a JSON object of kind {', '.join(NEEDED)}")
    kept = {key: report[key] for key in (*TEXTS, *NUMBERS, "held") if report.get(key) is not None}
    needed = {"id", "notebook"} | NEEDED[report["kind"]]
    wrong = [key for key, value in kept.items() if not fits(key, value)] or needed - kept.keys()
    if wrong:
        raise ConfigError(f"a report needs {', '.join(sorted(needed))}; its texts have at most "
                          f"{MOST_TEXT} characters and its numbers are finite; wrong or missing: "
                          f"{', '.join(sorted(wrong))}")
    return kept


def fits(key: str, value: Any) -> bool:
    """Return True if the field `key` may have this value."""
    if key in TEXTS:        # `isprintable` also refuses half of a surrogate pair
        return isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()
    if key == "held":
        return isinstance(value, bool)
    return type(value) in (int, float) and abs(value) < LARGEST     # False for NaN


def table(events: Iterable[Mapping[str, Any]]) -> str:
    """Return the reports as CSV. A spreadsheet would run a text that begins with = + - @ as a
    formula, so such a text gets a ' before it (OWASP, CSV injection)."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, extrasaction="ignore")
    writer.writeheader()
    for event in events:
        writer.writerow({key: f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r"
                         else value for key, value in event.items()})
    return out.getvalue()


# ---- Labs that do not start

def troubles(folder: Path) -> dict[str, str]:
    """Return a sentence for each lab that failed or has been starting for LATE_SECONDS, by the
    learner's name. It ends with the last line of the lab's log, escaped and cut."""
    late = {}
    for name, lab in rooms.labs(folder).items():
        seconds = time.time() - lab["since"]
        if lab["state"] == "failed":
            late[name] = lab["reason"]
        elif lab["state"] == "starting" and seconds > LATE_SECONDS:
            line = rooms.last_line(folder, name) or "(none)"
            late[name] = (f"The lab has been starting for {seconds:.0f} s. The last line of its "
                          f"log: {line}")
    return late


def watch(room: rooms.Room, hub: subprocess.Popen) -> int:
    """Watch the labs until the hub ends, and return the hub's exit code. Prints how many labs are
    open while labs start, and a sentence for each lab that does not start."""
    folder, last, printed_at, named_labs = Path(room.folder), "", 0.0, set()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return hub.wait(LOOK_SECONDS)
        labs = rooms.labs(folder)
        for name, sentence in troubles(folder).items():
            if (known := (name, labs[name]["since"], labs[name]["state"])) not in named_labs:
                named_labs.add(known)
                tell(f"{cut(name)}: {sentence}")
        count = Counter(lab["state"] for lab in labs.values())
        line, seconds = f"{count['open']} of {len(room.members)} labs are open", 0.0
        if starting := count["starting"]:
            seconds = time.time() - min(lab["since"] for lab in labs.values()
                                        if lab["state"] == "starting")
            line += (f"; {starting} more {'has' if starting == 1 else 'have'} been starting for up "
                     f"to {seconds:.0f} s")
        due = printed_at + max(TELL_SECONDS, seconds / 5)
        if line != last and (not starting or time.monotonic() > due):
            tell(line)
            last, printed_at = line, time.monotonic()


# ---- Unsolved exercises, and files that learners hand in

def stops(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return for each exercise the number of learners who solved it (`right`) and the number of
    learners who tried and have not solved it (`not_yet`). The exercise with the largest `not_yet`
    is first."""
    right: dict[str, dict[str, bool]] = {}
    for event in events:
        if event["kind"] == "exercise":
            who, pseudonym = right.setdefault(event["name"], {}), event["pseudonym"]
            who[pseudonym] = who.get(pseudonym, False) or event["verdict"] == "right"
    counts = {name: {"right": sum(who.values()), "not_yet": len(who) - sum(who.values())}
              for name, who in right.items()}
    return dict(sorted(counts.items(), key=lambda row: (-row[1]["not_yet"], row[0])))


def collected(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of a learner's file as reports. The pseudonym is the name of the file, or
    the name of its folder if the file is learner.json."""
    from lessons.judging.learner import read

    if not path.is_file():
        raise ConfigError(f"there is no file {named(path)}")
    learner, who = read(path), path.parent.name if path.stem == "learner" else path.stem
    for name, tried in learner.exercises.items():
        yield {"pseudonym": who, "kind": "exercise", "notebook": name.partition(".")[0],
               "name": name, "verdict": "right" if tried.right else "wrong",
               "attempts": tried.attempts, "time": tried.first_right or ""}
    for guess in learner.guesses:
        yield {"pseudonym": who, "kind": "guess", "notebook": guess.name.partition(".")[0],
               "name": guess.name, "value": guess.value, "unit": guess.unit, "factor": guess.factor,
               "measured": guess.measured, "held": guess.held, "time": guess.date}


# ---- The service

def main() -> None:
    from jupyterhub.services.auth import HubOAuthCallbackHandler, HubOAuthenticated
    from jupyterhub.utils import url_path_join
    from tornado import httpserver, ioloop, web

    store, prefix = Store(Path(os.environ["LPKIT_ROOM"])), os.environ["JUPYTERHUB_SERVICE_PREFIX"]
    teacher, title = os.environ["LPKIT_TEACHER"], rooms.read(store.path.parent).title
    page = Path(__file__).with_name("map.html").read_bytes()

    class Handler(HubOAuthenticated, web.RequestHandler):
        @property
        def who(self) -> str:
            return self.current_user["name"]

        def visible(self) -> Iterator[dict[str, Any]]:
            """Return the reports that the current user may see."""
            mine, all_of_them = store.pseudonyms().get(self.who), self.who == teacher
            return (event for event in store.events() if all_of_them or event["pseudonym"] == mine)

        def set_default_headers(self) -> None:
            self.set_header("Content-Security-Policy",
                            "default-src 'none'; style-src 'unsafe-inline'; script-src "
                            "'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'")

    class Map(Handler):
        @web.authenticated
        def get(self) -> None:
            # sets a cookie, which the page sends as a header with each request
            _ = self.xsrf_token
            self.write(page)

    class Now(Handler):
        @web.authenticated
        def get(self) -> None:
            late = troubles(store.path.parent)
            self.write({"events": list(self.visible()), "teacher": self.who == teacher,
                        "title": title, "you": store.pseudonyms().get(self.who),
                        "troubles": {name: why for name, why in late.items()
                                     if self.who in (teacher, name)}})

    class Table(Handler):
        @web.authenticated
        def get(self) -> None:
            self.set_header("Content-Type", "text/csv; charset=utf-8")
            self.write(table(self.visible()))

    class Report(web.RequestHandler):
        def check_xsrf_cookie(self) -> None:
            """Check nothing, since no browser can reach the Unix socket."""

        def post(self) -> None:
            end = self.request.connection.stream.socket
            if end.family != socket.AF_UNIX:
                raise web.HTTPError(403)
            peer = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, uid, _ = struct.unpack("3i", peer)
            members = rooms.read(store.path.parent).members
            if (name := {member.uid: name for name, member in members.items()}.get(uid)) is None:
                raise web.HTTPError(403)
            try:
                sent = json.loads(self.request.body)
            except (ValueError, RecursionError):
                sent = None
            self.write({"kept": store.add(name, sent if isinstance(sent, list) else [])})

    handlers = {"": Map, "now": Now, "csv": Table, "report": Report,
                "oauth_callback": HubOAuthCallbackHandler}
    app = web.Application(
        [(url_path_join(prefix, path).rstrip("/") + ("/?" if not path else ""), handler)
         for path, handler in handlers.items()], cookie_secret=secrets.token_bytes(32))
    server = httpserver.HTTPServer(app, max_body_size=MOST_BYTES)
    for fd in map(int, os.environ["LPKIT_SOCKETS"].split(",")):
        (listener := socket.socket(fileno=fd)).setblocking(False)
        server.add_socket(listener)
    ioloop.IOLoop.current().start()

