"""Open JupyterLab on your copies of the course: on this machine only, with a fresh token.

Your copies and your results are in your work folder. When the lab opens (or with --update), changes
of the course are copied into your notebooks; a cell that you changed keeps your text.

  lpkit lab                    open the copies in your data directory
  lpkit lab --course DIR       open the copies in DIR: a new, an empty or a work folder
  lpkit lab --reset 03         replace your 03 by the course's; your answers to exercises stay, and
                               your file gets today's date in its name

On a cloud machine, run the printed `ssh` command on your own computer, then open the URL there.
LPKIT_SOLUTIONS sets when exercises show a solution: always, attempted (default) or solved.
When the lab ends, all processes that were started in the lab end, too.
"""

import argparse

from lpkit.commands import a_folder, hosting

lab = hosting("lab")
run, text = lab.run, lab.text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--course", type=a_folder, metavar="DIR", help="work folder (default: "
                        "lpkit/course in your data directory, which is ~/.local/share or "
                        "$XDG_DATA_HOME)")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--update", action="store_true", help="copy changes of the course into your "
                       "notebooks, and do not open the lab")
    alone.add_argument("--reset", metavar="NAME", help="replace your notebook by the course's, "
                       "and do not open the lab")
    parser.add_argument("--port", type=int, default=lab.PORT, help="port (default "
                        f"{lab.PORT}; if {lab.PORT} is taken, the next free port)")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
