"""Stands for the process that tries this machine (`python -m tests.measure.probe_process`), and a
recorded report in its place."""

import json
import os
import sys
import time

DOES = {"crash": os.abort, "hang": lambda: time.sleep(1000), "fine": lambda: None}


def answers(report):
    """The parts of a doctor's report as `lpkit.measure.probes.answers` yields them."""
    rows = report["probes"]
    yield {"machine": report["machine"], "device": report["device"],
           "checks": [[row["name"], row["kind"], ""] for row in rows]}
    yield {key: report[key] for key in ("ceilings", "chosen")}
    for row in rows:
        yield {"probes": [row]}


def main(writer: str, request: str) -> None:
    """Each name's first word says what its probe does."""
    names = json.loads(request)["only"]
    with open(int(writer), "w") as out:
        print(json.dumps({"checks": [[name, "recipe", "fp32"] for name in names],
                          "device": ",".join(names)}), file=out, flush=True)
        for name in names:
            DOES[name.split()[0]]()
            print(json.dumps({"probes": [{"name": name, "kind": "recipe", "works": True,
                                          "detail": "x", "why": "", "nearest": ""}]}), file=out,
                flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
