"""Print a table of the cards in a folder. A card is a JSON file about one training step: the model,
the machine, the predicted and measured peak memory and time, and the errors of the prediction.

`lpkit predict --card FILE` writes a card. In Python, so does the method `.card(FILE)` of
`lpkit.predict(...)` and of `lpkit.watch(...)`."""

import argparse
from typing import Any

from lpkit import files, records
from lpkit.commands import a_folder, options
from lpkit.errors import ConfigError, named
from lpkit.predict.cards import line
from lpkit.tables import text_table

HEADS = ("card", "model", "machine", "peak", "measured", "error", "step", "measured", "error")


arguments = options({"folder FOLDER": (a_folder, "folder of the cards")})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the cards of the folder, and a message for each other JSON file. Raises ConfigError if
    there is no card."""
    cards, problems = [], []
    for path in sorted(args.folder.glob("*.json")):
        try:
            card = records.unsealed(files.read_text(path, 1 << 16), path)
            cards.append({**card, "card": path.name, "words": line(card)})
        except ConfigError as error:
            problems.append(str(error))
        except records.UNREADABLE as error:
            problems.append(f"{named(path)} is not a card ({type(error).__name__}: {error})")
    if not cards:
        problems[3:] = [f"{named(args.folder)} holds no card; write one by lpkit predict ... "
                        f"--card {named(args.folder)}/NAME"]
        raise ConfigError("; ".join(problems))
    return {"cards": cards, "problems": problems, "exit_code": int(bool(problems))}


def text(result: dict[str, Any]) -> str:
    rows = [HEADS, *([card["card"], *card["words"]] for card in result["cards"])]
    return "\n".join([text_table(rows, align="<<<>"), *result["problems"]])
