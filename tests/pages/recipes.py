"""The pages docs/recipes/NAME.md with their pictures NAME.svg, and the table of docs/recipes.md.

    python -m tests.pages recipes

Rows come from lpkit.techniques.recipes.RECIPES, hardware from tests.pages.matrix, losses from
data/measured, sentences from docs/recipes.toml. tests/project/test_docs.py holds the files to what
this writes.

The picture: what each recipe makes of the same 16 x 256 Gaussian numbers with one outlier, by the
recipe's own cast of x in y = x w^T. The numbers are drawn with the standard library and rounded to
two decimals, and all coordinates are whole pixels or tenths, so that the files are the same bytes
on every machine.
"""

import json
import math
import random
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor

from lessons.figures.style import COLOURS, FONT
from lpkit.precision.backends import BACKENDS
from lpkit.precision.compute import compute_dtype
from lpkit.precision.scaled import quantise, spread
from lpkit.tables import FAINT, INK
from lpkit.techniques.formats import FORMATS, format_of
from lpkit.techniques.machines import CATALOGUE
from lpkit.techniques.recipes import PRODUCTS, RECIPES, Cast, Recipe
from tests.pages import markdown_table, matrix

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEASURED = DOCS.parent / "data" / "measured"
WORDS = tomllib.loads((DOCS / "recipes.toml").read_text(encoding="utf-8"))
# outliers: up to 1e5 times the rest, https://arxiv.org/abs/2402.17762
SHAPE, OUTLIER, AT = (16, 256), 60_000.0, (5, 100)
GRADIENT = 2.0**-22     # root mean square of the gradients on the page of fp16

