"""Make one file for a room without a network: wheels, the course and what installs them.

  lpkit pack room.tar
  tar xf room.tar && python3 lpkit-offline/install my-venv        there, on the same kind of machine

pip chooses the wheels, by constraints.txt, for this Python and this platform. On Linux the usual
torch brings CUDA, 3 GB; with PyTorch's index of CPU builds as pip's extra index
(PIP_EXTRA_INDEX_URL) pip takes its `+cpu` instead. The corpus is python-stdlib, the library of the
Python that is there; other text goes along as files. Each file has its SHA-256 in a manifest, which
`install` checks first.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from time import perf_counter

from lpkit import __version__
from lpkit.commands import needs
from lpkit.errors import ConfigError, in_one_line, named
from lpkit.files import PACKAGE, expanded, sha256, whole_file

EXTRAS = "kernels,sweep"        # beside what every part of the kit needs: what notebooks use
ROOM = "lpkit-offline"          # the folder that the file unpacks to
SOURCE = ("lpkit", "notebooks", "data", "pyproject.toml", "setup.py", "README.md")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT.tar", help="the file to make")


def run(args: Namespace) -> dict:
    out, begun, root = expanded(args.out), perf_counter(), PACKAGE.parent
    if out.suffix != ".tar" or not out.parent.is_dir():
        raise ConfigError(f"{named(out)} is to be a file NAME.tar in a folder that is there; choose "
                          f"another path")
    if not (root / "constraints.txt").is_file():
        raise ConfigError("pack needs a checkout of lpkit, whose constraints.txt has the versions, and "
                          "this one is installed; run it from a checkout")
    needs("pack", "pip")
    with (whole_file(out) as whole,
          tempfile.TemporaryDirectory(dir=out.parent, prefix=".lpkit-pack-") as folder):
        room = Path(folder, ROOM)
        _wheels(root, Path(folder, "source"), room)
        shutil.copyfile(root / "binder" / "offline.py", room / "install")
        files = {path.relative_to(room).as_posix(): sha256(path)
                 for path in sorted(room.rglob("*")) if path.is_file()}
        torch = next((name.split("-")[1] for name in sorted(files) if "/torch-" in name), None)
        manifest = {"format": ROOM, "lpkit": __version__, "extras": EXTRAS, "torch": torch,
                    "python": sysconfig.get_python_version(), "platform": sysconfig.get_platform(),
                    "files": files}
        (room / "manifest.json").write_text(json.dumps(manifest, indent=1))
        with tarfile.open(whole, "w") as tar:
            tar.add(room, ROOM, filter=lambda file: file.replace(uid=0, gid=0, uname="", gname="",
                    mode=0o755 if file.isdir() else 0o644, deep=False))
    return {"file": str(out), "bytes": out.stat().st_size, "sha256": sha256(out), "files": len(files),
            "torch": torch, "python": manifest["python"], "platform": manifest["platform"],
            "seconds": perf_counter() - begun}


def _wheels(root: Path, source: Path, room: Path) -> None:
    """Builds in a copy: setuptools leaves its own files beside what it builds. Raises ConfigError."""
    for name in SOURCE:
        if (root / name).is_dir():
            shutil.copytree(root / name, source / name,
                            ignore=shutil.ignore_patterns("__pycache__", ".*", "runs"))
        else:
            shutil.copyfile(root / name, source / name)
    room.mkdir()
    shutil.copyfile(root / "constraints.txt", room / "constraints.txt")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-input", "--quiet",
         "--wheel-dir", room / "wheels", "-c", root / "constraints.txt", f"{source}[{EXTRAS}]"],
        stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ConfigError(f"pip could not bring the wheels ({in_one_line(' '.join(said[-1:]))[:300]}); "
                          f"go online, or see `{sys.executable} -m pip config list`")


def text(result: dict) -> str:
    return (f"{named(result['file'])}: {result['bytes'] / 1e6:,.0f} MB, {result['files']} files, torch "
            f"{result['torch']}, for Python {result['python']} on {result['platform']}, in "
            f"{result['seconds']:.0f} s\nSHA-256 {result['sha256']}\nThere: tar xf "
            f"{named(Path(result['file']).name)} && python3 {ROOM}/install my-venv")
