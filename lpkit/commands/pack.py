"""Make one file for a room without a network: wheels, the course, and what installs them.

  lpkit pack room.tar
  tar xf room.tar && python3 lpkit-offline/install my-venv       there, on a machine of the same kind

pip chooses the wheels by constraints.txt, for this Python and platform, from the indexes that it is
set to. The corpus is the library of the Python that is there.
"""

import runpy
from argparse import ArgumentParser, Namespace

from lpkit.errors import ConfigError, named
from lpkit.files import PACKAGE, expanded, sha256, whole_file


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT.tar", help="the file to make")


def run(args: Namespace) -> dict:
    out, code = expanded(args.out), PACKAGE.parent / "binder" / "offline.py"
    if out.suffix != ".tar" or not out.parent.is_dir():
        raise ConfigError(f"{named(out)} is to be NAME.tar in a folder that is there")
    if not code.is_file():
        raise ConfigError("pack needs a clone of the repository, and this is an installed wheel")
    with whole_file(out) as whole:
        manifest = runpy.run_path(str(code))["pack"](PACKAGE.parent, whole)
    return {**manifest, "file": str(out), "bytes": out.stat().st_size, "sha256": sha256(out)}


def text(result: dict) -> str:
    return (f"{named(result['file'])}: {result['bytes'] / 1e6:,.0f} MB, torch {result['torch']}, for "
            f"Python {result['python']} on {result['platform']}\nSHA-256 {result['sha256']}")