# ---- what is drawn


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A tensor and what a cast makes of it."""

    title: str
    x: Tensor           # (16, 256) float32
    y: Tensor           # the same after the cast
    # (R, C): scale times largest value of each block; None: nothing is scaled
    tops: Tensor | None
    largest: float      # of the format, for `tops` of None


@cache
def gaussian() -> Tensor:
    """N(0, 1), the same on every machine."""
    rng = random.Random(0)
    return torch.tensor([round(NormalDist().inv_cdf(rng.random()), 2)
                         for _ in range(math.prod(SHAPE))]).view(SHAPE)


def with_outlier() -> Tensor:
    x = gaussian().clone()
    x[AT] = OUTLIER
    return x


def cast_panel(title: str, x: Tensor, cast: Cast, amax: Tensor | None = None) -> Panel:
    quantised, largest = quantise(x, cast, amax=amax), format_of(cast.format).largest
    tensor_scale = 1 if quantised.tensor is None else quantised.tensor
    return Panel(title=title, x=x, y=quantised.dequantise(), largest=largest,
                 tops=quantised.scale * largest * tensor_scale)


def plain_panel(title: str, x: Tensor, recipe: Recipe, factor: float = 1.0) -> Panel:
    y = x if recipe.compute is None else (x * factor).to(compute_dtype(recipe)).float() / factor
    return Panel(title=title, x=x, y=y, tops=None, largest=FORMATS[recipe.dtype].largest)


def _panels_fp16(recipe: Recipe) -> list[Panel]:
    scale, g = recipe.loss_scaling.loss_scale, gaussian() * GRADIENT
    return [plain_panel("x of y = x w^T", with_outlier(), recipe),
            plain_panel(f"gradients of about 2^{math.log2(GRADIENT):.0f}, as they are", g, recipe),
            plain_panel(f"the same gradients, with a loss scale of {scale:,.0f}", g, recipe, scale)]


def _panels_delayed(recipe: Recipe) -> list[Panel]:
    cast, before, now = recipe.y[0], gaussian(), with_outlier()
    return [cast_panel("x of y = x w^T, with a history from before the outlier", now, cast,
                       before.abs().amax()),
            cast_panel("x without the outlier, one micro-batch later, with the outlier in the "
                       "history", before, cast, now.abs().amax())]


@cache
def panels(name: str) -> list[Panel]:
    recipe = RECIPES[name]
    if recipe.loss_scaling:
        return _panels_fp16(recipe)
    if recipe.delayed:
        return _panels_delayed(recipe)
    return [cast_panel("x of y = x w^T", with_outlier(), recipe.y[0]) if recipe.y else
            plain_panel("x of y = x w^T", with_outlier(), recipe)]


def noise_db(panel: Panel, rows: slice = slice(None)) -> float:
    """Return the signal-to-noise ratio of these rows without the outlier, in dB; inf if all of
    these elements are exact."""
    others = panel.x.abs() < OUTLIER
    x, error = panel.x.double() * others, (panel.y - panel.x).double() * others
    signal, noise = (t[rows].square().sum().item() for t in (x, error))
    return 10 * math.log10(signal / noise) if noise else math.inf


# ---- SVG: the lighter, the less is lost; a grey printer keeps the order

LIGHT = "#a5d8f0"       # of an area; a line would not be seen
KINDS = (("under 7% off", "#f3f6f9"), ("to 25%", LIGHT), ("over 25%", COLOURS[2]),
         ("saturates", COLOURS[0]),
         ("becomes 0", "#111111"))
RAMP = ("#f3f6f9", LIGHT, "#4f81b5", COLOURS[0])      # of tops, from 2^0 to 2^RANGE
RANGE = 16
CELL, BLOCK_HIGH, CELL_HIGH, LEFT = 2, 4, 8, 12     # pixels
# where bars begin, how long the longest is and what it means
BARS, BAR_WIDE, DB = 556, 180, 80.0
WIDTH = BARS + BAR_WIDE + 24


def kinds(panel: Panel) -> Tensor:
    """(16, 256) of places in KINDS."""
    x, y = panel.x, panel.y
    off = (y - x).abs() / x.abs().clamp(min=torch.finfo(torch.float32).tiny)
    low = (off > 0.07).int() + (off > 0.25).int()
    top = torch.full_like(x, panel.largest) if panel.tops is None else spread(panel.tops, x.shape)
    low[(x.abs() > top * 1.01)] = 3
    low[(y == 0) & (x != 0)] = 4
    return low


def shade(top: float) -> str:
    """Of RAMP, by log2."""
    at = min(max(math.log2(top) / RANGE, 0), 1) * (len(RAMP) - 1)
    i = min(int(at), len(RAMP) - 2)
    first, second = (tuple(int(colour[k:k + 2], 16) for k in (1, 3, 5)) for colour in RAMP[i:i + 2])
    return "#" + "".join(f"{round(a + (b - a) * (at - i)):02x}" for a, b in zip(first, second))


def text(x: float, y: float, words: str, *, size: int = 12, colour: str = INK,
         anchor: str = "start", weight: int = 400) -> str:
    return (f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
            f'font-weight="{weight}">'
            f"{escape(words)}</text>")


def rect(x: float, y: float, wide: float, high: float, fill: str, stroke: str = "none") -> str:
    return (f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{fill}" '
            f'stroke="{stroke}"/>')


def draw_blocks(panel: Panel, y: int) -> list[str]:
    """Each block by the magnitude that its scale makes room for."""
    rows, columns = SHAPE
    wide, high = columns * CELL, rows * BLOCK_HIGH
    if panel.tops is None:
        reach = f"{panel.largest:,.0f}" if panel.largest < 1e6 else f"{panel.largest:.3g}"
        words = f"no scale: the format itself reaches {reach}"
        return [rect(LEFT, y, wide, high, "#ffffff", FAINT),
                text(LEFT + wide / 2, y + high / 2 + 4, words, anchor="middle")]
    R, C = panel.tops.shape
    gap_x, gap_y = int(C > 1), int(R > 1)
    return [rect(LEFT + c * wide // C, y + r * high // R, wide // C - gap_x, high // R - gap_y,
                 shade(panel.tops[r, c].item())) for r in range(R) for c in range(C)]


def draw_elements(panel: Panel, y: int) -> list[str]:
    """Each element by what becomes of it: a path for each kind, of runs along the rows."""
    grades = kinds(panel).tolist()
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(grades):
        column = 0
        for kind, run in groupby(line):
            wide = len(list(run)) * CELL
            if kind:
                paths.setdefault(kind, []).append(
                    f"M{LEFT + column},{y + row * CELL_HIGH}h{wide}v{CELL_HIGH}h-{wide}z")
            column += wide
    parts = [rect(LEFT, y, SHAPE[1] * CELL, SHAPE[0] * CELL_HIGH, KINDS[0][1])]
    return parts + [f'<path fill="{KINDS[kind][1]}" d="{"".join(paths[kind])}"/>'
                    for kind in sorted(paths)]


def draw_outlier(panel: Panel, y: int) -> list[str]:
    """A ring around it, and the frame of its block."""
    if panel.x[AT] != OUTLIER:
        return []
    parts = []
    if panel.tops is not None:
        R, C = panel.tops.shape
        high, wide = SHAPE[0] // R, SHAPE[1] // C
        parts.append(f'<rect x="{LEFT + AT[1] // wide * wide * CELL - 0.5:g}" '
                    f'y="{y + AT[0] // high * high * CELL_HIGH - 0.5:g}" '
                    f'width="{wide * CELL + 1}" height="{high * CELL_HIGH + 1}" fill="none" '
                    f'stroke="{INK}" stroke-width="1.5"/>')
    at = (f'cx="{LEFT + AT[1] * CELL + CELL / 2:g}" cy="{y + AT[0] * CELL_HIGH + CELL_HIGH / 2:g}" '
          f'fill="none"')
    return [*parts, f'<circle {at} r="8" stroke="#ffffff" stroke-width="4"/>',
            f'<circle {at} r="8" stroke="{INK}" stroke-width="2"/>']


def draw_bars(panel: Panel, y: int) -> list[str]:
    """Signal over noise, row by row."""
    high = SHAPE[0] * CELL_HIGH
    parts = []
    for db in range(0, int(DB) + 1, 20):
        x = BARS + db / DB * BAR_WIDE
        parts += [f'<path d="M{x:g},{y}v{high + 4}" stroke="#d1d5db"/>',
                  text(x, y + high + 16, f"{db}", size=11, colour=FAINT, anchor="middle")]
    for row in range(SHAPE[0]):
        db = noise_db(panel, slice(row, row + 1))
        long = round(min(max(db, 0), DB) / DB * BAR_WIDE, 1)
        parts.append(rect(BARS, y + row * CELL_HIGH + 1, max(long, 1), CELL_HIGH - 2, COLOURS[0]))
    return parts


def draw_panel(panel: Panel, y: int) -> tuple[list[str], int]:
    """Parts, and where the next one begins."""
    middle, db = y + 42, noise_db(panel)
    verdict = ("exact" if math.isinf(db) else f"{db:.1f} dB"
               + (" for the others" if panel.x[AT] == OUTLIER else ""))
    what = "what the scale of each block makes room for" if panel.tops is not None else "range"
    parts = [text(LEFT, y + 14, panel.title, size=14, weight=600),
             text(BARS, y + 14, verdict, size=14, weight=600),
             text(LEFT, y + 35, what, colour=FAINT), *draw_blocks(panel, middle)]
    if panel.tops is not None:
        parts.append(text(BARS, middle + 10, "room up to", size=11, colour=FAINT))
        for i in range(RANGE + 1):
            parts.append(rect(BARS + i * 10, middle + 16, 10, 12, shade(2.0**i)))
        parts += [text(BARS + k * 10 + 5, middle + 42, f"{2**k:,}", size=11, colour=FAINT,
                       anchor="middle") for k in (0, 8, 16)]
    below = middle + SHAPE[0] * BLOCK_HIGH + 24
    parts += [text(LEFT, below - 7, "what becomes of each element", colour=FAINT),
              text(BARS, below - 7, "signal over noise of each row, dB", colour=FAINT, size=11)]
    parts += [*draw_elements(panel, below), *draw_outlier(panel, below), *draw_bars(panel, below)]
    legend, x = below + SHAPE[0] * CELL_HIGH + 22, LEFT
    shares = (torch.bincount(kinds(panel).flatten(), minlength=len(KINDS)).double()
              / math.prod(SHAPE))
    for (words, colour), share in zip(KINDS, shares.tolist()):
        label = f"{words}: {share:.{1 if share > 5e-4 else 2}%}" if share else words
        parts += [rect(x + 0.5, legend + 0.5, 11, 11, colour, FAINT),
                  text(x + 16, legend + 10, label, size=11)]
        x += 30 + 6 * len(label)
    return parts, legend + 34


def picture(name: str) -> str:
    """The SVG of one page."""
    parts, y = [], 8
    for panel in panels(name):
        more, y = draw_panel(panel, y)
        parts += more
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 8}" '
            f'width="{WIDTH}" height="{y - 8}" '
            f'role="img" font-family="{escape(FONT)}" '
            f'shape-rendering="crispEdges">\n<title>{escape(caption(name))}</title>\n'
            + "\n".join([rect(0, 0, WIDTH, y - 8, "#ffffff"), *parts]) + "\n</svg>\n")


# ---- Markdown

def caption(name: str) -> str:
    """Return the sentences that describe each panel of a recipe's picture."""
    return " ".join(_caption(panel, first=not i) for i, panel in enumerate(panels(name)))


