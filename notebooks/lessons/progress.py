"""The service of a room that keeps what learners report, under pseudonyms, and shows it to the teacher.

    POST report       a learner's reports, kept when the answer is 200
    GET  .            the map, which asks for `now` as long as it is open
    GET  now          all reports: the teacher's; a learner gets the own ones
    GET  csv          the same as a table: the teacher's

`progress.jsonl` has no names; `pseudonyms.json` has. `lpkit progress --delete` removes both, and what
is reported later begins anew. A line that a kill cut off was never acknowledged, and is sent again.
Sources: JupyterHub 6, `HubOAuthenticated`; MDN, Content-Security-Policy.
"""

import argparse
import csv
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lpkit.course.room import FOLDER
from lpkit.errors import ConfigError, named
from lpkit.files import locked, sync, whole_file, write_atomically
from lpkit.tables import text_table

FIELDS = ("pseudonym", "kind", "notebook", "name", "verdict", "attempts", "seconds", "value", "unit",
          "factor", "measured", "held", "time")
MOST_BYTES = 1 << 20        # of a request
MOST_EVENTS = 50_000        # of a room
MOST_TEXT = 300             # characters of a field
FIRST = "amber azure bold brisk calm clear coral eager early fair fleet gold green jade keen kind".split()
SECOND = ("alder badger birch crane dune ember fern finch fjord grove harbor heron iris larch lark "
          "lynx maple marsh meadow newt otter owl pine plover quartz reed robin sage stone swift "
          "teal wren").split()


class Store:
    """What learners reported, on disk when `add` has returned."""

    def __init__(self, folder: Path):
        self.path, self.names = folder / "progress.jsonl", folder / "pseudonyms.json"

    def events(self) -> list[dict[str, Any]]:
        """Returns them in the order in which they came. What a kill cut off is left out."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def pseudonyms(self) -> dict[str, str]:
        return json.loads(self.names.read_text()) if self.names.exists() else {}

    def pseudonym(self, name: str) -> str:
        """The same for the same name until all is deleted, and drawn: not to be calculated."""
        known = self.pseudonyms()
        while name not in known:
            drawn = f"{secrets.choice(FIRST)}-{secrets.choice(SECOND)}"
            drawn += f"-{secrets.randbelow(100)}" if len(known) > 100 else ""
            if drawn not in known.values():
                known[name] = drawn
                write_atomically(self.names, json.dumps(known))
        return known[name]

    def add(self, name: str, reports: Iterable[Mapping[str, Any]]) -> None:
        """Raises ConfigError for what is no report, and then keeps none of them."""
        with locked(self.path.with_suffix(".lock")):
            there, new = self.events(), []
            ids = {one["id"] for one in there}
            who = self.pseudonym(name)
            for one in map(checked, reports):
                if one["id"] not in ids:
                    ids.add(one["id"])
                    new.append(one | {"pseudonym": who})
            if len(there) + len(new) > MOST_EVENTS:
                raise ConfigError(f"a room keeps {MOST_EVENTS:,} reports; collect and delete them")
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
                file.seek(0, os.SEEK_END)
                file.write(b"".join(json.dumps(one).encode() + b"\n" for one in new))
                file.flush()
                os.fsync(file.fileno())
            sync(self.path.parent)

    def delete(self) -> int:
        """Deletes all of it. Returns how many reports there were."""
        with locked(self.path.with_suffix(".lock")):
            events = len(self.events())
            for path in (self.names, self.path):
                path.unlink(missing_ok=True)
        return events


def checked(report: Any) -> dict[str, Any]:
    """Returns the known fields of a learner's report, which may be anything. Raises ConfigError."""
    plain = isinstance(report, dict) and {
        key: value for key, value in report.items()
        if key in (*FIELDS, "id") and isinstance(value, (str, int, float, bool))}
    if not plain or not {"id", "kind", "notebook"} <= plain.keys():
        raise ConfigError("a report is a JSON object with id, kind and notebook")
    if any(len(str(value)) > MOST_TEXT for value in plain.values()):
        raise ConfigError(f"a field of a report has at most {MOST_TEXT} characters")
    return plain


