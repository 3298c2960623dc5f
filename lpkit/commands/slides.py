"""Make slides of a notebook that has run: one HTML file, which needs no network.

  lpkit notebook 06 --tier smoke                    runs it, into runs/notebooks
  lpkit slides 06 --out slides                      its headings, questions, figures and claims
"""

from argparse import ArgumentParser, Namespace

from lpkit.commands import a_folder, lesson, needs
from lpkit.commands.notebook import OUT
from lpkit.errors import ConfigError, named


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NAME", help="06, or 06_fp8_training")
    parser.add_argument("--executed", type=a_folder, default=OUT, metavar="DIR",
                        help=f"where `lpkit notebook` wrote it (default {OUT})")
    parser.add_argument("--out", type=a_folder, default=".", metavar="DIR",
                        help="for NAME.slides.html (default: here)")


def run(args: Namespace) -> dict:
    needs("lpkit slides", "nbconvert", "nbformat", "plotly")
    from lpkit.course import notebooks
    from lpkit.files import own_folder, write_atomically

    name = notebooks.find(args.notebook).stem
    path = args.executed / f"{name}.ipynb"
    if not path.is_file():
        raise ConfigError(f"{named(path)} is not there; `lpkit notebook {name} --tier smoke --out "
                          f"{args.executed}` makes it")
    page, out = lesson("slides").page(notebooks.read(path), name), args.out / f"{name}.slides.html"
    own_folder(args.out)
    write_atomically(out, page)
    return {"notebook": name, "out": str(out)}


def text(result: dict) -> str:
    return f"{named(result['out'])}: open it in a browser; arrow keys turn its slides"
