"""Answers for the planner's page, which calls lpkit.predict with Pyodide. Inputs and outputs are JSON.

`choices()` returns the controls of the page. `answer(asked)` returns the numbers of `lpkit predict` for their values, and the
command that prints the same numbers. Only the standard library is used.
"""

import json
from shlex import join
from typing import Annotated, Any

from lpkit.errors import ConfigError
from lpkit.predict.device import to_search
from lpkit.predict.ledger import USABLE_MEMORY_SHARE
from lpkit.predict.plan import powers_of_two
from lpkit.predict.prediction import Prediction, predict
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.stacks import STACKS
from lpkit.predict.units import between, duration, quantity
from lpkit.presets import PRESETS, preset
from lpkit.techniques import lessons, outside
from lpkit.techniques.layouts import AXES, Layout, check, divisors
from lpkit.techniques.machines import CATALOGUE
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.values import Count, Positive, PositiveOrZero, Text, checked
from lpkit.values import between as within

FEW, MANY = powers_of_two(1, 32), sorted([*powers_of_two(1, 32_768), *powers_of_two(24, 24_576)])
SHAPE = {"layers": "layers", "width": "width of the residual stream", "heads": "query heads", "kv_heads": "key and value heads",
         "mlp_width": "width of the MLP", "vocab": "vocabulary"}
Layers, Side = Annotated[int, within(1, 10_000)], Annotated[int, within(1, 2**24)]     # an address can contain any number
BILLIONS = [scale * step for scale in (1, 10, 100, 1000, 10_000) for step in (1, 1.5, 2, 3, 5)]


def choices() -> list[dict[str, Any]]:
    """Return the controls by group. A control has a list of names (`options`), the values of a slider (`steps`), or neither: then it
    is a number that may be left out."""
    def names(name: str, label: str, options: Any, value: str) -> dict[str, Any]:
        return {"name": name, "label": label, "options": list(options), "value": value}

    def steps(name: str, label: str, values: Any, value: float) -> dict[str, Any]:
        return {"name": name, "label": label, "steps": list(values), "value": value}

    def maybe(name: str, label: str) -> dict[str, Any]:
        return {"name": name, "label": label, "value": None}

    machines = [(name, machine.title) for name, machine in CATALOGUE.items()]
    stacks = [("auto", "lpkit's own"), *((name, f"{name}: {stack.words}") for name, stack in STACKS.items())]
    same = lambda rows: [(name, name) for name in rows]
    return [
        {"title": "Run", "controls": [
            names("model", "model", same(PRESETS), "llama-8b"), maybe("length", "tokens of a sequence"),
            steps("batch", "sequences of an update", MANY, 512), steps("billions", "tokens of the run, billions", BILLIONS, 300)]},
        {"title": "Shape, if not the model's own", "controls": [maybe(name, label) for name, label in SHAPE.items()]},
        {"title": "Machine", "controls": [
            names("machine", "machine", machines, "h100"), names("stack", "stack", stacks, "auto"), steps("devices", "devices", MANY, 64),
            maybe("price", "dollars per device and hour")]},
        {"title": "Layout", "controls": [
            steps("tensor", "tensor ranks", FEW, 1), steps("pipeline", "pipeline stages", [*FEW, 64], 1),
            steps("interleave", "chunks of a stage", FEW, 1), steps("context", "context ranks", FEW, 1),
            steps("data", "replicas", MANY, 1), steps("zero", "ZeRO stage", range(4), 3)]},
        {"title": "Step", "controls": [
            names("precision", "precision", same(PRECISIONS), "bf16"), steps("micro_batch", "sequences of a micro-batch", FEW, 1),
            names("recompute", "recompute", same(to_search()), "none"),
            names("optimizer", "optimizer", same(dict.fromkeys([*OPTIMIZERS, *lessons.having("optimizer")])), "adamw")]},
    ]


def answer(asked: str) -> str:
    """Return the prediction as JSON, or {"error": sentence}. `asked` is JSON with the value of each control by its name."""
    try:
        return json.dumps(_answer(**json.loads(asked)))
    except ConfigError as error:
        return json.dumps({"error": str(error)})


