"""Run notebooks with parameters, without a browser.

  lpkit notebook --list                                  list all notebooks and their parameters
  lpkit notebook 00 seed=1 --tier cpu --out runs/try     write 00_start_here.ipynb and .json
  lpkit notebook 00 tier=smoke,cpu seed=0,1 --on processes=2   run four combinations, two at a time
  lpkit notebook --all --tier smoke                      run all notebooks, print a table of claims

key=a,b or a repeated key makes a grid. In text and tuple parameters, commas belong to the value.
"""

import collections
import os
import sys
from pathlib import Path
from typing import Any

from hosting import notebooks, runner
from hosting.parameters import parameters
from lpkit import processes
from lpkit.commands import a_folder, needs, settings, target_and_asked
from lpkit.config import parse_settings
from lpkit.errors import ConfigError, shown
from lpkit.tables import text_table
from lpkit.values import Count, annotated

OUT = Path("runs") / "notebooks"


def arguments(parser):
    parser.add_argument("target", nargs="?", metavar="NAME",
                        help="00_start_here, 00, start_here, or the path of a notebook file")
    settings(parser, "set a parameter that the notebook declares")
    parser.add_argument("--tier", choices=("smoke", "cpu", "gpu"),
                        help="size of the run: set the parameter `tier`")
    parser.add_argument("--out", type=a_folder, default=OUT, metavar="DIR",
                        help=f"folder for executed notebooks and their records (default {OUT})")
    parser.add_argument("--on", metavar="processes=N", help="run N notebooks at a time; "
                        "they share the threads of PyTorch (default 1)")
    parser.add_argument("--all", action="store_true", help="run every notebook of the course")
    parser.add_argument("--list", action="store_true", help="list the notebooks and their "
                        "parameters, and run nothing")


def run(args) -> dict[str, Any]:
    all_of_them = ("nbclient", "nbformat", "ipykernel", "ipywidgets", "plotly")
    needs("lpkit notebook", *(["nbformat"] if args.list else all_of_them))
    name, asked = target_and_asked(args)
    if args.list:
        paths = [notebooks.find(name)] if name else notebooks.course()
        return {"notebooks": [describe(path) for path in paths]}
    if args.all and (name or asked):
        raise ConfigError(f"--all takes no name and no setting; leave out "
                          f"{shown(name or asked[0])}")
    if not args.all and not name:
        raise ConfigError("which notebook? `lpkit notebook --list` shows them, --all runs them all")
    paths = notebooks.course() if args.all else [notebooks.find(name)]
    if not paths:
        raise ConfigError("the course is empty: there is no .ipynb in notebooks/")
    at_once, jobs = _processes(args.on), []
    for path in paths:
        jobs += runner.plan(path, asked, tier=args.tier, out=args.out)
    children = processes.Children()
    records, heard = processes.hear(
        lambda: runner.run_all(jobs, at_once=at_once, say=processes.tell, children=children),
        children.end)
    if heard:
        sys.exit(128 + heard)
    bad = any(record["status"] != "done" for record in records)
    result = records[0] if len(records) == 1 and not args.all else {"runs": records}
    return {**result, "exit_code": int(bad)}


def describe(path: Path) -> dict[str, Any]:
    """Return the title, the claim and the parameters of a notebook for `--list`, in types that JSON
    has."""
    book = notebooks.read(path)
    listed = [{"name": name, "annotation": p.annotation, "default": p.default,
               "comment": p.comment} for name, p in parameters(book).items()]
    headings = [line.lstrip("# ").strip() for cell in book.cells if cell.cell_type == "markdown"
                for line in cell.source.splitlines() if line.startswith("# ")]
    return {"name": path.stem, "title": next(iter(headings), ""),
            "claim": notebooks.claim(book), "parameters": listed}


def _processes(on: str | None) -> int:
    """Return the number of processes of an option `--on processes=N`; 1 without it."""
    if on is None:
        return 1
    asked = parse_settings([on])
    if list(asked) != ["processes"]:
        raise ConfigError(f"--on takes processes=N, got {shown(on)}")
    return annotated(asked["processes"], Count, "processes")


def text(result: dict[str, Any]) -> str:
    if "notebooks" in result:
        return "\n\n".join(map(_described, result["notebooks"])) or "there are no notebooks"
    runs = result.get("runs", [result])
    rows = [(run["label"], f"{run['seconds']:.1f}", f"{run['peak_rss_bytes'] / 1e6:,.0f}",
             run["claim"] or "-", _outcome(run)) for run in runs]
    here = f"{Path.cwd()}{os.sep}"
    files = [(run["output"].removeprefix(here), run["record"].removeprefix(here)) for run in runs]
    counted = collections.Counter(run["result"] if run["status"] == "done"
                                  or run["result"] == "fails" else run["status"] for run in runs)
    counts = ", ".join(f"{n} {state or 'without a claim'}" for state, n in counted.most_common())
    return "\n".join([
        text_table([("notebook", "seconds", "peak MB", "claim", "result"), *rows]),
        f"claims: {counts}", "",
        text_table([("executed copy", "record"), *files])])


def _outcome(run: dict[str, Any]) -> str:
    """Return the result of a run in one line: of its claim, or of the cell that failed."""
    if run["status"] == "done":
        return ": ".join(filter(None, (run["result"], run["why"]))) or "done"
    error = run["error"] or {"cell": run["cell"], "kind": run["status"], "message": ""}
    message = " ".join(str(error["message"]).split())
    words = f"{run['status']} in cell {error['cell']}: {error['kind']}"
    return f"{words}: {message}" if message else words


def _described(book: dict[str, Any]) -> str:
    lines = [f"{book['name']}  {book['title']}"]
    if book["claim"]:
        lines.append(f"  claims: {book['claim']}")
    rows = [(f"  {p['name']}: {p['annotation']} = {p['default']!r}", p["comment"])
            for p in book["parameters"]]
    return "\n".join([*lines, text_table(rows)]).rstrip()
