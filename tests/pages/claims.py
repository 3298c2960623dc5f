"""Published claims about cheaper training, compared with the kit's numbers: docs/claims.md.

data/published/claims.toml has the quoted sentences with their sources and verdicts. NUMBERS, of
tests.pages.claim_numbers, computes the kit's numbers for each claim. RULE derives the verdict from
the numbers. The file repeats the verdict, so that a test fails if a number crosses a threshold and
would change the verdict. `python -m tests.pages claims` writes the page and
data/published/claims.json, which `lpkit claims` prints.
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
RULE = f"""A claim promises a change: "2 times" is 100% more, "half" is 50% less. Each predicted and
each measured number reaches a share of the promised change: the change of the number divided by the
promised change. For a cost, it is the promised change divided by the change of the number. The
shares decide:

- **confirmed**: every number reaches {ENOUGH:.0%} or more.
- **refuted**: no number reaches {NOTHING:.0%}. One counterexample refutes a claim about all cases.
- **smaller**: neither confirmed nor refuted.
- **not testable here**: the kit lacks a condition of the claim, which the claim names.
- **not yet tested**: the claim has no number, or the kit has none to compare with it.

If a claim gives a quantity, the share is the smaller number divided by the larger number. If a
claim is about the loss, a formula alone decides nothing. Numbers in the row *elsewhere* are for
other conditions and do not count."""


@dataclass(frozen=True, kw_only=True)
class Claim(Checked):
    """A table of claims.toml; the comment at the top of that file explains the fields."""

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
    """Returns the claims by name. Raises ConfigError for an invalid row."""
    text = (resource("data/published") / "claims.toml").read_text(encoding="utf-8")
    return {name: Claim(name=name, **row) for name, row in tomllib.loads(text).items()}


HEAD = f"""# Claims of others

Claims from papers, web pages and folklore about cheaper training of Transformers, compared with
predictions and measurements of this kit. Most of the techniques are in [A Survey on Efficient
Training of Transformers](https://arxiv.org/abs/2302.01107). A claim with a source is a quotation.

{RULE}

`lpkit claims` prints the table, `lpkit claims NAME` one claim. `python -m tests.pages claims` makes
this page.
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
        fields = dict(opened(row)) | {"shown by": shown}
        del fields["claimed"]       # in the table and in the quotation
        if row["shown"] == f"lpkit claims {row['name']}":
            del fields["shown by"]
        parts += [f"- **{what}**: " + _linked(text)
                  for what, text in fields.items()] + [""]
    return "\n".join([*parts, *_by_protocol()])


def _linked(text: str) -> str:
    return re.sub(r"https://[^\s,;]+", r"<\g<0>>", text)


PROTOCOL = """## By protocol

Claims about the loss, tested by [`lpkit claim`](claim.md) on `docs/claims/NAME.yaml`. Both arms
are tuned in the same way over ten combinations of learning rate and weight decay, and runs are \
paired by
seed. The models have 1 to 2 million weights and train for 100 steps of 512 tokens. If a claim is
about fewer steps, only its direction is tested: a lower loss after equally many steps.

- **gain**: how much lower the loss of the first arm is.
- **detectable**: the smallest gain that this number of seeds could detect.
- **at equal seconds**, **at equal FLOPs**: whether the better arm stays better if both arms get \
the
  same seconds or FLOPs.
- **verdict**: a claim of *better* is confirmed by a detected gain of 2% or more, and *smaller* is a
  detected gain below 2%. A claim of *no worse* is confirmed if a loss of 2% is excluded. *Not \
seen*:
  neither the claim nor its opposite was detected.

`lpkit bench protocol --out data/measured` repeats the tests. The file
`data/measured/claim-NAME.verdict` is the output of the command alone. `tpe` compares the best of
20 trials in 20 recorded searches of each kind (`lpkit bench tpe-random`).
"""


def _by_protocol() -> list[str]:
    """Of the newest record of `lpkit bench protocol`."""
    record, each = protocol.recorded()
    rows, parts = [], []
    for name, row in protocol.published().items():
        result = each[name]
        [comparison] = result["verdicts"]
        low, high = comparison["interval"]
        survives = ((comparison["equal_seconds"] or {}).get("survives"),
                    protocol.at_equal_flops(name, comparison, result.get("tuned", {})))
        equal = ["" if survived is None else "yes" if survived else "no" for survived in survives]
        rows.append((f"`{name}`", f"{comparison['arm']} over {comparison['against']}",
                     f"{comparison['gain']:+.2%} ({low:+.2%} to {high:+.2%})",
                     f"{comparison['seeds']}", f"{comparison['could_see']:.2%}", *equal,
                     protocol.word(row["expects"], comparison, result["effect"])))
        parts += [f"**{name}**", "", f"> {row['says']}", "",
                  f"- **source**: {_linked(row['source'])}",
                  f"- **conditions**: {_linked(row['conditions'])}",
                  f"- **why**: {row['why']}", ""]
    heads = ("claim", "arms", "gain (95% interval)", "seeds", "detectable", "at equal seconds",
             "at equal FLOPs", "verdict")
    where = f"{record['device']}, {record['date'][:10]}, at commit {record['commit']}."
    return [PROTOCOL, where, "",
            markdown_table(heads, rows), "", *parts]
