"""Open a room: a JupyterHub on this machine for a workshop, with a lab for each learner.

  lpkit room --learners 30                       make learner01 to learner30, and their codes
  lpkit room anna ben --folder /srv/friday       make anna and ben; the folder opens the room again
  lpkit room --learners 30 --address 0.0.0.0 --tls cert.pem key.pem

Each learner has a Unix user, a home, and a share of the memory and threads. Print codes.csv in the
folder of the room: it has the names and codes. This terminal prints how many labs are open and
names labs that do not start. Ctrl-C ends all labs; homes stay.
LPKIT_SOLUTIONS sets when exercises show a solution: always, attempted (default) or solved.
"""

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from hosting import progress, serve_until_told
from hosting import room as rooms
from lessons.judging import solutions
from lpkit import processes
from lpkit.commands import a_folder, needs
from lpkit.errors import ConfigError, named, shown
from lpkit.files import whole_file
from lpkit.values import between

TELL_SECONDS = 5.0      # seconds between lines of progress


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of the learners")
    parser.add_argument("--learners", type=Annotated[int, between(0, rooms.MOST)], default=0,
                        metavar="N", help="add N numbered learners")
    parser.add_argument("--folder", type=a_folder, default=rooms.FOLDER, metavar="DIR",
                        help=f"folder of the homes and of the hub's files (default {rooms.FOLDER})")
    parser.add_argument("--title", default="", metavar="TEXT", help="name of the room, which the "
                        "sign-in page shows (default: the name of the folder)")
    parser.add_argument("--port", type=int, default=8000, help="port of the room (default 8000)")
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on: 127.0.0.1 "
                        "(default, for a tunnel), or 0.0.0.0 for all networks of this machine")
    parser.add_argument("--tls", nargs=2, metavar=("CERT", "KEY"), default=(),
                        help="PEM files of the certificate and its key")
    parser.add_argument("--no-tls", action="store_true",
                        help="allow an address other than 127.0.0.1 without encryption")
    parser.add_argument("--authenticator", default="", metavar="NAME", help="JupyterHub "
                        "authenticator (github, or a class) instead of codes; needs --teacher")
    parser.add_argument("--teacher", default="", metavar="NAME", help="user who sees the map and "
                        "every lab (default teacher)")
    parser.add_argument("--config", default="", metavar="FILE", help="JupyterHub configuration "
                        "file; JupyterHub executes it after the room's configuration")
    parser.add_argument("--idle-seconds", type=int, default=3600, metavar="S",
                        help="end a lab that is idle for S seconds (default 3600)")
    parser.add_argument("--warm", nargs="*", default=["cpu-3m"], metavar="PRESET",
                        help="presets to prepare before learners come (default cpu-3m)")
    parser.add_argument("--proxy", default="", metavar="PATH", help="path of "
                        "configurable-http-proxy, if it is not on PATH")


def run(args: argparse.Namespace) -> dict[str, Any]:
    needs("lpkit room", "jupyterhub", "jupyterlab")
    solutions.shown_when()      # labs inherit the variable, so check its value here
    if args.address not in ("127.0.0.1", "localhost") and not (args.tls or args.no_tls):
        raise ConfigError(f"with --address {args.address}, codes would cross the network "
                          f"unencrypted; give --tls CERT KEY, use 127.0.0.1 with a tunnel, or give "
                          f"--no-tls")
    # with GitHub, for example, anybody could register the name "teacher"
    if args.authenticator and not args.teacher:
        raise ConfigError(f"with --authenticator {args.authenticator}, the user with the teacher's "
                          f"name controls the room; give your user name there as --teacher NAME")
    if len(args.title) > rooms.MOST_TEXT or not args.title.isprintable():
        raise ConfigError(f"--title must have at most {rooms.MOST_TEXT} printable characters, got "
                          f"{shown(args.title)}")
    for path in filter(None, (*args.tls, args.config)):
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {named(path)}")
    digits = len(str(args.learners))
    names = [*args.names, *(f"learner{n:0{digits}}" for n in range(1, args.learners + 1))]
    room = rooms.opened(args.folder, names, teacher=args.teacher or rooms.Room.teacher,
                        port=args.port, address=args.address,
                        tls=[str(Path(path).resolve()) for path in args.tls],
                        proxy=args.proxy, authenticator=args.authenticator,
                        config=args.config and str(Path(args.config).resolve()),
                        idle_seconds=args.idle_seconds, title=args.title)
    warm(room, args.warm)
    codes = Path(room.folder, "codes.csv")
    with whole_file(codes, 0o600) as temporary, temporary.open("w", newline="") as file:
        csv.writer(file).writerows([("name", "code"), *(
            (name, member.code) for name, member in room.members.items() if member.code)])
    children = processes.Children()

    def serve() -> int:
        with rooms.serve(room, children) as keeper:
            opened = {"title": room.title, "url": rooms.url(room), "folder": room.folder,
                     "codes": str(codes), "learners": len(room.members) - 1,
                     "memory_bytes": room.memory_bytes, "threads": room.threads, "gpus": room.gpus}
            print(json.dumps(opened) if args.json else text(opened), flush=True)
            if (code := progress.watch(room, keeper)) and not children.over:
                print(f"the hub ended with exit code {code}; `lpkit room --folder {room.folder}` "
                      f"opens the room again. The end of its log:\n{keeper.stdout.read()}",
                      file=sys.stderr)
            return code

    serve_until_told(serve, children.end, "the room is closed")


def warm(room: rooms.Room, presets: Sequence[str]) -> None:
    """Run one step of each preset, once per room, so that learners need not wait for tokens, for
    the check of kernels and for compilers. Prints the seconds while it waits. Raises ConfigError
    with the error of a failed run."""
    shared, begun = Path(room.folder, "shared"), time.monotonic()
    for number, preset in enumerate(presets, 1):
        done = shared / f".{preset}"
        if done.exists():
            continue
        with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
                [sys.executable, "-P", "-m", "lpkit", "train", preset, "steps=1", "--out",
                 f"{folder}/run"], env=os.environ | {"XDG_CACHE_HOME": str(shared)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True) as run:
            error = None
            while error is None:
                processes.tell(f"preparing what all learners share: preset {preset} ({number} of "
                               f"{len(presets)}), {time.monotonic() - begun:.0f} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    error = run.communicate(timeout=TELL_SECONDS)[1]
        if run.returncode:
            raise ConfigError(f"{shown(preset)} could not be prepared: {error.strip()[-300:]}")
        done.touch()


def text(result: dict[str, Any]) -> str:
    return (f"The room {result['title']} is open for {result['learners']} learners at\n"
            f"    {result['url']}\n"
            f"The names and codes of the learners and of the teacher are in "
            f"{named(result['codes'])}.\n"
            f"Each learner has {result['memory_bytes'] / 1e9:.1f} GB of memory and "
            f"{result['threads']} thread(s). Homes are in {named(result['folder'])}/learners. "
            f"Ctrl-C closes the room.")
