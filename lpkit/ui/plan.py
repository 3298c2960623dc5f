"""A plan to look into: what a layout holds and how long it takes, row by row, each row with its
formula and source; why other layouts are left out; what a budget buys by a scaling law; and days,
loss and dollars, which cannot all be least."""


from lpkit.predict.ledger import MOMENTS, Memory
from lpkit.predict.time import StepTime
from lpkit.predict.units import duration, quantity
from lpkit.tables import opened_rows
from lpkit.ui.style import COLOURS

KINDS = {   # of the rows of a step's time
    "products": COLOURS[0], "attention": COLOURS[2], "limited by memory": COLOURS[3],
    "recomputation": "#e0a3ad", "communication": COLOURS[1], "idle": COLOURS[6],
}
KIND_OF = {     # what is not here: communication where the name has a colon, else a product
    "attention": "attention", "norms, activations, loss": "limited by memory",
    "weight copies": "limited by memory", "optimizer": "limited by memory",
    "recomputation": "recomputation", "pipeline: bubble": "idle", "between kernels": "idle",
}


def opened_memory(held: Memory) -> str:
    """Returns HTML as `opened_rows` does, of what a device holds."""
    sizes, rows = held.at(held.peak_moment), []
    for row in held.rows:
        moments = ", ".join(row.at) if len(row.at) < len(MOMENTS) else "every moment"
        rows.append((row.name, row.bytes, quantity(row.bytes, "bytes"),
                     "" if row.name in sizes else "not at the peak",
                     (row.formula, row.source, f"lives at: {moments}")))
    return opened_rows(f"memory of a device: {quantity(held.peak_bytes, 'bytes')} at most", rows,
                       held.peak_bytes)


def opened_time(step: StepTime) -> str:
    """Returns HTML as `opened_rows` does, of a step's seconds."""
    rows = []
    for row in step.rows:
        hidden = f"and {duration(row.hidden_seconds)} hidden behind other rows"
        rows.append((row.name, row.seconds, duration(row.seconds),
                     hidden if row.hidden_seconds else "", (row.formula, row.source)))
    return opened_rows(f"time of a step: {duration(step.step_seconds)}", rows, step.step_seconds)
