"""The pages of docs/ that are made, by name: each is `module:function` and returns its text, or its
files by their place in docs/. `python -m tests.pages NAME ...` writes them."""

from collections.abc import Iterable, Sequence

PAGES = {
    "techniques": "tests.pages.techniques:page",
    "matrix": "tests.pages.matrix:page",
    "attention": "tests.pages.attention:page",
    "claims": "tests.pages.claims:files",
    "gpu": "tests.pages.gpu:page",
    "kernels": "tests.pages.kernels:made",
    "parallel": "tests.pages.parallel:page",
    "recipes": "tests.pages.recipes:files",
    "room": "tests.pages.room:files",
    "reliability": "tests.attack._page:page",
    "teach": "tests.pages.teach:files",
    "tour": "tests.pages.tour:page",
    "your_model_numbers": "tests.bench.your_model:page",
}


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
