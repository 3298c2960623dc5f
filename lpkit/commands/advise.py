"""Say whether training in low precision (FP8, INT8, FP4) would be faster for a model on a machine,
and why. The answer is a prediction; nothing is trained.

    lpkit advise gpt2-124m --machine h200
    lpkit advise cpu-3m --machine this
"""

import argparse
from collections.abc import Iterator
from typing import Any

from lpkit.commands import MODEL, TARGET, asked, config_of, machine, options, settings_and_machine
from lpkit.errors import pick
from lpkit.predict.units import cells, words
from lpkit.tables import page, text_table
from lpkit.techniques.recipes import RECIPES

arguments = options({f"target {TARGET}": MODEL}, settings_and_machine, {
    "--recipe... NAME": "recipe to consider, such as mxfp8; repeatable (default: all that cast)"})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the Advice as a dict: sentence, choice, and a plan for each recipe."""
    config = config_of(args.target, asked(args))
    # to measure `this` machine needs torch, so first check the recipes
    on = None if args.machine == "this" else machine(args.machine)
    casting = {name: row for name, row in RECIPES.items() if row.products}
    for name in args.recipe or ():
        pick(casting, name, "recipe that casts")
    from lpkit.measure.advice import advise  # imports torch

    advice = advise(config, on or _here(), recipes=args.recipe)
    return {"target": args.target, **advice.to_dict()}


def _here():
    """Returns the row of this GPU in the catalogue of machines; if there is none, measures this
    machine."""
    import torch

    from lpkit import hardware
    from lpkit.predict.evidence import catalogued

    return ((torch.cuda.is_available() and catalogued(torch.cuda.get_device_name()))
            or hardware.machine())


@page
def text(result: dict[str, Any]) -> Iterator[str]:
    from lpkit.measure.advice import COLUMNS

    yield words("{sentence}\n\n{target} on {machine}; predicted step in {base}: "
                "{plans[0][base_step_seconds]:time}", result)
    yield text_table(cells(COLUMNS, result["plans"]), indent="  ")
    yield words("\n  efficiency: {efficiency[source]}", result)
    yield from (f"  {source}" for source in result["sources"])
