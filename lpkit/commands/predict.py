"""Predict parameters, memory, FLOPs, time and cost of a training run before it runs.

    lpkit predict cpu-3m --machine this
    lpkit predict llama-8b --machine h100 --devices 8
    lpkit predict gpt2-124m global_batch=64 --optimizer lion
    lpkit predict cpu-3m --machine this --measure
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

from lpkit.commands import MODEL, TARGET, asked, config_of, machine, options, settings_and_machine
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.predict.compare import percent
from lpkit.predict.stacks import STACKS
from lpkit.predict.units import words
from lpkit.tables import page, picked
from lpkit.techniques.optimizers import OPTIMIZERS

arguments = options({f"target {TARGET}": MODEL}, settings_and_machine, {
    "--devices DEVICES": (int, "number of data-parallel devices (default: the config's layout)"),
    "--mfu MFU": (float, "fraction of the peak FLOP/s to assume for the whole step (default: each "
                         "operation has its own efficiency)"),
    "--zero ZERO": (int, "ZeRO stage, 0 to 3 (default: the config's; with --devices, the lowest "
                         "stage that fits)"),
    "--precision PRECISION": "a recipe, or 16-bit weights: bf16-master, bf16-fp32-grads or "
                             "bf16-pure (default: the config's)",
    "--optimizer OPTIMIZER": f"optimizer (default: the config's): {', '.join(OPTIMIZERS)}",
    "--recompute RECOMPUTE": "none, selective, block or core-attention (default: the config's; "
                             "with --devices, the first of none, selective, block that fits)",
    "--measure": "also run an update on this machine, and compare it with the prediction",
    "--price-per-hour PRICE_PER_HOUR": (float, "US dollars per device and hour (default: "
                                               "the machine's price)"),
    "--card FILE": "write the prediction (with --measure, also the measurement) to FILE.json and "
                   "as a picture to FILE.svg"})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the prediction, and with --measure the measured bytes and seconds of an update."""
    from lpkit.predict import predict

    config = config_of(args.target, asked(
        args, devices="parallel.data parallel.shard parallel.tensor parallel.pipeline "
        "parallel.context", optimizer="optimizer", precision="precision.recipe",
        recompute="memory.recompute", zero="parallel.zero"))
    prediction = predict(config, machine(args.machine), args.devices, **picked(
        args, "mfu precision optimizer zero recompute price_per_hour"))
    measured = _measured(config) if args.measure else {}
    card = [] if args.card is None else prediction.card(
        args.card, Path(args.target).name, **measured.get("totals", {}))
    return {"target": args.target, **prediction.to_dict(), "card": card,
            "measured": measured or None}


def _measured(config: Config) -> dict[str, Any]:
    """Run an update on this machine. Return its measured bytes and seconds and the predicted
    ones."""
    from lpkit import hardware, measure, reconcile
    from lpkit.training.formulas import raise_out_of_memory_as_run_failure

    with raise_out_of_memory_as_run_failure(config, "the measured update"):
        bytes_ = reconcile(config)
        try:
            seconds, why = measure.reconcile_seconds(config).to_dict(), ""
        except ConfigError as error:
            seconds, why = [], str(error)
    totals = {"device": hardware.machine().title, "peak_bytes": bytes_.truth.peak_bytes,
              "step_seconds": sum(row["measured"] for row in seconds) or None}
    return {"totals": totals, "bytes": bytes_.comparison("formula").to_dict(),
            "sentences": list(bytes_.sentences), "seconds": seconds, "no_seconds": why}


