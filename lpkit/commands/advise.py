"""Will low precision be faster for me? A verdict for a preset or a config on a machine, and its
reasons.

    lpkit advise gpt2-124m --machine h200
    lpkit advise cpu-3m --machine this --measure --seeds 3 --steps 60
"""

import argparse
import sys
from typing import Any

from lpkit.commands import asked, machine, settings_and_machine
from lpkit.predict.units import duration, quantity
from lpkit.tables import text_table


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="PRESET|config.yaml")
    settings_and_machine(parser)
    parser.add_argument("--recipe", action="append", metavar="NAME",
                        help="consider only this one; repeatable")
    parser.add_argument("--measure", action="store_true", help="settle it with short real runs on "
                        "this machine")
    parser.add_argument("--seeds", type=int, default=3, help="of the real runs (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="of each real run (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit.presets import resolve
    from lpkit.studies.advice import advise, claims

    config = resolve(args.target, asked(args))
    here = args.machine == "this" or args.measure
    advice = advise(config, _here() if here else machine(args.machine), recipes=args.recipe,
                    seeds=args.seeds, steps=args.steps, train=_train if args.measure else None)
    return {"target": args.target, **advice.to_dict(), "claims": claims().to_dict()}


def _here():
    """The GPU's row of the catalogue, or this machine, measured."""
    import torch

    from lpkit import hardware
    from lpkit.studies.advice import catalogued

    return ((torch.cuda.is_available() and catalogued(torch.cuda.get_device_name()))
            or hardware.machine())


def _train(config, *, out):
    import lpkit

    print(f"advise: {out.name}, {config.steps} steps", file=sys.stderr)
    return lpkit.train(config, out=out)


def text(result: dict[str, Any]) -> str:
    rows = [("recipe", "runs", "step", "speed", "Linears", "memory")]
    for plan in result["plans"]:
        more = plan["more_bytes"]
        rows.append((plan["recipe"], f"{plan['status']} ({plan['backend']})",
                     duration(plan["step_seconds"]), f"{plan['speedup']:.2f}x",
                     f"{plan['linear_speedup']:.2f}x",
                     f"{'-' if more < 0 else '+'}{quantity(abs(more), 'bytes')}"))
    lines = [result["sentence"], "", f"{result['target']} on {result['machine']}; a step in "
             f"{result['base']} takes {duration(result['plans'][0]['base_step_seconds'])}, by "
             f"formula", text_table(rows, indent="  ")]
    if result["measured"]:
        lines += ["", "measured, seed by seed:"]
    for one in result["measured"]:
        losses = ", ".join(f"{loss:.3f}" for loss in one["losses"])
        speedups = ", ".join("not reached" if s is None else f"{s:.2f}x" for s in one["speedups"])
        lines.append(f"  {one['recipe']}: {duration(one['step_seconds'])} a step, losses {losses}; "
                     f"at equal loss {speedups}")
    return "\n".join([*lines, "", f"  efficiency: {result['efficiency']['source']}",
                      *(f"  {source}" for source in result["sources"])])
