"""List published claims about cheaper training of Transformers, such as "activations take 12 times
fewer bytes". For each claim: the claimed number, the number that lpkit predicts, the number that it
measured, and a verdict. With NAME, also print the source, the conditions and the reasons.

    lpkit claims
    lpkit claims lion-faster
"""

import argparse
import json
import re
import shutil
from collections.abc import Mapping
from typing import Any

from lpkit.commands import options
from lpkit.errors import pick
from lpkit.files import resource
from lpkit.predict.units import quantity
from lpkit.tables import beside, text_table

arguments = options({"name? NAME": "claim to print in full"})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return all claims of data/published/claims.json, or the claim NAME."""
    rows = json.loads((resource("data/published") / "claims.json").read_text(encoding="utf-8"))
    if args.name is None:
        return {"claims": rows}
    return pick({row["name"]: row for row in rows}, args.name, "claim")


def text(result: dict[str, Any]) -> str:
    # if stdout is a pipe, assume 160 columns, which are enough for the table
    columns = shutil.get_terminal_size((160, 24)).columns
    if "claims" in result:
        lines = [*map(line, result["claims"])]
        table = text_table([HEADS, *lines])
        if max(map(len, table.splitlines())) <= columns:
            return table
        return "\n".join(map(narrow, lines))
    return "\n".join(beside(what, words, 12, min(columns, 100))
                     for what, words in (("says", result["says"]), *opened(result)))


HEADS = ("claim", "claimed", "kit", "measured", "verdict")
QUANTITIES = ("bytes", "FLOPs", "days")     # units of claims about a quantity, not a change
SHARES = {"cases": "cases", "time": "the time"}


def words(unit: str, value: float) -> str:
    """Return a number of a claim as text with its unit.

    >>> words("times", 1.0003), words("less", 0.125), words("less", -0.054), words("cases", 0.6)
    ('1.00 times', '12.5% less', '5.4% more', '60% of cases')
    >>> words("bytes", 141e9), words("FLOPs", 2.1), words("time", 0.96)
    ('141 GB', '2.10 FLOPs', '96% of the time')
    """
    if unit == "times" or unit in QUANTITIES:
        return quantity(value, unit)
    share = f"{abs(value):.1%}".replace(".0%", "%")
    if unit in SHARES:
        return f"{share} of {SHARES[unit]}"
    return f"{share} {'more' if (value < 0) == (unit == 'less') else 'less'}"


def line(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a claim under HEADS. Several numbers become a range: "1.28 to 1.56
    times"."""
    claimed = [] if row["claimed"] is None else [row["claimed"]]
    ranges = [" to ".join(dict.fromkeys(words(row["unit"], end(values)) for end in (min, max)
                                        if values))
              for values in (claimed, row["kit"].values(), row["measured"].values())]
    # write the unit once: "1.28 to 1.56 times", not "1.28 times to 1.56 times"
    once = [re.sub(r" (.+) to (.+ \1)$", r" to \2", numbers) for numbers in ranges]
    return row["name"], *once, row["verdict"]


def narrow(row: tuple[str, ...]) -> str:
    """Returns the row of a claim for a narrow terminal, as two lines of text, or one line if the
    claim has no numbers. `row`: the result of `line`."""
    cells = [f"{what} {numbers}" for what, numbers in zip(HEADS[1:4], row[1:4], strict=True)
             if numbers]
    return f"{row[0]}  {row[-1]}" + ("\n    " + "; ".join(cells) if cells else "")


def opened(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the fields of a claim as (name, text), for printing in full."""
    unit, claimed = row["unit"], "no number"
    if row["claimed"] is not None:
        claimed = words(unit, row["claimed"])
    results = [(name, "; ".join(f"{case}: {words(unit, value)}"
                                for case, value in row[name].items()))
               for name in ("kit", "measured", "elsewhere") if row[name]]
    return [("source", row["source"]), ("conditions", row["conditions"]), ("claimed", claimed),
            *results, ("verdict", row["verdict"]),
            *((name, row[name]) for name in ("missing",) if row[name]),
            ("why", row["why"]), ("shown by", row["shown"])]
