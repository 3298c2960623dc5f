"""Make slides of a notebook that has run: one HTML file, which needs no network.

  lpkit notebook 06 --tier smoke                    runs it, into runs/notebooks
  lpkit slides 06 --out fp8.html                    its headings, questions, figures and claims
"""

from argparse import ArgumentParser, Namespace

from lpkit.commands import a_folder, needs
from lpkit.commands.notebook import OUT
from lpkit.errors import ConfigError, named


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NAME", help="06, or 06_fp8_training")
    parser.add_argument("--executed", type=a_folder, default=OUT, metavar="DIR",
                        help=f"where `lpkit notebook` wrote it (default {OUT})")
    parser.add_argument("--out", type=a_folder, metavar="FILE", help="default: NAME.slides.html")


def run(args: Namespace) -> dict:
    needs("lpkit slides", "nbconvert", "nbformat", "plotly")
    from lpkit.course import notebooks, slides
    from lpkit.files import write_atomically

    name = notebooks.find(args.notebook).stem
    path = args.executed / f"{name}.ipynb"
    if not path.is_file():
        raise ConfigError(f"{named(path)} is not there; `lpkit notebook {name} --tier smoke --out "
                          f"{args.executed}` makes it")
    out = args.out or a_folder(f"{name}.slides.html")
    write_atomically(out, slides.page(notebooks.read(path), name))
    return {"notebook": name, "out": str(out)}


def text(result: dict) -> str:
    return f"{named(result['out'])}: open it in a browser; arrow keys turn its slides"
