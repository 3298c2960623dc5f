"""Draw the picture of each notebook's main figure, from a real run, into notebooks/pictures: `make pictures`.

    python docs/make_pictures.py              all notebooks: from a current copy in docs/executed, otherwise from a new run
    python docs/make_pictures.py 07 21        only these notebooks
    python docs/make_pictures.py --from DIR   prefer the executed copies in DIR, even if the notebooks have changed

`lessons.figures.still` draws the picture from the figure's spec, as SVG or as PNG, whichever is smaller. This program adds the picture to the
first cell of the notebook, under the title.
"""

import argparse
import base64
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = DOCS.parent / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from hosting import runner  # beside the notebooks  # noqa: E402
from hosting.parameters import INJECTED  # noqa: E402
from lessons.figures import PLOTLY_MIME, still  # noqa: E402
from lpkit.errors import ConfigError  # noqa: E402


class Main(NamedTuple):
    """The main figure of a notebook: the first figure whose title contains `words`. `alt` describes it; `tier` is the size of its run."""

    words: str
    alt: str
    tier: str = "cpu"


MAIN = {
    "00": Main("cpu-3m on", "The loss of a small model falls over the updates of one run on this computer, next to its gradient norm and its tokens a "
                            "second."),
    "01": Main("Live bytes of one step", "The memory of one training step: weights and optimizer state stay, activations grow in the forward pass and "
                                         "shrink in the backward pass, where gradients grow."),
    "02": Main("Roofline of", "A roofline: memory bandwidth bounds operations with few FLOPs per byte, arithmetic bounds the others, and measured "
                              "products are below both."),
    "03": Main("Where the tensors live, and what each format holds without a scale",
               "Histograms of weights, activations and gradients by magnitude, above the range of each number format."),
    "04": Main("What one outlier costs the others: lines by formula, points measured",
               "Signal over noise against the size of one outlier: one scale for a tensor loses most, scales of blocks lose least."),
    "05": Main("Updates that a bf16 weight does not feel", "The share of updates that bf16 weights lose falls as the learning rate grows; measured "
                                                           "points are on the formula's curves."),
    "06": Main("What each recipe costs", "Each FP8 recipe: its loss above that of bf16 over the steps, and the signal over noise of its products.", "smoke"),
    "07": Main("The suspects", "A map of layers and steps in the colour of their signal over noise, and the histogram of one layer's values."),
    "08": Main("What each technique buys, and what it costs", "Bytes saved against time added for each technique that saves memory, as predicted and as "
                                                              "measured."),
    "09": Main(", MFU ", "A plan for 512 GPUs: the bytes of one device by what holds them, and the seconds of one step by operation.", "smoke"),
    "10": Main("What bounds a kernel on", "Custom kernels under the roofline of a GPU: casts are bound by memory, matrix products by arithmetic.", "smoke"),
    "11": Main("What a sum loses: lines by formula, marks as emulated", "The error of a long sum grows with its length in few bits, and stays small where "
                                                                        "partial sums are promoted."),
    "12": Main(" meet keys ", "One step of flash attention: which queries meet which keys, and the running maximum and sum of each row."),
    "13": Main("% of full", "The mask of sliding-window attention: each query meets the keys of its window, a band under the diagonal.", "smoke"),
    "14": Main(": fits with ", "Bytes on each of eight ranks for ZeRO 0 to 3: a higher stage shards optimizer state, then gradients, then weights.", "smoke"),
    "15": Main(": what a rank sends", "Bytes that a rank sends in one update when it gathers weights in 32, 16 and 8 bits.", "smoke"),
    "16": Main("The rank and the step of the ring that compute each pair of chunks",
               "Chunks of queries against chunks of keys in ring attention: the step of each pair, in order and in zig-zag.", "smoke"),
    "17": Main(" ranks, stages of each: ", "A pipeline schedule: forward and backward passes of eight micro-batches on four ranks; a rank waits where the chart is white.",
               "smoke"),
    "18": Main("Loss over bytes: four ranks, 300 updates", "Loss over the bytes that each rank sends, for ten ways to average four ranks and an all-reduce.", "smoke"),
    "19": Main(" look better by at least ", "A histogram of the gains of changes that do nothing: more than a third look better by at least half a percent.",
               "smoke"),
    "20": Main(" tokens an update", "What each optimizer keeps, in bytes a parameter, and what it computes, as a share of forward and backward.", "smoke"),
    "21": Main("Updates to two losses by", "Updates to a loss against the batch size: larger batches need fewer updates, up to the noise scale.", "smoke"),
    "22": Main("Variance of the stream by depth: lines by formula, dots measured",
               "The variance of the residual stream over depth for five blocks; measured dots are on the formula's lines.", "smoke"),
    "23": Main("Share of the tokens that each layer sees, and its mean", "Six schedules that leave out layers or tokens: the share that each layer sees over the "
                                                                  "updates.", "smoke"),
    "24": Main("Learning the manual, and forgetting the code", "Loss on the new text against loss on the old text, before and after training, for all weights "
                                                         "and for LoRA.", "smoke"),
    "25": Main(": loss minus that of bf16", "The loss of a converted model minus that of bf16, by recipe, beside the spread of seeds.", "smoke"),
    "26": Main(" of Muon's directions ", "Singular values of an update: Muon's directions are almost equal, those of AdamW and momentum fall steeply.",
               "smoke"),
    "27": Main("over learning rates", "Loss over learning rates at four widths: the best rate moves with the width, and under muP it stays.", "smoke"),
    "28": Main("The best loss of a search", "The best loss so far over the trials of twenty searches by two samplers.", "smoke"),
    "29": Main("Nats that rounding and pruning add", "Nats that rounding and pruning add to a trained model, by method, a mark for each of five seeds.", "smoke"),
    "30": Main("PEs that multiply, of", "How many of 64 processing elements multiply in each cycle of a product, for three dataflows of a systolic array.", "smoke"),
    "31": Main("Seconds to the same loss, as techniques are added", "Seconds to the same loss as five techniques are added, measured here and predicted for an H100.", "smoke"),
}
WITHOUT = {"99": "its figures are the answers"}


