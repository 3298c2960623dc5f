"""Open JupyterLab on your copies of the course: on this machine only, with a fresh token.

Your copies and your results are in your work folder. When the lab opens (or with --update), changes
of the course are copied into your notebooks; a cell that you changed keeps your text.

  lpkit lab                    open the copies in your data directory
  lpkit lab --course DIR       open the copies in DIR: a new, an empty or a work folder
  lpkit lab --reset 03         replace your 03 by the course's; your answers to exercises stay, and
                               your file gets today's date in its name

On a cloud machine, run the printed `ssh` command on your own computer, then open the URL there.
LPKIT_SOLUTIONS sets when exercises show a solution: always, attempted (default) or solved.
When the lab ends, all processes that were started in the lab end, too.
"""

import argparse
import json
import sys
from typing import Any

from hosting import copies, lab, serve_until_told
from lessons.judging.solutions import shown_when
from lpkit import processes
from lpkit.commands import a_folder, needs
from lpkit.errors import named


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--course", type=a_folder, metavar="DIR", help="work folder (default: "
                        "lpkit/course in your data directory, which is ~/.local/share or "
                        "$XDG_DATA_HOME)")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--update", action="store_true", help="copy changes of the course into your "
                       "notebooks, and do not open the lab")
    alone.add_argument("--reset", metavar="NAME", help="replace your notebook by the course's, "
                       "and do not open the lab")
    parser.add_argument("--port", type=int, default=lab.PORT, help="port (default "
                        f"{lab.PORT}; if {lab.PORT} is taken, the next free port)")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the lab until SIGINT, SIGTERM or SIGHUP. Prints its result as soon as the lab
    answers. With --update or --reset, returns the changes and serves nothing."""
    needs("lpkit lab", "jupyterlab", "jupyter-server", "nbformat", "ipykernel")
    shown_when()        # kernels inherit the variable, so check its value here
    root, children = copies.work_folder(args.course), processes.Children()
    changes = copies.update(root) if args.reset is None else [copies.reset(root, args.reset)]
    if args.update or args.reset is not None:
        return {"root": str(root), "changes": changes,
                "exit_code": int(any(change["done"] == "left" for change in changes))}

    def serving() -> int:
        with lab.serve(root, port=args.port, children=children) as server:
            if args.port not in (0, server.port):
                print(f"port {args.port} is taken; using {server.port}", file=sys.stderr)
            opened = {"url": server.url, "port": server.port, "root": str(root),
                     "changes": changes, "token_file": str(server.token_file),
                     "log": str(server.log_path),
                     "tunnel": f"ssh -N -L {server.port}:127.0.0.1:{server.port} "
                               f"USER@THIS_MACHINE"}
            print(json.dumps(opened) if args.json else text(opened), flush=True)
            if lab.has_display() and not args.no_browser:
                server.open_browser()
            code = server.process.wait()    # ends, too, if the lab is shut down from its menu
            if code and not children.over:
                print(f"JupyterLab ended with exit code {code}; the end of its log:\n"
                      f"{server.process.stdout.read()}", file=sys.stderr)
            return code

    serve_until_told(serving, children.end, "stopped")


def text(result: dict[str, Any]) -> str:
    lines = [f"Your copies of the course are in {named(result['root'])}",
             *_changed(result["changes"])]
    if "url" not in result:
        return "\n".join(lines)
    lines += ["JupyterLab is open on", f"    {result['url']}"]
    lines += ["From another computer: keep this running there, then open the same URL in its "
              "browser:", f"    {result['tunnel']}"]
    return "\n".join([*lines, f"Log: {named(result['log'])}. Ctrl-C stops the lab."])


def _changed(changes: list[dict[str, Any]]) -> list[str]:
    """Return the changes as lines: one line for all changes without notes, then several lines for
    each change with notes."""
    plain: dict[str, list[str]] = {}
    lines = []
    for change in changes:
        if not change["notes"] and "backup" not in change:
            plain.setdefault(change["done"], []).append(change["notebook"])
            continue
        now = f", and yours is {change['backup']} now" if "backup" in change else ""
        lines += [f"    {change['done']}: {change['notebook']}{now}",
                  *(f"        {note}" for note in change["notes"])]
    words = [f"{done}: {', '.join(names) if len(names) <= 3 else f'{len(names)} notebooks'}"
             for done, names in plain.items()]
    return [f"    {'; '.join(words)}"] * bool(words) + lines