@page
def text(result: dict[str, Any]) -> Iterator[str]:
    a, on, rows = result["assumptions"], result["machine"], result["rows"]
    width = max(len(row["name"]) for row in rows) + 2

    def line(name: str, value: str = "", about: str = "", values: dict[str, Any] = result,
             **more: Any) -> str:
        """Return a line in three columns. value, about: templates, filled from `values`, the
        assumptions `a`, the machine `on`, and `more`."""
        value, about = (words(part, values, a=a, on=on, **more) for part in (value, about))
        return f"  {name:<{width}}{value:>10}  {about}".rstrip()

    yield words("{target} on {devices} x {machine[title]}\n", result)
    yield line("parameters", "{parameters:number}")
    yield line("FLOPs per token", "{flops_per_token:FLOPs}", "forward and backward")
    yield words("\n  layout: {layout}; precision {precision}, ZeRO stage {zero}, recompute "
                "{recompute}\n  ({layout_why})\n  {accumulation}\n  bytes of each device:", a)
    for row in rows:
        yield line(row["name"], "{bytes:bytes}", "{formula}", row)
    yield line("peak", "{peak_bytes:bytes}", "of {on[memory_bytes]:bytes}{fit}; moment: "
               "{peak_moment}", fit="" if result["fits"] else ": does not fit")
    if result["reserved_bytes"] > result["peak_bytes"]:
        yield line("reserved", "{reserved_bytes:bytes}",
                   "by the allocator, with expandable segments")
    if result["doubt"]:
        yield fill(f"Memory is an estimate: {result['doubt']}.", 150, initial_indent="  ",
                   subsequent_indent="  ")
    yield ""
    if a["emulated"]:
        yield line("", "", "{a[precision]} is emulated with wider matmuls: {a[emulated]}")
    phases = ", ".join(f"{name} {seconds / result['step_seconds']:.0%}"
                       for name, seconds in result["phases"].items() if seconds)
    yield line("step", "{step_seconds:time}", "MFU {mfu:.2f} of {a[peak_flops_per_device]:FLOP/s} "
               "{a[dtype]}{phases}", phases=", assumed" if a["mfu"] else f"; {phases}")
    yield line("", "", "range {step_seconds_range:time}: {range_is}")
    if a["factor"] != 1:
        yield line("", "", "all seconds are multiplied by {a[factor]:.3f}, from one measured step")
    elif not a["mfu"] and on["name"] != "this":
        yield line("", "", f"for {STACKS[a['stack']].words}")
        for other in result["other_stacks"]:
            yield line("  or", "{step_seconds:time}", "range {step_seconds_range:time}, peak "
                       "{peak_bytes:bytes}: system.stack={stack}, {short}", other,
                       short=other["words"].partition(",")[0])
        others = ", ".join(name for name in STACKS if name not in (a["stack"], "eager", "hf"))
        yield fill(f"other values of system.stack: {others}", 150,
                   initial_indent=" " * (width + 14), subsequent_indent=" " * (width + 14))
    yield line("tokens/s", "{tokens_per_second:number}")
    yield line("run", "{run_seconds:time}", "range {run_seconds_range:time}, {a[steps]:,} steps")
    if result["energy_wh"] is not None:
        yield line("energy", "{energy_wh:Wh}", "range {energy_wh_range:Wh}, at rated power")
    if result["cost"] is not None:
        yield line("cost", "{cost:$}", "range {cost_range:$}, at {a[price_per_hour]:g} dollars per "
                   "device and hour, {cost_per_million_tokens:$.3g} per million tokens")
    if result["measured"]:
        yield from _measurement(result["measured"])
    yield "\n".join(["", *map("card: {}".format, result["card"])])
    for source in result["sources"]:
        yield fill(source, 150, initial_indent="  ", subsequent_indent="    ")


def _measurement(measured: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of predicted and measured bytes and seconds, and sentences about them."""
    for key, unit in (("bytes", "bytes"), ("seconds", "time")):
        rows = measured[key]
        yield f"\n  {key} on {rows[0]['where']}: predicted, measured, error" if rows \
            else f"\n  {key} were not measured: {measured['no_seconds']}"
        for row in rows:
            off = percent(row["error"]) if row["formula"] and row["measured"] else ""
            yield words("  {name:<28}{formula:{unit}:>10}{measured:{unit}:>10}  {off}", row,
                        unit=unit, off=off)
    yield "\n".join(["", *(f"  {sentence}" for sentence in measured["sentences"])])
