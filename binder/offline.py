#!/usr/bin/env python3
"""lpkit where there is no network. `lpkit pack OUT.tar` calls `pack`, and OUT.tar holds this file as `install`:

  tar xf OUT.tar && python3 lpkit-offline/install [VENV]      a new environment, ./lpkit-venv by default

Nothing is installed before every file has the SHA-256 that the manifest says: that finds damage. Who could have changed
the manifest, too, is found by the SHA-256 of OUT.tar, which `lpkit pack` prints. Standard library alone.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
MANIFEST = "manifest.json"
EXTRAS = "kernels,sweep"        # what notebooks need beside the kit's own
SOURCE = ("constraints.txt", "pyproject.toml", "setup.py", "README.md", "LICENSE", "lpkit", "notebooks", "data")
KIND = {"python": sysconfig.get_python_version(), "platform": sysconfig.get_platform()}


def sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack(root, out):
    """Writes the file from a checkout, and returns the manifest. Raises ConfigError with what pip said."""
    import tarfile
    import tempfile

    from lpkit.errors import ConfigError, in_one_line

    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".lpkit-pack-") as folder:
        source, room = Path(folder, "source"), Path(folder, "lpkit-offline")
        # a copy, since setuptools leaves files where it builds
        shutil.copytree(root, source, ignore=lambda where, names: {
            name for name in names if name.startswith(".") or name == "__pycache__" or (Path(where) == root and name not in SOURCE)})
        done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-input", "--wheel-dir", room / "wheels", "-c", source / "constraints.txt",
                               f"{source}[{EXTRAS}]"], stdout=2, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            raise ConfigError(f"pip could not bring the wheels ({in_one_line(' '.join(said[-1:]))[:300]}); go online, or see `pip config list`")
        shutil.copyfile(source / "constraints.txt", room / "constraints.txt")
        shutil.copyfile(__file__, room / "install")
        files = {path.relative_to(room).as_posix(): sha256(path) for path in sorted(room.rglob("*")) if path.is_file()}
        versions = dict(name.removeprefix("wheels/").split("-")[:2] for name in files if name.endswith(".whl"))
        manifest = {"lpkit": versions["low_precision_kit"], "torch": versions["torch"], "extras": EXTRAS, **KIND, "files": files}
        (room / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        with tarfile.open(out, "w") as tar:
            tar.add(room, room.name, filter=lambda file: file.replace(uid=0, gid=0, uname="", gname="", deep=False))
        return manifest


def refuse(sentence):
    sys.exit(f"install: {sentence}")


def checked():
    """The manifest, when all files are as it says, and there are no others."""
    again = "unpack the file again, or copy it again"
    try:
        manifest = json.loads((HERE / MANIFEST).read_text(encoding="utf-8"))
        listed = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        refuse(f"{MANIFEST} is damaged or not there; {again}")
    there = {path.relative_to(HERE).as_posix(): path for path in HERE.rglob("*") if not path.is_dir()}
    there.pop(MANIFEST)
    for name in sorted(listed.keys() | there.keys()):
        if name not in there:
            refuse(f"{name} is not there; {again}")
        if name not in listed:
            refuse(f"{name} is not in {MANIFEST}; remove it: only what was packed is installed")
        if sha256(there[name]) != listed[name]:
            refuse(f"{name} is damaged: it has not the SHA-256 of {MANIFEST}; {again}")
    return manifest


def main():
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "lpkit-venv").absolute()
    if os.path.lexists(target):
        refuse(f"{target} is there already; name a new folder: python3 {sys.argv[0]} FOLDER")
    manifest = checked()
    for what, here in KIND.items():
        if manifest[what] != here:
            refuse(f"these wheels are for {what} {manifest[what]}, and this is {here}; use that one, or pack on a machine like this one")
    try:
        venv.create(target, with_pip=True)
        subprocess.run([target / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", "--find-links", HERE / "wheels",
                        "-c", HERE / "constraints.txt", f"low-precision-kit[{manifest['extras']}]=={manifest['lpkit']}"],
                       env={**os.environ, "PIP_CONFIG_FILE": os.devnull}, check=True)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, (OSError, subprocess.CalledProcessError)):
            refuse(f"the environment could not be made ({error}); on Debian and Ubuntu it needs python3-venv")
        raise
    print(f"{target}/bin/lpkit lab      opens the course\n{target}/bin/lpkit doctor   says what works here")


if __name__ == "__main__":
    main()
