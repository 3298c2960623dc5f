"""The bytes of a training step, drawn: one bar a moment, one segment a row, and a dashed line where
the device ends."""

import dataclasses
import math

from lpkit.config import Config
from lpkit.predict.ledger import MOMENTS, Memory, memory
from lpkit.predict.units import quantity
from lpkit.tables import INK, html_table
from lpkit.techniques.machines import Machine
from lpkit.ui.draw import NAMES, axis, bars, figure, rule
from lpkit.ui.style import WARNING

COLOURS = {   # one family of rows, one hue
    "weights": "#004488", "master weights": "#4d7eb3", "optimizer state": "#a5d8f0",
    "gradients": "#6b7280", "gathered weights": "#b8860b", "weight copies": "#ddaa33",
    "activations": "#bb5566", "recomputed block": "#e0a3ad", "logits and loss": "#1f7a6f",
    "logits' gradients": "#8fd0c6", "low-precision weights": "#cc9966", "scales": "#996633",
    "amax histories": "#663300", "communication buffers": "#808000", "temporaries": "#bbbbbb",
    "optimizer temporaries": "#888888", "batch": "#000000", "transposed copies": "#e6c79c",
    "attention workspace": "#7b5ea7", "allocator": "#e5e5e5",
}


def limit_of(held: Memory) -> float | None:
    """The device's bytes, to be drawn. None: so far outside that the bars would be squeezed to
    nothing."""
    limit = held.memory_bytes
    return limit if limit and held.peak_bytes > 0.1 * limit else None


def memory_figure(held: Memory, *, title: str = "") -> dict:
    """The plotly spec. The longest bar is the peak."""
    data = []
    for row in held.rows:
        sizes = [row.at.get(moment) for moment in MOMENTS]
        data.append(bars(MOMENTS, sizes, row.name, COLOURS[row.name], textposition="inside",
                         text=["" if size is None else quantity(size, "bytes") for size in sizes],
                         hover=f"{row.name}: %{{text}}<extra>{row.formula}</extra>"))
    below = 21 * math.ceil(len(data) / 4)
    limit, colour = limit_of(held), INK if held.fits else WARNING
    return figure(
        data, title, height=120 + 46 * len(MOMENTS) + below, barmode="stack", bargap=0.35,
        shapes=[rule(x=limit, colour=colour, width=2, dash="dash")] if limit else [], yaxis=NAMES,
        # below: many rows would grow into the title
        legend={"yref": "container", "y": 0, "yanchor": "bottom"}, margin={"b": 60 + below},
        xaxis=axis("bytes per device", exponentformat="SI", ticksuffix="B",
                   range=[0, 1.08 * max(held.peak_bytes, limit or 0)]))


def memory_view(model: Config, machine: Machine, sequences: int, devices: int, precision: str,
                optimizer: str, zero_stage: int, recompute: str) -> tuple[dict, str]:
    """For an Explorer: `sequences` per device at a time, no accumulation. The figure, and the peak
    as a table."""
    config = dataclasses.replace(model, global_batch=sequences * devices, grad_accum_steps=1)
    held = memory(config, machine, devices, precision=precision, optimizer=optimizer,
                  zero=zero_stage, recompute=recompute)
    peak, verdict = quantity(held.peak_bytes, "bytes"), "fits" if held.fits else "does not fit"
    spec = memory_figure(held, title=f"A peak of {peak} {verdict} into the "
                         f"{quantity(machine.memory_bytes, 'bytes')} of one {machine.title}")
    sizes = sorted(held.at(held.peak_moment).items(), key=lambda row: -row[1])
    rows = [(name, quantity(size, "bytes"), f"{size / held.peak_bytes:.0%}")
            for name, size in sizes]
    return spec, html_table(("held at the peak", "per device", "share"),
                            [*rows, ("sum", peak, "100%")],
                            caption=f"{held.peak_moment}: {MOMENTS[held.peak_moment]}")
