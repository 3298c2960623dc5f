"""Slides: what becomes one, and a page that needs nothing from elsewhere.

Only these tests catch: a slide that shows code, an answer or a sentence about nothing, a library
that is not the pinned one, and a page that loads from another host.
"""

import hashlib
import json
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from hosting import slides
from lpkit.errors import ConfigError

FIGURE = new_output("display_data",
                    {slides.PLOTLY_MIME: {"data": [], "layout": {"title": {"text": "it's </script> "
                        "<b>"}}}})
GUESS = new_output("execute_result", {slides.WIDGET_MIME: {}, "text/plain": "How much is it?"},
                   execution_count=1)
CLAIM = new_output("display_data", {"text/html": "<b>"},
                   metadata={"lpkit_claim": {"claim": "a < b", "state": "holds", "why": ""}})


def book(*outputs):
    return new_notebook(cells=[
        new_markdown_cell("# Title\n\n![what it shows](pictures/00.svg)\n\nWhat for.\n\n## "
                          "Goal\n\nIt may be false."), new_code_cell("secret = 1"),
        new_markdown_cell("## Run"),
        new_code_cell("code", outputs=list(outputs)),
        new_markdown_cell(f"Short.\n\nLook for:\n\n- one\n\n{'long ' * 100}"),
        new_markdown_cell("<details>\n\nfolded\n\n</details>"),
        new_markdown_cell("## Exercises\n\nnone"), new_code_cell("x", outputs=[FIGURE])])


def test_headings_prose_questions_figures_and_claims_become_slides():
    cells = slides.slides(book(GUESS, FIGURE, CLAIM), "a").cells
    assert [cell.source.split("\n\n", 1)[0] for cell in cells] == ["# Title", "## Goal", "## Run",
        "## Run", "## Run", "## Run"]
    assert [cell.metadata.slideshow.slide_type for cell in cells] == ["slide", "slide", "slide",
        "subslide", "subslide", "subslide"]
    assert "How much is it?" in cells[2].source and "a &lt; b" in cells[4].source
    assert cells[5].source == "## Run\n\nShort.\n\nLook for:\n\n- one"
    text = "".join(cell.source for cell in cells)
    assert not any(word in text for word in ("secret", "folded", "none", "long", "code",
        "pictures"))
    spec = re.search("data-spec='([^']*)'", cells[3].source)[1]
    assert "<" not in spec and json.loads(spec.replace("&lt;", "<").replace("&gt;",
        ">").replace("&quot;", '"').replace("&#x27;", "'"))


def test_a_sentence_that_leads_to_what_stays_away_does_too():
    table = new_output("display_data", {"text/html": "<table>"})
    notebook = new_notebook(cells=[
        new_markdown_cell("# Title\n\nWhat for."), new_markdown_cell("## Run\n\nThis long:"),
        new_code_cell("x", outputs=[table]),
        new_markdown_cell("It takes 0.5 s.\nA table of 2.5 s:"),
        new_code_cell("x", outputs=[table]),
        new_markdown_cell("A figure:"), new_code_cell("no output"),
        new_code_cell("x", outputs=[FIGURE]), new_code_cell("x", outputs=[table])])
    cells = slides.slides(notebook, "a").cells
    assert [cell.source for cell in cells[:3]] == ["# Title\n\nWhat for.",
        "## Run\n\nIt takes 0.5 s.", "## Run\n\nA figure:"]
    # the second opens its section
    assert [cell.metadata.slideshow.slide_type for cell in cells] == ["slide", "slide", "subslide",
        "subslide"]


def test_a_notebook_that_has_not_run_and_a_missing_library_are_sentences(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="a has no figure, so it has not run"):
        slides.slides(book(GUESS), "a")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"slides need .*reveal\.css; run this once.*npm "
                                            r"install --prefix"):
        slides.page(book(FIGURE), "a")


def libraries(tmp_path, monkeypatch, **changed):
    """Small ones in a cache of their own, pinned as they are; `changed` says what a file holds
    instead."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    held = {file: f"/* {file} */ '</script>'" for file in slides.LIBRARIES}
    monkeypatch.setattr(slides, "LIBRARIES",
                        {file: hashlib.sha256(text.encode()).hexdigest()
                         for file, text in held.items()})
    for file, text in held.items():
        path = tmp_path / "lpkit" / "slides" / "node_modules" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(path.stem, text))
    return held


def test_a_library_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    for changed in ("/* 4.6.1 */", ""):
        libraries(tmp_path, monkeypatch, reveal=changed)
        with pytest.raises(ConfigError,
                           match=r"reveal\.css.* does not have the pinned SHA-256.*remove .*npm "
                                 r"install --prefix"):
            slides.page(book(FIGURE), "a")
    libraries(tmp_path, monkeypatch, **{"tex-svg-full": "alert(1)"})       # the last one too
    with pytest.raises(ConfigError, match=r"tex-svg-full\.js.* does not have the pinned SHA-256"):
        slides.page(book(FIGURE), "a")


def test_the_page_holds_its_libraries_and_names_no_other_host(tmp_path, monkeypatch):
    held = libraries(tmp_path, monkeypatch)
    page = slides.page(nbformat.from_dict(book(FIGURE)), "a")
    assert all(f"/* {file} */" in page for file in held)
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page)
    nonces = re.findall(r"<script nonce=\"([\w-]+)\">", page)
    assert (len(set(nonces)) == 1 and len(nonces) == page.count("</script>")
            - page.split("<style>")[1].count("</script>") == 5)
