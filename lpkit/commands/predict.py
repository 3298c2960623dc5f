"""Parameters, memory, FLOPs, time and cost of a training run, before it runs."""

import argparse
from typing import Any

from lpkit.config import Config
from lpkit.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="PRESET|config.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a setting; repeatable")
    parser.add_argument("--machine", default="h200", help="a row of the catalogue, a YAML file, or "
                        "`this`: measure this one")
    parser.add_argument("--devices", type=int, help="data-parallel; by default the config's "
                        "parallel group")
    parser.add_argument("--mfu", type=float, help="one share of the peak FLOP/s to assume for the "
                        "whole step; by default each operation has its own")
    parser.add_argument("--zero", type=int, help="ZeRO stage 0 to 3; by default the lowest that "
                        "fits")
    parser.add_argument("--precision", help="a recipe, or bf16-master, bf16-pure (weights in 16 "
                        "bits); by default the config's")
    parser.add_argument("--optimizer", help="adamw, lion, momentum, sgd: the state it keeps; by "
                        "default the config's")
    parser.add_argument("--recompute", help="none, selective, block: what is recomputed in "
                        "backward; by default the config's, or the first of these that fits")
    parser.add_argument("--measure", action="store_true", help="also run an update here, and put "
                        "both side by side")
    parser.add_argument("--price-per-hour", type=float, help="US dollars per device")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit.commands import machine
    from lpkit.predict import predict
    from lpkit.presets import resolve

    config = resolve(args.target, args.set)
    found = predict(config, machine(args.machine), args.devices, mfu=args.mfu,
                    precision=args.precision, optimizer=args.optimizer, zero=args.zero,
                    recompute=args.recompute, price_per_hour=args.price_per_hour)
    return {"target": args.target, **found.to_dict(),
            "measured": _measured(config) if args.measure else None}


def _measured(config: Config) -> dict[str, Any]:
    """What the formulas say of this machine, beside an update here."""
    from lpkit import measure, reconcile

    bytes_ = reconcile(config)
    try:
        seconds, why = measure.reconcile_seconds(config).to_dict(), ""
    except ConfigError as error:
        seconds, why = [], str(error)
    return {"bytes": bytes_.comparison("formula").to_dict(), "sentences": list(bytes_.sentences),
            "seconds": seconds, "no_seconds": why}


def text(result: dict[str, Any]) -> str:
    import itertools
    from textwrap import wrap

    from lpkit.predict.units import duration, quantity

    a, machine = result["assumptions"], result["machine"]
    held = (f"of {quantity(machine['memory_bytes'], 'bytes')}"
            + ("" if result["fits"] else ": does not fit"))
    rows = [(row["name"], quantity(row["bytes"], "bytes"), row["formula"])
            for row in result["rows"]]
    width = max(len(name) for name, *_ in rows) + 2
    phases = ", ".join(f"{name} {seconds / result['step_seconds']:.0%}"
                       for name, seconds in result["phases"].items() if seconds)
    lines = [
        f"{result['target']} on {result['devices']} x {machine['title']}",
        "",
        f"  {'parameters':<{width}}{quantity(result['parameters']):>10}",
        f"  {'FLOPs per token':<{width}}{quantity(result['flops_per_token'], 'FLOPs'):>10}  "
        f"forward and backward",
        "",
        f"  per device: {a['layout']}, precision {a['precision']}, ZeRO stage {a['zero']}, "
        f"recompute {a['recompute']}", f"  ({a['layout_why']})",
        *(f"  {name:<{width}}{size:>10}  " f"{formula}" for name, size, formula in rows),
        f"  {'peak':<{width}}{quantity(result['peak_bytes'], 'bytes'):>10}  {held}; "
        f"{result['peak_moment']}",
        "",
        f"  {'step':<{width}}{duration(result['step_seconds']):>10}  MFU {result['mfu']:.2f} of "
        f"{quantity(a['peak_flops_per_device'], 'FLOP/s')} {a['dtype']}"
        + (", assumed" if a["mfu"] else f"; {phases}"),
        f"  {'tokens/s':<{width}}{quantity(result['tokens_per_second']):>10}",
        f"  {'run':<{width}}{duration(result['run_seconds']):>10}  {a['steps']:,} steps",
    ]
    if result["energy_wh"] is not None:
        lines.append(f"  {'energy':<{width}}{quantity(result['energy_wh'], 'Wh'):>10}  at rated "
                     f"power")
    if result["cost"] is not None:
        price = f"{a['price_per_hour']:g} dollars per device and hour"
        lines.append(f"  {'cost':<{width}}{'$' + quantity(result['cost']):>10}  at {price}, "
                     f"${result['cost_per_million_tokens']:.3g} per million tokens")
    if result["measured"]:
        lines += _beside(result["measured"])
    sources = [wrap(source, 150, initial_indent="  ", subsequent_indent="    ")
               for source in result["sources"]]
    return "\n".join([*lines, "", *itertools.chain(*sources)])


def _beside(measured: dict[str, Any]) -> list[str]:
    from lpkit.predict.compare import percent
    from lpkit.predict.units import duration, quantity

    lines = []
    for key, shown in (("bytes", lambda value: quantity(value, "bytes")), ("seconds", duration)):
        rows = measured[key]
        lines += ["", f"  {key} of an update on {rows[0]['where']}" if rows
                  else f"  no {key}: {measured['no_seconds']}"]
        lines += [f"  {row['name']:<28}{shown(row['formula']):>10}{shown(row['measured']):>10}  "
                  f"{percent(row['error']) if row['formula'] and row['measured'] else ''}"
                  for row in rows]
    return [*lines, "", *(f"  {sentence}" for sentence in measured["sentences"])]
