"""What others say of cheaper training, beside what the kit says: docs/claims.md, `lpkit claims`.

data/published/claims.toml has the sentences with their sources and verdicts; NUMBERS, of
tests.pages.claim_numbers, computes what stands beside each. A verdict follows from the numbers by
one rule, RULE, and is in the file all the same: a number that moves across a border fails a test,
and does not change a page unseen. `python -m tests.pages claims` makes the page, and
data/published/claims.json, which the command shows.
"""

import functools
import json
import math
import re
import tomllib
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lpkit.commands.claims import HEADS, QUANTITIES, line, opened
from lpkit.files import resource
from lpkit.values import Checked, Text
from tests.bench import protocol
from tests.pages import markdown_table
from tests.pages.claim_numbers import NUMBERS, Numbers

CONFIRMED, SMALLER, REFUTED, UNTESTED = "confirmed", "smaller", "refuted", "not yet tested"
NOT_TESTABLE = "not testable here"
ENOUGH, NOTHING = 0.8, 0.2      # of what is promised
RULE = f"""A claim promises a change: twice as much is 100% more, half as much is 50% less. A number
keeps a share of it: its own change over the promised one; of a cost, the promised one over its own.
**Confirmed**: every number, the kit's and measured ones, keeps {ENOUGH:.0%} or more. **Refuted**:
none keeps {NOTHING:.0%}. **Smaller**: between the two. **Not testable here**: a condition is
missing, which the claim names. **Not yet tested**: there is no number yet, or nothing that it could
be held against. What the kit says elsewhere shows how far a sentence
travels, and decides nothing.

A sentence about all cases is refuted by one case that is otherwise. A sentence that gives a
quantity is held to it both ways: the smaller number over the larger one is its share. Where a
sentence is about the loss, a formula alone decides nothing."""


@dataclass(frozen=True, kw_only=True)
class Claim(Checked):
    """A table of claims.toml, which says what the fields are."""

    name: Text
    says: Text
    source: Text
    conditions: Text
    unit: Literal["times", "less", "more", "cases", "time", "bytes", "FLOPs", "days"]
    claimed: float | None = None
    verdict: Literal["confirmed", "smaller", "refuted", "not yet tested",
                     "not testable here"]
    missing: str = ""
    why: Text
    shown: Text

    @functools.cached_property
    def numbers(self) -> Numbers:
        return NUMBERS.get(self.name, Numbers)()

    @property
    def follows(self) -> str:
        """The verdict by RULE."""
        values = [*self.numbers.kit.values(), *self.numbers.measured.values()]
        if self.missing:
            return NOT_TESTABLE
        if self.claimed is None or not values:
            return UNTESTED
        if self.unit == "cases" and self.claimed == 1:
            return CONFIRMED if min(values) == 1 else REFUTED
        none = 1 if self.unit == "times" else 0     # the value of no change
        shares = [(value - none) / (self.claimed - none) for value in values]
        if self.unit == "more":
            shares = [1 / share if share > 0 else math.inf for share in shares]
        elif self.unit in QUANTITIES:
            shares = [min(share, 1 / share) for share in shares]
        if min(shares) >= ENOUGH:
            return CONFIRMED
        return SMALLER if max(shares) >= NOTHING else REFUTED

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), **asdict(self.numbers)}


def claims() -> dict[str, Claim]:
    """By name. Raises ConfigError for a row that is none."""
    text = (resource("data/published") / "claims.toml").read_text(encoding="utf-8")
    return {name: Claim(name=name, **row) for name, row in tomllib.loads(text).items()}


HEAD = f"""# Claims of others

What papers, pages and folklore say of cheaper training of Transformers, and what this kit says of
it; most of the techniques are those of [A Survey on Efficient Training of
Transformers](https://arxiv.org/abs/2302.01107). A sentence is quoted where it has a source; where a
search found none, that is said.

{RULE}

`lpkit claims` prints the table, `lpkit claims NAME` one of them. This page is made by
`python -m tests.pages claims`.
"""


def files() -> dict[str, str]:
    """The page, and the rows for the command, by their place in docs/."""
    return {"claims.md": page(), "../data/published/claims.json": json.dumps(rows(),
        indent=1) + "\n"}


def rows() -> list[dict[str, Any]]:
    """Numbers to six digits, as the command has them."""
    return json.loads(json.dumps([claim.to_dict() for claim in claims().values()]),
                      parse_float=lambda number: float(f"{float(number):.6g}"))


def page() -> str:
    """docs/claims.md."""
    rows = [claim.to_dict() for claim in claims().values()]
    lines = [(f"[{name}](#{name})", *rest) for name, *rest in map(line, rows)]
    parts = [HEAD, markdown_table(HEADS, lines), ""]
    for row in rows:
        shown = re.sub(r"^notebooks/(\w+)\.ipynb", r"[\1](../\g<0>)", row["shown"])
        shown = re.sub(r"^lpkit .*", r"`\g<0>`", shown)
        parts += [f"## {row['name']}", "", f"> {row['says']}", ""]
        told = dict(opened(row)) | {"shown by": shown}
        parts += [f"- **{what}**: " + _linked(said)
                  for what, said in told.items()] + [""]
    return "\n".join([*parts, *_by_protocol()])


def _linked(text: str) -> str:
    return re.sub(r"https://[^\s,;]+", r"<\g<0>>", text)


PROTOCOL = """## By protocol

Sentences about the loss, settled by [`lpkit claim`](claim.md) on `docs/claims/NAME.yaml`: each \
arm is tuned alike over ten combinations of rate and decay, arms are paired by seed, and the
verdict says what could not have been seen. All are held to models of 1 to 2 million weights, 100 \
steps of 512 tokens; a sentence about fewer
steps is held to its direction, a lower loss after equally many. *Better* is confirmed where a \
gain of 2% or more was found, *no worse* where a loss of 2%
is ruled out; *not seen*: neither that nor the opposite. `lpkit bench protocol --out \
data/measured` settles them anew; one that has a file
`data/measured/claim-NAME.verdict` was settled by the command alone, and `tpe` by the best of 20 \
trials in 20 recorded searches each (`lpkit bench tpe-random`).
"""


def _by_protocol() -> list[str]:
    """Of the newest record of `lpkit bench protocol`."""
    record, each = protocol.recorded()
    rows, parts = [], []
    for name, row in protocol.published().items():
        found = each[name]
        [one] = found["verdicts"]
        low, high = one["interval"]
        survives = ((one["equal_seconds"] or {}).get("survives"),
                    protocol.at_equal_flops(name, one, found.get("tuned", {})))
        equal = ["" if told is None else "yes" if told else "no" for told in survives]
        rows.append((f"`{name}`", f"{one['arm']} beside {one['against']}",
                     f"{one['gain']:+.2%} ({low:+.2%} to {high:+.2%})", f"{one['seeds']}",
                     f"{one['could_see']:.2%}", *equal,
                     protocol.word(row["expects"], one, found["effect"])))
        parts += [f"**{name}**: \"{row['says']}\" " + _linked(row["source"])
                  + f": {row['conditions']}. {row['why']}", ""]
    heads = ("claim", "arms", "gain (95% interval)", "seeds", "could see", "at equal seconds",
             "at equal FLOPs", "verdict")
    return [PROTOCOL, f"{record['device']}, {record['date'][:10]}, at commit {record['commit']}; a "
                      f"gain is a lower loss.", "",
            markdown_table(heads, rows), "", *parts]
