"""Search for the best settings with Optuna. A YAML file names the settings and their ranges; each
trial is one training run.

  lpkit sweep docs/lr-search.yaml

To continue a sweep that was stopped, repeat the command. Runs that have finished are not repeated.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lpkit.commands import claim, needs, options
from lpkit.predict.units import duration
from lpkit.tables import text_table

arguments = options(claim.shared_arguments("sweep", "journals"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make all trials. Return the best trial, all trials, and the path of the journal."""
    from lpkit.claims import protocol, sweep

    search = protocol.read(args.file, sweep.Sweep, sweep.NEEDED, args.executor)
    needs("a sweep", "optuna", *["cmaes"] * (search.sampler == "cmaes"))
    return claim.with_runs(search, args.out, search.at_once, lambda finished, _: sweep.settle(
        search, args.out / args.file.stem, finished, bar(search.trials)), True)


def bar(total: int) -> Callable[[list[dict]], None]:
    """Return a function that shows a progress bar. It takes all trials so far."""
    from tqdm import tqdm

    shown = tqdm(total=total, unit="trial", dynamic_ncols=True)

    def show(trials: list[dict]) -> None:
        best = min((trial["val_loss"] for trial in trials if trial["val_loss"]), default=math.nan)
        with suppress(OSError):     # the terminal is closed
            shown.update(len(trials) - shown.n)
            shown.set_postfix_str(f"best {best:.4g}")
            if len(trials) == total:
                shown.close()

    return show


def text(result: dict[str, Any]) -> str:
    """Return a table of the ten best trials. `pruned`: the step after which a trial was stopped."""
    trials = sorted(result["trials"],
                    key=lambda trial: (trial["val_loss"] is None, trial["val_loss"]))
    rows = [[f"{value:.5g}" if isinstance(value, float) else str(value) for value in
             (trial["trial"], trial["val_loss"], trial["pruned"] and trial["pruned"]["step"],
              *trial["settings"].values())] for trial in trials[:10]]
    table = text_table([("trial", "val_loss", "pruned", *trials[0]["settings"]), *rows], align=">")
    return f"{table}\nthe best of {len(trials)} trials; all took {duration(result['seconds'])}"
