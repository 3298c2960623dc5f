"""docs/teach.md: its table of a room's needs is made from the files that `lpkit bench room --out
data/measured` writes."""

import json
from pathlib import Path

from tests.pages import markdown_table

ROOT = Path(__file__).parents[2]
PAGE, BEGIN, END = ROOT / "docs" / "teach.md", "<!-- room:begin -->\n", "<!-- room:end -->\n"


def files() -> dict[str, str]:
    return {"teach.md": page()}


def page() -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{made()}{END}{rest.partition(END)[2]}"


def made() -> str:
    tables = []
    for path in sorted((ROOT / "data" / "measured").glob("room-*.json")):
        told = json.loads(path.read_text())
        one = told | told["cases"][0]
        rows = [("until all labs answer, if all start at once", f"{one['ours_median']:.0f} s"),
                ("memory of an idle lab", f"{one['idle_learner_bytes'] / 1e6:.0f} MB"),
                ("memory of a lab with one kernel that has imported torch",
                 f"{one['learner_with_kernel_bytes'] / 1e6:.0f} MB"),
                ("time of a cell (95th percentile), one learner alone",
                 f"{1e3 * one['p95_alone_seconds']:.0f} ms"),
                ("time of a cell (95th percentile), all learners at work",
                 f"{1e3 * one['p95_together_seconds']:.0f} ms"),
                ("successful reads of another learner's files",
                 f"{one['reads']} of {one['reads_asked']}"),
                (f"reports lost while the report service was killed {one['service_kills']} times",
                 f"{one['reports_sent'] - one['reports_kept_once']} of {one['reports_sent']}")]
        tables.append(f"Measured {one['date'][:10]} with {one['learners']} learners on "
                     f"{one['device']}, {one['cores']} cores. Each learner waits "
                     f"{one['pause_seconds']:.0f} s between two cells, as people do who "
                     f"read:\n\n{markdown_table(('what', 'measured'), rows)}\n")
    return "\n".join(tables)
