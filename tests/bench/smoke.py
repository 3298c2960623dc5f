"""Each recipe for a few tiny steps, eager, all in one process: whether this machine runs it, and
whether it learns what bf16 learns.

    python -m tests.bench.smoke --seconds 50

Prints one object: by recipe the losses before each update on one batch of random tokens, the last
one's distance from bf16's as a share of it, seconds and who multiplied, or the error. Kernels are
the definitions and attention is PyTorch's own, so that nothing is compiled, verified or raced
first. What is not begun after `--seconds` is said to be so. Exit code 1: one has an error, or is
farther from bf16 than its TOLERANCE, some times what they are in emulation.
"""

import argparse
import json
import math
import sys
import time
from typing import Any

import torch

from lpkit.config import Config
from lpkit.hardware import synchronised
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import RandomTokens, Training

BASE = "bf16"
STEPS, TOLERANCE, OF_FOUR_BITS = 8, 0.01, 0.03
TINY = {"model.layers": 2, "model.width": 256, "model.heads": 4, "model.context": 128,
        "model.vocab": 512, "global_batch": 4, "steps": STEPS, "schedule.warmup_steps": 1,
        "optimizer.lr": 1e-3, "system.compile": False, "system.kernels": "reference",
        "system.attention": "sdpa"}
Row = dict[str, Any]


def run(device: str, seconds: float = math.inf) -> dict[str, Any]:
    """`recipes` by name, and `problems`: a sentence for each that is not as it should be."""
    end = time.monotonic() + seconds
    base = Config().replace({**TINY, "system.device": device})
    torch.manual_seed(0)
    data, rows = RandomTokens(base, device), {}
    for name in dict.fromkeys((BASE, *RECIPES)):
        row = _trained(base, name, data) if time.monotonic() < end else {
            "error": f"not begun: {seconds:g} s were over"}
        if "error" not in row and "error" not in rows.get(BASE, row):
            row["distance"] = abs(row["losses"][-1] / rows.get(BASE, row)["losses"][-1] - 1)
        rows[name] = row | {"tolerance": OF_FOUR_BITS if RECIPES[name].dtype == "fp4"
                            else TOLERANCE}
    problems = [f"{name}: {row['error']}" for name, row in rows.items() if "error" in row]
    problems += [f"{name}: after {STEPS - 1} updates its loss is {row['distance']:.1%} from "
                 f"{BASE}'s"
                 for name, row in rows.items() if row.get("distance", 0) > row["tolerance"]]
    return {"device": device, "steps": STEPS, "recipes": rows, "problems": problems}


def _trained(base: Config, name: str, data: RandomTokens) -> Row:
    """An error is a row, whatever a library raises."""
    begun, losses = time.monotonic(), []
    try:
        training = Training.build(base.replace({"precision.recipe": name}), data=data)
        for step in range(STEPS):
            losses.append(training.update(step).loss.item())
            if not math.isfinite(losses[-1]):
                raise ArithmeticError(f"its loss before update {step + 1} is {losses.pop()}")
        synchronised(lambda: None, training.device)()       # the last update, too
        by = training.decisions.choices["backend"].used
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "losses": losses,
                "seconds": time.monotonic() - begun}
    return {"losses": losses, "seconds": time.monotonic() - begun, "backend": by}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=math.inf)
    seconds = parser.parse_args(argv).seconds
    result = run("cuda" if torch.cuda.is_available() else "cpu", seconds)
    print(json.dumps(result))
    print("\n".join(result["problems"]), file=sys.stderr)
    return bool(result["problems"])


if __name__ == "__main__":
    sys.exit(main())
