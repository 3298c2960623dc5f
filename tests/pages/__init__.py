"""The generated pages of docs/, by name. Each `module:function` returns the text of the page, or a
dict from paths below docs/ to texts. `python -m tests.pages NAME ...` writes them."""

from collections.abc import Iterable, Sequence

PAGES = {
    "techniques": "tests.pages.techniques:page",
    "matrix": "tests.pages.matrix:page",
    "attention": "tests.pages.attention:page",
    "claims": "tests.pages.claims:files",
    "gpu": "tests.pages.gpu:page",
    "kernels": "tests.pages.kernels:kernels_page",
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
