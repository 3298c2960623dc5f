"""Which layouts train a model on a machine before a deadline and within a budget; and why the rest
do not.

    lpkit plan --model llama-70b --tokens 1e12 --machine h200 --budget 1M --deadline 30d
    lpkit plan --model llama-70b --tokens 1T --machine h200 --devices 512 --show 1
"""

import argparse
import math
from typing import Any

from lpkit.config import parse_settings
from lpkit.errors import ConfigError
from lpkit.tables import text_table

COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
SPANS = {"min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
MOST_TOKENS, MOST_DOLLARS, MOST_SECONDS = 1e16, 1e12, 100 * 365.25 * 86_400
# Settings that change a plan: these, and the model's but for three.
USED = ("global_batch", "optimizer", "precision.recipe", "precision.recipe.history",
        "precision.cache_weight_casts")
USED_GROUPS, UNUSED_MODEL = (("memory.", "model."),
                             ("model.norm_eps", "model.rope_theta", "model.init"))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="PRESET|config.yaml")
    parser.add_argument("--tokens", required=True, help="to train on: 1e12, 300B, 1.5T")
    parser.add_argument("--machine", default="h200", help="a row of the catalogue, a YAML file, or "
                        "`this`")
    parser.add_argument("--budget", help="US dollars for the run: 250000, 250k, $1.5M")
    parser.add_argument("--deadline", help="for the run: 12h, 30d, 2w")
    parser.add_argument("--devices", type=int, help="how many; by default powers of two are "
                        "searched")
    parser.add_argument("--precision", action="append", metavar="NAME",
                        help="bf16, fp32, a recipe that casts, or bf16-master, the ZeRO paper's "
                        "setting; by default the config's; repeatable")
    parser.add_argument("--optimizer", help="adamw, lion, momentum, sgd: the state it keeps; "
                                            "by default the config's")
    parser.add_argument("--batch-tokens", help="tokens of an update: 4M; by default the config's")
    parser.add_argument("--context", type=int, help="tokens of a sequence; by default the config's")
    parser.add_argument("--price-per-hour", type=float, help="US dollars per device")
    parser.add_argument("--factor", type=float, help="seconds of a measured step over their "
                        "prediction, as lpkit.predict.time.calibrate gives it: all times are "
                        "multiplied by it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a setting; repeatable")
    parser.add_argument("--top", type=int, default=10, help="layouts to show (%(default)s)")
    parser.add_argument("--show", type=int, metavar="N", help="open the N-th: every row with its "
                        "formula and source")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from lpkit.commands import machine
    from lpkit.predict.plan import plan
    from lpkit.presets import resolve
    from lpkit.training.runs import RunFailedError

    if args.top < 1:
        raise ConfigError(f"--top must be 1 or more, got {args.top}")
    if args.budget is None and args.deadline is None and args.devices is None:
        raise ConfigError("a plan needs a limit: give --budget, --deadline or --devices")
    settings = list(args.set)
    if args.context is not None:
        settings.append(f"model.context={args.context}")
    config = resolve(args.model, settings)
    _refuse_unused(parse_settings(args.set))
    if args.batch_tokens is not None:
        config = _with_batch(config, amount("--batch-tokens", args.batch_tokens, MOST_TOKENS))
    found = plan(config, amount("--tokens", args.tokens, MOST_TOKENS), machine(args.machine),
                 budget=None if args.budget is None
                 else amount("--budget", args.budget, MOST_DOLLARS, "dollars"),
                 deadline_seconds=None if args.deadline is None
                 else span("--deadline", args.deadline), devices=args.devices,
                 precisions=args.precision, optimizer=args.optimizer,
                 price_per_hour=args.price_per_hour, calibration=_calibration(args.factor))
    if not found.options:
        raise RunFailedError(found.sentence)
    if args.show is not None and not 1 <= args.show <= len(found.options):
        raise ConfigError(f"--show {args.show}: there are {len(found.options)} plans; choose from "
                          f"1 to {len(found.options)}")
    return {"model": args.model, **found.to_dict(max(args.top, args.show or 1)), "show": args.show}


def _refuse_unused(settings: dict[str, str]) -> None:
    """A setting that changes nothing is an error."""
    for key in settings:
        if key in USED or (key.startswith(USED_GROUPS) and key not in UNUSED_MODEL):
            continue
        raise ConfigError(f"plan does not use {key}: it searches layouts and micro-batches, and "
                          f"--tokens says how long to train; leave it out. It uses model sizes, "
                          f"memory, {', '.join(USED)}")


def amount(option: str, text: str, most: float, unit: str = "tokens") -> float:
    """'250k', '$250,000', '1e12', '1.5T' as a number. Raises ConfigError for what is none, not
    positive, or absurd."""
    plain = text.strip().lower().replace(",", "").replace("_", "").removeprefix("$").strip()
    suffix = plain[-1:] if plain[-1:].isalpha() else ""
    try:
        value = float(plain.removesuffix(suffix)) * COUNTS[suffix]
    except (ValueError, KeyError):
        raise ConfigError(f"{option} {text!r} is not a number of {unit}; write it as 250000, 250k, "
                          f"1.5M, 300B or 1e12") from None
    if not 0 < value <= most:
        raise ConfigError(f"{option} must be above 0 and at most {most:g} {unit}, got {text!r}")
    return value


