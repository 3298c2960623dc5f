"""Make the table of docs/teach.md on the needs of a room from the files that `lpkit bench room
--out data/measured` writes."""

import json
from pathlib import Path

from tests.pages import markdown_table

ROOT = Path(__file__).parents[2]
PAGE, BEGIN, END = ROOT / "docs" / "teach.md", "<!-- room:begin -->\n", "<!-- room:end -->\n"


def files() -> dict[str, str]:
    return {"teach.md": page()}


def page() -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{room_tables()}{END}{rest.partition(END)[2]}"


def room_tables() -> str:
    tables = []
    for path in sorted((ROOT / "data" / "measured").glob("room-*.json")):
        record = json.loads(path.read_text())
        case = record | record["cases"][0]
        rows = [("until all labs answer, if all start at once", f"{case['ours_median']:.0f} s"),
                ("memory of an idle lab", f"{case['idle_learner_bytes'] / 1e6:.0f} MB"),
                ("memory of a lab with one kernel that has imported torch",
                 f"{case['learner_with_kernel_bytes'] / 1e6:.0f} MB"),
                ("time of a cell (95th percentile), one learner alone",
                 f"{1e3 * case['p95_alone_seconds']:.0f} ms"),
                ("time of a cell (95th percentile), all learners at work",
                 f"{1e3 * case['p95_together_seconds']:.0f} ms"),
                ("successful reads of another learner's files",
                 f"{case['reads']} of {case['reads_asked']}"),
                (f"reports lost while the report service was killed {case['service_kills']} times",
                 f"{case['reports_sent'] - case['reports_kept_once']} of {case['reports_sent']}")]
        tables.append(f"Measured {case['date'][:10]} with {case['learners']} learners on "
                     f"{case['device']}, {case['cores']} cores. Each learner waits "
                     f"{case['pause_seconds']:.0f} s between two cells, as people do who "
                     f"read:\n\n{markdown_table(('what', 'measured'), rows)}\n")
    return "\n".join(tables)
