"""Each notebook opens with the picture of its main figure. Only these tests catch a picture that is
missing, too large, or another figure's."""

import html
import importlib.util
import json
import re
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from hosting import notebooks
from lessons.figures import still
from lessons.figures.figure import PLOTLY_MIME, plain
from lpkit.errors import ConfigError
from tests import NOTEBOOKS

HOME = Path(NOTEBOOKS)
module_spec = importlib.util.spec_from_file_location("make_pictures",
    HOME.parent / "docs" / "make_pictures.py")
make_pictures = importlib.util.module_from_spec(module_spec)
module_spec.loader.exec_module(make_pictures)
SHOWN = re.compile(r"# (\d\d) .+\n\n!\[([^\]]+)\]\(pictures/([\w.]+)\)\n\n(?!!)")
BOOKS = [path for path in notebooks.course() if path.name[:2] not in make_pictures.WITHOUT]


def title_of(picture: Path) -> str:
    if picture.suffix == ".png":
        with Image.open(picture) as image:
            return image.text["Title"]
    return html.unescape(re.search(r"<title>(.+?)</title>", picture.read_text(encoding="utf-8"))[1])


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_the_picture_of_its_main_figure(path):
    number = path.name[:2]
    row = make_pictures.MAIN[number]
    first = nbformat.read(path, as_version=4).cells[0]
    shown = SHOWN.match(first.source)
    assert shown and first.cell_type == "markdown", (
        f"run `make pictures`: {path.name} shows no picture under its title")
    assert shown[1] == number and shown[2] == row.alt and len(row.alt) > 40
    picture = HOME / "pictures" / shown[3]
    assert picture.stem == number and 2000 < picture.stat().st_size <= still.MOST
    assert row.words in title_of(picture)
    lesson = "".join(source.read_text(encoding="utf-8")
                     for source in (HOME / "lessons").glob(f"l{number}_*.py"))
    literal = [part for part in re.split(r"\s+", row.words) if part]
    assert all(part in lesson + path.read_text(encoding="utf-8")
               for part in literal), "a title of this lesson"


def test_every_picture_is_shown_and_nothing_else_is_in_the_folder():
    there = {path.name for path in (HOME / "pictures").iterdir()}
    assert there == {SHOWN.match(nbformat.read(path, as_version=4).cells[0].source)[3]
                     for path in BOOKS}


def test_a_picture_is_written_and_shown_once(tmp_path):
    spec = plain({"data": [{"x": [0, 1], "y": [1, 2]}], "layout": {"title": "A run of one hour"}})
    book = {"cells": [{"outputs": [{"data": {}}]},
                      {"outputs": [{"data": {PLOTLY_MIME: {**spec, "config": {}}}}]}]}
    assert make_pictures.spec_of(book, "of one", "05") == spec
    with pytest.raises(ConfigError,
                       match=r"no figure of 05 has 'two hours' in its title; its titles are \['A "
                             r"run of one hour'\]"):
        make_pictures.spec_of(book, "two hours", "05")
    (tmp_path / "05.png").write_bytes(b"of an earlier run")
    picture = make_pictures.write(spec, "05", tmp_path)
    assert ([path.name for path in tmp_path.iterdir()] == ["05.svg"]
            and title_of(picture) == "A run of one hour")
    path = tmp_path / "05_a.ipynb"
    path.write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "id": "a", "metadata": {},
                               "source": ["# 05 A\n", "\n", "*40 minutes*"]}],
                                "metadata": {}, "nbformat": 4, "nbformat_minor": 5},
            indent=1) + "\n")
    for alt in ("one", "one", "another"):
        make_pictures.show(path, picture, alt)
        assert (nbformat.read(path, as_version=4).cells[0].source
                == f"# 05 A\n\n![{alt}](pictures/05.svg)\n\n*40 minutes*")
    assert path.read_text().startswith('{\n "cells"') and path.read_text().endswith("}\n")