def span(option: str, text: str) -> float:
    """'12h', '30d', '2w' as seconds."""
    plain = text.strip().lower()
    unit = next((unit for unit in SPANS if plain.endswith(unit)), None)
    try:
        value = float(plain.removesuffix(unit or "?")) * SPANS[unit]
    except (ValueError, KeyError):
        raise ConfigError(
            f"{option} {text!r} is not a time; write it as 90min, 12h, 30d or 2w") from None
    if not 0 < value <= MOST_SECONDS:
        raise ConfigError(f"{option} must be above 0 and at most 100 years, got {text!r}")
    return value


def _calibration(factor: float | None):
    from lpkit.predict.time import Calibration

    if factor is None:
        return None
    if not 0.1 <= factor <= 10:
        raise ConfigError(f"--factor is measured over predicted seconds, from 0.1 to 10; got "
                          f"{factor}")
    return Calibration(predicted_seconds=1.0, measured_seconds=factor)


def _with_batch(config, tokens: float):
    from dataclasses import replace

    context = config.model.T
    if tokens < context or tokens % context:
        below = math.floor(tokens / context)
        near = " or ".join(f"{n * context:,}" for n in (below, below + 1) if n)
        raise ConfigError(f"--batch-tokens {tokens:,.0f} is not a whole number of sequences of "
                          f"{context:,} tokens; nearest: {near}")
    return replace(config, global_batch=int(tokens // context), grad_accum_steps=1)


def text(result: dict[str, Any]) -> str:
    from lpkit.predict.units import duration, quantity

    m = result["machine"]
    calibrated = (f"calibrated, all of them times {result['factor']:.3f}" if result["factor"] != 1
                  else "not calibrated; published large runs took up to 25% longer (docs/plan.md)")
    rows = [("", "devices", "data", "shard", "tensor", "pipe", "context", "ZeRO", "chunks", "micro",
             "recompute", "precision", "memory", "step", "MFU", "time", "cost")]
    for i, one in enumerate(result["plans"], 1):
        rows.append((str(i), *(f"{one[key]:,}"
                               for key in ("devices", "data", "shard", "tensor", "pipeline",
                                           "context")), str(one["zero"])
                     if one["shard"] * one["context"] > 1 else "-", str(one["interleave"]),
                     f"{one['micro_batches']}x{one['sequences']}", one["recompute"],
                     one["precision"], quantity(one["peak_bytes"], "bytes"),
                     duration(one["step_seconds"]), f"{one['mfu']:.2f}",
                     duration(one["run_seconds"]),
                     "-" if one["cost"] is None else f"${one['cost']:,.0f}"))
    lines = [
        f"{result['model']} ({quantity(result['parameters'], 'parameters')}) on "
        f"{quantity(result['tokens'], 'tokens')}, {quantity(result['tokens_per_step'], 'tokens')} "
        f"a step, {m['title']}", f"{result['feasible']:,} of {result['counted']:,} layouts are "
        f"feasible; the {result['first']} first", "", text_table(rows, align=">", indent="  "), "",
        *(f"  {name}: {one['layouts']:,} layouts, {one['nearest']}"
          for name, one in result["refused"].items())]
    best = result["plans"][0]
    if best["energy_wh"] is not None:
        paid = ("" if best["cost"] is None else f", ${best['cost_per_million_tokens']:.3g} per "
                f"million tokens")
        lines.append(f"  the first takes {quantity(best['device_hours'])} device hours and "
                     f"{quantity(best['energy_wh'], 'Wh')} at rated power{paid}")
    for one in result["compute_optimal"]:
        lines.append(f"  best use of the budget by {one['law']}: "
                     f"{quantity(one['parameters'], 'parameters')} on "
                     f"{quantity(one['tokens'], 'tokens')}, loss {one['loss']:.3f} ({one['note']})")
    if result["show"] is not None:
        lines += ["", *_opened(result["plans"][result["show"] - 1], result["show"])]
    return "\n".join([*lines, "", f"  {m['source']}", f"  price: {m['price_source']}",
                      f"  network: {m['network']}",
                      f"  efficiency: {result['efficiency']['source']}",
                      f"  times: {calibrated}"])


def _opened(one: dict[str, Any], number: int) -> list[str]:
    from lpkit.predict.units import duration, quantity

    width = max(len(row["name"]) for row in (*one["memory_rows"], *one["time_rows"])) + 2
    lines = [f"  plan {number}: bytes of a device; * lives at the peak, {one['peak_moment']}"]
    for row in one["memory_rows"]:
        mark = "*" if row["at_peak"] else " "
        lines += [f"  {mark} {row['name']:<{width}}{quantity(row['bytes'], 'bytes'):>10}  "
                  f"{row['formula']}", f"    {'':<{width}}{'':>10}  {row['source']}"]
    lines += ["", f"  plan {number}: seconds of a step of {duration(one['step_seconds'])}; in "
              f"brackets what hides behind it"]
    for row in one["time_rows"]:
        hidden = f" [{duration(row['hidden_seconds'])}]" if row["hidden_seconds"] else ""
        lines += [f"    {row['name']:<{width}}{duration(row['seconds']):>10}{hidden}  "
                  f"{row['formula']}", f"    {'':<{width}}{'':>10}  {row['source']}"]
    return lines
