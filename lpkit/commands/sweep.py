"""Which settings are best here? A file says what is searched; each trial is a run.

  lpkit sweep docs/lr-search.yaml

A sweep that was stopped goes on by the same command, and no trial is done twice.
"""

import argparse
from typing import Any

from lpkit.commands import claim, needs
from lpkit.predict.units import duration
from lpkit.tables import text_table


def arguments(parser: argparse.ArgumentParser) -> None:
    claim.arguments(parser, "sweep")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit.claims import protocol, sweep

    read = protocol.read(args.file, sweep.Sweep, sweep.NEEDED)
    needs("a sweep", "optuna", *["cmaes"] * (read.sampler == "cmaes"))
    return claim.with_runs(args, lambda *ways: sweep.settle(read, args.out / args.file.stem, *ways))


def text(result: dict[str, Any]) -> str:
    trials = sorted(result["trials"], key=lambda one: (one["val_loss"] is None, one["val_loss"]))
    rows = [[f"{value:.5g}" if isinstance(value, float) else str(value) for value in
             (one["trial"], one["val_loss"], *one["settings"].values())] for one in trials[:10]]
    return "\n".join([
        text_table([("trial", result["target"], *trials[0]["settings"]), *rows], align=">"),
        f"the best {len(rows)} of {len(trials)} trials, which took {duration(result['seconds'])}"])
