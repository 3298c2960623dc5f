"""What others say of cheaper training of Transformers, with source and conditions, beside what the
kit predicts and measures, and a verdict.

    lpkit claims
    lpkit claims lion-faster
"""

import argparse
from typing import Any

from lpkit.errors import pick
from lpkit.predict import folklore
from lpkit.tables import beside, text_table


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them, with everything")


def run(args: argparse.Namespace) -> dict[str, Any]:
    known = folklore.claims()
    if args.name is None:
        return {"claims": [claim.to_dict() for claim in known.values()]}
    return pick(known, args.name, "claim").to_dict()


def text(result: dict[str, Any]) -> str:
    if "claims" in result:
        return text_table([folklore.HEADS, *map(folklore.line, result["claims"])])
    return "\n".join(beside(what, words, 12, 100)
                     for what, words in (("says", result["says"]), *folklore.opened(result)))
