"""Slides of an executed notebook: its headings, short prose, questions, figures and claims.

nbconvert's SlidesExporter makes slides for reveal.js, with the template `slides.html`. The template
of nbconvert loads reveal.js, MathJax and others from other hosts, but a room may have no network.
Our template includes everything in one file.
"""

import hashlib
import html
import json
import re
import secrets
from importlib.resources import files
from pathlib import Path
from typing import Any

from lessons.claims import cards
from lessons.figures import PLOTLY_MIME, WIDGET_MIME
from lpkit.errors import ConfigError, named
from lpkit.files import cache_dir, read_text

LEFT_OUT = ("## By hand", "## Exercises", "## Further reading")     # sections without slides
PROSE = 420         # most characters of prose per cell, in whole paragraphs
LIBRARIES = {       # file of an npm package -> its SHA-256 in the version that FETCH installs
    "reveal.js/dist/reveal.css":
        "6a829a5979d2b93994b5aaa79585f9dbfe46f4edb9e823027e4612074660d616",
    "reveal.js/dist/reveal.js":
        "73d4b64d59eded6de6a49500e7b709eb8d92c0d1d88d911319ce551c31341e9f",
    "mathjax/es5/tex-svg-full.js":
        "a4354ff94fd868aea0cc6eaaa79a57fda0588646fc46ee3700a349ee0a11cbe6",
}
FETCH = "npm install --prefix {} reveal.js@4.6.0 mathjax@3.2.2"


def page(book: Any, name: str) -> str:
    """Return the HTML of the slides. Raises ConfigError if a library is missing or is not the
    pinned one, or if the notebook has not run."""
    from nbconvert import SlidesExporter

    css, *scripts = _libraries()
    plotly = files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
    scripts = [re.sub("</(?=script)", r"<\\/", text, flags=re.I) for text in (*scripts, plotly)]
    exporter = SlidesExporter(raw_template=read_text(
        Path(__file__).with_name("slides.html"), 1 << 20))
    resources = {"metadata": {"name": name}, "reveal_css": css, "scripts": scripts,
                 "nonce": secrets.token_urlsafe(16)}
    return exporter.from_notebook_node(slides(book, name), resources)[0]


def _libraries() -> list[str]:
    """Return the contents of LIBRARIES. The scripts run in the reader's browser, so each file must
    have the SHA-256 of the file that was reviewed. Raises ConfigError if a file is missing or
    differs."""
    folder = cache_dir("slides")
    paths = {folder / "node_modules" / file: pinned for file, pinned in LIBRARIES.items()}
    fetch = f"run this once with a network connection: `{FETCH.format(folder)}`"
    if lacks := [path for path in paths if not path.is_file()]:
        raise ConfigError(f"slides need {named(lacks[0])}; {fetch}")
    texts = [read_text(path, 1 << 24) for path in paths]
    for text, (path, pinned) in zip(texts, paths.items(), strict=True):
        if hashlib.sha256(text.encode()).hexdigest() != pinned:
            raise ConfigError(f"{named(path)} does not have the pinned SHA-256; remove "
                              f"{named(folder)}, then {fetch}")
    return texts


def slides(book: Any, name: str) -> Any:
    """Return a notebook with one markdown cell for each slide. Each heading begins a new stack."""
    import nbformat

    cells, section, left_out, new, top, figures = [], name, False, True, False, 0
    for cell in book.cells:
        if cell.cell_type == "markdown":
            for part in re.split(r"\n(?=## )", cell.source):
                if part.startswith(("# ", "## ")):
                    title, _, part = part.partition("\n")
                    new, left_out, section = True, title.startswith(LEFT_OUT), title.lstrip("# ")
                    top = title.startswith("# ")
                elif cells and not left_out and part[:1].islower() | part.startswith("$$"):
                    cells[-1].source += f"\n\n{_short(part)}"       # the sentence continues
                    continue
                if (prose := _short(part)) and not left_out:
                    cells.append(_slide(f"{'#' if top else '##'} {section}\n\n{prose}", new))
                    new = top = False
        outputs = () if left_out else cell.get("outputs", ())
        kept = list(filter(None, map(_shown, outputs)))
        # announces an output that is left out
        if outputs and not kept and cells and cells[-1].source.endswith(":"):
            cells[-1].source = _without_last_sentence(cells[-1].source)
            if "\n" not in cells[-1].source:
                new = cells.pop().metadata.slideshow.slide_type == "slide"
        for shown in kept:
            figures += "class='plot'" in shown
            cells.append(_slide(f"## {section}\n\n{shown}", new))
            new = False
    if not figures:
        raise ConfigError(f"{name} has no figure, so it has not run; run it by `lpkit notebook`")
    return nbformat.v4.new_notebook(cells=cells)


def _slide(source: str, new: bool) -> Any:
    import nbformat

    kind = "slide" if new else "subslide"
    return nbformat.v4.new_markdown_cell(source, metadata={"slideshow": {"slide_type": kind}})


def _short(source: str) -> str:
    """Return the first paragraphs of a cell: at least one paragraph, up to PROSE characters, and
    the paragraph after one that ends with a colon or a comma. Folded answers are left out, and so
    are pictures of figures, because figures have their own slides."""
    kept: list[str] = []
    source = re.sub(r"<details>.*?</details>|!\[[^]]*\]\(pictures/[^)]*\)", "", source, flags=re.S)
    for paragraph in source.strip().split("\n\n"):
        if kept and sum(map(len, kept)) + len(paragraph) > PROSE and kept[-1][-1:] not in ":,":
            break
        kept.append(paragraph)
    return "\n\n".join(kept)


def _without_last_sentence(source: str) -> str:
    return source[:[*re.finditer(r"[.?!]\)?\s+|\n\n", source)][-1].end()].rstrip()


def _shown(output: Any) -> str:
    """Return the HTML of an output for a slide: a claim's card, a figure or a question; empty for
    any other output."""
    data = output.get("data", {})
    for claim in cards([output]):
        why = f"<small>{html.escape(claim['why'])}</small>" if claim["why"] else ""
        return (f"<div class='claim {html.escape(claim['state'])}'>{html.escape(claim['claim'])}"
                f"<small>here: {html.escape(claim['state'])}</small>{why}</div>")
    if PLOTLY_MIME in data:
        return f"<div class='plot' data-spec='{html.escape(json.dumps(data[PLOTLY_MIME]))}'></div>"
    if WIDGET_MIME in data and "text/html" not in data and "(" not in data["text/plain"][:20]:
        return f"<div class='question'>{html.escape(data['text/plain'])}</div>"
    return ""