def _caption(panel: Panel, *, first: bool) -> str:
    db, zeros = noise_db(panel), (kinds(panel) == 4).double().mean().item()
    has_outlier = bool(panel.x[AT] == OUTLIER)
    scales = ("" if panel.tops is None else f", cast with {panel.tops.numel()} "
                                            f"scale{'s' * (panel.tops.numel() > 1)}")
    what = (f" ({SHAPE[0]} x {SHAPE[1]} Gaussian numbers with one outlier of {OUTLIER:,.0f} "
            f"standard deviations)" if first else "")
    sentences = [f"The {'picture' if first else 'next part'} shows {panel.title}{what}{scales}.",
                 "All elements are exact." if math.isinf(db) else
                 f"{'Without the outlier, the' if has_outlier else 'The'} signal-to-noise ratio is "
                 f"{db:.1f} dB."]
    if zeros:
        sentences.append(f"{zeros:.1%} of the elements become zero.")
    if has_outlier:
        sentences.append(f"The outlier becomes {panel.y[AT].item():,.5g}.")
    return " ".join(sentences)


def sides(cast: Cast) -> str:
    return f"({', '.join(str(side or 'all') for side in cast.block)})"


OPERANDS = {"y": ("x", "w"), "dx": ("g", "w^T"), "dw": ("g^T", "x^T")}


