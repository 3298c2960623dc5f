"""Is X better than Y here? One file says what is compared; the verdict says what was seen, and what
could not have been.

  lpkit claim docs/lion.yaml
  lpkit claim docs/lion.yaml --null       the first arm against itself: the referee on trial

A killed claim goes on by the same command, and no run is done twice.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lpkit.commands import a_folder
from lpkit.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the claim, a YAML file")
    parser.add_argument("--null", action="store_true",
                        help="the first arm against itself, with other seeds")
    parser.add_argument("--out", type=a_folder, default=Path("runs/claims"), metavar="DIR",
                        help="where the records of runs are kept (default: runs/claims)")
    parser.add_argument("--processes", type=int, metavar="N",
                        help="runs side by side (default: as many as there are cores)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit.claims.protocol import read

    claim = read(Path(args.file))
    if args.processes is not None and args.processes < 1:
        raise ConfigError(f"--processes must be 1 or more, got {args.processes}")
    from tqdm import tqdm

    from lpkit import processes, records
    from lpkit.claims import runs
    from lpkit.claims.settle import settle
    from lpkit.files import locked

    children = processes.Children()

    def finished(what: str, configs: list) -> list[dict]:
        with tqdm(total=len(configs), desc=what, unit="run", file=sys.stderr, leave=False) as bar:
            def say(done: int, of: int) -> None:
                bar.total = of
                bar.update(done - bar.n)

            return runs.finished(configs, args.out, at_once=args.processes, say=say,
                                 children=children)

    def work() -> dict[str, Any]:
        with locked(args.out / ".lock", wait=False):
            return settle(claim, finished, null=args.null)

    result, heard = processes.hear(work, children.end)
    if heard:
        with suppress(OSError):
            print(f"\nlpkit: stopped; the same command goes on with what is in {args.out}",
                  file=sys.stderr)
        sys.exit(128 + heard)
    path = args.out / f"{Path(args.file).stem}{'-null' if args.null else ''}.verdict.json"
    records.write(path, result)
    return {**result, "file": str(args.file), "record": str(path)}


def text(result: dict[str, Any]) -> str:
    from lpkit.claims.settle import costs

    tuned = [f"  {arm}: {', '.join(f'{key}={value}' for key, value in point.items())}"
             for arm, point in result["tuned"].items()]
    return "\n".join([*(one["sentence"] for one in result["verdicts"]), "tuned:", *tuned,
                      *(f"doubt: {one}" for one in result["doubts"]), costs(result)])
