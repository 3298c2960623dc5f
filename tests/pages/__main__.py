"""Write the generated pages of docs/: the named pages, or all.

    python -m tests.pages techniques matrix
"""

import argparse
from pathlib import Path
from pkgutil import resolve_name

from tests.pages import PAGES

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pages",
                                     description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PAGES))
    names = parser.parse_args().names or list(PAGES)
    if unknown := set(names) - set(PAGES):
        parser.error(f"there is no page {min(unknown)!r}; choose among {', '.join(PAGES)}")
    for name in names:
        content = resolve_name(PAGES[name])()
        pages = {f"{name}.md": content} if isinstance(content, str) else content
        for place, text in pages.items():
            (DOCS / place).parent.mkdir(exist_ok=True)
            (DOCS / place).write_text(text, encoding="utf-8")
            print(place)


main()