def table(events: Iterable[Mapping[str, Any]]) -> str:
    """CSV. A spreadsheet would take a text that begins with = + - @ for a formula: such has a ' before
    it (OWASP, CSV injection)."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, extrasaction="ignore")
    writer.writeheader()
    for event in events:
        writer.writerow({key: f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r"
                         else value for key, value in event.items()})
    return out.getvalue()


# ---- lpkit progress

def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--room", type=Path, default=FOLDER, metavar="DIR",
                        help=f"the room's folder (default {FOLDER})")
    parser.add_argument("--collect", type=Path, nargs="+", metavar="FILE", help="learners' own files "
                        "(lpkit/learner.json, or lpkit/course/learner.json, in their data "
                        "directories), for rooms without a hub")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all reports as a table")
    parser.add_argument("--delete", action="store_true", help="delete what the room keeps of its "
                        "learners' progress, and the names that were drawn for them")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.collect and args.delete:
        raise ConfigError("--delete is for what a room keeps; collected files are their learners'")
    store = Store(args.room)
    if not args.collect and not (args.room / "room.json").exists():
        raise ConfigError(f"there is no room in {named(args.room)}; name its folder by --room, or "
                          f"learners' files by --collect")
    events = [event for path in args.collect for event in collected(path)] if args.collect else \
        store.events()
    if args.csv:
        with whole_file(args.csv) as temporary:
            temporary.write_text(table(events))
    return {"reports": len(events), "learners": len({one["pseudonym"] for one in events}),
            "exercises": stops(events), "csv": str(args.csv or ""),
            "deleted": store.delete() if args.delete else 0}


def text(result: dict[str, Any]) -> str:
    lines = [f"{result['reports']} reports of {result['learners']} learners"]
    if result["exercises"]:
        lines += ["", text_table([("exercise", "right", "not yet"), *(
            (name, str(one["right"]), str(one["not_yet"])) for name, one in
            result["exercises"].items())])]
    lines += [f"all of them: {named(result['csv'])}"] if result["csv"] else []
    lines += [f"{result['deleted']} reports were deleted"] if result["deleted"] else []
    return "\n".join(lines)


def stops(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """By exercise: how many learners have it right, and how many tried and have not; what stops most
    of them first."""
    right: dict[str, dict[str, bool]] = {}
    for one in events:
        if one["kind"] == "exercise":
            who = right.setdefault(one["name"], {})
            who[one["pseudonym"]] = who.get(one["pseudonym"], False) or one["verdict"] == "right"
    counts = {name: {"right": sum(who.values()), "not_yet": len(who) - sum(who.values())}
              for name, who in right.items()}
    return dict(sorted(counts.items(), key=lambda one: (-one[1]["not_yet"], one[0])))


def collected(path: Path) -> Iterator[dict[str, Any]]:
    """A learner's own file as reports. Its owner is called after its folder, or the file."""
    from lessons.learner import read

    if not path.is_file():
        raise ConfigError(f"there is no file {named(path)}")
    learner, who = read(path), path.parent.name if path.stem == "learner" else path.stem
    for name, one in learner.exercises.items():
        yield {"pseudonym": who, "kind": "exercise", "notebook": name.partition(".")[0], "name": name,
               "verdict": "right" if one.right else "wrong", "attempts": one.attempts,
               "time": one.first_right or ""}
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
    teacher = os.environ["LPKIT_TEACHER"]
    page = Path(__file__).with_name("map.html").read_bytes()

    class Handler(HubOAuthenticated, web.RequestHandler):
        @property
        def who(self) -> str:
            return self.current_user["name"]

        def visible(self) -> Iterator[dict[str, Any]]:
            mine, all_of_them = store.pseudonyms().get(self.who), self.who == teacher
            return (one for one in store.events() if all_of_them or one["pseudonym"] == mine)

        def set_default_headers(self) -> None:
            self.set_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; "
                            "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'")

    class Map(Handler):
        @web.authenticated
        def get(self) -> None:
            _ = self.xsrf_token     # a cookie, which the page gives back as a header with each question
            self.write(page)

    class Now(Handler):
        @web.authenticated
        def get(self) -> None:
            self.write({"events": list(self.visible()), "teacher": self.who == teacher,
                        "you": store.pseudonyms().get(self.who)})

    class Table(Handler):
        @web.authenticated
        def get(self) -> None:
            self.set_header("Content-Type", "text/csv; charset=utf-8")
            self.write(table(self.visible()))

    class Report(Handler):
        def check_xsrf_cookie(self) -> None:
            """A kernel has a token and no cookie; a page of another site has no token."""
            if not self.request.headers.get("Authorization", "").startswith("token "):
                raise web.HTTPError(403)

        @web.authenticated
        def post(self) -> None:
            try:
                store.add(self.who, json.loads(self.request.body))
            except (ConfigError, ValueError, TypeError) as error:
                raise web.HTTPError(400, reason="no report") from error

    handlers = {"": Map, "now": Now, "csv": Table, "report": Report,
                "oauth_callback": HubOAuthCallbackHandler}
    app = web.Application(
        [(url_path_join(prefix, path).rstrip("/") + ("/?" if not path else ""), handler)
         for path, handler in handlers.items()], cookie_secret=secrets.token_bytes(32))
    server = httpserver.HTTPServer(app, max_body_size=MOST_BYTES)
    server.listen(int(os.environ["JUPYTERHUB_SERVICE_URL"].rpartition(":")[2].strip("/")), "127.0.0.1")
    ioloop.IOLoop.current().start()


if __name__ == "__main__":
    main()
