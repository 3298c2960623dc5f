"""Run attacks and print one JSON object for each."""

import argparse
import dataclasses
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.attack import NAMES, NOT_TRIED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--share", type=float, default=1.0, help="of the trials (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the names")
    args = parser.parse_args()
    if args.list:
        print(json.dumps(NAMES))
        return 0
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"there is no attack {min(unknown)!r}; choose among {', '.join(NAMES)}")
    broken = 0
    for name in args.names or NAMES:
        module, begun = importlib.import_module(f"tests.attack.{name}"), time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"lpkit-{name}-") as folder:
            count = max(1, round(module.COUNT * args.share))
            outcome = module.attack(count, args.seed, Path(folder).resolve())
        seconds = round(time.monotonic() - begun, 1)
        print(json.dumps({"name": name, "seconds": seconds} | dataclasses.asdict(outcome)),
              flush=True)
        if NOT_TRIED in outcome.facts:
            print(f"{name} was not tried: {outcome.facts[NOT_TRIED]}", file=sys.stderr)
        broken += bool(outcome.failures)
    return int(broken > 0)


sys.exit(main())
