"""Test whether X beats Y on this machine, where X and Y are two groups of settings (arms). A YAML
file defines the comparison. The verdict states the measured difference and the smallest difference
that the test could detect.

  lpkit claim docs/claims/lion.yaml
  lpkit claim docs/claims/lion.yaml --null       check the test: compare the first arm with itself
  lpkit claim FILE --executor submitit           train in Slurm jobs (without Slurm: in processes)

To continue a claim that was stopped, repeat the command. Runs that have finished are not repeated.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lpkit.commands import a_folder, needs, options
from lpkit.errors import ConfigError, in_one_line, named
from lpkit.predict.units import duration
from lpkit.values import Count


def shared_arguments(what: str, stored: str) -> dict[str, Any]:
    """Return the arguments that `claim` and `sweep` share, for `options`. what: the name of the
    command. stored: what the command stores in addition to runs, for the help text."""
    return {
        "file FILE": (Path, f"YAML file of the {what}"),
        f"--out DIR=runs/{what}s": (a_folder,
                                    f"folder for runs and {stored} (default runs/{what}s)"),
        "--executor NAME": "where runs are trained: workers (processes on this machine), submitit "
                           "or ray (default: as in FILE)"}


arguments = options(shared_arguments("claim", "verdicts"), {
    "--null": "compare the first arm with itself, with different seeds",
    "--processes N": (Count, "number of parallel runs (default: as many as the cores allow)")})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Decide the claim. Return the object of `Settling.settle` and the command, and write it to
    OUT/NAME.verdict."""
    from lpkit import records
    from lpkit.claims import protocol
    from lpkit.claims.settle import Settling

    claim = protocol.read(args.file, executor=args.executor)
    result = with_runs(claim, args.out, args.processes,
                       lambda *ways: Settling(claim, *ways).settle(args.null))
    how = ["--null"] * args.null + [f"--import={name}" for name in args.imports]
    result["command"] = shlex.join(["lpkit", "claim", str(args.file), *how])
    records.write(args.out / f"{args.file.stem}{'-null' * args.null}.verdict", result)
    return result


def with_runs(file: Any, out: Path, at_once: int | None, settle: Callable[..., dict],
              quiet: bool = False) -> dict[str, Any]:
    """Returns the result of `settle(finished, say)`. A signal to this process ends all runs, and
    then this process.

    file:    a Claim or a Sweep; it names the executor that makes the runs
    out:     the folder of the runs; it is locked against other commands
    at_once: number of parallel runs; None: as many as the cores allow
    quiet:   print no line after each run
    """
    from lpkit import files, processes
    from lpkit.claims import executors, runs

    children, name = processes.Children(), file.executor
    if executor := executors.EXECUTORS[name]:
        needs(f"executor={name}", name)

    def work(submission: tuple) -> dict[str, Any]:
        """Lock `out`, and decide with workers or the executor. submission: what the executor
        returned; empty: start workers."""
        with ExitStack() as stack:
            try:
                stack.enter_context(files.locked(out / ".lock", wait=False))
            except BlockingIOError:
                raise ConfigError(f"another claim or sweep is running in {named(out)}; wait for "
                                  f"it, or choose another --out") from None
            workers = stack.enter_context(runs.Workers(out, children, at_once, *submission))
            tell = processes.tell
            return settle(lambda what, configs, *judges: workers.finished(
                configs, lambda line: quiet or tell(f"{what}: {line}"), *judges), tell)

    with ExitStack() as around:
        # the executor first, because Ray installs signal handlers, which `hear` must replace
        submission = executor(out, file.job, around) if executor else ()
        result, number = processes.hear(lambda: work(submission), children.end)
        if number:
            processes.tell("lpkit: stopped; repeat the command to continue")
            sys.exit(128 + number)
    return result


def text(result: dict[str, Any]) -> str:
    tuned = [f"{arm}: {', '.join(f'{key}={value}' for key, value in point.items())}"
             for arm, point in result["tuned"].items()]
    cost = (f"{result['runs']} runs took {duration(result['seconds'])}; of this, tuning took "
            f"{duration(result['tuning']['seconds'])}")
    doubts = [f"doubt: {doubt}" for doubt in result["doubts"]]
    sentences = [verdict["sentence"] for verdict in result["verdicts"]]
    return "\n".join(map(in_one_line, [*sentences, *tuned, *doubts, cost]))
