"""Turn an executed notebook into slides: one HTML file, which needs no network.

  lpkit notebook 06 --tier smoke                    execute notebook 06 into runs/notebooks
  lpkit slides 06 --out slides                      write its headings, questions, figures, claims
"""

from argparse import ArgumentParser

from lpkit.commands import a_folder, hosting
from lpkit.commands.notebook import OUT

slides = hosting("slides")
run, text = slides.run, slides.text


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NAME", help="notebook: 06 or 06_fp8_training")
    parser.add_argument("--executed", type=a_folder, default=OUT, metavar="DIR",
                        help=f"folder of the executed notebook (default {OUT})")
    parser.add_argument("--out", type=a_folder, default=".", metavar="DIR",
                        help="folder for NAME.slides.html (default: the current folder)")
