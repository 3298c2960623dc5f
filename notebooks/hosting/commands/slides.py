"""Turn an executed notebook into slides: one HTML file, which needs no network.

  lpkit notebook 06 --tier smoke                    execute notebook 06 into runs/notebooks
  lpkit slides 06 --out slides                      write its headings, questions, figures, claims
"""

from argparse import ArgumentParser, Namespace
from typing import Any

from hosting import notebooks
from hosting.commands.notebook import OUT
from hosting.slides import page
from lpkit.commands import a_folder, needs
from lpkit.errors import ConfigError, named
from lpkit.files import own_folder, write_atomically


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NAME", help="notebook: 06 or 06_fp8_training")
    parser.add_argument("--executed", type=a_folder, default=OUT, metavar="DIR",
                        help=f"folder of the executed notebook (default {OUT})")
    parser.add_argument("--out", type=a_folder, default=".", metavar="DIR",
                        help="folder for NAME.slides.html (default: the current folder)")


def run(args: Namespace) -> dict[str, Any]:
    needs("lpkit slides", "nbconvert", "nbformat", "plotly")
    name = notebooks.find(args.notebook).stem
    path = args.executed / f"{name}.ipynb"
    if not path.is_file():
        raise ConfigError(f"there is no {named(path)}; run `lpkit notebook {name} --tier smoke "
                          f"--out {args.executed}` first")
    html_text, out = page(notebooks.read(path), name), args.out / f"{name}.slides.html"
    own_folder(args.out)
    write_atomically(out, html_text)
    return {"notebook": name, "out": str(out)}


def text(result: dict[str, Any]) -> str:
    return f"wrote {named(result['out'])}; open it in a browser; arrow keys change slides"