def row(recipe: Recipe) -> str:
    """The six casts."""
    return markdown_table(("matmul", "operand", "format", "block", "scale", "rounding",
                           "transform"), [
        (f"`{product}`", f"`{operand}`", cast.format, sides(cast), cast.scale, cast.rounding,
         cast.transform)
        for product, casts in recipe.products.items() for operand, cast in zip(OPERANDS[product],
            casts)])


def facts(recipe: Recipe) -> str:
    """What else the row says."""
    dtype = recipe.compute or "float32"
    if recipe.compute:
        parts = [f"{'Autocast runs all other' if recipe.products else 'No casts: autocast runs'} "
                 f"matmuls in {dtype}. The weights are stored in float32."]
    else:
        parts = [f"All other operations run in {dtype}." if recipe.products else
                 f"No casts: matmuls run in {dtype}."]
    if recipe.high_precision_layers:
        parts.append(f"Layers in 16 bits: {', '.join(recipe.high_precision_layers)}.")
    if recipe.delayed:
        parts.append(f"The scale is computed from the {recipe.delayed.history_rule} of "
                     f"{recipe.delayed.history} earlier amaxes, "
                     f"with a margin of {recipe.delayed.margin}.")
    if recipe.loss_scaling:
        parts.append(f"The loss scale starts at {recipe.loss_scaling.loss_scale:,.0f}; "
                     f"{recipe.loss_scaling.growth_steps} "
                     f"updates without an overflow double it.")
    return " ".join(parts)


def hardware(name: str) -> list[str]:
    """Who multiplies it, by the rules of the matrix."""
    lines = []
    for backend in BACKENDS:
        native = [machine for machine in matrix.CAPABILITY for cell in matrix.by_rule(machine)
                  if (cell.recipe, cell.backend, cell.status) == (name, backend, "native")]
        rest = [machine for machine in matrix.CAPABILITY if machine not in native]
        if native:
            titles = [CATALOGUE[machine].title if machine in CATALOGUE else "any CPU"
                      for machine in native]
            other = [CATALOGUE[machine].title for machine in rest if machine in CATALOGUE]
            most = (f"every machine of the "
                    f"catalogue{', but ' + ', '.join(other) if other else ''}, and CPUs")
            lines.append(f"- `{backend}`: {most if len(rest) < 3 else '; '.join(titles)}.")
    return [*lines, "", "On other hardware, wider matmuls emulate its numbers: see [what runs "
                        "where](../matrix.md)."]


