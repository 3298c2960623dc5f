"""Is X better than Y here? A file says what is compared; the verdict says what was seen, and what
could not have been.

  lpkit claim docs/claims/lion.yaml
  lpkit claim docs/claims/lion.yaml --null       the first arm against itself: the referee on trial

A claim that was stopped goes on by the same command, and no run is done twice.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lpkit.commands import a_folder
from lpkit.errors import ConfigError, named
from lpkit.predict.units import duration


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the claim, a YAML file")
    parser.add_argument("--null", action="store_true",
                        help="the first arm against itself, with other seeds")
    parser.add_argument("--out", type=a_folder, default=Path("runs/claims"), metavar="DIR",
                        help="where runs and verdicts are kept (default: runs/claims)")
    parser.add_argument("--processes", type=int, metavar="N",
                        help="runs side by side (default: as many as the cores allow)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit import records
    from lpkit.claims import protocol
    from lpkit.claims.settle import Settling

    claim = protocol.read(args.file)
    if args.processes is not None and args.processes < 1:
        raise ConfigError(f"--processes must be 1 or more, got {args.processes}")
    result = with_runs(args.out, args.processes,
                       lambda *ways: Settling(claim, *ways).settle(args.null))
    how = ["--null"] * args.null + [f"--import={name}" for name in args.imports]
    result["command"] = shlex.join(["lpkit", "claim", str(args.file), *how])
    records.write(args.out / f"{args.file.stem}{'-null' * args.null}.verdict", result)
    return result


def with_runs(out: Path, at_once: int | None, settle: Callable[..., dict]) -> dict[str, Any]:
    """Returns what `settle(finished, say)` does; its runs end when this process is told to."""
    from lpkit import files, processes
    from lpkit.claims import runs
    from lpkit.course.notebooks import tell

    children = processes.Children()

    def work() -> dict[str, Any]:
        with ExitStack() as stack:
            try:
                stack.enter_context(files.locked(out / ".lock", wait=False))
            except BlockingIOError:
                raise ConfigError(f"another claim or sweep is running in {named(out)}; wait for "
                                  f"it, or choose another --out") from None
            workers = stack.enter_context(runs.Workers(out, children, at_once))
            return settle(lambda what, configs: workers.finished(
                configs, lambda line: tell(f"{what}: {line}")), tell)

    result, heard = processes.hear(work, children.end)
    if heard:
        tell("lpkit: stopped; the same command goes on")
        sys.exit(128 + heard)
    return result


def text(result: dict[str, Any]) -> str:
    tuned = [f"{arm}: {', '.join(f'{key}={value}' for key, value in point.items())}"
             for arm, point in result["tuned"].items()]
    cost = (f"{result['runs']} runs took {duration(result['seconds'])}, of which tuning "
            f"{duration(result['tuning']['seconds'])}")
    doubts = [f"doubt: {one}" for one in result["doubts"]]
    return "\n".join([*(one["sentence"] for one in result["verdicts"]), *tuned, *doubts, cost])
