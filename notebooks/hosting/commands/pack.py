"""Write one file that installs lpkit and the course without a network.

  lpkit pack room.tar
  tar xf room.tar && python3 lpkit-offline/install my-venv       on a machine of the same kind

The file holds wheels for this Python and platform. pip downloads the versions in constraints.txt
from the indexes in its configuration. The training text is Python's own library.
"""

import runpy
from argparse import ArgumentParser, Namespace

from lpkit.errors import ConfigError, named
from lpkit.files import PACKAGE, expanded, sha256, whole_file


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT.tar", help="file to write")


def run(args: Namespace) -> dict:
    out, code = expanded(args.out), PACKAGE.parent / "binder" / "offline.py"
    if out.suffix != ".tar" or not out.parent.is_dir():
        raise ConfigError(f"{named(out)} must be NAME.tar in an existing folder")
    if not code.is_file():
        raise ConfigError("lpkit pack runs in a clone of the repository, not in an installed wheel")
    with whole_file(out) as whole:
        manifest = runpy.run_path(str(code))["pack"](PACKAGE.parent, whole)
    return {**manifest, "file": str(out), "bytes": out.stat().st_size, "sha256": sha256(out)}


def text(result: dict) -> str:
    return (f"{named(result['file'])}: {result['bytes'] / 1e6:,.0f} MB, torch {result['torch']}, "
            f"for Python {result['python']} on {result['platform']}\nSHA-256 {result['sha256']}")
