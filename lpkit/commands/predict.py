"""Predict parameters, memory, FLOPs, time and cost of a training run before it runs."""

import argparse
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from lpkit.commands import MODEL, TARGET, asked, config_of, machine, settings_and_machine
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.predict.compare import percent
from lpkit.predict.evidence import STACKS
from lpkit.predict.units import between, duration, quantity
from lpkit.techniques.optimizers import OPTIMIZERS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar=TARGET, help=MODEL)
    settings_and_machine(parser)
    parser.add_argument("--devices", type=int, help="number of data-parallel devices (default: "
                        "the config's layout)")
    parser.add_argument("--mfu", type=float, help="fraction of the peak FLOP/s to assume for the "
                        "whole step (default: each operation has its own efficiency)")
    parser.add_argument("--zero", type=int, help="ZeRO stage 0 to 3 (default: the config's; with "
                        "--devices, the lowest that fits)")
    parser.add_argument("--precision", help="a recipe, or 16-bit weights: bf16-master, "
                        "bf16-fp32-grads or bf16-pure (default: the config's)")
    parser.add_argument("--optimizer", help=f"optimizer (default: the config's): "
                        f"{', '.join(OPTIMIZERS)}")
    parser.add_argument("--recompute", help="none, selective, block or core-attention (default: "
                        "the config's; with --devices, the first of the first three that fits)")
    parser.add_argument("--measure", action="store_true", help="also run an update here, and "
                        "compare it with the prediction")
    parser.add_argument("--price-per-hour", type=float, help="US dollars per device (default: "
                        "the machine's price)")
    parser.add_argument("--card", metavar="FILE", help="write the prediction (with --measure, also "
                        "the measurement) to FILE.json and as a picture to FILE.svg")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit.predict import predict

    config = config_of(args.target, asked(
        args, devices="parallel.data parallel.shard parallel.tensor parallel.pipeline "
        "parallel.context", optimizer="optimizer", precision="precision.recipe",
        recompute="memory.recompute", zero="parallel.zero"))
    prediction = predict(config, machine(args.machine), args.devices, mfu=args.mfu,
                         precision=args.precision, optimizer=args.optimizer, zero=args.zero,
                         recompute=args.recompute, price_per_hour=args.price_per_hour)
    measured = _measured(config) if args.measure else {}
    card = [] if args.card is None else prediction.card(
        args.card, Path(args.target).name, **measured.get("totals", {}))
    return {"target": args.target, **prediction.to_dict(), "card": card,
            "measured": measured or None}


def _measured(config: Config) -> dict[str, Any]:
    """Return bytes and seconds of an update on this machine: predicted and measured."""
    from lpkit import hardware, measure, reconcile
    from lpkit.training.formulas import said

    with said(config, "the measured update"):
        bytes_ = reconcile(config)
        try:
            seconds, why = measure.reconcile_seconds(config).to_dict(), ""
        except ConfigError as error:
            seconds, why = [], str(error)
    totals = {"device": hardware.machine().title, "peak_bytes": bytes_.truth.peak_bytes,
              "step_seconds": sum(row["measured"] for row in seconds) or None}
    return {"totals": totals, "bytes": bytes_.comparison("formula").to_dict(),
            "sentences": list(bytes_.sentences), "seconds": seconds, "no_seconds": why}


def text(result: dict[str, Any]) -> str:
    a, on = result["assumptions"], result["machine"]
    width = max(len(row["name"]) for row in result["rows"]) + 2
    lines = [f"{result['target']} on {result['devices']} x {on['title']}", ""]

    def line(name: str, value: str, words: str) -> None:
        lines.append(f"  {name:<{width}}{value:>10}  {words}".rstrip())

    line("parameters", quantity(result["parameters"]), "")
    line("FLOPs per token", quantity(result["flops_per_token"], "FLOPs"), "forward and backward")
    lines += ["", f"  per device: {a['layout']}, precision {a['precision']}, ZeRO stage "
              f"{a['zero']}, recompute {a['recompute']}", f"  ({a['layout_why']})"]
    for row in result["rows"]:
        line(row["name"], quantity(row["bytes"], "bytes"), row["formula"])
    fits = "" if result["fits"] else ": does not fit"
    line("peak", quantity(result["peak_bytes"], "bytes"),
         f"of {quantity(on['memory_bytes'], 'bytes')}{fits}; moment: {result['peak_moment']}")
    if result["reserved_bytes"] > result["peak_bytes"]:
        line("reserved", quantity(result["reserved_bytes"], "bytes"),
             "by the allocator, with expandable segments")
    if result["doubt"]:
        lines += wrap(f"Memory is an estimate: {result['doubt']}.", 150, initial_indent="  ",
                      subsequent_indent="  ")
    lines.append("")
    if a["emulated"]:
        line("", "", f"{a['precision']} is emulated with wider matmuls: {a['emulated']}")
    phases = ", ".join(f"{name} {seconds / result['step_seconds']:.0%}"
                       for name, seconds in result["phases"].items() if seconds)
    line("step", duration(result["step_seconds"]),
         f"MFU {result['mfu']:.2f} of {quantity(a['peak_flops_per_device'], 'FLOP/s')} "
         f"{a['dtype']}{', assumed' if a['mfu'] else '; ' + phases}")
    line("", "", f"range {between(result['step_seconds_range'], duration)}: {result['range_is']}")
    if a["factor"] != 1:
        line("", "", f"all seconds are multiplied by {a['factor']:.3f}, from one measured step")
    elif not a["mfu"] and on["name"] != "this":
        others = ", ".join(name for name in STACKS if name != a["stack"])
        line("", "", f"for {STACKS[a['stack']].words}; other values of system.stack:")
        line("", "", others)
    line("tokens/s", quantity(result["tokens_per_second"]), "")
    line("run", duration(result["run_seconds"]),
         f"range {between(result['run_seconds_range'], duration)}, {a['steps']:,} steps")
    if result["energy_wh"] is not None:
        line("energy", quantity(result["energy_wh"], "Wh"),
             f"range {between(result['energy_wh_range'], partial(quantity, unit='Wh'))}, "
             "at rated power")
    if result["cost"] is not None:
        line("cost", "$" + quantity(result["cost"]),
             f"range {between(result['cost_range'], lambda value: '$' + quantity(value))}, "
             f"at {a['price_per_hour']:g} dollars per device and hour, "
             f"${result['cost_per_million_tokens']:.3g} per million tokens")
    if result["measured"]:
        lines += _beside(result["measured"])
    lines += ["", *map("card: {}".format, result["card"])]
    for source in result["sources"]:
        lines += wrap(source, 150, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _beside(measured: dict[str, Any]) -> list[str]:
    lines = []
    for key, shown in (("bytes", lambda value: quantity(value, "bytes")), ("seconds", duration)):
        rows = measured[key]
        lines += ["", f"  {key} on {rows[0]['where']}: predicted, measured, error" if rows
                  else f"  {key} were not measured: {measured['no_seconds']}"]
        for row in rows:
            error = percent(row["error"]) if row["formula"] and row["measured"] else ""
            lines.append(f"  {row['name']:<28}{shown(row['formula']):>10}"
                         f"{shown(row['measured']):>10}  {error}")
    return [*lines, "", *(f"  {sentence}" for sentence in measured["sentences"])]