def is_current(path: Path, copy: Path) -> bool:
    """Return whether the executed copy exists and has the notebook's code cells."""
    def code(book: Path) -> list[str]:
        return [cell.source for cell in nbformat.read(book, as_version=4).cells
                if cell.cell_type == "code" and INJECTED not in cell.metadata.get("tags", ())]

    return copy.exists() and code(path) == code(copy)


def spec_of(book: dict, words: str, name: str) -> dict:
    """Return the spec of the first figure whose title contains `words`. Errors: ConfigError, which lists the titles."""
    specs = [{"data": spec["data"], "layout": spec["layout"]} for spec in still.pictures_of(book, PLOTLY_MIME)]
    titles = [(spec["layout"].get("title") or {}).get("text", "") for spec in specs]
    for spec, title in zip(specs, titles):
        if words in title:
            return spec
    raise ConfigError(f"no figure of {name} has {words!r} in its title; its titles are {titles}. Correct the row of docs/make_pictures.py")


def write(spec: dict, number: str, folder: Path) -> Path:
    """Write the picture as NN.svg or NN.png, delete an older picture of the same notebook, and return the path."""
    [(mime, content)] = still.picture(spec).items()
    path = folder / f"{number}.{'svg' if mime == 'image/svg+xml' else 'png'}"
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{number}.*"):
        old.unlink()
    path.write_bytes(content.encode() if path.suffix == ".svg" else base64.b64decode(content))
    return path


def show(path: Path, picture: Path, alt: str) -> None:
    """Add the picture to the first cell of the notebook file, under the title, and replace an older picture."""
    book = nbformat.read(path, as_version=4)
    line = f"![{alt}](pictures/{picture.name})"
    title, _, rest = book.cells[0].source.partition("\n")
    rest = re.sub(r"^\s*!\[[^\]]*\]\(pictures/[^)]*\)\n*", "", rest).lstrip("\n")
    source = f"{title}\n\n{line}\n\n{rest}"
    if source != book.cells[0].source:
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["cells"][0]["source"] = source.splitlines(keepends=True)
        path.write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", metavar="NN")
    parser.add_argument("--from", dest="folders", action="append", type=Path, default=[], metavar="DIR")
    args = parser.parse_args(argv)
    try:
        for path in sorted(NOTEBOOKS.glob("*.ipynb")):
            number = path.name[:2]
            if number in WITHOUT or (args.numbers and number not in args.numbers):
                continue
            row = MAIN[number]
            copy = next((folder / path.name for folder in args.folders if (folder / path.name).exists()), DOCS / "executed" / path.name)
            if copy.parent not in args.folders and not is_current(path, copy):
                [job] = runner.plan(path, tier=row.tier, out=DOCS.parent / "build" / "pictures")
                [record] = runner.run_all([job], say=lambda line: print(line, file=sys.stderr))
                if record["status"] != "done":
                    raise ConfigError(f"{path.name} ended as {record['status']}: {record['error']}")
                copy = job.output
            picture = write(spec_of(json.loads(copy.read_text(encoding="utf-8")), row.words, path.name), number, NOTEBOOKS / "pictures")
            show(path, picture, row.alt)
            print(f"notebooks/pictures/{picture.name}: {picture.stat().st_size:,} bytes, from {copy.parent.name}", flush=True)
    except ConfigError as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