@checked
def _answer(*, model: Text, length: Count | None, batch: Count, billions: Positive, machine: Text, devices: Count,
            price: PositiveOrZero | None, tensor: Count, pipeline: Count, interleave: Count, context: Count, data: Count, zero: int,
            precision: Text, micro_batch: Count, recompute: Text, optimizer: Text, stack: Text, layers: Layers | None, width: Side | None,
            heads: Side | None, kv_heads: Side | None, mlp_width: Side | None, vocab: Side | None) -> dict[str, Any]:
    if batch % micro_batch:
        fits = [size for size in divisors(batch) if size < micro_batch]
        raise ConfigError(f"{batch} sequences of an update do not split into micro-batches of {micro_batch}; {fits[-1]} is the "
                          f"nearest below that does")
    shape = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "mlp_width": mlp_width, "vocab": vocab}
    shape = {f"model.{name}": value for name, value in shape.items() if value is not None}
    config, inner, ranks = preset(model).replace(shape), {"tensor": tensor, "pipeline": pipeline, "context": context}, data * tensor * pipeline * context
    length, chunks = length or config.model.context, {"interleave": interleave, "schedule": "interleaved" if interleave > 1 else "1f1b"}
    if devices % ranks:
        check(config.replace({"model.context": length}), Layout(**inner, **chunks))
        below = devices // ranks * ranks
        raise ConfigError(f"devices={devices} does not split over tensor={tensor} x pipeline={pipeline} x context={context} x "
                          f"replicas={data}; use {f'{below:,} or ' if below else ''}{below + ranks:,} devices")
    layout = Layout(**inner, **chunks, data=data, shard=devices // ranks, zero=zero)
    settings = {**shape, "model.context": length, "global_batch": batch, "grad_accum_steps": batch // micro_batch,
                "steps": max(1, round(1e9 * billions / (batch * length))), "system.stack": stack,
                **{f"parallel.{axis}": getattr(layout, axis) for axis in (*AXES, "zero", *chunks)}}
    if optimizer not in OPTIMIZERS:
        outside.load([module for row, module in lessons.having("optimizer").items() if row == optimizer])
    module = outside.module_of("optimizer", optimizer)
    found = predict(config.replace(settings), machine, precision=precision, recompute=recompute, optimizer=optimizer,
                    price_per_hour=price)
    words = [f"{key}={value}" for key, value in settings.items()]
    words += ["--machine", machine, "--precision", precision, "--recompute", recompute, "--optimizer", optimizer]
    words += [] if price is None else ["--price-per-hour", f"{price}"]
    words += ["--import", module] if module else []
    m = config.model
    usual = {"length": m.context, "price": found.machine.price_per_hour, "layers": m.layers, "width": m.width, "heads": m.heads,
             "kv_heads": m.G, "mlp_width": m.F, "vocab": m.vocab}      # the defaults of controls that may be left out
    return {"command": join(["lpkit", "predict", model, *words]), "usual": usual, **_said(found), "prediction": found.to_dict()}


def _said(found: Prediction) -> dict[str, Any]:
    """Return the prediction as texts and as bars of a chart."""
    held, step, run, on = found.memory, found.step, found.run, found.machine
    level, verdict = "fits", f"fits, with {quantity(-held.missing_bytes, 'bytes')} to spare of the usable {USABLE_MEMORY_SHARE:.0%}"
    if not held.fits:
        level, verdict = "over", f"does not fit: {quantity(held.peak_bytes - on.memory_bytes, 'bytes')} too many"
    elif held.missing_bytes > 0:
        level, verdict = "tight", f"barely fits: the allocator and the driver want {1 - USABLE_MEMORY_SHARE:.0%} for themselves"
    facts = {
        "step": duration(step.step_seconds),
        "MFU": f"{step.mfu:.1%}",
        "tokens/s": quantity(step.tokens_per_second),
        "run": duration(run.seconds),
        "nine of ten": between(run.range_of(run.seconds), duration),
        "cost": "no price" if run.cost is None else f"${quantity(run.cost)}",
        "energy": "no rated power" if run.energy_wh is None else quantity(run.energy_wh, "Wh"),
    }
    sizes = held.at(held.peak_moment)
    of_device = [(row, sizes[row.name], quantity(sizes[row.name], "bytes")) for row in held.rows if row.name in sizes]
    of_step = [(row, row.seconds, duration(row.seconds) if row.seconds else f"{duration(row.hidden_seconds)} hidden")
               for row in step.rows if row.seconds or row.hidden_seconds]
    bars = lambda rows: [{"name": row.name, "size": size, "text": text, "formula": row.formula, "source": row.source,
                          "hidden": getattr(row, "hidden_seconds", 0)} for row, size, text in rows]
    phases = ", ".join(f"{name} {seconds / step.step_seconds:.0%}" for name, seconds in step.phases.items()
                       if seconds > 0.005 * step.step_seconds)
    emulated = f"; {step.precision} is emulated: {step.emulated}" if step.emulated else ""
    others = "".join(f"; by {one['stack']} {duration(one['step_seconds'])} ({between(one['step_seconds_range'], duration)})"
                     for one in found.other_stacks)
    return {
        "level": level, "verdict": verdict, "facts": facts,
        "title": f"{quantity(found.parameters)} parameters on {found.layout.devices:,} x {on.title}: {found.layout}; "
                 f"{step.micro_batches:,} micro-batches of {step.sequences}; {found.assumptions['steps']:,} steps of "
                 f"{quantity(step.tokens)} tokens",
        "bytes": {"title": f"A device at its peak: {quantity(held.peak_bytes, 'bytes')} of {quantity(on.memory_bytes, 'bytes')}",
                  "beside": f"the moment: {held.peak_moment}", "whole": held.peak_bytes, "limit": on.memory_bytes, "rows": bars(of_device)},
        "seconds": {"title": f"A step: {duration(step.step_seconds)}", "beside": f"{phases}; {between(step.seconds_range, duration)}: {step.spread.words}{emulated}{others}", "whole": step.step_seconds,
                    "limit": step.step_seconds, "rows": bars(of_step)},
    }
