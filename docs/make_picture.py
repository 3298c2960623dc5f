"""Draw the picture of docs/first_run.md: the losses of a run over its steps, and the entropy of the bytes' frequencies.

    python docs/make_picture.py runs/NAME   save the numbers of this run in docs/first_run.json and draw docs/first_run.svg
    python docs/make_picture.py             draw the picture again from docs/first_run.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lpkit.errors import ConfigError

DOCS = Path(__file__).resolve().parent
NUMBERS, PICTURE = DOCS / "first_run.json", DOCS / "first_run.svg"


def collect(folder: Path) -> dict[str, Any]:
    """Return the numbers of the picture and their origin: config, environment, corpus. Losses are in nats per token."""
    from lpkit.datasets import byte_unigram_entropy, prepare
    from lpkit.training.runs import Run

    run = Run.open(folder)
    metrics = run.metrics
    files = prepare(run.config.data, vocab=run.config.model.vocab)
    summary = {key: run.summary[key] for key in ("steps", "tokens", "final_loss", "val_loss", "tokens_per_second")}
    return {
        "config": run.config.to_dict(),
        "environment": {key: run.environment[key] for key in ("date", "lpkit", "python", "torch", "device", "threads")},
        "source": files.header["source"], "unigram_entropy": byte_unigram_entropy(files), "summary": summary,
        "loss": [[line["step"], round(line["loss"], 4)] for line in metrics],
        "val_loss": [[line["step"], round(line["val_loss"], 4)] for line in metrics if "val_loss" in line],
    }


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Write the picture as SVG; equal numbers give equal bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "lpkit", "font.size": 9, "axes.spines.top": False,
                                "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
        axes.plot(*zip(*numbers["loss"]), color="#9ab8d9", linewidth=1, label="training loss, each step")
        axes.plot(*zip(*numbers["val_loss"]), "o-", color="#0b3d78", linewidth=1.5, markersize=4,
                  label=f"validation loss, at last {numbers['val_loss'][-1][1]:.2f}")
        axes.axhline(numbers["unigram_entropy"], color="#b45309", linestyle="--", linewidth=1.2,
                     label=f"byte-unigram entropy of the corpus, {numbers['unigram_entropy']:.2f}")
        axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, None), xlim=(0, None))
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN")
    args = parser.parse_args(argv)
    if args.run:
        try:
            numbers = collect(args.run)
        except ConfigError as error:
            print(f"docs: {error}", file=sys.stderr)
            return 2
        NUMBERS.write_text(json.dumps(numbers) + "\n")
    draw(json.loads(NUMBERS.read_text()), PICTURE)
    print(PICTURE.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