def settings(name: str) -> list[tuple[str, str, str]]:
    """Those that this recipe has, with their defaults."""
    rows = []
    for key, words in WORDS["settings"].items():
        value = getattr(RECIPES[name].settings, key, None)
        if value is not None:
            rows.append((f"`{key}`", _said(value), words))
    return rows


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def measured(name: str, folder: Path = MEASURED) -> list[str]:
    """What `lpkit bench recipe-losses` recorded of this recipe; nothing where it has not."""
    lines = []
    for path in sorted(folder.glob("recipe-losses-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        where = (f"{record['device']}, torch {record['versions']['torch']}, commit "
                 f"{record['commit']}, {record['date'][:10]}; "
                 f"`data/measured/{path.name}`")
        cases = [case for case in record["cases"] if case["case"] == name]
        if any(case["peer"] == name for case in record["cases"]):
            losses = record["losses"][name]
            lines.append(f"- {', '.join(f'{loss:.4f}' for loss in losses)} nats per token with "
                         f"{len(losses)} seeds, the baseline "
                         f"of the other recipes ({where}).")
        for case in cases:
            low, high = case["quartiles"]
            lines.append(f"- {case['ratio']:.4f} times the loss of {case['peer']} (quartiles "
                         f"{low:.4f} to {high:.4f} over "
                         f"{case['rounds']} seeds; {case['verdict']}; {where}).")
    if not lines:
        return []
    return ["", "## Loss, measured", "",
            f"Validation loss of `cpu-3m` after {record['steps']} steps, on the same batches as "
            f"{record['peer']}. From `lpkit bench recipe-losses`:", "", *lines]


def page(name: str, folder: Path = MEASURED) -> str:
    """docs/recipes/NAME.md."""
    recipe, words = RECIPES[name], WORDS[name]
    setting_rows = settings(name)
    return "\n".join([
        f"# {name}", "", f"{words['wins'][0].upper()}{words['wins'][1:]}. [All "
                         f"recipes](../recipes.md).", "",
        words["text"].strip(), "", "## Row", "", *([row(recipe), ""] if recipe.products else []),
        facts(recipe), "",
        "## Picture", "", f"![What {name} makes of 16 x 256 numbers]({name}.svg)", "",
        caption(name), "",
        "## Train with it", "", f"    lpkit train cpu-3m --set precision.recipe={name}", "",
        *([markdown_table(("`precision.recipe.`", "default", "meaning"), setting_rows), ""]
          if setting_rows else ["It has no settings.", ""]),
        "## Hardware", "", *hardware(name), *measured(name, folder), "",
        "## Sources", "", *(f"- [{title}]({url})" for title, url in words["sources"]), ""])


def index_table() -> str:
    """The rows of docs/recipes.md."""
    rows = []
    for name, recipe in RECIPES.items():
        link, wins = f"[`{name}`](recipes/{name}.md)", WORDS[name]["wins"]
        db = noise_db(panels(name)[0])
        shown = "exact" if math.isinf(db) else f"{db:.0f}"
        if not recipe.products:
            rows.append((link, recipe.dtype, recipe.dtype, "",
                         "of the loss" if recipe.loss_scaling else "", shown, wins))
            continue
        casts = {operand: cast for product, pair in reversed(recipe.products.items())
                 for operand, cast in zip(PRODUCTS[product], pair)}
        x, w, g = (casts[operand] for operand in "xwg")
        rows.append((link, x.format, g.format,
                     sides(x) + (f", w {sides(w)}" if w.block != x.block else ""),
                     f"{x.scale}{', of earlier amaxes' if recipe.delayed else ''}", shown, wins))
    return markdown_table(("recipe", "x and w", "g", "block", "scale", "dB", "where it wins"), rows)


def index(text: str) -> str:
    """docs/recipes.md with its table made anew."""
    return re.sub(r"(?m)^\| recipe \|.*\n(\|.*\n)+", lambda _: index_table() + "\n", text, count=1)


def files(folder: Path = MEASURED) -> dict[str, str]:
    """Everything that this writes, by its place in docs/."""
    pages = {"recipes.md": index((DOCS / "recipes.md").read_text(encoding="utf-8"))}
    for name in RECIPES:
        pages |= {f"recipes/{name}.md": page(name, folder), f"recipes/{name}.svg": picture(name)}
    return pages
