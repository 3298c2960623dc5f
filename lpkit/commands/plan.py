"""Find parallel layouts that train a model before a deadline and within a budget, and say why other
layouts do not. Give at least one of --budget, --deadline and --devices.

    lpkit plan --model llama-70b --tokens 1e12 --machine h200 --budget 1M --deadline 30d
    lpkit plan --model llama-70b --tokens 1T --machine h200 --devices 512 --show 1
"""

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

from lpkit import values
from lpkit.commands import MODEL, TARGET, asked, config_of, machine, options, settings_and_machine
from lpkit.config import Config, parse_settings
from lpkit.errors import ConfigError, shown
from lpkit.predict.units import cells, words
from lpkit.tables import page, text_table
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.values import Count

# suffix -> factor
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
FACTOR = Annotated[float, values.between(0.1, 10)]
# unit -> seconds
SPANS = {"min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
MOST_TOKENS, MOST_DOLLARS, MOST_SECONDS = 1e16, 1e12, 100 * 365.25 * 86_400
# Settings that change a plan: USED, memory.*, and model.* except UNUSED_MODEL. Others are refused.
USED = ("global_batch", "optimizer", "precision.recipe", "precision.recipe.history",
        "precision.cache_weight_casts", "system.attention", "system.stack", "system.compile")
UNUSED_MODEL = ("model.norm_eps", "model.rope_theta", "model.rope_factor", "model.init")

COLUMNS = {
    "": "{number}", "devices": "{devices:,}", "data": "{data:,}", "shard": "{shard:,}",
    "tensor": "{tensor:,}", "pipe": "{pipeline:,}", "context": "{context:,}", "ZeRO": "{stage}",
    "chunks": "{interleave}", "micro": "{micro_batches}x{sequences}", "recompute": "{recompute}",
    "precision": "{precision}", "memory": "{peak_bytes:bytes}", "step": "{step_seconds:time}",
    "MFU": "{mfu:.2f}", "time": "{run_seconds:time}", "time range": "{run_seconds_range:time}",
    "cost": "{cost:$,.0f}", "lpkit": "{lpkit}"}


arguments = options({
    f"--model! {TARGET}": MODEL, "--tokens! TOKENS": "training tokens: 1e12, 300B or 1.5T",
}, settings_and_machine, {
    "--budget BUDGET": "most US dollars for the run: 250000, 250k or $1.5M",
    "--deadline DEADLINE": "most time for the run: 90min, 12h, 30d or 2w",
    "--devices DEVICES": (int, "number of devices (default: search powers of two)"),
    "--precision... NAME": "bf16, fp32, bf16-master (the ZeRO paper's setting), or a recipe that "
                           "casts; repeatable (default: the config's)",
    "--optimizer OPTIMIZER": f"optimizer (default: the config's): {', '.join(OPTIMIZERS)}",
    "--batch-tokens BATCH_TOKENS": "tokens per update: 4M (default: the config's)",
    "--context CONTEXT": (int, "tokens per sequence (default: the config's)"),
    "--price-per-hour PRICE_PER_HOUR": (
        float, "US dollars per device and hour (default: the machine's)"),
    "--factor FACTOR": (FACTOR, "multiply all times by FACTOR: measured seconds of a step, divided "
                                "by predicted seconds (lpkit.predict.time.calibrate)"),
    "--top TOP=10": (Count, "layouts to print (default 10)"),
    "--show N": (Count, "also print each row of layout N with its formula and source")})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the best layouts. Raises ConfigError for wrong input, and RunFailedError, with the
    reason, if no layout is feasible."""
    from lpkit.predict.plan import plan
    from lpkit.training.runs import RunFailedError

    limits: dict[str, Any] = {"devices": args.devices}
    if args.budget is not None:
        limits["budget"] = amount("--budget", args.budget, MOST_DOLLARS, "dollars")
    if args.deadline is not None:
        limits["deadline_seconds"] = span("--deadline", args.deadline)
    if limits == {"devices": None}:
        raise ConfigError("a plan needs a limit: give --budget, --deadline or --devices")
    context = [] if args.context is None else [f"model.context={args.context}"]
    settings = asked(args, context="model.context", batch_tokens="global_batch",
                     optimizer="optimizer", precision="precision.recipe")
    _refuse_unused(parse_settings(settings))
    config = config_of(args.model, ["grad_accum_steps=1", *settings, *context])
    if args.batch_tokens is not None:
        config = _with_batch(config, amount("--batch-tokens", args.batch_tokens, MOST_TOKENS))
    planned = plan(config, amount("--tokens", args.tokens, MOST_TOKENS), machine(args.machine),
                 **limits, precisions=args.precision, optimizer=args.optimizer,
                 price_per_hour=args.price_per_hour, calibration=args.factor)
    if not planned.options:
        raise RunFailedError(planned.sentence)
    if args.show is not None and args.show > len(planned.options):
        raise ConfigError(f"--show must be from 1 to {len(planned.options)}, got "
                          f"{shown(args.show)}")
    return {"model": args.model, **planned.to_dict(max(args.top, args.show or 1)),
            "show": args.show}


def _refuse_unused(settings: dict[str, str]) -> None:
    """Raises ConfigError for a setting that does not change the plan."""
    for key in settings:
        if key in UNUSED_MODEL or not (key in USED or key.startswith(("memory.", "model."))):
            raise ConfigError(f"plan does not use {key}: it searches layouts and micro-batches, "
                              f"and --tokens says how long to train; leave it out. It uses model "
                              f"sizes, memory, {', '.join(USED)}")


def amount(option: str, text: str, most: float, unit: str = "tokens") -> float:
    """Returns a text such as '250k', '$250,000', '1e12' or '1.5T' as a number above 0. Raises
    ConfigError."""
    plain = re.sub(r"^\$?[1-9]\d{0,2}(,\d{3})+(?![\d,])", lambda match: match[0].replace(",", ""),
                   text.strip()).removeprefix("$")
    return _scaled(option, text, plain, COUNTS, most, f"{most:g} {unit}",
                   f"a number of {unit}; write it as 250000, 250k, 1.5M, 300B or 1e12")


def span(option: str, text: str) -> float:
    """Returns the seconds of a text such as '12h', '30d' or '2w'. Raises ConfigError."""
    return _scaled(option, text, text, SPANS, MOST_SECONDS, "100 years",
                   "a time; write it as 90min, 12h, 30d or 2w")


def _scaled(option: str, text: str, plain: str, scales: dict[str, float], most: float,
            limit: str, kind: str) -> float:
    """Return the number in `plain` times the scale of its suffix. Raises ConfigError.

    text:        the option's value as typed, for messages
    most, limit: the largest result, and its text for messages
    kind:        what the value must be, for messages
    """
    plain = plain.strip().lower()
    unit = re.search("[a-z]*$", plain)[0]
    try:
        value = float(plain.removesuffix(unit)) * scales[unit]
    except (ValueError, KeyError):
        raise ConfigError(f"{option} {shown(text)} is not {kind}") from None
    if not 0 < value <= most:
        raise ConfigError(f"{option} must be above 0 and at most {limit}, got {shown(text)}")
    return value


def _with_batch(config: Config, tokens: float) -> Config:
    """Return the config with `tokens` tokens per update. Raises ConfigError unless they are a whole
    number of sequences."""
    context = config.model.T
    if tokens < context or tokens % context:
        below = math.floor(tokens / context)
        near = " or ".join(f"{n * context:,}" for n in (below, below + 1) if n)
        raise ConfigError(f"--batch-tokens {tokens:,.0f} is not a whole number of sequences of "
                          f"{context:,} tokens; nearest: {near}")
    return replace(config, global_batch=int(tokens // context), grad_accum_steps=1)


@page
def text(result: dict[str, Any]) -> Iterator[str]:
    best, plans = result["plans"][0], [
        {**layout, "number": i,
         "stage": layout["zero"] if layout["shard"] * layout["context"] > 1 else "-",
         "lpkit": "predicts" if layout["why_untrained"] else "trains"}
        for i, layout in enumerate(result["plans"], 1)]
    yield words("{model} ({parameters:parameters}) on {tokens:tokens}, {tokens_per_step:tokens} a "
                "step, {machine[title]}\n{feasible:,} of {counted:,} layouts are feasible; "
                "{order}\n", result)
    yield text_table(cells(COLUMNS, plans), align=">", indent="  ") + "\n"
    for why in dict.fromkeys(filter(None, (layout["why_untrained"] for layout in plans))):
        numbers = ", ".join(str(layout["number"]) for layout in plans
                            if layout["why_untrained"] == why)
        yield f"  {numbers} cannot be trained by lpkit: {why}"
    for name, refusal in result["refused"].items():
        yield words("  {name} excludes {layouts:,} layouts, nearest: {nearest}", refusal, name=name)
    if result["doubt"]:
        yield f"  memory is an estimate: {result['doubt']}"
    if best["emulated"]:
        yield words("  {precision} is emulated with wider matmuls: {emulated}", best)
    if best["energy_wh"] is not None:
        paid = ", {cost_per_million_tokens:$.3g} per million tokens" * (best["cost"] is not None)
        yield words("  layout 1 takes {device_hours:number} device hours and {energy_wh:Wh} at "
                    f"rated power{paid}", best)
    for refusal in result["compute_optimal"]:
        yield words("  compute-optimal for the budget by {law}: {parameters:parameters} on "
                    "{tokens:tokens}, loss {loss:.3f} ({note})", refusal)
    if result["show"] is not None:
        yield from _opened(plans[result["show"] - 1])
    calibrated = ("not calibrated" if result["factor"] == 1
                  else "calibrated, multiplied by {factor:.3f}")
    yield words("\n  {machine[source]}\n  price: {machine[price_source]}\n  network: "
                "{machine[network]}\n  efficiency: {efficiency[source]}\n  times: "
                f"{calibrated}; {{range_is}}", result, range_is=best["range_is"])


def _opened(layout: dict[str, Any]) -> Iterator[str]:
    """Yield the rows of a layout's memory and time, each with its formula and source."""
    memory, time = layout["memory_rows"], layout["time_rows"]
    width = max(len(row["name"]) for row in (*memory, *time)) + 2

    def opened(row: dict[str, Any], value: str, mark: str = " ") -> str:
        """Return a row as two lines: name, value and formula; and below them the source."""
        return words(f"  {{mark}} {{name:<{width}}}{value}  {{formula}}\n    {'':<{width + 10}}  "
                     f"{{source}}", row, mark=mark)

    yield words("\n  layout {number}: bytes per device; * is alive at the peak ({peak_moment})",
                layout)
    for row in memory:
        yield opened(row, "{bytes:bytes:>10}", " *"[row["at_peak"]])
    yield words("\n  layout {number}: seconds of a step of {step_seconds:time}; seconds in "
                "brackets overlap with other rows", layout)
    for row in time:
        hidden = " [{hidden_seconds:time}]" if row["hidden_seconds"] else ""
        yield opened(row, "{seconds:time:>10}" + hidden)
