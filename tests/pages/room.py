"""docs/teach.md, whose table of what a room takes is made from the files that `lpkit bench room --out data/measured` writes."""

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
        rows = [("all labs, started at once, answer", f"{one['ours_median']:.0f} s"),
                ("an idle lab holds", f"{one['idle_learner_bytes'] / 1e6:.0f} MB"),
                ("with a kernel that has imported torch", f"{one['learner_with_kernel_bytes'] / 1e6:.0f} MB"),
                ("a cell, 95th percentile, of one learner alone", f"{1e3 * one['p95_alone_seconds']:.0f} ms"),
                ("of all learners together", f"{1e3 * one['p95_together_seconds']:.0f} ms"),
                ("reads of another's files that were let through", f"{one['reads']} of {one['reads_asked']}"),
                (f"reports lost in {one['service_kills']} kills of the service", f"{one['reports_sent'] - one['reports_kept_once']} of {one['reports_sent']}")]
        tables.append(f"{one['learners']} learners on {one['device']}, {one['cores']} cores, {one['date'][:10]}; {one['pause_seconds']:.0f} s between "
                      f"one's cells, as people read:\n\n{markdown_table(('what', ''), rows)}\n")
    return "\n".join(tables)
