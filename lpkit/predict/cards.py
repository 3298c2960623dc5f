"""Cards: a prediction, a measurement, or both, as 1 kB of JSON and as an SVG picture.

The JSON contains its own SHA-256. The checksum shows damage, but it is not a signature: anybody can
write a card with a valid checksum.
"""

import platform
import time
from collections.abc import Mapping
from html import escape
from importlib import metadata
from typing import Any

from lpkit import __version__, files, records
from lpkit.errors import ConfigError, in_one_line, named
from lpkit.predict.compare import percent
from lpkit.predict.evidence import catalogued
from lpkit.predict.units import quantity, words
from lpkit.tables import GRID, INK, picked, text_table
from lpkit.values import Place, checked

MOST_LETTERS = 60       # letters in a line of the picture, which has room for 61


@checked
def write(path: Place, model: Mapping, predicted: object = None, device: str = "",
          **measured) -> list[str]:
    """Write PATH.json and PATH.svg; return both paths.

    model       the model's name, parameters and layers, and more fields for the JSON
    predicted   a Prediction of a Config or a module; None: the card has no prediction
    device      the device of the measurement; "": the card has no measurement
    measured    `peak_bytes`, `step_seconds` and counts, as measured on `device`

    Raises ConfigError if the path cannot be a card's, and OSError."""
    path = path.with_suffix("") if path.suffix in (".json", ".svg") else path
    if not path.name:
        raise ConfigError(f"a card needs the name of a file, like card.svg; got {named(path)!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {named(path.parent)} for the card; make it first")
    torch = next((package.version for package in metadata.distributions(name="torch")), "none")
    card = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "model": model, "versions": {
        "lpkit": __version__, "torch": torch, "python": platform.python_version()}}
    if predicted is not None:
        card["predicted"] = {"peak_bytes": round(predicted.peak_bytes), **picked(
            predicted.step, "stack step_seconds", machine="machine.title",
            step_seconds_range="seconds_range", range_is="spread.words"),
            "layout": str(predicted.step.layout)}
    if device:
        known = catalogued(device)
        card["measured"] = {"machine": known.title if known else device, **measured}
    contents = {".json": records.sealed(card), ".svg": drawn(records.plain(card))}
    for suffix, text in contents.items():
        files.write_atomically(path.with_name(path.name + suffix), text)
    return [f"{path}{suffix}" for suffix in contents]


def line(card: Mapping[str, Any]) -> list[str]:
    """Return the eight texts of a card: the model; the machines; the predicted value, the measured
    value and the relative error of the peak's bytes; and the same three of a step's seconds.

    The seconds have an error only if prediction and measurement are of the same machine. Raises
    one of the errors in records.UNREADABLE if a field is missing or out of range."""
    both = [card.get(side) or {} for side in ("predicted", "measured")]
    machines = [*dict.fromkeys(in_one_line(facts["machine"][:40]) for facts in both if facts)]
    facts = [in_one_line(card["model"]["name"][:40]), "; measured: ".join(machines)]
    for key, unit in (("peak_bytes", "bytes"), ("step_seconds", "seconds")):
        formula, truth = (side.get(key) or 0 for side in both)
        if not 0 <= min(formula, truth) <= max(formula, truth) < 1e30:
            raise ValueError(f"{key} is out of range")
        one_thing = formula and truth and (unit == "bytes" or len(machines) == 1)
        facts += [*(quantity(number or None, unit) for number in (formula, truth)),
                  percent(formula / truth - 1 if one_thing else None)]
    return facts


def drawn(card: Mapping[str, Any]) -> str:
    """Return a card as SVG with a background and the first digits of its SHA-256."""
    (name, machine, *facts), model, span = line(card), card["model"], ""
    if predicted := card.get("predicted"):
        span = words("range of a step: {step_seconds_range:time}", predicted)
    table = text_table([("", "predicted", "measured", "error"), ("peak memory", *facts[:3]),
                        ("a step", *facts[3:])], align="<>")
    about = [model[key] for key in ("precision", "optimizer") if key in model]
    size = words("{parameters:number} parameters, layers: {layers}", model)
    lines = [name, ", ".join([size, *about]), machine, "", *table.split("\n"), span,
             ", ".join(map(" ".join, card["versions"].items())),
             f"{card['date']}, SHA-256 {records.digest(card)[:16]}"]
    texts = (f'<text x="16" y="{28 + 18 * i}" xml:space="preserve">'
             f'{escape(in_one_line(text)[:MOST_LETTERS])}</text>' for i, text in enumerate(lines))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="480" height="200" font-size="12" '
            f'font-family="ui-monospace, \'DejaVu Sans Mono\', Menlo, monospace" fill="{INK}"'
            f'><rect width="480" height="200" fill="#fff" stroke="{GRID}"/>{"".join(texts)}'
            f'</svg>\n')
