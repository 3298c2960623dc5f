"""Which settings are best here? A file says what is searched; each trial is a run.

  lpkit sweep docs/lr-search.yaml       stopped, it goes on by the same command
"""

import argparse
from pathlib import Path
from typing import Any

from lpkit.commands import a_folder, claim, needs
from lpkit.predict.units import duration
from lpkit.tables import text_table


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the sweep, a YAML file")
    parser.add_argument("--out", type=a_folder, default=Path("runs/sweeps"), metavar="DIR",
                        help="where runs and journals are kept (default: runs/sweeps)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit.claims import protocol, sweep

    told, out = protocol.read(args.file, sweep.Sweep, sweep.NEEDED), args.out / args.file.stem
    needs("a sweep", "optuna", *["cmaes"] * (told.sampler == "cmaes"))
    return claim.with_runs(args.out, told.at_once, lambda finished, _: sweep.settle(told, out, finished))


def text(result: dict[str, Any]) -> str:
    trials = sorted(result["trials"], key=lambda one: (one["val_loss"] is None, one["val_loss"]))
    rows = [[f"{value:.5g}" if isinstance(value, float) else str(value) for value in
             (one["trial"], one["val_loss"], *one["settings"].values())] for one in trials[:10]]
    table = text_table([("trial", "val_loss", *trials[0]["settings"]), *rows], align=">")
    return f"{table}\nthe best of {len(trials)} trials, which took {duration(result['seconds'])}"
